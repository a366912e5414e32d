//! What NCCL's profiler is told of transfers over queue pairs. The rules that hold for every backend are in
//! `net::events`, which the RDMA test machine runs as well.
//!
//! These tests need two RDMA devices, rxe0 on veth0 and rxe1 on veth1, as the test machine has them.

#![cfg(feature = "rdma")]

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::support::child::alone;
use crate::support::pair::Pair;
use crate::support::strict::{Told, Transfer, callback};
use crate::support::told::{NEWEST, finish, moved, pair, receive, send};
use crate::support::{net, pattern, watchdog};
use towline::host::{Init, Memory};
use towline::nccl::net_event::{PLUGIN_ID, PLUGIN_ID_IB, SOMEWHERE};
use towline::trace::event::{Body, Carrier, state};
use towline::trace::perfetto::read::read;

/// `IBV_WR_RDMA_WRITE_WITH_IMM` and `IBV_WC_RECV_RDMA_WITH_IMM`.
const WRITE_WITH_IMMEDIATE: i32 = 1;
const RECEIVED_IMMEDIATE: i32 = 129;

/// A connection between devices that are made of both ports.
fn fused() -> Pair {
    let init = Init { comm_id: 7, profiler: Some(callback), ..Init::default() };
    let context = net(NEWEST).init_with(&init).expect("init");
    let device = context.make_vdevice(&[0, 1]).expect("a device of both ports");
    Pair::connect(&context, device).expect("a connection")
}

