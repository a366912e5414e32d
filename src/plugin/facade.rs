//! The door between NCCL's C interface (`abi`) and the transport: one typed function per thing NCCL can ask for.
//!
//! All ids (contexts, listeners, connections, registrations, requests) are opaque numbers that `abi` hands to NCCL
//! in place of pointers and gets back unchanged. They are never 0; a request's is never 1 or 2 either. Ids that were
//! never given out, or that have ended, are answered with an argument error, never with undefined behaviour.
//!
//! A `ctx` of None means the process's default context, which hosts before v11 of the interface use.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use super::comm::{Comm, ListenComm};
use super::devices::DeviceProperties;
use super::handle::ConnectionHandle;
use super::process::{Process, process};
use crate::abi::ffi;
use crate::engine::handle::{Handle, Kind};
use crate::engine::request::Ticket;
use crate::os::error::{Error, Result};
use crate::tcp::dialer::Target;

/// What NCCL tells when it starts to use the library, per communicator from v11 on and once per process before.
#[derive(Debug)]
pub struct InitArgs {
    /// The version of the interface, 4 to 12.
    pub api: u8,
    /// The communicator's id (v11 and later).
    pub comm_id: Option<u64>,
    /// The communicator's traffic class, the whole byte (v11 and later; v10 gives it to [`connect`]).
    pub traffic_class: Option<u8>,
    /// NCCL's log.
    pub logger: ffi::ncclDebugLogger_t,
    /// The way into NCCL's profiler (v10 and later).
    pub profiler: ffi::ncclProfilerCallback_t,
}

/// One part of a transfer: a send, or one of a group of receives.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// The memory. It belongs to the transport until [`test()`] has said done or failed. May be null when `size` is 0.
    pub data: *mut u8,
    /// Bytes to send, or the most that may be received.
    pub size: usize,
    /// Which send fills which slot of a group.
    pub tag: i32,
    /// The registration that covers the memory; 0 when the host gave none.
    pub mr: usize,
    /// The profiler's handle of this transfer; null when there is none.
    pub profiler: *mut c_void,
}

pub use crate::engine::request::{MAX_PARTS, Outcome};

/// How busy one direction of a communicator's traffic will be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// The most peers at a time.
    pub max_concurrent_peers: i32,
    /// The fewest peers at a time.
    pub min_concurrent_peers: i32,
    /// The most connections per peer.
    pub max_flows_per_peer: i32,
    /// The fewest connections per peer.
    pub min_flows_per_peer: i32,
}

/// NCCL's hint about the operations to come (v11 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetAttr {
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

/// Starts a context and gives its id. The default context may be started many times.
///
/// # Errors
/// When no interface can be used.
pub fn init(args: InitArgs) -> Result<usize> {
    Process::init(&args)
}

/// Ends a context: frees listeners and half-made connections that NCCL has left behind.
///
/// # Errors
/// When there is no such context.
pub fn finalize(ctx: usize) -> Result<()> {
    let process = process();
    let context = process.contexts.remove(ctx)?;
    for listener in context.end() {
        // It may have been closed in the ordinary way.
        let _ = close_listen(listener);
    }
    process.context_ended(ctx);
    Ok(())
}

/// How many devices there are, virtual ones excepted.
///
/// # Errors
/// When `init` has not been called.
pub fn device_count() -> Result<i32> {
    Ok(i32::try_from(process().devices.count()).unwrap_or(i32::MAX))
}

/// A device's properties. They stay where they are as long as the library is mapped.
///
/// # Errors
/// When there is no such device.
pub fn device_properties(dev: i32) -> Result<&'static DeviceProperties> {
    process().devices.properties(dev)
}

/// Joins devices to a virtual one and gives its number.
///
/// # Errors
/// When a member does not exist, is virtual itself, or comes twice.
pub fn make_vdevice(members: &[i32]) -> Result<i32> {
    process().devices.make_vdevice(members)
}

