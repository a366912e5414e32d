//! The sending side of a connection: core, streams, requests.
//!
//! `isend` posts a message to the [`SendCore`] and, when it is short, sends it in the same call. Long messages are
//! cut into chunks by the workers that own the further streams. Acknowledgements and clear-to-sends come back on
//! the reverse half of the streams.

mod closing;
mod joining;
mod moving;
mod recovery;
mod sealed;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::connection::{Connection, Direction, StreamIo, lock};
use super::copies::{COPIES, Own};
use super::delivery::Deliveries;
use super::limits::{COPY_FIRST_MAX, EAGER_MAX, is_far};
use super::send_core::{Admit, Key, SendCore, Written};
use super::stream::{READ, SEND, Step, WRITE};
use crate::engine::backoff_timer::BackoffTimer;
use crate::engine::counters::Counters;
use crate::engine::events;
use crate::engine::poller::{Progress, Registration};
use crate::engine::request::Ticket;
use crate::engine::schedule::constants::{INLINE_MAX, OWN_MAX};
use crate::engine::schedule::load;
use crate::engine::span::Span;
use crate::os::error::Result;
use crate::os::ticks::Ticks;
use crate::session::dialer;
use crate::session::frame::{HEADER, Header, MAX_STREAMS};
use crate::session::handshake::{FEATURE_FAR, FEATURE_RECOVERY};
use crate::session::link::{Link, Sock};
use crate::session::net::Net;
use crate::session::owner::{ConnectingSide, Streams};
use crate::session::peer::{Broken, Peer, left_early};
use crate::session::seal::codec::Sealed;
use crate::session::seal::{Seal, Sides};
use crate::session::wire::{self, Piece, send_all};

/// Where a message's bytes are.
struct Payload {
    data: *const u8,
    /// A copy, with room for the header before it. The request was reported done and the buffer went back to NCCL, so
    /// the message is sent, and resent, from this copy.
    replay: Option<Vec<u8>>,
    length: u64,
    /// Bytes that the kernel accepted for the first time.
    written: u64,
    /// The request to end; none once it has ended.
    ticket: Option<Ticket>,
}

// SAFETY: the transport may use the memory at `data` until the request ends (the promise of `isend`). The payload is
// only reached under the state's lock or while a chunk of it is unacknowledged.
unsafe impl Send for Payload {}

/// The data that changes under the state's lock.
pub(crate) struct State {
    core: SendCore,
    payloads: Vec<Option<Payload>>,
    done: Vec<Key>,
    copies: Own,
    /// When to send the receiver a query about stalled messages.
    query_timer: BackoffTimer,
}

/// A chunk under way to the kernel: what must be done when the kernel has accepted all of it.
#[derive(Debug, Clone, Copy)]
struct Leaving {
    key: Key,
    length: u32,
    /// A whole message that is copied for a possible resend when it has left ([`SendCore::fly`]).
    copied: bool,
    /// Its request may end then, so the end of the write must be recorded.
    ends: bool,
}

/// The piece that a stream is sending.
enum Outgoing {
    /// Control frames.
    Control(Vec<u8>),
    /// A header, which the stream holds ([`Io::header`]), and a chunk from where NCCL has it.
    Framed(Piece, Leaving),
    /// A whole message with its header, from its copy: up to [`COPY_FIRST_MAX`] bytes, or a resend.
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

    /// Sends as many of the bytes after the first `sent` as the socket accepts now.
    ///
    /// # Errors
    /// As [`wire::send`].
    ///
    /// # Safety
    /// The pieces must be readable for their whole length.
    #[inline]
    unsafe fn send(&self, fd: RawFd, header: &[u8; HEADER], sent: usize) -> io::Result<Option<usize>> {
        // SAFETY: the caller keeps the promise about the pieces.
        unsafe {
            match self {
                Self::Whole(bytes, _) => wire::send(fd, bytes.skip(sent)),
                Self::Framed(body, _) if body.length == 0 => wire::send(fd, Piece::of(&header[sent..])),
                Self::Framed(body, _) => {
                    let head = Piece::of(&header[sent.min(HEADER)..]);
                    wire::send_pieces(fd, [head, body.skip(sent.saturating_sub(HEADER))])
                }
                Self::Control(bytes) => wire::send(fd, Piece::of(&bytes[sent..])),
                Self::Sealed(sealed, _) => wire::send_pieces(fd, sealed.rest(sent)),
            }
        }
    }
}

