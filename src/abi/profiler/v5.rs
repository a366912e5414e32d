//! v5 of the profiler interface, loaded by NCCL 2.28.
//!
//! New against v4: events of the host's calls (groups, collectives, sends and receives, kernel launches). Collectives
//! and point-to-point operations are now children of these, and their group is a field. The type is as wide as a word.

use std::ffi::c_void;

use super::members::{self, Net, address, descr, net, number};
use super::{Version, functions, init_of_table_since_v5, init_since_v5, profiler_version};
use crate::nccl::ffi::*;
use crate::trace::chain::{Change, Start};
use crate::trace::event::{Body, Coll, CollApi, Kind, P2p};
use crate::trace::names::Name;

/// The version.
pub(super) struct V5;

profiler_version! {
    /// The table that NCCL 2.28 loads.
    ncclProfiler_v5: ncclProfiler_v5_t, ncclProfilerEventDescr_v5_t, ncclProfilerEventStateArgs_v5_t, V5, 5
}

init_since_v5!(5);

/// # Safety
/// The strings are C strings or null.
pub(super) unsafe fn coll_api(c: &ncclProfilerCollApi_v5_t) -> Body {
    // SAFETY: passed on.
    unsafe {
        Body::CollApi(CollApi {
            func: Name::from_ptr(c.func),
            datatype: Name::from_ptr(c.datatype),
            root: c.root,
            count: c.count as u64,
            stream: number(c.stream),
            graph: c.graphCaptured,
            tag: 0,
        })
    }
}

pub(super) fn coll_api_of(c: &CollApi) -> ncclProfilerCollApi_v5_t {
    ncclProfilerCollApi_v5_t {
        func: c.func.as_ptr(),
        count: c.count as usize,
        datatype: c.datatype.as_ptr(),
        root: c.root,
        stream: address(c.stream),
        graphCaptured: c.graph,
    }
}

/// # Safety
/// The strings are C strings or null.
pub(super) unsafe fn p2p_api(p: &ncclProfilerP2pApi_v5_t) -> Body {
    // SAFETY: passed on.
    unsafe {
        Body::P2pApi(CollApi {
            func: Name::from_ptr(p.func),
            datatype: Name::from_ptr(p.datatype),
            root: 0,
            count: p.count as u64,
            stream: number(p.stream),
            graph: p.graphCaptured,
            tag: 0,
        })
    }
}

pub(super) fn p2p_api_of(p: &CollApi) -> ncclProfilerP2pApi_v5_t {
    ncclProfilerP2pApi_v5_t {
        func: p.func.as_ptr(),
        count: p.count as usize,
        datatype: p.datatype.as_ptr(),
        stream: address(p.stream),
        graphCaptured: p.graph,
    }
}

/// # Safety
/// The strings are C strings or null.
pub(super) unsafe fn coll(c: &ncclProfilerColl_v5_t) -> Body {
    // SAFETY: passed on.
    unsafe {
        Body::Coll(Coll {
            seq: c.seqNumber,
            count: c.count as u64,
            send_buffer: number(c.sendBuff),
            recv_buffer: number(c.recvBuff),
            group: number(c.parentGroup),
            root: c.root,
            func: Name::from_ptr(c.func),
            datatype: Name::from_ptr(c.datatype),
            algorithm: Name::from_ptr(c.algo),
            protocol: Name::from_ptr(c.proto),
            channels: c.nChannels,
            warps: c.nWarps,
            ..Coll::default()
        })
    }
}

pub(super) fn coll_of(c: &Coll, group: *mut c_void) -> ncclProfilerColl_v5_t {
    ncclProfilerColl_v5_t {
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
        parentGroup: group,
    }
}

/// # Safety
/// The strings are C strings or null.
pub(super) unsafe fn p2p(p: &ncclProfilerP2p_v5_t) -> Body {
    // SAFETY: passed on.
    unsafe {
        Body::P2p(P2p {
            count: p.count as u64,
            buffer: number(p.buff),
            group: number(p.parentGroup),
            peer: p.peer,
            func: Name::from_ptr(p.func),
            datatype: Name::from_ptr(p.datatype),
            channels: p.nChannels,
            ..P2p::default()
        })
    }
}

pub(super) fn p2p_of(p: &P2p, group: *mut c_void) -> ncclProfilerP2p_v5_t {
    ncclProfilerP2p_v5_t {
        func: p.func.as_ptr(),
        buff: address(p.buffer),
        datatype: p.datatype.as_ptr(),
        count: p.count as usize,
        peer: p.peer,
        nChannels: p.channels,
        parentGroup: group,
    }
}

