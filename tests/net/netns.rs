//! Two hosts, as network namespaces: rails, address families, interfaces that vanish, packets that are refused.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, Mailbox};
use crate::support::netns::{Namespace, available, two_hosts};
use crate::support::proxy::{address_of, lead_to};
use crate::support::{PATIENCE, context, eventually, part, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Handle, Memory, Part, Request};

/// Messages that two hosts exchange, with one that is long enough for every stream to get a part.
const SIZES: [usize; 5] = [0, 1000, 60_000, 1 << 20, 16 << 20];
const ROUNDS: usize = 3;

/// One message to the peer and one from it, so that both directions connect.
fn send_all(context: &Context, dev: i32, handle: &[u8]) {
    let mut handle = Handle::from_bytes(handle);
    let send = context.connect_within(dev, &mut handle, PATIENCE).expect("connect");
    for round in 0..ROUNDS {
        for (i, size) in SIZES.into_iter().enumerate() {
            // SAFETY: the pattern is static.
            let request = unsafe { send.post(part(pattern(i + round, size), None)) }.expect("isend");
            send.wait(&request, PATIENCE).expect("the send ends");
        }
    }
    send.close().expect("close");
}

fn receive_all(context: &Context, dev: i32, publish: impl FnOnce(&[u8])) {
    let (listener, handle) = context.listen(dev).expect("listen");
    publish(handle.bytes());
    let recv = listener.accept_within(PATIENCE).expect("accept");
    for round in 0..ROUNDS {
        for (i, size) in SIZES.into_iter().enumerate() {
            let target = Memory::new(size);
            // SAFETY: the memory lives until the request ended.
            let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
            recv.wait(&request, PATIENCE).expect("the receive ends");
            assert!(target.bytes() == pattern(i + round, size), "message {i} of round {round}");
        }
    }
    recv.close().expect("close");
}

/// Plays one of two hosts in the test `name`; `dev` chooses the device. False in the test's own process.
fn plays_a_host(dev: impl Fn(&Context) -> i32) -> bool {
    let Some(role) = child::role() else { return false };
    let _watchdog = watchdog(60);
    let context = context(ApiVersion::V12);
    let dev = dev(&context);
    let mail = child::mailbox();
    match role.as_str() {
        "receiver" => receive_all(&context, dev, |handle| child::send(&mail, "handle", handle)),
        "sender" => send_all(&context, dev, &child::receive(&mail, "handle")),
        role => panic!("nobody plays {role}"),
    }
    true
}

/// Lets two namespaces exchange messages in the test `name` with these variables on both.
fn exchange(name: &str, hosts: &(Namespace, Namespace), variables: &[(&str, &str)]) {
    let mail = Mailbox::new();
    let start = |host: &Namespace, role: &str| {
        let mut command = host.command(name, role);
        command.envs(variables.iter().copied()).env(child::MAILBOX, mail.path());
        Guarded::start(command)
    };
    let (mut receiver, mut sender) = (start(&hosts.0, "receiver"), start(&hosts.1, "sender"));
    assert!(sender.passed_within(PATIENCE * 2), "the sender");
    assert!(receiver.passed_within(PATIENCE), "the receiver");
}

/// Bytes that left a host over each of its rails.
fn sent_over(host: &Namespace, rails: usize) -> Vec<u64> {
    (0..rails).map(|rail| host.sent_over(rail)).collect()
}

#[test]
fn two_hosts_connect_over_ipv4() {
    if plays_a_host(|_| 0) || !available() {
        return;
    }
    exchange("netns::two_hosts_connect_over_ipv4", &two_hosts(1), &[]);
}

#[test]
fn two_hosts_connect_over_ipv6() {
    if plays_a_host(|_| 0) || !available() {
        return;
    }
    exchange("netns::two_hosts_connect_over_ipv6", &two_hosts(1), &[("NCCL_SOCKET_FAMILY", "AF_INET6")]);
}

#[test]
fn two_hosts_connect_over_link_local_addresses() {
    if plays_a_host(|_| 0) || !available() {
        return;
    }
    let hosts = two_hosts(1);
    // A link made later on one side only, so that the numbers of the interfaces differ and a scope cannot be passed on.
    hosts.0.ip("link add spare type veth peer name spared");
    hosts.0.ip("link del rail0");
    hosts.0.ip(&format!("link add rail0 type veth peer name rail0 netns {}", hosts.1.name()));
    for host in [&hosts.0, &hosts.1] {
        host.ip("link set rail0 up");
    }
    hosts.0.wait_for("rail0");
    hosts.1.wait_for("rail0");
    for (host, number) in [(&hosts.0, 1), (&hosts.1, 2)] {
        host.ip("address flush dev rail0");
        host.ip(&format!("address add fe80::77:{number}/64 dev rail0 nodad"));
    }
    let only = [("NCCL_SOCKET_IFNAME", "=rail0"), ("NCCL_SOCKET_FAMILY", "AF_INET6")];
    exchange("netns::two_hosts_connect_over_link_local_addresses", &hosts, &only);
}

