//! The events of a connection's transfers for a profiler. There are two forms: a start and a stop of each piece while
//! the transfer is under way, or a summary of all pieces when it is over.
//!
//! NCCL passes a handle with each transfer, which points into NCCL's memory: starting an event reads through it. So
//! every event is reported on NCCL's thread, inside `isend`, `irecv` or `test`, before `test` returns done or failed.
//! There the handle is known to be valid, no close can have returned, and after an abort no further calls follow. The
//! threads that move data only note when chunks begin and end (this file, `notes`). NCCL's thread makes pieces of the
//! notes (`transfer`) and reports them in its next call (`report`).
//!
//! The rules, which every backend follows by calling these functions where their descriptions require it:
//!
//! - for each transfer at most [`MOST`] pieces are reported, and their lengths add up to its size (`transfer`);
//! - when the first start of a transfer is declined, nothing more about it is reported;
//! - each start is followed by exactly one stop, unless the connection is closed with the transfer in flight: then NCCL
//!   has aborted, and nothing follows;
//! - a transfer of no bytes has one piece of length zero.
//!
//! Without a profiler that reads events, a transfer costs one declined start: [`Events::has_sink`] remembers this, and
//! nothing is noted. Without a listener or a handle it costs a branch.

mod last;
pub(crate) mod list;
mod notes;
mod piece;
mod report;
mod sink;
mod transfer;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use notes::{Kind, Note, Notes};
pub(crate) use piece::MOST;
pub use piece::{Chunk, Piece, Waits};
use report::Desk;
pub use sink::{Carrier, Listener, Path, Source};
use sink::{NO_PATH, all_on};

use super::request::{MAX_PARTS, RequestSlots, SLOTS};
use crate::nccl::net_event::Reader;
use crate::os::ticks::{self, Ticks};

/// The events of one connection.
pub struct Events {
    sink: OnceLock<Sink>,
    /// The profiler accepted the last start.
    has_sink: AtomicBool,
    /// The listener's last answer about its needs: a [`Reader`].
    reader: AtomicU8,
    /// All paths are on one rail.
    has_one_rail: AtomicBool,
    /// Allocated with the first transfer that has a handle: before that there is nothing to note.
    notes: OnceLock<Notes>,
    own: Own,
}

struct Sink {
    listener: Arc<dyn Listener>,
    link: u64,
    send: bool,
}

/// The fields that only NCCL's threads write while data moves, in cache lines of their own: other threads read the
/// neighbouring fields.
#[repr(align(128))]
#[derive(Default)]
struct Own {
    /// How often [`Events::wait`] was called, modulo [`report::CALLS`].
    calls: AtomicU32,
    desk: Mutex<Desk>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            sink: OnceLock::new(),
            has_sink: AtomicBool::new(false),
            reader: AtomicU8::new(Reader::None as u8),
            has_one_rail: AtomicBool::new(true),
            notes: OnceLock::new(),
            own: Own::default(),
        }
    }
}

impl Events {
    /// Sets the listener, once; `link` is the connection's number, the same on both ends and not secret.
    pub fn listen(&self, listener: Arc<dyn Listener>, link: u64, send: bool) {
        if self.sink.set(Sink { listener, link, send }).is_ok() {
            ticks::set_up();
        }
    }

    /// Path `index` has this remote end from now on. May be called again after a reconnection.
    pub fn set_path(&self, index: usize, path: Path) {
        let mut desk = self.desk();
        let Desk { paths, reconnects, .. } = &mut *desk;
        if paths.len() <= index {
            paths.resize(index + 1, NO_PATH);
        }
        *reconnects += u16::from(paths[index].carrier != Carrier::None);
        paths[index] = path;
        self.has_one_rail.store(all_on(paths, path.rail), Ordering::Relaxed);
    }

    /// Whether chunks are worth noting: a profiler reads events.
    #[inline]
    pub fn has_sink(&self) -> bool {
        self.has_sink.load(Ordering::Relaxed)
    }

