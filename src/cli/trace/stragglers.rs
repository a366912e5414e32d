//! The causes that hold the other ranks back: a late rank, a slow GPU, a rail or host pair slower than its like, or a
//! receiver that is not ready. Each finding comes with the figures that it rests on.
//!
//! Nothing is called slow by an absolute measure: each is compared with its like in the same job. A finding must be
//! clear: half as slow again as the middle one, or far more where there is only one to compare with. It must be a
//! noticeable part of the whole. And it must last, so that chance is not reported: it is there in all slices of the run
//! (that of a late rank, in all but one). The most costly finding comes first.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;

use crate::trace::align::Correction;
use crate::trace::names::Name;
use crate::trace::perfetto::ProcessInfo;
use crate::trace::rail::Rail;
use crate::trace::summary::{PeerStat, Summary, bytes, time};

use super::slices::{Figures, SLICES, Sliced};

/// The ratio to the middle one that makes a finding, where there are several others.
const CLEARLY: f64 = 1.5;

/// The same where there is one other. Two ranks of a busy machine were seen to differ by 1.97.
const CLEARLY_OF_TWO: f64 = 3.0;

/// A late rank is this many times later than the last of the others.
const LATER: u64 = 2;

/// Fewer collectives than this are no evidence about a rank.
const ENOUGH: usize = 12;

/// With fewer collectives than this, a late rank must be the last of nearly all. A rank that waits for a processor
/// stays late for several, and one such wait is a large part of them.
const ENOUGH_FOR_MOST: usize = 64;

/// Waits below this are the scheduler's noise.
const NOISE_NS: u64 = 20_000;

/// The same for several ranks together: chance may make one of them the last for a while.
const ENOUGH_FOR_SEVERAL: usize = 96;

/// Lateness up to this is always taken for chance: of ranks that share two processors, one was the last of nearly all
/// collectives by 70 to 110 µs.
const CHANCE_NS: u64 = 100_000;

/// Lateness below this fraction of the time from one collective to the next delays no rank noticeably.
const FRACTION_OF_PERIOD: u64 = 20;

/// The most ranks that are named for a rail that is slow at many ranks.
const NAMED: usize = 8;

/// Less than this share of the time in transfers is not worth a finding.
const SHARE: f64 = 0.1;

/// The combined data of all processes.
pub(super) struct Evidence {
    /// How long the run lasted.
    run: u64,
    /// By communicator id: how many ranks it has been seen with.
    comms: BTreeMap<u64, Comm>,
}

/// Where a rank runs.
#[derive(Default)]
pub(super) struct Place {
    pub(super) host: String,
    /// Empty when unknown.
    pub(super) gpu: String,
    /// Its rank in the job, if that is known.
    pub(super) global: Option<i32>,
}

impl Place {
    /// The rank, with where it runs and its rank in the job where that is another one.
    pub(super) fn name(&self, rank: i32) -> String {
        let Self { host, gpu, global } = self;
        let gpu = if gpu.is_empty() { String::new() } else { format!(", GPU {gpu}") };
        let global = global.filter(|&global| global != rank);
        format!("rank {rank} ({host}{gpu}{})", global.map_or_else(String::new, |rank| format!(", global rank {rank}")))
    }
}

/// When the ranks came to a collective.
struct Meeting<'a> {
    /// When the middle one came.
    middle: u64,
    /// The rank that came last.
    last: i32,
    arrivals: &'a [(i32, u64)],
}

impl Meeting<'_> {
    /// How much later than the middle rank the last of the ranks came for which `are` holds.
    fn lateness(&self, are: impl Fn(i32) -> bool) -> u64 {
        let whens = self.arrivals.iter().filter(|&&(rank, _)| are(rank)).map(|&(_, when)| when);
        whens.max().unwrap_or(0).saturating_sub(self.middle)
    }
}

