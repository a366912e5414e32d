//! The receiving side of a connection: core, streams, requests.
//!
//! `irecv` posts receives to the [`RecvCore`] and announces the long ones. `test` reads the first stream in the
//! caller's own thread; the workers read the others, each chunk straight into the posted buffer.
//!
//! Locks, in order: a stream (try-lock), then the state, then the outbox. None is held across a system call but
//! the stream's own.

mod sealed;

use std::ffi::c_void;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::acceptor::Listener;
use super::attend::Attention;
use super::frame::{HEADER, Header, Type};
use super::handshake::FEATURE_RECOVERY;
use super::limits::{BRIEF_MAX, MAX_STREAMS};
use super::net::{Link, Net, Sock, path_of};
use super::peer::{Broken, Health, Peer, failure, left_early, lost, told_by_peer};
use super::recv_core::{End, Part, Place, Posted, RecvCore, StageKey};
use super::seal::damage::Damage;
use super::seal::{Seal, Sides};
use super::shortage::{Again, Short};
use super::stream::{READ, Ran, Step, Stream, WRITE};
use super::watch::{self, Chores, Finding, Sight, Vigil};
use super::wire::{self, Piece};
use crate::engine::counters::Counters;
use crate::engine::events::{Chunk, Events};
use crate::engine::poller::{HOT, HOT_BETWEEN, Interest, Progress, Registration, Source};
use crate::engine::request::{MAX_PARTS, Outcome, RequestSlots, SLOTS, Ticket};
use crate::os::error::{Error, Result};

/// Bytes of a stream's input buffer. Short messages arrive in it together with their header, in one system call,
/// and are copied on. Of longer ones only the beginning passes through it, and the rest goes straight to its place:
/// a second system call (about 0.5 µs) is cheaper than copying more than this twice. 4 KiB of NCCL's data in its LL
/// protocol are 8 KiB, and have room with their header.
const INPUT: usize = 9 << 10;

/// How much of the input buffer is offered behind the rest of a chunk: room for the next headers.
const BEHIND: usize = 2 << 10;

/// Bytes that one run of a stream may read before the other streams of the same worker get their turn.
const SHARE: usize = 4 << 20;

/// How long an orderly close waits for its last acknowledgements to leave.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// How long it waits for a stream to come back when all are away.
const CLOSE_MENDING: Duration = Duration::from_secs(6);

/// How often a stream that is given up is read before, at most: a share each time, more than a socket holds.
const MOST_LOOKS: usize = 64;

/// How long a sender that has said goodbye may take to bring what it lost: as long as its close lasts.
const SENDER_MENDING: Duration = Duration::from_secs(20);

/// For how long a sign of trouble in the network explains why the peer is away.
const TROUBLE: Duration = Duration::from_secs(10);

/// How long a sender whose streams were all cut may take to come back before it counts as dead.
const RETURN_PATIENCE: Duration = Duration::from_millis(800);

#[derive(Clone, Copy)]
struct Target {
    data: *mut u8,
}

// SAFETY: the address of a posted buffer, which is the transport's until its request ends (rule 3 of the design).
unsafe impl Send for Target {}

struct State {
    core: RecvCore,
    /// Where each part of each request slot wants its bytes.
    targets: Vec<[Target; MAX_PARTS]>,
    /// Buffers of early messages, by staging key; boxed, so that their addresses stay while others come and go.
    stages: Vec<Option<Box<[u8]>>>,
    /// The stream and header with which a stage was opened.
    stage_heads: Vec<(usize, Header)>,
}

/// What the rest of a frame's payload is.
enum Body {
    /// Between frames.
    None,
    /// Bytes still to come, and where the next one goes.
    Data { to: Target, rest: usize },
}

struct Io {
    sock: Sock,
    /// The life of the stream that this is. Its end may be noticed in one thread while another begins the next.
    epoch: u16,
    input: Box<[u8]>,
    from: usize,
    to: usize,
    body: Body,
    /// Bytes that were looked at and are still in the socket ([`wire::peek`]).
    peeked: usize,
    /// The last look found nothing, so somebody waits for what comes next.
    awaited: bool,
    /// What a stream with checksums or encryption has beyond a plain one.
    seal: Option<Box<Sides>>,
    /// The part and offset of the chunk that is arriving, when a profiler is told of it.
    followed: Option<(Part, u64)>,
    out: Vec<u8>,
    sent: usize,
    /// An acknowledgement is due on this stream.
    ack: bool,
    /// Goodbye was said; nothing may follow it.
    parted: bool,
}

impl Io {
    /// Everything in the input buffer was taken but the beginning of a header: that moves to the front.
    #[inline]
    fn make_room(&mut self) {
        if self.from > 0 {
            if self.from < self.to {
                self.input.copy_within(self.from..self.to, 0);
            }
            (self.from, self.to) = (0, self.to - self.from);
        }
    }

    /// Reads what the socket has: the rest of the open frame's payload into its place, what is behind it into the input
    /// buffer. With `may_peek`, what somebody waits for is only looked at ([`wire::peek`]). Returns what [`wire::receive`]
    /// did, how many bytes there was room for, and how many of them for the payload.
    ///
    /// # Safety
    /// The body must be writable.
    #[inline]
    unsafe fn receive(&mut self, may_peek: bool) -> (io::Result<Option<usize>>, usize, usize) {
        let fd = self.sock.as_raw_fd();
        let (got, wanted, open) = match self.body {
            Body::None => {
                let room = Piece::of_mut(&mut self.input[self.to..]);
                let peeks = may_peek && self.awaited;
                // SAFETY: the input buffer is this stream's own.
                let got = unsafe { if peeks { wire::peek(fd, room) } else { wire::receive(fd, room) } };
                if let (true, Ok(Some(bytes))) = (peeks, &got) {
                    self.peeked = *bytes;
                }
                (got, room.length, 0)
            }
            Body::Data { to, rest } => {
                let pieces = [Piece { data: to.data, length: rest }, Piece::of_mut(&mut self.input[..BEHIND])];
                // SAFETY: as above; the caller vouches for the body.
                (unsafe { wire::receive_two(fd, pieces) }, rest + BEHIND, rest)
            }
        };
        if let Ok(bytes) = &got {
            self.awaited = bytes.is_none();
        }
        (got, wanted, open)
    }
}

