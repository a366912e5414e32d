//! The events of a connection's transfers for a profiler: a start and a stop for each piece.
//!
//! NCCL passes a handle with each transfer, which points into NCCL's memory: starting an event reads through it. So
//! every event is reported on NCCL's thread, inside `isend`, `irecv` or `test`, before `test` returns done or failed:
//! there the handle is known to be valid, no close can have returned, and after an abort no further calls come. The
//! threads that move data only note what begins and ends (`notes`); NCCL's thread turns the notes into pieces
//! ([`transfer`]) and reports them in its next call.
//!
//! The rules, which every backend follows by calling these functions where their descriptions require it:
//!
//! - at most [`MOST`] pieces are reported of a transfer, and their lengths add up to its size ([`transfer`]);
//! - when the first start of a transfer is declined, nothing more is reported of it;
//! - each start is followed by exactly one stop, unless the connection is closed with the transfer in flight: then NCCL has aborted, and
//!   nothing follows;
//! - a transfer of no bytes has one piece of length zero.
//!
//! Without a profiler that reads events, a transfer costs one declined start: [`Events::hears`] remembers this, and
//! nothing is noted. Without a listener or a handle it costs a branch.

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

/// The receiver of the events: NCCL's profiler, behind `plugin::listener`.
pub trait Listener: Send + Sync {
    /// What the profiler needs; called once per transfer. All but [`Reader::None`] need resends and times; from
    /// [`Reader::Patient`] up a piece may be reported when it has ended.
    fn reader(&self) -> Reader;

    /// A piece begins. Returns its handle, or null when the profiler declines.
    ///
    /// # Safety
    /// `transfer` is the handle that NCCL passed with a transfer whose end has not been reported, and the caller is
    /// inside a call of NCCL's that concerns its connection.
    unsafe fn start(&self, transfer: *mut c_void, news: &News<'_>) -> *mut c_void;

    /// Pieces that have ended, for a patient listener: the content of a start and a stop of each, in fewer calls.
    /// Returns how many it takes, the first ones; the others are declined.
    ///
    /// # Safety
    /// As [`Listener::start`].
    unsafe fn ended<'a>(&self, transfer: *mut c_void, all: &mut dyn Iterator<Item = News<'a>>) -> usize {
        let mut taken = 0;
        for news in all {
            // SAFETY: the caller keeps this function's promise, which is the same.
            let handle = unsafe { self.start(transfer, &news) };
            if handle.is_null() {
                break;
            }
            self.stop(handle, &news);
            taken += 1;
        }
        taken
    }

    /// The whole record of a transfer that has ended, for a patient listener: the same as [`Listener::ended`] of a
    /// piece for each of its chunks. Returns whether the first one was taken.
    ///
    /// # Safety
    /// As [`Listener::start`].
    unsafe fn whole(&self, transfer: *mut c_void, whole: &Whole<'_>) -> bool {
        let pieces: Vec<Piece> = whole.chunks.iter().map(Over::piece).collect();
        let Whole { link, send, paths, now, .. } = *whole;
        let scene = Scene { link, send, details: true, paths, now: Some(now) };
        let mut news = pieces.iter().map(|piece| News { ended: true, ..scene.news(piece) });
        // SAFETY: the caller keeps this function's promise, which is the same.
        unsafe { self.ended(transfer, &mut news) > 0 }
    }

    /// The whole record of a transfer that ended at the time `ended` and was one chunk, for [`Reader::Sums`] only: the
    /// same content as [`Listener::whole`]. Returns whether it was taken.
    ///
    /// # Safety
    /// As [`Listener::start`].
    unsafe fn sum(&self, _transfer: *mut c_void, _sum: NetSum, _ended: Ticks) -> bool {
        false
    }

    /// The piece with this handle has ended.
    fn stop(&self, handle: *mut c_void, news: &News<'_>);
}

/// A transfer that has ended and whose chunks are reported one by one.
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

/// One event.
#[derive(Debug)]
pub struct News<'a> {
    /// The connection's number, the same on both ends.
    pub link: u64,
    /// Whether this side sends.
    pub send: bool,
    /// Whether resends and times were to be reported when the transfer began.
    pub details: bool,
    /// The path that the piece is on, or began on.
    pub path: &'a Path,
    /// All paths of the connection.
    pub paths: &'a [Path],
    /// How many paths were reconnected since the last event with details.
    pub reconnects: u16,
    /// The piece.
    pub piece: &'a Piece,
    /// It has already ended when its start is reported, and its stop follows at once.
    pub ended: bool,
    /// How long ago it began (in a start) or ended, in nanoseconds; 0 without details.
    pub ago_ns: u64,
}

