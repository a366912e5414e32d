//! A request that is seen done is seen with all its sizes and bytes, and ends once.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use crate::engine::request::RequestSlots;

/// A buffer that a worker fills and the caller reads once the request is done; loom notices it when the two overlap.
struct Buffer(UnsafeCell<u64>);

// SAFETY: that is what the model checks.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    fn fill(&self, value: u64) {
        // SAFETY: loom checks that no thread reads at the same time.
        self.0.with_mut(|place| unsafe { *place = value });
    }

    fn read(&self) -> u64 {
        // SAFETY: loom checks that no thread writes at the same time.
        self.0.with(|place| unsafe { *place })
    }
}

#[test]
fn parts_that_end_in_two_threads_are_all_seen_when_the_request_is_done() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 20_000;
    model.check(|| {
        let slots = Arc::new(RequestSlots::new());
        let buffers = Arc::new([Buffer::new(), Buffer::new()]);
        let ticket = slots.take(2).expect("a slot is free");
        let workers = [0, 1].map(|part| {
            let (slots, buffers) = (Arc::clone(&slots), Arc::clone(&buffers));
            thread::spawn(move || {
                buffers[part].fill(part as u64 + 10);
                slots.complete_part(ticket.slot, part, part as u64 + 100);
            })
        });
        let mut outcome = None;
        for _ in 0..2 {
            outcome = outcome.or_else(|| slots.finish(ticket));
            if outcome.is_some() {
                assert_eq!([buffers[0].read(), buffers[1].read()], [10, 11]);
            }
        }
        for worker in workers {
            worker.join().unwrap();
        }
        let outcome = outcome.or_else(|| slots.finish(ticket)).expect("both parts have ended");
        assert_eq!((outcome.parts, &outcome.sizes[..2]), (2, &[100, 101][..]));
        assert!(slots.check(ticket).is_err(), "it ends once");
        assert_eq!(slots.outstanding(), 0);
    });
}

#[test]
fn a_slot_that_is_taken_again_shows_nothing_of_its_former_request() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 20_000;
    model.check(|| {
        let slots = Arc::new(RequestSlots::new());
        let first = slots.take(1).expect("a slot is free");
        let worker = {
            let slots = Arc::clone(&slots);
            thread::spawn(move || {
                assert!(slots.leave(first.slot, [7; 5]) && !slots.leave(first.slot, [8; 5]), "once");
                slots.complete_part(first.slot, 0, 5);
            })
        };
        if slots.is_done(first) {
            assert_eq!(slots.last_words(first), Some([7; 5]), "what is left with a request is there when it is done");
        }
        worker.join().unwrap();
        let other = {
            let slots = Arc::clone(&slots);
            thread::spawn(move || slots.take(1).map(|ticket| slots.finish(ticket).is_none()))
        };
        assert_eq!(slots.finish(first).map(|outcome| outcome.sizes[0]), Some(5));
        assert_eq!(other.join().unwrap(), Some(true), "a new request is done before its time");
        let again = slots.take(1).expect("a slot is free");
        assert!(slots.finish(again).is_none() && slots.last_words(again).is_none());
    });
}
