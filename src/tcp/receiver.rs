//! The receiving side of a connection: core, streams, requests.
//!
//! `irecv` posts receives to the [`RecvCore`] and announces the long ones. `test` reads the first stream in the
//! caller's own thread; the workers read the others, each chunk straight into the posted buffer.
//!
//! Locks, in order: a stream (try-lock), then the state, then the outbox. None is held across a system call but
//! the stream's own.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::attend::Attention;
use super::frame::{HEADER, Header, Type};
use super::handshake::FEATURE_RECOVERY;
use super::limits::MAX_STREAMS;
use super::net::{Link, Net, Sock};
use super::peer::{Broken, Health, Peer, failure, left_early, lost, told_by_peer};
use super::recv_core::{End, Part, Place, Posted, RecvCore, StageKey};
use super::stream::{READ, Ran, Step, Stream, WRITE};
use super::wire::{self, Piece};
use crate::engine::counters::Counters;
use crate::engine::poller::{Interest, Progress, Registration, Source};
use crate::engine::request::{MAX_PARTS, Outcome, RequestSlots, SLOTS, Ticket};
use crate::os::error::{Error, Result};

/// Bytes of a stream's input buffer. Short messages arrive in it together with their header, in one system call,
/// and are copied on. Of longer ones only the beginning passes through it, and the rest goes straight to its place:
/// a second system call (about 0.5 µs) is cheaper than copying more than this twice.
const INPUT: usize = 8 << 10;

/// How much of the input buffer is offered behind the rest of a chunk: room for the next headers.
const BEHIND: usize = 2 << 10;

/// Bytes that one run of a stream may read before the other streams of the same worker get their turn.
const SHARE: usize = 4 << 20;

/// How long an orderly close waits for its last acknowledgements to leave.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

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
    /// The tag under which a stage was opened.
    stage_tags: Vec<i32>,
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
    input: Box<[u8]>,
    from: usize,
    to: usize,
    body: Body,
    out: Vec<u8>,
    sent: usize,
    /// Goodbye was said; nothing may follow it.
    parted: bool,
}

/// A connection that receives.
pub struct RecvConn {
    me: Weak<Self>,
    net: Arc<Net>,
    link: Link,
    peer: Peer,
    state: Mutex<State>,
    outbox: Mutex<Vec<u8>>,
    streams: Vec<Stream<Io>>,
    requests: RequestSlots,
    health: Health,
    attention: Attention,
    counters: Counters,
    recovery: bool,
    closing: AtomicBool,
    /// Until when the peer must be back after the last stream went down, and what to say if it is not.
    alone_since: Mutex<Option<(Instant, Error)>>,
    fences: Mutex<Vec<(usize, u16)>>,
    chore: Mutex<Option<Registration>>,
}

