//! A connection on real verbs with both ends in this process, for tests that access its internals. It can have any
//! number of queue pairs and any depth of queues, and tests can access the sender's ring.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::adapter::Adapters;
use super::backend::Rdma;
use super::base::Parts;
use super::cts::{CTS_BYTES, CTS_ENTRIES, CtsEntry, Ring};
use super::eager::Inbox;
use super::fabric::{Class, Depth, Fabric, ports};
use super::receiver::{self, Mirror, Posted, RdmaRecv, SizeTable, post_first_receives};
use super::sender::{self, RdmaSend, RingMemory, Stores};
use crate::engine::request::{Outcome, Ticket};
use crate::os::config::Config;
use crate::os::error::Result;
use crate::session::acceptor;
use crate::session::handshake::Secret;
use crate::session::link::{Link, Sock};
use crate::session::peer::Peer;

/// How long any step may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// The content of memory that was not written.
pub(super) const UNTOUCHED: u8 = 0xEE;

/// A receive into this memory, which is pinned by the connection.
pub(super) fn posted(memory: &[u8], tag: i32) -> Option<Posted> {
    Some(Posted { address: memory.as_ptr() as u64, size: memory.len() as u64, tag, memory: None })
}

/// The parameters of a connection.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// The indices of both sides' ports.
    pub(super) ports: [&'static [usize]; 2],
    /// Queue pairs in all.
    pub(super) qps: usize,
    /// Work requests in the sending queues of sender and receiver.
    pub(super) depth: [u32; 2],
    /// Variables of the configuration.
    pub(super) variables: &'static [(&'static str, &'static str)],
    /// Short messages need not wait for their CTS entries.
    pub(super) short: bool,
    /// A change to the key of the sender's ring before the receiver gets it.
    pub(super) ring_key: fn(u32) -> u32,
    /// The addresses at which each side expects the other's process to listen.
    pub(super) addresses: Vec<SocketAddr>,
}

impl Default for Plan {
    fn default() -> Self {
        let depth = [sender::DEPTH.send, receiver::DEPTH.send];
        Self {
            ports: [&[0], &[1]],
            qps: 1,
            depth,
            variables: &[],
            short: false,
            ring_key: |key| key,
            addresses: Vec::new(),
        }
    }
}

impl Plan {
    /// Two ports on each side, with a queue pair on each.
    pub(super) fn two_ports() -> Self {
        Self { ports: [&[0, 1], &[0, 1]], qps: 2, ..Self::default() }
    }
}

/// Both ends.
pub(super) struct Ends {
    /// The sending one.
    pub(super) send: Arc<RdmaSend>,
    /// The receiving one.
    pub(super) recv: Arc<RdmaRecv>,
    /// The receiver's ports.
    pub(super) receiving: Adapters,
    /// Its queues, each with the index of its port.
    pub(super) queues: Vec<(usize, u64)>,
    ring: u64,
}

/// Two fabrics that are connected with each other, the second one's receives posted.
pub(super) fn fabrics(rdma: &Rdma, plan: &Plan, config: &Config) -> ([Adapters; 2], [Fabric; 2]) {
    let sides = plan.ports.map(|ports| rdma.group(ports));
    let [left, right] = &sides;
    let depths = [Depth { send: plan.depth[0], ..sender::DEPTH }, Depth { send: plan.depth[1], ..receiver::DEPTH }];
    let mut sending = Fabric::new(left, plan.qps, depths[0], config, &ports(right)).expect("queue pairs");
    let mut receiving = Fabric::new(right, plan.qps, depths[1], config, &ports(left)).expect("queue pairs");
    post_first_receives(&mut receiving).expect("receives");
    let class = Class::new(config, None);
    sending.connect(left, &receiving.records(config), class, config).expect("connected");
    receiving.connect(right, &sending.records(config), class, config).expect("connected");
    (sides, [sending, receiving])
}

