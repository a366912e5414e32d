//! NCCL's profiler callback, as a listener for the transport's events.
//!
//! This file knows what differs between releases: which of them tolerate which calls, and how a piece is described.
//! When and how often an event is reported is decided in [`crate::engine::events`].
//!
//! | NCCL | interface | events |
//! |---|---|---|
//! | 2.26 | v10 | off by default; every call that is not a start is treated as a stop, so no update is sent |
//! | 2.27 | v10 | off by default: a start under a profiler without ProxyStep and NetPlugin events crashes |
//! | 2.28 and later | v11, v12 | on |

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use smallvec::SmallVec;

use crate::engine::events::{Carrier, Listener, Piece, Source, Waits};
use crate::nccl::ffi;
use crate::nccl::net_event::{
    self, CARRIER_QUEUE_PAIR, CARRIER_SOCKET, FLAG_ENDED, FLAG_RESEND, FLAG_SEND, MOST_AT_ONCE, NetEvent, NetSum,
    NetSumNews, PLUGIN_ID, PLUGIN_ID_IB, PLUGIN_ID_SOCKET, PLUGIN_ID_SUM, Reader, SEVERAL,
};
use crate::os::config::NetEvents;
use crate::os::ticks::Ticks;

/// NCCL's number for release 2.27.0, the first that supports updates.
const UPDATES_SINCE: c_int = 22_700;
/// NCCL's number for release 2.28.0, the first that tolerates events under any profiler.
const ALWAYS_SINCE: c_int = 22_800;

/// `IBV_WR_RDMA_WRITE_WITH_IMM`: how a queue pair's share of a message ends.
const WRITE_WITH_IMMEDIATE: i32 = 1;
/// `IBV_WC_RECV_RDMA_WITH_IMM`: the completion of it at the receiver.
const RECEIVED_IMMEDIATE: i32 = 129;

type Callback = unsafe extern "C" fn(*mut *mut c_void, c_int, *mut c_void, i64, *mut c_void) -> ffi::ncclResult_t;

/// NCCL's profiler.
#[derive(Debug)]
pub(crate) struct NcclProfiler {
    callback: Callback,
    setting: NetEvents,
    updates: bool,
}

/// NCCL's profiler behind `callback`, or None when transfers must not be reported to it. `api` is the version of the
/// network interface.
pub fn new(callback: ffi::ncclProfilerCallback_t, api: u8, setting: NetEvents) -> Option<Arc<dyn Listener>> {
    let callback = callback?;
    // If the library has no version function, the interface decides: only 2.26 and 2.27 use v10.
    let release = release_of(callback).unwrap_or(if api > 10 { ALWAYS_SINCE } else { UPDATES_SINCE - 1 });
    if setting == NetEvents::Off || setting == NetEvents::Auto && release < ALWAYS_SINCE {
        return None;
    }
    Some(Arc::new(NcclProfiler { callback, setting, updates: release >= UPDATES_SINCE }))
}

