//! Transfers over real verbs: what is RDMA's own. What every backend must do is in the tests of `net`, which the RDMA
//! test machine runs as well (`tests/rdma_vm/suite.sh`).
//!
//! These tests need two RDMA devices, rxe0 on veth0 and rxe1 on veth1, as the test machine has them.

#![cfg(feature = "rdma")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::child;
use crate::support::machine::machine;
use crate::support::one_sided::{COMM, ON, rma};
use crate::support::pair::Pair;
use crate::support::{PATIENCE, context, eventually, outcome, part, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Memory, Part};

/// Sets a link of the machine up or down. The kernel forgets neighbours with the link.
fn set_link(name: &str, up: bool) {
    machine(&format!("ip link set {name} {}", if up { "up" } else { "down" }));
    if up {
        machine(
            "ip neigh replace 10.7.0.2 lladdr $(cat /sys/class/net/veth1/address) dev veth0 nud permanent; \
             ip neigh replace 10.7.0.1 lladdr $(cat /sys/class/net/veth0/address) dev veth1 nud permanent",
        );
    }
}

/// Brings the links back when a test ends, however it ends.
struct Links;

impl Drop for Links {
    fn drop(&mut self) {
        set_link("veth0", true);
        set_link("veth1", true);
    }
}

/// A connection from the first device to the second.
fn across(context: &Context) -> Pair {
    Pair::between((context, 0), (context, 1)).expect("a connection")
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn ports_are_devices_whose_registrations_hold_for_all_connections() {
    let context = context(ApiVersion::V12);
    assert_eq!(context.devices().expect("devices"), 2);
    for (number, name) in [(0, "rxe0"), (1, "rxe1")] {
        let properties = context.properties(number).expect("properties");
        assert_eq!(properties.name, name);
        assert!(properties.reg_is_global && properties.speed_mbps > 0, "{properties:?}");
        assert_eq!(properties.ptr_support, towline::host::PTR_HOST, "no GPU memory here");
    }
    let (one, other) = (across(&context), across(&context));
    let (source, target) = (Memory::of(pattern(1, 5000)), Memory::new(5000));
    // Registered with one connection, used on another.
    let (from, to) = (one.send.register(&source).expect("regMr"), one.recv.register(&target).expect("regMr"));
    // SAFETY: the memory lives until the requests ended.
    let posted = unsafe { other.recv.post(&[Part::all(&target, Some(&to))]) }.expect("irecv");
    // SAFETY: as above.
    let sent = unsafe { other.send.post(Part::all(&source, Some(&from))) }.expect("isend");
    other.finish(posted, &[sent]).expect("a transfer");
    assert!(target.bytes() == pattern(1, 5000));
}

/// NCCL rounds registrations to pages, so two of one connection may overlap. The end of one ended the connection with
/// the other in use.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_registration_that_ends_leaves_requests_with_an_overlapping_one_alone() {
    let _watchdog = watchdog(60);
    let context = context(ApiVersion::V12);
    let pair = Pair::connect(&context, 0).expect("a connection");
    let (source, target) = (Memory::of(pattern(1, 100_000)), Memory::new(100_000));
    let (from, gone) = (pair.send.register(&source).expect("regMr"), pair.send.register(&source).expect("regMr"));
    let (to, lost) = (pair.recv.register(&target).expect("regMr"), pair.recv.register(&target).expect("regMr"));
    // SAFETY: the memory lives until the requests ended.
    let sent = unsafe { pair.send.post(Part::all(&source, Some(&from))) }.expect("isend");
    drop(gone);
    // SAFETY: as above.
    let posted = unsafe { pair.recv.post(&[Part::all(&target, Some(&to))]) }.expect("irecv");
    drop(lost);
    pair.finish(posted, &[sent]).expect("a transfer");
    assert!(target.bytes() == pattern(1, 100_000));
}

