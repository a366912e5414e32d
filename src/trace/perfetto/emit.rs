//! Records in, packets out: which slice on which track, and the arrows between them.

use super::super::event::{Body, CommInfo, Kind, ProxyOp, Record, state};
use super::super::hash::QuickMap;
use super::super::key;
use super::super::names::Name;
use super::calls::Calls;
use super::category;
use super::fields::{self, Value};
use super::file::TraceFile;
use super::packets::{Annotations, Packets};
use super::proto::UNIT_COUNT;
use super::tracks::{Group, Place, Tracks};
use super::wire::Rails;
use super::{digest, mix};
use crate::nccl::net_event::SOMEWHERE;
use crate::trace::say::{Level, say};

/// The file's description of its process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProcessInfo {
    /// The host's name.
    pub host: String,
    /// Identifies one boot of one machine: processes with the same value share a clock.
    pub boot: u64,
    /// The process id.
    pub pid: i32,
    /// Its rank in the job, if the launcher provides it.
    pub rank: Option<i32>,
    /// How far the wall clock was ahead of the monotonic one.
    pub wall_offset: i64,
}

/// An event that has begun and not ended.
struct Open {
    body: Body,
    /// The communicator's track, 0 when unknown.
    comm: u64,
    parent: u64,
    begin: u64,
    /// When it ended, if that is reported before its stop.
    ended: Option<u64>,
    track: u64,
    /// The lane to release; None when the slice is on its parent's.
    place: Option<Place>,
    /// Host calls inside this one; a kernel's phases.
    children: Vec<u64>,
    /// A step's phase, and when it began.
    phase: Option<u8>,
    phase_since: u64,
    /// A step's or an operation's bytes; the end of a kernel, or of a phase of one, on the GPU's clock.
    amount: u64,
    /// The part that the sender's and the receiver's arrow have in common.
    flow: u64,
    /// Values that are added at the end.
    last_words: Annotations,
}

struct Comm {
    info: CommInfo,
    track: u64,
    /// Point-to-point operations so far, per channel, peer and direction.
    p2p_ops: QuickMap<(u8, i32, bool), u32>,
    /// The smallest difference seen between our clock and the GPU's.
    gpu_offset: i64,
}

/// Writes a trace.
pub(crate) struct Emitter {
    process: ProcessInfo,
    out: Packets,
    tracks: Tracks,
    seed: u64,
    comms: QuickMap<u64, Comm>,
    /// Tracks for operations of other processes, by pid.
    foreign: QuickMap<i32, u64>,
    open: QuickMap<u64, Open>,
    calls: Calls,
    rails: Rails,
    drops_track: Option<u64>,
    dropped: u64,
    /// The next heartbeat is due then.
    beat_due: u64,
    unmatched: u64,
}

/// The name under which a file stores its process's [`ProcessInfo::wall_offset`].
pub(crate) const WALL_OFFSET: &str = "wall offset";

/// In a file that goes on from another one: how many went before it.
pub(super) const TURNS: &str = "files before";

/// On a slice that ends with its file, and not because its event has ended.
pub(super) const GOES_ON: &str = "goes on in the next file";

/// On a slice that begins with its file: for how many nanoseconds its event had been open.
pub(super) const BEGAN_BEFORE: &str = "began ns before";

/// The name of the counter of dropped events.
pub(super) const DROPS: &str = "events dropped";

/// Between two heartbeats.
pub(crate) const HEARTBEAT_NS: u64 = 1_000_000_000;

/// Open events beyond this number are not taken: their stops were lost.
const OPEN: usize = 1 << 18;

impl Emitter {
    /// A trace into `file`; `seed` keeps the tracks of different processes apart.
    pub(crate) fn new(file: TraceFile, process: &ProcessInfo, seed: u64, now: u64) -> Self {
        let (mut out, tracks) = (Packets::new(file), Tracks::new(seed));
        describe(process, &mut out, &tracks, now);
        Self {
            process: process.clone(),
            out,
            tracks,
            seed,
            comms: QuickMap::default(),
            foreign: QuickMap::default(),
            open: QuickMap::default(),
            calls: Calls::default(),
            rails: Rails::default(),
            drops_track: None,
            dropped: 0,
            beat_due: now,
            unmatched: 0,
        }
    }

