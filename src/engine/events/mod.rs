//! What a connection tells a profiler of its transfers: a start and a stop for each piece that travels.
//!
//! NCCL gives a handle with each transfer, which points into its own memory: starting an event reads through it. So
//! everything is told on NCCL's thread, inside `isend`, `irecv` or `test`, before `test` says done or failed: there the
//! handle is known to be alive, no close can have returned, and after an abort nobody is left who could call. The
//! threads that move data only note what begins and ends (`notes`); NCCL's thread makes pieces of it ([`transfer`]) and
//! passes them on when it next comes by.
//!
//! The rules, which every backend gets by calling these functions where their descriptions say:
//!
//! - at most [`MOST`] pieces are told of a transfer, and their lengths add up to its size ([`transfer`]);
//! - when the first start of a transfer is declined, nothing more is told of it;
//! - each start is followed by exactly one stop, unless the connection is closed with the transfer in flight: then NCCL
//!   has aborted, and nothing follows;
//! - a transfer that moves no bytes has one piece of none.
//!
//! When nobody listens, a transfer costs one start that is declined: [`Events::hears`] remembers, and nothing is noted.
//! Without a listener or a handle it costs a branch.

mod last;
pub mod list;
mod notes;
pub mod transfer;

use std::ffi::c_void;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use notes::{Note, Notes, TURNS};
pub use transfer::{Chunk, MOST, Over, Piece, Wait};
use transfer::{Told, Transfer, What};

use super::request::{LastWords, MAX_PARTS, Outcome, RequestSlots, SLOTS, Ticket};
use crate::nccl::net_event::{NetSum, Reader};
use crate::os::ticks::{self, Ticks};

/// Who is told: NCCL's profiler, behind `plugin::listener`.
pub trait Listener: Send + Sync {
    /// Who reads what it is told; asked once per transfer. All but [`Reader::None`] read resends and times; from
    /// [`Reader::Patient`] up a piece may be told of when it has ended.
    fn reader(&self) -> Reader;

    /// A piece begins. Answers its handle, or null when the profiler declines.
    ///
    /// # Safety
    /// `transfer` is the handle that NCCL gave with a transfer that it has not been told the end of, and the caller is
    /// inside a call of NCCL's that concerns its connection.
    unsafe fn start(&self, transfer: *mut c_void, news: &News<'_>) -> *mut c_void;

    /// Pieces that have ended, to a patient listener: in fewer calls what a start and a stop of each would say. Answers how
    /// many it takes, of the first ones; the others are declined.
    ///
    /// # Safety
    /// As [`Listener::start`].
    unsafe fn ended<'a>(&self, transfer: *mut c_void, all: &mut dyn Iterator<Item = News<'a>>) -> usize {
        let mut taken = 0;
        for news in all {
            // SAFETY: passed on.
            let handle = unsafe { self.start(transfer, &news) };
            if handle.is_null() {
                break;
            }
            self.stop(handle, &news);
            taken += 1;
        }
        taken
    }

    /// All there is to tell of a transfer that has ended, to a patient listener: the same as [`Listener::ended`] of a piece
    /// for each of its chunks. Answers whether the first one was taken.
    ///
    /// # Safety
    /// As [`Listener::start`].
    unsafe fn whole(&self, transfer: *mut c_void, whole: &Whole<'_>) -> bool {
        let pieces: Vec<Piece> = whole.chunks.iter().map(Over::piece).collect();
        let Whole { link, send, paths, now, .. } = *whole;
        let scene = Scene { link, send, details: true, paths, now: Some(now) };
        let mut news = pieces.iter().map(|piece| News { ended: true, ..scene.news(piece) });
        // SAFETY: passed on.
        unsafe { self.ended(transfer, &mut news) > 0 }
    }

    /// All there is to tell of a transfer that has ended at the time `ended` and was one chunk, for [`Reader::Sums`] only: what
    /// [`Listener::whole`] would say. Answers whether it was taken.
    ///
    /// # Safety
    /// As [`Listener::start`].
    unsafe fn sum(&self, _transfer: *mut c_void, _sum: NetSum, _ended: Ticks) -> bool {
        false
    }

    /// The piece with this handle has ended.
    fn stop(&self, handle: *mut c_void, news: &News<'_>);
}

/// A transfer that has ended, of which each chunk is told as it is.
#[derive(Debug, Clone, Copy)]
pub struct Whole<'a> {
    /// The connection's number, the same on both ends.
    pub link: u64,
    /// Whether this side sends.
    pub send: bool,
    /// All paths of the connection.
    pub paths: &'a [Path],
    /// The chunks, at least one and at most [`MOST`].
    pub chunks: &'a [Over],
    /// The time of the call.
    pub now: Ticks,
}

