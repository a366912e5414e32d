//! The ring between NCCL's threads and the trace's writer loses nothing, doubles nothing and keeps each thread's order.

use loom::sync::Arc;
use loom::thread;
use crate::trace::ring::{Drain, Ring, Room};

/// All threads use the same shard.
const POINTER: u64 = 0;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 20_000;
    builder.check(model);
}

#[test]
fn two_producers_and_the_consumer_agree_on_every_record() {
    check(|| {
        let ring = Arc::new(Ring::with_capacity(2));
        let producers = [10, 20].map(|id| {
            let ring = Arc::clone(&ring);
            thread::spawn(move || ring.push(POINTER, Room::Stop, |_| id).is_some())
        });
        let (mut drain, mut seen) = (Drain::default(), Vec::new());
        drain.drain(&ring, 1, &mut |_, record| seen.push(record));
        let pushed = producers.map(|producer| producer.join().unwrap());
        drain.drain(&ring, 2, &mut |_, record| seen.push(record));
        assert_eq!(pushed, [true, true], "there is room for two");
        seen.sort_unstable();
        assert_eq!(seen, [10, 20]);
    });
}

/// A slot is used again in the next lap while the consumer may still be at it.
#[test]
fn a_producer_that_laps_the_consumer_keeps_its_order() {
    check(|| {
        let ring = Arc::new(Ring::with_capacity(1));
        let producer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || [1, 2, 3].map(|id| ring.push(POINTER, Room::Stop, |_| id).map(|_| id)))
        };
        let (mut drain, mut seen) = (Drain::default(), Vec::new());
        drain.drain(&ring, 1, &mut |_, record| seen.push(record));
        drain.drain(&ring, 2, &mut |_, record| seen.push(record));
        let pushed: Vec<u64> = producer.join().unwrap().into_iter().flatten().collect();
        drain.drain(&ring, 3, &mut |_, record| seen.push(record));
        assert_eq!(seen, pushed);
    });
}

/// Two records are claimed by the second one's slot.
#[test]
fn records_that_are_pushed_together_come_out_together_over_laps() {
    check(|| {
        let ring = Arc::new(Ring::with_capacity(2));
        let pair = |ring: &Ring, first: u64| {
            let mut next = first;
            ring.push_all(POINTER, Room::Stop, 2, |_| {
                next += 1;
                next - 1
            })
        };
        assert!(pair(&ring, 1));
        let producer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || pair(&ring, 3))
        };
        let (mut drain, mut seen) = (Drain::default(), Vec::new());
        drain.drain(&ring, 1, &mut |_, record| seen.push(record));
        let other = ring.push(POINTER, Room::Stop, |_| 10).is_some();
        drain.drain(&ring, 2, &mut |_, record| seen.push(record));
        let second = producer.join().unwrap();
        drain.drain(&ring, 3, &mut |_, record| seen.push(record));
        let expected: &[&[u64]] = match (second, other) {
            (false, false) => &[&[1, 2]],
            (true, false) => &[&[1, 2, 3, 4]],
            (false, true) => &[&[1, 2, 10]],
            (true, true) => &[&[1, 2, 3, 4, 10], &[1, 2, 10, 3, 4]],
        };
        assert!(expected.contains(&&seen[..]), "{seen:?}");
    });
}
