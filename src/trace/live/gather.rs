//! From states to the verdict's input: which processes exist, and when each last reported.
//!
//! A process of another host has a heartbeat if its file changes while we watch: the hosts' clocks are not compared.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{LONGEST, State, place};
use crate::trace::clock;
use crate::trace::verdict::{Job, SILENT_NS, Told, Whereabouts};

pub(crate) mod at_once;

/// How long a file system may take to read the files of all processes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// How long the processes of this host may take to answer on their control sockets, all together.
const ANSWER: Duration = Duration::from_secs(2);

/// The interval between two reads of other hosts' files.
const LOOK: Duration = Duration::from_millis(200);

/// A file of another host has changed by now if its process is to change it before it is silent.
const MARGIN_NS: u64 = 1_000_000_000;

/// A process of the job.
pub(crate) struct Process {
    /// Its report.
    pub(crate) state: State,
    /// The correction of its times.
    pub(crate) shift: i64,
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

/// All processes of these states, each with its newest; None when their file system does not answer any more. It takes
/// up to five seconds when one of another host has no heartbeat.
pub(crate) fn processes(states: Vec<(PathBuf, State)>) -> Option<Vec<Process>> {
    let boot = place::boot();
    let (here, mut there): (Vec<_>, Vec<_>) = states.into_iter().partition(|(_, state)| state.boot == boot);
    // By file, when its state was seen to change. Processes that have ended are not awaited.
    let mut seen: Vec<Option<u64>> = vec![None; there.len()];
    let until = clock::now() + SILENT_NS + MARGIN_NS;
    let awaited = |(file, seen): (&(PathBuf, State), &Option<u64>)| !file.1.exited && seen.is_none();
    while there.iter().zip(&seen).any(awaited) && clock::now() < until {
        std::thread::sleep(LOOK);
        // Also those that were seen: while others are waited for they may fall silent, or go on.
        let newest = fresh(&there)?;
        for (((_, state), seen), fresh) in there.iter_mut().zip(&mut seen).zip(newest) {
            if let Some((fresh, when)) = fresh.filter(|(fresh, _)| fresh.beat != state.beat) {
                (*state, *seen) = (fresh, Some(when));
            }
        }
    }
    // Asked last, so that the verdict uses their newest state, not one from before the wait for others.
    let newest = fresh(&here)?;
    let here: Vec<State> = here
        .into_iter()
        .zip(newest)
        .map(|((_, state), fresh)| fresh.map(|it| it.0).filter(|it| it.process() == state.process()).unwrap_or(state))
        .collect();
    let answers = at_once::ask(here.clone(), Instant::now() + ANSWER, ask);
    let mut found: Vec<Process> =
        here.into_iter().zip(answers).map(|(state, answer)| Process::here(answer.flatten().unwrap_or(state))).collect();
    found.extend(there.into_iter().zip(seen).map(|((_, state), seen)| {
        let now = clock::now();
        let wall = now.saturating_add_signed(clock::wall_offset());
        let least = if state.exited { 0 } else { SILENT_NS + MARGIN_NS };
        let heard = seen.unwrap_or_else(|| now.saturating_sub(wall.saturating_sub(state.wall).max(least)));
        Process { shift: heard as i64 - state.now as i64, heard, state }
    }));
    Some(found)
}

/// The content of these files now, and when each was read; None when their file system does not answer.
fn fresh(files: &[(PathBuf, State)]) -> Option<Vec<Option<(State, u64)>>> {
    let paths: Vec<PathBuf> = files.iter().map(|(path, _)| path.clone()).collect();
    let read = |path: &PathBuf| place::read(path).ok().map(|state| (state, clock::now()));
    let read_all = move |paths: &Vec<PathBuf>| paths.iter().map(read).collect();
    at_once::ask(vec![paths], Instant::now() + PATIENCE, read_all).pop().flatten()
}

/// Requests the state of a process of this host, which has not ended. Its file may be old because its disk is full or
/// does not answer.
fn ask(state: &State) -> Option<State> {
    if state.exited {
        return None;
    }
    let (_dir, name) = place::short_name(Path::new(state.socket.as_ref()?)).ok()?;
    let mut stream = UnixStream::connect(name).ok()?;
    stream.set_read_timeout(Some(ANSWER)).ok()?;
    stream.set_write_timeout(Some(ANSWER)).ok()?;
    stream.write_all(b"status\n").ok()?;
    stream.shutdown(Shutdown::Write).ok()?;
    let mut bytes = Vec::new();
    stream.take(LONGEST).read_to_end(&mut bytes).ok()?;
    // In another container there may be another process's socket at this path.
    State::read(&bytes).ok().filter(|fresh| fresh.process() == state.process())
}

/// The communicators that have not ended for some process that is alive: one without belongs to a job that is over.
pub(crate) fn running(processes: &[Process], now: u64) -> BTreeSet<u64> {
    let living = processes.iter().filter(|process| process.is_alive(now));
    let comms = living.flat_map(|process| &process.state.communicators);
    comms.filter(|comm| comm.ended.is_none()).map(|comm| comm.info().id).collect()
}

/// The processes' reports about the communicators that are in use.
pub(crate) fn job(processes: &[Process], now: u64) -> Job {
    let comms = running(processes, now);
    let mut job = Job::default();
    for process in processes {
        let state = &process.state;
        let place = Whereabouts { host: state.host.clone(), pid: state.pid, stamp: state.stamp, rank: state.rank };
        for comm in &state.communicators {
            let info = comm.info();
            if comms.contains(&info.id) {
                job.add(&place, &info, told(process, comm.told(|when| process.time(when)), now));
            }
        }
    }
    job
}

fn told(process: &Process, told: Told, now: u64) -> Told {
    let routes = process.state.connections.iter().map(|it| it.route(|when| process.time(when)));
    Told {
        until: now,
        heard: Some(process.heard),
        exited: process.state.exited.then_some(process.heard),
        routes: routes.collect(),
        gaps: process.state.gaps(|when| process.time(when), now),
        ..told
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn state(pid: i32, boot: u64, beat: u64) -> State {
        let wall = clock::now().saturating_add_signed(clock::wall_offset());
        State { pid, boot, beat, now: 1_000, wall, ..State::default() }
    }

    #[test]
    fn a_process_of_another_host_is_alive_while_its_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, state: &State| std::fs::write(dir.path().join(name), state.text()).unwrap();
        // Its clocks cannot be compared with ours.
        write("a.state", &State { wall: 0, ..state(1, 7, 1) });
        write("b.state", &state(2, 7, 1));
        write("c.state", &State { exited: true, ..state(3, 7, 1) });
        let of_this_host = |beat| State { now: clock::now(), ..state(4, place::boot(), beat) };
        write("d.state", &of_this_host(1));
        let states = place::read_all(dir.path()).unwrap();
        let states = states.into_iter().map(|(path, state)| (path, state.unwrap())).collect();
        let found = std::thread::scope(|scope| {
            scope.spawn(|| {
                // As long as the silent one is waited for.
                for beat in 2..=7 {
                    std::thread::sleep(Duration::from_millis(800));
                    write("a.state", &State { wall: 0, now: 2_000, ..state(1, 7, beat) });
                    write("d.state", &of_this_host(beat));
                }
            });
            processes(states).unwrap()
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

    /// A control socket that gives this answer to all.
    fn answers_with(path: &Path, answer: Option<String>) {
        let (_dir, name) = place::short_name(path).unwrap();
        let listener = UnixListener::bind(name).unwrap();
        std::thread::spawn(move || {
            let mut kept = Vec::new();
            for mut client in listener.incoming().flatten() {
                match &answer {
                    Some(answer) => {
                        let _ = client.read(&mut [0; 16]);
                        let _ = client.write_all(answer.as_bytes());
                    }
                    None => kept.push(client),
                }
            }
        });
    }

    fn of_this_host(pid: i32, dir: &Path) -> State {
        let socket = Some(dir.join(format!("{pid}.sock")).display().to_string());
        State { now: clock::now(), stamp: 1, socket, ..state(pid, place::boot(), 1) }
    }

    #[test]
    fn an_answer_of_another_containers_process_with_the_same_number_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let [ours, other] = [1, 2].map(|stamp| State { stamp, beat: 2, ..of_this_host(7, dir.path()) });
        for (answer, expected) in [(other, 1), (ours, 2)] {
            let state = of_this_host(7, dir.path());
            let _ = std::fs::remove_file(dir.path().join("7.sock"));
            answers_with(&dir.path().join("7.sock"), Some(answer.text()));
            assert_eq!(processes(vec![("none".into(), state)]).unwrap()[0].state.beat, expected);
        }
    }

    #[test]
    fn a_process_whose_file_is_old_is_asked_all_the_same_wherever_its_socket_is() {
        let dir = tempfile::tempdir().unwrap();
        // Longer than what the kernel takes as a socket's name.
        let dir = dir.path().join("d".repeat(120));
        std::fs::create_dir(&dir).unwrap();
        let answer = State { beat: 9, ..of_this_host(7, &dir) };
        answers_with(&dir.join("7.sock"), Some(answer.text()));
        let old = State { now: clock::now().saturating_sub(60 * 1_000_000_000), ..of_this_host(7, &dir) };
        let found = processes(vec![("none".into(), old)]).unwrap();
        assert!(found[0].is_alive(clock::now()) && found[0].state.beat == 9);
    }

    #[test]
    fn many_processes_that_do_not_answer_take_the_time_of_one() {
        let dir = tempfile::tempdir().unwrap();
        let states: Vec<_> = (0..60).map(|pid| (PathBuf::from("none"), of_this_host(pid, dir.path()))).collect();
        (0..60).for_each(|pid| answers_with(&dir.path().join(format!("{pid}.sock")), None));
        let began = Instant::now();
        assert_eq!(processes(states).unwrap().len(), 60);
        assert!(began.elapsed() < 4 * ANSWER, "{:?}", began.elapsed());
    }
}
