//! The receiving side of a connection: core, streams, requests.
//!
//! `irecv` posts receives to the [`RecvCore`] and announces the long ones. `test` reads the first stream in the
//! caller's own thread; the workers read the others, each chunk straight into the posted buffer.
//!
//! Locks, in order: a stream (try-lock), then the state, then the outbox. None is held across a system call but
//! the stream's own.

mod arrivals;
mod closing;
mod joining;
mod mending;
mod moving;
mod sealed;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub use arrivals::Arrivals;

use super::help::Help;
use super::polled;
use super::recv_core::{Due, Part, Posted, RecvCore};
use super::rest::Rest;
use super::stream::{READ, Ran, Stream, WRITE};
use crate::engine::counters::Counters;
use crate::engine::events::{Chunk, Events};
use crate::engine::poller::{HOT, HOT_BETWEEN, Interest, Progress, Registration, Source};
use crate::engine::request::{MAX_PARTS, Outcome, RequestSlots, SLOTS, Ticket};
use crate::engine::span::Span;
use crate::os::error::{Error, Result};
use crate::os::ticks::Ticks;
use crate::session::attend::Attention;
use crate::session::frame::Header;
use crate::session::frame::MAX_STREAMS;
use crate::session::handshake::{FEATURE_FAR, FEATURE_RECOVERY};
use crate::session::lifeline::{Alone, Ended};
use crate::session::link::{Link, Sock, path_of};
use crate::session::net::Net;
use crate::session::peer::{Health, Peer, failure, fenced, left_early};
use crate::session::seal::damage::Damage;
use crate::session::seal::{Seal, Sides};
use crate::session::shortage::{Again, Short};
use crate::session::watch::{Chores, Vigil};
use crate::session::wire::{self, Piece};

/// Bytes of a stream's input buffer. Short messages arrive in it together with their header, in one system call,
/// and are copied on. Of longer ones only the beginning passes through it, and the rest goes straight to its place:
/// a second system call (about 0.5 µs) is cheaper than copying more than this twice. 4 KiB of NCCL's data in its LL
/// protocol are 8 KiB, and have room with their header.
const INPUT: usize = 9 << 10;

/// How much of the input buffer is offered behind the rest of a chunk: room for the next headers.
const BEHIND: usize = 2 << 10;

/// Bytes that one run of a stream may read before the other streams of the same worker get their turn.
const SHARE: usize = 4 << 20;

/// How long a sender that has said goodbye may take to resend what it lost: as long as its close lasts.
const SENDER_MENDING: Duration = Duration::from_secs(20);

#[derive(Clone, Copy)]
struct Target {
    data: *mut u8,
}

/// The buffer of a part whose request is outstanding; none for the others.
type Wanted = Option<(Target, usize)>;

// SAFETY: the address of a posted buffer, which the transport may use until its request ends (rule 3 of the design).
unsafe impl Send for Target {}

struct State {
    core: RecvCore,
    /// Where the bytes of each part of each request slot go, and how many fit there. None from the part's end on: then
    /// no thread touches the buffer.
    targets: Vec<[Wanted; MAX_PARTS]>,
    /// The chunks of messages that are reported to a profiler when all have arrived, and since when: only a few at a
    /// time.
    joined: Vec<(Part, Chunk, Ticks)>,
    /// Buffers of early messages, by staging key: each an allocation of its own, whose address stays while others come and go.
    stages: Vec<Option<Vec<u8>>>,
    /// The stream and header with which a stage was opened.
    stage_heads: Vec<(usize, Header)>,
}

/// What the rest of a frame's payload is.
enum Body {
    /// Between frames.
    None,
    /// Bytes still to come, and where the next one goes. What is polled must not be written by the kernel.
    Data { to: Target, rest: usize, polled: bool },
}

/// A chunk that is arriving and will be reported to a profiler.
#[derive(Clone, Copy)]
struct Followed {
    part: Part,
    chunk: Chunk,
    /// When it began, if nothing has been reported of it yet.
    began: Option<Ticks>,
}

