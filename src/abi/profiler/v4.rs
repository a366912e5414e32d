//! v4 of the profiler interface, loaded by NCCL 2.27.
//!
//! New against v3: `init` names the communicator and brings NCCL's logger, which descriptors no longer do. Kernels
//! carry the GPU's time. Steps carry sizes and the wait for the peer. Network plugins may update.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::AtomicI32;

use super::super::guard::guard;
use super::members::{self, Net, address, descr, net, number};
use super::{Version, functions, known, profiler_version};
use crate::nccl::ffi::*;
use crate::trace::chain::{Change, Start};
use crate::trace::event::{Body, Coll, CommInfo, Kind, P2p};
use crate::trace::names::Name;

/// The version.
pub(super) struct V4;

profiler_version! {
    /// The table that NCCL 2.27 loads.
    ncclProfiler_v4: ncclProfiler_v4_t, ncclProfilerEventDescr_v4_t, ncclProfilerEventStateArgs_v4_t, V4, 4
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    id: u64,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    logger: ncclDebugLogger_t,
) -> ncclResult_t {
    guard::<4>("init", || {
        let comm = known(id, nodes, ranks, rank);
        // SAFETY: NCCL's promise, passed on.
        unsafe { super::init(4, context, mask, name, comm, logger) }
    })
}

/// The members that v4 gave their present form.
///
/// # Safety
/// The strings are C strings or null.
pub(super) unsafe fn p2p(p: &ncclProfilerP2p_v4_t) -> P2p {
    // SAFETY: passed on.
    unsafe {
        P2p {
            count: p.count as u64,
            buffer: number(p.buff),
            peer: p.peer,
            func: Name::from_ptr(p.func),
            datatype: Name::from_ptr(p.datatype),
            channels: p.nChannels,
            ..P2p::default()
        }
    }
}

impl Version for V4 {
    const NUMBER: u32 = 4;
    type Descr = ncclProfilerEventDescr_v4_t;
    type Args = ncclProfilerEventStateArgs_v4_t;
    type Table = ncclProfiler_v4_t;

    unsafe fn net(d: &Self::Descr) -> Option<Net<'_>> {
        net!(d)
    }

    unsafe fn decode(d: &Self::Descr) -> Option<Start> {
        // SAFETY: in each arm the member that goes with the type.
        let body = unsafe {
            match Kind::from_bit(d.type_.into())? {
                Kind::Group => Body::Group,
                Kind::Coll => Body::Coll(Coll { group: number(d.parentObj), ..members::coll_v4(&d.u.coll) }),
                Kind::P2p => Body::P2p(P2p { group: number(d.parentObj), ..p2p(&d.u.p2p) }),
                Kind::ProxyOp => members::proxy_op(&d.u.proxyOp),
                Kind::ProxyStep => Body::ProxyStep { step: d.u.proxyStep.step },
                Kind::ProxyCtrl => Body::ProxyCtrl,
                Kind::KernelCh => Body::KernelCh { channel: d.u.kernelCh.channelId, timer: d.u.kernelCh.pTimer },
                _ => return None,
            }
        };
        Some(members::start(d.parentObj, d.rank, body))
    }

    fn encode(start: &Start, parent: *mut c_void, group: *mut c_void) -> Option<Self::Descr> {
        let mut d = descr!(ncclProfilerEventDescr_v4_t, start, start.body.kind()?, parent);
        match &start.body {
            Body::Group | Body::ProxyCtrl => {}
            Body::Coll(c) => {
                d.parentObj = group;
                d.u.coll = members::coll_v4_of(c);
            }
            Body::P2p(p) => {
                d.parentObj = group;
                d.u.p2p = ncclProfilerP2p_v4_t {
                    func: p.func.as_ptr(),
                    buff: address(p.buffer),
                    datatype: p.datatype.as_ptr(),
                    count: p.count as usize,
                    peer: p.peer,
                    nChannels: p.channels,
                };
            }
            Body::ProxyOp(op) => d.u.proxyOp = members::proxy_op_of(op),
            Body::ProxyStep { step } => d.u.proxyStep.step = *step,
            Body::KernelCh { channel, timer } => {
                d.u.kernelCh = ncclProfilerKernelCh_v4_t { channelId: *channel, pTimer: *timer };
            }
            Body::NetSocket { .. } | Body::NetIb { .. } | Body::NetTowline(_) | Body::NetOther { .. } => {
                d.u.netPlugin = members::net_of(start);
            }
            _ => return None,
        }
        Some(d)
    }

    unsafe fn change(state: ncclProfilerEventState_t, args: Option<&Self::Args>) -> Change {
        // SAFETY: passed on.
        unsafe { members::change_v4(state, args) }
    }

    fn args(change: &Change) -> Option<Self::Args> {
        (change.state <= 22).then(|| members::args_v4(change))
    }

    unsafe fn init(table: &Self::Table, comm: &CommInfo, name: *const c_char, mask: &AtomicI32) -> Option<*mut c_void> {
        let mut context = std::ptr::null_mut();
        let log = super::logger::logger();
        // SAFETY: a loaded profiler's function, with valid places for its answers; the mask's lives for ever.
        let code =
            unsafe { table.init?(&mut context, mask.as_ptr(), name, comm.id, comm.nodes, comm.ranks, comm.rank, log) };
        (code == ncclSuccess).then_some(context)
    }

    functions!();
}
