//! Names for what NCCL's pointers mean: a place for a result, an array, a handle's bytes, one of our ids.
//!
//! Every function checks for null first and names the argument in its error. The lifetimes are the caller's to choose;
//! they end with the call (see *NCCL's promise* in [`super`]).

use std::ffi::{c_int, c_void};
use std::ptr;
use std::slice;

use crate::os::error::{Error, Result};

/// Bytes of a connection handle that we use: all that v4 has. Later versions give 128, the rest stays untouched.
pub(super) const HANDLE_BYTES: usize = 64;

/// A place where NCCL wants a result.
pub(super) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Checks the place for null.
    ///
    /// # Safety
    /// `at` is null or valid for writing a `T` until the call from NCCL returns, and the `Out` does not outlive it.
    #[inline]
    pub(super) unsafe fn new(at: *mut T, name: &str) -> Result<Self> {
        if at.is_null() { Err(null(name)) } else { Ok(Self(at)) }
    }

    /// Writes the result; may be called again to replace it.
    #[inline]
    pub(super) fn set(&mut self, value: T) {
        // SAFETY: not null, and valid for writing by the promise of `new`. NCCL keeps only plain data in such places,
        // so nothing is lost by not dropping the old value.
        unsafe { self.0.write(value) }
    }
}

/// The first `n` values of an array.
///
/// # Safety
/// `at` is null or valid for reading `n` values of `T`, unchanged until the call from NCCL returns.
#[inline]
pub(super) unsafe fn array<'a, T>(at: *const T, n: usize, name: &str) -> Result<&'a [T]> {
    if at.is_null() {
        return Err(null(name));
    }
    // SAFETY: not null, and valid for `n` values by this function's own contract.
    Ok(unsafe { slice::from_raw_parts(at, n) })
}

/// A value that NCCL hands over by pointer.
///
/// # Safety
/// `at` is null or valid for reading a `T`, unchanged until the call from NCCL returns.
#[inline]
pub(super) unsafe fn value<'a, T>(at: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: one value is an array of length 1.
    unsafe { array(at, 1, name) }.map(|values| &values[0])
}

/// The bytes of a connection handle.
///
/// # Safety
/// `at` is null or valid for reading and writing 64 bytes, which no other thread uses until the call from NCCL returns.
pub(super) unsafe fn handle_bytes<'a>(at: *mut c_void) -> Result<&'a mut [u8; HANDLE_BYTES]> {
    if at.is_null() {
        return Err(null("handle"));
    }
    // SAFETY: not null, exclusive and long enough by this function's own contract; bytes have no alignment.
    Ok(unsafe { &mut *at.cast() })
}

/// One of our ids, as NCCL gives it back.
#[inline]
pub(super) fn id(pointer: *mut c_void, name: &str) -> Result<usize> {
    if pointer.is_null() { Err(null(name)) } else { Ok(pointer.addr()) }
}

/// An id on its way to NCCL: a number dressed as a pointer, with nothing behind it.
pub(super) fn dress(id: usize) -> *mut c_void {
    debug_assert_ne!(id, 0, "NCCL reads a null pointer as `not now`");
    ptr::without_provenance_mut(id)
}

/// A number of bytes, as one or the other version of the interface gives it.
pub(super) trait Size: Copy {
    /// The number, if it can be one.
    fn bytes(self) -> Result<usize>;
}

impl Size for c_int {
    fn bytes(self) -> Result<usize> {
        usize::try_from(self).map_err(|_| Error::argument(format!("the size {self} is negative")))
    }
}

impl Size for usize {
    fn bytes(self) -> Result<usize> {
        Ok(self)
    }
}

/// The error for a null pointer where a value is needed.
#[cold]
pub(super) fn null(name: &str) -> Error {
    Error::argument(format!("the argument `{name}` is a null pointer"))
}
