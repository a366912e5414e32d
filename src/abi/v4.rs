//! v4 of the net interface, loaded by NCCL 2.8 to 2.11; also the home of what no later version changed.
//!
//! A connection handle has 64 bytes. `connect` and `accept` are called once and their result is used at once, so they
//! wait, with a deadline. There are no tags and no groups. Sizes are `int`.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::guard::guard;
use super::pointer::{Out, Size, dress, handle_bytes, id};
use super::properties::get_properties;
use super::transfer::{self, Group};
use crate::nccl::ffi::{ncclDebugLogger_t, ncclResult_t};
use crate::os::error::Result;
use crate::plugin::context::{Host, InitArgs};
use crate::plugin::facade;

/// Exports `ncclNetPlugin_vN`. The fields that no version has changed since v4 are filled in here; the others are
/// given as `field: the file of the version that introduced the function`.
macro_rules! export_table {
    ($(#[$doc:meta])* $symbol:ident: $type:ident = { $api:literal; $($field:ident: $function:expr),* $(,)? }) => {
        $(#[$doc])*
        // SAFETY: the symbol is NCCL's name for exactly this type, and nothing else in the process defines it in this
        // library's scope.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, unreachable_pub, reason = "NCCL's name, which it looks up")]
        pub static $symbol: $crate::abi::table::Table<$crate::nccl::ffi::$type> =
            $crate::abi::table::Table($crate::nccl::ffi::$type {
                name: $crate::abi::table::NAME.as_ptr(),
                devices: Some($crate::abi::v4::devices::<$api>),
                deregMr: Some($crate::abi::v4::dereg_mr::<$api>),
                test: Some($crate::abi::v4::test::<$api>),
                closeSend: Some($crate::abi::v4::close_send::<$api>),
                closeRecv: Some($crate::abi::v4::close_recv::<$api>),
                closeListen: Some($crate::abi::v4::close_listen::<$api>),
                $($field: $function),*
            });
    };
}
pub(super) use export_table;

export_table! {
    /// The table that NCCL 2.8 to 2.11 loads.
    ncclNetPlugin_v4: ncclNet_v4_t = {
        4;
        init: Some(init::<4>),
        getProperties: Some(get_properties::<_, 4>),
        listen: Some(listen::<4>),
        connect: Some(connect::<4>),
        accept: Some(accept::<4>),
        regMr: Some(reg_mr::<c_int, 4>),
        isend: Some(isend::<4>),
        irecv: Some(irecv::<4>),
        iflush: Some(iflush::<4>),
    }
}

/// `init`, v4 to v9: the process's default context.
pub(super) unsafe extern "C" fn init<const API: u8>(logger: ncclDebugLogger_t) -> ncclResult_t {
    guard::<API>("init", || facade::init(InitArgs { logger, ..InitArgs::new(Host::Nccl, API) }).map(|_| ()))
}

/// `devices`, every version.
pub(super) unsafe extern "C" fn devices<const API: u8>(count: *mut c_int) -> ncclResult_t {
    guard::<API>("devices", || {
        // SAFETY: NCCL's promise: null or a place for an int.
        let mut count = unsafe { Out::new(count, "ndev") }?;
        count.set(facade::device_count()?);
        Ok(())
    })
}

/// `listen`, v4 to v10.
pub(super) unsafe extern "C" fn listen<const API: u8>(
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { listen_in::<API>(|| Ok(None), dev, handle, listen_comm) }
}

/// `listen` with the version's way to name a context.
///
/// # Safety
/// NCCL's promise (see [`super`]) for `handle` and `listen_comm`.
pub(super) unsafe fn listen_in<const API: u8>(
    ctx: impl FnOnce() -> Result<Option<usize>>,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> ncclResult_t {
    guard::<API>("listen", || {
        // SAFETY: this function's contract; a handle has at least 64 bytes in every version.
        let (handle, mut comm) = unsafe { (handle_bytes(handle)?, Out::new(listen_comm, "listenComm")?) };
        comm.set(ptr::null_mut());
        let (bytes, id) = facade::listen(ctx()?, dev)?;
        *handle = bytes;
        comm.set(dress(id));
        Ok(())
    })
}

/// `connect`, v4 only: waits.
unsafe extern "C" fn connect<const API: u8>(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { connect_with::<API>(handle, send_comm, |handle| facade::connect_blocking(dev, handle).map(Some)) }
}

/// `connect` with the version's way to do it.
///
/// # Safety
/// NCCL's promise (see [`super`]) for `handle` and `send_comm`.
pub(super) unsafe fn connect_with<const API: u8>(
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    how: impl FnOnce(&mut [u8; 64]) -> Result<Option<usize>>,
) -> ncclResult_t {
    guard::<API>("connect", || {
        // SAFETY: this function's contract; a handle has at least 64 bytes in every version.
        let (handle, mut comm) = unsafe { (handle_bytes(handle)?, Out::new(send_comm, "sendComm")?) };
        comm.set(ptr::null_mut());
        if let Some(id) = how(handle)? {
            comm.set(dress(id));
        }
        Ok(())
    })
}

/// `accept`, v4 only: waits.
unsafe extern "C" fn accept<const API: u8>(listen_comm: *mut c_void, recv_comm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { accept_with::<API>(listen_comm, recv_comm, |listener| facade::accept_blocking(listener).map(Some)) }
}

/// `accept` with the version's way to do it.
///
/// # Safety
/// NCCL's promise (see [`super`]) for `recv_comm`.
pub(super) unsafe fn accept_with<const API: u8>(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
    how: impl FnOnce(usize) -> Result<Option<usize>>,
) -> ncclResult_t {
    guard::<API>("accept", || {
        // SAFETY: this function's contract.
        let mut comm = unsafe { Out::new(recv_comm, "recvComm") }?;
        comm.set(ptr::null_mut());
        if let Some(id) = how(id(listen_comm, "listenComm")?)? {
            comm.set(dress(id));
        }
        Ok(())
    })
}

/// `regMr`, every version: the size is an `int` until v7 and a `size_t` from v8 on.
pub(super) unsafe extern "C" fn reg_mr<S: Size, const API: u8>(
    comm: *mut c_void,
    data: *mut c_void,
    size: S,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's promise, passed on.
    unsafe { register::<API>("regMr", mhandle, || facade::reg_mr(id(comm, "comm")?, data, size.bytes()?, kind)) }
}

/// A registration with the version's way to make it.
///
/// # Safety
/// NCCL's promise (see [`super`]) for `mhandle`.
pub(super) unsafe fn register<const API: u8>(
    call: &'static str,
    mhandle: *mut *mut c_void,
    how: impl FnOnce() -> Result<usize>,
) -> ncclResult_t {
    guard::<API>(call, || {
        // SAFETY: this function's contract.
        let mut mhandle = unsafe { Out::new(mhandle, "mhandle") }?;
        mhandle.set(ptr::null_mut());
        mhandle.set(dress(how()?));
        Ok(())
    })
}

/// `deregMr`, every version. NCCL also gives back a registration that never came about, as null.
pub(super) unsafe extern "C" fn dereg_mr<const API: u8>(comm: *mut c_void, mhandle: *mut c_void) -> ncclResult_t {
    guard::<API>("deregMr", || {
        if mhandle.is_null() {
            return Ok(());
        }
        facade::dereg_mr(id(comm, "comm")?, mhandle.addr())
    })
}

unsafe extern "C" fn isend<const API: u8>(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let part = || transfer::part(data, size.bytes()?, 0, mhandle, ptr::null_mut());
    // SAFETY: NCCL's promise, passed on.
    unsafe { transfer::send::<API>(comm, part, request) }
}

unsafe extern "C" fn irecv<const API: u8>(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let (mut data, mut size, mut mhandle) = (data, size, mhandle);
    let group = alone(&mut data, &mut size, &mut mhandle);
    // SAFETY: NCCL's promise, passed on; the arrays of `group` are this call's own arguments, one each.
    unsafe { transfer::receive::<_, API>(comm, &group, request) }
}

unsafe extern "C" fn iflush<const API: u8>(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let (mut data, mut size, mut mhandle) = (data, size, mhandle);
    let group = alone(&mut data, &mut size, &mut mhandle);
    // SAFETY: NCCL's promise, passed on; the arrays of `group` are this call's own arguments, one each.
    unsafe { transfer::flush::<API>(comm, &group, request) }
}

/// A group of one.
fn alone(data: &mut *mut c_void, size: &mut c_int, mhandle: &mut *mut c_void) -> Group<c_int> {
    Group { n: 1, data, sizes: size, tags: None, mhandles: mhandle, phandles: ptr::null_mut() }
}

/// `test`, every version. Sizes are `int` also where messages may be larger: a size that does not fit is reported as
/// the largest `int`.
pub(super) unsafe extern "C" fn test<const API: u8>(
    request: *mut c_void,
    done: *mut c_int,
    sizes: *mut c_int,
) -> ncclResult_t {
    guard::<API>("test", || {
        // SAFETY: NCCL's promise: null or a place for an int.
        let mut done = unsafe { Out::new(done, "done") }?;
        done.set(0);
        let Some(outcome) = facade::test(id(request, "request")?)? else { return Ok(()) };
        if !sizes.is_null() {
            // SAFETY: NCCL's promise: place for one int per part, of which there is one at least.
            unsafe { sizes.write(saturated(outcome.sizes[0])) };
            if outcome.parts > 1 {
                // SAFETY: as above, of which there are `parts`.
                unsafe { write_sizes(sizes, &outcome.sizes[..outcome.parts]) };
            }
        }
        done.set(1);
        Ok(())
    })
}

/// The sizes of a group. Not part of every `test`.
///
/// # Safety
/// `to` has place for as many.
#[inline(never)]
unsafe fn write_sizes(to: *mut c_int, sizes: &[u64]) {
    for (i, &size) in sizes.iter().enumerate() {
        // SAFETY: this function's contract.
        unsafe { to.add(i).write(saturated(size)) };
    }
}

fn saturated(size: u64) -> c_int {
    c_int::try_from(size).unwrap_or(c_int::MAX)
}

/// A close. After a failed `connect` or `accept` NCCL considers its connection connected (`proxyProgressAsync` in
/// `proxy.cc`) and closes null in its place. An error here would make it leave all connections behind that one open.
fn close<const API: u8>(call: &'static str, comm: *mut c_void, how: fn(usize) -> Result<()>) -> ncclResult_t {
    guard::<API>(call, || if comm.is_null() { Ok(()) } else { how(comm.addr()) })
}

/// `closeSend`, every version.
pub(super) unsafe extern "C" fn close_send<const API: u8>(comm: *mut c_void) -> ncclResult_t {
    close::<API>("closeSend", comm, facade::close_send)
}

/// `closeRecv`, every version.
pub(super) unsafe extern "C" fn close_recv<const API: u8>(comm: *mut c_void) -> ncclResult_t {
    close::<API>("closeRecv", comm, facade::close_recv)
}

/// `closeListen`, every version.
pub(super) unsafe extern "C" fn close_listen<const API: u8>(comm: *mut c_void) -> ncclResult_t {
    close::<API>("closeListen", comm, facade::close_listen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_int_are_told_as_the_largest_int() {
        let sizes = [0, 1, 0x7fff_ffff, 0x8000_0000, 5 << 30, u64::MAX];
        assert_eq!(sizes.map(saturated), [0, 1, c_int::MAX, c_int::MAX, c_int::MAX, c_int::MAX]);
    }
}
