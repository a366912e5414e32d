//! The handshake: preamble, proof of the secret, parameters. Bytes only, no sockets.
//!
//! ```text
//! connecting side                                listening side
//!   preamble (16, frozen)                ──▶
//!                                        ◀──     preamble (16) · nonce (16)
//!   hello (512: what it wants, nonce, rails, proof) ──▶
//!                                        ◀──     welcome (496: parameters, rails, proof)
//! ```
//!
//! With encryption an offer of 48 bytes follows the hello. The welcome then travels encrypted, in an answer of 544
//! bytes ([`super::seal::agreement`]). If the two sides have different keys, a refusal of 40 bytes is sent instead.
//!
//! The secret is in the handle that NCCL carries between the ranks over its own bootstrap network; it never crosses the
//! data network. Each side proves that it holds the secret by an HMAC-SHA-256 (RFC 2104) over everything exchanged so
//! far. That includes a fresh nonce of each side, so a recorded handshake cannot be replayed. A connection has its own
//! key, derived from the secret and both nonces; further streams prove that key.
//!
//! All integers are little-endian.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::frame::MAX_STREAMS;
use crate::os::error::{Error, Result};

/// The first eight bytes that each side sends. Frozen, like the rest of the preamble.
pub(crate) const MAGIC: [u8; 8] = *b"TOWLINE\n";
/// The oldest protocol version that this build supports.
pub const VERSION_MIN: u16 = 1;
/// The newest protocol version that this build supports.
pub const VERSION_MAX: u16 = 1;

/// Feature bit: messages are kept until they are acknowledged and resent after a break.
pub(crate) const FEATURE_RECOVERY: u32 = 1;
/// Feature bit: a checksum behind each chunk. On when either side asks for it.
pub(crate) const FEATURE_CHECKSUM: u32 = 2;
/// Feature bit: the side has a key file. If only one side has this bit, no connection is made.
pub(crate) const FEATURE_ENCRYPTION: u32 = 4;
/// Feature bit: another backend takes the socket over after the handshake.
pub(crate) const FEATURE_BARE: u32 = 8;

/// Feature bit: messages of up to 512 KiB may arrive early, 16 MiB of them in all.
pub(crate) const FEATURE_FAR: u32 = 16;

/// Bytes of a preamble.
pub const PREAMBLE: usize = 16;
/// Bytes of the listening side's first message: preamble and nonce.
pub const GREETING: usize = PREAMBLE + 16;
/// Bytes of a hello.
pub const HELLO: usize = 32 + LABEL + MAX_STREAMS * ADDRESS + PROOF;
/// Bytes of a welcome.
pub const WELCOME: usize = 16 + LABEL + MAX_STREAMS * ADDRESS + PROOF;

/// Bytes with which the connecting side confirms the welcome to a new connection: the connection's number.
pub const READY: usize = 8;

/// The bit of a welcome that marks the connection as closed.
pub(crate) const CLOSED: u64 = 1 << 63;

/// Bytes of a refusal.
const REFUSAL: usize = 8 + PROOF;

const LABEL: usize = 64;
const ADDRESS: usize = 24;
/// Bytes of a proof.
pub(crate) const PROOF: usize = 32;

/// 128 bits that only the two ranks know, or a key made from them.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(not shown)")
    }
}

impl Secret {
    /// A new secret from the system's random source.
    ///
    /// # Errors
    /// When the system has none.
    pub fn random() -> Result<Self> {
        Ok(Self(nonce()?.to_vec()))
    }

