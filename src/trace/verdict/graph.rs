//! From a communicator that stands still to the rank that holds it up, across communicators.
//!
//! A *spot* is what ranks are stuck in: a collective of a communicator, or a send or a receive of one rank. Each has
//! its own verdict. If the ranks that this blames wait in other spots themselves, an edge leads there, and the verdict
//! is no answer. A spot with a rank to blame that waits nowhere else is a *root*. Where no root can be reached, the
//! edges go in a circle: the ranks entered communicators in different orders.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::waits::FOLLOWED_NS;
use super::{
    Absent, Call, Cause, Communicator, Finding, Hold, IDLE_NS, Key, Member, Verdict, calls, is_circle, text, transfers,
    waits,
};
use crate::trace::names::Name;

/// The communicators, by their ids.
pub(super) type Communicators = BTreeMap<u64, Communicator>;

/// A call or a transfer in which ranks are stuck.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Spot {
    comm: u64,
    key: Key,
    /// Of a transfer: whose it is.
    rank: Option<i32>,
}

/// Why a spot holds another one up.
#[derive(Debug, Clone, Copy)]
struct Edge {
    to: Spot,
    /// The rank in question, by its number in the communicator that it holds up, and the call there.
    rank: i32,
    lacks: Key,
    /// It has entered both, and `to` before.
    is_in_both: bool,
}

#[derive(Debug)]
struct Node {
    verdict: Verdict,
    edges: Vec<Edge>,
    is_root: bool,
}

/// A process with one GPU: what its ranks in several communicators have in common.
type Worker = usize;

struct Graph<'a> {
    comms: &'a Communicators,
    workers: HashMap<(u64, i32), Worker>,
    ranks: Vec<Vec<(u64, i32)>>,
    /// How many calls of a function all ranks of a communicator have entered.
    common: HashMap<(u64, Name), u64>,
    nodes: BTreeMap<Spot, Node>,
}

/// The reasons why communicators stand still: findings for which most ranks wait first, and those that name no rank
/// last.
pub(super) fn findings(comms: &Communicators) -> Vec<Finding> {
    let mut graph = Graph::new(comms);
    let mut direct = Vec::new();
    let mut open: VecDeque<Spot> = VecDeque::new();
    for (&id, comm) in comms {
        match start(id, comm) {
            Start::Spots(spots) => open.extend(spots),
            Start::Verdict(verdict) => direct.push((id, verdict)),
            Start::Nothing => {}
        }
    }
    while let Some(spot) = open.pop_front() {
        if !graph.nodes.contains_key(&spot) {
            let node = graph.node(spot);
            open.extend(node.edges.iter().map(|edge| edge.to));
            graph.nodes.insert(spot, node);
        }
    }
    let mut found = graph.roots();
    found.extend(graph.circles(&found));
    found.extend(direct.into_iter().map(|(comm, verdict)| graph.found(comm, verdict, Vec::new())));
    graph.joined(found)
}

/// Where to begin in a communicator.
enum Start {
    Nothing,
    Spots(Vec<Spot>),
    /// The answer when nothing is stuck.
    Verdict(Verdict),
}

fn start(id: u64, comm: &Communicator) -> Start {
    let collective = |key| Start::Spots(vec![Spot { comm: id, key, rank: None }]);
    if let Some(key) = calls::stuck(comm) {
        return collective(key);
    }
    let spots: Vec<Spot> =
        transfers::all_stuck(comm).map(|(rank, key)| Spot { comm: id, key, rank: Some(rank) }).collect();
    if !spots.is_empty() {
        return Start::Spots(spots);
    }
    let verdict = |cause, gaps| Start::Verdict(Verdict { waiting: None, cause, unseen: comm.unseen(), gaps });
    if let Some(cause) = calls::arguments(comm, None) {
        return verdict(cause, Vec::new());
    }
    if let Some(key) = calls::idle(comm) {
        return collective(key);
    }
    // Transfers that another process makes for this one have no call here.
    let since = |member: &Member| member.waits.iter().map(|wait| wait.since).min();
    let stuck = comm.members.iter().filter_map(|(&rank, member)| Some((rank, since(member)?)));
    let stuck: Vec<(i32, u64)> = stuck.filter(|(_, since)| comm.now.saturating_sub(*since) >= IDLE_NS).collect();
    let all: Vec<i32> = stuck.iter().map(|it| it.0).collect();
    let begin = stuck.iter().map(|it| it.1).min().unwrap_or(0);
    waits::chain(comm, &all).map_or(Start::Nothing, |cause| verdict(cause, comm.gaps_since(begin)))
}

