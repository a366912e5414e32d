//! Two hosts whose rails are cut while they talk: what must go on goes on, what cannot ends soon, and nothing is wrong.
//!
//! The long form of the random test, alone:
//! `TOWLINE_FAULTS=500 cargo test --release --test net at_random -- --ignored`.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, Mailbox};
use crate::support::ends;
use crate::support::faults::{Cut, Dice, Network, seed};
use crate::support::netns::{Namespace, all_reduce_until, available};
use crate::support::notices::{INFO, Notices, clock};
use crate::support::{PATIENCE, context, number, part, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Handle, Memory, Part, RecvComm, SendComm};

const MS: Duration = Duration::from_millis(1);

/// All rails in one device.
const RAILS: [(&str, &str); 2] = [("TOWLINE_RAILS", "all"), ("NCCL_SOCKET_IFNAME", "rail")];

pub(crate) fn connect() -> SendComm {
    ends::connect_within(PATIENCE)
}

pub(crate) fn accept() -> RecvComm {
    ends::accept_within(PATIENCE)
}

/// The two ends of a test, each a process in its namespace.
pub(crate) struct Ends {
    pub(crate) mail: Mailbox,
    receiver: Guarded,
    sender: Guarded,
}

impl Ends {
    pub(crate) fn start(test: &str, hosts: &(Namespace, Namespace), variables: &[(&str, &str)]) -> Self {
        Self::start_late(test, hosts, variables, &["sender", "receiver"], || ())
    }

    /// The ends in `late` start after `cut`, the others have looked for their devices before it.
    fn start_late(
        test: &str,
        hosts: &(Namespace, Namespace),
        variables: &[(&str, &str)],
        late: &[&str],
        cut: impl FnOnce(),
    ) -> Self {
        let mail = Mailbox::new();
        let start = |host: &Namespace, role: &str| {
            let mut command = host.command(test, role);
            command.envs(RAILS).envs(variables.iter().copied()).env(child::MAILBOX, mail.path());
            Guarded::start(command)
        };
        let early = |host: &Namespace, role: &str| {
            let is_early = !late.contains(&role);
            let end = is_early.then(|| start(host, role));
            is_early.then(|| child::receive(mail.path(), &format!("has-rails-{role}")));
            end
        };
        let (sender, receiver) = (early(&hosts.0, "sender"), early(&hosts.1, "receiver"));
        cut();
        let sender = sender.unwrap_or_else(|| start(&hosts.0, "sender"));
        let receiver = receiver.unwrap_or_else(|| start(&hosts.1, "receiver"));
        Self { receiver, sender, mail }
    }

    fn receive(&self, name: &str) -> String {
        String::from_utf8(child::receive(self.mail.path(), name)).expect("text")
    }

    pub(crate) fn pass(mut self) {
        assert!(self.sender.passed_within(PATIENCE * 2), "the sender");
        assert!(self.receiver.passed_within(PATIENCE), "the receiver");
    }
}

const MESSAGE: usize = 1 << 20;
const AHEAD: usize = 8;

/// Sends messages of 1 MiB, 8 at a time, until told to stop; then an empty one.
pub(crate) fn send_stream() {
    send_over(connect());
}

fn send_over(send: SendComm) {
    let mail = child::mailbox();
    let mut flying = VecDeque::new();
    let mut number = 0;
    while !mail.join("stop").exists() {
        if flying.len() < AHEAD {
            // SAFETY: the pattern is static.
            flying.push_back(unsafe { send.post(part(pattern(number, MESSAGE), None)) }.expect("isend"));
            number += 1;
        } else {
            send.wait(&flying.pop_front().expect("eight fly"), PATIENCE).expect("the send ends");
        }
    }
    // SAFETY: the pattern is static.
    flying.push_back(unsafe { send.post(part(&[], None)) }.expect("isend"));
    flying.iter().for_each(|it| send.wait(it, PATIENCE).map(drop).expect("the send ends"));
    child::send(&mail, "sent", b"");
    send.close().expect("close");
}

/// Receives and checks them, and leaves a list of times and bytes.
pub(crate) fn receive_stream() {
    receive_over(accept());
}

