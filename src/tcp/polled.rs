//! Messages that a GPU reads while they arrive.
//!
//! With NCCL's LL128 protocol a GPU polls the last eight bytes of each 128 in the receive buffer. Once they are the
//! number of the step, it uses the 120 before them (`prims_ll128.h`, NCCL 2.4 to 2.30). So these must be written first.
//! A kernel that reads a socket into a buffer does not guarantee that. Linux copies with `rep movsb`, whose stores
//! other processors may see out of order (Intel's Software Developer's Manual, volume 3, "Fast-String Operation and
//! Out-of-Order Stores"). On an EPYC of 2024 they did: in memory that was touched for the first time, one line in
//! several hundred showed its flag before its first half. Units of eight bytes stayed whole, so the LL protocol, with
//! units of four bytes of data and four of flag, is not affected there.
//!
//! NCCL does not pass the transport the protocol of a message (2.25 and later hint at it, for some receives). But the
//! message shows it: NCCL's thread sends it once every flag in it is the number of the step. So the sending side checks
//! a few lines of each chunk and marks it ([`POLLED`]) when they look like that. The receiving side reads marked chunks
//! into a buffer of its own and copies them on in order. A tensor whose eight-byte units are small equal numbers is
//! also marked, which costs that copy and nothing else.

use std::cell::RefCell;

use crate::session::frame::{ALIGN, POLLED};
use crate::session::wire::Piece;

/// Lines that are checked. All lines of a message in LL128 have the flag, so no such message is missed. More lines
/// would only rule out more of the other messages.
const LINES: usize = 4;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// [`POLLED`] for a chunk that [`may_be_polled`], otherwise no flag.
///
/// # Safety
/// As [`may_be_polled`].
#[inline]
pub(crate) unsafe fn flag(chunk: Piece) -> u8 {
    // SAFETY: the caller keeps the promise about the chunk.
    if unsafe { may_be_polled(chunk) } { POLLED } else { 0 }
}

/// Whether a chunk may be a part of a message that a GPU reads while it arrives. Never false for such a chunk.
///
/// # Safety
/// The chunk must be readable, and begin at a multiple of [`ALIGN`] bytes from the start of its message.
#[inline]
unsafe fn may_be_polled(chunk: Piece) -> bool {
    let ll128 = chunk.length >= ALIGN as usize && chunk.length.is_multiple_of(ALIGN as usize) && {
        let flag = |line: usize| {
            let end = (line + 1) * ALIGN as usize;
            // SAFETY: the line is a part of the chunk, and its last 8 bytes are the flag.
            unsafe { chunk.data.add(end - size_of::<u64>()).cast::<u64>().read_unaligned() }
        };
        // Flags count the steps of a connection. A million steps each second would take nine years to come to 1 << 48.
        // Of the numbers in tensors, read as eight bytes, only integers are smaller.
        let first = flag(0);
        (1..1 << 48).contains(&first) && (1..LINES.min(chunk.length / ALIGN as usize)).all(|line| flag(line) == first)
    };
    // SAFETY: as above.
    ll128 || !cfg!(target_arch = "x86_64") && unsafe { may_be_ll(chunk) }
}

/// The same for the LL protocol, if a kernel does not guarantee that units of eight bytes stay whole.
///
/// # Safety
/// The chunk must be readable.
unsafe fn may_be_ll(chunk: Piece) -> bool {
    // SAFETY: the eight bytes are a part of the chunk.
    let flag = |word: usize| unsafe { chunk.data.add(word * 8 + 4).cast::<u32>().read_unaligned() };
    let words = chunk.length / 8;
    words > 0 && chunk.length.is_multiple_of(8) && (1..words.min(2 * LINES)).all(|word| flag(word) == flag(0))
}

/// Runs `work` with this thread's buffer for at most `wanted` bytes.
pub(crate) fn with_buffer<T>(wanted: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.is_empty() {
            // Few enough bytes to be still in the processor's cache when they are copied.
            buffer.resize(64 << 10, 0);
        }
        let length = wanted.min(buffer.len());
        work(&mut buffer[..length])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    fn looks_polled(words: &[u64]) -> bool {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        // SAFETY: the bytes are ours, and their start is the message's.
        unsafe { may_be_polled(Piece::of_mut(&mut bytes)) }
    }

    proptest! {
        #[test]
        fn no_chunk_of_ll128_is_missed(step in 1..1_u64 << 47, data in proptest::collection::vec(any::<u64>(), 15), lines in 1..70_usize) {
            let line: Vec<u64> = data.into_iter().chain([step]).collect();
            prop_assert!(looks_polled(&line.repeat(lines)));
        }

        #[test]
        fn no_chunk_of_ll_is_missed(step in any::<u32>(), data in proptest::collection::vec(any::<u32>(), 1..300)) {
            let mut bytes: Vec<u8> = data.iter().flat_map(|data| [data.to_le_bytes(), step.to_le_bytes()].concat()).collect();
            // SAFETY: the bytes are ours.
            let seen = unsafe { may_be_ll(Piece::of_mut(&mut bytes)) };
            prop_assert!(seen);
        }
    }

    #[test]
    fn tensors_are_not_taken_for_flags() {
        assert!(!looks_polled(&[0; 256]), "zeros");
        assert!(!looks_polled(&[1.0_f64.to_bits(); 256]), "ones");
        assert!(
            !looks_polled(&[u64::from(1.0_f32.to_bits()) << 32 | u64::from(1.0_f32.to_bits()); 256]),
            "ones of four bytes"
        );
        assert!(!looks_polled(&(0..256).collect::<Vec<_>>()), "numbers that differ");
        assert!(!looks_polled(&[]) && !looks_polled(&[7; 15]), "less than a line");
    }
}
