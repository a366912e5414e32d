//! What both directions of a connection have in common: its streams, its requests, its first failure, and what is known
//! about the peer.
//!
//! A [`Direction`] adds its protocol core and its work on a stream. All calls between the two are resolved when the
//! library is compiled.
//!
//! # Locks
//!
//! A thread takes them in this order, and need not take all:
//!
//! 1. The connection's place in the table of what NCCL holds (`engine::table`): shared, for the whole of `isend`,
//!    `irecv` and `test`. Closing takes the connection out first and holds nothing.
//! 2. A dial or an accepted socket (`session::dialer`, `session::acceptor`), while it advances its handshake. A dial
//!    that ends may start another one, and takes that one's lock as well.
//! 3. A stream ([`Stream::hold`], [`Stream::with_io`]), never two. Data is moved, and the socket called, under this
//!    lock. On the same level, never with a stream: the sender's epoch numbers.
//! 4. The state: bookkeeping, and copies of at most one chunk.
//! 5. One of the small ones. Of a connection: `monitors`, `inquiry`, `deliveries`, `preferred_pairs`, `condemned`,
//!    `outbox`, `fences`, `trouble`, `waiting`, `standstill`, `damage`, when [`Chores`] are due, the events' desk. Of
//!    the process: the lists in [`Net`] and in `Shortages`, the store of copies ([`COPIES`](super::copies::COPIES)),
//!    its [`Spread`](crate::engine::schedule::spread::Spread), the session's ports, accept queues and half-open
//!    connections, the start of a worker. A registration: of a stream, of [`Chores`], of
//!    `Shortages`.
//! 6. Last: the request keys (also under `monitors`), [`Ended`] (also under `inquiry`), a worker's entries and its
//!    doorbell (also under a registration).
//!
//! System calls under levels 4 to 6 are few: a wake-up (`eventfd`) under a registration, the start of a worker,
//! `setsockopt` under `monitors`, a profiler's callback under the desk, the addresses of a socket under the state when
//! an epoch begins. All locks but the first are mutexes that are held for one step of work: no thread waits for the
//! network under one, but for the confirmation of a new connection (`session::wire::send_all`, 20 ms at most).

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::standstill::Standstill;
use super::stream::{Held, READ, Ran, Step, Stream, WRITE};
use crate::engine::counters::Counters;
use crate::engine::events::Events;
use crate::engine::poller::{Interest, Progress, Registration, Source};
use crate::engine::request::{Outcome, RequestSlots, Ticket};
use crate::engine::schedule::attend::Attention;
use crate::engine::schedule::constants::{CHUNK_MAX, FEW, HOT, HOT_BETWEEN};
use crate::engine::span::Span;
use crate::os::error::{Error, Result};
use crate::os::log::NET;
use crate::session::frame::MAX_STREAMS;
use crate::session::handshake::FEATURE_RECOVERY;
use crate::session::lifeline::{Answer, Ended, PeerInquiry};
use crate::session::link::{Link, Sock, path_of};
use crate::session::liveness::{self, Chores, Kept, LivenessMonitor};
use crate::session::net::Net;
use crate::session::owner::Owner;
use crate::session::peer::{Broken, Health, Peer, failure, left_early, lost};
use crate::session::seal::damage::Damage;
use crate::session::shortage::{Again, Starved};
use crate::session::wire::{self, Piece};

/// How often a close checks whether more was acknowledged.
pub(super) const CLOSE_POLL: Duration = Duration::from_millis(10);

/// Waits until the next poll of a close that began at `start`. A short close is not delayed, and a long one costs
/// little.
pub(super) fn rest(start: Instant) {
    let is_short = start.elapsed() < CLOSE_POLL;
    std::thread::sleep(if is_short { Duration::from_micros(50) } else { Duration::from_millis(1) });
}

