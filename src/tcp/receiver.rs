//! The receiving side of a connection: core, streams, requests.
//!
//! `irecv` posts receives to the [`RecvCore`] and announces the long ones. `test` reads the first stream in the
//! caller's own thread; the workers read the others, each chunk straight into the posted buffer.

mod arrivals;
mod closing;
mod joining;
mod moving;
mod recovery;
mod sealed;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

pub(crate) use arrivals::Arrivals;

use super::connection::{Connection, Direction, StreamIo, lock};
use super::polled;
use super::recv_core::{Part, Posted, RecvCore};
use super::stream::{Step, Stream, WRITE};
use crate::engine::counters::Counters;
use crate::engine::events::Chunk;
use crate::engine::poller::{Progress, Registration};
use crate::engine::request::{MAX_PARTS, SLOTS, Ticket};
use crate::engine::span::Span;
use crate::os::error::Result;
use crate::os::ticks::Ticks;
use crate::session::frame::Header;
use crate::session::handshake::FEATURE_FAR;
use crate::session::link::{Link, Sock};
use crate::session::net::Net;
use crate::session::peer::{Broken, Peer, fenced};
use crate::session::seal::intake::BEHIND;
use crate::session::seal::{Seal, Sides};
use crate::session::silences::CLOSE_RECOVERY;
use crate::session::wire::{self, Piece};

#[derive(Clone, Copy)]
struct Target {
    data: *mut u8,
}

/// The buffer of a part whose request is outstanding; None for other parts.
type Wanted = Option<(Target, usize)>;

// SAFETY: the address of a posted buffer, which the transport may use until its request ends (the promise of `irecv`).
unsafe impl Send for Target {}

/// The data that changes under the state's lock.
pub(crate) struct State {
    core: RecvCore,
    /// Where the bytes of each part of each request slot go, and how many fit there. None from the part's end on: then
    /// no thread touches the buffer.
    targets: Vec<[Wanted; MAX_PARTS]>,
    /// The chunks of messages that are reported to a profiler when all have arrived, and since when: only a few at a
    /// time.
    joined: Vec<(Part, Chunk, Ticks)>,
    /// Buffers of early messages, by staging key: each an allocation of its own, whose address stays while others come
    /// and go.
    stages: Vec<Option<Vec<u8>>>,
    /// The stream and header with which a stage was opened.
    stage_heads: Vec<(usize, Header)>,
}

/// The rest of a frame's payload.
enum Body {
    /// Between frames.
    None,
    /// Bytes still to come, and where the next one goes. The kernel must not write a payload that a GPU polls.
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

/// A stream's socket, and what is arriving on it.
pub(crate) struct Io {
    sock: Sock,
    /// The epoch of the stream. One thread may notice its end while another begins the next.
    epoch: u16,
    /// Messages that fit arrive in it together with their header, in one system call, and are copied on. Of longer ones
    /// only the beginning passes through it, and the rest goes straight to its place. A second system call (about 0.5
    /// µs) is cheaper than copying more than this twice. 4 KiB of data are 8 KiB in NCCL's LL protocol, and fit
    /// together with their header.
    input: Box<[u8]>,
    from: usize,
    to: usize,
    body: Body,
    /// Bytes that were peeked at and are still in the socket ([`wire::peek`]).
    peeked: usize,
    /// The last poll found nothing, so a request waits for the next bytes.
    awaited: bool,
    /// The additional state of a stream with checksums or encryption.
    seal: Option<Box<Sides>>,
    /// The chunk that is arriving, when it is reported to a profiler.
    followed: Option<Followed>,
    out: Vec<u8>,
    sent: usize,
    /// Whether an acknowledgement is due on this stream.
    ack_due: bool,
    /// The goodbye was sent; nothing may follow it.
    parted: bool,
    /// The sender has said goodbye on this stream.
    received_goodbye: bool,
}

impl Io {
    /// Moves the beginning of a header, all that is left in the input buffer, to the front.
    #[inline]
    fn make_room(&mut self) {
        if self.from > 0 {
            if self.from < self.to {
                self.input.copy_within(self.from..self.to, 0);
            }
            (self.from, self.to) = (0, self.to - self.from);
        }
    }

