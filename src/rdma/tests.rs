//! Connections on real verbs: peers that use wrong keys, and queues that are filled to their limits. These need
//! hardware or SoftRoCE, so they run in the virtual machine of `tests/rdma_vm`.

use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::adapter::{Adapter, Memory, Registration, own_regions};
use super::backend::Rdma;
use super::events::Watch;
use super::harness::{Ends, Plan, UNTOUCHED, end_of, fabrics, posted, until};
use super::pages::Pages;
use super::receiver;
use super::verbs::{
    Access, AsyncEvent, Capacity, Local, MemoryRegion, ProtectionDomain, QueuePairOptions, Remote, Work,
};
use super::verbs::{CompletionQueue, QueuePair, Route, Timeouts};
use crate::engine::request::MAX_PARTS;
use crate::os::config::Config;
use crate::os::error::Cause;

/// A receive whose CTS entry is changed before the sender reads it: both sides fail, name the key as the cause, and no
/// byte is written.
fn a_line_is_changed(key: impl FnOnce(&Ends, &[u8], u32) -> u32) {
    let ends = Ends::connect(&Plan::default());
    let (source, target) = (vec![7; 20_000], vec![UNTOUCHED; 20_000]);
    // SAFETY: the target outlives the connection.
    let received = unsafe { ends.post_receive(&target) };
    ends.forge(1, |cts| cts.keys[0] = key(&ends, &target, cts.keys[0]));
    // SAFETY: the source outlives the connection.
    let sent = unsafe { ends.post_send(&source) };
    let here = end_of(|ticket| ends.send.test(ticket), sent).expect_err("the key is wrong");
    assert_eq!(here.cause(), Cause::Remote);
    let text = here.to_string();
    for words in ["an RDMA write of a message failed: remote access error", "queue pair", "is not registered any more"]
    {
        assert!(text.contains(words), "{text}");
    }
    let there = end_of(|ticket| ends.recv.test(ticket), received).expect_err("nothing comes");
    assert_eq!(there.cause(), Cause::Remote);
    let text = there.to_string();
    assert!(text.contains("remote access error") && text.contains("the sender"), "{text}");
    ends.send.close();
    ends.recv.close();
    assert!(target.iter().all(|byte| *byte == UNTOUCHED), "no byte was written");
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_write_with_a_key_that_is_none_fails_both_sides_and_writes_nothing() {
    a_line_is_changed(|_, _, key| key ^ 0x5a5a);
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_write_into_memory_of_another_protection_domain_fails_both_sides_and_writes_nothing() {
    let mut region = None;
    a_line_is_changed(|ends, target, _| {
        let domain = ProtectionDomain::new(&ends.receiving[0].open.context).expect("a domain");
        let access = Access { relaxed_ordering: false };
        // The same memory, and a key that the device knows.
        let made = MemoryRegion::new(&domain, target.as_ptr() as usize, target.len(), access, None).expect("pinned");
        region.insert(made).remote_key()
    });
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_receiver_without_the_key_of_the_ring_fails_both_sides() {
    let ends = Ends::connect(&Plan { ring_key: |key| key ^ 0x5a5a, ..Plan::default() });
    let (source, target) = (vec![7; 100], vec![UNTOUCHED; 100]);
    // SAFETY: the source outlives the connection.
    let sent = unsafe { ends.post_send(&source) };
    // SAFETY: the target outlives the connection.
    let received = unsafe { ends.post_receive(&target) };
    let text = end_of(|ticket| ends.recv.test(ticket), received).expect_err("the key is wrong").to_string();
    for words in ["an RDMA operation of a receive failed: remote access error", "the peer refused the key"] {
        assert!(text.contains(words), "{text}");
    }
    let text = end_of(|ticket| ends.send.test(ticket), sent).expect_err("no CTS entry comes").to_string();
    assert!(text.contains("the receiver") && text.contains("remote access error"), "{text}");
    ends.close();
    assert!(target.iter().all(|byte| *byte == UNTOUCHED));
}

/// How the control thread handles an event of a port's device.
fn event(adapter: &Arc<Adapter>, fails: bool, kind: u32, element: u64) {
    let watch = Watch { context: adapter.open.context.clone(), adapters: vec![Arc::clone(adapter)], fails };
    watch.take(&AsyncEvent { kind, text: "made up", element });
}

/// `IBV_EVENT_DEVICE_FATAL`, with and without recovery: only logged, if the user wants that; else the end of a
/// connection that has no other device.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_device_that_fails_ends_its_connections_unless_that_is_only_logged() {
    for variables in [&[("TOWLINE_RECOVERY", "0")][..], &[("TOWLINE_RECOVERY", "1")]] {
        let ends = Ends::connect(&Plan { variables, ..Plan::default() });
        event(&ends.receiving[0], false, 8, 0);
        ends.carries();
        let target = vec![UNTOUCHED; 100];
        // SAFETY: the target outlives the connection.
        let received = unsafe { ends.post_receive(&target) };
        event(&ends.receiving[0], true, 8, 0);
        let text = end_of(|ticket| ends.recv.test(ticket), received).expect_err("its device failed").to_string();
        assert!(text.contains("the RDMA device of rxe1 failed"), "{variables:?}: {text}");
        ends.close();
    }
}

/// With another device the connection continues without the one that failed.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_connection_goes_on_without_one_of_its_two_devices() {
    let ends = Ends::connect(&Plan::two_ports());
    ends.carries();
    event(&ends.receiving[1], true, 8, 0);
    for _ in 0..20 {
        ends.carries();
    }
    ends.close();
}

/// `IBV_EVENT_CQ_ERR` and `IBV_EVENT_QP_FATAL` of a queue fail its connection, without recovery; if only logged, they
/// do not.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn an_event_of_a_queue_reaches_its_connection_unless_it_is_only_logged() {
    for kind in [0, 1] {
        let ends = Ends::connect(&Plan { variables: &[("TOWLINE_RECOVERY", "0")], ..Plan::default() });
        let tell = |fails| ends.queues.iter().for_each(|(at, queue)| event(&ends.receiving[*at], fails, kind, *queue));
        tell(false);
        ends.carries();
        let target = vec![UNTOUCHED; 100];
        // SAFETY: the target outlives the connection.
        let received = unsafe { ends.post_receive(&target) };
        tell(true);
        let text = end_of(|ticket| ends.recv.test(ticket), received).expect_err("its queue failed").to_string();
        assert!(text.contains("a device reports made up of a queue of this connection"), "{text}");
        ends.close();
    }
}

