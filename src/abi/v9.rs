//! v9 of the net interface, loaded by NCCL 2.24 and 2.25.
//!
//! New against v8: messages of `size_t`, virtual devices (which are not offered here), and in the properties the
//! members, the largest messages and whether receives must be flushed. `irecv` may find a hint in `*request` (see
//! `NCCL_NET_OPTIONAL_RECV_COMPLETION`), which we overwrite.

use super::properties::get_properties;
use super::v4::export_table;
use super::{v4, v5, v6, v7};

export_table! {
    /// The table that NCCL 2.24 and 2.25 load.
    ncclNetPlugin_v9: ncclNet_v9_t = {
        9;
        init: Some(v4::init::<9>),
        getProperties: Some(get_properties::<_, 9>),
        listen: Some(v4::listen::<9>),
        connect: Some(v7::connect::<9>),
        accept: Some(v7::accept::<9>),
        regMr: Some(v4::reg_mr::<usize, 9>),
        regMrDmaBuf: Some(v6::reg_mr_dmabuf::<9>),
        isend: Some(v5::isend::<usize, 9>),
        irecv: Some(v5::irecv::<usize, 9>),
        iflush: Some(v5::iflush::<9>),
        getDeviceMr: None,
        irecvConsumed: None,
        // NCCL 2.24 and 2.25 end the job when a merge is refused, so none is offered to them.
        makeVDevice: None,
    }
}
