//! The profiler half of NCCL's core, as each release has it: loads the library by `dlopen` and fills in descriptors of
//! the version that it speaks. Independent of the plugin's own encoder.

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;

use libloading::os::unix::Library;
use towline::nccl::ffi::*;

/// The library that this build made.
pub(crate) fn library_path() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().unwrap().join("libtowline.so")
}

/// What an event says; the fields that matter to some version.
#[derive(Clone, Copy)]
pub(crate) enum Event<'a> {
    GroupApi,
    CollApi {
        func: &'a CStr,
        count: usize,
    },
    P2pApi {
        func: &'a CStr,
        count: usize,
    },
    KernelLaunch,
    Group,
    /// `api` is the parent from v5 on, `group` before.
    Coll {
        api: *mut c_void,
        group: *mut c_void,
        func: &'a CStr,
        seq: u64,
        count: usize,
    },
    P2p {
        api: *mut c_void,
        group: *mut c_void,
        func: &'a CStr,
        count: usize,
        peer: c_int,
    },
    ProxyOp {
        pid: c_int,
        channel: u8,
        peer: c_int,
        steps: c_int,
        chunk: c_int,
        send: bool,
    },
    ProxyStep {
        step: c_int,
    },
    ProxyCtrl,
    KernelCh {
        channel: u8,
        timer: u64,
    },
    Net {
        id: i64,
        data: *mut c_void,
    },
    CeColl {
        func: &'a CStr,
        seq: u64,
        count: usize,
    },
    CeSync,
    CeBatch {
        bytes: usize,
    },
    KernelPhase {
        channel: u8,
        number: u8,
        timer: u64,
    },
}

/// A communicator as NCCL describes it.
#[derive(Clone, Copy)]
pub(crate) struct CommDescr {
    pub(crate) id: u64,
    pub(crate) ranks: c_int,
    pub(crate) rank: c_int,
}

/// A loaded profiler of one version.
#[derive(Clone, Copy)]
pub(crate) struct Host {
    pub(crate) version: u32,
    table: *const c_void,
}

// SAFETY: the table is constant data of a library that stays loaded; NCCL calls it from many threads.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

macro_rules! call {
    ($host:expr, $field:ident($($argument:expr),*)) => {
        // SAFETY: the table is of the type that its version says, and the arguments are valid for the call.
        unsafe {
            match $host.version {
                1 => call!(@ $host, ncclProfiler_v1_t, $field, $($argument),*),
                2 => call!(@ $host, ncclProfiler_v2_t, $field, $($argument),*),
                3 => call!(@ $host, ncclProfiler_v3_t, $field, $($argument),*),
                4 => call!(@ $host, ncclProfiler_v4_t, $field, $($argument),*),
                5 => call!(@ $host, ncclProfiler_v5_t, $field, $($argument),*),
                6 => call!(@ $host, ncclProfiler_v6_t, $field, $($argument),*),
                _ => call!(@ $host, ncclProfiler_v7_t, $field, $($argument),*),
            }
        }
    };
    (@ $host:expr, $table:ident, $field:ident, $($argument:expr),*) => {
        ((*$host.table.cast::<$table>()).$field.unwrap())($($argument),*)
    };
}

/// Starts an event through a descriptor of the given type; `fill` sets the union.
macro_rules! start {
    ($host:expr, $table:ident, $descr:ident, $context:expr, $kind:expr, $parent:expr, $rank:expr, $fill:expr) => {{
        // SAFETY: plain data, for which zero is a value.
        let mut d: $descr = unsafe { std::mem::zeroed() };
        d.type_ = $kind as _;
        d.parentObj = $parent;
        d.rank = $rank;
        #[allow(clippy::redundant_closure_call)]
        ($fill)(&mut d);
        let mut event = null_mut();
        // SAFETY: a table of this version, valid pointers.
        let code = unsafe { (*$host.table.cast::<$table>()).startEvent.unwrap()($context, &mut event, &mut d) };
        assert_eq!(code, ncclSuccess);
        event
    }};
}

