//! The pattern that verifies messages.

/// A byte that depends on the message's number and the place in it.
#[inline(always)]
fn byte(message: usize, place: usize) -> u8 {
    let mixed = (place as u32).wrapping_mul(0x9E37_79B1).wrapping_add((message as u32 + 1).wrapping_mul(0x85EB_CA6B));
    (mixed >> 24) as u8
}

/// Fills the parts of `memory` for a job of `count` messages.
pub(super) fn fill(memory: &mut [u8], size: usize, count: usize) {
    for (message, part) in memory.chunks_mut(size.max(1)).take(count).enumerate() {
        part.iter_mut().enumerate().for_each(|(place, to)| *to = byte(message, place));
    }
}

/// How many bytes of these messages are wrong.
pub(super) fn count_wrong(memory: &[u8], size: usize, count: usize) -> usize {
    let wrong = |(message, part): (usize, &[u8])| {
        part.iter().enumerate().filter(|&(place, &found)| found != byte(message, place)).count()
    };
    memory.chunks(size.max(1)).take(if size == 0 { 0 } else { count }).enumerate().map(wrong).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swapped_messages_and_untouched_memory_are_wrong() {
        let mut memory = vec![0; 3000];
        fill(&mut memory, 1000, 3);
        assert_eq!(count_wrong(&memory, 1000, 3), 0);
        assert_eq!(count_wrong(&memory, 0, 3), 0);
        memory[..2000].rotate_left(1000);
        assert!(count_wrong(&memory, 1000, 3) > 1900);
        assert!(count_wrong(&[0; 1000], 1000, 1) > 900);
    }
}
