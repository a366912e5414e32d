//! The profiler half of NCCL's core, for the command line. It drives the profiler in the plugin's own library, so that
//! a run without GPUs leaves the traces, tables and metrics that a training job would.
//!
//! As in NCCL, a collective has one operation per neighbour, an operation a step per message, and each message carries
//! a handle under which the network plugin reports its parts. It uses only one version (v6, NCCL 2.29 and 2.30). One
//! thread drives it, as NCCL's proxy thread does.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use super::library::Plugin;
use crate::nccl::ffi::*;

/// The table of the profiler at work: the callback's stops carry nothing that would lead to it.
static TABLE: AtomicPtr<ncclProfiler_v6_t> = AtomicPtr::new(null_mut());

/// Which events the profiler wants. As NCCL's, there is one for the process, which the profiler may write at any time.
static MASK: AtomicI32 = AtomicI32::new(0);

/// A communicator whose events are reported to the plugin's profiler.
pub struct Profiler {
    table: &'static ncclProfiler_v6_t,
    context: *mut c_void,
    rank: c_int,
    // Keeps the library mapped.
    _plugin: Plugin,
}

/// An event of the profiler's; nothing when it declined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event(*mut c_void);

/// What a message's profiler handle leads to. It stays where it is until the message is over.
#[derive(Debug)]
pub struct StepHandle {
    profiler: *const Profiler,
    step: Event,
}

impl Profiler {
    /// Starts the plugin's profiler for a communicator; None when there is none, or it wants no events.
    pub fn start(plugin: &Plugin, comm_id: u64, name: &CStr, ranks: usize, rank: usize) -> Option<Self> {
        let table = plugin.symbol("ncclProfiler_v6")?.cast::<ncclProfiler_v6_t>();
        // SAFETY: by its name it is a table of that version, in a library that stays mapped.
        let table = unsafe { &*table };
        let (mut context, ranks, rank) = (null_mut(), ranks as c_int, rank as c_int);
        // SAFETY: valid places for the answers, a terminated name.
        let code = unsafe {
            table.init?(&mut context, comm_id, MASK.as_ptr(), name.as_ptr(), ranks, ranks, rank, super::log::logger())
        };
        if code != ncclSuccess || context.is_null() || MASK.load(Ordering::Relaxed) == 0 {
            return None;
        }
        TABLE.store((&raw const *table).cast_mut(), Ordering::Release);
        Some(Self { table, context, rank, _plugin: plugin.clone() })
    }

    /// For the network plugin's `init`.
    pub fn callback() -> ncclProfilerCallback_t {
        Some(tell)
    }

    /// A collective is called and enqueued, as the user's thread does; its operations follow.
    pub fn collective(&self, function: &CStr, sequence: u64, count: usize) -> Event {
        let group = self.begin(ncclProfileGroupApi, Event::NONE, |_| {});
        let api = self.begin(ncclProfileCollApi, group, |descr| {
            // SAFETY: zeroed plain data.
            let call = unsafe { &mut descr.u.collApi };
            (call.func, call.count, call.datatype) = (function.as_ptr(), count, c"ncclFloat32".as_ptr());
        });
        let collective = self.begin(ncclProfileColl, api, |descr| {
            // SAFETY: zeroed plain data.
            let coll = unsafe { &mut descr.u.coll };
            (coll.func, coll.count, coll.datatype) = (function.as_ptr(), count, c"ncclFloat32".as_ptr());
            (coll.seqNumber, coll.nChannels) = (sequence, 1);
            (coll.algo, coll.proto) = (c"RING".as_ptr(), c"SIMPLE".as_ptr());
        });
        for event in [collective, api, group] {
            self.end(event);
        }
        collective
    }

    /// What the proxy does for a collective with one neighbour.
    pub fn operation(&self, collective: Event, peer: usize, send: bool, steps: usize, chunk: usize) -> Event {
        let operation = self.begin(ncclProfileProxyOp, collective, |descr| {
            descr.u.proxyOp = ncclProfilerProxyOp_v1_t {
                pid: std::process::id() as c_int,
                channelId: 0,
                peer: peer as c_int,
                nSteps: steps as c_int,
                chunkSize: chunk as c_int,
                isSend: c_int::from(send),
            };
        });
        self.state(operation, ncclProfilerProxyOpInProgress_v4, 0);
        operation
    }

