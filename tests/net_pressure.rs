//! Pressure: system calls that fail as the kernel may have them fail, descriptors that run out, a peer that hardly reads.
//!
//! The faults come from `faulty_calls.c`, which is loaded before the C library and touches only calls that the plugin's
//! code makes. Each run prints its seed; `TOWLINE_PRESSURE_SEED` repeats it as far as the threads' order allows, and
//! `TOWLINE_PRESSURE` makes each run last that many seconds.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use support::injector::Injector;
use support::{PATIENCE, child, descriptors, eventually, net, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Init, Memory, Pair, Part, Request};

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
    [0, 1, 100, 960, 961, 5_000, 16 << 10, (16 << 10) + 1, 64 << 10, (64 << 10) + 1, 300_000, 1_200_000];

/// The library of `tests/faulty_calls.c`, built once.
fn faulty_calls() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faulty_calls.c");
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libfaulty_calls.so");
        // Built under another name first: a test of another process may be using it.
        let draft = library.with_extension(std::process::id().to_string());
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&draft);
        assert!(compiler.arg(source).arg("-ldl").status().expect("cc starts").success());
        std::fs::rename(&draft, &library).expect("the library can be put in place");
        library
    })
}

const INJECTOR: Injector = Injector {
    arm: c"faulty_calls_arm",
    report: c"faulty_calls_report",
    complaint: "the injector did not find the plugin's code",
};

