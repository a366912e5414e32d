//! One clock for many processes, estimated from their traces.
//!
//! Every message is evidence: it cannot arrive before it has left. A message from A to B bounds how far B's clock may
//! be *behind* A's; one from B to A bounds how far it may be ahead. With messages both ways, or around a ring, the
//! difference between two clocks lies in an interval: its middle is the estimate, half its width the error bound. The
//! bound holds whatever the network does; it is tight when some messages were fast.
//!
//! Processes of one boot of one host share a clock and are aligned exactly. Hosts that no messages connect are put
//! together by their wall clocks, and their bound is unknown. Clocks that drift apart during a trace are taken into
//! account by aligning windows of time ([`WINDOW_NS`]) and going over from one to the next gradually.

use std::collections::{BTreeMap, HashMap};

use super::perfetto::ProcessInfo;
use super::perfetto::read::Arrow;

/// Messages of so much time are taken together. In ten seconds two clocks drift apart by some microseconds.
pub(crate) const WINDOW_NS: u64 = 10_000_000_000;

/// The input about one process.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    /// Which process on which host.
    pub info: ProcessInfo,
    /// Its ends of arrows.
    pub arrows: Vec<Arrow>,
}

/// The correction to a process's times, and its largest error against the reference.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Correction {
    /// Times (of the process) and what to add there; in between, in proportion.
    points: Vec<(u64, i64)>,
    /// The largest error in nanoseconds; None when the estimate rests on the wall clock alone.
    pub bound: Option<u64>,
    /// Messages that the estimate rests on.
    pub messages: usize,
}

impl Correction {
    /// The time on the reference's clock.
    pub(crate) fn apply(&self, when: u64) -> u64 {
        when.saturating_add_signed(self.at(when))
    }

    /// The correction at that time.
    pub(crate) fn at(&self, when: u64) -> i64 {
        let after = self.points.partition_point(|&(time, _)| time <= when);
        match (after.checked_sub(1).map(|i| self.points[i]), self.points.get(after)) {
            (Some((_, offset)), None) | (None, Some(&(_, offset))) => offset,
            (Some((t0, o0)), Some(&(t1, o1))) => {
                let share = (when - t0) as f64 / (t1 - t0) as f64;
                o0 + ((o1 - o0) as f64 * share) as i64
            }
            (None, None) => 0,
        }
    }
}

/// Infinity, far from overflowing when two are added.
const FAR: i64 = i64::MAX / 4;

/// Corrections for all processes, onto the clock of the first one's host.
pub(crate) fn align(clocks: &[Clock]) -> Vec<Correction> {
    let mut hosts: Vec<(String, u64)> = Vec::new();
    let host_of: Vec<usize> = clocks
        .iter()
        .map(|clock| {
            let key = (clock.info.host.clone(), clock.info.boot);
            hosts.iter().position(|known| *known == key).unwrap_or_else(|| {
                hosts.push(key);
                hosts.len() - 1
            })
        })
        .collect();
    let wall: Vec<i64> = (0..hosts.len())
        .map(|host| {
            let of = |index: usize| clocks[index].info.wall_offset;
            host_of.iter().position(|&h| h == host).map_or(0, of)
        })
        .collect();
    let pairs = pairs(clocks, &host_of, &wall);
    let count = hosts.len();
    let mut points: Vec<Vec<(u64, i64)>> = vec![Vec::new(); count];
    let mut bounds: Vec<Option<u64>> = vec![Some(0); count];
    let mut messages = vec![0; count];
    for pair in pairs.values().flatten() {
        messages[pair.from] += 1;
        messages[pair.to] += 1;
    }
    for (&window, pairs) in &pairs {
        let (limits, slack) = consistent_limits(count, pairs, &wall);
        for host in 1..count {
            // The host's offset minus the reference's lies between these.
            let (low, high) = (-limits[0][host], limits[host][0]);
            if low > -FAR && high < FAR {
                let middle = low + (high - low) / 2;
                let bound = (high - low).unsigned_abs().div_ceil(2) + slack;
                // The window's middle, on the host's own clock.
                let offset = middle + wall[host] - wall[0];
                let time = (window * WINDOW_NS + WINDOW_NS / 2).saturating_add_signed(-wall[host]);
                points[host].push((time, offset));
                bounds[host] = bounds[host].map(|known| known.max(bound));
            }
        }
    }
    for host in 1..count {
        if points[host].is_empty() {
            points[host].push((0, wall[host] - wall[0]));
            bounds[host] = None;
        }
    }
    host_of
        .iter()
        .map(|&host| Correction { points: points[host].clone(), bound: bounds[host], messages: messages[host] })
        .collect()
}

