//! Verbs calls that fail as a device, its driver or the kernel may have them fail.
//!
//! The faults come from `faulty_verbs.c`, which `tests/rdma_vm/suite.sh` builds and which stands between the plugin and
//! libibverbs in a process of its own. Each run prints its seed; `RDMA_FAULTS_SEED` repeats it as far as the threads'
//! order allows, and `RDMA_FAULTS=60` makes each run last that many seconds.
//!
//! These tests need two RDMA devices, as the test machine has them.

#![cfg(feature = "rdma")]

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::injector::{Injector, as_gpu, faulty_verbs, has_gpu};
use crate::support::pair::Pair;
use crate::support::{PATIENCE, child, eventually, net, number, pattern, watchdog};
use towline::host::log::{self, Subscription};
use towline::host::{
    ApiVersion, Code, Context, Memory, Mr, PTR_DMABUF, PTR_HOST, Part, RecvComm, Request, SendComm, Sizes,
};

/// How long a run lasts when `RDMA_FAULTS` does not say.
const SECONDS: u64 = 2;
/// Connections side by side.
const CONNECTIONS: u64 = 2;
/// Batches of groups on each connection before it is closed: where nothing fails, where a fault ends it, and where it
/// goes on, which is to last until lost queue pairs are back.
const QUIET: usize = 3;
const ENDING: usize = 12;
const LASTING: usize = 40;
/// How long the other side may take to hear that a connection has ended.
const HEARSAY: Duration = Duration::from_secs(5);

/// On both sides of every limit of the transport.
const SIZES: [usize; 11] = [0, 1, 8, 220, 1024, 1025, 5000, 16 << 10, (16 << 10) + 1, 100_000, 300_000];

const INJECTOR: Injector = Injector {
    arm: c"faulty_verbs_arm",
    report: c"faulty_verbs_report",
    complaint: "the plugin did not find its verbs in the injector",
};

/// The warnings of the plugin, and what the run has counted.
struct Run {
    warnings: Arc<Mutex<Vec<String>>>,
    _subscription: Subscription,
    /// The connection ends when a queue pair is lost: it has one only.
    ends: bool,
    setups_failed: AtomicU32,
    registrations_failed: AtomicU32,
    connections: AtomicU32,
    ended: AtomicU32,
    messages: AtomicU32,
    flushes: AtomicU32,
}

