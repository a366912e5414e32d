//! CUDA's driver interface, as far as buffers in GPU memory need it.
//!
//! The library is opened only with `--gpu`, so that nothing depends on it. Names, types and numbers are those of
//! NVIDIA's documentation of the CUDA driver API.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::rc::Rc;

use crate::os::error::{Cause, Error, Result};
use libloading::Library;

/// The driver's library.
pub(crate) const LIBRARY: &str = "libcuda.so.1";

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF_FD: c_int = 1;

/// Memory that is exported begins and ends at multiples of this: the largest page size of a host.
const PAGE: usize = 64 << 10;

type Device = c_int;
type Address = u64;
type Code = c_int;

macro_rules! driver {
    (
        required { $($field:ident: $name:literal fn($($argument:ty),*);)* }
        optional { $($maybe:ident: $maybe_name:literal fn($($maybe_argument:ty),*);)* }
    ) => {
        /// The functions of the driver.
        struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> Code,)*
            $($maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> Code>,)*
            /// Never closed: the driver keeps threads and state.
            _library: std::mem::ManuallyDrop<Library>,
        }

        impl Driver {
            fn look_up(library: Library) -> std::result::Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the documented type of the function of this name; the library stays open.
                    $($field: *unsafe { library.get(concat!($name, "\0").as_bytes()) }?,)*
                    // SAFETY: as above.
                    $($maybe: unsafe { library.get(concat!($maybe_name, "\0").as_bytes()) }.ok().map(|found| *found),)*
                    _library: std::mem::ManuallyDrop::new(library),
                })
            }
        }
    };
}

driver! {
    required {
        init: "cuInit" fn(c_uint);
        device_count: "cuDeviceGetCount" fn(*mut c_int);
        device: "cuDeviceGet" fn(*mut Device, c_int);
        retain: "cuDevicePrimaryCtxRetain" fn(*mut *mut c_void, Device);
        set_current: "cuCtxSetCurrent" fn(*mut c_void);
        synchronize: "cuCtxSynchronize" fn();
        allocate: "cuMemAlloc_v2" fn(*mut Address, usize);
        free: "cuMemFree_v2" fn(Address);
        to_device: "cuMemcpyHtoD_v2" fn(Address, *const c_void, usize);
        to_host: "cuMemcpyDtoH_v2" fn(*mut c_void, Address, usize);
    }
    optional {
        error_name: "cuGetErrorName" fn(Code, *mut *const c_char);
        export: "cuMemGetHandleForAddressRange" fn(*mut c_void, Address, usize, c_int, c_ulonglong);
    }
}

impl Driver {
    fn open(name: &str) -> Result<Self> {
        // SAFETY: the driver's initialisers do not call back.
        let library = unsafe { Library::new(name) }.map_err(|error| {
            Error::usage(format!("{name} was not found ({error})")).with_hint(
                "--gpu needs NVIDIA's driver; in a container, start it with its GPUs (docker run --gpus all)",
            )
        })?;
        Self::look_up(library).map_err(|error| {
            Error::usage(format!("{name} is no CUDA driver ({error})")).with_hint("install NVIDIA's driver anew")
        })
    }

    fn check(&self, doing: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        let mut text = String::new();
        if let Some(error_name) = self.error_name
            // SAFETY: there is room for the answer.
            && unsafe { error_name(code, &raw mut name) } == 0
            && !name.is_null()
        {
            // SAFETY: a string of the driver's, which lives as long as the library.
            text = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        }
        Err(Error::new(Cause::System, format!("{doing} failed: CUDA error {code} {text}").trim_end().to_owned())
            .with_hint("nvidia-smi shows the GPUs and what their memory is used for"))
    }
}

/// A GPU with its primary context, which it shares with all other users of CUDA in this process.
pub(crate) struct Gpu {
    driver: Driver,
    context: *mut c_void,
}

impl Gpu {
    /// Opens the driver and GPU number `index`.
    pub(crate) fn open(index: i32) -> Result<Rc<Self>> {
        Self::open_with(LIBRARY, index)
    }

    fn open_with(library: &str, index: i32) -> Result<Rc<Self>> {
        let driver = Driver::open(library)?;
        let (mut count, mut device, mut context) = (0, 0, null_mut());
        // SAFETY: documented arguments.
        driver.check("starting CUDA", unsafe { (driver.init)(0) })?;
        // SAFETY: as above; there is room for the answer.
        driver.check("counting the GPUs", unsafe { (driver.device_count)(&raw mut count) })?;
        if index < 0 || index >= count {
            return Err(Error::argument(format!("there is no GPU {index}"))
                .with_hint(format!("CUDA has {count} in this process; CUDA_VISIBLE_DEVICES chooses them")));
        }
        // SAFETY: as above.
        driver.check("finding the GPU", unsafe { (driver.device)(&raw mut device, index) })?;
        // SAFETY: as above. The context is never released: the process ends with its use.
        driver.check("opening the GPU", unsafe { (driver.retain)(&raw mut context, device) })?;
        Ok(Rc::new(Self { driver, context }))
    }

