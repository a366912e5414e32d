//! The sending side of a connection: core, streams, requests.
//!
//! `isend` posts a message to the [`SendCore`] and, when it is short, sends it in the same call. Long messages are
//! cut into chunks by the workers that own the further streams. Acknowledgements and clear-to-sends come back on
//! the reverse half of the streams.
//!
//! Locks, in order: a stream (try-lock), then the state. The state's lock is held for bookkeeping only, never
//! across a system call.

mod sealed;

use std::ffi::c_void;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::acceptor::send_all;
use super::attend::Attention;
use super::copies::Own;
use super::frame::{HEADER, Header, Type};
use super::handshake::FEATURE_RECOVERY;
use super::limits::{BRIEF_MAX, COPY_FIRST_MAX, EAGER_MAX, INLINE_MAX, MAX_STREAMS, REPLAY_MAX};
use super::net::{Link, Net, Sock, path_of};
use super::peer::{Broken, Health, Peer, failure, left_early, lost, told_by_peer};
use super::seal::codec::Sealed;
use super::seal::damage::Damage;
use super::seal::{Seal, Sides};
use super::send_core::{Admit, Chunk, Key, SendCore, Written};
use super::shortage::{Again, Short};
use super::stream::{Held, READ, Ran, SEND, Step, Stream, WRITE};
use super::watch::{self, Chores, Finding, Probes, Sight, Vigil};
use super::wire::{self, Piece};
use crate::engine::counters::Counters;
use crate::engine::events::{self, Events, Wait};
use crate::engine::poller::{HOT, HOT_BETWEEN, Interest, Progress, Registration, Source};
use crate::engine::request::{Outcome, RequestSlots, Ticket};
use crate::os::error::{Error, Result};
use crate::os::ticks::Ticks;

/// Bytes that one run of a stream may send before the other streams of the same worker get their turn.
const SHARE: usize = 512 << 10;

/// How long an orderly close waits for the peer's kernel to take what was sent.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// After this long without an answer it looks whether a path has died.
const CLOSE_DOUBT: Duration = Duration::from_millis(500);

/// How long it waits when a path has died at that moment: until that is noticed, and what was on it has travelled again.
/// That takes 3 s, and as long as all ways are down. What was reported done is worth the wait; a peer that is dead ends it.
const CLOSE_MENDING: Duration = Duration::from_secs(20);

/// How long a message may wait before the receiver is asked about it, and the longest pause between two questions. In
/// ordinary work a receive follows within microseconds; a rank that is late by seconds is asked a handful of times.
const ASK_AFTER: Duration = Duration::from_millis(20);
const ASK_SELDOM: Duration = Duration::from_secs(10);

/// Where a message's bytes are.
struct Payload {
    data: *const u8,
    /// A copy, with room for the header before it: the request was reported done and the buffer went back to NCCL,
    /// so this is what is sent, again if need be.
    replay: Option<Vec<u8>>,
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
    copies: Own,
    /// When to ask the receiver about stalled messages, and how long after the last time that is.
    ask: Option<(Instant, Duration)>,
}

/// A chunk on its way to the kernel: what is to be done when that has all of it.
#[derive(Debug, Clone, Copy)]
struct Leaving {
    key: Key,
    length: u32,
    /// A message of its own, so short that it is copied when it has left.
    copied: bool,
    /// Its request may end by that, so it has to be booked.
    ends: bool,
}

/// What a stream is sending.
enum Outgoing {
    /// Control frames.
    Control(Vec<u8>),
    /// A header, which the stream holds ([`Io::header`]), and a chunk from where NCCL has it.
    Framed(Piece, Leaving),
    /// A whole short message with its header, from the copy.
    Whole(Piece, Leaving),
    /// Any of these, with its checksum or encrypted.
    Sealed(Sealed, Option<Leaving>),
}

// SAFETY: as for `Payload`: the pieces belong to a message that is not acknowledged.
unsafe impl Send for Outgoing {}

impl Outgoing {
    #[inline]
    fn length(&self) -> usize {
        match self {
            Self::Control(bytes) => bytes.len(),
            Self::Framed(body, _) => HEADER + body.length,
            Self::Whole(bytes, _) => bytes.length,
            Self::Sealed(sealed, _) => sealed.length(),
        }
    }

    /// Sends what the socket takes now of what is left when `sent` bytes are gone.
    ///
    /// # Errors
    /// As [`wire::send`].
    ///
    /// # Safety
    /// The pieces must be readable for their whole length.
    #[inline]
    unsafe fn send(&self, fd: RawFd, header: &[u8; HEADER], sent: usize) -> io::Result<Option<usize>> {
        // SAFETY: the caller vouches for the pieces.
        unsafe {
            match self {
                Self::Whole(bytes, _) => wire::send(fd, bytes.skip(sent)),
                Self::Framed(body, _) if body.length == 0 => wire::send(fd, Piece::of(&header[sent..])),
                Self::Framed(body, _) => {
                    let head = Piece::of(&header[sent.min(HEADER)..]);
                    wire::send_two(fd, [head, body.skip(sent.saturating_sub(HEADER))])
                }
                Self::Control(bytes) => wire::send(fd, Piece::of(&bytes[sent..])),
                Self::Sealed(sealed, _) => wire::send_three(fd, sealed.rest(sent)),
            }
        }
    }
}

