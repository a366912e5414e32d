//! Two hosts whose rails are cut while they talk: what must go on goes on, what cannot ends soon, and nothing is wrong.
//!
//! The long form of the random test, alone: `TOWLINE_FAULTS=500 cargo test --release --test net_faults at_random`.

mod support;

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use support::child::{self, Guarded, Mailbox};
use support::faults::{Cut, Dice, Network};
use support::netns::{Namespace, available};
use support::{PATIENCE, context, part, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Context, Handle, Memory, Part, RecvComm, SendComm};

const MS: Duration = Duration::from_millis(1);

/// All rails in one device.
const RAILS: [(&str, &str); 2] = [("TOWLINE_RAILS", "all"), ("NCCL_SOCKET_IFNAME", "rail")];

/// Microseconds on the clock that all processes of this machine share.
fn clock() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call, which fills it.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) }, 0);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

fn connect() -> SendComm {
    let context = context(ApiVersion::V12);
    let mut handle = Handle::from_bytes(&child::receive(&child::mailbox(), "handle"));
    context.connect_within(0, &mut handle, PATIENCE).expect("connect")
}

fn accept() -> RecvComm {
    let context = context(ApiVersion::V12);
    let (listener, handle) = context.listen(0).expect("listen");
    child::send(&child::mailbox(), "handle", handle.bytes());
    listener.accept_within(PATIENCE).expect("accept")
}

/// The two ends of a test, each a process in its namespace.
struct Ends {
    mail: Mailbox,
    receiver: Guarded,
    sender: Guarded,
}

