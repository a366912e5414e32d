//! The network interfaces, which of them Towline would use, and why.

use serde::Serialize;
use towline::os::config::{Config, Rails};
use towline::os::interfaces::{self, Wish};
use towline::os::sysfs::Sysfs;
use towline::plugin::devices::UNKNOWN_SPEED_MBPS;

use super::Finding;

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

pub(super) fn look(config: &Config, findings: &mut Vec<Finding>) -> Facts {
    let all = match interfaces::list() {
        Ok(all) => all,
        Err(error) => {
            findings.push(Finding::problem(error.to_string(), "ulimit -n 65536"));
            return Facts::default();
        }
    };
    let wish = Wish {
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
                findings.push(Finding::problem(
                    what,
                    format!("ip address add ADDRESS dev {name}, or take it out of TOWLINE_RAILS"),
                ));
            }
            (found, interfaces::Why::Rails)
        }
        Rails::All => interfaces::choose_also_down(&all, &wish, |one| sysfs.is_bridge(&one.name)),
        Rails::Single => interfaces::choose(&all, &wish),
    };
    if config.rails != Rails::Single {
        findings.extend(waited_for(&chosen));
    }
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
    judge(&facts, config.socket_ifname.as_deref(), config.speed.is_some(), findings);
    facts
}

/// The rails that are down, or that there is nothing else.
fn waited_for(rails: &[interfaces::Interface]) -> Vec<Finding> {
    let mend = |one: &interfaces::Interface| format!("ip link set {} up; check the cable", one.kernel_name());
    let (running, down): (Vec<_>, Vec<_>) = rails.iter().partition(|one| one.running);
    match down.first() {
        Some(first) if running.is_empty() => {
            vec![Finding::problem("every interface of the device is down", mend(first))]
        }
        _ => down
            .iter()
            .map(|one| Finding::advice(format!("rail {} is down; it is used when it comes back", one.name), mend(one)))
            .collect(),
    }
}

fn judge(facts: &Facts, asked: Option<&str>, speed_is_told: bool, findings: &mut Vec<Finding>) {
    let used: Vec<&Interface> = facts.list.iter().filter(|interface| interface.used).collect();
    if used.is_empty() {
        findings.push(match asked {
            Some(names) => Finding::problem(
                format!("no running interface with an address matches NCCL_SOCKET_IFNAME={names}"),
                "unset NCCL_SOCKET_IFNAME",
            ),
            None => Finding::problem("no interface is running and has an address", "ip link set INTERFACE up"),
        });
    }
    if !used.is_empty() && used.iter().all(|interface| interface.address.starts_with("127.")) {
        let what = "only the loopback interface is used: other hosts cannot be reached";
        findings.push(Finding::advice(what, "ip link set INTERFACE up"));
    }
    for interface in used.iter().filter(|one| one.running && one.speed_mbps.is_none() && !speed_is_told) {
        if !interface.address.starts_with("127.") {
            let what = format!(
                "the system does not know the speed of {}: {} Gb/s is assumed, for four channels",
                interface.name,
                UNKNOWN_SPEED_MBPS / 1000
            );
            findings.push(Finding::advice(what, "export TOWLINE_SPEED=MBITS, if you know it"));
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
        findings.into_iter().map(|finding| finding.mend).collect()
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
    fn each_way_to_have_no_network_has_its_cure() {
        assert_eq!(judged(vec![interface("10.0.0.1", true, Some(1000))], None), [""; 0]);
        assert_eq!(judged(vec![interface("10.0.0.1", false, None)], Some("ib0")), ["unset NCCL_SOCKET_IFNAME"]);
        assert_eq!(judged(vec![], None), ["ip link set INTERFACE up"]);
        assert_eq!(judged(vec![interface("127.0.0.1", true, None)], None), ["ip link set INTERFACE up"]);
        assert!(judged(vec![interface("10.0.0.1", true, None)], None)[0].contains("TOWLINE_SPEED"));
    }
}
