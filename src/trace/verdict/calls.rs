//! Which calls the ranks are in, and where they differ.

use std::collections::{BTreeMap, HashSet};

use super::{Arguments, Call, Cause, Communicator, IDLE_NS, Key, Member, STUCK_NS, Waiting};

/// The number of each rank's newest calls whose arguments are compared.
const COMPARED: usize = 1000;

/// The call in which most ranks are stuck; of several the oldest one.
pub(super) fn waiting(comm: &Communicator) -> Option<Waiting> {
    let mut stuck: BTreeMap<Key, Vec<(i32, u64)>> = BTreeMap::new();
    for (&rank, member) in &comm.members {
        if let Some(call) = first_stuck(member, comm.now) {
            stuck.entry(call.key).or_default().push((rank, call.entered));
        }
    }
    let entered = |ranks: &[(i32, u64)]| ranks.iter().map(|&(_, when)| when).min().unwrap_or(u64::MAX);
    let (key, ranks) = stuck.into_iter().max_by_key(|(_, ranks)| (ranks.len(), std::cmp::Reverse(entered(ranks))))?;
    let for_ns = comm.now.saturating_sub(entered(&ranks));
    Some(Waiting { ranks: ranks.into_iter().map(|(rank, _)| rank).collect(), key, for_ns })
}

/// The oldest call of a rank that has been open for too long.
pub(super) fn first_stuck(member: &Member, now: u64) -> Option<&Call> {
    member.calls.iter().find(|call| call.open && now.saturating_sub(call.entered) >= STUCK_NS)
}

/// NCCL numbers the calls of each function, so a rank that is in a later one has entered this one, though it may not be
/// among those that are remembered.
fn entered(member: &Member, key: Key) -> bool {
    member.calls.iter().any(|call| call.key.func == key.func && call.key.seq >= key.seq)
}

/// Ranks that wait in a call which the waiting ranks have not entered, and have not entered theirs.
pub(super) fn elsewhere(comm: &Communicator, waiting: &Waiting) -> Option<Cause> {
    let ranks: Vec<(i32, Call)> = comm
        .members
        .iter()
        .filter(|(_, member)| !entered(member, waiting.key))
        .filter_map(|(&rank, member)| Some((rank, *first_stuck(member, comm.now)?)))
        .filter(|(_, call)| waiting.ranks.iter().any(|rank| !entered(&comm.members[rank], call.key)))
        .collect();
    (!ranks.is_empty()).then_some(Cause::Elsewhere(ranks))
}

/// Ranks that have not entered the call.
pub(super) fn behind(comm: &Communicator, key: Key) -> Option<Cause> {
    let ranks: Vec<(i32, Option<Call>)> = comm
        .members
        .iter()
        .filter(|(_, member)| !entered(member, key))
        .map(|(&rank, member)| (rank, member.calls.last().copied()))
        .collect();
    (!ranks.is_empty()).then_some(Cause::Behind(ranks))
}

/// Ranks that made another call before this one which most ranks that are in it did not make, or did not make one that most
/// made. NCCL numbers the calls of each function on its own, so all are in the same `AllReduce`, and yet not in the same call.
pub(super) fn order(comm: &Communicator, key: Key) -> Option<Cause> {
    let inside = || comm.members.iter().filter(|(_, member)| member.calls.iter().any(|call| call.key == key));
    // Each call with the one before it. All ranks have the same ones where nothing is wrong, and there may be many ranks.
    let (mut seen, mut pairs) = (HashSet::new(), Vec::new());
    for (_, member) in inside() {
        let calls = || member.calls.iter().map(|call| call.key).take_while(|&own| own != key);
        pairs.extend(calls().zip(calls().skip(1)).filter(|pair| seen.insert(*pair)));
    }
    // If a rank remembers no call that precedes this one on another rank, it may have forgotten this one too.
    let lacks = |member: &Member, before: Key, other: Key| {
        member.calls.iter().any(|call| call.key == before) && !entered(member, other)
    };
    let (before, other) =
        pairs.into_iter().find(|&(before, other)| inside().any(|(_, member)| lacks(member, before, other)))?;
    let (lack, made): (Vec<_>, Vec<_>) = inside().partition(|(_, member)| lacks(member, before, other));
    let of = |members: Vec<(&i32, &Member)>| members.into_iter().map(|(&rank, _)| rank).collect();
    Some(if made.len() <= lack.len() {
        Cause::Order { ranks: of(made), key: other, made: true }
    } else {
        Cause::Order { ranks: of(lack), key: other, made: false }
    })
}

/// Ranks that have entered fewer calls than others, when nothing was entered for long.
pub(super) fn idle(comm: &Communicator) -> Option<Cause> {
    let newest = comm.members.values().filter_map(|member| member.calls.last()).max_by_key(|call| call.entered)?;
    let quiet = comm.now.saturating_sub(newest.entered) >= IDLE_NS;
    let left = comm.members.values().any(|member| member.left);
    if quiet && !left { behind(comm, newest.key) } else { None }
}

/// Ranks whose arguments of the call, or of any recent one, differ from those of most ranks.
pub(super) fn arguments(comm: &Communicator, key: Option<Key>) -> Option<Cause> {
    let mut calls: BTreeMap<Key, Vec<(i32, Arguments)>> = BTreeMap::new();
    for (&rank, member) in &comm.members {
        for call in member.calls.iter().rev().take(COMPARED).filter(|call| key.is_none_or(|key| key == call.key)) {
            calls.entry(call.key).or_default().push((rank, call.arguments));
        }
    }
    calls.values().find_map(|ranks| {
        let mut votes: BTreeMap<Arguments, usize> = BTreeMap::new();
        for &(_, arguments) in ranks {
            *votes.entry(arguments).or_default() += 1;
        }
        let (&most, _) = votes.iter().max_by_key(|(_, votes)| **votes)?;
        let others: Vec<(i32, Arguments)> = ranks.iter().copied().filter(|&(_, own)| own != most).collect();
        (!others.is_empty()).then_some(Cause::Arguments(others, most))
    })
}
