//! Both halves of the library at once, as under NCCL: the network plugin moves data, and tells of it under the steps of
//! the profiler. One process per device is what `towline all-reduce` plays (`tests/profiler/profile_run.rs`); here are
//! the other set-ups, and the abort in which NCCL frees what the transport's handles lead to before it closes the
//! connections.
//!
//! Under valgrind: `tests/memory.sh valgrind profiler`.

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::support::pair::Pair;
use towline::host::profiler::{Event, Profiler, StepHandle};
use towline::host::{ApiVersion, Context, Init, Memory, Net, Part, Plugin, Request};
use towline::nccl::ffi::*;
use towline::trace::event::Kind;

use super::check;
use super::host::library_path;

pub(crate) const RANKS: usize = 3;
pub(crate) const SIZES: [usize; 5] = [8, 3000, 64 << 10, 300_000, 2 << 20];

/// One rank: its communicator with the profiler, and its connection to the next.
struct Rank {
    number: usize,
    profiler: Box<Profiler>,
    _context: Context,
    pair: Pair,
}

impl Rank {
    /// Each rank here has both ends of a connection: what it would send to the next rank, and what that would receive.
    fn new(comm: u64, number: usize) -> Self {
        let plugin = Plugin::open(library_path()).expect("the library opens");
        let profiler = Profiler::start(&plugin, comm, c"world", RANKS, number).expect("the profile is on");
        let net = Net::of(&plugin, Some(ApiVersion::V12)).expect("v12");
        let init = Init { comm_id: comm, profiler: Profiler::callback(), ..Init::default() };
        let context = net.init_with(&init).expect("init");
        let pair = Pair::connect(&context, 0).expect("a connection");
        Self { number, profiler: Box::new(profiler), _context: context, pair }
    }

    fn begin(&self, seq: u64) -> Ongoing<'_> {
        let profiler = &self.profiler;
        let collective = profiler.collective(c"AllReduce", seq, 1 << 20);
        let peer = (self.number + 1) % RANKS;
        let send = profiler.operation(collective, peer, true, SIZES.len(), 2 << 20);
        let receive = profiler.operation(collective, peer, false, SIZES.len(), 2 << 20);
        let steps = SIZES.iter().enumerate().map(|(number, size)| Step::post(self, number, *size, send, receive));
        Ongoing { rank: self, send, receive, steps: steps.collect() }
    }
}

/// A collective whose messages are under way.
struct Ongoing<'a> {
    rank: &'a Rank,
    send: Event,
    receive: Event,
    steps: Vec<Step>,
}

/// One message with both of its ends.
struct Step {
    size: usize,
    out: Option<(Request, Box<StepHandle>)>,
    back: Option<(Request, Box<StepHandle>)>,
    /// Until the requests have ended.
    _memory: (Memory, Memory),
}

impl Step {
    fn post(rank: &Rank, number: usize, size: usize, send: Event, receive: Event) -> Self {
        let (profiler, pair) = (&rank.profiler, &rank.pair);
        let memory = (Memory::of(&vec![7; size]), Memory::new(size));
        let back = profiler.step(receive, number);
        profiler.state(back.step(), ncclProfilerProxyStepRecvWait, 0);
        let out = profiler.step(send, number);
        profiler.state(out.step(), ncclProfilerProxyStepSendGPUWait, 0);
        profiler.state(out.step(), ncclProfilerProxyStepSendPeerWait_v4, 0);
        let part = |memory, handle: *mut c_void| Part::all(memory, None).profiled(handle);
        // SAFETY: memory and handles live until the requests have ended, or until the connection is closed in the
        // abort.
        let received = unsafe { pair.recv.post(&[part(&memory.1, back.handle())]) }.expect("irecv");
        // SAFETY: as above.
        let sent = unsafe { pair.send.post(part(&memory.0, out.handle())) }.expect("isend");
        profiler.state(out.step(), ncclProfilerProxyStepSendWait, size);
        Self { size, out: Some((sent, out)), back: Some((received, back)), _memory: memory }
    }