/// Every way in which ports and queue pairs share a message: fused ports on both sides, on one, on none.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn fused_ports_and_every_number_of_queue_pairs_share_messages() {
    const NAME: &str = "net::fused_ports_and_every_number_of_queue_pairs_share_messages";
    for pairs in ["1", "2", "4", "8"] {
        for split in ["0", "1"] {
            let variables = [("NCCL_IB_QPS_PER_CONNECTION", pairs), ("NCCL_IB_SPLIT_DATA_ON_QPS", split)];
            child::alone(NAME, &variables, || {
                let _watchdog = watchdog(120);
                let context = context(ApiVersion::V12);
                let fused = context.make_vdevice(&[0, 1]).expect("a device of both ports");
                assert_eq!(context.properties(fused).expect("properties").name, "rxe0+rxe1");
                for (from, to) in [(fused, fused), (fused, 1), (0, fused), (0, 1)] {
                    let pair = Pair::between((&context, from), (&context, to)).expect("a connection");
                    for size in [0, 1, 127, 129, 8191, 16_385, 100_000, (1 << 20) + 77] {
                        let arrived = pair.transfer(pattern(size, size)).expect("a transfer");
                        assert!(arrived == pattern(size, size), "{from} to {to}, {size} bytes");
                    }
                    let sends: Vec<(i32, &[u8])> = (0..8).map(|tag| (tag, pattern(9, 20_000 * tag as usize))).collect();
                    // Posted the other way round than sent.
                    let receives: Vec<(i32, usize)> = (0..8).rev().map(|tag| (tag, 150_000)).collect();
                    let arrived = pair.exchange(&sends, &receives).expect("a group");
                    assert!(arrived.iter().rev().zip(&sends).all(|(got, (_, sent))| got == sent), "{from} to {to}");
                    pair.close().expect("close");
                }
            });
            if child::role().is_some() {
                return;
            }
        }
    }
}

/// A device of several ports is refused without a warning, and each port carries data by itself: so NCCL goes on.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn ports_stay_apart_when_they_are_not_to_be_merged() {
    const NAME: &str = "net::ports_stay_apart_when_they_are_not_to_be_merged";
    let variables = [("NCCL_IB_MERGE_NICS", "0"), ("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "NET")];
    child::alone(NAME, &variables, || {
        let _watchdog = watchdog(60);
        let log = Capture::start();
        let context = context(ApiVersion::V12);
        assert_eq!(context.make_vdevice(&[0, 1]).err(), Some(Code::InvalidUsage));
        assert!(log.contains("NCCL_IB_MERGE_NICS=0"), "{:?}", log.records());
        assert!(log.records().iter().all(|record| !record.is_warning()), "{:?}", log.records());
        assert_eq!(context.devices().expect("devices"), 2);
        for (from, to) in [(0, 1), (1, 0)] {
            // What NCCL makes of each port that it does not merge.
            let single = context.make_vdevice(&[from]).expect("a device of one port");
            let pair = Pair::between((&context, single), (&context, to)).expect("a connection");
            assert!(pair.transfer(pattern(1, 100_000)).expect("a transfer") == pattern(1, 100_000));
        }
    });
}

/// SoftRoCE takes at most 8 MiB in one write: above, a share is several writes, and the size is told.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_message_beyond_the_devices_largest_write_arrives_with_its_size() {
    let _watchdog = watchdog(120);
    let pair = across(&context(ApiVersion::V12));
    for (size, room) in [((8 << 20) - 1, 9 << 20), (8 << 20, 8 << 20), ((8 << 20) + 1, 16 << 20), (17 << 20, 17 << 20)]
    {
        let arrived = pair.transfer_into(pattern(3, size), room).expect("a transfer");
        assert!(arrived == pattern(3, size), "{size} bytes");
    }
}

