//! The functions of CUDA's driver that copy memory in a GPU. The driver is opened at run time, so nothing depends on
//! it.
//!
//! Names, types and numbers are those of NVIDIA's documentation of the CUDA driver API. Nothing here waits for a
//! kernel, and nothing here is one. The stream has the kind that runs beside all others, and the greatest priority.
//! Events are queried, never waited for. The GPU's copy engines copy between a GPU and page-locked memory.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::OnceLock;

use libloading::os::unix::Library;

use crate::os::error::{Cause, Error, Result};

#[cfg(test)]
pub(crate) mod simulation;

const LIBRARY: &str = "libcuda.so.1";

/// `CU_POINTER_ATTRIBUTE_CONTEXT` and `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const CONTEXT: c_int = 1;
const ORDINAL: c_int = 9;
/// `CU_STREAM_NON_BLOCKING`.
const BESIDE_OTHERS: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const WITHOUT_TIME: c_uint = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: for all contexts.
const PORTABLE: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: these calls are no part of a graph that another thread captures.
const RELAXED: c_int = 2;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: Code = 600;

type Code = c_int;

macro_rules! driver {
    ($($field:ident: $name:literal fn($($argument:ty),*);)*) => {
        /// The functions of the driver.
        pub(crate) struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> Code,)*
            error_name: Option<unsafe extern "C" fn(Code, *mut *const c_char) -> Code>,
            /// Never closed: the driver keeps threads and state.
            _library: ManuallyDrop<Library>,
        }

        impl Driver {
            fn look_up(library: Library) -> std::result::Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the documented type of the function of this name; the library stays open.
                    $($field: *unsafe { library.get(concat!($name, "\0").as_bytes()) }?,)*
                    // SAFETY: as above.
                    error_name: unsafe { library.get(b"cuGetErrorName\0") }.ok().map(|found| *found),
                    _library: ManuallyDrop::new(library),
                })
            }
        }
    };
}

driver! {
    init: "cuInit" fn(c_uint);
    pointer_attribute: "cuPointerGetAttribute" fn(*mut c_void, c_int, u64);
    device: "cuDeviceGet" fn(*mut c_int, c_int);
    retain: "cuDevicePrimaryCtxRetain" fn(*mut *mut c_void, c_int);
    release: "cuDevicePrimaryCtxRelease_v2" fn(c_int);
    push: "cuCtxPushCurrent_v2" fn(*mut c_void);
    pop: "cuCtxPopCurrent_v2" fn(*mut *mut c_void);
    exchange_mode: "cuThreadExchangeStreamCaptureMode" fn(*mut c_int);
    priorities: "cuCtxGetStreamPriorityRange" fn(*mut c_int, *mut c_int);
    stream_create: "cuStreamCreateWithPriority" fn(*mut *mut c_void, c_uint, c_int);
    stream_destroy: "cuStreamDestroy_v2" fn(*mut c_void);
    stream_query: "cuStreamQuery" fn(*mut c_void);
    event_create: "cuEventCreate" fn(*mut *mut c_void, c_uint);
    event_destroy: "cuEventDestroy_v2" fn(*mut c_void);
    event_record: "cuEventRecord" fn(*mut c_void, *mut c_void);
    event_query: "cuEventQuery" fn(*mut c_void);
    host_alloc: "cuMemHostAlloc" fn(*mut *mut c_void, usize, c_uint);
    host_free: "cuMemFreeHost" fn(*mut c_void);
    copy: "cuMemcpyAsync" fn(u64, u64, usize, *mut c_void);
    write_value: "cuStreamWriteValue64_v2" fn(*mut c_void, u64, u64, c_uint);
}

/// A context of the driver, to which a GPU's memory, streams and events belong. The application owns it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Context(*mut c_void);

// SAFETY: a name that the driver gives; its functions take it on any thread.
unsafe impl Send for Context {}
// SAFETY: see above.
unsafe impl Sync for Context {}

/// A stream or an event.
pub(crate) struct Object(*mut c_void);

// SAFETY: as a context.
unsafe impl Send for Object {}
// SAFETY: as a context.
unsafe impl Sync for Object {}

/// The driver, opened on first use.
///
/// # Errors
/// When there is none on this host.
pub(crate) fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
    let opened = DRIVER.get_or_init(|| open(LIBRARY));
    opened.as_ref().map_err(|why| Error::usage(format!("GPU memory cannot be reached: {why}")))
}

