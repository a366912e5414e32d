//! The functions between NCCL's C interface (`abi`) and the transport: one typed function per call of NCCL's.
//!
//! All ids (contexts, listeners, connections, registrations, requests) are opaque numbers that `abi` passes to NCCL in
//! place of pointers and gets back unchanged. They are never 0; a request's is never 1 or 2 either. Ids that were never
//! returned, or that have ended, give an argument error, never undefined behaviour.
//!
//! A `ctx` of None means the process's default context, which hosts before v11 of the interface use.

use std::ffi::c_void;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use super::backend::Part;
use super::backend::Region;
use super::comm::{AcceptWait, Comm, ListenComm};
use super::context::InitArgs;
use super::devices::DeviceProperties;
use super::handle::{self, ConnectionHandle, ShortHandle};
use super::open::Open;
use super::process::{Process, process};
use super::tuning;
use crate::engine::events;
use crate::engine::handle::{Handle, Kind};
use crate::engine::request::Ticket;
use crate::os::error::{Error, Result};
use crate::session::dialer::Target;

pub(crate) use crate::engine::request::{MAX_PARTS, Outcome};
pub(crate) use crate::session::silences::Silences;

/// How busy one direction of a communicator's traffic will be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// The most peers at a time.
    pub max_concurrent_peers: i32,
    /// The fewest peers at a time.
    pub min_concurrent_peers: i32,
    /// The most connections per peer.
    pub max_flows_per_peer: i32,
    /// The fewest connections per peer.
    pub min_flows_per_peer: i32,
}

/// NCCL's hint about future operations (v11 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NetAttr {
    /// Sends.
    pub send: Traffic,
    /// Receives.
    pub recv: Traffic,
    /// Bit mask of collective operations.
    pub op: u32,
    /// Bit mask of algorithms.
    pub algo: u32,
    /// Bit mask of protocols.
    pub proto: u32,
}

/// Starts a context and returns its id. The default context may be started many times.
///
/// # Errors
/// When no interface can be used.
pub(crate) fn init(args: InitArgs) -> Result<usize> {
    Process::init(&args)
}

/// Whether a communicator that is being made gets advice: its traffic between nodes uses Towline over TCP. `comm` is
/// NCCL's id of the communicator where the interface passes it (v5 and later): the same one that the network's `init`
/// got. Older interfaces do not identify the communicator; there any use of Towline in the process counts.
pub(crate) fn bind_tuner(comm: Option<u64>, shape: tuning::Shape) -> Option<tuning::Scope> {
    // Inside a node nothing uses Towline.
    (shape.nodes > 1).then(|| process().tunes(comm)).flatten()
}

/// The traffic class of a communicator whose one-sided operations can use Towline.
///
/// # Errors
/// The reason why they cannot, a sentence for the log.
pub(crate) fn offers_one_sided(comm: u64) -> std::result::Result<Option<u8>, &'static str> {
    process().offers_one_sided(comm)
}

/// Records that Towline declined a communicator's one-sided operations.
pub(crate) fn one_sided_declined() {
    process().one_sided_declined.store(true, Ordering::Relaxed);
}

/// How long connecting may take.
///
/// # Errors
/// When `init` has not been called.
pub(crate) fn connect_timeout() -> Result<Duration> {
    Ok(process().net()?.config.connect_timeout)
}

/// The longest that a connection takes to recover. After that its requests have failed, unless the peer's process is
/// alive and stopped.
///
/// # Errors
/// When `init` has not been called.
pub(crate) fn recovery_limit() -> Result<Duration> {
    let config = &process().net()?.config;
    Ok(config.peer_timeout.max(config.reconnect_timeout))
}

/// The process at the other end of a connection, `host:process`.
///
/// # Errors
/// When there is no such connection.
pub(crate) fn peer_process(comm: usize) -> Result<String> {
    Ok(process().comms.get(comm)?.connected()?.describe().peer)
}

