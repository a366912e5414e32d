//! `towline top`: what every rank does at this moment, and what its host's interfaces carry.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Duration;

use crate::os::error::Result;
use crate::trace::clock;
use crate::trace::live::gather::{self, Process};
use crate::trace::live::{CommState, ProcessKey, State};
use crate::trace::verdict::{Job, On, Told, Wait, name_of_call};
use clap::Args;
use serde_json::{Value, json};

use super::Verdict;
use super::gather::{Found, Place, ago};
use super::output::print;
use super::table::Table;

/// Between two looks.
const AGAIN: Duration = Duration::from_secs(1);

/// Show what every rank of a running job does, and the bandwidth of its interfaces, again each second.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print one table, after a second of measuring, and end.
    #[arg(long)]
    once: bool,
    /// Print a JSON object in a line of its own for each look.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
}

/// Runs the subcommand.
pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let clear = std::io::stdout().is_terminal() && !options.once && !options.json;
    let mut before = BTreeMap::new();
    let mut first = true;
    loop {
        let Found { processes, notes, .. } = options.place.processes()?;
        let now = clock::now();
        if !(first && options.once) {
            let view = View::of(&processes, &before, now);
            let text = if options.json { format!("{}\n", view.json(&notes)) } else { view.text(&notes) };
            print(if clear { format!("\x1b[H\x1b[2J{text}") } else { text });
            if options.once {
                return Ok(Verdict::Good);
            }
        }
        first = false;
        before = processes.into_iter().map(|process| (process.state.process(), process.state)).collect();
        std::thread::sleep(AGAIN);
    }
}

/// The table's columns, and their widths.
const COLUMNS: [(&str, usize); 9] = [
    ("communicator", 24),
    ("rank", 5),
    ("global", 6),
    ("host", 16),
    ("process", 8),
    ("GPU", 17),
    ("call", 26),
    ("for", 8),
    ("waits for", 9),
];

/// What one look shows.
struct View {
    /// By communicator and rank.
    ranks: Vec<Rank>,
    /// Processes of running jobs that are gone: host, process, whether it ended in order, since when.
    gone: Vec<(String, i32, bool, String)>,
    /// By host and interface: 10⁹ bytes per second sent and received.
    rates: BTreeMap<(String, String), [f64; 2]>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    communicator: String,
    rank: i32,
    /// In the job, if that is known.
    global: Option<i32>,
    host: String,
    process: i32,
    /// Empty when unknown.
    gpu: String,
    doing: Doing,
}

/// What a rank does.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Doing {
    call: String,
    /// For how long.
    since: String,
    /// What it waits for, over which interfaces and for how long; empty when that is not known.
    waits_for: String,
    /// The interfaces alone.
    interfaces: Vec<String>,
}

impl View {
    fn of(processes: &[Process], before: &BTreeMap<ProcessKey, State>, now: u64) -> Self {
        let alive: Vec<&Process> = processes.iter().filter(|process| process.is_alive(now)).collect();
        // What earlier jobs have left is not of interest.
        let running = gather::running(processes, now);
        let is_of_running =
            |process: &&Process| process.state.communicators.iter().any(|it| running.contains(&it.info().id));
        let gone = processes.iter().filter(|process| !process.is_alive(now)).filter(is_of_running);
        let gone = gone.map(|process| {
            let State { host, pid, exited, .. } = &process.state;
            (host.clone(), *pid, *exited, ago(now, process.heard))
        });
        let job = gather::job(processes, now);
        let mut ranks: Vec<Rank> = Vec::new();
        for process in &alive {
            for comm in process.state.communicators.iter().filter(|comm| comm.ended.is_none()) {
                ranks.push(Rank {
                    communicator: if comm.name.is_empty() { format!("0x{}", comm.id) } else { comm.name.clone() },
                    rank: comm.rank,
                    global: process.state.rank,
                    gpu: comm.gpu.clone(),
                    host: process.state.host.clone(),
                    process: process.state.pid,
                    doing: doing(process, comm, &job, now),
                });
            }
        }
        ranks.sort();
        Self { ranks, gone: gone.collect(), rates: rates(&alive, before) }
    }

