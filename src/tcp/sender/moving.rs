//! What moves on a stream: chunks and control frames out, acknowledgements and clear-to-sends in.

use std::os::fd::AsRawFd;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use super::{Io, Leaving, Outgoing, Payload, SendConn, State};
use crate::engine::counters::Counters;
use crate::engine::events;
use crate::engine::request::Ticket;
use crate::engine::schedule::constants::{SAMPLE_BYTES, SEND_SHARE};
use crate::os::error::{Error, Result};
use crate::os::ticks::Ticks;
use crate::session::frame::{HEADER, Header, Type};
use crate::session::liveness;
use crate::session::peer::{Broken, reported_by_peer};
use crate::session::wire::{self, Piece};
use crate::tcp::ack::Ack;
use crate::tcp::copies::{COPIES, Own};
use crate::tcp::limits::EAGER_MAX;
use crate::tcp::polled;
use crate::tcp::send_core::{Chunk, Key, Landed, SendCore};
use crate::tcp::stream::{READ, SEND, Step, WRITE};

impl Io {
    /// A further stream has sent a chunk of this many bytes. Now and then: the queue on its path.
    #[inline]
    pub(super) fn sample_queue(&mut self, index: usize, bytes: u32) -> Option<Duration> {
        self.unmeasured += u64::from(bytes);
        if index == 0 || self.unmeasured < SAMPLE_BYTES {
            return None;
        }
        self.unmeasured = 0;
        Some(liveness::queue(&self.sock))
    }
}

impl SendConn {
    #[inline(always)]
    pub(super) fn step(&self, index: usize, io: &mut Io, mut work: u8, wake: &mut u64) -> Step<Broken> {
        let mut moved = false;
        let mut share = SEND_SHARE;
        loop {
            // The thread that left this work may have made more ready since the present piece was taken.
            io.more |= work & WRITE != 0;
            if work & (WRITE | SEND) != 0 {
                match self.write(index, io, &mut share) {
                    Ok(more) => moved |= more,
                    Err(why) => return Step::Broken(why),
                }
            }
            if work & READ == 0 {
                return if share == 0 { Step::More } else { Step::Settled(moved) };
            }
            let read = match self.read(index, io, wake) {
                Ok(read) => read,
                Err(why) => return Step::Broken(why),
            };
            moved |= read;
            if share == 0 {
                return Step::More;
            }
            if !read {
                return Step::Settled(moved);
            }
            // Something came back: credit or a clear-to-send may have made more ready.
            work = READ | WRITE;
        }
    }

    fn write(&self, index: usize, io: &mut Io, share: &mut usize) -> std::result::Result<bool, Broken> {
        let mut moved = false;
        if io.out.is_none() {
            let mut state = self.state();
            io.out = self.next_outgoing(&mut state, index, io);
            self.kick_roomy(state, index);
        }
        loop {
            if io.seal.is_some() {
                io.protect();
            }
            let Some(out) = &io.out else { return Ok(moved) };
            if let Some((ticket, chunk)) = io.start_to_report.take() {
                // The state is not locked: other threads move data in the meantime. The request cannot end before its
                // chunk has left.
                self.events.chunk_begins(ticket.slot, 0, &chunk);
            }
            // SAFETY: headers and copies are ours; a chunk belongs to a message that is not acknowledged, so the
            // transport may use its memory.
            match unsafe { out.send(io.sock.as_raw_fd(), &io.header, io.sent) } {
                Err(error) if wire::is_shortage(&error) => {
                    self.starved(index, &error);
                    return Ok(moved);
                }
                Err(error) => return Err(Broken::Lost(error)),
                Ok(None) => {
                    Counters::bump(&self.counters.stalls_socket);
                    if io.followed.is_some() {
                        io.blocked.get_or_insert_with(Ticks::now);
                    }
                    return Ok(moved);
                }
                Ok(Some(bytes)) => {
                    moved = true;
                    if let Some(since) = io.blocked.take() {
                        self.moves_again(index, io.followed, since);
                    }
                    *share = share.saturating_sub(bytes.max(1));
                    io.sent += bytes;
                    if io.sent < out.length() {
                        continue;
                    }
                    // The copy is made only now, when the bytes are already on their way, and before the state is
                    // locked.
                    let copy = self.copy_of(out);
                    let left = io.finished();
                    let sampled = left.as_ref().filter(|_| self.own.one_rail);
                    let sampled = sampled.and_then(|left| io.sample_queue(index, left.length));
                    let to_book = left.filter(|left| left.ends);
                    if left.is_some() && to_book.is_none() {
                        io.written.count();
                    }
                    // A message whose request is done, and nothing behind it: the state need not be checked again.
                    if to_book.is_none() && !io.more && sampled.is_none() {
                        return Ok(moved);
                    }
                    let mut state = self.state();
                    if let Some(queue) = sampled {
                        if let Some(rate) = state.core.take_rate(self.net.spread.changes()) {
                            self.net.spread.sample(queue, rate);
                        }
                        state.core.choose_carrier(self.net.spread.uses_one_stream());
                    }
                    if let Some(left) = to_book {
                        if let Some((ticket, chunk, began)) = io.leaving.take() {
                            self.events.chunk_over(&self.requests, ticket.slot, 0, &chunk, began);
                        }
                        self.chunk_written(&mut state, &left, copy);
                        // Not before: a counted frame may be acknowledged, also on another stream in another thread,
                        // and then its message is over.
                        io.written.count();
                    }
                    self.settle_claims(&mut state, index);
                    if *share == 0 {
                        return Ok(moved);
                    }
                    io.out = self.next_outgoing(&mut state, index, io);
                    self.kick_roomy(state, index);
                }
            }
        }
    }

