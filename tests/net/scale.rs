//! Many communicators in one process: what an idle connection costs in memory, descriptors, threads and processor time,
//! and that the thousandth connection is set up as quickly as the first.

use std::time::{Duration, Instant};

use crate::support::pair::Pair;
use crate::support::{
    PATIENCE, child, context, descriptors, eventually, listening, pattern, resident_kib, sockets, threads, watchdog,
};
use towline::host::{ApiVersion, Context};

const COMMUNICATORS: usize = 100;
const PER_COMMUNICATOR: usize = 10;
const CONNECTIONS: usize = COMMUNICATORS * PER_COMMUNICATOR;

/// What one idle connection may take, of both ends together, since both are in this process.
const MEMORY_KIB: usize = 256;
const DESCRIPTORS: usize = 2;

/// What is allowed beyond that for all of the process, both ends: its first connections get 64 further streams before
/// they have a long message to send, and the last of them all of its own. On small machines connections have no further
/// streams.
const EARLY_DESCRIPTORS: usize = 2 * (64 + 16);

/// How long nothing happens while processor time is measured: longer than the 3 s after which a try to connect is given
/// up, so that what set-up has left behind would show.
const IDLE: Duration = Duration::from_millis(3500);

/// Processor time of the whole process so far, user and system.
fn processor_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the place is valid for the call, which fills it; zero is a value of this plain struct anyway.
    let usage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    let of = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    of(usage.ru_utime) + of(usage.ru_stime)
}

/// What the process uses of it while this thread sleeps.
fn processor_time_within(pause: Duration) -> Duration {
    let began = processor_time();
    std::thread::sleep(pause);
    processor_time() - began
}

/// The time that a tenth of all stay below: what it takes when nothing else runs, also on a busy machine.
fn lowest_tenth(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 10]
}

/// Lets this process have as many descriptors as it may: many systems begin with 1024, fewer than both ends of a
/// thousand connections need.
fn allow_descriptors() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the place is valid for both calls.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max.min(16_384);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
}

/// The streams of each connection beside its first one, and how many of these a process opens before they are needed.
const FURTHER: usize = 4;
const EARLY: usize = 64;

#[test]
fn the_first_connections_have_all_their_streams_at_once_and_others_with_a_long_message() {
    let name = "scale::the_first_connections_have_all_their_streams_at_once_and_others_with_a_long_message";
    let streams = (1 + FURTHER).to_string();
    let variables = [("NCCL_SOCKET_IFNAME", "lo"), ("TOWLINE_STREAMS", &streams), ("TOWLINE_WORKERS", "2")];
    child::alone(name, &variables, || {
        let _watchdog = watchdog(60);
        allow_descriptors();
        let context = context(ApiVersion::V12);
        // Both ends of each connection are in this process.
        let become_of = |full: usize, slim: usize| {
            let wanted = || listening() + 2 * (1 + FURTHER) * full + 2 * slim;
            eventually("all streams, and no others", PATIENCE, || (sockets() == wanted()).then_some(()));
        };
        let mut pairs = Vec::new();
        while pairs.len() < EARLY / FURTHER {
            pairs.push(Pair::connect(&context, 0).expect("a connection"));
            become_of(pairs.len(), 0);
        }
        let late = used(&context);
        std::thread::sleep(Duration::from_millis(200));
        become_of(pairs.len(), 1);
        let data = pattern(2, 40_000);
        assert!(late.transfer(data).expect("a transfer") == data);
        become_of(pairs.len() + 1, 0);
        // What is given back another may have.
        drop((late, pairs.pop()));
        become_of(pairs.len(), 0);
        pairs.push(Pair::connect(&context, 0).expect("a connection"));
        become_of(pairs.len(), 0);
    });
}

/// A connection that has carried a short message, so that everything made on first use exists.
fn used(context: &Context) -> Pair {
    let pair = Pair::connect(context, 0).expect("a connection");
    let data = pattern(1, 3000);
    assert!(pair.transfer(data).expect("a transfer") == data);
    pair
}

