//! The request slab of one connection: preallocated slots that end exactly once.
//!
//! NCCL gets a request from `isend`/`irecv` and checks it with `test`. The slot holds the result for `test`: whether
//! all parts are done, the size of each part, or the failure. The caller's side takes slots from a list of free ones;
//! the threads that move data touch only the slot's atomics. The list's lock is taken once per request, when it is
//! made. A request that ends leaves its slot marked free, and the next caller that takes slots finds the mark. Where
//! requests are already made under another lock, the list is kept there ([`RequestSlots::with_keys`]).
//!
//! Guarantee: sizes are written before the state, the state with Release, and [`RequestSlots::finish`] reads it with
//! Acquire. So a thread that sees "done" sees every byte and size written before.

use std::sync::PoisonError;

use crate::os::error::{Error, Result};
use crate::os::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use crate::os::sync::{Mutex, MutexGuard};

/// NCCL's largest grouped receive (NCCL_NET_IB_MAX_RECVS in NCCL's own IB transport, 2.12 and later).
pub(crate) const MAX_PARTS: usize = 8;
/// 32 outstanding requests (NCCL_NET_MAX_REQUESTS since 2.19) of up to 8 grouped parts: on the sending side each
/// part is a request of its own.
pub(crate) const SLOTS: usize = 32 * MAX_PARTS;

/// [`Keys`] counts in bytes.
const _: () = assert!(SLOTS == 1 << u8::BITS);

/// The values of a slot's `state`. A new slot is zero, which is free.
#[repr(u8)]
enum State {
    Free,
    Pending,
    Done,
}

/// A taken slot: its number and the generation that makes its handle unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    /// The slot's number, below [`SLOTS`].
    pub slot: u16,
    /// Unique in its connection until 2³² requests have passed, and far from those of other connections.
    pub generation: u32,
}

/// The thread that completes a single-part request can attach one record to it; the thread that calls `test` reads it.
pub(crate) type LastWords = [u64; 5];

/// Everything about a request of one part is in the first cache line, which a thread that tests it in a loop already
/// has.
#[derive(Default)]
#[repr(C, align(64))]
struct Slot {
    generation: AtomicU32,
    state: AtomicU8,
    parts: AtomicU8,
    remaining: AtomicU8,
    /// Whether a record was left.
    said: AtomicBool,
    last: [AtomicU64; size_of::<LastWords>() / size_of::<u64>()],
    sizes: [AtomicU64; MAX_PARTS],
}

/// The result of `test` for a finished request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// How many parts the request had: 1 for a send, n for a grouped receive.
    pub parts: usize,
    /// The size of each part in bytes, in posting order.
    pub sizes: [u64; MAX_PARTS],
}

/// All request slots of one connection.
pub struct RequestSlots {
    slots: Box<[Slot; SLOTS]>,
    keys: Mutex<Keys>,
}

/// Which slots are taken, and the generation of the next request.
pub struct Keys {
    /// Slots that may be taken: the first `left` of these, the one given back last at the end, since its memory is most
    /// likely cached.
    free: [u8; SLOTS],
    left: usize,
    /// Slots that were taken and not found free since, in the order in which they were taken. They end in nearly the
    /// same order. This is a ring, whose oldest entry is at `oldest` and is followed by `taken` more.
    order: [u8; SLOTS],
    oldest: u8,
    taken: usize,
    generation: u32,
}

impl Keys {
    /// Keys for slots of which none is taken.
    fn all() -> Self {
        Self {
            free: std::array::from_fn(|k| (SLOTS - 1 - k) as u8),
            left: SLOTS,
            order: [0; SLOTS],
            oldest: 0,
            taken: 0,
            // 2³² divided by the golden ratio, made odd: its multiples spread evenly and repeat after 2³² connections.
            generation: GENERATIONS.fetch_add(0x9E37_79B9, Ordering::Relaxed),
        }
    }

    /// Keys for no slots.
    fn none() -> Self {
        Self { free: [0; SLOTS], left: 0, order: [0; SLOTS], oldest: 0, taken: 0, generation: 0 }
    }

