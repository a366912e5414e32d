//! One direction of a protected stream: real bytes through the real codec and the real bounce buffer, some of them
//! damaged.

use super::Dice;
use crate::session::frame::{Header, Type};
use crate::session::seal::agreement::{Keys, StreamKey};
use crate::session::seal::codec::Refused;
use crate::session::seal::intake::Item;
use crate::session::seal::{Seal, Sides};
use crate::session::wire::Piece;

/// Both ends of one epoch of a stream; the sending half of one, the receiving half of the other.
pub(super) struct Line(Box<Sides>);

/// Which part of a frame arrives now.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    Head,
    Rest,
    All,
}

/// Bytes that differ from one chunk to the next.
fn payload(header: &Header) -> Vec<u8> {
    let seed = header.message.wrapping_mul(31).wrapping_add(header.offset >> 7);
    vec![seed as u8; header.length as usize]
}

impl Line {
    pub(super) fn new(encrypted: bool, index: usize, epoch: u16) -> Self {
        let mut bytes = [index as u8; 32];
        bytes[..2].copy_from_slice(&epoch.to_le_bytes());
        let key = StreamKey::from_bytes(bytes);
        let keys = Keys { send: key.clone(), receive: key };
        let seal = if encrypted { Seal::Encrypted(keys) } else { Seal::Checksum };
        Self(seal.sides().expect("a protected stream"))
    }

    /// A frame's bytes on the wire.
    pub(super) fn seal(&mut self, header: &Header) -> Vec<u8> {
        if header.kind != Type::Data {
            let mut bytes = header.encode().to_vec();
            self.0.sealer.control(&mut bytes);
            return bytes;
        }
        let payload = payload(header);
        // SAFETY: the payload lives until its bytes are copied.
        unsafe {
            let sealed = self.0.sealer.chunk(header.encode(), Piece::of(&payload));
            let bytes = sealed.rest(0).map(|piece| piece.bytes()).concat();
            self.0.sealer.sent(sealed);
            bytes
        }
    }

    /// A part of a frame arrives, in pieces, and perhaps with a flipped bit. Returns false when the codec noticed that,
    /// which it always does before the part counts.
    pub(super) fn arrives(&mut self, dice: &mut Dice, header: &Header, bytes: &[u8], part: Arrival) -> bool {
        let head = bytes.len() - self.0.intake.opener().body_length(header);
        let mut bytes = match part {
            Arrival::Head => bytes[..head].to_vec(),
            Arrival::Rest => bytes[head..].to_vec(),
            Arrival::All => bytes.to_vec(),
        };
        let damaged = !bytes.is_empty() && dice.roll(24) == 0;
        if damaged {
            let at = dice.roll(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << dice.roll(8);
        }
        let (mut began, mut whole) = (false, false);
        let mut rest = &bytes[..];
        loop {
            match self.0.intake.take() {
                Err(Refused::Damaged) => {
                    assert!(damaged, "what is whole is taken");
                    return false;
                }
                Err(Refused::Wrong(error)) => panic!("a changed bit forges no header: {error}"),
                Ok(Some(Item::Began(got))) => {
                    assert_eq!(got, *header);
                    began = true;
                }
                Ok(Some(Item::Whole(got, text))) => {
                    assert!(got == *header && text == payload(header), "changed bytes were taken for whole");
                    whole = true;
                }
                Ok(None) if rest.is_empty() => break,
                Ok(None) => {
                    let room = self.0.intake.room();
                    let count = room.len().min(rest.len()).min(1 + dice.roll(200_000) as usize);
                    room[..count].copy_from_slice(&rest[..count]);
                    self.0.intake.filled(count);
                    rest = &rest[count..];
                }
            }
            // An empty chunk is whole when its header is. It counts when the rest of it would have arrived.
            if began && part == Arrival::Head {
                break;
            }
        }
        assert!(!damaged, "damage went unnoticed");
        assert_eq!((began, whole), (part != Arrival::Rest, part != Arrival::Head));
        true
    }
}