fn receive_over(recv: RecvComm) {
    let memory: Vec<Memory> = (0..AHEAD).map(|_| Memory::new(MESSAGE)).collect();
    // SAFETY: the memory outlives the connection.
    let post = |at: usize| unsafe { recv.post(&[Part::all(&memory[at % AHEAD], None)]) }.expect("irecv");
    let mut flying: VecDeque<_> = (0..AHEAD).map(post).collect();
    let mut log = String::new();
    for number in 0.. {
        let sizes = recv.wait(&flying.pop_front().expect("eight fly"), PATIENCE).expect("the receive ends");
        let size = sizes[0] as usize;
        let right = memory[number % AHEAD].bytes()[..size] == pattern(number, MESSAGE)[..size];
        assert!(right, "message {number} is wrong");
        writeln!(log, "{} {size}", clock()).expect("a string grows");
        if size == 0 {
            break;
        }
        flying.push_back(post(number + AHEAD));
    }
    child::send(&child::mailbox(), "log", log.as_bytes());
    // The receives that are still posted end with the connection: that is an abort, and may overtake acknowledgements.
    child::receive(&child::mailbox(), "sent");
    drop(recv);
}

/// When how many bytes came.
struct Log(Vec<(u64, u64)>);

impl Log {
    fn of(ends: &Ends) -> Self {
        let number = |word: Option<&str>| word.and_then(|word| word.parse().ok()).expect("a number");
        let text = ends.receive("log");
        Self(text.lines().map(|line| (number(line.split(' ').next()), number(line.split(' ').nth(1)))).collect())
    }

    /// Mbit/s in a time.
    fn rate(&self, from: u64, to: u64) -> f64 {
        let bytes: u64 = self.0.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, bytes)| bytes).sum();
        bytes as f64 * 8.0 / (to - from) as f64
    }

    /// How long after `from` the half second begins in which the rate is at least `mbit`.
    fn reaches(&self, mbit: f64, from: u64, within: Duration) -> Option<Duration> {
        (0..within.as_millis() as u64).step_by(20).find_map(|after| {
            let start = from + after * 1000;
            (self.rate(start, start + 500_000) >= mbit).then(|| after as u32 * MS)
        })
    }
}

fn plays() -> bool {
    let Some(role) = child::role() else { return false };
    let _watchdog = watchdog(120);
    let notices = Notices::start();
    match role.as_str() {
        "sender" => send_stream(),
        "receiver" => receive_stream(),
        role => panic!("nobody plays {role}"),
    }
    notices.tell(&role);
    true
}

const MBIT: u32 = 100;

/// Within this time a reset or a link that goes down is noticed.
const AT_ONCE: Duration = Duration::from_millis(100);

/// Within this time a rail on which nothing arrives any more is noticed.
const SILENT: Duration = Duration::from_secs(3);

/// How a cut rail was survived.
#[derive(Debug)]
struct Survived {
    /// From the cut to the sender's word that a stream is lost. The receiver may learn of it from the sender.
    noticed: Duration,
    /// From the cut to the half second in which the rate is at least 0.9 of what is left.
    steady: Option<Duration>,
    /// From the rail's return to its use.
    back: Option<Duration>,
}

/// Cuts one of two equal rails under load, and mends it when what is `promised` for noticing it is over, and some time.
fn survive(test: &str, network: &Network, rail: usize, how: Cut, promised: Duration) -> Survived {
    let ends = Ends::start(test, &network.hosts, &[INFO]);
    child::receive(ends.mail.path(), "handle");
    std::thread::sleep(1500 * MS);
    assert!((0..2).all(|rail| network.hosts.0.sent_over(rail) > 2 << 20), "both rails are used");
    // The commands that cut it take their time, and what they do is done at their end: that is when the clock starts.
    // What was noticed before counts as noticed at once.
    let begun = clock();
    network.cut(rail, how);
    let cut = clock();
    std::thread::sleep(promised + 2500 * MS);
    network.mend(rail, how);
    // At the end of the commands, as above: they wait for the kernel, on a busy machine for seconds.
    let mended = clock();
    let sent = network.hosts.0.sent_over(rail);
    let mut back = None;
    while back.is_none() && clock() < mended + 8_000_000 {
        std::thread::sleep(20 * MS);
        // More than handshakes and probes.
        back = (network.hosts.0.sent_over(rail) > sent + (1 << 20)).then(|| Duration::from_micros(clock() - mended));
    }
    std::thread::sleep(1000 * MS);
    child::send(ends.mail.path(), "stop", b"");
    let log = Log::of(&ends);
    let notice = |role| {
        let first = Notices::of(ends.mail.path(), role).into_iter().find(|at| *at >= begun);
        first.map(|at| Duration::from_micros(at.saturating_sub(cut)))
    };
    let (here, there) = (notice("sender"), notice("receiver"));
    ends.pass();
    let before = log.rate(begun - 1_000_000, begun);
    // Headers of Ethernet, IP and TCP take 4 to 5 of a hundred.
    let left = f64::from(MBIT) * 0.95;
    let steady = log.reaches(0.9 * left, begun, promised + 2000 * MS);
    let took = Duration::from_micros(cut - begun);
    eprintln!(
        "{how:?} of rail {rail} (which took {took:?}): {before:.0} Mbit/s before; noticed after {here:?}, there {there:?}; \
         0.9 of the rest after {steady:?}; rail back after {back:?}"
    );
    let noticed = here.expect("the sender notices that a stream is lost");
    assert!(noticed < promised + 2500 * MS, "only the rail's return was noticed: {noticed:?}");
    Survived { noticed, steady, back }
}

