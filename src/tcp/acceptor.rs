//! The listening side: sockets, handshakes, and who waits for whom.
//!
//! One listening socket per local address serves the whole process and outlives every `closeListen`: a handle says
//! which listener it means by an id made from its secret, and streams that break later come back to the same
//! socket. The keeper answers handshakes from `listen` on, whether or not `accept` has been called: NCCL 2.8 to
//! 2.11 connect on all sides before any of them accepts.
//!
//! Strangers cost little: an unproven connection holds a few hundred bytes, at most [`HALF_OPEN`] of them exist,
//! the oldest makes room for the newest, and each has [`PATIENCE`] to prove itself.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::handshake::{
    FEATURE_RECOVERY, GREETING, HELLO, Hello, PREAMBLE, Preamble, Secret, Transcript, Welcome, Wish, nonce,
};
use super::limits::MAX_STREAMS;
use super::net::{Link, Net, Sock, new_socket, tune};
use super::peer::Peer;
use super::receiver::RecvConn;
use super::wire::{self, Piece};
use crate::engine::poller::{Interest, Progress, Registration, Source};
use crate::os::error::{Error, Result};
use crate::os::fd::Registered;
use crate::os::interfaces::Rail;
use crate::os::log::{Limiter, NET};

/// Unproven connections at one time.
pub const HALF_OPEN: usize = 512;
/// How long one may take to prove itself.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A listener that NCCL asked for.
pub struct Listener {
    /// What its handle carries.
    pub secret: Secret,
    /// The rails that its connections may use.
    pub rails: Arc<[Rail]>,
    /// The packets' class of traffic.
    pub traffic_class: Option<u8>,
    accepted: Mutex<VecDeque<Arc<RecvConn>>>,
    arrived: Condvar,
}

impl Listener {
    fn queue(&self) -> MutexGuard<'_, VecDeque<Arc<RecvConn>>> {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next connection, if one has come.
    pub fn accept(&self) -> Option<Arc<RecvConn>> {
        self.queue().pop_front()
    }

