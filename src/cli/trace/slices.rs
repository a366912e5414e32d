//! A run in slices of time. A rank that stands out in one of them may do so by chance: another program, a moment of bad
//! network. A rank that holds a job back does so in all.

use std::collections::BTreeMap;

use crate::trace::rail::Rail;
use crate::trace::summary::{PeerStat, Summary, WireStat};

/// The number of slices, which are of equal length.
pub(super) const SLICES: usize = 4;

/// A finding must show in each slice in which the communicator has traffic, and in at least this many.
const IN_SLICES: usize = 3;

/// Sums over a time: of one process by communicator's context, or of a communicator by rank.
#[derive(Debug, Clone, Default)]
pub(super) struct Figures {
    /// By rank, peer and direction.
    pub(super) peers: BTreeMap<(i32, i32, bool), PeerStat>,
    /// By rank, peer, rail and direction: nanoseconds and bytes.
    pub(super) wires: BTreeMap<(i32, i32, Rail, bool), (u64, u64)>,
}

impl Figures {
    /// The facts that a process knows about one of its communicators so far.
    fn of(summary: &Summary, context: u64) -> Self {
        let Some(stat) = summary.comms.get(&context) else { return Self::default() };
        let rank = stat.info.rank;
        let wire = |stat: &WireStat| {
            // On the wire where the transport reports it, else from start to stop.
            (if stat.wire_ns > 0 { stat.wire_ns } else { stat.durations.sum() }, stat.bytes)
        };
        Self {
            peers: stat.peers.iter().map(|(&(peer, send), figures)| ((rank, peer, send), *figures)).collect(),
            wires: stat
                .wires
                .iter()
                .map(|(&(peer, rail, send), stat)| ((rank, peer, rail, send), wire(stat)))
                .collect(),
        }
    }

    /// Adds another process's.
    pub(super) fn add(&mut self, other: &Self) {
        for (key, figures) in &other.peers {
            self.peers.entry(*key).or_default().add(figures);
        }
        for (key, (ns, bytes)) in &other.wires {
            let sum = self.wires.entry(*key).or_default();
            *sum = (sum.0 + ns, sum.1 + bytes);
        }
    }

    /// The records since `before`.
    fn since(&self, before: &Self) -> Self {
        let peers = self.peers.iter().map(|(key, now)| {
            let then = before.peers.get(key).copied().unwrap_or_default();
            (*key, now.since(&then))
        });
        let wires = self.wires.iter().map(|(key, now)| {
            let then = before.wires.get(key).copied().unwrap_or_default();
            (*key, (now.0.saturating_sub(then.0), now.1.saturating_sub(then.1)))
        });
        Self { peers: peers.collect(), wires: wires.collect() }
    }
}

/// The whole and its slices.
#[derive(Debug, Clone, Default)]
pub(super) struct Sliced {
    pub(super) whole: Figures,
    pub(super) slices: [Figures; SLICES],
}

impl Sliced {
    /// Adds another process's.
    pub(super) fn add(&mut self, other: &Self) {
        self.whole.add(&other.whole);
        for (slice, more) in self.slices.iter_mut().zip(&other.slices) {
            slice.add(more);
        }
    }

    /// Whether `finds` finds something in all slices that have traffic.
    pub(super) fn lasts(&self, finds: impl Fn(&Figures) -> bool) -> bool {
        let mut busy = self.slices.iter().filter(|slice| slice.peers.values().any(|stat| stat.steps > 0));
        busy.clone().count() >= IN_SLICES && busy.all(finds)
    }
}

/// Cuts a process's figures while its records are added up, by communicator's context.
#[derive(Debug, Default)]
pub(super) struct Cutter {
    /// At the end of each slice that is over.
    marks: Vec<BTreeMap<u64, Figures>>,
}

impl Cutter {
    /// The summary holds what happened before `when`, of a run that lasts from `begin` to `end`.
    pub(super) fn look(&mut self, summary: &Summary, when: u64, (begin, end): (u64, u64)) {
        let slice = |number: usize| begin + (end - begin) / SLICES as u64 * number as u64;
        while self.marks.len() + 1 < SLICES && when >= slice(self.marks.len() + 1) {
            self.mark(summary);
        }
    }

    fn mark(&mut self, summary: &Summary) {
        let figures = |context: &u64| (*context, Figures::of(summary, *context));
        self.marks.push(summary.comms.keys().map(figures).collect());
    }

    /// All figures, when the summary holds all.
    pub(super) fn finish(mut self, summary: &Summary) -> BTreeMap<u64, Sliced> {
        while self.marks.len() < SLICES {
            self.mark(summary);
        }
        let mut all: BTreeMap<u64, Sliced> = BTreeMap::new();
        let mut before = &BTreeMap::new();
        for (number, mark) in self.marks.iter().enumerate() {
            for (context, figures) in mark {
                let sliced = all.entry(*context).or_default();
                sliced.slices[number] = before.get(context).map_or_else(|| figures.clone(), |then| figures.since(then));
                sliced.whole = figures.clone();
            }
            before = mark;
        }
        all
    }
}
