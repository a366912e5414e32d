//! How whoever sees that a connection needs care says so without waiting for its lock.
//!
//! Under traffic NCCL's thread has the connection's state locked nearly always, so that nobody else gets hold of it for
//! seconds. But it looks at the alarm next to each look at the queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Says that a lane needs care, or what else is rare is due, to whoever has the connection's state.
#[derive(Debug, Clone, Default)]
pub struct Alarm(Arc<AtomicBool>);

impl Alarm {
    /// A lane needs care.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether nobody has looked since.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Whoever was alarmed looks now. Before that, so that an alarm in the meantime counts.
    pub fn answer(&self) {
        // An exchange: what was done before the alarm is seen.
        self.0.swap(false, Ordering::AcqRel);
    }
}
