//! The notes of the threads that move data for NCCL's thread: a list for each path.
//!
//! A thread that moves data on a path writes only to that path's list. An earlier design had one place for all pieces
//! of a transfer, under one lock that up to eight threads took in turn, which cost 2 to 4 % of an all-reduce; so did a
//! lock for each list between NCCL's thread and the writer (`docs/performance.md`).
//!
//! Notes come out of one list in the order in which they were made. Between lists there is no order, so notes that do
//! not concern a path have a list of their own, and [`Note::turn`] defines when each is read.
//! concern a path has a list of its own, and says itself when it is to be looked at ([`Note::turn`]).

use super::list::{List, WORDS};
use super::transfer::{Chunk, Over, ROOM, Wait, What};
use crate::os::ticks::Ticks;

/// The most lists for paths: further paths share them.
const MOST_LISTS: usize = 16;

/// One event.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Note {
    /// The request.
    pub(super) slot: u16,
    /// Which of its parts.
    pub(super) part: u8,
    /// When, if times are wanted.
    pub(super) now: Option<Ticks>,
    /// What.
    pub(super) what: What,
}

/// The number of turns in which notes are read.
pub(super) const TURNS: u8 = 3;

impl Note {
    /// Its turn among notes that were taken out together: a transfer is ready before its chunks begin, and they begin
    /// before all have arrived.
    pub(super) fn turn(&self) -> u8 {
        match self.what {
            What::Ready => 0,
            What::AllArrived => TURNS - 1,
            _ => 1,
        }
    }
}

/// The kind of a note that a chunk has completed, and the increment for a note that stands for several.
const OVER: u32 = 7;
const JOINED: u32 = 8;
const OVER_JOINED: u32 = OVER | JOINED;

/// The layout of a note in a [`List`]: what fits into the head, and words whose meaning depends on the kind.
impl Note {
    pub(super) fn encode(&self) -> (u32, [u64; WORDS]) {
        let now = self.now.map_or(0, Ticks::number);
        let (kind, path, again, [a, b, c, d, e, f]) = match self.what {
            What::Ready => (0, 0, false, [0; 6]),
            What::AllArrived => (1, 0, false, [0; 6]),
            What::Ends(offset) => (2, 0, false, [offset, 0, 0, 0, 0, 0]),
            What::PathEnds(path) => (3, path, false, [0; 6]),
            What::Passed { path, wr_id } => (4, path, false, [wr_id, 0, 0, 0, 0, 0]),
            What::Waited { offset, wait, ns } => (5, wait as u16, false, [offset, ns, 0, 0, 0, 0]),
            What::Begins(chunk) => (6, chunk.path, chunk.again, chunk_words(&chunk, 0)),
            What::Over(chunk, began) => {
                let kind = if chunk.joined { OVER_JOINED } else { OVER };
                (kind, chunk.path, chunk.again, chunk_words(&chunk, began.number()))
            }
        };
        let head = u32::from(path) << 16 | u32::from(self.slot) << 8 | u32::from(again) << 7 | kind << 3;
        (head | u32::from(self.part), [now, a, b, c, d, e, f])
    }

    /// The most frequent note: a chunk that was sent once has completed. With its slot and part.
    #[inline]
    pub(super) fn over(head: u32, [now, a, b, c, d, e, f]: [u64; WORDS]) -> Option<(u16, u8, Over)> {
        if head & 0xf8 & !(JOINED << 3) != OVER << 3 {
            return None;
        }
        let (path, joined) = ((head >> 16) as u16, head & JOINED << 3 != 0);
        let chunk = Chunk { offset: a, length: b, path, message: c, total: d, again: false, joined, wr_id: e };
        let (arrived, began) = (Ticks::from_number(now)?, Ticks::from_number(f)?);
        Some(((head >> 8 & 0xff) as u16, (head & 7) as u8, Over { chunk, began, arrived, waits: [0; 3] }))
    }

    /// None for an entry that [`Note::encode`] never makes.
    pub(super) fn decode(head: u32, [now, a, b, c, d, e, f]: [u64; WORDS]) -> Option<Self> {
        let (path, again, kind) = ((head >> 16) as u16, head & 1 << 7 != 0, head >> 3 & 15);
        let joined = kind & JOINED != 0;
        let chunk = Chunk { offset: a, length: b, path, message: c, total: d, again, joined, wr_id: e };
        let what = match kind {
            0 => What::Ready,
            1 => What::AllArrived,
            2 => What::Ends(a),
            3 => What::PathEnds(path),
            4 => What::Passed { path, wr_id: a },
            5 => What::Waited { offset: a, wait: Wait::ALL.into_iter().find(|wait| *wait as u16 == path)?, ns: b },
            6 => What::Begins(chunk),
            OVER | OVER_JOINED => What::Over(chunk, Ticks::from_number(f)?),
            _ => return None,
        };
        Some(Self { slot: (head >> 8 & 0xff) as u16, part: (head & 7) as u8, now: Ticks::from_number(now), what })
    }
}

const _: () = assert!(super::SLOTS <= 1 << 8 && super::MAX_PARTS <= 1 << 3, "a slot and a part fit a note's head");

fn chunk_words(chunk: &Chunk, began: u64) -> [u64; 6] {
    [chunk.offset, chunk.length, chunk.message, chunk.total, chunk.wr_id, began]
}

/// The lists of a connection.
pub(super) struct Notes {
    /// Those of the paths, and one for what concerns a whole transfer, which is emptied after them.
    lists: Box<[List]>,
}

