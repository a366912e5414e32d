//! A port as the process uses it: its protection domain, its registrations, and its state.
//!
//! Adapters are made once for the process and shared by all connections, so a registration is valid for all of them.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::alarm::Alarm;
use super::devices::OpenPort;
use super::mr_cache::{Cache, Lease, PageRange};
use super::pages::{Pages, Zeroed};
use super::verbs::{Access, DmaBuf, MemoryRegion, ProtectionDomain};
use crate::os::error::{Cause, Error, Result};

/// The kind of memory, for its registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Memory that the processor can access.
    Host,
    /// GPU memory by its address, through a peer-memory module.
    Gpu,
    /// GPU memory behind a DMA-BUF descriptor.
    DmaBuf,
}

/// The GID is not in the table.
const NOWHERE: u32 = u32::MAX;

/// An active port, opened.
pub(crate) struct Adapter {
    /// Its number, in NCCL's numbering of single devices.
    pub number: i32,
    /// What discovery found out about it.
    pub open: OpenPort,
    /// The protection domain of its queue pairs and regions.
    pub domain: ProtectionDomain,
    /// The kernel module through which it reaches GPU memory by its address.
    pub peer_memory: Option<&'static str>,
    access: Access,
    regions: Cache<Memory, MemoryRegion>,
    port_is_down: AtomicBool,
    is_dead: AtomicBool,
    gid_index: AtomicU32,
    /// The connection that an event of a queue belongs to, by the queue's address in libibverbs.
    concerned: Mutex<Vec<(u64, Weak<Mishap>)>>,
}

/// The events of a connection's queues: their addresses in libibverbs, and the texts of the events.
#[derive(Debug, Default)]
pub(crate) struct Mishap {
    is_any: AtomicBool,
    said: Mutex<Vec<(u64, String)>>,
    alarm: Alarm,
}

impl Mishap {
    /// No event yet. When one arrives, or a port in use goes down or comes back, `alarm` is raised.
    pub(crate) fn new(alarm: Alarm) -> Self {
        Self { alarm, ..Self::default() }
    }

    fn said(&self) -> MutexGuard<'_, Vec<(u64, String)>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, queue: u64, text: &str) {
        self.said().push((queue, text.to_owned()));
        self.is_any.store(true, Ordering::Release);
        self.alarm.raise();
    }

    /// Whether there are events that were not taken yet.
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }

    /// The first event, if there is one.
    #[inline]
    pub(crate) fn first(&self) -> Option<String> {
        if self.is_any() { self.said().first().map(|(_, text)| text.clone()) } else { None }
    }

    /// All events since the last call.
    pub(crate) fn take(&self) -> Vec<(u64, String)> {
        if self.is_any.swap(false, Ordering::AcqRel) { std::mem::take(&mut *self.said()) } else { Vec::new() }
    }
}

/// The most devices of one side of a connection.
pub(crate) const MAX_DEVICES: usize = 8;

/// The ports that a device of NCCL's is made of: 1 to [`MAX_DEVICES`].
pub(crate) type Adapters = Arc<[Arc<Adapter>]>;

impl Adapter {
    /// An adapter for port `number`. `relaxed_ordering`: its devices may reorder writes of data over PCIe.
    ///
    /// # Errors
    /// When the device has no protection domain left.
    pub(crate) fn new(
        number: i32,
        open: OpenPort,
        peer_memory: Option<&'static str>,
        relaxed_ordering: bool,
    ) -> Result<Self> {
        let domain = ProtectionDomain::new(&open.context)?;
        let access = Access { relaxed_ordering };
        Ok(Self {
            gid_index: AtomicU32::new(open.gid_index),
            number,
            open,
            domain,
            peer_memory,
            access,
            regions: Cache::new(),
            port_is_down: AtomicBool::new(false),
            is_dead: AtomicBool::new(false),
            concerned: Mutex::new(Vec::new()),
        })
    }

    /// Device and port, for messages.
    pub(crate) fn name(&self) -> String {
        self.open.port.name()
    }

