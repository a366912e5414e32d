//! Both cores, and what `sender` and `receiver` do around them, with queues in place of sockets.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use super::Dice;
use super::ledger::{Ledger, TAGS};
use super::line::{Arrival, Line};
use crate::os::error::{Error, Result};
use crate::session::frame::{EAGER, Header, Type};
use crate::session::peer::fenced;
use crate::tcp::limits::EAGER_MAX;
use crate::tcp::recv_core::{End, Part, Place, Posted, RecvCore};
use crate::tcp::send_core::{Admit, Key, SendCore};

/// What the peer or the network does beyond delivering late and losing streams.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mischief {
    None,
    /// Data frames come again.
    Repeat,
    /// Any frame is changed or invented.
    Anything,
    /// Bits of protected streams flip.
    Damage {
        encrypted: bool,
    },
    /// Nothing comes through for a while, soon after the first stream is connected.
    Outage,
}

struct Frame {
    header: Header,
    /// The sender has written all of it.
    whole: bool,
    /// Not the sender's own.
    repeated: bool,
    /// On a protected stream: what is on the wire.
    bytes: Vec<u8>,
}

/// What the receiver has written: a frame, with the counts of an acknowledgement for all streams.
struct ControlFrame {
    header: Header,
    counts: Vec<u64>,
}

impl From<Header> for ControlFrame {
    fn from(header: Header) -> Self {
        Self { header, counts: Vec::new() }
    }
}

/// One stream: the frames on the way in both directions, and what each side assumes about the stream.
#[derive(Default)]
struct Wire {
    /// Control frames that the sender will write before the next chunk.
    control: VecDeque<Header>,
    forth: VecDeque<Frame>,
    back: VecDeque<ControlFrame>,
    /// The message whose chunk is the last frame in `forth`, when it was written in part.
    writing: Option<Key>,
    /// The receiver has begun the frame at the front and not ended it.
    begun: Option<Place>,
    /// Nothing that is written from now on arrives, in either direction.
    cut: bool,
    /// The sender's kernel does not notice the cut, so the receiver has to report it.
    hidden: bool,
    sender_has_it: bool,
    /// The sender's worker polls: a thread has kicked it, or the kernel has woken it, and no poll since then was empty.
    /// For the first stream that is NCCL's thread, which polls again and again.
    is_awake: bool,
    receiver_has_it: bool,
    /// The last epoch that the sender has tried to connect.
    tried: u16,
    /// Nothing moves on it before this step.
    stalled_until: u64,
    /// Its protection.
    line: Option<Line>,
}

pub(super) struct World {
    dice: Dice,
    mischief: Mischief,
    sender: SendCore,
    receiver: RecvCore,
    wires: Vec<Wire>,
    /// The frames that the receiver will write on the next stream that it writes.
    outbox: Vec<Header>,
    stages: HashMap<usize, (i32, u64)>,
    sent: usize,
    posted: usize,
    cuts_left: u64,
    /// When nothing arrives, in steps.
    outage: Range<u64>,
    pub(super) was_cut: bool,
    now: u64,
    /// Data frames that were written, for the mischief.
    seen: Vec<Header>,
    pub(super) repeats_taken: u64,
    pub(super) ledger: Ledger,
    /// The path is a long one.
    far: bool,
    /// The receiver accepts as many eager messages as over a long path.
    has_room: bool,
}

impl World {
    pub(super) fn new(seed: u64, mischief: Mischief) -> Result<Self> {
        let mut dice = Dice::of(seed);
        let ledger = Ledger::plan(&mut dice);
        let streams = 1 + dice.roll(4) as usize;
        let (far, has_room) = (seed % 4 >= 2, seed % 4 >= 1);
        let outage = if mischief == Mischief::Outage { 1 + dice.roll(300)..2000 + dice.roll(4000) } else { 0..0 };
        let mut world = Self {
            mischief,
            sender: SendCore::new(true),
            receiver: RecvCore::new(has_room),
            wires: (0..streams).map(|_| Wire::default()).collect(),
            outbox: Vec::new(),
            stages: HashMap::new(),
            sent: 0,
            posted: 0,
            cuts_left: dice.roll(6).saturating_sub(if mischief == Mischief::Repeat { 3 } else { 0 }),
            outage,
            was_cut: false,
            now: 0,
            seen: Vec::new(),
            repeats_taken: 0,
            ledger,
            dice,
            far,
            has_room,
        };
        if has_room {
            world.sender.set_peer_has_room();
        }
        if far {
            world.sender.go_far();
        }
        // The handshake of the connection makes the first stream in epoch 0; all others join.
        world.sender.stream_up(0, 0);
        world.receiver.stream_up(0, 0);
        (world.wires[0].sender_has_it, world.wires[0].receiver_has_it) = (true, true);
        world.wires[0].line = world.line(0, 0);
        Ok(world)
    }

