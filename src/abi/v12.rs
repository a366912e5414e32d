//! v12 of the net interface, loaded by NCCL 2.30 and later.
//!
//! New against v11: virtual devices of up to eight members, and the properties name the rail and the plane of the
//! cluster's network that the device is on.

use super::properties::get_properties;
use super::v4::export_table;
use super::{v4, v5, v6, v7, v10, v11};

export_table! {
    /// The table that NCCL 2.30 and later load.
    ncclNetPlugin_v12: ncclNet_v12_t = {
        12;
        init: Some(v11::init::<12>),
        getProperties: Some(get_properties::<_, 12>),
        listen: Some(v11::listen::<12>),
        connect: Some(v11::connect::<12>),
        accept: Some(v7::accept::<12>),
        regMr: Some(v4::reg_mr::<usize, 12>),
        regMrDmaBuf: Some(v6::reg_mr_dmabuf::<12>),
        isend: Some(v10::isend::<12>),
        irecv: Some(v10::irecv::<12>),
        iflush: Some(v5::iflush::<12>),
        getDeviceMr: None,
        irecvConsumed: None,
        makeVDevice: Some(v10::make_vdevice::<_, 12>),
        finalize: Some(v11::finalize::<12>),
        setNetAttr: Some(v11::set_net_attr::<12>),
    }
}
