//! How the control thread polls the first stream of a connection.
//!
//! NCCL's proxy thread moves the first stream itself, inside NCCL's calls. But it may wait for one request while the
//! peer waits for another, which the proxy thread does not test. So while requests are outstanding, or calls arrive,
//! the control thread checks every millisecond or two whether NCCL's thread has polled since, and polls the stream
//! itself if not. The interval grows while nothing happens, and polling stops when nothing is outstanding and no call
//! arrived.
//!
//! To start it, NCCL's thread must wake the control thread (a system call and an interrupt on another processor), which
//! costs more than a short message. That is why polling continues for a while after the last call.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::engine::poller::Progress;

/// How soon the control thread polls after something has happened.
const SOON: Duration = Duration::from_millis(1);
/// The interval doubles with each further poll, up to `SOON` times two to this power: 128 ms.
const RARELY: u32 = 7;

/// Whether the control thread polls a stream, and how often.
#[derive(Debug, Default)]
pub(crate) struct Attention {
    attending: AtomicBool,
    /// Counts the polls of NCCL's thread.
    calls: AtomicU32,
    seen: AtomicU32,
    idle_polls: AtomicU32,
}

impl Attention {
    /// A request is outstanding. Returns whether the control thread must be notified, because it does not poll or its
    /// next poll is far away.
    #[inline]
    pub(crate) fn wanted(&self) -> bool {
        // After six polls, 31 ms after something has happened, the next one is 32 ms away or more.
        if self.idle_polls.load(Ordering::Relaxed) >= 6 {
            self.idle_polls.store(0, Ordering::Relaxed);
            self.attending.store(true, Ordering::SeqCst);
            return true;
        }
        !self.attending.load(Ordering::Relaxed) && !self.attending.swap(true, Ordering::SeqCst)
    }

    /// Whether the control thread polls: a request is outstanding, or one ended within the last 130 ms or so.
    pub(crate) fn is_polling(&self) -> bool {
        self.attending.load(Ordering::Relaxed)
    }

    /// NCCL's thread polls the stream. A count lost among concurrent callers is harmless: the value still changes.
    #[inline]
    pub(crate) fn called(&self) {
        self.calls.store(self.calls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether NCCL's thread has polled since the last call. If so, the control thread need not poll: NCCL's thread
    /// will do so again soon.
    pub(crate) fn is_attended(&self) -> Option<Progress> {
        let calls = self.calls.load(Ordering::Relaxed);
        if self.seen.swap(calls, Ordering::Relaxed) == calls || !self.attending.load(Ordering::Relaxed) {
            return None;
        }
        self.idle_polls.store(0, Ordering::Relaxed);
        Some(Progress { moved: false, again: Some(tick(SOON)) })
    }

    /// Whether nothing has moved for a while although something is outstanding.
    pub(crate) fn is_stalled(&self) -> bool {
        self.idle_polls.load(Ordering::Relaxed) == RARELY
    }

    /// The control thread has polled; `moved`: whether anything moved. Returns when to poll again. `outstanding` is
    /// called twice, since a request may be posted while polling ends.
    pub(crate) fn looked(&self, moved: bool, outstanding: impl Fn() -> bool) -> Progress {
        let looks = if moved { 0 } else { self.idle_polls.load(Ordering::Relaxed) };
        if !outstanding() && looks == RARELY {
            self.attending.store(false, Ordering::SeqCst);
            self.idle_polls.store(0, Ordering::Relaxed);
            if !outstanding() || !self.wanted() {
                return Progress { moved, again: None };
            }
        }
        self.idle_polls.store((looks + 1).min(RARELY), Ordering::Relaxed);
        Progress { moved, again: Some(tick(SOON * (1 << looks))) }
    }
}

/// A time at least `after` from now, on a grid of [`SOON`]: the polls of many connections coincide, and the control
/// thread wakes once for all of them.
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
    fn the_control_thread_polls_ever_more_rarely_and_stops_when_nothing_is_outstanding() {
        let attention = Attention::default();
        assert!(attention.wanted());
        assert!(!attention.wanted() && attention.is_polling(), "it is attending already");
        let first = delay(attention.looked(false, || true)).unwrap();
        let mut last = first;
        for _ in 0..20 {
            last = delay(attention.looked(false, || true)).unwrap();
        }
        assert!(first <= 2 * SOON && last > Duration::from_millis(100) && last <= Duration::from_millis(129));
        assert!(delay(attention.looked(true, || true)).unwrap() <= 2 * SOON);
        let looks = (0..).take_while(|_| attention.looked(false, || false).again.is_some()).count();
        assert_eq!((looks, attention.is_polling()), (RARELY as usize - 1, false));
        assert!(attention.wanted());
    }

    #[test]
    fn the_control_thread_leaves_the_stream_alone_while_calls_come_and_polls_when_they_end() {
        let attention = Attention::default();
        attention.called();
        assert!(attention.is_attended().is_none(), "nobody asked the control thread to attend");
        attention.called();
        assert!(attention.wanted());
        assert!(delay(attention.is_attended().unwrap()).unwrap() <= 2 * SOON);
        assert!(attention.is_attended().is_none(), "no call since");
    }
}