    /// Whether both ends are over.
    fn progress(&mut self, rank: &Rank) -> bool {
        let profiler = &rank.profiler;
        if let Some((_, step)) = self.out.take_if(|(sent, _)| rank.pair.send.test(sent).expect("a send").is_some()) {
            profiler.end(step.step());
        }
        let over = |(received, _): &mut (Request, _)| rank.pair.recv.test(received).expect("a receive").is_some();
        if let Some((_, step)) = self.back.take_if(over) {
            profiler.state(step.step(), ncclProfilerProxyStepRecvFlushWait, self.size);
            profiler.state(step.step(), ncclProfilerProxyStepRecvGPUWait, self.size);
            profiler.end(step.step());
        }
        self.out.is_none() && self.back.is_none()
    }
}

impl Ongoing<'_> {
    /// As NCCL's progress thread: the oldest first, those behind it now and then.
    fn progress(&mut self) -> bool {
        let rank = self.rank;
        self.steps.retain_mut(|step| !step.progress(rank));
        self.steps.is_empty()
    }

    fn finish(mut self) {
        let start = Instant::now();
        while !self.progress() {
            assert!(start.elapsed() < Duration::from_secs(60), "the messages arrive");
            towline::host::give_way(start);
        }
        self.end();
    }

    fn end(self) {
        self.rank.profiler.end(self.send);
        self.rank.profiler.end(self.receive);
    }
}

pub(crate) fn play(setup: &str) {
    match setup {
        "devices" => {
            // Several devices in one process, one thread for all of them.
            let ranks: Vec<Rank> = (0..RANKS).map(|number| Rank::new(0x51, number)).collect();
            for seq in 0..6 {
                let mut ongoing: Vec<Ongoing> = ranks.iter().map(|rank| rank.begin(seq)).collect();
                let (mut open, start) = (RANKS, Instant::now());
                while open > 0 {
                    open = ongoing.iter_mut().filter_map(|collective| (!collective.progress()).then_some(())).count();
                    towline::host::give_way(start);
                }
                ongoing.into_iter().for_each(Ongoing::end);
            }
        }
        "threads" => {
            // One thread per device; communicators come and go on all of them.
            let barrier = Barrier::new(RANKS);
            std::thread::scope(|scope| {
                for number in 0..RANKS {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        for comm in 0..3 {
                            let rank = Rank::new(0x60 + comm, number);
                            for seq in 0..2 {
                                rank.begin(seq).finish();
                            }
                        }
                        barrier.wait();
                    });
                }
            });
        }
        "abort" => {
            for round in 0..6 {
                let rank = Rank::new(0x70, 0);
                rank.begin(0).finish();
                let mut ongoing = rank.begin(1);
                for _ in 0..round * 3 {
                    ongoing.progress();
                }
                // ncclCommAbort: the handles go, then the connections, then the communicator. The memory stays, as the
                // user's does.
                let Ongoing { steps, .. } = ongoing;
                let mut memory = Vec::new();
                for step in steps {
                    let Step { out, back, _memory, .. } = step;
                    drop((out, back));
                    memory.push(_memory);
                }
                let Rank { pair, profiler, .. } = rank;
                pair.close().expect("a close");
                drop(profiler);
                drop(memory);
            }
        }
        _ => panic!("no set-up {setup}"),
    }
}

fn played(setup: &str) -> towline::trace::perfetto::read::Contents {
    let dir = tempfile::tempdir().unwrap();
    super::run(&format!("wire:{setup}"), dir.path(), &[("TOWLINE_STREAMS", "3"), ("TOWLINE_WORKERS", "2")]);
    let files = check::traces(dir.path());
    assert_eq!(files.len(), 1);
    check::load(&files[0])
}

