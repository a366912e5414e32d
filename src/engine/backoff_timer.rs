//! A timer for an action that is repeated, ever more rarely, while nothing moves.

use std::time::{Duration, Instant};

/// The timer is first due some time after its start, and then at doubling intervals.
#[derive(Debug)]
pub(crate) struct BackoffTimer {
    first: Duration,
    longest: Duration,
    /// When the timer is due, and the interval before that; None until it is started.
    next: Option<(Instant, Duration)>,
}

impl BackoffTimer {
    /// Due `first` after the start; later intervals are at most `longest`.
    pub(crate) const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: None }
    }

    /// For queries of a sender about messages that wait for their receives. Normally a receive follows within
    /// microseconds, and for a rank that is seconds late only a few queries are sent. They are repeated, since query or
    /// answer may be lost.
    pub(crate) const fn for_queries() -> Self {
        Self::new(Duration::from_millis(20), Duration::from_secs(10))
    }

    /// Starts the timer unless it runs. Returns whether it is due; then the next interval begins.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let (at, interval) = *self.next.get_or_insert((now + self.first, self.first));
        if now < at {
            return false;
        }
        let interval = (interval * 2).min(self.longest);
        self.next = Some((now + interval, interval));
        true
    }

    /// Stops the timer: the next start begins with the first interval again.
    pub(crate) fn reset(&mut self) {
        self.next = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_intervals_double_up_to_the_longest_until_it_is_reset() {
        let mut timer = BackoffTimer::new(Duration::from_millis(3), Duration::from_millis(10));
        let start = Instant::now();
        let due = |timer: &mut BackoffTimer, ms: &u64| timer.is_due(start + Duration::from_millis(*ms));
        let times: Vec<u64> = (0..45).filter(|ms| due(&mut timer, ms)).collect();
        assert_eq!(times, [3, 9, 19, 29, 39]);
        timer.reset();
        let times: Vec<u64> = (100..112).filter(|ms| due(&mut timer, ms)).collect();
        assert_eq!(times, [103, 109]);
    }
}
