//! One-sided operations: puts, signals and gets as messages over Towline's own connections.
//!
//! For each other rank a [`Group`](group::Group) has a connection in each direction. Its placer thread ([`placer`])
//! sends the operations that NCCL's proxy thread requests, and carries out those that the other ranks request. No other
//! thread uses the connections. All messages from one rank to another arrive in order, so a signal never overtakes an
//! earlier put.
//!
//! Connections carry bytes of host memory. Those of a GPU's memory go through page-locked memory ([`staging`]), by
//! copies in a stream of the group's own ([`gpu`]). The placer polls for the end of each copy and never waits for one.
//! Operations that have arrived from a rank end in the order in which they arrived ([`landings`]).
//!
//! The room rests on [`crate::plugin::facade`], so keys, checksums, several streams and recovery hold here too.

pub(crate) mod cuda;
pub(crate) mod facade;
pub(crate) mod gpu;
pub(crate) mod group;
pub(crate) mod landings;
pub(crate) mod line;
pub(crate) mod losses;
pub(crate) mod loud;
pub(crate) mod outgoing;
pub(crate) mod patience;
pub(crate) mod peer;
pub(crate) mod placer;
pub(crate) mod registry;
pub(crate) mod requests;
pub(crate) mod setup;
pub(crate) mod signals;
#[cfg(test)]
mod simulation;
pub(crate) mod staging;
pub(crate) mod state;
pub(crate) mod turns;
pub(crate) mod wire;
