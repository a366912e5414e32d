//! How a new connection gets from its handshake to its backend.
//!
//! A backend that listens gives its listener a [`Door`]; one that connects gives its dial an [`Opener`]. When both
//! sides have proved themselves, these create the connection. Before that, [`FEATURE_BARE`] shows whether both sides
//! use the socket for streams, or both for something else. It is one bit: a third backend that is bare too needs
//! another way to tell it from RDMA.
//!
//! [`FEATURE_BARE`]: super::handshake::FEATURE_BARE

use std::sync::Arc;

use super::link::{Link, Sock};
use super::owner::Streams;
use super::peer::Peer;
use super::seal::Seal;
use crate::os::error::{Error, Result};

/// A connected socket on which only the handshake has been exchanged.
pub(crate) struct Handed {
    /// Number, key, rails.
    pub link: Link,
    /// The other end.
    pub peer: Peer,
    /// The socket. Nothing that was sent after the handshake has been read from it.
    pub sock: Sock,
    /// How the stream is protected.
    pub seal: Seal,
}

/// Creates the connection of a dial.
pub(crate) trait Opener: Send + Sync {
    /// Whether the backend uses the socket for other things than streams.
    fn is_bare(&self) -> bool;

    /// The handshake is finished. Called by the control thread, so it must not wait. Returns the connection if the
    /// session is to connect its further streams.
    ///
    /// # Errors
    /// When the socket cannot be used. The dial then tries again.
    fn open(&self, handed: Handed) -> Result<Option<Arc<dyn Streams>>>;
}

/// Creates the connections of a listener. Called by the control thread, so it must not wait.
pub(crate) trait Door: Send + Sync {
    /// As [`Opener::is_bare`].
    fn is_bare(&self) -> bool;

    /// A peer has proved itself, and is to be welcomed to this connection.
    fn open(&self, link: Link, peer: Peer) -> Arc<dyn Opening>;

    /// A peer that has proved itself cannot be admitted. Without this call the listener's owner would wait for it in
    /// vain.
    fn turn_away(&self, why: Error);

    /// The listener is closed: ends the connections that were not accepted, and those that still arrive.
    fn close(&self);
}

/// A new connection on the listening side. Its listener gets it once the peer is known to have the welcome. If a path
/// fails before, the peer may start again from the beginning, and this connection is dropped.
pub(crate) trait Opening: Send + Sync {
    /// Whether the listener has not got the connection yet.
    fn is_waiting(&self) -> bool;

    /// The peer has the welcome. The listener gets the connection, unless it already has it.
    ///
    /// # Errors
    /// When the socket cannot be used.
    fn begin(self: Arc<Self>, sock: Sock, seal: Seal) -> Result<()>;

    /// The peer has the welcome, but cannot reconnect to this side. The listener gets the error.
    fn refuse(&self, why: Error);
}
