//! Collectives and point-to-point operations in the trace: from the start of enqueueing to the end of the last child.
//!
//! NCCL's stop for them means only that they are enqueued; their operations begin later, on the proxy thread, and
//! nothing announces how many. So a call counts as complete when it was stopped, none of its children is open, and none
//! has come for a while ([`GRACE_NS`]). Its slice is written then, with an arrow to each of its operations. A call that
//! takes longer than [`EARLY_NS`] gets its begin at once, so that the trace of a job that hangs shows it.

use std::collections::VecDeque;

use super::super::event::Body;
use super::super::hash::QuickMap;
use super::packets::{Annotations, Packets};
use super::tracks::{Group, Place, Tracks};

/// If there is no child for this long, none will come: many times the proxy thread's wake-up.
const GRACE_NS: u64 = 20_000_000;

/// A call older than this is shown before it is complete.
const EARLY_NS: u64 = 1_000_000_000;

/// Arrows drawn from one call; more would not be readable, and a packet must fit into a page.
const ARROWS: usize = 128;

/// Calls that are kept after they were written. The proxy thread of a host with too few processors comes late, and
/// operations that a CUDA graph replays belong to a call of long ago. Their operations get its name, and its slice is
/// not made longer.
const KEPT: usize = 4096;

/// Calls that may be incomplete at once in a communicator; beyond that the oldest is considered complete.
const INCOMPLETE: usize = 4096;

/// One collective or point-to-point operation.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) comm: u64,
    pub(super) body: Body,
    pub(super) annotations: Annotations,
    pub(super) begin: u64,
    stopped: Option<u64>,
    children: u32,
    /// A child was open when the communicator was aborted.
    aborted: bool,
    last: u64,
    flows: Vec<u64>,
    /// How many operations it has had per channel, peer and direction.
    pub(super) ops: QuickMap<(u8, i32, bool), u32>,
    place: Option<Place>,
}

/// All calls that may still get children.
#[derive(Default)]
pub(super) struct Calls {
    calls: QuickMap<u64, Call>,
    /// Per communicator track, calls not yet written, in the order of their begins.
    queues: QuickMap<u64, VecDeque<u64>>,
    /// Calls that were begun early and not yet ended.
    early: Vec<u64>,
    /// Calls that were written, oldest first.
    kept: VecDeque<u64>,
}

