//! What becomes of a job of two ranks in each situation that Towline promises to survive or to end well, and what
//! becomes of it over another library in the same situation: the table in docs/dev/testing.md.
//!
//! `SITUATIONS_WITH=/path/to/lib.so cargo test --test net side_by_side -- --ignored --nocapture` prints both beside
//! each other; without the variable it looks at Towline alone. `SITUATIONS_TRIALS`: how often each (3),
//! `SITUATIONS_NAME`: only those whose name holds this, `SITUATIONS_AT_ONCE`: how many side by side (4),
//! `SITUATIONS_WATCH`: how many seconds to look at a job that may never move again (60).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use crate::support::child::{self, Guarded};
use crate::support::faults::{Cut, Network, nft};
use crate::support::injector::faulty_calls;
use crate::support::job::{self, Job, Outcome};
use crate::support::netns::available;
use crate::support::{PATIENCE, number, pattern};

const TEST: &str = "situations::side_by_side";

/// The rate of a rail in Mbit/s: several steps a second.
const MBIT: u32 = 100;

/// What is promised for Towline.
#[derive(Debug, Clone, Copy)]
enum Promise {
    /// It goes on, and no step takes longer than so many seconds.
    GoesOn(f64),
    /// It comes up within so many seconds, and goes on.
    Connects(f64),
    /// It moves at least so many Mbit/s each way.
    Moves(f64),
    /// Each rank that lives gets the remote error within so many seconds.
    Ends(f64),
    /// The close takes no longer.
    Closes(f64),
    /// Nothing is promised.
    Nothing,
}

struct Situation {
    name: &'static str,
    rails: usize,
    variables: &'static [(&'static str, &'static str)],
    promise: Promise,
    play: fn(&mut Job, &Network),
}

/// TOWLINE_PEER_TIMEOUT where a host vanishes, in place of a minute.
const SHORT: (&str, &str) = ("TOWLINE_PEER_TIMEOUT", "5");
const SET: &str = "1";

/// Cuts rails for a while, and looks on.
fn outage(job: &mut Job, network: &Network, rails: std::ops::Range<usize>, how: Cut, seconds: u64, watch: f64) {
    job.open();
    job.warm();
    job.fault(|_| rails.clone().for_each(|rail| network.cut(rail, how)));
    std::thread::sleep(Duration::from_secs(seconds));
    rails.for_each(|rail| network.mend(rail, how));
    job.watch(watch);
}

/// Has strangers come to the ports on which rank 1 listens, then lets the ranks connect.
fn strangers(job: &mut Job, network: &Network, kind: &str, watch: f64) {
    let listed = network.hosts.1.run(&["ss", "-Hltn"]);
    let ports: Vec<&str> =
        listed.lines().filter_map(|line| line.split_whitespace().nth(3)?.rsplit(':').next()).collect();
    assert!(!ports.is_empty(), "nobody listens");
    let mut command = network.hosts.0.command(TEST, "strangers");
    command.env("TEST_STRANGERS", kind).env("TEST_PORTS", ports.join(" ")).env(child::MAILBOX, job.mail());
    let _strangers = Guarded::start(command);
    job.wait_for("strangers");
    job.open();
    job.watch(watch);
}

