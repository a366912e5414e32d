//! v3 of the profiler interface, loaded by NCCL 2.26.
//!
//! New against v2: events of kernels per channel, as yet without the GPU's time, and of network plugins. Network
//! plugins' updates do not exist yet.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::AtomicI32;

use super::super::guard::guard;
use super::members::{self, Net, address, descr, net, number};
use super::{Version, functions, profiler_version};
use crate::nccl::ffi::*;
use crate::trace::chain::{Change, Start};
use crate::trace::event::{Body, Coll, CommInfo, Kind, P2p};
use crate::trace::names::Name;

/// The version.
pub(super) struct V3;

profiler_version! {
    /// The table that NCCL 2.26 loads.
    ncclProfiler_v3: ncclProfiler_v3_t, ncclProfilerEventDescr_v3_t, ncclProfilerEventStateArgs_v3_t, V3, 3
}

unsafe extern "C" fn init(context: *mut *mut c_void, mask: *mut c_int) -> ncclResult_t {
    guard::<3>("init", || {
        // SAFETY: NCCL's promise, passed on.
        unsafe { super::init(3, context, mask, std::ptr::null(), super::unknown(), None) }
    })
}

impl Version for V3 {
    const NUMBER: u32 = 3;
    type Descr = ncclProfilerEventDescr_v3_t;
    type Args = ncclProfilerEventStateArgs_v3_t;
    type Table = ncclProfiler_v3_t;

    unsafe fn net(d: &Self::Descr) -> Option<Net<'_>> {
        net!(d)
    }

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
                        func: Name::from_ptr(c.func),
                        datatype: Name::from_ptr(c.datatype),
                        algorithm: Name::from_ptr(c.algo),
                        protocol: Name::from_ptr(c.proto),
                        comm_name: Name::from_ptr(c.name),
                        channels: c.nMaxChannels,
                        warps: c.nWarps,
                        ..Coll::default()
                    })
                }
                Kind::P2p => Body::P2p(P2p { group: number(d.parentObj), ..members::p2p_v2(&d.u.p2p) }),
                Kind::ProxyOp => members::proxy_op(&d.u.proxyOp),
                Kind::ProxyStep => Body::ProxyStep { step: d.u.proxyStep.step },
                Kind::ProxyCtrl => Body::ProxyCtrl,
                Kind::KernelCh => Body::KernelCh { channel: d.u.kernelCh.channelId, timer: 0 },
                _ => return None,
            }
        };
        Some(members::start(d.parentObj, d.rank, body))
    }

    fn encode(start: &Start, parent: *mut c_void, group: *mut c_void) -> Option<Self::Descr> {
        let mut d = descr!(ncclProfilerEventDescr_v3_t, start, start.body.kind()?, parent);
        match &start.body {
            Body::Group | Body::ProxyCtrl => {}
            Body::Coll(c) => {
                d.parentObj = group;
                d.u.coll = ncclProfilerColl_v3_t {
                    name: c.comm_name.as_ptr(),
                    commHash: c.comm_id,
                    seqNumber: c.seq,
                    func: c.func.as_ptr(),
                    sendBuff: address(c.send_buffer),
                    recvBuff: address(c.recv_buffer),
                    count: c.count as usize,
                    root: c.root,
                    datatype: c.datatype.as_ptr(),
                    nMaxChannels: c.channels,
                    nWarps: c.warps,
                    algo: c.algorithm.as_ptr(),
                    proto: c.protocol.as_ptr(),
                };
            }
            Body::P2p(p) => {
                d.parentObj = group;
                d.u.p2p = members::p2p_v2_of(p);
            }
            Body::ProxyOp(op) => d.u.proxyOp = members::proxy_op_of(op),
            Body::ProxyStep { step } => d.u.proxyStep.step = *step,
            Body::KernelCh { channel, .. } => d.u.kernelCh.channelId = *channel,
            Body::NetSocket { .. } | Body::NetIb { .. } | Body::NetTowline(_) | Body::NetOther { .. } => {
                d.u.netPlugin = members::net_of(start);
            }
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
