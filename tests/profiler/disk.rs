//! Traces on a disk that is full: the newest part is kept where there was room for two, else the file says that it ends.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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
/// Half way it waits for a line, if it is to: `CALLS` or `CALLS/wait`.
pub(crate) fn play(args: &str) {
    let (calls, waits) = args.split_once('/').map_or((args, false), |(calls, _)| (calls, true));
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
        if waits && seq == calls / 2 {
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
    }
    comm.finalize();
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
    assert!(said.contains("begins after the process did") && !said.contains("ends before"), "{said}");
    let mut all: Vec<u64> = files.iter().flat_map(|file| calls(file)).collect();
    all.sort_unstable();
    all.dedup();
    let kept = all.len() as u64;
    assert!(kept < CALLS, "the disk had no room for all");
    assert_eq!(all, (CALLS - kept..CALLS).collect::<Vec<_>>());
    let length: u64 = files.iter().map(|file| file.metadata().unwrap().len()).sum();
    assert!(length >= 300 << 10, "{length} bytes of 1 MiB");
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
    let patience = Instant::now();
    let length = || check::traces(disk.path()).first().map_or(0, |file| file.metadata().unwrap().len());
    while length() < 32 << 10 {
        assert!(patience.elapsed() < Duration::from_secs(60), "{}", length());
        std::thread::sleep(Duration::from_millis(5));
    }
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
