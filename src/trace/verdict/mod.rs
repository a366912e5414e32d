//! Which rank holds a job up, from what every rank last did.
//!
//! The input is plain: for each rank of a communicator its calls in the order in which they were enqueued, what its
//! open calls wait for, and when it was last heard of. The answer is the first of these that applies, since each
//! explains those behind it:
//!
//! 1. a process that has ended, or has no heartbeat: it was stopped, killed, or gets no processor;
//! 2. a rank that has not entered the call in which the others wait, or has entered another one instead or before;
//! 3. a rank that entered it with other arguments;
//! 4. the end of the chain of waits: a transfer that does not finish, or a rank that waits for its own GPU.
//!
//! It must not know where the input comes from.

mod calls;
mod job;
mod text;
pub(crate) use job::{Finding, Job, Told, Whereabouts};
pub(crate) use text::{call as name_of_call, seconds};
mod waits;

use std::collections::BTreeMap;

use super::names::Name;

/// A call that is open for longer is stuck. Healthy collectives take milliseconds; a checkpoint or a garbage collection
/// takes a second or two.
pub(crate) const STUCK_NS: u64 = 5_000_000_000;

/// A process with a heartbeat each second that has sent none for this long is silent.
pub(crate) const SILENT_NS: u64 = 4_000_000_000;

/// When no rank has entered anything for so long, ranks that have not entered the same calls are behind, even where no
/// open operation shows that others wait.
pub(crate) const IDLE_NS: u64 = 30_000_000_000;

/// The arguments of one call to NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(crate) struct Arguments {
    /// Elements.
    pub count: u64,
    /// NCCL's name of the type.
    pub datatype: Name,
    /// The root, where the function has one.
    pub root: i32,
}

/// Which call of a communicator: NCCL numbers the calls of each function, alike on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    /// The function.
    pub func: Name,
    /// Its number.
    pub seq: u64,
}

/// A collective call of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    /// Which one.
    pub key: Key,
    /// With what.
    pub arguments: Arguments,
    /// When it was enqueued.
    pub entered: u64,
    /// Whether it has not ended.
    pub open: bool,
}

/// What a step of an open call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum On {
    /// A send under way to the peer.
    Network,
    /// Data of the peer.
    Data,
    /// A buffer of the peer.
    Buffer,
    /// This rank's own GPU.
    Gpu,
}

impl On {
    const ALL: [(On, &str); 4] =
        [(On::Network, "network"), (On::Data, "data"), (On::Buffer, "buffer"), (On::Gpu, "gpu")];

    /// Its name in a state.
    pub(crate) fn label(self) -> &'static str {
        Self::ALL.iter().find(|(on, _)| *on == self).map_or("", |(_, label)| label)
    }

    /// The one with this name.
    pub(crate) fn from_label(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, label)| *label == text).map(|(on, _)| *on)
    }
}

/// A wait of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    /// The rank at the other end of the step.
    pub peer: i32,
    /// For what.
    pub on: On,
    /// Since when.
    pub since: u64,
}

/// A connection of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Route {
    /// The process at the other end, `host:process`; empty when only the rank is known.
    pub peer: String,
    /// The rank at the other end, if that is known.
    pub rank: Option<i32>,
    /// Whether this side sends.
    pub send: bool,
    /// This side's interfaces.
    pub interfaces: Vec<String>,
    /// When it last carried something.
    pub moved: u64,
}

impl Route {
    /// Whether it sends to this rank, of which `member` is the process.
    fn leads_to(&self, rank: i32, member: &Member) -> bool {
        // The two names of a host may differ in characters that no file name has.
        let plain = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        let is_process = || plain(&self.peer) == plain(&format!("{}:{}", member.host, member.pid));
        self.send && self.rank.map_or_else(is_process, |own| own == rank)
    }
}

/// One rank of a communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Member {
    /// Where it runs.
    pub host: String,
    /// Its process.
    pub pid: i32,
    /// Its GPU; empty when unknown.
    pub gpu: String,
    /// Its rank in the job, if that is known.
    pub global: Option<i32>,
    /// Whether it has left the communicator in order.
    pub left: bool,
    /// When it last reported; None when it sends no heartbeats, so that silence means nothing.
    pub heard: Option<u64>,
    /// When its process ended, if it did without leaving the communicator.
    pub exited: Option<u64>,
    /// Its calls, in the order of entering; the oldest may be missing.
    pub calls: Vec<Call>,
    /// What its open calls wait for.
    pub waits: Vec<Wait>,
    /// Its process's connections, where they are known.
    pub routes: Vec<Route>,
    /// What else its process is stuck in: a call of another communicator, as text.
    pub elsewhere: Option<String>,
}

/// A communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Communicator {
    /// NCCL's id of it.
    pub id: u64,
    /// How the user knows it.
    pub title: String,
    /// How many ranks it has; 0 when unknown.
    pub ranks: i32,
    /// Those that are known.
    pub members: BTreeMap<i32, Member>,
    /// The time now, or at the end of the trace.
    pub now: u64,
}

