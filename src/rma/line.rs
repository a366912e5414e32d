//! The two ends of a connection between ranks, as this room uses them: the plugin's, or those of a simulation.

use std::ptr;

use crate::os::error::Result;
use crate::plugin::facade::{self, Part};

/// The end that sends. It is closed when it is dropped.
pub(crate) trait SendEnd: Send {
    /// Sends these bytes, which the connection may read until the request has ended or the end is closed. None: not
    /// now.
    ///
    /// # Errors
    /// When the connection has failed.
    fn send(&mut self, data: *mut u8, size: usize) -> Result<Option<usize>>;

    /// The other rank has not answered for too long: closing this end no longer waits for it.
    fn abandon(&mut self);

    /// Whether a request has ended.
    ///
    /// # Errors
    /// When the connection has failed.
    fn is_sent(&mut self, request: usize) -> Result<bool>;
}

/// The end that receives. It is closed when it is dropped.
pub(crate) trait RecvEnd: Send {
    /// Posts a receive into this memory, which the connection may write until the request has ended or the end is
    /// closed. None: not now.
    ///
    /// # Errors
    /// When the connection has failed.
    fn receive(&mut self, data: *mut u8, size: usize) -> Result<Option<usize>>;

    /// How many bytes have arrived, if a request has ended.
    ///
    /// # Errors
    /// When the connection has failed.
    fn received(&mut self, request: usize) -> Result<Option<u64>>;
}

/// The end of one of the plugin's connections that sends. The connection may have ended with its context.
pub(crate) struct NetSend {
    comm: usize,
    is_abandoned: bool,
}

impl NetSend {
    /// The sending end of this communicator.
    pub(crate) fn new(comm: usize) -> Self {
        Self { comm, is_abandoned: false }
    }
}

impl SendEnd for NetSend {
    fn send(&mut self, data: *mut u8, size: usize) -> Result<Option<usize>> {
        facade::isend(self.comm, Part { data, size, tag: 0, mr: 0, profiler: ptr::null_mut() })
    }

    fn abandon(&mut self) {
        self.is_abandoned = true;
    }

    fn is_sent(&mut self, request: usize) -> Result<bool> {
        Ok(facade::test(request)?.is_some())
    }
}

impl Drop for NetSend {
    fn drop(&mut self) {
        let _ = if self.is_abandoned { facade::abandon_send(self.comm) } else { facade::close_send(self.comm) };
    }
}

/// The end of one of the plugin's connections that receives. The connection may have ended with its context.
pub(crate) struct NetRecv(pub usize);

impl RecvEnd for NetRecv {
    fn receive(&mut self, data: *mut u8, size: usize) -> Result<Option<usize>> {
        facade::irecv(self.0, &[Part { data, size, tag: 0, mr: 0, profiler: ptr::null_mut() }])
    }

    fn received(&mut self, request: usize) -> Result<Option<u64>> {
        Ok(facade::test(request)?.map(|outcome| outcome.sizes[0]))
    }
}

impl Drop for NetRecv {
    fn drop(&mut self) {
        let _ = facade::close_recv(self.0);
    }
}