    /// The secret with these bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes.to_vec())
    }

    /// The 16 bytes of a listener's secret.
    pub fn bytes(&self) -> [u8; 16] {
        self.0[..16].try_into().expect("a secret has at least 16 bytes")
    }

    /// The public name of the listener that holds this secret.
    pub fn listener_id(&self) -> u64 {
        let tag = self.mac(&[b"towline listener 1"]).finalize().into_bytes();
        u64::from_le_bytes(tag[..8].try_into().expect("eight bytes"))
    }

    /// Proves `parts` to a holder of this secret.
    pub(crate) fn prove(&self, parts: &[&[u8]]) -> [u8; PROOF] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Whether `proof` proves `parts`, in constant time.
    pub(crate) fn is_proof(&self, parts: &[&[u8]], proof: &[u8; PROOF]) -> bool {
        self.mac(parts).verify_slice(proof).is_ok()
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        for part in parts {
            mac.update(part);
        }
        mac
    }

    /// The key of a connection whose handshake is `transcript`.
    pub fn connection_key(&self, transcript: &[u8]) -> Self {
        Self(self.mac(&[b"towline connection 1", transcript]).finalize().into_bytes().to_vec())
    }
}

/// Sixteen fresh random bytes.
///
/// # Errors
/// When the system's random source fails.
pub fn nonce() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(crate::os::error::Cause::System, format!("the system's random source failed: {error}"))
    })?;
    Ok(bytes)
}

/// The listening side's answer to the feature bits of the connecting side. Encryption is in it when the listening side
/// has a key, so that the other side notices a mismatch. The checksum is in it when either side wants it and encryption
/// does not cover it.
pub(crate) fn agreed(theirs: u32, ours: u32) -> u32 {
    let encryption = ours & FEATURE_ENCRYPTION;
    let checksum = if encryption == 0 { (theirs | ours) & FEATURE_CHECKSUM } else { 0 };
    encryption | checksum
}

/// The first message of each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preamble {
    /// Connecting: oldest version it speaks. Listening: the version chosen, 0 for none.
    pub low: u16,
    /// The newest version that the side speaks.
    pub high: u16,
    /// Feature bits. Connecting: what it supports or wants. Listening: what will be used, and whether it has a key.
    pub features: u32,
}

impl Preamble {
    /// The bytes for the wire.
    pub fn encode(self) -> [u8; PREAMBLE] {
        let mut out = [0; PREAMBLE];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.low.to_le_bytes());
        out[10..12].copy_from_slice(&self.high.to_le_bytes());
        out[12..].copy_from_slice(&self.features.to_le_bytes());
        out
    }

    /// Reads a preamble.
    ///
    /// # Errors
    /// When the other side does not speak Towline at all.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes[..8] != MAGIC {
            return Err(Error::remote("what arrived on the port is not Towline's protocol")
                .with_hint("a port scanner, or a rank that uses another network plugin"));
        }
        Ok(Self {
            low: u16::from_le_bytes([bytes[8], bytes[9]]),
            high: u16::from_le_bytes([bytes[10], bytes[11]]),
            features: u32::from_le_bytes(bytes[12..16].try_into().expect("four bytes")),
        })
    }

    /// The listening side's answer: the newest version that both speak.
    pub fn choose(self, features: u32) -> Self {
        let version = self.high.min(VERSION_MAX);
        let chosen = if version >= self.low.max(VERSION_MIN) { version } else { 0 };
        let common = self.features & features & (FEATURE_RECOVERY | FEATURE_BARE | FEATURE_FAR);
        Self { low: chosen, high: VERSION_MAX, features: common | agreed(self.features, features) }
    }
}

/// The request of the connecting side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// A new connection from the listener with this id.
    Connect {
        /// [`Secret::listener_id`].
        listener: u64,
    },
    /// A stream for a connection that exists.
    Join {
        /// The connection's number, from its welcome.
        connection: u64,
        /// Which stream.
        stream: u16,
        /// Which epoch of that stream.
        epoch: u16,
    },
    /// From the receiving side of a connection, which has lost streams, to the sending side: this stream has ended;
    /// connect it again.
    Call {
        /// The connection's number.
        connection: u64,
        /// Which stream.
        stream: u16,
        /// Which epoch of that stream.
        epoch: u16,
    },
}

/// The connecting side's second message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The request.
    pub intent: Intent,
    /// Its nonce.
    pub nonce: [u8; 16],
    /// A name for messages: host name and process.
    pub label: String,
    /// For a new connection: where this side's process listens, so that it can be [called](Intent::Call).
    pub rails: Vec<SocketAddr>,
}