    fn line(&self, index: usize, epoch: u16) -> Option<Line> {
        match self.mischief {
            Mischief::Damage { encrypted } => Some(Line::new(encrypted, index, epoch)),
            _ => None,
        }
    }

    /// One thing happens.
    pub(super) fn step(&mut self) -> Result<()> {
        self.check_bounded();
        self.now += 1;
        if self.now == self.outage.start {
            (0..self.wires.len()).for_each(|index| self.cut(index));
        }
        let index = self.dice.roll(self.wires.len() as u64) as usize;
        match self.dice.roll(32) {
            0 | 1 => return self.post_send(),
            2 | 3 => return self.post_receive(),
            4 => return self.rare(index),
            5 if !self.wires[index].sender_has_it => return self.join(index),
            _ if self.wires[index].stalled_until > self.now => return Ok(()),
            6..=11 => self.write(index),
            12..=14 => self.finish_write(index),
            15..=23 => return self.deliver(index),
            24..=26 => self.answer(index),
            _ => return self.deliver_answer(index),
        }
        Ok(())
    }

    /// All frames that are on the way to the receiver arrive.
    pub(super) fn drain(&mut self) -> Result<()> {
        for index in 0..self.wires.len() {
            self.finish_write(index);
            while self.wires[index].receiver_has_it && !self.wires[index].forth.is_empty() {
                self.deliver(index)?;
            }
        }
        Ok(())
    }

    fn rare(&mut self, index: usize) -> Result<()> {
        match self.dice.roll(16) {
            0 | 1 if self.cuts_left > 0 && self.wires[index].sender_has_it => {
                self.cuts_left -= 1;
                self.cut(index);
            }
            2..=7 if self.wires[index].cut && !self.wires[index].hidden && self.wires[index].sender_has_it => {
                self.notice(index);
            }
            8 => self.wires[index].stalled_until = self.now + self.dice.roll(400),
            9 if self.wires[0].sender_has_it => {
                let queries = self.sender.stalled();
                self.wires[0].control.extend(queries);
            }
            10 if self.mischief == Mischief::Repeat => self.repeat(index),
            10..=12 if self.mischief == Mischief::Anything => self.invent(index),
            13 | 14 if self.wires[index].cut && self.wires[index].receiver_has_it => self.receiver_notices(index),
            15 if self.wires.iter().all(|wire| !wire.receiver_has_it)
                && self.wires[index].sender_has_it
                && !self.outage.contains(&self.now) =>
            {
                // A receiver without any stream calls the sender.
                self.notice(index);
            }
            _ => {}
        }
        Ok(())
    }

    fn post_send(&mut self) -> Result<()> {
        if let Some(send) = self.ledger.sends.get(self.sent) {
            let hand_over = self.dice.roll(2) == 0;
            let length = send.length;
            let (key, admit) = self.sender.post(length, send.tag, hand_over)?;
            if let Some(query) = self.sender.query_at_once(key) {
                self.wires[0].control.push_back(query);
            }
            self.ledger.send_began(key, self.sent);
            self.sent += 1;
            if admit == Admit::ForWorkers || admit == Admit::Ready && !self.wires[0].sender_has_it {
                self.wake_streams(length);
            }
        }
        Ok(())
    }

    /// As `SendConn::wake_streams`.
    fn wake_streams(&mut self, length: u64) {
        let one = self.dice.roll(2) == 0;
        let (streams, count) = self.sender.engage(length, one);
        for index in &streams[..count] {
            self.wires[usize::from(*index)].is_awake = true;
        }
    }

