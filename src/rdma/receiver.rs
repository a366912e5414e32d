//! The receiving side of a connection.
//!
//! `irecv` writes a CTS entry for each part into the sender's ring, so that the sender writes straight into NCCL's
//! buffers. The last write of each queue pair carries an immediate, which uses up one of the receives posted on that
//! queue pair. A part is done when all its immediates have arrived. Its size is the sum of their lengths.
//!
//! Short messages may arrive without a CTS entry, in the [`Inbox`], and are copied from there. So a part that only
//! short messages fit is not announced, unless the sender has requested it recently.

mod recovery;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::adapter::{Adapters, Memory, Registration, own_regions};
use super::base::{Base, Parts, Side};
use super::connection::{Connection, Direction};
use super::cts::{CTS_BYTES, CTS_ENTRIES, Immediate, encode_credit};
use super::eager::{EAGER_MAX, Head, INBOX_SLOTS, Inbox};
use super::fabric::{Depth, Fabric, Qp};
use super::flush::{self, Around, Flush};
use super::pages::Pages;
use super::receives::{Part, Receives, Slot};
use super::silence::Silence;
use super::trouble::Doing;
use super::verbs::{Completion, Local, MemoryRegion, Opcode, Remote, Work};
use crate::engine::counters::Counters;
use crate::engine::events::{Chunk, MOST};
use crate::engine::request::{Keys, MAX_PARTS, SLOTS, Ticket, too_long};
use crate::engine::tags::TagOrders;
use crate::nccl::net_event::SOMEWHERE;
use crate::os::error::{Error, Result};
use crate::os::ticks::Ticks;
use crate::session::wire::copy_ascending;

/// Receives used up on a queue pair before new ones are posted: one call for several.
const PUT_BACK: usize = 16;

/// Queue depth of a receiving queue pair. It has a receive for each part that can be outstanding, for each short
/// message that can be under way, and for those not yet posted again. The sending queue holds CTS entries; one request
/// carries those of a whole group.
pub(crate) const DEPTH: Depth =
    Depth { send: 128, receive: (SLOTS + INBOX_SLOTS + PUT_BACK) as u32, inline_bytes: (CTS_BYTES * MAX_PARTS) as u32 };

/// The completion of one CTS entry in this many is requested: often enough that the queue never fills with silent ones.
const SIGNAL_EVERY: u32 = 16;

/// When no more entries than this are left in the queue, every completion is requested: a group takes up to two.
const LOW: u32 = 3;

/// Marks the completion of a receive; the low bits are the queue pair.
const RECEIVE: u64 = 1 << 62;

/// Where CTS entries go.
pub(crate) struct Target {
    /// The sender's ring.
    pub ring: u64,
    /// Its keys, by port of the sender.
    pub keys: Vec<u32>,
}

/// Where the sender writes sizes that do not follow from the immediates.
pub(crate) struct SizeTable {
    /// Dropped first: afterwards no device writes. By adapter.
    pub regions: Vec<MemoryRegion>,
    /// By slot.
    pub sizes: Pages<AtomicU64>,
}

impl SizeTable {
    /// A table for one connection.
    ///
    /// # Errors
    /// When it cannot be pinned.
    pub(crate) fn new(adapters: &Adapters) -> Result<Self> {
        let sizes = Pages::zeroed(SLOTS)?;
        Ok(Self { regions: own_regions(adapters, &sizes)?, sizes })
    }
}

/// Copies of the written CTS entries, for a device that does not accept them inline.
pub(crate) struct Mirror {
    /// By adapter.
    regions: Vec<MemoryRegion>,
    cts_entries: Pages<[u8; CTS_BYTES]>,
}

impl Mirror {
    /// A mirror without entries.
    ///
    /// # Errors
    /// When it cannot be pinned.
    pub(crate) fn new(adapters: &Adapters) -> Result<Self> {
        let cts_entries = Pages::zeroed(CTS_ENTRIES + 1)?;
        let regions = own_regions(adapters, &cts_entries)?;
        Ok(Self { regions, cts_entries })
    }
}

