//! `towline trace`: files of several hosts onto one clock, and which rank holds them back.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use prost::Message;
use towline::trace::clock;
use towline::trace::perfetto::file::Packets;
use towline::trace::perfetto::read::read;

use super::check;
use super::host::{CommDescr, Host};
use super::play::{Comm, Pace, Ring, Shape};

const RANKS: i32 = 3;
const SHAPE: Shape = Shape { channels: 1, steps: 6, bytes: 1 << 16 };
const COLLECTIVES: u64 = 30;

/// How large a job is, and when its late ranks are late.
#[derive(Clone, Copy)]
struct Plan {
    ranks: i32,
    collectives: u64,
    /// A late rank comes late to each collective of which the number has the same remainder as its own.
    turns: u64,
}

const PLAN: Plan = Plan { ranks: RANKS, collectives: COLLECTIVES, turns: 1 };

/// Long enough for the slowest job below, so that no rank falls behind the schedule.
const PERIOD: u64 = 60_000_000;

/// What slows one rank, in microseconds.
#[derive(Clone, Copy)]
struct Slow {
    /// It comes so much late to every collective.
    late: u64,
    /// Each of its steps waits for the GPU.
    gpu: u64,
    /// The next rank has no buffer for each of its sends, which are refused until then.
    receiver: u64,
    /// The same, after they have been taken.
    unready: u64,
    /// Each message takes so long on its way to the next rank, by rail.
    rails: [u64; 2],
    /// Each received message is flushed.
    flush: u64,
}

impl Slow {
    /// Nothing but a short way.
    const NOT: Slow = Slow { late: 0, gpu: 0, receiver: 0, unready: 0, rails: [10, 10], flush: 0 };

    fn to_args(self, rank: i32, plan: Plan) -> String {
        let Slow { late, gpu, receiver, unready, rails: [first, second], flush } = self;
        let Plan { ranks, collectives, turns } = plan;
        format!("{ranks},{collectives},{turns},{rank},{late},{gpu},{receiver},{unready},{first},{second},{flush}")
    }

    fn from_args(args: &str) -> (i32, Plan, Slow) {
        let numbers: Vec<u64> = args.split(',').map(|number| number.parse().unwrap()).collect();
        let [ranks, collectives, turns, rank, late, gpu, receiver, unready, first, second, flush] = numbers[..] else {
            panic!("{args}")
        };
        let plan = Plan { ranks: ranks as i32, collectives, turns };
        (rank as i32, plan, Slow { late, gpu, receiver, unready, rails: [first, second], flush })
    }
}

/// One rank of a job that works in step.
pub(crate) fn play(args: &str) {
    let (rank, Plan { ranks, collectives, turns }, slow) = Slow::from_args(args);
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), CommDescr { id: 0x5105, ranks, rank }, &mut mask);
    let ring = ring(rank, ranks);
    let start = agree_on_start(rank, &ring);
    let pace = Pace {
        gpu: Duration::from_micros(slow.gpu),
        receiver: Duration::from_micros(slow.receiver),
        unready: Duration::from_micros(slow.unready),
        wire: slow.rails.map(Duration::from_micros),
        flush: Duration::from_micros(slow.flush),
    };
    for seq in 0..collectives {
        let late = if seq % turns == rank as u64 % turns { slow.late * 1000 } else { 0 };
        let due = start + seq * PERIOD + late;
        std::thread::sleep(Duration::from_nanos(due.saturating_sub(clock::now())));
        let task = comm.enqueue(seq, 1 << 14);
        comm.progress_over(Some(&ring), task, SHAPE, (rank + 1) % ranks, (rank + ranks - 1) % ranks, pace);
    }
    comm.finalize();
}

