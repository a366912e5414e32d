use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use super::super::cuda::simulation as gpu;
use super::super::group::Group;
use super::super::line::{RecvEnd, SendEnd};
use super::super::outgoing::Outgoing;
use super::super::peer::GOODBYE;
use super::super::registry::Region;
use super::super::wire::HEADER;
use super::*;

/// A rank that sends what a test specifies, and accepts nothing until the test allows it.
#[derive(Clone, Default)]
struct Fake {
    takes: Arc<AtomicBool>,
    says: Arc<Mutex<VecDeque<Header>>>,
    /// The place for the header that it sends next.
    place: Option<usize>,
    /// The kinds of the headers that it received.
    sent: Arc<Mutex<Vec<u8>>>,
    /// How the connection from it has failed.
    failure: Arc<Mutex<Option<Error>>>,
    /// How the connection to it has failed.
    unsent: Arc<Mutex<Option<Error>>>,
    is_abandoned: Arc<AtomicBool>,
    panics: bool,
}

impl SendEnd for Fake {
    fn send(&mut self, data: *mut u8, size: usize) -> Result<Option<usize>> {
        assert!(!self.panics, "a defect");
        if size == HEADER {
            // SAFETY: `size` bytes are readable until the request has ended.
            self.sent.lock().unwrap().push(unsafe { *data.add(4) });
        }
        Ok(Some(1))
    }

    fn abandon(&mut self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }

    fn is_sent(&mut self, _request: usize) -> Result<bool> {
        self.unsent.lock().unwrap().clone().map_or(Ok(self.takes.load(Ordering::Relaxed)), Err)
    }
}

impl RecvEnd for Fake {
    fn receive(&mut self, data: *mut u8, size: usize) -> Result<Option<usize>> {
        assert_eq!(size, HEADER);
        self.place = Some(data.expose_provenance());
        Ok(Some(1))
    }

    fn received(&mut self, _request: usize) -> Result<Option<u64>> {
        if let Some(error) = &*self.failure.lock().unwrap() {
            return Err(error.clone());
        }
        let (Some(place), Some(header)) = (self.place, self.says.lock().unwrap().pop_front()) else { return Ok(None) };
        let bytes = header.encode();
        // SAFETY: the placer keeps room for a header there until its receive has ended, which is now.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), ptr::with_exposed_provenance_mut(place), HEADER) };
        Ok(Some(HEADER as u64))
    }
}

/// Rank 0 of two, with registrations 1 to 3 of the same 64 bytes.
struct Rank {
    group: Group,
    placer: Placer,
    other: Fake,
    _memory: Box<[u8; 64]>,
}

impl Rank {
    fn new(patience: Duration, other: Fake) -> Self {
        let (shared, memory) = (Arc::new(Shared::default()), Box::new([7; 64]));
        for _ in 0..3 {
            let region = Region { address: memory.as_ptr().expose_provenance(), size: 64, ..Region::default() };
            shared.registry.add(region).unwrap();
        }
        let peer =
            Peer::new(1, "other:1".to_owned(), Outgoing::over(Box::new(other.clone()), 1), Box::new(other.clone()));
        let patience = Patience::new(patience, Arc::default());
        let placer = Placer::new(Arc::clone(&shared), vec![None, Some(peer)], Arc::default(), patience);
        Self { group: Group { shared, ranks: 2, placer: Mutex::default() }, placer, other, _memory: memory }
    }

    fn put(&self, source: u32) -> u64 {
        let [from, to] = [source, 1].map(|region| Place { region, offset: 0, size: 8 });
        self.group.put(1, from, to, Signal::default()).unwrap()
    }

    fn ask(&mut self, command: impl FnOnce(SyncSender<()>) -> Command) -> Receiver<()> {
        let (done, is_done) = sync_channel(1);
        self.group.shared.ask(command(done)).unwrap();
        is_done
    }

