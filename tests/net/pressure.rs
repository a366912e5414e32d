//! Pressure: system calls that fail as the kernel may have them fail, descriptors that run out, a peer that hardly
//! reads.
//!
//! The faults come from `faulty_calls.c`, which is loaded before the C library and touches only calls that the plugin's
//! code makes. Each run prints its seed; `TOWLINE_PRESSURE_SEED` repeats it as far as the threads' order allows, and
//! `TOWLINE_PRESSURE` makes each run last that many seconds.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::injector::{FAULTY_CALLS, faulty_calls};
use crate::support::netns::{Namespace, available};
use crate::support::pair::Pair;
use crate::support::{PATIENCE, child, descriptors, eventually, net, number, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Init, Memory, Part, Request};

const ROLE: &str = "under fire";

/// How long a run lasts when `TOWLINE_PRESSURE` does not say.
const SECONDS: u64 = 6;
/// Connections side by side in a round.
const CONNECTIONS: usize = 4;
/// Messages that are on the way on a connection at one time.
const AT_ONCE: usize = 8;
/// Such batches on each connection before it is closed.
const BATCHES: usize = 12;

/// On both sides of every limit of the transport.
const SIZES: [usize; 12] =
    [0, 1, 100, 960, 961, 5_000, 32 << 10, (32 << 10) + 1, 64 << 10, (64 << 10) + 1, 300_000, 1_200_000];

/// What the log says of a context that makes no connections.
const REFUSES: &str = "no connections will be made, because TOWLINE_KEY_FILE asks for encryption";

/// Set-up under fire. A call may fail: then it says so with NCCL's code for the system's or the peer's fault, the log
/// says why, and the same call works a little later.
fn insist<T>(what: &str, log: &Capture, failures: &AtomicUsize, mut attempt: impl FnMut() -> Result<T, Code>) -> T {
    eventually(what, PATIENCE, || {
        let said = log.records().len();
        match attempt() {
            Ok(made) => Some(made),
            Err(code) => {
                let is_theirs = matches!(code, Code::SystemError | Code::RemoteError);
                assert!(is_theirs, "{what}: {code:?}: {:?}", log.records().split_off(said));
                // Another thread may write the line, after the failure can be seen.
                eventually(&format!("why {what} failed with {code:?} is said"), PATIENCE, || {
                    let lines = log.records().split_off(said);
                    lines.iter().any(|line| line.is_warning()).then_some(())
                });
                failures.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    })
}

/// A small generator of choices: the same for the same seed.
struct Choices(u64);

impl Choices {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

/// The longest that any batch took.
static LONGEST: Mutex<Duration> = Mutex::new(Duration::ZERO);

/// Sizes and patterns of the messages that are on the way at one time.
fn batch(choices: &mut Choices) -> Vec<(usize, usize)> {
    (0..AT_ONCE).map(|_| (SIZES[choices.next(SIZES.len())], choices.next(1000))).collect()
}

/// Asks after requests until all are done.
fn finish(what: &str, batch: &[(usize, usize)], mut requests: Vec<Request>, done: impl Fn(&Request) -> bool) {
    let start = Instant::now();
    while !requests.is_empty() {
        requests.retain(|request| !done(request));
        assert!(start.elapsed() < PATIENCE, "hangs: {} {what} of {batch:?}", requests.len());
    }
    let mut longest = LONGEST.lock().expect("nobody panics with it");
    *longest = start.elapsed().max(*longest);
}

/// Messages of all sizes over one connection, several on the way at a time, each byte looked at. Each side has a thread
/// of its own, as in a job. Once there is a connection, no fault excuses an error.
fn exchange(pair: &Pair, seed: u64) -> usize {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut choices = Choices(seed);
            for _ in 0..BATCHES {
                let batch = batch(&mut choices);
                let send = |&(size, seed): &(usize, usize)| {
                    // SAFETY: the pattern is static.
                    unsafe { pair.send.post(crate::support::part(pattern(seed, size), None)) }.expect("isend")
                };
                let sent = batch.iter().map(send).collect();
                finish("sends", &batch, sent, |request| pair.send.test(request).expect("a send goes on").is_some());
            }
        });
        let mut choices = Choices(seed);
        for _ in 0..BATCHES {
            let batch = batch(&mut choices);
            let targets: Vec<Memory> = batch.iter().map(|(size, _)| Memory::new(*size)).collect();
            let receive = |target: &Memory| {
                // SAFETY: the memory lives until the requests are over; if they fail, the test ends with the process.
                unsafe { pair.recv.post(&[Part::all(target, None)]) }.expect("irecv")
            };
            let received = targets.iter().map(receive).collect();
            finish("receives", &batch, received, |request| {
                pair.recv.test(request).expect("a receive goes on").is_some()
            });
            for (target, &(size, seed)) in targets.iter().zip(&batch) {
                assert!(target.bytes() == pattern(seed, size), "wrong bytes: {size} of {batch:?}");
                assert!(target.guards_intact(), "overrun: {size} of {batch:?}");
            }
        }
    });
    BATCHES * AT_ONCE
}

