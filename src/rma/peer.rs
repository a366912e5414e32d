//! Another rank of a group: the messages under way to it, and those that arrive from it.
//!
//! It has no thread: the placer calls [`Peer::advance`] again and again. Whatever a header contains, bytes are placed
//! inside registrations only. Other bytes are dropped, and the rank that sent them gets a refusal.

use std::collections::{HashMap, VecDeque};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::gpu::Mark;
use super::landings::Landings;
use super::line::RecvEnd;
use super::outgoing::{Message, Outgoing};
use super::registry::{Registry, Spot};
use super::requests::Requests;
use super::signals::Signals;
use super::staging::Lane;
use super::wire::{HEADER, Header, Kind, PIECE, Signal, not_ours};
use crate::os::error::{Cause, Error, Result};

/// How many receives are posted at a time.
const POSTED: usize = 16;

/// How long a goodbye may be under way after its rank has closed the other connection.
pub(super) const GOODBYE: Duration = Duration::from_secs(1);

/// A range of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// The registration; 0 for none.
    pub region: u32,
    /// The offset of the range in the registration.
    pub offset: u64,
    /// How many bytes.
    pub size: u64,
}

/// A request of this rank that the other has not answered, or whose memory has not been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pending {
    read: bool,
    answered: bool,
    refused: bool,
    /// The place for the bytes of a get; None for a put.
    place: Option<Place>,
}

impl Pending {
    /// How the request ends, by the peer's answer.
    fn outcome(&self, rank: u32) -> Result<()> {
        if self.refused { Err(refusal(rank)) } else { Ok(()) }
    }
}

/// The action when all bytes that follow a header are in place.
#[derive(Debug, Clone, Copy)]
struct Finish {
    header: Header,
    refused: bool,
}

/// The bytes behind a header for which no receive is posted yet.
struct Pieces {
    /// The place for the bytes; None if they are dropped.
    to: Option<Spot>,
    left: usize,
    region: u32,
    finish: Finish,
}

enum Arriving {
    /// Boxed, because the connection writes it until its request is done.
    Header(Box<[u8; HEADER]>),
    Piece {
        size: usize,
        region: u32,
        /// The staging slot that receives it, and the place in a GPU's memory to which it is copied from there.
        copy: Option<(usize, Spot)>,
        finish: Option<Finish>,
    },
}

/// The data of the own rank that a peer needs.
pub(crate) struct Own<'a> {
    /// The own rank's registrations.
    pub registry: &'a Registry,
    /// The own rank's requests.
    pub requests: &'a Requests,
    /// The own rank's signals.
    pub signals: &'a mut Signals,
}

/// Another rank.
pub(crate) struct Peer {
    rank: u32,
    /// The peer's `host:process`.
    process: String,
    /// Closed before the headers are dropped, into which the connection may still write.
    recv: Box<dyn RecvEnd>,
    outgoing: Outgoing,
    /// Receives, the oldest first.
    posted: VecDeque<(usize, Arriving)>,
    pieces: Option<Pieces>,
    lane: Lane,
    /// Slots whose bytes are being copied into a GPU's memory, the oldest first.
    copied: VecDeque<(usize, Mark)>,
    landings: Landings,
    /// Receives refused bytes.
    nowhere: Vec<u8>,
    pending: HashMap<u64, Pending>,
    /// Set when this rank leaves: how many answers it sends before its goodbye. Without them the peer would report puts
    /// as lost although they are in place.
    owes: Option<usize>,
    /// This rank has said goodbye.
    has_said_goodbye: bool,
    /// The peer has said goodbye.
    has_left: bool,
    /// When sending failed, and why.
    unsent: Option<(Instant, Error)>,
    /// The peer has put into memory whose registration has ended here.
    was_late: bool,
    /// When something last arrived from the peer.
    arrived: Option<Instant>,
}

impl Peer {
    /// The rank that runs in this process, over these two connections, which are closed when the peer is dropped.
    pub(crate) fn new(rank: u32, process: String, outgoing: Outgoing, recv: Box<dyn RecvEnd>) -> Self {
        Self {
            rank,
            process,
            recv,
            outgoing,
            posted: VecDeque::new(),
            pieces: None,
            lane: Lane::from(rank),
            copied: VecDeque::new(),
            landings: Landings::default(),
            nowhere: Vec::new(),
            pending: HashMap::new(),
            owes: None,
            has_said_goodbye: false,
            has_left: false,
            unsent: None,
            was_late: false,
            arrived: None,
        }
    }

    /// Its rank.
    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    /// When something last arrived from the peer, or was sent to it.
    pub(crate) fn moved(&self) -> Option<Instant> {
        self.arrived.max(self.outgoing.sent())
    }

