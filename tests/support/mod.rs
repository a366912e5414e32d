//! What the functional tests share: the built library as NCCL would load it, data to move, a watchdog, and ways to run
//! a test, or a part of one, in a process of its own.
//!
//! But for [`hostile`], which speaks the wire format by itself, nothing here knows how Towline works inside: the tests
//! talk to `libnccl-net.so` through its exported tables only.

#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(unreachable_pub, reason = "a module of test programs: they are its whole world")]

pub mod child;
pub mod distance;
pub mod ends;
pub mod fabric;
pub mod faults;
pub mod flagcx;
pub mod hostile;
pub mod injector;
pub mod job;
pub mod machine;
pub mod netns;
pub mod notices;
pub mod one_sided;
pub mod pair;
pub mod proxy;
pub mod raw;
pub mod rma;
pub mod strict;
pub mod told;
pub mod window;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use towline::host::{ApiVersion, Code, Context, Init, Mr, Net, Part, Plugin, Request, Sizes};

use pair::Pair;

/// Every version that the library must offer; under `TEST_NEWEST` the newest alone. A slow machine runs most
/// tests with that one, and a few with all of them.
pub fn versions() -> Vec<ApiVersion> {
    let all = ApiVersion::NEWEST_FIRST;
    if std::env::var_os("TEST_NEWEST").is_some() { all[..1].to_vec() } else { all.to_vec() }
}

/// Those of a test's versions that [`versions`] has.
pub fn among<const N: usize>(wanted: [ApiVersion; N]) -> impl Iterator<Item = ApiVersion> {
    wanted.into_iter().filter(|version| versions().contains(version))
}

/// The versions in turn.
pub fn version_of(round: usize) -> ApiVersion {
    let versions = versions();
    versions[round % versions.len()]
}

/// How long any step of a test may take. What takes longer hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The library that Cargo built for this run: it lies beside the program.
pub fn library() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_towline")).with_file_name("libnccl-net.so")
}

/// The opened library.
pub fn plugin() -> Plugin {
    Plugin::open(library()).expect("the built library opens")
}

/// One version of it.
///
/// What it logs goes to standard error when `NCCL_DEBUG` asks for it, as in NCCL.
pub fn net(version: ApiVersion) -> Net {
    towline::host::log::print_to_stderr(&std::env::var("NCCL_DEBUG").unwrap_or_default());
    Net::of(&plugin(), Some(version)).expect("the library exports v4 to v12")
}

/// A communicator's context in that version.
pub fn context(version: ApiVersion) -> Context {
    net(version).init_with(&Init { comm_id: 7, ..Init::default() }).expect("init")
}

/// A connection in that version, with both ends here.
pub fn pair(version: ApiVersion) -> Pair {
    Pair::connect(&context(version), 0).expect("a connection")
}

/// Whether the connections of these tests are over RDMA, as they are in the RDMA test machine.
pub fn is_over_rdma() -> bool {
    Path::new("/sys/class/infiniband/rxe0").exists() && std::env::var("TOWLINE_BACKEND").as_deref() != Ok("tcp")
}

/// Ends the process when a test does not end itself in time: a hang is the worst of all answers to NCCL.
#[must_use = "it watches until it is dropped"]
pub struct Watchdog {
    _leash: Sender<()>,
}

/// Watches the calling test for `seconds`.
pub fn watchdog(seconds: u64) -> Watchdog {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let (leash, end) = channel();
    std::thread::spawn(move || {
        if end.recv_timeout(Duration::from_secs(seconds)) == Err(RecvTimeoutError::Timeout) {
            eprintln!("{test} hangs: it did not end within {seconds} s");
            std::process::abort();
        }
    });
    Watchdog { _leash: leash }
}

/// The longest message that [`pattern`] gives.
pub const LONGEST: usize = 17 << 20;

/// What a variable of the environment says, if it is set.
pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|set| set.parse().expect("a number"))
}

/// `len` bytes that differ from one seed to the next, and at each place.
///
/// They are made as far as they are needed: all of them take a slow machine seconds, in each process.
pub fn pattern(seed: usize, len: usize) -> &'static [u8] {
    const SHIFT: usize = 8191;
    const SEEDS: usize = 127;
    const BLOCK: usize = 64 << 10;
    const BLOCKS: usize = (LONGEST + SHIFT * SEEDS).div_ceil(BLOCK);
    /// The place for all of them, how many are made, and what makes the next.
    static ALL: Mutex<(Option<Place>, usize, u64)> = Mutex::new((None, 0, 0x9e37_79b9_7f4a_7c15));
    #[derive(Clone, Copy)]
    struct Place(*mut u8);
    // SAFETY: only the holder of the lock writes, and only where no thread reads yet.
    unsafe impl Send for Place {}
    let start = seed % SEEDS * SHIFT;
    assert!(len <= LONGEST, "at most {LONGEST} bytes");
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let (place, made, state) = &mut *all;
    // Zeroed memory of the kernel, which costs nothing until it is written.
    let place =
        *place.get_or_insert_with(|| Place(Box::leak(vec![0_u8; BLOCKS * BLOCK].into_boxed_slice()).as_mut_ptr()));
    while *made * BLOCK < start + len {
        // SAFETY: within the place, in the part that was never handed out.
        let block = unsafe { std::slice::from_raw_parts_mut(place.0.add(*made * BLOCK), BLOCK) };
        for word in block.as_chunks_mut::<8>().0 {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *word = (*state ^ (*state >> 29)).to_le_bytes();
        }
        *made += 1;
    }
    // SAFETY: within what is made, which is never written again, nor freed.
    unsafe { std::slice::from_raw_parts(place.0.add(start), len) }
}

