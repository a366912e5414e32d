//! Plays NCCL: loads a network plugin through `dlopen` and drives it through its C table.
//!
//! The command-line program and the tests reach the transport only this way. So they work with any plugin that exports
//! `ncclNetPlugin_v4` to `_v12`, and what they prove also holds for NCCL.
//!
//! ```no_run
//! use towline::host::{ApiVersion, Net, Plugin};
//!
//! let net = Net::of(&Plugin::open_default()?, Some(ApiVersion::V8))?;
//! let context = net.init()?;
//! println!("{} has {} devices", net.name(), context.devices()?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What belongs where:
//! - [`Plugin`] is an opened library, [`Net`] one API version of it, [`Context`] one communicator's use of that.
//! - [`Listener`], [`SendComm`], [`RecvComm`], [`Mr`], [`Request`] are what NCCL holds as `void*`. They close when
//!   dropped; `close` returns the plugin's answer, `abandon` lets go without closing, as NCCL does when it aborts.
//! - [`Memory`] is a buffer with guards on both sides.
//! - [`log`](mod@log) is NCCL's logger; [`profiler`] drives the plugin's own profiler.
//! - [`Net::table`] gives the raw functions, for calls that no well-meaning host makes.
//!
//! Like NCCL, v4's `connect` and `accept` are called once and wait; from v5 on both are called until they yield
//! something. It imports the generated interface types and `os`, nothing else.

mod code;
mod comm;
mod context;
mod library;
pub mod log;
mod memory;
pub mod profiler;
mod properties;
mod table;

pub use code::{Code, Result};
pub use comm::{Listener, Mr, Part, RecvComm, Request, SendComm, Sizes, give_way};
pub use context::{Context, Handle, Init, Net, PTR_CUDA, PTR_DMABUF, PTR_HOST};
pub(crate) use library::DEFAULT_FILE;
pub use library::{ApiVersion, Plugin};
pub use memory::Memory;
pub use properties::Properties;
pub use table::Table;
