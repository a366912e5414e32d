//! The probable cause when a first connection cannot be made, as far as this side can tell from the addresses.

use std::net::IpAddr;

use super::{REFUSED_TEXT, TURNED_AWAY_TEXT, Target, UNANSWERED_TEXT};
use crate::os::config::{Config, Family};
use crate::os::error::{Cause, Error};
use crate::os::interfaces::Rail;
use crate::os::route::{self, Egress};
use crate::session::link::NO_PORT_HINT;

/// The failure with the peer, and with a better hint where the addresses give one.
pub(super) fn explain(error: Error, target: &Target, config: &Config) -> Error {
    let peer = target.addresses[0];
    let error = error.with_peer(peer);
    let mine: Vec<IpAddr> = target.rails.iter().map(|rail| rail.address.ip()).collect();
    let names = target.rails.iter().map(|rail| rail.name.as_str()).collect::<Vec<_>>().join("+");
    let family = other_family(peer.ip(), &mine, &names, config.socket_family);
    // A host without any address of the peer's family has no local address for the connection. The kernel returns the
    // same code as for a host without a free port.
    if error.hint() == Some(NO_PORT_HINT)
        && let Some(hint) = family
    {
        return error.with_hint(hint);
    }
    // A lack of descriptors or memory, which has nothing to do with addresses.
    if error.cause() == Cause::System && error.has_hint() {
        return error;
    }
    let says_nothing = [REFUSED_TEXT, TURNED_AWAY_TEXT, UNANSWERED_TEXT, "connecting failed"];
    if !says_nothing.iter().any(|text| error.what().starts_with(text)) {
        return error;
    }
    let hint = family.or_else(|| of_this_host(peer.ip(), route::is_local(peer.ip())));
    match hint.or_else(|| target.rails.first().and_then(|rail| filtered(peer.ip(), rail))) {
        Some(hint) => error.with_hint(hint),
        None => error,
    }
}

/// The failure when the other side accepted the connection and then sent no Towline message.
pub(super) fn not_towline(what: &str) -> Error {
    Error::new(Cause::Remote, what).with_hint(
        "its process may be stopped or about to end, or something else accepts connections in its place: for a service mesh's \
         sidecar proxy, exclude the job's ports or addresses from it",
    )
}

fn other_family(peer: IpAddr, mine: &[IpAddr], names: &str, wanted: Option<Family>) -> Option<String> {
    let is_other = !mine.is_empty() && mine.iter().all(|own| own.is_ipv4() != peer.is_ipv4());
    let family = |is_ipv4: bool| if is_ipv4 { "IPv4" } else { "IPv6" };
    let wanted = match wanted {
        None => "unset",
        Some(Family::V4) => "AF_INET",
        Some(Family::V6) => "AF_INET6",
    };
    is_other.then(|| {
        format!(
            "the peer has an {} address and {names} of this host an {} one (NCCL_SOCKET_FAMILY is {wanted} here): set \
             NCCL_SOCKET_FAMILY on all hosts to the family that all have, AF_INET or AF_INET6",
            family(peer.is_ipv4()),
            family(!peer.is_ipv4())
        )
    })
}

fn of_this_host(peer: IpAddr, is_local: bool) -> Option<String> {
    let cure = "choose an interface with an address of its own on each host (NCCL_SOCKET_IFNAME)";
    if peer.is_loopback() {
        return Some(format!(
            "{peer} is a loopback address, which leads to this host only: if the peer runs on another host, {cure}; else its \
             process may have ended"
        ));
    }
    if is_local {
        return Some(format!(
            "{peer} is an address of this host itself: if the peer runs on another host, both have that address (as \
             containers behind NAT do): {cure}; else its process may have ended"
        ));
    }
    matches!(peer, IpAddr::V4(v4) if v4.is_link_local())
        .then(|| format!("{peer} is good on one link only, such as the one to a management controller: {cure}"))
}

/// This host's `rp_filter` drops answers on an interface that does not lead to the peer, usually one of two in one
/// subnet.
fn filtered(peer: IpAddr, rail: &Rail) -> Option<String> {
    let Egress::Strays(by) = route::egress(rail.address.ip(), rail.index, peer) else { return None };
    let by = route::name_of(by).filter(|_| peer.is_ipv4() && route::is_strict(rail.index))?;
    let name = &rail.name;
    Some(format!(
        "{peer} is reached by {by}, and the kernel drops what comes from there by {name} (rp_filter is 1): choose {by} \
         (NCCL_SOCKET_IFNAME), or run on all hosts: {}",
        route::KEEP_APART
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn an_address_that_cannot_be_the_peers_is_told() {
        let told = |address: &str, is_local| of_this_host(ip(address), is_local).unwrap_or_default();
        assert!(told("127.0.0.1", true).contains("loopback address"));
        assert!(told("172.17.0.2", true).contains("172.17.0.2 is an address of this host itself"));
        assert!(told("169.254.3.1", false).contains("one link only"));
        assert!(["127.0.0.1", "172.17.0.2"].iter().all(|it| told(it, true).contains("NCCL_SOCKET_IFNAME")));
        assert_eq!(told("10.0.0.1", false), "");
    }

    #[test]
    fn families_that_differ_are_told_with_the_variable_and_its_value() {
        let told = |mine: &[&str], wanted| {
            let mine: Vec<IpAddr> = mine.iter().map(|one| ip(one)).collect();
            other_family(ip("10.9.1.1"), &mine, "eth0", wanted).unwrap_or_default()
        };
        let text = told(&["fd00:9::2"], Some(Family::V6));
        let parts = ["has an IPv4 address", "eth0 of this host an IPv6 one", "NCCL_SOCKET_FAMILY is AF_INET6 here"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        assert!(told(&["fd00:9::2"], None).contains("is unset here"));
        assert_eq!(told(&["10.9.1.2", "fd00:9::2"], None), "", "one rail can reach it");
    }
}
