//! A process's last calls and open operations, from the records of the profiler.
//!
//! The live profiler and `towline trace report` feed it the same records. A call is open from its start until it was
//! stopped and its last operation has ended: NCCL's own stop means only that it is enqueued.
//!
//! Its size is bounded: by [`Tracker::new`]'s number of collectives and of transfers per communicator, and by 65,536
//! operations and steps.

use std::collections::{BTreeMap, BTreeSet};

use super::event::{Body, CommInfo, Record, state};
use super::hash::QuickMap;
use super::verdict::{Arguments, Call, Exchanged, Key, On, RECV, SEND, Wait};

/// Operations, and steps, that are followed at once; beyond this number their stops were lost.
const OPEN: usize = 1 << 16;

/// How long communicators that have ended are remembered: others may still wait in them.
const REMEMBERED_NS: u64 = 60_000_000_000;

/// A call and what keeps it open.
#[derive(Debug)]
struct Followed {
    id: u64,
    call: Call,
    stopped: bool,
    children: u32,
}

/// The last calls of one kind.
#[derive(Debug, Default)]
struct Last {
    /// By their running number; the oldest that are complete are forgotten.
    calls: BTreeMap<u64, Followed>,
    /// How many there have been.
    made: u64,
}

impl Last {
    /// Adds a call. Returns its number, and the event of the call that was forgotten for it.
    fn enter(&mut self, id: u64, call: Call, kept: usize) -> (u64, Option<u64>) {
        let number = self.made;
        self.calls.insert(number, Followed { id, call, stopped: false, children: 0 });
        self.made += 1;
        if self.calls.len() <= kept {
            return (number, None);
        }
        let complete = self.calls.iter().find(|(_, followed)| !followed.call.open).map(|(&number, _)| number);
        let oldest = complete.or_else(|| self.calls.keys().next().copied());
        (number, oldest.and_then(|number| self.calls.remove(&number)).map(|followed| followed.id))
    }

    fn calls(&self) -> impl DoubleEndedIterator<Item = &Call> {
        self.calls.values().map(|followed| &followed.call)
    }
}

/// A communicator of this process.
#[derive(Debug, Default)]
pub(crate) struct Comm {
    /// Which one, and this process's rank in it.
    pub info: CommInfo,
    /// When it ended.
    pub ended: Option<u64>,
    collectives: Last,
    /// Sends and receives: there may be so many that collectives would be forgotten for them.
    transfers: Last,
    /// How many of these there have been with each peer.
    pub exchanged: Exchanged,
}

impl Comm {
    /// The last collectives, in the order in which they were entered.
    pub(crate) fn calls(&self) -> impl DoubleEndedIterator<Item = &Call> {
        self.collectives.calls()
    }

    /// The last sends and receives, as above.
    pub(crate) fn transfers(&self) -> impl DoubleEndedIterator<Item = &Call> {
        self.transfers.calls()
    }

    /// When the oldest call was entered that is open: a collective, a send or a receive.
    pub(crate) fn oldest_open(&self) -> Option<u64> {
        self.calls().chain(self.transfers()).filter(|call| call.open).map(|call| call.entered).min()
    }

    /// How many collectives there have been.
    pub(crate) fn made(&self) -> u64 {
        self.collectives.made
    }

    fn last(&mut self, is_transfer: bool) -> &mut Last {
        if is_transfer { &mut self.transfers } else { &mut self.collectives }
    }
}

#[derive(Debug, Clone, Copy)]
struct Operation {
    context: u64,
    /// The event that it belongs to.
    parent: u64,
    peer: i32,
    channel: u8,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    context: u64,
    /// The event that it belongs to.
    operation: u64,
    peer: i32,
    channel: u8,
    number: i32,
    /// Its data have come, and this rank's GPU has not taken them.
    arrived: bool,
    /// The reason for which it waits, and since when.
    wait: Option<(On, u64)>,
}

/// A step that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OpenStep {
    /// For what.
    pub wait: Wait,
    /// Its operation's channel.
    pub channel: u8,
    /// Its number in its operation.
    pub number: i32,
}

