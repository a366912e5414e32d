//! Which entry of a port's GID table is used for the port.
//!
//! On RoCE a port has several GIDs: for each address of its interface one for each RoCE version, besides the link-local
//! ones. The rule is NCCL's. It considers entries of the wanted address family (`NCCL_IB_ADDR_FAMILY`) and within the
//! wanted range (`NCCL_IB_ADDR_RANGE`). It takes the first routable entry of the wanted RoCE version
//! (`NCCL_IB_ROCE_VERSION_NUM`), else the first entry of the family. `NCCL_IB_GID_INDEX` overrides everything. When
//! nothing matches it is entry 0. An entry whose address is in another network namespace than the process, such as the
//! host's in a pod, comes after all matching entries of the process's own. Its packets would carry an address at which
//! this process cannot be reached. On InfiniBand it is entry 0, or the one with a routable forwarding identifier if the
//! fabric has one.
//!
//! This module must not know libibverbs: tables come in as lists.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use super::verbs::Gid;
use crate::os::config::Family;

/// How GIDs travel on Ethernet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RoceVersion {
    /// In a frame type of its own; cannot be routed.
    V1,
    /// Inside UDP.
    V2,
}

impl fmt::Display for RoceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1 => "RoCE v1",
            Self::V2 => "RoCE v2",
        })
    }
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GidEntry {
    /// Its index in the table.
    pub index: u32,
    /// The GID.
    pub gid: Gid,
    /// None when the kernel does not report it, and on InfiniBand.
    pub version: Option<RoceVersion>,
    /// The network interface, in its namespace's numbering; None when that is not known.
    pub interface: Option<u32>,
    /// Its address is one of this network namespace.
    pub is_own: bool,
}

/// The user's settings for a RoCE port's GID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GidSelection {
    /// `NCCL_IB_GID_INDEX`.
    pub index: Option<u32>,
    /// `NCCL_IB_ADDR_FAMILY`.
    pub family: Family,
    /// `NCCL_IB_ADDR_RANGE`.
    pub range: Option<Range>,
    /// `NCCL_IB_ROCE_VERSION_NUM`: 1, 2, or something that no entry has.
    pub version: u8,
}

impl Default for GidSelection {
    fn default() -> Self {
        Self { index: None, family: Family::V4, range: None, version: 2 }
    }
}

/// A range of addresses, as in `10.7.0.0/16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    address: IpAddr,
    bits: u8,
}

impl Range {
    /// Reads `address/bits`; the address must be of the requested family.
    ///
    /// # Errors
    /// A message about the error in the text.
    pub(crate) fn parse(text: &str, family: Family) -> Result<Self, String> {
        let (address, bits) =
            text.split_once('/').ok_or_else(|| format!("{text:?} has no prefix length, as in 10.7.0.0/16"))?;
        let address: IpAddr = address.trim().parse().map_err(|_| format!("{address:?} is no address"))?;
        let most = match (address, family) {
            (IpAddr::V4(_), Family::V4) => 32,
            (IpAddr::V6(_), Family::V6) => 128,
            _ => return Err(format!("{address} is not of the family that NCCL_IB_ADDR_FAMILY names")),
        };
        match bits.trim().parse() {
            Ok(bits) if bits <= most => Ok(Self { address, bits }),
            _ => Err(format!("{bits:?} is no prefix length from 0 to {most}")),
        }
    }

    fn contains(&self, gid: &Gid) -> bool {
        let (wanted, bits) = match self.address {
            IpAddr::V4(address) => (address.to_ipv6_mapped(), u32::from(self.bits) + 96),
            IpAddr::V6(address) => (address, u32::from(self.bits)),
        };
        let mask = if bits == 0 { 0 } else { u128::MAX << (128 - bits) };
        (u128::from(wanted) ^ u128::from_be_bytes(*gid)) & mask == 0
    }
}

/// The address family of a GID, for the choice.
fn family(gid: &Gid) -> Family {
    let is_mapped = Ipv6Addr::from(*gid).to_ipv4_mapped().is_some();
    // The same for IPv4 multicast, ff0e::ffff:a.b.c.d.
    let is_mapped_multicast = gid[..2] == [0xff, 0x0e] && gid[2..10] == [0; 8] && gid[10..12] == [0xff; 2];
    if is_mapped || is_mapped_multicast { Family::V4 } else { Family::V6 }
}

/// Whether nothing was configured here: free, or the link-local prefix alone.
fn is_free(gid: &Gid) -> bool {
    gid[8..] == [0; 8] && gid[4..8] == [0; 4] && (gid[..4] == [0; 4] || gid[..4] == [0xfe, 0x80, 0, 0])
}

