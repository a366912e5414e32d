//! The sizes that steer the TCP backend, each with its unit and its reason.

use std::time::Duration;

use crate::engine::request::{MAX_PARTS, SLOTS};
use crate::session::frame::MAX_STREAMS;

/// Messages up to this many bytes travel eagerly, without waiting for the receiver. 64 KiB is the slot size of
/// NCCL's LL protocol with default buffers, so no LL transfer ever waits for a clear-to-send.
pub const EAGER_MAX: u64 = 64 << 10;

/// Bytes of eager messages that may be on the way or waiting for their receive, per connection. Eight full LL
/// slots: what NCCL itself keeps in flight (NCCL_STEPS).
pub const EAGER_WINDOW: u64 = 8 * (EAGER_MAX + MESSAGE_COST);

/// The same over long paths, where neither a clear-to-send nor an acknowledgement is waited for if it can be avoided: NCCL's
/// Simple-protocol step travels eagerly, too.
pub const EAGER_MAX_FAR: u64 = CHUNK_MAX;

/// And this much of it may be under way: over 200 ms, 80 MB/s. It takes the receiver's memory only if receives are
/// late.
pub const EAGER_WINDOW_FAR: u64 = 16 << 20;

/// From this round trip on a path is long: [`EAGER_WINDOW`] would carry less than 5 Gbit/s, and a lost packet would
/// hold up everything on the one stream that short messages use.
pub const FAR: Duration = Duration::from_micros(900);

/// Bytes that the kernel accepts for a stream over a long path and cannot send yet. Without a limit the first stream
/// takes all data, and the others, whose congestion windows grow only with what they carry, stay slow for seconds.
pub const UNSENT_MAX_FAR: u32 = 128 << 10;

/// What an eager message costs of the window beyond its bytes, so that empty messages are bounded too.
pub const MESSAGE_COST: u64 = 256;

/// Messages up to this many bytes are copied for a possible resend, and their send is done as soon as the kernel took them,
/// where a connection has one stream, so on small machines: a copy of 64 KiB that the processor has just read takes about
/// 3 µs, while an acknowledgement costs the receiver a system call before it can go on, and the sender one for each look
/// whether it has come.
pub const REPLAY_MAX: u64 = EAGER_MAX;

/// The same where a connection has workers: all that NCCL's thread sends itself. What workers send is done when it is
/// acknowledged, since an acknowledgement then delays nobody, and a stream whose acknowledgements come at once has nothing
/// on the way when the next message comes, so that this finds a worker awake.
pub const REPLAY_BESIDE_WORKERS: u64 = INLINE_MAX;

/// Of these, the shortest are copied before they are sent, behind room for the header: one piece for the kernel, and
/// their send is done before the system call. Together with the header still a small object for the allocator.
pub const COPY_FIRST_MAX: u64 = 960;

/// Messages up to this many bytes are always sent by the caller's own thread. Longer ones are left to a worker that is
/// awake, or, when NCCL's thread has copied much lately (`load`), to any worker: the thread serves all channels of a GPU and
/// copies about 5 GB/s. With 16 KiB, operations of 64 and 128 KiB took up to 1.2 times as long: their messages are of 32 KiB.
pub const INLINE_MAX: u64 = 32 << 10;

/// How many nanoseconds the bytes that NCCL's thread has copied count, with falling weight.
pub const LATELY_NS: u64 = 100_000;

/// This many recent bytes are much: one message of the longest that it sends itself does not reach it, or not for long.
/// Twice and half this value made no visible difference on two or four GPUs.
pub const ENOUGH_COPIED: u64 = 48 << 10;

/// Shorter copies are not counted: they take less than a microsecond.
pub const WORTH_COUNTING: usize = 4 << 10;

/// While the messages of a connection are shorter than this many bytes, its workers poll longer for more work: each
/// message is a few chunks, and waking workers would take most of its time. Of longer ones the next chunk follows at
/// once, or there is time to sleep.
pub const BRIEF_MAX: u64 = 512 << 10;