#[test]
fn one_device_over_all_rails_uses_all_of_them() {
    if plays_a_host(|context| {
        assert_eq!(context.devices(), Ok(1));
        assert_eq!(context.properties(0).expect("properties").name, "rail0+rail1");
        0
    }) || !available()
    {
        return;
    }
    let hosts = two_hosts(2);
    let name = "netns::one_device_over_all_rails_uses_all_of_them";
    exchange(name, &hosts, &[("TOWLINE_RAILS", "all"), ("NCCL_SOCKET_IFNAME", "rail")]);
    let sent = sent_over(&hosts.1, 2);
    assert!(sent.iter().all(|bytes| *bytes > 4 << 20), "bytes per rail: {sent:?}");
}

/// Mbit/s of rails of which one has a tenth.
const UNEQUAL: [u64; 3] = [240, 240, 24];

/// Messages of 2 MiB, eight outstanding, the oldest awaited first: those that settle the pace, and those that count.
const PACED: (usize, usize) = (16, 48);

fn paced(name: &str, post: impl Fn(usize) -> Request, wait: impl Fn(&Request)) {
    let (settle, count) = PACED;
    let mut start = Instant::now();
    let mut requests: VecDeque<Request> = (0..8).map(&post).collect();
    for ended in 1..=settle + count {
        wait(&requests.pop_front().expect("eight are outstanding"));
        if ended + 8 <= settle + count {
            requests.push_back(post(ended + 7));
        }
        if ended == settle {
            start = Instant::now();
        }
    }
    let rate = (count << 21) as f64 / start.elapsed().as_secs_f64();
    let share = rate / (UNEQUAL.iter().sum::<u64>() * 125_000) as f64;
    eprintln!("{name}: {:.1} MB/s, {share:.2} of the rails", rate / 1e6);
    assert!(share > 0.8, "{:.1} MB/s, {share:.2} of what the rails carry together", rate / 1e6);
}

/// A chunk that stays long on a slow rail holds up its message, and with it all that NCCL posts after that one ends.
#[test]
fn a_slow_rail_does_not_hold_up_the_others() {
    const NAME: &str = "netns::a_slow_rail_does_not_hold_up_the_others";
    const SIZE: usize = 2 << 20;
    if let Some(role) = child::role() {
        let _watchdog = watchdog(60);
        let (context, mail) = (context(ApiVersion::V12), child::mailbox());
        if role == "receiver" {
            let (listener, handle) = context.listen(0).expect("listen");
            child::send(&mail, "handle", handle.bytes());
            let recv = listener.accept_within(PATIENCE).expect("accept");
            let targets: Vec<Memory> = (0..8).map(|_| Memory::new(SIZE)).collect();
            // SAFETY: each buffer is posted again only when its last receive has ended, and outlives them all.
            let post = |i: usize| unsafe { recv.post(&[Part::all(&targets[i % 8], None)]) }.expect("irecv");
            paced("receiver", post, |request| {
                recv.wait(request, PATIENCE).expect("the receive ends");
            });
            recv.close().expect("close");
        } else {
            let mut handle = Handle::from_bytes(&child::receive(&mail, "handle"));
            let send = context.connect_within(0, &mut handle, PATIENCE).expect("connect");
            // SAFETY: the pattern is static.
            let post = |i: usize| unsafe { send.post(part(pattern(i, SIZE), None)) }.expect("isend");
            paced("sender", post, |request| {
                send.wait(request, PATIENCE).expect("the send ends");
            });
            send.close().expect("close");
        }
        return;
    }
    if !available() {
        return;
    }
    let hosts = two_hosts(UNEQUAL.len());
    for host in [&hosts.0, &hosts.1] {
        for (rail, rate) in UNEQUAL.iter().enumerate() {
            host.shape(&format!("rail{rail}"), *rate);
        }
    }
    exchange(NAME, &hosts, &[("TOWLINE_RAILS", "all"), ("TOWLINE_STREAMS", "4"), ("NCCL_SOCKET_IFNAME", "rail")]);
}