/// A stream's socket, and what is being sent on it.
pub(crate) struct Io {
    sock: Sock,
    /// The epoch of the stream. One thread may notice its end while another begins the next.
    epoch: u16,
    out: Option<Outgoing>,
    header: [u8; HEADER],
    sent: usize,
    /// There was more for this stream when `out` was taken, or a thread has requested a poll since. A thread that makes
    /// more ready sets this flag, so without the flag no poll is needed when `out` has left.
    more: bool,
    /// Counts the frames that the kernel accepted completely.
    written: Arc<Written>,
    /// Bytes sent since the queue on the path was measured.
    unmeasured: u64,
    control: Vec<u8>,
    /// The goodbye was sent, or is in `control`.
    parted: bool,
    /// The additional state of a stream with checksums or encryption.
    seal: Option<Box<Sides>>,
    input: Vec<u8>,
    filled: usize,
    /// The chunk that is being sent, when it is reported to a profiler, and since when the socket has been full.
    followed: Option<(Ticket, u64)>,
    /// The report to the profiler once the kernel has accepted the first bytes of the chunk.
    start_to_report: Option<(Ticket, events::Chunk)>,
    /// The report once the kernel has accepted all of the chunk, which ends its request; and the start time.
    leaving: Option<(Ticket, events::Chunk, Ticks)>,
    blocked: Option<Ticks>,
}

/// A connection that sends.
pub(crate) type SendConn = Connection<Sending>;

/// The data of the sending side of a connection alone.
pub(crate) struct Sending {
    /// The path is long.
    far: bool,
    /// Over one rail that is not long. Then one further stream may carry long messages.
    one_rail: bool,
    grown: AtomicBool,
    /// Streams beyond the first that count against the process's budget until this connection is dropped.
    extra: AtomicUsize,
    /// Whether a message may be waiting for its receive or for credit.
    stalled: AtomicBool,
    /// Streams, with their epoch and the frames taken in, that the receiver has given up.
    condemned: Mutex<Vec<(usize, u16, u64)>>,
    deliveries: Mutex<Deliveries>,
    /// A bit for each stream that is being connected again.
    repairs: AtomicUsize,
    /// For each stream the pair of rails that it prefers, counted from its own.
    preferred_pairs: Mutex<[u8; MAX_STREAMS]>,
    /// A bit for each stream that is connected over another pair than its own, and for each that was ever over its own.
    on_other_pair: AtomicUsize,
    was_on_own_pair: AtomicUsize,
    /// The last epoch that each stream tried.
    epochs: Mutex<[u16; MAX_STREAMS]>,
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

    fn queue_frames(&mut self, frames: Vec<u8>) {
        self.control.extend_from_slice(&frames);
    }

    fn queue_last_frame(&mut self, frame: Vec<u8>) -> Option<&[u8]> {
        if self.out.is_some() {
            return None;
        }
        self.queue_frames(frame);
        if let Some(sides) = &mut self.seal {
            sides.sealer.control(&mut self.control);
        }
        Some(&self.control)
    }
}

impl Direction for Sending {
    type State = State;
    type Io = Io;

    const SENDS: bool = true;

    #[inline(always)]
    fn step(conn: &SendConn, index: usize, io: &mut Io, work: u8, ready: &mut u64) -> Step<Broken> {
        conn.step(index, io, work, ready)
    }

    #[inline]
    fn unfinished(conn: &SendConn) {
        if conn.own.stalled.load(Ordering::Relaxed) {
            conn.query_receiver();
        }
    }

    fn wake_streams(conn: &SendConn, bytes: u64) {
        conn.wake_streams(bytes);
    }

    fn describe(state: &State) -> String {
        state.core.describe()
    }

    fn is_under_way(state: &State) -> bool {
        state.core.is_under_way()
    }

    fn needs(state: &State, memory: Span) -> bool {
        // A copied message is sent from the copy, and the buffer of an ended request is not read.
        let reads = |payload: &Payload| {
            let span = Span::new(payload.data.addr(), payload.length as usize);
            payload.ticket.is_some() && payload.replay.is_none() && span.meets(memory)
        };
        state.payloads.iter().flatten().any(reads)
    }

    /// If the receiver reported that it had received everything, only its acknowledgements were lost.
    #[cold]
    fn peer_left(conn: &SendConn) -> bool {
        let mut state = conn.state();
        let State { core, payloads, done, copies, .. } = &mut *state;
        if conn.health.has_peer_received(core.next_number()) {
            core.all_received(done);
            conn.end_messages(payloads, copies, done);
        }
        false
    }

