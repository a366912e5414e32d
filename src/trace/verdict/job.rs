//! The communicators of a job, put together from the reports of its processes.

use std::collections::{BTreeMap, HashMap};

use super::calls::first_stuck;
use super::text::call;
use super::{Call, Communicator, Member, Route, STUCK_NS, Verdict, Wait, judge};
use crate::trace::event::CommInfo;

/// Where a process runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Whereabouts {
    /// Its host.
    pub host: String,
    /// Its process id.
    pub pid: i32,
    /// Its rank in the job, if that is known.
    pub rank: Option<i32>,
}

/// A process's report about a rank of a communicator, in times of one clock for the whole job.
#[derive(Debug, Clone, Default)]
pub(crate) struct Told {
    /// The rank's calls, in the order in which they were entered.
    pub calls: Vec<Call>,
    /// What its open operations wait for.
    pub waits: Vec<Wait>,
    /// The time up to which it reports.
    pub until: u64,
    /// When the process last reported, if its silence is meaningful.
    pub heard: Option<u64>,
    /// When the process ended, if it did with the communicator open.
    pub exited: Option<u64>,
    /// When it left the communicator.
    pub ended: Option<u64>,
    /// Its connections.
    pub routes: Vec<Route>,
}

/// A communicator that stands still, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// The communicator.
    pub comm: Communicator,
    /// The reason.
    pub verdict: Verdict,
}

impl Finding {
    /// The verdict as a sentence, without the communicator's name.
    pub(crate) fn sentence(&self) -> String {
        self.comm.explain(&self.verdict)
    }
}

/// The communicators of all processes.
#[derive(Debug, Default)]
pub(crate) struct Job {
    comms: BTreeMap<u64, Communicator>,
    /// By communicator and rank: when it left, with nothing open.
    left: HashMap<(u64, i32), u64>,
}

impl Job {
    /// One process's report about its rank in one communicator.
    pub(crate) fn add(&mut self, place: &Whereabouts, info: &CommInfo, told: Told) {
        let comm = self.comms.entry(info.id).or_default();
        comm.id = info.id;
        comm.now = comm.now.max(told.until);
        comm.title =
            if info.name.is_empty() { format!("{:#x}", info.id) } else { format!("{} ({:#x})", info.name, info.id) };
        comm.ranks = comm.ranks.max(info.ranks);
        if let Some(when) = told.ended
            && !told.calls.iter().any(|call| call.open)
        {
            self.left.insert((info.id, info.rank), when);
        }
        let member = Member {
            host: place.host.clone(),
            pid: place.pid,
            gpu: info.gpu.clone(),
            global: place.rank,
            left: false,
            heard: told.heard,
            exited: told.exited,
            calls: told.calls,
            waits: told.waits,
            routes: told.routes,
            elsewhere: None,
        };
        comm.members.insert(info.rank, member);
    }

    /// The communicators that stand still.
    pub(crate) fn findings(mut self) -> Vec<Finding> {
        self.link();
        let found = |comm: Communicator| judge(&comm).map(|verdict| Finding { comm, verdict });
        self.comms.into_values().filter_map(found).collect()
    }

    /// Of each process, in which other communicators it is stuck.
    fn link(&mut self) {
        let mut stuck: HashMap<(String, i32), Vec<(u64, String)>> = HashMap::new();
        for (&id, comm) in &self.comms {
            for member in comm.members.values() {
                if let Some(first) = first_stuck(member, comm.now) {
                    let what = format!("{} of {}", call(first.key), comm.title);
                    stuck.entry((member.host.clone(), member.pid)).or_default().push((id, what));
                }
            }
        }
        for (&id, comm) in &mut self.comms {
            for (&rank, member) in &mut comm.members {
                // All leave together when a job ends or is aborted.
                member.left = self.left.get(&(id, rank)).is_some_and(|&when| when + STUCK_NS < comm.now);
                let others = stuck.get(&(member.host.clone(), member.pid));
                member.elsewhere = others
                    .and_then(|others| others.iter().find(|(other, _)| *other != id))
                    .map(|(_, what)| what.clone());
            }
        }
    }
}
