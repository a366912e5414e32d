//! `towline why` beside jobs that stand still: which rank it names, and that it names none in a healthy one.

use std::ffi::c_void;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use towline::nccl::ffi::*;

use super::disk::Disk;
use super::gpu::{self, Gpu};
use super::host::{CommDescr, Event, Host};
use super::play::{Comm, Pace, Shape};
use crate::support::faults::nft;
use crate::support::netns::{Namespace, available};

/// Of each job in which something is wrong: two where they are enough to tell, three, or as many as a large host has.
const RANKS: [i32; 8] = [16, 16, 3, 2, 16, 3, 16, 3];

/// The rank that is not as the others.
const ODD: i32 = 1;

/// A rank's number in the job is larger by this.
const GLOBAL: i32 = 100;

/// The call in which the others wait.
const STUCK: u64 = 3;

const SHAPE: Shape = Shape { channels: 1, steps: 2, bytes: 1024 };

/// What the odd rank does in the stuck call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Odd {
    DoesNotEnter,
    OtherCount,
    OtherFunction,
    SendHangs,
    GpuHangs,
    Exits,
    IsStopped,
    IsKilled,
}

const ALL: [(Odd, &str, &str); RANKS.len()] = [
    (Odd::DoesNotEnter, "stay", "has not entered it: its last call was AllReduce #2"),
    (Odd::OtherCount, "count", "called AllReduce #3 with 99 "),
    (Odd::OtherFunction, "function", "is in AllGather #0 instead"),
    (Odd::SendHangs, "send", "a send of rank 1 ("),
    (Odd::GpuHangs, "gpu", "has waited for its own GPU"),
    (Odd::Exits, "exit", "has ended"),
    (Odd::IsStopped, "wait", "has given no sign of life"),
    (Odd::IsKilled, "wait", "has given no sign of life"),
];

/// A file for which ranks wait before the stuck call, if they are given one.
const GO: &str = "STUCK_GO";

/// The version of the profiler's interface where it does not matter.
const VERSION: u32 = 6;

/// A rank: its number, how many there are, what it does in the stuck call, and the version of NCCL's interface.
pub(crate) fn play(args: &str) {
    let _gpu = Gpu::enter_if_asked();
    let [rank, ranks, how, version] = args.split('/').collect::<Vec<_>>().try_into().unwrap();
    let (rank, ranks): (i32, i32) = (rank.parse().unwrap(), ranks.parse().unwrap());
    let descr = CommDescr { id: 0x77, ranks, rank };
    let mut mask = 0;
    let comm = Comm::new(Host::load(version.parse().unwrap()), descr, &mut mask);
    let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut seq = 0;
    while seq < STUCK || how == "healthy" {
        let task = comm.enqueue(seq, 1024);
        comm.progress(task, SHAPE, next, last, Pace::NONE);
        seq += 1;
        if seq == STUCK {
            println!("ready");
        }
        if how == "healthy" {
            // Each in turn comes late, now and then by seconds, as after a checkpoint.
            let late = if seq % 500 == 0 { 2000 } else { 5 + 50 * u64::from(seq % ranks as u64 == rank as u64) };
            std::thread::sleep(Duration::from_millis(late));
        }
    }
    if let Some(go) = std::env::var_os(GO) {
        let end = Instant::now() + Duration::from_secs(100);
        while !Path::new(&go).exists() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let event = match how {
        "stay" => None,
        "exit" => std::process::exit(0),
        "function" => {
            let call = Event::Coll {
                api: std::ptr::null_mut(),
                group: std::ptr::null_mut(),
                func: c"AllGather",
                seq: 0,
                count: 1024,
            };
            let event = comm.start(std::ptr::null_mut(), call);
            comm.host.stop(event);
            Some(event)
        }
        "count" => Some(comm.enqueue(STUCK, 99).event),
        "drop" => {
            // There is no room for its call's event.
            let op = comm.start(std::ptr::null_mut(), operation(next, true));
            while !comm.start(op, Event::ProxyStep { step: 0 }).is_null() {}
            let event = comm.enqueue(STUCK, 1024).event;
            assert!(event.is_null(), "there is room again");
            Some(event)
        }
        _ => Some(comm.enqueue(STUCK, 1024).event),
    };
    match how {
        "stay" => {}
        "send" => hang(&comm, event.unwrap(), next, true, ncclProfilerProxyStepSendWait),
        "gpu" => hang(&comm, event.unwrap(), next, true, ncclProfilerProxyStepSendGPUWait),
        _ => hang(&comm, event.unwrap(), last, false, ncclProfilerProxyStepRecvWait),
    }
    // Until the test ends it.
    std::thread::sleep(Duration::from_secs(600));
}

fn operation(peer: i32, send: bool) -> Event<'static> {
    Event::ProxyOp { pid: std::process::id() as i32, channel: 0, peer, steps: 1, chunk: 1024, send }
}

