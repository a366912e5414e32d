//! The counters of a connection: cheap enough to stay on.
//!
//! Relaxed atomics, one cache line per connection. The log reads them at close, and metrics exporters read them. Of the
//! transport's decisions only `tcp::standstill` depends on them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counters of one connection. All but the byte counts are numbers of events.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Payload bytes moved (first transmissions).
    pub bytes: AtomicU64,
    /// Messages finished.
    pub messages: AtomicU64,
    /// Chunks put on the wire or taken from it.
    pub chunks: AtomicU64,
    /// Chunks resent after a stream died.
    pub resends: AtomicU64,
    /// Times a message had to wait for the receiver's clear-to-send.
    pub stalls_receiver: AtomicU64,
    /// Times a message had to wait for eager credit.
    pub stalls_credit: AtomicU64,
    /// Times a socket was full.
    pub stalls_socket: AtomicU64,
    /// Messages that arrived before their receive was posted.
    pub early: AtomicU64,
    /// Streams that reconnected after a break.
    pub reconnects: AtomicU64,
    /// Queue pairs that were lost.
    pub lost_queue_pairs: AtomicU64,
    /// Frames that arrived damaged, by their checksum or tag.
    pub damaged: AtomicU64,
}

impl Counters {
    /// Adds to a counter that is written under one lock only, which the caller holds: no locked instruction.
    pub(crate) fn count(counter: &AtomicU64, n: u64) {
        counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    /// Adds one to a counter.
    pub(crate) fn bump(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        write!(
            f,
            "{} messages, {} bytes, {} chunks, {} early, stalls: {} receiver {} credit {} socket",
            get(&self.messages),
            get(&self.bytes),
            get(&self.chunks),
            get(&self.early),
            get(&self.stalls_receiver),
            get(&self.stalls_credit),
            get(&self.stalls_socket),
        )?;
        let (resends, reconnects) = (get(&self.resends), get(&self.reconnects));
        if resends + reconnects > 0 {
            write!(f, ", {resends} resends, {reconnects} reconnects")?;
        }
        let lost_queue_pairs = get(&self.lost_queue_pairs);
        if lost_queue_pairs > 0 {
            write!(f, ", {lost_queue_pairs} queue pairs lost")?;
        }
        let damaged = get(&self.damaged);
        if damaged > 0 {
            write!(f, ", {damaged} arrived damaged")?;
        }
        Ok(())
    }
}