#[test]
fn several_devices_with_real_transfers() {
    let contents = played("devices");
    let process = &contents.processes[0];
    check::family(process);
    assert_eq!((process.comms.len(), process.dropped), (RANKS, 0));
    let sizes: usize = SIZES.iter().sum();
    assert_eq!(check::bytes_add_up(process), (6 * 2 * RANKS * sizes) as u64);
    // Arrows lead from each send to its receive, of messages that leave inside isend as well as of chunks that have
    // streams of their own.
    let ends = |leaves| -> HashSet<u64> {
        process.arrows.iter().filter(|arrow| arrow.leaves == leaves).map(|arrow| arrow.id).collect()
    };
    let met = ends(true).intersection(&ends(false)).count();
    // Each step has an arrow of its own, too, whose ends this host does not describe so that they meet.
    let steps = 6 * RANKS * SIZES.len();
    assert_eq!([true, false].map(|leaves| ends(leaves).len() - met), [steps; 2], "both ends number messages alike");
    assert!(met >= steps, "each message has an arrow: {met}");
}

#[test]
fn one_thread_per_device_with_real_transfers() {
    let contents = played("threads");
    let process = &contents.processes[0];
    check::family(process);
    assert_eq!((process.comms.len(), process.dropped), (3 * RANKS, 0));
    let sizes: usize = SIZES.iter().sum();
    assert_eq!(check::bytes_add_up(process), (3 * 2 * 2 * RANKS * sizes) as u64);
}

/// The sum over all samples of a metric in a file of Prometheus text.
fn total(text: &str, name: &str) -> f64 {
    let values = text.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
    values.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

/// Each message on one rail is one event for sums, however many streams took its chunks, and several for a trace.
#[test]
fn who_only_adds_up_is_told_of_a_message_once_and_of_every_byte() {
    let figures = |profile| {
        let dir = tempfile::tempdir().unwrap();
        let streams = [("TOWLINE_PROFILE", profile), ("TOWLINE_STREAMS", "5"), ("TOWLINE_WORKERS", "2")];
        super::run("wire:devices", dir.path(), &streams);
        let text = check::metrics(dir.path());
        ["messages", "parts", "bytes"].map(|what| total(&text, &format!("towline_wire_{what}_total")) as usize)
    };
    let (messages, bytes) = (6 * 2 * RANKS * SIZES.len(), 6 * 2 * RANKS * SIZES.iter().sum::<usize>());
    assert_eq!(figures("metrics"), [messages, messages, bytes]);
    let [messages_drawn, parts, bytes_drawn] = figures("metrics,trace");
    assert_eq!((messages_drawn, bytes_drawn), (messages, bytes));
    assert!(parts > 3 * messages / 2, "long messages are told chunk by chunk: {parts}");
}

/// A profiler that asks for network events and not for steps, and draws nothing, learns the same of the wire, by
/// interface.
#[test]
fn without_steps_the_wires_figures_are_the_same() {
    let played = |events: &[(&str, &str)]| {
        let dir = tempfile::tempdir().unwrap();
        let settings = [&[("TOWLINE_PROFILE", "metrics,summary"), ("TOWLINE_STREAMS", "5")], events].concat();
        super::run("wire:devices", dir.path(), &settings);
        let text = check::metrics(dir.path());
        // Another process has another number.
        let process = check::process(&text);
        let figures = |name: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| line.starts_with(name));
            let mut lines: Vec<String> = lines.map(|line| line.replace(&process, "")).collect();
            lines.sort();
            lines
        };
        let all = ["messages", "parts", "bytes", "resent_bytes", "reconnects"]
            .map(|what| figures(&format!("towline_wire_{what}_total{{")));
        (all.concat(), total(&text, "towline_wire_stall_seconds_total"), figures("towline_step_total{"))
    };
    let (with_steps, stalls_with, steps) = played(&[]);
    assert!(!steps.is_empty() && with_steps.len() >= 5 * 2, "{with_steps:?}");
    let (without, stalls_without, steps) = played(&[("TOWLINE_PROFILE_EVENTS", "NetPlugin")]);
    assert_eq!((without, steps), (with_steps, vec![]));
    assert!(stalls_with > 0.0 && stalls_without > 0.0, "what was waited for is told: {stalls_with} {stalls_without}");
}

#[test]
fn an_abort_frees_the_handles_before_the_close() {
    let contents = played("abort");
    let process = &contents.processes[0];
    let events = check::starts(process, Kind::NetPlugin).len();
    assert!(events >= 6 * 2 * SIZES.len(), "the first collective of each round is whole: {events}");
}