/// What is changed with the state locked.
pub(crate) struct State {
    /// None once the connection has failed or is closed: then no device accesses a buffer.
    fabric: Option<Fabric>,
    table: Option<SizeTable>,
    mirror: Option<Mirror>,
    /// Made with the first flush.
    flush: Option<Flush>,
    /// Free request slots.
    keys: Keys,
    receives: Receives,
    orders: TagOrders,
    /// None when short messages must not arrive unannounced.
    inbox: Option<Inbox>,
    /// Receives that must still be announced although only short messages fit: the sender has requested it.
    to_announce: usize,
    /// The queue pair for CTS entries, and whether it is lost with those that were under way.
    cts_qp: usize,
    cts_entries_are_lost: bool,
    /// CTS entries written on it since the last one whose completion was requested.
    silent: u32,
    /// Receives to post again, by queue pair.
    used: Vec<usize>,
    silence: Silence,
    /// Since when this many CTS entries have been written without knowing whether they have arrived.
    unsure: Option<(Instant, u64)>,
}

/// The part of the state that a completion may change, beside the queue pairs.
struct Hands<'a> {
    table: &'a SizeTable,
    receives: &'a mut Receives,
    inbox: &'a mut Option<Inbox>,
    orders: &'a TagOrders,
    used: &'a mut [usize],
}

/// A connection that receives.
pub(crate) type RdmaRecv = Connection<Target>;

impl Direction for Target {
    type State = State;
    type Devices = (Option<Fabric>, Option<SizeTable>, Option<Mirror>, Option<Inbox>);

    const SIDE: Side = Side::Listening;

    fn keys(state: &State) -> &Keys {
        &state.keys
    }

    #[inline(always)]
    fn pump(conn: &RdmaRecv, state: &mut State) -> Result<bool> {
        conn.pump(state)
    }

    /// Does not include the flush, which ends here.
    fn devices(state: &mut State) -> Self::Devices {
        drop(state.flush.take());
        (state.fabric.take(), state.table.take(), state.mirror.take(), state.inbox.take())
    }

    fn needs(state: &State, memory: &Arc<Registration>) -> bool {
        state.flush.as_ref().is_some_and(|flush| flush.reads(memory)) || state.receives.want(memory)
    }

    fn let_go(state: &mut State) {
        state.receives.let_go();
    }

    fn care(conn: &RdmaRecv) -> (bool, Option<Instant>) {
        (conn.care(), None)
    }

    #[cfg(test)]
    fn fabric(state: &mut State) -> Option<&mut Fabric> {
        state.fabric.as_mut()
    }
}

/// A part of a receive as it is posted.
pub(crate) struct Posted {
    /// The address of the buffer.
    pub address: u64,
    /// How many fit.
    pub size: u64,
    /// NCCL's tag.
    pub tag: i32,
    /// The registration, if the host passed one.
    pub memory: Option<Arc<Registration>>,
}

/// Posts the first receives on every queue pair. This happens before the sender knows the queue pairs, so that it never
/// uses one without receives.
///
/// # Errors
/// When a device refuses.
pub(crate) fn post_first_receives(fabric: &mut Fabric) -> Result<()> {
    for (index, qp) in fabric.qps_mut().iter_mut().enumerate() {
        qp.post_receives(RECEIVE | index as u64, DEPTH.receive as usize)?;
    }
    Ok(())
}

impl RdmaRecv {
    /// A connection whose queue pairs are connected.
    ///
    /// # Errors
    /// When the control thread cannot watch the socket.
    pub(crate) fn new(
        parts: Parts,
        mut fabric: Fabric,
        (table, mirror, inbox): (SizeTable, Mirror, Option<Inbox>),
        target: Target,
    ) -> Result<Arc<Self>> {
        let (base, keys) = Base::new(parts, &mut fabric, Target::SIDE);
        let state = State {
            used: vec![0; fabric.qps().len()],
            fabric: Some(fabric),
            table: Some(table),
            mirror: Some(mirror),
            flush: None,
            keys,
            receives: Receives::new(),
            orders: TagOrders::default(),
            inbox,
            to_announce: 0,
            cts_qp: 0,
            cts_entries_are_lost: false,
            silent: 0,
            silence: Silence::default(),
            unsure: None,
        };
        let conn = Self::unwatched(base, target, state);
        // The first count: from now on short messages may arrive unannounced.
        conn.write_credit_now(&mut conn.state())?;
        conn.base.name_paths(conn.state().fabric.as_ref());
        conn.watch()?;
        Ok(conn)
    }

