//! What an event costs NCCL's thread: start and stop through the library's own table, as NCCL calls it.
//!
//! Run with `cargo bench --bench profiler`. The writer works at the same time, so on a machine with few cores its work
//! shows in the figures; events that are refused because it cannot keep up would make them too good, hence the pauses.
//!
//! Times are noise where others work, instructions are not: under
//! `valgrind --tool=callgrind --toggle-collect='*counted*'` with `TOWLINE_BENCH_COUNT` set to a part of a benchmark's
//! name, that one runs [`COUNT`] times and nothing else is counted.
//!
//! `TOWLINE_BENCH_WRITER=trace,summary` (or what else `TOWLINE_PROFILE` takes) asks instead how much the writer takes
//! in: transfers are told without a pause for [`SECONDS`], and what was not refused is counted.

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use towline::abi::profiler::v6::ncclProfiler_v6;
use towline::engine::events::{Carrier, Chunk, Events, Listener, Path, Piece, Source};
use towline::engine::request::{Outcome, RequestSlots};
use towline::nccl::ffi::*;
use towline::nccl::net_event::{self, NetEvent, PLUGIN_ID, Reader};
use towline::os::config::NetEvents;
use towline::os::ticks::Ticks;
use towline::plugin;
use towline::trace::clock;

/// Events between two pauses: less than one shard of the ring lets in.
const BATCH: u64 = 10_000;

/// Runs when instructions are counted.
const COUNT: u64 = 10_000;

/// How long the writer is kept busy.
const SECONDS: u64 = 4;

/// Records of [`step_and_part`].
const RECORDS: f64 = 7.0;

struct Step {
    context: *mut c_void,
    op: *mut c_void,
    handle: *mut c_void,
}

fn start(
    context: *mut c_void,
    parent: *mut c_void,
    fill: impl FnOnce(&mut ncclProfilerEventDescr_v6_t),
) -> *mut c_void {
    // SAFETY: plain data, for which zero is a value.
    let mut descr: ncclProfilerEventDescr_v6_t = unsafe { std::mem::zeroed() };
    descr.parentObj = parent;
    fill(&mut descr);
    let mut event = null_mut();
    // SAFETY: valid pointers, and a descriptor of this version.
    unsafe { ncclProfiler_v6.0.startEvent.unwrap()(context, &mut event, &mut descr) };
    event
}

fn stop(event: *mut c_void) {
    // SAFETY: a handle of ours, or null.
    unsafe { ncclProfiler_v6.0.stopEvent.unwrap()(event) };
}

/// The transport's part of a short transfer.
struct Transport {
    events: Events,
    requests: RequestSlots,
}

struct Deaf;

impl Listener for Deaf {
    fn reader(&self) -> Reader {
        Reader::None
    }

    unsafe fn start(&self, _: *mut c_void, _: &Source<'_>, _: &Piece) -> *mut c_void {
        null_mut()
    }

    fn stop(&self, _: *mut c_void, _: &Source<'_>, _: &Piece) {}

    unsafe fn summary(&self, _: *mut c_void, _: &Source<'_>, _: &[Piece]) -> bool {
        false
    }
}

/// NCCL's profiler callback over a profiler that only answers.
unsafe extern "C" fn answer(event: *mut *mut c_void, kind: c_int, _: *mut c_void, _: i64, _: *mut c_void) -> u32 {
    if kind == ncclProfilerNetEventStart as c_int {
        // SAFETY: the place for the handle.
        unsafe { event.write(std::ptr::without_provenance_mut(64)) };
    }
    ncclSuccess
}

/// NCCL's profiler callback over the profiler of this library, as NCCL passes network events on.
unsafe extern "C" fn pass_on(
    event: *mut *mut c_void,
    kind: c_int,
    transfer: *mut c_void,
    id: i64,
    data: *mut c_void,
) -> u32 {
    // SAFETY: the transport's arguments: a step of ours as the transfer, and a handle of ours that it was given.
    unsafe {
        if kind == ncclProfilerNetEventStart as c_int {
            let step = &*transfer.cast::<Step>();
            let mut descr: ncclProfilerEventDescr_v6_t = std::mem::zeroed();
            descr.type_ = ncclProfileNetPlugin.into();
            descr.parentObj = step.handle;
            descr.u.netPlugin = ncclProfilerNetPlugin_v3_t { id, data };
            return ncclProfiler_v6.0.startEvent.unwrap()(step.context, event, &mut descr);
        }
        if kind == ncclProfilerNetEventUpdateAndStop as c_int {
            let mut args: ncclProfilerEventStateArgs_v4_t = std::mem::zeroed();
            args.netPlugin.data = data;
            ncclProfiler_v6.0.recordEventState.unwrap()(*event, ncclProfilerNetPluginUpdate, &mut args);
        }
        ncclProfiler_v6.0.stopEvent.unwrap()(*event)
    }
}

impl Transport {
    fn new(listener: Arc<dyn Listener>) -> Self {
        let events = Events::default();
        events.listen(listener, 1, true);
        let peer = Some(([10, 0, 0, 2], 4711).into());
        events.set_path(0, Path { carrier: Carrier::Socket { fd: 3 }, rail: 0, peer });
        Self { events, requests: RequestSlots::new() }
    }

