//! Counters per rail: bytes in flight, and throughput in windows of one millisecond.

use std::collections::BTreeMap;

use super::super::event::Body;
use super::super::rail::Rail;
use super::packets::Packets;
use super::proto::UNIT_SIZE_BYTES;
use super::tracks::Tracks;

/// The window over which throughput is taken.
const WINDOW_NS: u64 = 1_000_000;

/// Bytes in flight are written at most this often, unless they fall to zero.
const INTERVAL_NS: u64 = 20_000;

struct Counter {
    in_flight_track: u64,
    rate_track: u64,
    in_flight: i64,
    written_at: u64,
    window: u64,
    window_bytes: u64,
}

/// The counters of all rails.
#[derive(Default)]
pub(super) struct Rails(BTreeMap<(Rail, bool), Counter>);

impl Rails {
    pub(super) fn begin(&mut self, body: &Body, when: u64, out: &mut Packets, tracks: &mut Tracks) {
        let Some((rail, send, length)) = Rail::of(body) else { return };
        let counter = self.0.entry((rail, send)).or_insert_with(|| Counter::new(rail, send, when, out, tracks));
        counter.add(length as i64, when, out);
    }

    pub(super) fn end(&mut self, body: &Body, when: u64, out: &mut Packets) {
        let Some((rail, send, length)) = Rail::of(body) else { return };
        if let Some(counter) = self.0.get_mut(&(rail, send)) {
            counter.add(-(length as i64), when, out);
            counter.moved(length, when, out);
        }
    }

    /// Writes windows that are over.
    pub(super) fn advance(&mut self, now: u64, out: &mut Packets) {
        for counter in self.0.values_mut() {
            counter.moved(0, now, out);
        }
    }
}

impl Counter {
    fn new(rail: Rail, send: bool, when: u64, out: &mut Packets, tracks: &mut Tracks) -> Self {
        let way = if send { "sent" } else { "received" };
        let (in_flight_track, rate_track) = (tracks.fresh(), tracks.fresh());
        let parent = tracks.process();
        let name = format!("{} {way}: bytes in flight", rail.name());
        out.counter_track(in_flight_track, parent, &name, UNIT_SIZE_BYTES, None);
        out.counter_track(rate_track, parent, &format!("{} {way}: throughput", rail.name()), 0, Some("B/s"));
        Self { in_flight_track, rate_track, in_flight: 0, written_at: 0, window: when / WINDOW_NS, window_bytes: 0 }
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
