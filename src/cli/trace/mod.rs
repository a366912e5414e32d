//! `towline trace`: what to do with the files that the built-in profiler writes.
//!
//! `merge` puts the files of all ranks onto one clock in one file; `report` prints their figures and names what holds
//! a job back. Both estimate the clocks' differences from the messages in the files ([`crate::trace::align`]).

mod check;
mod draw;
mod json;
mod load;
mod merge;
mod report;
mod slices;
mod standing;
mod stragglers;

use std::path::{Path, PathBuf};

use crate::os::error::Result;
use clap::{Args, Subcommand};

use super::Verdict;
use super::output::{Output, STDOUT, check_json, print};

/// Work with the profiler's trace files (TOWLINE_PROFILE=trace).
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Join the files of all ranks into one, on one clock.
    Merge(Merge),
    /// Check that the network events account for every byte that NCCL says was moved.
    Check(Check),
    /// Draw one collective on all ranks as an SVG.
    Draw(Draw),
    /// Print tables, and which rank, rail or peer holds the others back.
    Report(Report),
}

#[derive(Debug, Args)]
struct Merge {
    /// Trace files, one or more to a process.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Debug, Args)]
struct Report {
    /// Trace files, merged or not.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Only what holds the job back, without the tables.
    #[arg(short, long)]
    brief: bool,
    /// Write the figures and findings to FILE as JSON too; with `-` to standard output, and no text
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct Check {
    /// Trace files, merged or not.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Write the counts and faults to FILE as JSON too; with `-` to standard output, and no text
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct Draw {
    /// Trace files, merged or not.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// The picture to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Which collective of each rank, counted from 0 [default: the middle one of the largest].
    #[arg(short, long, value_name = "NUMBER")]
    collective: Option<usize>,
}

impl Options {
    /// Checks what clap cannot. The error says what is wrong with the command line.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let (files, output) = match &self.command {
            Command::Merge(args) => (&args.files, &args.output),
            Command::Draw(args) => (&args.files, &args.output),
            Command::Check(_) | Command::Report(_) => return Ok(()),
        };
        let written = output.canonicalize();
        let is_read = |file: &PathBuf| {
            file == output || written.as_ref().is_ok_and(|path| file.canonicalize().is_ok_and(|file| file == *path))
        };
        if files.iter().any(is_read) {
            return Err(format!("{} would be overwritten while it is read", output.display()));
        }
        Ok(())
    }
}

/// Runs `towline trace …`.
pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let json = match &options.command {
        Command::Check(args) => args.json.as_deref(),
        Command::Report(args) => args.json.as_deref(),
        Command::Merge(_) | Command::Draw(_) => None,
    };
    check_json(json)?;
    let mut output = Output::new();
    let (text, verdict) = match &options.command {
        Command::Merge(args) => (merge::run(args, &mut output)?, Verdict::Good),
        Command::Check(args) => check::run(args, &mut output)?,
        Command::Draw(args) => (draw::run(args, &mut output)?, Verdict::Good),
        Command::Report(args) => (report::run(args, &mut output)?, Verdict::Good),
    };
    drop(output);
    if json != Some(Path::new(STDOUT)) {
        print(text);
    }
    Ok(verdict)
}
