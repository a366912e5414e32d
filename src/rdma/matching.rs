//! Which send answers which clear-to-send: the k-th send with a tag fills the k-th posted receive with that tag.
//!
//! Of each tag either sends wait for lines or lines wait for sends, never both. NCCL uses one tag per connection, or as
//! many as there are ranks behind one NIC (PXN), and mostly the same one many times in a row: a short list and a look
//! at the last hit first.
//!
//! This module must not know what is sent.

use std::collections::VecDeque;

/// Tags whose queues are kept although they are empty: their memory is small and they will come back.
const KEPT: usize = 64;

/// Sends of type `S` and lines of type `L`, waiting for each other.
#[derive(Debug)]
pub struct Matching<S, L> {
    tags: Vec<Tag<S, L>>,
    last: usize,
    sends: usize,
}

#[derive(Debug)]
struct Tag<S, L> {
    tag: i32,
    waiting: Waiting<S, L>,
}

#[derive(Debug)]
enum Waiting<S, L> {
    Sends(VecDeque<S>),
    Lines(VecDeque<L>),
}

impl<S, L> Matching<S, L> {
    /// Nothing waits.
    pub fn new() -> Self {
        Self { tags: Vec::new(), last: 0, sends: 0 }
    }

    /// A send was posted. Gives it back with its line when that has come; else it waits.
    pub fn send(&mut self, tag: i32, send: S) -> Option<(S, L)> {
        match self.waiting(tag) {
            Waiting::Sends(sends) => sends.push_back(send),
            Waiting::Lines(lines) => match lines.pop_front() {
                Some(line) => return Some((send, line)),
                None => *self.waiting(tag) = Waiting::Sends(VecDeque::from([send])),
            },
        }
        self.sends += 1;
        None
    }

    /// A line has come. Gives it back with its send when that was posted; else it waits.
    pub fn line(&mut self, tag: i32, line: L) -> Option<(S, L)> {
        match self.waiting(tag) {
            Waiting::Lines(lines) => lines.push_back(line),
            Waiting::Sends(sends) => match sends.pop_front() {
                Some(send) => {
                    self.sends -= 1;
                    return Some((send, line));
                }
                None => *self.waiting(tag) = Waiting::Lines(VecDeque::from([line])),
            },
        }
        None
    }

    /// How many sends wait for their lines.
    pub fn waiting_sends(&self) -> usize {
        self.sends
    }

    fn waiting(&mut self, tag: i32) -> &mut Waiting<S, L> {
        if self.tags.get(self.last).is_none_or(|entry| entry.tag != tag) {
            self.last = self.position(tag);
        }
        &mut self.tags[self.last].waiting
    }

    fn position(&mut self, tag: i32) -> usize {
        if let Some(found) = self.tags.iter().position(|entry| entry.tag == tag) {
            return found;
        }
        if self.tags.len() >= KEPT {
            self.tags.retain(|entry| !entry.waiting.is_empty());
        }
        self.tags.push(Tag { tag, waiting: Waiting::Lines(VecDeque::new()) });
        self.tags.len() - 1
    }
}

impl<S, L> Default for Matching<S, L> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S, L> Waiting<S, L> {
    fn is_empty(&self) -> bool {
        match self {
            Self::Sends(sends) => sends.is_empty(),
            Self::Lines(lines) => lines.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        /// Sends and lines in any order: each pair is the k-th of its tag on both sides, and comes as soon as both are
        /// there.
        #[test]
        fn the_kth_send_of_a_tag_meets_its_kth_line(events in prop::collection::vec((any::<bool>(), -3..80_i32), 0..400)) {
            let mut matching = Matching::new();
            let mut counts: HashMap<i32, [usize; 2]> = HashMap::new();
            for (is_send, tag) in events {
                let count = counts.entry(tag).or_default();
                let order = count[usize::from(is_send)];
                count[usize::from(is_send)] += 1;
                let met = if is_send { matching.send(tag, (tag, order)) } else { matching.line(tag, (tag, order)) };
                let other_is_there = count[usize::from(!is_send)] > order;
                prop_assert_eq!(met, other_is_there.then_some(((tag, order), (tag, order))));
                let waiting: usize = counts.values().map(|[lines, sends]| sends.saturating_sub(*lines)).sum();
                prop_assert_eq!(matching.waiting_sends(), waiting);
            }
        }
    }

    #[test]
    fn tags_that_nobody_waits_with_do_not_pile_up() {
        let mut matching = Matching::new();
        assert_eq!(matching.send(-7, 0), None);
        for tag in 0..100_000 {
            assert_eq!(matching.line(tag, tag), None);
            assert_eq!(matching.send(tag, 1), Some((1, tag)));
        }
        assert!(matching.tags.len() <= KEPT);
        assert_eq!(matching.line(-7, 5), Some((0, 5)), "who waits is kept");
    }
}