/// Connects to the next rank and is connected to by the one before.
fn ring(rank: i32, ranks: i32) -> Ring {
    let dir = PathBuf::from(std::env::var("TOWLINE_PROFILE_DIR").unwrap());
    let path = |rank: i32| dir.join(format!("ring-{rank}.sock"));
    let listener = UnixListener::bind(path(rank)).unwrap();
    let to = loop {
        match UnixStream::connect(path((rank + 1) % ranks)) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    Ring { to, from: listener.accept().unwrap().0 }
}

/// All ranks have started and loaded everything when rank 0's message comes around, however long that took.
fn agree_on_start(rank: i32, ring: &Ring) -> u64 {
    let mut word = [0; 8];
    for round in 0..2 {
        if rank == 0 {
            // The first time around it is not checked.
            let start = if round == 0 { 0 } else { clock::now() + 50_000_000 };
            (&ring.to).write_all(&start.to_ne_bytes()).unwrap();
        }
        (&ring.from).read_exact(&mut word).unwrap();
        if rank != 0 {
            (&ring.to).write_all(&word).unwrap();
        }
    }
    u64::from_ne_bytes(word)
}

/// Plays the job; `of` says what slows each rank.
fn job(dir: &Path, of: impl Fn(i32) -> Slow) -> Vec<PathBuf> {
    job_of(dir, PLAN, of)
}

fn job_of(dir: &Path, plan: Plan, of: impl Fn(i32) -> Slow) -> Vec<PathBuf> {
    let children: Vec<_> = (0..plan.ranks)
        .map(|rank| {
            let mut command = super::command(&format!("job:{}", of(rank).to_args(rank, plan)), dir);
            command.env("TOWLINE_PROFILE", "trace,summary").spawn().unwrap()
        })
        .collect();
    children.into_iter().for_each(|child| drop(super::finish(child)));
    check::traces(dir)
}

/// What the report says that holds the job back.
fn findings(files: &[PathBuf]) -> String {
    towline(&["trace", "report", "--brief"], files)
}

fn towline(args: &[&str], files: &[PathBuf]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_towline")).args(args).args(files).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Makes a file that of another host, whose clock is behind by `offset` and whose wall clock is wrong by `wrong`.
fn move_to_another_host(file: &Path, offset: u64, wrong: i64) {
    let bytes = std::fs::read(file).unwrap();
    let mut out = Vec::new();
    for mut packet in Packets::new(&bytes) {
        packet.timestamp = packet.timestamp.map(|when| when - offset);
        let keys: Vec<(u64, String)> = packet
            .interned_data
            .iter()
            .flat_map(|data| &data.debug_annotation_names)
            .map(|entry| (entry.iid.unwrap(), entry.text.clone().unwrap()))
            .collect();
        // The names of the process's annotations are new with the instant that tells them.
        for annotation in packet.track_event.iter_mut().flat_map(|event| &mut event.debug_annotations) {
            let name = keys.iter().find(|(iid, _)| Some(*iid) == annotation.name_iid).map(|(_, name)| name.as_str());
            match name {
                Some("boot") => annotation.uint_value = Some(offset),
                Some("wall offset") => {
                    let wall = annotation.int_value.unwrap() + offset as i64 + wrong;
                    annotation.int_value = Some(wall);
                }
                _ => {}
            }
        }
        prost::encoding::message::encode(1, &packet, &mut out);
        assert!(packet.encoded_len() > 0);
    }
    std::fs::write(file, out).unwrap();
}

#[test]
fn files_of_hosts_with_different_clocks_are_joined_within_the_stated_bound() {
    let dir = tempfile::tempdir().unwrap();
    let files = job(dir.path(), |_| Slow::NOT);
    // The truth, before the clocks are moved.
    let truth: Vec<Vec<u64>> = files.iter().map(|file| times(file)).map(|mut processes| processes.remove(0)).collect();
    move_to_another_host(&files[1], 77_000_000_000, 3_000_000);
    move_to_another_host(&files[2], 5_000_000, -40_000_000);

    let merged = dir.path().join("all.pftrace");
    let said = towline(&["trace", "merge", "-o", merged.to_str().unwrap()], &files);
    let bounds: Vec<f64> = said
        .lines()
        .filter_map(|line| line.strip_suffix(" wrong")?.split("at most ").nth(1))
        .map(nanoseconds)
        .collect();
    assert_eq!(bounds.len(), 2, "{said}");

    let moved = times(&merged);
    assert_eq!(moved.len(), 3);
    for (process, bound) in [(0, 0.0), (1, bounds[0]), (2, bounds[1])] {
        assert_eq!(moved[process].len(), truth[process].len());
        let error = (moved[process][0] as i64 - truth[process][0] as i64).unsigned_abs() as f64;
        // The bound is told in whole microseconds.
        assert!(error <= bound + 1000.0, "process {process} is off by {error} ns: {said}");
        // On a quiet machine some 20 µs; this one may be busy with other tests.
        assert!(bound < 2e6, "{said}");
    }
    // A merged file is as good as its parts.
    let picture = dir.path().join("call.svg");
    let said = towline(&["trace", "draw", "-o", picture.to_str().unwrap()], std::slice::from_ref(&merged));
    assert!(said.contains(": 3 ranks, "), "{said}");
    let report = towline(&["trace", "report"], &[merged]);
    assert_eq!(report.matches("AllReduce        RING        SIMPLE         30").count(), 3, "{report}");
}

/// The times of each process's records.
fn times(file: &Path) -> Vec<Vec<u64>> {
    let contents = read(&std::fs::read(file).unwrap());
    contents.processes.iter().map(|process| process.records.iter().map(|record| record.when).collect()).collect()
}

#[test]
fn a_rank_that_comes_late_is_named_with_its_lateness() {
    let dir = tempfile::tempdir().unwrap();
    let files = job(dir.path(), |rank| Slow { late: if rank == 1 { 20_000 } else { 0 }, ..Slow::NOT });
    let report = findings(&files);
    let line = report.lines().find(|line| line.contains("comes late")).expect(&report);
    assert!(line.contains("rank 1 ("), "{report}");
}

#[test]
fn two_ranks_that_are_late_by_turns_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let plan = Plan { ranks: 4, collectives: 96, turns: 2 };
    let files = job_of(dir.path(), plan, |rank| Slow { late: if rank >= 2 { 20_000 } else { 0 }, ..Slow::NOT });
    let report = findings(&files);
    let line = report.lines().find(|line| line.contains("come late by turns")).expect(&report);
    let [second, third] = [2, 3].map(|rank| format!("rank {rank} ({})", host()));
    let are_named = [[&second, &third], [&third, &second]].iter().any(|[a, b]| line.contains(&format!("{a} and {b}")));
    assert!(are_named, "{report}");
}

#[test]
fn a_collective_is_drawn_with_each_rank_and_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let files = job(dir.path(), |_| Slow::NOT);
    let picture = dir.path().join("call.svg");
    let said = towline(&["trace", "draw", "-o", picture.to_str().unwrap()], &files);
    assert!(said.contains(": 3 ranks, "), "{said}");
    let svg = std::fs::read_to_string(&picture).unwrap();
    // Each rank with what it sends and receives, and its two rails.
    let rows: Vec<&str> = svg.lines().filter_map(|line| line.strip_suffix("</text>")?.rsplit('>').next()).collect();
    let mut rows = rows.into_iter().skip_while(|row| !row.starts_with("rank "));
    for rank in 0..RANKS {
        let [to, from] = [(rank + 1) % RANKS, (rank + 2) % RANKS];
        let expected = [
            format!("rank {rank} ({})", host()),
            "call".into(),
            format!("send to {to}"),
            "unknown interface 0 out".into(),
            "unknown interface 1 out".into(),
            format!("receive from {from}"),
            "unknown interface 0 in".into(),
            "unknown interface 1 in".into(),
        ];
        assert_eq!(rows.by_ref().take(expected.len()).collect::<Vec<_>>(), expected, "{svg}");
    }
    assert_eq!((rows.next(), svg.matches(">AllReduce, ").count()), (None, RANKS as usize), "{svg}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(["trace", "draw", "--collective", "30", "-o"]).arg(&picture).args(&files);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("there is no collective number 30"), "{said}");
}

#[test]
fn a_slow_rail_and_a_slow_gpu_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let files = job(dir.path(), |rank| Slow { gpu: if rank == 2 { 5000 } else { 0 }, rails: [10, 100], ..Slow::NOT });
    let report = findings(&files);
    let rail = report.lines().find(|line| line.contains("unknown interface 1 is slow")).expect(&report);
    for rank in 0..RANKS {
        assert!(rail.contains(&format!("at rank {rank} (")), "each with its figures: {report}");
    }
    assert_eq!(rail.matches("/s per part in flight over ").count(), RANKS as usize, "{report}");
    let gpu = report.lines().find(|line| line.contains("held up by its GPU")).expect(&report);
    assert!(gpu.contains("rank 2 ("), "{report}");
    assert!(!report.contains("comes late"), "{report}");
}

