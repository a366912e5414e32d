//! The figures for Prometheus: its text format, in a file for node_exporter's textfile collector or over HTTP.
//!
//! Counters run since the process began; Prometheus computes rates and shares. The number of series is bounded:
//! communicators are counted together by their names, peers by their hosts, what the wire carried by interface, and
//! calls by function beyond [`FUNCTIONS`]. The file is replaced by an atomic rename, so that a reader never sees half
//! of it.

mod family;
mod labels;
pub(super) mod server;

pub(crate) use labels::Labels;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;
use std::time::SystemTime;

use family::{Family, Page};
use labels::escape;

use super::names::Name;
use super::rail::Rail;
use super::summary::{CallStat, CommStat, Histogram, OTHERS, PeerStat, Summary, UNNAMED, WireStat};

/// The family that shows whether the process runs.
const UP: &str = "towline_process_up";

/// Functions of groups of communicators that have series of their own, those that were called first: each has a
/// histogram, and counters for each algorithm and protocol, some 34 series.
const FUNCTIONS: usize = 40;

/// The input of the figures.
pub(crate) struct Figures<'a> {
    /// Which process this is.
    pub labels: &'a Labels,
    /// The counters.
    pub summary: &'a Summary,
    /// For how many seconds the oldest call of a group of communicators has been open; `None` when that is not known.
    pub oldest_open: Option<&'a BTreeMap<String, f64>>,
    /// Whether each peer gets series of its own.
    pub peers: bool,
    /// Whether the process continues.
    pub up: bool,
}

/// All figures in Prometheus's text format.
pub(crate) fn render(figures: &Figures<'_>) -> String {
    let mut page = Page::new(figures.labels);
    let mut groups: BTreeMap<&str, CommStat> = BTreeMap::new();
    for comm in figures.summary.comms.values() {
        let name = if comm.group.is_empty() { UNNAMED } else { &comm.group };
        groups.entry(name).or_default().add(comm);
    }
    let oldest_open: Option<Vec<f64>> =
        figures.oldest_open.map(|open| groups.keys().map(|&name| open.get(name).copied().unwrap_or(0.0)).collect());
    let groups: Groups = groups.into_iter().map(|(name, stat)| (format!("comm=\"{}\"", escape(name)), stat)).collect();
    let mut info = page.family(UP, "gauge", "1 while the process runs, 0 when it has ended in order.");
    info.sample(&format!("version=\"{}\"", env!("CARGO_PKG_VERSION")), u8::from(figures.up));
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let help = "When these figures were written, in seconds since 1970: the file of a killed process is not renewed.";
    page.family("towline_metrics_timestamp_seconds", "gauge", help).sample("", now.as_secs());
    gpus(&mut page, figures.summary);
    calls(&mut page, &groups);
    state(&mut page, &groups, oldest_open.as_deref());
    steps(&mut page, &groups);
    if figures.peers {
        peers(&mut page, &groups);
    }
    wires(&mut page, &groups);
    hosts(&mut page, figures.summary);
    let mut dropped =
        page.family("towline_profiler_dropped_total", "counter", "Events dropped for lack of buffer space.");
    dropped.sample("", figures.summary.dropped);
    page.text
}

/// The series with which all series of the process are joined to find its GPU. A process has as many as its host at
/// most.
fn gpus(page: &mut Page<'_>, summary: &Summary) {
    let mut family = page.family("towline_gpu_info", "gauge", "1 for each GPU of the process.");
    summary.gpus.iter().for_each(|gpu| family.sample(&format!("gpu=\"{}\"", escape(gpu)), 1));
}

/// By their labels.
type Groups = Vec<(String, CommStat)>;

/// By the labels of a group and a function: the calls by algorithm and protocol.
type Functions = BTreeMap<String, BTreeMap<(Name, Name), CallStat>>;

