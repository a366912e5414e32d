//! A note that is kept with the part that it is about.
//!
//! Of most transfers one thing is noted: that all of it is over, just before its request ends. Who notes that leaves it in
//! the part's own place instead of a list, so that NCCL's thread, which has found the request done, needs to look nowhere
//! else. One thread at a time leaves notes here, since only one ends a part.

use super::list::WORDS;
use super::notes::Note;
use crate::os::memory;
use crate::os::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Room for one note, in a line of memory of its own: whoever asks after the request does not read it.
#[repr(align(64))]
pub(super) struct Single {
    /// The note's head, which is never 0; 0 while there is none.
    head: AtomicU32,
    words: [AtomicU64; WORDS],
}

impl Default for Single {
    fn default() -> Self {
        Self { head: AtomicU32::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl Single {
    /// Leaves a note. False when there is one.
    pub(super) fn leave(&self, note: &Note) -> bool {
        let (head, words) = note.encode();
        if head == 0 || self.head.load(Ordering::Relaxed) != 0 {
            return false;
        }
        for (place, word) in self.words.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        self.head.store(head, Ordering::Release);
        true
    }

    /// Takes what was left, as the note's head and words.
    pub(super) fn take(&self) -> Option<(u32, [u64; WORDS])> {
        let head = self.head.load(Ordering::Acquire);
        if head == 0 {
            return None;
        }
        let words = std::array::from_fn(|k| self.words[k].load(Ordering::Relaxed));
        self.clear();
        Some((head, words))
    }

    /// Whatever was left is of no use any more.
    pub(super) fn clear(&self) {
        if self.head.load(Ordering::Relaxed) != 0 {
            self.head.store(0, Ordering::Relaxed);
        }
    }

    /// Has its memory fetched.
    #[inline]
    pub(super) fn fetch(&self) {
        memory::fetch(self);
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
        let (head, words) = single.take().expect("it was left");
        assert_eq!(Note::decode(head, words), Some(note));
        assert!(single.take().is_none());
        assert!(single.leave(&note));
        single.clear();
        assert!(single.take().is_none());
    }
}
