//! The sending side of a connection.
//!
//! The receiver writes a CTS entry for each part of a posted receive into the [`Ring`] of this side. A send that finds
//! its entry starts in the same call. RDMA writes straight from NCCL's buffer into the receiver's, divided over the
//! queue pairs. The last write of each queue pair carries an immediate. A send without an entry waits in [`Matching`].
//! It is done when every write of it has completed, that is when the receiver's device has acknowledged all its bytes.
//!
//! A short message does not wait for an entry, as long as there is credit: it is copied into the [`Outbox`], written
//! from there, and done (`short`). When sends have waited a while, this side requests the receiver to announce its
//! posted receives. Otherwise the receiver does not announce receives that only short messages fit.
//!
//! Short parts of a group are held back until the last one is posted, or `test` is called. One doorbell then serves
//! all. Where each part fills its receive, one immediate and one completion serve all, too (a run).
//!
//! When a queue pair is lost while others work, data in doubt is resent over those ([`recovery`](super::recovery)).

mod job;
mod recovery;
mod short;

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use self::job::{End, Job, Run, hand_over};
use self::short::{Known, Short};
use super::adapter::{Adapters, Memory, Registration, own_regions};
use super::base::{Base, Parts, Side};
use super::connection::{Connection, Direction};
use super::cts::{CtsEntry, Immediate, Ring};
use super::eager::{self, EAGER_MAX, Outbox, Parcel};
use super::fabric::{Depth, Fabric, Qp};
use super::ledger::{Answer, Ledger, Sent};
use super::matching::Matching;
use super::pages::Pages;
use super::silence::Silence;
use super::stripe::{Share, Stripes};
use super::trouble::Doing;
use super::verbs::{Completion, Local, MemoryRegion, Remote, Work};
use crate::engine::backoff_timer::BackoffTimer;
use crate::engine::counters::Counters;
use crate::engine::events::Chunk;
use crate::engine::request::{Keys, SLOTS, Ticket, too_long};
use crate::nccl::net_event::SOMEWHERE;
use crate::os::error::Result;
use crate::session::silences::{CLOSE_PATIENCE, CLOSE_RECOVERY};

/// Queue depth of a sending queue pair. A message takes one request on each of its queue pairs, or two when its
/// immediate is separate. As many messages as there are request slots may be outstanding. When there is less room the
/// rest waits.
pub(crate) const DEPTH: Depth = Depth { send: 256, receive: 0, inline_bytes: INLINE };

/// Bytes that may be inline in a request, for the shortest messages, if the device accepts that many: it saves the
/// device a read of memory. With 220 bytes a message of 256 took 0.8 % more instructions, the kernel's included
/// (`benches/rdma_compare.sh --work`).
const INLINE: u32 = 512;

/// Bytes of a message's size in the receiver's table.
const SIZE: u32 = 8;

/// The longest share in bytes that is held back until the other parts of its group are posted, so that one doorbell
/// notifies the device of all. A longer one should begin at once. Testing a send releases the shares that are held
/// back, and nothing waits for a part alone, since a group is received as a whole.
const HELD_MAX: u64 = 16 << 10;

/// How long a close waits when earlier closes towards the peer process have used that up: another path may still
/// deliver.
const CLOSE_LEAST: Duration = Duration::from_millis(20);

/// The data from the peer's answer that sending needs.
pub(crate) struct Target {
    /// Whether every message is divided over all queue pairs.
    pub split: bool,
    /// Queue pairs that one message uses at least, if it is long: the larger number of ports of the two sides.
    pub ports: usize,
    /// The receiver's table of sizes.
    pub sizes: u64,
    /// Its keys, by port of the receiver.
    pub size_keys: Vec<u32>,
    /// The receiver's inbox, if it has one.
    pub inbox: Option<eager::Address>,
}