struct Io {
    sock: Sock,
    /// The epoch of the stream. One thread may notice its end while another begins the next.
    epoch: u16,
    input: Box<[u8]>,
    from: usize,
    to: usize,
    body: Body,
    /// Bytes that were peeked at and are still in the socket ([`wire::peek`]).
    peeked: usize,
    /// The last poll found nothing, so a request waits for what comes next.
    awaited: bool,
    /// The additional state of a stream with checksums or encryption.
    seal: Option<Box<Sides>>,
    /// The chunk that is arriving, when it is reported to a profiler.
    followed: Option<Followed>,
    out: Vec<u8>,
    sent: usize,
    /// Whether an acknowledgement is due on this stream.
    ack: Due,
    /// It was already deferred to the next poll once.
    put_off: bool,
    /// The goodbye was sent; nothing may follow it.
    parted: bool,
    /// The sender has said goodbye on this stream.
    heard_goodbye: bool,
}

impl Io {
    /// Adds frames without payload to what goes out on this stream.
    fn say(&mut self, mut words: Vec<u8>) {
        if let Some(sides) = &mut self.seal {
            sides.sealer.control(&mut words);
        }
        self.out.extend_from_slice(&words);
    }

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
    /// buffer. With `may_peek`, what a request waits for is only peeked at ([`wire::peek`]). Returns what [`wire::receive`]
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
            Body::Data { to, rest, polled: true } => polled::with_buffer(rest, |bounce| {
                let behind = if bounce.len() == rest { BEHIND } else { 0 };
                let pieces = [Piece::of_mut(bounce), Piece::of_mut(&mut self.input[..behind])];
                // SAFETY: both buffers are ours.
                let got = unsafe { wire::receive_two(fd, pieces) };
                if let Ok(Some(bytes)) = got {
                    // SAFETY: the caller keeps the promise about the body; the buffer is not a part of it.
                    unsafe { wire::copy_ascending(bounce.as_ptr(), to.data, bytes.min(bounce.len())) };
                }
                (got, bounce.len() + behind, bounce.len())
            }),
            Body::Data { to, rest, polled: false } => {
                let pieces = [Piece { data: to.data, length: rest }, Piece::of_mut(&mut self.input[..BEHIND])];
                // SAFETY: as above; the caller keeps the promise about the body.
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
    /// Whether the outbox holds something: a check without its lock.
    mail: AtomicBool,
    /// The control thread found NCCL not calling: then what no send waits for is acknowledged too, so that the sender need
    /// not keep its copies.
    quiet: AtomicBool,
    streams: Vec<Stream<Io>>,
    requests: RequestSlots,
    health: Health,
    attention: Attention,
    rest: Rest,
    help: Help,
    /// The last message came over other streams than the first, in parts.
    striped: AtomicBool,
    counters: Counters,
    damage: Damage,
    events: Events,
    recovery: bool,
    closing: AtomicBool,
    /// Whether the last long message was one of those that are over soon ([`BRIEF_MAX`]).
    brief: AtomicBool,
    /// Messages that were received, part by part.
    completed: AtomicU64,
    /// From the sender's goodbye: the number of its messages plus one. 0: none yet.
    announced: AtomicU64,
    /// Where this connection's streams begin among the workers.
    turn: usize,
    /// What is known of the peer since the last stream went down.
    alone_since: Mutex<Option<Alone>>,
    ended: Ended,
    /// Epochs of streams that the sender gave up or that ended here.
    fences: Mutex<Vec<Fence>>,
    chores: Chores,
    vigils: Mutex<[Vigil; MAX_STREAMS]>,
    /// Streams for which the kernel had no memory.
    short: Short,
    /// When a stream last broke, or a query was unanswered, in a way that indicates trouble in the network and not at
    /// the peer.
    trouble: Mutex<Option<Instant>>,
    /// Whether the first stream is connected.
    first_live: AtomicBool,
    /// The listener that gets this connection when the peer has confirmed the welcome.
    waiting: Mutex<Option<Arc<Arrivals>>>,
}

/// An epoch of a stream that the control thread must fence.
struct Fence {
    index: usize,
    epoch: u16,
    /// Whether the sender requested it.
    asked: bool,
}

impl RecvConn {
    /// A connection without streams; the handshake adds the first when its welcome is on the way.
    pub fn new(net: Arc<Net>, link: Link, peer: Peer) -> Arc<Self> {
        let recovery = link.features & FEATURE_RECOVERY != 0;
        let far = link.features & FEATURE_FAR != 0;
        let turn = net.next_turn();
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            net,
            link,
            peer,
            state: Mutex::new(State {
                core: RecvCore::new(far),
                targets: vec![[None; MAX_PARTS]; SLOTS],
                joined: Vec::new(),
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
            rest: Rest::default(),
            help: Help::default(),
            striped: AtomicBool::new(false),
            counters: Counters::default(),
            damage: Damage::default(),
            events: Events::default(),
            recovery,
            closing: AtomicBool::new(false),
            brief: AtomicBool::new(false),
            completed: AtomicU64::new(0),
            announced: AtomicU64::new(0),
            turn,
            alone_since: Mutex::new(None),
            ended: Ended::default(),
            fences: Mutex::new(Vec::new()),
            chores: Chores::default(),
            vigils: Mutex::default(),
            short: Short::default(),
            trouble: Mutex::new(None),
            first_live: AtomicBool::new(false),
            waiting: Mutex::new(None),
        })
    }

