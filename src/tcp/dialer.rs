//! The connecting side: new connections, further streams, and streams that come back after a break.
//!
//! A [`Dial`] is one wish to be connected. The keeper drives it: connect, handshake, and on failure another try,
//! over the next rail, until its deadline. The connecting side alone connects again after a break.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::acceptor::send_all;
use super::handshake::{
    FEATURE_RECOVERY, GREETING, Hello, PREAMBLE, Preamble, Secret, Transcript, VERSION_MAX, VERSION_MIN, WELCOME,
    Welcome, Wish, nonce,
};
use super::net::{Link, Net, Sock, new_socket, tune};
use super::peer::Peer;
use super::sender::SendConn;
use super::wire::{self, Piece};
use crate::engine::poller::{Interest, Progress, Registration, Source};
use crate::os::error::{Error, Result};
use crate::os::interfaces::Rail;
use crate::os::log::NET;

/// How long one try may take, from the first packet to the welcome, when there will be another.
const TRY: Duration = Duration::from_secs(3);

/// A peer that refuses on every rail for this long has died: its listeners outlive every connection.
const REFUSED: Duration = Duration::from_secs(1);

/// Where to go and what to say there.
pub struct Target {
    /// The address in the handle, and the secret behind it.
    pub address: SocketAddr,
    /// What the handle carries.
    pub secret: Secret,
    /// This side's rails.
    pub rails: Arc<[Rail]>,
    /// The packets' class of traffic.
    pub traffic_class: Option<u8>,
}

enum Purpose {
    Connect(Target),
    Join { conn: Weak<SendConn>, index: usize },
}

enum Stage {
    Waiting(Instant),
    Connecting,
    Greeting { said: [u8; PREAMBLE] },
    Welcome { transcript: Transcript, features: u32 },
    Over,
}

struct State {
    stage: Stage,
    sock: Option<Sock>,
    watch: Option<Registration>,
    clock: Option<Registration>,
    input: Vec<u8>,
    tries: u32,
    try_until: Instant,
    refused_since: Option<Instant>,
    epoch: u16,
    /// Why the last try failed: more telling than that the deadline cut off the next one.
    last_failure: Option<Error>,
    result: Option<Result<Arc<SendConn>>>,
}

/// A wish to be connected.
pub struct Dial {
    me: Weak<Self>,
    net: Arc<Net>,
    purpose: Purpose,
    deadline: Instant,
    state: Mutex<State>,
    settled: Condvar,
}

impl Dial {
    /// Starts connecting to a listener.
    ///
    /// # Errors
    /// When the keeper cannot be started.
    pub fn connect(net: Arc<Net>, target: Target) -> Result<Arc<Self>> {
        let deadline = Instant::now() + net.config.connect_timeout;
        Self::start(net, Purpose::Connect(target), deadline, 0)
    }

    /// Starts connecting stream `index` of a connection, in the given epoch.
    pub fn join(net: Arc<Net>, conn: &Arc<SendConn>, index: usize, epoch: u16) {
        let deadline = Instant::now() + net.config.reconnect_timeout;
        let purpose = Purpose::Join { conn: Arc::downgrade(conn), index };
        if let Err(error) = Self::start(net, purpose, deadline, epoch) {
            conn.gave_up(index, &error);
        }
    }

