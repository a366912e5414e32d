//! Which rank holds a job up, from what every rank last did.
//!
//! The input is plain. For each rank of a communicator it has the rank's calls in the order in which they were
//! enqueued, what its open calls wait for, and when it last reported. The answer is the first of these that applies,
//! since each explains those behind it:
//!
//! 1. a process that has ended, or has no heartbeat: it was stopped, killed, or gets no processor;
//! 2. a rank that has not entered the call in which the others wait, or has entered another one instead or before;
//! 3. a rank that entered it with other arguments;
//! 4. the end of the chain of waits. That is an unfinished transfer, a rank that waits for its own GPU, or bytes that
//!    one end of a connection has sent and the other has not received;
//! 5. a rank without data, because its process was queried and does not answer.
//!
//! A rank that holds one communicator up because it waits in another one is no answer. [`graph`] continues with that
//! one, and finds the rank that holds up all of them, or a circle of communicators.
//!
//! It must not know where the input comes from.

mod calls;
mod finding;
mod graph;
mod job;
mod text;
mod transfers;
mod waits;
pub(crate) use finding::Finding;
pub(crate) use job::{Job, Told, Whereabouts};
pub(crate) use text::{call as name_of_call, seconds};

use std::collections::{BTreeMap, BTreeSet};

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

/// Which call of a communicator. NCCL numbers the collectives of each function, alike on all ranks. A send or a receive
/// is numbered here among those of its rank with that peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    /// The function.
    pub func: Name,
    /// Its number.
    pub seq: u64,
    /// The rank at the other end of a send or a receive.
    pub peer: Option<i32>,
}

impl Key {
    /// A collective.
    pub(crate) fn collective(func: Name, seq: u64) -> Self {
        Self { func, seq, peer: None }
    }

    /// A send or a receive.
    pub(crate) fn transfer(func: Name, seq: u64, peer: i32) -> Self {
        Self { func, seq, peer: Some(peer) }
    }

    /// Of a transfer: whether it is a send.
    pub(crate) fn is_send(self) -> bool {
        self.func.text() == SEND
    }
}

/// NCCL's names of the two halves of a transfer.
pub(crate) const SEND: &str = "Send";
/// As above.
pub(crate) const RECV: &str = "Recv";

/// A call of one rank.
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

/// The reason for which a step of an open call waits.
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

    /// The same in words.
    fn what(self) -> &'static str {
        match self {
            On::Network => "a send to arrive",
            On::Data => "data",
            On::Buffer => "a buffer of the receiver",
            On::Gpu => "the GPU",
        }
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

/// When events of a process last found no room, by the kind of event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Gaps {
    /// Events that a call was entered.
    pub calls: Option<u64>,
    /// Events that something ended.
    pub ends: Option<u64>,
    /// Events with the reason for a wait.
    pub waits: Option<u64>,
}

impl Gaps {
    /// All kinds at this time.
    pub(crate) fn all(when: u64) -> Self {
        Self { calls: Some(when), ends: Some(when), waits: Some(when) }
    }

    /// Whether anything is missing since this time.
    fn any_since(self, when: u64) -> bool {
        [self.calls, self.ends, self.waits].into_iter().flatten().any(|gap| gap >= when)
    }
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
    /// The connection's number, the same at both ends; 0 when unknown.
    pub number: u64,
    /// Bytes of messages that this side has sent or received over it.
    pub bytes: u64,
    /// When that number last grew.
    pub moved: u64,
    /// Since when this side has read what arrives, because a request has been outstanding; None when none is.
    pub polled: Option<u64>,
}

/// Bytes that a rank has sent, and that the rank which waits for them has not received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Undelivered {
    /// Since when nothing has moved.
    pub since: u64,
    /// The sender's interfaces.
    pub interfaces: Vec<String>,
}

impl Route {
    /// Whether this rank, of which `member` is the process, is at its other end.
    fn leads_to(&self, rank: i32, member: &Member) -> bool {
        self.rank.map_or_else(|| plain(&self.peer) == member.process(), |own| own == rank)
    }
}

/// The name of a process, `host:process`, for comparisons: the two names of a host may differ in characters that no
/// file name has.
fn plain(text: &str) -> String {
    text.replace(|c: char| !c.is_ascii_alphanumeric(), "_")
}

