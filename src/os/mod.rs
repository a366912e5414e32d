//! The ground floor: the interface to the operating system, and what every room above shares.
//!
//! Nothing here knows NCCL's structs, a wire format or a backend.

pub mod config;
pub(crate) mod cores;
pub mod error;
pub(crate) mod fd;
pub(crate) mod fork;
pub(crate) mod gpu;
pub(crate) mod host;
pub mod interfaces;
pub(crate) mod key_file;
pub(crate) mod link_kind;
pub(crate) mod links;
pub(crate) mod log;
pub(crate) mod memory;
pub(crate) mod nccl_conf;
pub mod route;
pub(crate) mod sync;
pub(crate) mod sysfs;
pub(crate) mod thread;
pub mod ticks;