/// Ends a context: closes the communicators and half-made connections that NCCL has left behind.
///
/// # Errors
/// When there is no such context.
pub(crate) fn finalize(ctx: usize) -> Result<()> {
    let process = process();
    let context = process.contexts.remove(ctx)?;
    context.end();
    for comm in context.open.take() {
        if let Ok(comm) = process.comms.remove(comm) {
            comm.close();
        }
    }
    process.context_ended(ctx);
    Ok(())
}

/// How many devices there are, without virtual ones.
///
/// # Errors
/// When `init` has not been called.
pub(crate) fn device_count() -> Result<i32> {
    Ok(i32::try_from(process().devices.count()).unwrap_or(i32::MAX))
}

/// A device's properties. Their address stays valid as long as the library is mapped.
///
/// # Errors
/// When there is no such device.
pub(crate) fn device_properties(dev: i32) -> Result<&'static DeviceProperties> {
    process().devices.properties(dev)
}

/// Merges devices into a virtual one and returns its number.
///
/// # Errors
/// When a member does not exist, is virtual itself, or is listed twice, when members are of different networks, and
/// when the members must stay separate devices ([`MergePolicy`](super::devices::MergePolicy)).
pub(crate) fn make_vdevice(members: &[i32]) -> Result<i32> {
    process().make_vdevice(members)
}

/// Starts to listen; returns the connection handle, which NCCL carries to the peer, and the listener's id.
///
/// # Errors
/// When there is no such device, or nothing can be bound to its interface.
pub(crate) fn listen(ctx: Option<usize>, dev: i32) -> Result<([u8; 64], usize)> {
    let (handle, comm) = listen_with(ctx, dev, handle::ROOM)?;
    Ok((handle.encode(), comm))
}

/// As [`listen`], in the default context and with a handle for FlagCX.
///
/// # Errors
/// As [`listen`].
pub(crate) fn listen_short(dev: i32) -> Result<(ShortHandle, usize)> {
    let (handle, comm) = listen_with(None, dev, handle::SHORT_ROOM)?;
    Ok((handle.shorten(), comm))
}

/// `room`: how many bytes the handle has for addresses.
fn listen_with(ctx: Option<usize>, dev: i32, room: usize) -> Result<(ConnectionHandle, usize)> {
    let process = process();
    let context = process.context(ctx)?;
    let binding = process.devices.binding(dev)?;
    let net = process.net()?;
    let (listening, addresses) = process.backends.of(&binding).listen(net, &binding, context.traffic_class)?;
    let is_down = |address: &SocketAddr| binding.rails.iter().any(|it| !it.running && it.address.ip() == address.ip());
    let addresses = handle::what_works_first(addresses, room, is_down);
    let handle = ConnectionHandle { secret: listening.secret().clone(), addresses, is_rdma: binding.is_rdma(), key: 0 };
    let (profiler, open) = (context.listener.clone(), Arc::clone(&context.open));
    let listen = ListenComm { listening, profiler, open, wait: Mutex::default() };
    let comm = process.comms.insert(Arc::new(Comm::Listen(listen)))?.encode();
    context.open.add(comm);
    Ok((handle, comm))
}

/// Connects to the listener that made `handle`; None while the connection is not ready. The caller calls again with the
/// same handle bytes, in which the connecting side keeps the key of its attempt.
///
/// # Errors
/// When the handle is not one of Towline's, or the peer cannot be reached in time.
pub(crate) fn connect(
    ctx: Option<usize>,
    dev: i32,
    traffic_class: Option<u8>,
    handle: &mut [u8; 64],
) -> Result<Option<usize>> {
    connect_with(ctx, dev, traffic_class, handle, false)
}

