//! The members of the descriptors' unions that several versions share, both ways.

use std::ffi::{c_int, c_void};
use std::ptr::without_provenance_mut;

use crate::nccl::ffi::*;
use crate::nccl::net_event::{NetEvent, NetSumNews, PLUGIN_ID, PLUGIN_ID_IB, PLUGIN_ID_SOCKET, PLUGIN_ID_SUM};
use crate::trace::chain::{Change, Start};
use crate::trace::event::{Body, Carrier, Coll, NetPart, NetTimes, P2p, ProxyOp, state};
use crate::trace::names::Name;

/// A start without a network plugin's part.
pub(super) fn start(parent: *mut c_void, rank: c_int, body: Body) -> Start {
    let (net_id, net_data) = (0, std::ptr::null_mut());
    Start { parent: parent.addr() as u64, rank, body, net_id, net_data, times: None }
}

/// An address as a number, and back.
pub(super) fn number<T>(pointer: *const T) -> u64 {
    pointer.addr() as u64
}

/// A number as an address; never followed by us.
pub(super) fn address(number: u64) -> *mut c_void {
    without_provenance_mut(number as usize)
}

/// # Safety
/// The strings are C strings or null.
pub(super) unsafe fn coll_v4(c: &ncclProfilerColl_v4_t) -> Coll {
    // SAFETY: passed on.
    unsafe {
        Coll {
            seq: c.seqNumber,
            count: c.count as u64,
            send_buffer: number(c.sendBuff),
            recv_buffer: number(c.recvBuff),
            root: c.root,
            func: Name::from_ptr(c.func),
            datatype: Name::from_ptr(c.datatype),
            algorithm: Name::from_ptr(c.algo),
            protocol: Name::from_ptr(c.proto),
            channels: c.nChannels,
            warps: c.nWarps,
            ..Coll::default()
        }
    }
}

pub(super) fn coll_v4_of(c: &Coll) -> ncclProfilerColl_v4_t {
    ncclProfilerColl_v4_t {
        seqNumber: c.seq,
        func: c.func.as_ptr(),
        sendBuff: address(c.send_buffer),
        recvBuff: address(c.recv_buffer),
        count: c.count as usize,
        root: c.root,
        datatype: c.datatype.as_ptr(),
        nChannels: c.channels,
        nWarps: c.warps,
        algo: c.algorithm.as_ptr(),
        proto: c.protocol.as_ptr(),
    }
}

/// # Safety
/// The strings are C strings or null.
pub(super) unsafe fn p2p_v2(p: &ncclProfilerP2p_v2_t) -> P2p {
    // SAFETY: passed on.
    unsafe {
        P2p {
            count: p.count as u64,
            buffer: number(p.buff),
            group: 0,
            comm_id: p.commHash,
            peer: p.peer,
            func: Name::from_ptr(p.func),
            datatype: Name::from_ptr(p.datatype),
            comm_name: Name::from_ptr(p.name),
            ..P2p::default()
        }
    }
}

pub(super) fn p2p_v2_of(p: &P2p) -> ncclProfilerP2p_v2_t {
    ncclProfilerP2p_v2_t {
        name: p.comm_name.as_ptr(),
        commHash: p.comm_id,
        func: p.func.as_ptr(),
        buff: address(p.buffer),
        datatype: p.datatype.as_ptr(),
        count: p.count as usize,
        peer: p.peer,
    }
}

pub(super) fn proxy_op(op: &ncclProfilerProxyOp_v1_t) -> Body {
    Body::ProxyOp(ProxyOp {
        pid: op.pid,
        peer: op.peer,
        steps: op.nSteps,
        chunk: op.chunkSize,
        channel: op.channelId,
        send: op.isSend != 0,
    })
}

pub(super) fn proxy_op_of(op: &ProxyOp) -> ncclProfilerProxyOp_v1_t {
    ncclProfilerProxyOp_v1_t {
        pid: op.pid,
        channelId: op.channel,
        peer: op.peer,
        nSteps: op.steps,
        chunkSize: op.chunk,
        isSend: op.send.into(),
    }
}

/// A network plugin's event, in the descriptor of any version.
pub(super) struct Net<'a> {
    pub parent: *mut c_void,
    pub rank: c_int,
    pub plugin: &'a ncclProfilerNetPlugin_v3_t,
}

