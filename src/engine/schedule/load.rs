//! How much one of NCCL's threads has copied itself lately.
//!
//! NCCL has one thread for all network connections of a GPU. Messages that it sends and receives itself are not handed
//! over between threads, which is best for one message now and then. But it copies no more than 4 or 5 GB/s, and with
//! many connections at work (several channels, every peer of an all-to-all) everything waits for it. So once it has
//! copied more than 16 KiB in a row, it leaves further messages of connections with several streams to workers, even if
//! these must be woken first.
//!
//! Measured on four H200 with a process for each: an all-to-all of 1 MiB over four ranks takes 0.4 of the time, an
//! all-reduce of 2 MiB 0.38.

use std::cell::Cell;

use crate::engine::schedule::constants::{ENOUGH_COPIED, LATELY_NS, PAGE};
use crate::os::ticks::Ticks;

thread_local! {
    static MINE: Cell<Load> = const { Cell::new(Load { bytes: 0, at: None }) };
}

/// Bytes copied, minus the bytes that have faded since.
#[derive(Debug, Clone, Copy)]
struct Load {
    bytes: u64,
    /// The time of this value.
    at: Option<Ticks>,
}

impl Load {
    /// The bytes that are left: each byte fades within [`LATELY_NS`], counted from the last copy.
    fn after(self, elapsed_ns: u64) -> u64 {
        let left_ns = LATELY_NS.saturating_sub(elapsed_ns);
        (u128::from(self.bytes) * u128::from(left_ns) / u128::from(LATELY_NS)) as u64
    }

    fn now(self, now: Ticks) -> u64 {
        self.at.map_or(0, |at| self.after(now.nanoseconds_since(at)))
    }
}

/// The calling thread has moved `bytes` from or to a socket. Less than a page is not counted: that takes less than a
/// microsecond.
#[inline]
pub(crate) fn copied(bytes: usize) {
    if bytes as u64 >= PAGE {
        // If its thread-local variables are already gone, the thread is about to end.
        let _ = MINE.try_with(|mine| {
            let now = Ticks::now();
            mine.set(Load { bytes: mine.get().now(now) + bytes as u64, at: Some(now) });
        });
    }
}

/// Whether the calling thread has copied so much lately that it should leave the next message to others.
pub(crate) fn is_high() -> bool {
    MINE.try_with(|mine| mine.get().now(Ticks::now()) > ENOUGH_COPIED).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_load_wears_off_evenly_and_is_gone_after_its_time() {
        let load = Load { bytes: 1 << 20, at: None };
        let left: Vec<u64> =
            [0, LATELY_NS / 4, LATELY_NS / 2, LATELY_NS, u64::MAX].map(|after| load.after(after)).into();
        assert_eq!(left, [1 << 20, 3 << 18, 1 << 19, 0, 0]);
        assert_eq!(Load { bytes: u64::MAX, at: None }.after(0), u64::MAX);
    }

    #[test]
    fn one_message_is_no_load_but_several_in_a_row_are_and_only_for_their_thread() {
        std::thread::spawn(|| {
            copied(ENOUGH_COPIED as usize);
            assert!(!is_high());
            // Bytes copied at the same moment add up; if this thread is delayed in between, it tries again.
            let began = Instant::now();
            while !is_high() {
                copied(48 << 10);
                assert!(began.elapsed() < Duration::from_secs(5));
            }
            assert!(!std::thread::spawn(is_high).join().unwrap());
            std::thread::sleep(Duration::from_nanos(2 * LATELY_NS));
            assert!(!is_high());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn short_messages_never_count() {
        std::thread::spawn(|| {
            (0..1000).for_each(|_| copied(PAGE as usize - 1));
            assert!(!is_high());
        })
        .join()
        .unwrap();
    }
}