    /// One message of an operation.
    pub fn step(&self, operation: Event, number: usize) -> Box<StepHandle> {
        let step = self.begin(ncclProfileProxyStep, operation, |descr| descr.u.proxyStep.step = number as c_int);
        Box::new(StepHandle { profiler: self, step })
    }

    /// The event reached one of NCCL's states; `bytes` is what a message moved, where that is known.
    pub fn state(&self, event: Event, state: ncclProfilerEventState_t, bytes: usize) {
        // SAFETY: plain data, for which zero is a value.
        let mut args: ncclProfilerEventStateArgs_v6_t = unsafe { std::mem::zeroed() };
        args.proxyStep.transSize = bytes;
        if let (false, Some(record)) = (event.0.is_null(), self.table.recordEventState) {
            // SAFETY: the profiler's own handle, arguments of its version.
            unsafe { record(event.0, state, &mut args) };
        }
    }

    /// The event has ended.
    pub fn end(&self, event: Event) {
        if let (false, Some(stop)) = (event.0.is_null(), self.table.stopEvent) {
            // SAFETY: the profiler's own handle.
            unsafe { stop(event.0) };
        }
    }

    fn begin(&self, kind: u32, parent: Event, fill: impl FnOnce(&mut ncclProfilerEventDescr_v6_t)) -> Event {
        // SAFETY: plain data, for which zero is a value.
        let mut descr: ncclProfilerEventDescr_v6_t = unsafe { std::mem::zeroed() };
        (descr.type_, descr.parentObj, descr.rank) = (u64::from(kind), parent.0, self.rank);
        fill(&mut descr);
        let mut event = null_mut();
        if let Some(start) = self.table.startEvent {
            // SAFETY: the profiler's own context, a descriptor of its version.
            unsafe { start(self.context, &mut event, &mut descr) };
        }
        Event(event)
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        if let Some(finalize) = self.table.finalize {
            // SAFETY: the profiler's own context, for the last time.
            unsafe { finalize(self.context) };
        }
    }
}

impl Event {
    const NONE: Self = Self(null_mut());
}

impl StepHandle {
    /// The step.
    pub fn step(&self) -> Event {
        self.step
    }

    /// The handle for the network plugin.
    pub fn handle(&self) -> *mut c_void {
        (&raw const *self).cast_mut().cast()
    }
}

unsafe extern "C" fn tell(
    event: *mut *mut c_void,
    kind: c_int,
    transfer: *mut c_void,
    id: i64,
    data: *mut c_void,
) -> ncclResult_t {
    // SAFETY: null or the table of a library that stays mapped.
    let Some(table) = (unsafe { TABLE.load(Ordering::Acquire).as_ref() }) else { return ncclSuccess };
    if kind == ncclProfilerNetEventStart {
        // SAFETY: the plugin starts events only while the transfer is under way, and so its handle is alive.
        let step = unsafe { &*transfer.cast::<StepHandle>() };
        // SAFETY: a profiler outlives the steps that it made.
        let profiler = unsafe { &*step.profiler };
        if MASK.load(Ordering::Relaxed) & ncclProfileNetPlugin as c_int != 0 {
            let begun = profiler.begin(ncclProfileNetPlugin, step.step, |descr| {
                descr.u.netPlugin = ncclProfilerNetPlugin_v3_t { id, data };
            });
            // SAFETY: the plugin's place for the handle.
            unsafe { *event = begun.0 };
        }
        return ncclSuccess;
    }
    // SAFETY: the plugin passes the handle that it got.
    let handle = unsafe { *event };
    if kind == ncclProfilerNetEventUpdate || kind == ncclProfilerNetEventUpdateAndStop {
        // SAFETY: plain data, for which zero is a value.
        let mut args: ncclProfilerEventStateArgs_v6_t = unsafe { std::mem::zeroed() };
        args.netPlugin.data = data;
        if let Some(record) = table.recordEventState {
            // SAFETY: the profiler's own handle, arguments of its version.
            unsafe { record(handle, ncclProfilerNetPluginUpdate, &mut args) };
        }
    }
    if kind != ncclProfilerNetEventUpdate
        && let Some(stop) = table.stopEvent
    {
        // SAFETY: the profiler's own handle.
        unsafe { stop(handle) };
    }
    ncclSuccess
}