impl RecvConn {
    /// A connection without streams; the handshake adds the first when its welcome is on the way.
    pub fn new(net: Arc<Net>, link: Link, peer: Peer) -> Arc<Self> {
        let recovery = link.features & FEATURE_RECOVERY != 0;
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            net,
            link,
            peer,
            state: Mutex::new(State {
                core: RecvCore::default(),
                targets: vec![[Target { data: std::ptr::null_mut() }; MAX_PARTS]; SLOTS],
                stages: Vec::new(),
                stage_tags: Vec::new(),
            }),
            outbox: Mutex::new(Vec::new()),
            streams: (0..MAX_STREAMS).map(|_| Stream::default()).collect(),
            requests: RequestSlots::new(),
            health: Health::default(),
            attention: Attention::default(),
            counters: Counters::default(),
            recovery,
            closing: AtomicBool::new(false),
            alone_since: Mutex::new(None),
            fences: Mutex::new(Vec::new()),
            chore: Mutex::new(None),
        })
    }

    /// Puts a connected socket to work as stream `index`.
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    pub fn add_stream(&self, index: usize, epoch: u16, sock: Sock) -> Result<()> {
        let fd = sock.as_raw_fd();
        let io = Io {
            sock,
            input: vec![0; INPUT].into_boxed_slice(),
            from: 0,
            to: 0,
            body: Body::None,
            out: Vec::new(),
            sent: 0,
            parted: false,
        };
        self.health.stream_up();
        self.state().core.stream_up(index, epoch);
        *self.alone() = None;
        // The first life of the first stream is 0, that of the others 1.
        if epoch > u16::from(index > 0) {
            Counters::bump(&self.counters.reconnects);
            let announcements = self.state().core.announcements();
            let mut outbox = self.outbox();
            for header in announcements {
                outbox.extend_from_slice(&header.encode());
            }
        }
        self.streams[index].install(Box::new(io));
        let source = Arc::new(StreamSource { conn: self.me.clone(), index });
        let registration = if index == 0 {
            self.net.poller.keeper()?.register(source, Some((fd, Interest::Quiet)))?
        } else {
            self.net.poller.worker()?.register(source, Some((fd, Interest::Data)))?
        };
        self.streams[index].watch(registration);
        self.streams[index].kick();
        Ok(())
    }

    /// Starts a grouped receive; each part is buffer, capacity in bytes and tag. `None`: not now.
    ///
    /// # Errors
    /// When the connection has failed, or a message that is here already is longer than its receive.
    ///
    /// # Safety
    /// Every buffer must be writable for its capacity until the request ends or the connection is closed.
    pub unsafe fn irecv(&self, parts: &[(*mut u8, usize, i32)]) -> Result<Option<Ticket>> {
        self.health.check()?;
        let Some(ticket) = self.requests.take(parts.len()) else { return Ok(None) };
        let mut to_tell = false;
        let posted: Result<()> = {
            let mut state = self.state();
            parts.iter().enumerate().try_for_each(|(part, &(data, capacity, tag))| {
                let to = Part { slot: ticket.slot, part: part as u8 };
                state.targets[ticket.slot as usize][part] = Target { data };
                match state.core.post(tag, capacity as u64, to)? {
                    Posted::Waits => {}
                    Posted::Announce(header) => {
                        self.outbox().extend_from_slice(&header.encode());
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
            self.requests.cancel(ticket);
            return self.health.check().map(|()| None);
        }
        if to_tell {
            self.run(0, WRITE);
        }
        if self.attention.wanted() {
            self.streams[0].kick();
        }
        Ok(Some(ticket))
    }

    /// Asks after a receive: the size of each part when all are done.
    ///
    /// # Errors
    /// When the connection has failed; nothing touches the buffers any more then.
    pub fn test(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        self.requests.check(ticket)?;
        if !self.requests.is_done(ticket) {
            self.glance(0);
        }
        if let Some(outcome) = self.requests.finish(ticket) {
            return Ok(Some(outcome));
        }
        self.verdict().inspect_err(|_| {
            self.quiesce();
            self.requests.abandon(ticket);
        })?;
        Ok(None)
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
        self.closing.store(true, Ordering::Release);
        if self.requests.outstanding() == 0 && !self.health.is_failed() {
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
        self.outbox().extend_from_slice(&failure(error));
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

    /// Runs a stream in the calling thread, or has its present holder do so.
    fn run(&self, index: usize, wish: u8) -> bool {
        let step = |io: &mut Io, wishes| self.step(index, io, wishes);
        self.ran(index, self.streams[index].run(wish, step, |io, why| self.broken(io, why)))
    }

    /// Looks whether anything has come on a stream, unless another thread is looking.
    fn glance(&self, index: usize) {
        let step = |io: &mut Io, wishes| self.step(index, io, wishes);
        self.ran(index, self.streams[index].glance(READ, step, |io, why| self.broken(io, why)));
    }

    fn ran(&self, index: usize, ran: Ran) -> bool {
        match ran {
            Ran::Settled(moved) => moved,
            Ran::More => {
                self.streams[index].kick();
                true
            }
        }
    }

    fn step(&self, index: usize, io: &mut Io, wishes: u8) -> Step<Broken> {
        let mut moved = false;
        let mut more = false;
        if wishes & READ != 0 {
            match self.read(index, io) {
                Ok((read, left)) => (moved, more) = (read, left),
                Err(why) => return Step::Broken(why),
            }
        }
        if wishes & WRITE == 0 && !moved && io.sent == io.out.len() {
            return if more { Step::More } else { Step::Settled(false) };
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
        let mut share = SHARE;
        let mut moved = false;
        loop {
            self.take_frames(index, io).map_err(Broken::Fatal)?;
            if share == 0 {
                return Ok((true, true));
            }
            // Everything in the input buffer was taken but the beginning of a header.
            io.input.copy_within(io.from..io.to, 0);
            (io.from, io.to) = (0, io.to - io.from);
            let (body, room) = match io.body {
                Body::None => (Piece::of_mut(&mut []), &mut io.input[io.to..]),
                Body::Data { to, rest } => (Piece { data: to.data, length: rest }, &mut io.input[..BEHIND]),
            };
            let wanted = body.length + room.len();
            // SAFETY: the body lies in the posted buffer of a request that has not ended, or in a staging buffer
            // that lives until its message is copied; the core has checked that the range fits. The input buffer
            // is this stream's own.
            match unsafe { wire::receive(io.sock.as_raw_fd(), [body, Piece::of_mut(room)]) } {
                Ok(None) => return Ok((moved, false)),
                Ok(Some(0)) if self.health.is_peer_done() => return Err(Broken::Goodbye),
                Ok(Some(0)) => return Err(Broken::Lost(io::ErrorKind::UnexpectedEof.into())),
                Err(_) if self.health.is_peer_done() => return Err(Broken::Goodbye),
                Err(error) => return Err(Broken::Lost(error)),
                Ok(Some(bytes)) => {
                    moved = true;
                    share = share.saturating_sub(bytes);
                    let placed = bytes.min(body.length);
                    io.to += bytes - placed;
                    self.placed(index, io, placed);
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

    /// `bytes` of the open frame's payload are in place.
    fn placed(&self, index: usize, io: &mut Io, bytes: usize) {
        if let Body::Data { to, rest } = &mut io.body {
            *rest -= bytes;
            // SAFETY: still inside, or one past the end of, the checked range.
            to.data = unsafe { to.data.add(bytes) };
            if *rest == 0 {
                io.body = Body::None;
                self.frame_ended(index);
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
            match header.kind {
                Type::Data => {
                    let to = self.frame_began(index, &header)?;
                    io.body = Body::Data { to, rest: header.length as usize };
                    if header.length == 0 {
                        self.placed(index, io, 0);
                    }
                }
                Type::Bye => {
                    self.health.peer_is_done();
                    // The sender's close waits for the kernel's acknowledgement, which may be delayed by 40 ms.
                    let _ = io.sock.set_tcp_quickack(true);
                }
                Type::Ask => {
                    if let Some(answer) = self.state().core.ask(header.tag, header.order, header.total)? {
                        self.outbox().extend_from_slice(&answer.encode());
                    }
                }
                Type::Fence => {
                    // Fencing takes the other stream's lock; the keeper does it, who holds none.
                    let fence = (header.order as usize, header.offset as u16);
                    self.fences.lock().unwrap_or_else(PoisonError::into_inner).push(fence);
                    self.watch();
                }
                other => return Err(Error::remote(format!("the sending side sent a {other:?} frame"))),
            }
        }
    }

    fn frame_began(&self, index: usize, header: &Header) -> Result<Target> {
        Counters::bump(&self.counters.chunks);
        Counters::add(&self.counters.bytes, u64::from(header.length));
        let mut state = self.state();
        match state.core.begin(index, header)? {
            Place::Posted(part, offset) => {
                let base = state.targets[part.slot as usize][part.part as usize].data;
                // SAFETY: the core has checked that the chunk fits the posted buffer.
                Ok(Target { data: unsafe { base.add(offset as usize) } })
            }
            Place::Staged(stage) => {
                Counters::bump(&self.counters.early);
                if state.stages.len() <= stage {
                    state.stages.resize_with(stage + 1, || None);
                    state.stage_tags.resize(stage + 1, 0);
                }
                state.stage_tags[stage] = header.tag;
                let buffer = state.stages[stage].insert(vec![0; header.length as usize].into_boxed_slice());
                Ok(Target { data: buffer.as_mut_ptr() })
            }
        }
    }

    fn frame_ended(&self, index: usize) {
        let mut state = self.state();
        match state.core.end(index) {
            End::More | End::Staged => {}
            End::Complete(part, total) => self.complete(part, total),
            End::Unstage(stage, part, total) => self.unstage(&mut state, stage, part, total),
        }
    }

    fn unstage(&self, state: &mut State, stage: StageKey, part: Part, total: u64) {
        let buffer = state.stages[stage].take().expect("a staged message has its buffer");
        let to = state.targets[part.slot as usize][part.part as usize].data;
        // SAFETY: the core has checked that the message fits the posted buffer, and the two are different memory.
        unsafe { wire::copy_ascending(buffer.as_ptr(), to, total as usize) };
        let tag = state.stage_tags[stage];
        state.core.unstaged(tag, stage);
        self.complete(part, total);
    }

    fn complete(&self, part: Part, total: u64) {
        Counters::bump(&self.counters.messages);
        self.requests.complete_part(part.slot, usize::from(part.part), total);
    }

    fn write(&self, index: usize, io: &mut Io) -> io::Result<bool> {
        let mut moved = false;
        loop {
            if io.sent == io.out.len() {
                io.out.clear();
                io.sent = 0;
                std::mem::swap(&mut io.out, &mut *self.outbox());
                // An acknowledgement speaks of the stream that it travels on.
                let force = self.health.is_peer_done() || self.closing.load(Ordering::Relaxed);
                if let Some(header) = self.state().core.take_ack(index, force) {
                    io.out.extend_from_slice(&header.encode());
                }
                if self.closing.load(Ordering::Acquire) && !io.parted && !self.health.is_failed() {
                    io.parted = true;
                    io.out.extend_from_slice(&Header::of(Type::Bye, 0).encode());
                }
                if io.out.is_empty() {
                    return Ok(moved);
                }
            }
            // SAFETY: both pieces are this stream's own buffers.
            let sent = unsafe { wire::send(io.sock.as_raw_fd(), [Piece::of(&io.out[io.sent..]), Piece::of(&[])]) }?;
            let Some(bytes) = sent else { return Ok(moved) };
            moved = true;
            io.sent += bytes;
        }
    }

    /// Tells the peer of a failure on the stream that met it, which may be the only one.
    fn part_in_anger(&self, mut io: Io, error: &Error) {
        if !self.health.is_failed() {
            io.out.extend_from_slice(&failure(error));
            // SAFETY: both pieces are this stream's own buffers. What the socket does not take is lost, and the peer
            // learns of the end without the reason.
            let _ = unsafe { wire::send(io.sock.as_raw_fd(), [Piece::of(&io.out[io.sent..]), Piece::of(&[])]) };
        }
        self.net.linger(io.sock);
    }

    /// A stream ended. Decides whether that ends the connection.
    fn broken(&self, io: Box<Io>, why: Broken) {
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
                }
            }
            Broken::Lost(error) => self.fail_silently(lost(&error).with_peer(&self.peer)),
        }
    }

    /// All streams are gone. The sender connects again if it lives; how long that may take depends on what was
    /// seen: an end of file or a reset came over a working path, so its owner is either back at once or dead.
    fn wait_for_peer(&self, error: &io::Error) {
        let patience = match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => RETURN_PATIENCE,
            _ => self.net.config.reconnect_timeout,
        };
        *self.alone() = Some((Instant::now() + patience, lost(error).with_peer(&self.peer)));
        self.watch();
    }

    /// Has the keeper look after this connection: fences to carry out, a deadline for the peer's return.
    fn watch(&self) {
        let mut chore = self.chore.lock().unwrap_or_else(PoisonError::into_inner);
        if chore.is_none() {
            let source = Arc::new(Chore { conn: self.me.clone() });
            match self.net.poller.keeper().and_then(|keeper| keeper.register(source, None)) {
                Ok(registration) => *chore = Some(registration),
                Err(error) => return self.fail_silently(error),
            }
        }
        if let Some(registration) = &*chore {
            registration.kick();
        }
    }

    /// The keeper's part.
    fn do_chores(&self) -> Progress {
        let fences = std::mem::take(&mut *self.fences.lock().unwrap_or_else(PoisonError::into_inner));
        for &(index, epoch) in &fences {
            if let Some(frames) = self.fence_stream(index, epoch) {
                let header = Header {
                    order: index as u64,
                    offset: u64::from(epoch),
                    total: frames,
                    ..Header::of(Type::Fenced, 0)
                };
                self.outbox().extend_from_slice(&header.encode());
            }
        }
        if !fences.is_empty() {
            for index in 0..MAX_STREAMS {
                self.run(index, WRITE);
            }
        }
        let mut alone = self.alone();
        let Some((deadline, error)) = &*alone else { return Progress::default() };
        if Instant::now() < *deadline {
            return Progress { moved: false, again: Some(*deadline) };
        }
        let error = error.clone();
        *alone = None;
        drop(alone);
        self.fail_silently(error);
        Progress::default()
    }

    /// Ends the given life of a stream for good: nothing more is taken from it. Says how many frames were, or
    /// nothing when that life is over already.
    pub fn fence_stream(&self, index: usize, epoch: u16) -> Option<u64> {
        if index >= MAX_STREAMS {
            return None;
        }
        {
            let state = self.state();
            // Epochs count up and wrap; the stream may have come back meanwhile.
            if (state.core.epoch(index).wrapping_sub(epoch) as i16) > 0 {
                return None;
            }
        }
        if self.streams[index].take().is_some() {
            self.health.stream_down();
        }
        Some(self.state().core.fence(index))
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

    /// Whether nobody waits for this connection to be mended.
    pub fn is_over(&self) -> bool {
        self.closing.load(Ordering::Acquire) || self.health.is_failed()
    }

    fn alone(&self) -> MutexGuard<'_, Option<(Instant, Error)>> {
        self.alone_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outbox(&self) -> MutexGuard<'_, Vec<u8>> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct StreamSource {
    conn: Weak<RecvConn>,
    index: usize,
}

impl Source for StreamSource {
    fn poll(&self) -> Progress {
        let Some(conn) = self.conn.upgrade() else { return Progress::default() };
        let moved = conn.run(self.index, READ | WRITE);
        if self.index == 0 {
            if !moved && conn.attention.is_stalled() {
                tracing::trace!(target: crate::os::log::NET, "waiting, from {}: {}", conn.peer, conn.state().core.describe());
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
