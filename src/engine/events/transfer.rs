//! The bookkeeping of one transfer: its pieces, made from the notes of the threads that move data.
//!
//! The rule about lengths: whatever happens on the wire, the reported pieces add up to the transfer's size to the byte,
//! and there are at most [`MOST`] of them. So the last piece stands for all bytes that are left when it begins. When
//! the transfer ends, the bytes that no path reported make one more piece. Resent bytes are counted separately.
//!
//! Notes of different paths arrive in any order. Pure bookkeeping: no clock, no callback.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::notes::{Kind, Note, ROOM};
use super::piece::{Chunk, MOST, Piece, Reported};
use crate::nccl::net_event::SOMEWHERE;
use crate::os::ticks::Ticks;

/// One transfer.
#[derive(Debug, Default)]
pub(super) struct Transfer {
    /// NCCL's handle while something may be reported, else none.
    pub(super) handle: Option<NonNull<c_void>>,
    /// Threads make notes about it.
    pub(super) is_followed: bool,
    /// Resends and times are reported.
    pub(super) details: bool,
    pub(super) pieces: Vec<Piece>,
    send: bool,
    /// When the request was made: on the sending side only. A receive that waits for its message waits for the sender,
    /// whose reasons are not known here.
    posted: Option<Ticks>,
    /// From when on it waited for the network only.
    ready: Option<Ticks>,
    /// When its first chunk left.
    left: Option<Ticks>,
    /// Its size as far as it is known from its chunks: the receiver over several queue pairs gets it share by share.
    known: u64,
    /// Waits for a socket that no piece has yet: offset and path of the chunk, nanoseconds.
    waits: Vec<(u64, u16, u64)>,
}

// SAFETY: the raw pointers are NCCL's and the profiler's handles. They are only passed back, by NCCL's thread under the
// rules that the callers of `Events` promise; here they are only numbers.
unsafe impl Send for Transfer {}

impl Transfer {
    /// A new transfer reuses the memory of a previous one.
    pub(super) fn begin(&mut self, handle: NonNull<c_void>, send: bool, posted: Option<Ticks>) {
        (self.handle, self.send, self.posted) = (Some(handle), send, posted);
        (self.ready, self.left, self.known) = (None, None, 0);
        self.pieces.clear();
        self.waits.clear();
    }

    /// Applies a thread's note about the transfer.
    pub(super) fn take(&mut self, note: &Note) {
        let Note { kind, chunk, began, now, .. } = note;
        match kind {
            Kind::Ready => self.ready = self.ready.or(Some(*now)),
            Kind::Begins => self.chunk_begins(chunk, *began),
            Kind::Ends => self.chunk_ends(chunk, *now),
            Kind::Over => {
                self.chunk_begins(chunk, *began);
                self.chunk_ends(chunk, *now);
            }
            Kind::Waited if self.waits.len() < ROOM => {
                self.waits.push((chunk.offset, chunk.path, now.nanoseconds_since(*began)));
            }
            Kind::Waited => {}
        }
    }

    /// A chunk is handed to the network, or its first byte has arrived. A resent chunk makes a piece of its own, and
    /// counts in the piece that it repeats.
    fn chunk_begins(&mut self, chunk: &Chunk, began: Ticks) {
        self.left = Some(self.left.map_or(began, |first| first.min(began)));
        let (known, is_receive) = (self.pieces.iter().position(|piece| piece.covers(chunk.offset)), !self.send);
        let piece = match known {
            Some(index) => Some(&mut self.pieces[index]),
            None => self.add_first(Chunk { again: false, ..*chunk }, began),
        };
        if let Some(piece) = piece {
            // A receiver does not know that a chunk is resent, but sees that it begins a second time. In the piece that
            // stands for the rest, chunks follow one after another.
            let is_second = known.is_some() && is_receive && !piece.rest && piece.ended.is_none();
            if is_second {
                (piece.chunk.path, piece.chunk.wr_id, piece.began) = (chunk.path, chunk.wr_id, began);
            }
            piece.retransmissions += u32::from(is_second || chunk.again);
        }
        let resends = self.pieces.iter().filter(|piece| piece.chunk.again).count();
        if chunk.again && self.details && resends < MOST {
            self.pieces.push(Piece::new(*chunk, began));
        }
    }

