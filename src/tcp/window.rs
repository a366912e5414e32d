//! How many bytes one stream may have on the way: what makes a slow path take fewer chunks than a fast one.
//!
//! NCCL waits for whole messages, oldest first, so a chunk that stays long on a slow stream holds up everything behind
//! it. The window follows from the stream's share: of the bytes that the connection delivered while a chunk was on its
//! way, how many travelled on this stream? A stream with an even share has a full window; one of a tenth of it has a
//! tenth of the window. So chunks that all streams took at the same time arrive at about the same time.
//!
//! The share is measured in bytes, not in time: no clock is needed, and a connection that pauses measures nothing. The
//! window is a little more than the share ([`LAG_PERCENT`]), or a stream that its window alone holds back would never
//! show what else it can carry.
//!
//! A single message's bytes prove nothing; for that there is the [`Pace`].

use std::time::Duration;

use crate::engine::schedule::constants::{
    CHUNK_MAX, CHUNK_MIN, FAST, FORGET, LAG_PERCENT, NEAR_US, PAGE, SLOW, STREAM_WINDOW, STREAM_WINDOW_FAR, WAKING,
    WINDOW_MIN,
};

/// How long a stream takes for what is on it, in nanoseconds for 1024 bytes.
///
/// The window shows which share of many bytes a stream carries. For a message now and then that share proves nothing:
/// it may travel on one stream alone. And all streams carry eight such messages evenly if the seven others wait for the
/// slowest. So the pace measures time. Measured on four streams of one rail, of which one had 100 Mbit/s and the others
/// 3.4 Gbit/s together. A message of 128 KiB by itself took 5.5 ms where that was the first stream, and 0.2 ms now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pace(u64);

impl Pace {
    /// A chunk has arrived this long after it was handed out, when there were `bytes` on the stream, its own included.
    pub(super) fn took(&mut self, elapsed: Duration, bytes: u64) {
        let ns = u64::try_from(elapsed.saturating_sub(WAKING).as_nanos()).unwrap_or(u64::MAX);
        let sample = (ns.saturating_mul(1024) / bytes.max(1)).min(1 << 40);
        self.0 = (3 * self.0 + sample) / 4;
    }

    /// Whether the stream may be [slow](Self::is_slow) at all: a cheap check.
    #[inline]
    pub(super) fn is_doubtful(self) -> bool {
        self.0 > SLOW * FAST
    }

    /// Whether a message should take another stream, given the pace of the best one.
    pub(super) fn is_slow(self, best: Self) -> bool {
        self.0 > SLOW * best.0.max(FAST)
    }

    /// The sender has passed this stream over for a message or a chunk.
    pub(super) fn forget(&mut self) {
        self.0 -= self.0 / FORGET;
    }

    /// How long this many bytes take, in arbitrary units: for comparison only.
    pub(super) fn time(self, bytes: u64) -> u64 {
        self.0.max(FAST).saturating_mul(bytes)
    }
}

/// The window of one stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    bytes: u64,
    /// The largest window.
    full: u64,
}

impl Default for Window {
    fn default() -> Self {
        Self::over(Duration::ZERO)
    }
}

impl Window {
    /// A full window for a path with this round trip. What is unacknowledged on a long path is mostly on the way.
    pub(super) fn over(round_trip: Duration) -> Self {
        let us = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
        let full = (STREAM_WINDOW / NEAR_US).saturating_mul(us).clamp(STREAM_WINDOW, STREAM_WINDOW_FAR);
        Self { bytes: full, full }
    }

    /// Unacknowledged bytes from which the stream gets no further chunk.
    pub(super) fn bytes(self) -> u64 {
        self.bytes
    }

    /// The largest chunk that the stream should get: a quarter of its window, so that there is something behind it.
    pub(super) fn chunk(self) -> u64 {
        (self.bytes / 4).next_multiple_of(PAGE).clamp(CHUNK_MIN, CHUNK_MAX)
    }

