//! The figures: what was called, how long it took, and where the time went.
//!
//! A [`Summary`] takes records in causal order, live in the writer's thread or read back from a trace, and keeps sums
//! and histograms. Its size depends on how many communicators, peers and rails there are, not on how long the job runs.
//!
//! NCCL's states show where a step's time went and, for the wire, the transport's own measurements:
//!
//! * *GPU*: the sender waits for the GPU's data, the receiver for the GPU to take it;
//! * *receiver not ready*: the sender has data and the other side has no buffer posted;
//! * *network*: the rest of the send; on the receiving side, waiting for data to arrive;
//! * *flush*: making received data visible to the GPU.

mod calls;
mod histogram;
mod table;

pub(crate) use calls::{Arrival, CallKey, CallStat, size_of_datatype};
pub(crate) use histogram::Histogram;
pub(crate) use table::{bytes, render, time};

use std::collections::{BTreeMap, BTreeSet};

use super::event::{Body, CommInfo, NetTimes, Record, state};
use super::hash::QuickMap;
use super::names::Name;
use super::rail::{Links, Rail};
use calls::Calls;

/// Communicators with figures of their own; those of older ones that have ended are added up by group.
const COMMS: usize = 512;

/// Communicators are grouped by their names; the number of groups, with one for all others.
const GROUPS: usize = 16;

/// The group of the communicators for which there was no group left.
pub(crate) const OTHERS: &str = "others";

/// The group of the communicators without a name, and of what belongs to none that is known.
pub(crate) const UNNAMED: &str = "unnamed";

/// Open events that are followed at once; beyond this number their stops were lost.
const OPEN: usize = 1 << 18;

/// Steps with one peer in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PeerStat {
    /// How many.
    pub steps: u64,
    /// Their bytes, as NCCL counts them.
    pub bytes: u64,
    /// Waiting for the GPU.
    pub gpu_ns: u64,
    /// The sender had data, the receiver was not ready.
    pub receiver_ns: u64,
    /// Under way, or waiting for data to arrive.
    pub network_ns: u64,
    /// Flushing.
    pub flush_ns: u64,
}

/// Network events with one peer on one rail in one direction.
#[derive(Debug, Clone, Default)]
pub(crate) struct WireStat {
    /// Parts of transfers.
    pub parts: u64,
    /// Messages, on the rail of their first part.
    pub messages: u64,
    /// Bytes, resent ones not counted.
    pub bytes: u64,
    /// Bytes that were sent before.
    pub resent_bytes: u64,
    /// Retransmissions within parts.
    pub retransmissions: u64,
    /// Streams or queue pairs that were re-established.
    pub reconnects: u64,
    /// Where the parts' time went, as the transport reported.
    pub wait_receiver_ns: u64,
    /// Waiting for socket space.
    pub wait_socket_ns: u64,
    /// Waiting for credit.
    pub wait_credit_ns: u64,
    /// On the wire.
    pub wire_ns: u64,
    /// From start to stop.
    pub durations: Histogram,
}

/// All figures of one communicator, on one rank.
#[derive(Debug, Clone, Default)]
pub(crate) struct CommStat {
    /// Which communicator.
    pub info: CommInfo,
    /// The communicators with which it is counted together where there must not be too many.
    pub group: String,
    /// Its id, or the sum of those of several communicators: ranks in the same ones have the same sum.
    pub ids: u64,
    /// Collectives that were entered.
    pub entered: u64,
    /// By function, algorithm and protocol.
    pub calls: BTreeMap<CallKey, CallStat>,
    /// By peer, and whether we send to it.
    pub peers: BTreeMap<(i32, bool), PeerStat>,
    /// By peer, rail, and whether we send.
    pub wires: BTreeMap<(i32, Rail, bool), WireStat>,
    /// Kernels: from the start to the end on the GPU's clock.
    pub kernels: Histogram,
    /// The same for the phases of kernels on symmetric memory, by name.
    pub phases: BTreeMap<Name, Histogram>,
    /// Whether it has ended.
    pub ended: bool,
}

/// An operation of the proxy.
#[derive(Debug, Clone, Copy)]
struct Op {
    comm: u64,
    peer: i32,
    send: bool,
    call: u64,
    bytes: u64,
    /// The message of the last part, if steps are not reported: its connection and its number there.
    last: Option<(u64, u64)>,
}

/// One transfer.
#[derive(Debug, Clone, Copy)]
struct Step {
    op: Op,
    phase: u8,
    since: u64,
    stat: PeerStat,
    /// The longest wait for the receiver in a network event, while NCCL considered the send under way.
    told_receiver_ns: u64,
    /// A part of its message has begun.
    begun: bool,
}