#[test]
fn a_slow_way_is_named_with_its_speed_in_megabytes() {
    let dir = tempfile::tempdir().unwrap();
    let files = job(dir.path(), |rank| Slow { rails: [if rank == 1 { 7000 } else { 1000 }; 2], ..Slow::NOT });
    let report = findings(&files);
    let way = report.lines().find(|line| line.contains("the way from ")).expect(&report);
    let (ends, speeds) = way.split_once(" is slow: a step moves ").expect(way);
    let (from, to) = ends.split_once(" to ").expect(way);
    assert!(from.ends_with(&format!("rank 1 ({})", host())), "{report}");
    assert_eq!(to, format!("rank 2 ({}) over unknown interface 0 and unknown interface 1", host()), "{report}");
    let speeds: Vec<f64> = speeds
        .split(", ")
        .map(|text| text.split_once(" MB/s ").expect("too slow for gigabytes").0.parse().expect(way))
        .collect();
    // 64 KiB in 7 ms, and in 1 ms: what the machine adds makes it slower.
    let [slow, middle] = speeds[..] else { panic!("{way}") };
    assert!(slow > 0.0 && slow <= 9.4 && middle <= 65.6 && slow * 1.5 < middle, "{report}");
    assert!(!report.contains(" per part in flight ") && !report.contains("not ready"), "{report}");
}

