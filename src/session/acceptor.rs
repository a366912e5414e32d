//! The listening side of handshakes.
//!
//! The control thread answers handshakes as soon as `listen` has been called, whether or not `accept` has been: NCCL
//! 2.8 to 2.11 connects on all sides before any side accepts.
//!
//! An unproven connection costs little: it holds a few hundred bytes, the number of them is bounded ([`HalfOpen`]), and
//! each has [`PATIENCE`] to prove itself. A connection that has proved itself leaves the half-open table before the
//! welcome is sent. From then on the peer may consider it established, so it lasts as long as its socket. A socket that
//! already holds bytes, or has ended, when it is accepted is handled at once, without being registered with epoll; most
//! port scans end there.

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use super::half_open::HalfOpen;
use super::handshake::{
    CLOSED, FEATURE_BARE, FEATURE_RECOVERY, GREETING, HELLO, Hello, Intent, PREAMBLE, Preamble, READY, Refusal, Secret,
    Transcript, Welcome, nonce,
};
use super::link::{Link, Sock, tune};
use super::liveness;
use super::net::{Accepts, Net};
use super::opening::Opening;
use super::owner::Joining;
use super::peer::Peer;
use super::ports::Listener;
use super::seal::agreement::{Accepted, Keys, OFFER};
use super::seal::{Seal, is_encrypted, other_key};
use super::shortage;
use super::tries::{self, PATIENCE};
use super::wire::{self, Filled, send_all};
use crate::engine::poller::{Interest, Progress, Registration, Source};
use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::os::key_file::SharedKey;
use crate::os::log::{Limiter, NET};

/// The half-open handshakes of the process.
struct Acceptor {
    me: Weak<Self>,
    inbound: Mutex<HalfOpen<Inbound>>,
}

