//! Which send answers which CTS entry: the k-th send with a tag fills the k-th posted receive with that tag.
//!
//! A send that did not wait for a CTS entry leaves its number unused here: the entry that would have matched it, if it
//! arrives at all, is dropped. So sends and entries carry their numbers, and gaps need no special handling.
//!
//! NCCL uses one tag per connection, or as many as there are ranks behind one NIC (PXN), and mostly the same one many
//! times in a row. So this is a short sorted list, where the last hit is tried first. A tag that was used once is
//! remembered.
//!
//! This module must not depend on what is sent.

use std::collections::VecDeque;

/// Sends of type `S` and CTS entries of type `L`, waiting for each other.
#[derive(Debug)]
pub(crate) struct Matching<S, L> {
    tags: Vec<Tag<S, L>>,
    last: usize,
    sends: usize,
}

#[derive(Debug)]
struct Tag<S, L> {
    tag: i32,
    /// The number of the next send.
    next: u32,
    sends: VecDeque<(u32, S)>,
    cts_entries: VecDeque<(u32, L)>,
}

impl<S, L> Matching<S, L> {
    /// Nothing waits.
    pub(crate) fn new() -> Self {
        Self { tags: Vec::new(), last: 0, sends: 0 }
    }

    /// A send is posted: its number, and its CTS entry when that has arrived.
    #[inline]
    pub(crate) fn send(&mut self, tag: i32) -> (u32, Option<L>) {
        let entry = self.tag(tag);
        let number = entry.next;
        entry.next = number.wrapping_add(1);
        // The entry is nearly always the first. But one that was announced late is behind later ones, and is skipped
        // when its send did not wait for it.
        while let Some((of, _)) = entry.cts_entries.front()
            && number.wrapping_sub(*of).cast_signed() > 0
        {
            entry.cts_entries.pop_front();
        }
        match entry.cts_entries.front() {
            None => (number, None),
            Some((of, _)) if *of == number => (number, entry.cts_entries.pop_front().map(|(_, cts)| cts)),
            Some(_) => (number, entry.cts(number)),
        }
    }

    /// The number of the next send with that tag, for a send without a CTS entry, when no entry of its tag has arrived.
    /// The caller counts the send when it is posted. None when one has.
    #[inline(always)]
    pub(crate) fn next_alone(&mut self, tag: i32) -> Option<&mut u32> {
        let entry = self.tag(tag);
        entry.cts_entries.is_empty().then_some(&mut entry.next)
    }

    /// That send waits for its CTS entry.
    pub(crate) fn wait(&mut self, tag: i32, number: u32, send: S) {
        self.tag(tag).sends.push_back((number, send));
        self.sends += 1;
    }

    /// The CTS entry of receive `order`, modulo 65,536, has arrived. Returns it with its send if that waits. Otherwise
    /// it is kept until the send is posted, or dropped if the send did not wait for it.
    #[inline]
    pub(crate) fn cts(&mut self, tag: i32, order: u16, cts: L) -> Option<(S, L)> {
        let entry = self.tag(tag);
        // The nearest number: a connection has far fewer outstanding receives than 16 bits can distinguish.
        let ahead = order.wrapping_sub(entry.next as u16).cast_signed();
        let number = entry.next.wrapping_add_signed(ahead.into());
        if ahead >= 0 {
            entry.cts_entries.push_back((number, cts));
            return None;
        }
        let at = entry.sends.iter().position(|(of, _)| *of == number)?;
        let (_, send) = entry.sends.remove(at)?;
        self.sends -= 1;
        Some((send, cts))
    }

    /// How many sends wait for their CTS entries.
    #[inline]
    pub(crate) fn waiting_sends(&self) -> usize {
        self.sends
    }

    /// Takes out the waiting sends that `go` allows to go without a CTS entry, oldest of each tag first, with tag and
    /// number.
    pub(crate) fn release(&mut self, mut go: impl FnMut(&S) -> bool) -> Vec<(i32, u32, S)> {
        let mut released = Vec::new();
        for entry in &mut self.tags {
            let mut at = 0;
            while at < entry.sends.len() {
                if go(&entry.sends[at].1) {
                    released.extend(entry.sends.remove(at).map(|(number, send)| (entry.tag, number, send)));
                } else {
                    at += 1;
                }
            }
        }
        self.sends -= released.len();
        released
    }

    #[inline(always)]
    fn tag(&mut self, tag: i32) -> &mut Tag<S, L> {
        // Groups use the tags in turn.
        let is_at = |at: usize| self.tags.get(at).is_some_and(|entry| entry.tag == tag);
        if !is_at(self.last) {
            let next = self.last + 1;
            self.last = if is_at(next) { next } else { self.position(tag) };
        }
        &mut self.tags[self.last]
    }