fn put_rails(out: &mut [u8], rails: &[SocketAddr]) {
    for (slot, rail) in out.chunks_exact_mut(ADDRESS).zip(rails) {
        put_address(slot, *rail);
    }
}

fn read_rails(bytes: &[u8]) -> Vec<SocketAddr> {
    bytes.chunks_exact(ADDRESS).filter_map(read_address).collect()
}

fn put_label(out: &mut [u8], label: &str) {
    let mut end = label.len().min(LABEL);
    while !label.is_char_boundary(end) {
        end -= 1;
    }
    out[..end].copy_from_slice(&label.as_bytes()[..end]);
}

fn read_label(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    // The label goes into logs, so only plain characters are kept.
    bytes[..end].iter().map(|byte| if byte.is_ascii_graphic() { *byte as char } else { '?' }).collect()
}

/// The messages exchanged so far; each proof covers all that come before it.
pub struct Transcript(Vec<u8>);

impl Transcript {
    /// A transcript without messages.
    pub fn new() -> Self {
        Self(Vec::with_capacity(PREAMBLE + GREETING + HELLO + WELCOME))
    }

    /// Adds a message of one side.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The bytes so far.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Default for Transcript {
    fn default() -> Self {
        Self::new()
    }
}

impl Hello {
    /// The bytes for the wire, proof included, and adds them to the transcript.
    pub fn seal(&self, secret: &Secret, transcript: &mut Transcript) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        match self.intent {
            Intent::Connect { listener } => {
                out[0] = 1;
                out[8..16].copy_from_slice(&listener.to_le_bytes());
            }
            Intent::Join { connection, stream, epoch } | Intent::Call { connection, stream, epoch } => {
                out[0] = if matches!(self.intent, Intent::Join { .. }) { 2 } else { 3 };
                out[2..4].copy_from_slice(&stream.to_le_bytes());
                out[4..6].copy_from_slice(&epoch.to_le_bytes());
                out[8..16].copy_from_slice(&connection.to_le_bytes());
            }
        }
        out[16..32].copy_from_slice(&self.nonce);
        put_label(&mut out[32..32 + LABEL], &self.label);
        put_rails(&mut out[32 + LABEL..HELLO - PROOF], &self.rails);
        let proof = secret.mac(&[b"towline hello 1", transcript.bytes(), &out[..HELLO - PROOF]]).finalize();
        out[HELLO - PROOF..].copy_from_slice(&proof.into_bytes());
        transcript.add(&out);
        out
    }

    /// Reads a hello; the proof is not checked yet.
    ///
    /// # Errors
    /// When the request is of an unknown kind.
    pub fn decode(bytes: &[u8; HELLO]) -> Result<Self> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let id = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        let intent = match bytes[0] {
            1 => Intent::Connect { listener: id },
            2 => Intent::Join { connection: id, stream: u16_at(2), epoch: u16_at(4) },
            3 => Intent::Call { connection: id, stream: u16_at(2), epoch: u16_at(4) },
            other => return Err(Error::remote(format!("a handshake asks for an unknown thing ({other})"))),
        };
        Ok(Self {
            intent,
            nonce: bytes[16..32].try_into().expect("sixteen bytes"),
            label: read_label(&bytes[32..32 + LABEL]),
            rails: read_rails(&bytes[32 + LABEL..HELLO - PROOF]),
        })
    }

    /// Whether the hello's proof holds, in constant time; adds the hello to the transcript.
    pub fn verify(bytes: &[u8; HELLO], secret: &Secret, transcript: &mut Transcript) -> bool {
        let mac = secret.mac(&[b"towline hello 1", transcript.bytes(), &bytes[..HELLO - PROOF]]);
        let good = mac.verify_slice(&bytes[HELLO - PROOF..]).is_ok();
        transcript.add(bytes);
        good
    }
}

/// The listening side's second message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The connection's number, for further streams.
    pub connection: u64,
    /// For a stream that reconnects: how many frames of its previous epoch were received. With [`CLOSED`]: the
    /// connection is closed, and had received this many messages.
    pub received: u64,
    /// A name for messages.
    pub label: String,
    /// Where further streams can be connected.
    pub rails: Vec<SocketAddr>,
}

