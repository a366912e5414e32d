//! Reliable-connected queue pairs: making, connecting, posting.

use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::time::Duration;

use rdma_sys as ib;

use super::work::{BATCH, Chain};
use super::{CompletionQueue, Gid, LinkLayer, ProtectionDomain, Work, last_error, status_error};
use crate::os::error::{Error, Result};
use crate::rdma::dl::Verbs;

/// The capacity of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Outstanding work requests of the sending queue.
    pub send: u32,
    /// Outstanding receives.
    pub receive: u32,
    /// Bytes that may travel inside a work request.
    pub inline_bytes: u32,
}

/// The parameters that prepare a queue pair for its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueuePairOptions {
    /// The port, from 1.
    pub port: u8,
    /// The index in the port's table of partition keys.
    pub pkey_index: u16,
}

/// The path of a queue pair to its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Route {
    /// The local port, from 1.
    pub port: u8,
    /// The network of the port.
    pub link_layer: LinkLayer,
    /// The peer's queue pair.
    pub peer_number: u32,
    /// The number of the first packet that the peer sends, of 24 bits.
    pub peer_first_packet: u32,
    /// The largest payload of a packet that both sides support, as `IBV_MTU_*`.
    pub mtu: u32,
    /// The index of this side's GID in its table.
    pub gid_index: u8,
    /// The peer's GID.
    pub peer_gid: Gid,
    /// The local identifier that leads to the peer (InfiniBand).
    pub lid: u16,
    /// Whether packets carry GIDs; always on Ethernet, on InfiniBand where the peer is in another subnet.
    pub is_global: bool,
    /// The service level.
    pub service_level: u8,
    /// The traffic class: on Ethernet the whole ToS byte.
    pub traffic_class: u8,
}

/// The retransmission parameters of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timeouts {
    /// The wait for an acknowledgement: 4.096 µs times two to this power, up to 31; 0: for ever.
    pub exponent: u8,
    /// How often it is sent again, up to 7.
    pub retries: u8,
}

impl Timeouts {
    /// The values of `NCCL_IB_TIMEOUT` and `NCCL_IB_RETRY_CNT`. An exponent of 0, or of 32 and more, which does not fit
    /// the five bits of the verbs, means no timeout.
    pub(crate) fn new(exponent: i64, retries: i64) -> Self {
        let exponent = u8::try_from(exponent).ok().filter(|exponent| *exponent < 32).unwrap_or(0);
        Self { exponent, retries: u8::try_from(retries).unwrap_or(7).min(7) }
    }

    /// How long a device retransmits before it gives up; None when it never does.
    pub(crate) fn patience(self) -> Option<Duration> {
        (self.exponent != 0).then(|| Duration::from_nanos(4096 << self.exponent) * (u32::from(self.retries) + 1))
    }
}

/// Options beyond the standard on which the two drivers agree (enhanced connection establishment).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Ece {
    /// The vendor of these options.
    pub vendor: u32,
    /// The options; only the vendor's driver knows their meaning.
    pub options: u32,
    /// Reserved.
    pub mask: u32,
}

/// Why a queue pair could not be moved to its next state.
#[derive(Debug, Clone)]
pub(crate) struct Refused {
    /// The error number of the call; 0 when no call failed.
    pub code: i32,
    /// The same as a sentence.
    pub error: Error,
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self { code: 0, error }
    }
}

impl Refused {
    /// The sentence alone.
    pub(crate) fn into_error(self) -> Error {
        self.error
    }
}

/// A reliable connection to one queue pair of the peer.
pub(crate) struct QueuePair {
    raw: NonNull<ib::ibv_qp>,
    capacity: Capacity,
    domain: ProtectionDomain,
    /// Held so that they are dropped after the queue pair.
    _queues: [CompletionQueue; 2],
}

// SAFETY: libibverbs's objects may be used from any thread, several at a time.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

/// Not-ready receivers are tried again without end: the data path posts receives before it requests writes, so the
/// receive is always about to be posted.
const RETRY_FOR_EVER: u8 = 7;
/// 0.64 ms between two such attempts.
const RECEIVER_NOT_READY_TIMER: u8 = 12;
/// One RDMA read at a time, for flushes.
const READS_IN_FLIGHT: u8 = 1;

