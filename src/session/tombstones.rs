//! Tombstones: receiving connections that were closed recently.
//!
//! A receiver closes when it has received everything it wanted. If the paths fail at that moment, its last
//! acknowledgements and its goodbye are lost, and the sender cannot know what arrived. It connects again and needs an
//! answer, so the process remembers the key of each closed connection, and how many messages that connection had
//! received.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::handshake::Secret;
use super::link::Link;

/// The largest number of tombstones: about 100 bytes each.
const MOST: usize = 4096;

/// The remembered data of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Tombstone {
    connection: u64,
    until: Instant,
    /// The secret that further streams prove.
    pub key: Secret,
    /// How many messages the connection had received.
    pub received: u64,
}

/// All tombstones, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Tombstones(VecDeque<Tombstone>);

impl Tombstones {
    /// A connection was closed; it is remembered for `patience`, or until there are too many.
    pub(crate) fn add(&mut self, link: &Link, received: u64, patience: Duration) {
        let now = Instant::now();
        while self.0.front().is_some_and(|tombstone| tombstone.until <= now) || self.0.len() >= MOST {
            self.0.pop_front();
        }
        let until = now + patience;
        self.0.push_back(Tombstone { connection: link.connection, until, key: link.key.clone(), received });
    }

    /// The connection with this number.
    pub(crate) fn find(&self, connection: u64) -> Option<Tombstone> {
        let now = Instant::now();
        self.0.iter().find(|tombstone| tombstone.connection == connection && tombstone.until > now).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(connection: u64) -> Link {
        let key = Secret::from_bytes([7; 16]);
        let (remote, local, round_trip) = (Vec::new(), [].into(), std::time::Duration::ZERO);
        Link { connection, key, features: 0, remote, local, traffic_class: None, round_trip }
    }

    #[test]
    fn a_connection_is_remembered_for_its_time_and_there_are_never_too_many() {
        let mut tombstones = Tombstones::default();
        tombstones.add(&link(1), 17, Duration::ZERO);
        assert!(tombstones.find(1).is_none(), "its time is over");
        for connection in 2..MOST as u64 + 12 {
            tombstones.add(&link(connection), connection * 2, Duration::from_secs(60));
        }
        assert_eq!(tombstones.0.len(), MOST);
        assert_eq!(tombstones.find(MOST as u64).map(|tombstone| tombstone.received), Some(MOST as u64 * 2));
        assert!(tombstones.find(2).is_none(), "the oldest gave way");
    }
}
