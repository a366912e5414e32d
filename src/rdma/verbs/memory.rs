//! Protection domains, and memory that a device may reach.

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys as ib;

use super::{Context, is_momentary, last_error, patiently};
use crate::os::error::{Error, Result};
use crate::rdma::dl::Verbs;

/// The space in which queue pairs may use memory regions.
#[derive(Clone)]
pub(crate) struct ProtectionDomain(Arc<RawDomain>);

struct RawDomain {
    context: Context,
    raw: NonNull<ib::ibv_pd>,
}

// SAFETY: libibverbs's objects may be used from any thread, several at a time.
unsafe impl Send for RawDomain {}
// SAFETY: as above.
unsafe impl Sync for RawDomain {}

impl ProtectionDomain {
    /// A protection domain of a device.
    ///
    /// # Errors
    /// When the device has no more.
    pub(crate) fn new(context: &Context) -> Result<Self> {
        let made = patiently(|| {
            // SAFETY: an open context.
            let raw = unsafe { (context.verbs().alloc_pd)(context.raw()) };
            NonNull::new(raw).ok_or_else(io::Error::last_os_error)
        });
        let raw = made.map_err(|error| super::failure(context.name(), "making a protection domain", &error))?;
        Ok(Self(Arc::new(RawDomain { context: context.clone(), raw })))
    }

    /// The device.
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_pd {
        self.0.raw.as_ptr()
    }

    /// Whether the kernel and the driver accept memory through DMA-BUF descriptors. Tested by an attempt with an
    /// invalid descriptor: with support, the error is about the descriptor, without support about the call.
    pub(crate) fn takes_dmabuf(&self) -> bool {
        let Some(register) = self.context().verbs().reg_dmabuf_mr else { return false };
        let asked = patiently(|| {
            // SAFETY: the arguments describe no memory at all, and the descriptor is invalid.
            let raw = unsafe { register(self.raw(), 0, 0, 0, -1, 0) };
            debug_assert!(raw.is_null());
            if raw.is_null() { Err(io::Error::last_os_error()) } else { Ok(()) }
        });
        // A kernel that is out of memory has not shown whether it supports the call.
        let is_no = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT));
        asked.is_err_and(|error| !is_no(&error) && !is_momentary(&error))
    }
}

impl Drop for RawDomain {
    fn drop(&mut self) {
        // SAFETY: every region and queue pair of the domain holds it, so none is left.
        let destroy = |verbs: &Verbs| unsafe { (verbs.dealloc_pd)(self.raw.as_ptr()) };
        self.context.end("ending a protection domain", destroy);
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProtectionDomain").field(&self.0.context.name()).finish()
    }
}

/// The access of the two sides to a memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    /// Whether the device may reorder its writes over PCIe where nothing orders them. Faster on some hosts; a flag that
    /// a processor polls must be in a region without it.
    pub relaxed_ordering: bool,
}

impl Access {
    fn flags(self) -> u32 {
        use ib::ibv_access_flags as flag;
        let mut flags = flag::IBV_ACCESS_LOCAL_WRITE | flag::IBV_ACCESS_REMOTE_WRITE | flag::IBV_ACCESS_REMOTE_READ;
        if self.relaxed_ordering {
            // An "optional" access: devices that cannot do it ignore it.
            flags |= flag::IBV_ACCESS_RELAXED_ORDERING;
        }
        flags.0
    }
}

/// Memory behind a DMA-BUF descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DmaBuf {
    /// The descriptor. It may be closed once the region is made.
    pub fd: RawFd,
    /// Where the region starts in it.
    pub offset: u64,
}

/// Memory that a device may read and write.
pub(crate) struct MemoryRegion {
    domain: ProtectionDomain,
    raw: NonNull<ib::ibv_mr>,
}

// SAFETY: libibverbs's objects may be used from any thread, several at a time.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Lets the device of `domain` reach `length` bytes at `address`, which is also their address on the network.
    ///
    /// A wrong address is an error but not dangerous: the kernel looks the pages up. But a peer that gets the region's
    /// key may write there.
    ///
    /// # Errors
    /// When the pages cannot be pinned: not mapped, over the limit on locked memory, or GPU memory without a
    /// peer-memory module.
    pub(crate) fn new(
        domain: &ProtectionDomain,
        address: usize,
        length: usize,
        access: Access,
        dmabuf: Option<DmaBuf>,
    ) -> Result<Self> {
        let verbs = domain.context().verbs();
        let name = domain.context().name();
        let flags = access.flags();
        let pointer = address as *mut c_void;
        let raw = match (dmabuf, verbs.reg_mr_iova2) {
            (Some(buffer), _) => {
                let register = verbs
                    .reg_dmabuf_mr
                    .ok_or_else(|| Error::usage("this libibverbs cannot register memory through DMA-BUF"))?;
                // SAFETY: the kernel checks the descriptor and the range.
                unsafe { register(domain.raw(), buffer.offset, length, address as u64, buffer.fd, flags as i32) }
            }
            // SAFETY: the kernel checks the range.
            (None, Some(register)) if access.relaxed_ordering => unsafe {
                register(domain.raw(), pointer, length, address as u64, flags)
            },
            // The old call refuses optional flags.
            // SAFETY: the kernel checks the range.
            _ => unsafe {
                let flags = Access { relaxed_ordering: false }.flags();
                (verbs.reg_mr)(domain.raw(), pointer, length, flags as i32)
            },
        };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let doing = match dmabuf {
                Some(_) => format!("registering {length} bytes at {address:#x} through DMA-BUF"),
                None => format!("registering {length} bytes at {address:#x}"),
            };
            last_error(name, &doing)
        })?;
        Ok(Self { domain: domain.clone(), raw })
    }

    /// The key for work requests of this side.
    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region lives as long as this.
        unsafe { self.raw.as_ref().lkey }
    }

    /// The key for work requests of the peer.
    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: made by a `reg_mr` call and dropped once.
        let destroy = |verbs: &Verbs| unsafe { (verbs.dereg_mr)(self.raw.as_ptr()) };
        self.domain.context().end("ending a memory registration", destroy);
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("device", &self.domain.context().name())
            .field("local_key", &self.local_key())
            .finish_non_exhaustive()
    }
}