struct Io {
    sock: Sock,
    /// The life of the stream that this is. Its end may be noticed in one thread while another begins the next.
    epoch: u16,
    out: Option<Outgoing>,
    header: [u8; HEADER],
    sent: usize,
    /// There was more for this stream when `out` was taken, or somebody has wished for a look since. Whoever makes more
    /// ready does that, so without it nothing has to be looked for when `out` has left.
    more: bool,
    /// Counts the frames that the kernel took whole.
    written: Arc<Written>,
    control: Vec<u8>,
    /// What a stream with checksums or encryption has beyond a plain one.
    seal: Option<Box<Sides>>,
    input: Vec<u8>,
    filled: usize,
    /// The chunk that is being sent, when a profiler is told of it, and since when the socket has been full.
    followed: Option<(Ticket, u64)>,
    blocked: Option<Ticks>,
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
    damage: Damage,
    events: Events,
    recovery: bool,
    grown: AtomicBool,
    /// Streams beyond the first that count against the process's budget until this connection is gone.
    extra: AtomicUsize,
    /// Whether a message may be waiting for its receive or for credit.
    stalled: AtomicBool,
    closing: AtomicBool,
    /// Whether the last long message was one of those that are over soon ([`BRIEF_MAX`]).
    brief: AtomicBool,
    /// Whether the first stream is connected.
    first_live: AtomicBool,
    chores: Chores,
    vigils: Mutex<[Vigil; MAX_STREAMS]>,
    /// Streams for which the kernel had no memory.
    short: Short,
    /// Streams, with their epoch and the frames taken in, that the receiver has given up.
    condemned: Mutex<Vec<(usize, u16, u64)>>,
    /// Until when a stream must be back after the last one went down, and what to say if none is.
    alone: Mutex<Option<(Instant, Error)>>,
    /// A bit for each stream that is being connected again.
    repairs: AtomicUsize,
    homes: Mutex<[u8; MAX_STREAMS]>,
    /// The last epoch that each stream tried.
    epochs: Mutex<[u16; MAX_STREAMS]>,
    /// Where this connection's streams begin among the workers.
    turn: usize,
}

