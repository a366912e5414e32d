use super::*;
use crate::engine::request::Outcome;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::AtomicU64;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

/// A profiler that records which pieces were started under which handle, and the later calls.
#[derive(Default)]
struct Books {
    declines: AtomicBool,
    /// Starts that are declined in addition, by their number: bit 0 for the first.
    declined: AtomicU64,
    details: AtomicBool,
    patient: AtomicBool,
    sums: AtomicBool,
    /// How many pieces were reported together, call by call.
    together: Mutex<Vec<usize>>,
    entries: Mutex<Vec<Entry>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Clone)]
struct Entry {
    transfer: usize,
    length: u64,
    again: bool,
    stops: u32,
    retransmissions: u32,
    /// As reported at the stop.
    waits: Waits,
    rail: u16,
    /// Rail and path of all its bytes, if there is one.
    on: (Option<u16>, Option<u16>),
    reconnects: u16,
}

impl Listener for Books {
    fn reader(&self) -> Reader {
        match [&self.details, &self.patient, &self.sums].map(|flag| flag.load(Ordering::Relaxed)) {
            [false, ..] => Reader::None,
            [_, false, _] => Reader::Hasty,
            [.., false] => Reader::Patient,
            _ => Reader::Sums,
        }
    }

    unsafe fn summary(&self, transfer: *mut c_void, source: &Source<'_>, pieces: &[Piece]) -> bool {
        lock(&self.together).push(pieces.len());
        let mut source = Source { ..*source };
        pieces.iter().enumerate().all(|(number, piece)| {
            assert!(piece.ended.is_some());
            // SAFETY: the caller keeps this function's promise, which is the same.
            let handle = unsafe { self.start(transfer, &source, piece) };
            if !handle.is_null() {
                self.stop(handle, &source, piece);
                source.reconnects = 0;
            }
            !handle.is_null() || number > 0
        })
    }

    unsafe fn start(&self, transfer: *mut c_void, source: &Source<'_>, piece: &Piece) -> *mut c_void {
        assert!(!transfer.is_null(), "a start reads through the handle");
        let mut entries = lock(&self.entries);
        entries.push(Entry {
            transfer: transfer.addr(),
            length: piece.chunk.length,
            again: piece.chunk.again,
            stops: 0,
            retransmissions: 0,
            waits: Waits::default(),
            rail: source.path(piece).rail,
            on: (source.rail(piece), source.stream(piece)),
            reconnects: 0,
        });
        let declined = self.declined.load(Ordering::Relaxed) >> (entries.len() - 1).min(63) & 1 == 1;
        let declines = declined || self.declines.load(Ordering::Relaxed);
        if declines { std::ptr::null_mut() } else { std::ptr::without_provenance_mut(entries.len()) }
    }

    fn stop(&self, handle: *mut c_void, source: &Source<'_>, piece: &Piece) {
        let entry = &mut lock(&self.entries)[handle.addr() - 1];
        entry.stops += 1;
        entry.retransmissions = piece.retransmissions;
        entry.waits = piece.waits;
        entry.reconnects += source.reconnects;
    }
}

fn set_up(send: bool) -> (Arc<Books>, Events) {
    let (books, events) = (Arc::new(Books::default()), Events::default());
    events.listen(books.clone(), 7, send);
    events.set_path(0, Path { carrier: Carrier::Socket { fd: 5 }, rail: 0, peer: None });
    (books, events)
}

fn handle(number: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(number * 64)
}

fn outcome(sizes: &[u64]) -> Outcome {
    let mut all = [0; MAX_PARTS];
    all[..sizes.len()].copy_from_slice(sizes);
    Outcome { parts: sizes.len(), sizes: all }
}

/// Request slots that hold no last record: notes go into the lists.
fn nobody() -> RequestSlots {
    RequestSlots::new()
}

fn chunk(offset: u64, length: u64, total: u64) -> Chunk {
    Chunk { offset, length, total, ..Chunk::default() }
}

// SAFETY of all calls below: the recorder uses the handles only as numbers.
#[allow(clippy::undocumented_unsafe_blocks)]
mod reports {
    use super::*;

