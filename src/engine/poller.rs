//! The completion poller: worker threads that move data when NCCL's own threads do not.
//!
//! Polling is a role. A [`Source`] is something that can make progress without waiting (a TCP stream, a completion
//! queue, a listener). NCCL's thread runs the same step from inside `isend`, `irecv` and `test`. A [`Worker`]
//! calls a source's `poll` in three cases: the kernel reports readiness, a thread kicks the source, or the time that
//! the source requested has arrived.
//!
//! - Workers are few, started when first needed, bounded in number, and asleep in `epoll_wait` when nothing happens.
//!   After progress a worker stays awake for [`Source::hot`], because the next chunk usually follows at once.
//! - A worker that polls without finding anything does overdue work of another (`stealing`).
//! - One worker, the **control thread**, does the rare work: handshakes, fallbacks for streams that NCCL's thread
//!   polls, deadlines.
//! - A panic in a source is caught; the source is notified and fails its connection, the worker continues.
//!
//! # Implementation notes
//! Readiness is edge-triggered: a source must poll until nothing moves, or request to be polled again at once. Tokens
//! may be reused while an old event is still under way, so a poll may be spurious and must be harmless.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token};
use slab::Slab;

use self::stealing::{Crew, Stealing};
use super::deadlines::Deadlines;
use super::doorbell::{Button, Doorbell};
use super::schedule::constants::HOT;
use crate::os::error::{Error, Result};
use crate::os::fd::{Fd, Registered};
use crate::os::log::Limiter;
use crate::os::ticks::Ticks;

mod stealing;

/// The result of a poll.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Whether anything moved.
    pub moved: bool,
    /// When the source must be polled again even if nothing happens; a time in the past means "at once, after the other
    /// sources".
    pub again: Option<Instant>,
}

/// Something that makes progress without waiting.
pub trait Source: Send + Sync {
    /// Moves all data that can be moved now, or leaves it to a thread that polls anyway. May be called from any thread,
    /// at any time, even without a reason.
    fn poll(&self) -> Progress;

    /// How long the worker polls for more work after something has moved.
    fn hot(&self) -> Duration {
        HOT
    }

    /// The poll panicked: the owner of the source cannot be repaired.
    fn fail(&self, error: Error);
}

/// Which readiness a descriptor reports to its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Readable and writable edges: the worker moves the data.
    Data,
    /// Only writable edges and the end of the connection: NCCL's thread polls for data itself, and a wake-up for each
    /// arrival would only disturb it. While NCCL does not call, the source's own deadlines make the worker poll
    /// ([`attend`](crate::engine::schedule::attend)).
    Quiet,
    /// Readable edges: listeners.
    Read,
}

struct Entry {
    source: Arc<dyn Source>,
    /// Differs from the generation of every other source that this place has held or will hold.
    generation: u64,
    kicked: Arc<Button>,
}

struct Shared {
    epoll: RawFd,
    /// An eventfd instead of mio's waker: the fork handler must know every descriptor.
    waker: Fd,
    doorbell: Doorbell,
    entries: Mutex<Slab<Entry>>,
    load: AtomicUsize,
    generations: AtomicU64,
    /// [`Ticks::number`] of the time when the worker last finished its sources, or was woken.
    seen: AtomicU64,
}

const WAKE: Token = Token(usize::MAX);

static NO_WORKER: Limiter = Limiter::new();

/// A thread that polls sources.
#[derive(Clone)]
pub struct Worker(Arc<Shared>);

/// A source's registration at its worker. Dropping it ends the polling (a poll already under way may finish later).
pub struct Registration {
    worker: Worker,
    token: usize,
    fd: Option<RawFd>,
    kicked: Arc<Button>,
}

impl Worker {
    fn start(name: String, spin: bool, crew: Option<&Arc<Crew>>) -> Result<Self> {
        let failed = |error: &io::Error| Error::system(format!("starting the worker thread {name}"), error);
        let poll = Registered::open(Poll::new).map_err(|e| failed(&e))?;
        let waker = Registered::open(eventfd).map_err(|e| failed(&e))?;
        epoll_add(poll.as_raw_fd(), waker.as_raw_fd(), Interest::Read, WAKE.0).map_err(|e| failed(&e))?;
        let shared = Arc::new(Shared {
            epoll: poll.as_raw_fd(),
            waker,
            doorbell: Doorbell::default(),
            entries: Mutex::new(Slab::new()),
            load: AtomicUsize::new(0),
            generations: AtomicU64::new(0),
            seen: AtomicU64::new(Ticks::now().number()),
        });
        let worker = Self(Arc::clone(&shared));
        let stealing = crew.filter(|_| spin).map(|crew| Stealing::new(Arc::clone(crew)));
        crate::os::thread::spawn(&name, move || run(&shared, poll, spin, stealing)).map_err(|error| {
            failed(&error).with_hint("raise the limit on threads (ulimit -u, or pids.max of the container)")
        })?;
        if let Some(crew) = crew {
            crew.join(&worker.0);
        }
        Ok(worker)
    }

