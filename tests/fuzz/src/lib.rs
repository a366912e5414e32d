//! The fuzz targets, each a function from an input to nothing that panics when a promise is broken, and what they
//! share: an input as a series of decisions.
//!
//! `fuzz_targets/` gives them to libFuzzer, `tests/sources/fuzz_corpus.rs` replays the corpus in an ordinary test.

/// Calls an entry of NCCL's network table.
macro_rules! call {
    ($entry:ident($($argument:expr),* $(,)?)) => {{
        let entry = towline::abi::v12::ncclNetPlugin_v12.0.$entry.expect("the table has it");
        // SAFETY: ids are numbers, which the plugin checks; all other pointers are valid for the call, and buffers live
        // until the plugin has let go of them.
        unsafe { entry($($argument),*) }
    }};
}

pub mod calls;
pub mod frames;
pub mod handle;
pub mod handshake;
pub mod setup;

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use towline::nccl::ffi::{self, ncclSuccess};

/// Asks for devices and their properties, and for a device made of others.
pub(crate) fn ask(input: &mut Input<'_>) {
    let mut count = 0;
    assert_eq!(call!(devices(&raw mut count)), ncclSuccess);
    assert!(count > 0);
    // SAFETY: the properties are integers, floats and pointers: all zeros is a value of each.
    let mut properties = unsafe { std::mem::zeroed() };
    call!(getProperties(c_int::from(input.byte()) - 64, &raw mut properties));
    let mut members = ffi::ncclNetVDeviceProps_v12_t { ndevs: c_int::from(input.byte() & 15), devs: [0; 8] };
    members.devs.iter_mut().for_each(|member| *member = c_int::from(input.byte() & 3));
    let mut device = 0;
    call!(makeVDevice(&raw mut device, &raw mut members));
}

/// Posts a group of receives: memory, size and tag of each. `count` may say something else than there are. The arrays
/// are mutable, as NCCL has them, and each ends where the address sanitizer looks.
pub(crate) fn irecv(
    receiver: *mut c_void,
    count: c_int,
    parts: &[(*mut c_void, usize, c_int)],
) -> (ffi::ncclResult_t, *mut c_void) {
    let mut data: Vec<_> = parts.iter().map(|part| part.0).collect();
    let mut sizes: Vec<_> = parts.iter().map(|part| part.1).collect();
    let mut tags: Vec<_> = parts.iter().map(|part| part.2).collect();
    let (mut mrs, mut profiles) = (vec![null_mut(); parts.len()], vec![null_mut(); parts.len()]);
    let mut request = without_provenance_mut(1);
    let code = call!(irecv(
        receiver,
        count,
        data.as_mut_ptr(),
        sizes.as_mut_ptr(),
        tags.as_mut_ptr(),
        mrs.as_mut_ptr(),
        profiles.as_mut_ptr(),
        &raw mut request,
    ));
    (code, request)
}

/// The input, read from the front; an input that has ended says 0 for ever.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// The whole input.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether nothing is left.
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// What is left.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `end`, from one byte.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end.max(1)
    }

    /// The next `N` bytes.
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.byte())
    }

    /// A number of any size, short ones from few bytes.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            short @ 0..=199 => u64::from(short),
            200..=219 => u64::from(u16::from_le_bytes(self.bytes())) * 128,
            220..=229 => (64 << 10) - 2 + u64::from(self.byte() % 5),
            230..=239 => u64::from(u32::from_le_bytes(self.bytes())),
            240..=247 => u64::MAX - u64::from(self.byte()),
            _ => u64::from_le_bytes(self.bytes()),
        }
    }
}