    #[test]
    fn each_piece_is_started_and_stopped_once_and_only_when_nccls_thread_comes_by() {
        let (books, events) = set_up(true);
        events.follow(3, 0, handle(1));
        events.chunk_begins(3, 0, &chunk(0, 100, 300));
        events.chunk_begins(3, 0, &chunk(100, 100, 300));
        events.chunk_ends(3, 0, 0, 100);
        assert!(lock(&books.entries).is_empty(), "nothing is reported from the threads that move data");
        unsafe { events.report() };
        let stops: Vec<_> = lock(&books.entries).iter().map(|entry| entry.stops).collect();
        assert_eq!(stops, [0, 1]);
        unsafe { events.conclude(3, &outcome(&[300]), None) };
        unsafe { events.report() };
        let entries = lock(&books.entries);
        let reported: Vec<_> = entries.iter().map(|entry| (entry.length, entry.stops)).collect();
        assert_eq!(reported, [(100, 1), (100, 1), (100, 1)]);
    }

    #[test]
    fn a_patient_listener_is_told_at_the_end_of_all_that_is_over_in_one_call() {
        let (books, events) = set_up(true);
        books.details.store(true, Ordering::Relaxed);
        books.patient.store(true, Ordering::Relaxed);
        let over = |offset, length| events.chunk_over(&nobody(), 3, 0, &chunk(offset, length, 300), Ticks::now());
        events.follow(3, 0, handle(1));
        over(0, 50);
        over(50, 100);
        unsafe { events.report() };
        assert!(lock(&books.together).is_empty(), "not before the end");
        over(150, 150);
        unsafe { events.conclude(3, &outcome(&[300]), None) };
        assert_eq!(*lock(&books.together), [3]);
        let reported: Vec<_> = lock(&books.entries).iter().map(|entry| (entry.length, entry.stops)).collect();
        assert_eq!(reported, [(50, 1), (100, 1), (150, 1)]);
        // Also when a chunk was resent, and no thread noted some bytes.
        events.follow(3, 0, handle(1));
        over(0, 50);
        events.chunk_begins(3, 0, &Chunk { again: true, ..chunk(50, 100, 300) });
        over(50, 100);
        unsafe { events.report() };
        over(150, 30);
        unsafe { events.conclude(3, &outcome(&[300]), None) };
        assert_eq!(*lock(&books.together), [3, 5]);
        let reported: Vec<_> =
            lock(&books.entries).drain(..).skip(3).map(|entry| (entry.length, entry.again)).collect();
        assert_eq!(reported, [(50, false), (100, false), (100, true), (30, false), (120, false)]);
        lock(&books.together).clear();

        // Declined: nothing more of that transfer, and the next is reported as one.
        books.declines.store(true, Ordering::Relaxed);
        events.follow(3, 0, handle(2));
        over(0, 150);
        unsafe { events.report() };
        over(150, 150);
        unsafe { events.conclude(3, &outcome(&[300]), None) };
        assert_eq!((lock(&books.entries).len(), events.has_sink()), (1, false));
        books.declines.store(false, Ordering::Relaxed);
        events.follow(3, 0, handle(3));
        unsafe { events.conclude(3, &outcome(&[300]), None) };
        assert_eq!(lock(&books.entries).last().map(|entry| (entry.length, entry.stops)), Some((300, 1)));
        assert!(events.has_sink());
        assert_eq!(*lock(&books.together), [2, 1]);
    }

