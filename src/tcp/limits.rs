//! What the two ends of a TCP connection allow each other, each size with its unit and its reason. The sizes that steer
//! threads and streams are in [`schedule`](crate::engine::schedule).

use std::time::Duration;

use crate::engine::request::{MAX_PARTS, SLOTS};
use crate::engine::schedule::constants::{CHUNK_MAX, CHUNK_MIN, STREAM_WINDOW, STREAM_WINDOW_FAR};
use crate::session::frame::MAX_STREAMS;

/// Messages up to this many bytes travel eagerly, without waiting for the receiver. 64 KiB is the slot size of
/// NCCL's LL protocol with default buffers, so no LL transfer ever waits for a clear-to-send.
pub(crate) const EAGER_MAX: u64 = 64 << 10;

/// Bytes of eager messages that may be on the way or waiting for their receive, per connection. Eight full LL
/// slots: what NCCL itself keeps in flight (NCCL_STEPS).
pub(crate) const EAGER_WINDOW: u64 = 8 * (EAGER_MAX + MESSAGE_COST);

/// The same over long paths and full networks, where the sender avoids waiting for a clear-to-send or an
/// acknowledgement: NCCL's Simple-protocol step travels eagerly, too.
pub(crate) const EAGER_MAX_FAR: u64 = CHUNK_MAX;

/// Bytes of eager messages that may be under way over a long path: 80 MB/s at a round trip of 200 ms. They take the
/// receiver's memory only if receives are late.
pub(crate) const EAGER_WINDOW_FAR: u64 = STREAM_WINDOW_FAR;

/// The same where the path is short and the receiver has room for as many as over a long one. While one stream carries
/// the long messages of a full network, this is as much as that stream may have on the way, beside short messages.
pub(crate) const EAGER_WINDOW_FULL: u64 = STREAM_WINDOW + EAGER_WINDOW;

/// Whether a path with this round trip is long. On a long path [`EAGER_WINDOW`] would carry less than 5 Gbit/s. Also, a
/// lost packet would hold up everything on the one stream that short messages use.
pub(crate) fn is_far(round_trip: Duration) -> bool {
    round_trip >= Duration::from_micros(900)
}

/// The window that an eager message takes beyond its bytes, so that empty messages are bounded too.
pub(crate) const MESSAGE_COST: u64 = 256;

/// Of the messages that are copied for a possible resend, those up to this many bytes are copied before they are sent,
/// behind room for the header. The kernel then gets one piece, and the send is done before the system call. With the
/// header, such a copy is still a small object for the allocator.
pub(crate) const COPY_FIRST_MAX: u64 = 960;

/// Receives of a tag that may be posted beyond its oldest unfinished one: every slot of a connection with all its
/// parts.
pub(crate) const MAX_POSTED: u64 = (SLOTS * MAX_PARTS) as u64;

/// The limit for messages whose receives are not posted yet, on the whole connection. It is a staging window full of
/// empty messages, and one message that waits for its receive in each slot of the sender.
pub(crate) const fn max_early(window: u64) -> u64 {
    window / MESSAGE_COST + SLOTS as u64
}

/// How many separate ranges of one message may have begun to arrive. Between two ranges lies at least one chunk that is
/// still under way. All streams' windows together hold `MAX_STREAMS * STREAM_WINDOW_FAR / CHUNK_MIN` of the smallest
/// chunks. The limit is twice that, so that another release may send shorter chunks.
pub(crate) const MAX_RANGES: usize = 2 * MAX_STREAMS * (STREAM_WINDOW_FAR / CHUNK_MIN) as usize;