macro_rules! fill_coll_named {
    ($d:expr, $func:expr, $seq:expr, $count:expr) => {{
        // SAFETY: zeroed plain data.
        let c = unsafe { &mut $d.u.coll };
        c.seqNumber = $seq;
        c.func = $func.as_ptr();
        c.count = $count;
        c.datatype = c"ncclFloat32".as_ptr();
        c.algo = c"RING".as_ptr();
        c.proto = c"SIMPLE".as_ptr();
    }};
}

macro_rules! fill_p2p_v2 {
    ($d:expr, $event:expr, $comm:expr) => {
        if let Event::P2p { group, func, count, peer, .. } = $event {
            // SAFETY: zeroed plain data.
            let p = unsafe { &mut $d.u.p2p };
            (p.commHash, p.func, p.datatype) = ($comm.id, func.as_ptr(), c"ncclFloat32".as_ptr());
            (p.count, p.peer) = (count, peer);
            $d.parentObj = group;
        }
    };
}

macro_rules! fill_proxy {
    ($d:expr, $event:expr) => {
        match $event {
            Event::ProxyOp { pid, channel, peer, steps, chunk, send } => {
                $d.u.proxyOp = ncclProfilerProxyOp_v1_t {
                    pid,
                    channelId: channel,
                    peer,
                    nSteps: steps,
                    chunkSize: chunk,
                    isSend: send.into(),
                };
            }
            Event::ProxyStep { step } => $d.u.proxyStep.step = step,
            _ => {}
        }
    };
}

macro_rules! fill_net {
    ($d:expr, $event:expr) => {
        match $event {
            Event::Net { id, data } => $d.u.netPlugin = ncclProfilerNetPlugin_v3_t { id, data },
            _ => fill_proxy!($d, $event),
        }
    };
}

macro_rules! fill_v5 {
    ($d:expr, $event:expr) => {
        match $event {
            Event::CollApi { func, count } => {
                // SAFETY: zeroed plain data.
                let c = unsafe { &mut $d.u.collApi };
                c.func = func.as_ptr();
                c.count = count;
                c.datatype = c"ncclFloat32".as_ptr();
            }
            Event::P2pApi { func, count } => {
                // SAFETY: zeroed plain data.
                let c = unsafe { &mut $d.u.p2pApi };
                c.func = func.as_ptr();
                c.count = count;
                c.datatype = c"ncclFloat32".as_ptr();
            }
            Event::Coll { api, group, func, seq, count } => {
                fill_coll_named!($d, func, seq, count);
                $d.u.coll.parentGroup = group;
                $d.parentObj = api;
            }
            Event::P2p { api, group, func, count, peer } => {
                // SAFETY: zeroed plain data.
                let p = unsafe { &mut $d.u.p2p };
                (p.func, p.datatype) = (func.as_ptr(), c"ncclFloat32".as_ptr());
                (p.count, p.peer, p.nChannels, p.parentGroup) = (count, peer, 1, group);
                $d.parentObj = api;
            }
            Event::KernelCh { channel, timer } => {
                $d.u.kernelCh = ncclProfilerKernelCh_v4_t { channelId: channel, pTimer: timer };
            }
            _ => fill_net!($d, $event),
        }
    };
}

macro_rules! fill_v6 {
    ($d:expr, $event:expr, $comm:expr) => {
        match $event {
            Event::CeColl { func, seq, count } => {
                // SAFETY: zeroed plain data.
                let c = unsafe { &mut $d.u.ceColl };
                c.seqNumber = seq;
                c.func = func.as_ptr();
                c.count = count;
                c.datatype = c"ncclFloat32".as_ptr();
                c.syncStrategy = c"MC".as_ptr();
            }
            Event::CeSync => $d.u.ceCollSync.nRanks = $comm.ranks,
            Event::CeBatch { bytes } => $d.u.ceCollBatch.totalBytes = bytes,
            _ => fill_v5!($d, $event),
        }
    };
}

