//! The GPU that a thread uses, queried from CUDA's driver where the process has it loaded. Nothing is loaded for it.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use libloading::os::unix::{Library, RTLD_LAZY};

const LIBRARY: &str = "libcuda.so.1";

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// CUDA's number of it in this process: `CUDA_VISIBLE_DEVICES` renumbers the host's.
    pub number: i32,
    /// Its PCI address, as `nvidia-smi` and the kernel's log have it.
    pub address: String,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.number, self.address)
    }
}

/// The GPU of the calling thread's CUDA context; None where there is no driver or no context.
pub(crate) fn current() -> Option<Gpu> {
    type OfContext = unsafe extern "C" fn(*mut c_int) -> c_int;
    type AddressOf = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    // SAFETY: RTLD_NOLOAD only finds what the process has loaded already, so that no initialiser runs.
    let library = unsafe { Library::open(Some(LIBRARY), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()?;
    // SAFETY: the type of the function of this name in the documentation of CUDA's driver API; the library stays open
    // meanwhile.
    let of_context = unsafe { library.get::<OfContext>(b"cuCtxGetDevice\0") }.ok()?;
    // SAFETY: as above.
    let address_of = unsafe { library.get::<AddressOf>(b"cuDeviceGetPCIBusId\0") }.ok()?;
    let (mut number, mut address) = (0, [0; 32]);
    // SAFETY: there is room for the answer.
    if unsafe { of_context(&raw mut number) } != 0 {
        return None;
    }
    // SAFETY: there is room for as many bytes as are announced, and the driver puts a zero behind its answer.
    let address = unsafe {
        if address_of(address.as_mut_ptr(), address.len() as c_int, number) != 0 {
            return None;
        }
        CStr::from_ptr(address.as_ptr())
    };
    Some(Gpu { number, address: address.to_string_lossy().to_lowercase() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_no_gpu_is_known() {
        assert_eq!(current(), None);
        let gpu = Gpu { number: 3, address: "0000:3b:00.0".into() };
        assert_eq!(gpu.to_string(), "3 at 0000:3b:00.0");
    }
}
