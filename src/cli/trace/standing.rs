//! `towline trace report`'s first answer: from trace files to what every rank last did, for [`crate::trace::verdict`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Write;

use crate::trace::align::Correction;
use crate::trace::event::{Body, Record, state};
use crate::trace::perfetto::read::Process;
use crate::trace::rail::Rail;
use crate::trace::tracker::{Comm, Tracker};
use crate::trace::verdict::{Call, Finding, Gaps, Job, Route, Told, Whereabouts};

/// The communicators of all traces, and what was found out about each.
#[derive(Default)]
pub(super) struct Standing(Job);

impl Standing {
    /// One process's report.
    pub(super) fn add(&mut self, process: &Process, correction: &Correction) {
        let info = process.info.clone().unwrap_or_default();
        let place = Whereabouts { host: info.host, pid: info.pid, stamp: process.track, rank: info.rank };
        let end = process.records.last().map(|record| record.when).max(process.heartbeat).unwrap_or(0);
        let mut tracker = Tracker::new(usize::MAX);
        // What was aborted had not ended.
        let aborted = |record: &Record| record.body == Body::Stop && process.aborted.contains(&record.id);
        for record in process.records.iter().filter(|record| !aborted(record)) {
            tracker.apply(&Record { when: correction.apply(record.when), ..*record });
        }
        let mut waits = tracker.waits();
        let mut routes = routes(process, correction);
        for comm in process.comms.iter().filter(|comm| comm.rank >= 0) {
            let ended = process.ended.iter().find(|(context, _)| *context == comm.context).map(|&(_, when)| when);
            let until = correction.apply(ended.unwrap_or(end));
            // If the trace ends before the process, its silence means nothing.
            let beats = process.heartbeat.is_some() && process.cut.is_none() && ended.is_none();
            let seen = tracker.comms().get(&comm.context);
            let told = Told {
                calls: sorted(seen.into_iter().flat_map(Comm::calls)),
                transfers: sorted(seen.into_iter().flat_map(Comm::transfers)),
                exchanged: seen.map(|comm| comm.exchanged.clone()).unwrap_or_default(),
                gaps: gaps(process, correction),
                waits: waits.remove(&comm.context).unwrap_or_default(),
                routes: routes.remove(&comm.context).unwrap_or_default(),
                until,
                heard: beats.then_some(until),
                ended: ended.map(|_| until),
                ..Told::default()
            };
            self.0.add(&place, comm, told);
        }
    }

    /// The reasons for which communicators that stand still wait.
    pub(super) fn findings(self) -> Vec<Finding> {
        self.0.findings()
    }
}

/// When events are missing: some were dropped, or the trace ends before the process does, or begins after it.
fn gaps(process: &Process, correction: &Correction) -> Gaps {
    let end = process.dropped_at.max(process.cut);
    let begin = process.records.first().filter(|_| process.begins_late).map(|record| correction.apply(record.when));
    end.map_or(Gaps { calls: begin, ..Gaps::default() }, |end| Gaps::all(correction.apply(end)))
}

fn sorted<'a>(calls: impl Iterator<Item = &'a Call>) -> Vec<Call> {
    let mut calls: Vec<Call> = calls.copied().collect();
    calls.sort_by_key(|call| call.entered);
    calls
}

/// The key for which NCCL has one connection in each direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Way {
    context: u64,
    peer: i32,
    channel: u8,
    /// Sends and receives have connections of their own.
    is_transfer: bool,
}

/// The reported data of a connection.
#[derive(Debug, Default)]
struct Over {
    names: BTreeSet<String>,
    ways: BTreeSet<Way>,
    route: Route,
}

