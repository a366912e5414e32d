//! `towline trace check`: whether the network events account for every byte that NCCL's steps moved.
//!
//! NCCL reports what each step moved, the transport what went over the network: two independent sources. A file in
//! which events were dropped proves nothing and fails too.

use std::collections::HashMap;

use super::Check;
use super::load::load;
use crate::cli::Verdict;
use crate::cli::output::{Output, write_json};
use crate::os::error::Result;
use crate::trace::event::{Body, state};
use crate::trace::perfetto::read::Process;
use crate::trace::rail::Rail;
use serde_json::{Value, json};

pub(super) fn run(args: &Check, output: &mut Output) -> Result<(String, Verdict)> {
    let mut text = String::new();
    let mut faults = Vec::new();
    let mut counts = Vec::new();
    for (process, _) in load(&args.files, output)?.processes {
        let info = process.info.clone().unwrap_or_default();
        let rank = info.rank.map_or_else(String::new, |rank| format!(", global rank {rank}"));
        let gpu = process.comms.iter().map(|comm| &comm.gpu).find(|gpu| !gpu.is_empty());
        let gpu = gpu.map_or_else(String::new, |gpu| format!(", GPU {gpu}"));
        let name = format!("{} process {}{rank}{gpu}", info.host, info.pid);
        output.progress(|| format!("checking {name}"));
        let ledger = Ledger::of(&process);
        text += &ledger.line(&name);
        counts.push(ledger.json(&info.host, info.pid));
        faults.extend(ledger.faults().into_iter().map(|fault| format!("{name}: {fault}")));
    }
    let all = json!({"version": env!("CARGO_PKG_VERSION"), "processes": counts, "faults": faults});
    write_json(args.json.as_deref(), &all)?;
    if faults.is_empty() {
        return Ok((text + "every byte is accounted for\n", Verdict::Good));
    }
    for fault in faults.iter().take(SHOWN) {
        text += &format!("{fault}\n");
    }
    if faults.len() > SHOWN {
        text += &format!("and {} more like these\n", faults.len() - SHOWN);
    }
    Ok((text, Verdict::Problems))
}

/// The most faults that are printed.
const SHOWN: usize = 10;

#[derive(Default)]
struct Step {
    /// The bytes that NCCL reports as moved; None when the step did not get that far.
    size: Option<u64>,
    stopped: bool,
    events: u64,
    bytes: u64,
}

#[derive(Default)]
struct Ledger {
    steps: HashMap<u64, Step>,
    /// Network events that belong to no step, and bytes that travelled again.
    orphans: u64,
    resent: u64,
    dropped: u64,
}

/// Of all steps of a process.
struct Totals {
    steps: usize,
    open: usize,
    moved: u64,
    events: u64,
    carried: u64,
}

impl Ledger {
    fn of(process: &Process) -> Self {
        let mut ledger = Self { dropped: process.dropped, ..Self::default() };
        for record in &process.records {
            match record.body {
                // Only a part of such a step is in the file.
                Body::ProxyStep { .. } if process.halves.contains(&record.id) => {}
                Body::ProxyStep { .. } => drop(ledger.steps.insert(record.id, Step::default())),
                // Other states repeat the size of the step before.
                Body::State { state: state::STEP_SEND_WAIT | state::STEP_RECV_FLUSH_WAIT, arg, .. } => {
                    if let Some(step) = ledger.steps.get_mut(&record.id) {
                        step.size = Some(arg);
                    }
                }
                Body::Stop => {
                    if let Some(step) = ledger.steps.get_mut(&record.id) {
                        step.stopped = true;
                    }
                }
                ref body => {
                    let Some((_, _, length)) = Rail::of(body) else { continue };
                    let resend = matches!(body, Body::NetTowline(part) if part.resend);
                    match ledger.steps.get_mut(&record.parent) {
                        _ if resend => ledger.resent += length,
                        None if process.halves.contains(&record.parent) => {}
                        None => ledger.orphans += 1,
                        Some(step) => {
                            step.events += 1;
                            step.bytes += length;
                        }
                    }
                }
            }
        }
        ledger
    }

    fn totals(&self) -> Totals {
        let whole = || self.steps.values().filter(|step| step.stopped);
        Totals {
            steps: self.steps.len(),
            open: self.steps.len() - whole().count(),
            moved: whole().filter_map(|step| step.size).sum(),
            events: self.steps.values().map(|step| step.events).sum(),
            carried: whole().map(|step| step.bytes).sum(),
        }
    }

    fn line(&self, name: &str) -> String {
        let Totals { steps, open, moved, events, carried } = self.totals();
        format!(
            "{name}: {steps} steps ({open} not ended) moved {moved} bytes; {events} network events carried {carried}, and \
             {} again\n",
            self.resent,
        )
    }

    fn json(&self, host: &str, process: i32) -> Value {
        let Totals { steps, open, moved, events, carried } = self.totals();
        json!({
            "host": host,
            "process": process,
            "steps": steps,
            "open_steps": open,
            "moved_bytes": moved,
            "network_events": events,
            "carried_bytes": carried,
            "resent_bytes": self.resent,
            "dropped_events": self.dropped,
        })
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.dropped > 0 {
            faults.push(format!("{} events were dropped; give the profiler more TOWLINE_PROFILE_BUFFER", self.dropped));
        }
        if self.orphans > 0 {
            faults.push(format!("{} network events belong to no step", self.orphans));
        }
        if self.steps.is_empty() {
            faults.push("there are no steps in it; trace with TOWLINE_PROFILE_EVENTS unset".into());
        }
        for (id, step) in &self.steps {
            if let (true, Some(size)) = (step.stopped, step.size)
                && (step.bytes != size || step.events == 0 && size > 0)
            {
                faults.push(format!("step {id} moved {size} bytes, its {} network events {}", step.events, step.bytes));
            }
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::event::{NetPart, Record};

    fn process(length: u64, size: u64) -> Process {
        let record = |id, parent, body| Record { when: 1, id, parent, context: 0, rank: 0, thread: 0, body };
        let part = |length, resend| Body::NetTowline(NetPart { length, resend, ..NetPart::default() });
        let sent = Body::State { state: state::STEP_SEND_WAIT, steps: 0, arg: size };
        // NCCL repeats the former step's size while it waits.
        let stale = Body::State { state: state::STEP_SEND_GPU_WAIT, steps: 0, arg: 999 };
        let records = vec![
            record(1, 0, Body::ProxyStep { step: 0 }),
            record(1, 0, stale),
            record(2, 1, part(length, false)),
            record(3, 1, part(50, true)),
            record(1, 0, sent),
            record(1, 0, Body::Stop),
        ];
        Process { records, ..Process::default() }
    }

    #[test]
    fn a_byte_too_few_or_too_many_is_named_and_resends_count_apart() {
        assert!(Ledger::of(&process(100, 100)).faults().is_empty());
        assert!(Ledger::of(&process(99, 100)).faults()[0].contains("moved 100 bytes, its 1 network events 99"));
        assert_eq!(Ledger::of(&process(101, 100)).faults().len(), 1);
        assert!(Ledger::of(&process(100, 100)).line("x").contains("and 50 again"), "told apart");
    }

    #[test]
    fn what_proves_nothing_fails() {
        let dropped = Process { dropped: 3, ..process(100, 100) };
        assert!(Ledger::of(&dropped).faults()[0].contains("3 events were dropped"));
        assert!(Ledger::of(&Process::default()).faults()[0].contains("no steps"));
        let mut orphan = process(100, 100);
        orphan.records[2].parent = 77;
        assert_eq!(Ledger::of(&orphan).faults().len(), 2);
    }
}
