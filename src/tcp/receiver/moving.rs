//! What moves on a stream: frames in, acknowledgements and clear-to-sends out.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use super::{Body, Fence, Followed, Io, RecvConn, State, Target, profiled};
use crate::engine::counters::Counters;
use crate::engine::events::Chunk;
use crate::engine::schedule::constants::RECEIVE_SHARE;
use crate::engine::schedule::load;
use crate::os::error::{Error, Result};
use crate::os::ticks::Ticks;
use crate::session::frame::{HEADER, Header, POLLED, Type};
use crate::session::peer::{Broken, reported_by_peer};
use crate::session::wire::{self, Piece};
use crate::tcp::connection::lock;
use crate::tcp::copies::COPIES;
use crate::tcp::recv_core::{End, Part, Place, StageKey};
use crate::tcp::stream::{READ, Step, WRITE};

impl RecvConn {
    #[inline(always)]
    pub(super) fn step(&self, index: usize, io: &mut Io, work: u8) -> Step<Broken> {
        let mut moved = false;
        let mut more = false;
        if work & READ != 0 {
            match self.read(index, io) {
                Ok((read, left)) => (moved, more) = (read, left),
                Err(why) => return Step::Broken(why),
            }
        }
        let silent = !io.ack_due && io.sent == io.out.len();
        if work & WRITE == 0 && silent && !self.own.mail.load(Ordering::Relaxed) {
            return if more { Step::More } else { Step::Settled(moved) };
        }
        match self.write(index, io) {
            Ok(wrote) => moved |= wrote,
            Err(error) if self.has_parted(io) => {
                tracing::debug!(target: crate::os::log::NET, "{} is gone already: {error}", self.peer);
                return Step::Broken(Broken::Goodbye);
            }
            Err(error) => return Step::Broken(Broken::Lost(error)),
        }
        if more { Step::More } else { Step::Settled(moved) }
    }

    /// Reads until nothing is left or the share is used up. Returns (whether anything arrived, whether more may be
    /// there).
    fn read(&self, index: usize, io: &mut Io) -> std::result::Result<(bool, bool), Broken> {
        if io.seal.is_some() {
            return self.read_sealed(index, io);
        }
        let mut share = RECEIVE_SHARE;
        let mut moved = false;
        loop {
            if io.from < io.to {
                self.take_frames(index, io).map_err(Broken::Fatal)?;
            }
            if share == 0 {
                return Ok((true, true));
            }
            if io.peeked > 0 && !self.empty(index, io)? {
                return Ok((moved, false));
            }
            io.make_room();
            // SAFETY: the core has checked the body's range against the posted buffer of a request that has not ended,
            // or a staging buffer that lives until its message is copied.
            let (got, wanted, open) = unsafe { io.receive(index == 0) };
            let Some(bytes) = self.health.read(got, self.has_parted(io), |error| self.starved(index, error))? else {
                return Ok((moved, false));
            };
            moved = true;
            if index == 0 {
                load::copied(bytes);
            }
            share = share.saturating_sub(bytes);
            let placed = bytes.min(open);
            io.to += bytes - placed;
            if placed > 0 {
                self.placed(index, io, placed);
            }
            // A short read means that the socket has no more bytes, which saves the call that would show that. The
            // exception is an open frame, whose rest has probably arrived. The end of the stream may still follow.
            // NCCL's thread and the control thread poll the first stream again. A worker polls again only when the
            // kernel reports something new. If bytes and an end are there together, the kernel reports them only once.
            if index == 0 && bytes < wanted && matches!(io.body, Body::None) {
                self.take_frames(index, io).map_err(Broken::Fatal)?;
                if matches!(io.body, Body::None) {
                    return Ok((true, false));
                }
            }
        }
    }

    /// Whether the peer intended the end of this stream. The peer sends a goodbye on each stream. A stream that ends
    /// without one may have lost data, which is resent.
    pub(super) fn has_parted(&self, io: &Io) -> bool {
        io.received_goodbye || !self.recovery && self.health.is_peer_done()
    }

    /// Removes the peeked bytes from the socket. Returns false when some of them remain for now.
    fn empty(&self, index: usize, io: &mut Io) -> std::result::Result<bool, Broken> {
        let gone = wire::discard(io.sock.as_raw_fd(), io.peeked);
        let bytes = self.health.read(gone, self.has_parted(io), |error| self.starved(index, error))?;
        io.peeked -= bytes.unwrap_or(0).min(io.peeked);
        Ok(io.peeked == 0)
    }

    /// `bytes` of the open frame's payload are in place.
    pub(super) fn placed(&self, index: usize, io: &mut Io, bytes: usize) {
        if let Body::Data { to, rest, .. } = &mut io.body {
            *rest -= bytes;
            // SAFETY: still inside, or one past the end of, the checked range.
            to.data = unsafe { to.data.add(bytes) };
            if *rest == 0 {
                io.body = Body::None;
                self.chunk_ended(&mut io.followed);
                io.ack_due |= self.frame_ended(&mut self.state(), index, &mut io.followed);
            }
        }
    }

