//! The check of a frame header: CRC-32C of its first 44 bytes.
//!
//! A header is five words of eight bytes and one of four, so a processor with the instruction (SSE 4.2) executes it six
//! times. The crate, which handles any length and alignment, takes about ten times as many instructions. Other
//! processors use the crate, and the tests compare with it.

/// CRC-32C of five words and a half one, in the order in which they travel: little-endian.
#[inline]
pub(crate) fn check(words: &[u64; 5], last: u32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instruction.
        return unsafe { by_instruction(words, last) };
    }
    by_crate(words, last)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn by_instruction(words: &[u64; 5], last: u32) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u32, _mm_crc32_u64};
    let crc = words.iter().fold(u64::from(u32::MAX), |crc, word| _mm_crc32_u64(crc, *word));
    !_mm_crc32_u32(crc as u32, last)
}

fn by_crate(words: &[u64; 5], last: u32) -> u32 {
    let crc = words.iter().fold(0, |crc, word| crc32c::crc32c_append(crc, &word.to_le_bytes()));
    crc32c::crc32c_append(crc, &last.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_ways_give_the_crc_of_the_bytes(bytes in proptest::collection::vec(any::<u8>(), 44)) {
            let words = std::array::from_fn(|k| u64::from_le_bytes(bytes[8 * k..8 * k + 8].try_into().unwrap()));
            let last = u32::from_le_bytes(bytes[40..].try_into().unwrap());
            let expected = crc32c::crc32c(&bytes);
            prop_assert_eq!(check(&words, last), expected);
            prop_assert_eq!(by_crate(&words, last), expected);
        }
    }
}
