//! A descriptor that becomes readable when a completion queue has an entry.

#![cfg_attr(not(test), allow(dead_code, reason = "tests on real verbs wait for completions and look at queue pairs"))]

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys as ib;

use super::Context;
use super::context::set_nonblocking;
use crate::os::error::Result;
use crate::os::fd::Registered;

/// Becomes readable when a completion queue that was armed gets an entry. So a worker can sleep instead of polling.
#[derive(Clone)]
pub(crate) struct CompletionChannel(Arc<Registered<RawChannel>>);

pub(super) struct RawChannel {
    context: Context,
    raw: NonNull<ib::ibv_comp_channel>,
}

// SAFETY: libibverbs's objects may be used from any thread, several at a time.
unsafe impl Send for RawChannel {}
// SAFETY: as above.
unsafe impl Sync for RawChannel {}

impl AsRawFd for RawChannel {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the channel lives as long as this.
        unsafe { self.raw.as_ref().fd }
    }
}

impl Drop for RawChannel {
    fn drop(&mut self) {
        // Runs only in the process that made it: `Registered` ensures that.
        // SAFETY: every completion queue of the channel holds it, so none is left.
        unsafe { (self.context.verbs().destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

impl CompletionChannel {
    /// A channel of a device. Reading it never blocks.
    ///
    /// # Errors
    /// When descriptors run out.
    pub(crate) fn new(context: &Context) -> Result<Self> {
        let made = Registered::open(|| {
            // SAFETY: an open context.
            let raw = unsafe { (context.verbs().create_comp_channel)(context.raw()) };
            let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
            let channel = RawChannel { context: context.clone(), raw };
            set_nonblocking(channel.as_raw_fd())?;
            Ok(channel)
        });
        let made = made.map_err(|error| super::failure(context.name(), "making a completion channel", &error))?;
        Ok(Self(Arc::new(made)))
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_comp_channel {
        self.0.raw.as_ptr()
    }
}

impl AsRawFd for CompletionChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionChannel").field(&self.as_raw_fd()).finish()
    }
}
