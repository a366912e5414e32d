//! Buffers that are used again: for copies of short messages, kept for a possible resend, and for messages that came
//! before their receive was posted.
//!
//! A copy has room for the frame header before the bytes, so that both leave in one piece. The shortest come and go
//! with every message: their buffers belong to the connection, in the state whose lock is held whenever one is made or
//! given back ([`Own`]). The others, and those for early messages that are as long, come in six sizes from a store of
//! the process ([`Copies`]). Allocators would give blocks this large back to the system and fault them in again.

use std::sync::{Mutex, OnceLock, PoisonError};

use super::limits::{COPY_FIRST_MAX, EAGER_MAX, EAGER_MAX_FAR};
use crate::engine::schedule::constants::INLINE_MAX;
use crate::session::frame::HEADER;

/// The sizes of a connection's own buffers in bytes. The small size keeps the copies of flags and counters, which come
/// in bursts, close together. Buffers of 1 KiB each would meet in the same few lines of the processor's cache.
const OWN: [usize; 2] = [64 + HEADER, COPY_FIRST_MAX as usize + HEADER];

/// How many unused buffers of each size a connection keeps: as many as one acknowledgement frees while messages follow
/// each other, and 60 KiB at most.
const OWN_SPARE: [usize; 2] = [256, 32];

/// The sizes of stored buffers in bytes.
const CLASSES: [usize; 6] = [
    (4 << 10) + HEADER,
    (16 << 10) + HEADER,
    INLINE_MAX as usize + HEADER,
    EAGER_MAX as usize + HEADER,
    (128 << 10) + HEADER,
    EAGER_MAX_FAR as usize + HEADER,
];

/// How many buffers of each size the process has from its first connection on, less than 1 MiB in all. One connection
/// needs about that many between two acknowledgements, with some on the way. The process allocates and touches them in
/// advance. Otherwise, getting the memory from the system makes the first fifty all-reduces of 8 KiB a tenth slower.
const FIRST: [usize; CLASSES.len()] = [48, 48, 0, 0, 0, 0];

/// A connection's buffers that are not in use, for messages of up to [`COPY_FIRST_MAX`] bytes.
#[derive(Debug, Default)]
pub(crate) struct Own {
    spare: [Vec<Vec<u8>>; OWN.len()],
}

/// Buffers of the process that are not in use, for longer messages.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    spare: Mutex<[Vec<Vec<u8>>; CLASSES.len()]>,
    warm: OnceLock<()>,
}

impl Own {
    /// Room for a header, then the bytes.
    ///
    /// # Safety
    /// `data` must be readable for `length` bytes; it may be null for none.
    #[inline]
    pub(crate) unsafe fn copy(&mut self, data: *const u8, length: usize) -> Vec<u8> {
        let class = usize::from(HEADER + length > OWN[0]);
        let buffer = self.spare[class].pop().unwrap_or_else(|| Vec::with_capacity(OWN[class]));
        // SAFETY: the caller vouches for it.
        unsafe { fill(buffer, data, length) }
    }

    /// Takes back a copy that is no longer needed. Returns the copy when it has none of these sizes.
    #[inline]
    pub(crate) fn give_back(&mut self, copy: Vec<u8>) -> Option<Vec<u8>> {
        let Some(class) = OWN.iter().position(|size| *size == copy.capacity()) else { return Some(copy) };
        if self.spare[class].len() < OWN_SPARE[class] {
            self.spare[class].push(copy);
        }
        None
    }
}

/// The buffers of the process.
pub(crate) static COPIES: Copies =
    Copies { spare: Mutex::new([const { Vec::new() }; CLASSES.len()]), warm: OnceLock::new() };

impl Copies {
    /// Makes the first buffers, once.
    pub(crate) fn warm_up(&self) {
        self.warm.get_or_init(|| {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            for ((spare, size), count) in spare.iter_mut().zip(CLASSES).zip(FIRST) {
                // Not zeroes: an allocator may provide those without touching any memory.
                spare.extend((0..count).map(|_| vec![1; size]));
            }
        });
    }

    /// Room for a header, then the bytes.
    ///
    /// # Safety
    /// `data` must be readable for `length` bytes; it may be null for none.
    pub(crate) unsafe fn copy(&self, data: *const u8, length: usize) -> Vec<u8> {
        // SAFETY: the caller vouches for it.
        unsafe { fill(self.buffer(HEADER + length), data, length) }
    }

    /// Room for a message without a receive yet: at least `length` bytes, with arbitrary contents. The shortest have
    /// blocks of their own, for which an allocator is fast: there may be thousands of them.
    pub(crate) fn stage(&self, length: usize) -> Vec<u8> {
        if length as u64 <= COPY_FIRST_MAX {
            return vec![0; length];
        }
        let mut buffer = self.buffer(length);
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        buffer
    }

