//! The ports that can carry NCCL's traffic, in NCCL's order, with the properties that NCCL gets.
//!
//! The rules are those of NCCL's own IB transport, so that the same variables choose the same ports. They select active
//! ports of InfiniBand and Ethernet, filtered by `NCCL_IB_HCA` and sorted by PCI address. Ports of one card are
//! numbered consecutively. [`discover`] queries libibverbs and the kernel; [`arrange`] holds the rules and uses
//! neither. A port that cannot be used is left out here with a message, not later when a connection needs it
//! ([`trial`]).
//!
//! Guarantee: two processes of one host get the same list, as long as the host does not change in between.
//!
//! This module must not know NCCL's structs, nor how a connection uses a port.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use super::dl::{RawGidEntry, Verbs};
use super::gid::{self, GidEntry, GidSelection, RoceVersion};
use super::hca::{Choice, HcaFilter};
use super::sysfs::RdmaSysfs;
use super::trial;
use super::verbs::{Context, DeviceFacts, Gid, LinkLayer, PortFacts, ProtectionDomain, Transport, open_devices};
use crate::os::config::{Config, Family};
use crate::os::error::Result;
use crate::os::interfaces;

/// The most ports that are used, as in NCCL.
const MAX_PORTS: usize = 64;

/// The user's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selection {
    /// `NCCL_IB_HCA`.
    pub filter: HcaFilter,
    /// `NCCL_IB_MERGE_VFS`: whether virtual functions of a card count as ports of it.
    pub merge_vfs: bool,
    /// `NCCL_IB_DEVICE_PCI_ORDER`: whether ports are sorted by PCI address, and not in libibverbs's order.
    pub pci_order: bool,
    /// How a RoCE port's GID is chosen.
    pub gid: GidSelection,
    /// `NCCL_IB_ROUTABLE_FLID_GID_INDEX`.
    pub routable_index: u32,
}

impl Selection {
    /// The settings from the configuration, and messages about errors in them.
    fn from_config(config: &Config) -> (Self, Vec<String>) {
        let family = config.ib_addr_family.unwrap_or(Family::V4);
        let range = config.ib_addr_range.as_deref().map(|text| gid::Range::parse(text, family)).transpose();
        let (range, complaints) = match range {
            Ok(range) => (range, Vec::new()),
            Err(why) => (None, vec![format!("NCCL_IB_ADDR_RANGE is ignored: {why}")]),
        };
        let gid = GidSelection {
            index: u32::try_from(config.ib_gid_index.0).ok(),
            family,
            range,
            version: u8::try_from(config.ib_roce_version.0).unwrap_or(2),
        };
        let selection = Self {
            filter: HcaFilter::parse(config.ib_hca.as_deref().unwrap_or("")),
            merge_vfs: config.ib_merge_vfs,
            pci_order: config.ib_device_pci_order,
            gid,
            routable_index: u32::try_from(config.ib_routable_index.0).unwrap_or(0),
        };
        (selection, complaints)
    }

    /// Whether this port is selected, if it can be used.
    fn wants(&self, found: &Found) -> bool {
        found.port.is_active && self.filter.choose(&found.device, found.number).is_some()
    }
}

/// One port before the rules: the data from libibverbs and the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// The device's name.
    pub device: String,
    /// The port's number, from 1.
    pub number: u8,
    /// The device's attributes.
    pub card: DeviceFacts,
    /// The port's attributes.
    pub port: PortFacts,
    /// The rate from the kernel, in Mbit/s.
    pub rate_mbps: Option<u32>,
    /// The rate from the driver, which includes bonded ports.
    pub driver_mbps: Option<u32>,
    /// Where the card is on the PCI bus.
    pub pci_path: Option<PathBuf>,
}

impl Found {
    /// Why Towline cannot use such a port, whatever its state; None when it can.
    pub(crate) fn obstacle(&self) -> Option<String> {
        let why = match (self.card.transport, self.port.link_layer) {
            (Transport::Iwarp, _) => "is an iWARP port, whose connections need RDMA CM",
            (Transport::Other, _) => "has a transport of its own, without reliable connections, as EFA's",
            (Transport::InfiniBand, None) => "is on neither InfiniBand nor Ethernet",
            (Transport::InfiniBand, Some(_)) => return None,
        };
        Some(format!("{}:{} {why}; it is left out", self.device, self.number))
    }
}