    /// Wakes the streams that must check what is ready; the stream `index` continues by itself.
    #[inline]
    fn kick_roomy(&self, mut state: MutexGuard<'_, State>, index: usize) {
        let mut roomy = state.core.take_roomy() & !(1 << index);
        drop(state);
        while roomy != 0 {
            self.streams[roomy.trailing_zeros() as usize].kick();
            roomy &= roomy - 1;
        }
    }

    /// A stream that was full takes bytes again.
    #[cold]
    fn moves_again(&self, index: usize, followed: Option<(Ticket, u64)>, since: Ticks) {
        if let Some((ticket, offset)) = followed {
            self.events.chunk_waited(ticket.slot, 0, index as u16, offset, since);
        }
    }

    /// Takes the stream's next frame from the core, which counts it as handed out.
    #[inline]
    pub(super) fn next_outgoing(&self, state: &mut State, index: usize, io: &mut Io) -> Option<Outgoing> {
        if !io.control.is_empty() {
            io.followed = None;
            io.more = state.core.has_ready();
            return Some(Outgoing::Control(std::mem::take(&mut io.control)));
        }
        let mut chunk = state.core.next_chunk(index)?;
        (io.followed, io.start_to_report, io.leaving) = (None, None, None);
        if index > 0 {
            state.core.leaves(index, Instant::now());
        }
        if self.events.has_sink() {
            self.chunk_begins(state, index, io, &chunk);
        }
        if chunk.again {
            // Noted while the state is locked. The message of a resent chunk may be acknowledged at any time, since the
            // first attempt may have arrived.
            if let Some((ticket, chunk)) = io.start_to_report.take() {
                self.events.chunk_begins(ticket.slot, 0, &chunk);
            }
            Counters::count(&self.counters.resends, 1);
        } else {
            Counters::count(&self.counters.chunks, 1);
            Counters::count(&self.counters.bytes, u64::from(chunk.length));
        }
        let payload = state.payloads[chunk.key].as_mut().expect("a message in flight has its payload");
        let mut leaving = Leaving {
            key: chunk.key,
            length: chunk.length,
            copied: false,
            ends: !chunk.again && payload.ticket.is_some() && (chunk.copied || !self.recovery),
        };
        if let Some(copy) = &mut payload.replay {
            // SAFETY: the copy is ours, and all of the message.
            chunk.header.flags |= unsafe { polled::flag(Piece::of_mut(&mut copy[HEADER..])) };
            // The epoch that carried the message before is over when the message is resent, so the old header is not
            // needed.
            chunk.header.encode_into(copy.first_chunk_mut().expect("a copy has room for its header"));
            io.more = state.core.has_ready();
            return Some(Outgoing::Whole(Piece::of_mut(copy), leaving));
        }
        leaving.copied = chunk.copied;
        // A stream in the middle of longer messages checks again: other messages may have been posted for which no
        // other stream was woken.
        io.more = true;
        // SAFETY: the core hands out ranges within the message.
        let data = unsafe { payload.data.add(chunk.offset as usize) }.cast_mut();
        let body = Piece { data, length: chunk.length as usize };
        // SAFETY: the message is the transport's, and chunks begin at multiples of 128 bytes.
        chunk.header.flags |= unsafe { polled::flag(body) };
        chunk.header.encode_into(&mut io.header);
        Some(Outgoing::Framed(body, leaving))
    }