impl Event<'_> {
    /// The mask bit, and the first version that has it.
    fn kind(&self) -> (u64, u32) {
        let (kind, since) = match self {
            Event::Group => (ncclProfileGroup, 1),
            Event::Coll { .. } => (ncclProfileColl, 1),
            Event::P2p { .. } => (ncclProfileP2p, 1),
            Event::ProxyOp { .. } => (ncclProfileProxyOp, 1),
            Event::ProxyStep { .. } => (ncclProfileProxyStep, 1),
            Event::ProxyCtrl => (ncclProfileProxyCtrl, 1),
            Event::KernelCh { .. } => (ncclProfileKernelCh, 3),
            Event::Net { .. } => (ncclProfileNetPlugin, 3),
            Event::GroupApi => (ncclProfileGroupApi, 5),
            Event::CollApi { .. } => (ncclProfileCollApi, 5),
            Event::P2pApi { .. } => (ncclProfileP2pApi, 5),
            Event::KernelLaunch => (ncclProfileKernelLaunch, 5),
            Event::CeColl { .. } => (ncclProfileCeColl, 6),
            Event::CeSync => (ncclProfileCeSync, 6),
            Event::CeBatch { .. } => (ncclProfileCeBatch, 6),
            Event::KernelPhase { .. } => (ncclProfileKernelPhase, 7),
        };
        (kind.into(), since)
    }
}

impl Host {
    /// Loads the library that this build made.
    pub(crate) fn load(version: u32) -> Host {
        Self::load_from(&library_path(), version)
    }

    /// Loads some library.
    pub(crate) fn load_from(path: &std::path::Path, version: u32) -> Host {
        // SAFETY: our own library, whose constructors do nothing of note.
        let library = unsafe { Library::new(path) }.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let symbol = CString::new(format!("ncclProfiler_v{version}")).unwrap();
        // SAFETY: by its name the symbol is a table of that version.
        let table = unsafe { library.get::<*const c_void>(symbol.as_bytes_with_nul()) }.unwrap().into_raw();
        std::mem::forget(library);
        Host { version, table: table.cast_const() }
    }

    /// Calls init; returns the context.
    pub(crate) fn init(&self, comm: CommDescr, mask: *mut c_int) -> *mut c_void {
        let mut context = null_mut();
        let name = c"world".as_ptr();
        // SAFETY: a table of this version, valid pointers; the mask outlives the communicators of a test.
        let code = unsafe {
            match self.version {
                1..=3 => (*self.table.cast::<ncclProfiler_v1_t>()).init.unwrap()(&mut context, mask),
                4 => (*self.table.cast::<ncclProfiler_v4_t>()).init.unwrap()(
                    &mut context,
                    mask,
                    name,
                    comm.id,
                    comm.ranks,
                    comm.ranks,
                    comm.rank,
                    None,
                ),
                _ => (*self.table.cast::<ncclProfiler_v5_t>()).init.unwrap()(
                    &mut context,
                    comm.id,
                    mask,
                    name,
                    comm.ranks,
                    comm.ranks,
                    comm.rank,
                    None,
                ),
            }
        };
        assert_eq!(code, ncclSuccess);
        context
    }