/// The functions of all groups. Later ones are counted together, so that none loses its series to another one.
fn functions(groups: &Groups) -> Functions {
    let all = || groups.iter().flat_map(|(labels, group)| group.calls.iter().map(move |call| (labels.as_str(), call)));
    let mut first: BTreeMap<(&str, Name), u64> = BTreeMap::new();
    for (labels, (key, stat)) in all() {
        let known = first.entry((labels, key.func)).or_insert(stat.first);
        *known = stat.first.min(*known);
    }
    let mut first: Vec<(u64, (&str, Name))> = first.into_iter().map(|(function, first)| (first, function)).collect();
    first.sort_unstable();
    let early: BTreeSet<(&str, Name)> = first.into_iter().take(FUNCTIONS).map(|(_, function)| function).collect();
    let mut functions = Functions::new();
    for (labels, (key, stat)) in all() {
        let labels = if early.contains(&(labels, key.func)) {
            format!("{labels},func=\"{}\"", escape(key.func.text()))
        } else {
            format!("comm=\"{OTHERS}\",func=\"{OTHERS}\"")
        };
        functions.entry(labels).or_default().entry((key.algorithm, key.protocol)).or_default().add(stat);
    }
    functions
}

fn calls(page: &mut Page<'_>, groups: &Groups) {
    type Read = fn(&CallStat) -> u64;
    let functions = functions(groups);
    let calls: [(&'static str, &str, Read); 3] = [
        ("towline_collectives_total", "Completed collectives and point-to-point operations.", |stat| stat.count),
        ("towline_collective_bytes_total", "Their data, as nccl-tests counts a size.", |stat| stat.bytes),
        ("towline_collective_bus_bytes_total", "Bytes that the bus had to carry, as nccl-tests counts them.", |stat| {
            stat.bus_bytes
        }),
    ];
    for (name, help, read) in calls {
        let mut family = page.family(name, "counter", help);
        for (labels, calls) in &functions {
            for ((algorithm, protocol), stat) in calls {
                let (algorithm, protocol) = (escape(algorithm.text()), escape(protocol.text()));
                family.sample(&format!("{labels},algorithm=\"{algorithm}\",protocol=\"{protocol}\""), read(stat));
            }
        }
    }
    let help = "From enqueueing to the last operation's end.";
    let mut family = page.family("towline_collective_duration_seconds", "histogram", help);
    for (labels, calls) in &functions {
        let mut durations = Histogram::default();
        calls.values().for_each(|stat| durations.merge(&stat.latency));
        family.histogram(labels, &durations);
    }
}

fn state(page: &mut Page<'_>, groups: &Groups, oldest_open: Option<&[f64]>) {
    if let Some(oldest_open) = oldest_open {
        let help = "For how long the oldest call that has not ended has been open; 0 when there is none.";
        let mut family = page.family("towline_oldest_open_collective_seconds", "gauge", help);
        groups.iter().zip(oldest_open).for_each(|((labels, _), open)| family.sample(labels, open));
    }
    let help =
        "Collectives that this rank has entered: of the ranks with the same communicators, one with fewer is behind.";
    let mut family = page.family("towline_last_sequence", "gauge", help);
    for (labels, group) in groups {
        family.sample(&format!("{labels},communicators=\"{:x}\"", group.ids), group.entered);
    }
}

/// The transfers of each group in each direction, over all peers.
fn steps(page: &mut Page<'_>, groups: &Groups) {
    let of = |(labels, group): &(String, CommStat), send: bool| {
        let mut all = PeerStat::default();
        group.peers.iter().filter(|((_, own), _)| *own == send).for_each(|(_, stat)| all.add(stat));
        (format!("{labels},direction=\"{}\"", direction(send)), all)
    };
    let all = groups.iter().flat_map(|group| [of(group, true), of(group, false)]);
    let all: Vec<(String, PeerStat)> = all.filter(|(_, stat)| stat.steps > 0).collect();
    let mut family = page.family("towline_step_total", "counter", "Transfers of the proxy.");
    all.iter().for_each(|(labels, stat)| family.sample(labels, stat.steps));
    let mut family = page.family("towline_step_bytes_total", "counter", "Bytes of the proxy's transfers.");
    all.iter().for_each(|(labels, stat)| family.sample(labels, stat.bytes));
    let help = "Where the time of the proxy's transfers went.";
    let mut family = page.family("towline_step_seconds_total", "counter", help);
    all.iter().for_each(|(labels, stat)| causes(&mut family, labels, stat));
}

/// The same by peer.
fn peers(page: &mut Page<'_>, groups: &Groups) {
    let of = |(labels, group): &(String, CommStat)| {
        let peers = group.peers.iter();
        let labels = peers.map(|((peer, send), stat)| {
            (format!("{labels},peer=\"{peer}\",direction=\"{}\"", direction(*send)), *stat)
        });
        labels.collect::<Vec<_>>()
    };
    let all: Vec<(String, PeerStat)> = groups.iter().flat_map(of).collect();
    let help = "Bytes of the proxy's transfers, by peer.";
    let mut family = page.family("towline_peer_step_bytes_total", "counter", help);
    all.iter().for_each(|(labels, stat)| family.sample(labels, stat.bytes));
    let help = "Where the time of the proxy's transfers went, by peer.";
    let mut family = page.family("towline_peer_step_seconds_total", "counter", help);
    all.iter().for_each(|(labels, stat)| causes(&mut family, labels, stat));
}

/// A series for each thing that transfers waited for.
fn causes(family: &mut Family<'_>, labels: &str, stat: &PeerStat) {
    let parts =
        [("gpu", stat.gpu_ns), ("receiver", stat.receiver_ns), ("network", stat.network_ns), ("flush", stat.flush_ns)];
    for (cause, ns) in parts {
        family.sample(&format!("{labels},cause=\"{cause}\""), ns as f64 / 1e9);
    }
}

fn wires(page: &mut Page<'_>, groups: &Groups) {
    let mut all: BTreeMap<(Rail, bool), WireStat> = BTreeMap::new();
    for ((_, rail, send), stat) in groups.iter().flat_map(|(_, group)| &group.wires) {
        all.entry((*rail, *send)).or_default().add(stat);
    }
    type Read = fn(&WireStat) -> u64;
    let families: [(&'static str, &str, Read); 6] = [
        ("towline_wire_bytes_total", "Bytes on the wire, without resent ones.", |s| s.bytes),
        ("towline_wire_messages_total", "Messages on the wire.", |s| s.messages),
        ("towline_wire_parts_total", "Parts of messages on the wire.", |s| s.parts),
        ("towline_wire_resent_bytes_total", "Bytes that were on the wire before.", |s| s.resent_bytes),
        ("towline_wire_retransmissions_total", "Parts sent again.", |s| s.retransmissions),
        ("towline_wire_reconnects_total", "Streams or queue pairs re-established.", |s| s.reconnects),
    ];
    let labels = |rail: Rail, send| format!("interface=\"{}\",direction=\"{}\"", escape(&rail.name()), direction(send));
    for (name, help, read) in families {
        let mut family = page.family(name, "counter", help);
        for (&(rail, send), stat) in &all {
            family.sample(&labels(rail, send), read(stat));
        }
    }
    let help = "Waits of parts by cause, and their time on the wire.";
    let mut family = page.family("towline_wire_stall_seconds_total", "counter", help);
    for (&(rail, send), stat) in &all {
        let labels = labels(rail, send);
        let mut put = |cause, ns| family.sample(&format!("{labels},cause=\"{cause}\""), ns as f64 / 1e9);
        put("receiver", stat.wait_receiver_ns);
        put("socket", stat.wait_socket_ns);
        put("credit", stat.wait_credit_ns);
        put("wire", stat.wire_ns);
    }
}

fn hosts(page: &mut Page<'_>, summary: &Summary) {
    let help = "Bytes on the wire, without resent ones, by the host at the other end.";
    let mut family = page.family("towline_peer_host_bytes_total", "counter", help);
    for (host, bytes) in summary.links.hosts().iter().zip(&summary.hosts) {
        for send in [true, false].into_iter().filter(|&send| bytes[usize::from(send)] > 0) {
            let labels = format!("peer_host=\"{}\",direction=\"{}\"", escape(host), direction(send));
            family.sample(&labels, bytes[usize::from(send)]);
        }
    }
}

fn direction(send: bool) -> &'static str {
    if send { "send" } else { "receive" }
}

/// Whether the process of a file of figures has ended in order.
pub(crate) fn has_ended(path: &Path) -> bool {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().any(|line| line.starts_with(UP) && line.ends_with(" 0"))
}

/// Replaces the file with `text` in one step.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    // A program that searches by the file's ending (node_exporter, `towline why`) never finds this one.
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir)?;
    }
    std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, path)).inspect_err(|_| {
        let _ = std::fs::remove_file(&temporary);
    })
}

