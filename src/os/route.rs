//! Which interface packets leave by, according to the kernel's routing tables (rtnetlink(7), `RTM_GETROUTE`).
//!
//! Linux chooses the interface by the destination alone, unless a routing rule differs. With two interfaces in one
//! subnet all packets leave by the first, whatever their source address. [`egress`] detects this, and returns whether a
//! socket that is bound to the interface would send over it to the same destination.
//!
//! This module must not know what a rail or a stream is.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use socket2::Socket;

use super::fd::Registered;

/// How packets with the address of an interface reach a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Egress {
    /// The kernel's own choice is right, or unknown.
    AsRouted,
    /// By the interface with this index (0: by none), and a socket that is bound to its own has an equally specific
    /// route.
    Bind(u32),
    /// By the interface with this index, and a bound socket would not help: it has no such route, or the answers would
    /// not come back over its interface ([`are_kept_apart`]).
    Strays(u32),
}

/// A route as the kernel found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Route {
    /// The interface; 0 when there are several (a multipath route).
    interface: u32,
    /// How many bits of the destination it matches.
    prefix: u8,
    /// The destination is an address of this host.
    is_local: bool,
}

/// How packets from `from`, an address of interface `index`, reach `to`.
pub(crate) fn egress(from: IpAddr, index: u32, to: IpAddr) -> Egress {
    let link_local = matches!(to, IpAddr::V6(v6) if v6.is_unicast_link_local());
    if index == 0 || link_local || from.is_ipv4() != to.is_ipv4() {
        return Egress::AsRouted;
    }
    let usual = match look_up(from, to, None) {
        Ok(route) => Some(route),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENETUNREACH | libc::EHOSTUNREACH)) => None,
        // The query is impossible here.
        Err(_) => return Egress::AsRouted,
    };
    decide(
        index,
        usual,
        || look_up(from, to, Some(index)).ok(),
        |other| from.is_ipv6() || are_kept_apart(&[index, other]),
    )
}

/// The rule of [`egress`]. `usual`: the kernel's choice. `over`: its choice for a socket that is bound to the
/// interface. `are_apart`: whether answers come back over the interface, and not over the one with this index.
fn decide(
    index: u32,
    usual: Option<Route>,
    over: impl FnOnce() -> Option<Route>,
    are_apart: impl FnOnce(u32) -> bool,
) -> Egress {
    if usual.is_some_and(|route| route.is_local || route.interface == 0 || route.interface == index) {
        return Egress::AsRouted;
    }
    let over = over().filter(|route| route.interface == index && !route.is_local);
    match (usual, over) {
        // Without the interface there is no route at all: it belongs to a VRF.
        (None, Some(_)) => Egress::Bind(0),
        (None, None) => Egress::AsRouted,
        (Some(usual), Some(over)) if over.prefix >= usual.prefix && are_apart(usual.interface) => {
            Egress::Bind(usual.interface)
        }
        (Some(usual), _) => Egress::Strays(usual.interface),
    }
}

/// Whether each of these interfaces, in one IPv4 subnet, gets what is sent to its own addresses, and accepts it.
///
/// By default every interface of a Linux host answers ARP for all addresses of the host, and sends ARP requests from
/// any of them. So a peer may send to any interface (`arp_ignore`, `arp_announce`). A strict `rp_filter` drops packets
/// from hosts whose answers leave by another interface. IPv6 has no such settings: its neighbour discovery keeps
/// interfaces apart.
pub(crate) fn are_kept_apart(indices: &[u32]) -> bool {
    indices.iter().all(|&index| {
        let Some(name) = name_of(index) else { return false };
        // The larger of both is in force (ip-sysctl.txt).
        let [ignore, announce] = ["arp_ignore", "arp_announce"].map(|key| setting("all", key).max(setting(&name, key)));
        matches!(ignore, 1 | 2) && announce == 2 && !is_strict(index)
    })
}

/// Whether an interface drops packets from hosts whose answers leave by another interface.
pub(crate) fn is_strict(index: u32) -> bool {
    let name = name_of(index).unwrap_or_default();
    setting("all", "rp_filter").max(setting(&name, "rp_filter")) == 1
}

