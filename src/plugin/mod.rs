//! Contexts, devices, connection handles: what NCCL expects of a network plugin, in typed Rust.
//!
//! `abi` above translates C calls into calls of [`facade`]; the backends below know nothing of NCCL's life cycle.

pub(crate) mod backend;
pub(crate) mod comm;
pub(crate) mod connections;
pub(crate) mod context;
pub mod devices;
pub(crate) mod facade;
pub mod handle;
pub mod listener;
pub(crate) mod open;
pub(crate) mod process;
pub(crate) mod tuning;
