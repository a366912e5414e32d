//! v8 of the net interface, loaded by NCCL 2.20 to 2.23.
//!
//! New against v7: `regMr` takes a `size_t`, and the properties state whether a registration holds for the whole
//! device.

use std::ffi::c_int;

use super::properties::get_properties;
use super::v4::export_table;
use super::{v4, v5, v6, v7};

export_table! {
    /// The table that NCCL 2.20 to 2.23 loads.
    ncclNetPlugin_v8: ncclNet_v8_t = {
        8;
        init: Some(v4::init::<8>),
        getProperties: Some(get_properties::<_, 8>),
        listen: Some(v4::listen::<8>),
        connect: Some(v7::connect::<8>),
        accept: Some(v7::accept::<8>),
        regMr: Some(v4::reg_mr::<usize, 8>),
        regMrDmaBuf: Some(v6::reg_mr_dmabuf::<8>),
        isend: Some(v5::isend::<c_int, 8>),
        irecv: Some(v5::irecv::<c_int, 8>),
        iflush: Some(v5::iflush::<8>),
        getDeviceMr: None,
        irecvConsumed: None,
    }
}
