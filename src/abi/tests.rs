//! The promises of every version's table, whatever the transport does. Bad pointers, counts and sizes are answered with
//! an argument error, and a call that fails leaves NULL in place of a result.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use crate::nccl::ffi::ncclInvalidArgument;

/// Runs `$check!` for each version's table.
macro_rules! each_version {
    ($check:ident) => {
        $check!(v4 ncclNetPlugin_v4);
        $check!(v5 ncclNetPlugin_v5);
        $check!(v6 ncclNetPlugin_v6);
        $check!(v7 ncclNetPlugin_v7);
        $check!(v8 ncclNetPlugin_v8);
        $check!(v9 ncclNetPlugin_v9);
        $check!(v10 ncclNetPlugin_v10);
        $check!(v11 ncclNetPlugin_v11);
        $check!(v12 ncclNetPlugin_v12);
    };
}

/// Calls functions of a table and expects an argument error from each.
macro_rules! refuses {
    ($table:expr; $($function:ident($($argument:expr),*);)*) => { $(
        // SAFETY: the pointers are null, or places of the test, or numbers that the table takes as ids only.
        let code = unsafe { $table.$function.expect(stringify!($function))($($argument),*) };
        assert_eq!(code, ncclInvalidArgument, "{}", stringify!($function($($argument),*)));
    )* };
}

fn null<T>() -> *mut T {
    null_mut()
}

#[test]
fn every_table_is_called_towline() {
    macro_rules! check {
        ($module:ident $table:ident) => {
            // SAFETY: the name is a string constant.
            assert_eq!(unsafe { CStr::from_ptr(super::$module::$table.0.name) }, c"Towline");
        };
    }
    each_version!(check);
}

#[test]
fn null_where_a_value_is_needed_is_an_argument_error_in_every_version() {
    macro_rules! check {
        ($module:ident $table:ident) => {
            refuses! { super::$module::$table.0;
                devices(null());
                getProperties(0, null());
                deregMr(null(), std::ptr::without_provenance_mut(8));
                test(null(), null(), null());
                test(null(), &mut 0, null());
            }
        };
    }
    each_version!(check);
}

/// After a connection that could not be made, an abort closes null in its place and gives back null registrations. NCCL
/// stops at an error: it would leave the connections behind that one open, and their peers waiting.
#[test]
fn what_never_came_about_can_be_closed_in_every_version() {
    let closed = |code| assert_eq!(code, crate::nccl::ffi::ncclSuccess);
    macro_rules! check {
        ($module:ident $table:ident) => {
            let table = &super::$module::$table.0;
            // SAFETY: null means nothing.
            unsafe {
                closed(table.closeSend.expect("closeSend")(null()));
                closed(table.closeRecv.expect("closeRecv")(null()));
                closed(table.closeListen.expect("closeListen")(null()));
                closed(table.deregMr.expect("deregMr")(null(), null()));
                closed(table.deregMr.expect("deregMr")(std::ptr::without_provenance_mut(8), null()));
            }
        };
    }
    each_version!(check);
}

#[test]
fn null_arguments_of_what_changed_between_the_versions() {
    let (mut place, mut handle) = (null::<c_void>(), [0u8; 128]);
    let bytes = handle.as_mut_ptr().cast();
    let (v4, v6, v8) = (&super::v4::ncclNetPlugin_v4.0, &super::v6::ncclNetPlugin_v6.0, &super::v8::ncclNetPlugin_v8.0);
    refuses! { v4;
        listen(0, null(), &mut place);
        listen(0, bytes, null());
        connect(0, null(), &mut place);
        connect(0, bytes, null());
        accept(null(), &mut place);
        regMr(null(), bytes, 1, 1, &mut place);
        regMr(bytes, bytes, 1, 1, null());
        isend(bytes, bytes, 1, null(), null());
        isend(bytes, null(), 1, null(), &mut place);
        irecv(null(), bytes, 1, null(), &mut place);
        iflush(null(), bytes, 1, null(), &mut place);
    }
    refuses! { v6; regMrDmaBuf(null(), bytes, 1, 1, 0, -1, &mut place); connect(0, null(), &mut place); }
    refuses! { v8; connect(0, null(), &mut place, null()); accept(null(), &mut place, null()); }
    let (v10, v12) = (&super::v10::ncclNetPlugin_v10.0, &super::v12::ncclNetPlugin_v12.0);
    refuses! { v10;
        connect(0, null(), null(), &mut place, null());
        isend(null(), bytes, 1, 0, null(), null(), &mut place);
        makeVDevice(null(), null());
        makeVDevice(&mut 0, null());
    }
    refuses! { v12;
        init(null(), 1, null(), None, None);
        listen(null(), 0, bytes, &mut place);
        connect(null(), 0, bytes, &mut place, null());
        finalize(null());
        setNetAttr(null(), null());
    }
}