    /// Starts a group of receives, at most [`MAX_PARTS`]. `None`: not now.
    ///
    /// # Errors
    /// When memory is not registered for it.
    ///
    /// # Safety
    /// The memory of every part must be writable, and used by nothing else until the request ends, the memory is
    /// withdrawn or the connection is closed. `profilers` are NCCL's profiler handles of the parts, null or valid until
    /// `test` has reported the end of the request.
    pub(crate) unsafe fn irecv(
        &self,
        parts: &mut [Option<Posted>],
        profilers: &[*mut c_void],
    ) -> Result<Option<Ticket>> {
        let count = parts.len();
        let mut state = self.state();
        if self.base.health.is_failed() {
            // As NCCL's own transports do: the call is accepted, and `test` returns the error.
            return Ok(self.base.requests.take_with(&mut state.keys, count));
        }
        let peer_is_done = self.base.health.is_peer_done();
        if peer_is_done || !state.has_room(count) {
            let pumped = self.pump(&mut state);
            if let Err(error) = pumped {
                self.end(state, error);
                return Ok(self.base.requests.take_with(&mut self.state().keys, count));
            }
            // Everything it sent before its goodbye has arrived.
            if peer_is_done && !state.holds_all(parts) {
                drop(state);
                self.base.leaves_early();
                return Ok(self.base.requests.take_with(&mut self.state().keys, count));
            }
            if !state.has_room(count) {
                return Ok(None);
            }
        }
        // Checks all parts first: a group is posted as a whole or not at all.
        for part in parts.iter_mut().flatten() {
            match &part.memory {
                Some(memory) => memory.check(&self.base.adapters, part.address, part.size)?,
                None => part.memory = self.base.pin(part.address, part.size)?,
            }
        }
        let Some(ticket) = self.base.requests.take_with(&mut state.keys, count) else { return Ok(None) };
        for (part, profiler) in profilers.iter().enumerate() {
            self.base.events.follow(ticket.slot, part, *profiler);
        }
        let first = state.receives.written();
        let mut outcome = Ok(());
        for (index, posted) in parts.iter_mut().filter_map(Option::take).enumerate() {
            let Posted { address, size, tag, memory } = posted;
            let number = state.orders.next(tag) as u32;
            let part = Part { ticket, index, address, size, tag, number, memory, has_more: index + 1 < count };
            outcome = self.open(&mut state, part);
            if outcome.is_err() {
                break;
            }
        }
        let announced = (state.receives.written() - first) as usize;
        if announced > 0 {
            outcome = outcome.and_then(|()| self.write_cts(&mut state, first, announced));
        }
        let outcome = outcome.and_then(|()| self.write_credit(&mut state));
        if let Err(error) = outcome {
            self.end(state, error);
            // SAFETY: inside irecv.
            unsafe { self.base.events.abandon(ticket.slot) };
            self.base.requests.cancel(ticket);
            return self.base.health.check().map(|()| None);
        }
        drop(state);
        self.base.attend();
        Ok(Some(ticket))
    }

    /// Makes the bytes received into a part's memory visible to the GPU. `None`: there is nothing to wait for.
    ///
    /// # Errors
    /// When the connection has failed, or a device refuses.
    pub(crate) fn iflush(&self, address: u64, memory: Option<Arc<Registration>>) -> Result<Option<Ticket>> {
        self.base.health.check()?;
        let Some(memory) = memory.filter(|memory| flush::is_needed(memory.kind)) else { return Ok(None) };
        memory.check(&self.base.adapters, address, 1)?;
        let mut state = self.state();
        let State { flush, fabric: Some(fabric), keys, .. } = &mut *state else {
            return self.base.health.check().map(|()| None);
        };
        let flush = flush.get_or_insert_with(|| Flush::new(&self.base.adapters));
        let around = Around { config: self.base.config(), qps: fabric.qps() };
        let ports = flush.ports(&around);
        if ports == 0 {
            return Ok(None);
        }
        let ticket = self.base.requests.take_with(keys, 1);
        let ticket = ticket.ok_or_else(|| Error::internal("a flush found no request slot"))?;
        let done = |slot| self.base.requests.complete_part(slot, 0, 0);
        if let Err(error) = flush.start((ticket.slot, ports), (address, memory), &around, done) {
            self.end(state, error);
            self.base.requests.cancel(ticket);
            return self.base.health.check().map(|()| None);
        }
        drop(state);
        self.base.attend();
        Ok(Some(ticket))
    }