/// Set-up under fire. A call may fail: then it says so with NCCL's code for the system's or the peer's fault, the log
/// says why, and the same call works a little later.
fn insist<T>(what: &str, log: &Capture, failures: &AtomicUsize, mut attempt: impl FnMut() -> Result<T, Code>) -> T {
    eventually(what, PATIENCE, || {
        let said = log.records().len();
        match attempt() {
            Ok(made) => Some(made),
            Err(code) => {
                assert!(matches!(code, Code::SystemError | Code::RemoteError), "{what}: {code:?}");
                let lines = log.records().split_off(said);
                assert!(
                    lines.iter().any(|line| line.is_warning()),
                    "{what} failed without a word: {code:?}, {lines:?}"
                );
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

/// Messages of all sizes over one connection, several on the way at a time, each byte looked at. Once there is a
/// connection, no fault excuses an error.
fn exchange(pair: &Pair, choices: &mut Choices) -> usize {
    for _ in 0..BATCHES {
        let sizes: Vec<usize> = (0..AT_ONCE).map(|_| SIZES[choices.next(SIZES.len())]).collect();
        let seeds: Vec<usize> = (0..AT_ONCE).map(|_| choices.next(1000)).collect();
        let targets: Vec<Memory> = sizes.iter().map(|size| Memory::new(*size)).collect();
        let receive = |target: &Memory| {
            // SAFETY: the memory lives until the requests are over; if they fail, the test ends with the process.
            unsafe { pair.recv.post(&[Part::all(target, None)]) }.expect("irecv")
        };
        let send = |at: usize| {
            // SAFETY: the pattern is static.
            unsafe { pair.send.post(support::part(pattern(seeds[at], sizes[at]), None)) }.expect("isend")
        };
        let sends_first = choices.next(2) == 0;
        let (mut received, mut sent) = (Vec::new(), Vec::new());
        if sends_first {
            sent.extend((0..AT_ONCE).map(send));
        }
        received.extend(targets.iter().map(receive));
        if !sends_first {
            sent.extend((0..AT_ONCE).map(send));
        }
        let start = Instant::now();
        while !sent.is_empty() || !received.is_empty() {
            sent.retain(|request: &Request| pair.send.test(request).expect("a send goes on").is_none());
            received.retain(|request: &Request| pair.recv.test(request).expect("a receive goes on").is_none());
            assert!(
                start.elapsed() < PATIENCE,
                "hangs: {} sends, {} receives of {sizes:?}",
                sent.len(),
                received.len()
            );
        }
        let mut longest = LONGEST.lock().expect("nobody panics with it");
        *longest = start.elapsed().max(*longest);
        drop(longest);
        for (at, target) in targets.iter().enumerate() {
            assert!(target.bytes() == pattern(seeds[at], sizes[at]), "wrong bytes: {} of {sizes:?}", sizes[at]);
            assert!(target.guards_intact(), "overrun: {} of {sizes:?}", sizes[at]);
        }
    }
    BATCHES * AT_ONCE
}

/// A communicator with some connections, made, used and closed.
fn round(log: &Capture, failures: &AtomicUsize, seed: u64) -> usize {
    let net = net(ApiVersion::V12);
    let context: Context = insist("init", log, failures, || net.init_with(&Init { comm_id: 7, ..Init::default() }));
    let pairs: Vec<Pair> =
        (0..CONNECTIONS).map(|_| insist("a connection", log, failures, || Pair::connect(&context, 0))).collect();
    let messages = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (number, pair) in pairs.iter().enumerate() {
            let messages = &messages;
            scope.spawn(move || {
                let mut choices = Choices(seed ^ number as u64);
                messages.fetch_add(exchange(pair, &mut choices), Ordering::Relaxed);
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
        let (epolls, eventfds, sockets) = (count("[eventpoll]"), count("[eventfd]"), support::sockets());
        (epolls == threads && eventfds == threads && sockets == 1).then_some(())
    });
}

/// What the environment says, if it does.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|set| set.parse().expect("a number"))
}

/// Runs [`amid_faults`] in a process of its own, into which the injector is loaded.
fn under_fire(name: &str, variables: &[(&str, &str)]) {
    let mut command = child::command(name, "under fire");
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
    INJECTOR.arm(true);
    let start = Instant::now();
    let (mut rounds, mut messages) = (0, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        messages += round(&log, &failures, seed + rounds);
        rounds += 1;
    }
    INJECTOR.arm(false);
    let longest = std::mem::take(&mut *LONGEST.lock().expect("nobody panics with it"));
    let failed = failures.swap(0, Ordering::Relaxed);
    for quiet in 0..2 {
        round(&log, &failures, quiet);
    }
    assert_eq!(failures.into_inner(), 0, "with the injector silent everything works");
    nothing_leaked();

    let counts = INJECTOR.injected();
    let all: u32 = counts.values().map(|(_, faults)| faults).sum();
    eprintln!(
        "{name}: {rounds} rounds, {messages} messages, {all} faults, {failed} calls of set-up failed, longest batch {longest:?}"
    );
    for ((call, kind), (calls, faults)) in &counts {
        eprintln!("  {call} {kind}: {faults} in {calls} calls");
    }
    for kind in ["EAGAIN", "EINTR", "ENOBUFS", "ENOMEM", "EMFILE", "ENFILE", "short"] {
        let of_kind: u32 = counts.iter().filter(|((_, its), _)| its == kind).map(|(_, (_, faults))| faults).sum();
        assert!(of_kind > 0, "no {kind} was injected");
    }
    for ((call, kind), (calls, faults)) in &counts {
        // Calls that are made a few times in the life of a process may be spared.
        assert!(*faults > 0 || *calls < 300, "{call} was never refused with {kind} in {calls} calls");
    }
}

/// One of the tests below, as the parent or as the child.
fn play(name: &str, variables: &[(&str, &str)]) {
    if child::role().is_some() { amid_faults(name) } else { under_fire(name, variables) }
}

#[test]
fn no_system_call_that_fails_for_a_moment_breaks_a_connection() {
    play("no_system_call_that_fails_for_a_moment_breaks_a_connection", &[]);
}

#[test]
fn nor_one_with_checksums() {
    play("nor_one_with_checksums", &[("TOWLINE_CHECKSUM", "1")]);
}

#[test]
fn nor_one_without_recovery() {
    play("nor_one_without_recovery", &[("TOWLINE_RECOVERY", "0")]);
}

#[test]
fn nor_one_that_is_encrypted() {
    let dir = tempfile::tempdir().expect("a directory for temporary files");
    let key = dir.path().join("key");
    std::fs::write(&key, [0x5A; 32]).expect("a file");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&key, mode).expect("a mode");
    play("nor_one_that_is_encrypted", &[("TOWLINE_KEY_FILE", key.to_str().expect("a path in UTF-8"))]);
}