impl Welcome {
    /// The bytes for the wire, proof included, and adds them to the transcript.
    pub fn seal(&self, secret: &Secret, transcript: &mut Transcript) -> [u8; WELCOME] {
        let mut out = [0; WELCOME];
        out[..8].copy_from_slice(&self.connection.to_le_bytes());
        out[8..16].copy_from_slice(&self.received.to_le_bytes());
        put_label(&mut out[16..16 + LABEL], &self.label);
        put_rails(&mut out[16 + LABEL..WELCOME - PROOF], &self.rails);
        let proof = secret.mac(&[b"towline welcome 1", transcript.bytes(), &out[..WELCOME - PROOF]]).finalize();
        out[WELCOME - PROOF..].copy_from_slice(&proof.into_bytes());
        transcript.add(&out);
        out
    }

    /// Reads a welcome and checks its proof in constant time; adds it to the transcript.
    ///
    /// # Errors
    /// When the listening side does not hold the secret.
    pub fn open(bytes: &[u8; WELCOME], secret: &Secret, transcript: &mut Transcript) -> Result<Self> {
        let mac = secret.mac(&[b"towline welcome 1", transcript.bytes(), &bytes[..WELCOME - PROOF]]);
        if mac.verify_slice(&bytes[WELCOME - PROOF..]).is_err() {
            return Err(Error::remote("the listening side could not prove that it holds the handle's secret")
                .with_hint("another program may have taken over the address of the peer"));
        }
        transcript.add(bytes);
        Ok(Self {
            connection: u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")),
            received: u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes")),
            label: read_label(&bytes[16..16 + LABEL]),
            rails: read_rails(&bytes[16 + LABEL..WELCOME - PROOF]),
        })
    }
}

/// The listening side sends this instead of a welcome when the two sides have different keys: a peer that holds the
/// handle's secret should get the reason. 8 bytes are the message, 32 its proof.
pub(crate) struct Refusal;

const OTHER_KEY: [u8; 8] = *b"OTHERKEY";

impl Refusal {
    /// The bytes for the wire. The transcript ends with the offer.
    pub(crate) fn seal(secret: &Secret, transcript: &Transcript) -> [u8; REFUSAL] {
        let mut out = [0; REFUSAL];
        out[..8].copy_from_slice(&OTHER_KEY);
        let proof = secret.mac(&[b"towline refusal 1", transcript.bytes(), &OTHER_KEY]).finalize();
        out[8..].copy_from_slice(&proof.into_bytes());
        out
    }

    /// Whether these bytes are a refusal from a side that holds the secret.
    pub(crate) fn verify(bytes: &[u8], secret: &Secret, transcript: &Transcript) -> bool {
        let mac = secret.mac(&[b"towline refusal 1", transcript.bytes(), &OTHER_KEY]);
        bytes.len() == REFUSAL && bytes[..8] == OTHER_KEY && mac.verify_slice(&bytes[8..]).is_ok()
    }
}