    /// The copy for a possible resend that ends the request of a message just sent, unless it was copied before.
    #[inline]
    fn copy_of(&self, out: &Outgoing) -> Option<Vec<u8>> {
        let Outgoing::Framed(body, Leaving { copied: true, .. }) = out else { return None };
        // SAFETY: the message is not acknowledged and its request has not ended, so the buffer is the transport's.
        Some(unsafe { COPIES.copy(body.data, body.length) })
    }

    /// The kernel took a whole chunk for the first time. That ends the request of a message that is copied now, or
    /// needs no copy.
    fn chunk_written(&self, state: &mut State, left: &Leaving, copy: Option<Vec<u8>>) {
        let payload = state.payloads[left.key].as_mut().expect("a message in flight has its payload");
        payload.written += u64::from(left.length);
        if copy.is_some() {
            payload.replay = copy;
        }
        if payload.written < payload.length {
            return;
        }
        let Some(ticket) = payload.ticket.take() else { return };
        if self.recovery && payload.replay.is_none() {
            // A sealed message was not copied before.
            // SAFETY: the request has not ended, so the buffer is the transport's.
            payload.replay = Some(unsafe { COPIES.copy(payload.data, payload.length as usize) });
        }
        Counters::count(&self.counters.messages, 1);
        self.requests.complete_part(ticket.slot, 0, payload.length);
    }

    fn read(&self, index: usize, io: &mut Io, wake: &mut u64) -> std::result::Result<bool, Broken> {
        if io.seal.is_some() {
            return self.read_sealed(index, io, wake);
        }
        let mut moved = false;
        loop {
            let room = &mut io.input[io.filled..];
            let wanted = room.len();
            // SAFETY: the input buffer is this stream's own.
            let got = unsafe { wire::receive(io.sock.as_raw_fd(), Piece::of_mut(room)) };
            let Some(bytes) = self.health.read(got, self.health.is_peer_done(), |error| self.starved(index, error))?
            else {
                return Ok(moved);
            };
            moved = true;
            io.filled += bytes;
            self.take_frames(index, io, wake).map_err(Broken::Fatal)?;
            if bytes < wanted {
                return Ok(moved);
            }
        }
    }

    fn take_frames(&self, index: usize, io: &mut Io, wake: &mut u64) -> Result<()> {
        let mut at = 0;
        while io.filled - at >= HEADER {
            let bytes: &[u8; HEADER] = io.input[at..at + HEADER].try_into().expect("a header's worth");
            let header = Header::decode(bytes)?;
            // Checked before waiting for the payload, for which this side has no room.
            if header.kind == Type::Data {
                return Err(misdirected(Type::Data));
            }
            let end = at + HEADER + header.length as usize;
            if end > io.filled {
                break;
            }
            self.on_frame(index, &header, &io.input[at + HEADER..end], wake)?;
            at = end;
        }
        if at < io.filled {
            io.input.copy_within(at..io.filled, 0);
        }
        io.filled -= at;
        Ok(())
    }

    /// Handles a frame of the receiver.
    pub(super) fn on_frame(&self, index: usize, header: &Header, text: &[u8], wake: &mut u64) -> Result<()> {
        match header.kind {
            Type::Ack | Type::Acks => self.acknowledged(index, &Ack::decode(header, text))?,
            Type::Clear => {
                let mut state = self.state();
                if let Some(key) = state.core.clear_to_send(header.tag, header.order, header.total)? {
                    if header.total > EAGER_MAX {
                        *wake += state.core.length(key);
                    }
                    if self.events.has_sink()
                        && let Some(ticket) = state.payloads[key].as_ref().and_then(|payload| payload.ticket)
                    {
                        self.events.ready(ticket.slot, 0);
                    }
                }
            }
            Type::Fenced => self.on_fenced(header)?,
            Type::Bye => match header.total {
                0 => self.health.peer_is_done(),
                received => self.health.peer_received(received - 1),
            },
            Type::Fail => return Err(reported_by_peer(header.order, text)),
            Type::Data | Type::Fence | Type::Query | Type::QueuePair => return Err(misdirected(header.kind)),
        }
        Ok(())
    }