/// The memory of this side that the peer writes CTS entries into, registered.
pub(crate) struct RingMemory {
    /// Dropped first: afterwards no device writes. By adapter.
    regions: Vec<MemoryRegion>,
    /// The CTS entries.
    pub ring: Ring,
}

impl RingMemory {
    /// Registers a ring with every adapter: when a queue pair is lost, CTS entries arrive over another.
    ///
    /// # Errors
    /// When it cannot be pinned.
    pub(crate) fn new(adapters: &Adapters, ring: Ring) -> Result<Self> {
        Ok(Self { regions: own_regions(adapters, ring.pages())?, ring })
    }

    /// The keys for the receiver, by adapter.
    pub(crate) fn keys(&self) -> Vec<u32> {
        self.regions.iter().map(MemoryRegion::remote_key).collect()
    }
}

/// Sizes under way to the receiver's table, one slot for each message that can be outstanding.
struct Scratch {
    regions: Vec<MemoryRegion>,
    sizes: Pages<u64>,
}

/// The registered memory that a connection sends from, beside NCCL's. Made before the receiver is notified that the
/// connection is ready.
pub(crate) struct Stores {
    scratch: Scratch,
    /// None when the receiver has no inbox.
    outbox: Option<Outbox>,
}

impl Stores {
    /// The stores for a connection to that target.
    ///
    /// # Errors
    /// When memory cannot be pinned.
    pub(crate) fn new(adapters: &Adapters, target: &Target) -> Result<Self> {
        let sizes = Pages::zeroed(SLOTS)?;
        let regions = own_regions(adapters, &sizes)?;
        let outbox = target.inbox.map(|_| Outbox::new(adapters)).transpose()?;
        Ok(Self { scratch: Scratch { regions, sizes }, outbox })
    }
}

/// A send that has not ended.
struct Message {
    address: u64,
    length: u64,
    /// Which send with its tag it is.
    number: u32,
    /// The request.
    slot: u16,
    /// Shares that have not completed.
    left: usize,
    /// The message before this one that ends with it.
    earlier: Option<u16>,
    /// Keeps the pages pinned; none for an empty message.
    memory: Option<Arc<Registration>>,
}

/// What is changed with the state locked.
pub(crate) struct State {
    /// None once the connection has failed or is closed: then no device accesses a buffer.
    fabric: Option<Fabric>,
    ring: Option<RingMemory>,
    scratch: Scratch,
    /// None when the receiver has no inbox.
    outbox: Option<Outbox>,
    /// Free request slots.
    keys: Keys,
    known: Known,
    /// When to send the receiver a query about sends that wait.
    query_timer: BackoffTimer,
    next_cts: u32,
    /// A write from the receiver has arrived over a queue pair: its own are ready to receive.
    peer_receives: bool,
    matching: Matching<usize, CtsEntry>,
    /// Sends that wait, and are short: they may wait for credit.
    short_waiting: usize,
    stripes: Stripes,
    messages: slab::Slab<Message>,
    /// By queue pair.
    jobs: Vec<VecDeque<Job>>,
    waiting_jobs: usize,
    /// Queue pairs may hold writes back.
    holds: bool,
    run: Run,
    /// The queue pair that short messages take.
    short_qp: usize,
    /// The writes in doubt; None when the loss of a queue pair ends the connection.
    ledger: Option<Ledger>,
    /// Short messages that were lost with their queue pair, to be resent before any other.
    again: VecDeque<Parcel>,
    /// Shares that were lost with their queue pair, to be resent over another.
    orphans: Vec<recovery::Orphan>,
    silence: Silence,
}

/// A connection that sends.
pub(crate) type RdmaSend = Connection<Target>;

impl Direction for Target {
    type State = State;
    type Devices = (Option<Fabric>, Option<RingMemory>, Option<Outbox>);

    const SIDE: Side = Side::Connecting;

    fn keys(state: &State) -> &Keys {
        &state.keys
    }

    #[inline(always)]
    fn pump(conn: &RdmaSend, state: &mut State) -> Result<bool> {
        conn.pump(state)
    }

