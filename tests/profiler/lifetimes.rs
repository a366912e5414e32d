//! Unusual cases: no profiler, too many events, the process is killed, aborts, forks or just exits.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use towline::nccl::ffi::{
    ncclProfilerProxyOpInProgress_v4, ncclProfilerProxyStepSendGPUWait, ncclProfilerProxyStepSendWait,
};
use towline::trace::clock;
use towline::trace::event::{Body, Kind, Record};
use towline::trace::perfetto::proto::{SLICE_BEGIN, SLICE_END};
use towline::trace::perfetto::{file::Packets, read::read};

use super::check;
use super::host::{CommDescr, Event, Host};
use super::play::{Comm, Pace, Shape};

const COMM: CommDescr = CommDescr { id: 0x99, ranks: 2, rank: 0 };
const SHAPE: Shape = Shape { channels: 1, steps: 4, bytes: 1024 };

pub(crate) fn play_silent() {
    for version in 1..=6 {
        let mut mask = 0x7fff;
        let host = Host::load(version);
        let context = host.init(COMM, &mut mask);
        assert_eq!((mask, context), (0, null_mut()), "v{version}");
        // NCCL would not call these; a host that does finds nothing.
        let event = host.start(null_mut(), COMM, null_mut(), Event::Group);
        assert!(event.is_null());
    }
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    assert!(threads <= 2, "the test's own threads only, not {threads}");
}

#[test]
fn without_being_asked_the_profiler_does_nothing_at_all() {
    let dir = tempfile::tempdir().unwrap();
    super::finish(super::command("silent", dir.path()).env("TOWLINE_STATUS", "0").spawn().unwrap());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// NCCL says of each operation that it is in progress; here so often that there is no room for all.
pub(crate) fn play_in_progress() {
    let mut mask = 0;
    let host = Host::load(6);
    let context = host.init(COMM, &mut mask);
    let pid = std::process::id().cast_signed();
    let op = Event::ProxyOp { pid, channel: 0, peer: 1, steps: 1, chunk: 64, send: true };
    let op = host.start(context, COMM, null_mut(), op);
    assert!(!op.is_null());
    (0..100_000).for_each(|_| host.state(op, ncclProfilerProxyOpInProgress_v4, 0));
    host.stop(op);
    host.finalize(context);
}

#[test]
fn that_an_operation_is_in_progress_costs_a_record_only_where_it_is_drawn() {
    for (profile, costs) in [("trace", true), ("summary", false)] {
        let dir = tempfile::tempdir().unwrap();
        let settings = [("TOWLINE_PROFILE", profile), ("TOWLINE_PROFILE_BUFFER", "1")];
        let output = super::run("in-progress", dir.path(), &settings);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(said.contains("profiler events were dropped"), costs, "{profile}: {said}");
    }
}

pub(crate) fn play_pressure() {
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), COMM, &mut mask);
    let shape = Shape { channels: 4, steps: 64, bytes: 1024 };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for seq in 0..40 {
                    let task = comm.enqueue(seq, 1024);
                    comm.progress(task, shape, 1, 1, Pace::NONE);
                }
            });
        }
    });
    comm.finalize();
}

#[test]
fn under_pressure_starts_are_dropped_and_counted_and_what_began_ends() {
    let dir = tempfile::tempdir().unwrap();
    let output = super::run("pressure", dir.path(), &[("TOWLINE_PROFILE_BUFFER", "1")]);
    let contents = check::load(&check::traces(dir.path())[0]);
    let process = &contents.processes[0];
    assert!(process.dropped > 0, "one MiB does not hold this");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("profiler events were dropped"), "{said}");
    assert!(said.contains(" 0 stops among them"), "stops find room when starts do not: {said}");
    // Everything that was accepted is whole: stops were never refused.
    let begun: Vec<_> = process.records.iter().filter(|record| record.body.kind().is_some()).collect();
    let stops = process.records.iter().filter(|record| record.body == Body::Stop).count();
    assert_eq!(begun.len(), stops);
    assert!(begun.len() > 1000);
}

