//! One call per entry of the plugin's table, whatever the version of the table.
//!
//! Guarantees: arguments reach the plugin in the types that its version declares. A size that does not fit is refused
//! here, not truncated. An entry that is NULL or does not exist answers [`Code::NotOffered`]. It must not know about
//! lifetimes: that a pointer is valid is the business of the rooms above, so everything here is `unsafe`.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use super::code::{Code, Result};
use super::library::{ApiVersion, Plugin};
use super::properties::Properties;
use crate::nccl::ffi;

/// The plugin's table of functions as its library exports it. The variants are public so that a test can call an
/// entry with whatever it likes.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the names say it all")]
pub enum Table {
    V4(&'static ffi::ncclNet_v4_t),
    V5(&'static ffi::ncclNet_v5_t),
    V6(&'static ffi::ncclNet_v6_t),
    V7(&'static ffi::ncclNet_v7_t),
    V8(&'static ffi::ncclNet_v8_t),
    V9(&'static ffi::ncclNet_v9_t),
    V10(&'static ffi::ncclNet_v10_t),
    V11(&'static ffi::ncclNet_v11_t),
    V12(&'static ffi::ncclNet_v12_t),
}

use Table::{V4, V5, V6, V7, V8, V9, V10, V11, V12};

/// Calls an entry, or returns that it is missing.
macro_rules! call {
    ($table:ident . $entry:ident ( $($argument:expr),* $(,)? )) => {
        match $table.$entry {
            // SAFETY: the caller of the surrounding `unsafe fn` vouches for the arguments; the library is mapped as
            // long as its `Plugin` lives, which every object of the host holds.
            Some(entry) => Code::check(unsafe { entry($($argument),*) }),
            None => Err(Code::NotOffered(stringify!($entry))),
        }
    };
}

/// Writes the same arm for several versions.
macro_rules! by_version {
    ($table:expr; $( $($version:ident)+ ($entries:ident) => $body:expr; )+) => {
        match $table { $( $( $version($entries) => $body, )+ )+ }
    };
}

/// A size as the `int` that v4 to v8 declare.
fn int(size: usize) -> Result<c_int> {
    c_int::try_from(size).map_err(|_| Code::NotOffered("sizes of 2 GiB and more in this API version"))
}

/// The arguments of `init` of all versions.
pub(super) struct InitArguments {
    pub(super) comm_id: u64,
    pub(super) traffic_class: i32,
    pub(super) log: ffi::ncclDebugLogger_t,
    pub(super) profiler: ffi::ncclProfilerCallback_t,
}

/// One buffer of a (grouped) receive, as plain pointers.
#[derive(Clone, Copy)]
pub(super) struct RawPart {
    pub(super) data: *mut c_void,
    pub(super) size: usize,
    pub(super) tag: c_int,
    pub(super) mr: *mut c_void,
    pub(super) profile: *mut c_void,
}

impl Table {
    /// The table that `plugin` exports for `version`.
    pub(super) fn find(plugin: &Plugin, version: ApiVersion) -> Option<Self> {
        let address = plugin.net_symbol(version)?;
        macro_rules! table {
            ($kind:ident) => {{
                // SAFETY: NCCL's interface defines what lies behind `ncclNetPlugin_vN`: a table of that version, never
                // written after loading. It outlives every use, since every object of the host holds the `Plugin`.
                $kind(unsafe { &*address.cast() })
            }};
        }
        Some(match version {
            ApiVersion::V4 => table!(V4),
            ApiVersion::V5 => table!(V5),
            ApiVersion::V6 => table!(V6),
            ApiVersion::V7 => table!(V7),
            ApiVersion::V8 => table!(V8),
            ApiVersion::V9 => table!(V9),
            ApiVersion::V10 => table!(V10),
            ApiVersion::V11 => table!(V11),
            ApiVersion::V12 => table!(V12),
        })
    }

    /// The name that the plugin gives itself, which users write into `NCCL_NET`.
    pub(super) fn name(self) -> String {
        let name = by_version!(self; V4 V5 V6 V7 V8 V9 V10 V11 V12 (t) => t.name;);
        if name.is_null() {
            return String::new();
        }
        // SAFETY: by the interface, `name` is a NUL-terminated string of the library.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    pub(super) unsafe fn init(self, with: &InitArguments) -> Result<*mut c_void> {
        let mut context = null_mut();
        by_version!(self;
            V4 V5 V6 V7 V8 V9 (t) => call!(t.init(with.log));
            V10 (t) => call!(t.init(with.log, with.profiler));
            V11 V12 (t) => {
                let mut config = ffi::ncclNetCommConfig_v10_t { trafficClass: with.traffic_class };
                call!(t.init(&raw mut context, with.comm_id, &raw mut config, with.log, with.profiler))
            };
        )?;
        Ok(context)
    }

    pub(super) unsafe fn finalize(self, context: *mut c_void) -> Result<()> {
        by_version!(self;
            V4 V5 V6 V7 V8 V9 V10 (_t) => Err(Code::NotOffered("finalize"));
            V11 V12 (t) => call!(t.finalize(context));
        )
    }

    pub(super) unsafe fn devices(self) -> Result<c_int> {
        let mut count = 0;
        by_version!(self; V4 V5 V6 V7 V8 V9 V10 V11 V12 (t) => call!(t.devices(&raw mut count));)?;
        Ok(count)
    }

    pub(super) unsafe fn properties(self, dev: c_int) -> Result<Properties> {
        macro_rules! read {
            ($t:ident, $raw:ty, $convert:ident) => {{
                // SAFETY: the properties are integers, floats and pointers: all zeros is a value of each.
                let mut raw: $raw = unsafe { std::mem::zeroed() };
                call!($t.getProperties(dev, &raw mut raw))?;
                // SAFETY: the strings stay NULL or are set by the plugin, which keeps them while it is mapped.
                Ok(unsafe { Properties::$convert(&raw) })
            }};
        }
        by_version!(self;
            V4 (t) => read!(t, ffi::ncclNetProperties_v4_t, from_v4);
            V5 V6 (t) => read!(t, ffi::ncclNetProperties_v6_t, from_v6);
            V7 (t) => read!(t, ffi::ncclNetProperties_v7_t, from_v7);
            V8 (t) => read!(t, ffi::ncclNetProperties_v8_t, from_v8);
            V9 V10 (t) => read!(t, ffi::ncclNetProperties_v9_t, from_v9);
            V11 (t) => read!(t, ffi::ncclNetProperties_v11_t, from_v11);
            V12 (t) => read!(t, ffi::ncclNetProperties_v12_t, from_v12);
        )
    }

    pub(super) unsafe fn make_vdevice(self, members: &[c_int]) -> Result<c_int> {
        let mut dev = -1;
        macro_rules! make {
            ($t:ident, $kind:ident, $most:expr) => {{
                let mut props = ffi::$kind { ndevs: int(members.len())?, devs: [0; $most as usize] };
                let fields = props.devs.get_mut(..members.len());
                fields.ok_or(Code::NotOffered("that many devices in one"))?.copy_from_slice(members);
                call!($t.makeVDevice(&raw mut dev, &raw mut props))
            }};
        }
        by_version!(self;
            V4 V5 V6 V7 V8 (_t) => Err(Code::NotOffered("makeVDevice"));
            V9 V10 V11 (t) => make!(t, ncclNetVDeviceProps_v9_t, ffi::NCCL_NET_MAX_DEVS_PER_NIC_V9);
            V12 (t) => make!(t, ncclNetVDeviceProps_v12_t, ffi::NCCL_NET_MAX_DEVS_PER_NIC_V12);
        )?;
        Ok(dev)
    }

    pub(super) unsafe fn listen(self, context: *mut c_void, dev: c_int, handle: *mut c_void) -> Result<*mut c_void> {
        let mut comm = null_mut();
        by_version!(self;
            V4 V5 V6 V7 V8 V9 V10 (t) => call!(t.listen(dev, handle, &raw mut comm));
            V11 V12 (t) => call!(t.listen(context, dev, handle, &raw mut comm));
        )?;
        Ok(comm)
    }

    pub(super) unsafe fn connect(
        self,
        context: *mut c_void,
        traffic_class: i32,
        dev: c_int,
        handle: *mut c_void,
    ) -> Result<*mut c_void> {
        let mut comm = null_mut();
        let mut offload = null_mut();
        by_version!(self;
            V4 V5 V6 (t) => call!(t.connect(dev, handle, &raw mut comm));
            V7 V8 V9 (t) => call!(t.connect(dev, handle, &raw mut comm, &raw mut offload));
            V10 (t) => {
                let mut config = ffi::ncclNetCommConfig_v10_t { trafficClass: traffic_class };
                call!(t.connect(dev, &raw mut config, handle, &raw mut comm, &raw mut offload))
            };
            V11 V12 (t) => call!(t.connect(context, dev, handle, &raw mut comm, &raw mut offload));
        )?;
        Ok(comm)
    }

    pub(super) unsafe fn accept(self, listen_comm: *mut c_void) -> Result<*mut c_void> {
        let mut comm = null_mut();
        let mut offload = null_mut();
        by_version!(self;
            V4 V5 V6 (t) => call!(t.accept(listen_comm, &raw mut comm));
            V7 V8 V9 V10 V11 V12 (t) => call!(t.accept(listen_comm, &raw mut comm, &raw mut offload));
        )?;
        Ok(comm)
    }

    pub(super) unsafe fn reg_mr(
        self,
        comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
    ) -> Result<*mut c_void> {
        let mut mr = null_mut();
        by_version!(self;
            V4 V5 V6 V7 (t) => call!(t.regMr(comm, data, int(size)?, kind, &raw mut mr));
            V8 V9 V10 V11 V12 (t) => call!(t.regMr(comm, data, size, kind, &raw mut mr));
        )?;
        Ok(mr)
    }

    pub(super) unsafe fn reg_mr_dmabuf(
        self,
        comm: *mut c_void,
        (data, size): (*mut c_void, usize),
        kind: c_int,
        (offset, fd): (u64, c_int),
    ) -> Result<*mut c_void> {
        let mut mr = null_mut();
        by_version!(self;
            V4 (_t) => Err(Code::NotOffered("regMrDmaBuf"));
            V5 (_t) => Err(Code::NotOffered("regMrDmaBuf"));
            V6 V7 V8 V9 V10 V11 V12 (t) => call!(t.regMrDmaBuf(comm, data, size, kind, offset, fd, &raw mut mr));
        )?;
        Ok(mr)
    }

    pub(super) unsafe fn dereg_mr(self, comm: *mut c_void, mr: *mut c_void) -> Result<()> {
        by_version!(self; V4 V5 V6 V7 V8 V9 V10 V11 V12 (t) => call!(t.deregMr(comm, mr));)
    }

    pub(super) unsafe fn isend(self, comm: *mut c_void, part: RawPart) -> Result<*mut c_void> {
        let RawPart { data, size, tag, mr, profile } = part;
        let mut request = null_mut();
        by_version!(self;
            V4 (t) => call!(t.isend(comm, data, int(size)?, mr, &raw mut request));
            V5 V6 V7 V8 (t) => call!(t.isend(comm, data, int(size)?, tag, mr, &raw mut request));
            V9 (t) => call!(t.isend(comm, data, size, tag, mr, &raw mut request));
            V10 V11 V12 (t) => call!(t.isend(comm, data, size, tag, mr, profile, &raw mut request));
        )?;
        Ok(request)
    }

    /// `hint` is what `*request` holds on entry: 0, or `NCCL_NET_OPTIONAL_RECV_COMPLETION` from v9 on.
    pub(super) unsafe fn irecv(self, comm: *mut c_void, parts: &[RawPart], hint: usize) -> Result<*mut c_void> {
        const MOST: usize = 8;
        if parts.len() > MOST || (self.is_v4() && parts.len() != 1) {
            return Err(Code::NotOffered("receives with that many buffers"));
        }
        let count = int(parts.len())?;
        let mut request = std::ptr::without_provenance_mut(hint);
        let (mut data, mut mrs, mut profiles) = ([null_mut(); MOST], [null_mut(); MOST], [null_mut(); MOST]);
        let (mut sizes, mut ints, mut tags) = ([0_usize; MOST], [0; MOST], [0; MOST]);
        for (i, part) in parts.iter().enumerate() {
            (data[i], mrs[i], profiles[i]) = (part.data, part.mr, part.profile);
            (sizes[i], tags[i]) = (part.size, part.tag);
            if self.has_int_sizes() {
                ints[i] = int(part.size)?;
            }
        }
        let (first, first_size, first_mr) = (data[0], ints[0], mrs[0]);
        let (data, mrs, profiles) = (data.as_mut_ptr(), mrs.as_mut_ptr(), profiles.as_mut_ptr());
        let (sizes, ints, tags) = (sizes.as_mut_ptr(), ints.as_mut_ptr(), tags.as_mut_ptr());
        by_version!(self;
            V4 (t) => call!(t.irecv(comm, first, first_size, first_mr, &raw mut request));
            V5 V6 V7 V8 (t) => call!(t.irecv(comm, count, data, ints, tags, mrs, &raw mut request));
            V9 (t) => call!(t.irecv(comm, count, data, sizes, tags, mrs, &raw mut request));
            V10 V11 V12 (t) => call!(t.irecv(comm, count, data, sizes, tags, mrs, profiles, &raw mut request));
        )?;
        Ok(request)
    }

    pub(super) unsafe fn iflush(self, comm: *mut c_void, part: RawPart) -> Result<*mut c_void> {
        let RawPart { mut data, size, mut mr, .. } = part;
        let mut size = int(size)?;
        let mut request = null_mut();
        by_version!(self;
            V4 (t) => call!(t.iflush(comm, data, size, mr, &raw mut request));
            V5 V6 V7 V8 V9 V10 V11 V12 (t) =>
                call!(t.iflush(comm, 1, &raw mut data, &raw mut size, &raw mut mr, &raw mut request));
        )?;
        Ok(request)
    }

    /// `sizes` is NULL or has room for one number per buffer of the request.
    pub(super) unsafe fn test(self, request: *mut c_void, sizes: *mut c_int) -> Result<bool> {
        let mut done = 0;
        by_version!(self; V4 V5 V6 V7 V8 V9 V10 V11 V12 (t) => call!(t.test(request, &raw mut done, sizes));)?;
        Ok(done != 0)
    }

    pub(super) unsafe fn close_send(self, comm: *mut c_void) -> Result<()> {
        by_version!(self; V4 V5 V6 V7 V8 V9 V10 V11 V12 (t) => call!(t.closeSend(comm));)
    }

    pub(super) unsafe fn close_recv(self, comm: *mut c_void) -> Result<()> {
        by_version!(self; V4 V5 V6 V7 V8 V9 V10 V11 V12 (t) => call!(t.closeRecv(comm));)
    }

    pub(super) unsafe fn close_listen(self, comm: *mut c_void) -> Result<()> {
        by_version!(self; V4 V5 V6 V7 V8 V9 V10 V11 V12 (t) => call!(t.closeListen(comm));)
    }

    fn is_v4(self) -> bool {
        matches!(self, V4(_))
    }

    /// v4 to v8 pass message sizes as `int`.
    fn has_int_sizes(self) -> bool {
        matches!(self, V4(_) | V5(_) | V6(_) | V7(_) | V8(_))
    }
}
