//! One process per device, without a GPU: `towline all-reduce` plays NCCL for both halves of the library, and leaves
//! what a training job would.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::faults::{Cut, Network};
use crate::support::netns::available;
use towline::trace::event::{Body, Kind};
use towline::trace::perfetto::read::{Process, read};

fn towline(dir: &Path, words: &str, more: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(words.split_whitespace()).envs(more.iter().copied());
    command.env("TOWLINE_PROFILE_DIR", dir).env("NCCL_SOCKET_IFNAME", "lo");
    let output = command.output().expect("towline runs");
    assert!(output.status.success(), "towline {words}: {output:?}");
    output
}

fn files(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir).expect("the directory").map(|entry| entry.expect("an entry").path());
    all.filter(|path| path.to_string_lossy().ends_with(ending)).collect()
}

fn traced(dir: &Path) -> Vec<Process> {
    files(dir, ".pftrace").iter().flat_map(|file| read(&std::fs::read(file).expect("a trace")).processes).collect()
}

fn check(dir: &Path) -> String {
    let traces: Vec<String> = files(dir, ".pftrace").iter().map(|path| path.display().to_string()).collect();
    let output = towline(dir, &format!("trace check {}", traces.join(" ")), &[]);
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_profiled_all_reduce_accounts_for_every_byte_in_all_three_outputs() {
    let _watchdog = crate::support::watchdog(120);
    let dir = tempfile::tempdir().expect("a directory");
    let words = "all-reduce --ranks 3 -b 8 -e 8M -f 32 -n 2 -w 1";
    towline(dir.path(), words, &[("TOWLINE_PROFILE", "all"), ("TOWLINE_STREAMS", "3")]);
    let said = check(dir.path());
    assert!(said.ends_with("every byte is accounted for\n"), "{said}");
    let processes = traced(dir.path());
    assert_eq!(processes.len(), 3);
    let mut arrows = std::collections::HashMap::<u64, (u32, u32)>::new();
    for process in &processes {
        let net = process.records.iter().filter(|record| record.body.kind() == Some(Kind::NetPlugin));
        let mut long = false;
        for record in net {
            let Body::NetTowline(part) = record.body else { panic!("{record:?}: Towline's own profiler gets details") };
            long |= part.offset > 0;
        }
        assert!(long, "long messages have several events");
        for arrow in &process.arrows {
            let ends = arrows.entry(arrow.id).or_default();
            if arrow.leaves { ends.0 += 1 } else { ends.1 += 1 }
        }
    }
    let paired = arrows.values().filter(|ends| **ends == (1, 1)).count();
    assert!(paired * 100 > arrows.len() * 95, "{paired} of {} arrows have both ends", arrows.len());
    assert_eq!(files(dir.path(), ".sock"), [] as [PathBuf; 0], "control sockets of processes that have ended");
    for (ending, word) in [(".summary.txt", "AllReduce"), (".prom", "interface=\"lo\"")] {
        let found = files(dir.path(), ending);
        assert_eq!(found.len(), 3, "{ending}");
        for file in found {
            assert!(std::fs::read_to_string(&file).expect("text").contains(word), "{}", file.display());
        }
    }
}

/// Containers may have one host name and the same process numbers, and so has a second run in a container.
#[test]
fn processes_of_one_name_and_number_have_files_of_their_own() {
    let _watchdog = crate::support::watchdog(120);
    let dir = tempfile::tempdir().expect("a directory");
    let run = |more: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.args("all-reduce --ranks 2 -b 8 -e 64K -f 128 -n 2 -w 0".split(' '));
        // The number of each rank's process is 1.
        command.args(["--wrap", "unshare --pid --fork --kill-child"]).envs(more.iter().copied());
        command.env("TOWLINE_PROFILE", "all").env("TOWLINE_PROFILE_DIR", dir.path()).env("NCCL_SOCKET_IFNAME", "lo");
        let output = command.output().expect("towline runs");
        assert!(output.status.success(), "{output:?}");
    };
    let number = |ending| files(dir.path(), ending).len();
    run(&[]);
    assert_eq!([number("-1.pftrace"), number("-1.2.pftrace"), number(".prom"), number(".summary.txt")], [1, 1, 2, 2]);
    run(&[]);
    // Results stay; the metrics of processes that have ended are replaced.
    assert_eq!([number(".pftrace"), number(".prom"), number(".summary.txt")], [4, 2, 4]);
    let mut series = std::collections::HashSet::new();
    for file in files(dir.path(), ".prom") {
        let text = std::fs::read_to_string(&file).expect("text");
        let mut own = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
        assert!(own.all(|(name, _)| series.insert(name.to_owned())), "{text}");
    }
}

