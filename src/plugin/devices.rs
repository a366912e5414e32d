//! The devices that NCCL sees, and the rails that each of them stands for.
//!
//! [`discover()`] turns the chosen interfaces into [`Plan`]s: one device for each interface, or with `TOWLINE_RAILS`
//! one device for all of them. The [`Table`] numbers them and adds the virtual devices that NCCL requests.
//!
//! What NCCL relies on, and the table guarantees:
//! - Physical devices have the numbers from 0. Virtual ones follow in the order in which they were made, and
//!   [`Table::count`] includes them: NCCL finds out how many it made by reading the count again.
//! - After the plugin was reloaded, NCCL reads the count and must get the physical devices only; then it makes its
//!   virtual devices anew. If the plugin was kept instead, NCCL uses the old numbers and does not read the count.
//!   Nothing else distinguishes the two cases. So after [`Table::load`] the old devices stay valid until the next
//!   count, and old virtual devices can be looked up until a new one is made. Only a [`Plan::stand_in`], which
//!   carries nothing, is bound to the first new device at once.
//! - The same members give the same virtual device.
//! - Properties are valid for ever, since NCCL keeps the pointers to the name and the path. Equal ones are stored only
//!   once, so reloading does not grow.
//!
//! An interface may vanish at any time. The table does not notice: code that binds to the rail's address reports it.
//!
//! This module must not know NCCL's structs (those are `abi`'s), nor how a backend uses a rail.

mod discover;
mod merge;
mod ranks;
mod table;

pub use discover::{Discovery, discover};
pub(crate) use merge::MergePolicy;
pub(crate) use table::{Binding, Table};

use crate::os::interfaces::UNKNOWN_SPEED_MBPS;
use crate::os::sysfs::Sysfs;
use std::ffi::CString;

/// 1 TiB: the most that NCCL accepts as the size of one transfer (`NCCL_MAX_NET_SIZE_BYTES`).
pub(crate) const MAX_TRANSFER_BYTES: usize = 1 << 40;

/// The most members of a virtual device in NCCL's newest interface; the older ones hold 4.
pub(crate) const MAX_MEMBERS: usize = 8;

/// The most grouped receives in one call.
pub(crate) const MAX_RECVS: i32 = 8;

/// The most connections on one device: not a limit of Towline, but the number that NCCL's Socket returns.
const MAX_COMMS: i32 = 65_536;

/// NCCL's flag for "host memory".
pub(crate) const PTR_HOST: i32 = 1;
/// NCCL's flag for "GPU memory by its address".
pub(crate) const PTR_CUDA: i32 = 2;
/// NCCL's flag for "GPU memory through DMA-BUF".
pub(crate) const PTR_DMABUF: i32 = 4;

/// NCCL's value for an unknown rail or plane.
const UNKNOWN_ID: i16 = -1;

pub(crate) use crate::os::interfaces::Rail;

/// The properties of a device for NCCL; `abi` copies them into the struct of each version.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DeviceProperties {
    /// The interface's name, or the members' names joined by `+`.
    pub name: CString,
    /// The PCI function in sysfs, None for a NIC without a place on the bus.
    pub pci_path: Option<CString>,
    /// Identifies the NIC: the same in every process of the host and after a restart.
    pub guid: u64,
    /// Kinds of memory, as NCCL's flags.
    pub ptr_support: i32,
    /// Whether a registration holds for all connections.
    pub reg_is_global: bool,
    /// Whether NCCL must flush after each receive into GPU memory.
    pub force_flush: bool,
    /// The speed in Mbit/s: the sum over the rails, where all rails of unknown speed count as one.
    pub speed_mbps: i32,
    /// The port of the card, from 0.
    pub port: i32,
    /// Whether TCP carries the data, and not RDMA.
    pub is_tcp: bool,
    /// The most connections.
    pub max_comms: i32,
    /// The most grouped receives in one call.
    pub max_recvs: i32,
    /// The physical devices that this one is made of: itself alone, or those that were merged.
    pub members: Vec<i32>,
    /// The most bytes of one point-to-point transfer.
    pub max_p2p_bytes: usize,
    /// The most bytes of one collective transfer.
    pub max_coll_bytes: usize,
    /// The most requests in one multi-request.
    pub max_multi_request: i32,
    /// The rail's number, −1 for unknown.
    pub rail: i16,
    /// The plane's number, −1 for unknown.
    pub plane: i16,
}

/// A port of the RDMA backend, as a device uses it.
#[derive(Debug, Clone, PartialEq)]
pub struct RdmaPort {
    /// Its place among the backend's adapters.
    pub place: usize,
    /// Its name.
    pub name: String,
    /// The speed in Mbit/s.
    pub speed_mbps: u32,
    /// Kinds of memory that it reaches, as NCCL's flags.
    pub ptr_support: i32,
    /// The most queue pairs.
    pub max_comms: i32,
    /// Its network: InfiniBand, and not Ethernet.
    pub is_infiniband: bool,
    /// The rail's number, −1 for unknown.
    pub rail: i16,
    /// The plane's number, −1 for unknown.
    pub plane: i16,
}

