//! The RDMA backend, as the plugin uses it.

use std::ffi::CString;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::{Attempt, Backend, Backends, Connected, Description, Listening, Part, Receiving, Region, Sending};
use crate::engine::events;
use crate::engine::handle::Kind;
use crate::engine::request::{MAX_PARTS, Outcome, Ticket};
use crate::engine::table::Table;
use crate::os::config::{self, Config};
use crate::os::error::{Error, Result};
use crate::os::log;
use crate::plugin::devices::{Binding, PTR_CUDA, PTR_DMABUF, PTR_HOST, Plan, Rail, RdmaPort};
use crate::rdma::adapter::{Adapter, Adapters, Memory, Registration};
use crate::rdma::backend::{self, ruled_out};
use crate::rdma::base::Side;
use crate::rdma::connection::{Connection, Direction};
use crate::rdma::greeting;
use crate::rdma::receiver::{Posted, RdmaRecv};
use crate::rdma::sender::RdmaSend;
use crate::rdma::verbs::{DmaBuf, LinkLayer};
use crate::session::dialer::Target;
use crate::session::handshake::Secret;
use crate::session::net::Net;

/// Connections over queue pairs.
pub(crate) struct Rdma {
    backend: backend::Rdma,
    /// Memory registered with the devices.
    registered: Table<Registration>,
}

/// The RDMA backend, if the configuration wants it: with `auto`, a host without it uses TCP, which is logged once.
///
/// # Errors
/// When the configuration requires it, and there is none.
pub(crate) fn find(config: &Config) -> Result<Option<Rdma>> {
    if let Some(why) = ruled_out(config) {
        if config.backend != config::Backend::Tcp {
            tracing::info!(target: log::NET, "running over TCP: {why}");
        }
        return Ok(None);
    }
    if config.key_file.is_some() {
        return Err(Error::usage("TOWLINE_KEY_FILE asks for encryption, which the RDMA backend does not have")
            .with_hint("unset TOWLINE_BACKEND to encrypt over TCP, or TOWLINE_KEY_FILE to go without"));
    }
    match backend::Rdma::find(config) {
        Ok((backend, warnings)) => {
            tracing::info!(target: log::NET, "{}", backend.summary);
            for warning in warnings {
                tracing::warn!(target: log::NET, "{warning}");
            }
            Ok(Some(Rdma { backend, registered: Table::new(Kind::Memory) }))
        }
        Err(error) if config.backend == config::Backend::Auto => {
            tracing::info!(target: log::NET, "running over TCP: {error}");
            Ok(None)
        }
        Err(error) => Err(error.with_hint(
            "TOWLINE_BACKEND=rdma asks for RDMA; `towline doctor` lists its devices; unset TOWLINE_BACKEND to run over TCP without it",
        )),
    }
}

impl Rdma {
    /// One device for each port. Its control channels use all interfaces that are chosen for sockets, the first one
    /// first: a channel that falls silent continues over another.
    pub(crate) fn plans(&self, interfaces: &[Plan]) -> Vec<Plan> {
        let mut rails: Vec<Rail> = Vec::new();
        for rail in interfaces.iter().flat_map(|plan| &plan.rails) {
            if rails.iter().all(|known| known.address != rail.address) {
                rails.push(rail.clone());
            }
        }
        self.backend.adapters.iter().enumerate().map(|(place, adapter)| plan(place, adapter, &rails)).collect()
    }

    /// The registration that a value from NCCL names; None when the host passed none.
    fn registration(&self, mr: usize) -> Result<Option<Arc<Registration>>> {
        if mr == 0 { Ok(None) } else { self.registered.get(mr).map(Some) }
    }
}

fn plan(place: usize, adapter: &Arc<Adapter>, rails: &[Rail]) -> Plan {
    let port = &adapter.open.port;
    let path = port.pci_path.clone().and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
    Plan {
        rails: rails.to_vec(),
        ports: vec![RdmaPort {
            place,
            name: port.name(),
            speed_mbps: port.speed_mbps,
            ptr_support: kinds(adapter.peer_memory.is_some(), adapter.open.takes_dmabuf),
            max_comms: port.max_qp,
            is_infiniband: port.link_layer == LinkLayer::InfiniBand,
            rail: port.rail,
            plane: port.plane,
        }],
        pci_path: path,
        guid: port.guid,
        port: port.card_port,
    }
}

/// The kinds of memory that a device accepts, as NCCL's flags. The two ways to GPU memory have separate flags. NCCL may
/// be unable to use DMA-BUF (an old release or driver, `NCCL_DMABUF_ENABLE=0`). `PTR_CUDA` alone makes it register GPU
/// memory by its address, which takes a peer-memory module. Without either it copies through host memory.
fn kinds(has_peer_memory: bool, takes_dmabuf: bool) -> i32 {
    let by_address = if has_peer_memory { PTR_CUDA } else { 0 };
    let by_descriptor = if takes_dmabuf { PTR_DMABUF } else { 0 };
    PTR_HOST | by_address | by_descriptor
}

/// Registers memory of one of NCCL's kinds.
fn registration(adapters: &Adapters, region: Region) -> Result<Registration> {
    let memory = match (region.kind, region.dmabuf) {
        (_, Some(_)) => Memory::DmaBuf,
        (PTR_HOST, None) => Memory::Host,
        (PTR_CUDA, None) if adapters.iter().all(|adapter| adapter.peer_memory.is_some()) => Memory::Gpu,
        (PTR_CUDA, None) => {
            return Err(Error::usage(
                "GPU memory cannot be registered by its address: no peer-memory module is loaded",
            )
            .with_hint("modprobe nvidia_peermem, or a kernel and driver with DMA-BUF"));
        }
        (kind, None) => {
            return Err(Error::usage(format!("RDMA reaches host and GPU memory, not memory of kind {kind}"))
                .with_hint("the device's ptrSupport says which kinds"));
        }
    };
    let dmabuf = region.dmabuf.map(|(fd, offset)| DmaBuf { fd, offset });
    Registration::new(adapters, region.address as u64, region.bytes, memory, dmabuf)
}