/// An operation of this call that waits.
pub(crate) fn hang(comm: &Comm, call: *mut c_void, peer: i32, send: bool, state: ncclProfilerEventState_t) {
    let step = comm.start(comm.start(call, operation(peer, send)), Event::ProxyStep { step: 0 });
    comm.host.state(step, state, 0);
}

/// A process of a job with several communicators: its number and what the job does.
pub(crate) fn play_several(args: &str) {
    let (worker, how) = args.split_once('/').unwrap();
    let worker: i32 = worker.parse().unwrap();
    let (mut mask, host) = (0, Host::load(VERSION));
    let mut join = |id, rank, ranks| {
        let comm = Comm::new(host, CommDescr { id, ranks, rank }, &mut mask);
        (0..STUCK).for_each(|seq| complete(&comm, seq));
        comm
    };
    let enter = |comm: &Comm| {
        let event = comm.enqueue(STUCK, 1024).event;
        hang(comm, event, (comm.descr.rank + 1) % comm.descr.ranks, false, ncclProfilerProxyStepRecvWait);
    };
    match how {
        // Two by two: the rows are one communicator each, and the columns. Worker 1 enters nothing.
        "grid" => {
            let (row, column) = (worker / 2, worker % 2);
            let (tensor, data) = (join(0x70 + row as u64, column, 2), join(0xd0 + column as u64, row, 2));
            match worker {
                0 => enter(&tensor),
                1 => {}
                _ => {
                    complete(&tensor, STUCK);
                    enter(&data);
                }
            }
        }
        // Each of two is in another communicator.
        "order" => {
            let comms = [join(0xd0, worker, 2), join(0x70, worker, 2)];
            enter(&comms[worker as usize]);
        }
        // One waits for all, the next for a message, and the third does nothing.
        _ => {
            let comm = join(0x77, worker, 3);
            match worker {
                0 => {}
                1 => {
                    let (api, group) = (std::ptr::null_mut(), std::ptr::null_mut());
                    let call = Event::P2p { api, group, func: c"Recv", count: 1024, peer: 0 };
                    let call = comm.start(group, call);
                    comm.host.stop(call);
                    hang(&comm, call, 0, false, ncclProfilerProxyStepRecvWait);
                }
                _ => {
                    std::thread::sleep(Duration::from_secs(1));
                    enter(&comm);
                }
            }
        }
    }
    println!("ready");
    std::thread::sleep(Duration::from_secs(600));
}

/// A call that goes through.
fn complete(comm: &Comm, seq: u64) {
    let (rank, ranks) = (comm.descr.rank, comm.descr.ranks);
    comm.progress(comm.enqueue(seq, 1024), SHAPE, (rank + 1) % ranks, (rank + ranks - 1) % ranks, Pace::NONE);
}

