use super::super::event::{NetPart, ProxyOp};
use super::*;
use crate::nccl::net_event::SOMEWHERE;
use crate::trace::metrics::{Figures, Labels, render};

const COMM: u64 = 1;
const OP: u64 = 2;

fn record(when: u64, id: u64, parent: u64, body: Body) -> Record {
    Record { when, id, parent, context: COMM, rank: 0, thread: 0, body }
}

/// A communicator with one operation that sends to rank 1; each of `steps` holds the parts of a transfer.
fn summary(steps: &[&[Body]]) -> Summary {
    let mut summary = Summary::default();
    summary.comm(&CommInfo { context: COMM, ranks: 2, ..CommInfo::default() });
    summary.apply(&record(0, OP, 0, Body::ProxyOp(ProxyOp { peer: 1, send: true, ..ProxyOp::default() })));
    for (step, parts) in (0i32..).zip(steps) {
        let id = 100 * (step as u64 + 1);
        summary.apply(&record(1, id, OP, Body::ProxyStep { step }));
        for (part, body) in (id + 1..).zip(*parts) {
            summary.apply(&record(2, part, id, *body));
        }
        for (part, _) in (id + 1..).zip(*parts) {
            summary.apply(&record(3, part, 0, Body::Stop));
        }
        summary.apply(&record(4, id, 0, Body::Stop));
    }
    summary
}

fn messages(summary: &Summary) -> u64 {
    summary.comms[&COMM].wires.values().map(|wire| wire.messages).sum()
}

fn part(offset: u64, rail: u16) -> Body {
    Body::NetTowline(NetPart { offset, rail, length: 10, send: true, ..NetPart::default() })
}

#[test]
fn a_message_counts_once_wherever_its_parts_lie() {
    // Shares of which a receiver does not know where they belong; chunks whose first one fell into the last piece; two
    // rails.
    let shares = [part(SOMEWHERE, 0), part(SOMEWHERE, 0), part(SOMEWHERE, 1)];
    let out_of_order = [part(30, 0), part(10, 1), part(20, 1)];
    let summary = summary(&[&shares, &out_of_order, &[part(0, 0), part(10, 1)], &[part(0, 0)]]);
    assert_eq!(messages(&summary), 4);
    let labels = Labels::new("host", "7", |_| None);
    let metrics = render(&Figures { labels: &labels, summary: &summary, oldest_open: None, peers: false, up: true });
    let lines = metrics.lines().filter(|line| line.starts_with("towline_wire_messages_total{"));
    let values: Vec<&str> = lines.filter_map(|line| line.rsplit(' ').next()).collect();
    assert_eq!(values, ["4", "0"], "each on the rail of its first part: {metrics}");
}

#[test]
fn parts_under_nccls_descriptors_are_one_message_a_step() {
    let socket = Body::NetSocket { fd: 5, op: 0, length: 10 };
    let summary = summary(&[&[socket, socket, socket], &[socket]]);
    assert_eq!(messages(&summary), 2);
    assert_eq!(summary.comms[&COMM].wires.values().map(|wire| wire.parts).sum::<u64>(), 4);
}

#[test]
fn without_steps_an_operations_messages_follow_each_other() {
    let mut summary = summary(&[]);
    let part = |message, offset, resend| {
        let part = NetPart { message, offset, resend, length: 10, send: true, ..NetPart::default() };
        Body::NetTowline(part)
    };
    let parts =
        [part(1, 0, false), part(1, SOMEWHERE, false), part(1, 0, true), part(2, SOMEWHERE, false), part(3, 0, false)];
    for (id, body) in (100..).zip(parts) {
        summary.apply(&record(2, id, OP, body));
        summary.apply(&record(3, id, 0, Body::Stop));
    }
    assert_eq!(messages(&summary), 3);
    let wires = &summary.comms[&COMM].wires;
    assert_eq!(wires.keys().map(|&(peer, ..)| peer).collect::<Vec<_>>(), [1], "the operation's peer");
    let wire = wires.values().next().unwrap();
    assert_eq!((wire.bytes, wire.resent_bytes, wire.parts), (40, 10, 5));
    assert!(summary.comms[&COMM].peers.is_empty(), "no step reported its wait");
}

#[test]
fn a_part_that_is_told_when_it_is_over_counts_with_its_own_times() {
    let mut summary = summary(&[]);
    let Body::NetTowline(part) = part(0, 0) else { unreachable!("made so") };
    summary.apply(&record(1, 100, OP, Body::ProxyStep { step: 0 }));
    summary.apply(&record(90_000, 101, 100, Body::NetTowline(NetPart { ago_ns: 60_000, ..part })));
    let times = NetTimes { wire_ns: 40_000, ago_ns: 20_000, wait_socket_ns: 7, ends: true, ..NetTimes::default() };
    summary.apply(&record(90_000, 101, 0, Body::NetTimes(times)));
    // Without a stop, which is never reported for it.
    assert_eq!(summary.nets.len(), 0, "it has ended");
    let comm = &summary.comms[&COMM];
    let wire = comm.wires.values().next().expect("its rail");
    assert_eq!((wire.parts, wire.messages, wire.bytes), (1, 1, 10));
    assert_eq!(
        (wire.durations.sum(), wire.wait_socket_ns),
        (40_000, 7),
        "from its beginning to its end, not to the call"
    );
}

#[test]
fn what_travels_again_is_no_message() {
    let again = Body::NetTowline(NetPart { length: 10, send: true, resend: true, ..NetPart::default() });
    let summary = summary(&[&[part(0, 0), again], &[part(0, 0)]]);
    assert_eq!(messages(&summary), 2);
    assert_eq!(summary.comms[&COMM].wires.values().map(|wire| wire.resent_bytes).sum::<u64>(), 10);
}
