//! The hand-over of a proven connection to another backend.
//!
//! Another backend may want Towline's way of getting connected (handle, proof of the secret, retries, deadlines) but
//! not TCP streams. It leaves a [`Takeover`] with its listener or its dial, and gets the socket when both sides have
//! proved themselves. Whether both sides mean the same is settled before, by [`FEATURE_BARE`].
//!
//! [`FEATURE_BARE`]: super::handshake::FEATURE_BARE

use super::net::{Link, Sock};
use super::peer::Peer;

/// A connection with nothing on it but its finished handshake.
pub struct Handed {
    /// Number, key, rails.
    pub link: Link,
    /// The other end.
    pub peer: Peer,
    /// The connected socket. Nothing that was sent after the handshake has been read from it.
    pub sock: Sock,
}

/// Takes over connections.
pub trait Takeover: Send + Sync {
    /// A connection is there. Called by the keeper: it must not wait.
    fn take_over(&self, handed: Handed);
}
