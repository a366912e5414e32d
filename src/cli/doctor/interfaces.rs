//! The network interfaces, which of them Towline would use, and why.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};

use crate::os::config::{Config, Family, Rails};
use crate::os::error::Error;
use crate::os::interfaces::{self, Filter, Selection, UNKNOWN_SPEED_MBPS};
use crate::os::nccl_conf::Variables;
use crate::os::route::{self, Egress};
use crate::os::sysfs::Sysfs;
use serde::Serialize;

use super::cure::{export, unset};
use super::{Cause, Finding};

#[derive(Serialize, Default)]
pub(super) struct Facts {
    /// The rule that chose.
    pub(super) rule: String,
    pub(super) list: Vec<Interface>,
}

#[derive(Serialize)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) address: String,
    pub(super) running: bool,
    pub(super) used: bool,
    /// `None` when the system does not know.
    pub(super) speed_mbps: Option<u32>,
    pub(super) mtu: Option<u32>,
    pub(super) driver: Option<String>,
    pub(super) numa_node: Option<u32>,
    pub(super) pci_path: Option<String>,
}

pub(super) fn gather(config: &Config, variables: &Variables, findings: &mut Vec<Finding>) -> Facts {
    let all = match interfaces::list() {
        Ok(all) => all,
        Err(error) => {
            findings.push(list_fails(&error));
            return Facts::default();
        }
    };
    let selection = Selection {
        names: config.socket_ifname.as_deref(),
        family: config.socket_family,
        rendezvous: config.comm_id.as_deref().and_then(interfaces::rendezvous),
    };
    let sysfs = Sysfs::default();
    let (chosen, rule) = match &config.rails {
        Rails::List(names) => {
            let (found, missing) = interfaces::named(&all, names, config.socket_family);
            for name in missing {
                let what = format!("TOWLINE_RAILS names {name}, which has no usable address or does not exist");
                let fix = format!("ip address add ADDRESS dev {name}, or take it out of TOWLINE_RAILS");
                findings.push(Finding::problem(Cause::RailMissing, what, fix));
            }
            (found, interfaces::Why::Rails)
        }
        Rails::All => interfaces::choose_also_down(&all, &selection, |one| sysfs.is_bridge(&one.name)),
        Rails::Single => interfaces::choose(&all, &selection),
    };
    if config.rails != Rails::Single {
        findings.extend(waited_for(&chosen));
    }
    findings.extend(chosen.iter().filter_map(|one| strays(one, &all)));
    let fact = |interface: &interfaces::Interface| {
        let name = interface.kernel_name();
        Interface {
            name: interface.name.clone(),
            address: interface.address.ip().to_string(),
            running: interface.running,
            used: chosen.contains(interface),
            speed_mbps: sysfs.speed_mbps(name),
            mtu: sysfs.mtu(name),
            driver: sysfs.driver(name),
            numa_node: sysfs.numa_node(name),
            pci_path: sysfs.pci_path(name).map(|path| path.display().to_string()),
        }
    };
    let facts = Facts { rule: rule.to_string(), list: all.iter().map(fact).collect() };
    let rails_are_named = matches!(config.rails, Rails::List(_));
    if chosen.is_empty() && !rails_are_named {
        let has_family = |one: &&interfaces::Interface| match config.socket_family {
            Some(Family::V4) => one.address.is_ipv4(),
            Some(Family::V6) => one.address.is_ipv6(),
            None => true,
        };
        let without_family: Vec<_> = all.iter().filter(|one| !has_family(one)).cloned().collect();
        findings.push(nothing(config.socket_ifname.as_deref(), &all, &without_family, &links(), variables));
    }
    judge(&facts, config.socket_ifname.as_deref(), config.speed.is_some(), findings);
    facts
}

/// The list could not be read, mostly for lack of a descriptor.
fn list_fails(error: &Error) -> Finding {
    Finding::problem(Cause::InterfaceListFails, error.what(), "ulimit -n 65536")
}

/// A finding when rails are down.
fn waited_for(rails: &[interfaces::Interface]) -> Vec<Finding> {
    let fix = |one: &interfaces::Interface| format!("ip link set {} up  # and check the cable", one.kernel_name());
    let (running, down): (Vec<_>, Vec<_>) = rails.iter().partition(|one| one.running);
    match down.first() {
        Some(first) if running.is_empty() => {
            vec![Finding::problem(Cause::RailDown, "every interface of the device is down", fix(first))]
        }
        _ => down
            .iter()
            .map(|one| {
                let what = format!("rail {} is down; it is used when it comes back", one.name);
                Finding::advice(Cause::RailDown, what, fix(one))
            })
            .collect(),
    }
}

