//! v6 of the profiler interface, loaded by NCCL 2.29 and 2.30.
//!
//! New against v5: events of collectives that the copy engines run, their synchronisations and batches.

use std::ffi::c_void;

use super::members::{self, Net, address, descr, net, number};
use super::v5::{self, decode_v5, encode_v5};
use super::{Version, functions, init_of_table_since_v5, init_since_v5, profiler_version};
use crate::nccl::ffi::*;
use crate::trace::chain::{Change, Start};
use crate::trace::event::{Body, CeColl, Kind};
use crate::trace::names::Name;

/// The version.
pub(super) struct V6;

profiler_version! {
    /// The table that NCCL 2.29 and 2.30 load.
    ncclProfiler_v6: ncclProfiler_v6_t, ncclProfilerEventDescr_v6_t, ncclProfilerEventStateArgs_v6_t, V6, 6
}

init_since_v5!(6);

/// # Safety
/// The descriptor's member is that of `kind`; its strings are C strings or null.
unsafe fn copy_engine(d: &ncclProfilerEventDescr_v6_t, kind: Kind) -> Option<Body> {
    // SAFETY: passed on.
    unsafe {
        Some(match kind {
            Kind::CeColl => {
                let c = &d.u.ceColl;
                Body::CeColl(CeColl {
                    seq: c.seqNumber,
                    count: c.count as u64,
                    send_buffer: number(c.sendBuff),
                    recv_buffer: number(c.recvBuff),
                    stream: number(c.stream),
                    root: c.root,
                    batch_size: c.batchSize,
                    batches: c.numBatches,
                    ce_seq: c.ceSeqNum,
                    func: Name::from_ptr(c.func),
                    datatype: Name::from_ptr(c.datatype),
                    strategy: Name::from_ptr(c.syncStrategy),
                    intra_sync: c.intraBatchSync,
                    tag: 0,
                })
            }
            Kind::CeSync => Body::CeSync { complete: d.u.ceCollSync.isComplete, ranks: d.u.ceCollSync.nRanks },
            Kind::CeBatch => Body::CeBatch {
                ops: d.u.ceCollBatch.numOps,
                bytes: d.u.ceCollBatch.totalBytes as u64,
                intra_sync: d.u.ceCollBatch.useIntraSync,
            },
            _ => return None,
        })
    }
}

impl Version for V6 {
    const NUMBER: u32 = 6;
    type Descr = ncclProfilerEventDescr_v6_t;
    type Args = ncclProfilerEventStateArgs_v6_t;
    type Table = ncclProfiler_v6_t;

    unsafe fn net(d: &Self::Descr) -> Option<Net<'_>> {
        net!(d)
    }

    unsafe fn decode(d: &Self::Descr) -> Option<Start> {
        // SAFETY: in each arm the member that goes with the type.
        let body = unsafe {
            let kind = Kind::from_bit(d.type_)?;
            match copy_engine(d, kind) {
                Some(body) => body,
                None => decode_v5!(d, kind),
            }
        };
        Some(members::start(d.parentObj, d.rank, body))
    }

    fn encode(start: &Start, parent: *mut c_void, group: *mut c_void) -> Option<Self::Descr> {
        let mut d = descr!(ncclProfilerEventDescr_v6_t, start, start.body.kind()?, parent);
        if encode_v5!(d, start, group) {
            return Some(d);
        }
        match &start.body {
            Body::CeColl(c) => {
                d.u.ceColl = ncclProfilerCeColl_v6_t {
                    seqNumber: c.seq,
                    func: c.func.as_ptr(),
                    sendBuff: address(c.send_buffer),
                    recvBuff: address(c.recv_buffer),
                    count: c.count as usize,
                    root: c.root,
                    datatype: c.datatype.as_ptr(),
                    syncStrategy: c.strategy.as_ptr(),
                    intraBatchSync: c.intra_sync,
                    batchSize: c.batch_size,
                    numBatches: c.batches,
                    ceSeqNum: c.ce_seq,
                    stream: address(c.stream),
                };
            }
            Body::CeSync { complete, ranks } => {
                d.u.ceCollSync = ncclProfilerCeCollSync_v6_t { isComplete: *complete, nRanks: *ranks };
            }
            Body::CeBatch { ops, bytes, intra_sync } => {
                d.u.ceCollBatch = ncclProfilerCeCollBatch_v6_t {
                    numOps: *ops,
                    totalBytes: *bytes as usize,
                    useIntraSync: *intra_sync,
                };
            }
            _ => return None,
        }
        Some(d)
    }

    unsafe fn change(state: ncclProfilerEventState_t, args: Option<&Self::Args>) -> Change {
        // SAFETY: passed on.
        unsafe { members::change_v4(state, args) }
    }

    fn args(change: &Change) -> Option<Self::Args> {
        (change.state <= 30).then(|| members::args_v4(change))
    }

    init_of_table_since_v5!();

    functions!();
}