/// A message between two hosts.
#[derive(Debug, Clone, Copy)]
struct Pair {
    from: usize,
    to: usize,
    left: u64,
    arrived: u64,
}

/// Messages between hosts, by window of wall-clock time.
fn pairs(clocks: &[Clock], host_of: &[usize], wall: &[i64]) -> BTreeMap<u64, Vec<Pair>> {
    let mut left: HashMap<u64, (usize, u64)> = HashMap::new();
    for (clock, &host) in clocks.iter().zip(host_of) {
        left.extend(clock.arrows.iter().filter(|arrow| arrow.leaves).map(|arrow| (arrow.id, (host, arrow.when))));
    }
    let mut windows: BTreeMap<u64, Vec<Pair>> = BTreeMap::new();
    for (clock, &to) in clocks.iter().zip(host_of) {
        for arrow in clock.arrows.iter().filter(|arrow| !arrow.leaves) {
            if let Some(&(from, when)) = left.get(&arrow.id).filter(|(from, _)| *from != to) {
                let window = arrow.when.saturating_add_signed(wall[to]) / WINDOW_NS;
                windows.entry(window).or_default().push(Pair { from, to, left: when, arrived: arrow.when });
            }
        }
    }
    windows
}

/// Limits that do not contradict each other, and the allowance that this took: within a window clocks may drift by
/// more than the messages' freedom.
fn consistent_limits(count: usize, pairs: &[Pair], wall: &[i64]) -> (Vec<Vec<i64>>, u64) {
    let mut allowance = 0;
    loop {
        let limits = limits(count, pairs, wall, allowance);
        if (0..count).all(|host| limits[host][host] >= 0) || allowance > FAR / 4 {
            return (limits, allowance as u64);
        }
        allowance = (allowance * 2).max(1000);
    }
}