/// A rail that is cut, one and the other, is noticed within `promised`; the rate is back at 0.9 of what is left within
/// a second of that; and the rail is used again within 5 s of its return.
fn survives(test: &str, how: Cut, promised: Duration) {
    if plays() || !available() {
        return;
    }
    let _watchdog = watchdog(115);
    let network = Network::new(2, MBIT);
    for rail in [1, 0] {
        let survived = crate::support::at_second_try("noticing a cut rail", || {
            let survived = survive(test, &network, rail, how, promised);
            let in_time = survived.noticed <= promised;
            (survived, in_time)
        });
        let Survived { steady, back, .. } = survived;
        assert!(steady.is_some_and(|after| after <= promised + 1000 * MS), "the rate is back after {steady:?}");
        assert!(back.is_some_and(|after| after <= 5000 * MS), "the rail is used again after {back:?}");
    }
}

#[test]
fn an_interface_that_goes_down_here_is_survived() {
    survives("faults::an_interface_that_goes_down_here_is_survived", Cut::DownHere, AT_ONCE);
}

#[test]
fn an_interface_that_goes_down_there_is_survived() {
    survives("faults::an_interface_that_goes_down_there_is_survived", Cut::DownThere, AT_ONCE);
}

#[test]
fn a_rail_that_answers_with_resets_is_survived() {
    survives("faults::a_rail_that_answers_with_resets_is_survived", Cut::Reset, AT_ONCE);
}

#[test]
fn a_rail_that_falls_silent_is_survived() {
    survives("faults::a_rail_that_falls_silent_is_survived", Cut::Silent, SILENT);
}

#[test]
fn a_rail_that_is_silent_in_one_direction_is_survived() {
    survives("faults::a_rail_that_is_silent_in_one_direction_is_survived", Cut::HalfSilent, SILENT);
}

#[test]
fn a_rail_whose_rate_goes_to_nothing_is_survived() {
    survives("faults::a_rail_whose_rate_goes_to_nothing_is_survived", Cut::Stuck, SILENT);
}

/// A rail that loses packets, and one that comes and goes: nothing is wrong, nothing ends, and the other rail's share
/// is moved all the time.
#[test]
fn a_rail_that_loses_packets_and_one_that_flaps_are_lived_with() {
    const NAME: &str = "faults::a_rail_that_loses_packets_and_one_that_flaps_are_lived_with";
    if plays() || !available() {
        return;
    }
    let _watchdog = watchdog(100);
    let network = Network::new(2, MBIT);
    let ends = Ends::start(NAME, &network.hosts, &[INFO]);
    child::receive(ends.mail.path(), "handle");
    std::thread::sleep(1000 * MS);
    let lossy = clock();
    network.cut(1, Cut::Lossy);
    std::thread::sleep(3000 * MS);
    network.mend(1, Cut::Lossy);
    let healed = clock();
    std::thread::sleep(500 * MS);
    let flapping = clock();
    for _ in 0..8 {
        network.cut(1, Cut::DownHere);
        std::thread::sleep(200 * MS);
        network.mend(1, Cut::DownHere);
        std::thread::sleep(200 * MS);
    }
    let steady = clock();
    let sent = network.hosts.0.sent_over(1);
    let used = || (network.hosts.0.sent_over(1) > sent + (1 << 20)).then(|| Duration::from_micros(clock() - steady));
    let back = crate::support::eventually("the rail is used", 10_000 * MS, used);
    child::send(ends.mail.path(), "stop", b"");
    let log = Log::of(&ends);
    let lost = Notices::of(ends.mail.path(), "sender").len();
    ends.pass();
    let (amid_loss, amid_flaps) = (log.rate(lossy, healed), log.rate(flapping, steady));
    eprintln!(
        "{amid_loss:.0} Mbit/s while a packet of thirty is lost, {amid_flaps:.0} while the rail comes and goes, \
         {lost} streams lost; used {back:?} after its return"
    );
    let one_rail = f64::from(MBIT) * 0.95;
    assert!(amid_loss >= 0.5 * one_rail && amid_flaps >= 0.5 * one_rail, "{amid_loss:.0}, {amid_flaps:.0} Mbit/s");
    assert!(lost >= 1, "the rail was never missed");
    assert!(back <= 5000 * MS, "the rail is used again after {back:?}");
}

