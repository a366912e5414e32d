//! The planned messages, the arrived bytes, and their checks.

use std::collections::{HashMap, VecDeque};
use std::ptr;

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
    /// Where messages are read and receives written; nowhere in games that move no bytes.
    sources: Vec<Source>,
    targets: Vec<usize>,
}

/// Where a message is read.
enum Source {
    Address(usize),
    /// The sender may have reused the memory since, so the arrived bytes are staged.
    Staged(Vec<u8>),
}

impl Source {
    fn address(&self) -> usize {
        match self {
            Self::Address(address) => *address,
            Self::Staged(bytes) => bytes.as_ptr().expose_provenance(),
        }
    }
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
            sources: Vec::new(),
            targets: Vec::new(),
        }
    }

    /// For messages of real bytes, of which none is planned yet.
    pub(super) fn of_memory() -> Self {
        Self {
            sends: Vec::new(),
            receives: Vec::new(),
            keys: HashMap::new(),
            sends_ended: Vec::new(),
            receives_ended: Vec::new(),
            sends_left: 0,
            receives_left: 0,
            placed: Vec::new(),
            sources: Vec::new(),
            targets: Vec::new(),
        }
    }

    /// Whether messages are of real bytes. Then there is no last one.
    pub(super) fn is_of_memory(&self) -> bool {
        !self.sources.is_empty() || !self.targets.is_empty()
    }

    pub(super) fn more_to_send(&mut self, address: usize, length: u64) -> usize {
        self.sends.push(Planned { tag: 0, length });
        self.sends_ended.push(false);
        self.sends_left += 1;
        self.sources.push(Source::Address(address));
        self.sends.len() - 1
    }

    pub(super) fn more_to_receive(&mut self, address: usize, length: u64) -> usize {
        self.receives.push(Planned { tag: 0, length });
        self.receives_ended.push(None);
        self.receives_left += 1;
        self.placed.push(Vec::new());
        self.targets.push(address);
        self.receives.len() - 1
    }

    pub(super) fn is_sent(&self, number: usize) -> bool {
        self.sends_ended[number]
    }

    pub(super) fn is_all_sent(&self) -> bool {
        self.sends_left == 0
    }

    pub(super) fn received(&self, number: usize) -> Option<u64> {
        self.receives_ended[number]
    }

    pub(super) fn send_began(&mut self, key: Key, number: usize) {
        assert!(self.keys.insert(key, number).is_none(), "a key names one message");
    }

    pub(super) fn send_ended(&mut self, key: Key) {
        let number = self.keys.remove(&key).expect("a message ends once");
        assert!(!std::mem::replace(&mut self.sends_ended[number], true), "a send ended twice");
        self.sends_left -= 1;
        let is_received = self.receives_ended.get(number).is_some_and(Option::is_some);
        if let Some(source) = self.sources.get_mut(number)
            && !is_received
        {
            let size = self.sends[number].length as usize;
            // SAFETY: the connection may use the memory until now, when its send ends.
            let bytes = unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(source.address()), size) };
            *source = Source::Staged(bytes.to_vec());
        }
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
        let number = usize::from(part.slot);
        self.placed[number].push((offset, length));
        if let (Some(source), Some(target)) = (self.sources.get(number), self.targets.get(number)) {
            let (from, to) = (source.address() + offset as usize, target + offset as usize);
            // SAFETY: the place was checked; both belong to the connection, since neither request has ended, or to the
            // ledger. With one tag the k-th receive is for the k-th send.
            unsafe {
                ptr::copy::<u8>(
                    ptr::with_exposed_provenance(from),
                    ptr::with_exposed_provenance_mut(to),
                    length as usize,
                );
            }
        }
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
    match dice.roll(8) {
        0 => 0,
        1 => dice.roll(200),
        2 => dice.roll(65_537),
        3 => 65_536 + dice.roll(3),
        4 | 5 => 65_537 + dice.roll(448 << 10),
        _ => dice.roll(3 << 20),
    }
}
