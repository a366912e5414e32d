//! Noticing that nothing moves because the host's own queue dropped a packet.
//!
//! A full queueing discipline of the local interface (`tbf`, `htb` and the like) drops a packet before it leaves. If
//! nothing else of the stream is on its way, no acknowledgement will arrive, and Linux tries again when its zero-window
//! probe timer ends. That takes 200 ms, a time that no socket option shortens (`tcp_check_probe_timer`). Everything
//! that waits for this stream stands still until then. But whenever a program sets `TCP_NODELAY`, the kernel sends what
//! is pending.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::backoff_timer::BackoffTimer;

/// How long nothing has moved on a connection that has something to move. The control thread alone uses it, whenever it
/// polls the connection ([`attend`](crate::engine::schedule::attend)).
#[derive(Debug)]
pub(super) struct Standstill(Mutex<Still>);

#[derive(Debug)]
struct Still {
    moved: u64,
    timer: BackoffTimer,
}

impl Default for Standstill {
    fn default() -> Self {
        // After this long without progress the control thread pushes for the first time.
        let timer = BackoffTimer::new(Duration::from_millis(3), Duration::MAX);
        Self(Mutex::new(Still { moved: 0, timer }))
    }
}

impl Standstill {
    /// Whether to push now: the timer starts when `moved` has changed or something has begun to be `under_way`.
    pub(super) fn is_due(&self, under_way: bool, moved: u64, now: Instant) -> bool {
        let mut still = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !under_way || still.moved != moved {
            still.timer.reset();
            still.moved = moved;
        }
        under_way && still.timer.is_due(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_pushes_soon_and_then_ever_more_rarely_until_something_moves_or_nothing_is_left() {
        let (standstill, start) = (Standstill::default(), Instant::now());
        let due = |under_way, moved, ms| standstill.is_due(under_way, moved, start + Duration::from_millis(ms));
        let pushes: Vec<u64> = (0..60).filter(|ms| due(true, 0, *ms)).collect();
        assert_eq!(pushes, [3, 9, 21, 45]);
        let pushes: Vec<u64> = (60..80).filter(|ms| due(true, 1, *ms)).collect();
        assert_eq!(pushes, [63, 69], "something has moved");
        assert!(!(80..200).any(|ms| due(true, ms, ms)), "something moves all the time");
        assert!(!(200..900).any(|ms| due(false, 199, ms)), "nothing is under way");
        let pushes: Vec<u64> = (900..910).filter(|ms| due(true, 199, *ms)).collect();
        assert_eq!(pushes, [903, 909], "the time before does not count");
    }
}
