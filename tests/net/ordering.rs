//! Sends and receives match by order and tag, whichever comes first and in whatever order they are tested.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::pair::Pair;
use crate::support::{PATIENCE, among, context, eventually, pair, part, pattern, versions, watchdog};
use proptest::prelude::*;
use towline::host::{ApiVersion, Memory, Part, RecvComm, Request, SendComm};

/// Posts a receive for one buffer.
fn receive(recv: &RecvComm, target: &Memory, tag: i32) -> Request {
    // SAFETY: every caller keeps the memory until the request ended or the connection is closed.
    unsafe { recv.post(&[Part::all(target, None).tagged(tag)]) }.expect("irecv")
}

/// Posts a send of static bytes.
fn send(comm: &SendComm, bytes: &'static [u8], tag: i32) -> Request {
    // SAFETY: the bytes are static.
    unsafe { comm.post(part(bytes, None).tagged(tag)) }.expect("isend")
}

#[test]
fn a_receive_may_be_posted_long_before_its_send() {
    let _watchdog = watchdog(60);
    for version in among([ApiVersion::V4, ApiVersion::V8, ApiVersion::V12]) {
        let pair = pair(version);
        for size in [0, 100, 70_000, 3 << 20] {
            let target = Memory::new(size);
            let posted = receive(&pair.recv, &target, 0);
            std::thread::sleep(Duration::from_millis(150));
            assert!(pair.recv.test(&posted).expect("a test").is_none());
            let sent = send(&pair.send, pattern(size, size), 0);
            pair.finish(posted, &[sent]).expect("a transfer");
            assert!(target.bytes() == pattern(size, size), "{version}, {size}");
        }
    }
}

#[test]
fn a_send_may_be_posted_long_before_its_receive() {
    let _watchdog = watchdog(60);
    for version in among([ApiVersion::V4, ApiVersion::V8, ApiVersion::V12]) {
        let pair = pair(version);
        for size in [0, 100, 70_000, 3 << 20] {
            let sent = send(&pair.send, pattern(size, size), 0);
            std::thread::sleep(Duration::from_millis(150));
            let sent = [sent].into_iter().filter(|sent| pair.send.test(sent).expect("a test").is_none());
            let sent: Vec<Request> = sent.collect();
            let target = Memory::new(size);
            let posted = receive(&pair.recv, &target, 0);
            pair.finish(posted, &sent).expect("a transfer");
            assert!(target.bytes() == pattern(size, size), "{version}, {size}");
        }
    }
}

#[test]
fn an_early_send_neither_blocks_nor_misfills_another_tag() {
    let _watchdog = watchdog(60);
    let pair = pair(ApiVersion::V8);
    // More early messages than any staging window holds, short and long, all with a tag without receives yet.
    let mut early = Vec::new();
    for i in 0..60 {
        let size = [100, 20_000, 64 << 10, 300_000][i % 4];
        early.push((i, size, send(&pair.send, pattern(i, size), 1)));
    }
    // Short messages of another tag need staging credit only when they come before their receive.
    for size in [0, 8, 100, 60_000, 70_000, 1 << 20] {
        let target = Memory::new(size);
        let posted = receive(&pair.recv, &target, 2);
        // The announcement must be on its way before the send, or the send would count as early too.
        let sent = send(&pair.send, pattern(77, size), 2);
        let sizes = pair.finish(posted, &[sent]).expect("the other tag is not held up");
        assert_eq!(sizes[0] as usize, size);
        assert!(target.bytes() == pattern(77, size), "{size}");
        if size < 60_000 {
            break;
        }
    }
    let mut done = vec![false; early.len()];
    for (i, size, _) in &early {
        let target = Memory::new(*size);
        let posted = receive(&pair.recv, &target, 1);
        eventually("the early message", PATIENCE, || {
            for (at, (_, _, request)) in early.iter().enumerate() {
                done[at] = done[at] || pair.send.test(request).expect("a test").is_some();
            }
            pair.recv.test(&posted).expect("a test")
        });
        assert!(target.bytes() == pattern(*i, *size), "early message {i}");
    }
}

