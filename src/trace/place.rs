//! Where a record of the ring lies.

/// Shards in a ring: more than the proxy threads of a node's worth of devices in one process.
pub(crate) const SHARDS: usize = 16;

/// How many bits of a position [`crate::trace::key`] keeps; at a million events a second it lasts for 52 days.
pub(crate) const POSITION_BITS: u32 = 42;

/// Where a record went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Which shard.
    pub shard: usize,
    /// Its running number there.
    pub position: u64,
}