    /// The slot that was taken before all others, if its request has ended.
    #[inline(always)]
    fn ended(&mut self, slots: &[Slot; SLOTS]) -> Option<u8> {
        let slot = self.order[usize::from(self.oldest)];
        if self.taken == 0 || !slots[usize::from(slot)].is_free() {
            return None;
        }
        self.oldest = self.oldest.wrapping_add(1);
        self.taken -= 1;
        Some(slot)
    }

    /// A free slot: the oldest one when its request has ended, which is nearly always so.
    #[inline(always)]
    fn take(&mut self, slots: &[Slot; SLOTS]) -> Option<u8> {
        let slot = match self.ended(slots) {
            Some(slot) => {
                // Gives back the following slots whose requests have also ended: with few concurrent requests few slots
                // are used, and their memory stays cached.
                while let Some(other) = self.ended(slots) {
                    self.free[self.left] = other;
                    self.left += 1;
                }
                slot
            }
            None => self.unused(slots)?,
        };
        self.order[usize::from(self.oldest.wrapping_add(self.taken as u8))] = slot;
        self.taken += 1;
        self.generation = self.generation.wrapping_add(1);
        Some(slot)
    }

    /// A slot from the free list. If the list is empty, a slot whose request has ended although an older one has not.
    fn unused(&mut self, slots: &[Slot; SLOTS]) -> Option<u8> {
        if self.left == 0 {
            self.take_back_all(slots);
        }
        self.left = self.left.checked_sub(1)?;
        Some(self.free[self.left])
    }

    #[cold]
    fn take_back_all(&mut self, slots: &[Slot; SLOTS]) {
        let (former, taken) = (self.order, self.taken);
        self.taken = 0;
        for slot in (0..taken).map(|k| former[(usize::from(self.oldest) + k) % SLOTS]) {
            if slots[usize::from(slot)].is_free() {
                self.free[self.left] = slot;
                self.left += 1;
            } else {
                self.order[usize::from(self.oldest.wrapping_add(self.taken as u8))] = slot;
                self.taken += 1;
            }
        }
    }

    /// How many requests have not ended.
    fn outstanding(&self, slots: &[Slot; SLOTS]) -> usize {
        let taken = (0..self.taken).map(|k| self.order[usize::from(self.oldest.wrapping_add(k as u8))]);
        taken.filter(|slot| !slots[usize::from(*slot)].is_free()).count()
    }
}

impl Slot {
    /// Acquire: the caller of the previous request has finished reading the slot.
    #[inline]
    fn is_free(&self) -> bool {
        self.state.load(Ordering::Acquire) == State::Free as u8
    }
}

/// Where the generations of the next connection begin: far from those of others. A stale handle of a closed connection
/// at the same table index must not name a slot of the new one. Each connection counts separately: a shared counter
/// would move between the processors of their threads.
static GENERATIONS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);

impl Default for RequestSlots {
    fn default() -> Self {
        Self::new()
    }
}

impl RequestSlots {
    /// Slots for one connection; they never grow.
    pub fn new() -> Self {
        Self::of(Keys::all())
    }

    /// The same, with the list of free ones kept separately, for a caller with a lock of its own: slots are taken with
    /// these keys only.
    pub(crate) fn with_keys() -> (Self, Keys) {
        (Self::of(Keys::none()), Keys::all())
    }

    fn of(keys: Keys) -> Self {
        // Built on the heap: the stack is small under the model checker.
        let slots: Vec<Slot> = std::iter::repeat_with(Slot::default).take(SLOTS).collect();
        let Ok(slots) = slots.into_boxed_slice().try_into() else { unreachable!("as many as were asked for") };
        Self { slots, keys: Mutex::new(keys) }
    }

    /// Takes a slot for a request of `parts` parts, or `None` when all are taken ("not now").
    #[inline]
    pub fn take(&self, parts: usize) -> Option<Ticket> {
        self.take_with(&mut self.keys(), parts)
    }

    /// The same with keys that the caller holds.
    #[inline(always)]
    pub(crate) fn take_with(&self, keys: &mut Keys, parts: usize) -> Option<Ticket> {
        debug_assert!((1..=MAX_PARTS).contains(&parts));
        let (key, generation) = (keys.take(&self.slots)?, keys.generation);
        let slot = &self.slots[usize::from(key)];
        slot.parts.store(parts as u8, Ordering::Relaxed);
        slot.remaining.store(parts as u8, Ordering::Relaxed);
        slot.generation.store(generation, Ordering::Relaxed);
        slot.said.store(false, Ordering::Relaxed);
        // Stored before another thread can take a slot: that thread must not find this one free.
        slot.state.store(State::Pending as u8, Ordering::Release);
        Some(Ticket { slot: key.into(), generation })
    }