    fn post_receive(&mut self) -> Result<()> {
        let Some(receive) = self.ledger.receives.get(self.posted) else { return Ok(()) };
        let (tag, capacity) = (receive.tag, receive.length);
        let part = Part { slot: self.posted as u16, part: 0 };
        self.posted += 1;
        match self.receiver.post(tag, capacity, part)? {
            Posted::Waits => {}
            Posted::Announce(header) => self.outbox.push(header),
            Posted::Early(stage, total) => self.unstage(stage, part, total),
        }
        Ok(())
    }

    fn unstage(&mut self, stage: usize, part: Part, total: u64) {
        let (tag, length) = self.stages.remove(&stage).expect("a staged message has its buffer");
        assert_eq!(length, total, "staged whole");
        self.ledger.placed(part, 0, total);
        self.receiver.unstaged(tag, stage);
        self.ledger.receive_ended(part, total);
    }

    fn write(&mut self, index: usize) {
        let wire = &mut self.wires[index];
        if !wire.sender_has_it || wire.writing.is_some() || index > 0 && !wire.is_awake {
            return;
        }
        let (header, key) = match wire.control.pop_front() {
            Some(header) => (header, None),
            None => match self.sender.next_chunk(index) {
                Some(chunk) => (chunk.header, Some(chunk.key)),
                None => {
                    wire.is_awake = self.dice.roll(2) == 0;
                    self.kick_roomy();
                    return;
                }
            },
        };
        let is_data = key.is_some();
        if is_data {
            self.sender.leaves(index, Instant::now());
            assert_eq!(header.offset % 128, 0);
            self.seen.push(header);
        }
        let whole = !is_data || self.dice.roll(2) == 0;
        let wire = &mut self.wires[index];
        if !wire.cut {
            let bytes = wire.line.as_mut().map(|line| line.seal(&header)).unwrap_or_default();
            wire.forth.push_back(Frame { header, whole, repeated: false, bytes });
        }
        if !is_data {
            return;
        }
        if whole {
            self.written(index);
        } else {
            wire.writing = key;
        }
    }

    fn finish_write(&mut self, index: usize) {
        let wire = &mut self.wires[index];
        if wire.writing.take().is_some() {
            wire.is_awake = true;
            if let Some(last) = wire.forth.iter_mut().rev().find(|frame| !frame.repeated)
                && !wire.cut
            {
                last.whole = true;
            }
            self.written(index);
        }
    }

    /// The kernel has accepted a whole chunk.
    fn written(&mut self, index: usize) {
        self.sender.written(index);
        let mut done = Vec::new();
        self.sender.settle(index, &mut done);
        self.end_sends(done);
    }

    /// Bytes that the kernel of either side already holds may still be read; the rest is gone.
    fn cut(&mut self, index: usize) {
        let (forth, back) = (self.wires[index].forth.len() as u64, self.wires[index].back.len() as u64);
        let (forth, back) = (self.dice.roll(forth + 1), self.dice.roll(back + 1));
        let wire = &mut self.wires[index];
        wire.cut = true;
        wire.hidden = self.dice.roll(4) == 0;
        self.was_cut = true;
        wire.forth.truncate(forth as usize);
        wire.back.truncate(back as usize);
        if let Some(last) = wire.forth.back_mut()
            && self.dice.roll(2) == 0
        {
            last.whole = false;
        }
    }

    /// The sender notices the end of a stream and requests, over another stream, that the receiver fence it.
    fn notice(&mut self, index: usize) {
        let wire = &mut self.wires[index];
        wire.sender_has_it = false;
        wire.writing = None;
        wire.back.clear();
        wire.control.clear();
        self.sender.stream_down(index);
        let epoch = self.sender.epoch(index);
        if let Some(other) = self.wires.iter_mut().find(|wire| wire.sender_has_it) {
            let fence = Header { order: index as u64, offset: u64::from(epoch), ..Header::of(Type::Fence, 0) };
            other.control.push_back(fence);
            other.is_awake = true;
        }
    }

    /// The receiver sees the end of a stream, and reports it to the sender over any other.
    fn receiver_notices(&mut self, index: usize) {
        self.end_epoch(index, self.receiver.epoch(index));
    }

    /// The receiver ends an epoch of a stream, and reports it.
    fn end_epoch(&mut self, index: usize, epoch: u16) {
        if let Some(frames) = self.fence(index, epoch) {
            self.outbox.push(fenced((index, epoch, frames)));
        }
    }

