//! v7 of the net interface, loaded by NCCL 2.19.
//!
//! New against v6: connections may be driven by code on the GPU. `connect` and `accept` have a place for a device
//! handle, and the properties name the kind of the device. Ours is of kind "host": we leave that place as NCCL prepared
//! it, and `getDeviceMr` and `irecvConsumed` stay NULL. (NCCL asks for the first only where it got a device handle, and
//! would call the second for every device that has it.)

use std::ffi::{c_int, c_void};

use super::properties::get_properties;
use super::v4::export_table;
use super::{v4, v5, v6};
use crate::nccl::ffi::{ncclNetDeviceHandle_v7_t, ncclResult_t};

export_table! {
    /// The table that NCCL 2.19 loads.
    ncclNetPlugin_v7: ncclNet_v7_t = {
        7;
        init: Some(v4::init::<7>),
        getProperties: Some(get_properties::<_, 7>),
        listen: Some(v4::listen::<7>),
        connect: Some(connect::<7>),
        accept: Some(accept::<7>),
        regMr: Some(v4::reg_mr::<c_int, 7>),
        regMrDmaBuf: Some(v6::reg_mr_dmabuf::<7>),
        isend: Some(v5::isend::<c_int, 7>),
        irecv: Some(v5::irecv::<c_int, 7>),
        iflush: Some(v5::iflush::<7>),
        getDeviceMr: None,
        irecvConsumed: None,
    }
}

/// `connect`, v7 to v9.
pub(super) unsafe extern "C" fn connect<const API: u8>(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_device: *mut *mut ncclNetDeviceHandle_v7_t,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { v5::connect::<API>(dev, handle, send_comm) }
}

/// `accept`, v7 and later.
pub(super) unsafe extern "C" fn accept<const API: u8>(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
    _recv_device: *mut *mut ncclNetDeviceHandle_v7_t,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { v5::accept::<API>(listen_comm, recv_comm) }
}
