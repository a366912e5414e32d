//! libibverbs, opened at run time.
//!
//! Each function is looked up by name *and* symbol version. libibverbs keeps very old versions of its functions under
//! the same names, with other structs, and a plain `dlsym` leaves the choice to the linker. Functions added after the
//! first stable version are optional and `None` in an older library.
//!
//! Guarantees: the library is opened once and never closed, since its providers keep threads and state. Failing is
//! normal: most machines have no RDMA.
//!
//! The calls of the data path (post, poll) are not here: they go through the context's own table, by the inline
//! functions of `rdma-sys`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::sync::OnceLock;

use rdma_sys as ib;

use crate::os::error::{Error, Result};

/// An asynchronous event as the kernel reports it. `rdma-sys` declares the type as a closed enumeration, and a newer
/// libibverbs may use values outside it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawAsyncEvent {
    /// The queue pair, completion queue or port that the event is about.
    pub element: u64,
    /// `IBV_EVENT_*`.
    pub kind: c_uint,
}

// libibverbs fills it as its own struct.
const _: () = assert!(size_of::<RawAsyncEvent>() == size_of::<ib::ibv_async_event>());
const _: () = assert!(offset_of!(RawAsyncEvent, kind) == offset_of!(ib::ibv_async_event, event_type));

/// An entry of the GID tables of a device, `struct ibv_gid_entry`. Its size is passed with the call, so that a newer
/// libibverbs fills no more than this.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawGidEntry {
    /// The GID.
    pub gid: [u8; 16],
    /// Its index in the table of its port.
    pub index: u32,
    /// The port, from 1.
    pub port: u32,
    /// `IBV_GID_TYPE_*`: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2.
    pub kind: u32,
    /// The network interface, as its namespace numbers it; 0: none.
    pub interface: u32,
}

macro_rules! symbols {
    (
        required { $($field:ident: $name:literal @ $version:literal, fn($($argument:ty),*) $(-> $result:ty)?;)* }
        optional {
            $($maybe:ident: $maybe_name:literal @ $maybe_version:literal,
                fn($($maybe_argument:ty),*) $(-> $maybe_result:ty)?;)*
        }
    ) => {
        /// The functions of libibverbs that Towline calls outside the data path. They are C functions: each call is
        /// `unsafe` and must follow `infiniband/verbs.h`.
        #[allow(missing_docs, reason = "each field is libibverbs's function of the same name")]
        pub(crate) struct Verbs {
            $(pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) $(-> $maybe_result)?>,)*
        }

        impl Verbs {
            fn look_up(library: &Library) -> std::result::Result<Self, String> {
                Ok(Self {
                    // SAFETY: the symbol of this name and version has this type; `verbs.h` has declared it unchanged
                    // since that version. A pointer to a function and a data pointer have one size on Linux.
                    $($field: unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                        library.need($name, $version)?,
                    ) },)*
                    $($maybe: library.find($maybe_name, $maybe_version).map(|pointer| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($maybe_argument),*) $(-> $maybe_result)?>(
                            pointer,
                        ) }
                    }),)*
                })
            }
        }
    };
}

