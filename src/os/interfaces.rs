//! The network interfaces of this host, and which of them NCCL's Socket transport would use.
//!
//! [`list`] queries the system. [`choose`] is a pure function from that list and the user's settings to the interfaces
//! in NCCL's order, so that the rules are tested without a network.
//!
//! The rules, as NCCL 2.30 has them:
//! - An entry is one address of one interface. It counts if the interface is running, the family is IPv4 or IPv6 (or
//!   the one that `NCCL_SOCKET_FAMILY` names), and it is not `::1`. The first entry of an interface that passes gives
//!   its address; the system lists IPv4 before IPv6. Link-local IPv6 addresses count, with their scope.
//! - `NCCL_SOCKET_IFNAME` of two or more characters decides alone, see [`Filter`]; when nothing passes there is no
//!   device.
//! - Without it: names starting with `ib`; else one interface in the subnet of `NCCL_COMM_ID`; else all but `docker`,
//!   `lo` and `virbr`; else `docker`; else `lo`; else `virbr` (always as prefixes).
//! - At most [`MAX_INTERFACES`] are taken.
//!
//! This module must not know what a device or a rail is made of.

pub(crate) mod duplicate;
mod meant;

pub(crate) use meant::meant;

use super::config::Family;
use super::error::{Error, Result};
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, ToSocketAddrs};
use std::ptr;

/// The number of interfaces, and of names in a list, that NCCL's Socket considers.
pub(crate) const MAX_INTERFACES: usize = 16;

/// What is chosen when no variable is set, in [`Filter`]'s syntax.
const ORDINARY: &str = "^docker,lo,virbr";

/// The speed reported for an interface whose speed the system does not know, in Mbit/s.
///
/// NCCL derives the number of channels from steps in its own lists of speeds (`graph/search.cc`, for Hopper and for
/// older GPUs). 4.875 GB/s is slightly more than twice 2.4, and rings are doubled, which gives four channels. 1.25
/// GB/s, NCCL's guess for its own Socket, gives two, with which an all-reduce of 128 MiB over an unlimited path takes
/// 1.7 times as long. 9.6 GB/s gives eight, with which a path of 10 Gb/s loses packets and waits for retransmissions:
/// 16 MiB takes up to ten times as long (`benches/nccl_networks.sh`).
pub const UNKNOWN_SPEED_MBPS: u32 = 39_000;

/// One network interface as a part of a device: what a backend binds to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rail {
    /// The interface's name, for messages and for binding.
    pub name: String,
    /// The kernel's index of the interface.
    pub index: u32,
    /// The local address, with port 0 and, for link-local IPv6, the scope.
    pub address: SocketAddr,
    /// The speed in Mbit/s, or the value assumed for it.
    pub speed_mbps: u32,
    /// Whether the system reported the speed.
    pub speed_is_known: bool,
    /// Up and with a carrier, at the time of the search.
    pub running: bool,
}

/// One address of one interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The interface's name, or the label of an aliased address ("eth0:1").
    pub name: String,
    /// The kernel's index of the interface, 0 when it has gone in the meantime.
    pub index: u32,
    /// The address with port 0 and, for link-local IPv6, its scope.
    pub address: SocketAddr,
    /// The network mask of the address, when there is one.
    pub mask: Option<IpAddr>,
    /// Up and with a carrier.
    pub running: bool,
}

impl Interface {
    /// The kernel's name of the interface: the label without its alias part.
    pub(crate) fn kernel_name(&self) -> &str {
        self.name.split(':').next().unwrap_or(&self.name)
    }
}

/// Every IPv4 and IPv6 address of every interface, in the system's order.
///
/// # Errors
/// When the system does not answer (out of memory or descriptors).
pub fn list() -> Result<Vec<Interface>> {
    let mut head = ptr::null_mut();
    // SAFETY: `head` outlives the call, which fills it.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(Error::system("listing the network interfaces", &io::Error::last_os_error()));
    }
    let mut found = Vec::new();
    let mut entry = head;
    while !entry.is_null() {
        // SAFETY: the list is valid until `freeifaddrs`, and `entry` is one of its nodes.
        let node = unsafe { &*entry };
        // SAFETY: the node's pointers are null or point to the data that their names describe, within the list.
        found.extend(unsafe { read(node) });
        entry = node.ifa_next;
    }
    // SAFETY: `head` came from `getifaddrs`, and nothing of it is kept.
    unsafe { libc::freeifaddrs(head) };
    duplicate::leave_out(&mut found);
    Ok(found)
}