    fn epoch_begins(conn: &SendConn, state: &mut State, index: usize, io: &mut Io) {
        state.core.stream_up(index, io.epoch);
        io.written = state.core.counts(index);
        let pair = conn.link.pair_of(&io.sock);
        lock(&conn.own.deliveries).begins(index, pair, state.core.arrived(index), Instant::now());
    }

    fn epoch_ended(conn: &SendConn, index: usize, io: &Io, why: &Broken) -> bool {
        conn.end_epoch(index, io.epoch, why.cause())
    }

    fn recover(conn: &SendConn, index: usize, _epoch: u16, _left: usize, error: &io::Error) {
        if conn.still_delivers(index, error) {
            conn.repair(index, error);
        }
    }

    fn lose(conn: &SendConn, index: usize, error: io::Error) {
        conn.lose(index, error);
    }

    fn do_chores(conn: &SendConn) -> Progress {
        conn.do_chores()
    }

    fn say_goodbye(conn: &SendConn) {
        conn.say_goodbye();
    }

    fn dropped(conn: &SendConn) {
        conn.net.streams_ended(conn.own.extra.load(Ordering::Relaxed));
    }
}

impl SendConn {
    /// A connection whose first stream has finished its handshake, except for the confirmation in [`SendConn::begin`].
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    pub(crate) fn new(net: Arc<Net>, link: Link, peer: Peer, first: Sock, seal: Seal) -> Result<Arc<Self>> {
        let recovery = link.features & FEATURE_RECOVERY != 0;
        if recovery {
            COPIES.warm_up();
        }
        let state = State {
            core: SendCore::new(recovery),
            payloads: Vec::new(),
            done: Vec::new(),
            copies: Own::default(),
            query_timer: BackoffTimer::for_queries(),
        };
        let far = is_far(link.round_trip);
        let own = Sending {
            far,
            // Several rails are several wires, and a long path has its own rules.
            one_rail: link.pairs() == 1 && !far,
            grown: AtomicBool::new(false),
            extra: AtomicUsize::new(0),
            stalled: AtomicBool::new(false),
            condemned: Mutex::new(Vec::new()),
            deliveries: Mutex::new(Deliveries::new(link.pairs())),
            repairs: AtomicUsize::new(0),
            preferred_pairs: Mutex::default(),
            on_other_pair: AtomicUsize::new(0),
            was_on_own_pair: AtomicUsize::new(0),
            epochs: Mutex::default(),
        };
        let conn = Connection::without_streams(net, link, peer, own, state);
        conn.state().core.set_round_trip(conn.link.round_trip);
        if conn.link.features & FEATURE_FAR != 0 {
            conn.state().core.set_peer_has_room();
        }
        if conn.own.far {
            conn.state().core.go_far();
        }
        if conn.pairs() > 1 {
            conn.state().core.acknowledge_each();
        }
        let registration = conn.register_socket(0, &first)?;
        conn.add_stream(0, 0, registration, first, seal);
        Ok(conn)
    }

