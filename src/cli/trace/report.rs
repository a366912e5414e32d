//! `towline trace report`: the figures of all processes, and what holds the job back.

use super::load::{Loaded, load};
use super::slices::{Cutter, Sliced};
use super::standing::{self, Standing};
use super::stragglers::{self, Evidence};
use super::{Report, json};
use crate::cli::output::{Output, write_json};
use std::collections::BTreeMap;

use crate::os::error::Result;
use crate::trace::align::Correction;
use crate::trace::perfetto::read::Process;
use crate::trace::summary::{self, Summary};

pub(super) fn run(args: &Report, output: &mut Output) -> Result<String> {
    let Loaded { processes, remarks } = load(&args.files, output)?;
    let mut text = String::new();
    let mut figures = Vec::new();
    let mut standing = Standing::default();
    let time = run_time(&processes);
    let mut evidence = Evidence::new(time);
    for (process, correction) in processes {
        let info = process.info.clone().unwrap_or_default();
        let name = format!("{} process {}", info.host, info.pid);
        output.progress(|| format!("summing up {name}"));
        let (summary, sliced) = summarise(&process, &correction, time);
        figures.push(json::process(&info, &summary));
        if !args.brief {
            text += &summary::render(&summary, &name);
            text.push('\n');
        }
        evidence.add(&info, &summary, &sliced, &correction);
        standing.add(&process, &correction);
    }
    let waits = standing.findings();
    let findings = evidence.findings();
    write_json(args.json.as_deref(), &json::report(&figures, &waits, &findings, &remarks))?;
    text += &standing::render(&waits);
    text += &stragglers::render(&findings);
    if !remarks.is_empty() {
        text.push('\n');
    }
    for remark in remarks {
        text += &format!("note: {remark}\n");
    }
    Ok(text)
}

/// From the first event of all processes to the last, on the common clock.
fn run_time(processes: &[(Process, Correction)]) -> (u64, u64) {
    let ends = processes.iter().filter_map(|(process, correction)| {
        let (first, last) = (process.records.first()?, process.records.last()?);
        Some((correction.apply(first.when), correction.apply(last.when)))
    });
    ends.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or_default()
}

fn summarise(process: &Process, correction: &Correction, time: (u64, u64)) -> (Summary, BTreeMap<u64, Sliced>) {
    let mut summary = Summary::with_arrivals();
    summary.dropped = process.dropped;
    summary.links = process.links.clone();
    for comm in &process.comms {
        summary.comm(comm);
    }
    let mut cutter = Cutter::default();
    let mut last = 0;
    for record in &process.records {
        cutter.look(&summary, correction.apply(record.when), time);
        summary.apply(record);
        summary.advance(record.when);
        last = record.when;
    }
    summary.finish(last);
    for comm in summary.comms.values_mut() {
        // A trace has an end: no communicator in it is alive.
        comm.ended = true;
    }
    let sliced = cutter.finish(&summary);
    (summary, sliced)
}
