//! The bookkeeping of one transfer: its pieces, in a few preallocated places.
//!
//! The rule about lengths: whatever happens on the wire, the reported pieces add up to the transfer's size to the byte,
//! and there are at most [`MOST`] of them. So the last place stands for all that is left when it begins, and when the
//! transfer ends, the bytes that no path reported make one more piece. Resent bytes are counted separately.
//!
//! Pure bookkeeping: no clock, no callback.

use std::ffi::c_void;

use crate::nccl::net_event::SOMEWHERE;
use crate::os::ticks::Ticks;

/// The most pieces that are reported of one transfer: NCCL's example profiler has room for that many, and does not
/// check.
pub const MOST: usize = 8;

/// The most resends that are reported of one transfer; further ones are only counted.
pub const MOST_RESENDS: usize = 8;

/// The notes that a list holds. When NCCL's thread does not read them for so long that the list is full, further ones
/// are dropped: their bytes are part of the piece for the rest at the transfer's end.
pub(super) const ROOM: usize = 64;

/// A chunk as a backend hands it to the network, or a work request.
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
    /// The message's size in bytes.
    pub total: u64,
    /// It was sent before.
    pub again: bool,
    /// It stands for several chunks on one rail, which need not be adjacent: the offset is the lowest, the path is one
    /// of theirs ([`super::Events::joins`]).
    pub joined: bool,
    /// Verbs: the work request.
    pub wr_id: u64,
}

impl Chunk {
    /// All of a message of `length` bytes, on the first path.
    pub fn whole(length: u64, message: u64) -> Self {
        Self { length, total: length, message, ..Self::default() }
    }
}

/// One piece of a transfer, as it is reported.
#[derive(Debug, Clone)]
pub struct Piece {
    /// The data it carries; the length is that of the piece, which may stand for several chunks.
    pub chunk: Chunk,
    /// It stands for everything that was left when it began.
    pub rest: bool,
    /// How often chunks of it were resent.
    pub retransmissions: u32,
    /// How long it waited for the receiver's buffer, for room in a socket, and for credit, in nanoseconds.
    pub waits: [u64; 3],
    /// From handing it to the network to its acknowledgement (on the receiving side: from its first byte to its last),
    /// in nanoseconds; 0 while unknown.
    pub wire: u64,
    began: Option<Ticks>,
    ended: bool,
}

/// A completed chunk that was sent once: the usual case. A transfer that has only such chunks, at most [`MOST`], is
/// reported chunk by chunk; of any other, pieces are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Over {
    /// The chunk.
    pub chunk: Chunk,
    /// When it began.
    pub began: Ticks,
    /// When it arrived or was acknowledged.
    pub arrived: Ticks,
    /// What it waited for, as in [`Piece::waits`].
    pub waits: [u64; 3],
}

impl Over {
    /// As [`Piece::wire`].
    pub fn wire(&self) -> u64 {
        self.arrived.nanoseconds_since(self.began)
    }

    /// The same for a chunk that is all of a transfer that was `posted` then and has no other note: the result of
    /// [`Transfer::begin`] and [`Transfer::end`].
    pub(super) fn alone(mut self, send: bool, posted: Option<Ticks>) -> Self {
        if let Some(posted) = posted.filter(|_| send) {
            self.waits[Wait::Credit as usize] = self.began.nanoseconds_since(posted);
        }
        self
    }

    /// The piece that it makes.
    pub(super) fn piece(&self) -> Piece {
        let mut piece = Piece::new(self.chunk, Some(self.began));
        piece.waits = self.waits;
        piece.end(Some(self.arrived));
        piece
    }
}

/// What the profiler knows of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    Nothing,
    /// With the handle that it returned.
    Started(*mut c_void),
    All,
}

/// What a piece waited for: a place in [`Piece::waits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The receiver's buffer.
    Receiver = 0,
    /// Room in a socket or a send queue.
    Socket = 1,
    /// Credit, or a stream whose window is not full.
    Credit = 2,
}

impl Wait {
    /// All of them.
    pub const ALL: [Wait; 3] = [Wait::Receiver, Wait::Socket, Wait::Credit];
}