    /// Calls startEvent if this version has the event, as NCCL would.
    pub(crate) fn start(
        &self,
        context: *mut c_void,
        comm: CommDescr,
        parent: *mut c_void,
        event: Event<'_>,
    ) -> *mut c_void {
        let (kind, since) = event.kind();
        if self.version < since {
            return null_mut();
        }
        let rank = comm.rank;
        match self.version {
            1 => start!(
                self,
                ncclProfiler_v1_t,
                ncclProfilerEventDescr_v1_t,
                context,
                kind,
                parent,
                rank,
                |d: &mut ncclProfilerEventDescr_v1_t| {
                    match event {
                        Event::Coll { group, seq, count, .. } => {
                            // SAFETY: zeroed plain data.
                            let c = unsafe { &mut d.u.coll };
                            (c.commHash, c.name) = (comm.id, c"world".as_ptr());
                            // AllReduce, ncclFloat32, RING, SIMPLE in NCCL's numbers.
                            (c.seqNumber, c.func, c.count, c.datatype, c.algo, c.proto) = (seq, 4, count, 7, 1, 2);
                            d.parentObj = group;
                        }
                        Event::P2p { group, func, count, peer, .. } => {
                            // SAFETY: zeroed plain data.
                            let p = unsafe { &mut d.u.p2p };
                            let func = if func == c"Send" { 6 } else { 7 };
                            (p.commHash, p.func, p.count, p.datatype, p.peer) = (comm.id, func, count, 7, peer);
                            d.parentObj = group;
                        }
                        _ => fill_proxy!(d, event),
                    }
                }
            ),
            2 => start!(
                self,
                ncclProfiler_v2_t,
                ncclProfilerEventDescr_v2_t,
                context,
                kind,
                parent,
                rank,
                |d: &mut ncclProfilerEventDescr_v2_t| {
                    match event {
                        Event::Coll { group, func, seq, count, .. } => {
                            fill_coll_named!(d, func, seq, count);
                            d.u.coll.commHash = comm.id;
                            d.parentObj = group;
                        }
                        Event::P2p { .. } => fill_p2p_v2!(d, event, comm),
                        _ => fill_proxy!(d, event),
                    }
                }
            ),
            3 => start!(
                self,
                ncclProfiler_v3_t,
                ncclProfilerEventDescr_v3_t,
                context,
                kind,
                parent,
                rank,
                |d: &mut ncclProfilerEventDescr_v3_t| {
                    match event {
                        Event::Coll { group, func, seq, count, .. } => {
                            fill_coll_named!(d, func, seq, count);
                            d.u.coll.commHash = comm.id;
                            d.parentObj = group;
                        }
                        Event::P2p { .. } => fill_p2p_v2!(d, event, comm),
                        Event::KernelCh { channel, .. } => d.u.kernelCh.channelId = channel,
                        _ => fill_net!(d, event),
                    }
                }
            ),
            4 => start!(
                self,
                ncclProfiler_v4_t,
                ncclProfilerEventDescr_v4_t,
                context,
                kind,
                parent,
                rank,
                |d: &mut ncclProfilerEventDescr_v4_t| {
                    match event {
                        Event::Coll { group, func, seq, count, .. } => {
                            fill_coll_named!(d, func, seq, count);
                            d.parentObj = group;
                        }
                        Event::KernelCh { channel, timer } => {
                            d.u.kernelCh = ncclProfilerKernelCh_v4_t { channelId: channel, pTimer: timer };
                        }
                        Event::P2p { group, func, count, peer, .. } => {
                            // SAFETY: zeroed plain data.
                            let p = unsafe { &mut d.u.p2p };
                            (p.func, p.datatype) = (func.as_ptr(), c"ncclFloat32".as_ptr());
                            (p.count, p.peer) = (count, peer);
                            d.parentObj = group;
                        }
                        _ => fill_net!(d, event),
                    }
                }
            ),
            5 => start!(
                self,
                ncclProfiler_v5_t,
                ncclProfilerEventDescr_v5_t,
                context,
                kind,
                parent,
                rank,
                |d: &mut ncclProfilerEventDescr_v5_t| fill_v5!(d, event)
            ),
            6 => start!(
                self,
                ncclProfiler_v6_t,
                ncclProfilerEventDescr_v6_t,
                context,
                kind,
                parent,
                rank,
                |d: &mut ncclProfilerEventDescr_v6_t| fill_v6!(d, event, comm)
            ),
            _ => start!(
                self,
                ncclProfiler_v7_t,
                ncclProfilerEventDescr_v7_t,
                context,
                kind,
                parent,
                rank,
                |d: &mut ncclProfilerEventDescr_v7_t| {
                    match event {
                        Event::KernelPhase { channel, number, timer } => {
                            let names = [c"initial_sync", c"compute", c"final_sync"];
                            d.u.kernelPhase = ncclProfilerKernelPhase_v7_t {
                                channelId: channel,
                                phaseId: number,
                                phaseName: names[usize::from(number)].as_ptr(),
                                pTimer: timer,
                            };
                        }
                        _ => fill_v6!(d, event, comm),
                    }
                    match event {
                        Event::CollApi { .. } => d.u.collApi.userTag = u64::MAX,
                        Event::P2pApi { .. } => d.u.p2pApi.userTag = u64::MAX,
                        Event::P2p { .. } => d.u.p2p.userTag = u64::MAX,
                        Event::CeColl { .. } => d.u.ceColl.userTag = u64::MAX,
                        Event::Coll { .. } => {
                            // SAFETY: zeroed plain data.
                            let c = unsafe { &mut d.u.coll };
                            (c.kernelVariant, c.isSymColl, c.userTag) = (c"LD".as_ptr(), true, u64::MAX);
                        }
                        _ => {}
                    }
                }
            ),
        }
    }

