//! The contexts and event handles that NCCL keeps for us: numbers, not pointers.
//!
//! NCCL passes them back at any time: after an abort, from a thread that missed a `finalize`, even from another
//! process's memory. The last happens when a ProxyOp that NCCL proxies for a neighbour carries the neighbour's context
//! and parents. A number cannot dangle. Each carries a *stamp* drawn at random per process, so that another process's
//! key is recognised even where process ids mean nothing (two containers, each with its pid 1).

use super::place::{POSITION_BITS, Place, SHARDS};

/// Set in event keys under which nothing is recorded: of events that only the chained profiler wants, and of those that
/// stand for their parents.
const SILENT: u64 = 1 << 47;

/// Set in the keys of events whose updates carry [`crate::nccl::net_event::NetEvent`].
const OWN_NET: u64 = 1 << 46;

const STAMP_SHIFT: u32 = 48;

/// The random number that marks this process's keys; never 0, so no key is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp(u16);

impl Stamp {
    /// A fresh stamp.
    pub(crate) fn random() -> Self {
        let mut bytes = [0; 2];
        // Without randomness the pid serves: neighbours on one host still differ.
        let number = match getrandom::fill(&mut bytes) {
            Ok(()) => u16::from_ne_bytes(bytes),
            Err(_) => std::process::id() as u16,
        };
        Self(number.max(1))
    }

    /// The context of the `serial`-th communicator (from 1).
    pub(crate) fn context(self, serial: u64) -> u64 {
        u64::from(self.0) << STAMP_SHIFT | serial
    }

    /// The handle of the event whose start is at `place`.
    #[inline]
    pub(crate) fn event(self, place: Place, own_net: bool) -> u64 {
        let own = if own_net { OWN_NET } else { 0 };
        u64::from(self.0) << STAMP_SHIFT | own | (place.shard as u64) << POSITION_BITS | place.position
    }

    /// The handle of an event that only the chained profiler wants.
    pub(crate) fn chained(self, number: u64, own_net: bool) -> u64 {
        let own = if own_net { OWN_NET } else { 0 };
        u64::from(self.0) << STAMP_SHIFT | SILENT | own | (number & (OWN_NET - 1))
    }

    /// Whether `key` was made with this stamp.
    #[inline]
    pub(crate) fn made(self, key: u64) -> bool {
        key >> STAMP_SHIFT == u64::from(self.0)
    }
}

/// Whether updates of this event carry a [`crate::nccl::net_event::NetEvent`].
#[inline]
pub(crate) fn is_own_net(event: u64) -> bool {
    event & OWN_NET != 0
}

/// Whether nothing is recorded of this event.
#[inline]
pub(crate) fn is_silent(event: u64) -> bool {
    event & SILENT != 0
}

/// The handle of an event of which nothing is recorded, and whose children become its parent's.
#[inline]
pub(crate) fn stand_in(parent: u64) -> u64 {
    parent | SILENT
}

/// The event that `parent` replaces, or itself. Not for keys of [`Stamp::chained`].
#[inline]
pub(crate) fn stood_for(parent: u64) -> u64 {
    parent & !SILENT
}

/// The shard of the ring that the event's start went through.
#[inline]
pub(crate) fn shard(event: u64) -> usize {
    (event >> POSITION_BITS) as usize & (SHARDS - 1)
}

/// The event's number within its process, small enough for a trace; 0 stays 0.
pub(crate) fn compact(event: u64) -> u64 {
    if event == 0 {
        return 0;
    }
    let position = event & ((1 << POSITION_BITS) - 1);
    (position + 1) * SHARDS as u64 + shard(event) as u64
}

/// The running number in a context.
pub(crate) fn serial(context: u64) -> u64 {
    context & ((1 << STAMP_SHIFT) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_never_null_and_tell_their_process() {
        let (ours, theirs) = (Stamp(7), Stamp(8));
        let key = ours.event(Place { shard: 15, position: (1 << POSITION_BITS) - 1 }, false);
        assert_eq!(shard(key), 15);
        assert!(ours.made(key) && !theirs.made(key) && !is_silent(key) && !is_own_net(key));
        assert!(is_own_net(ours.event(Place { shard: 0, position: 0 }, true)));
        assert!(is_silent(ours.chained(5, false)) && !is_own_net(ours.chained(u64::MAX, false)));
        assert!(is_silent(ours.chained(5, true)) && is_own_net(ours.chained(5, true)));
        assert!(is_silent(stand_in(key)) && stood_for(stand_in(key)) == key && stood_for(key) == key);
        assert_eq!(serial(ours.context(9)), 9);
        assert_ne!(Stamp::random().event(Place { shard: 0, position: 0 }, false), 0);
    }
}
