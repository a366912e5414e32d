//! Short messages that do not wait for their receive.
//!
//! A CTS entry costs a write of its own, and the message waits for it. A short message is copied instead into a slot
//! of the sender's [`Outbox`], and written from there, with an immediate, into the same slot of the receiver's
//! [`Inbox`]. Its send is then done. The receiver copies it into the receive with its tag and number, or keeps it until
//! that is posted. So a receive that only short messages fit is not announced at all, unless the sender requests it.
//!
//! A head before the message describes it:
//!
//! | bytes of the head | |
//! |---|---|
//! | 0–3 | NCCL's tag |
//! | 4–7 | which send with this tag it is, counted from 0 |
//! | 8–11 | how many CTS entries the sender has read |
//! | 12–15 | bytes that follow |
//!
//! Most messages follow one with the same tag. For those the immediate replaces the head by a [`CompressedHeader`]: how
//! far the number and the count of CTS entries are ahead of the last short message's. Both sides have seen these in the
//! same order, since all of them use one queue pair. When it is lost, the messages in doubt are resent first over the
//! next one. Such messages have no head, so that 1 KiB is one packet at the smallest MTU of RoCE.
//!
//! # Credit
//! There are [`INBOX_SLOTS`] slots, used in turn. The receiver counts the messages that it has delivered and sends that
//! count with its CTS entries, or separately ([`Ring::credit`](super::cts::Ring::credit)). The sender never has more
//! than 64 undelivered messages. That also keeps it from writing into a slot that was not read. Message n (from 0) uses
//! slot n modulo 64, and is sent only once n - 63 messages were delivered. The receiver reads messages in order, and
//! moves those that it cannot deliver into a buffer. So it has read the first n - 63, the last of which is message n -
//! 64, the slot's last user.
//!
//! This module posts nothing.

use std::cell::UnsafeCell;

use super::adapter::{Adapters, MAX_DEVICES, own_regions};
use super::pages::{Pages, Zeroed};
use super::verbs::MemoryRegion;
use crate::os::error::{Error, Result};

/// The longest message that goes this way, in bytes.
pub(crate) const EAGER_MAX: u64 = 1024;

/// Bytes of the head.
const HEAD: usize = 16;

/// Messages under way at one time.
pub(crate) const INBOX_SLOTS: usize = 64;

/// Bytes of a slot: the head and the longest message, in whole cache lines.
const SLOT_BYTES: usize = (HEAD + EAGER_MAX as usize).next_multiple_of(64);

/// The receiver reports its count when it has grown by this much.
const REPORT_AFTER: u32 = INBOX_SLOTS as u32 / 2;

#[repr(align(64))]
struct InboxSlot(UnsafeCell<[u8; SLOT_BYTES]>);

// SAFETY: a slot is written by one side at a time: its owner, or a device on its behalf; see the credit above.
unsafe impl Sync for InboxSlot {}

// SAFETY: bytes.
unsafe impl Zeroed for InboxSlot {}

/// The head of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// NCCL's tag.
    pub tag: i32,
    /// Which send with this tag it is.
    pub number: u32,
    /// CTS entries that the sender has read.
    pub cts_entries: u32,
    /// Bytes of the message.
    pub length: u32,
}

impl Head {
    fn encode(&self) -> [u8; HEAD] {
        let words = [self.tag.cast_unsigned(), self.number, self.cts_entries, self.length];
        let mut out = [0; HEAD];
        for (place, word) in out.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    fn decode(bytes: &[u8; HEAD]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self { tag: word(0).cast_signed(), number: word(4), cts_entries: word(8), length: word(12) }
    }
}

/// The content of an immediate in place of a head: the same tag as the last short message, and the changes since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CompressedHeader {
    /// How far the number is ahead of the last one's; 0: there is a head.
    pub steps: u8,
    /// How many more CTS entries the sender has read.
    pub cts_entries: u8,
}

impl CompressedHeader {
    /// The message has a head.
    pub(crate) const NONE: Self = Self { steps: 0, cts_entries: 0 };
}

/// The head of the last short message, or the head that it would have had.
#[derive(Debug, Default, Clone, Copy)]
struct Last(Option<Head>);

impl Last {
    /// Notes the next message, and returns its short form if that is possible.
    #[inline(always)]
    fn compress(&mut self, head: &Head) -> CompressedHeader {
        let last = self.0.replace(*head);
        let Some(last) = last.filter(|last| last.tag == head.tag) else { return CompressedHeader::NONE };
        let steps = u8::try_from(head.number.wrapping_sub(last.number));
        let cts_entries = u8::try_from(head.cts_entries.wrapping_sub(last.cts_entries));
        match (steps, cts_entries) {
            (Ok(steps), Ok(cts_entries)) => CompressedHeader { steps, cts_entries },
            _ => CompressedHeader::NONE,
        }
    }

