//! The hand-over of a proven connection to another backend.
//!
//! Another backend may want Towline's way of getting connected (handle, proof of the secret, retries, deadlines) but
//! not TCP streams. It leaves a [`Takeover`] with its listener or its dial, and gets the socket when both sides have
//! proved themselves. Whether both sides mean the same is settled before, by [`FEATURE_BARE`].
//!
//! [`FEATURE_BARE`]: super::handshake::FEATURE_BARE

use std::sync::Arc;
use std::time::Instant;

use super::lifeline::Answer;
use super::link::{Link, Sock};
use super::peer::Peer;
use crate::os::error::{Error, Result};

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

/// Which end of a connection: in one process there may be both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The connecting one.
    Connecting,
    /// The listening one.
    Listening,
}

/// Asks whether the peer of a connection lives, which is without a socket, by connecting to its process
/// ([`lifeline`](super::lifeline)).
pub trait Caller: Send + Sync {
    /// Number, key, rails.
    fn link(&self) -> &Link;

    /// Listening side: whether the sender is to be called because of what had ended at that time.
    fn is_calling(&self, since: Instant) -> bool;

    /// Listening side: a stream that has ended, and its life, for a call; `turn` counts the calls.
    fn lost_life(&self, turn: usize) -> (u16, u16);

    /// What a call, or a dial for another socket, that began then has come to.
    fn answered(&self, began: Instant, way: usize, answer: Answer);
}

/// A connection that was taken over and goes on without its socket when that falls silent or is cut: the connecting side
/// dials for another one ([`Dial::bring_back`](super::dialer::Dial::bring_back)), which takes the place of the first.
pub trait Kept: Caller {
    /// Whether it has neither failed nor been closed, by either side.
    fn goes_on(&self) -> bool;

    /// Connecting side: whether nobody wants another socket any more. Asked before each look at the dial.
    fn is_over(&self) -> bool;

    /// Connecting side: the number of the socket that is tried for next. The first one had 0; each try has a number of its
    /// own, since the other side may have put the last one to use before its welcome was lost.
    fn next_epoch(&self) -> u16;

    /// Listening side: whether a socket of this number may take the place of the present one.
    fn may_return(&self, epoch: u16) -> bool;

    /// There is another socket, and both sides have proved themselves. Called by the keeper: it must not wait.
    ///
    /// # Errors
    /// When it cannot be watched.
    fn returned(self: Arc<Self>, epoch: u16, sock: Sock) -> Result<()>;

    /// This interface has gone down.
    fn link_down(&self, interface: u32);

    /// Connecting side: the other has lost the socket of this number.
    fn called(&self, epoch: u16);

    /// Connecting side: there is none to be had. If the present one has ended, the peer is not there any more.
    fn gave_up(&self, error: Error);
}
