//! What messages contain: each has a serial number of its own, which decides every byte.

use std::sync::LazyLock;

use super::memory::MOST;

const SHIFTS: usize = 4093;
/// What a receive's memory holds before anything arrives.
static EMPTY: [u8; MOST] = [0xEE; MOST];

static TABLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut roll = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..(MOST + SHIFTS).div_ceil(8)).flat_map(|_| roll()).collect()
});

/// The bytes behind the first eight.
fn body(serial: u64, len: usize) -> &'static [u8] {
    let shift = (serial.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize % SHIFTS;
    &TABLE[shift..shift + len]
}

/// Writes the message with this serial number.
pub fn write(serial: u64, message: &mut [u8]) {
    message.copy_from_slice(body(serial, message.len()));
    if let Some(head) = message.first_chunk_mut() {
        *head = serial.to_le_bytes();
    }
}

/// Empties a receive's memory.
pub fn clear(memory: &mut [u8]) {
    memory.copy_from_slice(&EMPTY[..memory.len()]);
}

/// The message must be the one with this number, and nothing may lie behind it.
pub fn check(serial: u64, memory: &[u8], len: usize) {
    let (message, behind) = memory.split_at(len);
    match message.split_first_chunk() {
        Some((head, rest)) => {
            assert_eq!(u64::from_le_bytes(*head), serial, "another message arrived");
            assert!(*rest == body(serial, len)[8..], "wrong bytes");
        }
        None => assert!(message == body(serial, len), "wrong bytes"),
    }
    assert!(*behind == EMPTY[..behind.len()], "bytes beyond the message");
}
