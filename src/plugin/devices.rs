//! What one network device tells NCCL about itself.

use std::ffi::CString;

/// The properties of a physical or virtual device, a superset of what any version of NCCL's interface asks for.
#[derive(Debug, Clone)]
pub struct DeviceProperties {
    /// The interface's name, for NCCL's log.
    pub name: CString,
    /// The device's directory in `/sys`, from which NCCL finds its place in the machine. None for a virtual NIC.
    pub pci_path: Option<CString>,
    /// Equal for all functions of one physical card, unequal otherwise.
    pub guid: u64,
    /// `NCCL_PTR_*` bits: which kinds of memory can be registered.
    pub ptr_support: i32,
    /// A registration made on one connection holds for all of the device.
    pub reg_is_global: bool,
    /// NCCL must flush after every receive into GPU memory.
    pub force_flush: bool,
    /// Megabits per second.
    pub speed_mbps: i32,
    /// The port's number, from 1; 0 where there is no such thing.
    pub port: i32,
    /// Microseconds; 0 when unknown.
    pub latency_us: f32,
    /// How many connections the device can carry.
    pub max_comms: i32,
    /// The largest group of receives, 1 to 8.
    pub max_recvs: i32,
    /// The devices it consists of; a physical device names itself alone.
    pub members: Vec<i32>,
    /// The largest point-to-point message, bytes, at most 1 TiB.
    pub max_p2p_bytes: usize,
    /// The largest message of a collective, bytes, at most 1 TiB.
    pub max_coll_bytes: usize,
    /// How many requests one call may carry; 1.
    pub max_multi_request: i32,
    /// Which rail of the cluster the device is on; −1 when unknown.
    pub rail: i16,
    /// Which plane of the rail; −1 when unknown.
    pub plane: i16,
}