fn open(name: &str) -> std::result::Result<Driver, String> {
    // SAFETY: the driver's initialisers do not call back.
    let library = unsafe { Library::new(name) }.map_err(|error| format!("{name} was not found ({error})"))?;
    let driver = Driver::look_up(library).map_err(|error| format!("{name} is no CUDA driver of today ({error})"))?;
    // SAFETY: documented argument. It does nothing where the application has called it.
    match unsafe { (driver.init)(0) } {
        0 => Ok(driver),
        code => Err(format!("CUDA does not start: {}", driver.name(code))),
    }
}

impl Driver {
    fn name(&self, code: Code) -> String {
        let mut name = std::ptr::null();
        if let Some(error_name) = self.error_name
            // SAFETY: there is room for the answer.
            && unsafe { error_name(code, &raw mut name) } == 0
            && !name.is_null()
        {
            // SAFETY: a string of the driver's, which lives as long as the library.
            return format!("error {code} {}", unsafe { CStr::from_ptr(name) }.to_string_lossy());
        }
        format!("error {code}")
    }

    fn check(&self, doing: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        Err(Error::new(Cause::System, format!("{doing} failed: CUDA {}", self.name(code)))
            .with_hint("look for an earlier error of the application's own CUDA calls, and in dmesg for Xid"))
    }

    /// The context that memory belongs to. Memory that is mapped into an address range, such as NCCL's, belongs to no
    /// context. For such memory this returns the primary context of its GPU.
    ///
    /// # Errors
    /// When it is not CUDA's memory.
    pub(crate) fn context_of(&self, address: usize) -> Result<Context> {
        let (mut context, mut ordinal): (*mut c_void, c_int) = (null_mut(), 0);
        // SAFETY: there is room for the answer, a pointer.
        let code = unsafe { (self.pointer_attribute)((&raw mut context).cast(), CONTEXT, address as u64) };
        if code == 0 && !context.is_null() {
            return Ok(Context(context));
        }
        // SAFETY: there is room for the answer, a number.
        let code = unsafe { (self.pointer_attribute)((&raw mut ordinal).cast(), ORDINAL, address as u64) };
        if code != 0 {
            let what = format!("the memory to register is not a GPU's, as CUDA says: {}", self.name(code));
            return Err(Error::argument(what));
        }
        self.primary_context(ordinal)
    }

    /// The primary context of a GPU. The application, whose memory is in it, retains it. After `cudaDeviceReset` it is
    /// another context, so none is remembered.
    fn primary_context(&self, ordinal: c_int) -> Result<Context> {
        let (mut context, mut device): (*mut c_void, c_int) = (null_mut(), 0);
        // SAFETY: there is room for the answer.
        self.check("finding the GPU", unsafe { (self.device)(&raw mut device, ordinal) })?;
        // SAFETY: as above.
        self.check("opening the GPU", unsafe { (self.retain)(&raw mut context, device) })?;
        // SAFETY: it was retained here.
        self.check("leaving the GPU to its owner", unsafe { (self.release)(device) })?;
        Ok(Context(context))
    }

    /// Calls `inside` with this context, and outside of any graph that is being captured. Afterwards the previous state
    /// is restored.
    ///
    /// # Errors
    /// Those of `inside`, and when the context is gone.
    fn within<T>(&self, context: Context, inside: impl FnOnce() -> Result<T>) -> Result<T> {
        // SAFETY: a context that the driver gave; one that is gone is the driver's to refuse.
        self.check("entering the GPU's context", unsafe { (self.push)(context.0) })?;
        let (mut mode, mut popped) = (RELAXED, null_mut());
        // SAFETY: there is room for the answer.
        let exchanged = unsafe { (self.exchange_mode)(&raw mut mode) };
        let outcome = inside();
        if exchanged == 0 {
            // SAFETY: as above; this gives the thread its own mode back.
            unsafe { (self.exchange_mode)(&raw mut mode) };
        }
        // SAFETY: as above; it was pushed here.
        unsafe { (self.pop)(&raw mut popped) };
        outcome
    }