    #[test]
    fn what_one_rail_carried_may_be_told_as_one_to_who_adds_up() {
        let (books, events) = set_up(true);
        for flag in [&books.details, &books.patient, &books.sums] {
            flag.store(true, Ordering::Relaxed);
        }
        let path = |rail, fd| Path { carrier: Carrier::Socket { fd }, rail, peer: None };
        events.set_path(1, path(0, 6));
        assert!(!events.joins(), "before a profiler has listened");
        events.follow(3, 0, handle(1));
        assert!(events.joins());
        // The chunks and their order no longer matter: all waits belong to the transfer.
        let since = Ticks::now();
        std::thread::sleep(Duration::from_millis(1));
        for (path, offset) in [(0, 0), (1, 200)] {
            events.chunk_waited(3, 0, path, offset, since);
        }
        let waited = events.notes.get().is_some_and(Notes::are_there);
        let all = Chunk { joined: true, path: 1, ..chunk(0, 300, 300) };
        events.chunk_over(&nobody(), 3, 0, &all, Ticks::now());
        unsafe { events.conclude(3, &outcome(&[300]), None) };
        assert!(waited);
        {
            let entries = lock(&books.entries);
            let [Entry { length: 300, stops: 1, on: (Some(0), None), waits, .. }] = entries[..] else {
                panic!("one piece, of no single stream: {entries:?}")
            };
            assert!(waits.socket >= 2_000_000 && waits.credit > 0, "{waits:?}");
        }
        // Over another rail: a listener that sums by rails must get it chunk by chunk.
        events.set_path(2, path(1, 7));
        assert!(!events.joins());
        events.set_path(2, path(0, 7));
        assert!(events.joins(), "it has gone over to the other's rail");
    }

    /// A transfer of 300 bytes that has ended and is recorded in its request; `before` may note something else first.
    fn told_by_its_request(events: &Events, requests: &RequestSlots, before: impl FnOnce(u16)) {
        let ticket = requests.take(1).expect("a free slot");
        events.follow(ticket.slot, 0, handle(1));
        std::thread::sleep(Duration::from_millis(1));
        before(ticket.slot);
        let all = Chunk { joined: true, message: 9, ..chunk(0, 300, 300) };
        events.chunk_over(requests, ticket.slot, 0, &all, Ticks::now());
        assert!(unsafe { events.finish(requests, ticket) }.is_none(), "not done");
        requests.complete_part(ticket.slot, 0, 300);
        assert_eq!(unsafe { events.finish(requests, ticket) }.map(|outcome| outcome.sizes[0]), Some(300));
    }

    #[test]
    fn what_a_request_says_of_its_end_is_told_as_what_is_noted() {
        for patient in [true, false] {
            let ((books, events), requests) = (set_up(true), RequestSlots::new());
            books.details.store(true, Ordering::Relaxed);
            books.patient.store(patient, Ordering::Relaxed);
            told_by_its_request(&events, &requests, |_| ());
            let is_filled = || events.notes.get().is_some_and(Notes::are_there);
            assert!(!is_filled(), "it is noted nowhere else");
            let since = Ticks::now();
            told_by_its_request(&events, &requests, |slot| events.chunk_waited(slot, 0, 0, 0, since));
            assert!(!is_filled());
            let entries = lock(&books.entries);
            let reported: Vec<_> = entries.iter().map(|entry| (entry.transfer, entry.length, entry.stops)).collect();
            assert_eq!(reported, [(64, 300, 1), (64, 300, 1)]);
            assert_eq!(entries.iter().map(|entry| entry.waits.socket > 0).collect::<Vec<_>>(), [false, true]);
            assert!(entries.iter().all(|entry| entry.waits.credit > 0), "until it left");
            assert_eq!(*lock(&books.together), if patient { vec![1, 1] } else { vec![] });
        }
    }

    #[test]
    fn of_a_request_that_fails_its_last_words_are_not_told_nor_to_the_next_that_has_its_slot() {
        let ((books, events), requests) = (set_up(false), RequestSlots::new());
        books.details.store(true, Ordering::Relaxed);
        books.patient.store(true, Ordering::Relaxed);
        let ticket = requests.take(1).expect("a free slot");
        events.follow(ticket.slot, 0, handle(1));
        events.chunk_over(&requests, ticket.slot, 0, &chunk(0, 300, 300), Ticks::now());
        unsafe { events.abandon(ticket.slot) };
        requests.abandon(ticket);
        assert!(lock(&books.entries).is_empty());
        let ticket = requests.take(1).expect("a free slot");
        events.follow(ticket.slot, 0, handle(2));
        requests.complete_part(ticket.slot, 0, 5);
        assert!(unsafe { events.finish(&requests, ticket) }.is_some());
        assert_eq!(lock(&books.entries).iter().map(|entry| (entry.length, entry.stops)).collect::<Vec<_>>(), [(5, 1)]);
    }

