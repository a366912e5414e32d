//! The C boundary: what NCCL sees of us, and all that we see of NCCL's raw pointers.

pub mod ffi;