/// Operations, until so many found no room: before which times they did.
pub(crate) fn play_refused() {
    let dir = std::env::var("TOWLINE_PROFILE_DIR").unwrap();
    let mut mask = 0;
    let host = Host::load(6);
    let context = host.init(COMM, &mut mask);
    let pid = std::process::id().cast_signed();
    let mut times = Vec::new();
    while times.len() < 1000 {
        let now = clock::now();
        let op = Event::ProxyOp { pid, channel: 0, peer: 1, steps: 1, chunk: 64, send: true };
        let op = host.start(context, COMM, null_mut(), op);
        if op.is_null() {
            times.push(now.to_string());
            // Over several rounds of the writer.
            std::thread::sleep(Duration::from_micros(20));
        } else {
            host.stop(op);
        }
    }
    host.finalize(context);
    std::fs::write(Path::new(&dir).join("times"), times.join("\n")).unwrap();
}

#[test]
fn events_that_were_dropped_are_not_told_of_before_they_were() {
    let dir = tempfile::tempdir().unwrap();
    super::run("refused", dir.path(), &[("TOWLINE_PROFILE_BUFFER", "1")]);
    let times = std::fs::read_to_string(dir.path().join("times")).unwrap();
    let times: Vec<u64> = times.lines().map(|time| time.parse().unwrap()).collect();
    let bytes = std::fs::read(&check::traces(dir.path())[0]).unwrap();
    let (mut track, mut told) = (None, Vec::new());
    for packet in Packets::new(&bytes) {
        let drops = packet.track_descriptor.filter(|track| track.name.as_deref() == Some("events dropped"));
        track = drops.and_then(|drops| drops.uuid).or(track);
        let counter = packet.track_event.filter(|event| track.is_some() && event.track_uuid == track);
        told.extend(counter.map(|event| (packet.timestamp.unwrap(), event.counter_value.unwrap() as usize)));
    }
    assert_eq!(told.last().map(|&(_, total)| total), Some(times.len()), "{told:?}");
    for (when, total) in told {
        assert!(when >= times[total - 1], "{total} are told of {} ns too early", times[total - 1] - when);
    }
}

/// Where this file is, `play_forever` makes no pauses.
const HURRY: &str = "hurry";

pub(crate) fn play_forever() {
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), COMM, &mut mask);
    println!("ready");
    // One collective hangs from the start.
    let hung = comm.enqueue(u64::MAX, 7);
    let op = Event::ProxyOp { pid: std::process::id() as i32, channel: 9, peer: 1, steps: 1, chunk: 1, send: true };
    comm.host.start(comm.context, COMM, hung.event, op);
    // As fast as it can before it is killed, so that it is writing then, but not for the second before.
    let hurry = Path::new(&std::env::var("TOWLINE_PROFILE_DIR").unwrap()).join(HURRY);
    for seq in 0.. {
        let gpu = if hurry.exists() { Duration::ZERO } else { Duration::from_millis(1) };
        let task = comm.enqueue(seq, 1024);
        comm.progress(task, SHAPE, 1, 1, Pace { gpu, ..Pace::NONE });
    }
}

#[test]
fn the_trace_of_a_killed_process_is_whole_and_shows_what_hung() {
    for round in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let mut child = super::command("forever", dir.path())
            .env("TOWLINE_PROFILE", "trace")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let hung = |bytes: &[u8]| {
            let contents = read(bytes);
            let is_hung = |record: &Record| matches!(record.body, Body::Coll(coll) if coll.seq == u64::MAX);
            contents.processes.iter().any(|process| process.records.iter().any(is_hung))
        };
        // A collective that does not end is shown after a second, when everything before it has been.
        let patience = Instant::now();
        std::thread::sleep(Duration::from_secs(1));
        let bytes = || check::traces(dir.path()).first().map(|file| std::fs::read(file).unwrap()).unwrap_or_default();
        while !hung(&bytes()) {
            assert!(patience.elapsed() < Duration::from_secs(30), "{} bytes", bytes().len());
            std::thread::sleep(Duration::from_millis(300));
        }
        std::fs::write(dir.path().join(HURRY), "").unwrap();
        std::thread::sleep(Duration::from_millis(150 + 37 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        let bytes = bytes();
        assert!(bytes.len() > 100_000, "a good deal was traced: {}", bytes.len());
        assert_eq!(read(&bytes).cut, 0, "the last packet is whole");
        assert!(hung(&bytes));
    }
}

pub(crate) fn play_abort() {
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), COMM, &mut mask);
    let task = comm.enqueue(0, 1024);
    let host = comm.host;
    let pid = std::process::id() as i32;
    let op = Event::ProxyOp { pid, channel: 0, peer: 1, steps: 2, chunk: 1, send: true };
    let op = host.start(comm.context, COMM, task.event, op);
    let step = host.start(comm.context, COMM, op, Event::ProxyStep { step: 0 });
    host.state(step, ncclProfilerProxyStepSendGPUWait, 0);
    // ncclCommAbort: the communicator goes while the step is open.
    comm.finalize();
    std::thread::sleep(Duration::from_millis(20));
    // A thread that did not notice.
    host.state(step, ncclProfilerProxyStepSendWait, 5);
    host.stop(step);
    host.stop(op);
    host.stop(op);
    let late = host.start(comm.context, COMM, op, Event::ProxyStep { step: 1 });
    host.stop(late);
    // And numbers that were never handles.
    for wild in [1usize, 8, usize::MAX, 0x7fff_0000_1234] {
        host.stop(wild as *mut _);
        host.state(wild as *mut _, ncclProfilerProxyStepSendWait, 0);
        host.finalize(wild as *mut _);
    }
}