    /// The sender connects a stream again. Its hello arrives; the welcome may not.
    fn join(&mut self, index: usize) -> Result<()> {
        self.wires[index].tried += 1;
        let epoch = self.wires[index].tried;
        if self.outage.contains(&self.now) {
            // Its hello does not arrive, and the try ends.
            return Ok(());
        }
        if (epoch.wrapping_sub(self.receiver.epoch(index)) as i16) <= 0 {
            return Ok(());
        }
        let Some(frames) = self.fence(index, epoch.wrapping_sub(1)) else { return Ok(()) };
        self.receiver.stream_up(index, epoch);
        self.outbox.extend(self.receiver.announcements());
        let arrives = self.dice.roll(4) > 0;
        self.wires[index] =
            Wire { tried: epoch, receiver_has_it: true, sender_has_it: arrives, cut: !arrives, ..Wire::default() };
        self.wires[index].line = self.line(index, epoch);
        if arrives {
            let ended = self.receiver.ended_epochs().into_iter().map(fenced);
            self.wires[index].back.extend(ended.map(ControlFrame::from));
            let mut done = Vec::new();
            self.sender.fenced(index, self.sender.epoch(index), frames, &mut done)?;
            self.sender.stream_up(index, epoch);
            self.kick_all();
            self.end_sends(done);
        }
        Ok(())
    }

    fn fence(&mut self, index: usize, epoch: u16) -> Option<u64> {
        let frames = self.receiver.fence(index, epoch)?;
        let Some(wire) = self.wires.get_mut(index) else { return Some(frames) };
        wire.receiver_has_it = false;
        wire.forth.clear();
        wire.begun = None;
        Some(frames)
    }

    fn deliver(&mut self, index: usize) -> Result<()> {
        if !self.wires[index].receiver_has_it {
            return Ok(());
        }
        let Some(frame) = self.wires[index].forth.front() else { return Ok(()) };
        let (header, whole, repeated) = (frame.header, frame.whole, frame.repeated);
        if !self.is_undamaged(index) {
            return Ok(());
        }
        match (header.kind, self.wires[index].begun) {
            (Type::Data, None) => {
                let place = self.receiver.begin(index, &header)?;
                match place {
                    Place::Posted(part, offset) => {
                        self.ledger.check_place(part, offset, u64::from(header.length));
                    }
                    Place::Staged(stage) => {
                        self.stages.insert(stage, (header.tag, u64::from(header.length)));
                    }
                }
                self.wires[index].begun = Some(place);
                return Ok(());
            }
            (Type::Data, Some(place)) if whole => self.end_frame(index, &header, place),
            (Type::Data, Some(_)) => return Ok(()),
            (Type::Query, _) => {
                let answer = self.receiver.query(header.tag, header.order, header.total)?;
                self.outbox.extend(answer);
            }
            (Type::Fence, _) => {
                self.wires[index].forth.pop_front();
                self.end_epoch(header.order as usize, header.offset as u16);
                return Ok(());
            }
            // Every other frame ends the connection.
            _ => return Err(Error::internal(format!("{:?}", header.kind))),
        }
        self.repeats_taken += u64::from(repeated);
        self.wires[index].forth.pop_front();
        Ok(())
    }

    /// The next part of the frame at the front comes through the stream's protection. When it is damaged the receiver
    /// ends the stream.
    fn is_undamaged(&mut self, index: usize) -> bool {
        let wire = &mut self.wires[index];
        let (Some(line), Some(frame)) = (&mut wire.line, wire.forth.front()) else { return true };
        let part = match (frame.header.kind, wire.begun) {
            (Type::Data, None) => Arrival::Head,
            (Type::Data, Some(_)) if frame.whole => Arrival::Rest,
            (Type::Data, Some(_)) => return true,
            _ => Arrival::All,
        };
        if line.arrives(&mut self.dice, &frame.header, &frame.bytes, part) {
            return true;
        }
        wire.cut = true;
        wire.back.clear();
        self.receiver_notices(index);
        false
    }

    fn end_frame(&mut self, index: usize, header: &Header, place: Place) {
        self.wires[index].begun = None;
        if let Place::Posted(part, offset) = place {
            self.ledger.placed(part, offset, u64::from(header.length));
        }
        match self.receiver.end(index) {
            End::More | End::Staged => {}
            End::Complete(part, total) => {
                let others = self.wires.iter().filter_map(|wire| wire.begun);
                for other in others {
                    assert!(!matches!(other, Place::Posted(of, _) if of == part), "done while bytes still come");
                }
                self.ledger.receive_ended(part, total);
            }
            End::Unstage(stage, part, total) => self.unstage(stage, part, total),
        }
    }

