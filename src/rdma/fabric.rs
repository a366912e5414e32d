//! The verbs objects of one connection: its queue pairs and the completion queues to which they report.
//!
//! Queue pair l of a connection joins local adapter l modulo the number of local adapters with the peer's port l modulo
//! the number of the peer's. There is one completion queue for each local adapter.
//!
//! # Credit
//!
//! A completion queue that overruns ends all its queue pairs. So each queue has an entry for everything that can be in
//! the queues of its queue pairs at one time. [`Qp::room`] never allows more requests in a sending queue than it was
//! made for, and receives are posted again only as they are used up.

use std::mem::MaybeUninit;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::{Arc, Once};
use std::time::Instant;

use super::adapter::{Adapter, Adapters};
use super::alarm::Alarm;
use super::gid;
use super::outage::{QpState, Trouble, patience, pause};
use super::record::{PortRecord, QpRecord, Record, VERSION};
use super::relapse::Relapses;
use super::relink::{Apart, Linked, Plan};
use super::stripe::MAX_QPS;
use super::trouble::Ends;
use super::verbs::{
    Capacity, Completion, CompletionQueue, Ece, LinkLayer, QueuePair, QueuePairOptions, Refused, Route, Timeouts, Work,
};
use crate::engine::events::{Carrier, Path};
use crate::engine::request::MAX_PARTS;
use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::os::log::NET;
use crate::session::handshake::nonce;

/// A queue pair and what is in its sending queue.
pub(crate) struct Qp {
    /// None once the queue pair is lost: its device then does nothing for it. Also None when it has refused a work
    /// request.
    pair: Option<QueuePair>,
    /// A queue pair that has refused a work request and must be given up. Nothing more is posted on it: the other side
    /// would mistake a later request for the refused one.
    refusing: Option<QueuePair>,
    /// A new queue pair that is being connected.
    apart: Option<Apart>,
    /// It could not be stopped yet.
    is_running: bool,
    /// Its state; see [`recovery`](super::recovery).
    pub(super) state: QpState,
    /// A failure on it that must still be handled.
    pub(super) trouble: Option<Trouble>,
    /// Shared by all queue pairs.
    alarm: Alarm,
    /// A failure is kept in `trouble`, because the connection can continue without this queue pair.
    pub(super) recovers: bool,
    /// Receives that are in its queue.
    pub(super) receives: u32,
    /// Immediates that were received on it.
    pub(super) arrived: u64,
    /// The other side has ended its queue pair, having received this many immediates.
    pub(super) peer: Option<u64>,
    /// The epoch: how many queue pairs with this index there were before the present one.
    pub(super) epoch: u16,
    /// The first write over a new queue pair, of no bytes, was acknowledged (sender) or has arrived (receiver).
    pub(super) proven: bool,
    /// When it is lost: when to try again to replace it.
    pub(super) next_try: Option<Instant>,
    /// How many attempts were made since.
    pub(super) tries: u32,
    /// Whether it is lost again and again.
    pub(super) relapses: Relapses,
    inline_bytes: u32,
    /// The index of its adapter in this side's device.
    pub adapter: usize,
    /// The index of the peer's port in the peer's device.
    pub peer_port: usize,
    first_packet: u32,
    linked: Linked,
    /// Work requests that may still be posted.
    room: u32,
    /// Completions of work requests, in total.
    done: u64,
    /// Work requests that are posted with the next one.
    held: Vec<Work>,
    ends: Ends,
}

/// The most work requests that are held back: as many as a group has parts.
const MOST_HELD: usize = MAX_PARTS;

/// All queue pairs of a connection. Dropping it ends the queue pairs: afterwards no device accesses memory for them.
pub(crate) struct Fabric {
    pub(super) qps: Vec<Qp>,
    /// All queue pairs are lost: since when, and why.
    pub(super) without: Option<(Instant, Error)>,
    /// The parameters for further queue pairs.
    depth: Depth,
    /// The peer's ports to which they lead.
    ports: Vec<PortRecord>,
    class: Class,
    alarm: Alarm,
    queues: Vec<CompletionQueue>,
    /// The longest write in bytes that both sides support: a multiple of 128.
    pub longest_write: u64,
    /// Whether the end of a message longer than this many bytes needs a write of its own, because the fabric may
    /// reorder packets of a queue pair.
    pub apart_above: Option<u64>,
}

