//! Time in steps of the processor's counter: for timestamps that are taken in the middle of NCCL's work.
//!
//! The system's clock reads the same counter, but first waits for all earlier instructions, and then converts. Here the
//! raw counter is read, and a thread that has time converts it later. It is used where the kernel itself trusts it as
//! its clock source: it runs evenly, even while a core sleeps, and is the same on all cores. Elsewhere a step is a
//! nanosecond of `CLOCK_MONOTONIC`.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// How long the counter is compared with the clock, once per process. A pair of readings is accurate to some 50 ns, so
/// durations are accurate to a thousandth or better.
const COMPARED_NS: u64 = 200_000;

/// In [`RATE`]: the counter is not used.
const SYSTEM_CLOCK: u64 = 1 << 63;

/// Nanoseconds per step, as a fixed-point number with 32 bits behind the point; 0 until it is known. A thread that
/// finds 0 measures it, and the first result stays: no thread waits for another, even in a forked child.
static RATE: AtomicU64 = AtomicU64::new(0);

/// A moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticks(NonZeroU64);

impl Ticks {
    /// Now, except for out-of-order execution: the moment may lie before the end of what the program did just before,
    /// by less than a memory access takes. Two moments of one thread may be equal.
    #[inline]
    pub fn now() -> Self {
        Self::of(if uses_counter() { counter() } else { system_clock() })
    }

    /// Now: not before any write that this thread has read so far, nor after any that it reads later.
    #[inline]
    pub(crate) fn now_in_order() -> Self {
        Self::of(if uses_counter() { counter_in_order() } else { system_clock() })
    }

    /// The nanoseconds from `earlier` to here, 0 when it is not earlier.
    #[inline]
    pub fn nanoseconds_since(self, earlier: Ticks) -> u64 {
        let steps = self.number().saturating_sub(earlier.number());
        ((u128::from(steps) * u128::from(rate() & !SYSTEM_CLOCK)) >> 32) as u64
    }

    /// The counter's value.
    #[inline]
    pub(crate) fn number(self) -> u64 {
        self.0.get()
    }

    /// The moment with this [`Ticks::number`]; none for 0.
    #[inline]
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }

    fn of(number: u64) -> Self {
        Self(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN))
    }
}

/// Measures the counter, which takes a fraction of a millisecond, so that the first [`Ticks::now`] need not.
pub(crate) fn set_up() {
    let _ = rate();
}

/// A moment, and the time of `CLOCK_MONOTONIC` then, in nanoseconds.
pub(crate) fn with_system_clock() -> (Ticks, u64) {
    if !uses_counter() {
        let now = system_clock();
        return (Ticks::of(now), now);
    }
    let (ticks, time) = compared();
    (Ticks::of(ticks), time)
}

/// The time of `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn system_clock() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[inline]
fn uses_counter() -> bool {
    rate() & SYSTEM_CLOCK == 0
}

#[inline]
fn rate() -> u64 {
    match RATE.load(Ordering::Relaxed) {
        0 => find_rate(),
        rate => rate,
    }
}

#[cold]
#[inline(never)]
fn find_rate() -> u64 {
    let found = if kernel_trusts_counter() { measured_rate() } else { SYSTEM_CLOCK | 1 << 32 };
    RATE.compare_exchange(0, found, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|first| first, |_| found)
}

fn kernel_trusts_counter() -> bool {
    let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    cfg!(target_arch = "x86_64") && source.is_ok_and(|source| source.trim() == "tsc")
}

fn measured_rate() -> u64 {
    let (from, began) = compared();
    loop {
        let (to, now) = compared();
        if now - began >= COMPARED_NS && to > from {
            return ((u128::from(now - began) << 32) / u128::from(to - from)).max(1) as u64;
        }
        std::hint::spin_loop();
    }
}

/// The counter and the clock at one moment: of a few attempts the one with the least disturbance in between.
fn compared() -> (u64, u64) {
    (0..4)
        .map(|_| {
            let before = system_clock();
            let ticks = counter_in_order();
            let after = system_clock();
            (after - before, ticks, before + (after - before) / 2)
        })
        .min()
        .map_or((0, 0), |(_, ticks, time)| (ticks, time))
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction; where a process may not use it, the system's clock fails too.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter_in_order() -> u64 {
    // SAFETY: as above. The fences keep loads on their side of the reading.
    unsafe {
        std::arch::x86_64::_mm_lfence();
        let ticks = std::arch::x86_64::_rdtsc();
        std::arch::x86_64::_mm_lfence();
        ticks
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    system_clock()
}

#[cfg(not(target_arch = "x86_64"))]
fn counter_in_order() -> u64 {
    system_clock()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_duration_is_what_the_system_clock_says() {
        set_up();
        // The outer pair of readings is longer than the inner one by what the machine does in between, so it is a
        // bound.
        let outer = Instant::now();
        let from = Ticks::now_in_order();
        let inner = Instant::now();
        std::thread::sleep(Duration::from_millis(50));
        let inner = inner.elapsed().as_nanos() as f64;
        let ticks = Ticks::now_in_order().nanoseconds_since(from) as f64;
        let outer = outer.elapsed().as_nanos() as f64;
        assert!(inner * 0.998 <= ticks && ticks <= outer * 1.002, "{inner} {ticks} {outer}");
    }

    #[test]
    fn an_earlier_moment_is_no_time_away() {
        let early = Ticks::now_in_order();
        let late = Ticks::now_in_order();
        assert!(late >= early);
        assert_eq!(early.nanoseconds_since(late), 0);
    }

    #[test]
    fn what_another_thread_has_seen_happens_after_it() {
        // Each thread takes a timestamp and passes it on, and the next one must not be earlier.
        let last = AtomicU64::new(1);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let seen = last.load(Ordering::Acquire);
                        let now = Ticks::now_in_order().number();
                        assert!(now >= seen, "{seen} was seen at {now}");
                        last.store(now, Ordering::Release);
                    }
                });
            }
        });
    }
}
