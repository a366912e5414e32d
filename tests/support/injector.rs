//! An injector of faults that is loaded into this process ([`super::faults`] is about networks): a library for
//! `LD_PRELOAD` with a function that arms it and one that reports.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};

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

    /// What was injected: by call and kind of fault, how many calls there were and how many faults.
    pub fn injected(&self) -> BTreeMap<(String, String), (u32, u32)> {
        // SAFETY: as it is declared there.
        let report: extern "C" fn(*mut c_char, c_int) -> c_int =
            unsafe { std::mem::transmute(Self::function(self.report)) };
        let mut text = vec![0_u8; 64 << 10];
        let length = report(text.as_mut_ptr().cast(), text.len() as c_int);
        let text = std::str::from_utf8(&text[..usize::try_from(length).expect("it fits")]).expect("ASCII");
        let words = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        words
            .map(|word| {
                let number = |at: usize| word[at].parse().expect("a number");
                ((word[0].to_owned(), word[1].to_owned()), (number(2), number(3)))
            })
            .collect()
    }
}
