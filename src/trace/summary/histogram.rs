//! Durations in few bytes: counts per size class, sixteen classes to each doubling, so that a percentile is right to
//! within about four per cent, whatever the range.

/// Classes to a doubling.
const STEPS: u64 = 16;

/// Counts of durations.
#[derive(Debug, Clone, Default)]
pub(crate) struct Histogram {
    counts: Vec<u32>,
    total: u64,
    sum: u64,
    largest: u64,
}

impl Histogram {
    /// Counts one duration.
    pub(crate) fn add(&mut self, ns: u64) {
        let class = class(ns);
        if self.counts.len() <= class {
            self.counts.resize(class + 1, 0);
        }
        self.counts[class] = self.counts[class].saturating_add(1);
        self.total += 1;
        self.sum = self.sum.saturating_add(ns);
        self.largest = self.largest.max(ns);
    }

    /// Adds another's counts.
    pub(crate) fn merge(&mut self, other: &Histogram) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        self.total += other.total;
        self.sum = self.sum.saturating_add(other.sum);
        self.largest = self.largest.max(other.largest);
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        self.total
    }

    /// All of them together.
    pub(crate) fn sum(&self) -> u64 {
        self.sum
    }

    /// How many are not longer, to within about four per cent of the duration.
    pub(crate) fn below(&self, ns: u64) -> u64 {
        self.counts.iter().take(class(ns) + 1).map(|&count| u64::from(count)).sum()
    }

    /// The duration below which the given share (0 to 1) of all lies; 0 when there are none.
    pub(crate) fn percentile(&self, share: f64) -> u64 {
        let rank = (share * self.total as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (class, &count) in self.counts.iter().enumerate() {
            seen += u64::from(count);
            if seen >= rank {
                return middle(class).min(self.largest);
            }
        }
        self.largest
    }
}

/// The first 32 classes hold one number each, the following ones a sixteenth of a doubling.
fn class(ns: u64) -> usize {
    if ns < 2 * STEPS {
        return ns as usize;
    }
    let doublings = u64::from(ns.ilog2()) - u64::from(STEPS.ilog2());
    (doublings * STEPS + (ns >> doublings)) as usize
}

fn middle(class: usize) -> u64 {
    let class = class as u64;
    if class < 2 * STEPS {
        return class;
    }
    let doublings = class / STEPS - 1;
    let low = (class - doublings * STEPS) << doublings;
    low + (1 << doublings) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_gapless_and_ordered() {
        assert!((0..100_000).all(|ns| (0..=1).contains(&(class(ns + 1) - class(ns)))));
        for ns in (0..100_000).chain((1..60).map(|bit| (1 << bit) + 1)) {
            let near = middle(class(ns)) as f64;
            assert!((near - ns as f64).abs() <= ns as f64 * 0.04 + 1.0, "{ns} is told as {near}");
        }
    }

    #[test]
    fn percentiles_are_near_the_truth() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|i| histogram.add(i * 1000));
        for (share, truth) in [(0.5, 500_000.0), (0.95, 950_000.0), (0.99, 990_000.0)] {
            let told = histogram.percentile(share) as f64;
            assert!((told - truth).abs() / truth < 0.05, "{share}: {told}");
        }
        let below = [0, 500_000, 10_000_000].map(|ns| histogram.below(ns));
        assert!(below[0] == 0 && below[1].abs_diff(500) < 25 && below[2] == 1000, "{below:?}");
        let mut doubled = histogram.clone();
        doubled.merge(&histogram);
        assert_eq!((doubled.count(), doubled.percentile(0.5)), (2000, histogram.percentile(0.5)));
        assert_eq!(Histogram::default().percentile(0.5), 0);
    }
}