    /// Runs the placer's turns for this long.
    fn go_on(&mut self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            self.placer.turn();
        }
    }

    fn sent(&self) -> Vec<u8> {
        self.other.sent.lock().unwrap().clone()
    }

    fn hears(&self, header: Header) {
        self.other.says.lock().unwrap().push_back(header);
    }

    fn test(&self, request: u64) -> Result<bool> {
        self.group.shared.requests.test(request)
    }
}

const MOMENT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(600);

/// The bytes of a get that this rank answered, and those of its own puts.
#[test]
fn memory_is_given_back_when_the_connection_has_read_it() {
    let detach: fn(SyncSender<()>) -> Command = |done| Command::Detach { done };
    let withdraw: fn(SyncSender<()>) -> Command = |done| Command::Withdraw { region: 1, done };
    for (gets, command) in [(true, withdraw), (false, withdraw), (false, detach)] {
        let mut rank = Rank::new(LONG, Fake::default());
        if gets {
            let get = Header { request: 9, region: 1, size: 64, ..Header::new(Kind::Get) };
            rank.hears(get);
        } else {
            rank.put(1);
        }
        rank.go_on(MOMENT);
        let given_back = rank.ask(command);
        rank.go_on(MOMENT);
        assert!(given_back.try_recv().is_err(), "it is still read");
        rank.other.takes.store(true, Ordering::Relaxed);
        rank.go_on(MOMENT);
        assert!(given_back.try_recv().is_ok(), "it is read no more");
        assert!(rank.group.failure().is_none() && matches!(rank.placer.others[1], Other::Alive(_)));
    }
}

#[test]
fn a_rank_that_never_lets_go_of_memory_is_ended_and_the_log_says_so() {
    const PATIENCE: Duration = Duration::from_secs(1);
    let mut rank = Rank::new(PATIENCE, Fake::default());
    let put = rank.put(1);
    let given_back = rank.ask(|done| Command::Withdraw { region: 1, done });
    rank.placer.turn();
    assert!(given_back.try_recv().is_err());
    for _ in 0..8 {
        // The connection accepts them. That proves nothing about the other rank.
        rank.put(2);
        rank.go_on(PATIENCE / 8);
    }
    rank.placer.turn();
    assert!(given_back.try_recv().is_ok() && rank.other.is_abandoned.load(Ordering::Relaxed));
    let error = rank.test(put).expect_err("its source is gone");
    assert!(error.to_string().contains("rank 1") && error.hint().is_some(), "{error}");
    assert!(!error.report_once(), "it has been said");
}

/// A message that ends in the call that sends it was copied, even if the rank is stopped.
#[test]
fn what_a_connection_copies_is_no_sign_of_the_rank() {
    let mut rank = Rank::new(LONG, Fake::default());
    let moved = |rank: &Rank| match &rank.placer.others[1] {
        Other::Alive(peer) => peer.moved().is_some(),
        _ => panic!("it lives"),
    };
    rank.other.takes.store(true, Ordering::Relaxed);
    rank.put(1);
    rank.go_on(MOMENT);
    assert!(!moved(&rank));
    rank.other.takes.store(false, Ordering::Relaxed);
    rank.put(1);
    rank.go_on(MOMENT);
    assert!(!moved(&rank));
    rank.other.takes.store(true, Ordering::Relaxed);
    rank.go_on(MOMENT);
    assert!(moved(&rank));
}

/// NCCL's abort ends one window after another, with puts from each under way.
#[test]
fn what_follows_a_dropped_put_goes_nowhere_and_fails_nothing() {
    let mut rank = Rank::new(LONG, Fake::default());
    let _ = rank.ask(|done| Command::Withdraw { region: 1, done });
    rank.go_on(MOMENT);
    let dropped = rank.put(1);
    rank.go_on(MOMENT);
    assert!(rank.test(dropped).unwrap(), "an abort must not wait for it");
    let later = [rank.put(2), rank.put(1)];
    let _ = rank.ask(|done| Command::Withdraw { region: 2, done });
    let last = rank.put(2);
    rank.go_on(MOMENT);
    assert!(later.into_iter().chain([last]).all(|put| rank.test(put).unwrap()), "nor for those from other windows");
    assert!(rank.sent().is_empty(), "a signal of theirs would promise what was dropped");
    // Operations other than puts continue.
    let to = Place { region: 3, offset: 0, size: 8 };
    let get = rank.group.get(1, to, to).unwrap();
    rank.go_on(MOMENT);
    assert!(!rank.test(get).unwrap(), "it waits for its answer");
    assert_eq!(rank.sent(), [Kind::Get as u8]);
}