/// As [`connect`], in the default context and with a handle for FlagCX.
///
/// # Errors
/// As [`connect`].
pub(crate) fn connect_short(dev: i32, short: &mut ShortHandle) -> Result<Option<usize>> {
    let mut bytes = handle::lengthen(short);
    let connected = connect(None, dev, None, &mut bytes);
    handle::keep_key(short, &bytes);
    connected
}

/// Connects and waits, with a deadline. Does not depend on whether the peer has called accept.
///
/// # Errors
/// As [`connect`].
pub(crate) fn connect_blocking(dev: i32, handle: &mut [u8; 64]) -> Result<usize> {
    connect_with(None, dev, None, handle, true)?.ok_or_else(|| Error::internal("waiting for a connection gave none"))
}

fn connect_with(
    ctx: Option<usize>,
    dev: i32,
    traffic_class: Option<u8>,
    bytes: &mut [u8; 64],
    wait: bool,
) -> Result<Option<usize>> {
    let process = process();
    let context = process.context(ctx)?;
    let handle = ConnectionHandle::decode(bytes)?;
    let binding = process.devices.binding(dev)?;
    let net = process.net()?;
    if handle.is_rdma != binding.is_rdma() {
        return Err(other_backend(handle.is_rdma).with_peer(handle.addresses[0]));
    }
    let start = || {
        let target = Target {
            addresses: handle.addresses.clone(),
            secret: handle.secret.clone(),
            rails: Arc::clone(&binding.rails),
            traffic_class: traffic_class.or(context.traffic_class),
        };
        process.backends.of(&binding).connect(net, &binding, target)
    };
    let (key, dial) = context.dial(Instant::now(), handle.key, &handle.secret, start)?;
    ConnectionHandle::set_key(bytes, key);
    let result = if wait { Some(dial.wait()) } else { dial.result() };
    let Some(result) = result else { return Ok(None) };
    // In either case the handle may now be used for another connection.
    ConnectionHandle::set_key(bytes, 0);
    context.forget_dial(key);
    connected((&context.listener, &context.open), Comm::Send(result?)).map(Some)
}

fn other_backend(peer_is_rdma: bool) -> Error {
    let (theirs, ours) = if peer_is_rdma { ("RDMA", "TCP") } else { ("TCP", "RDMA") };
    Error::usage(format!("the peer listens over {theirs}, and this side's device is {ours}'s")).with_hint(
        "all hosts must use one backend: set TOWLINE_BACKEND=tcp or rdma everywhere; `towline doctor` says why a host \
         has no RDMA",
    )
}

/// Accepts a connection from a listener; None while there is none.
///
/// # Errors
/// When there is no such listener.
pub(crate) fn accept(listen: usize) -> Result<Option<usize>> {
    accept_from(process().comms.get(listen)?.listening()?)
}

fn accept_from(listen: &ListenComm) -> Result<Option<usize>> {
    listen.listening.accept()?.map(|conn| connected((&listen.profiler, &listen.open), Comm::Recv(conn))).transpose()
}

/// As [`accept`], for a host that repeats the call without a time limit.
///
/// # Errors
/// As [`accept`]; and once for each peer, when none has come within TOWLINE_CONNECT_TIMEOUT of the first call for it. A
/// peer that comes later is accepted.
pub(crate) fn accept_or_report(listen: usize) -> Result<Option<usize>> {
    let comm = process().comms.get(listen)?;
    let listen = comm.listening()?;
    let accepted = accept_from(listen)?;
    let mut wait = listen.wait.lock().unwrap_or_else(PoisonError::into_inner);
    if accepted.is_some() {
        *wait = AcceptWait::default();
        return Ok(accepted);
    }
    let patience = connect_timeout()?;
    let is_late = wait.since.get_or_insert_with(Instant::now).elapsed() >= patience;
    if is_late && !std::mem::replace(&mut wait.reported, true) {
        return Err(nobody_came(patience));
    }
    Ok(None)
}