    /// Makes a stream of its own, and `events` events. Streams share the GPU's hardware queues, and a stream that waits
    /// holds up its queue. So this stream has the greatest priority, which has queues of its own (but see
    /// `Process::offers_one_sided`). Otherwise a stream of the application that waits for a signal could hold up the
    /// copy that brings it.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn stream(&self, context: Context, events: usize) -> Result<(Object, Vec<Object>)> {
        self.within(context, || {
            let (mut stream, mut least, mut greatest) = (null_mut(), 0, 0);
            // SAFETY: there is room for the answers.
            self.check("asking for priorities", unsafe { (self.priorities)(&raw mut least, &raw mut greatest) })?;
            // SAFETY: as above.
            let code = unsafe { (self.stream_create)(&raw mut stream, BESIDE_OTHERS, greatest) };
            self.check("making a stream", code)?;
            let (stream, mut made) = (Object(stream), Vec::with_capacity(events));
            while made.len() < events {
                let mut event = null_mut();
                // SAFETY: as above.
                let code = unsafe { (self.event_create)(&raw mut event, WITHOUT_TIME) };
                if let Err(error) = self.check("making an event", code) {
                    self.end_stream(context, &stream, &made);
                    return Err(error);
                }
                made.push(Object(event));
            }
            Ok((stream, made))
        })
    }

    /// Ends the stream and events that `stream` returned.
    pub(crate) fn end_stream(&self, context: Context, stream: &Object, events: &[Object]) {
        let _ = self.within(context, || {
            for event in events {
                // SAFETY: of this driver, and used no more by its owner.
                let _ = unsafe { (self.event_destroy)(event.0) };
            }
            // SAFETY: as above.
            self.check("ending a stream", unsafe { (self.stream_destroy)(stream.0) })
        });
    }

    /// Whether a stream to which no more work is appended has finished. A context that has failed, or is gone, does
    /// nothing.
    pub(crate) fn is_idle(&self, context: Context, stream: &Object) -> bool {
        // SAFETY: a stream of this driver.
        let asked = self.within(context, || Ok(unsafe { (self.stream_query)(stream.0) } != NOT_READY));
        asked.unwrap_or(true)
    }

    /// `size` bytes of host memory that all GPUs reach.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn host_memory(&self, context: Context, size: usize) -> Result<usize> {
        self.within(context, || {
            let mut memory = null_mut();
            // SAFETY: there is room for the answer.
            let code = unsafe { (self.host_alloc)(&raw mut memory, size, PORTABLE) };
            self.check(&format!("making {size} bytes of page-locked memory"), code)?;
            Ok(memory.expose_provenance())
        })
    }

    /// Frees memory that `host_memory` returned.
    pub(crate) fn free_host_memory(&self, context: Context, memory: usize) {
        let _ = self.within(context, || {
            // SAFETY: of this driver, and used no more by its owner.
            self.check("freeing page-locked memory", unsafe {
                (self.host_free)(std::ptr::with_exposed_provenance_mut(memory))
            })
        });
    }

    /// Appends a copy to a stream, and an event behind it.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Both places have `size` bytes, and are valid until the event has happened.
    pub(crate) unsafe fn copy(
        &self,
        (context, stream, event): (Context, &Object, &Object),
        to: usize,
        from: usize,
        size: usize,
    ) -> Result<()> {
        self.within(context, || {
            // SAFETY: this function's contract.
            let code = unsafe { (self.copy)(to as u64, from as u64, size, stream.0) };
            self.check("copying memory of a GPU", code)?;
            self.record(stream, event)
        })
    }

    /// Appends the write of a number to a stream, after all earlier work, and an event behind it.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The place is a GPU's, a multiple of 8, and valid until the event has happened.
    pub(crate) unsafe fn write(
        &self,
        (context, stream, event): (Context, &Object, &Object),
        to: usize,
        value: u64,
    ) -> Result<()> {
        self.within(context, || {
            // SAFETY: this function's contract. 0: after what is before it.
            let code = unsafe { (self.write_value)(stream.0, to as u64, value, 0) };
            self.check("writing a signal into a GPU's memory", code)?;
            self.record(stream, event)
        })
    }

    fn record(&self, stream: &Object, event: &Object) -> Result<()> {
        // SAFETY: both are this driver's.
        self.check("recording an event", unsafe { (self.event_record)(event.0, stream.0) })
    }

    /// Whether an event has happened.
    ///
    /// # Errors
    /// When something before it in its stream has failed.
    pub(crate) fn has_happened(&self, context: Context, event: &Object) -> Result<bool> {
        // SAFETY: an event of this driver.
        self.within(context, || match unsafe { (self.event_query)(event.0) } {
            NOT_READY => Ok(false),
            code => self.check("copying memory of a GPU", code).map(|()| true),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_strange_driver_is_a_sentence() {
        let missing = open("libcuda.so.nowhere").err().expect("it is not there");
        assert!(missing.contains("libcuda.so.nowhere was not found"), "{missing}");
        let strange = open("libc.so.6").err().expect("no driver");
        assert!(strange.contains("libc.so.6 is no CUDA driver of today") && strange.contains("cuInit"), "{strange}");
    }
}