/// With adaptive routing the end of a message is a write of its own.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn adaptive_routing_sends_the_end_apart() {
    const NAME: &str = "net::adaptive_routing_sends_the_end_apart";
    let variables = [("NCCL_IB_ADAPTIVE_ROUTING", "1"), ("NCCL_IB_AR_THRESHOLD", "1000")];
    child::alone(NAME, &variables, || {
        let _watchdog = watchdog(60);
        let pair = across(&context(ApiVersion::V12));
        for round in 0..300 {
            let size = [10, 1000, 1001, 70_000][round % 4];
            assert!(pair.transfer_into(pattern(round, size), 100_000).expect("a transfer") == pattern(round, size));
        }
    });
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_message_longer_than_its_receive_fails_both_sides_with_both_sizes() {
    // Short ones are done before their receive is known: the sender hears of it later. A long one waits for a receive
    // that is not announced.
    for (size, capacity) in [(101, 100), (5000, 100), (5000, 4000)] {
        let _watchdog = watchdog(60);
        let log = Capture::start();
        let pair = across(&context(ApiVersion::V12));
        let target = Memory::new(capacity);
        // SAFETY: the memory lives until the connection is closed.
        let posted = unsafe { pair.recv.post(&[Part::all(&target, None).tagged(3)]) }.expect("irecv");
        // SAFETY: the pattern is static.
        let send = || unsafe { pair.send.isend(part(pattern(1, size), None).tagged(3)) };
        let first = send().and_then(|request| match request {
            Some(request) => outcome(|r| pair.send.test(r), request, PATIENCE).expect("no hang").map(drop),
            None => Ok(()),
        });
        assert!(first.is_err() || size <= 1024, "a send of {size} bytes was done");
        let received = outcome(|r| pair.recv.test(r), posted, PATIENCE).expect("no hang");
        assert_eq!(received.err(), Some(Code::InvalidUsage));
        let told = eventually("the sender gets the error", PATIENCE, || {
            // A failed connection accepts sends; `test` reports the failure.
            let next = || outcome(|r| pair.send.test(r), send().ok()??, PATIENCE).expect("no hang").err();
            first.err().or_else(next)
        });
        assert_eq!(told, Code::InvalidUsage);
        let what = format!("a message of {size} bytes with tag 3 met a receive of {capacity} bytes");
        assert!(log.contains(&what), "{:?}", log.records());
        assert!(target.bytes().iter().all(|byte| *byte == target.bytes()[0]), "nothing was written");
    }
}

/// Short messages of one tag, more than there is room for, and nobody wants them yet. One of another tag gets through
/// all the same, and then they do.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn short_messages_that_nobody_wants_yet_hold_up_nothing_else() {
    let _watchdog = watchdog(60);
    let pair = across(&context(ApiVersion::V12));
    let size = |number: usize| number * 37 % 1025;
    let mut total = 0;
    let early = RefCell::new(Vec::new());
    let retire = || early.borrow_mut().retain(|request| pair.send.test(request).expect("no failure").is_none());
    // They are done, until there is no room.
    while early.borrow().len() < 20 {
        // SAFETY: the pattern is static.
        let sent = unsafe { pair.send.post(part(pattern(total, size(total)), None).tagged(1)) }.expect("isend");
        early.borrow_mut().push(sent);
        total += 1;
        retire();
    }
    for other in [10, 100_000] {
        let target = Memory::new(other);
        // SAFETY: the memory lives until the request ended.
        let posted = unsafe { pair.recv.post(&[Part::all(&target, None).tagged(2)]) }.expect("irecv");
        // SAFETY: the pattern is static.
        let sent = unsafe { pair.send.post(part(pattern(500, other), None).tagged(2)) }.expect("isend");
        pair.finish(posted, &[sent]).expect("the other tag gets through");
        assert!(target.bytes() == pattern(500, other));
    }
    for number in 0..total {
        let target = Memory::new(2000);
        // SAFETY: the memory lives until the request ended.
        let posted = unsafe { pair.recv.post(&[Part::all(&target, None).tagged(1)]) }.expect("irecv");
        let test = |request: &_| {
            retire();
            pair.recv.test(request)
        };
        let sizes = outcome(test, posted, PATIENCE).expect("no hang").expect("a message");
        assert_eq!(sizes[0] as usize, size(number), "message {number}");
        assert!(target.bytes()[..size(number)] == *pattern(number, size(number)), "message {number}");
    }
    eventually("the last sends end", PATIENCE, || {
        retire();
        early.borrow().is_empty().then_some(())
    });
}