#[derive(Default)]
struct Comm {
    name: String,
    places: BTreeMap<i32, Place>,
    /// By collective: each rank's arrival on the common clock.
    arrivals: BTreeMap<(Name, u64), Vec<(i32, u64)>>,
    /// Of the alignment of clocks; None when it is unknown for some rank.
    bound: Option<u64>,
    figures: Sliced,
    /// How long there were calls, on the rank that was in them for longest.
    busy: u64,
}

/// A sentence, and for about how many nanoseconds its cause held the job back.
type Costly = (u64, String);

impl Evidence {
    /// Of a run that lasted from `begin` to `end`.
    pub(super) fn new((begin, end): (u64, u64)) -> Self {
        Self { run: end - begin, comms: BTreeMap::new() }
    }

    /// The communicators with a conspicuous rank, rail or pair, the most costly first.
    pub(super) fn findings(&self) -> Vec<Findings> {
        let of = |(id, comm): (&u64, &Comm)| {
            let mut sentences: Vec<Costly> = Vec::new();
            sentences.extend(comm.late_ranks());
            sentences.extend(comm.slow_gpu());
            sentences.extend(comm.slow_rails());
            sentences.extend(comm.slow_pairs());
            sentences.extend(comm.unready_receivers());
            let name = &comm.name;
            let communicator = if name.is_empty() { format!("{id:#x}") } else { format!("{name} ({id:#x})") };
            sentences.sort_by_key(|&(cost, _)| Reverse(cost));
            let cost = sentences.first()?.0;
            let sentences = sentences.into_iter().map(|(_, sentence)| sentence).collect();
            Some((cost, Findings { communicator, sentences }))
        };
        let mut all: Vec<(u64, Findings)> = self.comms.iter().filter_map(of).collect();
        all.sort_by_key(|&(cost, _)| Reverse(cost));
        all.into_iter().map(|(_, findings)| findings).collect()
    }

    /// One process's data.
    pub(super) fn add(
        &mut self,
        process: &ProcessInfo,
        summary: &Summary,
        sliced: &BTreeMap<u64, Sliced>,
        correction: &Correction,
    ) {
        for (&context, stat) in &summary.comms {
            let rank = stat.info.rank;
            if rank < 0 {
                continue;
            }
            let comm = self.comms.entry(stat.info.id).or_insert_with(|| Comm { bound: Some(0), ..Comm::default() });
            comm.name = stat.info.name.clone();
            let place = Place { host: process.host.clone(), gpu: stat.info.gpu.clone(), global: process.rank };
            comm.places.insert(rank, place);
            comm.bound = comm.bound.zip(correction.bound).map(|(a, b)| a.max(b));
            let in_calls: u64 = stat.calls.values().map(|call| call.latency.sum()).sum();
            comm.busy = comm.busy.max(in_calls.min(self.run));
            if let Some(sliced) = sliced.get(&context) {
                comm.figures.add(sliced);
            }
            for arrival in summary.arrivals().iter().filter(|arrival| arrival.context == context) {
                let when = correction.apply(arrival.enqueued);
                comm.arrivals.entry((arrival.func, arrival.seq)).or_default().push((rank, when));
            }
        }
    }
}

/// The conspicuous ranks, rails and pairs of one communicator.
pub(super) struct Findings {
    pub(super) communicator: String,
    pub(super) sentences: Vec<String>,
}

/// All findings as text.
pub(super) fn render(findings: &[Findings]) -> String {
    let mut out = String::from("What holds the job back\n");
    for Findings { communicator, sentences } in findings {
        let _ = writeln!(out, "  communicator {communicator}");
        for sentence in sentences {
            let _ = writeln!(out, "  * {sentence}");
        }
    }
    if findings.is_empty() {
        out += "  nothing stands out: no rank, rail or peer is clearly slower than its like\n";
    }
    out
}

impl Comm {
    fn name_of(&self, rank: i32) -> String {
        self.places.get(&rank).map_or_else(|| format!("rank {rank}"), |place| place.name(rank))
    }

    /// What `excess` costs: so many nanoseconds too many of `all` nanoseconds of transfers. Where several of these were
    /// under way at once, it is their part of the time in calls.
    fn cost(&self, excess: f64, all: f64) -> u64 {
        (excess * (self.busy as f64 / all.max(1.0)).min(1.0)) as u64
    }