/// Reads it from a descriptor; None of another type.
macro_rules! net {
    ($d:expr) => {
        ($d.type_ as u64 == u64::from(Kind::NetPlugin.bit())).then(|| $crate::abi::profiler::members::Net {
            parent: $d.parentObj,
            rank: $d.rank,
            // SAFETY: the member that goes with the type.
            plugin: unsafe { &$d.u.netPlugin },
        })
    };
}
pub(super) use net;

impl<'a> Net<'a> {
    /// Its sum, if it has one.
    ///
    /// # Safety
    /// The data have the type that the plugin of that id defines, and no other thread reads them meanwhile.
    #[inline]
    pub(super) unsafe fn sum(&self) -> Option<&'a mut NetSumNews> {
        let &ncclProfilerNetPlugin_v3_t { id, data } = self.plugin;
        // SAFETY: this library's own structure, by its id.
        if id == PLUGIN_ID_SUM { unsafe { data.cast::<NetSumNews>().as_mut() } } else { None }
    }
}

/// A network plugin's event: what we know of its descriptor.
///
/// # Safety
/// The data have the type that the plugin of that id defines.
pub(super) unsafe fn start_of(&Net { parent, rank, plugin: net }: &Net<'_>) -> Start {
    let mut times = None;
    let body = match (net.id, net.data.is_null()) {
        (PLUGIN_ID_SOCKET, false) => {
            // SAFETY: NCCL's structure for sockets, by its id and version.
            let sock = unsafe { (*net.data.cast::<ncclProfilerNetSockDescr_v1_t>()).sock };
            Body::NetSocket { fd: sock.fd, op: sock.op, length: sock.length as u64 }
        }
        (PLUGIN_ID_IB, false) => {
            // SAFETY: NCCL's structure for IB, by its id and version.
            let qp = unsafe { (*net.data.cast::<ncclProfilerNetIbDescr_v1_t>()).qp };
            Body::NetIb {
                device: qp.device,
                opcode: qp.opcode,
                qp: qp.qpNum,
                wr_id: qp.wr_id,
                length: qp.length as u64,
            }
        }
        (PLUGIN_ID, false) => {
            // SAFETY: Towline's own structure, by its id and version.
            let event = unsafe { &*net.data.cast::<NetEvent>() };
            times = event.has_ended().then(|| NetTimes::at_start(event));
            Body::NetTowline(NetPart::of(event))
        }
        (plugin, _) => Body::NetOther { plugin },
    };
    Start { net_id: net.id, net_data: net.data, times, ..start(parent, rank, body) }
}

/// The parts that one `start` reports together, where others follow the first; else none.
///
/// # Safety
/// As for [`start_of`], which made `start`; they are there as long as its descriptor.
pub(super) unsafe fn all_parts(start: &Start) -> &[NetEvent] {
    let data = start.net_data.cast::<NetEvent>();
    if start.net_id != PLUGIN_ID || data.is_null() {
        return &[];
    }
    // SAFETY: Towline's own structure, by its id.
    match unsafe { (*data).more() } {
        0 => &[],
        // SAFETY: its count of parts behind it is correct.
        more => unsafe { std::slice::from_raw_parts(data, 1 + more) },
    }
}

pub(super) fn net_of(start: &Start) -> ncclProfilerNetPlugin_v3_t {
    ncclProfilerNetPlugin_v3_t { id: start.net_id, data: start.net_data }
}

/// A descriptor of NCCL's own for a part that Towline's transport described in its own way.
pub(super) enum Translated {
    Socket(ncclProfilerNetSockDescr_v1_t),
    QueuePair(ncclProfilerNetIbDescr_v1_t),
}

impl Translated {
    /// None for resent data: NCCL's descriptors cannot express that, and lengths should add up.
    pub(super) fn new(part: &NetPart) -> Option<Self> {
        if part.resend {
            return None;
        }
        if let Carrier::QueuePair { device, opcode, number, wr_id } = part.carrier {
            // SAFETY: plain data, for which zero is a value.
            let mut descr: ncclProfilerNetIbDescr_v1_t = unsafe { std::mem::zeroed() };
            descr.type_ = ncclProfileQp as u8;
            (descr.qp.device, descr.qp.opcode, descr.qp.qpNum) = (device.into(), opcode.into(), number);
            (descr.qp.wr_id, descr.qp.length) = (wr_id, part.length as usize);
            return Some(Self::QueuePair(descr));
        }
        // SAFETY: as above.
        let mut descr: ncclProfilerNetSockDescr_v1_t = unsafe { std::mem::zeroed() };
        descr.type_ = ncclProfileSocket as u8;
        descr.sock.fd = if let Carrier::Socket { fd } = part.carrier { fd } else { -1 };
        (descr.sock.op, descr.sock.length) = (i32::from(!part.send), part.length as usize);
        Some(Self::Socket(descr))
    }