const SITUATIONS: &[Situation] = &[
    Situation {
        name: "one of two rails: interface down for 10 s",
        rails: 2,
        variables: &[],
        promise: Promise::GoesOn(2.0),
        play: |job, network| outage(job, network, 1..2, Cut::DownHere, 10, 15.0),
    },
    Situation {
        name: "one of two rails: silent for 10 s",
        rails: 2,
        variables: &[],
        promise: Promise::GoesOn(5.0),
        play: |job, network| outage(job, network, 1..2, Cut::Silent, 10, 15.0),
    },
    Situation {
        name: "one of two rails: silent for good",
        rails: 2,
        variables: &[],
        promise: Promise::GoesOn(5.0),
        play: |job, network| {
            job.open();
            job.warm();
            job.fault(|_| network.cut(1, Cut::Silent));
            job.watch(60.0);
        },
    },
    Situation {
        name: "one of two rails: answers with resets for 10 s",
        rails: 2,
        variables: &[],
        promise: Promise::GoesOn(2.0),
        play: |job, network| outage(job, network, 1..2, Cut::Reset, 10, 10.0),
    },
    Situation {
        name: "one of two rails: silent while the job connects, and for 10 s",
        rails: 2,
        variables: &[],
        promise: Promise::Connects(3.0),
        play: |job, network| {
            network.cut(0, Cut::Silent);
            job.open();
            std::thread::sleep(Duration::from_secs(10));
            network.mend(0, Cut::Silent);
            job.watch(15.0);
        },
    },
    Situation {
        name: "the only stream is reset",
        rails: 1,
        variables: &[("TOWLINE_STREAMS", "1")],
        promise: Promise::GoesOn(2.0),
        play: |job, network| {
            job.open();
            job.warm();
            job.fault(|_| Network::reset_connections(&network.hosts.0));
            job.watch(5.0);
        },
    },
    Situation {
        name: "the only rail is silent for 5 s",
        rails: 1,
        variables: &[],
        promise: Promise::GoesOn(9.0),
        play: |job, network| outage(job, network, 0..1, Cut::Silent, 5, 10.0),
    },
    Situation {
        name: "the only rail's interface is down for 5 s",
        rails: 1,
        variables: &[],
        promise: Promise::GoesOn(9.0),
        play: |job, network| outage(job, network, 0..1, Cut::DownThere, 5, 10.0),
    },
    Situation {
        name: "the only rail's rate goes to one byte a second for 5 s",
        rails: 1,
        variables: &[],
        promise: Promise::GoesOn(9.0),
        play: |job, network| outage(job, network, 0..1, Cut::Stuck, 5, 10.0),
    },
    Situation {
        name: "two rails of 20 and 80 Mbit/s",
        rails: 2,
        variables: &[(job::LONG, SET)],
        promise: Promise::Moves(70.0),
        play: |job, network| {
            for host in [&network.hosts.0, &network.hosts.1] {
                for (rail, mbit) in [(0, 20), (1, 80)] {
                    let words = format!("dev rail{rail} root tbf rate {mbit}mbit burst 128k latency 50ms");
                    host.tc(&format!("qdisc replace {words}"));
                }
            }
            job.open();
            job.warm();
            job.fault(|_| ());
            job.watch(20.0);
        },
    },
    Situation {
        name: "a rank is killed",
        rails: 1,
        variables: &[],
        promise: Promise::Ends(1.25),
        play: |job, _| {
            job.open();
            job.warm();
            job.kill(1);
            job.watch(20.0);
        },
    },
    Situation {
        name: "a rank is killed, a child that it forked lives on",
        rails: 1,
        variables: &[(job::FORK, SET)],
        promise: Promise::Ends(1.25),
        play: |job, _| {
            job.open();
            job.warm();
            job.kill(1);
            job.watch(30.0);
        },
    },
    Situation {
        name: "a host vanishes amid transfers",
        rails: 1,
        variables: &[SHORT],
        promise: Promise::Ends(6.0),
        play: |job, network| {
            job.open();
            job.warm();
            job.fault(|_| network.cut(0, Cut::Silent));
            job.watch(seconds(60.0));
        },
    },
    Situation {
        name: "a host vanishes while the job is idle; it goes on 8 s later",
        rails: 1,
        variables: &[SHORT, (job::IDLE, SET)],
        promise: Promise::Ends(9.0),
        play: |job, network| {
            job.open();
            job.warm();
            job.fault(|_| network.cut(0, Cut::Silent));
            std::thread::sleep(Duration::from_secs(8));
            job.tell("go");
            job.watch(seconds(60.0));
        },
    },
    Situation {
        name: "a rank is stopped for 20 s",
        rails: 1,
        variables: &[("TOWLINE_PEER_TIMEOUT", "3")],
        promise: Promise::GoesOn(23.0),
        play: |job, _| {
            job.open();
            job.warm();
            job.fault(|job| job.signal(1, libc::SIGSTOP));
            std::thread::sleep(Duration::from_secs(20));
            job.signal(1, libc::SIGCONT);
            job.watch(10.0);
        },
    },
    Situation {
        name: "a firewall forgets the idle connections, drops their packets",
        rails: 1,
        variables: &[(job::IDLE, SET)],
        promise: Promise::GoesOn(6.0),
        play: |job, network| forgotten(job, network, false),
    },
    Situation {
        name: "a firewall forgets the idle connections, answers with resets",
        rails: 1,
        variables: &[(job::IDLE, SET)],
        promise: Promise::GoesOn(2.0),
        play: |job, network| forgotten(job, network, true),
    },
    Situation {
        name: "before the rightful peer: 200 port scans",
        rails: 1,
        variables: &[],
        promise: Promise::Connects(2.0),
        play: |job, network| strangers(job, network, "scans", 5.0),
    },
    Situation {
        name: "before the rightful peer: 20 connections with garbage",
        rails: 1,
        variables: &[],
        promise: Promise::Connects(2.0),
        play: |job, network| strangers(job, network, "garbage", 5.0),
    },
    Situation {
        name: "before the rightful peer: a connection that says nothing and stays",
        rails: 1,
        variables: &[],
        promise: Promise::Connects(2.0),
        play: |job, network| strangers(job, network, "silent", 60.0),
    },
    Situation {
        name: "amid 10,000 strangers that come, say something or nothing, and go",
        rails: 1,
        variables: &[],
        promise: Promise::Connects(2.0),
        play: |job, network| strangers(job, network, "crowd", 40.0),
    },
    Situation {
        name: "no descriptor left for 3 s when a rank accepts",
        rails: 1,
        variables: &[(job::NO_DESCRIPTORS, SET)],
        promise: Promise::Connects(6.0),
        play: |job, _| {
            job.open();
            job.watch(12.0);
        },
    },
    Situation {
        name: "one system call of 60 that moves data: EINTR",
        rails: 1,
        variables: &[(job::FAULTY, SET), ("FAULTY_CALLS_ONLY", "EINTR")],
        promise: Promise::GoesOn(2.0),
        play: under_fire,
    },
    Situation {
        name: "one system call of 60 that moves data: ENOBUFS",
        rails: 1,
        variables: &[(job::FAULTY, SET), ("FAULTY_CALLS_ONLY", "ENOBUFS")],
        promise: Promise::GoesOn(2.0),
        play: under_fire,
    },
    Situation {
        name: "one system call of 60 that moves data: ENOMEM",
        rails: 1,
        variables: &[(job::FAULTY, SET), ("FAULTY_CALLS_ONLY", "ENOMEM")],
        promise: Promise::GoesOn(2.0),
        play: under_fire,
    },
    Situation {
        name: "a bit of one packet in 50 is changed on its way",
        rails: 1,
        variables: &[],
        promise: Promise::Nothing,
        play: damaged,
    },
    Situation {
        name: "the same, with TOWLINE_CHECKSUM=1",
        rails: 1,
        variables: &[("TOWLINE_CHECKSUM", "1")],
        promise: Promise::GoesOn(5.0),
        play: damaged,
    },
    Situation {
        name: "a rank aborts 1 s after all fell silent; back 3 s later",
        rails: 1,
        variables: &[],
        promise: Promise::Closes(2.0),
        play: |job, network| {
            job.open();
            job.warm();
            job.fault(|_| network.cut(0, Cut::Silent));
            std::thread::sleep(Duration::from_secs(1));
            job.tell("abort");
            std::thread::sleep(Duration::from_secs(3));
            network.mend(0, Cut::Silent);
            job.watch(25.0);
        },
    },
];