    /// Takes whole frames, and the beginning of a frame's payload, out of the input buffer.
    fn take_frames(&self, index: usize, io: &mut Io) -> Result<()> {
        loop {
            if let Body::Data { to, rest, .. } = io.body {
                let here = rest.min(io.to - io.from);
                if here > 0 {
                    // SAFETY: source is the input buffer, destination the checked range; they do not overlap.
                    unsafe { wire::copy_ascending(io.input.as_ptr().add(io.from), to.data, here) };
                    io.from += here;
                    self.placed(index, io, here);
                }
                if !matches!(io.body, Body::None) {
                    return Ok(());
                }
            }
            if io.to - io.from < HEADER {
                return Ok(());
            }
            let bytes: &[u8; HEADER] = io.input[io.from..io.from + HEADER].try_into().expect("a header's worth");
            let header = Header::decode(bytes)?;
            if header.kind == Type::Fail {
                // The text must be whole; the buffer is far larger than the longest.
                if io.to - io.from < HEADER + header.length as usize {
                    return Ok(());
                }
                return Err(reported_by_peer(header.order, &io.input[io.from + HEADER..][..header.length as usize]));
            }
            io.from += HEADER;
            if header.kind != Type::Data {
                self.on_frame(io, &header)?;
                continue;
            }
            let mut state = self.state();
            let to = self.frame_began(&mut state, index, &header, &mut io.followed)?;
            let length = header.length as usize;
            if length > io.to - io.from {
                io.body = Body::Data { to, rest: length, polled: header.flags & POLLED != 0 };
                drop(state);
                self.chunk_began(&mut io.followed);
                continue;
            }
            self.chunk_began(&mut io.followed);
            self.chunk_ended(&mut io.followed);
            // All of it is here: placed and ended in one go.
            // SAFETY: source is the input buffer, destination the checked range; they do not overlap.
            unsafe { wire::copy_ascending(io.input.as_ptr().add(io.from), to.data, length) };
            io.from += length;
            io.ack_due |= self.frame_ended(&mut state, index, &mut io.followed);
        }
    }

    /// Handles a frame of the sender that is not a chunk.
    pub(super) fn on_frame(&self, io: &mut Io, header: &Header) -> Result<()> {
        match header.kind {
            Type::Bye => {
                self.own.announced.store(header.total, Ordering::Relaxed);
                self.health.peer_is_done();
                io.received_goodbye = true;
                // The sender's close waits for the kernel's acknowledgement, which may be delayed by 40 ms, and which
                // the kernel does not send while bytes are left in the socket.
                if let Ok(Some(bytes)) = wire::discard(io.sock.as_raw_fd(), io.peeked) {
                    io.peeked -= bytes.min(io.peeked);
                }
                let _ = io.sock.set_tcp_quickack(true);
                io.ack_due = true;
            }
            Type::Query => {
                let mut state = self.state();
                if let Some(answer) = state.core.query(header.tag, header.order, header.total)? {
                    self.queue_on_any_stream(&answer.encode());
                }
            }
            Type::Fence => {
                // Fencing takes the other stream's lock; the control thread, which holds none, does it.
                let (index, epoch) = crate::session::peer::fenced_epoch(header)?;
                lock(&self.own.fences).push(Fence { index, epoch, requested: true });
                self.call_control_thread();
            }
            other => return Err(Error::remote(format!("the sending side sent a {other:?} frame"))),
        }
        Ok(())
    }

    /// A frame's payload is to come. [`RecvConn::chunk_began`] reports it to a profiler.
    pub(super) fn frame_began(
        &self,
        state: &mut State,
        index: usize,
        header: &Header,
        followed: &mut Option<Followed>,
    ) -> Result<Target> {
        Counters::count(&self.counters.chunks, 1);
        let place = state.core.begin(index, header)?;
        if index > 0 {
            self.note_message(header.total, state.core.under_way(header));
        }
        match place {
            Place::Posted(part, offset) => {
                if self.events.has_sink() {
                    *followed = Some(Followed { part, chunk: profiled(header, index), began: None });
                }
                let (to, _) = state.targets[part.slot as usize][part.part as usize].expect("its part is outstanding");
                // SAFETY: the core has checked that the chunk fits the posted buffer.
                Ok(Target { data: unsafe { to.data.add(offset as usize) } })
            }
            Place::Staged(stage) => {
                Counters::count(&self.counters.early, 1);
                if state.stages.len() <= stage {
                    state.stages.resize_with(stage + 1, || None);
                    state.stage_heads.resize(stage + 1, (index, *header));
                }
                state.stage_heads[stage] = (index, *header);
                let buffer = state.stages[stage].insert(COPIES.stage(header.length as usize));
                Ok(Target { data: buffer.as_mut_ptr() })
            }
        }
    }

    #[inline]
    pub(super) fn chunk_began(&self, followed: &mut Option<Followed>) {
        let Some(Followed { part, chunk, began }) = followed else { return };
        if self.events.is_patient() {
            *began = Some(Ticks::now());
        } else {
            self.events.chunk_begins(part.slot, usize::from(part.part), chunk);
        }
    }

