//! Which queue pairs have fallen silent: no write posted on them is acknowledged any more, while others work.
//!
//! A path that drops packets while the ports at both ends stay up is noticed only by the device, when it has
//! retransmitted often enough. With NCCL's defaults (`NCCL_IB_TIMEOUT` 20, `NCCL_IB_RETRY_CNT` 7) that takes half a
//! minute, and even one packet lost at the end of a message costs 4.3 s. A connection that has another queue pair does
//! not wait for that.
//!
//! A queue pair is silent when the oldest entry on it has waited for two seconds plus the time for its bytes at 20
//! MB/s, without one completion. That proves nothing when all queue pairs behave alike (a host that stands still, a
//! network that is down): then there is no better one. So a queue pair is reported only when another has completed
//! something within the last second, or has nothing to do.
//!
//! Only watched time counts, at most a quarter of a second between two checks. So a process that was stopped, or a
//! machine that stood still, finds its completions before it decides.
//!
//! Pure: no clock, no device.

use std::time::{Duration, Instant};

/// How long a queue pair may complete nothing, in addition to the time for its bytes.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes per second of the slowest path that is worth waiting for: a sixth of 1 Gbit/s.
const SLOWEST: u64 = 20_000_000;

/// A queue pair that has completed something within this time works.
const WELL: Duration = Duration::from_secs(1);

/// The most that the time between two checks counts. The control thread checks every 128 ms or more often.
const STEP: Duration = Duration::from_millis(250);

/// The state of a queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// Whether it carries messages.
    pub is_up: bool,
    /// Completions taken from it, in all.
    pub done: u64,
    /// The bytes of the oldest entry on it whose completion will come; None when there is none.
    pub owes: Option<u64>,
}

/// How long a queue pair has been waiting for a completion.
#[derive(Debug, Clone, Copy, Default)]
struct Waiting {
    done: u64,
    waited: Duration,
}

/// Watches the queue pairs of a connection.
#[derive(Debug, Default)]
pub(crate) struct Silence {
    last: Option<Instant>,
    qps: Vec<Waiting>,
}

impl Silence {
    /// Checks all queue pairs, in order. Returns those that have fallen silent, nearly always none.
    pub(crate) fn check(&mut self, now: Instant, qps: impl ExactSizeIterator<Item = Seen> + Clone) -> Vec<usize> {
        // With one queue pair there is no other.
        if qps.len() < 2 {
            return Vec::new();
        }
        let step = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last)).min(STEP);
        self.last = Some(now);
        self.qps.resize(qps.len(), Waiting::default());
        for (qp, seen) in self.qps.iter_mut().zip(qps.clone()) {
            let waits = seen.is_up && seen.owes.is_some() && seen.done == qp.done;
            *qp = Waiting { done: seen.done, waited: if waits { qp.waited + step } else { Duration::ZERO } };
        }
        let both = || self.qps.iter().zip(qps.clone());
        if !both().any(|(qp, seen)| seen.is_up && qp.waited < WELL) {
            return Vec::new();
        }
        let is_silent = |(qp, seen): (&Waiting, Seen)| qp.waited >= patience(seen.owes.unwrap_or(0));
        both().enumerate().filter(|(_, both)| is_silent(*both)).map(|(index, _)| index).collect()
    }
}

/// How long this many bytes may take.
fn patience(bytes: u64) -> Duration {
    PATIENCE + Duration::from_micros(bytes.saturating_mul(1_000_000) / SLOWEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(128);

    /// Two queue pairs that are checked again and again, until one is reported or a minute has passed. Returns how long
    /// that takes.
    fn until_named(tick: Duration, mut seen: impl FnMut(u64) -> [Seen; 2]) -> Option<(Duration, Vec<usize>)> {
        let (mut silence, start) = (Silence::default(), Instant::now());
        let mut at = Duration::ZERO;
        for check in 0.. {
            let named = silence.check(start + at, seen(check).into_iter());
            if !named.is_empty() {
                return Some((at, named));
            }
            at += tick;
            if at > Duration::from_secs(60) {
                return None;
            }
        }
        None
    }

    fn qp(done: u64, owes: Option<u64>) -> Seen {
        Seen { is_up: true, done, owes }
    }

    #[test]
    fn a_qp_that_completes_nothing_is_named_within_three_seconds() {
        for well in [|check| qp(check / 4, Some(1)), |_| qp(7, None)] {
            let (after, named) = until_named(TICK, |check| [qp(5, Some(262_144)), well(check)]).expect("it is silent");
            assert!(after >= PATIENCE && after < Duration::from_millis(2500), "{after:?}");
            assert_eq!(named, [0]);
        }
    }

    #[test]
    fn qps_that_move_wait_for_nothing_or_are_lost_are_not_named() {
        assert_eq!(until_named(TICK, |check| [qp(check / 15, Some(1)), qp(check, Some(1))]), None, "slow");
        assert_eq!(until_named(TICK, |check| [qp(5, None), qp(check, Some(1))]), None, "idle");
        let lost = Seen { is_up: false, done: 5, owes: Some(1) };
        assert_eq!(until_named(TICK, |check| [lost, qp(check, Some(1))]), None);
    }

    #[test]
    fn where_none_fares_well_none_is_named() {
        assert_eq!(until_named(TICK, |_| [qp(1, Some(1)), qp(2, Some(1))]), None);
        let lost = Seen { is_up: false, done: 5, owes: None };
        assert_eq!(until_named(TICK, |_| [qp(1, Some(1)), lost]), None);
        let mut silence = Silence::default();
        let start = Instant::now();
        for check in 0..100 {
            assert!(silence.check(start + TICK * check, [qp(1, Some(1))].into_iter()).is_empty(), "the only one");
        }
    }

    #[test]
    fn long_writes_have_longer() {
        let (after, _) = until_named(TICK, |check| [qp(5, Some(400_000_000)), qp(check, None)]).expect("it is silent");
        assert!(after >= Duration::from_secs(22) && after < Duration::from_secs(23), "{after:?}");
    }

    #[test]
    fn a_machine_that_stood_still_looks_eight_times_before_it_judges() {
        let mut looks = 0;
        let seen = |check| {
            looks = check;
            [qp(5, Some(1)), qp(check, None)]
        };
        assert!(until_named(Duration::from_secs(5), seen).is_some());
        assert_eq!(looks, 8);
    }
}