fn is_link_local(gid: &Gid) -> bool {
    gid[..8] == [0xfe, 0x80, 0, 0, 0, 0, 0, 0]
}

/// Why an entry was chosen; the better reasons come last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    /// Nothing matches, so it is the first one.
    Nothing,
    /// Of the wanted family and range, but link-local.
    LinkLocal,
    /// Link-local, and of the wanted RoCE version.
    LinkLocalVersion,
    /// Of the wanted family and range, but another RoCE version.
    Family,
    /// Of the wanted family, range and version.
    Version,
    /// The user chose it.
    Named,
    /// InfiniBand: the port's own.
    InfiniBand,
    /// InfiniBand: the one with a routable forwarding identifier.
    Routable,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "no GID fits the wanted family and range, so the first",
            Self::LinkLocal | Self::LinkLocalVersion => "only link-local GIDs fit",
            Self::Family => "of the wanted family and range; none has the wanted RoCE version",
            Self::Version => "of the wanted family, range and RoCE version",
            Self::Named => "NCCL_IB_GID_INDEX",
            Self::InfiniBand => "the port's own",
            Self::Routable => "it has a routable forwarding identifier",
        })
    }
}

/// The entry of a RoCE port's table that is used for the port.
pub(crate) fn choose(table: &[GidEntry], selection: &GidSelection) -> (u32, Why) {
    if let Some(index) = selection.index {
        return (index, Why::Named);
    }
    let judge = |entry: &GidEntry| {
        let fits = !is_free(&entry.gid)
            && family(&entry.gid) == selection.family
            && selection.range.is_none_or(|range| range.contains(&entry.gid));
        if !fits {
            return Why::Nothing;
        }
        let has_version = match entry.version {
            Some(RoceVersion::V1) => selection.version == 1,
            Some(RoceVersion::V2) => selection.version == 2,
            None => false,
        };
        match (is_link_local(&entry.gid), has_version) {
            (true, false) => Why::LinkLocal,
            (true, true) => Why::LinkLocalVersion,
            (false, false) => Why::Family,
            (false, true) => Why::Version,
        }
    };
    // The first of the best: a later one must be better to win.
    let (_, why, index) = table.iter().fold((false, Why::Nothing, 0), |best, entry| {
        let why = judge(entry);
        let is_own = entry.is_own && why > Why::Nothing;
        if (is_own, why) > (best.0, best.1) { (is_own, why, entry.index) } else { best }
    });
    (index, why)
}

/// The entry with which connections were set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// The entry at that time.
    pub entry: GidEntry,
    /// The user chose its index.
    pub is_named: bool,
}

impl Chosen {
    /// Its index in the table now; None: it is not there. The old index is kept when it is still valid. The result is
    /// never another index if the user chose it, and never an entry of another interface: the link-local GIDs of an
    /// interface and of its VLANs are equal.
    pub(crate) fn index_in(&self, table: &[GidEntry]) -> Option<u32> {
        let GidEntry { index, gid, version, interface, .. } = self.entry;
        let is_it = |entry: &&GidEntry| {
            let is_elsewhere = entry.interface.zip(interface).is_some_and(|(one, other)| one != other);
            entry.gid == gid && entry.version == version && !is_elsewhere && (!self.is_named || entry.index == index)
        };
        let indices = || table.iter().filter(is_it).map(|entry| entry.index);
        indices().find(|found| *found == index).or_else(|| indices().min())
    }
}

/// The entry of an InfiniBand port's table: the one at `routable_index` (`NCCL_IB_ROUTABLE_FLID_GID_INDEX`) when it
/// carries a forwarding identifier.
pub(crate) fn choose_infiniband(table: &[GidEntry], routable_index: u32) -> (u32, Why) {
    let is_routable = table.iter().any(|entry| entry.index == routable_index && forwarding_id(&entry.gid) != 0);
    if is_routable { (routable_index, Why::Routable) } else { (0, Why::InfiniBand) }
}

/// The forwarding identifier (FLID) in an InfiniBand GID: by it a packet reaches a router to another subnet.
fn forwarding_id(gid: &Gid) -> u16 {
    u16::from_be_bytes([gid[4], gid[5]])
}

/// The subnet of an InfiniBand GID.
pub(crate) fn subnet(gid: &Gid) -> u16 {
    u16::from_be_bytes([gid[6], gid[7]])
}

/// How an InfiniBand port reaches its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Addressing {
    /// The local identifier that packets carry.
    pub lid: u16,
    /// Whether they carry GIDs as well.
    pub is_global: bool,
    /// The peer is in another subnet, and its GID has no forwarding identifier by which a router would know it. NCCL
    /// then tries its local identifier, and so does Towline.
    pub is_doubtful: bool,
}