    #[test]
    fn for_a_patient_listener_notes_are_read_now_and_then_while_a_request_is_not_done() {
        let (books, events) = set_up(true);
        books.details.store(true, Ordering::Relaxed);
        books.patient.store(true, Ordering::Relaxed);
        events.follow(3, 0, handle(1));
        let are_there = || events.notes.get().is_some_and(Notes::are_there);
        for round in 0..3 {
            events.chunk_over(&nobody(), 3, 0, &chunk(round, 1, 10), Ticks::now());
            for _ in 1..report::CALLS {
                unsafe { events.wait() };
                assert!(are_there(), "not in each call");
            }
            unsafe { events.wait() };
            assert!(!are_there(), "once in so many");
        }
        assert!(lock(&books.entries).is_empty(), "nothing is reported before the end");
        unsafe { events.conclude(3, &outcome(&[10]), None) };
        let reported: Vec<_> = lock(&books.entries).iter().map(|entry| (entry.length, entry.stops)).collect();
        assert_eq!(reported, [(1, 1), (1, 1), (1, 1), (7, 1)]);
    }

    #[test]
    fn a_reconnection_is_told_once() {
        let (books, events) = set_up(true);
        books.details.store(true, Ordering::Relaxed);
        books.patient.store(true, Ordering::Relaxed);
        events.set_path(0, Path { carrier: Carrier::Socket { fd: 6 }, rail: 0, peer: None });
        for _ in 0..2 {
            told_by_its_request(&events, &RequestSlots::new(), |_| ());
        }
        let reported: Vec<_> = lock(&books.entries).iter().map(|entry| (entry.stops, entry.reconnects)).collect();
        assert_eq!(reported, [(1, 1), (1, 0)]);
    }

    #[test]
    fn what_was_noted_of_a_transfer_that_was_declined_is_not_told_of_the_next_in_its_slot() {
        let (books, events) = set_up(true);
        books.declined.store(1, Ordering::Relaxed);
        events.follow(0, 0, handle(1));
        events.chunk_begins(0, 0, &chunk(0, 5, 10));
        unsafe { events.report() };
        events.chunk_begins(0, 0, &chunk(5, 5, 10));
        unsafe { events.conclude(0, &outcome(&[10]), None) };
        events.has_sink.store(true, Ordering::Relaxed);
        events.follow(0, 0, handle(2));
        events.chunk_begins(0, 0, &chunk(0, 7, 7));
        unsafe { events.conclude(0, &outcome(&[7]), None) };
        let reported: Vec<_> = lock(&books.entries).iter().map(|entry| (entry.transfer, entry.length)).collect();
        assert_eq!(reported, [(64, 5), (128, 7)]);
    }

    #[test]
    fn after_the_end_nothing_is_told_whatever_is_still_noted() {
        let (books, events) = set_up(false);
        events.follow(0, 0, handle(1));
        unsafe { events.conclude(0, &outcome(&[0]), None) };
        events.chunk_begins(0, 0, &chunk(0, 5, 5));
        unsafe { events.report() };
        unsafe { events.conclude(0, &outcome(&[5]), None) };
        assert_eq!(lock(&books.entries).iter().map(|entry| (entry.length, entry.stops)).collect::<Vec<_>>(), [(0, 1)]);
    }

    #[test]
    fn a_declined_start_ends_the_matter_and_costs_the_next_transfers_one_start_each() {
        let (books, events) = set_up(true);
        books.declines.store(true, Ordering::Relaxed);
        for number in 1..=3 {
            events.follow(0, 0, handle(number));
            events.chunk_begins(0, 0, &chunk(0, 5, 10));
            unsafe { events.report() };
            events.chunk_begins(0, 0, &chunk(5, 5, 10));
            unsafe { events.report() };
            unsafe { events.conclude(0, &outcome(&[10]), None) };
            assert!(!events.has_sink());
            assert_eq!(lock(&books.entries).len(), number);
        }
        // A listener starts: the next transfer is reported whole, later ones in pieces.
        books.declines.store(false, Ordering::Relaxed);
        events.follow(0, 0, handle(4));
        unsafe { events.conclude(0, &outcome(&[10]), None) };
        assert!(events.has_sink());
        let entries = lock(&books.entries);
        assert_eq!((entries.len(), entries[3].length, entries[3].stops), (4, 10, 1));
    }

