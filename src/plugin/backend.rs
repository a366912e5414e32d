//! The seam between the plugin and its backends: what a backend does for NCCL, and which backends this process has.
//! This file is the only place in the plugin that depends on which backends are compiled in.
//!
//! A new backend implements these traits in a file beside [`tcp`] and finds its devices in [`Backends`]. It implements
//! the traits of `session::opening` and `session::owner`; `session::liveness::Kept` if the control thread is to check
//! its connections, and `session::shortage::Again` if its streams must run again when the kernel had no memory (TCP
//! does both).
//!
//! These places assume that there are two backends. A third changes them:
//!
//! | place | what distinguishes the two |
//! |---|---|
//! | `plugin::devices` | whether a device has RDMA ports (`Binding::is_rdma`, properties, `merge`) |
//! | `plugin::handle` | byte 24. A peer of an earlier release reads any value but 0 as RDMA |
//! | `plugin::facade`, `plugin::process` | messages; the choice at the first `init`; one-sided operations and tuner, which are TCP's |
//! | `session` | `FEATURE_BARE` (`handshake`, `acceptor`, `dialer::connect`), one bit, so two backends that take the bare socket look alike; `dialer::resume`, which only RDMA has |
//! | `os::config` | the values of `TOWLINE_BACKEND` (`config::Backend`) |
//! | `engine::events::sink`, `nccl::net_event`, `plugin::listener` | what an event says it was carried by (`Carrier`) |
//! | `abi::properties` | what NCCL is told of a device (`is_tcp`) |
//! | `lib.rs`, `Cargo.toml` | the module and its feature |
//! | `cli` | `doctor`, and the option `--backend` |
//! | `tests/sources/rooms.rs` | what each room may import |

/// Implements [`Listening`] and [`Attempt`] by a backend's own functions of the same names.
macro_rules! forward {
    ($listener:ty, $attempt:ty) => {
        impl Listening for $listener {
            fn secret(&self) -> &Secret {
                self.secret()
            }

            fn accept(&self) -> Result<Option<Arc<dyn Receiving>>> {
                Ok(self.accept()?.map(|conn| conn as _))
            }

            fn accept_until(&self, deadline: Instant) -> Result<Option<Arc<dyn Receiving>>> {
                Ok(self.accept_until(deadline)?.map(|conn| conn as _))
            }

            fn close(&self) {
                self.close();
            }
        }

        impl Attempt for $attempt {
            fn result(&self) -> Option<Result<Arc<dyn Sending>>> {
                self.result().map(|result| result.map(|conn| conn as _))
            }

            fn wait(&self) -> Result<Arc<dyn Sending>> {
                self.wait().map(|conn| conn as _)
            }

            fn cancel(&self) {
                self.cancel();
            }
        }
    };
}
use forward;

pub(crate) mod tcp;

#[cfg(feature = "rdma")]
pub(crate) mod rdma;
/// Stands for the RDMA backend where the library is built without it.
#[cfg(not(feature = "rdma"))]
#[path = "backend/without_rdma.rs"]
pub(crate) mod rdma;

use std::ffi::c_void;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::devices::{Binding, Plan};
use crate::engine::counters::Counters;
use crate::engine::events;
use crate::engine::request::{Outcome, Ticket};
use crate::engine::schedule::attend::Attention;
use crate::os::config::Config;
use crate::os::error::Result;
use crate::session::dialer::Target;
use crate::session::handshake::Secret;
use crate::session::link::Link;
use crate::session::net::Net;
use crate::session::peer::Peer;

/// The backends of this process.
#[derive(Default)]
pub(crate) struct Backends {
    /// Sockets, which every host has.
    pub tcp: tcp::Tcp,
    /// None inside when the process uses TCP.
    rdma: OnceLock<Option<rdma::Rdma>>,
}

impl Backends {
    /// The RDMA devices, if the configuration and the host allow it. The ports are looked up once.
    ///
    /// # Errors
    /// When the configuration requires RDMA, and there is none.
    pub(crate) fn rdma_plans(&self, config: &Config, interfaces: &[Plan]) -> Result<Option<Vec<Plan>>> {
        if self.rdma.get().is_none() {
            let found = rdma::find(config)?;
            let _ = self.rdma.set(found);
        }
        Ok(self.rdma().map(|rdma| rdma.plans(interfaces)))
    }

    /// The RDMA backend, if the process uses it.
    pub(crate) fn rdma(&self) -> Option<&rdma::Rdma> {
        self.rdma.get().and_then(Option::as_ref)
    }

    /// The backend of a device.
    pub(crate) fn of(&self, device: &Binding) -> &dyn Backend {
        match self.rdma() {
            Some(rdma) if device.is_rdma() => rdma,
            _ => &self.tcp,
        }
    }
}

/// One part of a transfer: a send, or one of a group of receives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// The memory. The transport may use it until [`test()`](super::facade::test()) has returned done or failed. May be
    /// null when `size` is 0.
    pub data: *mut u8,
    /// Bytes to send, or the most that may be received.
    pub size: usize,
    /// Determines which send fills which slot of a group.
    pub tag: i32,
    /// The registration that covers the memory; 0 when the host passed none.
    pub mr: usize,
    /// The profiler's handle of this transfer; null when there is none.
    pub profiler: *mut c_void,
}