/// A device reports that a queue has failed, and no completion follows: without recovery its connection fails, and no
/// other.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_queue_that_is_reported_failed_fails_its_connection_and_no_other() {
    let plan = Plan { variables: &[("TOWLINE_RECOVERY", "0")], ..Plan::default() };
    let [ends, other] = [Ends::connect(&plan), Ends::connect(&plan)];
    for (index, queue) in &ends.queues {
        assert!(!other.receiving[*index].queue_failed(*queue, "CQ error"), "another connection's");
        assert!(ends.receiving[*index].queue_failed(*queue, "CQ error"));
    }
    let target = vec![UNTOUCHED; 100];
    // SAFETY: the target outlives the connections.
    let receive = |ends: &Ends| unsafe { ends.post_receive(&target) };
    let received = receive(&ends);
    let text = end_of(|ticket| ends.recv.test(ticket), received).expect_err("its queue failed").to_string();
    assert!(text.contains("a device reports CQ error of a queue of this connection"), "{text}");
    let received = receive(&other);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(other.recv.test(received).expect("nothing happened to it").is_none());
    for ends in [ends, other] {
        ends.close();
    }
}

/// Both ends count the bytes of a message, so that bytes under way can be distinguished from those that have arrived.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_short_message_that_comes_before_its_receive_is_counted_at_once_and_once() {
    let ends = Ends::connect(&Plan { short: true, ..Plan::default() });
    let (source, target, other) = (vec![7; 1000], vec![UNTOUCHED; 1000], [UNTOUCHED; 8]);
    let counters = &ends.recv.base().counters;
    let counted = || (counters.early.load(Ordering::Relaxed), counters.bytes.load(Ordering::Relaxed));
    // SAFETY: the memory outlives the connection.
    let (sent, waiting) =
        unsafe { (ends.post_send(&source), ends.recv.irecv(&mut [posted(&other, 1)], &[null_mut()])) };
    let waiting = waiting.expect("irecv").expect("a request");
    until("the message", || {
        assert!(ends.recv.test(waiting).expect("nothing has failed").is_none());
        (counted().0 == 1).then_some(())
    });
    assert_eq!(counted().1, 1000);
    // SAFETY: as above.
    let received = unsafe { ends.post_receive(&target) };
    end_of(|ticket| ends.recv.test(ticket), received).expect("received");
    end_of(|ticket| ends.send.test(ticket), sent).expect("sent");
    assert_eq!((counted(), target == source), ((1, 1000), true));
    ends.close();
}