    fn text(&self, notes: &[String]) -> String {
        let mut text = String::new();
        let table = Table::new(COLUMNS.map(|(heading, width)| (heading, "", width)));
        let _ = writeln!(text, "{}", table.left_row(&COLUMNS.map(|(heading, _)| heading.to_owned())));
        for Rank { communicator, rank, global, host, process, gpu, doing } in &self.ranks {
            let unless_unknown = |text: String| if text.is_empty() { "-".to_owned() } else { text };
            let global = unless_unknown(global.map_or_else(String::new, |rank| rank.to_string()));
            let place = [host.clone(), process.to_string(), unless_unknown(gpu.clone())];
            let doing = [doing.call.clone(), doing.since.clone(), doing.waits_for.clone()];
            let cells = [[communicator.clone(), rank.to_string(), global], place, doing].concat();
            let _ = writeln!(text, "{}", table.left_row(&cells));
        }
        for (host, process, exited, since) in &self.gone {
            let end = if *exited { "has ended" } else { "was last heard of" };
            let _ = writeln!(text, "{host}, process {process}, {end} {since} ago");
        }
        for ((host, name), [sent, received]) in &self.rates {
            let _ = writeln!(text, "{host} {name}: {sent:.3} GB/s out, {received:.3} GB/s in");
        }
        if text.lines().count() == 1 {
            text += "no process of a running job was found\n";
        }
        for note in notes {
            let _ = writeln!(text, "note: {note}");
        }
        text
    }

    fn json(&self, notes: &[String]) -> Value {
        let rank = |it: &Rank| {
            let Doing { call, since, waits_for, interfaces } = &it.doing;
            json!({
                "communicator": it.communicator, "rank": it.rank, "global_rank": it.global, "host": it.host,
                "process": it.process, "gpu": Some(&it.gpu).filter(|gpu| !gpu.is_empty()),
                "call": call, "for": since, "waits_for": waits_for, "interfaces": interfaces,
            })
        };
        let gone = |(host, process, exited, since): &(String, i32, bool, String)| json!({"host": host, "process": process, "has_ended": exited, "since": since});
        let rate = |((host, name), [sent, received]): (&(String, String), &[f64; 2])| json!({"host": host, "interface": name, "sent_gbs": sent, "received_gbs": received});
        json!({
            "ranks": self.ranks.iter().map(rank).collect::<Vec<_>>(),
            "gone": self.gone.iter().map(gone).collect::<Vec<_>>(),
            "interfaces": self.rates.iter().map(rate).collect::<Vec<_>>(),
            "notes": notes,
        })
    }
}

/// What the interfaces carried since the look before.
fn rates(alive: &[&Process], before: &BTreeMap<ProcessKey, State>) -> BTreeMap<(String, String), [f64; 2]> {
    let mut rates: BTreeMap<(String, String), [f64; 2]> = BTreeMap::new();
    for process in alive {
        let Some(past) = before.get(&process.state.process()).filter(|past| past.now < process.state.now) else {
            continue;
        };
        let seconds = (process.state.now - past.now) as f64 / 1e9;
        for interface in &process.state.interfaces {
            let Some(was) = past.interfaces.iter().find(|it| it.name == interface.name) else { continue };
            let rate = |is: u64, was: u64| is.saturating_sub(was) as f64 / seconds / 1e9;
            let new = [rate(interface.sent, was.sent), rate(interface.received, was.received)];
            let sum = rates.entry((process.state.host.clone(), interface.name.clone())).or_default();
            for (sum, new) in sum.iter_mut().zip(new) {
                // All processes of a host read the same counters of it.
                *sum = if interface.of_host { sum.max(new) } else { *sum + new };
            }
        }
    }
    rates
}