/// Writes over the file: on a full disk there is no room for a second one. A reader may see half of it.
pub(crate) fn overwrite(path: &Path, text: &str) -> io::Result<()> {
    let mut file = std::fs::File::options().write(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::event::{Body, Coll, CommInfo, ProxyOp, Record};
    use crate::trace::names::Name;
    use crate::trace::summary::CallKey;

    fn comm(context: u64, name: &str) -> CommInfo {
        CommInfo { context, id: context, name: name.into(), nodes: 1, ranks: 2, ..CommInfo::default() }
    }

    fn text(summary: &Summary) -> String {
        let labels = Labels::new("node4", "7", |name| (name == "RANK").then(|| "19".into()));
        render(&Figures { labels: &labels, summary, oldest_open: None, peers: false, up: true })
    }

    #[test]
    fn names_with_quotes_do_not_break_the_format() {
        let mut summary = Summary::default();
        summary.comm(&comm(1, "a \"quoted\"\nname\\"));
        *summary.comms.get_mut(&1).unwrap().peers.entry((1, true)).or_default() =
            PeerStat { steps: 1, bytes: 7, ..PeerStat::default() };
        let text = text(&summary);
        let line = text.lines().find(|line| line.starts_with("towline_step_bytes_total{")).unwrap();
        assert_eq!(
            line,
            r#"towline_step_bytes_total{host="node4",pid="7",rank="19",comm="a \"quoted\"\nname\\",direction="send"} 7"#
        );
    }

    #[test]
    fn each_gpu_is_told_once() {
        let mut summary = Summary::default();
        for (context, gpu) in [(1, "0 at 0000:3b:00.0"), (2, "1 at 0000:5e:00.0"), (3, "0 at 0000:3b:00.0"), (4, "")] {
            summary.comm(&CommInfo { gpu: gpu.into(), ..comm(context, "dp") });
        }
        let text = text(&summary);
        let told: Vec<&str> = text.lines().filter(|line| line.starts_with("towline_gpu_info{")).collect();
        let expected = ["0 at 0000:3b:00.0", "1 at 0000:5e:00.0"]
            .map(|gpu| format!(r#"towline_gpu_info{{host="node4",pid="7",rank="19",gpu="{gpu}"}} 1"#));
        assert_eq!(told, expected);
    }

    #[test]
    fn a_thousand_peers_on_eight_rails_make_no_more_than_three_thousand_series() {
        let mut summary = Summary::default();
        summary.comm(&comm(99, "world"));
        let world = summary.comms.get_mut(&99).unwrap();
        for peer in 0..1000 {
            for send in [true, false] {
                world.peers.entry((peer, send)).or_default().steps = 1;
                for rail in 0..8 {
                    let rail = Rail::Interface(Name::from(format!("eth{rail}").as_str()));
                    world.wires.entry((peer, rail, send)).or_default().bytes = 1;
                }
            }
            summary.links.learn(peer as u64, true, Vec::new(), &format!("node{peer}"));
        }
        summary.hosts = vec![[1, 1]; summary.links.hosts().len()];
        // Each group has transfers with others, and all functions.
        for number in 0..40 {
            summary.comm(&comm(number, &format!("group {number}")));
            let own = summary.comms.get_mut(&number).unwrap();
            for send in [true, false] {
                own.peers.entry((0, send)).or_default().steps = 1;
            }
            for func in ["AllReduce", "AllGather", "ReduceScatter", "Send", "Recv"] {
                for algorithm in ["RING", "TREE"] {
                    for protocol in ["LL", "LL128", "SIMPLE"] {
                        let key = CallKey { func: func.into(), algorithm: algorithm.into(), protocol: protocol.into() };
                        own.calls.entry(key).or_default().latency.add(5000);
                    }
                }
            }
        }
        let text = text(&summary);
        let groups = text.lines().filter(|line| line.starts_with("towline_last_sequence{")).count();
        assert_eq!(groups, 17, "as many as there may be");
        let series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(series.len() <= 3000, "{} series", series.len());
        assert!(text.contains(
            r#"towline_wire_bytes_total{host="node4",pid="7",rank="19",interface="eth3",direction="send"} 1000"#
        ));
        // No two lines report the same series.
        let names: std::collections::HashSet<&str> =
            series.iter().filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect();
        assert_eq!(names.len(), series.len());
    }

    /// The value of each series.
    fn series(text: &str) -> BTreeMap<String, f64> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines
            .filter_map(|line| line.rsplit_once(' '))
            .map(|(name, value)| (name.into(), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn no_series_goes_back_jumps_or_disappears_when_communicators_end_and_are_put_together() {
        let mut summary = Summary::default();
        let mut before = BTreeMap::new();
        for number in 0..2000 {
            let name = ["dp", "tp", ""][number as usize % 3];
            let gpu = if number == 0 { "0 at 0000:3b:00.0" } else { "1 at 0000:5e:00.0" };
            summary.comm(&CommInfo { gpu: gpu.into(), ..comm(number, name) });
            let coll = Coll { func: "AllReduce".into(), ..Coll::default() };
            for (id, parent, body) in [
                (1, 0, Body::Coll(coll)),
                (2, 1, Body::ProxyOp(ProxyOp { peer: 1, send: true, ..ProxyOp::default() })),
                (3, 2, Body::ProxyStep { step: 0 }),
                (3, 0, Body::Stop),
                (2, 0, Body::Stop),
                (1, 0, Body::Stop),
            ] {
                summary.apply(&Record { when: number, id, parent, context: number, rank: 0, thread: 0, body });
            }
            summary.comm_ends(number, number + 1);
            // This label is another one with each communicator.
            let without = |name: String| name.split(",communicators=").next().unwrap().to_owned();
            let now: BTreeMap<String, f64> =
                series(&text(&summary)).into_iter().map(|(name, value)| (without(name), value)).collect();
            for (name, was) in &before {
                assert!(now.get(name).is_some_and(|is| is >= was), "{name} was {was} and is {:?}", now.get(name));
            }
            if number % 500 == 499 {
                for name in ["towline_last_sequence", "towline_step_total", "towline_collectives_total"] {
                    for (rest, comm) in ["dp", "tp", "unnamed"].into_iter().enumerate() {
                        let own = |it: &str| it.starts_with(name) && it.contains(&format!("comm=\"{comm}\""));
                        let sum: f64 = now.iter().filter(|(it, _)| own(it)).map(|(_, value)| value).sum();
                        let made = (0..=number).filter(|number| *number as usize % 3 == rest).count();
                        assert_eq!(sum, made as f64, "{name} of {comm}");
                    }
                }
            }
            before = now;
        }
        assert!(summary.comms.len() < 600);
    }

    #[test]
    fn functions_beyond_a_number_are_counted_together_and_earlier_ones_keep_their_series() {
        let mut summary = Summary::default();
        summary.comm(&comm(1, "dp"));
        let mut before = BTreeMap::new();
        for number in (0..FUNCTIONS + 10).rev() {
            let coll = Coll { func: format!("Function{number:02}").as_str().into(), ..Coll::default() };
            for body in [Body::Coll(coll), Body::Stop] {
                summary.apply(&Record { when: 1, id: 1, parent: 0, context: 1, rank: 0, thread: 0, body });
            }
            summary.finish(1);
            let now = series(&text(&summary));
            for (name, was) in &before {
                assert!(now.get(name).is_some_and(|is| is >= was), "{name} was {was} and is {:?}", now.get(name));
            }
            before = now;
        }
        for name in ["towline_collectives_total", "towline_collective_duration_seconds_count"] {
            let of = |(series, value): (&String, &f64)| series.starts_with(name).then_some(*value);
            let values: Vec<f64> = before.iter().filter_map(of).collect();
            assert_eq!((values.len(), values.iter().sum::<f64>()), (FUNCTIONS + 1, (FUNCTIONS + 10) as f64), "{name}");
            let others =
                |series: &&String| series.starts_with(name) && series.contains("comm=\"others\",func=\"others\"");
            assert_eq!(before.keys().find(others).map(|series| before[series]), Some(10.0), "{name}");
        }
    }

    #[test]
    fn ranks_in_the_same_communicators_are_known_by_one_number() {
        let known = |ids: &mut dyn Iterator<Item = u64>, end: bool| {
            let mut summary = Summary::default();
            for id in ids {
                summary.comm(&comm(id, "dp"));
                if end {
                    summary.comm_ends(id, 1);
                }
            }
            let text = text(&summary);
            let line = text.lines().find(|line| line.starts_with("towline_last_sequence{")).unwrap();
            line.split_once("communicators=").unwrap().1.to_owned()
        };
        assert_eq!(
            known(&mut (1..=600), true),
            known(&mut (1..=600).rev(), false),
            "also when old ones are put together"
        );
        assert_ne!(known(&mut (1..=600), true), known(&mut (1..=599), true));
    }

    #[test]
    fn what_is_open_is_told_of_each_group_and_its_end_as_nothing() {
        let mut summary = Summary::default();
        summary.comm(&comm(1, "dp"));
        summary.comm(&comm(2, "tp"));
        let labels = Labels::new("node4", "7", |_| None);
        let open = BTreeMap::from([("dp".to_owned(), 7.5)]);
        let figures = Figures { labels: &labels, summary: &summary, oldest_open: Some(&open), peers: false, up: true };
        let told = series(&render(&figures));
        let name = "towline_oldest_open_collective_seconds";
        let of = |comm: &str| told[&format!("{name}{{host=\"node4\",pid=\"7\",comm=\"{comm}\"}}")];
        assert_eq!((of("dp"), of("tp")), (7.5, 0.0));
    }

    #[test]
    fn what_belongs_to_no_known_communicator_is_not_without_a_name() {
        let mut summary = Summary::default();
        for (id, parent, body) in [
            (2, 0, Body::ProxyOp(ProxyOp { peer: 1, send: true, ..ProxyOp::default() })),
            (3, 2, Body::ProxyStep { step: 0 }),
            (3, 0, Body::Stop),
        ] {
            summary.apply(&Record { when: 1, id, parent, context: 0, rank: 0, thread: 0, body });
        }
        let text = text(&summary);
        assert!(text.contains(r#"comm="unnamed",direction="send"} 1"#) && !text.contains("comm=\"\""), "{text}");
    }

    #[test]
    fn durations_are_a_histogram() {
        let mut summary = Summary::default();
        summary.comm(&comm(1, "dp"));
        let key = CallKey { func: "AllReduce".into(), algorithm: Name::NONE, protocol: Name::NONE };
        let stat = summary.comms.get_mut(&1).unwrap().calls.entry(key).or_default();
        [20_000, 200_000, 20_000_000_000].into_iter().for_each(|ns| stat.latency.add(ns));
        let text = text(&summary);
        let told = |ending: &str| {
            let line = text
                .lines()
                .find(|line| line.starts_with("towline_collective_duration_seconds_") && line.contains(ending));
            line.and_then(|line| line.rsplit_once(' ')).unwrap_or_else(|| panic!("{ending} in {text}")).1.to_owned()
        };
        assert_eq!(
            [told("le=\"0.00001\""), told("le=\"0.0003\""), told("le=\"10\""), told("le=\"+Inf\"")],
            ["0", "2", "2", "3"]
        );
        assert_eq!((told("seconds_count"), told("seconds_sum")), ("3".into(), "20.00022".into()));
    }

    #[test]
    fn a_process_that_has_ended_is_known_by_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.prom");
        let (labels, summary) = (Labels::new("node4", "7", |_| None), Summary::default());
        for up in [true, false] {
            let figures = Figures { labels: &labels, summary: &summary, oldest_open: None, peers: false, up };
            replace(&path, &render(&figures)).unwrap();
            assert_eq!(has_ended(&path), !up);
        }
        assert!(!has_ended(&dir.path().join("none")));
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