/// A connection that receives.
pub struct RecvConn {
    me: Weak<Self>,
    net: Arc<Net>,
    link: Link,
    peer: Peer,
    state: Mutex<State>,
    outbox: Mutex<Vec<u8>>,
    /// Whether the outbox holds something: a look that spares its lock.
    mail: AtomicBool,
    /// The keeper found nobody calling: then what nobody waits for is acknowledged too, so that the sender need not
    /// keep its copies.
    quiet: AtomicBool,
    streams: Vec<Stream<Io>>,
    requests: RequestSlots,
    health: Health,
    attention: Attention,
    counters: Counters,
    damage: Damage,
    events: Events,
    recovery: bool,
    closing: AtomicBool,
    /// Whether the last long message was one of those that are over soon ([`BRIEF_MAX`]).
    brief: AtomicBool,
    /// Messages that were received, part by part.
    completed: AtomicU64,
    /// Where this connection's streams begin among the workers.
    turn: usize,
    /// Until when the peer must be back after the last stream went down, and what to say if it is not.
    alone_since: Mutex<Option<(Instant, Error)>>,
    /// Streams, with their epoch, that the sender gave up or that broke here.
    fences: Mutex<Vec<(usize, u16)>>,
    chores: Chores,
    vigils: Mutex<[Vigil; MAX_STREAMS]>,
    /// Streams for which the kernel had no memory.
    short: Short,
    /// When a stream last broke, or asked in vain, in a way that speaks of the network and not of the peer.
    trouble: Mutex<Option<Instant>>,
    /// Whether the first stream is connected.
    first_live: AtomicBool,
    /// Who gets this connection when the peer has said that it has the welcome.
    waiting: Mutex<Option<Arc<Listener>>>,
}

