//! Hints to the processor about memory. Where there is no instruction for one, it does nothing.

/// Prefetches the memory of `place`, to be read soon: each line may be one that another processor has written last.
#[inline]
pub(crate) fn fetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    for line in lines(place) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads and changes nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// The same for memory that is written soon, exclusively: a line prefetched for reading would be requested a second
/// time at the first write.
#[inline]
pub(crate) fn fetch_to_write<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    for line in lines(place) {
        // The intrinsic for it becomes the other instruction where the compiler may not assume this one. Every
        // processor of this architecture accepts it: those that do not support it do nothing (AMD's manual, volume 3;
        // Intel's, volume 2, PREFETCHW).
        // SAFETY: a prefetch reads and changes nothing, whatever the address.
        unsafe { std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// The addresses of the cache lines of `place`.
#[cfg(target_arch = "x86_64")]
#[inline]
fn lines<T>(place: &T) -> impl Iterator<Item = *const u8> {
    const LINE: usize = 64;
    let first = std::ptr::from_ref(place).cast::<u8>();
    (0..size_of::<T>()).step_by(LINE).map(move |line| first.wrapping_add(line))
}