    #[cold]
    fn position(&mut self, tag: i32) -> usize {
        self.tags.binary_search_by_key(&tag, |entry| entry.tag).unwrap_or_else(|at| {
            self.tags.insert(at, Tag { tag, next: 0, sends: VecDeque::new(), cts_entries: VecDeque::new() });
            at
        })
    }
}

impl<S, L> Tag<S, L> {
    /// A CTS entry behind others.
    #[cold]
    fn cts(&mut self, number: u32) -> Option<L> {
        let at = self.cts_entries.iter().position(|(of, _)| *of == number)?;
        self.cts_entries.remove(at).map(|(_, cts)| cts)
    }
}

impl<S, L> Default for Matching<S, L> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};

    /// The cases of one tag: a send that waits if it must, a send that waits for no CTS entry, an entry, or a receive
    /// that is not announced.
    #[derive(Debug, Clone, Copy)]
    enum Event {
        Patient,
        Eager,
        Announced,
        Silent,
        /// The silent ones are announced, behind CTS entries of later receives.
        Queried,
    }

    fn events() -> impl Strategy<Value = Vec<(Event, i32)>> {
        let event = prop_oneof![
            3 => Just(Event::Patient),
            3 => Just(Event::Eager),
            3 => Just(Event::Announced),
            3 => Just(Event::Silent),
            1 => Just(Event::Queried),
        ];
        prop::collection::vec((event, -3..4_i32), 0..400)
    }

    proptest! {
        /// A send meets the CTS entry of the receive with its own number, as soon as both are there, and no other.
        #[test]
        fn the_kth_send_of_a_tag_meets_its_kth_cts_entry(events in events()) {
            let mut matching = Matching::new();
            let mut sends: HashMap<i32, u32> = HashMap::new();
            let mut receives: HashMap<i32, u32> = HashMap::new();
            let mut silent = Vec::new();
            let mut cts_entries = HashSet::new();
            let mut waiting = HashSet::new();
            for (event, tag) in events {
                match event {
                    Event::Patient | Event::Eager => {
                        let k = sends.entry(tag).or_default();
                        let (number, cts) = matching.send(tag);
                        prop_assert_eq!(number, *k);
                        prop_assert_eq!(cts, cts_entries.contains(&(tag, *k)).then_some((tag, *k)));
                        if cts.is_none() && matches!(event, Event::Patient) {
                            matching.wait(tag, number, (tag, *k));
                            waiting.insert((tag, *k));
                        }
                        *k += 1;
                    }
                    Event::Announced => {
                        let k = receives.entry(tag).or_default();
                        cts_entries.insert((tag, *k));
                        let met = matching.cts(tag, *k as u16, (tag, *k));
                        prop_assert_eq!(met, waiting.remove(&(tag, *k)).then_some(((tag, *k), (tag, *k))));
                        *k += 1;
                    }
                    Event::Silent => {
                        let k = receives.entry(tag).or_default();
                        silent.push((tag, *k));
                        *k += 1;
                    }
                    Event::Queried => {
                        for (tag, k) in silent.drain(..) {
                            cts_entries.insert((tag, k));
                            let met = matching.cts(tag, k as u16, (tag, k));
                            prop_assert_eq!(met, waiting.remove(&(tag, k)).then_some(((tag, k), (tag, k))));
                        }
                    }
                }
                prop_assert_eq!(matching.waiting_sends(), waiting.len());
            }
            let mut released: Vec<_> = matching.release(|_| true).into_iter().map(|(tag, number, _)| (tag, number)).collect();
            released.sort_unstable();
            let mut left: Vec<_> = waiting.into_iter().collect();
            left.sort_unstable();
            prop_assert_eq!(released, left);
        }
    }

    #[test]
    fn numbers_go_on_beyond_their_16_bits() {
        let mut matching = Matching::new();
        for number in 0..70_000_u32 {
            assert_eq!(matching.cts(1, number as u16, number), None);
            assert_eq!(matching.send(1), (number, Some(number)));
        }
        let (number, cts) = matching.send(1);
        assert_eq!((number, cts), (70_000, None));
        matching.wait(1, number, "late");
        assert_eq!(matching.cts(1, 70_000_u32 as u16, 3), Some(("late", 3)));
    }

    #[test]
    fn lines_of_sends_that_went_without_them_are_dropped() {
        let mut matching = Matching::<(), u32>::new();
        assert_eq!(matching.send(5), (0, None));
        assert_eq!(matching.cts(5, 0, 0), None);
        for number in 1..5 {
            assert_eq!(matching.cts(5, number as u16, number), None);
        }
        assert_eq!(matching.send(5), (1, Some(1)));
        assert!(matching.tags[0].cts_entries.len() == 3, "and only those that are still to be met are kept");
    }
}