/// The part of a connection that depends on its direction.
pub(crate) trait Direction: Sized + Send + Sync + 'static {
    /// The data that changes under the state's lock: the protocol core, and the buffers of its messages.
    type State: Send;
    /// The socket of a stream, and what is under way on it.
    type Io: StreamIo;

    /// Whether this side sends.
    const SENDS: bool;

    /// Moves what can be moved on a stream. Adds to `ready` the bytes of messages that other streams may now send.
    fn step(conn: &Connection<Self>, index: usize, io: &mut Self::Io, work: u8, ready: &mut u64) -> Step<Broken>;

    /// NCCL has tested a request that is not done.
    #[inline]
    fn unfinished(_conn: &Connection<Self>) {}

    /// Starts the streams that can send messages of this many bytes.
    fn wake_streams(_conn: &Connection<Self>, _bytes: u64) {}

    /// The control thread polls the first stream because NCCL's proxy thread does not, or has finished doing so.
    fn unattended(_conn: &Connection<Self>, _begins: bool) {}

    /// A text for logs: what the messages in flight wait for.
    fn describe(state: &Self::State) -> String;

    /// Whether bytes are on their way for no request: a send that was copied is done before they arrive.
    fn is_under_way(_state: &Self::State) -> bool {
        false
    }

    /// Whether an outstanding request needs some of this memory.
    fn needs(state: &Self::State, memory: Span) -> bool;

    /// The peer has left, and no stream remains: ends the requests that are known to be done. Returns whether others
    /// may still end.
    fn peer_left(conn: &Connection<Self>) -> bool;

    /// The next epoch of a stream begins. The caller has locked the stream and the state.
    fn epoch_begins(conn: &Connection<Self>, state: &mut Self::State, index: usize, io: &mut Self::Io);

    /// The epoch has begun, and the stream is still locked: adds the frames that must be sent on it first.
    fn epoch_begun(_conn: &Connection<Self>, _index: usize, _io: &mut Self::Io) {}

    /// An epoch of a stream has ended. Returns whether to report the end. The sending side reports it if the epoch had
    /// not ended before; the receiving side always does.
    fn epoch_ended(conn: &Connection<Self>, index: usize, io: &Self::Io, why: &Broken) -> bool;

    /// A stream was lost, and can be recovered; `left` others are connected.
    fn recover(conn: &Connection<Self>, index: usize, epoch: u16, left: usize, error: &io::Error);

    /// Gives up a stream that has not ended by itself.
    fn lose(conn: &Connection<Self>, index: usize, error: io::Error);

    /// The network is in trouble, so a peer without connected streams need not be dead.
    fn in_trouble(_conn: &Connection<Self>) {}

    /// The control thread's work after a call, or when a check is due.
    fn do_chores(conn: &Connection<Self>) -> Progress;

    /// Delivers the data that was reported done to the peer, and sends the goodbye.
    fn say_goodbye(conn: &Connection<Self>);

    /// The connection is closed.
    fn closed(_conn: &Connection<Self>) {}

    /// The connection is dropped.
    fn dropped(conn: &Connection<Self>);
}

/// The socket of a stream, and what is under way on it.
pub(crate) trait StreamIo: Send {
    /// The socket.
    fn sock(&self) -> &Sock;

    /// Gives back the socket alone.
    fn into_sock(self) -> Sock;

    /// The epoch of the stream. One thread may notice its end while another begins the next.
    fn epoch(&self) -> u16;

    /// Adds control frames to what goes out.
    fn queue_frames(&mut self, frames: Vec<u8>);

    /// Adds the last frame, and returns what is to be sent as it is. None in the middle of a frame.
    fn queue_last_frame(&mut self, frame: Vec<u8>) -> Option<&[u8]>;
}

/// A connection in one direction.
pub(crate) struct Connection<D: Direction> {
    pub(super) me: Weak<Self>,
    pub(super) net: Arc<Net>,
    pub(super) link: Link,
    pub(super) peer: Peer,
    /// The data of this direction alone.
    pub(super) own: D,
    state: Mutex<D::State>,
    pub(super) streams: Vec<Stream<D::Io>>,
    pub(super) requests: RequestSlots,
    pub(super) health: Health,
    pub(super) attention: Attention,
    pub(super) standstill: Standstill,
    pub(super) counters: Counters,
    pub(super) damage: Damage,
    pub(super) events: Events,
    pub(super) recovery: bool,
    pub(super) closing: AtomicBool,
    /// Whether workers poll longer before they sleep: their last message was below [`CHUNK_MAX`], and one of few
    /// ([`HOT_BETWEEN`]).
    polls_longer: AtomicBool,
    /// Whether NCCL had more than [`FEW`] requests open: at the sender when it made the last one for workers, at the
    /// receiver when it made the last one while one stream carried long messages.
    many_open: AtomicBool,
    /// Whether the first stream is connected.
    pub(super) first_live: AtomicBool,
    pub(super) chores: Chores,
    pub(super) monitors: Mutex<[LivenessMonitor; MAX_STREAMS]>,
    /// Streams for which the kernel had no memory.
    starved: Starved,
    /// The inquiry whether the peer's process is alive, while one is under way.
    pub(super) inquiry: Mutex<Option<PeerInquiry>>,
    pub(super) ended: Ended,
    /// Where this connection's streams begin among the workers.
    turn: usize,
}

