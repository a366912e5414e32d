//! NCCL's profiler interface, v1 to v7: descriptors become [`crate::trace`]'s events and back.
//!
//! One file per version. Each file describes what its version changed and reads its descriptors into an event
//! (`Version::decode`). For a second profiler behind ours, it writes an event as its descriptor (`Version::encode`).
//! Code that a version has in common with an older one stays in the older one's file or in `members`. The functions of
//! the tables are the same for all of them and made by `profiler_version!`.
//!
//! The handles and contexts that we give to NCCL are numbers dressed as pointers. NCCL's promise ([`crate::abi`]) holds
//! here too; a NetPlugin event's data belong to the network plugin, and are read only under plugin ids whose
//! structures we know.

mod chain;
mod logger;
mod members;
pub(crate) mod v1;
pub(crate) mod v2;
pub(crate) mod v3;
pub(crate) mod v4;
pub(crate) mod v5;
pub mod v6;
pub(crate) mod v7;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::AtomicI32;

use members::{Net, number};

use crate::nccl::ffi::{ncclDebugLogger_t, ncclProfilerEventState_t, ncclResult_t};
use crate::os::config::Config;
use crate::os::{gpu, log};
use crate::trace::chain::{Change, Start};
use crate::trace::event::CommInfo;
use crate::trace::live::network::Connection;
use crate::trace::profiler;

/// What differs between the versions.
trait Version: 'static {
    /// The number.
    const NUMBER: u32;
    /// The arguments of startEvent.
    type Descr;
    /// The arguments of recordEventState.
    type Args;
    /// The table of functions.
    type Table;

    /// Reads a network plugin's event; None for a descriptor of another type.
    ///
    /// # Safety
    /// As for `decode`.
    unsafe fn net(_: &Self::Descr) -> Option<Net<'_>> {
        None
    }

    /// Reads any other descriptor; None for an event type that the version does not have.
    ///
    /// # Safety
    /// The descriptor is one of NCCL's, with the union's member for its type.
    unsafe fn decode(descr: &Self::Descr) -> Option<Start>;

    /// Writes a descriptor with a second profiler's own handles for parent and group; None for an event type that the
    /// version does not have.
    fn encode(start: &Start, parent: *mut c_void, group: *mut c_void) -> Option<Self::Descr>;

    /// Reads a change of state.
    ///
    /// # Safety
    /// The arguments are NCCL's, with the union's member for the state.
    unsafe fn change(state: ncclProfilerEventState_t, args: Option<&Self::Args>) -> Change;

    /// Writes a change of state; None for a state that the version does not have.
    fn args(change: &Change) -> Option<Self::Args>;

    /// A second profiler's init.
    ///
    /// # Safety
    /// The table is that of a loaded profiler.
    unsafe fn init(table: &Self::Table, comm: &CommInfo, name: *const c_char, mask: &AtomicI32) -> Option<*mut c_void>;

    /// A second profiler's functions, less init.
    fn functions(table: &Self::Table) -> Functions<Self::Descr, Self::Args>;
}

/// The functions that differ only in the structures they take.
struct Functions<D, A> {
    start: Option<unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut D) -> ncclResult_t>,
    stop: Option<unsafe extern "C" fn(*mut c_void) -> ncclResult_t>,
    record: Option<unsafe extern "C" fn(*mut c_void, ncclProfilerEventState_t, *mut A) -> ncclResult_t>,
    finalize: Option<unsafe extern "C" fn(*mut c_void) -> ncclResult_t>,
}

