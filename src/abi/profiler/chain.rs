//! A second profiler, opened with `dlopen` as NCCL would and spoken to in the newest version that it shares with NCCL.

use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::sync::atomic::AtomicI32;

use libloading::os::unix::Library;

use super::super::table::Table;
use super::members::Translated;
use super::{Functions, Version, v1, v2, v3, v4, v5, v6, v7};
use crate::nccl::ffi::*;
use crate::os::error::{Error, Result};
use crate::trace::chain::{Change, Second, Start};
use crate::trace::event::{Body, CommInfo};

struct Loaded<V: Version> {
    table: &'static V::Table,
    functions: Functions<V::Descr, V::Args>,
}

/// Opens the profiler at `path`, in `version` of the interface or, when it does not have that, the next older one. With
/// a newer one it would miss what NCCL does not report.
pub(super) fn load(path: &Path, version: u32) -> Result<Box<dyn Second>> {
    // SAFETY: the library's constructors run, as they would if NCCL loaded it. The user chose the library and is
    // responsible for it.
    let library = unsafe { Library::new(path) }.map_err(|error| {
        Error::system(format!("opening the profiler {}", path.display()), &std::io::Error::other(error))
    })?;
    let found = (1..=version).rev().find_map(|number| match number {
        1 => find::<v1::V1>(&library, c"ncclProfiler_v1", &v1::ncclProfiler_v1),
        2 => find::<v2::V2>(&library, c"ncclProfiler_v2", &v2::ncclProfiler_v2),
        3 => find::<v3::V3>(&library, c"ncclProfiler_v3", &v3::ncclProfiler_v3),
        4 => find::<v4::V4>(&library, c"ncclProfiler_v4", &v4::ncclProfiler_v4),
        5 => find::<v5::V5>(&library, c"ncclProfiler_v5", &v5::ncclProfiler_v5),
        6 => find::<v6::V6>(&library, c"ncclProfiler_v6", &v6::ncclProfiler_v6),
        7 => find::<v7::V7>(&library, c"ncclProfiler_v7", &v7::ncclProfiler_v7),
        _ => None,
    });
    let found = found.unwrap_or_else(|| {
        Err(Error::argument(format!("{} has no profiler of version {version} or older", path.display()))
            .with_hint(format!("NCCL speaks version {version} here; it looks for the symbol ncclProfiler_v{version}")))
    })?;
    // The profiler's threads may run for as long as the process does.
    std::mem::forget(library);
    Ok(found)
}

type Found = Option<Result<Box<dyn Second>>>;

fn find<V: Version>(library: &Library, symbol: &std::ffi::CStr, own: &Table<V::Table>) -> Found
where
    Loaded<V>: Send + Sync,
{
    // SAFETY: by its name the symbol is a table of this version.
    let table = unsafe { library.get::<*const V::Table>(symbol.to_bytes_with_nul()) }.ok()?.into_raw();
    let table: *const V::Table = table.cast_const().cast();
    if std::ptr::eq(table, &raw const own.0) {
        return Some(Err(Error::argument("TOWLINE_PROFILER_CHAIN names Towline itself")));
    }
    // SAFETY: a table in a library that is never unloaded (see `load`).
    let table = unsafe { &*table };
    Some(Ok(Box::new(Loaded::<V> { table, functions: V::functions(table) })))
}

// SAFETY: a profiler's functions may be called from any thread; NCCL does so.
unsafe impl<V: Version> Send for Loaded<V> {}
// SAFETY: as above.
unsafe impl<V: Version> Sync for Loaded<V> {}

impl<V: Version> Second for Loaded<V> {
    fn init(&self, comm: &CommInfo, mask: &AtomicI32) -> Option<*mut c_void> {
        let name = CString::new(comm.name.as_str()).unwrap_or_default();
        let name: *const c_char = if comm.name.is_empty() { std::ptr::null() } else { name.as_ptr() };
        // SAFETY: the table is that of a loaded profiler.
        let context = unsafe { V::init(self.table, comm, name, mask) };
        if context.is_none() {
            tracing::warn!("the chained profiler refuses this communicator (interface v{})", V::NUMBER);
        }
        context
    }

    fn start(&self, context: *mut c_void, start: &Start, parent: *mut c_void, group: *mut c_void) -> *mut c_void {
        let mut event = std::ptr::null_mut();
        // A second profiler understands NCCL's own descriptors.
        let mut translated = match &start.body {
            Body::NetTowline(part) => match Translated::new(part) {
                Some(translated) => Some(translated),
                None => return event,
            },
            _ => None,
        };
        let translated = translated.as_mut().map(|translated| translated.start(start));
        let start = translated.as_ref().unwrap_or(start);
        if let (Some(function), Some(mut descr)) = (self.functions.start, V::encode(start, parent, group)) {
            // SAFETY: a loaded profiler's function with its own context and a descriptor of its version.
            unsafe { function(context, &mut event, &mut descr) };
        }
        event
    }

    fn stop(&self, event: *mut c_void) {
        if let Some(function) = self.functions.stop {
            // SAFETY: a loaded profiler's function with its own handle.
            unsafe { function(event) };
        }
    }

    fn record(&self, event: *mut c_void, change: &Change) {
        if let (Some(function), Some(mut args)) = (self.functions.record, V::args(change)) {
            let args = if change.has_args { &raw mut args } else { std::ptr::null_mut() };
            // SAFETY: a loaded profiler's function with its own handle and arguments of its version.
            unsafe { function(event, change.state as ncclProfilerEventState_t, args) };
        }
    }

    fn finalize(&self, context: *mut c_void) {
        if let Some(function) = self.functions.finalize {
            // SAFETY: a loaded profiler's function with its own context.
            unsafe { function(context) };
        }
    }
}