/// The events of a transfer: each is a function of [`Transfer`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum What {
    /// The receiver's buffer is there.
    Ready,
    /// A chunk is being handed to the network, or its first byte has come.
    Begins(Chunk),
    /// The chunk at this offset has arrived.
    Ends(u64),
    /// A chunk without an earlier note, which began then, has arrived.
    Over(Chunk, Ticks),
    /// The chunk on this path has arrived.
    PathEnds(u16),
    /// A chunk that makes no piece has arrived.
    Passed {
        /// Its path.
        path: u16,
        /// Its work request.
        wr_id: u64,
    },
    /// The chunk at `offset` has waited.
    Waited {
        /// Where it begins in its message.
        offset: u64,
        /// For what.
        wait: Wait,
        /// How long.
        ns: u64,
    },
    /// All chunks have arrived.
    AllArrived,
}

/// One transfer.
#[derive(Debug, Default)]
pub struct Transfer {
    pieces: Vec<(Piece, Told)>,
    /// Chunks of which no piece has been made: there are no pieces then.
    over: Vec<Over>,
    /// They are everything to report, for the transfer has ended.
    is_whole: bool,
    send: bool,
    /// Bytes of first transmissions that the pieces stand for.
    covered: u64,
    /// Its size as far as it is known from its chunks: the receiver over several queue pairs gets it share by share,
    /// and notes of several paths come in any order.
    known: u64,
    /// The path and the work request of the latest chunk that made no piece.
    passed: Option<(u16, u64)>,
    /// Waits of chunks of which nothing else is known yet: offset, cause, nanoseconds.
    early: Vec<(u64, Wait, u64)>,
    /// When the request was made, and when it began to wait for the network only; kept when times are wanted.
    posted: Option<Ticks>,
    ready: Option<Ticks>,
    /// When the first of the completed chunks left.
    left: Option<Ticks>,
}

impl Transfer {
    /// A new transfer reuses the places of a previous one.
    pub fn begin(&mut self, send: bool, now: Option<Ticks>) {
        self.send = send;
        self.pieces.clear();
        // Once per place: no thread that moves data allocates here.
        self.pieces.reserve_exact(MOST + MOST_RESENDS + 1);
        self.forget();
        self.over.reserve_exact(MOST);
        self.early.clear();
        // A receive that waits for its message waits for the sender, whose reasons are not known here.
        (self.covered, self.known) = (0, 0);
        (self.passed, self.posted, self.ready, self.left) = (None, now.filter(|_| send), None, None);
    }

    /// What was noted of it, when times are wanted at `now`. With `details`, resends make pieces.
    pub(super) fn take_note(&mut self, what: &What, now: Option<Ticks>, details: bool) {
        if self.keep(what, now) {
            return;
        }
        self.make_pieces();
        match what {
            What::Ready => self.ready(now),
            What::Begins(chunk) => self.chunk_begins(chunk, now, details),
            What::Ends(offset) => self.chunk_ends(*offset, now),
            What::Over(chunk, began) => self.chunk_over(chunk, *began, now),
            What::PathEnds(path) => self.path_ends(*path, now),
            What::Passed { path, wr_id } => self.chunk_passed(*path, *wr_id),
            What::Waited { offset, wait, ns } => self.chunk_waited(*offset, *wait, *ns),
            What::AllArrived => self.all_arrived(now),
        }
    }

    /// Keeps a note that makes no piece. Such notes of several paths may be taken first, as long as there is none of
    /// another kind.
    #[inline]
    pub(super) fn keep(&mut self, what: &What, now: Option<Ticks>) -> bool {
        match (what, now) {
            (What::Over(chunk, began), Some(arrived)) if !chunk.again => {
                return self.keep_over(Over { chunk: *chunk, began: *began, arrived, waits: [0; 3] });
            }
            (What::Ready, _) => self.ready(now),
            (What::Waited { offset, wait, ns }, _) if self.pieces.is_empty() => self.chunk_waited(*offset, *wait, *ns),
            _ => return false,
        }
        true
    }

    /// As [`Transfer::keep`], for the end of a chunk that was sent once.
    #[inline]
    pub(super) fn keep_over(&mut self, mut over: Over) -> bool {
        let is_kept = self.pieces.is_empty() && self.over.len() < MOST;
        if is_kept {
            if !self.early.is_empty() {
                over.waits = self.take_early(&over.chunk);
            }
            self.over.push(over);
        }
        is_kept
    }

    /// Makes pieces of the chunks that were only kept.
    pub(super) fn make_pieces(&mut self) {
        for place in 0..self.over.len() {
            let Over { chunk, began, arrived, waits } = self.over[place];
            let waits = Wait::ALL.into_iter().zip(waits).filter(|(_, ns)| *ns > 0);
            self.early.extend(waits.map(|(wait, ns)| (chunk.offset, wait, ns)));
            self.chunk_over(&chunk, began, Some(arrived));
        }
        self.forget();
    }

