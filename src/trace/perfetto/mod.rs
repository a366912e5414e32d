//! The trace: records become Perfetto's track events.
//!
//! [`Emitter`] takes records in causal order and writes begins and ends as they come. So the file of a process that was
//! killed, or hangs, shows its last events. [`read`] goes the other way, for `towline trace`.
//!
//! Nothing here talks to NCCL or to threads: records in, packets out.

mod calls;
mod emit;
pub mod fields;
pub mod file;
mod packets;
pub mod proto;
pub mod read;
mod tracks;
mod wire;

pub(crate) use emit::{Emitter, ProcessInfo, WALL_OFFSET};

/// Mixes two numbers into one that looks random (splitmix64's finish).
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A text as a number, the same in every process.
pub(crate) fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Categories of the instants that describe the file rather than an event.
pub mod category {
    /// Once per file: which process, on which host.
    pub(crate) const PROCESS: &str = "towline.process";
    /// Once per communicator: its id, name and ranks.
    pub const COMM: &str = "towline.communicator";
    /// A rail of a connection: the interface that it is. Once per connection, direction and rail.
    pub(crate) const INTERFACE: &str = "towline.interface";
    /// A phase of a ProxyStep; the slice's name is the state's.
    pub(crate) const PHASE: &str = "towline.phase";
    /// Something that happens within an event; the instant's name is the state's.
    pub(crate) const STATE: &str = "towline.state";
    /// Each second while a communicator exists: the process runs, and its profiler writes.
    pub(crate) const HEARTBEAT: &str = "towline.heartbeat";
    /// Older parts of the trace were removed, since the disk was full.
    pub(crate) const MADE_ROOM: &str = "towline.made_room";
    /// At most once, the last packet: what happened later is not in the file.
    pub(crate) const CUT: &str = "towline.cut";
}
