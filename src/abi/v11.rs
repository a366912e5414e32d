//! v11 of the net interface, loaded by NCCL 2.28 and 2.29.
//!
//! New against v10: a context per communicator. `init` returns it, with the communicator's id and configuration as
//! arguments (which `connect` no longer has). `listen` and `connect` take it. `finalize`, which NCCL calls without
//! checking that it exists, ends it. `setNetAttr` hints at the traffic to come. The properties say how many requests
//! one call may carry.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::guard::guard;
use super::pointer::{Out, dress, id, value};
use super::properties::get_properties;
use super::v4::export_table;
use super::{v4, v5, v6, v7, v10};
use crate::nccl::ffi::{
    ncclDebugLogger_t, ncclNetAttr_v11_t, ncclNetCommAttr_v11_t, ncclNetCommConfig_v11_t, ncclNetDeviceHandle_v11_t,
    ncclProfilerCallback_t, ncclResult_t,
};
use crate::plugin::context::{Host, InitArgs};
use crate::plugin::facade::{self, NetAttr, Traffic};

export_table! {
    /// The table that NCCL 2.28 and 2.29 load.
    ncclNetPlugin_v11: ncclNet_v11_t = {
        11;
        init: Some(init::<11>),
        getProperties: Some(get_properties::<_, 11>),
        listen: Some(listen::<11>),
        connect: Some(connect::<11>),
        accept: Some(v7::accept::<11>),
        regMr: Some(v4::reg_mr::<usize, 11>),
        regMrDmaBuf: Some(v6::reg_mr_dmabuf::<11>),
        isend: Some(v10::isend::<11>),
        irecv: Some(v10::irecv::<11>),
        iflush: Some(v5::iflush::<11>),
        getDeviceMr: None,
        irecvConsumed: None,
        makeVDevice: Some(v10::make_vdevice::<_, 11>),
        finalize: Some(finalize::<11>),
        setNetAttr: Some(set_net_attr::<11>),
    }
}

/// `init`, v11 and later.
pub(super) unsafe extern "C" fn init<const API: u8>(
    ctx: *mut *mut c_void,
    comm_id: u64,
    config: *mut ncclNetCommConfig_v11_t,
    logger: ncclDebugLogger_t,
    profiler: ncclProfilerCallback_t,
) -> ncclResult_t {
    guard::<API>("init", || {
        // SAFETY: NCCL's promise: null, or a place for the context and a configuration.
        let (mut ctx, traffic_class) = unsafe { (Out::new(ctx, "ctx")?, v10::traffic_class(config)?) };
        ctx.set(ptr::null_mut());
        let comm_id = Some(comm_id);
        let args = InitArgs { comm_id, traffic_class, logger, profiler, ..InitArgs::new(Host::Nccl, API) };
        ctx.set(dress(facade::init(args)?));
        Ok(())
    })
}

/// `listen`, v11 and later.
pub(super) unsafe extern "C" fn listen<const API: u8>(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { v4::listen_in::<API>(|| id(ctx, "ctx").map(Some), dev, handle, listen_comm) }
}

/// `connect`, v11 and later. The traffic class is the context's.
pub(super) unsafe extern "C" fn connect<const API: u8>(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_device: *mut *mut ncclNetDeviceHandle_v11_t,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe {
        v4::connect_with::<API>(handle, send_comm, |handle| facade::connect(Some(id(ctx, "ctx")?), dev, None, handle))
    }
}

/// `finalize`, v11 and later.
pub(super) unsafe extern "C" fn finalize<const API: u8>(ctx: *mut c_void) -> ncclResult_t {
    guard::<API>("finalize", || facade::finalize(id(ctx, "ctx")?))
}

/// `setNetAttr`, v11 and later.
pub(super) unsafe extern "C" fn set_net_attr<const API: u8>(
    ctx: *mut c_void,
    attr: *mut ncclNetAttr_v11_t,
) -> ncclResult_t {
    guard::<API>("setNetAttr", || {
        // SAFETY: NCCL's promise: null or the attributes.
        let attr = unsafe { value(attr, "netAttr") }?;
        let (send, recv) = (traffic(&attr.sendCommAttr), traffic(&attr.recvCommAttr));
        let attr = NetAttr { send, recv, op: attr.op, algo: attr.algo, proto: attr.proto };
        facade::set_net_attr(id(ctx, "ctx")?, attr)
    })
}

fn traffic(attr: &ncclNetCommAttr_v11_t) -> Traffic {
    Traffic {
        max_concurrent_peers: attr.maxConcurrentPeers,
        min_concurrent_peers: attr.minConcurrentPeers,
        max_flows_per_peer: attr.maxFlowsPerPeer,
        min_flows_per_peer: attr.minFlowsPerPeer,
    }
}