#[test]
fn a_thousand_idle_connections_cost_little_and_each_is_set_up_as_quickly_as_the_first() {
    let name = "scale::a_thousand_idle_connections_cost_little_and_each_is_set_up_as_quickly_as_the_first";
    child::alone(name, &[], || {
        let _watchdog = watchdog(120);
        allow_descriptors();
        // What the process needs once: threads, epoll descriptors, the listening socket, the tests' own data.
        let first = context(ApiVersion::V12);
        let warm = used(&first);
        let (memory, open, tasks) = (resident_kib(), descriptors().len(), settled_threads());

        let contexts: Vec<Context> = (0..COMMUNICATORS).map(|_| context(ApiVersion::V12)).collect();
        let mut times = Vec::with_capacity(CONNECTIONS);
        let mut pairs = Vec::with_capacity(CONNECTIONS);
        for number in 0..CONNECTIONS {
            let start = Instant::now();
            pairs.push(used(&contexts[number % COMMUNICATORS]));
            times.push(start.elapsed());
        }

        let each = (resident_kib() - memory) as f64 / CONNECTIONS as f64;
        let fds = (descriptors().len() - open).saturating_sub(EARLY_DESCRIPTORS) as f64 / CONNECTIONS as f64;
        let (early, late) = (lowest_tenth(&times[..100]), lowest_tenth(&times[CONNECTIONS - 100..]));
        // The control thread checks each connection once more, 0.4 s after it was used last.
        std::thread::sleep(Duration::from_millis(600));
        let idle = processor_time_within(IDLE);
        eprintln!(
            "per connection, both ends: {each:.1} KiB, {fds:.3} descriptors beyond {EARLY_DESCRIPTORS}; set-up and a first message: lowest tenth of \
             the first hundred {early:?}, of the last {late:?}; processor time of {CONNECTIONS} idle connections in \
             {IDLE:?}: {idle:?}; threads: {tasks} with one connection, {} with all",
            threads()
        );
        assert!(each <= MEMORY_KIB as f64, "{each:.1} KiB per connection");
        assert!(fds <= DESCRIPTORS as f64, "{fds:.3} descriptors per connection");
        // Other work on the machine can slow down a whole hundred, though hardly every one of ten.
        let again = || {
            let start = Instant::now();
            used(&contexts[0]).close().expect("close");
            start.elapsed()
        };
        let quick = late <= early * 3 / 2
            || (0..10).any(|_| lowest_tenth(&(0..100).map(|_| again()).collect::<Vec<_>>()) <= early * 3 / 2);
        assert!(quick, "set-up took {early:?} at first and {late:?} at last");
        assert!(idle <= Duration::from_millis(10), "{idle:?} of processor time while idle");
        assert_eq!(threads(), tasks, "threads");

        // The thousandth works like the first, and all of it is given back.
        let data = pattern(3, 200_000);
        assert!(pairs.last().expect("many").transfer(data).expect("a transfer") == data);
        for pair in pairs {
            pair.close().expect("close");
        }
        warm.close().expect("close");
    });
}

/// How many threads there are when that has not changed for a while: a stream's worker may begin a moment after its
/// socket is there, and the thread that connected it ends a moment after that.
fn settled_threads() -> usize {
    let (mut count, mut since) = (threads(), Instant::now());
    eventually("the number of threads settles", PATIENCE, || {
        let now = threads();
        if now != count {
            (count, since) = (now, Instant::now());
        }
        (since.elapsed() > Duration::from_millis(500)).then_some(count)
    })
}

/// What the threads are called.
fn thread_names() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("/proc is there").flatten();
    tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect()
}

#[test]
fn a_hundred_busy_connections_need_no_more_threads_than_one() {
    const STREAMS: usize = 5;
    let name = "scale::a_hundred_busy_connections_need_no_more_threads_than_one";
    child::alone(name, &[("TOWLINE_STREAMS", "5"), ("TOWLINE_WORKERS", "4")], || {
        let _watchdog = watchdog(120);
        allow_descriptors();
        let context = context(ApiVersion::V12);
        // Long enough that every stream of the connection is made; they join while messages travel.
        let data = pattern(2, 1 << 20);
        let busy = |pair: &Pair| assert!(pair.transfer(data).expect("a transfer") == data);
        let whole = |connections: usize| {
            eventually("all streams are there", PATIENCE, || {
                (crate::support::sockets() >= 2 * STREAMS * connections).then_some(())
            });
        };
        let first = used(&context);
        busy(&first);
        whole(1);
        let (tasks, memory) = (settled_threads(), resident_kib());

        let pairs: Vec<Pair> = (0..100).map(|_| used(&context)).collect();
        for pair in &pairs {
            busy(pair);
        }
        whole(1 + pairs.len());
        for pair in &pairs {
            busy(pair);
        }
        // Those that connected streams end a moment after these are there.
        let left = settled_threads();
        assert!(left <= tasks, "{left} threads instead of the {tasks} of one connection: {:?}", thread_names());
        let each = (resident_kib() - memory) as f64 / pairs.len() as f64;
        std::thread::sleep(Duration::from_millis(600));
        let idle = processor_time_within(Duration::from_secs(1));
        eprintln!(
            "per connection of {STREAMS} streams, both ends: {each:.1} KiB; {tasks} threads; idle for 1 s: {idle:?}"
        );
        assert!(each <= MEMORY_KIB as f64, "{each:.1} KiB per connection");
        assert!(idle <= Duration::from_millis(10), "{idle:?} of processor time while idle");
    });
}
