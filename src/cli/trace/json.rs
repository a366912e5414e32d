//! The figures of `towline trace report` as JSON: times in nanoseconds.

use crate::trace::perfetto::ProcessInfo;
use crate::trace::summary::{CommStat, Histogram, Summary};
use crate::trace::verdict::Finding;
use serde_json::{Value, json};

use super::stragglers::Findings;

/// All of it.
pub(super) fn report(processes: &[Value], waits: &[Finding], findings: &[Findings], remarks: &[String]) -> Value {
    let wait = |found: &Finding| json!({"communicator": found.comm.title, "verdict": found.sentence()});
    let finding = |found: &Findings| json!({"communicator": found.communicator, "findings": found.sentences});
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "processes": processes,
        "waits_for": waits.iter().map(wait).collect::<Vec<_>>(),
        "holds_back": findings.iter().map(finding).collect::<Vec<_>>(),
        "notes": remarks,
    })
}

/// The figures of one process.
pub(super) fn process(info: &ProcessInfo, summary: &Summary) -> Value {
    let comms: Vec<Value> = summary.comms.values().map(communicator).collect();
    json!({"host": info.host, "process": info.pid, "global_rank": info.rank, "dropped_events": summary.dropped, "communicators": comms})
}

fn communicator(comm: &CommStat) -> Value {
    let calls = comm.calls.iter().map(|(key, stat)| {
        json!({
            "call": key.func.text(),
            "algorithm": key.algorithm.is_some().then(|| key.algorithm.text()),
            "protocol": key.protocol.is_some().then(|| key.protocol.text()),
            "count": stat.count,
            "bytes": stat.bytes,
            "bus_bytes": stat.bus_bytes,
            "enqueue_only": stat.enqueue_only,
            "latency": durations(&stat.latency),
        })
    });
    let peers = comm.peers.iter().map(|((peer, send), stat)| {
        json!({
            "peer": peer,
            "direction": direction(*send),
            "steps": stat.steps,
            "bytes": stat.bytes,
            "gpu_ns": stat.gpu_ns,
            "receiver_not_ready_ns": stat.receiver_ns,
            "network_ns": stat.network_ns,
            "flush_ns": stat.flush_ns,
        })
    });
    let wires = comm.wires.iter().map(|((peer, rail, send), stat)| {
        json!({
            "peer": peer,
            "direction": direction(*send),
            "rail": rail.name(),
            "parts": stat.parts,
            "messages": stat.messages,
            "bytes": stat.bytes,
            "resent_bytes": stat.resent_bytes,
            "retransmissions": stat.retransmissions,
            "reconnects": stat.reconnects,
            "wait_receiver_ns": stat.wait_receiver_ns,
            "wait_socket_ns": stat.wait_socket_ns,
            "wait_credit_ns": stat.wait_credit_ns,
            "wire_ns": stat.wire_ns,
            "durations": durations(&stat.durations),
        })
    });
    json!({
        "id": format!("{:#x}", comm.info.id),
        "name": comm.info.name,
        "rank": comm.info.rank,
        "gpu": Some(&comm.info.gpu).filter(|gpu| !gpu.is_empty()),
        "ranks": comm.info.ranks,
        "calls": calls.collect::<Vec<_>>(),
        "peers": peers.collect::<Vec<_>>(),
        "wires": wires.collect::<Vec<_>>(),
        "kernels": durations(&comm.kernels),
    })
}

fn direction(send: bool) -> &'static str {
    if send { "send" } else { "receive" }
}

fn durations(all: &Histogram) -> Value {
    let [p50, p95, p99] = [0.5, 0.95, 0.99].map(|share| all.percentile(share));
    json!({"count": all.count(), "sum_ns": all.sum(), "p50_ns": p50, "p95_ns": p95, "p99_ns": p99})
}
