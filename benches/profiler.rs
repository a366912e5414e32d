//! What an event costs NCCL's thread: start and stop through the library's own table, as NCCL calls it.
//!
//! Run with `cargo bench --bench profiler`. The writer works at the same time, so on a machine with few cores its work
//! shows in the figures; events that are refused because it cannot keep up would make them too good, hence the pauses.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use towline::abi::ffi::*;
use towline::abi::profiler::v6::ncclProfiler_v6;
use towline::engine::events::{Carrier, Events, Listener, News, Path};
use towline::engine::request::{Outcome, RequestSlots};
use towline::os::net_event::{NetEvent, PLUGIN_ID};

/// Events between two pauses: less than one shard of the ring lets in.
const BATCH: u64 = 10_000;

struct Step {
    context: *mut c_void,
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

/// The transport's part of a short transfer, told to a profiler that only answers.
struct Transport {
    events: Events,
    requests: RequestSlots,
}

struct Answer(usize);

impl Listener for Answer {
    fn wants_details(&self) -> bool {
        false
    }

    unsafe fn start(&self, _: *mut c_void, _: &News<'_>) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0)
    }

    fn stop(&self, _: *mut c_void, _: &News<'_>) {}
}

impl Transport {
    fn new(answer: usize) -> Self {
        let events = Events::default();
        events.listen(Arc::new(Answer(answer)), 1, false);
        events.set_path(0, Path { carrier: Carrier::Socket { fd: 3 }, rail: 0, peer: None });
        Self { events, requests: RequestSlots::new() }
    }

    fn transfer(&self, handle: *mut c_void) -> Option<Outcome> {
        let ticket = self.requests.take(1)?;
        self.events.follow(ticket.slot, 0, handle);
        self.requests.complete_part(ticket.slot, 0, 8);
        // SAFETY: the profiler looks at nothing.
        unsafe { self.events.finish(&self.requests, ticket) }
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
    Step { context, handle }
}

/// Time of `count` runs, with pauses in which the writer catches up.
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

    let off = set_up(None);
    assert!(off.context.is_null());
    group.bench_function("off: start that is declined", |bencher| {
        bencher.iter(|| start(off.context, null_mut(), |descr| descr.type_ = ncclProfileProxyStep.into()));
    });

    let step = set_up(Some("trace,summary"));
    assert!(!step.handle.is_null());
    group.bench_function("proxy step: start and stop", |bencher| {
        bencher.iter_custom(|count| {
            timed(count, || stop(start(step.context, step.handle, |descr| descr.type_ = ncclProfileProxyStep.into())))
        });
    });
    let mut net = NetEvent { length: 1 << 20, ..NetEvent::new() };
    group.bench_function("net plugin: start and stop", |bencher| {
        bencher.iter_custom(|count| {
            timed(count, || {
                stop(start(step.context, step.handle, |descr| {
                    descr.type_ = ncclProfileNetPlugin.into();
                    descr.u.netPlugin.id = PLUGIN_ID;
                    descr.u.netPlugin.data = (&raw mut net).cast();
                }));
            })
        });
    });
    for (name, answer, handle) in [
        ("transport: a transfer's start and stop", 64, 64),
        ("transport: a transfer to which nobody listens", 0, 64),
        ("transport: a transfer without a handle", 64, 0),
    ] {
        let transport = Transport::new(answer);
        let handle = std::ptr::without_provenance_mut(handle);
        group.bench_function(name, |bencher| bencher.iter(|| transport.transfer(std::hint::black_box(handle))));
    }
    group.bench_function("the clock alone, twice", |bencher| {
        bencher.iter(|| towline::trace::clock::now() + towline::trace::clock::now());
    });
    group.finish();
    let _ = std::fs::remove_dir_all(std::env::temp_dir().join("towline-bench-profiler"));
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    bench(&mut criterion);
    criterion.final_summary();
}