#[test]
fn a_receiver_that_is_not_ready_is_named() {
    // NCCL knows when isend refuses the message; when it is taken, NCCL thinks it under way, and the transport tells.
    let refused = Slow { receiver: 6000, rails: [2000; 2], ..Slow::NOT };
    let taken = Slow { unready: 6000, rails: [2000; 2], ..Slow::NOT };
    for slow in [refused, taken] {
        let dir = tempfile::tempdir().unwrap();
        let files = job(dir.path(), |rank| if rank == 0 { slow } else { Slow { rails: slow.rails, ..Slow::NOT } });
        let report = findings(&files);
        let line = report.lines().find(|line| line.contains("is not ready to receive")).expect(&report);
        assert!(line.contains(&format!("* rank 1 ({}) is not ready", host())), "who receives from rank 0: {report}");
        assert!(!report.contains("unknown interface ") && !report.contains("the way from "), "{report}");
    }
}

#[test]
fn nobody_is_named_when_all_are_equally_slow() {
    let dir = tempfile::tempdir().unwrap();
    let files = job(dir.path(), |_| Slow { receiver: 3000, rails: [3000; 2], ..Slow::NOT });
    let report = findings(&files);
    assert!(report.contains("nothing stands out") && !report.contains("* "), "{report}");
}

#[test]
fn the_time_of_flushes_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let files = job(dir.path(), |rank| Slow { flush: if rank == 2 { 4000 } else { 0 }, ..Slow::NOT });
    let report = towline(&["trace", "report"], &files);
    let mut told = flushes(&report);
    assert_eq!(told.len(), RANKS as usize, "{report}");
    let slow = told.remove(&(2, 1)).expect("rank 2 receives from rank 1");
    let least = COLLECTIVES * SHAPE.steps as u64 * 4_000_000;
    assert!(slow >= least as f64, "{slow} ns in {least} ns of waiting: {report}");
    assert!(told.values().all(|others| others * 2.0 < slow), "{report}");
    // What the process itself says at its end.
    let mut live = HashMap::new();
    for file in std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_some_and(|extension| extension == "txt") {
            live.extend(flushes(&std::fs::read_to_string(file).unwrap()));
        }
    }
    assert_eq!(live.remove(&(2, 1)), Some(slow), "{report}");
    assert_eq!(live, told, "{report}");
}

/// By rank and peer, the nanoseconds of flushing in the tables of peers.
fn flushes(tables: &str) -> HashMap<(i32, i32), f64> {
    let mut rank = -1;
    let mut found = HashMap::new();
    for line in tables.lines() {
        if let Some(rest) = line.strip_prefix("rank ") {
            rank = rest.split_whitespace().next().unwrap().parse().unwrap();
        }
        let mut words = line.split_whitespace();
        if line.starts_with("  recv from ") && line.ends_with('%') {
            let peer = words.nth(2).unwrap().parse().unwrap();
            let words: Vec<&str> = words.collect();
            let [.., number, unit, _share] = words[..] else { panic!("{line}") };
            found.insert((rank, peer), nanoseconds(&format!("{number} {unit}")));
        }
    }
    found
}

/// A time as the tables tell it.
fn nanoseconds(text: &str) -> f64 {
    let (number, unit) = text.split_once(' ').unwrap();
    let units = [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)];
    number.parse::<f64>().unwrap() * units.iter().find(|(name, _)| *name == unit).unwrap().1
}

/// This host's name, as the report gives it.
fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned()
}

#[test]
fn what_is_no_trace_is_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.pftrace");
    std::fs::write(&file, b"no trace at all").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_towline")).args(["trace", "report"]).arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("is no trace of Towline's") && said.contains("TOWLINE_PROFILE=trace"), "{said}");
}