/// Short and long messages in any order meet receives for short and for long ones, posted before and after.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn short_and_long_messages_keep_their_order() {
    let _watchdog = watchdog(60);
    let pair = across(&context(ApiVersion::V12));
    let memory: Vec<Memory> = (0..8).map(|_| Memory::new(4000)).collect();
    // Whether message n is short, its receive has room for long ones, and it is posted late: all combinations,
    // shuffled.
    let mix = |number: usize| (number.wrapping_mul(0x9e37_79b9) >> 7) % 8;
    let size = |number: usize| if mix(number) & 1 == 0 { number % 1025 } else { 1025 + number % 2900 };
    let room = |number: usize| if mix(number) & 2 == 0 { size(number).max(1) } else { 4000 };
    let (mut sent, mut posted) = (VecDeque::new(), VecDeque::new());
    let (mut next_send, mut next_post, mut done) = (0, 0, 0);
    while done < 2000 {
        let late = mix(next_post.max(next_send)) & 4 != 0;
        if next_send < 2000 && next_send < done + 8 && (late || next_send < next_post) {
            // SAFETY: the pattern is static.
            let request = unsafe { pair.send.isend(part(pattern(next_send, size(next_send)), None)) }.expect("isend");
            if let Some(request) = request {
                sent.push_back(request);
                next_send += 1;
            }
        }
        if next_post < 2000 && next_post < done + 8 && (!late || next_post < next_send) {
            let to = Part::new(memory[next_post % 8].at(0), room(next_post), None);
            // SAFETY: the memory outlives the connection.
            if let Some(request) = unsafe { pair.recv.irecv(&[to]) }.expect("irecv") {
                posted.push_back(request);
                next_post += 1;
            }
        }
        sent.retain(|request| pair.send.test(request).expect("no failure").is_none());
        while let Some(sizes) = posted.front().and_then(|request| pair.recv.test(request).expect("no failure")) {
            posted.pop_front();
            assert_eq!(sizes[0] as usize, size(done), "message {done}");
            assert!(memory[done % 8].bytes()[..size(done)] == *pattern(done, size(done)), "message {done}");
            done += 1;
        }
    }
}

/// A buffer outside its registration is refused before anything is sent, and the connection goes on.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_buffer_outside_its_registration_is_refused() {
    let _watchdog = watchdog(60);
    let pair = across(&context(ApiVersion::V12));
    let memory = Memory::of(pattern(2, 8192));
    let half = pair.send.reg_mr(memory.at(0), 4096, towline::host::PTR_HOST).expect("regMr");
    for (offset, size) in [(0, 4097), (4000, 97), (4096, 1)] {
        let beyond = Part::new(memory.at(offset), size, Some(&half));
        // SAFETY: it is refused.
        let refused = unsafe { pair.send.isend(beyond) };
        assert_eq!(refused.err(), Some(Code::InvalidArgument), "{size} bytes at {offset}");
    }
    assert_eq!(pair.transfer(b"and the rest works").expect("a transfer"), b"and the rest works");
}

/// The link goes down in the middle of traffic and comes back before the queue pairs give up: nothing is lost.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_link_that_comes_back_loses_nothing() {
    const NAME: &str = "net::a_link_that_comes_back_loses_nothing";
    // 0.27 s between two of 7 attempts.
    child::alone(NAME, &[("NCCL_IB_TIMEOUT", "16")], || {
        let _watchdog = watchdog(120);
        let _links = Links;
        let log = Capture::start();
        let pair = across(&context(ApiVersion::V12));
        for round in 0..3 {
            assert!(pair.transfer(pattern(round, 100_000)).expect("a transfer") == pattern(round, 100_000));
            std::thread::scope(|scope| {
                let flapping = scope.spawn(|| {
                    set_link("veth1", false);
                    std::thread::sleep(Duration::from_millis(300));
                    set_link("veth1", true);
                });
                // One of these begins before the link goes down, or while it is, and ends when it is back.
                let mut longest = Duration::ZERO;
                loop {
                    let (is_last, start) = (flapping.is_finished(), Instant::now());
                    assert!(pair.transfer(pattern(round, 1 << 20)).expect("a transfer") == pattern(round, 1 << 20));
                    longest = longest.max(start.elapsed());
                    if is_last {
                        break;
                    }
                }
                assert!(longest >= Duration::from_millis(250), "no transfer met the outage: {longest:?}");
            });
        }
        eventually("a word about the port", PATIENCE, || log.contains("of rxe1 went down").then_some(()));
    });
}