/// What `init` of any version does.
///
/// # Safety
/// NCCL's promise for all pointers; `mask` stays valid while the communicator lives.
unsafe fn init(
    version: u32,
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    comm: CommInfo,
    logger: ncclDebugLogger_t,
) -> crate::os::error::Result<()> {
    if logger.is_some() {
        logger::set_logger(logger);
        // Both vtables of this library use the one logger of the process.
        log::set_logger(logger, Config::from_env().0.log);
    }
    let name = if name.is_null() {
        String::new()
    } else {
        // SAFETY: not null, so by NCCL's promise a C string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    };
    // NCCL calls it on a thread whose context is that of the communicator's GPU.
    let gpu = gpu::current().map_or_else(String::new, |gpu| gpu.to_string());
    let comm = CommInfo { name, gpu, ..comm };
    let init = profiler::Init { version, comm, mask, load_second: chain::load, connections };
    // SAFETY: the mask is NCCL's own variable, which outlives its communicators.
    let ours = unsafe { profiler::init(init) };
    if !context.is_null() {
        // SAFETY: not null, so by NCCL's promise a place for the context. Null stands for "none": NCCL then calls no
        // finalize for this communicator.
        unsafe { context.write(std::ptr::without_provenance_mut(ours as usize)) };
    }
    Ok(())
}

/// The transport's connections, in the profiler's words.
fn connections() -> Vec<Connection> {
    let told = crate::plugin::connections::connections().into_iter().map(|it| {
        let crate::plugin::backend::Description { number, send, peer, address, interfaces, bytes, is_polled } = it;
        Connection { number, send, peer, address, interfaces, bytes, moved: 0, polled: is_polled.then_some(0) }
    });
    told.collect()
}

/// An event begins. Returns its handle, 0 when it is declined.
///
/// # Safety
/// As for [`Version::decode`].
#[inline]
unsafe fn begin<V: Version>(context: u64, descr: &V::Descr) -> u64 {
    // SAFETY: passed on.
    match unsafe { V::net(descr) } {
        // SAFETY: the caller keeps the same promise; a network plugin's data have that plugin's type.
        Some(net) => unsafe { begin_net(context, &net) },
        // SAFETY: passed on.
        None => unsafe { V::decode(descr) }.map_or(0, |start| profiler::start(context, &start)),
    }
}

/// A network plugin's event begins, and with it those of further parts that its descriptor brings. Returns its handle,
/// which stands for all.
///
/// # Safety
/// The data have the type that the plugin of that id defines.
#[inline]
unsafe fn begin_net(context: u64, net: &Net<'_>) -> u64 {
    // SAFETY: passed on; the thread that reports a sum waits for this call.
    if let Some(news) = unsafe { net.sum() } {
        news.taken = profiler::sum(context, number(net.parent), net.rank, &news.sum, news.ended);
        return 0;
    }
    // SAFETY: passed on.
    let start = unsafe { members::start_of(net) };
    // SAFETY: just decoded, and the descriptor is still there.
    match unsafe { members::all_parts(&start) } {
        [] => profiler::start(context, &start),
        parts => profiler::start_all(context, &start, parts),
    }
}

/// The arguments of `init` up to v3: nothing. The communicator's name comes with its first collective.
fn unknown() -> CommInfo {
    CommInfo { rank: -1, ..CommInfo::default() }
}

/// Those since v4; `init` adds the name and the GPU.
fn known(id: u64, nodes: c_int, ranks: c_int, rank: c_int) -> CommInfo {
    CommInfo { id, nodes, ranks, rank, ..CommInfo::default() }
}

/// The four functions and the exported table of a version, given its `init`.
macro_rules! profiler_version {
    ($(#[$doc:meta])* $symbol:ident: $table:ident, $descr:ident, $args:ident, $version:ident, $number:literal) => {
        $(#[$doc])*
        // SAFETY: the symbol is NCCL's name for exactly this type, and nothing else in the process defines it in this
        // library's scope.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, unreachable_pub, reason = "NCCL's name, which it looks up")]
        pub static $symbol: $crate::abi::table::Table<$crate::nccl::ffi::$table> =
            $crate::abi::table::Table($crate::nccl::ffi::$table {
                name: $crate::abi::table::NAME.as_ptr(),
                init: Some(init),
                startEvent: Some(start_event),
                stopEvent: Some(stop_event),
                recordEventState: Some(record_event_state),
                finalize: Some(finalize),
            });

        unsafe extern "C" fn start_event(
            context: *mut std::ffi::c_void,
            event: *mut *mut std::ffi::c_void,
            descr: *mut $crate::nccl::ffi::$descr,
        ) -> $crate::nccl::ffi::ncclResult_t {
            $crate::abi::guard::guard::<$number>("startEvent", || {
                if event.is_null() || descr.is_null() {
                    return Err($crate::os::error::Error::argument("startEvent was given a null pointer"));
                }
                // SAFETY: not null, and NCCL's descriptor by its promise.
                let id = unsafe { $crate::abi::profiler::begin::<$version>(context.addr() as u64, &*descr) };
                // SAFETY: not null, a place for the handle by NCCL's promise.
                unsafe { event.write(std::ptr::without_provenance_mut(id as usize)) };
                Ok(())
            })
        }

        unsafe extern "C" fn stop_event(event: *mut std::ffi::c_void) -> $crate::nccl::ffi::ncclResult_t {
            $crate::abi::guard::guard::<$number>("stopEvent", || {
                $crate::trace::profiler::stop(event.addr() as u64);
                Ok(())
            })
        }

        unsafe extern "C" fn record_event_state(
            event: *mut std::ffi::c_void,
            state: $crate::nccl::ffi::ncclProfilerEventState_t,
            args: *mut $crate::nccl::ffi::$args,
        ) -> $crate::nccl::ffi::ncclResult_t {
            $crate::abi::guard::guard::<$number>("recordEventState", || {
                // SAFETY: null or NCCL's arguments for this state, by its promise; a network plugin's data are what
                // that plugin says.
                unsafe {
                    let change = <$version as $crate::abi::profiler::Version>::change(state, args.as_ref());
                    $crate::trace::profiler::record(event.addr() as u64, &change);
                }
                Ok(())
            })
        }

        unsafe extern "C" fn finalize(context: *mut std::ffi::c_void) -> $crate::nccl::ffi::ncclResult_t {
            $crate::abi::guard::guard::<$number>("finalize", || {
                $crate::trace::profiler::finalize(context.addr() as u64);
                Ok(())
            })
        }
    };
}
use profiler_version;

/// The part of `impl Version` that reads a table.
macro_rules! functions {
    () => {
        fn functions(table: &Self::Table) -> $crate::abi::profiler::Functions<Self::Descr, Self::Args> {
            $crate::abi::profiler::Functions {
                start: table.startEvent,
                stop: table.stopEvent,
                record: table.recordEventState,
                finalize: table.finalize,
            }
        }
    };
}
use functions;

/// NCCL's `init`, with the arguments that it has since v5.
macro_rules! init_since_v5 {
    ($number:literal) => {
        unsafe extern "C" fn init(
            context: *mut *mut std::ffi::c_void,
            id: u64,
            mask: *mut std::ffi::c_int,
            name: *const std::ffi::c_char,
            nodes: std::ffi::c_int,
            ranks: std::ffi::c_int,
            rank: std::ffi::c_int,
            logger: $crate::nccl::ffi::ncclDebugLogger_t,
        ) -> $crate::nccl::ffi::ncclResult_t {
            $crate::abi::guard::guard::<$number>("init", || {
                let comm = $crate::abi::profiler::known(id, nodes, ranks, rank);
                // SAFETY: NCCL's promise, passed on.
                unsafe { $crate::abi::profiler::init($number, context, mask, name, comm, logger) }
            })
        }
    };
}
use init_since_v5;

/// The call of a loaded table's `init`, with the same arguments.
macro_rules! init_of_table_since_v5 {
    () => {
        unsafe fn init(
            table: &Self::Table,
            comm: &$crate::trace::event::CommInfo,
            name: *const std::ffi::c_char,
            mask: &std::sync::atomic::AtomicI32,
        ) -> Option<*mut std::ffi::c_void> {
            let mut context = std::ptr::null_mut();
            let log = $crate::abi::profiler::logger::logger();
            // SAFETY: a loaded profiler's function, with valid places for its answers; the mask's lives for ever.
            let code = unsafe {
                table.init?(&mut context, comm.id, mask.as_ptr(), name, comm.nodes, comm.ranks, comm.rank, log)
            };
            (code == $crate::nccl::ffi::ncclSuccess).then_some(context)
        }
    };
}
use init_of_table_since_v5;
