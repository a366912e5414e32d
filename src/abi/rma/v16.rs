//! v16 of the one-sided interface, loaded by NCCL 2.32.3.
//!
//! New against v15: properties of a group.

use std::ffi::c_void;

use super::{export_rma, v15};
use crate::abi::guard::guard;
use crate::abi::pointer::Out;
use crate::abi::table::{NAME, Table};
use crate::nccl::ffi::{ncclResult_t, ncclRma_v16_t};

export_rma! {
    /// The table that NCCL 2.32.3 loads.
    ncclRmaPlugin_v16: ncclRma_v16_t = {
        16;
        getRmaProperties: Some(get_rma_properties::<16>),
        iput: Some(v15::iput::<16>),
        iputSignal: Some(v15::iput_signal::<16>),
        iget: Some(v15::iget::<16>),
    }
}

/// One byte: whether any signal makes all puts visible. False is always correct.
unsafe extern "C" fn get_rma_properties<const API: u8>(_coll_comm: *mut c_void, props: *mut c_void) -> ncclResult_t {
    guard::<API>("getRmaProperties", || {
        // SAFETY: NCCL's promise: null, or a place for a struct of one byte.
        unsafe { Out::new(props.cast::<u8>(), "props") }?.set(0);
        Ok(())
    })
}
