//! The states of a job's processes, for `towline why` and `towline top`: from their state files, and fresher from the control
//! sockets of those on this host; or over TCP.
//!
//! Whether a process of another host has a heartbeat is seen by watching its file: the hosts' clocks are not compared.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::trace::clock;
use crate::trace::live::{LONGEST, State, place};
use crate::trace::verdict::{SILENT_NS, seconds};
use clap::Args;

mod hosts;

/// How long a process may take to answer on its control socket.
const ANSWER: Duration = Duration::from_secs(2);

/// The interval between two reads of other hosts' files.
const LOOK: Duration = Duration::from_millis(200);

/// A file that was renewed this long ago belongs to a process that would not answer.
const FRESH_NS: u64 = 3_000_000_000;

/// Where to look.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// The directory of the state files [default: TOWLINE_STATE_DIR, else this user's processes on this host]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Ask the processes of these hosts over TCP (TOWLINE_STATUS_LISTEN, TOWLINE_KEY_FILE), instead of reading a directory
    #[arg(long, value_name = "HOST[:PORT],…", value_delimiter = ',', conflicts_with = "dir")]
    host: Vec<String>,
}

/// The processes of a job.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) processes: Vec<Process>,
    /// What the user should know beside them.
    pub(crate) notes: Vec<String>,
}

/// A process of the job.
pub(crate) struct Process {
    /// Its report.
    pub(crate) state: State,
    /// What to add to its times.
    shift: i64,
    /// When it last reported.
    pub(crate) heard: u64,
}

impl Process {
    /// One of this host.
    pub(crate) fn here(state: State) -> Self {
        Self { shift: 0, heard: state.now, state }
    }

    /// A time of its clock on ours.
    pub(crate) fn time(&self, when: u64) -> u64 {
        when.saturating_add_signed(self.shift)
    }

    /// Whether it is there at `now`.
    pub(crate) fn is_alive(&self, now: u64) -> bool {
        !self.state.exited && now.saturating_sub(self.heard) <= SILENT_NS
    }
}

impl Place {
    /// The directory; None when this user's processes on this host have none.
    pub(crate) fn dir(&self) -> Option<PathBuf> {
        let asked = self.dir.clone().or_else(|| Config::from_env().0.state_dir.map(PathBuf::from));
        asked.or_else(|| place::default_dir(false))
    }

    /// What is to be known of where processes were looked for, when there are none.
    pub(crate) fn whereabouts(&self) -> String {
        if !self.host.is_empty() {
            return format!("at {}", self.host.join(", "));
        }
        format!("in {}", self.dir().map_or_else(|| "/dev/shm or /tmp".into(), |dir| dir.display().to_string()))
    }

    /// All processes that have left a state there, or that answer. It takes up to five seconds when one of another host has no
    /// heartbeat.
    ///
    /// # Errors
    /// When the directory cannot be read, or hosts are to be asked and there is no key.
    pub(crate) fn processes(&self) -> Result<Found> {
        if !self.host.is_empty() {
            return hosts::ask(&self.host);
        }
        let Some(dir) = self.dir() else { return Ok(Found::default()) };
        let states = match place::read_all(&dir) {
            Ok(states) => states,
            // No process has made it yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Error::system(format!("reading {}", dir.display()), &error)),
        };
        let processes = gather(states);
        let notes = dropped(&processes);
        Ok(Found { processes, notes })
    }
}