#[test]
fn under_nccls_identifiers_the_bytes_add_up_as_well() {
    let _watchdog = crate::support::watchdog(120);
    let dir = tempfile::tempdir().expect("a directory");
    let more = [("TOWLINE_PROFILE", "trace"), ("TOWLINE_STREAMS", "3"), ("TOWLINE_NET_EVENTS", "nccl"), ("RANK", "7")];
    towline(dir.path(), "all-reduce -b 8 -e 8M -f 128 -n 2 -w 0", &more);
    let said = check(dir.path());
    assert!(said.contains("every byte is accounted for") && said.matches(", global rank 7: ").count() == 2, "{said}");
    let processes = traced(dir.path());
    let sockets =
        |process: &Process| process.records.iter().any(|r| matches!(r.body, Body::NetSocket { fd, .. } if fd > 2));
    assert!(processes.iter().all(sockets));
}

#[test]
fn without_network_events_the_check_fails() {
    let dir = tempfile::tempdir().expect("a directory");
    let more = [("TOWLINE_PROFILE", "trace"), ("TOWLINE_NET_EVENTS", "off")];
    towline(dir.path(), "all-reduce -b 8 -e 8 -n 2 -w 0", &more);
    let trace = files(dir.path(), ".pftrace").remove(0);
    let output =
        Command::new(env!("CARGO_BIN_EXE_towline")).args(["trace", "check"]).arg(trace).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("its 0 network events 0"), "{output:?}");
}

#[test]
fn a_rank_that_is_late_on_purpose_is_named() {
    let _watchdog = crate::support::watchdog(120);
    let dir = tempfile::tempdir().expect("a directory");
    let words = "all-reduce --ranks 3 -b 1K -e 1K -n 40 -w 0 --late 1:40";
    towline(dir.path(), words, &[("TOWLINE_PROFILE", "trace")]);
    let traces: Vec<String> = files(dir.path(), ".pftrace").iter().map(|path| path.display().to_string()).collect();
    let output = towline(dir.path(), &format!("trace report --brief {}", traces.join(" ")), &[]);
    let said = String::from_utf8(output.stdout).expect("text");
    let late = said.lines().find(|line| line.contains("late")).unwrap_or_else(|| panic!("{said}"));
    assert!(late.contains("rank 1 "), "{said}");
}

