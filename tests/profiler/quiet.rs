//! What the calls on NCCL's threads ask of the C library and of the kernel: the profiler nothing at all, no memory, no
//! lock and no system call; the transport no memory for a message.
//!
//! Two witnesses. `call_counter.c` is loaded before the C library and counts allocations and locks of a thread. A
//! seccomp filter on the threads that play NCCL's lets the kernel say which system calls they make, however they make
//! them: waiting for a lock is one. Neither sees a lock of Rust's that no other thread has at that moment; so two
//! threads and the profiler's own work at the same time, and what they would wait for shows sooner or later.
//!
//! The transport has locks, which its workers take too, for bookkeeping: how often NCCL's thread waited is printed, not
//! judged.

use std::ffi::{CStr, c_int, c_long, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::pair::Pair;
use towline::host::profiler::Profiler;
use towline::host::{ApiVersion, Init, Memory, Net, Part, Plugin};
use towline::nccl::ffi::*;
use towline::nccl::net_event::{FLAG_SEND, NetEvent, PLUGIN_ID, PLUGIN_ID_SOCKET};

use super::host::{CommDescr, Event, Host, library_path};
use super::play::Comm;
use super::{chain, check};

/// The library of `tests/call_counter.c`.
fn call_counter() -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/call_counter.c");
    let library = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("libcall_counter.so");
    // Built under another name first: another test may be using it.
    let draft = library.with_extension(format!("{}.{:?}", std::process::id(), std::thread::current().id()));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&draft);
    assert!(compiler.arg(source).arg("-ldl").status().expect("cc starts").success());
    std::fs::rename(&draft, &library).expect("the library can be put in place");
    library
}

/// As in `call_counter.c`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    allocations: c_long,
    frees: c_long,
    locks: c_long,
    futex_waits: c_long,
    futex_wakes: c_long,
}

/// The counter's two functions.
#[derive(Clone, Copy)]
struct Counter {
    count: extern "C" fn(c_int),
    counts: extern "C" fn(*mut Counts),
}

impl Counter {
    fn new() -> Self {
        fn function(name: &CStr) -> *mut c_void {
            // SAFETY: the name ends in a zero.
            let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            assert!(!found.is_null(), "the counter is not loaded");
            found
        }
        // SAFETY: as they are declared there.
        unsafe {
            Self {
                count: std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(function(c"call_counter_count")),
                counts: std::mem::transmute::<*mut c_void, extern "C" fn(*mut Counts)>(function(
                    c"call_counter_counts",
                )),
            }
        }
    }

    /// Counts what `call` asks for on this thread.
    #[inline]
    fn during<T>(&self, call: impl FnOnce() -> T) -> T {
        (self.count)(1);
        let answer = call();
        (self.count)(0);
        answer
    }

    /// What was counted of this thread so far.
    fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        (self.counts)(&mut counts);
        counts
    }
}

/// System calls that a watched thread made, and the last one's number.
static CAUGHT: AtomicUsize = AtomicUsize::new(0);
static LAST: AtomicI32 = AtomicI32::new(-1);

extern "C" fn caught(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // `si_syscall`, behind the address of the call: see sigaction(2).
    // SAFETY: the kernel's own description of the signal, which is long enough.
    let number = unsafe { info.cast::<u8>().add(24).cast::<c_int>().read() };
    LAST.store(number, Ordering::SeqCst);
    CAUGHT.fetch_add(1, Ordering::SeqCst);
}

/// From now on this thread's system calls are noted instead of made, for as long as it lives. It may leave a signal's
/// handler, end itself, and read the clock, which is a system call only where the kernel's own clock is no counter.
fn watch_system_calls() {
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const ANSWER: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let line = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let mut lines = [
        line(LOAD_NUMBER, 0, 0),
        line(IS, 3, libc::SYS_rt_sigreturn as u32),
        line(IS, 2, libc::SYS_exit as u32),
        line(IS, 1, libc::SYS_clock_gettime as u32),
        line(ANSWER, 0, libc::SECCOMP_RET_TRAP),
        line(ANSWER, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: lines.len() as u16, filter: lines.as_mut_ptr() };
    // SAFETY: plain data, for which zero is a value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = caught as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: a handler that only writes numbers; a filter that lives through the call.
    let codes = unsafe {
        [
            libc::sigaction(libc::SIGSYS, &action, null_mut()),
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program),
        ]
    };
    assert_eq!(codes, [0; 3], "{}", std::io::Error::last_os_error());
}

