//! What both directions of a connection have in common: requests, health, and the socket of the handshake, which
//! becomes the [control channel](super::control).

use std::any::Any;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::adapter::{Adapter, Adapters, Memory, Mishap, Registration};
use super::alarm::Alarm;
use super::control::Control;
use super::dl::Verbs;
use super::fabric::{Fabric, Qp};
use super::outage::{QpMessage, QpNotice, Trouble, notice};
use super::trouble::{Doing, explain, is_path_failure};
use super::verbs::{Completion, QueuePair};
use crate::engine::counters::Counters;
use crate::engine::events::Events;
use crate::engine::poller::{Interest, Source};
use crate::engine::request::{Keys, Outcome, RequestSlots, Ticket};
use crate::engine::schedule::attend::Attention;
use crate::os::config::Config;
use crate::os::error::{Cause, Error, Result};
use crate::os::log::NET;
use crate::session::frame::{HEADER, Header, MAX_CONTROL, Type};
use crate::session::link::{Link, Sock};
use crate::session::net::Net;
use crate::session::peer::{Health, Peer, failure, left_early, lost, reported_by_peer};

/// How long after the peer's goodbye completions of its earlier writes may still appear, and how long after a flush the
/// peer may still report the cause.
const AFTERMATH: Duration = Duration::from_millis(200);

/// The bit that marks a query as present.
const QUERIED: u64 = 1 << 63;

/// Which end of a connection: one process may have both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The connecting one.
    Connecting,
    /// The listening one.
    Listening,
}

/// What the handshake hands to a connection.
pub(crate) struct Parts {
    /// The control thread and the farewells.
    pub net: Arc<Net>,
    /// The ports of this side.
    pub adapters: Adapters,
    /// The other end.
    pub peer: Peer,
    /// The control channel.
    pub sock: Sock,
    /// Number, key, rails.
    pub link: Link,
}

/// The common part of a connection.
pub(crate) struct Base {
    pub(super) net: Arc<Net>,
    /// The ports of this side.
    pub adapters: Adapters,
    /// The other end.
    pub peer: Peer,
    /// The first failure.
    pub health: Health,
    /// How often the control thread polls.
    pub attention: Attention,
    /// Its counters.
    pub counters: Counters,
    /// Its profiler events.
    pub events: Events,
    /// Number, the same on both ends, key and rails of the control channel.
    pub link: Link,
    /// Requests; the list of free ones is in the connection's state.
    pub requests: RequestSlots,
    /// Which end this is: the sender connects, the receiver listens.
    pub(super) side: Side,
    pub(super) doing: &'static str,
    closing: AtomicBool,
    /// The sender's query, with [`QUERIED`].
    query: AtomicU64,
    control: Mutex<Control>,
    /// Work requests were flushed. The failure that caused it has not arrived yet, or is this one.
    flushed: Mutex<Option<(Instant, Error)>>,
    /// Whether there is such a failure: checked in every `test` that finds nothing.
    has_flushed: AtomicBool,
    /// Asynchronous events of its queues.
    pub(super) mishap: Arc<Mishap>,
    /// The other side's messages about queue pairs.
    qp_messages: Mutex<Vec<QpMessage>>,
    /// Queue pairs that have ended and are still to be destroyed.
    ended: Mutex<Vec<QueuePair>>,
    /// Makes the thread that holds the connection's state take care of the queue pairs.
    pub(super) alarm: Alarm,
}

impl Base {
    /// The common part of a connection, and the keys to its requests. From here on lost queue pairs are replaced, if
    /// the user wants that.
    pub(crate) fn new(parts: Parts, fabric: &mut Fabric, side: Side) -> (Self, Keys) {
        let Parts { net, adapters, peer, sock, link } = parts;
        let health = Health::default();
        health.stream_up();
        let (requests, keys) = RequestSlots::with_keys();
        let base = Self {
            net,
            adapters,
            peer,
            health,
            attention: Attention::default(),
            counters: Counters::default(),
            events: Events::default(),
            link,
            requests,
            side,
            doing: if side == Side::Connecting { "sending to" } else { "receiving from" },
            closing: AtomicBool::new(false),
            query: AtomicU64::new(0),
            control: Mutex::new(Control::new(sock)),
            flushed: Mutex::new(None),
            has_flushed: AtomicBool::new(false),
            mishap: Arc::new(Mishap::new(fabric.alarm())),
            qp_messages: Mutex::default(),
            ended: Mutex::default(),
            alarm: fabric.alarm(),
        };
        if base.recovers() {
            fabric.recover();
        }
        (base, keys)
    }