impl News<'_> {
    /// The rail of all its bytes. None when there may be several: a piece that stands for the rest is reported before
    /// the paths of its chunks are known.
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

/// A stream or queue pair, and its remote end.
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

/// What pieces that are reported together have in common.
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

/// For a patient listener, the notes of unfinished requests are read only once in this many nanoseconds: a thread that
/// reads them in a loop takes their memory away from the writers. Within that time no path fills its list.
const PATIENCE_NS: u64 = 1_000_000;

/// And the clock is read in one of this many calls. NCCL's thread tests all its requests in turn, thousands of times
/// per millisecond, and the time it spends on the clock delays completed requests.
const CALLS: u32 = 64;

/// In place of a rail's number.
const SEVERAL_RAILS: u32 = u32::MAX;

const NO_PATH: Path = Path { carrier: Carrier::None, rail: 0, peer: None };

/// One part of a request.
struct Place {
    /// NCCL's handle while something may be reported of it, else null. Written by NCCL's thread only.
    handle: AtomicPtr<c_void>,
    /// Whether the transfer is followed piece by piece, and with times.
    followed: AtomicBool,
    details: AtomicBool,
    /// Something is noted of it elsewhere than with its request ([`last`]). Written after that, and before its request
    /// ends.
    noted: AtomicBool,
    /// Set while no note of this transfer is in `transfer`, which may still hold a previous one; and the time of the
    /// request, by [`Ticks::number`], 0 when times are not wanted.
    fresh: AtomicBool,
    posted: AtomicU64,
    /// Locked by NCCL's threads only, which alternate. Not touched for a transfer whose only note is that it has
    /// completed.
    transfer: Mutex<Transfer>,
}

/// A transfer whose notes are kept.
struct Open<'a> {
    slot: u16,
    part: u8,
    details: bool,
    transfer: MutexGuard<'a, Transfer>,
}

/// A request slot; the places of its parts are allocated when it is first used by a transfer that may be followed.
type Slot = OnceLock<Box<[Place; MAX_PARTS]>>;

struct Ear {
    listener: Arc<dyn Listener>,
    link: u64,
    send: bool,
}

/// The events of one connection.
pub struct Events {
    ear: OnceLock<Ear>,
    /// The last start was taken.
    hears: AtomicBool,
    /// What the listener needed when last called: a [`Reader`].
    reader: AtomicU8,
    /// The rail of all paths, or [`SEVERAL_RAILS`].
    rail: AtomicU32,
    /// The notes; allocated with the first transfer that has a handle: before that there is nothing to note.
    notes: OnceLock<Notes>,
    places: OnceLock<Box<[Slot]>>,
    /// Locked while events are reported, so that only one of NCCL's threads at a time reports a transfer.
    paths: Mutex<Vec<Path>>,
    reconnects: AtomicU64,
    own: Own,
}

/// Fields that only NCCL's threads write, in cache lines of their own: other threads read the fields beside them.
#[repr(align(128))]
#[derive(Default)]
struct Own {
    /// Slots with something to report.
    news: [AtomicU64; SLOTS / 64],
    /// Whether there may be any: written after them.
    any_news: AtomicBool,
    /// When notes were last read while a request was unfinished: [`Ticks::number`].
    looked: AtomicU64,
    /// How often that was deferred to a later call, modulo [`CALLS`].
    calls: AtomicU32,
    /// Where notes are moved to.
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
    /// Sets the listener, once; `link` is the connection's number, the same on both ends and not secret.
    pub fn listen(&self, listener: Arc<dyn Listener>, link: u64, send: bool) {
        if self.ear.set(Ear { listener, link, send }).is_ok() {
            ticks::set_up();
        }
    }

    /// Path `index` has this remote end from now on. May be called again after a reconnection.
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

    /// Whether chunks are worth noting: a profiler reads events.
    #[inline]
    pub fn hears(&self) -> bool {
        self.hears.load(Ordering::Relaxed)
    }

    /// NCCL's thread, in `isend` or `irecv`, before anything can move: part `part` of the request in `slot` has this
    /// handle (null when NCCL passed none).
    #[inline]
    pub fn follow(&self, slot: u16, part: usize, handle: *mut c_void) {
        if handle.is_null() {
            return;
        }
        if let Some(ear) = self.ear.get() {
            self.prepare(ear, slot, part, handle);
        }
    }