    /// Registers a socket with the worker of stream `index`: every step of adding a stream that may fail, so it comes
    /// before the peer is notified or anything is changed here.
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    pub fn place(&self, index: usize, sock: &Sock) -> Result<Registration> {
        let source = Arc::new(StreamSource { conn: self.me.clone(), index });
        let fd = sock.as_raw_fd();
        if index == 0 {
            return self.net.poller.keeper()?.register(source, Some((fd, Interest::Quiet)));
        }
        self.net.worker(self.turn, index, self.link.pairs())?.register(source, Some((fd, Interest::Data)))
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
            ack: Due::Later,
            put_off: false,
            parted: false,
            heard_goodbye: false,
        };
        self.health.stream_up();
        // In this order: a stream that breaks at once takes its registration with it.
        self.streams[index].watch(place);
        match self.streams[index].install_as(Box::new(io), |io| self.life_begins(index, epoch, io)) {
            Ok(()) => self.streams[index].kick(),
            Err(late) => self.let_go(*late),
        }
    }

    /// The next epoch of a stream begins, with the frames that must be sent on it first.
    fn life_begins(&self, index: usize, epoch: u16, io: &mut Io) {
        {
            let mut state = self.state();
            state.core.stream_up(index, epoch);
            self.ended.forget();
            lock(&self.vigils)[index] = Vigil::default();
            if index == 0 {
                self.first_live.store(true, Ordering::SeqCst);
            }
        }
        *self.alone() = None;
        // Frames about other streams that have ended may be lost with the streams that carried them, so that the sender
        // still considers those streams connected.
        let ended = self.state().core.ended_lives();
        if !ended.is_empty() {
            io.say(ended.into_iter().flat_map(|life| fenced(life).encode()).collect());
        }
        // The first epoch of the first stream is 0, that of the others 1.
        if epoch > u16::from(index > 0) {
            Counters::bump(&self.counters.reconnects);
            self.state().core.announcements().for_each(|header| self.mail(&header.encode()));
        }
    }

