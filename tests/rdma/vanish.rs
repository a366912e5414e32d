//! Peers that are stopped are waited for; peers that die and hosts that vanish are noticed, whether anything is under
//! way or not; and what becomes of the control channel's socket meanwhile is told apart from both.
//!
//! A host vanishes when every packet to it and from it is dropped, those of the control channel too: on SoftRoCE's two
//! links, and on the loopback device, which carries TCP between addresses of one machine.

#![cfg(feature = "rdma")]

use std::fmt::Debug;
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, Mailbox};
use crate::support::ends::{
    self, PATIENCE, plays, receive, send, signal, since, stream_in, stream_out, tell, wait_for,
};
use crate::support::machine::{TcpEnd, forget_connections, machine, remember_connections, reset};
use crate::support::{at_end, context, number, part, pattern};
use towline::host::{ApiVersion, Code, Handle, Memory, Part, RecvComm, Request, SendComm, Sizes};

/// TOWLINE_PEER_TIMEOUT of both ends; and what a busy computer may add in an emulated machine.
const VANISHED: Duration = Duration::from_secs(5);
const MARGIN: Duration = Duration::from_millis(1500);

/// Within a second the death of a process is noticed; and what a busy computer may add.
const DEATH: Duration = Duration::from_millis(1500);

/// 67 ms, three times, where the device itself is to find out: SoftRoCE takes seven times for "for ever".
const IMPATIENT: [(&str, &str); 2] = [("NCCL_IB_TIMEOUT", "14"), ("NCCL_IB_RETRY_CNT", "3")];

/// The two ends of test `name`, the sender on the first device and the receiver on the second.
fn start(name: &str, mail: &Mailbox, variables: &[(&str, &str)]) -> [Guarded; 2] {
    [("sender", "=rxe0"), ("receiver", "=rxe1")].map(|(role, device)| {
        let mut command = child::command(name, role);
        command.envs(variables.iter().copied()).env("NCCL_IB_HCA", device).env(child::MAILBOX, mail.path());
        // Why an end fails.
        command.env("NCCL_DEBUG", "WARN");
        Guarded::start(command)
    })
}

/// What is under way on a connection, one for each, when the host vanishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scene {
    /// Messages, one after the other.
    Messages,
    /// A receive is posted and nothing is sent.
    Receive,
    /// Nothing; then a message is sent, and its receive posted.
    Afterwards,
    /// Nothing, until it must be known.
    Nothing,
}

const SCENES: [Scene; 4] = [Scene::Messages, Scene::Receive, Scene::Afterwards, Scene::Nothing];

/// The sending ends of connections with these names, each with a message of so many bytes behind it.
fn connect(names: impl IntoIterator<Item: Debug>, size: usize) -> Vec<SendComm> {
    let context = context(ApiVersion::V12);
    let connect = |name| {
        let mut handle = Handle::from_bytes(&child::receive(&child::mailbox(), &format!("{name:?}")));
        let comm = context.connect_within(0, &mut handle, PATIENCE).expect("connect");
        send(&comm, 1, size);
        comm
    };
    names.into_iter().map(connect).collect()
}

/// The receiving ends.
fn accept(names: impl IntoIterator<Item: Debug>, size: usize) -> Vec<RecvComm> {
    let context = context(ApiVersion::V12);
    let accept = |name| {
        let (listener, handle) = context.listen(0).expect("listen");
        child::send(&child::mailbox(), &format!("{name:?}"), handle.bytes());
        let comm = listener.accept_within(PATIENCE).expect("accept");
        receive(&comm, 1, size);
        comm
    };
    names.into_iter().map(accept).collect()
}

/// Waits for a request and polls rarely: the control thread's polls are enough for the end to be noticed.
fn wait(test: impl Fn(&Request) -> Result<Option<Sizes>, Code>, request: &Request) -> Result<(), Code> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        match test(request)? {
            Some(_) => return Ok(()),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    panic!("a request hangs");
}

/// How long ago the host vanished, if it has.
fn since_the_cut() -> Option<Duration> {
    since("cut")
}