    /// The file.
    pub(crate) fn file(&mut self) -> &mut TraceFile {
        self.out.file()
    }

    /// A communicator begins, or more of its data arrives.
    pub(crate) fn comm(&mut self, info: &CommInfo, now: u64) {
        let track = match self.comms.get_mut(&info.context) {
            Some(comm) => {
                comm.info = info.clone();
                comm.track
            }
            None => {
                let track = self.tracks.fresh();
                let gpu_offset = i64::MAX;
                let comm = Comm { info: info.clone(), track, p2p_ops: QuickMap::default(), gpu_offset };
                self.comms.insert(info.context, comm);
                track
            }
        };
        describe_comm(info, track, &mut self.out, &self.tracks, now);
    }

    /// The interfaces of a connection, in the order of its rails.
    pub(crate) fn interfaces(&mut self, link: u64, send: bool, names: &[Name], now: u64) {
        self.rails.links.learn(link, send, names.to_vec(), "");
        describe_link(link, send, names, &mut self.out, &self.tracks, now);
    }

    /// A communicator ends: its open events were aborted.
    pub(crate) fn comm_ends(&mut self, context: u64, now: u64) {
        let Some(comm) = self.comms.remove(&context) else { return };
        let mut left: Vec<(u64, u64)> =
            self.open.iter().filter(|(_, open)| open.comm == comm.track).map(|(&id, open)| (open.begin, id)).collect();
        // Innermost first.
        left.sort_unstable_by(|a, b| b.cmp(a));
        for (_, id) in left {
            if let Some(open) = self.open.get_mut(&id) {
                open.last_words.push(("aborted", Value::Bool(true)));
                self.calls.abort(open.parent);
            }
            self.stop(id, now);
        }
        self.calls.end(comm.track, now, &mut self.out, &mut self.tracks);
        let annotations = vec![("comm", Value::Uint(key::serial(context))), ("ended", Value::Bool(true))];
        self.out.instant(comm.track, now, category::COMM, "communicator ended", &annotations);
        self.tracks.forget(comm.track);
    }

    /// One record.
    pub(crate) fn apply(&mut self, record: &Record) {
        match record.body {
            Body::Stop => self.stop(record.id, record.when),
            Body::State { state, arg, .. } => self.state(record.id, record.when, state, arg),
            Body::NetTimes(times) => {
                if let Some(open) = self.open.get_mut(&record.id) {
                    let words = [
                        ("waited for receiver ns", times.wait_receiver_ns),
                        ("waited for socket ns", times.wait_socket_ns),
                        ("waited for credit ns", times.wait_credit_ns),
                        ("on the wire ns", times.wire_ns),
                        ("retransmissions", times.retransmissions.into()),
                        ("reconnects", times.reconnects.into()),
                    ];
                    open.last_words.clear();
                    open.last_words.extend(words.map(|(name, value)| (name, Value::Uint(value))));
                    open.ended = Some(record.when.saturating_sub(times.ago_ns.into()).max(open.begin));
                }
                if times.ends {
                    self.stop(record.id, record.when);
                }
            }
            _ if self.open.len() < OPEN => self.start(record),
            _ => self.unmatched += 1,
        }
    }

    /// Writes everything that is complete at `now`.
    pub(crate) fn advance(&mut self, now: u64) {
        self.calls.advance(now, &mut self.out, &mut self.tracks);
        self.rails.advance(now, &mut self.out);
        if now >= self.beat_due && !self.comms.is_empty() {
            self.beat_due = now + HEARTBEAT_NS;
            self.out.instant(self.tracks.process(), now, category::HEARTBEAT, "heartbeat", &Annotations::new());
        }
        if self.out.file().is_due() {
            self.turn(now);
        }
        if self.out.file().take_made_room() {
            let name = "older parts of the trace were removed: the disk was full";
            self.out.instant(self.tracks.process(), now, category::MADE_ROOM, name, &Annotations::new());
        }
        self.note_cut(now);
    }

