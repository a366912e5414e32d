//! What a connection tells a profiler of its transfers: a start and a stop for each piece that travels.
//!
//! NCCL gives a handle with each transfer, which points into its own memory: starting an event reads through it. So
//! everything is told on NCCL's thread, inside `isend`, `irecv` or `test`, before `test` says done or failed: there the
//! handle is known to be alive, no close can have returned, and after an abort nobody is left who could call. The
//! threads that move data only note what begins and ends; NCCL's thread passes it on when it next comes by.
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

pub mod transfer;

use std::ffi::c_void;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub use transfer::{Chunk, MOST, Piece, Wait};
use transfer::{Told, Transfer};

use super::request::{MAX_PARTS, Outcome, RequestSlots, SLOTS, Ticket};
use crate::os::ticks::{self, Ticks};

/// Who is told: NCCL's profiler, behind `plugin::listener`.
pub trait Listener: Send + Sync {
    /// Whether it reads resends and times. Asked once per transfer.
    fn wants_details(&self) -> bool;

    /// A piece begins. Answers its handle, or null when the profiler declines.
    ///
    /// # Safety
    /// `transfer` is the handle that NCCL gave with a transfer that it has not been told the end of, and the caller is
    /// inside a call of NCCL's that concerns its connection.
    unsafe fn start(&self, transfer: *mut c_void, news: &News<'_>) -> *mut c_void;

    /// The piece with this handle has ended.
    fn stop(&self, handle: *mut c_void, news: &News<'_>);
}

/// What is told.
#[derive(Debug)]
pub struct News<'a> {
    /// The connection's number, the same on both ends.
    pub link: u64,
    /// Whether this side sends.
    pub send: bool,
    /// [`Listener::wants_details`], as it was when the transfer began.
    pub details: bool,
    /// The one that the piece is on, or began on.
    pub path: &'a Path,
    /// All paths of the connection.
    pub paths: &'a [Path],
    /// How many paths were connected anew since the last event with details.
    pub reconnects: u16,
    /// The piece.
    pub piece: &'a Piece,
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
        (!self.piece.rest || self.paths.len() <= 1).then_some(self.piece.chunk.path)
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

const NO_PATH: Path = Path { carrier: Carrier::None, rail: 0, peer: None };

/// One part of a request.
struct Place {
    /// NCCL's handle while something may be told of it, else null. Written by NCCL's thread only.
    handle: AtomicPtr<c_void>,
    /// Whether the transfer is followed piece by piece, and with times.
    followed: AtomicBool,
    details: AtomicBool,
    transfer: Mutex<Transfer>,
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
    /// A transfer has had a handle: before the first there is nothing to note.
    tried: AtomicBool,
    /// Slots about which there are news.
    news: [AtomicU64; SLOTS / 64],
    /// Whether there may be any: written after them.
    any_news: AtomicBool,
    places: OnceLock<Box<[Slot]>>,
    paths: Mutex<Vec<Path>>,
    reconnects: AtomicU64,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            ear: OnceLock::new(),
            hears: AtomicBool::new(false),
            tried: AtomicBool::new(false),
            news: std::array::from_fn(|_| AtomicU64::new(0)),
            any_news: AtomicBool::new(false),
            places: OnceLock::new(),
            paths: Mutex::new(Vec::new()),
            reconnects: AtomicU64::new(0),
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
        self.tried.store(true, Ordering::Relaxed);
        let details = ear.listener.wants_details();
        let chunk = chunk(details);
        let place = self.place(slot, 0);
        let now = clock(details);
        let mut transfer = lock(&place.transfer);
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
        if !self.tried.load(Ordering::Relaxed) {
            // The first transfer is followed on trial.
            self.tried.store(true, Ordering::Relaxed);
            self.hears.store(true, Ordering::Relaxed);
        }
        let follows = self.hears();
        let details = follows && ear.listener.wants_details();
        if follows {
            lock(&place.transfer).begin(ear.send, clock(details));
        }
        place.attach(handle, follows, details);
    }

    /// Any thread: a chunk of the part is being handed to the network, or its first byte has come. Only for requests
    /// that have not ended.
    pub fn chunk_begins(&self, slot: u16, part: usize, chunk: &Chunk) {
        self.note(slot, part, |transfer, details| transfer.chunk_begins(chunk, clock(details), details));
    }

    /// Any thread: the chunk at `offset` has arrived. Only for requests that have not ended.
    pub fn chunk_ends(&self, slot: u16, part: usize, offset: u64) {
        self.note(slot, part, |transfer, details| transfer.chunk_ends(offset, clock(details)));
    }

    /// Any thread: all chunks of the part have arrived, just before its request ends: what there is to tell of it is told then.
    pub fn all_arrived(&self, slot: u16, part: usize) {
        if let Some(place) = self.followed_place(slot, part) {
            let now = clock(place.details.load(Ordering::Relaxed));
            lock(&place.transfer).all_arrived(now);
        }
    }

    /// Any thread: a chunk has arrived that makes no piece ([`Transfer::chunk_passed`]). Only for requests that have not
    /// ended.
    pub fn chunk_passed(&self, slot: u16, part: usize, path: u16, wr_id: u64) {
        self.note(slot, part, |transfer, _| transfer.chunk_passed(path, wr_id));
    }

    /// Any thread: the chunk on path `path` has arrived, the only one of its transfer there. Only for requests that have
    /// not ended.
    pub fn path_ends(&self, slot: u16, part: usize, path: u16) {
        self.note(slot, part, |transfer, details| transfer.path_ends(path, clock(details)));
    }

    /// Any thread: the chunk at `offset` has waited since `since`.
    pub fn chunk_waited(&self, slot: u16, part: usize, offset: u64, wait: Wait, since: Ticks) {
        let ns = Ticks::now().nanoseconds_since(since);
        self.note(slot, part, |transfer, _| transfer.chunk_waited(offset, wait, ns));
    }

    /// Any thread: the receiver's buffer is there, so that from here on the message waits for the network only.
    pub fn ready(&self, slot: u16, part: usize) {
        self.note(slot, part, |transfer, details| transfer.ready(clock(details)));
    }

    fn note(&self, slot: u16, part: usize, note: impl FnOnce(&mut Transfer, bool)) {
        if let Some(place) = self.followed_place(slot, part) {
            note(&mut lock(&place.transfer), place.details.load(Ordering::Relaxed));
            self.mark(slot);
        }
    }

    fn followed_place(&self, slot: u16, part: usize) -> Option<&Place> {
        let followed =
            |place: &&Place| place.followed.load(Ordering::Relaxed) && !place.handle.load(Ordering::Acquire).is_null();
        self.known_place(slot, part).filter(followed)
    }

    /// There is something to tell of this slot.
    fn mark(&self, slot: u16) {
        self.news[usize::from(slot) / 64].fetch_or(1 << (slot % 64), Ordering::Release);
        self.any_news.store(true, Ordering::Release);
    }

    /// NCCL's thread, in `isend`, `irecv` or `test`: tells what has been noted since the last time.
    ///
    /// # Safety
    /// As [`Listener::start`], for every request of the connection.
    #[inline]
    pub unsafe fn report(&self) {
        if self.any_news.load(Ordering::Relaxed) {
            // SAFETY: passed on.
            unsafe { self.report_news() };
        }
    }

    #[cold]
    unsafe fn report_news(&self) {
        let Some(ear) = self.ear.get() else { return };
        // First the mark, then the words: what is noted in between leaves the mark behind. An exchange: the words that
        // were marked by then are seen.
        self.any_news.swap(false, Ordering::AcqRel);
        for (word, base) in self.news.iter().zip((0u16..).step_by(64)) {
            let mut slots = word.swap(0, Ordering::Acquire);
            while slots != 0 {
                let slot = base + slots.trailing_zeros() as u16;
                slots &= slots - 1;
                for part in 0..MAX_PARTS {
                    let Some(place) = self.known_place(slot, part) else { continue };
                    if !place.handle.load(Ordering::Relaxed).is_null() {
                        // SAFETY: the handle is there, so the end of its transfer has not been told.
                        unsafe { self.tell(ear, place, &mut lock(&place.transfer)) };
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
            unsafe { self.report() };
            return None;
        }
        if !self.tried.load(Ordering::Relaxed) {
            return requests.finish(ticket);
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
            Some(outcome) => unsafe { self.conclude(ticket.slot, outcome) },
            // SAFETY: passed on.
            None => unsafe { self.report() },
        }
        outcome
    }

    /// NCCL's thread, when a request has ended well and NCCL does not know it yet: tells the rest.
    ///
    /// # Safety
    /// As [`Listener::start`].
    #[inline]
    pub unsafe fn conclude(&self, slot: u16, outcome: &Outcome) {
        if let Some(ear) = self.ear.get() {
            for (part, size) in outcome.sizes[..outcome.parts].iter().enumerate() {
                // SAFETY: passed on.
                unsafe { self.close(ear, slot, part, |transfer, now| transfer.end(*size, now)) };
            }
        }
    }

    /// NCCL's thread, when a request has failed and NCCL does not know it yet: nothing new is told, what began ends.
    ///
    /// # Safety
    /// As [`Listener::start`].
    pub unsafe fn abandon(&self, slot: u16) {
        if let Some(ear) = self.ear.get() {
            for part in 0..MAX_PARTS {
                // SAFETY: passed on.
                unsafe { self.close(ear, slot, part, |transfer, _| transfer.fail()) };
            }
        }
    }

    unsafe fn close(&self, ear: &Ear, slot: u16, part: usize, end: impl FnOnce(&mut Transfer, Option<Ticks>)) {
        let Some(place) = self.known_place(slot, part) else { return };
        if place.handle.load(Ordering::Relaxed).is_null() {
            return;
        }
        let mut transfer = lock(&place.transfer);
        let details = place.details.load(Ordering::Relaxed);
        if !place.followed.load(Ordering::Relaxed) {
            place.followed.store(true, Ordering::Relaxed);
            // Nothing was noted. Its end is the moment to find out whether somebody listens now.
            transfer.begin(ear.send, None);
            place.details.store(ear.listener.wants_details(), Ordering::Relaxed);
        }
        end(&mut transfer, clock(details));
        // SAFETY: the caller's promise; the handle is there.
        unsafe { self.tell(ear, place, &mut transfer) };
        place.handle.store(std::ptr::null_mut(), Ordering::Relaxed);
    }

    /// Starts and stops what is due. Forgets the transfer when its first start is declined.
    ///
    /// # Safety
    /// As [`Listener::start`]; the place has a handle.
    unsafe fn tell(&self, ear: &Ear, place: &Place, transfer: &mut Transfer) {
        let handle = place.handle.load(Ordering::Relaxed);
        if handle.is_null() {
            // Another thread of the caller's has told the end of it meanwhile.
            return;
        }
        let details = place.details.load(Ordering::Relaxed);
        let paths = self.paths();
        for (index, (piece, told)) in transfer.pieces().enumerate() {
            if *told == Told::All {
                continue;
            }
            let path = paths.get(usize::from(piece.chunk.path)).unwrap_or(&NO_PATH);
            let mut news = News { link: ear.link, send: ear.send, details, path, paths: &paths, reconnects: 0, piece };
            if *told == Told::Nothing {
                // SAFETY: the caller's promise.
                let answer = unsafe { ear.listener.start(handle, &news) };
                self.hears.store(!answer.is_null(), Ordering::Relaxed);
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
                ear.listener.stop(answer, &news);
                *told = Told::All;
            }
        }
    }

    fn known_place(&self, slot: u16, part: usize) -> Option<&Place> {
        Some(&self.places.get()?[usize::from(slot)].get()?[part])
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
            transfer: Mutex::default(),
        }
    }

    /// Something may be told of a transfer from now on.
    fn attach(&self, handle: *mut c_void, followed: bool, details: bool) {
        self.details.store(details, Ordering::Relaxed);
        self.followed.store(followed, Ordering::Relaxed);
        self.handle.store(handle, Ordering::Release);
    }
}

fn clock(wanted: bool) -> Option<Ticks> {
    wanted.then(Ticks::now)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
