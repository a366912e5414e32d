//! The communicator's traffic class stands in the headers of its packets.

use std::ffi::c_int;

use crate::support::netns::{self, Namespace};
use crate::support::one_sided::{COMM, ON, listening_in};
use crate::support::pair::Pair;
use crate::support::{child, net, pattern, watchdog};
use towline::host::{ApiVersion, Init};

/// The class that the packets of a socket carry, by address family.
fn class_of(fd: i32) -> Option<c_int> {
    let option = |level: c_int, name: c_int| {
        let (mut value, mut size): (c_int, libc::socklen_t) = (0, size_of::<c_int>() as u32);
        // SAFETY: value and size outlive the call.
        let status = unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &raw mut size) };
        (status == 0).then_some(value)
    };
    match option(libc::SOL_SOCKET, libc::SO_DOMAIN)? {
        libc::AF_INET => option(libc::IPPROTO_IP, libc::IP_TOS),
        libc::AF_INET6 => option(libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
        _ => None,
    }
}

/// The classes of this process's connected sockets.
fn classes() -> Vec<c_int> {
    let sockets = crate::support::descriptors().into_iter().filter(|(_, target)| target.starts_with("socket:"));
    let is_listening = |fd: i32| {
        let (mut value, mut size): (c_int, libc::socklen_t) = (0, size_of::<c_int>() as u32);
        // SAFETY: value and size outlive the call.
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, (&raw mut value).cast(), &raw mut size) };
        value != 0
    };
    sockets.filter(|(fd, _)| !is_listening(*fd)).filter_map(|(fd, _)| class_of(fd)).collect()
}

fn carries(version: ApiVersion, given: i32, sender: c_int, receiver: c_int) {
    let _watchdog = watchdog(30);
    let context = net(version).init_with(&Init { traffic_class: given, ..Init::default() }).expect("init");
    let pair = Pair::connect(&context, 0).expect("a connection");
    // Further streams carry it too.
    for _ in 0..20 {
        assert!(pair.transfer(pattern(1, 2 << 20)).expect("a transfer") == pattern(1, 2 << 20));
    }
    let mut found = classes();
    found.sort_unstable();
    assert!(found.len() >= 2, "{found:?}");
    assert!(found.iter().filter(|class| **class == sender).count() >= found.len() / 2, "{found:?}");
    assert!(found.iter().all(|class| [sender, receiver].contains(class)), "{found:?}");
}

/// v10 gives the class to `connect` alone, so only the connecting side knows it; from v11 on both sides do.
#[test]
fn the_traffic_class_of_v10_is_that_of_the_senders_sockets() {
    let name = "traffic_class::the_traffic_class_of_v10_is_that_of_the_senders_sockets";
    child::alone(name, &[("TOWLINE_STREAMS", "3")], || carries(ApiVersion::V10, 0x68, 0x68, 0));
}

#[test]
fn the_traffic_class_of_v12_is_that_of_all_sockets() {
    let name = "traffic_class::the_traffic_class_of_v12_is_that_of_all_sockets";
    child::alone(name, &[("TOWLINE_STREAMS", "3")], || carries(ApiVersion::V12, 0xB8, 0xB8, 0xB8));
}

#[test]
fn the_traffic_class_is_that_of_one_sided_operations_too() {
    child::alone("traffic_class::the_traffic_class_is_that_of_one_sided_operations_too", &[ON], || {
        let _watchdog = watchdog(30);
        let init = Init { comm_id: COMM, traffic_class: 0x48, ..Init::default() };
        let all = [0, 1].map(|_| listening_in(net(ApiVersion::V12).init_with(&init).expect("init"), 16));
        let handles = [all[0].handle, all[1].handle];
        let [first, second] = all;
        let other = std::thread::spawn(move || second.connect(&handles, 1).expect("connect"));
        let ranks = [first.connect(&handles, 0).expect("connect"), other.join().expect("a rank")];
        let found = classes();
        assert!(found.len() >= 4 && found.iter().all(|class| *class == 0x48), "{found:?}");
        drop(ranks);
    });
}

#[test]
fn the_traffic_class_reaches_ipv6_sockets() {
    let name = "traffic_class::the_traffic_class_reaches_ipv6_sockets";
    if child::role().as_deref() == Some("inside") {
        return carries(ApiVersion::V11, 0x20, 0x20, 0x20);
    }
    if netns::available() {
        let host = Namespace::new();
        host.ip("link add eth0 type veth peer name peer0");
        host.ip("address add fd78::1/64 dev eth0 nodad");
        host.ip("link set peer0 up");
        host.ip("link set eth0 up");
        host.wait_for("eth0");
        let six = [("NCCL_SOCKET_FAMILY", "AF_INET6"), ("NCCL_SOCKET_IFNAME", "=eth0"), ("TOWLINE_STREAMS", "3")];
        child::run(host.command(name, "inside").envs(six), name);
    }
}

#[test]
fn an_undefined_traffic_class_changes_nothing() {
    let name = "traffic_class::an_undefined_traffic_class_changes_nothing";
    child::alone(name, &[], || carries(ApiVersion::V12, -1, 0, 0));
}