/// A part of a transfer.
#[derive(Debug, Clone, Copy)]
struct Net {
    comm: u64,
    peer: i32,
    step: u64,
    begin: u64,
    /// When it ended, if that is reported before its stop.
    ended: Option<u64>,
    /// Its message begins with it.
    first: bool,
    body: Body,
    times: NetTimes,
}

/// The figures of one process.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    /// By communicator's context.
    pub comms: BTreeMap<u64, CommStat>,
    /// The GPUs of its communicators, also of those that have ended.
    pub gpus: BTreeSet<String>,
    /// Events that were dropped.
    pub dropped: u64,
    /// The known connections.
    pub links: Links,
    /// Bytes received from and sent to each of [`Links::hosts`], resent ones not counted.
    pub hosts: Vec<[u64; 2]>,
    /// The groups, in the order in which they appeared.
    groups: Vec<String>,
    calls: Calls,
    ops: QuickMap<u64, Op>,
    steps: QuickMap<u64, Step>,
    nets: QuickMap<u64, Net>,
    kernels: QuickMap<u64, (u64, u64, u64, u64)>,
    phases: QuickMap<u64, (u64, Name, u64, u64)>,
}

impl Summary {
    /// A summary that also keeps when each rank came to each collective, for finding stragglers.
    pub(crate) fn with_arrivals() -> Self {
        Self { calls: Calls::with_arrivals(), ..Self::default() }
    }

    /// When this process's ranks came to their collectives.
    pub(crate) fn arrivals(&self) -> &[Arrival] {
        self.calls.arrivals()
    }

    /// A communicator begins, or more of its data arrives.
    pub(crate) fn comm(&mut self, info: &CommInfo) {
        let group = self.group(&info.name);
        if !info.gpu.is_empty() && !self.gpus.contains(&info.gpu) {
            self.gpus.insert(info.gpu.clone());
        }
        let comm = self.comms.entry(info.context).or_default();
        (comm.info, comm.group, comm.ids) = (info.clone(), group, info.id);
        if self.comms.len() > COMMS {
            let oldest = self.comms.iter().find(|(_, comm)| comm.ended).map(|(&context, _)| context);
            if let Some(old) = oldest.and_then(|context| self.comms.remove(&context)) {
                let number = self.groups.iter().position(|group| *group == old.group).unwrap_or(GROUPS);
                let context = u64::MAX - number as u64;
                let rest = self.comms.entry(context).or_default();
                let name = format!("{}, ended earlier", old.group);
                rest.info = CommInfo { name, rank: -1, context, ..CommInfo::default() };
                rest.group.clone_from(&old.group);
                rest.add(&old);
            }
        }
    }

    /// The group of a communicator of this name.
    fn group(&mut self, name: &str) -> String {
        let name = if name.is_empty() { UNNAMED } else { name };
        if !self.groups.iter().any(|group| group == name) {
            if self.groups.len() >= GROUPS {
                return OTHERS.into();
            }
            self.groups.push(name.into());
        }
        name.into()
    }

    /// A communicator ends.
    pub(crate) fn comm_ends(&mut self, context: u64, now: u64) {
        self.calls.end(context, now, &mut self.comms);
        self.ops.retain(|_, op| op.comm != context);
        self.steps.retain(|_, step| step.op.comm != context);
        self.nets.retain(|_, net| net.comm != context);
        self.kernels.retain(|_, kernel| kernel.0 != context);
        self.phases.retain(|_, phase| phase.0 != context);
        if let Some(comm) = self.comms.get_mut(&context) {
            comm.ended = true;
        }
    }

    /// Time has come to `now`.
    pub(crate) fn advance(&mut self, now: u64) {
        self.calls.advance(now, &mut self.comms);
    }

    /// No record follows: counts the remaining calls.
    pub(crate) fn finish(&mut self, now: u64) {
        let all: Vec<u64> = self.comms.keys().copied().collect();
        for context in all {
            self.calls.end(context, now, &mut self.comms);
        }
    }

