//! One call of NCCL's as a value: no pointer of NCCL's remains in it.
//!
//! A [`Record`] is made on NCCL's thread and read on ours. It is `Copy` and of fixed size, so that it can travel
//! through a preallocated ring without allocation and without lifetimes: handles are numbers
//! ([`crate::trace::key`]), strings are [`Name`]s.

use super::names::Name;
use crate::nccl::net_event::{self, NetEvent, NetSum};

/// The event types of NCCL's profiler interface. The discriminant is the bit's place in NCCL's event mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Kind {
    Group = 0,
    Coll = 1,
    P2p = 2,
    ProxyOp = 3,
    ProxyStep = 4,
    ProxyCtrl = 5,
    KernelCh = 6,
    NetPlugin = 7,
    GroupApi = 8,
    CollApi = 9,
    P2pApi = 10,
    KernelLaunch = 11,
    CeColl = 12,
    CeSync = 13,
    CeBatch = 14,
    KernelPhase = 15,
}

impl Kind {
    /// All of them, in the order of their bits.
    pub const ALL: [Kind; 16] = [
        Kind::Group,
        Kind::Coll,
        Kind::P2p,
        Kind::ProxyOp,
        Kind::ProxyStep,
        Kind::ProxyCtrl,
        Kind::KernelCh,
        Kind::NetPlugin,
        Kind::GroupApi,
        Kind::CollApi,
        Kind::P2pApi,
        Kind::KernelLaunch,
        Kind::CeColl,
        Kind::CeSync,
        Kind::CeBatch,
        Kind::KernelPhase,
    ];

    /// The kind's bit in NCCL's event mask.
    pub const fn bit(self) -> u32 {
        1 << self as u8
    }

    /// The kind whose mask value NCCL put into a descriptor's `type`.
    pub(crate) fn from_bit(bit: u64) -> Option<Kind> {
        if bit.count_ones() != 1 {
            return None;
        }
        Self::ALL.get(bit.trailing_zeros() as usize).copied()
    }

    /// NCCL's name for it, as in the documentation of the mask.
    pub const fn label(self) -> &'static str {
        match self {
            Kind::Group => "Group",
            Kind::Coll => "Coll",
            Kind::P2p => "P2p",
            Kind::ProxyOp => "ProxyOp",
            Kind::ProxyStep => "ProxyStep",
            Kind::ProxyCtrl => "ProxyCtrl",
            Kind::KernelCh => "KernelCh",
            Kind::NetPlugin => "NetPlugin",
            Kind::GroupApi => "GroupApi",
            Kind::CollApi => "CollApi",
            Kind::P2pApi => "P2pApi",
            Kind::KernelLaunch => "KernelLaunch",
            Kind::CeColl => "CeColl",
            Kind::CeSync => "CeSync",
            Kind::CeBatch => "CeBatch",
            Kind::KernelPhase => "KernelPhase",
        }
    }

    /// The kind with this label, whatever its case.
    pub(crate) fn from_label(label: &str) -> Option<Kind> {
        Self::ALL.into_iter().find(|kind| kind.label().eq_ignore_ascii_case(label))
    }

    /// The mask bits any of which makes NCCL emit this kind: a child brings its ancestors along.
    pub(crate) const fn triggers(self) -> u32 {
        use Kind::*;
        let transfer = ProxyOp.bit() | ProxyStep.bit() | KernelCh.bit() | KernelPhase.bit() | NetPlugin.bit();
        let engine = CeColl.bit() | CeSync.bit() | CeBatch.bit();
        match self {
            GroupApi => GroupApi.bit() | CollApi.triggers() | P2pApi.triggers() | KernelLaunch.bit() | Group.triggers(),
            CollApi => CollApi.bit() | Coll.bit() | transfer | engine,
            P2pApi => P2pApi.bit() | P2p.bit() | transfer,
            Group => Group.bit() | Coll.bit() | P2p.bit() | transfer,
            Coll => Coll.bit() | transfer,
            P2p => P2p.bit() | transfer,
            ProxyOp => ProxyOp.bit() | ProxyStep.bit() | NetPlugin.bit(),
            ProxyStep => ProxyStep.bit() | NetPlugin.bit(),
            CeColl => engine,
            KernelCh => KernelCh.bit() | KernelPhase.bit(),
            KernelLaunch | ProxyCtrl | NetPlugin | CeSync | CeBatch | KernelPhase => self.bit(),
        }
    }
}