#[test]
fn a_long_early_send_lets_every_other_tag_pass() {
    let _watchdog = watchdog(60);
    let pair = pair(ApiVersion::V12);
    let early = send(&pair.send, pattern(1, 5 << 20), 1);
    for size in [0, 8, 100, 60_000, 70_000, 1 << 20] {
        let target = Memory::new(size);
        let posted = receive(&pair.recv, &target, 2);
        let sent = send(&pair.send, pattern(2, size), 2);
        pair.finish(posted, &[sent]).expect("the other tag is not held up");
        assert!(target.bytes() == pattern(2, size), "{size}");
        assert!(pair.send.test(&early).expect("a test").is_none(), "nobody received the early one");
    }
    let target = Memory::new(5 << 20);
    let posted = receive(&pair.recv, &target, 1);
    pair.finish(posted, &[early]).expect("the early message");
    assert!(target.bytes() == pattern(1, 5 << 20));
}

#[test]
fn thirty_two_grouped_receives_of_eight_may_be_outstanding() {
    let _watchdog = watchdog(60);
    for version in among([ApiVersion::V5, ApiVersion::V8, ApiVersion::V12]) {
        let pair = pair(version);
        let targets: Vec<Memory> = (0..32 * 8).map(|_| Memory::new(2048)).collect();
        let groups: Vec<Request> = targets
            .chunks(8)
            .map(|group| {
                let parts: Vec<Part<'_>> =
                    group.iter().enumerate().map(|(tag, target)| Part::all(target, None).tagged(tag as i32)).collect();
                // SAFETY: the targets outlive the requests.
                unsafe { pair.recv.irecv(&parts) }.expect("irecv").expect("32 grouped receives fit")
            })
            .collect();
        let sends: Vec<Request> = (0..32 * 8)
            .map(|i| {
                let bytes = part(pattern(i, 1000 + i), None).tagged(i as i32 % 8);
                // SAFETY: the pattern is static.
                unsafe { pair.send.isend(bytes) }.expect("isend").expect("32 times 8 sends fit")
            })
            .collect();
        // The newest first: NCCL asks after the oldest, but others may not.
        for (i, group) in groups.iter().enumerate().rev() {
            let sizes = pair.recv.wait(group, PATIENCE).expect("the group ends");
            let expected: Vec<i32> = (0..8).map(|part| 1000 + (i * 8 + part) as i32).collect();
            assert_eq!(*sizes, expected[..], "{version}, group {i}");
        }
        for (i, send) in sends.iter().enumerate().rev() {
            assert_eq!(*pair.send.wait(send, PATIENCE).expect("the send ends"), [1000 + i as i32]);
        }
        for (i, target) in targets.iter().enumerate() {
            assert!(&target.bytes()[..1000 + i] == pattern(i, 1000 + i), "{version}, {i}");
            assert!(target.bytes()[1000 + i..].iter().all(|byte| *byte == 0) && target.guards_intact());
        }
    }
}

#[test]
fn requests_may_be_asked_after_in_any_order() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let pair = pair(version);
        let size = |i: usize| [1, 70_000, 4096, 300_000, 0, 65_536, 17_000, 1 << 20][i];
        let targets: Vec<Memory> = (0..8).map(|i| Memory::new(size(i))).collect();
        let receives: Vec<Request> = targets.iter().map(|target| receive(&pair.recv, target, 0)).collect();
        let sends: Vec<Request> = (0..8).map(|i| send(&pair.send, pattern(i, size(i)), 0)).collect();
        let mut open: Vec<(bool, usize)> =
            [7, 0, 5, 2, 3, 6, 1, 4].iter().flat_map(|i| [(true, *i), (false, *i)]).collect();
        eventually("all requests", PATIENCE, || {
            open.retain(|&(is_send, i)| {
                let end = if is_send { pair.send.test(&sends[i]) } else { pair.recv.test(&receives[i]) };
                end.expect("a test").is_none()
            });
            open.is_empty().then_some(())
        });
        for (i, target) in targets.iter().enumerate() {
            assert!(target.bytes() == pattern(i, size(i)), "{version}, {i}");
        }
    }
}

/// What a random host does next.
#[derive(Debug, Clone, Copy)]
enum Act {
    Send,
    Receive,
    Test(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        3 => Just(Act::Send),
        3 => Just(Act::Receive),
        2 => any::<usize>().prop_map(Act::Test),
    ];
    proptest::collection::vec(act, 0..200)
}

fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![
        3 => 0..300_usize,
        2 => 16_000..17_000_usize,
        2 => 65_500..65_600_usize,
        1 => 100_000..400_000_usize,
    ]
}

/// A receive of the model: its slots and, once posted, its request.
struct Posted {
    slots: Vec<usize>,
    targets: Vec<Memory>,
    request: Request,
    open: bool,
}