/// How long to look at a job that may never move again.
fn seconds(usual: f64) -> f64 {
    number("SITUATIONS_WATCH").map_or(usual, |set| set as f64)
}

fn forgotten(job: &mut Job, network: &Network, with_reset: bool) {
    job.open();
    job.warm();
    std::thread::sleep(Duration::from_millis(700));
    network.forget_connections(with_reset);
    job.fault(|job| job.tell("go"));
    job.watch(seconds(60.0).min(if with_reset { 10.0 } else { f64::MAX }));
}

fn under_fire(job: &mut Job, _: &Network) {
    job.open();
    job.warm();
    job.fault(|_| ());
    job.watch(10.0);
}

/// The network cards of virtual links check no sums, so what is changed arrives: a bit of what a long packet carries.
fn damaged(job: &mut Job, network: &Network) {
    job.open();
    job.warm();
    let change = "add rule inet cut in iifname rail0 meta length > 1000 numgen random mod 50 == 0 \
                  @th,4000,8 set @th,4000,8 xor 1";
    job.fault(|_| nft(&network.hosts.1, change));
    job.watch(10.0);
}

/// The strangers: until the job is over.
fn play_strangers() {
    let ports = std::env::var("TEST_PORTS").expect("ports");
    let ports: Vec<SocketAddr> =
        ports.split(' ').map(|port| SocketAddr::from(([10, 77, 0, 2], port.parse().expect("a port")))).collect();
    let mail = child::mailbox();
    let connect = |at: usize| TcpStream::connect_timeout(&ports[at % ports.len()], PATIENCE);
    let started = || child::send(&mail, "strangers", b"");
    let mut kept = Vec::new();
    match std::env::var("TEST_STRANGERS").expect("a kind").as_str() {
        "scans" => (0..200).for_each(|at| drop(connect(at))),
        "garbage" => {
            for at in 0..20 {
                let mut stream = connect(at).expect("a connection");
                let _ = stream.write_all(pattern(at, 400));
                kept.push(stream);
            }
        }
        "silent" => (0..ports.len()).for_each(|at| kept.push(connect(at).expect("a connection"))),
        "crowd" => {
            for at in 0..10_000 {
                if at == 500 {
                    started();
                }
                let Ok(mut stream) = connect(at) else { continue };
                // A reset: else the kernel would run out of ports.
                let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
                let _ = match at % 4 {
                    0 => stream.write_all(pattern(at, 400)),
                    1 => stream.write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"),
                    2 => stream.write_all(b"G"),
                    _ => Ok(()),
                };
                // Some wait for an answer.
                if at % 50 == 0 {
                    let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
                    let _ = stream.read(&mut [0; 64]);
                }
            }
            std::process::exit(0);
        }
        kind => panic!("no strangers are called {kind}"),
    }
    started();
    crate::support::eventually("the end", Duration::from_secs(300), || mail.join("end").exists().then_some(()));
}