/// How deep the queues of each queue pair are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Depth {
    /// Work requests of the sending queue.
    pub send: u32,
    /// Receives.
    pub receive: u32,
    /// Bytes that may travel inside a work request.
    pub inline_bytes: u32,
}

/// The class of the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    /// The traffic class: on Ethernet the whole ToS byte.
    pub traffic: u8,
    /// The service level.
    pub service_level: u8,
}

impl Class {
    /// The traffic class from the sending side's configuration and communicator; the configuration wins.
    pub(crate) fn new(config: &Config, communicator: Option<u8>) -> Self {
        let set = |number: i64| u8::try_from(number).ok();
        let traffic = set(config.ib_tc.0).or(communicator).unwrap_or(0);
        let service_level = set(config.ib_sl.0).or(communicator).unwrap_or(0);
        Self { traffic, service_level }
    }

    /// The traffic class of the receiving side's queue pairs, which send CTS entries and acknowledge data: the sender's
    /// class, as in NCCL, unless the configuration sets another one.
    pub(crate) fn of_receiver(config: &Config, sender: Self) -> Self {
        Self { traffic: u8::try_from(config.ib_fifo_tc.0).unwrap_or(sender.traffic), ..sender }
    }
}

/// This side's description of its ports.
pub(crate) fn ports(adapters: &Adapters) -> Vec<PortRecord> {
    let record = |open: &super::devices::OpenPort| PortRecord {
        gid: open.gid.to_vec(),
        lid: u32::from(open.facts.lid),
        mtu: open.facts.active_mtu,
        is_ethernet: open.port.link_layer == LinkLayer::Ethernet,
        max_message: open.facts.max_message_bytes,
        name: open.port.name(),
    };
    adapters.iter().map(|adapter| record(&adapter.open)).collect()
}

impl Fabric {
    /// `qps` queue pairs, bound to their ports but not connected.
    ///
    /// # Errors
    /// When a device has no more, or none so large.
    pub(crate) fn new(
        adapters: &Adapters,
        qps: usize,
        depth: Depth,
        config: &Config,
        peer: &[PortRecord],
    ) -> Result<Self> {
        let most = adapters.len().max(peer.len()).max(1);
        if qps == 0 || qps > MAX_QPS || !qps.is_multiple_of(most) || peer.is_empty() {
            return Err(Error::remote(format!("the peer asks for {qps} queue pairs over {} ports", peer.len())));
        }
        let per_adapter = u32::try_from(qps.div_ceil(adapters.len())).unwrap_or(u32::MAX);
        // Receives must all fit, since the peer relies on them; sends wait when there is less room.
        let mut send = depth.send;
        for adapter in &**adapters {
            let facts = adapter.open.context.facts()?;
            send = send.min(facts.max_qp_wr).min((facts.max_cqe / per_adapter).saturating_sub(depth.receive)).max(4);
        }
        let depth = Depth { send, ..depth };
        let queue = |adapter: &Arc<Adapter>| {
            CompletionQueue::new(&adapter.open.context, per_adapter * (depth.send + depth.receive))
        };
        let queues = adapters.iter().map(queue).collect::<Result<Vec<_>>>()?;
        let alarm = Alarm::default();
        let qp = |index: usize| -> Result<Qp> {
            let (at, peer_port) = (index % adapters.len(), index % peer.len());
            let adapter = &adapters[at];
            let (pair, first_packet) = queue_pair(adapter, &queues[at], depth, config)?;
            let ends =
                Ends { pair: pair.number(), peer_pair: 0, gid: adapter.open.gid, peer_gid: peer[peer_port].gid() };
            Ok(Qp {
                inline_bytes: pair.capacity().inline_bytes,
                pair: Some(pair),
                refusing: None,
                apart: None,
                is_running: false,
                state: QpState::Up,
                trouble: None,
                alarm: alarm.clone(),
                recovers: false,
                receives: 0,
                arrived: 0,
                peer: None,
                epoch: 0,
                proven: false,
                next_try: None,
                tries: 0,
                relapses: Relapses::default(),
                adapter: at,
                peer_port,
                first_packet,
                linked: Linked::BOUND,
                room: depth.send,
                done: 0,
                held: Vec::new(),
                ends,
            })
        };
        let qps = (0..qps).map(qp).collect::<Result<Vec<_>>>()?;
        let longest = adapters.iter().map(|adapter| adapter.open.facts.max_message_bytes);
        let longest = longest.chain(peer.iter().map(|port| port.max_message)).min().unwrap_or(0);
        let is_infiniband = peer.iter().any(|port| !port.is_ethernet);
        let reorders = match config.ib_adaptive_routing.0 {
            -2 => is_infiniband,
            other => other == 1,
        };
        Ok(Self {
            qps,
            without: None,
            depth,
            ports: peer.to_vec(),
            class: Class { traffic: 0, service_level: 0 },
            alarm,
            queues,
            longest_write: u64::from(longest.min(1 << 30)) & !127,
            apart_above: reorders.then(|| u64::try_from(config.ib_ar_threshold.0).unwrap_or(0)),
        })
    }