/// The facts about a communicator, from its first callback or any later one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CommInfo {
    /// The value that NCCL keeps as this communicator's profiler context.
    pub context: u64,
    /// NCCL's communicator id, the same on all its ranks; 0 while unknown (v1 to v3 pass it with the first collective).
    pub id: u64,
    /// The name the user gave, if any.
    pub name: String,
    /// Number of nodes, 0 when unknown.
    pub nodes: i32,
    /// Number of ranks, 0 when unknown.
    pub ranks: i32,
    /// This rank, −1 while unknown.
    pub rank: i32,
    /// Its GPU ([`crate::os::gpu::Gpu`] as text); empty when unknown.
    pub gpu: String,
}

impl CommInfo {
    /// One line that names the communicator and this rank in it.
    pub(crate) fn title(&self) -> String {
        let name = match (self.name.as_str(), self.id) {
            ("", 0) => format!("communicator {}", super::key::serial(self.context)),
            ("", id) => format!("{id:#x}"),
            (name, id) => format!("{name} ({id:#x})"),
        };
        let gpu = if self.gpu.is_empty() { String::new() } else { format!(" · GPU {}", self.gpu) };
        match (self.rank, self.ranks) {
            (rank, _) if rank < 0 => name,
            (rank, 0) => format!("rank {rank} · {name}{gpu}"),
            (rank, ranks) => format!("rank {rank} of {ranks} · {name}{gpu}"),
        }
    }
}

/// A host call to a collective.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[allow(missing_docs)]
pub struct CollApi {
    pub func: Name,
    pub datatype: Name,
    pub root: i32,
    pub count: u64,
    pub stream: u64,
    pub graph: bool,
    /// The user's mark on the call, from v7 on; 0 stands for none.
    pub tag: u64,
}

/// A collective as NCCL runs it. The user's tag is its host call's: a record has no room for both.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[allow(missing_docs)]
pub struct Coll {
    /// Number of this function's call in its communicator, the same on all ranks.
    pub seq: u64,
    pub count: u64,
    pub send_buffer: u64,
    pub recv_buffer: u64,
    /// The Group event's handle; from v5 on it is not the parent.
    pub group: u64,
    /// The communicator's id, if the descriptor contains it (v1 to v3), else 0.
    pub comm_id: u64,
    pub root: i32,
    pub func: Name,
    pub datatype: Name,
    pub algorithm: Name,
    pub protocol: Name,
    /// The communicator's name, if the descriptor contains it (v1 to v3).
    pub comm_name: Name,
    pub channels: u8,
    pub warps: u8,
    /// Which kernel runs it, from v7 on.
    pub variant: Name,
    /// Whether it works on symmetric memory, without the proxy; from v7 on.
    pub symmetric: bool,
}

/// A send or a receive as NCCL runs it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[allow(missing_docs)]
pub struct P2p {
    pub count: u64,
    pub buffer: u64,
    pub group: u64,
    pub comm_id: u64,
    pub peer: i32,
    pub func: Name,
    pub datatype: Name,
    pub comm_name: Name,
    pub channels: u8,
    /// The user's mark on the call, from v7 on; 0 stands for none.
    pub tag: u64,
}

/// The proxy thread's work for one collective on one channel with one peer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[allow(missing_docs)]
pub struct ProxyOp {
    /// The process whose collective it is; another process when NCCL proxies for it.
    pub pid: i32,
    pub peer: i32,
    pub steps: i32,
    pub chunk: i32,
    pub channel: u8,
    pub send: bool,
}

