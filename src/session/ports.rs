//! The listening sockets of the process.
//!
//! One listening socket per local address serves the whole process and outlives every `closeListen`. A handle names its
//! listener by an id derived from its secret, and streams that break later reconnect to the same socket.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::frame::MAX_STREAMS;
use super::handshake::Secret;
use super::link::{NO_PORT_HINT, Sock, new_socket};
use super::opening::Door;
use crate::engine::poller::{Interest, Poller, Progress, Registration, Source};
use crate::os::error::{Error, Result, advice};
use crate::os::fd::Registered;
use crate::os::interfaces::{Rail, duplicate};
use crate::os::log::{Limiter, NET};

/// System calls on one socket before the control thread serves the others.
pub(super) const AT_ONCE: usize = 64;

/// A listener that NCCL requested.
pub(crate) struct Listener {
    /// The secret in its handle.
    pub secret: Secret,
    /// The rails that its connections may use.
    pub rails: Arc<[Rail]>,
    /// The traffic class of the packets.
    pub traffic_class: Option<u8>,
    /// Creates its connections.
    pub(super) door: Arc<dyn Door>,
}

struct Port {
    address: SocketAddr,
    _registration: Registration,
}

/// How to treat a listening socket whose address does not exist at the moment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Absent {
    /// It listens anyway and can be used when the address is back.
    Awaited,
    /// Opening the socket fails.
    Refused,
}

/// Allows binding a socket to an address that does not exist now.
///
/// An interface that is taken down loses its IPv6 addresses. A connection gets its peer's addresses once, when it is
/// made. A rail that is down at that moment can be used later on two conditions: its port is already known, and a
/// socket listens there once the address is back. A device's only rail is treated differently: no other rail would
/// carry the connection, and `listen` can report the fault at once.
///
/// This is optional: if the system refuses it (a sandbox, an old kernel), a rail without an address is left out.
fn allow_absent(sock: &Sock, address: SocketAddr) {
    let _ = if address.is_ipv6() { sock.set_freebind_v6(true) } else { sock.set_freebind_v4(true) };
}

/// Handles the connections that arrive.
type TakeIn = Arc<dyn Fn(Sock, SocketAddr) + Send + Sync>;

