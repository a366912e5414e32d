//! The communicators of a job, put together from the reports of its processes.

use std::collections::{BTreeSet, HashMap};

use super::graph::{self, Communicators};
use super::{Call, Exchanged, Finding, Gaps, Member, On, Route, STUCK_NS, Wait, plain};
use crate::trace::event::CommInfo;

/// Where a process runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Whereabouts {
    /// Its host.
    pub host: String,
    /// Its process id.
    pub pid: i32,
    /// What no other process has, also one of another container with the same host and process id; 0 when unknown.
    pub stamp: u64,
    /// Its rank in the job, if that is known.
    pub rank: Option<i32>,
}

/// A process's report about a rank of a communicator, in times of one clock for the whole job.
#[derive(Debug, Clone, Default)]
pub(crate) struct Told {
    /// The rank's collectives, in the order in which they were entered.
    pub calls: Vec<Call>,
    /// Its sends and receives, as above.
    pub transfers: Vec<Call>,
    /// How many of these there have been.
    pub exchanged: Exchanged,
    /// The reasons for which its open operations wait.
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
    /// When it missed events.
    pub gaps: Gaps,
}

/// The communicators of all processes.
#[derive(Debug, Default)]
pub(crate) struct Job {
    comms: Communicators,
    /// By communicator and rank: when it left, with nothing open.
    left: HashMap<(u64, i32), u64>,
    /// Processes that there are, or were, and that gave no report.
    unanswered: usize,
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
            && !told.calls.iter().chain(&told.transfers).any(|call| call.open)
        {
            self.left.insert((info.id, info.rank), when);
        }
        let member = Member {
            host: place.host.clone(),
            pid: place.pid,
            stamp: place.stamp,
            gpu: info.gpu.clone(),
            global: place.rank,
            left: false,
            heard: told.heard,
            exited: told.exited,
            calls: told.calls,
            transfers: told.transfers,
            exchanged: told.exchanged,
            waits: told.waits,
            routes: told.routes,
            gaps: told.gaps,
        };
        comm.members.insert(info.rank, member);
    }

    /// How many processes were queried and gave no report.
    pub(crate) fn add_unanswered(&mut self, count: usize) {
        self.unanswered += count;
    }

    /// What the connections of the others show of the process that gave no report, if they lead to a single one.
    fn lost(&self) -> Option<Member> {
        if self.unanswered != 1 {
            return None;
        }
        let members = || self.comms.values().flat_map(|comm| comm.members.values());
        let known: BTreeSet<String> = members().map(Member::process).collect();
        let peers = members().flat_map(|member| &member.routes).map(|route| route.peer.as_str());
        let strangers: BTreeSet<&str> = peers.filter(|peer| !known.contains(&plain(peer))).collect();
        let only = strangers.first().filter(|_| strangers.len() == 1)?;
        let (host, pid) = only.rsplit_once(':')?;
        Some(Member { host: host.into(), pid: pid.parse().ok()?, ..Member::default() })
    }

    /// How many communicators there are.
    pub(crate) fn communicators(&self) -> usize {
        self.comms.len()
    }

    /// The interfaces of the connection over which a rank of a communicator waits.
    pub(crate) fn interfaces(&self, comm: u64, rank: i32, wait: &Wait) -> &[String] {
        let send = matches!(wait.on, On::Network | On::Buffer);
        let comm = self.comms.get(&comm).filter(|_| wait.on != On::Gpu);
        comm.and_then(|comm| comm.route(rank, wait.peer, send)).map_or(&[], |route| &route.interfaces)
    }

    /// The reasons for which the job waits: none when no communicator stands still.
    pub(crate) fn findings(mut self) -> Vec<Finding> {
        let lost = self.lost();
        // Otherwise more processes are unseen than were queried: some may be healthy, on a host that was not queried.
        let are_all_known = self.comms.values().all(|comm| comm.unseen().len() <= self.unanswered);
        for (&id, comm) in &mut self.comms {
            if are_all_known {
                comm.lost = comm.unseen().into_iter().map(|rank| (rank, lost.clone())).collect();
            }
            for (&rank, member) in &mut comm.members {
                // All leave together when a job ends or is aborted.
                member.left = self.left.get(&(id, rank)).is_some_and(|&when| when + STUCK_NS < comm.now);
            }
        }
        graph::findings(&self.comms)
    }
}
