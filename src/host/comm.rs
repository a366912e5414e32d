//! Listeners, connections, registrations and requests.
//!
//! Guarantees: each object is closed once, by [`SendComm::close`] and its like or when its last user is dropped;
//! registrations end before the connection they belong to. The caller is responsible for conditions that the host
//! cannot check. The memory of a transfer must live until `test` reports that it is done or the connection is closed,
//! which is why the posting calls are `unsafe`. Everything else is as safe as the plugin is.

use std::ffi::{c_int, c_void};
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::code::{Code, Result};
use super::context::{Context, Handle};
use super::memory::Memory;
use super::table::{RawPart, Table};
use crate::nccl::ffi;

/// How long `post` waits for a free request.
const PATIENCE: Duration = Duration::from_secs(30);

/// For a thread that polls the plugin: yields to other threads; from a millisecond after `start` on, sleeps 100 µs
/// instead. What takes longer waits for a network or for another process, which may need this processor.
pub fn give_way(start: Instant) {
    if start.elapsed() < Duration::from_millis(1) {
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Calls `attempt` until it yields something, giving way to other threads in between.
pub(super) fn until<T>(
    patience: Duration,
    what: &'static str,
    mut attempt: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(result) = attempt()? {
            return Ok(result);
        }
        if start.elapsed() > patience {
            return Err(Code::Deadline(what));
        }
        give_way(start);
    }
}

type Close = unsafe fn(Table, *mut c_void) -> Result<()>;

/// What listeners and connections have in common: a raw pointer and the duty to close it.
#[derive(Clone)]
pub(super) struct Comm(Arc<Inner>);

struct Inner {
    context: Context,
    raw: *mut c_void,
    close: Close,
    closed: AtomicBool,
}

// SAFETY: the pointer only goes to the plugin, which must take registrations, transfers and closes from NCCL's
// different threads. That no two threads post or test on one connection at a time is the caller's duty, as in NCCL.
unsafe impl Send for Inner {}
// SAFETY: see above.
unsafe impl Sync for Inner {}

impl Comm {
    pub(super) fn new(context: &Context, raw: *mut c_void, close: Close) -> Self {
        Self(Arc::new(Inner { context: context.clone(), raw, close, closed: AtomicBool::new(false) }))
    }

    fn table(&self) -> Table {
        self.0.context.table()
    }

    fn register(&self, data: *mut c_void, size: usize, kind: c_int) -> Result<Mr> {
        // SAFETY: the connection is open; bad memory is the plugin's to refuse.
        let raw = unsafe { self.table().reg_mr(self.0.raw, data, size, kind) }?;
        Ok(Mr { comm: self.clone(), raw, ended: false })
    }

    fn register_dmabuf(&self, memory: (*mut c_void, usize), kind: c_int, buffer: (u64, c_int)) -> Result<Mr> {
        // SAFETY: as for `register`.
        let raw = unsafe { self.table().reg_mr_dmabuf(self.0.raw, memory, kind, buffer) }?;
        Ok(Mr { comm: self.clone(), raw, ended: false })
    }

    fn test(&self, request: &Request) -> Result<Option<Sizes>> {
        let mut sizes = Sizes { values: [-1; Sizes::MOST], len: request.parts };
        // SAFETY: the request came from this plugin, and there is room for a size per buffer.
        let done = unsafe { self.table().test(request.raw.as_ptr(), sizes.values.as_mut_ptr()) }?;
        Ok(done.then_some(sizes))
    }

    fn wait(&self, request: &Request, patience: Duration) -> Result<Sizes> {
        until(patience, "end of the transfer", || self.test(request))
    }
}

impl Inner {
    fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // SAFETY: the pointer came from the plugin and has not been closed.
        unsafe { (self.close)(self.context.table(), self.raw) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

macro_rules! closable {
    ($($kind:ident)+) => {$(
        impl $kind {
            /// Closes it now and returns the plugin's result. Requests in flight end with it.
            pub fn close(self) -> Result<()> {
                self.0.0.close()
            }

            /// Lets go of it without closing, as NCCL does with what was half-made when it aborts.
            pub fn abandon(self) {
                self.0.0.closed.store(true, Ordering::Release);
            }

            /// The plugin's pointer, for calls past this interface.
            pub fn raw(&self) -> *mut c_void {
                self.0.0.raw
            }
        }
    )+};
}

macro_rules! transferring {
    ($($kind:ident)+) => {$(
        impl $kind {
            /// Registers memory for transfers on this connection. It must stay valid until the registration ends.
            pub fn reg_mr(&self, data: *mut c_void, size: usize, kind: c_int) -> Result<Mr> {
                self.0.register(data, size, kind)
            }

            /// Registers all of `memory` as host memory.
            pub fn register(&self, memory: &Memory) -> Result<Mr> {
                self.0.register(memory.at(0), memory.len(), ffi::NCCL_PTR_HOST as c_int)
            }

            /// Registers memory behind a DMA-BUF (v6 and later): `(address, size)`, its kind, `(offset, descriptor)`.
            pub fn reg_mr_dmabuf(&self, memory: (*mut c_void, usize), kind: c_int, buffer: (u64, c_int)) -> Result<Mr> {
                self.0.register_dmabuf(memory, kind, buffer)
            }

            /// Whether a request is done: `Some` has the size of each buffer. After that, or after an error,
            /// the request is over and must not be tested again.
            pub fn test(&self, request: &Request) -> Result<Option<Sizes>> {
                self.0.test(request)
            }

            /// Tests with a NULL size pointer, as NCCL does when it does not need the size.
            pub fn test_unsized(&self, request: &Request) -> Result<bool> {
                // SAFETY: the request came from this plugin; NULL sizes are allowed.
                unsafe { self.0.table().test(request.raw.as_ptr(), null_mut()) }
            }

            /// Tests until the request is done or `patience` is over.
            pub fn wait(&self, request: &Request, patience: Duration) -> Result<Sizes> {
                self.0.wait(request, patience)
            }
        }
    )+};
}

/// Waits for peers. Dropping closes it.
pub struct Listener(pub(super) Comm);
/// The sending end of a connection. Dropping closes it.
pub struct SendComm(pub(super) Comm);
/// The receiving end of a connection. Dropping closes it.
pub struct RecvComm(Comm);

closable!(Listener SendComm RecvComm);
transferring!(SendComm RecvComm);

impl Listener {
    /// Tries to accept a peer. `None` means "not yet". In v4 this waits instead. A listener may accept several.
    pub fn accept(&self) -> Result<Option<RecvComm>> {
        // SAFETY: the listener is open.
        let raw = unsafe { self.0.table().accept(self.0.0.raw) }?;
        Ok((!raw.is_null()).then(|| RecvComm(Comm::new(&self.0.0.context, raw, Table::close_recv))))
    }

    /// Accepts a peer, calling again until one is there or `patience` is over.
    pub fn accept_within(&self, patience: Duration) -> Result<RecvComm> {
        until(patience, "peer", || self.accept())
    }
}

impl SendComm {
    /// Posts a send. `None` means "not now": call again.
    ///
    /// # Safety
    /// The buffer must stay valid and unchanged until the request is over or the connection closed.
    pub unsafe fn isend(&self, part: Part<'_>) -> Result<Option<Request>> {
        // SAFETY: the caller's promise; the connection is open.
        let raw = unsafe { self.0.table().isend(self.0.0.raw, part.into()) }?;
        Ok(Request::of(raw, 1))
    }

    /// Posts a send, calling again while the plugin returns "not now".
    ///
    /// # Safety
    /// As for [`SendComm::isend`].
    pub unsafe fn post(&self, part: Part<'_>) -> Result<Request> {
        // SAFETY: the caller's promise.
        until(PATIENCE, "free request", || unsafe { self.isend(part) })
    }
}

impl RecvComm {
    /// Posts a receive of one buffer or a group of up to 8. `None` means "not now": call again.
    ///
    /// # Safety
    /// The buffers must stay valid and untouched until the request is over or the connection closed.
    pub unsafe fn irecv(&self, parts: &[Part<'_>]) -> Result<Option<Request>> {
        // SAFETY: the caller's promise.
        unsafe { self.irecv_hinted(parts, 0) }
    }

    /// Posts a receive with what NCCL writes into `*request` before the call from v9 on: 0, or
    /// `NCCL_NET_OPTIONAL_RECV_COMPLETION` (1).
    ///
    /// # Safety
    /// As for [`RecvComm::irecv`].
    pub unsafe fn irecv_hinted(&self, parts: &[Part<'_>], hint: usize) -> Result<Option<Request>> {
        let mut raw_parts = [RawPart::from(Part::EMPTY); Sizes::MOST];
        let given = raw_parts.get_mut(..parts.len()).ok_or(Code::NotOffered("receives with that many buffers"))?;
        for (to, part) in given.iter_mut().zip(parts) {
            *to = RawPart::from(*part);
        }
        // SAFETY: the caller's promise; the connection is open.
        let raw = unsafe { self.0.table().irecv(self.0.0.raw, given, hint) }?;
        Ok(Request::of(raw, parts.len()))
    }

    /// Posts a receive, calling again while the plugin returns "not now".
    ///
    /// # Safety
    /// As for [`RecvComm::irecv`].
    pub unsafe fn post(&self, parts: &[Part<'_>]) -> Result<Request> {
        // SAFETY: the caller's promise.
        until(PATIENCE, "free request", || unsafe { self.irecv(parts) })
    }

    /// Makes received GPU data visible. `None` when there is nothing to wait for, or "not now".
    ///
    /// # Safety
    /// The buffer must stay valid until the request is over or the connection closed.
    pub unsafe fn iflush(&self, part: Part<'_>) -> Result<Option<Request>> {
        // SAFETY: the caller's promise; the connection is open.
        let raw = unsafe { self.0.table().iflush(self.0.0.raw, part.into()) }?;
        Ok(Request::of(raw, 1))
    }
}

/// Memory registered on a connection. Dropping ends it.
pub struct Mr {
    comm: Comm,
    raw: *mut c_void,
    ended: bool,
}

// SAFETY: the pointer only goes to the plugin, which takes registrations from any thread.
unsafe impl Send for Mr {}
// SAFETY: see above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Ends the registration and returns the plugin's result.
    pub fn dereg(mut self) -> Result<()> {
        self.end()
    }

    /// The plugin's pointer; may be NULL.
    pub fn raw(&self) -> *mut c_void {
        self.raw
    }

    fn end(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) || self.comm.0.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        // SAFETY: the connection is open and the registration has not been ended.
        unsafe { self.comm.table().dereg_mr(self.comm.0.raw, self.raw) }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// One buffer of a transfer.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// Where it starts.
    pub data: *mut c_void,
    /// Its bytes; for a receive, the most that may come.
    pub size: usize,
    /// v5 and later: which buffer of a group a message is meant for.
    pub tag: i32,
    /// Its registration; NULL is passed without one.
    pub mr: Option<&'a Mr>,
    /// v10 and later: the transfer's profiler handle, or NULL.
    pub profile: *mut c_void,
}

impl<'a> Part<'a> {
    const EMPTY: Part<'static> = Part { data: null_mut(), size: 0, tag: 0, mr: None, profile: null_mut() };

    /// `size` bytes from `data` on, tag 0, unprofiled.
    pub fn new(data: *mut c_void, size: usize, mr: Option<&'a Mr>) -> Self {
        Self { data, size, mr, ..Part::EMPTY }
    }

    /// All of `memory`, tag 0, unprofiled.
    pub fn all(memory: &Memory, mr: Option<&'a Mr>) -> Self {
        Self::new(memory.at(0), memory.len(), mr)
    }

    /// The same with a tag.
    #[must_use]
    pub fn tagged(self, tag: i32) -> Self {
        Self { tag, ..self }
    }

    /// The same with a profiler handle.
    #[must_use]
    pub fn profiled(self, profile: *mut c_void) -> Self {
        Self { profile, ..self }
    }
}

impl From<Part<'_>> for RawPart {
    fn from(part: Part<'_>) -> Self {
        let Part { data, size, tag, mr, profile } = part;
        RawPart { data, size, tag, mr: mr.map_or(null_mut(), Mr::raw), profile }
    }
}

/// A transfer in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    raw: NonNull<c_void>,
    parts: usize,
}

// SAFETY: a request is only passed back to the plugin; which thread tests is the caller's business.
unsafe impl Send for Request {}

impl Request {
    fn of(raw: *mut c_void, parts: usize) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { raw, parts })
    }

    /// The plugin's pointer.
    pub fn raw(&self) -> *mut c_void {
        self.raw.as_ptr()
    }
}

/// The sizes that `test` reported, one per buffer. As in NCCL they are `int`: sizes of 2 GiB and more saturate. −1
/// stands where the plugin wrote nothing, which some plugins never do.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    values: [c_int; Self::MOST],
    len: usize,
}