    /// Memory of Towline's own, in which writes must arrive in order.
    ///
    /// # Errors
    /// When it cannot be pinned.
    pub(crate) fn own_region<T: Zeroed>(&self, pages: &Pages<T>) -> Result<MemoryRegion> {
        let access = Access { relaxed_ordering: false };
        MemoryRegion::new(&self.domain, pages.address() as usize, pages.bytes(), access, None)
    }

    /// Events of this queue are no longer reported.
    pub(crate) fn forget(&self, queue: u64) {
        self.concerned().retain(|(of, _)| *of != queue);
    }

    fn lease(&self, range: PageRange, kind: Memory, dmabuf: Option<DmaBuf>) -> Result<Lease<Memory, MemoryRegion>> {
        self.regions.lease(range, kind, |range| match dmabuf {
            Some(buffer) => MemoryRegion::new(&self.domain, range.start(), range.bytes(), self.access, Some(buffer)),
            None => MemoryRegion::new(&self.domain, range.start(), range.bytes(), self.access, None),
        })
    }

    /// Whether it accepts GPU memory.
    pub(crate) fn reaches_gpus(&self) -> bool {
        self.peer_memory.is_some() || self.open.takes_dmabuf
    }

    /// The port went down or came back.
    pub(crate) fn set_port_down(&self, down: bool) {
        self.port_is_down.store(down, Ordering::Relaxed);
        self.alarm_all();
    }

    /// Whether the port is down, by the last event.
    pub(crate) fn is_port_down(&self) -> bool {
        self.port_is_down.load(Ordering::Relaxed)
    }

    /// Its GID's index in the port's table. An address that was removed while queue pairs used it gets another index
    /// when it is added again. The index for those queue pairs is updated.
    pub(crate) fn gid_index(&self) -> u32 {
        match self.gid_index.load(Ordering::Relaxed) {
            NOWHERE => self.open.gid_index,
            index => index,
        }
    }

    /// Sets the index of its GID; None: it is not in the table. Returns the previous index, if there was one.
    pub(crate) fn set_gid_index(&self, index: Option<u32>) -> Option<u32> {
        let before = self.gid_index.swap(index.unwrap_or(NOWHERE), Ordering::Relaxed);
        (before != NOWHERE).then_some(before)
    }

    /// The device has failed for good.
    pub(crate) fn set_dead(&self) {
        self.is_dead.store(true, Ordering::Release);
        self.alarm_all();
    }

    /// Whether the device has failed for good.
    pub(crate) fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Acquire)
    }

    /// Whether nothing can be sent over it now.
    pub(crate) fn is_out(&self) -> bool {
        self.is_port_down() || self.is_dead()
    }

    fn concerned(&self) -> MutexGuard<'_, Vec<(u64, Weak<Mishap>)>> {
        self.concerned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every connection with a queue here must poll at once. The control thread polls by itself, but only up to eight
    /// times a second.
    fn alarm_all(&self) {
        let concerned = self.concerned();
        concerned.iter().filter_map(|(_, mishap)| mishap.upgrade()).for_each(|mishap| mishap.alarm.raise());
    }

    /// From now on a failure of this queue is reported there, as long as that object exists, and an event of the port
    /// raises its alarm.
    pub(crate) fn concern(&self, queue: u64, mishap: &Arc<Mishap>) {
        let mut concerned = self.concerned();
        // Removes queues that have ended; a new one may have the address of an old one.
        concerned.retain(|(_, mishap)| mishap.strong_count() > 0);
        concerned.push((queue, Arc::downgrade(mishap)));
    }

    /// A queue has failed. Returns whether a connection was notified.
    pub(crate) fn queue_failed(&self, queue: u64, text: &str) -> bool {
        let concerned = self.concerned();
        let mut is_reported = false;
        for mishap in concerned.iter().filter(|(of, _)| *of == queue).filter_map(|(_, mishap)| mishap.upgrade()) {
            mishap.add(queue, text);
            is_reported = true;
        }
        is_reported
    }
}