    /// Continues in a new file, which repeats the open events and the tracks.
    fn turn(&mut self, now: u64) {
        let mut open: Vec<(u64, u64)> =
            self.open.iter().filter(|(_, open)| open.track != 0).map(|(&id, open)| (open.begin, id)).collect();
        open.sort_unstable();
        let words = vec![(GOES_ON, Value::Bool(true))];
        for open in open.iter().rev().map(|(_, id)| &self.open[id]) {
            if open.phase.is_some() {
                self.out.end(open.track, now, &words, &[]);
            }
            self.out.end(open.track, now, &words, &[]);
        }
        self.calls.begun().for_each(|(_, track)| self.out.end(track, now, &words, &[]));
        let name = "the trace goes on in the next file";
        self.out.instant(self.tracks.process(), now, category::CUT, name, &Annotations::new());
        if let Err(error) = self.out.turn() {
            say(Level::Warn, &format!("the trace cannot go on in a new file: {error}"));
        }
        describe(&self.process, &mut self.out, &self.tracks, now);
        for comm in self.comms.values() {
            describe_comm(&comm.info, comm.track, &mut self.out, &self.tracks, now);
        }
        for (&pid, &track) in &self.foreign {
            describe_foreign(pid, track, &mut self.out, &self.tracks);
        }
        self.tracks.describe(&mut self.out);
        self.rails.describe(&mut self.out, self.tracks.process());
        for (link, send, names) in self.rails.links.all() {
            describe_link(link, send, names, &mut self.out, &self.tracks, now);
        }
        if let Some(track) = self.drops_track {
            self.out.counter_track(track, self.tracks.process(), DROPS, UNIT_COUNT, None);
            self.out.counter(track, now, self.dropped as i64);
        }
        let before = |begin: u64| (BEGAN_BEFORE, Value::Uint(now.saturating_sub(begin)));
        for (call, track) in self.calls.begun() {
            let (kind, name) = call.title();
            let annotations = [&call.annotations[..], &[before(call.begin)]].concat();
            self.out.begin(track, now, kind, name, &annotations, &[]);
        }
        for (begin, id) in open {
            let open = &self.open[&id];
            let context =
                self.comms.iter().find(|(_, comm)| comm.track == open.comm).map_or(0, |(&context, _)| context);
            let (parent, body) = (open.parent, open.body);
            let record = Record { when: begin, id, parent, context, rank: -1, thread: 0, body };
            let mut annotations = Self::annotations(&record);
            annotations.push(before(begin));
            let kind = body.kind().map_or("", Kind::label);
            self.out.begin(open.track, now, kind, kind, &annotations, &[]);
            if let Some(phase) = open.phase {
                let annotations = vec![before(open.phase_since)];
                self.out.begin(open.track, now, category::PHASE, state::label(phase), &annotations, &[]);
            }
        }
        self.out.file().turned();
    }

    /// The file's last packet, when it takes no more: what happened from `now` on is not in it.
    fn note_cut(&mut self, now: u64) {
        if self.out.file().reserve_last_words() {
            self.out.instant(self.tracks.process(), now, category::CUT, "the trace ends here", &Annotations::new());
        }
    }

    /// Nothing that happened before `now` follows.
    pub(crate) fn settle(&mut self, now: u64) {
        self.rails.finish(now, &mut self.out);
    }

    /// The number of events dropped so far.
    pub(crate) fn drops(&mut self, now: u64, total: u64) {
        self.dropped = total;
        let track = match self.drops_track {
            Some(track) => track,
            None if total == 0 => return,
            None => {
                let track = self.tracks.fresh();
                self.out.counter_track(track, self.tracks.process(), DROPS, UNIT_COUNT, None);
                self.drops_track = Some(track);
                track
            }
        };
        self.out.counter(track, now, total as i64);
    }

    fn annotations(record: &Record) -> Annotations {
        let mut annotations = vec![("id", Value::Uint(key::compact(record.id)))];
        if record.parent != 0 {
            annotations.push(("parent", Value::Uint(key::compact(record.parent))));
        }
        if record.context != 0 {
            annotations.push(("comm", Value::Uint(key::serial(record.context))));
        }
        fields::fields(&record.body, &mut |name, value| annotations.push((name, value)));
        annotations
    }

    /// The track under which a record's events go.
    fn comm_track(&mut self, record: &Record) -> u64 {
        if let Some(comm) = self.comms.get(&record.context) {
            return comm.track;
        }
        let pid = match record.body {
            Body::ProxyOp(op) => op.pid,
            _ => 0,
        };
        if let Some(&track) = self.foreign.get(&pid) {
            return track;
        }
        let track = self.tracks.fresh();
        describe_foreign(pid, track, &mut self.out, &self.tracks);
        self.foreign.insert(pid, track);
        track
    }

