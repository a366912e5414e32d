//! Copies of short messages, kept for a possible resend: their buffers, which are used again.
//!
//! A copy has room for the frame header before the bytes, so that both leave in one piece. The allocator is good at the
//! smallest; the others come in three sizes from a store of the process, since allocators give blocks this large back to
//! the system and fault them in again.

use std::sync::{Mutex, PoisonError};

use super::frame::HEADER;
use super::limits::{COPY_FIRST_MAX, REPLAY_MAX};

/// The sizes of stored buffers in bytes.
const CLASSES: [usize; 3] = [(4 << 10) + HEADER, (16 << 10) + HEADER, REPLAY_MAX as usize + HEADER];

/// How many unused buffers of each size the process keeps: at most 2.7 MiB.
const SPARE: usize = 32;

/// Buffers that are not in use.
#[derive(Debug, Default)]
pub struct Copies {
    spare: Mutex<[Vec<Vec<u8>>; CLASSES.len()]>,
}

impl Copies {
    /// Room for a header, then the bytes.
    ///
    /// # Safety
    /// `data` must be readable for `length` bytes; it may be null for none.
    pub unsafe fn copy(&self, data: *const u8, length: usize) -> Vec<u8> {
        let mut copy = self.buffer(HEADER + length);
        copy.extend_from_slice(&[0; HEADER]);
        if length > 0 {
            // SAFETY: the caller vouches for it.
            copy.extend_from_slice(unsafe { std::slice::from_raw_parts(data, length) });
        }
        copy
    }

    /// An empty buffer that holds at least `size` bytes.
    fn buffer(&self, size: usize) -> Vec<u8> {
        let class = CLASSES.iter().position(|class| size <= *class);
        match class.filter(|_| size > COPY_FIRST_MAX as usize + HEADER) {
            None => Vec::with_capacity(size),
            Some(class) => {
                let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner)[class].pop();
                spare.unwrap_or_else(|| Vec::with_capacity(CLASSES[class]))
            }
        }
    }

    /// A copy that is not needed any more.
    pub fn give_back(&self, mut copy: Vec<u8>) {
        let Some(class) = CLASSES.iter().position(|class| *class == copy.capacity()) else { return };
        copy.clear();
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare[class].len() < SPARE {
            spare[class].push(copy);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_room_for_the_header_and_its_buffer_is_used_again() {
        let copies = Copies::default();
        for length in [0, 1, 960, 961, 4096, 4097, 65536] {
            let bytes: Vec<u8> = (0..length).map(|i| i as u8).collect();
            // SAFETY: the vector is that long.
            let copy = unsafe { copies.copy(bytes.as_ptr(), length) };
            assert_eq!((copy.len(), &copy[HEADER..]), (HEADER + length, &bytes[..]));
            let (address, capacity) = (copy.as_ptr(), copy.capacity());
            copies.give_back(copy);
            if length > 960 {
                let again = copies.buffer(HEADER + length);
                assert_eq!((again.as_ptr(), again.capacity(), again.len()), (address, capacity, 0));
                copies.give_back(again);
            }
        }
    }
}