/// Device, queue pair, opcode and work request of each piece of a message. Each piece has a work request of its own.
fn verbs(told: &[Told]) -> Vec<(i32, i32, i32, u64)> {
    assert!(told.iter().all(|piece| (piece.id, piece.updates) == (PLUGIN_ID_IB, 0)), "{told:?}");
    let verbs: Vec<_> = told.iter().map(|piece| piece.verbs.expect("a queue pair's descriptor")).collect();
    let requests: HashSet<u64> = verbs.iter().map(|verbs| verbs.3).collect();
    assert!(requests.len() == verbs.len() && !requests.contains(&0), "work requests: {told:?}");
    verbs
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn each_queue_pairs_share_is_told_with_nccls_descriptor() {
    let variables = [("NCCL_IB_QPS_PER_CONNECTION", "2"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")];
    alone("events::each_queue_pairs_share_is_told_with_nccls_descriptor", &variables, || {
        let _watchdog = watchdog(60);
        let pair = fused();
        moved(&pair, pattern(1, 100));
        let mut pairs = HashSet::new();
        for round in 0..6 {
            for (size, shares) in [(0, 1), (1, 1), (8192, 1), (16 << 10, 2), (100_000, 4), (1 << 20, 4)] {
                let (sender, receiver) = moved(&pair, pattern(round, size));
                for (told, opcode) in [(&sender, WRITE_WITH_IMMEDIATE), (&receiver, RECEIVED_IMMEDIATE)] {
                    let verbs = verbs(told);
                    assert_eq!(verbs.len(), shares, "{size} bytes: {told:?}");
                    assert!(verbs.iter().all(|verbs| verbs.2 == opcode), "{told:?}");
                    let distinct: HashSet<_> = verbs.iter().map(|verbs| verbs.1).collect();
                    assert_eq!(distinct.len(), shares, "a queue pair carries one share: {told:?}");
                    let devices: HashSet<_> = verbs.iter().map(|verbs| verbs.0).collect();
                    assert!(devices.is_subset(&HashSet::from([0, 1])), "{told:?}");
                    assert!(shares < 4 || devices.len() == 2, "both cards: {told:?}");
                }
                pairs.extend(verbs(&sender).iter().map(|verbs| verbs.1));
            }
        }
        assert_eq!(pairs.len(), 4, "every queue pair had its turn");
        // A single card: its number is NCCL's.
        let init = Init { comm_id: 8, profiler: Some(callback), ..Init::default() };
        let context = net(NEWEST).init_with(&init).expect("init");
        let second = Pair::between((&context, 0), (&context, 1)).expect("a connection");
        let (sender, receiver) = moved(&second, pattern(1, 100));
        assert_eq!((verbs(&sender)[0].0, verbs(&receiver)[0].0), (0, 1));
    });
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn shares_beyond_eight_are_put_together() {
    let variables = [("NCCL_IB_QPS_PER_CONNECTION", "8"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")];
    alone("events::shares_beyond_eight_are_put_together", &variables, || {
        let _watchdog = watchdog(60);
        let pair = fused();
        moved(&pair, pattern(1, 100));
        for round in 0..4 {
            for shares in [7, 8, 9, 16] {
                let size = shares * 8192;
                let (sender, receiver) = moved(&pair, pattern(round, size));
                for told in [&sender, &receiver] {
                    assert_eq!(verbs(told).len(), shares.min(8), "{told:?}");
                    // Which shares the eighth stands for is the order of their coming; how many bytes is not.
                    let longest = told.iter().map(|piece| piece.length).max();
                    assert_eq!(longest, Some(8192 * (shares.max(8) - 7) as u64), "{told:?}");
                }
            }
        }
    });
}

/// Shares of several writes: the receiver hears their sum.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_share_of_several_writes_is_one_piece() {
    const NAME: &str = "events::a_share_of_several_writes_is_one_piece";
    let variables = [("NCCL_IB_ADAPTIVE_ROUTING", "1"), ("NCCL_IB_AR_THRESHOLD", "1000")];
    alone(NAME, &variables, || {
        let _watchdog = watchdog(60);
        let pair = fused();
        moved(&pair, pattern(1, 100));
        // SoftRoCE takes at most 8 MiB in one write.
        for (size, shares) in [(1000, 1), (1001, 1), (100_000, 2), (17 << 20, 2)] {
            let (sender, receiver) = moved(&pair, pattern(3, size));
            assert_eq!((sender.len(), receiver.len()), (shares, 1), "{size} bytes: {sender:?} {receiver:?}");
            assert_eq!(verbs(&receiver)[0].2, RECEIVED_IMMEDIATE);
        }
    });
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_send_whose_receive_is_known_starts_inside_isend() {
    let _watchdog = watchdog(60);
    let pair = pair();
    moved(&pair, pattern(1, 100));
    for size in [0, 8, 100_000] {
        let (target, out, back) = (Memory::new(size), Transfer::new(), Transfer::new());
        let received = receive(&pair, &[(&target, 0, back)]);
        std::thread::sleep(Duration::from_millis(100));
        let sent = send(&pair, pattern(1, size), 0, out);
        assert_eq!(out.starts(), 1, "started before isend returned");
        // Its end may come as early, when the control thread has polled.
        assert!(out.told()[0].stops <= 1);
        finish(&pair, &received, &[sent], |which| {
            (if which.is_some() { out } else { back }).whole(size);
        });
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn under_towlines_identifier_the_messages_of_both_sides_have_one_number() {
    const NAME: &str = "events::under_towlines_identifier_the_messages_of_both_sides_have_one_number";
    let variables = [("TOWLINE_NET_EVENTS", "towline"), ("NCCL_IB_QPS_PER_CONNECTION", "1")];
    alone(NAME, &variables, || {
        let _watchdog = watchdog(60);
        let pair = fused();
        // More than the ring of lines has places.
        for number in 0..300_u64 {
            let size = [0, 10, 40_000][number as usize % 3];
            let (sender, receiver) = moved(&pair, pattern(number as usize, size));
            let shares = if size > 16_384 { 2 } else { 1 };
            assert_eq!((sender.len(), receiver.len()), (shares, shares));
            for piece in sender.iter().chain(&receiver) {
                let details = &piece.details;
                assert_eq!((piece.id, piece.updates, details.message), (PLUGIN_ID, 1, number));
                assert_eq!(details.link, sender[0].details.link);
                assert!(details.peer().is_some(), "{details:?}");
                let opcode = if details.is_send() { WRITE_WITH_IMMEDIATE } else { RECEIVED_IMMEDIATE };
                assert_eq!(details.opcode, opcode);
            }
            for side in [&sender, &receiver] {
                let requests: HashSet<u64> = side.iter().map(|piece| piece.details.wr_id).collect();
                assert!(requests.len() == shares && !requests.contains(&0), "work requests: {side:?}");
            }
            assert!(sender.iter().all(|piece| piece.details.wire_ns > 0), "{sender:?}");
            let mut offsets: Vec<u64> = sender.iter().map(|piece| piece.details.offset).collect();
            offsets.sort_unstable();
            assert_eq!(offsets, [0, 20_096][..shares], "{sender:?}");
            let known = if shares == 1 { 0 } else { SOMEWHERE };
            assert!(receiver.iter().all(|piece| piece.details.offset == known), "{receiver:?}");
        }
    });
}

/// Both halves of the library over queue pairs: what Towline's own profiler writes, and what `towline trace check`
/// says.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_profiled_all_reduce_accounts_for_every_byte() {
    let _watchdog = watchdog(120);
    let dir = tempfile::tempdir().expect("a directory");
    let towline = |words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_towline"));
        command.args(words).env("TOWLINE_PROFILE", "all").env("TOWLINE_PROFILE_DIR", dir.path());
        command.envs([("NCCL_IB_QPS_PER_CONNECTION", "2"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")]);
        let output = command.output().expect("towline runs");
        assert!(output.status.success(), "towline {words:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    towline(&["all-reduce", "--backend", "rdma", "-b", "8", "-e", "64K", "-f", "90", "-n", "2", "-w", "0"]);
    let files = |ending: &str| -> Vec<String> {
        let all = std::fs::read_dir(dir.path()).expect("the directory").map(|entry| entry.expect("an entry").path());
        all.map(|path| path.display().to_string()).filter(|path| path.ends_with(ending)).collect()
    };
    let traces = files(".pftrace");
    assert_eq!((traces.len(), files(".summary.txt").len(), files(".prom").len()), (2, 2, 2));
    for trace in &traces {
        let contents = read(&std::fs::read(trace).expect("a trace"));
        let process = &contents.processes[0];
        assert_eq!((contents.cut, process.dropped), (0, 0));
        // What NCCL says of each step, and the bytes and number of the network events below it.
        let mut steps = HashMap::<u64, (Option<u64>, u64, usize)>::new();
        let (mut sent, mut several) = ([false; 2], false);
        for record in &process.records {
            match record.body {
                Body::ProxyStep { .. } => drop(steps.insert(record.id, (None, 0, 0))),
                Body::State { state: state::STEP_SEND_WAIT | state::STEP_RECV_FLUSH_WAIT, arg, .. } => {
                    steps.get_mut(&record.id).expect("a step").0 = Some(arg);
                }
                Body::NetTowline(part) => {
                    let Carrier::QueuePair { number, opcode, wr_id, .. } = part.carrier else { panic!("{part:?}") };
                    let right = if part.send { WRITE_WITH_IMMEDIATE } else { RECEIVED_IMMEDIATE };
                    assert!(number > 0 && wr_id != 0 && i32::from(opcode) == right && !part.resend, "{part:?}");
                    let (_, bytes, events) = steps.get_mut(&record.parent).expect("under a step");
                    (*bytes, *events) = (*bytes + part.length, *events + 1);
                    several |= *events > 1;
                    sent[usize::from(part.send)] = true;
                }
                _ => {}
            }
        }
        assert!(!steps.is_empty() && several && sent == [true; 2], "{} steps, {several}, {sent:?}", steps.len());
        for (id, (size, bytes, events)) in steps {
            assert!(size == Some(bytes) && events > 0, "step {id} of {size:?}: {bytes} bytes in {events} events");
        }
    }
    let mut check = vec!["trace", "check"];
    check.extend(traces.iter().map(String::as_str));
    let said = towline(&check);
    assert!(said.ends_with("every byte is accounted for\n"), "{said}");
    let metrics = std::fs::read_to_string(&files(".prom")[0]).expect("metrics");
    assert!(metrics.contains("towline_wire_bytes_total{"), "{metrics}");
}
