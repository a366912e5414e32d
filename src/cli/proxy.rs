//! Plays the profiler's part of NCCL's proxy thread: which message belongs to which operation of which collective.
//!
//! Idle, and free, when no profiler was asked for (`TOWLINE_PROFILE`, `TOWLINE_PROFILER_CHAIN`).

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::null_mut;

use crate::host::profiler::{Event, Profiler, StepHandle};
use crate::nccl::ffi::*;

use super::ring::{CHUNK_BYTES, SLOTS};

/// The events of one rank's messages.
pub(crate) struct Proxy {
    /// Dropped before the profiler, to which their handles point.
    directions: [Direction; 2],
    collectives: u64,
    profiler: Option<Box<Profiler>>,
}

/// Sends or receives.
#[derive(Default)]
struct Direction {
    peer: usize,
    /// Operations with open steps, the current one last.
    operations: VecDeque<Operation>,
    steps: [Option<Box<StepHandle>>; SLOTS],
}

struct Operation {
    event: Event,
    begun: usize,
    ended: usize,
    complete: bool,
}

/// The direction of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Way {
    Out = 0,
    In = 1,
}

impl Proxy {
    /// For a rank of a ring.
    pub(crate) fn new(profiler: Option<Profiler>, rank: usize, ranks: usize) -> Self {
        let neighbour = |peer| Direction { peer, ..Direction::default() };
        let directions = [neighbour((rank + 1) % ranks), neighbour((rank + ranks - 1) % ranks)];
        Self { directions, collectives: 0, profiler: profiler.map(Box::new) }
    }

    /// A collective begins; open operations still belong to the one before.
    pub(crate) fn collective(&mut self, count: usize, sends: usize, receives: usize) {
        let Some(profiler) = &self.profiler else { return };
        let collective = profiler.collective(c"AllReduce", self.collectives, count);
        self.collectives += 1;
        for (direction, (send, steps)) in self.directions.iter_mut().zip([(true, sends), (false, receives)]) {
            direction.complete(profiler);
            let event = profiler.operation(collective, direction.peer, send, steps, CHUNK_BYTES);
            direction.operations.push_back(Operation { event, begun: 0, ended: 0, complete: false });
        }
    }

    /// Nothing belongs to the last collective any more.
    pub(crate) fn finish(&mut self) {
        if let Some(profiler) = &self.profiler {
            self.directions.iter_mut().for_each(|direction| direction.complete(profiler));
        }
    }

    /// The message in `slot` is about to be posted, or posted again. Returns its profiler handle.
    pub(crate) fn posting(&mut self, way: Way, slot: usize) -> *mut c_void {
        let Some(profiler) = &self.profiler else { return null_mut() };
        let direction = &mut self.directions[way as usize];
        if direction.steps[slot].is_none() {
            let Some(operation) = direction.operations.back_mut() else { return null_mut() };
            let step = profiler.step(operation.event, operation.begun);
            operation.begun += 1;
            if let Way::Out = way {
                profiler.state(step.step(), ncclProfilerProxyStepSendGPUWait, 0);
                profiler.state(step.step(), ncclProfilerProxyStepSendPeerWait_v4, 0);
            } else {
                profiler.state(step.step(), ncclProfilerProxyStepRecvWait, 0);
            }
            direction.steps[slot] = Some(step);
        }
        direction.steps[slot].as_ref().map_or(null_mut(), |step| step.handle())
    }

    /// The transport took the send.
    pub(crate) fn sending(&self, slot: usize, bytes: usize) {
        if let (Some(profiler), Some(step)) = (&self.profiler, &self.directions[Way::Out as usize].steps[slot]) {
            profiler.state(step.step(), ncclProfilerProxyStepSendWait, bytes);
        }
    }

    /// The message is over.
    pub(crate) fn over(&mut self, way: Way, slot: usize, bytes: usize) {
        let Some(profiler) = &self.profiler else { return };
        let direction = &mut self.directions[way as usize];
        let Some(step) = direction.steps[slot].take() else { return };
        if let Way::In = way {
            profiler.state(step.step(), ncclProfilerProxyStepRecvFlushWait, bytes);
            profiler.state(step.step(), ncclProfilerProxyStepRecvGPUWait, bytes);
        }
        profiler.end(step.step());
        // Messages of a direction end in the order of their operations.
        if let Some(operation) = direction.operations.iter_mut().find(|operation| operation.ended < operation.begun) {
            operation.ended += 1;
        }
        direction.retire(profiler);
    }
}

impl Direction {
    fn complete(&mut self, profiler: &Profiler) {
        if let Some(operation) = self.operations.back_mut() {
            operation.complete = true;
        }
        self.retire(profiler);
    }

    fn retire(&mut self, profiler: &Profiler) {
        while let Some(first) = self.operations.front()
            && first.complete
            && first.ended == first.begun
        {
            profiler.end(first.event);
            self.operations.pop_front();
        }
    }
}
