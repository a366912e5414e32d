//! The states of a job's processes, for `towline why` and `towline top`: from their state files, and fresher from the
//! control sockets of those on this host; or over TCP.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::trace::live::gather::{self, PATIENCE, Process, at_once};
use crate::trace::live::{State, place};
use crate::trace::verdict::seconds;
use clap::Args;

mod hosts;

/// Where to look.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// The directory of the state files [default: TOWLINE_STATE_DIR, else this user's processes on this host]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Ask the processes of these hosts over TCP (TOWLINE_STATUS_LISTEN, TOWLINE_KEY_FILE), instead of reading a
    /// directory
    #[arg(long, value_name = "HOST[:PORT],…", value_delimiter = ',', conflicts_with = "dir")]
    host: Vec<String>,
}

/// The processes of a job.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) processes: Vec<Process>,
    /// Processes that there are, or were, and that do not answer.
    pub(crate) unanswered: usize,
    /// Notes for the user about them.
    pub(crate) notes: Vec<String>,
}

impl Place {
    /// The directory; None when this user's processes on this host have none.
    pub(crate) fn dir(&self) -> Option<PathBuf> {
        let asked = self.dir.clone().or_else(|| Config::from_env().0.state_dir.map(PathBuf::from));
        asked.or_else(|| place::default_dir(false))
    }

    /// Where processes were searched, for the message that there are none.
    pub(crate) fn whereabouts(&self) -> String {
        if !self.host.is_empty() {
            return format!("at {}", self.host.join(", "));
        }
        format!("in {}", self.dir().map_or_else(|| "/dev/shm or /tmp".into(), |dir| dir.display().to_string()))
    }

    /// All processes that have left a state there, or that answer. It takes up to five seconds when one of another host
    /// has no heartbeat.
    ///
    /// # Errors
    /// When the directory cannot be read, or hosts are to be queried and there is no key.
    pub(crate) fn processes(&self) -> Result<Found> {
        if !self.host.is_empty() {
            return hosts::ask(&self.host);
        }
        let Some(dir) = self.dir() else { return Ok(Found::default()) };
        let silent = || {
            let (dir, seconds) = (dir.display(), PATIENCE.as_secs());
            let what = format!("{dir} cannot be read: its file system has not answered for {seconds} s");
            Error::argument(what).with_hint("use --host (TOWLINE_STATUS_LISTEN), or another directory")
        };
        let deadline = Instant::now() + PATIENCE;
        let states = match at_once::ask(vec![dir.clone()], deadline, |dir| place::read_all(dir)).pop().flatten() {
            Some(Ok(states)) => states,
            // No process has made it yet.
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Some(Err(error)) => return Err(Error::system(format!("reading {}", dir.display()), &error)),
            None => return Err(silent()),
        };
        let processes = gather::processes(readable(states)).ok_or_else(silent)?;
        let notes = dropped(&processes);
        Ok(Found { processes, notes, ..Found::default() })
    }
}

/// The states that could be read; each other file is reported once.
fn readable(states: Vec<(PathBuf, io::Result<State>)>) -> Vec<(PathBuf, State)> {
    static TOLD: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let read = |(path, state): (PathBuf, io::Result<State>)| match state {
        Ok(state) => Some((path, state)),
        Err(error) => {
            if TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone()) {
                eprintln!("towline: {} is left out: {error}", path.display());
            }
            None
        }
    };
    states.into_iter().filter_map(read).collect()
}

/// A note for each process that missed events.
fn dropped(processes: &[Process]) -> Vec<String> {
    let dropped = processes.iter().filter(|process| process.state.dropped > 0).map(|process| {
        let State { host, pid, rank, dropped, .. } = &process.state;
        let rank = rank.map_or_else(String::new, |rank| format!(", global rank {rank}"));
        format!("{host}, process {pid}{rank}, had no room for {dropped} events: what is said of it may be out of date")
    });
    dropped.collect()
}

/// How long ago, for users.
pub(crate) fn ago(now: u64, when: u64) -> String {
    seconds(now.saturating_sub(when))
}
