//! The command-line program: measures and checks the plugin, or any other, through the C interface.
//!
//! The layout: a file per subcommand and its parts below it. [`ring`] is the all-reduce algorithm, and [`host_link`]
//! carries it through a plugin. [`channel`] and [`children`] connect the program's own processes. The rest is for
//! output. Nothing here touches the transport: it is reached through [`crate::host`] alone.

mod all_reduce;
mod buffer;
mod channel;
mod children;
mod cuda;
mod doctor;
mod gather;
mod generate;
mod host_link;
mod installation;
mod output;
mod plugin_options;
mod proxy;
mod ring;
mod send_recv;
mod size;
mod stats;
mod table;
mod top;
mod trace;
mod why;

use std::process::ExitCode;

use crate::os::error::Result;
use crate::os::nccl_conf::Variables;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

/// The run failed: an error, or a process that died.
const EXIT_FAILED: u8 = 1;
/// The findings do not explain why the job stands still.
const EXIT_UNCLEAR: u8 = 2;
/// Everything ran, but data was wrong.
const EXIT_WRONG: u8 = 3;

/// The outcome of a subcommand that ran to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All is well.
    Good,
    /// Data arrived wrong.
    WrongData,
    /// The doctor found problems, or `why` a rank that holds the job up.
    Problems,
    /// `why` cannot determine the answer.
    Unclear,
}

const AFTER_HELP: &str = "\
Exit status:
  0    everything ran and all data was right
  1    something failed: an error, a process that died; or the doctor found a problem, or why named a rank
  2    the command line is wrong; or why cannot tell
  3    everything ran, but data was wrong
  141  the reader of the output went away

Variables are taken from the environment, then from ~/.nccl.conf (or NCCL_CONF_FILE) and /etc/nccl.conf, as NCCL does.
NCCL_DEBUG=WARN|INFO|TRACE shows what the plugin says on standard error (here WARN when it is not set).";

/// Network transport for NCCL: run it, measure it, compare it, without a GPU.
#[derive(Parser)]
#[command(name = "towline", version, after_help = AFTER_HELP, max_term_width = 110)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    AllReduce(all_reduce::Options),
    SendRecv(send_recv::Options),
    Doctor(doctor::Options),
    Trace(trace::Options),
    Why(why::Options),
    Top(top::Options),
    Env(installation::Options),
    #[command(hide = true)]
    Generate(generate::Options),
    /// Opens a library by name as NCCL does, for doctor.
    #[command(hide = true)]
    Opens(doctor::Opens),
    /// A rank of all-reduce, started by it.
    #[command(hide = true)]
    Rank,
    /// The receiving side of send-recv, started by it.
    #[command(hide = true)]
    Peer,
}

impl Command {
    /// The error for options that are valid one by one but not together.
    fn check(&self) -> std::result::Result<(), String> {
        match self {
            Self::AllReduce(options) => options.counts().map(drop),
            Self::SendRecv(options) => options.sizes().map(drop),
            Self::Trace(options) => options.check(),
            Self::Doctor(_)
            | Self::Why(_)
            | Self::Top(_)
            | Self::Env(_)
            | Self::Generate(_)
            | Self::Opens(_)
            | Self::Rank
            | Self::Peer => Ok(()),
        }
    }

    /// Puts the plugin options into the environment.
    fn take_in_options(&self, variables: &mut Variables) {
        let plugin = match self {
            Self::AllReduce(options) => &options.plugin,
            Self::SendRecv(options) => &options.plugin,
            Self::Doctor(options) => &options.plugin,
            Self::Trace(_)
            | Self::Why(_)
            | Self::Top(_)
            | Self::Env(_)
            | Self::Generate(_)
            | Self::Opens(_)
            | Self::Rank
            | Self::Peer => return,
        };
        if let Some((name, value)) = plugin.variable() {
            // SAFETY: this runs first in `main`, before there is another thread that could read the environment.
            unsafe { std::env::set_var(name, value) };
            variables.set(name, value);
        }
    }
}

/// Runs the program.
pub fn main() -> ExitCode {
    if let Err(closed) = output::check_stdout() {
        return exit_code(&Err(closed));
    }
    let command_line = match CommandLine::try_parse() {
        Ok(command_line) => command_line,
        Err(error) => {
            // Help and the version come as errors too, for standard output.
            let written = error.print();
            if !error.use_stderr() {
                output::check_written(written);
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(EXIT_FAILED));
        }
    };
    if let Err(wrong) = command_line.command.check() {
        called().error(ErrorKind::ValueValidation, wrong).exit();
    }
    let mut variables = Variables::read();
    take_in_conf_files(&variables);
    command_line.command.take_in_options(&mut variables);
    let outcome = match command_line.command {
        Command::AllReduce(options) => all_reduce::run(&options),
        Command::SendRecv(options) => send_recv::run(&options),
        Command::Doctor(options) => doctor::run(&options, &variables),
        Command::Opens(options) => doctor::opens(&options),
        Command::Peer => return send_recv::run_peer(),
        Command::Trace(options) => trace::run(&options),
        // Its exit code 1 means that a rank was named.
        Command::Why(options) => why::run(&options).or_else(|error| {
            eprintln!("towline: {error}");
            Ok(Verdict::Unclear)
        }),
        Command::Top(options) => top::run(&options),
        Command::Env(options) => installation::run(&options),
        Command::Generate(options) => generate::run(&options),
        Command::Rank => return all_reduce::run_rank(),
    };
    exit_code(&outcome)
}

/// The requested subcommand, for the usage line of its errors.
fn called() -> clap::Command {
    let mut command = CommandLine::command();
    // Gives each subcommand its whole name.
    command.build();
    let mut matches = command.clone().get_matches();
    while let Some((name, inner)) = matches.remove_subcommand() {
        let Some(found) = command.find_subcommand(&name).cloned() else { break };
        (command, matches) = (found, inner);
    }
    command
}

fn exit_code(outcome: &Result<Verdict>) -> ExitCode {
    match outcome {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Problems) => ExitCode::from(EXIT_FAILED),
        Ok(Verdict::Unclear) => ExitCode::from(EXIT_UNCLEAR),
        Ok(Verdict::WrongData) => ExitCode::from(EXIT_WRONG),
        Err(error) => {
            eprintln!("towline: {error}");
            ExitCode::from(EXIT_FAILED)
        }
    }
}

/// Puts the lines of NCCL's configuration files into the environment, as NCCL does before it opens a plugin.
fn take_in_conf_files(variables: &Variables) {
    for (name, value) in variables.merged() {
        if std::env::var_os(&name).is_none() && !name.contains('\0') && !value.contains('\0') {
            // SAFETY: this runs first in `main`, before there is another thread that could read the environment.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_of_every_subcommand_is_explained() {
        let command = CommandLine::command();
        command.clone().debug_assert();
        for sub in command.get_subcommands() {
            assert!(sub.get_about().is_some(), "{}", sub.get_name());
            for flag in sub.get_arguments() {
                assert!(flag.get_help().is_some(), "{} {}", sub.get_name(), flag.get_id());
            }
        }
    }
}
