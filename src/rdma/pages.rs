//! Whole pages of memory for devices to access.
//!
//! If the kernel does not copy pinned pages at a fork (before 5.12), libibverbs keeps the pages of every registered
//! region out of the child. Other data on those pages is missing there too, and a child that touches it crashes, for
//! example a data loader of the host program. So registered memory of Towline's own never shares a page with anything
//! else.
//!
//! Guarantee: the memory begins with a page and is alone on its pages, at first all zeroes.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};

use crate::os::error::{Error, Result};
use crate::os::fork;

/// A type for which all zeroes are valid, and which needs no drop.
///
/// # Safety
/// All zeroes must be a valid value.
pub(crate) unsafe trait Zeroed {}

// SAFETY: a number.
unsafe impl Zeroed for u8 {}
// SAFETY: a number.
unsafe impl Zeroed for u64 {}
// SAFETY: a number.
unsafe impl Zeroed for std::sync::atomic::AtomicU64 {}
// SAFETY: made of elements that may be all zeroes.
unsafe impl<T: Zeroed, const N: usize> Zeroed for [T; N] {}

/// A slice on pages of its own.
pub(crate) struct Pages<T: Zeroed> {
    start: NonNull<T>,
    count: usize,
    /// The process that made it: in a forked child the pages may be missing, and other memory in their place.
    generation: u32,
    owns: PhantomData<T>,
}

// SAFETY: it owns its elements, as a box does.
unsafe impl<T: Zeroed + Send> Send for Pages<T> {}
// SAFETY: as above.
unsafe impl<T: Zeroed + Sync> Sync for Pages<T> {}

impl<T: Zeroed> Pages<T> {
    /// This many elements, at least one, all zeroes.
    ///
    /// # Errors
    /// When the system has no memory.
    pub(crate) fn zeroed(count: usize) -> Result<Self> {
        const { assert!(align_of::<T>() <= 4096 && size_of::<T>() > 0 && !std::mem::needs_drop::<T>()) };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let bytes = count.saturating_mul(size_of::<T>());
        // SAFETY: a fresh mapping, which takes no other's place.
        let start = unsafe { libc::mmap(null_mut(), bytes, protection, flags, -1, 0) };
        let start = NonNull::new(start.cast()).filter(|_| start != libc::MAP_FAILED);
        let start = start.ok_or_else(|| Error::system("getting memory for RDMA", &io::Error::last_os_error()))?;
        Ok(Self { start, count, generation: fork::generation(), owns: PhantomData })
    }

    /// Its address, for devices.
    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.count * size_of::<T>()
    }
}

impl<T: Zeroed> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: this many elements are mapped as long as this exists; zeroes, and whatever was written since, are
        // valid.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl<T: Zeroed> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and this is borrowed for it.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.count) }
    }
}

impl<T: Zeroed> Drop for Pages<T> {
    fn drop(&mut self) {
        if self.generation == fork::generation() {
            // SAFETY: mapped by `zeroed`, and no reference to it remains.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes()) };
        }
    }
}

impl<T: Zeroed> fmt::Debug for Pages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages({:#x}, {} bytes)", self.address(), self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slice_has_pages_of_its_own() {
        let slices: Vec<Pages<u64>> = [1, 511, 513].map(|count| Pages::zeroed(count).expect("memory")).into();
        for slice in &slices {
            assert!(slice.address().is_multiple_of(4096) && slice.iter().all(|number| *number == 0), "{slice:?}");
        }
        let pages =
            |slice: &Pages<u64>| slice.address() / 4096..(slice.address() + slice.bytes() as u64).div_ceil(4096);
        for (index, slice) in slices.iter().enumerate() {
            let mut others = slices[..index].iter();
            assert!(others.all(|other| pages(other).all(|page| !pages(slice).contains(&page))), "{slices:?}");
        }
    }
}
