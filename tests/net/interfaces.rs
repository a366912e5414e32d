//! What the host's interfaces, routes and ports do to connections, between network namespaces: two interfaces in one
//! subnet, addresses that are not ready, few ports, another address family.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::time::Duration;

use crate::support::child::{self, Guarded, Mailbox};
use crate::support::netns::{Namespace, available, two_hosts};
use crate::support::pair::Pair;
use crate::support::proxy::{address_of, lead_to};
use crate::support::{PATIENCE, context, part, pattern, watchdog};
use socket2::{Domain, Socket, Type};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Handle, Memory, Part};

const SIZE: usize = 4 << 20;
const MESSAGES: usize = 3;

/// Plays one of two hosts: messages from the sender to the receiver; the sender publishes its warnings. False in the
/// test's own process.
fn plays_a_host() -> bool {
    let Some(role) = child::role() else { return false };
    let _watchdog = watchdog(60);
    let log = Capture::start();
    let (context, mail) = (context(ApiVersion::V12), child::mailbox());
    if role == "receiver" {
        let (listener, handle) = context.listen(0).expect("listen");
        child::send(&mail, "handle", handle.bytes());
        let recv = listener.accept_within(PATIENCE).expect("accept");
        for i in 0..MESSAGES {
            let target = Memory::new(SIZE);
            // SAFETY: the memory lives until the request ended.
            let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
            recv.wait(&request, PATIENCE).expect("the receive ends");
            assert!(target.bytes() == pattern(i, SIZE), "message {i}");
        }
        recv.close().expect("close");
    } else {
        let mut handle = Handle::from_bytes(&child::receive(&mail, "handle"));
        let send = context.connect_within(0, &mut handle, PATIENCE).expect("connect");
        for i in 0..MESSAGES {
            // SAFETY: the pattern is static.
            let request = unsafe { send.post(part(pattern(i, SIZE), None)) }.expect("isend");
            send.wait(&request, PATIENCE).expect("the send ends");
        }
        send.close().expect("close");
        let warnings = log.records().into_iter().filter(towline::host::log::Record::is_warning);
        child::send(&mail, "warnings", warnings.map(|it| it.text + "\n").collect::<String>().as_bytes());
    }
    true
}

/// Lets two hosts exchange messages in the test `name`; the sender's warnings.
fn exchange(name: &str, hosts: [&Namespace; 2], variables: &[(&str, &str)]) -> String {
    let mail = Mailbox::new();
    let start = |host: &Namespace, role: &str| {
        let mut command = host.command(name, role);
        command.envs(variables.iter().copied()).env(child::MAILBOX, mail.path());
        Guarded::start(command)
    };
    let (mut receiver, mut sender) = (start(hosts[0], "receiver"), start(hosts[1], "sender"));
    assert!(sender.passed_within(PATIENCE * 2), "the sender");
    assert!(receiver.passed_within(PATIENCE), "the receiver");
    String::from_utf8(child::receive(mail.path(), "warnings")).expect("text")
}

/// Two hosts with two interfaces each, all in one subnet: cables to one switch (the third).
fn one_subnet() -> [Namespace; 3] {
    let [left, right, switch] = [(); 3].map(|()| Namespace::new());
    switch.ip("link add switch type bridge");
    switch.ip("link set switch up");
    for (host, number) in [(&left, 1), (&right, 2)] {
        for rail in 0..2 {
            let port = format!("port{number}{rail}");
            host.ip(&format!("link add rail{rail} type veth peer name {port} netns {}", switch.name()));
            switch.ip(&format!("link set {port} master switch up"));
            host.ip(&format!("address add 10.77.{rail}.{number}/16 dev rail{rail}"));
            host.ip(&format!("link set rail{rail} up"));
        }
    }
    for host in [&left, &right] {
        host.wait_for("rail0");
        host.wait_for("rail1");
    }
    [left, right, switch]
}

const ONE_SUBNET: [(&str, &str); 3] =
    [("TOWLINE_RAILS", "all"), ("NCCL_SOCKET_IFNAME", "rail"), ("TOWLINE_STREAMS", "4")];

