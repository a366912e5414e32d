//! # Towline
//!
//! A network transport for NCCL. The library is loaded by NCCL as `libnccl-net.so`.

pub mod abi;
pub mod engine;
pub mod host;
pub mod os;
pub mod plugin;
pub mod tcp;
pub mod trace;