    fn devices(state: &mut State) -> Self::Devices {
        (state.fabric.take(), state.ring.take(), state.outbox.take())
    }

    fn needs(state: &State, memory: &Arc<Registration>) -> bool {
        let reads = |message: &Message| message.memory.as_ref().is_some_and(|held| Arc::ptr_eq(held, memory));
        state.messages.iter().any(|(_, message)| reads(message))
    }

    fn let_go(state: &mut State) {
        state.messages.iter_mut().for_each(|(_, message)| message.memory = None);
    }

    fn care(conn: &RdmaSend) -> (bool, Option<Instant>) {
        conn.care()
    }

    fn polled(conn: &RdmaSend) {
        conn.query_if_due();
    }

    fn deliver(conn: &RdmaSend) {
        conn.deliver();
    }

    #[cfg(test)]
    fn fabric(state: &mut State) -> Option<&mut Fabric> {
        state.fabric.as_mut()
    }
}

/// The share is the last of its message on this queue pair.
const LAST: u64 = 1 << 63;

/// The write is of a short message from the outbox.
const EAGER: u64 = 1 << 62;

/// The write tests a new queue pair.
const PROBE: u64 = 1 << 61;

/// The content of a work request's id: message, queue pair, how many entries of the work queue its completion frees,
/// and whether it is the last one of a share.
#[inline]
fn work_id(key: usize, qp: usize, entries: u32, is_last: bool) -> u64 {
    key as u64 | (qp as u64) << 16 | u64::from(entries) << 32 | if is_last { LAST } else { 0 }
}

impl RdmaSend {
    /// A connection whose queue pairs are connected.
    ///
    /// # Errors
    /// When the control thread cannot watch the socket.
    pub(crate) fn new(
        parts: Parts,
        mut fabric: Fabric,
        ring: RingMemory,
        stores: Stores,
        target: Target,
    ) -> Result<Arc<Self>> {
        let Stores { scratch, outbox } = stores;
        let qps = fabric.qps().len();
        let (base, keys) = Base::new(parts, &mut fabric, Target::SIDE);
        let ledger = base.recovers().then(|| Ledger::new(qps));
        let state = State {
            fabric: Some(fabric),
            ring: Some(ring),
            scratch,
            outbox,
            keys,
            known: Known::default(),
            query_timer: BackoffTimer::for_queries(),
            next_cts: 1,
            peer_receives: false,
            matching: Matching::new(),
            short_waiting: 0,
            stripes: Stripes::new(qps, target.ports, target.split),
            messages: slab::Slab::with_capacity(SLOTS),
            jobs: (0..qps).map(|_| VecDeque::new()).collect(),
            waiting_jobs: 0,
            holds: false,
            run: Run::default(),
            short_qp: 0,
            ledger,
            again: VecDeque::new(),
            orphans: Vec::new(),
            silence: Silence::default(),
        };
        let conn = Self::unwatched(base, target, state);
        conn.base.name_paths(conn.state().fabric.as_ref());
        conn.watch()?;
        Ok(conn)
    }

