//! Counters per rail: bytes in flight, and throughput in windows of one millisecond.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::super::event::Body;
use super::super::rail::{Links, Rail};
use super::packets::Packets;
use super::proto::UNIT_SIZE_BYTES;
use super::tracks::Tracks;

/// The window over which throughput is taken.
const WINDOW_NS: u64 = 1_000_000;

/// Bytes in flight are written at most this often, unless they fall to zero.
const INTERVAL_NS: u64 = 20_000;

/// An event on a rail may be reported this late (a transport may wait until a transfer is over) and is still counted in
/// order. One that is later counts when it arrives.
const LATEST_NS: u64 = 2_000_000;

/// The most events that are known and not counted yet: a transport under full load reports half a million parts a
/// second.
const WAITING: usize = 1 << 14;

struct Counter {
    in_flight_track: u64,
    rate_track: u64,
    in_flight: i64,
    written_at: u64,
    window: u64,
    window_bytes: u64,
}

/// A part begins (bytes are added to what is in flight) or ends.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Edge {
    when: u64,
    /// An end goes before a beginning at the same time.
    begins: bool,
    rail: (Rail, bool),
    length: u64,
}

/// The counters of all rails.
#[derive(Default)]
pub(super) struct Rails {
    /// The connections that they belong to.
    pub(super) links: Links,
    counters: BTreeMap<(Rail, bool), Counter>,
    waiting: BinaryHeap<Reverse<Edge>>,
    counted_to: u64,
}

impl Rails {
    pub(super) fn begin(&mut self, body: &Body, when: u64, out: &mut Packets, tracks: &mut Tracks) {
        let Some((rail, send, length)) = self.links.rail(body) else { return };
        self.counters.entry((rail, send)).or_insert_with(|| Counter::new(rail, send, when, out, tracks));
        self.wait(Edge { when, begins: true, rail: (rail, send), length }, out);
    }

    pub(super) fn end(&mut self, body: &Body, when: u64, out: &mut Packets) {
        let Some((rail, send, length)) = self.links.rail(body) else { return };
        self.wait(Edge { when, begins: false, rail: (rail, send), length }, out);
    }

    fn wait(&mut self, edge: Edge, out: &mut Packets) {
        self.waiting.push(Reverse(edge));
        if self.waiting.len() > WAITING {
            self.count_first(out);
        }
    }

    /// Counts events up to `now`, as far as all of them are known, and writes windows that are over.
    pub(super) fn advance(&mut self, now: u64, out: &mut Packets) {
        let known = now.saturating_sub(LATEST_NS);
        while self.waiting.peek().is_some_and(|Reverse(edge)| edge.when <= known) {
            self.count_first(out);
        }
        for counter in self.counters.values_mut() {
            counter.moved(0, known, out);
        }
    }

    /// Describes all counters again, for a new file.
    pub(super) fn describe(&self, out: &mut Packets, process: u64) {
        for (&(rail, send), counter) in &self.counters {
            counter.describe(rail, send, out, process);
        }
    }

    /// Nothing follows.
    pub(super) fn finish(&mut self, now: u64, out: &mut Packets) {
        self.advance(now.saturating_add(LATEST_NS), out);
    }

    fn count_first(&mut self, out: &mut Packets) {
        let Some(Reverse(edge)) = self.waiting.pop() else { return };
        let Some(counter) = self.counters.get_mut(&edge.rail) else { return };
        // Time does not go back within a counter's track.
        self.counted_to = self.counted_to.max(edge.when);
        if edge.begins {
            counter.add(edge.length as i64, self.counted_to, out);
        } else {
            counter.add(-(edge.length as i64), self.counted_to, out);
            counter.moved(edge.length, self.counted_to, out);
        }
    }
}

impl Counter {
    fn new(rail: Rail, send: bool, when: u64, out: &mut Packets, tracks: &mut Tracks) -> Self {
        let (in_flight_track, rate_track) = (tracks.fresh(), tracks.fresh());
        let window = when / WINDOW_NS;
        let new = Self { in_flight_track, rate_track, in_flight: 0, written_at: 0, window, window_bytes: 0 };
        new.describe(rail, send, out, tracks.process());
        new
    }

    fn describe(&self, rail: Rail, send: bool, out: &mut Packets, process: u64) {
        let way = if send { "sent" } else { "received" };
        let name = format!("{} {way}: bytes in flight", rail.name());
        out.counter_track(self.in_flight_track, process, &name, UNIT_SIZE_BYTES, None);
        out.counter_track(self.rate_track, process, &format!("{} {way}: throughput", rail.name()), 0, Some("B/s"));
    }

    fn add(&mut self, bytes: i64, when: u64, out: &mut Packets) {
        self.in_flight += bytes;
        if self.in_flight == 0 || when >= self.written_at + INTERVAL_NS {
            self.written_at = when;
            out.counter(self.in_flight_track, when, self.in_flight);
        }
    }

    fn moved(&mut self, bytes: u64, when: u64, out: &mut Packets) {
        let window = when / WINDOW_NS;
        if window > self.window {
            if self.window_bytes > 0 {
                let rate = self.window_bytes * (1_000_000_000 / WINDOW_NS);
                out.counter(self.rate_track, self.window * WINDOW_NS, rate as i64);
                out.counter(self.rate_track, (self.window + 1) * WINDOW_NS, 0);
            }
            self.window = window;
            self.window_bytes = 0;
        }
        self.window_bytes += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(when: u64, begins: bool) -> Edge {
        Edge { when, begins, rail: (Rail::Number(0), true), length: 10 }
    }

    #[test]
    fn what_is_told_late_is_taken_out_in_the_order_in_which_it_happened() {
        let mut waiting = BinaryHeap::new();
        for (when, begins) in [(900, false), (300, true), (500, true), (500, false), (100, true), (700, false)] {
            waiting.push(Reverse(edge(when, begins)));
        }
        let order: Vec<_> =
            std::iter::from_fn(|| waiting.pop()).map(|Reverse(edge)| (edge.when, edge.begins)).collect();
        assert_eq!(order, [(100, true), (300, true), (500, false), (500, true), (700, false), (900, false)]);
    }
}
