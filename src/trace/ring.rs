//! From NCCL's threads to our writer: bounded, preallocated, without lock and without allocation.
//!
//! Several *shards*, each a bounded queue with many producers and one consumer. A thread always uses the shard that
//! its thread pointer hashes to, so two threads seldom meet and a thread's own records stay in order. Nothing is
//! registered per thread and nothing is freed at a thread's end: communicators and their threads may come and go.
//!
//! Guarantees: [`Ring::push`] never waits for another thread. A producer that was interrupted between claiming a slot
//! and filling it delays the consumer, not other producers. A full shard refuses, and refuses starts first, so that the
//! stops of events already begun still find room. A record's place is unique for ever and serves as the event's id.
//!
//! Implementation notes: each slot counts laps. In lap `n` it is free at `2n`, filled at `2n + 1`.

use super::event::Record;
use super::place::{Place, SHARDS};
use super::slots::Slots;
use crate::os::sync::atomic::{AtomicU64, Ordering};

/// Slots with memory ahead of the producers: 2 MiB, more than a thread fills between two rounds of the writer.
const AHEAD: u64 = 1 << 14;

/// The same in a shard that no thread uses yet: 64 KiB.
const AHEAD_OF_FIRST: u64 = 1 << 9;

/// How far ahead a producer prefetches a slot. The writer touched it last, so without this a record waits for its
/// memory twice: to see that the slot is free, and to fill it.
const FETCHED_AHEAD: u64 = 16;

/// How much of the ring a record may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// The start of an event: refused when three quarters are full.
    Start,
    /// A change of state: refused when seven eighths are full.
    State,
    /// A stop: takes the last slot.
    Stop,
}

#[repr(align(128))]
struct Counter(AtomicU64);

struct Shard {
    /// Next position to claim; producers compete for it.
    tail: Counter,
    /// First position not yet consumed; the consumer alone writes it.
    head: Counter,
    slots: Slots,
}

/// The queue between NCCL's threads and the writer.
pub(crate) struct Ring {
    shards: [Shard; SHARDS],
    capacity: u64,
    /// The capacity is two to the power of this.
    shift: u32,
}

impl Ring {
    /// A ring of about `bytes` bytes. The memory is reserved at once, and given by the kernel as it is used.
    pub(crate) fn new(bytes: usize) -> Self {
        let wanted = (bytes / SHARDS / Slots::BYTES).clamp(64, 1 << 24);
        Self::with_capacity(1 << wanted.ilog2())
    }