    /// A message that travels as one chunk, of which another thread notes that it begins and ends.
    fn transfer(&self, handle: *mut c_void) -> Option<Outcome> {
        let ticket = self.requests.take(1)?;
        self.events.follow(ticket.slot, 0, handle);
        if self.events.has_sink() {
            self.events.chunk_begins(ticket.slot, 0, &Chunk::whole(8, 0));
            self.events.chunk_ends(ticket.slot, 0, 0, 0);
        }
        self.requests.complete_part(ticket.slot, 0, 8);
        // SAFETY: the handle is null, a number that the profiler does not follow, or a step that lives.
        unsafe { self.events.finish(&self.requests, ticket) }
    }
}

/// Parts of a long transfer, and the paths that they take.
const PARTS: u16 = 6;
const PATHS: u16 = 4;
/// Bytes of such a part.
const LENGTH: u64 = 1 << 16;

impl Transport {
    /// Paths as a long message takes them.
    fn with_paths(self) -> Self {
        let peer = Some(([10, 0, 0, 2], 4711).into());
        (1..=PATHS).for_each(|index| {
            self.events
                .set_path(index.into(), Path { carrier: Carrier::Socket { fd: 3 + i32::from(index) }, rail: 0, peer });
        });
        self
    }

    /// A message that travels in [`PARTS`] chunks, of which other threads note that they are over.
    fn long_transfer(&self, handle: *mut c_void) -> Option<Outcome> {
        let ticket = self.requests.take(1)?;
        self.events.follow(ticket.slot, 0, handle);
        let began = Ticks::now();
        self.moved(ticket.slot, began);
        self.requests.complete_part(ticket.slot, 0, LENGTH * u64::from(PARTS));
        // SAFETY: as above.
        unsafe { self.events.finish(&self.requests, ticket) }
    }

    /// The same for a profiler that only adds up: one note for all chunks.
    fn joined_transfer(&self, handle: *mut c_void) -> Option<Outcome> {
        let ticket = self.requests.take(1)?;
        self.events.follow(ticket.slot, 0, handle);
        let length = LENGTH * u64::from(PARTS);
        let all = Chunk { length, path: 1, message: 5, total: length, joined: true, ..Chunk::default() };
        self.events.chunk_over(&self.requests, ticket.slot, 0, &all, Ticks::now());
        self.requests.complete_part(ticket.slot, 0, length);
        // SAFETY: as above.
        unsafe { self.events.finish(&self.requests, ticket) }
    }

    /// A message that is done and has left inside `isend`, for a profiler that is told of it when it is over.
    fn copied_transfer(&self, handle: *mut c_void) -> Option<Outcome> {
        let ticket = self.requests.take(1)?;
        let posted = self.events.follow(ticket.slot, 0, handle);
        self.requests.complete_part(ticket.slot, 0, 8);
        if let Some(began) = posted {
            self.events.chunk_over(&self.requests, ticket.slot, 0, &Chunk::whole(8, 0), began);
        }
        // SAFETY: as above.
        unsafe {
            if self.events.has_sink() {
                self.events.settle(&self.requests, ticket);
            }
            self.events.finish(&self.requests, ticket)
        }
    }

