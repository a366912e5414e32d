//! When to send the receiver a query about messages that have waited.

use std::time::{Duration, Instant};

/// How long a message may wait before the sender sends a query about it, and the longest interval between two
/// queries. Normally a receive follows within microseconds; for a rank that is seconds late only a few queries are
/// sent.
const QUERY_AFTER: Duration = Duration::from_millis(20);

/// When the next query is due, and the interval after that; None while nothing waits.
#[derive(Debug, Default)]
pub(crate) struct QueryTimer(Option<(Instant, Duration)>);

impl QueryTimer {
    /// Something waits. Returns whether a query is due now: repeatedly, at growing intervals, since query
    /// or answer may be lost.
    pub(crate) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let (at, pause) = *self.0.get_or_insert((now + QUERY_AFTER, QUERY_AFTER));
        if now < at {
            return false;
        }
        let pause = (pause * 2).min(Duration::from_secs(10));
        self.0 = Some((now + pause, pause));
        true
    }

    /// Nothing waits any longer.
    pub(crate) fn reset(&mut self) {
        self.0 = None;
    }
}