    /// The head of the next message of `length` bytes from its short form. None when it is the first.
    #[inline]
    fn expand(&self, compressed: CompressedHeader, length: u32) -> Option<Head> {
        let last = self.0?;
        let number = last.number.wrapping_add(compressed.steps.into());
        Some(Head {
            tag: last.tag,
            number,
            cts_entries: last.cts_entries.wrapping_add(compressed.cts_entries.into()),
            length,
        })
    }
}

/// Counts credit; the same arithmetic for any memory.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Credit {
    /// Messages sent, and how many of them were delivered as far as this side knows.
    sent: u32,
    handed_on: u32,
}

impl Credit {
    #[inline(always)]
    fn is_left(self) -> bool {
        self.sent.wrapping_sub(self.handed_on) < INBOX_SLOTS as u32
    }

    /// The receiver has delivered this many, modulo 65,536. Outdated and impossible counts change nothing.
    fn returned(&mut self, handed_on: u16) -> bool {
        let more = u32::from(handed_on.wrapping_sub(self.handed_on as u16));
        let is_news = more > 0 && more <= self.sent.wrapping_sub(self.handed_on);
        if is_news {
            self.handed_on = self.handed_on.wrapping_add(more);
        }
        is_news
    }
}

/// The sender's half.
pub(crate) struct Outbox {
    /// Dropped first: afterwards no device reads. By adapter.
    regions: Vec<MemoryRegion>,
    slots: Pages<InboxSlot>,
    credit: Credit,
    /// Messages whose writes have not completed.
    flying: u32,
    last: Last,
}

/// A message to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parcel {
    /// The message's address on this side.
    pub address: u64,
    /// Bytes, with the head if it has one.
    pub bytes: u32,
    /// Its slot.
    pub slot: u8,
    /// Its short form for the immediate.
    pub compressed: CompressedHeader,
}

impl Outbox {
    /// An empty outbox.
    ///
    /// # Errors
    /// When it cannot be pinned.
    pub(crate) fn new(adapters: &Adapters) -> Result<Self> {
        let slots = Pages::zeroed(INBOX_SLOTS)?;
        let regions = own_regions(adapters, &slots)?;
        Ok(Self { regions, slots, credit: Credit::default(), flying: 0, last: Last::default() })
    }

    /// Whether a message may be sent.
    #[inline(always)]
    pub(crate) fn has_room(&self) -> bool {
        self.credit.is_left() && self.flying < INBOX_SLOTS as u32
    }

    /// How many messages may be sent.
    pub(crate) fn room(&self) -> usize {
        INBOX_SLOTS - (self.credit.sent.wrapping_sub(self.credit.handed_on)).max(self.flying) as usize
    }

    /// The receiver has delivered this many messages, modulo 65,536. Returns whether that is new.
    #[inline]
    pub(crate) fn returned(&mut self, handed_on: u16) -> bool {
        self.credit.returned(handed_on)
    }

    /// Copies a message into the next slot. There must be room.
    ///
    /// # Safety
    /// `data` must be readable for the head's length, which is at most [`EAGER_MAX`].
    #[inline(always)]
    pub(crate) unsafe fn pack(&mut self, head: &Head, data: *const u8) -> Parcel {
        debug_assert!(self.has_room() && u64::from(head.length) <= EAGER_MAX);
        let slot = self.credit.sent as usize % INBOX_SLOTS;
        let to = self.slots[slot].0.get().cast::<u8>();
        let compressed = self.last.compress(head);
        let before = before(compressed);
        // SAFETY: inside the slot, which no device reads any more: the completion of its last write was polled, since
        // they complete in order and fewer than INBOX_SLOTS are outstanding. The caller keeps the promise about the
        // data.
        unsafe {
            if before > 0 {
                to.copy_from_nonoverlapping(head.encode().as_ptr(), HEAD);
            }
            if head.length > 0 {
                to.add(before).copy_from_nonoverlapping(data, head.length as usize);
            }
        }
        self.credit.sent = self.credit.sent.wrapping_add(1);
        self.flying += 1;
        let bytes = before as u32 + head.length;
        Parcel { address: to as u64, bytes, slot: slot as u8, compressed }
    }

    /// This side's key on an adapter.
    #[inline]
    pub(crate) fn key(&self, adapter: usize) -> u32 {
        self.regions[adapter].local_key()
    }

    /// The oldest write has completed.
    #[inline]
    pub(crate) fn completed(&mut self) {
        self.flying = self.flying.saturating_sub(1);
    }

    /// Whether every write has completed.
    pub(crate) fn is_delivered(&self) -> bool {
        self.flying == 0
    }
}

