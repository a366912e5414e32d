//! Whether all further streams carry long messages, or one: more than one only lengthens the queue of a full network.
//!
//! Several streams let several processors copy. Where the network is slower than one of them, each stream still keeps
//! what its congestion window allows in the queue before the wire: at 10 Gb/s, 1.15 ms of data with four further
//! streams on each of two connections, 0.5 ms with one. Clear-to-sends and acknowledgements of the other direction wait
//! in the same queue. NCCL has eight messages of 128 KiB outstanding on each channel of `sendrecv`, which are too few
//! for so long a way: the wire carried 8.4 Gb/s, and carries 9.5 with one stream. What that stream may not send yet
//! waits in its socket, not in the network.
//!
//! With CUBIC one stream fills the queue, too. So messages up to [`CHUNK_MAX`](super::constants::CHUNK_MAX) wait for no
//! clear-to-send while one stream carries them, if the peer has room, and their sends end when they have left. The same
//! wire then carries 9.5 Gb/s with either congestion control.
//!
//! A full network shows in the kernel's round trip: it is longer than the shortest one by the time in the queue
//! ([`FULL_NETWORK_DELAY`]).
//!
//! A path that limits each stream by itself, as clouds and bonded links do, has queues too. So one stream is a trial
//! first. All carry the messages again when the trial shows less than 7/10 of the rate before, or no queue: then the
//! processors of the one stream are the limit. A smaller loss may come from other operations than before, so several
//! trials must show it: a tenth on average ends a trial too ([`Losses`]). All connections of the process decide
//! together, also those of other rails, which may share a wire: a connection with one stream gets less of a shared
//! network than one with four. All streams also come back now and then, for two decisions, to see whether the queue is
//! still there; a new trial follows. They come back after some eight decisions without a queue, not at once: an
//! operation of 2 MiB leaves none on a network that one of 16 MiB fills, and each trial takes a few of those. Where
//! connections of one process use networks of different speed, the one without a queue keeps all streams for all of
//! them, as long as no trial has begun.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::constants::{FULL_NETWORK_DELAY, SAMPLES, TRIAL_PERIOD};

/// What the connections of the process have decided.
#[derive(Debug, Default)]
pub(crate) struct Spread {
    uses_one_stream: AtomicBool,
    /// Counts the changes between all streams, a trial, and one stream.
    changes: AtomicU32,
    /// Held for a few instructions, also with a connection's state locked.
    seen: Mutex<Seen>,
}

impl Spread {
    /// Whether one stream of each connection carries its long messages.
    #[inline]
    pub(crate) fn uses_one_stream(&self) -> bool {
        self.uses_one_stream.load(Ordering::Relaxed)
    }

    /// A number that changes when another number of streams, or another phase of a trial, begins. Rates of before then
    /// do not count.
    pub(crate) fn changes(&self) -> u32 {
        self.changes.load(Ordering::Relaxed)
    }

    /// As if packets waited for long, until one stream is tried.
    #[cfg(test)]
    pub(crate) fn fill(&self) {
        let mut rate = Rate::default();
        rate.add(Duration::from_millis(1), 1 << 20);
        while !self.uses_one_stream() {
            self.sample(FULL_NETWORK_DELAY, rate);
        }
    }

    /// A stream has measured the queue on its path, and its connection this rate since the last change.
    pub(crate) fn sample(&self, queue: Duration, rate: Rate) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::discriminant(&seen.phase);
        seen.sample(queue, rate);
        if std::mem::discriminant(&seen.phase) != before {
            self.uses_one_stream.store(!matches!(seen.phase, Phase::All { .. }), Ordering::Relaxed);
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// How fast connections are while chunks are under way.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rate {
    /// For each chunk, what its connection delivered while it was under way.
    bytes: u64,
    ns: u64,
}

impl Rate {
    /// A chunk was under way for this long, and its connection has delivered `bytes` in this time, the chunk included.
    pub(crate) fn add(&mut self, elapsed: Duration, bytes: u64) {
        self.merge(Self { bytes, ns: u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX) });
    }

