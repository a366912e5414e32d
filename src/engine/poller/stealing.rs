//! Work stealing: when a worker does overdue work of another.
//!
//! A worker that has work may be asleep, and waking it takes 5 to 50 µs, now and then more than 260. It may be in the
//! middle of something longer. Or its processor runs another thread, in a virtual machine for milliseconds. Meanwhile
//! other workers poll without result, since the new work is not theirs. So a worker that polls and finds nothing checks
//! one of the others, a different one each time. It checks whether the other's doorbell was rung, and whether the
//! kernel has an event for it. It takes the work of a sleeping worker at once, and that of an awake one when it has not
//! been active for [`LATE`].
//!
//! It takes one source at a time, and polls it as the worker would. That is safe because a poll may come from any
//! thread at any time; a stream that another thread holds is left to that thread. No work is lost: after an event the
//! source is polled until nothing moves, or the stream's own worker is notified that there is more.
//!
//! Measured on two H100 with 32 cores, 14 groups. All-reduces of 8 MiB to 512 MiB take 0.93 to 0.94 of the time with
//! the same processor time for each byte. The slowest tenth of the blocks of 512 KiB takes 234 µs and more instead of
//! 319 (`docs/dev/decisions.md`).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{Shared, WAKE};
use crate::engine::schedule::constants::LATE;
use crate::os::ticks::Ticks;

/// The data workers of a pool. They never end, and none is removed.
pub(super) struct Crew {
    seats: Box<[OnceLock<Arc<Shared>>]>,
    taken: AtomicUsize,
}

impl Crew {
    /// A crew of at most `limit` workers.
    pub(super) fn new(limit: usize) -> Self {
        Self { seats: (0..limit).map(|_| OnceLock::new()).collect(), taken: AtomicUsize::new(0) }
    }

    /// From now on others may do this worker's work.
    pub(super) fn join(&self, worker: &Arc<Shared>) {
        if let Some(seat) = self.seats.get(self.taken.fetch_add(1, Ordering::Relaxed)) {
            let _ = seat.set(Arc::clone(worker));
        }
    }
}

/// The state of one worker for stealing.
pub(super) struct Stealing {
    crew: Arc<Crew>,
    next: usize,
}

impl Stealing {
    /// The state for a worker that belongs to this crew, or will.
    pub(super) fn new(crew: Arc<Crew>) -> Self {
        Self { crew, next: 0 }
    }

    /// Checks the next of the other workers, and polls at most one of its sources. Returns how long to poll for more
    /// work; zero when nothing has moved.
    pub(super) fn steal(&mut self, me: &Shared) -> Duration {
        self.next = (self.next + 1) % self.crew.seats.len();
        let other = match self.crew.seats[self.next].get() {
            Some(other) => other,
            None => {
                // The running workers are at the front.
                self.next = 0;
                let Some(first) = self.crew.seats[0].get() else { return Duration::ZERO };
                first
            }
        };
        if std::ptr::eq(Arc::as_ptr(other), me) || !other.is_absent() {
            return Duration::ZERO;
        }
        let Some(token) = other.doorbell.take_one().or_else(|| other.take_event()) else { return Duration::ZERO };
        other.relieve(token)
    }
}

impl Shared {
    /// Whether the worker sleeps, or is late.
    fn is_absent(&self) -> bool {
        let is_late = || {
            let seen = Ticks::from_number(self.seen.load(Ordering::Relaxed));
            seen.is_none_or(|seen| Ticks::now().nanoseconds_since(seen) >= LATE)
        };
        self.doorbell.is_asleep() || is_late()
    }