    fn acknowledged(&self, index: usize, ack: &Ack) -> Result<()> {
        let mut state = self.state();
        let State { core, payloads, done, copies, .. } = &mut *state;
        let Header { epoch, offset: frames, total: credit, .. } = ack.header;
        if epoch != core.epoch(index) {
            return Err(Error::remote("an acknowledgement came for an earlier epoch of its stream"));
        }
        core.arrives(index, frames, |left| left.elapsed());
        core.acknowledge_all(ack.counts(), done)?;
        core.acknowledge(index, frames, credit, done)?;
        self.chunks_end(core, payloads);
        self.end_messages(payloads, copies, done);
        self.kick_roomy(state, index);
        Ok(())
    }

    /// Settles frames that were acknowledged on another stream before this side knew that they had left.
    #[inline]
    pub(super) fn settle_claims(&self, state: &mut State, index: usize) {
        let State { core, payloads, done, copies, .. } = state;
        if core.settle(index, done) {
            self.chunks_end(core, payloads);
            self.end_messages(payloads, copies, done);
        }
    }

    /// A chunk goes out while a profiler is attached: remembers its request, unless that has already ended, and what to
    /// report now.
    fn chunk_begins(&self, state: &mut State, index: usize, io: &mut Io, chunk: &Chunk) {
        state.core.watch_landings(self.events.joins());
        let Some(ticket) = state.payloads[chunk.key].as_ref().and_then(|payload| payload.ticket) else { return };
        io.followed = Some((ticket, chunk.offset));
        if self.events.is_patient() && self.recovery && !chunk.copied && !chunk.again {
            // Its request does not end before it is acknowledged: everything is reported then.
            return state.core.stamp(index, Ticks::now());
        }
        let profiled = events::Chunk {
            offset: chunk.offset,
            length: u64::from(chunk.length),
            path: index as u16,
            message: chunk.header.message,
            total: chunk.header.total,
            again: chunk.again,
            ..events::Chunk::default()
        };
        if self.events.is_patient() && chunk.copied {
            // Its request ends when it has left.
            io.leaving = Some((ticket, profiled, Ticks::now()));
        } else {
            io.start_to_report = Some((ticket, profiled));
        }
    }

    /// Chunks were acknowledged.
    pub(super) fn chunks_end(&self, core: &mut SendCore, payloads: &[Option<Payload>]) {
        let mut now = None;
        while let Some(Landed { key, index, offset, length, joined, message, total, began }) = core.take_landed() {
            let Some(ticket) = payloads[key].as_ref().and_then(|payload| payload.ticket) else { continue };
            let path = index as u16;
            if let Some(began) = began {
                let chunk = events::Chunk { offset, length, path, message, total, joined, ..events::Chunk::default() };
                // The clock is read once: a message's chunks arrive together, and reading it takes as long as the rest
                // of a note.
                let now = *now.get_or_insert_with(Ticks::now);
                self.events.chunk_acknowledged(&self.requests, ticket.slot, &chunk, began, now);
            } else {
                self.events.chunk_ends(ticket.slot, 0, path, offset);
            }
        }
    }

    pub(super) fn end_messages(&self, payloads: &mut [Option<Payload>], copies: &mut Own, done: &mut Vec<Key>) {
        for key in done.drain(..) {
            let payload = payloads[key].take().expect("a message in flight has its payload");
            if let Some(ticket) = payload.ticket {
                Counters::count(&self.counters.messages, 1);
                self.requests.complete_part(ticket.slot, 0, payload.length);
            }
            if let Some(copy) = payload.replay.and_then(|copy| copies.give_back(copy)) {
                COPIES.give_back(copy);
            }
        }
    }
}

/// The error for a frame that only senders send.
#[cold]
pub(super) fn misdirected(kind: Type) -> Error {
    Error::remote(format!("the receiving side sent a {kind:?} frame"))
}