impl<'a> Whole<'a> {
    /// The path that a chunk took.
    pub fn path(&self, chunk: &Over) -> &'a Path {
        self.paths.get(usize::from(chunk.chunk.path)).unwrap_or(&NO_PATH)
    }
}

/// What is told.
#[derive(Debug)]
pub struct News<'a> {
    /// The connection's number, the same on both ends.
    pub link: u64,
    /// Whether this side sends.
    pub send: bool,
    /// Whether resends and times were to be told when the transfer began.
    pub details: bool,
    /// The one that the piece is on, or began on.
    pub path: &'a Path,
    /// All paths of the connection.
    pub paths: &'a [Path],
    /// How many paths were connected anew since the last event with details.
    pub reconnects: u16,
    /// The piece.
    pub piece: &'a Piece,
    /// It has ended already when its start is told, and its stop follows at once.
    pub ended: bool,
    /// How long ago it began (in a start) or ended, in nanoseconds; 0 without details.
    pub ago_ns: u64,
}

impl News<'_> {
    /// The rail of all its bytes. None when there may be several: a piece that stands for the rest is told before it is
    /// known which paths take its chunks.
    pub fn rail(&self) -> Option<u16> {
        let known = |path: &&Path| path.carrier != Carrier::None;
        let one = !self.piece.rest || self.paths.iter().filter(known).all(|path| path.rail == self.path.rail);
        one.then_some(self.path.rail)
    }

    /// The number of the path that takes all its bytes. None when there may be several.
    pub fn stream(&self) -> Option<u16> {
        let Piece { chunk, rest, .. } = self.piece;
        (!rest && !chunk.joined || self.paths.len() <= 1).then_some(chunk.path)
    }
}

/// A stream or queue pair, and where it leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// What it is.
    pub carrier: Carrier,
    /// Which of the device's interfaces or cards it uses.
    pub rail: u16,
    /// The other end, where it has an address.
    pub peer: Option<SocketAddr>,
}

/// What carries a path's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// Not connected (yet).
    None,
    /// A socket.
    Socket {
        /// Its descriptor.
        fd: i32,
    },
    /// A queue pair.
    QueuePair {
        /// The device's number.
        device: i32,
        /// The queue pair's.
        number: i32,
    },
}

/// What pieces that are told together have in common.
struct Scene<'a> {
    link: u64,
    send: bool,
    details: bool,
    paths: &'a [Path],
    now: Option<Ticks>,
}

impl<'a> Scene<'a> {
    /// Of a piece that has not ended.
    fn news(&self, piece: &'a Piece) -> News<'a> {
        let Self { link, send, details, paths, now } = *self;
        let path = paths.get(usize::from(piece.chunk.path)).unwrap_or(&NO_PATH);
        let ago_ns = now.map_or(0, |now| piece.begun_before(now));
        News { link, send, details, path, paths, reconnects: 0, piece, ended: false, ago_ns }
    }
}

/// For a patient listener, notes of requests that are not done are looked for once in so many nanoseconds: a thread that
/// does so in a loop takes the memory that they are written to away from who writes them. Within that time no path notes
/// as much as its list holds.
const PATIENCE_NS: u64 = 1_000_000;

/// And the clock is looked at in one of so many calls. NCCL's thread asks after all its requests in turn, thousands of times
/// in each millisecond, and while it looks at the clock what is done waits.
const CALLS: u32 = 64;

/// In place of a rail's number.
const SEVERAL_RAILS: u32 = u32::MAX;

const NO_PATH: Path = Path { carrier: Carrier::None, rail: 0, peer: None };

/// One part of a request.
struct Place {
    /// NCCL's handle while something may be told of it, else null. Written by NCCL's thread only.
    handle: AtomicPtr<c_void>,
    /// Whether the transfer is followed piece by piece, and with times.
    followed: AtomicBool,
    details: AtomicBool,
    /// Something is noted of it elsewhere than with its request ([`last`]). Written after that, and before its request ends.
    noted: AtomicBool,
    /// Nothing has been noted of it yet that is kept in `transfer`, where a former one may still stand; and when it was
    /// requested, by [`Ticks::number`], 0 when times are not wanted.
    fresh: AtomicBool,
    posted: AtomicU64,
    /// Locked by NCCL's threads only, which takes turns between them. Otherwise not touched for a transfer of which nothing is
    /// noted but that all of it is over.
    transfer: Mutex<Transfer>,
}

/// A transfer that notes are being kept of.
struct Open<'a> {
    slot: u16,
    part: u8,
    details: bool,
    transfer: MutexGuard<'a, Transfer>,
}

/// A request slot; its parts' places are made when it is first used by a transfer that may be followed.
type Slot = OnceLock<Box<[Place; MAX_PARTS]>>;

struct Ear {
    listener: Arc<dyn Listener>,
    link: u64,
    send: bool,
}