impl QueuePair {
    /// A queue pair that reports to `send` and `receive`, which may be the same queue. What the device grants beyond
    /// `wanted` is in [`QueuePair::capacity`].
    ///
    /// # Errors
    /// When the device has no more, or none so large.
    pub(crate) fn new(
        domain: &ProtectionDomain,
        send: &CompletionQueue,
        receive: &CompletionQueue,
        wanted: Capacity,
    ) -> Result<Self> {
        let mut attr = ib::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: send.raw(),
            recv_cq: receive.raw(),
            srq: ptr::null_mut(),
            cap: ib::ibv_qp_cap {
                max_send_wr: wanted.send,
                max_recv_wr: wanted.receive,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: wanted.inline_bytes,
            },
            qp_type: ib::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let context = domain.context();
        // SAFETY: a domain and queues of one context, and attributes that live through the call.
        let raw = unsafe { (context.verbs().create_qp)(domain.raw(), &raw mut attr) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| last_error(context.name(), &format!("making a queue pair of {} requests", wanted.send)))?;
        let capacity = Capacity {
            send: attr.cap.max_send_wr,
            receive: attr.cap.max_recv_wr,
            inline_bytes: attr.cap.max_inline_data,
        };
        Ok(Self { raw, capacity, domain: domain.clone(), _queues: [send.clone(), receive.clone()] })
    }

