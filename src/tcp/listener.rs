//! A listener whose connections are over TCP streams.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::receiver::{Arrivals, RecvConn};
use crate::os::error::Result;
use crate::os::interfaces::Rail;
use crate::session::handshake::Secret;
use crate::session::net::Net;
use crate::session::ports;

/// A listener that NCCL requested.
pub(crate) struct Listener {
    net: Arc<Net>,
    arrivals: Arc<Arrivals>,
    /// Its entry among the process's handshakes.
    session: Arc<ports::Listener>,
}

impl Listener {
    /// Starts to listen on the given rails; also returns the addresses of their sockets.
    ///
    /// # Errors
    /// When no socket can be opened for any of them.
    pub(crate) fn open(
        net: &Arc<Net>,
        rails: Arc<[Rail]>,
        traffic_class: Option<u8>,
    ) -> Result<(Self, Vec<SocketAddr>)> {
        let arrivals = Arrivals::new(Arc::clone(net));
        let (session, addresses) = net.listen(rails, traffic_class, Arc::clone(&arrivals) as _)?;
        Ok((Self { net: Arc::clone(net), arrivals, session }, addresses))
    }

    /// The secret that a peer must know.
    pub(crate) fn secret(&self) -> &Secret {
        &self.session.secret
    }

    /// The next connection, if one has come.
    ///
    /// # Errors
    /// When the peer that holds the secret connected, and its TOWLINE_KEY_FILE does not match this side's.
    pub(crate) fn accept(&self) -> Result<Option<Arc<RecvConn>>> {
        self.arrivals.queue.accept()
    }

    /// Waits for the next connection until `deadline`.
    ///
    /// # Errors
    /// As [`Listener::accept`].
    pub(crate) fn accept_until(&self, deadline: Instant) -> Result<Option<Arc<RecvConn>>> {
        self.arrivals.queue.accept_until(deadline)
    }

    /// Takes no more connections, and ends those that were not accepted.
    pub(crate) fn close(&self) {
        self.net.close(&self.session);
    }
}
