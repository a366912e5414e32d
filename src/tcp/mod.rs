//! The TCP backend.
//!
//! A connection carries messages in one direction, over one or more **streams** (sockets, possibly over several
//! rails). The protocol core does no I/O and copies no bytes:
//!
//! | module | holds |
//! |---|---|
//! | [`frame`] | the header on the wire |
//! | [`limits`] | sizes, with their reasons |
//! | [`send_core`] | what the sending side knows: messages, credit, chunks in flight |
//! | [`recv_core`] | what the receiving side knows: posted receives, early arrivals, acknowledgements |
//! | [`handshake`] | preamble, proof of the secret, parameters |
//!
//! Around it stand the sockets:
//!
//! | module | holds |
//! |---|---|
//! | [`sender`], [`receiver`] | one connection each: the core, its streams, its requests |
//! | [`wire`] | reading and writing one socket |
//! | [`acceptor`], [`dialer`] | getting connected |

pub mod acceptor;
pub mod attend;
pub mod dialer;
pub mod frame;
pub mod handshake;
pub mod limits;
pub mod net;
pub mod peer;
pub mod receiver;
pub mod recv_core;
pub mod send_core;
pub mod sender;
#[cfg(test)]
mod simulation;
pub mod stream;
pub mod tags;
pub mod wire;
