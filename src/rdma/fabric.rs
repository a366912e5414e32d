//! The verbs objects of one connection: its lanes (queue pairs) and the completion queues that they report to.
//!
//! Lane l of a connection joins local adapter l modulo the number of local adapters with the peer's port l modulo the
//! number of the peer's. There is one completion queue for each local adapter.
//!
//! # Credit
//! A completion queue that overruns ends all its queue pairs. So each queue has a place for everything that can be in
//! the queues of its lanes at one time: [`Lane::room`] never lets more requests into a sending queue than it was made
//! for, and receives are put back only as they are used up.

use std::mem::MaybeUninit;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;

use super::adapter::{Adapter, Adapters};
use super::record::{LaneRecord, PortRecord, Record, VERSION};
use super::stripe::MAX_LANES;
use super::trouble::Ends;
use super::verbs::{Capacity, Completion, CompletionQueue, Ece, QueuePair, QueuePairOptions, Route, Timeouts, Work};
use crate::engine::events::{Carrier, Path};
use crate::engine::request::MAX_PARTS;
use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::tcp::handshake::nonce;

/// A queue pair and what is in its sending queue.
pub struct Lane {
    pair: QueuePair,
    /// The place of its adapter in this side's device.
    pub adapter: usize,
    /// The place of the peer's port in the peer's device.
    pub peer_port: usize,
    first_packet: u32,
    /// Work requests that may still be posted.
    room: u32,
    /// Work requests that are to be posted with the next one.
    held: Vec<Work>,
    ends: Ends,
}

/// Work requests that are held back at most: as many as the parts of a group.
const MOST_HELD: usize = MAX_PARTS;

/// All lanes of a connection. Dropping it ends the queue pairs: afterwards no device touches memory for them.
pub struct Fabric {
    lanes: Vec<Lane>,
    queues: Vec<CompletionQueue>,
    /// The longest write in bytes that both sides take: a multiple of 128.
    pub longest_write: u64,
    /// Whether the end of a message longer than this many bytes needs a write of its own, because the fabric may reorder
    /// packets of a queue pair.
    pub apart_above: Option<u64>,
}

/// How deep the queues of each lane are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depth {
    /// Work requests of the sending queue.
    pub send: u32,
    /// Receives.
    pub receive: u32,
    /// Bytes that may travel inside a work request.
    pub inline_bytes: u32,
}

/// The class of the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Class {
    /// The traffic class: on Ethernet the whole ToS byte.
    pub traffic: u8,
    /// The service level.
    pub service_level: u8,
}

impl Class {
    /// What the configuration and the communicator ask for; the configuration wins. `lines`: for the side that sends
    /// nothing but clear-to-send lines.
    pub fn new(config: &Config, communicator: Option<u8>, lines: bool) -> Self {
        let set = |number: i64| u8::try_from(number).ok();
        let data = set(config.ib_tc.0).or(communicator).unwrap_or(0);
        let traffic = set(config.ib_fifo_tc.0).filter(|_| lines).unwrap_or(data);
        let service_level = set(config.ib_sl.0).or(communicator).unwrap_or(0);
        Self { traffic, service_level }
    }
}

/// What this side says of its ports.
pub fn ports(adapters: &Adapters) -> Vec<PortRecord> {
    let record = |open: &super::devices::OpenPort| PortRecord {
        gid: open.gid.to_vec(),
        lid: u32::from(open.facts.lid),
        mtu: open.facts.active_mtu,
        is_ethernet: open.port.link_layer == super::verbs::LinkLayer::Ethernet,
        max_message: open.facts.max_message_bytes,
        name: open.port.name(),
    };
    adapters.iter().map(|adapter| record(&adapter.open)).collect()
}