    /// Reads the socket's bytes: the rest of the open frame's payload into its place, the bytes behind it into the
    /// input buffer. With `may_peek`, bytes that a request waits for are only peeked at ([`wire::peek`]). Returns the
    /// result of [`wire::receive`], how many bytes there was room for, and how many of those are for the payload.
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
pub(crate) type RecvConn = Connection<Receiving>;

/// The data of the receiving side of a connection alone.
#[derive(Default)]
pub(crate) struct Receiving {
    /// Frames for the stream that is written next.
    outbox: Mutex<Vec<u8>>,
    /// Whether the outbox holds something: a check without its lock.
    mail: AtomicBool,
    /// The control thread has found that NCCL does not call. Then frames that no send waits for are acknowledged too,
    /// so that the sender can drop its copies.
    quiet: AtomicBool,
    /// Messages that were received; each part of a grouped receive counts.
    completed: AtomicU64,
    /// From the sender's goodbye: the number of its messages plus one. 0: none yet.
    announced: AtomicU64,
    /// Epochs of streams that the sender gave up or that ended here.
    fences: Mutex<Vec<Fence>>,
    /// When a stream last broke, or a query was unanswered, in a way that indicates trouble in the network and not at
    /// the peer.
    trouble: Mutex<Option<Instant>>,
    /// The listener that gets this connection when the peer has confirmed the welcome.
    waiting: Mutex<Option<Arc<Arrivals>>>,
}

impl StreamIo for Io {
    fn sock(&self) -> &Sock {
        &self.sock
    }

    fn into_sock(self) -> Sock {
        self.sock
    }

    fn epoch(&self) -> u16 {
        self.epoch
    }

    fn queue_frames(&mut self, mut frames: Vec<u8>) {
        if let Some(sides) = &mut self.seal {
            sides.sealer.control(&mut frames);
        }
        self.out.extend_from_slice(&frames);
    }

    fn queue_last_frame(&mut self, frame: Vec<u8>) -> Option<&[u8]> {
        self.queue_frames(frame);
        Some(&self.out[self.sent..])
    }
}

impl Direction for Receiving {
    type State = State;
    type Io = Io;

    const SENDS: bool = false;

    #[inline(always)]
    fn step(conn: &RecvConn, index: usize, io: &mut Io, work: u8, _ready: &mut u64) -> Step<Broken> {
        conn.step(index, io, work)
    }

    fn unattended(conn: &RecvConn, begins: bool) {
        conn.own.quiet.store(begins, Ordering::Relaxed);
    }

    fn describe(state: &State) -> String {
        state.core.describe()
    }

    fn needs(state: &State, memory: Span) -> bool {
        let wants = |(to, capacity): &(Target, usize)| Span::new(to.data.addr(), *capacity).meets(memory);
        state.targets.iter().flatten().flatten().any(wants)
    }

    /// The receive may still complete if a stream was lost recently and the sender may resend.
    #[cold]
    fn peer_left(conn: &RecvConn) -> bool {
        conn.is_recovering()
    }

    fn epoch_begins(_conn: &RecvConn, state: &mut State, index: usize, io: &mut Io) {
        state.core.stream_up(index, io.epoch);
    }

    fn epoch_begun(conn: &RecvConn, index: usize, io: &mut Io) {
        // Frames that report the end of other streams may be lost with the stream that carried them. Then the sender
        // still considers those other streams connected.
        let ended = conn.state().core.ended_epochs();
        if !ended.is_empty() {
            io.queue_frames(ended.into_iter().flat_map(|epoch| fenced(epoch).encode()).collect());
        }
        // The first epoch of the first stream is 0, that of the others 1.
        if io.epoch > u16::from(index > 0) {
            Counters::bump(&conn.counters.reconnects);
            conn.state().core.announcements().for_each(|header| conn.queue_on_any_stream(&header.encode()));
        }
    }

    /// Has no effect on the next epoch, if that has already begun.
    fn epoch_ended(conn: &RecvConn, index: usize, io: &Io, why: &Broken) -> bool {
        if let Some(error) = why.cause() {
            conn.note_trouble(io, error);
        }
        conn.end_stream_epoch(index, io.epoch, why.cause().is_some(), why.cause());
        true
    }

    fn recover(conn: &RecvConn, index: usize, epoch: u16, left: usize, error: &io::Error) {
        conn.await_return(index, epoch, left, error);
    }

    fn lose(conn: &RecvConn, index: usize, error: io::Error) {
        conn.lose(index, &error);
    }

    fn in_trouble(conn: &RecvConn) {
        *lock(&conn.own.trouble) = Some(Instant::now());
    }

    fn do_chores(conn: &RecvConn) -> Progress {
        conn.do_chores()
    }

    fn say_goodbye(conn: &RecvConn) {
        conn.say_goodbye();
    }

    fn closed(conn: &RecvConn) {
        conn.net.forget(conn.link.connection);
    }