    fn start(net: Arc<Net>, purpose: Purpose, deadline: Instant, epoch: u16) -> Result<Arc<Self>> {
        let now = Instant::now();
        let dial = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            net,
            purpose,
            deadline,
            state: Mutex::new(State {
                stage: Stage::Waiting(now),
                sock: None,
                watch: None,
                clock: None,
                input: Vec::new(),
                tries: 0,
                try_until: now,
                refused_since: None,
                epoch,
                last_failure: None,
                result: None,
            }),
            settled: Condvar::new(),
        });
        let clock = dial.net.poller.keeper()?.register(dial.clone(), None)?;
        // Kept before the first kick: a dial that is over drops its registrations, all of them.
        dial.lock().clock.insert(clock).kick();
        Ok(dial)
    }

    /// The connection, when it is there; the failure, when it will not be.
    pub fn result(&self) -> Option<Result<Arc<SendConn>>> {
        self.lock().result.clone()
    }

    /// Waits until the dial has succeeded or failed; it has a deadline of its own.
    ///
    /// # Errors
    /// As the dial failed.
    pub fn wait(&self) -> Result<Arc<SendConn>> {
        let mut state = self.lock();
        loop {
            if let Some(result) = &state.result {
                return result.clone();
            }
            state =
                self.settled.wait_timeout(state, Duration::from_millis(500)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives up: whoever wanted the connection has gone.
    pub fn cancel(&self) {
        let mut state = self.lock();
        let unused = state.result.take();
        self.finish(&mut state, Err(Error::usage("the connection attempt was abandoned")));
        drop(state);
        if let Some(Ok(conn)) = unused {
            conn.close();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, state: &mut State, result: Result<Arc<SendConn>>) {
        state.stage = Stage::Over;
        state.watch = None;
        state.sock = None;
        state.clock = None;
        state.result = Some(result);
        self.settled.notify_all();
    }

    /// Source and destination of the given try. Each try takes the next pair of rails; a stream starts with its
    /// own, so that the streams of a connection spread over all of them.
    fn route(&self, attempt: u32) -> Option<(Option<Rail>, SocketAddr)> {
        match &self.purpose {
            Purpose::Connect(target) => {
                let local = (target.rails.len() > 1).then(|| target.rails[0].clone());
                Some((local, localise(target.address, target.rails.first())))
            }
            Purpose::Join { conn, index, .. } => {
                let conn = conn.upgrade()?;
                let link = conn.link();
                let at = index + attempt as usize;
                let remote = *link.remote.get(at % link.remote.len().max(1))?;
                let local = link.local.get(at % link.local.len().max(1));
                let bound = (link.local.len() > 1).then(|| local.cloned()).flatten();
                Some((bound, localise(remote, local)))
            }
        }
    }

    fn begin(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let (local, remote) = self.route(state.tries).ok_or(io::ErrorKind::NotConnected)?;
        state.tries += 1;
        state.try_until = (Instant::now() + TRY).min(self.deadline);
        let sock = new_socket(remote)?;
        if let Some(rail) = local.filter(|rail| rail.address.is_ipv4() == remote.is_ipv4()) {
            sock.bind(&rail.address.into())?;
        }
        let class = match &self.purpose {
            Purpose::Connect(target) => target.traffic_class,
            Purpose::Join { conn, .. } => conn.upgrade().and_then(|conn| conn.link().traffic_class),
        };
        tune(&sock, &self.net.config, class);
        match sock.connect(&remote.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => return Err(error),
        }
        let fd = sock.as_raw_fd();
        let keeper = self.net.poller.keeper().map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let watch = keeper.register(self.clone(), Some((fd, Interest::Data)));
        state.watch = Some(watch.map_err(|error| io::Error::other(error.to_string()))?);
        state.sock = Some(sock);
        state.stage = Stage::Connecting;
        Ok(())
    }

    /// Moves the handshake on. `Ok(None)`: it waits for the network.
    fn advance(&self, state: &mut State) -> Result<Option<Arc<SendConn>>> {
        loop {
            let Some(sock) = &state.sock else { return Ok(None) };
            match &state.stage {
                Stage::Waiting(_) | Stage::Over => return Ok(None),
                Stage::Connecting => {
                    if let Some(error) = sock.take_error().unwrap_or(None) {
                        return Err(refused(&error));
                    }
                    if sock.peer_addr().is_err() {
                        return Ok(None);
                    }
                    let features = if self.net.config.recovery { FEATURE_RECOVERY } else { 0 };
                    let said = Preamble { low: VERSION_MIN, high: VERSION_MAX, features }.encode();
                    send_all(sock, &said)?;
                    state.stage = Stage::Greeting { said };
                }
                Stage::Greeting { said } => {
                    if !fill(sock, &mut state.input, GREETING)? {
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
                    let (wish, secret) = self.wish(state.epoch)?;
                    let hello = Hello { wish, nonce: nonce()?, label: self.net.label.clone() };
                    send_all(sock, &hello.seal(&secret, &mut transcript))?;
                    state.stage = Stage::Welcome { transcript, features: theirs.features };
                }
                Stage::Welcome { .. } => {
                    if !fill(sock, &mut state.input, WELCOME)? {
                        return Ok(None);
                    }
                    let Stage::Welcome { mut transcript, features } = std::mem::replace(&mut state.stage, Stage::Over)
                    else {
                        unreachable!("matched above")
                    };
                    state.watch = None;
                    let sock = state.sock.take().expect("the handshake has its socket");
                    return self.connected(sock, &state.input, &mut transcript, features, state.epoch).map(Some);
                }
            }
        }
    }

    fn wish(&self, epoch: u16) -> Result<(Wish, Secret)> {
        match &self.purpose {
            Purpose::Connect(target) => {
                Ok((Wish::Connect { listener: target.secret.listener_id() }, target.secret.clone()))
            }
            Purpose::Join { conn, index, .. } => {
                let conn = conn.upgrade().ok_or_else(|| Error::usage("the connection is closed"))?;
                let link = conn.link();
                let wish = Wish::Join { connection: link.connection, stream: *index as u16, epoch };
                Ok((wish, link.key.clone()))
            }
        }
    }

    fn connected(
        &self,
        sock: Sock,
        bytes: &[u8],
        transcript: &mut Transcript,
        features: u32,
        epoch: u16,
    ) -> Result<Arc<SendConn>> {
        let bytes = bytes.try_into().expect("exactly a welcome was read");
        match &self.purpose {
            Purpose::Connect(target) => {
                let key = target.secret.connection_key(transcript.bytes());
                let welcome = Welcome::open(bytes, &target.secret, transcript)?;
                let link = Link {
                    connection: welcome.connection,
                    key,
                    features,
                    remote: welcome.rails,
                    local: Arc::clone(&target.rails),
                    traffic_class: target.traffic_class,
                };
                let peer = Peer { label: welcome.label, address: target.address };
                tracing::debug!(target: NET, "connected to {peer}");
                SendConn::new(Arc::clone(&self.net), link, peer, sock)
            }
            Purpose::Join { conn, index, .. } => {
                let conn = conn.upgrade().ok_or_else(|| Error::usage("the connection is closed"))?;
                let welcome = Welcome::open(bytes, &conn.link().key, transcript)?;
                conn.rejoined(*index, epoch, welcome.received, sock)?;
                Ok(conn)
            }
        }
    }

    /// A try failed: another one later, or the end.
    fn failed(&self, state: &mut State, error: Error) -> Progress {
        let now = Instant::now();
        state.watch = None;
        state.sock = None;
        state.input.clear();
        if error.what().starts_with(REFUSED_TEXT) {
            state.refused_since.get_or_insert(now);
        } else {
            state.refused_since = None;
        }
        let dead = state.refused_since.is_some_and(|since| now - since > REFUSED);
        let hopeless = error.cause() == crate::os::error::Cause::Usage;
        if now >= self.deadline || dead || hopeless {
            let error = match &self.purpose {
                Purpose::Connect(target) => error.with_peer(target.address),
                Purpose::Join { .. } => error,
            };
            if let Purpose::Join { conn, index, .. } = &self.purpose
                && let Some(conn) = conn.upgrade()
            {
                conn.gave_up(*index, &error);
            }
            self.finish(state, Err(error));
            return Progress { moved: true, again: None };
        }
        state.last_failure = Some(error);
        // A new life for every try: the peer may have taken the last one for good before its welcome was lost.
        state.epoch = state.epoch.wrapping_add(u16::from(matches!(self.purpose, Purpose::Join { .. })));
        let pause = Duration::from_millis(10 << state.tries.min(5));
        state.stage = Stage::Waiting(now + pause);
        Progress { moved: false, again: Some(now + pause) }
    }

    fn drive(self: &Arc<Self>) -> Progress {
        let mut state = self.lock();
        let now = Instant::now();
        if let Purpose::Join { conn, .. } = &self.purpose
            && conn.upgrade().is_none_or(|conn| conn.is_over())
        {
            self.finish(&mut state, Err(Error::usage("the connection is closed")));
            return Progress::default();
        }
        if let Stage::Waiting(until) = state.stage {
            if now < until {
                return Progress { moved: false, again: Some(until) };
            }
            if let Err(error) = self.begin(&mut state) {
                return self.failed(&mut state, refused(&error));
            }
        }
        match self.advance(&mut state) {
            Ok(Some(conn)) => {
                self.finish(&mut state, Ok(conn));
                Progress { moved: true, again: None }
            }
            Ok(None) if matches!(state.stage, Stage::Over) => Progress::default(),
            Ok(None) if now >= state.try_until => {
                let cut_off = state.last_failure.take().filter(|_| now >= self.deadline);
                let error = cut_off.unwrap_or_else(|| Error::remote("the peer did not answer").with_hint(
                    "check that the hosts can reach each other on the chosen interfaces (NCCL_SOCKET_IFNAME), and their firewalls",
                ));
                self.failed(&mut state, error)
            }
            Ok(None) => Progress { moved: false, again: Some(state.try_until) },
            Err(error) => self.failed(&mut state, error),
        }
    }
}

/// The dial as the keeper sees it.
impl Source for Dial {
    fn poll(&self) -> Progress {
        // The source needs itself to register the next socket; whoever polls it holds it.
        self.me.upgrade().map_or_else(Progress::default, |me| me.drive())
    }

    fn fail(&self, error: Error) {
        let mut state = self.lock();
        self.finish(&mut state, Err(error));
    }
}

const REFUSED_TEXT: &str = "the peer refused the connection";

fn refused(error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::ConnectionRefused {
        return Error::remote(REFUSED_TEXT).with_hint("its process may have ended; look at its log");
    }
    Error::remote(format!("connecting failed: {error}"))
        .with_hint("check that the hosts can reach each other on the chosen interfaces (NCCL_SOCKET_IFNAME)")
}

/// A link-local address is reached through this side's interface, whatever the number of the other side's is.
fn localise(remote: SocketAddr, rail: Option<&Rail>) -> SocketAddr {
    match (remote, rail) {
        (SocketAddr::V6(mut v6), Some(rail)) if v6.ip().is_unicast_link_local() => {
            v6.set_scope_id(rail.index);
            SocketAddr::V6(v6)
        }
        _ => remote,
    }
}

/// Reads until `wanted` bytes are there. `false`: not yet.
fn fill(sock: &Sock, input: &mut Vec<u8>, wanted: usize) -> Result<bool> {
    while input.len() < wanted {
        let mut bytes = [0_u8; WELCOME];
        let room = &mut bytes[..wanted - input.len()];
        // SAFETY: the buffer is ours.
        match unsafe { wire::receive(sock.as_raw_fd(), [Piece::of_mut(&mut []), Piece::of_mut(room)]) } {
            Ok(None) => return Ok(false),
            Ok(Some(0)) => {
                return Err(Error::remote("the peer closed the connection during the handshake")
                    .with_hint("its log says why: a listener that is closed, another protocol, or a wrong secret"));
            }
            Ok(Some(got)) => input.extend_from_slice(&bytes[..got]),
            Err(error) => return Err(Error::remote(format!("the handshake broke off: {error}"))),
        }
    }
    Ok(true)
}