    /// The chunks of a transfer that has ended, if they are everything to report, with the transfer's own waits in the
    /// first.
    pub(super) fn whole(&self) -> Option<&[Over]> {
        self.is_whole.then_some(&self.over)
    }

    /// The chunks have been reported, or must not be.
    pub(super) fn forget(&mut self) {
        self.over.clear();
        self.is_whole = false;
    }

    /// Its receive is posted, or its credit has arrived: from here on it waits for the network only.
    pub fn ready(&mut self, now: Option<Ticks>) {
        self.ready = self.ready.or(now);
    }

    /// A chunk is being handed to the network, or its first byte has arrived. With `resends`, a resent chunk makes a
    /// piece of its own.
    pub fn chunk_begins(&mut self, chunk: &Chunk, now: Option<Ticks>, resends: bool) {
        let (posted, ready) = (self.posted, self.ready);
        let waits = self.take_early(chunk);
        let known = self.pieces.iter_mut().map(|(piece, _)| piece).enumerate();
        if let Some((index, piece)) = known.into_iter().find(|(_, piece)| !piece.ended && piece.covers(chunk.offset)) {
            piece.add_waits(waits);
            // In the piece that stands for the rest, chunks follow one after another. A receiver does not know that a
            // chunk is resent, but sees that it begins a second time.
            if chunk.again || !self.send && !piece.rest {
                piece.retransmissions += 1;
            }
            if !chunk.again && !piece.rest {
                (piece.chunk.path, piece.chunk.wr_id, piece.began) = (chunk.path, chunk.wr_id, now);
                if index == 0 {
                    piece.waited(posted, ready, now);
                }
            }
            let resent = self.pieces.iter().filter(|(piece, _)| piece.chunk.again).count();
            if chunk.again && resends && resent < MOST_RESENDS {
                self.push(Piece::new(*chunk, now));
            }
            return;
        }
        let begun = self.pieces.iter().filter(|(piece, _)| !piece.chunk.again).count();
        if chunk.again || begun == MOST {
            return;
        }
        self.known = self.known.max(chunk.total);
        let left = self.known.saturating_sub(self.covered);
        let mut piece = Piece::new(*chunk, now);
        if begun + 1 == MOST && chunk.length < left {
            (piece.rest, piece.chunk.length) = (true, left);
        }
        piece.chunk.length = piece.chunk.length.min(left);
        self.covered += piece.chunk.length;
        if begun == 0 {
            piece.waited(posted, ready, now);
        }
        piece.add_waits(waits);
        self.push(piece);
    }

    /// A chunk has arrived whose length is not known, or which exceeds the number of pieces: it becomes part of the
    /// rest at the end.
    pub fn chunk_passed(&mut self, path: u16, wr_id: u64) {
        self.passed = Some((path, wr_id));
    }

    /// The chunk at `offset` waited `ns` nanoseconds.
    pub fn chunk_waited(&mut self, offset: u64, wait: Wait, ns: u64) {
        let open = self.pieces.iter_mut().map(|(piece, _)| piece).filter(|piece| !piece.ended && piece.covers(offset));
        // Its own piece, the latest if it was resent; only a chunk without a piece is in the rest.
        match open.max_by_key(|piece| !piece.rest) {
            Some(piece) => piece.waits[wait as usize] += ns,
            None if self.early.len() < ROOM => self.early.push((offset, wait, ns)),
            None => {}
        }
    }

    /// The waits that were noted of a chunk before it was known; for a note that stands for several chunks, those of
    /// any.
    fn take_early(&mut self, chunk: &Chunk) -> [u64; 3] {
        let mut waits = [0; 3];
        self.early.retain(|&(of, wait, ns)| {
            let is_of_it = chunk.joined || of == chunk.offset;
            if is_of_it {
                waits[wait as usize] += ns;
            }
            !is_of_it
        });
        waits
    }

    /// A chunk that began at `began` has arrived, and nothing was noted of it before unless it was resent.
    pub fn chunk_over(&mut self, chunk: &Chunk, began: Ticks, now: Option<Ticks>) {
        let known = |(piece, _): &(Piece, Told)| !piece.ended && !piece.rest && piece.chunk.offset == chunk.offset;
        if !self.pieces.iter().any(known) {
            self.chunk_begins(chunk, Some(began), false);
            self.left_at(began);
        }
        self.chunk_ends(chunk.offset, now);
    }