    fn merge(&mut self, other: Self) {
        (self.bytes, self.ns) = (self.bytes.saturating_add(other.bytes), self.ns.saturating_add(other.ns));
    }

    /// Bytes in 1024 ns. None without a chunk.
    fn value(self) -> Option<u64> {
        self.bytes.saturating_mul(1024).checked_div(self.ns)
    }
}

/// What the streams have seen since the last decision, and what was decided.
#[derive(Debug, Default)]
struct Seen {
    samples: u32,
    /// The shortest queue, since a single stream with a long one is on a path of its own; and all of them together.
    least: Option<Duration>,
    queues: Duration,
    rate: Rate,
    phase: Phase,
    /// For how many decisions all streams stayed after the last trial that failed, halved by each success since.
    after_failure: u32,
    /// For how many decisions one stream stays after the last trial, if it succeeded.
    after_success: u32,
    losses: Losses,
}

/// What the trials lost on average: the latest counts a quarter, the one before it 3/16, and so on.
#[derive(Debug, Default)]
struct Losses {
    /// In 1/1024 of the larger rate; negative: one stream carried more.
    mean: i64,
}

impl Losses {
    /// A trial with this rate, and the rate before it.
    fn add(&mut self, rate: u64, before: u64) {
        // Half as much counts as twice as much does, and most of a larger difference comes from another operation.
        let (lost, most) = (before.cast_signed() - rate.cast_signed(), rate.max(before).max(1).cast_signed());
        let loss = (lost.saturating_mul(1024) / most).clamp(-1024 * 3 / 10, 1024 * 3 / 10);
        self.mean += (loss - self.mean) / 4;
    }

    /// Whether one stream carries a tenth less than all.
    fn are_large(&self) -> bool {
        self.mean > 1024 / 10
    }
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// All streams, whatever the queue, for this many decisions.
    All { stays: u32 },
    /// One stream; what the others had is still under way. The rate before.
    Settling { before: u64 },
    /// One stream, to be compared with the rate before.
    Trial { before: u64 },
    /// One stream, for this many decisions.
    One { stays: u32 },
}

impl Default for Phase {
    fn default() -> Self {
        Self::All { stays: 0 }
    }
}

impl Seen {
    fn sample(&mut self, queue: Duration, rate: Rate) {
        self.samples = self.samples.saturating_add(1);
        self.least = Some(self.least.map_or(queue, |least| least.min(queue)));
        self.queues += queue;
        self.rate.merge(rate);
        if self.samples >= SAMPLES
            && let Some(rate) = self.rate.value()
        {
            self.phase = self.next(rate);
            (self.samples, self.least, self.queues, self.rate) = (0, None, Duration::ZERO, Rate::default());
        }
    }