    /// One of the worker's sources for which the kernel has an event.
    fn take_event(&self) -> Option<usize> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event. The descriptor is the worker's, whose thread never ends.
        if unsafe { libc::epoll_wait(self.epoll, &raw mut event, 1, 0) } != 1 {
            return None;
        }
        let token = event.u64 as usize;
        if token == WAKE.0 {
            // The worker may still be asleep, and this event must wake it.
            self.is_seen();
            self.wake();
            return None;
        }
        Some(token)
    }

    /// Polls a source in the worker's place.
    fn relieve(&self, token: usize) -> Duration {
        let Some(polled) = self.poll(token) else { return Duration::ZERO };
        // The worker itself remembers when to poll again.
        if polled.again.is_some() {
            self.kick(&polled.kicked, token);
        }
        polled.hot_for(false)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::sync::{Mutex, mpsc};
    use std::time::Instant;

    use super::super::{Interest, Poller, Progress, Registration, Source, Worker, lock, wait_until};
    use super::*;
    use crate::os::error::Error;

    /// A source whose first poll does not end before the test allows it.
    struct Long(Mutex<mpsc::Receiver<()>>, AtomicUsize);

    impl Source for Long {
        fn poll(&self) -> Progress {
            self.1.fetch_add(1, Ordering::SeqCst);
            let _ = lock(&self.0).recv();
            Progress::default()
        }

        fn fail(&self, error: Error) {
            panic!("{error}");
        }
    }

    /// A source that makes its worker continue to poll for a while.
    struct Restless;

    impl Source for Restless {
        fn poll(&self) -> Progress {
            Progress { moved: true, again: None }
        }

        fn hot(&self) -> Duration {
            Duration::from_millis(50)
        }

        fn fail(&self, error: Error) {
            panic!("{error}");
        }
    }

    /// Records which threads poll it, and requests another poll if `again` is set.
    struct Noted {
        by: Mutex<Vec<String>>,
        again: bool,
    }

    impl Noted {
        fn new(again: bool) -> Arc<Self> {
            Arc::new(Self { by: Mutex::default(), again })
        }

        fn by(&self) -> Vec<String> {
            lock(&self.by).clone()
        }
    }

    impl Source for Noted {
        fn poll(&self) -> Progress {
            let mut by = lock(&self.by);
            by.push(std::thread::current().name().unwrap_or_default().to_owned());
            Progress { moved: false, again: (self.again && by.len() == 1).then(Instant::now) }
        }

        fn fail(&self, error: Error) {
            panic!("{error}");
        }
    }

    /// Two workers: the first is blocked until `end` is dropped, the second polls for work while the test waits.
    struct Two {
        _poller: Poller,
        late: Worker,
        end: Option<mpsc::Sender<()>>,
        restless: Registration,
        _long: Registration,
    }

    impl Two {
        fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
            wait_until(what, || {
                self.restless.kick();
                is_so()
            });
        }
    }

    fn two() -> Two {
        let poller = Poller::new(2, true);
        let late = poller.worker(0).expect("a thread");
        let (end, ended) = mpsc::channel();
        let long = Arc::new(Long(Mutex::new(ended), AtomicUsize::new(0)));
        let long_place = late.register(long.clone(), None).expect("a place");
        long_place.kick();
        wait_until("the first worker does not come", || long.1.load(Ordering::SeqCst) > 0);
        let looks = poller.worker(0).expect("a thread");
        assert!(!Arc::ptr_eq(&late.0, &looks.0));
        let restless = looks.register(Arc::new(Restless), None).expect("a place");
        Two { _poller: poller, late, end: Some(end), restless, _long: long_place }
    }

    #[test]
    fn what_a_late_worker_was_asked_for_is_done_by_another() {
        let two = two();
        let source = Noted::new(false);
        let place = two.late.register(source.clone(), None).expect("a place");
        for asked in 1..=3 {
            place.kick();
            two.wait_until("nobody comes", || source.by().len() == asked);
        }
        assert_eq!(source.by(), ["towline-1"; 3]);
    }

    #[test]
    fn what_the_kernel_has_to_say_to_a_late_worker_is_heard_by_another() {
        let two = two();
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let source = Noted::new(false);
        let place = two.late.register(source.clone(), Some((ours.as_raw_fd(), Interest::Read))).expect("a place");
        for written in 1..=3 {
            std::io::Write::write_all(&mut &theirs, b"x").expect("room");
            two.wait_until("nobody comes", || source.by().len() == written);
        }
        assert_eq!(source.by(), ["towline-1"; 3]);
        drop(place);
    }

    #[test]
    fn a_source_that_wants_more_time_is_its_own_workers_again() {
        let mut two = two();
        let source = Noted::new(true);
        let place = two.late.register(source.clone(), None).expect("a place");
        place.kick();
        // Either of the two workers polls: the ring stays until one has polled.
        two.wait_until("nobody comes again", || source.by().len() == 2);
        two.end.take();
        place.kick();
        two.wait_until("its worker does not come back", || source.by().len() == 3);
    }

    #[test]
    fn a_worker_is_woken_although_another_took_the_event_that_was_to_wake_it() {
        let two = two();
        two.late.0.wake();
        // The polling worker may have been quicker; it also puts back what it takes.
        assert_eq!(two.late.0.take_event(), None);
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event.
        two.wait_until(
            "nothing wakes the worker",
            || unsafe { libc::epoll_wait(two.late.0.epoll, &raw mut event, 1, 0) } == 1,
        );
        assert_eq!(event.u64 as usize, WAKE.0);
    }

    /// A socket whose poll reads a little, counts it, and returns whether there may be more.
    struct Reader(UnixStream, AtomicUsize, Mutex<()>);

    impl Source for Reader {
        fn poll(&self) -> Progress {
            // As with streams: this call notifies another thread that holds the source that there is data.
            let _one_at_a_time = lock(&self.2);
            let got = std::io::Read::read(&mut &self.0, &mut [0; 3]).unwrap_or(0);
            self.1.fetch_add(got, Ordering::SeqCst);
            Progress { moved: got > 0, again: (got == 3).then(Instant::now) }
        }

        fn fail(&self, error: Error) {
            panic!("{error}");
        }
    }

    #[test]
    fn nothing_is_lost_while_workers_fall_asleep_and_do_each_others_work() {
        const SOURCES: usize = 12;
        const WRITES: usize = 3000;
        let poller = Poller::new(4, true);
        let open = |index| {
            let (ours, theirs) = UnixStream::pair().expect("sockets");
            ours.set_nonblocking(true).expect("a socket");
            let reader = Arc::new(Reader(ours, AtomicUsize::new(0), Mutex::new(())));
            let worker = poller.worker(index).expect("a thread");
            let watched = Some((reader.0.as_raw_fd(), Interest::Read));
            let place = worker.register(reader.clone(), watched).expect("a place");
            (reader, theirs, place)
        };
        let sources: Vec<_> = (0..SOURCES).map(open).collect();
        std::thread::scope(|scope| {
            for part in sources.chunks(SOURCES / 3) {
                scope.spawn(move || {
                    for turn in 0..WRITES {
                        let (reader, theirs, place) = &part[turn * 7 % part.len()];
                        let before = reader.1.load(Ordering::SeqCst);
                        std::io::Write::write_all(&mut &*theirs, b"12345").expect("room");
                        if turn % 5 == 0 {
                            place.kick();
                        }
                        // Now and then the test pauses, so that workers fall asleep.
                        if turn % 50 == 0 {
                            wait_until("what was written is not read", || {
                                reader.1.load(Ordering::SeqCst) >= before + 5
                            });
                        }
                    }
                });
            }
        });
        let read = || sources.iter().map(|(reader, ..)| reader.1.load(Ordering::SeqCst)).sum::<usize>();
        wait_until("not all is read", || read() == 3 * WRITES * 5);
    }

    #[test]
    fn the_thread_for_rare_things_is_nobodys_to_relieve() {
        let poller = Poller::new(2, true);
        let control_thread = poller.control_thread().expect("a thread");
        let worker = poller.worker(0).expect("a thread");
        let crew: Vec<_> = poller.crew.seats.iter().filter_map(OnceLock::get).map(Arc::as_ptr).collect();
        assert_eq!(crew, [Arc::as_ptr(&worker.0)]);
        assert!(!crew.contains(&Arc::as_ptr(&control_thread.0)));
    }
}
