//! Peer processes that do not answer closes: all closes towards one of them share one time budget.
//!
//! NCCL closes its connections one after the other, in one thread. When a host has vanished, each of them would wait for
//! the same silence again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Longer than the longest wait of a close. After that the peer may be back.
const REMEMBERED: Duration = Duration::from_secs(30);

/// Since when which peers, by their label (host and process), do not answer.
#[derive(Debug, Default)]
pub struct Silences(HashMap<String, Instant>);

impl Silences {
    /// When the first close began that this peer did not answer.
    pub fn since(&self, peer: &str, now: Instant) -> Option<Instant> {
        self.0.get(peer).copied().filter(|since| now.saturating_duration_since(*since) < REMEMBERED)
    }

    /// A close that began at `start` goes unanswered. Returns when the first one began.
    pub fn unanswered(&mut self, peer: &str, start: Instant) -> Instant {
        self.0.retain(|_, since| start.saturating_duration_since(*since) < REMEMBERED);
        *self.0.entry(peer.to_owned()).or_insert(start)
    }

    /// The peer has answered a close.
    pub fn answered(&mut self, peer: &str) {
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
        assert_eq!(silences.unanswered("a:1", start), start);
        assert_eq!(silences.unanswered("a:1", later), start);
        assert_eq!(silences.since("a:2", later), None, "another process of that host has its own time");
        silences.answered("a:1");
        assert_eq!(silences.since("a:1", later), None);
    }

    #[test]
    fn an_old_silence_is_forgotten() {
        let (mut silences, start) = (Silences::default(), Instant::now());
        silences.unanswered("a:1", start);
        let later = start + REMEMBERED;
        assert_eq!(silences.since("a:1", later), None);
        assert_eq!(silences.unanswered("a:1", later), later);
        silences.unanswered("b:1", later + REMEMBERED);
        assert_eq!(silences.0.len(), 1, "what is old is swept out");
    }
}