/// The kernel drops news of links for which a process that does not read has no room, and says so: what went down then
/// must be noticed as soon as the process runs, and not by its silence.
#[test]
fn a_link_that_goes_down_while_news_of_links_are_lost_is_noticed_at_once() {
    const NAME: &str = "faults::a_link_that_goes_down_while_news_of_links_are_lost_is_noticed_at_once";
    if plays() || !available() {
        return;
    }
    let _watchdog = watchdog(100);
    let network = Network::new(2, MBIT);
    let hosts = [&network.hosts.0, &network.hosts.1];
    // More than fits a socket's buffer: each change of a name is a message.
    let changes: String = (0..2000).map(|number| format!("link set lo alias name-{number}\n")).collect();
    crate::support::at_second_try("the loss of a link", || {
        let ends = Ends::start(NAME, &network.hosts, &[INFO]);
        child::receive(ends.mail.path(), "handle");
        std::thread::sleep(1000 * MS);
        let both = [&ends.sender, &ends.receiver];
        both.iter().for_each(|end| crate::support::ends::signal(end, libc::SIGSTOP));
        hosts.iter().for_each(|host| host.ip_batch(&changes));
        network.cut(1, Cut::DownHere);
        hosts.iter().for_each(|host| assert!(host.has_lost_news(), "no news were lost: nothing was tested"));
        let woken = clock();
        both.iter().for_each(|end| crate::support::ends::signal(end, libc::SIGCONT));
        std::thread::sleep(1000 * MS);
        network.mend(1, Cut::DownHere);
        child::send(ends.mail.path(), "stop", b"");
        let first = Notices::of(ends.mail.path(), "sender").into_iter().next().expect("a stream was lost");
        Log::of(&ends);
        ends.pass();
        let after = Duration::from_micros(first.saturating_sub(woken));
        eprintln!("noticed {after:?} after the process runs again");
        (after, after <= AT_ONCE)
    });
}

/// How the streams of a random test are protected: by its seed, so that the tests of a week have met them all.
fn protection(seed: u64, key: &Path) -> (&'static str, String) {
    match seed % 3 {
        0 => ("TOWLINE_CHECKSUM", "0".to_owned()),
        1 => ("TOWLINE_KEY_FILE", key.to_str().expect("a path in UTF-8").to_owned()),
        _ => ("TOWLINE_CHECKSUM", "1".to_owned()),
    }
}

/// What the random test did.
#[derive(Default)]
struct Tally {
    faults: usize,
    by_kind: [usize; Cut::ALL.len()],
    outages: usize,
}

/// Cuts rails in all ways at random times until `limit` faults were made. One rail at least is in order at any time,
/// but for outages of all rails, which are short and silent.
fn cut_at_random(network: &Network, seed: u64, limit: usize) -> Tally {
    let mut dice = Dice::new(seed);
    let mut tally = Tally::default();
    while tally.faults < limit {
        std::thread::sleep(dice.roll(1200) as u32 * MS);
        if dice.roll(10) == 0 {
            (0..network.rails()).for_each(|rail| network.cut(rail, Cut::Silent));
            std::thread::sleep(dice.roll(4000) as u32 * MS);
            (0..network.rails()).for_each(|rail| network.mend(rail, Cut::Silent));
            tally.faults += 1;
            tally.outages += 1;
            continue;
        }
        let spared = dice.roll(network.rails() as u64) as usize;
        let mut cuts = Vec::new();
        for rail in (0..network.rails()).filter(|rail| *rail != spared) {
            if cuts.is_empty() || dice.roll(2) == 0 {
                let kind = dice.roll(Cut::ALL.len() as u64) as usize;
                network.cut(rail, Cut::ALL[kind]);
                cuts.push((rail, Cut::ALL[kind]));
                tally.faults += 1;
                tally.by_kind[kind] += 1;
                std::thread::sleep(dice.roll(400) as u32 * MS);
            }
        }
        std::thread::sleep(dice.roll(4000) as u32 * MS);
        cuts.into_iter().for_each(|(rail, how)| network.mend(rail, how));
    }
    tally
}

/// What one round of the soak moves: the same on both sides, from its number.
struct Round {
    /// New connections, closed at its end.
    connections: usize,
    /// Sizes of the messages, each over every connection in turn.
    sizes: Vec<usize>,
    /// Whether a new communicator begins.
    anew: bool,
}

