//! Short messages that go without a CTS entry: copied into the [`Outbox`], written from there, and done.
//!
//! Nearly every one is like the one before it: from memory that was used before, with no CTS entry here and with
//! credit. [`RdmaSend::send_at_once`] sends those and checks exactly that; [`RdmaSend::isend`] does all others.

use std::ffi::c_void;
use std::sync::Arc;

use super::{EAGER, RdmaSend, State, work_id};
use crate::engine::counters::Counters;
use crate::engine::events::Chunk;
use crate::engine::request::Ticket;
use crate::engine::table::Table;
use crate::os::error::Result;
use crate::os::ticks::Ticks;
use crate::rdma::adapter::Registration;
use crate::rdma::cts::Immediate;
use crate::rdma::eager::{EAGER_MAX, Head, Outbox, Parcel};
use crate::rdma::fabric::Qp;
use crate::rdma::ledger::{Ledger, Sent};
use crate::rdma::verbs::{Local, Remote, Work};

/// A send that goes without a CTS entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Short {
    pub(super) address: u64,
    pub(super) length: u64,
    /// Which send with its tag it is.
    pub(super) number: u32,
    /// The request.
    pub(super) slot: u16,
}

/// Host memory that short messages were sent from, registered for these adapters: the data that a further send needs
/// about it, except whether it is still registered. Only the last few: NCCL normally has one for each protocol.
#[derive(Debug, Default)]
pub(super) struct Known([Range; 4]);

#[derive(Debug, Default, Clone, Copy)]
struct Range {
    /// NCCL's handle of the memory; 0 for none.
    handle: usize,
    start: u64,
    end: u64,
}

impl Known {
    /// Remembers this memory in place of the oldest one. The caller has checked that short messages may be sent from
    /// it.
    pub(super) fn add(&mut self, handle: usize, memory: &Arc<Registration>) {
        if self.0.iter().all(|range| range.handle != handle) {
            let (start, end) = memory.range();
            self.0.rotate_right(1);
            self.0[0] = Range { handle, start, end };
        }
    }

    /// Whether that memory is known, and contains these bytes.
    #[inline]
    fn covers(&self, handle: usize, address: u64, length: u64) -> bool {
        let Some(range) = self.0.iter().find(|range| range.handle == handle) else { return false };
        range.start <= address && address <= range.end && length <= range.end - address
    }
}

impl RdmaSend {
    /// Starts a send that is like those before it. `handle` names its memory in `registered`. `None`: it must use the
    /// longer path, [`RdmaSend::isend`].
    ///
    /// # Errors
    /// When the connection has failed in it.
    ///
    /// # Safety
    /// As [`RdmaSend::isend`].
    #[inline(always)]
    pub(crate) unsafe fn send_at_once(
        &self,
        (address, length): (u64, u64),
        tag: i32,
        (handle, registered): (usize, &Table<Registration>),
        profiler: *mut c_void,
    ) -> Result<Option<Ticket>> {
        let Some(mut guard) = self.try_state() else { return Ok(None) };
        let state = &mut *guard;
        let is_well = !self.base.health.is_failed() && !self.base.health.is_peer_done();
        if !is_well || length > EAGER_MAX || !state.known.covers(handle, address, length) {
            return Ok(None);
        }
        // Only the bytes are needed, now, and they belong to the caller: ending the registration meanwhile does no
        // harm.
        if !registered.is_current(handle) || state.has_cts() || !state.may_go_eagerly() {
            return Ok(None);
        }
        let Some(next) = state.matching.next_alone(tag) else { return Ok(None) };
        let Some(ticket) = self.base.requests.take_with(&mut state.keys, 1) else { return Ok(None) };
        let number = *next;
        *next = number.wrapping_add(1);
        self.base.events.follow(ticket.slot, 0, profiler);
        let begun = self.send_eagerly(state, Short { address, length, number, slot: ticket.slot }, tag);
        // SAFETY: inside isend.
        unsafe { self.started(guard, ticket, begun) }
    }

