//! Paths that networks have and laboratories have not: long ones, and those that carry small packets and lose full
//! ones.

use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, Mailbox};
use crate::support::distance::{Path, far_hosts};
use crate::support::netns::{Namespace, available};
use crate::support::{PATIENCE, context, eventually, part, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Handle, Memory, Part};

/// A process on a long path needs its time.
const LONG: Duration = Duration::from_secs(100);

/// The control thread polls the streams of an open connection every 0.4 s, and says then what it has learnt.
const TOLD: Duration = Duration::from_secs(1);

fn start(host: &Namespace, name: &str, role: &str, mail: &Mailbox, variables: &[(&str, &str)]) -> Guarded {
    let mut command = host.command(name, role);
    // What the library says at INFO is looked at, too.
    let log = [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "NET"), ("NCCL_SOCKET_IFNAME", "rail")];
    command.env(child::MAILBOX, mail.path()).envs(log).envs(variables.iter().copied());
    Guarded::start(command)
}

/// One message of each of these sizes, from the host that connects to the one that listens.
fn receive(lengths: &[usize], within: Duration) {
    let context = context(ApiVersion::V12);
    let (listener, handle) = context.listen(0).expect("listen");
    child::send(&child::mailbox(), "handle", handle.bytes());
    let recv = eventually("a connection", within, || listener.accept().expect("accept"));
    for &length in lengths {
        let target = Memory::new(length);
        // SAFETY: the memory lives until the request ended.
        let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        recv.wait(&request, within).expect("the receive ends");
        assert!(target.bytes() == pattern(1, length));
    }
    std::thread::sleep(TOLD);
    recv.close().expect("close");
}

/// Sends them. How long the slowest took, from its posting to its end.
fn send(lengths: &[usize], within: Duration) -> Duration {
    let context = context(ApiVersion::V12);
    let mut handle = Handle::from_bytes(&child::receive(&child::mailbox(), "handle"));
    let send = context.connect_within(0, &mut handle, within).expect("connect");
    let mut slowest = Duration::ZERO;
    for &length in lengths {
        let start = Instant::now();
        // SAFETY: the pattern is static.
        let request = unsafe { send.post(part(pattern(1, length), None)) }.expect("isend");
        send.wait(&request, within).expect("the send ends");
        slowest = slowest.max(start.elapsed());
    }
    std::thread::sleep(TOLD);
    send.close().expect("close");
    slowest
}

