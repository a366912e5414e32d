//! Opened devices, and their properties and those of their ports.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys as ib;

use super::{Gid, checked, patiently, status_error};
use crate::os::error::{Error, Result};
use crate::os::fd::Registered;
use crate::rdma::dl::{RawAsyncEvent, RawGidEntry, Verbs};

/// What kind of network a port is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkLayer {
    /// InfiniBand: addressed by LID, with a subnet manager.
    InfiniBand,
    /// RoCE: addressed by GID, that is by IP address.
    Ethernet,
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "IB",
            Self::Ethernet => "RoCE",
        })
    }
}

/// How a device's packets reach its peer. Only InfiniBand's transport, which RoCE shares, can be connected by
/// exchanging numbers of queue pairs, and has writes with immediates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    /// InfiniBand and RoCE.
    InfiniBand,
    /// iWARP: over TCP. Its queue pairs need a connection manager.
    Iwarp,
    /// A vendor's own, as EFA's and usNIC's: without reliable connections.
    Other,
}

/// The properties of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceFacts {
    /// How its packets travel.
    pub transport: Transport,
    /// The system image GUID as libibverbs gives it: the same for all functions of one card.
    pub guid: u64,
    /// How many ports it has; they are numbered from 1.
    pub ports: u8,
    /// The most queue pairs.
    pub max_qp: i32,
    /// The most outstanding work requests of a queue.
    pub max_qp_wr: u32,
    /// The most entries of a completion queue.
    pub max_cqe: u32,
    /// The most outstanding RDMA reads of a queue pair.
    pub max_rd_atomic: u8,
}

/// The properties of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortFacts {
    /// Whether it can carry traffic.
    pub is_active: bool,
    /// None for a link layer that is neither InfiniBand nor Ethernet, and for one that the driver does not name, as
    /// EFA's.
    pub link_layer: Option<LinkLayer>,
    /// The largest payload of a packet now, as `IBV_MTU_*` (1 to 5 for 256 to 4096 bytes).
    pub active_mtu: u32,
    /// The largest message in bytes.
    pub max_message_bytes: u32,
    /// Entries of the GID table.
    pub gid_count: u32,
    /// The local identifier; 0 for Ethernet.
    pub lid: u16,
    /// The encoded width of the link.
    pub active_width: u8,
    /// The encoded rate of a queue pair.
    pub active_speed: u8,
    /// Whether InfiniBand needs the global routing header here.
    pub needs_grh: bool,
}

/// Something that happened to a device, port or queue outside any work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AsyncEvent {
    /// `IBV_EVENT_*`.
    pub kind: u32,
    /// libibverbs's words for it.
    pub text: &'static str,
    /// The port, or the address of the queue pair or completion queue, whichever the kind is about.
    pub element: u64,
}

/// An opened device.
#[derive(Clone)]
pub(crate) struct Context(Arc<Inner>);

struct Inner {
    name: String,
    verbs: &'static Verbs,
    /// The second descriptor of the context, known to the fork registry. Goes first: it must be out of the registry
    /// before the device is closed.
    async_fd: Registered<Descriptor>,
    raw: Registered<RawContext>,
}

/// A descriptor that another owner closes.
struct Descriptor(RawFd);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

struct RawContext {
    verbs: &'static Verbs,
    raw: NonNull<ib::ibv_context>,
}

// SAFETY: libibverbs's contexts may be used from any thread, several at a time.
unsafe impl Send for RawContext {}
// SAFETY: as above.
unsafe impl Sync for RawContext {}

impl AsRawFd for RawContext {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the context is open as long as this lives.
        unsafe { self.raw.as_ref().cmd_fd }
    }
}

impl Drop for RawContext {
    fn drop(&mut self) {
        // SAFETY: every object made from the context holds it, so none is left.
        let status = unsafe { (self.verbs.close_device)(self.raw.as_ptr()) };
        if status != 0 {
            tracing::warn!("closing an RDMA device failed: {}", io::Error::from_raw_os_error(status.abs()));
        }
    }
}

