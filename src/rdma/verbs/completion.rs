//! Completion queues and their entries.

use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_sys as ib;

use super::{Context, last_error};
use crate::os::error::{Error, Result};
use crate::rdma::dl::Verbs;

/// Where finished work requests are reported. It must be large enough for everything that can finish between two polls:
/// an overrun ends every queue pair of the queue.
#[derive(Clone)]
pub(crate) struct CompletionQueue(Arc<RawQueue>);

struct RawQueue {
    context: Context,
    raw: NonNull<ib::ibv_cq>,
}

// SAFETY: libibverbs's objects may be used from any thread, several at a time.
unsafe impl Send for RawQueue {}
// SAFETY: as above.
unsafe impl Sync for RawQueue {}

/// What kind of work request finished. Only meaningful for those that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opcode {
    /// An RDMA write of this side, with or without an immediate.
    Write,
    /// An RDMA read of this side.
    Read,
    /// A send of this side.
    Send,
    /// A receive that a send of the peer used up.
    Receive,
    /// A receive that a write with immediate of the peer used up.
    ReceiveImmediate,
    /// Another kind, which Towline does not post.
    Other(u32),
}

/// An entry of a completion queue.
#[repr(transparent)]
pub(crate) struct Completion(ib::ibv_wc);

impl Completion {
    /// The id with which the work request was posted.
    pub(crate) fn id(&self) -> u64 {
        self.0.wr_id
    }

    /// Whether it succeeded.
    pub(crate) fn is_ok(&self) -> bool {
        self.0.status == ib::ibv_wc_status::IBV_WC_SUCCESS
    }

    /// `IBV_WC_*`.
    pub(crate) fn status(&self) -> u32 {
        self.0.status
    }

    /// Whether it failed only because its queue pair was already in error.
    pub(crate) fn is_flushed(&self) -> bool {
        self.0.status == ib::ibv_wc_status::IBV_WC_WR_FLUSH_ERR
    }

    /// The device's own code for the failure.
    pub(crate) fn vendor_code(&self) -> u32 {
        self.0.vendor_err
    }

    /// Which queue pair it belonged to.
    pub(crate) fn queue_pair(&self) -> u32 {
        self.0.qp_num
    }

    /// The kind of a work request that succeeded.
    pub(crate) fn opcode(&self) -> Opcode {
        use ib::ibv_wc_opcode as op;
        match self.0.opcode {
            op::IBV_WC_RDMA_WRITE => Opcode::Write,
            op::IBV_WC_RDMA_READ => Opcode::Read,
            op::IBV_WC_SEND => Opcode::Send,
            op::IBV_WC_RECV => Opcode::Receive,
            op::IBV_WC_RECV_RDMA_WITH_IMM => Opcode::ReceiveImmediate,
            other => Opcode::Other(other),
        }
    }

    /// The bytes that a receive got.
    pub(crate) fn length(&self) -> u32 {
        self.0.byte_len
    }

    /// The immediate of a receive that got one.
    pub(crate) fn immediate(&self) -> u32 {
        // SAFETY: both members of the union are numbers of 32 bits.
        u32::from_be(unsafe { self.0.imm_data_invalidated_rkey_union.imm_data })
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion")
            .field("id", &self.id())
            .field("status", &self.status())
            .field("queue_pair", &self.queue_pair())
            .finish_non_exhaustive()
    }
}

impl CompletionQueue {
    /// A queue of at least `entries`, which is polled.
    ///
    /// # Errors
    /// When the device has no more, or none so large.
    pub(crate) fn new(context: &Context, entries: u32) -> Result<Self> {
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        let (no_cookie, no_channel) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: an open context, and no channel.
        let raw = unsafe { (context.verbs().create_cq)(context.raw(), entries, no_cookie, no_channel, 0) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| last_error(context.name(), &format!("making a completion queue of {entries} entries")))?;
        Ok(Self(Arc::new(RawQueue { context: context.clone(), raw })))
    }

    /// The device.
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    /// The address by which asynchronous events identify it.
    pub(crate) fn element(&self) -> u64 {
        self.raw() as u64
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_cq {
        self.0.raw.as_ptr()
    }

    /// How many entries it really has.
    pub(crate) fn entries(&self) -> u32 {
        // SAFETY: the queue lives as long as this.
        u32::try_from(unsafe { self.0.raw.as_ref().cqe }).unwrap_or(0)
    }

    /// Takes finished work requests off the queue, at most as many as there is room for, and gives them in order.
    /// Never waits. One thread at a time makes sense: the device's driver locks.
    ///
    /// # Errors
    /// When the queue is broken, which an overrun does.
    #[inline]
    pub(crate) fn poll<'a>(&self, room: &'a mut [MaybeUninit<Completion>]) -> Result<&'a [Completion]> {
        let most = i32::try_from(room.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue lives as long as this; `Completion` is transparent over what the call writes.
        let count = unsafe { ib::ibv_poll_cq(self.raw(), most, room.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| is_broken())?;
        // SAFETY: the call filled in that many entries from the front.
        Ok(unsafe { std::slice::from_raw_parts(room.as_ptr().cast(), count) })
    }
}

#[cold]
fn is_broken() -> Error {
    Error::system("polling a completion queue", &std::io::Error::last_os_error())
        .with_hint("the queue is broken; the device's log says why")
}

impl Drop for RawQueue {
    fn drop(&mut self) {
        // SAFETY: every queue pair of the queue holds it, so none is left.
        let destroy = |verbs: &Verbs| unsafe { (verbs.destroy_cq)(self.raw.as_ptr()) };
        self.context.end("ending a completion queue", destroy);
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("device", &self.context().name())
            .field("entries", &self.entries())
            .finish()
    }
}
