//! Poll backoff: when NCCL's thread need not poll the first stream of a connection.
//!
//! NCCL tests each request in a loop, for all channels in turn, thousands of times for one long message. Each poll of an
//! empty socket is a system call, which delays the tests of the other channels' requests. So where the awaited data comes
//! over other streams, which workers serve, only some of the calls poll: what no request waits for (the peer's goodbye, an
//! error, its message about a stream that has ended) may arrive a few calls later.
//!
//! Only a hint: each thread may set it at any time, and a lost count costs one poll more or less.

use std::sync::atomic::{AtomicU32, Ordering};

/// How many calls skip the poll.
#[derive(Debug, Default)]
pub struct Rest(AtomicU32);

impl Rest {
    /// A poll found nothing, and nothing is waited for: the poll may be skipped this many times.
    #[inline]
    pub fn begin(&self, calls: u32) {
        self.0.store(calls, Ordering::Relaxed);
    }

    /// Something is waited for again.
    #[inline]
    pub fn end(&self) {
        if self.0.load(Ordering::Relaxed) > 0 {
            self.0.store(0, Ordering::Relaxed);
        }
    }

    /// Whether this call may skip the poll.
    #[inline]
    pub fn goes_on(&self) -> bool {
        let left = self.0.load(Ordering::Relaxed);
        if left > 0 {
            self.0.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_calls_go_without_a_look() {
        let rest = Rest::default();
        assert!(!rest.goes_on());
        rest.begin(3);
        assert_eq!((0..5).map(|_| rest.goes_on()).collect::<Vec<_>>(), [true, true, true, false, false]);
        rest.begin(3);
        rest.end();
        assert!(!rest.goes_on());
    }
}
