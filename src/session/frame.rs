//! The frame header: 48 bytes that precede everything on a stream after the handshake.
//!
//! | bytes | field | meaning |
//! |---|---|---|
//! | 0 | type | [`Type`] |
//! | 1 | flags | [`EAGER`], [`PROMPT`], [`WHOLE`], [`POLLED`] |
//! | 2–3 | epoch | of chunks and acknowledgements: epoch of the stream, counted from 0; another one fails the connection |
//! | 4–7 | length | payload bytes that follow |
//! | 8–15 | message | number of the message in posting order |
//! | 16–23 | order | number of the message among those with its tag: the k-th send fills the k-th receive |
//! | 24–31 | offset | where the payload belongs in the message |
//! | 32–39 | total | size of the whole message |
//! | 40–43 | tag | NCCL's tag |
//! | 44–47 | check | CRC-32C of bytes 0–43 |
//!
//! Little-endian. The meaning of the fields in frames other than [`Type::Data`] is given at their types. The check is
//! always on: a corrupted header would place bytes wrongly.

use super::check::check;
use crate::os::error::{Error, Result};

/// Streams of one connection, at most.
pub(crate) const MAX_STREAMS: usize = 16;

/// Bytes of a header.
pub const HEADER: usize = 48;

/// Chunk boundaries are multiples of this many bytes from the start of the message. With the LL128 protocol the GPU
/// polls flags in the last 8 of every 128 bytes while the buffer is being filled (NCCL 2.4 and later).
pub(crate) const ALIGN: u64 = 128;

/// The longest payload of a control frame in bytes (the text of [`Type::Fail`]).
pub(crate) const MAX_CONTROL: u32 = 1024;

/// Flag: the payload was sent without the receiver's clear-to-send and used credit.
pub const EAGER: u8 = 1;
/// Flag: acknowledge the chunk at once. A request waits for that, or the stream's window or the credit runs low, or the
/// stream has carried 512 KiB since the last chunk with this flag, or the chunk is a resend.
pub(crate) const PROMPT: u8 = 2;
/// Flag: a request waits for the message that this chunk is part of: when it is complete, acknowledge what arrived on
/// all streams.
pub(crate) const WHOLE: u8 = 4;
/// Flag: a GPU may read the chunk while it arrives, so its bytes must appear in ascending order.
pub(crate) const POLLED: u8 = 8;

/// The type of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Type {
    /// Sender → receiver: a chunk of a message.
    Data = 1,
    /// Receiver → sender: `offset` frames of this stream have been received, counted over all its epochs (cumulative),
    /// and `total` bytes of eager credit have been returned on the connection (cumulative). Over RDMA, each side sends
    /// it first over a replacement socket: `offset` frames have been received over all sockets.
    Ack = 2,
    /// Receiver → sender: the `order`-th receive with `tag` is posted and holds `total` bytes.
    Clear = 3,
    /// Both: no more frames follow in this direction. `total`: one more than the number of messages sent or received,
    /// or 0 when that is not given.
    Bye = 4,
    /// Both: the connection has failed; the payload is the reason, `order` the code of the cause.
    Fail = 5,
    /// Sender → receiver: epoch `offset` of the stream with number `order` has ended; accept nothing more from it.
    Fence = 6,
    /// Receiver → sender: in epoch `offset` of stream `order`, `total` frames were received, and no more will be. Over
    /// RDMA, both: in epoch `epoch` of queue pair `order`, `total` immediates.
    Fenced = 7,
    /// Sender → receiver: the `order`-th message with `tag` has `total` bytes and has waited a while, for its receive
    /// or for credit. The receiver answers with [`Type::Clear`] as soon as the receive is posted, however small it is.
    Query = 8,
    /// Over RDMA, both: queue pair `order` is replaced for epoch `epoch`. The low half of `message` is the new queue
    /// pair's number, the high half its first packet sequence number; `total` is 1. With `total` 0: not now. `offset`
    /// and `tag` are the options of enhanced connection establishment: vendor and options in the halves of `offset`,
    /// the mask in `tag`. With `total` 2, sender → receiver: a first write over the new queue pair was acknowledged.
    QueuePair = 9,
    /// Receiver → sender: as [`Type::Ack`], plus the counts of frames received on every stream, in order of their
    /// numbers, 8 bytes each.
    Acks = 10,
}

impl Type {
    #[inline]
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Data,
            2 => Self::Ack,
            3 => Self::Clear,
            4 => Self::Bye,
            5 => Self::Fail,
            6 => Self::Fence,
            7 => Self::Fenced,
            8 => Self::Query,
            9 => Self::QueuePair,
            10 => Self::Acks,
            _ => return None,
        })
    }
}

/// A decoded header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Its type.
    pub kind: Type,
    /// [`EAGER`], [`PROMPT`], [`WHOLE`], [`POLLED`].
    pub flags: u8,
    /// The stream's epoch.
    pub epoch: u16,
    /// Payload bytes that follow.
    pub length: u32,
    /// The message's number.
    pub message: u64,
    /// The message's number among those with its tag.
    pub order: u64,
    /// Where the payload belongs in the message, in bytes.
    pub offset: u64,
    /// Size of the whole message in bytes.
    pub total: u64,
    /// NCCL's tag.
    pub tag: i32,
}

