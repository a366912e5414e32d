//! Which interface a stream leaves by.
//!
//! If two interfaces are in one subnet, the kernel sends everything over the first. A stream that belongs to the second
//! binds its socket to that interface, if this host's settings keep the interfaces apart ([`route::egress`]). A bound
//! socket also drops everything that arrives on another interface. So it cannot reach a peer whose answers come back by
//! another path (asymmetric routes, a strict `rp_filter` on the peer's host). Therefore a bound socket gets little time
//! to connect, the next attempt is not bound, and if only the unbound one succeeds the process no longer binds for this
//! peer.
//!
//! The accepting side binds nothing: it sends only acknowledgements, and could not undo the binding if these do not
//! arrive.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use super::link::Sock;
use crate::os::interfaces::{self, Rail};
use crate::os::log::NET;
use crate::os::route::{self, Egress};

/// Facts that the process has found out about its interfaces.
#[derive(Debug, Default)]
pub(crate) struct Outlets {
    /// Interfaces, and the peers that cannot be reached from a socket bound to them.
    unbindable: Mutex<BTreeSet<(u32, IpAddr)>>,
    /// Interfaces whose packets leave by another one, and for which this has been logged.
    reported: Mutex<BTreeSet<(u32, u32)>>,
}

fn add<T: Ord>(set: &Mutex<BTreeSet<T>>, one: T) -> bool {
    set.lock().unwrap_or_else(PoisonError::into_inner).insert(one)
}

impl Outlets {
    /// Binds a socket of `rail` to its interface, if only that makes its packets leave there. Returns whether it did.
    pub(crate) fn bind(&self, sock: &Sock, rail: &Rail, to: SocketAddr) -> bool {
        let key = (rail.index, to.ip());
        let is_known = self.unbindable.lock().unwrap_or_else(PoisonError::into_inner).contains(&key);
        !is_known
            && matches!(route::egress(rail.address.ip(), rail.index, to.ip()), Egress::Bind(_))
            && route::bind_to_interface(sock, rail.index).is_ok()
    }

    /// A stream of `rail` is connected. `fell_back`: an attempt with a bound socket had failed, and this one was not
    /// bound.
    pub(crate) fn connected(&self, sock: &Sock, rail: &Rail, to: SocketAddr, fell_back: bool) {
        if fell_back {
            add(&self.unbindable, (rail.index, to.ip()));
        }
        let bound = sock.device().is_ok_and(|device| device.is_some());
        if bound || rail.index == 0 || rail.address.is_ipv4() != to.is_ipv4() {
            return;
        }
        let from = rail.address.ip();
        let by = match route::egress(from, rail.index, to.ip()) {
            Egress::AsRouted => return,
            // `Bind`: the kernel refused to bind the socket, or binding did not help.
            Egress::Strays(by) | Egress::Bind(by) => by,
        };
        let Some(cure) = cure(rail, to.ip()).filter(|_| add(&self.reported, (rail.index, by))) else { return };
        let by = route::name_of(by).unwrap_or_else(|| "another interface".to_owned());
        tracing::warn!(
            target: NET,
            "packets from {from} ({}) to {} leave by {by}: {} does not carry its share; {cure}",
            rail.name, to.ip(), rail.name
        );
    }
}

/// The hint to log. None where the other path is intended. In that case the address belongs to the host and to no
/// subnet (a /32 or /128, often on `lo`). Its packets leave by any interface that leads to the peer.
fn cure(rail: &Rail, to: IpAddr) -> Option<String> {
    let own = rail.address.ip();
    let mask = interfaces::list().unwrap_or_default().into_iter().find(|one| one.address.ip() == own)?.mask?;
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    };
    let is_one = |mask: IpAddr| mask == IpAddr::from([0xff; 4]) || mask == IpAddr::from([0xff; 16]);
    if is_one(mask) {
        return None;
    }
    let is_near = bits(own) & bits(mask) == bits(to) & bits(mask);
    Some(if is_near {
        format!("give each interface a subnet of its own, or run on all hosts: {}", route::KEEP_APART)
    } else {
        "list the interfaces in the same order on all hosts (TOWLINE_RAILS), or give each address routes of its own (ip rule)"
            .to_owned()
    })
}