    /// One record.
    pub(crate) fn apply(&mut self, record: &Record) {
        let when = record.when;
        match record.body {
            Body::Stop => self.stop(record.id, when),
            Body::State { state, arg, .. } => self.state(record.id, when, state, arg),
            Body::NetTimes(times) => {
                if let Some(net) = self.nets.get_mut(&record.id) {
                    net.times = times;
                    net.ended = Some(when.saturating_sub(times.ago_ns.into()));
                }
                if times.ends {
                    self.stop(record.id, when);
                }
            }
            Body::Coll(_) | Body::P2p(_) | Body::CeColl(_) => {
                if !matches!(record.body, Body::P2p(_))
                    && let Some(comm) = self.comms.get_mut(&record.context)
                {
                    comm.entered += 1;
                }
                self.calls.start(record);
            }
            Body::ProxyOp(op) if self.ops.len() < OPEN => {
                self.calls.child_begins(record.parent, when);
                let comm = record.context;
                let op = Op { comm, peer: op.peer, send: op.send, call: record.parent, bytes: 0, last: None };
                self.ops.insert(record.id, op);
            }
            Body::ProxyStep { .. } if self.steps.len() < OPEN => {
                if let Some(&op) = self.ops.get(&record.parent) {
                    let stat = PeerStat { steps: 1, ..PeerStat::default() };
                    let step = Step { op, phase: u8::MAX, since: when, stat, told_receiver_ns: 0, begun: false };
                    self.steps.insert(record.id, step);
                }
            }
            Body::NetSocket { .. } | Body::NetIb { .. } | Body::NetTowline(_) if self.nets.len() < OPEN => {
                let (offset, resend, ago_ns, message) = match record.body {
                    Body::NetTowline(part) => (part.offset, part.resend, part.ago_ns, Some((part.link, part.message))),
                    _ => (0, false, 0, None),
                };
                let begin = when.saturating_sub(ago_ns.into());
                // A step is a message, whichever of its parts begins first. Where steps are not reported, an
                // operation's messages come one after the other; without any of this, only the part at offset 0 stands
                // for its message.
                let (comm, peer, first) = if let Some(step) = self.steps.get_mut(&record.parent) {
                    (step.op.comm, step.op.peer, !resend && !std::mem::replace(&mut step.begun, true))
                } else if let Some(op) = self.ops.get_mut(&record.parent) {
                    let first = !resend && (message.is_none() || message != op.last);
                    if first {
                        op.last = message;
                    }
                    (op.comm, op.peer, first)
                } else {
                    (record.context, -1, !resend && offset == 0)
                };
                let times = NetTimes::default();
                let net = Net { comm, peer, step: record.parent, begin, ended: None, first, body: record.body, times };
                self.nets.insert(record.id, net);
            }
            Body::KernelCh { timer, .. } if self.kernels.len() < OPEN => {
                self.calls.child_begins(record.parent, when);
                self.calls.kernel_begins(record.parent, when);
                let comm = if record.context != 0 { record.context } else { self.calls.comm(record.parent) };
                self.kernels.insert(record.id, (comm, record.parent, timer, 0));
            }
            Body::KernelPhase { name, timer, .. } if self.phases.len() < OPEN => {
                if let Some(&(comm, ..)) = self.kernels.get(&record.parent) {
                    self.phases.insert(record.id, (comm, name, timer, 0));
                }
            }
            _ => {}
        }
    }

    fn state(&mut self, id: u64, when: u64, state: u8, arg: u64) {
        if let Some(step) = self.steps.get_mut(&id).filter(|_| state::is_step_phase(state)) {
            step.account(when);
            step.phase = state;
            if matches!(state, state::STEP_SEND_WAIT | state::STEP_RECV_FLUSH_WAIT) {
                step.stat.bytes = arg;
            }
        } else if let Some(op) = self.ops.get_mut(&id).filter(|_| state <= state::OP_RECV_DONE) {
            op.bytes = op.bytes.max(arg);
        } else if let Some(kernel) = self.kernels.get_mut(&id).filter(|_| state == state::KERNEL_STOP) {
            kernel.3 = arg;
        } else if let Some(phase) = self.phases.get_mut(&id).filter(|_| state == state::KERNEL_PHASE_STOP) {
            phase.3 = arg;
        }
    }

    fn stop(&mut self, id: u64, when: u64) {
        if self.calls.stop(id, when) {
            return;
        }
        if let Some(mut step) = self.steps.remove(&id) {
            step.account(when);
            // What NCCL took for a send under way was in part a receiver that was not ready.
            let moved = step.told_receiver_ns.min(step.stat.network_ns);
            if step.op.send {
                step.stat.network_ns -= moved;
                step.stat.receiver_ns += moved;
            }
            let comm = self.comms.entry(step.op.comm).or_default();
            comm.peers.entry((step.op.peer, step.op.send)).or_default().add(&step.stat);
        } else if let Some(net) = self.nets.remove(&id) {
            self.net_ends(&net, net.ended.unwrap_or(when));
        } else if let Some(op) = self.ops.remove(&id) {
            self.calls.child_ends(op.call, when);
            // Before v4 the states of steps carry no sizes, those of operations do.
            if op.bytes > 0 {
                let comm = self.comms.entry(op.comm).or_default();
                comm.peers.entry((op.peer, op.send)).or_default().bytes += op.bytes;
            }
        } else if let Some((comm, call, from, to)) = self.kernels.remove(&id) {
            self.calls.child_ends(call, when);
            if from > 0 && to >= from {
                self.comms.entry(comm).or_default().kernels.add(to - from);
            }
        } else if let Some((comm, name, from, to)) = self.phases.remove(&id)
            && from > 0
            && to >= from
        {
            self.comms.entry(comm).or_default().phases.entry(name).or_default().add(to - from);
        }
    }