    /// Registers a source with this worker, with the descriptor whose readiness drives it (or none: kicks and deadlines
    /// only). The descriptor must stay open until the registration is dropped.
    ///
    /// # Errors
    /// When the kernel refuses the descriptor.
    pub fn register(&self, source: Arc<dyn Source>, fd: Option<(RawFd, Interest)>) -> Result<Registration> {
        let kicked = Arc::new(Button::default());
        let token = {
            let generation = self.0.generations.fetch_add(1, Ordering::Relaxed);
            let mut entries = lock(&self.0.entries);
            entries.insert(Entry { source, generation, kicked: Arc::clone(&kicked) })
        };
        if let Some((fd, interest)) = fd
            && let Err(error) = epoll_add(self.0.epoll, fd, interest, token)
        {
            lock(&self.0.entries).remove(token);
            return Err(Error::system("watching a socket", &error));
        }
        self.0.load.fetch_add(1, Ordering::Relaxed);
        Ok(Registration { worker: self.clone(), token, fd: fd.map(|(fd, _)| fd), kicked })
    }
}

impl Registration {
    /// Whether the worker is polling for work at this moment, so that a kick costs next to nothing.
    pub(crate) fn is_awake(&self) -> bool {
        !self.worker.0.doorbell.is_asleep()
    }

    /// Makes the worker poll the source soon. Cheap when a poll is already pending.
    pub fn kick(&self) {
        self.worker.0.kick(&self.kicked, self.token);
    }
}

impl Shared {
    /// Whether the place `token` still holds the source of this generation.
    fn is(&self, token: usize, generation: u64) -> bool {
        lock(&self.entries).get(token).is_some_and(|entry| entry.generation == generation)
    }

    /// Makes the worker poll the source with this token.
    fn kick(&self, button: &Button, token: usize) {
        if self.doorbell.ring(button, token) {
            self.is_seen();
            self.wake();
        }
    }

    /// Notes that the worker is polling its sources, or will at once.
    fn is_seen(&self) {
        self.seen.store(Ticks::now().number(), Ordering::Relaxed);
    }