/// Starts to listen; gives the connection handle, which NCCL carries to the peer, and the listener's id.
///
/// # Errors
/// When there is no such device, or nothing can be bound to its interface.
pub fn listen(ctx: Option<usize>, dev: i32) -> Result<([u8; 64], usize)> {
    let process = process();
    let context = process.context(ctx)?;
    let rails = process.devices.rails(dev)?;
    let net = process.net()?;
    let (listener, address) = net.acceptor.listen(rails, context.traffic_class)?;
    let handle = ConnectionHandle { secret: listener.secret.clone(), address, key: 0 };
    let comm = process.comms.insert(Arc::new(Comm::Listen(ListenComm { net: Arc::clone(net), listener })))?.encode();
    context.add_listener(comm);
    Ok((handle.encode(), comm))
}

/// Connects to the listener that made `handle`; None while the connection is not ready. The caller calls again with
/// the same handle bytes, in which the connecting side keeps the key of its state.
///
/// # Errors
/// When the handle is not one of ours, or the peer cannot be reached in time.
pub fn connect(
    ctx: Option<usize>,
    dev: i32,
    traffic_class: Option<u8>,
    handle: &mut [u8; 64],
) -> Result<Option<usize>> {
    connect_with(ctx, dev, traffic_class, handle, false)
}

/// Connects and waits, with a deadline. Does not depend on the peer having called accept.
///
/// # Errors
/// As [`connect`].
pub fn connect_blocking(dev: i32, handle: &mut [u8; 64]) -> Result<usize> {
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
    let rails = process.devices.rails(dev)?;
    let net = process.net()?;
    let target = || Target {
        address: handle.address,
        secret: handle.secret.clone(),
        rails,
        traffic_class: traffic_class.or(context.traffic_class),
    };
    let (key, dial) = context.dial(handle.key, net, target)?;
    ConnectionHandle::set_key(bytes, key);
    let result = if wait { Some(dial.wait()) } else { dial.result() };
    let Some(result) = result else { return Ok(None) };
    // Whatever came of it, the handle may be used for another connection from here on.
    ConnectionHandle::set_key(bytes, 0);
    context.forget_dial(key);
    let conn = result?;
    Ok(Some(process.comms.insert(Arc::new(Comm::Send(conn)))?.encode()))
}

/// Takes a connection from a listener; None while there is none.
///
/// # Errors
/// When there is no such listener.
pub fn accept(listen: usize) -> Result<Option<usize>> {
    let process = process();
    let comm = process.comms.get(listen)?;
    let Some(conn) = comm.listener()?.accept() else { return Ok(None) };
    Ok(Some(process.comms.insert(Arc::new(Comm::Recv(conn)))?.encode()))
}

/// Takes a connection from a listener and waits for it, with a deadline.
///
/// # Errors
/// When there is no such listener, or no peer connects in time.
pub fn accept_blocking(listen: usize) -> Result<usize> {
    let process = process();
    let comm = process.comms.get(listen)?;
    let patience = process.net()?.config.connect_timeout;
    let conn = comm.listener()?.accept_until(Instant::now() + patience).ok_or_else(|| {
        Error::remote(format!("no peer connected within {} s", patience.as_secs_f32()))
            .with_hint("a rank may have failed to start; TOWLINE_CONNECT_TIMEOUT sets how long to wait")
    })?;
    Ok(process.comms.insert(Arc::new(Comm::Recv(conn)))?.encode())
}

/// Registers memory of kind `NCCL_PTR_*` with a connection.
///
/// # Errors
/// When there is no such connection, or it cannot reach memory of that kind.
pub fn reg_mr(comm: usize, _data: *mut c_void, _size: usize, kind: i32) -> Result<usize> {
    let process = process();
    process.comms.get(comm)?.check_memory_kind(kind)?;
    Ok(process.next_registration())
}

/// Registers memory that is shared through a DMA-BUF descriptor.
///
/// # Errors
/// Always over TCP: the properties do not offer it.
pub fn reg_mr_dmabuf(
    comm: usize,
    _data: *mut c_void,
    _size: usize,
    _kind: i32,
    _offset: u64,
    _fd: i32,
) -> Result<usize> {
    process().comms.get(comm)?;
    Err(Error::usage("sockets cannot use memory through DMA-BUF"))
}

/// Ends a registration.
///
/// # Errors
/// When there is no such connection, or the registration is not one of ours.
pub fn dereg_mr(comm: usize, mr: usize) -> Result<()> {
    process().comms.get(comm)?;
    Handle::decode(mr, Kind::Memory).map(drop)
}

