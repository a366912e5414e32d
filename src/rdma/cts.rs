//! Clear-to-send (CTS) entries: what a receiver writes into its sender's memory for each part
//! of a posted receive.
//!
//! | bytes | field |
//! |---|---|
//! | 0–7 | address of the buffer |
//! | 8–13 | its size in bytes; the highest bit: more parts of its group follow |
//! | 14–15 | eager messages that the receiver has handed on, modulo 65,536 ([`eager`](super::eager)) |
//! | 16–47 | its remote keys, one for each of up to 8 devices of the receiver |
//! | 48–51 | NCCL's tag |
//! | 52 | the receiver's slot, which every immediate names |
//! | 53 | which use of the slot this is, modulo 256 |
//! | 54–55 | which receive with this tag it is, counted from 0, modulo 65,536 |
//! | 56–59 | number of the CTS entry, counted through all CTS entries of the connection |
//! | 60–63 | check over bytes 0–59 |
//!
//! Little-endian; 64 bytes, so that a CTS entry fits one cache line and one inline write.
//!
//! CTS entries are in a [`Ring`] of [`CTS_ENTRIES`] slots; CTS entry n is in slot n modulo [`CTS_ENTRIES`]. The device
//! writes a CTS entry's bytes in no guaranteed order, so a CTS entry is accepted only when number and check match. An
//! incomplete CTS entry, or the previous one of that slot, does not match. Behind the CTS entries there is one more
//! slot, for the receiver's count of eager messages when no CTS entry carries it.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::adapter::MAX_DEVICES;
use super::eager::CompressedHeader;
use super::pages::{Pages, Zeroed};
use crate::engine::request::SLOTS;
use crate::os::error::Result;

/// Bytes of a CTS entry.
pub(crate) const CTS_BYTES: usize = 64;

/// CTS entries of a ring: one for each part of every receive that can be outstanding.
pub(crate) const CTS_ENTRIES: usize = SLOTS;

/// Beside the size: the CTS entry is not the last part of its group.
const HAS_MORE: u64 = 1 << 47;

/// A part of a posted receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CtsEntry {
    /// The address of the buffer on the receiver.
    pub address: u64,
    /// How many bytes fit, less than 2^47.
    pub size: u64,
    /// It is not the last part of its group.
    pub has_more: bool,
    /// Eager messages that the receiver has handed on.
    pub handed_on: u16,
    /// The keys of the buffer's region, by the receiver's devices.
    pub keys: [u32; MAX_DEVICES],
    /// NCCL's tag.
    pub tag: i32,
    /// The receiver's slot.
    pub slot: u8,
    /// Which use of the slot.
    pub generation: u8,
    /// Which receive with this tag it is.
    pub order: u16,
    /// Which CTS entry of the connection it is, counted from 1.
    pub number: u32,
}

impl CtsEntry {
    /// The bytes of this entry.
    pub(crate) fn encode(&self) -> [u8; CTS_BYTES] {
        let mut out = [0; CTS_BYTES];
        out[..8].copy_from_slice(&self.address.to_le_bytes());
        let size = self.size | if self.has_more { HAS_MORE } else { 0 };
        out[8..14].copy_from_slice(&size.to_le_bytes()[..6]);
        out[14..16].copy_from_slice(&self.handed_on.to_le_bytes());
        for (place, key) in out[16..48].chunks_exact_mut(4).zip(self.keys) {
            place.copy_from_slice(&key.to_le_bytes());
        }
        out[48..52].copy_from_slice(&self.tag.to_le_bytes());
        out[52] = self.slot;
        out[53] = self.generation;
        out[54..56].copy_from_slice(&self.order.to_le_bytes());
        out[56..60].copy_from_slice(&self.number.to_le_bytes());
        let check = check(&out);
        out[60..].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Reads CTS entry `number`; none when the bytes are another CTS entry's or not complete.
    pub(crate) fn decode(bytes: &[u8; CTS_BYTES], number: u32) -> Option<Self> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if u32_at(56) != number || u32_at(60) != check(bytes) {
            return None;
        }
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let mut keys = [0; MAX_DEVICES];
        for (index, key) in keys.iter_mut().enumerate() {
            *key = u32_at(16 + 4 * index);
        }
        Some(Self {
            address: u64_at(0),
            size: u64_at(8) & (HAS_MORE - 1),
            has_more: u64_at(8) & HAS_MORE != 0,
            handed_on: (u32_at(12) >> 16) as u16,
            keys,
            tag: u32_at(48).cast_signed(),
            slot: bytes[52],
            generation: bytes[53],
            order: u16::from_le_bytes([bytes[54], bytes[55]]),
            number,
        })
    }
}

