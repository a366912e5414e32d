//! NCCL's profiler callback, played by the host: records the network events that a plugin reports.
//!
//! As in NCCL, START follows the transfer's profiler handle and the other kinds follow only the event handle that
//! START returned. Guarantees: every event that was started is kept with what followed it, per transfer. It does not
//! check the order of calls; tests do.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::nccl::ffi;

/// The plugin's data about an event, for the identifiers that NCCL itself knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Description {
    /// NCCL's socket part, version 1.
    Socket {
        /// The descriptor.
        fd: i32,
        /// 0 for a send, 1 for a receive.
        op: i32,
        /// Bytes.
        length: usize,
    },
    /// NCCL's queue-pair part, version 1.
    QueuePair {
        /// The device.
        device: i32,
        /// The work request.
        wr_id: u64,
        /// The verbs opcode.
        opcode: i32,
        /// The queue pair.
        number: i32,
        /// Bytes.
        length: usize,
    },
    /// Another plugin's own, or none given.
    Other,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The plugin's identifier and struct version.
    pub plugin_id: i64,
    /// What START described.
    pub description: Description,
    /// When START came.
    pub started: Instant,
    /// The kinds of the calls after START, in order.
    pub followed_by: Vec<i32>,
}

impl Event {
    /// Whether a STOP came.
    #[cfg(test)]
    pub(crate) fn is_stopped(&self) -> bool {
        let stops = [ffi::ncclProfilerNetEventStop, ffi::ncclProfilerNetEventUpdateAndStop];
        self.followed_by.iter().any(|kind| stops.contains(kind))
    }
}

type Events = Arc<Mutex<Vec<Event>>>;

/// The profiler's side of one transfer: give [`Transfer::handle`] to `isend` or as a part of `irecv`.
///
/// It must live until the request is over, as in NCCL.
#[derive(Debug)]
pub struct Transfer {
    // Boxed, so that the handle survives a move of the Transfer.
    #[allow(clippy::redundant_allocation, reason = "the handle is the address of the Arc")]
    events: Box<Events>,
}

impl Transfer {
    /// A transfer without events.
    #[allow(clippy::new_without_default, reason = "a handle is made on purpose")]
    pub fn new() -> Self {
        Self { events: Box::default() }
    }

    /// The handle for the plugin.
    pub fn handle(&self) -> *mut c_void {
        (&raw const *self.events).cast_mut().cast()
    }

    /// What was reported so far.
    pub fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What an event handle points to. It is never freed: a late call must find it.
struct Started {
    events: Events,
    index: usize,
}

/// The callback that records into [`Transfer`]s, for [`super::Init::profiler`].
pub fn callback() -> ffi::ncclProfilerCallback_t {
    Some(record)
}

/// A callback like that of an NCCL without profiler: it returns success and no event handle.
pub(crate) fn ignoring_callback() -> ffi::ncclProfilerCallback_t {
    Some(ignore)
}

unsafe extern "C" fn ignore(
    _event: *mut *mut c_void,
    _kind: c_int,
    _transfer: *mut c_void,
    _plugin_id: i64,
    _description: *mut c_void,
) -> ffi::ncclResult_t {
    ffi::ncclSuccess
}

unsafe extern "C" fn record(
    event: *mut *mut c_void,
    kind: c_int,
    transfer: *mut c_void,
    plugin_id: i64,
    description: *mut c_void,
) -> ffi::ncclResult_t {
    if event.is_null() {
        return ffi::ncclInvalidArgument;
    }
    if kind == ffi::ncclProfilerNetEventStart {
        if transfer.is_null() {
            // NCCL would crash here; a test rather reads a code.
            return ffi::ncclInvalidArgument;
        }
        // SAFETY: a transfer handle is the address of the `Events` of a living `Transfer`.
        let events = unsafe { &*transfer.cast::<Events>() };
        let mut list = events.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the data have the type of the plugin's identifier.
        let description = unsafe { describe(plugin_id, description) };
        list.push(Event { plugin_id, description, started: Instant::now(), followed_by: Vec::new() });
        let started = Box::leak(Box::new(Started { events: Arc::clone(events), index: list.len() - 1 }));
        // SAFETY: `event` points to where the plugin keeps the handle.
        unsafe { *event = (&raw mut *started).cast() };
        return ffi::ncclSuccess;
    }
    // SAFETY: as above.
    let started = unsafe { *event };
    if started.is_null() {
        return ffi::ncclInvalidArgument;
    }
    // SAFETY: a handle that is not NULL was made by START and never freed.
    let started = unsafe { &*started.cast::<Started>() };
    let mut list = started.events.lock().unwrap_or_else(PoisonError::into_inner);
    list[started.index].followed_by.push(kind);
    ffi::ncclSuccess
}

/// # Safety
/// `description` is NULL or points to the struct that `plugin_id` names.
unsafe fn describe(plugin_id: i64, description: *mut c_void) -> Description {
    const SOCKET: i64 = (ffi::NCCL_PROFILER_NET_TYPE_SOCK | ffi::NCCL_PROFILER_NET_SOCKET_VER) as i64;
    const QUEUE_PAIR: i64 = (ffi::NCCL_PROFILER_NET_TYPE_IB | ffi::NCCL_PROFILER_NET_IB_VER) as i64;
    match plugin_id {
        _ if description.is_null() => Description::Other,
        SOCKET => {
            // SAFETY: the caller's promise.
            let sock = unsafe { (*description.cast::<ffi::ncclProfilerNetSockDescr_v1_t>()).sock };
            Description::Socket { fd: sock.fd, op: sock.op, length: sock.length }
        }
        QUEUE_PAIR => {
            // SAFETY: the caller's promise.
            let qp = unsafe { (*description.cast::<ffi::ncclProfilerNetIbDescr_v1_t>()).qp };
            let (device, wr_id, opcode) = (qp.device, qp.wr_id, qp.opcode);
            Description::QueuePair { device, wr_id, opcode, number: qp.qpNum, length: qp.length }
        }
        _ => Description::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::null_mut;

    #[test]
    fn an_event_is_kept_with_what_followed_it() {
        let transfer = Transfer::new();
        let call = callback().unwrap();
        let id = (ffi::NCCL_PROFILER_NET_TYPE_SOCK | ffi::NCCL_PROFILER_NET_SOCKET_VER) as i64;
        let sock = ffi::ncclProfilerNetSockPart_v1_t { fd: 7, op: 1, length: 4096 };
        let mut described = ffi::ncclProfilerNetSockDescr_v1_t { type_: 0, sock };
        let mut handle = null_mut();
        // SAFETY: the handles are as the callback wants them.
        unsafe {
            assert_eq!(call(&mut handle, 0, transfer.handle(), id, (&raw mut described).cast()), ffi::ncclSuccess);
            assert!(!transfer.events()[0].is_stopped());
            assert_eq!(call(&mut handle, 1, null_mut(), id, null_mut()), ffi::ncclSuccess);
        }
        let events = transfer.events();
        assert_eq!(events[0].description, Description::Socket { fd: 7, op: 1, length: 4096 });
        assert_eq!(events[0].followed_by, [1]);
        assert!(events[0].is_stopped());
    }
}