impl Backend for Rdma {
    fn listen(
        &self,
        net: &Arc<Net>,
        device: &Binding,
        traffic_class: Option<u8>,
    ) -> Result<(Box<dyn Listening>, Vec<SocketAddr>)> {
        let (adapters, rails) = (self.backend.group(&device.ports), Arc::clone(&device.rails));
        let (listening, addresses) = self.backend.listen(net, adapters, rails, traffic_class)?;
        Ok((Box::new(listening), addresses))
    }

    fn connect(&self, net: &Arc<Net>, device: &Binding, target: Target) -> Result<Arc<dyn Attempt>> {
        self.backend.connect(net, self.backend.group(&device.ports), target).map(|attempt| attempt as _)
    }
}

super::forward!(greeting::Listening, greeting::Attempt);

/// The backend of a connection over RDMA. It is looked up once and stays.
#[inline]
fn of(backends: &Backends) -> Result<&Rdma> {
    backends.rdma().ok_or_else(|| Error::internal("a connection over RDMA in a process without that backend"))
}

/// Registrations may overlap, since NCCL rounds them to pages: when one ends, only the requests that were posted with
/// it are affected.
impl<D: Direction> Connected for Connection<D> {
    fn register(&self, backends: &Backends, region: Region) -> Result<usize> {
        let made = registration(&self.base().adapters, region)?;
        Ok(of(backends)?.registered.insert(Arc::new(made))?.encode())
    }

    fn deregister(&self, backends: &Backends, mr: usize) -> Result<()> {
        self.withdraw(&of(backends)?.registered.remove(mr)?);
        Ok(())
    }

    #[inline]
    fn test(&self, ticket: Ticket) -> Result<Option<Outcome>> {
        Self::test(self, ticket)
    }

    fn set_profiler(&self, profiler: &Arc<dyn events::Listener>) {
        self.base().events.listen(Arc::clone(profiler), self.base().link.connection, D::SIDE == Side::Connecting);
    }

    fn describe(&self) -> Description {
        let base = self.base();
        let devices = base.adapters.iter().map(|adapter| adapter.name()).collect();
        let of = D::SIDE == Side::Connecting;
        Description::of(of, (&base.link, &base.peer), (&base.counters, &base.attention), devices)
    }

    fn close(&self) {
        self.close();
    }
}

impl Sending for RdmaSend {
    #[inline]
    unsafe fn isend(&self, backends: &Backends, part: &Part) -> Result<Option<Ticket>> {
        let registered = &of(backends)?.registered;
        let (address, size) = (part.data.addr() as u64, part.size as u64);
        // SAFETY: the caller keeps the same promise.
        let begun = unsafe { self.send_at_once((address, size), part.tag, (part.mr, registered), part.profiler) }?;
        if begun.is_some() {
            return Ok(begun);
        }
        // SAFETY: the caller keeps the same promise.
        unsafe { send_the_long_way(self, part, registered) }
    }
}

/// # Safety
/// As for [`Sending::isend`].
#[inline(never)]
unsafe fn send_the_long_way(conn: &RdmaSend, part: &Part, registered: &Table<Registration>) -> Result<Option<Ticket>> {
    let (address, size) = (part.data.addr() as u64, part.size as u64);
    // SAFETY: the caller keeps the same promise.
    let send = |memory: Option<(usize, &_)>| unsafe { conn.isend(address, size, part.tag, memory, part.profiler) };
    if part.mr == 0 {
        return send(None);
    }
    registered.with_shared(part.mr, |memory| send(Some((part.mr, memory))))
}

impl Receiving for RdmaRecv {
    #[inline]
    unsafe fn irecv(&self, backends: &Backends, parts: &[Part]) -> Result<Option<Ticket>> {
        let rdma = of(backends)?;
        let registered = |part: &Part| -> Result<Option<Posted>> {
            let memory = rdma.registration(part.mr)?;
            Ok(Some(Posted { address: part.data.addr() as u64, size: part.size as u64, tag: part.tag, memory }))
        };
        if let [part] = parts {
            // SAFETY: the caller keeps the same promise.
            return unsafe { self.irecv(&mut [registered(part)?], &[part.profiler]) };
        }
        let mut posted = [const { None }; MAX_PARTS];
        let mut profilers = [std::ptr::null_mut(); MAX_PARTS];
        for ((to, profiler), part) in posted.iter_mut().zip(&mut profilers).zip(parts) {
            *to = registered(part)?;
            *profiler = part.profiler;
        }
        let count = parts.len().min(MAX_PARTS);
        // SAFETY: the caller keeps the same promise.
        unsafe { self.irecv(&mut posted[..count], &profilers[..count]) }
    }

    fn iflush(&self, backends: &Backends, parts: &[Part]) -> Result<Option<Ticket>> {
        // The last part with data: everything before it arrived over the same queue pairs.
        let Some(last) = parts.iter().rfind(|part| part.size > 0) else { return Ok(None) };
        self.iflush(last.data.addr() as u64, of(backends)?.registration(last.mr)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_memory_by_address_is_offered_only_where_a_peer_memory_module_is() {
        assert_eq!(kinds(false, false), PTR_HOST);
        assert_eq!(kinds(false, true), PTR_HOST | PTR_DMABUF);
        assert_eq!(kinds(true, false), PTR_HOST | PTR_CUDA);
        assert_eq!(kinds(true, true), PTR_HOST | PTR_CUDA | PTR_DMABUF);
    }
}
