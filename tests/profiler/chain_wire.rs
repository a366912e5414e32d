//! A second profiler behind ours while the network plugin really moves data: NCCL's callback reaches our profiler,
//! which hands the network's events on, under the second one's own steps and with NCCL's descriptors.

use std::path::{Path, PathBuf};
use std::process::Command;

use towline::nccl::ffi::*;
use towline::nccl::net_event::PLUGIN_ID_SOCKET;

use super::check;
use super::wire::{RANKS, SIZES};

/// A profiler of v4 that asks for network events only, and holds them against their steps.
const SECOND: &str = r#"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct { uint8_t type; void *parent; int rank; struct { int64_t id; void *data; } net; uint64_t rest[14]; } descr;
typedef struct { uint8_t type; struct { int fd, op; size_t length; } part; } sock;
typedef struct event {
  int magic, type, stopped, open, children;
  struct event *parent;
  size_t size, below;
} event;

static event events[100000];
static int used, inits, finalizes, bad, steps, parts, updates;
static size_t bytes;

#define ADD(what, more) __sync_fetch_and_add(&what, more)
#define CHECK(right) do { if (!(right)) { ADD(bad, 1); fprintf(stderr, "second: not so: %s\n", #right); } } while (0)

static event *of(void *handle) {
  event *e = handle;
  CHECK(e >= events && e < events + used && e->magic == 77);
  return e >= events && e < events + used && e->magic == 77 ? e : 0;
}
static int init(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank, void *log) {
  ADD(inits, 1);
  *context = &inits;
  *mask = 128;
  return 0;
}
static int start(void *context, void **handle, descr *d) {
  CHECK(context == &inits);
  event *parent = d->parent ? of(d->parent) : 0;
  event *e = &events[ADD(used, 1)];
  e->type = d->type; e->parent = parent; e->magic = 77;
  if (d->type == 8) CHECK(parent && parent->type == 2);
  if (d->type == 16) { CHECK(parent && parent->type == 8 && !parent->stopped); ADD(steps, 1); }
  if (d->type == 128) {
    const sock *s = d->net.data;
    CHECK(d->net.id == SOCKET_ID && s->type == SOCKET_TYPE && s->part.fd > 2);
    CHECK(parent && parent->type == 16 && !parent->stopped);
    if (parent) { parent->children++; parent->open++; parent->below += s->part.length; }
    CHECK(s->part.op == 0 || s->part.op == 1);
    ADD(bytes, s->part.length);
    ADD(parts, 1);
  }
  *handle = e;
  return 0;
}
static int stop(void *handle) {
  event *e = of(handle);
  if (!e) return 0;
  CHECK(!e->stopped);
  e->stopped = 1;
  if (e->type == 128 && e->parent) { CHECK(!e->parent->stopped); e->parent->open--; }
  if (e->type == 16) CHECK(e->open == 0 && e->children > 0 && e->children <= 8 && e->below == e->size);
  return 0;
}
static int state(void *handle, int state, uint64_t *args) {
  event *e = of(handle);
  if (state == NET_UPDATE) ADD(updates, 1);
  if (e && e->type == 16 && (state == SEND_WAIT || state == FLUSH_WAIT)) e->size = args[0];
  return 0;
}
static int finalize(void *context) {
  int left = 0;
  ADD(finalizes, 1);
  for (int i = 0; i < used; i++) left += !events[i].stopped && events[i].type >= 16;
  FILE *out = fopen(getenv("SECOND_OUT"), "a");
  fprintf(out, "inits %d finalizes %d bad %d open %d updates %d steps %d bytes %zu parts %d\n", inits, finalizes, bad, left,
          updates, steps, bytes, parts);
  fclose(out);
  return 0;
}
struct { const char *name; void *init, *start, *stop, *state, *finalize; }
  ncclProfiler_v4 = { "second", init, start, stop, state, finalize };
"#;

fn build(dir: &Path) -> PathBuf {
    let (source, library) = (dir.join("second.c"), dir.join("libsecond.so"));
    std::fs::write(&source, SECOND).unwrap();
    let numbers = [
        ("SOCKET_ID", PLUGIN_ID_SOCKET),
        ("SOCKET_TYPE", ncclProfileSocket.into()),
        ("NET_UPDATE", ncclProfilerNetPluginUpdate.into()),
        ("SEND_WAIT", ncclProfilerProxyStepSendWait.into()),
        ("FLUSH_WAIT", ncclProfilerProxyStepRecvFlushWait.into()),
    ];
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1"]).args(numbers.map(|(name, number)| format!("-D{name}={number}")));
    assert!(compiler.arg("-o").arg(&library).arg(&source).status().unwrap().success());
    library
}

#[test]
fn a_second_profiler_hears_of_transfers_under_its_own_steps() {
    // Each time six collectives of every rank, with a send and a receive of each size. Ours listens or does not, and
    // the transport tells under Towline's identifier, with updates that only ours understands, or under NCCL's.
    for (setup, comms, profile, events) in [
        ("devices", RANKS, Some("all"), "auto"),
        ("devices", RANKS, None, "auto"),
        ("devices", RANKS, None, "towline"),
        ("threads", 3 * RANKS, Some("trace"), "nccl"),
        ("threads", 3 * RANKS, Some("metrics"), "towline"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (library, out) = (build(dir.path()), dir.path().join("out.txt"));
        let mut command = super::command(&format!("wire:{setup}"), dir.path());
        command.envs([("TOWLINE_STREAMS", "3"), ("TOWLINE_WORKERS", "2"), ("TOWLINE_NET_EVENTS", events)]);
        command.env("TOWLINE_PROFILER_CHAIN", &library).env("SECOND_OUT", &out);
        // It looks for sockets.
        command.env("TOWLINE_BACKEND", "tcp");
        command.envs(profile.map(|words| ("TOWLINE_PROFILE", words)));
        let output = super::finish(command.spawn().unwrap());
        let said = std::fs::read_to_string(&out).unwrap();
        let last = said.lines().last().unwrap();
        let case = format!("{setup}, {profile:?}, {events}: {said}{}", String::from_utf8_lossy(&output.stderr));
        let steps = 6 * RANKS * 2 * SIZES.len();
        let bytes = 6 * RANKS * 2 * SIZES.iter().sum::<usize>();
        let expected =
            format!("inits {comms} finalizes {comms} bad 0 open 0 updates 0 steps {steps} bytes {bytes} parts ");
        let parts = last.strip_prefix(&expected).unwrap_or_else(|| panic!("{expected}: {case}"));
        // Long messages travel in several chunks.
        assert!(parts.parse::<usize>().unwrap() > steps, "{case}");
        let traces = check::traces(dir.path());
        assert_eq!(traces.len(), usize::from(matches!(profile, Some("all" | "trace"))), "{case}");
        for trace in traces {
            let contents = check::load(&trace);
            check::family(&contents.processes[0]);
            assert_eq!(check::bytes_add_up(&contents.processes[0]), bytes as u64, "{case}");
        }
    }
}
