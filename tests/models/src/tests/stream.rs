//! A stream changes hands without waiting, and no work is lost.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use crate::engine::poller::Registration;
use crate::tcp::stream::{READ, Ran, Step, Stream, WRITE};

struct Shared {
    stream: Stream<()>,
    /// What the threads want to have moved, and what was.
    wanted: AtomicU32,
    moved: AtomicU32,
    worker: Registration,
}

impl Shared {
    fn new() -> Arc<Self> {
        let shared = Arc::new(Self {
            stream: Stream::default(),
            wanted: AtomicU32::new(0),
            moved: AtomicU32::new(0),
            worker: Registration::default(),
        });
        shared.stream.install(Box::new(())).unwrap();
        shared
    }

    fn step(&self) -> Step<()> {
        // Relaxed: the hand-over itself must make the other thread's work visible.
        let wanted = self.wanted.load(Ordering::Relaxed);
        let before = self.moved.swap(wanted, Ordering::Relaxed);
        Step::Settled(wanted != before)
    }

    /// As the sender does: post something, then run the stream.
    fn post(&self) {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        if self.stream.run(WRITE, |(), _| self.step(), |_, ()| ()) == Ran::More {
            self.worker.kick();
        }
    }

    fn check(&self) {
        let left = self.wanted.load(Ordering::Relaxed) - self.moved.load(Ordering::Relaxed);
        assert!(left == 0 || self.worker.kicks() > 0, "what a thread left behind was not moved");
    }
}

#[test]
fn what_is_posted_while_another_thread_has_the_stream_is_moved() {
    loom::model(|| {
        let shared = Shared::new();
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.post())
        };
        shared.post();
        other.join().unwrap();
        shared.check();
    });
}

#[test]
fn what_is_posted_beside_a_glance_is_moved() {
    loom::model(|| {
        let shared = Shared::new();
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let ran = shared.stream.poll_once(READ, |(), _| shared.step(), |_, ()| ());
                if ran == Ran::More {
                    shared.worker.kick();
                }
            })
        };
        shared.post();
        other.join().unwrap();
        shared.check();
    });
}

#[test]
fn what_is_posted_by_two_threads_while_a_third_has_the_stream_is_moved() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let shared = Shared::new();
        let others = [0, 1].map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.post())
        });
        shared.post();
        for other in others {
            other.join().unwrap();
        }
        shared.check();
    });
}

/// A thread that waits for the stream (`with_io`) does no other thread's work, but leaves none behind either.
#[test]
fn what_is_posted_while_another_thread_looks_is_moved_or_left_to_the_worker() {
    loom::model(|| {
        let shared = Shared::new();
        shared.stream.watch(shared.worker.clone());
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.stream.with_io(|()| ());
            })
        };
        shared.post();
        other.join().unwrap();
        shared.check();
    });
}

/// A socket that is taken away is not used afterwards.
#[test]
fn after_a_take_nobody_is_in_the_stream() {
    loom::model(|| {
        let shared = Shared::new();
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.stream.run(
                    WRITE,
                    |(), _| {
                        assert_ne!(shared.moved.load(Ordering::Relaxed), 77, "the stream is used after the take");
                        Step::<()>::Settled(false)
                    },
                    |_, ()| (),
                );
            })
        };
        shared.stream.take();
        shared.moved.store(77, Ordering::Relaxed);
        other.join().unwrap();
    });
}

/// A stream breaks in one thread while another, which has noticed it by itself, brings it back: the new epoch
/// keeps its place at the worker.
#[test]
fn a_stream_that_comes_back_while_its_end_is_noticed_keeps_its_place() {
    loom::model(|| {
        let shared = Shared::new();
        shared.stream.watch(Registration::default());
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.stream.run(WRITE, |(), _| Step::Broken(()), |_, ()| ());
            })
        };
        shared.stream.take();
        shared.stream.watch(shared.worker.clone());
        shared.stream.install(Box::new(())).unwrap();
        other.join().unwrap();
        // Either the other thread broke the old epoch, or it came late and broke the new one, whose registration went
        // with it.
        let lives = shared.stream.with_io(|()| ()).is_some();
        let before = shared.worker.kicks();
        shared.stream.kick();
        assert_eq!(shared.worker.kicks() - before, u32::from(lives), "lives: {lives}");
    });
}

/// The end of the former epoch is noticed while the next one begins: that keeps its socket and its registration.
#[test]
fn a_stream_that_comes_back_while_its_former_epoch_is_ended_keeps_all_it_has() {
    loom::model(|| {
        let shared = Shared::new();
        shared.stream.watch(Registration::default());
        let epoch = Arc::new(loom::sync::Mutex::new(0));
        let other = {
            let (shared, epoch) = (Arc::clone(&shared), Arc::clone(&epoch));
            thread::spawn(move || {
                shared.stream.take_if(|| Some(epoch.lock().unwrap()).filter(|epoch| **epoch == 0));
            })
        };
        // As `prepare_join` and `add_stream` do.
        shared.stream.take();
        *epoch.lock().unwrap() = 1;
        shared.stream.watch(shared.worker.clone());
        shared.stream.install(Box::new(())).unwrap();
        other.join().unwrap();
        assert!(shared.stream.with_io(|()| ()).is_some(), "its socket");
        let before = shared.worker.kicks();
        shared.stream.kick();
        assert_eq!(shared.worker.kicks() - before, 1, "its place");
    });
}

/// NCCL has its buffers back when the stream has ended, while another thread brings it back: that socket is never used.
#[test]
fn a_stream_that_comes_back_after_its_end_is_not_used() {
    loom::model(|| {
        let shared = Shared::new();
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.stream.watch(shared.worker.clone());
                let late = shared.stream.install(Box::new(()));
                shared.stream.run(
                    WRITE,
                    |(), _| {
                        assert_ne!(shared.moved.load(Ordering::Relaxed), 77, "the stream is used after the end");
                        Step::<()>::Settled(false)
                    },
                    |_, ()| (),
                );
                late.is_err()
            })
        };
        let had_it = shared.stream.end().is_some();
        shared.moved.store(77, Ordering::Relaxed);
        let late = other.join().unwrap();
        // The first epoch was there to begin with, and the end had that or the next one.
        assert!(had_it);
        assert!(shared.stream.with_io(|()| ()).is_none() && shared.stream.install(Box::new(())).is_err());
        let before = shared.worker.kicks();
        shared.stream.kick();
        assert_eq!(shared.worker.kicks(), before, "nothing is left at the worker, late: {late}");
    });
}