fn nobody_came(patience: Duration) -> Error {
    Error::remote(format!("no peer connected within {} s", patience.as_secs_f32()))
        .with_hint("a rank may have failed to start; TOWLINE_CONNECT_TIMEOUT sets how long to wait")
}

/// Accepts a connection from a listener and waits for it, with a deadline.
///
/// # Errors
/// When there is no such listener, or no peer connects in time.
pub(crate) fn accept_blocking(listen: usize) -> Result<usize> {
    let process = process();
    let comm = process.comms.get(listen)?;
    let patience = connect_timeout()?;
    let deadline = Instant::now() + patience;
    let listen = comm.listening()?;
    let conn = listen.listening.accept_until(deadline)?;
    let conn = conn.ok_or_else(|| nobody_came(patience))?;
    connected((&listen.profiler, &listen.open), Comm::Recv(conn))
}

/// Hands a connection to NCCL. `profiler` and `open`: its context's.
fn connected((profiler, open): (&Option<Arc<dyn events::Listener>>, &Open), conn: Comm) -> Result<usize> {
    if let Some(profiler) = profiler {
        conn.connected()?.set_profiler(profiler);
    }
    let comm = process().comms.insert(Arc::new(conn))?.encode();
    open.add(comm);
    Ok(comm)
}

/// Registers memory of kind `NCCL_PTR_*` with a connection.
///
/// # Errors
/// When there is no such connection, or it cannot reach memory of that kind.
pub(crate) fn reg_mr(comm: usize, data: *mut c_void, size: usize, kind: i32) -> Result<usize> {
    register(comm, Region { address: data.addr(), bytes: size, kind, dmabuf: None })
}

/// Registers memory that is shared through a DMA-BUF descriptor.
///
/// # Errors
/// Always over TCP, whose properties do not offer it; over RDMA when the device or the kernel refuses.
pub(crate) fn reg_mr_dmabuf(
    comm: usize,
    data: *mut c_void,
    size: usize,
    kind: i32,
    offset: u64,
    fd: i32,
) -> Result<usize> {
    register(comm, Region { address: data.addr(), bytes: size, kind, dmabuf: Some((fd, offset)) })
}

fn register(comm: usize, region: Region) -> Result<usize> {
    let process = process();
    // Not inside the table: a registration may take long.
    process.comms.get(comm)?.connected()?.register(&process.backends, region)
}

/// Ends a registration. After that no thread touches its memory: a connection with an outstanding request there ends
/// first. On an abort NCCL frees its buffers between this and the close (`proxy.cc` and `transport/net.cc`, NCCL 2.30).
///
/// # Errors
/// When there is no such connection, or the registration is not one of Towline's.
pub(crate) fn dereg_mr(comm: usize, mr: usize) -> Result<()> {
    let process = process();
    process.comms.get(comm)?.connected()?.deregister(&process.backends, mr)
}

/// Starts a send; None for "not now". A connection that has failed accepts it, and [`test()`] returns the error, as
/// NCCL's own transports do.
///
/// # Errors
/// When there is no such connection, or the message is longer than its receive.
#[inline]
pub(crate) fn isend(comm: usize, part: Part) -> Result<Option<usize>> {
    let process = process();
    process.comms.with(comm, |owner| {
        let Comm::Send(conn) = owner else { return Err(owner.is_not("sending")) };
        // SAFETY: NCCL does not touch the buffer until `test` returns done, its registration has ended or the
        // communicator is closed. It keeps the profiler's handle valid until then, or until it makes no further call.
        let ticket = unsafe { conn.isend(&process.backends, &part) }?;
        Ok(ticket.map(|ticket| request(comm, ticket)))
    })
}

