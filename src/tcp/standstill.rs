//! Noticing that nothing moves because this host dropped a packet itself.
//!
//! A full queue of the host's own interface (`tbf`, `htb` and the like) refuses a packet before it has left. If nothing else of
//! the stream is on its way, no acknowledgement will come, and Linux tries again when its probe timer ends: after 200 ms, a time
//! that no socket option shortens (`tcp_check_probe_timer`). Everything that waits for this stream stands still until then.
//! But whenever a program sets `TCP_NODELAY`, the kernel sends what is pending.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// After so long without progress the control thread pushes for the first time.
const FIRST_PUSH: Duration = Duration::from_millis(3);

/// How long nothing has moved, for the control thread, which looks at a connection every millisecond or two.
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
    /// Whether to push now: [`FIRST_PUSH`] after `moved` has changed for the last time, and then at doubling intervals.
    pub(super) fn is_due(&self, moved: u64, now: Instant) -> bool {
        let mut still = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *still {
            Some(still) if still.moved == moved => {
                let is_due = now.saturating_duration_since(still.since) >= still.next;
                if is_due {
                    still.next *= 2;
                }
                is_due
            }
            _ => {
                *still = Some(Still { moved, since: now, next: FIRST_PUSH });
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_pushes_soon_and_then_ever_more_rarely_until_something_moves() {
        let (standstill, start) = (Standstill::default(), Instant::now());
        let due = |moved, ms| standstill.is_due(moved, start + Duration::from_millis(ms));
        let pushes: Vec<u64> = (0..60).filter(|ms| due(0, *ms)).collect();
        assert_eq!(pushes, [3, 6, 12, 24, 48]);
        let pushes: Vec<u64> = (60..80).filter(|ms| due(1, *ms)).collect();
        assert_eq!(pushes, [63, 66, 72], "something has moved");
        assert!(!(80..200).any(|ms| due(ms, ms)), "something moves all the time");
    }
}
