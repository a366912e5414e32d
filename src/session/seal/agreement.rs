//! Fresh keys for each epoch of a stream: the Noise protocol framework's pattern `NNpsk0`, inside the handshake.
//!
//! ```text
//! connecting side                                         listening side
//!   hello (512) · offer (48: ephemeral key, proof)  ──▶
//!                                                   ◀──   answer (544: ephemeral key, welcome, encrypted)
//! ```
//!
//! Both ephemeral keys are discarded afterwards: an attacker who obtains the key file later cannot decrypt recorded
//! traffic. Everything exchanged before the offer is the prologue. So a recorded offer or answer fits no other
//! handshake, and no attacker on the path can remove a feature from the negotiation. Each run gives two keys, one per
//! direction, that are never used again, so the nonces of a stream's records can be simple counters.

use std::sync::LazyLock;

use snow::{Builder, HandshakeState};

use crate::os::error::{Error, Result};
use crate::os::key_file::SharedKey;

/// Bytes of the connecting side's message.
pub(crate) const OFFER: usize = 32 + TAG;
/// Bytes that the listening side's message has beyond the welcome in it.
pub(crate) const ANSWER: usize = 32 + TAG;

/// Bytes that authenticate a record or a message of the handshake.
pub(crate) const TAG: usize = 16;

const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// The key of one direction of a stream, for one epoch. It cannot be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct StreamKey([u8; 32]);

impl StreamKey {
    /// The key with these bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl std::fmt::Debug for StreamKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StreamKey(not shown)")
    }
}

/// The keys of one epoch of a stream, as one side uses them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    /// For the data that this side sends.
    pub send: StreamKey,
    /// For the data that it receives.
    pub receive: StreamKey,
}

fn builder<'a>(key: &'a SharedKey, prologue: &'a [u8]) -> std::result::Result<Builder<'a>, snow::Error> {
    static PARAMS: LazyLock<snow::params::NoiseParams> =
        LazyLock::new(|| PATTERN.parse().expect("the pattern is one that the library knows"));
    Builder::new(PARAMS.clone()).prologue(prologue)?.psk(0, key.bytes())
}

fn unexpected(error: snow::Error) -> Error {
    Error::internal(format!("the key agreement failed: {error}"))
}

/// The connecting side, between its offer and the answer.
pub(crate) struct Offered(Box<HandshakeState>);

impl Offered {
    /// Makes the offer. `prologue` is everything exchanged before.
    ///
    /// # Errors
    /// When the system's random source fails.
    pub(crate) fn new(key: &SharedKey, prologue: &[u8]) -> Result<(Self, [u8; OFFER])> {
        let mut state = builder(key, prologue).and_then(Builder::build_initiator).map_err(unexpected)?;
        let mut offer = [0; OFFER];
        let length = state.write_message(&[], &mut offer).map_err(unexpected)?;
        debug_assert_eq!(length, OFFER);
        Ok((Self(Box::new(state)), offer))
    }

    /// Reads the answer: returns the keys, and puts the welcome into `welcome`. None when its sender does not have the
    /// shared key, or the answer was modified on the way.
    pub(crate) fn take_answer(mut self, answer: &[u8], welcome: &mut [u8]) -> Option<Keys> {
        let length = self.0.read_message(answer, welcome).ok()?;
        if length != welcome.len() {
            return None;
        }
        let (forth, back) = self.0.dangerously_get_raw_split();
        Some(Keys { send: StreamKey(forth), receive: StreamKey(back) })
    }
}

/// The listening side, between the offer and its answer.
pub(crate) struct Accepted(Box<HandshakeState>);

impl Accepted {
    /// Reads an offer. None when its sender does not have the shared key, or the offer was modified on the way.
    ///
    /// # Errors
    /// When the library refuses to start, which is not expected.
    pub(crate) fn new(key: &SharedKey, prologue: &[u8], offer: &[u8]) -> Result<Option<Self>> {
        let mut state = builder(key, prologue).and_then(Builder::build_responder).map_err(unexpected)?;
        let taken = state.read_message(offer, &mut []).is_ok();
        Ok(taken.then(|| Self(Box::new(state))))
    }

    /// Makes the answer, the welcome in it, and the keys.
    ///
    /// # Errors
    /// When the system's random source fails.
    pub(crate) fn answer(mut self, welcome: &[u8]) -> Result<(Vec<u8>, Keys)> {
        let mut answer = vec![0; ANSWER + welcome.len()];
        let length = self.0.write_message(welcome, &mut answer).map_err(unexpected)?;
        debug_assert_eq!(length, answer.len());
        let (forth, back) = self.0.dangerously_get_raw_split();
        Ok((answer, Keys { send: StreamKey(back), receive: StreamKey(forth) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::key_file::Purpose;

    fn key(seed: u8) -> SharedKey {
        SharedKey::from_content(&[seed; 32], Purpose::Connections)
    }

    fn run(ours: &SharedKey, theirs: &SharedKey, prologues: [&[u8]; 2], garble: Option<usize>) -> Option<(Keys, Keys)> {
        let (offered, mut offer) = Offered::new(ours, prologues[0]).unwrap();
        if let Some(at) = garble.filter(|at| *at < OFFER) {
            offer[at] ^= 1;
        }
        let accepted = Accepted::new(theirs, prologues[1], &offer).unwrap()?;
        let (mut answer, listening) = accepted.answer(b"welcome").unwrap();
        if let Some(at) = garble.and_then(|at| at.checked_sub(OFFER)) {
            answer[at] ^= 1;
        }
        assert_eq!(answer.len(), ANSWER + 7);
        let mut welcome = [0; 7];
        let connecting = offered.take_answer(&answer, &mut welcome)?;
        assert_eq!(&welcome, b"welcome");
        Some((connecting, listening))
    }

    #[test]
    fn both_sides_get_the_same_keys_and_never_the_same_again() {
        let (a, b) = run(&key(1), &key(1), [b"said", b"said"], None).unwrap();
        assert_eq!((&a.send, &a.receive), (&b.receive, &b.send));
        assert_ne!(a.send, a.receive);
        let (again, _) = run(&key(1), &key(1), [b"said", b"said"], None).unwrap();
        assert!(again.send != a.send && again.receive != a.receive && again.send != a.receive);
    }

    #[test]
    fn another_key_or_another_conversation_gives_nothing() {
        assert!(run(&key(1), &key(2), [b"said", b"said"], None).is_none());
        assert!(run(&key(1), &key(1), [b"said", b"heard"], None).is_none());
        for at in 0..OFFER + ANSWER + 7 {
            assert!(run(&key(1), &key(1), [b"said", b"said"], Some(at)).is_none(), "byte {at}");
        }
    }

    #[test]
    fn keys_cannot_be_printed() {
        let (keys, _) = run(&key(1), &key(1), [b"", b""], None).unwrap();
        assert_eq!(format!("{keys:?}"), "Keys { send: StreamKey(not shown), receive: StreamKey(not shown) }");
    }
}