impl<D: Direction> Connection<D> {
    /// For messages: what this side does, and the preposition before the peer.
    const DOING: &str = if D::SENDS { "sending" } else { "receiving" };
    const TOWARDS: &str = if D::SENDS { "to" } else { "from" };

    /// A connection without streams.
    pub(super) fn without_streams(net: Arc<Net>, link: Link, peer: Peer, own: D, state: D::State) -> Arc<Self> {
        let recovery = link.features & FEATURE_RECOVERY != 0;
        let turn = net.next_turn();
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            net,
            link,
            peer,
            own,
            state: Mutex::new(state),
            streams: (0..MAX_STREAMS).map(|_| Stream::default()).collect(),
            requests: RequestSlots::new(),
            health: Health::default(),
            attention: Attention::default(),
            standstill: Standstill::default(),
            counters: Counters::default(),
            damage: Damage::default(),
            events: Events::default(),
            recovery,
            closing: AtomicBool::new(false),
            polls_longer: AtomicBool::new(false),
            many_open: AtomicBool::new(false),
            first_live: AtomicBool::new(false),
            chores: Chores::default(),
            monitors: Mutex::default(),
            starved: Starved::default(),
            inquiry: Mutex::new(None),
            ended: Ended::default(),
            turn,
        })
    }

    /// The connection's counters.
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether the control thread polls this connection.
    pub(crate) fn attention(&self) -> &Attention {
        &self.attention
    }

    /// The profiler events of this connection.
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// The connection's number, key and rails.
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// The other end.
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    #[inline]
    pub(super) fn state(&self) -> MutexGuard<'_, D::State> {
        lock(&self.state)
    }

    /// Notes that workers move a message of `length` bytes, one of `under_way`. At the sender these are the requests
    /// that NCCL has open. At the receiver they are the messages of its tag that are arriving, since receives may wait
    /// for messages that are not sent yet.
    #[inline]
    pub(super) fn note_message(&self, length: u64, under_way: usize) {
        self.polls_longer.store(length < CHUNK_MAX && under_way <= FEW, Ordering::Relaxed);
    }

    /// Notes how many requests NCCL has open. A grouped receive is one.
    #[inline]
    pub(super) fn note_open(&self, requests: usize) {
        self.many_open.store(requests > FEW, Ordering::Relaxed);
    }

    /// How long a worker polls for more of this connection's work after something has moved.
    pub(super) fn hot(&self) -> Duration {
        if self.many_open.load(Ordering::Relaxed) && self.net.spread.uses_one_stream() {
            // The network was full lately, and the operation waits for the wire. Workers sleep during a trial, too: the
            // rate of the trial is then that of what would follow.
            Duration::ZERO
        } else if self.polls_longer.load(Ordering::Relaxed) {
            HOT_BETWEEN
        } else {
            HOT
        }
    }

    /// Registers a socket with the worker of stream `index`, or with the control thread for the first. Every step of
    /// adding a stream that may fail is here, so call this before the peer is notified and before anything changes on
    /// this side.
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    pub(super) fn register(&self, index: usize, sock: &Sock) -> Result<Registration> {
        let source = Arc::new(StreamSource { conn: self.me.clone(), index });
        let fd = sock.as_raw_fd();
        // NCCL's thread moves the first stream. The control thread only watches for its end and finishes sends that
        // blocked.
        if index == 0 {
            return self.net.poller.control_thread()?.register(source, Some((fd, Interest::Quiet)));
        }
        self.net.poller.worker(self.turn + index)?.register(source, Some((fd, Interest::Data)))
    }

    /// Puts a connected socket to work as stream `index`. The kick makes up for events that the poller reported before.
    pub(super) fn install(&self, index: usize, registration: Registration, io: D::Io) {
        self.events.set_path(index, path_of(io.sock(), &self.link));
        self.health.stream_up();
        // The registration comes first: a stream that breaks at once drops its registration.
        self.streams[index].watch(registration);
        match self.streams[index].install_as(Box::new(io), |io| self.epoch_begins(index, io)) {
            Ok(()) => self.streams[index].kick(),
            Err(late) => self.let_go(*late),
        }
    }

    /// Records, with the stream locked, that the stream's next epoch begins.
    fn epoch_begins(&self, index: usize, io: &mut D::Io) {
        {
            let mut state = self.state();
            D::epoch_begins(self, &mut state, index, io);
            self.ended.forget();
            lock(&self.monitors)[index] = LivenessMonitor::default();
            if index == 0 {
                self.first_live.store(true, Ordering::SeqCst);
            }
        }
        *lock(&self.inquiry) = None;
        D::epoch_begun(self, index, io);
    }

    /// Records, with the state locked, that a stream's epoch has ended, and the reason if it is known.
    pub(super) fn note_end(&self, index: usize, why: Option<&io::Error>) {
        if let Some(error) = why {
            self.ended.note(error);
        }
        if index == 0 {
            self.first_live.store(false, Ordering::SeqCst);
        }
    }

    /// The outcome of a request when it is done: the size of each part.
    ///
    /// # Errors
    /// When the connection has failed; nothing touches the buffers any more then.
    #[inline]
    pub(crate) fn test(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        self.requests.check(ticket)?;
        let is_done = || self.requests.is_done(ticket);
        if !is_done() {
            self.poll_once();
            if !is_done() {
                // SAFETY: NCCL's thread, and NCCL has not received the end of any outstanding request.
                unsafe { self.events.wait() };
                if self.health.is_failed() || self.health.is_over() {
                    return self.at_the_end(ticket);
                }
                D::unfinished(self);
                return Ok(None);
            }
        }
        // SAFETY: NCCL's thread, and NCCL has not received the end of any outstanding request.
        Ok(unsafe { self.events.finish(&self.requests, ticket) })
    }

    /// The connection has failed or is over. The request is polled again: another thread may have ended it after the
    /// first poll and before this thread saw the end of the connection.
    #[cold]
    pub(super) fn at_the_end(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        // SAFETY: NCCL's thread, and NCCL has not received the end of any outstanding request.
        let finish = || unsafe { self.events.finish(&self.requests, ticket) };
        if !self.health.is_failed() {
            let is_done = || {
                // Requests end with the state locked: no thread is between two parts of this one.
                let _state = self.state();
                self.requests.is_done(ticket)
            };
            if D::peer_left(self) || is_done() {
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
    /// uses some of it, the connection ends. Nothing touches the memory after this has returned. Without such a request
    /// it waits for no thread that moves data.
    pub(crate) fn withdraw(&self, memory: Span) {
        let is_needed = D::needs(&self.state(), memory);
        if is_needed {
            self.end_early("took back memory");
            self.quiesce();
        }
    }

    /// Ends the connection. With nothing outstanding, everything that was reported done reaches the peer; with
    /// requests in flight it is an abort. No thread touches NCCL's buffers after it returns.
    pub(crate) fn close(&self) {
        if self.requests.outstanding() > 0 || self.health.is_failed() {
            return self.abandon();
        }
        D::say_goodbye(self);
        self.finish();
    }

    /// Ends the connection with requests in flight, and notifies the peer.
    pub(super) fn abandon(&self) {
        self.closing.store(true, Ordering::Release);
        self.end_early("closed the connection");
        self.finish();
    }

    pub(super) fn finish(&self) {
        self.quiesce();
        D::closed(self);
        tracing::debug!(target: NET, "closed the connection {} {}: {}", Self::TOWARDS, self.peer, self.counters);
    }

    /// Ends the connection because this side did `did` while requests were outstanding.
    fn end_early(&self, did: &str) {
        let error = Error::remote(format!("the {} side {did} with transfers in flight", Self::DOING));
        self.health.fail_telling(error.clone(), || self.send_failure(&error));
    }

    /// Ends the connection with a cause; the peer is notified if possible.
    pub(crate) fn fail(&self, error: Error) {
        let is_first = self.health.fail_telling(error.clone(), || self.send_failure(&error));
        self.failed(is_first, &error);
    }

    pub(super) fn fail_silently(&self, error: Error) {
        let is_first = self.health.fail(error.clone());
        self.failed(is_first, &error);
    }

    fn failed(&self, is_first: bool, error: &Error) {
        if is_first && !self.closing.load(Ordering::Acquire) && error.report_once() {
            self.peer.warn_of(&format!("{} {}", Self::DOING, Self::TOWARDS), error);
        }
    }

    fn send_failure(&self, error: &Error) {
        // On every stream: one of them may be disconnected, in the middle of a chunk that will never end, or on a dead
        // path.
        self.queue_everywhere(&failure(error));
    }

    /// Sends control frames on every stream that is connected, since some of them may not work.
    pub(super) fn queue_everywhere(&self, frames: &[u8]) {
        for (index, stream) in self.streams.iter().enumerate() {
            if stream.with_io(|io| io.queue_frames(frames.to_vec())).is_some() {
                self.run(index, WRITE);
            }
        }
    }

    /// Takes all sockets away, waiting for the threads that use them. After this no thread touches a buffer.
    pub(super) fn quiesce(&self) {
        for io in self.streams.iter().filter_map(Stream::end) {
            self.let_go(*io);
        }
    }

    /// A stream is no longer needed. The control thread closes its socket only after the peer has closed it. With
    /// unread bytes the kernel would send a reset, which can overtake data and the control message with the cause.
    fn let_go(&self, io: D::Io) {
        self.health.stream_down();
        self.net.linger(io.into_sock());
    }

    /// Runs a stream in the calling thread, or makes the thread that holds it do so. Returns whether anything moved.
    pub(super) fn run(&self, index: usize, work: u8) -> bool {
        self.run_held(self.streams[index].hold(), index, work)
    }

    /// As [`Connection::run`], with the result of the stream's `hold`.
    pub(super) fn run_held(&self, held: Option<Held<'_, D::Io>>, index: usize, work: u8) -> bool {
        let mut ready = 0;
        let step = |io: &mut D::Io, work| D::step(self, index, io, work, &mut ready);
        let ran = self.streams[index].run_held(held, work, step, |io, why| self.broken(index, io, why));
        self.ran(index, ran, ready)
    }

    /// Polls the first stream, unless another thread is polling it.
    #[inline]
    pub(super) fn poll_once(&self) {
        self.attention.called();
        let mut ready = 0;
        let step = |io: &mut D::Io, work| D::step(self, 0, io, work, &mut ready);
        let work = if D::SENDS { READ | WRITE } else { READ };
        let ran = self.streams[0].poll_once(work, step, |io, why| self.broken(0, io, why));
        self.ran(0, ran, ready);
    }

    #[inline]
    fn ran(&self, index: usize, ran: Ran, ready: u64) -> bool {
        if ready > 0 {
            D::wake_streams(self, ready);
        }
        match ran {
            Ran::Settled(moved) => moved,
            Ran::More => {
                self.streams[index].kick();
                true
            }
        }
    }

    /// The kernel had no memory for a call on a stream: the call is repeated in a moment.
    pub(super) fn starved(&self, index: usize, error: &io::Error) {
        if self.starved.begins(index) {
            self.net.shortages.wait(&self.net.poller, self.me.clone(), index, error);
        }
    }

    /// A stream ended. Decides whether that ends the connection.
    pub(super) fn broken(&self, index: usize, io: Box<D::Io>, why: Broken) {
        let epoch = io.epoch();
        let is_news = D::epoch_ended(self, index, &io, &why);
        match &why {
            Broken::Fatal(error) => self.fail_stream(*io, error),
            _ => drop(io),
        }
        let left = self.health.stream_down();
        match why {
            Broken::Fatal(error) => self.fail(error.with_peer(&self.peer)),
            // The control thread begins the checks where it polls the first stream, which may be this one. Another
            // stream may be silent.
            Broken::Goodbye => self.begin_watch(),
            Broken::Lost(_) if self.closing.load(Ordering::Acquire) || !is_news => {}
            Broken::Lost(error) if self.recovery => D::recover(self, index, epoch, left, &error),
            Broken::Lost(error) => self.fail_silently(lost(&error).with_peer(&self.peer)),
        }
    }

    /// Reports a failure to the peer on the stream where it occurred, which may be the only one.
    fn fail_stream(&self, mut io: D::Io, error: &Error) {
        let fd = io.sock().as_raw_fd();
        if !self.health.is_failed()
            && let Some(bytes) = io.queue_last_frame(failure(error))
        {
            // SAFETY: the piece is this stream's own buffer. Bytes that the socket does not accept are lost, and the
            // peer sees the end without the reason.
            let _ = unsafe { wire::send(fd, Piece::of(bytes)) };
        }
        self.net.linger(io.into_sock());
    }

    pub(super) fn call_control_thread(&self) {
        if let Err(error) = self.chores.call(&self.net.poller, &self.me) {
            self.fail_silently(error);
        }
    }

    /// A request was posted: the control thread polls the first stream from time to time, and begins the checks there.
    #[inline]
    pub(super) fn attend(&self) {
        if self.attention.wanted() {
            self.streams[0].kick();
        }
        // That stream is polled only while it is connected.
        if !self.first_live.load(Ordering::Relaxed) {
            self.begin_watch();
        }
    }

    /// Makes the control thread check the streams from time to time, until nothing is outstanding.
    pub(super) fn begin_watch(&self) {
        if self.chores.begin() {
            self.call_control_thread();
        }
    }
}

impl<D: Direction> Owner for Connection<D> {
    fn link(&self) -> &Link {
        &self.link
    }

    /// Streams over this interface are lost, if others are left.
    fn link_down(&self, interface: u32) {
        let down = self.over_interface(interface);
        if self.recovery && !down.is_empty() && down.len() < self.health.live() {
            D::in_trouble(self);
            for index in down {
                D::lose(self, index, liveness::link_down());
            }
        }
    }

    fn answered(&self, began: Instant, pair: usize, answer: Answer) {
        if let Some(inquiry) = &mut *lock(&self.inquiry) {
            inquiry.answered(began, Instant::now(), pair, answer);
        }
        self.call_control_thread();
    }
}

impl<D: Direction> Kept for Connection<D> {
    fn do_chores(&self) -> Progress {
        D::do_chores(self)
    }

    fn fail(&self, error: Error) {
        Self::fail(self, error);
    }
}

impl<D: Direction> Again for Connection<D> {
    fn again(&self, index: usize) {
        self.starved.ends(index);
        self.run(index, READ | WRITE);
    }
}

impl<D: Direction> Drop for Connection<D> {
    fn drop(&mut self) {
        D::dropped(self);
    }
}

struct StreamSource<D: Direction> {
    conn: Weak<Connection<D>>,
    index: usize,
}

impl<D: Direction> Source for StreamSource<D> {
    fn poll(&self) -> Progress {
        let Some(conn) = self.conn.upgrade() else { return Progress::default() };
        if self.index > 0 {
            return Progress { moved: conn.run(self.index, READ | WRITE), again: None };
        }
        conn.begin_watch();
        conn.push_if_stuck();
        if let Some(later) = conn.attention.is_attended() {
            return later;
        }
        D::unattended(&conn, true);
        let moved = conn.run(0, READ | WRITE);
        D::unattended(&conn, false);
        if !moved && conn.attention.is_stalled() {
            let (to, peer) = (Connection::<D>::TOWARDS, &conn.peer);
            tracing::trace!(target: NET, "waiting, {to} {peer}: {}", D::describe(&conn.state()));
        }
        conn.attention.looked(moved, || conn.requests.outstanding() > 0)
    }

    fn hot(&self) -> Duration {
        self.conn.upgrade().map_or(Duration::ZERO, |conn| conn.hot())
    }

    fn fail(&self, error: Error) {
        if let Some(conn) = self.conn.upgrade() {
            conn.fail(error);
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
