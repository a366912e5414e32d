//! The parts of receives that have not ended: those that are announced, and those that the sender may fill unannounced.
//!
//! A part takes a slot, whose number is in its CTS entry and in every immediate that answers it; the generation
//! distinguishes one use of a slot from the next. This module posts nothing.

use std::collections::VecDeque;
use std::sync::Arc;

use super::adapter::Registration;
use super::cts::{CTS_ENTRIES, CtsEntry};
use crate::engine::request::Ticket;
use crate::os::error::{Error, Result};

/// A part of a receive that has not ended.
pub(crate) struct Slot {
    /// Whether it is in use.
    pub is_taken: bool,
    /// Which use of the slot.
    pub generation: u8,
    /// The request, and the index of the part.
    pub request: u16,
    /// The index of the part.
    pub part: u8,
    /// Immediates still to arrive; None before the first one has.
    pub left: Option<u8>,
    /// Bytes that have arrived.
    pub size: u64,
    /// The address of the buffer.
    pub address: u64,
    /// How many fit.
    pub capacity: u64,
    /// NCCL's tag.
    pub tag: i32,
    /// Which receive with this tag it is.
    pub number: u32,
    /// Which CTS entry announced it, counted from 1; 0 when none has.
    pub cts: u64,
    /// It is not the last part of its group.
    pub has_more: bool,
    /// Keeps the pages pinned.
    pub memory: Option<Arc<Registration>>,
}

impl Slot {
    const FREE: Self = Self {
        is_taken: false,
        generation: 0,
        request: 0,
        part: 0,
        left: None,
        size: 0,
        address: 0,
        capacity: 0,
        tag: 0,
        number: 0,
        cts: 0,
        has_more: false,
        memory: None,
    };
}

/// A part as it is posted.
pub(crate) struct Part {
    /// Its request.
    pub ticket: Ticket,
    /// Which part.
    pub index: usize,
    /// The address of the buffer.
    pub address: u64,
    /// How many fit.
    pub size: u64,
    /// NCCL's tag.
    pub tag: i32,
    /// Which receive with this tag it is.
    pub number: u32,
    /// The registration that contains the address.
    pub memory: Option<Arc<Registration>>,
    /// It is not the last part of its group.
    pub has_more: bool,
}

/// A slot's number is a byte.
const _: () = assert!(CTS_ENTRIES == 1 << u8::BITS);

/// All parts of a connection.
pub(crate) struct Receives {
    slots: Box<[Slot; CTS_ENTRIES]>,
    free: Vec<u8>,
    /// Slots in use, in the order of posting.
    open: VecDeque<u8>,
    /// The request slot announced by a CTS entry, by the entry's slot in the ring.
    announced: Box<[u8; CTS_ENTRIES]>,
    /// CTS entries that were written, and the last one that the sender has certainly read.
    written: u64,
    read: u64,
}

impl Default for Receives {
    fn default() -> Self {
        Self::new()
    }
}

impl Receives {
    /// None.
    pub(crate) fn new() -> Self {
        Self {
            slots: Box::new([Slot::FREE; CTS_ENTRIES]),
            free: (0..=u8::MAX).rev().collect(),
            open: VecDeque::with_capacity(CTS_ENTRIES),
            announced: Box::new([0; CTS_ENTRIES]),
            written: 0,
            read: 0,
        }
    }

    /// Whether `count` more parts can be posted and announced.
    #[inline]
    pub(crate) fn has_room(&self, count: usize) -> bool {
        self.free.len() >= count && self.can_announce(count)
    }

    /// Whether the ring has slots for this many entries.
    #[inline]
    pub(crate) fn can_announce(&self, count: usize) -> bool {
        (self.written - self.read) as usize + count <= CTS_ENTRIES
    }

    /// The number of the last CTS entry.
    #[inline]
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// The CTS entries that the sender is not known to have read: how many, after which.
    pub(crate) fn unread(&self) -> (u64, usize) {
        (self.read, (self.written - self.read) as usize)
    }