/// The link stays down: the transfer fails when the queue pair has given up, and says what it knows.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_link_that_stays_down_fails_the_transfer_with_both_ends_named() {
    const NAME: &str = "net::a_link_that_stays_down_fails_the_transfer_with_both_ends_named";
    // Nor does it come back in the time that a connection without a queue pair waits.
    let impatient = [("NCCL_IB_TIMEOUT", "12"), ("NCCL_IB_RETRY_CNT", "2"), ("TOWLINE_RECONNECT_TIMEOUT", "3")];
    child::alone(NAME, &impatient, || {
        let _watchdog = watchdog(60);
        let _links = Links;
        let log = Capture::start();
        let pair = across(&context(ApiVersion::V12));
        assert_eq!(pair.transfer(b"works").expect("a transfer"), b"works");
        let target = Memory::new(50_000);
        // SAFETY: the memory lives until the connection is closed.
        let posted = unsafe { pair.recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        std::thread::sleep(Duration::from_millis(50));
        set_link("veth0", false);
        eventually("a word about the port", PATIENCE, || log.contains("of rxe0 went down").then_some(()));
        // SAFETY: the pattern is static.
        let sent = unsafe { pair.send.post(part(pattern(1, 50_000), None)) }.expect("isend");
        let sent = outcome(|r| pair.send.test(r), sent, PATIENCE).expect("no hang");
        let received = outcome(|r| pair.recv.test(r), posted, PATIENCE).expect("no hang");
        set_link("veth0", true);
        // SoftRoCE reports at once that it cannot send; other devices find out when there is no answer.
        assert!(matches!(sent.err(), Some(Code::SystemError | Code::RemoteError)));
        assert_eq!(received.err(), Some(Code::RemoteError));
        for words in ["vendor code", "on rxe0, queue pair", "GID 10.7.0.1", "GID 10.7.0.2", "this side's port is down"]
        {
            assert!(log.contains(words), "{words}: {:?}", log.records());
        }
        // The peer: host and process, which are this one, and the address of its socket.
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
        let peer = format!("{}:{}", host.trim(), std::process::id());
        let is_told = |text: &str| text.contains("vendor code") && text.contains(&format!("sending to {peer}"));
        assert!(log.records().iter().any(|record| is_told(&record.text)), "{peer}: {:?}", log.records());
    });
}

/// A host over TCP and one over RDMA: both hear what is wrong instead of waiting for each other.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_peer_over_the_other_backend_is_an_error_at_once() {
    const NAME: &str = "net::a_peer_over_the_other_backend_is_an_error_at_once";
    match child::role().as_deref() {
        Some("listening") => {
            let context = context(ApiVersion::V12);
            let (_listener, handle) = context.listen(0).expect("listen");
            child::send(&child::mailbox(), "handle", handle.bytes());
            std::thread::sleep(PATIENCE);
        }
        Some("connecting") => {
            let _watchdog = watchdog(60);
            let log = Capture::start();
            let mut handle = towline::host::Handle::from_bytes(&child::receive(&child::mailbox(), "handle"));
            let refused = context(ApiVersion::V12).connect(0, &mut handle);
            assert_eq!(refused.err(), Some(Code::InvalidUsage));
            let words = if crate::support::is_over_rdma() {
                "over TCP, and this side's device is RDMA's"
            } else {
                "over RDMA, and this side's device is TCP's"
            };
            assert!(log.contains(&format!("the peer listens {words}")), "{:?}", log.records());
        }
        _ => {
            for backends in [["tcp", "rdma"], ["rdma", "tcp"]] {
                let mailbox = child::Mailbox::new();
                let [listening, mut connecting] =
                    [("listening", backends[0]), ("connecting", backends[1])].map(|(role, backend)| {
                        let mut command = child::command(NAME, role);
                        command.env("TOWLINE_BACKEND", backend).env(child::MAILBOX, mailbox.path());
                        command
                    });
                let _listening = child::Guarded::start(listening);
                child::run(&mut connecting, NAME);
            }
        }
    }
}