    /// A chunk left then: if none left before, that ended the transfer's own waiting.
    fn left_at(&mut self, began: Ticks) {
        if self.left.is_some_and(|first| first <= began) {
            return;
        }
        self.left = Some(began);
        if let Some((piece, Told::Nothing)) = self.pieces.first_mut() {
            piece.waited(self.posted, self.ready, self.left);
        }
    }

    /// The chunk at `offset` has arrived.
    pub fn chunk_ends(&mut self, offset: u64, now: Option<Ticks>) {
        for (piece, _) in self.pieces.iter_mut().filter(|(piece, _)| !piece.rest && piece.chunk.offset == offset) {
            piece.end(now);
        }
    }

    /// The chunk on path `path` has arrived, the only one of the transfer there.
    pub fn path_ends(&mut self, path: u16, now: Option<Ticks>) {
        for (piece, _) in self.pieces.iter_mut().filter(|(piece, _)| !piece.rest && piece.chunk.path == path) {
            piece.end(now);
        }
    }

    /// All chunks that were begun have arrived.
    pub fn all_arrived(&mut self, now: Option<Ticks>) {
        for (piece, _) in &mut self.pieces {
            piece.end(now);
        }
    }

    /// The transfer has ended, with `size` bytes: the pieces end, and the bytes that no path reported become one.
    pub fn end(&mut self, size: u64, now: Option<Ticks>) {
        if !self.over.is_empty() {
            if self.over.iter().map(|over| over.chunk.length).sum::<u64>() == size {
                let left = self.over.iter().map(|over| over.began).min();
                if let (Some(posted), Some(left)) = (self.posted, left) {
                    let ready = self.ready.unwrap_or(posted);
                    self.over[0].waits[Wait::Receiver as usize] = ready.nanoseconds_since(posted);
                    self.over[0].waits[Wait::Credit as usize] = left.nanoseconds_since(ready);
                }
                self.is_whole = true;
                return;
            }
            self.make_pieces();
        }
        let left = size.saturating_sub(self.covered);
        if left > 0 || self.pieces.is_empty() {
            // Pieces begin in any order; where this one lies is known only when it is the whole.
            let mut like =
                self.pieces.last().map_or(Chunk::default(), |(piece, _)| Chunk { again: false, ..piece.chunk });
            (like.path, like.wr_id) = self.passed.unwrap_or((like.path, like.wr_id));
            let mut piece = Piece::new(Chunk { offset: self.covered, length: left, total: size, ..like }, now);
            // Beside others, it may stand for several.
            piece.rest = self.covered > 0;
            self.push(piece);
            self.covered = size;
        }
        self.all_arrived(now);
    }

    /// The transfer has failed: the reported pieces end.
    pub fn fail(&mut self) {
        self.forget();
        self.pieces.retain(|(_, told)| matches!(told, Told::Started(_)));
        for (piece, _) in &mut self.pieces {
            piece.end(None);
        }
    }

    fn push(&mut self, piece: Piece) {
        self.pieces.push((piece, Told::Nothing));
    }

    /// The pieces, and how far each has been reported.
    pub(super) fn pieces(&mut self) -> impl Iterator<Item = (&Piece, &mut Told)> {
        self.pieces.iter_mut().map(|(piece, told)| (&*piece, told))
    }
}

impl Piece {
    fn new(chunk: Chunk, began: Option<Ticks>) -> Self {
        Self { chunk, rest: false, retransmissions: 0, waits: [0; 3], wire: 0, began, ended: false }
    }

    /// Whether it has ended.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// How long before `now` it began, in nanoseconds; 0 when the time was not noted.
    pub(super) fn begun_before(&self, now: Ticks) -> u64 {
        self.began.map_or(0, |began| now.nanoseconds_since(began))
    }

    /// How long before `now` it ended.
    pub(super) fn ended_before(&self, now: Ticks) -> u64 {
        self.begun_before(now).saturating_sub(self.wire)
    }

    /// It is the first of the transfer to leave: the time between the request and this was waiting.
    fn waited(&mut self, posted: Option<Ticks>, ready: Option<Ticks>, now: Option<Ticks>) {
        if let (Some(posted), Some(now)) = (posted, now) {
            let ready = ready.unwrap_or(posted);
            self.waits[Wait::Receiver as usize] = ready.nanoseconds_since(posted);
            self.waits[Wait::Credit as usize] = now.nanoseconds_since(ready);
        }
    }