    fn start(&mut self, record: &Record) {
        let Some(kind) = record.body.kind() else { return };
        let annotations = Self::annotations(record);
        let when = record.when;
        match record.body {
            Body::Coll(_) | Body::P2p(_) | Body::CeColl(_) => {
                let comm = self.comm_track(record);
                let flow = mix(self.seed, record.parent);
                self.calls.start(record.id, comm, when, record.body, annotations, flow);
            }
            Body::GroupApi { .. } | Body::CollApi(_) | Body::P2pApi(_) | Body::KernelLaunch { .. } => {
                self.start_call_api(record, kind, &annotations);
            }
            Body::Group => self.slice(record, Group::Plans, "launch", &annotations, &[mix(self.seed, record.id)]),
            Body::ProxyCtrl => self.slice(record, Group::Proxy, "ProxyCtrl", &annotations, &[]),
            Body::ProxyOp(op) => self.start_op(record, &op, &annotations),
            Body::ProxyStep { step } => {
                let Some(op) = self.open.get(&record.parent) else {
                    return self.slice(record, Group::Steps, &format!("step {step}"), &annotations, &[]);
                };
                let (comm, group, flow) = (op.comm, Group::Steps(op.track), mix(op.flow, step as u64));
                let place = self.tracks.take(&mut self.out, group, when);
                self.out.begin(place.uuid, when, kind.label(), &format!("step {step}"), &annotations, &[]);
                self.insert(record, comm, place.uuid, Some(place), flow);
            }
            Body::NetTowline(part) => {
                // The transport measures in ticks, by another rate: over 30 ms the two were seen to differ by half a
                // microsecond. No part begins before its step.
                let step = self.open.get(&record.parent).map_or(0, |step| step.begin);
                let when = when.saturating_sub(part.ago_ns.into()).max(step);
                self.start_net(&Record { when, ..*record }, &annotations);
            }
            Body::NetSocket { .. } | Body::NetIb { .. } | Body::NetOther { .. } => {
                self.start_net(record, &annotations);
            }
            Body::KernelCh { .. } => {
                let comm = self.comm_track(record);
                self.calls.child_begins(record.parent, when, None);
                self.insert(record, comm, 0, None, 0);
                self.observe_gpu(record.id, when);
            }
            Body::KernelPhase { .. } => {
                // Without its kernel it has no track.
                let Some(kernel) = self.open.get_mut(&record.parent) else { return };
                kernel.children.push(record.id);
                let comm = kernel.comm;
                self.insert(record, comm, 0, None, 0);
            }
            Body::CeSync { .. } | Body::CeBatch { .. } => {
                self.calls.child_begins(record.parent, when, None);
                self.slice(record, Group::Proxy, kind.label(), &annotations, &[]);
            }
            // A sum has become a part.
            Body::NetSum(_) | Body::State { .. } | Body::NetTimes(_) | Body::Stop => {}
        }
    }

    /// A slice on a lane of its communicator's group.
    fn slice(
        &mut self,
        record: &Record,
        group: fn(u64) -> Group,
        name: &str,
        annotations: &Annotations,
        flows: &[u64],
    ) {
        let comm = self.comm_track(record);
        let place = self.tracks.take(&mut self.out, group(comm), record.when);
        let kind = record.body.kind().map_or("", Kind::label);
        self.out.begin(place.uuid, record.when, kind, name, annotations, flows);
        self.insert(record, comm, place.uuid, Some(place), 0);
    }

    fn insert(&mut self, record: &Record, comm: u64, track: u64, place: Option<Place>, flow: u64) {
        self.open.insert(
            record.id,
            Open {
                body: record.body,
                comm,
                parent: record.parent,
                begin: record.when,
                ended: None,
                track,
                place,
                children: Vec::new(),
                phase: None,
                phase_since: 0,
                amount: 0,
                flow,
                last_words: Annotations::new(),
            },
        );
    }