    /// Starts a send; `memory` comes with NCCL's handle of it. `None`: not now, all request slots are taken.
    ///
    /// # Errors
    /// When the memory is not registered for it, or the message is longer than its receive.
    ///
    /// # Safety
    /// `address` must be readable for `length` bytes, and stay so until the request ends, the memory is withdrawn or
    /// the connection is closed. `profiler` is null or NCCL's profiler handle of this transfer, valid until `test` has
    /// reported the end of it.
    pub(crate) unsafe fn isend(
        &self,
        address: u64,
        length: u64,
        tag: i32,
        memory: Option<(usize, &Arc<Registration>)>,
        profiler: *mut c_void,
    ) -> Result<Option<Ticket>> {
        // The completion of an earlier send may still be unread: then the connection fails once none can follow.
        if self.base.health.is_peer_done() && self.base.requests.outstanding_of(&self.state().keys) == 0 {
            self.base.leaves_early();
        }
        // As NCCL's own transports do: the call is accepted, and `test` returns the error.
        if self.base.health.is_failed() || self.base.health.is_peer_done() {
            return Ok(self.base.requests.take_with(&mut self.state().keys, 1));
        }
        let pinned;
        let mut known = None;
        let memory = match memory {
            Some((handle, memory)) => {
                memory.check(&self.base.adapters, address, length)?;
                known = is_short(length, Some(memory)).then_some((handle, memory));
                Some(memory)
            }
            None => {
                pinned = self.base.pin(address, length)?;
                pinned.as_ref()
            }
        };
        let mut state = self.state();
        if let Some((handle, memory)) = known {
            state.known.add(handle, memory);
        }
        let Some(ticket) = self.base.requests.take_with(&mut state.keys, 1) else { return Ok(None) };
        self.base.events.follow(ticket.slot, 0, profiler);
        let begun = self.begin(&mut state, ticket.slot, (address, length), tag, memory);
        // SAFETY: inside isend.
        unsafe { self.started(state, ticket, begun) }
    }

    /// The remaining work when a send has started, or could not.
    ///
    /// # Safety
    /// Inside `isend`.
    #[inline(always)]
    unsafe fn started(
        &self,
        state: MutexGuard<'_, State>,
        ticket: Ticket,
        begun: Result<()>,
    ) -> Result<Option<Ticket>> {
        if let Err(error) = begun {
            self.end(state, error);
            // SAFETY: inside isend.
            unsafe { self.base.events.abandon(ticket.slot) };
            self.base.requests.cancel(ticket);
            return self.base.health.check().map(|()| None);
        }
        drop(state);
        self.base.attend();
        if self.base.events.has_sink() {
            // SAFETY: inside isend.
            unsafe { self.base.events.settle(&self.base.requests, ticket) };
        }
        Ok(Some(ticket))
    }

    /// Posts as much of a new message as can be sent.
    #[inline]
    fn begin(
        &self,
        state: &mut State,
        slot: u16,
        (address, length): (u64, u64),
        tag: i32,
        memory: Option<&Arc<Registration>>,
    ) -> Result<()> {
        self.take_cts(state)?;
        let (number, cts) = state.matching.send(tag);
        if cts.is_none() && is_short(length, memory) && state.may_go_eagerly() {
            return self.send_eagerly(state, Short { address, length, number, slot }, tag);
        }
        let memory = memory.cloned();
        let key = state.messages.insert(Message { address, length, number, slot, left: 0, earlier: None, memory });
        match cts {
            Some(cts) => self.launch(state, key, &cts),
            None => {
                state.short_waiting += usize::from(state.messages[key].is_short());
                state.matching.wait(tag, number, key);
                Counters::count(&self.base.counters.stalls_receiver, 1);
                Ok(())
            }
        }
    }

