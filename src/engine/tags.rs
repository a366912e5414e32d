//! Numbers messages and receives per tag.

/// Counts per tag: the k-th send with a tag fills the k-th receive with it.
///
/// NCCL uses one tag per connection, or as many as there are ranks behind one NIC (PXN), and mostly the same one many
/// times in a row. So this is a short sorted list, and the last hit is tried first.
#[derive(Debug, Default)]
pub(crate) struct TagOrders {
    entries: Vec<(i32, u64)>,
    last: usize,
}

impl TagOrders {
    /// The number of the next message with `tag`, and counts it.
    #[inline]
    pub(crate) fn next(&mut self, tag: i32) -> u64 {
        let at = self.position(tag);
        let order = self.entries[at].1;
        self.entries[at].1 += 1;
        order
    }

    /// The number that the next message with `tag` will get.
    pub(crate) fn peek(&self, tag: i32) -> u64 {
        self.entries.binary_search_by_key(&tag, |entry| entry.0).map_or(0, |at| self.entries[at].1)
    }

    #[inline]
    fn position(&mut self, tag: i32) -> usize {
        // Groups use the tags in turn.
        for at in [self.last, self.last + 1] {
            if self.entries.get(at).is_some_and(|entry| entry.0 == tag) {
                self.last = at;
                return at;
            }
        }
        self.search(tag)
    }

    #[cold]
    fn search(&mut self, tag: i32) -> usize {
        self.last = self.entries.binary_search_by_key(&tag, |entry| entry.0).unwrap_or_else(|at| {
            self.entries.insert(at, (tag, 0));
            at
        });
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tag_counts_for_itself() {
        let mut orders = TagOrders::default();
        let seen: Vec<u64> = [5, 5, -1, 5, -1, 7].map(|tag| orders.next(tag)).to_vec();
        assert_eq!(seen, [0, 1, 0, 2, 1, 0]);
        assert_eq!((orders.peek(5), orders.peek(-1), orders.peek(8)), (3, 2, 0));
    }
}
