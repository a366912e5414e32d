//! How two processes get connected, stay connected and disconnect: the room below both backends.
//!
//! | module | holds |
//! |---|---|
//! | [`net`] | what the connections of the process share, and the list of connections |
//! | [`handshake`] | preamble, proof of the secret, parameters |
//! | [`ports`], [`acceptor`], [`dialer`] | getting connected |
//! | [`half_open`] | the half-open handshakes |
//! | [`tries`], [`outlet`] | how long a try takes, which interface a socket leaves by |
//! | [`frame`], [`check`] | the header on the wire, and its check |
//! | [`wire`] | reading and writing one socket |
//! | [`seal`] | checksums and encryption, where they are on |
//! | [`peer`] | the peer, and the error that ended a connection |
//! | [`liveness`] | detecting a path that has failed silently |
//! | [`link`] | the data of a connection that its sockets need, and the sockets' options |
//! | [`lifeline`] | distinguishing a dead peer from one that is cut off |
//! | [`owner`] | what a session requests from the connection that owns it |
//! | [`opening`], [`accept_queue`] | how a new connection gets to its backend, and waits for `accept` |
//! | [`segments`] | segment sizes that pass where full ones are lost |
//! | [`tombstones`] | tombstones: connections that were closed recently, for senders that did not receive the goodbye |
//! | [`silences`] | closes towards a peer that does not answer share one time budget |
//! | [`shortage`] | trying again where the kernel had no memory |

pub(crate) mod accept_queue;
pub(crate) mod acceptor;
pub(crate) mod check;
pub(crate) mod dialer;
pub mod frame;
pub(crate) mod half_open;
pub mod handshake;
pub(crate) mod lifeline;
pub(crate) mod link;
pub(crate) mod liveness;
#[cfg(test)]
pub(crate) mod loopback;
pub(crate) mod net;
pub(crate) mod opening;
pub(crate) mod outlet;
pub(crate) mod owner;
pub(crate) mod peer;
pub(crate) mod ports;
pub mod seal;
pub(crate) mod segments;
pub(crate) mod shortage;
pub(crate) mod silences;
pub(crate) mod tombstones;
pub(crate) mod tries;
pub mod wire;