    fn dropped(conn: &RecvConn) {
        conn.net.forget(conn.link.connection);
    }
}

/// An epoch of a stream that the control thread must fence.
struct Fence {
    index: usize,
    epoch: u16,
    /// Whether the sender requested it.
    requested: bool,
}

impl RecvConn {
    /// A connection without streams; the handshake adds the first when its welcome is on the way.
    pub(crate) fn new(net: Arc<Net>, link: Link, peer: Peer) -> Arc<Self> {
        let state = State {
            core: RecvCore::new(link.features & FEATURE_FAR != 0),
            targets: vec![[None; MAX_PARTS]; SLOTS],
            joined: Vec::new(),
            stages: Vec::new(),
            stage_heads: Vec::new(),
        };
        Self::without_streams(net, link, peer, Receiving::default(), state)
    }

    /// Puts a connected socket to work as stream `index`.
    pub(crate) fn add_stream(&self, index: usize, epoch: u16, registration: Registration, sock: Sock, seal: Seal) {
        let io = Io {
            sock,
            epoch,
            input: vec![0; 9 << 10].into_boxed_slice(),
            from: 0,
            to: 0,
            body: Body::None,
            peeked: 0,
            awaited: false,
            seal: seal.sides(),
            followed: None,
            out: Vec::new(),
            sent: 0,
            ack_due: false,
            parted: false,
            received_goodbye: false,
        };
        self.install(index, registration, io);
    }

    /// An epoch of a stream has ended; `may_return`: not by a goodbye. Does nothing when the next has already begun,
    /// which is then unaffected: both take the state's lock for it.
    fn end_stream_epoch(&self, index: usize, epoch: u16, may_return: bool, why: Option<&io::Error>) {
        let state = self.state();
        if state.core.epoch(index) != epoch {
            return;
        }
        self.note_end(index, why);
        if may_return {
            lock(&self.monitors)[index].ended(Instant::now());
        }
    }

    /// Starts a grouped receive; each part is buffer, capacity in bytes and tag. `None`: not now.
    ///
    /// # Errors
    /// When a message that has already arrived is longer than its receive.
    ///
    /// # Safety
    /// Every buffer must be writable for its capacity until the request ends, the memory is withdrawn or the connection
    /// is closed. `profilers` are NCCL's profiler handles of the parts, null or valid until `test` has reported the end
    /// of the request.
    pub(crate) unsafe fn irecv(
        &self,
        parts: &[(*mut u8, usize, i32)],
        profilers: &[*mut c_void],
    ) -> Result<Option<Ticket>> {
        if self.health.is_failed() {
            // As NCCL's own transports do: the call is accepted, and `test` returns the error.
            return Ok(self.requests.take(parts.len()));
        }
        let Some(ticket) = self.requests.take(parts.len()) else { return Ok(None) };
        if self.net.spread.uses_one_stream() {
            self.note_open(self.requests.outstanding());
        }
        for (part, profiler) in profilers.iter().enumerate() {
            self.events.follow(ticket.slot, part, *profiler);
        }
        let mut must_report = false;
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
                        self.queue_on_any_stream(&header.encode());
                        must_report = true;
                    }
                    Posted::Early(stage, total) => {
                        self.unstage(&mut state, stage, to, total);
                        // Credit that this receive has freed must be sent to the sender, which may wait for it.
                        must_report |= state.core.owes_credit();
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
        if must_report {
            self.run(0, WRITE);
            if !self.first_live.load(Ordering::Relaxed) {
                self.kick_all();
            }
        }
        self.attend();
        Ok(Some(ticket))
    }

    /// Whether the sender has reported how many messages there were, and all have arrived.
    fn has_everything(&self) -> bool {
        self.own.announced.load(Ordering::Relaxed) == self.own.completed.load(Ordering::Relaxed) + 1
    }

    /// Whether a stream was lost a short while ago. A sender that has said goodbye on the other streams reconnects it
    /// and resends its data, if there was any.
    #[cold]
    fn is_recovering(&self) -> bool {
        let now = Instant::now();
        self.recovery
            && !self.has_everything()
            && lock(&self.monitors).iter().any(|monitor| monitor.may_return(now, CLOSE_RECOVERY))
    }

    /// Makes the other streams carry frames that the first stream cannot.
    fn kick_all(&self) {
        self.streams.iter().for_each(Stream::kick);
    }

    /// Queues a frame for the peer, on the stream that is written next.
    fn queue_on_any_stream(&self, frame: &[u8]) {
        self.outbox().extend_from_slice(frame);
        self.own.mail.store(true, Ordering::Release);
    }

    fn outbox(&self) -> MutexGuard<'_, Vec<u8>> {
        lock(&self.own.outbox)
    }
}

/// A chunk as it is reported to a profiler.
fn profiled(header: &Header, stream: usize) -> Chunk {
    Chunk {
        offset: header.offset,
        length: u64::from(header.length),
        path: stream as u16,
        message: header.message,
        total: header.total,
        ..Chunk::default()
    }
}