    /// As [`Events::follow`], for a message that travels as one chunk, normally in this very call. Its start is noted
    /// now and reported after it has left, by [`Events::settle`]: reporting takes a tenth of the message's latency.
    /// `chunk` is called when there is a profiler, with whether the message's number is needed. Returns whether there
    /// is something to settle.
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
        // It leaves in this very call: no time passes between its request and that.
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
            // The sender sees what a receive waits for.
            place.posted.store(clock(details && ear.send).map_or(0, Ticks::number), Ordering::Relaxed);
            // Without the lock: until the handle is there, only another of NCCL's threads that still has a note of the
            // previous transfer reads this place, and what that thread keeps belongs to a previous transfer.
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

    /// Whether the listener needs this, or more.
    #[inline]
    fn is_for(&self, reader: Reader) -> bool {
        self.reader.load(Ordering::Relaxed) >= reader as u8
    }

    /// Whether all chunks of a transfer may be noted as one ([`Chunk::joined`]): the listener sums by rails, and there
    /// is only one rail.
    #[inline]
    pub fn joins(&self) -> bool {
        self.is_for(Reader::Sums) && self.rail.load(Ordering::Relaxed) != SEVERAL_RAILS
    }

    /// Whether it is enough to note the end of a chunk ([`Events::chunk_over`]), and not its beginning.
    #[inline]
    pub fn is_patient(&self) -> bool {
        self.is_for(Reader::Patient)
    }

    /// Any thread: a chunk is complete that began at `began` and of which nothing has been noted. Only for requests
    /// that have not ended. A chunk that is all of its message is the last thing noted of it, by the thread that ends
    /// it.
    pub fn chunk_over(&self, requests: &RequestSlots, slot: u16, part: usize, chunk: &Chunk, began: Ticks) {
        self.over(requests, Some(chunk.path), (slot, part), chunk, began, Ticks::now());
    }

    /// Any thread: the same for a chunk that the other side has acknowledged, as seen at `now`. One acknowledgement
    /// covers several chunks, on all paths: these notes go into one list, which is read after the paths' lists with
    /// their waits.
    pub fn chunk_acknowledged(&self, requests: &RequestSlots, slot: u16, chunk: &Chunk, began: Ticks, now: Ticks) {
        self.over(requests, None, (slot, 0), chunk, began, now);
    }

    /// NCCL's thread, in `isend`: the chunk, all of its message, has left in this very call. With it the request,
    /// followed since [`Events::follow`], has ended.
    pub fn left_at_once(&self, requests: &RequestSlots, slot: u16, chunk: &Chunk) {
        if let Some(place) = self.followed_place(slot, 0)
            && let Some(posted) = Ticks::from_number(place.posted.load(Ordering::Relaxed))
        {
            self.chunk_over(requests, slot, 0, chunk, posted);
        }
    }

    /// Records the end of the chunk with the request, if it is all of a request of one part and was sent once; else
    /// notes it.
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

    /// Any thread: a chunk of the part is being handed to the network, or its first byte has arrived. Only for requests
    /// that have not ended.
    pub fn chunk_begins(&self, slot: u16, part: usize, chunk: &Chunk) {
        self.note(slot, part, Some(chunk.path), What::Begins(*chunk));
    }

    /// Any thread: the chunk at `offset`, which began on path `path`, has arrived. Only for requests that have not
    /// ended.
    pub fn chunk_ends(&self, slot: u16, part: usize, path: u16, offset: u64) {
        self.note(slot, part, Some(path), What::Ends(offset));
    }

    /// Any thread: all chunks of the part have arrived, just before its request ends and its events are reported.
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

    /// Any thread: the receiver's buffer is posted, so that from here on the message waits for the network only.
    pub fn ready(&self, slot: u16, part: usize) {
        self.note(slot, part, None, What::Ready);
    }

    /// Notes an event on a path, or of a whole transfer.
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

    /// Allocates the notes, once. Returns whether that was now.
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

    /// There is something to report of this slot.
    fn mark(&self, slot: u16) {
        self.own.news[usize::from(slot) / 64].fetch_or(1 << (slot % 64), Ordering::Release);
        self.own.any_news.store(true, Ordering::Release);
    }