    /// An epoch of a stream has ended; `may_return`: not by a goodbye. Does nothing when the next has already begun,
    /// which is then unaffected: both take the state's lock for it.
    fn life_ended(&self, index: usize, epoch: u16, may_return: bool, why: Option<&io::Error>) {
        let state = self.state();
        if state.core.epoch(index) != epoch {
            return;
        }
        if let Some(error) = why {
            self.ended.note(error);
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
    /// When a message that is here already is longer than its receive.
    ///
    /// # Safety
    /// Every buffer must be writable for its capacity until the request ends, the memory is withdrawn or the connection
    /// is closed. `profilers` are NCCL's profiler handles of the parts, null or valid until `test` has reported the end
    /// of the request.
    pub unsafe fn irecv(&self, parts: &[(*mut u8, usize, i32)], profilers: &[*mut c_void]) -> Result<Option<Ticket>> {
        if self.health.is_failed() {
            // As NCCL's own transports do: the call is accepted, and `test` returns the error.
            return Ok(self.requests.take(parts.len()));
        }
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
                state.targets[ticket.slot as usize][part] = Some((Target { data }, capacity));
                match state.core.post(tag, capacity as u64, to)? {
                    Posted::Waits => {}
                    Posted::Announce(header) => {
                        self.mail(&header.encode());
                        to_tell = true;
                    }
                    Posted::Early(stage, total) => {
                        self.unstage(&mut state, stage, to, total);
                        // Credit that this has freed must be sent to the sender, which may wait for it.
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

    /// Sets the receiver of this connection's profiler events.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// The outcome of a receive: the size of each part when all are done.
    ///
    /// # Errors
    /// When the connection has failed; nothing touches the buffers any more then.
    pub fn test(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        self.requests.check(ticket)?;
        if !self.requests.is_done(ticket) {
            if !self.rest.goes_on() {
                self.glance();
            }
            let is_done = || self.requests.is_done(ticket);
            if !(is_done() || self.help.waits(&self.counters.chunks, || self.glance_further()) && is_done()) {
                // SAFETY: NCCL's thread, and NCCL has not received the end of any outstanding request.
                unsafe { self.events.wait() };
                return self.not_yet(ticket);
            }
        }
        self.help.ended();
        // SAFETY: NCCL's thread, and NCCL has not received the end of any outstanding request.
        Ok(unsafe { self.events.finish(&self.requests, ticket) })
    }

    /// A request was not done when it was polled. Fails if it can no longer become so.
    #[inline]
    fn not_yet(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        if self.health.is_failed() || self.health.is_over() { self.at_the_end(ticket) } else { Ok(None) }
    }

    /// The connection has failed or is over. The request is polled again, since another thread may have ended it after it was
    /// polled and before the end of the connection was seen.
    #[cold]
    fn at_the_end(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        // SAFETY: NCCL's thread, and NCCL has not received the end of any outstanding request.
        let finish = || unsafe { self.events.finish(&self.requests, ticket) };
        if !self.health.is_failed() {
            // With the state locked, under which parts end: no thread is between two of them.
            let is_done = {
                let _state = self.state();
                self.requests.is_done(ticket)
            };
            // A connection that is merely over goes on for what came early and is posted late.
            if is_done || self.is_mending() {
                return Ok(finish());
            }
            self.fail_silently(left_early(&self.peer));
        }
        // After this no thread touches a buffer: the request is done, or never will be.
        self.quiesce();
        if let Some(outcome) = finish() {
            return Ok(Some(outcome));
        }
        // SAFETY: as above.
        unsafe { self.events.abandon(ticket.slot) };
        self.requests.abandon(ticket);
        self.health.check().map(|()| None)
    }

    /// The host takes back memory, as NCCL does on an abort before it closes the connection. If an outstanding request
    /// would fill some of it, the connection ends. Nothing touches the memory after this has returned. Without such a
    /// request it waits for no thread that moves data.
    pub fn withdraw(&self, memory: Span) {
        let wants = |(to, capacity): &(Target, usize)| Span::new(to.data.addr(), *capacity).meets(memory);
        let is_wanted = self.state().targets.iter().flatten().flatten().any(wants);
        if is_wanted {
            let error = Error::remote("the receiving side took back memory with transfers in flight");
            self.health.fail_telling(error.clone(), || self.tell_failure(&error));
            self.quiesce();
        }
    }

    /// Whether the sender has reported how many messages there were, and all have arrived.
    fn has_everything(&self) -> bool {
        self.announced.load(Ordering::Relaxed) == self.completed.load(Ordering::Relaxed) + 1
    }

    /// Whether a stream was lost a short while ago. A sender that has said goodbye on the others comes back with what was
    /// on it, if anything was.
    #[cold]
    fn is_mending(&self) -> bool {
        let now = Instant::now();
        self.recovery
            && !self.has_everything()
            && lock(&self.vigils).iter().any(|vigil| vigil.may_return(now, SENDER_MENDING))
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

    /// Ends the connection with a cause; the peer is notified if possible.
    pub fn fail(&self, error: Error) {
        let is_first = self.health.fail_telling(error.clone(), || self.tell_failure(&error));
        self.failed(is_first, &error);
    }

    fn fail_silently(&self, error: Error) {
        let is_first = self.health.fail(error.clone());
        self.failed(is_first, &error);
    }

    fn failed(&self, is_first: bool, error: &Error) {
        if is_first && !self.closing.load(Ordering::Acquire) && error.tell_once() {
            self.peer.warn_of("receiving from", error);
        }
    }

    fn tell_failure(&self, error: &Error) {
        // On every stream: the first may be away, or lead nowhere.
        let frame = failure(error);
        for (index, stream) in self.streams.iter().enumerate() {
            if stream.peek(|io| io.say(frame.clone())).is_some() {
                self.run(index, WRITE);
            }
        }
    }

    /// Makes the other streams carry what the first cannot.
    fn speak(&self) {
        self.streams.iter().for_each(Stream::kick);
    }

    /// Takes all sockets away, waiting for the threads that use them. After this no thread touches a buffer.
    fn quiesce(&self) {
        for io in self.streams.iter().filter_map(Stream::end) {
            self.let_go(*io);
        }
    }

    /// A stream is no longer needed. The control thread closes its socket when the peer has closed it too: with unread
    /// bytes the kernel would send a reset, which can overtake data, and the control message with the cause.
    fn let_go(&self, io: Io) {
        self.health.stream_down();
        self.net.linger(io.sock);
    }

    /// Runs a stream in the calling thread, or makes the thread that holds it do so.
    fn run(&self, index: usize, wish: u8) -> bool {
        let step = |io: &mut Io, wishes| self.step(index, io, wishes);
        self.ran(index, self.streams[index].run(wish, step, |io, why| self.broken(index, io, why)))
    }

    /// Polls the first stream.
    #[inline]
    fn glance(&self) {
        self.attention.called();
        self.glance_at(0);
    }

    /// Polls the further streams, which otherwise workers serve. Returns whether anything has arrived.
    #[cold]
    fn glance_further(&self) -> bool {
        (1..MAX_STREAMS).filter(|index| self.glance_at(*index)).count() > 0
    }

    /// Polls a stream, unless another thread is polling it.
    #[inline]
    fn glance_at(&self, index: usize) -> bool {
        let step = |io: &mut Io, wishes| self.step(index, io, wishes);
        self.ran(index, self.streams[index].glance(READ, step, |io, why| self.broken(index, io, why)))
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

    // Always inlined: a stack frame for each poll would cost as much as the work in it.
    fn alone(&self) -> MutexGuard<'_, Option<Alone>> {
        self.alone_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A frame for the peer, on whichever stream is written next.
    fn mail(&self, frame: &[u8]) {
        self.outbox().extend_from_slice(frame);
        self.mail.store(true, Ordering::Release);
    }

    fn outbox(&self) -> MutexGuard<'_, Vec<u8>> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A chunk as it is reported to a profiler.
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
