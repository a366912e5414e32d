//! The record of most transfers: their only chunk, or all chunks counted as one, have completed.
//!
//! The thread that completes such a transfer leaves the record with the request ([`RequestSlots::leave`]), in the cache
//! line that also marks the request as done. NCCL's thread has that line when it finds the request done. Any other
//! place would be another line that a different processor has written last, which costs about 100 ns per message.
//!
//! [`RequestSlots::leave`]: super::super::request::RequestSlots::leave

use super::super::request::LastWords;
use super::transfer::{Chunk, Over};
use crate::os::ticks::Ticks;

/// In the last word, above the path's number.
const JOINED: u64 = 1 << 16;

/// The record of a chunk that is all of its transfer, was sent once, and completed `now`. Its length is in the request.
pub(super) fn words(chunk: &Chunk, began: Ticks, now: Ticks) -> LastWords {
    let joined = if chunk.joined { JOINED } else { 0 };
    [now.number(), began.number(), chunk.message, chunk.wr_id, joined | u64::from(chunk.path)]
}

/// Reads the record of a request of `size` bytes.
pub(super) fn over([now, began, message, wr_id, path]: LastWords, size: u64) -> Option<Over> {
    let (arrived, began) = (Ticks::from_number(now)?, Ticks::from_number(began)?);
    let (path, joined) = (path as u16, path & JOINED != 0);
    let chunk = Chunk { offset: 0, length: size, path, message, total: size, again: false, joined, wr_id };
    Some(Over { chunk, began, arrived, waits: [0; 3] })
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
            let out = over(words(&chunk, began, now), 7).expect("as it was written");
            assert_eq!(out, Over { chunk, began, arrived: now, waits: [0; 3] });
        }
        assert_eq!(over([0; 5], 1), None);
    }
}
