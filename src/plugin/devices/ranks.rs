//! The order of interfaces, and which of them have a wire of their own.
//!
//! NCCL uses the net devices with the highest bandwidth to a GPU and ignores the others (`graph/topo.cc`,
//! ncclTopoGetLocal). So the speed that is reported for an interface of unknown speed decides whether it displaces a
//! real one. An overlay, the USB link to a server's management controller, or the loopback may have an unknown speed.

use std::net::IpAddr;

use super::Rail;
use crate::os::interfaces::{Interface, UNKNOWN_SPEED_MBPS};
use crate::os::sysfs::Sysfs;

/// Speeds for rails of unknown speed. They are chosen so that none is preferred to a rail of known speed, and no
/// interface that reaches no other host is preferred to one that may.
pub(super) fn settle_unknown_speeds(rails: &mut [Rail], is_overlay: impl Fn(&Rail) -> bool) {
    let is_poor = |rail: &Rail| reaches_few(rail.address.ip()) || is_overlay(rail);
    let known = rails.iter().filter(|rail| rail.running && rail.speed_is_known && !is_poor(rail));
    let known = known.map(|rail| rail.speed_mbps).min();
    let has_plain = rails.iter().any(|rail| rail.running && !is_poor(rail));
    for rail in rails.iter_mut().filter(|rail| rail.running) {
        rail.speed_mbps = match known {
            Some(slowest) if !rail.speed_is_known => (slowest / 2).max(1),
            // The speed of the card below, which is among these.
            Some(slowest) if is_poor(rail) => rail.speed_mbps.min((slowest / 2).max(1)),
            None if has_plain && is_poor(rail) => UNKNOWN_SPEED_MBPS / 2,
            _ => rail.speed_mbps,
        };
    }
}

/// Whether an address works only within a host or on one link: loopback, or IPv4 link-local, which the USB links to
/// management controllers have, the same on every host.
fn reaches_few(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_loopback(),
    }
}

/// Of the interfaces chosen for one device, those with a wire of their own, and the reasons for skipping the others.
/// All of them when no running one has a wire.
pub(super) fn wires(chosen: Vec<Interface>, sysfs: &Sysfs) -> (Vec<Interface>, Vec<String>) {
    let reason = |one: &Interface| {
        let name = &one.name;
        let below = chosen.iter().find(|other| sysfs.stands_on(name, &other.name));
        if let Some(below) = below {
            Some(format!("{name} is no rail: it shares the wire of {}", below.name))
        } else if sysfs.is_overlay(name) {
            Some(format!("{name} is no rail: it is an overlay, which leaves by another interface"))
        } else if reaches_few(one.address.ip()) {
            Some(format!("{name} is no rail: {} reaches no other host", one.address.ip()))
        } else {
            None
        }
    };
    let reasons: Vec<Option<String>> = chosen.iter().map(reason).collect();
    if !chosen.iter().zip(&reasons).any(|(one, reason)| one.running && reason.is_none()) {
        return (chosen, Vec::new());
    }
    let kept = chosen.iter().zip(&reasons).filter(|(_, reason)| reason.is_none()).map(|(one, _)| one.clone()).collect();
    (kept, reasons.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(name: &str, address: &str, known: Option<u32>) -> Rail {
        let address = std::net::SocketAddr::new(address.parse().expect("an address"), 0);
        let speed_mbps = known.unwrap_or(UNKNOWN_SPEED_MBPS);
        Rail { name: name.into(), index: 1, address, speed_mbps, speed_is_known: known.is_some(), running: true }
    }

    fn settled(rails: &[Rail]) -> Vec<u32> {
        let mut rails = rails.to_vec();
        settle_unknown_speeds(&mut rails, |rail| rail.name.starts_with("flannel") || rail.name.starts_with("wg"));
        rails.into_iter().map(|rail| rail.speed_mbps).collect()
    }

    /// An overlay network and the USB link to the management controller beside a 10 Gb/s card: NCCL preferred the
    /// former.
    #[test]
    fn an_unknown_speed_never_comes_before_a_known_one() {
        let card = rail("eth0", "10.9.1.1", Some(10_000));
        let (flannel, bmc) = (rail("flannel.1", "10.244.3.0", None), rail("enxb03a", "169.254.3.1", None));
        assert_eq!(settled(&[card.clone(), flannel.clone(), bmc.clone()]), [10_000, 5_000, 5_000]);
        let told = rail("flannel.1", "10.244.3.0", Some(10_000));
        assert_eq!(settled(&[card, told]), [10_000, 5_000], "nor an overlay that reports its card's speed");
        let unknown = rail("eth0", "10.9.1.1", None);
        let half = UNKNOWN_SPEED_MBPS / 2;
        assert_eq!(settled(&[unknown, flannel.clone(), bmc]), [UNKNOWN_SPEED_MBPS, half, half]);
        assert_eq!(settled(&[flannel]), [UNKNOWN_SPEED_MBPS], "alone it is what there is");
    }

    /// `NCCL_SOCKET_IFNAME=^docker0` also chooses the loopback.
    #[test]
    fn the_loopback_never_wins_over_an_interface_that_reaches_other_hosts() {
        let lo = rail("lo", "127.0.0.1", None);
        assert_eq!(settled(&[lo.clone(), rail("eth0", "10.0.0.1", Some(1000))]), [500, 1000]);
        let both = settled(&[lo.clone(), rail("eth0", "10.0.0.1", None)]);
        assert!(both[0] < both[1], "{both:?}");
        assert_eq!(settled(&[lo]), [UNKNOWN_SPEED_MBPS]);
    }
}