/// One trial.
fn trial(situation: &Situation, library: &Path) -> Outcome {
    let network = Network::new(situation.rails, MBIT);
    let mut variables = situation.variables.to_vec();
    let name = library.file_name().expect("a name").to_string_lossy().into_owned();
    let calls = if situation.variables.contains(&(job::FAULTY, SET)) { Some(faulty_calls()) } else { None };
    if let Some(calls) = calls.and_then(Path::to_str) {
        variables.extend([("LD_PRELOAD", calls), ("FAULTY_CALLS_LIBRARY", &name), ("FAULTY_CALLS_RATE", "60")]);
    }
    let mut job = Job::start(TEST, library, &network.hosts, &variables);
    (situation.play)(&mut job, &network);
    job.reports()
}

/// `slack`: how many times as long as promised it may take.
fn is_kept(promise: Promise, outcome: &Outcome, slack: f64) -> bool {
    match (promise, outcome) {
        (Promise::Nothing, _) => true,
        (Promise::GoesOn(most), Outcome::GoesOn { longest, .. }) => *longest <= slack * most,
        (Promise::Connects(most), Outcome::Connects { after, .. }) => *after <= slack * most,
        (Promise::Moves(least), Outcome::GoesOn { mbit, .. }) => *mbit >= least,
        (Promise::Ends(most), Outcome::Ends { error, after, all }) => {
            *all && *after <= slack * most && error.contains("ncclRemoteError")
        }
        (Promise::Closes(most), Outcome::Aborted { took, told }) => *took <= slack * most && told.is_some(),
        _ => false,
    }
}

/// An outcome in words with a number, and what that counts.
fn in_words(outcome: &Outcome) -> (String, f64, &'static str) {
    match outcome {
        Outcome::GoesOn { longest, .. } => ("goes on, its longest step".to_owned(), *longest, "s"),
        Outcome::Connects { after, .. } => ("connects and goes on, after".to_owned(), *after, "s"),
        Outcome::Aborted { told: None, took } => {
            ("closes, and the other rank hears nothing; took".to_owned(), *took, "s")
        }
        Outcome::Aborted { told: Some(told), .. } => {
            ("closes; the other rank hears of it after".to_owned(), *told, "s")
        }
        Outcome::Ends { error, after, all } => {
            let only = if *all { "" } else { " on one rank, the other waits" };
            (format!("ends{only}: {error}, after"), *after, "s")
        }
        Outcome::Hangs(stood) => ("stands still to the end of the trial, for".to_owned(), *stood, "s"),
        Outcome::Wrong(messages) => ("wrong bytes, in".to_owned(), *messages as f64, "messages"),
        Outcome::Stuck => ("a call does not return within".to_owned(), 20.0, "s"),
    }
}