/// A port that may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Port {
    /// The device's name.
    pub device: String,
    /// The port's number, from 1.
    pub number: u8,
    /// InfiniBand or Ethernet.
    pub link_layer: LinkLayer,
    /// The speed in Mbit/s.
    pub speed_mbps: u32,
    /// The card's identity: the same for all its functions and ports.
    pub guid: u64,
    /// The most queue pairs of the device.
    pub max_qp: i32,
    /// Where the card is on the PCI bus, with ports and, unless configured otherwise, virtual functions made equal, so
    /// that NCCL sees one card.
    pub pci_path: Option<PathBuf>,
    /// The port of the card in NCCL's numbering: cards with a function for each port report 1 for each of them.
    pub card_port: i32,
    /// The rail's number, −1 for none.
    pub rail: i16,
    /// The plane's number, −1 for none.
    pub plane: i16,
}

impl Port {
    /// The device's name, with the port's number unless it is the first.
    pub(crate) fn name(&self) -> String {
        if self.number == 1 { self.device.clone() } else { format!("{}:{}", self.device, self.number) }
    }
}

/// A port that may be used, with its device.
#[derive(Debug, Clone)]
pub(crate) struct OpenPort {
    /// The port's properties.
    pub port: Port,
    /// Its device, opened.
    pub context: Context,
    /// The port's attributes when it was found.
    pub facts: PortFacts,
    /// Its index in the GID table, and the reason.
    pub gid_index: u32,
    /// The reason for the choice.
    pub gid_why: gid::Why,
    /// The GID at that index.
    pub gid: Gid,
    /// Its version of RoCE, if the kernel reports it.
    pub gid_version: Option<gid::RoceVersion>,
    /// Its network interface, as that one's namespace numbers it.
    pub gid_interface: Option<u32>,
    /// Whether memory can be registered through DMA-BUF.
    pub takes_dmabuf: bool,
}

impl OpenPort {
    /// The entry of the GID table that its connections use.
    pub(crate) fn chosen(&self) -> gid::Chosen {
        let entry = GidEntry {
            index: self.gid_index,
            gid: self.gid,
            version: self.gid_version,
            interface: self.gid_interface,
            is_own: true,
        };
        gid::Chosen { entry, is_named: self.gid_why == gid::Why::Named }
    }
}

/// The ports of this host.
#[derive(Debug, Clone)]
pub(crate) struct Discovery {
    /// In NCCL's order.
    pub ports: Vec<OpenPort>,
    /// The kernel module through which devices reach GPU memory by its address.
    pub peer_memory: Option<&'static str>,
    /// Warnings that are not failures.
    pub warnings: Vec<String>,
    /// Ports of networks that Towline does not support, and why.
    pub foreign: Vec<String>,
}

/// The one line that `NCCL_DEBUG=INFO` shows.
impl fmt::Display for Discovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ports.is_empty() {
            return f.write_str("no usable RDMA port");
        }
        f.write_str("RDMA ports")?;
        for (index, open) in self.ports.iter().enumerate() {
            let Port { device, number, link_layer, speed_mbps, .. } = &open.port;
            write!(f, " [{index}]{device}:{number}/{link_layer}({speed_mbps} Mbit/s")?;
            match link_layer {
                LinkLayer::Ethernet => write!(f, ", GID {} {})", open.gid_index, gid::display(&open.gid))?,
                LinkLayer::InfiniBand => write!(f, ", LID {})", open.facts.lid)?,
            }
        }
        Ok(())
    }
}