    /// The receiver writes on a stream: the frames that any stream may carry, and those that it owes on this one.
    fn answer(&mut self, index: usize) {
        // As when the connection closes, or when it has been quiet for a while.
        let force = self.ledger.is_received() || self.ledger.is_of_memory() && self.dice.roll(8) == 0;
        let wire = &mut self.wires[index];
        if !wire.receiver_has_it {
            return;
        }
        let mut frames: Vec<ControlFrame> = self.outbox.drain(..).map(ControlFrame::from).collect();
        frames.extend(
            self.receiver
                .take_ack(index, force)
                .map(|ack| ControlFrame { header: ack.header, counts: ack.counts().to_vec() }),
        );
        if !wire.cut {
            wire.back.extend(frames);
        }
    }

    fn deliver_answer(&mut self, index: usize) -> Result<()> {
        if !self.wires[index].sender_has_it {
            return Ok(());
        }
        let Some(ControlFrame { header, counts }) = self.wires[index].back.pop_front() else { return Ok(()) };
        self.wires[index].is_awake = true;
        let mut done = Vec::new();
        match header.kind {
            Type::Ack | Type::Acks => {
                // Some streams seem slow and others fast. A slow stream leaves ready messages to the others, which must
                // then send them.
                let elapsed = Duration::from_millis(self.dice.roll(3).pow(5) * (index as u64 + 1));
                self.sender.arrives(index, header.offset, |_| elapsed);
                self.sender.acknowledge_all(&counts, &mut done)?;
                self.sender.acknowledge(index, header.offset, header.total, &mut done)?;
                self.kick_roomy();
            }
            Type::Clear => {
                let ready = self.sender.clear_to_send(header.tag, header.order, header.total)?;
                if let Some(key) = ready.filter(|_| header.total > EAGER_MAX) {
                    self.wake_streams(self.sender.length(key));
                }
            }
            Type::Fenced => {
                let (stream, epoch) = (header.order as usize, header.offset as u16);
                // The stream may have ended on the receiver's side only.
                if self.wires.get(stream).is_some_and(|wire| wire.sender_has_it) && self.sender.epoch(stream) == epoch {
                    self.notice(stream);
                }
                self.sender.fenced(stream, epoch, header.total, &mut done)?;
                self.kick_all();
            }
            _ => return Err(Error::internal(format!("{:?}", header.kind))),
        }
        self.end_sends(done);
        Ok(())
    }

    /// As `SendConn::kick_roomy`.
    fn kick_roomy(&mut self) {
        let roomy = self.sender.take_roomy();
        for (index, wire) in self.wires.iter_mut().enumerate() {
            wire.is_awake |= roomy >> index & 1 == 1;
        }
    }

    fn kick_all(&mut self) {
        self.wires.iter_mut().for_each(|wire| wire.is_awake = true);
    }

    fn end_sends(&mut self, done: Vec<Key>) {
        for key in done {
            let writing = self.wires.iter().any(|wire| wire.writing == Some(key));
            assert!(!writing, "a send ended while its bytes were still being read");
            self.ledger.send_ended(key);
        }
    }

    /// A data frame comes again, whole, in the stream's present epoch.
    fn repeat(&mut self, index: usize) {
        let wire = &mut self.wires[index];
        if self.seen.is_empty() || !wire.receiver_has_it || wire.cut || wire.forth.iter().any(|frame| !frame.whole) {
            return;
        }
        let seen = self.seen[self.dice.roll(self.seen.len() as u64) as usize];
        let header = Header { epoch: self.receiver.epoch(index), ..seen };
        wire.forth.push_back(Frame { header, whole: true, repeated: true, bytes: Vec::new() });
    }

    /// Early messages, one after the other, whatever the credit.
    fn flood(&mut self, index: usize) {
        let (first, total) = (self.dice.roll(8), self.dice.roll(65_537));
        let tag = self.dice.roll(TAGS) as i32;
        let wire = &mut self.wires[index];
        if wire.cut || !wire.receiver_has_it || wire.forth.iter().any(|frame| !frame.whole) {
            return;
        }
        let base = Header { flags: EAGER, tag, length: total as u32, total, ..Header::of(Type::Data, wire.tried) };
        for order in first..first + 30 {
            let header = Header { order, message: order, ..base };
            wire.forth.push_back(Frame { header, whole: true, repeated: true, bytes: Vec::new() });
        }
    }