/// Plays a scene until the connection has failed, and looks when and how. `transfer` moves one message.
fn play(scene: Scene, transfer: impl Fn() -> Result<(), Code>) {
    match scene {
        Scene::Messages | Scene::Receive => {}
        Scene::Afterwards => wait_for("cut"),
        Scene::Nothing => {
            wait_for("cut");
            std::thread::sleep(VANISHED + MARGIN);
        }
    }
    let start = Instant::now();
    let end = loop {
        let over = since_the_cut().is_some();
        match transfer() {
            Err(code) => break code,
            Ok(()) => assert!(!over, "{scene:?}: nobody is there, and a transfer ended well"),
        }
    };
    let after = since_the_cut().expect("nothing fails before");
    eprintln!("{}: {scene:?}: {end:?} after {after:?}", child::role().unwrap_or_default());
    assert_eq!(end, Code::RemoteError, "{scene:?}");
    if scene == Scene::Nothing {
        assert!(start.elapsed() < Duration::from_millis(500), "it was known before, not {:?} later", start.elapsed());
    } else {
        assert!(after < VANISHED + MARGIN, "{scene:?}: {after:?} after the cut");
    }
}

fn sends() {
    let comms = connect(SCENES, 100_000);
    tell("connected");
    std::thread::scope(|scope| {
        for (scene, comm) in SCENES.into_iter().zip(&comms) {
            let transfer = move || {
                // SAFETY: the pattern is static.
                let sent = unsafe { comm.isend(part(pattern(2, 300_000), None)) }?.expect("a free request");
                wait(|it| comm.test(it), &sent)
            };
            // That one's sender sends nothing before it must know.
            let scene = if scene == Scene::Receive { Scene::Nothing } else { scene };
            scope.spawn(move || play(scene, transfer));
        }
    });
    closes(comms, SendComm::close);
}

fn receives() {
    let comms = accept(SCENES, 100_000);
    tell("accepted");
    let targets = SCENES.map(|_| Memory::new(300_000));
    std::thread::scope(|scope| {
        for ((scene, comm), target) in SCENES.into_iter().zip(&comms).zip(&targets) {
            let transfer = move || {
                // SAFETY: the memory outlives the connections.
                let posted = unsafe { comm.irecv(&[Part::all(target, None)]) }?.expect("a free request");
                if scene == Scene::Receive {
                    tell("posted");
                }
                wait(|it| comm.test(it), &posted)
            };
            scope.spawn(move || play(scene, transfer));
        }
    });
    closes(comms, RecvComm::close);
}