    /// Waits for the next connection until `deadline`.
    pub fn accept_until(&self, deadline: Instant) -> Option<Arc<RecvConn>> {
        let mut queue = self.queue();
        loop {
            if let Some(conn) = queue.pop_front() {
                return Some(conn);
            }
            let rest = deadline.checked_duration_since(Instant::now())?;
            queue = self.arrived.wait_timeout(queue, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends connections that nobody accepted.
    fn abandon(&self) {
        for conn in self.queue().drain(..) {
            conn.close();
        }
    }
}

struct Port {
    address: SocketAddr,
    _registration: Registration,
}

/// Listening sockets and half-open handshakes of the process.
pub struct Acceptor {
    net: Weak<Net>,
    ports: Mutex<HashMap<(IpAddr, u32), Port>>,
    listeners: Mutex<HashMap<u64, Arc<Listener>>>,
    inbound: Mutex<VecDeque<Arc<Inbound>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Acceptor {
    /// Nothing listens yet.
    pub fn new(net: Weak<Net>) -> Self {
        Self {
            net,
            ports: Mutex::new(HashMap::new()),
            listeners: Mutex::new(HashMap::new()),
            inbound: Mutex::new(VecDeque::new()),
        }
    }

    /// A listener on the given rails: itself, and the address of the first rail's socket.
    ///
    /// # Errors
    /// When no socket can be bound to the first rail (the interface has vanished, say).
    pub fn listen(&self, rails: Arc<[Rail]>, traffic_class: Option<u8>) -> Result<(Arc<Listener>, SocketAddr)> {
        let first = rails.first().ok_or_else(|| Error::internal("a device without rails"))?;
        let address = self.port(first)?;
        let listener = Arc::new(Listener {
            secret: Secret::random()?,
            rails,
            traffic_class,
            accepted: Mutex::new(VecDeque::new()),
            arrived: Condvar::new(),
        });
        lock(&self.listeners).insert(listener.secret.listener_id(), Arc::clone(&listener));
        Ok((listener, address))
    }

    /// Takes no more connections for this listener, and ends those that nobody accepted.
    pub fn close(&self, listener: &Listener) {
        lock(&self.listeners).remove(&listener.secret.listener_id());
        listener.abandon();
    }

    /// The address of the process's socket on a rail, opening it at the first use.
    fn port(&self, rail: &Rail) -> Result<SocketAddr> {
        let scope = match rail.address {
            SocketAddr::V6(v6) => v6.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        let mut ports = lock(&self.ports);
        if let Some(port) = ports.get(&(rail.address.ip(), scope)) {
            return Ok(port.address);
        }
        let net = self.net.upgrade().ok_or_else(|| Error::internal("the transport is gone"))?;
        let opened = || -> io::Result<Sock> {
            let sock = new_socket(rail.address)?;
            sock.bind(&rail.address.into())?;
            sock.listen(16384)?;
            Ok(sock)
        };
        let sock = opened().map_err(|error| {
            Error::system(format!("listening on {} ({})", rail.name, rail.address.ip()), &error)
                .with_hint("is the interface still up? choose another with NCCL_SOCKET_IFNAME")
        })?;
        let address = sock.local_addr().ok().and_then(|address| address.as_socket());
        let address = address.ok_or_else(|| Error::internal("a listening socket without an address"))?;
        let fd = sock.as_raw_fd();
        let source = Arc::new(PortSource { net: self.net.clone(), sock });
        let registration = net.poller.keeper()?.register(source, Some((fd, Interest::Read)))?;
        ports.insert((rail.address.ip(), scope), Port { address, _registration: registration });
        Ok(address)
    }

    fn find_secret(&self, net: &Net, wish: Wish) -> Option<Secret> {
        match wish {
            Wish::Connect { listener } => lock(&self.listeners).get(&listener).map(|found| found.secret.clone()),
            Wish::Join { connection, .. } => net.connection(connection).map(|conn| conn.link().key.clone()),
        }
    }

    fn take_in(&self, net: &Arc<Net>, sock: Sock, from: SocketAddr) {
        let fd = sock.as_raw_fd();
        let inbound = Arc::new(Inbound {
            net: Arc::downgrade(net),
            from,
            deadline: Instant::now() + PATIENCE,
            state: Mutex::new(InboundState {
                sock: Some(sock),
                registration: None,
                input: Vec::new(),
                stage: Stage::Preamble,
            }),
        });
        let registered =
            net.poller.keeper().and_then(|keeper| keeper.register(inbound.clone(), Some((fd, Interest::Data))));
        match registered {
            Ok(registration) => {
                registration.kick();
                lock(&inbound.state).registration = Some(registration);
                let evicted = {
                    let mut all = lock(&self.inbound);
                    all.push_back(inbound);
                    if all.len() > HALF_OPEN { all.pop_front() } else { None }
                };
                if let Some(oldest) = evicted {
                    oldest.end();
                }
            }
            Err(error) => tracing::warn!(target: NET, "a connection from {from} was dropped: {error}"),
        }
    }

    fn finished(&self, inbound: &Inbound) {
        lock(&self.inbound).retain(|other| !std::ptr::eq(&raw const **other, inbound));
    }
}

struct PortSource {
    net: Weak<Net>,
    sock: Sock,
}

static ACCEPT_TROUBLE: Limiter = Limiter::new();
static STRANGERS: Limiter = Limiter::new();

impl Source for PortSource {
    fn poll(&self) -> Progress {
        let Some(net) = self.net.upgrade() else { return Progress::default() };
        for _ in 0..256 {
            let mut from = None;
            let accepted = Registered::open(|| {
                let (socket, address) = self.sock.accept()?;
                socket.set_nonblocking(true)?;
                from = address.as_socket();
                Ok(socket)
            });
            match accepted {
                Ok(sock) => {
                    let unknown = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);
                    net.acceptor.take_in(&net, sock, from.unwrap_or(unknown));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Progress { moved: true, again: None };
                }
                Err(error)
                    if error.kind() == io::ErrorKind::Interrupted
                        || error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Out of descriptors, mostly. The connection waits in the kernel's queue.
                    ACCEPT_TROUBLE.tell(|more| {
                        tracing::warn!(target: NET, "a connection cannot be accepted now: {error}{more}; raise the descriptor limit (ulimit -n)");
                    });
                    return Progress { moved: false, again: Some(Instant::now() + Duration::from_millis(100)) };
                }
            }
        }
        Progress { moved: true, again: Some(Instant::now()) }
    }

    fn fail(&self, error: Error) {
        tracing::error!(target: NET, "the listener failed: {error}");
    }
}

enum Stage {
    Preamble,
    Hello { features: u32, transcript: Transcript },
    Over,
}

struct InboundState {
    sock: Option<Sock>,
    registration: Option<Registration>,
    input: Vec<u8>,
    stage: Stage,
}

/// A connection that has not proved itself.
struct Inbound {
    net: Weak<Net>,
    from: SocketAddr,
    deadline: Instant,
    state: Mutex<InboundState>,
}

impl Inbound {
    fn end(&self) {
        let mut state = lock(&self.state);
        state.stage = Stage::Over;
        state.registration = None;
        state.sock = None;
    }

    /// Moves the handshake on. `Ok(true)`: it is over.
    fn advance(&self, net: &Arc<Net>) -> Result<bool> {
        let mut state = lock(&self.state);
        loop {
            let wanted = match state.stage {
                Stage::Preamble => PREAMBLE,
                Stage::Hello { .. } => HELLO,
                Stage::Over => return Ok(true),
            };
            if !fill(&mut state, wanted, self.from)? {
                return Ok(false);
            }
            let input = std::mem::take(&mut state.input);
            match std::mem::replace(&mut state.stage, Stage::Over) {
                Stage::Preamble => {
                    let theirs = Preamble::decode(&input)?;
                    let features = if net.config.recovery { FEATURE_RECOVERY } else { 0 };
                    let ours = theirs.choose(features);
                    let mut greeting = [0; GREETING];
                    greeting[..PREAMBLE].copy_from_slice(&ours.encode());
                    greeting[PREAMBLE..].copy_from_slice(&nonce()?);
                    say(&state, &greeting)?;
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
                    state.stage = Stage::Hello { features: ours.features, transcript };
                }
                Stage::Hello { features, mut transcript } => {
                    let bytes: &[u8; HELLO] = input[..].try_into().expect("exactly a hello was read");
                    let hello = Hello::decode(bytes)?;
                    let secret = net.acceptor.find_secret(net, hello.wish).ok_or_else(|| {
                        Error::remote("a handshake asked for a listener or connection that does not exist (any more)")
                            .with_hint("a rank of an earlier run may still be trying")
                    })?;
                    if !Hello::verify(bytes, &secret, &mut transcript) {
                        return Err(Error::remote("a peer could not prove that it holds the handle's secret"));
                    }
                    state.registration = None;
                    let sock = state.sock.take().expect("the handshake has its socket");
                    drop(state);
                    self.admit(net, sock, &hello, &secret, features, &mut transcript)?;
                    return Ok(true);
                }
                Stage::Over => return Ok(true),
            }
        }
    }

    /// The peer has proved itself: gives it what it asked for.
    fn admit(
        &self,
        net: &Arc<Net>,
        sock: Sock,
        hello: &Hello,
        secret: &Secret,
        features: u32,
        transcript: &mut Transcript,
    ) -> Result<()> {
        match hello.wish {
            Wish::Connect { listener } => {
                let listener = lock(&net.acceptor.listeners).get(&listener).cloned();
                let listener = listener.ok_or_else(|| Error::remote("the listener was closed during the handshake"))?;
                let key = secret.connection_key(transcript.bytes());
                let connection = u64::from_le_bytes(nonce()?[..8].try_into().expect("eight bytes"));
                let mut addresses = Vec::new();
                for rail in listener.rails.iter().take(MAX_STREAMS) {
                    match net.acceptor.port(rail) {
                        Ok(address) => addresses.push(address),
                        Err(error) => tracing::warn!(target: NET, "rail {} is left out: {error}", rail.name),
                    }
                }
                let link = Link {
                    connection,
                    key,
                    features,
                    remote: Vec::new(),
                    local: Arc::clone(&listener.rails),
                    traffic_class: listener.traffic_class,
                };
                tune(&sock, &net.config, link.traffic_class);
                let peer = Peer { label: hello.label.clone(), address: self.from };
                let conn = RecvConn::new(Arc::clone(net), link, peer);
                let welcome = Welcome { connection, received: 0, label: net.label.clone(), rails: addresses };
                send_all(&sock, &welcome.seal(secret, transcript))?;
                net.remember(&conn);
                conn.add_stream(0, 0, sock)?;
                tracing::debug!(target: NET, "connected from {}", conn.peer());
                listener.queue().push_back(conn);
                listener.arrived.notify_all();
            }
            Wish::Join { connection, stream, epoch } => {
                let conn = net.connection(connection).ok_or_else(|| Error::remote("the connection is closed"))?;
                let index = usize::from(stream);
                let received = conn.prepare_join(index, epoch).ok_or_else(|| {
                    Error::remote(format!("stream {stream} in epoch {epoch} is not one that may join now"))
                })?;
                tune(&sock, &net.config, conn.link().traffic_class);
                let welcome = Welcome { connection, received, label: net.label.clone(), rails: Vec::new() };
                send_all(&sock, &welcome.seal(secret, transcript))?;
                conn.add_stream(index, epoch, sock)?;
            }
        }
        Ok(())
    }
}

impl Source for Inbound {
    fn poll(&self) -> Progress {
        let Some(net) = self.net.upgrade() else { return Progress::default() };
        let late = Instant::now() >= self.deadline;
        match self.advance(&net) {
            Ok(false) if late => self.end(),
            Ok(false) => return Progress { moved: false, again: Some(self.deadline) },
            Ok(true) => {}
            Err(error) => {
                STRANGERS.tell(|more| {
                    tracing::warn!(target: NET, "refused a connection from {}: {error}{more}", self.from.ip());
                });
                self.end();
            }
        }
        net.acceptor.finished(self);
        Progress { moved: true, again: None }
    }

    fn fail(&self, error: Error) {
        tracing::error!(target: NET, "a handshake with {} failed: {error}", self.from);
        self.end();
    }
}

/// Reads until `wanted` bytes are there. `false`: not yet.
fn fill(state: &mut InboundState, wanted: usize, from: SocketAddr) -> Result<bool> {
    let Some(sock) = &state.sock else { return Ok(false) };
    let fd = sock.as_raw_fd();
    while state.input.len() < wanted {
        let mut bytes = [0_u8; HELLO];
        let room = &mut bytes[..wanted - state.input.len()];
        // SAFETY: the buffer is ours.
        match unsafe { wire::receive(fd, [Piece::of_mut(&mut []), Piece::of_mut(room)]) } {
            Ok(None) => return Ok(false),
            Ok(Some(0)) => {
                return Err(Error::remote("it was closed before its handshake was complete").with_peer(from.ip()));
            }
            Ok(Some(got)) => state.input.extend_from_slice(&bytes[..got]),
            Err(error) => return Err(Error::system("reading a handshake", &error)),
        }
    }
    Ok(true)
}

fn say(state: &InboundState, bytes: &[u8]) -> Result<()> {
    state.sock.as_ref().map_or(Ok(()), |sock| send_all(sock, bytes))
}

/// Sends a handshake message, which always fits the empty buffer of a new socket.
///
/// # Errors
/// When it does not fit after all, or the connection is gone.
pub fn send_all(sock: &Sock, bytes: &[u8]) -> Result<()> {
    // SAFETY: plain slices.
    let sent = unsafe { wire::send(sock.as_raw_fd(), [Piece::of(bytes), Piece::of(&[])]) };
    match sent {
        Ok(Some(count)) if count == bytes.len() => Ok(()),
        Ok(_) => Err(Error::remote("a handshake message did not fit the socket")),
        Err(error) => Err(Error::remote(format!("a handshake broke off: {error}"))),
    }
}
