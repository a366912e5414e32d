//! The figures for Prometheus: its text format, in a file for node_exporter's textfile collector or over HTTP.
//!
//! All are counters since the process began, per communicator and rank; rates and shares are Prometheus's business.
//! The file is replaced by an atomic rename, so that nobody reads half of it.

use std::fmt::Write;
use std::io;
use std::path::Path;

use super::summary::Summary;

struct Family<'a> {
    out: &'a mut String,
    name: &'static str,
}

impl<'a> Family<'a> {
    fn new(out: &'a mut String, name: &'static str, kind: &str, help: &str) -> Self {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Self { out, name }
    }

    fn sample(&mut self, labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.out, "{}{{{labels}}} {value}", self.name);
    }
}

/// All figures in Prometheus's text format.
pub fn render(summary: &Summary) -> String {
    let mut out = String::new();
    // (labels of the communicator, its figures)
    let comms: Vec<(String, &super::summary::CommStat)> = summary
        .comms
        .values()
        .map(|comm| {
            let id = format!("{:#x}", comm.info.id);
            let labels = format!("comm=\"{id}\",comm_name=\"{}\",rank=\"{}\"", escape(&comm.info.name), comm.info.rank);
            (labels, comm)
        })
        .collect();

    type Read = fn(&super::summary::CallStat) -> f64;
    let calls: [(&'static str, &str, Read); 4] = [
        ("towline_collectives_total", "Completed collectives and point-to-point operations.", |s| s.count as f64),
        ("towline_collective_bytes_total", "Their data, as nccl-tests counts a size.", |s| s.bytes as f64),
        ("towline_collective_bus_bytes_total", "What the bus had to carry, as nccl-tests counts.", |s| {
            s.bus_bytes as f64
        }),
        ("towline_collective_seconds_total", "From enqueueing to the last operation's end.", |s| {
            s.latency.sum() as f64 / 1e9
        }),
    ];
    for (name, help, read) in calls {
        let mut family = Family::new(&mut out, name, "counter", help);
        for (labels, comm) in &comms {
            for (key, stat) in &comm.calls {
                let more = format!(
                    "{labels},func=\"{}\",algorithm=\"{}\",protocol=\"{}\"",
                    escape(key.func.text()),
                    escape(key.algorithm.text()),
                    escape(key.protocol.text())
                );
                family.sample(&more, read(stat));
            }
        }
    }
    latency(&mut out, &comms);
    peers(&mut out, &comms);
    wires(&mut out, &comms);
    let mut family = Family::new(&mut out, "towline_profiler_dropped_total", "counter", "Events that found no room.");
    family.sample("", summary.dropped);
    out
}

type Comms<'a> = [(String, &'a super::summary::CommStat)];

fn latency(out: &mut String, comms: &Comms<'_>) {
    let mut family = Family::new(
        out,
        "towline_collective_latency_seconds",
        "gauge",
        "Quantiles of the latency since the process began.",
    );
    for (labels, comm) in comms {
        for (key, stat) in &comm.calls {
            for share in [0.5, 0.95, 0.99] {
                let more = format!(
                    "{labels},func=\"{}\",algorithm=\"{}\",protocol=\"{}\",quantile=\"{share}\"",
                    escape(key.func.text()),
                    escape(key.algorithm.text()),
                    escape(key.protocol.text())
                );
                family.sample(&more, stat.latency.percentile(share) as f64 / 1e9);
            }
        }
    }
}