    /// Sends a short message without a CTS entry; [`State::may_go_eagerly`] has allowed it. Not inlined into its
    /// callers: all registers are its own.
    #[inline(never)]
    pub(super) fn send_eagerly(&self, state: &mut State, message: Short, tag: i32) -> Result<()> {
        let Short { address, length, number, slot } = message;
        let cts_entries = state.next_cts.wrapping_sub(1);
        let State { outbox: Some(outbox), fabric: Some(fabric), ledger, short_qp, .. } = state else { return Ok(()) };
        let head = Head { tag, number, cts_entries, length: length as u32 };
        // SAFETY: the transport may use the message's memory until its request ends, and it holds this many bytes.
        let parcel = unsafe { outbox.pack(&head, address as *const u8) };
        if self.base.events.has_sink() {
            self.report_short(message, *short_qp);
        }
        self.write_parcel(fabric.qp(*short_qp), *short_qp, (outbox, ledger), parcel)?;
        Counters::count(&self.base.counters.messages, 1);
        Counters::count(&self.base.counters.bytes, length);
        self.base.requests.complete_part(slot, 0, length);
        Ok(())
    }

    /// Posts the write of a short message.
    #[cold]
    pub(super) fn post_parcel(&self, state: &mut State, parcel: Parcel) -> Result<()> {
        let State { fabric: Some(fabric), outbox: Some(outbox), ledger, short_qp, .. } = state else { return Ok(()) };
        self.write_parcel(fabric.qp(*short_qp), *short_qp, (outbox, ledger), parcel)
    }

    #[inline(always)]
    fn write_parcel(
        &self,
        qp: &mut Qp,
        index: usize,
        (outbox, ledger): (&Outbox, &mut Option<Ledger>),
        parcel: Parcel,
    ) -> Result<()> {
        let Some(inbox) = &self.target.inbox else { return Ok(()) };
        let (adapter, peer_port, inline_bytes) = (qp.adapter, qp.peer_port, qp.inline_bytes());
        let write = || Work {
            id: work_id(0, index, 1, false) | EAGER,
            local: Local { address: parcel.address, length: parcel.bytes, key: outbox.key(adapter) },
            remote: Remote { address: inbox.of(parcel.slot), key: inbox.keys[peer_port] },
            immediate: Some(Immediate::eager(parcel.slot, parcel.compressed).encode()),
            is_read: false,
            is_inline: (1..=inline_bytes).contains(&parcel.bytes),
            is_signaled: true,
        };
        if let Some(ledger) = ledger {
            ledger.sent(index, Sent::Short(parcel));
        }
        // SAFETY: the outbox exists as long as the queue pairs, and its slot is not reused until this write has
        // completed.
        unsafe { qp.post_one(write) }?;
        Counters::count(&self.base.counters.chunks, 1);
        Ok(())
    }

    /// Notes for the profiler a message that is done as soon as it is copied.
    #[cold]
    fn report_short(&self, message: Short, qp: usize) {
        let Short { length, number, slot, .. } = message;
        let (path, wr_id) = (qp as u16, work_id(0, qp, 1, false) | EAGER);
        let chunk = Chunk { length, path, message: number.into(), total: length, wr_id, ..Chunk::default() };
        self.base.events.ready(slot, 0);
        self.base.events.chunk_over(&self.base.requests, slot, 0, &chunk, Ticks::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_memory_covers_its_own_bytes_under_its_own_handle() {
        let known =
            Known([Range { handle: 7, start: 100, end: 200 }, Range::default(), Range::default(), Range::default()]);
        assert!(known.covers(7, 100, 100) && known.covers(7, 200, 0) && known.covers(7, 150, 50));
        assert!(!known.covers(7, 99, 1) && !known.covers(7, 150, 51) && !known.covers(7, 201, 0));
        assert!(!known.covers(8, 100, 1));
        assert!(!known.covers(7, u64::MAX, 2), "its end is beyond all addresses");
    }
}