    /// A chunk arrived. While it was on its way the connection's `streams` streams delivered `all` bytes, of which this
    /// one delivered `own`, the chunk included.
    pub(super) fn delivered(&mut self, own: u64, all: u64, streams: u64) {
        let even = self.full * streams * LAG_PERCENT / 100;
        let wanted = u128::from(even) * u128::from(own) / u128::from(all.max(1));
        let wanted = wanted.min(self.full.into()) as u64;
        // The window moves a quarter of the way at a time: one chunk proves little, since workers and acknowledgements
        // run in bursts.
        self.bytes = ((3 * self.bytes + wanted) / 4).clamp(WINDOW_MIN, self.full);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chunks of a stream that delivers `own` of every `all` bytes.
    fn after(window: &mut Window, chunks: usize, own: u64, all: u64, streams: u64) -> u64 {
        (0..chunks).for_each(|_| window.delivered(own, all, streams));
        window.bytes()
    }

    #[test]
    fn the_window_follows_the_share_down_and_up_again() {
        let mut window = Window::default();
        assert_eq!(after(&mut window, 100, 1 << 20, 8 << 20, 8), STREAM_WINDOW, "an even share");
        // A tenth of the others' rate: a seventy-first of all.
        let slow = after(&mut window, 20, 100_000, 7_100_000, 8);
        assert!((STREAM_WINDOW / 10..STREAM_WINDOW / 6).contains(&slow), "{slow}");
        assert!(window.chunk() < CHUNK_MAX / 4);
        let back = after(&mut window, 20, 1 << 20, 8 << 20, 8);
        assert!(back > STREAM_WINDOW * 99 / 100, "{back}");
        assert_eq!(window.chunk(), CHUNK_MAX);
    }

    #[test]
    fn a_stream_that_only_its_window_holds_back_grows() {
        // A long path: all bytes on it arrive once in a round trip, so each stream delivers what its window allows.
        let mut window = Window { bytes: WINDOW_MIN, ..Window::default() };
        for _ in 0..80 {
            let own = window.bytes();
            window.delivered(own, own + 7 * STREAM_WINDOW, 8);
        }
        assert!(window.bytes() > STREAM_WINDOW * 99 / 100, "{}", window.bytes());
    }

    #[test]
    fn a_stream_that_takes_eight_times_as_long_is_slow_until_it_is_forgotten_or_shows_otherwise() {
        let of = |elapsed, bytes| {
            let mut pace = Pace::default();
            (0..20).for_each(|_| pace.took(Duration::from_micros(elapsed), bytes));
            pace
        };
        // A single message whose threads slept, and two megabytes at 1 GB/s.
        let (alone, among) = (of(300, 128 << 10), of(2300, 2 << 20));
        assert!(!alone.is_slow(among) && !among.is_slow(alone) && !alone.is_doubtful());
        // 100 Mbit/s.
        let mut slow = of(10_000, 128 << 10);
        assert!(slow.is_slow(alone) && slow.is_slow(among) && slow.is_doubtful());
        assert!(!slow.is_slow(of(10_000, 256 << 10)), "all are slow");
        let mut again = slow;
        let mut skipped = 0;
        while slow.is_slow(alone) {
            slow.forget();
            skipped += 1;
        }
        assert!((200..2000).contains(&skipped), "{skipped}");
        (0..20).for_each(|_| again.took(Duration::from_micros(300), 128 << 10));
        assert!(!again.is_slow(alone));
    }

    #[test]
    fn a_long_path_has_a_larger_window() {
        let full = |ms| Window::over(Duration::from_millis(ms)).bytes();
        assert_eq!([0, 1, 10].map(full), [STREAM_WINDOW; 3]);
        assert!(full(50) > 4 * STREAM_WINDOW && full(200) == STREAM_WINDOW_FAR && full(3000) == STREAM_WINDOW_FAR);
        assert_eq!(Window::over(Duration::from_secs(3)).chunk(), CHUNK_MAX);
    }

    #[test]
    fn a_stream_alone_has_the_full_window() {
        let mut window = Window { bytes: WINDOW_MIN, ..Window::default() };
        assert!(after(&mut window, 30, 5000, 5000, 1) > STREAM_WINDOW * 99 / 100);
    }
}