/// The smallest chunk of a split message in bytes. At 7 GB/s it takes about 5 µs on each side, against about 2 µs for the
/// system calls around it. With twice that, all-reduces of 256 KiB, which are messages of 128 KiB, took 1.1 times as long.
/// For so much a worker is woken, too, although that takes 5 to 50 µs: all-reduces of 256 KiB to 2 MiB took 1.05 to 1.2 times as
/// long where each was to have 64 KiB, and 8 MiB 1.4 times with 256 KiB (`docs/dev/decisions.md`).
pub const CHUNK_MIN: u64 = 32 << 10;

/// A message is cut into about this many chunks at most, unless they would be longer than [`CHUNK_MAX`].
pub const MOST_SHARES: u64 = 6;

/// The largest chunk in bytes: NCCL's Simple-protocol step with the default NCCL_BUFFSIZE.
pub const CHUNK_MAX: u64 = 512 << 10;

/// Chunks are cut at multiples of this many bytes, so that each side copies whole pages.
pub const PAGE: u64 = 4096;

/// Unacknowledged bytes per stream, at most. Socket writability hides a slow rail behind megabytes of kernel buffer; this
/// limit is what makes a slow stream take fewer chunks. Streams that lag behind have less, long paths have more (`window`).
pub const STREAM_WINDOW: u64 = 2 << 20;

/// The same over the longest paths. With it a stream may carry 84 MB/s over a round trip of 200 ms; the kernel's own buffers
/// (`net.ipv4.tcp_wmem`, `net.ipv4.tcp_rmem`) are the limit there, as they are for plain TCP.
pub const STREAM_WINDOW_FAR: u64 = 16 << 20;

/// Up to this round trip in microseconds a stream has [`STREAM_WINDOW`], which then is 200 MB/s at least.
pub const NEAR_US: u64 = 10_000;

/// Frames of a stream that the receiver may take in before it acknowledges, when no send waits.
pub const ACK_EVERY: u64 = 32;

/// Bytes that a stream may take before one of its chunks requests an acknowledgement, if the sender otherwise waits for
/// whole messages only: the rate of a stream must be measured from time to time (`window`).
pub const ACK_BYTES: u64 = STREAM_WINDOW / 4;

/// Frames after which a sender that has missed an acknowledgement polls for it again. A poll that finds nothing takes
/// 0.4 µs.
pub const LOOK_EVERY: u64 = 8;

/// The same in bytes of credit.
pub const LOOK_BYTES: u64 = EAGER_WINDOW / 16;

/// Receives of a tag that may be posted beyond its oldest unfinished one: every slot of a connection with all its
/// parts.
pub const MAX_POSTED: u64 = (SLOTS * MAX_PARTS) as u64;

/// Messages whose receives are not posted yet, on the whole connection: a staging window full of empty ones, and one
/// that waits for its receive in each slot of the sender.
pub const MAX_EARLY: u64 = max_early(EAGER_WINDOW);

/// The same with another window.
pub const fn max_early(window: u64) -> u64 {
    window / MESSAGE_COST + SLOTS as u64
}

/// How far the newest message of a tag may be ahead of its oldest unfinished one.
pub const MAX_AHEAD: u64 = MAX_POSTED + MAX_EARLY;

/// Ranges of a message's bytes with gaps between them, at most: a gap is a chunk that is under way on a stream, and as many as
/// fit the windows of all streams are the most of an honest sender. Twice as many, so that another release may send shorter ones.
pub const MAX_RANGES: usize = 2 * MAX_STREAMS * (STREAM_WINDOW_FAR / CHUNK_MIN) as usize;

/// While nothing more is acknowledged the close of a sender waits for `TOWLINE_PEER_TIMEOUT`, and at least this long when a path
/// may have failed at that moment: until that is noticed, and what was on it has been resent. That takes 3 s, and as
/// long as all paths are down. All closes towards a peer process that does not answer share this time. A receiver gives a
/// sender that has said goodbye the same time to resend what it lost.
pub const CLOSE_MENDING: Duration = Duration::from_secs(20);
