//! The new connections of a listener that wait for `accept`.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::os::error::{Error, Result};

/// The accept queue of one listener.
pub(crate) struct AcceptQueue<C> {
    waiting: Mutex<Waiting<C>>,
    arrived: Condvar,
}

struct Waiting<C> {
    /// An error belongs to a connection that its sending side considers established, so that no peer connects again.
    connections: VecDeque<Result<C>>,
    /// Why a peer that holds the secret could not be admitted. Without it the listener would wait for that peer in
    /// vain.
    misfit: Option<Error>,
    is_closed: bool,
}

impl<C> Waiting<C> {
    fn next(&mut self) -> Result<Option<C>> {
        match self.connections.pop_front() {
            None => self.misfit.take().map_or(Ok(None), Err),
            Some(conn) => conn.map(Some),
        }
    }
}

impl<C> AcceptQueue<C> {
    /// An empty queue.
    pub(crate) fn new() -> Self {
        let waiting = Waiting { connections: VecDeque::new(), misfit: None, is_closed: false };
        Self { waiting: Mutex::new(waiting), arrived: Condvar::new() }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting<C>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next connection, if one has arrived.
    ///
    /// # Errors
    /// When it failed in its last step, with the sending side already established. Or when the peer that holds the
    /// secret connected, and its TOWLINE_KEY_FILE does not match this side's.
    pub(crate) fn accept(&self) -> Result<Option<C>> {
        self.waiting().next()
    }

    /// Waits for the next connection until `deadline`.
    ///
    /// # Errors
    /// As [`AcceptQueue::accept`].
    pub(crate) fn accept_until(&self, deadline: Instant) -> Result<Option<C>> {
        let mut waiting = self.waiting();
        loop {
            if let Some(conn) = waiting.next()? {
                return Ok(Some(conn));
            }
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else { return Ok(None) };
            waiting = self.arrived.wait_timeout(waiting, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Adds a connection, or the error of one. Returns the connection when the queue is closed, for the caller to end.
    #[must_use]
    pub(crate) fn add(&self, conn: Result<C>) -> Option<C> {
        let mut waiting = self.waiting();
        if waiting.is_closed {
            return conn.ok();
        }
        waiting.connections.push_back(conn);
        self.arrived.notify_all();
        None
    }

    /// A peer that holds the secret could not be admitted.
    pub(crate) fn turn_away(&self, why: Error) {
        self.waiting().misfit = Some(why);
        self.arrived.notify_all();
    }

    /// Takes no more connections. Returns those that were not accepted, for the caller to end.
    #[must_use]
    pub(crate) fn close(&self) -> Vec<C> {
        let mut waiting = self.waiting();
        waiting.is_closed = true;
        std::mem::take(&mut waiting.connections).into_iter().flatten().collect()
    }
}