    /// Takes a slot for a part. There must be room.
    #[inline]
    pub(crate) fn open(&mut self, part: Part) -> u8 {
        let number = self.free.pop().expect("the room was checked");
        let slot = &mut self.slots[usize::from(number)];
        *slot = Slot {
            is_taken: true,
            generation: slot.generation.wrapping_add(1),
            request: part.ticket.slot,
            part: part.index as u8,
            left: None,
            size: 0,
            address: part.address,
            capacity: part.size,
            tag: part.tag,
            number: part.number,
            cts: 0,
            has_more: part.has_more,
            memory: part.memory,
        };
        self.open.push_back(number);
        number
    }

    /// The next CTS entry, which announces that slot.
    #[inline]
    pub(crate) fn announce(&mut self, number: u8, handed_on: u16) -> CtsEntry {
        self.written += 1;
        let slot = &mut self.slots[usize::from(number)];
        slot.cts = self.written;
        self.announced[self.written as usize % CTS_ENTRIES] = number;
        CtsEntry {
            address: slot.address,
            size: slot.capacity,
            has_more: slot.has_more,
            handed_on,
            keys: slot.memory.as_ref().map_or([0; 8], |memory| memory.remote_keys()),
            tag: slot.tag,
            slot: number,
            generation: slot.generation,
            order: slot.number as u16,
            number: self.written as u32,
        }
    }

    /// Whether a part that has not ended was posted with this registration.
    pub(crate) fn want(&self, memory: &Arc<Registration>) -> bool {
        let held = |number: &u8| self.slots[usize::from(*number)].memory.as_ref();
        self.open.iter().any(|number| held(number).is_some_and(|held| Arc::ptr_eq(held, memory)))
    }