#[test]
fn a_virtual_device_uses_all_rails_of_its_members() {
    if plays_a_host(|context| {
        assert_eq!(context.devices(), Ok(2));
        let merged = context.make_vdevice(&[0, 1]).expect("a virtual device");
        assert_eq!((merged, context.devices()), (2, Ok(3)));
        let properties = context.properties(merged).expect("properties");
        assert_eq!((properties.name.as_str(), properties.members), ("rail0+rail1", vec![0, 1]));
        // What is assumed of a veth counts once.
        assert_eq!(properties.speed_mbps, context.properties(0).expect("properties").speed_mbps);
        merged
    }) || !available()
    {
        return;
    }
    let hosts = two_hosts(2);
    let name = "netns::a_virtual_device_uses_all_rails_of_its_members";
    let variables = [("TOWLINE_STREAMS", "4"), ("NCCL_SOCKET_IFNAME", "rail"), ("TOWLINE_MERGE_ANY", "1")];
    exchange(name, &hosts, &variables);
    let sent = sent_over(&hosts.1, 2);
    assert!(sent.iter().all(|bytes| *bytes > 4 << 20), "bytes per rail: {sent:?}");
}

/// Two interfaces without a PCI path, as VLANs, bonds, macvlan, ipvlan and the interfaces of containers: NCCL merged
/// them into a device that it could not place, and every job ended at its first collective.
#[test]
fn nccl_can_use_every_interface_of_a_host_whose_interfaces_have_no_pci_path() {
    if plays_a_host(|context| {
        let devices: Vec<i32> = (0..context.devices().expect("devices")).collect();
        assert_eq!(crate::selection::select(context), Ok(devices.clone()));
        assert_eq!(devices.len(), 3);
        devices[2]
    }) || !available()
    {
        return;
    }
    let name = "netns::nccl_can_use_every_interface_of_a_host_whose_interfaces_have_no_pci_path";
    // With a wider merge level NCCL asks for more merges; a forced one is the user's, and cannot be placed either.
    for level in ["", "SYS"] {
        exchange(name, &two_hosts(3), &[("NCCL_SOCKET_IFNAME", "rail"), ("NCCL_NET_MERGE_LEVEL", level)]);
    }
}

#[test]
fn a_device_without_rails_in_common_stays_on_its_own() {
    if plays_a_host(|context| {
        assert_eq!(context.devices(), Ok(2));
        1
    }) || !available()
    {
        return;
    }
    let hosts = two_hosts(2);
    let name = "netns::a_device_without_rails_in_common_stays_on_its_own";
    exchange(name, &hosts, &[("NCCL_SOCKET_IFNAME", "rail")]);
    let sent = sent_over(&hosts.1, 2);
    assert!(sent[0] < 1 << 20 && sent[1] > 16 << 20, "bytes per rail: {sent:?}");
}

/// Runs the rest of the test `name` inside one namespace with these links: true inside.
fn inside(name: &str, variables: &[(&str, &str)], set_up: impl FnOnce(&Namespace)) -> bool {
    if child::role().as_deref() == Some("inside") {
        return true;
    }
    if available() {
        let host = Namespace::new();
        set_up(&host);
        let mut command = host.command(name, "inside");
        child::run(command.envs(variables.iter().copied()), name);
    }
    false
}

/// Links `names` that carry an address each.
fn links(host: &Namespace, names: &[&str]) {
    for (number, name) in names.iter().enumerate() {
        host.ip(&format!("link add {name} type veth peer name peer{number}"));
        host.ip(&format!("address add 10.78.{number}.1/24 dev {name}"));
        host.ip(&format!("link set peer{number} up"));
        host.ip(&format!("link set {name} up"));
    }
    names.iter().for_each(|name| host.wait_for(name));
}

fn names(context: &Context) -> Vec<String> {
    let count = context.devices().expect("devices");
    (0..count).map(|dev| context.properties(dev).expect("properties").name).collect()
}

fn chosen_by(test: &str, value: &str, expected: &[&str]) {
    let all = ["eth0", "eth1", "eth10", "docker0", "ib0"];
    if inside(test, &[("NCCL_SOCKET_IFNAME", value)], |host| links(host, &all)) {
        eventually(&format!("{value} gives {expected:?}"), PATIENCE, || {
            // Without any link that runs there is no context either.
            crate::support::net(ApiVersion::V12).init().ok().filter(|context| names(context) == expected)
        });
    }
}

#[test]
fn a_prefix_chooses_all_interfaces_that_begin_so() {
    chosen_by("netns::a_prefix_chooses_all_interfaces_that_begin_so", "eth", &["eth0", "eth1", "eth10"]);
}

