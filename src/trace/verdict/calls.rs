//! Which collectives the ranks are in, and where they differ.

use std::collections::{BTreeMap, HashSet};

use super::waits::FOLLOWED_NS;
use super::{
    Absent, Arguments, Call, Cause, Communicator, IDLE_NS, Key, Made, Member, STUCK_NS, Verdict, Waiting, gone, waits,
};

/// The number of each rank's newest calls whose arguments are compared.
const COMPARED: usize = 1000;

/// The call in which most ranks are stuck; of several the oldest one.
pub(super) fn stuck(comm: &Communicator) -> Option<Key> {
    let mut stuck: BTreeMap<Key, (usize, u64)> = BTreeMap::new();
    for member in comm.members.values() {
        if let Some(call) = first_stuck(member, comm.now, STUCK_NS) {
            let (ranks, entered) = stuck.entry(call.key).or_insert((0, u64::MAX));
            (*ranks, *entered) = (*ranks + 1, call.entered.min(*entered));
        }
    }
    let most = stuck.into_iter().max_by_key(|&(_, (ranks, entered))| (ranks, std::cmp::Reverse(entered)));
    most.map(|(key, _)| key)
}

/// Why a call does not end, or why ranks have not entered it.
pub(super) fn verdict(comm: &Communicator, key: Key) -> Verdict {
    let waiting = waiting(comm, key);
    let cause = match &waiting {
        None => behind(comm, key),
        Some(waiting) => gone(comm, comm.members.keys().copied())
            .or_else(|| elsewhere(comm, waiting))
            .or_else(|| behind(comm, key))
            .or_else(|| order(comm, key))
            .or_else(|| arguments(comm, Some(key)))
            .or_else(|| waits::chain(comm, &waiting.ranks)),
    };
    let gaps = comm.members.iter().filter(|(_, member)| has_gap(member, key)).map(|(&rank, _)| rank);
    Verdict { gaps: gaps.collect(), waiting, cause: comm.or_lost(cause), unseen: comm.unseen() }
}

/// The ranks that are in this call.
fn waiting(comm: &Communicator, key: Key) -> Option<Waiting> {
    let is_in = |call: &&Call| call.key == key;
    let ranks = comm.members.iter().filter_map(|(&rank, member)| {
        let call = open(member, comm.now, FOLLOWED_NS).find(is_in)?;
        Some((rank, call.entered))
    });
    let ranks: Vec<(i32, u64)> = ranks.collect();
    let first = ranks.iter().map(|&(_, when)| when).min()?;
    Some(Waiting { ranks: ranks.into_iter().map(|it| it.0).collect(), key, for_ns: comm.now.saturating_sub(first) })
}

/// A rank's calls that have been open for so long. One whose end may have been missed counts only while nothing follows
/// it.
fn open(member: &Member, now: u64, least: u64) -> impl Iterator<Item = &Call> {
    let newest = member.calls.last().map_or(0, |call| call.entered);
    let is_sure = move |call: &&Call| member.gaps.ends.is_none_or(|gap| gap < call.entered) || call.entered == newest;
    let is_old = move |call: &&Call| call.open && now.saturating_sub(call.entered) >= least;
    member.calls.iter().filter(is_old).filter(is_sure)
}

/// The oldest call of a rank that has been open for so long.
pub(super) fn first_stuck(member: &Member, now: u64, least: u64) -> Option<&Call> {
    open(member, now, least).next()
}

/// NCCL numbers the calls of each function, so a rank that is in a later one has entered this one, though it may not be
/// among those that are remembered.
fn entered(member: &Member, key: Key) -> bool {
    member.calls.iter().any(|call| call.key.func == key.func && call.key.seq >= key.seq)
}

/// Whether a rank may have entered a call that is not among its own, since events are missing behind the last one of
/// its function.
fn may_have_entered(member: &Member, key: Key) -> bool {
    let last = member.calls.iter().rfind(|call| call.key.func == key.func).map_or(0, |call| call.entered);
    entered(member, key) || member.gaps.calls.is_some_and(|gap| gap >= last)
}

/// Whether events of a rank are missing that may say something else of this call.
fn has_gap(member: &Member, key: Key) -> bool {
    match member.calls.iter().find(|call| call.key == key) {
        Some(call) => member.gaps.any_since(call.entered),
        None => !entered(member, key) && may_have_entered(member, key),
    }
}