fn gather(states: Vec<(PathBuf, State)>) -> Vec<Process> {
    let boot = place::boot();
    let (here, mut there): (Vec<_>, Vec<_>) = states.into_iter().partition(|(_, state)| state.boot == boot);
    // By file: when its state was seen to change. Those that have ended are not waited for.
    let mut seen: Vec<Option<u64>> = vec![None; there.len()];
    let until = clock::now() + SILENT_NS + FRESH_NS / 3;
    let awaited = |(file, seen): (&(PathBuf, State), &Option<u64>)| !file.1.exited && seen.is_none();
    while there.iter().zip(&seen).any(awaited) && clock::now() < until {
        std::thread::sleep(LOOK);
        // Also those that were seen: while others are waited for they may fall silent, or go on.
        for ((path, state), seen) in there.iter_mut().zip(&mut seen) {
            if let Ok(fresh) = place::read(path)
                && fresh.beat != state.beat
            {
                (*state, *seen) = (fresh, Some(clock::now()));
            }
        }
    }
    // Only now: they are judged by what they say at the end, not before others were waited for.
    let mut found: Vec<Process> = here
        .into_iter()
        .map(|(path, state)| {
            let state = place::read(&path).unwrap_or(state);
            let is_fresh = !state.exited && clock::now().saturating_sub(state.now) < FRESH_NS;
            let state = if is_fresh { ask(&state).unwrap_or(state) } else { state };
            Process::here(state)
        })
        .collect();
    found.extend(there.into_iter().zip(seen).map(|((_, state), seen)| {
        let now = clock::now();
        let wall = now.saturating_add_signed(clock::wall_offset());
        let least = if state.exited { 0 } else { SILENT_NS + FRESH_NS / 3 };
        let heard = seen.unwrap_or_else(|| now.saturating_sub(wall.saturating_sub(state.wall).max(least)));
        Process { shift: heard as i64 - state.now as i64, heard, state }
    }));
    found
}

/// Requests the state of a process of this host.
fn ask(state: &State) -> Option<State> {
    let mut stream = UnixStream::connect(Path::new(state.socket.as_ref()?)).ok()?;
    stream.set_read_timeout(Some(ANSWER)).ok()?;
    stream.set_write_timeout(Some(ANSWER)).ok()?;
    stream.write_all(b"status\n").ok()?;
    stream.shutdown(Shutdown::Write).ok()?;
    let mut bytes = Vec::new();
    stream.take(LONGEST).read_to_end(&mut bytes).ok()?;
    State::read(&bytes).ok().filter(|fresh| fresh.pid == state.pid && fresh.boot == state.boot)
}

/// The communicators that have not ended for some process that is alive: one without belongs to a job that is over.
pub(crate) fn running(processes: &[Process], now: u64) -> BTreeSet<u64> {
    let living = processes.iter().filter(|process| process.is_alive(now));
    let comms = living.flat_map(|process| &process.state.communicators);
    comms.filter(|comm| comm.ended.is_none()).map(|comm| comm.info().id).collect()
}

/// Which processes missed events.
fn dropped(processes: &[Process]) -> Vec<String> {
    let dropped = processes.iter().filter(|process| process.state.dropped > 0).map(|process| {
        let State { host, pid, dropped, .. } = &process.state;
        format!("{host}, process {pid}, had no room for {dropped} events: what is said of it may be out of date")
    });
    dropped.collect()
}

/// How long ago, for users.
pub(crate) fn ago(now: u64, when: u64) -> String {
    seconds(now.saturating_sub(when))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(pid: i32, boot: u64, beat: u64) -> State {
        let wall = clock::now().saturating_add_signed(clock::wall_offset());
        State { pid, boot, beat, now: 1_000, wall, ..State::default() }
    }

    #[test]
    fn a_process_of_another_host_is_alive_while_its_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, state: &State| std::fs::write(dir.path().join(name), state.text()).unwrap();
        // Its clock and its wall clock say nothing that ours would understand.
        write("a.state", &State { wall: 0, ..state(1, 7, 1) });
        write("b.state", &state(2, 7, 1));
        write("c.state", &State { exited: true, ..state(3, 7, 1) });
        let of_this_host = |beat| State { now: clock::now(), ..state(4, place::boot(), beat) };
        write("d.state", &of_this_host(1));
        let states = place::read_all(dir.path()).unwrap();
        let found = std::thread::scope(|scope| {
            scope.spawn(|| {
                // As long as the silent one is waited for.
                for beat in 2..=7 {
                    std::thread::sleep(Duration::from_millis(800));
                    write("a.state", &State { wall: 0, now: 2_000, ..state(1, 7, beat) });
                    write("d.state", &of_this_host(beat));
                }
            });
            gather(states)
        });
        let now = clock::now();
        let alive: Vec<(i32, bool)> = found.iter().map(|it| (it.state.pid, it.is_alive(now))).collect();
        assert_eq!(
            alive,
            [(4, true), (1, true), (2, false), (3, false)],
            "one of this host is not silent because others were waited for"
        );
        assert_eq!(found[1].time(2_000), found[1].heard);
    }
}