/// A root or a circle.
struct Found {
    comm: u64,
    verdict: Verdict,
    /// The processes that hold others up.
    named: BTreeSet<Worker>,
    /// From where it is reached.
    spots: Vec<Spot>,
}

impl<'a> Graph<'a> {
    fn new(comms: &'a Communicators) -> Self {
        let mut numbers: HashMap<(u64, &str, i32, &str), Worker> = HashMap::new();
        let (mut workers, mut ranks) = (HashMap::new(), Vec::new());
        let mut common = HashMap::new();
        for (&id, comm) in comms {
            let mut reached: HashMap<Name, Vec<u64>> = HashMap::new();
            for (&rank, member) in &comm.members {
                let Member { stamp, host, pid, gpu, .. } = member;
                let worker = *numbers.entry((*stamp, host, *pid, gpu)).or_insert_with(|| {
                    ranks.push(Vec::new());
                    ranks.len() - 1
                });
                workers.insert((id, rank), worker);
                ranks[worker].push((id, rank));
                let mut newest: HashMap<Name, u64> = HashMap::new();
                newest.extend(member.calls.iter().map(|call| (call.key.func, call.key.seq.saturating_add(1))));
                newest.into_iter().for_each(|(func, count)| reached.entry(func).or_default().push(count));
            }
            for (func, counts) in reached {
                let all = counts.len() == comm.members.len();
                common.insert((id, func), if all { counts.into_iter().min().unwrap_or(0) } else { 0 });
            }
        }
        Self { comms, workers, ranks, common, nodes: BTreeMap::new() }
    }

    fn node(&self, spot: Spot) -> Node {
        let comm = &self.comms[&spot.comm];
        let mut verdict = match spot.rank {
            Some(rank) => transfers::verdict(comm, rank, spot.key),
            None => calls::verdict(comm, spot.key),
        };
        let mut edges = Vec::new();
        let is_root = match &mut verdict.cause {
            Cause::Behind(absent) => {
                absent.retain(|absent| {
                    let edge = self.instead(spot, absent);
                    edges.extend(edge);
                    edge.is_none()
                });
                !absent.is_empty()
            }
            // Of what has begun nothing is waited for, or only the GPU: it may be at work for another communicator.
            Cause::Chain(chain, end) if !is_circle(chain, *end) => {
                let last = chain.last().copied().filter(|_| end.is_none_or(|wait| wait.on == super::On::Gpu));
                edges.extend(last.and_then(|rank| self.before(spot, rank)));
                edges.is_empty()
            }
            Cause::Chain(..) | Cause::Undelivered(..) | Cause::Unknown => {
                let ranks = spot.rank.map_or_else(|| comm.members.keys().copied().collect(), |rank| vec![rank]);
                edges.extend(ranks.into_iter().filter_map(|rank| self.before(spot, rank)));
                edges.is_empty()
            }
            _ => true,
        };
        Node { verdict, edges, is_root }
    }

    /// Where a rank is that has not entered this spot.
    fn instead(&self, from: Spot, absent: &Absent) -> Option<Edge> {
        let member = &self.comms[&from.comm].members[&absent.rank];
        if member.left {
            return None;
        }
        // Another collective of the same communicator was looked for by the spot's own verdict.
        let is_other = |to: &Spot| to.comm != from.comm || to.rank.is_some() || from.rank.is_some();
        let all = self.open(from.comm, absent.rank).into_iter().filter(|(_, to)| is_other(to));
        let (_, to) = all.min_by_key(|&(entered, _)| entered)?;
        Some(Edge { to, rank: absent.rank, lacks: absent.lacks, is_in_both: false })
    }