/// The part of a network event that is known at its start.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[allow(missing_docs)]
pub struct NetPart {
    pub link: u64,
    pub message: u64,
    pub offset: u64,
    pub length: u64,
    pub peer: [u8; 16],
    pub peer_port: u16,
    pub rail: u16,
    pub stream: u16,
    pub send: bool,
    pub resend: bool,
    /// How long before the call it began, in nanoseconds.
    pub ago_ns: u32,
    /// For a part that has ended with nothing else to report: one more than its nanoseconds on the wire. This makes
    /// most parts one record instead of two.
    pub over: u32,
    pub carrier: Carrier,
}

impl NetPart {
    /// The transport's data about the part's start.
    #[inline]
    pub fn of(net: &NetEvent) -> Self {
        Self {
            link: net.link,
            message: net.message,
            offset: net.offset,
            length: net.length,
            peer: net.peer,
            peer_port: net.peer_port,
            rail: net.rail,
            stream: net.stream,
            send: net.is_send(),
            resend: net.is_resend(),
            ago_ns: net.ago_ns,
            over: 0,
            carrier: match net.carrier {
                net_event::CARRIER_SOCKET => Carrier::Socket { fd: net.device },
                net_event::CARRIER_QUEUE_PAIR => Carrier::QueuePair {
                    device: net.device as u16,
                    opcode: net.opcode as u8,
                    number: net.queue_pair,
                    wr_id: net.wr_id,
                },
                _ => Carrier::Unknown,
            },
        }
    }

    /// The same for a part that has ended, including its end if there is room for all of it.
    #[inline]
    pub fn ended(net: &NetEvent) -> Self {
        let over = if Self::takes_in(net) { net.wire_ns as u32 + 1 } else { 0 };
        Self { over, ..Self::of(net) }
    }

    /// The data of the part that stands for the sum.
    fn sum(sum: &NetSum) -> Self {
        let &NetSum { link, message, length, rail, send, wire_ns, .. } = sum;
        let ago_ns = u32::try_from(wire_ns).unwrap_or(u32::MAX);
        Self { link, message, length, rail, stream: net_event::SEVERAL, send, ago_ns, ..Self::default() }
    }

    /// Whether [`NetPart::ended`] holds all data about the part.
    #[inline]
    pub(crate) fn takes_in(net: &NetEvent) -> bool {
        let waits = net.wait_receiver_ns | net.wait_socket_ns | net.wait_credit_ns;
        waits == 0 && net.retransmissions == 0 && net.reconnects == 0 && net.wire_ns < u32::MAX.into()
    }

    /// The value for a part that was this long on the wire, had ended when it was reported, and had no other events.
    fn plain_end(&self, wire_ns: u32) -> NetTimes {
        let ago_ns = self.ago_ns.saturating_sub(wire_ns);
        NetTimes { wire_ns: wire_ns.into(), ago_ns, ends: true, ..NetTimes::default() }
    }

    /// Includes the end, if there is room for all of it.
    #[inline]
    pub(crate) fn take_in(&mut self, times: &NetTimes) -> bool {
        let wire_ns = u32::try_from(times.wire_ns).ok().filter(|ns| *ns < u32::MAX && *times == self.plain_end(*ns));
        self.over = wire_ns.map_or(0, |ns| ns + 1);
        wire_ns.is_some()
    }

    /// The inverse.
    pub(crate) fn take_out(&mut self) -> Option<NetTimes> {
        let wire_ns = std::mem::take(&mut self.over).checked_sub(1)?;
        Some(self.plain_end(wire_ns))
    }
}

/// The carrier of a part, from NCCL's own descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub enum Carrier {
    #[default]
    Unknown,
    Socket {
        fd: i32,
    },
    /// Card, opcode (of `ibv_wr_opcode` or `ibv_wc_opcode`), queue pair and work request.
    QueuePair {
        device: u16,
        opcode: u8,
        number: i32,
        wr_id: u64,
    },
}