    fn next(&mut self, rate: u64) -> Phase {
        let has_queue = self.queues / self.samples >= FULL_NETWORK_DELAY / 2;
        if let Phase::Trial { before } = self.phase {
            self.losses.add(rate, before);
        }
        match self.phase {
            Phase::All { stays: 0 } if self.least >= Some(FULL_NETWORK_DELAY) => Phase::Settling { before: rate },
            Phase::All { stays } => Phase::All { stays: stays.saturating_sub(1) },
            Phase::Settling { before } => Phase::Trial { before },
            Phase::Trial { before } if rate < before * 7 / 10 || self.losses.are_large() || !has_queue => {
                self.after_success = 0;
                self.after_failure = (2 * self.after_failure).clamp(1, TRIAL_PERIOD);
                Phase::All { stays: self.after_failure }
            }
            Phase::Trial { .. } => {
                self.after_failure /= 2;
                self.after_success = (2 * self.after_success).clamp(TRIAL_PERIOD / 4, TRIAL_PERIOD);
                Phase::One { stays: self.after_success }
            }
            // What the one stream has sent is still under way.
            Phase::One { stays: 0 } => Phase::All { stays: 1 },
            Phase::One { stays } if has_queue => Phase::One { stays: stays - 1 },
            Phase::One { stays } => Phase::One { stays: stays.saturating_sub(self.after_success / 8) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_millis(1);

    fn rate(mb: u64) -> Rate {
        Rate { bytes: mb << 20, ns: 1 << 20 }
    }

    /// As many samples as a decision takes. Returns whether one stream is to carry the messages.
    fn decides(spread: &Spread, mb: u64, queue: Duration) -> bool {
        (0..SAMPLES).for_each(|_| spread.sample(queue, rate(mb)));
        spread.uses_one_stream()
    }

    #[test]
    fn a_full_network_gets_one_stream_and_one_that_is_not_full_all() {
        let spread = Spread::default();
        assert!((0..100).all(|_| !decides(&spread, 4, FULL_NETWORK_DELAY / 2)), "no queue");
        let one = (0..1000).filter(|_| decides(&spread, 4, FULL_NETWORK_DELAY)).count();
        assert!((950..1000).contains(&one), "{one}: a queue, and as much on one stream");
        assert!(
            (0..10).any(|_| !decides(&spread, 4, FULL_NETWORK_DELAY / 3))
                && !decides(&spread, 4, FULL_NETWORK_DELAY / 3),
            "no queue again"
        );
    }

    /// The next operation may be a short one.
    #[test]
    fn a_trial_without_a_queue_is_soon_repeated() {
        let spread = Spread::default();
        assert!(decides(&spread, 4, LONG) && decides(&spread, 4, LONG), "a trial");
        assert!(!decides(&spread, 4, FULL_NETWORK_DELAY / 3));
        let all = (0..100).take_while(|_| !decides(&spread, 4, LONG)).count();
        assert_eq!(all, 1);
    }

    /// How many of 2,000 decisions begin a trial, on a network where one stream of each connection shows this.
    fn trials(mb: u64, queue: Duration) -> usize {
        let spread = Spread::default();
        let begins = |_: &usize| {
            let was_one = spread.uses_one_stream();
            let (mb, queue) = if was_one { (mb, queue) } else { (4, LONG) };
            decides(&spread, mb, queue) && !was_one
        };
        (0..2000).filter(begins).count()
    }

    #[test]
    fn one_stream_that_carries_less_or_leaves_no_queue_is_a_trial_and_trials_become_rare() {
        assert!((5..20).contains(&trials(1, LONG)), "a path that limits each stream: {}", trials(1, LONG));
        assert!(
            (5..20).contains(&trials(3, FULL_NETWORK_DELAY / 3)),
            "its processors are the limit: {}",
            trials(3, FULL_NETWORK_DELAY / 3)
        );
        assert!((5..20).contains(&trials(3, LONG)), "a quarter less each time: {}", trials(3, LONG));
        assert!(
            (5..15).contains(&trials(4, FULL_NETWORK_DELAY / 2)),
            "a full network: {}",
            trials(4, FULL_NETWORK_DELAY / 2)
        );
    }

    /// A number from 75 to 125, which differ for other reasons than the streams.
    fn noise(random: &mut u64) -> u64 {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        75 + (*random >> 33) % 51
    }

    /// The mean share of 4,000 decisions, in percent, during which one stream carries the messages, on a full network
    /// where one stream carries `percent` of what all do.
    fn one_stream(percent: u64) -> usize {
        let of = |seed: u64| {
            let (spread, mut random) = (Spread::default(), seed);
            let decides = |_: &usize| {
                let mb = noise(&mut random);
                decides(&spread, if spread.uses_one_stream() { mb * percent / 100 } else { mb }, LONG)
            };
            (0..4000).filter(decides).count() / 40
        };
        (1..=20).map(of).sum::<usize>() / 20
    }

    #[test]
    fn a_small_loss_is_noticed_over_several_trials() {
        assert!((70..=100).contains(&one_stream(100)), "no loss: {} %", one_stream(100));
        assert!((0..30).contains(&one_stream(80)), "a fifth: {} %", one_stream(80));
    }

    #[test]
    fn a_single_trial_beside_another_operation_proves_nothing() {
        let mut losses = Losses::default();
        losses.add(1, 1000);
        assert!(!losses.are_large(), "{losses:?}");
        losses.add(850, 1000);
        losses.add(850, 1000);
        assert!(losses.are_large(), "{losses:?}");
    }

    /// Each connection gives its rate since its last sample, which may be longer ago than several decisions.
    #[test]
    fn many_connections_measure_each_number_of_streams_by_itself() {
        for connections in [1, 8, 64] {
            let spread = Spread::default();
            // A path that limits each stream: the rate since the last sample, and the change after which it counts.
            let mut all = vec![(0, None); connections];
            let mut one = 0;
            for (connection, step) in (0..100_000).map(|step| (step % connections, step)) {
                let now = if spread.uses_one_stream() { 1 } else { 4 };
                one += usize::from(spread.uses_one_stream());
                let (since, counts) = &mut all[connection];
                if *counts == Some(spread.changes()) {
                    spread.sample(LONG, rate(*since));
                }
                (*since, *counts) = (now, Some(spread.changes()));
                assert!(step < 20_000 || one < step / 4, "{connections} connections: {one} of {step} on one stream");
            }
        }
    }

    #[test]
    fn all_streams_come_back_when_the_queue_stays_away() {
        for before in [3, 100, 300, 1000, 3000] {
            let spread = Spread::default();
            for _ in 0..before {
                decides(&spread, 4, LONG);
            }
            while !decides(&spread, 4, LONG) {}
            let one = (0..100).take_while(|_| decides(&spread, 4, FULL_NETWORK_DELAY / 3)).count();
            assert!(one < 10, "{one} decisions without a queue, after {before} with one");
            assert!((0..100).all(|_| !decides(&spread, 4, FULL_NETWORK_DELAY / 3)), "nor a trial");
        }
    }

    /// Each size of a benchmark in turn: all_reduce of 2 MiB at 25 Gb/s leaves no queue, of 16 MiB it does.
    #[test]
    fn short_operations_amid_long_ones_do_not_bring_all_streams_back() {
        let spread = Spread::default();
        assert!(decides(&spread, 4, LONG) && decides(&spread, 4, LONG) && decides(&spread, 4, LONG));
        for _ in 0..3 {
            assert!((0..2).all(|_| decides(&spread, 4, FULL_NETWORK_DELAY / 3)), "short");
            assert!((0..3).all(|_| decides(&spread, 4, LONG)), "long");
        }
    }

    #[test]
    fn each_result_counts_for_longer_when_it_repeats_and_a_success_halves_the_next_failure() {
        let trial = Phase::Trial { before: 100 };
        let mut seen = Seen {
            after_failure: TRIAL_PERIOD,
            samples: 1,
            queues: FULL_NETWORK_DELAY,
            phase: trial,
            ..Seen::default()
        };
        assert!(matches!(seen.next(1), Phase::All { stays: TRIAL_PERIOD }));
        assert!(matches!(seen.next(100), Phase::One { stays } if stays == TRIAL_PERIOD / 4));
        assert!(
            matches!(seen.next(100), Phase::One { stays } if stays == TRIAL_PERIOD / 2),
            "it has proved itself twice"
        );
        assert!(matches!(seen.next(1), Phase::All { stays } if stays == TRIAL_PERIOD / 2));
    }

    #[test]
    fn a_single_stream_with_a_queue_shows_no_full_network() {
        let spread = Spread::default();
        (1..SAMPLES).for_each(|_| spread.sample(LONG, rate(1)));
        spread.sample(FULL_NETWORK_DELAY / 2, rate(1));
        assert!(!spread.uses_one_stream(), "a stream without a queue");
        assert!(decides(&spread, 1, LONG), "all have one");
    }

    #[test]
    fn nothing_is_decided_without_a_measured_rate() {
        let spread = Spread::default();
        (0..10 * SAMPLES).for_each(|_| spread.sample(LONG, Rate::default()));
        assert!(!spread.uses_one_stream());
    }
}
