//! The door between NCCL's C interface (`abi`) and the transport: one typed function per thing NCCL can ask for.
//!
//! All ids (contexts, listeners, connections, registrations, requests) are opaque numbers that `abi` hands to NCCL
//! in place of pointers and gets back unchanged. They are never 0; a request's is never 1 or 2 either. Ids that were
//! never given out, or that have ended, are answered with an argument error, never with undefined behaviour.
//!
//! A `ctx` of None means the process's default context, which hosts before v11 of the interface use.

use std::ffi::c_void;

use super::devices::DeviceProperties;
use crate::abi::ffi;
use crate::os::error::{Error, Result};

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

/// The most parts that one group of receives may have.
pub const MAX_PARTS: usize = 8;

/// How a request ended well.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// How many of `sizes` count: 1 for a send, n for a group of n receives, 0 for a flush.
    pub parts: usize,
    /// Bytes moved per part.
    pub sizes: [u64; MAX_PARTS],
}

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
pub fn init(_args: InitArgs) -> Result<usize> {
    Err(no_transport())
}

/// Ends a context: frees listeners and half-made connections that NCCL has left behind.
pub fn finalize(_ctx: usize) -> Result<()> {
    Err(no_transport())
}

/// How many devices there are, virtual ones excepted.
pub fn device_count() -> Result<i32> {
    Err(no_transport())
}

/// A device's properties. They stay where they are as long as the library is mapped.
pub fn device_properties(_dev: i32) -> Result<&'static DeviceProperties> {
    Err(no_transport())
}

/// Joins devices to a virtual one and gives its number.
pub fn make_vdevice(_members: &[i32]) -> Result<i32> {
    Err(no_transport())
}

/// Starts to listen; gives the connection handle, which NCCL carries to the peer, and the listener's id.
pub fn listen(_ctx: Option<usize>, _dev: i32) -> Result<([u8; 64], usize)> {
    Err(no_transport())
}

/// Connects to the listener that made `handle`; None while the connection is not ready. The caller calls again with
/// the same handle bytes, in which the connecting side keeps the key of its state.
pub fn connect(
    _ctx: Option<usize>,
    _dev: i32,
    _traffic_class: Option<u8>,
    _handle: &mut [u8; 64],
) -> Result<Option<usize>> {
    Err(no_transport())
}

/// Connects and waits, with a deadline. Does not depend on the peer having called accept.
pub fn connect_blocking(_dev: i32, _handle: &mut [u8; 64]) -> Result<usize> {
    Err(no_transport())
}

/// Takes a connection from a listener; None while there is none.
pub fn accept(_listen: usize) -> Result<Option<usize>> {
    Err(no_transport())
}

/// Takes a connection from a listener and waits for it, with a deadline.
pub fn accept_blocking(_listen: usize) -> Result<usize> {
    Err(no_transport())
}

/// Registers memory of kind `NCCL_PTR_*` with a connection.
pub fn reg_mr(_comm: usize, _data: *mut c_void, _size: usize, _kind: i32) -> Result<usize> {
    Err(no_transport())
}

/// Registers memory that is shared through a DMA-BUF descriptor.
pub fn reg_mr_dmabuf(
    _comm: usize,
    _data: *mut c_void,
    _size: usize,
    _kind: i32,
    _offset: u64,
    _fd: i32,
) -> Result<usize> {
    Err(no_transport())
}

/// Ends a registration.
pub fn dereg_mr(_comm: usize, _mr: usize) -> Result<()> {
    Err(no_transport())
}

/// Starts a send; None for "not now".
pub fn isend(_comm: usize, _part: Part) -> Result<Option<usize>> {
    Err(no_transport())
}

/// Starts a group of receives (1 to [`MAX_PARTS`]); None for "not now".
pub fn irecv(_comm: usize, _parts: &[Part]) -> Result<Option<usize>> {
    Err(no_transport())
}

/// Makes received data visible to the GPU; None when there is nothing to wait for. The parts' tags are 0, and a
/// size says only whether the part has data (see `abi::v5`).
pub fn iflush(_comm: usize, _parts: &[Part]) -> Result<Option<usize>> {
    Err(no_transport())
}

/// Asks whether a request has ended; None while it has not. The id ends with the answer.
pub fn test(_request: usize) -> Result<Option<Outcome>> {
    Err(no_transport())
}

/// Closes a sending connection.
pub fn close_send(_comm: usize) -> Result<()> {
    Err(no_transport())
}

/// Closes a receiving connection.
pub fn close_recv(_comm: usize) -> Result<()> {
    Err(no_transport())
}

/// Closes a listener; connections accepted from it live on.
pub fn close_listen(_listen: usize) -> Result<()> {
    Err(no_transport())
}

/// Takes NCCL's hint about the traffic to come.
pub fn set_net_attr(_ctx: usize, _attr: NetAttr) -> Result<()> {
    Err(no_transport())
}

fn no_transport() -> Error {
    Error::internal("this build has no transport")
}