impl SendConn {
    /// A connection whose first stream has finished its handshake, but for the word of [`SendConn::begin`].
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    pub fn new(net: Arc<Net>, link: Link, peer: Peer, first: Sock, seal: Seal) -> Result<Arc<Self>> {
        let recovery = link.features & FEATURE_RECOVERY != 0;
        let turn = net.next_turn();
        let conn = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            net,
            link,
            peer,
            state: Mutex::new(State {
                core: SendCore::new(recovery),
                payloads: Vec::new(),
                done: Vec::new(),
                copies: Own::default(),
                ask: None,
            }),
            streams: (0..MAX_STREAMS).map(|_| Stream::default()).collect(),
            requests: RequestSlots::new(),
            health: Health::default(),
            attention: Attention::default(),
            counters: Counters::default(),
            damage: Damage::default(),
            events: Events::default(),
            recovery,
            grown: AtomicBool::new(false),
            extra: AtomicUsize::new(0),
            stalled: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            brief: AtomicBool::new(false),
            first_live: AtomicBool::new(true),
            chores: Chores::default(),
            vigils: Mutex::default(),
            short: Short::default(),
            condemned: Mutex::new(Vec::new()),
            alone: Mutex::new(None),
            repairs: AtomicUsize::new(0),
            homes: Mutex::default(),
            epochs: Mutex::default(),
            turn,
        });
        let place = conn.place(0, &first)?;
        conn.add_stream(0, 0, place, first, seal);
        Ok(conn)
    }

    /// Tells the peer that this side has its welcome: from then on both have the connection. So this comes last of what
    /// may fail: a peer that had been told would wait on this connection, and not on the one that is tried next.
    ///
    /// # Errors
    /// When it cannot be said.
    pub fn begin(self: &Arc<Self>) -> Result<()> {
        let word = self.link.connection.to_le_bytes();
        // A stream that has broken meanwhile is being connected again, and that says the same.
        self.streams[0].peek(|io| send_all(&io.sock, &word)).unwrap_or(Ok(()))?;
        self.net.remember_sender(self);
        // Over a second rail at once: if the first one dies, each side can hear of it from the other.
        if self.recovery && self.pairs() > 1 {
            self.net.grow(Arc::clone(self), 1);
        }
        Ok(())
    }

    /// A place at the worker of stream `index` for a socket: all that may fail when a stream is added, so it comes before
    /// anything is told to the peer or changed here.
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    pub fn place(&self, index: usize, sock: &Sock) -> Result<Registration> {
        let source = Arc::new(StreamSource { conn: self.me.clone(), index });
        let fd = sock.as_raw_fd();
        // The first stream is NCCL's thread's; the keeper only watches for its end and finishes what blocked.
        if index == 0 {
            return self.net.poller.keeper()?.register(source, Some((fd, Interest::Quiet)));
        }
        self.net.poller.worker(self.turn + index)?.register(source, Some((fd, Interest::Data)))
    }

    /// Puts a connected socket to work as stream `index`. What was reported at its place before is made up for by a kick.
    fn add_stream(&self, index: usize, epoch: u16, place: Registration, sock: Sock, seal: Seal) {
        self.events.set_path(index, path_of(&sock, &self.link));
        self.health.stream_up();
        let written = {
            let mut state = self.state();
            state.core.stream_up(index, epoch);
            self.note_first(index, &state.core);
            state.core.counts(index)
        };
        let io = Io {
            sock,
            epoch,
            out: None,
            header: [0; HEADER],
            sent: 0,
            more: false,
            written,
            control: Vec::new(),
            seal: seal.sides(),
            input: vec![0; 32 * HEADER],
            filled: 0,
            followed: None,
            blocked: None,
        };
        lock(&self.vigils)[index] = Vigil::default();
        *lock(&self.alone) = None;
        // In this order: a stream that breaks at once takes its registration with it.
        self.streams[index].watch(place);
        self.streams[index].install(Box::new(io));
        self.streams[index].kick();
    }

    /// Whether the first stream is connected, for who does not have the state. Called with the state locked, so that the
    /// note and the core say the same whatever two threads do.
    fn note_first(&self, index: usize, core: &SendCore) {
        if index == 0 {
            self.first_live.store(core.is_live(0), Ordering::SeqCst);
        }
    }

    /// Ends a life of a stream in the books, once. Returns whether it was this call that did.
    fn end_life(&self, index: usize, epoch: u16) -> bool {
        let mut state = self.state();
        let was_live = state.core.end_life(index, epoch);
        self.note_first(index, &state.core);
        was_live
    }

    /// Starts a send. `None`: not now, all request slots are taken.
    ///
    /// # Errors
    /// When the connection has failed, or the message is longer than its receive.
    ///
    /// # Safety
    /// `data` must be readable for `length` bytes until the request ends or the connection is closed. `profiler` is
    /// null or NCCL's profiler handle of this transfer, alive until `test` has told the end of it.
    pub unsafe fn isend(
        &self,
        data: *const u8,
        length: usize,
        tag: i32,
        profiler: *mut c_void,
    ) -> Result<Option<Ticket>> {
        self.health.check()?;
        // A receiver that has said goodbye takes nothing any more; a short send would be done all the same.
        if self.health.is_peer_done() {
            self.health.fail(left_early(&self.peer));
            self.health.check()?;
        }
        let Some(ticket) = self.requests.take(1) else { return Ok(None) };
        if length as u64 > INLINE_MAX {
            self.brief.store((length as u64) < BRIEF_MAX, Ordering::Relaxed);
            self.grow();
        }
        // Of what travels eagerly, the longer part is left to a worker that is awake: waking one takes longer than
        // sending it here.
        let hand_over = length as u64 > INLINE_MAX && self.streams[1].is_awake();
        let short = length as u64 <= EAGER_MAX && !hand_over;
        let to_tell = self.follow(ticket, profiler, length as u64, short);
        // A short message is sent in this call, when the first stream is free: taken before the state, as always.
        let mut held = if short { self.streams[0].hold() } else { None };
        let mut wish = WRITE;
        let posted = {
            let mut state = self.state();
            // SAFETY: the caller vouches for the buffer.
            let posted = unsafe { self.post(&mut state, ticket, data, length, tag, hand_over) };
            if let (Ok((_, Admit::Ready)), Some(Some(io))) = (&posted, held.as_deref_mut())
                && io.out.is_none()
            {
                io.out = self.next_outgoing(&mut state, 0, io);
                wish = SEND;
            }
            posted
        };
        match posted {
            Err(error) => {
                self.run_held(held, 0, WRITE);
                // SAFETY: inside isend.
                unsafe { self.events.abandon(ticket.slot) };
                self.requests.cancel(ticket);
                self.fail(error.with_peer(&self.peer));
                return self.health.check().map(|()| None);
            }
            Ok((_, Admit::Ready)) => {
                self.run_held(held, 0, wish);
                if !self.first_live.load(Ordering::Relaxed) {
                    self.wake_streams(length as u64);
                }
            }
            Ok((_, Admit::Striped)) => {
                self.wake_streams(length as u64);
                self.run_held(held, 0, 0);
            }
            Ok((key, Admit::AwaitsReceiver)) => {
                self.run_held(held, 0, READ);
                let question = self.state().core.ask_at_once(key);
                if let Some(header) = question {
                    self.queue_control(0, header, &[]);
                    self.run(0, WRITE);
                }
                self.stalled.store(true, Ordering::Relaxed);
            }
            Ok((_, Admit::AwaitsCredit)) => {
                self.run_held(held, 0, READ);
                self.stalled.store(true, Ordering::Relaxed);
            }
        }
        if self.attention.wanted() {
            self.streams[0].kick();
        }
        if to_tell {
            // SAFETY: inside isend.
            unsafe { self.events.settle(&self.requests, ticket) };
        }
        Ok(Some(ticket))
    }

    /// Whom to tell of this connection's transfers.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Has the events of a transfer told. Returns whether there is something to tell when the message has left.
    #[inline]
    fn follow(&self, ticket: Ticket, profiler: *mut c_void, length: u64, short: bool) -> bool {
        if profiler.is_null() {
            return false;
        }
        if !short {
            self.events.follow(ticket.slot, 0, profiler);
            return false;
        }
        let chunk = |details: bool| {
            let message = if details { self.state().core.next_number() } else { 0 };
            events::Chunk { length, total: length, message, ..events::Chunk::default() }
        };
        self.events.follow_whole(ticket.slot, profiler, chunk)
    }

    /// Enters a message into the books.
    ///
    /// # Errors
    /// As [`SendCore::post`].
    ///
    /// # Safety
    /// As [`SendConn::isend`].
    unsafe fn post(
        &self,
        state: &mut State,
        ticket: Ticket,
        data: *const u8,
        length: usize,
        tag: i32,
        hand_over: bool,
    ) -> Result<(Key, Admit)> {
        let (key, admit) = state.core.post(length as u64, tag, hand_over)?;
        if state.payloads.len() <= key {
            state.payloads.resize_with(key + 1, || None);
        }
        let replay = (self.recovery && length as u64 <= COPY_FIRST_MAX).then(|| {
            // SAFETY: the caller vouches for the buffer.
            unsafe { state.copies.copy(data, length) }
        });
        // What must wait for credit is not done: else nothing would bound the copies.
        let waits = (replay.is_none() || admit != Admit::Ready).then_some(ticket);
        if waits.is_none() {
            Counters::count(&self.counters.messages, 1);
            self.requests.complete_part(ticket.slot, 0, length as u64);
        }
        match admit {
            Admit::Ready | Admit::Striped => {}
            Admit::AwaitsReceiver => Counters::count(&self.counters.stalls_receiver, 1),
            Admit::AwaitsCredit => Counters::count(&self.counters.stalls_credit, 1),
        }
        state.payloads[key] = Some(Payload { data, replay, length: length as u64, written: 0, ticket: waits });
        Ok((key, admit))
    }

    /// Asks after a send: its size when it is done.
    ///
    /// # Errors
    /// When the connection has failed; nothing touches the buffer any more then.
    pub fn test(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        self.requests.check(ticket)?;
        // SAFETY: NCCL's thread, which has not been told the end of any request that is outstanding.
        let finish = || unsafe { self.events.finish(&self.requests, ticket) };
        if let Some(outcome) = finish() {
            return Ok(Some(outcome));
        }
        self.glance(0);
        if let Some(outcome) = finish() {
            return Ok(Some(outcome));
        }
        self.verdict().inspect_err(|_| {
            self.quiesce();
            // SAFETY: as above.
            unsafe { self.events.abandon(ticket.slot) };
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
        let voice = self.voice();
        for header in headers {
            self.queue_control(voice, header, &[]);
        }
        self.run(voice, WRITE);
    }

    /// The stream for what must be said: the first that is connected.
    fn voice(&self) -> usize {
        if self.first_live.load(Ordering::Relaxed) {
            return 0;
        }
        let state = self.state();
        (0..MAX_STREAMS).find(|index| state.core.is_live(*index)).unwrap_or(0)
    }

    /// Whether a request that is not done can still become so.
    fn verdict(&self) -> Result<()> {
        self.health.check()?;
        if self.health.is_over() && !self.settle() {
            self.health.fail(left_early(&self.peer));
            return self.health.check();
        }
        Ok(())
    }

    /// The peer has left, and no stream does. If it said that it had received everything, what was lost are its
    /// acknowledgements only: then every request is done.
    #[cold]
    fn settle(&self) -> bool {
        let mut state = self.state();
        let State { core, payloads, done, copies, .. } = &mut *state;
        if !self.health.has_peer_received(core.next_number()) {
            return false;
        }
        core.all_received(done);
        self.end_messages(payloads, copies, done);
        true
    }

    /// The receiver has closed the connection, and says so to a stream that wanted to come back.
    pub fn peer_has_closed(&self, received: u64) {
        self.health.peer_received(received);
    }

    /// How many of them do so.
    pub fn extra_streams(&self) -> usize {
        self.extra.load(Ordering::Relaxed)
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
        if self.requests.outstanding() == 0 && !self.health.is_failed() {
            self.say_goodbye();
        } else {
            self.closing.store(true, Ordering::Release);
            let error = Error::remote("the sending side closed the connection with transfers in flight");
            self.tell_failure(&error);
            self.health.fail(error);
        }
        self.quiesce();
        tracing::debug!(target: crate::os::log::NET, "closed the connection to {}: {}", self.peer, self.counters);
    }

    /// Lets everything that was reported done reach the peer, says goodbye, and leaves the sockets to the keeper, which
    /// closes them when the peer has too: closing a socket with unread bytes would make the kernel send a reset that
    /// can overtake the data. All within bounds; they are wider when a path has died at this moment.
    fn say_goodbye(&self) {
        let start = Instant::now();
        self.write_all(start + CLOSE_PATIENCE);
        self.closing.store(true, Ordering::Release);
        if !self.part(start) && self.recovery && !self.health.is_failed() {
            // Nothing comes back on some stream. It is mended as at any other time, and what was on it travels again.
            self.closing.store(false, Ordering::Release);
            self.begin_watch();
            let away = self.away();
            for index in away {
                self.repair(index, &io::ErrorKind::TimedOut.into());
            }
            let deadline = start + CLOSE_MENDING;
            let over = || self.health.is_failed() || self.health.is_peer_done();
            while Instant::now() < deadline && !over() && (self.is_in_doubt() || self.is_asking()) {
                std::thread::sleep(watch::SOON / 10);
            }
            self.write_all(deadline);
            self.closing.store(true, Ordering::Release);
            self.part(Instant::now());
        }
        for stream in &self.streams {
            if let Some(io) = stream.take() {
                self.health.stream_down();
                self.net.linger(io.sock);
            }
        }
    }

    /// Waits until the kernel has taken everything.
    fn write_all(&self, deadline: Instant) {
        while Instant::now() < deadline && !self.health.is_failed() {
            self.run(self.voice(), READ | WRITE);
            let written = |stream: &Stream<Io>| stream.peek(|io| io.out.is_none()).unwrap_or(true);
            if !self.state().core.has_ready() && self.streams.iter().all(written) {
                return;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Says goodbye on each stream, behind everything else, since the receiver reads them in any order. Waits until the
    /// peer's kernel has it all; false when it does not answer.
    fn part(&self, start: Instant) -> bool {
        for index in 0..MAX_STREAMS {
            self.queue_control(index, Header::of(Type::Bye, 0), &[]);
        }
        let gone = |io: &mut Io| {
            let written = io.out.is_none() && io.control.is_empty();
            if written {
                // Wakes the receiver's keeper, which sees to it that the acknowledgement is not delayed.
                let _ = io.sock.shutdown(Shutdown::Write);
            }
            written && wire::unsent(io.sock.as_raw_fd()) == 0
        };
        while start.elapsed() < CLOSE_PATIENCE && !self.health.is_failed() {
            for index in 0..MAX_STREAMS {
                self.run(index, READ | WRITE);
            }
            if self.streams.iter().all(|stream| stream.peek(gone).unwrap_or(true)) {
                break;
            }
            if start.elapsed() > CLOSE_DOUBT && self.is_asking() {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        // A stream that died meanwhile took with it what nobody has acknowledged, and those that are left are closed for
        // what must travel again.
        self.health.is_peer_done() || !self.is_in_doubt()
    }

    /// Whether something was lost with a stream, or waits to travel again.
    fn is_in_doubt(&self) -> bool {
        let core = &self.state().core;
        core.has_ready() || core.unfenced().iter().any(|(index, _)| core.in_doubt(*index))
    }

    /// Streams that must come back so that what was lost can travel again: all of which the receiver has not said how far
    /// they came, or else any.
    fn away(&self) -> Vec<usize> {
        let core = &self.state().core;
        let adrift: Vec<usize> = core.unfenced().iter().map(|(index, _)| *index).collect();
        let any = (0..MAX_STREAMS).find(|index| core.is_down(*index) && (*index == 0 || core.epoch(*index) > 0));
        if adrift.is_empty() { any.into_iter().collect() } else { adrift }
    }

    fn is_adrift(&self) -> bool {
        !self.state().core.unfenced().is_empty()
    }

    /// Whether a stream waits for the peer's kernel longer than usual.
    fn is_asking(&self) -> bool {
        self.streams
            .iter()
            .any(|stream| stream.peek(|io| Sight::of(&io.sock)).flatten().is_some_and(|sight| sight.asked > 0))
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
        // On every stream: one of them may be in the middle of a chunk that will never end, or lead nowhere.
        let frame = failure(error);
        for (index, stream) in self.streams.iter().enumerate() {
            if stream.peek(|io| io.control.extend_from_slice(&frame)).is_some() {
                self.run(index, WRITE);
            }
        }
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
        self.streams[index].peek(|io| {
            let header = Header { length: payload.len() as u32, ..header };
            io.control.extend_from_slice(&header.encode());
            io.control.extend_from_slice(payload);
        });
    }

    /// Asks for more streams, once.
    fn grow(&self) {
        if !self.grown.load(Ordering::Relaxed)
            && !self.grown.swap(true, Ordering::Relaxed)
            && let Some(me) = self.me.upgrade()
        {
            self.net.grow(me, MAX_STREAMS);
        }
    }

    /// Gets as many streams going as a message can use.
    fn wake_streams(&self, length: u64) {
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
        self.run_held(self.streams[index].hold(), index, wish)
    }

    /// As [`SendConn::run`], with what the stream's `hold` returned.
    fn run_held(&self, held: Option<Held<'_, Io>>, index: usize, wish: u8) -> bool {
        let mut wake = 0;
        let step = |io: &mut Io, wishes| self.step(index, io, wishes, &mut wake);
        let ran = self.streams[index].run_held(held, wish, step, |io, why| self.broken(index, io, why));
        self.ran(index, ran, wake)
    }

    /// Looks whether a stream can move anything, unless another thread is looking.
    fn glance(&self, index: usize) {
        self.attention.called();
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

    // Always: a frame of its own for each message would cost a quarter of what is done in it.
    #[inline(always)]
    fn step(&self, index: usize, io: &mut Io, wishes: u8, wake: &mut u64) -> Step<Broken> {
        let mut moved = false;
        let mut share = SHARE;
        let mut wishes = wishes;
        loop {
            // Who wishes for a look may know of more than there was when the present piece was taken.
            io.more |= wishes & WRITE != 0;
            if wishes & (WRITE | SEND) != 0 {
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
        if io.out.is_none() {
            io.out = self.next_outgoing(&mut self.state(), index, io);
        }
        loop {
            if io.seal.is_some() {
                io.protect();
            }
            let Some(out) = &io.out else { return Ok(moved) };
            // SAFETY: headers and copies are ours; a chunk belongs to a message that is not acknowledged, so its
            // memory is the transport's.
            match unsafe { out.send(io.sock.as_raw_fd(), &io.header, io.sent) } {
                Err(error) if wire::is_shortage(&error) => {
                    self.starved(index, &error);
                    return Ok(moved);
                }
                Err(error) => return Err(Broken::Lost(error)),
                Ok(None) => {
                    Counters::bump(&self.counters.stalls_socket);
                    if io.followed.is_some() {
                        io.blocked.get_or_insert_with(Ticks::now);
                    }
                    return Ok(moved);
                }
                Ok(Some(bytes)) => {
                    moved = true;
                    if let Some(since) = io.blocked.take() {
                        self.moves_again(io.followed, since);
                    }
                    *share = share.saturating_sub(bytes.max(1));
                    io.sent += bytes;
                    if io.sent < out.length() {
                        continue;
                    }
                    // Copied only now, when its bytes are on their way already, and before the state is locked.
                    let copy = self.copy_of(out);
                    let left = io.finished();
                    if left.is_some() {
                        io.written.count();
                    }
                    let left = left.filter(|left| left.ends);
                    // A short message whose request is done, and nothing behind it: no second look at the state.
                    if left.is_none() && !io.more {
                        return Ok(moved);
                    }
                    let mut state = self.state();
                    if let Some(left) = left {
                        self.chunk_written(&mut state, &left, copy);
                    }
                    if *share == 0 {
                        return Ok(moved);
                    }
                    io.out = self.next_outgoing(&mut state, index, io);
                }
            }
        }
    }

    /// A stream that was full takes bytes again.
    #[cold]
    fn moves_again(&self, followed: Option<(Ticket, u64)>, since: Ticks) {
        if let Some((ticket, offset)) = followed {
            self.events.chunk_waited(ticket.slot, 0, offset, Wait::Socket, since);
        }
    }

    /// The kernel had no memory for a call on a stream: another one in a moment.
    fn starved(&self, index: usize, error: &io::Error) {
        if self.short.begins(index) {
            self.net.shortages.wait(&self.net.poller, self.me.clone(), index, error);
        }
    }

    /// What the stream sends next, and takes out of the books as handed out.
    #[inline]
    fn next_outgoing(&self, state: &mut State, index: usize, io: &mut Io) -> Option<Outgoing> {
        if !io.control.is_empty() {
            io.more = state.core.has_ready();
            return Some(Outgoing::Control(std::mem::take(&mut io.control)));
        }
        let chunk = state.core.next_chunk(index)?;
        io.followed = if self.events.hears() { self.chunk_begins(state, index, &chunk) } else { None };
        if chunk.again {
            Counters::count(&self.counters.resends, 1);
        } else {
            Counters::count(&self.counters.chunks, 1);
            Counters::count(&self.counters.bytes, u64::from(chunk.length));
        }
        let payload = state.payloads[chunk.key].as_mut().expect("a message in flight has its payload");
        let short = chunk.header.total <= REPLAY_MAX;
        let mut leaving = Leaving {
            key: chunk.key,
            length: chunk.length,
            copied: false,
            ends: !chunk.again && payload.ticket.is_some() && (short || !self.recovery),
        };
        if let Some(copy) = &mut payload.replay {
            // An earlier life of the message is over when it is sent again, so nobody reads the old header now.
            chunk.header.encode_into(copy.first_chunk_mut().expect("a copy has room for its header"));
            io.more = state.core.has_ready();
            return Some(Outgoing::Whole(Piece::of_mut(copy), leaving));
        }
        let whole = u64::from(chunk.length) == chunk.header.total;
        leaving.copied = self.recovery && !chunk.again && whole && short;
        // A stream in the midst of longer messages looks on: others may have been posted that no one else was woken for.
        io.more = true;
        chunk.header.encode_into(&mut io.header);
        // SAFETY: the core hands out ranges within the message.
        let data = unsafe { payload.data.add(chunk.offset as usize) }.cast_mut();
        Some(Outgoing::Framed(Piece { data, length: chunk.length as usize }, leaving))
    }

    /// The copy for a possible resend that ends the request of a message just sent: short, and not copied before.
    #[inline]
    fn copy_of(&self, out: &Outgoing) -> Option<Vec<u8>> {
        let Outgoing::Framed(body, Leaving { copied: true, .. }) = out else { return None };
        // SAFETY: the message is not acknowledged and its request has not ended, so the buffer is the transport's.
        Some(unsafe { self.net.copies.copy(body.data, body.length) })
    }

    /// The kernel took a whole chunk for the first time. That ends the request of a message that is short enough to be
    /// copied, or needs no copy.
    fn chunk_written(&self, state: &mut State, left: &Leaving, copy: Option<Vec<u8>>) {
        let payload = state.payloads[left.key].as_mut().expect("a message in flight has its payload");
        payload.written += u64::from(left.length);
        if copy.is_some() {
            payload.replay = copy;
        }
        if payload.written < payload.length {
            return;
        }
        let Some(ticket) = payload.ticket.take() else { return };
        if self.recovery && payload.replay.is_none() {
            // What was sealed was not copied before.
            // SAFETY: the request has not ended, so the buffer is the transport's.
            payload.replay = Some(unsafe { self.net.copies.copy(payload.data, payload.length as usize) });
        }
        Counters::count(&self.counters.messages, 1);
        self.requests.complete_part(ticket.slot, 0, payload.length);
    }

    fn read(&self, index: usize, io: &mut Io, wake: &mut u64) -> std::result::Result<bool, Broken> {
        if io.seal.is_some() {
            return self.read_sealed(index, io, wake);
        }
        let mut moved = false;
        loop {
            let room = &mut io.input[io.filled..];
            let wanted = room.len();
            // SAFETY: the input buffer is this stream's own.
            let got = unsafe { wire::receive(io.sock.as_raw_fd(), Piece::of_mut(room)) };
            match got {
                Ok(None) => return Ok(moved),
                Err(error) if wire::is_shortage(&error) => {
                    self.starved(index, &error);
                    return Ok(moved);
                }
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
            self.heard(index, &header, &io.input[at + HEADER..end], wake)?;
            at = end;
        }
        if at < io.filled {
            io.input.copy_within(at..io.filled, 0);
        }
        io.filled -= at;
        Ok(())
    }

    /// Does what a frame of the receiver says.
    fn heard(&self, index: usize, header: &Header, text: &[u8], wake: &mut u64) -> Result<()> {
        match header.kind {
            Type::Ack => self.acknowledged(index, header)?,
            Type::Clear => {
                let mut state = self.state();
                if let Some(key) = state.core.clear_to_send(header.tag, header.order, header.total)? {
                    if header.total > EAGER_MAX {
                        *wake += header.total;
                    }
                    if self.events.hears()
                        && let Some(ticket) = state.payloads[key].as_ref().and_then(|payload| payload.ticket)
                    {
                        self.events.ready(ticket.slot, 0);
                    }
                }
            }
            Type::Fenced => self.told_fenced(header)?,
            Type::Bye => match header.total {
                0 => self.health.peer_is_done(),
                received => self.health.peer_received(received - 1),
            },
            Type::Fail => return Err(told_by_peer(header.order, text)),
            Type::Data | Type::Fence | Type::Ask => {
                return Err(Error::remote(format!("the receiving side sent a {:?} frame", header.kind)));
            }
        }
        Ok(())
    }

    fn acknowledged(&self, index: usize, header: &Header) -> Result<()> {
        let mut state = self.state();
        let State { core, payloads, done, copies, .. } = &mut *state;
        if header.epoch != core.epoch(index) {
            return Err(Error::remote("an acknowledgement came for a former life of its stream"));
        }
        core.acknowledge(index, header.offset, header.total, done)?;
        self.chunks_end(core, payloads);
        self.end_messages(payloads, copies, done);
        Ok(())
    }

    /// A chunk goes out, and somebody listens. Returns whose it is, unless its request has ended already.
    fn chunk_begins(&self, state: &mut State, index: usize, chunk: &Chunk) -> Option<(Ticket, u64)> {
        state.core.watch_landings();
        let ticket = state.payloads[chunk.key].as_ref()?.ticket?;
        let told = events::Chunk {
            offset: chunk.offset,
            length: u64::from(chunk.length),
            path: index as u16,
            message: chunk.header.message,
            total: chunk.header.total,
            again: chunk.again,
            ..events::Chunk::default()
        };
        self.events.chunk_begins(ticket.slot, 0, &told);
        Some((ticket, chunk.offset))
    }

    /// Chunks were acknowledged.
    fn chunks_end(&self, core: &mut SendCore, payloads: &[Option<Payload>]) {
        while let Some((key, offset)) = core.take_landed() {
            if let Some(ticket) = payloads[key].as_ref().and_then(|payload| payload.ticket) {
                self.events.chunk_ends(ticket.slot, 0, offset);
            }
        }
    }

    fn end_messages(&self, payloads: &mut [Option<Payload>], copies: &mut Own, done: &mut Vec<Key>) {
        for key in done.drain(..) {
            let payload = payloads[key].take().expect("a message in flight has its payload");
            if let Some(ticket) = payload.ticket {
                Counters::count(&self.counters.messages, 1);
                self.requests.complete_part(ticket.slot, 0, payload.length);
            }
            if let Some(copy) = payload.replay.and_then(|copy| copies.give_back(copy)) {
                self.net.copies.give_back(copy);
            }
        }
    }

    /// Tells the peer of a failure on the stream that met it, which may be the only one.
    fn part_in_anger(&self, mut io: Io, error: &Error) {
        if io.out.is_none() && !self.health.is_failed() {
            io.control.extend_from_slice(&failure(error));
            if let Some(sides) = &mut io.seal {
                sides.sealer.control(&mut io.control);
            }
            // SAFETY: both pieces are this stream's own buffers. What the socket does not take is lost, and the peer
            // learns of the end without the reason.
            let _ = unsafe { wire::send(io.sock.as_raw_fd(), Piece::of(&io.control)) };
        }
        self.net.linger(io.sock);
    }

    /// A stream ended. Decides whether that ends the connection.
    fn broken(&self, index: usize, io: Box<Io>, why: Broken) {
        let epoch = io.epoch;
        match &why {
            Broken::Fatal(error) => self.part_in_anger(*io, error),
            _ => drop(io),
        }
        self.health.stream_down();
        let was_live = self.end_life(index, epoch);
        match why {
            Broken::Fatal(error) => self.fail(error.with_peer(&self.peer)),
            Broken::Goodbye => {}
            Broken::Lost(_) if self.closing.load(Ordering::Acquire) || !was_live => {}
            Broken::Lost(error) if self.recovery => self.repair(index, &error),
            Broken::Lost(error) => self.fail_silently(lost(&error).with_peer(&self.peer)),
        }
    }

    /// A stream died under a connection that can go on: asks the receiver, over another stream, how far the dead
    /// one came, and has it connected anew.
    fn repair(&self, index: usize, error: &io::Error) {
        tracing::info!(target: crate::os::log::NET, "stream {index} to {} broke ({error}); connecting it again", self.peer);
        // Also for those that died before, and on every stream: what was asked over this one may be lost, and others
        // may lead nowhere too.
        let unfenced = self.state().core.unfenced();
        for (dead, epoch) in unfenced {
            let fence = Header { order: dead as u64, offset: u64::from(epoch), ..Header::of(Type::Fence, 0) };
            for other in 0..MAX_STREAMS {
                self.queue_control(other, fence, &[]);
            }
        }
        self.streams.iter().for_each(Stream::kick);
        if self.health.live() == 0 {
            self.wait_for_peer(error);
        }
        // The looks go on until all streams are back.
        self.begin_watch();
        if let Some(me) = self.me.upgrade() {
            self.net.repair(&me, index);
        }
    }

    /// The receiver has fenced a stream: one that died here too, or one that died there only.
    fn told_fenced(&self, header: &Header) -> Result<()> {
        let (index, epoch) = super::peer::fenced_life(header)?;
        {
            let state = self.state();
            // News of a life that is over already is no news.
            if epoch != state.core.epoch(index) {
                return Ok(());
            }
            if state.core.is_live(index) {
                drop(state);
                // The stream is another thread's, or this one's: the keeper takes it away, who holds none.
                lock(&self.condemned).push((index, epoch, header.total));
                self.call_keeper();
                return Ok(());
            }
        }
        self.fenced(index, epoch, header.total)
    }

    /// The receiver says how many frames of a dead stream's life it took in. The rest travels again, over whatever
    /// stream has room.
    ///
    /// # Errors
    /// When it names frames that were never sent.
    fn fenced(&self, index: usize, epoch: u16, frames: u64) -> Result<()> {
        {
            let mut state = self.state();
            let State { core, payloads, done, copies, .. } = &mut *state;
            core.fenced(index, epoch, frames, done)?;
            self.chunks_end(core, payloads);
            self.end_messages(payloads, copies, done);
        }
        for stream in &self.streams {
            stream.kick();
        }
        Ok(())
    }

    /// A stream that died is connected again: what its last life lost travels again. `place`: if it has one already.
    ///
    /// # Errors
    /// When the peer's count is impossible, or the socket cannot be watched.
    pub fn rejoined(
        &self,
        index: usize,
        epoch: u16,
        frames: u64,
        place: Option<Registration>,
        sock: Sock,
        seal: Seal,
    ) -> Result<()> {
        let place = place.map_or_else(|| self.place(index, &sock), Ok)?;
        let former = self.state().core.epoch(index);
        if (epoch.wrapping_sub(former) as i16) <= 0 {
            return Err(Error::remote("another life of the stream was faster"));
        }
        // A stream that comes home still lives elsewhere; the receiver has fenced that life by taking this one. If its
        // socket is not there, another thread has just seen it break: that life is over for the books all the same,
        // before the next begins.
        if let Some(io) = self.streams[index].take() {
            watch::close_hard(&io.sock);
            self.health.stream_down();
        }
        self.end_life(index, former);
        self.fenced(index, former, frames)?;
        if epoch > 1 || index == 0 {
            Counters::bump(&self.counters.reconnects);
            tracing::info!(target: crate::os::log::NET, "stream {index} to {} is back", self.peer);
        }
        self.add_stream(index, epoch, place, sock, seal);
        Ok(())
    }

    /// Whether nobody else is connecting stream `index` again: then the caller does.
    pub fn begin_repair(&self, index: usize) -> bool {
        self.repairs.fetch_or(1 << index, Ordering::SeqCst) & 1 << index == 0
    }

    /// The caller has done so, or given up.
    pub fn end_repair(&self, index: usize) {
        self.repairs.fetch_and(!(1 << index), Ordering::SeqCst);
    }

    /// The stream was connected again, and the repair has ended: has it begin anew if it broke in between, when who saw
    /// it break found a repair under way.
    pub fn check_repair(&self, index: usize) {
        if !self.is_over()
            && self.state().core.is_down(index)
            && let Some(me) = self.me.upgrade()
        {
            self.net.repair(&me, index);
        }
    }

    /// How many pairs of rails there are to try.
    pub fn pairs(&self) -> usize {
        self.link.local.len().max(self.link.remote.len()).max(1)
    }

    /// The pair of rails over which stream `index` first connected, counted from the one that its number gives.
    pub fn home(&self, index: usize) -> usize {
        usize::from(lock(&self.homes)[index])
    }

    /// Stream `index` has its home there.
    pub fn set_home(&self, index: usize, pair: usize) {
        lock(&self.homes)[index] = (pair % self.pairs()) as u8;
    }

    /// Whether stream `index` shall come back over its own rails only: while it lives elsewhere, or others carry the
    /// load. The first one is missed more: short messages are faster with it.
    ///
    /// One stream alone is too few where there are several ways: its end may be seen by one side only, which could not
    /// tell the other.
    pub fn awaits_home(&self, index: usize) -> bool {
        let enough = if self.pairs() > 1 { 2 } else { 1 };
        self.health.live() >= enough && (index > 0 || self.first_live.load(Ordering::SeqCst))
    }

    /// The epoch in which stream `index` tries to connect next; each is given out once.
    pub fn next_epoch(&self, index: usize) -> u16 {
        let given = &mut lock(&self.epochs)[index];
        let last = self.state().core.epoch(index);
        if (last.wrapping_sub(*given) as i16) > 0 {
            *given = last;
        }
        *given = given.wrapping_add(1);
        *given
    }

    /// Whether a stream is connected.
    pub fn is_connected(&self) -> bool {
        self.health.live() > 0
    }

    /// All streams are gone. How long the peer may stay away depends on what was seen: silence may be an outage, after
    /// which all goes on as before; a reset or an end of file came over a working path.
    fn wait_for_peer(&self, error: &io::Error) {
        let patience = self.net.patience(error);
        let lost = lost(error).with_peer(&self.peer);
        lock(&self.alone).get_or_insert((Instant::now() + patience, lost));
    }

    fn call_keeper(&self) {
        let me = self.me.clone();
        let called = self.chores.call(&self.net.poller, || Arc::new(Chore { conn: me }));
        if let Err(error) = called {
            self.fail_silently(error);
        }
    }

    /// Has the keeper look at the streams from time to time, until nothing is outstanding.
    fn begin_watch(&self) {
        if self.chores.begin() {
            self.call_keeper();
        }
    }

    /// The keeper's part.
    fn do_chores(&self) -> Progress {
        let condemned = std::mem::take(&mut *lock(&self.condemned));
        for (index, epoch, frames) in condemned {
            if self.state().core.epoch(index) == epoch {
                self.lose(index, io::Error::new(io::ErrorKind::TimedOut, "the receiver heard nothing on it"));
                if let Err(error) = self.fenced(index, epoch, frames) {
                    self.fail(error.with_peer(&self.peer));
                }
            }
        }
        if self.is_over() {
            self.chores.end();
            return Progress::default();
        }
        let now = Instant::now();
        let alone = lock(&self.alone).clone();
        if let Some((until, error)) = alone
            && now >= until
            && self.health.live() == 0
        {
            self.fail_silently(error);
            self.chores.end();
            return Progress::default();
        }
        if !self.chores.is_ticking() {
            return Progress::default();
        }
        if let Err(due) = self.chores.is_due(now) {
            return Progress { moved: false, again: Some(due) };
        }
        let mut next = watch::TICK;
        // How long nothing has come back on any stream.
        let mut least = None;
        let mut lost = Vec::new();
        // While a stream is away the others may lead nowhere too, and the receiver may know what this side does not.
        let adrift = self.is_adrift() || self.repairs.load(Ordering::SeqCst) != 0;
        let mut outstanding = self.requests.outstanding() > 0 || adrift;
        for (index, stream) in self.streams.iter().enumerate() {
            let in_doubt = self.state().core.in_doubt(index);
            let often = Probes::OFTEN;
            let seldom = Probes::within(self.net.config.peer_timeout, true);
            let found = stream.peek(|io| {
                let sight = Sight::of(&io.sock)?;
                let vigil = &mut lock(&self.vigils)[index];
                let in_doubt = adrift || in_doubt && self.requests.outstanding() > 0;
                vigil.probe(&io.sock, sight, in_doubt, &often, &seldom);
                outstanding |= sight.outstanding;
                let unheard = if sight.asked > 0 { sight.silent } else { Duration::ZERO };
                least = Some(least.map_or(unheard, |least: Duration| least.min(unheard)));
                Some(vigil.look(now, sight))
            });
            match found.flatten() {
                Some(Finding::Asking) => next = watch::SOON,
                // Without recovery this is the end, so it must be certain.
                Some(Finding::Lost(silence)) if self.recovery || silence >= self.net.config.peer_timeout => {
                    lost.push((index, silence));
                }
                Some(Finding::Lost(_)) => next = watch::SOON,
                Some(Finding::Well) | None => {}
            }
        }
        if let Some(silence) = least.filter(|least| *least >= self.net.config.peer_timeout) {
            self.fail_silently(super::peer::lost(&watch::silent(silence)).with_peer(&self.peer));
            self.chores.end();
            return Progress::default();
        }
        watch::share_fate(&mut lost, &self.streams, |io| &io.sock);
        for (index, silence) in lost {
            self.lose(index, watch::silent(silence));
        }
        if !outstanding {
            // From here on the kernel's own slow probes do it alone, with the kernel's verdict.
            let seldom = Probes::within(self.net.config.peer_timeout, true);
            for (index, stream) in self.streams.iter().enumerate() {
                stream.peek(|io| lock(&self.vigils)[index].stop_probing(&io.sock, &seldom));
            }
            self.chores.end();
            return Progress::default();
        }
        self.chores.again(now, next)
    }

    /// Gives up a stream that has not ended by itself.
    fn lose(&self, index: usize, error: io::Error) {
        if let Some(io) = self.streams[index].take() {
            watch::close_hard(&io.sock);
            self.broken(index, io, Broken::Lost(error));
        }
    }

    /// An interface went down: what runs over its address is lost, if anything else is left.
    pub fn link_down(&self, interface: u32) {
        let down = watch::over_interface(&self.link, interface, &self.streams, |io| &io.sock);
        if self.recovery && !down.is_empty() && down.len() < self.health.live() {
            for index in down {
                self.lose(index, watch::link_down());
            }
        }
    }

    /// A stream could not be connected again. That ends the connection when it was the last.
    pub fn gave_up(&self, index: usize, error: &Error) {
        if self.closing.load(Ordering::Acquire) || self.health.is_failed() {
            return;
        }
        if self.health.live() == 0 {
            self.fail_silently(error.clone().with_peer(&self.peer));
        } else {
            tracing::warn!(target: crate::os::log::NET, "stream {index} to {} stays down ({error}); going on with the others", self.peer);
        }
    }

    /// Whether nobody waits for this connection to be mended.
    pub fn is_over(&self) -> bool {
        self.closing.load(Ordering::Acquire) || self.health.is_failed() || self.health.is_peer_done()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Again for SendConn {
    fn again(&self, index: usize) {
        self.short.ends(index);
        self.run(index, READ | WRITE);
    }
}

impl Drop for SendConn {
    fn drop(&mut self) {
        self.net.streams_ended(*self.extra.get_mut());
    }
}

/// What the keeper does for a connection.
struct Chore {
    conn: Weak<SendConn>,
}

impl Source for Chore {
    fn poll(&self) -> Progress {
        self.conn.upgrade().map_or_else(Progress::default, |conn| conn.do_chores())
    }

    fn fail(&self, error: Error) {
        if let Some(conn) = self.conn.upgrade() {
            conn.fail(error);
        }
    }
}

struct StreamSource {
    conn: Weak<SendConn>,
    index: usize,
}

impl Source for StreamSource {
    fn poll(&self) -> Progress {
        let Some(conn) = self.conn.upgrade() else { return Progress::default() };
        if self.index > 0 {
            return Progress { moved: conn.run(self.index, READ | WRITE), again: None };
        }
        conn.begin_watch();
        if let Some(later) = conn.attention.is_attended() {
            return later;
        }
        let moved = conn.run(0, READ | WRITE);
        if !moved && conn.attention.is_stalled() {
            tracing::trace!(target: crate::os::log::NET, "waiting, to {}: {}", conn.peer, conn.state().core.describe());
        }
        conn.attention.looked(moved, || conn.requests.outstanding() > 0)
    }

    fn hot(&self) -> Duration {
        let brief = |conn: Arc<SendConn>| conn.brief.load(Ordering::Relaxed);
        if self.conn.upgrade().is_some_and(brief) { HOT_BETWEEN } else { HOT }
    }

    fn fail(&self, error: Error) {
        if let Some(conn) = self.conn.upgrade() {
            conn.fail(error);
        }
    }
}
