//! How two processes get connected, stay connected and part: below both backends.
//!
//! | module | holds |
//! |---|---|
//! | [`net`] | what the connections of the process share, and which there are |
//! | [`handshake`] | preamble, proof of the secret, parameters |
//! | [`ports`], [`acceptor`], [`dialer`] | getting connected |
//! | [`crowd`] | the half-open handshakes |
//! | [`tries`], [`outlet`] | how long a try takes, which interface a socket leaves by |
//! | [`frame`], [`check`] | the header on the wire, and its check |
//! | [`wire`] | reading and writing one socket |
//! | [`seal`] | checksums and encryption, where they are on |
//! | [`peer`] | who is at the other end, and the error that ended a connection |
//! | [`watch`] | noticing that a path has died without a word |
//! | [`link`] | a connection as its sockets know it, and the options of these |
//! | [`lifeline`] | telling a dead peer from one that is cut off |
//! | [`owner`] | what a session asks of the connection that owns it |
//! | [`opening`] | how a new connection gets to its backend |
//! | [`attend`] | when the keeper looks after a connection's first socket |
//! | [`segments`] | segment sizes that pass where full ones are lost |
//! | [`graves`] | connections that were closed lately, for senders that did not hear of it |
//! | [`silences`] | closes towards a peer that does not answer share one time budget |
//! | [`shortage`] | asking again where the kernel had no memory |

pub mod acceptor;
pub mod attend;
pub mod check;
pub mod crowd;
pub mod dialer;
pub mod frame;
pub mod graves;
pub mod handshake;
pub mod lifeline;
pub mod link;
#[cfg(test)]
pub mod loopback;
pub mod net;
pub mod opening;
pub mod outlet;
pub mod owner;
pub mod peer;
pub mod ports;
pub mod seal;
pub mod segments;
pub mod shortage;
pub mod silences;
pub mod tries;
pub mod watch;
pub mod wire;