    fn net_ends(&mut self, net: &Net, when: u64) {
        let Some((rail, send, length)) = self.links.rail(&net.body) else { return };
        if let Some(step) = self.steps.get_mut(&net.step) {
            step.told_receiver_ns = step.told_receiver_ns.max(net.times.wait_receiver_ns);
        }
        let comm = self.comms.entry(net.comm).or_default();
        let wire = comm.wires.entry((net.peer, rail, send)).or_default();
        let resend = matches!(net.body, Body::NetTowline(part) if part.resend);
        wire.parts += 1;
        if resend {
            wire.resent_bytes += length;
        } else {
            wire.bytes += length;
            if let Some(host) = self.links.host(&net.body) {
                if self.hosts.len() <= host {
                    self.hosts.resize(host + 1, [0; 2]);
                }
                self.hosts[host][usize::from(send)] += length;
            }
            wire.messages += u64::from(net.first);
        }
        wire.retransmissions += u64::from(net.times.retransmissions);
        wire.reconnects += u64::from(net.times.reconnects);
        wire.wait_receiver_ns += net.times.wait_receiver_ns;
        wire.wait_socket_ns += net.times.wait_socket_ns;
        wire.wait_credit_ns += net.times.wait_credit_ns;
        wire.wire_ns += net.times.wire_ns;
        wire.durations.add(when.saturating_sub(net.begin));
    }
}

impl Step {
    /// The phase that ends now gets its time.
    fn account(&mut self, when: u64) {
        let time = when.saturating_sub(self.since);
        self.since = when;
        let stat = &mut self.stat;
        match self.phase {
            state::STEP_SEND_GPU_WAIT | state::STEP_RECV_GPU_WAIT => stat.gpu_ns += time,
            state::STEP_SEND_PEER_WAIT => stat.receiver_ns += time,
            state::STEP_SEND_WAIT | state::STEP_RECV_WAIT => stat.network_ns += time,
            state::STEP_RECV_FLUSH_WAIT => stat.flush_ns += time,
            _ => {}
        }
    }
}

impl PeerStat {
    /// Adds another's figures.
    pub(crate) fn add(&mut self, other: &PeerStat) {
        self.steps += other.steps;
        self.bytes += other.bytes;
        self.gpu_ns += other.gpu_ns;
        self.receiver_ns += other.receiver_ns;
        self.network_ns += other.network_ns;
        self.flush_ns += other.flush_ns;
    }

    /// The increase since `before`.
    pub(crate) fn since(&self, before: &PeerStat) -> PeerStat {
        PeerStat {
            steps: self.steps.saturating_sub(before.steps),
            bytes: self.bytes.saturating_sub(before.bytes),
            gpu_ns: self.gpu_ns.saturating_sub(before.gpu_ns),
            receiver_ns: self.receiver_ns.saturating_sub(before.receiver_ns),
            network_ns: self.network_ns.saturating_sub(before.network_ns),
            flush_ns: self.flush_ns.saturating_sub(before.flush_ns),
        }
    }
}

impl WireStat {
    /// Adds another's figures.
    pub(crate) fn add(&mut self, other: &WireStat) {
        self.parts += other.parts;
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.resent_bytes += other.resent_bytes;
        self.retransmissions += other.retransmissions;
        self.reconnects += other.reconnects;
        self.wait_receiver_ns += other.wait_receiver_ns;
        self.wait_socket_ns += other.wait_socket_ns;
        self.wait_credit_ns += other.wait_credit_ns;
        self.wire_ns += other.wire_ns;
        self.durations.merge(&other.durations);
    }
}

impl CommStat {
    /// Adds another's figures; the communicator's name and group stay.
    pub(crate) fn add(&mut self, other: &CommStat) {
        self.ids = self.ids.wrapping_add(other.ids);
        self.entered += other.entered;
        for (key, call) in &other.calls {
            self.calls.entry(*key).or_default().add(call);
        }
        for (key, peer) in &other.peers {
            self.peers.entry(*key).or_default().add(peer);
        }
        for (key, wire) in &other.wires {
            self.wires.entry(*key).or_default().add(wire);
        }
        self.kernels.merge(&other.kernels);
        for (&name, phase) in &other.phases {
            self.phases.entry(name).or_default().merge(phase);
        }
    }
}

#[cfg(test)]
mod tests;