impl Notes {
    /// Lists for this many paths.
    pub(super) fn new(paths: usize) -> Self {
        // All memory now: threads that move data do not allocate here.
        Self { lists: std::iter::repeat_with(|| List::new(ROOM)).take(paths.clamp(1, MOST_LISTS) + 1).collect() }
    }

    /// Any thread: adds a note on that path, or of a whole transfer.
    #[inline]
    pub(super) fn add(&self, path: Option<u16>, note: Note) {
        let paths = self.lists.len() - 1;
        let (head, words) = note.encode();
        self.lists[path.map_or(paths, |path| usize::from(path) % paths)].add(head, words);
    }

    /// Whether there are any, among those made before what the caller has seen.
    #[inline]
    pub(super) fn are_there(&self) -> bool {
        self.lists.iter().any(List::is_filled)
    }

    /// Prefetches the memory of the next note of each path, all at the same time.
    #[inline]
    pub(super) fn fetch(&self) {
        self.lists.iter().for_each(List::fetch);
    }

    /// Takes out all that [`Notes::are_there`] refers to, as [`Note::over`] and [`Note::decode`] read it. One thread at
    /// a time.
    #[inline]
    pub(super) fn take(&self, mut each: impl FnMut(u32, [u64; WORDS])) {
        self.lists.iter().for_each(|list| list.take(&mut each));
    }

    /// The most that [`Notes::take`] takes out.
    pub(super) fn most(&self) -> usize {
        self.lists.len() * ROOM
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Takes out all there is.
    fn take(notes: &Notes, mut each: impl FnMut(Note)) {
        notes.take(|head, words| Note::decode(head, words).into_iter().for_each(&mut each));
    }

    fn note(slot: u16, what: What) -> Note {
        Note { slot, part: 0, now: None, what }
    }

    #[test]
    fn a_path_keeps_its_order_and_a_full_list_leaves_the_rest_out() {
        let notes = Notes::new(2);
        assert!(!notes.are_there());
        for slot in 0..ROOM as u16 + 9 {
            notes.add(Some(1), note(slot, What::Ends(0)));
        }
        notes.add(None, note(250, What::AllArrived));
        assert!(notes.are_there());
        let mut taken = Vec::with_capacity(notes.most());
        take(&notes, |note| taken.push(note));
        let slots: Vec<_> = taken.iter().map(|note| note.slot).collect();
        assert_eq!(slots, (0..ROOM as u16).chain([250]).collect::<Vec<_>>());
        assert!(!notes.are_there() && taken.capacity() == notes.most());
        // There is room again.
        notes.add(Some(1), note(7, What::Ready));
        take(&notes, |note| taken.push(note));
        assert_eq!(taken.last().map(|note| note.slot), Some(7));
    }

    #[test]
    fn more_paths_than_lists_share_them() {
        for paths in [0, 1, 3, 100] {
            let notes = Notes::new(paths);
            for path in 0..200 {
                notes.add(Some(path), note(path, What::Ready));
            }
            let mut taken = 0;
            take(&notes, |_| taken += 1);
            assert_eq!(taken, 200.min(paths.clamp(1, MOST_LISTS) * ROOM));
        }
    }

    proptest! {
        #[test]
        fn a_note_comes_out_as_it_went_in(
            (slot, part, kind) in (0u16..256, 0u8..8, 0u8..8),
            (path, again, joined, wait) in (any::<u16>(), any::<bool>(), any::<bool>(), 0usize..3),
            [now, a, b, c, d, e, f] in any::<[u64; 7]>(),
        ) {
            let joined = joined && kind == 7;
            let chunk = Chunk { offset: a, length: b, path, message: c, total: d, again, joined, wr_id: e };
            let what = match kind {
                0 => What::Ready,
                1 => What::AllArrived,
                2 => What::Ends(a),
                3 => What::PathEnds(path),
                4 => What::Passed { path, wr_id: a },
                5 => What::Waited { offset: a, wait: Wait::ALL[wait], ns: b },
                6 => What::Begins(chunk),
                _ => What::Over(chunk, Ticks::from_number(f.max(1)).expect("not 0")),
            };
            let note = Note { slot, part, now: Ticks::from_number(now), what };
            let (head, words) = note.encode();
            prop_assert_eq!(Note::decode(head, words), Some(note));
            let short = Note::over(head, words).map(|(slot, part, over)| (slot, part, over.arrived, over.chunk, over.began));
            let long = match (note.what, note.now) {
                (What::Over(chunk, began), Some(now)) if !chunk.again => Some((slot, part, now, chunk, began)),
                _ => None,
            };
            prop_assert_eq!(short, long);
        }
    }

    #[test]
    fn notes_of_several_threads_all_come_out_in_order_while_they_are_made() {
        let notes = Notes::new(1);
        let (threads, each) = (3u64, 20_000u64);
        let mut seen = vec![Vec::new(); threads as usize];
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let notes = &notes;
                scope.spawn(move || {
                    for number in 0..each {
                        // Half of the room at most, so that nothing is left out.
                        if number % 8 == 0 {
                            while notes.are_there() {
                                std::thread::yield_now();
                            }
                        }
                        notes.add(Some(0), note(thread as u16, What::Ends(number)));
                    }
                });
            }
            let mut taken = Vec::new();
            while seen.iter().map(Vec::len).sum::<usize>() < (threads * each) as usize {
                take(&notes, |note| taken.push(note));
                for note in taken.drain(..) {
                    let What::Ends(number) = note.what else { panic!("{note:?}") };
                    seen[usize::from(note.slot)].push(number);
                }
                std::thread::yield_now();
            }
        });
        assert!(seen.iter().all(|of_one| of_one.iter().copied().eq(0..each)));
    }
}
