//! The connection handle: made by a listener, and carried by NCCL to the connecting side.
//!
//! One layout for all API versions, small enough for the 64 bytes of v4 (NCCL 2.8 to 2.11):
//!
//! | bytes | content |
//! |---|---|
//! | 0–7 | magic and version |
//! | 8–23 | secret, 128 bits |
//! | 24 | the backend: 0 TCP, 1 RDMA |
//! | 25–59 | where the listener's process can be reached, an address for each rail, as many as fit; then zero |
//! | 60–63 | written by the connecting side: key of a connection attempt under way, else zero |
//!
//! One reachable address is enough: the handshake carries the others. An address is a byte that encodes its family and
//! how many of its first bytes equal those of the previous address, the remaining bytes, and its port. So five IPv4
//! addresses always fit, and two IPv6 addresses with their first three bytes in common. The scope of a link-local
//! address is left out: it has no meaning on another host.
//!
//! NCCL passes the same bytes to `connect` until it succeeds, but may copy them between calls, so the attempt is found
//! by a key, never by a pointer.
//!
//! FlagCX leaves 56 bytes to a plugin. There the key is in bytes 52–55, and the addresses end before it: three of IPv4
//! always fit, and one of IPv6 ([`ConnectionHandle::shorten`], [`lengthen`]).

use std::net::{IpAddr, SocketAddr};

use crate::os::error::{Error, Result};
use crate::session::handshake::Secret;

const MAGIC: [u8; 8] = *b"TOWLINE\x02";

/// Where the addresses are.
const ADDRESSES: std::ops::Range<usize> = 25..60;
/// Where the addresses of a short handle are.
const FEW_ADDRESSES: std::ops::Range<usize> = 25..52;

/// How many bytes a handle's addresses may take.
pub(crate) const ROOM: usize = ADDRESSES.end - ADDRESSES.start;
/// The same in a short handle.
pub(crate) const SHORT_ROOM: usize = FEW_ADDRESSES.end - FEW_ADDRESSES.start;

/// A handle for FlagCX.
pub(crate) type ShortHandle = [u8; 56];

/// Bits of the byte before an address. This one is always set.
const ADDRESS: u8 = 0x40;
const IPV6: u8 = 0x80;
const SHARED: u8 = 0x1F;

/// A decoded handle.
#[derive(Debug, Clone)]
pub struct ConnectionHandle {
    /// The secret that the connecting side proves.
    pub secret: Secret,
    /// The addresses of the listener's sockets: at least one, in the order of its rails.
    pub addresses: Vec<SocketAddr>,
    /// Whether the listener's connections are over RDMA.
    pub is_rdma: bool,
    /// The connecting side's attempt, or 0.
    pub key: u32,
}

impl ConnectionHandle {
    /// The 64 bytes for NCCL.
    pub fn encode(&self) -> [u8; 64] {
        let mut out = [0; 64];
        out[..8].copy_from_slice(&MAGIC);
        out[8..24].copy_from_slice(&self.secret.bytes());
        out[24] = u8::from(self.is_rdma);
        put_addresses(&mut out[ADDRESSES], &self.addresses);
        out[60..].copy_from_slice(&self.key.to_le_bytes());
        out
    }

    /// The 56 bytes for FlagCX: as [`ConnectionHandle::encode`], with fewer addresses.
    pub(crate) fn shorten(&self) -> ShortHandle {
        let mut out = [0; 56];
        out[..FEW_ADDRESSES.start].copy_from_slice(&self.encode()[..FEW_ADDRESSES.start]);
        put_addresses(&mut out[FEW_ADDRESSES], &self.addresses);
        out[FEW_ADDRESSES.end..].copy_from_slice(&self.key.to_le_bytes());
        out
    }

    /// Reads a handle.
    ///
    /// # Errors
    /// When other software made it.
    pub fn decode(bytes: &[u8; 64]) -> Result<Self> {
        if bytes[..7] != MAGIC[..7] {
            return Err(Error::argument("the connection handle was not made by Towline")
                .with_hint("all ranks must use the same network plugin: set NCCL_NET=Towline everywhere"));
        }
        if bytes[7] != MAGIC[7] {
            return Err(Error::argument(format!("the connection handle is of version {}, not {}", bytes[7], MAGIC[7]))
                .with_hint("use the same Towline release on all hosts"));
        }
        let addresses = read_addresses(&bytes[ADDRESSES])
            .ok_or_else(|| Error::argument("the connection handle holds no address; it was damaged on its way"))?;
        Ok(Self {
            secret: Secret::from_bytes(bytes[8..24].try_into().expect("sixteen bytes")),
            addresses,
            is_rdma: bytes[24] != 0,
            key: u32::from_le_bytes(bytes[60..].try_into().expect("four bytes")),
        })
    }