    /// Takes completions.
    #[inline(always)]
    fn pump(&self, state: &mut State) -> Result<bool> {
        if state.flush.is_some() {
            self.poll_flush(state)?;
        }
        let State { fabric: Some(fabric), table: Some(table), receives, inbox, orders, used, .. } = state else {
            return Ok(false);
        };
        let mut hands = Hands { table, receives, inbox, orders, used };
        let moved = fabric.poll(|qps, completion| self.took(qps, &mut hands, completion))?;
        if moved {
            self.write_credit(state)?;
        }
        if state.fabric.as_ref().is_some_and(Fabric::is_alarmed) {
            self.tend(state)?;
        }
        Ok(moved)
    }

    #[inline(never)]
    fn poll_flush(&self, state: &mut State) -> Result<()> {
        let State { flush: Some(flush), fabric: Some(fabric), .. } = state else { return Ok(()) };
        let around = Around { config: self.base.config(), qps: fabric.qps() };
        flush.poll(&around, |slot| self.base.requests.complete_part(slot, 0, 0))?;
        Ok(())
    }

    /// A work request has completed, or failed. Out of line, so that a poll which finds nothing is short.
    #[inline(never)]
    fn took(&self, qps: &mut [Qp], hands: &mut Hands<'_>, completion: &Completion) -> Result<()> {
        let id = completion.id();
        let index = id as u16 as usize;
        let qp = &mut qps[index];
        let is_receive = id & RECEIVE != 0;
        let takes = qp.is_up() || is_receive && qp.still_takes();
        if !takes || !qp.is_of_this_epoch(completion) {
            return Ok(());
        }
        qp.receives -= u32::from(is_receive);
        if !completion.is_ok() {
            return if qp.is_stopping() { Ok(()) } else { self.base.broken(qp, completion, Doing::Receiving) };
        }
        if !is_receive {
            qp.finished((id >> 32) as u32 & 0xff);
            return Ok(());
        }
        qp.arrived += 1;
        if qp.is_returning() {
            qp.is_proven();
        }
        hands.used[index] += 1;
        if hands.used[index] >= PUT_BACK && !qp.is_stopping() {
            qp.post_receives(RECEIVE | index as u64, PUT_BACK)?;
            hands.used[index] -= PUT_BACK;
        }
        if completion.opcode() != Opcode::ReceiveImmediate {
            return Err(Error::remote("the sending side sent what no sender of Towline sends"));
        }
        let immediate = Immediate::decode(completion.immediate());
        match hands.inbox {
            Some(inbox) if immediate.is_eager => {
                self.arrived_eagerly(hands.receives, hands.orders, inbox, immediate, completion)
            }
            _ if immediate.is_run => self.arrived_together(hands.receives, immediate, completion),
            _ => self.arrived(hands.receives, hands.table, immediate, completion),
        }
    }

    /// An immediate has arrived, and everything that its queue pair wrote before.
    #[inline(never)]
    fn arrived(
        &self,
        receives: &mut Receives,
        table: &SizeTable,
        immediate: Immediate,
        completion: &Completion,
    ) -> Result<()> {
        let bytes = u64::from(completion.length());
        let slot = receives.answered(immediate.slot, immediate.generation)?;
        let Some(left) = slot.left.unwrap_or(immediate.shares).checked_sub(1) else {
            return Err(Error::remote("the sending side sent what no sender of Towline sends"));
        };
        slot.left = Some(left);
        slot.size += bytes;
        if left == 0 && immediate.is_reported {
            slot.size = u64::from_le(table.sizes[usize::from(immediate.slot)].load(Ordering::Acquire));
        }
        if self.base.events.has_sink() {
            self.report_arrival(slot, immediate, completion);
        }
        if left > 0 {
            return Ok(());
        }
        let size = slot.size;
        if size > slot.capacity {
            return Err(Error::remote(format!(
                "the sending side says that it wrote {size} bytes into a receive of {}",
                slot.capacity
            )));
        }
        let (request, part) = (slot.request, slot.part);
        receives.close(immediate.slot);
        self.complete(request, part, size);
        Ok(())
    }