/// One rank of a communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Member {
    /// Where it runs.
    pub host: String,
    /// Its process.
    pub pid: i32,
    /// As in [`Whereabouts`].
    pub stamp: u64,
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
    /// Its collective calls, in the order of entering; the oldest may be missing.
    pub calls: Vec<Call>,
    /// Its sends and receives, as above.
    pub transfers: Vec<Call>,
    /// By peer: how many sends and receives it has called since the communicator began.
    pub exchanged: Exchanged,
    /// The reasons for which its open calls wait.
    pub waits: Vec<Wait>,
    /// Its process's connections, where they are known.
    pub routes: Vec<Route>,
    /// When its process missed events.
    pub gaps: Gaps,
}

/// By peer: how many sends and receives a rank has called.
pub(crate) type Exchanged = BTreeMap<i32, (u64, u64)>;

impl Member {
    /// Its process, as [`plain`] has it.
    fn process(&self) -> String {
        plain(&format!("{}:{}", self.host, self.pid))
    }

    /// The call that it entered last.
    fn last(&self) -> Option<&Call> {
        self.calls.last().into_iter().chain(self.transfers.last()).max_by_key(|call| call.entered)
    }

    /// Its interfaces, as far as its connections show them.
    fn interfaces(&self) -> Vec<String> {
        let names: BTreeSet<&String> = self.routes.iter().flat_map(|route| &route.interfaces).collect();
        names.into_iter().cloned().collect()
    }
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
    /// The others, when all of them belong to processes that do not answer, each with what is known of its process.
    pub lost: BTreeMap<i32, Option<Member>>,
    /// The time now, or at the end of the trace.
    pub now: u64,
}

impl Communicator {
    /// Ranks of which nothing is known.
    fn unseen(&self) -> Vec<i32> {
        (0..self.ranks).filter(|rank| !self.members.contains_key(rank)).collect()
    }

    /// The known facts about a rank.
    fn member(&self, rank: i32) -> Option<&Member> {
        self.members.get(&rank).or_else(|| self.lost.get(&rank)?.as_ref())
    }

    /// The cause, or, where nothing explains the wait, the processes that do not answer.
    fn or_lost(&self, cause: Option<Cause>) -> Cause {
        cause.or_else(|| self.all_lost()).unwrap_or(Cause::Unknown)
    }

    /// The processes that do not answer, if there are any.
    fn all_lost(&self) -> Option<Cause> {
        (!self.lost.is_empty()).then(|| Cause::Lost(self.lost.keys().copied().collect()))
    }

    /// Ranks of which events are missing since this time.
    fn gaps_since(&self, when: u64) -> Vec<i32> {
        self.members.iter().filter(|(_, member)| member.gaps.any_since(when)).map(|(&rank, _)| rank).collect()
    }
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

/// A rank that has not made a call for which others wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Absent {
    /// The rank.
    pub rank: i32,
    /// The call.
    pub lacks: Key,
    /// The call that it entered last.
    pub last: Option<Call>,
}

/// Ranks that made a call with the same arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Made {
    /// The call.
    pub key: Key,
    /// With what.
    pub arguments: Arguments,
    /// The ranks that made it so.
    pub ranks: Vec<i32>,
}

/// A rank in a circle of communicators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hold {
    /// Its number in the communicator that it holds up.
    pub rank: i32,
    /// The known facts about it.
    pub member: Member,
    /// The call that it holds up, with its communicator.
    pub holds: String,
    /// The call that it is in.
    pub is_in: String,
    /// Whether it has entered the one that it holds up too, after the one that it is in.
    pub is_in_both: bool,
}

/// Why a communicator stands still.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// These ranks' processes have ended, this long ago.
    Exited(Vec<(i32, u64)>),
    /// These ranks' processes have been silent for this long.
    Silent(Vec<(i32, u64)>),
    /// The processes of these ranks do not answer, and nothing else is known of them.
    Lost(Vec<i32>),
    /// These ranks have not made a call.
    Behind(Vec<Absent>),
    /// These ranks wait in another call.
    Elsewhere {
        /// The ranks, each with its call.
        ranks: Vec<(i32, Call)>,
        /// Those in the call that most ranks wait in, unless these are more than the others.
        others: Vec<i32>,
    },
    /// Some ranks made another call before this one, and some did not.
    Order {
        /// The other call.
        key: Key,
        /// The ranks that made it.
        made: Vec<i32>,
        /// Those that did not.
        lack: Vec<i32>,
    },
    /// Ranks made a call with different arguments; those that most ranks made come first.
    Arguments(Vec<Made>),
    /// The chain of waits, from a rank to the one at its end, and what that one waits for; None when the chain is a
    /// circle.
    Chain(Vec<i32>, Option<Wait>),
    /// A circle of waits, up to a rank that has done its part: the rank before it has not received what it has sent.
    Undelivered(Vec<i32>, Undelivered),
    /// Ranks wait for each other in several communicators.
    Deadlock(Vec<Hold>),
    /// Nothing in the input explains it.
    Unknown,
}

