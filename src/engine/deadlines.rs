//! When the sources of one worker must be polled again.
//!
//! Guarantees: a token has one deadline, the last that was set. Setting and removing one take time logarithmic in the
//! number of deadlines, even when thousands of short-lived sources (mostly handshakes) have left theirs behind.
//!
//! A token may pass to another source while a deadline of its former owner is still pending; the caller distinguishes
//! the two by the owner's generation.

use std::collections::BTreeSet;
use std::time::Instant;

#[derive(Default)]
pub(super) struct Deadlines {
    order: BTreeSet<(Instant, usize)>,
    /// By token: its deadline in `order`, and the generation of its owner.
    due: Vec<Option<(Instant, u64)>>,
}

impl Deadlines {
    /// The next deadline of a source that still exists. Earlier ones of other sources are dropped: they must not wake
    /// the worker.
    pub(super) fn next(&mut self, alive: impl Fn(usize, u64) -> bool) -> Option<Instant> {
        while let Some(&(at, token)) = self.order.first() {
            if self.due[token].is_some_and(|(_, generation)| alive(token, generation)) {
                return Some(at);
            }
            self.due[token] = None;
            self.order.pop_first();
        }
        None
    }

    /// `token`, owned by `generation`, is due at this time and at no other.
    pub(super) fn set(&mut self, token: usize, generation: u64, at: Instant) {
        if self.due.len() <= token {
            self.due.resize(token + 1, None);
        }
        if let Some((old, _)) = self.due[token].replace((at, generation)) {
            self.order.remove(&(old, token));
        }
        self.order.insert((at, token));
    }

    /// Removes a deadline that has passed. Returns the token, and the generation of its owner.
    pub(super) fn take(&mut self, now: Instant) -> Option<(usize, u64)> {
        let &(at, token) = self.order.first().filter(|(at, _)| *at <= now)?;
        self.order.remove(&(at, token));
        self.due[token].take().map(|(_, generation)| (token, generation))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_last_deadline_of_a_token_counts_and_they_come_in_order_of_time() {
        let (mut deadlines, start) = (Deadlines::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        deadlines.set(7, 1, at(10));
        deadlines.set(3, 2, at(20));
        // Later for the first, earlier for the second, and by another owner.
        deadlines.set(7, 1, at(30));
        deadlines.set(3, 5, at(5));
        assert_eq!(deadlines.next(|_, _| true), Some(at(5)));
        assert_eq!(deadlines.take(at(4)), None);
        assert_eq!(deadlines.take(at(29)), Some((3, 5)));
        assert_eq!(deadlines.take(at(29)), None);
        assert_eq!(deadlines.take(at(30)), Some((7, 1)));
        assert_eq!((deadlines.take(at(99)), deadlines.next(|_, _| true)), (None, None));
    }

    #[test]
    fn what_sources_that_are_gone_have_left_wakes_nobody() {
        let (mut deadlines, start) = (Deadlines::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        for token in 0..100 {
            deadlines.set(token, token as u64, at(token as u64));
        }
        assert_eq!(deadlines.next(|token, generation| token == 60 && generation == 60), Some(at(60)));
        assert_eq!(deadlines.take(at(200)), Some((60, 60)));
        assert_eq!(deadlines.next(|_, _| false), None);
    }
}