    /// The data about the queue pairs that the peer needs.
    pub(crate) fn records(&self, config: &Config) -> Vec<QpRecord> {
        self.qps.iter().filter_map(|qp| qp.record(config)).collect()
    }

    /// Connects every queue pair to the one of the same number at the peer. After a failure it may be called again, and
    /// continues with the queue pair that failed.
    ///
    /// # Errors
    /// When the peer has another number of queue pairs, or a device cannot reach its peer.
    pub(crate) fn connect(
        &mut self,
        adapters: &Adapters,
        qps: &[QpRecord],
        class: Class,
        config: &Config,
    ) -> std::result::Result<(), Refused> {
        if qps.len() != self.qps.len() {
            let what = format!("the peer has {} queue pairs, not {}", qps.len(), self.qps.len());
            return Err(Error::remote(what).into());
        }
        self.class = class;
        let mut pairs = self.qps.iter_mut().zip(qps);
        pairs.try_for_each(|(qp, record)| qp.connect(adapters, &self.ports, record, class, config))
    }

    /// Makes a replacement for a queue pair that is lost.
    ///
    /// # Errors
    /// When the device has none, or its port is down.
    pub(super) fn renew(&mut self, index: usize, adapters: &Adapters, config: &Config) -> Result<()> {
        let qp = &mut self.qps[index];
        let (pair, first_packet) = queue_pair(&adapters[qp.adapter], &self.queues[qp.adapter], self.depth, config)?;
        qp.ends.pair = pair.number();
        qp.inline_bytes = pair.capacity().inline_bytes;
        // No room before it is verified: until then only the probe completes.
        (qp.pair, qp.first_packet, qp.room) = (Some(pair), first_packet, 0);
        qp.linked = Linked::BOUND;
        (qp.state, qp.trouble, qp.peer) = (QpState::Returning, None, None);
        qp.proven = false;
        (qp.receives, qp.arrived, qp.epoch) = (0, 0, qp.epoch.wrapping_add(1));
        qp.next_try = None;
        Ok(())
    }

    /// The replacement of a queue pair is verified: it carries messages.
    pub(super) fn is_back(&mut self, index: usize) {
        let qp = &mut self.qps[index];
        (qp.state, qp.room, qp.tries) = (QpState::Up, self.depth.send, 0);
        qp.relapses.is_back(Instant::now());
    }

    /// The attempt to replace a queue pair has failed, and the peer knows. Its number is not used again.
    pub(super) fn abandon(&mut self, index: usize, epoch: u16) {
        let qp = &mut self.qps[index];
        qp.give_up(Instant::now());
        qp.epoch = epoch;
    }