/// `limits[b][a]`: the most by which host b's correction (beyond its wall clock) exceeds host a's, from all chains of
/// messages (Floyd and Warshall's shortest paths).
fn limits(count: usize, pairs: &[Pair], wall: &[i64], allowance: i64) -> Vec<Vec<i64>> {
    let mut limits = vec![vec![FAR; count]; count];
    for (host, row) in limits.iter_mut().enumerate() {
        row[host] = 0;
    }
    for pair in pairs {
        // arrived + o(to) >= left + o(from), so o(from) - o(to) <= arrived - left.
        let slack = (pair.arrived as i64 + wall[pair.to]) - (pair.left as i64 + wall[pair.from]) + allowance;
        let limit = &mut limits[pair.from][pair.to];
        *limit = (*limit).min(slack);
    }
    for via in 0..count {
        for from in 0..count {
            for to in 0..count {
                let around = limits[from][via] + limits[via][to];
                if limits[from][via] < FAR && limits[via][to] < FAR && around < limits[from][to] {
                    limits[from][to] = around.max(-FAR);
                }
            }
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(host: &str, wall_offset: i64) -> Clock {
        let info = ProcessInfo { host: host.into(), boot: 1, pid: 1, rank: None, wall_offset };
        Clock { info, arrows: Vec::new() }
    }

    /// Sends messages around; host `h`'s clock shows the true time minus `offsets[h]`.
    fn exchange(clocks: &mut [Clock], offsets: &[i64], routes: &[(usize, usize)], fastest: u64) {
        let base = 1_000_000_000_000u64;
        for number in 0..200u64 {
            let (from, to) = routes[number as usize % routes.len()];
            let flight = fastest + super::super::perfetto::mix(1, number) % 300_000;
            let left = base + number * 1_000_000;
            let shown = |time: u64, host: usize| time.saturating_add_signed(-offsets[host]);
            clocks[from].arrows.push(Arrow { id: number, when: shown(left, from), leaves: true });
            clocks[to].arrows.push(Arrow { id: number, when: shown(left + flight, to), leaves: false });
        }
    }

    fn check(offsets: &[i64], wall_error: &[i64], routes: &[(usize, usize)], fastest: u64, width: u64) {
        let mut clocks: Vec<Clock> =
            (0..offsets.len()).map(|host| clock(&format!("host-{host}"), offsets[host] + wall_error[host])).collect();
        exchange(&mut clocks, offsets, routes, fastest);
        for (host, correction) in align(&clocks).iter().enumerate() {
            let truth = offsets[host] - offsets[0];
            let time = 1_000_100_000_000u64.saturating_add_signed(-offsets[host]);
            let error = (correction.at(time) - truth).unsigned_abs();
            let bound = correction.bound.expect("messages connect all hosts");
            assert!(error <= bound, "host {host}: off by {error} with a bound of {bound}");
            assert!(bound <= width, "host {host}: a bound of {bound}");
        }
    }

    #[test]
    fn messages_both_ways_catch_the_offset_within_the_stated_bound() {
        check(&[0, 77_000_000_000], &[0, 3_000_000], &[(0, 1), (1, 0)], 20_000, 60_000);
    }

    #[test]
    fn a_ring_without_answers_is_enough() {
        check(&[5, -9_000_000, 123_456_789], &[0, -2_000_000, 1_000_000], &[(0, 1), (1, 2), (2, 0)], 20_000, 120_000);
    }

    #[test]
    fn one_way_messages_alone_give_the_wall_clock_and_no_bound() {
        let mut clocks = vec![clock("a", 0), clock("b", 5_000)];
        exchange(&mut clocks, &[0, 5_100], &[(0, 1)], 1000);
        let corrections = align(&clocks);
        assert_eq!((corrections[1].at(0), corrections[1].bound), (5_000, None));
    }

    #[test]
    fn processes_of_one_host_are_never_moved_against_each_other() {
        let mut clocks = vec![clock("a", 10), clock("a", 25)];
        exchange(&mut clocks, &[0, 0], &[(0, 1), (1, 0)], 1000);
        for correction in align(&clocks) {
            assert_eq!((correction.at(5), correction.bound), (0, Some(0)));
        }
    }

    #[test]
    fn drift_is_followed_from_window_to_window() {
        // Host 1 runs 20 µs per second fast.
        let mut clocks = vec![clock("a", 0), clock("b", 0)];
        let shown = |true_time: u64| true_time + (true_time - 1_000_000_000_000) / 50_000;
        for number in 0..6000u64 {
            let left = 1_000_000_000_000 + number * 10_000_000;
            let flight = 15_000 + super::super::perfetto::mix(2, number) % 100_000;
            let (out, back) = (number % 2 == 0, number % 2 == 1);
            let (a, b) = (left, left + flight);
            let (from, to) = if out { (0, 1) } else { (1, 0) };
            let on = |host: usize, time: u64| if host == 0 { time } else { shown(time) };
            assert!(out != back);
            clocks[from].arrows.push(Arrow { id: number, when: on(from, a), leaves: true });
            clocks[to].arrows.push(Arrow { id: number, when: on(to, b), leaves: false });
        }
        let correction = &align(&clocks)[1];
        for second in [8u64, 20, 31, 49] {
            let truth = 1_000_000_000_000 + second * 1_000_000_000;
            let error = correction.apply(shown(truth)).abs_diff(truth);
            assert!(error < 250_000, "after {second} s: off by {error} ns");
        }
    }
}