symbols! {
    required {
        get_device_list: c"ibv_get_device_list" @ c"IBVERBS_1.1", fn(*mut c_int) -> *mut *mut ib::ibv_device;
        free_device_list: c"ibv_free_device_list" @ c"IBVERBS_1.1", fn(*mut *mut ib::ibv_device);
        get_device_name: c"ibv_get_device_name" @ c"IBVERBS_1.1", fn(*mut ib::ibv_device) -> *const c_char;
        open_device: c"ibv_open_device" @ c"IBVERBS_1.1", fn(*mut ib::ibv_device) -> *mut ib::ibv_context;
        close_device: c"ibv_close_device" @ c"IBVERBS_1.1", fn(*mut ib::ibv_context) -> c_int;
        query_device: c"ibv_query_device" @ c"IBVERBS_1.1",
            fn(*mut ib::ibv_context, *mut ib::ibv_device_attr) -> c_int;
        query_port: c"ibv_query_port" @ c"IBVERBS_1.1", fn(*mut ib::ibv_context, u8, *mut ib::ibv_port_attr) -> c_int;
        query_gid: c"ibv_query_gid" @ c"IBVERBS_1.1",
            fn(*mut ib::ibv_context, u8, c_int, *mut ib::ibv_gid) -> c_int;
        alloc_pd: c"ibv_alloc_pd" @ c"IBVERBS_1.1", fn(*mut ib::ibv_context) -> *mut ib::ibv_pd;
        dealloc_pd: c"ibv_dealloc_pd" @ c"IBVERBS_1.1", fn(*mut ib::ibv_pd) -> c_int;
        reg_mr: c"ibv_reg_mr" @ c"IBVERBS_1.1", fn(*mut ib::ibv_pd, *mut c_void, usize, c_int) -> *mut ib::ibv_mr;
        dereg_mr: c"ibv_dereg_mr" @ c"IBVERBS_1.1", fn(*mut ib::ibv_mr) -> c_int;
        create_cq: c"ibv_create_cq" @ c"IBVERBS_1.1",
            fn(*mut ib::ibv_context, c_int, *mut c_void, *mut ib::ibv_comp_channel, c_int) -> *mut ib::ibv_cq;
        destroy_cq: c"ibv_destroy_cq" @ c"IBVERBS_1.1", fn(*mut ib::ibv_cq) -> c_int;
        create_qp: c"ibv_create_qp" @ c"IBVERBS_1.1",
            fn(*mut ib::ibv_pd, *mut ib::ibv_qp_init_attr) -> *mut ib::ibv_qp;
        modify_qp: c"ibv_modify_qp" @ c"IBVERBS_1.1", fn(*mut ib::ibv_qp, *mut ib::ibv_qp_attr, c_int) -> c_int;
        destroy_qp: c"ibv_destroy_qp" @ c"IBVERBS_1.1", fn(*mut ib::ibv_qp) -> c_int;
        get_async_event: c"ibv_get_async_event" @ c"IBVERBS_1.1",
            fn(*mut ib::ibv_context, *mut RawAsyncEvent) -> c_int;
        ack_async_event: c"ibv_ack_async_event" @ c"IBVERBS_1.1", fn(*mut RawAsyncEvent);
        event_type_str: c"ibv_event_type_str" @ c"IBVERBS_1.1", fn(c_uint) -> *const c_char;
        wc_status_str: c"ibv_wc_status_str" @ c"IBVERBS_1.1", fn(c_uint) -> *const c_char;
        fork_init: c"ibv_fork_init" @ c"IBVERBS_1.1", fn() -> c_int;
    }
    optional {
        reg_mr_iova2: c"ibv_reg_mr_iova2" @ c"IBVERBS_1.8",
            fn(*mut ib::ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ib::ibv_mr;
        query_ece: c"ibv_query_ece" @ c"IBVERBS_1.10", fn(*mut ib::ibv_qp, *mut ib::ibv_ece) -> c_int;
        set_ece: c"ibv_set_ece" @ c"IBVERBS_1.10", fn(*mut ib::ibv_qp, *mut ib::ibv_ece) -> c_int;
        query_gid_table: c"_ibv_query_gid_table" @ c"IBVERBS_1.11",
            fn(*mut ib::ibv_context, *mut RawGidEntry, usize, u32, usize) -> isize;
        query_port_speed: c"ibv_query_port_speed" @ c"IBVERBS_1.16", fn(*mut ib::ibv_context, u32, *mut u64) -> c_int;
        is_fork_initialized: c"ibv_is_fork_initialized" @ c"IBVERBS_1.13", fn() -> c_int;
        reg_dmabuf_mr: c"ibv_reg_dmabuf_mr" @ c"IBVERBS_1.12",
            fn(*mut ib::ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ib::ibv_mr;
    }
}

/// The soname: its number has not changed since 2005.
const SONAME: &CStr = c"libibverbs.so.1";

impl Verbs {
    /// libibverbs, opened on the first call.
    ///
    /// # Errors
    /// When the library is not there, or lacks a function that every release since 2008 has. The same error comes
    /// back on every call.
    pub(crate) fn load() -> Result<&'static Self> {
        static LOADED: OnceLock<Result<Verbs>> = OnceLock::new();
        LOADED
            .get_or_init(|| {
                let library = Library::open(SONAME).map_err(|why| {
                    Error::usage(format!("libibverbs does not load: {why}"))
                        .with_hint("apt-get install libibverbs1 ibverbs-providers")
                })?;
                let verbs = Self::look_up(&library)
                    .map_err(|why| Error::usage(why).with_hint("this libibverbs is older than any supported one"))?;
                verbs.prepare_for_forks();
                Ok(verbs)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Keeps pinned pages in place when the process forks. Must be called before the first object is made.
    ///
    /// Kernels from 5.12 on copy pinned pages at the fork, and no call is needed. Before, the parent could lose them to
    /// its child. So `ibv_fork_init` makes libibverbs keep the pages out of the child altogether, together with
    /// everything else on them, and a child that touches them crashes. Hence `ibv_fork_init` is called only where it is
    /// needed.
    fn prepare_for_forks(&self) {
        /// `IBV_FORK_UNNEEDED`.
        const UNNEEDED: c_int = 2;
        // SAFETY: takes no arguments and queries the kernel.
        let is_needed = self.is_fork_initialized.is_none_or(|ask| unsafe { ask() } != UNNEEDED);
        if is_needed {
            // SAFETY: takes no arguments. If it fails, forks have the effect described above.
            let status = unsafe { (self.fork_init)() };
            if status != 0 {
                tracing::debug!("ibv_fork_init: {}", std::io::Error::from_raw_os_error(status));
            }
        }
    }

    /// libibverbs's text for a work completion's status.
    pub(crate) fn status_text(&self, status: c_uint) -> &'static str {
        // SAFETY: the function returns a static string for any number.
        unsafe { text((self.wc_status_str)(status)) }
    }

    /// libibverbs's text for an asynchronous event.
    pub(crate) fn event_text(&self, kind: c_uint) -> &'static str {
        // SAFETY: as above.
        unsafe { text((self.event_type_str)(kind)) }
    }
}

/// # Safety
/// `string` is null or a C string that is never freed.
unsafe fn text(string: *const c_char) -> &'static str {
    if string.is_null() {
        return "unknown";
    }
    // SAFETY: by the contract of this function.
    unsafe { CStr::from_ptr(string) }.to_str().unwrap_or("unknown")
}

/// A library opened by the dynamic linker, for life.
struct Library(*mut c_void);

impl Library {
    fn open(name: &CStr) -> std::result::Result<Self, String> {
        // SAFETY: a C string; the initialisers of libibverbs only set up its own state, as they do under NCCL.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() { Err(linker_error()) } else { Ok(Self(handle)) }
    }

    fn find(&self, name: &CStr, version: &CStr) -> Option<*mut c_void> {
        // SAFETY: an open library and two C strings.
        let pointer = unsafe { libc::dlvsym(self.0, name.as_ptr(), version.as_ptr()) };
        (!pointer.is_null()).then_some(pointer)
    }

    fn need(&self, name: &CStr, version: &CStr) -> std::result::Result<*mut c_void, String> {
        let missing = || format!("libibverbs has no {}@{}", name.to_string_lossy(), version.to_string_lossy());
        self.find(name, version).ok_or_else(missing)
    }
}

fn linker_error() -> String {
    // SAFETY: returns null or a C string that stays valid until this thread's next call of the linker.
    let said = unsafe { libc::dlerror() };
    if said.is_null() {
        return "the dynamic linker gives no reason".to_owned();
    }
    // SAFETY: not null, see above.
    unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_an_ordinary_error() {
        let error = Library::open(c"libibverbs-of-nowhere.so.1").err().expect("no such library");
        assert!(error.contains("libibverbs-of-nowhere"), "{error}");
    }

    #[test]
    fn a_symbol_is_found_only_under_its_version() {
        let library = Library::open(SONAME).expect("this test needs libibverbs (package libibverbs1)");
        assert!(library.find(c"ibv_create_cq", c"IBVERBS_1.1").is_some());
        assert!(library.find(c"ibv_create_cq", c"IBVERBS_9.9").is_none());
        let old = library.find(c"ibv_create_cq", c"IBVERBS_1.0").expect("the ancient one");
        assert_ne!(library.find(c"ibv_create_cq", c"IBVERBS_1.1").expect("the present one"), old);
        let error = library.need(c"ibv_make_coffee", c"IBVERBS_1.1").expect_err("no such function");
        assert_eq!(error, "libibverbs has no ibv_make_coffee@IBVERBS_1.1");
    }

    #[test]
    fn the_words_of_libibverbs_are_readable() {
        let verbs = Verbs::load().expect("this test needs libibverbs");
        assert!(verbs.status_text(ib::ibv_wc_status::IBV_WC_RETRY_EXC_ERR).contains("retry"));
        assert_eq!(verbs.status_text(ib::ibv_wc_status::IBV_WC_SUCCESS), "success");
        assert!(verbs.event_text(10).contains("port"), "{}", verbs.event_text(10));
        assert_eq!(verbs.event_text(4711), "unknown");
    }
}
