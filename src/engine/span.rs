//! A range of memory by its addresses: the memory that a registration covers, or that a request reads or fills.

/// Bytes of memory. The addresses are never dereferenced, only compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    start: usize,
    bytes: usize,
}

impl Span {
    /// `bytes` bytes from `start` on.
    #[inline]
    pub(crate) fn new(start: usize, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// Whether the two have a byte in common.
    pub(crate) fn meets(self, other: Self) -> bool {
        let reaches = |a: Self, b: Self| a.start <= b.start && b.start - a.start < a.bytes;
        self.bytes > 0 && other.bytes > 0 && (reaches(self, other) || reaches(other, self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranges_with_a_common_byte_meet() {
        let meets = |a: (usize, usize), b: (usize, usize)| {
            let (a, b) = (Span::new(a.0, a.1), Span::new(b.0, b.1));
            assert_eq!(a.meets(b), b.meets(a), "{a:?} {b:?}");
            a.meets(b)
        };
        assert!(meets((100, 10), (109, 1)) && meets((100, 10), (90, 11)) && meets((100, 10), (0, 1000)));
        assert!(!meets((100, 10), (110, 5)) && !meets((100, 10), (90, 10)));
        // A range of zero bytes touches nothing, wherever it is; and a range may end with the address space.
        assert!(!meets((100, 0), (0, 1000)) && !meets((0, 0), (0, 0)));
        assert!(meets((usize::MAX - 9, 10), (usize::MAX, 1)) && !meets((usize::MAX - 9, 10), (0, 10)));
    }
}