/// Ranks that wait in a call which the waiting ranks have not entered, and have not entered theirs.
fn elsewhere(comm: &Communicator, waiting: &Waiting) -> Option<Cause> {
    let ranks: Vec<(i32, Call)> = comm
        .members
        .iter()
        .filter(|(_, member)| !may_have_entered(member, waiting.key))
        .filter_map(|(&rank, member)| Some((rank, *first_stuck(member, comm.now, STUCK_NS)?)))
        .filter(|(_, call)| waiting.ranks.iter().any(|rank| !may_have_entered(&comm.members[rank], call.key)))
        .collect();
    let others = if waiting.ranks.len() > ranks.len() { Vec::new() } else { waiting.ranks.clone() };
    (!ranks.is_empty()).then_some(Cause::Elsewhere { ranks, others })
}

/// Ranks that have not entered the call.
fn behind(comm: &Communicator, key: Key) -> Option<Cause> {
    let ranks: Vec<Absent> = comm
        .members
        .iter()
        .filter(|(_, member)| !may_have_entered(member, key))
        .map(|(&rank, member)| Absent { rank, lacks: key, last: member.last().copied() })
        .collect();
    (!ranks.is_empty()).then_some(Cause::Behind(ranks))
}

/// Ranks that made another call before this one, and ranks that are in it too and did not make that one. NCCL numbers
/// the calls of each function on its own, so all are in the same `AllReduce`, and yet not in the same call.
fn order(comm: &Communicator, key: Key) -> Option<Cause> {
    let inside = || comm.members.iter().filter(|(_, member)| member.calls.iter().any(|call| call.key == key));
    // Each call with the one before it. All ranks have the same ones where nothing is wrong, and there may be many
    // ranks.
    let (mut seen, mut pairs) = (HashSet::new(), Vec::new());
    for (_, member) in inside() {
        let calls = || member.calls.iter().map(|call| call.key).take_while(|&own| own != key);
        pairs.extend(calls().zip(calls().skip(1)).filter(|pair| seen.insert(*pair)));
    }
    // If a rank remembers no call that precedes this one on another rank, it may have forgotten this one too; or its
    // event was missed.
    let lacks = |member: &Member, before: Key, other: Key| {
        let before = member.calls.iter().find(|call| call.key == before);
        before.is_some_and(|before| member.gaps.calls.is_none_or(|gap| gap < before.entered)) && !entered(member, other)
    };
    let (before, other) =
        pairs.into_iter().find(|&(before, other)| inside().any(|(_, member)| lacks(member, before, other)))?;
    let (lack, made): (Vec<_>, Vec<_>) = inside().partition(|(_, member)| lacks(member, before, other));
    let of = |members: Vec<(&i32, &Member)>| members.into_iter().map(|(&rank, _)| rank).collect();
    Some(Cause::Order { key: other, made: of(made), lack: of(lack) })
}

/// The newest call of any rank, when nothing was entered for long and some have not entered it.
pub(super) fn idle(comm: &Communicator) -> Option<Key> {
    let newest = comm.members.values().filter_map(|member| member.calls.last()).max_by_key(|call| call.entered)?;
    let quiet = comm.now.saturating_sub(newest.entered) >= IDLE_NS;
    let left = comm.members.values().any(|member| member.left);
    (quiet && !left && behind(comm, newest.key).is_some()).then_some(newest.key)
}

/// The different arguments with which ranks made the call, or any recent one.
pub(super) fn arguments(comm: &Communicator, key: Option<Key>) -> Option<Cause> {
    let mut calls: BTreeMap<Key, BTreeMap<Arguments, Vec<i32>>> = BTreeMap::new();
    for (&rank, member) in &comm.members {
        for call in member.calls.iter().rev().take(COMPARED).filter(|call| key.is_none_or(|key| key == call.key)) {
            calls.entry(call.key).or_default().entry(call.arguments).or_default().push(rank);
        }
    }
    let (key, groups) = calls.into_iter().find(|(_, groups)| groups.len() > 1)?;
    let mut groups: Vec<Made> = groups.into_iter().map(|(arguments, ranks)| Made { key, arguments, ranks }).collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.ranks.len()));
    Some(Cause::Arguments(groups))
}
