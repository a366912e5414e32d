//! v7 of the profiler interface, loaded by NCCL 2.31 and later.
//!
//! New against v6: members at the ends of the structures of calls (the user's tag, the kernel's variant). Also new are
//! events of the phases of kernels on symmetric memory, which NCCL 2.31 reports when the kernel is over. A collective's
//! tag is kept with the host call above it.

use std::ffi::{c_int, c_void};

use super::members::{self, Net, descr, net};
use super::v6::V6;
use super::{Version, functions, init_of_table_since_v5, init_since_v5, profiler_version};
use crate::nccl::ffi::*;
use crate::trace::chain::{Change, Start};
use crate::trace::event::{Body, Kind, state};
use crate::trace::names::Name;

/// The version.
pub(super) struct V7;

profiler_version! {
    /// The table that NCCL 2.31 and later load.
    ncclProfiler_v7: ncclProfiler_v7_t, ncclProfilerEventDescr_v7_t, ncclProfilerEventStateArgs_v7_t, V7, 7
}

init_since_v5!(7);

const _: () = assert!(
    size_of::<ncclProfilerEventDescr_v6_t>() <= size_of::<ncclProfilerEventDescr_v7_t>()
        && align_of::<ncclProfilerEventDescr_v6_t>() == align_of::<ncclProfilerEventDescr_v7_t>()
);

impl Version for V7 {
    const NUMBER: u32 = 7;
    type Descr = ncclProfilerEventDescr_v7_t;
    type Args = ncclProfilerEventStateArgs_v7_t;
    type Table = ncclProfiler_v7_t;

    unsafe fn net(d: &Self::Descr) -> Option<Net<'_>> {
        net!(d)
    }

    unsafe fn decode(d: &Self::Descr) -> Option<Start> {
        if d.type_ == u64::from(Kind::KernelPhase.bit()) {
            // SAFETY: the member that goes with the type, whose string is a C string or null.
            let body = unsafe {
                let p = &d.u.kernelPhase;
                let name = Name::from_ptr(p.phaseName);
                Body::KernelPhase { channel: p.channelId, number: p.phaseId, name, timer: p.pTimer }
            };
            return Some(members::start(d.parentObj, d.rank, body));
        }
        // SAFETY: a descriptor of v7 begins with that of v6. Each member of v6's union lies at the same place and is
        // the beginning of v7's member of that name (tests/abi/layout.rs has both from NCCL's headers). v6's is no
        // longer, and aligned alike (above). The promise is passed on; v6 reads the member that the type says, and none
        // of a type that is new in v7.
        let mut start = unsafe { V6::decode(&*std::ptr::from_ref(d).cast::<ncclProfilerEventDescr_v6_t>()) }?;
        // SAFETY: in each arm the member that goes with the type, whose strings are C strings or null.
        unsafe {
            match &mut start.body {
                Body::CollApi(call) => call.tag = d.u.collApi.userTag,
                Body::P2pApi(call) => call.tag = d.u.p2pApi.userTag,
                Body::P2p(p2p) => p2p.tag = d.u.p2p.userTag,
                Body::CeColl(coll) => coll.tag = d.u.ceColl.userTag,
                Body::Coll(coll) => {
                    coll.variant = Name::from_ptr(d.u.coll.kernelVariant);
                    coll.symmetric = d.u.coll.isSymColl;
                }
                _ => {}
            }
        }
        Some(start)
    }

    fn encode(start: &Start, parent: *mut c_void, group: *mut c_void) -> Option<Self::Descr> {
        if let Body::KernelPhase { channel, number, name, timer } = start.body {
            let mut d = descr!(ncclProfilerEventDescr_v7_t, start, Kind::KernelPhase, parent);
            d.u.kernelPhase = ncclProfilerKernelPhase_v7_t {
                channelId: channel,
                phaseId: number,
                phaseName: name.as_ptr(),
                pTimer: timer,
            };
            return Some(d);
        }
        let old = V6::encode(start, parent, group)?;
        // SAFETY: plain data, for which zero is a value: null pointers, no tag.
        let mut d: Self::Descr = unsafe { std::mem::zeroed() };
        // SAFETY: a descriptor of v6 is the beginning of one of v7 (see `decode`), and the place is large enough.
        unsafe { (&raw mut d).cast::<ncclProfilerEventDescr_v6_t>().write(old) };
        match &start.body {
            Body::CollApi(call) => d.u.collApi.userTag = call.tag,
            Body::P2pApi(call) => d.u.p2pApi.userTag = call.tag,
            Body::P2p(p2p) => d.u.p2p.userTag = p2p.tag,
            Body::CeColl(coll) => d.u.ceColl.userTag = coll.tag,
            Body::Coll(coll) => {
                d.u.coll.kernelVariant = coll.variant.as_ptr();
                d.u.coll.isSymColl = coll.symmetric;
            }
            _ => {}
        }
        Some(d)
    }

    unsafe fn change(state: ncclProfilerEventState_t, args: Option<&Self::Args>) -> Change {
        // SAFETY: passed on.
        unsafe { members::change_v4(state, args) }
    }

    fn args(change: &Change) -> Option<Self::Args> {
        (change.state <= c_int::from(state::KERNEL_PHASE_STOP)).then(|| members::args_v4(change))
    }

    init_of_table_since_v5!();

    functions!();
}