/// The ranks of a job, ended with it.
struct Job(Vec<Child>);

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Job {
    /// All ranks have made their first calls, and go on.
    fn start(dir: &Path, ranks: i32, odd: &str, others: &str) -> Self {
        let job = Self::prepare(dir, ranks, odd, others, VERSION, &[SOON]);
        Self::go(dir);
        job
    }

    /// All ranks have made their first calls, and have said so.
    fn prepare(dir: &Path, ranks: i32, odd: &str, others: &str, version: u32, more: &[(&str, &str)]) -> Self {
        let how = |rank| if rank == ODD { odd } else { others };
        Self::start_all(dir, ranks, more, |rank| format!("stuck:{rank}/{ranks}/{}/{version}", how(rank)))
    }

    /// Lets those of this directory enter the stuck call.
    fn go(dir: &Path) {
        std::fs::write(dir.join("go"), "").unwrap();
    }

    fn start_all(dir: &Path, ranks: i32, more: &[(&str, &str)], scenario: impl Fn(i32) -> String) -> Self {
        let mut job = Self((0..ranks).map(|rank| rank_of(dir, rank, &scenario(rank), more)).collect());
        for child in &mut job.0 {
            let output = BufReader::new(child.stdout.take().unwrap());
            assert!(
                output.lines().map_while(Result::ok).any(|line| line.ends_with("ready")),
                "a rank comes to the call"
            );
        }
        let states = || std::fs::read_dir(dir).unwrap().flatten();
        let is_state = |name: std::ffi::OsString| name.to_string_lossy().ends_with(".state");
        while states().filter(|entry| is_state(entry.file_name())).count() < ranks as usize {
            std::thread::sleep(Duration::from_millis(50));
        }
        job
    }

    fn signal_odd(&self, signal: i32) {
        // SAFETY: only a signal, to a process that this job started and has not waited for.
        unsafe { libc::kill(self.0[ODD as usize].id() as i32, signal) };
    }
}

fn rank_of(dir: &Path, rank: i32, scenario: &str, more: &[(&str, &str)]) -> Child {
    let mut command = super::command(scenario, dir);
    command.env("TOWLINE_STATE_DIR", dir).env(GO, dir.join("go")).envs(more.iter().copied());
    if scenario.contains("/drop/") {
        command.env("TOWLINE_PROFILE_BUFFER", "1");
    }
    // The world of a larger job's last stage.
    command.envs(gpu::variables()).env("RANK", (GLOBAL + rank).to_string());
    command.stderr(std::fs::File::create(dir.join(format!("{rank}.log"))).unwrap()).spawn().unwrap()
}

/// What `towline why` prints as JSON, and its exit code.
fn why(dir: &Path) -> (serde_json::Value, i32) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(["why", "--json", "--dir"]).arg(dir).stderr(Stdio::inherit());
    let output = command.output().unwrap();
    let code = output.status.code().expect("an exit");
    (serde_json::from_slice(&output.stdout).expect("JSON"), code)
}

/// Ranks warn of a call that is open for so long, instead of for 30 s.
const SOON: (&str, &str) = ("TOWLINE_STUCK_AFTER", "6");

/// They leave traces, too.
const TRACED: [(&str, &str); 2] = [SOON, ("TOWLINE_PROFILE", "trace")];