impl Header {
    /// A header of the given type with every other field zero.
    pub fn of(kind: Type, epoch: u16) -> Self {
        Self { kind, flags: 0, epoch, length: 0, message: 0, order: 0, offset: 0, total: 0, tag: 0 }
    }

    /// The 48 bytes for the wire.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        self.encode_into(&mut out);
        out
    }

    /// As [`Header::encode`], in place. Stores whole 8-byte units: the check and the kernel read them soon, and a load
    /// of a unit that was stored in parts stalls.
    #[inline]
    pub(crate) fn encode_into(&self, out: &mut [u8; HEADER]) {
        let first = u64::from(self.kind as u8)
            | u64::from(self.flags) << 8
            | u64::from(self.epoch) << 16
            | u64::from(self.length) << 32;
        let words = [first, self.message, self.order, self.offset, self.total];
        let tag = self.tag as u32;
        let last = u64::from(tag) | u64::from(check(&words, tag)) << 32;
        for (place, word) in out.chunks_exact_mut(8).zip(words.iter().chain([&last])) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Reads 48 bytes from the wire.
    ///
    /// # Errors
    /// A remote error when the check, the type, or a bound that holds for every frame is wrong. The stream must end
    /// then: the position of the next header is unknown.
    #[inline]
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self> {
        let word = |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("eight bytes"));
        let words = [word(0), word(1), word(2), word(3), word(4)];
        let [first, message, order, offset, total] = words;
        let last = word(5);
        if check(&words, last as u32) != (last >> 32) as u32 {
            return Err(damaged());
        }
        let header = Self {
            kind: Type::from_byte(first as u8).ok_or_else(|| unknown(first as u8))?,
            flags: (first >> 8) as u8,
            epoch: (first >> 16) as u16,
            length: (first >> 32) as u32,
            message,
            order,
            offset,
            total,
            tag: last as u32 as i32,
        };
        if header.is_in_bounds() { Ok(header) } else { Err(header.out_of_bounds()) }
    }

    #[inline]
    fn is_in_bounds(&self) -> bool {
        match self.kind {
            Type::Data => {
                let end = self.offset.checked_add(u64::from(self.length));
                end.is_some_and(|end| end <= self.total) && self.offset.is_multiple_of(ALIGN)
            }
            Type::Fail => self.length <= MAX_CONTROL,
            // A count for each stream.
            Type::Acks => self.length <= 8 * MAX_STREAMS as u32 && self.length.is_multiple_of(8),
            _ => self.length == 0,
        }
    }

    #[cold]
    fn out_of_bounds(&self) -> Error {
        Error::remote(match self.kind {
            Type::Data => format!(
                "a chunk of {} bytes at {} does not fit its message of {} bytes",
                self.length, self.offset, self.total
            ),
            kind => format!("a {kind:?} frame carries {} bytes", self.length),
        })
    }
}

#[cold]
fn damaged() -> Error {
    Error::remote("a frame header arrived damaged (its checksum is wrong)")
        .with_hint("look for a middlebox or a failing network card")
}

#[cold]
fn unknown(kind: u8) -> Error {
    Error::remote(format!("a frame of unknown type {kind} arrived"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_data() -> impl Strategy<Value = Header> {
        (0..1_u64 << 40, 0_u32..1 << 30, any::<u64>(), any::<u64>(), any::<i32>(), any::<u16>(), 0..4_u8).prop_map(
            |(block, length, message, order, tag, epoch, flags)| {
                let offset = block * ALIGN % (1 << 42);
                Header {
                    kind: Type::Data,
                    flags,
                    epoch,
                    length,
                    message,
                    order,
                    offset,
                    total: offset + u64::from(length),
                    tag,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn a_header_survives_the_wire(header in any_data()) {
            prop_assert_eq!(Header::decode(&header.encode()).unwrap(), header);
        }

        #[test]
        fn a_flipped_bit_is_noticed(header in any_data(), bit in 0..HEADER * 8) {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::array::uniform32(any::<u8>()), more in proptest::array::uniform16(any::<u8>())) {
            let mut all = [0; HEADER];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&more);
            let _ = Header::decode(&all);
            // The same bytes with a valid check, so that the decoder tests the bounds.
            let check = crc32c::crc32c(&all[..44]);
            all[44..].copy_from_slice(&check.to_le_bytes());
            if let Ok(header) = Header::decode(&all) {
                prop_assert!(header.kind != Type::Data || header.offset + u64::from(header.length) <= header.total);
            }
        }
    }

    #[test]
    fn a_chunk_beyond_its_message_is_refused() {
        let header = Header { length: 129, total: 256, offset: 128, ..Header::of(Type::Data, 0) };
        assert!(Header::decode(&header.encode()).is_err());
        let unaligned = Header { length: 1, total: 256, offset: 64, ..Header::of(Type::Data, 0) };
        assert!(Header::decode(&unaligned.encode()).is_err());
        let control = Header { length: 1, ..Header::of(Type::Ack, 0) };
        assert!(Header::decode(&control.encode()).is_err());
    }
}