/// What one connection tells.
pub struct Events {
    ear: OnceLock<Ear>,
    /// The last start was taken.
    hears: AtomicBool,
    /// Who reads, when the listener was asked last: a [`Reader`].
    reader: AtomicU8,
    /// The rail of all paths, or [`SEVERAL_RAILS`].
    rail: AtomicU32,
    /// What has been noted; made with the first transfer that has a handle: before it there is nothing to note.
    notes: OnceLock<Notes>,
    places: OnceLock<Box<[Slot]>>,
    /// Locked while something is told, so that of each transfer one thread of NCCL's tells at a time.
    paths: Mutex<Vec<Path>>,
    reconnects: AtomicU64,
    own: Own,
}

/// What only NCCL's threads write, by itself in its lines of memory: the others read what is beside it.
#[repr(align(128))]
#[derive(Default)]
struct Own {
    /// Slots about which there are news.
    news: [AtomicU64; SLOTS / 64],
    /// Whether there may be any: written after them.
    any_news: AtomicBool,
    /// When notes were looked for last while a request was not done: [`Ticks::number`].
    looked: AtomicU64,
    /// How often that was left to a later call, modulo [`CALLS`].
    calls: AtomicU32,
    /// Where notes are taken out to.
    taken: Mutex<Vec<Note>>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            ear: OnceLock::new(),
            hears: AtomicBool::new(false),
            reader: AtomicU8::new(Reader::None as u8),
            rail: AtomicU32::new(0),
            notes: OnceLock::new(),
            places: OnceLock::new(),
            paths: Mutex::new(Vec::new()),
            reconnects: AtomicU64::new(0),
            own: Own::default(),
        }
    }
}

impl Events {
    /// Whom to tell from now on, once; `link` is the connection's number, the same on both ends and no secret.
    pub fn listen(&self, listener: Arc<dyn Listener>, link: u64, send: bool) {
        if self.ear.set(Ear { listener, link, send }).is_ok() {
            ticks::set_up();
        }
    }

    /// Path `index` leads there from now on. May be called again when it is connected anew.
    pub fn set_path(&self, index: usize, path: Path) {
        let mut paths = self.paths();
        if paths.len() <= index {
            paths.resize(index + 1, NO_PATH);
        }
        if paths[index].carrier != Carrier::None {
            self.reconnects.fetch_add(1, Ordering::Relaxed);
        }
        paths[index] = path;
        let mut rails = paths.iter().filter(|path| path.carrier != Carrier::None).map(|path| path.rail);
        let first = rails.next().unwrap_or(0);
        let rail = if rails.all(|rail| rail == first) { first.into() } else { SEVERAL_RAILS };
        self.rail.store(rail, Ordering::Relaxed);
    }

    /// Whether chunks are worth reporting: somebody listens.
    #[inline]
    pub fn hears(&self) -> bool {
        self.hears.load(Ordering::Relaxed)
    }

    /// NCCL's thread, in `isend` or `irecv`, before anything can move: part `part` of the request in `slot` has this
    /// handle (null when NCCL gave none).
    #[inline]
    pub fn follow(&self, slot: u16, part: usize, handle: *mut c_void) {
        if handle.is_null() {
            return;
        }
        if let Some(ear) = self.ear.get() {
            self.prepare(ear, slot, part, handle);
        }
    }

    /// As [`Events::follow`], for a message that travels as one chunk, in this very call as a rule. Its start is noted now
    /// and told when it has left, by [`Events::settle`]: telling takes as long as a tenth of the message's way. `chunk` is
    /// asked when there is a profiler, and told whether anybody reads the message's number. Returns whether there is
    /// something to settle.
    #[inline]
    pub fn follow_whole(&self, slot: u16, handle: *mut c_void, chunk: impl FnOnce(bool) -> Chunk) -> bool {
        let Some(ear) = self.ear.get().filter(|_| !handle.is_null()) else { return false };
        self.get_ready();
        let details = self.wants_details(ear);
        let chunk = chunk(details);
        let place = self.place(slot, 0);
        let now = clock(details);
        let mut transfer = lock(&place.transfer);
        place.fresh.store(false, Ordering::Relaxed);
        transfer.begin(ear.send, now);
        place.attach(handle, true, details);
        // It leaves in this very call: no time lies between its request and that.
        transfer.chunk_begins(&chunk, now, details);
        self.mark(slot);
        true
    }

    #[cold]
    #[inline(never)]
    fn prepare(&self, ear: &Ear, slot: u16, part: usize, handle: *mut c_void) {
        let place = self.place(slot, part);
        if self.get_ready() {
            // The first transfer is followed on trial.
            self.hears.store(true, Ordering::Relaxed);
        }
        let follows = self.hears();
        let details = self.wants_details(ear) && follows;
        if follows {
            // What a receive waits for is seen by its sender.
            place.posted.store(clock(details && ear.send).map_or(0, Ticks::number), Ordering::Relaxed);
            // Without the lock: until the handle is there, nobody looks at what is kept here but another of NCCL's threads that
            // still has a note of the transfer before, and whatever that one keeps is a former transfer's.
            place.fresh.store(true, Ordering::Release);
        }
        place.attach(handle, follows, details);
    }

