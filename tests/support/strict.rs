//! A profiler callback that is as touchy as NCCL's: it notes every call that would make some release crash.
//!
//! As in NCCL, a start reads through the transfer's handle. Here the handle leads to memory that is never freed, but
//! which knows from when on NCCL would have freed it.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use towline::nccl::ffi::*;
use towline::nccl::net_event::{NetEvent, PLUGIN_ID, PLUGIN_ID_IB, PLUGIN_ID_SOCKET};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// What `isend`, `irecv` and `test` are called in: only there may an event start.
pub fn inside<T>(call: impl FnOnce() -> T) -> T {
    INSIDE.set(true);
    let answer = call();
    INSIDE.set(false);
    answer
}

/// What was told of one piece.
#[derive(Debug, Clone, Copy)]
pub struct Told {
    /// Under which identifier.
    pub id: i64,
    /// Bytes.
    pub length: u64,
    /// The socket, and 0 for a send, 1 for a receive; −1 under another identifier.
    pub fd: i32,
    pub op: i32,
    /// Under the identifier of InfiniBand: device, queue pair, verbs opcode, work request.
    pub verbs: Option<(i32, i32, i32, u64)>,
    /// The descriptor under Towline's identifier: from the start, then from the update.
    pub details: NetEvent,
    pub updates: u32,
    pub stops: u32,
}

/// One transfer, as NCCL's proxy sees it.
pub struct Transfer {
    alive: AtomicBool,
    /// No call may come at all any more.
    closed: AtomicBool,
    /// Which starts are declined, by their number: bit 0 for the first.
    declines: AtomicU64,
    starts: AtomicUsize,
    told: Mutex<Vec<Told>>,
    faults: Mutex<Vec<&'static str>>,
}

struct Event {
    transfer: &'static Transfer,
    index: usize,
}

impl Transfer {
    pub fn new() -> &'static Self {
        Self::declining_some(0)
    }

    /// A transfer of an operation that no profiler asked for.
    pub fn declining() -> &'static Self {
        Self::declining_some(u64::MAX)
    }

    /// A transfer whose profiler has no room for some starts: those whose bits are set, bit 0 for the first.
    pub fn declining_some(starts: u64) -> &'static Self {
        Box::leak(Box::new(Self {
            alive: AtomicBool::new(true),
            closed: AtomicBool::new(false),
            declines: AtomicU64::new(starts),
            starts: AtomicUsize::new(0),
            told: Mutex::default(),
            faults: Mutex::default(),
        }))
    }

    /// For the plugin.
    pub fn handle(&'static self) -> *mut c_void {
        (&raw const *self).cast_mut().cast()
    }

    /// `test` has said done or failed, or an abort has begun: NCCL frees what the handle leads to.
    pub fn free(&self) {
        self.alive.store(false, Ordering::SeqCst);
    }

    /// The close has returned.
    pub fn close(&self) {
        self.free();
        self.closed.store(true, Ordering::SeqCst);
    }

    /// How many starts came, accepted or not.
    pub fn starts(&self) -> usize {
        self.starts.load(Ordering::SeqCst)
    }

    /// What was told so far. Fails on calls that must not be.
    #[track_caller]
    pub fn told(&self) -> Vec<Told> {
        let faults = lock(&self.faults).clone();
        assert!(faults.is_empty(), "{faults:?}");
        lock(&self.told).clone()
    }

    /// What was told of a transfer that NCCL has just seen the end of: all pieces stopped once, not too many, and
    /// `size` bytes in all. Returns the pieces; resends do not count, but come along.
    #[track_caller]
    pub fn whole(&self, size: usize) -> Vec<Told> {
        let told = self.told();
        assert!(told.iter().all(|piece| piece.stops == 1), "{told:?}");
        let first: Vec<&Told> = told.iter().filter(|piece| !piece.details.is_resend()).collect();
        assert!((1..=8).contains(&first.len()), "{told:?}");
        assert_eq!(first.iter().map(|piece| piece.length).sum::<u64>(), size as u64, "{told:?}");
        self.free();
        told
    }

    fn fault(&self, what: &'static str) {
        lock(&self.faults).push(what);
    }
}

/// NCCL's callback.
pub unsafe extern "C" fn callback(
    event: *mut *mut c_void,
    kind: c_int,
    transfer: *mut c_void,
    id: i64,
    data: *mut c_void,
) -> ncclResult_t {
    if kind == ncclProfilerNetEventStart {
        // SAFETY: transfers are never freed; NCCL would crash on what is no transfer, and so may this.
        let transfer: &'static Transfer = unsafe { &*transfer.cast::<Transfer>() };
        let number = transfer.starts.fetch_add(1, Ordering::SeqCst);
        if !INSIDE.get() {
            transfer.fault("a start outside of isend, irecv and test");
        }
        if !transfer.alive.load(Ordering::SeqCst) {
            transfer.fault("a start after the end of its transfer");
        }
        if transfer.declines.load(Ordering::SeqCst) >> number.min(63) & 1 == 1 {
            return ncclSuccess;
        }
        // SAFETY: the descriptor is what the identifier says.
        let piece = unsafe { describe(id, data) };
        let mut told = lock(&transfer.told);
        told.push(piece);
        let handle = Box::leak(Box::new(Event { transfer, index: told.len() - 1 }));
        // SAFETY: the place for the handle.
        unsafe { *event = (&raw mut *handle).cast() };
        return ncclSuccess;
    }
    // SAFETY: NCCL reads the handle; the plugin must not pass a null one.
    let event = unsafe { &*(*event).cast::<Event>() };
    let transfer = event.transfer;
    if transfer.closed.load(Ordering::SeqCst) {
        transfer.fault("a call after the close");
    }
    if !transfer.alive.load(Ordering::SeqCst) {
        transfer.fault("a call after the end of the transfer");
    }
    let mut told = lock(&transfer.told);
    let piece = &mut told[event.index];
    if kind == ncclProfilerNetEventUpdate || kind == ncclProfilerNetEventUpdateAndStop {
        piece.updates += 1;
        // SAFETY: the descriptor is what the identifier says.
        piece.details = unsafe { describe(id, data) }.details;
    }
    if kind == ncclProfilerNetEventStop || kind == ncclProfilerNetEventUpdateAndStop {
        piece.stops += 1;
    }
    ncclSuccess
}

unsafe fn describe(id: i64, data: *mut c_void) -> Told {
    let mut told =
        Told { id, length: 0, fd: -1, op: -1, verbs: None, details: NetEvent::default(), updates: 0, stops: 0 };
    match id {
        PLUGIN_ID_SOCKET => {
            // SAFETY: the caller's promise.
            let descr = unsafe { &*data.cast::<ncclProfilerNetSockDescr_v1_t>() };
            assert_eq!(i32::from(descr.type_), ncclProfileSocket);
            (told.fd, told.op, told.length) = (descr.sock.fd, descr.sock.op, descr.sock.length as u64);
        }
        PLUGIN_ID_IB => {
            // SAFETY: the caller's promise.
            let descr = unsafe { &*data.cast::<ncclProfilerNetIbDescr_v1_t>() };
            assert_eq!(i32::from(descr.type_), ncclProfileQp);
            let pair = descr.qp;
            (told.verbs, told.length) = (Some((pair.device, pair.qpNum, pair.opcode, pair.wr_id)), pair.length as u64);
        }
        PLUGIN_ID => {
            // SAFETY: the caller's promise.
            told.details = unsafe { *data.cast::<NetEvent>() };
            told.length = told.details.length;
        }
        other => panic!("an identifier that nobody knows: {other:#x}"),
    }
    told
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
