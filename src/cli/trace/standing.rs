//! `towline trace report`'s first answer: from trace files to what every rank last did, for [`towline::trace::verdict`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write;

use towline::trace::align::Correction;
use towline::trace::event::{Body, Record, state};
use towline::trace::perfetto::read::Process;
use towline::trace::verdict::{Arguments, Call, Communicator, Key, Member, On, STUCK_NS, Wait, judge, name_of_call};

/// The communicators of all traces, and what was found out about each.
#[derive(Default)]
pub(super) struct Standing {
    comms: BTreeMap<u64, Communicator>,
    /// By communicator and rank: when it left, with nothing open.
    left: HashMap<(u64, i32), u64>,
}

impl Standing {
    /// What one process tells.
    pub(super) fn add(&mut self, process: &Process, correction: &Correction) {
        let info = process.info.clone().unwrap_or_default();
        let end = process.records.last().map(|record| record.when).max(process.heartbeat).unwrap_or(0);
        let mut open = Open::of(process, correction);
        for comm in process.comms.iter().filter(|comm| comm.rank >= 0) {
            let entry = self.comms.entry(comm.id).or_default();
            let ended = process.ended.iter().find(|(context, _)| *context == comm.context).map(|&(_, when)| when);
            let calls = open.calls.remove(&comm.context).unwrap_or_default();
            let until = correction.apply(ended.unwrap_or(end));
            entry.now = entry.now.max(until);
            entry.title = if comm.name.is_empty() {
                format!("{:#x}", comm.id)
            } else {
                format!("{} ({:#x})", comm.name, comm.id)
            };
            entry.ranks = entry.ranks.max(comm.ranks);
            // Where the trace ends before the process, its silence says nothing.
            let beats = process.heartbeat.is_some() && process.cut.is_none() && ended.is_none();
            if ended.is_some() && !calls.iter().any(|call| call.open) {
                self.left.insert((comm.id, comm.rank), until);
            }
            entry.members.insert(
                comm.rank,
                Member {
                    host: info.host.clone(),
                    pid: info.pid,
                    left: false,
                    heard: beats.then_some(until),
                    calls,
                    waits: open.waits.remove(&comm.context).unwrap_or_default(),
                    elsewhere: None,
                },
            );
        }
    }

    /// The communicators that stand still: each with its name and the verdict in words.
    pub(super) fn verdicts(mut self) -> Vec<(String, String)> {
        self.link();
        let explained = |comm: &Communicator| Some((comm.title.clone(), comm.explain(&judge(comm)?)));
        self.comms.values().filter_map(explained).collect()
    }

    /// Of each process, in which other communicators it is stuck.
    fn link(&mut self) {
        let mut stuck: HashMap<(String, i32), Vec<(u64, String)>> = HashMap::new();
        for (&id, comm) in &self.comms {
            for member in comm.members.values() {
                let waited = |call: &Call| comm.now.saturating_sub(call.entered);
                let call = member.calls.iter().find(|call| call.open && waited(call) >= STUCK_NS);
                if let Some(call) = call {
                    let what = format!("{} of {}", name_of_call(call.key), comm.title);
                    stuck.entry((member.host.clone(), member.pid)).or_default().push((id, what));
                }
            }
        }
        for (&id, comm) in &mut self.comms {
            for (&rank, member) in &mut comm.members {
                // All leave together when a job ends or is aborted.
                member.left = self.left.get(&(id, rank)).is_some_and(|&when| when + STUCK_NS < comm.now);
                let others = stuck.get(&(member.host.clone(), member.pid));
                member.elsewhere = others
                    .and_then(|others| others.iter().find(|(other, _)| *other != id))
                    .map(|(_, what)| what.clone());
            }
        }
    }
}

/// A line for each communicator that stands still.
pub(super) fn render(verdicts: &[(String, String)]) -> String {
    let mut text = String::new();
    for (title, verdict) in verdicts {
        let _ = writeln!(text, "  {title}: {verdict}");
    }
    if text.is_empty() { text } else { format!("What the job waits for\n{text}\n") }
}

/// Calls and waits of one process, by its numbers of communicators.
#[derive(Default)]
struct Open {
    calls: HashMap<u64, Vec<Call>>,
    waits: HashMap<u64, Vec<Wait>>,
}