/// The usable RDMA ports of this host.
///
/// # Errors
/// When libibverbs does not load or cannot list devices. No device at all is no error.
pub(crate) fn discover(config: &Config) -> Result<Discovery> {
    let (selection, mut warnings) = Selection::from_config(config);
    let sysfs = RdmaSysfs::default();
    let contexts = open_devices(Verbs::load()?)?;
    let mut found = Vec::new();
    for context in &contexts {
        match ports_of(context, &sysfs, config.ib_query_port_speed) {
            Ok(ports) => found.extend(ports),
            Err(error) => warnings.push(error.to_string()),
        }
    }
    let missing = selection.filter.unmatched(found.iter().map(|found| (found.device.as_str(), found.number)));
    warnings
        .extend(missing.iter().map(|entry| format!("NCCL_IB_HCA names {entry}, but there is no such device or port")));
    let foreign = found.iter().filter(|found| selection.wants(found)).filter_map(Found::obstacle).collect();
    let mut ports = Vec::new();
    for (port, facts) in arrange(found, &selection) {
        let Some(context) = contexts.iter().find(|context| context.name() == port.device) else { continue };
        match open_port(port, facts, context, &selection, &sysfs) {
            Ok(port) => ports.push(port),
            Err(error) => warnings.push(error.to_string()),
        }
    }
    if let Some(first) = ports.first()
        && let Err(error) = trial::lock_memory(&first.context)
    {
        warnings.push(error.to_string());
        ports.clear();
    }
    Ok(Discovery { ports, peer_memory: sysfs.peer_memory(), warnings, foreign })
}

fn ports_of(context: &Context, sysfs: &RdmaSysfs, asks_speed: bool) -> Result<Vec<Found>> {
    let card = context.facts()?;
    let port = |number: u8| {
        Ok(Found {
            device: context.name().to_owned(),
            number,
            card,
            port: context.port(number)?,
            rate_mbps: sysfs.rate_mbps(context.name(), number),
            driver_mbps: if asks_speed { context.port_mbps(number) } else { None },
            pci_path: sysfs.pci_path(context.name()),
        })
    };
    (1..=card.ports).map(port).collect()
}

fn open_port(
    port: Port,
    facts: PortFacts,
    context: &Context,
    selection: &Selection,
    sysfs: &RdmaSysfs,
) -> Result<OpenPort> {
    let table = gid_table(context, port.number, facts.gid_count, sysfs);
    let (gid_index, gid_why) = match port.link_layer {
        LinkLayer::Ethernet => gid::choose(&table, &selection.gid),
        LinkLayer::InfiniBand => gid::choose_infiniband(&table, selection.routable_index),
    };
    trial::connectable(context, port.number)?;
    let gid = context.gid(port.number, gid_index)?;
    let entry = table.iter().find(|entry| entry.index == gid_index);
    let gid_version = entry.and_then(|entry| entry.version);
    let gid_interface = entry.and_then(|entry| entry.interface);
    let takes_dmabuf = ProtectionDomain::new(context)?.takes_dmabuf();
    let context = context.clone();
    Ok(OpenPort { port, context, facts, gid_index, gid_why, gid, gid_version, gid_interface, takes_dmabuf })
}

/// The readable entries of a port's GID table: from libibverbs's own table, which includes the version even without
/// sysfs, or else one by one.
pub(crate) fn gid_table(context: &Context, port: u8, entries: u32, sysfs: &RdmaSysfs) -> Vec<GidEntry> {
    let own: Vec<Ipv6Addr> =
        interfaces::list().unwrap_or_default().iter().map(|one| mapped(one.address.ip())).collect();
    let is_own = |gid: &Gid| own.contains(&Ipv6Addr::from(*gid));
    let is_of_port = |entry: &&RawGidEntry| entry.port == u32::from(port) && entry.index < entries;
    // Of all ports together.
    let listed = context.gid_entries(MAX_GIDS).unwrap_or_default();
    if listed.iter().any(|entry| is_of_port(&entry)) {
        let entry = |raw: &RawGidEntry| GidEntry {
            index: raw.index,
            gid: raw.gid,
            version: match raw.kind {
                1 => Some(RoceVersion::V1),
                2 => Some(RoceVersion::V2),
                _ => None,
            },
            interface: (raw.interface != 0).then_some(raw.interface),
            is_own: is_own(&raw.gid),
        };
        return listed.iter().filter(is_of_port).map(entry).collect();
    }
    let entry = |index| {
        let gid = context.gid(port, index).ok()?;
        let version = sysfs.gid_version(context.name(), port, index);
        Some(GidEntry { index, gid, version, interface: None, is_own: is_own(&gid) })
    };
    (0..entries).filter_map(entry).collect()
}

