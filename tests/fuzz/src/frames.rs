//! The frame decoder, and both protocol cores fed with what it lets through: any frame, in any order, on any stream.
//!
//! A core may answer with an error at any time, which ends the connection. Until then no byte is placed outside its
//! receive, over another one or after the end, no request ends twice or while its bytes are still needed, and nothing
//! panics.

use std::collections::{HashMap, HashSet};

use super::Input;
use towline::os::error::Result;
use towline::session::frame::{HEADER, Header, Type};
use towline::tcp::recv_core::{End, Part, Place, Posted, RecvCore};
use towline::tcp::send_core::{Chunk, Key, SendCore};

const STREAMS: usize = 4;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(8) {
        0 => {
            let bytes: [u8; HEADER] = input.bytes();
            if let Ok(header) = Header::decode(&bytes) {
                assert_eq!(header.encode(), bytes);
            }
        }
        which @ 1..=4 => drop(Receiver::new(which == 4).play(&mut input)),
        which => drop(Sender::new(which == 7).play(&mut input)),
    }
}

/// A header that the decoder lets through.
fn header(input: &mut Input<'_>, kind: Type) -> Option<Header> {
    let header = Header {
        flags: input.byte() & 3,
        length: input.number() as u32,
        message: input.number(),
        order: input.number(),
        offset: input.number(),
        total: input.number(),
        tag: input.below(4) as i32 - 1,
        ..Header::of(kind, input.number() as u16)
    };
    Header::decode(&header.encode()).ok()
}

struct Receive {
    capacity: u64,
    placed: Vec<(u64, u64)>,
    ended: bool,
}

struct Receiver {
    core: RecvCore,
    receives: Vec<Receive>,
    open: [Option<(Header, Place)>; STREAMS],
    fenced: [bool; STREAMS],
    stages: HashMap<usize, (i32, u64)>,
}

impl Receiver {
    /// With room for what a sender over a full network or a long path sends ahead of its receive, or without.
    fn new(has_room: bool) -> Self {
        let mut core = RecvCore::new(has_room);
        (0..STREAMS).for_each(|index| core.stream_up(index, 1));
        Self { core, receives: Vec::new(), open: [None; STREAMS], fenced: [false; STREAMS], stages: HashMap::new() }
    }

    fn play(mut self, input: &mut Input<'_>) -> Result<()> {
        while !input.is_over() {
            let index = input.below(STREAMS);
            match input.below(10) {
                0 | 1 => self.post(input)?,
                2..=4 => self.begin(index, input)?,
                5 | 6 => self.end(index),
                7 => {
                    let epoch = self.core.epoch(index).wrapping_add(input.below(5) as u16).wrapping_sub(2);
                    if self.core.fence(index, epoch).is_some() {
                        (self.open[index], self.fenced[index]) = (None, true);
                    }
                }
                8 if self.fenced[index] => {
                    self.core.stream_up(index, self.core.epoch(index).wrapping_add(1));
                    self.fenced[index] = false;
                    self.core.announcements().for_each(drop);
                }
                8 => drop(self.core.query(input.below(4) as i32 - 1, input.number(), input.number())?),
                _ => drop(self.core.take_ack(index, input.below(2) == 0)),
            }
        }
        Ok(())
    }

    fn post(&mut self, input: &mut Input<'_>) -> Result<()> {
        let (tag, capacity) = (input.below(4) as i32 - 1, input.number() >> 8);
        if self.receives.len() > 2000 || !self.core.has_room(tag) {
            return Ok(());
        }
        let part = Part { slot: self.receives.len() as u16, part: 0 };
        self.receives.push(Receive { capacity, placed: Vec::new(), ended: false });
        if let Posted::Early(stage, total) = self.core.post(tag, capacity, part)? {
            self.unstage(stage, part, total);
        }
        Ok(())
    }

    fn begin(&mut self, index: usize, input: &mut Input<'_>) -> Result<()> {
        let Some(header) = header(input, Type::Data) else { return Ok(()) };
        // Most frames are of the present epoch of their stream.
        let epoch = if header.epoch < 250 { self.core.epoch(index) } else { header.epoch };
        let header = Header { epoch, ..header };
        let place = self.core.begin(index, &header)?;
        match place {
            Place::Posted(part, offset) => {
                let receive = &self.receives[usize::from(part.slot)];
                assert!(!receive.ended, "bytes for a receive that has ended");
                assert!(offset + u64::from(header.length) <= receive.capacity, "bytes beyond the end");
            }
            Place::Staged(stage) => {
                assert!(self.stages.insert(stage, (header.tag, u64::from(header.length))).is_none_or(|_| true));
            }
        }
        self.open[index] = Some((header, place));
        Ok(())
    }

    fn end(&mut self, index: usize) {
        let Some((header, place)) = self.open[index].take() else { return };
        if let Place::Posted(part, offset) = place {
            self.receives[usize::from(part.slot)].placed.push((offset, u64::from(header.length)));
        }
        match self.core.end(index) {
            End::More | End::Staged => {}
            End::Complete(part, total) => self.complete(part, total),
            End::Unstage(stage, part, total) => self.unstage(stage, part, total),
        }
    }

