//! What the processor may do ahead with memory. Only hints; where there is no instruction for one here, nothing.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};

#[cfg(not(target_arch = "x86_64"))]
const _MM_HINT_ET0: i32 = 0;
#[cfg(not(target_arch = "x86_64"))]
const _MM_HINT_T0: i32 = 0;

/// Has the processor fetch the memory of `place`, to be read soon: each line may be one that another processor has written
/// last.
#[inline]
pub fn fetch<T>(place: &T) {
    lines::<T, _MM_HINT_T0>(place);
}

/// The same to be written soon.
#[inline]
pub fn fetch_to_write<T>(place: &T) {
    lines::<T, _MM_HINT_ET0>(place);
}

#[inline]
fn lines<T, const HINT: i32>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        const LINE: usize = 64;
        let first = std::ptr::from_ref(place).cast::<i8>();
        for line in (0..size_of::<T>()).step_by(LINE) {
            // SAFETY: a prefetch reads and changes nothing, whatever the address.
            unsafe { _mm_prefetch::<HINT>(first.wrapping_add(line)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
