//! The requests of a session to the connection that owns it.
//!
//! The session connects two processes, reconnects their streams, and finds out whether a peer is still alive. The owner
//! handles the data on the sockets. A connection of a backend implements [`ListeningSide`] or [`ConnectingSide`],
//! depending on its side of the handshake. A connecting side with several streams implements [`Streams`] as well. How a
//! first connection is made is described in [`opening`](super::opening).
//!
//! Mostly the control thread calls these functions; workers and NCCL's thread call some. They may wait for the holder
//! of a stream, but never for the network.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lifeline::Answer;
use super::link::{Link, Sock};
use super::seal::Seal;
use super::seal::agreement::Keys;
use crate::engine::poller::Registration;
use crate::os::error::{Error, Result};

/// The functions that a session requests on both sides.
pub(crate) trait Owner: Send + Sync {
    /// Number, key, rails.
    fn link(&self) -> &Link;

    /// This interface has gone down.
    fn link_down(&self, interface: u32);

    /// The result of an attempt, begun at that time, to reach the peer's process ([`lifeline`](super::lifeline)).
    fn answered(&self, began: Instant, pair: usize, answer: Answer);
}

/// The listening side of a connection.
pub(crate) trait ListeningSide: Owner {
    /// A peer that holds the connection's key reconnects a stream, or adds one.
    ///
    /// # Errors
    /// When this stream may not join in this epoch, or its socket cannot be used. The peer then tries again.
    fn join(self: Arc<Self>, joining: Joining<'_>) -> Result<()>;

    /// Whether to continue to call the peer about the outage that began at that time.
    fn is_calling(&self, since: Instant) -> bool;

    /// A stream that has ended, and its epoch, to name in a call; `turn` counts the calls.
    fn lost_epoch(&self, turn: usize) -> (u16, u16);
}

/// A socket whose peer has proved itself and waits for its welcome.
pub(crate) struct Joining<'a> {
    /// Which stream it becomes.
    pub stream: usize,
    /// The epoch of that stream.
    pub epoch: u16,
    /// The socket.
    pub sock: Sock,
    /// Sends the welcome, with the number of frames that were received on this stream so far.
    pub welcome: &'a mut dyn FnMut(&Sock, u64) -> Result<Option<Keys>>,
}

impl Joining<'_> {
    /// The error for a stream that may not join in its epoch.
    pub(crate) fn not_now(&self) -> Error {
        let Self { stream, epoch, .. } = self;
        Error::remote(format!("stream {stream} in epoch {epoch} is not one that may join now"))
    }
}

/// The connecting side of a connection. Only this side connects again.
pub(crate) trait ConnectingSide: Owner {
    /// Whether the connection can still be used, so that a call from the peer is worth answering.
    fn goes_on(&self) -> bool;

    /// The peer has lost this stream in this epoch.
    fn called(&self, stream: usize, epoch: u16);

    /// Whether no further socket is wanted. Checked before each poll of a dial.
    fn is_over(&self) -> bool;

    /// The epoch of this stream's next attempt. No two attempts get the same one: the peer may have started to use the
    /// last one before its welcome was lost.
    fn next_epoch(&self, stream: usize) -> u16;

    /// A stream has reconnected, and both sides have proved themselves.
    ///
    /// # Errors
    /// When the peer's count of frames is impossible, or the socket cannot be watched.
    fn rejoined(self: Arc<Self>, joined: Joined) -> Result<()>;

    /// A stream cannot be reconnected. If it was the last, the connection has failed.
    fn gave_up(&self, stream: usize, error: &Error);
}

/// A socket over which the peer has sent its welcome.
pub(crate) struct Joined {
    /// Which stream it is.
    pub stream: usize,
    /// The epoch of that stream.
    pub epoch: u16,
    /// Frames that the peer has received on this stream so far.
    pub received: u64,
    /// The result of [`Streams::register_socket`] for it.
    pub registration: Option<Registration>,
    /// The socket.
    pub sock: Sock,
    /// How it is protected.
    pub seal: Seal,
}

/// The connecting side of a connection over several streams.
///
/// Stream k's **own pair** of rails is pair k, modulo their number. It reconnects over its own pair first. If at first
/// it could only be connected over another pair p, it **prefers** p and reconnects over that, until it has once been on
/// its own. While it is connected over another pair than its own, this side tries to move it back.
pub(crate) trait Streams: ConnectingSide {
    /// Which pair of rails an attempt to connect a stream uses. `attempt` counts the attempts; `repair`: the stream was
    /// connected before.
    fn pair_for(&self, stream: usize, attempt: usize, repair: bool) -> usize;

    /// `TCP_MAXSEG` for a new stream over a pair of rails.
    fn segment(&self, pair: usize) -> Option<u32>;

    /// Registers the socket of a stream with a worker, or with the control thread. Every step of adding a stream that may
    /// fail is done here.
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    fn register_socket(&self, stream: usize, sock: &Sock) -> Result<Registration>;

    /// Whether any stream is connected.
    fn is_connected(&self) -> bool;

    /// Whether this stream is connected.
    fn is_live(&self, stream: usize) -> bool;

    /// Whether streams that end are connected again.
    fn recovers(&self) -> bool;

    /// Whether the peer may be dead. Then each path to it gets only a moment.
    fn is_in_a_hurry(&self) -> bool;

    /// Whether refusals over some of the paths may be enough to give the peer up.
    fn awaits_refusals(&self) -> bool;

    /// How long to wait before this stream is connected again.
    fn pause(&self, stream: usize) -> Duration;

    /// Whether no other repair of this stream is under way. If so, the caller begins one.
    fn begin_repair(&self, stream: usize) -> bool;

    /// The caller has finished the repair, or given up.
    fn end_repair(&self, stream: usize);

    /// A repair of this stream has succeeded. If the stream broke in the meantime, the next repair begins.
    fn check_repair(&self, stream: usize);

    /// A stream is connected. `on_other_pair`: over a pair of rails that is not its own; `preferred`: it prefers
    /// this pair from now on, counted from its own. Returns whether it should move to its own pair later.
    fn settled(&self, stream: usize, on_other_pair: bool, preferred: Option<usize>) -> bool;

    /// Whether this stream was last connected over another pair of rails than its own.
    fn is_on_other_pair(&self, stream: usize) -> bool;

    /// Whether this stream was ever connected over its own pair of rails.
    fn was_on_own_pair(&self, stream: usize) -> bool;

    /// This stream could not be connected for the first time.
    fn goes_without(&self, stream: usize, error: &Error);

    /// The peer closed the connection, having received this many messages.
    fn peer_has_closed(&self, received: u64);
}