/// A communicator with some connections, made, used and closed.
fn round(log: &Capture, failures: &AtomicUsize, seed: u64) -> usize {
    let net = net(ApiVersion::V12);
    // With a key `init` succeeds whatever fails, and the context refuses every connection, so that NCCL does not go on
    // in clear; the log says so. The next context is another try.
    let context: Context = insist("init", log, failures, || {
        let said = log.records().len();
        let context = net.init_with(&Init { comm_id: 7, ..Init::default() })?;
        let lines = log.records().split_off(said);
        let refuses = lines.iter().any(|line| line.text.contains(REFUSES));
        if refuses { Err(Code::SystemError) } else { Ok(context) }
    });
    let pairs: Vec<Pair> =
        (0..CONNECTIONS).map(|_| insist("a connection", log, failures, || Pair::connect(&context, 0))).collect();
    let messages = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (number, pair) in pairs.iter().enumerate() {
            let messages = &messages;
            scope.spawn(move || {
                messages.fetch_add(exchange(pair, seed ^ number as u64), Ordering::Relaxed);
            });
        }
    });
    for pair in pairs {
        pair.close().expect("close");
    }
    messages.into_inner()
}

/// What lasts as long as the process: a listening socket, and for each thread of the plugin an epoll descriptor and an
/// eventfd. Anything else is a leak.
fn nothing_leaked() {
    eventually("only what lasts as long as the process", PATIENCE, || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("/proc is there").flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        let threads = names.filter(|name| name.starts_with("towline")).count();
        let open = descriptors();
        let count = |text: &str| open.iter().filter(|(_, target)| target.contains(text)).count();
        let (epolls, eventfds, sockets) = (count("[eventpoll]"), count("[eventfd]"), crate::support::sockets());
        (epolls == threads && eventfds == threads && sockets == 1).then_some(())
    });
}

/// Runs [`amid_faults`] in a process of its own, into which the injector is loaded. `host`: in that namespace.
fn under_fire(name: &str, variables: &[(&str, &str)], host: Option<&Namespace>) {
    let mut command = host.map_or_else(|| child::command(name, ROLE), |host| host.command(name, ROLE));
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let seed = number("TOWLINE_PRESSURE_SEED").unwrap_or(since_1970.as_secs() % 1_000_000).to_string();
    command.env("TOWLINE_PRESSURE_SEED", &seed).env("FAULTY_CALLS_SEED", &seed).env("FAULTY_CALLS_RATE", "60");
    command.env("LD_PRELOAD", faulty_calls()).env("FAULTY_CALLS_LIBRARY", "libnccl-net");
    // Enough for growth on a machine with few processors, too.
    command.env("TOWLINE_STREAMS", "4").env("TOWLINE_WORKERS", "3").env("NCCL_SOCKET_IFNAME", "lo");
    let output = command.envs(variables.iter().copied()).output().expect("the test program starts again");
    let told = String::from_utf8_lossy(&output.stderr);
    println!("{told}");
    assert!(output.status.success(), "seed {seed}: {}\n{}", output.status, String::from_utf8_lossy(&output.stdout));
}