/// A setting of IPv4, for one interface or for `all`.
fn setting(name: &str, key: &str) -> u8 {
    let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/{key}")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// The name of an interface.
pub(crate) fn name_of(index: u32) -> Option<String> {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: the buffer is as long as the call may fill.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    // SAFETY: the call terminated the name with a zero.
    (!found.is_null()).then(|| unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

/// Linux 5.1, `asm-generic/socket.h`.
const SO_BINDTOIFINDEX: libc::c_int = 62;

/// Lets a socket send and receive over one interface only. Without privileges it works since Linux 5.7.
///
/// # Errors
/// When the kernel does not allow it.
pub(crate) fn bind_to_interface(socket: &Socket, index: u32) -> io::Result<()> {
    set_number(socket, libc::SOL_SOCKET, SO_BINDTOIFINDEX, index as libc::c_int)
}

/// Lets a socket choose its local port when it connects, not when it is bound to an address. Then connections to
/// different peers may share a port, as with sockets that are not bound. Optional: kernels before 4.2 do not support
/// it.
pub fn take_port_at_connect(socket: &Socket) {
    let _ = set_number(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
}

fn set_number(socket: &Socket, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads the value, which outlives the call.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether `to` is an address of this host.
pub(crate) fn is_local(to: IpAddr) -> bool {
    let from = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    look_up(from, to, None).is_ok_and(|route| route.is_local)
}

/// `struct nlmsghdr`: length, type, flags, sequence, port.
const HEADER: usize = 16;
/// `struct rtmsg`: family, two prefix lengths, class, table, protocol, scope, type, flags.
const ROUTE: usize = 12;
/// Linux 4.13: returns the entry of the table, not a route made for the destination.
const RTM_F_FIB_MATCH: u32 = 0x2000;
/// The route was made for the destination: an older kernel.
const RTM_F_CLONED: u32 = 0x200;

fn look_up(from: IpAddr, to: IpAddr, over: Option<u32>) -> io::Result<Route> {
    let question = question(from, to, over);
    let fd = Registered::open(|| {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: plain system call.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    })?;
    // SAFETY: the kernel reads the bytes, which outlive the call.
    let sent = unsafe { libc::send(fd.as_raw_fd(), question.as_ptr().cast(), question.len(), libc::MSG_NOSIGNAL) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    // The kernel has answered before `send` returns, so this never waits.
    let mut answer = [0_u8; 4096];
    // SAFETY: the buffer is ours and has the passed length.
    let got = unsafe { libc::recv(fd.as_raw_fd(), answer.as_mut_ptr().cast(), answer.len(), libc::MSG_DONTWAIT) };
    let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    read_answer(&answer[..got])
}

fn question(from: IpAddr, to: IpAddr, over: Option<u32>) -> Vec<u8> {
    let bytes_of = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let mut body = vec![0_u8; HEADER + ROUTE];
    let mut add = |kind: u16, value: &[u8]| {
        body.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
        body.extend_from_slice(&kind.to_ne_bytes());
        body.extend_from_slice(value);
    };
    let to = bytes_of(to);
    let bits = to.len() as u8 * 8;
    add(libc::RTA_DST, &to);
    // With a source address IPv6 ignores the interface of the query.
    let with_source = !(from.is_unspecified() || from.is_ipv6() && over.is_some());
    if with_source {
        add(libc::RTA_SRC, &bytes_of(from));
    }
    if let Some(index) = over {
        add(libc::RTA_OIF, &index.to_ne_bytes());
    }
    let length = body.len() as u32;
    body[..4].copy_from_slice(&length.to_ne_bytes());
    body[4..6].copy_from_slice(&libc::RTM_GETROUTE.to_ne_bytes());
    body[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    body[HEADER] = if bits == 32 { libc::AF_INET } else { libc::AF_INET6 } as u8;
    body[HEADER + 1] = bits;
    body[HEADER + 2] = if with_source { bits } else { 0 };
    body[HEADER + 8..HEADER + 12].copy_from_slice(&RTM_F_FIB_MATCH.to_ne_bytes());
    body
}

fn read_answer(bytes: &[u8]) -> io::Result<Route> {
    let odd = || io::Error::from(io::ErrorKind::InvalidData);
    let number = |at: usize| -> io::Result<u32> {
        let four = bytes.get(at..at + 4).ok_or_else(odd)?;
        Ok(u32::from_ne_bytes(four.try_into().expect("four bytes")))
    };
    let kind = (number(4)? & 0xffff) as u16;
    if kind == libc::NLMSG_ERROR as u16 {
        return Err(io::Error::from_raw_os_error((number(HEADER)? as i32).wrapping_neg()));
    }
    if kind != libc::RTM_NEWROUTE || number(HEADER + 8)? & RTM_F_CLONED != 0 {
        return Err(odd());
    }
    let end = (number(0)? as usize).min(bytes.len());
    let (prefix, route_type) = (bytes[HEADER + 1], bytes[HEADER + 7]);
    let mut route = Route { interface: 0, prefix, is_local: route_type == libc::RTN_LOCAL };
    let mut at = HEADER + ROUTE;
    while at + 4 <= end {
        let head = number(at)?.to_ne_bytes();
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        if length < 4 {
            return Err(odd());
        }
        if u16::from_ne_bytes([head[2], head[3]]) == libc::RTA_OIF {
            route.interface = number(at + 4)?;
        }
        at += length.next_multiple_of(4);
    }
    Ok(route)
}

/// Configures interfaces in one IPv4 subnet so that each can be used ([`are_kept_apart`]).
pub(crate) const KEEP_APART: &str =
    "sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 net.ipv4.conf.all.rp_filter=2";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by(interface: u32, prefix: u8) -> Option<Route> {
        Some(Route { interface, prefix, is_local: false })
    }

    #[test]
    fn a_socket_is_bound_only_where_its_interface_has_a_route_as_good_as_the_one_that_is_taken() {
        let decide = |usual, over, drops: bool| super::decide(7, usual, || over, |_| !drops);
        assert_eq!(decide(by(7, 24), None, false), Egress::AsRouted, "it leaves by its own");
        assert_eq!(decide(by(3, 24), by(7, 24), false), Egress::Bind(3), "two interfaces in one subnet");
        assert_eq!(decide(by(3, 0), by(7, 0), false), Egress::Bind(3), "two default routes");
        assert_eq!(decide(by(3, 24), by(7, 24), true), Egress::Strays(3), "the answers would come by the other one");
        assert_eq!(decide(by(3, 24), by(7, 0), false), Egress::Strays(3), "a route of its own leads there");
        assert_eq!(decide(by(3, 24), None, false), Egress::Strays(3), "only the other one leads there");
        assert_eq!(decide(by(3, 24), by(3, 24), false), Egress::Strays(3), "the kernel looks past the interface");
        assert_eq!(decide(None, by(7, 24), true), Egress::Bind(0), "an interface of a VRF");
        assert_eq!(decide(None, None, false), Egress::AsRouted);
        assert_eq!(decide(by(0, 24), by(7, 24), false), Egress::AsRouted, "several next hops");
        let here = Some(Route { interface: 1, prefix: 32, is_local: true });
        assert_eq!(decide(here, by(7, 24), false), Egress::AsRouted, "the peer is on this host");
    }

    #[test]
    fn this_host_reaches_itself_over_the_loopback() {
        let lo = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert!(is_local(lo));
        assert!(!is_local("192.0.2.1".parse().expect("an address")), "TEST-NET-1 is nobody's");
        assert_eq!(egress(lo, 1, lo), Egress::AsRouted);
        assert_eq!(name_of(1).as_deref(), Some("lo"));
    }

    proptest! {
        #[test]
        fn any_answer_is_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read_answer(&bytes);
            let mut answer = bytes;
            if answer.len() >= HEADER {
                answer[4..6].copy_from_slice(&libc::RTM_NEWROUTE.to_ne_bytes());
            }
            let _ = read_answer(&answer);
        }
    }
}
