//! The two cores against each other, without sockets: a seed decides everything that a network may do.
//!
//! Streams deliver in order but at any time relative to each other, die at any moment (also in the middle of a frame,
//! with frames and answers on the way), are fenced and come back. Promises checked for every seed: each message ends
//! once on both sides, with its size; each of its bytes is taken in exactly once; nothing hangs; nothing is
//! refused.
//!
//! A failure names its seed. `TOWLINE_SIM_SEEDS` sets how many seeds are played, `TOWLINE_SIM_FIRST` the first.

use std::collections::{HashMap, VecDeque};

use super::frame::{Header, Type};
use super::recv_core::{End, Part, Posted, RecvCore};
use super::send_core::{Key, SendCore};

/// xorshift64*: enough to wander, and the same everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % below
    }
}

#[derive(Default)]
struct Wire {
    forth: VecDeque<Header>,
    back: VecDeque<Header>,
    epoch: u16,
    live: bool,
    /// The receiver has begun the frame at the front and not ended it.
    begun: bool,
}

struct Planned {
    tag: i32,
    length: u64,
}

struct World {
    dice: Dice,
    sender: SendCore,
    receiver: RecvCore,
    wires: Vec<Wire>,
    /// Messages in posting order, and receives in posting order: the same numbers per tag.
    sends: Vec<Planned>,
    receives: Vec<Planned>,
    sent: usize,
    posted: usize,
    keys: HashMap<Key, usize>,
    sends_ended: Vec<bool>,
    receives_ended: Vec<Option<u64>>,
    /// Bytes taken in per message number.
    taken: HashMap<u64, u64>,
    stage_tags: HashMap<usize, i32>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let tags = 1 + dice.roll(3) as i32;
        let count = 1 + dice.roll(40) as usize;
        let length = |dice: &mut Dice| match dice.roll(6) {
            0 => 0,
            1 => dice.roll(200),
            2 => dice.roll(65_537),
            3 => 65_536 + dice.roll(3),
            _ => dice.roll(3 << 20),
        };
        let sends: Vec<Planned> =
            (0..count).map(|_| Planned { tag: dice.roll(tags as u64) as i32, length: length(&mut dice) }).collect();
        // The receives in an order of their own across tags, and in the senders' order within each.
        let mut queues: Vec<VecDeque<u64>> = vec![VecDeque::new(); tags as usize];
        for send in &sends {
            queues[send.tag as usize].push_back(send.length);
        }
        let mut receives = Vec::new();
        while receives.len() < count {
            let tag = dice.roll(tags as u64) as usize;
            if let Some(length) = queues[tag].pop_front() {
                receives.push(Planned { tag: tag as i32, length: length + dice.roll(2) * dice.roll(1 << 20) });
            }
        }
        let streams = 1 + dice.roll(4) as usize;
        let mut world = Self {
            dice,
            sender: SendCore::new(true),
            receiver: RecvCore::default(),
            wires: (0..streams).map(|_| Wire::default()).collect(),
            sends_ended: vec![false; count],
            receives_ended: vec![None; count],
            sends,
            receives,
            sent: 0,
            posted: 0,
            keys: HashMap::new(),
            taken: HashMap::new(),
            stage_tags: HashMap::new(),
        };
        for index in 0..streams {
            world.connect(index);
        }
        world
    }

    fn connect(&mut self, index: usize) {
        let wire = &mut self.wires[index];
        wire.epoch += 1;
        let epoch = wire.epoch;
        *wire = Wire { epoch, live: true, ..Wire::default() };
        self.sender.stream_up(index, epoch);
        self.receiver.stream_up(index, epoch);
        // What was announced over a stream that died may never have arrived.
        self.wires[index].back.extend(self.receiver.announcements());
    }

    fn kill(&mut self, index: usize) {
        self.wires[index].live = false;
        self.wires[index].forth.clear();
        self.wires[index].back.clear();
        self.sender.stream_down(index);
        let frames = self.receiver.fence(index);
        let mut done = Vec::new();
        self.sender.fenced(index, frames, &mut done).expect("a fence tells the truth");
        self.end_sends(done);
    }

    fn end_sends(&mut self, done: Vec<Key>) {
        for key in done {
            let number = self.keys.remove(&key).expect("a message ends once");
            assert!(!std::mem::replace(&mut self.sends_ended[number], true), "a send ended twice");
        }
    }

    fn post_send(&mut self) {
        if let Some(send) = self.sends.get(self.sent) {
            let (key, _) = self.sender.post(send.length, send.tag).expect("it fits its receive");
            assert!(self.keys.insert(key, self.sent).is_none(), "a key names one message");
            self.sent += 1;
        }
    }

    fn post_receive(&mut self) {
        let Some(receive) = self.receives.get(self.posted) else { return };
        let (tag, capacity) = (receive.tag, receive.length);
        let part = Part { slot: self.posted as u16, part: 0 };
        self.posted += 1;
        match self.receiver.post(tag, capacity, part).expect("the message fits") {
            Posted::Waits => {}
            Posted::Announce(header) => {
                if let Some(wire) = self.wires.iter_mut().find(|wire| wire.live) {
                    wire.back.push_back(header);
                }
            }
            Posted::Early(stage, total) => {
                self.receiver.unstaged(self.stage_tags[&stage], stage);
                self.end_receive(part, total);
            }
        }
    }

    fn end_receive(&mut self, part: Part, total: u64) {
        let ended = &mut self.receives_ended[usize::from(part.slot)];
        assert!(ended.replace(total).is_none(), "a receive ended twice");
    }

    fn send_chunk(&mut self, index: usize) {
        if let Some(chunk) = self.sender.next_chunk(index) {
            assert_eq!(chunk.offset % 128, 0);
            self.sender.written(index);
            self.wires[index].forth.push_back(chunk.header);
        }
    }

    fn deliver(&mut self, index: usize) {
        let Some(header) = self.wires[index].forth.front().copied() else { return };
        if !self.wires[index].begun {
            let place = self.receiver.begin(index, &header).expect("nothing sent is refused");
            if let super::recv_core::Place::Staged(stage) = place {
                self.stage_tags.insert(stage, header.tag);
            }
            self.wires[index].begun = true;
            return;
        }
        self.wires[index].begun = false;
        self.wires[index].forth.pop_front();
        *self.taken.entry(header.message).or_default() += u64::from(header.length);
        match self.receiver.end(index) {
            End::More | End::Staged => {}
            End::Complete(part, total) => self.end_receive(part, total),
            End::Unstage(stage, part, total) => {
                self.receiver.unstaged(self.stage_tags[&stage], stage);
                self.end_receive(part, total);
            }
        }
    }

    fn answer(&mut self, index: usize, force: bool) {
        if let Some(header) = self.receiver.take_ack(index, force) {
            self.wires[index].back.push_back(header);
        }
    }

    fn deliver_answer(&mut self, index: usize) {
        let Some(header) = self.wires[index].back.pop_front() else { return };
        let mut done = Vec::new();
        match header.kind {
            Type::Ack => self.sender.acknowledge(index, header.offset, header.total, &mut done).expect("a true answer"),
            Type::Clear => {
                self.sender.clear_to_send(header.tag, header.order, header.total).expect("a true announcement");
            }
            other => unreachable!("the receiver does not answer with {other:?}"),
        }
        self.end_sends(done);
    }

    fn over(&self) -> bool {
        self.sends_ended.iter().all(|ended| *ended) && self.receives_ended.iter().all(Option::is_some)
    }

    fn play(&mut self) {
        let deaths = self.dice.roll(6);
        let mut died = 0;
        for step in 0..200_000_u64 {
            if self.over() {
                break;
            }
            let index = self.dice.roll(self.wires.len() as u64) as usize;
            match self.dice.roll(16) {
                0 => self.post_send(),
                1 => self.post_receive(),
                2 if died < deaths && self.wires[index].live && self.dice.roll(8) == 0 => {
                    died += 1;
                    self.kill(index);
                }
                3 if !self.wires[index].live => self.connect(index),
                _ if !self.wires[index].live => {}
                4..=7 => self.send_chunk(index),
                8..=12 => self.deliver(index),
                13 => self.answer(index, step % 64 == 0),
                _ => self.deliver_answer(index),
            }
        }
        assert!(self.over(), "it hangs; sender: {}; receiver: {}", self.sender.describe(), self.receiver.describe());
        assert!(self.sender.is_idle(), "all is acknowledged");
        for (number, send) in self.sends.iter().enumerate() {
            assert_eq!(
                self.taken.get(&(number as u64)).copied().unwrap_or(0),
                send.length,
                "bytes of message {number}"
            );
        }
        // Per tag, the k-th receive got the k-th send.
        for tag in 0..3 {
            let lengths = self.sends.iter().filter(|send| send.tag == tag).map(|send| send.length);
            let got = self.receives.iter().zip(&self.receives_ended).filter(|(r, _)| r.tag == tag).map(|(_, got)| *got);
            assert!(lengths.map(Some).eq(got), "sizes in order for tag {tag}");
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn every_message_arrives_once_whatever_the_network_does() {
    let first = setting("TOWLINE_SIM_FIRST", 1);
    for seed in first..first + setting("TOWLINE_SIM_SEEDS", 2_000) {
        let played = std::panic::catch_unwind(|| World::new(seed).play());
        if let Err(panic) = played {
            panic!("seed {seed}: {}", crate::engine::poller::panic_text(panic.as_ref()));
        }
    }
}
