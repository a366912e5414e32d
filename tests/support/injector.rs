//! An injector of faults that is loaded into this process ([`super::faults`] is about networks): a library for
//! `LD_PRELOAD` with a function that arms it and one that reports.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use towline::host::{Code, Memory, Mr, PTR_CUDA, RecvComm};

/// Where memory begins in the DMA-BUF that it is said to have: anything from a page on.
const OFFSET: u64 = 1 << 16;

/// The library of `tests/faulty_calls.c`, built once.
pub fn faulty_calls() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faulty_calls.c");
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libfaulty_calls.so");
        // Built under another name first: a test of another process may be using it.
        let draft = library.with_extension(std::process::id().to_string());
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&draft);
        assert!(compiler.arg(source).arg("-ldl").status().expect("cc starts").success());
        std::fs::rename(&draft, &library).expect("the library can be put in place");
        library
    })
}

/// What it does, to the library that `FAULTY_CALLS_LIBRARY` names.
pub const FAULTY_CALLS: Injector = Injector {
    arm: c"faulty_calls_arm",
    report: c"faulty_calls_report",
    complaint: "the injector did not find the plugin's code",
};

/// The injector of verbs faults, which `tests/rdma_vm/suite.sh` builds beside the plugin.
pub fn faulty_verbs() -> PathBuf {
    let library = super::library().with_file_name("libfaulty_verbs.so");
    assert!(library.exists(), "{} is not there: tests/rdma_vm/suite.sh builds it", library.display());
    library
}

/// Whether that takes host memory for a GPU's here.
pub fn has_gpu() -> bool {
    std::env::var_os("FAULTY_VERBS_GPU").is_some_and(|set| set == "1")
}

/// Registers memory as that of a GPU.
pub fn as_gpu(recv: &RecvComm, memory: &Memory) -> Result<Mr, Code> {
    recv.reg_mr_dmabuf((memory.at(0), memory.len()), PTR_CUDA, (OFFSET, 0))
}

/// The names of its functions, and what it means when it cannot be armed.
pub struct Injector {
    pub arm: &'static CStr,
    pub report: &'static CStr,
    pub complaint: &'static str,
}

impl Injector {
    fn function(name: &CStr) -> *mut libc::c_void {
        // SAFETY: the name ends in a zero.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        assert!(!found.is_null(), "the injector is not loaded");
        found
    }

    pub fn arm(&self, on: bool) {
        // SAFETY: as it is declared there.
        let arm: extern "C" fn(c_int) -> c_int = unsafe { std::mem::transmute(Self::function(self.arm)) };
        assert!(arm(on.into()) != 0, "{}", self.complaint);
    }

    /// Has the next `times` calls of a name fail with an error. How many of the last order were still to.
    pub fn fail(&self, name: &CStr, call: &str, error: c_int, times: c_int) -> c_int {
        // SAFETY: as it is declared there.
        let fail: extern "C" fn(*const c_char, c_int, c_int) -> c_int =
            unsafe { std::mem::transmute(Self::function(name)) };
        let call = CString::new(call).expect("no zero");
        let left = fail(call.as_ptr(), error, times);
        assert!(left >= 0, "no call is named {call:?}");
        left
    }

    /// What a function of this name writes.
    pub fn text(name: &CStr) -> String {
        // SAFETY: as they are declared there.
        let write: extern "C" fn(*mut c_char, c_int) -> c_int = unsafe { std::mem::transmute(Self::function(name)) };
        let mut text = vec![0_u8; 64 << 10];
        let length = write(text.as_mut_ptr().cast(), text.len() as c_int);
        text.truncate(usize::try_from(length).expect("it fits"));
        String::from_utf8(text).expect("ASCII")
    }

    /// What was injected: by call and kind of fault, how many calls there were and how many faults.
    pub fn injected(&self) -> BTreeMap<(String, String), (u32, u32)> {
        let text = Self::text(self.report);
        let words = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        words
            .map(|word| {
                let number = |at: usize| word[at].parse().expect("a number");
                ((word[0].to_owned(), word[1].to_owned()), (number(2), number(3)))
            })
            .collect()
    }
}
