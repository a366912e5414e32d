//! Makes a listener's new connections, which wait for `accept`.

use std::sync::{Arc, Weak};

use super::RecvConn;
use crate::os::error::Error;
use crate::session::accept_queue::AcceptQueue;
use crate::session::link::Link;
use crate::session::net::Net;
use crate::session::opening::{Door, Opening};
use crate::session::owner::ListeningSide;
use crate::session::peer::Peer;

/// The connections of one listener.
pub(crate) struct Arrivals {
    me: Weak<Self>,
    net: Arc<Net>,
    pub queue: AcceptQueue<Arc<RecvConn>>,
}

impl Arrivals {
    /// A listener without connections.
    pub(crate) fn new(net: Arc<Net>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self { me: me.clone(), net, queue: AcceptQueue::new() })
    }

    /// A connection has arrived.
    pub(super) fn add(&self, conn: Arc<RecvConn>) {
        if let Some(conn) = self.queue.add(Ok(conn)) {
            conn.turn_away();
        }
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
        self.queue.turn_away(why);
    }

    fn close(&self) {
        for conn in self.queue.close() {
            conn.close();
        }
    }
}
