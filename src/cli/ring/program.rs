//! What one rank does with which elements, in which order.
//!
//! The elements are split into rounds, a round into one segment per rank, a segment into chunks. Each segment travels
//! once around the ring collecting sums, and once more handing them out. Guarantees: the data that a rank sends, in
//! order, is the data that its right-hand neighbour receives, in order. Every element ends with the sum on every rank.
//! A rank never has to send more than twice [`CHUNKS_PER_STEP`] chunks before it can consume received data, so
//! [`SLOTS`] slots never lock up.
//!
//! [`SLOTS`]: super::SLOTS

use std::ops::Range;

/// How many chunks of a segment follow each other. Half the slots, so that the next round may start early.
const CHUNKS_PER_STEP: usize = 4;
/// Chunks are not made smaller than this to gain overlap: 32 KiB.
const SMALLEST_CHUNK: usize = 8192;
/// Segments and chunks are whole multiples of this (128 bytes) where there is enough data.
const GRAIN: usize = 32;

/// What happens to a chunk. The names are those of NCCL's primitives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Input → right.
    Send,
    /// Left + input → right.
    RecvReduceSend,
    /// Left + input → output and right: the sum is complete.
    RecvReduceCopySend,
    /// Left → output and right.
    RecvCopySend,
    /// Left → output.
    Recv,
}

impl Action {
    pub(crate) fn receives(self) -> bool {
        self != Self::Send
    }

    pub(crate) fn sends(self) -> bool {
        self != Self::Recv
    }
}

/// One instruction: an action on a range of elements, at most one chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) elements: Range<usize>,
}

/// The whole all-reduce of `count` elements for one rank. `largest_chunk` is what fits a slot.
pub(crate) fn all_reduce(rank: usize, ranks: usize, count: usize, largest_chunk: usize) -> Vec<Step> {
    assert!(ranks >= 2 && rank < ranks && largest_chunk >= GRAIN);
    let per_round = ranks * CHUNKS_PER_STEP * largest_chunk;
    let mut steps = Vec::new();
    let mut tail = Vec::new();
    for start in (0..count).step_by(per_round) {
        let round = Round::new(start..count.min(start + per_round), ranks, largest_chunk);
        let last = 2 * ranks - 3;
        // The first sends of a round need nothing, so they go out before the last receives of the round before.
        steps.extend(round.chunks(rank, Action::Send));
        steps.append(&mut tail);
        for step in 0..=last {
            let segment = (rank + 2 * ranks - step - 1) % ranks;
            let action = match step {
                _ if step == last => Action::Recv,
                _ if step + 2 < ranks => Action::RecvReduceSend,
                _ if step + 2 == ranks => Action::RecvReduceCopySend,
                _ => Action::RecvCopySend,
            };
            let to = if step == last { &mut tail } else { &mut steps };
            to.extend(round.chunks(segment, action));
        }
    }
    steps.append(&mut tail);
    steps
}

struct Round {
    elements: Range<usize>,
    segment: usize,
    chunk: usize,
}

impl Round {
    fn new(elements: Range<usize>, ranks: usize, largest_chunk: usize) -> Self {
        let round_up = |n: usize| if n > GRAIN { n.next_multiple_of(GRAIN) } else { n };
        let segment = round_up(elements.len().div_ceil(ranks)).max(1);
        let wanted = round_up(segment.div_ceil(CHUNKS_PER_STEP));
        let chunk = wanted.max(SMALLEST_CHUNK).min(largest_chunk);
        Self { elements, segment, chunk }
    }

    /// The chunks of one segment; none when the segment is empty.
    fn chunks(&self, segment: usize, action: Action) -> impl Iterator<Item = Step> + use<> {
        let Range { start, end } = self.elements;
        let from = end.min(start + segment * self.segment);
        let to = end.min(from + self.segment);
        let chunk = self.chunk;
        (from..to).step_by(chunk).map(move |at| Step { action, elements: at..to.min(at + chunk) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(steps: &[Step], wanted: fn(Action) -> bool) -> Vec<Range<usize>> {
        steps.iter().filter(|step| wanted(step.action)).map(|step| step.elements.clone()).collect()
    }

    #[test]
    fn neighbours_agree_on_every_message() {
        for ranks in 2..=9 {
            for count in [1, 2, 3, 31, 33, 1000, 99_999, 3_000_001] {
                for rank in 0..ranks {
                    let sent = lengths(&all_reduce(rank, ranks, count, 10_000), Action::sends);
                    let received = lengths(&all_reduce((rank + 1) % ranks, ranks, count, 10_000), Action::receives);
                    assert_eq!(sent, received, "{rank} of {ranks}, {count} elements");
                }
            }
        }
    }

    #[test]
    fn every_element_is_written_once_and_no_chunk_is_too_large() {
        for (ranks, count) in [(2, 1), (3, 2), (4, 131_072 * 40 + 5), (7, 500_000)] {
            let mut written = vec![0_u8; count];
            for step in all_reduce(1, ranks, count, 131_072) {
                assert!(step.elements.len() <= 131_072 && !step.elements.is_empty());
                if matches!(step.action, Action::RecvReduceCopySend | Action::RecvCopySend | Action::Recv) {
                    written[step.elements].iter_mut().for_each(|times| *times += 1);
                }
            }
            assert!(written.iter().all(|&times| times == 1), "{ranks} ranks, {count} elements");
        }
    }
}
