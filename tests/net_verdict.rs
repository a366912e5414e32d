//! Dead, or only cut off? All streams of a connection end at one moment, and the peer lives: stopped, starved, or without
//! knowing of it. It is waited for, and called. A peer that was killed is given up within a second.

mod support;

use std::time::{Duration, Instant};

use support::ends::{
    Ends, PATIENCE, accept, connect, plays, receive, send, signal, stream_in, stream_out, tell, wait_for,
};
use support::faults::Network;
use support::netns::available;
use support::{outcome, part, pattern};
use towline::host::{Code, Memory, Part};

const ONE_STREAM: (&str, &str) = ("TOWLINE_STREAMS", "1");

/// The peer's process is stopped, and all its streams are reset. That lasts longer than a process may need to die, and
/// longer than a cut stream may need to come back.
#[test]
fn a_process_that_is_stopped_while_all_its_streams_are_reset_is_waited_for() {
    if plays(stream_out, stream_in) || !available() {
        return;
    }
    let test = "a_process_that_is_stopped_while_all_its_streams_are_reset_is_waited_for";
    let stopped_for = |rails: usize, stop_sender: bool, seconds: u64| {
        let network = Network::new(rails, 0);
        let streams = if rails == 1 { ONE_STREAM } else { ("TOWLINE_STREAMS", "3") };
        let variables = [streams, ("TOWLINE_RECONNECT_TIMEOUT", "2")];
        let ends = Ends::start_with(test, &network.hosts, "30", &variables);
        ends.wait_for("ready");
        std::thread::sleep(Duration::from_millis(300));
        let (stopped, host) =
            if stop_sender { (&ends.sender, &network.hosts.0) } else { (&ends.receiver, &network.hosts.1) };
        signal(stopped, libc::SIGSTOP);
        Network::reset_connections(host);
        std::thread::sleep(Duration::from_secs(seconds));
        signal(stopped, libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(1500));
        ends.tell("stop");
        ends.pass();
    };
    std::thread::scope(|scope| {
        for (rails, stop_sender, seconds) in [(1, true, 3), (2, true, 3), (1, true, 6), (1, false, 6), (2, false, 6)] {
            scope.spawn(move || stopped_for(rails, stop_sender, seconds));
        }
    });
}

/// The only stream is reset, and the sender, which has nothing to send just then, does not hear of it: the receiver calls
/// it. Once more with encryption, where the call must prove itself like any other handshake.
#[test]
fn a_reset_that_only_the_receiver_gets_is_mended() {
    const LONG: usize = 1 << 20;
    let sender = || {
        let comm = connect();
        send(&comm, 0, LONG);
        wait_for("cut");
        // Longer than TOWLINE_RECONNECT_TIMEOUT, in which nothing is asked on a stream with nothing to send.
        std::thread::sleep(Duration::from_secs(4));
        let start = Instant::now();
        send(&comm, 1, LONG);
        let took = start.elapsed();
        assert!(took < Duration::from_millis(700), "it was mended before, and yet this took {took:?}");
        comm.close().expect("close");
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 0, LONG);
        tell("ready");
        wait_for("cut");
        // The announcement of so long a receive is the packet that is answered with a reset.
        receive(&comm, 1, LONG);
        comm.close().expect("close");
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let test = "a_reset_that_only_the_receiver_gets_is_mended";
    let dir = tempfile::tempdir().expect("a directory for temporary files");
    let key = dir.path().join("key");
    std::fs::write(&key, [0x5A; 32]).expect("a file");
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("a mode");
    let key = key.to_str().expect("a path in UTF-8");
    for (family, more) in [("AF_INET", ("TOWLINE_CHECKSUM", "1")), ("AF_INET6", ("TOWLINE_KEY_FILE", key))] {
        let network = Network::new(1, 0);
        let variables = [ONE_STREAM, ("TOWLINE_RECONNECT_TIMEOUT", "2"), ("NCCL_SOCKET_FAMILY", family), more];
        let ends = Ends::start_with(test, &network.hosts, "60", &variables);
        ends.wait_for("ready");
        // Until nothing is on the way any more.
        std::thread::sleep(Duration::from_millis(300));
        network.reject_at(&network.hosts.0);
        ends.tell("cut");
        ends.pass();
    }
}

/// A firewall on the only rail that answers everything with resets, the calls too: that is what a dead process looks like,
/// but not for so long.
#[test]
fn a_firewall_that_resets_everything_for_a_moment_is_survived() {
    if plays(stream_out, stream_in) || !available() {
        return;
    }
    let test = "a_firewall_that_resets_everything_for_a_moment_is_survived";
    let network = Network::new(1, 0);
    network.allow_moments();
    let ends = Ends::start_with(test, &network.hosts, "30", &[ONE_STREAM]);
    ends.wait_for("ready");
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(500));
        network.reset_for(0, 300);
        std::thread::sleep(Duration::from_millis(600));
    }
    std::thread::sleep(Duration::from_millis(1000));
    ends.tell("stop");
    ends.pass();
}

#[test]
fn a_killed_process_is_noticed_within_a_second() {
    let failing = |started: Instant, end: Option<Result<towline::host::Sizes, Code>>| {
        assert_eq!(end.expect("an end").expect_err("nobody is there"), Code::RemoteError);
        let after = started.elapsed();
        eprintln!("noticed after {after:?}");
        assert!(after < Duration::from_millis(1000), "noticed after {after:?}");
        tell("noticed");
    };
    let survivor_waits = |post: &dyn Fn() -> Option<Result<towline::host::Sizes, Code>>| {
        tell("ready");
        wait_for("killed");
        failing(Instant::now(), post());
    };
    let sender = || {
        let comm = connect();
        send(&comm, 0, 4 << 20);
        if std::env::var("TEST_VICTIM").as_deref() == Ok("receiver") {
            // SAFETY: the pattern is static.
            let sent = unsafe { comm.post(part(pattern(1, 16 << 20), None)) }.expect("isend");
            let sent = std::cell::Cell::new(Some(sent));
            return survivor_waits(&|| outcome(|it| comm.test(it), sent.take().expect("once"), PATIENCE));
        }
        wait_for("noticed");
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 0, 4 << 20);
        if std::env::var("TEST_VICTIM").as_deref() == Ok("sender") {
            let target = Memory::new(1 << 20);
            // SAFETY: the memory outlives the connection.
            let posted = unsafe { comm.post(&[Part::all(&target, None)]) }.expect("irecv");
            let posted = std::cell::Cell::new(Some(posted));
            return survivor_waits(&|| outcome(|it| comm.test(it), posted.take().expect("once"), PATIENCE));
        }
        wait_for("noticed");
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let test = "a_killed_process_is_noticed_within_a_second";
    for rails in [1, 2] {
        for victim in ["sender", "receiver"] {
            let network = Network::new(rails, 0);
            let mut ends = Ends::start_with(test, &network.hosts, "60", &[("TEST_VICTIM", victim)]);
            ends.wait_for("ready");
            let (victim, survivor) = if victim == "sender" {
                (&mut ends.sender, &mut ends.receiver)
            } else {
                (&mut ends.receiver, &mut ends.sender)
            };
            victim.kill();
            support::child::send(ends.mail.path(), "killed", b"");
            assert!(survivor.passed_within(PATIENCE), "the survivor");
        }
    }
}
