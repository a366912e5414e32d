//! The receiving side of the protocol, without sockets, clocks or bytes.
//!
//! Receives are posted per tag and numbered; a frame carries its receive's number, so matching does not depend on the
//! order in which streams deliver. An eager message that arrives before its receive is staged; any other arrives only
//! after the receive was announced by a clear-to-send.
//!
//! Every frame that arrives is checked against the posted receives before a byte is placed: the peer has proved that it
//! holds the secret, but it may still be broken.

use std::collections::VecDeque;

use slab::Slab;

use super::ack::Ack;
use super::limits::{
    EAGER_MAX, EAGER_MAX_FAR, EAGER_WINDOW, EAGER_WINDOW_FAR, MAX_POSTED, MAX_RANGES, MESSAGE_COST, max_early,
};
use super::ranges::Ranges;
use crate::engine::request::{MAX_PARTS, too_long};
use crate::engine::schedule::constants::ACK_EVERY;
use crate::os::error::{Error, Result};
use crate::session::frame::{EAGER, Header, MAX_STREAMS, PROMPT, Type, WHOLE};

/// Names a staging buffer for an early message.
pub(crate) type StageKey = usize;

/// A posted receive: request slot and part of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The request's slot.
    pub slot: u16,
    /// Which part of the grouped receive.
    pub part: u8,
}

/// Where the payload of a frame goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Into the posted buffer, at this offset.
    Posted(Part, u64),
    /// Into staging; the buffer must hold the frame's length.
    Staged(StageKey),
}

/// The effect of the end of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The message goes on.
    More,
    /// This part has all its bytes.
    Complete(Part, u64),
    /// A staged message is whole; its receive is not posted yet.
    Staged,
    /// A staged message is whole and its receive has been posted in the meantime: copy, then call
    /// [`RecvCore::unstaged`].
    Unstage(StageKey, Part, u64),
}

/// The result of posting a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// It waits; the sender needs no clear-to-send for a buffer this small.
    Waits,
    /// It waits, and the sender must be notified: tag, order, capacity.
    Announce(Header),
    /// The message has arrived: copy it out of staging, then call [`RecvCore::unstaged`].
    Early(StageKey, u64),
}

#[derive(Default)]
struct Entry {
    part: Option<(Part, u64)>,
    total: Option<u64>,
    /// The message's number, which all its frames carry.
    number: u64,
    /// The size of a message that the sender has sent a query about.
    queried: Option<u64>,
    /// Bytes in place.
    received: u64,
    /// A frame with the whole message has begun. A flag instead of a range, because most messages are one frame and a
    /// flag needs no memory of its own.
    begun_whole: bool,
    /// The bytes whose frames have begun, of a message in several.
    begun: Ranges,
    stage: Option<StageKey>,
    staged_whole: bool,
    eager: bool,
    done: bool,
}

struct Tag {
    tag: i32,
    /// Order of the first entry.
    base: u64,
    /// Order of the next receive to be posted.
    posted: u64,
    entries: VecDeque<Entry>,
}

impl Entry {
    /// A frame with these bytes of the message begins. False when one of them has already arrived or is arriving.
    #[inline]
    fn claim(&mut self, header: &Header) -> bool {
        if u64::from(header.length) == header.total {
            return self.begun.is_empty() && !std::mem::replace(&mut self.begun_whole, true);
        }
        !self.begun_whole && self.begun.add(header.offset, header.offset + u64::from(header.length))
    }

    /// The frame that began at `offset` will never end.
    fn disclaim(&mut self, offset: u64, length: u32) {
        self.begun_whole = false;
        self.begun.remove(offset, offset + u64::from(length));
    }
}

impl Tag {
    /// How many receives the peer has referred to that are not posted, up to `order`.
    fn early(&self, order: u64) -> u64 {
        (order + 1).saturating_sub(self.posted.max(self.base + self.entries.len() as u64))
    }

    #[inline]
    fn entry(&mut self, order: u64) -> &mut Entry {
        let at = (order - self.base) as usize;
        while self.entries.len() <= at {
            self.entries.push_back(Entry::default());
        }
        &mut self.entries[at]
    }