/// Listening sockets, and the listeners that share them.
pub(super) struct Ports {
    take_in: TakeIn,
    ports: Mutex<HashMap<(IpAddr, u32), Port>>,
    listeners: Mutex<HashMap<u64, Arc<Listener>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ports {
    /// A state in which no socket listens yet.
    pub(super) fn new(take_in: TakeIn) -> Self {
        Self { take_in, ports: Mutex::default(), listeners: Mutex::default() }
    }

    /// The listener with this id.
    pub(super) fn listener(&self, id: u64) -> Option<Arc<Listener>> {
        lock(&self.listeners).get(&id).cloned()
    }

    /// Returns a listener on the given rails, and the addresses of their sockets.
    ///
    /// # Errors
    /// When no socket can be opened for any of them (for example, the only rail's interface has vanished).
    pub(super) fn listen(
        &self,
        poller: &Poller,
        rails: Arc<[Rail]>,
        traffic_class: Option<u8>,
        door: Arc<dyn Door>,
    ) -> Result<(Arc<Listener>, Vec<SocketAddr>)> {
        let first = rails.first().ok_or_else(|| Error::internal("a device without rails"))?;
        // If there are several rails, one whose socket cannot be opened is left out.
        let addresses = if rails.len() > 1 { self.addresses(poller, &rails) } else { Vec::new() };
        let addresses = if addresses.is_empty() { vec![self.port(poller, first, Absent::Refused)?] } else { addresses };
        let listener = Arc::new(Listener { secret: Secret::random()?, rails, traffic_class, door });
        lock(&self.listeners).insert(listener.secret.listener_id(), Arc::clone(&listener));
        Ok((listener, addresses))
    }

    /// Stops accepting connections for this listener, and ends those that were not accepted.
    pub(super) fn close(&self, listener: &Listener) {
        lock(&self.listeners).remove(&listener.secret.listener_id());
        listener.door.close();
    }

    /// The address of the process's socket on a rail, opening it at the first use.
    fn port(&self, poller: &Poller, rail: &Rail, absent: Absent) -> Result<SocketAddr> {
        let scope = match rail.address {
            SocketAddr::V6(v6) => v6.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        let mut ports = lock(&self.ports);
        if let Some(port) = ports.get(&(rail.address.ip(), scope)) {
            return Ok(port.address);
        }
        let opened = |absent: Absent| -> io::Result<Sock> {
            let sock = new_socket(rail.address)?;
            if absent == Absent::Awaited {
                allow_absent(&sock, rail.address);
            }
            sock.bind(&rail.address.into())?;
            sock.listen(16384)?;
            Ok(sock)
        };
        // An IPv6 address is also missing while the kernel still checks for duplicates, a second or two after it was
        // added. Peers keep trying until it is there.
        let is_new = |error: &io::Error| {
            error.kind() == io::ErrorKind::AddrNotAvailable && duplicate::is_tentative(rail.address.ip())
        };
        let sock = opened(absent).or_else(|error| if is_new(&error) { opened(Absent::Awaited) } else { Err(error) });
        let sock = sock.map_err(|error| {
            let hint = match error.kind() {
                io::ErrorKind::AddrInUse => NO_PORT_HINT,
                io::ErrorKind::AddrNotAvailable => {
                    "the interface has lost its address: look at the host's addresses (ip address)"
                }
                _ => "is the interface still up? choose another with NCCL_SOCKET_IFNAME",
            };
            Error::system(format!("listening on {} ({})", rail.name, rail.address.ip()), &error)
                .with_hint(advice(&error).unwrap_or(hint))
        })?;
        let address = sock.local_addr().map_err(|error| Error::system("asking for the port of a listener", &error))?;
        let address = address.as_socket();
        let address = address.ok_or_else(|| Error::internal("a listening socket without an address"))?;
        let fd = sock.as_raw_fd();
        let source = Arc::new(PortSource { take_in: Arc::clone(&self.take_in), sock });
        let registration = poller.control_thread()?.register(source, Some((fd, Interest::Read)))?;
        ports.insert((rail.address.ip(), scope), Port { address, _registration: registration });
        Ok(address)
    }

    /// The addresses where the process can be reached over these rails, now or when they are up again. A rail whose
    /// socket cannot be opened is left out.
    pub(super) fn addresses(&self, poller: &Poller, rails: &[Rail]) -> Vec<SocketAddr> {
        let absent = if rails.len() > 1 { Absent::Awaited } else { Absent::Refused };
        let address = |rail: &Rail| {
            let left_out = |error: &Error| {
                DROPPED.tell(|more| tracing::warn!(target: NET, "rail {} is left out: {error}{more}", rail.name));
            };
            self.port(poller, rail, absent).inspect_err(left_out).ok()
        };
        rails.iter().take(MAX_STREAMS).filter_map(address).collect()
    }
}

struct PortSource {
    take_in: TakeIn,
    sock: Sock,
}

static ACCEPT_TROUBLE: Limiter = Limiter::new();
static DROPPED: Limiter = Limiter::new();

impl Source for PortSource {
    fn poll(&self) -> Progress {
        // In between, the control thread serves the connections already accepted.
        for _ in 0..AT_ONCE {
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
                    (self.take_in)(sock, from.unwrap_or(unknown));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Progress { moved: true, again: None };
                }
                Err(error)
                    if error.kind() == io::ErrorKind::Interrupted
                        || error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Usually a lack of descriptors. The connection waits in the kernel's queue.
                    let why = advice(&error).map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"));
                    ACCEPT_TROUBLE.tell(|more| {
                        tracing::warn!(target: NET, "a connection cannot be accepted now: {why}{more}");
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