/// Nothing comes up over a round trip far above 3 s, and the message says how long was waited, and which paths are
/// supported.
#[test]
fn a_round_trip_that_is_too_long_is_said_clearly() {
    const NAME: &str = "paths::a_round_trip_that_is_too_long_is_said_clearly";
    let _watchdog = watchdog(90);
    match child::role().as_deref() {
        Some("receiver") => {
            let context = context(ApiVersion::V12);
            let (listener, handle) = context.listen(0).expect("listen");
            child::send(&child::mailbox(), "handle", handle.bytes());
            while !child::mailbox().join("over").exists() {
                assert!(listener.accept().expect("accept").is_none());
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        Some("sender") => {
            let log = Capture::start();
            let context = context(ApiVersion::V12);
            let mut handle = Handle::from_bytes(&child::receive(&child::mailbox(), "handle"));
            let start = Instant::now();
            while context.connect(0, &mut handle).is_ok_and(|conn| conn.is_none()) {
                assert!(start.elapsed() < Duration::from_secs(40), "it is tried for ever");
                std::thread::sleep(Duration::from_millis(1));
            }
            for part in ["the peer did not answer within ", "round trip above 3 s", "10.77.0.1:"] {
                assert!(log.contains(part), "{part}: {:?}", log.records());
            }
            return;
        }
        _ => {}
    }
    if !available() {
        return;
    }
    let (left, right, _paths) = far_hosts(&[Path { delay: Duration::from_secs(6), ..Path::default() }]);
    let mail = Mailbox::new();
    let variables = [("TOWLINE_CONNECT_TIMEOUT", "20")];
    let mut receiver = start(&left, NAME, "receiver", &mail, &variables);
    let mut sender = start(&right, NAME, "sender", &mail, &variables);
    assert!(sender.passed_within(LONG), "the sender");
    child::send(mail.path(), "over", b"");
    assert!(receiver.passed_within(LONG), "the receiver");
}

/// An MTU of 9000 at the hosts, of 1500 on the way, and no router reports it: the handshake passes, and a full packet never
/// does ("hangs at the first big message"). Plain TCP waits for ever, or recovers after 6.6 s with tcp_mtu_probing=1.
#[test]
fn a_path_that_loses_full_packets_goes_on_with_smaller_ones() {
    const NAME: &str = "paths::a_path_that_loses_full_packets_goes_on_with_smaller_ones";
    const LENGTHS: &[usize] = &[1000, 1_000_000, 1_000_000, 1000];
    let _watchdog = watchdog(120);
    match child::role().as_deref() {
        Some("receiver") => return receive(LENGTHS, PATIENCE),
        Some("sender") => {
            let log = Capture::start();
            let slowest = send(LENGTHS, PATIENCE);
            let records = log.records();
            // Two epochs of 2.4 s each; a stream that was idle meanwhile may share the end of another on its path after
            // that. Plain TCP with tcp_mtu_probing=1 is back after 6.6 s.
            for stream in 0..3 {
                let broke = |text: &str| text.contains(&format!("stream {stream} to ")) && text.contains(" broke (");
                let epochs = records.iter().filter(|line| broke(&line.text)).count();
                assert!(epochs <= 3, "stream {stream} was lost {epochs} times: {records:?}");
            }
            assert!(slowest < Duration::from_secs(15), "{slowest:?}");
            let told = records.iter().filter(|line| line.is_warning() && line.text.contains("small packets pass to "));
            let told: Vec<_> = told.collect();
            assert!(told.len() == 1 && told[0].text.contains("look at the MTU"), "{records:?}");
            return;
        }
        _ => {}
    }
    if !available() {
        return;
    }
    for (streams, probing) in [("1", "0"), ("3", "0"), ("3", "1")] {
        let (left, right, _paths) = far_hosts(&[Path { mtu: 9000, largest: 1500, ..Path::default() }]);
        right.set("net/ipv4/tcp_mtu_probing", probing);
        let (mail, variables) = (Mailbox::new(), [("TOWLINE_STREAMS", streams)]);
        let mut receiver = start(&left, NAME, "receiver", &mail, &variables);
        let mut sender = start(&right, NAME, "sender", &mail, &variables);
        assert!(sender.passed_within(PATIENCE * 2), "the sender, {streams} streams, probing {probing}");
        assert!(receiver.passed_within(PATIENCE), "the receiver, {streams} streams");
    }
}

/// The same on one of two rails, and a path that not even the smallest packets with data pass.
#[test]
fn a_rail_that_delivers_nothing_is_left_out() {
    const NAME: &str = "paths::a_rail_that_delivers_nothing_is_left_out";
    // Until each epoch in vain has met a message: with nothing outstanding nothing is learnt.
    const LENGTHS: &[usize] = &[1_000_000; 300];
    let _watchdog = watchdog(120);
    match child::role().as_deref() {
        Some("receiver") => return receive(LENGTHS, PATIENCE),
        Some("sender") => {
            let log = Capture::start();
            send(LENGTHS, PATIENCE);
            let left_out =
                "full ones do not: look at the MTU of the path, and at firewalls on it; this rail is left out";
            assert!(log.contains(" over rail1, ") && log.contains(left_out), "{:?}", log.records());
            return;
        }
        _ => {}
    }
    if !available() {
        return;
    }
    let (left, right, _paths) = far_hosts(&[Path::default(), Path { mtu: 9000, largest: 570, ..Path::default() }]);
    let (mail, variables) = (Mailbox::new(), [("TOWLINE_RAILS", "all"), ("TOWLINE_STREAMS", "4")]);
    let mut receiver = start(&left, NAME, "receiver", &mail, &variables);
    let mut sender = start(&right, NAME, "sender", &mail, &variables);
    assert!(sender.passed_within(PATIENCE * 2), "the sender");
    assert!(receiver.passed_within(PATIENCE), "the receiver");
}

/// A firewall or a proxy that lets handshakes pass and stops data: streams came back for ever, and no timeout ended
/// that.
#[test]
fn a_path_that_passes_handshakes_only_is_an_error_in_time() {
    const NAME: &str = "paths::a_path_that_passes_handshakes_only_is_an_error_in_time";
    let _watchdog = watchdog(120);
    match child::role().as_deref() {
        Some("receiver") => {
            let context = context(ApiVersion::V12);
            let (listener, handle) = context.listen(0).expect("listen");
            child::send(&child::mailbox(), "handle", handle.bytes());
            let recv = eventually("a connection", PATIENCE, || listener.accept().expect("accept"));
            let target = Memory::new(1_000_000);
            // SAFETY: the memory lives until the request ended.
            let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
            recv.wait(&request, PATIENCE * 2).expect_err("nothing arrives");
            return;
        }
        Some("sender") => {
            let log = Capture::start();
            let context = context(ApiVersion::V12);
            let mut handle = Handle::from_bytes(&child::receive(&child::mailbox(), "handle"));
            let send = context.connect_within(0, &mut handle, PATIENCE).expect("connect");
            let start = Instant::now();
            // SAFETY: the pattern is static.
            let request = unsafe { send.post(part(pattern(1, 1_000_000), None)) }.expect("isend");
            send.wait(&request, PATIENCE * 2).expect_err("nothing arrives");
            assert!(start.elapsed() < Duration::from_secs(20), "after {:?}", start.elapsed());
            // The control thread writes the line, after the requests can be seen to have failed.
            for part in ["nothing arrived over them", "small packets pass, full ones do not", "10.77.0.1:"] {
                eventually(part, PATIENCE, || log.contains(part).then_some(()));
            }
            return;
        }
        _ => {}
    }
    if !available() {
        return;
    }
    let (left, right, _paths) = far_hosts(&[Path { mtu: 9000, largest: 570, ..Path::default() }]);
    let (mail, variables) = (Mailbox::new(), [("TOWLINE_PEER_TIMEOUT", "10")]);
    let mut receiver = start(&left, NAME, "receiver", &mail, &variables);
    let mut sender = start(&right, NAME, "sender", &mail, &variables);
    assert!(sender.passed_within(PATIENCE * 2), "the sender");
    assert!(receiver.passed_within(PATIENCE), "the receiver");
}

/// Run by `.ci/run`, and by `-- --ignored long::`.
mod long {
    use super::*;

    /// Round trips above a second: each try to connect lasted 2 s, so none came up ("hangs at init over Tailscale").
    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn a_round_trip_of_three_seconds_with_losses_is_only_slow() {
        const NAME: &str = "paths::long::a_round_trip_of_three_seconds_with_losses_is_only_slow";
        const LENGTHS: &[usize] = &[1000, 100_000];
        let _watchdog = watchdog(200);
        match child::role().as_deref() {
            Some("receiver") => return receive(LENGTHS, LONG),
            Some("sender") => {
                let log = Capture::start();
                send(LENGTHS, LONG);
                assert!(!log.contains(" broke ("), "{:?}", log.records());
                return;
            }
            _ => {}
        }
        if !available() {
            return;
        }
        // Both at once: they only wait.
        std::thread::scope(|scope| {
            for lost_ppm in [0, 30_000] {
                scope.spawn(move || {
                    let (left, right, _paths) =
                        far_hosts(&[Path { delay: Duration::from_millis(1500), lost_ppm, ..Path::default() }]);
                    let mail = Mailbox::new();
                    let variables = [("TOWLINE_STREAMS", "2")];
                    let mut receiver = start(&left, NAME, "receiver", &mail, &variables);
                    let mut sender = start(&right, NAME, "sender", &mail, &variables);
                    assert!(sender.passed_within(LONG), "the sender, {lost_ppm} ppm lost");
                    assert!(receiver.passed_within(LONG), "the receiver, {lost_ppm} ppm lost");
                });
            }
        });
    }
}
