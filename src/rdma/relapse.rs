//! How long to leave out a queue pair that is lost again and again soon after its return.
//!
//! Over a cable that loses one packet in a thousand, the first write of a new queue pair usually passes, and one of the
//! next is lost. With NCCL's defaults the device retransmits only after four seconds, so the queue pair falls silent
//! and is given up after two ([`silence`](super::silence)). A connection that used it again at once would spend its
//! time in such silences, although another queue pair works. So the pauses grow. Two relapses in a row cost half a
//! second each, as every loss does: a port that goes down twice in a minute may well stay up then. From the third on
//! the pauses are 2, 4, 8, 16 and then 30 seconds.
//!
//! A queue pair that stayed for half a minute has recovered. When there is no other queue pair none of this applies.
//!
//! Pure: no clock, no device.

use std::time::{Duration, Instant};

/// A loss this soon after the return is a relapse.
const SOON: Duration = Duration::from_secs(30);

/// This many relapses in a row have no effect.
const FREE: u32 = 2;

/// The longest time that a queue pair is left out before the next attempt.
const LONGEST: Duration = Duration::from_secs(30);

/// The history of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct Relapses {
    returned: Option<Instant>,
    in_a_row: u32,
    until: Option<Instant>,
    /// The length of the pause, if that was not reported yet.
    unreported: Option<Duration>,
}

impl Relapses {
    /// It carries messages again.
    pub(crate) fn is_back(&mut self, now: Instant) {
        self.returned = Some(now);
    }

    /// It is lost.
    pub(crate) fn is_lost(&mut self, now: Instant) {
        let is_soon = self.returned.take().is_some_and(|at| now.saturating_duration_since(at) < SOON);
        self.in_a_row = if is_soon { self.in_a_row.saturating_add(1) } else { 0 };
        let beyond = self.in_a_row.checked_sub(FREE + 1);
        self.unreported = beyond.map(|count| Duration::from_secs(2 << count.min(4)).min(LONGEST));
        self.until = self.unreported.map(|pause| now + pause);
    }

    /// Until when it is left out; None if it is not.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.until
    }

    /// How often it was lost in a row soon after its return, and how long it is left out. Once for each time.
    pub(crate) fn take_unreported(&mut self) -> Option<(u32, Duration)> {
        self.unreported.take().map(|pause| (self.in_a_row, pause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many seconds it is left out after each loss, having been up for the given times.
    fn pauses(up: &[u64]) -> Vec<u64> {
        let (mut qp, mut now) = (Relapses::default(), Instant::now());
        up.iter()
            .map(|seconds| {
                now += Duration::from_secs(*seconds);
                qp.is_lost(now);
                let (until, pause) = (qp.until(), qp.take_unreported().map_or(Duration::ZERO, |(_, pause)| pause));
                assert_eq!(until, (!pause.is_zero()).then(|| now + pause));
                assert_eq!(qp.take_unreported(), None, "once");
                now += pause;
                qp.is_back(now);
                pause.as_secs()
            })
            .collect()
    }

    #[test]
    fn only_a_qp_that_is_lost_again_and_again_stays_out_and_ever_longer() {
        assert_eq!(pauses(&[1; 12]), [0, 0, 0, 2, 4, 8, 16, 30, 30, 30, 30, 30]);
    }

    #[test]
    fn one_that_stayed_for_half_a_minute_has_recovered() {
        assert_eq!(pauses(&[1, 1, 1, 29, 1, 30, 1, 1, 1]), [0, 0, 0, 2, 4, 0, 0, 0, 2]);
    }

    #[test]
    fn a_loss_without_a_return_in_between_is_the_first() {
        let (mut qp, now) = (Relapses::default(), Instant::now());
        (0..10).for_each(|_| qp.is_lost(now));
        assert_eq!((qp.until(), qp.take_unreported()), (None, None));
    }
}
