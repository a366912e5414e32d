//! How the bytes of a stream are protected beyond the check in every header: not at all, by a checksum of each chunk,
//! or by authenticated encryption of all bytes.
//!
//! | module | holds |
//! |---|---|
//! | [`codec`] | one direction of a stream: [`codec::Sealer`] makes protected frames, [`codec::Opener`] checks and opens them |
//! | [`intake`] | the bounce buffer in which arriving frames are checked before a byte of them goes anywhere |
//! | [`agreement`] | fresh keys for each epoch of each stream, from the shared key file |
//! | [`damage`] | when frames that keep arriving damaged end the connection |
//!
//! Guarantee: with a checksum or encryption, no byte reaches NCCL's buffer or the protocol core before it has been
//! verified. A frame that fails ends its stream, never the connection by itself: the stream is reconnected in a new
//! epoch, and lost data is resent. Without either, streams do not pass through this module at all.
//!
//! Encryption covers the checksum's purpose, so a stream with both switched on is only encrypted.

pub mod agreement;
pub(crate) mod codec;
pub(crate) mod damage;
pub mod intake;

use super::handshake::{FEATURE_CHECKSUM, FEATURE_ENCRYPTION};
use agreement::Keys;
use codec::{Opener, Sealer};
use intake::Intake;

use crate::os::error::{Error, Result};

/// How the frames of a stream are protected in one epoch.
#[derive(Debug)]
pub enum Seal {
    /// By the check in each header only.
    Plain,
    /// By a checksum behind each chunk.
    Checksum,
    /// By authenticated encryption.
    Encrypted(Keys),
}

impl Seal {
    /// The agreed protection: the feature bits in use, and the keys when encryption is one of them.
    ///
    /// # Errors
    /// When encryption was agreed but there are no keys, or the reverse; the handshake excludes this. An encrypted
    /// connection never becomes an unencrypted one.
    pub(crate) fn of(features: u32, keys: Option<Keys>) -> Result<Self> {
        match (features & FEATURE_ENCRYPTION != 0, keys) {
            (true, Some(keys)) => Ok(Self::Encrypted(keys)),
            (false, None) if features & FEATURE_CHECKSUM != 0 => Ok(Self::Checksum),
            (false, None) => Ok(Self::Plain),
            _ => Err(Error::internal("a stream is encrypted and its connection is not, or the other way round")),
        }
    }

    /// The two directions, on this side; none for a plain stream.
    pub fn sides(self) -> Option<Box<Sides>> {
        let (sealer, opener) = match self {
            Self::Plain => return None,
            Self::Checksum => (Sealer::checksum(), Opener::checksum()),
            Self::Encrypted(Keys { send, receive }) => (Sealer::encrypted(&send), Opener::encrypted(&receive)),
        };
        Some(Box::new(Sides { sealer, intake: Intake::new(opener) }))
    }
}

/// The additional state of a protected stream.
pub struct Sides {
    /// For what is sent.
    pub sealer: Sealer,
    /// For what arrives.
    pub intake: Intake,
}

/// Whether the connection must be encrypted, by the feature bits of both sides.
///
/// # Errors
/// A usage error when one side has a key and the other has none.
pub(crate) fn is_encrypted(theirs: u32, ours: u32) -> Result<bool> {
    let what = match (theirs & FEATURE_ENCRYPTION != 0, ours & FEATURE_ENCRYPTION != 0) {
        (true, true) => return Ok(true),
        (false, false) => return Ok(false),
        (true, false) => "the peer encrypts its connections (TOWLINE_KEY_FILE) and this side does not",
        (false, true) => "this side encrypts its connections (TOWLINE_KEY_FILE) and the peer does not",
    };
    Err(Error::usage(what).with_hint("set TOWLINE_KEY_FILE on all hosts, with the same key, or on none"))
}

/// The error for two sides that have different keys.
pub(crate) fn other_key() -> Error {
    Error::usage("the peer's key (TOWLINE_KEY_FILE) is not the same as this side's")
        .with_hint("copy one key file to all hosts")
}

#[cfg(test)]
mod tests;
