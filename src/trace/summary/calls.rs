//! Calls and how long they took: from the start of enqueueing until the last child was done.

use std::collections::BTreeMap;

use super::super::event::{Body, Record};
use super::super::hash::QuickMap;
use super::super::names::Name;
use super::{CommStat, Histogram};

/// As in the trace: if there is no child for this long, none will come.
const GRACE_NS: u64 = 20_000_000;

/// Calls that are followed at once.
const OPEN: usize = 1 << 16;

/// When ranks came to collectives; more are not kept.
const ARRIVALS: usize = 4 << 20;

/// Calls with these in common share one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CallKey {
    /// AllReduce, Send, …
    pub func: Name,
    /// RING, TREE, …; none for point-to-point operations.
    pub algorithm: Name,
    /// LL, LL128, SIMPLE; none for point-to-point operations.
    pub protocol: Name,
}

/// Figures of calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallStat {
    /// How many were completed.
    pub count: u64,
    /// The number of the first one among all calls of the process.
    pub first: u64,
    /// Bytes of their data, as nccl-tests counts a size.
    pub bytes: u64,
    /// Bytes that the slowest link had to move, as nccl-tests counts for its bus bandwidth.
    pub bus_bytes: u64,
    /// From the start of enqueueing to the end of the last operation or kernel.
    pub latency: Histogram,
    /// How many had neither operation nor kernel, so that only their enqueueing was timed.
    pub enqueue_only: u64,
}

impl CallStat {
    /// Adds another's figures.
    pub(crate) fn add(&mut self, other: &CallStat) {
        self.first = if self.count == 0 { other.first } else { self.first.min(other.first) };
        self.count += other.count;
        self.bytes += other.bytes;
        self.bus_bytes += other.bus_bytes;
        self.latency.merge(&other.latency);
        self.enqueue_only += other.enqueue_only;
    }
}

/// A rank at a collective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Arrival {
    /// The communicator's context in its process.
    pub context: u64,
    /// The collective's function.
    pub func: Name,
    /// Its number.
    pub seq: u64,
    /// When the host enqueued it.
    pub enqueued: u64,
    /// When its first kernel was seen to run, 0 if none was.
    pub kernel: u64,
    /// When its last operation or kernel was done.
    pub done: u64,
}

#[derive(Debug)]
struct Call {
    context: u64,
    body: Body,
    begin: u64,
    stopped: bool,
    children: u32,
    had_children: bool,
    kernel: u64,
    last: u64,
}

/// Calls that may still get children.
#[derive(Debug, Default)]
pub(super) struct Calls {
    open: QuickMap<u64, Call>,
    arrivals: Option<Vec<Arrival>>,
    /// How many were completed.
    completed: u64,
    /// Nothing can be complete before this.
    look_at: u64,
}

impl Calls {
    pub(super) fn with_arrivals() -> Self {
        Self { arrivals: Some(Vec::new()), ..Self::default() }
    }

    pub(super) fn arrivals(&self) -> &[Arrival] {
        self.arrivals.as_deref().unwrap_or_default()
    }

    pub(super) fn comm(&self, id: u64) -> u64 {
        self.open.get(&id).map_or(0, |call| call.context)
    }

    pub(super) fn start(&mut self, record: &Record) {
        if self.open.len() < OPEN {
            let call = Call {
                context: record.context,
                body: record.body,
                begin: record.when,
                stopped: false,
                children: 0,
                had_children: false,
                kernel: 0,
                last: record.when,
            };
            self.open.insert(record.id, call);
        }
    }

    pub(super) fn stop(&mut self, id: u64, when: u64) -> bool {
        let Some(call) = self.open.get_mut(&id) else { return false };
        call.stopped = true;
        if !call.had_children {
            call.last = when;
        }
        true
    }

    pub(super) fn child_begins(&mut self, id: u64, when: u64) {
        if let Some(call) = self.open.get_mut(&id) {
            if !call.had_children {
                // From now on the children, not the enqueueing, determine when it is done.
                call.had_children = true;
                call.last = when;
            }
            call.children += 1;
        }
    }

    pub(super) fn child_ends(&mut self, id: u64, when: u64) {
        if let Some(call) = self.open.get_mut(&id) {
            call.children = call.children.saturating_sub(1);
            call.last = call.last.max(when);
        }
    }

    pub(super) fn kernel_begins(&mut self, id: u64, when: u64) {
        if let Some(call) = self.open.get_mut(&id).filter(|call| call.kernel == 0) {
            call.kernel = when;
        }
    }