/// The part of a network event that is known at its end.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[allow(missing_docs)]
pub struct NetTimes {
    pub retransmissions: u32,
    pub reconnects: u16,
    pub wait_receiver_ns: u64,
    pub wait_socket_ns: u64,
    pub wait_credit_ns: u64,
    pub wire_ns: u64,
    /// How long before the call it ended, in nanoseconds.
    pub ago_ns: u32,
    /// No stop follows: this is the end.
    pub ends: bool,
}

impl NetTimes {
    /// The transport's data in an update.
    pub fn of(net: &NetEvent) -> Self {
        Self {
            retransmissions: net.retransmissions,
            reconnects: net.reconnects,
            wait_receiver_ns: net.wait_receiver_ns,
            wait_socket_ns: net.wait_socket_ns,
            wait_credit_ns: net.wait_credit_ns,
            wire_ns: net.wire_ns,
            ago_ns: net.ago_ns,
            ends: false,
        }
    }

    /// The end of the part that is all of the sum.
    fn sum(sum: &NetSum) -> Self {
        let &NetSum { wait_receiver_ns, wait_socket_ns, wait_credit_ns, wire_ns, .. } = sum;
        Self { wait_receiver_ns, wait_socket_ns, wait_credit_ns, wire_ns, ends: true, ..Self::default() }
    }

    /// The same, from a start.
    pub(crate) fn at_start(net: &NetEvent) -> Self {
        let ago_ns = u64::from(net.ago_ns).saturating_sub(net.wire_ns) as u32;
        Self { ago_ns, ends: true, ..Self::of(net) }
    }
}

/// A collective that the copy engines run.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[allow(missing_docs)]
pub struct CeColl {
    pub seq: u64,
    pub count: u64,
    pub send_buffer: u64,
    pub recv_buffer: u64,
    pub stream: u64,
    pub root: i32,
    pub batch_size: u32,
    pub batches: u32,
    pub ce_seq: u32,
    pub func: Name,
    pub datatype: Name,
    pub strategy: Name,
    pub intra_sync: bool,
    /// The user's mark on the call, from v7 on; 0 stands for none.
    pub tag: u64,
}

/// An event: a start (one variant per kind of descriptor), a change of state, or a stop.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Body {
    Group,
    GroupApi {
        depth: i32,
        graph: bool,
    },
    CollApi(CollApi),
    P2pApi(CollApi),
    KernelLaunch {
        stream: u64,
    },
    Coll(Coll),
    P2p(P2p),
    ProxyOp(ProxyOp),
    ProxyStep {
        step: i32,
    },
    ProxyCtrl,
    KernelCh {
        channel: u8,
        timer: u64,
    },
    /// A part of a kernel on symmetric memory, from v7 on: the barrier before its work, the work, or the barrier behind
    /// it.
    KernelPhase {
        channel: u8,
        number: u8,
        name: Name,
        timer: u64,
    },
    NetSocket {
        fd: i32,
        op: i32,
        length: u64,
    },
    NetIb {
        device: i32,
        opcode: i32,
        qp: i32,
        wr_id: u64,
        length: u64,
    },
    NetTowline(NetPart),
    /// The figures of a part that has ended, on the way from NCCL's thread to ours, which turns it into a
    /// [`Body::NetTowline`] and its [`Body::NetTimes`] ([`Body::ended_part`]).
    NetSum(NetSum),
    /// A NetPlugin event of a plugin with an unknown descriptor.
    NetOther {
        plugin: i64,
    },
    CeColl(CeColl),
    CeSync {
        complete: bool,
        ranks: i32,
    },
    CeBatch {
        ops: i32,
        bytes: u64,
        intra_sync: bool,
    },
    /// The event reached a state ([`state`]); the meaning of `arg` depends on it.
    State {
        state: u8,
        steps: i32,
        arg: u64,
    },
    /// The final update of a [`Body::NetTowline`] event.
    NetTimes(NetTimes),
    Stop,
}