/// What `towline trace report` says of a job that has ended.
fn report(dir: &Path) -> String {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "pftrace"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    let output = command.args(["trace", "report", "--brief"]).args(files).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// What a rank has logged as a warning.
fn warnings(dir: &Path, rank: i32) -> Vec<String> {
    let log = std::fs::read_to_string(dir.join(format!("{rank}.log"))).unwrap();
    log.lines().filter(|line| line.contains("towline: ")).map(str::to_owned).collect()
}

#[test]
fn the_rank_that_holds_the_others_up_is_named() {
    let mut ranks = RANKS.into_iter();
    let jobs = ALL.map(|(odd, how, expected)| {
        let (dir, ranks) = (tempfile::tempdir().unwrap(), ranks.next().unwrap());
        let job = Job::prepare(dir.path(), ranks, how, "wait", VERSION, &TRACED);
        (odd, expected, dir, job)
    });
    for (odd, _, dir, job) in &jobs {
        let (said, code) = why(dir.path());
        assert_eq!(code, 0, "{odd:?}: {said}");
        // Before the others enter the call: the log then has one reason to tell.
        match odd {
            Odd::IsStopped => job.signal_odd(libc::SIGSTOP),
            Odd::IsKilled => job.signal_odd(libc::SIGKILL),
            _ => {}
        }
    }
    jobs.iter().for_each(|(_, _, dir, _)| Job::go(dir.path()));
    std::thread::sleep(Duration::from_secs(9));
    for (odd, expected, dir, job) in jobs {
        let (said, code) = why(dir.path());
        let finding = &said["findings"][0];
        let sentence = finding["sentence"].as_str().unwrap_or_default();
        assert!(sentence.contains(expected), "{odd:?}: {said}");
        assert_eq!((&finding["named"][0]["rank"], &finding["named"][1]), (&ODD.into(), &().into()), "{odd:?}: {said}");
        let (host, pid, global) = (towline::trace::say::host(), job.0[ODD as usize].id(), GLOBAL + ODD);
        let place = format!("rank {ODD} ({host}, process {pid}, GPU {}, global rank {global})", gpu::NAME);
        assert!(sentence.contains(&place), "{sentence}");
        let named = &finding["named"][0];
        assert_eq!((&named["gpu"], &named["global_rank"]), (&gpu::NAME.into(), &global.into()), "{said}");
        let alive = job.0.len() as u64 - u64::from(odd.is_gone());
        assert_eq!((code, said["processes"].as_u64()), (1, Some(alive)), "{odd:?}: {said}");
        let remark = sentence.ends_with(" (the reduction operator is not in NCCL's profiler events)");
        assert_eq!(remark, odd == Odd::OtherCount, "{odd:?}: {said}");
        // The same sentence, once, in the log of each rank that waits.
        for rank in (0..job.0.len() as i32).filter(|&rank| rank != ODD) {
            let told = crate::support::eventually("a log says so", Duration::from_secs(20), || {
                Some(warnings(dir.path(), rank)).filter(|told| !told.is_empty())
            });
            let is_same = |line: &String| line.contains("AllReduce #3 for ") && line.contains(expected);
            assert!(told.len() == 1 && is_same(&told[0]) && told[0].contains(&place), "{odd:?}: {told:?}");
        }
        let top = Command::new(env!("CARGO_BIN_EXE_towline"))
            .args(["top", "--once", "--dir"])
            .arg(dir.path())
            .output()
            .unwrap();
        let top = String::from_utf8_lossy(&top.stdout).into_owned();
        let row =
            top.lines().find(|line| line.split_whitespace().nth(2) == Some("100")).unwrap_or_else(|| panic!("{top}"));
        assert!(row.contains(gpu::NAME) && row.contains("AllReduce #3"), "{top}");
        drop(job);
        // A trace does not tell an orderly end of its process from another one.
        let expected = if odd == Odd::Exits { "has given no sign of life" } else { expected };
        let report = report(dir.path());
        let line = report.lines().find(|line| line.contains(" been in AllReduce #3 for ")).unwrap_or_default();
        assert!(line.contains(expected) && line.contains(&place), "{odd:?}: {report}");
    }
}

#[test]
fn the_rank_is_named_with_the_oldest_and_the_newest_version_of_nccls_interface() {
    the_rank_is_named_with([*INTERFACES.start(), *INTERFACES.end()]);
}

/// The versions of NCCL's profiler interface.
const INTERFACES: std::ops::RangeInclusive<u32> = 1..=7;

fn the_rank_is_named_with(versions: impl IntoIterator<Item = u32>) {
    let cases = [("stay", "behind"), ("count", "mismatch"), ("send", "waits")];
    let start = |version| {
        cases.map(|(odd, kind)| {
            let dir = tempfile::tempdir().unwrap();
            let job = Job::prepare(dir.path(), 3, odd, "wait", version, &[SOON]);
            Job::go(dir.path());
            (version, kind, dir, job)
        })
    };
    let jobs: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = versions.into_iter().map(|version| scope.spawn(move || start(version))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    std::thread::sleep(Duration::from_secs(9));
    for (version, kind, dir, _job) in &jobs {
        let (said, code) = why(dir.path());
        let finding = &said["findings"][0];
        assert_eq!((code, &finding["kind"]), (1, &(*kind).into()), "v{version}: {said}");
        assert_eq!(
            (&finding["named"][0]["rank"], &finding["named"][1]),
            (&ODD.into(), &().into()),
            "v{version}: {said}"
        );
    }
}

#[test]
fn what_holds_up_several_communicators_is_found() {
    let jobs = [("grid", 4), ("order", 2), ("transfer", 3)].map(|(how, workers)| {
        let dir = tempfile::tempdir().unwrap();
        let job = Job::start_all(dir.path(), workers, &[SOON], |worker| format!("several:{worker}/{how}"));
        (dir, job)
    });
    std::thread::sleep(Duration::from_secs(9));
    let [grid, order, transfer] = jobs.map(|(dir, job)| {
        let (said, code) = why(dir.path());
        assert_eq!((code, said["findings"].as_array().map(Vec::len)), (1, Some(1)), "{said}");
        let finding = said["findings"][0].clone();
        let named = finding["named"].as_array().unwrap().iter().map(|named| named["process"].as_u64().unwrap());
        let worker = |pid| job.0.iter().position(|child| u64::from(child.id()) == pid).unwrap();
        (named.map(worker).collect::<Vec<_>>(), finding)
    });
    assert_eq!((grid.0, &grid.1["victims"]), (vec![1], &3.into()), "{}", grid.1);
    let mut both = order.0;
    both.sort_unstable();
    assert_eq!((both, &order.1["kind"]), (vec![0, 1], &"deadlock".into()), "{}", order.1);
    assert_eq!((transfer.0, &transfer.1["victims"]), (vec![0], &2.into()), "{}", transfer.1);
    let sentence = transfer.1["sentence"].as_str().unwrap();
    assert!(
        sentence.starts_with("rank 1 (") && sentence.contains(") has been in Recv #0 from rank 0 for "),
        "{sentence}"
    );
    assert!(
        sentence.contains("has not called the matching Send #0 to rank 1: its last call was AllReduce #2"),
        "{sentence}"
    );
}

#[test]
fn a_rank_whose_events_found_no_room_is_not_named_for_the_lack_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let _job = Job::start(dir.path(), 3, "drop", "wait");
    std::thread::sleep(Duration::from_secs(9));
    let (said, code) = why(dir.path());
    let finding = &said["findings"][0];
    assert_eq!((code, &finding["named"][0], &finding["with_gaps"][0]), (2, &().into(), &ODD.into()), "{said}");
    assert!(finding["sentence"].as_str().unwrap().contains(") has gaps"), "{said}");
    let note = format!(", global rank {}, had no room for ", GLOBAL + ODD);
    assert!(said["notes"].to_string().contains(&note), "{said}");
}

impl Odd {
    fn is_gone(self) -> bool {
        matches!(self, Odd::Exits | Odd::IsStopped | Odd::IsKilled)
    }
}

/// A command that goes on until it is ended, and the lines that it prints.
struct Watch(Child, std::sync::mpsc::Receiver<String>);

impl Watch {
    fn start(words: &[&str], dir: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.args(words).arg("--dir").arg(dir).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        Self(child, told)
    }

    /// Waits for a line with this in it.
    fn until(&self, expected: &str) {
        let end = Instant::now() + Duration::from_secs(40);
        let mut seen = Vec::new();
        while let Ok(line) = self.1.recv_timeout(end.saturating_duration_since(Instant::now())) {
            if line.contains(expected) {
                return;
            }
            seen.push(line);
        }
        panic!("{expected:?} is not in {seen:#?}");
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn one_who_watches_is_told_when_a_rank_stops_and_when_it_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let job = Job::start(dir.path(), 3, "stay", "wait");
    let why = Watch::start(&["why", "--watch"], dir.path());
    let top = Watch::start(&["top"], dir.path());
    why.until("rank 1 (");
    top.until("AllReduce #3");
    let json = Watch::start(&["why", "--watch", "--json"], dir.path());
    json.until("has not entered it");
    job.signal_odd(libc::SIGSTOP);
    why.until("has given no sign of life");
    json.until("has given no sign of life");
    top.until("was last heard of");
    job.signal_odd(libc::SIGCONT);
    why.until("has not entered it");
    top.until("after AllReduce #2");
}

#[test]
fn what_is_no_state_is_said_and_hides_no_rank() {
    let dir = tempfile::tempdir().unwrap();
    let ask = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        let output = command.args(["why", "--dir"]).arg(dir.path()).output().unwrap();
        let [said, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (said, errors, output.status.code())
    };
    std::fs::write(dir.path().join("a.state"), "{\"version\":").unwrap();
    std::fs::create_dir(dir.path().join("b.state")).unwrap();
    let (said, errors, code) = ask();
    assert_eq!((code, errors.lines().count()), (Some(2), 2), "{said} {errors}");
    assert!(errors.contains("a.state is left out: it is not a whole state"), "{errors}");
    assert!(errors.contains("b.state is left out: it is no regular file"), "{errors}");
    let _job = Job::start(dir.path(), 2 + 2, "healthy", "healthy");
    let (said, errors, code) = ask();
    assert_eq!((code, errors.lines().count()), (Some(0), 2), "{said} {errors}");
}

/// A key file that only its owner can read.
fn key(dir: &Path, name: &str, content: &[u8]) -> std::path::PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, content).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// `towline why` at these hosts, with this key: what it prints as JSON, its exit code, and what it says of errors.
fn why_at(hosts: &str, key: Option<&Path>) -> (serde_json::Value, i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(["why", "--json", "--host", hosts]);
    match key {
        Some(key) => command.env("TOWLINE_KEY_FILE", key),
        None => command.env_remove("TOWLINE_KEY_FILE"),
    };
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (serde_json::from_slice(&output.stdout).unwrap_or_default(), output.status.code().expect("an exit"), said)
}

/// The first of `count` ports in a row that are free on these addresses.
fn free_ports(addresses: &[&str], count: u16) -> u16 {
    let is_free = |port: u16| addresses.iter().all(|address| TcpListener::bind((*address, port)).is_ok());
    let mut first = 20_000 + (std::process::id() % 10_000) as u16;
    while !(first..first + count).all(is_free) {
        first += count;
    }
    first
}

#[test]
fn without_a_shared_directory_the_rank_is_named_over_tcp_to_holders_of_the_key() {
    const HOSTS: [&str; 2] = ["127.0.0.1", "127.0.0.2"];
    // From the first job's ports to the second's: more than are looked through behind the last process.
    const FURTHER: u16 = 20;
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (key(dir.path(), "key", &[b'k'; 40]), key(dir.path(), "other", &[b'o'; 40]));
    let first = free_ports(&HOSTS, FURTHER + 2);
    // Of each job two processes are on the first host, and one on the second.
    let start = |odd: &str, port: u16| {
        let rank = |rank: i32| {
            let own = dir.path().join(format!("{odd}{rank}"));
            std::fs::create_dir(&own).unwrap();
            let how = if rank == ODD { odd } else { "wait" };
            let mut command = super::command(&format!("stuck:{rank}/3/{how}/{VERSION}"), &own);
            command
                .env("TOWLINE_STATE_DIR", &own)
                .env("TOWLINE_KEY_FILE", &ours)
                .env("LOCAL_RANK", (rank % 2).to_string());
            command.env("TOWLINE_STATUS_LISTEN", format!("{}:{port}", HOSTS[rank as usize / 2]));
            command.spawn().unwrap()
        };
        let mut job = Job((0..3).map(rank).collect());
        for child in &mut job.0 {
            let output = BufReader::new(child.stdout.take().unwrap());
            assert!(output.lines().map_while(Result::ok).any(|line| line.ends_with("ready")), "a rank comes to it");
        }
        job
    };
    let (_job, mut waiting) = (start("stay", first), start("wait", first + FURTHER));
    std::thread::sleep(Duration::from_secs(9));
    let hosts_at = |port: u16| HOSTS.map(|host| format!("{host}:{port}")).join(",");
    let (port, hosts) = (first, hosts_at(first));
    let (said, code, errors) = why_at(&hosts, Some(&ours));
    let finding = &said["findings"][0];
    assert_eq!((code, said["processes"].as_u64()), (1, Some(3)), "{said} {errors}");
    assert_eq!((&finding["named"][0]["rank"], &finding["named"][1]), (&ODD.into(), &().into()), "{said}");
    let top = Command::new(env!("CARGO_BIN_EXE_towline"))
        .args(["top", "--once", "--host", &hosts])
        .env("TOWLINE_KEY_FILE", &ours)
        .output()
        .unwrap();
    let top = String::from_utf8_lossy(&top.stdout).into_owned();
    assert!(top.matches(" AllReduce #3").count() == 2 && top.contains("after AllReduce #2"), "{top}");
    // A host of which one process does not answer, or is gone, still tells of the other, and all waits lead to that
    // process.
    let names_rank_0 = |note: &str| {
        let (said, code, errors) = why_at(&hosts_at(port + FURTHER), Some(&ours));
        assert_eq!((code, said["processes"].as_u64()), (1, Some(2)), "{said} {errors}");
        let (finding, place) = (&said["findings"][0], format!("127.0.0.1:{} {note}", port + FURTHER));
        assert_eq!((&finding["named"][0]["rank"], &finding["named"][1]), (&0.into(), &().into()), "{said}");
        assert!(
            finding["sentence"].as_str().unwrap().contains("; rank 0 does not answer: it was stopped or killed"),
            "{said}"
        );
        assert!(said["notes"].to_string().contains(&place), "{said}");
    };
    // SAFETY: only a signal, to a process that this test started and has not waited for.
    unsafe { libc::kill(waiting.0[0].id() as i32, libc::SIGSTOP) };
    names_rank_0("has not answered within");
    waiting.0[0].kill().unwrap();
    waiting.0[0].wait().unwrap();
    names_rank_0("is not open");
    // Hosts without a process, and names without a host.
    let (said, code, _) = why_at(&format!("127.0.0.3:{port},no-host.invalid:{port}"), Some(&ours));
    let notes = said["notes"].to_string();
    assert!(code == 2 && notes.contains(&format!("127.0.0.3: nothing listens at the ports {port} to ")), "{notes}");
    assert!(notes.contains(&format!("no-host.invalid:{port} has no address")), "{notes}");
    // Others get nothing, and the reason.
    let (said, code, _) = why_at(&hosts, Some(&other));
    assert_eq!((code, said["processes"].as_u64()), (2, Some(0)), "{said}");
    let notes = said["notes"].to_string();
    let place = format!("127.0.0.2:{port} gave nothing (it closed the connection");
    assert!(notes.contains(&place) && notes.contains("does TOWLINE_KEY_FILE name the job's key file here"), "{notes}");
    let (_, code, errors) = why_at(&hosts, None);
    assert!(code == 2 && errors.contains("TOWLINE_KEY_FILE"), "{code}: {errors}");
}

/// The same command in a network namespace.
fn inside(namespace: &Namespace, command: &Command) -> Command {
    let mut ip = Command::new("ip");
    ip.args(["netns", "exec", namespace.name()]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => ip.env(name, value),
            None => ip.env_remove(name),
        };
    }
    ip.stdout(Stdio::piped());
    ip
}