impl Round {
    fn number(round: u64) -> Self {
        let mut dice = Dice::new(round + 1000);
        let size = |dice: &mut Dice| match dice.roll(8) {
            0 => 0,
            1 | 2 => dice.roll(4096) as usize,
            3 | 4 => dice.roll(70_000) as usize,
            5 | 6 => dice.roll(1 << 20) as usize,
            _ => dice.roll(SOAK_LONGEST as u64) as usize,
        };
        Self {
            connections: 1 + dice.roll(4) as usize,
            sizes: (0..4 + dice.roll(12)).map(|_| size(&mut dice)).collect(),
            anew: round == 0 || dice.roll(4) == 0,
        }
    }

    fn message(round: u64, connection: usize, at: usize) -> usize {
        round as usize * 31 + connection * 7 + at
    }
}

const SOAK_PATIENCE: Duration = Duration::from_secs(60);
const SOAK_RAILS: usize = 3;
/// The longest message.
const SOAK_LONGEST: usize = 12 << 20;
/// At least so many rounds: in the first ones memory grows to what is needed.
const SOAK_ROUNDS: usize = 40;

/// What the test itself needs in the end, it has from the beginning: the patterns of all messages.
fn settle_in() {
    let _ = pattern(126, SOAK_LONGEST);
}

/// What one look at the process finds.
struct Sample {
    /// KiB that are allocated: what a leak adds to, round by round.
    used: usize,
    /// Resident KiB. The allocator keeps freed memory, in as many arenas as there were threads at once: that grows to a
    /// level, which the first rounds of a short run may not have reached.
    resident: usize,
    descriptors: usize,
}

fn measure(log: &mut Vec<Sample>) {
    // SAFETY: glibc's own account of all arenas.
    let account = unsafe { libc::mallinfo2() };
    log.push(Sample {
        used: (account.uordblks + account.hblkhd) >> 10,
        resident: crate::support::resident_kib(),
        descriptors: crate::support::descriptors().len(),
    });
}

fn soak_sender() {
    settle_in();
    let mail = child::mailbox();
    let mut log = Vec::new();
    let mut context = crate::support::context(ApiVersion::V12);
    let mut old: Option<SendComm> = None;
    let mut rounds = 0;
    for round in 0.. {
        let stop = mail.join("stop").exists();
        child::send(&mail, &format!("go-{round}"), if stop { b"stop" } else { b"go" });
        if stop {
            break;
        }
        let plan = Round::number(round);
        if plan.anew {
            if let Some(old) = old.take() {
                old.close().expect("close");
            }
            context.finalize().expect("finalize");
            context = crate::support::context(ApiVersion::V12);
        }
        let connect = |at: usize| {
            let name = format!("handle-{round}-{at}");
            let mut handle = Handle::from_bytes(&child::receive(&mail, &name));
            let _ = std::fs::remove_file(mail.join(name));
            context.connect_within(0, &mut handle, SOAK_PATIENCE).expect("connect")
        };
        let fresh: Vec<SendComm> = (0..plan.connections).map(connect).collect();
        let all: Vec<&SendComm> = old.iter().chain(&fresh).collect();
        for (at, &size) in plan.sizes.iter().enumerate() {
            let post = |(it, send): (usize, &&SendComm)| {
                // SAFETY: the pattern is static.
                unsafe { send.post(part(pattern(Round::message(round, it, at), size), None)) }.expect("isend")
            };
            let requests: Vec<_> = all.iter().enumerate().map(post).collect();
            for (send, request) in all.iter().zip(&requests) {
                send.wait(request, SOAK_PATIENCE).expect("the send ends");
            }
        }
        let mut fresh = fresh.into_iter();
        if old.is_none() {
            old = fresh.next();
        }
        fresh.for_each(|send| send.close().expect("close"));
        measure(&mut log);
        rounds += 1;
        if rounds == SOAK_ROUNDS {
            child::send(&mail, "enough", b"");
        }
    }
    if let Some(old) = old {
        old.close().expect("close");
    }
    tell_flat("sender", rounds, &log);
}

