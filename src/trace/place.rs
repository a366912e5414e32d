//! Where a record of the ring lies.

#![allow(unreachable_pub, reason = "tests/models takes this file in and uses what is public")]

/// Shards in a ring: more than the proxy threads of a node's worth of devices in one process.
pub const SHARDS: usize = 16;

/// How many bits of a position [`crate::trace::key`] keeps; at a million events a second it lasts for 52 days.
pub const POSITION_BITS: u32 = 42;

/// Where a record went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which shard.
    pub shard: usize,
    /// Its running number there.
    pub position: u64,
}