    /// Its number, which the peer needs.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives as long as this.
        unsafe { self.raw.as_ref().qp_num }
    }

    /// How much it holds.
    pub(crate) fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Its address, by which asynchronous events identify it.
    pub(crate) fn element(&self) -> u64 {
        self.raw.as_ptr() as u64
    }

    fn device(&self) -> &str {
        self.domain.context().name()
    }

    fn modify(
        &self,
        doing: &str,
        attr: &mut ib::ibv_qp_attr,
        mask: &[ib::ibv_qp_attr_mask],
    ) -> std::result::Result<(), Refused> {
        let mask = mask.iter().fold(0, |all, bit| all | bit.0);
        // SAFETY: the queue pair lives as long as this, the attributes live through the call.
        let status = unsafe { (self.domain.context().verbs().modify_qp)(self.raw.as_ptr(), attr, mask.cast_signed()) };
        if status == 0 {
            return Ok(());
        }
        Err(Refused { code: status.saturating_abs(), error: status_error(self.device(), doing, status) })
    }

    /// First step: binds it to a port. Receives may be posted from now on.
    ///
    /// # Errors
    /// When there is no such port or partition key.
    pub(crate) fn prepare(&self, options: QueuePairOptions) -> Result<()> {
        use ib::ibv_access_flags as access;
        use ib::ibv_qp_attr_mask as mask;
        let mut attr = blank();
        attr.qp_state = ib::ibv_qp_state::IBV_QPS_INIT;
        attr.pkey_index = options.pkey_index;
        attr.port_num = options.port;
        let flags = access::IBV_ACCESS_LOCAL_WRITE | access::IBV_ACCESS_REMOTE_WRITE | access::IBV_ACCESS_REMOTE_READ;
        attr.qp_access_flags = flags.0;
        let doing = format!("binding a queue pair to port {} with P_Key index {}", options.port, options.pkey_index);
        let parts = [mask::IBV_QP_STATE, mask::IBV_QP_PKEY_INDEX, mask::IBV_QP_PORT, mask::IBV_QP_ACCESS_FLAGS];
        self.modify(&doing, &mut attr, &parts).map_err(Refused::into_error)
    }

    /// Second step: gives it the address of its peer. From now on it receives. On RoCE the kernel resolves the
    /// neighbour in this call, which may take a second and then fail with `ETIMEDOUT`.
    ///
    /// # Errors
    /// When the peer's address cannot be resolved, or the device refuses it.
    pub(crate) fn connect(&self, route: &Route) -> std::result::Result<(), Refused> {
        use ib::ibv_qp_attr_mask as mask;
        let mut attr = blank();
        attr.qp_state = ib::ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = route.mtu;
        attr.dest_qp_num = route.peer_number;
        attr.rq_psn = route.peer_first_packet;
        attr.max_dest_rd_atomic = READS_IN_FLIGHT;
        attr.min_rnr_timer = RECEIVER_NOT_READY_TIMER;
        attr.ah_attr.sl = route.service_level;
        attr.ah_attr.port_num = route.port;
        if route.link_layer == LinkLayer::InfiniBand {
            attr.ah_attr.dlid = route.lid;
        }
        if route.is_global || route.link_layer == LinkLayer::Ethernet {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh = ib::ibv_global_route {
                dgid: ib::ibv_gid { raw: route.peer_gid },
                flow_label: 0,
                sgid_index: route.gid_index,
                hop_limit: 255,
                traffic_class: route.traffic_class,
            };
        }
        let parts = [
            mask::IBV_QP_STATE,
            mask::IBV_QP_AV,
            mask::IBV_QP_PATH_MTU,
            mask::IBV_QP_DEST_QPN,
            mask::IBV_QP_RQ_PSN,
            mask::IBV_QP_MAX_DEST_RD_ATOMIC,
            mask::IBV_QP_MIN_RNR_TIMER,
        ];
        self.modify("connecting a queue pair", &mut attr, &parts).map_err(|refused| Refused {
            error: refused.error.with_hint(
                "the two ports must reach each other; look at the chosen GIDs; where the rails of a host do not reach each \
                 other, NCCL_CROSS_NIC=0",
            ),
            ..refused
        })
    }

    /// Third step: lets it send, with packets numbered from `first_packet` (24 bits). A number that was never used
    /// before separates them from packets of an earlier connection that may still be under way.
    ///
    /// # Errors
    /// When the device refuses the values.
    pub(crate) fn start(&self, timeouts: Timeouts, first_packet: u32) -> std::result::Result<(), Refused> {
        use ib::ibv_qp_attr_mask as mask;
        let mut attr = blank();
        attr.qp_state = ib::ibv_qp_state::IBV_QPS_RTS;
        attr.timeout = timeouts.exponent;
        attr.sq_psn = first_packet;
        attr.retry_cnt = timeouts.retries;
        attr.rnr_retry = RETRY_FOR_EVER;
        attr.max_rd_atomic = READS_IN_FLIGHT;
        let parts = [
            mask::IBV_QP_STATE,
            mask::IBV_QP_TIMEOUT,
            mask::IBV_QP_RETRY_CNT,
            mask::IBV_QP_RNR_RETRY,
            mask::IBV_QP_SQ_PSN,
            mask::IBV_QP_MAX_QP_RD_ATOMIC,
        ];
        self.modify("starting a queue pair", &mut attr, &parts)
    }

    /// Stops it for ever: everything outstanding completes as flushed, and nothing more moves either way.
    ///
    /// # Errors
    /// When the device is gone.
    pub(crate) fn stop(&self) -> Result<()> {
        self.enter(ib::ibv_qp_state::IBV_QPS_ERR, "stopping a queue pair")
    }

    /// Ends it: the device discards what is outstanding, neither receives nor sends for it any more, and does not
    /// access memory for it. Its resources in the device are released when this is dropped.
    ///
    /// # Errors
    /// When the device is gone.
    pub(crate) fn reset(&self) -> Result<()> {
        self.enter(ib::ibv_qp_state::IBV_QPS_RESET, "ending a queue pair")
    }

    /// Enters a state that needs no other attribute.
    fn enter(&self, state: ib::ibv_qp_state::Type, doing: &str) -> Result<()> {
        let mut attr = blank();
        attr.qp_state = state;
        self.modify(doing, &mut attr, &[ib::ibv_qp_attr_mask::IBV_QP_STATE]).map_err(Refused::into_error)
    }

    /// The options that this side's driver offers beyond the standard; None when it offers none.
    pub(crate) fn ece(&self) -> Option<Ece> {
        let query = self.domain.context().verbs().query_ece?;
        let mut ece = ib::ibv_ece { vendor_id: 0, options: 0, comp_mask: 0 };
        // SAFETY: the queue pair lives as long as this, and there is room for the answer.
        let status = unsafe { query(self.raw.as_ptr(), &raw mut ece) };
        (status == 0).then_some(Ece { vendor: ece.vendor_id, options: ece.options, mask: ece.comp_mask })
    }

    /// Applies the peer's options, and returns whether this side's driver supports such options at all. Between
    /// [`QueuePair::prepare`] and [`QueuePair::connect`]; the options then in force are in [`QueuePair::ece`].
    ///
    /// # Errors
    /// When the driver supports such options, but not these.
    pub(crate) fn set_ece(&self, ece: Ece) -> Result<bool> {
        let Some(set) = self.domain.context().verbs().set_ece else { return Ok(false) };
        let mut raw = ib::ibv_ece { vendor_id: ece.vendor, options: ece.options, comp_mask: ece.mask };
        // SAFETY: the queue pair lives as long as this, the options live through the call.
        match unsafe { set(self.raw.as_ptr(), &raw mut raw) } {
            0 => Ok(true),
            // A driver without such options returns this error: the peer has a different driver.
            status if status.saturating_abs() == libc::EOPNOTSUPP => Ok(false),
            status => Err(status_error(self.device(), "taking over the peer's ECE options", status)),
        }
    }

    /// Posts work requests, in order. If the device refuses one, those before it are posted, and the error contains
    /// their number.
    ///
    /// # Errors
    /// When the queue is full or broken.
    ///
    /// # Safety
    /// The local memory of each request must stay registered and must not be used otherwise. This holds until the
    /// completion of the request, or of a later one of this queue pair, was polled, or the queue pair was dropped.
    #[inline]
    pub(crate) unsafe fn post(&self, list: &[Work]) -> std::result::Result<(), (usize, Error)> {
        let mut chain = Chain::new();
        for (round, part) in list.chunks(BATCH).enumerate() {
            let first = chain.link(part);
            let mut bad = ptr::null_mut();
            // SAFETY: a chain that exists through the call; the caller keeps the promise about the memory.
            let status = unsafe { ib::ibv_post_send(self.raw.as_ptr(), first, &raw mut bad) };
            if status != 0 {
                // SAFETY: `bad` is null or points into the chain.
                let posted = if bad.is_null() { 0 } else { unsafe { bad.offset_from(first) }.unsigned_abs() };
                return Err((round * BATCH + posted, self.refused(status)));
            }
        }
        Ok(())
    }

    /// Posts one work request.
    ///
    /// # Errors
    /// When the queue is full or broken.
    ///
    /// # Safety
    /// As [`QueuePair::post`].
    #[inline(always)]
    pub(crate) unsafe fn post_one(&self, work: &Work) -> Result<()> {
        let mut piece = work.piece();
        let mut request = work.request(&raw mut piece, ptr::null_mut());
        let mut bad = ptr::null_mut();
        // SAFETY: a request and its memory's description, which exist through the call; the caller keeps the promise
        // about the memory.
        let status = unsafe { ib::ibv_post_send(self.raw.as_ptr(), &raw mut request, &raw mut bad) };
        if status == 0 { Ok(()) } else { Err(self.refused(status)) }
    }

    #[cold]
    fn refused(&self, status: i32) -> Error {
        self.is_full("posting a work request", status)
    }

    /// Here, lack of memory concerns the device, not a limit.
    fn is_full(&self, doing: &str, status: i32) -> Error {
        status_error(self.device(), doing, status).with_hint("look at the kernel's log and at the driver")
    }

    /// Posts `count` receives without memory: they receive only immediates. Each comes back with `id`. If the device
    /// refuses one, those before it are posted, and the error contains their number.
    ///
    /// # Errors
    /// When the queue is full or broken.
    #[inline]
    pub(crate) fn post_receives(&self, id: u64, count: usize) -> std::result::Result<(), (usize, Error)> {
        let mut left = count;
        let mut list = [const { MaybeUninit::<ib::ibv_recv_wr>::uninit() }; BATCH];
        while left > 0 {
            let now = left.min(BATCH);
            let first = list.as_mut_ptr().cast::<ib::ibv_recv_wr>();
            for index in 0..now {
                // SAFETY: `index + 1` is below BATCH unless this is the last, which has no successor.
                let next = if index + 1 == now { ptr::null_mut() } else { unsafe { first.add(index + 1) } };
                let request = ib::ibv_recv_wr { wr_id: id, next, sg_list: ptr::null_mut(), num_sge: 0 };
                // SAFETY: `index` is below BATCH.
                unsafe { first.add(index).write(request) };
            }
            let mut bad = ptr::null_mut();
            // SAFETY: a chain of `now` filled requests that lives through the call and names no memory.
            let status = unsafe { ib::ibv_post_recv(self.raw.as_ptr(), first, &raw mut bad) };
            if status != 0 {
                // SAFETY: `bad` is null or points into the chain.
                let posted = if bad.is_null() { 0 } else { unsafe { bad.offset_from(first) }.unsigned_abs() };
                return Err((count - left + posted, self.is_full("posting a receive", status)));
            }
            left -= now;
        }
        Ok(())
    }
}

/// Attributes in which nothing is set.
fn blank() -> ib::ibv_qp_attr {
    // SAFETY: numbers and arrays of numbers, for which zeroes are valid.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by `create_qp` and dropped once. Afterwards the device touches no memory for it.
        let destroy = |verbs: &Verbs| unsafe { (verbs.destroy_qp)(self.raw.as_ptr()) };
        self.domain.context().end("ending a queue pair", destroy);
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("device", &self.device())
            .field("number", &self.number())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exponent_of_0_or_beyond_31_is_no_timeout_at_all() {
        for exponent in [0, 32, 40, 256, 276, i64::MAX] {
            let timeouts = Timeouts::new(exponent, 7);
            assert_eq!((timeouts.exponent, timeouts.patience()), (0, None), "{exponent}");
        }
        let usual = Timeouts::new(20, 7);
        assert_eq!((usual.exponent, usual.retries), (20, 7));
        assert_eq!(usual.patience().expect("a limit").as_secs(), 34);
        assert_eq!(Timeouts::new(31, 0).patience().expect("a limit").as_secs(), 8796);
        assert_eq!(Timeouts::new(1, 0).patience(), Some(Duration::from_nanos(8192)));
    }
}
