//! The wall clock jumps while a job runs, forwards and backwards: no deadline of the transport follows it.
//!
//! It sets the machine's clock, so it runs in the test machine only, over both backends:
//! `tests/rdma_vm/suite.sh -- clock_that_jumps`.

use std::time::{Duration, Instant};

use crate::support::pair::Pair;
use crate::support::{PATIENCE, child, context, part, pattern, watchdog};
use towline::host::{ApiVersion, Context, Memory, Part};

/// Without it the clock is left as it is.
const CONSENT: &str = "TEST_MAY_SET_CLOCK";

/// Where the clock jumps to, one after the other, in seconds from the right time: a little, an hour, a year.
const JUMPS: [i64; 10] = [1, -1, 5, 3_600, -3_600, -5, 86_400 * 365, -86_400 * 365, 86_400, 0];

/// From one jump to the next.
const PAUSE: Duration = Duration::from_millis(150);

/// TOWLINE_PEER_TIMEOUT, in seconds.
const PEER_TIMEOUT: u64 = 2;

/// The wall clock, with what tells the right time in spite of it.
struct Clock {
    right: libc::timespec,
    since: Instant,
}

impl Clock {
    fn new() -> Self {
        let mut right = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes the time to where it is told.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut right) }, 0);
        Self { right, since: Instant::now() }
    }

    /// Sets the clock to so many seconds beside the right time.
    fn set(&self, beside: i64) {
        let passed = self.since.elapsed();
        let nanoseconds = self.right.tv_nsec + i64::from(passed.subsec_nanos());
        let time = libc::timespec {
            tv_sec: self.right.tv_sec + passed.as_secs() as i64 + nanoseconds / 1_000_000_000 + beside,
            tv_nsec: nanoseconds % 1_000_000_000,
        };
        // SAFETY: the call reads the time from where it is told.
        let set = unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) };
        assert_eq!(set, 0, "the clock cannot be set: {}", std::io::Error::last_os_error());
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// Messages of several sizes over a connection, each byte looked at.
fn exchange(pair: &Pair, number: usize) {
    for size in [8, 5_000, 70_000, 1 << 20] {
        let target = Memory::new(size);
        // SAFETY: the memory lives until the request is over, and the pattern is static.
        let received = unsafe { pair.recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        // SAFETY: as above.
        let sent = unsafe { pair.send.post(part(pattern(number, size), None)) }.expect("isend");
        pair.finish(received, &[sent]).expect("the clock ends no transfer");
        assert!(target.bytes() == pattern(number, size), "{size}");
    }
}

/// While the clock jumps: transfers, nothing at all for longer than the peer timeout, and new connections.
fn amid_jumps() {
    let _watchdog = watchdog(120);
    let device = |context: &Context| Pair::connect(context, 0).expect("a connection");
    let context = context(ApiVersion::V12);
    let pair = device(&context);
    exchange(&pair, 0);
    let clock = Clock::new();
    std::thread::scope(|scope| {
        let jumps = scope.spawn(|| {
            for beside in JUMPS.into_iter().cycle().take(3 * JUMPS.len()) {
                clock.set(beside);
                std::thread::sleep(PAUSE);
            }
        });
        let begin = Instant::now();
        let mut number = 1;
        while begin.elapsed() < PAUSE * 10 {
            exchange(&pair, number);
            number += 1;
        }
        let fresh = device(&context);
        exchange(&fresh, number);
        assert!(begin.elapsed() < PATIENCE, "a connection takes {:?}", begin.elapsed());
        std::thread::sleep(Duration::from_secs(PEER_TIMEOUT + 1));
        for pair in [&pair, &fresh] {
            exchange(pair, number + 1);
        }
        jumps.join().expect("the clock jumps");
        let backend = std::env::var("TOWLINE_BACKEND").expect("a backend");
        eprintln!("{backend}: {number} rounds of messages, 2 connections, {} jumps", 3 * JUMPS.len());
    });
    pair.close().expect("close");
}

#[test]
#[ignore = "sets the clock: for the machine of tests/rdma_vm"]
fn a_clock_that_jumps_ends_nothing() {
    const NAME: &str = "clock::a_clock_that_jumps_ends_nothing";
    if child::role().is_some() {
        return amid_jumps();
    }
    assert!(std::env::var(CONSENT).is_ok(), "this sets the machine's clock; {CONSENT}=1 says that it may");
    // Side by side: each sees the other's jumps, too.
    std::thread::scope(|scope| {
        for backend in ["tcp", "rdma"] {
            scope.spawn(move || {
                let mut command = child::command(NAME, "under jumps");
                command.env("TOWLINE_BACKEND", backend).env("TOWLINE_PEER_TIMEOUT", PEER_TIMEOUT.to_string());
                command.env("TOWLINE_RECONNECT_TIMEOUT", "1");
                child::run(&mut command, NAME);
            });
        }
    });
}
