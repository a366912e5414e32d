//! v14 of the one-sided interface, loaded by NCCL 2.30.7.

use std::ffi::{c_int, c_void};

use super::{addend, at, begin, export_rma};
use crate::abi::pointer::id;
use crate::abi::table::{NAME, Table};
use crate::nccl::ffi::{ncclResult_t, ncclRma_v14_t};
use crate::rma::facade;

export_rma! {
    /// The table that NCCL 2.30.7 loads.
    ncclRmaPlugin_v14: ncclRma_v14_t = {
        14;
        iput: Some(iput::<14>),
        iputSignal: Some(iput_signal::<14>),
        iget: Some(iget::<14>),
    }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(super) unsafe extern "C" fn iput<const API: u8>(
    rma_ctx: *mut c_void,
    _context: c_int,
    src_offset: u64,
    src: *mut c_void,
    size: usize,
    dst_offset: u64,
    dst: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let put = || facade::put(id(rma_ctx, "rmaCtx")?, at(src, src_offset), at(dst, dst_offset), size, rank, None);
    // SAFETY: NCCL's promise: null, or a place for a pointer.
    unsafe { begin::<API>("iput", request, put) }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(super) unsafe extern "C" fn iput_signal<const API: u8>(
    rma_ctx: *mut c_void,
    _context: c_int,
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
    // All signals are strong.
    _is_strong: bool,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let put = || {
        let signal = (at(signal, signal_offset), addend(signal_operation, signal_value)?);
        facade::put(id(rma_ctx, "rmaCtx")?, at(src, src_offset), at(dst, dst_offset), size, rank, Some(signal))
    };
    // SAFETY: NCCL's promise: null, or a place for a pointer.
    unsafe { begin::<API>("iputSignal", request, put) }
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(super) unsafe extern "C" fn iget<const API: u8>(
    rma_ctx: *mut c_void,
    _context: c_int,
    remote_offset: u64,
    remote: *mut c_void,
    size: usize,
    local_offset: u64,
    local: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let get = || facade::get(id(rma_ctx, "rmaCtx")?, at(remote, remote_offset), at(local, local_offset), size, rank);
    // SAFETY: NCCL's promise: null, or a place for a pointer.
    unsafe { begin::<API>("iget", request, get) }
}
