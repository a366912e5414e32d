//! The sizes and times that steer which thread moves what, each with its unit and its reason. `docs/dev/decisions.md`
//! gives the time that was measured without each mechanism.

use std::time::Duration;

// Threads.

/// How long a worker polls for more work before it sleeps. Waking a sleeping processor costs 5 to 50 µs, most in
/// virtual machines, and the next chunk of a message usually follows at once. With long messages, polling for 300 µs
/// instead moved no more data and used twice the processor time.
pub(crate) const HOT: Duration = Duration::from_micros(50);

/// The same while a connection's messages are shorter than [`CHUNK_MAX`] and at most [`FEW`] are under way. Each
/// message is a few chunks, the next message follows when a GPU has done its part, and waking workers would take most
/// of the time. With longer messages the next chunk follows at once, or there is time to sleep. Measured on two H200:
/// all-reduces of 256 KiB take 0.9 of the time, of 1 MiB 0.96; polling three times as long gains nothing more.
///
/// A polling worker yields its processor now and then. Without that, longer polling made four processes with a GPU each
/// slower. All-reduces of 512 KiB took 0.84 ms, 1.9 ms and 3.7 ms with 0.25, 1 and 4 ms, although half of the 64
/// processors were idle.
pub(crate) const HOT_BETWEEN: Duration = Duration::from_micros(250);

/// With more messages than this under way the wire is the limit, not the GPU, and [`HOT`] is enough for messages below
/// [`CHUNK_MAX`] too. That takes 0.78 to 0.83 of the processor time for `sendrecv` and `alltoall` of 64 MiB at 10 and
/// 25 Gb/s. With half as many, operations of 2 MiB took 1.07 times as long on the loopback.
///
/// While one stream carries the messages of a full network (`schedule::spread`), and NCCL has more requests than this
/// open, workers do not poll at all: the same operations take the same time with 0.5 to 0.7 of the processor time. When
/// they did not poll with fewer requests either, operations of 32 and 128 KiB took 1.2 to 1.5 times as long.
pub(crate) const FEW: usize = 4;

/// A worker that has been inactive for this many nanoseconds, and does not sleep, is late. Moving a chunk takes less.
pub(crate) const LATE: u64 = 20_000;

/// Bytes that one run of a stream may send before the other streams of the same worker get their turn.
pub(crate) const SEND_SHARE: usize = CHUNK_MAX as usize;

/// Bytes that one run of a stream may read before the other streams of the same worker get their turn.
pub(crate) const RECEIVE_SHARE: usize = 2 * STREAM_WINDOW as usize;

// Messages that NCCL's thread sends itself.

/// Messages up to this many bytes are always sent by the caller's own thread: a hand-over takes as long. With 8 KiB,
/// all-reduces of 8 KiB took 1.1 to 1.2 times as long.
pub(crate) const OWN_MAX: u64 = 16 << 10;

/// Messages up to this many bytes are left to workers only when NCCL's thread has copied much lately
/// (`schedule::load`). The thread serves all channels of a GPU and copies about 5 GB/s. Longer ones are left to a
/// worker that is awake, too. If the shorter ones were always left to it as well, operations of 64 and 128 KiB took up
/// to 1.2 times as long. If they never were, all-gathers of 128 KiB took 1.2 times as long, and of 512 KiB over four
/// channels (NCCL 2.18 and 2.19) 1.7 times.
pub(crate) const INLINE_MAX: u64 = 32 << 10;

/// For how many nanoseconds the bytes that NCCL's thread has copied count, with falling weight.
pub(crate) const LATELY_NS: u64 = 100_000;

/// From this many recent bytes on the thread has copied much: of messages that arrive together, it sends the first and
/// workers the rest. With 48 KiB, all-gathers of 128 KiB took 1.07 times as long.
pub(crate) const ENOUGH_COPIED: u64 = 16 << 10;

// Chunks of a message, and how many streams take them.

/// The smallest chunk of a split message in bytes. At 7 GB/s it takes about 5 µs on each side, against about 2 µs for
/// the system calls around it. With twice that, all-reduces of 256 KiB, which are messages of 128 KiB, took 1.1 times
/// as long. For this many bytes a worker is woken, too, although that takes 5 to 50 µs. With 64 KiB for each worker,
/// all-reduces of 256 KiB to 2 MiB took 1.05 to 1.2 times as long. With 256 KiB, those of 8 MiB took 1.4 times as long
/// (`docs/dev/decisions.md`).
pub(crate) const CHUNK_MIN: u64 = 32 << 10;

