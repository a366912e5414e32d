//! What the threads that move data note for NCCL's thread: a list for each path.
//!
//! Whoever moves data on a path writes to that path's list only, in memory that no other thread writes but NCCL's when it
//! empties the list. One place for all pieces of a transfer, under one lock, was written by up to eight threads in turn,
//! and took 2 to 4 % of an all-reduce (docs/performance.md, "What profiling costs").
//!
//! Of one list, notes come out in the order in which they were made. Between lists there is no order; so what does not
//! concern a path has a list of its own, and says itself when it is to be looked at ([`Note::turn`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::transfer::{Chunk, Wait};
use crate::os::ticks::Ticks;

/// Notes that a list holds. When NCCL's thread does not come by for longer than that, further ones are left out: their
/// bytes are told with what is left at the transfer's end.
pub(super) const ROOM: usize = 64;

/// The most lists for paths: further paths share them.
const MOST_LISTS: usize = 16;

/// One thing that has happened.
#[derive(Debug, Clone, Copy)]
pub(super) struct Note {
    /// The request.
    pub(super) slot: u16,
    /// Which of its parts.
    pub(super) part: u8,
    /// When, if somebody wants to know.
    pub(super) now: Option<Ticks>,
    /// What.
    pub(super) what: What,
}

/// What has happened: each is a function of a `Transfer`.
#[derive(Debug, Clone, Copy)]
pub(super) enum What {
    /// The receiver's buffer is there.
    Ready,
    /// A chunk is being handed to the network, or its first byte has come.
    Begins(Chunk),
    /// The chunk at this offset has arrived.
    Ends(u64),
    /// A chunk of which nothing was said yet has arrived, which began then.
    Over(Chunk, Ticks),
    /// The chunk on this path has arrived.
    PathEnds(u16),
    /// A chunk that makes no piece has arrived.
    Passed {
        /// Its path.
        path: u16,
        /// Its work request.
        wr_id: u64,
    },
    /// The chunk at `offset` has waited.
    Waited {
        /// Where it begins in its message.
        offset: u64,
        /// For what.
        wait: Wait,
        /// How long.
        ns: u64,
    },
    /// All chunks have arrived.
    AllArrived,
}

/// In how many turns notes are to be looked at.
pub(super) const TURNS: u8 = 3;

impl Note {
    /// When it is its turn among notes that were taken out together: a transfer is ready before its chunks begin, and
    /// they begin before all have arrived.
    pub(super) fn turn(&self) -> u8 {
        match self.what {
            What::Ready => 0,
            What::AllArrived => TURNS - 1,
            _ => 1,
        }
    }
}

/// By itself in its lines of memory: two, since processors fetch lines in pairs.
#[repr(align(128))]
struct List {
    /// Whether there may be any. Written with the notes locked.
    filled: AtomicBool,
    notes: Mutex<Vec<Note>>,
}

/// The lists of a connection.
pub(super) struct Notes {
    /// Those of the paths, and one for what concerns a whole transfer, which is emptied after them.
    lists: Box<[List]>,
}

impl Notes {
    /// Lists for so many paths.
    pub(super) fn new(paths: usize) -> Self {
        // All memory now: threads that move data do not allocate here.
        let list = || List { filled: AtomicBool::new(false), notes: Mutex::new(Vec::with_capacity(ROOM)) };
        Self { lists: std::iter::repeat_with(list).take(paths.clamp(1, MOST_LISTS) + 1).collect() }
    }

    /// Any thread: this has happened on that path, or to a whole transfer.
    #[inline]
    pub(super) fn add(&self, path: Option<u16>, note: Note) {
        let paths = self.lists.len() - 1;
        self.lists[path.map_or(paths, |path| usize::from(path) % paths)].add(note);
    }

    /// Whether there are any, of those that the caller can know of: a note made before something that it has seen.
    #[inline]
    pub(super) fn are_there(&self) -> bool {
        self.lists.iter().any(|list| list.filled.load(Ordering::Acquire))
    }

    /// Takes out all that [`Notes::are_there`] speaks of.
    pub(super) fn take(&self, into: &mut Vec<Note>) {
        for list in self.lists.iter().filter(|list| list.filled.load(Ordering::Acquire)) {
            let mut notes = list.notes.lock().unwrap_or_else(PoisonError::into_inner);
            into.append(&mut notes);
            list.filled.store(false, Ordering::Relaxed);
        }
    }

    /// The most that [`Notes::take`] takes out.
    pub(super) fn most(&self) -> usize {
        self.lists.len() * ROOM
    }
}

impl List {
    #[inline]
    fn add(&self, note: Note) {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        if notes.len() < ROOM {
            notes.push(note);
            self.filled.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        notes.add(None, note(500, What::AllArrived));
        assert!(notes.are_there());
        let mut taken = Vec::with_capacity(notes.most());
        notes.take(&mut taken);
        let slots: Vec<_> = taken.iter().map(|note| note.slot).collect();
        assert_eq!(slots, (0..ROOM as u16).chain([500]).collect::<Vec<_>>());
        assert!(!notes.are_there() && taken.capacity() == notes.most());
        // There is room again.
        notes.add(Some(1), note(7, What::Ready));
        notes.take(&mut taken);
        assert_eq!(taken.last().map(|note| note.slot), Some(7));
    }

    #[test]
    fn more_paths_than_lists_share_them() {
        for paths in [0, 1, 3, 100] {
            let notes = Notes::new(paths);
            for path in 0..200 {
                notes.add(Some(path), note(path, What::Ready));
            }
            let mut taken = Vec::new();
            notes.take(&mut taken);
            assert_eq!(taken.len(), 200.min(paths.clamp(1, MOST_LISTS) * ROOM));
        }
    }

    #[test]
    fn a_note_is_little_more_than_a_line_of_memory() {
        assert!(size_of::<Note>() <= 72, "{}", size_of::<Note>());
    }
}