/// # Safety
/// `node` comes from `getifaddrs` and has not been freed.
unsafe fn read(node: &libc::ifaddrs) -> Option<Interface> {
    // SAFETY: the caller keeps the promise about the node's pointers.
    let address = unsafe { socket_address(node.ifa_addr) }?;
    // SAFETY: as above.
    let mask = unsafe { socket_address(node.ifa_netmask) }.map(|mask| mask.ip());
    // SAFETY: `ifa_name` is a C string.
    let label = unsafe { CStr::from_ptr(node.ifa_name) };
    let name = label.to_string_lossy().into_owned();
    // SAFETY: `label` is a C string. An alias label is no interface name, so its index is looked up without the alias.
    let mut index = unsafe { libc::if_nametoindex(label.as_ptr()) };
    if index == 0 {
        let bare = std::ffi::CString::new(name.split(':').next().unwrap_or("")).unwrap_or_default();
        // SAFETY: `bare` is a C string.
        index = unsafe { libc::if_nametoindex(bare.as_ptr()) };
    }
    let running = node.ifa_flags & libc::IFF_RUNNING as u32 != 0;
    Some(Interface { name, index, address, mask, running })
}

/// # Safety
/// `address` is null or points to a socket address of the length that its family implies.
unsafe fn socket_address(address: *const libc::sockaddr) -> Option<SocketAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, so it holds at least a family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family shows that it is a sockaddr_in; no alignment is assumed.
            let v4 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in>()) };
            Some(SocketAddrV4::new(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)), 0).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family shows that it is a sockaddr_in6; no alignment is assumed.
            let v6 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in6>()) };
            Some(SocketAddrV6::new(Ipv6Addr::from(v6.sin6_addr.s6_addr), 0, 0, v6.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// A list in `NCCL_SOCKET_IFNAME`'s syntax: names separated by commas, `^` in front excludes them, `=` in front (after
/// `^`) means exact names instead of prefixes. A colon and what follows it belong to InfiniBand ports and are ignored.
/// An empty list matches everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Filter {
    exclude: bool,
    exact: bool,
    names: Vec<String>,
}

impl Filter {
    /// Reads a list. Every text is a valid list.
    pub(crate) fn new(text: &str) -> Self {
        let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let names = text.split(',').filter_map(|entry| entry.split(':').next()).filter(|name| !name.is_empty());
        Self { exclude, exact, names: names.take(MAX_INTERFACES).map(str::to_owned).collect() }
    }

    /// Whether the list selects an interface of this name.
    pub(crate) fn passes(&self, name: &str) -> bool {
        let listed = self.names.is_empty()
            || self.names.iter().any(|listed| if self.exact { name == listed } else { name.starts_with(listed) });
        listed != self.exclude
    }

    /// The entries that selected none of these, among those that mean one interface: exact names, and names with a
    /// number. (`ib,eth` lists what may exist.)
    pub(crate) fn missed(&self, chosen: &[Interface]) -> Vec<&str> {
        let fits =
            |entry: &str| chosen.iter().any(|one| one.name == entry || !self.exact && one.name.starts_with(entry));
        let means_one = |entry: &str| self.exact || entry.contains(|c: char| c.is_ascii_digit());
        let entries = self.names.iter().map(String::as_str);
        entries.filter(|entry| !self.exclude && means_one(entry) && !fits(entry)).collect()
    }
}

/// The user's settings.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selection<'a> {
    /// `NCCL_SOCKET_IFNAME`.
    pub names: Option<&'a str>,
    /// `NCCL_SOCKET_FAMILY`.
    pub family: Option<Family>,
    /// The address in `NCCL_COMM_ID`, see [`rendezvous`].
    pub rendezvous: Option<SocketAddr>,
}

