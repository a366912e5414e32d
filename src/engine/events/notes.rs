//! The notes of the threads that move data for NCCL's thread: a list for each path.
//!
//! A thread that moves data on a path writes only to that path's list. A lock that the threads share, or one between a
//! writer and NCCL's thread, costs 2 to 4 % of an all-reduce. Notes leave one list in the order in which they were
//! made. Between lists there is no order. Notes that do not concern a path have a list of their own.

use super::list::{List, WORDS};
use super::piece::Chunk;
use crate::os::ticks::Ticks;

/// The notes that a list holds. When NCCL's thread does not read them for so long that the list is full, further ones
/// are dropped. Their bytes are then part of the piece for the rest at the transfer's end.
pub(super) const ROOM: usize = 64;

/// An event of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The receiver's buffer is posted. Such a note has no chunk.
    Ready,
    /// The chunk is handed to the network, or its first byte has arrived.
    Begins,
    /// The chunk has arrived; only its offset and path are known.
    Ends,
    /// The chunk has arrived, and nothing was noted about it before.
    Over,
    /// The chunk waited for its socket since `began`; only its offset and path are known.
    Waited,
}

const KINDS: [Kind; 5] = [Kind::Ready, Kind::Begins, Kind::Ends, Kind::Over, Kind::Waited];

/// One note.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Note {
    /// The request.
    pub(super) slot: u16,
    /// Which of its parts.
    pub(super) part: u8,
    pub(super) kind: Kind,
    pub(super) chunk: Chunk,
    /// When the chunk, or its wait, began.
    pub(super) began: Ticks,
    /// When the note was made.
    pub(super) now: Ticks,
}

const _: () = assert!(super::SLOTS <= 1 << 8 && super::MAX_PARTS <= 1 << 3, "a slot and a part fit a note's head");

/// The layout of a note in a [`List`].
impl Note {
    pub(super) fn encode(&self) -> (u32, [u64; WORDS]) {
        let Chunk { offset, length, path, message, total, again, joined, wr_id } = self.chunk;
        let flags = u32::from(again) << 7 | u32::from(joined) << 6 | (self.kind as u32) << 3 | u32::from(self.part);
        let words = [offset, length, message, total, wr_id, self.began.number(), self.now.number()];
        (u32::from(path) << 16 | u32::from(self.slot) << 8 | flags, words)
    }

    /// None for an entry that [`Note::encode`] never makes.
    pub(super) fn decode(head: u32, words: [u64; WORDS]) -> Option<Self> {
        let [offset, length, message, total, wr_id, began, now] = words;
        let (path, again, joined) = ((head >> 16) as u16, head & 1 << 7 != 0, head & 1 << 6 != 0);
        Some(Self {
            slot: (head >> 8 & 0xff) as u16,
            part: (head & 7) as u8,
            kind: *KINDS.get((head >> 3 & 7) as usize)?,
            chunk: Chunk { offset, length, path, message, total, again, joined, wr_id },
            began: Ticks::from_number(began)?,
            now: Ticks::from_number(now)?,
        })
    }
}

/// The lists of a connection.
pub(super) struct Notes {
    /// The lists of the paths, and one for notes about a whole transfer, which is emptied after them.
    lists: Box<[List]>,
}

impl Notes {
    /// Lists for this many paths. More than sixteen share them.
    pub(super) fn new(paths: usize) -> Self {
        // Allocates all memory now: threads that move data do not allocate here.
        Self { lists: std::iter::repeat_with(|| List::new(ROOM)).take(paths.clamp(1, 16) + 1).collect() }
    }

    /// Any thread: adds a note on that path, or of a whole transfer.
    #[inline]
    pub(super) fn add(&self, path: Option<u16>, note: &Note) {
        let paths = self.lists.len() - 1;
        let (head, words) = note.encode();
        self.lists[path.map_or(paths, |path| usize::from(path) % paths)].add(head, words);
    }

    /// Whether there are any notes that were made before the last event that the caller has seen.
    #[inline]
    pub(super) fn are_there(&self) -> bool {
        self.lists.iter().any(List::is_filled)
    }

    /// Takes out all notes that [`Notes::are_there`] refers to. One thread at a time.
    pub(super) fn take(&self, mut each: impl FnMut(Note)) {
        // The memory of all lists is fetched at the same time.
        self.lists.iter().for_each(List::fetch);
        for list in &self.lists {
            list.take(|head, words| Note::decode(head, words).into_iter().for_each(&mut each));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn note(slot: u16, offset: u64) -> Note {
        let (began, now) = (Ticks::now(), Ticks::now());
        Note { slot, part: 0, kind: Kind::Ends, chunk: Chunk { offset, ..Chunk::default() }, began, now }
    }

    #[test]
    fn a_path_keeps_its_order_and_a_full_list_leaves_the_rest_out() {
        let notes = Notes::new(2);
        assert!(!notes.are_there());
        for slot in 0..ROOM as u16 + 9 {
            notes.add(Some(1), &note(slot, 0));
        }
        notes.add(None, &note(250, 0));
        assert!(notes.are_there());
        let mut slots = Vec::new();
        notes.take(|note| slots.push(note.slot));
        assert_eq!(slots, (0..ROOM as u16).chain([250]).collect::<Vec<_>>());
        assert!(!notes.are_there());
        // There is room again.
        notes.add(Some(1), &note(7, 0));
        notes.take(|note| slots.push(note.slot));
        assert_eq!(slots.last(), Some(&7));
    }

    #[test]
    fn more_paths_than_lists_share_them() {
        for paths in [0, 1, 3, 100] {
            let notes = Notes::new(paths);
            for path in 0..200 {
                notes.add(Some(path), &note(path, 0));
            }
            let mut taken = 0;
            notes.take(|_| taken += 1);
            assert_eq!(taken, 200.min(paths.clamp(1, 16) * ROOM));
        }
    }

    proptest! {
        #[test]
        fn a_note_comes_out_as_it_went_in(
            (slot, part, kind) in (0u16..256, 0u8..8, 0usize..KINDS.len()),
            (path, again, joined) in (any::<u16>(), any::<bool>(), any::<bool>()),
            [offset, length, message, total, wr_id] in any::<[u64; 5]>(),
            [began, now] in [1..u64::MAX, 1..u64::MAX],
        ) {
            let [began, now] = [began, now].map(|number| Ticks::from_number(number).expect("not 0"));
            let chunk = Chunk { offset, length, path, message, total, again, joined, wr_id };
            let note = Note { slot, part, kind: KINDS[kind], chunk, began, now };
            prop_assert_eq!(note.kind as usize, kind);
            let (head, words) = note.encode();
            prop_assert_eq!(Note::decode(head, words), Some(note));
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
                        // Fills half of the room at most, so that no note is dropped.
                        if number % 8 == 0 {
                            while notes.are_there() {
                                std::thread::yield_now();
                            }
                        }
                        notes.add(Some(0), &note(thread as u16, number));
                    }
                });
            }
            while seen.iter().map(Vec::len).sum::<usize>() < (threads * each) as usize {
                notes.take(|note| seen[usize::from(note.slot)].push(note.chunk.offset));
                std::thread::yield_now();
            }
        });
        assert!(seen.iter().all(|of_one| of_one.iter().copied().eq(0..each)));
    }
}
