//! The connections of this process, for `towline why` and `towline top`.

use super::comm::Comm;
use super::process::process;
use crate::engine::counters::Counters;
use crate::session::link::Link;
use crate::session::peer::Peer;
use std::sync::atomic::Ordering;

/// A connection and what it has carried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// Its number, which with the direction tells it from others.
    pub number: u64,
    /// Whether this side sends.
    pub send: bool,
    /// The process at the other end, `host:process`.
    pub peer: String,
    /// The address at the other end.
    pub address: String,
    /// This side's interfaces or RDMA devices.
    pub interfaces: Vec<String>,
    /// Bytes of messages that it has carried.
    pub bytes: u64,
}

/// All connections of this process. It looks at each place of the table, and waits for a thread that closes one: not for the data path.
pub fn connections() -> Vec<Connection> {
    let list = std::cell::RefCell::new(Vec::new());
    process().comms.any(|comm| {
        list.borrow_mut().extend(of(comm));
        false
    });
    list.into_inner()
}

fn of(comm: &Comm) -> Option<Connection> {
    let rails = |link: &Link| link.local.iter().map(|rail| rail.name.clone()).collect();
    match comm {
        Comm::Send(conn) => Some(connection(true, conn.link(), conn.peer(), conn.counters(), rails(conn.link()))),
        Comm::Recv(conn) => Some(connection(false, conn.link(), conn.peer(), conn.counters(), rails(conn.link()))),
        #[cfg(feature = "rdma")]
        Comm::RdmaSend(conn) => Some(over_rdma(true, conn.base())),
        #[cfg(feature = "rdma")]
        Comm::RdmaRecv(conn) => Some(over_rdma(false, conn.base())),
        _ => None,
    }
}

#[cfg(feature = "rdma")]
fn over_rdma(send: bool, base: &crate::rdma::base::Base) -> Connection {
    let devices = base.adapters.iter().map(|adapter| adapter.name()).collect();
    connection(send, &base.link, &base.peer, &base.counters, devices)
}

fn connection(send: bool, link: &Link, peer: &Peer, counters: &Counters, interfaces: Vec<String>) -> Connection {
    Connection {
        number: link.connection,
        send,
        peer: peer.label.clone(),
        address: peer.address.to_string(),
        interfaces,
        bytes: counters.bytes.load(Ordering::Relaxed),
    }
}
