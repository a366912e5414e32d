use super::*;
use proptest::prelude::*;
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::Duration;

fn pages(first: usize, count: usize) -> PageRange {
    PageRange::covering(first * PAGE_BYTES, count * PAGE_BYTES).expect("a small range")
}

#[test]
fn ranges_are_whole_pages() {
    let range = |address, length| PageRange::covering(address, length).map(|range| (range.start, range.end));
    assert_eq!(range(0x1000, 1), Some((0x1000, 0x2000)));
    assert_eq!(range(0x1fff, 2), Some((0x1000, 0x3000)));
    assert_eq!(range(0x1000, 0x1000), Some((0x1000, 0x2000)));
    assert_eq!(range(0x1234, 0), Some((0x1000, 0x2000)));
    assert_eq!(range(usize::MAX, 1), None);
    assert_eq!(range(usize::MAX - 5000, 5000), None);
}

#[test]
fn repeated_and_contained_registrations_share_one_region_until_the_last_ends() {
    let made = AtomicUsize::new(0);
    let cache = Cache::<u8, usize>::new();
    let lease =
        |range, kind| cache.lease(range, kind, |_| Ok::<_, Infallible>(made.fetch_add(1, Ordering::Relaxed))).unwrap();
    let whole = lease(pages(0, 8), 0);
    let again = lease(pages(0, 8), 0);
    let part = lease(pages(3, 2), 0);
    assert_eq!((*whole, *again, *part), (0, 0, 0));
    assert_eq!(*lease(pages(3, 2), 1), 1, "another kind of memory is another region");
    assert_eq!(*lease(pages(7, 2), 0), 2, "a range that sticks out is another region");
    drop((whole, again));
    assert_eq!(*lease(pages(4, 1), 0), 0, "pages that a lease still covers are served");
    assert_eq!(*lease(pages(5, 1), 0), 3, "pages that no lease covers may be others by now");
    drop(part);
    assert_eq!(cache.regions(), 0);
}

#[test]
fn equal_registrations_at_the_same_time_make_one_region() {
    const THREADS: usize = 8;
    let cache = Cache::<(), ()>::new();
    let made = AtomicUsize::new(0);
    let start = Barrier::new(THREADS);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let (cache, made, start) = (&cache, &made, &start);
                scope.spawn(move || {
                    start.wait();
                    cache.lease(pages(number, 64 - 2 * number), (), |_| {
                        thread::sleep(Duration::from_millis(20));
                        made.fetch_add(1, Ordering::Relaxed);
                        Ok::<_, Infallible>(())
                    })
                })
            })
            .collect();
        let leases: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("no panic").unwrap()).collect();
        assert!(cache.regions() <= made.load(Ordering::Relaxed));
        drop(leases);
    });
    assert_eq!(cache.regions(), 0);
    // The widest one may be requested last: then each narrower one had to be made. But none is made twice.
    let again = AtomicUsize::new(0);
    let start = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                start.wait();
                let lease = cache.lease(pages(0, 64), (), |_| {
                    thread::sleep(Duration::from_millis(20));
                    again.fetch_add(1, Ordering::Relaxed);
                    Ok::<_, Infallible>(())
                });
                thread::sleep(Duration::from_millis(100));
                drop(lease);
            });
        }
    });
    assert_eq!(again.load(Ordering::Relaxed), 1);
}

#[test]
fn a_failure_or_a_panic_is_the_makers_own_and_the_waiting_one_tries_by_itself() {
    let cache = Cache::<(), &str>::new();
    for panics in [false, true] {
        let (making, is_making) = mpsc::channel();
        thread::scope(|scope| {
            let cache = &cache;
            let first = scope.spawn(move || {
                let made = cache.lease(pages(0, 8), (), |_| {
                    making.send(()).expect("the test listens");
                    thread::sleep(Duration::from_millis(50));
                    assert!(!panics, "a panic while registering");
                    Err("over the limit")
                });
                made.err()
            });
            is_making.recv().expect("the first is at it");
            let second = cache.lease(pages(2, 1), (), |range| {
                assert_eq!(range, pages(2, 1), "its own range, not the failed one");
                Ok::<_, &str>("small enough")
            });
            assert_eq!(second.map(|lease| *lease).unwrap(), "small enough");
            match first.join() {
                Ok(error) => assert_eq!(error, Some("over the limit")),
                Err(_) => assert!(panics),
            }
        });
        assert_eq!(cache.regions(), 0);
    }
}