#[test]
fn sizes_and_counts_that_cannot_be_are_argument_errors() {
    let mut place = null::<c_void>();
    let mut memory = [0u8; 8];
    let bytes: *mut c_void = memory.as_mut_ptr().cast();
    let mut data = [bytes; 9];
    let (mut sizes, mut tags, mut mhandles) = ([1 as c_int; 9], [0 as c_int; 9], [null::<c_void>(); 9]);
    let (data, sizes) = (data.as_mut_ptr(), sizes.as_mut_ptr());
    let (tags, mhandles) = (tags.as_mut_ptr(), mhandles.as_mut_ptr());
    let v8 = &super::v8::ncclNetPlugin_v8.0;
    refuses! { super::v4::ncclNetPlugin_v4.0;
        isend(bytes, bytes, -1, null(), &mut place);
        irecv(bytes, bytes, -1, null(), &mut place);
        regMr(bytes, bytes, -1, 1, &mut place);
    }
    refuses! { v8;
        irecv(bytes, 0, data, sizes, tags, mhandles, &mut place);
        irecv(bytes, 9, data, sizes, tags, mhandles, &mut place);
        irecv(bytes, -1, data, sizes, tags, mhandles, &mut place);
        irecv(bytes, 1, null(), sizes, tags, mhandles, &mut place);
        irecv(bytes, 1, data, null(), tags, mhandles, &mut place);
        irecv(bytes, 1, data, sizes, null(), mhandles, &mut place);
        irecv(bytes, 1, data, sizes, tags, null(), &mut place);
        iflush(bytes, 9, data, sizes, mhandles, &mut place);
    }
}

#[test]
fn the_hint_in_request_is_overwritten_even_when_the_call_fails() {
    let mut request = std::ptr::without_provenance_mut::<c_void>(1);
    refuses! { super::v12::ncclNetPlugin_v12.0;
        irecv(null(), 1, null(), null(), null(), null(), null(), &mut request);
    }
    assert!(request.is_null());
}

#[test]
fn a_traffic_class_is_a_byte_or_undefined() {
    let mut ctx = null::<c_void>();
    for class in [-2, 256, c_int::MIN] {
        let mut config = crate::nccl::ffi::ncclNetCommConfig_v12_t { trafficClass: class };
        refuses! { super::v12::ncclNetPlugin_v12.0; init(&mut ctx, 1, &mut config, None, None); }
    }
    for (class, expected) in [(-1, None), (0, Some(0)), (184, Some(184)), (255, Some(255))] {
        let config = crate::nccl::ffi::ncclNetCommConfig_v10_t { trafficClass: class };
        // SAFETY: a valid configuration.
        assert_eq!(unsafe { super::v10::traffic_class(&raw const config) }.unwrap(), expected);
    }
}

#[test]
fn functions_that_a_host_device_must_not_have_are_null() {
    // NCCL calls irecvConsumed for every device that has it, and finalize without asking.
    let v12 = &super::v12::ncclNetPlugin_v12.0;
    assert!(v12.irecvConsumed.is_none() && v12.getDeviceMr.is_none() && v12.finalize.is_some());
    let v7 = &super::v7::ncclNetPlugin_v7.0;
    assert!(v7.irecvConsumed.is_none() && v7.getDeviceMr.is_none());
}

#[test]
fn the_log_speaks_nccl_s_numbers() {
    use crate::nccl::ffi::*;
    // `os::log` knows no NCCL types; it holds the signature and these values as plain numbers.
    fn as_the_log_has_it(logger: ncclDebugLogger_t) -> Option<crate::os::log::Logger> {
        logger
    }
    assert!(as_the_log_has_it(None).is_none());
    assert_eq!((NCCL_LOG_WARN, NCCL_LOG_INFO, NCCL_LOG_TRACE), (2, 3, 5));
    assert_eq!((NCCL_INIT, NCCL_NET, NCCL_ENV), (0x1, 0x10, 0x80));
}

#[test]
fn the_devices_speak_nccl_s_numbers() {
    use crate::plugin::{devices, facade};
    assert_eq!(i64::try_from(devices::MAX_TRANSFER_BYTES).unwrap(), crate::nccl::ffi::NCCL_MAX_NET_SIZE_BYTES);
    assert_eq!(i32::try_from(devices::MAX_MEMBERS).unwrap(), crate::nccl::ffi::NCCL_NET_MAX_DEVS_PER_NIC_V12);
    assert_eq!(usize::try_from(devices::MAX_RECVS).unwrap(), facade::MAX_PARTS);
}