/// The state that the connections of the process share, with an acceptor that answers handshakes.
pub(crate) fn net(config: Config, key: Option<SharedKey>) -> Arc<Net> {
    Net::new(config, key, Arc::new_cyclic(|me| Acceptor { me: me.clone(), inbound: Mutex::default() }))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The secret that authorises this request. None if the request names nothing known here.
fn find_secret(net: &Net, intent: Intent) -> Option<Secret> {
    match intent {
        Intent::Connect { listener } => net.listener(listener).map(|found| found.secret.clone()),
        Intent::Join { connection, .. } => {
            let live = net.listening(connection).map(|conn| conn.link().key.clone());
            live.or_else(|| net.closed(connection).map(|tombstone| tombstone.key))
        }
        Intent::Call { connection, .. } => net.connecting(connection).map(|conn| conn.link().key.clone()),
    }
}

impl Accepts for Acceptor {
    fn take_in(&self, net: &Arc<Net>, sock: Sock, from: SocketAddr) {
        let fd = sock.as_raw_fd();
        let patience = tries::handshake(PATIENCE, liveness::round_trip(&sock));
        let inbound = Arc::new_cyclic(|me| Inbound {
            me: me.clone(),
            net: Arc::downgrade(net),
            acceptor: self.me.clone(),
            from,
            state: Mutex::new(InboundState {
                deadline: Some(Instant::now() + patience),
                sock: Some(sock),
                registration: None,
                input: Vec::new(),
                stage: Stage::Preamble,
                short: false,
                left: false,
            }),
        });
        let evicted = lock(&self.inbound).come(Arc::clone(&inbound));
        if let Some(oldest) = evicted {
            oldest.end();
        }
        let _ = inbound.poll();
        if !inbound.has_socket() {
            return;
        }
        let registered = net
            .poller
            .control_thread()
            .and_then(|control_thread| control_thread.register(inbound.clone(), Some((fd, Interest::Data))));
        match registered {
            Ok(registration) => {
                registration.kick();
                lock(&inbound.state).registration = Some(registration);
            }
            Err(error) => {
                DROPPED.tell(|more| tracing::warn!(target: NET, "a connection from {from} was dropped: {error}{more}"));
                inbound.end();
                self.finished(&inbound);
            }
        }
    }
}

impl Acceptor {
    fn greeted(&self, inbound: &Inbound) {
        let evicted = lock(&self.inbound).greet(inbound);
        if let Some(oldest) = evicted {
            oldest.end();
        }
    }

    fn finished(&self, inbound: &Inbound) {
        lock(&self.inbound).leave(inbound);
    }
}

static STRANGERS: Limiter = Limiter::new();
static DROPPED: Limiter = Limiter::new();

enum Stage {
    Preamble,
    Hello {
        theirs: u32,
        features: u32,
        transcript: Transcript,
    },
    /// The welcome is on its way; the peer confirms when it has received it.
    Ready {
        conn: Arc<dyn Opening>,
        seal: Seal,
        recovers: bool,
    },
    /// The socket broke after the welcome was sent. If the peer has received it, it connects its stream again and must
    /// find the connection.
    AwaitsReturn {
        conn: Arc<dyn Opening>,
    },
    Over,
}

struct InboundState {
    sock: Option<Sock>,
    registration: Option<Registration>,
    input: Vec<u8>,
    stage: Stage,
    /// The kernel had no memory for a call; the call is repeated.
    short: bool,
    /// The other side has ended the socket.
    left: bool,
    /// When the socket is dropped. None once the welcome has been sent: the connection then lasts as long as its
    /// socket.
    deadline: Option<Instant>,
}

/// A connection whose handshake is not over.
struct Inbound {
    me: Weak<Self>,
    net: Weak<Net>,
    acceptor: Weak<Acceptor>,
    from: SocketAddr,
    state: Mutex<InboundState>,
}

impl Inbound {
    fn end(&self) {
        let mut state = lock(&self.state);
        state.stage = Stage::Over;
        state.registration = None;
        state.sock = None;
    }

    /// It has proved itself, or it has ended.
    fn leave(&self) {
        self.acceptor.upgrade().inspect(|acceptor| acceptor.finished(self));
    }

    fn deadline(&self) -> Option<Instant> {
        lock(&self.state).deadline
    }

    /// Whether a Towline process has ended the socket itself: a peer that only tested whether this process is alive, or
    /// that connected a stream and no longer needs the answer.
    fn was_given_up(&self) -> bool {
        let state = lock(&self.state);
        state.left && !matches!(state.stage, Stage::Preamble)
    }

    fn has_socket(&self) -> bool {
        lock(&self.state).sock.is_some()
    }

    /// The socket broke. Returns whether its connection is kept until the deadline, so that the peer can reconnect to
    /// it.
    fn outlives_its_socket(&self, net: &Net) -> bool {
        let mut state = lock(&self.state);
        let stage = std::mem::replace(&mut state.stage, Stage::Over);
        let (Stage::Ready { conn, recovers: true, .. } | Stage::AwaitsReturn { conn }) = stage else { return false };
        state.registration = None;
        state.sock = None;
        let Some(me) = self.me.upgrade() else { return false };
        let Ok(clock) = net.poller.control_thread().and_then(|control_thread| control_thread.register(me, None)) else {
            return false;
        };
        // A new registration is polled once, which arms the deadline.
        clock.kick();
        state.registration = Some(clock);
        state.stage = Stage::AwaitsReturn { conn };
        state.deadline = Some(Instant::now() + net.config.peer_timeout);
        true
    }

    /// Advances the handshake. `Ok(true)`: it is finished.
    fn advance(&self, net: &Arc<Net>) -> Result<bool> {
        let mut state = lock(&self.state);
        loop {
            let wanted = match state.stage {
                Stage::Preamble => PREAMBLE,
                Stage::Hello { theirs, features, .. } => {
                    HELLO + if is_encrypted(theirs, features).unwrap_or(false) { OFFER } else { 0 }
                }
                Stage::Ready { .. } => READY,
                Stage::AwaitsReturn { ref conn } => return Ok(!conn.is_waiting()),
                Stage::Over => return Ok(true),
            };
            if !fill(&mut state, wanted, self.from)? {
                return Ok(false);
            }
            let input = std::mem::take(&mut state.input);
            match std::mem::replace(&mut state.stage, Stage::Over) {
                Stage::Preamble => {
                    let theirs = Preamble::decode(&input)?;
                    let ours = theirs.choose(net.features() | FEATURE_BARE);
                    let mut greeting = [0; GREETING];
                    greeting[..PREAMBLE].copy_from_slice(&ours.encode());
                    greeting[PREAMBLE..].copy_from_slice(&nonce()?);
                    write(&state, &greeting)?;
                    self.acceptor.upgrade().inspect(|acceptor| acceptor.greeted(self));
                    if ours.low == 0 {
                        return Err(Error::remote(format!(
                            "a peer speaks protocol versions {} to {}, this library {} to {}",
                            theirs.low,
                            theirs.high,
                            super::handshake::VERSION_MIN,
                            super::handshake::VERSION_MAX
                        ))
                        .with_hint("use the same Towline release on all hosts"));
                    }
                    let mut transcript = Transcript::new();
                    transcript.add(&input);
                    transcript.add(&greeting);
                    state.stage = Stage::Hello { theirs: theirs.features, features: ours.features, transcript };
                }
                Stage::Hello { theirs, features, mut transcript } => {
                    let (bytes, offer) = input.split_at(HELLO);
                    let bytes: &[u8; HELLO] = bytes.try_into().expect("a hello was read");
                    let hello = Hello::decode(bytes)?;
                    let Some(secret) = find_secret(net, hello.intent) else {
                        if !matches!(hello.intent, Intent::Connect { .. }) {
                            // Usual where one side closed while the other's stream was disconnected.
                            tracing::debug!(target: NET, "a stream from {} belongs to no connection any more", self.from);
                            state.registration = None;
                            state.sock = None;
                            return Ok(true);
                        }
                        return Err(Error::remote("a handshake asked for a listener that does not exist (any more)")
                            .with_hint("a rank of an earlier run may still be trying"));
                    };
                    if !Hello::verify(bytes, &secret, &mut transcript) {
                        return Err(Error::remote("a peer could not prove that it holds the handle's secret"));
                    }
                    // The connection has proved itself, so a flood of strangers cannot evict it.
                    self.leave();
                    let agreed = self.agree(net, theirs, features, offer, &transcript);
                    transcript.add(offer);
                    let accepted = match agreed {
                        Ok(accepted) => accepted,
                        Err(error) => {
                            if !offer.is_empty() {
                                write(&state, &Refusal::seal(&secret, &transcript))?;
                            }
                            let error = error.with_peer(Peer { label: hello.label, address: self.from });
                            if let Intent::Connect { listener } = hello.intent
                                && let Some(listener) = net.listener(listener)
                            {
                                listener.door.turn_away(error.clone());
                            }
                            return Err(error);
                        }
                    };
                    let registration = state.registration.take();
                    let sock = state.sock.take().expect("the handshake has its socket");
                    drop(state);
                    let settled = Settled { secret, features, transcript, accepted };
                    if !matches!(hello.intent, Intent::Connect { .. }) {
                        drop(registration);
                        self.admit(net, sock, &hello, settled)?;
                        return Ok(true);
                    }
                    let (conn, seal) = self.welcome(net, &sock, &hello, settled)?;
                    if features & FEATURE_BARE != 0 {
                        drop(registration);
                        conn.begin(sock, seal)?;
                        return Ok(true);
                    }
                    let ready = Stage::Ready { conn, seal, recovers: features & FEATURE_RECOVERY != 0 };
                    state = lock(&self.state);
                    (state.sock, state.registration, state.stage) = (Some(sock), registration, ready);
                    // The peer considers the connection established once it has the welcome, but its process may be
                    // stopped before it confirms. If its host is gone, the kernel's probes end the socket.
                    state.deadline = None;
                }
                Stage::Ready { conn, seal, recovers } => {
                    state.registration = None;
                    let sock = state.sock.take().expect("the handshake has its socket");
                    drop(state);
                    if let Err(error) = Arc::clone(&conn).begin(sock, seal) {
                        // The peer considers this connection established, so the listener must get it, or the error.
                        if recovers {
                            lock(&self.state).stage = Stage::AwaitsReturn { conn };
                        } else {
                            conn.refuse(error.clone());
                        }
                        return Err(error);
                    }
                    return Ok(true);
                }
                Stage::AwaitsReturn { .. } | Stage::Over => return Ok(true),
            }
        }
    }

    /// Applies the key files of the two sides to this connection.
    ///
    /// # Errors
    /// When only one side has a key file, or the files differ.
    fn agree(
        &self,
        net: &Net,
        theirs: u32,
        features: u32,
        offer: &[u8],
        transcript: &Transcript,
    ) -> Result<Option<Accepted>> {
        if !is_encrypted(theirs, features)? {
            return Ok(None);
        }
        let key = net.key.as_ref().ok_or_else(|| Error::internal("encryption without a key"))?;
        Accepted::new(key, transcript.bytes(), offer)?.ok_or_else(other_key).map(Some)
    }

    /// The peer of a connection has proved itself: handles its request.
    fn admit(&self, net: &Arc<Net>, sock: Sock, hello: &Hello, mut settled: Settled) -> Result<()> {
        let welcome =
            |connection, received| Welcome { connection, received, label: net.label.clone(), rails: Vec::new() };
        match hello.intent {
            Intent::Connect { .. } => unreachable!("this makes a new connection"),
            Intent::Join { connection, stream, epoch } => {
                if let Some(tombstone) = net.closed(connection) {
                    settled.welcome(&sock, &welcome(connection, tombstone.received | CLOSED))?;
                    net.linger(sock);
                    return Ok(());
                }
                let conn = net.listening(connection).ok_or_else(|| Error::remote("the connection is closed"))?;
                let traffic_class = conn.link().traffic_class;
                let mut admit = |sock: &Sock, received: u64| {
                    tune(sock, &net.config, traffic_class, false);
                    settled.welcome(sock, &welcome(connection, received))
                };
                conn.join(Joining { stream: usize::from(stream), epoch, sock, welcome: &mut admit })
            }
            Intent::Call { connection, stream, epoch } => {
                // A failed connection does not reconnect, even if NCCL has not closed it yet, so the caller must not
                // wait.
                let conn = net.connecting(connection).filter(|conn| conn.goes_on());
                let conn = conn.ok_or_else(|| Error::remote("the connection is closed"))?;
                settled.welcome(&sock, &welcome(connection, 0))?;
                net.linger(sock);
                conn.called(usize::from(stream), epoch);
                Ok(())
            }
        }
    }

    /// Makes a connection and welcomes the peer.
    fn welcome(&self, net: &Net, sock: &Sock, hello: &Hello, mut settled: Settled) -> Result<(Arc<dyn Opening>, Seal)> {
        let (listener, link, welcome) = self.settle(net, sock, hello, &settled)?;
        tune(sock, &net.config, link.traffic_class, false);
        let features = link.features;
        let conn = listener.door.open(link, Peer { label: hello.label.clone(), address: self.from });
        let keys = settled.welcome(sock, &welcome)?;
        let seal = Seal::of(features, keys)?;
        Ok((conn, seal))
    }

    /// The properties of a new connection.
    fn settle(
        &self,
        net: &Net,
        sock: &Sock,
        hello: &Hello,
        settled: &Settled,
    ) -> Result<(Arc<Listener>, Link, Welcome)> {
        let Intent::Connect { listener } = hello.intent else {
            unreachable!("only a handshake for a new connection comes here")
        };
        let listener =
            net.listener(listener).ok_or_else(|| Error::remote("the listener was closed during the handshake"))?;
        // The handle names the backend, so this peer ignored its handle.
        if (settled.features & FEATURE_BARE != 0) != listener.door.is_bare() {
            return Err(Error::remote("a peer asked for the other backend than its handle says"));
        }
        let key = settled.secret.connection_key(settled.transcript.bytes());
        let connection = u64::from_le_bytes(nonce()?[..8].try_into().expect("eight bytes"));
        let rails = net.addresses(&listener.rails);
        let link = Link {
            connection,
            key,
            features: settled.features,
            remote: hello.rails.clone(),
            local: Arc::clone(&listener.rails),
            traffic_class: listener.traffic_class,
            round_trip: liveness::distance(sock),
        };
        let welcome = Welcome { connection, received: 0, label: net.label.clone(), rails };
        Ok((listener, link, welcome))
    }
}

/// The result of a handshake that lacks only the welcome.
struct Settled {
    secret: Secret,
    features: u32,
    transcript: Transcript,
    accepted: Option<Accepted>,
}

impl Settled {
    /// Sends the welcome. Returns the keys if the stream is encrypted.
    fn welcome(&mut self, sock: &Sock, welcome: &Welcome) -> Result<Option<Keys>> {
        let bytes = welcome.seal(&self.secret, &mut self.transcript);
        let Some(accepted) = self.accepted.take() else {
            send_all(sock, &bytes)?;
            return Ok(None);
        };
        let (answer, keys) = accepted.answer(&bytes)?;
        send_all(sock, &answer)?;
        Ok(Some(keys))
    }
}

impl Source for Inbound {
    fn poll(&self) -> Progress {
        let Some(net) = self.net.upgrade() else { return Progress::default() };
        let now = Instant::now();
        match self.advance(&net) {
            Ok(false) if self.deadline().is_some_and(|deadline| now >= deadline) => self.end(),
            Ok(false) => {
                let short = std::mem::take(&mut lock(&self.state).short);
                let soon = short.then(|| Instant::now() + shortage::PAUSE);
                return Progress { moved: false, again: soon.or_else(|| self.deadline()) };
            }
            // This includes a connection that waited without a socket for its peer, if the peer has reconnected over
            // another socket.
            Ok(true) => self.end(),
            Err(error) => {
                if self.was_given_up() {
                    tracing::info!(target: NET, "{} gave up a connection: {error}", self.from);
                } else {
                    STRANGERS.tell(|more| {
                        tracing::warn!(target: NET, "refused a connection from {}: {error}{more}", self.from.ip());
                    });
                }
                if self.outlives_its_socket(&net) {
                    return Progress { moved: true, again: self.deadline() };
                }
                self.end();
            }
        }
        self.leave();
        Progress { moved: true, again: None }
    }

    fn fail(&self, error: Error) {
        tracing::error!(target: NET, "a handshake with {} failed: {error}", self.from);
        self.end();
    }
}

/// Reads until `wanted` bytes are there. `false`: some are missing.
fn fill(state: &mut InboundState, wanted: usize, from: SocketAddr) -> Result<bool> {
    let Some(sock) = &state.sock else { return Ok(false) };
    match wire::fill(sock.as_raw_fd(), &mut state.input, wanted) {
        Ok(Filled::Ended) => {
            state.left = true;
            Err(Error::remote("it was closed before its handshake was complete").with_peer(from.ip()))
        }
        Ok(filled) => {
            state.short |= filled == Filled::Short;
            Ok(filled == Filled::Whole)
        }
        Err(error) => {
            state.left = super::lifeline::is_cut(&error);
            Err(Error::system("reading a handshake", &error))
        }
    }
}

fn write(state: &InboundState, bytes: &[u8]) -> Result<()> {
    state.sock.as_ref().map_or(Ok(()), |sock| send_all(sock, bytes))
}