    /// NCCL's thread: turns notes into pieces, to be reported by [`Events::report`], except those of the request that
    /// is `ending`, which the caller reports.
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
            // Normally this is all, and the order between the paths does not matter.
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

    /// Keeps a note that need not be reported before the transfer's end, if `keep` can. Notes of no transfer are
    /// dropped. The transfer stays `open` for the next note, which is normally of the same one.
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

    /// A transfer whose notes are kept.
    fn followed_place(&self, slot: u16, part: usize) -> Option<&Place> {
        let followed =
            |place: &&Place| place.followed.load(Ordering::Relaxed) && !place.handle.load(Ordering::Relaxed).is_null();
        self.known_place(slot, part).filter(followed)
    }

    /// NCCL's thread, in `isend`, `irecv` or `test`: reports what has been noted since the last time.
    ///
    /// # Safety
    /// As [`Listener::start`], for every request of the connection.
    #[inline]
    pub unsafe fn report(&self) {
        self.read_notes(None);
        if self.own.any_news.load(Ordering::Relaxed) {
            // SAFETY: the caller keeps this function's promise, which is the same.
            unsafe { self.report_news() };
        }
    }

    /// NCCL's thread, in `test` of an unfinished request: as [`Events::report`], but reports to a patient listener only
    /// now and then.
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
        // SAFETY: the caller keeps this function's promise, which is the same.
        unsafe { self.report() };
    }

    #[cold]
    unsafe fn report_news(&self) {
        let Some(ear) = self.ear.get() else { return };
        // First the mark, then the words: if another of NCCL's threads sets a bit in between, the mark stays set. An
        // exchange: the words that were marked by then are visible.
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
                        // SAFETY: the handle is there, so the end of its transfer has not been reported.
                        unsafe { self.tell(ear, place, &mut self.open(place)) };
                    }
                }
            }
        }
    }

    /// NCCL's thread, in `test`: as [`RequestSlots::finish`], but the profiler gets the events before NCCL gets the
    /// outcome.
    ///
    /// # Safety
    /// As [`Events::report`].
    #[inline]
    pub unsafe fn finish(&self, requests: &RequestSlots, ticket: Ticket) -> Option<Outcome> {
        if !requests.is_done(ticket) {
            // SAFETY: the caller keeps this function's promise, which is the same.
            unsafe { self.wait() };
            return None;
        }
        let Some(notes) = self.notes.get() else { return requests.finish(ticket) };
        if self.hears() && self.known_place(ticket.slot, 0).is_some_and(Place::is_noted) {
            notes.fetch();
        }
        // SAFETY: the caller keeps this function's promise, which is the same.
        let outcome = unsafe { self.settle(requests, ticket) }?;
        requests.release(ticket);
        Some(outcome)
    }

    /// NCCL's thread, in `isend` or `test`: reports the noted events, including the end of the request if it is done.
    /// Returns the outcome then.
    ///
    /// # Safety
    /// As [`Events::report`].
    pub unsafe fn settle(&self, requests: &RequestSlots, ticket: Ticket) -> Option<Outcome> {
        // Read first: a request that ends after this is handled by the next call.
        let outcome = requests.outcome(ticket);
        match &outcome {
            // SAFETY: the caller keeps this function's promise, which is the same.
            Some(outcome) => unsafe { self.conclude(ticket.slot, outcome, requests.last_words(ticket)) },
            // SAFETY: the caller keeps this function's promise, which is the same.
            None => unsafe { self.report() },
        }
        outcome
    }

    /// NCCL's thread, when a request has succeeded and NCCL has not received the outcome: reports the rest, including the
    /// record left with the request.
    ///
    /// # Safety
    /// As [`Listener::start`].
    #[inline]
    pub unsafe fn conclude(&self, slot: u16, outcome: &Outcome, last: Option<LastWords>) {
        if let (Some(ear), Some(places)) = (self.ear.get(), self.known_places(slot)) {
            let places = &places[..outcome.parts];
            // It ended after everything that was noted of it.
            if places.iter().any(Place::is_noted) {
                self.read_notes(Some(slot));
            }
            for (place, size) in places.iter().zip(outcome.sizes) {
                // SAFETY: the caller keeps this function's promise, which is the same.
                unsafe { self.close(ear, place, Some(size), last) };
            }
        }
    }

    /// NCCL's thread, when a request has failed and NCCL has not received the outcome: nothing new is reported, and started
    /// pieces end.
    ///
    /// # Safety
    /// As [`Listener::start`].
    pub unsafe fn abandon(&self, slot: u16) {
        if let (Some(ear), Some(places)) = (self.ear.get(), self.known_places(slot)) {
            self.read_notes(Some(slot));
            for place in places {
                // SAFETY: the caller keeps this function's promise, which is the same.
                unsafe { self.close(ear, place, None, None) };
            }
        }
    }

    /// Reports the rest of a part that has ended with this many bytes, or failed.
    unsafe fn close(&self, ear: &Ear, place: &Place, size: Option<u64>, last: Option<LastWords>) {
        if place.handle.load(Ordering::Relaxed).is_null() {
            return;
        }
        let last = last.and_then(|words| last::over(words, size?));
        if let Some(over) = last.filter(|_| self.is_all(place)) {
            let over = over.alone(ear.send, Ticks::from_number(place.posted.load(Ordering::Relaxed)));
            // The reporting thread holds the lock of the paths, so this alone excludes NCCL's other threads.
            let (paths, chunks) = (self.paths(), std::slice::from_ref(&over));
            let handle = place.handle.load(Ordering::Relaxed);
            if handle.is_null() {
                // In the meantime another thread of the caller's has reported its end.
                return;
            }
            // SAFETY: the caller keeps this function's promise, and the handle is there.
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
            // No notes are kept of it. Its end is the moment to find out whether a profiler reads events now.
            transfer.begin(ear.send, None);
            place.details.store(self.wants_details(ear), Ordering::Relaxed);
        } else if let Some(Over { chunk, began, arrived, .. }) = last {
            transfer.take_note(&What::Over(chunk, began), Some(arrived).filter(|_| details), details);
        }
        match size {
            Some(size) => transfer.end(size, clock(details)),
            None => transfer.fail(),
        }
        // SAFETY: the caller keeps this function's promise, and the handle is there.
        unsafe { self.tell(ear, place, &mut transfer) };
        place.handle.store(std::ptr::null_mut(), Ordering::Relaxed);
    }

    /// Whether the record left with the request is the only note of it, and the listener takes it as one: the result of
    /// [`Transfer::end`], without reading what is kept there.
    fn is_all(&self, place: &Place) -> bool {
        place.fresh.load(Ordering::Relaxed)
            && place.followed.load(Ordering::Relaxed)
            && place.details.load(Ordering::Relaxed)
            && self.tells_in_one()
    }

    /// Whether a patient listener gets a transfer when it has ended. A listener that needs reconnections gets those
    /// from an update.
    #[inline]
    fn tells_in_one(&self) -> bool {
        self.is_patient() && self.reconnects.load(Ordering::Relaxed) == 0
    }

    /// The notes that are kept of the transfer.
    fn open<'a>(&self, place: &'a Place) -> MutexGuard<'a, Transfer> {
        let mut transfer = lock(&place.transfer);
        // Nothing remains of a previous one that is still stored there.
        if place.fresh.load(Ordering::Acquire) {
            place.fresh.store(false, Ordering::Relaxed);
            let posted = Ticks::from_number(place.posted.load(Ordering::Relaxed));
            transfer.begin(self.ear.get().is_some_and(|ear| ear.send), posted);
        }
        transfer
    }

    /// Reports the starts and stops that are due. Drops the transfer when its first start is declined.
    ///
    /// # Safety
    /// As [`Listener::start`]; the place has a handle.
    unsafe fn tell(&self, ear: &Ear, place: &Place, transfer: &mut Transfer) {
        let paths = self.paths();
        let handle = place.handle.load(Ordering::Relaxed);
        if handle.is_null() {
            // In the meantime another thread of the caller's has reported its end.
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

    /// Reports to a patient listener a transfer that has ended and of which nothing has been reported.
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

    /// The record of a transfer that was this chunk.
    fn sum(&self, ear: &Ear, paths: &[Path], over: &Over) -> NetSum {
        let [wait_receiver_ns, wait_socket_ns, wait_credit_ns] = Wait::ALL.map(|wait| over.waits[wait as usize]);
        let Chunk { message, length, path, .. } = over.chunk;
        let rail = match self.rail.load(Ordering::Relaxed) {
            SEVERAL_RAILS => paths.get(usize::from(path)).unwrap_or(&NO_PATH).rail,
            // The case of most connections: the paths' memory stays where it is.
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
// that its callers promise; here they are only numbers.
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

    /// Something may be reported of a transfer from now on.
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

/// Nothing has been reported of it, and everything can be.
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