    /// Gives back a slot whose request was never handed to NCCL.
    pub(crate) fn cancel(&self, ticket: Ticket) {
        self.free(ticket.slot as usize);
    }

    /// Ends one part with its size in bytes. The last part makes the request done.
    ///
    /// May be called from any thread; each part exactly once.
    #[inline(always)]
    pub fn complete_part(&self, slot: u16, part: usize, size: u64) {
        let slot = &self.slots[slot as usize];
        slot.sizes[part].store(size, Ordering::Relaxed);
        // A request of one part needs no count.
        // AcqRel: the thread that ends the last part must have seen the sizes that others stored before theirs.
        if slot.parts.load(Ordering::Relaxed) == 1 || slot.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            slot.state.store(State::Done as u8, Ordering::Release);
        }
    }

    /// Leaves a record with a request before its only part ends, once. False if there is already a record, and for a
    /// request of several parts, which may end at the same time.
    ///
    /// May be called by the thread that ends the part.
    #[inline]
    pub(crate) fn leave(&self, slot: u16, words: LastWords) -> bool {
        let slot = &self.slots[usize::from(slot)];
        if slot.parts.load(Ordering::Relaxed) != 1 || slot.said.load(Ordering::Relaxed) {
            return false;
        }
        for (place, word) in slot.last.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        slot.said.store(true, Ordering::Relaxed);
        true
    }

    /// The record left with a request that the caller has found done and not yet given back.
    #[inline]
    pub(crate) fn last_words(&self, ticket: Ticket) -> Option<LastWords> {
        let slot = &self.slots[usize::from(ticket.slot)];
        let said = slot.said.load(Ordering::Relaxed);
        said.then(|| std::array::from_fn(|word| slot.last[word].load(Ordering::Relaxed)))
    }

    /// Whether a request is done, without consuming it.
    #[inline]
    pub fn is_done(&self, ticket: Ticket) -> bool {
        self.slots[ticket.slot as usize].state.load(Ordering::Acquire) == State::Done as u8
    }

    /// Checks that a ticket names the present occupant of its slot.
    ///
    /// # Errors
    /// A usage error for a request that was reported done before.
    #[inline]
    pub(crate) fn check(&self, ticket: Ticket) -> Result<()> {
        match self.slots.get(ticket.slot as usize) {
            Some(slot)
                if slot.generation.load(Ordering::Relaxed) == ticket.generation
                    && slot.state.load(Ordering::Relaxed) != State::Free as u8 =>
            {
                Ok(())
            }
            Some(_) => Err(ended()),
            None => Err(foreign()),
        }
    }

    /// The outcome of a request if it is done; its slot is free again then.
    #[inline]
    pub fn finish(&self, ticket: Ticket) -> Option<Outcome> {
        let outcome = self.outcome(ticket)?;
        self.free(ticket.slot as usize);
        Some(outcome)
    }

    /// The outcome of a request if it is done, without consuming it.
    #[inline]
    pub(crate) fn outcome(&self, ticket: Ticket) -> Option<Outcome> {
        let slot = &self.slots[ticket.slot as usize];
        if slot.state.load(Ordering::Acquire) != State::Done as u8 {
            return None;
        }
        let parts = slot.parts.load(Ordering::Relaxed) as usize;
        let mut sizes = [0; MAX_PARTS];
        sizes[0] = slot.sizes[0].load(Ordering::Relaxed);
        if parts > 1 {
            for (size, stored) in sizes.iter_mut().zip(&slot.sizes).take(parts) {
                *size = stored.load(Ordering::Relaxed);
            }
        }
        Some(Outcome { parts, sizes })
    }

    /// Drops a request that failed: its slot is free again.
    pub(crate) fn abandon(&self, ticket: Ticket) {
        self.free(ticket.slot as usize);
    }

    /// How many requests are outstanding.
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding_of(&self.keys())
    }

    /// How many requests are outstanding of those that were made with these keys.
    pub(crate) fn outstanding_of(&self, keys: &Keys) -> usize {
        keys.outstanding(&self.slots)
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn free(&self, slot: usize) {
        self.slots[slot].state.store(State::Free as u8, Ordering::Release);
    }
}

