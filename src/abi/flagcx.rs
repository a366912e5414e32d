//! FlagCX's net adaptor interface v1, loaded by FlagCX 0.11 and later for its own path between accelerators
//! (`FLAGCX_NET_ADAPTOR_PLUGIN`).
//!
//! It is NCCL's v8 in another order, with differences that FlagCX's code makes (`core/transport.cc`, `core/net.cc` and
//! `core/proxy.cc` there):
//!
//! - Of a connection handle, 64 bytes reach the peer, which writes a pointer over the last 8. Ours takes 56.
//! - `init` gives no logger, and there is no finalize. It joins the contexts of NCCL that live in the process.
//! - `irecv` finds an `int` where it reads a `size_t`: only the lower half is a size.
//! - FlagCX ignores the results of `listen`, `isend`, `irecv`, `test` and the closes, and calls again after an error of
//!   `connect` or `accept`. So it waits for ever for a request that has failed, and for a peer that died before it
//!   connected. Only the log can inform the user (`guard`).
//! - Its buffers are host memory where a device offers nothing else, and it does not flush them. Nothing else is
//!   offered.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use super::guard::guard;
use super::pointer::{Out, Size, dress, id, null};
use super::properties::Properties;
use super::result::FLAGCX;
use super::table::{NAME, Table};
use super::transfer::{self, Group};
use super::{v4, v5, v10};
use crate::nccl::ffi::{NCCL_PTR_HOST, flagcxNetAdaptor_v1_t, ncclNetProperties_v8_t, ncclResult_t};
use crate::os::error::{Error, Result};
use crate::plugin::context::{Host, InitArgs};
use crate::plugin::facade;
use crate::plugin::handle::ShortHandle;

/// The table that FlagCX loads.
// SAFETY: the symbol is FlagCX's name for exactly this type, and nothing else in the process defines it in this
// library's scope.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "FlagCX's name")]
pub(crate) static flagcxNetAdaptorPlugin_v1: Table<flagcxNetAdaptor_v1_t> = Table(flagcxNetAdaptor_v1_t {
    name: NAME.as_ptr(),
    init: Some(init),
    devices: Some(v4::devices::<FLAGCX>),
    getProperties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect),
    accept: Some(accept),
    closeSend: Some(v4::close_send::<FLAGCX>),
    closeRecv: Some(v4::close_recv::<FLAGCX>),
    closeListen: Some(v4::close_listen::<FLAGCX>),
    regMr: Some(reg_mr),
    // With FLAGCX_DMABUF_ENABLE=1 FlagCX calls it without a look: a refusal ends the operation, NULL would end the
    // process.
    regMrDmaBuf: Some(reg_mr_dmabuf),
    deregMr: Some(v4::dereg_mr::<FLAGCX>),
    isend: Some(v10::isend::<FLAGCX>),
    irecv: Some(irecv),
    iflush: Some(v5::iflush::<FLAGCX>),
    test: Some(v4::test::<FLAGCX>),
    iput: None,
    iget: None,
    iputSignal: None,
    // With FLAGCX_TOPO_FILE likewise.
    getDevFromName: Some(get_dev_from_name),
});

unsafe extern "C" fn init() -> ncclResult_t {
    guard::<FLAGCX>("init", || {
        // Below v11 of NCCL's interface there is one context for the process, as here.
        facade::init(InitArgs::new(Host::FlagCx, 8)).map(|_| ())
    })
}

unsafe extern "C" fn get_properties(dev: c_int, props: *mut ncclNetProperties_v8_t) -> ncclResult_t {
    guard::<FLAGCX>("getProperties", || {
        // SAFETY: FlagCX's promise is NCCL's: null or a place for this struct.
        let mut props = unsafe { Out::new(props, "props") }?;
        let told = ncclNetProperties_v8_t::new(dev, facade::device_properties(dev)?);
        props.set(ncclNetProperties_v8_t { ptrSupport: NCCL_PTR_HOST as c_int, ..told });
        Ok(())
    })
}

unsafe extern "C" fn get_dev_from_name(name: *mut c_char, dev: *mut c_int) -> ncclResult_t {
    guard::<FLAGCX>("getDevFromName", || {
        // SAFETY: FlagCX's promise is NCCL's: null or a place for an int.
        let mut dev = unsafe { Out::new(dev, "dev") }?;
        if name.is_null() {
            return Err(null("name"));
        }
        // SAFETY: not null, and a C string by FlagCX's promise.
        let name = unsafe { CStr::from_ptr(name) };
        for number in 0..facade::device_count()? {
            if *facade::device_properties(number)?.name == *name {
                dev.set(number);
                return Ok(());
            }
        }
        Err(Error::argument(format!(
            "FLAGCX_TOPO_FILE names the device {}, which there is not",
            name.to_string_lossy()
        ))
        .with_hint("`towline doctor` lists the devices"))
    })
}