    /// The configuration of the process.
    pub(crate) fn config(&self) -> &Config {
        &self.net.config
    }

    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it continues when a queue pair is lost.
    pub(crate) fn recovers(&self) -> bool {
        self.config().recovery
    }

    /// The other side's messages about queue pairs that were not processed yet.
    pub(super) fn qp_messages(&self) -> MutexGuard<'_, Vec<QpMessage>> {
        self.qp_messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ended(&self) -> MutexGuard<'_, Vec<QueuePair>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers each queue pair's path with the profiler's events, and its queues with the adapters, for failure
    /// events.
    pub(crate) fn name_paths(&self, fabric: Option<&Fabric>) {
        let Some(fabric) = fabric else { return };
        for (adapter, queue) in fabric.elements() {
            self.adapters[adapter].concern(queue, &self.mishap);
        }
        (0..fabric.qps().len()).for_each(|index| self.name_path(fabric, index));
    }

    fn name_path(&self, fabric: &Fabric, index: usize) {
        self.events.set_path(index, fabric.qps()[index].path(&self.adapters));
    }

    /// The same for a queue pair that was replaced.
    pub(super) fn name_qp(&self, fabric: &Fabric, index: usize) {
        let qp = &fabric.qps()[index];
        if let Some(queue) = qp.element() {
            self.adapters[qp.adapter].concern(queue, &self.mishap);
        }
        self.name_path(fabric, index);
    }

    /// Whether requests are outstanding that were made with these keys.
    pub(super) fn has_outstanding(&self, keys: &Keys) -> bool {
        self.requests.outstanding_of(keys) > 0
    }

    /// NCCL's thread, in `test`: the outcome of a request if it is done. The profiler gets it before NCCL.
    #[inline]
    pub(crate) fn finish(&self, ticket: Ticket) -> Option<Outcome> {
        // SAFETY: NCCL's thread, and NCCL has not received the end of any outstanding request.
        unsafe { self.events.finish(&self.requests, ticket) }
    }

    /// NCCL's thread, in `test`: a request has failed.
    pub(crate) fn abandon(&self, ticket: Ticket) {
        // SAFETY: as in `finish`.
        unsafe { self.events.abandon(ticket.slot) };
        self.requests.abandon(ticket);
    }

    /// Makes the control thread watch the control channel, and take care of the connection when it is kicked.
    ///
    /// # Errors
    /// When there is no control thread, or the kernel refuses the socket.
    pub(crate) fn watch(&self, source: Arc<dyn Source>) -> Result<()> {
        let mut control = self.control();
        control.source = Some(source);
        self.watch_socket(&mut control)
    }

    /// Makes the control thread watch the current socket.
    pub(super) fn watch_socket(&self, control: &mut Control) -> Result<()> {
        control.registration = None;
        let Some(source) = control.source.clone() else { return Ok(()) };
        let fd = control.sock.as_ref().map(|sock| (sock.as_raw_fd(), Interest::Data));
        let registration = self.net.poller.control_thread()?.register(source, fd)?;
        // Data may have arrived before the descriptor was watched.
        registration.kick();
        control.registration = Some(registration);
        Ok(())
    }

    /// Notifies the control thread that something is outstanding, unless it knows.
    #[inline]
    pub(crate) fn attend(&self) {
        if self.attention.wanted() {
            self.call_control_thread();
        }
    }

    #[cold]
    fn call_control_thread(&self) {
        if let Some(registration) = &self.control().registration {
            registration.kick();
        }
    }

    /// Whether the connection is being closed here.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// From now on failures are ignored.
    pub(crate) fn set_closing(&self) {
        self.closing.store(true, Ordering::Release);
    }

    /// Reads the peer's frames. Returns the failure that the peer reports, or that follows from its end or its silence.
    ///
    /// # Errors
    /// That failure.
    pub(crate) fn read_control(&self) -> Result<()> {
        let (mut control, patience) = (self.control(), self.config().peer_timeout);
        control.judge(patience, &self.peer)?;
        let end = loop {
            control.write();
            let mut room = [0; HEADER + MAX_CONTROL as usize];
            match control.read(&mut room, patience) {
                Ok(None) => return Ok(()),
                Ok(Some(count)) => {
                    let Control { input, taken, .. } = &mut *control;
                    input.extend_from_slice(&room[..count]);
                    if let Some(received) = self.take_frames(input, taken)? {
                        control.resume(received)?;
                    }
                    if self.health.is_peer_done() {
                        (control.away, control.inquiry) = (None, None);
                    }
                }
                Err(end) => break end,
            }
        };
        if self.goes_on_without(&mut control, &end) {
            return self.watch_socket(&mut control);
        }
        control.ended = Some(Instant::now());
        drop(control);
        self.health.stream_down();
        if self.health.is_peer_done() || self.is_closing() {
            return Ok(());
        }
        Err(lost(&end).with_peer(&self.peer))
    }