/// The state of one process.
#[derive(Debug)]
pub(crate) struct Tracker {
    comms: BTreeMap<u64, Comm>,
    /// By event: a call's communicator, whether it is a transfer, and its running number there.
    calls: QuickMap<u64, (u64, bool, u64)>,
    operations: QuickMap<u64, Operation>,
    steps: QuickMap<u64, Step>,
    /// The number of calls that are remembered per communicator.
    kept: usize,
}

impl Tracker {
    /// Remembers `kept` collectives, and as many sends and receives, of each communicator.
    pub(crate) fn new(kept: usize) -> Self {
        Self {
            comms: BTreeMap::new(),
            calls: QuickMap::default(),
            operations: QuickMap::default(),
            steps: QuickMap::default(),
            kept: kept.max(1),
        }
    }

    /// A communicator begins, or more of its data arrives.
    pub(crate) fn comm(&mut self, info: &CommInfo) {
        self.comms.entry(info.context).or_default().info = info.clone();
    }

    /// A communicator ends; what is open in it stays so.
    pub(crate) fn comm_ends(&mut self, context: u64, now: u64) {
        if let Some(comm) = self.comms.get_mut(&context) {
            comm.ended = Some(now);
        }
        self.operations.retain(|_, operation| operation.context != context);
        self.steps.retain(|_, step| step.context != context);
        self.calls.retain(|_, call| call.0 != context);
    }

    /// Forgets communicators that ended long before `now`.
    pub(crate) fn forget(&mut self, now: u64) {
        self.comms.retain(|_, comm| comm.ended.is_none_or(|ended| ended + REMEMBERED_NS > now));
    }

    /// The communicators, by their contexts.
    pub(crate) fn comms(&self) -> &BTreeMap<u64, Comm> {
        &self.comms
    }

    /// The reasons for which the open steps of each communicator wait.
    pub(crate) fn waits(&self) -> BTreeMap<u64, Vec<Wait>> {
        let waits = |steps: Vec<OpenStep>| steps.into_iter().map(|step| step.wait).collect();
        self.open_steps().into_iter().map(|(context, steps)| (context, waits(steps))).collect()
    }

    /// The open steps of each communicator that wait, the oldest first. NCCL asks for the data of several steps ahead;
    /// while the GPU has not taken those that have come, the further ones hold no rank up.
    pub(crate) fn open_steps(&self) -> BTreeMap<u64, Vec<OpenStep>> {
        let supplied: BTreeSet<u64> =
            self.steps.values().filter(|step| step.arrived).map(|step| step.operation).collect();
        let mut waits: BTreeMap<u64, Vec<OpenStep>> = BTreeMap::new();
        for step in self.steps.values() {
            if let Some((on, since)) = step.wait
                && (on != On::Data || !supplied.contains(&step.operation))
            {
                let Step { context, peer, channel, number, .. } = *step;
                waits.entry(context).or_default().push(OpenStep { wait: Wait { peer, on, since }, channel, number });
            }
        }
        for list in waits.values_mut() {
            list.sort_unstable_by_key(|step| {
                (step.wait.since, step.wait.peer, step.wait.on, step.channel, step.number)
            });
        }
        waits
    }

