//! Hosts that vanish, pause, are late, or are forgotten by a firewall: who is gone is noticed in time, who is not is
//! waited for.

use std::time::{Duration, Instant};

use crate::support::child;
use crate::support::ends::{
    Ends, PATIENCE, accept, connect, plays, receive, send, signal, stream_in, stream_out, tell, wait_for,
};
use crate::support::faults::{Cut, Network};
use crate::support::netns::available;
use crate::support::{context, outcome, part, pattern};
use towline::host::{ApiVersion, Code, Context, Handle, Memory, Part, RecvComm, Request, SendComm};

/// 5 s, told to both ends; and what a loaded machine may add.
const VANISHED: Duration = Duration::from_secs(5);
const MARGIN: Duration = Duration::from_millis(700);

#[test]
fn a_vanished_host_is_noticed_within_the_peer_timeout_amid_transfers() {
    let end_of = |end: Option<Result<towline::host::Sizes, Code>>, since: Instant| {
        assert_eq!(end.expect("an end").expect_err("nobody is there"), Code::RemoteError);
        let after = since.elapsed();
        assert!(after <= VANISHED + MARGIN && after > Duration::from_secs(2), "after {after:?}");
    };
    let sender = || {
        let comm = connect();
        send(&comm, 1, 4 << 20);
        wait_for("cut");
        let since = Instant::now();
        // SAFETY: the pattern is static.
        let sent = unsafe { comm.post(part(pattern(2, 4 << 20), None)) }.expect("isend");
        end_of(outcome(|it| comm.test(it), sent, PATIENCE), since);
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 1, 4 << 20);
        let target = Memory::new(4 << 20);
        // SAFETY: the memory outlives the connection.
        let posted = unsafe { comm.post(&[Part::all(&target, None)]) }.expect("irecv");
        tell("ready");
        let cut = child::mailbox().join("cut");
        while !cut.exists() {
            assert!(comm.test(&posted).expect("a test").is_none());
            std::thread::sleep(Duration::from_millis(5));
        }
        let since = Instant::now();
        end_of(outcome(|it| comm.test(it), posted, PATIENCE), since);
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    std::thread::scope(|scope| {
        for (rails, recovery) in [(1, "1"), (2, "1"), (1, "0"), (2, "0")] {
            scope.spawn(move || {
                let network = Network::new(rails, 0);
                let test = "vanish::a_vanished_host_is_noticed_within_the_peer_timeout_amid_transfers";
                let ends = Ends::start_with(test, &network.hosts, "5", &[("TOWLINE_RECOVERY", recovery)]);
                ends.wait_for("ready");
                (0..rails).for_each(|rail| network.cut(rail, Cut::Silent));
                ends.tell("cut");
                ends.pass();
            });
        }
    });
}

#[test]
fn a_vanished_host_is_noticed_within_the_peer_timeout_when_nothing_is_sent() {
    let sender = || {
        let comm = connect();
        send(&comm, 1, 1 << 20);
        wait_for("cut");
        std::thread::sleep(VANISHED + MARGIN);
        let since = Instant::now();
        // SAFETY: the pattern is static.
        let end = match unsafe { comm.isend(part(pattern(2, 1000), None)) } {
            Err(code) => code,
            Ok(sent) => {
                let sent = sent.expect("a free request");
                outcome(|it| comm.test(it), sent, PATIENCE).expect("an end").expect_err("nobody is there")
            }
        };
        assert_eq!(end, Code::RemoteError);
        assert!(since.elapsed() < Duration::from_millis(500), "it was known before: {:?}", since.elapsed());
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 1, 1 << 20);
        let target = Memory::new(1000);
        // SAFETY: the memory outlives the connection.
        let posted = unsafe { comm.post(&[Part::all(&target, None)]) }.expect("irecv");
        tell("ready");
        wait_for("cut");
        let since = Instant::now();
        let end = outcome(|it| comm.test(it), posted, PATIENCE).expect("an end");
        assert_eq!(end.expect_err("nobody is there"), Code::RemoteError);
        assert!(since.elapsed() <= VANISHED + MARGIN, "after {:?}", since.elapsed());
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    std::thread::scope(|scope| {
        for recovery in ["1", "0"] {
            scope.spawn(move || {
                let network = Network::new(1, 0);
                let test = "vanish::a_vanished_host_is_noticed_within_the_peer_timeout_when_nothing_is_sent";
                let ends = Ends::start_with(test, &network.hosts, "5", &[("TOWLINE_RECOVERY", recovery)]);
                ends.wait_for("ready");
                network.cut(0, Cut::Silent);
                ends.tell("cut");
                ends.pass();
            });
        }
    });
}