/// Opens every device of this host that can be opened, in libibverbs's order. The log says why the others could not be
/// opened.
///
/// # Errors
/// When libibverbs cannot list the devices.
pub(crate) fn open_devices(verbs: &'static Verbs) -> Result<Vec<Context>> {
    let mut count = 0;
    let listed = patiently(|| {
        // SAFETY: `count` is valid for the call.
        let list = unsafe { (verbs.get_device_list)(&raw mut count) };
        NonNull::new(list).ok_or_else(io::Error::last_os_error)
    });
    let list = match listed {
        Ok(list) => list.as_ptr(),
        // A kernel without RDMA returns this error; it has no devices.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => return Ok(Vec::new()),
        Err(error) => return Err(Error::system("listing RDMA devices", &error)),
    };
    let mut contexts = Vec::new();
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries.
        let device = unsafe { *list.add(index) };
        match Context::open(verbs, device) {
            Ok(context) => contexts.push(context),
            Err(error) => tracing::warn!("{error}"),
        }
    }
    // SAFETY: from `get_device_list`; opened devices stay usable without the list.
    unsafe { (verbs.free_device_list)(list) };
    Ok(contexts)
}

impl Context {
    fn open(verbs: &'static Verbs, device: *mut ib::ibv_device) -> Result<Self> {
        // SAFETY: a device of a list that is not yet freed; its name is a C string inside it.
        let name = unsafe { CStr::from_ptr((verbs.get_device_name)(device)) }.to_string_lossy().into_owned();
        let raw = patiently(|| {
            Registered::open(|| {
                // SAFETY: as above.
                let raw = NonNull::new(unsafe { (verbs.open_device)(device) }).ok_or_else(io::Error::last_os_error)?;
                Ok(RawContext { verbs, raw })
            })
        });
        let raw = raw.map_err(|error| super::failure(&name, "opening the RDMA device", &error))?;
        // SAFETY: the context is open.
        let fd = unsafe { raw.raw.as_ref().async_fd };
        let async_fd = Registered::open(|| Ok(Descriptor(fd)))
            .map_err(|error| super::failure(&name, "watching the RDMA device", &error))?;
        Ok(Self(Arc::new(Inner { name, verbs, async_fd, raw })))
    }

    /// The device's name, as in `/sys/class/infiniband`.
    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    pub(super) fn verbs(&self) -> &'static Verbs {
        self.0.verbs
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_context {
        self.0.raw.raw.as_ptr()
    }

    /// Whether this is still the process that opened the device, and not a forked child.
    pub(crate) fn is_ours(&self) -> bool {
        self.0.raw.is_ours()
    }

    /// Ends an object of the device, whose failure is only logged. A forked child leaves it to the parent.
    pub(super) fn end(&self, doing: &str, destroy: impl FnOnce(&Verbs) -> i32) {
        let status = if self.is_ours() { destroy(self.verbs()) } else { 0 };
        if status != 0 {
            tracing::warn!("{}", status_error(self.name(), doing, status));
        }
    }

    /// The properties of the device.
    ///
    /// # Errors
    /// When the device does not answer.
    pub(crate) fn facts(&self) -> Result<DeviceFacts> {
        let mut attr = MaybeUninit::<ib::ibv_device_attr>::zeroed();
        // SAFETY: an open context, and room for the answer.
        patiently(|| checked(unsafe { (self.0.verbs.query_device)(self.raw(), attr.as_mut_ptr()) }))
            .map_err(|error| super::failure(self.name(), "asking for the properties", &error))?;
        // SAFETY: zeroes are a valid value, and the call filled it in.
        let attr = unsafe { attr.assume_init() };
        let number = |value: i32| u32::try_from(value).unwrap_or(0);
        Ok(DeviceFacts {
            transport: self.transport(),
            guid: attr.sys_image_guid,
            ports: attr.phys_port_cnt,
            max_qp: attr.max_qp,
            max_qp_wr: number(attr.max_qp_wr),
            max_cqe: number(attr.max_cqe),
            max_rd_atomic: u8::try_from(attr.max_qp_rd_atom).unwrap_or(u8::MAX),
        })
    }

    fn transport(&self) -> Transport {
        // SAFETY: the context is open, and its device stays as long as that. The number is read as such, because
        // `rdma-sys` has a closed enumeration in its place.
        let number = unsafe { (&raw const (*(*self.raw()).device).transport_type).cast::<i32>().read() };
        match number {
            0 => Transport::InfiniBand,
            1 => Transport::Iwarp,
            _ => Transport::Other,
        }
    }

