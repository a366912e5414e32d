//! The wait graph, followed to its end.

use std::collections::{BTreeMap, BTreeSet};

use super::{Cause, Communicator, On, STUCK_NS, Wait, gone};

/// What a rank is in, or waits for, counts when it is as old as this and another rank is stuck for its sake.
pub(super) const FOLLOWED_NS: u64 = STUCK_NS / 5;

/// The chain of waits that most stuck ranks lead into. A rank with a send under way that does not end is the end of its
/// chain; a rank that waits for a peer's data or buffer leads on to that peer; a rank that waits for nothing but its GPU
/// is the end. A GPU that waits only because data is missing is never taken for the cause, since its rank waits for the
/// peer too. A process on the way that has ended or is silent explains the chain: what it waits for is as old as it. A circle
/// ends where the network lost what was sent ([`broken`]).
pub(super) fn chain(comm: &Communicator, ranks: &[i32]) -> Option<Cause> {
    let chains: Vec<(Vec<i32>, Option<Wait>)> = ranks.iter().filter_map(|&rank| follow(comm, rank)).collect();
    let receiver = |end: &Option<Wait>| end.filter(|wait| wait.on == On::Network).map(|wait| wait.peer);
    let met: BTreeSet<i32> =
        chains.iter().flat_map(|(chain, end)| chain.iter().copied().chain(receiver(end))).collect();
    if let Some(cause) = gone(comm, met.into_iter()) {
        return Some(cause);
    }
    let mut ends: BTreeMap<i32, usize> = BTreeMap::new();
    for (chain, _) in &chains {
        *ends.entry(*chain.last()?).or_default() += 1;
    }
    let (&end, _) = ends.iter().max_by_key(|(_, votes)| **votes)?;
    // The longest chain to that end shows the most.
    let (chain, wait) =
        chains.into_iter().filter(|(chain, _)| chain.last() == Some(&end)).max_by_key(|it| it.0.len())?;
    Some(Cause::Chain(chain, wait))
}

fn follow(comm: &Communicator, from: i32) -> Option<(Vec<i32>, Option<Wait>)> {
    let mut chain = vec![from];
    loop {
        let rank = *chain.last()?;
        // A rank that another one is stuck for may have begun to wait a little later.
        let least = if chain.len() == 1 { STUCK_NS } else { FOLLOWED_NS };
        let waits: Vec<&Wait> = comm
            .members
            .get(&rank)
            .into_iter()
            .flat_map(|member| &member.waits)
            .filter(|wait| comm.now.saturating_sub(wait.since) >= least)
            .collect();
        let oldest = |on: &[On]| waits.iter().filter(|wait| on.contains(&wait.on)).min_by_key(|wait| wait.since);
        let Some(&&wait) =
            oldest(&[On::Network]).or_else(|| oldest(&[On::Data, On::Buffer])).or_else(|| oldest(&[On::Gpu]))
        else {
            // A peer of which no wait is known ends the chain, if anything led to it.
            return (chain.len() > 1).then_some((chain, None));
        };
        if matches!(wait.on, On::Network | On::Gpu) {
            return Some((chain, Some(wait)));
        }
        let circle = chain.contains(&wait.peer);
        chain.push(wait.peer);
        if circle {
            return Some(broken(comm, &chain).unwrap_or((chain, None)));
        }
    }
}

/// Where a circle of waits is broken: the sender of data that one of its ranks waits for has done its part. NCCL regards a send
/// as complete once the transport has copied it, and only the connection's two ends show that it has not arrived.
fn broken(comm: &Communicator, circle: &[i32]) -> Option<(Vec<i32>, Option<Wait>)> {
    circle.windows(2).enumerate().find_map(|(at, pair)| {
        let (receiver, sender) = (pair[0], pair[1]);
        let since = under_way(comm, sender, receiver)?;
        Some((circle[..at + 2].to_vec(), Some(Wait { peer: receiver, on: On::Network, since })))
    })
}

/// Since when bytes that one rank has sent to another have been missing at that one, over a connection that stands still.
fn under_way(comm: &Communicator, sender: i32, receiver: i32) -> Option<u64> {
    let (sender, receiver) = (comm.members.get(&sender)?, comm.members.get(&receiver)?);
    let stands_still = sender.routes.iter().filter(|sent| sent.send && sent.number != 0).filter_map(|sent| {
        let received = receiver.routes.iter().find(|end| !end.send && end.number == sent.number)?;
        (sent.bytes > received.bytes).then(|| sent.moved.max(received.moved))
    });
    stands_still.filter(|&since| comm.now.saturating_sub(since) >= STUCK_NS).min()
}
