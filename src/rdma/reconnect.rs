//! Another socket for a control channel.
//!
//! A connection's queue pairs carry its messages whatever happens to the TCP socket beside them. So with recovery, the
//! end of that socket ends the connection only when the peer's process is gone:
//!
//! - **An end of file** comes from the peer's kernel, and from a process that ends. It counts as proof.
//! - **A reset** may come from a firewall that has forgotten the flow, or from an administrator. The connecting side
//!   connects another socket; the listening side calls the other, which may not have noticed, and waits for it to
//!   connect. Whether the peer is alive is determined as for TCP's streams ([`lifeline`](crate::session::lifeline)): a
//!   peer that refuses on all its rails for most of a second is dead.
//! - **This host's kernel gives the socket up** when nothing has answered its keepalive probes: a firewall may have
//!   forgotten the flow and drop its packets. The same follows, for the rest of `TOWLINE_PEER_TIMEOUT`.
//! - **Silence** while sent data is under way, or a link that goes down: the connecting side connects another socket,
//!   and makes the kernel probe the old one often. When an answer arrives over the old one after all, or when the new
//!   connection is refused, the old one is kept. A silent peer need not be dead, and the refusal may come from a
//!   firewall. The end of a socket while another one was being connected proves as little as a reset, since the other
//!   side may have started to use the new one.
//! - **An end before the first frame** over the next socket, at the listening side: the other has not received the
//!   welcome, and connects again, or it has died. The listening side calls it.
//!
//! The handshake is the one by which streams reconnect, with a new epoch for each attempt. Over the new socket both
//! sides first report how many frames they have received ([`sent_frames`](super::sent_frames)).

#[cfg(test)]
mod tests;

use std::io;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use super::base::{Base, Side};
use super::connection::{Connection, Direction};
use super::control::{Control, is_cut};
use crate::engine::poller::Registration as Watched;
use crate::os::error::{Error, Result};
use crate::os::interfaces::Rail;
use crate::os::log::{Limiter, NET};
use crate::session::dialer;
use crate::session::frame::{Header, Type};
use crate::session::lifeline::{Answer, CUT_PATIENCE, Ended, PeerInquiry, Terms};
use crate::session::link::{Link, Sock};
use crate::session::owner::{ConnectingSide, Joined, Joining, ListeningSide, Owner};
use crate::session::peer::lost;

/// This may happen every few seconds, and for every connection.
static STAYS: Limiter = Limiter::new();

impl Base {
    /// Whether the control channel may get another socket.
    fn is_open(&self) -> bool {
        self.recovers() && !self.is_closing() && !self.health.is_failed() && !self.health.is_peer_done()
    }

    /// The control channel's socket has ended. Returns whether the connection continues without one.
    pub(super) fn goes_on_without(&self, control: &mut Control, end: &io::Error) -> bool {
        control.close();
        if !self.is_open() {
            return false;
        }
        if control.away.is_some() {
            return true;
        }
        // The listening side's end shows the connecting side that this socket is in use, so it is known.
        let is_unconfirmed = control.is_resuming && self.side == Side::Listening;
        let proves_little = is_cut(end) || is_unconfirmed || control.may_be_replaced();
        let kernel_gave_up = end.raw_os_error().is_some() && end.kind() != io::ErrorKind::BrokenPipe;
        if !proves_little && !kernel_gave_up {
            return false;
        }
        let now = Instant::now();
        // The next steps are the same, whatever ended the socket.
        let reset = io::ErrorKind::ConnectionReset.into();
        let end = if proves_little { &reset } else { end };
        let ended = Ended::default();
        ended.note(end);
        let paths = if self.side == Side::Connecting { self.link.pairs() } else { self.link.remote.len() };
        let patience = match proves_little {
            // Nothing indicates that the peer is in trouble.
            true if is_unconfirmed => self.config().peer_timeout,
            // A peer whose process has no known address would have reconnected by then.
            true if paths == 0 => CUT_PATIENCE,
            true => self.config().reconnect_timeout,
            // Most of the time has passed.
            false => self.config().peer_timeout / 10,
        };
        let terms = Terms {
            patience,
            most: self.config().peer_timeout,
            refused_for: ended.refused_for(now, end),
            some_refused_for: ended.some_refused_for(now),
            paths,
        };
        control.inquiry = Some(PeerInquiry::new(now, terms, lost(end).with_peer(&self.peer)));
        (control.away, control.must_seek) = (Some(now), true);
        true
    }