    /// Makes its context the calling thread's.
    fn enter(&self) -> Result<()> {
        // SAFETY: a context that is never released.
        self.driver.check("choosing the GPU", unsafe { (self.driver.set_current)(self.context) })
    }
}

/// Memory of a GPU.
pub(crate) struct GpuMemory {
    gpu: Rc<Gpu>,
    allocation: Address,
    start: Address,
    len: usize,
}

impl GpuMemory {
    /// `len` bytes, whatever they hold.
    pub(crate) fn new(gpu: &Rc<Gpu>, len: usize) -> Result<Self> {
        gpu.enter()?;
        let mut allocation = 0;
        let bytes = len.next_multiple_of(PAGE) + PAGE;
        // SAFETY: there is room for the answer.
        let code = unsafe { (gpu.driver.allocate)(&raw mut allocation, bytes) };
        gpu.driver.check(&format!("allocating {bytes} bytes of GPU memory"), code)?;
        let start = allocation.next_multiple_of(PAGE as u64);
        Ok(Self { gpu: Rc::clone(gpu), allocation, start, len })
    }

    /// Its address, which is the GPU's.
    pub(crate) fn address(&self) -> *mut c_void {
        self.start as usize as *mut c_void
    }

    /// Copies `bytes` to the place `offset`; they are there when it returns.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len());
        self.gpu.enter()?;
        let driver = &self.gpu.driver;
        // SAFETY: as many bytes as `bytes` has lie at the place.
        let code = unsafe { (driver.to_device)(self.start + offset as u64, bytes.as_ptr().cast(), bytes.len()) };
        driver.check("copying to the GPU", code)?;
        // The copy of pageable memory may still be under way inside the GPU.
        // SAFETY: no arguments.
        driver.check("copying to the GPU", unsafe { (driver.synchronize)() })
    }

    /// Copies what is at the place `offset` into `bytes`.
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len());
        self.gpu.enter()?;
        let driver = &self.gpu.driver;
        // SAFETY: as many bytes as `bytes` has lie at the place.
        let code = unsafe { (driver.to_host)(bytes.as_mut_ptr().cast(), self.start + offset as u64, bytes.len()) };
        driver.check("copying from the GPU", code)
    }

    /// A DMA-BUF descriptor of it, whose first byte is its first; none where the driver has none to give.
    pub(crate) fn export(&self) -> Result<Option<OwnedFd>> {
        let Some(export) = self.gpu.driver.export else { return Ok(None) };
        self.gpu.enter()?;
        let mut fd: c_int = -1;
        let bytes = self.len.next_multiple_of(PAGE);
        // SAFETY: the range lies within the allocation, at multiples of the page size; there is room for the
        // descriptor.
        let code = unsafe { export((&raw mut fd).cast(), self.start, bytes, DMA_BUF_FD, 0) };
        self.gpu.driver.check("exporting GPU memory as a DMA-BUF", code)?;
        // SAFETY: a descriptor that is ours now.
        Ok((fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn check(&self, offset: usize, bytes: usize) {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.len), "{bytes} bytes at {offset} of {}", self.len);
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        if self.gpu.enter().is_ok() {
            // SAFETY: allocated by `new`, and no longer used.
            let _ = unsafe { (self.gpu.driver.free)(self.allocation) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_strange_driver_is_an_error_with_advice() {
        let missing = Gpu::open_with("libcuda.so.nowhere", 0).err().expect("it is not there").to_string();
        assert!(missing.contains("libcuda.so.nowhere was not found") && missing.contains("--gpus all"), "{missing}");
        let strange = Gpu::open_with("libc.so.6", 0).err().expect("no driver").to_string();
        assert!(strange.contains("libc.so.6 is no CUDA driver") && strange.contains("cuInit"), "{strange}");
    }

    #[test]
    #[ignore = "needs a GPU with NVIDIA's driver"]
    fn gpu_memory_keeps_what_is_written_where_it_is_written() {
        let gpu = Gpu::open(0).expect("a GPU");
        assert!(Gpu::open(1000).err().expect("not so many").to_string().contains("there is no GPU 1000"));
        for len in [1, 70_000, 3 << 20] {
            let memory = GpuMemory::new(&gpu, len).expect("memory");
            let (mut bytes, mut read) = (vec![5_u8; len], vec![0; len]);
            bytes[len / 2] = 9;
            memory.write(0, &bytes).expect("a copy");
            memory.write(len - 1, &[77]).expect("a copy");
            bytes[len - 1] = 77;
            memory.read(0, &mut read).expect("a copy");
            assert!(read == bytes, "{len}");
            println!("{len} bytes at {:?}, exported as {:?}", memory.address(), memory.export());
        }
    }
}
