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
use crate::support::child::Guarded;
use crate::support::eventually;
use crate::support::netns::available;

/// Longer than a call takes on a busy machine, and shorter than one that waits for the file system: that has no end.
const AT_ONCE: Duration = Duration::from_secs(15);

/// For what has further reasons to take long.
const PATIENCE: Duration = Duration::from_secs(60);

/// The first line with this in it. The rest is read too: the process must not find its output closed.
fn line_with(output: impl Read + Send + 'static, expected: &'static str) -> Option<String> {
    let (tell, told) = std::sync::mpsc::channel();
    let lines = BufReader::new(output).lines().map_while(Result::ok).filter(move |line| line.contains(expected));
    std::thread::spawn(move || lines.for_each(|line| drop(tell.send(line))));
    told.recv_timeout(PATIENCE).ok()
}

/// A file system in user space (FUSE) whose server never answers the kernel.
struct Hung {
    dir: tempfile::TempDir,
    _device: File,
}

impl Hung {
    /// Over this directory; None where there is no FUSE.
    fn over(dir: tempfile::TempDir) -> Option<Self> {
        let Ok(device) = File::options().read(true).write(true).open("/dev/fuse") else {
            eprintln!("skipped: there is no /dev/fuse");
            return None;
        };
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
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), CommDescr { id: 0x66, ranks: 2, rank: 0 }, &mut mask);
    let began = Instant::now();
    for seq in 0..100 {
        let task = comm.enqueue(seq, 1024);
        comm.progress(task, Shape { channels: 2, steps: 8, bytes: 1024 }, 1, 1, Pace::NONE);
    }
    assert!(began.elapsed() < AT_ONCE, "NCCL's threads waited for {:?}", began.elapsed());
    // So many calls at once may fill the profiler's room: then the next one is dropped.
    std::thread::sleep(Duration::from_millis(500));
    hang(&comm, comm.enqueue(100, 1024).event, 1, false, ncclProfilerProxyStepRecvWait);
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    comm.finalize();
}

fn why(dir: &Path) -> Guarded {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(["why", "--dir"]).arg(dir).stdout(Stdio::null()).stderr(Stdio::piped());
    Guarded(command.spawn().unwrap())
}

fn gives_up(mut why: Guarded) {
    let code = eventually("towline why ends", PATIENCE, || why.0.try_wait().unwrap()).code();
    let mut said = String::new();
    why.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(code == Some(2) && said.contains("its file system has not answered for 10 s"), "{code:?}: {said}");
}

#[test]
fn a_state_directory_that_ceases_to_answer_keeps_nobody_waiting() {
    if !available() {
        return;
    }
    let _watchdog = crate::support::watchdog(150);
    let dir = tempfile::tempdir().unwrap();
    let state = r#"{"version":"","host":"other","boot":1,"pid":1,"beat":1,"now":1,"wall":1,"exited":false,"dropped":0,
        "communicators":[],"interfaces":[],"connections":[]}"#;
    std::fs::write(dir.path().join("other-1.state"), state).unwrap();
    let why = why(dir.path());
    // It reads the file of another host for five seconds, to see whether it changes.
    std::thread::sleep(Duration::from_secs(2));
    let Some(_hung) = Hung::over(dir) else { return };
    gives_up(why);
}

#[test]
fn a_state_directory_that_does_not_answer_keeps_nobody_waiting() {
    if !available() {
        return;
    }
    let Some(hung) = Hung::over(tempfile::tempdir().unwrap()) else { return };
    let _watchdog = crate::support::watchdog(300);
    let dir = tempfile::tempdir().unwrap();
    let control = dir.path().join("control");
    let child = super::command("hung", dir.path())
        .env("TOWLINE_STATE_DIR", hung.path())
        .env("TOWLINE_PROFILE_CONTROL", &control)
        .env("TOWLINE_STUCK_AFTER", "5")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut child = Guarded(child);
    let child = &mut child.0;
    line_with(child.stdout.take().unwrap(), "ready").expect("NCCL's threads do not wait");
    let why = why(hung.path());
    eventually("the control socket tells of the last call", Duration::from_secs(10), || {
        let mut socket = UnixStream::connect(&control).unwrap();
        socket.write_all(b"status\n").unwrap();
        let mut status = String::new();
        socket.read_to_string(&mut status).unwrap();
        status.contains("\"seq\":100").then_some(())
    });
    // The log does not wait for the other ranks' states either.
    let warned = line_with(child.stderr.take().unwrap(), " been in AllReduce #100 for ").expect("a warning");
    assert!(warned.contains("(towline why looks at all ranks)"), "{warned}");
    gives_up(why);
    child.stdin.take().unwrap().write_all(b"end\n").unwrap();
    assert!(eventually("the process ends", AT_ONCE, || child.try_wait().unwrap()).success());
}
