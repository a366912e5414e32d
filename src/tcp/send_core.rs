//! The sending side of the protocol, without sockets, clocks or bytes.
//!
//! A message is posted and becomes ready: at once when it is eager and there is credit, else when the receiver's
//! clear-to-send has arrived. Small messages are eager. Where answers are long in coming, so are those that fit a
//! chunk. The streams that have room cut it into chunks. It ends when every chunk is acknowledged. A chunk on a stream
//! that died stays in doubt until that stream's epoch is fenced. The receiver then reports how many frames it received:
//! these count as acknowledged, and the rest is ready again.
//!
//! Everything here refers to *ranges* of messages. The caller knows where the bytes are, under the same [`Key`].
//!
//! Guarantees: each byte of a message is handed out exactly once per epoch of the stream that took it. It is handed out
//! again only after a fence which shows that it did not arrive. Chunk boundaries are multiples of 128 bytes. A long
//! message that waits for its receive or for credit never holds up small messages behind it, and one that waits for its
//! receive no other tag.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slab::Slab;

use super::delivery::Arrived;
use super::limits::{
    EAGER_MAX, EAGER_MAX_FAR, EAGER_WINDOW, EAGER_WINDOW_FAR, EAGER_WINDOW_FULL, MAX_POSTED, MESSAGE_COST, max_early,
};
use super::window::{Pace, Window};
use crate::engine::request::{SLOTS, too_long};
use crate::engine::schedule::constants::{
    ACK_BYTES, ACK_EVERY, CHUNK_MAX, CHUNK_MIN, INLINE_MAX, MOST_SHARES, PAGE, POLL_EVERY,
};
use crate::engine::schedule::spread::Rate;
use crate::engine::tags::TagOrders;
use crate::os::error::{Error, Result};
use crate::os::ticks::Ticks;
use crate::session::frame::{EAGER, Header, MAX_STREAMS, PROMPT, Type, WHOLE};

/// Names a message from its posting to its end.
pub type Key = usize;

/// The result of posting a message: it is ready, or it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admit {
    /// The first stream can take it now.
    Ready,
    /// Workers can take it now, whole or in chunks, on the other streams; on the first if it is alone.
    ForWorkers,
    /// It is not eager, and the receive is not posted yet.
    AwaitsReceiver,
    /// It is eager, but the receiver's staging window is full.
    AwaitsCredit,
}

/// A chunk that has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Landed {
    /// Its message.
    pub key: Key,
    /// The stream that it took.
    pub index: usize,
    /// Where it begins in the message.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The entry stands for several chunks ([`SendCore::watch_landings`]): the lowest offset, the earliest beginning,
    /// the last stream.
    pub joined: bool,
    /// The message's number.
    pub message: u64,
    /// Its size.
    pub total: u64,
    /// When it was handed out, as passed to [`SendCore::stamp`].
    pub began: Option<Ticks>,
}

impl Landed {
    /// Combines it with the chunks of the same message that arrived before, all of which were stamped.
    fn and(self, before: Option<Self>) -> Self {
        before.map_or(self, |before| Self {
            offset: before.offset.min(self.offset),
            length: before.length + self.length,
            joined: true,
            began: before.began.min(self.began),
            ..self
        })
    }
}

/// A range of a message that a stream must send now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The message.
    pub key: Key,
    /// Where in the message, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub length: u32,
    /// Whether it was sent before, on a stream that died.
    pub again: bool,
    /// Whether nothing waits for its acknowledgement, since the chunk is copied when it has left.
    pub copied: bool,
    /// The header to send before it.
    pub header: Header,
}

struct Message {
    length: u64,
    tag: i32,
    number: u64,
    order: u64,
    /// Sent without clear-to-send, against credit.
    eager: bool,
    /// Bytes handed out to streams (a resend does not count again).
    assigned: u64,
    /// Bytes acknowledged.
    acked: u64,
    /// Chunks handed out without an acknowledgement yet; needed beside the bytes because an empty message has one chunk
    /// of zero bytes.
    flying: u32,
    handed_out: bool,
    /// The chunks that have arrived and are reported at the end.
    joined: Option<Landed>,
}

#[derive(Clone, Copy)]
struct Flight {
    key: Key,
    offset: u64,
    length: u32,
    /// Bytes on the stream when it was handed out, itself included.
    queued: u64,
    /// Bytes that the connection had delivered when the chunk was handed out.
    delivered: u64,
    /// When it was handed out, if that is needed ([`SendCore::stamp`]).
    began: Option<Ticks>,
    /// The same, for the stream's pace ([`SendCore::leaves`]).
    left: Option<Instant>,
}

impl Flight {
    fn new(key: Key, offset: u64, length: u32) -> Self {
        Self { key, offset, length, queued: 0, delivered: 0, began: None, left: None }
    }
}

/// Frames of a stream that the kernel accepted completely, through all its epochs. The thread that holds the stream
/// counts them, without the core: most messages need nothing else when they have left. Anything else must be done
/// before, with the core locked: a counted frame may be acknowledged at once, and its key is free then.
#[derive(Debug, Default)]
pub(crate) struct Written(AtomicU64);