/// The signal has been written, but the placer does not know that yet.
#[test]
fn a_goodbye_comes_behind_the_answers_that_are_owed() {
    gpu::begin(1, 0);
    let mut rank = Rank::new(LONG, Fake::default());
    rank.other.takes.store(true, Ordering::Relaxed);
    let numbers = [0_u64; 1];
    let address = numbers.as_ptr().expose_provenance();
    let shared = Arc::clone(&rank.group.shared);
    let of = shared.gpus.found_by(gpu::driver(), address, 2).unwrap();
    let region = shared.registry.add(Region { address, size: 8, gpu: Some(of), only_ours: true }).unwrap();
    rank.hears(Header { request: 9, signal: Signal { region, offset: 0, value: 1 }, ..Header::new(Kind::Put) });
    rank.placer.turn();
    assert!(rank.sent().is_empty(), "the copy has not been asked after");
    shared.ask(Command::Close).unwrap();
    rank.go_on(MOMENT);
    assert_eq!(rank.sent(), [Kind::Ack as u8, Kind::Bye as u8]);
    assert!(!rank.placer.is_over(), "it waits for the other's goodbye");
    rank.hears(Header::new(Kind::Bye));
    rank.go_on(MOMENT);
    assert!(rank.placer.is_over());
}

/// As in an abort of the other rank.
#[test]
fn puts_that_a_goodbye_leaves_unanswered_are_told_and_gets_fail() {
    // The last: the answer is there before the connection knows that the put was read.
    for (answered, is_read) in [(true, true), (false, true), (true, false)] {
        let mut rank = Rank::new(LONG, Fake::default());
        rank.other.takes.store(is_read, Ordering::Relaxed);
        let place = Place { region: 1, offset: 0, size: 8 };
        let (put, get) = (rank.put(1), rank.group.get(1, place, place).unwrap());
        rank.go_on(MOMENT);
        if answered {
            rank.hears(Header { request: put, ..Header::new(Kind::Ack) });
        }
        rank.hears(Header::new(Kind::Bye));
        rank.go_on(MOMENT);
        assert!(rank.test(put).unwrap());
        assert!(rank.test(get).is_err(), "its bytes are missing");
        assert_eq!(rank.placer.losses.has(1), !answered);
        let later = rank.put(1);
        rank.go_on(MOMENT);
        assert!(rank.test(later).unwrap() && rank.placer.losses.has(1));
    }
}

/// Its process has ended without a goodbye.
#[test]
fn a_rank_that_goes_fails_what_was_under_way_and_what_comes_later() {
    for is_under_way in [false, true] {
        let mut rank = Rank::new(LONG, Fake::default());
        let put = is_under_way.then(|| rank.put(1));
        rank.go_on(MOMENT);
        *rank.other.failure.lock().unwrap() =
            Some(Error::remote("the peer closed the connection").with_peer("other:1"));
        rank.go_on(MOMENT);
        assert!(put.is_none_or(|put| rank.test(put).is_err()));
        assert!(rank.group.failure().is_some(), "also a rank that only waits for its signals must learn it");
        let later = rank.put(1);
        rank.go_on(MOMENT);
        assert!(rank.test(later).is_err() && rank.group.failure().is_some());
    }
}

