//! A process's report about its network. The transport's part comes through a function that `abi` provides.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use crate::trace::verdict::Route;

/// The most connections that are reported.
const TOLD: usize = 512;

/// An interface and its counters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Interface {
    /// Its name.
    pub name: String,
    /// Bytes that left by it.
    pub sent: u64,
    /// Bytes that came in by it.
    pub received: u64,
    /// Whether that is all of the host's traffic, or what this process's connections carried.
    pub of_host: bool,
}

/// A connection of the transport.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Connection {
    /// Its number and this side's direction distinguish it from others of this process.
    pub number: u64,
    /// Whether this side sends.
    pub send: bool,
    /// The process at the other end, `host:process`.
    pub peer: String,
    /// The address at the other end.
    pub address: String,
    /// This side's interfaces.
    pub interfaces: Vec<String>,
    /// Bytes of messages that it has carried.
    pub bytes: u64,
    /// When that number last grew.
    pub moved: u64,
    /// Since when this side has read what arrives, because a request has been outstanding; None when none is, and in
    /// the state of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub polled: Option<u64>,
}

impl Connection {
    /// One that a test needs: to this process, over this interface.
    #[cfg(test)]
    pub(crate) fn sample(send: bool, peer: &str, interface: &str) -> Self {
        Self { send, peer: peer.into(), interfaces: vec![interface.into()], ..Self::default() }
    }

    /// As the verdict knows it; `clock` converts times to the reader's clock.
    pub(crate) fn route(&self, clock: impl Fn(u64) -> u64) -> Route {
        let Self { number, send, bytes, .. } = *self;
        Route {
            peer: self.peer.clone(),
            rank: None,
            send,
            interfaces: self.interfaces.clone(),
            number,
            bytes,
            moved: clock(self.moved),
            polled: self.polled.map(clock),
        }
    }
}

/// The transport's connections; their times are not set.
pub(crate) type Connections = fn() -> Vec<Connection>;

/// Of a connection at the last poll.
#[derive(Debug)]
struct Seen {
    bytes: u64,
    moved: u64,
    polled: Option<u64>,
}

/// The connections from one poll to the next.
#[derive(Debug, Default)]
pub(in crate::trace) struct Network {
    before: HashMap<(u64, bool), Seen>,
}

impl Network {
    /// The connections now, those that have stood still for longest first, and what their interfaces have carried.
    pub(in crate::trace) fn update(&mut self, list: Vec<Connection>, now: u64) -> (Vec<Interface>, Vec<Connection>) {
        let mut list = list;
        let mut seen = HashMap::new();
        for connection in &mut list {
            let key = (connection.number, connection.send);
            let before = self.before.get(&key);
            connection.moved = before.filter(|it| it.bytes == connection.bytes).map_or(now, |it| it.moved);
            connection.polled = connection.polled.map(|_| before.and_then(|it| it.polled).unwrap_or(now));
            let Connection { bytes, moved, polled, .. } = *connection;
            seen.insert(key, Seen { bytes, moved, polled });
        }
        self.before = seen;
        let interfaces = interfaces(&list, &std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default());
        list.sort_by_key(|connection| (connection.moved, connection.number));
        list.truncate(TOLD);
        (interfaces, list)
    }
}

/// What the connections' interfaces have carried: as the kernel counts, or, where it does not (RDMA), these
/// connections.
fn interfaces(list: &[Connection], counts: &str) -> Vec<Interface> {
    let names: BTreeSet<&str> = list.iter().flat_map(|it| &it.interfaces).map(String::as_str).collect();
    let kernel: BTreeMap<&str, (u64, u64)> = counts.lines().filter_map(counted).collect();
    let of_list = |name: &str, send: bool| {
        let used = |it: &&Connection| it.send == send && it.interfaces.iter().any(|it| it == name);
        list.iter().filter(used).map(|it| it.bytes / it.interfaces.len().max(1) as u64).sum()
    };
    let told = names.into_iter().map(|name| {
        let of_host = kernel.contains_key(name);
        let counted = kernel.get(name).copied();
        let (sent, received) = counted.unwrap_or_else(|| (of_list(name, true), of_list(name, false)));
        Interface { name: name.into(), sent, received, of_host }
    });
    told.collect()
}

/// A line of `/proc/net/dev`: the name, bytes sent and received.
fn counted(line: &str) -> Option<(&str, (u64, u64))> {
    let (name, counts) = line.split_once(':')?;
    let counts: Vec<u64> = counts.split_whitespace().map_while(|word| word.parse().ok()).collect();
    Some((name.trim(), (*counts.get(8)?, *counts.first()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(number: u64, send: bool, interface: &str, bytes: u64) -> Connection {
        Connection { number, send, interfaces: vec![interface.into()], bytes, ..Connection::default() }
    }

    #[test]
    fn interfaces_are_counted_by_the_kernel_or_by_their_connections() {
        let counts = "Inter-|   Receive                                                |  Transmit\n \
                      face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
                      lo:       1       9    0    0    0     0          0         0        2       9    0    0    0     0       0          0\n  \
                      eth1: 7000    10    0    0    0     0          0         0 8000    10    0    0    0     0       0          0\n";
        let list =
            [connection(1, true, "eth1", 5), connection(2, true, "mlx5_0", 6), connection(3, false, "mlx5_0", 7)];
        let told = interfaces(&list, counts);
        let of = |name: &str, sent, received, of_host| Interface { name: name.into(), sent, received, of_host };
        assert_eq!(told, [of("eth1", 8000, 7000, true), of("mlx5_0", 6, 7, false)]);
    }

    #[test]
    fn a_connection_moved_when_its_bytes_last_grew() {
        let mut network = Network::default();
        let mut update = |bytes, now| network.update(vec![connection(1, true, "lo", bytes)], now).1[0].moved;
        assert_eq!([update(5, 10), update(5, 20), update(6, 30), update(6, 40)], [10, 10, 30, 30]);
    }

    #[test]
    fn a_connection_is_polled_since_a_request_was_first_seen_outstanding_without_a_pause() {
        let mut network = Network::default();
        let mut update = |is_polled: bool, now| {
            let connection = Connection { polled: is_polled.then_some(0), ..connection(1, false, "lo", 5) };
            network.update(vec![connection], now).1[0].polled
        };
        let polls = [(true, 10), (true, 20), (false, 30), (true, 40), (true, 50)];
        assert_eq!(
            polls.map(|(is_polled, now)| update(is_polled, now)),
            [Some(10), Some(10), None, Some(40), Some(40)]
        );
    }
}
