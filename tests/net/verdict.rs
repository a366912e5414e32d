//! Dead, or only cut off? All streams of a connection end at one moment, and the peer lives: stopped, starved, or
//! without knowing of it. It is waited for, and called. A peer that was killed is given up within a second.

use std::time::{Duration, Instant};

use crate::support::ends::{
    Ends, PATIENCE, accept, connect, plays, receive, send, signal, since, stream_in, stream_out, tell, wait_for,
};
use crate::support::faults::{Cut, Network};
use crate::support::netns::available;
use crate::support::{outcome, part, pattern};
use towline::host::{Code, Memory, Part};

const ONE_STREAM: (&str, &str) = ("TOWLINE_STREAMS", "1");

/// The peer's process is stopped, and all its streams are reset. That lasts longer than a process may need to die, and
/// longer than a cut stream may need to come back.
#[test]
fn a_process_that_is_stopped_while_all_its_streams_are_reset_is_waited_for() {
    if plays(stream_out, stream_in) || !available() {
        return;
    }
    let test = "verdict::a_process_that_is_stopped_while_all_its_streams_are_reset_is_waited_for";
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

/// The only stream is reset, and the sender, which has nothing to send just then, does not hear of it: the receiver
/// calls it. Once more with encryption, where the call must prove itself like any other handshake.
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
    let test = "verdict::a_reset_that_only_the_receiver_gets_is_mended";
    let (_dir, key) = crate::support::key_file();
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

/// A firewall on the only rail that answers everything with resets, the calls too: that is what a dead process looks
/// like, but not for so long.
#[test]
fn a_firewall_that_resets_everything_for_a_moment_is_survived() {
    if plays(stream_out, stream_in) || !available() {
        return;
    }
    let test = "verdict::a_firewall_that_resets_everything_for_a_moment_is_survived";
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

/// The only stream is reset, and none can be connected: both sides say so when TOWLINE_RECONNECT_TIMEOUT is over, and
/// not before. Without recovery they do at once.
#[test]
fn a_stream_that_does_not_come_back_in_time_ends_the_connection_on_both_sides() {
    let ends_in_time = |end: Option<Result<towline::host::Sizes, Code>>| {
        let (after, code) =
            (since("cutting").expect("it was said"), end.expect("an end").expect_err("there is no stream"));
        eprintln!("{}: after {after:?}", std::env::var("TEST_CASE").expect("a case"));
        assert_eq!(code, Code::RemoteError);
        let limit =
            |name: &str| Duration::from_millis(std::env::var(name).expect("a limit").parse().expect("a number"));
        assert!(after >= limit("TEST_LEAST") && after <= limit("TEST_MOST"), "after {after:?}");
    };
    let sender = || {
        let comm = connect();
        send(&comm, 0, 1 << 20);
        wait_for("cut");
        // SAFETY: the pattern is static.
        let end = match unsafe { comm.isend(part(pattern(1, 4 << 20), None)) } {
            Err(code) => Some(Err(code)),
            Ok(sent) => outcome(|it| comm.test(it), sent.expect("a free request"), PATIENCE),
        };
        ends_in_time(end);
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 0, 1 << 20);
        let target = Memory::new(4 << 20);
        // SAFETY: the memory outlives the connection.
        let posted = unsafe { comm.post(&[Part::all(&target, None)]) }.expect("irecv");
        tell("ready");
        wait_for("cut");
        ends_in_time(outcome(|it| comm.test(it), posted, PATIENCE));
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let test = "verdict::a_stream_that_does_not_come_back_in_time_ends_the_connection_on_both_sides";
    std::thread::scope(|scope| {
        for (recovery, least, most) in [("1", "1500", "3500"), ("0", "0", "1000")] {
            scope.spawn(move || {
                let network = Network::new(1, 0);
                let case = format!("TOWLINE_RECOVERY={recovery}");
                let variables = [
                    ONE_STREAM,
                    ("TOWLINE_RECONNECT_TIMEOUT", "2"),
                    ("TOWLINE_RECOVERY", recovery),
                    ("TEST_LEAST", least),
                    ("TEST_MOST", most),
                    ("TEST_CASE", &case),
                ];
                let ends = Ends::start_with(test, &network.hosts, "60", &variables);
                ends.wait_for("ready");
                std::thread::sleep(Duration::from_millis(300));
                ends.tell("cutting");
                network.drop_new_connections();
                Network::reset_connections(&network.hosts.0);
                ends.tell("cut");
                ends.pass();
            });
        }
    });
}

/// What a survivor has found out so long after the other's death.
fn noticed(after: Duration) {
    eprintln!("{}: noticed after {after:?}", std::env::var("TEST_CASE").expect("a case"));
    let limit = std::env::var("TEST_LIMIT").expect("a limit").parse().expect("milliseconds");
    assert!(after < Duration::from_millis(limit), "noticed after {after:?}");
}

/// The ends of the tests below: one is killed, and the other must notice that within `TEST_LIMIT` milliseconds. With
/// `TEST_BUSY` amid transfers, otherwise with one request, of which nothing has moved yet.
fn plays_a_killing() -> bool {
    let survivor_waits = |post: &dyn Fn() -> Option<Result<towline::host::Sizes, Code>>| {
        tell("ready");
        wait_for("killed");
        let started = Instant::now();
        assert_eq!(post().expect("an end").expect_err("nobody is there"), Code::RemoteError);
        noticed(started.elapsed());
        tell("noticed");
    };
    let (busy, victim) = (std::env::var("TEST_BUSY").is_ok(), std::env::var("TEST_VICTIM").unwrap_or_default());
    // Transfers without a pause until the other is gone.
    let plays_on = |exchange: &mut dyn FnMut(usize) -> Result<(), Code>| {
        let end = (1..).find_map(|number| {
            if number == 3 && crate::support::child::role().as_ref() == Some(&victim) {
                tell("ready");
            }
            exchange(number).err()
        });
        assert_eq!(end, Some(Code::RemoteError));
        wait_for("killed");
        noticed(since("killed").expect("it was said"));
    };
    let ended = |sizes: Option<Result<towline::host::Sizes, Code>>| sizes.expect("an end").map(|_| ());
    let sender = || {
        let comm = connect();
        send(&comm, 0, 4 << 20);
        // SAFETY: the pattern is static.
        let post = |seed, size| unsafe { comm.post(part(pattern(seed, size), None)) };
        if busy {
            return plays_on(&mut |number| {
                let posted = (0..4).map(|at| post(number * 4 + at, 3 << 20)).collect::<Result<Vec<_>, _>>()?;
                posted.into_iter().try_for_each(|sent| ended(outcome(|it| comm.test(it), sent, PATIENCE)))
            });
        }
        if victim == "receiver" {
            let sent = std::cell::Cell::new(Some(post(1, 16 << 20).expect("isend")));
            return survivor_waits(&|| outcome(|it| comm.test(it), sent.take().expect("once"), PATIENCE));
        }
        wait_for("noticed");
    };
    let receiver = || {
        let comm = accept();
        receive(&comm, 0, 4 << 20);
        let targets: Vec<Memory> = (0..4).map(|_| Memory::new(3 << 20)).collect();
        // SAFETY: the memory outlives the connection.
        let post = |target| unsafe { comm.post(&[Part::all(target, None)]) };
        if busy {
            return plays_on(&mut |_| {
                let posted = targets.iter().map(post).collect::<Result<Vec<_>, _>>()?;
                posted.into_iter().try_for_each(|received| ended(outcome(|it| comm.test(it), received, PATIENCE)))
            });
        }
        if victim == "sender" {
            let posted = std::cell::Cell::new(Some(post(&targets[0]).expect("irecv")));
            return survivor_waits(&|| outcome(|it| comm.test(it), posted.take().expect("once"), PATIENCE));
        }
        wait_for("noticed");
    };
    plays(sender, receiver)
}

/// Kills the sender or the receiver, and waits until the other has noticed.
fn kill_one(test: &str, network: &Network, victim: &str, more: &[(&str, &str)], before: impl FnOnce()) {
    let mut ends = Ends::start_with(test, &network.hosts, "60", &[&[("TEST_VICTIM", victim)], more].concat());
    ends.wait_for("ready");
    before();
    let (victim, survivor) = if victim == "sender" {
        (&mut ends.sender, &mut ends.receiver)
    } else {
        (&mut ends.receiver, &mut ends.sender)
    };
    victim.kill();
    crate::support::child::send(ends.mail.path(), "killed", b"");
    assert!(survivor.passed_within(PATIENCE), "the survivor");
}

#[test]
fn a_killed_process_is_noticed_within_a_second() {
    if plays_a_killing() || !available() {
        return;
    }
    let test = "verdict::a_killed_process_is_noticed_within_a_second";
    for (rails, recovery) in [(1, "1"), (2, "1"), (2, "0")] {
        for victim in ["sender", "receiver"] {
            let network = Network::new(rails, 0);
            let case = format!("{victim} killed, {rails} rails, TOWLINE_RECOVERY={recovery}");
            let more = [("TEST_LIMIT", "1000"), ("TEST_CASE", &case), ("TOWLINE_RECOVERY", recovery)];
            kill_one(test, &network, victim, &more, || ());
        }
    }
}

/// Kills each end in a network of its own, for a moment and for long after one of two rails was cut in each of these
/// ways, or not cut. `limits`: within which that is noticed, in milliseconds, when it was and when it was not.
fn kill_amid_cuts(test: &str, cuts: &[Option<Cut>], limits: [&str; 2], more: &[(&str, &str)]) {
    std::thread::scope(|scope| {
        for victim in ["sender", "receiver"] {
            for &how in cuts {
                for ms in [300, 5000] {
                    scope.spawn(move || {
                        // A dozen of them run at the same time.
                        let network = Network::new(2, 400);
                        let case = format!("{victim} killed {ms} ms after {how:?}");
                        let limit = limits[usize::from(how.is_none())];
                        let more = [more, &[("TEST_LIMIT", limit), ("TEST_CASE", &case)]].concat();
                        kill_one(test, &network, victim, &more, || {
                            how.inspect(|how| network.cut(1, *how));
                            std::thread::sleep(Duration::from_millis(ms));
                        });
                    });
                }
            }
        }
    });
}

const CUTS: [Option<Cut>; 3] = [Some(Cut::DownHere), Some(Cut::DownThere), Some(Cut::Silent)];

/// One of two rails is down, for a moment or for long, when the peer's process is killed: nobody refuses there, and the
/// streams over a rail that is silent do not end.
#[test]
fn a_killed_process_is_noticed_while_a_rail_is_down() {
    if plays_a_killing() || !available() {
        return;
    }
    // It may be reset, too, if it has not read the last acknowledgements.
    kill_amid_cuts("verdict::a_killed_process_is_noticed_while_a_rail_is_down", &CUTS, ["2000", "1000"], &[]);
}

/// Amid transfers the kernel of a process that dies resets its streams, as a firewall could, which is known from it by
/// what becomes of new connections. That takes longer when nothing is heard over a rail.
#[test]
fn a_process_that_is_killed_amid_transfers_is_noticed_whatever_the_rails_do() {
    if plays_a_killing() || !available() {
        return;
    }
    let test = "verdict::a_process_that_is_killed_amid_transfers_is_noticed_whatever_the_rails_do";
    kill_amid_cuts(test, &[&[None], &CUTS[..]].concat(), ["2000", "1000"], &[("TEST_BUSY", "1")]);
}

/// All rails are silent for a while. When that ends, one answers everything with resets, one stays silent, and only the
/// third leads anywhere: what was silent before the others refused proves nothing.
#[test]
fn an_outage_that_ends_on_one_rail_while_another_refuses_is_survived() {
    const LONGEST: usize = 1 << 20;
    let sender = || {
        let comm = connect();
        let enough = crate::support::child::mailbox().join("enough");
        let mut number = 0;
        while !enough.exists() {
            send(&comm, number, LONGEST);
            number += 1;
            if number == 5 {
                tell("ready");
            }
        }
        // The last one, by its length.
        send(&comm, number, 8);
    };
    let receiver = || {
        let (comm, target) = (accept(), Memory::new(LONGEST));
        for number in 0.. {
            // SAFETY: the memory outlives the connection.
            let posted = unsafe { comm.post(&[Part::all(&target, None)]) }.expect("irecv");
            let size = comm.wait(&posted, PATIENCE).expect("it is no death")[0] as usize;
            assert!(target.bytes()[..size] == *pattern(number, size), "message {number}");
            if size < LONGEST {
                break;
            }
        }
    };
    if plays(sender, receiver) || !available() {
        return;
    }
    let test = "verdict::an_outage_that_ends_on_one_rail_while_another_refuses_is_survived";
    let network = Network::new(3, 0);
    let ends = Ends::start_with(test, &network.hosts, "60", &[]);
    ends.wait_for("ready");
    let pause = |ms| std::thread::sleep(Duration::from_millis(ms));
    network.cut(0, Cut::Reset);
    pause(300);
    // In this order: no stream comes back over the first rail in between, so it is remembered that it was cut.
    network.cut(0, Cut::DownThere);
    (1..3).for_each(|rail| network.cut(rail, Cut::Silent));
    pause(7000);
    network.mend(0, Cut::DownThere);
    network.mend(2, Cut::Silent);
    pause(4000);
    ends.tell("enough");
    ends.pass();
}