/// A number that depends on every bit of bytes 0–59: a torn CTS entry matches with a probability of one in four
/// billion.
fn check(bytes: &[u8; CTS_BYTES]) -> u32 {
    let mut sum = 0x9e37_79b9_7f4a_7c15_u64;
    for (index, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
        let mut word = u64::from_le_bytes(*word);
        if index == 7 {
            word &= 0xffff_ffff;
        }
        // The multiplier is odd, so no bit is lost; the rotation brings high bits down.
        sum = (sum ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
    }
    (sum ^ sum >> 32) as u32
}

/// The memory that the peer writes CTS entries into.
pub(crate) struct Ring(Pages<RingSlot>);

/// One slot of a ring.
#[repr(align(64))]
pub(super) struct RingSlot(UnsafeCell<[u8; CTS_BYTES]>);

// SAFETY: the slots are read by volatile and atomic loads only; only devices write them.
unsafe impl Sync for RingSlot {}
// SAFETY: bytes.
unsafe impl Zeroed for RingSlot {}

impl Ring {
    /// A ring without CTS entries: no CTS entry has number 0.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(Pages::zeroed(CTS_ENTRIES + 1)?))
    }

    /// Its memory.
    pub(super) fn pages(&self) -> &Pages<RingSlot> {
        &self.0
    }

    /// The ring's start address.
    pub(crate) fn address(&self) -> u64 {
        self.0.address()
    }

    /// The receiver's count of eager messages, if it has arrived complete.
    #[inline]
    pub(crate) fn credit(&self) -> Option<u32> {
        let slot = self.0[CTS_ENTRIES].0.get();
        // SAFETY: inside the slot, aligned to 8 since slots are aligned to 64.
        let bits = unsafe { AtomicU64::from_ptr(slot.cast()) }.load(Ordering::Acquire);
        decode_credit(u64::from_le(bits))
    }

    /// Whether CTS entry `number` seems to have arrived: it may still be incomplete.
    #[inline(always)]
    pub(crate) fn has(&self, number: u32) -> bool {
        let slot = self.0[number as usize % CTS_ENTRIES].0.get();
        // SAFETY: inside the slot, aligned to 4 since slots are aligned to 64.
        let stamp = unsafe { AtomicU32::from_ptr(slot.cast::<u32>().add(14)) };
        stamp.load(Ordering::Acquire) == number.to_le()
    }

    /// CTS entry `number`, if it has arrived.
    #[inline]
    pub(crate) fn read(&self, number: u32) -> Option<CtsEntry> {
        if !self.has(number) {
            return None;
        }
        let slot = self.0[number as usize % CTS_ENTRIES].0.get();
        // SAFETY: the slot is readable, aligned to 64, and exists as long as this. A device may write at the same time:
        // hence the read is volatile, and `decode` detects an incomplete CTS entry. Read in 8-byte units: single bytes
        // would be slow.
        let words: [u64; CTS_BYTES / 8] =
            std::array::from_fn(|at| unsafe { slot.cast::<u64>().add(at).read_volatile() });
        let bytes = words.map(u64::to_ne_bytes);
        CtsEntry::decode(bytes.as_flattened().try_into().ok()?, number)
    }
}

/// A number and its complement: half of one with half of another is detected.
pub(crate) fn encode_credit(number: u32) -> u64 {
    u64::from(number) | u64::from(!number) << 32
}

/// The number, if it is complete.
fn decode_credit(bits: u64) -> Option<u32> {
    let number = bits as u32;
    ((bits >> 32) as u32 == !number).then_some(number)
}

/// The content of the immediate of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Immediate {
    /// The receiver's slot; of an eager message the slot of the inbox.
    pub slot: u8,
    /// Which use of the slot; of an eager message [`CompressedHeader::steps`].
    pub generation: u8,
    /// How many immediates the message has: one from each queue pair that carries a share of it, 1 to 128. Of an eager
    /// message [`CompressedHeader::cts_entries`].
    pub shares: u8,
    /// The message's size is in the receiver's table of sizes, where one of its immediates has brought it; else it is
    /// the sum of the writes' lengths.
    pub is_reported: bool,
    /// It is in a slot of the receiver's [`Inbox`](super::eager::Inbox).
    pub is_eager: bool,
    /// It answers several CTS entries: as many as `shares`, up to the slot's own one, each filled to its size.
    pub is_run: bool,
}

impl Immediate {
    /// That of an eager message.
    #[inline]
    pub(crate) fn eager(slot: u8, compressed: CompressedHeader) -> Self {
        Self {
            slot,
            generation: compressed.steps,
            shares: compressed.cts_entries,
            is_reported: false,
            is_eager: true,
            is_run: false,
        }
    }

