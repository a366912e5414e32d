//! The TCP backend: the data path, a client of [`session`](crate::session).
//!
//! A connection carries messages in one direction, over one or more **streams** (sockets, possibly over several
//! rails). The protocol core does no I/O and copies no bytes:
//!
//! | module | holds |
//! |---|---|
//! | [`limits`] | sizes, with their reasons |
//! | [`ranges`] | which bytes of a message have been seen |
//! | [`ack`] | the counts that an acknowledgement carries |
//! | [`window`] | how much of each stream may be unacknowledged |
//! | [`delivery`] | which paths deliver, and which only connect |
//! | [`send_core`] | what the sending side knows: messages, credit, chunks in flight |
//! | [`recv_core`] | what the receiving side knows: posted receives, early arrivals, acknowledgements |
//!
//! Around it stand the sockets:
//!
//! | module | holds |
//! |---|---|
//! | [`attempt`], [`listener`] | how a connection comes about |
//! | [`connection`] | a connection: its streams, its requests, what is known about the peer |
//! | [`sender`], [`receiver`] | what each direction adds: the core, and what it does on a stream |
//! | [`stream`] | which thread holds a stream |
//! | [`streams`] | checks of all streams of a connection together |
//! | [`standstill`] | what to do when this host drops a packet itself |
//! | [`copies`] | short messages, kept for a resend |
//! | [`polled`] | chunks whose arrival a GPU watches |

pub mod ack;
pub(crate) mod attempt;
pub(crate) mod connection;
pub(crate) mod copies;
pub(crate) mod delivery;
pub(crate) mod limits;
pub(crate) mod listener;
pub(crate) mod polled;
pub(crate) mod ranges;
pub(crate) mod receiver;
pub mod recv_core;
pub mod send_core;
pub(crate) mod sender;
#[cfg(test)]
pub(crate) mod simulation;
mod standstill;
pub(crate) mod stream;
pub(crate) mod streams;
mod window;