    fn add_waits(&mut self, waits: [u64; 3]) {
        for (wait, more) in self.waits.iter_mut().zip(waits) {
            *wait += more;
        }
    }

    /// Whether a chunk that begins there is this piece, or part of it. False for chunks whose place is not known.
    fn covers(&self, offset: u64) -> bool {
        self.rest || self.chunk.offset == offset && offset != SOMEWHERE
    }

    fn end(&mut self, now: Option<Ticks>) {
        if let (false, Some(began), Some(now)) = (self.ended, self.began, now) {
            self.wire = now.nanoseconds_since(began);
        }
        self.ended = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lengths(transfer: &mut Transfer) -> Vec<u64> {
        transfer.pieces().map(|(p, _)| p.chunk).filter(|chunk| !chunk.again).map(|chunk| chunk.length).collect()
    }

    proptest! {
        #[test]
        fn pieces_add_up_to_the_size_whatever_was_seen_of_them(
            chunks in prop::collection::vec((1u64..1_000, 0u8..4), 0..40),
            shuffle in any::<u64>(),
        ) {
            // Cut a message, and report its chunks in some order: not at all, begun only, begun and ended, begun twice.
            let mut at = 0;
            let total: u64 = chunks.iter().map(|(length, _)| length).sum();
            let mut seen: Vec<_> = chunks
                .iter()
                .map(|&(length, how)| {
                    at += length;
                    (Chunk { offset: at - length, length, total, ..Chunk::default() }, how)
                })
                .collect();
            seen.sort_by_key(|(chunk, _)| (chunk.offset ^ shuffle).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut transfer = Transfer::default();
            transfer.begin(true, None);
            for (chunk, how) in seen {
                for again in 0..how {
                    transfer.chunk_begins(&Chunk { again: again == 2, ..chunk }, None, shuffle % 2 == 0);
                }
                if how == 2 {
                    transfer.chunk_ends(chunk.offset, None);
                }
            }
            transfer.end(total, None);
            let lengths = lengths(&mut transfer);
            prop_assert!((1..=MOST).contains(&lengths.len()), "{lengths:?}");
            prop_assert_eq!(lengths.iter().sum::<u64>(), total);
            prop_assert!(lengths.iter().all(|length| *length > 0 || total == 0));
            prop_assert!(transfer.pieces().all(|(piece, _)| piece.is_ended()));
            prop_assert!(transfer.pieces().count() <= MOST + MOST_RESENDS);
        }
    }

    /// Everything that is reported of a piece.
    fn all_of(piece: &Piece) -> (Chunk, bool, u32, [u64; 3], u64, Option<Ticks>, bool) {
        let Piece { chunk, rest, retransmissions, waits, wire, began, ended } = *piece;
        (chunk, rest, retransmissions, waits, wire, began, ended)
    }

    proptest! {
        #[test]
        fn chunks_that_are_kept_are_told_as_the_pieces_that_they_would_have_made(
            lengths in prop::collection::vec(1u64..1_000, 1..11),
            (shuffle, ready, send) in (any::<u64>(), 0u64..40, any::<bool>()),
            waits in prop::collection::vec((0usize..11, 0usize..3, 1u64..100), 0..4),
            missing in 0u64..3,
            again in prop::option::weighted(0.2, 0usize..11),
        ) {
            let moment = |number: u64| Ticks::from_number(1_000_000 + number * 10_000).expect("not 0");
            let total = lengths.iter().sum::<u64>() + missing;
            let mut at = 0;
            let mut chunks: Vec<_> = lengths.iter().map(|&length| {
                at += length;
                Chunk { offset: at - length, length, total, path: (at % 3) as u16, message: 9, wr_id: at, ..Chunk::default() }
            }).collect();
            chunks.sort_by_key(|chunk| (chunk.offset ^ shuffle).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut notes = vec![(What::Ready, moment(ready))];
            for (place, wait, ns) in waits {
                let offset = chunks[place % chunks.len()].offset;
                notes.push((What::Waited { offset, wait: Wait::ALL[wait], ns }, moment(41)));
            }
            for (place, chunk) in chunks.iter().enumerate() {
                if again == Some(place) {
                    notes.push((What::Begins(Chunk { again: true, ..*chunk }), moment(43)));
                }
                let began = moment(30 + (shuffle >> place) % 12);
                notes.push((What::Over(*chunk, began), moment(45 + place as u64)));
            }
            let (mut kept, mut made) = (Transfer::default(), Transfer::default());
            for transfer in [&mut kept, &mut made] {
                transfer.begin(send, Some(moment(0)));
            }
            for (what, now) in &notes {
                kept.take_note(what, Some(*now), true);
                made.take_note(what, Some(*now), true);
                made.make_pieces();
            }
            for transfer in [&mut kept, &mut made] {
                transfer.end(total, Some(moment(99)));
            }
            let fits = missing == 0 && chunks.len() <= MOST;
            prop_assert!(kept.whole().is_none() || fits);
            prop_assert!(kept.whole().is_some() || !fits || again.is_some());
            let told = |transfer: &mut Transfer| match transfer.whole() {
                Some(chunks) => chunks.iter().map(|over| all_of(&over.piece())).collect::<Vec<_>>(),
                None => transfer.pieces().map(|(piece, _)| all_of(piece)).collect(),
            };
            prop_assert_eq!(told(&mut kept), told(&mut made));
        }
    }

    #[test]
    fn the_only_chunk_of_a_transfer_is_told_alone_as_the_transfer_would_tell_it() {
        let at = |number| Ticks::from_number(number).expect("not 0");
        for (send, posted, length) in
            [(true, Some(10_000), 7), (true, None, 7), (false, Some(10_000), 7), (true, Some(90_000), 0)]
        {
            let posted = posted.map(at);
            let chunk =
                Chunk { offset: 0, length, path: 2, message: 3, total: length, joined: true, ..Chunk::default() };
            let over = Over { chunk, began: at(50_000), arrived: at(70_000), waits: [0; 3] };
            let mut transfer = Transfer::default();
            transfer.begin(send, posted);
            assert!(transfer.keep_over(over));
            transfer.end(length, Some(at(80_000)));
            assert_eq!(transfer.whole(), Some(&[over.alone(send, posted)][..]));
        }
    }

    #[test]
    fn the_eighth_piece_stands_for_the_rest_and_ends_with_the_transfer() {
        let mut transfer = Transfer::default();
        transfer.begin(true, None);
        for offset in 0..20 {
            transfer.chunk_begins(&Chunk { offset, length: 1, total: 20, ..Chunk::default() }, None, true);
            transfer.chunk_ends(offset, None);
        }
        assert_eq!(lengths(&mut transfer), [1, 1, 1, 1, 1, 1, 1, 13]);
        assert_eq!(transfer.pieces().filter(|(piece, _)| piece.is_ended()).count(), 7);
        transfer.end(20, None);
        assert!(transfer.pieces().all(|(piece, _)| piece.is_ended()));
    }

    #[test]
    fn a_chunk_ends_by_its_path_and_leaves_the_others_and_the_rest() {
        let mut transfer = Transfer::default();
        transfer.begin(true, None);
        for path in 0..10 {
            let chunk = Chunk { offset: u64::from(path), length: 1, total: 10, path, ..Chunk::default() };
            transfer.chunk_begins(&chunk, None, true);
        }
        // The eighth took path 7, and stands for 8 and 9 as well.
        for path in [3, 7, 9] {
            transfer.path_ends(path, None);
        }
        let ended: Vec<_> =
            transfer.pieces().filter(|(piece, _)| piece.ended).map(|(piece, _)| piece.chunk.path).collect();
        assert_eq!(ended, [3]);
    }

    #[test]
    fn what_made_no_piece_is_told_at_the_end_with_its_own_work_request() {
        let mut transfer = Transfer::default();
        transfer.begin(false, None);
        for path in 0..7 {
            let chunk = Chunk { offset: path.into(), length: 10, total: 100, path, wr_id: 50, ..Chunk::default() };
            transfer.chunk_begins(&chunk, None, true);
        }
        for path in 7..10 {
            transfer.chunk_passed(path, 60 + u64::from(path));
        }
        transfer.end(100, None);
        let told: Vec<_> = transfer
            .pieces()
            .map(|(piece, _)| (piece.chunk.length, piece.chunk.path, piece.chunk.wr_id, piece.rest))
            .collect();
        assert_eq!((told.len(), told[6], told[7]), (8, (10, 6, 50, false), (30, 9, 69, true)));
        // Nothing of it lasts into the next transfer.
        transfer.begin(false, None);
        transfer.end(5, None);
        let (piece, _) = transfer.pieces().next().expect("a piece");
        assert_eq!((piece.chunk.path, piece.chunk.wr_id, piece.rest), (0, 0, false));
    }

    #[test]
    fn what_is_told_of_chunks_when_they_are_over_is_the_same_as_piece_by_piece() {
        let moment = |number: u64| Ticks::from_number(1_000_000 + number * 10_000).expect("not 0");
        let chunk = |at: u64| Chunk { offset: at, length: 1, total: 20, path: at as u16 % 4, ..Chunk::default() };
        let (mut early, mut late) = (Transfer::default(), Transfer::default());
        for transfer in [&mut early, &mut late] {
            transfer.begin(true, Some(moment(0)));
            transfer.ready(Some(moment(3)));
        }
        for at in 0..20 {
            early.chunk_begins(&chunk(at), Some(moment(5 + at)), true);
        }
        for at in 0..20 {
            for transfer in [&mut early, &mut late] {
                transfer.chunk_waited(at, Wait::Socket, 100 + at);
            }
        }
        for at in 0..20 {
            early.chunk_ends(at, Some(moment(100 + at)));
        }
        // The first to leave is not the first that is acknowledged, and others that leave later are acknowledged after it.
        for at in [3, 0, 2, 1].into_iter().chain(4..20) {
            late.chunk_over(&chunk(at), moment(5 + at), Some(moment(100 + at)));
        }
        for transfer in [&mut early, &mut late] {
            transfer.end(20, Some(moment(200)));
        }
        let told = |transfer: &mut Transfer| {
            let mut all: Vec<_> = transfer.pieces().map(|(piece, _)| piece.clone()).collect();
            all.sort_by_key(|piece| (piece.rest, piece.chunk.offset));
            all
        };
        let (early, late) = (told(&mut early), told(&mut late));
        let waits = |pieces: &[Piece]| {
            let sum = |wait: Wait| pieces.iter().map(|piece| piece.waits[wait as usize]).sum::<u64>();
            Wait::ALL.map(sum)
        };
        assert_eq!(waits(&early), waits(&late));
        assert_eq!((early.len(), late.len()), (MOST, MOST));
        assert_eq!(late.iter().map(|piece| piece.chunk.length).sum::<u64>(), 20);
        // But for the one that stands for the rest, chunk by chunk.
        for piece in late.iter().filter(|piece| !piece.rest) {
            let other = Piece::new(piece.chunk, Some(moment(5 + piece.chunk.offset)));
            let wire = moment(100).nanoseconds_since(moment(5));
            assert_eq!((piece.began, piece.wire, piece.ended), (other.began, wire, true));
            assert_eq!(piece.waits[Wait::Socket as usize], 100 + piece.chunk.offset);
        }
    }

    #[test]
    fn a_chunk_that_is_over_after_it_was_sent_again_ends_both() {
        let mut transfer = Transfer::default();
        transfer.begin(true, None);
        let chunk = Chunk { length: 10, total: 10, ..Chunk::default() };
        let began = Ticks::now();
        transfer.chunk_begins(&chunk, Some(began), true);
        transfer.chunk_begins(&Chunk { again: true, path: 3, ..chunk }, Some(Ticks::now()), true);
        transfer.chunk_over(&chunk, began, Some(Ticks::now()));
        let pieces: Vec<_> = transfer.pieces().map(|(p, _)| (p.chunk.again, p.retransmissions, p.ended)).collect();
        assert_eq!(pieces, [(false, 1, true), (true, 0, true)]);
        transfer.end(10, None);
        assert_eq!(lengths(&mut transfer), [10]);
    }

    #[test]
    fn shares_of_a_size_that_becomes_known_with_them_are_told_in_any_order() {
        // As a receiver over queue pairs gets them: each note with the size so far, not the offset.
        let share = |number: u64| Chunk {
            offset: SOMEWHERE,
            length: 10,
            total: 10 * (number + 1),
            path: number as u16,
            wr_id: 50 + number,
            ..Chunk::default()
        };
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let mut transfer = Transfer::default();
            transfer.begin(false, None);
            for number in order {
                transfer.chunk_begins(&share(number), None, false);
                transfer.path_ends(number as u16, None);
            }
            transfer.end(40, None);
            let told: Vec<_> = transfer.pieces().map(|(piece, _)| (piece.chunk.length, piece.chunk.wr_id)).collect();
            assert_eq!(told, order.map(|number| (10, 50 + number)));
        }
    }

    #[test]
    fn shares_of_which_the_place_is_not_known_are_never_the_same() {
        // NCCL's thread takes the first note of one out before the second is made, and finds that one later, behind those
        // of another path.
        let share = |path: u16| Chunk {
            offset: SOMEWHERE,
            length: 10,
            total: 10 + u64::from(path) * 10,
            path,
            ..Chunk::default()
        };
        let mut transfer = Transfer::default();
        transfer.begin(false, None);
        transfer.chunk_begins(&share(0), None, false);
        transfer.chunk_begins(&share(1), None, false);
        transfer.path_ends(0, None);
        transfer.path_ends(1, None);
        transfer.end(20, None);
        let told: Vec<_> = transfer.pieces().map(|(piece, _)| (piece.chunk.path, piece.retransmissions)).collect();
        assert_eq!(told, [(0, 0), (1, 0)]);
    }

    #[test]
    fn eight_chunks_need_no_piece_for_a_rest() {
        let mut transfer = Transfer::default();
        transfer.begin(true, None);
        for offset in 0..8 {
            transfer.chunk_begins(&Chunk { offset, length: 1, total: 8, ..Chunk::default() }, None, true);
            transfer.chunk_ends(offset, None);
        }
        assert!(transfer.pieces().all(|(piece, _)| piece.is_ended() && !piece.rest));
    }

    #[test]
    fn a_wait_is_told_of_the_chunks_own_piece_and_of_the_rest_only_without_one() {
        let mut transfer = Transfer::default();
        transfer.begin(true, None);
        let part = |offset| Chunk { offset, length: 1, total: 20, ..Chunk::default() };
        for offset in 0..20 {
            transfer.chunk_begins(&part(offset), None, true);
        }
        transfer.chunk_waited(2, Wait::Socket, 100);
        transfer.chunk_waited(7, Wait::Socket, 10);
        transfer.chunk_waited(15, Wait::Socket, 1);
        transfer.chunk_begins(&Chunk { again: true, ..part(3) }, None, true);
        transfer.chunk_waited(3, Wait::Socket, 1000);
        let waits: Vec<_> = transfer.pieces().map(|(piece, _)| piece.waits[Wait::Socket as usize]).collect();
        assert_eq!(waits, [0, 0, 100, 0, 0, 0, 0, 11, 1000]);
    }

    #[test]
    fn what_is_told_as_one_has_the_waits_of_all_its_chunks_also_beside_one_that_travelled_again() {
        let mut transfer = Transfer::default();
        let moment = |number: u64| Ticks::from_number(1_000_000 + number * 10_000).expect("not 0");
        transfer.begin(true, Some(moment(0)));
        [(0, 1), (10, 10), (20, 100)].into_iter().for_each(|(at, ns)| transfer.chunk_waited(at, Wait::Socket, ns));
        let lost = Chunk { offset: 20, length: 10, total: 30, ..Chunk::default() };
        transfer.chunk_begins(&lost, Some(moment(1)), true);
        transfer.chunk_begins(&Chunk { again: true, path: 3, ..lost }, Some(moment(2)), true);
        let others = Chunk { offset: 0, length: 20, joined: true, ..lost };
        transfer.take_note(&What::Over(others, moment(1)), Some(moment(3)), true);
        transfer.chunk_ends(20, Some(moment(4)));
        transfer.end(30, Some(moment(5)));
        let told: Vec<_> =
            transfer.pieces().map(|(p, _)| (p.chunk.again, p.chunk.length, p.waits[Wait::Socket as usize])).collect();
        assert_eq!(told, [(false, 10, 100), (true, 10, 0), (false, 20, 11)]);
    }

    #[test]
    fn a_resend_is_a_piece_of_its_own_and_counts_in_the_one_it_repeats() {
        let mut transfer = Transfer::default();
        transfer.begin(true, None);
        let chunk = Chunk { length: 10, total: 10, ..Chunk::default() };
        transfer.chunk_begins(&chunk, None, true);
        transfer.chunk_begins(&Chunk { again: true, path: 3, ..chunk }, None, true);
        transfer.chunk_ends(0, None);
        let pieces: Vec<_> =
            transfer.pieces().map(|(p, _)| (p.chunk.again, p.chunk.path, p.retransmissions, p.ended)).collect();
        assert_eq!(pieces, [(false, 0, 1, true), (true, 3, 0, true)]);
        assert_eq!(lengths(&mut transfer), [10]);
    }
}