    /// The content for an eager message.
    #[inline]
    pub(crate) fn compressed(self) -> CompressedHeader {
        CompressedHeader { steps: self.generation, cts_entries: self.shares }
    }

    /// The 32 bits.
    pub(crate) fn encode(self) -> u32 {
        u32::from(self.slot)
            | u32::from(self.generation) << 8
            | u32::from(self.shares) << 16
            | u32::from(self.is_reported) << 24
            | u32::from(self.is_eager) << 25
            | u32::from(self.is_run) << 26
    }

    /// Reads 32 bits.
    pub(crate) fn decode(bits: u32) -> Self {
        let [slot, generation, shares, flags] = bits.to_le_bytes();
        let has = |bit: u8| flags & bit != 0;
        Self { slot, generation, shares, is_reported: has(1), is_eager: has(2), is_run: has(4) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cts_entries() -> impl Strategy<Value = CtsEntry> {
        (any::<(u64, u64, i32, u8, u8, u16, u16)>(), any::<[u32; 8]>(), 1_u32..).prop_map(
            |((address, size, tag, slot, generation, order, handed_on), keys, number)| CtsEntry {
                address,
                size: size >> 17,
                has_more: size & 1 != 0,
                handed_on,
                keys,
                tag,
                slot,
                generation,
                order,
                number,
            },
        )
    }

    proptest! {
        #[test]
        fn a_cts_entry_survives_and_only_whole_and_as_itself(old in cts_entries(), new in cts_entries(), cut in 1..64_usize) {
            let number = new.number;
            let bytes = new.encode();
            prop_assert_eq!(CtsEntry::decode(&bytes, number), Some(new));
            prop_assert_eq!(CtsEntry::decode(&bytes, number.wrapping_add(CTS_ENTRIES as u32)), None);
            // Half of it over the CTS entry that stood there before, from either end.
            let before = CtsEntry { number: number.wrapping_sub(CTS_ENTRIES as u32), ..old }.encode();
            for (head, tail) in [(&bytes, &before), (&before, &bytes)] {
                let mut torn = [0; CTS_BYTES];
                torn[..cut].copy_from_slice(&head[..cut]);
                torn[cut..].copy_from_slice(&tail[cut..]);
                if torn != bytes {
                    prop_assert_eq!(CtsEntry::decode(&torn, number), None);
                }
            }
        }

        #[test]
        fn an_immediate_survives(slot: u8, generation: u8, shares: u8, flags in 0..8_u8) {
            let [is_reported, is_eager, is_run] = [1, 2, 4].map(|bit| flags & bit != 0);
            let immediate = Immediate { slot, generation, shares, is_reported, is_eager, is_run };
            prop_assert_eq!(Immediate::decode(immediate.encode()), immediate);
        }
    }

    #[test]
    fn every_bit_of_a_cts_entry_is_checked() {
        let cts = CtsEntry {
            address: 1 << 40,
            size: 77,
            has_more: true,
            handed_on: 12,
            keys: [5; 8],
            tag: -1,
            slot: 3,
            generation: 9,
            order: 5,
            number: 4711,
        };
        let bytes = cts.encode();
        for bit in 0..CTS_BYTES * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(CtsEntry::decode(&changed, 4711), None, "bit {bit}");
        }
    }

    #[test]
    fn a_ring_gives_a_cts_entry_when_it_has_come() {
        let ring = Ring::new().expect("memory");
        let (tag, handed_on, order) = (2, 0, 0);
        let (slot, generation, number) = (0, 0, 1);
        let cts = CtsEntry {
            address: 8,
            size: 9,
            has_more: false,
            handed_on,
            keys: [0; 8],
            tag,
            slot,
            generation,
            order,
            number,
        };
        assert_eq!(ring.read(1), None);
        for number in [1, 1 + CTS_ENTRIES as u32] {
            let cts = CtsEntry { number, ..cts };
            // SAFETY: the slot of both numbers, and no other thread uses the ring.
            unsafe { *ring.0[1].0.get() = cts.encode() };
            assert_eq!(ring.read(number), Some(cts));
            assert_eq!(ring.read(number + CTS_ENTRIES as u32), None);
        }
    }

    #[test]
    fn a_word_is_believed_when_it_is_whole() {
        let ring = Ring::new().expect("memory");
        assert_eq!(ring.credit(), None);
        for number in [0, 1, 77, u32::MAX] {
            // SAFETY: the last slot, and no other thread uses the ring.
            unsafe { *ring.0[CTS_ENTRIES].0.get().cast::<u64>() = encode_credit(number).to_le() };
            assert_eq!(ring.credit(), Some(number));
        }
        let torn = encode_credit(5) & 0xffff_ffff | encode_credit(6) & !0xffff_ffff;
        assert_eq!(decode_credit(torn), None);
    }
}
