//! The GPU of `tests/cuda_stand_in.c`, for processes that play NCCL.

use std::ffi::{c_int, c_void};

use crate::support::window::stand_in;

/// Says to a rank that it has the GPU of `tests/cuda_stand_in.c`.
const GPU: &str = "PROFILER_TEST_GPU";

/// What Towline calls it.
pub(crate) const NAME: &str = "7 at 0000:3b:00.0";

/// The variables of a process that has it.
pub(crate) fn variables() -> [(&'static str, &'static str); 2] {
    [(GPU, "1"), ("LD_LIBRARY_PATH", stand_in().to_str().expect("text"))]
}

/// The thread's CUDA context, made as NCCL's host makes it.
pub(crate) struct Gpu {
    _driver: libloading::Library,
}

impl Gpu {
    /// Where the process has it.
    pub(crate) fn enter_if_asked() -> Option<Self> {
        std::env::var_os(GPU).map(|_| Self::enter())
    }

    fn enter() -> Self {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
        type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;
        let mut context = std::ptr::null_mut();
        // SAFETY: the stand-in has no initialisers, these are the types of its functions, and 7 is its device.
        unsafe {
            let driver = libloading::Library::new("libcuda.so.1").expect("the stand-in is on LD_LIBRARY_PATH");
            assert_eq!(driver.get::<Retain>(b"cuDevicePrimaryCtxRetain").unwrap()(&raw mut context, 7), 0);
            assert_eq!(driver.get::<SetCurrent>(b"cuCtxSetCurrent").unwrap()(context), 0);
            Self { _driver: driver }
        }
    }
}
