//! The time that events are stamped with: CLOCK_MONOTONIC in nanoseconds, the same for all processes of a host.

use std::collections::VecDeque;

use crate::os::ticks::{self, Ticks};

/// Readings that are kept while records wait for an older one. A round of the writer takes one.
const KEPT: usize = 256;

/// Now.
#[inline]
pub fn now() -> u64 {
    ticks::system_clock()
}

/// Converts [`Ticks`] to this clock, along straight lines between frequent readings of both. Corrections of the
/// system's clock apply here too, and two processes of a host agree to the error of a reading, some 50 ns.
///
/// Guarantees: later ticks are never an earlier time; ticks between two readings are a time between theirs.
#[derive(Debug)]
pub(super) struct Timeline {
    /// Oldest first; never empty.
    readings: VecDeque<(u64, u64)>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { readings: [ticks::with_system_clock()].map(|(ticks, time)| (ticks.number(), time)).into() }
    }
}

impl Timeline {
    /// Reads both clocks, and returns the ticks of before.
    pub(super) fn update(&mut self) -> u64 {
        let before = Ticks::now_in_order().number();
        let (ticks, time) = ticks::with_system_clock();
        self.add(ticks.number(), time);
        before
    }

    fn add(&mut self, ticks: u64, time: u64) {
        if self.readings.back().is_none_or(|last| *last < (ticks, time)) {
            self.readings.push_back((ticks, time));
        }
        if self.readings.len() > KEPT {
            self.readings.pop_front();
        }
    }

    /// Forgets readings that only times before `ticks` need.
    pub(super) fn forget(&mut self, ticks: u64) {
        while self.readings.len() > 2 && self.readings[1].0 <= ticks {
            self.readings.pop_front();
        }
    }

    /// The time at `ticks`; before the first and after the last reading the nearest line is extended.
    pub(super) fn nanoseconds(&self, ticks: u64) -> u64 {
        let last = self.readings.len() - 1;
        let after = self.readings.partition_point(|reading| reading.0 <= ticks).clamp(1, last.max(1));
        let (from, began) = self.readings[after - 1];
        let Some(&(to, ended)) = self.readings.get(after).filter(|reading| reading.0 > from) else {
            return began;
        };
        let slope = (ended - began) as f64 / (to - from) as f64;
        let moved = ((ticks.abs_diff(from)) as f64 * slope) as u64;
        match ticks {
            _ if ticks < from => began.saturating_sub(moved),
            _ if ticks < to => (began + moved).min(ended),
            _ => (began + moved).max(ended),
        }
    }
}

/// How far the wall clock is ahead of [`now`], in nanoseconds. Good for a first guess between hosts, no more.
pub(crate) fn wall_offset() -> i64 {
    // The smallest of a few differences is the one least disturbed in between.
    (0..5)
        .map(|_| {
            let before = now();
            let wall = wall();
            let after = now();
            (after - before, wall as i64 - ((before + after) / 2) as i64)
        })
        .min()
        .map_or(0, |(_, offset)| offset)
}

fn wall() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn later_ticks_are_never_earlier_and_readings_are_met(
            steps in prop::collection::vec((1u64..10_000_000, 0u64..10_000_000), 1..20),
            mut asked in prop::collection::vec(0u64..200_000_000, 2..50),
        ) {
            let (mut ticks, mut time) = (1_000_000, 5_000_000_000);
            let mut timeline = Timeline { readings: [(ticks, time)].into() };
            for (more_ticks, more_time) in steps {
                ticks += more_ticks;
                time += more_time;
                timeline.add(ticks, time);
            }
            for &(ticks, time) in &timeline.readings {
                prop_assert_eq!(timeline.nanoseconds(ticks), time);
            }
            asked.sort_unstable();
            prop_assert!(asked.is_sorted_by_key(|&ticks| timeline.nanoseconds(ticks)));
        }
    }

    #[test]
    fn the_system_clock_is_met_within_a_microsecond() {
        let mut timeline = Timeline::default();
        // The best of a few attempts: a thread that is interrupted between the readings proves nothing.
        let off = (0..50).map(|_| {
            let before = now();
            let ticks = Ticks::now_in_order().number();
            let after = now();
            std::thread::sleep(std::time::Duration::from_millis(2));
            timeline.update();
            let told = timeline.nanoseconds(ticks);
            before.saturating_sub(told).max(told.saturating_sub(after)) + (after - before) / 2
        });
        assert!(off.min().unwrap() < 1_000);
    }
}
