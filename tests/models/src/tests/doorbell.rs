//! A worker hears every ring, awake or asleep.

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use crate::engine::doorbell::{Button, Doorbell};

struct Worker {
    doorbell: Doorbell,
    /// The eventfd: a mark that stays until the worker looks.
    woken: Mutex<bool>,
    waker: Condvar,
    buttons: [Button; 2],
    /// What each source has to do, and how much of it a poll has seen.
    todo: [AtomicU32; 2],
}

impl Worker {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            doorbell: Doorbell::default(),
            woken: Mutex::new(false),
            waker: Condvar::new(),
            buttons: [Button::default(), Button::default()],
            todo: [AtomicU32::new(0), AtomicU32::new(0)],
        })
    }

    fn ask(&self, source: usize) {
        // Relaxed: the bell itself must make it visible.
        self.todo[source].fetch_add(1, Ordering::Relaxed);
        if self.doorbell.ring(&self.buttons[source], source) {
            *self.woken.lock().unwrap() = true;
            self.waker.notify_one();
        }
    }

    /// The worker's loop, until its polls have seen everything. A ring that is lost leaves it asleep for ever, which
    /// the model checker reports.
    fn run(&self, all: [u32; 2]) {
        let mut seen = [0; 2];
        let mut rung = Vec::new();
        while seen != all {
            if self.doorbell.may_sleep() {
                let mut woken = self.woken.lock().unwrap();
                while !std::mem::take(&mut *woken) {
                    woken = self.waker.wait(woken).unwrap();
                }
            }
            self.doorbell.answer(&mut rung);
            for source in rung.drain(..) {
                self.buttons[source].release();
                seen[source] = self.todo[source].load(Ordering::Relaxed);
            }
        }
    }
}

/// Another thread takes what it finds once, and polls in the worker's place. What it has seen counts as well.
fn rings_are_heard_by_one_of_two(asks: u32) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let worker = Worker::new();
        let caller = {
            let worker = Arc::clone(&worker);
            thread::spawn(move || (0..asks).for_each(|_| worker.ask(0)))
        };
        let other = {
            let worker = Arc::clone(&worker);
            thread::spawn(move || {
                let source = worker.doorbell.take_one()?;
                worker.buttons[source].release();
                Some(worker.todo[source].load(Ordering::Relaxed))
            })
        };
        caller.join().unwrap();
        let seen = other.join().unwrap();
        // All has been asked for: what the other has not seen is there for the worker.
        let mut rung = Vec::new();
        worker.doorbell.answer(&mut rung);
        let own = rung.pop().map(|source| {
            worker.buttons[source].release();
            worker.todo[source].load(Ordering::Relaxed)
        });
        assert_eq!(seen.max(own), Some(asks));
    });
}

#[test]
fn a_ring_is_heard_by_the_worker_or_by_who_relieves_it() {
    rings_are_heard_by_one_of_two(1);
}

#[test]
fn a_ring_while_another_relieves_the_worker_is_not_lost() {
    rings_are_heard_by_one_of_two(2);
}

#[test]
fn a_ring_is_heard_by_a_worker_that_falls_asleep() {
    loom::model(|| {
        let worker = Worker::new();
        let caller = {
            let worker = Arc::clone(&worker);
            thread::spawn(move || worker.ask(0))
        };
        worker.run([1, 0]);
        caller.join().unwrap();
    });
}

#[test]
fn a_second_ring_of_the_same_source_is_not_lost() {
    loom::model(|| {
        let worker = Worker::new();
        let caller = {
            let worker = Arc::clone(&worker);
            thread::spawn(move || {
                worker.ask(0);
                worker.ask(0);
            })
        };
        worker.run([2, 0]);
        caller.join().unwrap();
    });
}

#[test]
fn rings_of_two_threads_are_heard() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let worker = Worker::new();
        let callers = [0, 1].map(|source| {
            let worker = Arc::clone(&worker);
            thread::spawn(move || worker.ask(source))
        });
        worker.run([1, 1]);
        for caller in callers {
            caller.join().unwrap();
        }
    });
}