    fn unstage(&mut self, stage: usize, part: Part, total: u64) {
        let (tag, length) = self.stages.remove(&stage).expect("a staged message has its buffer");
        assert_eq!(length, total, "staged whole");
        self.core.unstaged(tag, stage);
        self.receives[usize::from(part.slot)].placed.push((0, total));
        self.complete(part, total);
    }

    fn complete(&mut self, part: Part, total: u64) {
        let still = |open: &(Header, Place)| matches!(open.1, Place::Posted(of, _) if of == part);
        assert!(!self.open.iter().flatten().any(still), "done while bytes still come");
        let receive = &mut self.receives[usize::from(part.slot)];
        assert!(!std::mem::replace(&mut receive.ended, true), "a receive ended twice");
        receive.placed.sort_unstable();
        let end = receive.placed.iter().fold(0, |at, (offset, length)| {
            assert_eq!(*offset, at, "each byte once");
            at + length
        });
        assert_eq!(end, total, "every byte");
        assert!(total <= receive.capacity);
    }
}

struct Sender {
    core: SendCore,
    lengths: HashMap<Key, u64>,
    /// Bytes that were handed out for the first time, per message: they go up without a gap.
    handed: HashMap<Key, u64>,
    /// Handed out and not wholly written, per stream.
    writing: [Option<Chunk>; STREAMS],
    live: [bool; STREAMS],
    /// Whether one stream carries the long messages now and then, ahead of their receives.
    full_network: bool,
}

impl Sender {
    fn new(full_network: bool) -> Self {
        let mut core = SendCore::new(true);
        if full_network {
            core.set_peer_has_room();
        }
        (0..STREAMS).for_each(|index| core.stream_up(index, 1));
        let (writing, live) = ([None; STREAMS], [true; STREAMS]);
        Self { core, lengths: HashMap::new(), handed: HashMap::new(), writing, live, full_network }
    }

    fn play(mut self, input: &mut Input<'_>) -> Result<()> {
        let mut done = Vec::new();
        while !input.is_over() {
            let index = input.below(STREAMS);
            match input.below(11) {
                0 | 1 if self.lengths.len() < 256 => {
                    let (length, tag) = (input.number() % (4 << 20), input.below(4) as i32 - 1);
                    let (key, _) = self.core.post(length, tag, length % 2 == 0)?;
                    assert!(self.lengths.insert(key, length).is_none(), "a key names one message");
                    self.handed.insert(key, 0);
                }
                2..=4 if self.live[index] && self.writing[index].is_none() => self.hand_out(index),
                5 | 6 if self.writing[index].take().is_some() => {
                    self.core.written(index);
                    self.core.settle(index, &mut done);
                }
                7 => {
                    let counts: Vec<u64> = (0..input.below(STREAMS + 1)).map(|_| input.number()).collect();
                    self.core.acknowledge_all(&counts, &mut done)?;
                    self.core.acknowledge(index, input.number(), input.number(), &mut done)?;
                }
                8 => drop(self.core.clear_to_send(input.below(4) as i32 - 1, input.number(), input.number())?),
                9 if self.live[index] => {
                    self.core.stream_down(index);
                    (self.live[index], self.writing[index]) = (false, None);
                }
                9 => {
                    // As after a handshake, which says how far the last epoch came.
                    self.core.fenced(index, self.core.epoch(index), input.number(), &mut done)?;
                    self.core.stream_up(index, self.core.epoch(index).wrapping_add(1));
                    self.live[index] = true;
                }
                10 => {
                    let stream = input.number() as usize;
                    self.core.fenced(stream, input.number() as u16, input.number(), &mut done)?;
                    self.core.stalled();
                    if self.full_network {
                        self.core.choose_carrier(input.below(2) == 0);
                    }
                }
                _ => {}
            }
            self.check(&mut done);
        }
        Ok(())
    }

    fn hand_out(&mut self, index: usize) {
        let Some(chunk) = self.core.next_chunk(index) else { return };
        let (length, handed) = (self.lengths[&chunk.key], self.handed.get_mut(&chunk.key).expect("a message"));
        assert!(chunk.offset + u64::from(chunk.length) <= length);
        assert_eq!(chunk.offset % 128, 0);
        if !chunk.again {
            assert_eq!(chunk.offset, *handed, "handed out in order");
            *handed += u64::from(chunk.length);
        }
        assert!(Header::decode(&chunk.header.encode()).is_ok_and(|header| header == chunk.header));
        self.writing[index] = Some(chunk);
    }

    fn check(&mut self, done: &mut Vec<Key>) {
        let ended: HashSet<Key> = done.iter().copied().collect();
        assert_eq!(ended.len(), done.len(), "a send ends once");
        for key in done.drain(..) {
            let length = self.lengths.remove(&key).expect("a send ends once");
            assert_eq!(self.handed.remove(&key), Some(length), "done before it was sent");
            let reads = |chunk: &Chunk| chunk.key == key;
            assert!(!self.writing.iter().flatten().any(reads), "done while its bytes are still read");
        }
    }
}