impl Ends {
    fn start(test: &str, hosts: &(Namespace, Namespace), variables: &[(&str, &str)]) -> Self {
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

    fn pass(mut self) {
        assert!(self.sender.passed_within(PATIENCE * 2), "the sender");
        assert!(self.receiver.passed_within(PATIENCE), "the receiver");
    }
}

const MESSAGE: usize = 1 << 20;
const AHEAD: usize = 8;

/// Sends messages of 1 MiB, 8 at a time, until told to stop; then an empty one.
fn send_stream() {
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
fn receive_stream() {
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

/// Bytes that the first host has sent over a rail.
fn sent_over(network: &Network, rail: usize) -> u64 {
    let file = format!("/sys/class/net/rail{rail}/statistics/tx_bytes");
    let output = Command::new("ip").args(["netns", "exec", network.hosts.0.name(), "cat", &file]).output().expect("ip");
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number of bytes")
}

fn plays() -> bool {
    let Some(role) = child::role() else { return false };
    let _watchdog = watchdog(120);
    match role.as_str() {
        "sender" => send_stream(),
        "receiver" => receive_stream(),
        role => panic!("nobody plays {role}"),
    }
    true
}

const MBIT: u32 = 100;

/// Cuts one of two equal rails under load: the rate is back at 0.9 of what is left within `noticed` and a second, and the
/// rail is used again within 5 s of its return.
fn survives(test: &str, how: Cut, noticed: Duration) {
    if plays() || !available() {
        return;
    }
    let _watchdog = watchdog(115);
    let network = Network::new(2, MBIT);
    for rail in [1, 0] {
        let ends = Ends::start(test, &network.hosts, &[]);
        child::receive(ends.mail.path(), "handle");
        std::thread::sleep(1500 * MS);
        assert!((0..2).all(|rail| sent_over(&network, rail) > 2 << 20), "both rails are used");
        let cut = clock();
        network.cut(rail, how);
        std::thread::sleep(noticed + 2500 * MS);
        let mended = clock();
        network.mend(rail, how);
        let sent = sent_over(&network, rail);
        let mut back = None;
        while back.is_none() && clock() < mended + 8_000_000 {
            std::thread::sleep(20 * MS);
            // More than handshakes and probes.
            back = (sent_over(&network, rail) > sent + (1 << 20)).then(|| Duration::from_micros(clock() - mended));
        }
        std::thread::sleep(1000 * MS);
        child::send(ends.mail.path(), "stop", b"");
        let log = Log::of(&ends);
        ends.pass();
        let before = log.rate(cut - 1_000_000, cut);
        // Headers of Ethernet, IP and TCP take 4 to 5 of a hundred.
        let left = f64::from(MBIT) * 0.95;
        let steady = log.reaches(0.9 * left, cut, noticed + 2000 * MS);
        eprintln!(
            "{how:?} of rail {rail}: {before:.0} Mbit/s before; 0.9 of the rest after {steady:?}; rail back after {back:?}"
        );
        assert!(steady.is_some_and(|after| after <= noticed + 1000 * MS), "the rate is back after {steady:?}");
        assert!(back.is_some_and(|after| after <= 5000 * MS), "the rail is used again after {back:?}");
    }
}

#[test]
fn an_interface_that_goes_down_here_is_survived() {
    survives("an_interface_that_goes_down_here_is_survived", Cut::DownHere, 100 * MS);
}

#[test]
fn an_interface_that_goes_down_there_is_survived() {
    survives("an_interface_that_goes_down_there_is_survived", Cut::DownThere, 100 * MS);
}

#[test]
fn a_rail_that_answers_with_resets_is_survived() {
    survives("a_rail_that_answers_with_resets_is_survived", Cut::Reset, 100 * MS);
}

#[test]
fn a_rail_that_falls_silent_is_survived() {
    survives("a_rail_that_falls_silent_is_survived", Cut::Silent, 3000 * MS);
}

#[test]
fn a_rail_that_is_silent_in_one_direction_is_survived() {
    survives("a_rail_that_is_silent_in_one_direction_is_survived", Cut::HalfSilent, 3000 * MS);
}

#[test]
fn a_rail_whose_rate_goes_to_nothing_is_survived() {
    survives("a_rail_whose_rate_goes_to_nothing_is_survived", Cut::Stuck, 3000 * MS);
}

/// Held while a link is down, and while a rank looks what interfaces there are: it uses those that are up then, and a rank
/// with one rail cannot be expected to survive the loss of that one.
type Links = Mutex<()>;

/// Runs `towline all-reduce` between the hosts, again and again, until `enough` says so: how many runs, all of them right.
fn all_reduce_until(network: &Network, links: &Links, iterations: usize, mut enough: impl FnMut() -> bool) -> usize {
    let wrap = |host: &Namespace| format!("ip netns exec {}", host.name());
    let mut runs = 0;
    while !enough() {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.args(["all-reduce", "-b", "8", "-e", "4M", "-f", "8", "-w", "1", "-n", &iterations.to_string()]);
        command.args(["--timeout", "30", "--wrap", &wrap(&network.hosts.0), "--wrap", &wrap(&network.hosts.1)]);
        command.envs(RAILS).env("TOWLINE_STREAMS", "5").stdin(Stdio::null());
        let looking = links.lock().expect("nobody panics with it");
        let mut ranks = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("towline runs");
        let mut lines = BufReader::new(ranks.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
        let mut text: String = lines.by_ref().take_while(|line| !line.starts_with("# rank 1")).collect();
        drop(looking);
        text.extend(lines.map(|line| line + "\n"));
        let output = ranks.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        runs += 1;
    }
    runs
}

/// What the random test did.
#[derive(Default)]
struct Tally {
    faults: usize,
    by_kind: [usize; Cut::ALL.len()],
    outages: usize,
}

/// Cuts rails in all ways at random times until `limit` faults were made. One rail at least is in order at any time, but
/// for outages of all rails, which are short and silent.
fn cut_at_random(network: &Network, links: &Links, seed: u64, limit: usize) -> Tally {
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
        let mut down = None;
        for rail in (0..network.rails()).filter(|rail| *rail != spared) {
            if cuts.is_empty() || dice.roll(2) == 0 {
                let mut kind = dice.roll(Cut::ALL.len() as u64) as usize;
                if matches!(Cut::ALL[kind], Cut::DownHere | Cut::DownThere) && down.is_none() {
                    down = links.try_lock().ok();
                    kind = if down.is_some() { kind } else { dice.roll(4) as usize + 2 };
                }
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

#[test]
fn rails_cut_at_random_times_lose_nothing_and_hang_nothing() {
    if !available() {
        return;
    }
    let number = |name: &str, default: u64| std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(default);
    let (faults, seed) = (number("TOWLINE_FAULTS", 20) as usize, number("TOWLINE_FAULTS_SEED", 1));
    let _watchdog = watchdog(60 + 12 * faults as u64);
    let start = Instant::now();
    // A few networks one after the other, of two to four rails.
    let networks = faults.div_ceil(100).max(1);
    for round in 0..networks {
        let network = Network::new(2 + (seed as usize + round) % 3, 0);
        let share = faults / networks;
        let links = &Links::default();
        let (tally, runs) = std::thread::scope(|scope| {
            let cutter = scope.spawn(|| cut_at_random(&network, links, seed + round as u64, share));
            let runs = all_reduce_until(&network, links, 40, || cutter.is_finished());
            (cutter.join().expect("the cutter ends"), runs)
        });
        eprintln!(
            "{} rails: {} faults ({:?}: {:?}; {} outages of all), {runs} runs of all-reduce, 0 wrong, 0 hangs, {:.0} s in all",
            network.rails(),
            tally.faults,
            Cut::ALL,
            tally.by_kind,
            tally.outages,
            start.elapsed().as_secs_f64()
        );
    }
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
            _ => dice.roll(12 << 20) as usize,
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

/// A communicator that began when no link was down: with the rails that it has must it survive. The note keeps links from
/// being taken down meanwhile.
fn whole_context() -> Context {
    let note = child::mailbox().join(format!("looking-{}", child::role().expect("a role")));
    std::fs::write(&note, b"").expect("the mailbox takes a note");
    let whole = support::eventually("all links up", SOAK_PATIENCE, || {
        let context = context(ApiVersion::V12);
        let name = context.properties(0).expect("a device").name;
        if name.matches("rail").count() == SOAK_RAILS {
            return Some(context);
        }
        context.finalize().expect("finalize");
        None
    });
    std::fs::remove_file(&note).expect("the note is there");
    whole
}

/// Holds `links` while a rank looks for interfaces, until `over`.
fn spare_links(links: &Links, mail: &Path, over: &AtomicBool) {
    let looks = || ["sender", "receiver"].iter().any(|role| mail.join(format!("looking-{role}")).exists());
    while !over.load(Ordering::Relaxed) {
        if looks() {
            let _spared = links.lock().expect("nobody panics with it");
            while looks() && !over.load(Ordering::Relaxed) {
                std::thread::sleep(5 * MS);
            }
        }
        std::thread::sleep(5 * MS);
    }
}

/// Resident memory in KiB and descriptors.
fn measure(log: &mut Vec<(usize, usize)>) {
    log.push((support::resident_kib(), support::descriptors().len()));
}

fn soak_sender() {
    let mail = child::mailbox();
    let mut log = Vec::new();
    let mut context = whole_context();
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
            context = whole_context();
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
    }
    if let Some(old) = old {
        old.close().expect("close");
    }
    tell_flat("sender", rounds, &log);
}

fn soak_receiver() {
    let mail = child::mailbox();
    let mut log = Vec::new();
    let mut context = whole_context();
    let mut old: Option<RecvComm> = None;
    let memory: Vec<Memory> = (0..5).map(|_| Memory::new(12 << 20)).collect();
    let mut rounds = 0;
    for round in 0.. {
        let name = format!("go-{round}");
        let go = support::eventually("the next round", SOAK_PATIENCE, || std::fs::read(mail.join(&name)).ok());
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
            context = whole_context();
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

/// Leaves what was measured, and checks that memory and descriptors are flat: the middle of the last fifth of the rounds
/// against that of the second fifth; descriptors when all connections are closed.
fn tell_flat(who: &str, rounds: usize, log: &[(usize, usize)]) {
    let fifth = log.len() / 5;
    let middle = |part: usize, pick: fn(&(usize, usize)) -> usize| {
        let mut values: Vec<usize> = log[part * fifth..(part + 1) * fifth].iter().map(pick).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied().unwrap_or(0)
    };
    let (early, late) = (middle(1, |it| it.0), middle(4, |it| it.0));
    // Sockets of closed connections stay up to 5 s where the peer does not answer: a cut rail leaves hundreds for that long,
    // so what counts is what is left when they have had that time.
    let few = log[fifth..2 * fifth].iter().map(|it| it.1).min().unwrap_or(0);
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut many = support::descriptors().len();
    while many > few + 20 && Instant::now() < deadline {
        std::thread::sleep(100 * MS);
        many = support::descriptors().len();
    }
    let most = log.iter().map(|it| it.1).max().unwrap_or(0);
    let told = format!(
        "{who}: {rounds} rounds; resident {early} KiB in the second fifth, {late} KiB in the last; descriptors {few} and {many}, at most {most}"
    );
    child::send(&child::mailbox(), &format!("told-{who}"), told.as_bytes());
    assert!(late < early + (8 << 10), "memory grows: {told}");
    assert!(many <= few + 20, "descriptors are left: {told}");
}

#[test]
fn a_long_run_with_faults_leaves_memory_and_descriptors_flat() {
    const NAME: &str = "a_long_run_with_faults_leaves_memory_and_descriptors_flat";
    let number = |name: &str, default: u64| std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(default);
    let seconds = number("TOWLINE_SOAK", 15);
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
    let mut ends = Ends::start(NAME, &network.hosts, &[("TOWLINE_STREAMS", "5")]);
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let mut tally = Tally::default();
    let mut seed = number("TOWLINE_FAULTS_SEED", 1);
    let (links, over) = (Links::default(), AtomicBool::new(false));
    let mail = ends.mail.path().to_owned();
    std::thread::scope(|scope| {
        scope.spawn(|| spare_links(&links, &mail, &over));
        while Instant::now() < deadline {
            seed += 1;
            let more = cut_at_random(&network, &links, seed, 3);
            tally.faults += more.faults;
            tally.outages += more.outages;
            let ended =
                [&mut ends.sender, &mut ends.receiver].map(|end| end.0.try_wait().expect("it is ours").is_some());
            over.store(ended.contains(&true), Ordering::Relaxed);
            assert_eq!(ended, [false; 2], "the sender, the receiver has ended");
        }
        over.store(true, Ordering::Relaxed);
    });
    child::send(ends.mail.path(), "stop", b"");
    assert!(ends.sender.passed_within(SOAK_PATIENCE * 2), "the sender");
    assert!(ends.receiver.passed_within(SOAK_PATIENCE), "the receiver");
    for who in ["sender", "receiver"] {
        eprintln!("{}", ends.receive(&format!("told-{who}")));
    }
    eprintln!("{seconds} s, {} faults, {} of them outages of all rails, 0 wrong, 0 hangs", tally.faults, tally.outages);
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
    const NAME: &str = "a_connection_comes_up_while_its_first_rail_is_down";
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
        let sent = sent_over(&network, 0);
        let mended = Instant::now();
        network.mend(0, how);
        let used = || (sent_over(&network, 0) > sent + (4 << 20)).then(|| mended.elapsed());
        let back = support::eventually("the rail is used", 10_000 * MS, used);
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
    const NAME: &str = "a_rail_that_is_down_at_init_is_used_when_it_comes_back";
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
        assert!(sent_over(&network, 1 - rail) > 4 << 20, "the other rail carries what there is");
        let sent = sent_over(&network, rail);
        let mended = Instant::now();
        network.mend(rail, how);
        let used = || (sent_over(&network, rail) > sent + (4 << 20)).then(|| mended.elapsed());
        let back = support::eventually("the rail is used", 10_000 * MS, used);
        child::send(ends.mail.path(), "stop", b"");
        ends.pass();
        eprintln!("{late:?}, {how:?}: connected after {connected} ms, rail {rail} used {back:?} after its return");
        assert!(connected < 1200, "{late:?}, {how:?}: connected after {connected} ms");
        assert!(back < 5000 * MS, "{late:?}, {how:?}: used {back:?} after its return");
    }
}
