//! A connection over queue pairs, in one direction: the lock of its state, and which thread takes the lock for which
//! work.
//!
//! A [`Direction`] adds what is sent or received. All calls between the two are resolved when the library is compiled.
//!
//! NCCL's thread does everything in `isend`, `irecv` and `test`. The control thread polls too while something is
//! outstanding, at growing intervals while nothing moves, since NCCL's thread may be waiting for something else. It
//! does not wait for the lock of the state, except to end a connection that has failed.
//!
//! # Locks
//!
//! In this order, each with the system calls that are made under it:
//!
//! 1. A dial, or an accepted socket (`session`), or a [greeting](super::greeting): those of the handshake.
//! 2. The state: those that the device's driver makes for a work request or a completion, which are none on most
//!    devices. During recovery also those that make, stop and reset queue pairs.
//! 3. The [control channel](super::control): reading and writing its socket, its registration with the control thread.
//! 4. One of the small ones: messages about queue pairs, ended queue pairs, the flushed failure, the registration
//!    cache, the events' desk (a profiler's callback), or an adapter's list of connections and then the texts of a
//!    [`Mishap`](super::adapter::Mishap). Otherwise none.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Instant;

use super::adapter::Registration;
use super::base::{Base, Side};
#[cfg(test)]
use super::fabric::Fabric;
use crate::engine::poller::{Progress, Source};
use crate::engine::request::{Keys, Outcome, Ticket};
use crate::os::error::{Error, Result};

/// The functions that a direction adds to a connection. The implementing type holds the data about the other side.
pub(crate) trait Direction: Sized + Send + Sync + 'static {
    /// What is changed with the state locked.
    type State: Send;
    /// What devices use: the queue pairs first, then the memory that only the connection registers.
    type Devices: Send + 'static;

    /// Which end this is.
    const SIDE: Side;

    /// The keys of the free request slots.
    fn keys(state: &Self::State) -> &Keys;

    /// Takes completions, and starts the work that they allow. Returns whether anything moved.
    ///
    /// # Errors
    /// The failure with which the connection must end.
    fn pump(conn: &Connection<Self>, state: &mut Self::State) -> Result<bool>;

    /// Takes away what devices use.
    fn devices(state: &mut Self::State) -> Self::Devices;

    /// Whether an outstanding request uses memory of this registration.
    fn needs(state: &Self::State, memory: &Arc<Registration>) -> bool;

    /// No request uses registered memory any more.
    fn let_go(state: &mut Self::State);

    /// Checks the ports and the queue pairs, in any thread but NCCL's. Returns whether the connection owes the peer
    /// something although no request is outstanding, and when to check lost queue pairs again. If another thread holds
    /// the state, this thread does not wait for it but leaves the work to it: the holder would otherwise have to wake
    /// this thread. NCCL's thread may be active for seconds.
    fn care(conn: &Connection<Self>) -> (bool, Option<Instant>);

    /// The control thread has polled.
    fn polled(_conn: &Connection<Self>) {}

    /// Before an orderly close: waits until all data that was reported done has reached the peer.
    fn deliver(_conn: &Connection<Self>) {}

    /// The queue pairs.
    #[cfg(test)]
    fn fabric(state: &mut Self::State) -> Option<&mut Fabric>;
}

/// A connection in one direction.
pub(crate) struct Connection<D: Direction> {
    pub(super) base: Base,
    pub(super) target: D,
    state: Mutex<D::State>,
}

impl<D: Direction> Connection<D> {
    /// Not yet watched by the control thread ([`Connection::watch`]).
    pub(super) fn unwatched(base: Base, target: D, state: D::State) -> Arc<Self> {
        Arc::new(Self { base, target, state: Mutex::new(state) })
    }

    /// From now on the control thread watches the connection.
    ///
    /// # Errors
    /// When it cannot watch the socket.
    pub(super) fn watch(self: &Arc<Self>) -> Result<()> {
        self.base.watch(Arc::new(Watch(Arc::downgrade(self))))?;
        self.base.keep(self);
        Ok(())
    }

    /// The part that needs no lock of the state.
    pub(crate) fn base(&self) -> &Base {
        &self.base
    }