    /// An immediate has arrived that answers several CTS entries, each filled to its size.
    #[inline(never)]
    fn arrived_together(&self, receives: &mut Receives, immediate: Immediate, completion: &Completion) -> Result<()> {
        let last = receives.answered(immediate.slot, immediate.generation)?.cts;
        let before = u64::from(immediate.shares).saturating_sub(1);
        if before >= MAX_PARTS as u64 {
            return Err(Error::remote("the sending side sent what no sender of Towline sends"));
        }
        for cts in last.saturating_sub(before)..=last {
            let number = receives.announced_by(cts)?;
            let slot = receives.slot(number);
            (slot.left, slot.size) = (Some(0), slot.capacity);
            if self.base.events.has_sink() {
                self.report_arrival(slot, Immediate { shares: 1, is_reported: true, ..immediate }, completion);
            }
            let (request, part, size) = (slot.request, slot.part, slot.size);
            receives.close(number);
            self.complete(request, part, size);
        }
        Ok(())
    }

    #[inline(always)]
    fn complete(&self, request: u16, part: u8, size: u64) {
        Counters::count(&self.base.counters.bytes, size);
        self.complete_counted(request, part, size);
    }

    /// The same for a message whose bytes were counted when it arrived.
    #[inline(always)]
    fn complete_counted(&self, request: u16, part: u8, size: u64) {
        Counters::count(&self.base.counters.messages, 1);
        self.base.requests.complete_part(request, usize::from(part), size);
    }

    /// A short message has arrived in the inbox.
    #[inline(always)]
    fn arrived_eagerly(
        &self,
        receives: &mut Receives,
        orders: &TagOrders,
        inbox: &mut Inbox,
        immediate: Immediate,
        completion: &Completion,
    ) -> Result<()> {
        let (head, data) = inbox.arrived(immediate.slot, immediate.compressed(), completion.length())?;
        receives.has_read(head.cts_entries)?;
        let Some(number) = receives.find(head.tag, head.number) else {
            // SAFETY: it has just arrived, with that head.
            return unsafe { self.arrived_early(orders, inbox, head, (data, completion.id())) };
        };
        let slot = receives.slot(number);
        if slot.left.is_some() {
            return Err(filled_twice());
        }
        self.deliver(slot, &head, data, completion.id())?;
        inbox.hand_on();
        let (request, part) = (slot.request, slot.part);
        receives.close(number);
        self.complete(request, part, head.length.into());
        Ok(())
    }

    /// A short message has arrived before its receive.
    ///
    /// # Safety
    /// As [`Inbox::keep`].
    #[cold]
    unsafe fn arrived_early(
        &self,
        orders: &TagOrders,
        inbox: &mut Inbox,
        head: Head,
        (data, wr_id): (*const u8, u64),
    ) -> Result<()> {
        let ahead = head.number.wrapping_sub(orders.peek(head.tag) as u32).cast_signed();
        if ahead < 0 || ahead as usize >= INBOX_SLOTS {
            return Err(Error::remote("the sending side filled a receive that was not posted"));
        }
        Counters::count(&self.base.counters.early, 1);
        // Counted on arrival, not when its receive is posted: together with the sender's count this shows how many
        // bytes are under way.
        Counters::count(&self.base.counters.bytes, head.length.into());
        // SAFETY: the caller keeps the same promise.
        unsafe { inbox.keep(head, wr_id, data) };
        Ok(())
    }

    /// Copies a short message into its receive. It arrived with work request `wr_id`, which names the queue pair.
    #[inline(always)]
    fn deliver(&self, slot: &Slot, head: &Head, data: *const u8, wr_id: u64) -> Result<()> {
        let length = u64::from(head.length);
        if length > slot.capacity {
            return Err(too_long(length, slot.capacity, slot.tag));
        }
        if slot.memory.as_ref().is_some_and(|memory| memory.kind != Memory::Host) {
            return Err(out_of_reach());
        }
        if length > 0 {
            // SAFETY: the message's bytes, of that length, and the memory of a posted receive, which the transport may
            // write and which holds them. In ascending order, since a GPU may poll flags in it meanwhile.
            unsafe { copy_ascending(data, slot.address as *mut u8, head.length as usize) };
        }
        if self.base.events.has_sink() {
            self.report_short(slot, head, wr_id);
        }
        Ok(())
    }

