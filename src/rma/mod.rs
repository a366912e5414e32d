//! One-sided operations: puts, signals and gets as messages over Towline's own connections.
//!
//! For each other rank a [`Group`](group::Group) has a connection in each direction. Its placer thread ([`placer`]) sends what NCCL's proxy
//! thread asks for, and carries out what the other ranks ask for: it is the only one that uses the connections. All that goes
//! from one rank to another arrives in order, so a signal never overtakes an earlier put.
//!
//! The room rests on [`crate::plugin::facade`], so keys, checksums, several streams and recovery hold here too.

pub mod facade;
pub mod group;
pub mod outgoing;
pub mod peer;
pub mod placer;
pub mod registry;
pub mod requests;
pub mod setup;
pub mod wire;