    /// Processes the complete frames, and counts them. Returns how many frames the other side has received, if it
    /// reports that.
    fn take_frames(&self, input: &mut Vec<u8>, taken: &mut u64) -> Result<Option<u64>> {
        let mut received = None;
        while let Some(bytes) = input.first_chunk::<HEADER>() {
            let header = Header::decode(bytes)?;
            let end = HEADER + header.length as usize;
            if input.len() < end {
                break;
            }
            match header.kind {
                Type::Bye => self.health.peer_is_done(),
                // Only the receiving side uses this query.
                Type::Query => {
                    self.query.store(header.total | QUERIED, Ordering::Release);
                    self.alarm.raise();
                }
                Type::Fail => return Err(reported_by_peer(header.order, &input[HEADER..end]).with_peer(&self.peer)),
                Type::Fenced => {
                    self.qp_message(QpMessage { notice: QpNotice::Ended(header.total), ..QpMessage::of(&header) })
                }
                Type::QueuePair => self.qp_message(QpMessage { notice: notice(&header), ..QpMessage::of(&header) }),
                Type::Ack => received = Some(header.offset),
                other => {
                    let what = format!("the peer sent a {other:?} frame over the control channel");
                    return Err(Error::remote(what).with_peer(&self.peer));
                }
            }
            input.drain(..end);
            *taken += u64::from(!matches!(header.kind, Type::Query | Type::Ack));
        }
        Ok(received)
    }

    /// The other side has sent a message about a queue pair.
    fn qp_message(&self, message: QpMessage) {
        self.qp_messages().push(message);
        self.alarm.raise();
    }

