//! How a thread reports that a connection needs care, without waiting for its lock.
//!
//! Under traffic NCCL's thread holds the lock of the connection's state nearly always, so that no other thread gets it
//! for seconds. But it checks the alarm whenever it polls the queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Reports that a queue pair needs care, or that other rare work is due, to the thread that holds the connection's
/// state.
#[derive(Debug, Clone, Default)]
pub(crate) struct Alarm(Arc<AtomicBool>);

impl Alarm {
    /// A queue pair needs care.
    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the alarm was raised and is not handled yet.
    #[inline]
    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The notified thread checks now. Called before it checks, so that an alarm in the meantime counts.
    pub(crate) fn answer(&self) {
        // An exchange: what was done before the alarm is visible.
        self.0.swap(false, Ordering::AcqRel);
    }
}