impl Open {
    fn of(process: &Process, correction: &Correction) -> Self {
        // What was aborted had not ended.
        let ends = |record: &&Record| record.body == Body::Stop && !process.aborted.contains(&record.id);
        let over: HashSet<u64> = process.records.iter().filter(ends).map(|record| record.id).collect();
        let mut open = Self::default();
        // By event: an operation's communicator, peer and direction.
        let mut operations: HashMap<u64, (u64, i32, bool)> = HashMap::new();
        let mut steps: HashMap<u64, (u64, i32, bool)> = HashMap::new();
        let mut phases: HashMap<u64, (u8, u64)> = HashMap::new();
        for record in &process.records {
            let when = correction.apply(record.when);
            match record.body {
                Body::ProxyOp(op) => drop(operations.insert(record.id, (record.context, op.peer, op.send))),
                Body::ProxyStep { .. } if !over.contains(&record.id) => {
                    if let Some(&operation) = operations.get(&record.parent) {
                        steps.insert(record.id, operation);
                    }
                }
                Body::State { state, .. } if steps.contains_key(&record.id) => {
                    phases.insert(record.id, (state, when));
                }
                _ => {
                    if let Some(call) = call(record, when, !over.contains(&record.id)) {
                        open.calls.entry(record.context).or_default().push(call);
                    }
                }
            }
        }
        for (id, (context, peer, _)) in steps {
            if let Some((on, since)) = phases.get(&id).and_then(|&(state, since)| Some((what(state)?, since))) {
                open.waits.entry(context).or_default().push(Wait { peer, on, since });
            }
        }
        for calls in open.calls.values_mut() {
            calls.sort_by_key(|call| call.entered);
        }
        open
    }
}

fn call(record: &Record, entered: u64, open: bool) -> Option<Call> {
    let (key, arguments) = match record.body {
        Body::Coll(coll) => (
            Key { func: coll.func, seq: coll.seq },
            Arguments { count: coll.count, datatype: coll.datatype, root: coll.root },
        ),
        Body::CeColl(coll) => (
            Key { func: coll.func, seq: coll.seq },
            Arguments { count: coll.count, datatype: coll.datatype, root: coll.root },
        ),
        _ => return None,
    };
    Some(Call { key, arguments, entered, open })
}

/// What a step in this state waits for.
fn what(state: u8) -> Option<On> {
    Some(match state {
        state::STEP_SEND_WAIT => On::Network,
        state::STEP_SEND_PEER_WAIT => On::Buffer,
        state::STEP_RECV_WAIT => On::Data,
        state::STEP_SEND_GPU_WAIT | state::STEP_RECV_GPU_WAIT | state::STEP_RECV_FLUSH_WAIT => On::Gpu,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use towline::trace::align::align;
    use towline::trace::event::{Coll, CommInfo, ProxyOp};
    use towline::trace::names::Name;
    use towline::trace::perfetto::file::TraceFile;
    use towline::trace::perfetto::read::read;
    use towline::trace::perfetto::{Emitter, ProcessInfo};

    use super::*;

    const S: u64 = 1_000_000_000;

    /// Two ranks enter AllReduce #0 and complete it; then those of `enter` enter #1 at 2 s, in which their receives wait.
    /// At 20 s the communicator is aborted, or else the files end.
    fn traces(enter: &[i32], abort: bool, limit: u64) -> Vec<Process> {
        let dir = tempfile::tempdir().unwrap();
        let of_rank = |rank: i32| {
            let file = TraceFile::create(dir.path(), "t", limit).unwrap();
            let path = file.path().to_owned();
            let process = ProcessInfo { host: format!("node{rank}"), boot: 1, pid: 100 + rank, wall_offset: 0 };
            let mut emitter = Emitter::new(file, &process, rank as u64, 0);
            let (context, name) = (1, "dp".to_owned());
            emitter.comm(&CommInfo { context, id: 0x77, name, rank, ranks: 2, nodes: 2 }, 0);
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
            .map(|process| towline::trace::align::Clock { info: process.info.clone().unwrap(), arrows: Vec::new() })
            .collect();
        let mut standing = Standing::default();
        for (process, correction) in processes.iter().zip(align(&clocks)) {
            standing.add(process, &correction);
        }
        render(&standing.verdicts())
    }

    #[test]
    fn the_rank_that_did_not_enter_is_named_also_after_an_abort() {
        for abort in [false, true] {
            let text = said(traces(&[0], abort, 1 << 20));
            let expected = "dp (0x77): rank 0 has been in AllReduce #1 for 18 s; rank 1 (node1, process 101) has not \
                            entered it: its last call was AllReduce #0, 19 s ago, completed";
            assert!(text.contains(expected), "aborted: {abort}: {text}");
        }
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_a_circle() {
        assert!(said(traces(&[0, 1], false, 1 << 20)).contains("the ranks wait for each other"));
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
        assert!(!said(processes).contains("sign of life"));
    }
}