    /// Connects the replacement of a queue pair in a separate thread; see [`Qp::take_connected`].
    ///
    /// # Errors
    /// When the peer's port is of another network.
    pub(super) fn reconnect(
        &mut self,
        index: usize,
        adapters: &Adapters,
        record: &QpRecord,
        config: &Config,
    ) -> Result<()> {
        let qp = &mut self.qps[index];
        let plan = qp.plan(adapters, &self.ports, record, self.class, config)?;
        qp.ends.peer_pair = record.number;
        qp.apart = qp.pair.take().map(|pair| Apart::start(pair, plan));
        Ok(())
    }

    /// The queue pairs.
    pub(crate) fn qps(&self) -> &[Qp] {
        &self.qps
    }

    /// The queues that asynchronous events may name, each with the index of its adapter.
    pub(crate) fn elements(&self) -> impl Iterator<Item = (usize, u64)> {
        let pairs = self.qps.iter().filter_map(|qp| Some((qp.adapter, qp.element()?)));
        pairs.chain(self.queues.iter().map(CompletionQueue::element).enumerate())
    }

    /// Work requests on a queue pair that are not finished.
    pub(crate) fn outstanding(&self, index: usize) -> u32 {
        self.depth.send.saturating_sub(self.qps[index].room)
    }

    /// One queue pair.
    #[inline]
    pub(crate) fn qp(&mut self, index: usize) -> &mut Qp {
        &mut self.qps[index]
    }

    /// Posts the work requests that were held back on all queue pairs.
    ///
    /// # Errors
    /// As [`Qp::post`].
    #[inline]
    pub(crate) fn release(&mut self) -> Result<()> {
        self.qps.iter_mut().try_for_each(Qp::release)
    }

    /// From now on the connection does without a queue pair that is lost.
    pub(crate) fn recover(&mut self) {
        self.qps.iter_mut().for_each(|qp| qp.recovers = true);
    }

    /// The alarm, for a thread that has not locked the connection's state.
    pub(crate) fn alarm(&self) -> Alarm {
        self.alarm.clone()
    }

    /// Whether a queue pair needs recovery.
    #[inline]
    pub(crate) fn is_alarmed(&self) -> bool {
        self.alarm.is_raised()
    }

    /// A queue pair needs recovery.
    pub(super) fn raise_alarm(&self) {
        self.alarm.raise();
    }

    /// The notified thread checks now. Called before it checks, so that an alarm in the meantime counts.
    pub(super) fn answer_alarm(&self) {
        self.alarm.answer();
    }

    /// The queue pairs that a failure of this queue affects: its own one, or all that report to a completion
    /// queue.
    pub(super) fn qps_of(&mut self, element: u64) -> impl Iterator<Item = &mut Qp> {
        let queue = self.queues.iter().position(|queue| queue.element() == element);
        self.qps.iter_mut().filter(move |qp| qp.element() == Some(element) || Some(qp.adapter) == queue)
    }

    /// The numbers of the queue pairs that carry messages.
    pub(crate) fn living(&self) -> impl Iterator<Item = usize> {
        self.qps.iter().enumerate().filter(|(_, qp)| qp.is_up()).map(|(index, _)| index)
    }

    /// All queue pairs.
    #[inline]
    pub(crate) fn qps_mut(&mut self) -> &mut [Qp] {
        &mut self.qps
    }

    /// Passes every available completion to `take`. Returns whether there were any.
    ///
    /// # Errors
    /// When a queue is broken, or the error of `take`.
    #[inline]
    pub(crate) fn poll(&mut self, mut take: impl FnMut(&mut [Qp], &Completion) -> Result<()>) -> Result<bool> {
        let mut any = false;
        for queue in &self.queues {
            loop {
                let mut room = [const { MaybeUninit::uninit() }; BATCH];
                let done = queue.poll(&mut room)?;
                for completion in done {
                    take(&mut self.qps, completion)?;
                }
                any |= !done.is_empty();
                if done.len() < BATCH {
                    break;
                }
            }
        }
        Ok(any)
    }

    /// An answer of this side to the peer's first record: everything but the memory.
    pub(crate) fn record(&self, adapters: &Adapters, config: &Config) -> Record {
        Record { version: VERSION, ports: ports(adapters), qps: self.records(config), ..Record::default() }
    }
}

