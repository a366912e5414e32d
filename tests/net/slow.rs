//! A peer that hardly reads: one byte a second. It holds up no other connection, it costs a bounded amount of memory, it
//! is not given up (its kernel answers), and a close does not wait for it.

use std::time::{Duration, Instant};

use crate::support::pair::Pair;
use crate::support::proxy::Trickle;
use crate::support::{PATIENCE, child, context, eventually, pair, part, pattern, resident_kib, sockets, watchdog};
use towline::host::{ApiVersion, Context, Memory, Part, Request};

/// What both sides may need for a connection that does not move: the copies and the staging buffers of a window of
/// early messages (512 KiB each), and what the allocator keeps.
const MEMORY_KIB: usize = 2 << 10;

/// A connection through a proxy that passes everything, until it is told to trickle.
fn through_trickle(context: &Context) -> (Pair, Trickle) {
    let (listener, mut handle) = context.listen(0).expect("listen");
    let trickle = Trickle::before(&mut handle);
    let pair = Pair::through(&listener, (context, 0), &mut handle).expect("a connection");
    assert!(pair.transfer(pattern(1, 5000)).expect("a transfer") == pattern(1, 5000));
    (pair, trickle)
}

/// Others move messages meanwhile, and are not slower for it than they were before, within what a busy machine does.
fn others_go_on(other: &Pair, for_so_long: Duration) {
    let start = Instant::now();
    let mut seed = 0;
    while start.elapsed() < for_so_long {
        for size in [0, 100, 60_000, 1 << 20] {
            let began = Instant::now();
            seed += 1;
            assert!(other.transfer(pattern(seed, size)).expect("a transfer") == pattern(seed, size));
            assert!(began.elapsed() < Duration::from_secs(2), "{size} bytes took {:?}", began.elapsed());
            // The processors are for the other tests, too.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The listening socket stays, and the proxy's.
fn all_are_closed(before: usize) {
    eventually("all sockets are closed", PATIENCE, || (sockets() <= before + 2).then_some(()));
}

/// Plays `body` with one stream per connection, so that all of it goes through the proxy, and a peer timeout that is
/// shorter than the test.
fn with_one_stream(name: &str, body: impl FnOnce()) {
    let variables = [("TOWLINE_STREAMS", "1"), ("TOWLINE_PEER_TIMEOUT", "3"), ("NCCL_SOCKET_IFNAME", "lo")];
    child::alone(name, &variables, body);
}

#[test]
fn a_peer_that_reads_a_byte_a_second_holds_up_nobody_and_is_not_given_up() {
    with_one_stream("slow::a_peer_that_reads_a_byte_a_second_holds_up_nobody_and_is_not_given_up", || {
        let _watchdog = watchdog(100);
        let context = context(ApiVersion::V12);
        let before = sockets();
        let (slow, trickle) = through_trickle(&context);
        let other = pair(ApiVersion::V12);
        others_go_on(&other, Duration::from_millis(500));
        let long = pattern(7, 4 << 20);
        let target = Memory::new(long.len());
        let memory = resident_kib();
        trickle.begin();

        // As much as it takes: short messages, which are done when they are copied, and long ones.
        // SAFETY: the memory lives until the connection is closed.
        let receive = unsafe { slow.recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        let (mut sent, mut messages) = (Vec::<Request>::new(), 0);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            let bytes = if messages == 0 { long } else { pattern(messages, 60_000) };
            // SAFETY: the pattern is static.
            if let Some(request) = unsafe { slow.send.isend(part(bytes, None)) }.expect("isend") {
                sent.push(request);
                messages += 1;
            }
            sent.retain(|request| slow.send.test(request).expect("a send goes on").is_none());
        }
        assert!(!sent.is_empty(), "{messages} messages were taken, and all of them are done");

        // For more than two peer timeouts.
        others_go_on(&other, Duration::from_secs(7));
        assert!(slow.send.test(&sent[0]).expect("the peer is not given up").is_none());
        assert!(slow.recv.test(&receive).expect("the peer is not given up").is_none());
        let grown = resident_kib().saturating_sub(memory);
        eprintln!("{messages} messages were taken; {grown} KiB more are resident");
        assert!(grown < MEMORY_KIB, "{grown} KiB more for a peer that does not read");

        // With requests in flight a close is an abort.
        let start = Instant::now();
        slow.send.close().expect("close");
        slow.recv.close().expect("close");
        assert!(start.elapsed() < Duration::from_secs(2), "the closes took {:?}", start.elapsed());
        others_go_on(&other, Duration::from_millis(500));
        other.close().expect("close");
        drop(trickle);
        all_are_closed(before);
    });
}

#[test]
fn a_close_does_not_wait_for_a_peer_that_reads_a_byte_a_second() {
    with_one_stream("slow::a_close_does_not_wait_for_a_peer_that_reads_a_byte_a_second", || {
        let _watchdog = watchdog(60);
        let context = context(ApiVersion::V12);
        let before = sockets();
        let (slow, trickle) = through_trickle(&context);
        trickle.begin();
        // All of them are done at once, and none can arrive.
        for seed in 0..100 {
            // SAFETY: the pattern is static.
            let request = unsafe { slow.send.post(part(pattern(seed, 900), None)) }.expect("isend");
            slow.send.wait(&request, PATIENCE).expect("it is done when it is copied");
        }
        let start = Instant::now();
        slow.send.close().expect("close");
        let took = start.elapsed();
        slow.recv.close().expect("close");
        eprintln!("closing the sending side took {took:?}, both {:?}", start.elapsed());
        assert!(took < Duration::from_secs(9), "the close of the sending side took {took:?}");
        assert!(start.elapsed() < took + Duration::from_secs(8), "both took {:?}", start.elapsed());
        drop(trickle);
        all_are_closed(before);
    });
}
