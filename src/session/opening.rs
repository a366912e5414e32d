//! How a new connection gets from its handshake to its backend.
//!
//! A backend that listens gives its listener a [`Door`]; one that connects gives its dial an [`Opener`]. When both sides
//! have proved themselves, these make the connection. Whether both sides mean the same backend is settled before, by
//! [`FEATURE_BARE`].
//!
//! [`FEATURE_BARE`]: super::handshake::FEATURE_BARE

use std::sync::Arc;

use super::link::{Link, Sock};
use super::owner::Streams;
use super::peer::Peer;
use super::seal::Seal;
use crate::os::error::{Error, Result};

/// A connected socket with nothing on it but its finished handshake.
pub struct Handed {
    /// Number, key, rails.
    pub link: Link,
    /// The other end.
    pub peer: Peer,
    /// The socket. Nothing that was sent after the handshake has been read from it.
    pub sock: Sock,
    /// How it is protected.
    pub seal: Seal,
}

/// Makes the connection of a dial.
pub trait Opener: Send + Sync {
    /// Whether the backend uses the socket for other things than streams.
    fn is_bare(&self) -> bool;

    /// The connection is there. Called by the control thread: it must not wait. Returns the connection if its streams are the
    /// session's to connect.
    ///
    /// # Errors
    /// When the socket cannot be used. The dial then tries again.
    fn open(&self, handed: Handed) -> Result<Option<Arc<dyn Streams>>>;
}

/// Makes the connections of a listener. The control thread calls it: it must not wait.
pub trait Door: Send + Sync {
    /// As [`Opener::is_bare`].
    fn is_bare(&self) -> bool;

    /// A peer has proved itself, and is to be welcomed to this connection.
    fn open(&self, link: Link, peer: Peer) -> Arc<dyn Opening>;

    /// A peer that has proved itself cannot be let in. The listener's owner would wait for it in vain.
    fn turn_away(&self, why: Error);

    /// The listener is closed: ends what was not accepted, and what still comes.
    fn close(&self);
}

/// A new connection on the listening side. Its listener gets it when the peer is known to have its welcome: if a path dies
/// before, the peer may try again from the beginning, and this one is dropped.
pub trait Opening: Send + Sync {
    /// Whether the listener is still to get it.
    fn is_waiting(&self) -> bool;

    /// The peer has its welcome. The listener gets the connection, if it has not got it yet.
    ///
    /// # Errors
    /// When the socket cannot be used.
    fn begin(self: Arc<Self>, sock: Sock, seal: Seal) -> Result<()>;

    /// The peer has its welcome, and nothing will bring it back here. The listener is told why.
    fn refuse(&self, why: Error);
}
