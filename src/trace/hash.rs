//! Maps with keys that no attacker chooses: Towline's own numbers, and a few strings of NCCL's.
//!
//! The writer looks something up several times for each record, so the standard library's hash, which defends against
//! chosen keys, was a good part of its work.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map with a quick hash.
pub(super) type QuickMap<K, V> = HashMap<K, V, BuildHasherDefault<Quick>>;

/// 2⁶⁴ divided by the golden ratio: its multiples spread evenly.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes one 8-byte unit at a time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Quick(u64);

impl Quick {
    fn mix(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(SPREAD);
    }
}

impl Hasher for Quick {
    fn write(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.mix(u64::from_le_bytes(word.try_into().expect("eight bytes")));
        }
        let mut rest = [0; 8];
        rest[..words.remainder().len()].copy_from_slice(words.remainder());
        self.mix(u64::from_le_bytes(rest));
    }

    fn write_u8(&mut self, number: u8) {
        self.mix(number.into());
    }

    fn write_u32(&mut self, number: u32) {
        self.mix(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.mix(number);
    }

    fn write_usize(&mut self, number: usize) {
        self.mix(number as u64);
    }

    /// The map takes its place from the low bits and its mark from the high ones; the product's high bits are the good
    /// ones.
    fn finish(&self) -> u64 {
        (self.0 ^ self.0 >> 32).wrapping_mul(SPREAD).rotate_left(26)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::Hash;

    fn low_bits<T: Hash>(key: T) -> u64 {
        let mut hasher = Quick::default();
        key.hash(&mut hasher);
        hasher.finish() & 0xffff
    }

    #[test]
    fn keys_that_follow_one_another_are_spread_over_the_table() {
        // What a perfect hash would give 4096 keys in 65536 places is some 3970 different ones.
        for shift in [0, 4, 12, 42] {
            let places: HashSet<u64> = (0..4096u64).map(|key| low_bits(7 << 60 | key << shift)).collect();
            assert!(places.len() > 3000, "{} places at shift {shift}", places.len());
        }
        let places: HashSet<u64> = (0..4096).map(|number| low_bits(format!("step {number}"))).collect();
        assert!(places.len() > 3000, "{} places for words", places.len());
    }
}
