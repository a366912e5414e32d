//! v5 of the net interface, loaded by NCCL 2.12.
//!
//! New against v4: handles of 128 bytes (we still use 64), tags, receives in groups, and the latency and the largest
//! group among the properties. `connect` and `accept` return at once, with NULL until the connection is ready.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::pointer::Size;
use super::properties::get_properties;
use super::transfer::{self, Group};
use super::v4;
use super::v4::export_table;
use crate::nccl::ffi::ncclResult_t;
use crate::plugin::facade;

export_table! {
    /// The table that NCCL 2.12 loads.
    ncclNetPlugin_v5: ncclNet_v5_t = {
        5;
        init: Some(v4::init::<5>),
        getProperties: Some(get_properties::<_, 5>),
        listen: Some(v4::listen::<5>),
        connect: Some(connect::<5>),
        accept: Some(accept::<5>),
        regMr: Some(v4::reg_mr::<c_int, 5>),
        isend: Some(isend::<c_int, 5>),
        irecv: Some(irecv::<c_int, 5>),
        iflush: Some(iflush::<5>),
    }
}

/// `connect`, v5 and v6.
pub(super) unsafe extern "C" fn connect<const API: u8>(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { v4::connect_with::<API>(handle, send_comm, |handle| facade::connect(None, dev, None, handle)) }
}

/// `accept`, v5 and v6.
pub(super) unsafe extern "C" fn accept<const API: u8>(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { v4::accept_with::<API>(listen_comm, recv_comm, facade::accept) }
}

/// `isend`, v5 to v9: the size is an `int` until v8 and a `size_t` in v9.
pub(super) unsafe extern "C" fn isend<S: Size, const API: u8>(
    comm: *mut c_void,
    data: *mut c_void,
    size: S,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let part = || transfer::part(data, size.bytes()?, tag, mhandle, ptr::null_mut());
    // SAFETY: NCCL's promise, passed on.
    unsafe { transfer::send::<API>(comm, part, request) }
}

/// `irecv`, v5 to v9: the sizes are `int` until v8 and `size_t` in v9.
pub(super) unsafe extern "C" fn irecv<S: Size, const API: u8>(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let group = Group { n, data, sizes, tags: Some(tags), mhandles, phandles: ptr::null_mut() };
    // SAFETY: NCCL's promise, passed on.
    unsafe { transfer::receive::<S, API>(comm, &group, request) }
}

/// `iflush`, v5 and later: the sizes stay `int`.
pub(super) unsafe extern "C" fn iflush<const API: u8>(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let group = Group { n, data, sizes, tags: None, mhandles, phandles: ptr::null_mut() };
    // SAFETY: NCCL's promise, passed on.
    unsafe { transfer::flush::<API>(comm, &group, request) }
}
