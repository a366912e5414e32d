//! v6 of the net interface, loaded by NCCL 2.13 to 2.18, and as the oldest one by every release since.
//!
//! New against v5: `regMrDmaBuf`. From here on the host knows `ncclRemoteError`.

use std::ffi::{c_int, c_void};

use super::pointer::id;
use super::properties::get_properties;
use super::v4::export_table;
use super::{v4, v5};
use crate::nccl::ffi::ncclResult_t;
use crate::plugin::facade;

export_table! {
    /// The table that NCCL 2.13 to 2.18 loads.
    ncclNetPlugin_v6: ncclNet_v6_t = {
        6;
        init: Some(v4::init::<6>),
        getProperties: Some(get_properties::<_, 6>),
        listen: Some(v4::listen::<6>),
        connect: Some(v5::connect::<6>),
        accept: Some(v5::accept::<6>),
        regMr: Some(v4::reg_mr::<c_int, 6>),
        regMrDmaBuf: Some(reg_mr_dmabuf::<6>),
        isend: Some(v5::isend::<c_int, 6>),
        irecv: Some(v5::irecv::<c_int, 6>),
        iflush: Some(v5::iflush::<6>),
    }
}

/// `regMrDmaBuf`, v6 and later. NCCL calls it only where a device's `ptrSupport` says so; a backend that cannot do
/// it answers with an error.
pub(super) unsafe extern "C" fn reg_mr_dmabuf<const API: u8>(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    let how = || facade::reg_mr_dmabuf(id(comm, "comm")?, data, size, kind, offset, fd);
    // SAFETY: NCCL's promise, passed on.
    unsafe { v4::register::<API>("regMrDmaBuf", mhandle, how) }
}
