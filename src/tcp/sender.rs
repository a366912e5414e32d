//! The sending side of a connection: core, streams, requests.
//!
//! `isend` posts a message to the [`SendCore`] and, when it is short, sends it in the same call. Long messages are
//! cut into chunks by the workers that own the further streams. Acknowledgements and clear-to-sends come back on
//! the reverse half of the streams.
//!
//! Locks, in order: a stream (try-lock), then the state. The state's lock is held for bookkeeping only, never
//! across a system call.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::attend::Attention;
use super::frame::{HEADER, Header, Type};
use super::handshake::FEATURE_RECOVERY;
use super::limits::{EAGER_MAX, MAX_STREAMS, REPLAY_MAX};
use super::net::{Link, Net, Sock};
use super::peer::{Broken, Health, Peer, failure, left_early, lost, told_by_peer};
use super::send_core::{Admit, Chunk, Key, SendCore};
use super::stream::{READ, Ran, Step, Stream, WRITE};
use super::wire::{self, Piece};
use crate::engine::counters::Counters;
use crate::engine::poller::{Interest, Progress, Source};
use crate::engine::request::{Outcome, RequestSlots, Ticket};
use crate::os::error::{Error, Result};

/// Bytes that one run of a stream may send before the other streams of the same worker get their turn.
const SHARE: usize = 4 << 20;

/// How long an orderly close waits for the peer's kernel to take what was sent.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// How long a message may wait before the receiver is asked about it, and the longest pause between two questions. In
/// ordinary work a receive follows within microseconds; a rank that is late by seconds is asked a handful of times.
const ASK_AFTER: Duration = Duration::from_millis(20);
const ASK_SELDOM: Duration = Duration::from_secs(10);

/// Where a message's bytes are.
struct Payload {
    data: *const u8,
    /// A copy, with room for the header before it: the request was reported done and the buffer went back to NCCL,
    /// so this is what is sent, again if need be.
    replay: Option<Box<[u8]>>,
    length: u64,
    /// Bytes that the kernel took for the first time.
    written: u64,
    /// The request to end; none once it has ended.
    ticket: Option<Ticket>,
}

// SAFETY: `data` points into memory that belongs to the transport until the request ends (rule 3 of the design);
// the payload is only reached under the state's lock or while a chunk of it is unacknowledged.
unsafe impl Send for Payload {}

struct State {
    core: SendCore,
    payloads: Vec<Option<Payload>>,
    done: Vec<Key>,
    /// When to ask the receiver about stalled messages, and how long after the last time that is.
    ask: Option<(Instant, Duration)>,
}

/// What a stream is sending.
enum Outgoing {
    /// Control frames.
    Control(Vec<u8>),
    /// A header, and a chunk from where NCCL has it.
    Framed([u8; HEADER], Piece, Chunk),
    /// A whole short message with its header, from the copy.
    Whole(Piece, Chunk),
}

// SAFETY: as for `Payload`: the pieces belong to a message that is not acknowledged.
unsafe impl Send for Outgoing {}

impl Outgoing {
    fn length(&self) -> usize {
        match self {
            Self::Control(bytes) => bytes.len(),
            Self::Framed(header, body, _) => header.len() + body.length,
            Self::Whole(bytes, _) => bytes.length,
        }
    }

    /// What is left to send when `sent` bytes are gone.
    fn rest(&self, sent: usize) -> [Piece; 2] {
        match self {
            Self::Control(bytes) => [Piece::of(&bytes[sent..]), Piece::of(&[])],
            Self::Framed(header, body, _) => {
                [Piece::of(&header[sent.min(HEADER)..]), body.skip(sent.saturating_sub(HEADER))]
            }
            Self::Whole(bytes, _) => [bytes.skip(sent), Piece::of(&[])],
        }
    }
}

struct Io {
    sock: Sock,
    out: Option<Outgoing>,
    sent: usize,
    control: Vec<u8>,
    input: Vec<u8>,
    filled: usize,
}

