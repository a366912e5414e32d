//! When to ask the other side about what has waited for it.

use std::time::{Duration, Instant};

/// How long a message may wait before the receiver is asked about it, and the longest pause between two questions. In
/// ordinary work a receive follows within microseconds; a rank that is late by seconds is asked a handful of times.
const ASK_AFTER: Duration = Duration::from_millis(20);
const ASK_SELDOM: Duration = Duration::from_secs(10);

/// When to ask next, and how long after the last time that is; nothing while nothing waits.
#[derive(Debug, Default)]
pub struct Asking(Option<(Instant, Duration)>);

impl Asking {
    /// Something waits. Whether it is time to ask: again and again, ever more seldom, since question or answer may be
    /// lost.
    pub fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let (at, pause) = *self.0.get_or_insert((now + ASK_AFTER, ASK_AFTER));
        if now < at {
            return false;
        }
        let pause = (pause * 2).min(ASK_SELDOM);
        self.0 = Some((now + pause, pause));
        true
    }

    /// Nothing waits any more.
    pub fn rest(&mut self) {
        self.0 = None;
    }
}
