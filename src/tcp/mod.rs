//! The TCP backend.
//!
//! A connection carries messages in one direction, over one or more **streams** (sockets, possibly over several
//! rails). The protocol core does no I/O and copies no bytes:
//!
//! | module | holds |
//! |---|---|
//! | [`frame`], [`check`] | the header on the wire, and its check |
//! | [`limits`] | sizes, with their reasons |
//! | [`ranges`] | which bytes of a message have been seen |
//! | [`send_core`] | what the sending side knows: messages, credit, chunks in flight |
//! | [`recv_core`] | what the receiving side knows: posted receives, early arrivals, acknowledgements |
//! | [`handshake`] | preamble, proof of the secret, parameters |
//! | [`seal`] | checksums and encryption, where they are on |
//!
//! Around it stand the sockets:
//!
//! | module | holds |
//! |---|---|
//! | [`sender`], [`receiver`] | one connection each: the core, its streams, its requests |
//! | [`wire`] | reading and writing one socket |
//! | [`copies`] | short messages, kept for a resend |
//! | [`attend`], [`rest`] | when the keeper looks after the first stream, and when NCCL's thread need not |
//! | [`help`] | when NCCL's thread does a worker's part |
//! | [`acceptor`], [`dialer`] | getting connected |
//! | [`graves`] | connections that were closed lately, for senders that did not hear of it |
//! | [`lifeline`] | telling a dead peer from one that is cut off |
//! | [`takeover`] | handing a proven connection to another backend |
//! | [`shortage`] | asking again where the kernel had no memory |
//! | [`outlet`] | which interface a stream leaves by |
//! | [`silences`] | closes towards a peer that does not answer share one time budget |
//! | [`watch`] | noticing that a path has died without a word |
//! | [`share`] | how many threads and streams a process's part of the cores is worth |

pub mod acceptor;
pub mod ack;
pub mod attend;
pub mod check;
pub mod copies;
pub mod crowd;
pub mod delivery;
pub mod dialer;
pub mod frame;
pub mod graves;
pub mod handshake;
pub mod help;
pub mod lifeline;
pub mod limits;
mod load;
#[cfg(test)]
pub mod loopback;
pub mod net;
pub mod outlet;
pub mod peer;
pub mod polled;
pub mod ranges;
pub mod receiver;
pub mod recv_core;
pub mod rest;
pub mod seal;
pub mod send_core;
pub mod sender;
pub mod share;
pub mod shortage;
pub mod silences;
#[cfg(test)]
mod simulation;
pub mod stream;
pub mod tags;
pub mod takeover;
pub mod tries;
pub mod watch;
mod window;
pub mod wire;
