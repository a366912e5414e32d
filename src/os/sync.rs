//! Locks and atomics of the code in which several threads race.
//!
//! Here they are the standard library's. The package in `tests/models` compiles the same source files with the model
//! checker's primitives in their place. The checker tries every order in which the threads can run and every value that
//! a load may return. So code that is checked there uses `crate::os::sync` where other code uses `std::sync`.

pub(crate) use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// As in `std::sync::atomic`.
pub(crate) mod atomic {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
}

/// Between two attempts to get what another thread holds for a few instructions; from the hundredth on, that thread may
/// need this one's processor.
pub(crate) fn pause(tries: u32) {
    if tries < 100 { std::hint::spin_loop() } else { std::thread::yield_now() }
}

/// A fence between a note that this thread writes (or a lock that it releases) and its read of what another thread may
/// have written meanwhile. The other thread likewise writes first, and then reads what this one writes (or tries the
/// lock). With both fences at least one of them sees what the other did.
///
/// On x86-64 the atomic exchange that writes the note, or releases the lock, is already such a fence.
#[inline]
pub(crate) fn settle() {
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(atomic::Ordering::SeqCst);
    #[cfg(target_arch = "x86_64")]
    std::sync::atomic::compiler_fence(atomic::Ordering::SeqCst);
}
