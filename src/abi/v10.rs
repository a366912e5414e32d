//! v10 of the net interface, loaded by NCCL 2.26 and 2.27.
//!
//! New against v9: `init` gets the way into NCCL's profiler, sends and receives carry the profiler's handle of their
//! transfer, and `connect` gets the communicator's traffic class.

use std::ffi::{c_int, c_void};

use super::guard::guard;
use super::pointer::{Out, Size, value};
use super::properties::{VDevice, get_properties};
use super::transfer::{self, Group};
use super::v4::export_table;
use super::{v4, v5, v6, v7};
use crate::nccl::ffi::{
    NCCL_NET_TRAFFIC_CLASS_UNDEF, ncclDebugLogger_t, ncclNetCommConfig_v10_t, ncclNetDeviceHandle_v10_t,
    ncclProfilerCallback_t, ncclResult_t,
};
use crate::os::error::{Error, Result};
use crate::plugin::context::{Host, InitArgs};
use crate::plugin::facade;

export_table! {
    /// The table that NCCL 2.26 and 2.27 load.
    ncclNetPlugin_v10: ncclNet_v10_t = {
        10;
        init: Some(init::<10>),
        getProperties: Some(get_properties::<_, 10>),
        listen: Some(v4::listen::<10>),
        connect: Some(connect::<10>),
        accept: Some(v7::accept::<10>),
        regMr: Some(v4::reg_mr::<usize, 10>),
        regMrDmaBuf: Some(v6::reg_mr_dmabuf::<10>),
        isend: Some(isend::<10>),
        irecv: Some(irecv::<10>),
        iflush: Some(v5::iflush::<10>),
        getDeviceMr: None,
        irecvConsumed: None,
        makeVDevice: Some(make_vdevice::<_, 10>),
    }
}

unsafe extern "C" fn init<const API: u8>(logger: ncclDebugLogger_t, profiler: ncclProfilerCallback_t) -> ncclResult_t {
    guard::<API>("init", || facade::init(InitArgs { logger, profiler, ..InitArgs::new(Host::Nccl, API) }).map(|_| ()))
}

unsafe extern "C" fn connect<const API: u8>(
    dev: c_int,
    config: *mut ncclNetCommConfig_v10_t,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_device: *mut *mut ncclNetDeviceHandle_v10_t,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe {
        v4::connect_with::<API>(handle, send_comm, |handle| facade::connect(None, dev, traffic_class(config)?, handle))
    }
}

/// The traffic class of a communicator's configuration: a byte, or nothing.
///
/// # Safety
/// NCCL's promise (see [`super`]) for `config`.
pub(super) unsafe fn traffic_class(config: *const ncclNetCommConfig_v10_t) -> Result<Option<u8>> {
    if config.is_null() {
        return Ok(None);
    }
    // SAFETY: this function's contract.
    match unsafe { value(config, "config") }?.trafficClass {
        NCCL_NET_TRAFFIC_CLASS_UNDEF => Ok(None),
        class => u8::try_from(class).map(Some).map_err(|_| {
            Error::argument(format!("the communicator's traffic class is {class}"))
                .with_hint("set trafficClass in ncclConfig_t to the whole ToS byte, 0 to 255, or leave it out")
        }),
    }
}

/// `isend`, v10 and later.
pub(super) unsafe extern "C" fn isend<const API: u8>(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mhandle: *mut c_void,
    phandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let part = || transfer::part(data, size.bytes()?, tag, mhandle, phandle);
    // SAFETY: NCCL's promise, passed on.
    unsafe { transfer::send::<API>(comm, part, request) }
}

/// `irecv`, v10 and later.
#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(super) unsafe extern "C" fn irecv<const API: u8>(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    phandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let group = Group { n, data, sizes, tags: Some(tags), mhandles, phandles };
    // SAFETY: NCCL's promise, passed on.
    unsafe { transfer::receive::<_, API>(comm, &group, request) }
}

/// `makeVDevice`, v10 and later: up to four members until v11, eight in v12.
pub(super) unsafe extern "C" fn make_vdevice<V: VDevice, const API: u8>(
    dev: *mut c_int,
    props: *mut V,
) -> ncclResult_t {
    guard::<API>("makeVDevice", || {
        // SAFETY: NCCL's promise: null, or a place for an int and this version's struct.
        let (mut dev, props) = unsafe { (Out::new(dev, "d")?, value(props, "props")?) };
        dev.set(facade::make_vdevice(props.members()?)?);
        Ok(())
    })
}