    #[inline]
    fn retire(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.done) {
            self.entries.pop_front();
            self.base += 1;
        }
    }
}

#[derive(Clone, Copy)]
struct Open {
    tag: i32,
    order: u64,
    offset: u64,
    length: u32,
    place: Place,
    /// The sender waits for this frame's acknowledgement.
    prompt: bool,
    /// The sender waits for the whole message.
    whole: bool,
}

#[derive(Default)]
struct Stream {
    epoch: u16,
    received: u64,
    /// Frames that were acknowledged, on this stream or on another.
    acked: u64,
    /// Frames that were acknowledged on this stream.
    acked_here: u64,
    prompt: bool,
    /// A message that the sender waits for became whole by a frame of this stream.
    whole: bool,
    fenced: bool,
    open: Option<Open>,
}

/// The receiving side of one connection.
#[derive(Default)]
pub struct RecvCore {
    tags: Vec<Tag>,
    last_tag: usize,
    stages: Slab<u64>,
    staged_bytes: u64,
    streams: Vec<Stream>,
    /// Eager bytes whose window may be used again, counted from the start.
    returned: u64,
    /// The same, as last reported to the sender.
    reported: u64,
    /// Receives that the peer has referred to and that are not posted.
    early: u64,
    /// The sender may send as much eagerly as over a long path ([`FEATURE_FAR`](crate::session::handshake::FEATURE_FAR)).
    has_room: bool,
}

impl RecvCore {
    /// A connection without streams yet, whose sender may send as over a long path, or not.
    pub fn new(has_room: bool) -> Self {
        Self { has_room, ..Self::default() }
    }

    /// The limits for early arrivals: bytes of one message, and bytes of all.
    fn eager(&self) -> (u64, u64) {
        if self.has_room { (EAGER_MAX_FAR, EAGER_WINDOW_FAR) } else { (EAGER_MAX, EAGER_WINDOW) }
    }

    /// How many messages may be early.
    fn max_early(&self) -> u64 {
        max_early(self.eager().1)
    }

    /// Stream `index` is connected, in the given epoch.
    pub fn stream_up(&mut self, index: usize, epoch: u16) {
        while self.streams.len() <= index {
            self.streams.push(Stream::default());
        }
        // The counts continue through all epochs of the stream.
        let received = self.streams[index].received;
        self.streams[index] = Stream { epoch, received, acked: received, acked_here: received, ..Stream::default() };
    }

    /// Whether another group of receives with `tag` can be posted now: the oldest unfinished one must not be too far
    /// behind.
    #[inline]
    pub fn has_room(&mut self, tag: i32) -> bool {
        let queue = self.tag(tag);
        queue.posted - queue.base + MAX_PARTS as u64 <= MAX_POSTED
    }

    /// A receive of at most `capacity` bytes was posted.
    ///
    /// # Errors
    /// A usage error when the message has already arrived and is longer.
    #[inline]
    pub fn post(&mut self, tag: i32, capacity: u64, part: Part) -> Result<Posted> {
        let queue = self.tag(tag);
        let order = queue.posted;
        let known = queue.entries.get((order - queue.base) as usize);
        let early = known.is_some();
        // Checked before anything is noted: until the connection has ended other threads continue with it, and a noted
        // receive gets the rest of its message.
        if let Some(total) = known.and_then(|entry| entry.total.or(entry.queried)).filter(|total| *total > capacity) {
            return Err(too_long(total, capacity, tag));
        }
        queue.posted += 1;
        self.early -= u64::from(early);
        let entry = self.tag(tag).entry(order);
        debug_assert!(entry.part.is_none());
        entry.part = Some((part, capacity));
        if entry.staged_whole {
            let stage = entry.stage.expect("a staged message has a buffer");
            return Ok(Posted::Early(stage, entry.total.expect("known since its first frame")));
        }
        let announced = capacity > EAGER_MAX || entry.queried.is_some();
        if announced && entry.stage.is_none() {
            let header = Header { tag, order, total: capacity, ..Header::of(Type::Clear, 0) };
            return Ok(Posted::Announce(header));
        }
        Ok(Posted::Waits)
    }

