//! New connections of a listener, which wait for `accept`.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use super::RecvConn;
use crate::os::error::{Error, Result};
use crate::session::link::Link;
use crate::session::net::Net;
use crate::session::opening::{Door, Opening};
use crate::session::owner::ListeningSide;
use crate::session::peer::Peer;

/// The connections of one listener.
pub(crate) struct Arrivals {
    me: Weak<Self>,
    net: Arc<Net>,
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

/// What waits for `accept`.
#[derive(Default)]
struct Waiting {
    connections: VecDeque<Arc<RecvConn>>,
    /// Why a peer that holds the secret could not be let in: it would be waited for in vain.
    misfit: Option<Error>,
    /// The listener was closed: whatever comes is ended.
    closed: bool,
}

impl Waiting {
    fn next(&mut self) -> Result<Option<Arc<RecvConn>>> {
        match self.connections.pop_front() {
            None => self.misfit.take().map_or(Ok(None), Err),
            conn => Ok(conn),
        }
    }
}

impl Arrivals {
    /// None yet.
    pub(crate) fn new(net: Arc<Net>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self { me: me.clone(), net, waiting: Mutex::default(), arrived: Condvar::new() })
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next connection, if one has come.
    ///
    /// # Errors
    /// When the peer that holds the secret came, and its TOWLINE_KEY_FILE does not fit this side's.
    pub(crate) fn accept(&self) -> Result<Option<Arc<RecvConn>>> {
        self.waiting().next()
    }

    /// Waits for the next connection until `deadline`.
    ///
    /// # Errors
    /// As [`Arrivals::accept`].
    pub(crate) fn accept_until(&self, deadline: Instant) -> Result<Option<Arc<RecvConn>>> {
        let mut waiting = self.waiting();
        loop {
            if let Some(conn) = waiting.next()? {
                return Ok(Some(conn));
            }
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else { return Ok(None) };
            waiting = self.arrived.wait_timeout(waiting, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A connection has come.
    pub(super) fn add(&self, conn: Arc<RecvConn>) {
        let mut waiting = self.waiting();
        if waiting.closed {
            drop(waiting);
            conn.turn_away();
            return;
        }
        waiting.connections.push_back(conn);
        self.arrived.notify_all();
    }
}

impl Door for Arrivals {
    fn is_bare(&self) -> bool {
        false
    }

    fn open(&self, link: Link, peer: Peer) -> Arc<dyn Opening> {
        let conn = RecvConn::new(Arc::clone(&self.net), link, peer);
        if let Some(me) = self.me.upgrade() {
            conn.await_confirmation(me);
        }
        let known: Arc<dyn ListeningSide> = conn.clone();
        self.net.remember_listening(&known);
        conn
    }

    fn turn_away(&self, why: Error) {
        self.waiting().misfit = Some(why);
        self.arrived.notify_all();
    }

    fn close(&self) {
        let connections = {
            let mut waiting = self.waiting();
            waiting.closed = true;
            std::mem::take(&mut waiting.connections)
        };
        for conn in connections {
            conn.close();
        }
    }
}