impl Fabric {
    /// Queue pairs for `lanes` lanes, bound to their ports but not connected.
    ///
    /// # Errors
    /// When a device has no more, or none so large.
    pub fn new(adapters: &Adapters, lanes: usize, depth: Depth, config: &Config, peer: &[PortRecord]) -> Result<Self> {
        let most = adapters.len().max(peer.len()).max(1);
        if lanes == 0 || lanes > MAX_LANES || !lanes.is_multiple_of(most) || peer.is_empty() {
            return Err(Error::remote(format!("the peer asks for {lanes} queue pairs over {} ports", peer.len())));
        }
        let per_adapter = u32::try_from(lanes.div_ceil(adapters.len())).unwrap_or(u32::MAX);
        // Receives must all fit, since the peer counts on them; sends wait when there is less room.
        let mut send = depth.send;
        for adapter in &**adapters {
            let facts = adapter.open.context.facts()?;
            send = send.min(facts.max_qp_wr).min((facts.max_cqe / per_adapter).saturating_sub(depth.receive)).max(4);
        }
        let depth = Depth { send, ..depth };
        let queue = |adapter: &Arc<Adapter>| {
            CompletionQueue::new(&adapter.open.context, per_adapter * (depth.send + depth.receive), None)
        };
        let queues = adapters.iter().map(queue).collect::<Result<Vec<_>>>()?;
        let capacity = Capacity { send: depth.send, receive: depth.receive.max(1), inline_bytes: depth.inline_bytes };
        let pkey = u16::try_from(config.ib_pkey.0).unwrap_or(0);
        let lane = |index: usize| -> Result<Lane> {
            let (at, peer_port) = (index % adapters.len(), index % peer.len());
            let adapter = &adapters[at];
            let wanted = Capacity { inline_bytes: depth.inline_bytes, ..capacity };
            let pair = match QueuePair::new(&adapter.domain, &queues[at], &queues[at], wanted) {
                Ok(pair) => pair,
                // A device that carries less inside its requests, or nothing.
                Err(_) => {
                    QueuePair::new(&adapter.domain, &queues[at], &queues[at], Capacity { inline_bytes: 0, ..wanted })?
                }
            };
            pair.prepare(QueuePairOptions { port: adapter.open.port.number, pkey_index: pkey })?;
            let random = nonce()?;
            let first_packet = u32::from_le_bytes([random[0], random[1], random[2], 0]);
            let ends =
                Ends { pair: pair.number(), peer_pair: 0, gid: adapter.open.gid, peer_gid: peer[peer_port].gid() };
            Ok(Lane { pair, adapter: at, peer_port, first_packet, room: depth.send, held: Vec::new(), ends })
        };
        let lanes = (0..lanes).map(lane).collect::<Result<Vec<_>>>()?;
        let longest = adapters.iter().map(|adapter| adapter.open.facts.max_message_bytes);
        let longest = longest.chain(peer.iter().map(|port| port.max_message)).min().unwrap_or(0);
        let is_infiniband = peer.iter().any(|port| !port.is_ethernet);
        let reorders = match config.ib_adaptive_routing.0 {
            -2 => is_infiniband,
            other => other == 1,
        };
        Ok(Self {
            lanes,
            queues,
            longest_write: u64::from(longest.min(1 << 30)) & !127,
            apart_above: reorders.then(|| u64::try_from(config.ib_ar_threshold.0).unwrap_or(0)),
        })
    }

    /// What the peer needs to know of the lanes.
    pub fn records(&self, config: &Config) -> Vec<LaneRecord> {
        let ece = |lane: &Lane| lane.pair.ece().filter(|_| config.ib_ece_enable).map(Into::into);
        let record =
            |lane: &Lane| LaneRecord { number: lane.pair.number(), first_packet: lane.first_packet, ece: ece(lane) };
        self.lanes.iter().map(record).collect()
    }