/// A link of this network namespace, with or without an address.
#[derive(Debug, Clone)]
struct Link {
    name: String,
    /// Switched on.
    up: bool,
}

/// Every link. One that has no address appears nowhere else.
fn links() -> Vec<Link> {
    let text = fs::read_to_string("/proc/net/dev").unwrap_or_default();
    let names = text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()));
    let is_up = |name: &str| {
        let flags = fs::read_to_string(format!("/sys/class/net/{name}/flags")).unwrap_or_default();
        let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16);
        flags.map_or(true, |flags| flags & libc::IFF_UP as u32 != 0)
    };
    names.map(|name| Link { up: is_up(&name), name }).collect()
}

/// Why no interface is chosen.
fn nothing(
    asked: Option<&str>,
    all: &[interfaces::Interface],
    without_family: &[interfaces::Interface],
    links: &[Link],
    variables: &Variables,
) -> Finding {
    let Some(names) = asked.filter(|names| names.len() > 1) else {
        let down = links.iter().find(|link| !link.up && link.name != "lo").or(links.first());
        let fix = format!("ip link set {} up", down.map_or("INTERFACE", |link| &link.name));
        return Finding::problem(Cause::NoInterface, "no interface is running and has an address", fix);
    };
    let filter = Filter::new(names);
    let is_listed = |name: &str| filter.passes(name) && (name != "lo" || names.contains("lo"));
    if let Some(one) = without_family.iter().find(|one| one.running && is_listed(&one.name)) {
        let what = format!("{} has no address of the family that NCCL_SOCKET_FAMILY asks for", one.name);
        return Finding::problem(Cause::InterfaceWrongFamily, what, unset(variables, "NCCL_SOCKET_FAMILY"));
    }
    if let Some(link) = links.iter().find(|link| is_listed(&link.name)) {
        let name = &link.name;
        let entry = all.iter().find(|one| one.kernel_name() == name);
        if !link.up {
            let what = format!("{name} is switched off, and NCCL_SOCKET_IFNAME={names} leaves no other interface");
            return Finding::problem(Cause::InterfaceDown, what, format!("ip link set {name} up"));
        }
        if entry.is_none() {
            let what = format!("{name} has no address, and NCCL_SOCKET_IFNAME={names} leaves no other interface");
            return Finding::problem(
                Cause::InterfaceNoAddress,
                what,
                format!("ip address add ADDRESS/PREFIX dev {name}"),
            );
        }
        let what = format!("{name} has no carrier, and NCCL_SOCKET_IFNAME={names} leaves no other interface");
        return Finding::problem(Cause::InterfaceNoCarrier, what, format!("check the cable of {name} and the switch"));
    }
    let known: Vec<&str> = links.iter().map(|link| link.name.as_str()).collect();
    let what = format!(
        "NCCL_SOCKET_IFNAME=\"{}\" names no interface of this host: {}",
        names.escape_default(),
        known.join(", ")
    );
    let better = corrections(names, all).into_iter().find(|better| {
        let selection = Selection { names: Some(better), ..Selection::default() };
        !interfaces::choose(all, &selection).0.is_empty()
    });
    let fix = better.map_or_else(|| unset(variables, "NCCL_SOCKET_IFNAME"), |it| export("NCCL_SOCKET_IFNAME", it));
    Finding::problem(Cause::InterfaceMissing, what, fix)
}

/// The interfaces that a list without a match may have meant, the likeliest first.
fn corrections(names: &str, all: &[interfaces::Interface]) -> Vec<String> {
    let is_noise = |c: char| c.is_whitespace() || c == '"' || c == '\'';
    let entries = names.split([',', ';', ' ']).map(|entry| entry.trim_matches(is_noise)).filter(|it| !it.is_empty());
    let bare: Vec<&str> = entries.collect();
    let known = |entry: &str| {
        let word = entry.trim_start_matches('=');
        let by_name =
            |one: &&interfaces::Interface| one.name.eq_ignore_ascii_case(word) || one.address.ip().to_string() == word;
        all.iter().find(by_name).map(|one| one.name.clone())
    };
    let first = bare.first().map(|entry| entry.trim_start_matches(['=', '^'])).unwrap_or_default();
    let letters = first.trim_end_matches(|c: char| c.is_ascii_digit());
    let mut all = vec![bare.join(","), bare.iter().filter_map(|entry| known(entry)).collect::<Vec<_>>().join(",")];
    if !letters.is_empty() {
        all.push(letters.to_owned());
    }
    all.retain(|text| text.len() > 1);
    all
}

