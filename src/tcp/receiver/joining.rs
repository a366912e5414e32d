//! The session's requests to a receiving connection: to add streams, and to reconnect lost ones.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::RecvConn;
use super::arrivals::Arrivals;
use crate::os::error::{Error, Result};
use crate::os::log::NET;
use crate::session::frame::MAX_STREAMS;
use crate::session::link::Sock;
use crate::session::opening::{Door, Opening};
use crate::session::owner::{Joining, ListeningSide};
use crate::session::seal::Seal;
use crate::tcp::connection::lock;

impl RecvConn {
    /// A peer with the connection's key wants to connect stream `index` in `epoch`. Ends the stream's previous epoch
    /// and returns how many frames were received in all its epochs, or None when it may not join.
    pub(crate) fn prepare_join(&self, index: usize, epoch: u16) -> Option<u64> {
        let newer = index < MAX_STREAMS && (epoch.wrapping_sub(self.state().core.epoch(index)) as i16) > 0;
        if !newer || self.is_over() {
            return None;
        }
        self.fence_stream(index, epoch.wrapping_sub(1))
    }

    /// The listener gets this connection when the peer has confirmed.
    pub(super) fn await_confirmation(&self, listener: Arc<Arrivals>) {
        *lock(&self.own.waiting) = Some(listener);
    }

    /// Whether the first epoch of the first stream may begin: neither the connection nor that epoch is over. The epoch
    /// is over when the peer has reconnected over another socket.
    fn awaits_first(&self) -> bool {
        !self.is_over() && !self.state().core.has_ended(0, 0)
    }

    /// The peer has the welcome: the listener gets the connection, if it has not got it yet.
    fn arrive(self: &Arc<Self>) {
        if let Some(listener) = self.leave_waiting() {
            tracing::debug!(target: NET, "connected from {}", self.peer);
            listener.add(Arc::clone(self));
        }
    }

    fn leave_waiting(&self) -> Option<Arc<Arrivals>> {
        lock(&self.own.waiting).take()
    }

    /// Returns a guard that counts as a stream until it is dropped. If no other stream is connected by then, this side
    /// waits for the peer.
    pub(super) fn hold_open(&self) -> impl Drop + '_ {
        struct Open<'a>(&'a RecvConn);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                let conn = self.0;
                let waited_for = || lock(&conn.inquiry).as_ref().is_some_and(|inquiry| !inquiry.is_suspicion());
                if conn.health.stream_down() == 0 && !conn.is_over() && !waited_for() {
                    conn.wait_for_peer(&io::ErrorKind::NotConnected.into());
                }
            }
        }
        self.health.stream_up();
        Open(self)
    }
}

impl ListeningSide for RecvConn {
    fn join(self: Arc<Self>, joining: Joining<'_>) -> Result<()> {
        // One epoch ends before the next begins, and this may have been the last stream.
        let _open = self.hold_open();
        let not_now = joining.not_now();
        let Joining { stream: index, epoch, sock, welcome } = joining;
        let received = self.prepare_join(index, epoch).ok_or(not_now)?;
        let registration = self.register(index, &sock)?;
        let keys = welcome(&sock, received)?;
        self.add_stream(index, epoch, registration, sock, Seal::of(self.link.features, keys)?);
        // The peer's confirmation of the welcome is still under way, or the first stream broke before.
        self.arrive();
        Ok(())
    }

    fn is_calling(&self, since: Instant) -> bool {
        !self.is_over() && lock(&self.inquiry).as_ref().is_some_and(|inquiry| inquiry.since() == since)
    }

    /// Names the next lost stream in each call, since the sender may already know of some.
    fn lost_epoch(&self, turn: usize) -> (u16, u16) {
        let lost: Vec<usize> =
            (0..MAX_STREAMS).filter(|index| self.streams[*index].with_io(|_| ()).is_none()).collect();
        let state = self.state();
        let known = || lost.iter().copied().filter(|index| *index == 0 || state.core.epoch(*index) > 0);
        let index = known().nth(turn % known().count().max(1)).unwrap_or(0);
        (index as u16, state.core.epoch(index))
    }
}

impl Opening for RecvConn {
    fn is_waiting(&self) -> bool {
        lock(&self.own.waiting).is_some()
    }

    fn begin(self: Arc<Self>, sock: Sock, seal: Seal) -> Result<()> {
        // Unless the peer has lost this socket in the meantime and reconnected over another. A further stream may have
        // arrived before this confirmation, and the listener may already have the connection.
        if !self.awaits_first() {
            return Ok(());
        }
        let registration = self.register(0, &sock)?;
        self.add_stream(0, 0, registration, sock, seal);
        self.arrive();
        Ok(())
    }

    fn refuse(&self, why: Error) {
        if let Some(listener) = self.leave_waiting() {
            listener.turn_away(why.with_peer(&self.peer));
        }
    }
}
