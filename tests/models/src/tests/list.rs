//! The list of notes between threads that move data and NCCL's loses nothing, doubles nothing and keeps its order, and
//! what was noted before a request ended is there when its end is seen.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use crate::engine::events::list::{List, WORDS};

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    builder.check(model);
}

/// An entry that does not come out whole shows.
fn words(id: u32) -> [u64; WORDS] {
    [u64::from(id) << 8; WORDS]
}

fn take(list: &List, seen: &mut Vec<u32>) {
    list.take(|id, found| {
        assert_eq!(found, words(id));
        seen.push(id);
    });
}

#[test]
fn two_writers_and_the_reader_agree_on_every_entry() {
    check(|| {
        let list = Arc::new(List::new(4));
        let writers = [10, 20].map(|first| {
            let list = Arc::clone(&list);
            thread::spawn(move || {
                list.add(first, words(first));
                list.add(first + 1, words(first + 1));
            })
        });
        let mut seen = Vec::new();
        take(&list, &mut seen);
        for writer in writers {
            writer.join().unwrap();
        }
        take(&list, &mut seen);
        for first in [10, 20] {
            let own: Vec<u32> = seen.iter().copied().filter(|id| id / 10 == first / 10).collect();
            assert_eq!(own, [first, first + 1]);
        }
        assert!(seen.len() == 4 && !list.is_filled());
    });
}

#[test]
fn a_writer_that_laps_the_reader_overwrites_nothing_that_is_not_read() {
    check(|| {
        let list = Arc::new(List::new(2));
        let writer = {
            let list = Arc::clone(&list);
            thread::spawn(move || (1..=4).for_each(|id| list.add(id, words(id))))
        };
        let mut seen = Vec::new();
        take(&list, &mut seen);
        take(&list, &mut seen);
        writer.join().unwrap();
        take(&list, &mut seen);
        // Full lists refuse: nothing that came out is out of order or came twice, and the first two always fit.
        assert!(seen.is_sorted_by(|a, b| a < b) && seen[..2] == [1, 2], "{seen:?}");
    });
}

#[test]
fn what_was_noted_before_a_request_ended_is_there_when_its_end_is_seen() {
    check(|| {
        let (list, ended) = (Arc::new(List::new(4)), Arc::new(AtomicU64::new(0)));
        let writers = [1, 2].map(|id| {
            let (list, ended) = (Arc::clone(&list), Arc::clone(&ended));
            thread::spawn(move || {
                list.add(id, words(id));
                ended.fetch_or(1 << id, Ordering::Release);
            })
        });
        let mut seen = Vec::new();
        let over = ended.load(Ordering::Acquire);
        assert!(over == 0 || list.is_filled());
        take(&list, &mut seen);
        for id in [1, 2] {
            assert!(over & 1 << id == 0 || seen.contains(&id));
        }
        for writer in writers {
            writer.join().unwrap();
        }
    });
}
