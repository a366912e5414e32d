//! The handshake, as the connecting side does it ([`handshake`](crate::session::handshake)).

use std::os::fd::AsRawFd;
use std::time::Instant;

use super::failure::{TURNED_AWAY_TEXT, refused};
use super::purpose::{Proved, Reached};
use super::{Dial, Stage, State, explain};
use crate::engine::poller::Registration;
use crate::os::error::{Error, Result};
use crate::session::handshake::{
    FEATURE_RECOVERY, GREETING, Hello, Preamble, Refusal, Secret, Transcript, VERSION_MAX, VERSION_MIN, WELCOME,
    Welcome, nonce,
};
use crate::session::lifeline::Answer;
use crate::session::link::Sock;
use crate::session::seal::agreement::{ANSWER, Offered};
use crate::session::seal::{is_encrypted, other_key};
use crate::session::wire::{self, Filled, send_all};
use crate::session::{liveness, tries};

/// The bytes exchanged so far.
pub(super) struct Exchange {
    transcript: Transcript,
    secret: Secret,
    features: u32,
    offered: Option<Offered>,
    /// The registration of a further stream. Made before the request to the peer to admit the stream.
    registration: Option<Registration>,
}

impl Exchange {
    /// Length of the next message from the listening side, in bytes.
    fn awaited(&self) -> usize {
        WELCOME + if self.offered.is_some() { ANSWER } else { 0 }
    }

    /// Whether the other side reported that its key differs.
    fn is_refused(&self, input: &[u8]) -> bool {
        self.offered.is_some() && Refusal::verify(input, &self.secret, &self.transcript)
    }
}

impl Dial {
    /// Advances the handshake. `Ok(None)`: it waits for the network.
    pub(super) fn advance(&self, state: &mut State) -> Result<Option<Reached>> {
        loop {
            let Some(sock) = &state.sock else { return Ok(None) };
            match &state.stage {
                Stage::Waiting(_) | Stage::Over => return Ok(None),
                Stage::Connecting => {
                    if let Some(error) = sock.take_error().unwrap_or(None) {
                        return Err(refused(&error));
                    }
                    if let Err(error) = sock.peer_addr() {
                        state.short = wire::is_shortage(&error);
                        return Ok(None);
                    }
                    self.purpose.answered(state.began, state.pair, Answer::Accepted);
                    // The path works: the handshake now waits for the peer's process, which may be busy.
                    let elapsed = state.began.elapsed();
                    let round_trip = Some(liveness::round_trip(sock)).filter(|it| !it.is_zero()).unwrap_or(elapsed);
                    state.try_until =
                        (Instant::now() + tries::handshake(self.purpose.hold(), round_trip)).min(self.deadline);
                    let features = self.net.features() | self.purpose.features();
                    let said = Preamble { low: VERSION_MIN, high: VERSION_MAX, features }.encode();
                    send_all(sock, &said)?;
                    state.stage = Stage::Greeting { said };
                }
                Stage::Greeting { said } => {
                    let filled = fill(sock, &mut state.input, GREETING, &mut state.short);
                    if filled.is_err() && state.input.is_empty() {
                        return Err(explain::not_towline(TURNED_AWAY_TEXT));
                    }
                    if !filled? {
                        return Ok(None);
                    }
                    let theirs = Preamble::decode(&state.input)?;
                    if theirs.low == 0 {
                        return Err(Error::usage(format!(
                            "the peer speaks protocol versions up to {}, this library {VERSION_MIN} to {VERSION_MAX}",
                            theirs.high
                        ))
                        .with_hint("use the same Towline release on all hosts"));
                    }
                    let mut transcript = Transcript::new();
                    transcript.add(said);
                    transcript.add(&state.input);
                    state.input.clear();
                    let (intent, secret) = self.purpose.intent(state.epoch, state.tries)?;
                    let is_called = theirs.features & FEATURE_RECOVERY != 0;
                    let rails = if is_called { self.purpose.addresses(&self.net) } else { Vec::new() };
                    let hello = Hello { intent, nonce: nonce()?, label: self.net.label.clone(), rails };
                    let mut bytes = hello.seal(&secret, &mut transcript).to_vec();
                    let encrypted = is_encrypted(theirs.features, self.net.features());
                    let mut offered = None;
                    if let (Ok(true), Some(key)) = (&encrypted, &self.net.key) {
                        let (started, offer) = Offered::new(key, transcript.bytes())?;
                        bytes.extend_from_slice(&offer);
                        transcript.add(&offer);
                        offered = Some(started);
                    }
                    let registration = self.purpose.register_socket(sock)?;
                    // Also when only one side has a key: the other side's error message must name this host.
                    send_all(sock, &bytes)?;
                    encrypted?;
                    state.stage = Stage::Welcome(Box::new(Exchange {
                        transcript,
                        secret,
                        features: theirs.features,
                        offered,
                        registration,
                    }));
                }
                Stage::Welcome(said) => {
                    let filled = fill(sock, &mut state.input, said.awaited(), &mut state.short);
                    if filled.is_err() && said.is_refused(&state.input) {
                        return Err(other_key());
                    }
                    if !filled? {
                        return Ok(None);
                    }
                    let Stage::Welcome(said) = std::mem::replace(&mut state.stage, Stage::Over) else {
                        unreachable!("matched above")
                    };
                    state.watch = None;
                    let sock = state.sock.take().expect("the handshake has its socket");
                    let peer = sock.peer_addr().ok().and_then(|address| address.as_socket());
                    // A stream stays on another pair than its own only for a time.
                    if let (Some(rail), Some(peer), false) = (&state.rail, peer, state.on_other_pair) {
                        self.net.outlets.connected(&sock, rail, peer, state.goes_unbound);
                    }
                    return self.welcomed(sock, &state.input, *said, state.epoch).map(Some);
                }
            }
        }
    }

    /// The other side has answered the hello: its proof is checked, and the owner gets the socket.
    fn welcomed(&self, sock: Sock, bytes: &[u8], said: Exchange, epoch: u16) -> Result<Reached> {
        let Exchange { mut transcript, secret, features, offered, registration } = said;
        let mut welcome = [0; WELCOME];
        let keys = match offered {
            None => {
                welcome.copy_from_slice(bytes);
                None
            }
            Some(offered) => Some(offered.take_answer(bytes, &mut welcome).ok_or_else(|| {
                Error::remote("the listening side could not prove that it has the key (TOWLINE_KEY_FILE)")
                    .with_hint("another program may have taken over the address of the peer")
            })?),
        };
        let key = secret.connection_key(transcript.bytes());
        let welcome = Welcome::open(&welcome, &secret, &mut transcript)?;
        self.purpose.reached(&self.net, Proved { welcome, key, features, keys, epoch, registration, sock })
    }
}

/// Reads until `wanted` bytes are there. `false`: some are missing; `short`: the kernel had no memory, try again soon.
fn fill(sock: &Sock, input: &mut Vec<u8>, wanted: usize, short: &mut bool) -> Result<bool> {
    match wire::fill(sock.as_raw_fd(), input, wanted) {
        Ok(Filled::Ended) => Err(Error::remote(TURNED_AWAY_TEXT)
            .with_hint("its log says why: a listener that is closed, another protocol, or a wrong secret")),
        Ok(filled) => {
            *short |= filled == Filled::Short;
            Ok(filled == Filled::Whole)
        }
        Err(error) => Err(Error::remote(format!("the handshake broke off: {error}"))),
    }
}