/// The path to a peer with this GID and local identifier; `needs_grh`: the local port sends nothing without GIDs. Two
/// GIDs with the same subnet are in one subnet, as in NCCL.
pub(crate) fn addressing(own: &Gid, peer: &Gid, peer_lid: u16, needs_grh: bool) -> Addressing {
    if subnet(own) == subnet(peer) {
        return Addressing { lid: peer_lid, is_global: needs_grh, is_doubtful: false };
    }
    match forwarding_id(peer) {
        0 => Addressing { lid: peer_lid, is_global: true, is_doubtful: true },
        lid => Addressing { lid, is_global: true, is_doubtful: false },
    }
}

/// A GID in readable form: an IPv4 address if it holds one.
pub(crate) fn display(gid: &Gid) -> String {
    let address = Ipv6Addr::from(*gid);
    address.to_ipv4_mapped().map_or_else(|| address.to_string(), |v4| v4.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of (address, version) in order, as a RoCE port has it.
    fn table(entries: &[(&str, u8)]) -> Vec<GidEntry> {
        let entry = |(index, (address, version)): (usize, &(&str, u8))| {
            let gid = match address.parse().expect("an address") {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            let version = match version {
                1 => Some(RoceVersion::V1),
                2 => Some(RoceVersion::V2),
                _ => None,
            };
            GidEntry { index: u32::try_from(index).expect("a short list"), gid, version, interface: None, is_own: true }
        };
        entries.iter().enumerate().map(entry).collect()
    }

    /// The table of a port with two IPv4 addresses and one IPv6 address.
    fn usual() -> Vec<GidEntry> {
        table(&[
            ("fe80::1", 1),
            ("fe80::1", 2),
            ("10.7.0.1", 1),
            ("10.7.0.1", 2),
            ("192.168.9.1", 1),
            ("192.168.9.1", 2),
            ("fd07::1", 1),
            ("fd07::1", 2),
            ("::", 0),
        ])
    }

    fn selection(family: Family, range: &str, version: u8) -> GidSelection {
        let range = (!range.is_empty()).then(|| Range::parse(range, family).expect("a range"));
        GidSelection { index: None, family, range, version }
    }

    #[test]
    fn family_range_and_version_choose_the_entry() {
        let cases = [
            (selection(Family::V4, "", 2), 3, Why::Version),
            (selection(Family::V4, "", 1), 2, Why::Version),
            (selection(Family::V6, "", 2), 7, Why::Version),
            (selection(Family::V6, "", 1), 6, Why::Version),
            (selection(Family::V4, "192.168.0.0/16", 2), 5, Why::Version),
            (selection(Family::V4, "10.7.0.0/31", 2), 3, Why::Version),
            (selection(Family::V4, "10.7.0.0/32", 2), 0, Why::Nothing),
            (selection(Family::V4, "172.16.0.0/12", 2), 0, Why::Nothing),
            (selection(Family::V4, "0.0.0.0/0", 2), 3, Why::Version),
            (selection(Family::V6, "fd07::/64", 2), 7, Why::Version),
            (selection(Family::V6, "fe80::/10", 2), 1, Why::LinkLocalVersion),
            (selection(Family::V4, "", 3), 2, Why::Family),
        ];
        for (selection, index, why) in cases {
            assert_eq!(choose(&usual(), &selection), (index, why), "{selection:?}");
        }
    }

    #[test]
    fn the_default_is_the_first_ipv4_entry_of_roce_v2() {
        assert_eq!(choose(&usual(), &GidSelection::default()), (3, Why::Version));
        assert_eq!(choose(&table(&[("10.7.0.1", 2)]), &GidSelection::default()), (0, Why::Version));
        assert_eq!(choose(&table(&[("fe80::1", 2)]), &GidSelection::default()), (0, Why::Nothing));
        assert_eq!(choose(&[], &GidSelection::default()), (0, Why::Nothing));
    }

    /// A pod with a macvlan interface sees the GIDs of the host, too, before its own.
    #[test]
    fn addresses_of_other_network_namespaces_come_last() {
        let mut of_pod = usual();
        for entry in &mut of_pod {
            entry.is_own = matches!(entry.index, 4 | 5);
        }
        assert_eq!(choose(&of_pod, &GidSelection::default()), (5, Why::Version));
        of_pod[5].version = None;
        assert_eq!(choose(&of_pod, &GidSelection::default()), (4, Why::Family), "another's is of no use");
        assert_eq!(
            choose(&of_pod, &selection(Family::V4, "10.7.0.0/16", 2)),
            (3, Why::Version),
            "the user's range counts"
        );
        for entry in &mut of_pod {
            entry.is_own = false;
        }
        assert_eq!(
            choose(&of_pod, &GidSelection::default()),
            (3, Why::Version),
            "the host's, where there are no others"
        );
    }

    #[test]
    fn a_gid_that_moved_is_found_on_its_own_interface_and_never_in_place_of_a_named_one() {
        let mut table = table(&[("fe80::1", 1), ("fe80::1", 2), ("fe80::1", 1), ("fe80::1", 2)]);
        for entry in &mut table {
            // The port's own interface, and a VLAN of it.
            entry.interface = Some(if entry.index < 2 { 7 } else { 8 });
        }
        let chosen = |at: usize, is_named| Chosen { entry: table[at], is_named };
        assert_eq!(chosen(1, false).index_in(&table), Some(1));
        assert_eq!(chosen(3, true).index_in(&table), Some(3));
        // Both were removed and added again in the opposite order.
        let moved: Vec<GidEntry> =
            table.iter().map(|entry| GidEntry { index: (entry.index + 2) % 4, ..*entry }).collect();
        assert_eq!(chosen(1, false).index_in(&moved), Some(3));
        assert_eq!(chosen(1, true).index_in(&moved), None, "the user's index has another one now");
        assert_eq!(chosen(1, false).index_in(&table[2..]), None, "the VLAN's is another one");
        // Where the interfaces are not known, the same index is the best choice.
        let unknown: Vec<GidEntry> = table.iter().map(|entry| GidEntry { interface: None, ..*entry }).collect();
        assert_eq!(chosen(3, false).index_in(&unknown), Some(3));
    }

    #[test]
    fn a_named_index_beats_everything() {
        let selection = GidSelection { index: Some(6), ..GidSelection::default() };
        assert_eq!(choose(&usual(), &selection), (6, Why::Named));
    }

    #[test]
    fn to_another_subnet_packets_carry_the_peers_forwarding_identifier() {
        let gid = |flid: u16, subnet: u16, low: u8| {
            let mut gid = [0; 16];
            (gid[0], gid[1], gid[15]) = (0xfe, 0xc0, low);
            gid[4..6].copy_from_slice(&flid.to_be_bytes());
            gid[6..8].copy_from_slice(&subnet.to_be_bytes());
            gid
        };
        let expected = |lid, is_global, is_doubtful| Addressing { lid, is_global, is_doubtful };
        let own = gid(70, 1, 1);
        // In the same subnet by local identifier, whatever the forwarding identifiers are.
        for peer in [gid(0, 1, 2), gid(70, 1, 2), gid(71, 1, 2)] {
            assert_eq!(super::addressing(&own, &peer, 9, false), expected(9, false, false));
            assert_eq!(super::addressing(&own, &peer, 9, true), expected(9, true, false));
        }
        for needs_grh in [false, true] {
            assert_eq!(super::addressing(&own, &gid(71, 2, 2), 9, needs_grh), expected(71, true, false));
            assert_eq!(super::addressing(&own, &gid(0, 2, 2), 9, needs_grh), expected(9, true, true));
        }
    }

    #[test]
    fn ranges_are_checked_when_they_are_read() {
        for (text, family) in [
            ("10.7.0.0", Family::V4),
            ("10.7.0.0/33", Family::V4),
            ("10.7.0.0/-1", Family::V4),
            ("10.7.0.0/16", Family::V6),
            ("fd07::/64", Family::V4),
            ("fd07::/129", Family::V6),
            ("ten/8", Family::V4),
        ] {
            assert!(Range::parse(text, family).is_err(), "{text}");
        }
        assert!(Range::parse(" fd07:: / 128 ", Family::V6).is_ok());
    }

    #[test]
    fn infiniband_takes_the_routable_entry_only_where_there_is_one() {
        let plain = table(&[("fe80::2:c903", 0), ("fe80::2:c904", 0)]);
        assert_eq!(choose_infiniband(&plain, 1), (0, Why::InfiniBand));
        let routable = table(&[("fe80::2:c903", 0), ("fec0:0:12:5::1", 0)]);
        assert_eq!(choose_infiniband(&routable, 1), (1, Why::Routable));
        assert_eq!(choose_infiniband(&routable, 0), (0, Why::InfiniBand));
        assert_eq!((forwarding_id(&routable[1].gid), subnet(&routable[1].gid)), (0x12, 5));
    }

    #[test]
    fn gids_are_shown_as_the_addresses_that_they_hold() {
        assert_eq!(display(&usual()[3].gid), "10.7.0.1");
        assert_eq!(display(&usual()[7].gid), "fd07::1");
    }
}