    /// A buffer that holds at least `size` bytes.
    fn buffer(&self, size: usize) -> Vec<u8> {
        match CLASSES.iter().position(|class| size <= *class) {
            None => Vec::with_capacity(size),
            Some(class) => {
                let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner)[class].pop();
                spare.unwrap_or_else(|| Vec::with_capacity(CLASSES[class]))
            }
        }
    }

    /// A buffer that is not needed any more.
    pub(crate) fn give_back(&self, buffer: Vec<u8>) {
        let Some(class) = CLASSES.iter().position(|class| *class == buffer.capacity()) else { return };
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        // 10 MiB of each size: buffers of sixteen connections with 32 unacknowledged messages of 8 KiB each (a credit
        // window holds twice as many). With 32 in all, buffers of a burst went back to the system and the next burst
        // faulted them in again.
        if spare[class].len() < (10 << 20) / CLASSES[class] {
            spare[class].push(buffer);
        }
    }
}

/// Fills a buffer: room for a header, where a former one may stand, then the bytes.
///
/// # Safety
/// `data` must be readable for `length` bytes; it may be null for none.
#[inline]
unsafe fn fill(mut buffer: Vec<u8>, data: *const u8, length: usize) -> Vec<u8> {
    buffer.resize(HEADER, 0);
    if length > 0 {
        // SAFETY: the caller vouches for it.
        buffer.extend_from_slice(unsafe { std::slice::from_raw_parts(data, length) });
    }
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::schedule::constants::ACK_EVERY;

    #[test]
    fn a_copy_has_room_for_the_header_and_its_buffer_is_used_again() {
        let (copies, mut own) = (Copies::default(), Own::default());
        for length in [0, 1, 64, 65, 960, 961, 4096, 4097, 65536] {
            let bytes: Vec<u8> = (0..length).map(|i| i as u8).collect();
            let mut addresses = Vec::new();
            for _ in 0..2 {
                // SAFETY: the vector is that long.
                let copy = unsafe {
                    if length as u64 <= COPY_FIRST_MAX {
                        own.copy(bytes.as_ptr(), length)
                    } else {
                        copies.copy(bytes.as_ptr(), length)
                    }
                };
                assert_eq!((copy.len(), &copy[HEADER..]), (HEADER + length, &bytes[..]));
                addresses.push((copy.as_ptr(), copy.capacity()));
                if let Some(copy) = own.give_back(copy) {
                    copies.give_back(copy);
                }
            }
            assert_eq!(addresses[0], addresses[1]);
        }
    }

    #[test]
    fn what_a_burst_has_needed_serves_the_next_one() {
        let copies = Copies::default();
        let payload = vec![7; 8 << 10];
        let burst = || {
            // SAFETY: the vector is that long.
            let taken: Vec<_> =
                (0..16 * ACK_EVERY).map(|_| unsafe { copies.copy(payload.as_ptr(), payload.len()) }).collect();
            let mut addresses: Vec<_> = taken.iter().map(|copy| copy.as_ptr()).collect();
            addresses.sort_unstable();
            taken.into_iter().for_each(|copy| copies.give_back(copy));
            addresses
        };
        let (first, kept) = (burst(), copies.spare.lock().unwrap()[1].len());
        assert_eq!(kept, first.len(), "none was given away");
        assert_eq!(burst(), first);
    }

    #[test]
    fn the_first_messages_find_memory() {
        let copies = Copies::default();
        let spare = || copies.spare.lock().unwrap().each_ref().map(Vec::len);
        copies.warm_up();
        assert_eq!(spare(), FIRST);
        let buffers: Vec<_> = (0..ACK_EVERY).map(|_| copies.stage(8 << 10)).collect();
        assert!(buffers.iter().all(|buffer| buffer.capacity() == CLASSES[1]) && spare()[1] < FIRST[1]);
        copies.warm_up();
        assert_eq!(spare()[1], FIRST[1] - buffers.len(), "once");
    }

    #[test]
    fn room_for_early_messages_is_used_again_too() {
        let copies = Copies::default();
        let staged = |length| {
            let buffer = copies.stage(length);
            assert!(buffer.len() >= length);
            let address = (buffer.as_ptr(), buffer.capacity());
            copies.give_back(buffer);
            address
        };
        for length in [961, 8 << 10, 64 << 10, 128 << 10, 512 << 10] {
            assert_eq!(staged(length), staged(length / 2 + 512));
        }
        assert_eq!(staged(960).1, 960);
        assert_eq!(staged(0).1, 0);
    }

    #[test]
    fn a_connection_keeps_few_buffers() {
        let mut own = Own::default();
        let payload = [7; 8];
        // SAFETY: the array is that long.
        let copies: Vec<_> =
            (0..3 * OWN_SPARE[0]).map(|_| unsafe { own.copy(payload.as_ptr(), payload.len()) }).collect();
        assert!(copies.into_iter().all(|copy| own.give_back(copy).is_none()));
        assert_eq!(own.spare.each_ref().map(Vec::len), [OWN_SPARE[0], 0]);
    }
}