    /// Notes for the profiler a short message that arrived with that work request.
    #[cold]
    fn report_short(&self, slot: &Slot, head: &Head, wr_id: u64) {
        let (path, length) = (wr_id as u16, u64::from(head.length));
        let chunk = Chunk { length, path, message: u64::from(head.number), total: length, wr_id, ..Chunk::default() };
        self.report_end(slot, &chunk);
    }

    /// Notes for the profiler a chunk that is known only when it has arrived.
    fn report_end(&self, slot: &Slot, chunk: &Chunk) {
        let (request, part) = (slot.request, usize::from(slot.part));
        self.base.events.chunk_over(&self.base.requests, request, part, chunk, Ticks::now());
    }

    /// Posts a part: fills it with a message that has arrived, announces it, or leaves it to the sender.
    #[inline]
    fn open(&self, state: &mut State, part: Part) -> Result<()> {
        let State { receives, inbox, mirror: Some(mirror), to_announce, .. } = state else { return Ok(()) };
        let is_short = part.size <= EAGER_MAX && part.memory.as_ref().is_none_or(|memory| memory.kind == Memory::Host);
        let kept = inbox.as_mut().and_then(|inbox| inbox.take(part.tag, part.number));
        let number = receives.open(part);
        if let Some(kept) = kept {
            let slot = receives.slot(number);
            self.deliver(slot, kept.head(), kept.bytes().as_ptr(), kept.wr_id())?;
            let (request, part) = (slot.request, slot.part);
            receives.close(number);
            self.complete_counted(request, part, kept.bytes().len() as u64);
            return Ok(());
        }
        let is_silent = inbox.is_some() && is_short && *to_announce == 0;
        *to_announce = to_announce.saturating_sub(1);
        if !is_silent {
            let cts = receives.announce(number, inbox.as_mut().map_or(0, Inbox::report));
            mirror.cts_entries[receives.written() as usize % CTS_ENTRIES] = cts.encode();
        }
        Ok(())
    }

    /// The sender waits for a CTS entry, and has read this many. Announces the receives that it could have filled
    /// without one.
    #[cold]
    fn answer(&self, state: &mut State, cts_entries: u32) -> Result<()> {
        state.receives.has_read(cts_entries)?;
        state.to_announce = SLOTS;
        for number in state.receives.silent() {
            if !state.has_room(0) || !state.receives.can_announce(1) {
                break;
            }
            let State { receives, inbox, mirror: Some(mirror), .. } = &mut *state else { return Ok(()) };
            let first = receives.written();
            let cts = receives.announce(number, inbox.as_mut().map_or(0, Inbox::report));
            mirror.cts_entries[receives.written() as usize % CTS_ENTRIES] = cts.encode();
            self.write_cts(state, first, 1)?;
        }
        Ok(())
    }

    /// Reports to the sender how many short messages were delivered, when no CTS entry has reported it for long.
    #[inline]
    fn write_credit(&self, state: &mut State) -> Result<()> {
        if state.inbox.as_ref().is_some_and(Inbox::is_telling_due) { self.write_credit_now(state) } else { Ok(()) }
    }

    #[cold]
    fn write_credit_now(&self, state: &mut State) -> Result<()> {
        let State { fabric: Some(fabric), mirror: Some(mirror), inbox: Some(inbox), silent, cts_qp, .. } = state else {
            return Ok(());
        };
        if fabric.qp(*cts_qp).room() < 2 {
            return Ok(());
        }
        let credit = inbox.report();
        mirror.cts_entries[CTS_ENTRIES][..8].copy_from_slice(&encode_credit(credit.into()).to_le_bytes());
        self.write_to_ring((fabric, *cts_qp), mirror, silent, CTS_ENTRIES, 8)
    }