/// There NCCL's own proxy serves. Over TCP the same process offers them.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn one_sided_operations_are_declined_where_the_devices_are_rdmas() {
    const NAME: &str = "net::one_sided_operations_are_declined_where_the_devices_are_rdmas";
    for backend in ["rdma", "tcp"] {
        child::alone(NAME, &[ON, ("TOWLINE_BACKEND", backend), ("NCCL_DEBUG", "INFO")], || {
            let log = Capture::start();
            let _net = context(ApiVersion::V12);
            let begun = rma(16).init(COMM);
            if crate::support::is_over_rdma() {
                assert_eq!(begun.err(), Some(Code::InvalidUsage));
                assert!(log.contains("they go over TCP only, and the devices are RDMA's"), "{:?}", log.records());
            } else {
                assert!(begun.is_ok(), "{:?}", log.records());
            }
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// What `towline doctor` says with these variables.
fn doctor(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    let output = command.arg("doctor").args(arguments).envs(variables.iter().copied()).output().expect("doctor starts");
    String::from_utf8(output.stdout).expect("text")
}

/// The same as data.
fn facts(variables: &[(&str, &str)]) -> serde_json::Value {
    serde_json::from_str(&doctor(&["--json"], variables)).expect("JSON")
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn doctor_says_what_would_be_used_and_why() {
    let json = facts(&[]);
    let rdma = &json["rdma"];
    assert_eq!((&rdma["ruled_out"], rdma["others"].as_array().map(Vec::len)), (&serde_json::Value::Null, Some(0)));
    let chosen = rdma["chosen"].as_array().expect("ports");
    let names: Vec<_> = chosen.iter().map(|port| port["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["rxe0", "rxe1"]);
    for (port, address) in chosen.iter().zip(["10.7.0.1", "10.7.0.2"]) {
        assert_eq!((port["gid"].as_str(), port["takes_dmabuf"].as_bool()), (Some(address), Some(false)), "{port}");
        // Its place is that of the same GID in the table, with its type; the reason is told.
        let row = serde_json::json!([port["gid_index"], address, "RoCE v2"]);
        assert!(port["gids"].as_array().expect("a table").contains(&row), "{row}: {port}");
        assert!(!port["gid_why"].as_str().expect("a reason").is_empty());
    }
    let text = doctor(&[], &[]);
    assert!(text.contains("  would use rxe0 at "), "{text}");

    for (variable, why) in
        [(("TOWLINE_BACKEND", "tcp"), "TOWLINE_BACKEND=tcp"), (("NCCL_IB_DISABLE", "1"), "NCCL_IB_DISABLE=1")]
    {
        assert_eq!(facts(&[variable])["rdma"]["ruled_out"], why);
    }
    let json = facts(&[("NCCL_IB_HCA", "rxe1")]);
    assert_eq!(
        (&json["rdma"]["chosen"][0]["name"], &json["rdma"]["others"][0]["name"]),
        (&"rxe1".into(), &"rxe0:1".into())
    );
    assert!(json["rdma"]["others"][0]["gids"].as_array().is_some_and(|gids| !gids.is_empty()), "{json}");
    let text = doctor(&[], &[("NCCL_IB_HCA", "rxe1"), ("NCCL_IB_DISABLE", "1")]);
    let lines =
        ["RDMA would not be used: NCCL_IB_DISABLE=1", "without that would use rxe1 at ", "would not use rxe0:1"];
    assert!(lines.iter().all(|line| text.contains(line)) && !text.contains("  would use rxe"), "{text}");
}

/// With `NCCL_IB_DISABLE=1` devices are interfaces.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn disabled_rdma_leaves_interfaces() {
    child::alone("net::disabled_rdma_leaves_interfaces", &[("NCCL_IB_DISABLE", "1")], || {
        let context = context(ApiVersion::V12);
        let name = context.properties(0).expect("properties").name;
        assert!(name.starts_with("veth"), "{name}");
    });
}

/// A port that is down is not chosen, and doctor says so.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_link_that_is_down_is_in_doctors_report() {
    let _links = Links;
    set_link("veth0", false);
    let json = facts(&[]);
    let names = |list: &str| -> Vec<String> {
        let all = json["rdma"][list].as_array().expect("a list");
        all.iter().map(|port| port["name"].as_str().expect("a name").to_owned()).collect()
    };
    assert!(!names("chosen").contains(&"rxe0".to_owned()) && names("others").contains(&"rxe0:1".to_owned()), "{json}");
    let findings = json["findings"].as_array().expect("findings");
    assert!(findings.iter().any(|finding| finding["what"] == "port 1 of rxe0 is DOWN"), "{findings:?}");
}

/// Packets that came with the lowest bits of their traffic class 10, as the kernel counts them.
fn marked_packets() -> u64 {
    let text = std::fs::read_to_string("/proc/net/netstat").expect("counters");
    let mut lines = text.lines().filter(|line| line.starts_with("IpExt:")).map(str::split_whitespace);
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let found = names.zip(values).find(|(name, _)| *name == "InECT0Pkts").expect("a counter");
    found.1.parse().expect("a number")
}

/// The traffic class is in the packets. The other variables, all at once: SoftRoCE shows nothing of them, but nothing
/// may break either.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn the_traffic_class_travels_and_no_variable_stands_in_the_way() {
    const NAME: &str = "net::the_traffic_class_travels_and_no_variable_stands_in_the_way";
    let class: &[_] = &[("NCCL_IB_ADDR_RANGE", "10.7.0.0/24"), ("NCCL_IB_TC", "2")];
    let rest: &[_] = &[
        ("NCCL_IB_SL", "3"),
        ("NCCL_IB_FIFO_TC", "0"),
        ("NCCL_IB_PKEY", "0"),
        ("NCCL_IB_PCI_RELAXED_ORDERING", "1"),
        ("NCCL_IB_ECE_ENABLE", "0"),
        ("NCCL_IB_MERGE_VFS", "0"),
        ("NCCL_IB_RETURN_ASYNC_EVENTS", "0"),
        ("NCCL_IB_ROCE_VERSION_NUM", "2"),
        ("NCCL_IB_HCA", "^=mlx5_0"),
    ];
    for variables in [class, rest] {
        child::alone(NAME, variables, || {
            let _watchdog = watchdog(60);
            let pair = across(&context(ApiVersion::V12));
            let before = marked_packets();
            for round in 0..40 {
                let size = [10, 1024, 3000, 40_000][round % 4];
                assert!(pair.transfer(pattern(round, size)).expect("a transfer") == pattern(round, size));
            }
            let marked = marked_packets() - before;
            // 40,000 bytes are 40 packets.
            assert_eq!(marked > 400, std::env::var("NCCL_IB_TC").is_ok(), "{marked} packets");
        });
        if child::role().is_some() {
            return;
        }
    }
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_message_of_more_than_64_mib_arrives() {
    let _watchdog = watchdog(120);
    let pair = across(&context(ApiVersion::V12));
    // Each 16 MiB differ from the others.
    let message = [1, 2, 3, 4].map(|seed| pattern(seed, 16 << 20)).concat();
    let message = [&message, pattern(5, 4097)].concat();
    assert!(pair.transfer(&message).expect("a transfer") == message);
}

/// In full with 64-bit sizes and more than one `int` of them in bits; the memory of both ends is 2.2 GiB.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_message_of_more_than_1_gib_arrives() {
    const SIZE: usize = (1 << 30) + (64 << 20) + 4097;
    const BLOCK: usize = 16 << 20;
    let _watchdog = watchdog(600);
    let pair = across(&context(ApiVersion::V12));
    let (source, target) = (Memory::new(SIZE), Memory::new(SIZE));
    // Each 16 MiB differ from the others.
    let block = |at: usize| pattern(at / BLOCK, BLOCK.min(SIZE - at));
    for at in (0..SIZE).step_by(BLOCK) {
        // SAFETY: within the source, which is not read yet.
        unsafe { std::ptr::copy_nonoverlapping(block(at).as_ptr(), source.at(at).cast(), block(at).len()) };
    }
    let start = Instant::now();
    // SAFETY: the memory outlives the requests.
    let posted = unsafe { pair.recv.post(&[Part::all(&target, None)]) }.expect("irecv");
    // SAFETY: as above.
    let sent = unsafe { pair.send.post(Part::all(&source, None)) }.expect("isend");
    let patience = Duration::from_secs(500);
    let test = |request: &_| {
        std::thread::sleep(Duration::from_millis(1));
        pair.recv.test(request)
    };
    let sizes = outcome(test, posted, patience).expect("no hang").expect("a message");
    eprintln!("{SIZE} bytes in {:?}", start.elapsed());
    assert_eq!(sizes[0] as usize, SIZE);
    outcome(|request| pair.send.test(request), sent, PATIENCE).expect("no hang").expect("a send");
    for at in (0..SIZE).step_by(BLOCK) {
        assert!(target.bytes()[at..][..block(at).len()] == *block(at), "at {at}");
    }
}

/// An address that connections use is taken away and comes back; one that they do not use comes and goes.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn an_address_that_is_taken_away_is_told_when_connections_use_it() {
    const NAME: &str = "net::an_address_that_is_taken_away_is_told_when_connections_use_it";
    let _back = Links;
    let _address = crate::support::at_end(|| {
        if child::role().is_none() {
            machine("ip addr replace 10.7.0.1/24 dev veth0");
        }
    });
    child::alone(NAME, &[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "NET")], || {
        let _watchdog = watchdog(60);
        let log = Capture::start();
        let context = context(ApiVersion::V12);
        let pair = across(&context);
        let warnings = || log.records().iter().filter(|record| record.is_warning()).count();
        let told = |words: &str| {
            eventually(words, PATIENCE, || log.contains(words).then_some(()));
        };
        machine("ip addr add 10.99.0.1/24 dev veth0");
        told("rxe0 reports GID table change of port 1");
        machine("ip addr del 10.99.0.1/24 dev veth0");
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(warnings(), 0, "that address is of no interest: {:?}", log.records());

        machine("ip addr del 10.7.0.1/24 dev veth0");
        told("has lost GID 10.7.0.1, with which its connections were set up");
        machine("ip addr add 10.7.0.1/24 dev veth0");
        told("has GID 10.7.0.1 again");
        set_link("veth0", true);
        assert_eq!(warnings(), 1, "{:?}", log.records());
        // The kernel keeps the old place in the table for those who had it, and the address has got another one.
        for pair in [pair, across(&context)] {
            assert!(pair.transfer(pattern(1, 100_000)).expect("a transfer") == pattern(1, 100_000));
        }
    });
}

/// More devices than the machine starts with, as long as this lives.
struct MoreDevices;

impl MoreDevices {
    fn up_to(devices: usize) -> Self {
        let made = Self;
        for number in 2..devices {
            machine(&format!(
                "ip link add more{number} type dummy && ip addr add 10.8.{number}.1/24 dev more{number} && \
                 ip link set more{number} up && rdma link add rxe{number} type rxe netdev more{number}"
            ));
        }
        made
    }
}

impl Drop for MoreDevices {
    fn drop(&mut self) {
        machine("for link in /sys/class/net/more*; do ip link del ${link##*/}; done");
    }
}

/// As many as a device of NCCL's may have; each carries its share, here to itself.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn eight_fused_ports_share_messages() {
    let _more = (child::role().is_none()).then(|| MoreDevices::up_to(9));
    child::alone("net::eight_fused_ports_share_messages", &[], || {
        let _watchdog = watchdog(60);
        let context = context(ApiVersion::V12);
        assert_eq!(context.devices().expect("devices"), 9);
        assert!(context.make_vdevice(&[0, 1, 2, 3, 4, 5, 6, 7, 8]).is_err(), "one too many");
        let fused = context.make_vdevice(&[0, 1, 2, 3, 4, 5, 6, 7]).expect("a device of eight ports");
        let pair = Pair::between((&context, fused), (&context, fused)).expect("a connection");
        for size in [0, 1, 1024, 65_536, 100_001, (1 << 20) + 77] {
            assert!(pair.transfer(pattern(size, size)).expect("a transfer") == pattern(size, size), "{size} bytes");
        }
        pair.close().expect("close");
    });
}