    /// The ranks that come to collectives after the others, by their hosts' clocks: one, or else several by turns.
    fn late_ranks(&self) -> Option<Costly> {
        let bound = self.bound?;
        let ranks = self.places.len();
        let mut meetings: Vec<Meeting<'_>> = Vec::new();
        for arrivals in self.arrivals.values().filter(|arrivals| arrivals.len() == ranks && ranks > 1) {
            let mut times: Vec<u64> = arrivals.iter().map(|&(_, when)| when).collect();
            times.sort_unstable();
            // The middle of the others: with two ranks, the earlier one.
            let middle = times[(times.len() - 1) / 2];
            let &(last, _) = arrivals.iter().max_by_key(|&&(_, when)| when)?;
            meetings.push(Meeting { middle, last, arrivals });
        }
        meetings.sort_unstable_by_key(|meeting| (meeting.middle, meeting.last));
        let mut times: BTreeMap<i32, usize> = BTreeMap::new();
        meetings.iter().for_each(|meeting| *times.entry(meeting.last).or_default() += 1);
        let mut often: Vec<(i32, usize)> = times.into_iter().collect();
        often.sort_by_key(|&(rank, times)| (std::cmp::Reverse(times), rank));
        let late = |count: usize| {
            let late: Vec<i32> = often.iter().take(count).map(|&(rank, _)| rank).collect();
            // Each of them is the last at times.
            let least = often.get(count - 1).is_some_and(|&(_, times)| times * 3 * count >= meetings.len());
            least.then(|| lateness(&meetings, &late, ranks, bound)).flatten().map(|found| (late, found))
        };
        let (late, (times, typical)) = late(1).or_else(|| (2..=ranks / 2).find_map(late))?;
        let count = meetings.len();
        let cost = typical.saturating_mul(times as u64);
        let (typical, bound) = (time(typical), time(bound));
        let places: Vec<String> = late.iter().map(|&rank| self.name_of(rank)).collect();
        let sentence = match &places[..] {
            [place] => format!(
                "{place} comes late: it was the last of {ranks} at {times} of {count} collectives, typically {typical} after \
                 the middle one (the clocks are aligned to {bound}); the others wait for it"
            ),
            _ => format!(
                "{} come late by turns{}: one of them was the last of {ranks} at {times} of {count} collectives, typically \
                 {typical} after the middle one (the clocks are aligned to {bound}); the others wait for them",
                places.join(" and "),
                self.host_of(&late).map_or_else(String::new, |host| format!(" and are the ranks of {host}"))
            ),
        };
        Some((cost, sentence))
    }

    /// The host of which these are all ranks, if others have ranks too.
    fn host_of(&self, ranks: &[i32]) -> Option<&str> {
        let host = &self.places.get(ranks.first()?)?.host;
        let is_all = self.places.iter().all(|(rank, place)| (place.host == *host) == ranks.contains(rank));
        is_all.then_some(host)
    }

    /// The rank whose GPU lets its sends wait longer than the other ranks' do.
    fn slow_gpu(&self) -> Option<Costly> {
        let SlowGpu { rank, wait, share, middle, sends } = slow_gpu(&self.figures.whole)?;
        let lasts = self.figures.lasts(|slice| slow_gpu(slice).is_some_and(|found| found.rank == rank));
        lasts.then(|| {
            let sentence = format!(
                "{} is held up by its GPU: its sends wait {} each for the GPU's data ({:.0}% of their time), those of \
                 the middle rank {}",
                self.name_of(rank),
                time(wait as u64),
                100.0 * share,
                time(middle as u64)
            );
            (self.cost((wait - middle) * sends as f64, wait * sends as f64 / share), sentence)
        })
    }