/// Closes what has failed, which must not wait for the peer.
fn closes<C>(comms: Vec<C>, close: impl Fn(C) -> Result<(), Code>) {
    let start = Instant::now();
    for comm in comms {
        close(comm).expect("close");
    }
    let took = start.elapsed();
    eprintln!("{}: closed within {took:?}", child::role().unwrap_or_default());
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_vanished_host_is_noticed_within_the_peer_timeout() {
    const NAME: &str = "vanish::a_vanished_host_is_noticed_within_the_peer_timeout";
    if plays(sends, receives) {
        return;
    }
    let timeout = [("TOWLINE_PEER_TIMEOUT", "5")];
    let without = [("TOWLINE_RECOVERY", "0")];
    // With the defaults the device retransmits for half a minute: it is not what notices.
    let variants: [&[(&str, &str)]; 3] = [&[], &without, &IMPATIENT];
    let running = variants.map(|variables| {
        let mail = Mailbox::new();
        let ends = start(NAME, &mail, &[&timeout, variables].concat());
        (mail, ends)
    });
    for (mail, _) in &running {
        ["connected", "accepted", "posted"].into_iter().for_each(|word| drop(child::receive(mail.path(), word)));
    }
    std::thread::sleep(Duration::from_millis(500));
    let _mended = vanish();
    running.iter().for_each(|(mail, _)| child::send(mail.path(), "cut", b""));
    for (variables, (_, ends)) in variants.iter().zip(running) {
        for mut end in ends {
            assert!(end.passed_within(PATIENCE), "an end with {variables:?}");
        }
    }
}

/// Drops every packet between the two ends, until the result is dropped.
fn vanish() -> impl Drop {
    let everywhere = |what: &str| {
        machine(&format!("for link in veth0 veth1 lo; do tc qdisc {what}; done"));
    };
    let mended = at_end(move || everywhere("del dev $link root"));
    everywhere("add dev $link root netem loss 100%");
    mended
}

/// Connections of [`closes_towards_a_vanished_host_share_one_time_budget`].
const CLOSED: usize = 4;

/// A short message is reported done when it is copied, so a close waits until it is delivered.
fn closes_undelivered() {
    let comms = connect(0..CLOSED, 1000);
    tell("connected");
    wait_for("cut");
    for comm in &comms {
        // SAFETY: the pattern is static.
        let sent = unsafe { comm.post(part(pattern(2, 1000), None)) }.expect("isend");
        wait(|it| comm.test(it), &sent).expect("a short message is copied");
    }
    let start = Instant::now();
    for comm in comms {
        comm.close().expect("close");
    }
    let took = start.elapsed();
    tell("closed");
    eprintln!("{CLOSED} connections were closed in {took:?}");
    // Else nothing was undelivered.
    assert!(took > Duration::from_secs(1), "{CLOSED} connections were closed in {took:?}");
    // A queue pair may be replaced within TOWLINE_RECONNECT_TIMEOUT.
    let recovers = std::env::var("TOWLINE_RECOVERY").is_ok_and(|it| it == "1");
    let most = if recovers { Duration::from_secs(10) } else { Duration::from_secs(2) };
    assert!(took < most + VANISHED / 2, "{CLOSED} connections were closed in {took:?}");
}

/// Each of these closes waited 10 s for a host that did not answer (2 s without recovery), one after the other.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn closes_towards_a_vanished_host_share_one_time_budget() {
    const NAME: &str = "vanish::closes_towards_a_vanished_host_share_one_time_budget";
    let accepts = || {
        let _comms = accept(0..CLOSED, 1000);
        wait_for("closed");
    };
    if plays(closes_undelivered, accepts) {
        return;
    }
    for recovery in ["1", "0"] {
        let mail = Mailbox::new();
        let ends = start(NAME, &mail, &[("TOWLINE_PEER_TIMEOUT", "60"), ("TOWLINE_RECOVERY", recovery)]);
        child::receive(mail.path(), "connected");
        let _mended = vanish();
        child::send(mail.path(), "cut", b"");
        for mut end in ends {
            assert!(end.passed_within(PATIENCE), "an end with TOWLINE_RECOVERY={recovery}");
        }
    }
}

/// The kernel and the device answer for a process that is stopped, for longer than a silent peer is waited for.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_peer_that_is_stopped_is_waited_for() {
    const NAME: &str = "vanish::a_peer_that_is_stopped_is_waited_for";
    if plays(stream_out, stream_in) {
        return;
    }
    let seconds = number("RDMA_STOPPED").unwrap_or(5);
    let timeout = [("TOWLINE_PEER_TIMEOUT", "2")];
    let running = [0, 1].map(|stopped| {
        let mail = Mailbox::new();
        let ends = start(NAME, &mail, &[&timeout[..], &IMPATIENT].concat());
        (mail, ends, stopped)
    });
    for (mail, ..) in &running {
        child::receive(mail.path(), "ready");
    }
    std::thread::sleep(Duration::from_millis(300));
    let to_all = |what: i32| running.iter().for_each(|(_, ends, stopped)| signal(&ends[*stopped], what));
    to_all(libc::SIGSTOP);
    std::thread::sleep(Duration::from_secs(seconds));
    to_all(libc::SIGCONT);
    std::thread::sleep(Duration::from_secs(1));
    running.iter().for_each(|(mail, ..)| child::send(mail.path(), "stop", b""));
    for (_, ends, stopped) in running {
        for mut end in ends {
            assert!(end.passed_within(PATIENCE), "an end, with end {stopped} stopped");
        }
    }
}

/// What ends a control channel says nothing of a process that is stopped: its kernel accepts the next one.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_peer_that_is_stopped_while_its_control_channel_is_reset_is_waited_for() {
    const NAME: &str = "vanish::a_peer_that_is_stopped_while_its_control_channel_is_reset_is_waited_for";
    if plays(stream_out, stream_in) {
        return;
    }
    for (stopped, end) in [TcpEnd::Connecting, TcpEnd::Listening].into_iter().enumerate() {
        let mail = Mailbox::new();
        let ends = start(NAME, &mail, &IMPATIENT);
        child::receive(mail.path(), "ready");
        signal(&ends[stopped], libc::SIGSTOP);
        reset(end);
        // Three times as long as a peer may refuse.
        std::thread::sleep(Duration::from_millis(2500));
        signal(&ends[stopped], libc::SIGCONT);
        std::thread::sleep(Duration::from_secs(1));
        child::send(mail.path(), "stop", b"");
        for mut end in ends {
            assert!(end.passed_within(PATIENCE), "an end, with end {stopped} stopped");
        }
    }
}

