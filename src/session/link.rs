//! The data of a connection that its sockets need, and the sockets' options.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::handshake::Secret;
use super::liveness::{self, Probes};
use crate::engine::events::{Carrier, Path};
use crate::os::config::Config;
use crate::os::fd::Registered;
use crate::os::interfaces::Rail;

/// A socket in the fork registry.
pub(crate) type Sock = Registered<Socket>;

/// The data that further streams of a connection need.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    /// The connection's number, given by the listening side.
    pub connection: u64,
    /// The secret that further streams prove.
    pub key: Secret,
    /// Feature bits in use.
    pub features: u32,
    /// The addresses where the other side's process listens, one per rail: for further streams, and for calls.
    pub remote: Vec<SocketAddr>,
    /// This side's rails.
    pub local: Arc<[Rail]>,
    /// The whole ToS or traffic-class byte of the packets.
    pub traffic_class: Option<u8>,
    /// The round trip of the path when the connection was made.
    pub round_trip: Duration,
}

impl Link {
    /// How many pairs of rails there are to try.
    pub(crate) fn pairs(&self) -> usize {
        self.local.len().max(self.remote.len()).max(1)
    }

    /// Which of the pairs of rails a socket connects.
    pub(crate) fn pair_of(&self, sock: &Sock) -> Option<usize> {
        let ip = |address: io::Result<socket2::SockAddr>| Some(address.ok()?.as_socket()?.ip().to_canonical());
        let (here, there) = (ip(sock.local_addr()), ip(sock.peer_addr()));
        let local =
            |pair: usize| self.local.get(pair % self.local.len().max(1)).map(|rail| rail.address.ip().to_canonical());
        let remote = |pair: usize| self.remote.get(pair % self.remote.len().max(1)).map(|at| at.ip().to_canonical());
        // With one rail the system chooses the address to connect from.
        (0..self.pairs()).find(|pair| remote(*pair) == there && (self.local.len() < 2 || local(*pair) == here))
    }
}

/// The hint for a host whose ports are all in use.
pub(crate) const NO_PORT_HINT: &str = "no local port is free: widen net.ipv4.ip_local_port_range";

/// A socket of the right family that never blocks.
///
/// # Errors
/// When the system has none.
pub(crate) fn new_socket(address: SocketAddr) -> io::Result<Sock> {
    Registered::open(|| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    })
}

/// Where a stream's socket leads, for a profiler.
pub(crate) fn path_of(sock: &Sock, link: &Link) -> Path {
    let local =
        sock.local_addr().ok().and_then(|address| address.as_socket()).map(|address| address.ip().to_canonical());
    let rail = link.local.iter().position(|rail| Some(rail.address.ip().to_canonical()) == local).unwrap_or(0);
    let peer = sock.peer_addr().ok().and_then(|address| address.as_socket());
    Path { carrier: Carrier::Socket { fd: sock.as_raw_fd() }, rail: rail as u16, peer }
}

/// Sets the options of every data socket, on the sending or the receiving side. None is required: if the kernel refuses
/// one, the socket still carries the data.
pub(crate) fn tune(sock: &Sock, config: &Config, traffic_class: Option<u8>, sending: bool) {
    let socket = SockRef::from(&**sock);
    let _ = socket.set_tcp_nodelay(true);
    // The kernel's own probes detect a vanished host on an idle connection, and keep the flow in a firewall's table.
    // The peer's kernel answers them even while the peer's process is stopped.
    Probes::within(config.peer_timeout, sending).set(sock);
    liveness::probe_often(sock, config.peer_timeout);
    liveness::repeat_soon(sock);
    if let Some(class) = traffic_class {
        let v6 = socket.local_addr().ok().and_then(|address| address.as_socket()).is_some_and(|a| a.is_ipv6());
        let set = if v6 { socket.set_tclass_v6(u32::from(class)) } else { socket.set_tos_v4(u32::from(class)) };
        if let Err(error) = set
            && crate::os::log::once_per("traffic class").is_some()
        {
            tracing::warn!("the traffic class {class} could not be set on a socket: {error}");
        }
    }
    if let Some(name) = &config.tcp_congestion
        && let Err(error) = socket.set_tcp_congestion(name.as_bytes())
        && crate::os::log::once_per("congestion control").is_some()
    {
        tracing::warn!(
            "TOWLINE_TCP_CONGESTION={name} could not be set: {error}; look at net.ipv4.tcp_available_congestion_control"
        );
    }
}