    /// The properties of a port; ports are numbered from 1.
    ///
    /// # Errors
    /// When there is no such port.
    pub(crate) fn port(&self, number: u8) -> Result<PortFacts> {
        // The call fills in only the fields that its symbol version knows: the others must be zero before.
        let mut attr = MaybeUninit::<ib::ibv_port_attr>::zeroed();
        // SAFETY: an open context, and room for the answer.
        patiently(|| checked(unsafe { (self.0.verbs.query_port)(self.raw(), number, attr.as_mut_ptr()) }))
            .map_err(|error| super::failure(self.name(), &format!("asking for port {number}"), &error))?;
        // SAFETY: zeroes are a valid value, and the call filled it in.
        let attr = unsafe { attr.assume_init() };
        Ok(PortFacts {
            is_active: attr.state == ib::ibv_port_state::IBV_PORT_ACTIVE,
            link_layer: match u32::from(attr.link_layer) {
                1 => Some(LinkLayer::InfiniBand),
                2 => Some(LinkLayer::Ethernet),
                _ => None,
            },
            active_mtu: attr.active_mtu,
            max_message_bytes: attr.max_msg_sz,
            gid_count: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
            lid: attr.lid,
            active_width: attr.active_width,
            active_speed: attr.active_speed,
            // IBV_QPF_GRH_REQUIRED
            needs_grh: attr.flags & 1 != 0,
        })
    }

    /// An entry of a port's GID table; all zeroes when the entry is free.
    ///
    /// # Errors
    /// When there is no such entry.
    pub(crate) fn gid(&self, port: u8, index: u32) -> Result<Gid> {
        let mut gid = ib::ibv_gid { raw: [0; 16] };
        let position = i32::try_from(index).unwrap_or(i32::MAX);
        let asked = patiently(|| {
            // SAFETY: an open context, and room for the answer.
            let status = unsafe { (self.0.verbs.query_gid)(self.raw(), port, position, &raw mut gid) };
            if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
        asked
            .map_err(|error| super::failure(self.name(), &format!("asking for GID {index} of port {port}"), &error))?;
        // SAFETY: every bit pattern is a valid GID.
        Ok(unsafe { gid.raw })
    }

    /// The used entries of the GID tables of all ports, at most this many; none when this libibverbs or kernel does not
    /// report them.
    pub(crate) fn gid_entries(&self, most: usize) -> Option<Vec<RawGidEntry>> {
        let ask = self.0.verbs.query_gid_table?;
        let blank = RawGidEntry { gid: [0; 16], index: 0, port: 0, kind: 0, interface: 0 };
        let mut entries = vec![blank; most];
        let asked = patiently(|| {
            // SAFETY: an open context, and room for this many entries of that size.
            let count = unsafe { ask(self.raw(), entries.as_mut_ptr(), most, 0, size_of::<RawGidEntry>()) };
            let code = i32::try_from(count.unsigned_abs()).unwrap_or(libc::EIO);
            usize::try_from(count).map_err(|_| io::Error::from_raw_os_error(code))
        });
        entries.truncate(asked.ok()?);
        Some(entries)
    }

    /// The real speed of a port in Mbit/s, also of several bonded ones; none when this libibverbs or device does not
    /// report it.
    pub(crate) fn port_mbps(&self, number: u8) -> Option<u32> {
        let ask = self.0.verbs.query_port_speed?;
        let mut hundreds = 0_u64;
        // SAFETY: an open context, and room for the answer, which is in units of 100 Mbit/s.
        patiently(|| checked(unsafe { ask(self.raw(), number.into(), &raw mut hundreds) })).ok()?;
        u32::try_from(hundreds.checked_mul(100)?).ok().filter(|speed| *speed > 0)
    }

    /// The descriptor that becomes readable when an asynchronous event waits.
    pub(crate) fn async_fd(&self) -> RawFd {
        self.0.async_fd.as_raw_fd()
    }

    /// Makes [`Context::next_event`] return at once when there is none.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn set_events_nonblocking(&self) -> Result<()> {
        set_nonblocking(self.async_fd()).map_err(|error| super::failure(self.name(), "watching for events", &error))
    }

    /// The next asynchronous event, or none (also when the device is gone). The event is acknowledged when `handle`
    /// has returned: until then the queue that it is about cannot be destroyed.
    pub(crate) fn next_event<T>(&self, handle: impl FnOnce(AsyncEvent) -> T) -> Option<T> {
        let mut event = RawAsyncEvent { element: 0, kind: 0 };
        // SAFETY: an open context, and room for the answer.
        while unsafe { (self.0.verbs.get_async_event)(self.raw(), &raw mut event) } != 0 {
            // No thread would query again for an event that was there before the interruption.
            if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return None;
            }
        }
        let text = self.0.verbs.event_text(event.kind);
        let answer = handle(AsyncEvent { kind: event.kind, text, element: event.element });
        // SAFETY: got just above, acknowledged once.
        unsafe { (self.0.verbs.ack_async_event)(&raw mut event) };
        Some(answer)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.0.name).finish()
    }
}

/// Makes reading a descriptor of libibverbs return at once.
fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: reading and setting the flags of a descriptor touches no memory of ours.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