impl Sizes {
    /// The largest group.
    const MOST: usize = 8;
}

impl Deref for Sizes {
    type Target = [c_int];

    fn deref(&self) -> &[c_int] {
        &self.values[..self.len]
    }
}

/// How a context gets connected.
impl Context {
    /// Opens a listener on `dev`. The handle goes to the peer, which connects with it.
    pub fn listen(&self, dev: i32) -> Result<(Listener, Handle)> {
        let mut handle = Handle::blank(self.net().version().handle_size());
        // SAFETY: the handle has the room that this version promises, and more.
        let raw = unsafe { self.table().listen(self.raw(), dev, handle.raw()) }?;
        handle.check()?;
        Ok((Listener(Comm::new(self, raw, Table::close_listen)), handle))
    }

    /// Tries to connect. `None` means "not yet": call again with the same handle, in which the plugin may keep notes
    /// between the calls. In v4 this waits for the peer's listener instead.
    pub fn connect(&self, dev: i32, handle: &mut Handle) -> Result<Option<SendComm>> {
        // SAFETY: the handle has the room that this version promises.
        let raw = unsafe { self.table().connect(self.raw(), self.traffic_class(), dev, handle.raw()) }?;
        handle.check()?;
        Ok((!raw.is_null()).then(|| SendComm(Comm::new(self, raw, Table::close_send))))
    }

    /// Connects, calling again until it is done or `patience` is over.
    pub fn connect_within(&self, dev: i32, handle: &mut Handle, patience: Duration) -> Result<SendComm> {
        until(patience, "connection", || self.connect(dev, handle))
    }
}
