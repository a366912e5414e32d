//! What was planned, what has come, and the checks of it.

use std::collections::{HashMap, VecDeque};

use super::Dice;
use crate::tcp::recv_core::Part;
use crate::tcp::send_core::Key;

pub(super) struct Planned {
    pub(super) tag: i32,
    /// A message's size, or a receive's capacity, in bytes.
    pub(super) length: u64,
}

/// Tags are below this.
pub(super) const TAGS: u64 = 3;

pub(super) struct Ledger {
    /// In posting order; per tag the k-th receive is for the k-th send.
    pub(super) sends: Vec<Planned>,
    pub(super) receives: Vec<Planned>,
    keys: HashMap<Key, usize>,
    sends_ended: Vec<bool>,
    receives_ended: Vec<Option<u64>>,
    sends_left: usize,
    receives_left: usize,
    /// Ranges that are in place, per receive.
    placed: Vec<Vec<(u64, u64)>>,
}

impl Ledger {
    pub(super) fn plan(dice: &mut Dice) -> Self {
        let tags = 1 + dice.roll(TAGS);
        let count = 1 + dice.roll(40) as usize;
        let sends: Vec<Planned> =
            (0..count).map(|_| Planned { tag: dice.roll(tags) as i32, length: any_length(dice) }).collect();
        // The receives in an order of their own across tags, and in the senders' order within each.
        let mut queues: Vec<VecDeque<u64>> = vec![VecDeque::new(); tags as usize];
        for send in &sends {
            queues[send.tag as usize].push_back(send.length);
        }
        let mut receives = Vec::new();
        while receives.len() < count {
            let tag = dice.roll(tags) as usize;
            if let Some(length) = queues[tag].pop_front() {
                receives.push(Planned { tag: tag as i32, length: length + dice.roll(2) * dice.roll(1 << 20) });
            }
        }
        Self {
            keys: HashMap::new(),
            sends_ended: vec![false; count],
            receives_ended: vec![None; count],
            sends_left: count,
            receives_left: count,
            placed: vec![Vec::new(); count],
            sends,
            receives,
        }
    }

    pub(super) fn send_began(&mut self, key: Key, number: usize) {
        assert!(self.keys.insert(key, number).is_none(), "a key names one message");
    }

    pub(super) fn send_ended(&mut self, key: Key) {
        let number = self.keys.remove(&key).expect("a message ends once");
        assert!(!std::mem::replace(&mut self.sends_ended[number], true), "a send ended twice");
        self.sends_left -= 1;
    }

    /// The bytes of a frame are about to be placed.
    pub(super) fn check_place(&self, part: Part, offset: u64, length: u64) {
        let number = usize::from(part.slot);
        assert!(self.receives_ended[number].is_none(), "bytes for a receive that has ended");
        let capacity = self.receives[number].length;
        assert!(offset + length <= capacity, "receive {number} of {capacity} bytes: {length} bytes at {offset}");
    }

    pub(super) fn placed(&mut self, part: Part, offset: u64, length: u64) {
        self.check_place(part, offset, length);
        self.placed[usize::from(part.slot)].push((offset, length));
    }

    pub(super) fn receive_ended(&mut self, part: Part, total: u64) {
        let number = usize::from(part.slot);
        let placed = &mut self.placed[number];
        placed.sort_unstable();
        let mut at = 0;
        for (offset, length) in placed.iter() {
            assert_eq!(*offset, at, "receive {number} of {total} bytes: each byte is placed once");
            at += length;
        }
        assert_eq!(at, total, "receive {number}: every byte is placed");
        assert!(self.receives_ended[number].replace(total).is_none(), "a receive ended twice");
        self.receives_left -= 1;
    }

    pub(super) fn is_over(&self) -> bool {
        self.sends_left + self.receives_left == 0
    }

    /// Whether every receive has ended.
    pub(super) fn is_received(&self) -> bool {
        self.receives_left == 0
    }

    /// Per tag, the k-th receive got the k-th send.
    pub(super) fn check_sizes(&self) {
        for tag in 0..TAGS as i32 {
            let lengths = self.sends.iter().filter(|send| send.tag == tag).map(|send| send.length);
            let got = self.receives.iter().zip(&self.receives_ended).filter(|(r, _)| r.tag == tag).map(|(_, got)| *got);
            assert!(lengths.map(Some).eq(got), "sizes in order for tag {tag}");
        }
    }
}

fn any_length(dice: &mut Dice) -> u64 {
    match dice.roll(6) {
        0 => 0,
        1 => dice.roll(200),
        2 => dice.roll(65_537),
        3 => 65_536 + dice.roll(3),
        _ => dice.roll(3 << 20),
    }
}
