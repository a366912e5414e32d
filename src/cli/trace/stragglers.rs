//! Who holds the others back: a rank that comes late, a GPU that is slow, a rail or a pair of hosts that is slower than
//! its like, a receiver that is not ready. Each finding comes with the figures that it rests on.
//!
//! Nothing is called slow by an absolute measure: each is compared with its like in the same job, and a finding must
//! be clear (half as slow again as the middle one, and worth something of the whole) to be told.

use std::collections::BTreeMap;
use std::fmt::Write;

use towline::trace::align::Correction;
use towline::trace::names::Name;
use towline::trace::rail::Rail;
use towline::trace::summary::{PeerStat, Summary, WireStat, bytes, time};

/// So much slower than the middle one is a finding.
const CLEARLY: f64 = 1.5;

/// Fewer collectives than this say nothing of a rank.
const ENOUGH: usize = 5;

/// Lateness below this is the scheduler's noise.
const NOISE_NS: u64 = 20_000;

/// Lateness below this fraction of the time from one collective to the next holds nobody back for long.
const FRACTION_OF_PERIOD: u64 = 20;

/// Of a rail that is slow at many ranks, so many are named.
const NAMED: usize = 8;

/// Less than this share of the time in transfers is not worth a finding.
const SHARE: f64 = 0.1;

/// What all processes together tell.
#[derive(Default)]
pub(super) struct Evidence {
    /// By communicator id: how many ranks it has been seen with.
    comms: BTreeMap<u64, Comm>,
}

#[derive(Default)]
struct Comm {
    name: String,
    hosts: BTreeMap<i32, String>,
    /// By collective: each rank's arrival on the common clock.
    arrivals: BTreeMap<(Name, u64), Vec<(i32, u64)>>,
    /// Of the alignment of clocks; None when it is unknown for some rank.
    bound: Option<u64>,
    /// By rank, peer and direction.
    peers: BTreeMap<(i32, i32, bool), PeerStat>,
    /// By rank, peer, rail and direction.
    wires: BTreeMap<(i32, i32, Rail, bool), WireStat>,
}

impl Evidence {
    /// The communicators in which something stands out.
    pub(super) fn findings(&self) -> Vec<Findings> {
        let of = |(id, comm): (&u64, &Comm)| {
            let mut sentences = Vec::new();
            sentences.extend(comm.late_rank());
            sentences.extend(comm.slow_gpu());
            sentences.extend(comm.slow_rails());
            sentences.extend(comm.slow_pairs());
            sentences.extend(comm.unready_receivers());
            let name = &comm.name;
            let communicator = if name.is_empty() { format!("{id:#x}") } else { format!("{name} ({id:#x})") };
            (!sentences.is_empty()).then_some(Findings { communicator, sentences })
        };
        self.comms.iter().filter_map(of).collect()
    }

    /// What one process tells.
    pub(super) fn add(&mut self, host: &str, summary: &Summary, correction: &Correction) {
        for (&context, stat) in &summary.comms {
            let rank = stat.info.rank;
            if rank < 0 {
                continue;
            }
            let comm = self.comms.entry(stat.info.id).or_insert_with(|| Comm { bound: Some(0), ..Comm::default() });
            comm.name = stat.info.name.clone();
            comm.hosts.insert(rank, host.to_owned());
            comm.bound = comm.bound.zip(correction.bound).map(|(a, b)| a.max(b));
            for (&(peer, send), figures) in &stat.peers {
                comm.peers.entry((rank, peer, send)).or_default().add(figures);
            }
            for (&(peer, rail, send), figures) in &stat.wires {
                comm.wires.entry((rank, peer, rail, send)).or_default().add(figures);
            }
            for arrival in summary.arrivals().iter().filter(|arrival| arrival.context == context) {
                let when = correction.apply(arrival.enqueued);
                comm.arrivals.entry((arrival.func, arrival.seq)).or_default().push((rank, when));
            }
        }
    }
}

