//! Sends and receives that do not end: between two ranks NCCL matches them in order, the first with the first.

use std::collections::BTreeMap;

use super::waits::FOLLOWED_NS;
use super::{Absent, Call, Cause, Communicator, IDLE_NS, Key, Made, RECV, SEND, Verdict, Waiting, gone, waits};
use crate::trace::summary::size_of_datatype;

/// The transfer that a rank is stuck in: the oldest whose other half was not called, or else the oldest.
pub(super) fn stuck(comm: &Communicator, rank: i32, least: u64) -> Option<&Call> {
    open(comm, rank, least).find(|call| missing(comm, rank, call).is_some()).or_else(|| open(comm, rank, least).next())
}

/// A stage of a pipeline waits for its turn, so only a long wait is one.
pub(super) fn all_stuck(comm: &Communicator) -> impl Iterator<Item = (i32, Key)> {
    comm.members.keys().filter_map(|&rank| Some((rank, stuck(comm, rank, IDLE_NS)?.key)))
}

/// Why a rank's transfer does not end.
pub(super) fn verdict(comm: &Communicator, rank: i32, key: Key) -> Verdict {
    let call = comm.members.get(&rank).and_then(|member| member.transfers.iter().find(|call| call.key == key));
    let for_ns = call.map_or(0, |call| comm.now.saturating_sub(call.entered));
    let missing = || {
        let mut absent: BTreeMap<i32, Absent> = BTreeMap::new();
        // A peer may be a moment late with another one.
        let least = if for_ns >= IDLE_NS { IDLE_NS } else { FOLLOWED_NS };
        for call in open(comm, rank, least) {
            if let Some(it) = missing(comm, rank, call) {
                // Of each rank the first that it has not called.
                absent.entry(it.rank).or_insert(it);
            }
        }
        (!absent.is_empty()).then(|| Cause::Behind(absent.into_values().collect()))
    };
    let cause = gone(comm, [Some(rank), key.peer].into_iter().flatten())
        .or_else(missing)
        .or_else(|| arguments(comm, rank, call?))
        .or_else(|| waits::chain(comm, &[rank]));
    let entered = call.map_or(0, |call| call.entered);
    let mut gaps = comm.gaps_since(entered);
    // Halves are matched by their numbers, for which every call before counts.
    let has_gap = |rank: &i32| comm.members.get(rank).is_some_and(|it| it.gaps.calls.is_some());
    gaps.extend([Some(rank), key.peer].into_iter().flatten().filter(has_gap));
    gaps.sort_unstable();
    gaps.dedup();
    Verdict {
        waiting: Some(Waiting { ranks: vec![rank], key, for_ns }),
        cause: comm.or_lost(cause),
        unseen: comm.unseen(),
        gaps,
    }
}

/// A rank's transfers that have been open for so long. One whose end may have been missed does not count.
fn open(comm: &Communicator, rank: i32, least: u64) -> impl Iterator<Item = &Call> {
    let gap = comm.members.get(&rank).and_then(|member| member.gaps.ends);
    let transfers = comm.members.get(&rank).into_iter().flat_map(|member| &member.transfers);
    transfers
        .filter(move |call| call.open && call.key.peer != Some(rank) && gap.is_none_or(|gap| gap < call.entered))
        .filter(move |call| comm.now.saturating_sub(call.entered) >= least)
}

/// The other half of a rank's transfer.
pub(super) fn other_half(rank: i32, key: Key) -> Key {
    Key::transfer(if key.is_send() { RECV } else { SEND }.into(), key.seq, rank)
}

/// The rank that has not called the other half. Where a call of either was missed, the numbers do not tell.
fn missing(comm: &Communicator, rank: i32, call: &Call) -> Option<Absent> {
    let peer = call.key.peer?;
    let (own, other) = (comm.members.get(&rank)?, comm.members.get(&peer)?);
    if own.gaps.calls.is_some() || other.gaps.calls.is_some() {
        return None;
    }
    let (sends, receives) = other.exchanged.get(&rank).copied().unwrap_or_default();
    let called = if call.key.is_send() { receives } else { sends };
    (called <= call.key.seq).then(|| Absent {
        rank: peer,
        lacks: other_half(rank, call.key),
        last: other.last().copied(),
    })
}

/// Both halves, when they are not of one size.
fn arguments(comm: &Communicator, rank: i32, call: &Call) -> Option<Cause> {
    let peer = call.key.peer?;
    let (own, other) = (comm.members.get(&rank)?, comm.members.get(&peer)?);
    let half = other_half(rank, call.key);
    let half = other.transfers.iter().find(|other| other.key == half)?;
    let bytes = |call: &Call| call.arguments.count.saturating_mul(size_of_datatype(call.arguments.datatype.text()));
    let made = |call: &Call, rank| Made { key: call.key, arguments: call.arguments, ranks: vec![rank] };
    let is_sure = own.gaps.calls.is_none() && other.gaps.calls.is_none();
    // The send comes first.
    let mut halves = vec![made(call, rank), made(half, peer)];
    halves.sort_by_key(|it| !it.key.is_send());
    (is_sure && bytes(call) != bytes(half)).then_some(Cause::Arguments(halves))
}
