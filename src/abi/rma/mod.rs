//! NCCL's one-sided interface, v14 to v16: checks and translates arguments, and makes one call of
//! [`crate::rma::facade`].
//!
//! NCCL 2.30.7 and later look for these tables in the network plugin's library. `init` declines unless the user asked
//! for them (`TOWLINE_RMA`) and the communicator's network is Towline's over TCP.

mod v14;
mod v15;
mod v16;

use std::ffi::{c_int, c_void};
use std::ptr;

use super::guard::{guard, guard_and_tell};
use super::pointer::{Out, array, dress, handle_bytes, id};
use super::properties::Properties;
use crate::nccl::ffi::{
    NCCL_NET_DEVICE_GIN_PROXY, NCCL_RMA_MR_SIGNAL_NEVER_RESET, NCCL_RMA_SIGNAL_ADD, NCCL_RMA_SIGNAL_INC,
    ncclDebugLogger_t, ncclInvalidUsage, ncclNetProperties_v12_t, ncclResult_t, ncclRmaConfig_v14_t,
};
use crate::os::error::{Error, Result};
use crate::plugin::facade as net;
use crate::rma::facade::{self, At};

/// Exports `ncclRmaPlugin_vN`: what differs between the versions, and the rest.
macro_rules! export_rma {
    ($(#[$doc:meta])* $symbol:ident: $type:ident = { $api:literal; $($field:ident: $function:expr),* $(,)? }) => {
        $(#[$doc])*
        // SAFETY: the symbol is NCCL's name for exactly this type, and nothing else in the process defines it in this
        // library's scope.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "NCCL's name")]
        pub(crate) static $symbol: Table<$type> = Table($type {
            name: NAME.as_ptr(),
            init: Some(super::init::<$api>),
            devices: Some(crate::abi::v4::devices::<$api>),
            getProperties: Some(super::get_properties::<$api>),
            listen: Some(super::listen::<$api>),
            connect: Some(super::connect::<$api>),
            createContext: Some(super::create_context::<$api>),
            regMrSym: Some(super::reg_mr_sym::<$api>),
            regMrSymDmaBuf: Some(super::reg_mr_sym_dmabuf::<$api>),
            deregMrSym: Some(super::dereg_mr_sym::<$api>),
            destroyContext: Some(super::destroy_context::<$api>),
            closeColl: Some(super::close_coll::<$api>),
            closeListen: Some(super::close_listen::<$api>),
            iflush: Some(super::iflush::<$api>),
            test: Some(super::test::<$api>),
            // The placer needs no help.
            rmaProgress: None,
            queryLastError: Some(super::query_last_error::<$api>),
            finalize: Some(super::finalize::<$api>),
            $($field: $function),*
        });
    };
}
use export_rma;

unsafe extern "C" fn init<const API: u8>(ctx: *mut *mut c_void, comm: u64, logger: ncclDebugLogger_t) -> ncclResult_t {
    let mut declined = None;
    let code = guard::<API>("rma init", || {
        // SAFETY: NCCL's promise: null, or a place for the context.
        let mut ctx = unsafe { Out::new(ctx, "ctx") }?;
        ctx.set(ptr::null_mut());
        match facade::init(comm, logger)? {
            Ok(id) => ctx.set(dress(id)),
            Err(why) => declined = Some(why),
        }
        Ok(())
    });
    let Some(why) = declined else { return code };
    tracing::info!("no one-sided operations over Towline: {why}");
    ncclInvalidUsage
}

unsafe extern "C" fn get_properties<const API: u8>(dev: c_int, props: *mut ncclNetProperties_v12_t) -> ncclResult_t {
    guard::<API>("rma getProperties", || {
        // SAFETY: NCCL's promise: null or a place for this struct.
        let mut props = unsafe { Out::new(props, "props") }?;
        // The net device's in all but this: NCCL's own proxy thread calls for the GPU.
        let told = ncclNetProperties_v12_t::new(dev, net::device_properties(dev)?);
        props.set(ncclNetProperties_v12_t { netDeviceType: NCCL_NET_DEVICE_GIN_PROXY, ..told });
        Ok(())
    })
}

unsafe extern "C" fn listen<const API: u8>(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> ncclResult_t {
    guard::<API>("rma listen", || {
        // SAFETY: NCCL's promise: null, or the bytes of a handle and a place for a pointer.
        let (handle, mut comm) = unsafe { (handle_bytes(handle)?, Out::new(listen_comm, "listenComm")?) };
        comm.set(ptr::null_mut());
        let (bytes, listener) = facade::listen(id(ctx, "ctx")?, dev)?;
        *handle = bytes;
        comm.set(dress(listener));
        Ok(())
    })
}

/// `ctx` is the network's context in NCCL 2.30.7, so it is not read.
unsafe extern "C" fn connect<const API: u8>(
    _ctx: *mut c_void,
    handles: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
) -> ncclResult_t {
    guard::<API>("rma connect", || {
        let ranks = usize::try_from(ranks).map_err(|_| Error::argument("the number of ranks is negative"))?;
        // SAFETY: NCCL's promise: null, or a place for a pointer and an array of that many pointers.
        let (mut comm, handles) = unsafe { (Out::new(coll_comm, "collComm")?, array(handles, ranks, "handles")?) };
        comm.set(ptr::null_mut());
        // SAFETY: NCCL's promise: null, or the bytes of a handle. They are copied, so two ranks may have the same.
        let handles = handles.iter().map(|&handle| unsafe { handle_bytes(handle) }.map(|bytes| *bytes));
        let group = facade::connect(id(listen_comm, "listenComm")?, handles.collect::<Result<_>>()?, rank)?;
        comm.set(dress(group));
        Ok(())
    })
}

/// The configuration requests a number of contexts, which all share a pair's connections, and a traffic class: the
/// connections exist by now, with that of the communicator's network.
unsafe extern "C" fn create_context<const API: u8>(
    coll_comm: *mut c_void,
    _config: *mut ncclRmaConfig_v14_t,
    rma_ctx: *mut *mut c_void,
) -> ncclResult_t {
    guard::<API>("rma createContext", || {
        // SAFETY: NCCL's promise: null, or a place for a pointer.
        let mut context = unsafe { Out::new(rma_ctx, "rmaCtx") }?;
        context.set(ptr::null_mut());
        context.set(dress(facade::create_context(id(coll_comm, "collComm")?)?));
        Ok(())
    })
}

unsafe extern "C" fn reg_mr_sym<const API: u8>(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    guard::<API>("regMrSym", || {
        // SAFETY: NCCL's promise: null, or a place for a pointer.
        let mut mr = unsafe { Out::new(mhandle, "mhandle") }?;
        mr.set(ptr::null_mut());
        let memory = (data.expose_provenance(), size);
        let only_ours = flags & u64::from(NCCL_RMA_MR_SIGNAL_NEVER_RESET) != 0;
        mr.set(dress(facade::register(id(coll_comm, "collComm")?, memory, kind, only_ours)?));
        Ok(())
    })
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
unsafe extern "C" fn reg_mr_sym_dmabuf<const API: u8>(
    _coll_comm: *mut c_void,
    _data: *mut c_void,
    _size: usize,
    _kind: c_int,
    _offset: u64,
    _fd: c_int,
    _flags: u64,
    _mhandle: *mut *mut c_void,
) -> ncclResult_t {
    guard::<API>("regMrSymDmaBuf", || Err(Error::usage("one-sided operations cannot use memory through DMA-BUF")))
}

unsafe extern "C" fn dereg_mr_sym<const API: u8>(coll_comm: *mut c_void, mhandle: *mut c_void) -> ncclResult_t {
    guard::<API>("deregMrSym", || facade::withdraw(id(coll_comm, "collComm")?, id(mhandle, "mhandle")?))
}

unsafe extern "C" fn destroy_context<const API: u8>(rma_ctx: *mut c_void) -> ncclResult_t {
    guard::<API>("rma destroyContext", || facade::destroy_context(id(rma_ctx, "rmaCtx")?))
}

unsafe extern "C" fn close_coll<const API: u8>(coll_comm: *mut c_void) -> ncclResult_t {
    guard::<API>("rma closeColl", || facade::close_group(id(coll_comm, "collComm")?))
}

unsafe extern "C" fn close_listen<const API: u8>(listen_comm: *mut c_void) -> ncclResult_t {
    guard::<API>("rma closeListen", || facade::close_listener(id(listen_comm, "listenComm")?))
}

/// What a put wrote is visible before its signal is, so there is nothing to wait for.
unsafe extern "C" fn iflush<const API: u8>(
    _rma_ctx: *mut c_void,
    _context: c_int,
    _mhandle: *mut c_void,
    _rank: u32,
    request: *mut *mut c_void,
) -> ncclResult_t {
    guard_and_tell::<API>("rma iflush", tell_unread, || {
        // SAFETY: NCCL's promise: null, or a place for a pointer.
        unsafe { Out::new(request, "request") }?.set(ptr::null_mut());
        Ok(())
    })
}

unsafe extern "C" fn test<const API: u8>(
    coll_comm: *mut c_void,
    request: *mut c_void,
    done: *mut c_int,
) -> ncclResult_t {
    guard_and_tell::<API>("rma test", tell_unread, || {
        // SAFETY: NCCL's promise: null, or a place for a number.
        let mut done = unsafe { Out::new(done, "done") }?;
        done.set(0);
        done.set(c_int::from(facade::test(id(coll_comm, "collComm")?, id(request, "request")?)?));
        Ok(())
    })
}

unsafe extern "C" fn query_last_error<const API: u8>(rma_ctx: *mut c_void, has_error: *mut bool) -> ncclResult_t {
    guard::<API>("rma queryLastError", || {
        // SAFETY: NCCL's promise: null, or a place for a truth value.
        unsafe { Out::new(has_error, "hasError") }?.set(facade::has_failed(id(rma_ctx, "rmaCtx")?)?);
        Ok(())
    })
}

unsafe extern "C" fn finalize<const API: u8>(ctx: *mut c_void) -> ncclResult_t {
    guard::<API>("rma finalize", || facade::finalize(id(ctx, "ctx")?))
}

/// For the calls of NCCL's progress thread.
fn tell_unread(_call: &'static str, error: &Error) {
    facade::say_rarely(error);
}

/// A side of an operation. NCCL gives a null handle where there are no bytes.
fn at(mhandle: *mut c_void, offset: u64) -> At {
    At { mr: mhandle.addr(), offset }
}

/// What a signal adds.
fn addend(operation: u32, value: u64) -> Result<u64> {
    match operation {
        NCCL_RMA_SIGNAL_INC => Ok(1),
        NCCL_RMA_SIGNAL_ADD => Ok(value),
        _ => Err(Error::argument(format!("there is no operation {operation} of signals"))),
    }
}

/// Begins an operation and gives its request.
///
/// # Safety
/// `request` is null or a place for a pointer.
unsafe fn begin<const API: u8>(
    call: &'static str,
    request: *mut *mut c_void,
    begin: impl FnOnce() -> Result<usize>,
) -> ncclResult_t {
    guard_and_tell::<API>(call, tell_unread, || {
        // SAFETY: this function's contract.
        let mut request = unsafe { Out::new(request, "request") }?;
        request.set(ptr::null_mut());
        request.set(dress(begin()?));
        Ok(())
    })
}
