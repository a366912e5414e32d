//! An acknowledgement: how many frames of a stream were taken in, or of all streams.
//!
//! Where a message travels over several streams, its sender waits for all of them. One frame for all streams, sent when
//! the message is whole, costs each side one system call. A frame for each chunk would cost one call per chunk.

use crate::session::frame::MAX_STREAMS;
use crate::session::frame::{HEADER, Header, Type};

/// An acknowledgement by the receiver.
#[derive(Debug, Clone, Copy)]
pub struct Ack {
    /// [`Type::Ack`], or [`Type::Acks`] when there are counts.
    pub header: Header,
    counts: [u64; MAX_STREAMS],
}

impl Ack {
    /// For the stream that it travels on: `frames` frames, and `credit` bytes of the connection's window returned.
    pub fn of_one(epoch: u16, frames: u64, credit: u64) -> Self {
        let header = Header { offset: frames, total: credit, ..Header::of(Type::Ack, epoch) };
        Self { header, counts: [0; MAX_STREAMS] }
    }

    /// The same for all streams.
    pub fn of_all(mut self, frames: impl Iterator<Item = u64>) -> Self {
        let mut streams = 0;
        for (count, frames) in self.counts.iter_mut().zip(frames) {
            *count = frames;
            streams += 1;
        }
        self.header = Header { kind: Type::Acks, length: 8 * streams, ..self.header };
        self
    }

    /// Frames by stream; none when the acknowledgement covers its own stream only.
    pub fn counts(&self) -> &[u64] {
        &self.counts[..self.header.length as usize / 8]
    }

    /// Appends the acknowledgement's wire form.
    pub fn encode_to(&self, out: &mut Vec<u8>) {
        out.reserve(HEADER + self.header.length as usize);
        out.extend_from_slice(&self.header.encode());
        for count in self.counts() {
            out.extend_from_slice(&count.to_le_bytes());
        }
    }

    /// Decodes a header and the payload behind it.
    pub(crate) fn decode(header: &Header, payload: &[u8]) -> Self {
        let mut counts = [0; MAX_STREAMS];
        for (count, bytes) in counts.iter_mut().zip(payload.chunks_exact(8)) {
            *count = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        }
        Self { header: *header, counts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_survive_the_wire() {
        for streams in [0, 1, 5, MAX_STREAMS] {
            let ack = Ack::of_one(3, 7, 1 << 40).of_all((0..streams as u64).map(|index| index << 33 | 5));
            let mut bytes = vec![1, 2, 3];
            ack.encode_to(&mut bytes);
            let header = Header::decode(bytes[3..3 + HEADER].try_into().unwrap()).unwrap();
            assert_eq!((header.kind, header.epoch, header.offset, header.total), (Type::Acks, 3, 7, 1 << 40));
            let read = Ack::decode(&header, &bytes[3 + HEADER..]);
            assert_eq!(read.counts().len(), streams);
            assert_eq!(read.counts(), ack.counts());
        }
    }
}
