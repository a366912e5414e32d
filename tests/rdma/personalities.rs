//! What becomes of connections on devices that behave otherwise than SoftRoCE: `tests/personalities.h`, which stands
//! between the plugin and libibverbs, gives SoftRoCE's devices their manners.
//!
//! These tests need two RDMA devices, as the test machine has them: rxe0, which sends, and rxe1, which receives.

#![cfg(feature = "rdma")]

use std::time::{Duration, Instant};

use crate::support::injector::{Injector, faulty_verbs};
use crate::support::pair::Pair;
use crate::support::{PATIENCE, child, eventually, net, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Handle, Listener, Memory, Part, RecvComm, SendComm};

/// What a test reads in the log is at INFO.
const LOG: [(&str, &str); 2] = [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "NET")];

/// Runs the test `name` in a process whose devices are like that, with these variables.
fn like(personality: &str, name: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    let library = faulty_verbs();
    let mut all = vec![("LD_PRELOAD", library.to_str().expect("text")), ("FAULTY_VERBS_LIKE", personality)];
    all.extend_from_slice(&LOG);
    all.extend_from_slice(variables);
    child::alone(name, &all, || {
        let _watchdog = watchdog(60);
        body();
    });
}

fn names(context: &Context) -> Vec<String> {
    let devices = context.devices().expect("devices");
    (0..devices).map(|number| context.properties(number).expect("properties").name).collect()
}

/// A message of each kind over a connection.
fn carries(pair: &Pair) {
    for size in [0, 10, 1000, 9000, 100_000] {
        assert!(pair.transfer(pattern(size, size)).expect("a transfer") == pattern(size, size), "{size} bytes");
    }
}