impl RecvConn {
    /// A connection without streams; the handshake adds the first when its welcome is on the way.
    pub fn new(net: Arc<Net>, link: Link, peer: Peer) -> Arc<Self> {
        let recovery = link.features & FEATURE_RECOVERY != 0;
        let turn = net.next_turn();
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            net,
            link,
            peer,
            state: Mutex::new(State {
                core: RecvCore::default(),
                targets: vec![[Target { data: std::ptr::null_mut() }; MAX_PARTS]; SLOTS],
                stages: Vec::new(),
                stage_heads: Vec::new(),
            }),
            outbox: Mutex::new(Vec::new()),
            mail: AtomicBool::new(false),
            quiet: AtomicBool::new(false),
            streams: (0..MAX_STREAMS).map(|_| Stream::default()).collect(),
            requests: RequestSlots::new(),
            health: Health::default(),
            attention: Attention::default(),
            counters: Counters::default(),
            damage: Damage::default(),
            events: Events::default(),
            recovery,
            closing: AtomicBool::new(false),
            brief: AtomicBool::new(false),
            completed: AtomicU64::new(0),
            turn,
            alone_since: Mutex::new(None),
            fences: Mutex::new(Vec::new()),
            chores: Chores::default(),
            vigils: Mutex::default(),
            short: Short::default(),
            trouble: Mutex::new(None),
            first_live: AtomicBool::new(false),
            waiting: Mutex::new(None),
        })
    }

    /// A place at the worker of stream `index` for a socket: all that may fail when a stream is added, so it comes before
    /// anything is told to the peer or changed here.
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    pub fn place(&self, index: usize, sock: &Sock) -> Result<Registration> {
        let source = Arc::new(StreamSource { conn: self.me.clone(), index });
        let fd = sock.as_raw_fd();
        if index == 0 {
            return self.net.poller.keeper()?.register(source, Some((fd, Interest::Quiet)));
        }
        self.net.poller.worker(self.turn + index)?.register(source, Some((fd, Interest::Data)))
    }

    /// Puts a connected socket to work as stream `index`. What was reported at its place before is made up for by a kick.
    pub fn add_stream(&self, index: usize, epoch: u16, place: Registration, sock: Sock, seal: Seal) {
        self.events.set_path(index, path_of(&sock, &self.link));
        let io = Io {
            sock,
            epoch,
            input: vec![0; INPUT].into_boxed_slice(),
            from: 0,
            to: 0,
            body: Body::None,
            peeked: 0,
            awaited: false,
            seal: seal.sides(),
            followed: None,
            out: Vec::new(),
            sent: 0,
            ack: false,
            parted: false,
        };
        self.health.stream_up();
        {
            let mut state = self.state();
            state.core.stream_up(index, epoch);
            lock(&self.vigils)[index] = Vigil::default();
            if index == 0 {
                self.first_live.store(true, Ordering::SeqCst);
            }
        }
        *self.alone() = None;
        // The first life of the first stream is 0, that of the others 1.
        if epoch > u16::from(index > 0) {
            Counters::bump(&self.counters.reconnects);
            let announcements = self.state().core.announcements();
            for header in announcements {
                self.mail(&header.encode());
            }
        }
        // In this order: a stream that breaks at once takes its registration with it.
        self.streams[index].watch(place);
        self.streams[index].install(Box::new(io));
        self.streams[index].kick();
    }

    /// A life of a stream has ended; `may_return`: not by a goodbye. Nothing when the next has begun already, which is
    /// then not touched: both take the state's lock for it.
    fn life_ended(&self, index: usize, epoch: u16, may_return: bool) {
        let state = self.state();
        if state.core.epoch(index) != epoch {
            return;
        }
        if may_return {
            lock(&self.vigils)[index].ended(Instant::now());
        }
        if index == 0 {
            self.first_live.store(false, Ordering::SeqCst);
        }
    }

    /// Starts a grouped receive; each part is buffer, capacity in bytes and tag. `None`: not now.
    ///
    /// # Errors
    /// When the connection has failed, or a message that is here already is longer than its receive.
    ///
    /// # Safety
    /// Every buffer must be writable for its capacity until the request ends or the connection is closed. `profilers`
    /// are NCCL's profiler handles of the parts, null or alive until `test` has told the end of the request.
    pub unsafe fn irecv(&self, parts: &[(*mut u8, usize, i32)], profilers: &[*mut c_void]) -> Result<Option<Ticket>> {
        self.health.check()?;
        let Some(ticket) = self.requests.take(parts.len()) else { return Ok(None) };
        for (part, profiler) in profilers.iter().enumerate() {
            self.events.follow(ticket.slot, part, *profiler);
        }
        let mut to_tell = false;
        let posted: Result<()> = {
            let mut state = self.state();
            if !parts.iter().all(|(_, _, tag)| state.core.has_room(*tag)) {
                // SAFETY: inside irecv.
                unsafe { self.events.abandon(ticket.slot) };
                self.requests.cancel(ticket);
                return Ok(None);
            }
            parts.iter().enumerate().try_for_each(|(part, &(data, capacity, tag))| {
                let to = Part { slot: ticket.slot, part: part as u8 };
                state.targets[ticket.slot as usize][part] = Target { data };
                match state.core.post(tag, capacity as u64, to)? {
                    Posted::Waits => {}
                    Posted::Announce(header) => {
                        self.mail(&header.encode());
                        to_tell = true;
                    }
                    Posted::Early(stage, total) => {
                        self.unstage(&mut state, stage, to, total);
                        // Credit that this has freed must reach the sender, who may wait for it.
                        to_tell |= state.core.owes_credit();
                    }
                }
                Ok(())
            })
        };
        if let Err(error) = posted {
            self.fail(error.with_peer(&self.peer));
            self.quiesce();
            // SAFETY: inside irecv.
            unsafe { self.events.abandon(ticket.slot) };
            self.requests.cancel(ticket);
            return self.health.check().map(|()| None);
        }
        if to_tell {
            self.run(0, WRITE);
            if !self.first_live.load(Ordering::Relaxed) {
                self.speak();
            }
        }
        if self.attention.wanted() {
            self.streams[0].kick();
        }
        Ok(Some(ticket))
    }

    /// Whom to tell of this connection's transfers.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Asks after a receive: the size of each part when all are done.
    ///
    /// # Errors
    /// When the connection has failed; nothing touches the buffers any more then.
    pub fn test(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        self.requests.check(ticket)?;
        if !self.requests.is_done(ticket) {
            self.glance(0);
            if !self.requests.is_done(ticket) {
                // SAFETY: NCCL's thread, which has not been told the end of any request that is outstanding.
                unsafe { self.events.report() };
                return self.not_yet(ticket);
            }
        }
        // SAFETY: NCCL's thread, which has not been told the end of any request that is outstanding.
        Ok(unsafe { self.events.finish(&self.requests, ticket) })
    }

    /// A request is not done. Fails if it can no longer become so.
    #[inline]
    fn not_yet(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        self.verdict().inspect_err(|_| {
            self.quiesce();
            // SAFETY: as above.
            unsafe { self.events.abandon(ticket.slot) };
            self.requests.abandon(ticket);
        })?;
        Ok(None)
    }

    /// Whether a request that is not done can still become so.
    #[inline]
    fn verdict(&self) -> Result<()> {
        self.health.check()?;
        if self.health.is_over() && !self.is_mending() {
            self.health.fail(left_early(&self.peer));
            return self.health.check();
        }
        Ok(())
    }

    /// Whether a stream was lost a short while ago. A sender that has said goodbye on the others comes back with what was
    /// on it.
    #[cold]
    fn is_mending(&self) -> bool {
        let now = Instant::now();
        self.recovery && lock(&self.vigils).iter().any(|vigil| vigil.may_return(now, SENDER_MENDING))
    }

    /// What the connection counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The key and features of the connection.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Ends the connection; no thread touches NCCL's buffers after it returns.
    pub fn close(&self) {
        if self.requests.outstanding() == 0 && !self.health.is_failed() {
            self.tell_last_words();
        }
        self.closing.store(true, Ordering::Release);
        if self.requests.outstanding() == 0 && !self.health.is_failed() {
            // For a sender whose streams die before they hear the goodbye.
            self.net.remember_closed(&self.link, self.completed.load(Ordering::Relaxed));
            // Each stream says goodbye for itself, behind its last acknowledgement: the sender reads them in any order.
            let deadline = Instant::now() + CLOSE_PATIENCE;
            while Instant::now() < deadline && !self.health.is_failed() {
                for index in 0..MAX_STREAMS {
                    self.run(index, WRITE);
                }
                let parted = |io: &Io| io.parted && io.sent == io.out.len();
                if self.streams.iter().all(|stream| stream.lock().as_ref().is_none_or(|io| parted(io))) {
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
        } else {
            let error = Error::remote("the receiving side closed the connection with transfers in flight");
            self.tell_failure(&error);
            self.health.fail(error);
        }
        self.quiesce();
        self.net.forget(self.link.connection);
        tracing::debug!(target: crate::os::log::NET, "closed the connection from {}: {}", self.peer, self.counters);
    }

    /// Before goodbye: what streams that are away have taken in. Their last acknowledgements may be lost, and the sender
    /// would take what has arrived for lost. With no stream left it waits for one, within bounds.
    fn tell_last_words(&self) {
        let deadline = Instant::now() + CLOSE_MENDING;
        while self.recovery && self.health.live() == 0 && !self.health.is_failed() && !self.health.is_peer_done() {
            if Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for index in 0..MAX_STREAMS {
            let epoch = self.state().core.epoch(index);
            if (epoch > 0 || index == 0) && self.streams[index].peek(|_| ()).is_none() {
                let frames = self.state().core.fence(index, epoch);
                if let Some(frames) = frames {
                    self.tell_fenced(index, epoch, frames);
                }
            }
        }
    }

    /// Ends the connection with a cause; the peer is told if it can be.
    pub fn fail(&self, error: Error) {
        self.tell_failure(&error);
        self.fail_silently(error);
    }

    fn fail_silently(&self, error: Error) {
        if self.health.fail(error.clone()) && !self.closing.load(Ordering::Acquire) && error.tell_once() {
            tracing::warn!(target: crate::os::log::NET, "receiving from {} failed: {error}", self.peer);
        }
    }

    fn tell_failure(&self, error: &Error) {
        if self.health.is_failed() {
            return;
        }
        self.mail(&failure(error));
        self.run(0, WRITE);
    }

    /// Has the other streams carry what the first cannot.
    fn speak(&self) {
        self.streams.iter().for_each(Stream::kick);
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

    /// Runs a stream in the calling thread, or has its present holder do so.
    fn run(&self, index: usize, wish: u8) -> bool {
        let step = |io: &mut Io, wishes| self.step(index, io, wishes);
        self.ran(index, self.streams[index].run(wish, step, |io, why| self.broken(index, io, why)))
    }

    /// Looks whether anything has come on a stream, unless another thread is looking.
    #[inline]
    fn glance(&self, index: usize) {
        self.attention.called();
        let step = |io: &mut Io, wishes| self.step(index, io, wishes);
        self.ran(index, self.streams[index].glance(READ, step, |io, why| self.broken(index, io, why)));
    }

    #[inline]
    fn ran(&self, index: usize, ran: Ran) -> bool {
        match ran {
            Ran::Settled(moved) => moved,
            Ran::More => {
                self.streams[index].kick();
                true
            }
        }
    }

    // Always: a frame of its own for each look would cost as much as what is done in it.
    #[inline(always)]
    fn step(&self, index: usize, io: &mut Io, wishes: u8) -> Step<Broken> {
        let mut moved = false;
        let mut more = false;
        if wishes & READ != 0 {
            match self.read(index, io) {
                Ok((read, left)) => (moved, more) = (read, left),
                Err(why) => return Step::Broken(why),
            }
        }
        let nothing_to_say = !io.ack && io.sent == io.out.len() && !self.mail.load(Ordering::Relaxed);
        if wishes & WRITE == 0 && nothing_to_say {
            return if more { Step::More } else { Step::Settled(moved) };
        }
        match self.write(index, io) {
            Ok(wrote) => moved |= wrote,
            Err(error) if self.health.is_peer_done() => {
                tracing::debug!(target: crate::os::log::NET, "{} is gone already: {error}", self.peer);
                return Step::Broken(Broken::Goodbye);
            }
            Err(error) => return Step::Broken(Broken::Lost(error)),
        }
        if more { Step::More } else { Step::Settled(moved) }
    }

    /// Reads until nothing is left or the share is used up: (whether anything came, whether more may be there).
    fn read(&self, index: usize, io: &mut Io) -> std::result::Result<(bool, bool), Broken> {
        if io.seal.is_some() {
            return self.read_sealed(index, io);
        }
        let mut share = SHARE;
        let mut moved = false;
        loop {
            if io.from < io.to {
                self.take_frames(index, io).map_err(Broken::Fatal)?;
            }
            if share == 0 {
                return Ok((true, true));
            }
            if io.peeked > 0 && !self.empty(index, io)? {
                return Ok((moved, false));
            }
            io.make_room();
            // SAFETY: the core has checked the body's range against the posted buffer of a request that has not ended, or
            // a staging buffer that lives until its message is copied.
            let (got, wanted, open) = unsafe { io.receive(index == 0) };
            match got {
                Ok(None) => return Ok((moved, false)),
                Err(error) if wire::is_shortage(&error) => {
                    self.starved(index, &error);
                    return Ok((moved, false));
                }
                Ok(Some(0)) if self.health.is_peer_done() => return Err(Broken::Goodbye),
                Ok(Some(0)) => return Err(Broken::Lost(io::ErrorKind::UnexpectedEof.into())),
                Err(_) if self.health.is_peer_done() => return Err(Broken::Goodbye),
                Err(error) => return Err(Broken::Lost(error)),
                Ok(Some(bytes)) => {
                    moved = true;
                    share = share.saturating_sub(bytes);
                    let placed = bytes.min(open);
                    io.to += bytes - placed;
                    if placed > 0 {
                        self.placed(index, io, placed);
                    }
                    // A short read means that the socket is empty: spare the call that would say so, unless a
                    // frame is still open, whose rest is likely to be here already.
                    if bytes < wanted && matches!(io.body, Body::None) {
                        self.take_frames(index, io).map_err(Broken::Fatal)?;
                        if matches!(io.body, Body::None) {
                            return Ok((true, false));
                        }
                    }
                }
            }
        }
    }

    /// Takes out of the socket what was only looked at. False: not all of it now.
    fn empty(&self, index: usize, io: &mut Io) -> std::result::Result<bool, Broken> {
        match wire::discard(io.sock.as_raw_fd(), io.peeked) {
            Ok(bytes) => io.peeked -= bytes.unwrap_or(0).min(io.peeked),
            Err(error) if wire::is_shortage(&error) => self.starved(index, &error),
            Err(_) if self.health.is_peer_done() => return Err(Broken::Goodbye),
            Err(error) => return Err(Broken::Lost(error)),
        }
        Ok(io.peeked == 0)
    }

    /// `bytes` of the open frame's payload are in place.
    fn placed(&self, index: usize, io: &mut Io, bytes: usize) {
        if let Body::Data { to, rest } = &mut io.body {
            *rest -= bytes;
            // SAFETY: still inside, or one past the end of, the checked range.
            to.data = unsafe { to.data.add(bytes) };
            if *rest == 0 {
                io.body = Body::None;
                self.chunk_ended(&mut io.followed);
                io.ack |= self.frame_ended(&mut self.state(), index);
            }
        }
    }

    /// Takes whole frames, and the beginning of a frame's payload, out of the input buffer.
    fn take_frames(&self, index: usize, io: &mut Io) -> Result<()> {
        loop {
            if let Body::Data { to, rest } = io.body {
                let here = rest.min(io.to - io.from);
                if here > 0 {
                    // SAFETY: source is the input buffer, destination the checked range; they do not overlap.
                    unsafe { wire::copy_ascending(io.input.as_ptr().add(io.from), to.data, here) };
                    io.from += here;
                    self.placed(index, io, here);
                }
                if !matches!(io.body, Body::None) {
                    return Ok(());
                }
            }
            if io.to - io.from < HEADER {
                return Ok(());
            }
            let bytes: &[u8; HEADER] = io.input[io.from..io.from + HEADER].try_into().expect("a header's worth");
            let header = Header::decode(bytes)?;
            if header.kind == Type::Fail {
                // The text must be whole; the buffer is far larger than the longest.
                if io.to - io.from < HEADER + header.length as usize {
                    return Ok(());
                }
                return Err(told_by_peer(header.order, &io.input[io.from + HEADER..][..header.length as usize]));
            }
            io.from += HEADER;
            if header.kind != Type::Data {
                self.heard(io, &header)?;
                continue;
            }
            let mut state = self.state();
            let to = self.frame_began(&mut state, index, &header, &mut io.followed)?;
            let length = header.length as usize;
            if length > io.to - io.from {
                io.body = Body::Data { to, rest: length };
                continue;
            }
            // All of it is here: placed and ended in one go.
            // SAFETY: source is the input buffer, destination the checked range; they do not overlap.
            unsafe { wire::copy_ascending(io.input.as_ptr().add(io.from), to.data, length) };
            io.from += length;
            self.chunk_ended(&mut io.followed);
            io.ack |= self.frame_ended(&mut state, index);
        }
    }

    /// Does what a frame of the sender says that is not a chunk.
    fn heard(&self, io: &mut Io, header: &Header) -> Result<()> {
        match header.kind {
            Type::Bye => {
                self.health.peer_is_done();
                // The sender's close waits for the kernel's acknowledgement, which may be delayed by 40 ms, and which the
                // kernel does not send while bytes are left in the socket.
                if let Ok(Some(bytes)) = wire::discard(io.sock.as_raw_fd(), io.peeked) {
                    io.peeked -= bytes.min(io.peeked);
                }
                let _ = io.sock.set_tcp_quickack(true);
                io.ack = true;
            }
            Type::Ask => {
                let mut state = self.state();
                let kept_back = state.core.end_silence();
                let answer = state.core.ask(header.tag, header.order, header.total)?;
                for answer in kept_back.into_iter().chain(answer) {
                    self.mail(&answer.encode());
                }
            }
            Type::Fence => {
                // Fencing takes the other stream's lock; the keeper does it, who holds none.
                lock(&self.fences).push(super::peer::fenced_life(header)?);
                self.call_keeper();
            }
            other => return Err(Error::remote(format!("the sending side sent a {other:?} frame"))),
        }
        Ok(())
    }

    fn frame_began(
        &self,
        state: &mut State,
        index: usize,
        header: &Header,
        followed: &mut Option<(Part, u64)>,
    ) -> Result<Target> {
        Counters::count(&self.counters.chunks, 1);
        Counters::count(&self.counters.bytes, u64::from(header.length));
        if index > 0 {
            self.brief.store(header.total < BRIEF_MAX, Ordering::Relaxed);
        }
        match state.core.begin(index, header)? {
            Place::Posted(part, offset) => {
                if self.events.hears() {
                    *followed = Some((part, offset));
                    self.events.chunk_begins(part.slot, usize::from(part.part), &told(header, index));
                }
                let base = state.targets[part.slot as usize][part.part as usize].data;
                // SAFETY: the core has checked that the chunk fits the posted buffer.
                Ok(Target { data: unsafe { base.add(offset as usize) } })
            }
            Place::Staged(stage) => {
                Counters::count(&self.counters.early, 1);
                if state.stages.len() <= stage {
                    state.stages.resize_with(stage + 1, || None);
                    state.stage_heads.resize(stage + 1, (index, *header));
                }
                state.stage_heads[stage] = (index, *header);
                let buffer = state.stages[stage].insert(vec![0; header.length as usize].into_boxed_slice());
                Ok(Target { data: buffer.as_mut_ptr() })
            }
        }
    }

    #[inline]
    fn chunk_ended(&self, followed: &mut Option<(Part, u64)>) {
        if let Some((part, offset)) = followed.take() {
            self.events.chunk_ends(part.slot, usize::from(part.part), offset);
        }
    }

    /// The payload of a frame is in its place. Returns whether its acknowledgement is due.
    fn frame_ended(&self, state: &mut State, index: usize) -> bool {
        match state.core.end(index) {
            End::More | End::Staged => {}
            End::Complete(part, total) => self.complete(part, total),
            End::Unstage(stage, part, total) => self.unstage(state, stage, part, total),
        }
        state.core.is_ack_due(index)
    }

    fn unstage(&self, state: &mut State, stage: StageKey, part: Part, total: u64) {
        let buffer = state.stages[stage].take().expect("a staged message has its buffer");
        let to = state.targets[part.slot as usize][part.part as usize].data;
        // SAFETY: the core has checked that the message fits the posted buffer, and the two are different memory.
        unsafe { wire::copy_ascending(buffer.as_ptr(), to, total as usize) };
        let (index, head) = state.stage_heads[stage];
        state.core.unstaged(head.tag, stage);
        if self.events.hears() {
            // It arrived before its request was made: all that can be told is that it is here.
            self.events.chunk_begins(part.slot, usize::from(part.part), &told(&head, index));
        }
        self.complete(part, total);
    }

    /// Called with the state locked.
    #[inline]
    fn complete(&self, part: Part, total: u64) {
        Counters::count(&self.counters.messages, 1);
        Counters::count(&self.completed, 1);
        self.requests.complete_part(part.slot, usize::from(part.part), total);
    }

    fn write(&self, index: usize, io: &mut Io) -> io::Result<bool> {
        let mut moved = false;
        loop {
            if io.sent == io.out.len() {
                io.out.clear();
                io.sent = 0;
                io.ack = false;
                if self.mail.swap(false, Ordering::AcqRel) {
                    std::mem::swap(&mut io.out, &mut *self.outbox());
                }
                // An acknowledgement speaks of the stream that it travels on.
                let quiet = self.quiet.load(Ordering::Relaxed);
                let force = quiet || self.health.is_peer_done() || self.closing.load(Ordering::Relaxed);
                if let Some(header) = self.state().core.take_ack(index, force) {
                    io.out.extend_from_slice(&header.encode());
                }
                if self.closing.load(Ordering::Acquire) && !io.parted && !self.health.is_failed() {
                    io.parted = true;
                    // So that the sender knows, should acknowledgements be lost.
                    let total = self.completed.load(Ordering::Relaxed) + 1;
                    io.out.extend_from_slice(&Header { total, ..Header::of(Type::Bye, 0) }.encode());
                }
                if io.out.is_empty() {
                    return Ok(moved);
                }
                if let Some(sides) = &mut io.seal {
                    sides.sealer.control(&mut io.out);
                }
            }
            // SAFETY: both pieces are this stream's own buffers.
            let sent = unsafe { wire::send(io.sock.as_raw_fd(), Piece::of(&io.out[io.sent..])) };
            let bytes = match sent {
                Ok(Some(bytes)) => bytes,
                Ok(None) => return Ok(moved),
                Err(error) if wire::is_shortage(&error) => {
                    self.starved(index, &error);
                    return Ok(moved);
                }
                Err(error) => return Err(error),
            };
            moved = true;
            io.sent += bytes;
        }
    }

    /// The kernel had no memory for a call on a stream: another one in a moment.
    fn starved(&self, index: usize, error: &io::Error) {
        if self.short.begins(index) {
            self.net.shortages.wait(&self.net.poller, self.me.clone(), index, error);
        }
    }

    /// Tells the peer of a failure on the stream that met it, which may be the only one.
    fn part_in_anger(&self, mut io: Io, error: &Error) {
        if !self.health.is_failed() {
            let mut words = failure(error);
            if let Some(sides) = &mut io.seal {
                sides.sealer.control(&mut words);
            }
            io.out.extend_from_slice(&words);
            // SAFETY: both pieces are this stream's own buffers. What the socket does not take is lost, and the peer
            // learns of the end without the reason.
            let _ = unsafe { wire::send(io.sock.as_raw_fd(), Piece::of(&io.out[io.sent..])) };
        }
        self.net.linger(io.sock);
    }

    /// A stream ended. Decides whether that ends the connection.
    fn broken(&self, index: usize, io: Box<Io>, why: Broken) {
        let epoch = io.epoch;
        if let Broken::Lost(error) = &why {
            self.note_trouble(&io, error);
        }
        self.life_ended(index, epoch, matches!(why, Broken::Lost(_)));
        match &why {
            Broken::Fatal(error) => self.part_in_anger(*io, error),
            _ => drop(io),
        }
        let left = self.health.stream_down();
        match why {
            Broken::Fatal(error) => self.fail(error.with_peer(&self.peer)),
            Broken::Goodbye => {}
            Broken::Lost(_) if self.closing.load(Ordering::Acquire) => {}
            Broken::Lost(error) if self.recovery => {
                tracing::info!(target: crate::os::log::NET, "a stream from {} broke ({error}); waiting for it to come back", self.peer);
                if left == 0 {
                    self.wait_for_peer(&error);
                } else {
                    // The sender may not know.
                    lock(&self.fences).push((index, epoch));
                    self.call_keeper();
                }
            }
            Broken::Lost(error) => self.fail_silently(lost(&error).with_peer(&self.peer)),
        }
    }

    /// Remembers whether the end of a stream, or what came before it, speaks of the network. When a process dies all
    /// its streams end at once, without any of that.
    fn note_trouble(&self, io: &Io, error: &io::Error) {
        let ended = matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset);
        if !ended || Sight::of(&io.sock).is_some_and(|sight| sight.asked > 0) {
            *lock(&self.trouble) = Some(Instant::now());
        }
    }

    /// All streams are gone. The sender connects again if it lives; how long that may take depends on what was seen: an
    /// end of file or a reset came over a working path, so its owner is either back at once or dead. Unless the
    /// network is in trouble: then who lost its last stream may need a while to find another way.
    fn wait_for_peer(&self, error: &io::Error) {
        let now = Instant::now();
        // A process that dies takes all its streams with it at once.
        let one_by_one = lock(&self.vigils).iter().any(|vigil| vigil.is_long_away(now));
        let in_trouble = one_by_one || lock(&self.trouble).is_some_and(|at| now - at < TROUBLE);
        let patience = match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset if !in_trouble => RETURN_PATIENCE,
            _ => self.net.patience(error),
        };
        *self.alone() = Some((now + patience, lost(error).with_peer(&self.peer)));
        // Another thread may have brought a stream back before that was said.
        if self.health.live() > 0 {
            *self.alone() = None;
            return;
        }
        self.call_keeper();
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

    /// The keeper's part: fences, a deadline for the peer's return, a look at the streams.
    fn do_chores(&self) -> Progress {
        let fences = std::mem::take(&mut *lock(&self.fences));
        for (index, epoch) in fences {
            if let Some(frames) = self.fence_stream(index, epoch) {
                *lock(&self.trouble) = Some(Instant::now());
                self.tell_fenced(index, epoch, frames);
            }
        }
        if self.is_over() {
            self.chores.end();
            return Progress::default();
        }
        let now = Instant::now();
        let alone = self.alone().clone();
        let deadline = match alone {
            Some((deadline, error)) if now >= deadline => {
                self.fail_silently(error);
                self.chores.end();
                return Progress::default();
            }
            Some((deadline, _)) => Some(deadline),
            None => None,
        };
        let look = if self.chores.is_ticking() { self.look(now) } else { None };
        Progress { moved: false, again: deadline.into_iter().chain(look).min() }
    }

    /// Looks at the streams when it is time. Says when the next look is due.
    fn look(&self, now: Instant) -> Option<Instant> {
        if let Err(due) = self.chores.is_due(now) {
            return Some(due);
        }
        let mut next = watch::TICK;
        // How long nothing has come back on any stream.
        let mut least = None;
        let mut outstanding = self.requests.outstanding() > 0;
        let mut silent = Vec::new();
        for (index, stream) in self.streams.iter().enumerate() {
            let found = stream.peek(|io| {
                let sight = Sight::of(&io.sock)?;
                outstanding |= sight.outstanding;
                let unheard = if sight.asked > 0 { sight.silent } else { Duration::ZERO };
                least = Some(least.map_or(unheard, |least: Duration| least.min(unheard)));
                Some(lock(&self.vigils)[index].look(now, sight))
            });
            match found.flatten() {
                Some(Finding::Asking) => next = watch::SOON,
                Some(Finding::Lost(silence)) => silent.push((index, silence)),
                Some(Finding::Well) | None => {}
            }
        }
        if let Some(silence) = least.filter(|least| *least >= self.net.config.peer_timeout) {
            self.fail_silently(super::peer::lost(&watch::silent(silence)).with_peer(&self.peer));
            self.chores.end();
            return None;
        }
        watch::share_fate(&mut silent, &self.streams, |io| &io.sock);
        if !silent.is_empty() {
            next = watch::SOON;
            self.lose_silent(&silent);
        }
        if !outstanding {
            self.chores.end();
            return None;
        }
        self.chores.again(now, next).again
    }

    /// Gives up streams on which nothing comes back. The last ones stay until the peer counts as gone: it is the sender
    /// who connects again, and should the path come back first, all goes on as before.
    fn lose_silent(&self, silent: &[(usize, Duration)]) {
        *lock(&self.trouble) = Some(Instant::now());
        if self.recovery && silent.len() < self.health.live() {
            for &(index, silence) in silent {
                self.lose(index, &watch::silent(silence));
            }
        } else if let Some((_, silence)) = silent.iter().find(|(_, silence)| *silence >= self.net.config.peer_timeout) {
            self.fail_silently(lost(&watch::silent(*silence)).with_peer(&self.peer));
        }
    }

    /// Gives up a stream while others live, and tells the sender, who may not know.
    fn lose(&self, index: usize, error: &io::Error) {
        // First what has arrived already: its sender may have closed, since this host's kernel has acknowledged it. The
        // stream is waited for: who has it now may not look again before it is taken away.
        for _ in 0..MOST_LOOKS {
            let step = |io: &mut Io, wishes| self.step(index, io, wishes);
            let held = Some(self.streams[index].lock());
            let ran = self.streams[index].run_held(held, READ, step, |io, why| self.broken(index, io, why));
            if ran == Ran::Settled(false) {
                break;
            }
        }
        let epoch = self.state().core.epoch(index);
        self.streams[index].peek(|io| watch::close_hard(&io.sock));
        let Some(frames) = self.fence_stream(index, epoch) else { return };
        tracing::info!(target: crate::os::log::NET, "a stream from {} broke ({error}); waiting for it to come back", self.peer);
        self.tell_fenced(index, epoch, frames);
    }

    /// Says how far a fenced stream came, and again what may have been lost on it. On every stream, since some of them
    /// may lead nowhere too.
    fn tell_fenced(&self, index: usize, epoch: u16, frames: u64) {
        let fenced =
            Header { order: index as u64, offset: u64::from(epoch), total: frames, ..Header::of(Type::Fenced, 0) };
        let announcements = self.state().core.announcements();
        let words: Vec<u8> = std::iter::once(fenced).chain(announcements).flat_map(|header| header.encode()).collect();
        for (on, stream) in self.streams.iter().enumerate() {
            let say = |io: &mut Io| {
                let mut words = words.clone();
                if let Some(sides) = &mut io.seal {
                    sides.sealer.control(&mut words);
                }
                io.out.extend_from_slice(&words);
            };
            if stream.peek(say).is_some() {
                self.run(on, WRITE);
            }
        }
    }

    /// An interface went down: what runs over its address is lost, if anything else is left.
    pub fn link_down(&self, interface: u32) {
        let down = watch::over_interface(&self.link, interface, &self.streams, |io| &io.sock);
        if self.recovery && !down.is_empty() && down.len() < self.health.live() {
            *lock(&self.trouble) = Some(Instant::now());
            for index in down {
                self.lose(index, &watch::link_down());
            }
        }
    }

    /// Ends the given life of a stream for good: nothing more is taken from it. Says how many frames were, or
    /// nothing when that life is over already.
    pub fn fence_stream(&self, index: usize, epoch: u16) -> Option<u64> {
        if index >= MAX_STREAMS {
            return None;
        }
        // The stream may have come back meanwhile.
        if self.state().core.has_outlived(index, epoch) {
            return None;
        }
        if let Some(io) = self.streams[index].take() {
            self.health.stream_down();
            self.life_ended(index, io.epoch, true);
        }
        self.state().core.fence(index, epoch)
    }

    /// A peer with the connection's key wants to connect stream `index` in `epoch`. Ends the stream's former life and
    /// says how many frames of all its lives were taken in, or nothing when it may not join.
    pub fn prepare_join(&self, index: usize, epoch: u16) -> Option<u64> {
        let newer = index < MAX_STREAMS && (epoch.wrapping_sub(self.state().core.epoch(index)) as i16) > 0;
        if !newer || self.is_over() {
            return None;
        }
        self.fence_stream(index, epoch.wrapping_sub(1))
    }

    /// The listener gets this connection when the peer has said a word.
    pub fn wait_for_word(&self, listener: Arc<Listener>) {
        *lock(&self.waiting) = Some(listener);
    }

    /// Whether that word is still to come.
    pub fn is_waiting(&self) -> bool {
        lock(&self.waiting).is_some()
    }

    /// The word has come: who is to get the connection now. None when it was got before.
    pub fn leave_waiting(&self) -> Option<Arc<Listener>> {
        lock(&self.waiting).take()
    }

    /// Counts as a stream until it is dropped. If no other has come by then, the peer is waited for.
    pub fn hold_open(&self) -> impl Drop + '_ {
        struct Open<'a>(&'a RecvConn);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                let conn = self.0;
                if conn.health.stream_down() == 0 && !conn.is_over() && conn.alone().is_none() {
                    conn.wait_for_peer(&io::ErrorKind::NotConnected.into());
                }
            }
        }
        self.health.stream_up();
        Open(self)
    }

    /// Whether nobody waits for this connection to be mended.
    pub fn is_over(&self) -> bool {
        self.closing.load(Ordering::Acquire) || self.health.is_failed()
    }

    fn alone(&self) -> MutexGuard<'_, Option<(Instant, Error)>> {
        self.alone_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something to tell the peer, on whatever stream is written next.
    fn mail(&self, frame: &[u8]) {
        self.outbox().extend_from_slice(frame);
        self.mail.store(true, Ordering::Release);
    }

    fn outbox(&self) -> MutexGuard<'_, Vec<u8>> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A chunk as a profiler is told of it.