#[test]
fn hosts_that_drop_what_is_sent_to_them_hide_no_process_and_take_the_time_of_one() {
    const SILENT: usize = 60;
    if !available() {
        return;
    }
    let host = Namespace::new();
    host.ip("address add 10.99.0.1/16 dev lo");
    nft(&host, "add table inet cut\nadd chain inet cut in { type filter hook input priority 0 ; }");
    nft(&host, "add rule inet cut in ip daddr 10.99.0.0/16 drop");
    let dir = tempfile::tempdir().unwrap();
    let key = key(dir.path(), "key", &[b'k'; 40]);
    let mut rank = super::command(&format!("stuck:0/2/wait/{VERSION}"), dir.path());
    rank.env("TOWLINE_STATE_DIR", dir.path()).env("TOWLINE_KEY_FILE", &key).env("TOWLINE_STATUS_LISTEN", "9500");
    let mut job = Job(vec![inside(&host, &rank).spawn().unwrap()]);
    let output = BufReader::new(job.0[0].stdout.take().unwrap());
    assert!(output.lines().map_while(Result::ok).any(|line| line.ends_with("ready")), "a rank comes to the call");
    let mut hosts: Vec<String> = (1..=SILENT).map(|number| format!("10.99.1.{number}:9500")).collect();
    hosts.push("127.0.0.1:9500".into());
    let mut why = Command::new(env!("CARGO_BIN_EXE_towline"));
    why.args(["why", "--json", "--host", &hosts.join(",")]).env("TOWLINE_KEY_FILE", &key);
    let began = Instant::now();
    let output = inside(&host, &why).output().unwrap();
    let took = began.elapsed();
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(said["processes"].as_u64(), Some(1), "{said}");
    let notes: Vec<&str> = said["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap()).collect();
    assert_eq!(notes.len(), SILENT, "{said}");
    assert!(notes.iter().all(|note| note.starts_with("10.99.1.") && note.contains(" cannot be reached (")), "{said}");
    // What docs/profiling.md promises, and time for the command itself.
    assert!(took < Duration::from_secs(18 + 4), "{took:?}");
}

#[test]
fn on_a_full_disk_the_rank_that_does_not_enter_is_named_and_not_those_whose_files_are_old() {
    if !available() {
        return;
    }
    let disk = Disk::new(1);
    let job = Job::start(disk.path(), 3, "stay", "wait");
    disk.fill();
    std::thread::sleep(Duration::from_secs(9));
    let (said, code) = why(disk.path());
    let finding = &said["findings"][0];
    assert_eq!((code, &finding["kind"]), (1, &"behind".into()), "{said}");
    assert_eq!((&finding["named"][0]["rank"], &finding["named"][1]), (&ODD.into(), &().into()), "{said}");
    drop(job);
}

/// Run by `.ci/run`, and by `-- --ignored long::`.
mod long {
    use super::*;

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn the_rank_is_named_with_the_other_versions_of_nccls_interface() {
        the_rank_is_named_with(*INTERFACES.start() + 1..*INTERFACES.end());
    }

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn in_a_healthy_job_nobody_is_named_and_none_is_found_where_there_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (said, code) = why(dir.path());
        assert_eq!((code, &said["verdict"]), (2, &"unclear".into()));
        // Two hundred looks, at four jobs or, of TOWLINE_TEST_HEALTHY_JOBS, at as many as that says.
        let jobs = std::env::var("TOWLINE_TEST_HEALTHY_JOBS").map_or(4, |text| text.parse().expect("a number"));
        std::thread::scope(|scope| {
            for ranks in [2, 3, 8, 16] {
                scope.spawn(move || {
                    for number in 0..jobs / 4 {
                        look_at_a_healthy_job(ranks, number, if jobs > 4 { 5 } else { 50 });
                    }
                });
            }
        });
    }

    fn look_at_a_healthy_job(ranks: i32, job: usize, looks: usize) {
        let dir = tempfile::tempdir().unwrap();
        // Traces of all ranks would keep a small machine too busy for the heartbeats.
        let is_traced = ranks < 8;
        let more = if is_traced { &TRACED[..] } else { &[SOON] };
        let running = Job::prepare(dir.path(), ranks, "healthy", "healthy", VERSION, more);
        let mut all_seen = false;
        // A busy machine gives some of the processes, or all, no time for seconds: such a look is repeated.
        let (mut answered, mut empty) = (0, 0);
        while answered < looks {
            let (said, code) = why(dir.path());
            let seen = said["processes"].as_u64();
            assert_eq!(code, if seen == Some(0) { 2 } else { 0 }, "job {job} of {ranks} ranks: {said}");
            all_seen |= seen == Some(ranks as u64);
            answered += usize::from(seen != Some(0));
            empty += usize::from(seen == Some(0));
            assert!(empty <= looks / 5, "job {job} of {ranks} ranks: {empty} looks found no process, {answered} did");
            std::thread::sleep(Duration::from_millis(300));
        }
        assert!(all_seen, "job {job} of {ranks} ranks: never all at once");
        let warned: Vec<String> = (0..ranks).flat_map(|rank| warnings(dir.path(), rank)).collect();
        assert!(warned.is_empty(), "job {job} of {ranks} ranks: {warned:?}");
        drop(running);
        if is_traced {
            let report = report(dir.path());
            assert!(!report.contains("What the job waits for"), "job {job} of {ranks} ranks: {report}");
        }
    }

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn without_settings_the_log_names_the_rank_within_35_s() {
        let dir = tempfile::tempdir().unwrap();
        let job = Job::prepare(dir.path(), 3, "stay", "wait", VERSION, &[]);
        Job::go(dir.path());
        let told =
            crate::support::eventually("the log says so", Duration::from_secs(60), || warnings(dir.path(), 0).pop());
        let seconds = told.split(" for ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a time");
        assert!(seconds.parse::<f64>().expect("seconds") < 35.0, "{told}");
        let place = format!("rank {ODD} ({}, process {},", towline::trace::say::host(), job.0[ODD as usize].id());
        assert!(told.contains(&place) && told.contains("has not entered it"), "{told}");
    }
}
