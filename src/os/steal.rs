//! Hypervisor steal time: the processor time that the host takes from a virtual machine.
//!
//! When the host has less processor time than its machines want, a running thread stops for milliseconds without
//! noticing, and everything that waits for that thread does too. The kernel counts such time as *steal* (proc(5),
//! `/proc/stat`), over all processors. The idle time of the machine does not matter: this module uses the stolen part
//! of the time in which some thread wanted to run.
//!
//! A machine that is not virtual, or has processors of its own, counts none.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::log::NET;
use super::ticks::Ticks;

/// If more than this part of the busy time is stolen, steal is high.
const MUCH: f64 = 0.06;

/// Below this it is low again. Far below the other limit: a process that uses less processor time also loses less of
/// it, so the measured steal drops once this process throttles.
const LITTLE: f64 = 0.02;

/// An interval with fewer hundredths of a second of busy time than this is ignored.
const LEAST: u64 = 20;

/// This many hundredths of a second of busy time weigh as much as all before: half a second of ten processors.
const WEIGHT: f64 = 500.0;

/// The kernel sums over all processors for a read, which takes a tenth of a millisecond or more: it is read at most
/// once in this many nanoseconds.
const PAUSE_NS: u64 = 200_000_000;

/// Since boot, in hundredths of a second and over all processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Times {
    busy: u64,
    stolen: u64,
}

impl Times {
    /// From `/proc/stat`.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        let numbers: Vec<u64> = words.by_ref().map_while(|word| word.parse().ok()).collect();
        // User, nice, system, idle, iowait, irq, softirq, steal; user has the guests' time in it.
        let &[user, nice, system, _, _, irq, softirq, stolen, ..] = numbers.as_slice() else { return None };
        Some(Self { busy: user + nice + system + irq + softirq, stolen })
    }

    fn now() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat").ok()?)
    }
}

/// The stolen part, the latest interval weighing most.
#[derive(Debug, Default)]
struct Estimate {
    last: Times,
    part: f64,
    is_much: bool,
}

impl Estimate {
    /// The counters at `now`; at first, since the machine was started.
    fn add(&mut self, now: Times) -> bool {
        let busy = now.busy.saturating_sub(self.last.busy);
        let stolen = now.stolen.saturating_sub(self.last.stolen);
        if busy >= LEAST {
            let part = stolen as f64 / busy as f64;
            let weight = busy as f64 / (busy as f64 + WEIGHT);
            self.part += (part.min(1.0) - self.part) * weight;
            self.last = now;
        }
        self.is_much = self.part > if self.is_much { LITTLE } else { MUCH };
        self.is_much
    }
}

/// Whether steal is high.
#[derive(Debug)]
pub struct Steal {
    is_much: AtomicBool,
    /// When the kernel's counters were read: [`Ticks::number`].
    asked: AtomicU64,
    estimate: Mutex<Estimate>,
    /// The user has been warned.
    told: AtomicBool,
}

impl Steal {
    /// With the counters since the machine was started.
    pub fn new() -> Self {
        let (is_much, told) = (AtomicBool::new(false), AtomicBool::new(false));
        let steal = Self { is_much, asked: AtomicU64::new(0), estimate: Mutex::default(), told };
        steal.look();
        steal
    }

    /// The result of the last read.
    #[inline]
    pub fn is_much(&self) -> bool {
        self.is_much.load(Ordering::Relaxed)
    }

    /// Reads the counters, unless that was done recently. Takes a system call: not for NCCL's threads.
    pub fn look(&self) {
        let (now, asked) = (Ticks::now(), Ticks::from_number(self.asked.load(Ordering::Relaxed)));
        if asked.is_some_and(|asked| now.nanoseconds_since(asked) < PAUSE_NS) {
            return;
        }
        let Ok(mut estimate) = self.estimate.try_lock() else { return };
        self.asked.store(now.number(), Ordering::Relaxed);
        if let Some(times) = Times::now() {
            let is_much = estimate.add(times);
            self.is_much.store(is_much, Ordering::Relaxed);
            if is_much && !self.told.swap(true, Ordering::Relaxed) {
                let percent = estimate.part * 100.0;
                tracing::info!(
                    target: NET,
                    "the host takes {percent:.0} % of the busy processors' time from this machine (steal in /proc/stat): \
                     everything is slower and less even for it; Towline does with fewer threads meanwhile"
                );
            }
        }
    }
}

impl Default for Steal {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_and_stolen_time_are_read_as_the_kernel_writes_them() {
        let text = "cpu  52404 7 63270 1006717 118 3 8846 2488 40 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n";
        assert_eq!(Times::parse(text), Some(Times { busy: 52404 + 7 + 63270 + 3 + 8846, stolen: 2488 }));
        assert_eq!(Times::parse("cpu  1 2 3 4 5 6 7\n"), None, "a kernel that does not count it");
        for text in ["", "cpu0 1 2 3 4 5 6 7 8 9 0", "cpu  a b"] {
            assert_eq!(Times::parse(text), None, "{text}");
        }
        let now = Times::now().expect("Linux");
        assert!(now.busy > 0);
    }

    /// Adds intervals of this much busy time each, of which `part` is stolen.
    fn spans(estimate: &mut Estimate, count: usize, busy: u64, part: f64) -> bool {
        let mut is_much = estimate.is_much;
        for _ in 0..count {
            let Times { busy: before, stolen } = estimate.last;
            is_much = estimate.add(Times { busy: before + busy, stolen: stolen + (busy as f64 * part) as u64 });
        }
        is_much
    }

    #[test]
    fn much_is_seen_within_a_second_of_work_and_little_only_when_it_is_far_less() {
        let mut estimate = Estimate::default();
        assert!(!spans(&mut estimate, 20, 1000, 0.0) && !spans(&mut estimate, 20, 1000, 0.05));
        assert!(spans(&mut estimate, 2, 1000, 0.14), "{estimate:?}");
        assert!(
            spans(&mut estimate, 20, 1000, 0.04),
            "half as much is taken because half as much is done: {estimate:?}"
        );
        assert!(!spans(&mut estimate, 3, 1000, 0.0), "{estimate:?}");
    }

    #[test]
    fn what_the_machine_has_known_since_its_start_counts_and_a_short_span_does_not() {
        let mut estimate = Estimate::default();
        assert!(estimate.add(Times { busy: 100_000, stolen: 12_000 }));
        assert!(!Estimate::default().add(Times { busy: 19, stolen: 19 }), "nothing to go by");
        let mut estimate = Estimate::default();
        assert!(!estimate.add(Times { busy: 1000, stolen: 0 }));
        assert!(!estimate.add(Times { busy: 1019, stolen: 19 }));
        assert_eq!(estimate.last, Times { busy: 1000, stolen: 0 }, "it is counted with what follows");
        // Counters that go back, as after a migration of the machine, are ignored.
        assert!(!estimate.add(Times::default()));
    }

    #[test]
    fn the_kernel_is_asked_now_and_then_only() {
        let steal = Steal::new();
        let asked = steal.asked.load(Ordering::Relaxed);
        assert_ne!(asked, 0);
        steal.look();
        assert_eq!(steal.asked.load(Ordering::Relaxed), asked);
    }
}