/// A run amid faults, then without.
fn amid_faults(name: &str) {
    let seconds = number("TOWLINE_PRESSURE").unwrap_or(SECONDS);
    let seed = number("TOWLINE_PRESSURE_SEED").expect("the parent gave a seed");
    let _watchdog = watchdog(seconds + 90);
    let (log, failures) = (Capture::start(), AtomicUsize::new(0));
    // Opened before, so that the injector finds its code.
    let _ = net(ApiVersion::V12);
    FAULTY_CALLS.arm(true);
    let start = Instant::now();
    let (mut rounds, mut messages) = (0, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        messages += round(&log, &failures, seed + rounds);
        rounds += 1;
    }
    FAULTY_CALLS.arm(false);
    let longest = std::mem::take(&mut *LONGEST.lock().expect("nobody panics with it"));
    let failed = failures.swap(0, Ordering::Relaxed);
    for quiet in 0..2 {
        round(&log, &failures, quiet);
    }
    assert_eq!(failures.into_inner(), 0, "with the injector silent everything works");
    nothing_leaked();

    let counts = FAULTY_CALLS.injected();
    let all: u32 = counts.values().map(|(_, faults)| faults).sum();
    eprintln!(
        "{name}: {rounds} rounds, {messages} messages, {all} faults, {failed} calls of set-up failed, longest batch {longest:?}"
    );
    for ((call, kind), (calls, faults)) in &counts {
        eprintln!("  {call} {kind}: {faults} in {calls} calls");
    }
    for kind in ["EAGAIN", "EINTR", "ENOBUFS", "ENOMEM", "EMFILE", "ENFILE", "short", "late"] {
        let of_kind: u32 = counts.iter().filter(|((_, its), _)| its == kind).map(|(_, (_, faults))| faults).sum();
        assert!(of_kind > 0, "no {kind} was injected");
    }
    if std::env::var(NEWS).is_ok() {
        let of = |kind: &str| counts[&("news".to_owned(), kind.to_owned())].1;
        assert!(of("ENOBUFS") > 0 && of("EINTR") > 0, "no reading of news failed");
    }
    for ((call, kind), (calls, faults)) in &counts {
        // Calls that are made a few times in the life of a process may be spared, and up to 1200 those kinds whose turn
        // has not come: of 779 calls four were refused, with five kinds.
        let of_call = || counts.iter().filter(|((its, _), _)| its == call).map(|(_, (_, faults))| *faults);
        let is_no_turn = *calls < 1200 && (1..of_call().count()).contains(&(of_call().sum::<u32>() as usize));
        assert!(*faults > 0 || *calls < 300 || is_no_turn, "{call} was never refused with {kind} in {calls} calls");
    }
}

/// One of the tests below, as the parent or as the child.
fn play(name: &str, variables: &[(&str, &str)]) {
    if child::role().is_some() { amid_faults(name) } else { under_fire(name, variables, None) }
}

#[test]
fn no_system_call_that_fails_for_a_moment_breaks_a_connection() {
    play("pressure::no_system_call_that_fails_for_a_moment_breaks_a_connection", &[]);
}

/// Set where the kernel has news of links all the time.
const NEWS: &str = "TEST_NEWS";

#[test]
fn nor_one_while_news_of_links_come_and_are_lost() {
    const NAME: &str = "pressure::nor_one_while_news_of_links_come_and_are_lost";
    if child::role().is_some() {
        return amid_faults(NAME);
    }
    if !available() {
        return;
    }
    let host = Namespace::new();
    let over = AtomicBool::new(false);
    let changes: String = (0..20).map(|number| format!("link set lo alias name-{number}\n")).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                host.ip_batch(&changes);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let _over = crate::support::at_end(|| over.store(true, Ordering::Relaxed));
        let seconds = number("TOWLINE_PRESSURE").unwrap_or(3).to_string();
        under_fire(NAME, &[(NEWS, "1"), ("TOWLINE_PRESSURE", &seconds)], Some(&host));
    });
}

/// The same on other paths. Run by `.ci/run`, and by `-- --ignored long::`.
mod long {
    use super::*;

    /// Between a call and the look at its result the peer's answer may come, on any stream, to another thread.
    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn nor_one_whose_threads_lose_the_processor_after_it() {
        play("pressure::long::nor_one_whose_threads_lose_the_processor_after_it", &[("FAULTY_CALLS_PAUSES", "3")]);
    }

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn nor_one_with_checksums() {
        play("pressure::long::nor_one_with_checksums", &[("TOWLINE_CHECKSUM", "1")]);
    }

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn nor_one_without_recovery() {
        play("pressure::long::nor_one_without_recovery", &[("TOWLINE_RECOVERY", "0")]);
    }

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn nor_one_that_is_encrypted() {
        let (_dir, key) = crate::support::key_file();
        play(
            "pressure::long::nor_one_that_is_encrypted",
            &[("TOWLINE_KEY_FILE", key.to_str().expect("a path in UTF-8"))],
        );
    }
}
