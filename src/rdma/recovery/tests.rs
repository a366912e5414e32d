//! Queue pairs that fail under traffic, on real verbs: everything arrives, once, in order, with its bytes.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use crate::engine::request::{MAX_PARTS, Ticket};
use crate::os::error::Cause;
use crate::rdma::fabric::{Fabric, Qp};
use crate::rdma::harness::{Ends, Plan, end_of, posted, sock, until};

/// Pseudo-random numbers, the same for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound
    }
}

/// The data to send: messages differ by their start offset.
fn source() -> Vec<u8> {
    (0..400_000_u32).map(|place| (place.wrapping_mul(0x9e37_79b9) >> 23) as u8).collect()
}

/// A receive of one message or of a group.
struct Wanted {
    ticket: Ticket,
    /// The start of each message in the source, and its target memory.
    parts: Vec<(usize, Vec<u8>)>,
}

/// Keeps up to twelve groups of messages of all sizes under way, until `groups` have arrived; `trouble` is called in
/// between.
fn traffic(ends: &Ends, dice: &mut Dice, groups: usize, mut trouble: impl FnMut(&mut Dice, usize)) {
    let source = source();
    let (mut wanted, mut sends, mut unsent) = (VecDeque::<Wanted>::new(), Vec::new(), VecDeque::new());
    let (mut begun, mut done) = (0, 0);
    until("all groups", || {
        if begun < groups && wanted.len() < 12 {
            let count = if dice.below(3) == 0 { 1 + dice.below(MAX_PARTS) } else { 1 };
            let largest = if count == 1 { 200_000 } else { 20_000 };
            let size = |dice: &mut Dice| [0, 8, 700, 1024, 1025, 6000, largest][dice.below(7)];
            let parts: Vec<_> = (0..count).map(|_| (dice.below(100_000), vec![0xEE; size(dice)])).collect();
            // Now and then there is more room than the message takes.
            let mut list: Vec<_> = parts.iter().zip(0..).map(|((_, memory), tag)| posted(memory, tag)).collect();
            // SAFETY: the memory is kept until the request has ended.
            if let Some(ticket) = unsafe { ends.recv.irecv(&mut list, &[null_mut(); MAX_PARTS]) }.expect("irecv") {
                unsent.extend(parts.iter().enumerate().map(|(tag, (start, memory))| (tag, *start, memory.len())));
                wanted.push_back(Wanted { ticket, parts });
                begun += 1;
            }
        }
        while let Some((tag, start, size)) = unsent.front().copied()
            && dice.below(4) > 0
        {
            let from = source[start..start + size].as_ptr() as u64;
            // SAFETY: the source outlives the traffic.
            let sent = unsafe { ends.send.isend(from, size as u64, tag as i32, None, null_mut()) }.expect("isend");
            let Some(ticket) = sent else { break };
            sends.push(ticket);
            unsent.pop_front();
        }
        trouble(dice, done);
        sends.retain(|ticket| ends.send.test(*ticket).expect("a send").is_none());
        wanted.retain(|group| match ends.recv.test(group.ticket).expect("a receive") {
            None => true,
            Some(outcome) => {
                for (part, (start, memory)) in group.parts.iter().enumerate() {
                    assert_eq!(outcome.sizes[part], memory.len() as u64, "group {done}, part {part}");
                    assert!(memory[..] == source[*start..start + memory.len()], "group {done}, part {part}");
                }
                done += 1;
                false
            }
        });
        (done == groups && sends.is_empty()).then_some(())
    });
}

/// Breaks one of the working queue pairs, unless it is the last of several.
fn break_one(fabric: &Fabric, dice: &mut Dice) {
    let living: Vec<usize> = fabric.living().collect();
    if living.len() > 1 || fabric.qps().len() == 1 && !living.is_empty() {
        fabric.qps()[living[dice.below(living.len())]].break_pair();
    }
}

/// The other side of a broken queue pair notices when nothing answers three times, for 67 ms each. SoftRoCE treats a
/// count of seven as "for ever".
const IMPATIENT: [(&str, &str); 2] = [("NCCL_IB_TIMEOUT", "14"), ("NCCL_IB_RETRY_CNT", "3")];

/// In addition, the end of a message is a separate write.
const REORDERING: [(&str, &str); 4] =
    [IMPATIENT[0], IMPATIENT[1], ("NCCL_IB_ADAPTIVE_ROUTING", "1"), ("NCCL_IB_AR_THRESHOLD", "20000")];