    pub(super) fn advance(&mut self, now: u64, comms: &mut BTreeMap<u64, CommStat>) {
        if now < self.look_at {
            return;
        }
        self.look_at = now + GRACE_NS / 4;
        let complete = |call: &Call| call.stopped && call.children == 0 && now >= call.last + GRACE_NS;
        self.close(complete, comms);
    }

    /// A communicator has ended: its calls are counted if they were complete but for the grace.
    pub(super) fn end(&mut self, context: u64, _now: u64, comms: &mut BTreeMap<u64, CommStat>) {
        self.close(|call| call.context == context && call.stopped && call.children == 0, comms);
        self.open.retain(|_, call| call.context != context);
    }

    fn close(&mut self, complete: impl Fn(&Call) -> bool, comms: &mut BTreeMap<u64, CommStat>) {
        let Self { open, arrivals, completed, .. } = self;
        open.retain(|_, call| {
            if !complete(call) {
                return true;
            }
            let comm = comms.entry(call.context).or_default();
            *completed += 1;
            comm.calls.entry(call.key()).or_default().count_in(call, comm.info.ranks, *completed);
            if let (Some(list), Body::Coll(coll)) = (arrivals.as_mut(), call.body)
                && list.len() < ARRIVALS
            {
                list.push(Arrival {
                    context: call.context,
                    func: coll.func,
                    seq: coll.seq,
                    enqueued: call.begin,
                    kernel: call.kernel,
                    done: call.last,
                });
            }
            false
        });
    }
}

impl CallStat {
    fn count_in(&mut self, call: &Call, ranks: i32, number: u64) {
        let (func, count, datatype) = match call.body {
            Body::Coll(coll) => (coll.func, coll.count, coll.datatype),
            Body::P2p(p2p) => (p2p.func, p2p.count, p2p.datatype),
            Body::CeColl(coll) => (coll.func, coll.count, coll.datatype),
            _ => return,
        };
        let (bytes, bus_bytes) = sizes(func.text(), count * size_of_datatype(datatype.text()), ranks);
        if self.count == 0 {
            self.first = number;
        }
        self.count += 1;
        self.bytes += bytes;
        self.bus_bytes += bus_bytes;
        self.latency.add(call.last.saturating_sub(call.begin));
        self.enqueue_only += u64::from(!call.had_children);
    }
}

impl Call {
    fn key(&self) -> CallKey {
        match self.body {
            Body::Coll(coll) => CallKey { func: coll.func, algorithm: coll.algorithm, protocol: coll.protocol },
            Body::P2p(p2p) => CallKey { func: p2p.func, algorithm: Name::NONE, protocol: Name::NONE },
            Body::CeColl(coll) => CallKey { func: coll.func, algorithm: "copy engine".into(), protocol: coll.strategy },
            _ => CallKey { func: Name::NONE, algorithm: Name::NONE, protocol: Name::NONE },
        }
    }
}

/// Bytes of one element.
pub(crate) fn size_of_datatype(name: &str) -> u64 {
    match name {
        "ncclInt8" | "ncclChar" | "ncclUint8" | "ncclFloat8e4m3" | "ncclFloat8e5m2" => 1,
        "ncclFloat16" | "ncclHalf" | "ncclBfloat16" => 2,
        "ncclInt64" | "ncclUint64" | "ncclFloat64" | "ncclDouble" => 8,
        _ => 4,
    }
}

/// The size of an operation and the share of it that the bus has to carry, as nccl-tests defines them, from the count
/// that NCCL is given.
fn sizes(func: &str, bytes: u64, ranks: i32) -> (u64, u64) {
    let n = ranks.max(1) as u64;
    let part = |whole: u64| (u128::from(whole) * u128::from(n - 1) / u128::from(n)) as u64;
    match func {
        "AllReduce" => (bytes, 2 * part(bytes)),
        "AllGather" | "ReduceScatter" | "AlltoAll" | "AllToAll" | "Gather" | "Scatter" => (bytes * n, part(bytes * n)),
        _ => (bytes, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_nccl_tests() {
        assert_eq!(sizes("AllReduce", 800, 4), (800, 1200));
        assert_eq!(sizes("AllGather", 200, 4), (800, 600));
        assert_eq!(sizes("Broadcast", 800, 4), (800, 800));
        assert_eq!(sizes("AllReduce", 800, 0), (800, 0));
    }
}
