//! Keeps a flood of one problem from flooding the log: the first occurrence is logged at once, later ones as a count at
//! most every few seconds.
//!
//! No lock and no allocation, so it may be used on any thread and in a forked child.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long one problem stays quiet after it was logged.
const QUIET: Duration = Duration::from_secs(5);

/// The rate limit of one problem, for a `static` at the place that reports it.
///
/// ```ignore
/// use crate::os::log::Limiter;
/// static STRANGERS: Limiter = Limiter::new();
/// if let Some(more) = STRANGERS.admit() {
///     tracing::warn!("a connection without a valid proof was closed ({more} more since the last report)");
/// }
/// ```
#[derive(Debug)]
pub(crate) struct Limiter {
    /// When the problem may be logged again, in milliseconds since the first use in the process; 0 before the first
    /// time.
    next: AtomicU64,
    /// How many occurrences were suppressed since.
    kept: AtomicU64,
}

impl Limiter {
    /// A limit that admits its first occurrence.
    pub(crate) const fn new() -> Self {
        Self { next: AtomicU64::new(0), kept: AtomicU64::new(0) }
    }

    /// Whether to log this occurrence: if so, how many were suppressed since the last one that was logged.
    pub(crate) fn admit(&self) -> Option<u64> {
        self.admit_at(now())
    }

    /// Logs this occurrence if allowed; `tell` gets the text about the suppressed ones, or nothing.
    pub(crate) fn tell(&self, tell: impl FnOnce(&str)) {
        match self.admit() {
            Some(0) => tell(""),
            Some(kept) => tell(&format!(" (and {kept} more since the last such line)")),
            None => {}
        }
    }

    fn admit_at(&self, now: u64) -> Option<u64> {
        let next = self.next.load(Ordering::Relaxed);
        let later = now + u64::try_from(QUIET.as_millis()).expect("seconds fit");
        // One of several concurrent threads wins, the others count.
        if now >= next && self.next.compare_exchange(next, later, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            return Some(self.kept.swap(0, Ordering::Relaxed));
        }
        self.kept.fetch_add(1, Ordering::Relaxed);
        None
    }
}

impl Default for Limiter {
    fn default() -> Self {
        Self::new()
    }
}

fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_millis()).unwrap_or(u64::MAX / 2)
}

/// The number of problems that are distinguished. Two that share a place share its limit, so rather too little is
/// logged than too much.
const PLACES: usize = 256;
static LIMITS: [Limiter; PLACES] = [const { Limiter::new() }; PLACES];

/// [`Limiter::admit`] for a problem that is known by `key` only at run time (a device, an error code).
///
/// The key names the problem, not the peer: with an attacker's address in it, every connection would be a new problem.
/// Keys share 256 limits by their hash.
pub(crate) fn once_per(key: impl Hash) -> Option<u64> {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    let place = usize::try_from(hasher.finish() % PLACES as u64).expect("less than PLACES");
    LIMITS[place].admit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_at_once_then_a_count_every_few_seconds() {
        let limiter = Limiter::new();
        assert_eq!(limiter.admit_at(0), Some(0));
        for now in 1..5000 {
            assert_eq!(limiter.admit_at(now), None, "{now}");
        }
        assert_eq!(limiter.admit_at(5000), Some(4999));
        assert_eq!(limiter.admit_at(20_000), Some(0), "a rare problem is told each time");
    }

    #[test]
    fn a_flood_from_many_threads_is_told_once_and_counted_in_full() {
        let limiter = Limiter::new();
        let told: usize = std::thread::scope(|scope| {
            let flood = || (0..1000).filter(|_| limiter.admit_at(7).is_some()).count();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(flood)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
        });
        assert_eq!(told, 1);
        assert_eq!(limiter.admit_at(10_000), Some(3999));
    }

    #[test]
    fn the_same_key_shares_a_limit() {
        assert!(once_per(("the_same_key_shares_a_limit", 1)).is_some());
        assert!(once_per(("the_same_key_shares_a_limit", 1)).is_none());
    }
}