    /// The sender's query about the `order`-th receive with `tag`, for a message of `total` bytes that has waited a
    /// while. Returns the answer, if there is one now.
    ///
    /// # Errors
    /// A usage error when the receive is posted and smaller; a remote error when the peer runs too far ahead.
    pub fn query(&mut self, tag: i32, order: u64, total: u64) -> Result<Option<Header>> {
        if order < self.tag(tag).base {
            return Ok(None);
        }
        let entry = self.expect(tag, order)?;
        if entry.done || entry.total.is_some() {
            return Ok(None);
        }
        match entry.part {
            Some((_, capacity)) if total > capacity => Err(too_long(total, capacity, tag)),
            Some((_, capacity)) => Ok(Some(Header { tag, order, total: capacity, ..Header::of(Type::Clear, 0) })),
            None => {
                entry.queried = Some(total);
                Ok(None)
            }
        }
    }

    /// The clear-to-sends of all receives that still wait for a message that needs one: after a break they may
    /// have been lost.
    pub fn announcements(&self) -> impl Iterator<Item = Header> + '_ {
        let waiting = self.tags.iter().flat_map(|queue| {
            let entries = (queue.base..).zip(&queue.entries);
            entries.filter(|(_, entry)| entry.total.is_none() && !entry.done).map(|entry| (queue.tag, entry))
        });
        waiting.filter_map(|(tag, (order, entry))| {
            let (_, capacity) = entry.part.filter(|(_, capacity)| *capacity > EAGER_MAX)?;
            Some(Header { tag, order, total: capacity, ..Header::of(Type::Clear, 0) })
        })
    }

    /// A data frame begins on stream `index`. Returns where its payload goes.
    ///
    /// # Errors
    /// A remote error when the frame contradicts the posted receives or earlier frames; a usage error when the message
    /// is longer than its receive.
    #[inline]
    pub fn begin(&mut self, index: usize, header: &Header) -> Result<Place> {
        let stream = self.streams.get(index).ok_or_else(|| Error::remote("a frame came on an unknown stream"))?;
        if stream.epoch != header.epoch || stream.fenced || stream.open.is_some() {
            return Err(untimely(index, header, stream.epoch));
        }
        let (tag, order, eager) = (header.tag, header.order, header.flags & EAGER != 0);
        let (staged_bytes, (most, window)) = (self.staged_bytes, self.eager());
        let entry = self.expect(tag, order)?;
        let differs = entry.total.is_some_and(|total| (total, entry.number) != (header.total, header.message));
        if entry.done || differs || entry.stage.is_some() {
            return Err(repeated(tag, order));
        }
        if eager && (header.length as u64 != header.total || header.total > most) {
            return Err(Error::remote("an eager message was split or is too long"));
        }
        if entry.begun.count() > MAX_RANGES {
            return Err(scattered(tag, order));
        }
        if !entry.claim(header) {
            return Err(repeated_bytes(tag, order));
        }
        entry.eager = eager;
        entry.total = Some(header.total);
        entry.number = header.message;
        let place = match entry.part {
            Some((_, capacity)) if header.total > capacity => return Err(too_long(header.total, capacity, tag)),
            Some((part, _)) => Place::Posted(part, header.offset),
            None if !eager => {
                return Err(uncalled(tag, order));
            }
            None => {
                let cost = header.total + MESSAGE_COST;
                if staged_bytes + cost > window {
                    return Err(Error::remote("the peer sent more early messages than it had credit for"));
                }
                let stage = self.stages.insert(cost);
                self.staged_bytes += cost;
                self.tag(tag).entry(order).stage = Some(stage);
                Place::Staged(stage)
            }
        };
        let stream = &mut self.streams[index];
        let (prompt, whole) = (header.flags & PROMPT != 0, header.flags & WHOLE != 0);
        stream.open = Some(Open { tag, order, offset: header.offset, length: header.length, place, prompt, whole });
        Ok(place)
    }

    /// How many messages of a tag are under way: the one whose frame has just begun, and all before it that are not
    /// complete.
    #[inline]
    pub(crate) fn under_way(&mut self, header: &Header) -> usize {
        (header.order - self.tag(header.tag).base) as usize + 1
    }

    /// The peer refers to the `order`-th message with `tag`: returns its entry, for which room is made if there is
    /// none.
    #[inline]
    fn expect(&mut self, tag: i32, order: u64) -> Result<&mut Entry> {
        let queue = self.tag(tag);
        let (at, known) = (order.wrapping_sub(queue.base), queue.entries.len() as u64);
        // The usual case: the receive is posted, or the peer has referred to it before.
        if at >= known {
            self.admit(tag, order)?;
        }
        Ok(&mut self.tag(tag).entries[at as usize])
    }

    /// Makes room for the `order`-th message with `tag`, and for those before it.
    fn admit(&mut self, tag: i32, order: u64) -> Result<()> {
        let most = self.max_early();
        let queue = self.tag(tag);
        let next = queue.base;
        let possible = order >= next && order - next < MAX_POSTED + most;
        let early = if possible { queue.early(order) } else { 0 };
        if !possible || self.early + early > most {
            return Err(Error::remote(format!("message {order} with tag {tag} is not expected (next is {next})"))
                .with_hint("the peer sent a message twice, or more early ones than a connection can hold"));
        }
        self.early += early;
        self.tag(tag).entry(order);
        Ok(())
    }

    /// The bytes of the frame that began on stream `index` and has not ended.
    #[inline]
    pub(crate) fn open_length(&self, index: usize) -> u64 {
        self.streams[index].open.as_ref().map_or(0, |open| u64::from(open.length))
    }

    /// The payload of the frame that began on stream `index` is in its place.
    #[inline]
    pub fn end(&mut self, index: usize) -> End {
        let stream = &mut self.streams[index];
        let open = stream.open.take().expect("a frame was open");
        stream.received += 1;
        // Not earlier: an acknowledgement that leaves while the payload is still arriving does not include this frame.
        stream.prompt |= open.prompt;
        let queue = self.tag(open.tag);
        let entry = queue.entry(open.order);
        entry.received += u64::from(open.length);
        let total = entry.total.expect("set when the frame began");
        if entry.received < total {
            return End::More;
        }
        match open.place {
            Place::Posted(part, _) => {
                entry.done = true;
                let eager = entry.eager;
                queue.retire();
                self.streams[index].whole |= open.whole;
                if eager {
                    self.returned += total + MESSAGE_COST;
                }
                End::Complete(part, total)
            }
            Place::Staged(stage) => {
                entry.staged_whole = true;
                match entry.part {
                    Some((part, _)) => End::Unstage(stage, part, total),
                    None => End::Staged,
                }
            }
        }
    }

    /// The staged message with this key was copied into its buffer: its staging memory and credit are free.
    pub fn unstaged(&mut self, tag: i32, stage: StageKey) {
        let cost = self.stages.remove(stage);
        self.staged_bytes -= cost;
        self.returned += cost;
        let queue = self.tag(tag);
        if let Some(entry) = queue.entries.iter_mut().find(|entry| entry.stage == Some(stage)) {
            entry.done = true;
            entry.stage = None;
        }
        queue.retire();
    }

    /// Whether the acknowledgements of stream `index` must be sent: a request waits for one, or much is not
    /// acknowledged.
    #[inline]
    pub(crate) fn is_ack_due(&self, index: usize) -> bool {
        self.streams.get(index).is_some_and(|stream| {
            let frames = stream.received - stream.acked;
            (stream.prompt && frames > 0) || stream.whole || frames >= ACK_EVERY || self.owes_credit()
        })
    }

    /// The acknowledgement that stream `index` owes, if any. With `force`, it is also due for frames that no send waits
    /// for, on any stream. Then, and after a whole message, it covers all streams.
    pub fn take_ack(&mut self, index: usize, force: bool) -> Option<Ack> {
        let owed = self.returned - self.reported;
        let returned = self.returned;
        let due = self.is_ack_due(index);
        let is_owed = |stream: &Stream| stream.received > stream.acked;
        if !(due || force && (owed > 0 || self.streams.iter().any(is_owed))) {
            return None;
        }
        let stream = self.streams.get_mut(index)?;
        (stream.acked, stream.acked_here) = (stream.received, stream.received);
        stream.prompt = false;
        self.reported = returned;
        let ack = Ack::of_one(stream.epoch, stream.received, returned);
        let all = std::mem::take(&mut stream.whole) || force;
        if !all || !self.streams.iter().any(is_owed) {
            return Some(ack);
        }
        for stream in &mut self.streams {
            stream.acked = stream.received;
            (stream.prompt, stream.whole) = (false, false);
        }
        Some(ack.of_all(self.streams.iter().map(|stream| stream.received)))
    }

    /// What the receives in flight wait for, in a line for logs.
    pub(crate) fn describe(&self) -> String {
        let entries = || self.tags.iter().flat_map(|tag| &tag.entries).filter(|entry| !entry.done);
        let begun = entries().filter(|entry| entry.part.is_some() && entry.total.is_some()).count();
        let posted = entries().filter(|entry| entry.part.is_some()).count();
        let streams: Vec<String> =
            self.streams.iter().map(|stream| format!("{}/{}", stream.received, stream.acked)).collect();
        format!(
            "{posted} receives posted, {begun} of them begun, {} early messages; frames taken in/acknowledged per stream: {}",
            self.stages.len(),
            streams.join(", "),
        )
    }

    /// Bytes of credit that early messages hold.
    #[cfg(test)]
    pub(super) fn staged_bytes(&self) -> u64 {
        self.staged_bytes
    }

    /// Receives that the peer has referred to and that are not posted.
    #[cfg(test)]
    pub(super) fn early(&self) -> u64 {
        self.early
    }

    /// Whether returned credit should be reported to the sender soon: it may be waiting for it.
    #[inline]
    pub(crate) fn owes_credit(&self) -> bool {
        self.returned - self.reported >= EAGER_WINDOW / 4
    }

    /// The epoch of stream `index`.
    pub fn epoch(&self, index: usize) -> u16 {
        self.streams.get(index).map_or(0, |stream| stream.epoch)
    }

    /// Whether nothing may arrive any more on stream `index` in `epoch`.
    pub(crate) fn has_ended(&self, index: usize, epoch: u16) -> bool {
        self.has_outlived(index, epoch) || self.streams.get(index).is_some_and(|stream| stream.fenced)
    }

    /// Whether stream `index` has begun an epoch after `epoch`. Epochs count up and wrap.
    pub(crate) fn has_outlived(&self, index: usize, epoch: u16) -> bool {
        (self.epoch(index).wrapping_sub(epoch) as i16) > 0
    }

    /// Ends epoch `epoch` of stream `index`: nothing more may be received from it. Returns how many frames were, in all
    /// its epochs; None when that epoch is already over, or there is no such stream. Other streams may then owe an
    /// acknowledgement ([`RecvCore::is_ack_due`]): those that it carried for them may be lost.
    pub fn fence(&mut self, index: usize, epoch: u16) -> Option<u64> {
        if index >= MAX_STREAMS || self.has_outlived(index, epoch) {
            return None;
        }
        while self.streams.len() <= index {
            self.streams.push(Stream::default());
        }
        let stream = &mut self.streams[index];
        stream.fenced = true;
        let unsaid = std::mem::take(&mut stream.whole);
        for other in &mut self.streams {
            if unsaid || other.acked > other.acked_here {
                (other.acked, other.prompt) = (other.acked_here, true);
            }
        }
        let stream = &mut self.streams[index];
        // An acknowledgement under way may be lost, and the credit in it: report all of it again.
        self.reported = 0;
        // A frame that had begun never ends: it does not count, and will arrive again from its first byte. `drop_open`
        // gives back a staging buffer that the frame had begun to fill.
        let open = stream.open.take();
        let received = stream.received;
        if let Some(open) = open {
            self.drop_open(open);
        }
        Some(received)
    }

    /// The streams whose last epoch [`RecvCore::fence`] has ended, with that epoch and how many frames of all their
    /// epochs were received.
    pub(crate) fn ended_epochs(&self) -> Vec<(usize, u16, u64)> {
        let fenced = self.streams.iter().enumerate().filter(|(_, stream)| stream.fenced);
        fenced.map(|(index, stream)| (index, stream.epoch, stream.received)).collect()
    }

    fn drop_open(&mut self, open: Open) {
        let entry = self.tag(open.tag).entry(open.order);
        entry.disclaim(open.offset, open.length);
        if let Place::Staged(stage) = open.place {
            entry.stage = None;
            entry.total = None;
            self.staged_bytes -= self.stages.remove(stage);
        }
    }

    #[inline]
    fn tag(&mut self, tag: i32) -> &mut Tag {
        if self.tags.get(self.last_tag).is_none_or(|queue| queue.tag != tag) {
            self.find_tag(tag);
        }
        &mut self.tags[self.last_tag]
    }

    #[inline(never)]
    fn find_tag(&mut self, tag: i32) {
        self.last_tag = self.tags.binary_search_by_key(&tag, |queue| queue.tag).unwrap_or_else(|at| {
            self.tags.insert(at, Tag { tag, base: 0, posted: 0, entries: VecDeque::new() });
            at
        });
    }
}