/// A connection that sends.
pub struct SendConn {
    me: Weak<Self>,
    net: Arc<Net>,
    link: Link,
    peer: Peer,
    state: Mutex<State>,
    streams: Vec<Stream<Io>>,
    requests: RequestSlots,
    health: Health,
    attention: Attention,
    counters: Counters,
    recovery: bool,
    grown: AtomicBool,
    /// Streams beyond the first that count against the process's budget until this connection is gone.
    extra: AtomicUsize,
    /// Whether a message may be waiting for its receive or for credit.
    stalled: AtomicBool,
    closing: AtomicBool,
}

impl SendConn {
    /// A connection whose first stream has finished its handshake.
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    pub fn new(net: Arc<Net>, link: Link, peer: Peer, first: Sock) -> Result<Arc<Self>> {
        let recovery = link.features & FEATURE_RECOVERY != 0;
        let conn = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            net,
            link,
            peer,
            state: Mutex::new(State {
                core: SendCore::new(recovery),
                payloads: Vec::new(),
                done: Vec::new(),
                ask: None,
            }),
            streams: (0..MAX_STREAMS).map(|_| Stream::default()).collect(),
            requests: RequestSlots::new(),
            health: Health::default(),
            attention: Attention::default(),
            counters: Counters::default(),
            recovery,
            grown: AtomicBool::new(false),
            extra: AtomicUsize::new(0),
            stalled: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        });
        conn.add_stream(0, 0, first)?;
        Ok(conn)
    }

    /// Puts a connected socket to work as stream `index`.
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    pub fn add_stream(&self, index: usize, epoch: u16, sock: Sock) -> Result<()> {
        let fd = sock.as_raw_fd();
        let io = Io { sock, out: None, sent: 0, control: Vec::new(), input: vec![0; 32 * HEADER], filled: 0 };
        self.health.stream_up();
        self.state().core.stream_up(index, epoch);
        self.streams[index].install(Box::new(io));
        let source = Arc::new(StreamSource { conn: self.me.clone(), index });
        // The first stream is NCCL's thread's; the keeper only watches for its end and finishes what blocked.
        let registration = if index == 0 {
            self.net.poller.keeper()?.register(source, Some((fd, Interest::Quiet)))?
        } else {
            self.net.poller.worker()?.register(source, Some((fd, Interest::Data)))?
        };
        self.streams[index].watch(registration);
        self.streams[index].kick();
        Ok(())
    }

    /// Starts a send. `None`: not now, all request slots are taken.
    ///
    /// # Errors
    /// When the connection has failed, or the message is longer than its receive.
    ///
    /// # Safety
    /// `data` must be readable for `length` bytes until the request ends or the connection is closed.
    pub unsafe fn isend(&self, data: *const u8, length: usize, tag: i32) -> Result<Option<Ticket>> {
        self.health.check()?;
        // A receiver that has said goodbye takes nothing any more; a short send would be done all the same.
        if self.health.is_peer_done() {
            self.health.fail(left_early(&self.peer));
            self.health.check()?;
        }
        let Some(ticket) = self.requests.take(1) else { return Ok(None) };
        let posted = {
            let mut state = self.state();
            state.core.post(length as u64, tag).map(|(key, admit)| {
                if state.payloads.len() <= key {
                    state.payloads.resize_with(key + 1, || None);
                }
                // A short message is copied, so that it can be sent again although its buffer went back to NCCL.
                let replay = (self.recovery && length as u64 <= REPLAY_MAX).then(|| {
                    // SAFETY: the caller vouches for the buffer.
                    unsafe { copy_behind_header(data, length) }
                });
                // What must wait for credit is not done: else nothing would bound the copies.
                let waits = (replay.is_none() || admit != Admit::Ready).then_some(ticket);
                state.payloads[key] = Some(Payload { data, replay, length: length as u64, written: 0, ticket: waits });
                if waits.is_none() {
                    Counters::bump(&self.counters.messages);
                    self.requests.complete_part(ticket.slot, 0, length as u64);
                }
                admit
            })
        };
        match posted {
            Err(error) => {
                self.requests.cancel(ticket);
                self.fail(error.with_peer(&self.peer));
                return self.health.check().map(|()| None);
            }
            Ok(Admit::Ready) if length as u64 <= EAGER_MAX => {
                self.run(0, WRITE);
            }
            Ok(Admit::Ready) => self.wake_streams(length as u64),
            Ok(Admit::AwaitsReceiver) => {
                Counters::bump(&self.counters.stalls_receiver);
                self.run(0, READ);
                self.stalled.store(true, Ordering::Relaxed);
            }
            Ok(Admit::AwaitsCredit) => {
                Counters::bump(&self.counters.stalls_credit);
                self.run(0, READ);
                self.stalled.store(true, Ordering::Relaxed);
            }
        }
        if self.attention.wanted() {
            self.streams[0].kick();
        }
        Ok(Some(ticket))
    }

    /// Asks after a send: its size when it is done.
    ///
    /// # Errors
    /// When the connection has failed; nothing touches the buffer any more then.
    pub fn test(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        self.requests.check(ticket)?;
        if let Some(outcome) = self.requests.finish(ticket) {
            return Ok(Some(outcome));
        }
        self.glance(0);
        if let Some(outcome) = self.requests.finish(ticket) {
            return Ok(Some(outcome));
        }
        self.verdict().inspect_err(|_| {
            self.quiesce();
            self.requests.abandon(ticket);
        })?;
        if self.stalled.load(Ordering::Relaxed) {
            self.ask_receiver();
        }
        Ok(None)
    }

    /// Asks the receiver about messages that have waited a while. Receives of short messages are not announced, so
    /// a message that is too long for one, or that other tags' early messages have left without credit, would else
    /// wait for ever.
    fn ask_receiver(&self) {
        let headers = {
            let mut state = self.state();
            if !state.core.is_stalled() {
                state.ask = None;
                self.stalled.store(false, Ordering::Relaxed);
                return;
            }
            let now = Instant::now();
            let (at, pause) = *state.ask.get_or_insert((now + ASK_AFTER, ASK_AFTER));
            if now < at {
                return;
            }
            // Asked again, ever more seldom, since a break may have lost the question or the answer.
            let pause = (pause * 2).min(ASK_SELDOM);
            state.ask = Some((now + pause, pause));
            state.core.stalled()
        };
        for header in headers {
            self.queue_control(0, header, &[]);
        }
        self.run(0, WRITE);
    }

    /// Whether a request that is not done can still become so.
    fn verdict(&self) -> Result<()> {
        self.health.check()?;
        if self.health.is_over() {
            self.health.fail(left_early(&self.peer));
            return self.health.check();
        }
        Ok(())
    }

    /// One more stream of the process's budget belongs to this connection.
    pub fn took_extra_stream(&self) {
        self.extra.fetch_add(1, Ordering::Relaxed);
    }

    /// What the connection counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// How a further stream is connected.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Ends the connection. With nothing outstanding, everything that was reported done reaches the peer; with
    /// requests in flight it is an abort. No thread touches NCCL's buffers after it returns.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        if self.requests.outstanding() == 0 && !self.health.is_failed() {
            self.say_goodbye();
        } else {
            let error = Error::remote("the sending side closed the connection with transfers in flight");
            self.tell_failure(&error);
            self.health.fail(error);
        }
        self.quiesce();
        tracing::debug!(target: crate::os::log::NET, "closed the connection to {}: {}", self.peer, self.counters);
    }

    /// Waits, within bounds, until the peer's kernel has everything, then leaves the sockets to the keeper, which
    /// closes them when the peer has too: closing a socket with unread bytes would make the kernel send a reset
    /// that can overtake the data.
    fn say_goodbye(&self) {
        let deadline = Instant::now() + CLOSE_PATIENCE;
        while Instant::now() < deadline && !self.health.is_failed() {
            self.run(0, READ | WRITE);
            if !self.state().core.has_ready() && self.streams.iter().all(Self::is_written) {
                break;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        // Each stream says goodbye for itself: the receiver reads them in any order.
        for index in 0..MAX_STREAMS {
            self.queue_control(index, Header::of(Type::Bye, 0), &[]);
        }
        let gone = |io: &Io| {
            let written = io.out.is_none() && io.control.is_empty();
            if written {
                // Wakes the receiver's keeper, which sees to it that the acknowledgement is not delayed.
                let _ = io.sock.shutdown(Shutdown::Write);
            }
            written && wire::unsent(io.sock.as_raw_fd()) == 0
        };
        while Instant::now() < deadline && !self.health.is_failed() {
            for index in 0..MAX_STREAMS {
                self.run(index, READ | WRITE);
            }
            if self.streams.iter().all(|stream| stream.lock().as_ref().is_none_or(|io| gone(io))) {
                break;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        for stream in &self.streams {
            if let Some(io) = stream.take() {
                self.health.stream_down();
                self.net.linger(io.sock);
            }
        }
    }

    fn is_written(stream: &Stream<Io>) -> bool {
        stream.lock().as_ref().is_none_or(|io| io.out.is_none())
    }

    /// Ends the connection with a cause; the peer is told if it can be.
    pub fn fail(&self, error: Error) {
        self.tell_failure(&error);
        self.fail_silently(error);
    }

    fn fail_silently(&self, error: Error) {
        if self.health.fail(error.clone()) && !self.closing.load(Ordering::Acquire) && error.tell_once() {
            tracing::warn!(target: crate::os::log::NET, "sending to {} failed: {error}", self.peer);
        }
        self.state().core.stream_down(0);
    }

    fn tell_failure(&self, error: &Error) {
        if self.health.is_failed() {
            return;
        }
        if let Some(io) = self.streams[0].lock().as_mut() {
            io.control.extend_from_slice(&failure(error));
        }
        self.run(0, WRITE);
    }

    /// Takes all sockets away, waiting for the threads that use them. After this no thread touches a buffer.
    fn quiesce(&self) {
        for stream in &self.streams {
            if let Some(io) = stream.take() {
                self.health.stream_down();
                // Not closed here: unread bytes would make the kernel send a reset, which can overtake the word that
                // tells the peer what is wrong.
                self.net.linger(io.sock);
            }
        }
    }

    fn queue_control(&self, index: usize, header: Header, payload: &[u8]) {
        if let Some(io) = self.streams[index].lock().as_mut() {
            let header = Header { length: payload.len() as u32, ..header };
            io.control.extend_from_slice(&header.encode());
            io.control.extend_from_slice(payload);
        }
    }

    /// Gets as many streams going as a long message can use, and asks for more streams when it is the first.
    fn wake_streams(&self, length: u64) {
        if !self.grown.swap(true, Ordering::Relaxed)
            && let Some(me) = self.me.upgrade()
        {
            self.net.grow(me);
        }
        let (streams, count) = self.state().core.idlest(length);
        for &index in &streams[..count] {
            self.streams[usize::from(index)].kick();
        }
        if count == 0 {
            self.run(0, WRITE);
        }
    }

    /// Runs a stream in the calling thread, or has its present holder do so.
    fn run(&self, index: usize, wish: u8) -> bool {
        let mut wake = 0;
        let step = |io: &mut Io, wishes| self.step(index, io, wishes, &mut wake);
        let ran = self.streams[index].run(wish, step, |io, why| self.broken(index, io, why));
        self.ran(index, ran, wake)
    }

    /// Looks whether a stream can move anything, unless another thread is looking.
    fn glance(&self, index: usize) {
        let mut wake = 0;
        let step = |io: &mut Io, wishes| self.step(index, io, wishes, &mut wake);
        let ran = self.streams[index].glance(READ | WRITE, step, |io, why| self.broken(index, io, why));
        self.ran(index, ran, wake);
    }

    fn ran(&self, index: usize, ran: Ran, wake: u64) -> bool {
        if wake > 0 {
            self.wake_streams(wake);
        }
        match ran {
            Ran::Settled(moved) => moved,
            Ran::More => {
                self.streams[index].kick();
                true
            }
        }
    }

    fn step(&self, index: usize, io: &mut Io, wishes: u8, wake: &mut u64) -> Step<Broken> {
        let mut moved = false;
        let mut share = SHARE;
        let mut wishes = wishes;
        loop {
            if wishes & WRITE != 0 {
                match self.write(index, io, &mut share) {
                    Ok(more) => moved |= more,
                    Err(why) => return Step::Broken(why),
                }
            }
            if wishes & READ == 0 {
                return if share == 0 { Step::More } else { Step::Settled(moved) };
            }
            let read = match self.read(index, io, wake) {
                Ok(read) => read,
                Err(why) => return Step::Broken(why),
            };
            moved |= read;
            if share == 0 {
                return Step::More;
            }
            if !read {
                return Step::Settled(moved);
            }
            // Something came back: credit or a clear-to-send may have made more ready.
            wishes = READ | WRITE;
        }
    }

    fn write(&self, index: usize, io: &mut Io, share: &mut usize) -> std::result::Result<bool, Broken> {
        let mut moved = false;
        loop {
            if io.out.is_none() {
                if *share == 0 {
                    return Ok(moved);
                }
                io.out = self.next_outgoing(index, io);
            }
            let Some(out) = &io.out else { return Ok(moved) };
            // SAFETY: headers and copies are ours; a chunk belongs to a message that is not acknowledged, so its
            // memory is the transport's.
            match unsafe { wire::send(io.sock.as_raw_fd(), out.rest(io.sent)) } {
                Err(error) => return Err(Broken::Lost(error)),
                Ok(None) => {
                    Counters::bump(&self.counters.stalls_socket);
                    return Ok(moved);
                }
                Ok(Some(bytes)) => {
                    moved = true;
                    *share = share.saturating_sub(bytes.max(1));
                    io.sent += bytes;
                    if io.sent < out.length() {
                        continue;
                    }
                    io.sent = 0;
                    if let Some(Outgoing::Framed(_, _, chunk) | Outgoing::Whole(_, chunk)) = io.out.take() {
                        self.chunk_written(index, &chunk);
                    }
                }
            }
        }
    }

    fn next_outgoing(&self, index: usize, io: &mut Io) -> Option<Outgoing> {
        if !io.control.is_empty() {
            return Some(Outgoing::Control(std::mem::take(&mut io.control)));
        }
        let mut state = self.state();
        let chunk = state.core.next_chunk(index)?;
        let payload = state.payloads[chunk.key].as_mut().expect("a message in flight has its payload");
        let header = chunk.header.encode();
        if let Some(copy) = &mut payload.replay {
            // An earlier life of the message is over when it is sent again, so nobody reads the old header now.
            copy[..HEADER].copy_from_slice(&header);
            return Some(Outgoing::Whole(Piece::of_mut(copy), chunk));
        }
        // SAFETY: the core hands out ranges within the message.
        let data = unsafe { payload.data.add(chunk.offset as usize) }.cast_mut();
        Some(Outgoing::Framed(header, Piece { data, length: chunk.length as usize }, chunk))
    }

    /// The kernel took the whole chunk. That ends the request of a message that was copied, or needs no copy.
    fn chunk_written(&self, index: usize, chunk: &Chunk) {
        Counters::bump(if chunk.again { &self.counters.resends } else { &self.counters.chunks });
        let mut state = self.state();
        state.core.written(index);
        if chunk.again {
            return;
        }
        Counters::add(&self.counters.bytes, u64::from(chunk.length));
        let payload = state.payloads[chunk.key].as_mut().expect("a message in flight has its payload");
        payload.written += u64::from(chunk.length);
        if payload.written == payload.length
            && (payload.replay.is_some() || !self.recovery)
            && let Some(ticket) = payload.ticket.take()
        {
            Counters::bump(&self.counters.messages);
            self.requests.complete_part(ticket.slot, 0, payload.length);
        }
    }

    fn read(&self, index: usize, io: &mut Io, wake: &mut u64) -> std::result::Result<bool, Broken> {
        let mut moved = false;
        loop {
            let room = &mut io.input[io.filled..];
            let wanted = room.len();
            // SAFETY: the input buffer is this stream's own.
            let got = unsafe { wire::receive(io.sock.as_raw_fd(), [Piece::of_mut(&mut []), Piece::of_mut(room)]) };
            match got {
                Ok(None) => return Ok(moved),
                Ok(Some(0)) if self.health.is_peer_done() => return Err(Broken::Goodbye),
                Ok(Some(0)) => return Err(Broken::Lost(io::ErrorKind::UnexpectedEof.into())),
                Err(_) if self.health.is_peer_done() => return Err(Broken::Goodbye),
                Err(error) => return Err(Broken::Lost(error)),
                Ok(Some(bytes)) => {
                    moved = true;
                    io.filled += bytes;
                    self.take_frames(index, io, wake).map_err(Broken::Fatal)?;
                    if bytes < wanted {
                        return Ok(moved);
                    }
                }
            }
        }
    }

    fn take_frames(&self, index: usize, io: &mut Io, wake: &mut u64) -> Result<()> {
        let mut at = 0;
        while io.filled - at >= HEADER {
            let bytes: &[u8; HEADER] = io.input[at..at + HEADER].try_into().expect("a header's worth");
            let header = Header::decode(bytes)?;
            let end = at + HEADER + header.length as usize;
            if end > io.filled {
                break;
            }
            let payload = &io.input[at + HEADER..end];
            match header.kind {
                Type::Ack => self.acknowledged(index, &header)?,
                Type::Clear => {
                    let ready = self.state().core.clear_to_send(header.tag, header.order, header.total)?;
                    if ready && header.total > EAGER_MAX {
                        *wake += header.total;
                    }
                }
                Type::Fenced => self.fenced(header.order as usize, header.total)?,
                Type::Bye => self.health.peer_is_done(),
                Type::Fail => return Err(told_by_peer(header.order, payload)),
                Type::Data | Type::Fence | Type::Ask => {
                    return Err(Error::remote(format!("the receiving side sent a {:?} frame", header.kind)));
                }
            }
            at = end;
        }
        io.input.copy_within(at..io.filled, 0);
        io.filled -= at;
        Ok(())
    }

    fn acknowledged(&self, index: usize, header: &Header) -> Result<()> {
        let mut state = self.state();
        let State { core, payloads, done, .. } = &mut *state;
        if header.epoch != core.epoch(index) {
            return Err(Error::remote("an acknowledgement came for a former life of its stream"));
        }
        core.acknowledge(index, header.offset, header.total, done)?;
        self.end_messages(payloads, done);
        Ok(())
    }

    fn end_messages(&self, payloads: &mut [Option<Payload>], done: &mut Vec<Key>) {
        for key in done.drain(..) {
            let payload = payloads[key].take().expect("a message in flight has its payload");
            if let Some(ticket) = payload.ticket {
                Counters::bump(&self.counters.messages);
                self.requests.complete_part(ticket.slot, 0, payload.length);
            }
        }
    }

    /// Tells the peer of a failure on the stream that met it, which may be the only one.
    fn part_in_anger(&self, mut io: Io, error: &Error) {
        if io.out.is_none() && !self.health.is_failed() {
            io.control.extend_from_slice(&failure(error));
            // SAFETY: both pieces are this stream's own buffers. What the socket does not take is lost, and the peer
            // learns of the end without the reason.
            let _ = unsafe { wire::send(io.sock.as_raw_fd(), [Piece::of(&io.control), Piece::of(&[])]) };
        }
        self.net.linger(io.sock);
    }

    /// A stream ended. Decides whether that ends the connection.
    fn broken(&self, index: usize, io: Box<Io>, why: Broken) {
        match &why {
            Broken::Fatal(error) => self.part_in_anger(*io, error),
            _ => drop(io),
        }
        self.health.stream_down();
        let (epoch, was_live) = {
            let mut state = self.state();
            (state.core.epoch(index), state.core.stream_down(index))
        };
        match why {
            Broken::Fatal(error) => self.fail(error.with_peer(&self.peer)),
            Broken::Goodbye => {}
            Broken::Lost(_) if self.closing.load(Ordering::Acquire) || !was_live => {}
            Broken::Lost(error) if self.recovery => self.repair(index, epoch, &error),
            Broken::Lost(error) => self.fail_silently(lost(&error).with_peer(&self.peer)),
        }
    }

    /// A stream died under a connection that can go on: asks the receiver, over another stream, how far the dead
    /// one came, and has it connected anew.
    fn repair(&self, index: usize, epoch: u16, error: &io::Error) {
        tracing::info!(target: crate::os::log::NET, "stream {index} to {} broke ({error}); connecting it again", self.peer);
        let other = {
            let state = self.state();
            (0..MAX_STREAMS).find(|other| state.core.is_live(*other))
        };
        if let Some(other) = other {
            let fence = Header { order: index as u64, offset: u64::from(epoch), ..Header::of(Type::Fence, 0) };
            self.queue_control(other, fence, &[]);
            self.streams[other].kick();
        }
        if let Some(me) = self.me.upgrade() {
            self.net.repair(me, index, epoch.wrapping_add(1));
        }
    }

    /// The receiver says how many frames of a dead stream's life it took in. The rest travels again, over whatever
    /// stream has room.
    ///
    /// # Errors
    /// When it names frames that were never sent.
    fn fenced(&self, index: usize, frames: u64) -> Result<()> {
        {
            let mut state = self.state();
            let State { core, payloads, done, .. } = &mut *state;
            // A stream that is connected again has been fenced by its own handshake.
            if !core.is_down(index) {
                return Ok(());
            }
            core.fenced(index, frames, done)?;
            self.end_messages(payloads, done);
        }
        for stream in &self.streams {
            stream.kick();
        }
        Ok(())
    }

    /// A stream that died is connected again: what its last life lost travels again.
    ///
    /// # Errors
    /// When the peer's count is impossible, or the socket cannot be watched.
    pub fn rejoined(&self, index: usize, epoch: u16, frames: u64, sock: Sock) -> Result<()> {
        self.fenced(index, frames)?;
        if epoch > 1 || index == 0 {
            Counters::bump(&self.counters.reconnects);
            tracing::info!(target: crate::os::log::NET, "stream {index} to {} is back", self.peer);
        }
        self.add_stream(index, epoch, sock)
    }

    /// A stream could not be connected again in time. That ends the connection when it was the last.
    pub fn gave_up(&self, index: usize, error: &Error) {
        if self.closing.load(Ordering::Acquire) || self.health.is_failed() {
            return;
        }
        if self.state().core.live_streams() == 0 {
            self.fail_silently(error.clone().with_peer(&self.peer));
        } else {
            tracing::warn!(target: crate::os::log::NET, "stream {index} to {} stays down ({error}); going on with the others", self.peer);
        }
    }

    /// Whether nobody waits for this connection to be mended.
    pub fn is_over(&self) -> bool {
        self.closing.load(Ordering::Acquire) || self.health.is_failed()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SendConn {
    fn drop(&mut self) {
        self.net.streams_ended(*self.extra.get_mut());
    }
}

/// Room for a header, then the bytes.
///
/// # Safety
/// `data` must be readable for `length` bytes; it may be null for none.
unsafe fn copy_behind_header(data: *const u8, length: usize) -> Box<[u8]> {
    let mut copy = Vec::with_capacity(HEADER + length);
    copy.extend_from_slice(&[0; HEADER]);
    if length > 0 {
        // SAFETY: the caller vouches for it.
        copy.extend_from_slice(unsafe { std::slice::from_raw_parts(data, length) });
    }
    copy.into_boxed_slice()
}

struct StreamSource {
    conn: Weak<SendConn>,
    index: usize,
}

impl Source for StreamSource {
    fn poll(&self) -> Progress {
        let Some(conn) = self.conn.upgrade() else { return Progress::default() };
        let moved = conn.run(self.index, READ | WRITE);
        if self.index == 0 {
            if !moved && conn.attention.is_stalled() {
                tracing::trace!(target: crate::os::log::NET, "waiting, to {}: {}", conn.peer, conn.state().core.describe());
            }
            return conn.attention.looked(moved, || conn.requests.outstanding() > 0);
        }
        Progress { moved, again: None }
    }

    fn fail(&self, error: Error) {
        if let Some(conn) = self.conn.upgrade() {
            conn.fail(error);
        }
    }
}
