//! What the processor may do ahead with memory. Only hints; where there is no instruction for one here, nothing.

/// Has the processor fetch the memory of `place`, to be read soon: each line may be one that another processor has written
/// last.
#[inline]
pub fn fetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    for line in lines(place) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads and changes nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// The same to be written soon, for which no other processor may have it: fetched to be read, it would be asked for a second
/// time at the first write.
#[inline]
pub fn fetch_to_write<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    for line in lines(place) {
        // The intrinsic for it becomes the other instruction where the compiler may not assume this one. Every processor of
        // this architecture takes it: those that do not know it do nothing (AMD's manual, volume 3; Intel's, volume 2,
        // PREFETCHW).
        // SAFETY: a prefetch reads and changes nothing, whatever the address.
        unsafe { std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Where the lines of memory of `place` begin.
#[cfg(target_arch = "x86_64")]
#[inline]
fn lines<T>(place: &T) -> impl Iterator<Item = *const u8> {
    const LINE: usize = 64;
    let first = std::ptr::from_ref(place).cast::<u8>();
    (0..size_of::<T>()).step_by(LINE).map(move |line| first.wrapping_add(line))
}