    /// Registers the memory of a request until it ends, if the host has not; None for zero bytes.
    ///
    /// # Errors
    /// When it cannot be pinned.
    #[cold]
    pub(crate) fn pin(&self, address: u64, bytes: u64) -> Result<Option<Arc<Registration>>> {
        if bytes == 0 {
            return Ok(None);
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        Registration::new(&self.adapters, address, bytes, Memory::Host, None).map(|made| Some(Arc::new(made)))
    }

    /// A work request has failed. A flush is only the consequence of another failure, which the peer may be about to
    /// report: it is used if no better cause arrives for a while.
    ///
    /// # Errors
    /// The failure, unless it was a flush.
    #[cold]
    pub(crate) fn broken(&self, qp: &mut Qp, completion: &Completion, doing: Doing) -> Result<()> {
        let error = self.explain(qp, completion, doing);
        let is_flush = completion.is_flushed();
        if qp.recovers && is_path_failure(completion.status()) {
            qp.suffers(Trouble { error, is_flush });
            return Ok(());
        }
        if !is_flush {
            return Err(error);
        }
        self.was_flushed(error);
        Ok(())
    }

    /// The meaning of a failed completion.
    pub(crate) fn explain(&self, qp: &Qp, completion: &Completion, doing: Doing) -> Error {
        let adapter = &self.adapters[qp.adapter];
        let text = Verbs::load().map_or("", |verbs| verbs.status_text(completion.status()));
        let error = explain(completion, text, &adapter.name(), adapter.is_port_down(), qp.ends(), doing);
        error.with_peer(&self.peer)
    }

    /// Keeps the failure, for use if no better cause arrives for a while.
    fn was_flushed(&self, error: Error) {
        self.flushed().get_or_insert_with(|| (Instant::now(), error));
        self.has_flushed.store(true, Ordering::Release);
    }

    fn flushed(&self) -> MutexGuard<'_, Option<(Instant, Error)>> {
        self.flushed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an unfinished request can still be completed.
    ///
    /// # Errors
    /// When the connection has failed, or the peer has left for good.
    #[inline]
    pub(crate) fn verdict(&self, ticket: Ticket) -> Result<()> {
        // Checked in every `test` that finds nothing, so first whether anything unusual has happened at all.
        let is_ordinary = !self.health.is_failed()
            && !self.health.is_peer_done()
            && !self.has_flushed.load(Ordering::Acquire)
            && !self.mishap.is_any()
            && !self.adapters.iter().any(|adapter| adapter.is_dead());
        if is_ordinary { Ok(()) } else { self.judge(ticket) }
    }

    #[cold]
    fn judge(&self, ticket: Ticket) -> Result<()> {
        self.health.check()?;
        if let Some(dead) = self.dead_adapter() {
            let what = format!("the RDMA device of {} failed", dead.name());
            self.fail(Error::new(Cause::System, what).with_hint("look at the kernel's log"));
            return self.health.check();
        }
        if self.health.is_over() && self.control().ended.is_none_or(|ended| ended.elapsed() > AFTERMATH) {
            // Another thread may have ended it after the caller polled it.
            if self.requests.is_done(ticket) {
                return Ok(());
            }
            self.leaves_early();
            return self.health.check();
        }
        // As with flushes: a completion with more information may follow.
        if !self.recovers()
            && let Some(text) = self.mishap.first()
        {
            let what = format!("a device reports {text} of a queue of this connection");
            let error = Error::new(Cause::System, what).with_hint("look at the kernel's log and at the driver");
            self.was_flushed(error.with_peer(&self.peer));
        }
        if self.has_flushed.load(Ordering::Acquire)
            && let Some((at, error)) = &*self.flushed()
            && at.elapsed() > AFTERMATH
        {
            self.fail(error.clone());
            return self.health.check();
        }
        Ok(())
    }

    /// An adapter that the connection needs and that has failed for good.
    fn dead_adapter(&self) -> Option<&Arc<Adapter>> {
        let dead = self.adapters.iter().find(|adapter| adapter.is_dead())?;
        // With recovery, the queue pairs of a failed device are given up, until none is left.
        (!self.recovers() || self.adapters.iter().all(|adapter| adapter.is_dead())).then_some(dead)
    }

    /// Keeps the failure if it is the first, and reports it to the log and the peer.
    pub(crate) fn fail(&self, error: Error) {
        let frames = failure(&error);
        let error = if error.peer().is_some() { error } else { error.with_peer(&self.peer) };
        // Claimed before any other thread can see the failure: otherwise the call that gets the failure might log it
        // without the peer's name.
        let tells = !self.is_closing() && error.report_once();
        let is_first = self.health.fail_telling(error.clone(), || self.send_control(&frames));
        if is_first && tells {
            self.peer.warn_of(self.doing, &error);
        }
    }

    /// The peer has said goodbye, and something was still outstanding.
    pub(super) fn leaves_early(&self) {
        self.fail(left_early(&self.peer));
    }

    /// The failure when this side did `did` while requests were outstanding.
    pub(super) fn ended_early(&self, did: &str) -> Error {
        let doing = if self.side == Side::Connecting { "sending" } else { "receiving" };
        Error::remote(format!("the {doing} side {did} with transfers in flight"))
    }

    /// The host took memory of an outstanding request back, as it does on an abort: nothing to warn of.
    pub(super) fn was_withdrawn(&self) {
        let error = self.ended_early("took back memory").with_peer(&self.peer);
        let frames = failure(&error);
        self.health.fail_telling(error, || self.send_control(&frames));
    }

    /// Sends a frame, over this socket or the next one.
    pub(super) fn send_control(&self, frame: &[u8]) {
        let mut control = self.control();
        if control.sock.is_some() || control.away.is_some() {
            control.sent_frames.add(frame);
        }
        control.queue_frame(frame);
    }

    /// Whether the socket has not accepted all frames, or the peer's kernel has not acknowledged them: the control
    /// thread polls again with [`Base::read_control`].
    pub(crate) fn has_more_to_send(&self) -> bool {
        let control = self.control();
        !control.output.is_empty() || control.monitor.awaits_answer() || control.away.is_some()
    }

    /// Sending side: requests the receiver to announce its posted receives; `cts_entries` were read so far.
    pub(crate) fn query(&self, cts_entries: u32) {
        // The query is repeated anyway.
        self.control().queue_frame(&Header { total: cts_entries.into(), ..Header::of(Type::Query, 0) }.encode());
    }

    /// Receiving side: the sender's query since the last call, and how many CTS entries it has read.
    pub(super) fn take_query(&self) -> Option<u32> {
        if self.query.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let query = self.query.swap(0, Ordering::AcqRel);
        (query & QUERIED != 0).then_some(query as u32)
    }

    /// Says goodbye and hands the socket to the control thread, with the objects that must exist until the peer has
    /// closed too.
    pub(crate) fn leave(&self, cargo: Option<Box<dyn Any + Send>>) {
        if !self.health.is_failed() {
            self.send_control(&Header::of(Type::Bye, 0).encode());
        }
        self.part(cargo);
        tracing::debug!(target: NET, "closed the connection to {}: {}", self.peer, self.counters);
    }

    /// Hands the socket to the control thread, which closes it when the peer has read everything.
    pub(crate) fn part(&self, cargo: Option<Box<dyn Any + Send>>) {
        let (registration, sock) = {
            let mut control = self.control();
            (control.registration.take(), control.sock.take())
        };
        drop(registration);
        if let Some(sock) = sock {
            self.health.stream_down();
            self.net.linger_with(sock, cargo);
        }
    }
}
