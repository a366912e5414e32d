//! A list of notes from threads that move data to NCCL's thread: bounded, preallocated, and cheap for both.
//!
//! Its main cost is memory that one processor has written and another one needs, about 100 ns each time. So the two
//! sides share no lock and no counter. An entry is one cache line, which itself holds a mark that it is filled, and
//! moves from the writer to the reader once. The writer never waits, since its stores complete in the background. The
//! reader waits for that line.
//!
//! Guarantees (`tests/models` tries every order): entries come out in the order in which they were added, each once and
//! complete. The reader finds an entry that was added before an event that the reader has seen. A full list refuses.
//! Readers take turns, by a lock of their own. Writers take turns by `busy`, in memory that no reader touches; normally
//! there is only one.

use crate::os::memory;
use crate::os::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::os::sync::pause;

/// The words of an entry besides its head.
pub(crate) const WORDS: usize = 7;

/// One cache line; its head shows whether it is filled.
#[repr(align(64))]
pub(super) struct Entry {
    /// In a list: the lap in which it was filled, in the upper half; the writer's value, in the lower.
    head: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl Default for Entry {
    fn default() -> Self {
        Self { head: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl Entry {
    /// Written by one thread at a time, while no thread reads: a thread that sees this head sees these words.
    pub(super) fn fill(&self, head: u64, words: [u64; WORDS]) {
        for (place, word) in self.words.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        self.head.store(head, Ordering::Release);
    }

    /// The head with which the entry was last filled, or 0; [`Entry::words`] belong to it.
    #[inline]
    pub(super) fn head(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn words(&self) -> [u64; WORDS] {
        std::array::from_fn(|k| self.words[k].load(Ordering::Relaxed))
    }
}

/// Two lines each, since processors fetch lines in pairs.
#[repr(align(128))]
struct Writers {
    busy: AtomicBool,
    /// How many entries were added.
    added: AtomicU64,
    /// The number of entries up to which there is room, as of the last read of the reader's count.
    room: AtomicU64,
}

#[repr(align(128))]
struct Reader {
    /// How many entries were taken out.
    taken: AtomicU64,
}

/// The list.
pub(crate) struct List {
    writers: Writers,
    reader: Reader,
    entries: Box<[Entry]>,
    /// The capacity is two to the power of this: a division would take as long as all the other work on an entry.
    shift: u32,
}

impl List {
    /// An empty list for this many entries, a power of two.
    pub(crate) fn new(room: usize) -> Self {
        assert!(room.is_power_of_two());
        Self {
            writers: Writers { busy: AtomicBool::new(false), added: AtomicU64::new(0), room: AtomicU64::new(0) },
            reader: Reader { taken: AtomicU64::new(0) },
            entries: std::iter::repeat_with(Entry::default).take(room).collect(),
            shift: room.trailing_zeros(),
        }
    }

    /// Any thread: adds an entry, unless the list is full.
    pub(crate) fn add(&self, head: u32, words: [u64; WORDS]) {
        let writers = &self.writers;
        let mut tries = 0;
        while writers.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            tries += 1;
            pause(tries);
        }
        let added = writers.added.load(Ordering::Relaxed);
        let mut room = writers.room.load(Ordering::Relaxed);
        if added == room {
            // The entries to be overwritten have been read.
            room = self.reader.taken.load(Ordering::Acquire) + self.room();
            writers.room.store(room, Ordering::Relaxed);
        }
        if added < room {
            self.entry(added).fill(u64::from(self.lap(added)) << 32 | u64::from(head), words);
            writers.added.store(added + 1, Ordering::Relaxed);
        }
        // A store, not an exchange: an exchange would wait until the entry's line has arrived.
        writers.busy.store(false, Ordering::Release);
    }

    /// Whether there is an entry that was added before the last event that the caller has seen.
    #[inline]
    pub(crate) fn is_filled(&self) -> bool {
        self.at(self.reader.taken.load(Ordering::Relaxed)).is_some()
    }

    /// Prefetches the memory of the next entry.
    #[inline]
    pub(crate) fn fetch(&self) {
        memory::fetch(self.entry(self.reader.taken.load(Ordering::Relaxed)));
    }

    /// Removes all entries, but no more than the list holds. One thread at a time.
    pub(crate) fn take(&self, mut each: impl FnMut(u32, [u64; WORDS])) {
        let first = self.reader.taken.load(Ordering::Relaxed);
        let mut taken = first;
        while taken < first + self.room()
            && let Some(head) = self.at(taken)
        {
            each(head, self.entry(taken).words());
            taken += 1;
        }
        if taken > first {
            self.reader.taken.store(taken, Ordering::Release);
        }
    }

    /// The content of the entry with this number, if it is there.
    #[inline]
    fn at(&self, number: u64) -> Option<u32> {
        let head = self.entry(number).head();
        ((head >> 32) as u32 == self.lap(number)).then_some(head as u32)
    }

    fn entry(&self, number: u64) -> &Entry {
        &self.entries[(number & (self.room() - 1)) as usize]
    }

    /// The lap of an entry, which always differs from the lap of the entry's previous content.
    fn lap(&self, number: u64) -> u32 {
        ((number >> self.shift) as u32).wrapping_add(1)
    }

    fn room(&self) -> u64 {
        1 << self.shift
    }
}