#[cold]
fn ended() -> Error {
    Error::usage("the request was already reported done, or never existed")
        .with_hint("a request must not be tested again after test said done")
}

#[cold]
fn foreign() -> Error {
    Error::argument("the request is not one of ours")
}

/// The error for a message that is longer than its receive, the same on both sides.
pub(crate) fn too_long(length: u64, capacity: u64, tag: i32) -> Error {
    Error::usage(format!("a message of {length} bytes with tag {tag} met a receive of {capacity} bytes"))
        .with_hint("the two sides disagree about the size of a transfer; check that all ranks call the same collective with the same count")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_done_when_its_last_part_is_and_reports_every_size() {
        let slots = RequestSlots::new();
        let ticket = slots.take(3).unwrap();
        slots.complete_part(ticket.slot, 2, 30);
        slots.complete_part(ticket.slot, 0, 10);
        assert_eq!(slots.finish(ticket), None);
        slots.complete_part(ticket.slot, 1, 1 << 40);
        let outcome = slots.finish(ticket).unwrap();
        assert_eq!((outcome.parts, &outcome.sizes[..3]), (3, &[10, 1 << 40, 30][..]));
    }

    #[test]
    fn a_second_test_after_done_is_recognised_by_its_generation() {
        let slots = RequestSlots::new();
        let first = slots.take(1).unwrap();
        slots.complete_part(first.slot, 0, 1);
        assert!(slots.finish(first).is_some());
        assert!(slots.check(first).is_err());
        let again = slots.take(1).unwrap();
        assert_eq!(again.slot, first.slot);
        assert!(slots.check(first).is_err());
        assert!(slots.check(again).is_ok());
    }

    #[test]
    fn a_full_slab_says_not_now_and_recovers() {
        let slots = RequestSlots::new();
        let tickets: Vec<_> = (0..SLOTS).map(|_| slots.take(1).unwrap()).collect();
        assert_eq!(slots.take(1), None);
        slots.complete_part(tickets[7].slot, 0, 0);
        slots.finish(tickets[7]).unwrap();
        assert_eq!(slots.outstanding(), SLOTS - 1);
        assert_eq!(slots.take(1).map(|ticket| ticket.slot), Some(tickets[7].slot));
        assert_eq!((slots.take(1), slots.outstanding()), (None, SLOTS));
    }

    #[test]
    fn with_the_keys_apart_slots_are_taken_with_those_only() {
        let (slots, mut keys) = RequestSlots::with_keys();
        let tickets: Vec<_> = (0..SLOTS).map(|_| slots.take_with(&mut keys, 1).unwrap()).collect();
        assert!(slots.take(1).is_none() && slots.take_with(&mut keys, 1).is_none());
        assert_eq!((slots.outstanding(), slots.outstanding_of(&keys)), (0, SLOTS));
        tickets.iter().for_each(|ticket| slots.cancel(*ticket));
        assert!(slots.take(1).is_none() && slots.take_with(&mut keys, 1).is_some());
        assert_eq!(slots.outstanding_of(&keys), 1);
    }

    #[test]
    fn requests_that_end_in_any_order_give_their_slots_back() {
        let slots = RequestSlots::new();
        let mut outstanding: Vec<Ticket> = Vec::new();
        for step in 0..10 * SLOTS {
            // Sometimes, but never the oldest.
            while outstanding.len() > step % SLOTS {
                let at = if step % 7 == 0 { 0 } else { step % outstanding.len() };
                let ticket = outstanding.swap_remove(at);
                slots.complete_part(ticket.slot, 0, step as u64);
                assert_eq!(slots.finish(ticket).unwrap().sizes[0], step as u64);
            }
            let ticket = slots.take(1).unwrap();
            assert!(outstanding.iter().all(|other| other.slot != ticket.slot));
            outstanding.push(ticket);
            assert_eq!(slots.outstanding(), outstanding.len());
        }
    }
}