#[test]
fn an_equals_sign_chooses_exact_names() {
    chosen_by("netns::an_equals_sign_chooses_exact_names", "=eth1,docker0", &["eth1", "docker0"]);
}

#[test]
fn a_caret_excludes() {
    chosen_by("netns::a_caret_excludes", "^eth1,lo,docker,peer", &["eth0", "ib0"]);
}

#[test]
fn by_default_infiniband_interfaces_come_first() {
    chosen_by("netns::by_default_infiniband_interfaces_come_first", "", &["ib0"]);
}

#[test]
fn an_interface_that_vanished_is_told_at_listen() {
    const NAME: &str = "netns::an_interface_that_vanished_is_told_at_listen";
    if !inside(NAME, &[("NCCL_SOCKET_IFNAME", "=eth0,eth1")], |host| links(host, &["eth0", "eth1"])) {
        return;
    }
    let _watchdog = watchdog(30);
    let log = Capture::start();
    for version in crate::support::versions() {
        let context = eventually("both links", PATIENCE, || {
            // A link that was just set up may take a moment to run, and without any there is no context either.
            crate::support::net(version).init().ok().filter(|context| context.devices().is_ok_and(|count| count == 2))
        });
        crate::support::netns::ip("link del eth1");
        assert_eq!(context.listen(1).err(), Some(Code::SystemError), "{version}");
        let told = log.records().into_iter().filter(|record| record.is_warning() && record.text.contains("eth1"));
        assert!(told.count() >= 1, "{version}: {:?}", log.records());
        // The other one works.
        let pair = crate::support::pair::Pair::connect(&context, 0).expect("a connection");
        assert!(pair.transfer(pattern(1, 100_000)).expect("a transfer") == pattern(1, 100_000));
        crate::support::netns::ip("link add eth1 type veth peer name peer1");
        crate::support::netns::ip("address add 10.78.1.1/24 dev eth1");
        crate::support::netns::ip("link set peer1 up");
        crate::support::netns::ip("link set eth1 up");
    }
}

#[test]
fn no_interface_at_all_is_told_at_init() {
    const NAME: &str = "netns::no_interface_at_all_is_told_at_init";
    if !inside(NAME, &[], |host| host.ip("link set lo down")) {
        return;
    }
    let log = Capture::start();
    for version in crate::support::versions() {
        assert_eq!(crate::support::net(version).init().err(), Some(Code::SystemError), "{version}");
        assert!(log.contains("no network interface can be used"), "{version}: {:?}", log.records());
    }
}

/// Connects to 10.77.0.2, where packets meet `route`; how long that took and what it gave.
fn meets(test: &str, route: &str, most: Duration) {
    let variables = [("TOWLINE_CONNECT_TIMEOUT", "3"), ("NCCL_SOCKET_IFNAME", "=eth0")];
    let set_up = |host: &Namespace| {
        links(host, &["eth0"]);
        host.ip(route);
    };
    if !inside(test, &variables, set_up) {
        return;
    }
    let _watchdog = watchdog(30);
    let log = Capture::start();
    let context = context(ApiVersion::V12);
    let (_listener, mut handle) = context.listen(0).expect("listen");
    // The handle of a listener there: the address is all that differs.
    let mut there = address_of(&handle);
    there.set_ip(std::net::Ipv4Addr::new(10, 77, 0, 2).into());
    lead_to(&mut handle, there);
    let start = Instant::now();
    assert_eq!(context.connect_within(0, &mut handle, PATIENCE).err(), Some(Code::RemoteError));
    assert!(start.elapsed() < most, "after {:?}", start.elapsed());
    let lines: Vec<_> = log.records().into_iter().filter(|record| record.is_warning()).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].text.contains("10.77.0.2") && lines[0].text.contains("NCCL_SOCKET_IFNAME"), "{lines:?}");
}

#[test]
fn a_peer_behind_a_rejecting_firewall_is_an_error_in_time() {
    let name = "netns::a_peer_behind_a_rejecting_firewall_is_an_error_in_time";
    // The same answer as from a firewall that says "no route to host".
    meets(name, "route add unreachable 10.77.0.2/32", Duration::from_secs(6));
}

#[test]
fn a_peer_behind_a_silent_firewall_is_an_error_in_time() {
    let name = "netns::a_peer_behind_a_silent_firewall_is_an_error_in_time";
    // A neighbour that never answers: packets go out and nothing comes back.
    meets(name, "route add 10.77.0.2/32 via 10.78.0.9 dev eth0", Duration::from_secs(6));
}