/// What `towline doctor` says there.
fn doctor(host: &Namespace) -> String {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", host.name(), env!("CARGO_BIN_EXE_towline"), "doctor"]);
    let output = command.envs(ONE_SUBNET).output().expect("towline runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// With two NICs in one subnet everything leaves by the first, and nothing says so (reported of NCCL again and again).
#[test]
fn of_two_interfaces_in_one_subnet_the_log_and_doctor_say_that_one_carries_everything() {
    if plays_a_host() || !available() {
        return;
    }
    let name = "interfaces::of_two_interfaces_in_one_subnet_the_log_and_doctor_say_that_one_carries_everything";
    let [left, right, _switch] = one_subnet();
    let warnings = exchange(name, [&left, &right], &ONE_SUBNET);
    let line = "packets from 10.77.1.2 (rail1) to 10.77.1.1 leave by rail0: rail1 does not carry its share";
    assert!(warnings.contains(line) && warnings.contains("arp_ignore=1"), "{warnings}");
    let told = doctor(&right);
    assert!(told.contains("packets from 10.77.1.2 (rail1) to its own subnet leave by rail0"), "{told}");
}

/// Hosts that announce a /32 on `lo` by BGP: no route leads to the addresses of their cables.
#[test]
fn hosts_whose_routed_address_is_on_the_loopback_interface_reach_each_other() {
    if plays_a_host() || !available() {
        return;
    }
    let (left, right) = two_hosts(1);
    for (host, number, other) in [(&left, 1, 2), (&right, 2, 1)] {
        host.ip(&format!("address add 10.99.0.{number}/32 dev lo"));
        host.ip(&format!("route add 10.99.0.{other}/32 via 10.77.0.{other} src 10.99.0.{number}"));
    }
    let name = "interfaces::hosts_whose_routed_address_is_on_the_loopback_interface_reach_each_other";
    assert_eq!(exchange(name, [&left, &right], &[("NCCL_SOCKET_IFNAME", "lo")]), "");
}

#[test]
fn two_interfaces_in_one_subnet_that_are_kept_apart_carry_a_share_each() {
    if plays_a_host() || !available() {
        return;
    }
    let name = "interfaces::two_interfaces_in_one_subnet_that_are_kept_apart_carry_a_share_each";
    let [left, right, _switch] = one_subnet();
    for host in [&left, &right] {
        for (key, value) in [("arp_ignore", "1"), ("arp_announce", "2"), ("rp_filter", "2")] {
            host.set(&format!("net/ipv4/conf/all/{key}"), value);
        }
    }
    assert_eq!(exchange(name, [&left, &right], &ONE_SUBNET), "");
    let sent = [0, 1].map(|rail| right.sent_over(rail));
    assert!(sent.iter().all(|bytes| *bytes > 1 << 20), "bytes per rail: {sent:?}");
    let told = doctor(&right);
    assert!(!told.contains("does not carry its share"), "{told}");
}

/// Something over there drops what comes from the second interface (a filter of sources, a switch): the connection
/// comes up over the first.
#[test]
fn a_peer_that_takes_nothing_over_its_second_interface_is_reached_over_the_first() {
    if plays_a_host() || !available() {
        return;
    }
    let name = "interfaces::a_peer_that_takes_nothing_over_its_second_interface_is_reached_over_the_first";
    let [left, right, _switch] = one_subnet();
    for host in [&left, &right] {
        for (key, value) in [("arp_ignore", "1"), ("arp_announce", "2")] {
            host.set(&format!("net/ipv4/conf/all/{key}"), value);
        }
    }
    right.set("net/ipv4/conf/all/rp_filter", "2");
    let card = right.run(&["cat", "/sys/class/net/rail1/address"]);
    let rule = format!("add rule inet filter input ether saddr {} tcp flags syn drop", card.trim());
    for line in ["add table inet filter", "add chain inet filter input { type filter hook input priority 0; }", &rule] {
        left.run(&["nft", line]);
    }
    let only = [("NCCL_SOCKET_IFNAME", "=rail1"), ("TOWLINE_STREAMS", "2")];
    let warnings = exchange(name, [&left, &right], &only);
    assert!(warnings.contains("leave by rail0: rail1 does not carry its share"), "{warnings}");
}

/// A job that starts right after its network: the kernel still asks whether another host has the IPv6 address, and
/// bind(2) says "Cannot assign requested address".
#[test]
fn an_address_that_is_still_checked_for_duplicates_is_waited_for() {
    if child::role().as_deref() == Some("receiver") {
        let there = std::fs::read_to_string("/proc/net/if_inet6").expect("the addresses");
        let line = there.lines().find(|line| line.starts_with("fd79")).expect("the address");
        let flags = line.split_whitespace().nth(4).and_then(|flags| u32::from_str_radix(flags, 16).ok());
        // IFA_F_TENTATIVE.
        assert!(flags.is_some_and(|flags| flags & 0x40 != 0), "{line}");
    }
    if plays_a_host() || !available() {
        return;
    }
    let (left, right) = two_hosts(1);
    for (host, number) in [(&left, 1), (&right, 2)] {
        host.ip("-6 address flush dev rail0");
        host.set("net/ipv6/conf/rail0/dad_transmits", "3");
        host.ip(&format!("address add fd79::{number}/64 dev rail0"));
    }
    let only = [("NCCL_SOCKET_IFNAME", "=rail0"), ("NCCL_SOCKET_FAMILY", "AF_INET6")];
    exchange("interfaces::an_address_that_is_still_checked_for_duplicates_is_waited_for", [&left, &right], &only);
}

/// Runs the rest of the test `name` in a namespace with an interface `rail0`, 10.77.0.1 and fd77:0::1: true there.
fn alone(name: &str, variables: &[(&str, &str)], set_up: impl FnOnce(&Namespace)) -> bool {
    if child::role().is_some() {
        return true;
    }
    if available() {
        let (host, _other) = two_hosts(1);
        set_up(&host);
        let mut command = host.command(name, "inside");
        child::run(command.env("NCCL_SOCKET_IFNAME", "=rail0").envs(variables.iter().copied()), name);
    }
    false
}

/// A strict filter drops the answers, and nothing says that it does.
#[test]
fn a_strict_filter_that_keeps_a_second_interface_from_its_peers_is_told() {
    const NAME: &str = "interfaces::a_strict_filter_that_keeps_a_second_interface_from_its_peers_is_told";
    let set_up = |host: &Namespace| {
        host.ip("link add rail1 type veth peer name other");
        host.ip("address replace 10.78.0.1/16 dev rail0");
        host.ip("address add 10.78.1.1/16 dev rail1");
        host.ip("link set other up");
        host.ip("link set rail1 up");
        host.wait_for("rail1");
        host.set("net/ipv4/conf/all/rp_filter", "1");
    };
    if !alone(NAME, &[("NCCL_SOCKET_IFNAME", "=rail1"), ("TOWLINE_CONNECT_TIMEOUT", "2")], set_up) {
        return;
    }
    let log = Capture::start();
    let context = context(ApiVersion::V12);
    let (_listener, mut handle) = context.listen(0).expect("listen");
    let mut there = address_of(&handle);
    there.set_ip(Ipv4Addr::new(10, 78, 1, 9).into());
    lead_to(&mut handle, there);
    assert_eq!(context.connect_within(0, &mut handle, Duration::from_secs(10)).err(), Some(Code::RemoteError));
    let line = "10.78.1.9 is reached by rail0, and the kernel drops what comes from there by rail1 (rp_filter is 1)";
    assert!(log.contains(line), "{:?}", log.records());
}

fn ports(host: &Namespace, range: &str) {
    host.set("net/ipv4/ip_local_port_range", range);
}

/// "Address already in use; is the interface still up?"
#[test]
fn a_host_without_a_free_port_names_the_range() {
    if !alone("interfaces::a_host_without_a_free_port_names_the_range", &[], |host| ports(host, "40000 40000")) {
        return;
    }
    let log = Capture::start();
    let _port = TcpListener::bind(("10.77.0.1", 40000)).expect("the only port");
    assert_eq!(context(ApiVersion::V12).listen(0).err(), Some(Code::SystemError));
    assert!(log.contains("no local port is free: widen net.ipv4.ip_local_port_range"), "{:?}", log.records());
}

/// The hint spoke of the interface as well.
#[test]
fn a_connection_without_a_free_port_names_the_range() {
    const NAME: &str = "interfaces::a_connection_without_a_free_port_names_the_range";
    let variables = [("TOWLINE_STREAMS", "1"), ("TOWLINE_CONNECT_TIMEOUT", "2")];
    if !alone(NAME, &variables, |host| ports(host, "40000 40001")) {
        return;
    }
    let log = Capture::start();
    let context = context(ApiVersion::V12);
    // One port listens, and the first connection to it takes the other.
    let (listener, mut handle) = context.listen(0).expect("listen");
    let mut second = Handle::from_bytes(handle.bytes());
    let _first = Pair::through(&listener, (&context, 0), &mut handle).expect("the port is free");
    assert!(context.connect_within(0, &mut second, Duration::from_secs(10)).is_err(), "no port is left");
    assert!(log.contains("no local port is free: widen net.ipv4.ip_local_port_range"), "{:?}", log.records());
    assert!(!log.contains("has lost its address"), "{:?}", log.records());
}

/// A socket that is bound to an address took a port of its own at once: few ports were few connections, where those of
/// plain connect(2) share one.
#[test]
fn connections_to_different_peers_share_a_local_port() {
    if !alone("interfaces::connections_to_different_peers_share_a_local_port", &[], |host| ports(host, "40000 40000")) {
        return;
    }
    let peers = [41000, 41001].map(|port| TcpListener::bind(("10.77.0.1", port)).expect("a listener"));
    let _connected = peers.each_ref().map(|peer| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        towline::os::route::take_port_at_connect(&socket);
        socket.bind(&std::net::SocketAddr::from(([10, 77, 0, 1], 0)).into()).expect("bind");
        socket.connect(&peer.local_addr().expect("an address").into()).expect("connect");
        socket
    });
}

#[test]
fn a_peer_of_another_address_family_is_told_with_the_variable() {
    let name = "interfaces::a_peer_of_another_address_family_is_told_with_the_variable";
    let variables = [("NCCL_SOCKET_FAMILY", "AF_INET6"), ("TOWLINE_CONNECT_TIMEOUT", "2")];
    if !alone(name, &variables, |host| host.ip("-4 address flush dev rail0")) {
        return;
    }
    let log = Capture::start();
    let context = context(ApiVersion::V12);
    let (_listener, mut handle) = context.listen(0).expect("listen");
    let mut there = address_of(&handle);
    there.set_ip(Ipv4Addr::new(10, 77, 0, 2).into());
    lead_to(&mut handle, there);
    assert_eq!(context.connect_within(0, &mut handle, Duration::from_secs(10)).err(), Some(Code::RemoteError));
    let parts = ["has an IPv4 address", "rail0 of this host an IPv6 one", "NCCL_SOCKET_FAMILY is AF_INET6 here"];
    let records = log.records();
    assert!(parts.iter().all(|part| records.iter().any(|it| it.text.contains(part))), "{records:?}");
}

/// The other way round, the kernel has no local address for the connection and answers as it does when ports run out.
#[test]
fn a_peer_with_an_ipv6_address_only_is_told_where_there_is_none() {
    let name = "interfaces::a_peer_with_an_ipv6_address_only_is_told_where_there_is_none";
    let set_up = |host: &Namespace| host.set("net/ipv6/conf/rail0/disable_ipv6", "1");
    if !alone(name, &[("TOWLINE_CONNECT_TIMEOUT", "2")], set_up) {
        return;
    }
    let log = Capture::start();
    let context = context(ApiVersion::V12);
    let (_listener, mut handle) = context.listen(0).expect("listen");
    let mut there = address_of(&handle);
    there.set_ip("fd00:9::2".parse().expect("an address"));
    lead_to(&mut handle, there);
    assert!(context.connect_within(0, &mut handle, Duration::from_secs(10)).is_err());
    let records = log.records();
    let parts = ["has an IPv6 address", "rail0 of this host an IPv4 one", "NCCL_SOCKET_FAMILY is unset here"];
    assert!(parts.iter().all(|part| records.iter().any(|it| it.text.contains(part))), "{records:?}");
    assert!(!log.contains("no local port is free"), "{records:?}");
}
