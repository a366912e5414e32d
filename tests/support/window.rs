//! Memory for one-sided operations: the host's, or that of the GPU of `tests/cuda_stand_in.c`, which faults when the
//! host touches it and which the tests see at another address.

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::os::unix::{Library, Symbol};
use towline::host::{Memory, PTR_CUDA, PTR_HOST};

/// A folder with the stand-in as `libcuda.so.1`, for `LD_LIBRARY_PATH`.
pub fn stand_in() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_stand_in.c");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("late_cuda");
        std::fs::create_dir_all(&folder).expect("a folder");
        let library = folder.join("libcuda.so.1");
        // Built under another name first: a test of another process may be using it.
        let draft = library.with_extension(std::process::id().to_string());
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&draft);
        assert!(compiler.arg(source).status().expect("cc starts").success());
        std::fs::rename(&draft, &library).expect("the library can be put in place");
        folder
    })
}

/// The stand-in that the plugin of this process opens.
struct StandIn {
    alloc: Symbol<unsafe extern "C" fn(usize, *mut *mut c_void) -> u64>,
    free: Symbol<unsafe extern "C" fn(u64)>,
    late: Symbol<unsafe extern "C" fn(c_int)>,
    fail: Symbol<unsafe extern "C" fn(c_int)>,
    hold: Symbol<unsafe extern "C" fn(c_int)>,
    reset: Symbol<unsafe extern "C" fn()>,
    waiting: Symbol<unsafe extern "C" fn() -> c_int>,
    _library: Library,
}

fn driver() -> &'static StandIn {
    static OPENED: OnceLock<StandIn> = OnceLock::new();
    OPENED.get_or_init(|| {
        // SAFETY: the stand-in has no initialisers, and these are the types of its functions.
        unsafe {
            let library = Library::new("libcuda.so.1").expect("the stand-in is on LD_LIBRARY_PATH");
            StandIn {
                alloc: library.get(b"stand_in_alloc").expect("the stand-in's"),
                free: library.get(b"stand_in_free").expect("the stand-in's"),
                late: library.get(b"stand_in_late").expect("the stand-in's"),
                fail: library.get(b"stand_in_fail").expect("the stand-in's"),
                hold: library.get(b"stand_in_hold").expect("the stand-in's"),
                reset: library.get(b"stand_in_reset").expect("the stand-in's"),
                waiting: library.get(b"stand_in_waiting").expect("the stand-in's"),
                _library: library,
            }
        }
    })
}

/// How often an event is asked after before it happens, from now on.
pub fn copies_are_late(queries: c_int) {
    // SAFETY: a plain function.
    unsafe { (driver().late)(queries) }
}

/// So many copies from now on, the last of them fails, and all after it. 0: none does.
pub fn copies_fail(after: c_int) {
    // SAFETY: as above.
    unsafe { (driver().fail)(after) }
}

/// Whether a stream of the application's waits, in the queue of all that have its priority.
pub fn a_stream_waits(whether: bool) {
    // SAFETY: as above.
    unsafe { (driver().hold)(c_int::from(whether)) }
}

/// The GPU's context ends, with the streams and events in it, and there is a new one.
pub fn the_context_ends() {
    // SAFETY: as above.
    unsafe { (driver().reset)() }
}

/// How many copies and signals have been given to the GPU and have not happened.
pub fn copies_waiting() -> c_int {
    // SAFETY: as above.
    unsafe { (driver().waiting)() }
}

pub enum Window {
    Host(Memory),
    Gpu { address: usize, seen: usize, len: usize },
}

impl Window {
    pub fn host(len: usize) -> Self {
        Self::Host(Memory::new(len))
    }

    pub fn gpu(len: usize) -> Self {
        let mut seen = std::ptr::null_mut();
        // SAFETY: there is room for the answer.
        let address = unsafe { (driver().alloc)(len.max(8), &raw mut seen) } as usize;
        Self::Gpu { address, seen: seen.expose_provenance(), len }
    }

    /// For a plugin: its address and size.
    pub fn place(&self) -> (usize, usize) {
        match self {
            Self::Host(memory) => (memory.at(0) as usize, memory.len()),
            Self::Gpu { address, len, .. } => (*address, *len),
        }
    }

    pub fn kind(&self) -> c_int {
        if matches!(self, Self::Host(_)) { PTR_HOST } else { PTR_CUDA }
    }

    /// For the test: where byte `offset` is.
    pub fn seen(&self, offset: usize) -> *mut u8 {
        match self {
            Self::Host(memory) => memory.at(offset).cast(),
            Self::Gpu { seen, .. } => std::ptr::with_exposed_provenance_mut(seen + offset),
        }
    }

    /// Writes its first bytes.
    pub fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.place().1);
        // SAFETY: inside the memory, which no transfer uses: the tests call this before and after all transfers.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.seen(0), bytes.len()) }
    }

    /// Writes zeros there.
    pub fn clear(&self, place: std::ops::Range<usize>) {
        assert!(place.end <= self.place().1);
        // SAFETY: as for `fill`.
        unsafe { std::ptr::write_bytes(self.seen(place.start), 0, place.len()) }
    }

    pub fn is_filled_with(&self, byte: u8) -> bool {
        // SAFETY: all of the memory, which no transfer may use.
        let bytes = unsafe { std::slice::from_raw_parts(self.seen(0), self.place().1) };
        bytes.iter().all(|&it| it == byte)
    }

    /// Whether nobody wrote around it.
    pub fn guards_intact(&self) -> bool {
        match self {
            Self::Host(memory) => memory.guards_intact(),
            // Around it there is nothing.
            Self::Gpu { .. } => true,
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Self::Gpu { address, .. } = self {
            // SAFETY: from `gpu`, and registered no more.
            unsafe { (driver().free)(*address as u64) }
        }
    }
}
