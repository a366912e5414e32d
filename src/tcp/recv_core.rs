//! The receiving side of the protocol, without sockets, clocks or bytes.
//!
//! Receives are posted per tag and numbered; a frame says which number it belongs to, so matching does not depend
//! on the order in which streams deliver. A short message that comes before its receive is staged; a long one
//! comes only after the receive was announced by a clear-to-send.
//!
//! Everything that arrives is checked against what was posted before a byte is placed: the peer has proved that it
//! holds the secret, but it may still be broken.

use std::collections::VecDeque;

use slab::Slab;

use super::frame::{EAGER, Header, PROMPT, Type};
use super::limits::{ACK_EVERY, EAGER_MAX, EAGER_WINDOW, MAX_AHEAD, MESSAGE_COST};
use super::send_core::too_long;
use crate::os::error::{Error, Result};

/// Names a staging buffer for an early message.
pub type StageKey = usize;

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

/// What the end of a frame brought about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The message goes on.
    More,
    /// This part has all its bytes.
    Complete(Part, u64),
    /// A staged message is whole; its receive is not posted yet.
    Staged,
    /// A staged message is whole and its receive was posted meanwhile: copy, then call [`RecvCore::unstaged`].
    Unstage(StageKey, Part, u64),
}

/// What became of a receive when it was posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// It waits; the sender needs no clear-to-send for a buffer this small.
    Waits,
    /// It waits, and the sender must be told: tag, order, capacity.
    Announce(Header),
    /// The message is here: copy it out of staging, then call [`RecvCore::unstaged`].
    Early(StageKey, u64),
}

#[derive(Default)]
struct Entry {
    part: Option<(Part, u64)>,
    total: Option<u64>,
    /// The size of a message that the sender has asked about.
    asked: Option<u64>,
    received: u64,
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

impl Tag {
    fn entry(&mut self, order: u64) -> &mut Entry {
        let at = (order - self.base) as usize;
        while self.entries.len() <= at {
            self.entries.push_back(Entry::default());
        }
        &mut self.entries[at]
    }

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
    length: u32,
    place: Place,
    /// The sender waits for this frame's acknowledgement.
    prompt: bool,
}

#[derive(Default)]
struct Stream {
    epoch: u16,
    received: u64,
    acked: u64,
    prompt: bool,
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
    /// Eager bytes whose window may be used again, so far.
    returned: u64,
    /// The same, as far as the sender was told.
    told: u64,
}

impl RecvCore {
    /// Stream `index` is connected, in the given epoch.
    pub fn stream_up(&mut self, index: usize, epoch: u16) {
        while self.streams.len() <= index {
            self.streams.push(Stream::default());
        }
        // The counts go on through all lives of the stream.
        let received = self.streams[index].received;
        self.streams[index] = Stream { epoch, received, acked: received, ..Stream::default() };
    }

    /// A receive of at most `capacity` bytes was posted.
    ///
    /// # Errors
    /// A usage error when the message is here already and is longer.
    pub fn post(&mut self, tag: i32, capacity: u64, part: Part) -> Result<Posted> {
        let queue = self.tag(tag);
        let order = queue.posted;
        queue.posted += 1;
        let entry = queue.entry(order);
        debug_assert!(entry.part.is_none());
        entry.part = Some((part, capacity));
        if let Some(total) = entry.total.or(entry.asked).filter(|total| *total > capacity) {
            return Err(too_long(total, capacity, tag));
        }
        if entry.staged_whole {
            let stage = entry.stage.expect("a staged message has a buffer");
            return Ok(Posted::Early(stage, entry.total.expect("known since its first frame")));
        }
        if (capacity > EAGER_MAX || entry.asked.is_some()) && entry.stage.is_none() {
            let header = Header { tag, order, total: capacity, ..Header::of(Type::Clear, 0) };
            return Ok(Posted::Announce(header));
        }
        Ok(Posted::Waits)
    }

    /// The sender asks after the `order`-th receive with `tag`, for a message of `total` bytes that has waited a while.
    /// The answer, if it can be given now.
    ///
    /// # Errors
    /// A usage error when the receive is posted and smaller; a remote error when the peer runs too far ahead.
    pub fn ask(&mut self, tag: i32, order: u64, total: u64) -> Result<Option<Header>> {
        let queue = self.tag(tag);
        if order < queue.base {
            return Ok(None);
        }
        if order - queue.base >= MAX_AHEAD {
            return Err(Error::remote("the peer sent more messages than a connection can hold"));
        }
        let entry = queue.entry(order);
        if entry.done || entry.total.is_some() {
            return Ok(None);
        }
        match entry.part {
            Some((_, capacity)) if total > capacity => Err(too_long(total, capacity, tag)),
            Some((_, capacity)) => Ok(Some(Header { tag, order, total: capacity, ..Header::of(Type::Clear, 0) })),
            None => {
                entry.asked = Some(total);
                Ok(None)
            }
        }
    }

    /// The clear-to-sends of all receives that still wait for a message that needs one: after a break they may
    /// have been lost.
    pub fn announcements(&self) -> Vec<Header> {
        let mut headers = Vec::new();
        for queue in &self.tags {
            for (order, entry) in (queue.base..).zip(&queue.entries) {
                if let Some((_, capacity)) = entry.part
                    && capacity > EAGER_MAX
                    && entry.total.is_none()
                    && !entry.done
                {
                    headers.push(Header { tag: queue.tag, order, total: capacity, ..Header::of(Type::Clear, 0) });
                }
            }
        }
        headers
    }

