//! A note that is kept with the part that it is about.
//!
//! Of most transfers one thing is noted: that all of it is over, just before its request ends. Who notes that leaves it in
//! the part's own place instead of a list, so that NCCL's thread, which has found the request done, needs to look nowhere
//! else. One thread at a time leaves notes here, since only one ends a part.

use super::list::{Entry, WORDS};
use super::notes::Note;
use crate::os::memory;

/// Beside a note's head: there is one.
const FILLED: u64 = 1 << 32;

/// A note as it lies there: [`Note::decode`], or [`Note::over`].
pub(super) type Left = (u32, [u64; WORDS]);

/// Room for one note, in a line of memory of its own: whoever asks after the request does not read it.
#[derive(Default)]
pub(super) struct Single(Entry);

impl Single {
    /// Leaves a note. False when there is one.
    pub(super) fn leave(&self, note: &Note) -> bool {
        let is_free = self.0.head() == 0;
        if is_free {
            let (head, words) = note.encode();
            self.0.fill(FILLED | u64::from(head), words);
        }
        is_free
    }

    /// Takes what was left.
    #[inline]
    pub(super) fn take(&self) -> Option<Left> {
        let head = self.0.head();
        if head == 0 {
            return None;
        }
        let words = self.0.words();
        self.0.clear();
        Some((head as u32, words))
    }

    /// Has its memory fetched.
    #[inline]
    pub(super) fn fetch(&self) {
        memory::fetch_to_write(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::notes::What;
    use super::super::transfer::Chunk;
    use super::*;
    use crate::os::ticks::Ticks;

    #[test]
    fn there_is_room_for_one_note_which_comes_out_once_and_whole() {
        let single = Single::default();
        assert!(single.take().is_none());
        let chunk = Chunk { offset: 1, length: 2, path: 3, message: 4, total: 5, wr_id: 6, ..Chunk::default() };
        let now = Ticks::now();
        let note = Note { slot: 0, part: 0, now: Some(now), what: What::Over(chunk, now) };
        assert!(single.leave(&note));
        assert!(!single.leave(&Note { slot: 9, ..note }), "the first is still there");
        let decoded = |single: &Single| single.take().and_then(|(head, words)| Note::decode(head, words));
        assert_eq!(decoded(&single), Some(note));
        assert!(single.take().is_none());
        let nothing = Note { what: What::Ready, now: None, ..note };
        assert!(single.leave(&nothing), "there is room again, also for one that is all zeros");
        assert_eq!(decoded(&single), Some(nothing));
    }
}