    /// Calls stopEvent unless the handle is null, as NCCL would.
    pub(crate) fn stop(&self, event: *mut c_void) {
        if !event.is_null() {
            assert_eq!(call!(self, stopEvent(event)), ncclSuccess);
        }
    }

    /// Calls recordEventState with a size, a number of operations or a timer, in the union's place for it.
    pub(crate) fn state(&self, event: *mut c_void, state: ncclProfilerEventState_t, value: u64) {
        if event.is_null() {
            return;
        }
        if self.version < 4 {
            if state > ncclProfilerProxyCtrlAppendEnd {
                return;
            }
            // SAFETY: zeroed plain data.
            let mut args: ncclProfilerEventStateArgs_v1_t = unsafe { std::mem::zeroed() };
            if state <= ncclProfilerProxyOpRecvDone {
                args.proxyOp.transSize = value as usize;
            } else if state >= ncclProfilerProxyCtrlIdle {
                args.proxyCtrl.appendedProxyOps = value as c_int;
            }
            // SAFETY: the tables of v1 to v3 have this function in the same place and of the same type.
            let code =
                unsafe { (*self.table.cast::<ncclProfiler_v1_t>()).recordEventState.unwrap()(event, state, &mut args) };
            assert_eq!(code, ncclSuccess);
            return;
        }
        // SAFETY: zeroed plain data.
        let mut args: ncclProfilerEventStateArgs_v4_t = unsafe { std::mem::zeroed() };
        match state {
            number if [ncclProfilerKernelChStop, ncclProfilerKernelPhaseStop].contains(&number) => {
                args.kernelCh.pTimer = value;
            }
            number if number == ncclProfilerProxyCtrlAppendEnd => args.proxyCtrl.appendedProxyOps = value as c_int,
            _ => args.proxyStep.transSize = value as usize,
        }
        self.record(event, state, &mut args);
    }

    /// Calls recordEventState for a network plugin's update (from v4 on).
    pub(crate) fn update(&self, event: *mut c_void, data: *mut c_void) {
        if event.is_null() || self.version < 4 {
            return;
        }
        // SAFETY: zeroed plain data.
        let mut args: ncclProfilerEventStateArgs_v4_t = unsafe { std::mem::zeroed() };
        args.netPlugin.data = data;
        self.record(event, ncclProfilerNetPluginUpdate, &mut args);
    }

    /// Calls recordEventState without arguments, as NCCL does for groups.
    pub(crate) fn group_state(&self, event: *mut c_void, state: ncclProfilerEventState_t) {
        if !event.is_null() && self.version >= 5 {
            self.record(event, state, null_mut());
        }
    }

    fn record(&self, event: *mut c_void, state: ncclProfilerEventState_t, args: *mut ncclProfilerEventStateArgs_v4_t) {
        // SAFETY: the tables of v4 to v7 have this function in the same place and of the same type.
        let code = unsafe { (*self.table.cast::<ncclProfiler_v4_t>()).recordEventState.unwrap()(event, state, args) };
        assert_eq!(code, ncclSuccess);
    }

    /// Calls finalize if there is a context, as NCCL would.
    pub(crate) fn finalize(&self, context: *mut c_void) {
        if !context.is_null() {
            assert_eq!(call!(self, finalize(context)), ncclSuccess);
        }
    }
}
