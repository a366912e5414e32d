//! Work requests: what to transfer, from where and to where.

use std::mem::MaybeUninit;
use std::ptr;

use rdma_sys as ib;

/// Memory of this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Local {
    /// Where it starts.
    pub address: u64,
    /// How many bytes; a work request may be empty.
    pub length: u32,
    /// The key of the region; unused when the bytes travel inline.
    pub key: u32,
}

/// Memory of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remote {
    /// Where it starts, by the peer's addresses.
    pub address: u64,
    /// The key of the peer's region.
    pub key: u32,
}

/// A work request of the sending queue: an RDMA write, or with `is_read` an RDMA read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Work {
    /// Comes back in the completion.
    pub id: u64,
    /// This side's memory.
    pub local: Local,
    /// The peer's memory.
    pub remote: Remote,
    /// A number that the peer gets with the completion of one of its receives, after all bytes of this and of earlier
    /// writes of the queue pair are in place.
    pub immediate: Option<u32>,
    /// Whether it is a read, from the peer's memory to this side's.
    pub is_read: bool,
    /// Whether the bytes are copied into the request at posting, so that the memory is free at once and needs no
    /// region. Bounded by the queue pair's capacity.
    pub is_inline: bool,
    /// Whether success is reported too. Failure always is.
    pub is_signaled: bool,
}

impl Work {
    /// Its memory in libibverbs's form.
    #[inline(always)]
    pub(super) fn piece(&self) -> ib::ibv_sge {
        ib::ibv_sge { addr: self.local.address, length: self.local.length, lkey: self.local.key }
    }

    /// The request in libibverbs's form; `piece` points to its memory, `next` to the request behind it or nowhere.
    #[inline(always)]
    pub(super) fn request(&self, piece: *mut ib::ibv_sge, next: *mut ib::ibv_send_wr) -> ib::ibv_send_wr {
        let flags = if self.is_signaled { ib::ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 }
            | if self.is_inline { ib::ibv_send_flags::IBV_SEND_INLINE.0 } else { 0 };
        ib::ibv_send_wr {
            wr_id: self.id,
            next,
            sg_list: piece,
            num_sge: i32::from(self.local.length > 0),
            opcode: match (self.is_read, self.immediate) {
                (true, _) => ib::ibv_wr_opcode::IBV_WR_RDMA_READ,
                (false, Some(_)) => ib::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
                (false, None) => ib::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            },
            send_flags: flags,
            imm_data_invalidated_rkey_union: ib::imm_data_invalidated_rkey_union_t {
                imm_data: self.immediate.unwrap_or(0).to_be(),
            },
            wr: ib::wr_t { rdma: ib::rdma_t { remote_addr: self.remote.address, rkey: self.remote.key } },
            qp_type: ib::qp_type_t { xrc: ib::xrc_t { remote_srqn: 0 } },
            bind_mw_tso_union: ib::bind_mw_tso_union_t { tso: ib::tso_t { hdr: ptr::null_mut(), hdr_sz: 0, mss: 0 } },
        }
    }
}

/// The most work requests posted in one call; a longer list takes several.
pub(super) const BATCH: usize = 16;

/// A chain of work requests in libibverbs's form, on the stack.
pub(super) struct Chain {
    requests: [MaybeUninit<ib::ibv_send_wr>; BATCH],
    pieces: [MaybeUninit<ib::ibv_sge>; BATCH],
}

impl Chain {
    pub(super) const fn new() -> Self {
        Self { requests: [const { MaybeUninit::uninit() }; BATCH], pieces: [const { MaybeUninit::uninit() }; BATCH] }
    }

    /// Links up to [`BATCH`] requests together. The chain points into itself: it must not move before it is posted.
    #[inline]
    pub(super) fn link(&mut self, list: &[Work]) -> *mut ib::ibv_send_wr {
        debug_assert!((1..=BATCH).contains(&list.len()));
        let first = self.requests.as_mut_ptr().cast::<ib::ibv_send_wr>();
        let pieces = self.pieces.as_mut_ptr().cast::<ib::ibv_sge>();
        for (index, work) in list.iter().take(BATCH).enumerate() {
            // SAFETY: both arrays have BATCH elements and `index` is below that.
            let piece = unsafe { pieces.add(index) };
            // SAFETY: as above.
            unsafe { piece.write(work.piece()) };
            let last = index + 1 == list.len();
            // SAFETY: as above; the last one has no successor.
            let next = if last { ptr::null_mut() } else { unsafe { first.add(index + 1) } };
            let request = work.request(piece, next);
            // SAFETY: as above.
            unsafe { first.add(index).write(request) };
        }
        first
    }
}