fn soak_receiver() {
    settle_in();
    let mail = child::mailbox();
    let mut log = Vec::new();
    let mut context = crate::support::context(ApiVersion::V12);
    let mut old: Option<RecvComm> = None;
    // Written once, so that all of it is there.
    let memory: Vec<Memory> = (0..5).map(|_| Memory::of(&vec![1; SOAK_LONGEST])).collect();
    let mut rounds = 0;
    for round in 0.. {
        let name = format!("go-{round}");
        let go = crate::support::eventually("the next round", SOAK_PATIENCE, || std::fs::read(mail.join(&name)).ok());
        let _ = std::fs::remove_file(mail.join(&name));
        if go == b"stop" {
            break;
        }
        let plan = Round::number(round);
        if plan.anew {
            if let Some(old) = old.take() {
                old.close().expect("close");
            }
            context.finalize().expect("finalize");
            context = crate::support::context(ApiVersion::V12);
        }
        let listen = |at: usize| {
            let (listener, handle) = context.listen(0).expect("listen");
            child::send(&mail, &format!("handle-{round}-{at}"), handle.bytes());
            listener.accept_within(SOAK_PATIENCE).expect("accept")
        };
        let fresh: Vec<RecvComm> = (0..plan.connections).map(listen).collect();
        let all: Vec<&RecvComm> = old.iter().chain(&fresh).collect();
        for (at, &size) in plan.sizes.iter().enumerate() {
            let post = |(it, recv): (usize, &&RecvComm)| {
                let to = Part::new(memory[it].bytes().as_ptr().cast_mut().cast(), size, None);
                // SAFETY: the memory outlives the request.
                unsafe { recv.post(&[to]) }.expect("irecv")
            };
            let requests: Vec<_> = all.iter().enumerate().map(post).collect();
            for (it, (recv, request)) in all.iter().zip(&requests).enumerate() {
                let sizes = recv.wait(request, SOAK_PATIENCE).expect("the receive ends");
                assert_eq!(sizes[0] as usize, size);
                let right = memory[it].bytes()[..size] == *pattern(Round::message(round, it, at), size);
                assert!(right, "round {round}, connection {it}, message {at} is wrong");
            }
        }
        let mut fresh = fresh.into_iter();
        if old.is_none() {
            old = fresh.next();
        }
        fresh.for_each(|recv| recv.close().expect("close"));
        measure(&mut log);
        rounds += 1;
    }
    if let Some(old) = old {
        old.close().expect("close");
    }
    tell_flat("receiver", rounds, &log);
}

/// KiB that may be allocated in the last fifth beyond the second: staged messages and copies of the moment.
const USED_MORE: usize = 4 << 10;

/// Resident KiB from which growth shows, and how much of it must lie in the last two fifths to be a slope: a slope of 8
/// MiB in three fifths has about 5 there.
const RESIDENT_MORE: usize = 8 << 10;
const RESIDENT_STEEP: usize = 4 << 10;

/// Leaves what was measured, and checks that memory and descriptors are flat: the middles of fifths of the rounds
/// against each other; descriptors when all connections are closed.
fn tell_flat(who: &str, rounds: usize, log: &[Sample]) {
    let fifth = log.len() / 5;
    let middle = |part: usize, pick: fn(&Sample) -> usize| {
        let mut values: Vec<usize> = log[part * fifth..(part + 1) * fifth].iter().map(pick).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied().unwrap_or(0)
    };
    let used = [1, 2, 3, 4].map(|part| middle(part, |it| it.used));
    let resident = [1, 2, 3, 4].map(|part| middle(part, |it| it.resident));
    // Sockets of closed connections stay up to 5 s where the peer does not answer: a cut rail leaves hundreds for that
    // long, so what counts is what is left when they have had that time.
    let few = log[fifth..2 * fifth].iter().map(|it| it.descriptors).min().unwrap_or(0);
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut many = crate::support::descriptors().len();
    while many > few + 20 && Instant::now() < deadline {
        std::thread::sleep(100 * MS);
        many = crate::support::descriptors().len();
    }
    let most = log.iter().map(|it| it.descriptors).max().unwrap_or(0);
    let told = format!(
        "{who}: {rounds} rounds; from the second fifth to the last: KiB allocated {used:?}, resident {resident:?}; descriptors {few} and {many}, at most {most}"
    );
    child::send(&child::mailbox(), &format!("told-{who}"), told.as_bytes());
    assert!(used[3] < used[0] + USED_MORE, "allocated memory grows: {told}");
    let is_steep = resident[3] > resident[0] + RESIDENT_MORE && resident[3] > resident[1] + RESIDENT_STEEP;
    assert!(!is_steep, "resident memory grows: {told}");
    assert!(many <= few + 20, "descriptors are left: {told}");
}