/// A physical device before it has a number.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// At least one, of which some may be down for now; a rail has the same place on all hosts, so it keeps its place.
    /// With RDMA ports: the interfaces for control channels.
    pub rails: Vec<Rail>,
    /// The ports that carry the data; none when the rails do.
    pub ports: Vec<RdmaPort>,
    /// Where the first running rail's card sits on the PCI bus.
    pub pci_path: Option<CString>,
    /// Identifies the NIC.
    pub guid: u64,
    /// The port of the card.
    pub port: i32,
}

impl Plan {
    /// The name that NCCL sees and prints: running interfaces come first.
    pub fn name(&self) -> String {
        let names: Vec<&str> = if self.ports.is_empty() {
            let in_state = |running| self.rails.iter().filter(move |rail| rail.running == running);
            in_state(true).chain(in_state(false)).map(|rail| rail.name.as_str()).collect()
        } else {
            self.ports.iter().map(|port| port.name.as_str()).collect()
        };
        if names.is_empty() { "none".to_owned() } else { names.join("+") }
    }

    /// A device that carries no data, for a host that must refuse to connect and has no other device: NCCL uses another
    /// network when a plugin has no device.
    pub(crate) fn stand_in() -> Self {
        Self { rails: Vec::new(), ports: Vec::new(), pci_path: None, guid: stable_hash(b"none"), port: 0 }
    }

    /// Whether it is [`Plan::stand_in`].
    fn is_stand_in(&self) -> bool {
        self.rails.is_empty() && self.ports.is_empty()
    }

    /// A device of these rails, with what `sysfs` has about the first running one and the hardware addresses of all.
    pub(crate) fn new(rails: Vec<Rail>, sysfs: &Sysfs) -> Self {
        let first = rails.iter().find(|rail| rail.running).or(rails.first());
        let first = first.map_or("", |rail| rail.name.as_str());
        let pci_path =
            sysfs.pci_path(first).and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
        let port = sysfs.port(first).and_then(|port| i32::try_from(port).ok()).unwrap_or(0);
        // Independent of what is running now: processes that start at different times must agree.
        // VLANs and the like share the hardware address with the card, so the name is part of the identity.
        let identity = rails.iter().map(|rail| rail.name.clone() + "/" + &sysfs.mac(&rail.name).unwrap_or_default());
        let guid = stable_hash(identity.collect::<Vec<_>>().join("+").as_bytes());
        Self { rails, ports: Vec::new(), pci_path, guid, port }
    }

    fn properties(&self, members: Vec<i32>) -> DeviceProperties {
        let is_rdma = !self.ports.is_empty();
        // An assumed speed counts once: it stands for "enough channels", not for a speed that adds up.
        let is_assumed = |rail: &&Rail| !rail.speed_is_known && rail.speed_mbps == UNKNOWN_SPEED_MBPS;
        let told = self.rails.iter().filter(|rail| !is_assumed(rail)).map(|rail| rail.speed_mbps);
        let assumed = self.rails.iter().find(is_assumed).map(|rail| rail.speed_mbps);
        let rails = told.chain(assumed).filter(|_| !is_rdma);
        let speed = rails.chain(self.ports.iter().map(|port| port.speed_mbps)).fold(0, u32::saturating_add);
        let rail = self.ports.iter().map(|port| port.rail).reduce(|a, b| if a == b { a } else { UNKNOWN_ID });
        DeviceProperties {
            // A name from the kernel holds no NUL.
            name: CString::new(self.name()).unwrap_or_default(),
            pci_path: self.pci_path.clone(),
            guid: self.guid,
            // The kinds of memory that every member reaches.
            ptr_support: self.ports.iter().map(|port| port.ptr_support).reduce(|a, b| a & b).unwrap_or(PTR_HOST),
            reg_is_global: is_rdma,
            force_flush: false,
            speed_mbps: i32::try_from(speed).unwrap_or(i32::MAX),
            port: self.port,
            is_tcp: !is_rdma,
            max_comms: self.ports.iter().map(|port| port.max_comms).min().unwrap_or(MAX_COMMS),
            max_recvs: MAX_RECVS,
            members,
            max_p2p_bytes: MAX_TRANSFER_BYTES,
            max_coll_bytes: MAX_TRANSFER_BYTES,
            max_multi_request: 1,
            // Ports of different rails have no common rail, and several ports have no single plane.
            rail: rail.unwrap_or(UNKNOWN_ID),
            plane: if let [port] = &self.ports[..] { port.plane } else { UNKNOWN_ID },
        }
    }
}

/// FNV-1a, 64 bits. The standard library's hashes may differ from one build to the next; this must not, because the
/// processes of one host compare the results.
fn stable_hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