/// Memory that NCCL registers with a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    /// Its first byte.
    pub address: usize,
    /// Its length in bytes.
    pub bytes: usize,
    /// `NCCL_PTR_*`.
    pub kind: i32,
    /// The DMA-BUF descriptor that stands for it and the offset there; none when the address does.
    pub dmabuf: Option<(i32, u64)>,
}

/// A way to carry messages.
pub(crate) trait Backend {
    /// Starts to listen on a device; also returns the addresses to which peers connect.
    ///
    /// # Errors
    /// When nothing can be bound to the first of the device's interfaces.
    fn listen(
        &self,
        net: &Arc<Net>,
        device: &Binding,
        traffic_class: Option<u8>,
    ) -> Result<(Box<dyn Listening>, Vec<SocketAddr>)>;

    /// Starts to connect from a device.
    ///
    /// # Errors
    /// When the control thread cannot be started.
    fn connect(&self, net: &Arc<Net>, device: &Binding, target: Target) -> Result<Arc<dyn Attempt>>;
}

/// A listener.
pub(crate) trait Listening: Send + Sync {
    /// The secret that a peer needs to connect.
    fn secret(&self) -> &Secret;

    /// The next connection, if one has arrived.
    ///
    /// # Errors
    /// When a peer that knows the secret connected, and the connection failed.
    fn accept(&self) -> Result<Option<Arc<dyn Receiving>>>;

    /// Waits for the next connection until `deadline`.
    ///
    /// # Errors
    /// As [`Listening::accept`].
    fn accept_until(&self, deadline: Instant) -> Result<Option<Arc<dyn Receiving>>>;

    /// Stops accepting connections, and ends those that were not accepted.
    fn close(&self);
}

/// A connection under way, from the connecting side.
pub(crate) trait Attempt: Send + Sync {
    /// Its result, once there is one.
    fn result(&self) -> Option<Result<Arc<dyn Sending>>>;

    /// Waits for the result. The attempt has a deadline of its own.
    ///
    /// # Errors
    /// The error with which the attempt failed.
    fn wait(&self) -> Result<Arc<dyn Sending>>;

    /// The connection is no longer wanted.
    fn cancel(&self);
}

/// The functions that both ends of a connection have.
pub(crate) trait Connected: Send + Sync {
    /// Registers memory; returns the registration's number.
    ///
    /// # Errors
    /// When the connection cannot reach memory of that kind.
    fn register(&self, backends: &Backends, region: Region) -> Result<usize>;

    /// Ends a registration. After that no thread and no device touches its memory.
    ///
    /// # Errors
    /// When there is no such registration.
    fn deregister(&self, backends: &Backends, mr: usize) -> Result<()>;

    /// The outcome of a request; None while it has not ended.
    ///
    /// # Errors
    /// When the request failed, was reported done before, or is not one of this connection's.
    fn test(&self, ticket: Ticket) -> Result<Option<Outcome>>;

    /// Sets the profiler that transfers are reported to.
    fn set_profiler(&self, profiler: &Arc<dyn events::Listener>);

    /// A description of the connection for messages.
    fn describe(&self) -> Description;

    /// Ends the connection.
    fn close(&self);
}

/// A connection's sending end.
pub(crate) trait Sending: Connected {
    /// Starts a send; None for "not now".
    ///
    /// # Errors
    /// When the message is longer than its receive.
    ///
    /// # Safety
    /// The part's memory must be readable until the request has ended, its registration has ended or the connection is
    /// closed. Its profiler handle must be valid until then, or until nothing more is reported to the profiler.
    unsafe fn isend(&self, backends: &Backends, part: &Part) -> Result<Option<Ticket>>;

    /// Ends the connection to a peer that has not answered for too long, as [`Connected::close`] does but without
    /// waiting for it. A backend may wait all the same.
    fn abandon(&self) {
        self.close();
    }
}

/// A connection's receiving end.
pub(crate) trait Receiving: Connected {
    /// Starts a group of receives; None for "not now".
    ///
    /// # Errors
    /// When a message that has already arrived is longer than its receive.
    ///
    /// # Safety
    /// As for [`Sending::isend`], with memory that must be writable.
    unsafe fn irecv(&self, backends: &Backends, parts: &[Part]) -> Result<Option<Ticket>>;

    /// Makes received data visible to the GPU; None when there is nothing to wait for.
    ///
    /// # Errors
    /// When the connection has failed.
    fn iflush(&self, backends: &Backends, parts: &[Part]) -> Result<Option<Ticket>>;
}

/// A connection and its counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Description {
    /// Its number, which together with the direction identifies it.
    pub number: u64,
    /// Whether this side sends.
    pub send: bool,
    /// The process at the other end, `host:process`.
    pub peer: String,
    /// The address at the other end.
    pub address: String,
    /// This side's interfaces or RDMA devices.
    pub interfaces: Vec<String>,
    /// Bytes of messages that it has carried.
    pub bytes: u64,
    /// A request is outstanding, or ended a moment ago, so this side reads what arrives.
    pub is_polled: bool,
}

impl Description {
    /// Of a connection with this link.
    fn of(
        send: bool,
        (link, peer): (&Link, &Peer),
        (counters, attention): (&Counters, &Attention),
        interfaces: Vec<String>,
    ) -> Self {
        Self {
            number: link.connection,
            send,
            peer: peer.label.clone(),
            address: peer.address.to_string(),
            interfaces,
            bytes: counters.bytes.load(Ordering::Relaxed),
            is_polled: attention.is_polling(),
        }
    }
}
