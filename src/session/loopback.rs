//! For tests of one end of a connection: real sockets without a peer behind them.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::acceptor;
use super::handshake::{FEATURE_RECOVERY, Secret};
use super::link::{Link, Sock};
use super::net::Net;
use super::peer::Peer;
use crate::os::config::Config;
use crate::os::fd::Registered;

/// A backend of its own.
pub(crate) fn net(config: Config) -> Arc<Net> {
    acceptor::net(config, None)
}

/// A connection with recovery, whose peer listens at `remote`.
pub(crate) fn link(remote: &TcpListener) -> Link {
    Link {
        connection: 7,
        key: Secret::from_bytes([7; 16]),
        features: FEATURE_RECOVERY,
        remote: vec![remote.local_addr().expect("it listens")],
        local: Arc::from([]),
        traffic_class: None,
        round_trip: std::time::Duration::ZERO,
    }
}

/// A listener that never answers.
pub(crate) fn deaf() -> TcpListener {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a port on the loopback interface")
}

/// Two connected sockets: a stream's, and one that stands for its peer.
pub(crate) fn sockets() -> (Sock, TcpStream) {
    let listener = deaf();
    let address = listener.local_addr().expect("it listens");
    let ours = Registered::open(|| TcpStream::connect(address).map(socket2::Socket::from)).expect("a connection");
    ours.set_nonblocking(true).expect("it can be set");
    ours.set_tcp_nodelay(true).expect("it can be set");
    (ours, listener.accept().expect("it is there").0)
}

/// The peer's process.
pub(crate) fn peer() -> Peer {
    Peer { label: "peer".to_string(), address: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)) }
}

/// Waits until something holds.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