impl Body {
    /// The kind of event that this body starts; None for states, updates and stops.
    pub fn kind(&self) -> Option<Kind> {
        Some(match self {
            Body::Group => Kind::Group,
            Body::GroupApi { .. } => Kind::GroupApi,
            Body::CollApi(_) => Kind::CollApi,
            Body::P2pApi(_) => Kind::P2pApi,
            Body::KernelLaunch { .. } => Kind::KernelLaunch,
            Body::Coll(_) => Kind::Coll,
            Body::P2p(_) => Kind::P2p,
            Body::ProxyOp(_) => Kind::ProxyOp,
            Body::ProxyStep { .. } => Kind::ProxyStep,
            Body::ProxyCtrl => Kind::ProxyCtrl,
            Body::KernelCh { .. } => Kind::KernelCh,
            Body::KernelPhase { .. } => Kind::KernelPhase,
            Body::NetSocket { .. }
            | Body::NetIb { .. }
            | Body::NetTowline(_)
            | Body::NetSum(_)
            | Body::NetOther { .. } => Kind::NetPlugin,
            Body::CeColl(_) => Kind::CeColl,
            Body::CeSync { .. } => Kind::CeSync,
            Body::CeBatch { .. } => Kind::CeBatch,
            Body::State { .. } | Body::NetTimes(_) | Body::Stop => return None,
        })
    }

    /// For a part whose end is reported with its start: leaves the start, and returns the end.
    pub(crate) fn ended_part(&mut self) -> Option<NetTimes> {
        match self {
            Body::NetTowline(part) => part.take_out(),
            Body::NetSum(sum) => {
                let (part, times) = (NetPart::sum(sum), NetTimes::sum(sum));
                *self = Body::NetTowline(part);
                Some(times)
            }
            _ => None,
        }
    }
}

/// One call of NCCL, with its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Record {
    /// When the call began: [`Ticks`](crate::os::ticks::Ticks) in the ring, nanoseconds of CLOCK_MONOTONIC behind it.
    pub when: u64,
    /// The event's handle.
    pub id: u64,
    /// The parent's handle, 0 for none; only with starts.
    pub parent: u64,
    /// The communicator's context, 0 when it is not one of ours (or not known); only with starts.
    pub context: u64,
    /// The rank in the descriptor; only with starts.
    pub rank: i32,
    /// Identifies threads.
    pub thread: u32,
    /// The event.
    pub body: Body,
}

/// The states that NCCL records, by NCCL's numbers.
pub mod state {
    #![allow(missing_docs)]
    pub(crate) const OP_SEND_POSTED: u8 = 0;
    pub(crate) const OP_SEND_REM_FIFO_WAIT: u8 = 1;
    pub(crate) const OP_SEND_TRANSMITTED: u8 = 2;
    pub(crate) const OP_SEND_DONE: u8 = 3;
    pub(crate) const OP_RECV_POSTED: u8 = 4;
    pub(crate) const OP_RECV_RECEIVED: u8 = 5;
    pub(crate) const OP_RECV_TRANSMITTED: u8 = 6;
    pub(crate) const OP_RECV_DONE: u8 = 7;
    pub(crate) const STEP_SEND_GPU_WAIT: u8 = 8;
    pub const STEP_SEND_WAIT: u8 = 9;
    pub(crate) const STEP_RECV_WAIT: u8 = 10;
    pub const STEP_RECV_FLUSH_WAIT: u8 = 11;
    pub(crate) const STEP_RECV_GPU_WAIT: u8 = 12;
    pub(crate) const CTRL_IDLE: u8 = 13;
    pub(crate) const CTRL_ACTIVE: u8 = 14;
    pub(crate) const CTRL_SLEEP: u8 = 15;
    pub(crate) const CTRL_WAKEUP: u8 = 16;
    pub(crate) const CTRL_APPEND: u8 = 17;
    pub(crate) const CTRL_APPEND_END: u8 = 18;
    pub(crate) const OP_IN_PROGRESS: u8 = 19;
    pub(crate) const STEP_SEND_PEER_WAIT: u8 = 20;
    pub const NET_UPDATE: u8 = 21;
    pub(crate) const KERNEL_STOP: u8 = 22;
    pub(crate) const GROUP_START_API_STOP: u8 = 23;
    pub(crate) const GROUP_END_API_START: u8 = 24;
    pub const KERNEL_PHASE_STOP: u8 = 31;