    /// No device accesses the memory of any part any more, so it need not stay pinned.
    pub(crate) fn let_go(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.memory = None);
    }

    /// Slots in use without a CTS entry, oldest first.
    pub(crate) fn silent(&self) -> Vec<u8> {
        self.open.iter().copied().filter(|number| self.slots[usize::from(*number)].cts == 0).collect()
    }

    /// A slot that an immediate names.
    ///
    /// # Errors
    /// When it is not in use, or not in this one.
    #[inline]
    pub(crate) fn answered(&mut self, number: u8, generation: u8) -> Result<&mut Slot> {
        let slot = &mut self.slots[usize::from(number)];
        if !slot.is_taken || slot.generation != generation || slot.cts == 0 {
            return Err(Error::remote("the sending side filled a receive that was not posted"));
        }
        self.read = self.read.max(slot.cts);
        Ok(slot)
    }

    /// The slot announced by a CTS entry without an answer, for one immediate that answers several.
    ///
    /// # Errors
    /// When there is none.
    #[inline]
    pub(crate) fn announced_by(&mut self, cts: u64) -> Result<u8> {
        let number = self.announced[cts as usize % CTS_ENTRIES];
        let slot = &self.slots[usize::from(number)];
        if !slot.is_taken || slot.cts != cts || cts == 0 || slot.left.is_some() {
            return Err(Error::remote("the sending side filled a receive that was not posted"));
        }
        Ok(number)
    }

    /// The sender has read this many CTS entries, modulo 2^32.
    ///
    /// # Errors
    /// When there are not that many.
    #[inline(always)]
    pub(crate) fn has_read(&mut self, cts_entries: u32) -> Result<()> {
        let more = cts_entries.wrapping_sub(self.read as u32).cast_signed();
        // The sender is known to have read more: the count is outdated.
        if more <= 0 {
            return Ok(());
        }
        if more as u64 > self.written - self.read {
            return Err(Error::remote("the sending side says that it has read CTS entries that were not written"));
        }
        self.read += more as u64;
        Ok(())
    }

    /// The slot of a receive, by tag and number.
    #[inline(always)]
    pub(crate) fn find(&self, tag: i32, number: u32) -> Option<u8> {
        // Nearly always the first.
        let first = self.open.front().copied().filter(|at| self.holds(*at, tag, number));
        first.or_else(|| self.search(tag, number))
    }

    #[cold]
    fn search(&self, tag: i32, number: u32) -> Option<u8> {
        self.open.iter().copied().find(|at| self.holds(*at, tag, number))
    }

    #[inline(always)]
    fn holds(&self, at: u8, tag: i32, number: u32) -> bool {
        let slot = &self.slots[usize::from(at)];
        slot.number == number && slot.tag == tag
    }

    /// A slot.
    #[inline(always)]
    pub(crate) fn slot(&mut self, number: u8) -> &mut Slot {
        &mut self.slots[usize::from(number)]
    }

    /// The part is complete: its slot is free again.
    #[inline(always)]
    pub(crate) fn close(&mut self, number: u8) {
        let slot = &mut self.slots[usize::from(number)];
        slot.is_taken = false;
        slot.memory = None;
        self.free.push(number);
        // Nearly always the first.
        if self.open.front() == Some(&number) {
            self.open.pop_front();
        } else {
            self.take_out(number);
        }
    }

    #[cold]
    fn take_out(&mut self, number: u8) {
        if let Some(at) = self.open.iter().position(|open| *open == number) {
            self.open.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(tag: i32, number: u32) -> Part {
        let ticket = crate::engine::request::RequestSlots::new().take(1).expect("a slot");
        Part { ticket, index: 0, address: 64, size: 8, tag, number, memory: None, has_more: false }
    }

    #[test]
    fn a_receive_is_found_by_tag_and_number_until_it_is_complete() {
        let mut receives = Receives::new();
        let slots: Vec<u8> = (0..10).map(|number| receives.open(part(number % 2, number as u32 / 2))).collect();
        assert_eq!(receives.find(1, 3), Some(slots[7]));
        assert_eq!(receives.find(1, 5), None);
        receives.close(slots[7]);
        assert_eq!(receives.find(1, 3), None);
        assert_eq!(receives.silent().len(), 9);
    }

    #[test]
    fn only_an_announced_slot_in_its_present_use_is_answered() {
        let mut receives = Receives::new();
        let slot = receives.open(part(0, 0));
        let generation = receives.slot(slot).generation;
        assert!(receives.answered(slot, generation).is_err(), "no CTS entry has named it");
        let cts = receives.announce(slot, 0);
        assert_eq!((cts.slot, cts.generation, cts.number), (slot, generation, 1));
        assert!(receives.answered(slot, generation.wrapping_add(1)).is_err());
        assert!(receives.answered(slot, generation).is_ok());
        receives.close(slot);
        assert!(receives.answered(slot, generation).is_err());
    }

    #[test]
    fn an_immediate_for_several_cts_entries_answers_each_of_them_once() {
        let mut receives = Receives::new();
        let slots: Vec<u8> = (0..3).map(|number| receives.open(part(0, number))).collect();
        assert!(receives.announced_by(0).is_err() && receives.announced_by(1).is_err(), "no CTS entry is written");
        for slot in &slots {
            receives.announce(*slot, 0);
        }
        assert_eq!((1..4).map(|cts| receives.announced_by(cts).expect("open")).collect::<Vec<_>>(), slots);
        receives.slot(slots[1]).left = Some(1);
        assert!(receives.announced_by(2).is_err(), "a share of it has come by itself");
        receives.close(slots[0]);
        assert!(receives.announced_by(1).is_err());
        assert!(receives.announced_by(1 + CTS_ENTRIES as u64).is_err(), "a CTS entry that is not written yet");
        assert!(receives.announced_by(3).is_ok());
    }

    #[test]
    fn the_ring_has_room_again_when_the_sender_says_that_it_has_read() {
        let mut receives = Receives::new();
        for number in 0..CTS_ENTRIES as u32 {
            let slot = receives.open(part(0, number));
            receives.announce(slot, 0);
            receives.close(slot);
        }
        assert!(!receives.has_room(1));
        assert!(receives.has_read(CTS_ENTRIES as u32 + 1).is_err());
        receives.has_read(3).expect("there are more");
        assert!(receives.has_room(3) && !receives.has_room(4));
        receives.has_read(1).expect("old news");
        assert!(receives.has_room(3));
    }
}