    pub(super) fn state(&self) -> MutexGuard<'_, D::State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, unless another thread holds it.
    #[inline(always)]
    pub(super) fn try_state(&self) -> Option<MutexGuard<'_, D::State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The outcome of a request when it is done: the size of each part.
    ///
    /// # Errors
    /// When the connection has failed; no device accesses the buffers any more then.
    pub(crate) fn test(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        self.base.requests.check(ticket)?;
        if let Some(outcome) = self.base.finish(ticket) {
            return Ok(Some(outcome));
        }
        if self.poll_once()
            && let Some(outcome) = self.base.finish(ticket)
        {
            return Ok(Some(outcome));
        }
        let Err(error) = self.base.verdict(ticket) else { return Ok(None) };
        // After this no thread ends a request: it is done, perhaps since it was polled, or never will be.
        drop(D::devices(&mut self.state()));
        if let Some(outcome) = self.base.finish(ticket) {
            return Ok(Some(outcome));
        }
        self.base.abandon(ticket);
        Err(error)
    }

    /// Polls, unless another thread is polling.
    // Inlined into `test`, which NCCL calls again and again until something has arrived.
    #[inline(always)]
    pub(super) fn poll_once(&self) -> bool {
        let Some(mut state) = self.try_state() else { return false };
        match D::pump(self, &mut state) {
            Ok(moved) => moved,
            Err(error) => {
                self.end(state, error);
                true
            }
        }
    }

    /// The host takes back memory, as NCCL does on an abort before it closes the connection. If an outstanding request
    /// uses some of it, the connection ends. Nothing accesses the memory after this has returned.
    pub(crate) fn withdraw(&self, memory: &Arc<Registration>) {
        let mut state = self.state();
        if !D::needs(&state, memory) {
            return;
        }
        drop(D::devices(&mut state));
        // Its pages must not stay pinned: other memory may get the same address, and would be mistaken for it.
        D::let_go(&mut state);
        drop(state);
        self.base.was_withdrawn();
    }

    /// Ends the connection. With nothing outstanding, everything that was reported done has reached the peer; with
    /// requests in flight it is an abort. No device and no thread touches NCCL's buffers after it returns.
    pub(crate) fn close(&self) {
        self.base.set_closing();
        if !self.base.has_outstanding(D::keys(&self.state())) {
            D::deliver(self);
        }
        let mut state = self.state();
        let orderly = !self.base.has_outstanding(D::keys(&state)) && !self.base.health.is_failed();
        let devices = D::devices(&mut state);
        drop(state);
        if orderly {
            // The queue pairs stay until the peer has closed too. A receiver may still be writing CTS entries. And if
            // the acknowledgement of a sender's last write is lost, only an existing queue pair repeats it.
            self.base.leave(Some(Box::new(devices)));
        } else {
            drop(devices);
            self.base.fail(self.base.ended_early("closed the connection"));
            self.base.leave(None);
        }
    }

    /// The connection ends with a failure. First the queue pairs are dropped, so that no device accesses a buffer when
    /// it is reported.
    #[cold]
    pub(super) fn end(&self, mut state: MutexGuard<'_, D::State>, error: Error) {
        drop(D::devices(&mut state));
        drop(state);
        self.base.fail(error);
    }

    /// The effect of a test on the queue pairs.
    #[cfg(test)]
    pub(super) fn with_fabric(&self, act: impl FnOnce(&mut Fabric)) {
        act(D::fabric(&mut self.state()).expect("the connection is there"));
    }

    /// Whether requests are outstanding, or NCCL's thread is active.
    fn is_busy(&self) -> bool {
        self.try_state().is_none_or(|state| self.base.has_outstanding(D::keys(&state)))
    }
}

struct Watch<D: Direction>(Weak<Connection<D>>);

impl<D: Direction> Source for Watch<D> {
    fn poll(&self) -> Progress {
        let Some(conn) = self.0.upgrade() else { return Progress::default() };
        if let Err(error) = conn.base.read_control() {
            conn.end(conn.state(), error);
        }
        conn.base.seek(&conn);
        let (owes, next) = if conn.base.recovers() { D::care(&conn) } else { (false, None) };
        let moved = conn.poll_once();
        D::polled(&conn);
        let is_due = || owes || conn.base.alarm.is_raised() || conn.base.has_more_to_send();
        let outstanding = || is_due() || conn.is_busy();
        let progress = conn.base.attention.looked(moved, || !conn.base.health.is_failed() && outstanding());
        Progress { again: progress.again.into_iter().chain(next).min(), ..progress }
    }

    fn fail(&self, error: Error) {
        if let Some(conn) = self.0.upgrade() {
            conn.end(conn.state(), error);
        }
    }
}