/// Starts a group of receives (1 to [`MAX_PARTS`]); None for "not now". A connection that has failed accepts it, as
/// [`isend`] does.
///
/// # Errors
/// When there is no such connection, or a message that has already arrived is longer than its receive.
#[inline]
pub(crate) fn irecv(comm: usize, parts: &[Part]) -> Result<Option<usize>> {
    let process = process();
    process.comms.with(comm, |owner| {
        let Comm::Recv(conn) = owner else { return Err(owner.is_not("receiving")) };
        // SAFETY: as for sends.
        let ticket = unsafe { conn.irecv(&process.backends, parts) }?;
        Ok(ticket.map(|ticket| request(comm, ticket)))
    })
}

/// Makes received data visible to the GPU; None when there is nothing to wait for. The parts' tags are 0, and a size
/// only shows whether the part has data (see `abi::v5`).
///
/// # Errors
/// When there is no such connection.
pub(crate) fn iflush(comm: usize, parts: &[Part]) -> Result<Option<usize>> {
    let process = process();
    process.comms.with(comm, |owner| {
        let Comm::Recv(conn) = owner else { return Err(owner.is_not("receiving")) };
        let ticket = conn.iflush(&process.backends, parts)?;
        Ok(ticket.map(|ticket| request(comm, ticket)))
    })
}

/// The outcome of a request; None while it has not ended.
///
/// # Errors
/// When the request failed, was reported done before, or is not one of Towline's.
#[inline]
pub(crate) fn test(request: usize) -> Result<Option<Outcome>> {
    let handle = Handle::decode(request, Kind::Request)?;
    let ticket = Ticket { slot: handle.slot, generation: handle.generation };
    process().comms.with_occupant(handle.index, |comm| match comm {
        Some(Comm::Send(conn)) => conn.test(ticket),
        Some(Comm::Recv(conn)) => conn.test(ticket),
        Some(Comm::Listen(_)) => Err(Error::argument("the request is not one of ours")),
        None => {
            Err(Error::usage("the request's communicator is closed").with_hint("a request ends with its communicator"))
        }
    })
}

fn request(comm: usize, ticket: Ticket) -> usize {
    let index = Handle::decode(comm, Kind::Comm).map_or(0, |handle| handle.index);
    Handle { kind: Kind::Request, index, slot: ticket.slot, generation: ticket.generation }.encode()
}

/// Closes a sending communicator.
///
/// # Errors
/// When there is no such communicator.
pub(crate) fn close_send(comm: usize) -> Result<()> {
    take(comm, "sending")?.close();
    Ok(())
}

/// Closes a sending communicator without waiting for its peer, which has not answered for too long. The kernel
/// continues to send what it has taken; the rest is lost.
///
/// # Errors
/// When there is no such communicator.
pub(crate) fn abandon_send(comm: usize) -> Result<()> {
    if let Comm::Send(conn) = &*take(comm, "sending")? {
        conn.abandon();
    }
    Ok(())
}

/// Closes a receiving communicator.
///
/// # Errors
/// When there is no such communicator.
pub(crate) fn close_recv(comm: usize) -> Result<()> {
    take(comm, "receiving")?.close();
    Ok(())
}

/// Closes a listener. Connections that it made stay open.
///
/// # Errors
/// When there is no such listener.
pub(crate) fn close_listen(listen: usize) -> Result<()> {
    take(listen, "listening")?.close();
    Ok(())
}

/// Takes a communicator back from NCCL, if it is of the wanted kind, for closing it.
fn take(comm: usize, kind: &str) -> Result<Arc<Comm>> {
    let process = process();
    let owner = process.comms.get(comm)?;
    if owner.kind() != kind {
        return Err(owner.is_not(kind));
    }
    process.comms.remove(comm)?;
    process.contexts.any(|context| context.open.forget(comm));
    Ok(owner)
}

/// Accepts NCCL's hint about future operations. TCP has no choice that depends on it.
///
/// # Errors
/// When there is no such context.
pub(crate) fn set_net_attr(ctx: usize, attr: NetAttr) -> Result<()> {
    process().contexts.get(ctx)?;
    tracing::trace!("NCCL announces {attr:?}");
    Ok(())
}