/// Starts a send; None for "not now".
///
/// # Errors
/// When there is no such connection, or it has failed.
pub fn isend(comm: usize, part: Part) -> Result<Option<usize>> {
    let owner = process().comms.get(comm)?;
    // SAFETY: NCCL leaves the buffer to the transport until `test` says done or the communicator is closed.
    let ticket = unsafe { owner.sender()?.isend(part.data, part.size, part.tag) }?;
    Ok(ticket.map(|ticket| request(comm, ticket)))
}

/// Starts a group of receives (1 to [`MAX_PARTS`]); None for "not now".
///
/// # Errors
/// When there is no such connection, or it has failed.
pub fn irecv(comm: usize, parts: &[Part]) -> Result<Option<usize>> {
    let owner = process().comms.get(comm)?;
    let mut posted = [(std::ptr::null_mut(), 0, 0); MAX_PARTS];
    for (to, part) in posted.iter_mut().zip(parts) {
        *to = (part.data, part.size, part.tag);
    }
    // SAFETY: NCCL leaves the buffers to the transport until `test` says done or the communicator is closed.
    let ticket = unsafe { owner.receiver()?.irecv(&posted[..parts.len().min(MAX_PARTS)]) }?;
    Ok(ticket.map(|ticket| request(comm, ticket)))
}

/// Makes received data visible to the GPU; None when there is nothing to wait for. The parts' tags are 0, and a
/// size says only whether the part has data (see `abi::v5`).
///
/// # Errors
/// When there is no such connection.
pub fn iflush(comm: usize, _parts: &[Part]) -> Result<Option<usize>> {
    // Sockets fill host memory by the processor, which the GPU sees as it is.
    process().comms.get(comm)?.receiver()?;
    Ok(None)
}

/// Asks whether a request has ended; None while it has not.
///
/// # Errors
/// When the request failed, was reported done before, or is not one of ours.
pub fn test(request: usize) -> Result<Option<Outcome>> {
    let handle = Handle::decode(request, Kind::Request)?;
    let ticket = Ticket { slot: handle.slot, generation: handle.generation };
    let comm = process().comms.occupant(handle.index).ok_or_else(|| {
        Error::usage("the request's communicator is closed").with_hint("a request ends with its communicator")
    })?;
    match &*comm {
        Comm::Send(conn) => conn.test(ticket),
        Comm::Recv(conn) => conn.test(ticket),
        Comm::Listen(_) => Err(Error::argument("the request is not one of ours")),
    }
}

fn request(comm: usize, ticket: Ticket) -> usize {
    let index = Handle::decode(comm, Kind::Comm).map_or(0, |handle| handle.index);
    Handle { kind: Kind::Request, index, slot: ticket.slot, generation: ticket.generation }.encode()
}

/// Closes a sending communicator.
///
/// # Errors
/// When there is no such communicator.
pub fn close_send(comm: usize) -> Result<()> {
    let process = process();
    process.comms.get(comm)?.sender()?;
    if let Comm::Send(conn) = &*process.comms.remove(comm)? {
        conn.close();
    }
    Ok(())
}

/// Closes a receiving communicator.
///
/// # Errors
/// When there is no such communicator.
pub fn close_recv(comm: usize) -> Result<()> {
    let process = process();
    process.comms.get(comm)?.receiver()?;
    if let Comm::Recv(conn) = &*process.comms.remove(comm)? {
        conn.close();
    }
    Ok(())
}

/// Closes a listener. Connections that it made live on.
///
/// # Errors
/// When there is no such listener.
pub fn close_listen(listen: usize) -> Result<()> {
    let process = process();
    process.comms.get(listen)?.listener()?;
    if let Comm::Listen(listen) = &*process.comms.remove(listen)? {
        listen.net.acceptor.close(&listen.listener);
    }
    Ok(())
}

/// Takes NCCL's hint about the operations to come. TCP has nothing to choose by it.
///
/// # Errors
/// When there is no such context.
pub fn set_net_attr(ctx: usize, attr: NetAttr) -> Result<()> {
    process().contexts.get(ctx)?;
    tracing::trace!("NCCL announces {attr:?}");
    Ok(())
}
