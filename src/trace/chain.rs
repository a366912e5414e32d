//! A second profiler behind ours: NCCL loads one profiler, and users want two at once.
//!
//! The second profiler sees what it would see alone: its own contexts, its own event handles as parents, the events
//! that NCCL would emit for its mask and no others. [`crate::abi`] loads it and fills its C structs; this file
//! translates our handles to its own, without lock or allocation.
//!
//! Bounded: some thirty thousand live handles. An event that NCCL has stopped keeps its handle, as children may still
//! name it as their parent, until the room is needed. An event that finds no room is declined for the second profiler
//! and counted.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use super::event::{Body, CommInfo, NetTimes};
use super::key;

/// Handles of the second profiler that are known at once.
const SLOTS: usize = 1 << 15;

/// Places tried for one event.
const PROBES: usize = 32;

/// Communicators whose context is found without a search.
const CONTEXTS: usize = 4096;

/// In a slot's state: the event was stopped; its handle serves as a parent until the slot is needed.
const STOPPED: u64 = 1;

/// The data of a start besides its body, for a second profiler only.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    /// The parent's handle as NCCL knows it, ours.
    pub parent: u64,
    /// The originating rank.
    pub rank: i32,
    /// The event.
    pub body: Body,
    /// Plugin id of a NetPlugin event, else 0.
    pub net_id: i64,
    /// Descriptor of a NetPlugin event, else null.
    pub net_data: *mut c_void,
    /// Of a network event that has ended already: its end.
    pub times: Option<NetTimes>,
}

/// A change of state, for all versions of its arguments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    /// NCCL's number of the state.
    pub state: c_int,
    /// Whether NCCL gave arguments at all.
    pub has_args: bool,
    /// transSize, appended operations or the GPU's time, whichever belongs to the state.
    pub arg: u64,
    /// Steps (ProxyOp states of v1 to v3).
    pub steps: c_int,
    /// A network plugin's descriptor.
    pub data: *mut c_void,
}

/// A loaded profiler behind our own types; [`crate::abi`] implements it over C.
pub(crate) trait Second: Send + Sync {
    /// A new communicator; the mask goes to `mask`, now or later. None when the profiler refuses.
    fn init(&self, comm: &CommInfo, mask: &AtomicI32) -> Option<*mut c_void>;
    /// A new event; null when it declines.
    fn start(&self, context: *mut c_void, start: &Start, parent: *mut c_void, group: *mut c_void) -> *mut c_void;
    /// The end of an event.
    fn stop(&self, event: *mut c_void);
    /// A change of state.
    fn record(&self, event: *mut c_void, change: &Change);
    /// The end of a communicator.
    fn finalize(&self, context: *mut c_void);
}

#[derive(Default)]
struct Slot {
    /// Our event, 0 when free, [`BUSY`] while it changes hands.
    event: AtomicU64,
    handle: AtomicPtr<c_void>,
    state: AtomicU64,
}

const BUSY: u64 = u64::MAX;

#[derive(Default)]
struct Context {
    ours: AtomicU64,
    theirs: AtomicPtr<c_void>,
}

/// The second profiler and what we know of its handles.
pub(crate) struct Chain {
    second: Box<dyn Second>,
    mask: AtomicI32,
    slots: Box<[Slot]>,
    contexts: Box<[Context]>,
    declined: AtomicU64,
    numbers: AtomicU64,
}

impl Chain {
    /// Chains `second` behind our profiler.
    pub(crate) fn new(second: Box<dyn Second>) -> Self {
        Self {
            second,
            mask: AtomicI32::new(0),
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            contexts: (0..CONTEXTS).map(|_| Context::default()).collect(),
            declined: AtomicU64::new(0),
            numbers: AtomicU64::new(0),
        }
    }

    /// Its current event mask.
    pub(crate) fn mask(&self) -> u32 {
        self.mask.load(Ordering::Relaxed) as u32
    }

    /// How many of its events were declined for lack of room.
    pub(crate) fn declined(&self) -> u64 {
        self.declined.load(Ordering::Relaxed)
    }

    /// A number for an event that only the second profiler wants.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// A communicator begins.
    pub(crate) fn init(&self, comm: &CommInfo) {
        if let Some(theirs) = self.second.init(comm, &self.mask) {
            let context = &self.contexts[key::serial(comm.context) as usize % CONTEXTS];
            context.theirs.store(theirs, Ordering::Relaxed);
            context.ours.store(comm.context, Ordering::Release);
        }
    }

    /// A communicator ends.
    pub(crate) fn finalize(&self, context: u64) {
        let slot = &self.contexts[key::serial(context) as usize % CONTEXTS];
        let theirs = slot.theirs.load(Ordering::Relaxed);
        if slot.ours.compare_exchange(context, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.second.finalize(theirs);
        }
    }

    /// Whether it wants events like this one.
    #[inline]
    pub(crate) fn wants(&self, body: &Body) -> bool {
        body.kind().is_some_and(|kind| kind.triggers() & self.mask() != 0)
    }

    /// Passes the start of our `event` on. False when the second profiler declined it.
    pub(crate) fn start(&self, event: u64, context: u64, start: &Start) -> bool {
        let slot = &self.contexts[key::serial(context) as usize % CONTEXTS];
        // A context that is not in the table belongs to another process or to a communicator that has ended.
        if slot.ours.load(Ordering::Acquire) != context {
            return false;
        }
        let theirs = slot.theirs.load(Ordering::Relaxed);
        let group = match &start.body {
            Body::Coll(coll) => coll.group,
            Body::P2p(p2p) => p2p.group,
            _ => 0,
        };
        let handle = self.second.start(theirs, start, self.find(start.parent), self.find(group));
        if handle.is_null() {
            return false;
        }
        let kept = self.keep(event, handle);
        if !kept {
            self.declined.fetch_add(1, Ordering::Relaxed);
            self.second.stop(handle);
        }
        kept
    }

