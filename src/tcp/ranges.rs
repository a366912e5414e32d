//! Which bytes of a message have been seen: each may arrive once.

use smallvec::SmallVec;

/// A set of bytes, as ranges that are sorted and neither overlap nor touch. A stream carries its chunks in ascending
/// order, so there are about as many ranges as streams. For the streams of a connection over one rail nothing is
/// allocated.
#[derive(Debug, Default)]
pub(crate) struct Ranges(SmallVec<[(u64, u64); 4]>);

impl Ranges {
    /// Adds the bytes from `start` to `end`. Returns false and changes nothing when the range is empty or one of its
    /// bytes is in the set.
    #[must_use]
    pub(crate) fn add(&mut self, start: u64, end: u64) -> bool {
        let at = self.0.partition_point(|range| range.1 < start);
        // `at` is the first range that touches the new one or lies behind it.
        let overlaps = |range: &(u64, u64)| range.0 < end && start < range.1;
        if start >= end || self.0[at..].iter().take(2).any(overlaps) {
            return false;
        }
        let touches_before = self.0.get(at).is_some_and(|range| range.1 == start);
        let behind = at + usize::from(touches_before);
        let touches_behind = self.0.get(behind).is_some_and(|range| range.0 == end);
        match (touches_before, touches_behind) {
            (true, true) => {
                self.0[at].1 = self.0[behind].1;
                self.0.remove(behind);
            }
            (true, false) => self.0[at].1 = end,
            (false, true) => self.0[at].0 = start,
            (false, false) => self.0.insert(at, (start, end)),
        }
        true
    }

    /// Takes out bytes that were added together: a chunk that will arrive again.
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        let at = self.0.partition_point(|range| range.1 <= start);
        let Some(range) = self.0.get_mut(at).filter(|range| range.0 <= start && end <= range.1) else { return };
        let rest = (end, range.1);
        range.1 = start;
        let empty = range.0 == range.1;
        if rest.0 < rest.1 {
            self.0.insert(at + 1, rest);
        }
        if empty {
            self.0.remove(at);
        }
    }

    /// How many ranges there are.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether no byte is in the set.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares with the simplest implementation of a set.
        #[test]
        fn each_byte_is_taken_once_until_it_is_given_back(
            steps in proptest::collection::vec((any::<bool>(), 0..40_u64, 0..12_u64), 0..60)
        ) {
            let mut ranges = Ranges::default();
            let mut bytes = [false; 64];
            let mut added = Vec::new();
            for (add, start, length) in steps {
                if add {
                    let window = &mut bytes[start as usize..(start + length) as usize];
                    let free = length > 0 && window.iter().all(|taken| !taken);
                    prop_assert_eq!(ranges.add(start, start + length), free);
                    if free {
                        window.fill(true);
                        added.push((start, start + length));
                    }
                } else if !added.is_empty() {
                    let (start, end) = added.swap_remove(start as usize % added.len());
                    ranges.remove(start, end);
                    bytes[start as usize..end as usize].fill(false);
                }
                prop_assert_eq!(ranges.is_empty(), bytes.iter().all(|taken| !taken));
                prop_assert!(ranges.0.windows(2).all(|pair| pair[0].1 < pair[1].0), "{:?}", ranges);
            }
        }
    }
}
