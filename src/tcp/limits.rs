//! What the two ends of a TCP connection allow each other, each size with its unit and its reason. What steers threads and
//! streams is in [`schedule`](crate::engine::schedule).

use std::time::Duration;

use crate::engine::request::{MAX_PARTS, SLOTS};
use crate::engine::schedule::constants::{CHUNK_MAX, CHUNK_MIN, INLINE_MAX, STREAM_WINDOW_FAR};
use crate::session::frame::MAX_STREAMS;

/// Messages up to this many bytes travel eagerly, without waiting for the receiver. 64 KiB is the slot size of
/// NCCL's LL protocol with default buffers, so no LL transfer ever waits for a clear-to-send.
pub(crate) const EAGER_MAX: u64 = 64 << 10;

/// Bytes of eager messages that may be on the way or waiting for their receive, per connection. Eight full LL
/// slots: what NCCL itself keeps in flight (NCCL_STEPS).
pub(crate) const EAGER_WINDOW: u64 = 8 * (EAGER_MAX + MESSAGE_COST);

/// The same over long paths, where neither a clear-to-send nor an acknowledgement is waited for if it can be avoided: NCCL's
/// Simple-protocol step travels eagerly, too.
pub(crate) const EAGER_MAX_FAR: u64 = CHUNK_MAX;

/// And this much of it may be under way: over 200 ms, 80 MB/s. It takes the receiver's memory only if receives are
/// late.
pub(crate) const EAGER_WINDOW_FAR: u64 = STREAM_WINDOW_FAR;

/// From this round trip on a path is long: [`EAGER_WINDOW`] would carry less than 5 Gbit/s, and a lost packet would
/// hold up everything on the one stream that short messages use.
pub(crate) const FAR: Duration = Duration::from_micros(900);

/// Bytes that the kernel accepts for a stream over a long path and cannot send yet. Without a limit the first stream
/// takes all data, and the others, whose congestion windows grow only with what they carry, stay slow for seconds.
pub(crate) const UNSENT_MAX_FAR: u32 = 128 << 10;

/// What an eager message costs of the window beyond its bytes, so that empty messages are bounded too.
pub(crate) const MESSAGE_COST: u64 = 256;

/// Messages up to this many bytes are copied for a possible resend, and their send is done as soon as the kernel took them,
/// where a connection has one stream, so on small machines: a copy of 64 KiB that the processor has just read takes about
/// 3 µs, while an acknowledgement costs the receiver a system call before it can go on, and the sender one for each look
/// whether it has come.
pub(crate) const REPLAY_MAX: u64 = EAGER_MAX;

/// The same where a connection has workers: all that NCCL's thread sends itself. What workers send is done when it is
/// acknowledged, since an acknowledgement then delays no message, and a stream whose acknowledgements come at once has nothing
/// on the way when the next message comes, so that this finds a worker awake.
pub(crate) const REPLAY_BESIDE_WORKERS: u64 = INLINE_MAX;

/// Of these, the shortest are copied before they are sent, behind room for the header: one piece for the kernel, and
/// their send is done before the system call. Together with the header still a small object for the allocator.
pub(crate) const COPY_FIRST_MAX: u64 = 960;

/// Bytes of credit after which a sender polls for acknowledgements that it has not read, as
/// [`POLL_EVERY`](crate::engine::schedule::constants::POLL_EVERY) does in frames.
pub(crate) const POLL_BYTES: u64 = EAGER_WINDOW / 16;

/// Receives of a tag that may be posted beyond its oldest unfinished one: every slot of a connection with all its
/// parts.
pub(crate) const MAX_POSTED: u64 = (SLOTS * MAX_PARTS) as u64;

/// Messages whose receives are not posted yet, on the whole connection: a staging window full of empty ones, and one
/// that waits for its receive in each slot of the sender.
pub(crate) const MAX_EARLY: u64 = max_early(EAGER_WINDOW);

/// The same with another window.
pub(crate) const fn max_early(window: u64) -> u64 {
    window / MESSAGE_COST + SLOTS as u64
}

/// How far the newest message of a tag may be ahead of its oldest unfinished one.
pub(crate) const MAX_AHEAD: u64 = MAX_POSTED + MAX_EARLY;

/// Ranges of a message's bytes with gaps between them, at most: a gap is a chunk that is under way on a stream, and as many as
/// fit the windows of all streams are the most of an honest sender. Twice as many, so that another release may send shorter ones.
pub(crate) const MAX_RANGES: usize = 2 * MAX_STREAMS * (STREAM_WINDOW_FAR / CHUNK_MIN) as usize;

/// While nothing more is acknowledged the close of a sender waits for `TOWLINE_PEER_TIMEOUT`, and at least this long when a path
/// may have failed at that moment: until that is noticed, and what was on it has been resent. That takes 3 s, and as
/// long as all paths are down. All closes towards a peer process that does not answer share this time. A receiver gives a
/// sender that has said goodbye the same time to resend what it lost.
pub(crate) const CLOSE_RECOVERY: Duration = Duration::from_secs(20);