    fn wants_details(&self, ear: &Ear) -> bool {
        let reader = ear.listener.reader();
        // Written only when it changes: many threads read it.
        if self.reader.load(Ordering::Relaxed) != reader as u8 {
            self.reader.store(reader as u8, Ordering::Relaxed);
        }
        reader != Reader::None
    }

    /// Whether this reader reads, or one who needs less.
    #[inline]
    fn is_for(&self, reader: Reader) -> bool {
        self.reader.load(Ordering::Relaxed) >= reader as u8
    }

    /// Whether all that a transfer's chunks carried may be noted as one ([`Chunk::joined`]): the listener adds up by rails, and
    /// there is one rail.
    #[inline]
    pub fn joins(&self) -> bool {
        self.is_for(Reader::Sums) && self.rail.load(Ordering::Relaxed) != SEVERAL_RAILS
    }

    /// Whether it is enough to say of a chunk that it is over ([`Events::chunk_over`]), and nothing when it begins.
    #[inline]
    pub fn is_patient(&self) -> bool {
        self.is_for(Reader::Patient)
    }

    /// Any thread: a chunk has come of which nothing has been noted since it began, at `began`. Only for requests that have
    /// not ended; one that is all of its message is the last thing that is noted of it, by the thread that ends it.
    pub fn chunk_over(&self, requests: &RequestSlots, slot: u16, part: usize, chunk: &Chunk, began: Ticks) {
        self.over(requests, Some(chunk.path), (slot, part), chunk, began, Ticks::now());
    }

    /// Any thread: the same of one that the other side has acknowledged, as was seen at `now`. Who learns of one learns of
    /// several, on all paths: they go into one list, after what the paths' lists say of their waits.
    pub fn chunk_acknowledged(&self, requests: &RequestSlots, slot: u16, chunk: &Chunk, began: Ticks, now: Ticks) {
        self.over(requests, None, (slot, 0), chunk, began, now);
    }

    /// NCCL's thread, in `isend`: the chunk, all of its message, has left in this very call, and with that the request, which
    /// has a following since [`Events::follow`], has ended.
    pub fn left_at_once(&self, requests: &RequestSlots, slot: u16, chunk: &Chunk) {
        if let Some(place) = self.followed_place(slot, 0)
            && let Some(posted) = Ticks::from_number(place.posted.load(Ordering::Relaxed))
        {
            self.chunk_over(requests, slot, 0, chunk, posted);
        }
    }

    /// Leaves with the request that the chunk is over, if it is all of a request of one part and was sent once; else notes it.
    #[inline]
    fn over(
        &self,
        requests: &RequestSlots,
        path: Option<u16>,
        (slot, part): (u16, usize),
        chunk: &Chunk,
        began: Ticks,
        now: Ticks,
    ) {
        let is_all = chunk.length == chunk.total && !chunk.again;
        if !is_all || !requests.leave(slot, last::words(chunk, began, now)) {
            self.add(path, Note { slot, part: part as u8, now: Some(now), what: What::Over(*chunk, began) });
        }
    }

    /// Any thread: a chunk of the part is being handed to the network, or its first byte has come. Only for requests
    /// that have not ended.
    pub fn chunk_begins(&self, slot: u16, part: usize, chunk: &Chunk) {
        self.note(slot, part, Some(chunk.path), What::Begins(*chunk));
    }

    /// Any thread: the chunk at `offset` has arrived, which began on path `path`. Only for requests that have not ended.
    pub fn chunk_ends(&self, slot: u16, part: usize, path: u16, offset: u64) {
        self.note(slot, part, Some(path), What::Ends(offset));
    }

    /// Any thread: all chunks of the part have arrived, just before its request ends: what there is to tell of it is told then.
    pub fn all_arrived(&self, slot: u16, part: usize) {
        self.note(slot, part, None, What::AllArrived);
    }

    /// Any thread: a chunk has arrived that makes no piece ([`Transfer::chunk_passed`]). Only for requests that have not
    /// ended.
    pub fn chunk_passed(&self, slot: u16, part: usize, path: u16, wr_id: u64) {
        self.note(slot, part, Some(path), What::Passed { path, wr_id });
    }

    /// Any thread: the chunk on path `path` has arrived, the only one of its transfer there. Only for requests that have
    /// not ended.
    pub fn path_ends(&self, slot: u16, part: usize, path: u16) {
        self.note(slot, part, Some(path), What::PathEnds(path));
    }