/// Memory of Towline's own, registered with every adapter of a device; see [`Adapter::own_region`].
///
/// # Errors
/// When it cannot be pinned.
pub(crate) fn own_regions<T: Zeroed>(adapters: &Adapters, pages: &Pages<T>) -> Result<Vec<MemoryRegion>> {
    adapters.iter().map(|adapter| adapter.own_region(pages)).collect()
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Adapter").field(&self.name()).finish()
    }
}

/// Memory that the adapters of a device may reach.
pub(crate) struct Registration {
    adapters: Adapters,
    /// By adapter; None for one that had failed: its queue pairs are no longer used.
    leases: Vec<Option<Lease<Memory, MemoryRegion>>>,
    /// The kind of the memory.
    pub kind: Memory,
    start: u64,
    end: u64,
}

impl Registration {
    /// Registers `bytes` at `address` with every adapter of a device that has not failed.
    ///
    /// # Errors
    /// When the pages cannot be pinned, or every adapter has failed.
    pub(crate) fn new(
        adapters: &Adapters,
        address: u64,
        bytes: usize,
        kind: Memory,
        dmabuf: Option<DmaBuf>,
    ) -> Result<Self> {
        let outside = || Error::argument(format!("{bytes} bytes at {address:#x} leave the address space"));
        let range = PageRange::covering(address as usize, bytes).ok_or_else(outside)?;
        // The descriptor's offset is that of the first byte; the region starts with its page.
        let before = address - range.start() as u64;
        let dmabuf = dmabuf
            .map(|buffer| match buffer.offset.checked_sub(before) {
                Some(offset) => Ok(DmaBuf { offset, ..buffer }),
                None => {
                    Err(Error::argument(format!("{address:#x} lies {before} bytes into its page, before its DMA-BUF")))
                }
            })
            .transpose()?;
        if adapters.iter().all(|adapter| adapter.is_dead()) {
            let names: Vec<String> = adapters.iter().map(|adapter| adapter.name()).collect();
            return Err(Error::new(Cause::System, format!("the RDMA device of {} failed", names.join(", ")))
                .with_hint("look at the kernel's log"));
        }
        let lease = |adapter: &Arc<Adapter>| match adapter.is_dead() {
            true => Ok(None),
            false => adapter.lease(range, kind, dmabuf).map(Some),
        };
        let leases = adapters.iter().map(lease).collect::<Result<_>>()?;
        Ok(Self { adapters: Arc::clone(adapters), leases, kind, start: address, end: address + bytes as u64 })
    }

    /// Whether it may be used for these bytes over these adapters.
    ///
    /// # Errors
    /// When it is another device's, or does not cover the bytes.
    #[inline]
    pub(crate) fn check(&self, adapters: &Adapters, address: u64, bytes: u64) -> Result<()> {
        if !Arc::ptr_eq(&self.adapters, adapters) && !self.serves(adapters) {
            return Err(Error::argument("the memory was registered with a connection over another device"));
        }
        // A range of zero bytes reads and writes nothing, wherever it is.
        if bytes > 0 && (address < self.start || address.checked_add(bytes).is_none_or(|end| end > self.end)) {
            return Err(Error::argument(format!(
                "the {bytes} bytes at {address:#x} are not within the registered {} at {:#x}",
                self.end - self.start,
                self.start
            )));
        }
        Ok(())
    }

    /// Its first byte, and the one behind its last.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.start, self.end)
    }

    fn serves(&self, adapters: &Adapters) -> bool {
        self.adapters.len() == adapters.len() && self.adapters.iter().zip(&**adapters).all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// The key for work requests on the adapter with this index in the device.
    #[inline]
    pub(crate) fn local_key(&self, adapter: usize) -> u32 {
        self.leases[adapter].as_ref().map_or(0, |lease| lease.local_key())
    }

    /// The peer's keys, by adapter.
    #[inline]
    pub(crate) fn remote_keys(&self) -> [u32; MAX_DEVICES] {
        let mut keys = [0; MAX_DEVICES];
        for (key, lease) in keys.iter_mut().zip(&self.leases) {
            *key = lease.as_ref().map_or(0, |lease| lease.remote_key());
        }
        keys
    }
}