#[cold]
fn too_many() -> Error {
    Error::remote("the sending side sent more short messages than it has leave for")
}

#[cold]
fn unknown() -> Error {
    Error::remote("the sending side sent a short message without saying which")
}

#[cold]
fn other_length(head: &Head, written: u32) -> Error {
    Error::remote(format!("the sending side wrote {written} bytes for a short message of {}", head.length))
}

/// Bytes before a message.
#[inline]
fn before(compressed: CompressedHeader) -> usize {
    if compressed.steps == 0 { HEAD } else { 0 }
}

/// The location of the peer's inbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    /// By the receiver's addresses.
    pub start: u64,
    /// The keys, by port of the receiver.
    pub keys: [u32; MAX_DEVICES],
}

impl Address {
    /// As the receiver announced it.
    pub(crate) fn new(start: u64, own: &[u32]) -> Self {
        let mut keys = [0; MAX_DEVICES];
        keys.iter_mut().zip(own).for_each(|(key, own)| *key = *own);
        Self { start, keys }
    }

    /// Where a slot begins.
    #[inline]
    pub(crate) fn of(&self, slot: u8) -> u64 {
        self.start + (usize::from(slot) * SLOT_BYTES) as u64
    }
}

/// The receiver's half.
pub(crate) struct Inbox {
    /// Dropped first: afterwards no device writes. By adapter.
    regions: Vec<MemoryRegion>,
    slots: Pages<InboxSlot>,
    arrived: u32,
    handed_on: u32,
    reported: u32,
    last: Last,
    /// Messages whose receives are not posted.
    kept: Vec<Kept>,
}

/// A message that arrived before its receive.
#[derive(Debug)]
pub(crate) struct Kept {
    head: Head,
    wr_id: u64,
    bytes: Box<[u8]>,
}

impl Kept {
    /// The message.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The head before the message.
    pub(crate) fn head(&self) -> &Head {
        &self.head
    }

    /// The work request with which it arrived.
    pub(crate) fn wr_id(&self) -> u64 {
        self.wr_id
    }
}

impl Inbox {
    /// An empty inbox.
    ///
    /// # Errors
    /// When it cannot be pinned.
    pub(crate) fn new(adapters: &Adapters) -> Result<Self> {
        let slots = Pages::zeroed(INBOX_SLOTS)?;
        let regions = own_regions(adapters, &slots)?;
        Ok(Self { regions, slots, arrived: 0, handed_on: 0, reported: 0, last: Last::default(), kept: Vec::new() })
    }

    /// Where the sender writes.
    pub(crate) fn address(&self) -> Address {
        let keys: Vec<u32> = self.regions.iter().map(MemoryRegion::remote_key).collect();
        Address::new(self.slots.as_ptr() as u64, &keys)
    }

    /// A message has arrived: returns its head, and where its bytes are until the next message is requested.
    ///
    /// # Errors
    /// When it is not the next, or not as long as was written.
    #[inline(always)]
    pub(crate) fn arrived(
        &mut self,
        slot: u8,
        compressed: CompressedHeader,
        written: u32,
    ) -> Result<(Head, *const u8)> {
        let expected = self.arrived as usize % INBOX_SLOTS;
        if usize::from(slot) != expected || self.arrived.wrapping_sub(self.handed_on) >= INBOX_SLOTS as u32 {
            return Err(too_many());
        }
        self.arrived = self.arrived.wrapping_add(1);
        let from = self.slots[expected].0.get().cast::<u8>();
        let before = before(compressed);
        let head = if before == 0 {
            self.last.expand(compressed, written).ok_or_else(unknown)?
        } else {
            // SAFETY: inside the slot. Its write has completed, and the sender may not write there again before the
            // delivery of later messages is reported to it. If the sender does so anyway, the bytes are no secret and
            // no reference to them is made.
            Head::decode(&unsafe { from.cast::<[u8; HEAD]>().read_volatile() })
        };
        if u64::from(head.length) > EAGER_MAX || head.length + before as u32 != written {
            return Err(other_length(&head, written));
        }
        self.last = Last(Some(head));
        // SAFETY: the head of the message ends inside the slot.
        Ok((head, unsafe { from.add(before) }))
    }

    /// A message was copied into its receive.
    #[inline]
    pub(crate) fn hand_on(&mut self) {
        self.handed_on = self.handed_on.wrapping_add(1);
    }

    /// Keeps a message until its receive is posted.
    ///
    /// # Safety
    /// `data` is the pointer that [`Inbox::arrived`] has just returned with that head.
    #[cold]
    pub(crate) unsafe fn keep(&mut self, head: Head, wr_id: u64, data: *const u8) {
        let mut bytes = vec![0; head.length as usize].into_boxed_slice();
        // SAFETY: the message's bytes, whose length was checked, and a fresh buffer.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(data, bytes.len()) };
        self.kept.push(Kept { head, wr_id, bytes });
    }

