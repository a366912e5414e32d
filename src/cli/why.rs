//! `towline why`: which rank holds the job up, while it runs.

use std::fmt::Write;
use std::time::{Duration, Instant};

use crate::os::error::Result;
use crate::trace::clock;
use crate::trace::live::gather;
use crate::trace::verdict::{Cause, Finding, Key, Member, On, name_of_call};
use clap::Args;
use serde_json::{Value, json};

use super::Verdict;
use super::gather::{Found, Place};
use super::output::print;

/// Between two looks.
const AGAIN: Duration = Duration::from_secs(2);

/// An answer of which only the durations change is printed again after this.
const REPEAT: Duration = Duration::from_secs(30);

/// Say which rank holds a running job up, and why.
///
/// The processes remember their last calls and their open operations (unless TOWLINE_STATUS=0). Those of this host are
/// found by themselves; those of all hosts when they share a directory (TOWLINE_STATE_DIR), or
/// over TCP with the job's key (--host).
///
/// Exit status: 0 nothing is stuck, 1 a rank was named, 2 it cannot be told.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Look again every two seconds, and print the answer when it changes, else every 30 seconds.
    #[arg(short, long)]
    watch: bool,
    /// Print JSON, a line for each answer.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
}

/// Runs the subcommand.
pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let mut printed: Option<(Essence, Instant)> = None;
    loop {
        let answer = Answer::of(options.place.processes()?);
        let essence = answer.essence();
        if printed.as_ref().is_none_or(|(before, when)| *before != essence || when.elapsed() >= REPEAT) {
            print(if options.json { format!("{}\n", answer.json()) } else { answer.text(&options.place) });
            printed = Some((essence, Instant::now()));
        }
        if !options.watch {
            return Ok(answer.verdict());
        }
        std::thread::sleep(AGAIN);
    }
}

/// What makes one answer another one: everything but durations and counts of events.
#[derive(Debug, PartialEq, Eq)]
struct Essence {
    findings: Vec<Core>,
    alive: usize,
    communicators: usize,
    /// Their words that are no numbers.
    remarks: Vec<String>,
}

/// The same of a finding.
#[derive(Debug, PartialEq, Eq)]
struct Core {
    comm: u64,
    kind: &'static str,
    /// The ranks that are named, with their interfaces.
    named: Vec<(i32, Vec<String>)>,
    call: Option<Key>,
    /// For what the last rank of a chain waits, and for which rank.
    end: Option<(On, i32)>,
}

/// What was found.
struct Answer {
    findings: Vec<Finding>,
    /// Processes that are alive.
    alive: usize,
    communicators: usize,
    remarks: Vec<String>,
}

impl Answer {
    fn of(found: Found) -> Self {
        let processes = &found.processes;
        let now = clock::now();
        let mut job = gather::job(processes, now);
        job.add_unanswered(found.unanswered);
        let alive = processes.iter().filter(|process| process.is_alive(now)).count();
        Self { communicators: job.communicators(), findings: job.findings(), alive, remarks: found.notes }
    }

    fn essence(&self) -> Essence {
        let core = |finding: &Finding| Core {
            comm: finding.comm.id,
            kind: finding.verdict.kind(),
            named: finding.named().into_iter().map(|named| (named.rank, named.interfaces)).collect(),
            call: finding.verdict.waiting.as_ref().map(|waiting| waiting.key),
            end: match finding.verdict.cause {
                Cause::Chain(_, Some(wait)) => Some((wait.on, wait.peer)),
                _ => None,
            },
        };
        let is_word = |word: &&str| word.parse::<f64>().is_err();
        let words = |remark: &String| remark.split(' ').filter(is_word).collect::<Vec<_>>().join(" ");
        Essence {
            findings: self.findings.iter().map(core).collect(),
            alive: self.alive,
            communicators: self.communicators,
            remarks: self.remarks.iter().map(words).collect(),
        }
    }

    fn verdict(&self) -> Verdict {
        if self.findings.iter().any(|finding| finding.verdict.names_a_rank()) {
            Verdict::Problems
        } else if self.findings.is_empty() && self.alive > 0 {
            Verdict::Good
        } else {
            Verdict::Unclear
        }
    }

    fn text(&self, place: &Place) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let _ = writeln!(text, "{}", finding.line());
        }
        if self.alive == 0 {
            let _ = writeln!(
                text,
                "no process of a running job was found {}; does the job run as this user, with NCCL 2.23 or \
                 later, Towline's profiler loaded and without TOWLINE_STATUS=0, and with TOWLINE_STATE_DIR as here?",
                place.whereabouts()
            );
        } else if self.findings.is_empty() {
            let _ = writeln!(
                text,
                "nothing is stuck: {} and {} were looked at",
                count(self.alive, "process", "processes"),
                count(self.communicators, "communicator", "communicators")
            );
        }
        for remark in &self.remarks {
            let _ = writeln!(text, "note: {remark}");
        }
        text
    }

    fn json(&self) -> Value {
        let verdict = match self.verdict() {
            Verdict::Problems => "named",
            Verdict::Good => "nothing",
            _ => "unclear",
        };
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "verdict": verdict,
            "processes": self.alive,
            "communicators": self.communicators,
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
            "notes": self.remarks,
        })
    }
}