fn peers(out: &mut String, comms: &Comms<'_>) {
    for (name, help) in [
        ("towline_step_total", "Transfers of the proxy."),
        ("towline_step_bytes_total", "Bytes of the proxy's transfers."),
    ] {
        let mut family = Family::new(out, name, "counter", help);
        for (labels, comm) in comms {
            for ((peer, send), stat) in &comm.peers {
                let value = if name == "towline_step_total" { stat.steps } else { stat.bytes };
                family.sample(&format!("{labels},peer=\"{peer}\",direction=\"{}\"", direction(*send)), value);
            }
        }
    }
    let help = "Where the time of the proxy's transfers went.";
    let mut family = Family::new(out, "towline_step_seconds_total", "counter", help);
    for (labels, comm) in comms {
        for ((peer, send), stat) in &comm.peers {
            let parts = [
                ("gpu", stat.gpu_ns),
                ("receiver", stat.receiver_ns),
                ("network", stat.network_ns),
                ("flush", stat.flush_ns),
            ];
            for (cause, ns) in parts {
                let more = format!("{labels},peer=\"{peer}\",direction=\"{}\",cause=\"{cause}\"", direction(*send));
                family.sample(&more, ns as f64 / 1e9);
            }
        }
    }
}

/// Puts out values of a rail, each with its further labels.
type ReadWire<'a> = dyn Fn(&super::summary::WireStat, &mut dyn FnMut(&str, f64)) + 'a;

fn wires(out: &mut String, comms: &Comms<'_>) {
    type Read = fn(&super::summary::WireStat) -> u64;
    let families: [(&'static str, &str, Read); 6] = [
        ("towline_wire_bytes_total", "Bytes on the wire, without resent ones.", |s| s.bytes),
        ("towline_wire_messages_total", "Messages on the wire.", |s| s.messages),
        ("towline_wire_parts_total", "Parts of messages on the wire.", |s| s.parts),
        ("towline_wire_resent_bytes_total", "Bytes that were on the wire before.", |s| s.resent_bytes),
        ("towline_wire_retransmissions_total", "Parts sent again.", |s| s.retransmissions),
        ("towline_wire_reconnects_total", "Streams or queue pairs re-established.", |s| s.reconnects),
    ];
    let each = |family: &mut Family<'_>, read: &ReadWire<'_>| {
        for (labels, comm) in comms {
            for ((peer, rail, send), stat) in &comm.wires {
                let more =
                    format!("{labels},peer=\"{peer}\",rail=\"{}\",direction=\"{}\"", rail.name(), direction(*send));
                read(stat, &mut |extra, value| family.sample(&format!("{more}{extra}"), value));
            }
        }
    };
    for (name, help, read) in families {
        let mut family = Family::new(out, name, "counter", help);
        each(&mut family, &|stat, put| put("", read(stat) as f64));
    }
    let help = "Waits of parts by cause, and their time on the wire.";
    let mut family = Family::new(out, "towline_wire_stall_seconds_total", "counter", help);
    each(&mut family, &|stat, put| {
        put(",cause=\"receiver\"", stat.wait_receiver_ns as f64 / 1e9);
        put(",cause=\"socket\"", stat.wait_socket_ns as f64 / 1e9);
        put(",cause=\"credit\"", stat.wait_credit_ns as f64 / 1e9);
        put(",cause=\"wire\"", stat.wire_ns as f64 / 1e9);
    });
}

fn direction(send: bool) -> &'static str {
    if send { "send" } else { "receive" }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Replaces the file with `text` in one step.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    // Who looks for the file's ending (node_exporter, `towline why`) never sees this one.
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir)?;
    }
    std::fs::write(&temporary, text)?;
    std::fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::event::CommInfo;

    #[test]
    fn names_with_quotes_do_not_break_the_format() {
        let mut summary = Summary::default();
        let name = "a \"quoted\"\nname\\".to_string();
        summary.comm(&CommInfo { context: 1, id: 2, name, nodes: 1, ranks: 2, rank: 0 });
        summary.comms.get_mut(&1).unwrap().peers.entry((1, true)).or_default().bytes = 7;
        let text = render(&summary);
        let line = text.lines().find(|line| line.starts_with("towline_step_bytes_total{")).unwrap();
        assert_eq!(
            line,
            r#"towline_step_bytes_total{comm="0x2",comm_name="a \"quoted\"\nname\\",rank="0",peer="1",direction="send"} 7"#
        );
    }

    #[test]
    fn the_file_is_replaced_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deeper/t.prom");
        replace(&path, "one").unwrap();
        replace(&path, "two").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
