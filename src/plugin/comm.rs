//! Communicators: what NCCL calls listenComm, sendComm and recvComm, over whichever backend.

use std::sync::Arc;

use super::devices::PTR_HOST;
use super::open::Open;
use crate::engine::events;
use crate::engine::span::Span;
use crate::os::error::{Error, Result};
#[cfg(feature = "rdma")]
use crate::rdma::adapter::Registration;
#[cfg(feature = "rdma")]
use crate::rdma::{adapter::Adapters, greeting::Listening, receiver::RdmaRecv, sender::RdmaSend};
use crate::tcp::listener::Listener;
use crate::tcp::receiver::RecvConn;
use crate::tcp::sender::SendConn;

/// A listening communicator.
pub struct ListenComm {
    /// The listener itself.
    pub listener: Listener,
    /// NCCL's profiler, for the connections that it makes.
    pub profiler: Option<Arc<dyn events::Listener>>,
    /// Where these connections are remembered.
    pub open: Arc<Open>,
}

/// A listening communicator over RDMA.
#[cfg(feature = "rdma")]
pub struct RdmaListenComm {
    /// The listener itself.
    pub listening: Listening,
    /// NCCL's profiler, for the connections that it makes.
    pub profiler: Option<Arc<dyn events::Listener>>,
    /// Where these connections are remembered.
    pub open: Arc<Open>,
}

/// What a communicator's handle names.
pub enum Comm {
    /// From `listen`.
    Listen(ListenComm),
    /// From `connect`.
    Send(Arc<SendConn>),
    /// From `accept`.
    Recv(Arc<RecvConn>),
    /// From `listen`, over RDMA.
    #[cfg(feature = "rdma")]
    RdmaListen(RdmaListenComm),
    /// From `connect`, over RDMA.
    #[cfg(feature = "rdma")]
    RdmaSend(Arc<RdmaSend>),
    /// From `accept`, over RDMA.
    #[cfg(feature = "rdma")]
    RdmaRecv(Arc<RdmaRecv>),
}

impl Comm {
    /// The adapters that registered memory must be known to; none for a connection over sockets.
    ///
    /// # Errors
    /// When it is a listener.
    #[cfg(feature = "rdma")]
    pub fn adapters(&self) -> Result<Option<&Adapters>> {
        match self {
            Self::RdmaSend(conn) => Ok(Some(&conn.base().adapters)),
            Self::RdmaRecv(conn) => Ok(Some(&conn.base().adapters)),
            Self::Listen(_) | Self::RdmaListen(..) => Err(self.is_not("connected")),
            Self::Send(_) | Self::Recv(_) => Ok(None),
        }
    }

    /// Whether memory of a kind can be registered with this communicator.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check_memory_kind(&self, kind: i32) -> Result<()> {
        match self {
            Self::Listen(_) => Err(self.is_not("connected")),
            #[cfg(feature = "rdma")]
            Self::RdmaListen(..) => Err(self.is_not("connected")),
            _ if kind == PTR_HOST => Ok(()),
            _ => Err(Error::usage(format!("sockets reach host memory only, not memory of kind {kind}"))
                .with_hint("the device's ptrSupport says NCCL_PTR_HOST")),
        }
    }

    /// The host takes back memory: no thread touches it after this has returned. NCCL's registrations of host memory for one
    /// connection do not overlap, so over TCP the address tells which requests that concerns.
    pub fn withdraw(&self, memory: Span) {
        match self {
            Self::Send(conn) => conn.withdraw(memory),
            Self::Recv(conn) => conn.withdraw(memory),
            _ => {}
        }
    }

    /// The same of a registration with RDMA devices. Registrations may overlap there, since NCCL rounds them to pages: only
    /// requests that were posted with this one are concerned.
    #[cfg(feature = "rdma")]
    pub fn withdraw_registration(&self, memory: &Arc<Registration>) {
        match self {
            Self::RdmaSend(conn) => conn.withdraw(memory),
            Self::RdmaRecv(conn) => conn.withdraw(memory),
            _ => {}
        }
    }

    /// Whom to tell of a connection's transfers.
    pub fn tell(&self, profiler: &Arc<dyn events::Listener>) {
        let (events, link, send) = match self {
            Self::Send(conn) => (conn.events(), conn.link().connection, true),
            Self::Recv(conn) => (conn.events(), conn.link().connection, false),
            #[cfg(feature = "rdma")]
            Self::RdmaSend(conn) => (&conn.base().events, conn.base().link.connection, true),
            #[cfg(feature = "rdma")]
            Self::RdmaRecv(conn) => (&conn.base().events, conn.base().link.connection, false),
            Self::Listen(_) => return,
            #[cfg(feature = "rdma")]
            Self::RdmaListen(_) => return,
        };
        events.listen(Arc::clone(profiler), link, send);
    }

    /// The error for a communicator of another kind than `wanted`.
    pub fn is_not(&self, wanted: &str) -> Error {
        let kind = match self {
            Self::Listen(_) => "listening",
            Self::Send(_) => "sending",
            Self::Recv(_) => "receiving",
            #[cfg(feature = "rdma")]
            Self::RdmaListen(..) => "listening",
            #[cfg(feature = "rdma")]
            Self::RdmaSend(_) => "sending",
            #[cfg(feature = "rdma")]
            Self::RdmaRecv(_) => "receiving",
        };
        Error::argument(format!("a {kind} communicator was given where a {wanted} one belongs"))
    }
}