/// A file for `TOWLINE_KEY_FILE`, and the directory that it goes with.
pub fn key_file() -> (tempfile::TempDir, PathBuf) {
    key_file_of(&[0x5A; 32])
}

/// The same with this in it.
pub fn key_file_of(content: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory for temporary files");
    let key = dir.path().join("key");
    std::fs::write(&key, content).expect("a file");
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("a mode");
    (dir, key)
}

/// Does something when the block ends, also by a panic.
pub fn at_end(what: impl FnMut()) -> impl Drop {
    struct End<F: FnMut()>(F);
    impl<F: FnMut()> Drop for End<F> {
        fn drop(&mut self) {
            (self.0)();
        }
    }
    End(what)
}

/// Something with a bound in time that a loaded machine may miss for once: it is measured again then, and must keep it
/// the second time. `attempt` says what came out, and whether that was within the bound.
///
/// # Panics
/// When neither was.
pub fn at_second_try<T: std::fmt::Debug>(what: &str, mut attempt: impl FnMut() -> (T, bool)) -> T {
    let (first, is_good) = attempt();
    if is_good {
        return first;
    }
    eprintln!("{what}: {first:?}; once more");
    let (second, is_good) = attempt();
    assert!(is_good, "{what}: {first:?}, and again {second:?}");
    second
}

/// Waits until `attempt` yields something.
pub fn eventually<T>(what: &str, patience: Duration, mut attempt: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(start.elapsed() < patience, "not within {patience:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Takes its turn: for tests of one program that must not run side by side because they look at what the whole
/// process has, where a process of their own would cost more.
pub fn one_at_a_time() -> std::sync::MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tests a request until it is over or `patience` is; `None` says the latter.
pub fn outcome(
    test: impl Fn(&Request) -> Result<Option<Sizes>, Code>,
    request: Request,
    patience: Duration,
) -> Option<Result<Sizes, Code>> {
    let start = Instant::now();
    while start.elapsed() < patience {
        match test(&request) {
            Ok(None) => towline::host::give_way(start),
            Ok(Some(sizes)) => return Some(Ok(sizes)),
            Err(code) => return Some(Err(code)),
        }
    }
    None
}

/// A part in the middle of borrowed memory. The caller keeps the memory.
pub fn part<'a>(bytes: &[u8], mr: Option<&'a Mr>) -> Part<'a> {
    Part::new(bytes.as_ptr().cast_mut().cast(), bytes.len(), mr)
}

/// The numbers of this process's open descriptors, with what they lead to.
pub fn descriptors() -> Vec<(i32, String)> {
    let listed = std::fs::read_dir("/proc/self/fd").expect("/proc is there");
    let mut all: Vec<_> = listed
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let target = std::fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned();
            Some((entry.file_name().to_str()?.parse().ok()?, target))
        })
        .filter(|(_, target): &(i32, String)| !target.starts_with("/proc/"))
        .collect();
    all.sort_unstable();
    all
}

/// How many sockets this process has open, but for the one through which the kernel tells of its interfaces: that is
/// one for the process, as long as it lives.
pub fn sockets() -> usize {
    let all = descriptors();
    let sockets = all.iter().filter(|(_, target)| target.starts_with("socket:"));
    sockets.filter(|(fd, _)| socket_option(*fd, libc::SO_DOMAIN) != Some(libc::AF_NETLINK)).count()
}

/// How many of them listen.
pub fn listening() -> usize {
    descriptors().iter().filter(|(fd, _)| socket_option(*fd, libc::SO_ACCEPTCONN) == Some(1)).count()
}

/// Its connected TCP sockets: both ends of a stream that does not leave the process.
pub fn streams() -> Vec<i32> {
    let is_stream = |fd: i32| {
        let (mut address, mut size) = ([0_u64; 16], 128);
        // SAFETY: the kernel writes an address of at most that size; what is no connected socket it refuses.
        let is_connected = unsafe { libc::getpeername(fd, address.as_mut_ptr().cast(), &raw mut size) } == 0;
        is_connected && matches!(socket_option(fd, libc::SO_DOMAIN), Some(libc::AF_INET | libc::AF_INET6))
    };
    descriptors().into_iter().map(|(fd, _)| fd).filter(|&fd| is_stream(fd)).collect()
}

/// Ends a stream, as a middle box does that forgets it. Whether it was still there.
pub fn cut(stream: i32) -> bool {
    // SAFETY: a descriptor of this process; one that has just been closed is the kernel's to refuse.
    unsafe { libc::shutdown(stream, libc::SHUT_RDWR) == 0 }
}

/// What an option of a socket says; none for what is no socket.
fn socket_option(fd: i32, option: libc::c_int) -> Option<libc::c_int> {
    let (mut value, mut size): (libc::c_int, _) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: these options write one int.
    let status = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, option, (&raw mut value).cast(), &raw mut size) };
    (status == 0).then_some(value)
}

/// The memory that this process has resident, in KiB.
pub fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc is there");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("the kernel tells the resident size");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number of KiB")
}

/// How many threads this process has.
pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("/proc is there").count()
}
