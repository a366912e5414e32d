//! The parts that all connections of the process share: threads, configuration, listeners, and the sockets of closed
//! connections that the peer has not closed yet.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::frame::MAX_STREAMS;
use super::handshake::{FEATURE_CHECKSUM, FEATURE_ENCRYPTION, FEATURE_FAR, FEATURE_RECOVERY};
use super::lifeline::CALL_AFTER;
use super::link::{Link, Sock};
use super::liveness;
use super::opening::Door;
use super::outlet::Outlets;
use super::owner::{ConnectingSide, ListeningSide};
use super::ports::{AT_ONCE, Listener, Ports};
use super::segments::Segments;
use super::shortage::Shortages;
use super::silences::Silences;
use super::tombstones::{Tombstone, Tombstones};
use super::wire::{self, Piece};
use crate::engine::poller::{Interest, Poller, Progress, Registration, Source};
use crate::engine::schedule::share::Share;
use crate::engine::schedule::spread::Spread;
use crate::os::config::Config;
use crate::os::error::{self, Error};
use crate::os::host;
use crate::os::interfaces::Rail;
use crate::os::key_file::SharedKey;
use crate::os::links::Links;

/// The most streams of the process beyond the first of each connection.
const EXTRA_STREAMS: usize = 1024;

/// The process-wide part of the session layer, which both backends use.
pub(crate) struct Net {
    /// Worker threads.
    pub poller: Poller,
    /// This process's share of the host.
    share: Share,
    /// The configuration as read at the first `init`.
    pub config: Config,
    /// The content of the key file, if there is one: then every connection is encrypted.
    pub key: Option<SharedKey>,
    /// Host name and process, for the peer's error messages.
    pub label: String,
    ports: Ports,
    /// Connections by number, for streams that join and calls.
    listening: Mutex<HashMap<u64, Weak<dyn ListeningSide>>>,
    connecting: Mutex<HashMap<u64, Weak<dyn ConnectingSide>>>,
    tombstones: Mutex<Tombstones>,
    silences: Mutex<Silences>,
    links: OnceLock<Registration>,
    segments: Mutex<Segments>,
    extra_streams: AtomicUsize,
    farewells: OnceLock<Farewells>,
    turns: AtomicUsize,
    /// Streams for which the kernel had no memory.
    pub shortages: Shortages,
    /// Which interfaces streams leave by.
    pub outlets: Outlets,
    /// Whether one further stream of each connection carries long messages.
    pub spread: Spread,
    me: Weak<Self>,
}

/// Answers the handshakes of connections that the listening sockets accept.
pub(crate) trait Accepts: Send + Sync {
    /// A connection has arrived. Called by the control thread, so it must not wait.
    fn take_in(&self, net: &Arc<Net>, sock: Sock, from: SocketAddr);
}

fn take_in(net: Weak<Net>, acceptor: Arc<dyn Accepts>) -> Arc<dyn Fn(Sock, SocketAddr) + Send + Sync> {
    Arc::new(move |sock, from| {
        net.upgrade().inspect(|net| acceptor.take_in(net, sock, from));
    })
}

/// Reads what the kernel reports of links that go down.
struct LinkMonitor {
    net: Weak<Net>,
    links: Links,
    /// Notifications were lost, and the state of some interfaces is still unknown.
    unsure: AtomicBool,
}

impl Source for LinkMonitor {
    fn poll(&self) -> Progress {
        let Some(net) = self.net.upgrade() else { return Progress::default() };
        let changes = self.links.read();
        for event in changes.events.into_iter().filter(|event| !event.running) {
            net.link_down(event.index);
        }
        if !changes.are_incomplete && !self.unsure.load(Ordering::Relaxed) {
            return Progress::default();
        }
        // Read only once the socket is empty: later events cause new notifications.
        let mut unsure = false;
        for interface in net.interfaces() {
            match self.links.is_running(interface) {
                Ok(true) => {}
                Ok(false) => net.link_down(interface),
                Err(_) => unsure = true,
            }
        }
        self.unsure.store(unsure, Ordering::Relaxed);
        Progress { moved: false, again: unsure.then(|| Instant::now() + Duration::from_millis(20)) }
    }