    /// Host calls nest on one track: a group of calls, the calls in it, its kernel launches.
    fn start_call_api(&mut self, record: &Record, kind: Kind, annotations: &Annotations) {
        let comm = self.comm_track(record);
        let name = match record.body {
            Body::CollApi(call) | Body::P2pApi(call) => call.func.text(),
            Body::KernelLaunch { .. } => "kernel launch",
            _ => "group",
        };
        let flows = [mix(self.seed, record.id)];
        let nested = match self.open.get_mut(&record.parent) {
            Some(parent) if parent.comm == comm && matches!(parent.body, Body::GroupApi { .. }) => {
                parent.children.push(record.id);
                Some(parent.track)
            }
            _ => None,
        };
        if let Some(track) = nested {
            self.out.begin(track, record.when, kind.label(), name, annotations, &flows);
            self.insert(record, comm, track, None, 0);
        } else {
            self.slice(record, Group::Calls, name, annotations, &flows);
        }
    }

    fn start_op(&mut self, record: &Record, op: &ProxyOp, annotations: &Annotations) {
        let comm_track = self.comm_track(record);
        let slot = (op.channel, op.peer, op.send);
        let arrow = mix(self.seed, record.id);
        // What names the operation on both of its ends: the collective's number, or else how many came before.
        let mut name = "proxy".to_string();
        let mut identity = None;
        if let Some(call) = self.calls.get_mut(record.parent) {
            let ordinal = call.ops.entry(slot).or_insert(0);
            *ordinal += 1;
            match call.body {
                Body::Coll(coll) => {
                    name = coll.func.text().to_owned();
                    identity = Some(mix(mix(digest(coll.func.text()), coll.seq), u64::from(*ordinal)));
                }
                Body::P2p(p2p) => name = p2p.func.text().to_owned(),
                _ => {}
            }
        }
        let flow = match self.comms.get_mut(&record.context) {
            Some(comm) => {
                let identity = identity.unwrap_or_else(|| {
                    let ordinal = comm.p2p_ops.entry(slot).or_insert(0);
                    *ordinal += 1;
                    u64::from(*ordinal)
                });
                let rank = if record.rank >= 0 { record.rank } else { comm.info.rank };
                let (from, to) = if op.send { (rank, op.peer) } else { (op.peer, rank) };
                let pair = (from as u32 as u64) << 32 | u64::from(to as u32);
                mix(mix(mix(comm.info.id, pair), op.channel.into()), identity)
            }
            None => 0,
        };
        self.calls.child_begins(record.parent, record.when, Some(arrow));
        let channel = self.tracks.channel(&mut self.out, comm_track, op.channel);
        let place = self.tracks.take(&mut self.out, Group::Ops(channel, op.peer, op.send), record.when);
        self.out.begin(place.uuid, record.when, Kind::ProxyOp.label(), &name, annotations, &[arrow]);
        self.insert(record, comm_track, place.uuid, Some(place), flow);
    }

    fn start_net(&mut self, record: &Record, annotations: &Annotations) {
        self.rails.begin(&record.body, record.when, &mut self.out, &mut self.tracks);
        let (name, flow) = match record.body {
            Body::NetSocket { op: 0, .. } => ("send", 0),
            Body::NetSocket { .. } => ("receive", 0),
            Body::NetIb { .. } => ("work request", 0),
            Body::NetTowline(part) => {
                let name = match (part.send, part.resend) {
                    (true, false) => "send",
                    (true, true) => "resend",
                    (false, false) => "receive",
                    (false, true) => "receive again",
                };
                (
                    name,
                    if part.resend || part.offset == SOMEWHERE {
                        0
                    } else {
                        mix(mix(part.link, part.message), part.offset)
                    },
                )
            }
            _ => ("network", 0),
        };
        let parent = self.open.get(&record.parent).map(|step| (step.comm, step.track));
        let Some((comm, track)) = parent else {
            return self.slice(record, Group::Wire, name, annotations, &[]);
        };
        let place = self.tracks.take(&mut self.out, Group::Wire(track), record.when);
        let sends = matches!(record.body, Body::NetTowline(part) if part.send);
        let flows: &[u64] = if flow != 0 && sends { &[flow] } else { &[] };
        self.out.begin(place.uuid, record.when, Kind::NetPlugin.label(), name, annotations, flows);
        self.insert(record, comm, place.uuid, Some(place), flow);
    }