/// The event types that v5 and v6 have in common, read from a descriptor of either.
macro_rules! decode_v5 {
    ($d:expr, $kind:expr) => {
        match $kind {
            Kind::GroupApi => Body::GroupApi { depth: $d.u.groupApi.groupDepth, graph: $d.u.groupApi.graphCaptured },
            Kind::CollApi => v5::coll_api(&$d.u.collApi),
            Kind::P2pApi => v5::p2p_api(&$d.u.p2pApi),
            Kind::KernelLaunch => Body::KernelLaunch { stream: number($d.u.kernelLaunch.stream) },
            Kind::Group => Body::Group,
            Kind::Coll => v5::coll(&$d.u.coll),
            Kind::P2p => v5::p2p(&$d.u.p2p),
            Kind::ProxyOp => members::proxy_op(&$d.u.proxyOp),
            Kind::ProxyStep => Body::ProxyStep { step: $d.u.proxyStep.step },
            Kind::ProxyCtrl => Body::ProxyCtrl,
            Kind::KernelCh => Body::KernelCh { channel: $d.u.kernelCh.channelId, timer: $d.u.kernelCh.pTimer },
            _ => return None,
        }
    };
}
pub(super) use decode_v5;

/// The same, written into a descriptor of either; true when the event is one of them.
macro_rules! encode_v5 {
    ($d:expr, $start:expr, $group:expr) => {
        match &$start.body {
            Body::Group | Body::ProxyCtrl => true,
            Body::GroupApi { depth, graph } => {
                $d.u.groupApi = ncclProfilerGroupApi_v5_t { graphCaptured: *graph, groupDepth: *depth };
                true
            }
            Body::CollApi(call) => {
                $d.u.collApi = v5::coll_api_of(call);
                true
            }
            Body::P2pApi(call) => {
                $d.u.p2pApi = v5::p2p_api_of(call);
                true
            }
            Body::KernelLaunch { stream } => {
                $d.u.kernelLaunch.stream = address(*stream);
                true
            }
            Body::Coll(coll) => {
                $d.u.coll = v5::coll_of(coll, $group);
                true
            }
            Body::P2p(p2p) => {
                $d.u.p2p = v5::p2p_of(p2p, $group);
                true
            }
            Body::ProxyOp(op) => {
                $d.u.proxyOp = members::proxy_op_of(op);
                true
            }
            Body::ProxyStep { step } => {
                $d.u.proxyStep.step = *step;
                true
            }
            Body::KernelCh { channel, timer } => {
                $d.u.kernelCh = ncclProfilerKernelCh_v4_t { channelId: *channel, pTimer: *timer };
                true
            }
            Body::NetSocket { .. } | Body::NetIb { .. } | Body::NetTowline(_) | Body::NetOther { .. } => {
                $d.u.netPlugin = members::net_of($start);
                true
            }
            _ => false,
        }
    };
}
pub(super) use encode_v5;

use super::v5;

impl Version for V5 {
    const NUMBER: u32 = 5;
    type Descr = ncclProfilerEventDescr_v5_t;
    type Args = ncclProfilerEventStateArgs_v5_t;
    type Table = ncclProfiler_v5_t;

    unsafe fn net(d: &Self::Descr) -> Option<Net<'_>> {
        net!(d)
    }

    unsafe fn decode(d: &Self::Descr) -> Option<Start> {
        // SAFETY: in each arm the member that goes with the type.
        let body = unsafe { decode_v5!(d, Kind::from_bit(d.type_)?) };
        Some(members::start(d.parentObj, d.rank, body))
    }

    fn encode(start: &Start, parent: *mut c_void, group: *mut c_void) -> Option<Self::Descr> {
        let mut d = descr!(ncclProfilerEventDescr_v5_t, start, start.body.kind()?, parent);
        encode_v5!(d, start, group).then_some(d)
    }

    unsafe fn change(state: ncclProfilerEventState_t, args: Option<&Self::Args>) -> Change {
        // SAFETY: passed on.
        unsafe { members::change_v4(state, args) }
    }

    fn args(change: &Change) -> Option<Self::Args> {
        (change.state <= 24).then(|| members::args_v4(change))
    }

    init_of_table_since_v5!();

    functions!();
}