/// The release of the library that contains a function, by its `ncclGetVersion`.
fn release_of(callback: Callback) -> Option<c_int> {
    let home = library_of(callback as *const c_void)?;
    let name = c"ncclGetVersion".as_ptr();
    // SAFETY: names the library that the callback lies in, which is loaded; only its reference count changes.
    let library = unsafe { libc::dlopen(home.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    // A program that NCCL is linked into cannot be opened by name; its symbols may be found in the common scope.
    // SAFETY: a library's handle, or the common scope.
    let symbol = unsafe { libc::dlsym(if library.is_null() { libc::RTLD_DEFAULT } else { library }, name) };
    if !library.is_null() {
        // SAFETY: opened above. The callback's owner keeps it mapped.
        unsafe { libc::dlclose(library) };
    }
    // Another NCCL in the same process would have another version.
    if symbol.is_null() || library_of(symbol)?.dli_fbase != home.dli_fbase {
        return None;
    }
    // SAFETY: NCCL's function of that name, in the library that contains the callback.
    let version = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(symbol) };
    let mut number = 0;
    // SAFETY: a valid place for the result.
    let code = unsafe { version(&mut number) };
    (code == 0 && number > 0).then_some(number)
}

fn library_of(address: *const c_void) -> Option<libc::Dl_info> {
    // SAFETY: plain data, for which zero is a value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be queried.
    let found = unsafe { libc::dladdr(address, &mut info) } != 0;
    let named = found && !info.dli_fname.is_null() && {
        // SAFETY: the loader's own string, which lives as long as the library.
        !unsafe { CStr::from_ptr(info.dli_fname) }.is_empty()
    };
    named.then_some(info)
}

impl NcclProfiler {
    fn call(&self, event: &mut *mut c_void, kind: c_int, transfer: *mut c_void, id: i64, data: *mut c_void) {
        // SAFETY: NCCL's function. A start's transfer is alive by the promise of `Listener::start`; the data have the
        // type that the identifier names.
        let code = unsafe { (self.callback)(event, kind, transfer, id, data) };
        if code != ffi::ncclSuccess {
            tracing::trace!("NCCL's profiler callback answered {code}");
        }
    }
}

impl NcclProfiler {
    /// Reports what has ended: the part at `data`, and those behind it that it counts, or a sum, as the identifier
    /// shows. Returns whether it was taken.
    fn start_and_stop(&self, transfer: *mut c_void, id: i64, data: *mut c_void) -> bool {
        let mut event = std::ptr::null_mut();
        self.call(&mut event, ffi::ncclProfilerNetEventStart as c_int, transfer, id, data);
        if event.is_null() {
            return false;
        }
        let kind = ffi::ncclProfilerNetEventStop as c_int;
        self.call(&mut event, kind, std::ptr::null_mut(), 0, std::ptr::null_mut());
        true
    }

    /// Reports a transfer that ended then. Returns whether it was taken.
    fn sum(&self, transfer: *mut c_void, sum: NetSum, ended: Ticks) -> bool {
        let mut news = NetSumNews { sum, ended: ended.number(), taken: false };
        // A profiler other than Towline's, in a process with two NCCLs, would treat it as an event.
        self.start_and_stop(transfer, PLUGIN_ID_SUM, (&raw mut news).cast()) || news.taken
    }
}

impl Listener for NcclProfiler {
    fn reader(&self) -> Reader {
        let reader = match self.setting {
            NetEvents::Nccl | NetEvents::Off => Reader::None,
            NetEvents::Auto => net_event::reader(),
            NetEvents::Towline => net_event::reader().max(Reader::Hasty),
        };
        if self.updates { reader } else { reader.min(Reader::Hasty) }
    }

    unsafe fn start(&self, transfer: *mut c_void, source: &Source<'_>, piece: &Piece) -> *mut c_void {
        let mut event = std::ptr::null_mut();
        let mut start = |id, data| self.call(&mut event, ffi::ncclProfilerNetEventStart as c_int, transfer, id, data);
        if source.details {
            let mut data = describe(source, piece, 0, piece.began);
            start(PLUGIN_ID, (&raw mut data).cast());
            return event;
        }
        match source.path(piece).carrier {
            Carrier::QueuePair { device, number } => {
                // SAFETY: plain data, for which zero is a value.
                let mut data: ffi::ncclProfilerNetIbDescr_v1_t = unsafe { std::mem::zeroed() };
                data.type_ = ffi::ncclProfileQp as u8;
                data.qp.device = device;
                data.qp.wr_id = piece.chunk.wr_id;
                data.qp.opcode = verbs_operation(source.send);
                data.qp.qpNum = number;
                data.qp.length = piece.chunk.length as usize;
                start(PLUGIN_ID_IB, (&raw mut data).cast());
            }
            carrier @ (Carrier::Socket { .. } | Carrier::None) => {
                // SAFETY: plain data, for which zero is a value.
                let mut data: ffi::ncclProfilerNetSockDescr_v1_t = unsafe { std::mem::zeroed() };
                data.type_ = ffi::ncclProfileSocket as u8;
                data.sock.fd = if let Carrier::Socket { fd } = carrier { fd } else { -1 };
                data.sock.op = socket_operation(source.send);
                data.sock.length = piece.chunk.length as usize;
                start(PLUGIN_ID_SOCKET, (&raw mut data).cast());
            }
        }
        event
    }

    fn stop(&self, mut event: *mut c_void, source: &Source<'_>, piece: &Piece) {
        if let (true, Some(ended)) = (source.details && self.updates, piece.ended) {
            let mut data = describe(source, piece, 0, ended);
            let kind = ffi::ncclProfilerNetEventUpdateAndStop as c_int;
            return self.call(&mut event, kind, std::ptr::null_mut(), PLUGIN_ID, (&raw mut data).cast());
        }
        let kind = ffi::ncclProfilerNetEventStop as c_int;
        self.call(&mut event, kind, std::ptr::null_mut(), 0, std::ptr::null_mut());
    }

    unsafe fn summary(&self, transfer: *mut c_void, source: &Source<'_>, pieces: &[Piece]) -> bool {
        if let ([piece], 0, Reader::Sums) = (pieces, source.reconnects, self.reader()) {
            return self.sum(transfer, sum(source, piece), piece.ended.unwrap_or(piece.began));
        }
        let mut is_taken = false;
        for (number, together) in pieces.chunks(MOST_AT_ONCE).enumerate() {
            let part = |piece: &Piece| describe(source, piece, FLAG_ENDED, piece.began);
            let mut parts: SmallVec<[NetEvent; MOST_AT_ONCE]> = together.iter().map(part).collect();
            // The other entries of this summary do not report it.
            parts.iter_mut().skip(usize::from(number == 0)).for_each(|part| part.reconnects = 0);
            parts[0].set_more(together.len() - 1);
            if !self.start_and_stop(transfer, PLUGIN_ID, parts.as_mut_ptr().cast()) {
                break;
            }
            is_taken = true;
        }
        is_taken
    }
}

/// 0 for a send and 1 for a receive, as in NCCL's Socket.
fn socket_operation(send: bool) -> i32 {
    i32::from(!send)
}

/// The operation of a send; of a receive, what it completes with.
fn verbs_operation(send: bool) -> i32 {
    if send { WRITE_WITH_IMMEDIATE } else { RECEIVED_IMMEDIATE }
}

/// The descriptor of a piece, of which something happened at the time `then`.
fn describe(source: &Source<'_>, piece: &Piece, flags: u32, then: Ticks) -> NetEvent {
    let (chunk, waits, path) = (&piece.chunk, &piece.waits, source.path(piece));
    let (carrier, device, opcode, queue_pair) = match path.carrier {
        Carrier::None => (0, 0, 0, 0),
        Carrier::Socket { fd } => (CARRIER_SOCKET, fd, socket_operation(source.send), 0),
        Carrier::QueuePair { device, number } => (CARRIER_QUEUE_PAIR, device, verbs_operation(source.send), number),
    };
    let send = if source.send { FLAG_SEND } else { 0 };
    let again = if chunk.again { FLAG_RESEND } else { 0 };
    let mut event = NetEvent {
        flags: flags | send | again,
        link: source.link,
        message: chunk.message,
        offset: chunk.offset,
        length: chunk.length,
        rail: source.rail(piece).unwrap_or(SEVERAL),
        stream: source.stream(piece).unwrap_or(SEVERAL),
        retransmissions: piece.retransmissions,
        reconnects: source.reconnects,
        carrier,
        wait_receiver_ns: waits.receiver,
        wait_socket_ns: waits.socket,
        wait_credit_ns: waits.credit,
        wire_ns: piece.wire_ns(),
        wr_id: chunk.wr_id,
        device,
        opcode,
        queue_pair,
        ago_ns: u32::try_from(Ticks::now().nanoseconds_since(then)).unwrap_or(u32::MAX),
        ..NetEvent::new()
    };
    if let Some(peer) = path.peer {
        event.set_peer(peer);
    }
    event
}

/// The sum of a transfer that was this piece.
fn sum(source: &Source<'_>, piece: &Piece) -> NetSum {
    let Waits { receiver, socket, credit } = piece.waits;
    NetSum {
        link: source.link,
        message: piece.chunk.message,
        length: piece.chunk.length,
        wait_receiver_ns: receiver,
        wait_socket_ns: socket,
        wait_credit_ns: credit,
        wire_ns: piece.wire_ns(),
        rail: source.path(piece).rail,
        send: source.send,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ptr::null_mut;

    use super::*;

    thread_local! {
        /// The calls to the profiler that a test has seen.
        static CALLS: RefCell<Vec<c_int>> = const { RefCell::new(Vec::new()) };
    }

    const START: c_int = ffi::ncclProfilerNetEventStart as c_int;
    const STOP: c_int = ffi::ncclProfilerNetEventStop as c_int;

    /// This library's profiler, behind NCCL.
    unsafe extern "C" fn ours(_: *mut *mut c_void, kind: c_int, _: *mut c_void, id: i64, data: *mut c_void) -> u32 {
        CALLS.with_borrow_mut(|calls| calls.push(kind));
        assert_eq!(id, PLUGIN_ID_SUM);
        // SAFETY: the sum's own structure, by its id.
        unsafe { (*data.cast::<NetSumNews>()).taken = true };
        0
    }

    /// A profiler that treats every call as an event.
    unsafe extern "C" fn takes(event: *mut *mut c_void, kind: c_int, _: *mut c_void, _: i64, _: *mut c_void) -> u32 {
        CALLS.with_borrow_mut(|calls| calls.push(kind));
        if kind == START {
            // SAFETY: a start's place for the event.
            unsafe { event.write(std::ptr::without_provenance_mut(8)) };
        }
        0
    }

    unsafe extern "C" fn declines(_: *mut *mut c_void, kind: c_int, _: *mut c_void, _: i64, _: *mut c_void) -> u32 {
        CALLS.with_borrow_mut(|calls| calls.push(kind));
        0
    }

    #[test]
    fn a_sum_is_one_call_and_whoever_takes_it_for_an_event_is_told_its_stop() {
        let told = |callback| {
            let profiler = NcclProfiler { callback, setting: NetEvents::Auto, updates: true };
            let taken = profiler.sum(null_mut(), NetSum::default(), Ticks::now());
            (taken, CALLS.take())
        };
        assert_eq!(told(ours), (true, vec![START]));
        assert_eq!(told(takes), (true, vec![START, STOP]));
        assert_eq!(told(declines), (false, vec![START]));
    }
}