impl Ends {
    /// A connection, without a handshake.
    pub(super) fn connect(plan: &Plan) -> Self {
        let config = Config::from_pairs(plan.variables.iter().copied()).0;
        let (rdma, _) = Rdma::find(&config).expect("an RDMA device");
        let ([left, right], [sending, receiving]) = fabrics(&rdma, plan, &config);
        let net = acceptor::net(config, None);
        let (one, other) = UnixStream::pair().expect("sockets");
        let link = Link {
            connection: 7,
            key: Secret::from_bytes([7; 16]),
            features: 0,
            remote: plan.addresses.clone(),
            local: Arc::from([]),
            traffic_class: None,
            round_trip: std::time::Duration::ZERO,
        };
        let parts = |adapters: &Adapters, socket: UnixStream, label: &str| Parts {
            net: Arc::clone(&net),
            adapters: Arc::clone(adapters),
            peer: Peer { label: label.to_owned(), address: (Ipv4Addr::LOCALHOST, 9).into() },
            sock: sock(socket),
            link: link.clone(),
        };
        let ring = Ring::new().expect("memory");
        let address = ring.address();
        let ring_memory = RingMemory::new(&left, ring).expect("pinned");
        let keys = ring_memory.keys().into_iter().map(plan.ring_key).collect();
        let queues = receiving.elements().collect();
        let table = SizeTable::new(&right).expect("pinned");
        let inbox = plan.short.then(|| Inbox::new(&right).expect("pinned"));
        let target = sender::Target {
            split: true,
            ports: left.len().max(right.len()),
            sizes: table.sizes.as_ptr() as u64,
            size_keys: table.regions.iter().map(super::verbs::MemoryRegion::remote_key).collect(),
            inbox: inbox.as_ref().map(Inbox::address),
        };
        let stores = Stores::new(&left, &target).expect("pinned");
        let send =
            RdmaSend::new(parts(&left, one, "the receiver"), sending, ring_memory, stores, target).expect("a sender");
        let own = (table, Mirror::new(&right).expect("pinned"), inbox);
        let target = receiver::Target { ring: address, keys };
        let recv = RdmaRecv::new(parts(&right, other, "the sender"), receiving, own, target).expect("a receiver");
        Self { send, recv, receiving: right, queues, ring: address }
    }

    /// Posts a receive into this memory.
    ///
    /// # Safety
    /// The memory must outlive the request, and the connection when that does not end well.
    pub(super) unsafe fn post_receive(&self, memory: &[u8]) -> Ticket {
        // SAFETY: the caller keeps the promise about the memory.
        let received = unsafe { self.recv.irecv(&mut [posted(memory, 0)], &[null_mut()]) };
        received.expect("irecv").expect("a request")
    }

    /// Posts a send of this memory.
    ///
    /// # Safety
    /// As for [`Ends::post_receive`].
    pub(super) unsafe fn post_send(&self, memory: &[u8]) -> Ticket {
        // SAFETY: the caller keeps the promise about the memory.
        let sent = unsafe { self.send.isend(memory.as_ptr() as u64, memory.len() as u64, 0, None, null_mut()) };
        sent.expect("isend").expect("a request")
    }

    /// Sends bytes and receives them.
    pub(super) fn carries(&self) {
        let (source, target) = (vec![7_u8; 100_000], vec![UNTOUCHED; 100_000]);
        // SAFETY: source and target outlive the requests.
        let (received, sent) = unsafe { (self.post_receive(&target), self.post_send(&source)) };
        end_of(|ticket| self.recv.test(ticket), received).expect("received");
        end_of(|ticket| self.send.test(ticket), sent).expect("sent");
        assert!(source == target);
    }

    /// Queue pairs that sender and receiver have lost so far.
    pub(super) fn lost_queue_pairs(&self) -> [u64; 2] {
        [self.send.base(), self.recv.base()].map(|base| base.counters.lost_queue_pairs.load(Ordering::Relaxed))
    }

    /// Closes both, the receiver first.
    pub(super) fn close(&self) {
        self.recv.close();
        self.send.close();
    }

    /// Waits for CTS entry `number` in the sender's ring, and changes it.
    pub(super) fn forge(&self, number: u32, change: impl FnOnce(&mut CtsEntry)) {
        let slot = (self.ring + (number as usize % CTS_ENTRIES * CTS_BYTES) as u64) as *mut [u8; CTS_BYTES];
        let mut cts = until("the CTS entry", || {
            // SAFETY: a slot of the ring, which exists as long as the sender; `decode` detects an incomplete entry.
            let bytes = unsafe { slot.read_volatile() };
            CtsEntry::decode(&bytes, number)
        });
        change(&mut cts);
        // SAFETY: as above; the device writes the slot only once, and no thread has read it yet.
        unsafe { slot.write_volatile(cts.encode()) };
    }
}

pub(super) fn sock(socket: UnixStream) -> Sock {
    Sock::open(|| {
        socket.set_nonblocking(true)?;
        Ok(socket.into())
    })
    .expect("a descriptor")
}

/// Polls until there is a result.
pub(super) fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::yield_now();
    }
}

/// Tests a request until it is over.
pub(super) fn end_of(test: impl Fn(Ticket) -> Result<Option<Outcome>>, ticket: Ticket) -> Result<Outcome> {
    until("the end of a request", || test(ticket).transpose())
}
