//! What NCCL asks for, in Rust's terms: contexts, devices, handles, and the choice of a backend.
//!
//! [`facade`] is the only door from `abi`; nothing in this room sees a raw pointer of NCCL's, besides the memory
//! that a request carries.

pub mod devices;
pub mod facade;
