//! A second profiler behind ours: a library of its own, built by these tests from C, that notes what it is told.

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use libloading::os::unix::Library;

use super::check;
use super::host::{CommDescr, Event, Host};
use super::play::{Comm, Pace, Shape};

/// A profiler of v4 and v7 that checks its handles and counts.
const SECOND: &str = r#"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct { uint8_t type; void *parent; int rank; uint64_t rest[16]; } descr;
typedef struct { int magic; int type; int stopped; void *parent; } event;
static event events[100000];
static int used, inits, finalizes, bad, stops, states;
static int *wanted;

static event *of(void *handle) {
  event *e = handle;
  if (e < events || e >= events + used || e->magic != 77) { __sync_fetch_and_add(&bad, 1); return 0; }
  return e;
}
static int init(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank, void *log) {
  inits++;
  *context = &inits;
  *mask = 2 | 16;  /* Coll and ProxyStep, so NCCL would also tell Group and ProxyOp */
  wanted = mask;
  if (hash != 0x55 || ranks != 2 || rank != 0 || !name) bad++;
  return 0;
}
static int start(void *context, void **handle, descr *d) {
  if (context != &inits) __sync_fetch_and_add(&bad, 1);
  if (d->parent && !of(d->parent)) return 0;
  event *e = &events[__sync_fetch_and_add(&used, 1)];
  e->magic = 77; e->type = d->type; e->parent = d->parent;
  int parent = e->parent ? ((event *)e->parent)->type : 0;
  if (d->type == 2 && parent != 1) __sync_fetch_and_add(&bad, 1);
  if (d->type == 8 && parent != 2) __sync_fetch_and_add(&bad, 1);
  if (d->type == 16 && parent != 8) __sync_fetch_and_add(&bad, 1);
  if (d->type > 16) __sync_fetch_and_add(&bad, 1);
  *handle = e;
  return 0;
}
/* A profiler may change its mind at any time. */
void want(int mask) { __atomic_store_n(wanted, mask, __ATOMIC_RELAXED); }
static int stop(void *handle) {
  event *e = of(handle);
  if (e && __sync_lock_test_and_set(&e->stopped, 1)) __sync_fetch_and_add(&bad, 1);
  __sync_fetch_and_add(&stops, 1);
  return 0;
}
static int state(void *handle, int state, void *args) { of(handle); __sync_fetch_and_add(&states, 1); return 0; }
static int finalize(void *context) {
  finalizes++;
  int left = 0, counts[5] = {0};
  for (int i = 0; i < used; i++) {
    left += !events[i].stopped;
    for (int b = 0; b < 5; b++) counts[b] += events[i].type == 1 << b;
  }
  FILE *out = fopen(getenv("SECOND_OUT"), "a");
  fprintf(out, "inits %d finalizes %d bad %d open %d group %d coll %d op %d step %d states %d\n", inits, finalizes, bad,
          left, counts[0], counts[1], counts[3], counts[4], states);
  fclose(out);
  return 0;
}
struct { const char *name; void *init, *start, *stop, *state, *finalize; }
  ncclProfiler_v4 = { "second", init, start, stop, state, finalize };

typedef struct { uint64_t type; void *parent; int rank; uint64_t rest[14]; } descr7;
static int init7(void **context, uint64_t hash, int *mask, const char *name, int nodes, int ranks, int rank, void *log) {
  return init(context, mask, name, hash, nodes, ranks, rank, log);
}
static int start7(void *context, void **handle, descr7 *d) {
  descr old = { d->type, d->parent, d->rank };
  if (d->type == 2) {
    old.parent = (void *)d->rest[10];
    /* The count, the kernel's variant, whether it is a symmetric one, and the tag, which is not handed on. */
    const char *variant = (const char *)d->rest[11];
    if (d->rest[4] != 64 || !variant || variant[0] != 'L' || variant[1] != 'D' || !(d->rest[12] & 1) || d->rest[13])
      __sync_fetch_and_add(&bad, 1);
  }
  return start(context, handle, &old);
}
struct { const char *name; void *init, *start, *stop, *state, *finalize; }
  ncclProfiler_v7 = { "second", init7, start7, stop, state, finalize };
"#;

pub(crate) fn build(dir: &Path) -> PathBuf {
    let (source, library) = (dir.join("second.c"), dir.join("libsecond.so"));
    std::fs::write(&source, SECOND).unwrap();
    let status =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(status.success());
    library
}

pub(crate) fn play(version: u32) {
    let mut mask = 0;
    let comm = Comm::new(Host::load(version), CommDescr { id: 0x55, ranks: 2, rank: 0 }, &mut mask);
    let ours = std::env::var("TOWLINE_PROFILE").is_ok();
    assert_eq!(mask & (2 | 16), 2 | 16, "the masks are joined");
    assert_eq!(mask == (2 | 16), !ours);
    for seq in 0..5 {
        let task = comm.enqueue(seq, 64);
        comm.progress(task, Shape { channels: 2, steps: 3, bytes: 256 }, 1, 1, Pace::NONE);
    }
    comm.finalize();
}

/// More steps open at once than there is room for.
pub(crate) fn play_full() {
    const STEPS: i32 = 70_000;
    let comm = CommDescr { id: 0x55, ranks: 2, rank: 0 };
    let host = Host::load(6);
    let mut mask = 0;
    let context = host.init(comm, &mut mask);
    let steps: Vec<_> = (0..STEPS)
        .map(|step| host.start(context, comm, std::ptr::null_mut(), Event::ProxyStep { step }))
        .filter(|event| !event.is_null())
        .collect();
    steps.iter().for_each(|&step| host.stop(step));
    println!("{} declined", STEPS as usize - steps.len());
    host.finalize(context);
}

