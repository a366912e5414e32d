//! When NCCL's thread does overdue work of a worker.
//!
//! The further streams of a connection are served by workers. These are sometimes late: of the wake-ups on a virtual
//! machine with 32 processors one in fifty took longer than 130 µs and one in a hundred longer than 260, and a host
//! with other guests withholds a processor for milliseconds. Meanwhile NCCL's thread tests its requests again and
//! again, and any thread may serve a stream that no other thread holds. So when no request of a connection has ended
//! and no chunk has begun for a while, NCCL's thread polls the further streams itself. While chunks follow each other
//! it does not.
//!
//! Most such waiting is for the peer, its GPU or the wire, and not for a worker; then a poll finds nothing. So the
//! interval doubles after each poll, and no poll takes place while the last ones took more than a tenth of the thread's
//! time: it serves all connections of a GPU.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::os::ticks::Ticks;

/// The first poll takes place when nothing has happened for this many nanoseconds. A worker that is awake has moved a
/// chunk by then. With twice this, 27 of 405 all-reduces of 8 MiB on two GPUs took a millisecond longer than the
/// median, with 60 µs 5 of 405, and without any poll 52 of 360 (`docs/dev/decisions.md`).
const SOON: u64 = 100_000;

/// Further polls are at most this many nanoseconds apart.
const RARELY: u64 = 10_000_000;

/// The clock is read in one of this many calls: NCCL tests each request every fraction of a microsecond, and the clock
/// would take most of such a call.
const CALLS: u32 = 16;

/// After a poll without result, there is none for this many times as long as it took.
const REST: u64 = 9;

thread_local! {
    /// When this thread last polled without result, and for how many nanoseconds it then pauses.
    static VAIN: Cell<Option<(Ticks, u64)>> = const { Cell::new(None) };
}

/// Whether a connection's further streams need NCCL's thread. One thread at a time calls these functions; if another
/// one calls the next time, the lost state costs a poll more or less.
#[derive(Debug, Default)]
pub struct Help {
    calls: AtomicU32,
    /// [`Ticks::number`] of when waiting began or was last handled; 0 while nothing waits.
    since: AtomicU64,
    /// The nanoseconds from then to the next poll.
    patience: AtomicU64,
    /// How many chunks had begun then.
    begun: AtomicU64,
}

impl Help {
    /// A request has ended: all goes well.
    #[inline]
    pub fn ended(&self) {
        if self.since.load(Ordering::Relaxed) != 0 {
            self.since.store(0, Ordering::Relaxed);
        }
    }

    /// A request has not ended, and this many chunks have begun on the connection. Calls `look` when it is time, which
    /// returns whether it found anything. Returns the same: if true, the request may have ended.
    #[inline]
    pub fn waits(&self, begun: &AtomicU64, look: impl FnOnce() -> bool) -> bool {
        let calls = self.calls.load(Ordering::Relaxed).wrapping_add(1);
        self.calls.store(calls, Ordering::Relaxed);
        calls.is_multiple_of(CALLS) && self.look_when_due(begun, look)
    }

    fn look_when_due(&self, begun: &AtomicU64, look: impl FnOnce() -> bool) -> bool {
        let now = Ticks::now();
        self.is_due(now, begun) && !rests(now) && {
            let found = look();
            if found {
                self.found();
            } else {
                let end = Ticks::now();
                VAIN.set(Some((end, REST * end.nanoseconds_since(now))));
            }
            found
        }
    }

    /// A worker is late, so it may be late for more.
    fn found(&self) {
        self.patience.store(SOON, Ordering::Relaxed);
    }

    fn is_due(&self, now: Ticks, begun: &AtomicU64) -> bool {
        let since = Ticks::from_number(self.since.load(Ordering::Relaxed));
        let patience = self.patience.load(Ordering::Relaxed);
        if since.is_some_and(|since| now.nanoseconds_since(since) < patience) {
            return false;
        }
        self.since.store(now.number(), Ordering::Relaxed);
        // Not before: workers write it all the time.
        let begun = begun.load(Ordering::Relaxed);
        if self.begun.swap(begun, Ordering::Relaxed) != begun || since.is_none() {
            self.patience.store(SOON, Ordering::Relaxed);
            return false;
        }
        self.patience.store((2 * patience).min(RARELY), Ordering::Relaxed);
        true
    }
}

/// Whether this thread has recently polled too much without result.
fn rests(now: Ticks) -> bool {
    VAIN.get().is_some_and(|(end, rest)| now.nanoseconds_since(end) < rest)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn looks_come_when_nothing_has_ended_for_a_while_and_ever_more_rarely_in_vain() {
        let ticks = |number| Ticks::from_number(number).expect("not 0");
        let billion = ticks(1_000_000_001).nanoseconds_since(ticks(1)) as f64;
        let at = |nanoseconds: u64| ticks(1 + (nanoseconds as f64 * 1e9 / billion) as u64);
        let (help, begun) = (Help::default(), AtomicU64::new(7));
        let mut now = 0;
        assert!(!help.is_due(at(now), &begun), "it has just begun");
        let looks_after = |now: &mut u64, nanoseconds: u64| {
            let early = help.is_due(at(*now + nanoseconds * 99 / 100), &begun);
            *now += nanoseconds * 101 / 100;
            !early && help.is_due(at(*now), &begun)
        };
        for look in 0..10 {
            assert!(looks_after(&mut now, (SOON << look).min(RARELY)), "{look}");
        }
        help.found();
        assert!(looks_after(&mut now, SOON) && looks_after(&mut now, 2 * SOON), "a worker is missing");
        begun.store(8, Ordering::Relaxed);
        assert!(!looks_after(&mut now, 4 * SOON), "a worker is there");
        assert!(looks_after(&mut now, SOON), "no more");
        help.ended();
        assert!(!help.is_due(at(now), &begun), "something has ended");
        assert!(looks_after(&mut now, SOON));
    }

    #[test]
    fn a_thread_looks_in_vain_for_a_tenth_of_its_time() {
        const LOOK: Duration = Duration::from_micros(300);
        let helps: Vec<Help> = (0..200).map(|_| Help::default()).collect();
        let (looked, begun) = (Cell::new(Duration::ZERO), AtomicU64::new(0));
        let in_vain = || {
            let began = Instant::now();
            while began.elapsed() < LOOK {}
            looked.set(looked.get() + began.elapsed());
            false
        };
        let start = Instant::now();
        let share = || looked.get().as_secs_f64() / start.elapsed().as_secs_f64();
        // A poll during which another thread had the processor counts too, and the pause after it must also have
        // passed.
        let is_over = || start.elapsed() > 100 * LOOK && share() < 0.14 || start.elapsed() > Duration::from_secs(10);
        while !is_over() {
            for help in &helps {
                assert!(!help.waits(&begun, in_vain));
            }
        }
        assert!((0.005..0.14).contains(&share()), "{}", share());
    }
}
