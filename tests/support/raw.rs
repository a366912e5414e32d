//! Calls into a table's entries with arguments that no well-meaning host gives: null pointers, stale handles, wrong
//! numbers. Every entry of every version can be called; the answers are NCCL's result codes.

use std::ffi::{c_int, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use towline::host::Table;
use towline::nccl::ffi;

/// Something that the plugin never gave out: as aligned as a heap pointer, with nothing behind it.
pub fn nobody() -> *mut c_void {
    without_provenance_mut(0x7f00_dead_bee0)
}

/// The arguments for the calls on a connection. NULL wherever nothing else was set.
#[derive(Clone, Copy)]
pub struct Arguments {
    pub comm: *mut c_void,
    pub data: *mut c_void,
    pub size: usize,
    pub mr: *mut c_void,
    pub request: *mut *mut c_void,
    pub count: c_int,
    pub arrays: bool,
}

impl Default for Arguments {
    fn default() -> Self {
        Self {
            comm: null_mut(),
            data: null_mut(),
            size: 0,
            mr: null_mut(),
            request: null_mut(),
            count: 1,
            arrays: true,
        }
    }
}

/// Calls an entry of whatever version, or gives `None` when the version leaves it out.
macro_rules! entry {
    ($table:expr, $name:ident; $( $($version:ident)+ => $arguments:tt ;)+) => {
        match $table {
            $( $( Table::$version(t) =>
                // SAFETY: the pointers are NULL, places that live during the call, or numbers that the plugin must
                // recognise as not its own before it does anything with them.
                t.$name.map(|call| unsafe { call $arguments }), )+ )+
            #[allow(unreachable_patterns, reason = "most entries exist in all versions")]
            _ => None,
        }
    };
}

pub fn devices(table: Table, count: *mut c_int) -> Option<u32> {
    entry!(table, devices; V4 V5 V6 V7 V8 V9 V10 V11 V12 => (count);)
}

pub fn properties_into_null(table: Table, dev: c_int) -> Option<u32> {
    entry!(table, getProperties; V4 V5 V6 V7 V8 V9 V10 V11 V12 => (dev, null_mut());)
}

pub fn listen(
    table: Table,
    context: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> Option<u32> {
    entry!(table, listen;
        V4 V5 V6 V7 V8 V9 V10 => (dev, handle, comm);
        V11 V12 => (context, dev, handle, comm);
    )
}

pub fn connect(
    table: Table,
    context: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> Option<u32> {
    let mut offload = null_mut();
    let mut config = ffi::ncclNetCommConfig_v10_t { trafficClass: -1 };
    entry!(table, connect;
        V4 V5 V6 => (dev, handle, comm);
        V7 V8 V9 => (dev, handle, comm, &raw mut offload);
        V10 => (dev, &raw mut config, handle, comm, &raw mut offload);
        V11 V12 => (context, dev, handle, comm, &raw mut offload);
    )
}

pub fn accept(table: Table, listener: *mut c_void, comm: *mut *mut c_void) -> Option<u32> {
    let mut offload = null_mut();
    entry!(table, accept;
        V4 V5 V6 => (listener, comm);
        V7 V8 V9 V10 V11 V12 => (listener, comm, &raw mut offload);
    )
}

pub fn reg_mr(table: Table, with: Arguments, kind: c_int, mr: *mut *mut c_void) -> Option<u32> {
    entry!(table, regMr;
        V4 V5 V6 V7 => (with.comm, with.data, with.size as c_int, kind, mr);
        V8 V9 V10 V11 V12 => (with.comm, with.data, with.size, kind, mr);
    )
}

pub fn dereg_mr(table: Table, comm: *mut c_void, mr: *mut c_void) -> Option<u32> {
    entry!(table, deregMr; V4 V5 V6 V7 V8 V9 V10 V11 V12 => (comm, mr);)
}

pub fn isend(table: Table, with: Arguments) -> Option<u32> {
    let Arguments { comm, data, size, mr, request, .. } = with;
    entry!(table, isend;
        V4 => (comm, data, size as c_int, mr, request);
        V5 V6 V7 V8 => (comm, data, size as c_int, 0, mr, request);
        V9 => (comm, data, size, 0, mr, request);
        V10 V11 V12 => (comm, data, size, 0, mr, null_mut(), request);
    )
}

/// With `arrays` false, the arrays of v5 and later are NULL too.
pub fn irecv(table: Table, with: Arguments) -> Option<u32> {
    let Arguments { comm, data, size, mr, request, count, arrays } = with;
    let (mut datas, mut mrs) = ([data; 16], [mr; 16]);
    let (mut sizes, mut ints, mut tags) = ([size; 16], [size as c_int; 16], [0; 16]);
    let some = |pointer: *mut *mut c_void| if arrays { pointer } else { null_mut() };
    let (datas, mrs) = (some(datas.as_mut_ptr()), some(mrs.as_mut_ptr()));
    let tags = if arrays { tags.as_mut_ptr() } else { null_mut() };
    let sizes = if arrays { sizes.as_mut_ptr() } else { null_mut() };
    let ints = if arrays { ints.as_mut_ptr() } else { null_mut() };
    entry!(table, irecv;
        V4 => (comm, data, size as c_int, mr, request);
        V5 V6 V7 V8 => (comm, count, datas, ints, tags, mrs, request);
        V9 => (comm, count, datas, sizes, tags, mrs, request);
        V10 V11 V12 => (comm, count, datas, sizes, tags, mrs, null_mut(), request);
    )
}

pub fn iflush(table: Table, with: Arguments) -> Option<u32> {
    let Arguments { comm, data, size, mr, request, count, .. } = with;
    let (mut datas, mut mrs, mut ints) = ([data; 16], [mr; 16], [size as c_int; 16]);
    let (datas, mrs, ints) = (datas.as_mut_ptr(), mrs.as_mut_ptr(), ints.as_mut_ptr());
    entry!(table, iflush;
        V4 => (comm, data, size as c_int, mr, request);
        V5 V6 V7 V8 V9 V10 V11 V12 => (comm, count, datas, ints, mrs, request);
    )
}

pub fn test(table: Table, request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> Option<u32> {
    entry!(table, test; V4 V5 V6 V7 V8 V9 V10 V11 V12 => (request, done, sizes);)
}

/// The three closes: of a sender, a receiver, a listener.
pub fn closes(table: Table, comm: *mut c_void) -> [Option<u32>; 3] {
    [
        entry!(table, closeSend; V4 V5 V6 V7 V8 V9 V10 V11 V12 => (comm);),
        entry!(table, closeRecv; V4 V5 V6 V7 V8 V9 V10 V11 V12 => (comm);),
        entry!(table, closeListen; V4 V5 V6 V7 V8 V9 V10 V11 V12 => (comm);),
    ]
}

pub fn finalize(table: Table, context: *mut c_void) -> Option<u32> {
    entry!(table, finalize; V11 V12 => (context);)
}

pub fn init_into_null(table: Table) -> Option<u32> {
    let mut config = ffi::ncclNetCommConfig_v10_t { trafficClass: -1 };
    entry!(table, init; V11 V12 => (null_mut(), 1, &raw mut config, None, None);)
}

/// `makeVDevice` with NULL for the number and for the members.
pub fn make_vdevice_of_null(table: Table) -> Option<u32> {
    entry!(table, makeVDevice;
        V9 V10 V11 => (null_mut(), null_mut());
        V12 => (null_mut(), null_mut());
    )
}

pub fn set_net_attr_of_null(table: Table, context: *mut c_void) -> Option<u32> {
    entry!(table, setNetAttr; V11 V12 => (context, null_mut());)
}

pub fn reg_mr_dmabuf(table: Table, comm: *mut c_void, mr: *mut *mut c_void) -> Option<u32> {
    entry!(table, regMrDmaBuf; V6 V7 V8 V9 V10 V11 V12 => (comm, null_mut(), 0, 1, 0, -1, mr);)
}
