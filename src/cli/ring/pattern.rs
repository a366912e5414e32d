//! Input data whose sum over all ranks is known without computing it.
//!
//! Element `i` of rank `r` in iteration `n` is `(r + 1) × base(n, i)`, so it differs by rank, iteration and element.
//! The sum over `N` ranks is `N (N + 1) / 2 × base(n, i)`. Guarantees: every value and every partial sum is a whole
//! number below 2²⁴, so float32 addition is exact in any order.

/// The most ranks for which sums stay exact: 128 × 129 / 2 × 1024 < 2²⁴.
pub(crate) const MOST_RANKS: usize = 128;

/// 1 to 1024, spread by a multiplicative hash so that shifted, swapped or stale data shows.
#[inline(always)]
fn base(iteration: u32, element: u32) -> u32 {
    // Odd constants with well-mixed bits (from the golden ratio, and from a common finalizer).
    let mixed = element.wrapping_mul(0x9E37_79B1).wrapping_add(iteration.wrapping_mul(0x85EB_CA6B));
    1 + (mixed >> 22)
}

/// Fills the input of `rank`.
pub(crate) fn fill(input: &mut [f32], rank: usize, iteration: u32) {
    let factor = rank as i32 + 1;
    for (i, value) in input.iter_mut().enumerate() {
        *value = (base(iteration, i as u32) as i32 * factor) as f32;
    }
}

/// How many elements are not the sum over `ranks` ranks. NaN, with which outputs are filled before, never is.
pub(crate) fn count_wrong(output: &[f32], ranks: usize, iteration: u32) -> usize {
    let factor = (ranks * (ranks + 1) / 2) as i32;
    let is_wrong = |(i, value): (usize, &f32)| u32::from(*value != (base(iteration, i as u32) as i32 * factor) as f32);
    // Blocks keep the counter narrow, so that the loop can use vector registers.
    let blocks = output.chunks(1 << 20).enumerate();
    let count = |(block, values): (usize, &[f32])| -> u32 {
        values.iter().enumerate().map(|(i, value)| is_wrong(((block << 20) + i, value))).sum()
    };
    blocks.map(|block| count(block) as usize).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(ranks: usize, count: usize, iteration: u32) -> Vec<f32> {
        let mut total = vec![0.0; count];
        for rank in 0..ranks {
            let mut input = vec![0.0; count];
            fill(&mut input, rank, iteration);
            total.iter_mut().zip(&input).for_each(|(total, value)| *total += value);
        }
        total
    }

    #[test]
    fn the_sum_is_exact_up_to_the_most_ranks() {
        for ranks in [2, 3, MOST_RANKS] {
            assert_eq!(count_wrong(&sum(ranks, 5000, 9), ranks, 9), 0, "{ranks}");
        }
    }

    #[test]
    fn swapped_stale_and_shifted_data_shows() {
        let good = sum(3, 4096, 1);
        let mut swapped = good.clone();
        swapped.swap(17, 18);
        assert_eq!(count_wrong(&swapped, 3, 1), 2);
        assert!(count_wrong(&good, 3, 2) > 4000, "another iteration's result");
        assert!(count_wrong(&good[32..], 3, 1) > 4000, "shifted by 128 bytes");
        assert_eq!(count_wrong(&[f32::NAN; 10], 3, 1), 10);
        assert_eq!(count_wrong(&sum(2, 64, 1), 3, 1), 64, "one rank is missing");
    }
}
