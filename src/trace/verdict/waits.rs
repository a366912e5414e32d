//! The wait graph, followed to its end.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::{Cause, Communicator, Member, On, Route, STUCK_NS, Undelivered, Wait, gone};

/// What a rank is in, or waits for, counts when it is as old as this and another rank is stuck for its sake.
pub(super) const FOLLOWED_NS: u64 = STUCK_NS / 5;

/// The chain of waits that most stuck ranks lead into. A rank with a send under way that does not end is the end of its
/// chain. A rank that waits for a peer's data or buffer leads on to that peer. A rank that waits for nothing but its
/// GPU is the end. A GPU that waits only because data is missing is never considered the cause, since its rank waits
/// for the peer too. A process on the way that has ended, is silent or does not answer explains the chain: what it
/// waits for is as old as it. A circle ends where what was sent has not arrived ([`Follower::circle`]).
pub(super) fn chain(comm: &Communicator, ranks: &[i32]) -> Option<Cause> {
    let mut follower = Follower { comm, pairs: HashMap::new() };
    let ways: Vec<Way> = ranks.iter().filter_map(|&rank| follower.follow(rank)).collect();
    let receiver = |way: &Way| way.end.filter(|wait| wait.on == On::Network).map(|wait| wait.peer);
    let met: BTreeSet<i32> = ways.iter().flat_map(|way| way.chain.iter().copied().chain(receiver(way))).collect();
    let leads_to_lost = met.iter().any(|rank| comm.lost.contains_key(rank));
    if let Some(cause) = gone(comm, met.into_iter()) {
        return Some(cause);
    }
    if leads_to_lost {
        return comm.all_lost();
    }
    let mut ends: BTreeMap<i32, usize> = BTreeMap::new();
    for way in &ways {
        *ends.entry(*way.chain.last()?).or_default() += 1;
    }
    let (&end, _) = ends.iter().max_by_key(|(_, votes)| **votes)?;
    // The longest chain to that end shows the most.
    let ways = ways.into_iter().filter(|way| way.chain.last() == Some(&end));
    let Way { chain, end, undelivered } = ways.max_by_key(|way| way.chain.len())?;
    Some(match undelivered {
        Some(bytes) => Cause::Undelivered(chain, bytes),
        None => Cause::Chain(chain, end),
    })
}

/// A chain of waits: its ranks, what the last one waits for, and where a circle is broken.
struct Way {
    chain: Vec<i32>,
    end: Option<Wait>,
    undelivered: Option<Undelivered>,
}

/// Follows the waits of a communicator.
struct Follower<'a> {
    comm: &'a Communicator,
    /// By sender and receiver: what was found about their connections.
    pairs: HashMap<(i32, i32), Option<Undelivered>>,
}

impl Follower<'_> {
    fn follow(&mut self, from: i32) -> Option<Way> {
        let (mut chain, mut met, mut awaited) = (vec![from], HashSet::from([from]), Vec::new());
        loop {
            let rank = *chain.last()?;
            // A rank that another one is stuck for may have begun to wait a little later.
            let least = if chain.len() == 1 { STUCK_NS } else { FOLLOWED_NS };
            let waits: Vec<&Wait> = self
                .comm
                .members
                .get(&rank)
                .into_iter()
                .flat_map(|member| &member.waits)
                .filter(|wait| self.comm.now.saturating_sub(wait.since) >= least)
                .collect();
            let oldest = |on: &[On]| waits.iter().filter(|wait| on.contains(&wait.on)).min_by_key(|wait| wait.since);
            let Some(&&wait) =
                oldest(&[On::Network]).or_else(|| oldest(&[On::Data, On::Buffer])).or_else(|| oldest(&[On::Gpu]))
            else {
                // A peer of which no wait is known ends the chain, if anything led to it.
                return (chain.len() > 1).then_some(Way { chain, end: None, undelivered: None });
            };
            if matches!(wait.on, On::Network | On::Gpu) {
                return Some(Way { chain, end: Some(wait), undelivered: None });
            }
            chain.push(wait.peer);
            awaited.push(wait.on);
            if !met.insert(wait.peer) {
                return Some(self.circle(chain, &awaited));
            }
        }
    }

    /// A circle of waits, up to where it is broken: the sender of data that one of its ranks waits for has done its
    /// part. NCCL regards a send as complete once the transport has copied it, and only the connection's two ends show
    /// that it has not arrived.
    fn circle(&mut self, mut chain: Vec<i32>, awaited: &[On]) -> Way {
        let begin = chain.iter().position(|rank| Some(rank) == chain.last()).unwrap_or(0);
        let broken = (begin..awaited.len()).filter(|&at| awaited[at] == On::Data).find_map(|at| {
            let undelivered = self.undelivered(chain[at + 1], chain[at])?;
            Some((at, undelivered))
        });
        if let Some((at, _)) = broken {
            chain.truncate(at + 2);
        }
        Way { chain, end: None, undelivered: broken.map(|(_, undelivered)| undelivered) }
    }

    fn undelivered(&mut self, sender: i32, receiver: i32) -> Option<Undelivered> {
        let comm = self.comm;
        let pair = self.pairs.entry((sender, receiver));
        pair.or_insert_with(|| undelivered(comm, comm.members.get(&sender)?, comm.members.get(&receiver)?)).clone()
    }
}

/// The bytes between two ranks for longest, over a connection that stands still. A receiver without an outstanding
/// receive may have them in its kernel.
fn undelivered(comm: &Communicator, sender: &Member, receiver: &Member) -> Option<Undelivered> {
    let is_old = |since: u64, least| comm.now.saturating_sub(since) >= least;
    let polled = receiver.routes.iter().filter(|end| !end.send && end.polled.is_some_and(|it| is_old(it, FOLLOWED_NS)));
    let polled: HashMap<u64, &Route> = polled.map(|end| (end.number, end)).collect();
    let under_way = sender.routes.iter().filter(|sent| sent.send && sent.number != 0).filter_map(|sent| {
        let received = polled.get(&sent.number)?;
        let since = sent.moved.max(received.moved);
        (sent.bytes > received.bytes && is_old(since, STUCK_NS)).then_some((since, sent))
    });
    let (since, sent) = under_way.min_by_key(|it| it.0)?;
    Some(Undelivered { since, interfaces: sent.interfaces.clone() })
}