/// Threads that play NCCL's.
const THREADS: usize = 2;
/// Rounds that each of them plays.
const ROUNDS: u64 = 2000;

static MASK: AtomicI32 = AtomicI32::new(0);
/// Threads that have ended.
static DONE: AtomicUsize = AtomicUsize::new(0);
/// What all of them asked for, and the events that were taken.
static ASKED: [AtomicU64; 5] = [const { AtomicU64::new(0) }; 5];
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Every event that the version has, every state, and the network's under both identifiers. Returns how many events
/// were taken.
fn round(comm: &Comm, seq: u64, pid: c_int) -> u64 {
    let host = &comm.host;
    let mut taken = 0;
    let mut start = |parent, event| {
        let handle = comm.start(parent, event);
        taken += u64::from(!handle.is_null());
        handle
    };
    let group_api = start(null_mut(), Event::GroupApi);
    host.group_state(group_api, ncclProfilerGroupStartApiStop);
    let api = start(group_api, Event::CollApi { func: c"AllReduce", count: 64 });
    let p2p_api = start(group_api, Event::P2pApi { func: c"Send", count: 64 });
    host.group_state(group_api, ncclProfilerGroupEndApiStart);
    let group = start(null_mut(), Event::Group);
    let coll = start(null_mut(), Event::Coll { api, group, func: c"AllReduce", seq, count: 64 });
    let p2p = start(null_mut(), Event::P2p { api: p2p_api, group, func: c"Send", count: 64, peer: 1 });
    let launch = start(group_api, Event::KernelLaunch);
    let copies = start(api, Event::CeColl { func: c"AllGather", seq, count: 64 });
    let (sync, batch) = (start(copies, Event::CeSync), start(copies, Event::CeBatch { bytes: 64 }));
    for event in [launch, batch, sync, copies, coll, p2p, api, p2p_api, group, group_api] {
        host.stop(event);
    }
    let control = start(null_mut(), Event::ProxyCtrl);
    host.state(control, ncclProfilerProxyCtrlAppend, 0);
    host.state(control, ncclProfilerProxyCtrlAppendEnd, 2);
    host.stop(control);
    let kernel = start(coll, Event::KernelCh { channel: 0, timer: seq });
    let op = start(coll, Event::ProxyOp { pid, channel: 0, peer: 1, steps: 1, chunk: 64, send: true });
    host.state(op, ncclProfilerProxyOpInProgress_v4, 0);
    let step = start(op, Event::ProxyStep { step: 0 });
    host.state(step, ncclProfilerProxyStepSendGPUWait, 0);
    host.state(step, ncclProfilerProxyStepSendPeerWait_v4, 0);
    // SAFETY: plain data, for which zero is a value.
    let mut socket: ncclProfilerNetSockDescr_v1_t = unsafe { std::mem::zeroed() };
    (socket.type_, socket.sock.fd, socket.sock.length) = (ncclProfileSocket as u8, 9, 32);
    let part = start(step, Event::Net { id: PLUGIN_ID_SOCKET, data: (&raw mut socket).cast() });
    host.stop(part);
    let mut net = NetEvent { flags: FLAG_SEND, link: 7, message: seq, length: 32, ..NetEvent::new() };
    let part = start(step, Event::Net { id: PLUGIN_ID, data: (&raw mut net).cast() });
    host.update(part, (&raw mut net).cast());
    host.stop(part);
    host.state(step, ncclProfilerProxyStepSendWait, 64);
    host.stop(step);
    if host.version < 4 {
        host.state(op, ncclProfilerProxyOpSendDone, 64);
    }
    host.stop(op);
    let phase = comm.start(kernel, Event::KernelPhase { channel: 0, number: 1, timer: seq });
    host.state(phase, ncclProfilerKernelPhaseStop, seq);
    host.stop(phase);
    host.state(kernel, ncclProfilerKernelChStop, seq);
    host.stop(kernel);
    taken
}

