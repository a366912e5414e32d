//! One direction of a protected stream: frames to wire bytes, wire bytes to frames.
//!
//! | | control frame | chunk |
//! |---|---|---|
//! | checksum | as in a plain stream | header (48) · payload · checksum (4) |
//! | encrypted | header (48 + 16) · text, if any (n + 16) | header (48 + 16) · payload (n + 16) |
//!
//! The checksum is a CRC-32C (RFC 3720; processors have an instruction for it) over the first 44 bytes of the header
//! and the payload. So a payload is accepted only behind its own header. A chunk without payload has no checksum: its
//! header's own check covers it.
//!
//! Encryption is AES-256-GCM (NIST SP 800-38D). Header and payload are separate records, since the header holds the
//! length of the payload. Nonces are not sent: records are counted from 0 in each direction of each epoch of a stream,
//! which has its own key. So a record that was modified, repeated, left out or moved is detected, and no nonce is used
//! twice. After [`RECORDS_PER_KEY`] records both sides derive the next key from the last one.

use hmac::{Hmac, KeyInit, Mac};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use sha2::Sha256;

use super::agreement::{StreamKey, TAG};
use crate::os::error::Error;
use crate::session::frame::{HEADER, Header, Type};
use crate::session::wire::Piece;

/// Bytes of a checksum.
const CHECKSUM: usize = 4;

/// Records under one key. With 2^24 records of at most 512 KiB, the probability of distinguishing the cipher from a
/// random function stays below 2^-50 (SP 800-38D; calculated as in RFC 8446, section 5.5).
const RECORDS_PER_KEY: u64 = 1 << 24;

/// Why the opener does not accept arrived bytes.
#[derive(Debug)]
pub enum Refused {
    /// Bytes were modified on the way. The stream must end: the position of the next frame is unknown.
    Damaged,
    /// The bytes are as they were sent, but they violate the protocol.
    Wrong(Error),
}

/// AES-256-GCM over the records of one direction, in order.
struct Records {
    key: LessSafeKey,
    secret: [u8; 32],
    next: u64,
    per_key: u64,
}

impl Records {
    fn new(key: &StreamKey) -> Self {
        let secret = *key.bytes();
        Self { key: Self::key(&secret), secret, next: 0, per_key: RECORDS_PER_KEY }
    }

    fn key(secret: &[u8; 32]) -> LessSafeKey {
        LessSafeKey::new(UnboundKey::new(&AES_256_GCM, secret).expect("the key has the cipher's length"))
    }

    /// The nonce of the next record, which no other record under this key has.
    fn nonce(&mut self) -> Nonce {
        if self.next == self.per_key {
            let mac = Hmac::<Sha256>::new_from_slice(&self.secret).expect("HMAC takes keys of any length");
            self.secret = mac.chain_update(b"towline next key 1").finalize().into_bytes().into();
            self.key = Self::key(&self.secret);
            self.next = 0;
        }
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.next.to_be_bytes());
        self.next += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    fn seal(&mut self, bytes: &mut [u8]) -> [u8; TAG] {
        let nonce = self.nonce();
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::empty(), bytes);
        tag.expect("a record is far below the cipher's limit of 64 GiB").as_ref().try_into().expect("16 bytes")
    }

    /// Decrypts a record followed by its tag; the first bytes are then the plain ones.
    fn open(&mut self, record: &mut [u8]) -> bool {
        let nonce = self.nonce();
        self.key.open_in_place(nonce, Aad::empty(), record).is_ok()
    }

    fn append(&mut self, out: &mut Vec<u8>, bytes: &[u8]) {
        let start = out.len();
        out.extend_from_slice(bytes);
        let tag = self.seal(&mut out[start..]);
        out.extend_from_slice(&tag);
    }
}

/// A chunk as it goes onto the wire.
#[derive(Debug)]
pub enum Sealed {
    /// Header, payload in its own place, checksum.
    Summed([u8; HEADER], Piece, [u8; CHECKSUM]),
    /// Everything, as it is on the wire.
    Bytes(Vec<u8>),
}

// SAFETY: the piece belongs to a message that is not acknowledged, whose memory the transport may use until then.
unsafe impl Send for Sealed {}