impl Run {
    fn start(ends: bool) -> Self {
        let warnings = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&warnings);
        let subscription = log::subscribe(move |record| {
            if record.is_warning() {
                sink.lock().expect("nobody panics with it").push(record.text.clone());
            }
        });
        let zero = || AtomicU32::new(0);
        Self {
            warnings,
            _subscription: subscription,
            ends,
            setups_failed: zero(),
            registrations_failed: zero(),
            connections: zero(),
            ended: zero(),
            messages: zero(),
            flushes: zero(),
        }
    }

    fn warnings(&self) -> usize {
        self.warnings.lock().expect("nobody panics with it").len()
    }

    /// What was said after the first so many.
    fn said_since(&self, before: usize) -> Vec<String> {
        self.warnings.lock().expect("nobody panics with it")[before..].to_vec()
    }

    /// A call under fire. It may fail: then it says so with NCCL's code for the system's or the peer's fault, the log
    /// says why, and the same call works a little later.
    fn insist<T>(&self, what: &str, failures: &AtomicU32, mut attempt: impl FnMut() -> Result<T, Code>) -> T {
        eventually(what, PATIENCE, || {
            let before = self.warnings();
            match attempt() {
                Ok(made) => Some(made),
                Err(code) => {
                    assert!(matches!(code, Code::SystemError | Code::RemoteError), "{what}: {code:?}");
                    let said = self.said_since(before);
                    assert!(!said.is_empty(), "{what} failed without a word: {code:?}");
                    failures.fetch_add(1, Ordering::Relaxed);
                    None
                }
            }
        })
    }

    fn register<T>(&self, attempt: impl FnMut() -> Result<T, Code>) -> T {
        self.insist("regMr", &self.registrations_failed, attempt)
    }

    /// A connection from the first device to the second, or why there is none.
    fn connect(&self, context: &Context) -> Pair {
        let connected = || {
            let (listener, mut handle) = context.listen(1)?;
            let start = Instant::now();
            let (mut send, mut recv) = (None, None);
            loop {
                if send.is_none() {
                    send = context.connect(0, &mut handle)?;
                }
                if recv.is_none() {
                    recv = match listener.accept() {
                        Ok(recv) => recv,
                        Err(code) => {
                            // Asked to its end: what is abandoned half-made lasts until `finalize`.
                            let _ = send.map_or_else(|| context.connect_within(0, &mut handle, PATIENCE), Ok);
                            return Err(code);
                        }
                    };
                }
                match (send, recv) {
                    (Some(send), Some(recv)) => return Ok(Pair { send, recv }),
                    still => (send, recv) = still,
                }
                let ends = (send.is_some(), recv.is_some());
                assert!(start.elapsed() < PATIENCE, "setting up hangs: {ends:?}, {:#?}", self.said_since(0));
                std::thread::yield_now();
            }
        };
        let pair = self.insist("a connection", &self.setups_failed, connected);
        self.connections.fetch_add(1, Ordering::Relaxed);
        pair
    }

    /// Posts a request. Memory that is not registered is, for the request: when that fails, the request alone does.
    fn post(
        &self,
        is_registered: bool,
        mut attempt: impl FnMut() -> Result<Option<Request>, Code>,
    ) -> Result<Request, Code> {
        let (start, mut failures) = (Instant::now(), 0);
        loop {
            match attempt() {
                Ok(Some(request)) => return Ok(request),
                Ok(None) => std::thread::yield_now(),
                Err(code) if is_registered || failures > 30 => return Err(code),
                Err(_) => {
                    failures += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            assert!(start.elapsed() < PATIENCE, "a request is never taken");
        }
    }
}

/// A small generator of choices: the same for the same seed.
struct Choices(u64);

impl Choices {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

/// A receive of several parts, and what is to be in it.
struct Group {
    /// Its memory stands in for a GPU's: it is flushed before it is looked at.
    is_gpu: bool,
    targets: Vec<Memory>,
    regions: Vec<Option<Mr>>,
    contents: Vec<&'static [u8]>,
}

/// Some groups of messages, all on the way at one time, each byte looked at.
fn batch(run: &Run, pair: &Pair, choices: &mut Choices, kept: &mut Vec<Group>) -> Result<(), Code> {
    let mut group = || {
        let parts = [1, 1, 1, 2, 4, 8][choices.next(6)];
        let contents: Vec<_> =
            (0..parts).map(|_| pattern(choices.next(1000), SIZES[choices.next(SIZES.len())])).collect();
        let targets: Vec<_> = contents.iter().map(|bytes| Memory::new(bytes.len() + choices.next(2) * 100)).collect();
        let is_gpu = has_gpu() && choices.next(3) == 0;
        let regions = targets.iter().map(|target| match is_gpu {
            true => Some(run.register(|| as_gpu(&pair.recv, target))),
            false => {
                let is_registered = parts > 1 || choices.next(3) > 0;
                is_registered.then(|| run.register(|| pair.recv.register(target)))
            }
        });
        Group { is_gpu, regions: regions.collect(), targets, contents }
    };
    let groups: Vec<Group> = (0..4).map(|_| group()).collect();
    let first = kept.len();
    // They live until the connection is closed, however this ends.
    kept.extend(groups);
    let groups = &kept[first..];
    let sources: Vec<Option<Mr>> = groups
        .iter()
        .flat_map(|group| &group.contents)
        .map(|bytes| {
            let place = bytes.as_ptr().cast_mut().cast();
            let is_registered = !bytes.is_empty() && choices.next(3) > 0;
            is_registered.then(|| run.register(|| pair.send.reg_mr(place, bytes.len(), PTR_HOST)))
        })
        .collect();
    let receive_all = |received: &mut Vec<(usize, Request)>| -> Result<(), Code> {
        for (number, group) in groups.iter().enumerate() {
            let tags = 0..;
            let parts: Vec<Part<'_>> = (group.targets.iter().zip(&group.regions).zip(tags))
                .map(|((target, region), tag)| Part::all(target, region.as_ref()).tagged(tag))
                .collect();
            let is_registered = group.regions.iter().all(Option::is_some);
            // SAFETY: the memory lives until the connection is closed.
            received.push((number, run.post(is_registered, || unsafe { pair.recv.irecv(&parts) })?));
        }
        Ok(())
    };
    let send_all = |sent: &mut Vec<Request>| -> Result<(), Code> {
        let mut sources = sources.iter();
        for group in groups {
            for (bytes, tag) in group.contents.iter().zip(0..) {
                let region = sources.next().expect("one for each");
                let part = || crate::support::part(bytes, region.as_ref()).tagged(tag);
                // SAFETY: the pattern is static.
                sent.push(run.post(region.is_some(), || unsafe { pair.send.isend(part()) })?);
            }
        }
        Ok(())
    };
    let (mut received, mut sent) = (Vec::new(), Vec::new());
    if choices.next(2) == 0 {
        send_all(&mut sent)?;
        receive_all(&mut received)?;
    } else {
        receive_all(&mut received)?;
        send_all(&mut sent)?;
    }
    let start = Instant::now();
    let mut flushed: Vec<Request> = Vec::new();
    while !sent.is_empty() || !received.is_empty() || !flushed.is_empty() {
        let mut failure = None;
        sent.retain(|request| outcome(&mut failure, pair.send.test(request)).is_none());
        flushed.retain(|request| outcome(&mut failure, pair.recv.test(request)).is_none());
        received.retain(|(number, request)| {
            let Some(sizes) = outcome(&mut failure, pair.recv.test(request)) else { return true };
            let Some(sizes) = sizes else { return false };
            let group = &groups[*number];
            if let (true, Some(target), Some(region)) = (group.is_gpu, group.targets.last(), group.regions.last()) {
                // SAFETY: the memory lives until the connection is closed.
                match unsafe { pair.recv.iflush(Part::all(target, region.as_ref())) } {
                    Ok(request) => flushed.extend(request),
                    Err(code) => failure = Some(code),
                }
                run.flushes.fetch_add(1, Ordering::Relaxed);
            }
            for ((target, bytes), size) in group.targets.iter().zip(&group.contents).zip(sizes.iter()) {
                assert_eq!(*size as usize, bytes.len(), "a size");
                assert!(target.bytes()[..bytes.len()] == **bytes, "wrong bytes: {}", bytes.len());
                assert!(target.guards_intact(), "overrun: {}", bytes.len());
                run.messages.fetch_add(1, Ordering::Relaxed);
            }
            false
        });
        if let Some(code) = failure {
            return Err(code);
        }
        assert!(
            start.elapsed() < PATIENCE,
            "hangs: {} sends, {} receives, {} flushes; {:#?}",
            sent.len(),
            received.len(),
            flushed.len(),
            run.said_since(run.warnings().saturating_sub(20))
        );
    }
    Ok(())
}

/// Whether a request is over: with its sizes, or with a failure, which is kept.
fn outcome<T>(failure: &mut Option<Code>, answer: Result<Option<T>, Code>) -> Option<Option<T>> {
    match answer {
        Ok(None) => None,
        Ok(done) => Some(done),
        Err(code) => {
            *failure = Some(code);
            Some(None)
        }
    }
}

/// Asks until the sending end says that the connection has ended.
fn send_end_fails(send: &SendComm) -> Code {
    let (byte, mut begun) = ([0; 1], Vec::new());
    eventually("the sending end hears of it", HEARSAY, || {
        // SAFETY: a byte that is never written; the connection is closed before it goes, or the request is over.
        match unsafe { send.isend(Part::new(byte.as_ptr().cast_mut().cast(), 0, None)) } {
            Ok(request) => begun.extend(request),
            Err(code) => return Some(code),
        }
        // A connection that has failed accepts the call, and the request says so.
        failed_of(&mut begun, |request| send.test(request))
    })
}

/// Tests what was begun: forgets what is over, and gives the first failure.
fn failed_of(begun: &mut Vec<Request>, test: impl Fn(&Request) -> Result<Option<Sizes>, Code>) -> Option<Code> {
    let mut failed = None;
    begun.retain(|request| match test(request) {
        Ok(done) => done.is_none(),
        Err(code) => {
            failed.get_or_insert(code);
            false
        }
    });
    failed
}

/// The same for the receiving end. There is room for whatever came before.
fn receive_end_fails(recv: &RecvComm, (target, region): (&Memory, &Mr)) -> Code {
    let mut begun = Vec::new();
    eventually("the receiving end hears of it", HEARSAY, || {
        // SAFETY: the memory outlives the connection.
        match unsafe { recv.irecv(&[Part::all(target, Some(region))]) } {
            Ok(request) => begun.extend(request),
            Err(code) => return Some(code),
        }
        failed_of(&mut begun, |request| recv.test(request))
    })
}

/// A connection, made, used and closed.
fn life(run: &Run, context: &Context, seed: u64, batches: usize) {
    let mut choices = Choices(seed);
    let (mut kept, last) = (Vec::new(), Memory::new(300_000));
    let pair = run.connect(context);
    let region = run.register(|| pair.recv.register(&last));
    for _ in 0..batches {
        let Err(code) = batch(run, &pair, &mut choices, &mut kept) else { continue };
        assert!(run.ends, "a connection with recovery has ended: {code:?}, {:#?}", run.said_since(0));
        for code in [code, send_end_fails(&pair.send), receive_end_fails(&pair.recv, (&last, &region))] {
            let is_right = matches!(code, Code::SystemError | Code::RemoteError);
            assert!(is_right, "{code:?}: {:#?}", run.said_since(run.warnings().saturating_sub(10)));
        }
        run.ended.fetch_add(1, Ordering::Relaxed);
        break;
    }
    pair.send.close().expect("closeSend");
    // Registrations end before their connection.
    drop(region);
    kept.iter_mut().for_each(|group: &mut Group| group.regions.clear());
    pair.recv.close().expect("closeRecv");
}

/// Some of them side by side.
fn round(run: &Run, context: &Context, seed: u64, batches: usize) {
    std::thread::scope(|scope| {
        for number in 0..CONNECTIONS {
            scope.spawn(move || life(run, context, seed * CONNECTIONS + number, batches));
        }
    });
}

/// What the kernel's resource tracker counts.
fn resources() -> String {
    let output =
        Command::new("rdma").args(["resource", "show"]).env_remove("LD_PRELOAD").output().expect("rdma starts");
    String::from_utf8(output.stdout).expect("ASCII")
}

/// A process into which the injector is loaded, playing the test `name`.
fn under_fire(name: &str, seed: u64, variables: &[(&str, &str)]) {
    let mut command = child::command(name, "under fire");
    command.env("RDMA_FAULTS_SEED", seed.to_string()).env("FAULTY_VERBS_SEED", seed.to_string());
    command.env("LD_PRELOAD", faulty_verbs()).env("TOWLINE_BACKEND", "rdma").envs(variables.iter().copied());
    let output = command.output().expect("the test program starts again");
    println!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "seed {seed}: {}\n{}", output.status, String::from_utf8_lossy(&output.stdout));
}

fn seed() -> u64 {
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    number("RDMA_FAULTS_SEED").unwrap_or(since_1970.as_secs() % 1_000_000)
}

/// Words for a call of the data path that was refused.
fn tells_of_a_data_call(line: &str) -> bool {
    [
        "posting a work request",
        "posting a receive",
        "polling a completion queue",
        "the flush of a receive",
        "cannot be flushed",
    ]
    .iter()
    .any(|words| line.contains(words))
}

/// A run amid faults, then without. Connections have so many queue pairs; none: they end with the first that is lost.
fn amid_faults(name: &str, queue_pairs: u32) {
    let ends = queue_pairs == 0;
    let (seconds, seed) = (number("RDMA_FAULTS").unwrap_or(SECONDS), seed());
    let _watchdog = watchdog(seconds + 90);
    let run = Run::start(ends);
    let context = net(ApiVersion::V12).init().expect("init");
    round(&run, &context, 0, QUIET);
    let settled = || {
        let before = resources();
        std::thread::sleep(Duration::from_millis(300));
        (before == resources()).then_some(before)
    };
    let before = eventually("the kernel's count settles", PATIENCE, settled);

    let quiet = run.warnings();
    assert_eq!(quiet, 0, "{:#?}", run.said_since(0));
    INJECTOR.arm(true);
    let start = Instant::now();
    let mut rounds = 0;
    while start.elapsed() < Duration::from_secs(seconds) {
        rounds += 1;
        round(&run, &context, seed + rounds, if ends { ENDING } else { LASTING });
    }
    INJECTOR.arm(false);
    let lasted = start.elapsed();
    let count = |number: &AtomicU32| number.load(Ordering::Relaxed);
    let (setups, registrations) = (count(&run.setups_failed), count(&run.registrations_failed));
    let (connections, ended, messages) = (count(&run.connections), count(&run.ended), count(&run.messages));
    let counts = INJECTOR.injected();
    let all: u32 = counts.values().map(|(_, faults)| faults).sum();
    eprintln!(
        "{name}: seed {seed}, {lasted:.1?}, {rounds} rounds, {connections} connections, {ended} of them ended by a fault, \
         {messages} messages, {} flushes, {all} faults, {setups} set-ups and {registrations} registrations failed",
        count(&run.flushes)
    );
    let said = run.said_since(quiet);
    let times = |words: &str| said.iter().filter(|line| line.contains(words)).count();
    let (losses, waits) = (times(" goes on over "), times(" waits for a queue pair"));
    eprintln!("  {losses} times a side went on with fewer queue pairs, {waits} times it waited for one");
    for ((call, kind), (calls, faults)) in counts.iter().filter(|(_, (calls, _))| *calls > 0) {
        eprintln!("  {call} {kind}: {faults} in {calls} calls");
    }
    // Few calls are made in a short run, and it may be that hardly any was refused, or as the connection was closed.
    let refused: u32 = counts.iter().filter(|((call, _), _)| call == "post_send").map(|(_, (_, faults))| faults).sum();
    // With one there is none to go on with.
    let is_right = if queue_pairs > 1 { refused < 3 || losses > 0 } else { losses == 0 };
    assert!(is_right, "{losses} losses of a queue pair, {refused} refused");
    assert!(
        if ends { waits == 0 } else { queue_pairs > 1 || refused < 3 || waits > 0 },
        "{waits} waits, {refused} refused"
    );

    // A warning on the side of a connection that failed, which says what; that the peer gave up is one for each peer
    // process in a while.
    let is_end = |line: &&String| {
        let goes_on = line.contains(" goes on over ") || line.contains(" waits for a queue pair");
        (line.contains("sending to ") || line.contains("receiving from ")) && line.contains(" failed: ") && !goes_on
    };
    let failed: Vec<_> = said.iter().filter(is_end).collect();
    assert!(failed.len() >= ended as usize, "{ended} ended: {failed:#?}");
    assert!(failed.len() <= (2 * ended + 2 * setups) as usize, "{ended} ended, {setups} not set up: {failed:#?}");
    assert!(failed.iter().filter(|line| tells_of_a_data_call(line)).count() >= ended as usize, "{failed:#?}");

    // With the injector silent everything works.
    for silent in 0..2 {
        round(&run, &context, silent, QUIET);
    }
    assert_eq!((count(&run.setups_failed), count(&run.registrations_failed)), (setups, registrations));
    assert_eq!(count(&run.ended), ended);
    let end = Instant::now() + PATIENCE;
    while resources() != before {
        assert!(Instant::now() < end, "before: {before}\nafter: {}", resources());
        std::thread::sleep(Duration::from_millis(50));
    }
    for ((call, kind), (calls, faults)) in &counts {
        // Calls that are rare may be spared.
        assert!(
            *faults > 0 || *calls < 10_000 || call == "poll_cq",
            "{call} was never refused with {kind} in {calls} calls"
        );
    }
}

/// The test `name`: here it is played in a process of its own with each of these variables, there amid faults.
fn play(name: &str, queue_pairs: u32, runs: &[&[(&str, &str)]]) {
    match child::role() {
        Some(_) => amid_faults(name, queue_pairs),
        None => runs.iter().for_each(|variables| under_fire(name, seed(), variables)),
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn without_recovery_a_refused_call_ends_the_connection_on_both_sides() {
    let variables = [
        ("TOWLINE_RECOVERY", "0"),
        ("FAULTY_VERBS_SETUP", "30"),
        ("FAULTY_VERBS_POLL", "20000"),
        ("FAULTY_VERBS_FLUSH", "200"),
        ("FAULTY_VERBS_GPU", "1"),
    ];
    play("faults::without_recovery_a_refused_call_ends_the_connection_on_both_sides", 0, &[&variables]);
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn with_several_queue_pairs_it_goes_on() {
    let split = |split| {
        [
            ("FAULTY_VERBS_SETUP", "60"),
            ("FAULTY_VERBS_DATA", "300"),
            ("FAULTY_VERBS_FLUSH", "20"),
            ("FAULTY_VERBS_GPU", "1"),
            ("NCCL_IB_QPS_PER_CONNECTION", "4"),
            ("NCCL_IB_SPLIT_DATA_ON_QPS", split),
        ]
    };
    play("faults::with_several_queue_pairs_it_goes_on", 4, &[&split("1"), &split("0")]);
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn with_one_queue_pair_it_waits_for_another() {
    let variables = [
        ("FAULTY_VERBS_SETUP", "60"),
        ("FAULTY_VERBS_DATA", "200"),
        ("FAULTY_VERBS_FLUSH", "20"),
        ("FAULTY_VERBS_GPU", "1"),
    ];
    play("faults::with_one_queue_pair_it_waits_for_another", 1, &[&variables]);
}

/// Devices are found once in the life of a process, so what fails for a moment just then must not count for ever.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn devices_are_found_although_calls_fail_for_a_moment() {
    const NAME: &str = "faults::devices_are_found_although_calls_fail_for_a_moment";
    if child::role().is_none() {
        let runs = number("RDMA_FAULTS").map_or(4, |seconds| seconds.max(4));
        for run in 0..runs {
            under_fire(NAME, seed() + run, &[("FAULTY_VERBS_ARMED", "1"), ("FAULTY_VERBS_SETUP", "10")]);
        }
        return;
    }
    let _watchdog = watchdog(60);
    let run = Run::start(true);
    let net = net(ApiVersion::V12);
    let context = run.insist("init", &run.setups_failed, || net.init());
    INJECTOR.arm(false);
    let names: Vec<_> = (0..context.devices().expect("devices"))
        .map(|dev| {
            let properties = context.properties(dev).expect("properties");
            assert_eq!(properties.ptr_support, PTR_HOST, "no GPU memory here");
            properties.name
        })
        .collect();
    assert_eq!(names, ["rxe0", "rxe1"], "{:#?}", run.said_since(0));
    let pair = run.connect(&context);
    assert!(pair.transfer(pattern(1, 100_000)).expect("a transfer") == pattern(1, 100_000));
    pair.close().expect("close");
}

/// What becomes of a flush.
#[derive(Clone, Copy)]
enum Fate {
    /// It is done, as if nothing had been.
    Done,
    /// It fails with this code, and its connection ends; the log names this.
    Fails(Code, &'static str),
}

/// Calls that fail: the name, the error, and how many.
type Fault = (&'static str, i32, i32);
const WITHOUT_END: i32 = 1 << 30;

/// A flush meets a fault.
fn flush_meets(run: &Run, context: &Context, (call, error, times): Fault, fate: Fate) {
    let fail = |error, times| INJECTOR.fail(c"faulty_verbs_fail", call, error, times);
    let what = format!("{call} fails {times} times with error {error}");
    let pair = run.connect(context);
    let memory = Memory::new(5000);
    let region = as_gpu(&pair.recv, &memory).expect("regMr");
    let bytes = pattern(error.unsigned_abs() as usize, memory.len());
    let receive = || {
        // SAFETY: memory and pattern live until the connection is closed.
        let (received, sent) = unsafe {
            let received = pair.recv.post(&[Part::all(&memory, Some(&region))]).expect("irecv");
            (received, pair.send.post(crate::support::part(bytes, None)).expect("isend"))
        };
        pair.finish(received, &[sent]).expect("a transfer");
        assert!(memory.bytes() == bytes, "{what}: wrong bytes");
    };
    let flush = || {
        // SAFETY: as above.
        match unsafe { pair.recv.iflush(Part::all(&memory, Some(&region))) }? {
            Some(request) => pair.recv.wait(&request, PATIENCE).map(|_| ()),
            None => Ok(()),
        }
    };
    receive();
    let before = run.warnings();
    fail(error, times);
    let outcome = flush();
    let left = fail(0, 0);
    assert!(left < times, "{what}: the flush did not come there, {outcome:?}");
    match fate {
        Fate::Done => {
            assert!(outcome.is_ok() && left == 0, "{what}: {outcome:?}, {left} to come, {:#?}", run.said_since(before));
            receive();
            assert_eq!(flush(), Ok(()), "{what}: the next one");
            let said = run.said_since(before);
            assert!(said.is_empty(), "{what}: {said:#?}");
        }
        Fate::Fails(code, words) => {
            assert_eq!(outcome, Err(code), "{what}: {:#?}", run.said_since(before));
            assert!(flush().is_err(), "{what}: a flush is done after the end");
            let heard = send_end_fails(&pair.send);
            assert!(heard == code || heard == Code::RemoteError, "{what}: the peer hears {heard:?}");
            // A failure is known a moment before it is logged.
            let said = eventually("the side that failed says so", HEARSAY, || {
                let said = run.said_since(before);
                said.iter().any(|line| line.contains("receiving from ")).then_some(said)
            });
            let told = |who: &str| {
                let is_it = |line: &&String| [who, " failed: ", words].iter().all(|part| line.contains(part));
                said.iter().filter(is_it).count()
            };
            // That the peer gave up is a warning once for each peer process in a while.
            assert_eq!((told("receiving from "), said.len() - told("sending to ")), (1, 1), "{what}: {said:#?}");
            assert!(told("sending to ") <= 1, "{what}: {said:#?}");
        }
    }
    // One that is under way when the connection is closed.
    // SAFETY: as above.
    let _ = unsafe { pair.recv.iflush(Part::all(&memory, Some(&region))) };
    drop(region);
    pair.recv.close().expect("closeRecv");
    pair.send.close().expect("closeSend");
}

/// The calls that a flush makes before it reads.
const MAKING: [(&str, i32); 5] = [
    ("query_device", libc::EINVAL),
    ("create_cq", libc::ENOMEM),
    ("create_qp", libc::ENOMEM),
    ("modify_qp", libc::EAGAIN),
    ("reg_mr", libc::ENOMEM),
];

/// Every call that a flush makes fails, for a moment and for good; other connections live on.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_flush_that_fails_is_made_again_or_says_so() {
    const NAME: &str = "faults::a_flush_that_fails_is_made_again_or_says_so";
    if child::role().is_none() {
        for (recovery, pairs, timeout) in [("0", "1", "10"), ("1", "1", "10"), ("1", "4", "1")] {
            let variables = [
                ("FAULTY_VERBS_GPU", "1"),
                ("TOWLINE_RECOVERY", recovery),
                ("NCCL_IB_QPS_PER_CONNECTION", pairs),
                ("TOWLINE_RECONNECT_TIMEOUT", timeout),
            ];
            under_fire(NAME, 1, &variables);
        }
        return;
    }
    let _watchdog = watchdog(180);
    let mends = number("TOWLINE_RECOVERY") != Some(0);
    let run = Run::start(!mends);
    let context = net(ApiVersion::V12).init().expect("init");
    // DMA-BUF and no more: the injector plays the GPU, and there is no peer-memory module.
    assert_eq!(context.properties(1).expect("properties").ptr_support, PTR_HOST | PTR_DMABUF);
    let other = run.connect(&context);
    let without = Fate::Fails(Code::SystemError, "cannot be flushed: ");
    let mistake = Fate::Fails(Code::InvalidUsage, "the flush of a receive failed: ");
    let once = [("post_flush", libc::ENOMEM), ("flush", libc::ESHUTDOWN), ("poll_flush", libc::EIO)];
    let mut cases = vec![(("flush", libc::EACCES, 1), mistake), (("flush", libc::EFAULT, 1), mistake)];
    // Where there is time what fails does so twice (a queue pair is asked for in two ways), where there is little
    // without end.
    let (fate, times) = match (mends, number("TOWLINE_RECONNECT_TIMEOUT")) {
        (false, _) => (without, 2),
        (true, Some(1)) => (without, WITHOUT_END),
        (true, _) => (Fate::Done, 2),
    };
    cases.extend(once.into_iter().chain(MAKING).map(|(call, error)| ((call, error, times), fate)));
    let transfer = || assert!(other.transfer(pattern(1, 100_000)).expect("a transfer") == pattern(1, 100_000));
    transfer();
    let before = resources();
    for (fault, fate) in cases {
        let start = Instant::now();
        flush_meets(&run, &context, fault, fate);
        eprintln!("{fault:?}: {:.1?}", start.elapsed());
        transfer();
    }
    eventually("nothing is left in the kernel", PATIENCE, || (resources() == before).then_some(()));
    other.close().expect("close");
}
