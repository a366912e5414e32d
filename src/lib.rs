//! # Towline
//!
//! A network transport for NCCL. The library is loaded by NCCL as `libnccl-net.so`.

pub mod abi;
pub mod os;
pub mod plugin;
pub mod trace;