/// The finding about an interface whose packets leave by another one in the same subnet.
fn strays(one: &interfaces::Interface, all: &[interfaces::Interface]) -> Option<Finding> {
    let to = neighbour(one, all)?;
    let Egress::Strays(by) = route::egress(one.address.ip(), one.index, to.into()) else { return None };
    let by = route::name_of(by)?;
    let what = format!(
        "packets from {} ({}) to its own subnet leave by {by}: {} does not carry its share",
        one.address.ip(),
        one.name,
        one.name
    );
    Some(Finding::advice(Cause::InterfaceStrays, what, route::KEEP_APART))
}

/// An address in the IPv4 subnet of an interface that this host does not have.
fn neighbour(one: &interfaces::Interface, all: &[interfaces::Interface]) -> Option<Ipv4Addr> {
    let (IpAddr::V4(own), IpAddr::V4(mask)) = (one.address.ip(), one.mask?) else { return None };
    let (first, last) = (own.to_bits() & mask.to_bits(), own.to_bits() | !mask.to_bits());
    if own.is_loopback() {
        return None;
    }
    (first.saturating_add(1)..last)
        .map(Ipv4Addr::from_bits)
        .find(|it| all.iter().all(|other| other.address.ip() != *it))
}

fn judge(facts: &Facts, asked: Option<&str>, speed_is_told: bool, findings: &mut Vec<Finding>) {
    let used: Vec<&Interface> = facts.list.iter().filter(|interface| interface.used).collect();
    let is_loopback = |interface: &&&Interface| interface.address.starts_with("127.");
    let loopbacks = used.iter().filter(is_loopback).count();
    // A list of names to leave out replaces NCCL's own, which has the loopback in it.
    if let Some(names) = asked.filter(|names| names.starts_with('^') && loopbacks > 0) {
        let what = format!("NCCL_SOCKET_IFNAME={names} lets lo in: other hosts cannot be reached over it");
        let fix = export("NCCL_SOCKET_IFNAME", format!("{names},lo"));
        findings.push(Finding::problem(Cause::LoopbackChosen, what, fix));
    } else if !used.is_empty() && loopbacks == used.len() {
        let what = "only the loopback interface is used: other hosts cannot be reached";
        let fix = match asked {
            Some(names) if names.len() > 1 => "unset NCCL_SOCKET_IFNAME".to_owned(),
            _ => "ip link set INTERFACE up".to_owned(),
        };
        findings.push(Finding::advice(Cause::LoopbackOnly, what, fix));
    }
    for interface in used.iter().filter(|one| one.running && one.speed_mbps.is_none() && !speed_is_told) {
        if !interface.address.starts_with("127.") {
            let what = format!(
                "the system does not know the speed of {}: {} Gb/s is assumed, for four channels",
                interface.name,
                UNKNOWN_SPEED_MBPS / 1000
            );
            findings.push(Finding::advice(Cause::SpeedUnknown, what, "export TOWLINE_SPEED=MBITS, if you know it"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(address: &str, used: bool, speed_mbps: Option<u32>) -> Interface {
        let (name, address) = ("eth0".to_owned(), address.to_owned());
        let (mtu, driver, numa_node, pci_path) = (None, None, None, None);
        Interface { name, address, running: true, used, speed_mbps, mtu, driver, numa_node, pci_path }
    }

    fn judged(list: Vec<Interface>, asked: Option<&str>) -> Vec<String> {
        let mut findings = Vec::new();
        judge(&Facts { rule: String::new(), list }, asked, false, &mut findings);
        findings.into_iter().map(|finding| finding.fix).collect()
    }

    #[test]
    fn a_list_that_cannot_be_read_has_its_cure() {
        let finding = list_fails(&Error::system("listing", &std::io::Error::from_raw_os_error(libc::EMFILE)));
        assert_eq!((finding.cause, finding.fix.as_str()), (Cause::InterfaceListFails, "ulimit -n 65536"));
    }

    #[test]
    fn rails_that_are_down_are_told() {
        let rail = |name: &str, running| interfaces::Interface {
            name: name.into(),
            index: 1,
            address: ([10, 0, 0, 1], 0).into(),
            mask: None,
            running,
        };
        let told =
            |rails: &[interfaces::Interface]| waited_for(rails).into_iter().map(|it| it.what).collect::<Vec<_>>();
        assert_eq!(told(&[rail("eth0", true)]), [""; 0]);
        assert_eq!(
            told(&[rail("eth0", true), rail("eth1", false)]),
            ["rail eth1 is down; it is used when it comes back"]
        );
        assert_eq!(told(&[rail("eth0", false), rail("eth1", false)]), ["every interface of the device is down"]);
    }

    #[test]
    fn a_neighbour_is_an_address_of_the_subnet_that_this_host_does_not_have() {
        let one = |address: [u8; 4], mask: [u8; 4]| interfaces::Interface {
            name: "eth0".into(),
            index: 1,
            address: (address, 0).into(),
            mask: Some(mask.into()),
            running: true,
        };
        let near = |all: &[interfaces::Interface]| neighbour(&all[0], all).map(|it| it.octets());
        assert_eq!(near(&[one([10, 9, 1, 7], [255, 255, 0, 0])]), Some([10, 9, 0, 1]));
        let both = [one([10, 9, 1, 1], [255, 255, 255, 0]), one([10, 9, 1, 2], [255, 255, 255, 0])];
        assert_eq!(near(&both), Some([10, 9, 1, 3]));
        for mask in [[255; 4], [255, 255, 255, 254], [255, 255, 255, 252]] {
            let both = [one([10, 9, 1, 1], mask), one([10, 9, 1, 2], mask)];
            assert_eq!(near(&both), None, "{mask:?}");
        }
        assert_eq!(near(&[one([127, 0, 0, 1], [255, 0, 0, 0])]), None);
    }

    #[test]
    fn each_way_to_have_no_network_has_its_cure() {
        assert_eq!(judged(vec![interface("10.0.0.1", true, Some(1000))], None), [""; 0]);
        assert_eq!(judged(vec![interface("127.0.0.1", true, None)], None), ["ip link set INTERFACE up"]);
        assert_eq!(judged(vec![interface("127.0.0.1", true, None)], Some("lo")), ["unset NCCL_SOCKET_IFNAME"]);
        assert!(judged(vec![interface("10.0.0.1", true, None)], None)[0].contains("TOWLINE_SPEED"));
        let left = judged(vec![interface("127.0.0.1", true, None)], Some("^docker0"));
        assert_eq!(left, ["export NCCL_SOCKET_IFNAME=^docker0,lo"]);
    }

    #[test]
    fn a_list_that_names_nothing_is_corrected_by_what_the_host_has() {
        let one = |name: &str, last, running| interfaces::Interface {
            name: name.into(),
            index: 1,
            address: ([10, 0, 0, last], 0).into(),
            mask: None,
            running,
        };
        let all = [one("eth0", 1, true), one("eth1", 2, false)];
        let links = ["eth0", "eth1", "eth2"].map(|name| Link { name: name.into(), up: name != "eth1" });
        let found = |names: &str| nothing(Some(names), &all, &[], &links, &Variables::default());
        for written in ["\"eth0\"", "eth0 ", " eth0", "==eth0", "Eth0", "10.0.0.1"] {
            let fix = found(written).fix;
            assert_eq!(fix, "export NCCL_SOCKET_IFNAME=eth0", "{written}");
        }
        assert_eq!(found("Eth1;Eth0").fix, "export NCCL_SOCKET_IFNAME=eth1,eth0");
        assert_eq!(found("eth7").fix, "export NCCL_SOCKET_IFNAME=eth");
        assert_eq!(found("ib0").fix, "unset NCCL_SOCKET_IFNAME");
        assert_eq!(found("eth1").cause, Cause::InterfaceDown);
        assert_eq!(found("eth2").cause, Cause::InterfaceNoAddress);
        assert_eq!(nothing(None, &[], &[], &links, &Variables::default()).fix, "ip link set eth1 up");
    }
}