    /// Its process.
    pub(crate) fn process(&self) -> &str {
        &self.process
    }

    /// The requests that the peer has not answered, and whether each is a get.
    pub(crate) fn unanswered(&self) -> impl Iterator<Item = (u64, bool)> {
        let unanswered = self.pending.iter().filter(|(_, pending)| !pending.answered);
        unanswered.map(|(&request, pending)| (request, pending.place.is_some()))
    }

    /// The requests that the peer has answered, and their outcome when the connection does not read their memory any
    /// more.
    pub(crate) fn answered(&self) -> impl Iterator<Item = (u64, Result<()>)> {
        let answered = self.pending.iter().filter(|(_, pending)| pending.answered);
        answered.map(|(&request, pending)| (request, pending.outcome(self.rank)))
    }

    /// Whether nothing is under way: no request waits for the peer's answer, and no transfer that the peer began is
    /// unfinished.
    pub(crate) fn is_quiet(&self) -> bool {
        self.unanswered().next().is_none()
            && self.pieces.is_none()
            && self.landings.is_empty()
            && self.posted.iter().all(|(_, it)| matches!(it, Arriving::Header(_)))
    }

    /// Whether the peer has said goodbye.
    pub(crate) fn has_left(&self) -> bool {
        self.has_left
    }

    /// The peer has not answered for too long: closing the connection to it no longer waits. The connection from the
    /// peer has a receive posted until the peer's goodbye. So its close does not wait, unless copies to a GPU hold all
    /// places for a receive.
    pub(crate) fn abandon(&mut self) {
        self.outgoing.abandon();
    }

    /// Whether a transfer uses this registration.
    pub(crate) fn uses(&self, region: u32) -> bool {
        let arrives =
            |(_, it): &(usize, Arriving)| matches!(it, Arriving::Piece { region: used, .. } if *used == region);
        self.outgoing.uses(region)
            || self.posted.iter().any(arrives)
            || self.pieces.as_ref().is_some_and(|pieces| pieces.region == region)
    }

    /// The puts that have not read their source.
    pub(crate) fn reading(&self) -> impl Iterator<Item = u64> {
        self.pending.iter().filter(|(_, pending)| !pending.read).map(|(request, _)| *request)
    }

    /// Whether this is a put that has not read its source.
    pub(crate) fn reads(&self, request: u64) -> bool {
        self.pending.get(&request).is_some_and(|pending| !pending.read)
    }

    /// Whether both have said goodbye: then its connections can be closed with nothing under way.
    pub(crate) fn is_over(&self) -> bool {
        self.has_left && self.outgoing.is_empty() && self.landings.is_empty()
    }

    /// Puts the bytes at `from`, inside the own registration `source`.
    pub(crate) fn put(&mut self, request: u64, (source, from): (u32, Spot), to: &Place, signal: Signal) {
        let Place { region, offset, size } = *to;
        let source = if size == 0 { 0 } else { source };
        self.pending.insert(request, Pending { read: false, answered: false, refused: false, place: None });
        let header = Header { kind: Kind::Put, refused: false, request, region, offset, size, signal };
        self.outgoing.push(Message::with_bytes(&header, source, from, Some(request)));
    }

    /// Gets the bytes of its registration `region` at `offset`.
    pub(crate) fn get(&mut self, request: u64, (region, offset): (u32, u64), place: Place) {
        self.pending.insert(request, Pending { read: true, answered: false, refused: false, place: Some(place) });
        let header = Header { request, region, offset, size: place.size, ..Header::new(Kind::Get) };
        self.outgoing.push(Message::bare(&header));
    }

    /// Says goodbye behind the answers for all arrived operations. No request may follow.
    pub(crate) fn leave(&mut self) {
        self.owes.get_or_insert(self.landings.len());
        self.say_goodbye();
    }

    fn say_goodbye(&mut self) {
        if self.owes == Some(0) && !std::mem::replace(&mut self.has_said_goodbye, true) {
            self.outgoing.push(Message::bare(&Header::new(Kind::Bye)));
        }
    }