/// What stands out in one communicator.
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
        match self.hosts.get(&rank) {
            Some(host) => format!("rank {rank} ({host})"),
            None => format!("rank {rank}"),
        }
    }

    /// The rank that comes to collectives after the others, by the host's clock.
    fn late_rank(&self) -> Option<String> {
        let bound = self.bound?;
        let ranks = self.hosts.len();
        let mut lateness: BTreeMap<i32, Vec<u64>> = BTreeMap::new();
        let mut last: BTreeMap<i32, usize> = BTreeMap::new();
        let mut middles = Vec::new();
        let mut count = 0;
        for arrivals in self.arrivals.values().filter(|arrivals| arrivals.len() == ranks && ranks > 1) {
            let mut times: Vec<u64> = arrivals.iter().map(|&(_, when)| when).collect();
            times.sort_unstable();
            // The middle of the others: with two ranks, the earlier one.
            let middle = times[(times.len() - 1) / 2];
            middles.push(middle);
            for &(rank, when) in arrivals {
                lateness.entry(rank).or_default().push(when.saturating_sub(middle));
            }
            let latest = arrivals.iter().max_by_key(|&&(_, when)| when)?.0;
            *last.entry(latest).or_default() += 1;
            count += 1;
        }
        if count < ENOUGH {
            return None;
        }
        let (&rank, &times) = last.iter().max_by_key(|&(_, times)| *times)?;
        let typical = median(lateness.get_mut(&rank)?);
        middles.sort_unstable();
        let mut periods: Vec<u64> = middles.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let period = median(&mut periods);
        // By chance one rank in three is the last as often as not; two times in three is no chance.
        let often = times * 3 >= count * 2;
        let clear =
            often && typical > NOISE_NS && typical > 2 * bound && typical.saturating_mul(FRACTION_OF_PERIOD) > period;
        clear.then(|| {
            format!(
                "{} comes late: it was the last of {ranks} at {times} of {count} collectives, typically {} after the \
                 middle one (the clocks are aligned to {}); the others wait for it",
                self.name_of(rank),
                time(typical),
                time(bound)
            )
        })
    }

    /// The rank whose GPU lets its sends wait longer than the other ranks' do.
    fn slow_gpu(&self) -> Option<String> {
        let mut per_rank: BTreeMap<i32, (u64, u64, u64)> = BTreeMap::new();
        for (&(rank, _, send), stat) in self.peers.iter().filter(|((_, _, send), _)| *send) {
            debug_assert!(send);
            let entry = per_rank.entry(rank).or_default();
            entry.0 += stat.gpu_ns;
            entry.1 += stat.steps;
            entry.2 += total(stat);
        }
        let mut waits: Vec<(f64, i32, f64)> = per_rank
            .iter()
            .filter(|(_, (_, steps, _))| *steps > 0)
            .map(|(&rank, &(gpu, steps, all))| (gpu as f64 / steps as f64, rank, gpu as f64 / all.max(1) as f64))
            .collect();
        let (worst, middle) = worst_and_middle(&mut waits)?;
        let (wait, rank, share) = worst;
        let clear = wait > CLEARLY * middle && share > SHARE && wait > NOISE_NS as f64;
        clear.then(|| {
            format!(
                "{} is held up by its GPU: its sends wait {} each for the GPU's data ({:.0}% of their time), those of \
                 the middle rank {}",
                self.name_of(rank),
                time(wait as u64),
                100.0 * share,
                time(middle as u64)
            )
        })
    }

    /// Rails of a sender that take longer for their bytes than its other rails.
    fn slow_rails(&self) -> Vec<String> {
        // (rank, rail) of sends, over all peers.
        let mut rails: BTreeMap<(i32, Rail), WireStat> = BTreeMap::new();
        for (&(rank, _, rail, send), stat) in &self.wires {
            if send && rail.is_one() {
                rails.entry((rank, rail)).or_default().add(stat);
            }
        }
        let ranks: std::collections::BTreeSet<i32> = rails.keys().map(|&(rank, _)| rank).collect();
        let mut slow: BTreeMap<Rail, Vec<(i32, f64, f64, u64)>> = BTreeMap::new();
        for rank in ranks {
            let own = || rails.iter().filter(|((owner, _), _)| *owner == rank);
            let all: u64 = own().map(|(_, stat)| stat.bytes).sum();
            // A rail that carries little beside the others carries the short messages, which pay for latency.
            let mut costs: Vec<(f64, Rail, u64)> = own()
                .filter(|(_, stat)| stat.bytes > 0 && stat.bytes as f64 >= SHARE * all as f64 / 2.0)
                .map(|((_, rail), stat)| (cost(stat), *rail, stat.bytes))
                .collect();
            let Some(((worst, rail, moved), middle)) = worst_and_middle(&mut costs) else { continue };
            if worst > CLEARLY * middle {
                slow.entry(rail).or_default().push((rank, worst, middle, moved));
            }
        }
        slow.into_iter()
            .map(|(rail, mut on)| {
                on.sort_by(|a, b| (b.1 / b.2).total_cmp(&(a.1 / a.2)));
                let mut places: Vec<String> = on
                    .iter()
                    .take(NAMED)
                    .map(|&(rank, worst, middle, moved)| {
                        format!(
                            "at {}: {} per part in flight over {}, its other rails {}",
                            self.name_of(rank),
                            speed(worst),
                            bytes(moved),
                            speed(middle)
                        )
                    })
                    .collect();
                if on.len() > NAMED {
                    places.push(format!("and at {} more ranks", on.len() - NAMED));
                }
                format!("{} is slow {}", rail.name(), places.join("; "))
            })
            .collect()
    }

    /// The pair whose network takes longest for its bytes.
    fn slow_pairs(&self) -> Option<String> {
        let mut costs: Vec<(f64, (i32, i32), u64)> = self
            .peers
            .iter()
            .filter(|((_, _, send), stat)| *send && stat.bytes > 0)
            .map(|(&(rank, peer, _), stat)| (stat.network_ns as f64 / stat.bytes as f64, (rank, peer), stat.network_ns))
            .collect();
        let all: u64 = costs.iter().map(|&(_, _, ns)| ns).sum();
        let ((worst, (rank, peer), ns), middle) = worst_and_middle(&mut costs)?;
        let clear = worst > CLEARLY * middle && ns as f64 > SHARE * all as f64;
        clear.then(|| {
            format!(
                "the way from {} to {} is slow: a step moves {} there, {} between the middle pair",
                self.name_of(rank),
                self.name_of(peer),
                speed(worst),
                speed(middle)
            )
        })
    }

    /// The receiver that most often has no buffer ready.
    fn unready_receivers(&self) -> Option<String> {
        let mut per_peer: BTreeMap<i32, (u64, u64)> = BTreeMap::new();
        for (&(_, peer, send), stat) in &self.peers {
            if send {
                let entry = per_peer.entry(peer).or_default();
                entry.0 += stat.receiver_ns;
                entry.1 += total(stat);
            }
        }
        let mut shares: Vec<(f64, i32, u64)> =
            per_peer.iter().map(|(&peer, &(wait, all))| (wait as f64 / all.max(1) as f64, peer, wait)).collect();
        let (worst, middle) = worst_and_middle(&mut shares)?;
        let (share, peer, wait) = worst;
        let clear = share > CLEARLY * middle && share > SHARE;
        clear.then(|| {
            format!(
                "{} is not ready to receive: senders to it waited {} for its buffers ({:.0}% of their time, {:.0}% at \
                 the middle receiver); its GPU or its proxy thread is behind",
                self.name_of(peer),
                time(wait),
                100.0 * share,
                100.0 * middle
            )
        })
    }
}

fn total(stat: &PeerStat) -> u64 {
    stat.gpu_ns + stat.receiver_ns + stat.network_ns + stat.flush_ns
}

/// Nanoseconds per byte of a rail's parts: on the wire where the transport tells, else from start to stop.
fn cost(stat: &WireStat) -> f64 {
    let ns = if stat.wire_ns > 0 { stat.wire_ns } else { stat.durations.sum() };
    ns as f64 / stat.bytes.max(1) as f64
}

/// A speed from nanoseconds per byte.
fn speed(cost: f64) -> String {
    if cost < 10.0 { format!("{:.2} GB/s", 1.0 / cost) } else { format!("{:.1} MB/s", 1e3 / cost) }
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
