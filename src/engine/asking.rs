//! When to ask the other side about a message that has waited.

use std::time::{Duration, Instant};

/// How long a message may wait before this side asks the receiver about it, and the longest interval between two
/// queries. Normally a receive follows within microseconds; for a rank that is seconds late only a few queries are
/// sent.
const ASK_AFTER: Duration = Duration::from_millis(20);
const ASK_SELDOM: Duration = Duration::from_secs(10);

/// When to ask next, and the interval after that; None while nothing waits.
#[derive(Debug, Default)]
pub(crate) struct Asking(Option<(Instant, Duration)>);

impl Asking {
    /// Something waits. Returns whether to ask now: repeatedly, at growing intervals, since query or answer may be
    /// lost.
    pub(crate) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let (at, pause) = *self.0.get_or_insert((now + ASK_AFTER, ASK_AFTER));
        if now < at {
            return false;
        }
        let pause = (pause * 2).min(ASK_SELDOM);
        self.0 = Some((now + pause, pause));
        true
    }

    /// Nothing waits any longer.
    pub(crate) fn rest(&mut self) {
        self.0 = None;
    }
}