/// Waits until all queue pairs carry messages on both sides.
fn all_are_back(ends: &Ends) {
    let count = |fabric: &Fabric| fabric.qps().len() - fabric.living().count();
    until("all queue pairs are back", || {
        let mut away = 0;
        ends.send.with_fabric(|fabric| away += count(fabric));
        ends.recv.with_fabric(|fabric| away += count(fabric));
        (away == 0).then_some(())
    });
}

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn queue_pairs_that_fail_lose_nothing_and_come_back() {
    let rounds = std::env::var("RDMA_MENDING").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    for round in 0..rounds {
        let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (round as u64 + 1));
        let qps = [2, 1, 4, 8][round % 4];
        // Each number of queue pairs in both ways.
        let is_odd = (round + round / 4) % 2 == 1;
        let variables = if is_odd { &REORDERING[..] } else { &IMPATIENT };
        let ports: &[usize] = if qps == 1 { &[0] } else { &[0, 1] };
        let plan = Plan { ports: [ports, ports], qps, short: round % 8 < 6, variables, ..Plan::default() };
        let ends = Ends::connect(&plan);
        let (mut broken, most) = (0, 2 * qps);
        traffic(&ends, &mut dice, 200, |dice, done| {
            if broken < most && done > 190 * broken / most && dice.below(10) == 0 {
                broken += 1;
                if dice.below(2) == 0 {
                    ends.send.with_fabric(|fabric| break_one(fabric, dice));
                } else {
                    ends.recv.with_fabric(|fabric| break_one(fabric, dice));
                }
            }
        });
        if is_odd {
            // All at one time.
            ends.send.with_fabric(|fabric| fabric.living().for_each(|qp| fabric.qps()[qp].break_pair()));
        }
        // The loss of a queue pair that was not used since is not noticed.
        traffic(&ends, &mut dice, 30, |_, _| ());
        all_are_back(&ends);
        traffic(&ends, &mut dice, 30, |_, _| ());
        ends.recv.with_fabric(|fabric| assert!(fabric.qps().iter().all(|qp| qp.arrived > 0), "one is not used"));
        let [sender, receiver] = ends.lost_queue_pairs();
        println!("round {round}: {qps} queue pairs; {receiver} were lost");
        assert!(sender > 0 && sender == receiver);
        ends.send.close();
        ends.recv.close();
    }
}

/// Breaks the first queue pair, under traffic, and returns after how long it carries messages again.
fn break_first(ends: &Ends, dice: &mut Dice) -> Duration {
    let lost = || ends.lost_queue_pairs()[0];
    let (before, began) = (lost(), Instant::now());
    ends.send.with_fabric(|fabric| fabric.qps()[0].break_pair());
    let mut is_back = false;
    while !is_back {
        traffic(ends, dice, 1, |_, _| ());
        ends.send.with_fabric(|fabric| is_back = fabric.qps()[0].is_up() && lost() > before);
    }
    began.elapsed()
}

/// A queue pair that breaks again and again stays out for longer from the third relapse on, unless it is the only one.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_queue_pair_that_is_lost_again_and_again_stays_out_unless_it_is_the_only_one() {
    let mut dice = Dice(0x1055);
    let two = Ends::connect(&Plan { variables: &IMPATIENT, ..Plan::two_ports() });
    let first: Vec<Duration> = (0..3).map(|_| break_first(&two, &mut dice)).collect();
    let fourth = break_first(&two, &mut dice);
    println!("out for {first:?}, then {fourth:?}");
    // Two seconds instead of half a second, plus the delay of a busy machine in both cases.
    let usual = *first.iter().min().expect("three");
    assert!(
        fourth > Duration::from_millis(1800) && fourth > usual + Duration::from_millis(1200),
        "{first:?}, {fourth:?}"
    );
    let one = Ends::connect(&Plan { ports: [&[0], &[0]], qps: 1, variables: &IMPATIENT, ..Plan::default() });
    let alone: Vec<Duration> = (0..5).map(|_| break_first(&one, &mut dice)).collect();
    println!("alone, out for {alone:?}");
    assert!(alone.last().expect("five") < &Duration::from_secs(4), "it would be four seconds and more");
    for ends in [one, two] {
        ends.send.close();
        ends.recv.close();
    }
}

/// Sockets of the control channel fall silent with everything under way, and others were seen connected only by the
/// listening side. Meanwhile queue pairs fail and the two ends must communicate.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn the_control_channel_may_be_replaced_at_any_moment() {
    let mut dice = Dice(0xc0de);
    let ends = Ends::connect(&Plan { qps: 4, variables: &IMPATIENT, ..Plan::two_ports() });
    let mut epoch = 0;
    // The connecting side's end of the next socket, which the listening side already uses.
    let mut next: Option<UnixStream> = None;
    let mut replace = |dice: &mut Dice| match next.take() {
        Some(socket) => ends.send.base().resume(epoch, sock(socket)).expect("watched"),
        None => {
            ends.send.base().is_to_dial();
            epoch += 1;
            let (near, far) = UnixStream::pair().expect("sockets");
            ends.recv.base().resume(epoch, sock(far)).expect("watched");
            // Or the welcome is lost, and the next attempt has another number.
            next = (dice.below(3) > 0).then_some(near);
        }
    };
    let (mut broken, mut replaced) = (0, 0);
    traffic(&ends, &mut dice, 300, |dice, done| {
        if broken < 12 && done > 25 * broken && dice.below(10) == 0 {
            broken += 1;
            ends.send.with_fabric(|fabric| break_one(fabric, dice));
        }
        if dice.below(8) == 0 {
            replaced += 1;
            replace(dice);
        }
    });
    // Until both have one.
    while ends.send.base().is_away() {
        replace(&mut dice);
    }
    all_are_back(&ends);
    traffic(&ends, &mut dice, 30, |_, _| ());
    println!("{replaced} steps of replacement, {broken} queue pairs broken");
    assert!(broken > 6 && replaced > 10);
    ends.send.close();
    ends.recv.close();
}