    /// The message for a receive, if it has arrived; it counts as delivered.
    #[inline]
    pub(crate) fn take(&mut self, tag: i32, number: u32) -> Option<Kept> {
        let at = self.kept.iter().position(|kept| kept.head.tag == tag && kept.head.number == number)?;
        self.hand_on();
        Some(self.kept.swap_remove(at))
    }

    /// Whether a message for a receive has arrived.
    pub(crate) fn holds(&self, tag: i32, number: u32) -> bool {
        self.kept.iter().any(|kept| kept.head.tag == tag && kept.head.number == number)
    }

    /// How many messages were delivered, for a CTS entry that is written now.
    #[inline]
    pub(crate) fn report(&mut self) -> u16 {
        self.reported = self.handed_on;
        self.handed_on as u16
    }

    /// Whether the count should be sent separately.
    #[inline]
    pub(crate) fn is_telling_due(&self) -> bool {
        self.handed_on.wrapping_sub(self.reported) >= REPORT_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_head_survives(tag: i32, number: u32, cts_entries: u32, length: u32) {
            let head = Head { tag, number, cts_entries, length };
            prop_assert_eq!(Head::decode(&head.encode()), head);
        }

        /// The short form carries the same data as a head, whichever messages have a head.
        #[test]
        fn a_compressed_header_is_understood(
            start: (i32, u32, u32),
            messages in prop::collection::vec(
                (prop_oneof![4 => Just(0_i32), 1 => -1..2_i32], 0..1025_u32,
                 prop_oneof![Just(1_u32), 0..300_u32, any::<u32>()], prop_oneof![0..3_u32, 0..300_u32, any::<u32>()]),
                1..100,
            ),
        ) {
            let (mut sender, mut receiver) = (Last::default(), Last::default());
            let mut head = Head { tag: start.0, number: start.1, cts_entries: start.2, length: 0 };
            for (tag, length, steps, cts_entries) in messages {
                head = Head {
                    tag: head.tag.wrapping_add(tag),
                    number: head.number.wrapping_add(steps),
                    cts_entries: head.cts_entries.wrapping_add(cts_entries),
                    length,
                };
                let is_first = receiver.0.is_none();
                let compressed = sender.compress(&head);
                if !is_first && tag == 0 && (1..256).contains(&steps) && cts_entries < 256 {
                    prop_assert!(compressed.steps > 0, "{head:?} needs no head");
                }
                if compressed.steps > 0 {
                    prop_assert_eq!(receiver.expand(compressed, length), Some(head));
                }
                receiver = Last(Some(head));
            }
        }

        /// Counts arrive late, twice or torn. Never more than INBOX_SLOTS messages are under way, and none is written
        /// into a slot whose message the receiver has not read.
        #[test]
        fn credit_never_overtakes_the_receiver(
            start: u32,
            events in prop::collection::vec((0..4_u8, any::<prop::sample::Index>()), 1..600),
        ) {
            let mut credit = Credit { sent: start, handed_on: start };
            // Messages that are read but not delivered may be delivered in any order.
            let (mut read, mut handed_on) = (start, start);
            let mut reports = vec![start as u16];
            for (event, index) in events {
                match event {
                    0 if credit.is_left() => {
                        let out = credit.sent.wrapping_sub(read);
                        prop_assert!(out < INBOX_SLOTS as u32, "the slot's last message was not read");
                        credit.sent = credit.sent.wrapping_add(1);
                    }
                    1 if read != credit.sent => read = read.wrapping_add(1),
                    2 if handed_on != read => {
                        handed_on = handed_on.wrapping_add(1);
                        reports.push(handed_on as u16);
                    }
                    3 => {
                        let from = reports.len().saturating_sub(200);
                        credit.returned(reports[from + index.index(reports.len() - from)]);
                    }
                    _ => {}
                }
                prop_assert!(handed_on.wrapping_sub(credit.handed_on) <= INBOX_SLOTS as u32, "it believes no more than is true");
                prop_assert!(credit.sent.wrapping_sub(handed_on) <= INBOX_SLOTS as u32);
            }
        }
    }

    #[test]
    fn an_empty_message_has_a_head_only() {
        let head = Head { tag: 1, number: 2, cts_entries: 3, length: 0 };
        assert_eq!(Head::decode(&head.encode()), head);
        const { assert!(SLOT_BYTES.is_multiple_of(64) && SLOT_BYTES >= HEAD + EAGER_MAX as usize) };
        const { assert!(INBOX_SLOTS <= 256, "a slot's number fits into an immediate") };
    }
}
