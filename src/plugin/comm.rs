//! Communicators: what NCCL calls listenComm, sendComm and recvComm, over whichever backend.

use std::sync::Arc;

use crate::os::error::{Error, Result};
use crate::tcp::acceptor::Listener;
use crate::tcp::net::Net;
use crate::tcp::receiver::RecvConn;
use crate::tcp::sender::SendConn;

/// `NCCL_PTR_HOST` of NCCL's net interface: memory that the processor reaches.
pub const PTR_HOST: i32 = 1;

/// A listening communicator.
pub struct ListenComm {
    /// The backend it belongs to.
    pub net: Arc<Net>,
    /// The listener itself.
    pub listener: Arc<Listener>,
}

/// What a communicator's handle names.
pub enum Comm {
    /// From `listen`.
    Listen(ListenComm),
    /// From `connect`.
    Send(Arc<SendConn>),
    /// From `accept`.
    Recv(Arc<RecvConn>),
}

impl Comm {
    /// The listener behind a listenComm.
    ///
    /// # Errors
    /// When it is another kind of communicator.
    pub fn listener(&self) -> Result<&Listener> {
        match self {
            Self::Listen(listen) => Ok(&listen.listener),
            _ => Err(self.is_not("listening")),
        }
    }

    /// The connection behind a sendComm.
    ///
    /// # Errors
    /// When it is another kind of communicator.
    pub fn sender(&self) -> Result<&Arc<SendConn>> {
        match self {
            Self::Send(conn) => Ok(conn),
            _ => Err(self.is_not("sending")),
        }
    }

    /// The connection behind a recvComm.
    ///
    /// # Errors
    /// When it is another kind of communicator.
    pub fn receiver(&self) -> Result<&Arc<RecvConn>> {
        match self {
            Self::Recv(conn) => Ok(conn),
            _ => Err(self.is_not("receiving")),
        }
    }

    /// Whether memory of a kind can be registered with this communicator.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check_memory_kind(&self, kind: i32) -> Result<()> {
        match self {
            Self::Listen(_) => Err(self.is_not("connected")),
            _ if kind == PTR_HOST => Ok(()),
            _ => Err(Error::usage(format!("sockets reach host memory only, not memory of kind {kind}"))
                .with_hint("the device's ptrSupport says NCCL_PTR_HOST")),
        }
    }

    fn is_not(&self, wanted: &str) -> Error {
        let kind = match self {
            Self::Listen(_) => "listening",
            Self::Send(_) => "sending",
            Self::Recv(_) => "receiving",
        };
        Error::argument(format!("a {kind} communicator was given where a {wanted} one belongs"))
    }
}