/// A process that finds only such devices runs over TCP, and says of each why.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn devices_without_reliable_connections_leave_the_process_to_tcp() {
    const NAME: &str = "personalities::devices_without_reliable_connections_leave_the_process_to_tcp";
    for (personality, words) in [
        ("efa", "rxe0:1 has a transport of its own"),
        ("iwarp", "rxe0:1 is an iWARP port"),
        ("refusing", "port 1 of rxe0 makes no reliable connections"),
    ] {
        like(personality, NAME, &[("WORDS", words), ("TOWLINE_BACKEND", "auto")], || {
            let log = Capture::start();
            let context = net(ApiVersion::V12).init().expect("init");
            assert!(names(&context).iter().all(|name| !name.starts_with("rxe")), "{:?}", names(&context));
            for words in ["running over TCP: there is no usable RDMA port", &std::env::var("WORDS").expect("words")] {
                assert!(log.contains(words), "{words}: {:?}", log.records());
            }
            carries(&Pair::connect(&context, 0).expect("a connection over TCP"));
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// Beside another device such a one is left out, and the other one is used.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_device_without_reliable_connections_is_left_out() {
    const NAME: &str = "personalities::a_device_without_reliable_connections_is_left_out";
    for personality in ["efa", "iwarp", "refusing"] {
        like(personality, NAME, &[("FAULTY_VERBS_DEVICE", "rxe0")], || {
            let log = Capture::start();
            let context = net(ApiVersion::V12).init().expect("init");
            assert_eq!(names(&context), ["rxe1"]);
            let told = log.records().iter().filter(|record| record.text.contains("rxe0")).count();
            assert_eq!(told, 1, "{:?}", log.records());
            carries(&Pair::connect(&context, 0).expect("a connection"));
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// The buffers of NCCL must be locked, so a low limit rules RDMA out, unless it does not hold for the process.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_low_limit_on_locked_memory_leaves_the_process_to_tcp() {
    const NAME: &str = "personalities::a_low_limit_on_locked_memory_leaves_the_process_to_tcp";
    for privileged in ["1", "0"] {
        let variables = [&LOG[..], &[("PRIVILEGED", privileged), ("TOWLINE_BACKEND", "auto")]].concat();
        child::alone(NAME, &variables, || {
            let _watchdog = watchdog(60);
            let is_privileged = std::env::var("PRIVILEGED").is_ok_and(|set| set == "1");
            limit_locked_memory(8 << 20);
            if !is_privileged {
                drop_capabilities();
            }
            let log = Capture::start();
            let context = net(ApiVersion::V12).init().expect("init");
            let words = "this process may lock 8192 KiB of memory, which is too little for RDMA";
            assert_eq!(log.contains(words), !is_privileged, "{:?}", log.records());
            assert_eq!(names(&context)[0].starts_with("rxe"), is_privileged, "{:?}", names(&context));
        });
        if child::role().is_some() {
            return;
        }
    }
}

fn limit_locked_memory(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: a limit that lives through the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
}

/// Of this thread, which is the one that looks for devices.
fn drop_capabilities() {
    // capset(2), version 3: effective, permitted and inheritable sets of 64 bits in two halves.
    let (header, none) = ([0x2008_0522_u32, 0], [0_u32; 6]);
    // SAFETY: both live through the call, and are as long as that version says.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) }, 0);
}

/// The kernel finds the peer's address only at the third try, each of which takes 0.3 s. Connections are made all the
/// same, and those of a process do not wait for each other.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn an_address_that_is_found_late_is_looked_for_again() {
    like("slow", "personalities::an_address_that_is_found_late_is_looked_for_again", &[], || {
        let log = Capture::start();
        let context = net(ApiVersion::V12).init().expect("init");
        let start = Instant::now();
        carries(&Pair::between((&context, 0), (&context, 1)).expect("a connection"));
        let one = start.elapsed();
        let said = "connecting a queue pair on rxe0 failed: Connection timed out";
        assert!(log.contains(said) && log.contains("try 1 of 34 follows in 100 ms"), "{:?}", log.records());
        let start = Instant::now();
        let all = at_once(&context, 6);
        let six = start.elapsed();
        eprintln!("one connection took {one:?}, six at one time {six:?}");
        assert!(six < 3 * one, "one connection took {one:?}, six at one time {six:?}");
        all.iter().for_each(carries);
    });
}

/// So many connections from the first device to the second, begun at one time.
fn at_once(context: &Context, count: usize) -> Vec<Pair> {
    let mut ends: Vec<(Listener, Handle, Option<SendComm>, Option<RecvComm>)> = (0..count)
        .map(|_| context.listen(1).expect("listen"))
        .map(|(listener, handle)| (listener, handle, None, None))
        .collect();
    eventually("all connections", PATIENCE, || {
        for (listener, handle, send, recv) in &mut ends {
            if send.is_none() {
                *send = context.connect(0, handle).expect("connect");
            }
            if recv.is_none() {
                *recv = listener.accept().expect("accept");
            }
        }
        ends.iter().all(|(.., send, recv)| send.is_some() && recv.is_some()).then_some(())
    });
    let both = |(.., send, recv): (_, _, Option<SendComm>, Option<RecvComm>)| Some(Pair { send: send?, recv: recv? });
    ends.into_iter().filter_map(both).collect()
}

/// The variables of NCCL say how often that is tried; then the reason is told, and what to do about it.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn an_address_that_is_not_found_is_looked_for_as_often_as_the_user_says() {
    const NAME: &str = "personalities::an_address_that_is_not_found_is_looked_for_as_often_as_the_user_says";
    like("slow", NAME, &[("NCCL_IB_MQP_RETRY_CNT", "1"), ("NCCL_IB_MQP_RETRY_SLEEP_MSEC", "10")], || {
        let log = Capture::start();
        let context = net(ApiVersion::V12).init().expect("init");
        let failed = Pair::between((&context, 0), (&context, 1)).err();
        assert_eq!(failed, Some(Code::SystemError), "{:?}", log.records());
        for words in ["connecting a queue pair on rxe0 failed: Connection timed out", "NCCL_CROSS_NIC=0"] {
            assert!(log.contains(words), "{words}: {:?}", log.records());
        }
    });
}

/// A short message needs no clear-to-send. What is written before the receiver's queue pair receives is dropped, and
/// sent again only after 4.3 s.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn nothing_is_written_before_the_receiver_is_ready() {
    let variables = [("FAULTY_VERBS_DEVICE", "rxe1")];
    like("late", "personalities::nothing_is_written_before_the_receiver_is_ready", &variables, || {
        let context = net(ApiVersion::V12).init().expect("init");
        let (listener, mut handle) = context.listen(1).expect("listen");
        let connected = || context.connect(0, &mut handle).expect("connect");
        let send = eventually("the sending side", PATIENCE, connected);
        let start = Instant::now();
        let source = Memory::of(pattern(1, 100));
        // SAFETY: the memory lives until the request ended.
        let sent = unsafe { send.post(Part::all(&source, None)) }.expect("isend");
        let recv = eventually("the receiving side", PATIENCE, || listener.accept().expect("accept"));
        let target = Memory::new(100);
        // SAFETY: as above.
        let posted = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        Pair { send, recv }.finish(posted, &[sent]).expect("a transfer");
        let elapsed = start.elapsed();
        eprintln!("the first message took {elapsed:?}");
        assert!(target.bytes() == pattern(1, 100));
        assert!(elapsed < Duration::from_secs(3), "the first message took {elapsed:?}");
    });
}

/// The numbers after these words of the queue pairs of a device, added up.
fn counted<const N: usize>(device: &str, words: [&str; N]) -> [u32; N] {
    let text = Injector::text(c"faulty_verbs_made");
    let pairs: Vec<&str> = text.lines().filter(|line| line.starts_with(device)).collect();
    words.map(|word| {
        let number = |pair: &str| -> u32 {
            let found = pair.split(' ').find_map(|part| part.strip_prefix(word)?.strip_prefix('='));
            found.expect("a count").parse().expect("a number")
        };
        pairs.iter().map(|pair| number(pair)).sum()
    })
}

/// Where the fabric may reorder packets, a longer message is its bytes and an immediate behind them: two requests,
/// posted with one call. Elsewhere it is one.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_message_is_one_request_or_two_where_the_fabric_reorders() {
    const NAME: &str = "personalities::a_message_is_one_request_or_two_where_the_fabric_reorders";
    for (adaptive, requests) in [("0", "1"), ("1", "2")] {
        let variables = [("NCCL_IB_ADAPTIVE_ROUTING", adaptive), ("REQUESTS", requests), ("FAULTY_VERBS_RECORD", "1")];
        like("mlx5", NAME, &variables, || {
            const MESSAGES: u32 = 20;
            let context = net(ApiVersion::V12).init().expect("init");
            let pair = Pair::between((&context, 0), (&context, 1)).expect("a connection");
            let requests: u32 = std::env::var("REQUESTS").expect("set").parse().expect("a number");
            for (size, requests) in [(8192, 1), (8193, requests), (100_000, requests)] {
                let before = counted("rxe0", ["writes", "immediates", "calls"]);
                for _ in 0..MESSAGES {
                    assert!(pair.transfer(pattern(size, size)).expect("a transfer") == pattern(size, size));
                }
                let after = counted("rxe0", ["writes", "immediates", "calls"]);
                let [writes, immediates, calls] = std::array::from_fn(|at| after[at] - before[at]);
                assert_eq!((writes + immediates, calls), (requests * MESSAGES, MESSAGES), "{size} bytes");
            }
            // A size that the receive does not have is told all the same.
            assert!(pair.transfer_into(pattern(9, 50_000), 90_000).expect("a transfer") == pattern(9, 50_000));
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// Plain writes arrive in pieces, the last byte first, as on a fabric with adaptive routing: what is polled is not
/// believed before it is whole.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn writes_that_arrive_in_pieces_in_any_order_are_understood() {
    let variables = [("NCCL_IB_ADAPTIVE_ROUTING", "1"), ("FAULTY_VERBS_RECORD", "1")];
    like("reordering", "personalities::writes_that_arrive_in_pieces_in_any_order_are_understood", &variables, || {
        let context = net(ApiVersion::V12).init().expect("init");
        let pair = Pair::between((&context, 0), (&context, 1)).expect("a connection");
        for round in 0..20 {
            carries(&pair);
            let sizes = [0, 5, 3000, 9000, 20_000, 70_000, 12_000, 1];
            let sends: Vec<(i32, &[u8])> = (0..8).map(|tag| (tag, pattern(round, sizes[tag as usize]))).collect();
            let receives: Vec<(i32, usize)> = (0..8).rev().map(|tag| (tag, 80_000)).collect();
            let arrived = pair.exchange(&sends, &receives).expect("a group");
            assert!(arrived.iter().rev().zip(&sends).all(|(got, (_, sent))| got == sent), "round {round}");
        }
        let [pieces] = counted("rxe0", ["pieces"]);
        assert!(pieces > 300, "{pieces} pieces");
    });
}

/// A forked child, such as a data loader, finds everything where it was, although registered pages are not there:
/// nothing else lies on those.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_forked_child_misses_nothing_beside_registered_memory() {
    // One heap for all threads, so that what the plugin's threads allocate lies beside the blocks of this one.
    let variables = [("MALLOC_ARENA_MAX", "1")];
    like("old-kernel", "personalities::a_forked_child_misses_nothing_beside_registered_memory", &variables, || {
        let context = net(ApiVersion::V12).init().expect("init");
        let mut blocks: Vec<Box<[u8]>> = Vec::with_capacity(8000);
        let block = |at: usize| vec![1_u8; 16 + at * 37 % 3000].into_boxed_slice();
        let mut pairs = Vec::new();
        for round in 0..4 {
            blocks.extend((0..1000).map(|at| block(at + round)));
            pairs.push(Pair::between((&context, 0), (&context, 1)).expect("a connection"));
            blocks.extend((0..1000).map(|at| block(at + round)));
        }
        // SAFETY: the child reads memory and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let all = blocks.iter().all(|block| block.iter().all(|byte| *byte == 1));
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!all)) };
        }
        let mut status = 0;
        // SAFETY: the child from above, and room for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child died, or found other bytes");
        pairs.iter().for_each(carries);
    });
}