impl Sealed {
    /// Bytes on the wire.
    pub fn length(&self) -> usize {
        match self {
            Self::Summed(header, body, sum) => header.len() + body.length + sum_length(body.length, sum),
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// The rest to be sent after the first `sent` bytes.
    pub fn rest(&self, sent: usize) -> [Piece; 3] {
        match self {
            Self::Summed(header, body, sum) => {
                let sum = Piece::of(&sum[..sum_length(body.length, sum)]);
                let gone = sent.saturating_sub(HEADER);
                [Piece::of(&header[sent.min(HEADER)..]), body.skip(gone), sum.skip(gone.saturating_sub(body.length))]
            }
            Self::Bytes(bytes) => [Piece::of(&bytes[sent..]), Piece::of(&[]), Piece::of(&[])],
        }
    }
}

fn sum_length(body: usize, sum: &[u8; CHECKSUM]) -> usize {
    if body == 0 { 0 } else { sum.len() }
}

fn checksum(header: &[u8; HEADER], payload: &[u8]) -> [u8; CHECKSUM] {
    let of_header = u32::from_le_bytes(header[44..].try_into().expect("four bytes"));
    crc32c::crc32c_append(of_header, payload).to_le_bytes()
}

/// The sending half.
pub struct Sealer {
    records: Option<Records>,
    /// The buffer of the last chunk, for the next one.
    spare: Vec<u8>,
}

impl Sealer {
    /// Adds checksums.
    pub(crate) fn checksum() -> Self {
        Self { records: None, spare: Vec::new() }
    }

    /// Encrypts.
    pub(crate) fn encrypted(key: &StreamKey) -> Self {
        Self { records: Some(Records::new(key)), spare: Vec::new() }
    }

    /// Turns control frames, headers with their payload, into their form on the wire.
    pub(crate) fn control(&mut self, frames: &mut Vec<u8>) {
        let Some(records) = &mut self.records else { return };
        let mut out = Vec::with_capacity(frames.len() * 2);
        let mut rest = &frames[..];
        while let Some((header, behind)) = rest.split_at_checked(HEADER) {
            let length = u32::from_le_bytes(header[4..8].try_into().expect("four bytes")) as usize;
            records.append(&mut out, header);
            if length > 0 {
                records.append(&mut out, &behind[..length]);
            }
            rest = &behind[length..];
        }
        debug_assert!(rest.is_empty(), "whole frames only");
        *frames = out;
    }

    /// A chunk as it goes onto the wire.
    ///
    /// # Safety
    /// `body` must be readable for its whole length now and, where a checksum is added, until it has been sent.
    pub unsafe fn chunk(&mut self, header: [u8; HEADER], body: Piece) -> Sealed {
        // SAFETY: the caller vouches for the piece; an empty one may have any address.
        let bytes = unsafe { body.bytes() };
        let Some(records) = &mut self.records else {
            return Sealed::Summed(header, body, checksum(&header, bytes));
        };
        let mut out = std::mem::take(&mut self.spare);
        out.clear();
        out.reserve(HEADER + body.length + 2 * TAG);
        records.append(&mut out, &header);
        if body.length > 0 {
            records.append(&mut out, bytes);
        }
        Sealed::Bytes(out)
    }

    /// The chunk was sent: its buffer can be used again.
    pub fn sent(&mut self, chunk: Sealed) {
        if let Sealed::Bytes(buffer) = chunk {
            self.spare = buffer;
        }
    }
}

/// The receiving half.
pub(crate) struct Opener {
    records: Option<Records>,
}

impl Opener {
    /// Checks checksums.
    pub(crate) fn checksum() -> Self {
        Self { records: None }
    }

    /// Decrypts.
    pub(crate) fn encrypted(key: &StreamKey) -> Self {
        Self { records: Some(Records::new(key)) }
    }

    /// Bytes of a header on the wire.
    pub(crate) fn header_length(&self) -> usize {
        HEADER + if self.records.is_some() { TAG } else { 0 }
    }

    /// Bytes on the wire that follow this header.
    pub(crate) fn body_length(&self, header: &Header) -> usize {
        let length = header.length as usize;
        match (length, header.kind) {
            (0, _) => 0,
            (_, _) if self.records.is_some() => length + TAG,
            (_, Type::Data) => length + CHECKSUM,
            (_, _) => length,
        }
    }

    /// Reads a header; `bytes` are as many as [`Opener::header_length`] returns, and are plain afterwards.
    ///
    /// # Errors
    /// When it was modified on the way, or violates the protocol.
    pub(crate) fn header(&mut self, bytes: &mut [u8]) -> std::result::Result<Header, Refused> {
        if self.records.as_mut().is_some_and(|records| !records.open(bytes)) {
            return Err(Refused::Damaged);
        }
        let plain: &[u8; HEADER] = bytes[..HEADER].try_into().expect("a header's worth");
        if crc32c::crc32c(&plain[..44]).to_le_bytes() != plain[44..] {
            return Err(Refused::Damaged);
        }
        Header::decode(plain).map_err(Refused::Wrong)
    }

    /// Checks the payload behind a header; `bytes` are as many as [`Opener::body_length`] returns. Afterwards the first
    /// `header.length` of them are the plain payload. Returns whether the payload is as it was sent.
    pub(crate) fn body(&mut self, header: &Header, bytes: &mut [u8]) -> bool {
        if bytes.is_empty() {
            return true;
        }
        if let Some(records) = &mut self.records {
            return records.open(bytes);
        }
        let (payload, sum) = bytes.split_at(header.length as usize);
        sum.is_empty() || checksum(&header.encode(), payload) == sum
    }
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// As the normal pair, but with a new key after this many records.
    pub(crate) fn encrypted_pair(key: &StreamKey, records_per_key: u64) -> (Sealer, Opener) {
        let (mut sealer, mut opener) = (Sealer::encrypted(key), Opener::encrypted(key));
        for records in [&mut sealer.records, &mut opener.records].into_iter().flatten() {
            records.per_key = records_per_key;
        }
        (sealer, opener)
    }
}
