//! How many bytes one stream may have on the way: what makes a slow path take fewer chunks than a fast one.
//!
//! NCCL waits for whole messages, oldest first, so a chunk that stays long on a slow stream holds up everything behind
//! it. The window follows from the stream's share: of the bytes that the connection delivered while a chunk was on its
//! way, how many travelled on this stream? A stream with an even share has a full window; one of a tenth of it has a
//! tenth of the window, so that a chunk on it arrives about when those arrive that the others took at the same time.
//!
//! The share is measured in bytes, not in time: no clock is needed, and a connection that pauses measures nothing. The
//! window is a little more than the share ([`LAG_PERCENT`]), or a stream that its window alone holds back would never
//! show what else it can carry.

use super::limits::{CHUNK_MAX, CHUNK_MIN, PAGE, STREAM_WINDOW};

/// The window in percent of what the stream delivers while the connection delivers one full window for each stream.
/// With 200, chunks on a stream of a tenth held up an eight-rail connection by 3 to 10 % (16 MiB messages, 8 of them
/// outstanding); with 125 it was 0 to 2 %.
const LAG_PERCENT: u64 = 125;

/// The smallest window in bytes: the smallest chunk on the way and some behind it.
const LEAST: u64 = 4 * CHUNK_MIN;

/// The window of one stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window(u64);

impl Default for Window {
    fn default() -> Self {
        Self(STREAM_WINDOW)
    }
}

impl Window {
    /// Unacknowledged bytes from which the stream gets no further chunk.
    pub(super) fn bytes(self) -> u64 {
        self.0
    }

    /// The largest chunk that the stream should get: a quarter of its window, so that there is something behind it.
    pub(super) fn chunk(self) -> u64 {
        (self.0 / 4).next_multiple_of(PAGE).clamp(CHUNK_MIN, CHUNK_MAX)
    }

    /// Whether the stream carries less than a fifth of what the others do, so that it is not one to leave a message to. (Less
    /// than a half some show now and then whose worker got no processor for a while.)
    pub(super) fn is_slow(self) -> bool {
        self.0 < STREAM_WINDOW / 4
    }

    /// A chunk arrived. While it was on its way the connection's `streams` streams delivered `all` bytes, of which this
    /// one delivered `own`, the chunk included. What a stream delivers while the others have nothing to do is no share.
    pub(super) fn delivered(&mut self, own: u64, all: u64, streams: u64) {
        if own == all && streams > 1 {
            return;
        }
        let even = STREAM_WINDOW * streams * LAG_PERCENT / 100;
        let wanted = u128::from(even) * u128::from(own) / u128::from(all.max(1));
        let wanted = wanted.min(STREAM_WINDOW.into()) as u64;
        // A quarter of the way at a time: one chunk says little, since workers and acknowledgements come in bursts.
        self.0 = ((3 * self.0 + wanted) / 4).clamp(LEAST, STREAM_WINDOW);
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
        // A long way: all that is on it arrives once in a round trip, so each stream delivers what its window allows.
        let mut window = Window(LEAST);
        for _ in 0..80 {
            let own = window.bytes();
            window.delivered(own, own + 7 * STREAM_WINDOW, 8);
        }
        assert!(window.bytes() > STREAM_WINDOW * 99 / 100, "{}", window.bytes());
    }

    #[test]
    fn a_slow_stream_that_works_alone_for_a_while_is_still_slow() {
        let mut window = Window::default();
        after(&mut window, 20, 100_000, 7_100_000, 8);
        let slow = window.bytes();
        assert!(window.is_slow());
        assert_eq!(after(&mut window, 30, 128 << 10, 128 << 10, 8), slow);
        after(&mut window, 30, 1 << 20, 8 << 20, 8);
        assert!(!window.is_slow());
    }

    #[test]
    fn a_stream_alone_has_the_full_window() {
        let mut window = Window(LEAST);
        assert!(after(&mut window, 30, 5000, 5000, 1) > STREAM_WINDOW * 99 / 100);
    }
}