    /// A ring with shards of `capacity` records, a power of two.
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        assert!(capacity.is_power_of_two());
        let shift = capacity.trailing_zeros();
        Self { shards: std::array::from_fn(|_| Shard::new(capacity)), capacity: capacity as u64, shift }
    }

    /// Adds the record that `make` builds for its place, or returns None when there is no room for its like.
    #[inline]
    pub(crate) fn push(&self, thread: u64, room: Room, make: impl FnOnce(Place) -> Record) -> Option<Place> {
        let shard = shard_of(thread);
        let position = self.claim(&self.shards[shard], room, 1)?;
        let place = Place { shard, position };
        // SAFETY: just claimed, and filled once.
        unsafe { self.fill(place, make(place)) };
        Some(place)
    }

    /// Adds `count` records in a row, which `make` builds for their places in turn, or none when there is no room for
    /// all. Returns whether it did. All places cost one exchange with other producers instead of `count`.
    #[inline]
    pub(crate) fn push_all(
        &self,
        thread: u64,
        room: Room,
        count: usize,
        mut make: impl FnMut(Place) -> Record,
    ) -> bool {
        let shard = shard_of(thread);
        let Some(first) = self.claim(&self.shards[shard], room, count as u64) else { return false };
        for position in first..first + count as u64 {
            let place = Place { shard, position };
            // SAFETY: among those just claimed, each of which is filled once.
            unsafe { self.fill(place, make(place)) };
        }
        true
    }

    /// The first of `count` positions, at least one, that the caller is to fill.
    #[inline]
    fn claim(&self, shard: &Shard, room: Room, count: u64) -> Option<u64> {
        let limit = match room {
            Room::Start => self.capacity - self.capacity / 4,
            Room::State => self.capacity - self.capacity / 8,
            Room::Stop => self.capacity,
        };
        let mut position = shard.tail.0.load(Ordering::Relaxed);
        loop {
            // The consumer frees slots in their order: those before the last one are free if that one is.
            let last = position + count.saturating_sub(1);
            // `head` may be old, which errs towards refusing; it may also be newer than `position`.
            if last.saturating_sub(shard.head.0.load(Ordering::Relaxed)) >= limit {
                return None;
            }
            let free = 2 * (last >> self.shift);
            let lap = shard.slots.at(last).lap.load(Ordering::Acquire);
            if lap == free {
                let next = position + count;
                match shard.tail.0.compare_exchange_weak(position, next, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => return Some(position),
                    Err(seen) => position = seen,
                }
            } else if lap < free {
                return None;
            } else {
                position = shard.tail.0.load(Ordering::Relaxed);
            }
        }
    }

    /// Fills a slot.
    ///
    /// # Safety
    /// [`Ring::claim`] gave the place to the caller, which fills it once.
    #[inline]
    unsafe fn fill(&self, place: Place, record: Record) {
        let slots = &self.shards[place.shard].slots;
        let slot = slots.at(place.position);
        // SAFETY: the place is this thread's alone until it stores the lap below.
        unsafe { slot.write(record) };
        slot.lap.store(2 * (place.position >> self.shift) + 1, Ordering::Release);
        slots.fetch(place.position + FETCHED_AHEAD);
    }
}

impl Shard {
    fn new(capacity: usize) -> Self {
        Self { tail: Counter(AtomicU64::new(0)), head: Counter(AtomicU64::new(0)), slots: Slots::new(capacity) }
    }
}

