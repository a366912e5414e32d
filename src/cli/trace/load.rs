//! Trace files as the commands want them: processes with their clocks' corrections.

use std::path::{Path, PathBuf};

use towline::os::error::{Error, Result};
use towline::trace::align::{Clock, Correction, align};
use towline::trace::perfetto::read::{Process, read};
use towline::trace::summary::time;

/// The processes of some files on one clock.
pub(super) struct Loaded {
    /// Each with what to add to its times.
    pub(super) processes: Vec<(Process, Correction)>,
    /// What the user should know about the files and the clocks.
    pub(super) remarks: Vec<String>,
}

/// Reads a file.
pub(super) fn bytes_of(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| Error::system(format!("reading {}", path.display()), &error))
}

/// Reads all files and aligns their clocks.
pub(super) fn load(files: &[PathBuf]) -> Result<Loaded> {
    let mut processes = Vec::new();
    let mut remarks = Vec::new();
    for path in files {
        let contents = read(&bytes_of(path)?);
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
                "the trace of {}:{} ends before the process does: it reached TOWLINE_PROFILE_LIMIT, or the disk was full",
                info.host, info.pid
            ));
        }
        if process.dropped > 0 {
            remarks.push(format!("{}:{} dropped {} events", info.host, info.pid, process.dropped));
        }
    }
    Ok(Loaded { processes: processes.into_iter().zip(corrections).collect(), remarks })
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
