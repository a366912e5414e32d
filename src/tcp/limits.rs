//! The sizes that steer the TCP backend, each with its unit and its reason.

use crate::engine::request::{MAX_PARTS, SLOTS};

/// Messages up to this many bytes travel eagerly, without waiting for the receiver. 64 KiB is the slot size of
/// NCCL's LL protocol with default buffers, so no LL transfer ever waits for a clear-to-send.
pub const EAGER_MAX: u64 = 64 << 10;

/// Bytes of eager messages that may be on the way or waiting for their receive, per connection. Eight full LL
/// slots: what NCCL itself keeps in flight (NCCL_STEPS).
pub const EAGER_WINDOW: u64 = 8 * (EAGER_MAX + MESSAGE_COST);

/// What an eager message costs of the window beyond its bytes, so that empty messages are bounded too.
pub const MESSAGE_COST: u64 = 256;

/// Eager messages up to this many bytes are copied for a possible resend, and their send is done as soon as the
/// kernel took them. Above it the copy costs more than waiting for the acknowledgement does.
pub const REPLAY_MAX: u64 = 16 << 10;

/// The smallest chunk of a split message in bytes. At 7 GB/s it takes about 10 µs, against about 2 µs for the
/// system calls around it.
pub const CHUNK_MIN: u64 = 64 << 10;

/// The largest chunk in bytes: NCCL's Simple-protocol step with the default NCCL_BUFFSIZE.
pub const CHUNK_MAX: u64 = 512 << 10;

/// Unacknowledged bytes per stream. Socket writability hides a slow rail behind megabytes of kernel buffer; this
/// limit is what makes a slow stream take fewer chunks.
pub const STREAM_WINDOW: u64 = 2 << 20;

/// Frames of a stream that the receiver may take in before it acknowledges, when nobody waits.
pub const ACK_EVERY: u64 = 32;

/// Streams of one connection, at most.
pub const MAX_STREAMS: usize = 16;

/// How far the newest message or receive of a tag may be ahead of its oldest unfinished one: every slot of a
/// connection with all its parts, and a staging window full of empty messages.
pub const MAX_AHEAD: u64 = (SLOTS * MAX_PARTS) as u64 + EAGER_WINDOW / MESSAGE_COST;
