//! What the table of every version has: a name, and a type that C can find.

use std::ffi::CStr;

/// What `NCCL_NET` selects and the log shows.
pub(super) const NAME: &CStr = c"Towline";

/// A table of functions that C finds by its symbol.
#[repr(transparent)]
#[derive(Debug)]
pub struct Table<T>(pub T);

// SAFETY: a table is never written after the compiler made it. It holds function pointers and a pointer to a string
// constant, both valid in every thread for as long as the library is mapped.
unsafe impl<T> Sync for Table<T> {}