impl Written {
    /// Counts one more. Only one thread does this at a time, so no locked instruction is needed.
    #[inline]
    pub(crate) fn count(&self) {
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// How many there are.
    #[inline]
    pub(crate) fn frames(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

#[derive(Default)]
struct Stream {
    live: bool,
    epoch: u16,
    /// The stream broke, and the receiver has not yet reported how many frames it received.
    unfenced: bool,
    /// Frames handed out.
    sent: u64,
    /// Only frames that the kernel accepted completely can be acknowledged, whatever the peer sends.
    written: Arc<Written>,
    acked: u64,
    /// Those of 16 KiB or more: longer than any packet, so they prove that packets of full size pass.
    long: u64,
    /// Frames that the receiver acknowledged on this stream.
    acked_here: u64,
    /// Frames that the receiver acknowledged on another stream. That acknowledgement may be read before the thread that
    /// holds this stream has counted a frame as [`Written`], although the kernel has taken it. Such a frame does not
    /// count as acknowledged before [`SendCore::settle`]: its message would be over, and another message would have its
    /// key when that thread records the frame.
    claimed: u64,
    /// Bytes handed out since a chunk requested a prompt acknowledgement.
    unrequested: u64,
    flights: VecDeque<Flight>,
    bytes: u64,
    window: Window,
    pace: Pace,
}

impl Stream {
    fn has_room(&self) -> bool {
        self.bytes < self.window.bytes()
    }
}

/// The sending side of one connection.
pub struct SendCore {
    messages: Slab<Message>,
    posted: u64,
    tags: TagOrders,
    /// Receives that were posted before their send: capacity by (tag, order).
    cleared: HashMap<(i32, u64), u64>,
    /// Messages that wait for their receive.
    waiting: HashMap<(i32, u64), Key>,
    /// Eager messages that wait for credit, in posting order: the short ones, and those longer than [`EAGER_MAX`],
    /// which short ones pass.
    no_credit: [VecDeque<Key>; 2],
    /// Short messages that are ready.
    short: VecDeque<Key>,
    /// Long messages that are ready; the front one is being cut.
    long: VecDeque<Key>,
    /// Chunks to send again.
    again: VecDeque<Flight>,
    credit_used: u64,
    credit_returned: u64,
    /// Frames sent on the first stream, and bytes of credit used, when [`SendCore::should_read_acks`] last returned
    /// true.
    at_last_read: (u64, u64),
    streams: Vec<Stream>,
    /// Connected streams beyond the first.
    others: u64,
    /// Bytes acknowledged on all streams.
    delivered: u64,
    /// Keep messages until they are acknowledged, so that they can be sent again.
    recovery: bool,
    /// Each chunk is acknowledged by itself.
    each: bool,
    /// Chunks that have arrived, for a caller that wants them ([`SendCore::watch_landings`]).
    landed: Option<Vec<Landed>>,
    /// Whether the chunks of a message are reported as one.
    joins: bool,
    /// The number of streams that were last started for a long message: chunks are cut for them.
    engaged: u64,
    /// Streams, a bit each, that must check what is ready ([`SendCore::take_roomy`]).
    roomy: u32,
    /// The one further stream that carries long messages. None: all do.
    carrier: Option<usize>,
    /// The rate that chunks of further streams have measured since [`SendCore::take_rate`].
    rate: Rate,
    /// The change of the process's streams after which chunks count for it, and when this connection learned of it.
    rate_since: Option<(u32, Instant)>,
    /// How many messages had been posted when the last short one was.
    last_short: Option<u64>,
    /// The receiver has reported that it has everything, and has closed.
    settled: bool,
    /// The path's round trip when the connection was made.
    round_trip: Duration,
    /// The path is long: no message that fits a chunk is split, and its send ends when it has left.
    far: bool,
    /// The peer accepts longer eager messages, and more of them.
    peer_has_room: bool,
}

impl SendCore {
    /// A connection without streams yet.
    pub fn new(recovery: bool) -> Self {
        Self {
            messages: Slab::with_capacity(16),
            posted: 0,
            tags: TagOrders::default(),
            cleared: HashMap::new(),
            waiting: HashMap::new(),
            no_credit: Default::default(),
            short: VecDeque::new(),
            long: VecDeque::new(),
            again: VecDeque::new(),
            credit_used: 0,
            credit_returned: 0,
            at_last_read: (0, 0),
            streams: Vec::new(),
            others: 0,
            delivered: 0,
            recovery,
            each: false,
            landed: None,
            joins: false,
            engaged: MAX_STREAMS as u64,
            roomy: 0,
            carrier: None,
            rate: Rate::default(),
            rate_since: None,
            last_short: None,
            settled: false,
            round_trip: Duration::ZERO,
            far: false,
            peer_has_room: false,
        }
    }

    /// The path is long ([`is_far`](super::limits::is_far)), so the sender avoids waiting for a round trip: for the
    /// receive, for credit, and for acknowledgements. To be called before anything is posted.
    pub(crate) fn go_far(&mut self) {
        self.far = true;
    }

    /// The peer accepts as many eager messages as over a long path ([`FEATURE_FAR`]). To be called before anything is
    /// posted.
    ///
    /// [`FEATURE_FAR`]: crate::session::handshake::FEATURE_FAR
    pub fn set_peer_has_room(&mut self) {
        self.peer_has_room = true;
    }

    /// Whether the receiver's answers are long in coming: the path is long, or they wait in the queues of a full
    /// network ([`Spread`](crate::engine::schedule::spread::Spread)).
    fn answers_are_late(&self) -> bool {
        self.far || self.carrier.is_some()
    }

    /// The longest message that travels eagerly.
    fn eager_max(&self) -> u64 {
        if self.peer_has_room && self.answers_are_late() { EAGER_MAX_FAR } else { EAGER_MAX }
    }

    /// How many bytes of eager messages may be on the way.
    fn eager_window(&self) -> u64 {
        match self.peer_has_room {
            true if self.far => EAGER_WINDOW_FAR,
            true => EAGER_WINDOW_FULL,
            false => EAGER_WINDOW,
        }
    }

    /// How many are expected to be.
    fn usual_credit(&self) -> u64 {
        if self.answers_are_late() { self.eager_window() } else { EAGER_WINDOW }
    }

    /// Sets how far away the receiver is. The windows of streams that are connected from now on depend on it.
    pub(crate) fn set_round_trip(&mut self, round_trip: Duration) {
        self.round_trip = round_trip;
    }

    /// From now on each chunk's acknowledgement is requested at once, not only that of a whole message: it then
    /// measures that stream alone, which matters when streams use different rails.
    pub(crate) fn acknowledge_each(&mut self) {
        self.each = true;
    }

    /// From now on [`SendCore::take_landed`] returns which chunks have arrived. If it `joins` them, all of a message's
    /// chunks are one entry, when the last has arrived. Only stamped chunks are joined, and a resent chunk is an entry
    /// of its own.
    pub(crate) fn watch_landings(&mut self, joins: bool) {
        self.landed.get_or_insert_default();
        self.joins = joins;
    }

    /// The chunk that stream `index` was given last began now.
    pub(crate) fn stamp(&mut self, index: usize, now: Ticks) {
        if let Some(flight) = self.streams[index].flights.back_mut() {
            flight.began = Some(now);
        }
    }

    /// The chunk that stream `index` was given last leaves now. The time it takes is measured, unless it is too short
    /// to be meaningful.
    #[inline]
    pub(crate) fn leaves(&mut self, index: usize, now: Instant) {
        if let Some(flight) = self.streams[index].flights.back_mut()
            && u64::from(flight.length) >= CHUNK_MIN
        {
            flight.left = Some(now);
        }
    }

    /// The receiver has acknowledged, on stream `index` itself, `frames` frames of it. To be called before the
    /// acknowledgement counts.
    #[inline]
    pub(crate) fn arrives(&mut self, index: usize, frames: u64, elapsed: impl FnOnce(Instant) -> Duration) {
        let Some(stream) = self.streams.get_mut(index) else { return };
        let last = frames.checked_sub(stream.acked + 1).and_then(|before| stream.flights.get(before as usize));
        if let Some(Flight { queued, length, delivered, left: Some(left), .. }) = last {
            let elapsed = elapsed(*left);
            stream.pace.took(elapsed, *queued);
            if self.rate_since.is_some_and(|(_, since)| *left >= since) {
                self.rate.add(elapsed, self.delivered - delivered + u64::from(*length));
            }
        }
    }

    /// How fast the connection was since the last call, by chunks that left since the last of so many `changes`
    /// ([`Spread::changes`](crate::engine::schedule::spread::Spread::changes)). None in the first call after a change.
    pub(crate) fn take_rate(&mut self, changes: u32) -> Option<Rate> {
        let rate = std::mem::take(&mut self.rate);
        let first = self.rate_since.is_none_or(|(of, _)| of != changes);
        if first {
            self.rate_since = Some((changes, Instant::now()));
        }
        (!first).then_some(rate)
    }

    /// A chunk that has arrived. To be called, until there is none, before messages that are done are dropped.
    pub(crate) fn take_landed(&mut self) -> Option<Landed> {
        self.landed.as_mut()?.pop()
    }

    /// The number of the next message.
    pub(crate) fn next_number(&self) -> u64 {
        self.posted
    }

    /// Stream `index` is connected, in the given epoch.
    pub fn stream_up(&mut self, index: usize, epoch: u16) {
        debug_assert!(index < MAX_STREAMS);
        while self.streams.len() <= index {
            self.streams.push(Stream::default());
        }
        let stream = &mut self.streams[index];
        debug_assert!(stream.flights.is_empty(), "a stream comes back only after its old epoch is fenced");
        // The counts continue through all epochs of the stream, so that a count never needs to name its epoch.
        stream.live = true;
        stream.unrequested = 0;
        stream.unfenced = false;
        stream.epoch = epoch;
        // The stream may reconnect over another rail.
        (stream.window, stream.pace) = (Window::over(self.round_trip), Pace::default());
        self.count_others();
    }

    /// The counter of frames that have left in the stream's present epoch. Its holder counts them, or
    /// [`SendCore::written`] does.
    pub(crate) fn counts(&self, index: usize) -> Arc<Written> {
        Arc::clone(&self.streams[index].written)
    }

    /// Whether a chunk is not acknowledged.
    pub(crate) fn is_under_way(&self) -> bool {
        self.streams.iter().any(|stream| !stream.flights.is_empty())
    }

    /// Whether stream `index` is connected.
    pub(crate) fn is_live(&self, index: usize) -> bool {
        self.streams.get(index).is_some_and(|stream| stream.live)
    }

    /// Whether the receiver has not acknowledged all frames of stream `index`.
    pub(crate) fn in_doubt(&self, index: usize) -> bool {
        self.streams.get(index).is_some_and(|stream| !stream.flights.is_empty())
    }

    /// How many frames of stream `index` have arrived, through all its epochs.
    pub(crate) fn arrived(&self, index: usize) -> Arrived {
        let arrived = |stream: &Stream| Arrived { frames: stream.acked, long: stream.long };
        self.streams.get(index).map_or(Arrived::default(), arrived)
    }

    /// The streams that broke and for whose last epoch the receiver has not reported its count, with that epoch.
    pub(crate) fn unfenced(&self) -> Vec<(usize, u16)> {
        let streams = self.streams.iter().enumerate();
        streams.filter(|(_, stream)| stream.unfenced).map(|(index, stream)| (index, stream.epoch)).collect()
    }

    /// Whether stream `index` was connected and broke.
    pub(crate) fn is_down(&self, index: usize) -> bool {
        self.streams.get(index).is_some_and(|stream| !stream.live)
    }

    /// A new message of `length` bytes. A short one is for the first stream, unless `hand_over` is set and there are
    /// others.
    ///
    /// # Errors
    /// A usage error when the receive that it matches is posted already and is shorter.
    #[inline]
    pub fn post(&mut self, length: u64, tag: i32, hand_over: bool) -> Result<(Key, Admit)> {
        let order = self.tags.next(tag);
        // A receive that is posted already needs no credit, however short the message.
        let cleared = if self.cleared.is_empty() { None } else { self.cleared.remove(&(tag, order)) };
        if let Some(capacity) = cleared {
            check_capacity(length, capacity, tag)?;
        }
        let short = length <= EAGER_MAX;
        let eager = length <= self.eager_max() && cleared.is_none();
        let key = self.messages.insert(Message {
            length,
            tag,
            number: self.posted,
            order,
            eager,
            assigned: 0,
            acked: 0,
            flying: 0,
            handed_out: false,
            joined: None,
        });
        self.posted += 1;
        if short {
            self.last_short = Some(self.posted);
        }
        let queue = usize::from(!short);
        let admit = if cleared.is_none() && !eager {
            self.waiting.insert((tag, order), key);
            Admit::AwaitsReceiver
        } else if eager && !(self.no_credit[queue].is_empty() && self.take_credit(length)) {
            self.no_credit[queue].push_back(key);
            Admit::AwaitsCredit
        } else if !short || hand_over && self.others > 0 {
            self.long.push_back(key);
            Admit::ForWorkers
        } else {
            self.short.push_back(key);
            Admit::Ready
        };
        Ok((key, admit))
    }

    /// The query to send the receiver about a long message at once, if short ones were posted recently. In that case a
    /// receiver of release 0.1 announces receives for long messages only as the answer to a query.
    pub(crate) fn query_at_once(&self, key: Key) -> Option<Header> {
        let lately = self.last_short.is_some_and(|last| self.posted - last <= SLOTS as u64);
        let Message { tag, order, length, .. } = *self.messages.get(key)?;
        let waits = lately && self.waiting.get(&(tag, order)) == Some(&key);
        waits.then(|| Header { tag, order, total: length, ..Header::of(Type::Query, 0) })
    }

    /// Whether a message waits for its receive or for credit.
    pub(crate) fn is_stalled(&self) -> bool {
        !(self.waiting.is_empty() && self.no_credit.iter().all(VecDeque::is_empty))
    }

    /// The queries to send the receiver: messages that wait for their receive or for credit. The answer to both is a
    /// clear-to-send, or the report that the receive is too small.
    pub fn stalled(&self) -> Vec<Header> {
        let keys = self.waiting.values().chain(self.no_credit.iter().flatten());
        keys.map(|key| {
            let Message { tag, order, length, .. } = self.messages[*key];
            Header { tag, order, total: length, ..Header::of(Type::Query, 0) }
        })
        .collect()
    }

    /// Whether there is a chunk that a stream with room could take now.
    #[inline]
    pub(crate) fn has_ready(&self) -> bool {
        !(self.short.is_empty() && self.long.is_empty() && self.again.is_empty())
    }

    /// The receiver has all messages, as it reports: those whose acknowledgements were lost go into `done`. Later
    /// reports about single frames add nothing.
    pub(crate) fn all_received(&mut self, done: &mut Vec<Key>) {
        self.settled = true;
        done.extend(self.messages.iter().map(|(key, _)| key));
        self.messages.clear();
        self.waiting.clear();
        for queue in self.no_credit.iter_mut().chain([&mut self.short, &mut self.long]) {
            queue.clear();
        }
        self.again.clear();
        for stream in &mut self.streams {
            stream.flights.clear();
            stream.bytes = 0;
        }
    }

    /// Whether a thread that sends short messages should read the acknowledgements on the first stream. Sends that are
    /// done at once are not tested again, so without this no call of NCCL would read the credit that the receiver
    /// returns. The credit would seem used up, and each message would request an acknowledgement. The answer is yes
    /// only while more than [`ACK_EVERY`] frames or a quarter of the credit are out. A receiver that is behind returns
    /// little, so it is yes only once in [`POLL_EVERY`] frames, or in a sixteenth of the near credit window.
    #[inline]
    pub(crate) fn should_read_acks(&mut self) -> bool {
        let Some(first) = self.streams.first() else { return false };
        let (frames, used) = (first.sent, self.credit_used);
        let out = frames - first.acked > ACK_EVERY || self.credit_out() > self.usual_credit() / 4;
        let (frames_since, used_since) = (frames - self.at_last_read.0, used - self.at_last_read.1);
        let due = out && (frames_since >= POLL_EVERY || used_since >= EAGER_WINDOW / 16);
        if due {
            self.at_last_read = (frames, used);
        }
        due
    }

    /// Whether nothing is unsent or unacknowledged.
    pub(crate) fn is_idle(&self) -> bool {
        self.messages.is_empty()
    }

    /// The next chunk for stream `index`, or `None` when it has no room or there is nothing for it.
    ///
    /// The first stream carries messages that NCCL's thread sends itself; the others carry longer ones. When
    /// the first stream is alone, or dead, or the path is long, all share the work.
    #[inline]
    pub fn next_chunk(&mut self, index: usize) -> Option<Chunk> {
        let stream = self.streams.get(index).filter(|stream| stream.live)?;
        if !stream.has_room() {
            return None;
        }
        let first_live = self.streams[0].live;
        let (flight, again) = if let Some(flight) = self.again.pop_front() {
            (flight, true)
        } else if (index == 0 || !first_live)
            && let Some(key) = self.short.pop_front()
        {
            (Flight::new(key, 0, self.messages[key].length as u32), false)
        } else if index == 0 && self.others > 0 && !self.far
            || !self.carries_long(index)
            || self.leaves_to_others(index)
        {
            return None;
        } else {
            (self.cut(index)?, false)
        };
        Some(self.fly(index, flight, again))
    }

    /// The next piece of the long messages for stream `index`.
    fn cut(&mut self, index: usize) -> Option<Flight> {
        let most = self.streams[index].window.chunk();
        let &key = self.long.front()?;
        let message = &self.messages[key];
        let rest = message.length - message.assigned;
        // Each chunk costs two system calls, and ever smaller shares of the remaining bytes would be many chunks.
        let share = (message.length / MOST_SHARES).next_multiple_of(PAGE);
        let size = self.chunk_size(self.engaged.clamp(1, self.further_streams())).max(share).min(most);
        // A short message and an eager one are one frame, and a small remainder is not worth a frame of its own.
        let whole =
            message.eager || message.length <= EAGER_MAX || self.answers_are_late() && message.length <= EAGER_MAX_FAR;
        let length = if whole || rest <= (size + size / 2).min(most) { rest } else { size };
        let flight = Flight::new(key, message.assigned, length as u32);
        if length == rest {
            self.long.pop_front();
        }
        Some(flight)
    }

    /// Whether stream `index` carries long messages.
    fn carries_long(&self, index: usize) -> bool {
        self.carrier.is_none_or(|carrier| carrier == index)
    }

    /// From now on `one` further stream carries the long messages, or all do. To be followed by
    /// [`SendCore::take_roomy`].
    pub fn choose_carrier(&mut self, one: bool) {
        if one == self.carrier.is_some() {
            return;
        }
        let (_, best) = self.fastest();
        let fit = |index: &usize| self.is_live(*index) && !self.streams[*index].pace.is_slow(best);
        self.carrier = if one { (1..self.streams.len()).find(fit) } else { None };
        // Whatever is ready has woken others, or not all.
        let carrying = (1..self.streams.len()).filter(|index| self.is_live(*index) && self.carries_long(*index));
        self.roomy |= carrying.fold(0, |bits, index| bits | 1 << index);
    }

    /// How many further streams live, 1 if none does: at most so many share a long message.
    fn further_streams(&self) -> u64 {
        self.others.max(1)
    }

    fn count_others(&mut self) {
        self.others = self.streams.iter().skip(1).filter(|stream| stream.live).count() as u64;
    }

    /// How large a chunk should be: the ready bytes spread over all streams, within bounds. NCCL waits for whole
    /// messages and keeps eight in flight per channel. So each one should be complete early: every stream gets a part
    /// at once.
    fn chunk_size(&self, streams: u64) -> u64 {
        let even = self.ready(4).div_ceil(streams).next_multiple_of(PAGE);
        even.clamp(CHUNK_MIN, CHUNK_MAX)
    }

    /// The streams to start for `bytes` more of long messages, those with the least on the way first, and how many. The
    /// first stream is not among them, unless the path is long and there are others. 0: there is only the first stream.
    ///
    /// Over one rail, one for each smallest chunk under way, or for each [`EAGER_MAX`] where a message travels as one
    /// frame. A stream that is slow comes after all others: most of the message, or all of it, might wait for it.
    /// Several rails are several wires: each takes part, as far as there are chunks. Over a full network only `one`
    /// further stream does ([`Spread`](crate::engine::schedule::spread::Spread)).
    pub(crate) fn engage(&mut self, bytes: u64, one: bool) -> ([u8; MAX_STREAMS], usize) {
        self.choose_carrier(one);
        let (mut order, mut live) = ([0; MAX_STREAMS], 0);
        let first = usize::from(!self.far || self.others == 0);
        let streams = self.streams.iter().enumerate().skip(first);
        for (index, _) in streams.filter(|(index, stream)| stream.live && self.carries_long(*index)) {
            order[live] = index as u8;
            live += 1;
        }
        let stream = |index: &u8| &self.streams[usize::from(*index)];
        let apart = self.each || self.far;
        let (_, best) = self.fastest();
        let lags = |index: &u8| !stream(index).has_room() || !apart && stream(index).pace.is_slow(best);
        order[..live].sort_unstable_by_key(|index| (lags(index), stream(index).bytes, *index));
        if apart {
            // An eager message is one frame.
            let chunks = if bytes <= EAGER_MAX { 1 } else { bytes.div_ceil(self.chunk_size(live.max(1) as u64)) };
            return (order, live.min(chunks as usize));
        }
        let under_way = self.ready(SLOTS) + order[..live].iter().map(|index| stream(index).bytes).sum::<u64>();
        let worth = if bytes <= EAGER_MAX { EAGER_MAX } else { CHUNK_MIN };
        let count = live.min(under_way.div_ceil(worth).max(1) as usize);
        if bytes > EAGER_MAX {
            self.engaged = count as u64;
        }
        for index in &order[count..live] {
            let pace = &mut self.streams[usize::from(*index)].pace;
            if pace.is_slow(best) {
                pace.forget();
            }
        }
        (order, count)
    }

    /// The live stream for long messages that is the fastest, and its pace.
    fn fastest(&self) -> (usize, Pace) {
        let live = self.streams.iter().enumerate().skip(1).filter(|(_, stream)| stream.live);
        live.map(|(index, stream)| (index, stream.pace)).min_by_key(|(_, pace)| *pace).unwrap_or_default()
    }

    /// Whether this stream leaves the ready bytes to the other streams: it is slow, and would take longer for its next
    /// chunk than the others for all bytes. The fastest is then named as one to wake ([`SendCore::take_roomy`]). The
    /// stream that was woken for a message may have become slow since, and no other stream knows of the message.
    fn leaves_to_others(&mut self, index: usize) -> bool {
        let stream = &self.streams[index];
        if index == 0 || self.each || !stream.pace.is_doubtful() || self.long.is_empty() {
            return false;
        }
        let (fastest, best) = self.fastest();
        let others = if self.carrier.is_some() { 1 } else { self.further_streams().saturating_sub(1).max(1) };
        let is_better_left = stream.pace.is_slow(best)
            && stream.pace.time(stream.bytes + CHUNK_MIN) > best.time(self.ready(SLOTS)) / others;
        if is_better_left {
            self.carrier = self.carrier.map(|_| fastest);
            self.roomy |= 1 << fastest;
            // The stream may have stalled once and recovered, and where it is woken for each message nothing else
            // resets its pace.
            self.streams[index].pace.forget();
        }
        is_better_left
    }

    /// Bytes of the next `messages` long messages that are ready and that no stream has taken yet.
    fn ready(&self, messages: usize) -> u64 {
        self.long.iter().take(messages).map(|key| self.messages[*key].length - self.messages[*key].assigned).sum()
    }

    /// How long a message is, in bytes.
    pub(crate) fn length(&self, key: Key) -> u64 {
        self.messages[key].length
    }

    #[inline]
    fn fly(&mut self, index: usize, mut flight: Flight, again: bool) -> Chunk {
        // A worker has time for it, NCCL's thread only over a long path.
        let is_late = self.far || self.carrier == Some(index);
        let credit_low = self.credit_out() > self.usual_credit() / 2;
        let message = &mut self.messages[flight.key];
        if !again {
            message.assigned += u64::from(flight.length);
            message.handed_out = true;
        } else {
            // Its first start times are not valid for this attempt.
            flight.left = None;
            if self.joins {
                flight.began = None;
            }
        }
        message.flying += 1;
        let mut flags = if message.eager { EAGER } else { 0 };
        // This side keeps a copy so that the send can be reported done as soon as the kernel took it. The limit is 64
        // KiB with one stream: the copy takes about 3 µs, and an acknowledgement costs both sides several system calls.
        // It is 32 KiB on the first stream where there are workers. Longer messages wait for the acknowledgement. On a
        // worker's stream that delays no other message, and it empties the stream before the next message comes, which
        // then finds the worker awake.
        let most = if self.others > 0 { INLINE_MAX } else { EAGER_MAX };
        // Where an acknowledgement is long in coming, a copy is cheap beside it.
        let is_whole = u64::from(flight.length) == message.length && message.length <= EAGER_MAX_FAR;
        let kept = index == 0 && message.length <= most || is_late && is_whole;
        let copied = self.recovery && !again && kept;
        // A request waits for the acknowledgement of a chunk that is not copied when it has left, or of all chunks of a
        // split message. Three other cases request a prompt acknowledgement. One is a resend, whose request may wait
        // for nothing else. The others are a stream that has sent much since the last request, and a window or credit
        // that runs low.
        let split = self.recovery && u64::from(flight.length) < message.length;
        let awaited = self.recovery && !copied && (!split || self.each);
        let stream = &mut self.streams[index];
        stream.sent += 1;
        stream.bytes += u64::from(flight.length);
        stream.unrequested += u64::from(flight.length);
        let much = self.recovery && stream.unrequested >= ACK_BYTES;
        let window_low = stream.bytes >= stream.window.bytes() / 2;
        if again || much || window_low || credit_low || awaited {
            flags |= PROMPT;
            stream.unrequested = 0;
        }
        if split {
            flags |= WHOLE;
        }
        (flight.queued, flight.delivered) = (stream.bytes, self.delivered);
        let header = Header {
            flags,
            length: flight.length,
            message: message.number,
            order: message.order,
            offset: flight.offset,
            total: message.length,
            tag: message.tag,
            ..Header::of(Type::Data, stream.epoch)
        };
        stream.flights.push_back(flight);
        Chunk { key: flight.key, offset: flight.offset, length: flight.length, again, copied, header }
    }

    /// The kernel took the whole of the chunk that stream `index` was given last.
    pub fn written(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        stream.written.count();
        debug_assert!(stream.written.frames() <= stream.sent);
    }

    /// The receiver acknowledged: `frames` frames of stream `index` so far, `credit` bytes of the connection's
    /// eager window so far. Messages that are wholly acknowledged go to `done`, and their keys are free again.
    ///
    /// # Errors
    /// A remote error when it acknowledges frames that were never sent.
    pub fn acknowledge(&mut self, index: usize, frames: u64, credit: u64, done: &mut Vec<Key>) -> Result<()> {
        self.take_in(index, frames, done)?;
        self.take_credit_back(credit)
    }

    /// The receiver acknowledged `counts` frames of the streams, in order of their numbers, on any stream. To be
    /// followed by [`SendCore::acknowledge`] for the stream that carried the acknowledgement.
    ///
    /// # Errors
    /// As there.
    pub fn acknowledge_all(&mut self, counts: &[u64], done: &mut Vec<Key>) -> Result<()> {
        if self.settled {
            return Ok(());
        }
        for (index, &frames) in counts.iter().enumerate().filter(|(_, frames)| **frames > 0) {
            let stream = self.streams.get_mut(index).ok_or_else(unknown)?;
            if frames > stream.sent {
                return Err(impossible(index, frames, stream.sent, stream.acked));
            }
            stream.claimed = stream.claimed.max(frames);
            self.settle(index, done);
        }
        Ok(())
    }

    /// Takes frames of stream `index` as acknowledged that were acknowledged on another stream, and that its own thread
    /// has counted as [`Written`] in the meantime. To be called when that thread has counted one. Returns whether there
    /// was any.
    #[inline]
    pub fn settle(&mut self, index: usize, done: &mut Vec<Key>) -> bool {
        let claims = self.streams.get(index).is_some_and(|stream| stream.claimed > stream.acked);
        if claims {
            let stream = &self.streams[index];
            let frames = stream.claimed.min(stream.written.frames());
            // The count arrived together with other streams' frames, so it gives no rate for this stream.
            self.land(index, frames, false, done);
        }
        claims
    }

    fn take_credit_back(&mut self, credit: u64) -> Result<()> {
        if credit > self.credit_used {
            return Err(Error::remote("the peer returned more credit than it was owed"));
        }
        self.credit_returned = self.credit_returned.max(credit);
        self.spend_credit();
        Ok(())
    }

    /// Messages for which there is credit wait no more.
    fn spend_credit(&mut self) {
        for queue in 0..self.no_credit.len() {
            while let Some(&key) = self.no_credit[queue].front()
                && self.take_credit(self.messages[key].length)
            {
                self.no_credit[queue].pop_front();
                self.is_ready(key);
            }
        }
    }

    /// A message that waited for credit waits no more.
    fn is_ready(&mut self, key: Key) {
        if self.messages[key].length <= EAGER_MAX {
            self.roomy |= 1;
            return self.short.push_back(key);
        }
        self.long.push_back(key);
        for (index, _) in self.streams.iter().enumerate().filter(|(_, stream)| stream.live && stream.has_room()) {
            self.roomy |= 1 << index;
        }
    }

    fn take_in(&mut self, index: usize, frames: u64, done: &mut Vec<Key>) -> Result<()> {
        if self.settled {
            return Ok(());
        }
        let stream = self.streams.get_mut(index).ok_or_else(unknown)?;
        let written = stream.written.frames();
        // Another stream may already have reported more.
        if frames > written || frames < stream.acked_here {
            return Err(impossible(index, frames, written, stream.acked_here));
        }
        stream.acked_here = frames;
        self.land(index, frames, true, done);
        Ok(())
    }

    /// The streams, a bit each, that must check what is ready. Those that had no room for it and have room since the
    /// last call. Their own sockets may have reported nothing: frames of one stream are acknowledged on others as well,
    /// and a worker that found no room sleeps. It also names the stream to which a slow stream has left the work.
    #[inline]
    pub(crate) fn take_roomy(&mut self) -> u32 {
        std::mem::take(&mut self.roomy)
    }

    /// The receiver has the first `frames` frames of stream `index`, all of which have left. `timed`: it has just
    /// received them.
    fn land(&mut self, index: usize, frames: u64, timed: bool, done: &mut Vec<Key>) {
        let further = self.further_streams();
        let had_room = self.streams[index].has_room();
        let stream = &mut self.streams[index];
        for _ in stream.acked..frames {
            let flight = stream.flights.pop_front().expect("as many flights as unacknowledged frames");
            stream.bytes -= u64::from(flight.length);
            // Longer than any packet, so it proves that packets of full size pass.
            stream.long += u64::from(flight.length >= 16 << 10);
            if let Some(landed) = &mut self.landed {
                let Flight { key, offset, length, began, .. } = flight;
                let message = &mut self.messages[key];
                let (length, joined, number, total) = (length.into(), false, message.number, message.length);
                let one = Landed { key, index, offset, length, joined, message: number, total, began };
                if self.joins && began.is_some() {
                    message.joined = Some(one.and(message.joined));
                } else {
                    landed.push(one);
                }
            }
            self.delivered += u64::from(flight.length);
            // The time that shorter ones are under way does not show the path's rate.
            if timed && u64::from(flight.length) >= CHUNK_MIN {
                stream.window.delivered(flight.queued, self.delivered - flight.delivered, further);
            }
            let message = &mut self.messages[flight.key];
            message.acked += u64::from(flight.length);
            message.flying -= 1;
            if message.acked == message.length && message.flying == 0 && message.handed_out {
                let Message { joined, .. } = self.messages.remove(flight.key);
                if let Some(landed) = &mut self.landed {
                    landed.extend(joined);
                }
                done.push(flight.key);
            }
        }
        stream.acked = stream.acked.max(frames);
        if !had_room && self.streams[index].has_room() && self.has_ready() {
            self.roomy |= 1 << index;
        }
    }

    /// The receiver posted the `order`-th receive with `tag`. Returns the message that is ready now.
    ///
    /// # Errors
    /// A usage error when the waiting message is longer; a remote error when the peer runs too far ahead.
    pub fn clear_to_send(&mut self, tag: i32, order: u64, capacity: u64) -> Result<Option<Key>> {
        if let Some(key) = self.waiting.remove(&(tag, order)) {
            check_capacity(self.messages[key].length, capacity, tag)?;
            self.long.push_back(key);
            return Ok(Some(key));
        }
        let of_order = |key: &Key| (self.messages[*key].tag, self.messages[*key].order) == (tag, order);
        let take = |queue: &mut VecDeque<Key>| queue.remove(queue.iter().position(of_order)?);
        if let Some(key) = self.no_credit.iter_mut().find_map(take) {
            // Its receive is posted: it needs no credit, and those behind it may have been short of less.
            check_capacity(self.messages[key].length, capacity, tag)?;
            self.messages[key].eager = false;
            self.is_ready(key);
            self.spend_credit();
            return Ok(Some(key));
        }
        let next = self.tags.peek(tag);
        // A clear-to-send has no effect for a message that was short enough to be sent without it.
        if order >= next {
            // A repetition after a lost stream takes no further place.
            let is_full = || self.cleared.len() >= MAX_POSTED as usize && !self.cleared.contains_key(&(tag, order));
            // How far the newest message of a tag may be ahead of its oldest unfinished one.
            let most_ahead = MAX_POSTED + max_early(EAGER_WINDOW);
            if order - next >= most_ahead || is_full() {
                return Err(Error::remote("the peer posted more receives than a connection can hold"));
            }
            self.cleared.insert((tag, order), capacity);
        }
        Ok(None)
    }

    /// Stream `index` broke. Its frames are in doubt until [`SendCore::fenced`]. Returns whether it was live.
    pub fn stream_down(&mut self, index: usize) -> bool {
        let was_live = self.streams.get_mut(index).is_some_and(|stream| {
            stream.unfenced |= stream.live;
            std::mem::take(&mut stream.live)
        });
        // The next `engage` chooses another one.
        self.carrier = self.carrier.filter(|carrier| *carrier != index);
        self.count_others();
        was_live
    }

    /// As [`SendCore::stream_down`], unless the stream has begun another epoch since.
    pub(crate) fn end_epoch(&mut self, index: usize, epoch: u16) -> bool {
        self.epoch(index) == epoch && self.stream_down(index)
    }

    /// The receiver has received `frames` frames of the dead stream and will receive no more: the rest is ready again.
    /// Returns how many chunks that are. A late answer, about an epoch of the stream before the one that ended last,
    /// changes nothing.
    ///
    /// # Errors
    /// As [`SendCore::acknowledge`].
    pub fn fenced(&mut self, index: usize, epoch: u16, frames: u64, done: &mut Vec<Key>) -> Result<usize> {
        if !self.is_down(index) || self.streams[index].epoch != epoch {
            return Ok(0);
        }
        let claimed = self.streams[index].claimed;
        if frames < claimed && !self.settled {
            return Err(impossible(index, frames, claimed, claimed));
        }
        self.take_in(index, frames, done)?;
        let stream = &mut self.streams[index];
        stream.unfenced = false;
        let lost: Vec<Flight> = stream.flights.drain(..).collect();
        stream.bytes = 0;
        stream.sent = frames;
        if index == 0 {
            self.at_last_read.0 = self.at_last_read.0.min(frames);
        }
        // A separate count for the next epoch: a thread that still holds the old one counts bytes that nothing waits
        // for.
        stream.written = Arc::new(Written(AtomicU64::new(frames)));
        for flight in &lost {
            self.messages[flight.key].flying -= 1;
        }
        self.again.extend(&lost);
        Ok(lost.len())
    }

    /// What the messages in flight wait for, in a line for logs.
    pub(crate) fn describe(&self) -> String {
        let streams: Vec<String> = self
            .streams
            .iter()
            .map(|s| format!("{}{}/{}/{}", if s.live { "" } else { "down " }, s.sent, s.written.frames(), s.acked))
            .collect();
        format!(
            "{} messages unfinished: {} wait for the receiver, {} for credit, {} short and {} long ready, {} chunks again; \
             frames handed out/written/acknowledged per stream: {}",
            self.messages.len(),
            self.waiting.len(),
            self.no_credit.iter().map(VecDeque::len).sum::<usize>(),
            self.short.len(),
            self.long.len(),
            self.again.len(),
            streams.join(", "),
        )
    }

    /// Bytes of credit that were used and not returned.
    #[inline]
    pub(super) fn credit_out(&self) -> u64 {
        self.credit_used - self.credit_returned
    }

    /// The epoch of stream `index`.
    pub fn epoch(&self, index: usize) -> u16 {
        self.streams.get(index).map_or(0, |stream| stream.epoch)
    }

    #[inline]
    fn take_credit(&mut self, length: u64) -> bool {
        let cost = length + MESSAGE_COST;
        let most = self.eager_window() - if length > EAGER_MAX { EAGER_WINDOW } else { 0 };
        if self.credit_out() + cost > most {
            return false;
        }
        self.credit_used += cost;
        true
    }
}

#[cold]
fn unknown() -> Error {
    Error::remote("an unknown stream was acknowledged")
}

#[cold]
fn impossible(index: usize, frames: u64, sent: u64, before: u64) -> Error {
    Error::remote(format!(
        "the peer acknowledged {frames} frames of stream {index}, of which {sent} were sent and {before} acknowledged before"
    ))
}

fn check_capacity(length: u64, capacity: u64, tag: i32) -> Result<()> {
    if length > capacity {
        return Err(too_long(length, capacity, tag));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::schedule::constants::STREAM_WINDOW;

    /// A lost stream loses the frames on it, so there are fewer afterwards than at the last check.
    #[test]
    fn a_word_is_due_as_before_when_the_first_stream_has_come_back() {
        let mut core = SendCore::new(true);
        (0..2).for_each(|stream| core.stream_up(stream, stream as u16));
        let send = |core: &mut SendCore, count: u64| {
            for _ in 0..count {
                core.post(8, 0, false).unwrap();
                core.next_chunk(0).expect("there is credit");
                core.written(0);
            }
            core.should_read_acks()
        };
        assert!(!send(&mut core, ACK_EVERY), "the receiver acknowledges nothing yet");
        assert!(send(&mut core, 1));
        assert!(!send(&mut core, POLL_EVERY - 1) && send(&mut core, 1), "not at every message");
        core.end_epoch(0, 0);
        let mut done = Vec::new();
        let lost = core.fenced(0, 0, 3, &mut done).unwrap();
        assert_eq!((lost as u64, done.len()), (ACK_EVERY + 1 + POLL_EVERY - 3, 3));
        while core.next_chunk(1).is_some() {
            core.written(1);
        }
        core.stream_up(0, 1);
        assert!(!send(&mut core, ACK_EVERY) && send(&mut core, POLL_EVERY));
    }

    /// After streams reconnect the receiver repeats all clear-to-sends, also when the sender can keep no more.
    #[test]
    fn a_clear_to_send_that_comes_twice_needs_no_further_place() {
        let mut core = SendCore::new(true);
        for order in 0..MAX_POSTED {
            core.clear_to_send(0, order, 8).expect("there is room");
        }
        for order in [0, MAX_POSTED - 1] {
            core.clear_to_send(0, order, 8).expect("it was said before");
        }
        core.clear_to_send(0, MAX_POSTED, 8).expect_err("one more than a connection can hold");
    }

    /// A connection over a long path with three streams.
    fn far(peer_has_room: bool) -> SendCore {
        let mut core = SendCore::new(true);
        core.set_round_trip(Duration::from_millis(50));
        core.go_far();
        if peer_has_room {
            core.set_peer_has_room();
        }
        (0..3).for_each(|stream| core.stream_up(stream, 0));
        core
    }

    #[test]
    fn over_a_long_path_what_fits_a_chunk_waits_for_no_receive_and_no_acknowledgement() {
        let mut core = far(true);
        for index in [1, 0, 2] {
            assert_eq!(core.post(EAGER_MAX_FAR, 0, true).unwrap().1, Admit::ForWorkers);
            let chunk = core.next_chunk(index).expect("every stream takes part");
            assert!(chunk.copied && u64::from(chunk.length) == EAGER_MAX_FAR && chunk.header.flags & EAGER != 0);
        }
        assert_eq!(core.post(EAGER_MAX_FAR + 1, 0, true).unwrap().1, Admit::AwaitsReceiver);
    }

    #[test]
    fn over_a_long_path_there_is_credit_for_more_and_when_it_comes_back_all_streams_look() {
        let mut core = far(true);
        let mut posted = 0;
        while core.post(EAGER_MAX_FAR, 0, true).unwrap().1 == Admit::ForWorkers {
            posted += 1;
        }
        assert_eq!(
            posted,
            (EAGER_WINDOW_FAR - EAGER_WINDOW) / (EAGER_MAX_FAR + MESSAGE_COST),
            "the rest is for short ones"
        );
        while core.next_chunk(1).is_some() {
            core.written(1);
        }
        while core.next_chunk(2).is_some() {
            core.written(2);
        }
        core.take_roomy();
        core.acknowledge(1, 1, EAGER_MAX_FAR + MESSAGE_COST, &mut Vec::new()).unwrap();
        assert_eq!(core.no_credit[1].len(), 0);
        assert!(core.take_roomy() & 0b11 == 0b11, "the stream that was acknowledged, and the first, which has room");
    }

    /// At 10 Gb/s a clear-to-send waits for a millisecond behind the data of the other direction.
    #[test]
    fn over_a_full_network_what_fits_a_chunk_waits_for_no_receive_while_one_stream_carries_it() {
        const LENGTH: u64 = 128 << 10;
        let mut core = SendCore::new(true);
        core.set_peer_has_room();
        (0..3).for_each(|stream| core.stream_up(stream, 0));
        assert_eq!(core.post(EAGER_MAX + 1, 0, true).unwrap().1, Admit::AwaitsReceiver, "the network is not full yet");
        core.choose_carrier(true);
        assert_eq!(core.post(LENGTH, 0, true).unwrap().1, Admit::ForWorkers);
        let chunk = core.next_chunk(1).expect("it carries all");
        core.written(1);
        assert!(chunk.copied && u64::from(chunk.length) == LENGTH && chunk.header.flags & EAGER != 0);
        while core.post(LENGTH, 0, true).unwrap().1 == Admit::ForWorkers {}
        assert!((STREAM_WINDOW - LENGTH..=STREAM_WINDOW).contains(&core.credit_out()));
        while core.next_chunk(1).is_some() {
            core.written(1);
        }

        core.choose_carrier(false);
        assert_eq!(core.post(EAGER_MAX + 1, 0, true).unwrap().1, Admit::AwaitsReceiver, "all streams carry again");
        let give_back = |core: &mut SendCore, frames, credit| {
            core.acknowledge(1, frames, credit, &mut Vec::new()).unwrap();
            core.no_credit[1].len()
        };
        assert_eq!(give_back(&mut core, 1, 1), 1);
        assert_eq!(give_back(&mut core, 2, LENGTH + MESSAGE_COST), 0, "it still is eager");
    }

    #[test]
    fn a_long_message_without_credit_holds_up_no_short_one() {
        let mut core = SendCore::new(true);
        core.set_peer_has_room();
        (0..3).for_each(|stream| core.stream_up(stream, 0));
        core.choose_carrier(true);
        let post = |core: &mut SendCore, length, tag| core.post(length, tag, false).unwrap().1;
        while post(&mut core, 128 << 10, 1) == Admit::ForWorkers {}
        assert_eq!(post(&mut core, 8, 2), Admit::Ready, "another tag, whose receive may be posted");
        assert_eq!(post(&mut core, 8, 1), Admit::Ready);
        core.choose_carrier(false);
        while post(&mut core, EAGER_MAX, 2) == Admit::Ready {}
        assert!((EAGER_WINDOW_FULL - EAGER_MAX..=EAGER_WINDOW_FULL).contains(&(core.credit_out() + MESSAGE_COST)));
    }

    /// NCCL posts receives for Simple long before its sends, and with more room than an eager message needs, so they are
    /// announced. Its thread then copied all messages of up to 64 KiB itself, however much it had to do: all_reduce of
    /// 1 MiB over four channels took longer than of 2 MiB.
    #[test]
    fn a_message_for_workers_goes_to_them_whether_its_receive_is_announced_or_not() {
        for announced in [false, true] {
            let mut core = SendCore::new(true);
            core.stream_up(0, 0);
            if announced {
                assert!((0..3).all(|order| core.clear_to_send(0, order, 1 << 20).unwrap().is_none()));
            }
            assert_eq!(core.post(EAGER_MAX, 0, true).unwrap().1, Admit::Ready, "no other stream");
            core.stream_up(1, 0);
            assert_eq!(core.post(EAGER_MAX, 0, false).unwrap().1, Admit::Ready, "NCCL's thread has time");
            assert_eq!(core.post(EAGER_MAX, 0, true).unwrap().1, Admit::ForWorkers);
            assert!((0..3).all(|_| core.next_chunk(0).is_none_or(|chunk| chunk.key < 2)));
            assert!(core.next_chunk(1).is_some());
        }
    }

    #[test]
    fn a_message_whose_receive_is_announced_leaves_its_turn_to_the_next() {
        let mut core = SendCore::new(true);
        core.stream_up(0, 0);
        let mut posted = 0;
        while core.post(EAGER_MAX - 8192, 0, false).unwrap().1 == Admit::Ready {
            posted += 1;
        }
        assert_eq!(core.post(8, 0, false).unwrap().1, Admit::AwaitsCredit, "behind the other, though there is credit");
        core.take_roomy();
        assert!(core.clear_to_send(0, posted, EAGER_MAX).unwrap().is_some());
        assert!(core.no_credit[0].is_empty() && core.take_roomy() & 1 == 1, "both can leave");
    }

    #[test]
    fn an_older_peer_over_a_long_path_gets_whole_messages_when_it_is_clear_to_send() {
        let mut core = far(false);
        core.clear_to_send(0, 0, EAGER_MAX_FAR).unwrap();
        assert_eq!(core.post(EAGER_MAX_FAR, 0, true).unwrap().1, Admit::ForWorkers);
        let chunk = core.next_chunk(1).unwrap();
        assert!(chunk.copied && u64::from(chunk.length) == EAGER_MAX_FAR && chunk.header.flags & EAGER == 0);
        assert_eq!(core.post(EAGER_MAX + 1, 0, true).unwrap().1, Admit::AwaitsReceiver);
    }

    /// A path without a queue limit: bytes per µs, and µs from the last byte to its acknowledgement.
    #[derive(Clone, Copy)]
    struct Path {
        rate: u64,
        delay: u64,
    }

    /// Messages of `length` bytes over one path for each stream, `outstanding` of them at a time, for `until` µs of the
    /// simulation: bytes acknowledged per µs in its second half.
    fn carried(paths: &[Path], length: u64, outstanding: usize, until: u64) -> f64 {
        let mut core = SendCore::new(true);
        core.set_round_trip(Duration::from_micros(paths.iter().map(|path| path.delay).max().unwrap_or_default()));
        for stream in 0..=paths.len() {
            core.stream_up(stream, 0);
        }
        let (mut posted, mut done) = (0, Vec::new());
        let mut post = |core: &mut SendCore| {
            core.clear_to_send(0, posted, length).unwrap();
            let (key, _) = core.post(length, 0, false).unwrap();
            posted += 1;
            key
        };
        // As NCCL does: it tests the oldest first, and only the end of that one makes room for another.
        let mut posted: VecDeque<(Key, bool)> = VecDeque::new();
        (0..outstanding).for_each(|_| posted.push_back((post(&mut core), false)));
        // When each path has sent all its bytes, and the acknowledgements on the way: (time, stream, bytes).
        let mut free = vec![0; paths.len()];
        let mut acks: VecDeque<(u64, usize, u64)> = VecDeque::new();
        let mut frames = vec![0; paths.len()];
        let (mut now, mut bytes) = (0, 0);
        while now < until {
            for (at, path) in paths.iter().enumerate() {
                while let Some(chunk) = core.next_chunk(at + 1) {
                    core.written(at + 1);
                    free[at] = now.max(free[at]) + u64::from(chunk.length) / path.rate;
                    acks.push_back((free[at] + path.delay, at, u64::from(chunk.length)));
                }
            }
            acks.make_contiguous().sort_by_key(|ack| ack.0);
            let (time, at, length) = acks.pop_front().expect("something is on the way");
            now = time;
            bytes += if now > until / 2 { length } else { 0 };
            frames[at] += 1;
            core.acknowledge(at + 1, frames[at], 0, &mut done).unwrap();
            for key in done.drain(..) {
                posted.iter_mut().find(|(other, ended)| *other == key && !ended).expect("it was posted").1 = true;
            }
            while posted.front().is_some_and(|(_, ended)| *ended) {
                posted.pop_front();
                posted.push_back((post(&mut core), false));
            }
        }
        bytes as f64 / (until - until / 2) as f64
    }

    /// The share of what the paths can carry together.
    fn used(paths: &[Path], length: u64, outstanding: usize) -> f64 {
        let sum: u64 = paths.iter().map(|path| path.rate).sum();
        carried(paths, length, outstanding, 20_000_000) / sum as f64
    }

    #[test]
    fn what_is_said_of_single_frames_when_all_has_been_received_is_no_news() {
        let (mut core, mut done) = (SendCore::new(true), Vec::new());
        core.stream_up(0, 0);
        core.stream_up(1, 0);
        for index in [0, 1] {
            core.post(64, 0, index == 1).unwrap();
            assert!(core.next_chunk(index).is_some());
            core.written(index);
        }
        assert!(core.end_epoch(0, 0));
        core.all_received(&mut done);
        assert_eq!(done.len(), 2);
        // An answer to a fence, and an acknowledgement, that were on their way.
        assert_eq!(core.fenced(0, 0, 1, &mut done).unwrap(), 0);
        core.acknowledge(1, 1, 0, &mut done).unwrap();
        assert_eq!(done.len(), 2);
    }

    /// A sender whose message of three chunks is on three streams; the kernel has accepted the first and the last.
    fn split() -> SendCore {
        let mut core = SendCore::new(true);
        (0..4).for_each(|stream| core.stream_up(stream, 0));
        core.clear_to_send(0, 0, 3 * CHUNK_MIN).unwrap();
        core.post(3 * CHUNK_MIN, 0, false).unwrap();
        for stream in [1, 2, 3] {
            let flags = core.next_chunk(stream).unwrap().header.flags;
            assert_eq!(flags & (PROMPT | WHOLE), WHOLE);
        }
        core.written(1);
        core.written(3);
        core
    }

    #[test]
    fn what_is_acknowledged_on_another_stream_counts_when_it_is_known_to_have_left() {
        let (mut core, mut done) = (split(), Vec::new());
        // The thread of the second stream has not yet reported that the kernel accepted its chunk.
        core.acknowledge_all(&[0, 1, 1, 1], &mut done).unwrap();
        core.acknowledge(1, 1, 0, &mut done).unwrap();
        assert!(done.is_empty() && core.in_doubt(2));
        core.written(2);
        assert!(core.settle(2, &mut done));
        assert!(done.len() == 1 && !core.in_doubt(2) && core.is_idle());
        // That stream's own acknowledgement arrives later, with a lower or equal count.
        core.acknowledge(2, 0, 0, &mut done).unwrap();
        core.acknowledge(2, 1, 0, &mut done).unwrap();
        assert!(core.acknowledge(2, 0, 0, &mut done).is_err(), "but never less than it said itself");
        assert_eq!(done.len(), 1);
    }

    #[test]
    fn nobody_acknowledges_what_was_not_handed_out_or_takes_it_back() {
        let (mut core, mut done) = (split(), Vec::new());
        assert!(core.acknowledge_all(&[0, 2], &mut done).is_err());
        assert!(core.acknowledge_all(&[0, 0, 0, 0, 1], &mut done).is_err(), "there is no such stream");
        core.written(2);
        core.acknowledge_all(&[0, 0, 1], &mut done).unwrap();
        core.stream_down(2);
        assert!(core.fenced(2, 0, 0, &mut done).is_err());
        assert!(done.is_empty());
    }

    /// A sender with four streams for long messages, and the messages are ready.
    fn with_ready(lengths: &[u64]) -> SendCore {
        let mut core = SendCore::new(true);
        (0..5).for_each(|stream| core.stream_up(stream, 0));
        for (order, length) in (0..).zip(lengths) {
            core.clear_to_send(0, order, *length).unwrap();
            core.post(*length, 0, false).unwrap();
        }
        core
    }

    /// The same, and the first of the four streams is slow.
    fn with_slow(lengths: &[u64]) -> SendCore {
        let mut core = with_ready(lengths);
        (0..10).for_each(|_| core.streams[1].pace.took(Duration::from_millis(10), 128 << 10));
        core
    }

    /// The streams that are set going for the last message.
    fn engaged(core: &mut SendCore, bytes: u64) -> Vec<u8> {
        let (order, count) = core.engage(bytes, false);
        order[..count].to_vec()
    }

    #[test]
    fn as_many_streams_are_set_going_as_what_is_under_way_is_worth_those_with_the_least_on_the_way() {
        const CHUNK: u64 = CHUNK_MIN;
        assert_eq!(engaged(&mut with_ready(&[2 * CHUNK + 1]), 2 * CHUNK + 1), [1, 2, 3]);
        assert_eq!(engaged(&mut with_ready(&[3 * CHUNK; 3]), 3 * CHUNK), [1, 2, 3, 4]);
        // The message is cut for the streams that take it.
        let mut core = with_ready(&[3 * CHUNK]);
        assert_eq!(engaged(&mut core, 3 * CHUNK), [1, 2, 3]);
        assert_eq!(core.next_chunk(1).map(|chunk| u64::from(chunk.length)), Some(CHUNK));
        // A stream with more on the way comes later.
        core.clear_to_send(0, 1, 3 * CHUNK).unwrap();
        core.post(3 * CHUNK, 0, false).unwrap();
        assert_eq!(engaged(&mut core, 3 * CHUNK), [2, 3, 4, 1]);
        core.stream_down(2);
        assert_eq!(engaged(&mut core, 3 * CHUNK), [3, 4, 1]);
        // A message that travels as one frame is for one stream.
        let mut core = with_ready(&[]);
        for going in 1..=2 {
            core.post(EAGER_MAX, 0, true).unwrap();
            assert_eq!(engaged(&mut core, EAGER_MAX).len(), going);
        }
        // A message for one stream does not wait behind anything.
        let mut core = with_ready(&[]);
        for (length, first) in [(20_000, 1), (30_000, 2), (10_000, 3)] {
            assert_eq!(core.post(length, 0, true).unwrap().1, Admit::ForWorkers);
            assert_eq!(engaged(&mut core, length), [first]);
            assert!(core.next_chunk(usize::from(first)).is_some());
        }
        // A slow stream would hold up a short message. Of a very long one it takes its part. The same holds for eager
        // messages.
        assert_eq!(engaged(&mut with_slow(&[3 * CHUNK]), 3 * CHUNK), [2, 3, 4]);
        assert_eq!(engaged(&mut with_slow(&[8 * CHUNK]), 8 * CHUNK), [2, 3, 4, 1]);
        let mut core = with_slow(&[]);
        assert_eq!(core.post(EAGER_MAX, 0, true).unwrap().1, Admit::ForWorkers);
        assert_eq!(engaged(&mut core, EAGER_MAX), [2]);
        // Another rail is another wire: the stream with the least to do, up to one for each chunk.
        let mut core = with_ready(&[4 * CHUNK]);
        core.acknowledge_each();
        assert!(core.next_chunk(2).is_some());
        assert_eq!(engaged(&mut core, 4 * CHUNK), [1, 3, 4, 2]);
    }

    #[test]
    fn a_rate_counts_only_since_the_streams_changed() {
        let mut core = SendCore::new(true);
        assert!(core.take_rate(0).is_none(), "it may be of any time");
        assert!(core.take_rate(0).is_some());
        assert!(core.take_rate(1).is_none(), "of before the change");
        assert!(core.take_rate(1).is_some());
    }

    #[test]
    fn one_stream_carries_the_long_messages_of_a_full_network_while_it_lives_and_is_not_slow() {
        const LENGTH: u64 = 8 * CHUNK_MIN;
        fn engaged_one(core: &mut SendCore) -> Vec<u8> {
            let (order, count) = core.engage(LENGTH, true);
            order[..count].to_vec()
        }
        let mut core = with_ready(&[LENGTH; 2]);
        assert_eq!(engaged_one(&mut core), [1]);
        assert!((2..=4).all(|index| core.next_chunk(index).is_none()));
        let whole = core.next_chunk(1).expect("it has room");
        assert_eq!(u64::from(whole.length), LENGTH, "no other stream takes a part");
        // What it leaves behind is for all, until the next message finds another one.
        core.written(1);
        core.stream_down(1);
        core.fenced(1, core.epoch(1), 0, &mut Vec::new()).unwrap();
        assert!((2..=3).all(|index| core.next_chunk(index).is_some()));
        assert_eq!(engaged_one(&mut core), [2]);
        assert_eq!(engaged(&mut core, LENGTH), [4, 2, 3], "all again");

        let mut core = with_slow(&[LENGTH]);
        assert_eq!(engaged_one(&mut core), [2]);
        assert_eq!(core.take_roomy(), 1 << 2, "it is woken, whatever woke others");
        // It becomes slow, and leaves the work to the fastest.
        (0..10).for_each(|_| core.streams[2].pace.took(Duration::from_secs(1), LENGTH));
        assert!(core.next_chunk(2).is_none() && core.take_roomy() == 1 << 3 && core.next_chunk(3).is_some());
        assert_eq!(engaged_one(&mut core), [3]);
        core.choose_carrier(false);
        assert_eq!(core.take_roomy(), 0b11110, "amid a message all are woken");
    }

    #[test]
    fn how_long_a_chunk_takes_is_the_pace_of_the_stream_that_tells_of_it() {
        let mut core = with_ready(&[128 << 10; 8]);
        let start = Instant::now();
        for index in [1, 2] {
            for _ in 0..4 {
                assert!(core.next_chunk(index).is_some());
                core.leaves(index, start);
                core.written(index);
            }
        }
        for frames in 1..=4 {
            core.arrives(1, frames, |left| left - start + Duration::from_millis(40));
            core.arrives(2, frames, |left| left - start + Duration::from_millis(1));
        }
        let (_, best) = core.fastest();
        assert!(core.streams[1].pace.is_slow(best) && !core.streams[2].pace.is_slow(best));
        // A count that is impossible is ignored, and so is one that has already counted.
        for frames in [0, 5, u64::MAX] {
            core.arrives(2, frames, |_| unreachable!("{frames}"));
        }
        core.acknowledge(2, 4, 0, &mut Vec::new()).unwrap();
        core.arrives(2, 4, |_| unreachable!());
    }

    #[test]
    fn a_slow_stream_takes_its_part_of_much_and_nothing_of_little() {
        // In bytes.
        let took = |core: &mut SendCore, index: usize| {
            let chunks = std::iter::from_fn(|| core.next_chunk(index)).map(|chunk| u64::from(chunk.length));
            let lengths: Vec<_> = chunks.collect();
            lengths.iter().for_each(|_| core.written(index));
            lengths.iter().sum::<u64>()
        };
        let mut core = with_slow(&[128 << 10; 8]);
        core.streams[3].pace.took(Duration::from_millis(1), 128 << 10);
        core.streams[2].pace.took(Duration::from_millis(1), 128 << 10);
        assert_eq!((took(&mut core, 1), core.take_roomy()), (0, 1 << 4), "the fastest is to look after it");
        assert_eq!((took(&mut core, 2), core.take_roomy()), (8 * (128 << 10), 0));
        assert_eq!((took(&mut core, 1), core.take_roomy()), (0, 0), "nothing is ready");
        assert!(took(&mut with_slow(&[16 << 20; 8]), 1) > 0);
        // After several hundred times it is tried again.
        let mut core = with_slow(&[128 << 10]);
        let refusals = (0..5000).take_while(|_| core.next_chunk(1).is_none()).count();
        assert!((200..2000).contains(&refusals), "{refusals}");
        // As the only stream it takes everything, including what is resent.
        let mut core = with_slow(&[128 << 10; 2]);
        (2..5).for_each(|index| assert!(core.stream_down(index)));
        assert_eq!(took(&mut core, 1), 256 << 10);
        let (mut core, mut done) = (with_slow(&[128 << 10; 2]), Vec::new());
        assert_eq!(took(&mut core, 2), 256 << 10);
        core.stream_down(2);
        assert!(core.fenced(2, 0, 0, &mut done).unwrap() > 0);
        assert_eq!(took(&mut core, 1), 256 << 10);
    }

    #[test]
    fn a_stream_that_gets_room_by_what_is_said_on_another_one_is_named() {
        let fill =
            |core: &mut SendCore| std::iter::from_fn(|| core.next_chunk(1).map(|_| core.written(1))).count() as u64;
        let mut core = with_ready(&[8 * STREAM_WINDOW]);
        let mut done = Vec::new();
        let frames = fill(&mut core);
        assert!(core.has_ready() && core.streams[1].bytes >= STREAM_WINDOW, "it has no room");
        assert!(core.next_chunk(2).is_some());
        core.written(2);
        core.acknowledge(2, 1, 0, &mut done).unwrap();
        assert_eq!(core.take_roomy(), 0, "the one that had room all along needs no wake-up");
        core.acknowledge_all(&[0, frames], &mut done).unwrap();
        core.acknowledge(0, 0, 0, &mut done).unwrap();
        assert_eq!((core.take_roomy(), core.take_roomy()), (1 << 1, 0));
        // Where nothing is ready there is nothing to wake for.
        let mut core = with_ready(&[STREAM_WINDOW]);
        let frames = fill(&mut core);
        core.acknowledge_all(&[0, frames], &mut done).unwrap();
        assert_eq!(core.take_roomy(), 0);
    }

    #[test]
    fn of_chunks_that_were_sent_once_one_word_is_said_when_the_last_has_arrived() {
        let (mut core, mut done) = (SendCore::new(true), Vec::new());
        core.watch_landings(true);
        (0..5).for_each(|stream| core.stream_up(stream, 0));
        core.clear_to_send(0, 0, 4 * CHUNK_MIN).unwrap();
        let (key, _) = core.post(4 * CHUNK_MIN, 0, false).unwrap();
        let moment = |number| Ticks::from_number(number).expect("not 0");
        for index in [2, 1, 3, 4] {
            assert!(core.next_chunk(index).is_some());
            core.stamp(index, moment(10 * index as u64));
            core.written(index);
        }
        core.acknowledge(2, 1, 0, &mut done).unwrap();
        core.acknowledge(4, 1, 0, &mut done).unwrap();
        assert_eq!(core.take_landed(), None, "there is more to come");
        // The third stream breaks, and the first resends its chunk.
        core.stream_down(3);
        assert_eq!(core.fenced(3, 0, 0, &mut done).unwrap(), 1);
        assert!(core.next_chunk(1).is_some_and(|chunk| chunk.again && chunk.offset == 2 * CHUNK_MIN));
        core.written(1);
        core.acknowledge(1, 2, 0, &mut done).unwrap();
        assert_eq!(done, [key]);
        let said: Vec<_> = std::iter::from_fn(|| core.take_landed()).collect();
        let all = Landed {
            key,
            index: 1,
            offset: 0,
            length: 3 * CHUNK_MIN,
            joined: true,
            message: 0,
            total: 4 * CHUNK_MIN,
            began: Some(moment(10)),
        };
        let again = Landed { offset: 2 * CHUNK_MIN, length: CHUNK_MIN, joined: false, began: None, ..all };
        assert_eq!(said, [all, again], "what travelled again is a record of its own");
        // One chunk is not several.
        core.post(CHUNK_MIN, 0, true).unwrap();
        assert!(core.next_chunk(1).is_some());
        core.stamp(1, moment(90));
        core.written(1);
        core.acknowledge(1, 3, 0, &mut done).unwrap();
        let said = core.take_landed().expect("a record");
        assert_eq!(
            (said.joined, said.length, said.began, core.take_landed()),
            (false, CHUNK_MIN, Some(moment(90)), None)
        );
    }

    #[test]
    fn over_several_rails_each_chunk_is_acknowledged() {
        let mut core = SendCore::new(true);
        core.acknowledge_each();
        (0..3).for_each(|stream| core.stream_up(stream, 0));
        core.clear_to_send(0, 0, 2 * EAGER_MAX).unwrap();
        core.post(2 * EAGER_MAX, 0, false).unwrap();
        assert_ne!(core.next_chunk(1).unwrap().header.flags & PROMPT, 0);
    }

    #[test]
    fn the_end_of_an_epoch_that_is_over_takes_nothing_from_the_next() {
        let mut core = SendCore::new(true);
        let mut done = Vec::new();
        core.stream_up(0, 0);
        core.post(64, 0, false).unwrap();
        assert!(core.next_chunk(0).is_some());
        core.written(0);
        // One thread reconnects it...
        assert!(core.end_epoch(0, 0));
        assert_eq!(core.fenced(0, 0, 0, &mut done).unwrap(), 1);
        core.stream_up(0, 1);
        // ...before the thread that noticed the break reports it.
        assert!(!core.end_epoch(0, 0));
        assert!(core.is_live(0) && core.unfenced().is_empty());
        assert!(core.next_chunk(0).is_some_and(|chunk| chunk.again));
    }

    const MESSAGE: u64 = 16 << 20;

    #[test]
    fn rails_of_one_and_four_gigabits_are_both_filled() {
        let paths = [Path { rate: 125, delay: 100 }, Path { rate: 500, delay: 100 }];
        let used = used(&paths, MESSAGE, 8);
        assert!(used > 0.95, "{used:.3} of both");
    }

    #[test]
    fn one_of_eight_streams_at_a_tenth_costs_only_what_it_lacks() {
        for rate in [50, 1000] {
            let mut paths = [Path { rate, delay: 100 }; 8];
            paths[3].rate = rate / 10;
            let used = used(&paths, MESSAGE, 8);
            assert!(used > 0.97, "{used:.3} of all, fast paths at {rate} MB/s");
        }
    }

    #[test]
    fn a_slow_stream_delays_no_message_by_much() {
        let mut paths = [Path { rate: 1000, delay: 50 }; 8];
        let alone = carried(&paths, 4 << 20, 1, 2_000_000);
        paths[3].rate = 100;
        let beside = carried(&paths, 4 << 20, 1, 2_000_000);
        assert!(beside > 0.6 * alone, "{beside:.0} MB/s with one message at a time, {alone:.0} when all are fast");
    }

    #[test]
    fn a_stream_over_200_ms_is_filled() {
        // 60 bytes per µs, about half a gigabit per second: less than the far window allows, 84.
        let used = used(&[Path { rate: 60, delay: 200_000 }], MESSAGE, 8);
        assert!(used > 0.9, "{used:.3}");
    }

    #[test]
    fn a_long_way_narrows_no_window() {
        // 20 ms at 1 GB/s for each stream: the window is what limits them, all alike.
        let paths = [Path { rate: 1000, delay: 20_000 }; 4];
        let limited = carried(&paths, MESSAGE, 8, 20_000_000);
        let windows = (4 * STREAM_WINDOW) as f64 / (20_000.0 + STREAM_WINDOW as f64 / 1000.0);
        assert!(limited > 0.95 * windows, "{limited:.0} MB/s of {windows:.0}");
    }
}
