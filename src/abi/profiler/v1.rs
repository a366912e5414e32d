//! v1 of the profiler interface, loaded by NCCL 2.23.
//!
//! Functions, algorithms, protocols and datatypes come as NCCL's numbers; later versions give names. Collectives and
//! point-to-point operations are children of their group and carry their communicator's id.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::AtomicI32;

use super::super::guard::guard;
use super::members::{self, address, descr, number};
use super::{Version, functions, profiler_version};
use crate::nccl::ffi::*;
use crate::trace::chain::{Change, Start};
use crate::trace::event::{Body, Coll, CommInfo, Kind, P2p};
use crate::trace::names::Name;

const FUNCS: &[&str] = &["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv"];
const ALGORITHMS: &[&str] = &["TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"];
const PROTOCOLS: &[&str] = &["LL", "LL128", "SIMPLE"];
const DATATYPES: &[&str] = &[
    "ncclInt8",
    "ncclUint8",
    "ncclInt32",
    "ncclUint32",
    "ncclInt64",
    "ncclUint64",
    "ncclFloat16",
    "ncclFloat32",
    "ncclFloat64",
    "ncclBfloat16",
    "ncclFloat8e4m3",
    "ncclFloat8e5m2",
];

fn name(table: &[&str], number: u8) -> Name {
    table.get(usize::from(number)).map_or(Name::OTHER, |text| Name::from(*text))
}

fn code(table: &[&str], name: Name) -> u8 {
    table.iter().position(|text| *text == name.text()).map_or(u8::MAX, |place| place as u8)
}

/// The version.
pub(super) struct V1;

profiler_version! {
    /// The table that NCCL 2.23 loads.
    ncclProfiler_v1: ncclProfiler_v1_t, ncclProfilerEventDescr_v1_t, ncclProfilerEventStateArgs_v1_t, V1, 1
}

unsafe extern "C" fn init(context: *mut *mut c_void, mask: *mut c_int) -> ncclResult_t {
    guard::<1>("init", || {
        // SAFETY: NCCL's promise, passed on.
        unsafe { super::init(1, context, mask, std::ptr::null(), super::unknown(), None) }
    })
}

impl Version for V1 {
    const NUMBER: u32 = 1;
    type Descr = ncclProfilerEventDescr_v1_t;
    type Args = ncclProfilerEventStateArgs_v1_t;
    type Table = ncclProfiler_v1_t;

    unsafe fn decode(d: &Self::Descr) -> Option<Start> {
        // SAFETY: in each arm the member that goes with the type.
        let body = unsafe {
            match Kind::from_bit(d.type_.into())? {
                Kind::Group => Body::Group,
                Kind::Coll => {
                    let c = &d.u.coll;
                    Body::Coll(Coll {
                        seq: c.seqNumber,
                        count: c.count as u64,
                        send_buffer: number(c.sendBuff),
                        recv_buffer: number(c.recvBuff),
                        group: number(d.parentObj),
                        comm_id: c.commHash,
                        root: c.root,
                        func: name(FUNCS, c.func),
                        datatype: name(DATATYPES, c.datatype),
                        algorithm: name(ALGORITHMS, c.algo),
                        protocol: name(PROTOCOLS, c.proto),
                        comm_name: Name::from_ptr(c.name),
                        channels: c.nMaxChannels,
                        warps: c.nWarps,
                        ..Coll::default()
                    })
                }
                Kind::P2p => {
                    let p = &d.u.p2p;
                    Body::P2p(P2p {
                        count: p.count as u64,
                        buffer: number(p.buff),
                        group: number(d.parentObj),
                        comm_id: p.commHash,
                        peer: p.peer,
                        func: name(FUNCS, p.func),
                        datatype: name(DATATYPES, p.datatype),
                        comm_name: Name::from_ptr(p.name),
                        ..P2p::default()
                    })
                }
                Kind::ProxyOp => members::proxy_op(&d.u.proxyOp),
                Kind::ProxyStep => Body::ProxyStep { step: d.u.proxyStep.step },
                Kind::ProxyCtrl => Body::ProxyCtrl,
                _ => return None,
            }
        };
        Some(members::start(d.parentObj, d.rank, body))
    }

    fn encode(start: &Start, parent: *mut c_void, group: *mut c_void) -> Option<Self::Descr> {
        let mut d = descr!(ncclProfilerEventDescr_v1_t, start, start.body.kind()?, parent);
        match &start.body {
            Body::Group | Body::ProxyCtrl => {}
            Body::Coll(c) => {
                d.parentObj = group;
                // SAFETY: zeroed above, and zero is a value of every member.
                let to = unsafe { &mut d.u.coll };
                to.name = c.comm_name.as_ptr();
                to.commHash = c.comm_id;
                to.seqNumber = c.seq;
                to.func = code(FUNCS, c.func);
                to.sendBuff = address(c.send_buffer);
                to.recvBuff = address(c.recv_buffer);
                to.count = c.count as usize;
                to.root = c.root;
                to.datatype = code(DATATYPES, c.datatype);
                to.nMaxChannels = c.channels;
                to.nWarps = c.warps;
                to.algo = code(ALGORITHMS, c.algorithm);
                to.proto = code(PROTOCOLS, c.protocol);
            }
            Body::P2p(p) => {
                d.parentObj = group;
                d.u.p2p = ncclProfilerP2p_v1_t {
                    name: p.comm_name.as_ptr(),
                    commHash: p.comm_id,
                    func: code(FUNCS, p.func),
                    buff: address(p.buffer),
                    datatype: code(DATATYPES, p.datatype),
                    count: p.count as usize,
                    peer: p.peer,
                };
            }
            Body::ProxyOp(op) => d.u.proxyOp = members::proxy_op_of(op),
            Body::ProxyStep { step } => d.u.proxyStep.step = *step,
            _ => return None,
        }
        Some(d)
    }

    unsafe fn change(state: ncclProfilerEventState_t, args: Option<&Self::Args>) -> Change {
        // SAFETY: passed on.
        unsafe { members::change_v1(state, args) }
    }

    fn args(change: &Change) -> Option<Self::Args> {
        (change.state <= 18).then(|| members::args_v1(change))
    }

    unsafe fn init(table: &Self::Table, _: &CommInfo, _: *const c_char, mask: &AtomicI32) -> Option<*mut c_void> {
        let mut context = std::ptr::null_mut();
        // SAFETY: a loaded profiler's function, with valid places for its answers; the mask's lives for ever.
        let code = unsafe { table.init?(&mut context, mask.as_ptr()) };
        (code == ncclSuccess).then_some(context)
    }

    functions!();
}
