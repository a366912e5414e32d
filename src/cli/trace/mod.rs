//! `towline trace`: what to do with the files that the built-in profiler writes.
//!
//! `merge` puts the files of all ranks onto one clock in one file; `report` prints their figures and names what holds
//! a job back. Both estimate the clocks' differences from the messages in the files ([`crate::trace::align`]).

mod load;
mod merge;
mod report;
mod stragglers;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::os::error::Result;

/// Works with the profiler's trace files.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: TraceCommand,
}

/// The parts of `towline trace`.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Joins the files of all ranks into one, on one clock.
    Merge(MergeArgs),
    /// Prints tables, and which rank, rail or peer holds the others back.
    Report(ReportArgs),
}

/// `towline trace merge`.
#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Trace files, one or more to a process.
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

/// `towline trace report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Trace files, merged or not.
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Only what holds the job back, without the tables.
    #[arg(short, long)]
    pub brief: bool,
}

/// Runs `towline trace …`; what it says goes to standard output.
///
/// # Errors
/// When a file cannot be read or written, or is no trace of Towline's.
pub fn run(args: &TraceArgs) -> Result<ExitCode> {
    let text = match &args.command {
        TraceCommand::Merge(args) => merge::run(args)?,
        TraceCommand::Report(args) => report::run(args)?,
    };
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

/// The text that `towline trace merge` prints; the file is written.
///
/// # Errors
/// As for [`run`].
pub fn merge(args: &MergeArgs) -> Result<String> {
    merge::run(args)
}

/// The text that `towline trace report` prints.
///
/// # Errors
/// As for [`run`].
pub fn report(args: &ReportArgs) -> Result<String> {
    report::run(args)
}
