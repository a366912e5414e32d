//! Towline's concurrent source files, word for word, with the model checker's locks and atomics.
//!
//! The files say `crate::os::sync` where others say `std::sync`; here that is loom. What they need beside it is either
//! the original, too, or a stand-in that does as little as possible. The models themselves are in `tests`.

#![allow(dead_code, reason = "not all that the originals offer is part of a model")]

#[cfg(test)]
mod tests {
    mod doorbell;
    mod list;
    mod request;
    mod ring;
    mod stream;
    mod table;
}

#[path = "../../../src/os"]
pub mod os {
    pub mod error;
    pub mod memory;

    /// In place of `src/os/sync.rs`.
    pub mod sync {
        pub use loom::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

        pub mod atomic {
            pub use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
        }

        pub fn pause(_tries: u32) {
            loom::thread::yield_now();
        }

        /// Everywhere, as on processors that are not x86-64.
        pub fn settle() {
            loom::sync::atomic::fence(atomic::Ordering::SeqCst);
        }
    }
}

#[path = "../../../src/engine"]
pub mod engine {
    pub mod doorbell;
    pub mod events {
        pub mod list;
    }
    pub mod handle;
    pub mod request;
    pub mod table;

    /// In place of `src/engine/poller.rs`: a place at a worker, which counts how often it is asked.
    pub mod poller {
        use loom::sync::Arc;
        use loom::sync::atomic::{AtomicU32, Ordering};

        #[derive(Clone, Default)]
        pub struct Registration(Arc<AtomicU32>);

        impl Registration {
            pub fn kick(&self) {
                self.0.fetch_add(1, Ordering::AcqRel);
            }

            pub fn is_awake(&self) -> bool {
                true
            }

            pub fn kicks(&self) -> u32 {
                self.0.load(Ordering::Acquire)
            }
        }
    }
}

#[path = "../../../src/tcp"]
pub mod tcp {
    pub mod stream;
}

#[path = "../../../src/trace"]
pub mod trace {
    pub mod place;
    pub mod ring;

    /// In place of `src/trace/event.rs`: a record is a number.
    pub mod event {
        pub type Record = u64;
    }

    /// In place of `src/trace/slots.rs`: loom's atomics cannot be made of zeroed memory, and its cell notices an access
    /// that another thread's may overlap.
    mod slots {
        use loom::cell::UnsafeCell;
        use loom::sync::atomic::AtomicU64;

        use super::event::Record;

        pub struct Slot {
            pub lap: AtomicU64,
            record: UnsafeCell<Record>,
        }

        impl Slot {
            /// # Safety
            /// As in the original.
            pub unsafe fn write(&self, record: Record) {
                // SAFETY: loom checks what the caller vouches for.
                self.record.with_mut(|place| unsafe { *place = record });
            }

            /// # Safety
            /// As in the original.
            pub unsafe fn read(&self) -> Record {
                // SAFETY: loom checks what the caller vouches for.
                self.record.with(|place| unsafe { *place })
            }
        }

        pub struct Slots(Vec<Slot>);

        impl Slots {
            pub const BYTES: usize = 128;

            pub fn new(capacity: usize) -> Self {
                let slot = |_| Slot { lap: AtomicU64::new(0), record: UnsafeCell::new(0) };
                Self((0..capacity).map(slot).collect())
            }

            /// A hint to the processor, which loom has none of.
            pub fn fetch(&self, _position: u64) {}

            pub fn at(&self, position: u64) -> &Slot {
                &self.0[position as usize % self.0.len()]
            }

            pub fn back(&self, _: std::ops::Range<u64>) {}
        }
    }
}
