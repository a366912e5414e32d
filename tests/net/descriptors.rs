//! A process whose descriptors run out (`RLIMIT_NOFILE`): what is connected goes on, what cannot be connected fails
//! with a reason and in time, and everything works again when there are descriptors.

use std::fs::File;
use std::time::{Duration, Instant};

use crate::support::pair::Pair;
use crate::support::{PATIENCE, child, context, eventually, pattern, sockets, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context};

/// How many descriptors a process has here.
const LIMIT: u64 = 200;

/// All descriptors that were left but `spare`.
fn hoard(spare: usize) -> Vec<File> {
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    assert!(files.len() > spare, "there were fewer than {spare} left");
    files.truncate(files.len() - spare);
    files
}

/// Runs `body` in a process of its own that may have [`LIMIT`] descriptors.
fn with_few(name: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    let mut all = vec![("NCCL_SOCKET_IFNAME", "lo"), ("TOWLINE_STREAMS", "8"), ("TOWLINE_WORKERS", "2")];
    all.extend_from_slice(variables);
    child::alone(name, &all, || {
        let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
        // SAFETY: the limit outlives the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        body();
    });
}

fn moves(pair: &Pair, size: usize) {
    assert!(pair.transfer(pattern(size, size)).expect("a transfer") == pattern(size, size));
}

/// A connection that has carried a short message and none that makes it grow.
fn used(context: &Context) -> Pair {
    let pair = Pair::connect(context, 0).expect("a connection");
    moves(&pair, 3000);
    pair
}

#[test]
fn a_connection_for_which_there_are_no_descriptors_fails_with_the_reason_and_others_go_on() {
    let name = "descriptors::a_connection_for_which_there_are_no_descriptors_fails_with_the_reason_and_others_go_on";
    with_few(name, &[("TOWLINE_CONNECT_TIMEOUT", "3")], || {
        let _watchdog = watchdog(60);
        let context = context(ApiVersion::V12);
        let old = used(&context);
        // The listening socket and both ends.
        let open = 3;
        // With none not even a socket can be made; with one it can, and the other side cannot accept it.
        for (spare, code, reason) in [
            (0, Code::SystemError, "connecting failed: Too many open files (os error 24) (peer 127.0.0.1:"),
            (1, Code::RemoteError, "the peer did not answer"),
        ] {
            let log = Capture::start();
            eventually("what was closed is closed", PATIENCE, || (sockets() == open).then_some(()));
            let hoard = hoard(spare);
            let (listener, mut handle) = context.listen(0).expect("the listening socket is there already");
            let start = Instant::now();
            let failed = loop {
                match context.connect(0, &mut handle) {
                    Ok(None) => assert!(start.elapsed() < PATIENCE, "connect hangs"),
                    Ok(Some(_)) => panic!("connected without descriptors"),
                    Err(code) => break code,
                }
                moves(&old, 3000);
            };
            assert_eq!(failed, code, "with {spare} descriptors");
            assert!(log.contains(reason), "with {spare} descriptors: {:?}", log.records());
            assert!(start.elapsed() < Duration::from_secs(6), "it failed after {:?}", start.elapsed());
            let hint = "this process is out of descriptors: raise its limit (ulimit -n)";
            assert!(log.contains(hint), "with {spare} descriptors: {:?}", log.records());
            let full = "a connection cannot be accepted now: Too many open files (os error 24); this process is out";
            assert!(spare == 0 || log.contains(full), "{:?}", log.records());
            drop((hoard, listener));
            moves(&used(&context), 100_000);
        }
        drop(old);
        // The listening socket stays.
        eventually("all sockets are closed", PATIENCE, || (sockets() <= open - 2).then_some(()));
    });
}

#[test]
fn a_connection_waits_for_descriptors() {
    with_few("descriptors::a_connection_waits_for_descriptors", &[], || {
        let _watchdog = watchdog(60);
        let context = context(ApiVersion::V12);
        drop(used(&context));
        for spare in [0, 1] {
            eventually("what was closed is closed", PATIENCE, || (sockets() == 1).then_some(()));
            let hoard = hoard(spare);
            let release = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_secs(1));
                drop(hoard);
            });
            moves(&used(&context), 1 << 20);
            release.join().expect("no panic");
        }
    });
}

#[test]
fn a_connection_that_cannot_grow_for_want_of_descriptors_works_with_what_it_has() {
    let name = "descriptors::a_connection_that_cannot_grow_for_want_of_descriptors_works_with_what_it_has";
    with_few(name, &[("TOWLINE_RECONNECT_TIMEOUT", "1")], || {
        let _watchdog = watchdog(90);
        let context = context(ApiVersion::V12);
        drop(used(&context));
        // None for a thread or a socket; some for sockets, but not for both ends of all.
        for spare in [0, 1, 3, 6, 9] {
            let pair = used(&context);
            eventually("what was closed is closed", PATIENCE, || (sockets() == 3).then_some(()));
            let hoard = hoard(spare);
            let start = Instant::now();
            for size in [20_000, 40_000, 70_000, 1 << 20, 4 << 20] {
                moves(&pair, size);
            }
            // Until every try to grow has been given up.
            while start.elapsed() < Duration::from_millis(1500) {
                moves(&pair, 300_000);
            }
            drop(hoard);
            moves(&pair, 4 << 20);
            pair.close().expect("close");
        }
        eventually("all sockets are closed", PATIENCE, || (sockets() == 1).then_some(()));
    });
}

#[test]
fn nor_does_it_break_without_recovery() {
    let variables = [("TOWLINE_RECONNECT_TIMEOUT", "1"), ("TOWLINE_RECOVERY", "0")];
    with_few("descriptors::nor_does_it_break_without_recovery", &variables, || {
        let _watchdog = watchdog(60);
        let context = context(ApiVersion::V12);
        for spare in [0, 1, 3, 6, 9] {
            let pair = used(&context);
            eventually("what was closed is closed", PATIENCE, || (sockets() == 3).then_some(()));
            let hoard = hoard(spare);
            for size in [20_000, 40_000, 70_000, 1 << 20, 4 << 20] {
                moves(&pair, size);
            }
            drop(hoard);
            moves(&pair, 4 << 20);
            pair.close().expect("close");
        }
    });
}
