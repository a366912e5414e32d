//! Page-aligned memory that a plugin may read and write while the host holds only a reference.
//!
//! Guarantees: the address never moves, the memory is zeroed at first, and a guard pattern on both sides shows
//! whether a write went outside. It must not know what uses it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::slice;

/// One page before and one after the memory.
const GUARD_BYTES: usize = 4096;
const GUARD: u8 = 0xA5;

/// An owned buffer for transfers.
///
/// Reading or writing it through [`Memory::bytes`] while a plugin works on it is a race that Rust cannot detect. For
/// that reason the methods of the host's connections that take raw pointers are `unsafe`.
#[derive(Debug)]
pub struct Memory {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is owned and plain. `&`/`&mut` settle which thread may touch it when, and for plugins the contract
// of the `unsafe` calls that hand out its address does.
unsafe impl Send for Memory {}
// SAFETY: see above; a shared reference gives only reading access.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` zero bytes. `len` may be 0.
    pub fn new(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout has a size of two guards at least.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(raw) else { handle_alloc_error(layout) };
        // SAFETY: the allocation is guard, len bytes, guard: both writes and the offset lie within it.
        let start = unsafe {
            base.write_bytes(GUARD, GUARD_BYTES);
            base.add(GUARD_BYTES + len).write_bytes(GUARD, GUARD_BYTES);
            base.add(GUARD_BYTES)
        };
        Self { start, len }
    }

    /// A copy of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut memory = Self::new(bytes.len());
        memory.bytes_mut().copy_from_slice(bytes);
        memory
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len + 2 * GUARD_BYTES, GUARD_BYTES)
            .expect("the size of a buffer fits the address space")
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of byte `offset`, for a plugin.
    ///
    /// # Panics
    /// When `offset` lies behind the end.
    pub fn at(&self, offset: usize) -> *mut c_void {
        assert!(offset <= self.len, "offset {offset} in a buffer of {} bytes", self.len);
        // SAFETY: the offset was checked to lie within the allocation.
        unsafe { self.start.as_ptr().add(offset) }.cast()
    }

    /// The contents. No transfer may be writing to them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes start here, and they live as long as `self`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The contents, to be changed. No transfer may be using them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and `&mut self` makes it the only reference.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Whether the guards on both sides are unchanged: nothing wrote outside.
    pub fn guards_intact(&self) -> bool {
        // SAFETY: the guards lie within the allocation, before and behind the `len` bytes.
        let (before, after) = unsafe {
            (
                slice::from_raw_parts(self.start.as_ptr().sub(GUARD_BYTES), GUARD_BYTES),
                slice::from_raw_parts(self.start.as_ptr().add(self.len), GUARD_BYTES),
            )
        };
        before.iter().chain(after).all(|&byte| byte == GUARD)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, starting one guard earlier.
        unsafe { dealloc(self.start.as_ptr().sub(GUARD_BYTES), Self::layout(self.len)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_written_outside_is_noticed() {
        for len in [0, 1, 4095, 4096] {
            let memory = Memory::new(len);
            assert!(memory.guards_intact());
            assert!(memory.bytes().iter().all(|&byte| byte == 0));
            // SAFETY: one byte behind the end is the guard, which belongs to the allocation.
            unsafe { memory.at(len).cast::<u8>().write(0) };
            assert!(!memory.guards_intact(), "{len}");
        }
    }
}
