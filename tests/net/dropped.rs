//! Packets that do not leave this host, because its own queueing discipline drops them, or that are lost when nothing
//! else is on the way: what the kernel alone would repeat after 200 ms, while all ranks wait.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::support::netns::{Namespace, available};
use crate::support::pair::Pair;
use crate::support::{PATIENCE, child, pair, part, pattern, watchdog};
use towline::host::{ApiVersion, Memory, Part};

/// No packet gets through for so long.
const GAP: Duration = Duration::from_millis(20);

/// Without Towline's doing, no message arrives before this.
const KERNEL: Duration = Duration::from_millis(200);

/// Runs `begin`, and `end` after the gap: how long a message takes that is sent between the two. The best of some: a
/// busy machine delays them.
fn best_over_a_gap(pair: &Pair, size: usize, mut begin: impl FnMut(), mut end: impl FnMut()) -> Duration {
    let mut once = |seed| {
        let target = Memory::new(size);
        assert!(pair.transfer(pattern(seed, size)).expect("a transfer") == pattern(seed, size));
        // SAFETY: the memory lives until the request ended.
        let receive = unsafe { pair.recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        // Until nothing is on the way any more: the sender knows of the receive.
        std::thread::sleep(Duration::from_millis(100));
        begin();
        // SAFETY: the pattern is static.
        let send = unsafe { pair.send.post(part(pattern(seed + 1, size), None)) }.expect("isend");
        let start = Instant::now();
        let (mut is_sent, mut is_received, mut is_open) = (false, false, false);
        while !(is_sent && is_received) {
            if !is_open && start.elapsed() >= GAP {
                is_open = true;
                end();
            }
            is_sent = is_sent || pair.send.test(&send).expect("the send goes on").is_some();
            is_received = is_received || pair.recv.test(&receive).expect("the receive goes on").is_some();
            assert!(start.elapsed() < PATIENCE, "{size} bytes");
        }
        let took = start.elapsed();
        assert!(target.bytes() == pattern(seed + 1, size));
        assert!(took >= GAP, "nothing came through the gap");
        took
    };
    (0..5).map(|turn| once(2 * turn)).min().expect("some")
}

/// Runs `body` in a process and a namespace of its own, over its loopback.
fn over_its_loopback(name: &str, body: impl FnOnce(&Pair)) {
    if child::role().is_some() {
        let _watchdog = watchdog(100);
        let pair = pair(ApiVersion::V12);
        body(&pair);
        return pair.close().expect("close");
    }
    if available() {
        let host = Namespace::new();
        child::run(host.command(name, "inside").env("NCCL_SOCKET_IFNAME", "lo"), name);
    }
}

fn run(words: &str) {
    let mut words = words.split_whitespace();
    let status = std::process::Command::new(words.next().expect("a program")).args(words).status().expect("it runs");
    assert!(status.success());
}

#[test]
fn what_the_own_queue_dropped_leaves_soon_after() {
    over_its_loopback("dropped::what_the_own_queue_dropped_leaves_soon_after", |pair| {
        // The short ones' sends are done when they are copied.
        for size in [8, 20_000, 100 << 10, 1 << 20] {
            let began = || run("tc qdisc add dev lo root pfifo limit 0");
            let took = best_over_a_gap(pair, size, began, || run("tc qdisc del dev lo root"));
            eprintln!("{size} bytes took {took:?}");
            assert!(took < KERNEL * 3 / 4, "{size} bytes took {took:?}");
        }
    });
}

#[test]
fn a_lone_packet_that_was_lost_is_repeated_soon_where_the_kernel_can() {
    over_its_loopback("dropped::a_lone_packet_that_was_lost_is_repeated_soon_where_the_kernel_can", |pair| {
        let socket = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a socket");
        let (mut us, mut length) = (0_i32, size_of::<i32>() as libc::socklen_t);
        // SAFETY: both outlive the call. 45 is TCP_RTO_MIN_US, since Linux 6.16.
        let known = unsafe {
            libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, 45, (&raw mut us).cast(), &raw mut length)
        };
        if known != 0 {
            return eprintln!("skipped: this kernel repeats a lone packet after 200 ms at the earliest");
        }
        run("nft add table inet loss");
        run("nft add chain inet loss in { type filter hook input priority 0 ; }");
        for size in [100, 20_000] {
            let took = best_over_a_gap(
                pair,
                size,
                || run("nft add rule inet loss in drop"),
                || run("nft flush chain inet loss in"),
            );
            eprintln!("{size} bytes took {took:?}");
            assert!(took < KERNEL * 3 / 4, "{size} bytes took {took:?}");
        }
    });
}