    /// Any thread: the chunk at `offset` on path `path` has waited since `since`.
    pub fn chunk_waited(&self, slot: u16, part: usize, path: u16, offset: u64, wait: Wait, since: Ticks) {
        let ns = Ticks::now().nanoseconds_since(since);
        self.note(slot, part, Some(path), What::Waited { offset, wait, ns });
    }

    /// Any thread: the receiver's buffer is there, so that from here on the message waits for the network only.
    pub fn ready(&self, slot: u16, part: usize) {
        self.note(slot, part, None, What::Ready);
    }

    /// Notes what has happened on a path, or to a whole transfer.
    fn note(&self, slot: u16, part: usize, path: Option<u16>, what: What) {
        self.add(path, Note { slot, part: part as u8, now: clock(self.is_for(Reader::Hasty)), what });
    }

    fn add(&self, path: Option<u16>, note: Note) {
        let Some(notes) = self.notes.get() else { return };
        let (slot, part) = (note.slot, note.part);
        notes.add(path, note);
        if let Some(place) = self.known_place(slot, part.into()) {
            set(&place.noted, true);
        }
    }

    /// Makes room for notes, once. Whether that was now.
    fn get_ready(&self) -> bool {
        let mut now = false;
        self.notes.get_or_init(|| {
            now = true;
            let notes = Notes::new(self.paths().len());
            lock(&self.own.taken).reserve_exact(notes.most());
            notes
        });
        now
    }

    /// There is something to tell of this slot.
    fn mark(&self, slot: u16) {
        self.own.news[usize::from(slot) / 64].fetch_or(1 << (slot % 64), Ordering::Release);
        self.own.any_news.store(true, Ordering::Release);
    }

    /// NCCL's thread: makes pieces of what has been noted, to be told by [`Events::report`], but for those of the request
    /// that is `ending`, which the caller tells.
    #[inline]
    fn read_notes(&self, ending: Option<u16>) {
        if let Some(notes) = self.notes.get()
            && notes.are_there()
        {
            self.take_notes(notes, ending);
        }
    }

    #[cold]
    fn take_notes(&self, notes: &Notes, ending: Option<u16>) {
        let mut taken = lock(&self.own.taken);
        let mut open = None;
        notes.take(|head, words| {
            // As a rule this is all, and the order between the paths does not matter.
            if taken.is_empty()
                && let Some((slot, part, over)) = Note::over(head, words)
                && self.keep(&mut open, slot, part, |transfer| transfer.keep_over(over))
            {
                return;
            }
            let Some(note) = Note::decode(head, words) else { return };
            let keep = |transfer: &mut Transfer| transfer.keep(&note.what, note.now);
            if !taken.is_empty() || !self.keep(&mut open, note.slot, note.part, keep) {
                taken.push(note);
            }
        });
        drop(open);
        if taken.is_empty() {
            return;
        }
        for turn in 0..TURNS {
            for note in taken.iter().filter(|note| note.turn() == turn) {
                let Some(place) = self.followed_place(note.slot, note.part.into()) else { continue };
                let details = place.details.load(Ordering::Relaxed);
                self.open(place).take_note(&note.what, note.now.filter(|_| details), details);
                if Some(note.slot) != ending {
                    self.mark(note.slot);
                }
            }
        }
        taken.clear();
    }