/// As many messages as there are request slots, on all queue pairs of two fused ports, posted before any is tested.
/// With queues of a few entries everything waits, and everything arrives.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn all_messages_that_can_be_outstanding_pass_through_queues_of_a_few_places() {
    // Plain writes; shares that end with a separate write; messages whose size is in the table.
    let reordering: &[_] = &[("NCCL_IB_ADAPTIVE_ROUTING", "1"), ("NCCL_IB_AR_THRESHOLD", "20000")];
    for (depth, variables) in [([4, 4], &[][..]), ([5, 5], reordering), ([16, 17], reordering)] {
        let ends = Ends::connect(&Plan { qps: 16, depth, variables, ..Plan::two_ports() });
        let sizes = [0, 1, 9000, 70_000, 135_000];
        let size = |number: usize| sizes[number % sizes.len()];
        let source: Vec<u8> = (0..150_000).map(|place| (place % 251) as u8).collect();
        let mut targets: Vec<Vec<u8>> = (0..256).map(|number| vec![UNTOUCHED; size(number)]).collect();
        let mut receives = Vec::new();
        let mut sends = Vec::new();
        let mut waiting = 0;
        for group in 0..32 {
            let mut parts: Vec<_> =
                (0..MAX_PARTS).map(|part| posted(&targets[group * 8 + part], part as i32)).collect();
            // SAFETY: the targets outlive the connection.
            match unsafe { ends.recv.irecv(&mut parts, &[null_mut(); MAX_PARTS]) }.expect("irecv") {
                Some(ticket) => receives.push((group, ticket)),
                None => {
                    // Not now: the queue of CTS entries is full.
                    waiting += 1;
                    let ticket = until("room for CTS entries", || {
                        let mut parts: Vec<_> =
                            (0..MAX_PARTS).map(|part| posted(&targets[group * 8 + part], part as i32)).collect();
                        // SAFETY: as above.
                        unsafe { ends.recv.irecv(&mut parts, &[null_mut(); MAX_PARTS]) }.expect("irecv")
                    });
                    receives.push((group, ticket));
                }
            }
        }
        for number in 0..256 {
            // Messages differ by their start offset.
            let address = source[number * 31 % 15_000..].as_ptr() as u64;
            // SAFETY: the source outlives the connection.
            let sent = unsafe { ends.send.isend(address, size(number) as u64, (number % 8) as i32, None, null_mut()) };
            sends.push(sent.expect("isend").expect("a slot for each"));
        }
        // No slot is left, and the call reports that.
        // SAFETY: nothing is read of an empty message.
        assert!(unsafe { ends.send.isend(0, 0, 0, None, null_mut()) }.expect("isend").is_none());
        // The progress of both sides in turn, as NCCL's one thread makes it.
        let (mut sends, mut receives) = (sends, receives);
        until("all messages", || {
            sends.retain(|ticket| ends.send.test(*ticket).expect("a send").is_none());
            receives.retain(|(group, ticket)| match ends.recv.test(*ticket).expect("a receive") {
                Some(outcome) => {
                    (0..MAX_PARTS).for_each(|part| assert_eq!(outcome.sizes[part], size(group * 8 + part) as u64));
                    false
                }
                None => true,
            });
            (sends.is_empty() && receives.is_empty()).then_some(())
        });
        for (number, target) in targets.iter_mut().enumerate() {
            let start = number * 31 % 15_000;
            assert!(target[..] == source[start..start + size(number)], "message {number} at depth {depth:?}");
        }
        println!("depth {depth:?}: {waiting} of 32 groups had to wait for room");
        ends.send.close();
        ends.recv.close();
    }
}