impl Calls {
    pub(super) fn start(&mut self, id: u64, comm: u64, when: u64, body: Body, annotations: Annotations, flow: u64) {
        let call = Call {
            comm,
            body,
            annotations,
            begin: when,
            stopped: None,
            children: 0,
            aborted: false,
            last: when,
            flows: vec![flow],
            ops: QuickMap::default(),
            place: None,
        };
        self.calls.insert(id, call);
        self.queues.entry(comm).or_default().push_back(id);
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Call> {
        self.calls.get_mut(&id)
    }

    pub(super) fn stop(&mut self, id: u64, when: u64) -> bool {
        let Some(call) = self.calls.get_mut(&id) else { return false };
        call.stopped = Some(when);
        call.last = call.last.max(when);
        true
    }

    pub(super) fn child_begins(&mut self, id: u64, when: u64, flow: Option<u64>) {
        if let Some(call) = self.calls.get_mut(&id) {
            call.children += 1;
            call.last = call.last.max(when);
            if let Some(flow) = flow.filter(|_| call.flows.len() < ARROWS) {
                call.flows.push(flow);
            }
        }
    }

    /// A child ends by an abort.
    pub(super) fn abort(&mut self, id: u64) {
        if let Some(call) = self.calls.get_mut(&id) {
            call.aborted = true;
        }
    }

    pub(super) fn child_ends(&mut self, id: u64, when: u64) {
        if let Some(call) = self.calls.get_mut(&id) {
            call.children = call.children.saturating_sub(1);
            call.last = call.last.max(when);
        }
    }

    /// Writes what is complete at `now`.
    pub(super) fn advance(&mut self, now: u64, out: &mut Packets, tracks: &mut Tracks) {
        let Self { calls, queues, early, kept } = self;
        for queue in queues.values_mut() {
            while let Some(&id) = queue.front() {
                let Some(call) = calls.get_mut(&id) else {
                    queue.pop_front();
                    continue;
                };
                let complete = call.is_complete(now) || queue.len() > INCOMPLETE;
                if !complete && now < call.begin + EARLY_NS {
                    break;
                }
                queue.pop_front();
                call.write_begin(out, tracks);
                if complete {
                    call.write_end(out, tracks);
                    kept.push_back(id);
                } else {
                    early.push(id);
                }
            }
        }
        early.retain(|id| {
            let Some(call) = calls.get_mut(id).filter(|call| call.is_complete(now)) else {
                return calls.contains_key(id);
            };
            call.write_end(out, tracks);
            kept.push_back(*id);
            false
        });
        while kept.len() > KEPT {
            kept.pop_front().and_then(|id| calls.remove(&id));
        }
    }

    /// The calls that are written and have not ended, with their tracks.
    pub(super) fn begun(&self) -> impl Iterator<Item = (&Call, u64)> {
        let calls = self.early.iter().filter_map(|id| self.calls.get(id));
        calls.filter_map(|call| Some((call, call.place.as_ref()?.uuid)))
    }

    /// Writes all calls of a communicator that has ended, complete or not.
    pub(super) fn end(&mut self, comm: u64, now: u64, out: &mut Packets, tracks: &mut Tracks) {
        let mut ids: Vec<u64> = self.queues.remove(&comm).unwrap_or_default().into();
        ids.extend(self.early.extract_if_comm(&self.calls, comm));
        for id in ids {
            let Some(mut call) = self.calls.remove(&id) else { continue };
            if call.place.is_none() {
                call.write_begin(out, tracks);
            }
            if call.stopped.is_none() || call.children > 0 {
                call.last = call.last.max(now);
            }
            call.write_end(out, tracks);
        }
        let calls = &mut self.calls;
        self.kept.retain(|id| {
            let ends = calls.get(id).is_none_or(|call| call.comm == comm);
            if ends {
                calls.remove(id);
            }
            !ends
        });
    }
}

/// Takes a communicator's calls out of the list of early ones.
trait ExtractComm {
    fn extract_if_comm(&mut self, calls: &QuickMap<u64, Call>, comm: u64) -> Vec<u64>;
}

impl ExtractComm for Vec<u64> {
    fn extract_if_comm(&mut self, calls: &QuickMap<u64, Call>, comm: u64) -> Vec<u64> {
        let (out, keep) = self.iter().partition(|id| calls.get(id).is_none_or(|call| call.comm == comm));
        *self = keep;
        out
    }
}

impl Call {
    fn is_complete(&self, now: u64) -> bool {
        self.stopped.is_some() && self.children == 0 && now >= self.last + GRACE_NS
    }

    fn write_begin(&mut self, out: &mut Packets, tracks: &mut Tracks) {
        let place = tracks.take(out, Group::Collectives(self.comm), self.begin);
        let (kind, name) = self.title();
        out.begin(place.uuid, self.begin, kind, name, &self.annotations, &self.flows);
        self.place = Some(place);
    }

    /// Its category and name.
    pub(super) fn title(&self) -> (&'static str, &'static str) {
        let (kind, name) = match &self.body {
            Body::Coll(coll) => ("Coll", coll.func),
            Body::P2p(p2p) => ("P2p", p2p.func),
            Body::CeColl(coll) => ("CeColl", coll.func),
            _ => unreachable!("only these are calls"),
        };
        (kind, name.text())
    }

    fn write_end(&mut self, out: &mut Packets, tracks: &mut Tracks) {
        let Some(place) = self.place.take() else { return };
        let mut annotations = Annotations::new();
        if let Some(stopped) = self.stopped {
            annotations.push(("enqueued ns", super::fields::Value::Uint(stopped - self.begin)));
        } else {
            annotations.push(("never stopped", super::fields::Value::Bool(true)));
        }
        if self.aborted {
            annotations.push(("aborted", super::fields::Value::Bool(true)));
        }
        if self.children > 0 {
            annotations.push(("children left open", super::fields::Value::Uint(self.children.into())));
        }
        out.end(place.uuid, self.last, &annotations, &[]);
        tracks.release(place, self.last);
    }
}