/// Plays an end that looks for its devices, says what it found, and waits for a word before it connects.
fn plays_in_steps() -> bool {
    let Some(role) = child::role() else { return false };
    let _watchdog = watchdog(120);
    let mail = child::mailbox();
    let log = Capture::start();
    let context = context(ApiVersion::V12);
    let told = log.records().iter().filter(|it| it.is_warning() && it.text.contains("is down now")).count();
    let name = context.properties(0).expect("properties").name;
    child::send(&mail, &format!("has-rails-{role}"), format!("{name}, told {told}").as_bytes());
    child::receive(&mail, "cut");
    if role == "receiver" {
        let (listener, handle) = context.listen(0).expect("listen");
        child::send(&mail, "handle", handle.bytes());
        receive_over(listener.accept_within(PATIENCE).expect("accept"));
    } else {
        let mut handle = Handle::from_bytes(&child::receive(&mail, "handle"));
        let start = Instant::now();
        let send = context.connect_within(0, &mut handle, PATIENCE).expect("connect");
        child::send(&mail, "connected", start.elapsed().as_millis().to_string().as_bytes());
        send_over(send);
    }
    true
}

/// One of two rails is down, here or there, or silent, when two ranks get connected: it takes about a second, and the
/// rail is used when it is back.
#[test]
fn a_connection_comes_up_while_its_first_rail_is_down() {
    const NAME: &str = "faults::a_connection_comes_up_while_its_first_rail_is_down";
    if plays_in_steps() || !available() {
        return;
    }
    for (how, family) in [
        (Cut::DownHere, "AF_INET"),
        (Cut::DownThere, "AF_INET"),
        (Cut::Silent, "AF_INET"),
        (Cut::HalfSilent, "AF_INET"),
        (Cut::Reset, "AF_INET"),
        (Cut::Silent, "AF_INET6"),
        // The address goes with the interface, and nothing has listened there before.
        (Cut::DownThere, "AF_INET6"),
        (Cut::DownHere, "AF_INET6"),
    ] {
        let network = Network::new(2, MBIT);
        let ends = Ends::start(NAME, &network.hosts, &[("NCCL_SOCKET_FAMILY", family)]);
        for note in ["has-rails-sender", "has-rails-receiver"] {
            child::receive(ends.mail.path(), note);
        }
        network.cut(0, how);
        child::send(ends.mail.path(), "cut", b"");
        let connected: u64 = ends.receive("connected").parse().expect("milliseconds");
        std::thread::sleep(1500 * MS);
        let sent = network.hosts.0.sent_over(0);
        network.mend(0, how);
        let mended = Instant::now();
        let used = || (network.hosts.0.sent_over(0) > sent + (4 << 20)).then(|| mended.elapsed());
        let back = crate::support::eventually("the rail is used", 10_000 * MS, used);
        child::send(ends.mail.path(), "stop", b"");
        ends.pass();
        eprintln!("{how:?}, {family}: connected after {connected} ms, rail 0 used {back:?} after its return");
        assert!(connected < 1200, "{how:?}: connected after {connected} ms");
        assert!(back < 5000 * MS, "{how:?}: used {back:?} after its return");
    }
}

/// One of two rails is down when a side, or both, looks for its devices: administratively where it is cut, without a
/// carrier at the other end. What is sent meanwhile goes over the other rail, and this one is used when it is back.
#[test]
fn a_rail_that_is_down_at_init_is_used_when_it_comes_back() {
    const NAME: &str = "faults::a_rail_that_is_down_at_init_is_used_when_it_comes_back";
    if plays_in_steps() || !available() {
        return;
    }
    let (sender, receiver, both) = (&["sender"][..], &["receiver"][..], &["sender", "receiver"][..]);
    for (late, how, rail) in [
        (sender, Cut::DownHere, 0),
        (sender, Cut::DownThere, 1),
        (receiver, Cut::DownThere, 0),
        (receiver, Cut::DownHere, 1),
        (both, Cut::DownHere, 0),
    ] {
        let network = Network::new(2, MBIT);
        let link = format!("rail{rail}");
        let ends = Ends::start_late(NAME, &network.hosts, &[], late, || {
            network.cut(rail, how);
            network.hosts.0.wait_for_no(&link);
            network.hosts.1.wait_for_no(&link);
        });
        for role in ["sender", "receiver"] {
            let found = ends.receive(&format!("has-rails-{role}"));
            let (name, times) = if late.contains(&role) && rail == 0 {
                ("rail1+rail0", 1)
            } else {
                ("rail0+rail1", late.contains(&role).into())
            };
            assert_eq!(found, format!("{name}, told {times}"), "{role}, {how:?} of rail {rail}");
        }
        child::send(ends.mail.path(), "cut", b"");
        let connected: u64 = ends.receive("connected").parse().expect("milliseconds");
        std::thread::sleep(1500 * MS);
        assert!(network.hosts.0.sent_over(1 - rail) > 4 << 20, "the other rail carries what there is");
        let sent = network.hosts.0.sent_over(rail);
        network.mend(rail, how);
        let mended = Instant::now();
        let used = || (network.hosts.0.sent_over(rail) > sent + (4 << 20)).then(|| mended.elapsed());
        let back = crate::support::eventually("the rail is used", 10_000 * MS, used);
        child::send(ends.mail.path(), "stop", b"");
        ends.pass();
        eprintln!("{late:?}, {how:?}: connected after {connected} ms, rail {rail} used {back:?} after its return");
        assert!(connected < 1200, "{late:?}, {how:?}: connected after {connected} ms");
        assert!(back < 5000 * MS, "{late:?}, {how:?}: used {back:?} after its return");
    }
}

