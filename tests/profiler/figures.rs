//! The metrics' values, and how their file is replaced.

use std::io::{Read, Seek};
use std::os::unix::fs::MetadataExt;

use towline::nccl::ffi::*;
use towline::nccl::net_event::{FLAG_RESEND, FLAG_SEND, NetEvent, PLUGIN_ID};
use towline::trace::metrics;

use super::check;
use super::host::{CommDescr, Event, Host};
use super::play::Comm;

/// Two transfers on rail 0, a resend on rail 1, whose times and counts are all different.
pub(crate) fn play() {
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), CommDescr { id: 0x44, ranks: 2, rank: 0 }, &mut mask);
    let host = &comm.host;
    let task = comm.enqueue(0, 64);
    let pid = std::process::id() as i32;
    let op = Event::ProxyOp { pid, channel: 0, peer: 1, steps: 2, chunk: 4096, send: true };
    let op = comm.start(task.event, op);
    let part = |step, message: u64, flags: u32, rail: u16, length: u64, end: fn(&mut NetEvent)| {
        let flags = FLAG_SEND | flags;
        let mut net = NetEvent { flags, link: 9, message, length, rail, stream: rail, ..NetEvent::new() };
        let event = comm.start(step, Event::Net { id: PLUGIN_ID, data: (&raw mut net).cast() });
        end(&mut net);
        host.update(event, (&raw mut net).cast());
        host.stop(event);
    };
    for message in 0..2 {
        let step = comm.start(op, Event::ProxyStep { step: message as i32 });
        host.state(step, ncclProfilerProxyStepSendWait, 1000);
        part(step, message, 0, 0, 1000, |net| {
            (net.wait_receiver_ns, net.wait_socket_ns, net.wait_credit_ns) = (1_000_000, 2_000_000, 3_000_000);
            (net.wire_ns, net.retransmissions, net.reconnects) = (4_000_000, 5, 6);
        });
        if message == 1 {
            part(step, message, FLAG_RESEND, 1, 300, |net| net.wire_ns = 7_000_000);
        }
        host.stop(step);
    }
    host.stop(op);
    comm.finalize();
}

#[test]
fn each_metric_of_the_wire_has_the_value_that_the_transport_told() {
    let dir = tempfile::tempdir().unwrap();
    super::run("figures", dir.path(), &[]);
    let text = check::metrics(dir.path());
    let process = check::process(&text);
    let value = |name: &str, rail: u32, more: &str| -> f64 {
        let line = format!(
            "towline_wire_{name}{{{process},interface=\"unknown interface {rail}\",direction=\"send\"{more}}} "
        );
        let found: Vec<&str> = text.lines().filter_map(|sample| sample.strip_prefix(&line)).collect();
        assert_eq!(found.len(), 1, "{line}: {text}");
        found[0].parse().unwrap()
    };
    for (name, expected) in [
        ("bytes_total", [2000.0, 0.0]),
        ("messages_total", [2.0, 0.0]),
        ("parts_total", [2.0, 1.0]),
        ("resent_bytes_total", [0.0, 300.0]),
        ("retransmissions_total", [10.0, 0.0]),
        ("reconnects_total", [12.0, 0.0]),
    ] {
        assert_eq!([value(name, 0, ""), value(name, 1, "")], expected, "{name}");
    }
    for (cause, expected) in
        [("receiver", [0.002, 0.0]), ("socket", [0.004, 0.0]), ("credit", [0.006, 0.0]), ("wire", [0.008, 0.007])]
    {
        let more = format!(",cause=\"{cause}\"");
        let told = [0, 1].map(|rail| value("stall_seconds_total", rail, &more));
        assert!(told.iter().zip(expected).all(|(told, right)| (told - right).abs() < 1e-9), "{cause}: {told:?}");
    }
    // The step's own bytes: what was sent twice counts once.
    let step = format!("towline_step_bytes_total{{{process},comm=\"world\",direction=\"send\"}} 2000");
    assert!(text.lines().any(|line| line == step), "{text}");
}

#[test]
fn who_reads_the_metrics_while_they_are_replaced_sees_the_old_ones_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("towline.prom");
    let old = "old\n".repeat(10_000);
    metrics::replace(&path, &old).unwrap();
    let mut reader = std::fs::File::open(&path).unwrap();
    let mut begin = [0; 8];
    reader.read_exact(&mut begin).unwrap();
    metrics::replace(&path, "new\n").unwrap();
    // A write into the same file would have cut it under the reader's hands.
    reader.rewind().unwrap();
    let mut seen = String::new();
    reader.read_to_string(&mut seen).unwrap();
    assert!(seen == old, "{} of {} bytes", seen.len(), old.len());
    assert_ne!(reader.metadata().unwrap().ino(), std::fs::metadata(&path).unwrap().ino());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "new\n");
}
