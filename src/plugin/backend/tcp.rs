//! The TCP backend, as the plugin uses it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::{Attempt, Backend, Backends, Connected, Description, Listening, Part, Receiving, Region, Sending};
use crate::engine::events;
use crate::engine::handle::Kind;
use crate::engine::request::{MAX_PARTS, Outcome, Ticket};
use crate::engine::span::Span;
use crate::engine::table::Table;
use crate::os::error::{Error, Result};
use crate::plugin::devices::{Binding, PTR_HOST};
use crate::session::dialer::Target;
use crate::session::handshake::Secret;
use crate::session::net::Net;
use crate::tcp;
use crate::tcp::connection::{Connection, Direction};
use crate::tcp::listener::Listener;
use crate::tcp::receiver::RecvConn;
use crate::tcp::sender::SendConn;

/// Connections over sockets.
pub(crate) struct Tcp {
    /// Sockets need no registration; but when one ends, no thread may touch the memory any more.
    spans: Table<Span>,
}

impl Default for Tcp {
    fn default() -> Self {
        Self { spans: Table::new(Kind::Memory) }
    }
}

impl Tcp {
    fn register(&self, region: Region) -> Result<usize> {
        if region.dmabuf.is_some() {
            return Err(Error::usage("sockets cannot use memory through DMA-BUF"));
        }
        if region.kind != PTR_HOST {
            return Err(Error::usage(format!("sockets reach host memory only, not memory of kind {}", region.kind))
                .with_hint("the device's ptrSupport says NCCL_PTR_HOST"));
        }
        Ok(self.spans.insert(Arc::new(Span::new(region.address, region.bytes)))?.encode())
    }
}

impl Backend for Tcp {
    fn listen(
        &self,
        net: &Arc<Net>,
        device: &Binding,
        traffic_class: Option<u8>,
    ) -> Result<(Box<dyn Listening>, Vec<SocketAddr>)> {
        let (listener, addresses) = Listener::open(net, Arc::clone(&device.rails), traffic_class)?;
        Ok((Box::new(listener), addresses))
    }

    fn connect(&self, net: &Arc<Net>, _device: &Binding, target: Target) -> Result<Arc<dyn Attempt>> {
        tcp::attempt::Attempt::start(net, target).map(|attempt| attempt as _)
    }
}

super::forward!(Listener, tcp::attempt::Attempt);

/// The host takes memory back: NCCL's registrations of host memory for one connection do not overlap, so the address
/// identifies the requests concerned.
impl<D: Direction> Connected for Connection<D> {
    fn register(&self, backends: &Backends, region: Region) -> Result<usize> {
        backends.tcp.register(region)
    }

    fn deregister(&self, backends: &Backends, mr: usize) -> Result<()> {
        self.withdraw(*backends.tcp.spans.remove(mr)?);
        Ok(())
    }

    #[inline]
    fn test(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        Self::test(self, ticket)
    }

    fn set_profiler(&self, profiler: &Arc<dyn events::Listener>) {
        self.events().listen(Arc::clone(profiler), self.link().connection, D::SENDS);
    }

    fn describe(&self) -> Description {
        let interfaces = self.link().local.iter().map(|rail| rail.name.clone()).collect();
        Description::of(D::SENDS, (self.link(), self.peer()), (self.counters(), self.attention()), interfaces)
    }

    fn close(&self) {
        self.close();
    }
}

impl Sending for SendConn {
    #[inline]
    unsafe fn isend(&self, _backends: &Backends, part: &Part) -> Result<Option<Ticket>> {
        // SAFETY: the caller keeps the same promise.
        unsafe { self.isend(part.data, part.size, part.tag, part.profiler) }
    }

    fn abandon(&self) {
        self.leave();
    }
}

impl Receiving for RecvConn {
    #[inline]
    unsafe fn irecv(&self, _backends: &Backends, parts: &[Part]) -> Result<Option<Ticket>> {
        if let [part] = parts {
            // Nearly every group: no arrays of eight to fill.
            // SAFETY: the caller keeps the same promise.
            return unsafe { self.irecv(&[(part.data, part.size, part.tag)], &[part.profiler]) };
        }
        let mut posted = [(std::ptr::null_mut(), 0, 0); MAX_PARTS];
        let mut profilers = [std::ptr::null_mut(); MAX_PARTS];
        for ((to, profiler), part) in posted.iter_mut().zip(&mut profilers).zip(parts) {
            *to = (part.data, part.size, part.tag);
            *profiler = part.profiler;
        }
        let count = parts.len().min(MAX_PARTS);
        // SAFETY: the caller keeps the same promise.
        unsafe { self.irecv(&posted[..count], &profilers[..count]) }
    }

    /// With sockets the processor fills host memory, which the GPU sees without a flush.
    fn iflush(&self, _backends: &Backends, _parts: &[Part]) -> Result<Option<Ticket>> {
        Ok(None)
    }
}