/// The shard that a thread uses. Thread pointers are megabytes apart; the multiplication mixes them into the upper
/// bits.
#[inline]
pub(crate) fn shard_of(thread: u64) -> usize {
    ((thread >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize
}

/// The one consumer's side.
#[derive(Default)]
pub(crate) struct Drain {
    /// Per shard, a time before which everything has been seen.
    clear: [u64; SHARDS],
    /// Per shard, how many of its slots have memory.
    backed: [u64; SHARDS],
}

impl Drain {
    /// Makes the kernel give memory to the next slots, so that producers do not wait for it in the first lap.
    pub(crate) fn back(&mut self, ring: &Ring) {
        for (shard, backed) in ring.shards.iter().zip(&mut self.backed) {
            let used = shard.tail.0.load(Ordering::Relaxed);
            let wanted = if used == 0 { AHEAD_OF_FIRST } else { used + AHEAD }.min(ring.capacity);
            if *backed < wanted {
                shard.slots.back(*backed..wanted);
                *backed = wanted;
            }
        }
    }

    /// Passes all records to `take`, with their shard and in its order. Returns a time up to which no record is missing
    /// that has a successor here: if one record caused another (such as a parent's start, which returned before the
    /// child's began), and the later one is not after that time, both have been passed.
    ///
    /// `now` is the time before the call.
    pub(crate) fn drain(&mut self, ring: &Ring, now: u64, take: &mut impl FnMut(usize, Record)) -> u64 {
        for (index, (shard, clear)) in ring.shards.iter().zip(&mut self.clear).enumerate() {
            let end = shard.tail.0.load(Ordering::Acquire);
            let mut position = shard.head.0.load(Ordering::Relaxed);
            while position < end {
                let slot = shard.slots.at(position);
                let lap = 2 * (position >> ring.shift);
                if slot.lap.load(Ordering::Acquire) != lap + 1 {
                    break;
                }
                // SAFETY: the lap shows that the producer has finished writing, and no other will touch the slot before
                // the store below.
                take(index, unsafe { slot.read() });
                slot.lap.store(lap + 2, Ordering::Release);
                position += 1;
                // Now and then, so that producers see the room.
                if position % 64 == 0 {
                    shard.head.0.store(position, Ordering::Relaxed);
                }
            }
            shard.head.0.store(position, Ordering::Relaxed);
            if position == end {
                *clear = now;
            }
        }
        self.clear.iter().copied().min().unwrap_or(now)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::trace::event::Body;
    use std::collections::HashSet;
    use std::sync::Arc;

    fn record(id: u64) -> Record {
        Record { when: id, id, parent: 0, context: 0, rank: 0, thread: 0, body: Body::Stop }
    }

    #[test]
    fn nothing_is_lost_or_doubled_with_many_producers_and_full_shards() {
        let ring = Arc::new(Ring::new(SHARDS * 128 * 256));
        let (threads, each) = (4u64, 50_000u64);
        let producers: Vec<_> = (0..threads)
            .map(|thread| {
                let ring = ring.clone();
                std::thread::spawn(move || {
                    let mut sent = 0;
                    // Two of the four share a shard, and one of these reports several at once.
                    let pointer = (thread / 2) << 23;
                    let at_once = if thread % 2 == 0 { 1 } else { 7 };
                    while sent < each {
                        let count = at_once.min(each - sent);
                        let mut next = sent;
                        let make = |_| {
                            next += 1;
                            record(thread << 32 | (next - 1))
                        };
                        let is_sent = match count {
                            1 => ring.push(pointer, Room::Stop, make).is_some(),
                            _ => ring.push_all(pointer, Room::Stop, count as usize, make),
                        };
                        if is_sent {
                            sent += count;
                        } else {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut drain = Drain::default();
        let mut seen = Vec::new();
        while seen.len() < (threads * each) as usize {
            drain.drain(&ring, 1, &mut |_, record| seen.push(record));
        }
        for producer in producers {
            producer.join().unwrap();
        }
        drain.drain(&ring, 1, &mut |_, record| seen.push(record));
        assert_eq!(seen.iter().map(|r| r.id).collect::<HashSet<_>>().len(), seen.len());
        for thread in 0..threads {
            let own: Vec<_> = seen.iter().filter(|r| r.id >> 32 == thread).map(|r| r.id).collect();
            assert!(own.is_sorted(), "a thread's records stay in order");
        }
    }

    #[test]
    fn a_full_shard_refuses_starts_before_states_before_stops() {
        let ring = Ring::new(SHARDS * 128 * 64);
        let fill = |room| (0..).take_while(|_| ring.push(0, room, |_| record(1)).is_some()).count();
        assert_eq!((fill(Room::Start), fill(Room::State), fill(Room::Stop)), (48, 8, 8));
        let mut seen = Vec::new();
        Drain::default().drain(&ring, 1, &mut |_, record| seen.push(record));
        assert_eq!(seen.len(), 64);
        assert_eq!(fill(Room::Start), 48, "what was consumed is free again");
    }

    #[test]
    fn several_are_taken_together_or_not_at_all() {
        let ring = Ring::new(SHARDS * 128 * 64);
        let push = |count| ring.push_all(0, Room::Start, count, |place| record(place.position));
        // 48 is where starts are refused.
        assert!((0..6).all(|_| push(7)) && !push(7) && push(6) && !push(1));
        let mut drain = Drain::default();
        let mut seen = Vec::new();
        drain.drain(&ring, 1, &mut |_, record| seen.push(record.id));
        assert_eq!(seen, (0..48).collect::<Vec<_>>());
        // Across the end of a lap, and more than there is.
        assert!(push(20) && !push(65));
        drain.drain(&ring, 1, &mut |_, record| seen.push(record.id));
        assert_eq!(seen, (0..68).collect::<Vec<_>>());
    }

    #[test]
    fn places_are_unique_over_laps() {
        let ring = Ring::new(0);
        let mut places = HashSet::new();
        let mut seen = Vec::new();
        let mut drain = Drain::default();
        for _ in 0..1000 {
            let place = ring.push(7 << 20, Room::Start, |_| record(1)).unwrap();
            assert!(places.insert((place.shard, place.position)));
            drain.drain(&ring, 1, &mut |_, record| seen.push(record));
        }
    }
}