/// Plays one random host against a pair that has played others before.
fn play(pair: &Pair, messages: &[(i32, usize, usize)], order: &[usize], groups: &[usize], acts: &[Act]) {
    // `order` deals the messages to receive slots; within a tag the k-th slot takes the k-th send, so sort per tag.
    let mut slots: Vec<usize> = order.to_vec();
    for tag in 0..3 {
        let mut of_tag: Vec<usize> = slots.iter().copied().filter(|i| messages[*i].0 == tag).collect();
        of_tag.sort_unstable();
        let mut next = of_tag.into_iter();
        for slot in slots.iter_mut().filter(|i| messages[**i].0 == tag) {
            *slot = next.next().expect("as many as there were");
        }
    }
    let mut group_sizes = groups.iter().copied().cycle();
    let (mut sends, mut receives): (Vec<(usize, Request, bool)>, Vec<Posted>) = (Vec::new(), Vec::new());
    let (mut next_send, mut next_slot) = (0, 0);
    let mut act = |act: Act, sends: &mut Vec<(usize, Request, bool)>, receives: &mut Vec<Posted>| match act {
        Act::Send if next_send < messages.len() => {
            let (tag, size, _) = messages[next_send];
            // SAFETY: the pattern is static.
            let request = unsafe { pair.send.isend(part(pattern(next_send, size), None).tagged(tag)) };
            if let Some(request) = request.expect("isend") {
                sends.push((size, request, true));
                next_send += 1;
            }
        }
        Act::Receive if next_slot < slots.len() => {
            let count = group_sizes.next().expect("it cycles").min(slots.len() - next_slot);
            let dealt = slots[next_slot..next_slot + count].to_vec();
            let targets: Vec<Memory> = dealt.iter().map(|i| Memory::new(messages[*i].1 + messages[*i].2)).collect();
            let parts: Vec<Part<'_>> =
                targets.iter().zip(&dealt).map(|(target, i)| Part::all(target, None).tagged(messages[*i].0)).collect();
            // SAFETY: the targets are kept with the request.
            if let Some(request) = unsafe { pair.recv.irecv(&parts) }.expect("irecv") {
                receives.push(Posted { slots: dealt, targets, request, open: true });
                next_slot += count;
            }
        }
        Act::Test(which) if !sends.is_empty() || !receives.is_empty() => {
            let which = which % (sends.len() + receives.len());
            if let Some((size, request, open)) = sends.get_mut(which) {
                if *open && let Some(sizes) = pair.send.test(request).expect("a test") {
                    assert_eq!(sizes[0] as usize, *size);
                    *open = false;
                }
            } else {
                let posted = &mut receives[which - sends.len()];
                if posted.open
                    && let Some(sizes) = pair.recv.test(&posted.request).expect("a test")
                {
                    posted.open = false;
                    for ((i, target), got) in posted.slots.iter().zip(&posted.targets).zip(sizes.iter()) {
                        let size = messages[*i].1;
                        assert_eq!(*got as usize, size, "message {i}");
                        assert!(&target.bytes()[..size] == pattern(*i, size), "message {i}");
                        assert!(target.bytes()[size..].iter().all(|byte| *byte == 0), "behind message {i}");
                        assert!(target.guards_intact(), "around message {i}");
                    }
                }
            }
        }
        _ => {}
    };
    for step in acts {
        act(*step, &mut sends, &mut receives);
    }
    let mut turn = 0;
    eventually("the end of all transfers", PATIENCE, || {
        for _ in 0..messages.len() * 4 {
            act(Act::Send, &mut sends, &mut receives);
            act(Act::Receive, &mut sends, &mut receives);
            act(Act::Test(turn), &mut sends, &mut receives);
            turn += 1;
        }
        let posted: usize = receives.iter().map(|posted| posted.slots.len()).sum();
        let all = sends.len() == messages.len() && posted == messages.len();
        let over = sends.iter().all(|(_, _, open)| !open) && receives.iter().all(|posted| !posted.open);
        (all && over).then_some(())
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_interleaving_of_sends_grouped_receives_and_tests_delivers_by_order_and_tag(
        (messages, order) in proptest::collection::vec((0..3_i32, sizes(), 0..100_usize), 1..40)
            .prop_flat_map(|messages| {
                let order: Vec<usize> = (0..messages.len()).collect();
                (Just(messages), Just(order).prop_shuffle())
            }),
        groups in proptest::collection::vec(1..=8_usize, 1..10),
        acts in acts(),
        streams in any::<bool>(),
    ) {
        let _watchdog = watchdog(60);
        let pair = pair(if streams { ApiVersion::V8 } else { ApiVersion::V12 });
        play(&pair, &messages, &order, &groups, &acts);
        // The same connection again: whatever was left behind would show.
        play(&pair, &messages, &order, &groups, &[]);
    }
}

#[test]
fn one_listener_gives_several_connections_that_do_not_mix() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let context = context(version);
        let (listener, handle) = context.listen(0).expect("listen");
        let pairs: Vec<Pair> = (0..5)
            .map(|_| Pair::through(&listener, (&context, 0), &mut handle.clone()).expect("a connection"))
            .collect();
        listener.close().expect("close");
        let targets: Vec<Memory> = (0..5).map(|_| Memory::new(100_000)).collect();
        let posted: Vec<Request> = pairs.iter().zip(&targets).map(|(pair, to)| receive(&pair.recv, to, 0)).collect();
        let sent: Vec<Request> =
            pairs.iter().enumerate().map(|(i, pair)| send(&pair.send, pattern(i, 100_000), 0)).collect();
        for (i, pair) in pairs.iter().enumerate().rev() {
            pair.finish(posted[i], &[sent[i]]).expect("a transfer");
            assert!(targets[i].bytes() == pattern(i, 100_000), "{version}, connection {i}");
        }
    }
}

