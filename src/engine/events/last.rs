//! The record of most transfers: their only chunk, or all chunks counted as one, have completed.
//!
//! The thread that completes such a transfer leaves the record with the request ([`RequestSlots::leave`]), in the cache
//! line that also marks the request as done. NCCL's thread has that line when it finds the request done. Any other
//! place would be one more line that a different processor has written last, which costs about 100 ns per message.
//!
//! [`RequestSlots::leave`]: super::super::request::RequestSlots::leave

use super::super::request::LastWords;
use super::notes::{Kind, Note};
use super::piece::Chunk;
use crate::os::ticks::Ticks;

/// Whether a record can hold the note: its chunk is the whole transfer, was sent once, and is over.
pub(super) fn holds(note: &Note) -> bool {
    let Chunk { offset, length, total, again, .. } = note.chunk;
    note.kind == Kind::Over && offset == 0 && length == total && !again
}

/// The record of such a note. The length is in the request.
pub(super) fn words(note: &Note) -> LastWords {
    let Chunk { joined, path, message, wr_id, .. } = note.chunk;
    let path = u64::from(path) | u64::from(joined) << u16::BITS;
    [note.now.number(), note.began.number(), message, wr_id, path]
}

/// Reads the record of the request of `total` bytes in `slot`.
pub(super) fn note(slot: u16, [now, began, message, wr_id, path]: LastWords, total: u64) -> Option<Note> {
    let (now, began) = (Ticks::from_number(now)?, Ticks::from_number(began)?);
    let (path, joined) = (path as u16, path >> u16::BITS != 0);
    let chunk = Chunk { length: total, path, message, total, joined, wr_id, ..Chunk::default() };
    Some(Note { slot, part: 0, kind: Kind::Over, chunk, began, now })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_that_is_all_of_its_transfer_comes_out_as_it_went_in() {
        let (began, now) = (Ticks::now(), Ticks::now());
        for joined in [false, true] {
            let chunk =
                Chunk { length: 7, total: 7, path: u16::MAX, message: u64::MAX, wr_id: 3, joined, ..Chunk::default() };
            let it = Note { slot: 255, part: 0, kind: Kind::Over, chunk, began, now };
            assert!(holds(&it));
            assert_eq!(note(255, words(&it), 7), Some(it));
            for chunk in [Chunk { again: true, ..chunk }, Chunk { total: 8, ..chunk }, Chunk { offset: 1, ..chunk }] {
                assert!(!holds(&Note { chunk, ..it }));
            }
        }
        assert_eq!(note(0, [0; 5], 1), None);
    }
}