    /// Moves all data that can move. Returns whether anything moved.
    ///
    /// # Errors
    /// When a connection or a GPU has failed, or the peer breaks the protocol or has left while it owes an answer.
    pub(crate) fn advance(&mut self, own: &mut Own<'_>) -> Result<bool> {
        if self.has_left {
            self.land(own)?;
            // Messages that arrived before its goodbye count.
            if !self.landings.is_empty() {
                return Ok(false);
            }
            let mut unread = Vec::new();
            return if self.pending.is_empty() { self.outgoing.advance(&mut unread) } else { Err(has_closed()) };
        }
        let mut read = Vec::new();
        let sent = if self.unsent.is_none() { self.outgoing.advance(&mut read) } else { Ok(false) };
        for request in read {
            self.note(request, own.requests, |pending| pending.read = true);
        }
        let arrived = self.take_what_arrives(own)?;
        if self.has_left {
            return Ok(true);
        }
        let sent = match sent {
            // A rank that closes says goodbye on one connection and ends the other: the goodbye may still be under way.
            // To a rank that has said goodbye itself this does not matter.
            Err(error) if error.cause() == Cause::Remote && !self.has_said_goodbye => {
                self.unsent = Some((Instant::now(), error));
                false
            }
            sent => sent?,
        };
        match &self.unsent {
            Some((since, error)) if since.elapsed() >= GOODBYE => Err(error.clone()),
            _ => Ok(sent | arrived),
        }
    }

    fn take_what_arrives(&mut self, own: &mut Own<'_>) -> Result<bool> {
        self.land(own)?;
        let mut moved = self.post()?;
        while let Some((request, _)) = self.posted.front() {
            let Some(came) = self.recv.received(*request)? else { break };
            moved = true;
            self.arrived = Some(Instant::now());
            let Some((_, arrived)) = self.posted.pop_front() else { break };
            let expected = match &arrived {
                Arriving::Header(_) => HEADER,
                Arriving::Piece { size, .. } => *size,
            };
            if came != expected as u64 {
                return Err(not_ours());
            }
            match arrived {
                Arriving::Header(bytes) => self.begin(&Header::decode(&bytes)?, own)?,
                Arriving::Piece { size, copy, finish, .. } => {
                    let mark = copy.map(|(slot, to)| self.copy(slot, &to, size)).transpose()?.flatten();
                    if let Some(Finish { header, refused }) = finish {
                        self.landings.push(header, refused, mark);
                        self.land(own)?;
                    }
                }
            }
            if self.has_left {
                break;
            }
            self.post()?;
        }
        Ok(moved)
    }

    /// Begins to copy a piece into a GPU's memory.
    fn copy(&mut self, slot: usize, to: &Spot, size: usize) -> Result<Option<Mark>> {
        let Some(gpu) = &to.gpu else { return Ok(None) };
        // SAFETY: the target lies inside registered memory, and a registration ends only when the placer has seen all
        // streams come this far. The slot is given back after the copy.
        let mark = unsafe { gpu.copy(to.address, slot, size) }?;
        self.copied.push_back((slot, mark.clone()));
        Ok(Some(mark))
    }

    /// Answers operations that are in place.
    fn land(&mut self, own: &mut Own<'_>) -> Result<()> {
        while let Some((slot, mark)) = self.copied.front() {
            if !mark.is_reached()? {
                break;
            }
            self.lane.give_back(*slot);
            self.copied.pop_front();
        }
        let mut landed = Vec::new();
        self.landings.advance(own.registry, own.signals, &mut landed)?;
        let answered = landed.len();
        for (header, refused) in landed {
            if header.kind == Kind::Reply {
                self.note(header.request, own.requests, |pending| {
                    pending.answered = true;
                    pending.refused = refused;
                });
            } else {
                let answer = Header { refused, request: header.request, ..Header::new(Kind::Ack) };
                self.outgoing.push(Message::bare(&answer));
            }
        }
        self.owes = self.owes.map(|owed| owed.saturating_sub(answered));
        self.say_goodbye();
        Ok(())
    }

    /// Posts receives for the bytes that follow the last header, and one for the next header.
    fn post(&mut self) -> Result<bool> {
        let mut moved = false;
        while let Some(pieces) = &mut self.pieces {
            let most = if pieces.to.is_some() { POSTED } else { 1 };
            if self.posted.len() >= most {
                return Ok(moved);
            }
            let size = pieces.left.min(PIECE);
            let (address, copy) = match &pieces.to {
                Some(Spot { gpu: Some(gpu), address, .. }) => {
                    let Some(slot) = self.lane.take(&gpu.staging) else { return Ok(moved) };
                    (slot, Some((slot, Spot { address: *address, gpu: Some(Arc::clone(gpu)), only_ours: false })))
                }
                Some(spot) => (spot.address, None),
                None => {
                    self.nowhere.resize(PIECE, 0);
                    (self.nowhere.as_mut_ptr().expose_provenance(), None)
                }
            };
            let Some(request) = self.recv.receive(ptr::with_exposed_provenance_mut(address), size)? else {
                if let Some((slot, _)) = copy {
                    self.lane.give_back(slot);
                }
                return Ok(moved);
            };
            moved = true;
            pieces.left -= size;
            if let Some(spot) = &mut pieces.to {
                spot.address += size;
            }
            let finish = (pieces.left == 0).then_some(pieces.finish);
            self.posted.push_back((request, Arriving::Piece { size, region: pieces.region, copy, finish }));
            if finish.is_some() {
                self.pieces = None;
            }
        }
        let waits = self.posted.iter().any(|(_, arriving)| matches!(arriving, Arriving::Header(_)));
        if !waits && !self.has_left {
            let mut header = Box::new([0; HEADER]);
            if let Some(request) = self.recv.receive(header.as_mut_ptr(), HEADER)? {
                moved = true;
                self.posted.push_back((request, Arriving::Header(header)));
            }
        }
        Ok(moved)
    }