#[test]
fn two_communicators_between_the_same_peers_do_not_mix() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let (first, second) = (context(version), context(version));
        let pairs = [&first, &second, &first, &second].map(|it| Pair::connect(it, 0).expect("a connection"));
        let posted_targets: Vec<Memory> = (0..4).map(|_| Memory::new(5000)).collect();
        let posted: Vec<Request> =
            pairs.iter().zip(&posted_targets).map(|(pair, to)| receive(&pair.recv, to, 0)).collect();
        let sent: Vec<Request> =
            pairs.iter().enumerate().rev().map(|(i, pair)| send(&pair.send, pattern(i, 5000), 0)).collect();
        for (i, pair) in pairs.iter().enumerate() {
            pair.finish(posted[i], &[sent[3 - i]]).expect("a transfer");
            assert!(posted_targets[i].bytes() == pattern(i, 5000), "{version}, connection {i}");
        }
    }
}

#[test]
fn memory_may_be_registered_from_another_thread_while_transfers_run() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let pair = pair(version);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let service = scope.spawn(|| {
                let memory = Memory::new(64 << 10);
                let mut registered = 0;
                // At least once, however late this thread is started.
                while registered == 0 || !stop.load(Ordering::Relaxed) {
                    let mine = pair.send.register(&memory).expect("regMr");
                    let theirs = pair.recv.register(&memory).expect("regMr");
                    mine.dereg().expect("deregMr");
                    theirs.dereg().expect("deregMr");
                    registered += 1;
                    std::thread::yield_now();
                }
                registered
            });
            for i in 0..60 {
                let size = [100, 70_000, 1 << 20][i % 3];
                assert!(pair.transfer(pattern(i, size)).expect("a transfer") == pattern(i, size), "{version}");
            }
            stop.store(true, Ordering::Relaxed);
            assert!(service.join().expect("no panic") > 0);
        });
    }
}

#[test]
fn different_threads_may_send_and_receive_at_full_duplex() {
    let _watchdog = watchdog(60);
    let context = context(ApiVersion::V12);
    let (there, back) = (Pair::connect(&context, 0).expect("one way"), Pair::connect(&context, 0).expect("the other"));
    let stream = |send_end: &SendComm, recv_end: &RecvComm, seed: usize| {
        for i in 0..40 {
            let size = [9, 4000, 66_000, 900_000][i % 4];
            let target = Memory::new(size);
            let posted = receive(recv_end, &target, 0);
            let sent = send(send_end, pattern(seed + i, size), 0);
            let (mut received, mut left) = (false, false);
            eventually("a round", PATIENCE, || {
                received = received || recv_end.test(&posted).expect("a test").is_some();
                left = left || send_end.test(&sent).expect("a test").is_some();
                (received && left).then_some(())
            });
            assert!(target.bytes() == pattern(100 - seed + i, size));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| stream(&there.send, &back.recv, 30));
        stream(&back.send, &there.recv, 70);
    });
}