    /// Ends the worker's sleep. The eventfd is edge-triggered and never read: each write is a new edge.
    fn wake(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: eight readable bytes, as eventfd(2) wants.
        let write = || unsafe { libc::write(self.waker.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        // A full counter (EAGAIN) has woken the worker already.
        while write() < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {}
    }
}

fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: plain system call.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(fd) = self.fd {
            // SAFETY: plain system call; a descriptor that is already gone gives an error, which does not matter.
            unsafe { libc::epoll_ctl(self.worker.0.epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
        }
        let entry = lock(&self.worker.0.entries).try_remove(self.token);
        self.worker.0.load.fetch_sub(1, Ordering::Relaxed);
        // Dropped outside the lock: the source may own registrations itself.
        drop(entry);
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn epoll_add(epoll: RawFd, fd: RawFd, interest: Interest, token: usize) -> io::Result<()> {
    let flags = match interest {
        Interest::Data => libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP,
        Interest::Quiet => libc::EPOLLOUT | libc::EPOLLRDHUP,
        Interest::Read => libc::EPOLLIN,
    };
    let mut event = libc::epoll_event { events: (flags | libc::EPOLLET) as u32, u64: token as u64 };
    // The kernel may have no memory for it: five tries, a millisecond apart.
    let mut patience = 5;
    loop {
        // SAFETY: `event` is valid for the call; mio reads our token back from the same field (`Token` is the u64).
        if unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        patience -= 1;
        if error.raw_os_error() != Some(libc::ENOMEM) || patience == 0 {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn run(shared: &Shared, poll: Registered<Poll>, spin: bool, mut stealing: Option<Stealing>) {
    let mut poll = poll;
    let mut events = Events::with_capacity(128);
    let mut deadlines = Deadlines::default();
    let mut ready: Vec<usize> = Vec::with_capacity(64);
    let mut hot_until = Instant::now();
    loop {
        let now = Instant::now();
        let hot = spin && now < hot_until;
        let mut timeout = if hot || !ready.is_empty() {
            Some(Duration::ZERO)
        } else {
            deadlines.next(|token, generation| shared.is(token, generation)).map(|at| at.saturating_duration_since(now))
        };
        if timeout != Some(Duration::ZERO) && !shared.doorbell.may_sleep() {
            timeout = Some(Duration::ZERO);
        }
        if hot && ready.is_empty() {
            // The scheduler may have queued another thread on the same processor, NCCL's own or the program's. Without
            // a yield that thread would wait until this one sleeps.
            std::thread::yield_now();
        }
        if let Err(error) = poll.poll(&mut events, timeout)
            && error.kind() != io::ErrorKind::Interrupted
        {
            tracing::error!("waiting for sockets failed: {error}; the worker retries");
            std::thread::sleep(Duration::from_millis(10));
        }
        shared.is_seen();
        ready.extend(events.iter().map(|event| event.token()).filter(|token| *token != WAKE).map(|token| token.0));
        let kicked = shared.doorbell.answer(&mut ready);
        let now = Instant::now();
        while let Some((token, generation)) = deadlines.take(now) {
            // The source that set the deadline may be gone, and its place may belong to another source.
            if shared.is(token, generation) {
                ready.push(token);
            }
        }
        ready.sort_unstable();
        ready.dedup();
        let mut hot_for = Duration::ZERO;
        let mut again_at_once = Vec::new();
        if let Some(stealing) = stealing.as_mut().filter(|_| hot && ready.is_empty()) {
            hot_for = stealing.steal(shared);
        }
        for token in ready.drain(..) {
            let Some(polled) = shared.poll(token) else { continue };
            hot_for = hot_for.max(polled.hot_for(kicked));
            if let Some(at) = polled.again {
                if at <= now {
                    again_at_once.push(token);
                } else {
                    deadlines.set(token, polled.generation, at);
                }
            }
        }
        ready.append(&mut again_at_once);
        if !hot_for.is_zero() {
            hot_until = hot_until.max(Instant::now() + hot_for);
        }
    }
}

/// The result of polling a source.
struct Polled {
    generation: u64,
    kicked: Arc<Button>,
    source: Arc<dyn Source>,
    moved: bool,
    again: Option<Instant>,
}

impl Polled {
    /// How long to poll for more work. A thread that kicks has more, or expects it.
    fn hot_for(&self, kicked: bool) -> Duration {
        match (self.moved, kicked) {
            (true, _) => self.source.hot(),
            (false, true) => self.source.hot().min(HOT),
            (false, false) => Duration::ZERO,
        }
    }
}

impl Shared {
    /// Polls the source with this token, if it is still there. Called by any thread.
    fn poll(&self, token: usize) -> Option<Polled> {
        let entry = |entry: &Entry| (Arc::clone(&entry.source), Arc::clone(&entry.kicked), entry.generation);
        let (source, kicked, generation) = lock(&self.entries).get(token).map(entry)?;
        kicked.release();
        let progress = catch_unwind(AssertUnwindSafe(|| source.poll())).unwrap_or_else(|panic| {
            let error = Error::internal(format!("a worker panicked: {}", panic_text(panic.as_ref())));
            // A second panic inside `fail` must not end the worker either.
            let _ = catch_unwind(AssertUnwindSafe(|| source.fail(error)));
            Progress::default()
        });
        Some(Polled { generation, kicked, source, moved: progress.moved, again: progress.again })
    }
}

/// The text of a panic's payload.
pub(crate) fn panic_text(payload: &(dyn std::any::Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// All worker threads of the process.
pub struct Poller {
    limit: usize,
    spin: bool,
    control_thread: OnceLock<Worker>,
    workers: Mutex<Vec<Worker>>,
    starting: Mutex<()>,
    /// The data workers, as known to each other.
    crew: Arc<Crew>,
}

impl Poller {
    /// A pool of at most `limit` data workers; `spin`: whether they poll for a while before they sleep. None is started
    /// yet.
    pub fn new(limit: usize, spin: bool) -> Self {
        let limit = limit.max(1);
        Self {
            limit,
            spin,
            control_thread: OnceLock::new(),
            workers: Mutex::default(),
            starting: Mutex::new(()),
            crew: Arc::new(Crew::new(limit)),
        }
    }

    /// The control thread; started on first use.
    ///
    /// # Errors
    /// When the thread or its epoll descriptor cannot be created.
    pub(crate) fn control_thread(&self) -> Result<&Worker> {
        if let Some(worker) = self.control_thread.get() {
            return Ok(worker);
        }
        let _starting = lock(&self.starting);
        if self.control_thread.get().is_none() {
            let worker = Worker::start("towline-control".into(), false, None)?;
            let _ = self.control_thread.set(worker);
        }
        Ok(self.control_thread.get().expect("set above"))
    }

    /// A data worker for one more source. A worker without any source comes first, then a new thread while fewer than
    /// the limit run, then the least loaded worker. Of several equally loaded ones, it is the one that `turn` points at
    /// or the next. Owners pass different turns, so that their first sources, which have the most work, do not share a
    /// worker.
    ///
    /// # Errors
    /// When the first thread cannot be created. If a later one cannot, an existing worker is used.
    pub fn worker(&self, turn: usize) -> Result<Worker> {
        let mut workers = lock(&self.workers);
        let running = workers.len();
        if running < self.limit {
            if let Some(idle) = workers.iter().find(|worker| worker.0.load.load(Ordering::Relaxed) == 0) {
                return Ok(idle.clone());
            }
            match Worker::start(format!("towline-{running}"), self.spin, Some(&self.crew)) {
                Ok(worker) => {
                    workers.push(worker.clone());
                    return Ok(worker);
                }
                Err(error) if running == 0 => return Err(error),
                Err(error) => NO_WORKER.tell(|more| {
                    tracing::warn!("{error}; going on with {running} worker threads{more}");
                }),
            }
        }
        let from_turn = (0..workers.len()).map(|k| &workers[(turn + k) % workers.len()]);
        let least = from_turn.min_by_key(|worker| worker.0.load.load(Ordering::Relaxed));
        Ok(least.expect("at least one worker runs").clone())
    }

    /// The most data workers that this pool starts.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }
}

/// Waits until something holds.
#[cfg(test)]
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Panics on request, and otherwise counts how often it was polled.
    #[derive(Default)]
    struct Fragile {
        panics: std::sync::atomic::AtomicBool,
        polls: AtomicUsize,
        ends: Mutex<Vec<String>>,
    }

    impl Source for Fragile {
        fn poll(&self) -> Progress {
            assert!(!self.panics.load(Ordering::SeqCst), "as the test wants it");
            self.polls.fetch_add(1, Ordering::SeqCst);
            Progress::default()
        }

        fn fail(&self, error: Error) {
            lock(&self.ends).push(error.what().to_owned());
            panic!("once more, while it fails");
        }
    }

    /// A source that is hot for this long.
    struct Hot(Duration);

    impl Source for Hot {
        fn poll(&self) -> Progress {
            Progress::default()
        }

        fn hot(&self) -> Duration {
            self.0
        }

        fn fail(&self, _: Error) {}
    }

    #[test]
    fn a_kick_keeps_a_worker_awake_as_progress_does_but_not_longer_than_usual() {
        for hot in [Duration::ZERO, HOT, 5 * HOT] {
            let polled = |moved| Polled {
                generation: 1,
                kicked: Arc::default(),
                source: Arc::new(Hot(hot)),
                moved,
                again: None,
            };
            assert_eq!([polled(true).hot_for(false), polled(true).hot_for(true)], [hot; 2]);
            assert_eq!(polled(false).hot_for(true), hot.min(HOT));
            assert_eq!(polled(false).hot_for(false), Duration::ZERO);
        }
    }

    /// Gives this many sources a worker. Returns the workers, identified by their addresses, and the registrations.
    fn places(poller: &Poller, sources: usize) -> (Vec<*const Shared>, Vec<Registration>) {
        let source = Arc::new(Fragile::default());
        let take = |turn| {
            let worker = poller.worker(turn).expect("a thread");
            (Arc::as_ptr(&worker.0), worker.register(source.clone(), None).expect("a place"))
        };
        (0..sources).map(take).unzip()
    }

    #[test]
    fn sources_are_spread_evenly_over_the_workers() {
        let poller = Poller::new(5, false);
        let (workers, _places) = places(&poller, 10);
        let mut counts = std::collections::BTreeMap::new();
        workers.iter().for_each(|worker| *counts.entry(worker).or_insert(0) += 1);
        assert_eq!(counts.into_values().collect::<Vec<_>>(), [2; 5]);
    }

    #[test]
    fn a_worker_that_nothing_is_left_at_is_used_before_another_is_started() {
        let poller = Poller::new(2, false);
        let (before, gone) = places(&poller, 1);
        drop(gone);
        assert_eq!(places(&poller, 1).0, before);
    }

    /// A panic in a worker has no further effect: it is reported, the other sources of the thread continue, and so does
    /// the process.
    #[test]
    fn a_panic_in_a_worker_ends_one_source_and_nothing_else() {
        let poller = Poller::new(1, false);
        let worker = poller.worker(0).expect("a thread");
        let sources = [Arc::new(Fragile::default()), Arc::new(Fragile::default())];
        let places = sources.clone().map(|source| worker.register(source, None).expect("a place"));
        for (source, place) in sources.iter().zip(&places) {
            place.kick();
            wait_until("a poll", || source.polls.load(Ordering::SeqCst) > 0);
        }
        sources[0].panics.store(true, Ordering::SeqCst);
        places[0].kick();
        wait_until("it is told", || !lock(&sources[0].ends).is_empty());
        assert_eq!(*lock(&sources[0].ends), ["a worker panicked: as the test wants it"]);
        let before = sources[1].polls.load(Ordering::SeqCst);
        places[1].kick();
        wait_until("the other goes on", || sources[1].polls.load(Ordering::SeqCst) > before);
        assert!(lock(&sources[1].ends).is_empty());
    }
}