/// A run that is killed in the middle: what its traces say of the moment at which it stood still.
fn report_of_a_job_that_hangs(words: &str, disturb: impl FnOnce(&[i32])) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(words.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    command.env("TOWLINE_PROFILE", "trace").env("TOWLINE_PROFILE_DIR", dir.path()).env("NCCL_SOCKET_IFNAME", "lo");
    let mut job = command.spawn().expect("towline runs");
    // A file that is being written may be unreadable for a moment: the numbers are of the look that saw all three.
    let mut pids = crate::support::eventually("all ranks trace", Duration::from_secs(60), || {
        let processes = traced(dir.path());
        let numbers = processes.iter().filter(|process| process.records.len() > 10);
        let numbers: Vec<(i32, i32)> =
            numbers.filter_map(|process| Some((process.comms.first()?.rank, process.info.as_ref()?.pid))).collect();
        (numbers.len() == 3).then_some(numbers)
    });
    pids.sort_unstable();
    disturb(&pids.into_iter().map(|(_, pid)| pid).collect::<Vec<_>>());
    std::thread::sleep(Duration::from_secs(8));
    // SAFETY: only a signal, to the process group that was made for this job.
    unsafe { libc::kill(-(job.id() as i32), libc::SIGKILL) };
    job.wait().expect("its end");
    let traces: Vec<String> = files(dir.path(), ".pftrace").iter().map(|path| path.display().to_string()).collect();
    let output = towline(dir.path(), &format!("trace report --brief {}", traces.join(" ")), &[]);
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_rank_that_does_not_enter_is_named_while_the_others_wait() {
    let _watchdog = crate::support::watchdog(120);
    let said = report_of_a_job_that_hangs("all-reduce --ranks 3 -b 1M -e 1M -n 12 -w 3 --late 1:60000", |_| {});
    // One rank may have been killed before the last part of its trace was written.
    let line = said.lines().find(|line| line.contains(" been in AllReduce #")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("ranks 0 and 2 (") && line.contains("rank 1 ("), "{said}");
    assert!(line.contains("has not entered it: "), "{said}");
}

#[test]
fn a_stopped_rank_is_named_while_the_others_wait() {
    let _watchdog = crate::support::watchdog(120);
    let said = report_of_a_job_that_hangs("all-reduce --ranks 3 -b 1M -e 1M -n 1000000 -w 0", |pids| {
        // SAFETY: only a signal, to a rank of this job.
        unsafe { libc::kill(pids[2], libc::SIGSTOP) };
    });
    let line = said.lines().find(|line| line.contains("sign of life")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("; rank 2 (") && line.contains("has given no sign of life for "), "{said}");
}

#[test]
fn a_job_at_work_that_is_killed_waits_for_nobody() {
    let _watchdog = crate::support::watchdog(120);
    let said = report_of_a_job_that_hangs("all-reduce --ranks 3 -b 1M -e 1M -n 1000000 -w 0", |_| {});
    assert!(!said.contains("What the job waits for"), "{said}");
}

/// The only way between two hosts is cut, or lets next to nothing through, while a job runs: `towline why`, the trace
/// and NCCL's log tell which send does not end, and over which interface.
#[test]
fn a_send_over_an_interface_that_carries_nothing_is_named() {
    if !available() {
        return;
    }
    let _watchdog = crate::support::watchdog(200);
    std::thread::scope(|scope| {
        // Sends of short messages are complete for NCCL once the transport has copied them, and over long round trips
        // those of long ones too: then each rank only waits for the other's data.
        for (how, size, ranks) in [(Cut::Silent, "1M", 3), (Cut::Stuck, "1M", 2), (Cut::Silent, "16K", 2)] {
            scope.spawn(move || cut_while_it_runs(how, size, ranks));
        }
    });
}

/// The ranks are on one host and the other by turns: the last of three sends to the first within a host.
fn cut_while_it_runs(how: Cut, size: &str, ranks: usize) {
    let network = Network::new(1, 0);
    let dir = tempfile::tempdir().expect("a directory");
    let log = dir.path().join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    let words = format!("all-reduce --ranks {ranks} -b {size} -e {size} -n 1000000 -w 0 --timeout 120");
    command.args(words.split(' '));
    for host in [&network.hosts.0, &network.hosts.1] {
        command.args(["--wrap", &format!("ip netns exec {}", host.name())]);
    }
    command.env("TOWLINE_PROFILE", "trace").env("TOWLINE_PROFILE_DIR", dir.path()).env("TOWLINE_STATE_DIR", dir.path());
    command.env("NCCL_SOCKET_IFNAME", "rail").env("TOWLINE_STUCK_AFTER", "6").env("TOWLINE_RECONNECT_TIMEOUT", "100");
    command.stdout(Stdio::null()).stderr(std::fs::File::create(&log).expect("a log")).process_group(0);
    let mut job = command.spawn().expect("towline runs");
    let why = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        let output = command.args(["why", "--json", "--dir"]).arg(dir.path()).output().expect("towline runs");
        let said = serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON");
        (output.status.code().expect("an exit"), said)
    };
    crate::support::eventually("all ranks are at work", Duration::from_secs(60), || {
        let busy = traced(dir.path()).iter().filter(|process| process.records.len() > 100).count() == ranks;
        (busy && why().0 == 0).then_some(())
    });
    network.cut(0, how);
    let cut = Instant::now();
    let said = loop {
        let (code, said) = why();
        if code == 1 {
            break said;
        }
        assert!(cut.elapsed() < Duration::from_secs(35), "{how:?}, {size}: nobody is named: {code} {said}");
    };
    let is_told = |sentence: &str| {
        let is_pending = sentence.contains("a send of rank ") && sentence.contains(" over rail0 has been under way");
        let is_complete = sentence.contains(" sent bytes to rank ") && sentence.contains(" over rail0 that rank ");
        // Messages of 16 KiB are copied.
        if size == "16K" { is_complete } else { is_pending || is_complete }
    };
    let sentence = said["findings"][0]["sentence"].as_str().expect("a sentence");
    assert!(is_told(sentence), "{how:?}, {size}: {said}");
    assert_eq!(said["findings"][0]["named"].as_array().map(Vec::len), Some(1), "{how:?}, {size}: {said}");
    crate::support::eventually("the log says so", Duration::from_secs(35), || {
        let log = std::fs::read_to_string(&log).expect("a log");
        log.lines().any(|line| line.contains(" been in AllReduce #") && line.contains(" over rail0 ")).then_some(())
    });
    // SAFETY: only a signal, to the process group that was made for this job.
    unsafe { libc::kill(-(job.id() as i32), libc::SIGKILL) };
    job.wait().expect("its end");
    let traces: Vec<String> = files(dir.path(), ".pftrace").iter().map(|path| path.display().to_string()).collect();
    let output = towline(dir.path(), &format!("trace report --brief {}", traces.join(" ")), &[]);
    let said = String::from_utf8(output.stdout).expect("text");
    // One rank may have been killed before the last part of its trace was written.
    let line = said.lines().find(|line| line.contains(" been in AllReduce #")).unwrap_or_else(|| panic!("{said}"));
    assert!(is_told(line), "{how:?}, {size}: {said}");
}