/// By communicator: the connections by which the rank sends to each other one or receives from it.
fn routes(process: &Process, correction: &Correction) -> BTreeMap<u64, Vec<Route>> {
    let (mut transfers, mut operations, mut steps) = (HashSet::new(), HashMap::new(), HashMap::new());
    let mut over: BTreeMap<_, Over> = BTreeMap::new();
    // Receives that are outstanding, and since when.
    let mut awaited: HashMap<u64, (Way, u64)> = HashMap::new();
    // The two ends of a connection can be compared if all its data is reported.
    let is_whole = !process.begins_late && process.cut.is_none() && process.dropped == 0;
    for Record { id, parent, context, body, when, .. } in &process.records {
        match body {
            Body::P2p(_) => drop(transfers.insert(*id)),
            Body::ProxyOp(op) => {
                let is_transfer = transfers.contains(parent);
                operations.insert(*id, Way { context: *context, peer: op.peer, channel: op.channel, is_transfer });
            }
            Body::ProxyStep { .. } => drop(operations.get(parent).and_then(|&way| steps.insert(*id, way))),
            Body::State { state: state::STEP_RECV_WAIT, .. } => {
                awaited.extend(steps.get(id).map(|&way| (*id, (way, correction.apply(*when)))));
            }
            Body::Stop if process.aborted.contains(id) => {}
            Body::State { .. } | Body::Stop => drop(awaited.remove(id)),
            Body::NetTowline(part) => {
                let Some(&way) = steps.get(parent) else { continue };
                let Over { names, ways, route } =
                    over.entry((way.context, way.peer, part.link, part.send)).or_default();
                ways.insert(way);
                if let Some((Rail::Interface(name), ..)) = process.links.rail(body) {
                    names.insert(name.text().to_owned());
                }
                route.moved = correction.apply(*when);
                // What was sent twice arrives once, the first time or the second.
                route.bytes += if part.send && part.resend { 0 } else { part.length };
            }
            _ => {}
        }
    }
    let mut routes: BTreeMap<u64, Vec<Route>> = BTreeMap::new();
    for ((context, rank, link, send), Over { names, ways, route }) in over {
        let (number, interfaces) = (if is_whole { link } else { 0 }, names.into_iter().collect());
        let polled = awaited.values().filter(|(way, _)| ways.contains(way)).map(|&(_, since)| since).min();
        routes.entry(context).or_default().push(Route { rank: Some(rank), send, interfaces, number, polled, ..route });
    }
    routes
}

/// A line for each communicator that stands still.
pub(super) fn render(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let _ = writeln!(text, "  {}", finding.line());
    }
    if text.is_empty() { text } else { format!("What the job waits for\n{text}\n") }
}

#[cfg(test)]
mod tests {
    use crate::trace::align::align;
    use crate::trace::event::{Coll, CommInfo, NetPart, P2p, ProxyOp};
    use crate::trace::names::Name;
    use crate::trace::perfetto::file::TraceFile;
    use crate::trace::perfetto::read::read;
    use crate::trace::perfetto::{Emitter, ProcessInfo};

    use super::*;

    const S: u64 = 1_000_000_000;

    /// Two ranks enter AllReduce #0 and complete it; then those of `enter` enter #1 at 2 s, in which their receives
    /// wait. At 20 s the communicator is aborted, or else the files end.
    fn traces(enter: &[i32], abort: bool, limit: u64) -> Vec<Process> {
        let dir = tempfile::tempdir().unwrap();
        let of_rank = |rank: i32| {
            let file = TraceFile::create(dir.path(), "t", limit).unwrap();
            let path = file.path().to_owned();
            let process = ProcessInfo {
                host: format!("node{rank}"),
                pid: 100 + rank,
                rank: Some(rank + 4),
                ..ProcessInfo::default()
            };
            let mut emitter = Emitter::new(file, &process, rank as u64, 0);
            let (context, name) = (1, "dp".to_owned());
            emitter.comm(
                &CommInfo { context, id: 0x77, name, rank, ranks: 2, nodes: 2, gpu: "3 at 0000:3b:00.0".into() },
                0,
            );
            let mut apply = |when, id, parent, body| {
                emitter.advance(when);
                emitter.apply(&Record { when, id, parent, context, rank, thread: 0, body });
            };
            let call = |seq| Body::Coll(Coll { seq, count: 8, func: Name::from("AllReduce"), ..Coll::default() });
            apply(S, 10, 0, call(0));
            apply(S + 1, 10, 0, Body::Stop);
            if enter.contains(&rank) {
                apply(2 * S, 20, 0, call(1));
                apply(2 * S + 1, 20, 0, Body::Stop);
                apply(2 * S + 2, 21, 20, Body::ProxyOp(ProxyOp { peer: 1 - rank, ..ProxyOp::default() }));
                apply(2 * S + 3, 22, 21, Body::ProxyStep { step: 0 });
                apply(2 * S + 4, 22, 0, Body::State { state: state::STEP_RECV_WAIT, steps: 0, arg: 0 });
            }
            (3..=20).for_each(|second| emitter.advance(second * S));
            if abort {
                emitter.comm_ends(context, 20 * S);
            }
            emitter.file().flush().unwrap();
            read(&std::fs::read(path).unwrap()).processes.remove(0)
        };
        (0..2).map(of_rank).collect()
    }

