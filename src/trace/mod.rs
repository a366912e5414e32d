//! The built-in profiler: from NCCL's callbacks to a trace, a summary and metrics.
//!
//! ```text
//! NCCL's threads ──► profiler ──► ring ──► writer ──┬─► perfetto   a file for ui.perfetto.dev
//!   (abi/profiler)      │                           ├─► summary    tables
//!                       └─► chain (second profiler) └─► metrics    Prometheus, by file or HTTP (service)
//!
//! towline trace:  perfetto::read ──► align ──► summary
//! ```
//!
//! The writer also keeps the last calls and the open operations ([`tracker`]), which the service reports ([`live`]) to
//! `towline why`. [`verdict`] finds the rank that holds the job up, there and in `towline trace report`.
//!
//! Guarantees: with `TOWLINE_STATUS=0` and without `TOWLINE_PROFILE` and `TOWLINE_PROFILER_CHAIN`, nothing is made and
//! NCCL's event mask is 0. On NCCL's threads there is no lock, no allocation and no system call; memory is bounded;
//! what does not fit is dropped, counted and reported. Handles are numbers, so a call that comes late or from a forked
//! child finds nothing rather than freed memory.
//!
//! This room knows NCCL's profiler interface in its own terms ([`event`]); the C structs are `abi`'s. It must not know
//! the transport, which reports events through NCCL as any plugin would ([`crate::nccl::net_event`]).

pub(crate) mod align;
pub(crate) mod chain;
mod claim;
pub mod clock;
pub mod event;
mod hash;
pub(crate) mod key;
pub(crate) mod live;
pub mod metrics;
pub(crate) mod names;
pub mod perfetto;
pub(crate) mod place;
mod process;
pub mod profiler;
pub(crate) mod rail;
pub(crate) mod remote;
pub(crate) mod ring;
pub mod say;
mod service;
pub(crate) mod settings;
mod slots;
mod state_file;
mod stuck;
pub(crate) mod summary;
pub(crate) mod tracker;
pub(crate) mod verdict;
mod writer;