#[test]
fn an_outage_of_every_rail_that_is_shorter_than_the_peer_timeout_is_waited_for() {
    if plays(stream_out, stream_in) || !available() {
        return;
    }
    let test = "vanish::an_outage_of_every_rail_that_is_shorter_than_the_peer_timeout_is_waited_for";
    std::thread::scope(|scope| {
        for rails in [1, 2] {
            scope.spawn(move || {
                let network = Network::new(rails, 0);
                let ends = Ends::start(test, &network.hosts, "12");
                ends.wait_for("ready");
                std::thread::sleep(Duration::from_millis(500));
                for how in [Cut::Silent, Cut::DownThere] {
                    (0..rails).for_each(|rail| network.cut(rail, how));
                    std::thread::sleep(Duration::from_secs(5));
                    (0..rails).for_each(|rail| network.mend(rail, how));
                    std::thread::sleep(Duration::from_secs(3));
                }
                ends.tell("stop");
                ends.pass();
            });
        }
    });
}

#[test]
fn a_receive_that_is_posted_ten_timeouts_late_goes_on() {
    let sender = || {
        let comm = connect();
        for seed in 0..20 {
            send(&comm, seed, 30_000);
        }
        send(&comm, 20, 4 << 20);
        comm.close().expect("close");
    };
    let receiver = || {
        let comm = accept();
        std::thread::sleep(Duration::from_secs(10));
        for seed in 0..20 {
            receive(&comm, seed, 30_000);
        }
        receive(&comm, 20, 4 << 20);
        comm.close().expect("close");
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let network = Network::new(1, 0);
    Ends::start("vanish::a_receive_that_is_posted_ten_timeouts_late_goes_on", &network.hosts, "1").pass();
}

#[test]
fn a_firewall_that_forgets_idle_connections_does_not_break_the_next_step() {
    let sender = || {
        let comm = connect();
        for step in 0..3 {
            wait_for(&format!("go-{step}"));
            let start = Instant::now();
            send(&comm, step, 100_000);
            send(&comm, step, 500);
            // Silence is noticed within 3 s; the rest is for connecting again beside the other tests of this file.
            assert!(start.elapsed() < Duration::from_secs(6), "step {step} took {:?}", start.elapsed());
        }
        comm.close().expect("close");
    };
    let receiver = || {
        let comm = accept();
        for step in 0..3 {
            receive(&comm, step, 100_000);
            receive(&comm, step, 500);
            tell(&format!("done-{step}"));
        }
        comm.close().expect("close");
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let test = "vanish::a_firewall_that_forgets_idle_connections_does_not_break_the_next_step";
    for with_reset in [false, true] {
        let network = Network::new(1, 0);
        let ends = Ends::start(test, &network.hosts, "60");
        for step in 0..3 {
            ends.tell(&format!("go-{step}"));
            ends.wait_for(&format!("done-{step}"));
            std::thread::sleep(Duration::from_millis(700));
            network.forget_connections(with_reset);
        }
        ends.pass();
    }
}

/// NCCL closes when its requests are done; what they said must arrive also when the path dies at this very moment.
#[test]
fn what_was_reported_done_arrives_though_a_rail_dies_at_the_close() {
    let sender = || {
        let comm = connect();
        send(&comm, 0, 4 << 20);
        tell("ready");
        wait_for("cut");
        for seed in 1..10 {
            send(&comm, seed, 3000);
        }
        comm.close().expect("close");
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 0, 4 << 20);
        for seed in 1..10 {
            receive(&comm, seed, 3000);
        }
        comm.close().expect("close");
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    for how in [Cut::Silent, Cut::Reset, Cut::HalfSilent, Cut::DownHere, Cut::DownThere] {
        let network = Network::new(2, 0);
        let test = "vanish::what_was_reported_done_arrives_though_a_rail_dies_at_the_close";
        let ends = Ends::start(test, &network.hosts, "60");
        ends.wait_for("ready");
        network.cut(0, how);
        ends.tell("cut");
        ends.pass();
    }
}

/// The other way round: the path dies when the sender has closed, or while it does, and the receiver has not looked
/// yet.
#[test]
fn what_was_reported_done_is_there_though_a_link_goes_down_after_the_close() {
    let sender = || {
        let comm = connect();
        send(&comm, 0, 4 << 20);
        tell("ready");
        wait_for("go");
        for seed in 1..10 {
            send(&comm, seed, 3000);
        }
        tell("sent");
        comm.close().expect("close");
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 0, 4 << 20);
        wait_for("cut");
        for seed in 1..10 {
            receive(&comm, seed, 3000);
        }
        comm.close().expect("close");
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let test = "vanish::what_was_reported_done_is_there_though_a_link_goes_down_after_the_close";
    for (rail, how) in [(0, Cut::DownThere), (0, Cut::DownHere), (1, Cut::DownThere), (1, Cut::DownHere)] {
        let network = Network::new(2, 0);
        let ends = Ends::start(test, &network.hosts, "60");
        ends.wait_for("ready");
        // Nothing is outstanding: the receiver's control thread has stopped polling.
        std::thread::sleep(Duration::from_millis(500));
        ends.tell("go");
        ends.wait_for("sent");
        network.cut(rail, how);
        ends.tell("cut");
        ends.pass();
    }
}

/// The receiver has everything and closes while nothing that it says arrives: its acknowledgements and its goodbye are
/// lost. The sender connects again, and hears that all is well.
#[test]
fn a_receiver_that_closes_while_its_acknowledgements_are_lost_is_believed_later() {
    const LAST: usize = 100_000;
    let sender = || {
        let comm = connect();
        send(&comm, 0, 4 << 20);
        wait_for("posted");
        tell("go");
        wait_for("cut");
        send(&comm, 1, LAST);
        tell("sent");
        comm.close().expect("close");
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 0, 4 << 20);
        let target = Memory::new(LAST);
        // SAFETY: the memory lives until the request ended.
        let request = unsafe { comm.post(&[Part::all(&target, None)]) }.expect("irecv");
        tell("posted");
        comm.wait(&request, PATIENCE).expect("the receive ends");
        assert!(target.bytes() == pattern(1, LAST), "the last message");
        comm.close().expect("close");
        tell("closed");
        wait_for("sent");
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let test = "vanish::a_receiver_that_closes_while_its_acknowledgements_are_lost_is_believed_later";
    for rails in [1, 2] {
        let network = Network::new(rails, 0);
        let ends = Ends::start(test, &network.hosts, "60");
        ends.wait_for("go");
        (0..rails).for_each(|rail| network.cut(rail, Cut::HalfSilent));
        ends.tell("cut");
        ends.wait_for("closed");
        // The farewell of a closed socket lasts 5 s.
        std::thread::sleep(Duration::from_secs(6));
        (0..rails).for_each(|rail| network.mend(rail, Cut::HalfSilent));
        ends.pass();
    }
}

/// The same with protected streams, and a close that is quick when the sender has heard it.
#[test]
fn it_is_believed_on_protected_streams_too() {
    const LONG: usize = 200_000;
    let sender = || {
        let comm = connect();
        send(&comm, 0, 4 << 20);
        wait_for("cut");
        // SAFETY: the pattern is static.
        let sent = unsafe { comm.post(part(pattern(1, LONG), None)) }.expect("isend");
        wait_for("closed");
        let start = Instant::now();
        outcome(|it| comm.test(it), sent, PATIENCE).expect("an answer").expect("all of it has arrived");
        // Not before the path was back, or nothing was tested.
        assert!(start.elapsed() > Duration::from_secs(3), "after {:?}", start.elapsed());
        let start = Instant::now();
        comm.close().expect("close");
        assert!(start.elapsed() < Duration::from_secs(3), "the close took {:?}", start.elapsed());
        tell("over");
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 0, 4 << 20);
        let target = Memory::new(LONG);
        // SAFETY: the memory lives until the request ended.
        let posted = unsafe { comm.post(&[Part::all(&target, None)]) }.expect("irecv");
        tell("posted");
        comm.wait(&posted, PATIENCE).expect("the receive ends");
        assert!(target.bytes() == pattern(1, LONG));
        comm.close().expect("close");
        tell("closed");
        wait_for("over");
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let (_dir, key) = crate::support::key_file();
    let key = key.to_str().expect("a path in UTF-8");
    for variable in [("TOWLINE_CHECKSUM", "1"), ("TOWLINE_KEY_FILE", key)] {
        let network = Network::new(1, 0);
        // So that a message of this size leaves without an acknowledgement in between.
        network.hosts.0.set("net/ipv4/tcp_slow_start_after_idle", "0");
        let test = "vanish::it_is_believed_on_protected_streams_too";
        let ends = Ends::start_with(test, &network.hosts, "60", &[variable]);
        ends.wait_for("posted");
        // The word that the receive is there must reach the sender.
        std::thread::sleep(Duration::from_millis(200));
        network.cut(0, Cut::HalfSilent);
        ends.tell("cut");
        ends.wait_for("closed");
        // Until the sender has given up its streams.
        std::thread::sleep(Duration::from_secs(5));
        network.mend(0, Cut::HalfSilent);
        ends.pass();
    }
}

/// Connections in each direction of [`connections_to_a_vanished_host_are_closed_within_one_time_budget`].
const IDLE: usize = 32;

/// All of them, each with one message behind it.
fn both_ways(role: &str, other: &str) -> (Vec<Context>, Vec<SendComm>, Vec<RecvComm>) {
    let mail = child::mailbox();
    let contexts: Vec<Context> = (0..2).map(|_| context(ApiVersion::V12)).collect();
    let listeners: Vec<_> = (0..IDLE).map(|at| contexts[at % 2].listen(0).expect("listen")).collect();
    for (at, (_, handle)) in listeners.iter().enumerate() {
        child::send(&mail, &format!("{role}-{at}"), handle.bytes());
    }
    let dial = |at: usize| {
        let mut handle = Handle::from_bytes(&child::receive(&mail, &format!("{other}-{at}")));
        contexts[at % 2].connect_within(0, &mut handle, PATIENCE).expect("connect")
    };
    let sends: Vec<SendComm> = (0..IDLE).map(dial).collect();
    let recvs: Vec<RecvComm> = listeners.iter().map(|(it, _)| it.accept_within(PATIENCE).expect("accept")).collect();
    for (at, (out, back)) in sends.iter().zip(&recvs).enumerate() {
        send(out, at, 1000);
        receive(back, at, 1000);
    }
    (contexts, sends, recvs)
}

/// A request that will not end: the close is an abort.
fn left_open(sends: &[SendComm], recvs: &[RecvComm], target: &Memory) -> Vec<Request> {
    // SAFETY: the pattern is static, and the memory outlives the connections.
    let sent = |it: &SendComm| unsafe { it.post(part(pattern(1, 1 << 20), None)) }.expect("isend");
    // SAFETY: as above.
    let received = |it: &RecvComm| unsafe { it.post(&[Part::all(target, None)]) }.expect("irecv");
    sends.iter().map(sent).chain(recvs.iter().map(received)).collect()
}

fn closes_all(role: &str, other: &str) {
    let target = Memory::new(4 << 20);
    let (contexts, sends, recvs) = both_ways(role, other);
    // Idle means that every message is acknowledged, which the control threads see to.
    std::thread::sleep(Duration::from_secs(1));
    tell(&format!("ready-{role}"));
    wait_for("cut");
    let open = std::env::var("CLOSE_ABORTS").is_ok().then(|| left_open(&sends, &recvs, &target));
    let start = Instant::now();
    for (out, back) in sends.into_iter().zip(recvs) {
        out.close().expect("close");
        back.close().expect("close");
    }
    let took = start.elapsed();
    assert!(took < Duration::from_secs(5), "{} connections were closed in {took:?}", 2 * IDLE);
    eprintln!("{role}: {} connections were closed in {took:?}", 2 * IDLE);
    drop((open, contexts));
}

/// An abort towards a vanished host took 2.5 s for each idle connection, one after the other.
#[test]
fn connections_to_a_vanished_host_are_closed_within_one_time_budget() {
    if plays(|| closes_all("sender", "receiver"), || closes_all("receiver", "sender")) || !available() {
        return;
    }
    let test = "vanish::connections_to_a_vanished_host_are_closed_within_one_time_budget";
    for more in [&[][..], &[("TOWLINE_RECOVERY", "0")], &[("CLOSE_ABORTS", "1")]] {
        let network = Network::new(1, 0);
        let ends = Ends::start_with(test, &network.hosts, "60", more);
        ends.wait_for("ready-sender");
        ends.wait_for("ready-receiver");
        network.cut(0, Cut::Silent);
        ends.tell("cut");
        ends.pass();
    }
}

/// Few descriptors, so that a connection gets its further streams with its first long message.
fn grow_late() {
    let limit = libc::rlimit { rlim_cur: 2048, rlim_max: 2048 };
    // SAFETY: plain system call; the struct outlives it.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// Longer than all of a connection's streams take together.
const LONG: usize = 16 << 20;

/// The deadline of a further stream that had not come ended the connection, though the first was being connected again.
#[test]
fn an_outage_while_a_connection_grows_is_waited_for() {
    let sender = || {
        grow_late();
        let comm = connect();
        send(&comm, 0, 1000);
        let before = crate::support::sockets();
        tell("connected");
        wait_for("cut");
        // SAFETY: the pattern is static.
        let request = unsafe { comm.post(part(pattern(1, LONG), None)) }.expect("isend");
        comm.wait(&request, PATIENCE).expect("the send ends");
        // Two further streams, which did not come during the outage.
        crate::support::eventually("the further streams", PATIENCE, || {
            (crate::support::sockets() >= before + 2).then_some(())
        });
        send(&comm, 2, LONG);
        comm.close().expect("close");
    };
    let receiver = || {
        let comm = accept();
        for (seed, size) in [(0, 1000), (1, LONG), (2, LONG)] {
            receive(&comm, seed, size);
        }
        comm.close().expect("close");
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let network = Network::new(1, 0);
    let test = "vanish::an_outage_while_a_connection_grows_is_waited_for";
    let ends = Ends::start_with(test, &network.hosts, "30", &[("TOWLINE_RECONNECT_TIMEOUT", "4")]);
    ends.wait_for("connected");
    network.cut(0, Cut::Silent);
    ends.tell("cut");
    std::thread::sleep(Duration::from_secs(8));
    network.mend(0, Cut::Silent);
    ends.pass();
}

/// Run by `.ci/run`, and by `-- --ignored long::`.
mod long {
    use super::*;

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn a_peer_that_is_stopped_for_20_s_goes_on() {
        if plays(stream_out, stream_in) || !available() {
            return;
        }
        let test = "vanish::long::a_peer_that_is_stopped_for_20_s_goes_on";
        std::thread::scope(|scope| {
            for stop_receiver in [true, false] {
                scope.spawn(move || {
                    let network = Network::new(1, 0);
                    let ends = Ends::start(test, &network.hosts, "3");
                    ends.wait_for("ready");
                    std::thread::sleep(Duration::from_millis(300));
                    let stopped = if stop_receiver { &ends.receiver } else { &ends.sender };
                    signal(stopped, libc::SIGSTOP);
                    std::thread::sleep(Duration::from_secs(20));
                    signal(stopped, libc::SIGCONT);
                    std::thread::sleep(Duration::from_secs(1));
                    ends.tell("stop");
                    ends.pass();
                });
            }
        });
    }
}