    /// The same where another thread moves it and notes that, as workers do: how long NCCL's thread takes in all for
    /// `count` requests that it finds done.
    fn moved_by_another(&self, handle: *mut c_void, count: u64) -> Duration {
        let length = LENGTH * u64::from(PARTS);
        let next = AtomicU64::new(0);
        let mut ticks = Duration::ZERO;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=count {
                    let slot = loop {
                        let word = next.load(Ordering::Acquire);
                        if word >> 16 == number {
                            break word as u16;
                        }
                        std::hint::spin_loop();
                    };
                    let all = Chunk { length, path: 1, message: 5, total: length, joined: true, ..Chunk::default() };
                    self.events.chunk_over(&self.requests, slot, 0, &all, Ticks::now());
                    self.requests.complete_part(slot, 0, length);
                }
            });
            for number in 1..=count {
                let ticket = self.requests.take(1).expect("a free slot");
                self.events.follow(ticket.slot, 0, handle);
                next.store(number << 16 | u64::from(ticket.slot), Ordering::Release);
                while !self.requests.is_done(ticket) {
                    std::hint::spin_loop();
                }
                let began = Ticks::now();
                // SAFETY: as above.
                black_box(unsafe { self.events.finish(&self.requests, ticket) });
                ticks += Duration::from_nanos(Ticks::now().nanoseconds_since(began));
                if number % BATCH == 0 {
                    std::thread::sleep(Duration::from_millis(25));
                }
            }
        });
        ticks
    }

    #[inline(never)]
    fn moved(&self, slot: u16, began: Ticks) {
        for part in 0..PARTS {
            let (offset, path) = (u64::from(part) * LENGTH, 1 + part % PATHS);
            let total = LENGTH * u64::from(PARTS);
            let chunk = Chunk { offset, length: LENGTH, path, message: 5, total, ..Chunk::default() };
            self.events.chunk_over(&self.requests, slot, 0, &chunk, began);
        }
    }
}

fn set_up(profile: Option<&str>) -> Step {
    let dir = std::env::temp_dir().join("towline-bench-profiler");
    // SAFETY: no other thread reads the environment yet: this is the first thing that the benchmark does.
    unsafe {
        std::env::set_var("TOWLINE_PROFILE_DIR", &dir);
        std::env::set_var("TOWLINE_PROFILE_LIMIT", "2048");
        std::env::set_var("TOWLINE_PROFILE_BUFFER", "256");
        match profile {
            Some(profile) => std::env::set_var("TOWLINE_PROFILE", profile),
            None => std::env::remove_var("TOWLINE_PROFILE"),
        }
    }
    let (mut context, mut mask): (*mut c_void, c_int) = (null_mut(), 0);
    // SAFETY: valid places for the answers; the mask is leaked, as NCCL's outlives its communicators.
    unsafe {
        let mask: *mut c_int = Box::leak(Box::new(std::mem::take(&mut mask)));
        ncclProfiler_v6.0.init.unwrap()(&mut context, 1, mask, null_mut(), 1, 2, 0, None)
    };
    let op = start(context, null_mut(), |descr| {
        descr.type_ = ncclProfileProxyOp.into();
        descr.u.proxyOp.pid = std::process::id() as c_int;
    });
    let handle = start(context, op, |descr| descr.type_ = ncclProfileProxyStep.into());
    Step { context, op, handle }
}

/// A transfer as NCCL tells it: a step with its states, and a part of it on the wire. Seven records, if it is taken.
fn step_and_part(step: &Step, net: &mut NetEvent) -> bool {
    let event = start(step.context, step.op, |descr| descr.type_ = ncclProfileProxyStep.into());
    for state in [ncclProfilerProxyStepSendGPUWait, ncclProfilerProxyStepSendPeerWait_v4, ncclProfilerProxyStepSendWait]
    {
        // SAFETY: plain data, for which zero is a value.
        let mut args: ncclProfilerEventStateArgs_v4_t = unsafe { std::mem::zeroed() };
        args.proxyStep.transSize = 1 << 20;
        // SAFETY: a handle of ours or null, and the arguments for these states.
        unsafe { ncclProfiler_v6.0.recordEventState.unwrap()(event, state, &mut args) };
    }
    stop(start(step.context, event, |descr| {
        descr.type_ = ncclProfileNetPlugin.into();
        descr.u.netPlugin.id = PLUGIN_ID;
        descr.u.netPlugin.data = (&raw mut *net).cast();
    }));
    stop(event);
    !event.is_null()
}

fn writer(profile: &str) {
    let step = set_up(Some(profile));
    let mut net = NetEvent { length: 1 << 20, ..NetEvent::new() };
    let (mut told, mut taken) = (0u64, 0u64);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(SECONDS) {
        for _ in 0..64 {
            told += 1;
            taken += u64::from(step_and_part(&step, &mut net));
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{profile}: {:.2} million records a second taken, of {:.2} told; {:.2} for each second of the writer's processor time",
        taken as f64 * RECORDS / seconds / 1e6,
        told as f64 * RECORDS / seconds / 1e6,
        taken as f64 * RECORDS / writer_seconds() / 1e6,
    );
}

/// Processor time of the profiler's thread.
fn writer_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let of = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
    let writer = tasks.filter(|task| of(&task.join("comm")).trim() == "towline-trace").last().unwrap();
    // Behind the name in brackets: user and system time are the twelfth and thirteenth, in hundredths.
    let stat = of(&writer.join("stat"));
    let after = stat.rsplit_once(')').unwrap().1.split_whitespace();
    after.skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

/// Runs a benchmark, or counts its instructions.
struct Bench<'a> {
    group: BenchmarkGroup<'a, WallTime>,
    counted: Option<String>,
}