/// What the kernel holds of RDMA: the number of each kind of object.
fn resources() -> String {
    machine("rdma resource show")
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn many_connections_leave_nothing_in_the_kernel() {
    const NAME: &str = "net::many_connections_leave_nothing_in_the_kernel";
    child::alone(NAME, &[], || {
        let cycles = std::env::var("RDMA_CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
        let _watchdog = watchdog(60 + cycles);
        let context = context(ApiVersion::V12);
        // Once per process: protection domains, and the control thread's descriptors.
        across(&context).close().expect("close");
        let settled = || {
            let before = resources();
            std::thread::sleep(Duration::from_millis(300));
            (before == resources()).then_some(before)
        };
        let before = eventually("the kernel's count settles", PATIENCE, settled);
        let start = Instant::now();
        for cycle in 0..cycles as usize {
            let pair = across(&context);
            let size = [0, 100, 20_000][cycle % 3];
            assert!(pair.transfer(pattern(cycle, size)).expect("a transfer") == pattern(cycle, size));
            pair.close().expect("close");
        }
        let each = start.elapsed() / u32::try_from(cycles).expect("few");
        let end = Instant::now() + PATIENCE;
        while resources() != before {
            assert!(Instant::now() < end, "before: {before}\nafter: {}", resources());
            std::thread::sleep(Duration::from_millis(50));
        }
        eprintln!("{cycles} cycles, {each:?} each; {before}");
    });
}