    /// The name of a state, for a person.
    pub fn label(state: u8) -> &'static str {
        match state {
            OP_SEND_POSTED => "SendPosted",
            OP_SEND_REM_FIFO_WAIT => "SendRemFifoWait",
            OP_SEND_TRANSMITTED => "SendTransmitted",
            OP_SEND_DONE => "SendDone",
            OP_RECV_POSTED => "RecvPosted",
            OP_RECV_RECEIVED => "RecvReceived",
            OP_RECV_TRANSMITTED => "RecvTransmitted",
            OP_RECV_DONE => "RecvDone",
            STEP_SEND_GPU_WAIT => "SendGPUWait",
            STEP_SEND_WAIT => "SendWait",
            STEP_RECV_WAIT => "RecvWait",
            STEP_RECV_FLUSH_WAIT => "RecvFlushWait",
            STEP_RECV_GPU_WAIT => "RecvGPUWait",
            CTRL_IDLE => "Idle",
            CTRL_ACTIVE => "Active",
            CTRL_SLEEP => "Sleep",
            CTRL_WAKEUP => "Wakeup",
            CTRL_APPEND => "Append",
            CTRL_APPEND_END => "AppendEnd",
            OP_IN_PROGRESS => "InProgress",
            STEP_SEND_PEER_WAIT => "SendPeerWait",
            NET_UPDATE => "Update",
            KERNEL_STOP => "KernelStop",
            GROUP_START_API_STOP => "GroupStartApiStop",
            GROUP_END_API_START => "GroupEndApiStart",
            25..=30 => "CeState",
            KERNEL_PHASE_STOP => "KernelPhaseStop",
            _ => "?",
        }
    }

    /// The state with this label.
    pub(crate) fn from_label(text: &str) -> Option<u8> {
        (0..=24).find(|&state| label(state) == text)
    }

    /// Whether it is one of a ProxyStep's phases, each of which ends where the next begins.
    pub(crate) fn is_step_phase(state: u8) -> bool {
        matches!(state, STEP_SEND_GPU_WAIT..=STEP_RECV_GPU_WAIT | STEP_SEND_PEER_WAIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_found_by_its_bit_and_by_its_name() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_bit(u64::from(kind.bit())), Some(kind));
            assert_eq!(Kind::from_label(&kind.label().to_lowercase()), Some(kind));
            assert_ne!(kind.triggers() & kind.bit(), 0, "{kind:?} must be emitted when asked for");
        }
        assert_eq!(Kind::from_bit(0), None);
        assert_eq!(Kind::from_bit(3), None);
        assert_eq!(Kind::from_bit(1 << 40), None);
    }

    #[test]
    fn a_child_in_the_mask_brings_its_ancestors_along() {
        let net = Kind::NetPlugin.bit();
        for kind in [Kind::ProxyStep, Kind::ProxyOp, Kind::Coll, Kind::CollApi, Kind::GroupApi, Kind::Group] {
            assert_ne!(kind.triggers() & net, 0, "{kind:?}");
        }
        assert_eq!(Kind::KernelLaunch.triggers() & net, 0);
    }

    #[test]
    fn a_record_fits_beside_its_sequence_number_into_two_cache_lines() {
        assert!(size_of::<Record>() <= 120, "{}", size_of::<Record>());
    }

    #[test]
    fn a_part_takes_in_an_end_that_says_no_more_than_it_has_room_for() {
        let part = NetPart { length: 7, ago_ns: 1000, ..NetPart::default() };
        let plain = NetTimes { wire_ns: 400, ago_ns: 600, ends: true, ..NetTimes::default() };
        for (times, fits) in [
            (plain, true),
            (NetTimes { wire_ns: 0, ago_ns: 1000, ..plain }, true),
            // The beginning was not kept, or is longer ago than a descriptor can hold.
            (NetTimes { wire_ns: 1001, ago_ns: 0, ..plain }, true),
            (NetTimes { wire_ns: u64::from(u32::MAX), ago_ns: 0, ..plain }, false),
            (NetTimes { wire_ns: 1 << 40, ago_ns: 0, ..plain }, false),
            (NetTimes { ago_ns: 599, ..plain }, false),
            (NetTimes { wait_receiver_ns: 1, ..plain }, false),
            (NetTimes { wait_socket_ns: 1, ..plain }, false),
            (NetTimes { wait_credit_ns: 1, ..plain }, false),
            (NetTimes { retransmissions: 1, ..plain }, false),
            (NetTimes { reconnects: 1, ..plain }, false),
            (NetTimes { ends: false, ..plain }, false),
        ] {
            let mut with = part;
            assert_eq!(with.take_in(&times), fits, "{times:?}");
            assert_eq!(with.take_out(), fits.then_some(times));
            assert_eq!((with.take_out(), with), (None, part), "nothing else of it changes");
        }
    }

    #[test]
    fn a_sum_becomes_the_part_and_the_end_that_its_event_would_have_become() {
        for (wire_ns, ago_ns) in [(700, 700), (1 << 32, u32::MAX)] {
            let sum = NetSum {
                link: 1,
                message: 2,
                length: 3,
                wait_receiver_ns: 4,
                wait_socket_ns: 5,
                wait_credit_ns: 6,
                wire_ns,
                rail: 7,
                send: true,
            };
            let net = NetEvent {
                flags: net_event::FLAG_SEND | net_event::FLAG_ENDED,
                link: 1,
                message: 2,
                length: 3,
                wait_receiver_ns: 4,
                wait_socket_ns: 5,
                wait_credit_ns: 6,
                wire_ns,
                ago_ns,
                rail: 7,
                stream: net_event::SEVERAL,
                ..NetEvent::new()
            };
            let mut body = Body::NetSum(sum);
            let end = body.ended_part();
            assert_eq!((body, end), (Body::NetTowline(NetPart::of(&net)), Some(NetTimes::at_start(&net))));
        }
    }

    #[test]
    fn a_part_that_has_ended_is_described_at_once_as_in_two_steps() {
        let plain = NetEvent { flags: net_event::FLAG_ENDED, length: 7, ago_ns: 1000, wire_ns: 400, ..NetEvent::new() };
        for net in [
            plain,
            NetEvent { wire_ns: 0, ..plain },
            NetEvent { wire_ns: 1001, ..plain },
            NetEvent { wire_ns: u64::from(u32::MAX) - 1, ..plain },
            NetEvent { wire_ns: u64::from(u32::MAX), ..plain },
            NetEvent { wire_ns: 1 << 40, ..plain },
            NetEvent { wait_receiver_ns: 1, ..plain },
            NetEvent { wait_socket_ns: 1, ..plain },
            NetEvent { wait_credit_ns: 1, ..plain },
            NetEvent { retransmissions: 1, ..plain },
            NetEvent { reconnects: 1, ..plain },
        ] {
            let mut two_steps = NetPart::of(&net);
            let takes_in = two_steps.take_in(&NetTimes::at_start(&net));
            assert_eq!((NetPart::ended(&net), NetPart::takes_in(&net)), (two_steps, takes_in), "{net:?}");
        }
    }

    #[test]
    fn states_are_found_by_their_labels() {
        for number in 0..=24 {
            assert_eq!(state::from_label(state::label(number)), Some(number));
        }
    }
}
