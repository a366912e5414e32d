//! What NCCL talks to, behind the C boundary: devices, and the contexts and handles that use them.

pub mod devices;
pub mod facade;
