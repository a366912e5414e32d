//! Warns once of each call that does not end. The warning is the sentence of `towline why` where the states of the
//! job's processes lie in a directory. Otherwise it uses this process's own data.
//!
//! The states are read on a thread of their own, since a file system may not answer; it has [`PATIENCE`], and the
//! writer does not wait for it.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

use super::clock;
use super::event::CommInfo;
use super::live::gather;
use super::live::network::Connections;
use super::live::place;
use super::say::{Level, say};
use super::tracker::{Comm, Tracker};
use super::verdict::{Call, Finding, Job, Key, Route, Told, Whereabouts};

/// How long the states of all processes may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// In a large job about this many processes read the states of all; the others log only their own knowledge.
const READERS: usize = 32;

/// The most reported calls that are remembered.
const TOLD: usize = 10_000;

/// This process's knowledge of a call that does not end.
struct Stuck {
    comm: u64,
    sentence: String,
}

/// A poll of all processes' states.
struct Look {
    stuck: Vec<Stuck>,
    answer: Receiver<Vec<Finding>>,
    until: Instant,
}

/// This process's data.
pub(super) struct Own<'a> {
    /// Where it is.
    pub place: &'a Whereabouts,
    /// Its connections.
    pub connections: Connections,
    /// Where the states of all processes are.
    pub states: Option<&'a Path>,
    /// How long a call may be open.
    pub after: Duration,
}

/// Calls that were reported.
#[derive(Default)]
pub(super) struct Watch {
    told: HashSet<(u64, Key)>,
    look: Option<Look>,
}

impl Watch {
    /// Finds calls that are open for too long, and reports the results about earlier ones.
    pub(super) fn look(&mut self, tracker: &Tracker, own: &Own<'_>) {
        if let Some(look) = self.look.take() {
            self.look = look.tell();
            return;
        }
        let (stuck, rank) = self.stuck(tracker, own);
        if stuck.is_empty() {
            return;
        }
        let (sender, answer) = mpsc::channel();
        let states = own.states.map(Path::to_owned);
        let read = move || drop(sender.send(states.map(|dir| look_at_all(&dir, rank)).unwrap_or_default()));
        // Without a thread there is no answer, so this process reports its own knowledge.
        let _ = crate::os::thread::spawn("towline-why", read);
        self.look = Look { stuck, answer, until: Instant::now() + PATIENCE }.tell();
    }

    /// Calls that were not reported yet, and this process's rank.
    fn stuck(&mut self, tracker: &Tracker, own: &Own<'_>) -> (Vec<Stuck>, usize) {
        let (now, after) = (clock::now(), own.after.as_nanos() as u64);
        let is_stuck = |call: &Call| call.open && now.saturating_sub(call.entered) >= after;
        let stuck = |comm: &Comm| comm.calls().chain(comm.transfers()).any(is_stuck);
        let living = || tracker.comms().iter().filter(|(_, comm)| comm.ended.is_none());
        if !living().any(|(_, comm)| stuck(comm)) {
            return Default::default();
        }
        let routes: Vec<Route> = (own.connections)().into_iter().map(|it| it.route(|_| now)).collect();
        let mut waits = tracker.waits();
        let mut job = Job::default();
        let mut rank = own.place.rank.unwrap_or(0);
        for (context, comm) in living() {
            // The other ranks' processes are not known here.
            let info = CommInfo { ranks: 0, ..comm.info.clone() };
            rank = own.place.rank.unwrap_or(info.rank);
            let told = Told {
                calls: comm.calls().copied().collect(),
                transfers: comm.transfers().copied().collect(),
                exchanged: comm.exchanged.clone(),
                waits: waits.remove(context).unwrap_or_default(),
                until: now,
                routes: routes.clone(),
                ..Told::default()
            };
            job.add(own.place, &info, told);
        }
        if self.told.len() > TOLD {
            self.told.clear();
        }
        let new = job.findings().into_iter().filter_map(|finding| {
            let waiting = finding.verdict.waiting.as_ref().filter(|waiting| waiting.for_ns >= after)?;
            let is_new = self.told.insert((finding.comm.id, waiting.key));
            is_new.then(|| Stuck { comm: finding.comm.id, sentence: finding.line() })
        });
        (new.collect(), rank.max(0) as usize)
    }
}

impl Look {
    /// Reports the result; returns itself when there is none yet.
    fn tell(self) -> Option<Self> {
        let findings = match self.answer.try_recv() {
            Ok(findings) => findings,
            Err(TryRecvError::Empty) if Instant::now() < self.until => return Some(self),
            Err(_) => Vec::new(),
        };
        let of = |stuck: &Stuck| findings.iter().find(|found| found.concerns(stuck.comm)).map(Finding::line);
        // Two communicators may wait for one thing.
        let lines: BTreeSet<String> = self
            .stuck
            .iter()
            .map(|stuck| of(stuck).unwrap_or_else(|| format!("{} (towline why looks at all ranks)", stuck.sentence)))
            .collect();
        lines.iter().for_each(|line| say(Level::Warn, line));
        None
    }
}

/// The verdict from all processes' states; None where this process leaves that to others.
fn look_at_all(dir: &Path, rank: usize) -> Vec<Finding> {
    let Ok(states) = place::read_all(dir) else { return Vec::new() };
    if !rank.is_multiple_of(states.len() / READERS + 1) {
        return Vec::new();
    }
    let states = states.into_iter().filter_map(|(path, state)| Some((path, state.ok()?))).collect();
    let Some(processes) = gather::processes(states) else { return Vec::new() };
    let mut findings = gather::job(&processes, clock::now()).findings();
    findings.retain(|finding| finding.verdict.names_a_rank());
    findings
}