    /// Whether all chunks of a transfer may be noted as one ([`Chunk::joined`]): the listener sums by rails, and there
    /// is only one rail.
    #[inline]
    pub(crate) fn joins(&self) -> bool {
        self.is_for(Reader::Sums) && self.has_one_rail.load(Ordering::Relaxed)
    }

    /// Whether a note of the end of a chunk suffices ([`Events::chunk_over`]), without one of its beginning.
    #[inline]
    pub(crate) fn is_patient(&self) -> bool {
        self.is_for(Reader::Patient)
    }

    /// Whether the listener needs at least this level.
    #[inline]
    fn is_for(&self, reader: Reader) -> bool {
        self.reader.load(Ordering::Relaxed) >= reader as u8
    }
}

/// The notes that any thread may make about requests that have not ended.
impl Events {
    /// A chunk of the part is being handed to the network, or its first byte has arrived.
    pub fn chunk_begins(&self, slot: u16, part: usize, chunk: &Chunk) {
        self.note(Some(chunk.path), (slot, part), Kind::Begins, chunk);
    }

    /// The chunk at `offset`, which began on path `path`, has arrived. If the offset is not known
    /// ([`SOMEWHERE`](crate::nccl::net_event::SOMEWHERE)), it is the only one of its transfer on that path.
    pub fn chunk_ends(&self, slot: u16, part: usize, path: u16, offset: u64) {
        self.note(Some(path), (slot, part), Kind::Ends, &Chunk { offset, path, ..Chunk::default() });
    }

    /// A chunk that began at `began`, and about which nothing has been noted, is complete. If the chunk is the whole
    /// message, this is the last note about that message, and the thread that ends the message makes it.
    pub fn chunk_over(&self, requests: &RequestSlots, slot: u16, part: usize, chunk: &Chunk, began: Ticks) {
        self.over(requests, Some(chunk.path), (slot, part), chunk, (began, Ticks::now()));
    }

    /// The same for a chunk whose acknowledgement this side read at `now`. One acknowledgement covers several chunks,
    /// on all paths: these notes go into one list.
    pub(crate) fn chunk_acknowledged(
        &self,
        requests: &RequestSlots,
        slot: u16,
        chunk: &Chunk,
        began: Ticks,
        now: Ticks,
    ) {
        self.over(requests, None, (slot, 0), chunk, (began, now));
    }

    /// The chunk at `offset` on path `path` has waited for its socket since `since`.
    pub(crate) fn chunk_waited(&self, slot: u16, part: usize, path: u16, offset: u64, since: Ticks) {
        let chunk = Chunk { offset, path, ..Chunk::default() };
        let note = Note { slot, part: part as u8, kind: Kind::Waited, chunk, began: since, now: Ticks::now() };
        self.add(Some(path), &note);
    }

    /// The receiver's buffer is posted, so that from here on the message waits for the network only.
    pub(crate) fn ready(&self, slot: u16, part: usize) {
        self.note(None, (slot, part), Kind::Ready, &Chunk::default());
    }

    /// Records the end of the chunk with the request, if the chunk is the whole of a request of one part and was sent
    /// once. Otherwise notes it.
    #[inline]
    fn over(
        &self,
        requests: &RequestSlots,
        path: Option<u16>,
        (slot, part): (u16, usize),
        chunk: &Chunk,
        (began, now): (Ticks, Ticks),
    ) {
        let note = Note { slot, part: part as u8, kind: Kind::Over, chunk: *chunk, began, now };
        if !last::holds(&note) || !requests.leave(slot, last::words(&note)) {
            self.add(path, &note);
        }
    }

    /// Notes an event on a path, or of a whole transfer.
    fn note(&self, path: Option<u16>, (slot, part): (u16, usize), kind: Kind, chunk: &Chunk) {
        let now = Ticks::now();
        self.add(path, &Note { slot, part: part as u8, kind, chunk: *chunk, began: now, now });
    }

    fn add(&self, path: Option<u16>, note: &Note) {
        if let Some(notes) = self.notes.get() {
            notes.add(path, note);
        }
    }
}

#[cfg(test)]
mod tests;