    #[test]
    fn a_later_start_that_is_declined_has_no_stop_and_leaves_the_other_pieces_alone() {
        for declined in [0b010, 0b100, 0b110] {
            let (books, events) = set_up(true);
            books.declined.store(declined, Ordering::Relaxed);
            events.follow(0, 0, handle(1));
            for offset in [0, 100, 200] {
                events.chunk_begins(0, 0, &chunk(offset, 100, 300));
                unsafe { events.report() };
            }
            // Ended in another order than begun; the last by the request's end.
            events.chunk_ends(0, 0, 0, 100);
            unsafe { events.report() };
            events.chunk_ends(0, 0, 0, 0);
            unsafe { events.conclude(0, &outcome(&[300]), None) };
            let stops: Vec<_> = lock(&books.entries).iter().map(|entry| entry.stops).collect();
            let expected: Vec<_> = (0..3).map(|number| u32::from(declined >> number & 1 == 0)).collect();
            assert_eq!(stops, expected, "each start is asked once, and only what was taken is stopped");
            // A listener that accepted the last piece is called for the next transfer's pieces. A listener that
            // declined it is called once at the transfer's end.
            books.declined.store(0, Ordering::Relaxed);
            events.follow(0, 0, handle(2));
            events.chunk_begins(0, 0, &chunk(0, 5, 10));
            unsafe { events.conclude(0, &outcome(&[10]), None) };
            let entries = lock(&books.entries);
            let next: u64 = entries[3..].iter().map(|entry| entry.length).sum();
            assert_eq!((next, entries[3..].iter().all(|entry| entry.stops == 1)), (10, true));
            assert!(events.has_sink());
        }
    }