    /// Keeps a note of which nothing is to be told before the transfer's end, if `keep` can. What is noted of no transfer is
    /// kept nowhere. The transfer stays `open` for the next note, which as a rule is of the same one.
    #[inline]
    fn keep<'a>(
        &'a self,
        open: &mut Option<Open<'a>>,
        slot: u16,
        part: u8,
        keep: impl FnOnce(&mut Transfer) -> bool,
    ) -> bool {
        if open.as_ref().is_none_or(|open| (open.slot, open.part) != (slot, part)) {
            // Before another one is locked.
            *open = None;
            let Some(place) = self.followed_place(slot, part.into()) else { return true };
            let details = place.details.load(Ordering::Relaxed);
            *open = Some(Open { slot, part, details, transfer: self.open(place) });
        }
        open.as_mut().is_some_and(|open| open.details && keep(&mut open.transfer))
    }

    /// A transfer that notes are kept of.
    fn followed_place(&self, slot: u16, part: usize) -> Option<&Place> {
        let followed =
            |place: &&Place| place.followed.load(Ordering::Relaxed) && !place.handle.load(Ordering::Relaxed).is_null();
        self.known_place(slot, part).filter(followed)
    }

    /// NCCL's thread, in `isend`, `irecv` or `test`: tells what has been noted since the last time.
    ///
    /// # Safety
    /// As [`Listener::start`], for every request of the connection.
    #[inline]
    pub unsafe fn report(&self) {
        self.read_notes(None);
        if self.own.any_news.load(Ordering::Relaxed) {
            // SAFETY: passed on.
            unsafe { self.report_news() };
        }
    }

    /// NCCL's thread, in `test` of a request that is not done: as [`Events::report`], but a patient listener is told now and
    /// then only.
    ///
    /// # Safety
    /// As [`Events::report`].
    #[inline]
    pub unsafe fn wait(&self) {
        if self.is_patient() {
            let calls = (self.own.calls.load(Ordering::Relaxed) + 1) % CALLS;
            self.own.calls.store(calls, Ordering::Relaxed);
            if calls != 0 {
                return;
            }
            let (now, last) = (Ticks::now(), Ticks::from_number(self.own.looked.load(Ordering::Relaxed)));
            if last.is_some_and(|last| now.nanoseconds_since(last) < PATIENCE_NS) {
                return;
            }
            self.own.looked.store(now.number(), Ordering::Relaxed);
        }
        // SAFETY: passed on.
        unsafe { self.report() };
    }

    #[cold]
    unsafe fn report_news(&self) {
        let Some(ear) = self.ear.get() else { return };
        // First the mark, then the words: what another of NCCL's threads marks in between leaves the mark behind. An
        // exchange: the words that were marked by then are seen.
        self.own.any_news.swap(false, Ordering::AcqRel);
        for (word, base) in self.own.news.iter().zip((0u16..).step_by(64)) {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut slots = word.swap(0, Ordering::Acquire);
            while slots != 0 {
                let slot = base + slots.trailing_zeros() as u16;
                slots &= slots - 1;
                for place in self.known_places(slot).into_iter().flatten() {
                    if !place.handle.load(Ordering::Relaxed).is_null() {
                        // SAFETY: the handle is there, so the end of its transfer has not been told.
                        unsafe { self.tell(ear, place, &mut self.open(place)) };
                    }
                }
            }
        }
    }

    /// NCCL's thread, in `test`: as [`RequestSlots::finish`], but before NCCL learns of the end, the profiler does.
    ///
    /// # Safety
    /// As [`Events::report`].
    #[inline]
    pub unsafe fn finish(&self, requests: &RequestSlots, ticket: Ticket) -> Option<Outcome> {
        if !requests.is_done(ticket) {
            // SAFETY: passed on.
            unsafe { self.wait() };
            return None;
        }
        let Some(notes) = self.notes.get() else { return requests.finish(ticket) };
        if self.hears() && self.known_place(ticket.slot, 0).is_some_and(Place::is_noted) {
            notes.fetch();
        }
        // SAFETY: passed on.
        let outcome = unsafe { self.settle(requests, ticket) }?;
        requests.release(ticket);
        Some(outcome)
    }

    /// NCCL's thread, in `isend` or `test`: tells what there is to tell, the end of the request included if it is done.
    /// Returns the outcome then.
    ///
    /// # Safety
    /// As [`Events::report`].
    pub unsafe fn settle(&self, requests: &RequestSlots, ticket: Ticket) -> Option<Outcome> {
        // Asked first: a request that ends meanwhile has its turn next time.
        let outcome = requests.outcome(ticket);
        match &outcome {
            // SAFETY: passed on.
            Some(outcome) => unsafe { self.conclude(ticket.slot, outcome, requests.last_words(ticket)) },
            // SAFETY: passed on.
            None => unsafe { self.report() },
        }
        outcome
    }

    /// NCCL's thread, when a request has ended well and NCCL does not know it yet: tells the rest, with what was left with the
    /// request.
    ///
    /// # Safety
    /// As [`Listener::start`].
    #[inline]
    pub unsafe fn conclude(&self, slot: u16, outcome: &Outcome, last: Option<LastWords>) {
        if let (Some(ear), Some(places)) = (self.ear.get(), self.known_places(slot)) {
            let places = &places[..outcome.parts];
            // It has ended after all that is noted of it.
            if places.iter().any(Place::is_noted) {
                self.read_notes(Some(slot));
            }
            for (place, size) in places.iter().zip(outcome.sizes) {
                // SAFETY: passed on.
                unsafe { self.close(ear, place, Some(size), last) };
            }
        }
    }

    /// NCCL's thread, when a request has failed and NCCL does not know it yet: nothing new is told, what began ends.
    ///
    /// # Safety
    /// As [`Listener::start`].
    pub unsafe fn abandon(&self, slot: u16) {
        if let (Some(ear), Some(places)) = (self.ear.get(), self.known_places(slot)) {
            self.read_notes(Some(slot));
            for place in places {
                // SAFETY: passed on.
                unsafe { self.close(ear, place, None, None) };
            }
        }
    }

    /// Tells the rest of a part that has ended with so many bytes, or failed.
    unsafe fn close(&self, ear: &Ear, place: &Place, size: Option<u64>, last: Option<LastWords>) {
        if place.handle.load(Ordering::Relaxed).is_null() {
            return;
        }
        let last = last.and_then(|words| last::over(words, size?));
        if let Some(over) = last.filter(|_| self.is_all(place)) {
            let over = over.alone(ear.send, Ticks::from_number(place.posted.load(Ordering::Relaxed)));
            // Who tells holds the lock of the paths, so this alone keeps NCCL's other threads away.
            let (paths, chunks) = (self.paths(), std::slice::from_ref(&over));
            let handle = place.handle.load(Ordering::Relaxed);
            if handle.is_null() {
                // Another thread of the caller's has told the end of it meanwhile.
                return;
            }
            // SAFETY: the caller's promise; the handle is there.
            unsafe { self.tell_whole(ear, handle, &paths, chunks, None) };
            place.handle.store(std::ptr::null_mut(), Ordering::Relaxed);
            return;
        }
        let mut transfer = self.open(place);
        if place.handle.load(Ordering::Relaxed).is_null() {
            return;
        }
        let details = place.details.load(Ordering::Relaxed);
        if !place.followed.load(Ordering::Relaxed) {
            place.followed.store(true, Ordering::Relaxed);
            // Nothing is known that was noted. Its end is the moment to find out whether somebody listens now.
            transfer.begin(ear.send, None);
            place.details.store(self.wants_details(ear), Ordering::Relaxed);
        } else if let Some(Over { chunk, began, arrived, .. }) = last {
            transfer.take_note(&What::Over(chunk, began), Some(arrived).filter(|_| details), details);
        }
        match size {
            Some(size) => transfer.end(size, clock(details)),
            None => transfer.fail(),
        }
        // SAFETY: the caller's promise; the handle is there.
        unsafe { self.tell(ear, place, &mut transfer) };
        place.handle.store(std::ptr::null_mut(), Ordering::Relaxed);
    }

    /// Whether what was left with the request is all that was noted of it, and the listener is to be told so in one: what
    /// [`Transfer::end`] would leave, without a look at what is kept there.
    fn is_all(&self, place: &Place) -> bool {
        place.fresh.load(Ordering::Relaxed)
            && place.followed.load(Ordering::Relaxed)
            && place.details.load(Ordering::Relaxed)
            && self.tells_in_one()
    }

    /// Whether a patient listener learns of a transfer when it has ended. Who learns of a reconnection learns it from an update.
    #[inline]
    fn tells_in_one(&self) -> bool {
        self.is_patient() && self.reconnects.load(Ordering::Relaxed) == 0
    }

    /// What is kept of the transfer.
    fn open<'a>(&self, place: &'a Place) -> MutexGuard<'a, Transfer> {
        let mut transfer = lock(&place.transfer);
        // Of a former one that still stands there nothing is left.
        if place.fresh.load(Ordering::Acquire) {
            place.fresh.store(false, Ordering::Relaxed);
            let posted = Ticks::from_number(place.posted.load(Ordering::Relaxed));
            transfer.begin(self.ear.get().is_some_and(|ear| ear.send), posted);
        }
        transfer
    }

    /// Starts and stops what is due. Forgets the transfer when its first start is declined.
    ///
    /// # Safety
    /// As [`Listener::start`]; the place has a handle.
    unsafe fn tell(&self, ear: &Ear, place: &Place, transfer: &mut Transfer) {
        let paths = self.paths();
        let handle = place.handle.load(Ordering::Relaxed);
        if handle.is_null() {
            // Another thread of the caller's has told the end of it meanwhile.
            return;
        }
        let details = place.details.load(Ordering::Relaxed);
        let now = clock(details);
        let in_one = details && self.tells_in_one();
        if let Some(chunks) = transfer.whole() {
            if in_one {
                // SAFETY: the caller's promise.
                unsafe { self.tell_whole(ear, handle, &paths, chunks, now) };
                transfer.forget();
                return;
            }
            transfer.make_pieces();
        }
        let scene = Scene { link: ear.link, send: ear.send, details, paths: &paths, now };
        if in_one {
            let is_first = transfer.pieces().next().is_some_and(|(piece, told)| is_over(piece, *told));
            let over = transfer.pieces().filter(|(piece, told)| is_over(piece, **told));
            let mut over = over.map(|(piece, told)| {
                *told = Told::All;
                News { ended: true, ..scene.news(piece) }
            });
            if let Some(one) = over.next() {
                // SAFETY: the caller's promise.
                let taken = unsafe { ear.listener.ended(handle, &mut std::iter::once(one).chain(over)) };
                set(&self.hears, taken > 0);
                if is_first && taken == 0 {
                    place.handle.store(std::ptr::null_mut(), Ordering::Relaxed);
                    return;
                }
            }
        }
        for (index, (piece, told)) in transfer.pieces().enumerate() {
            if *told == Told::All {
                continue;
            }
            let mut news = scene.news(piece);
            if *told == Told::Nothing {
                // SAFETY: the caller's promise.
                let answer = unsafe { ear.listener.start(handle, &news) };
                set(&self.hears, !answer.is_null());
                *told = if answer.is_null() { Told::All } else { Told::Started(answer) };
                if answer.is_null() && index == 0 {
                    place.handle.store(std::ptr::null_mut(), Ordering::Relaxed);
                    return;
                }
            }
            if let (Told::Started(answer), true) = (*told, piece.is_ended()) {
                if details && self.reconnects.load(Ordering::Relaxed) > 0 {
                    news.reconnects = self.reconnects.swap(0, Ordering::Relaxed) as u16;
                }
                news.ago_ns = now.map_or(0, |now| piece.ended_before(now));
                ear.listener.stop(answer, &news);
                *told = Told::All;
            }
        }
    }

    /// Tells a patient listener of a transfer that has ended, of which nothing has been told.
    ///
    /// # Safety
    /// As [`Listener::start`].
    unsafe fn tell_whole(&self, ear: &Ear, handle: *mut c_void, paths: &[Path], chunks: &[Over], now: Option<Ticks>) {
        let taken = match chunks {
            [over] if self.is_for(Reader::Sums) => {
                // SAFETY: the caller's promise.
                unsafe { ear.listener.sum(handle, self.sum(ear, paths, over), over.arrived) }
            }
            _ => {
                let now = now.unwrap_or_else(Ticks::now);
                let whole = Whole { link: ear.link, send: ear.send, paths, chunks, now };
                // SAFETY: the caller's promise.
                unsafe { ear.listener.whole(handle, &whole) }
            }
        };
        set(&self.hears, taken);
    }

    /// What is said of a transfer that was this chunk.
    fn sum(&self, ear: &Ear, paths: &[Path], over: &Over) -> NetSum {
        let [wait_receiver_ns, wait_socket_ns, wait_credit_ns] = Wait::ALL.map(|wait| over.waits[wait as usize]);
        let Chunk { message, length, path, .. } = over.chunk;
        let rail = match self.rail.load(Ordering::Relaxed) {
            SEVERAL_RAILS => paths.get(usize::from(path)).unwrap_or(&NO_PATH).rail,
            // Most connections': the paths' memory stays where it is.
            rail => rail as u16,
        };
        NetSum {
            link: ear.link,
            message,
            length,
            wait_receiver_ns,
            wait_socket_ns,
            wait_credit_ns,
            wire_ns: over.wire(),
            rail,
            send: ear.send,
        }
    }

    #[inline]
    fn known_places(&self, slot: u16) -> Option<&[Place; MAX_PARTS]> {
        Some(self.places.get()?[usize::from(slot)].get()?)
    }

    #[inline]
    fn known_place(&self, slot: u16, part: usize) -> Option<&Place> {
        Some(&self.known_places(slot)?[part])
    }

    fn place(&self, slot: u16, part: usize) -> &Place {
        let places = self.places.get_or_init(|| (0..SLOTS).map(|_| OnceLock::new()).collect());
        &places[usize::from(slot)].get_or_init(|| Box::new(std::array::from_fn(|_| Place::new())))[part]
    }

    fn paths(&self) -> MutexGuard<'_, Vec<Path>> {
        lock(&self.paths)
    }
}