/// A message, a rest, and another message.
fn rests(transfer: impl Fn(usize)) {
    transfer(1);
    tell(&format!("{} rests", child::role().expect("an end")));
    wait_for("go on");
    transfer(2);
}

/// A firewall forgets the control channel of a connection that has nothing to do, and drops what belongs to it: the
/// kernel gives the socket up, and the connection gets another one in time.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_firewall_that_forgets_the_control_channel_ends_no_connection() {
    const NAME: &str = "vanish::a_firewall_that_forgets_the_control_channel_ends_no_connection";
    let sender = || {
        let comm = ends::connect();
        rests(|seed| send(&comm, seed, 300_000));
        comm.close().expect("close");
    };
    let receiver = || {
        let comm = ends::accept();
        rests(|seed| receive(&comm, seed, 300_000));
        comm.close().expect("close");
    };
    if plays(sender, receiver) {
        return;
    }
    let mail = Mailbox::new();
    // One way only.
    let variables = [("TOWLINE_PEER_TIMEOUT", "3"), ("NCCL_SOCKET_IFNAME", "=veth0")];
    let ends = start(NAME, &mail, &variables);
    ["sender", "receiver"].iter().for_each(|role| drop(child::receive(mail.path(), &format!("{role} rests"))));
    forget_connections();
    let _mended = at_end(remember_connections);
    std::thread::sleep(Duration::from_secs(5));
    child::send(mail.path(), "go on", b"");
    for mut end in ends {
        assert!(end.passed_within(PATIENCE), "an end");
    }
}

/// The end that is left when the other is killed: transfers, one after the other, until it knows.
fn survive(mut transfer: impl FnMut() -> Result<(), Code>) {
    transfer().expect("a transfer before");
    tell(&format!("{} is ready", child::role().expect("an end")));
    let end = loop {
        if let Err(code) = transfer() {
            break code;
        }
    };
    wait_for("killed");
    let after = since("killed").expect("it was said");
    eprintln!("{}: {end:?} after {after:?}", child::role().expect("an end"));
    assert_eq!(end, Code::RemoteError);
    assert!(after < DEATH, "{after:?}");
}

fn sends_on() {
    let comm = ends::connect();
    survive(|| {
        // SAFETY: the pattern is static.
        let sent = unsafe { comm.isend(part(pattern(2, 300_000), None)) }?.expect("a free request");
        wait(|it| comm.test(it), &sent)
    });
}

fn receives_on() {
    let comm = ends::accept();
    let target = Memory::new(300_000);
    survive(|| {
        // SAFETY: the memory outlives the connection.
        let posted = unsafe { comm.irecv(&[Part::all(&target, None)]) }?.expect("a free request");
        wait(|it| comm.test(it), &posted)
    });
}

/// A peer that is killed amid transfers is missed within a second; also when its control channel was reset just before,
/// so that no end of file tells of it.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_killed_peer_is_noticed_within_a_second() {
    const NAME: &str = "vanish::a_killed_peer_is_noticed_within_a_second";
    if plays(sends_on, receives_on) {
        return;
    }
    let cases = [false, true].map(|cut| [(0, TcpEnd::Connecting), (1, TcpEnd::Listening)].map(|victim| (cut, victim)));
    for (cut, (victim, end)) in cases.into_iter().flatten() {
        let mail = Mailbox::new();
        let mut ends = start(NAME, &mail, &[]);
        ["sender", "receiver"].iter().for_each(|role| drop(child::receive(mail.path(), &format!("{role} is ready"))));
        if cut {
            signal(&ends[victim], libc::SIGSTOP);
            reset(end);
        }
        ends[victim].kill();
        child::send(mail.path(), "killed", b"");
        assert!(ends[1 - victim].passed_within(PATIENCE), "the end that is left, with end {victim} dead, reset: {cut}");
    }
}