    /// The start of the event with this descriptor, which must outlive it.
    pub(super) fn start(&mut self, start: &Start) -> Start {
        let (net_id, net_data) = match self {
            Self::Socket(descr) => (PLUGIN_ID_SOCKET, (&raw mut *descr).cast()),
            Self::QueuePair(descr) => (PLUGIN_ID_IB, (&raw mut *descr).cast()),
        };
        Start { net_id, net_data, ..*start }
    }
}

/// # Safety
/// The arguments are those of v1 to v3 for this state.
pub(super) unsafe fn change_v1(
    state: ncclProfilerEventState_t,
    args: Option<&ncclProfilerEventStateArgs_v1_t>,
) -> Change {
    let mut change = plain(state, args.is_some());
    if let (Some(args), Ok(number)) = (args, u8::try_from(state)) {
        match number {
            0..=state::OP_RECV_DONE => {
                // SAFETY: the member that goes with these states.
                let op = unsafe { args.proxyOp };
                change.arg = op.transSize as u64;
                change.steps = op.steps;
            }
            // SAFETY: the member that goes with these states.
            state::CTRL_IDLE..=state::CTRL_APPEND_END => unsafe {
                change.arg = args.proxyCtrl.appendedProxyOps as u64;
            },
            _ => {}
        }
    }
    change
}

pub(super) fn args_v1(change: &Change) -> ncclProfilerEventStateArgs_v1_t {
    // SAFETY: all members are numbers, for which zero is a value.
    let mut args: ncclProfilerEventStateArgs_v1_t = unsafe { std::mem::zeroed() };
    match u8::try_from(change.state) {
        Ok(0..=state::OP_RECV_DONE) => {
            args.proxyOp.transSize = change.arg as usize;
            args.proxyOp.steps = change.steps;
        }
        Ok(state::CTRL_IDLE..=state::CTRL_APPEND_END) => args.proxyCtrl.appendedProxyOps = change.arg as c_int,
        _ => {}
    }
    args
}

/// # Safety
/// The arguments are those of v4 and later for this state.
pub(super) unsafe fn change_v4(
    state: ncclProfilerEventState_t,
    args: Option<&ncclProfilerEventStateArgs_v4_t>,
) -> Change {
    let mut change = plain(state, args.is_some());
    if let (Some(args), Ok(number)) = (args, u8::try_from(state)) {
        // SAFETY: in each arm the member that goes with its states.
        unsafe {
            match number {
                state::STEP_SEND_GPU_WAIT..=state::STEP_RECV_GPU_WAIT | state::STEP_SEND_PEER_WAIT => {
                    change.arg = args.proxyStep.transSize as u64;
                }
                state::CTRL_IDLE..=state::CTRL_APPEND_END => change.arg = args.proxyCtrl.appendedProxyOps as u64,
                state::NET_UPDATE => change.data = args.netPlugin.data,
                state::KERNEL_STOP | state::KERNEL_PHASE_STOP => change.arg = args.kernelCh.pTimer,
                _ => {}
            }
        }
    }
    change
}

pub(super) fn args_v4(change: &Change) -> ncclProfilerEventStateArgs_v4_t {
    // SAFETY: all members are numbers and pointers, for which zero is a value.
    let mut args: ncclProfilerEventStateArgs_v4_t = unsafe { std::mem::zeroed() };
    match u8::try_from(change.state) {
        Ok(state::STEP_SEND_GPU_WAIT..=state::STEP_RECV_GPU_WAIT | state::STEP_SEND_PEER_WAIT) => {
            args.proxyStep.transSize = change.arg as usize;
        }
        Ok(state::CTRL_IDLE..=state::CTRL_APPEND_END) => args.proxyCtrl.appendedProxyOps = change.arg as c_int,
        Ok(state::NET_UPDATE) => args.netPlugin.data = change.data,
        Ok(state::KERNEL_STOP | state::KERNEL_PHASE_STOP) => args.kernelCh.pTimer = change.arg,
        _ => {}
    }
    args
}