    fn fail(&self, error: Error) {
        tracing::error!("{error}");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a connection to the list of those that still exist, and now and then removes the others from the list.
fn add<T: ?Sized>(known: &mut HashMap<u64, Weak<T>>, key: u64, conn: Weak<T>) {
    if known.len() == known.capacity() {
        known.retain(|_, conn| conn.strong_count() > 0);
    }
    known.insert(key, conn);
}

/// The connections that still exist. A caller that uses them must not hold the lock.
fn living<T: ?Sized>(known: &HashMap<u64, Weak<T>>) -> Vec<Arc<T>> {
    known.values().filter_map(Weak::upgrade).collect()
}

struct Farewells {
    source: Arc<Goodbyes>,
    registration: Registration,
}

impl Net {
    /// The shared state, with nothing started yet.
    pub(crate) fn new(config: Config, key: Option<SharedKey>, acceptor: Arc<dyn Accepts>) -> Arc<Self> {
        let share = Share::of_this_process();
        let workers = config.workers.unwrap_or_else(|| share.workers());
        Arc::new_cyclic(|me| Self {
            poller: Poller::new(workers, share.has_time_to_poll()),
            share,
            config,
            key,
            label: label(),
            ports: Ports::new(take_in(me.clone(), acceptor)),
            listening: Mutex::new(HashMap::new()),
            connecting: Mutex::new(HashMap::new()),
            tombstones: Mutex::default(),
            silences: Mutex::default(),
            links: OnceLock::new(),
            segments: Mutex::default(),
            extra_streams: AtomicUsize::new(0),
            farewells: OnceLock::new(),
            shortages: Shortages::default(),
            outlets: Outlets::default(),
            spread: Spread::default(),
            turns: AtomicUsize::new(0),
            me: me.clone(),
        })
    }

    /// The feature bits that this side brings into a handshake.
    pub(crate) fn features(&self) -> u32 {
        let when = |on: bool, feature| if on { feature } else { 0 };
        when(self.config.recovery, FEATURE_RECOVERY)
            | when(self.config.checksum, FEATURE_CHECKSUM)
            | when(self.key.is_some(), FEATURE_ENCRYPTION)
            | FEATURE_FAR
    }

    /// Where a new connection's streams begin among the workers, in circular order. Multiples of the
    /// golden ratio: each falls near the middle of the largest remaining gap.
    pub(crate) fn next_turn(&self) -> usize {
        let share = (self.turns.fetch_add(1, Ordering::Relaxed) as u32).wrapping_mul(0x9E37_79B9);
        ((u64::from(share) * self.poller.limit() as u64) >> 32) as usize
    }

    /// Returns a listener on the given rails, and the addresses of their sockets.
    ///
    /// # Errors
    /// When no socket can be opened for any of them (for example, the only rail's interface has vanished).
    pub(crate) fn listen(
        &self,
        rails: Arc<[Rail]>,
        traffic_class: Option<u8>,
        door: Arc<dyn Door>,
    ) -> error::Result<(Arc<Listener>, Vec<SocketAddr>)> {
        self.ports.listen(&self.poller, rails, traffic_class, door)
    }

    /// The listener with this id.
    pub(crate) fn listener(&self, id: u64) -> Option<Arc<Listener>> {
        self.ports.listener(id)
    }

    /// Stops accepting connections for this listener, and ends those that were not accepted.
    pub(crate) fn close(&self, listener: &Listener) {
        self.ports.close(listener);
    }

    /// The addresses where the process can be reached over these rails, now or when they are up again. A rail whose
    /// socket cannot be opened is left out.
    pub(crate) fn addresses(&self, rails: &[Rail]) -> Vec<SocketAddr> {
        self.ports.addresses(&self.poller, rails)
    }

    /// Registers the listening side of a connection, so that further streams find it and it is notified of links that
    /// go down.
    pub(crate) fn remember_listening(&self, conn: &Arc<dyn ListeningSide>) {
        add(&mut lock(&self.listening), conn.link().connection, Arc::downgrade(conn));
        self.watch_links();
    }

    /// Registers the connecting side likewise, so that calls find it.
    pub(crate) fn remember_connecting(&self, conn: &Arc<dyn ConnectingSide>) {
        add(&mut lock(&self.connecting), conn.link().connection, Arc::downgrade(conn));
        self.watch_links();
    }

    /// The listening side of the connection with this number.
    pub(crate) fn listening(&self, number: u64) -> Option<Arc<dyn ListeningSide>> {
        lock(&self.listening).get(&number).and_then(Weak::upgrade)
    }

    /// The connecting side of the connection with this number.
    pub(crate) fn connecting(&self, number: u64) -> Option<Arc<dyn ConnectingSide>> {
        lock(&self.connecting).get(&number).and_then(Weak::upgrade)
    }

    /// Forgets the listening side of a closed connection.
    pub(crate) fn forget(&self, connection: u64) {
        lock(&self.listening).remove(&connection);
    }

    /// A receiving connection was closed with nothing outstanding, after this many messages.
    pub(crate) fn remember_closed(&self, link: &Link, received: u64) {
        lock(&self.tombstones).add(link, received, self.config.peer_timeout);
    }

    /// The tombstone of a connection that was closed recently.
    pub(crate) fn closed(&self, connection: u64) -> Option<Tombstone> {
        lock(&self.tombstones).find(connection)
    }

    /// The peer processes that leave closes unanswered.
    pub(crate) fn silences(&self) -> MutexGuard<'_, Silences> {
        lock(&self.silences)
    }

    /// How many streams a connection over `rails` rails may have.
    pub(crate) fn streams_per_connection(&self, rails: usize) -> usize {
        self.config.streams.unwrap_or_else(|| self.share.streams(rails)).clamp(1, MAX_STREAMS)
    }

    /// Whether a new connection gets its further streams at once, before its first message above 16 KiB. This holds
    /// while the process has few of them, and descriptors for the whole budget.
    ///
    /// Otherwise their handshakes, in which two threads wake in turn, happen during NCCL's first operations. NCCL's
    /// proxy thread then copied 30 to 47 % of the messages of the first 60 all-reduces of 512 KiB, because their
    /// connections had no further streams yet (two H100, docs/dev/decisions.md). Later connections wait for such a
    /// message: an all-to-all among many ranks has hundreds of them, and most carry little.
    ///
    /// Where descriptors are scarce (many systems start with 1024 per process), both sides keep them for connections.
    /// They are not used for streams that may never be needed.
    pub(crate) fn may_grow_early(&self) -> bool {
        self.extra_streams.load(Ordering::Relaxed) < EXTRA_STREAMS / 16 && descriptor_budget() == EXTRA_STREAMS
    }

    /// Counts one more extra stream.
    ///
    /// # Errors
    /// When the budget of the process is used up; the error is the budget.
    pub(crate) fn stream_begins(&self) -> Result<(), usize> {
        let budget = descriptor_budget();
        if self.extra_streams.load(Ordering::Relaxed) >= budget {
            return Err(budget);
        }
        self.extra_streams.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// A connection has returned this many extra streams.
    pub(crate) fn streams_ended(&self, count: usize) {
        self.extra_streams.fetch_sub(count, Ordering::Relaxed);
    }

    /// Only segments up to `segment` bytes reach that address; the next connections start with them. Returns whether
    /// this is new.
    pub(crate) fn remember_segment(&self, address: IpAddr, segment: u32) -> bool {
        lock(&self.segments).learn(address, segment, Instant::now())
    }

    /// `TCP_MAXSEG` for a socket that is to be connected there.
    pub(crate) fn segment(&self, address: IpAddr) -> Option<u32> {
        lock(&self.segments).of(address, Instant::now())
    }

    /// How long a peer whose last stream ended this way may stay away. Silence may be an outage, after which everything
    /// continues. A reset or an end of file came over a working path.
    pub(crate) fn patience(&self, error: &io::Error) -> Duration {
        match error.kind() {
            // The kernel's own timeout ends the stream after most of the time has passed.
            io::ErrorKind::TimedOut if error.raw_os_error().is_some() => self.config.peer_timeout / 10,
            io::ErrorKind::TimedOut | io::ErrorKind::NetworkDown => {
                let silence = liveness::silence_of(error).unwrap_or_default();
                self.config.peer_timeout.saturating_sub(silence).max(2 * CALL_AFTER)
            }
            _ => self.config.reconnect_timeout,
        }
    }

    /// Starts listening for links that go down. If listening is impossible, the silence of a path shows the loss later.
    /// The next connection tries again, since the cause may have been a lack of descriptors.
    fn watch_links(&self) {
        if self.links.get().is_some() {
            return;
        }
        let registered = || {
            let links = Links::open().ok()?;
            let fd = links.as_raw_fd();
            let source = Arc::new(LinkMonitor { net: self.me.clone(), links, unsure: AtomicBool::new(false) });
            self.poller.control_thread().ok()?.register(source, Some((fd, Interest::Read))).ok()
        };
        if let Some(registration) = registered() {
            // Another thread may have been faster: then this registration is dropped.
            let _ = self.links.set(registration);
        }
    }

    /// The interfaces that connections may use.
    fn interfaces(&self) -> BTreeSet<u32> {
        let listening = living(&lock(&self.listening));
        let connecting = living(&lock(&self.connecting));
        let links = listening.iter().map(|conn| conn.link()).chain(connecting.iter().map(|conn| conn.link()));
        links.flat_map(|link| link.local.iter().map(|rail| rail.index)).collect()
    }

    fn link_down(&self, interface: u32) {
        let connecting = living(&lock(&self.connecting));
        connecting.iter().for_each(|conn| conn.link_down(interface));
        let listening = living(&lock(&self.listening));
        listening.iter().for_each(|conn| conn.link_down(interface));
    }

    /// Hands a socket to the control thread, which closes it when the peer has closed it, or after 5 s.
    pub(crate) fn linger(&self, sock: Sock) {
        self.linger_with(sock, None);
    }

    /// The same, with a value that must live as long as the socket.
    pub(crate) fn linger_with(&self, sock: Sock, cargo: Option<Box<dyn Any + Send>>) {
        let _ = sock.shutdown(Shutdown::Write);
        if self.farewells.get().is_none() {
            let source = Arc::new(Goodbyes { socks: Mutex::new(Vec::new()) });
            let registration =
                self.poller.control_thread().and_then(|control_thread| control_thread.register(source.clone(), None));
            // Without a control thread the socket is closed here. At worst, the peer loses bytes that it has not read.
            let Ok(registration) = registration else { return };
            let _ = self.farewells.set(Farewells { source, registration });
        }
        let farewells = self.farewells.get().expect("set above");
        let farewell = Farewell { sock, deadline: Instant::now() + Duration::from_secs(5), _cargo: cargo };
        farewells.source.lock().push(farewell);
        farewells.registration.kick();
    }
}

struct Farewell {
    sock: Sock,
    deadline: Instant,
    _cargo: Option<Box<dyn Any + Send>>,
}

struct Goodbyes {
    socks: Mutex<Vec<Farewell>>,
}

impl Goodbyes {
    fn lock(&self) -> MutexGuard<'_, Vec<Farewell>> {
        self.socks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Source for Goodbyes {
    fn poll(&self) -> Progress {
        let mut socks = self.lock();
        let now = Instant::now();
        socks.retain(|Farewell { sock, deadline, .. }| {
            let mut sink = [0_u8; 4096];
            // A bounded number of reads, not until the socket is empty: a peer that keeps sending would occupy the
            // control thread.
            for _ in 0..AT_ONCE {
                // SAFETY: the sink is ours.
                let got = unsafe { wire::receive(sock.as_raw_fd(), Piece::of_mut(&mut sink)) };
                match got.or_else(wire::as_would_block) {
                    Ok(None) => return now < *deadline,
                    Ok(Some(0)) | Err(_) => return false,
                    Ok(Some(_)) => {}
                }
            }
            now < *deadline
        });
        let again = (!socks.is_empty()).then(|| now + Duration::from_millis(5));
        Progress { moved: false, again }
    }

    fn fail(&self, error: Error) {
        tracing::error!("{error}");
    }
}

/// The largest number of extra streams of this process: a quarter of its descriptors, at most [`EXTRA_STREAMS`].
fn descriptor_budget() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call, which fills it.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    if known { (limit.rlim_cur / 4).min(EXTRA_STREAMS as u64) as usize } else { EXTRA_STREAMS / 4 }
}

fn label() -> String {
    format!("{}:{}", host::name(), std::process::id())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::session::loopback;

    /// A peer that keeps sending must not occupy the control thread, which serves all connections, nor hold its socket
    /// for ever.
    #[test]
    fn a_peer_that_sends_on_after_the_goodbye_keeps_nobody() {
        let (ours, mut theirs) = loopback::sockets();
        let deadline = Instant::now() + Duration::from_millis(200);
        let goodbyes = Goodbyes { socks: Mutex::new(vec![Farewell { sock: ours, deadline, _cargo: None }]) };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Sends until this side closes the socket.
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    if theirs.write_all(&[0; 64 << 10]).is_err() {
                        break;
                    }
                }
            });
            let (done, finished) = std::sync::mpsc::channel();
            let goodbyes = &goodbyes;
            let polls = scope.spawn(move || {
                while goodbyes.poll().again.is_some() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let _ = done.send(());
            });
            let ended = finished.recv_timeout(Duration::from_secs(20));
            is_over.store(true, Ordering::Relaxed);
            let _ = polls.join();
            ended.expect("its deadline has passed");
        });
    }
}