/// Ranks that wait in a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// The ranks.
    pub ranks: Vec<i32>,
    /// The call.
    pub key: Key,
    /// For how long the first of them has.
    pub for_ns: u64,
}

/// Why a communicator stands still.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// These ranks' processes have ended, this long ago.
    Exited(Vec<(i32, u64)>),
    /// These ranks' processes have been silent for this long.
    Silent(Vec<(i32, u64)>),
    /// These ranks have not entered the call; each with its last one.
    Behind(Vec<(i32, Option<Call>)>),
    /// These ranks wait in another call.
    Elsewhere(Vec<(i32, Call)>),
    /// These ranks made another call before this one which the rest did not make, or, when `made` is false, did not make one
    /// which the rest made.
    Order {
        /// The ranks that differ from most.
        ranks: Vec<i32>,
        /// The other call.
        key: Key,
        /// Whether they made it.
        made: bool,
    },
    /// These ranks entered with other arguments than the rest.
    Arguments(Vec<(i32, Arguments)>, Arguments),
    /// The chain of waits, from a rank to the one at its end, and what that one waits for; None when the chain is a circle.
    Chain(Vec<i32>, Option<Wait>),
    /// Nothing in the input explains it.
    Unknown,
}

/// The answer for one communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The ranks that wait; None when a mismatch was found before anything waits.
    pub waiting: Option<Waiting>,
    /// Why.
    pub cause: Cause,
    /// Ranks of which nothing is known.
    pub unseen: Vec<i32>,
}

/// Why this communicator stands still; None when it does not.
pub(crate) fn judge(comm: &Communicator) -> Option<Verdict> {
    let unseen = (0..comm.ranks).filter(|rank| !comm.members.contains_key(rank)).collect();
    let Some(waiting) = calls::waiting(comm) else {
        // Sends and receives are no calls that all ranks make, but their transfers wait. A pipeline's stage waits for its
        // turn, so the wait must be a long one.
        let waits = |member: &Member| member.waits.iter().any(|wait| comm.now.saturating_sub(wait.since) >= IDLE_NS);
        let all: Vec<i32> = comm.members.iter().filter(|(_, member)| waits(member)).map(|(&rank, _)| rank).collect();
        let cause = calls::arguments(comm, None).or_else(|| calls::idle(comm)).or_else(|| waits::chain(comm, &all))?;
        return Some(Verdict { waiting: None, cause, unseen });
    };
    let cause = exited(comm)
        .or_else(|| silent(comm))
        .or_else(|| calls::elsewhere(comm, &waiting))
        .or_else(|| calls::behind(comm, waiting.key))
        .or_else(|| calls::order(comm, waiting.key))
        .or_else(|| calls::arguments(comm, Some(waiting.key)))
        .or_else(|| waits::chain(comm, &waiting.ranks))
        .unwrap_or(Cause::Unknown);
    Some(Verdict { waiting: Some(waiting), cause, unseen })
}

fn exited(comm: &Communicator) -> Option<Cause> {
    let exited: Vec<(i32, u64)> = comm
        .members
        .iter()
        .filter_map(|(&rank, member)| Some((rank, comm.now.saturating_sub(member.exited?))))
        .collect();
    (!exited.is_empty()).then_some(Cause::Exited(exited))
}

fn silent(comm: &Communicator) -> Option<Cause> {
    let silent: Vec<(i32, u64)> = comm
        .members
        .iter()
        .filter(|(_, member)| !member.left && member.exited.is_none())
        .filter_map(|(&rank, member)| Some((rank, comm.now.saturating_sub(member.heard?))))
        .filter(|&(_, silence)| silence > SILENT_NS)
        .collect();
    (!silent.is_empty()).then_some(Cause::Silent(silent))
}

impl Verdict {
    /// The ranks that hold the others up; none when the input does not show it.
    pub(crate) fn named(&self) -> Vec<i32> {
        match &self.cause {
            Cause::Exited(ranks) | Cause::Silent(ranks) => ranks.iter().map(|it| it.0).collect(),
            Cause::Behind(ranks) => ranks.iter().map(|it| it.0).collect(),
            Cause::Elsewhere(ranks) => ranks.iter().map(|it| it.0).collect(),
            Cause::Order { ranks, .. } => ranks.clone(),
            Cause::Arguments(ranks, _) => ranks.iter().map(|it| it.0).collect(),
            // A rank of which nothing is known may only pass the wait on.
            Cause::Chain(chain, end) => {
                let last = chain.last().copied().filter(|last| end.is_some() || !self.unseen.contains(last));
                let circle = end.is_none() && last.is_some_and(|last| chain[..chain.len() - 1].contains(&last));
                last.filter(|_| !circle).into_iter().collect()
            }
            Cause::Unknown => Vec::new(),
        }
    }

    /// The kind of cause, in one word.
    pub(crate) fn kind(&self) -> &'static str {
        match &self.cause {
            Cause::Exited(_) => "exited",
            Cause::Silent(_) => "silent",
            Cause::Behind(_) => "behind",
            Cause::Elsewhere(_) | Cause::Order { .. } | Cause::Arguments(..) => "mismatch",
            Cause::Chain(..) => "waits",
            Cause::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests;