/// The rule that decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// `NCCL_SOCKET_IFNAME` has this value.
    Asked(String),
    /// The names start with `ib`.
    InfiniBand,
    /// It is in the subnet of `NCCL_COMM_ID`.
    Rendezvous(SocketAddr),
    /// All running interfaces but docker, loopback and virbr.
    Ordinary,
    /// There are only interfaces with this prefix.
    LastResort(&'static str),
    /// `TOWLINE_RAILS` names them.
    Rails,
    /// No rule found a running interface with an address.
    Nothing,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Asked(text) => write!(f, "NCCL_SOCKET_IFNAME is {text}"),
            Self::InfiniBand => f.write_str("names starting with ib come first"),
            Self::Rendezvous(address) => write!(f, "NCCL_COMM_ID's {} is in its subnet", address.ip()),
            Self::Ordinary => f.write_str("running, and not docker, lo or virbr"),
            Self::LastResort(prefix) => write!(f, "nothing but {prefix} is running"),
            Self::Rails => f.write_str("TOWLINE_RAILS names them"),
            Self::Nothing => f.write_str("no interface is running and has an address"),
        }
    }
}

/// The interfaces to use, one entry each, in NCCL's order, and the rule that chose them.
pub(crate) fn choose(all: &[Interface], selection: &Selection<'_>) -> (Vec<Interface>, Why) {
    let pass = |list: &str| {
        let filter = Filter::new(list);
        select(all, selection.family, |name| filter.passes(name))
    };
    if let Some(names) = selection.names.filter(|names| names.len() > 1) {
        return (pass(names), Why::Asked(names.to_owned()));
    }
    let infiniband = pass("ib");
    if !infiniband.is_empty() {
        return (infiniband, Why::InfiniBand);
    }
    if let Some(there) = selection.rendezvous {
        let near = in_subnet(all, there);
        if !near.is_empty() {
            return (near, Why::Rendezvous(there));
        }
    }
    let last_resort = |prefix| (prefix, Why::LastResort(prefix));
    let rest = [(ORDINARY, Why::Ordinary), last_resort("docker"), last_resort("lo"), last_resort("virbr")];
    let found = rest.into_iter().map(|(list, why)| (pass(list), why)).find(|(found, _)| !found.is_empty());
    found.unwrap_or((Vec::new(), Why::Nothing))
}

/// The result of [`choose`], and beside it the interfaces that the same rule would choose if they were running, all in
/// the system's order. The latter serve a device that can wait for them. An interface that is not running decides no
/// rule, so no device consists only of such interfaces.
///
/// `is_bridge`: a bridge that is down is included only if `NCCL_SOCKET_IFNAME` names it. The networks of containers are
/// bridges, which are down while they have no containers, and lead to no other host.
pub(crate) fn choose_also_down(
    all: &[Interface],
    selection: &Selection<'_>,
    is_bridge: impl Fn(&Interface) -> bool,
) -> (Vec<Interface>, Why) {
    let (running, why) = choose(all, selection);
    let (list, is_asked) = match &why {
        Why::Asked(names) => (names.as_str(), true),
        Why::InfiniBand => ("ib", false),
        Why::Ordinary => (ORDINARY, false),
        Why::LastResort(prefix) => (*prefix, false),
        // One interface, whether it runs or not; or none.
        Why::Rendezvous(_) | Why::Rails | Why::Nothing => return (running, why),
    };
    if running.is_empty() {
        return (running, why);
    }
    let filter = Filter::new(list);
    let down = all.iter().filter(|one| !one.running && filter.passes(&one.name) && (is_asked || !is_bridge(one)));
    let down = first_addresses(down, selection.family).into_iter().take(MAX_INTERFACES - running.len());
    let mut both: Vec<Interface> = running.into_iter().chain(down).collect();
    both.sort_by_key(|one| all.iter().position(|other| other == one));
    (both, why)
}

/// The interfaces with exactly these names or alternative names, in that order, running or not, and the names for which
/// no interface has a usable address.
pub(crate) fn named(all: &[Interface], names: &[String], family: Option<Family>) -> (Vec<Interface>, Vec<String>) {
    let mut missing = Vec::new();
    let mut found = Vec::new();
    for name in names {
        let is_known = all.iter().any(|one| one.name == *name);
        let index = if is_known { 0 } else { index_of(name) };
        let is_it = |one: &&Interface| if is_known { one.name == *name } else { index != 0 && one.index == index };
        match first_addresses(all.iter().filter(is_it), family).into_iter().next() {
            // With two names it is still one interface.
            Some(interface) if found.contains(&interface) => {}
            Some(interface) => found.push(interface),
            None => missing.push(name.clone()),
        }
    }
    found.truncate(MAX_INTERFACES);
    (found, missing)
}

