//! Contexts, devices, connection handles: what NCCL expects of a network plugin, in typed Rust.
//!
//! `abi` above translates C calls into calls of [`facade`]; the backends below know nothing of NCCL's life cycle.

pub mod backend;
pub mod comm;
pub mod connections;
pub mod context;
pub mod devices;
pub(crate) mod facade;
pub mod handle;
pub mod listener;
pub mod open;
pub mod process;
pub mod tuning;
