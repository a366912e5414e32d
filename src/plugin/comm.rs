//! Communicators: what NCCL calls listenComm, sendComm and recvComm, over either backend.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::backend::{Connected, Listening, Receiving, Sending};
use super::open::Open;
use crate::engine::events;
use crate::os::error::{Error, Result};

/// A listening communicator.
pub(crate) struct ListenComm {
    /// The listener itself.
    pub listening: Box<dyn Listening>,
    /// NCCL's profiler, for the connections that it makes.
    pub profiler: Option<Arc<dyn events::Listener>>,
    /// The list of these connections.
    pub open: Arc<Open>,
    /// For a host that repeats `accept` without a time limit (`facade::accept_or_report`).
    pub wait: Mutex<AcceptWait>,
}

/// How long a host has called `accept` for the next peer.
#[derive(Default)]
pub(crate) struct AcceptWait {
    /// The first of these calls.
    pub since: Option<Instant>,
    /// Whether one of them has returned an error because no peer came.
    pub reported: bool,
}

/// The object that a communicator's handle names.
pub(crate) enum Comm {
    /// From `listen`.
    Listen(ListenComm),
    /// From `connect`.
    Send(Arc<dyn Sending>),
    /// From `accept`.
    Recv(Arc<dyn Receiving>),
}

impl Comm {
    /// The connection.
    ///
    /// # Errors
    /// When it is a listener.
    pub(crate) fn connected(&self) -> Result<&dyn Connected> {
        match self {
            Self::Send(conn) => Ok(&**conn),
            Self::Recv(conn) => Ok(&**conn),
            Self::Listen(_) => Err(self.is_not("connected")),
        }
    }

    /// The listener.
    ///
    /// # Errors
    /// When it is a connection.
    pub(crate) fn listening(&self) -> Result<&ListenComm> {
        match self {
            Self::Listen(listen) => Ok(listen),
            Self::Send(_) | Self::Recv(_) => Err(self.is_not("listening")),
        }
    }

    /// Ends it.
    pub(crate) fn close(&self) {
        match self {
            Self::Listen(listen) => listen.listening.close(),
            Self::Send(conn) => conn.close(),
            Self::Recv(conn) => conn.close(),
        }
    }

    /// Which of NCCL's three kinds it is.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Listen(_) => "listening",
            Self::Send(_) => "sending",
            Self::Recv(_) => "receiving",
        }
    }

    /// The error for a communicator of another kind than `wanted`.
    pub(crate) fn is_not(&self, wanted: &str) -> Error {
        Error::argument(format!("a {} communicator was given where a {wanted} one belongs", self.kind()))
    }
}