/// A queue pair that is bound to its port, and the number of its first packet.
fn queue_pair(adapter: &Adapter, queue: &CompletionQueue, depth: Depth, config: &Config) -> Result<(QueuePair, u32)> {
    let Depth { send, receive, inline_bytes } = depth;
    let wanted = Capacity { send, receive: receive.max(1), inline_bytes };
    let make = |inline_bytes| QueuePair::new(&adapter.domain, queue, queue, Capacity { inline_bytes, ..wanted });
    // Devices differ in how many bytes they accept inline, and only an attempt shows the limit.
    let fewer = [220, 96, 64, 0].into_iter().filter(|fewer| *fewer < inline_bytes);
    let pair = fewer.fold(make(inline_bytes), |made, fewer| made.or_else(|_| make(fewer)))?;
    let pkey_index = u16::try_from(config.ib_pkey.0).unwrap_or(0);
    pair.prepare(QueuePairOptions { port: adapter.open.port.number, pkey_index })?;
    let random = nonce()?;
    Ok((pair, u32::from_le_bytes([random[0], random[1], random[2], 0])))
}

/// How a queue pair of this adapter reaches the peer's queue pair on that port.
fn route(adapter: &Adapter, port: &PortRecord, record: &QpRecord, class: Class) -> Route {
    let open = &adapter.open;
    let peer_gid = port.gid();
    let addressing = gid::addressing(&open.gid, &peer_gid, u16::try_from(port.lid).unwrap_or(0), open.facts.needs_grh);
    if addressing.is_doubtful && open.port.link_layer == LinkLayer::InfiniBand {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            tracing::warn!(
                target: NET,
                "{} is in another InfiniBand subnet than {}, and its GID {} has no forwarding identifier (FLID); trying its LID {}",
                port.name,
                open.port.name(),
                gid::display(&peer_gid),
                port.lid
            );
        });
    }
    Route {
        port: open.port.number,
        link_layer: open.port.link_layer,
        peer_number: record.number,
        peer_first_packet: record.first_packet & 0xff_ffff,
        mtu: open.facts.active_mtu.min(port.mtu),
        gid_index: u8::try_from(adapter.gid_index()).unwrap_or(0),
        peer_gid,
        lid: addressing.lid,
        is_global: addressing.is_global,
        service_level: class.service_level,
        traffic_class: class.traffic,
    }
}

/// Completions taken in one call.
const BATCH: usize = 16;

