//! The keeper's eye on the first stream of a connection.
//!
//! NCCL's thread moves the first stream itself, inside the calls that it makes. But it may wait for one thing while
//! another, which it does not ask after, is what the peer waits for. So while requests are outstanding, or calls
//! come, the keeper looks too: every millisecond or two whether NCCL's thread has looked since, and if it has not, at
//! the stream; ever more rarely while nothing happens, and not at all when nothing is outstanding and no call came.
//!
//! Telling the keeper to begin means waking it (a system call, and a processor to interrupt), which costs more than a
//! short message does. That is why it stays attentive for a while after the last call.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::engine::poller::Progress;

/// How soon the keeper looks after something happened.
const SOON: Duration = Duration::from_millis(1);
/// Each further look comes twice as long after the last, up to `SOON` times two to this power: 128 ms.
const RARELY: u32 = 7;

/// Whether the keeper attends to a stream, and how often.
#[derive(Debug, Default)]
pub struct Attention {
    attending: AtomicBool,
    /// Counts the looks of NCCL's thread.
    calls: AtomicU32,
    seen: AtomicU32,
    idle_looks: AtomicU32,
}

impl Attention {
    /// A request is outstanding. Returns whether the keeper must be told.
    #[inline]
    pub fn wanted(&self) -> bool {
        !self.attending.load(Ordering::Relaxed) && !self.attending.swap(true, Ordering::SeqCst)
    }

    /// NCCL's thread looks at the stream. A lost count among several callers does not matter: the value changes.
    #[inline]
    pub fn called(&self) {
        self.calls.store(self.calls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether NCCL's thread has looked since this was last asked. Then the keeper need not: it looks again soon.
    pub fn is_attended(&self) -> Option<Progress> {
        let calls = self.calls.load(Ordering::Relaxed);
        if self.seen.swap(calls, Ordering::Relaxed) == calls || !self.attending.load(Ordering::Relaxed) {
            return None;
        }
        self.idle_looks.store(0, Ordering::Relaxed);
        Some(Progress { moved: false, again: Some(tick(SOON)) })
    }

    /// Whether nothing has moved for a while although something is outstanding.
    pub fn is_stalled(&self) -> bool {
        self.idle_looks.load(Ordering::Relaxed) == RARELY
    }

    /// The keeper has looked, and something moved or not. Says when it looks again; `outstanding` is asked twice,
    /// since a request may come while the attention ends.
    pub fn looked(&self, moved: bool, outstanding: impl Fn() -> bool) -> Progress {
        let looks = if moved { 0 } else { self.idle_looks.load(Ordering::Relaxed) };
        if !outstanding() && looks == RARELY {
            self.attending.store(false, Ordering::SeqCst);
            self.idle_looks.store(0, Ordering::Relaxed);
            if !outstanding() || !self.wanted() {
                return Progress { moved, again: None };
            }
        }
        self.idle_looks.store((looks + 1).min(RARELY), Ordering::Relaxed);
        Progress { moved, again: Some(tick(SOON * (1 << looks))) }
    }
}

/// A time at least `after` from now, on a grid of [`SOON`]: the looks at many connections fall together, and the
/// keeper wakes once for all of them.
fn tick(after: Duration) -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    let at = (start.elapsed() + after).as_micros() as u64;
    start + Duration::from_micros(at.next_multiple_of(SOON.as_micros() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delay(progress: Progress) -> Option<Duration> {
        progress.again.map(|at| at.saturating_duration_since(Instant::now()))
    }

    #[test]
    fn the_keeper_looks_ever_more_rarely_and_stops_when_nothing_is_outstanding() {
        let attention = Attention::default();
        assert!(attention.wanted());
        assert!(!attention.wanted(), "it is attending already");
        let first = delay(attention.looked(false, || true)).unwrap();
        let mut last = first;
        for _ in 0..20 {
            last = delay(attention.looked(false, || true)).unwrap();
        }
        assert!(first <= 2 * SOON && last > Duration::from_millis(100) && last <= Duration::from_millis(129));
        assert!(delay(attention.looked(true, || true)).unwrap() <= 2 * SOON);
        let looks = (0..).take_while(|_| attention.looked(false, || false).again.is_some()).count();
        assert_eq!(looks, RARELY as usize - 1);
        assert!(attention.wanted());
    }

    #[test]
    fn the_keeper_leaves_the_stream_alone_while_calls_come_and_looks_when_they_end() {
        let attention = Attention::default();
        attention.called();
        assert!(attention.is_attended().is_none(), "nobody asked the keeper to attend");
        attention.called();
        assert!(attention.wanted());
        assert!(delay(attention.is_attended().unwrap()).unwrap() <= 2 * SOON);
        assert!(attention.is_attended().is_none(), "no call since");
    }
}