    /// Rails of a sender that take longer for their bytes than its other rails.
    fn slow_rails(&self) -> Vec<Costly> {
        let mut slow: BTreeMap<Rail, Vec<SlowRail>> = BTreeMap::new();
        for found in slow_rails(&self.figures.whole) {
            let is_it = |other: &SlowRail| (other.rank, other.rail) == (found.rank, found.rail);
            if self.figures.lasts(|slice| slow_rails(slice).iter().any(is_it)) {
                slow.entry(found.rail).or_default().push(found);
            }
        }
        slow.into_iter()
            .map(|(rail, mut on)| {
                on.sort_by(|a, b| (b.worst / b.middle).total_cmp(&(a.worst / a.middle)));
                let place = |found: &SlowRail| {
                    format!(
                        "at {}: {} per part in flight over {}, its other rails {}",
                        self.name_of(found.rank),
                        speed(found.worst),
                        bytes(found.moved),
                        speed(found.middle)
                    )
                };
                let mut places: Vec<String> = on.iter().take(NAMED).map(place).collect();
                if on.len() > NAMED {
                    places.push(format!("and at {} more ranks", on.len() - NAMED));
                }
                // The senders wait at the same time.
                let costs = on.iter().map(|found| {
                    let moved = found.moved as f64;
                    self.cost((found.worst - found.middle) * moved, found.worst * moved)
                });
                (costs.max().unwrap_or(0), format!("{} is slow {}", rail.name(), places.join("; ")))
            })
            .collect()
    }

    /// The pair whose network takes longest for its bytes.
    fn slow_pairs(&self) -> Option<Costly> {
        let SlowPair { pair, worst, middle, moved } = slow_pair(&self.figures.whole)?;
        let lasts = self.figures.lasts(|slice| slow_pair(slice).is_some_and(|found| found.pair == pair));
        lasts.then(|| {
            let own =
                |&&(rank, peer, rail, send): &&(i32, i32, Rail, bool)| (rank, peer) == pair && send && rail.is_one();
            let names: Vec<String> = self.figures.whole.wires.keys().filter(own).map(|key| key.2.name()).collect();
            let over = if names.is_empty() { String::new() } else { format!(" over {}", names.join(" and ")) };
            let sentence = format!(
                "the way from {} to {}{over} is slow: a step moves {} there, {} between the middle pair",
                self.name_of(pair.0),
                self.name_of(pair.1),
                speed(worst),
                speed(middle)
            );
            let moved = moved as f64;
            (self.cost((worst - middle) * moved, worst * moved), sentence)
        })
    }

    /// The receiver that most often has no buffer ready.
    fn unready_receivers(&self) -> Option<Costly> {
        let Unready { peer, wait, share, middle } = unready(&self.figures.whole)?;
        let lasts = self.figures.lasts(|slice| unready(slice).is_some_and(|found| found.peer == peer));
        lasts.then(|| {
            let sentence = format!(
                "{} is not ready to receive: senders to it waited {} for its buffers ({:.0}% of their time, {:.0}% at \
                 the middle receiver); its GPU or its proxy thread is behind",
                self.name_of(peer),
                time(wait),
                100.0 * share,
                100.0 * middle
            );
            let all = wait as f64 / share;
            (self.cost((share - middle) * all, all), sentence)
        })
    }
}