impl Qp {
    /// Work requests that may still be posted.
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        self.room
    }

    /// This many work requests are finished.
    #[inline]
    pub(crate) fn finished(&mut self, count: u32) {
        self.room += count;
        self.done += 1;
    }

    /// How often work requests were finished, in all.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// Posts work requests; there must be room for them.
    ///
    /// # Errors
    /// When the device refuses, which ends the connection.
    ///
    /// # Safety
    /// As [`QueuePair::post`].
    #[inline]
    pub(crate) unsafe fn post(&mut self, list: &[Work]) -> Result<()> {
        debug_assert!(self.room as usize >= list.len());
        self.room -= list.len() as u32;
        if !self.held.is_empty() {
            self.held.extend_from_slice(list);
            return self.release();
        }
        let Some(pair) = &self.pair else { return Ok(()) };
        // SAFETY: the caller keeps the promise about the memory.
        match unsafe { pair.post(list) } {
            Ok(()) => Ok(()),
            Err((_, error)) => self.refused(error),
        }
    }

    /// The device has refused work requests. Which of them it accepted is in doubt, like everything on a lost queue
    /// pair.
    ///
    /// # Errors
    /// The refusal, when the connection needs this queue pair.
    #[cold]
    fn refused(&mut self, error: Error) -> Result<()> {
        if !self.recovers {
            return Err(error);
        }
        self.refusing = self.pair.take();
        self.suffers(Trouble { error, is_flush: false });
        Ok(())
    }

    /// Posts the first work request of a new queue pair, which shows whether it works.
    ///
    /// # Errors
    /// As [`Qp::post`].
    ///
    /// # Safety
    /// As [`Qp::post`].
    pub(crate) unsafe fn probe(&mut self, work: &Work) -> Result<()> {
        self.room = 1;
        // SAFETY: the caller keeps the same promise.
        unsafe { self.post_one(|| *work) }
    }

    /// A failure of this queue pair, which the thread that takes care of the connection handles.
    #[cold]
    pub(super) fn suffers(&mut self, trouble: Trouble) {
        // A flush is the consequence of another failure, whose cause is more useful.
        if self.trouble.as_ref().is_none_or(|known| known.is_flush && !trouble.is_flush) {
            self.trouble = Some(trouble);
        }
        self.alarm.raise();
    }

    /// Whether it carries messages.
    #[inline]
    pub(crate) fn is_up(&self) -> bool {
        self.state == QpState::Up
    }

    /// Whether it has a queue pair, even a stopped one: its completions may still arrive.
    pub(crate) fn has_pair(&self) -> bool {
        self.element().is_some()
    }

    /// Whether a completion belongs to its present queue pair: those of an earlier one may still arrive.
    #[inline]
    pub(crate) fn is_of_this_epoch(&self, completion: &Completion) -> bool {
        self.epoch == 0 || completion.queue_pair() == self.ends.pair
    }

    /// Whether neither side has a queue pair for it.
    pub(crate) fn is_lost(&self) -> bool {
        self.state == QpState::Lost
    }

    /// Whether arrivals count although it does not carry messages: those under way when it was stopped, or the first
    /// over a new queue pair.
    pub(crate) fn still_takes(&self) -> bool {
        matches!(self.state, QpState::Stopping { .. } | QpState::Returning)
    }

    /// Whether it has a new queue pair that is not verified yet.
    pub(crate) fn is_returning(&self) -> bool {
        self.state == QpState::Returning
    }

    /// Its new queue pair reaches the peer. The thread that maintains the connection starts to use it.
    pub(crate) fn is_proven(&mut self) {
        self.proven = true;
        self.alarm.raise();
    }

    /// Its present queue pair belongs to this epoch of the sender's.
    pub(crate) fn set_epoch(&mut self, epoch: u16) {
        self.epoch = epoch;
    }

    /// How many queue pairs it had before the present one; not the number that the device gave that one.
    pub(crate) fn epoch(&self) -> u16 {
        self.epoch
    }

    /// Whether it is lost, and its completions are being taken.
    pub(crate) fn is_stopping(&self) -> bool {
        matches!(self.state, QpState::Stopping { .. })
    }

    /// Ends the queue pair: it neither receives nor sends any more.
    pub(super) fn end(&mut self) -> Option<QueuePair> {
        (self.is_running, self.apart) = (false, None);
        self.pair.take().or_else(|| self.refusing.take())
    }

    /// The attempt with a new queue pair has failed.
    pub(super) fn give_up(&mut self, next_try: Instant) {
        (self.pair, self.refusing, self.apart, self.is_running) = (None, None, None, false);
        (self.state, self.next_try, self.room) = (QpState::Lost, Some(next_try), 0);
    }

    /// The same, and the next attempt is made after a while.
    pub(super) fn try_again(&mut self, now: Instant) {
        self.give_up(now + pause(self.tries));
    }

    /// The peer has one too, and a first write over both is under way. Sets how long that may take.
    pub(crate) fn is_tried(&mut self) {
        self.next_try = Some(Instant::now() + patience(self.tries));
    }

    /// The address by which asynchronous events identify its queue pair.
    pub(super) fn element(&self) -> Option<u64> {
        let pair = self.pair.as_ref().or(self.refusing.as_ref()).map(QueuePair::element);
        pair.or_else(|| self.apart.as_ref().map(Apart::element))
    }

    /// The data about it that the peer needs.
    pub(super) fn record(&self, config: &Config) -> Option<QpRecord> {
        let pair = self.pair.as_ref()?;
        let ece = pair.ece().filter(|_| config.ib_ece_enable && !self.linked.without_ece).map(Into::into);
        Some(QpRecord { number: pair.number(), first_packet: self.first_packet, ece })
    }

    /// Connects it to the one of the same number at the peer.
    fn connect(
        &mut self,
        adapters: &Adapters,
        ports: &[PortRecord],
        record: &QpRecord,
        class: Class,
        config: &Config,
    ) -> std::result::Result<(), Refused> {
        let plan = self.plan(adapters, ports, record, class, config)?;
        let without = || Error::internal("connecting a queue pair that was never made");
        plan.carry_out(self.pair.as_ref().ok_or_else(without)?, &mut self.linked)?;
        self.ends.peer_pair = record.number;
        Ok(())
    }

    /// How it is connected to the one of the same number at the peer.
    fn plan(
        &self,
        adapters: &Adapters,
        ports: &[PortRecord],
        record: &QpRecord,
        class: Class,
        config: &Config,
    ) -> Result<Plan> {
        let open = &adapters[self.adapter].open;
        let port = &ports[self.peer_port];
        if port.link_layer() != open.port.link_layer {
            return Err(Error::usage(format!(
                "{} is on {} and the peer's {} on {}",
                open.port.name(),
                open.port.link_layer,
                port.name,
                port.link_layer()
            ))
            .with_hint("choose ports of one network with NCCL_IB_HCA"));
        }
        Ok(Plan {
            ece: record.ece.as_ref().filter(|_| config.ib_ece_enable).map(Ece::from),
            route: route(&adapters[self.adapter], port, record, class),
            timeouts: Timeouts::new(config.ib_timeout.0, config.ib_retry_cnt.0),
            first_packet: self.first_packet,
        })
    }

    /// Whether a thread is connecting its new queue pair.
    pub(super) fn is_connecting(&self) -> bool {
        self.apart.is_some()
    }

    /// Takes its new queue pair back from the thread that connects it, once that is done. Returns the result.
    pub(super) fn take_connected(&mut self) -> Option<Result<()>> {
        let (pair, linked, connected) = self.apart.as_ref()?.take()?;
        (self.pair, self.linked, self.apart) = (Some(pair), linked, None);
        Some(connected)
    }

    /// As [`Qp::post`], for the one work request that `work` makes, in the place where it is needed: here it stays in
    /// registers.
    ///
    /// # Errors
    /// As [`Qp::post`].
    ///
    /// # Safety
    /// As [`Qp::post`].
    #[inline(always)]
    pub(crate) unsafe fn post_one(&mut self, work: impl Fn() -> Work) -> Result<()> {
        if !self.held.is_empty() {
            // SAFETY: the caller keeps the same promise.
            return unsafe { self.post_behind(work()) };
        }
        debug_assert!(self.room > 0);
        self.room -= 1;
        let Some(pair) = &self.pair else { return Ok(()) };
        // SAFETY: the caller keeps the promise about the memory.
        match unsafe { pair.post_one(&work()) } {
            Ok(()) => Ok(()),
            Err(error) => self.refused(error),
        }
    }

    /// Behind others that were held back.
    #[cold]
    unsafe fn post_behind(&mut self, work: Work) -> Result<()> {
        // SAFETY: the caller keeps the same promise.
        unsafe { self.post(&[work]) }
    }

    /// Holds a work request back until the next one is posted, or [`Qp::release`] is called: one doorbell notifies
    /// the device of several. There must be room for it.
    ///
    /// # Errors
    /// As [`Qp::post`].
    ///
    /// # Safety
    /// As [`Qp::post`], from now on.
    #[inline]
    pub(crate) unsafe fn hold(&mut self, work: Work) -> Result<()> {
        debug_assert!(self.room > 0);
        self.room -= 1;
        self.held.push(work);
        if self.held.len() == MOST_HELD { self.release() } else { Ok(()) }
    }

    /// Posts a work request behind those that were held back. The last `silent` ones of them end with it: they have no
    /// immediate and no completion of their own.
    ///
    /// # Errors
    /// As [`Qp::post`].
    ///
    /// # Safety
    /// As [`Qp::post`].
    pub(crate) unsafe fn post_for(&mut self, silent: usize, work: Work) -> Result<()> {
        let from = self.held.len().saturating_sub(silent);
        for held in &mut self.held[from..] {
            (held.immediate, held.is_signaled) = (None, false);
        }
        // SAFETY: the caller keeps the same promise.
        unsafe { self.post(&[work]) }
    }

    /// How many work requests are held back.
    #[inline]
    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }

    /// Posts the work requests that were held back.
    ///
    /// # Errors
    /// As [`Qp::post`].
    pub(crate) fn release(&mut self) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let Some(pair) = &self.pair else { return Ok(()) };
        // SAFETY: the callers that passed them have kept the promise about the memory.
        let posted = unsafe { pair.post(&self.held) };
        self.held.clear();
        match posted {
            Ok(()) => Ok(()),
            Err((_, error)) => self.refused(error),
        }
    }

    /// Puts `count` receives into the queue pair.
    ///
    /// # Errors
    /// When the device refuses.
    #[inline]
    pub(crate) fn post_receives(&mut self, id: u64, count: usize) -> Result<()> {
        let Some(pair) = &self.pair else { return Ok(()) };
        match pair.post_receives(id, count) {
            Ok(()) => {
                self.receives += count as u32;
                Ok(())
            }
            Err((posted, error)) => {
                self.receives += posted as u32;
                self.refused(error)
            }
        }
    }

    /// Bytes that may travel inside a work request.
    pub(crate) fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// Its two ends, for messages.
    pub(crate) fn ends(&self) -> &Ends {
        &self.ends
    }

    /// Its path, for a profiler; `adapters` are the device that it is part of.
    pub(crate) fn path(&self, adapters: &Adapters) -> Path {
        let device = adapters[self.adapter].number;
        let peer = Some(SocketAddr::from((Ipv6Addr::from(self.ends.peer_gid).to_canonical(), 0)));
        let carrier = Carrier::QueuePair { device, number: self.ends.pair.cast_signed() };
        Path { carrier, rail: self.adapter as u16, peer }
    }

    /// Stops the queue pair as a failure would, without notifying anything; it may already be lost.
    #[cfg(test)]
    pub(super) fn break_pair(&self) {
        if let Some(pair) = &self.pair {
            pair.stop().expect("stopped");
        }
    }

    /// Stops the queue pair for ever, without ending it. Nothing is posted any more. If the device cannot do it at the
    /// moment, `stop_again` can a little later.
    pub(crate) fn stop(&mut self) {
        self.room = 0;
        self.held.clear();
        self.is_running = true;
        self.stop_again();
    }

    /// Stops the queue pair if that has not worked yet.
    pub(super) fn stop_again(&mut self) {
        if self.is_running
            && let Some(pair) = self.pair.as_ref().or(self.refusing.as_ref())
        {
            self.is_running = pair.stop().is_err();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn class(traffic: u8, service_level: u8) -> Class {
        Class { traffic, service_level }
    }

    #[test]
    fn the_senders_variables_win_over_its_communicator() {
        let of = |pairs: &[(&'static str, &'static str)], communicator| {
            Class::new(&Config::from_pairs(pairs.iter().copied()).0, communicator)
        };
        assert_eq!(of(&[], None), class(0, 0));
        assert_eq!(of(&[], Some(5)), class(5, 5));
        assert_eq!(of(&[("NCCL_IB_TC", "106"), ("NCCL_IB_SL", "3")], Some(5)), class(106, 3));
        assert_eq!(of(&[("NCCL_IB_TC", "106"), ("NCCL_IB_FIFO_TC", "84")], None), class(106, 0));
    }

    #[test]
    fn the_receiver_has_the_senders_class_unless_lines_have_one_of_their_own() {
        let of = |pairs: &[(&'static str, &'static str)]| {
            Class::of_receiver(&Config::from_pairs(pairs.iter().copied()).0, class(106, 3))
        };
        assert_eq!(of(&[]), class(106, 3));
        assert_eq!(of(&[("NCCL_IB_TC", "8"), ("NCCL_IB_SL", "1")]), class(106, 3));
        assert_eq!(of(&[("NCCL_IB_FIFO_TC", "84")]), class(84, 3));
    }
}