    /// A data frame begins on stream `index`: where does its payload go?
    ///
    /// # Errors
    /// A remote error when the frame contradicts what was posted or sent before; a usage error when the message is
    /// longer than its receive.
    pub fn begin(&mut self, index: usize, header: &Header) -> Result<Place> {
        let stream = self.streams.get(index).ok_or_else(|| Error::remote("a frame came on an unknown stream"))?;
        if stream.epoch != header.epoch || stream.fenced || stream.open.is_some() {
            return Err(Error::remote(format!(
                "a frame of epoch {} came on stream {index}, which is in epoch {}",
                header.epoch, stream.epoch
            )));
        }
        let (tag, order, eager) = (header.tag, header.order, header.flags & EAGER != 0);
        let staged_bytes = self.staged_bytes;
        let queue = self.tag(tag);
        if order < queue.base || order - queue.base >= MAX_AHEAD {
            return Err(Error::remote(format!(
                "message {order} with tag {tag} is not expected (next is {})",
                queue.base
            )));
        }
        let entry = queue.entry(order);
        if entry.done || entry.total.is_some_and(|total| total != header.total) || entry.stage.is_some() {
            return Err(Error::remote(format!("message {order} with tag {tag} came twice, or its size changed")));
        }
        if eager && (header.length as u64 != header.total || header.total > EAGER_MAX) {
            return Err(Error::remote("an eager message was split or is too long"));
        }
        entry.eager = eager;
        entry.total = Some(header.total);
        let place = match entry.part {
            Some((_, capacity)) if header.total > capacity => return Err(too_long(header.total, capacity, tag)),
            Some(_) if entry.received + u64::from(header.length) > header.total => {
                return Err(Error::remote(format!("message {order} with tag {tag} has more bytes than its size")));
            }
            Some((part, _)) => Place::Posted(part, header.offset),
            None if !eager => {
                return Err(Error::remote(format!("message {order} with tag {tag} came without clear-to-send")));
            }
            None => {
                let cost = header.total + MESSAGE_COST;
                if staged_bytes + cost > EAGER_WINDOW {
                    return Err(Error::remote("the peer sent more early messages than it had credit for"));
                }
                let stage = self.stages.insert(cost);
                self.staged_bytes += cost;
                self.tag(tag).entry(order).stage = Some(stage);
                Place::Staged(stage)
            }
        };
        let stream = &mut self.streams[index];
        let prompt = header.flags & PROMPT != 0;
        stream.open = Some(Open { tag, order, length: header.length, place, prompt });
        Ok(place)
    }

    /// The payload of the frame that began on stream `index` is in its place.
    pub fn end(&mut self, index: usize) -> End {
        let stream = &mut self.streams[index];
        let open = stream.open.take().expect("a frame was open");
        stream.received += 1;
        // Only now: an acknowledgement that leaves while the payload is still coming does not speak of this frame.
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

    /// The acknowledgement that stream `index` owes, if any. With `force`, also what nobody waits for.
    pub fn take_ack(&mut self, index: usize, force: bool) -> Option<Header> {
        let owed = self.returned - self.told;
        let returned = self.returned;
        let stream = self.streams.get_mut(index)?;
        let frames = stream.received - stream.acked;
        let due = (stream.prompt && frames > 0) || frames >= ACK_EVERY || owed >= EAGER_WINDOW / 4;
        if !(due || force && (frames > 0 || owed > 0)) {
            return None;
        }
        stream.prompt = false;
        stream.acked = stream.received;
        self.told = returned;
        Some(Header { offset: stream.received, total: returned, ..Header::of(Type::Ack, stream.epoch) })
    }

    /// What the receives in flight wait for, in a line for logs.
    pub fn describe(&self) -> String {
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

    /// Whether the sender should learn of returned credit soon: it may be waiting for it.
    pub fn owes_credit(&self) -> bool {
        self.returned - self.told >= EAGER_WINDOW / 4
    }

    /// The epoch of stream `index`.
    pub fn epoch(&self, index: usize) -> u16 {
        self.streams.get(index).map_or(0, |stream| stream.epoch)
    }

    /// Nothing more may be taken in from stream `index`; returns how many frames were.
    pub fn fence(&mut self, index: usize) -> u64 {
        while self.streams.len() <= index {
            self.streams.push(Stream::default());
        }
        let stream = &mut self.streams[index];
        stream.fenced = true;
        // An acknowledgement that was on its way may be lost, and the credit in it: tell all of it again.
        self.told = 0;
        // A frame that had begun never ends: it does not count, and will come again from its first byte. A
        // staging buffer it had begun to fill is given back by `drop_open`.
        let open = stream.open.take();
        let received = stream.received;
        if let Some(open) = open {
            self.drop_open(open);
        }
        received
    }

    fn drop_open(&mut self, open: Open) {
        if let Place::Staged(stage) = open.place {
            let cost = self.stages.remove(stage);
            self.staged_bytes -= cost;
            let entry = self.tag(open.tag).entry(open.order);
            entry.stage = None;
            entry.total = None;
        }
    }

    fn tag(&mut self, tag: i32) -> &mut Tag {
        if self.tags.get(self.last_tag).is_none_or(|queue| queue.tag != tag) {
            self.last_tag = self.tags.binary_search_by_key(&tag, |queue| queue.tag).unwrap_or_else(|at| {
                self.tags.insert(at, Tag { tag, base: 0, posted: 0, entries: VecDeque::new() });
                at
            });
        }
        &mut self.tags[self.last_tag]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by `towline send-recv`: the acknowledgement of one frame went out while the next one was half read, and
    /// used up that one's wish for its own. Its sender waited for ever.
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
        assert_eq!(core.take_ack(0, false).map(|header| header.offset), Some(1));
        assert!(core.take_ack(0, false).is_none(), "nothing new has arrived");
        assert!(matches!(core.end(0), End::Complete(..)));
        assert_eq!(core.take_ack(0, false).map(|header| header.offset), Some(2));
    }
}
