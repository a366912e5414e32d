//! Devices on a host made for it: a network namespace with links of its own. Needs what `support::netns` says.
//!
//! The test runs itself again inside the namespace, because `/sys` must be the namespace's too.

use std::process::Command;

use crate::support::netns::{self, Namespace};
use towline::os::config::Config;
use towline::os::interfaces::{UNKNOWN_SPEED_MBPS, Why};
use towline::plugin::devices::{Discovery, Plan, discover};

/// Set for the run inside.
const INSIDE: &str = "TEST_INSIDE_NAMESPACE";

fn ip(arguments: &[&str]) {
    let done = Command::new("ip").args(arguments).status().expect("ip runs");
    assert!(done.success(), "ip {}", arguments.join(" "));
}

fn found(pairs: &[(&str, &str)]) -> Discovery {
    discover(&Config::from_pairs(pairs.iter().copied()).0).expect("devices")
}

fn has_ipv6(name: &str) -> bool {
    let all = towline::os::interfaces::list().expect("a list");
    all.iter().any(|one| one.name == name && one.address.is_ipv6() && !one.running)
}

fn names(found: &Discovery) -> Vec<String> {
    found.plans.iter().map(Plan::name).collect()
}

/// The kernel reports a carrier, and finishes checking an IPv6 address for duplicates, a moment later.
fn eventually<T>(what: &str, check: impl Fn() -> Option<T>) -> T {
    for _ in 0..500 {
        if let Some(value) = check() {
            return value;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("not within 5 s: {what}");
}

fn eventually_names(pairs: &[(&str, &str)], expected: &[&str]) -> Discovery {
    eventually(&format!("{pairs:?} gives {expected:?}"), || Some(found(pairs)).filter(|it| names(it) == expected))
}

#[test]
fn devices_follow_the_links_of_the_host() {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    if !netns::available() {
        return;
    }
    let namespace = Namespace::with_lo_down();
    let me = std::env::current_exe().expect("a path");
    let run = Command::new("ip")
        .args(["netns", "exec", namespace.name()])
        .arg(me)
        .args(["--exact", "devices::devices_follow_the_links_of_the_host", "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .expect("ip runs");
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "inside the namespace:\n{}{said}", String::from_utf8_lossy(&run.stdout));
}

fn inside() {
    let error = discover(&Config::default()).expect_err("nothing is up yet").to_string();
    assert!(error.starts_with("no network interface can be used"), "{error}");

    ip(&["link", "set", "lo", "up"]);
    let only_lo = found(&[]);
    assert_eq!((names(&only_lo), only_lo.why), (vec!["lo".to_owned()], Why::LastResort("lo")));

    // The peer is made first, so eth0 has the lower index and is listed first.
    ip(&["link", "add", "eth1", "type", "veth", "peer", "name", "eth0"]);
    ip(&["link", "add", "docker0", "type", "bridge"]);
    for (name, address) in [("eth0", "10.1.0.1/24"), ("eth1", "10.1.1.1/24"), ("docker0", "10.1.2.1/24")] {
        ip(&["address", "add", address, "dev", name]);
        ip(&["link", "set", name, "up"]);
    }
    ip(&["address", "add", "2001:db8::1/64", "dev", "eth0", "nodad"]);
    let both = eventually_names(&[], &["eth0", "eth1"]);
    assert_eq!(both.why, Why::Ordinary);
    assert_eq!(both.plans[0].rails[0].address.to_string(), "10.1.0.1:0");
    // The kernel says 10 Gb/s of every veth.
    assert_eq!(both.plans[0].rails[0].speed_mbps, UNKNOWN_SPEED_MBPS);
    assert!(!both.plans[0].rails[0].speed_is_known);
    ip(&["link", "add", "link", "eth0", "name", "vlan7", "type", "macvlan"]);
    ip(&["address", "add", "10.1.7.1/24", "dev", "vlan7"]);
    ip(&["link", "set", "vlan7", "up"]);
    let upon = eventually_names(&[("NCCL_SOCKET_IFNAME", "=vlan7")], &["vlan7"]);
    assert!(!upon.plans[0].rails[0].speed_is_known, "nor of what lies on one");
    let rails = eventually_names(&[("TOWLINE_RAILS", "all")], &["eth0+eth1"]);
    assert!(rails.to_string().contains("vlan7 is no rail: it shares the wire of eth0"), "{rails}");
    ip(&["link", "del", "vlan7"]);
    // The names that udev gives beside the kernel's (`ip link` shows them as "altname").
    ip(&["link", "property", "add", "dev", "eth0", "altname", "enp59s0f0"]);
    assert_eq!(names(&found(&[("TOWLINE_RAILS", "enp59s0f0,eth1,eth0")])), ["eth0+eth1"]);
    // The kernel's own lookup takes what stands before a colon, and eth1 was left out without a word.
    let error = discover(&Config::from_pairs([("TOWLINE_RAILS", "eth0:eth1")]).0).expect_err("no such name");
    assert!(error.to_string().contains("did you mean TOWLINE_RAILS=eth0,eth1?"), "{error}");
    let error = discover(&Config::from_pairs([("NCCL_SOCKET_IFNAME", "=enp59s0f0")]).0).expect_err("NCCL knows none");
    assert!(error.to_string().contains("did you mean NCCL_SOCKET_IFNAME==eth0?"), "{error}");
    // The loopback is chosen too, and counts less.
    let speeds: Vec<u32> =
        found(&[("NCCL_SOCKET_IFNAME", "^docker0")]).plans.iter().map(|plan| plan.rails[0].speed_mbps).collect();
    assert!(speeds[0] < speeds[1] && speeds[1] == speeds[2], "{speeds:?}");
    assert_ne!(both.plans[0].guid, both.plans[1].guid);
    assert_eq!(names(&found(&[("NCCL_COMM_ID", "10.1.1.9:1234")])), ["eth1"]);
    assert_eq!(names(&found(&[("TOWLINE_RAILS", "all")])), ["eth0+eth1"]);

    // An alias is an entry with a label of its own, as it is for NCCL.
    ip(&["address", "add", "10.1.9.1/24", "dev", "eth0", "label", "eth0:9"]);
    let alias = found(&[("NCCL_SOCKET_IFNAME", "eth0")]);
    assert_eq!(names(&alias), ["eth0", "eth0:9"]);
    assert_eq!(alias.plans[0].rails[0].index, alias.plans[1].rails[0].index);

    let six = found(&[("NCCL_SOCKET_FAMILY", "AF_INET6"), ("NCCL_SOCKET_IFNAME", "=eth0")]);
    assert!(six.plans[0].rails[0].address.is_ipv6());

    // With its only other address gone, the link-local one is used, with its scope.
    ip(&["address", "flush", "dev", "eth1", "scope", "global"]);
    let local = found(&[("NCCL_SOCKET_IFNAME", "=eth1")]);
    let rail = &local.plans[0].rails[0];
    let std::net::SocketAddr::V6(address) = rail.address else { panic!("{rail:?}") };
    assert_eq!((address.ip().segments()[0], address.scope_id()), (0xfe80, rail.index));
    eventually("the address can be bound, so its scope is right", || std::net::TcpListener::bind(address).ok());

    // One end down takes the carrier from the other: neither is running.
    ip(&["link", "set", "eth1", "down"]);
    eventually_names(&[("NCCL_SOCKET_IFNAME", "eth,lo")], &["lo"]);
    // In a device of several interfaces such a one keeps its place, as long as it has an address: eth1 lost its own.
    let waiting = eventually_names(&[("TOWLINE_RAILS", "eth0,eth1,lo")], &["lo+eth0"]);
    assert_eq!(waiting.warnings.len(), 2, "{:?}", waiting.warnings);
    assert!(waiting.warnings[0].contains("eth1, and there is no such interface with an address"));
    assert!(waiting.warnings[1].contains("rail eth0 (10.1.0.1) is down now"));
    let of_family =
        found(&[("TOWLINE_RAILS", "all"), ("NCCL_SOCKET_IFNAME", "eth,lo"), ("NCCL_SOCKET_FAMILY", "AF_INET")]);
    assert_eq!(names(&of_family), ["lo+eth0+eth0:9"]);
    assert!(has_ipv6("eth0"), "IPv6 addresses outlive the carrier");
    ip(&["link", "set", "eth0", "down"]);
    assert!(!has_ipv6("eth0"), "and not an interface that is taken down");
    assert_eq!(names(&found(&[("TOWLINE_RAILS", "lo,eth0")])), ["lo+eth0"], "administratively down, with its address");
    let error = discover(&Config::from_pairs([("TOWLINE_RAILS", "eth0")]).0).expect_err("all down").to_string();
    assert!(error.contains("eth0 (not running)") && error.contains("bring one of them up"), "{error}");
    ip(&["link", "del", "eth0"]);
    let error = discover(&Config::from_pairs([("TOWLINE_RAILS", "eth0")]).0).expect_err("it is gone").to_string();
    assert!(error.contains("TOWLINE_RAILS"), "{error}");
}