    /// Where else a rank is that has entered this spot: what it entered before, and what others may have to enter yet.
    fn before(&self, from: Spot, rank: i32) -> Option<Edge> {
        let member = self.comms.get(&from.comm)?.members.get(&rank)?;
        let key = match from.rank {
            // The peer has the other half; a rank further down the chain has neither.
            Some(waiting) if waiting != rank => {
                (from.key.peer == Some(rank)).then(|| transfers::other_half(waiting, from.key))?
            }
            _ => from.key,
        };
        let calls = member.calls.iter().chain(&member.transfers);
        let entered = calls.filter(|call| call.key == key).map(|call| call.entered).max()?;
        let awaited = self.of_worker(from.comm, rank).iter().filter_map(|&(id, own)| {
            let comm = &self.comms[&id];
            let calls = &comm.members[&own].calls;
            let newest = calls.iter().rfind(|call| call.entered < entered)?;
            let is_common = self.common.get(&(id, newest.key.func)).is_some_and(|&count| count > newest.key.seq);
            let is_old = comm.now.saturating_sub(newest.entered) >= FOLLOWED_NS;
            (!is_common && is_old).then_some((newest.entered, Spot { comm: id, key: newest.key, rank: None }))
        });
        let all = awaited.chain(self.open(from.comm, rank));
        let (_, to) = all.filter(|&(when, to)| when < entered && to.comm != from.comm).min_by_key(|&(when, _)| when)?;
        Some(Edge { to, rank, lacks: key, is_in_both: true })
    }

    fn of_worker(&self, comm: u64, rank: i32) -> &[(u64, i32)] {
        &self.ranks[self.workers[&(comm, rank)]]
    }

    /// In which spots a rank's process is, and since when.
    fn open(&self, comm: u64, rank: i32) -> Vec<(u64, Spot)> {
        let mut all = Vec::new();
        for &(id, rank) in self.of_worker(comm, rank) {
            let comm = &self.comms[&id];
            let spot = |call: &Call, rank| (call.entered, Spot { comm: id, key: call.key, rank });
            all.extend(calls::first_stuck(&comm.members[&rank], comm.now, FOLLOWED_NS).map(|call| spot(call, None)));
            all.extend(transfers::stuck(comm, rank, FOLLOWED_NS).map(|call| spot(call, Some(rank))));
        }
        all
    }

    fn found(&self, comm: u64, verdict: Verdict, spots: Vec<Spot>) -> Found {
        // A rank of which nothing is known is one of its own.
        let of = |rank: i32| self.workers.get(&(comm, rank)).copied().unwrap_or(Worker::MAX - rank as usize);
        let named = verdict.named().into_iter().map(of).collect();
        Found { comm, verdict, named, spots }
    }

    /// The roots, each with the spots from which it is reached.
    fn roots(&self) -> Vec<Found> {
        let mut from: HashMap<Spot, Vec<Spot>> = HashMap::new();
        for (&spot, node) in &self.nodes {
            node.edges.iter().for_each(|edge| from.entry(edge.to).or_default().push(spot));
        }
        let found = |(&root, node): (&Spot, &Node)| {
            let (mut spots, mut seen) = (vec![root], BTreeSet::from([root]));
            let mut next = 0;
            while let Some(spot) = spots.get(next).copied() {
                let before = from.get(&spot).into_iter().flatten();
                spots.extend(before.filter(|&&it| seen.insert(it)));
                next += 1;
            }
            self.found(root.comm, node.verdict.clone(), spots)
        };
        self.nodes.iter().filter(|(_, node)| node.is_root).map(found).collect()
    }