    /// Writes bytes of the mirror, from an entry on, into the sender's ring. The completion of a write of no bytes is
    /// requested: it shows that those before it have arrived.
    #[inline]
    fn write_to_ring(
        &self,
        (fabric, cts_qp): (&mut Fabric, usize),
        mirror: &Mirror,
        silent: &mut u32,
        at: usize,
        bytes: u32,
    ) -> Result<()> {
        let qp = fabric.qp(cts_qp);
        *silent += 1;
        // Also requested when the queue has little room left, and for a write without bytes.
        let is_signaled = *silent == SIGNAL_EVERY || qp.room() <= LOW || bytes == 0;
        let local = Local {
            address: mirror.cts_entries[at].as_ptr() as u64,
            length: bytes,
            key: mirror.regions[qp.adapter].local_key(),
        };
        let key = self.target.keys.get(qp.peer_port).copied().unwrap_or(0);
        let work = Work {
            id: u64::from(*silent) << 32 | cts_qp as u64,
            local,
            remote: Remote { address: self.target.ring + (at * CTS_BYTES) as u64, key },
            immediate: None,
            is_read: false,
            is_inline: bytes <= qp.inline_bytes(),
            is_signaled,
        };
        if is_signaled {
            *silent = 0;
        }
        // SAFETY: the mirror exists as long as the queue pairs. An entry in it changes only when the sender has
        // answered it, so the write of it has long completed. A newer count may overwrite a count, and a half-written
        // one is not accepted.
        unsafe { qp.post_one(|| work) }
    }

    /// Notes for the profiler the shares that a queue pair has delivered. If there are more shares than can be
    /// reported, the last one stands for the others. The same holds for the last share of a message whose size is in
    /// the table, since the lengths of its shares are not known.
    #[cold]
    fn report_arrival(&self, slot: &Slot, immediate: Immediate, completion: &Completion) {
        let left = slot.left.unwrap_or(0);
        let (length, is_piece) = if immediate.is_reported {
            (slot.size, left == 0)
        } else {
            let (shares, position) = (usize::from(immediate.shares), usize::from(immediate.shares - left));
            (u64::from(completion.length()), left == 0 || shares <= MOST || position < MOST)
        };
        if is_piece {
            let chunk = Chunk {
                offset: if immediate.shares == 1 { 0 } else { SOMEWHERE },
                length,
                path: completion.id() as u16,
                message: u64::from(slot.number),
                total: slot.size,
                wr_id: completion.id(),
                ..Chunk::default()
            };
            self.report_end(slot, &chunk);
        }
    }

    /// Writes the CTS entries after number `first` to the sender.
    #[inline]
    fn write_cts(&self, state: &mut State, first: u64, count: usize) -> Result<()> {
        let State { fabric: Some(fabric), mirror: Some(mirror), silent, cts_qp, .. } = state else { return Ok(()) };
        let mut left = count;
        let mut at = (first + 1) as usize % CTS_ENTRIES;
        while left > 0 {
            // A group that reaches the ring's end continues at its beginning.
            let now = left.min(CTS_ENTRIES - at);
            self.write_to_ring((fabric, *cts_qp), mirror, silent, at, (now * CTS_BYTES) as u32)?;
            at = (at + now) % CTS_ENTRIES;
            left -= now;
        }
        Ok(())
    }
}

#[cold]
fn filled_twice() -> Error {
    Error::remote("the sending side filled a receive in two ways")
}

#[cold]
fn out_of_reach() -> Error {
    Error::internal("a short message came for memory that only the device reaches")
}

impl State {
    /// Whether `count` more parts can be announced. That takes request slots, slots in the ring that the sender has
    /// read, and room for the writes. A group at the ring's end needs two writes, and a count of short messages one.
    #[inline]
    fn has_room(&mut self, count: usize) -> bool {
        let Some(fabric) = &mut self.fabric else { return true };
        self.receives.has_room(count) && fabric.qp(self.cts_qp).room() >= 3
    }

    /// Whether the messages for all these parts have arrived.
    fn holds_all(&self, parts: &[Option<Posted>]) -> bool {
        let Some(inbox) = &self.inbox else { return false };
        let mut earlier = Vec::new();
        parts.iter().flatten().all(|part| {
            let before = earlier.iter().filter(|tag| **tag == part.tag).count() as u32;
            earlier.push(part.tag);
            inbox.holds(part.tag, (self.orders.peek(part.tag) as u32).wrapping_add(before))
        })
    }
}
