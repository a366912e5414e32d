//! The ground floor: NCCL's plugin interface as Rust types, and what our transport reports to our profiler through it.
//!
//! It imports nothing of the other rooms.

pub mod ffi;
pub mod net_event;
