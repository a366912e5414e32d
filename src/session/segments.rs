//! `TCP_MAXSEG` towards hosts on whose path larger segments were lost, for the connections to come.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How long a segment size is remembered. After that the path may have been repaired, and a connection tries full
/// segments again.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// The segment sizes that were found, and when.
#[derive(Debug, Default)]
pub(crate) struct Segments(HashMap<IpAddr, (u32, Instant)>);

impl Segments {
    /// Only segments up to `segment` bytes reach that address. Returns whether this is new.
    pub(crate) fn learn(&mut self, address: IpAddr, segment: u32, now: Instant) -> bool {
        self.0.retain(|_, (_, since)| now.saturating_duration_since(*since) < REMEMBERED);
        let address = address.to_canonical();
        let is_news = self.0.get(&address).is_none_or(|(known, _)| *known != segment);
        if is_news {
            self.0.insert(address, (segment, now));
        }
        is_news
    }

    /// `TCP_MAXSEG` for a socket that connects there.
    pub(crate) fn of(&self, address: IpAddr, now: Instant) -> Option<u32> {
        let known = self.0.get(&address.to_canonical());
        known.filter(|(_, since)| now.saturating_duration_since(*since) < REMEMBERED).map(|(segment, _)| *segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_learnt_of_a_path_is_forgotten_after_a_while() {
        let (mut segments, start) = (Segments::default(), Instant::now());
        let [one, other] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(IpAddr::from);
        assert!(segments.learn(one, 1220, start));
        let later = start + REMEMBERED / 2;
        assert!(!segments.learn(one, 1220, later), "it is known");
        assert_eq!((segments.of(one, later), segments.of(other, later)), (Some(1220), None));
        let end = start + REMEMBERED;
        assert_eq!(segments.of(one, end), None, "the path may have been recovered");
        assert!(segments.learn(other, 536, end));
        assert_eq!(segments.0.len(), 1, "what is old is swept out");
        assert!(segments.learn(other, 1220, end), "another size");
    }
}
