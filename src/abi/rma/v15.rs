//! v15 of the one-sided interface, loaded by NCCL 2.31.
//!
//! New against v14: flags of an operation, which announce that more follow. They are not read.

use std::ffi::{c_int, c_void};

use super::{export_rma, v14};
use crate::abi::table::{NAME, Table};
use crate::nccl::ffi::{ncclResult_t, ncclRma_v15_t};

export_rma! {
    /// The table that NCCL 2.31 loads.
    ncclRmaPlugin_v15: ncclRma_v15_t = {
        15;
        iput: Some(iput::<15>),
        iputSignal: Some(iput_signal::<15>),
        iget: Some(iget::<15>),
    }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(super) unsafe extern "C" fn iput<const API: u8>(
    rma_ctx: *mut c_void,
    context: c_int,
    src_offset: u64,
    src: *mut c_void,
    size: usize,
    dst_offset: u64,
    dst: *mut c_void,
    rank: u32,
    _opt_flags: u32,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { v14::iput::<API>(rma_ctx, context, src_offset, src, size, dst_offset, dst, rank, request) }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(super) unsafe extern "C" fn iput_signal<const API: u8>(
    rma_ctx: *mut c_void,
    context: c_int,
    src_offset: u64,
    src: *mut c_void,
    size: usize,
    dst_offset: u64,
    dst: *mut c_void,
    rank: u32,
    signal_offset: u64,
    signal: *mut c_void,
    signal_value: u64,
    signal_operation: u32,
    is_strong: bool,
    _opt_flags: u32,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe {
        v14::iput_signal::<API>(
            rma_ctx,
            context,
            src_offset,
            src,
            size,
            dst_offset,
            dst,
            rank,
            signal_offset,
            signal,
            signal_value,
            signal_operation,
            is_strong,
            request,
        )
    }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(super) unsafe extern "C" fn iget<const API: u8>(
    rma_ctx: *mut c_void,
    context: c_int,
    remote_offset: u64,
    remote: *mut c_void,
    size: usize,
    local_offset: u64,
    local: *mut c_void,
    rank: u32,
    _opt_flags: u32,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { v14::iget::<API>(rma_ctx, context, remote_offset, remote, size, local_offset, local, rank, request) }
}