#[test]
fn after_an_abort_late_calls_find_nothing_and_open_events_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    super::run("abort", dir.path(), &[]);
    let bytes = std::fs::read(&check::traces(dir.path())[0]).unwrap();
    check::nesting(&bytes);
    let mut open = 0;
    for packet in Packets::new(&bytes) {
        match packet.track_event.and_then(|event| event.kind) {
            Some(SLICE_BEGIN) => open += 1,
            Some(SLICE_END) => open -= 1,
            _ => {}
        }
    }
    assert_eq!(open, 0);
}

pub(crate) fn play_fork() {
    let mut mask = 0;
    let host = Host::load(6);
    let comm = Comm::new(host, COMM, &mut mask);
    let task = comm.enqueue(0, 1024);
    // SAFETY: the child calls only what a forked child of a threaded process may, and the profiler, which must cope.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // A data loader: it knows nothing of the communicator, but the handles are in its memory.
        host.stop(task.event);
        let event = host.start(comm.context, COMM, null_mut(), Event::Group);
        let mut fine = event.is_null();
        host.finalize(comm.context);
        let kept = std::fs::read_dir("/proc/self/fd").unwrap().any(|entry| {
            let target = std::fs::read_link(entry.unwrap().path()).unwrap_or_default();
            target.extension().is_some_and(|extension| extension == "pftrace")
        });
        fine &= !kept;
        // It may have a communicator of its own.
        let mut mask = 0;
        let own = Comm::new(host, CommDescr { id: 0x100, ..COMM }, &mut mask);
        let task = own.enqueue(0, 16);
        own.progress(task, SHAPE, 1, 1, Pace::NONE);
        own.finalize();
        // SAFETY: leaves without running the parent's exit handlers.
        unsafe { libc::_exit(if fine { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: a valid place for the status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    comm.progress(task, SHAPE, 1, 1, Pace::NONE);
    comm.finalize();
}

#[test]
fn a_forked_child_has_no_part_in_its_parents_profile_and_may_have_its_own() {
    let dir = tempfile::tempdir().unwrap();
    super::run("fork", dir.path(), &[]);
    let files = check::traces(dir.path());
    assert_eq!(files.len(), 2);
    let mut ids = Vec::new();
    for file in files {
        let contents = check::load(&file);
        check::family(&contents.processes[0]);
        assert_eq!(check::starts(&contents.processes[0], Kind::Coll).len(), 1);
        ids.push(contents.processes[0].comms[0].id);
    }
    ids.sort_unstable();
    assert_eq!(ids, [0x99, 0x100]);
}

pub(crate) fn play_exit() {
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), COMM, &mut mask);
    let task = comm.enqueue(0, 1024);
    comm.progress(task, SHAPE, 1, 1, Pace::NONE);
    // Most jobs end like this: no finalize.
}

#[test]
fn a_process_that_exits_without_finalize_leaves_everything() {
    let dir = tempfile::tempdir().unwrap();
    super::run("exit", dir.path(), &[]);
    let bytes = std::fs::read(&check::traces(dir.path())[0]).unwrap();
    let contents = read(&bytes);
    assert_eq!(check::starts(&contents.processes[0], Kind::ProxyStep).len(), 8);
    let names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().any(|name| name.ends_with(".summary.txt")), "{names:?}");
    assert!(names.iter().any(|name| name.ends_with(".prom")), "{names:?}");
}

