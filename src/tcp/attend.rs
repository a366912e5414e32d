//! The keeper's eye on the first stream of a connection.
//!
//! NCCL's thread moves the first stream itself, inside the calls that it makes. But it may wait for one thing while
//! another, which it does not ask after, is what the peer waits for. So while requests are outstanding the keeper
//! looks at the stream too: soon after something moved, ever more rarely while nothing does, and not at all when
//! nothing is outstanding.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::engine::poller::Progress;

/// The first look comes this long after the request.
const SOON: Duration = Duration::from_millis(1);
/// Each further look comes twice as long after the last, up to `SOON` times two to this power: 128 ms.
const RARELY: u32 = 7;

/// Whether the keeper attends to a stream, and how often.
#[derive(Debug, Default)]
pub struct Attention {
    attending: AtomicBool,
    idle_looks: AtomicU32,
}

impl Attention {
    /// A request is outstanding. Returns whether the keeper must be told.
    pub fn wanted(&self) -> bool {
        !self.attending.load(Ordering::Relaxed) && !self.attending.swap(true, Ordering::SeqCst)
    }

    /// Whether nothing has moved for a while although something is outstanding.
    pub fn is_stalled(&self) -> bool {
        self.idle_looks.load(Ordering::Relaxed) == RARELY
    }

    /// The keeper has looked, and something moved or not. Says when it looks again; `outstanding` is asked twice,
    /// since a request may come while the attention ends.
    pub fn looked(&self, moved: bool, outstanding: impl Fn() -> bool) -> Progress {
        if !outstanding() {
            self.attending.store(false, Ordering::SeqCst);
            self.idle_looks.store(0, Ordering::Relaxed);
            if !outstanding() || !self.wanted() {
                return Progress { moved, again: None };
            }
        }
        let looks = if moved { 0 } else { self.idle_looks.load(Ordering::Relaxed) };
        self.idle_looks.store((looks + 1).min(RARELY), Ordering::Relaxed);
        Progress { moved, again: Some(Instant::now() + SOON * (1 << looks)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keeper_looks_ever_more_rarely_and_stops_when_nothing_is_outstanding() {
        let attention = Attention::default();
        assert!(attention.wanted());
        assert!(!attention.wanted(), "it is attending already");
        let delay = |progress: Progress| progress.again.map(|at| at.saturating_duration_since(Instant::now()));
        let first = delay(attention.looked(false, || true)).unwrap();
        let mut last = first;
        for _ in 0..20 {
            last = delay(attention.looked(false, || true)).unwrap();
        }
        assert!(first <= SOON && last > Duration::from_millis(100) && last <= Duration::from_millis(128));
        assert!(delay(attention.looked(true, || true)).unwrap() <= SOON);
        assert_eq!(delay(attention.looked(false, || false)), None);
        assert!(attention.wanted());
    }
}