fn plain(state: ncclProfilerEventState_t, has_args: bool) -> Change {
    Change { state: state as c_int, has_args, arg: 0, steps: 0, data: std::ptr::null_mut() }
}

/// A descriptor of any version with its head filled in and its union zeroed.
macro_rules! descr {
    ($descr:ident, $start:expr, $kind:expr, $parent:expr) => {{
        // SAFETY: all members are numbers, truths and pointers, for which zero is a value.
        let mut descr: $descr = unsafe { std::mem::zeroed() };
        descr.type_ = $kind.bit() as _;
        descr.parentObj = $parent;
        descr.rank = $start.rank;
        descr
    }};
}
pub(super) use descr;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nccl::net_event::{CARRIER_QUEUE_PAIR, CARRIER_SOCKET, FLAG_ENDED};

    fn told(event: &mut NetEvent) -> Start {
        let net = ncclProfilerNetPlugin_v3_t { id: PLUGIN_ID, data: (&raw mut *event).cast() };
        // SAFETY: the data have the type that the identifier names.
        unsafe { start_of(&Net { parent: std::ptr::null_mut(), rank: 0, plugin: &net }) }
    }

    fn translated(event: &mut NetEvent) -> Option<Body> {
        let start = told(event);
        let Body::NetTowline(part) = &start.body else { panic!("{:?}", start.body) };
        let mut translated = Translated::new(part)?;
        let start = translated.start(&start);
        // SAFETY: a descriptor of NCCL's, of the type that the identifier names.
        Some(unsafe { start_of(&Net { parent: std::ptr::null_mut(), rank: 0, plugin: &net_of(&start) }) }.body)
    }

    #[test]
    fn each_part_of_several_is_told_with_its_end() {
        let ended = NetEvent { flags: 1 | FLAG_ENDED, ..NetEvent::new() };
        let mut parts = [1, 20, 300].map(|length| NetEvent { length, ..ended });
        parts[0].set_more(2);
        let net = ncclProfilerNetPlugin_v3_t { id: PLUGIN_ID, data: parts.as_mut_ptr().cast() };
        // SAFETY: the data have the type that the identifier names.
        let first = unsafe { start_of(&Net { parent: address(77), rank: 3, plugin: &net }) };
        assert_eq!((first.parent, first.rank, first.times.is_some()), (77, 3, true));
        let Body::NetTowline(part) = first.body else { panic!("{:?}", first.body) };
        assert_eq!(part.length, 1);
        // SAFETY: as above.
        let all = unsafe { all_parts(&first) };
        assert_eq!(all.iter().map(|event| event.length).collect::<Vec<_>>(), [1, 20, 300]);
        // A single one, and one of NCCL's, have none behind them.
        let net = ncclProfilerNetPlugin_v3_t { id: PLUGIN_ID, data: (&raw mut parts[1]).cast() };
        // SAFETY: as above.
        let alone = unsafe { start_of(&Net { parent: address(77), rank: 3, plugin: &net }) };
        for start in [alone, start(address(77), 3, Body::ProxyStep { step: 1 })] {
            // SAFETY: as above.
            assert!(unsafe { all_parts(&start) }.is_empty());
        }
    }

    #[test]
    fn a_second_profiler_gets_nccls_own_descriptors() {
        let mut socket = NetEvent { flags: 1, length: 77, carrier: CARRIER_SOCKET, device: 9, ..NetEvent::new() };
        assert_eq!(translated(&mut socket), Some(Body::NetSocket { fd: 9, op: 0, length: 77 }));
        let mut queue_pair = NetEvent {
            length: 5,
            carrier: CARRIER_QUEUE_PAIR,
            device: 2,
            opcode: 3,
            queue_pair: 400,
            wr_id: u64::MAX,
            ..NetEvent::new()
        };
        let expected = Body::NetIb { device: 2, opcode: 3, qp: 400, wr_id: u64::MAX, length: 5 };
        assert_eq!(translated(&mut queue_pair), Some(expected));
        let mut again = NetEvent { flags: 3, length: 5, ..NetEvent::new() };
        assert_eq!(translated(&mut again), None, "lengths would not add up");
    }
}
