//! Which communicators of a context are open: NCCL may leave some behind, and the context ends them.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Their ids.
#[derive(Debug, Default)]
pub(crate) struct Open(Mutex<HashSet<usize>>);

impl Open {
    fn lock(&self) -> MutexGuard<'_, HashSet<usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A communicator has been handed to NCCL.
    pub(crate) fn add(&self, comm: usize) {
        self.lock().insert(comm);
    }

    /// One was closed. Returns whether it was one of these.
    pub(crate) fn forget(&self, comm: usize) -> bool {
        self.lock().remove(&comm)
    }

    /// Those that were not closed.
    pub(crate) fn take(&self) -> HashSet<usize> {
        std::mem::take(&mut *self.lock())
    }
}
