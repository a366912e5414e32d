//! The header of each one-sided message. Its bytes follow in messages of at most [`PIECE`] bytes.

use crate::os::error::{Error, Result};

/// Bytes of a header.
pub(crate) const HEADER: usize = 56;

/// The most bytes of one message that follows a header; the last may be shorter.
pub(crate) const PIECE: usize = 512 << 10;

/// The most bytes that a header may announce.
pub(crate) const LONGEST: u64 = 1 << 40;

const MAGIC: [u8; 4] = *b"TWR1";

/// The purpose of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The first on a connection: `region` is the sender's rank, `size` the number of ranks.
    Hello = 1,
    /// Bytes for the receiver's memory follow; then the signal, if `signal` names one.
    Put = 2,
    /// Requests bytes of the receiver's memory.
    Get = 3,
    /// The bytes of a get follow; no bytes follow when it was refused.
    Reply = 4,
    /// A put is in place, or was refused.
    Ack = 5,
    /// The last on a connection.
    Bye = 6,
}

/// A signal: `value` is added to the 64-bit number at this place. Region 0 stands for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Signal {
    /// The receiver's registration.
    pub region: u32,
    /// The place in it.
    pub offset: u64,
    /// The value to add.
    pub value: u64,
}

/// A header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// The message's purpose.
    pub kind: Kind,
    /// Whether the request was refused (in an answer).
    pub refused: bool,
    /// The id of the request at the requesting rank, which the answer repeats.
    pub request: u64,
    /// The registration of the rank that gets the request; 0 for none.
    pub region: u32,
    /// The place in it.
    pub offset: u64,
    /// How many bytes.
    pub size: u64,
    /// The signal of a put.
    pub signal: Signal,
}

impl Header {
    /// A header that has only a kind.
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind, refused: false, request: 0, region: 0, offset: 0, size: 0, signal: Signal::default() }
    }

    /// The bytes that travel.
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = u8::from(self.refused);
        bytes[8..16].copy_from_slice(&self.request.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.region.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.signal.region.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.offset.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.size.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.signal.offset.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.signal.value.to_le_bytes());
        bytes
    }

    /// Reads a received header.
    ///
    /// # Errors
    /// When it is no header.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self> {
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let short = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let kind = match bytes[4] {
            1 => Kind::Hello,
            2 => Kind::Put,
            3 => Kind::Get,
            4 => Kind::Reply,
            5 => Kind::Ack,
            6 => Kind::Bye,
            _ => return Err(not_ours()),
        };
        let size = long(32);
        if bytes[..4] != MAGIC || bytes[5] > 1 || bytes[6..8] != [0, 0] || size > LONGEST {
            return Err(not_ours());
        }
        let signal = Signal { region: short(20), offset: long(40), value: long(48) };
        Ok(Self { kind, refused: bytes[5] == 1, request: long(8), region: short(16), offset: long(24), size, signal })
    }
}

/// The error that ends a connection whose peer breaks the protocol.
pub(crate) fn not_ours() -> Error {
    Error::remote("the peer sent a one-sided message that this version does not know")
        .with_hint("use the same version of Towline on all hosts")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_arrives_as_it_was_sent() {
        for kind in [Kind::Hello, Kind::Put, Kind::Get, Kind::Reply, Kind::Ack, Kind::Bye] {
            let signal = Signal { region: 3, offset: 1 << 33, value: u64::MAX };
            let header =
                Header { kind, refused: true, request: 1 << 40 | 7, region: 2, offset: 9, size: LONGEST, signal };
            assert_eq!(Header::decode(&header.encode()).unwrap(), header);
        }
    }

    #[test]
    fn what_is_no_header_is_refused() {
        let good = Header::new(Kind::Put).encode();
        for (at, value) in [(0, 0), (4, 0), (4, 7), (5, 2), (6, 1), (7, 1), (37, 2), (39, 1)] {
            let mut bad = good;
            bad[at] = value;
            assert!(Header::decode(&bad).is_err(), "{at}: {value}");
        }
    }
}