/// The outcomes of all trials in words.
fn told(outcomes: &[Outcome], promise: Promise) -> String {
    let mut groups: Vec<(String, Vec<f64>, &str)> = Vec::new();
    for outcome in outcomes {
        let (what, number, unit) = match (promise, outcome) {
            (Promise::Moves(_), Outcome::GoesOn { mbit, .. }) => ("each way".to_owned(), *mbit, "Mbit/s"),
            _ => in_words(outcome),
        };
        match groups.iter_mut().find(|(its, _, _)| *its == what) {
            Some((_, numbers, _)) => numbers.push(number),
            None => groups.push((what, vec![number], unit)),
        }
    }
    let words = groups.iter().map(|(what, of, unit)| {
        let (least, most) = of.iter().fold((f64::MAX, f64::MIN), |(least, most), it| (least.min(*it), most.max(*it)));
        format!("{} times: {what} {least:.2} to {most:.2} {unit}", of.len())
    });
    words.collect::<Vec<_>>().join("; ")
}

/// Plays situations, several at a time, and prints a line for each.
fn play_all(situations: &[&Situation], libraries: &[PathBuf], trials: usize, at_once: usize, slack: f64) {
    // Long ones first, the libraries in turn.
    let mut tasks = Vec::new();
    for turn in 0..trials {
        for at in 0..situations.len() {
            tasks.extend((0..libraries.len()).map(|which| (at, which, turn)));
        }
    }
    tasks.reverse();
    let tasks = Mutex::new(tasks);
    let done = Mutex::new(vec![vec![Vec::new(); libraries.len()]; situations.len()]);
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let next = tasks.lock().expect("nobody panics with it").pop();
                    let Some((at, which, _)) = next else { break };
                    let outcome = trial(situations[at], &libraries[which]);
                    eprintln!("{} | {} | {outcome:?}", situations[at].name, libraries[which].display());
                    done.lock().expect("nobody panics with it")[at][which].push(outcome);
                }
            });
        }
    });
    let done = done.into_inner().expect("nobody panics with it");
    for (situation, outcomes) in situations.iter().zip(&done) {
        let cells: Vec<String> = outcomes.iter().map(|it| told(it, situation.promise)).collect();
        eprintln!("| {} | {} |", situation.name, cells.join(" | "));
    }
    for (situation, outcomes) in situations.iter().zip(&done) {
        for outcome in &outcomes[0] {
            assert!(
                is_kept(situation.promise, outcome, slack),
                "{}: {outcome:?}, not {:?}",
                situation.name,
                situation.promise
            );
        }
    }
}

#[test]
#[ignore = "takes minutes: each situation, several times, over one library or two"]
fn side_by_side() {
    if job::plays() {
        return;
    }
    if child::role().as_deref() == Some("strangers") {
        return play_strangers();
    }
    if !available() {
        return;
    }
    let only = std::env::var("SITUATIONS_NAME").unwrap_or_default();
    let situations: Vec<&Situation> = SITUATIONS.iter().filter(|it| it.name.contains(&only)).collect();
    let other = std::env::var_os("SITUATIONS_WITH").map(PathBuf::from);
    let libraries: Vec<PathBuf> = std::iter::once(crate::support::library()).chain(other).collect();
    play_all(
        &situations,
        &libraries,
        number("SITUATIONS_TRIALS").map_or(3, |set| set as usize),
        number("SITUATIONS_AT_ONCE").map_or(4, |set| set as usize),
        1.0,
    );
}

/// Three of them each time; the others have tests of their own, and what they promise is asserted there.
#[test]
fn a_job_goes_on_or_ends_as_promised() {
    const NAMES: [&str; 3] =
        ["the only stream is reset", "a rank is killed", "before the rightful peer: 20 connections with garbage"];
    if !available() {
        return;
    }
    let situations: Vec<&Situation> = SITUATIONS.iter().filter(|it| NAMES.contains(&it.name)).collect();
    assert_eq!(situations.len(), NAMES.len());
    // Beside other tests, on few processors.
    play_all(&situations, &[crate::support::library()], 1, 3, 2.0);
}