/// Of groups of ranks that differ, those that are not like most; all of them when none is the larger half.
fn odd<'a>(groups: impl IntoIterator<Item = &'a Vec<i32>>) -> Vec<i32> {
    let groups: Vec<&Vec<i32>> = groups.into_iter().collect();
    let all: usize = groups.iter().map(|ranks| ranks.len()).sum();
    groups.into_iter().filter(|ranks| 2 * ranks.len() <= all).flatten().copied().collect()
}

/// Why a communicator stands still, and which ranks wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The ranks that wait; None when a mismatch was found before anything waits.
    pub waiting: Option<Waiting>,
    /// Why.
    pub cause: Cause,
    /// Ranks of which nothing is known.
    pub unseen: Vec<i32>,
    /// Ranks with missing events that may prove the contrary.
    pub gaps: Vec<i32>,
}

impl Verdict {
    /// The ranks that hold the others up; none when the input does not show it.
    pub(crate) fn named(&self) -> Vec<i32> {
        match &self.cause {
            Cause::Exited(ranks) | Cause::Silent(ranks) => ranks.iter().map(|it| it.0).collect(),
            Cause::Lost(ranks) => ranks.clone(),
            Cause::Behind(ranks) => ranks.iter().map(|it| it.rank).collect(),
            Cause::Elsewhere { ranks, others } => ranks.iter().map(|it| it.0).chain(others.iter().copied()).collect(),
            Cause::Order { made, lack, .. } => odd([made, lack]),
            Cause::Arguments(groups) => odd(groups.iter().map(|it| &it.ranks)),
            Cause::Deadlock(holds) => holds.iter().map(|it| it.rank).collect(),
            // A rank of which nothing is known may only pass the wait on.
            Cause::Chain(chain, end) => {
                let is_known = |last: &i32| !self.unseen.contains(last) && !self.gaps.contains(last);
                let last = chain.last().copied().filter(|last| end.is_some() || is_known(last));
                last.filter(|_| !is_circle(chain, *end)).into_iter().collect()
            }
            Cause::Undelivered(chain, _) => chain.last().copied().into_iter().collect(),
            Cause::Unknown => Vec::new(),
        }
    }

    /// Whether it names a rank.
    pub(crate) fn names_a_rank(&self) -> bool {
        !self.named().is_empty()
    }

    /// The kind of cause, in one word.
    pub(crate) fn kind(&self) -> &'static str {
        match &self.cause {
            Cause::Exited(_) => "exited",
            Cause::Silent(_) | Cause::Lost(_) => "silent",
            Cause::Behind(_) => "behind",
            Cause::Elsewhere { .. } | Cause::Order { .. } | Cause::Arguments(_) => "mismatch",
            Cause::Chain(..) | Cause::Undelivered(..) => "waits",
            Cause::Deadlock(_) => "deadlock",
            Cause::Unknown => "unknown",
        }
    }
}

/// Whether a chain of waits leads back into itself.
fn is_circle(chain: &[i32], end: Option<Wait>) -> bool {
    end.is_none() && chain.split_last().is_some_and(|(last, before)| before.contains(last))
}

/// Those of these ranks whose processes have ended, or else have no heartbeat.
fn gone(comm: &Communicator, ranks: impl Iterator<Item = i32>) -> Option<Cause> {
    let members: Vec<(i32, &Member)> = ranks.filter_map(|rank| Some((rank, comm.members.get(&rank)?))).collect();
    let ago = |when: u64| comm.now.saturating_sub(when);
    let exited: Vec<(i32, u64)> =
        members.iter().filter_map(|&(rank, member)| Some((rank, ago(member.exited?)))).collect();
    let there = members.iter().filter(|(_, member)| !member.left && member.exited.is_none());
    let silent = there.filter_map(|&(rank, member)| Some((rank, ago(member.heard?))));
    let silent: Vec<(i32, u64)> = silent.filter(|&(_, silence)| silence > SILENT_NS).collect();
    match (exited.is_empty(), silent.is_empty()) {
        (false, _) => Some(Cause::Exited(exited)),
        (true, false) => Some(Cause::Silent(silent)),
        (true, true) => None,
    }
}

#[cfg(test)]
mod tests;