/// This rank may have a stream that waits for the other rank's signal, and no request that fails.
#[test]
fn a_rank_that_outlives_another_is_warned_unless_one_of_them_closes() {
    type Then = fn(&mut Rank);
    let kinds: [(&str, bool, Then, bool); 4] = [
        ("it outlives it", false, |_| (), true),
        ("a request has told it", false, |rank| _ = rank.put(1), true),
        ("it closes soon after", false, |rank| drop(rank.ask(|_| Command::Close)), false),
        ("the other said goodbye", true, |_| (), false),
    ];
    for (kind, says_goodbye, then, is_warned) in kinds {
        let mut rank = Rank::new(LONG, Fake::default());
        rank.other.takes.store(true, Ordering::Relaxed);
        if says_goodbye {
            rank.hears(Header::new(Kind::Bye));
        } else {
            *rank.other.failure.lock().unwrap() = Some(Error::remote(kind).with_peer("other:1"));
        }
        rank.go_on(MOMENT);
        then(&mut rank);
        rank.go_on(MOMENT);
        let Other::Ended { why, gone, .. } = &mut rank.placer.others[1] else { panic!("{kind}: it has ended") };
        let why = why.clone();
        *gone = gone.map(|since| since.checked_sub(WARNING_DELAY).unwrap());
        rank.go_on(MOMENT);
        assert_eq!(!why.report_once(), is_warned, "{kind}: {why}");
    }
}

/// A rank that leaves closes the connection to it while its goodbye is under way on the other one.
#[test]
fn a_goodbye_is_waited_for_when_nothing_can_be_sent() {
    for says_goodbye in [true, false] {
        let mut rank = Rank::new(LONG, Fake::default());
        let put = rank.put(1);
        rank.go_on(MOMENT);
        *rank.other.unsent.lock().unwrap() = Some(Error::remote("the peer closed the connection").with_peer("other:1"));
        rank.go_on(MOMENT);
        assert!(!rank.test(put).unwrap(), "the goodbye may be under way");
        if says_goodbye {
            rank.hears(Header::new(Kind::Bye));
            rank.go_on(MOMENT);
            assert!(rank.test(put).unwrap() && rank.placer.losses.has(1) && rank.group.failure().is_none());
        } else {
            rank.go_on(GOODBYE);
            let error = rank.test(put).expect_err("there is no goodbye");
            assert!(error.to_string().contains("the peer closed the connection"), "{error}");
            assert!(rank.group.failure().is_some());
        }
    }
}

/// A wrong message is a failure, even if nothing is under way.
#[test]
fn a_rank_that_breaks_the_protocol_has_failed() {
    let mut rank = Rank::new(LONG, Fake::default());
    rank.hears(Header { request: 5, ..Header::new(Kind::Ack) });
    rank.go_on(MOMENT);
    assert!(rank.group.failure().is_some());
}

#[test]
fn a_get_into_memory_that_was_taken_back_is_done() {
    let mut rank = Rank::new(LONG, Fake::default());
    let _ = rank.ask(|done| Command::Withdraw { region: 1, done });
    rank.go_on(MOMENT);
    let [gone, there] = [1, 2].map(|region| Place { region, offset: 0, size: 8 });
    for target in 0..2 {
        let get = rank.group.get(target, there, gone).unwrap();
        rank.go_on(MOMENT);
        assert!(rank.test(get).unwrap());
    }
    assert!(rank.sent().is_empty() && rank.group.get(1, there, Place { offset: 64, ..there }).is_err());
}

#[test]
fn a_panic_of_the_placer_ends_its_group_and_the_log_says_so() {
    let rank = Rank::new(LONG, Fake { panics: true, ..Fake::default() });
    let put = rank.put(1);
    let Rank { group, placer, .. } = rank;
    placer.run();
    let error = group.shared.requests.test(put).expect_err("its placer has ended");
    assert_eq!(error.cause(), Cause::Internal);
    assert!(!error.report_once(), "it has been said");
    assert_eq!(group.failure().map(|error| error.cause()), Some(Cause::Internal));
}