    fn state(&mut self, id: u64, when: u64, state: u8, arg: u64) {
        let Some(open) = self.open.get_mut(&id) else { return };
        match open.body {
            Body::ProxyStep { .. } if state::is_step_phase(state) => {
                if matches!(state, state::STEP_SEND_WAIT | state::STEP_RECV_FLUSH_WAIT) {
                    open.amount = arg;
                }
                // NCCL repeats a state as often as it tries to send.
                if open.phase == Some(state) {
                    return;
                }
                // The arrow starts where the sender hands over, and ends where the receiver has the data.
                let arrives = open.phase == Some(state::STEP_RECV_WAIT);
                let flows: &[u64] =
                    if open.flow != 0 && (state == state::STEP_SEND_WAIT || arrives) { &[open.flow] } else { &[] };
                let track = open.track;
                let ends = open.phase.replace(state).is_some();
                open.phase_since = when;
                if ends {
                    self.out.end(track, when, &Annotations::new(), &[]);
                }
                self.out.begin(track, when, category::PHASE, state::label(state), &Annotations::new(), flows);
            }
            Body::ProxyOp(_) if state <= state::OP_RECV_DONE => {
                open.amount = open.amount.max(arg);
            }
            Body::KernelCh { .. } if state == state::KERNEL_STOP => {
                open.amount = arg;
                self.observe_gpu(id, when);
            }
            Body::KernelPhase { .. } => open.amount = arg,
            _ => {
                let annotations = match state {
                    state::CTRL_APPEND_END => vec![("appended", Value::Uint(arg))],
                    _ => Annotations::new(),
                };
                if open.track != 0 {
                    self.out.instant(open.track, when, category::STATE, state::label(state), &annotations);
                }
            }
        }
    }

    fn stop(&mut self, id: u64, when: u64) {
        if self.calls.stop(id, when) {
            return;
        }
        if let Some(open) = self.open.get_mut(&id)
            && matches!(open.body, Body::KernelPhase { .. })
        {
            // It is drawn with its kernel.
            open.ended.get_or_insert(when);
            return;
        }
        let Some(mut open) = self.open.remove(&id) else {
            self.unmatched += 1;
            return;
        };
        if matches!(open.body, Body::KernelCh { .. }) {
            self.calls.child_ends(open.parent, when);
            return self.kernel(id, &open, when);
        }
        // A call whose stop was lost ends with the group around it.
        for child in std::mem::take(&mut open.children) {
            if self.open.contains_key(&child) {
                self.stop(child, when);
            }
        }
        let when = open.ended.map_or(when, |ended| ended.min(when));
        let mut words = std::mem::take(&mut open.last_words);
        let mut flows: &[u64] = &[];
        match open.body {
            Body::ProxyStep { .. } => {
                if open.phase.is_some() {
                    self.out.end(open.track, when, &Annotations::new(), &[]);
                }
                words.push(("bytes", Value::Uint(open.amount)));
            }
            Body::ProxyOp(_) => {
                if open.amount > 0 {
                    words.push(("bytes", Value::Uint(open.amount)));
                }
                self.calls.child_ends(open.parent, when);
            }
            Body::CeSync { .. } | Body::CeBatch { .. } => self.calls.child_ends(open.parent, when),
            _ => {
                self.rails.end(&open.body, when, &mut self.out);
                if matches!(open.body, Body::NetTowline(part) if !part.send) && open.flow != 0 {
                    flows = std::slice::from_ref(&open.flow);
                }
            }
        }
        self.out.end(open.track, when, &words, flows);
        if let Some(place) = open.place {
            self.tracks.release(place, when);
        }
    }

    /// The GPU's time of an event that was just reported is a lower bound for the clocks' difference.
    fn observe_gpu(&mut self, id: u64, when: u64) {
        let Some(open) = self.open.get(&id) else { return };
        let Body::KernelCh { timer, .. } = open.body else { return };
        let gpu = if open.amount > 0 { open.amount } else { timer };
        let track = open.comm;
        if gpu == 0 {
            return;
        }
        if let Some(comm) = self.comms.values_mut().find(|comm| comm.track == track) {
            comm.gpu_offset = comm.gpu_offset.min(when as i64 - gpu as i64);
        }
    }