    fn said(processes: Vec<Process>) -> String {
        let clocks: Vec<_> = processes
            .iter()
            .map(|process| crate::trace::align::Clock { info: process.info.clone().unwrap(), arrows: Vec::new() })
            .collect();
        let mut standing = Standing::default();
        for (process, correction) in processes.iter().zip(align(&clocks)) {
            standing.add(process, &correction);
        }
        render(&standing.findings())
    }

    #[test]
    fn the_rank_that_did_not_enter_is_named_also_after_an_abort() {
        for abort in [false, true] {
            let text = said(traces(&[0], abort, 1 << 20));
            let expected = "dp (0x77): rank 0 (node0, process 100, GPU 3 at 0000:3b:00.0, global rank 4) has been in AllReduce #1 for 18 s, waiting for data; rank 1 (node1, process 101, \
                            GPU 3 at 0000:3b:00.0, global rank 5) has not \
                            entered it: its last call was AllReduce #0, 19 s ago, completed";
            assert!(text.contains(expected), "aborted: {abort}: {text}");
        }
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_a_circle() {
        assert!(said(traces(&[0, 1], false, 1 << 20)).contains("the ranks wait for each other"));
    }

    /// Rank 0 has sent two messages over a connection, and one has arrived at rank 1, which waits for data on channel
    /// 0.
    #[test]
    fn a_circle_is_broken_only_by_a_connection_on_which_a_receive_waits() {
        let of_channel = |channel, is_transfer: bool| {
            let mut processes = traces(&[0, 1], false, 1 << 20);
            for (rank, process) in (0..).zip(&mut processes) {
                let context = process.records[0].context;
                let record = |id, parent, body| Record { when: S, id, parent, context, rank, thread: 0, body };
                let part = NetPart { link: 5, length: 1000, send: rank == 0, ..NetPart::default() };
                let call = if is_transfer { Body::P2p(P2p::default()) } else { Body::Group };
                let mut records = vec![
                    record(1000, 0, call),
                    record(1001, 1000, Body::ProxyOp(ProxyOp { peer: 1 - rank, channel, ..ProxyOp::default() })),
                    record(1002, 1001, Body::ProxyStep { step: 0 }),
                ];
                let sent = if rank == 0 { 2 } else { 1 };
                records.extend((0..sent).map(|number| record(1003 + number, 1002, Body::NetTowline(part))));
                records.push(record(1002, 0, Body::Stop));
                process.records.splice(0..0, records);
            }
            said(processes)
        };
        let text = of_channel(0, false);
        assert!(text.contains("global rank 4) sent bytes to rank 1 ("), "{text}");
        assert!(text.contains("that rank 1 has not taken for 19 s"), "{text}");
        for (channel, is_transfer) in [(1, false), (0, true)] {
            let text = of_channel(channel, is_transfer);
            assert!(text.contains("the ranks wait for each other"), "the message may be in its kernel: {text}");
        }
    }

    #[test]
    fn a_job_in_which_all_calls_are_complete_waits_for_nobody() {
        assert_eq!(said(traces(&[], false, 1 << 20)), "");
        assert_eq!(said(traces(&[], true, 1 << 20)), "");
    }

    #[test]
    fn a_file_at_its_limit_says_so_and_its_silence_is_no_finding() {
        let processes = traces(&[0], false, 2 * 4096 + 1000);
        assert!(processes.iter().all(|process| process.cut.is_some()), "{processes:?}");
        let text = said(processes);
        assert!(
            !text.contains("sign of life") && !text.contains("has not entered"),
            "what it did is not in it: {text}"
        );
    }

    #[test]
    fn a_process_whose_events_were_dropped_is_not_named_for_the_lack_of_them() {
        let said = |dropped_at| {
            let mut processes = traces(&[0], false, 1 << 20);
            processes[1].dropped_at = Some(dropped_at);
            said(processes)
        };
        let text = said(S / 2);
        assert!(text.contains("global rank 5) has not entered it"), "before its last call: {text}");
        let text = said(3 * S);
        assert!(!text.contains("has not entered") && text.contains("global rank 5) has gaps"), "{text}");
    }
}