impl Bench<'_> {
    /// Several threads take part, of which only one is timed: `some` says how long so many took it.
    fn run_timed(&mut self, name: &str, mut some: impl FnMut(u64) -> Duration) {
        if self.counted.is_none() {
            self.group.bench_function(name, |bencher| bencher.iter_custom(&mut some));
        }
    }

    /// With pauses in which the writer catches up.
    fn run(&mut self, name: &str, mut once: impl FnMut()) {
        match &self.counted {
            None => _ = self.group.bench_function(name, |bencher| bencher.iter_custom(|count| timed(count, &mut once))),
            Some(part) if name.contains(part.as_str()) => {
                once();
                counted(once);
            }
            Some(_) => {}
        }
    }
}

#[inline(never)]
fn counted(mut once: impl FnMut()) {
    (0..COUNT).for_each(|_| once());
}

fn timed(count: u64, mut once: impl FnMut()) -> Duration {
    let mut total = Duration::ZERO;
    let mut left = count;
    while left > 0 {
        let batch = left.min(BATCH);
        let began = Instant::now();
        (0..batch).for_each(|_| once());
        total += began.elapsed();
        left -= batch;
        if left > 0 {
            std::thread::sleep(Duration::from_millis(25));
        }
    }
    total
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("profiler");
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    let mut bench = Bench { group, counted: std::env::var("TOWLINE_BENCH_COUNT").ok() };

    let off = set_up(None);
    assert!(off.context.is_null());
    bench.run("off: start that is declined", || {
        black_box(start(off.context, null_mut(), |descr| descr.type_ = ncclProfileProxyStep.into()));
    });

    let mut step = set_up(Some("trace,summary"));
    assert!(!step.handle.is_null());
    bench.run("ours: proxy step, start and stop", || {
        stop(start(step.context, step.handle, |descr| descr.type_ = ncclProfileProxyStep.into()));
    });
    let mut net = NetEvent { length: 1 << 20, ..NetEvent::new() };
    bench.run("ours: net plugin, start and stop", || {
        stop(start(step.context, step.handle, |descr| {
            descr.type_ = ncclProfileNetPlugin.into();
            descr.u.netPlugin.id = PLUGIN_ID;
            descr.u.netPlugin.data = (&raw mut net).cast();
        }));
    });
    let listener = |answer, setting| plugin::listener::new(Some(answer), 12, setting).unwrap();
    let number = std::ptr::without_provenance_mut(64);
    for (name, listener, handle) in [
        ("transport: nccl's descriptors", listener(answer, NetEvents::Nccl), number),
        ("transport: towline's descriptors", listener(answer, NetEvents::Towline), number),
        ("transport: nobody listens", Arc::new(Deaf) as Arc<dyn Listener>, number),
        ("transport: no handle", Arc::new(Deaf), null_mut()),
        ("both: nccl's descriptors", listener(pass_on, NetEvents::Nccl), (&raw mut step).cast()),
        ("both: towline's descriptors", listener(pass_on, NetEvents::Towline), (&raw mut step).cast()),
    ] {
        let transport = Transport::new(Arc::clone(&listener));
        bench.run(name, || _ = transport.transfer(black_box(handle)));
        let transport = Transport::new(listener).with_paths();
        bench.run(&format!("{name}, six parts"), || _ = transport.long_transfer(black_box(handle)));
        // A profiler that draws nothing.
        net_event::announce(Reader::Sums);
        bench.run(&format!("{name}, six parts in one"), || _ = transport.joined_transfer(black_box(handle)));
        bench.run(&format!("{name}, left at once"), || _ = transport.copied_transfer(black_box(handle)));
        bench.run_timed(&format!("{name}, moved by another thread"), |count| {
            transport.moved_by_another(black_box(handle), count)
        });
        net_event::announce(Reader::Patient);
    }
    bench.run("the clock, twice", || _ = black_box((clock::now(), clock::now())));
    bench.group.finish();
}

fn main() {
    if let Ok(profile) = std::env::var("TOWLINE_BENCH_WRITER") {
        return writer(&profile);
    }
    let mut criterion = Criterion::default().configure_from_args();
    bench(&mut criterion);
    criterion.final_summary();
    let _ = std::fs::remove_dir_all(std::env::temp_dir().join("towline-bench-profiler"));
}