    /// Reaches the other side, once, when the control channel was cut or has just fallen silent: the connecting
    /// side connects, the listening side calls.
    pub(super) fn seek<D: Direction>(&self, conn: &Arc<Connection<D>>) {
        match self.side {
            Side::Connecting => {
                if let Some(why) = self.begins_to_dial() {
                    self.dial(conn.clone(), why);
                }
            }
            Side::Listening => {
                if let Some(since) = self.begins_to_call() {
                    self.call(conn, since);
                }
            }
        }
    }

    /// Whether the connecting side must connect another socket: the control channel was cut, or it has fallen silent.
    /// Returns the reason, once for each time.
    fn begins_to_dial(&self) -> Option<&'static str> {
        let mut control = self.control();
        let silent = control.silent.take();
        if std::mem::take(&mut control.must_seek) {
            return Some("was cut");
        }
        let since = silent.filter(|_| control.away.is_none() && self.is_open())?;
        control.is_silent(since);
        Some("is silent")
    }

    fn dial(&self, conn: Arc<dyn ConnectingSide>, why: &str) {
        tracing::info!(target: NET, "{} {} dials for another control channel: its own {why}", self.doing, self.peer);
        if let Err(error) = dialer::resume(Arc::clone(&self.net), &conn) {
            conn.gave_up(0, &error);
        }
    }

    /// No other socket can be connected. Returns whether the connection continues with the current one.
    fn stays(&self, error: &Error) -> bool {
        let mut control = self.control();
        if control.sock.is_none() {
            return false;
        }
        (control.away, control.silent) = (None, None);
        let doing = self.doing;
        STAYS.tell(|more| {
            tracing::warn!(target: NET, "{doing} {} stays with a control channel that is silent: {error}{more}", self.peer);
        });
        true
    }

    /// Whether the listening side must call the other, about the outage that began at that time.
    fn begins_to_call(&self) -> Option<Instant> {
        let mut control = self.control();
        let must_seek = std::mem::take(&mut control.must_seek);
        control.inquiry.as_ref().filter(|_| must_seek).map(PeerInquiry::since)
    }

    fn call<D: Direction>(&self, conn: &Arc<Connection<D>>, since: Instant) {
        tracing::info!(target: NET, "{} {} waits for another control channel: its own was cut", self.doing, self.peer);
        let caller = Arc::clone(conn) as Arc<dyn ListeningSide>;
        (0..self.link.remote.len()).for_each(|pair| dialer::call(Arc::clone(&self.net), &caller, pair, since));
    }

    /// Acts as if the connecting side had started to connect.
    #[cfg(test)]
    pub(super) fn is_to_dial(&self) {
        self.control().away = Some(Instant::now());
    }

    /// Whether another socket is being connected, or awaited.
    #[cfg(test)]
    pub(super) fn is_away(&self) -> bool {
        self.control().away.is_some()
    }

    /// See [`Owner::link_down`].
    fn link_down(&self, interface: u32) {
        let mut control = self.control();
        let local = control.sock.as_ref().and_then(|sock| sock.local_addr().ok()?.as_socket());
        let is_its = |rail: &&Rail| Some(rail.address.ip().to_canonical()) == local.map(|it| it.ip().to_canonical());
        if self.link.local.iter().find(is_its).is_some_and(|rail| rail.index == interface) {
            control.silent = Some(Instant::now());
            kick(&control);
        }
    }

    /// See [`ConnectingSide::called`].
    fn called(&self, epoch: u16) {
        let mut control = self.control();
        if control.epoch == epoch && control.sock.is_some() && control.away.is_none() {
            control.cut.get_or_insert_with(|| io::ErrorKind::ConnectionReset.into());
            kick(&control);
        }
    }

    /// The control channel has another socket: both sides first report over it how many frames they have received, and
    /// then send the rest.
    ///
    /// # Errors
    /// When the control thread cannot watch it.
    pub(super) fn resume(&self, epoch: u16, sock: Sock) -> Result<()> {
        let mut control = self.control();
        if !self.is_open() {
            return Ok(());
        }
        control.close();
        control.sock = Some(sock);
        (control.epoch, control.current) = (epoch, epoch);
        (control.silent, control.away, control.is_resuming) = (None, None, true);
        (control.inquiry, control.must_seek) = (None, false);
        control.input.clear();
        control.output = Header { offset: control.taken, ..Header::of(Type::Ack, 0) }.encode().to_vec();
        control.write();
        tracing::info!(target: NET, "{} {} has its control channel over another socket", self.doing, self.peer);
        self.watch_socket(&mut control)
    }

    /// Registers the connection with those that may need another socket for their control channel, or get events.
    pub(super) fn keep<D: Direction>(&self, conn: &Arc<Connection<D>>) {
        if !self.recovers() {
            return;
        }
        match self.side {
            Side::Connecting => self.net.remember_connecting(&(Arc::clone(conn) as Arc<dyn ConnectingSide>)),
            Side::Listening => self.net.remember_listening(&(Arc::clone(conn) as Arc<dyn ListeningSide>)),
        }
    }
}