    /// A frame that no correct peer sends, to either side.
    fn invent(&mut self, index: usize) {
        if self.dice.roll(16) == 0 {
            return self.flood(index);
        }
        let to_sender = self.dice.roll(2) == 0;
        let wire = &self.wires[index];
        let epoch = wire.tried;
        let base = if to_sender {
            wire.back.front().map(|frame| frame.header)
        } else {
            wire.forth.front().map(|frame| frame.header)
        };
        let mut header = match base.or_else(|| self.seen.last().copied()) {
            Some(header) if self.dice.roll(4) > 0 => header,
            _ => Header::of(self.any_kind(), epoch),
        };
        for _ in 0..=self.dice.roll(2) {
            self.change(&mut header);
        }
        // Only frames that a decoder accepts.
        let Ok(header) = Header::decode(&header.encode()) else { return };
        let wire = &mut self.wires[index];
        if to_sender {
            // Of all frames to a sender only these have a payload that counts; a decoder has bounded it.
            let counts = if header.kind == Type::Acks { header.length / 8 } else { 0 };
            let counts = (0..counts).map(|_| self.dice.roll(8)).collect();
            wire.back.push_front(ControlFrame { header, counts });
        } else if wire.begun.is_none() && header.kind != Type::Fail {
            wire.forth.push_front(Frame { header, whole: true, repeated: true, bytes: Vec::new() });
        }
    }

    fn any_kind(&mut self) -> Type {
        use Type::{Ack, Acks, Clear, Data, Fence, Fenced, Query};
        [Data, Ack, Clear, Fence, Fenced, Query, Acks][self.dice.roll(7) as usize]
    }

    fn change(&mut self, header: &mut Header) {
        let near = |dice: &mut Dice, value: u64| match dice.roll(4) {
            0 => dice.roll(8),
            1 => value.wrapping_add(dice.roll(3)).wrapping_sub(1),
            2 => u64::MAX - dice.roll(8),
            _ => value ^ (1 << dice.roll(64)),
        };
        let dice = &mut self.dice;
        match dice.roll(9) {
            0 => header.message = near(dice, header.message),
            1 => header.order = near(dice, header.order),
            2 => header.offset = near(dice, header.offset) & !127,
            3 => header.total = near(dice, header.total),
            4 => header.length = near(dice, u64::from(header.length)) as u32,
            5 => header.tag = near(dice, header.tag as u64) as i32,
            6 => header.flags ^= 1 << dice.roll(3),
            7 => header.epoch = near(dice, u64::from(header.epoch)) as u16,
            _ => header.kind = self.any_kind(),
        }
    }

    pub(super) fn check_settled(&mut self) -> Result<()> {
        assert!(self.sender.is_idle(), "all is acknowledged");
        let sound = |wire: &Wire| wire.sender_has_it && wire.receiver_has_it && !wire.cut;
        // Frames on a stream that is cut are reported again only when that stream is fenced.
        if self.wires.iter().all(sound) {
            for index in 0..self.wires.len() {
                self.answer(index);
                while !self.wires[index].back.is_empty() {
                    self.deliver_answer(index)?;
                }
            }
            assert_eq!(self.sender.credit_out(), 0, "all credit has come back");
        }
        self.ledger.check_sizes();
        self.check_bounded();
        Ok(())
    }

    pub(super) fn check_bounded(&self) {
        use crate::tcp::limits::{EAGER_WINDOW, EAGER_WINDOW_FAR, EAGER_WINDOW_FULL, max_early};
        let window = if self.has_room { EAGER_WINDOW_FAR } else { EAGER_WINDOW };
        assert!(self.receiver.staged_bytes() <= window);
        assert!(self.far || self.sender.credit_out() <= EAGER_WINDOW_FULL);
        assert!(self.receiver.early() <= max_early(window));
    }

    pub(super) fn describe(&self) -> String {
        format!("sender: {}; receiver: {}", self.sender.describe(), self.receiver.describe())
    }
}
