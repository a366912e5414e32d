//! Work that may block, done outside the threads of a connection.

use std::sync::{Arc, Mutex, PoisonError};

use crate::os::log::NET;
use crate::os::thread;

/// Work that a separate thread does, and its result. When this is dropped first, that thread drops the result.
pub(super) struct Aside<T>(Arc<Mutex<Option<T>>>);

impl<T: Send + 'static> Aside<T> {
    /// Starts the work; `wake` is called by the thread afterwards. If no thread can be created the work is done here,
    /// and `wake` is not called.
    pub(super) fn start(work: impl FnOnce() -> T + Send + 'static, wake: impl FnOnce() + Send + 'static) -> Self {
        let outcome = Arc::new(Mutex::new(None));
        // Shared, so that the work is still available if no thread could be created.
        let work = Arc::new(Mutex::new(Some(work)));
        let run = {
            let (work, outcome) = (Arc::clone(&work), Arc::clone(&outcome));
            move || {
                let Some(work) = work.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
                let done = work();
                *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
            }
        };
        let here = run.clone();
        let body = move || {
            run();
            wake();
        };
        if let Err(error) = thread::spawn("towline-link", body) {
            tracing::debug!(target: NET, "no thread for connecting queue pairs: {error}");
            here();
        }
        Self(outcome)
    }

    /// The result, once, when the work is done.
    pub(super) fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