pub(crate) fn play_proxied() {
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), COMM, &mut mask);
    let host = comm.host;
    // NCCL proxies for a neighbour: context, parent and pid are the neighbour's, and so are its numbers.
    let (context, parent) = (0x1234_0000_0000_0007usize as *mut _, 0x1234_0000_0000_0042usize as *mut _);
    let descr = CommDescr { rank: 5, ..COMM };
    let op = Event::ProxyOp { pid: 4242, channel: 3, peer: 6, steps: 1, chunk: 1, send: true };
    let op = host.start(context, descr, parent, op);
    assert!(!op.is_null(), "it moves bytes over our rails, so it is traced here");
    let step = host.start(context, descr, op, Event::ProxyStep { step: 0 });
    host.state(step, ncclProfilerProxyStepSendGPUWait, 0);
    host.state(step, ncclProfilerProxyStepSendWait, 512);
    host.stop(step);
    host.stop(op);
    let task = comm.enqueue(0, 1024);
    comm.progress(task, SHAPE, 1, 1, Pace::NONE);
    comm.finalize();
}

#[test]
fn operations_proxied_for_another_process_are_told_apart_by_their_pid() {
    let dir = tempfile::tempdir().unwrap();
    super::run("proxied", dir.path(), &[]);
    let file = &check::traces(dir.path())[0];
    let contents = check::load(file);
    let ops = check::starts(&contents.processes[0], Kind::ProxyOp);
    let foreign: Vec<_> = ops.iter().filter(|op| matches!(op.body, Body::ProxyOp(op) if op.pid == 4242)).collect();
    assert_eq!((ops.len(), foreign.len()), (3, 1));
    assert_eq!(foreign[0].context, 0, "it belongs to no communicator of ours");
    let tracks: Vec<_> =
        Packets::new(&std::fs::read(file).unwrap()).filter_map(|packet| packet.track_descriptor?.name).collect();
    assert!(tracks.iter().any(|name| name == "proxied for process 4242"), "{tracks:?}");
}

pub(crate) fn play_ask() {
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), COMM, &mut mask);
    for seq in 0..10 {
        let task = comm.enqueue(seq, 1024);
        comm.progress(task, SHAPE, 1, 1, Pace::NONE);
    }
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    comm.finalize();
}

#[test]
fn a_running_job_answers_on_its_control_socket_and_over_http() {
    let dir = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut child = super::command("ask", dir.path())
        .env("TOWLINE_PROFILE", "all")
        .env("TOWLINE_METRICS_LISTEN", port.to_string())
        .env("TOWLINE_METRICS_INTERVAL", "0.2")
        .env("TOWLINE_PROFILE_CONTROL", dir.path().join("ask.sock"))
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let ask = |word: &str| {
        let mut stream = UnixStream::connect(dir.path().join("ask.sock")).ok()?;
        stream.write_all(format!("{word}\n").as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        Some(text)
    };
    let patience = Instant::now();
    let summary = loop {
        if let Some(text) = ask("summary").filter(|text| text.contains("AllReduce") && text.contains("       10 ")) {
            break text;
        }
        assert!(patience.elapsed() < Duration::from_secs(20), "no answer: {:?}", ask("summary"));
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(summary.contains("send to 1") && summary.contains("(alive)"), "{summary}");
    let path = ask("flush").unwrap();
    assert_eq!(check::load(path.trim().as_ref()).processes[0].comms.len(), 1);
    assert!(ask("nonsense").unwrap().contains("send status, summary"));

    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    let process = check::process(&text);
    let labels = r#"comm="world",func="AllReduce",algorithm="RING",protocol="SIMPLE""#;
    assert!(text.contains(&format!("towline_collectives_total{{{process},{labels}}} 10\n")), "{text}");
    let labels = r#"interface="unknown interface 0",direction="send""#;
    assert!(text.contains(&format!("towline_wire_bytes_total{{{process},{labels}}} {}\n", 10 * 4 * 512)), "{text}");

    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    super::finish(child);
    assert!(!dir.path().join("ask.sock").exists(), "nobody answers there any more");
}
