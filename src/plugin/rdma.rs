//! The RDMA backend as NCCL's devices and registrations.

use std::ffi::CString;
use std::sync::Arc;

use super::devices::{PTR_CUDA, PTR_DMABUF, PTR_HOST, Plan, Rail, RdmaPort};
use crate::os::error::{Error, Result};
use crate::rdma::adapter::{Adapter, Adapters, Memory, Registration};
use crate::rdma::backend::Rdma;
use crate::rdma::verbs::{DmaBuf, LinkLayer};

/// One device for each port. Its connections come about over all interfaces that are chosen for sockets, the first one
/// first: one whose control channel falls silent goes on over another.
pub fn plans(rdma: &Rdma, interfaces: &[Plan]) -> Vec<Plan> {
    let mut rails: Vec<Rail> = Vec::new();
    for rail in interfaces.iter().flat_map(|plan| &plan.rails) {
        if rails.iter().all(|known| known.address != rail.address) {
            rails.push(rail.clone());
        }
    }
    let plan = |(place, adapter): (usize, &Arc<Adapter>)| {
        let port = &adapter.open.port;
        let path = port.pci_path.clone().and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
        Plan {
            rails: rails.clone(),
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
    };
    rdma.adapters.iter().enumerate().map(plan).collect()
}

/// The kinds of memory that a device takes, as NCCL's flags. The two ways to GPU memory stay apart: NCCL may be unable to
/// use DMA-BUF (an old release or driver, `NCCL_DMABUF_ENABLE=0`), and `PTR_CUDA` alone tells it to register GPU memory by
/// its address, which takes a peer-memory module. Without either it copies through host memory.
fn kinds(has_peer_memory: bool, takes_dmabuf: bool) -> i32 {
    let by_address = if has_peer_memory { PTR_CUDA } else { 0 };
    let by_descriptor = if takes_dmabuf { PTR_DMABUF } else { 0 };
    PTR_HOST | by_address | by_descriptor
}

/// Registers memory of one of NCCL's kinds.
///
/// # Errors
/// When the devices cannot reach it.
pub fn register(
    adapters: &Adapters,
    address: usize,
    bytes: usize,
    kind: i32,
    dmabuf: Option<(i32, u64)>,
) -> Result<Registration> {
    let memory = match (kind, dmabuf) {
        (_, Some(_)) => Memory::DmaBuf,
        (PTR_HOST, None) => Memory::Host,
        (PTR_CUDA, None) if adapters.iter().all(|adapter| adapter.peer_memory.is_some()) => Memory::Gpu,
        (PTR_CUDA, None) => {
            return Err(Error::usage(
                "GPU memory cannot be registered by its address: no peer-memory module is loaded",
            )
            .with_hint("modprobe nvidia_peermem, or a kernel and driver with DMA-BUF"));
        }
        _ => {
            return Err(Error::usage(format!("RDMA reaches host and GPU memory, not memory of kind {kind}"))
                .with_hint("the device's ptrSupport says which kinds"));
        }
    };
    let dmabuf = dmabuf.map(|(fd, offset)| DmaBuf { fd, offset });
    Registration::new(adapters, address as u64, bytes, memory, dmabuf)
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