    /// If one note for all chunks of a message suffices, [`RecvConn::frame_ended`] writes it.
    #[inline]
    fn chunk_ended(&self, followed: &mut Option<Followed>) {
        let Some(Followed { part, chunk, began }) = *followed else { return };
        if began.is_some() && chunk.length < chunk.total && self.events.joins() {
            return;
        }
        *followed = None;
        match began {
            Some(began) => self.events.chunk_over(&self.requests, part.slot, usize::from(part.part), &chunk, began),
            None => self.events.chunk_ends(part.slot, usize::from(part.part), chunk.path, chunk.offset),
        }
    }

    /// The payload of a frame is in its place. Returns whether that must be acknowledged.
    fn frame_ended(&self, state: &mut State, index: usize, followed: &mut Option<Followed>) -> bool {
        if let Some(Followed { part, chunk, began: Some(began) }) = followed.take() {
            match state.joined.iter_mut().find(|(of, ..)| *of == part) {
                Some((_, so_far, first)) => join((so_far, first), &chunk, began),
                None => state.joined.push((part, chunk, began)),
            }
        }
        // Each byte counts once, on arrival. Together with the sender's count this shows how many bytes are under way.
        Counters::count(&self.counters.bytes, state.core.open_length(index));
        match state.core.end(index) {
            End::More | End::Staged => {}
            End::Complete(part, total) => {
                if let Some(place) = state.joined.iter().position(|(of, ..)| *of == part) {
                    let (_, all, began) = state.joined.swap_remove(place);
                    self.events.chunk_over(&self.requests, part.slot, usize::from(part.part), &all, began);
                }
                self.complete(state, part, total);
            }
            End::Unstage(stage, part, total) => self.unstage(state, stage, part, total),
        }
        state.core.is_ack_due(index)
    }

    pub(super) fn unstage(&self, state: &mut State, stage: StageKey, part: Part, total: u64) {
        let buffer = state.stages[stage].take().expect("a staged message has its buffer");
        let (to, _) = state.targets[part.slot as usize][part.part as usize].expect("its part is outstanding");
        // SAFETY: the core has checked that the message fits the posted buffer, and the two are different memory.
        unsafe { wire::copy_ascending(buffer.as_ptr(), to.data, total as usize) };
        COPIES.give_back(buffer);
        let (index, head) = state.stage_heads[stage];
        state.core.unstaged(head.tag, stage);
        if self.events.has_sink() {
            // The message arrived before its request was made, so only its arrival can be reported.
            self.events.chunk_begins(part.slot, usize::from(part.part), &profiled(&head, index));
        }
        self.complete(state, part, total);
    }

    #[inline]
    fn complete(&self, state: &mut State, part: Part, total: u64) {
        state.targets[part.slot as usize][part.part as usize] = None;
        Counters::count(&self.counters.messages, 1);
        Counters::count(&self.own.completed, 1);
        self.requests.complete_part(part.slot, usize::from(part.part), total);
    }

    fn write(&self, index: usize, io: &mut Io) -> io::Result<bool> {
        let mut moved = false;
        loop {
            if io.sent == io.out.len() {
                io.out.clear();
                io.sent = 0;
                io.ack_due = false;
                if self.own.mail.swap(false, Ordering::AcqRel) {
                    std::mem::swap(&mut io.out, &mut *self.outbox());
                }
                // An acknowledgement refers to the stream that it travels on.
                let quiet = self.own.quiet.load(Ordering::Relaxed);
                let force = quiet || self.health.is_peer_done() || self.closing.load(Ordering::Relaxed);
                if let Some(ack) = self.state().core.take_ack(index, force) {
                    ack.encode_to(&mut io.out);
                }
                if self.closing.load(Ordering::Acquire) && !io.parted && !self.health.is_failed() {
                    io.parted = true;
                    // The sender needs the count if the last acknowledgements are lost.
                    let total = self.own.completed.load(Ordering::Relaxed) + 1;
                    io.out.extend_from_slice(&Header { total, ..Header::of(Type::Bye, 0) }.encode());
                }
                if io.out.is_empty() {
                    return Ok(moved);
                }
                if let Some(sides) = &mut io.seal {
                    sides.sealer.control(&mut io.out);
                }
            }
            // SAFETY: the piece is this stream's own buffer.
            let sent = unsafe { wire::send(io.sock.as_raw_fd(), Piece::of(&io.out[io.sent..])) };
            let bytes = match sent {
                Ok(Some(bytes)) => bytes,
                Ok(None) => return Ok(moved),
                Err(error) if wire::is_shortage(&error) => {
                    self.starved(index, &error);
                    return Ok(moved);
                }
                Err(error) => return Err(error),
            };
            moved = true;
            io.sent += bytes;
        }
    }
}

/// Adds a chunk that began at `began` to the chunks of its message that have arrived so far.
fn join((so_far, first): (&mut Chunk, &mut Ticks), chunk: &Chunk, began: Ticks) {
    so_far.offset = so_far.offset.min(chunk.offset);
    so_far.length += chunk.length;
    so_far.joined = true;
    *first = began.min(*first);
}
