//! # Towline
//!
//! A network transport for NCCL. NCCL loads this library as `libnccl-net.so` and calls it through the tables
//! `ncclNetPlugin_v4` to `_v12` (and `ncclProfiler_v1` to `_v7`). The program `towline` loads it in the same way,
//! without a GPU.
//!
//! # How the library is laid out
//!
//! A call from NCCL arrives in [`abi`], the only module that sees NCCL's raw pointers: one file per version of the
//! interface, each of which says what its version changed. Arguments become typed values, panics stop there, and
//! failures become result codes.
//!
//! [`plugin`] is what NCCL calls a plugin: [`plugin::facade`] has one function for each operation that NCCL can
//! request. It knows contexts, turns the host's interfaces into [devices](plugin::devices), and makes and reads the
//! [handle](plugin::handle) that NCCL carries to the other rank. It passes each transfer to the backend of its
//! connection.
//!
//! [`tcp`] is one backend, `rdma` the other. Over TCP a connection carries messages in one direction, over one or more
//! sockets. The protocol is in two state machines that do no I/O, [`tcp::send_core`] and [`tcp::recv_core`].
//! [`tcp::sender`] and [`tcp::receiver`] connect them with sockets, threads and NCCL's requests.
//!
//! [`session`] is below it, and below the RDMA backend: [`session::dialer`] and [`session::acceptor`] get connected, by
//! the proof in [`session::handshake`].
//!
//! [`engine`] is what every backend shares: [request slots](engine::request) that end exactly once, opaque
//! [handles](engine::handle), and the [poller](engine::poller), whose worker threads and NCCL's own threads run the
//! same code.
//!
//! [`os`] is the ground floor: interfaces and sysfs, descriptors that a forked child does not keep, the
//! [configuration](os::config), which is one table, the [log](os::log), and the one [error type](os::error). Beside it
//! lie [NCCL's types](nccl).
//!
//! [`trace`] stands apart: the profiler that the same library offers to NCCL. It imports `nccl` and `os` only and
//! learns of transfers through NCCL, as anyone's profiler would.
//!
//! Imports point down only: `abi`, `rma`, `plugin`, `tcp` and `rdma`, `session`, `engine`, `os`. [`host`] stands beside
//! them and plays NCCL: it opens a plugin through `dlopen` and drives its table, ours or any other, for the command
//! line and the tests.
//!
//! # Where to go on
//!
//! `docs/dev/architecture.md` follows a message from `isend` to the wire and back, `docs/dev/protocol.md` has the wire
//! protocol; `docs/troubleshooting.md` explains every message; `docs/configuration.md` every variable.

#![allow(rustdoc::private_intra_doc_links, reason = "the documentation is built with private items")]
#![cfg_attr(
    not(feature = "rdma"),
    allow(dead_code, unused_imports, reason = "a part of `session`, `engine` and `os` serves RDMA only")
)]

pub mod abi;
mod cli;
pub mod engine;
pub mod host;
pub mod nccl;
pub mod os;
pub mod plugin;
#[cfg(feature = "rdma")]
pub(crate) mod rdma;
pub(crate) mod rma;
pub mod session;
pub mod tcp;
pub mod trace;

pub use cli::main;
