//! The reason why ranks wait, and how many wait for it.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Cause, Communicator, Member, On, Verdict};

/// A communicator that stands still, the reason, and the ranks that wait for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// The communicator.
    pub comm: Arc<Communicator>,
    /// The reason.
    pub verdict: Verdict,
    /// Ranks that wait, in this communicator and in others.
    pub victims: usize,
    /// The communicators in which they wait.
    pub communicators: BTreeSet<u64>,
}

/// A rank that holds others up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    /// Its number in the communicator.
    pub rank: i32,
    /// The known facts about it.
    pub member: Option<Member>,
    /// The interfaces that it uses: of a send under way, those by which it goes.
    pub interfaces: Vec<String>,
}

impl Finding {
    /// Whether a communicator waits for this.
    pub(crate) fn concerns(&self, comm: u64) -> bool {
        self.comm.id == comm || self.communicators.contains(&comm)
    }

    /// The communicator and the verdict.
    pub(crate) fn line(&self) -> String {
        format!("{}: {}", self.comm.title, self.sentence())
    }

    /// The verdict as a sentence, without the communicator's name.
    pub(crate) fn sentence(&self) -> String {
        let mut text = self.comm.explain(&self.verdict);
        let communicators = self.communicators.len();
        if communicators > 1 && self.victims > 0 {
            let (ranks, wait) = if self.victims == 1 { ("rank", "waits") } else { ("ranks", "wait") };
            text += &format!("; in all, {} {ranks} in {communicators} communicators {wait} for this", self.victims);
        }
        text
    }

    /// The ranks that hold the others up.
    pub(crate) fn named(&self) -> Vec<Named> {
        if let Cause::Deadlock(holds) = &self.verdict.cause {
            let of =
                |rank, member: &Member| Named { rank, interfaces: member.interfaces(), member: Some(member.clone()) };
            return holds.iter().map(|hold| of(hold.rank, &hold.member)).collect();
        }
        let of = |rank| {
            let member = self.comm.member(rank).cloned();
            let interfaces = match &self.verdict.cause {
                Cause::Chain(_, Some(wait)) if wait.on == On::Network => {
                    self.comm.route(rank, wait.peer, true).map(|route| &route.interfaces)
                }
                Cause::Undelivered(_, bytes) => Some(&bytes.interfaces),
                _ => None,
            };
            let interfaces =
                interfaces.cloned().or_else(|| member.as_ref().map(Member::interfaces)).unwrap_or_default();
            Named { rank, member, interfaces }
        };
        self.verdict.named().into_iter().map(of).collect()
    }
}
