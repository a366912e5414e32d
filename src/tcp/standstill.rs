//! Noticing that nothing moves because the host's own queue dropped a packet.
//!
//! A full queueing discipline of the local interface (`tbf`, `htb` and the like) drops a packet before it leaves. If nothing else
//! of the stream is on its way, no acknowledgement will come, and Linux tries again when its zero-window probe timer ends: after
//! 200 ms, a time that no socket option shortens (`tcp_check_probe_timer`). Everything that waits for this stream stands still
//! until then. But whenever a program sets `TCP_NODELAY`, the kernel sends what is pending.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// After so long without progress the control thread pushes for the first time.
const FIRST_PUSH: Duration = Duration::from_millis(3);

/// How long nothing has moved on a connection that has something to move. The control thread alone uses it, whenever it looks at
/// the connection ([`attend`](crate::engine::schedule::attend)).
#[derive(Debug, Default)]
pub(super) struct Standstill(Mutex<Option<Still>>);

#[derive(Debug)]
struct Still {
    moved: u64,
    since: Instant,
    /// The next push is due so long after `since`.
    next: Duration,
}

impl Standstill {
    /// Whether to push now: [`FIRST_PUSH`] after `moved` has changed or something has begun to be `under_way`, and then at
    /// doubling intervals.
    pub(super) fn is_due(&self, under_way: bool, moved: u64, now: Instant) -> bool {
        let mut still = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *still {
            _ if !under_way => *still = None,
            Some(still) if still.moved == moved => {
                let is_due = now.saturating_duration_since(still.since) >= still.next;
                if is_due {
                    still.next *= 2;
                }
                return is_due;
            }
            _ => *still = Some(Still { moved, since: now, next: FIRST_PUSH }),
        }
        false
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
        assert_eq!(pushes, [3, 6, 12, 24, 48]);
        let pushes: Vec<u64> = (60..80).filter(|ms| due(true, 1, *ms)).collect();
        assert_eq!(pushes, [63, 66, 72], "something has moved");
        assert!(!(80..200).any(|ms| due(true, ms, ms)), "something moves all the time");
        assert!(!(200..900).any(|ms| due(false, 199, ms)), "nothing is under way");
        let pushes: Vec<u64> = (900..910).filter(|ms| due(true, 199, *ms)).collect();
        assert_eq!(pushes, [903, 906], "the time before does not count");
    }
}
