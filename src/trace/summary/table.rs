//! The summary as text.

use std::fmt::Write;

use super::{CommStat, Summary};

/// All tables of a process.
pub(crate) fn render(summary: &Summary, title: &str) -> String {
    let mut out = format!("Towline profile · {title}\n");
    let mut comms: Vec<&CommStat> = summary.comms.values().collect();
    comms.sort_by_key(|comm| (comm.info.id, comm.info.rank));
    for comm in comms {
        if comm.calls.is_empty() && comm.peers.is_empty() && comm.wires.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n{}{}", comm.info.title(), if comm.ended { "" } else { " (alive)" });
        calls(&mut out, comm);
        phases(&mut out, comm);
        peers(&mut out, comm);
        wires(&mut out, comm);
    }
    if summary.dropped > 0 {
        let _ = writeln!(
            out,
            "\n{} events were dropped: the figures above are too small. TOWLINE_PROFILE_BUFFER makes room.",
            summary.dropped
        );
    }
    out
}

fn calls(out: &mut String, comm: &CommStat) {
    if comm.calls.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "  {:<16} {:<11} {:<8} {:>8} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "call", "algorithm", "protocol", "count", "bytes", "alg GB/s", "bus GB/s", "p50", "p95", "p99"
    );
    for (key, stat) in &comm.calls {
        // Bytes per nanosecond are gigabytes per second.
        let seconds = stat.latency.sum().max(1) as f64;
        let p = |share| time(stat.latency.percentile(share));
        let _ = writeln!(
            out,
            "  {:<16} {:<11} {:<8} {:>8} {:>10} {:>9.3} {:>9.3} {:>9} {:>9} {:>9}{}",
            key.func.text(),
            if key.algorithm.is_some() { key.algorithm.text() } else { "-" },
            if key.protocol.is_some() { key.protocol.text() } else { "-" },
            stat.count,
            bytes(stat.bytes),
            stat.bytes as f64 / seconds,
            stat.bus_bytes as f64 / seconds,
            p(0.5),
            p(0.95),
            p(0.99),
            match stat.enqueue_only {
                0 => String::new(),
                count => format!("  ({count} without operations: enqueueing only)"),
            }
        );
    }
}

fn phases(out: &mut String, comm: &CommStat) {
    if comm.phases.is_empty() {
        return;
    }
    let _ = writeln!(out, "  {:<16} {:>8} {:>9} {:>9} {:>9}", "kernel phase", "count", "p50", "p95", "p99");
    for (name, stat) in &comm.phases {
        let p = |share| time(stat.percentile(share));
        let _ = writeln!(out, "  {:<16} {:>8} {:>9} {:>9} {:>9}", name.text(), stat.count(), p(0.5), p(0.95), p(0.99));
    }
}

fn peers(out: &mut String, comm: &CommStat) {
    if comm.peers.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "  {:<16} {:>8} {:>10} {:>14} {:>14} {:>14} {:>14}",
        "peer", "steps", "bytes", "GPU", "rcvr not ready", "network", "flush"
    );
    for ((peer, send), stat) in &comm.peers {
        let all = stat.gpu_ns + stat.receiver_ns + stat.network_ns + stat.flush_ns;
        let part = |ns: u64| format!("{:>8} {:>4.0}%", time(ns), 100.0 * ns as f64 / all.max(1) as f64);
        let _ = writeln!(
            out,
            "  {:<16} {:>8} {:>10} {:>14} {:>14} {:>14} {:>14}",
            format!("{} {peer}", if *send { "send to" } else { "recv from" }),
            stat.steps,
            bytes(stat.bytes),
            part(stat.gpu_ns),
            part(stat.receiver_ns),
            part(stat.network_ns),
            part(stat.flush_ns)
        );
    }
}

fn wires(out: &mut String, comm: &CommStat) {
    if comm.wires.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "  {:<28} {:>8} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>7}",
        "wire", "parts", "bytes", "p50", "p99", "receiver", "socket", "credit", "on wire", "resent", "reconn."
    );
    for ((peer, rail, send), stat) in &comm.wires {
        let _ = writeln!(
            out,
            "  {:<28} {:>8} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>7}",
            format!("{} {peer}, {}", if *send { "send to" } else { "recv from" }, rail.name()),
            stat.parts,
            bytes(stat.bytes),
            time(stat.durations.percentile(0.5)),
            time(stat.durations.percentile(0.99)),
            time(stat.wait_receiver_ns),
            time(stat.wait_socket_ns),
            time(stat.wait_credit_ns),
            time(stat.wire_ns),
            bytes(stat.resent_bytes),
            stat.reconnects
        );
    }
}

/// A duration in three or four digits.
pub(crate) fn time(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns} ns"),
        10_000..10_000_000 => format!("{:.0} us", ns as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.0} ms", ns as f64 / 1e6),
        _ => format!("{:.0} s", ns as f64 / 1e9),
    }
}

/// A number of bytes in three or four digits.
pub(crate) fn bytes(count: u64) -> String {
    match count {
        0..10_000 => format!("{count} B"),
        10_000..10_000_000 => format!("{:.0} kB", count as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.0} MB", count as f64 / 1e6),
        _ => format!("{:.0} GB", count as f64 / 1e9),
    }
}