    /// Connects every lane to the peer's lane of the same number.
    ///
    /// # Errors
    /// When the peer has another number of lanes, or a device cannot reach its peer.
    pub fn connect(
        &mut self,
        adapters: &Adapters,
        ports: &[PortRecord],
        lanes: &[LaneRecord],
        class: Class,
        config: &Config,
    ) -> Result<()> {
        if lanes.len() != self.lanes.len() {
            return Err(Error::remote(format!("the peer has {} queue pairs, not {}", lanes.len(), self.lanes.len())));
        }
        let number = |value: i64, most: u8| u8::try_from(value).unwrap_or(most).min(most);
        let timeouts =
            Timeouts { exponent: number(config.ib_timeout.0, 31), retries: number(config.ib_retry_cnt.0, 7) };
        for (lane, record) in self.lanes.iter_mut().zip(lanes) {
            let open = &adapters[lane.adapter].open;
            let port = &ports[lane.peer_port];
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
            if let Some(ece) = &record.ece
                && config.ib_ece_enable
            {
                lane.pair.set_ece(Ece::from(ece))?;
            }
            let peer_gid = port.gid();
            let route = Route {
                port: open.port.number,
                link_layer: open.port.link_layer,
                peer_number: record.number,
                peer_first_packet: record.first_packet & 0xff_ffff,
                mtu: open.facts.active_mtu.min(port.mtu),
                gid_index: u8::try_from(open.gid_index).unwrap_or(0),
                peer_gid,
                peer_lid: u16::try_from(port.lid).unwrap_or(0),
                // InfiniBand needs the global header where the peer is in another subnet: the first half of the GID.
                is_global: open.facts.needs_grh || peer_gid[..8] != open.gid[..8],
                service_level: class.service_level,
                traffic_class: class.traffic,
            };
            lane.pair.connect(&route)?;
            lane.pair.start(timeouts, lane.first_packet)?;
            lane.ends.peer_pair = record.number;
        }
        Ok(())
    }

    /// The lanes.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// The queues that asynchronous events may name, each with the place of its adapter.
    pub fn elements(&self) -> impl Iterator<Item = (usize, u64)> {
        let pairs = self.lanes.iter().map(|lane| (lane.adapter, lane.pair.element()));
        pairs.chain(self.queues.iter().map(CompletionQueue::element).enumerate())
    }

    /// One lane.
    #[inline]
    pub fn lane(&mut self, index: usize) -> &mut Lane {
        &mut self.lanes[index]
    }

    /// Posts what was kept back on all lanes.
    ///
    /// # Errors
    /// As [`Lane::post`].
    #[inline]
    pub fn release(&mut self) -> Result<()> {
        self.lanes.iter_mut().try_for_each(Lane::release)
    }