/// Makes the control thread poll the connection.
fn kick(control: &MutexGuard<'_, Control>) {
    control.registration.iter().for_each(Watched::kick);
}

impl<D: Direction> Owner for Connection<D> {
    fn link(&self) -> &Link {
        &self.base().link
    }

    fn link_down(&self, interface: u32) {
        self.base().link_down(interface);
    }

    fn answered(&self, began: Instant, pair: usize, answer: Answer) {
        let mut control = self.base().control();
        if let Some(inquiry) = &mut control.inquiry {
            inquiry.answered(began, Instant::now(), pair, answer);
            kick(&control);
        }
    }
}

impl<D: Direction> ListeningSide for Connection<D> {
    fn join(self: Arc<Self>, joining: Joining<'_>) -> Result<()> {
        let base = self.base();
        let is_newer = |epoch: u16| epoch.wrapping_sub(base.control().epoch).cast_signed() > 0;
        if joining.stream != 0 || !base.is_open() || !is_newer(joining.epoch) {
            return Err(joining.not_now());
        }
        let Joining { epoch, sock, welcome, .. } = joining;
        welcome(&sock, 0)?;
        base.resume(epoch, sock)
    }

    fn is_calling(&self, since: Instant) -> bool {
        let base = self.base();
        base.is_open() && base.control().inquiry.as_ref().is_some_and(|inquiry| inquiry.since() == since)
    }

    fn lost_epoch(&self, _turn: usize) -> (u16, u16) {
        (0, self.base().control().epoch)
    }
}

impl<D: Direction> ConnectingSide for Connection<D> {
    fn goes_on(&self) -> bool {
        self.base().is_open()
    }

    fn called(&self, _stream: usize, epoch: u16) {
        self.base().called(epoch);
    }

    fn is_over(&self) -> bool {
        let base = self.base();
        !base.is_open() || base.control().away.is_none()
    }

    fn next_epoch(&self, _stream: usize) -> u16 {
        let mut control = self.base().control();
        control.epoch = control.epoch.wrapping_add(1);
        control.epoch
    }

    fn rejoined(self: Arc<Self>, joined: Joined) -> Result<()> {
        self.base().resume(joined.epoch, joined.sock)
    }

    fn gave_up(&self, _stream: usize, error: &Error) {
        if !self.base().stays(error) {
            self.end(self.state(), error.clone());
        }
    }
}