/// A rank with its process.
fn place(rank: i32, member: Option<&Member>) -> Value {
    json!({
        "rank": rank,
        "host": member.map(|it| &it.host),
        "process": member.map(|it| it.pid),
        "gpu": member.map(|it| &it.gpu).filter(|gpu| !gpu.is_empty()),
        "global_rank": member.and_then(|it| it.global),
    })
}

fn finding(found: &Finding) -> Value {
    let named = found.named().into_iter().map(|named| {
        let mut place = place(named.rank, named.member.as_ref());
        place["interfaces"] = json!(named.interfaces);
        place
    });
    let waiting = found.verdict.waiting.as_ref();
    let waiting_ranks = waiting.map(|it| it.ranks.iter().map(|&rank| place(rank, found.comm.members.get(&rank))));
    json!({
        "communicator": found.comm.title,
        "kind": found.verdict.kind(),
        "sentence": found.sentence(),
        "named": named.collect::<Vec<_>>(),
        "call": waiting.map(|it| name_of_call(it.key)),
        "waiting": waiting_ranks.map(Iterator::collect::<Vec<_>>),
        "for_ns": waiting.map(|it| it.for_ns),
        "waiting_for": waiting.and_then(|it| found.comm.waiting_on(it)).map(On::label),
        "victims": found.victims,
        "unseen": found.verdict.unseen,
        "with_gaps": found.verdict.gaps,
    })
}

fn count(number: usize, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::live::gather::Process;
    use crate::trace::live::network::Connection;
    use crate::trace::live::{CallState, CommState, State, WaitState};

    /// Rank 0 waits in a call for what `on` says, and rank 1 for rank 0's data. It has the interface of each direction.
    fn found(on: &str, interfaces: [&str; 2], seconds: u64) -> Found {
        let now = clock::now();
        let since = now - seconds * 1_000_000_000;
        let process = |rank: i32, on: &str, interfaces: [&str; 2]| {
            let call = CallState {
                func: "AllReduce".into(),
                seq: 0,
                peer: None,
                count: 8,
                datatype: "ncclInt8".into(),
                root: 0,
                entered: since,
                open: true,
            };
            let wait = WaitState { peer: 1 - rank, on: on.into(), since, ..WaitState::default() };
            let comm = CommState {
                id: "77".into(),
                rank,
                ranks: 2,
                gpu: format!("{rank} at 0000:3b:00.0"),
                calls: vec![call],
                waits: vec![wait],
                ..CommState::default()
            };
            let peer = format!("node{}:{}", 1 - rank, 101 - rank);
            let connection = |send, name| Connection::sample(send, &peer, name);
            let connections = vec![connection(true, interfaces[0]), connection(false, interfaces[1])];
            let (host, pid) = (format!("node{rank}"), 100 + rank);
            Process::here(State {
                host,
                pid,
                rank: Some(rank + 8),
                now,
                communicators: vec![comm],
                connections,
                ..State::default()
            })
        };
        let processes = vec![process(0, on, interfaces), process(1, "data", ["eth2", "eth3"])];
        Found { processes, ..Found::default() }
    }

    #[test]
    fn an_answer_is_another_one_for_another_cause_and_not_for_another_duration() {
        let essence = |found| Answer::of(found).essence();
        let with_note = |note: &str| {
            let notes = vec![format!("node0, process 100, {note}")];
            essence(Found { notes, ..found("network", ["eth0", "eth1"], 8) })
        };
        let first = essence(found("network", ["eth0", "eth1"], 8));
        assert_eq!(first, essence(found("network", ["eth0", "eth1"], 12)));
        assert_ne!(first, essence(found("gpu", ["eth0", "eth1"], 8)), "the same rank, for its GPU");
        assert_ne!(first, essence(found("network", ["eth4", "eth1"], 8)), "over another interface");
        let noted = with_note("had no room for 7 events");
        assert_eq!(noted, with_note("had no room for 9 events"));
        assert_ne!(noted, with_note("has not answered within 6 s"));
    }

    #[test]
    fn json_names_the_host_the_gpu_and_the_interface() {
        let json = Answer::of(found("network", ["eth0", "eth1"], 8)).json();
        let named = json!([{
            "rank": 0, "host": "node0", "process": 100, "gpu": "0 at 0000:3b:00.0", "global_rank": 8, "interfaces": ["eth0"],
        }]);
        assert_eq!((&json["findings"][0]["named"], &json["findings"][0]["victims"]), (&named, &json!(1)), "{json}");
        let waiting = json!({
            "rank": 1, "host": "node1", "process": 101, "gpu": "1 at 0000:3b:00.0", "global_rank": 9,
        });
        assert_eq!(json["findings"][0]["waiting"][1], waiting, "{json}");
        assert_eq!(json["findings"][0]["waiting_for"], "network", "{json}");
    }
}