// SAFETY: the raw pointers are NCCL's and the profiler's handles. They are only passed back, by `tell`, under the rules
// that its callers promise; here they are numbers.
unsafe impl Send for Transfer {}

impl Place {
    fn new() -> Self {
        Self {
            handle: AtomicPtr::new(std::ptr::null_mut()),
            followed: AtomicBool::new(false),
            details: AtomicBool::new(false),
            noted: AtomicBool::new(false),
            fresh: AtomicBool::new(false),
            posted: AtomicU64::new(0),
            transfer: Mutex::default(),
        }
    }

    fn is_noted(&self) -> bool {
        self.noted.load(Ordering::Relaxed)
    }

    /// Something may be told of a transfer from now on.
    fn attach(&self, handle: *mut c_void, followed: bool, details: bool) {
        self.details.store(details, Ordering::Relaxed);
        self.followed.store(followed, Ordering::Relaxed);
        self.noted.store(false, Ordering::Relaxed);
        self.handle.store(handle, Ordering::Release);
    }
}

/// Writes only what changes: many threads read it.
fn set(flag: &AtomicBool, value: bool) {
    if flag.load(Ordering::Relaxed) != value {
        flag.store(value, Ordering::Relaxed);
    }
}

/// Nothing has been told of it, and all there is to tell can be.
fn is_over(piece: &Piece, told: Told) -> bool {
    told == Told::Nothing && piece.is_ended()
}

fn clock(wanted: bool) -> Option<Ticks> {
    wanted.then(Ticks::now)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