pub(crate) fn play_callbacks(version: u32) {
    let counter = Counter::new();
    let comm =
        counter.during(|| Comm::new(Host::load(version), CommDescr { id: 0x55, ranks: 2, rank: 0 }, MASK.as_ptr()));
    assert!(counter.counts().allocations > 0, "the counter sees what the library asks for: {:?}", counter.counts());
    let pid = std::process::id() as c_int;
    for _ in 0..THREADS {
        std::thread::spawn(move || {
            watch_system_calls();
            let taken = counter.during(|| (0..ROUNDS).map(|seq| round(&comm, seq, pid)).sum());
            TAKEN.fetch_add(taken, Ordering::SeqCst);
            let Counts { allocations, frees, locks, futex_waits, futex_wakes } = counter.counts();
            for (sum, count) in ASKED.iter().zip([allocations, frees, locks, futex_waits, futex_wakes]) {
                sum.fetch_add(count as u64, Ordering::SeqCst);
            }
            DONE.fetch_add(1, Ordering::SeqCst);
            // Only this is let through: what ends a thread in an orderly way would be noted.
            // SAFETY: ends this thread, which holds nothing that another thread waits for.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        });
    }
    let start = Instant::now();
    while DONE.load(Ordering::SeqCst) < THREADS {
        assert!(start.elapsed() < Duration::from_secs(60), "the threads end; caught {CAUGHT:?}, last {LAST:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
    let asked: Vec<u64> = ASKED.iter().map(|count| count.load(Ordering::SeqCst)).collect();
    let (caught, last) = (CAUGHT.load(Ordering::SeqCst), LAST.load(Ordering::SeqCst));
    assert_eq!(asked, [0; 5], "allocations, frees, locks, waits, wakes");
    assert_eq!(caught, 0, "system calls; the last was number {last}");
    // Nine events in v1, sixteen in v6, if there was room for them.
    let taken = TAKEN.load(Ordering::SeqCst);
    assert!(taken > ROUNDS * THREADS as u64, "{taken} events were taken");
    comm.finalize();
    // The witness speaks when there is something to say.
    std::thread::spawn(|| {
        watch_system_calls();
        // SAFETY: asks for a number; then the thread ends as above.
        unsafe {
            libc::syscall(libc::SYS_getppid);
            libc::syscall(libc::SYS_exit, 0);
        }
    });
    let start = Instant::now();
    while CAUGHT.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "a system call is noted");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(LAST.load(Ordering::SeqCst), libc::SYS_getppid as c_int);
}

#[test]
fn the_profilers_calls_on_nccls_threads_take_no_memory_no_lock_and_no_system_call() {
    let counter = call_counter();
    let counter = counter.to_str().unwrap();
    for version in 1..=6 {
        let dir = tempfile::tempdir().unwrap();
        super::run(&format!("quiet:{version}"), dir.path(), &[("LD_PRELOAD", counter)]);
        check::load(&check::traces(dir.path())[0]);
    }
    // The same with a second profiler behind ours, whose handles are looked up and kept.
    for version in [4, 6] {
        let dir = tempfile::tempdir().unwrap();
        let (library, out) = (chain::build(dir.path()), dir.path().join("out.txt"));
        let (library, out) = (library.to_str().unwrap(), out.to_str().unwrap());
        let more = [("LD_PRELOAD", counter), ("TOWLINE_PROFILER_CHAIN", library), ("SECOND_OUT", out)];
        super::run(&format!("quiet:{version}"), dir.path(), &more);
        let said = std::fs::read_to_string(out).unwrap();
        assert!(said.starts_with("inits 1 finalizes 1 bad 0 open 0"), "v{version}: {said}");
    }
}

/// Messages of a round over the wire, from one that fits into a call to one that workers take.
const SIZES: [usize; 5] = [8, 3000, 64 << 10, 300_000, 2 << 20];
/// Rounds until every request's place has been used: there are fewer than so many.
const WARM: usize = 64;

pub(crate) fn play_wire(rounds: usize) {
    let counter = Counter::new();
    let plugin = Plugin::open(library_path()).expect("the library opens");
    let profiler = Box::new(Profiler::start(&plugin, 0x55, c"world", 2, 0).expect("the profile is on"));
    let net = Net::of(&plugin, Some(ApiVersion::V12)).expect("v12");
    let init = Init { comm_id: 0x55, profiler: Profiler::callback(), ..Init::default() };
    let context = net.init_with(&init).expect("init");
    let pair = Pair::connect(&context, 0).expect("a connection");
    let memory = SIZES.map(|size| (Memory::of(&vec![7; size]), Memory::new(size)));
    // As NCCL does: over RDMA, memory that is not registered is, for the request.
    let registered = memory
        .each_ref()
        .map(|(from, to)| (pair.send.register(from).expect("regMr"), pair.recv.register(to).expect("regMr")));
    let collective = profiler.collective(c"AllReduce", 0, 1 << 20);
    let [send, receive] = [true, false].map(|sends| profiler.operation(collective, 1, sends, SIZES.len(), 2 << 20));
    let mut quiet = Counts::default();
    for number in 0..WARM + rounds {
        if number == WARM {
            quiet = counter.counts();
        }
        let steps = SIZES.map(|_| (profiler.step(send, number), profiler.step(receive, number)));
        // As deep as NCCL goes on the one side, so that the requests' places take turns.
        let mut requests = std::array::from_fn::<_, { SIZES.len() }, _>(|at| {
            let ((out, back), (from, to), (from_mr, to_mr)) = (&steps[at], &memory[at], &registered[at]);
            let to = Part::all(to, Some(to_mr)).profiled(back.handle());
            // SAFETY: memory and handles live until the requests have ended.
            let received = counter.during(|| unsafe { pair.recv.irecv(&[to]) }).expect("irecv").expect("a slot");
            let from = Part::all(from, Some(from_mr)).profiled(out.handle());
            // SAFETY: as above.
            let sent = counter.during(|| unsafe { pair.send.isend(from) }).expect("isend").expect("a slot");
            (Some(sent), Some(received))
        });
        let start = Instant::now();
        while requests.iter().any(|(sent, received)| sent.is_some() || received.is_some()) {
            for (sent, received) in &mut requests {
                sent.take_if(|sent| counter.during(|| pair.send.test(sent)).expect("a send").is_some());
                received.take_if(|received| counter.during(|| pair.recv.test(received)).expect("a receive").is_some());
            }
            assert!(start.elapsed() < Duration::from_secs(60), "the messages arrive");
            towline::host::give_way(start);
        }
        for (out, back) in &steps {
            for step in [out, back] {
                profiler.end(step.step());
            }
        }
    }
    let counts = counter.counts();
    println!("in {WARM} rounds {quiet:?}, in {rounds} more {counts:?}");
    assert!(quiet.allocations > 0, "the counter sees the first requests: {quiet:?}");
    // What grows to the most that was ever in flight at once may still do so, a few times in the life of a connection.
    // (What is freed here was allocated by workers: copies for a resend, when their message has been acknowledged.)
    let more = counts.allocations - quiet.allocations;
    assert!(more as usize * 10 <= rounds, "{more} allocations for {} requests", rounds * 2 * SIZES.len());
    assert_eq!(counts.locks, quiet.locks, "locks of the C library");
    [send, receive].iter().for_each(|&operation| profiler.end(operation));
    drop(registered);
    pair.close().expect("a close");
}

#[test]
fn transfers_that_are_told_of_take_no_memory_in_steady_state() {
    let counter = call_counter();
    // Under Towline's identifier with all details, and under NCCL's.
    for events in ["towline", "nccl"] {
        let dir = tempfile::tempdir().unwrap();
        let more = [
            ("LD_PRELOAD", counter.to_str().unwrap()),
            // A device's library has locks of its own.
            ("TOWLINE_BACKEND", "tcp"),
            ("TOWLINE_NET_EVENTS", events),
            ("TOWLINE_STREAMS", "3"),
            ("TOWLINE_WORKERS", "2"),
        ];
        let output = super::run("quiet-wire:100", dir.path(), &more);
        println!("{events}: {}", String::from_utf8_lossy(&output.stdout));
        let contents = check::load(&check::traces(dir.path())[0]);
        let pieces = check::starts(&contents.processes[0], towline::trace::event::Kind::NetPlugin).len();
        assert!(pieces >= 2 * SIZES.len() * (WARM + 100), "{events}: the transfers were told of: {pieces}");
    }
}
