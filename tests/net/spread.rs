//! How a connection's streams share its long messages where the network is the limit.

use std::collections::{HashMap, VecDeque};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::faults::{Ends, accept, connect, receive_stream, send_stream};
use crate::support::ends::plays;
use crate::support::faults::Network;
use crate::support::netns::{Namespace, available};
use crate::support::{PATIENCE, child, eventually, part, pattern, watchdog};
use towline::host::{Memory, Part};

/// Two ends that four further streams join, on a network that is the limit. None in the process of an end, which has
/// played it, and where there are no namespaces.
fn on_a_full_network(test: &str, sender: impl FnOnce(), receiver: impl FnOnce()) -> Option<(Network, Ends)> {
    if plays(sender, receiver) || !available() {
        return None;
    }
    let network = Network::new(1, 400);
    let ends = Ends::start(test, &network.hosts, &[("TOWLINE_STREAMS", "5")]);
    Some((network, ends))
}

/// The bytes that each TCP socket of a host has sent, by its addresses.
fn sent(host: &Namespace) -> HashMap<String, u64> {
    let shown = Command::new("ip").args(["netns", "exec", host.name(), "ss", "-tinHO"]).output().expect("ss runs");
    let text = String::from_utf8_lossy(&shown.stdout);
    let of = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let bytes = words.iter().find_map(|word| word.strip_prefix("bytes_sent:")?.parse().ok())?;
        Some((format!("{} {}", words.get(3)?, words.get(4)?), bytes))
    };
    text.lines().filter_map(of).collect()
}

#[test]
fn on_a_full_network_one_further_stream_carries_the_long_messages() {
    const NAME: &str = "spread::on_a_full_network_one_further_stream_carries_the_long_messages";
    let _watchdog = watchdog(90);
    let Some((network, ends)) = on_a_full_network(NAME, send_stream, receive_stream) else { return };
    eventually("one of four further streams sends nearly all", Duration::from_secs(30), || {
        let before = sent(&network.hosts.0);
        std::thread::sleep(Duration::from_millis(300));
        let now = sent(&network.hosts.0);
        let bytes: Vec<u64> = now.iter().map(|(socket, now)| now - before.get(socket).copied().unwrap_or(0)).collect();
        let (most, all) = (bytes.iter().max()?, bytes.iter().sum::<u64>());
        (now.len() >= 5 && all > 4 << 20 && *most > all / 100 * 95).then_some(())
    });
    child::send(ends.mail.path(), "stop", b"");
    ends.pass();
}

/// As one step of NCCL's `sendrecv`.
const STEP: usize = 128 << 10;
const AHEAD: usize = 8;

/// Sends messages of [`STEP`], then one whose receive is not posted yet, until such a one has left.
fn sends_ahead_of_a_receive() {
    let (send, mail) = (connect(), child::mailbox());
    // SAFETY: the pattern is static.
    let post = |number, size| unsafe { send.post(part(&pattern(number, STEP)[..size], None)) }.expect("isend");
    for round in 0.. {
        let (mut flying, mut number) = (VecDeque::new(), 0);
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            if flying.len() == AHEAD {
                send.wait(&flying.pop_front().expect("eight fly"), PATIENCE).expect("the send ends");
            }
            flying.push_back(post(number, STEP));
            number += 1;
        }
        // An empty message for each receive that is posted.
        flying.extend((0..AHEAD).map(|_| post(0, 0)));
        flying.iter().for_each(|it| send.wait(it, PATIENCE).map(drop).expect("the send ends"));
        let early = post(round, STEP);
        let left = send.wait(&early, Duration::from_secs(1)).is_ok();
        child::send(&mail, &format!("round {round}"), &[u8::from(left)]);
        if left {
            break;
        }
        send.wait(&early, PATIENCE).expect("the send ends");
    }
    send.close().expect("close");
}

fn receives_late() {
    let (recv, mail) = (accept(), child::mailbox());
    let memory: Vec<Memory> = (0..AHEAD).map(|_| Memory::new(STEP)).collect();
    // SAFETY: the memory outlives the connection.
    let post = |at: usize| unsafe { recv.post(&[Part::all(&memory[at % AHEAD], None)]) }.expect("irecv");
    let check = |at: usize, number: usize| {
        assert!(memory[at % AHEAD].bytes() == pattern(number, STEP), "message {number} is wrong");
    };
    for round in 0.. {
        let mut flying: VecDeque<_> = (0..AHEAD).map(post).collect();
        let mut number = 0;
        while let Some(receive) = flying.pop_front() {
            if recv.wait(&receive, PATIENCE).expect("the receive ends")[0] > 0 {
                check(number, number);
                flying.push_back(post(number));
                number += 1;
            }
        }
        let left = child::receive(&mail, &format!("round {round}"))[0] == 1;
        recv.wait(&post(0), PATIENCE).expect("the receive ends");
        check(0, round);
        if left {
            break;
        }
    }
    recv.close().expect("close");
}

#[test]
fn on_a_full_network_a_message_leaves_before_its_receive_is_posted() {
    const NAME: &str = "spread::on_a_full_network_a_message_leaves_before_its_receive_is_posted";
    let _watchdog = watchdog(90);
    let Some((_network, ends)) = on_a_full_network(NAME, sends_ahead_of_a_receive, receives_late) else { return };
    ends.pass();
}
