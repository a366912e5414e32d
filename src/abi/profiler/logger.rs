//! NCCL's logger, kept for a second profiler.

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::nccl::ffi::ncclDebugLogger_t;

/// NCCL's logger as our own `init` got it, for the second profiler's.
static LOGGER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Keeps NCCL's logger for [`logger`].
pub(super) fn set_logger(logger: ncclDebugLogger_t) {
    LOGGER.store(logger.map_or(std::ptr::null_mut(), |function| function as *mut c_void), Ordering::Release);
}

/// NCCL's logger.
pub(super) fn logger() -> ncclDebugLogger_t {
    // SAFETY: null or a function of this type, stored by `set_logger`; the type is an optional function pointer, for
    // which null means none.
    unsafe { std::mem::transmute::<*mut c_void, ncclDebugLogger_t>(LOGGER.load(Ordering::Acquire)) }
}
