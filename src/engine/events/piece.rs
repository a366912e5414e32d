//! The pieces of a transfer, as they are reported.

use std::ffi::c_void;

use crate::nccl::net_event::SOMEWHERE;
use crate::os::ticks::Ticks;

/// The most pieces of a transfer that are reported, and the most resends beside them. NCCL's example profiler has room
/// for eight pieces, and does not check.
pub(crate) const MOST: usize = 8;

/// A chunk that a backend hands to the network, or a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Chunk {
    /// Where it begins in the message, in bytes; [`SOMEWHERE`] if that is not known.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Which of the connection's paths takes it ([`super::Events::set_path`]).
    pub path: u16,
    /// The message's number on its connection.
    pub message: u64,
    /// The message's size in bytes, as far as it is known.
    pub total: u64,
    /// It was sent before.
    pub again: bool,
    /// It stands for several chunks on one rail, which need not be adjacent. The offset is the lowest, and the path is
    /// that of one of them ([`super::Events::joins`]).
    pub joined: bool,
    /// Verbs: the work request.
    pub wr_id: u64,
}

impl Chunk {
    /// A whole message of `length` bytes, on the first path.
    pub fn whole(length: u64, message: u64) -> Self {
        Self { length, total: length, message, ..Self::default() }
    }
}

/// How long a piece waited, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waits {
    /// For the receiver's buffer.
    pub receiver: u64,
    /// For room in a socket.
    pub socket: u64,
    /// For credit, or a stream whose window is not full.
    pub credit: u64,
}

/// One piece of a transfer, as it is reported.
#[derive(Debug, Clone)]
pub struct Piece {
    /// The data it carries; the length is that of the piece, which may stand for several chunks.
    pub chunk: Chunk,
    /// It stands for all bytes that were left when it began.
    pub rest: bool,
    /// How often its chunks were resent.
    pub retransmissions: u32,
    /// Its waits; known when it has ended.
    pub waits: Waits,
    /// When it was handed to the network; on the receiving side, when its first byte arrived.
    pub began: Ticks,
    /// When it was acknowledged; on the receiving side, when its last byte arrived.
    pub ended: Option<Ticks>,
    pub(super) reported: Reported,
}

/// What has been reported to the profiler about a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reported {
    Nothing,
    /// Its start, with the handle that the profiler returned.
    Start(*mut c_void),
    /// Everything, or the profiler declined its start.
    All,
}

impl Piece {
    pub(super) fn new(chunk: Chunk, began: Ticks) -> Self {
        let (rest, retransmissions, waits) = (false, 0, Waits::default());
        Self { chunk, rest, retransmissions, waits, began, ended: None, reported: Reported::Nothing }
    }

    /// From its beginning to its end, in nanoseconds; 0 while it has not ended.
    pub(crate) fn wire_ns(&self) -> u64 {
        self.ended.map_or(0, |ended| ended.nanoseconds_since(self.began))
    }

    /// Whether a chunk that begins at `offset` is this piece, or part of it. False for chunks whose place is not known.
    pub(super) fn covers(&self, offset: u64) -> bool {
        !self.chunk.again && (self.rest || self.chunk.offset == offset && offset != SOMEWHERE)
    }
}
