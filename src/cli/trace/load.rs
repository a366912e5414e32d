//! Trace files as the commands want them: processes with their clocks' corrections.

use std::path::{Path, PathBuf};

use crate::cli::output::Output;
use crate::os::error::{Error, Result};
use crate::trace::align::{Clock, Correction, align};
use crate::trace::perfetto::read::{Process, read_telling};
use crate::trace::summary::time;

/// The processes of some files on one clock.
pub(super) struct Loaded {
    /// Each with what to add to its times.
    pub(super) processes: Vec<(Process, Correction)>,
    /// Remarks for the user about the files and the clocks.
    pub(super) remarks: Vec<String>,
}

/// Reads a file.
pub(super) fn bytes_of(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| Error::system(format!("reading {}", path.display()), &error))
}

/// Reports a command's progress through its files.
pub(super) struct Share<'a> {
    output: &'a mut Output,
    doing: &'static str,
    /// Bytes of all files, and of those that are done.
    all: u64,
    done: u64,
    percent: Option<u64>,
}

impl<'a> Share<'a> {
    pub(super) fn new(output: &'a mut Output, doing: &'static str, files: &[PathBuf]) -> Self {
        let sizes = files.iter().filter_map(|path| std::fs::metadata(path).ok());
        Self { output, doing, all: sizes.map(|file| file.len()).sum(), done: 0, percent: None }
    }

    /// So many bytes of the present file are done.
    pub(super) fn at(&mut self, bytes: usize) {
        let percent = ((self.done + bytes as u64) * 100).checked_div(self.all);
        if percent != self.percent {
            self.percent = percent;
            self.output.progress(|| format!("{}: {} %", self.doing, percent.unwrap_or(0)));
        }
    }

    /// A file of this many bytes is done.
    pub(super) fn file_done(&mut self, bytes: usize) {
        self.done += bytes as u64;
    }
}

/// Reads all files, puts the parts of a process's trace together, and aligns the clocks.
pub(super) fn load(files: &[PathBuf], output: &mut Output) -> Result<Loaded> {
    let (mut parts, remarks) = read_all(files, output)?;
    parts.sort_by_key(|part| part.turns);
    let mut processes: Vec<Process> = Vec::new();
    for part in parts {
        let mut rest = Some(part);
        for process in &mut processes {
            rest = rest.and_then(|part| process.join(part));
        }
        if let Some(mut first) = rest {
            first.stand_alone();
            processes.push(first);
        }
    }
    Ok(aligned(processes, remarks))
}

/// The same, each file's part for itself: in the order of the files and, in each, of appearance.
pub(super) fn load_parts(files: &[PathBuf], output: &mut Output) -> Result<Loaded> {
    let (parts, remarks) = read_all(files, output)?;
    Ok(aligned(parts, remarks))
}

fn read_all(files: &[PathBuf], output: &mut Output) -> Result<(Vec<Process>, Vec<String>)> {
    let mut share = Share::new(output, "reading", files);
    let mut processes = Vec::new();
    let mut remarks = Vec::new();
    for path in files {
        let bytes = bytes_of(path)?;
        let contents = read_telling(&bytes, |done| share.at(done));
        share.file_done(bytes.len());
        if contents.cut > 0 {
            remarks.push(format!("{}: the last {} bytes are no whole packet", path.display(), contents.cut));
        }
        let known = contents.processes.into_iter().filter(|process| process.info.is_some());
        let before = processes.len();
        processes.extend(known);
        if processes.len() == before {
            return Err(Error::argument(format!("{} is no trace of Towline's", path.display()))
                .with_hint("traces end in .pftrace and are made with TOWLINE_PROFILE=trace"));
        }
    }
    Ok((processes, remarks))
}

fn aligned(mut processes: Vec<Process>, mut remarks: Vec<String>) -> Loaded {
    let clocks: Vec<Clock> = processes
        .iter_mut()
        .map(|process: &mut Process| Clock {
            info: process.info.clone().unwrap_or_default(),
            arrows: std::mem::take(&mut process.arrows),
        })
        .collect();
    let corrections = align(&clocks);
    remarks.extend(clock_remarks(&clocks, &corrections));
    for process in &processes {
        let info = process.info.clone().unwrap_or_default();
        if process.cut.is_some() {
            remarks.push(format!(
                "the trace of {}:{} ends before the process does: its newest file is not among these, or it was at its limit \
                 (TOWLINE_PROFILE_LIMIT, ulimit -f), or the disk was full",
                info.host, info.pid
            ));
        }
        if process.begins_late {
            let why = if process.made_room { "the disk was full" } else { "TOWLINE_PROFILE_LIMIT, ulimit -f" };
            remarks.push(format!(
                "the trace of {}:{} begins after the process did: older parts have made room ({why}), or its \
                 .earlier.pftrace is not among these files",
                info.host, info.pid
            ));
        }
        if process.dropped > 0 {
            remarks.push(format!("{}:{} dropped {} events", info.host, info.pid, process.dropped));
        }
    }
    Loaded { processes: processes.into_iter().zip(corrections).collect(), remarks }
}

/// One line per host: its offset and how sure that is.
fn clock_remarks(clocks: &[Clock], corrections: &[Correction]) -> Vec<String> {
    let mut told: Vec<(&str, u64)> = Vec::new();
    let mut remarks = Vec::new();
    for (clock, correction) in clocks.iter().zip(corrections) {
        let host = (clock.info.host.as_str(), clock.info.boot);
        if told.contains(&host) {
            continue;
        }
        told.push(host);
        if told.len() == 1 {
            continue;
        }
        let reference = told[0].0;
        remarks.push(match correction.bound {
            Some(bound) => format!(
                "clock of {}: aligned to {reference} by {} messages, at most {} wrong",
                host.0,
                correction.messages,
                time(bound)
            ),
            None => format!(
                "clock of {}: no messages both ways connect it with {reference}; the wall clocks were used, \
                 and how wrong that is cannot be told",
                host.0
            ),
        });
    }
    remarks
}