#[cold]
fn untimely(index: usize, header: &Header, epoch: u16) -> Error {
    Error::remote(format!("a frame of epoch {} came on stream {index}, which is in epoch {epoch}", header.epoch))
}

#[cold]
fn repeated(tag: i32, order: u64) -> Error {
    Error::remote(format!("message {order} with tag {tag} came twice, or its size changed"))
}

#[cold]
fn repeated_bytes(tag: i32, order: u64) -> Error {
    Error::remote(format!("bytes of message {order} with tag {tag} came twice"))
}

#[cold]
fn scattered(tag: i32, order: u64) -> Error {
    Error::remote(format!(
        "message {order} with tag {tag} came in more pieces, with gaps between them, than can be under way"
    ))
}

#[cold]
fn uncalled(tag: i32, order: u64) -> Error {
    Error::remote(format!("message {order} with tag {tag} came without clear-to-send"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by `towline send-recv`: the acknowledgement of one frame was sent while the next one was half read, and
    /// cleared that frame's request for its own. Its sender waited for ever.
    #[test]
    fn a_frame_that_wants_a_prompt_acknowledgement_gets_it_after_its_last_byte() {
        let mut core = RecvCore::default();
        core.stream_up(0, 1);
        let total = 2 * EAGER_MAX;
        core.post(0, total, Part { slot: 0, part: 0 }).unwrap();
        let frame = |offset| {
            let length = EAGER_MAX as u32;
            Header { flags: PROMPT, offset, length, total, ..Header::of(Type::Data, 1) }
        };
        core.begin(0, &frame(0)).unwrap();
        assert_eq!(core.end(0), End::More);
        core.begin(0, &frame(EAGER_MAX)).unwrap();
        assert_eq!(core.take_ack(0, false).map(|ack| ack.header.offset), Some(1));
        assert!(core.take_ack(0, false).is_none(), "nothing new has arrived");
        assert!(matches!(core.end(0), End::Complete(..)));
        assert_eq!(core.take_ack(0, false).map(|ack| ack.header.offset), Some(2));
    }

    /// A receiver with three streams and a long receive. Both halves of the message have arrived, each over a stream of
    /// its own. A frame that nothing waits for has arrived over the third.
    fn whole() -> RecvCore {
        let mut core = posted(256);
        core.stream_up(2, 1);
        core.post(7, 128, Part { slot: 1, part: 0 }).unwrap();
        core.begin(2, &Header { tag: 7, ..chunk(0, 128, 128) }).unwrap();
        core.end(2);
        for index in [0, 1] {
            core.begin(index, &Header { flags: WHOLE, ..chunk(index as u64 * 128, 128, 256) }).unwrap();
            assert!(!core.is_ack_due(index), "a part by itself is not worth a frame");
            core.end(index);
        }
        core
    }

    #[test]
    fn a_whole_message_is_acknowledged_once_for_all_streams() {
        let mut core = whole();
        assert!(!core.is_ack_due(0) && core.is_ack_due(1));
        assert_eq!(core.take_ack(1, false).unwrap().counts(), [1, 1, 1]);
        for index in 0..3 {
            assert!(core.take_ack(index, true).is_none(), "all is said");
        }
    }

    /// A sender keeps copies of what it sent over a full network, on a further stream, until they are acknowledged.
    #[test]
    fn a_connection_that_is_quiet_acknowledges_all_streams_on_the_first() {
        let mut core = posted(256);
        core.begin(1, &chunk(0, 128, 256)).unwrap();
        core.end(1);
        assert!(core.take_ack(0, false).is_none() && core.take_ack(1, false).is_none(), "nothing waits for it");
        assert_eq!(core.take_ack(0, true).unwrap().counts(), [0, 1]);
        assert!((0..2).all(|index| core.take_ack(index, true).is_none()));
    }

    #[test]
    fn what_a_lost_stream_had_to_say_for_others_these_say_themselves() {
        for written in [false, true] {
            let mut core = whole();
            if written {
                core.take_ack(1, false).unwrap();
            }
            assert_eq!(core.fence(1, 1), Some(1));
            for index in [0, 2] {
                assert!(core.is_ack_due(index));
                let ack = core.take_ack(index, false).unwrap();
                assert_eq!((ack.header.kind, ack.header.offset), (Type::Ack, 1));
            }
        }
    }

    #[test]
    fn messages_are_under_way_until_all_before_them_are_complete() {
        let mut core = RecvCore::default();
        let frame = |order, offset| Header { tag: 7, message: order, order, ..chunk(offset, 128, 256) };
        for index in 0..3 {
            core.stream_up(index, 1);
            core.post(7, 256, Part { slot: index as u16, part: 0 }).unwrap();
        }
        for (index, order) in [(0, 0), (1, 1), (2, 2)] {
            core.begin(index, &frame(order, 0)).unwrap();
            assert_eq!(core.under_way(&frame(order, 0)), index + 1);
        }
        core.end(0);
        core.begin(0, &frame(0, 128)).unwrap();
        assert!(matches!(core.end(0), End::Complete(..)));
        assert_eq!(core.under_way(&frame(2, 0)), 2);
    }

    /// Found by the fuzzer of calls: the rest of an early message arrived while `irecv` was failing, since its buffer
    /// was too small. All of the message was copied into that buffer.
    #[test]
    fn a_receive_that_is_refused_is_not_posted() {
        let mut core = RecvCore::default();
        core.stream_up(0, 1);
        let message = Header { flags: EAGER, length: 100, total: 100, ..Header::of(Type::Data, 1) };
        let Place::Staged(stage) = core.begin(0, &message).unwrap() else { panic!("nothing is posted") };
        core.post(0, 99, Part { slot: 0, part: 0 }).unwrap_err();
        assert_eq!(core.end(0), End::Staged);
        assert!(matches!(core.post(0, 100, Part { slot: 0, part: 0 }), Ok(Posted::Early(key, 100)) if key == stage));
    }

    /// A receiver that accepts only messages that fit its posted receives.
    fn posted(total: u64) -> RecvCore {
        let mut core = RecvCore::default();
        core.stream_up(0, 1);
        core.stream_up(1, 1);
        core.post(0, total, Part { slot: 0, part: 0 }).unwrap();
        core
    }

    fn chunk(offset: u64, length: u32, total: u64) -> Header {
        Header { offset, length, total, ..Header::of(Type::Data, 1) }
    }

    #[test]
    fn a_chunk_that_overlaps_another_is_refused_also_while_that_one_is_coming() {
        let mut core = posted(1 << 20);
        core.begin(0, &chunk(0, 256, 1 << 20)).unwrap();
        assert!(core.begin(1, &chunk(128, 256, 1 << 20)).is_err());
        let mut core = posted(0);
        core.begin(0, &chunk(0, 0, 0)).unwrap();
        assert!(core.begin(1, &chunk(0, 0, 0)).is_err(), "an empty message comes once too");
    }

    #[test]
    fn a_chunk_with_another_number_than_its_message_is_refused() {
        let mut core = posted(1 << 20);
        core.begin(0, &chunk(0, 256, 1 << 20)).unwrap();
        assert!(core.begin(1, &Header { message: 1, ..chunk(256, 256, 1 << 20) }).is_err());
    }

    #[test]
    fn a_frame_of_another_epoch_of_its_stream_is_refused() {
        for epoch in [0, 2, u16::MAX] {
            assert!(posted(256).begin(0, &Header { epoch, ..chunk(0, 256, 256) }).is_err());
        }
        let mut core = posted(256);
        core.fence(0, 1);
        assert!(core.begin(0, &chunk(0, 256, 256)).is_err(), "a fenced stream takes nothing");
    }

    #[test]
    fn what_is_fenced_in_the_middle_of_a_chunk_may_come_again() {
        let mut core = posted(1 << 20);
        core.begin(0, &chunk(128, 256, 1 << 20)).unwrap();
        assert_eq!(core.fence(0, 1), Some(0));
        core.begin(1, &chunk(128, 256, 1 << 20)).unwrap();
    }

    /// One long receive waits while short ones of the same tag are posted and complete.
    #[test]
    fn a_receive_that_takes_long_holds_up_later_ones_but_fails_none() {
        let mut core = posted(1 << 20);
        let mut order = 1;
        while core.has_room(0) {
            core.post(0, 8, Part { slot: 1, part: 0 }).unwrap();
            core.begin(0, &Header { message: order, order, ..chunk(0, 8, 8) }).unwrap();
            core.end(0);
            order += 1;
        }
        // The sender may have sent as much as its credit allows.
        for early in 0..EAGER_WINDOW / (MESSAGE_COST + 8) {
            let order = order + early;
            core.begin(0, &Header { flags: EAGER, message: order, order, ..chunk(0, 8, 8) }).unwrap();
            core.end(0);
        }
    }

    /// The gaps between the chunks of an honest sender are chunks that are under way on other streams.
    #[test]
    fn a_peer_cannot_scatter_a_message_without_end() {
        let total = 1 << 30;
        let mut core = posted(total);
        let taken = (0..total / 256).take_while(|piece| {
            let begun = core.begin(0, &chunk(256 * piece, 1, total));
            begun.is_ok_and(|_| core.end(0) == End::More)
        });
        assert_eq!(taken.count(), MAX_RANGES + 1);
    }

    #[test]
    fn what_may_come_early_is_what_was_agreed_on() {
        let early = |far, length: u64| {
            let mut core = RecvCore::new(far);
            core.stream_up(0, 1);
            let mut taken = 0;
            let header = |order| Header { flags: EAGER, message: order, order, ..chunk(0, length as u32, length) };
            while core.begin(0, &header(taken)).is_ok() {
                core.end(0);
                taken += 1;
            }
            taken
        };
        assert_eq!([EAGER_MAX, EAGER_MAX + 1].map(|length| early(false, length)), [8, 0]);
        let all = EAGER_WINDOW_FAR / (EAGER_MAX_FAR + MESSAGE_COST);
        assert_eq!([EAGER_MAX_FAR, EAGER_MAX_FAR + 1].map(|length| early(true, length)), [all, 0]);
        assert_eq!(early(true, 0), EAGER_WINDOW_FAR / MESSAGE_COST);
    }

    #[test]
    fn a_peer_cannot_make_a_receiver_remember_without_end() {
        let mut core = posted(8);
        let queries = (0..).take_while(|tag| core.query(*tag, 100, 1 << 20).is_ok()).count() as u64;
        assert!((1..=max_early(EAGER_WINDOW)).contains(&queries), "{queries} queries were kept");
        assert!(posted(8).query(0, u64::MAX, 8).is_err());
    }
}