    #[test]
    fn a_failed_transfer_stops_nothing_that_was_declined() {
        let (books, events) = set_up(true);
        books.declined.store(0b10, Ordering::Relaxed);
        events.follow(0, 0, handle(1));
        events.chunk_begins(0, 0, &chunk(0, 5, 15));
        events.chunk_begins(0, 0, &chunk(5, 5, 15));
        unsafe { events.report() };
        unsafe { events.abandon(0) };
        assert_eq!(lock(&books.entries).iter().map(|entry| entry.stops).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn a_wait_for_the_socket_is_told_of_the_chunk_that_waited() {
        let (books, events) = set_up(true);
        books.details.store(true, Ordering::Relaxed);
        events.follow(0, 0, handle(1));
        for offset in [0, 10, 20] {
            events.chunk_begins(0, 0, &chunk(offset, 10, 30));
        }
        let began = Ticks::now();
        std::thread::sleep(Duration::from_millis(3));
        events.chunk_waited(0, 0, 0, 10, began);
        // A stream may be full more than once in a chunk.
        let again = Ticks::now();
        std::thread::sleep(Duration::from_millis(3));
        events.chunk_waited(0, 0, 0, 10, again);
        let most = Ticks::now().nanoseconds_since(began);
        events.chunk_ends(0, 0, 0, 20);
        // Another path: this chunk did not wait.
        events.chunk_waited(0, 0, 1, 20, began);
        unsafe { events.conclude(0, &outcome(&[30]), None) };
        let entries = lock(&books.entries);
        let socket: Vec<_> = entries.iter().map(|entry| entry.waits.socket).collect();
        assert_eq!((socket[0], socket[2]), (0, 0), "{socket:?}");
        assert!((6_000_000..=most).contains(&socket[1]), "both waits and no more than both: {socket:?} of {most}");
        assert_eq!(entries[1].waits.credit, 0, "no other cause");
    }

    #[test]
    fn before_the_receiver_is_ready_a_send_waits_for_it_and_after_that_for_credit() {
        let (books, events) = set_up(true);
        books.details.store(true, Ordering::Relaxed);
        let posted = Ticks::now();
        events.follow(0, 0, handle(1));
        std::thread::sleep(Duration::from_millis(4));
        let before = Ticks::now();
        events.ready(0, 0);
        let after = Ticks::now();
        std::thread::sleep(Duration::from_millis(2));
        // Only the first time counts.
        events.ready(0, 0);
        events.chunk_begins(0, 0, &chunk(0, 10, 10));
        let left = Ticks::now();
        unsafe { events.conclude(0, &outcome(&[10]), None) };
        let Waits { receiver, socket, credit } = lock(&books.entries)[0].waits;
        assert!((4_000_000..=after.nanoseconds_since(posted)).contains(&receiver), "{receiver}");
        assert!((2_000_000..=left.nanoseconds_since(before)).contains(&credit), "{credit}");
        assert_eq!(socket, 0);
    }

    #[test]
    fn a_receive_waits_for_nothing_that_is_known_here() {
        let (books, events) = set_up(false);
        books.details.store(true, Ordering::Relaxed);
        events.follow(0, 0, handle(1));
        std::thread::sleep(Duration::from_millis(1));
        events.chunk_begins(0, 0, &chunk(0, 10, 10));
        unsafe { events.conclude(0, &outcome(&[10]), None) };
        assert_eq!(lock(&books.entries)[0].waits, Waits::default());
    }

    #[test]
    fn without_a_handle_or_a_listener_nothing_is_told() {
        let (books, events) = set_up(true);
        events.follow(0, 0, std::ptr::null_mut());
        events.chunk_begins(0, 0, &chunk(0, 5, 5));
        unsafe { events.conclude(0, &outcome(&[5]), None) };
        assert!(lock(&books.entries).is_empty());
        let deaf = Events::default();
        deaf.follow(0, 0, handle(1));
        deaf.chunk_begins(0, 0, &chunk(0, 5, 5));
        unsafe { deaf.conclude(0, &outcome(&[5]), None) };
        assert!(!deaf.has_sink() && deaf.notes.get().is_none(), "and nothing is kept");
    }

    #[test]
    fn the_rest_is_on_a_rail_or_a_path_when_the_connection_has_no_other() {
        let rest_over = |rails: &[u16]| {
            let (books, events) = set_up(true);
            for (index, &rail) in rails.iter().enumerate() {
                events.set_path(index, Path { carrier: Carrier::Socket { fd: 5 }, rail, peer: None });
            }
            events.follow(0, 0, handle(1));
            for at in 0..20 {
                let path = (at % rails.len() as u64) as u16;
                events.chunk_begins(0, 0, &Chunk { path, ..chunk(at, 1, 20) });
                // Between paths the only order is the order of the reports.
                unsafe { events.report() };
            }
            unsafe { events.conclude(0, &outcome(&[20]), None) };
            let entries = lock(&books.entries);
            let last = rails.len() as u16 - 1;
            assert_eq!(entries[usize::from(last)].on, (Some(rails[usize::from(last)]), Some(last)), "one chunk's own");
            (entries.len(), entries[MOST - 1].on)
        };
        assert_eq!(rest_over(&[2]), (MOST, (Some(2), Some(0))));
        assert_eq!(rest_over(&[2, 2, 2]), (MOST, (Some(2), None)));
        assert_eq!(rest_over(&[0, 1]), (MOST, (None, None)));
    }

    #[test]
    fn a_failed_transfer_stops_what_it_started_and_starts_nothing() {
        let (books, events) = set_up(true);
        events.follow(0, 0, handle(1));
        events.chunk_begins(0, 0, &chunk(0, 5, 15));
        unsafe { events.report() };
        events.chunk_begins(0, 0, &chunk(5, 5, 15));
        unsafe { events.abandon(0) };
        assert_eq!(lock(&books.entries).iter().map(|entry| (entry.length, entry.stops)).collect::<Vec<_>>(), [(5, 1)]);
    }

    #[test]
    fn the_parts_of_a_group_are_told_under_their_own_handles() {
        let (books, events) = set_up(false);
        for part in 0..4 {
            events.follow(2, part, handle(part + 1));
        }
        events.chunk_begins(2, 1, &chunk(0, 20, 20));
        unsafe { events.conclude(2, &outcome(&[10, 20, 0, 40]), None) };
        let mut sums = HashMap::new();
        for entry in lock(&books.entries).iter() {
            assert_eq!(entry.stops, 1);
            *sums.entry(entry.transfer / 64).or_insert(0) += entry.length;
        }
        assert_eq!(sums, HashMap::from([(1, 10), (2, 20), (3, 0), (4, 40)]));
    }

    #[test]
    fn what_travels_again_is_told_apart_and_only_to_who_reads_it() {
        for details in [true, false] {
            let (books, events) = set_up(true);
            books.details.store(details, Ordering::Relaxed);
            events.set_path(1, Path { carrier: Carrier::Socket { fd: 6 }, rail: 1, peer: None });
            events.follow(0, 0, handle(1));
            events.chunk_begins(0, 0, &chunk(0, 10, 10));
            events.set_path(1, Path { carrier: Carrier::Socket { fd: 7 }, rail: 0, peer: None });
            events.chunk_begins(0, 0, &Chunk { again: true, path: 1, ..chunk(0, 10, 10) });
            unsafe { events.conclude(0, &outcome(&[10]), None) };
            let entries = lock(&books.entries);
            let first = entries.iter().filter(|entry| !entry.again).map(|entry| entry.length).sum::<u64>();
            let again = entries.iter().filter(|entry| entry.again).map(|entry| entry.length).sum::<u64>();
            assert_eq!((first, again), (10, if details { 10 } else { 0 }));
            let reported: u16 = entries.iter().map(|entry| entry.reconnects).sum();
            assert_eq!(reported, u16::from(details), "a path that was connected anew is reported once");
            assert!(entries.iter().all(|entry| entry.stops == 1 && entry.rail == 0));
        }
    }
}

#[test]
fn many_threads_note_while_one_tells_and_every_transfer_adds_up() {
    let (books, events) = set_up(true);
    events.set_path(1, Path { carrier: Carrier::Socket { fd: 6 }, rail: 0, peer: None });
    const TRANSFERS: usize = 400;
    let next = AtomicU64::new(0);
    let ready = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (events, next, ready) = (&events, &next, &ready);
        for path in 0..2 {
            scope.spawn(move || {
                loop {
                    // Each thread takes chunks of the current transfer, as streams do.
                    let at = next.load(Ordering::Acquire);
                    if at == u64::MAX {
                        return;
                    }
                    let taken = ready.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1));
                    let Ok(left) = taken else {
                        std::thread::yield_now();
                        continue;
                    };
                    events.chunk_begins(0, 0, &Chunk { path, ..chunk((left - 1) * 10, 10, 120) });
                    events.chunk_ends(0, 0, path, (left - 1) * 10);
                    next.fetch_add(1, Ordering::AcqRel);
                }
            });
        }
        for number in 1..=TRANSFERS {
            events.follow(0, 0, handle(number));
            next.store(0, Ordering::Release);
            ready.store(12, Ordering::Release);
            while next.load(Ordering::Acquire) < 12 {
                // SAFETY: the recorder uses the handles only as numbers.
                unsafe { events.report() };
            }
            // SAFETY: as above.
            unsafe { events.conclude(0, &outcome(&[120]), None) };
        }
        next.store(u64::MAX, Ordering::Release);
    });
    let mut sums: HashMap<usize, (u64, usize)> = HashMap::new();
    for entry in lock(&books.entries).iter() {
        assert_eq!(entry.stops, 1);
        let sum = sums.entry(entry.transfer / 64).or_default();
        *sum = (sum.0 + entry.length, sum.1 + 1);
    }
    assert_eq!(sums.len(), TRANSFERS);
    assert!(sums.values().all(|(bytes, events)| *bytes == 120 && *events == MOST), "{sums:?}");
}