/// The lateness at each collective of the ranks for which `are` holds, in ascending order.
fn sorted_lateness(meetings: &[Meeting<'_>], are: impl Fn(i32) -> bool) -> Vec<u64> {
    let mut all: Vec<u64> = meetings.iter().map(|meeting| meeting.lateness(&are)).collect();
    all.sort_unstable();
    all
}

/// At how many collectives one of the ranks `late` was the last, and its typical lateness; `None` when chance explains
/// it.
fn lateness(meetings: &[Meeting<'_>], late: &[i32], ranks: usize, bound: u64) -> Option<(usize, u64)> {
    let count = meetings.len();
    if count < if late.len() == 1 { ENOUGH } else { ENOUGH_FOR_SEVERAL } {
        return None;
    }
    // Chance makes each rank the last of its share; of the other collectives these ranks must be the last of three in
    // four. A single rank must be the last of nine in ten while there are few.
    let is_often = |times: usize, of: usize| match late.len() {
        1 if count < ENOUGH_FOR_MOST => times * 10 >= of * 9,
        1 => times * 4 >= of * 3,
        several => times * 4 * ranks >= of * (3 * ranks + several),
    };
    let slices = meetings.chunks(count.div_ceil(SLICES));
    let own_times = |slice: &[Meeting<'_>]| slice.iter().filter(|meeting| late.contains(&meeting.last)).count();
    let lasting = slices.clone().filter(|slice| is_often(own_times(slice), slice.len())).count() + 1 >= slices.len();
    let (times, typical) = (own_times(meetings), sorted_lateness(meetings, |rank| late.contains(&rank))[count / 2]);
    // The effect of chance: the others' lateness at the worst quarter of all collectives; of a single other rank, at
    // the worst tenth. All collectives count: beside a rank that is always late, the others are the last of all only at
    // their worst.
    let usual = if ranks - late.len() == 1 { count * 9 / 10 } else { count * 3 / 4 };
    // A rank that is late by much the same at every collective is not late by chance: two such ranks must not hide each
    // other.
    let is_steady = |rank: i32| {
        let all = sorted_lateness(meetings, |other| other == rank);
        all[count / 10] > CHANCE_NS && 2 * all[count / 10] > all[count * 3 / 4]
    };
    let others = meetings[0].arrivals.iter().map(|&(rank, _)| rank).filter(|rank| !late.contains(rank));
    let by_chance: Vec<i32> = others.filter(|&rank| !is_steady(rank)).collect();
    let noise = sorted_lateness(meetings, |rank| by_chance.contains(&rank))[usual].max(CHANCE_NS);
    let mut periods: Vec<u64> = meetings.windows(2).map(|pair| pair[1].middle - pair[0].middle).collect();
    let clear = is_often(times, count)
        && lasting
        && typical > LATER * noise
        && typical > 2 * bound
        && typical.saturating_mul(FRACTION_OF_PERIOD) > median(&mut periods);
    clear.then_some((times, typical))
}

struct SlowGpu {
    rank: i32,
    /// Nanoseconds for each send, and of its time.
    wait: f64,
    share: f64,
    middle: f64,
    sends: u64,
}

fn slow_gpu(figures: &Figures) -> Option<SlowGpu> {
    let mut per_rank: BTreeMap<i32, PeerStat> = BTreeMap::new();
    for (&(rank, ..), stat) in figures.peers.iter().filter(|((_, _, send), _)| *send) {
        per_rank.entry(rank).or_default().add(stat);
    }
    let of = |(&rank, stat): (&i32, &PeerStat)| {
        let share = stat.gpu_ns as f64 / total(stat).max(1) as f64;
        (stat.gpu_ns as f64 / stat.steps as f64, rank, (share, stat.steps))
    };
    let mut waits: Vec<_> = per_rank.iter().filter(|(_, stat)| stat.steps > 0).map(of).collect();
    let ((wait, rank, (share, sends)), middle) = clearly_worst(&mut waits)?;
    (share > SHARE && wait > NOISE_NS as f64).then_some(SlowGpu { rank, wait, share, middle, sends })
}

struct SlowRail {
    rank: i32,
    rail: Rail,
    /// Nanoseconds for a byte, there and over the other rails.
    worst: f64,
    middle: f64,
    moved: u64,
}

fn slow_rails(figures: &Figures) -> Vec<SlowRail> {
    // (rank, rail) of sends, over all peers: nanoseconds and bytes.
    let mut rails: BTreeMap<(i32, Rail), (u64, u64)> = BTreeMap::new();
    for (&(rank, _, rail, send), (ns, bytes)) in &figures.wires {
        if send && rail.is_one() {
            let sum = rails.entry((rank, rail)).or_default();
            *sum = (sum.0 + ns, sum.1 + bytes);
        }
    }
    let ranks: std::collections::BTreeSet<i32> = rails.keys().map(|&(rank, _)| rank).collect();
    let of = |rank: i32| {
        let own = || rails.iter().filter(|((owner, _), _)| *owner == rank);
        let all: u64 = own().map(|(_, (_, bytes))| bytes).sum();
        // A rail that carries little beside the others carries the short messages, which pay for latency.
        let mut costs: Vec<(f64, Rail, u64)> = own()
            .filter(|(_, (_, bytes))| *bytes > 0 && *bytes as f64 >= SHARE * all as f64 / 2.0)
            .map(|((_, rail), (ns, bytes))| (*ns as f64 / *bytes as f64, *rail, *bytes))
            .collect();
        let ((worst, rail, moved), middle) = worst_and_middle(&mut costs)?;
        (worst > CLEARLY * middle).then_some(SlowRail { rank, rail, worst, middle, moved })
    };
    ranks.into_iter().filter_map(of).collect()
}

struct SlowPair {
    /// The sender and the receiver.
    pair: (i32, i32),
    /// Nanoseconds for a byte, there and between the middle pair.
    worst: f64,
    middle: f64,
    moved: u64,
}

fn slow_pair(figures: &Figures) -> Option<SlowPair> {
    let sends = figures.peers.iter().filter(|((_, _, send), stat)| *send && stat.bytes > 0);
    let of = |(&(rank, peer, _), stat): (&(i32, i32, bool), &PeerStat)| {
        (stat.network_ns as f64 / stat.bytes as f64, (rank, peer), *stat)
    };
    let mut costs: Vec<_> = sends.map(of).collect();
    let all: u64 = costs.iter().map(|(_, _, stat)| stat.network_ns).sum();
    let ((worst, pair, stat), middle) = clearly_worst(&mut costs)?;
    // On a busy host short steps take twice as long by chance.
    let is_more = (worst - middle) * (stat.bytes / stat.steps.max(1)) as f64 > CHANCE_NS as f64;
    let is_much = stat.network_ns as f64 > SHARE * all as f64;
    (is_more && is_much).then_some(SlowPair { pair, worst, middle, moved: stat.bytes })
}

struct Unready {
    peer: i32,
    /// Nanoseconds for which senders waited, and of their time.
    wait: u64,
    share: f64,
    middle: f64,
}

fn unready(figures: &Figures) -> Option<Unready> {
    let mut per_peer: BTreeMap<i32, PeerStat> = BTreeMap::new();
    for (&(_, peer, _), stat) in figures.peers.iter().filter(|((_, _, send), _)| *send) {
        per_peer.entry(peer).or_default().add(stat);
    }
    let of = |(&peer, stat): (&i32, &PeerStat)| {
        (stat.receiver_ns as f64 / total(stat).max(1) as f64, peer, stat.receiver_ns)
    };
    let mut shares: Vec<(f64, i32, u64)> = per_peer.iter().map(of).collect();
    let ((share, peer, wait), middle) = clearly_worst(&mut shares)?;
    (share > SHARE).then_some(Unready { peer, wait, share, middle })
}

fn total(stat: &PeerStat) -> u64 {
    stat.gpu_ns + stat.receiver_ns + stat.network_ns + stat.flush_ns
}

/// A speed from nanoseconds per byte.
fn speed(cost: f64) -> String {
    if cost < 10.0 { format!("{:.2} GB/s", 1.0 / cost) } else { format!("{:.1} MB/s", 1e3 / cost) }
}

/// The largest, if it is clearly larger than the middle one of the others, which comes with it.
fn clearly_worst<A: Copy, B: Copy>(list: &mut [(f64, A, B)]) -> Option<((f64, A, B), f64)> {
    let clearly = if list.len() == 2 { CLEARLY_OF_TWO } else { CLEARLY };
    worst_and_middle(list).filter(|(worst, middle)| worst.0 > clearly * middle)
}

/// The largest, and the middle one of the others; None when there is nothing to compare with.
fn worst_and_middle<A: Copy, B: Copy>(list: &mut [(f64, A, B)]) -> Option<((f64, A, B), f64)> {
    if list.len() < 2 {
        return None;
    }
    list.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (worst, others) = list.split_last()?;
    Some((*worst, others[others.len() / 2].0))
}

fn median(values: &mut [u64]) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests;