/// The oldest call that a rank is in, or else its last one.
fn doing(process: &Process, comm: &CommState, job: &Job, now: u64) -> Doing {
    let Told { calls, transfers, waits, .. } = comm.told(|when| process.time(when));
    let all = || calls.iter().chain(&transfers);
    let open = all().filter(|call| call.open).min_by_key(|call| call.entered);
    let Some(call) = open.or_else(|| all().max_by_key(|call| call.entered)) else {
        let none = String::new;
        return Doing { call: "none yet".into(), since: none(), waits_for: none(), interfaces: Vec::new() };
    };
    let name = name_of_call(call.key);
    let wait = waits.first();
    let interfaces = wait.map_or_else(Vec::new, |wait| job.interfaces(comm.info().id, comm.rank, wait).to_vec());
    let over = if interfaces.is_empty() { String::new() } else { format!(" over {}", interfaces.join(" and ")) };
    let awaited = |wait: &Wait| match wait.on {
        On::Network => format!("send to rank {}", wait.peer),
        On::Data => format!("data of rank {}", wait.peer),
        On::Buffer => format!("buffer of rank {}", wait.peer),
        On::Gpu => "its GPU".into(),
    };
    Doing {
        call: if open.is_some() { name } else { format!("after {name}") },
        since: ago(now, call.entered),
        waits_for: wait.map_or_else(String::new, |wait| format!("{}{over}, {}", awaited(wait), ago(now, wait.since))),
        interfaces,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::live::network::{Connection, Interface};
    use crate::trace::live::{CallState, WaitState};

    #[test]
    fn a_receive_is_shown_with_its_peer_and_the_interface_over_which_it_waits() {
        let now = clock::now();
        let call = |func: &str, peer, age: u64, open| CallState {
            func: func.into(),
            seq: 7,
            peer,
            count: 8,
            datatype: "ncclInt8".into(),
            root: 0,
            entered: now - age,
            open,
        };
        let process = |rank: i32| {
            let comm = CommState {
                id: "a".into(),
                rank,
                ranks: 2,
                calls: vec![call("AllReduce", None, 9_000_000_000, false)],
                transfers: match rank {
                    0 => vec![call("Send", Some(1), 8_000_000_000, false)],
                    _ => vec![call("Recv", Some(0), 6_000_000_000, true), call("Send", Some(0), 1_000_000_000, true)],
                },
                waits: match rank {
                    0 => Vec::new(),
                    _ => {
                        let (on, since) = ("data".into(), now - 5_000_000_000);
                        vec![WaitState { peer: 0, on, since, ..WaitState::default() }]
                    }
                },
                ..CommState::default()
            };
            let peer = format!("node{}:{}", 1 - rank, 101 - rank);
            let connection = |send, name| Connection::sample(send, &peer, name);
            Process::here(State {
                host: format!("node{rank}"),
                pid: 100 + rank,
                now,
                communicators: vec![comm],
                connections: vec![connection(true, "eth0"), connection(false, "eth1")],
                ..State::default()
            })
        };
        let view = View::of(&[process(0), process(1)], &BTreeMap::new(), now);
        let text = view.text(&[]);
        let rows: Vec<&str> = text.lines().collect();
        assert!(rows[1].contains(" after Send #7 to rank 1 ") && rows[1].contains(" 8.0 s"), "{text}");
        assert!(rows[2].contains(" Recv #7 from rank 0 ") && rows[2].contains(" 6.0 s"), "{text}");
        assert!(rows[2].contains(" data of rank 0 over eth1, 5.0 s"), "{text}");
        assert_eq!(view.json(&[])["ranks"][1]["interfaces"], json!(["eth1"]));
    }

    #[test]
    fn an_interface_carries_what_its_host_counts_or_else_the_sum_of_its_processes() {
        const GB: u64 = 1_000_000_000;
        let carried = |name: &str, sent, received, of_host| Interface { name: name.into(), sent, received, of_host };
        // Two processes of a host, and one of another, two seconds apart.
        let look = |now, [a, b, c]: [Vec<Interface>; 3]| {
            [("node0", 1, a), ("node0", 2, b), ("node1", 1, c)].map(|(host, pid, interfaces)| {
                Process::here(State { host: host.into(), pid, now, interfaces, ..State::default() })
            })
        };
        let (eth, ib) = (|sent| carried("eth0", sent, 3 * sent, true), |sent| carried("mlx5_0", sent, 0, false));
        let before = look(GB, [vec![eth(GB), ib(GB)], vec![eth(GB), ib(GB)], vec![eth(5 * GB)]]);
        // The second interface of the last one is new, and a counter may begin again.
        let after = look(3 * GB, [vec![eth(5 * GB), ib(2 * GB)], vec![eth(3 * GB), ib(4 * GB)], vec![eth(0), ib(GB)]]);
        let before = before.into_iter().map(|process| (process.state.process(), process.state)).collect();
        let rates = rates(&after.iter().collect::<Vec<_>>(), &before);
        let expected = [("node0", "eth0", [2.0, 6.0]), ("node0", "mlx5_0", [2.0, 0.0]), ("node1", "eth0", [0.0, 0.0])];
        assert_eq!(rates, expected.map(|(host, name, rate)| ((host.into(), name.into()), rate)).into());
    }

    #[test]
    fn processes_that_are_gone_are_listed_while_their_job_runs() {
        let now = clock::now();
        let process = |pid: i32, id: &str, exited: bool| {
            let communicators = vec![CommState { id: id.into(), ..CommState::default() }];
            Process::here(State { host: "node".into(), pid, exited, now, communicators, ..State::default() })
        };
        let processes = [process(1, "a", false), process(2, "a", true), process(3, "b", true)];
        let view = View::of(&processes, &BTreeMap::new(), now);
        let text = view.text(&[]);
        assert!(text.contains("node, process 2, has ended"), "{text}");
        assert!(!text.contains("process 3"), "of an earlier job: {text}");
        let json = view.json(&[]);
        assert_eq!((&json["ranks"][0]["process"], &json["gone"][0]["has_ended"]), (&json!(1), &json!(true)));
        let text = View::of(&processes[2..], &BTreeMap::new(), now).text(&[]);
        assert!(text.contains("no process of a running job was found") && !text.contains("process 3"), "{text}");
    }
}
