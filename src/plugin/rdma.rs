//! The RDMA backend as NCCL's devices and registrations.

use std::ffi::CString;
use std::sync::Arc;

use super::devices::{PTR_CUDA, PTR_DMABUF, PTR_HOST, Plan, Rail, RdmaPort};
use crate::os::error::{Error, Result};
use crate::rdma::adapter::{Adapter, Adapters, Memory, Registration};
use crate::rdma::backend::Rdma;
use crate::rdma::verbs::DmaBuf;

/// One device for each port; `rails` are the interfaces over which connections come about.
pub fn plans(rdma: &Rdma, rails: &[Rail]) -> Vec<Plan> {
    let plan = |(place, adapter): (usize, &Arc<Adapter>)| {
        let port = &adapter.open.port;
        let dmabuf = if adapter.open.takes_dmabuf { PTR_DMABUF } else { 0 };
        let gpu = if adapter.reaches_gpus() { PTR_CUDA } else { 0 };
        let path = port.pci_path.clone().and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
        Plan {
            rails: rails.to_vec(),
            ports: vec![RdmaPort {
                place,
                name: port.name(),
                speed_mbps: port.speed_mbps,
                ptr_support: PTR_HOST | gpu | dmabuf,
                max_comms: port.max_qp,
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