    /// A header has arrived, and all bytes before it are in place.
    fn begin(&mut self, header: &Header, own: &mut Own<'_>) -> Result<()> {
        match header.kind {
            Kind::Put => {
                let place = Place { region: header.region, offset: header.offset, size: header.size };
                self.expect(header, place, own)
            }
            Kind::Get => {
                let found = own.registry.locate(header.region, header.offset, header.size);
                let (refused, from) = found.map_or_else(|_| (true, Spot::default()), |from| (false, from));
                let size = if refused { 0 } else { header.size };
                let region = if size == 0 { 0 } else { header.region };
                let reply = Header { refused, request: header.request, size, ..Header::new(Kind::Reply) };
                self.outgoing.push(Message::with_bytes(&reply, region, from, None));
                Ok(())
            }
            Kind::Reply => {
                let place = self.pending.get(&header.request).and_then(|pending| pending.place);
                let place = place.filter(|place| header.size == if header.refused { 0 } else { place.size });
                let place = place.ok_or_else(not_ours)?;
                self.expect(header, Place { size: header.size, ..place }, own)
            }
            Kind::Ack => {
                let is_put = self.pending.get(&header.request).is_some_and(|it| it.place.is_none() && !it.answered);
                if !is_put {
                    return Err(not_ours());
                }
                self.note(header.request, own.requests, |pending| {
                    pending.answered = true;
                    pending.refused = header.refused;
                });
                Ok(())
            }
            Kind::Bye => {
                self.has_left = true;
                self.leave();
                Ok(())
            }
            Kind::Hello => Err(not_ours()),
        }
    }

    /// The bytes that follow belong to this place.
    fn expect(&mut self, header: &Header, place: Place, own: &mut Own<'_>) -> Result<()> {
        let to = own.registry.locate(place.region, place.offset, place.size).ok();
        let mut finish = Finish { header: *header, refused: header.refused || to.is_none() };
        if to.is_none() && own.registry.has_ended(place.region) {
            self.is_late(&mut finish);
        }
        if place.size == 0 {
            self.landings.push(finish.header, finish.refused, None);
            return self.land(own);
        }
        let region = if to.is_some() { place.region } else { 0 };
        self.pieces = Some(Pieces { to, left: place.size as usize, region, finish });
        Ok(())
    }

    /// Bytes for memory whose registration has ended are dropped, and their operation still succeeds. No rank can tell
    /// the difference, and NCCL's abort would wait for ever for a put that fails.
    fn is_late(&mut self, finish: &mut Finish) {
        let is_put = finish.header.kind == Kind::Put;
        *finish = Finish { header: Header { signal: Signal::default(), ..finish.header }, refused: false };
        if is_put && !std::mem::replace(&mut self.was_late, true) {
            tracing::warn!(
                "rank {} puts into memory whose registration has ended here: those bytes go nowhere, as in an abort; else end a \
                 window after the puts into it",
                self.rank
            );
        }
    }

    /// A registration ends: bytes that have not arrived yet are dropped.
    pub(crate) fn forget(&mut self, region: u32) {
        let Some(mut pieces) = self.pieces.take() else { return };
        if pieces.region == region {
            (pieces.to, pieces.region) = (None, 0);
            self.is_late(&mut pieces.finish);
        }
        self.pieces = Some(pieces);
    }

    /// Changes the state of a request, and ends it when nothing is missing.
    fn note(&mut self, request: u64, requests: &Requests, change: impl FnOnce(&mut Pending)) {
        let Some(pending) = self.pending.get_mut(&request) else { return };
        change(pending);
        if pending.read && pending.answered {
            let outcome = pending.outcome(self.rank);
            self.pending.remove(&request);
            requests.end(request, outcome);
        }
    }
}

/// The error of operations on a rank that has said goodbye.
pub(crate) fn has_closed() -> Error {
    Error::remote("it has closed its side")
}

fn refusal(rank: u32) -> Error {
    Error::remote(format!("rank {rank} refused a one-sided operation: its place is not inside a registration there"))
        .with_hint("all ranks must register the same windows in the same order, and keep them until all is done")
}