/// The first usable address of each running interface that the list selects.
fn select(all: &[Interface], family: Option<Family>, passes: impl Fn(&str) -> bool) -> Vec<Interface> {
    first_addresses(all.iter().filter(|one| one.running && passes(&one.name)), family)
}

/// The kernel's index of the interface with this name, alternative names included; 0 when there is none.
fn index_of(name: &str) -> u32 {
    // The kernel uses only the part before a colon.
    if name.contains(':') {
        return 0;
    }
    let name = std::ffi::CString::new(name).unwrap_or_default();
    // SAFETY: `name` is a C string.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// The first usable address of each of these. For a loopback that carries the host's own address (a /32 that is
/// announced by a routing protocol), that address.
fn first_addresses<'a>(among: impl Iterator<Item = &'a Interface>, family: Option<Family>) -> Vec<Interface> {
    let among: Vec<&Interface> = among.collect();
    let of_host = |one: &Interface| {
        !one.address.ip().is_loopback() && family.is_none_or(|family| (family == Family::V4) == one.address.is_ipv4())
    };
    let mut found: Vec<Interface> = Vec::new();
    for interface in &among {
        let ip = interface.address.ip();
        if ip.is_loopback() && among.iter().any(|other| other.name == interface.name && of_host(other)) {
            continue;
        }
        let usable = match family {
            Some(Family::V4) => ip.is_ipv4(),
            Some(Family::V6) => ip.is_ipv6(),
            None => true,
        } && ip != IpAddr::V6(Ipv6Addr::LOCALHOST);
        if usable && found.len() < MAX_INTERFACES && !found.iter().any(|earlier| earlier.name == interface.name) {
            found.push((*interface).clone());
        }
    }
    found
}

/// The first entry whose subnet contains `there`. NCCL checks neither the family nor whether the interface is running
/// here.
fn in_subnet(all: &[Interface], there: SocketAddr) -> Vec<Interface> {
    let same = |interface: &&Interface| match (interface.address, interface.mask, there) {
        (SocketAddr::V4(here), Some(IpAddr::V4(mask)), SocketAddr::V4(there)) => {
            here.ip().to_bits() & mask.to_bits() == there.ip().to_bits() & mask.to_bits()
        }
        (SocketAddr::V6(here), Some(IpAddr::V6(mask)), SocketAddr::V6(there)) => {
            here.ip().to_bits() & mask.to_bits() == there.ip().to_bits() & mask.to_bits()
                && here.scope_id() == there.scope_id()
        }
        _ => false,
    };
    all.iter().find(same).cloned().into_iter().collect()
}

/// The address in `NCCL_COMM_ID`: `host:port`, or `[ipv6]:port` with an optional `%interface`. A host name is looked
/// up. None when it is not valid: it is only a hint here, and NCCL itself reports it.
pub(crate) fn rendezvous(text: &str) -> Option<SocketAddr> {
    if let Some(rest) = text.strip_prefix('[') {
        let (host, port) = rest.split_once(']')?;
        let (ip, scope) = host.split_once('%').map_or((host, None), |(ip, scope)| (ip, Some(scope)));
        let scope = scope.map_or(0, |name| {
            let name = std::ffi::CString::new(name).unwrap_or_default();
            // SAFETY: `name` is a C string.
            unsafe { libc::if_nametoindex(name.as_ptr()) }
        });
        let port = port.strip_prefix(':').and_then(|port| port.parse().ok()).unwrap_or(0);
        return Some(SocketAddrV6::new(ip.parse().ok()?, port, 0, scope).into());
    }
    let (host, port) = text.split(',').next()?.split_once(':')?;
    (host, port.parse().unwrap_or(0)).to_socket_addrs().ok()?.next()
}

#[cfg(test)]
mod tests;