    /// Confirms to the peer that this side has its welcome: from then on both have the connection. So this is the last
    /// step that may fail. A peer with the confirmation would wait on this connection, and not on the one that is tried
    /// next.
    ///
    /// # Errors
    /// When it cannot be sent.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<()> {
        let confirmation = self.link.connection.to_le_bytes();
        // A stream that has broken in the meantime is being connected again, and that confirms the same.
        self.streams[0].with_io(|io| send_all(&io.sock, &confirmation)).unwrap_or(Ok(()))?;
        let me: Arc<dyn ConnectingSide> = self.clone();
        self.net.remember_connecting(&me);
        if !self.recovery {
            // If the stream were dropped half-way because the connection is closed again, the peer would consider that
            // a failure.
            return Ok(());
        }
        if self.net.may_grow_early() {
            self.grow();
        } else if self.pairs() > 1 {
            // Over a second rail at once: if the first one fails, each side can be notified over the other.
            self.grow_to(1);
        }
        Ok(())
    }

    /// Puts a connected socket to work as stream `index`.
    fn add_stream(&self, index: usize, epoch: u16, registration: Registration, sock: Sock, seal: Seal) {
        let io = Io {
            sock,
            epoch,
            out: None,
            header: [0; HEADER],
            sent: 0,
            more: false,
            // The core's counter replaces this one when the epoch begins.
            written: Arc::default(),
            unmeasured: 0,
            control: Vec::new(),
            parted: false,
            seal: seal.sides(),
            input: vec![0; 32 * HEADER],
            filled: 0,
            followed: None,
            start_to_report: None,
            leaving: None,
            blocked: None,
        };
        self.install(index, registration, io);
    }

    /// Ends an epoch of a stream in the core, once, and remembers the reason, if it is known. Returns whether it was
    /// this call that did. The start of the next epoch, which clears the reason, takes the state's lock too.
    fn end_epoch(&self, index: usize, epoch: u16, why: Option<&io::Error>) -> bool {
        let mut state = self.state();
        let was_live = state.core.end_epoch(index, epoch);
        if was_live {
            self.note_end(index, why);
        }
        was_live
    }

    /// Starts a send. `None`: not now, all request slots are taken.
    ///
    /// # Errors
    /// When the message is longer than its receive.
    ///
    /// # Safety
    /// `data` must be readable for `length` bytes until the request ends, the memory is withdrawn or the connection is
    /// closed. `profiler` is null or NCCL's profiler handle of this transfer, valid until `test` has reported the end
    /// of it.
    pub(crate) unsafe fn isend(
        &self,
        data: *const u8,
        length: usize,
        tag: i32,
        profiler: *mut c_void,
    ) -> Result<Option<Ticket>> {
        // A receiver that has said goodbye receives nothing any more, but a short send would still be reported done.
        // The acknowledgement of an earlier send may still be unread. Then the connection fails when its streams have
        // ended, not before.
        if self.health.is_peer_done() && self.requests.outstanding() == 0 {
            self.fail_silently(left_early(&self.peer));
        }
        // As NCCL's own transports do: the call is accepted, and `test` returns the error.
        if self.health.is_failed() || self.health.is_peer_done() {
            return Ok(self.requests.take(1));
        }
        let Some(ticket) = self.requests.take(1) else { return Ok(None) };
        if length as u64 > OWN_MAX {
            let open = self.requests.outstanding();
            self.note_message(length as u64, open);
            self.note_open(open);
            self.grow();
        }
        let hand_over = self.is_for_workers(length as u64);
        let sends_itself = length as u64 <= EAGER_MAX && !hand_over;
        let posted_at = self.events.follow(ticket.slot, 0, profiler);
        // The number of a message that is done when it is posted.
        let mut done_as = None;
        // The message is sent in this call if the first stream is free. As always, the stream is locked before the
        // state.
        let mut held = if sends_itself { self.streams[0].hold() } else { None };
        let mut work = WRITE;
        let posted = {
            let mut state = self.state();
            let number = state.core.next_number();
            // SAFETY: the caller keeps the promise about the buffer.
            let posted = unsafe { self.post(&mut state, ticket, data, length, tag, hand_over) };
            if posted_at.is_some() && self.requests.is_done(ticket) {
                done_as = Some(number);
            }
            if let (Ok((_, Admit::Ready)), Some(Some(io))) = (&posted, held.as_deref_mut())
                && io.out.is_none()
            {
                io.out = self.next_outgoing(&mut state, 0, io);
                work = if state.core.should_read_acks() { SEND | READ } else { SEND };
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
                self.run_held(held, 0, work);
                load::copied(length);
                if !self.first_live.load(Ordering::Relaxed) {
                    self.wake_streams(length as u64);
                }
            }
            Ok((_, Admit::ForWorkers)) => {
                self.wake_streams(length as u64);
                // No work of its own: serves what others left on the first stream meanwhile.
                self.run_held(held, 0, 0);
            }
            Ok((key, Admit::AwaitsReceiver)) => {
                self.run_held(held, 0, READ);
                let query = self.state().core.query_at_once(key);
                if let Some(header) = query {
                    self.send_control(&[header]);
                }
                self.own.stalled.store(true, Ordering::Relaxed);
            }
            Ok((_, Admit::AwaitsCredit)) => {
                self.run_held(held, 0, READ);
                self.own.stalled.store(true, Ordering::Relaxed);
            }
        }
        self.attend();
        if let (Some(message), Some(began)) = (done_as, posted_at) {
            self.events.chunk_over(
                &self.requests,
                ticket.slot,
                0,
                &events::Chunk::whole(length as u64, message),
                began,
            );
        }
        // Reported only when it has left, because the report takes a tenth of a short message's latency.
        if sends_itself && self.events.has_sink() && self.requests.is_done(ticket) {
            // SAFETY: inside isend.
            unsafe { self.events.settle(&self.requests, ticket) };
        }
        Ok(Some(ticket))
    }

    /// Whether workers send a message. Of messages up to 64 KiB, the longer ones are left to a worker that is awake.
    /// Waking a worker takes longer than sending the message here. It is worth it only if this thread has too much to
    /// do, or the path is long and one stream carries little. On a connection with one stream this thread sends all.
    #[inline]
    fn is_for_workers(&self, length: u64) -> bool {
        length > OWN_MAX
            && self.health.live() > 1
            && (load::is_high() || length > INLINE_MAX && (self.own.far || self.streams[1].is_awake()))
    }

    /// Posts a message to the core.
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
            // SAFETY: the caller keeps the promise about the buffer.
            unsafe { state.copies.copy(data, length) }
        });
        // A message that must wait for credit is not done yet: otherwise nothing would bound the copies.
        let waits = (replay.is_none() || admit != Admit::Ready).then_some(ticket);
        if waits.is_none() {
            Counters::count(&self.counters.messages, 1);
            self.requests.complete_part(ticket.slot, 0, length as u64);
        }
        match admit {
            Admit::Ready | Admit::ForWorkers => {}
            Admit::AwaitsReceiver => Counters::count(&self.counters.stalls_receiver, 1),
            Admit::AwaitsCredit => Counters::count(&self.counters.stalls_credit, 1),
        }
        state.payloads[key] = Some(Payload { data, replay, length: length as u64, written: 0, ticket: waits });
        Ok((key, admit))
    }

    /// Sends the receiver a query about messages that have waited a while. Receives of short messages are not
    /// announced. Without a query, a message would wait for ever if it is too long to be sent unannounced, or if early
    /// messages of other tags have used up the credit.
    fn query_receiver(&self) {
        let headers = {
            let mut state = self.state();
            if !state.core.is_stalled() {
                state.query_timer.reset();
                self.own.stalled.store(false, Ordering::Relaxed);
                return;
            }
            if !state.query_timer.is_due(Instant::now()) {
                return;
            }
            state.core.stalled()
        };
        self.send_control(&headers);
    }

    /// Sends control frames to the receiver, in this thread.
    fn send_control(&self, headers: &[Header]) {
        let voice = self.control_stream();
        headers.iter().for_each(|header| self.queue_control(voice, *header));
        self.run(voice, WRITE);
    }

    /// The stream for control frames: the first that is connected.
    fn control_stream(&self) -> usize {
        if self.first_live.load(Ordering::Relaxed) {
            return 0;
        }
        let state = self.state();
        (0..MAX_STREAMS).find(|index| state.core.is_live(*index)).unwrap_or(0)
    }

    /// A control frame for the receiver.
    fn queue_control(&self, index: usize, header: Header) {
        self.streams[index].with_io(|io| io.queue_frames(header.encode().to_vec()));
    }

    /// Requests more streams, once.
    fn grow(&self) {
        if !self.own.grown.load(Ordering::Relaxed) && !self.own.grown.swap(true, Ordering::Relaxed) {
            self.grow_to(MAX_STREAMS);
        }
    }

    /// Opens further streams, no more than `most`.
    fn grow_to(&self, most: usize) {
        let Some(me) = self.me.upgrade() else { return };
        let me: Arc<dyn Streams> = me;
        let wanted = self.net.streams_per_connection(self.pairs()).saturating_sub(1);
        for index in self.own.extra.load(Ordering::Relaxed) + 1..=wanted.min(most) {
            if let Err(budget) = self.net.stream_begins() {
                let connection = self.link.connection;
                tracing::debug!(
                    "the process has its {budget} extra streams; connection {connection:x} stays with fewer"
                );
                return;
            }
            self.own.extra.fetch_add(1, Ordering::Relaxed);
            dialer::join(Arc::clone(&self.net), &me, index);
        }
    }

    /// Starts as many streams as a message can use. Without further streams the calling thread sends it on the first.
    fn wake_streams(&self, length: u64) {
        let one = self.own.one_rail && self.net.spread.uses_one_stream();
        let (streams, count, reads) = {
            let core = &mut self.state().core;
            let (streams, count) = core.engage(length, one);
            (streams, count, count == 0 && core.should_read_acks())
        };
        for &index in &streams[..count] {
            match index {
                // By NCCL's thread in `isend`, or by the thread that has read the clear-to-send.
                0 => {
                    self.run(0, WRITE);
                }
                _ => self.streams[usize::from(index)].kick(),
            }
        }
        if count == 0 {
            self.run(0, if reads { READ | WRITE } else { WRITE });
        }
    }
}