/// InfiniBand's addressing: by local identifier, and with the global header where the port needs it. The injector
/// refuses what is addressed otherwise.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn infiniband_ports_are_reached_by_their_local_identifiers() {
    const NAME: &str = "personalities::infiniband_ports_are_reached_by_their_local_identifiers";
    for personality in ["infiniband", "infiniband-global"] {
        like(personality, NAME, &[("FAULTY_VERBS_RECORD", "1")], || {
            let log = Capture::start();
            let context = net(ApiVersion::V12).init().expect("init");
            let said = "[0]rxe0:1/IB(";
            assert!(log.contains(said) && log.contains("LID 40"), "{:?}", log.records());
            let pair = Pair::between((&context, 0), (&context, 1)).expect("a connection");
            for _ in 0..10 {
                carries(&pair);
            }
            // The size comes with the immediate, since such a fabric may reorder.
            let before = counted("rxe0", ["writes", "immediates"]);
            assert!(pair.transfer(pattern(2, 100_000)).expect("a transfer") == pattern(2, 100_000));
            let after = counted("rxe0", ["writes", "immediates"]);
            assert_eq!((after[0] - before[0], after[1] - before[1]), (1, 1));
            pair.close().expect("close");
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// The speed is the driver's word, where it has one, unless the user does not want it; and variables of NCCL that are
/// nothing to Towline are named.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn the_driver_knows_the_speed_of_bonded_ports() {
    const NAME: &str = "personalities::the_driver_knows_the_speed_of_bonded_ports";
    for ask in ["1", "0"] {
        like("bonded", NAME, &[("NCCL_IB_QUERY_PORT_SPEED", ask), ("NCCL_IB_OOO_RQ", "1")], || {
            let log = Capture::start();
            let context = net(ApiVersion::V12).init().expect("init");
            let speed = context.properties(0).expect("properties").speed_mbps;
            let asks = std::env::var("NCCL_IB_QUERY_PORT_SPEED").is_ok_and(|set| set == "1");
            assert_eq!(speed == 1_600_000, asks, "{speed}");
            let said = "set, and without effect in Towline: NCCL_IB_OOO_RQ";
            assert!(log.contains(said), "{said}: {:?}", log.records());
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// What drivers of other cards allow: nothing or little inside a request, short queues, no ECE but by their rules, no
/// DMA-BUF.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn the_limits_of_other_cards_are_kept() {
    const NAME: &str = "personalities::the_limits_of_other_cards_are_kept";
    for personality in ["mlx5", "bnxt", "irdma"] {
        for pairs in ["1", "3"] {
            like(personality, NAME, &[("NCCL_IB_QPS_PER_CONNECTION", pairs)], || {
                let log = Capture::start();
                let context = net(ApiVersion::V12).init().expect("init");
                let pair = Pair::between((&context, 0), (&context, 1)).expect("a connection");
                for _ in 0..5 {
                    carries(&pair);
                }
                let sends: Vec<(i32, &[u8])> = (0..8).map(|tag| (tag, pattern(9, 3000 * tag as usize))).collect();
                let receives: Vec<(i32, usize)> = (0..8).map(|tag| (tag, 30_000)).collect();
                for _ in 0..20 {
                    let arrived = pair.exchange(&sends, &receives).expect("a group");
                    assert!(arrived.iter().zip(&sends).all(|(got, (_, sent))| got == sent));
                }
                let warnings: Vec<_> = log.records().into_iter().filter(|record| record.is_warning()).collect();
                assert!(warnings.is_empty(), "{warnings:?}");
                pair.close().expect("close");
            });
            if child::role().is_some() {
                return;
            }
        }
    }
}