    /// One record.
    pub(crate) fn apply(&mut self, record: &Record) {
        let (id, when) = (record.id, record.when);
        match record.body {
            Body::Coll(coll) => {
                let arguments = Arguments { count: coll.count, datatype: coll.datatype, root: coll.root };
                self.enter(record, Key::collective(coll.func, coll.seq), arguments);
            }
            Body::CeColl(coll) => {
                let arguments = Arguments { count: coll.count, datatype: coll.datatype, root: coll.root };
                self.enter(record, Key::collective(coll.func, coll.seq), arguments);
            }
            Body::P2p(p2p) => {
                let send = match p2p.func.text() {
                    SEND => true,
                    RECV => false,
                    _ => return,
                };
                let comm = self.comms.entry(record.context).or_default();
                let (sends, receives) = comm.exchanged.entry(p2p.peer).or_default();
                let count = if send { sends } else { receives };
                *count += 1;
                let key = Key::transfer(p2p.func, *count - 1, p2p.peer);
                self.enter(record, key, Arguments { count: p2p.count, datatype: p2p.datatype, root: 0 });
            }
            Body::ProxyOp(op) if self.operations.len() < OPEN => {
                let (context, parent) = (record.context, record.parent);
                let operation = Operation { context, parent, peer: op.peer, channel: op.channel };
                self.operations.insert(id, operation);
                self.with_call(record.parent, |call| call.children += 1);
            }
            Body::ProxyStep { step: number } if self.steps.len() < OPEN => {
                let operation = record.parent;
                if let Some(&Operation { context, peer, channel, .. }) = self.operations.get(&operation) {
                    let step = Step { context, operation, peer, channel, number, arrived: false, wait: None };
                    self.steps.insert(id, step);
                }
            }
            Body::State { state, .. } => {
                if let Some(step) = self.steps.get_mut(&id)
                    && let Some(on) = what(state)
                    && step.wait.is_none_or(|(before, _)| before != on)
                {
                    step.arrived = matches!(state, state::STEP_RECV_FLUSH_WAIT | state::STEP_RECV_GPU_WAIT);
                    step.wait = Some((on, when));
                }
            }
            Body::Stop => {
                if self.steps.remove(&id).is_some() {
                } else if let Some(operation) = self.operations.remove(&id) {
                    self.with_call(operation.parent, |call| call.children = call.children.saturating_sub(1));
                } else {
                    self.with_call(id, |call| call.stopped = true);
                }
            }
            _ => {}
        }
    }

    fn enter(&mut self, record: &Record, key: Key, arguments: Arguments) {
        let is_transfer = key.peer.is_some();
        let last = self.comms.entry(record.context).or_default().last(is_transfer);
        let call = Call { key, arguments, entered: record.when, open: true };
        let (number, forgotten) = last.enter(record.id, call, self.kept);
        self.calls.insert(record.id, (record.context, is_transfer, number));
        forgotten.map(|id| self.calls.remove(&id));
    }

    fn with_call(&mut self, id: u64, change: impl FnOnce(&mut Followed)) {
        if let Some(&(context, is_transfer, number)) = self.calls.get(&id)
            && let Some(comm) = self.comms.get_mut(&context)
            && let Some(followed) = comm.last(is_transfer).calls.get_mut(&number)
        {
            change(followed);
            followed.call.open = !followed.stopped || followed.children > 0;
        }
    }
}

