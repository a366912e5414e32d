//! Locks and atomics of the code that several threads race through.
//!
//! Here they are the standard library's. The package in `tests/models` compiles the same source files with the model
//! checker's in their place, which tries every order in which the threads can run and every value that a load may
//! see; so whatever is checked there says `crate::os::sync` where other code says `std::sync`.

pub use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// As in `std::sync::atomic`.
pub mod atomic {
    pub use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
}

/// Between two tries for something that another thread has for a few instructions; from the hundredth on that thread may
/// need this one's processor.
pub fn pause(tries: u32) {
    if tries < 100 { std::hint::spin_loop() } else { std::thread::yield_now() }
}

/// Stands between a note that this thread leaves (or a lock that it gives up) and its look at what another thread may
/// have done meanwhile, when the other one does the same two things in the opposite order: at least one of them must
/// see the other.
///
/// On x86-64 the atomic exchange that leaves the note, or gives up the lock, does that by itself.
#[inline]
pub fn settle() {
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(atomic::Ordering::SeqCst);
    #[cfg(target_arch = "x86_64")]
    std::sync::atomic::compiler_fence(atomic::Ordering::SeqCst);
}