    /// Waits until the receiver's device has acknowledged the short messages, which were already reported done. Waits
    /// longer if a queue pair is lost at this moment. All closes towards a peer process that does not answer share this
    /// time.
    fn deliver(&self) {
        let (start, label) = (Instant::now(), &self.base.peer.label);
        let is_delivered = || self.state().outbox.as_ref().is_none_or(Outbox::is_delivered);
        let since = self.base.net.silences().since(label, start).unwrap_or(start);
        let mut has_waited = false;
        loop {
            let owes = self.base.recovers() && self.care().0;
            self.poll_once();
            if self.base.health.is_failed() {
                return;
            }
            if is_delivered() {
                if has_waited {
                    self.base.net.silences().answered(label);
                }
                return;
            }
            let recovery = self.base.config().reconnect_timeout.clamp(CLOSE_PATIENCE, CLOSE_RECOVERY);
            let patience = if owes { recovery } else { CLOSE_PATIENCE };
            if Instant::now() >= (since + patience).max(start + CLOSE_LEAST) {
                self.base.net.silences().unanswered(label, start, Instant::now());
                return;
            }
            has_waited = true;
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Takes CTS entries and completions, and posts the writes that waited for them.
    #[inline(always)]
    fn pump(&self, state: &mut State) -> Result<bool> {
        let mut moved = false;
        if state.matching.waiting_sends() > 0 {
            let before = state.next_cts;
            self.take_cts(state)?;
            moved = state.next_cts != before;
        }
        let State { fabric: Some(fabric), messages, outbox, ledger, .. } = state else { return Ok(false) };
        moved |= fabric.poll(|qps, completion| self.completed(qps, messages, (outbox, ledger), completion))?;
        if state.short_waiting > 0 {
            moved |= self.release(state)?;
        }
        if state.waiting_jobs > 0 {
            self.post_waiting(state)?;
        }
        if state.fabric.as_ref().is_some_and(Fabric::is_alarmed) {
            self.tend(state)?;
        }
        if std::mem::take(&mut state.holds)
            && let Some(fabric) = &mut state.fabric
        {
            state.run.count = 0;
            fabric.release()?;
        }
        Ok(moved)
    }

    /// Takes the CTS entries that have arrived, and starts the sends that waited for them.
    #[inline]
    fn take_cts(&self, state: &mut State) -> Result<()> {
        if state.has_cts() { self.take_cts_entries_that_came(state) } else { Ok(()) }
    }

    fn take_cts_entries_that_came(&self, state: &mut State) -> Result<()> {
        loop {
            let Some(ring) = &state.ring else { return Ok(()) };
            let Some(cts) = ring.ring.read(state.next_cts) else { return Ok(()) };
            state.next_cts = state.next_cts.wrapping_add(1);
            if let Some(outbox) = &mut state.outbox {
                outbox.returned(cts.handed_on);
            }
            if let Some((key, cts)) = state.matching.cts(cts.tag, cts.order, cts) {
                state.short_waiting -= usize::from(state.messages[key].is_short());
                self.launch(state, key, &cts)?;
            }
        }
    }

    /// Sends short messages that waited for credit, when there is some.
    #[cold]
    fn release(&self, state: &mut State) -> Result<bool> {
        if !state.peer_receives() {
            return Ok(false);
        }
        let State {
            fabric: Some(fabric),
            ring: Some(ring),
            outbox: Some(outbox),
            matching,
            messages,
            again,
            short_qp,
            ..
        } = state
        else {
            return Ok(false);
        };
        if let Some(credit) = ring.ring.credit() {
            outbox.returned(credit as u16);
        }
        let mut room = if again.is_empty() { outbox.room().min(fabric.qp(*short_qp).room() as usize) } else { 0 };
        let released = matching.release(|key| {
            let may = room > 0 && messages[*key].is_short();
            room -= usize::from(may);
            may
        });
        let moved = !released.is_empty();
        state.short_waiting -= released.len();
        for (tag, _, key) in released {
            let message = state.messages.remove(key);
            let Message { address, length, number, slot, .. } = message;
            self.send_eagerly(state, Short { address, length, number, slot }, tag)?;
        }
        Ok(moved)
    }

    /// The control thread: sends the receiver a query when sends have waited a while, or leaves that to NCCL's thread
    /// if it is active.
    fn query_if_due(&self) {
        match self.try_state() {
            Some(mut state) => self.query_receiver(&mut state),
            None => self.base.alarm.raise(),
        }
    }

    /// Sends may wait for receives that the receiver has not announced.
    fn query_receiver(&self, state: &mut State) {
        if state.outbox.is_none() || state.matching.waiting_sends() == 0 {
            state.query_timer.reset();
        } else if state.query_timer.is_due(Instant::now()) {
            self.base.query(state.next_cts.wrapping_sub(1));
        }
    }

    /// A send has met its CTS entry.
    #[inline]
    fn launch(&self, state: &mut State, key: usize, cts: &CtsEntry) -> Result<()> {
        let State { fabric: Some(fabric), messages, stripes, jobs, waiting_jobs, scratch, holds, run, ledger, .. } =
            state
        else {
            return Ok(());
        };
        let message = &mut messages[key];
        if message.length > cts.size {
            return Err(too_long(message.length, cts.size, cts.tag));
        }
        let shares = stripes.share(message.length);
        let count = shares.pieces();
        message.left = count;
        // The receiver adds up the lengths of the writes with immediates; if there are others, it needs the size.
        let is_reported =
            shares.longest() > fabric.longest_write || fabric.apart_above.is_some_and(|above| message.length > above);
        let immediate = Immediate {
            slot: cts.slot,
            generation: cts.generation,
            shares: count as u8,
            is_reported,
            is_eager: false,
            is_run: false,
        }
        .encode();
        if is_reported {
            scratch.sizes[key] = message.length;
        }
        if let Some(ledger) = ledger {
            ledger.answer(key, Answer { cts: *cts, immediate, is_reported });
        }
        if self.base.events.has_sink() {
            self.base.events.ready(message.slot, 0);
        }
        if count == 1 && !is_reported && !self.base.events.has_sink() {
            // One write on one queue pair, the usual case: no state is needed for it.
            let at = stripes.qp(shares.first_qp());
            let qp = fabric.qp(at);
            if jobs[at].is_empty() && qp.room() > 0 {
                let local_key = message.memory.as_ref().map_or(0, |memory| memory.local_key(qp.adapter));
                let write = Work {
                    id: work_id(key, at, 1, true),
                    local: Local { address: message.address, length: message.length as u32, key: local_key },
                    remote: Remote { address: cts.address, key: cts.keys[qp.peer_port] },
                    immediate: Some(immediate),
                    is_read: false,
                    is_inline: false,
                    is_signaled: true,
                };
                let end = End {
                    key,
                    qp: at,
                    cts: cts.number,
                    is_held: cts.has_more && message.length <= HELD_MAX,
                    fills: message.length == cts.size,
                };
                Counters::count(&self.base.counters.chunks, 1);
                hand_over(qp, messages, (holds, run, ledger), &end, write)?;
                if let Some(ledger) = ledger {
                    let share = Share { qp: at, offset: 0, length: messages[key].length };
                    ledger.sent(at, Sent::Share { key: key as u16, share });
                }
                return Ok(());
            }
        }
        for (index, share) in shares.enumerate() {
            let share = Share { qp: stripes.qp(share.qp), ..share };
            let key_there = cts.keys[fabric.qp(share.qp).peer_port];
            let mut job = Job::new(key, share, cts, key_there, immediate, is_reported && index == 0);
            let waiting = &mut jobs[share.qp];
            if !waiting.is_empty() || !self.post(fabric, messages, scratch, (holds, run, ledger), &mut job)? {
                waiting.push_back(job);
                *waiting_jobs += 1;
            }
        }
        Ok(())
    }

    /// Posts as much of a share as its queue pair has room for; returns whether that was all.
    #[inline]
    fn post(
        &self,
        fabric: &mut Fabric,
        messages: &mut slab::Slab<Message>,
        scratch: &Scratch,
        (holds, run, ledger): (&mut bool, &mut Run, &mut Option<Ledger>),
        job: &mut Job,
    ) -> Result<bool> {
        let longest = fabric.longest_write;
        let apart = fabric.apart_above;
        let qp = fabric.qp(job.share.qp);
        let Message { address, length, memory, .. } = &messages[job.key];
        let (address, length) = (*address, *length);
        let is_apart = apart.is_some_and(|above| length > above);
        let local_key = memory.as_ref().map_or(0, |memory| memory.local_key(qp.adapter));
        loop {
            let rest = job.share.length - job.posted;
            let bytes = rest.min(longest);
            let at = job.share.offset + job.posted;
            let is_end = bytes == rest;
            // The end of a share whose immediate is separate, perhaps with the size, takes two entries.
            let entries = 1 + u32::from(is_end && (job.tells || is_apart));
            if qp.room() < entries {
                return Ok(false);
            }
            if job.posted == 0 && self.base.events.has_sink() {
                let entries = 1 + u32::from(job.tells || is_apart);
                self.report_share(&messages[job.key], job, entries, false);
            }
            let local = Local { address: address + at, length: bytes as u32, key: local_key };
            let write = Work {
                id: work_id(job.key, job.share.qp, entries, is_end),
                local,
                remote: Remote { address: job.to.address + at, key: job.to.key },
                immediate: is_end.then_some(job.immediate),
                is_read: false,
                is_inline: false,
                is_signaled: true,
            };
            if entries == 1 {
                let end = End {
                    key: job.key,
                    qp: job.share.qp,
                    cts: job.cts,
                    is_held: job.has_more && job.share.length <= HELD_MAX,
                    // The end of a longer share ends only itself.
                    fills: is_end && job.posted == 0 && job.fills(length),
                };
                hand_over(qp, messages, (holds, run, ledger), &end, write)?;
            } else {
                self.post_end(qp, scratch, job, write)?;
            }
            Counters::count(&self.base.counters.chunks, 1);
            if is_end {
                if let Some(ledger) = ledger {
                    ledger.sent(job.share.qp, Sent::Share { key: job.key as u16, share: job.share });
                }
                return Ok(true);
            }
            job.posted += bytes;
        }
    }

    /// The end of a share whose immediate is separate: the bytes, then the immediate, with the message's size if this
    /// share carries it.
    fn post_end(&self, qp: &mut Qp, scratch: &Scratch, job: &Job, write: Work) -> Result<()> {
        let bytes = Work { is_signaled: false, immediate: None, ..write };
        let end = if job.tells {
            let address = &raw const scratch.sizes[job.key] as u64;
            let local = Local { address, length: SIZE, key: scratch.regions[qp.adapter].local_key() };
            let address = self.target.sizes + u64::from(SIZE) * u64::from(job.slot);
            let key = self.target.size_keys.get(qp.peer_port).copied().unwrap_or(0);
            Work { local, remote: Remote { address, key }, is_inline: SIZE <= qp.inline_bytes(), ..write }
        } else {
            Work { local: Local { length: 0, ..write.local }, ..write }
        };
        // SAFETY: as in `post`; the slot in `scratch` is this message's until its last completion.
        unsafe { qp.post(&[bytes, end]) }
    }

    /// Notes for the profiler that a queue pair takes its share, perhaps `again`. The work request is the share's last,
    /// whose completion ends it and frees this many entries.
    #[cold]
    fn report_share(&self, message: &Message, job: &Job, entries: u32, again: bool) {
        let Share { qp, offset, length } = job.share;
        let chunk = Chunk {
            offset,
            length,
            path: qp as u16,
            message: u64::from(message.number),
            total: message.length,
            again,
            wr_id: work_id(job.key, qp, entries, true),
            ..Chunk::default()
        };
        self.base.events.chunk_begins(message.slot, 0, &chunk);
    }

    fn post_waiting(&self, state: &mut State) -> Result<()> {
        let State { fabric: Some(fabric), messages, jobs, waiting_jobs, scratch, holds, run, ledger, .. } = state
        else {
            return Ok(());
        };
        for waiting in jobs {
            while let Some(job) = waiting.front_mut() {
                if !self.post(fabric, messages, scratch, (holds, run, ledger), job)? {
                    break;
                }
                waiting.pop_front();
                *waiting_jobs -= 1;
            }
        }
        Ok(())
    }

    /// A write has completed, or failed. Out of line, so that a poll which finds nothing is short.
    #[inline(never)]
    fn completed(
        &self,
        qps: &mut [Qp],
        messages: &mut slab::Slab<Message>,
        (outbox, ledger): (&mut Option<Outbox>, &mut Option<Ledger>),
        completion: &Completion,
    ) -> Result<()> {
        let id = completion.id();
        let index = (id >> 16) as u16 as usize;
        let qp = &mut qps[index];
        if !qp.is_up() || !qp.is_of_this_epoch(completion) {
            // The receiver has reported its result, or will.
            return if qp.is_returning() { self.probed(qp, completion) } else { Ok(()) };
        }
        if !completion.is_ok() {
            return self.base.broken(qp, completion, Doing::Sending);
        }
        qp.finished((id >> 32) as u32 & 0xff);
        if let Some(ledger) = ledger
            && id & (EAGER | LAST) != 0
        {
            ledger.completed(index);
        }
        if id & EAGER != 0 {
            if let Some(outbox) = outbox {
                outbox.completed();
            }
            return Ok(());
        }
        if id & LAST == 0 {
            return Ok(());
        }
        let mut earlier = self.ended(messages, id as u16, index as u16);
        while let Some(key) = earlier {
            qp.finished(1);
            earlier = self.ended(messages, key, index as u16);
        }
        Ok(())
    }

    /// A share of a message has completed. Returns the message before it that has ended with it, if there is one.
    #[inline]
    fn ended(&self, messages: &mut slab::Slab<Message>, key: u16, path: u16) -> Option<u16> {
        let message = &mut messages[usize::from(key)];
        if self.base.events.has_sink() {
            self.base.events.chunk_ends(message.slot, 0, path, SOMEWHERE);
        }
        let earlier = message.earlier.take();
        message.left -= 1;
        if message.left == 0 {
            let (slot, length) = (message.slot, message.length);
            messages.remove(usize::from(key));
            Counters::count(&self.base.counters.messages, 1);
            Counters::count(&self.base.counters.bytes, length);
            self.base.requests.complete_part(slot, 0, length);
        }
        earlier
    }
}

impl Message {
    /// Whether it may be copied and sent without a CTS entry.
    #[inline]
    fn is_short(&self) -> bool {
        is_short(self.length, self.memory.as_ref())
    }
}

/// Whether this many bytes of such memory may be copied and sent without a CTS entry.
#[inline]
fn is_short(length: u64, memory: Option<&Arc<Registration>>) -> bool {
    length <= EAGER_MAX && memory.is_none_or(|memory| memory.kind == Memory::Host)
}

impl State {
    /// Whether the next CTS entry seems to have arrived.
    #[inline(always)]
    fn has_cts(&self) -> bool {
        let Some(ring) = &self.ring else { return false };
        ring.ring.has(self.next_cts)
    }

    /// Whether the receiver's queue pairs are known to receive. A write that arrives before is dropped, and the device
    /// retransmits it only after `NCCL_IB_TIMEOUT`, four seconds. The receiver's first count, or its first CTS entry,
    /// shows that they do.
    #[inline(always)]
    fn peer_receives(&mut self) -> bool {
        self.peer_receives || self.receives_yet()
    }

    #[cold]
    fn receives_yet(&mut self) -> bool {
        let says = |ring: &RingMemory| ring.ring.credit().is_some();
        self.peer_receives = self.next_cts != 1 || self.ring.as_ref().is_some_and(says);
        self.peer_receives
    }

    /// Whether a short message may go without a CTS entry.
    #[inline(always)]
    fn may_go_eagerly(&mut self) -> bool {
        if !self.peer_receives() {
            return false;
        }
        let State { fabric: Some(fabric), outbox: Some(outbox), ring, short_qp, again, .. } = self else {
            return false;
        };
        if fabric.qp(*short_qp).room() == 0 || !again.is_empty() {
            return false;
        }
        outbox.has_room() || {
            let credit = ring.as_ref().and_then(|ring| ring.ring.credit());
            credit.is_some_and(|credit| outbox.returned(credit as u16)) && outbox.has_room()
        }
    }
}