/// The most entries of all GID tables of a device that are read.
const MAX_GIDS: usize = 4096;

/// An address in the form that a GID holds.
fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// The rules: which of these ports may be used, in which order, and the properties that NCCL gets.
fn arrange(found: Vec<Found>, selection: &Selection) -> Vec<(Port, PortFacts)> {
    let usable = found.into_iter().filter_map(|found| {
        let choice = selection.filter.choose(&found.device, found.number)?;
        let link_layer = found.port.link_layer.filter(|_| found.port.is_active && found.obstacle().is_none())?;
        Some((found, link_layer, choice))
    });
    let mut usable: Vec<(Found, LinkLayer, Choice)> = usable.take(MAX_PORTS).collect();
    if selection.pci_order {
        // Stable: ports with the same address stay in libibverbs's order. Those without an address come last.
        usable.sort_by_key(|(found, ..)| found.pci_path.as_deref().map_or(u64::MAX, pci_number));
    }
    let mut ports: Vec<(Port, PortFacts)> = Vec::new();
    for (found, link_layer, choice) in usable {
        let card = found.pci_path.as_deref().map(|path| card_path(path, selection.merge_vfs));
        let before = ports.iter().filter(|(port, _)| card.is_some() && port.pci_path == card).count();
        let port = Port {
            speed_mbps: speed(&found),
            device: found.device,
            number: found.number,
            link_layer,
            guid: found.card.guid,
            max_qp: found.card.max_qp,
            pci_path: card,
            card_port: i32::from(found.number) + i32::try_from(before).unwrap_or(0),
            rail: choice.rail,
            plane: choice.plane,
        };
        ports.push((port, found.port));
    }
    ports
}

/// Mbit/s of one queue pair by the encoded speed, lowest bit first: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR.
const QP_MBPS: [u32; 8] = [2500, 5000, 10_000, 10_000, 14_000, 25_000, 50_000, 100_000];
/// Queue pairs by the encoded width, lowest bit first.
const LANES: [u32; 5] = [1, 4, 8, 12, 2];

/// The driver's rate; otherwise the speed from rate and width, or the kernel's if that is higher: the encoding of older
/// libraries ends at NDR.
fn speed(found: &Found) -> u32 {
    if let Some(speed) = found.driver_mbps {
        return speed;
    }
    let lowest = |encoded: u8, most: usize| (encoded.trailing_zeros() as usize).min(most - 1);
    let qp = QP_MBPS[lowest(found.port.active_speed, QP_MBPS.len())];
    let qps = LANES[lowest(found.port.active_width, LANES.len())];
    (qp * qps).max(found.rate_mbps.unwrap_or(0))
}

/// The last part of a PCI path, as in `0000:17:00.1`, as a number to sort by.
fn pci_number(path: &Path) -> u64 {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let digits: String = name.chars().filter(char::is_ascii_hexdigit).collect();
    u64::from_str_radix(&digits, 16).unwrap_or(u64::MAX)
}

/// A path that is the same for all ports of a card: function 0 and, if virtual functions are to be merged, device 0.
/// NCCL does the same, and its topology search compares these paths.
fn card_path(path: &Path, merge_vfs: bool) -> PathBuf {
    let mut name: Vec<u8> = path.file_name().map(|name| name.as_encoded_bytes().to_vec()).unwrap_or_default();
    let length = name.len();
    // "0000:17:02.3": the device's two digits are the fourth and third from the end, the function's is the last.
    let is_pci_address = length >= 5 && name[length - 2] == b'.';
    if !is_pci_address {
        return path.to_owned();
    }
    name[length - 1] = b'0';
    if merge_vfs {
        name[length - 3] = b'0';
        name[length - 4] = b'0';
    }
    path.with_file_name(String::from_utf8_lossy(&name).into_owned())
}

#[cfg(test)]
mod tests;