/// Run by `.ci/run`, and by `-- --ignored long::`.
mod long {
    use super::*;

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn rails_cut_at_random_times_lose_nothing_and_hang_nothing() {
        if !available() {
            return;
        }
        let (faults, seed) = (number("TOWLINE_FAULTS").unwrap_or(20) as usize, seed());
        let (_dir, key) = crate::support::key_file();
        let _watchdog = watchdog(60 + 12 * faults as u64);
        let start = Instant::now();
        // A few networks one after the other, of two to four rails.
        let networks = faults.div_ceil(100).max(2);
        for round in 0..networks {
            let network = Network::new(2 + (seed as usize / 3 + round) % 3, 0);
            let share = faults / networks;
            let protection = protection(seed + round as u64, &key);
            let family = ["AF_INET", "AF_INET6"][(seed as usize + round) % 2];
            let (tally, runs) = std::thread::scope(|scope| {
                let cutter = scope.spawn(|| cut_at_random(&network, seed + round as u64, share));
                let runs = {
                    let variables =
                        [("TOWLINE_STREAMS", "5"), ("NCCL_SOCKET_FAMILY", family), (protection.0, &protection.1)];
                    let hosts = [&network.hosts.0, &network.hosts.1];
                    all_reduce_until(&hosts, "-e 4M -n 40 --timeout 30", &variables, || cutter.is_finished())
                };
                (cutter.join().expect("the cutter ends"), runs)
            });
            eprintln!(
                "{} rails, {family}, {}={}: {} faults ({:?}: {:?}; {} outages of all), {runs} runs of all-reduce, 0 wrong, 0 hangs, {:.0} s in all",
                network.rails(),
                protection.0,
                if protection.0 == "TOWLINE_KEY_FILE" { "…" } else { &protection.1 },
                tally.faults,
                Cut::ALL,
                tally.by_kind,
                tally.outages,
                start.elapsed().as_secs_f64()
            );
        }
    }

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn a_long_run_with_faults_leaves_memory_and_descriptors_flat() {
        const NAME: &str = "faults::long::a_long_run_with_faults_leaves_memory_and_descriptors_flat";
        let seconds = number("TOWLINE_SOAK").unwrap_or(15);
        if let Some(role) = child::role() {
            let _watchdog = watchdog(seconds * 2 + 120);
            match role.as_str() {
                "sender" => soak_sender(),
                "receiver" => soak_receiver(),
                role => panic!("nobody plays {role}"),
            }
            return;
        }
        if !available() {
            return;
        }
        let _watchdog = watchdog(seconds * 2 + 180);
        let network = Network::new(SOAK_RAILS, 0);
        let mut seed = seed();
        let (_dir, key) = crate::support::key_file();
        let protection = protection(seed, &key);
        eprintln!("{protection:?}");
        let variables = [("TOWLINE_STREAMS", "5"), (protection.0, &protection.1)];
        let mut ends = Ends::start(NAME, &network.hosts, &variables);
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let mut tally = Tally::default();
        while Instant::now() < deadline || !ends.mail.path().join("enough").exists() {
            seed += 1;
            let more = cut_at_random(&network, seed, 3);
            tally.faults += more.faults;
            tally.outages += more.outages;
            let ended =
                [&mut ends.sender, &mut ends.receiver].map(|end| end.0.try_wait().expect("it is ours").is_some());
            assert_eq!(ended, [false; 2], "the sender, the receiver has ended");
        }
        child::send(ends.mail.path(), "stop", b"");
        assert!(ends.sender.passed_within(SOAK_PATIENCE * 2), "the sender");
        assert!(ends.receiver.passed_within(SOAK_PATIENCE), "the receiver");
        for who in ["sender", "receiver"] {
            eprintln!("{}", ends.receive(&format!("told-{who}")));
        }
        eprintln!(
            "{seconds} s, {} faults, {} of them outages of all rails, 0 wrong, 0 hangs",
            tally.faults, tally.outages
        );
    }
}