fn told(header: &Header, stream: usize) -> Chunk {
    Chunk {
        offset: header.offset,
        length: u64::from(header.length),
        path: stream as u16,
        message: header.message,
        total: header.total,
        ..Chunk::default()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct StreamSource {
    conn: Weak<RecvConn>,
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
        conn.quiet.store(true, Ordering::Relaxed);
        let moved = conn.run(0, READ | WRITE);
        conn.quiet.store(false, Ordering::Relaxed);
        if !moved && conn.attention.is_stalled() {
            tracing::trace!(target: crate::os::log::NET, "waiting, from {}: {}", conn.peer, conn.state().core.describe());
        }
        conn.attention.looked(moved, || conn.requests.outstanding() > 0)
    }

    fn hot(&self) -> Duration {
        let brief = |conn: Arc<RecvConn>| conn.brief.load(Ordering::Relaxed);
        if self.conn.upgrade().is_some_and(brief) { HOT_BETWEEN } else { HOT }
    }

    fn fail(&self, error: Error) {
        if let Some(conn) = self.conn.upgrade() {
            conn.fail(error);
        }
    }
}

impl Again for RecvConn {
    fn again(&self, index: usize) {
        self.short.ends(index);
        self.run(index, READ | WRITE);
    }
}

impl Drop for RecvConn {
    fn drop(&mut self) {
        self.net.forget(self.link.connection);
    }
}

/// What the keeper does for a connection.
struct Chore {
    conn: Weak<RecvConn>,
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