/// The reason for which a step in this state waits.
fn what(state: u8) -> Option<On> {
    Some(match state {
        state::STEP_SEND_WAIT => On::Network,
        state::STEP_SEND_PEER_WAIT => On::Buffer,
        state::STEP_RECV_WAIT => On::Data,
        state::STEP_SEND_GPU_WAIT | state::STEP_RECV_GPU_WAIT | state::STEP_RECV_FLUSH_WAIT => On::Gpu,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::event::{Coll, P2p, ProxyOp};
    use super::super::names::Name;
    use super::*;

    const CONTEXT: u64 = 1;

    fn of(when: u64, id: u64, parent: u64, body: Body) -> Record {
        Record { when, id, parent, context: CONTEXT, rank: 0, thread: 0, body }
    }

    fn coll(seq: u64) -> Body {
        Body::Coll(Coll { seq, func: Name::from("AllReduce"), ..Coll::default() })
    }

    fn seen(tracker: &Tracker) -> Vec<(u64, bool)> {
        tracker.comms()[&CONTEXT].calls().map(|call| (call.key.seq, call.open)).collect()
    }

    #[test]
    fn a_call_is_open_until_its_last_operation_has_ended() {
        let mut tracker = Tracker::new(10);
        for record in [
            of(1, 10, 0, coll(0)),
            of(2, 10, 0, Body::Stop),
            of(3, 11, 10, Body::ProxyOp(ProxyOp { peer: 3, ..ProxyOp::default() })),
            of(4, 12, 11, Body::ProxyStep { step: 0 }),
            of(5, 12, 0, Body::State { state: state::STEP_SEND_PEER_WAIT, steps: 0, arg: 0 }),
            of(6, 12, 0, Body::State { state: state::STEP_SEND_PEER_WAIT, steps: 0, arg: 0 }),
        ] {
            tracker.apply(&record);
        }
        assert_eq!(seen(&tracker), [(0, true)]);
        // Reported again and again, it is still the same wait.
        assert_eq!(tracker.waits()[&CONTEXT], [Wait { peer: 3, on: On::Buffer, since: 5 }]);
        tracker.apply(&of(7, 12, 0, Body::Stop));
        assert_eq!(tracker.waits().len(), 0);
        tracker.apply(&of(8, 11, 0, Body::Stop));
        assert_eq!(seen(&tracker), [(0, false)]);
    }

    #[test]
    fn while_the_gpu_has_data_to_take_the_next_steps_wait_for_nobody() {
        let mut tracker = Tracker::new(10);
        let state = |when, id, state| of(when, id, 0, Body::State { state, steps: 0, arg: 0 });
        for record in [
            of(1, 10, 0, coll(0)),
            of(2, 11, 10, Body::ProxyOp(ProxyOp { peer: 3, ..ProxyOp::default() })),
            of(3, 12, 11, Body::ProxyStep { step: 0 }),
            of(3, 13, 11, Body::ProxyStep { step: 1 }),
            state(4, 12, state::STEP_RECV_WAIT),
            state(5, 13, state::STEP_RECV_WAIT),
        ] {
            tracker.apply(&record);
        }
        let wait = |on, since| Wait { peer: 3, on, since };
        assert_eq!(tracker.waits()[&CONTEXT], [wait(On::Data, 4), wait(On::Data, 5)]);
        // The first step's data are there: what is waited for is the GPU.
        tracker.apply(&state(6, 12, state::STEP_RECV_GPU_WAIT));
        assert_eq!(tracker.waits()[&CONTEXT], [wait(On::Gpu, 6)]);
        tracker.apply(&of(7, 12, 0, Body::Stop));
        assert_eq!(tracker.waits()[&CONTEXT], [wait(On::Data, 5)]);
    }

    /// As a stage of a pipeline does that waits for the one before it.
    #[test]
    fn a_receive_that_does_not_end_is_the_oldest_open_call() {
        let mut tracker = Tracker::new(10);
        let receive = P2p { func: Name::from(RECV), peer: 3, ..P2p::default() };
        for record in [
            of(1, 10, 0, coll(0)),
            of(2, 10, 0, Body::Stop),
            of(3, 11, 0, Body::P2p(receive)),
            of(4, 11, 0, Body::Stop),
            of(4, 12, 11, Body::ProxyOp(ProxyOp { peer: 3, ..ProxyOp::default() })),
            of(5, 13, 0, coll(1)),
        ] {
            tracker.apply(&record);
        }
        let oldest = |tracker: &Tracker| tracker.comms()[&CONTEXT].oldest_open();
        assert_eq!(oldest(&tracker), Some(3));
        tracker.apply(&of(6, 12, 0, Body::Stop));
        assert_eq!(oldest(&tracker), Some(5));
        tracker.apply(&of(7, 13, 0, Body::Stop));
        assert_eq!(oldest(&tracker), None);
    }

    #[test]
    fn the_oldest_complete_calls_are_forgotten_and_open_ones_are_not() {
        let mut tracker = Tracker::new(3);
        tracker.apply(&of(0, 100, 0, coll(0)));
        for seq in 1..8 {
            tracker.apply(&of(seq, 100 + seq, 0, coll(seq)));
            tracker.apply(&of(seq, 100 + seq, 0, Body::Stop));
        }
        assert_eq!(seen(&tracker), [(0, true), (6, false), (7, false)]);
        assert_eq!(tracker.calls.len(), 3);
        // If no call is complete, the oldest goes.
        for seq in 8..12 {
            tracker.apply(&of(seq, 100 + seq, 0, coll(seq)));
        }
        assert_eq!(seen(&tracker), [(9, true), (10, true), (11, true)]);
    }

    #[test]
    fn an_aborted_communicator_keeps_its_open_calls_for_a_while() {
        let mut tracker = Tracker::new(3);
        tracker.apply(&of(1, 10, 0, coll(0)));
        tracker.comm_ends(CONTEXT, 5);
        tracker.forget(6);
        assert_eq!(seen(&tracker), [(0, true)]);
        tracker.forget(6 + REMEMBERED_NS);
        assert!(tracker.comms().is_empty() && tracker.calls.is_empty());
    }
}