/// Writes an address: family (4 or 6), port, 16 bytes, scope.
fn put_address(out: &mut [u8], address: SocketAddr) {
    out[2..4].copy_from_slice(&address.port().to_le_bytes());
    match address {
        SocketAddr::V4(v4) => {
            out[0] = 4;
            out[4..8].copy_from_slice(&v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            out[0] = 6;
            out[4..20].copy_from_slice(&v6.ip().octets());
            out[20..24].copy_from_slice(&v6.scope_id().to_le_bytes());
        }
    }
}

/// Reads an address that [`put_address`] wrote; `None` for an empty place.
fn read_address(bytes: &[u8]) -> Option<SocketAddr> {
    let port = u16::from_le_bytes([bytes[2], bytes[3]]);
    match bytes[0] {
        4 => {
            let octets: [u8; 4] = bytes[4..8].try_into().ok()?;
            Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(octets)), port))
        }
        6 => {
            let octets: [u8; 16] = bytes[4..20].try_into().ok()?;
            let scope = u32::from_le_bytes(bytes[20..24].try_into().ok()?);
            Some(SocketAddr::V6(std::net::SocketAddrV6::new(Ipv6Addr::from(octets), port, 0, scope)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said() -> Transcript {
        let mut transcript = Transcript::new();
        transcript.add(b"preambles and nonces");
        transcript
    }

    fn hello() -> Hello {
        let rails = vec!["10.0.0.1:5".parse().unwrap(), "[fe80::1%3]:6".parse().unwrap()];
        let intent = Intent::Join { connection: 77, stream: 3, epoch: 2 };
        Hello { intent, nonce: [9; 16], label: "host:1".into(), rails }
    }

    #[test]
    fn only_the_holder_of_the_secret_is_believed() {
        let secret = Secret::random().unwrap();
        let bytes = hello().seal(&secret, &mut said());
        assert!(Hello::verify(&bytes, &secret, &mut said()));
        assert_eq!(Hello::decode(&bytes).unwrap(), hello());
        let call = Hello { intent: Intent::Call { connection: 77, stream: 3, epoch: 2 }, ..hello() };
        assert_eq!(Hello::decode(&call.seal(&secret, &mut said())).unwrap(), call);
        assert!(!Hello::verify(&bytes, &Secret::random().unwrap(), &mut said()));
        for at in 0..HELLO {
            let mut changed = bytes;
            changed[at] ^= 1;
            assert!(!Hello::verify(&changed, &secret, &mut said()), "byte {at}");
        }
    }

    #[test]
    fn a_recorded_hello_does_not_fit_another_nonce() {
        let secret = Secret::random().unwrap();
        let bytes = hello().seal(&secret, &mut said());
        let mut later = Transcript::new();
        later.add(b"preambles and another nonce");
        assert!(!Hello::verify(&bytes, &secret, &mut later));
    }

    #[test]
    fn a_welcome_carries_the_rails_of_both_families() {
        let secret = Secret::random().unwrap();
        let welcome = Welcome {
            connection: 5,
            received: 6,
            label: "there".into(),
            rails: vec!["10.0.0.1:5".parse().unwrap(), "[fe80::1%3]:6".parse().unwrap()],
        };
        let bytes = welcome.seal(&secret, &mut said());
        assert_eq!(Welcome::open(&bytes, &secret, &mut said()).unwrap(), welcome);
        assert!(Welcome::open(&bytes, &Secret::random().unwrap(), &mut said()).is_err());
    }

    #[test]
    fn the_newest_version_that_both_speak_is_chosen() {
        let newer = Preamble { low: 1, high: 9, features: 7 };
        assert_eq!(newer.choose(1), Preamble { low: VERSION_MAX, high: VERSION_MAX, features: 3 });
        let unknown = Preamble { features: !0 << 3, ..newer };
        assert_eq!(unknown.choose(FEATURE_RECOVERY).features, 0, "what a newer release may ask for");
        let too_new = Preamble { low: 8, high: 9, features: 0 };
        assert_eq!(too_new.choose(0).low, 0);
        assert_eq!(Preamble::decode(&newer.encode()).unwrap(), newer);
        assert!(Preamble::decode(b"GET / HTTP/1.1\r\n").is_err());
    }

    #[test]
    fn a_refusal_is_believed_from_the_holder_of_the_secret_only() {
        let secret = Secret::random().unwrap();
        let bytes = Refusal::seal(&secret, &said());
        assert!(Refusal::verify(&bytes, &secret, &said()));
        assert!(!Refusal::verify(&bytes, &secret, &Transcript::new()));
        assert!(!Refusal::verify(&bytes[..REFUSAL - 1], &secret, &said()));
        for at in 0..REFUSAL {
            let mut changed = bytes;
            changed[at] ^= 1;
            assert!(!Refusal::verify(&changed, &secret, &said()), "byte {at}");
        }
    }

    #[test]
    fn a_label_cannot_smuggle_control_characters_into_a_log() {
        let mut bytes = [0_u8; LABEL];
        bytes[..6].copy_from_slice(b"a\n\x1b[0m");
        assert_eq!(read_label(&bytes), "a??[0m");
    }
}