/// The largest chunk in bytes: NCCL's Simple-protocol step with the default NCCL_BUFFSIZE.
pub(crate) const CHUNK_MAX: u64 = 512 << 10;

/// A message is cut into about this many chunks at most, unless they would be longer than [`CHUNK_MAX`].
pub(crate) const MOST_SHARES: u64 = 6;

/// Chunks are cut at multiples of this many bytes, so that each side copies whole pages. It is also the least that
/// counts as a thread's load (`schedule::load`).
pub(crate) const PAGE: u64 = 4096;

// Whether one further stream carries long messages, or all (`schedule::spread`).

/// Bytes of a stream after which it measures the queue on its path. That takes two microseconds.
pub(crate) const SAMPLE_BYTES: u64 = 4 << 20;

/// Samples of all streams between two decisions: about one for each further stream of two connections with four
/// each. At 10 Gb/s they take 27 ms.
pub(crate) const SAMPLES: u32 = 8;

/// A network is full when packets wait this long. Measured under NCCL's operations: 0.18 to 1.2 ms on full networks of
/// 10 and 25 Gb/s; 0.02 to 0.13 ms on networks up to 100 Gb/s where the hosts were the limit.
pub(crate) const FULL_NETWORK_DELAY: Duration = Duration::from_micros(150);

/// Decisions for which a trial of one stream holds at most. A first success holds for a quarter of that, a first
/// failure for one decision; each further one of its kind twice as long. When all streams come back and fill the queue,
/// that costs the time of two or three decisions: six operations of sendrecv of 64 MiB at 25 Gb/s, which are twelve
/// decisions, took 1.17 to 1.28 times as long.
pub(crate) const TRIAL_PERIOD: u32 = 256;

// How many bytes a stream may have on the way.

/// Unacknowledged bytes per stream, at most. Socket writability hides a slow rail behind megabytes of kernel buffer;
/// this limit is what makes a slow stream take fewer chunks. Streams that lag behind have less, long paths have more
/// (`tcp::window`).
pub(crate) const STREAM_WINDOW: u64 = 2 << 20;

/// The same over the longest paths. With it a stream may carry 84 MB/s over a round trip of 200 ms. There the kernel's
/// own buffers (`net.ipv4.tcp_wmem`, `net.ipv4.tcp_rmem`) are the limit, as they are for plain TCP.
pub(crate) const STREAM_WINDOW_FAR: u64 = 16 << 20;

/// Up to this round trip in microseconds a stream has [`STREAM_WINDOW`], which then is 200 MB/s at least.
pub(crate) const NEAR_US: u64 = 10_000;

/// The window in percent of what the stream delivers while the connection delivers one full window for each stream.
/// With 200, chunks on a stream of a tenth held up an eight-rail connection by 3 to 10 % (16 MiB messages, 8 of them
/// outstanding). With 125 they held it up by 0 to 2 %.
pub(crate) const LAG_PERCENT: u64 = 125;

/// The smallest window in bytes: the smallest chunk on the way and some behind it.
pub(crate) const WINDOW_MIN: u64 = 4 * CHUNK_MIN;

// Streams that are slow.

/// The time that sleeping threads at both ends may add to the time of a chunk.
pub(crate) const WAKING: Duration = Duration::from_micros(250);

/// One byte per nanosecond, as a pace. A stream that is as fast is not slow, however fast others are.
pub(crate) const FAST: u64 = 1024;

/// A stream is slow if a byte takes this many times as long as on the best stream. Streams that share a path evenly
/// differ by less, and so do rails of 10 and 40 Gbit/s.
pub(crate) const SLOW: u64 = 8;

/// The share of its pace that is taken off a slow stream each time that a message or a chunk is not left to it. After
/// several hundred times the stream is tried again.
pub(crate) const FORGET: u64 = 256;

// Acknowledgements.

/// Frames of a stream that the receiver may take in before it acknowledges, when no send waits.
pub(crate) const ACK_EVERY: u64 = 32;

/// Bytes that a stream may take before one of its chunks requests an acknowledgement, if the sender otherwise waits for
/// whole messages only. The rate of a stream must be measured from time to time (`tcp::window`).
pub(crate) const ACK_BYTES: u64 = STREAM_WINDOW / 4;

/// Frames after which a sender that has missed an acknowledgement polls for it again. A poll that finds nothing takes
/// 0.4 µs.
pub(crate) const POLL_EVERY: u64 = 8;