    /// Writes the connecting side's key into a handle.
    pub fn set_key(bytes: &mut [u8; 64], key: u32) {
        bytes[60..].copy_from_slice(&key.to_le_bytes());
    }
}

/// A short handle in the 64 bytes of the others.
pub(crate) fn lengthen(short: &ShortHandle) -> [u8; 64] {
    let mut out = [0; 64];
    out[..FEW_ADDRESSES.end].copy_from_slice(&short[..FEW_ADDRESSES.end]);
    out[60..].copy_from_slice(&short[FEW_ADDRESSES.end..]);
    out
}

/// Writes the key of a handle from [`lengthen`] back into the short one.
pub(crate) fn keep_key(short: &mut ShortHandle, bytes: &[u8; 64]) {
    short[FEW_ADDRESSES.end..].copy_from_slice(&bytes[60..]);
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Moves addresses whose rail is down behind the others when not all of them fit into `room` bytes, so that a working
/// one fits. If all fit, each keeps its rail's place, since the other side first tries its rail of the same place.
pub(crate) fn what_works_first(
    mut addresses: Vec<SocketAddr>,
    room: usize,
    is_down: impl Fn(&SocketAddr) -> bool,
) -> Vec<SocketAddr> {
    if put_addresses(&mut [0; ROOM][..room], &addresses) < addresses.len() {
        addresses.sort_by_key(is_down);
    }
    addresses
}

/// Writes as many addresses as fit, in order; after one that does not fit, a shorter one may. Returns their number.
fn put_addresses(mut out: &mut [u8], addresses: &[SocketAddr]) -> usize {
    let mut written = 0;
    let mut last = Vec::new();
    for address in addresses {
        let ip = octets(address.ip());
        let shared = if ip.len() == last.len() { ip.iter().zip(&last).take_while(|(a, b)| a == b).count() } else { 0 };
        let length = 1 + ip.len() - shared + 2;
        if length > out.len() {
            continue;
        }
        let (here, rest) = out.split_at_mut(length);
        here[0] = ADDRESS | if address.is_ipv6() { IPV6 } else { 0 } | shared as u8;
        here[1..length - 2].copy_from_slice(&ip[shared..]);
        here[length - 2..].copy_from_slice(&address.port().to_le_bytes());
        (out, last) = (rest, ip);
        written += 1;
    }
    written
}

/// Reads what [`put_addresses`] wrote. None when something else did, or there is none.
fn read_addresses(mut bytes: &[u8]) -> Option<Vec<SocketAddr>> {
    let mut addresses = Vec::new();
    let mut last: Vec<u8> = Vec::new();
    while let Some((&head, rest)) = bytes.split_first()
        && head != 0
    {
        let (size, shared) = (if head & IPV6 != 0 { 16 } else { 4 }, usize::from(head & SHARED));
        let is_right = head & !(ADDRESS | IPV6 | SHARED) == 0
            && head & ADDRESS != 0
            && (shared == 0 || shared <= size && last.len() == size);
        if !is_right {
            return None;
        }
        let (own, rest) = rest.split_at_checked(size - shared)?;
        let (port, rest) = rest.split_at_checked(2)?;
        let ip = [&last[..shared], own].concat();
        let as_ip =
            <[u8; 4]>::try_from(&ip[..]).map(IpAddr::from).or_else(|_| <[u8; 16]>::try_from(&ip[..]).map(IpAddr::from));
        addresses.push(SocketAddr::new(as_ip.ok()?, u16::from_le_bytes([port[0], port[1]])));
        (bytes, last) = (rest, ip);
    }
    (!addresses.is_empty()).then_some(addresses)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn handle(addresses: &[&str]) -> ConnectionHandle {
        ConnectionHandle {
            secret: Secret::random().unwrap(),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            is_rdma: false,
            key: 0,
        }
    }

    fn carried(addresses: &[&str]) -> Vec<String> {
        let read = ConnectionHandle::decode(&handle(addresses).encode()).unwrap();
        read.addresses.iter().map(SocketAddr::to_string).collect()
    }

    #[test]
    fn a_handle_survives_and_leaves_the_connecting_sides_bytes_zero() {
        for address in ["10.1.2.3:45", "[fe80::1]:45"] {
            let handle = handle(&[address]);
            let mut bytes = handle.encode();
            assert!(bytes[60..].iter().all(|byte| *byte == 0));
            ConnectionHandle::set_key(&mut bytes, 0x0102_0304);
            let read = ConnectionHandle::decode(&bytes).unwrap();
            assert_eq!((read.secret, read.addresses, read.key), (handle.secret, handle.addresses, 0x0102_0304));
        }
    }

    #[test]
    fn a_handle_leads_to_several_rails() {
        let apart = ["10.0.0.1:1", "11.0.0.2:2", "12.0.0.3:65535", "13.0.0.4:4", "14.0.0.5:5", "15.0.0.6:6"];
        assert_eq!(carried(&apart), apart[..5]);
        let near = ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3", "10.0.0.4:4", "10.0.0.5:5", "10.0.0.6:6", "10.0.0.7:7"];
        assert_eq!(carried(&near), near);
        let v6 = ["[2001:db8:1::a:1]:1", "[2001:db8:2::b:2]:2", "[2001:db8:3::c:3]:3"];
        assert_eq!(carried(&v6), v6[..2]);
        let far = ["[2001:db8::1]:1", "[fd77::2]:2", "10.0.0.1:3"];
        assert_eq!(carried(&far), [far[0], far[2]]);
        assert_eq!(carried(&["10.0.0.1:7", "10.0.0.1:7"]), ["10.0.0.1:7", "10.0.0.1:7"]);
        assert_eq!(carried(&["[fe80::1%7]:45"]), ["[fe80::1]:45"]);
    }

    #[test]
    fn what_is_down_gives_way_only_where_there_is_no_room() {
        let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let few = addresses(&["10.0.0.1:1", "11.0.0.2:2"]);
        assert_eq!(what_works_first(few.clone(), ROOM, |it| it.port() == 1), few);
        let many = addresses(&["[fd01::1]:1", "[2001:db8::2]:2", "[2a00::3]:3", "[fd02::4]:4"]);
        let ordered = what_works_first(many, ROOM, |it| it.port() < 3);
        assert_eq!(ordered.iter().map(SocketAddr::port).collect::<Vec<_>>(), [3, 4, 1, 2]);
    }

    #[test]
    fn a_short_handle_loses_no_more_than_addresses_that_do_not_fit() {
        let of = |texts: &[&str], key: u32| {
            let mut bytes = lengthen(&handle(texts).shorten());
            ConnectionHandle::set_key(&mut bytes, key);
            let mut short = handle(texts).shorten();
            keep_key(&mut short, &bytes);
            let read = ConnectionHandle::decode(&lengthen(&short)).unwrap();
            assert_eq!(read.key, key);
            read.addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>()
        };
        let rails = ["10.0.0.1:1", "11.0.0.2:2", "12.0.0.3:65535", "13.0.0.4:4", "14.0.0.5:5"];
        assert_eq!(of(&rails, 0), rails[..3]);
        assert_eq!(of(&["[2001:db8:1::a:1]:1", "[2001:db8:2::b:2]:2"], u32::MAX), ["[2001:db8:1::a:1]:1"]);
        let handle = handle(&["[fe80::1]:45"]);
        let read = ConnectionHandle::decode(&lengthen(&handle.shorten())).unwrap();
        assert_eq!((read.secret, read.is_rdma, read.key), (handle.secret, false, 0));
    }

    #[test]
    fn a_handle_of_another_plugin_or_release_is_refused_with_advice() {
        assert!(ConnectionHandle::decode(&[7; 64]).unwrap_err().to_string().contains("NCCL_NET=Towline"));
        let mut older = [0; 64];
        older[..8].copy_from_slice(b"TOWLINE\x01");
        assert!(ConnectionHandle::decode(&older).unwrap_err().to_string().contains("same Towline release"));
    }

    proptest! {
        #[test]
        fn damaged_addresses_are_refused_or_are_addresses(bytes in proptest::collection::vec(any::<u8>(), 35)) {
            if let Some(addresses) = read_addresses(&bytes) {
                prop_assert!(!addresses.is_empty() && addresses.len() <= 11);
                // Encoded again they take no more room.
                let mut out = [0; 35];
                put_addresses(&mut out, &addresses);
                prop_assert_eq!(read_addresses(&out).unwrap(), addresses);
            }
        }
    }
}