    /// Hands every completion there is to `take`. Says whether there were any.
    ///
    /// # Errors
    /// When a queue is broken, or as `take` says.
    #[inline]
    pub fn poll(&mut self, mut take: impl FnMut(&mut [Lane], &Completion) -> Result<()>) -> Result<bool> {
        let mut any = false;
        for queue in &self.queues {
            loop {
                let mut room = [const { MaybeUninit::uninit() }; BATCH];
                let done = queue.poll(&mut room)?;
                for completion in done {
                    take(&mut self.lanes, completion)?;
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
    pub fn record(&self, adapters: &Adapters, config: &Config) -> Record {
        Record { version: VERSION, ports: ports(adapters), lanes: self.records(config), ..Record::default() }
    }
}

/// Completions taken in one go.
const BATCH: usize = 16;

impl Lane {
    /// Work requests that may still be posted.
    #[inline]
    pub fn room(&self) -> u32 {
        self.room
    }

    /// So many work requests are finished.
    #[inline]
    pub fn finished(&mut self, count: u32) {
        self.room += count;
    }

    /// Posts work requests; there must be room for them.
    ///
    /// # Errors
    /// When the device refuses, which ends the connection.
    ///
    /// # Safety
    /// As [`QueuePair::post`].
    #[inline]
    pub unsafe fn post(&mut self, list: &[Work]) -> Result<()> {
        debug_assert!(self.room as usize >= list.len());
        self.room -= list.len() as u32;
        if !self.held.is_empty() {
            self.held.extend_from_slice(list);
            return self.release();
        }
        // SAFETY: the caller vouches for the memory.
        unsafe { self.pair.post(list) }.map_err(|(_, error)| error)
    }

    /// As [`Lane::post`], one work request.
    ///
    /// # Errors
    /// As [`Lane::post`].
    ///
    /// # Safety
    /// As [`Lane::post`].
    #[inline]
    pub unsafe fn post_one(&mut self, work: &Work) -> Result<()> {
        if !self.held.is_empty() {
            // SAFETY: passed on.
            return unsafe { self.post(std::slice::from_ref(work)) };
        }
        debug_assert!(self.room > 0);
        self.room -= 1;
        // SAFETY: the caller vouches for the memory.
        unsafe { self.pair.post_one(work) }
    }

    /// Keeps a work request back until the next one is posted, or [`Lane::release`] is called: the device is told of
    /// several with one doorbell. There must be room for it.
    ///
    /// # Errors
    /// As [`Lane::post`].
    ///
    /// # Safety
    /// As [`Lane::post`], from now on.
    #[inline]
    pub unsafe fn hold(&mut self, work: Work) -> Result<()> {
        debug_assert!(self.room > 0);
        self.room -= 1;
        self.held.push(work);
        if self.held.len() == MOST_HELD { self.release() } else { Ok(()) }
    }

    /// Posts a work request behind what was kept back, of which the last `silent` ones are to end with it: they have no
    /// immediate and no completion of their own.
    ///
    /// # Errors
    /// As [`Lane::post`].
    ///
    /// # Safety
    /// As [`Lane::post`].
    pub unsafe fn post_for(&mut self, silent: usize, work: Work) -> Result<()> {
        let from = self.held.len().saturating_sub(silent);
        for held in &mut self.held[from..] {
            (held.immediate, held.is_signaled) = (None, false);
        }
        // SAFETY: passed on.
        unsafe { self.post(&[work]) }
    }

    /// How many work requests are kept back.
    #[inline]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Posts what was kept back.
    ///
    /// # Errors
    /// As [`Lane::post`].
    pub fn release(&mut self) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        // SAFETY: whoever handed them over has vouched for the memory.
        let posted = unsafe { self.pair.post(&self.held) };
        self.held.clear();
        posted.map_err(|(_, error)| error)
    }

    /// Puts `count` receives into the queue pair.
    ///
    /// # Errors
    /// When the device refuses.
    #[inline]
    pub fn post_receives(&self, id: u64, count: usize) -> Result<()> {
        self.pair.post_receives(id, count)
    }

    /// Bytes that may travel inside a work request.
    pub fn inline_bytes(&self) -> u32 {
        self.pair.capacity().inline_bytes
    }

    /// Its two ends, for messages.
    pub fn ends(&self) -> &Ends {
        &self.ends
    }

    /// Where it leads, for a profiler; `adapters` are the device that it is part of.
    pub fn path(&self, adapters: &Adapters) -> Path {
        let device = adapters[self.adapter].number;
        let peer = Some(SocketAddr::from((Ipv6Addr::from(self.ends.peer_gid).to_canonical(), 0)));
        let carrier = Carrier::QueuePair { device, number: self.ends.pair.cast_signed() };
        Path { carrier, rail: self.adapter as u16, peer }
    }

    /// Stops the queue pair for ever, without ending it.
    pub fn stop(&self) {
        let _ = self.pair.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(pairs: &[(&'static str, &'static str)], communicator: Option<u8>, lines: bool) -> (u8, u8) {
        let config = Config::from_pairs(pairs.iter().copied()).0;
        let class = Class::new(&config, communicator, lines);
        (class.traffic, class.service_level)
    }

    #[test]
    fn the_variables_win_over_the_communicator_and_lines_may_have_a_class_of_their_own() {
        assert_eq!(class(&[], None, false), (0, 0));
        assert_eq!(class(&[], Some(5), false), (5, 5));
        let both = &[("NCCL_IB_TC", "106"), ("NCCL_IB_SL", "3")];
        assert_eq!(class(both, Some(5), false), (106, 3));
        let lines = &[("NCCL_IB_TC", "106"), ("NCCL_IB_FIFO_TC", "84")];
        assert_eq!(class(lines, None, false), (106, 0));
        assert_eq!(class(lines, None, true), (84, 0));
    }
}