    /// The circles into which those spots lead that lead to no root.
    fn circles(&self, roots: &[Found]) -> Vec<Found> {
        let rooted: BTreeSet<Spot> = roots.iter().flat_map(|found| found.spots.iter().copied()).collect();
        let mut circles: BTreeMap<Vec<Spot>, Vec<Spot>> = BTreeMap::new();
        for &spot in self.nodes.keys().filter(|spot| !rooted.contains(spot)) {
            let mut path = vec![spot];
            let circle = loop {
                let Some(edge) = path.last().and_then(|last| self.nodes[last].edges.first()) else { break None };
                if let Some(begin) = path.iter().position(|&it| it == edge.to) {
                    break Some(path.split_off(begin));
                }
                path.push(edge.to);
            };
            let Some(mut circle) = circle else { continue };
            let least = (0..circle.len()).min_by_key(|&at| circle[at]).unwrap_or(0);
            circle.rotate_left(least);
            circles.entry(circle).or_default().push(spot);
        }
        circles.into_iter().map(|(circle, spots)| self.circle(&circle, spots)).collect()
    }

    fn circle(&self, circle: &[Spot], spots: Vec<Spot>) -> Found {
        let name = |comm: u64, key: Key| format!("{} of {}", text::call(key), self.comms[&comm].title);
        let hold = |spot: &Spot| {
            let edge = self.nodes[spot].edges.first()?;
            Some(Hold {
                rank: edge.rank,
                member: self.comms[&spot.comm].members.get(&edge.rank)?.clone(),
                holds: name(spot.comm, edge.lacks),
                is_in: name(edge.to.comm, edge.to.key),
                is_in_both: edge.is_in_both,
            })
        };
        let cause = Cause::Deadlock(circle.iter().filter_map(hold).collect());
        let verdict = Verdict { cause, ..self.nodes[&circle[0]].verdict.clone() };
        let workers = circle.iter().filter_map(|spot| {
            let edge = self.nodes[spot].edges.first()?;
            self.workers.get(&(spot.comm, edge.rank)).copied()
        });
        Found { comm: circle[0].comm, verdict, named: workers.collect(), spots }
    }

    /// One finding for each rank, or set of ranks, that holds others up; where no rank is named, one for each end of a
    /// communicator's waits. Of several the one with the longest wait.
    fn joined(&self, found: Vec<Found>) -> Vec<Finding> {
        let waited = |verdict: &Verdict| verdict.waiting.as_ref().map(|waiting| waiting.for_ns);
        let key = |found: &Found| {
            let end = || match &found.verdict.cause {
                Cause::Chain(chain, end) if !is_circle(chain, *end) => chain.last().copied(),
                _ => None,
            };
            let unnamed = found.named.is_empty().then(|| (found.comm, found.verdict.kind(), end()));
            (found.named.clone(), unnamed)
        };
        let mut groups: BTreeMap<_, Vec<Found>> = BTreeMap::new();
        found.into_iter().for_each(|found| groups.entry(key(&found)).or_default().push(found));
        let mut shared: BTreeMap<u64, Arc<Communicator>> = BTreeMap::new();
        let finding = |list: Vec<Found>| {
            let spots: BTreeSet<Spot> = list.iter().flat_map(|found| found.spots.iter().copied()).collect();
            let victims: BTreeSet<Worker> = spots.iter().flat_map(|spot| self.victims(spot)).collect();
            let communicators = spots.iter().map(|spot| spot.comm).collect();
            let Found { comm, verdict, named, .. } = list.into_iter().rev().max_by_key(|it| waited(&it.verdict))?;
            let victims = victims.difference(&named).count();
            let comm = shared.entry(comm).or_insert_with(|| Arc::new(self.comms[&comm].clone())).clone();
            Some(Finding { comm, verdict, victims, communicators })
        };
        let mut findings: Vec<Finding> = groups.into_values().filter_map(finding).collect();
        findings.sort_by_key(|it| std::cmp::Reverse((it.verdict.names_a_rank(), it.victims, waited(&it.verdict))));
        findings
    }

    /// The processes that wait in a spot.
    fn victims(&self, spot: &Spot) -> impl Iterator<Item = Worker> {
        let node = &self.nodes[spot];
        let waiting = node.verdict.waiting.iter().flat_map(|waiting| waiting.ranks.iter().copied());
        let ranks = waiting.chain(node.edges.iter().map(|edge| edge.rank));
        ranks.filter_map(|rank| self.workers.get(&(spot.comm, rank)).copied())
    }
}