    /// Passes a stop on.
    pub(crate) fn stop(&self, event: u64) {
        if let Some((slot, handle)) = self.slot(event) {
            slot.state.store(STOPPED, Ordering::Relaxed);
            self.second.stop(handle);
        }
    }

    /// Passes a change of state on.
    pub(crate) fn record(&self, event: u64, change: &Change) {
        if let Some((_, handle)) = self.slot(event) {
            self.second.record(handle, change);
        }
    }

    fn find(&self, event: u64) -> *mut c_void {
        self.slot(event).map_or(std::ptr::null_mut(), |(_, handle)| handle)
    }

    fn slot(&self, event: u64) -> Option<(&Slot, *mut c_void)> {
        if event == 0 {
            return None;
        }
        self.places(event).find_map(|slot| {
            if slot.event.load(Ordering::Acquire) != event {
                return None;
            }
            let handle = slot.handle.load(Ordering::Acquire);
            // Still the same event, so the handle was its own.
            (slot.event.load(Ordering::Relaxed) == event).then_some((slot, handle))
        })
    }

    /// Remembers a handle in a free slot, or else in that of an event that was stopped.
    fn keep(&self, event: u64, handle: *mut c_void) -> bool {
        let free = self.places(event).find(|slot| {
            slot.event.load(Ordering::Relaxed) == 0
                && slot.event.compare_exchange(0, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        let slot = free.or_else(|| {
            self.places(event).find(|slot| {
                let old = slot.event.load(Ordering::Acquire);
                old != BUSY
                    && slot.state.load(Ordering::Relaxed) == STOPPED
                    && slot.event.compare_exchange(old, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            })
        });
        let Some(slot) = slot else { return false };
        slot.handle.store(handle, Ordering::Release);
        slot.state.store(0, Ordering::Relaxed);
        slot.event.store(event, Ordering::Release);
        true
    }

    fn places(&self, event: u64) -> impl Iterator<Item = &Slot> {
        let first = (event.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize;
        (0..PROBES).map(move |probe| &self.slots[(first + probe) % SLOTS])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// A profiler that counts its calls and returns numbered handles.
    #[derive(Default)]
    struct Fake(Mutex<Vec<String>>, AtomicU64);

    impl Second for std::sync::Arc<Fake> {
        fn init(&self, comm: &CommInfo, mask: &AtomicI32) -> Option<*mut c_void> {
            mask.store(0x12, Ordering::Relaxed);
            Some((comm.rank + 1) as usize as *mut c_void)
        }
        fn start(&self, context: *mut c_void, _: &Start, parent: *mut c_void, _: *mut c_void) -> *mut c_void {
            let handle = self.1.fetch_add(1, Ordering::Relaxed) + 100;
            self.0.lock().unwrap().push(format!("start {handle} in {context:?} under {parent:?}"));
            handle as *mut c_void
        }
        fn stop(&self, event: *mut c_void) {
            self.0.lock().unwrap().push(format!("stop {}", event as usize));
        }
        fn record(&self, event: *mut c_void, change: &Change) {
            self.0.lock().unwrap().push(format!("state {} of {}", change.state, event as usize));
        }
        fn finalize(&self, context: *mut c_void) {
            self.0.lock().unwrap().push(format!("finalize {context:?}"));
        }
    }

    fn start(parent: u64) -> Start {
        let body = Body::ProxyStep { step: 0 };
        Start { parent, rank: 0, body, net_id: 0, net_data: std::ptr::null_mut(), times: None }
    }

    #[test]
    fn the_second_profiler_sees_its_own_handles_as_parents_even_after_the_parents_stop() {
        let fake = std::sync::Arc::new(Fake::default());
        let chain = Chain::new(Box::new(fake.clone()));
        chain.init(&CommInfo { context: 7, ..CommInfo::default() });
        assert_eq!(chain.mask(), 0x12);
        assert!(chain.start(1001, 7, &start(0)));
        chain.stop(1001);
        assert!(chain.start(1002, 7, &start(1001)));
        assert!(!chain.start(1003, 8, &start(1001)), "a context that is not ours is not handed on");
        chain.finalize(7);
        assert!(!chain.start(1004, 7, &start(0)), "nothing after finalize");
        assert_eq!(
            *fake.0.lock().unwrap(),
            ["start 100 in 0x1 under 0x0", "stop 100", "start 101 in 0x1 under 0x64", "finalize 0x1"]
        );
    }

    #[test]
    fn room_is_taken_from_stopped_events_only() {
        let fake = std::sync::Arc::new(Fake::default());
        let chain = Chain::new(Box::new(fake.clone()));
        chain.init(&CommInfo { context: 7, ..CommInfo::default() });
        let kept: Vec<u64> = (1..=2 * SLOTS as u64).filter(|&event| chain.start(event, 7, &start(0))).collect();
        assert!(kept.len() <= SLOTS && kept.len() > SLOTS / 2);
        assert_eq!(chain.declined(), 2 * SLOTS as u64 - kept.len() as u64);
        assert!(kept.iter().all(|&event| !chain.find(event).is_null()), "no live event loses its handle");
        kept.iter().for_each(|&event| chain.stop(event));
        assert!(chain.start(u64::MAX / 3, 7, &start(kept[0])));
    }
}