/// NCCL's mask, one for the process.
static MASK: AtomicI32 = AtomicI32::new(0);

/// The second profiler asks for more, then for less, while the job runs, and at last when it is over.
pub(crate) fn play_change() {
    let path = std::env::var("TOWLINE_PROFILER_CHAIN").unwrap();
    let comm = Comm::new(Host::load(6), CommDescr { id: 0x55, ranks: 2, rank: 0 }, MASK.as_ptr());
    // SAFETY: a library that is loaded already; its function of that name takes a mask.
    let library = unsafe { Library::new(path) }.unwrap();
    // SAFETY: as above.
    let want = unsafe { library.get::<unsafe extern "C" fn(c_int)>(b"want\0") }.unwrap();
    let ours = MASK.load(Ordering::Relaxed) & !(2 | 16);
    assert_eq!(ours != 0, std::env::var("TOWLINE_PROFILE").is_ok());
    let becomes = |theirs: i32| {
        // What our own profile wants stays, whatever the other one says.
        let full = if ours == 0 { theirs } else { theirs | ours | 2 | 16 };
        let patience = Instant::now();
        while MASK.load(Ordering::Relaxed) != full {
            let mask = MASK.load(Ordering::Relaxed);
            assert!(patience.elapsed() < Duration::from_secs(20), "{mask:#x} instead of {full:#x}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    becomes(2 | 16);
    for (seq, theirs) in (0..).zip([2 | 32, 2, 2 | 16 | 32]) {
        // SAFETY: the second profiler has begun.
        unsafe { want(theirs) };
        becomes(theirs);
        let task = comm.enqueue(seq, 64);
        comm.progress(task, Shape { channels: 2, steps: 3, bytes: 256 }, 1, 1, Pace::NONE);
    }
    comm.finalize();
    // The memory may not be NCCL's any more.
    let left = MASK.load(Ordering::Relaxed);
    // SAFETY: as above.
    unsafe { want(2) };
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(MASK.load(Ordering::Relaxed), left, "nobody writes it after the last communicator");
}

#[test]
fn a_second_profiler_that_changes_its_mask_is_followed() {
    for profile in [None, Some("all")] {
        let dir = tempfile::tempdir().unwrap();
        let library = build(dir.path());
        let out = dir.path().join("out.txt");
        let mut command = super::command("change", dir.path());
        command.env("TOWLINE_PROFILER_CHAIN", &library).env("SECOND_OUT", &out);
        command.envs(profile.map(|words| ("TOWLINE_PROFILE", words)));
        super::finish(command.spawn().unwrap());
        let said = std::fs::read_to_string(&out).unwrap();
        // Groups and collectives of all three, operations and steps of the third only.
        let expected = "inits 1 finalizes 1 bad 0 open 0 group 3 coll 3 op 4 step 12";
        assert!(said.starts_with(expected), "{profile:?}: {said}");
    }
}

/// Five collectives, on two channels two operations of three steps each, with four or five states to a pair of steps.
const EXPECTED: &str = "inits 1 finalizes 1 bad 0 open 0 group 5 coll 5 op 20 step 60";

#[test]
fn a_second_profiler_sees_what_it_would_see_alone() {
    for version in [4, 5, 6, 7] {
        let dir = tempfile::tempdir().unwrap();
        let library = build(dir.path());
        let out = dir.path().join("out.txt");
        let more = [("TOWLINE_PROFILER_CHAIN", library.to_str().unwrap()), ("SECOND_OUT", out.to_str().unwrap())];
        super::run(&format!("chain:{version}"), dir.path(), &more);
        let said = std::fs::read_to_string(&out).unwrap();
        assert!(said.starts_with(EXPECTED), "v{version}: {said}");
        let contents = check::load(&check::traces(dir.path())[0]);
        check::family(&contents.processes[0]);
    }
}

#[test]
fn a_second_profiler_works_without_a_profile_of_ours() {
    let dir = tempfile::tempdir().unwrap();
    let library = build(dir.path());
    let out = dir.path().join("out.txt");
    let mut command = super::command("chain:6", dir.path());
    command.env("TOWLINE_PROFILER_CHAIN", &library).env("SECOND_OUT", &out);
    super::finish(command.spawn().unwrap());
    let said = std::fs::read_to_string(&out).unwrap();
    assert!(said.starts_with(EXPECTED), "{said}");
    assert!(check::traces(dir.path()).is_empty());
}

#[test]
fn what_finds_no_room_for_the_second_profiler_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let library = build(dir.path());
    let mut command = super::command("chain-full", dir.path());
    command.env("TOWLINE_PROFILER_CHAIN", &library).env("SECOND_OUT", dir.path().join("out.txt"));
    let output = super::finish(command.spawn().unwrap());
    let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let declined = out.lines().find_map(|line| line.strip_suffix(" declined")).expect(&out);
    let declined: u64 = declined.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(declined > 30_000, "{declined}");
    assert!(said.contains(&format!("{declined} events were kept from the chained profiler")), "{said}");
}

#[test]
fn a_chain_to_nowhere_or_to_ourselves_is_said_and_left_out() {
    for path in ["/nowhere/lib.so".to_string(), super::host::library_path().display().to_string()] {
        let dir = tempfile::tempdir().unwrap();
        let output = super::run("exit", dir.path(), &[("TOWLINE_PROFILER_CHAIN", &path)]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("TOWLINE_PROFILER_CHAIN is ignored"), "{said}");
        assert_eq!(check::traces(dir.path()).len(), 1);
    }
}
