//! A state directory whose file system does not answer: neither NCCL's threads nor the end of the process wait for it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use towline::nccl::ffi::ncclProfilerProxyStepRecvWait;

use super::host::{CommDescr, Host};
use super::play::{Comm, Pace, Shape};
use super::why::hang;
use crate::support::netns::available;

/// Longer than a call takes on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(3);

/// A file system in user space (FUSE) of which nobody answers for the kernel's questions.
struct Hung {
    dir: tempfile::TempDir,
    _device: File,
}

impl Hung {
    /// None where there is no FUSE.
    fn new() -> Option<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let dir = tempfile::tempdir().unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0\0", device.as_raw_fd());
        let path = std::ffi::CString::new(dir.path().to_str().unwrap()).unwrap();
        // SAFETY: all are texts that end in a zero byte, which the call only reads.
        let mounted = unsafe {
            libc::mount(c"towline-test".as_ptr(), path.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast())
        };
        assert_eq!(mounted, 0, "{}", std::io::Error::last_os_error());
        Some(Self { dir, _device: device })
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// Makes calls, the last of which does not end, says so, and ends when it is told.
pub(crate) fn play() {
    let began = Instant::now();
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), CommDescr { id: 0x66, ranks: 2, rank: 0 }, &mut mask);
    for seq in 0..100 {
        let task = comm.enqueue(seq, 1024);
        comm.progress(task, Shape { channels: 2, steps: 8, bytes: 1024 }, 1, 1, Pace::NONE);
    }
    assert!(began.elapsed() < AT_ONCE, "NCCL's threads waited for {:?}", began.elapsed());
    hang(&comm, comm.enqueue(100, 1024).event, 1, false, ncclProfilerProxyStepRecvWait);
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    comm.finalize();
}

#[test]
fn a_state_directory_that_does_not_answer_keeps_nobody_waiting() {
    if !available() {
        return;
    }
    let Some(hung) = Hung::new() else {
        eprintln!("skipped: there is no /dev/fuse");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let control = dir.path().join("control");
    let mut child = super::command("hung", dir.path())
        .env("TOWLINE_STATE_DIR", hung.path())
        .env("TOWLINE_PROFILE_CONTROL", &control)
        .env("TOWLINE_STUCK_AFTER", "5")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.ends_with("ready")), "NCCL's threads wait");
    let mut why = Command::new(env!("CARGO_BIN_EXE_towline"));
    let why = why.args(["why", "--dir"]).arg(hung.path()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    crate::support::eventually("the control socket tells of the last call", Duration::from_secs(10), || {
        let mut socket = UnixStream::connect(&control).unwrap();
        socket.write_all(b"status\n").unwrap();
        let mut status = String::new();
        socket.read_to_string(&mut status).unwrap();
        status.contains("\"seq\":100").then_some(())
    });
    // The log does not wait for the other ranks' states either.
    let mut errors = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let warned = errors.find(|line| line.contains(" been in AllReduce #100 for ")).expect("a warning");
    assert!(warned.contains("(towline why looks at all ranks)"), "{warned}");
    let why = why.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&why.stderr);
    assert!(why.status.code() == Some(2) && said.contains("its file system has not answered for 10 s"), "{why:?}");
    let began = Instant::now();
    child.stdin.take().unwrap().write_all(b"end\n").unwrap();
    assert!(child.wait().unwrap().success());
    assert!(began.elapsed() < 2 * AT_ONCE, "its end took {:?}", began.elapsed());
}
