//! The receiver of the events, and the types that it receives.

use std::ffi::c_void;
use std::net::SocketAddr;

use super::piece::{Chunk, Piece};
use crate::nccl::net_event::Reader;

/// The receiver of the events: NCCL's profiler, behind `plugin::listener`.
pub trait Listener: Send + Sync {
    /// The profiler's needs; called once per transfer. All readers but [`Reader::None`] need resends and times. From
    /// [`Reader::Patient`] up a transfer is reported when it is over.
    fn reader(&self) -> Reader;

    /// A piece begins. Returns its handle, or null when the profiler declines.
    ///
    /// # Safety
    /// `transfer` is the handle that NCCL passed with a transfer whose end has not been reported, and the caller is
    /// inside a call from NCCL that concerns its connection.
    unsafe fn start(&self, transfer: *mut c_void, source: &Source<'_>, piece: &Piece) -> *mut c_void;

    /// The piece with this handle has ended.
    fn stop(&self, handle: *mut c_void, source: &Source<'_>, piece: &Piece);

    /// The summary of a transfer that is over: all its pieces, which have ended, for a patient listener. Returns
    /// whether the first one was taken.
    ///
    /// # Safety
    /// As [`Listener::start`].
    unsafe fn summary(&self, transfer: *mut c_void, source: &Source<'_>, pieces: &[Piece]) -> bool;
}

/// The common data of pieces that are reported together.
#[derive(Debug)]
pub struct Source<'a> {
    /// The connection's number, the same on both ends.
    pub link: u64,
    /// Whether this side sends.
    pub send: bool,
    /// Whether resends and times were to be reported when the transfer began.
    pub details: bool,
    /// All paths of the connection.
    pub paths: &'a [Path],
    /// How many paths were reconnected since this was last reported; 0 in a start.
    pub reconnects: u16,
}

impl<'a> Source<'a> {
    /// The path that the piece is on, or began on.
    pub(crate) fn path(&self, piece: &Piece) -> &'a Path {
        self.paths.get(usize::from(piece.chunk.path)).unwrap_or(&NO_PATH)
    }

    /// The rail of all bytes of the piece. None when there may be several: a piece that stands for the rest is reported
    /// before the paths of its chunks are known.
    pub(crate) fn rail(&self, piece: &Piece) -> Option<u16> {
        let rail = self.path(piece).rail;
        (!piece.rest || all_on(self.paths, rail)).then_some(rail)
    }

    /// The number of the path that takes all bytes of the piece. None when there may be several.
    pub(crate) fn stream(&self, piece: &Piece) -> Option<u16> {
        let Piece { chunk: Chunk { joined, path, .. }, rest, .. } = *piece;
        (!rest && !joined || self.paths.len() <= 1).then_some(path)
    }
}

/// A stream or queue pair, and its remote end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// The socket or queue pair.
    pub carrier: Carrier,
    /// Which of the device's interfaces or cards it uses.
    pub rail: u16,
    /// The other end, where it has an address.
    pub peer: Option<SocketAddr>,
}

/// The carrier of a path's bytes.
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

pub(super) const NO_PATH: Path = Path { carrier: Carrier::None, rail: 0, peer: None };

/// Whether all connected paths use this rail.
pub(super) fn all_on(paths: &[Path], rail: u16) -> bool {
    paths.iter().all(|path| path.carrier == Carrier::None || path.rail == rail)
}
