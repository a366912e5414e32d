//! Peer processes that do not answer closes: all closes towards one of them share one time budget.
//!
//! NCCL closes its connections one after the other, in one thread. When a host has vanished, each close would otherwise
//! wait for the same silence again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long a close waits for an answer of a peer whose paths work: its process may be stopped.
pub(crate) const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// How long a close waits at least when a path may have failed at that moment: until the failure is noticed and lost
/// data has been resent. That takes 3 s, plus the time for which all paths are down. Shorter than [`Silences`]
/// remembers a peer.
pub(crate) const CLOSE_RECOVERY: Duration = Duration::from_secs(20);

/// After this time without a close the peer may be back.
const REMEMBERED: Duration = Duration::from_secs(30);

/// For each unresponsive peer, by its label (host and process): when its silence began, and when the last close was
/// unanswered.
#[derive(Debug, Default)]
pub(crate) struct Silences(HashMap<String, (Instant, Instant)>);

impl Silences {
    /// When the first close began that this peer did not answer.
    pub(crate) fn since(&self, peer: &str, now: Instant) -> Option<Instant> {
        let (since, last) = self.0.get(peer)?;
        (now.saturating_duration_since(*last) < REMEMBERED).then_some(*since)
    }

    /// At `now`, a close that began at `start` is given up as unanswered.
    pub(crate) fn unanswered(&mut self, peer: &str, start: Instant, now: Instant) {
        self.0.retain(|_, (_, last)| now.saturating_duration_since(*last) < REMEMBERED);
        self.0.entry(peer.to_owned()).or_insert((start, now)).1 = now;
    }

    /// The peer has answered a close.
    pub(crate) fn answered(&mut self, peer: &str) {
        self.0.remove(peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closes_towards_one_peer_share_their_time_until_it_answers() {
        let (mut silences, start) = (Silences::default(), Instant::now());
        let later = start + Duration::from_secs(3);
        assert_eq!(silences.since("a:1", start), None);
        silences.unanswered("a:1", start, start);
        assert_eq!(silences.since("a:1", start), Some(start));
        silences.unanswered("a:1", later, later);
        assert_eq!(silences.since("a:1", later), Some(start));
        assert_eq!(silences.since("a:2", later), None, "another process of that host has its own time");
        silences.answered("a:1");
        assert_eq!(silences.since("a:1", later), None);
    }

    /// The first close may wait longer than that, and the next one follows immediately.
    #[test]
    fn a_silence_is_as_old_as_its_last_close() {
        let (mut silences, start) = (Silences::default(), Instant::now());
        let later = start + 2 * REMEMBERED;
        silences.unanswered("a:1", start, later);
        assert_eq!(silences.since("a:1", later + REMEMBERED / 2), Some(start));
    }

    #[test]
    fn an_old_silence_is_forgotten() {
        let (mut silences, start) = (Silences::default(), Instant::now());
        silences.unanswered("a:1", start, start);
        let later = start + REMEMBERED;
        assert_eq!(silences.since("a:1", later), None);
        silences.unanswered("a:1", later, later);
        assert_eq!(silences.since("a:1", later), Some(later));
        silences.unanswered("b:1", later + REMEMBERED, later + REMEMBERED);
        assert_eq!(silences.0.len(), 1, "what is old is swept out");
    }
}