/// Parts that fill their receives and others, sent in any order, with or without tests of the sends in between. Checks
/// which parts are held back, and which one immediate covers.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn groups_arrive_in_whichever_order_their_parts_are_sent_and_whatever_they_fill() {
    for qps in [1, 2] {
        let ends = Ends::connect(&Plan { qps, ..Plan::default() });
        let mut state = 7_u64;
        let mut below = |most: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % most
        };
        let source: Vec<u8> = (0..60_000).map(|place| (place % 251) as u8).collect();
        for round in 0..150 {
            let count = 1 + below(MAX_PARTS);
            let capacities: Vec<usize> = (0..count).map(|_| [0, 1, 900, 8192, 16_384, 20_000][below(6)]).collect();
            let sizes: Vec<usize> =
                capacities.iter().map(|most| if below(5) == 0 { below(most + 1) } else { *most }).collect();
            let mut order: Vec<usize> = (0..count).collect();
            if below(2) == 0 {
                (1..count).for_each(|at| order.swap(at, below(at + 1)));
            }
            let polls_between = below(3) == 0;
            let targets: Vec<Vec<u8>> = capacities.iter().map(|most| vec![UNTOUCHED; *most]).collect();
            let mut parts: Vec<_> = targets.iter().zip(0..).map(|(target, tag)| posted(target, tag)).collect();
            // SAFETY: the targets exist until the group has arrived, or the test has failed.
            let received = unsafe { ends.recv.irecv(&mut parts, &vec![null_mut(); count]) };
            let received = received.expect("irecv").expect("a request");
            let mut sends = Vec::new();
            for part in order {
                let from = source[part * 1000..].as_ptr() as u64;
                // SAFETY: the source outlives the connection.
                let sent = unsafe { ends.send.isend(from, sizes[part] as u64, part as i32, None, null_mut()) };
                sends.push(sent.expect("isend").expect("a request"));
                if polls_between {
                    sends.retain(|ticket| ends.send.test(*ticket).expect("a send").is_none());
                }
            }
            until("the sends", || {
                sends.retain(|ticket| ends.send.test(*ticket).expect("a send").is_none());
                sends.is_empty().then_some(())
            });
            let outcome = end_of(|ticket| ends.recv.test(ticket), received).expect("the group");
            for (part, (target, &size)) in targets.iter().zip(&sizes).enumerate() {
                assert_eq!(outcome.sizes[part], size as u64, "round {round}, part {part}");
                assert!(target[..size] == source[part * 1000..][..size], "round {round}, part {part} of {size} bytes");
                assert!(target[size..].iter().all(|byte| *byte == UNTOUCHED), "round {round}, part {part}");
            }
        }
        ends.send.close();
        ends.recv.close();
    }
}