/// The actions of a user with 24 pages.
#[derive(Debug, Clone)]
enum Step {
    Register {
        first: usize,
        count: usize,
    },
    Deregister {
        which: usize,
    },
    /// Maps fresh pages wherever no registration of the user's is in the way.
    Remap {
        first: usize,
        count: usize,
    },
}

const PAGES: usize = 24;

/// A region of the model: the pages that were mapped when it was made.
type Pinned = Vec<(usize, u32)>;

fn step() -> impl Strategy<Value = Step> {
    let range = (0..PAGES).prop_flat_map(|first| (Just(first), 1..=PAGES - first));
    prop_oneof![
        4 => range.clone().prop_map(|(first, count)| Step::Register { first, count }),
        3 => any::<usize>().prop_map(|which| Step::Deregister { which }),
        2 => range.prop_map(|(first, count)| Step::Remap { first, count }),
    ]
}

proptest! {
    /// However registrations overlap, end and begin, a region never refers to pages that are no longer mapped at its
    /// lease.
    #[test]
    fn a_lease_always_reaches_the_pages_that_are_mapped_now(steps in prop::collection::vec(step(), 1..60)) {
        let cache = Cache::<(), Pinned>::new();
        let mut mapped = [0_u32; PAGES];
        let mut leases: Vec<(usize, usize, Lease<(), Pinned>)> = Vec::new();
        for step in steps {
            match step {
                Step::Register { first, count } => {
                    let lease = cache.lease(pages(first, count), (), |range| {
                        let first = range.start() / PAGE_BYTES;
                        let pinned = first..first + range.bytes() / PAGE_BYTES;
                        Ok::<_, Infallible>(pinned.map(|page| (page, mapped[page])).collect::<Pinned>())
                    });
                    leases.push((first, count, lease.unwrap()));
                }
                Step::Deregister { which } => {
                    if !leases.is_empty() {
                        leases.swap_remove(which % leases.len());
                    }
                }
                Step::Remap { first, count } => {
                    for (page, mapping) in mapped.iter_mut().enumerate().skip(first).take(count) {
                        if !leases.iter().any(|(start, count, _)| (*start..start + count).contains(&page)) {
                            *mapping += 1;
                        }
                    }
                }
            }
            for (first, count, lease) in &leases {
                for (page, mapping) in mapped.iter().enumerate().skip(*first).take(*count) {
                    let pinned = lease.iter().find(|(number, _)| *number == page);
                    prop_assert_eq!(pinned.map(|(_, pinned)| pinned), Some(mapping), "page {}", page);
                }
            }
            prop_assert!(cache.regions() <= leases.len());
        }
        leases.clear();
        prop_assert_eq!(cache.regions(), 0);
    }
}

#[test]
fn many_threads_leave_nothing_behind() {
    struct Counted<'a>(&'a AtomicUsize);
    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let alive = AtomicUsize::new(0);
    let cache = Cache::<(), Counted<'_>>::new();
    thread::scope(|scope| {
        for seed in 0..4_usize {
            let (cache, alive) = (&cache, &alive);
            scope.spawn(move || {
                let mut held = std::collections::VecDeque::new();
                for round in 0..2000 {
                    let first = (seed * 7 + round * 13) % 20;
                    let lease = cache.lease(pages(first, 1 + round % 4), (), |_| {
                        alive.fetch_add(1, Ordering::SeqCst);
                        if round % 17 == 0 {
                            alive.fetch_sub(1, Ordering::SeqCst);
                            return Err(());
                        }
                        Ok(Counted(alive))
                    });
                    held.extend(lease.ok());
                    if held.len() > 5 {
                        held.pop_front();
                    }
                }
            });
        }
    });
    assert_eq!((cache.regions(), alive.load(Ordering::SeqCst)), (0, 0));
}