/// A device reports that a queue pair has failed, and no completion follows: the others take over.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_queue_pair_that_is_reported_failed_is_done_without() {
    let ends = Ends::connect(&Plan::two_ports());
    traffic(&ends, &mut Dice(3), 10, |_, _| ());
    let (index, queue) = ends.queues[0];
    assert!(ends.receiving[index].queue_failed(queue, "QP fatal error"));
    traffic(&ends, &mut Dice(4), 40, |_, _| ());
    until("both sides give it up", || (ends.lost_queue_pairs() == [1, 1]).then_some(()));
    all_are_back(&ends);
    traffic(&ends, &mut Dice(5), 40, |_, _| ());
    ends.close();
}

/// Sends and receives do not wait for the control thread's poll: NCCL's thread holds the connection's lock nearly
/// always.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_port_that_goes_down_or_comes_back_raises_the_alarm() {
    let ends = Ends::connect(&Plan::two_ports());
    traffic(&ends, &mut Dice(8), 10, |_, _| ());
    let is_lost = || ends.lost_queue_pairs()[0] == 1;
    let is_seen = || ends.send.base().alarm.is_raised() || is_lost();
    let port = &ends.send.base().adapters[0];
    port.set_port_down(true);
    assert!(is_seen(), "the next thread to poll knows, or one has polled");
    until("the sender gives it up", || {
        traffic(&ends, &mut Dice(9), 1, |_, _| ());
        is_lost().then_some(())
    });
    port.set_port_down(false);
    all_are_back(&ends);
    traffic(&ends, &mut Dice(10), 40, |_, _| ());
    ends.close();
}

/// When all queue pairs are lost at one time the connection waits for one, but not for ever. Then it ends on both
/// sides, with the reason.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn when_no_queue_pair_comes_back_the_connection_ends() {
    let variables: &[_] = &[IMPATIENT[0], IMPATIENT[1], ("TOWLINE_RECONNECT_TIMEOUT", "1")];
    let ends = Ends::connect(&Plan { variables, ..Plan::two_ports() });
    traffic(&ends, &mut Dice(7), 20, |_, _| ());
    let (source, target) = (source(), vec![0; 50_000]);
    // Before the loss: after it there may be no room for a receive until the connection has ended.
    // SAFETY: the target outlives the connection.
    let received = unsafe { ends.post_receive(&target) };
    let ports = || ends.send.base().adapters.iter();
    // Both ends use these ports, and neither may see one go down while the other is still up.
    ends.recv.with_fabric(|_| {
        ends.send.with_fabric(|fabric| {
            ports().for_each(|port| port.set_port_down(true));
            fabric.qps().iter().for_each(Qp::break_pair);
        });
    });
    // SAFETY: the source outlives the connection.
    let sent = unsafe { ends.post_send(&source[..50_000]) };
    let another = vec![0; 50_000];
    // SAFETY: the memory outlives the connection.
    let another = unsafe { ends.recv.irecv(&mut [posted(&another, 0)], &[null_mut()]) }.expect("irecv");
    let here = end_of(|ticket| ends.send.test(ticket), sent).expect_err("no path is left").to_string();
    assert!(here.contains("all queue pairs were lost and none came back in time"), "{here}");
    let there = end_of(|ticket| ends.recv.test(ticket), received).expect_err("nothing comes");
    assert_eq!(there.cause(), Cause::Remote, "{there}");
    assert!(there.to_string().contains("all queue pairs were lost"), "{there}");
    if let Some(another) = another {
        end_of(|ticket| ends.recv.test(ticket), another).expect_err("nothing comes");
    }
    ports().for_each(|port| port.set_port_down(false));
    ends.close();
}

/// Without recovery the first loss ends the connection.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn without_recovery_the_first_queue_pair_ends_the_connection() {
    let variables: &[_] = &[("TOWLINE_RECOVERY", "0")];
    let ends = Ends::connect(&Plan { variables, ..Plan::two_ports() });
    ends.recv.with_fabric(|fabric| fabric.qps()[0].break_pair());
    let target = vec![0; 50_000];
    // SAFETY: the target outlives the connection.
    let received = unsafe { ends.post_receive(&target) };
    end_of(|ticket| ends.recv.test(ticket), received).expect_err("it does not recover");
    ends.close();
}