    /// A kernel's slice and those of its phases, on the GPU's own times where they are known.
    fn kernel(&mut self, id: u64, open: &Open, when: u64) {
        let Body::KernelCh { channel, timer } = open.body else { return };
        let offset = self.comms.values().find(|comm| comm.track == open.comm).map(|comm| comm.gpu_offset);
        let times = |open: &Open, timer: u64, when: u64| match offset {
            Some(offset) if offset != i64::MAX && timer > 0 && open.amount >= timer => {
                ((timer as i64 + offset) as u64, (open.amount as i64 + offset) as u64)
            }
            _ => (open.begin, when),
        };
        let (begin, end) = times(open, timer, when);
        let track = self.tracks.channel(&mut self.out, open.comm, channel);
        let place = self.tracks.take(&mut self.out, Group::Kernel(track), begin);
        let annotations = |id: u64, open: &Open| {
            let mut annotations =
                vec![("id", Value::Uint(key::compact(id))), ("parent", Value::Uint(key::compact(open.parent)))];
            fields::fields(&open.body, &mut |name, value| annotations.push((name, value)));
            annotations.push(("gpu stop", Value::Uint(open.amount)));
            annotations
        };
        self.out.begin(place.uuid, begin, Kind::KernelCh.label(), "kernel", &annotations(id, open), &[]);
        let mut last = begin;
        for &id in &open.children {
            let Some(phase) = self.open.remove(&id) else { continue };
            let Body::KernelPhase { name, timer, .. } = phase.body else { continue };
            let (from, to) = times(&phase, timer, phase.ended.unwrap_or(when));
            let from = from.clamp(last, end.max(last));
            last = to.clamp(from, end.max(from));
            let annotations = annotations(id, &phase);
            self.out.begin(place.uuid, from, Kind::KernelPhase.label(), name.text(), &annotations, &[]);
            self.out.end(place.uuid, last, &Annotations::new(), &[]);
        }
        let end = end.max(last);
        self.out.end(place.uuid, end, &Annotations::new(), &[]);
        self.tracks.release(place, end);
    }
}

/// The process, at the beginning of a file.
fn describe(process: &ProcessInfo, out: &mut Packets, tracks: &Tracks, now: u64) {
    out.process(tracks.process(), process.pid, &format!("{}:{}", process.host, process.pid));
    let mut annotations = vec![
        ("host", Value::Text(process.host.as_str().into())),
        ("boot", Value::Uint(process.boot)),
        ("pid", Value::Int(process.pid.into())),
        (WALL_OFFSET, Value::Int(process.wall_offset)),
        ("version", Value::Text(env!("CARGO_PKG_VERSION").into())),
    ];
    annotations.extend(process.rank.map(|rank| ("rank", Value::Int(rank.into()))));
    let turns = out.file().turns();
    if turns > 0 {
        annotations.push((TURNS, Value::Uint(turns)));
    }
    out.instant(tracks.process(), now, category::PROCESS, "Towline", &annotations);
}

fn describe_comm(info: &CommInfo, track: u64, out: &mut Packets, tracks: &Tracks, now: u64) {
    out.track(track, tracks.process(), &info.title(), info.rank);
    let mut annotations = vec![
        ("comm", Value::Uint(key::serial(info.context))),
        ("comm id", Value::Pointer(info.id)),
        ("name", Value::Text(info.name.as_str().into())),
        ("rank", Value::Int(info.rank.into())),
        ("ranks", Value::Int(info.ranks.into())),
        ("nodes", Value::Int(info.nodes.into())),
    ];
    if !info.gpu.is_empty() {
        annotations.push(("gpu", Value::Text(info.gpu.as_str().into())));
    }
    out.instant(track, now, category::COMM, "communicator", &annotations);
}

fn describe_link(link: u64, send: bool, names: &[Name], out: &mut Packets, tracks: &Tracks, now: u64) {
    for (rail, &name) in names.iter().enumerate() {
        let annotations = vec![
            ("link", Value::Uint(link)),
            ("send", Value::Bool(send)),
            ("rail", Value::Uint(rail as u64)),
            ("interface", Value::Text(name)),
        ];
        out.instant(tracks.process(), now, category::INTERFACE, "interface", &annotations);
    }
}

/// The track of operations of another process.
fn describe_foreign(pid: i32, track: u64, out: &mut Packets, tracks: &Tracks) {
    let name = if pid == 0 { "unknown communicator".into() } else { format!("proxied for process {pid}") };
    out.track(track, tracks.process(), &name, i32::MAX);
}