unsafe extern "C" fn listen(dev: c_int, handle: *mut c_void, listen_comm: *mut *mut c_void) -> ncclResult_t {
    guard::<FLAGCX>("listen", || {
        // SAFETY: FlagCX's promise is NCCL's, for 64 bytes of a handle and a place for a pointer.
        let (handle, mut comm) = unsafe { (short_handle(handle)?, Out::new(listen_comm, "listenComm")?) };
        comm.set(ptr::null_mut());
        let (bytes, id) = facade::listen_short(dev)?;
        *handle = bytes;
        comm.set(dress(id));
        Ok(())
    })
}

unsafe extern "C" fn connect(dev: c_int, handle: *mut c_void, send_comm: *mut *mut c_void) -> ncclResult_t {
    guard::<FLAGCX>("connect", || {
        // SAFETY: FlagCX's promise is NCCL's, for 64 bytes of a handle and a place for a pointer.
        let (handle, mut comm) = unsafe { (short_handle(handle)?, Out::new(send_comm, "sendComm")?) };
        comm.set(ptr::null_mut());
        if let Some(id) = facade::connect_short(dev, handle)? {
            comm.set(dress(id));
        }
        Ok(())
    })
}

unsafe extern "C" fn accept(listen_comm: *mut c_void, recv_comm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: FlagCX's promise is NCCL's, passed on.
    unsafe { v4::accept_with::<FLAGCX>(listen_comm, recv_comm, facade::accept_or_report) }
}

/// The bytes of a connection handle that are ours.
///
/// # Safety
/// `at` is null or valid for reading and writing 56 bytes, which no other thread uses until the call from FlagCX
/// returns.
unsafe fn short_handle<'a>(at: *mut c_void) -> Result<&'a mut ShortHandle> {
    // SAFETY: exclusive and long enough by this function's own contract; bytes have no alignment.
    let bytes = unsafe { at.cast::<ShortHandle>().as_mut() };
    bytes.ok_or_else(|| null("handle"))
}

/// The flags request an order of one-sided writes, of which there are none.
unsafe extern "C" fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _flags: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    let how = || {
        if kind != NCCL_PTR_HOST as c_int {
            return Err(Error::usage("under FlagCX only host memory can be registered")
                .with_hint("do not register device memory with FlagCX; it goes through host memory then"));
        }
        facade::reg_mr(id(comm, "comm")?, data, size, kind)
    };
    // SAFETY: FlagCX's promise is NCCL's, passed on.
    unsafe { v4::register::<FLAGCX>("regMr", mhandle, how) }
}

#[allow(clippy::too_many_arguments, reason = "FlagCX's signature")]
unsafe extern "C" fn reg_mr_dmabuf(
    _comm: *mut c_void,
    _data: *mut c_void,
    _size: usize,
    _kind: c_int,
    _offset: u64,
    _fd: c_int,
    _flags: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    let refuse =
        || Err(Error::usage("under FlagCX there is no memory through DMA-BUF").with_hint("unset FLAGCX_DMABUF_ENABLE"));
    // SAFETY: FlagCX's promise is NCCL's, passed on.
    unsafe { v4::register::<FLAGCX>("regMrDmaBuf", mhandle, refuse) }
}

/// A size as FlagCX gives it to `irecv`: an `int` (`stepSize` of its `flagcxProxySubArgs`) behind a pointer to
/// `size_t`. After the `int` comes padding.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct PaddedInt(usize);

impl Size for PaddedInt {
    fn bytes(self) -> Result<usize> {
        // Both processors that Towline runs on have the lower half first in memory.
        (self.0 as c_int).bytes()
    }
}

#[allow(clippy::too_many_arguments, reason = "FlagCX's signature")]
unsafe extern "C" fn irecv(
    comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    phandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let group = Group { n, data, sizes: sizes.cast::<PaddedInt>(), tags: Some(tags), mhandles, phandles };
    // SAFETY: FlagCX's promise is NCCL's, passed on.
    unsafe { transfer::receive::<_, FLAGCX>(comm, &group, request) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_an_int_in_memory_is_not_part_of_the_size() {
        assert_eq!(PaddedInt(0xdead_beef_0040_0000).bytes().unwrap(), 4 << 20);
        assert_eq!(PaddedInt(0x7fff_ffff).bytes().unwrap(), 0x7fff_ffff);
        assert!(PaddedInt(0xffff_ffff).bytes().is_err());
    }
}
