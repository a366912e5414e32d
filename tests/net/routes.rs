//! Routes that lead nowhere, between two hosts that are network namespaces: what this host forbids fails within
//! seconds, what may be a host that is starting is waited for, and the log says so.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, Mailbox};
use crate::support::netns::{Namespace, available, two_hosts};
use crate::support::{PATIENCE, context, eventually, part, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Handle, Memory, Part};

/// The receiving host: one message, or the word that there will be none.
fn receive() {
    let context = context(ApiVersion::V12);
    let (listener, handle) = context.listen(0).expect("listen");
    child::send(&child::mailbox(), "handle", handle.bytes());
    let over = child::mailbox().join("over");
    let recv = eventually("a connection, or word that there will be none", PATIENCE * 2, || {
        let conn = listener.accept().expect("accept");
        (conn.is_some() || over.exists()).then_some(conn)
    });
    let Some(recv) = recv else { return };
    let target = Memory::new(100_000);
    // SAFETY: the memory lives until the request ended.
    let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
    recv.wait(&request, PATIENCE).expect("the receive ends");
    assert!(target.bytes() == pattern(1, 100_000));
    recv.close().expect("close");
}

/// The sending host, with the handle of what the other listens on.
fn invited() -> (Context, Handle) {
    (context(ApiVersion::V12), Handle::from_bytes(&child::receive(&child::mailbox(), "handle")))
}

fn start(host: &Namespace, name: &str, role: &str, mail: &Mailbox) -> Guarded {
    let mut command = host.command(name, role);
    command.env(child::MAILBOX, mail.path()).env("NCCL_SOCKET_IFNAME", "rail0");
    Guarded::start(command)
}

#[test]
fn a_path_that_this_host_forbids_fails_within_seconds() {
    const NAME: &str = "routes::a_path_that_this_host_forbids_fails_within_seconds";
    let _watchdog = watchdog(90);
    match child::role().as_deref() {
        Some("receiver") => return receive(),
        Some("sender") => {
            let log = Capture::start();
            let (context, mut handle) = invited();
            let start = Instant::now();
            let failed = eventually("an answer", PATIENCE, || context.connect(0, &mut handle).err());
            assert_eq!(failed, Code::SystemError);
            assert!(start.elapsed() < Duration::from_secs(5), "after {:?}", start.elapsed());
            let line = "connect: this host does not let the connection out (";
            assert!(log.contains(line), "{:?}", log.records());
            let records = log.records();
            let line = records.iter().find(|record| record.text.contains(line)).expect("it is there");
            assert!(line.text.contains("10.77.0.1:") && line.text.contains("ip route get"), "{line}");
            return;
        }
        _ => {}
    }
    if !available() {
        return;
    }
    for kind in ["prohibit", "blackhole"] {
        let (left, right) = two_hosts(1);
        right.ip(&format!("route add {kind} 10.77.0.1/32"));
        let mail = Mailbox::new();
        let (mut receiver, mut sender) = (start(&left, NAME, "receiver", &mail), start(&right, NAME, "sender", &mail));
        assert!(sender.passed_within(PATIENCE * 2), "the sender, {kind}");
        child::send(mail.path(), "over", b"");
        assert!(receiver.passed_within(PATIENCE), "the receiver, {kind}");
    }
}

#[test]
fn a_host_that_cannot_be_reached_yet_is_waited_for_and_the_log_says_so() {
    const NAME: &str = "routes::a_host_that_cannot_be_reached_yet_is_waited_for_and_the_log_says_so";
    let _watchdog = watchdog(90);
    match child::role().as_deref() {
        Some("receiver") => return receive(),
        Some("sender") => {
            let log = Capture::start();
            let (context, mut handle) = invited();
            let start = Instant::now();
            let told = || log.records().iter().filter(|line| line.is_warning()).count();
            while told() == 0 {
                assert!(context.connect(0, &mut handle).expect("it is waited for").is_none());
                assert!(start.elapsed() < Duration::from_secs(9), "nothing was said for {:?}", start.elapsed());
            }
            assert!(start.elapsed() > Duration::from_secs(4), "it was said after {:?}", start.elapsed());
            let line = log.records().into_iter().find(towline::host::log::Record::is_warning).expect("one is there");
            let parts = ["not connected after 5 s: connecting failed: ", "10.77.0.1:", "ip route get"];
            assert!(parts.iter().all(|part| line.text.contains(part)), "{line}");
            child::send(&child::mailbox(), "told", b"");
            let send = context.connect_within(0, &mut handle, PATIENCE).expect("connect");
            assert_eq!(told(), 1, "{:?}", log.records());
            // SAFETY: the pattern is static.
            let request = unsafe { send.post(part(pattern(1, 100_000), None)) }.expect("isend");
            send.wait(&request, PATIENCE).expect("the send ends");
            return send.close().expect("close");
        }
        _ => {}
    }
    if !available() {
        return;
    }
    // Without any route the kernel says that the network is unreachable, with this one that the host is.
    for kind in ["unreachable", "throw"] {
        let (left, right) = two_hosts(1);
        let route = format!("{kind} 10.77.0.1/32");
        right.ip(&format!("route add {route}"));
        let mail = Mailbox::new();
        let (mut receiver, mut sender) = (start(&left, NAME, "receiver", &mail), start(&right, NAME, "sender", &mail));
        child::receive(mail.path(), "told");
        right.ip(&format!("route del {route}"));
        assert!(sender.passed_within(PATIENCE * 2), "the sender, {kind}");
        assert!(receiver.passed_within(PATIENCE), "the receiver, {kind}");
    }
}

#[test]
fn a_route_that_is_forbidden_for_a_moment_is_waited_for() {
    const NAME: &str = "routes::a_route_that_is_forbidden_for_a_moment_is_waited_for";
    let _watchdog = watchdog(90);
    match child::role().as_deref() {
        Some("receiver") => return receive(),
        Some("sender") => {
            let (context, mut handle) = invited();
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(1) {
                assert!(context.connect(0, &mut handle).expect("it is waited for").is_none());
            }
            let mut ip = Command::new("ip");
            let gone = ip.args(["route", "del", "prohibit", "10.77.0.1/32"]).status().expect("ip runs").success();
            assert!(gone, "the route can be removed");
            let send = context.connect_within(0, &mut handle, PATIENCE).expect("connect");
            // SAFETY: the pattern is static.
            let request = unsafe { send.post(part(pattern(1, 100_000), None)) }.expect("isend");
            send.wait(&request, PATIENCE).expect("the send ends");
            return send.close().expect("close");
        }
        _ => {}
    }
    if !available() {
        return;
    }
    let (left, right) = two_hosts(1);
    right.ip("route add prohibit 10.77.0.1/32");
    let mail = Mailbox::new();
    let (mut receiver, mut sender) = (start(&left, NAME, "receiver", &mail), start(&right, NAME, "sender", &mail));
    assert!(sender.passed_within(PATIENCE * 2), "the sender");
    assert!(receiver.passed_within(PATIENCE), "the receiver");
}