    /// Adds the piece for a chunk that has none, unless the maximum is reached.
    fn add_first(&mut self, chunk: Chunk, began: Ticks) -> Option<&mut Piece> {
        let begun = self.pieces.iter().filter(|piece| !piece.chunk.again).count();
        if begun == MOST {
            return None;
        }
        self.known = self.known.max(chunk.total);
        let left = self.known.saturating_sub(self.covered());
        let mut piece = Piece::new(chunk, began);
        piece.rest = begun + 1 == MOST && chunk.length < left;
        piece.chunk.length = if piece.rest { left } else { chunk.length.min(left) };
        self.pieces.push(piece);
        self.pieces.last_mut()
    }

    /// Bytes of first transmissions that the pieces stand for.
    fn covered(&self) -> u64 {
        self.pieces.iter().filter(|piece| !piece.chunk.again).map(|piece| piece.chunk.length).sum()
    }

    /// The chunk with this offset has arrived; without an offset, the one on this path, the only one of the transfer
    /// there.
    fn chunk_ends(&mut self, chunk: &Chunk, now: Ticks) {
        for piece in self.pieces.iter_mut().filter(|piece| piece.ended.is_none() && !piece.rest) {
            let Chunk { offset, path, .. } = piece.chunk;
            if if chunk.offset == SOMEWHERE { path == chunk.path } else { offset == chunk.offset } {
                piece.ended = Some(now);
            }
        }
    }

    /// The transfer has ended, with `size` bytes: the pieces end, and the bytes that no path reported become one.
    pub(super) fn end(&mut self, size: u64, now: Ticks) {
        let covered = self.covered();
        if covered < size || self.pieces.is_empty() {
            let like =
                self.pieces.iter().rfind(|piece| !piece.chunk.again).map_or(Chunk::default(), |piece| piece.chunk);
            // Pieces begin in any order; the offset of this one is known only when it is the whole transfer.
            let chunk = Chunk { offset: covered, length: size - covered, total: size, ..like };
            // If there are other pieces, this one may stand for several chunks.
            self.pieces.push(Piece { rest: covered > 0, ..Piece::new(chunk, now) });
        }
        self.end_pieces(now);
        // A piece that stands for several chunks gets the remaining waits.
        for stands_for_several in [false, true] {
            for index in 0..self.pieces.len() {
                let Piece { rest, chunk, .. } = &self.pieces[index];
                if (*rest || chunk.joined) == stands_for_several {
                    self.add_waits(index);
                }
            }
        }
    }

    /// The transfer has failed: the pieces whose start was reported end.
    pub(super) fn fail(&mut self, now: Ticks) {
        self.pieces.retain(|piece| matches!(piece.reported, Reported::Start(_)));
        self.end_pieces(now);
    }

    fn end_pieces(&mut self, now: Ticks) {
        for piece in &mut self.pieces {
            piece.ended.get_or_insert(now);
        }
    }

    /// A piece that has ended gets its waits. The first piece also gets those of the whole transfer.
    pub(super) fn add_waits(&mut self, index: usize) {
        let Piece { rest, chunk, waits, .. } = &mut self.pieces[index];
        self.waits.retain(|&(offset, path, ns)| {
            let is_its = *rest || chunk.joined || (offset, path) == (chunk.offset, chunk.path);
            waits.socket += if is_its { ns } else { 0 };
            !is_its
        });
        if let (0, Some(posted), Some(left)) = (index, self.posted, self.left) {
            let ready = self.ready.unwrap_or(posted);
            (waits.receiver, waits.credit) = (ready.nanoseconds_since(posted), left.nanoseconds_since(ready));
        }
    }
}

#[cfg(test)]
mod tests;
