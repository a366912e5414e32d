//! Traces on a disk that is full: the newest part is kept where there was room for two, else the file says that it
//! ends.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use towline::trace::event::Body;

use super::check;
use super::host::{CommDescr, Host};
use super::play::{Comm, Pace, Shape};
use crate::support::netns::available;

/// A file system of some mebibytes in memory.
pub(crate) struct Disk(tempfile::TempDir);

impl Disk {
    pub(crate) fn new(mebibytes: u32) -> Self {
        let disk = Self(tempfile::tempdir().unwrap());
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={mebibytes}m"), "towline-test"]).arg(disk.path());
        assert!(
            mount.status().expect("mount runs").success(),
            "this test needs root; TOWLINE_SKIP_NETNS=1 leaves it out"
        );
        disk
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Where the control socket of a process that fills it is.
    fn control(&self) -> String {
        self.path().join("control").display().to_string()
    }

    /// Leaves no byte free.
    pub(crate) fn fill(&self) {
        let mut file = std::fs::File::create(self.path().join("filler")).unwrap();
        while file.write_all(&[7; 512]).is_ok() {}
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// Makes so many calls, and lets the profiler's thread write them down now and then: none is dropped on a busy machine.
/// `CALLS`, `CALLS/wait`, which waits for a line half way, or `CALLS/exit`, which then also ends without `finalize`.
pub(crate) fn play(args: &str) {
    let (calls, how) = args.split_once('/').unwrap_or((args, ""));
    let calls: u64 = calls.parse().unwrap();
    let control = std::env::var("TOWLINE_PROFILE_CONTROL").unwrap();
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), CommDescr { id: 0x55, ranks: 2, rank: 0 }, &mut mask);
    for seq in 0..calls {
        let task = comm.enqueue(seq, 1024);
        comm.progress(task, Shape { channels: 2, steps: 8, bytes: 1024 }, 1, 1, Pace::NONE);
        std::thread::sleep(Duration::from_millis(2));
        if seq % 10 == 9 {
            let mut stream = UnixStream::connect(&control).unwrap();
            stream.write_all(b"flush\n").unwrap();
            stream.read_to_string(&mut String::new()).unwrap();
        }
        if !how.is_empty() && seq == calls / 2 {
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
    }
    if how != "exit" {
        comm.finalize();
    }
}

fn report(files: &[PathBuf]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_towline")).args(["trace", "report"]).args(files).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// The numbers of the calls in a file.
fn calls(path: &Path) -> Vec<u64> {
    let records = check::load(path).processes.remove(0).records;
    let seq = |body: &Body| if let Body::Coll(coll) = body { Some(coll.seq) } else { None };
    records.iter().filter_map(|record| seq(&record.body)).collect()
}

#[test]
fn on_a_disk_that_is_too_small_the_newest_part_is_kept() {
    if !available() {
        return;
    }
    const CALLS: u64 = 300;
    let disk = Disk::new(1);
    super::run(
        &format!("disk:{CALLS}"),
        disk.path(),
        &[("TOWLINE_PROFILE", "trace"), ("TOWLINE_PROFILE_CONTROL", &disk.control())],
    );
    let files = check::traces(disk.path());
    let said = report(&files);
    let reason = "begins after the process did: older parts have made room (the disk was full)";
    assert!(said.contains(reason) && !said.contains("ends before"), "{said}");
    assert!(newest_calls(&files, CALLS) < CALLS, "the disk had no room for all");
    let length: u64 = files.iter().map(|file| file.metadata().unwrap().len()).sum();
    assert!(length >= 300 << 10, "{length} bytes of 1 MiB");
}

/// How many of `count` calls are in these files: the newest ones.
fn newest_calls(files: &[PathBuf], count: u64) -> u64 {
    let mut all: Vec<u64> = files.iter().flat_map(|file| calls(file)).collect();
    all.sort_unstable();
    all.dedup();
    let kept = all.len() as u64;
    assert_eq!(all, (count - kept..count).collect::<Vec<_>>());
    kept
}

/// Sets a limit for the files of a process.
fn set_longest_file(pid: u32, bytes: u64) -> std::io::Result<()> {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: `limit` is there for the call; the old one is not asked for.
    let set = unsafe { libc::prlimit(pid as i32, libc::RLIMIT_FSIZE, &raw const limit, std::ptr::null_mut()) };
    if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn where_files_may_not_grow_the_newest_part_is_kept() {
    const CALLS: u64 = 300;
    // Of which a quarter is more than what comes between two flushes.
    const LONGEST: u64 = 640 << 10;
    let dir = tempfile::tempdir().unwrap();
    let mut command = super::command(&format!("disk:{CALLS}"), dir.path());
    let control = dir.path().join("control");
    command.env("TOWLINE_PROFILE", "trace").env("TOWLINE_PROFILE_CONTROL", control);
    // SAFETY: only a system call, of which the closure's own values are the arguments.
    unsafe { command.pre_exec(|| set_longest_file(0, LONGEST)) };
    super::finish(command.spawn().unwrap());
    let files = check::traces(dir.path());
    let said = report(&files);
    let reason = "begins after the process did: older parts have made room (TOWLINE_PROFILE_LIMIT, ulimit -f)";
    assert!(said.contains(reason) && !said.contains("ends before"), "{said}");
    assert!(newest_calls(&files, CALLS) < CALLS, "there was no room for all");
    let lengths: Vec<u64> = files.iter().map(|file| file.metadata().unwrap().len()).collect();
    assert!(
        lengths.iter().all(|&length| length <= LONGEST) && lengths.iter().sum::<u64>() > LONGEST / 3,
        "{lengths:?}"
    );
}

/// The kernel sends SIGXFSZ to a thread that writes beyond the limit.
#[test]
fn no_signal_ends_a_process_that_may_not_write_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let control = dir.path().join("control");
    let mut child = super::command("disk:40/exit", dir.path())
        .env("TOWLINE_PROFILE", "all")
        .env("TOWLINE_PROFILE_CONTROL", control)
        .env("TOWLINE_STATE_DIR", dir.path())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let has_state = || {
        let mut names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
        names.any(|path| path.extension().is_some_and(|ending| ending == "state")).then_some(())
    };
    crate::support::eventually("there is a state", Duration::from_secs(60), has_state);
    set_longest_file(child.id(), 1024).unwrap();
    child.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    let output = super::finish(child);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("the trace ends here: "), "{errors}");
}

#[test]
fn a_trace_whose_disk_others_fill_says_that_it_ends_and_the_job_goes_on() {
    if !available() {
        return;
    }
    let disk = Disk::new(2);
    // So few that the trace does not think of a second file yet.
    let mut child = super::command("disk:12/wait", disk.path())
        .env("TOWLINE_PROFILE", "trace")
        .env("TOWLINE_PROFILE_CONTROL", disk.control())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let has_begun = || {
        let files = check::traces(disk.path());
        let file = files.first().filter(|file| file.metadata().unwrap().len() >= 32 << 10)?;
        calls(file).contains(&0).then_some(())
    };
    crate::support::eventually("the first call is in the trace", Duration::from_secs(60), has_begun);
    disk.fill();
    child.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    let output = super::finish(child);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("the trace ends here: ") && !errors.contains("TOWLINE_PROFILE_LIMIT"), "{errors}");
    let files = check::traces(disk.path());
    let said = report(&files);
    assert!(said.contains("ends before the process does") && !said.contains("sign of life"), "{said}");
    assert!(calls(&files[0]).contains(&0), "what was written is there");
}