/// Fills the queues of all queue pairs, and polls only when all requests have completed. The completion queues have an
/// entry for each.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn completion_queues_hold_all_that_their_qps_can_have_outstanding() {
    let config = Config::default();
    let (rdma, _) = Rdma::find(&config).expect("RDMA devices");
    for (ports, qps, depth) in [
        ([&[0][..], &[1][..]], 1, [256, 128]),
        ([&[0], &[1]], 7, [4, 4]),
        ([&[0, 1], &[0, 1]], 128, [6, 5]),
        ([&[0, 1], &[1]], 32, [40, 30]),
    ] {
        let plan = Plan { ports, qps, depth, ..Plan::default() };
        let ([left, right], mut fabrics) = fabrics(&rdma, &plan, &config);
        let memory = Pages::<[u8; 4]>::zeroed(2 * qps).expect("memory");
        let mine = memory.address();
        let regions = [&left, &right].map(|side| own_regions(side, &memory).expect("pinned"));
        let number = 77_u32;
        let own = [&left, &right]
            .map(|side| Registration::new(side, &raw const number as u64, 4, Memory::Host, None).expect("pinned"));
        let mut entries = [0; 2];
        for side in 0..2 {
            for qp in 0..qps {
                let qp_of = fabrics[side].qp(qp);
                let key = regions[1 - side][qp_of.peer_port].remote_key();
                let local =
                    Local { address: &raw const number as u64, length: 4, key: own[side].local_key(qp_of.adapter) };
                let remote = Remote { address: mine + 4 * (2 * qp + side) as u64, key };
                let fits = qp_of.room();
                assert_eq!(fits, depth[side], "as deep as wanted");
                // The sender's writes take up receives; the receiver's are CTS entries.
                let immediate = (side == 0).then_some(0);
                for write in 0..fits {
                    // Only the last one shows in memory.
                    let length = if write + 1 == fits { 4 } else { 0 };
                    let work = Work {
                        id: qp as u64,
                        local: Local { length, ..local },
                        remote,
                        immediate,
                        is_read: false,
                        is_inline: false,
                        is_signaled: true,
                    };
                    // SAFETY: the memory outlives the queue pairs.
                    unsafe { qp_of.post(&[work]) }.expect("posted");
                }
                assert_eq!(qp_of.room(), 0);
                entries[side] += fits as usize;
            }
        }
        // All have arrived; the acknowledgements follow.
        until("the last write of each queue pair", || {
            // SAFETY: a device writes it, hence volatile.
            memory
                .iter()
                .all(|word| unsafe { std::ptr::from_ref(word).read_volatile() } == number.to_ne_bytes())
                .then_some(())
        });
        std::thread::sleep(std::time::Duration::from_millis(300));
        let mut counts = [0; 2];
        for (fabric, count) in fabrics.iter_mut().zip(&mut counts) {
            let take = |_: &mut [_], completion: &super::verbs::Completion| {
                assert!(completion.is_ok(), "{completion:?}");
                *count += 1;
                Ok(())
            };
            fabric.poll(take).expect("a queue that was not overrun");
        }
        // The receiving side's queues hold its own writes and the immediates.
        assert_eq!(counts, [entries[0], entries[1] + entries[0]], "{qps} queue pairs of depth {depth:?}");
        assert!(entries[0] <= qps * receiver::DEPTH.receive as usize);
        for adapter in left.iter().chain(&*right) {
            let context = &adapter.open.context;
            let mut ready = libc::pollfd { fd: context.async_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid element.
            while unsafe { libc::poll(&raw mut ready, 1, 0) } == 1 {
                let text = context.next_event(|event| event.text).expect("an event is there");
                assert!(!text.contains("CQ"), "{text}");
            }
        }
        drop(fabrics);
    }
}

/// The check of the test above can fail: a queue with fewer entries than requests loses completions.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_queue_with_too_few_places_loses_completions() {
    let (rdma, _) = Rdma::find(&Config::default()).expect("an RDMA device");
    let adapter = &rdma.adapters[0];
    let queue = CompletionQueue::new(&adapter.open.context, 7).expect("a queue");
    let posted = 4 * queue.entries();
    let wanted = Capacity { send: posted, receive: 1, inline_bytes: 0 };
    let pair = QueuePair::new(&adapter.domain, &queue, &queue, wanted).expect("a queue pair");
    let open = &adapter.open;
    pair.prepare(QueuePairOptions { port: open.port.number, pkey_index: 0 }).expect("prepared");
    // With itself.
    let route = Route {
        port: open.port.number,
        link_layer: open.port.link_layer,
        peer_number: pair.number(),
        peer_first_packet: 0,
        mtu: open.facts.active_mtu,
        gid_index: u8::try_from(open.gid_index).expect("a small table"),
        peer_gid: open.gid,
        lid: open.facts.lid,
        is_global: false,
        service_level: 0,
        traffic_class: 0,
    };
    pair.connect(&route).expect("connected");
    pair.start(Timeouts { exponent: 14, retries: 3 }, 0).expect("started");
    let memory = Pages::<u64>::zeroed(1).expect("memory");
    let region = adapter.own_region(&memory).expect("pinned");
    let work = Work {
        id: 0,
        local: Local { address: memory.address(), length: 4, key: region.local_key() },
        remote: Remote { address: memory.address() + 4, key: region.remote_key() },
        immediate: None,
        is_read: false,
        is_inline: false,
        is_signaled: true,
    };
    for _ in 0..posted {
        // SAFETY: the memory outlives the queue pair.
        unsafe { pair.post(&[work]) }.map_err(|(_, error)| error).expect("posted");
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    let mut room = [const { MaybeUninit::uninit() }; 64];
    let mut polled = 0;
    // A driver may also report it by an error.
    while let Ok(done) = queue.poll(&mut room) {
        if done.is_empty() {
            break;
        }
        polled += done.len();
    }
    assert!(polled < posted as usize, "{polled} of {posted} completions");
    drop(pair);
}
