//! The ground floor: the interface to the operating system, and what every room above shares.
//!
//! Nothing here knows NCCL's structs, a wire format or a backend.

pub mod config;
pub mod cores;
pub mod error;
pub mod fd;
pub mod fork;
pub mod gpu;
pub mod host;
pub mod interfaces;
pub mod key_file;
pub mod link_kind;
pub mod links;
pub mod log;
pub mod memory;
pub mod nccl_conf;
pub mod route;
pub mod sync;
pub mod sysfs;
pub mod thread;
pub mod ticks;
