//! The log: `tracing` events become lines in NCCL's own log, or on standard error when there is no NCCL.
//!
//! Every line starts with `NET/Towline: `. What goes where:
//!
//! | event | NCCL level | subsystems | seen with |
//! |---|---|---|---|
//! | `error!`, `warn!` | WARN | all | `NCCL_DEBUG=WARN`; also kept as NCCL's last error, whatever the level |
//! | `info!` | INFO | INIT, NET | `NCCL_DEBUG=INFO` |
//! | `info!(target: log::NET, …)` | INFO | NET | `NCCL_DEBUG=INFO` with `NCCL_DEBUG_SUBSYS=NET` (or `ALL`) |
//! | `info!(target: log::ENV, …)` | INFO | ENV | `NCCL_DEBUG=INFO` |
//! | `debug!`, `trace!` | TRACE | NET | `NCCL_DEBUG=TRACE` with `NCCL_DEBUG_SUBSYS=NET` (or `ALL`) |
//!
//! So plain INFO shows a few lines for each process (what was chosen and why), the NET subsystem adds lines for each
//! connection, and TRACE is for developers of Towline. Without a logger, `TOWLINE_LOG` is the level on standard error.
//!
//! Guarantees: an event that is not logged costs one load and a compare. Warnings always reach NCCL's logger, because
//! it keeps the last one for `ncclGetLastError` even when it prints nothing. The format string passed to NCCL is always
//! `%s`. After [`forget_logger`] has returned, NCCL's function is not called any more. The library that contains the
//! logger stays mapped: before v11 NCCL does not signal when it is done, and a host may unload it.
//!
//! There is one logger per process, as in NCCL's own plugins: the last `init` wins. This module must not know NCCL's
//! structs; levels and flags are plain numbers here, and the tests of `abi` compare them with the headers.

mod limit;
mod subscriber;

pub(crate) use limit::{Limiter, once_per};

use super::config::LogLevel;
use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tracing::Level;

/// NCCL's logging function: level, subsystem flags, file, line, printf format and arguments.
pub(crate) type Logger = unsafe extern "C" fn(c_uint, c_ulong, *const c_char, c_int, *const c_char, ...);

/// The target of events that concern one connection or transfer: NCCL's NET subsystem alone.
pub(crate) const NET: &str = "towline::net";
/// The target of events about the configuration: NCCL's ENV subsystem.
pub(crate) const ENV: &str = "towline::env";

/// NCCL's log levels.
mod level {
    use std::ffi::c_uint;
    pub(super) const WARN: c_uint = 2;
    pub(super) const INFO: c_uint = 3;
    pub(super) const TRACE: c_uint = 5;
}

/// NCCL's subsystem flags.
mod subsystem {
    use std::ffi::c_ulong;
    pub(super) const INIT: c_ulong = 0x1;
    pub(super) const NET: c_ulong = 0x10;
    pub(super) const ENV: c_ulong = 0x80;
    pub(super) const ALL: c_ulong = !0;
}

/// The prefix of every line.
const PREFIX: &str = "NET/Towline: ";

/// The address of NCCL's logger, a [`Logger`], or null for none.
static LOGGER: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
/// How many threads are inside NCCL's logger now.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// The most verbose level that is logged anywhere, as [`rank`] gives it.
static VERBOSITY: AtomicU8 = AtomicU8::new(0);
static INSTALL: Once = Once::new();

/// Makes `logger` the process's logger, with the level that `NCCL_DEBUG` in the environment sets now. Without a logger,
/// events go to standard error at level `without`.
pub(crate) fn set_logger(logger: Option<Logger>, without: LogLevel) {
    let seen = match logger {
        Some(_) => nccl_level(|name| std::env::var(name).ok()),
        None => without,
    };
    if let Some(function) = logger {
        keep_mapped(function as *const c_void);
    }
    LOGGER.store(logger.map_or(ptr::null_mut(), |function| function as *mut ()), Ordering::SeqCst);
    set_verbosity(seen);
}

/// Makes the dynamic linker keep the library that contains `address` mapped for ever (dlopen(3), `RTLD_NODELETE`). A
/// function of the program itself needs nothing, and one that is in no library cannot be kept.
fn keep_mapped(address: *const c_void) {
    // SAFETY: all zeroes is a valid value of this struct of pointers.
    let mut place: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `place` outlives the call, which fills it; any address may be queried.
    if unsafe { libc::dladdr(address, &raw mut place) } == 0 || place.dli_fname.is_null() {
        return;
    }
    // SAFETY: the name is a C string of the dynamic linker. With RTLD_NOLOAD nothing is loaded, and no constructor
    // runs.
    let library = unsafe { libc::dlopen(place.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    if !library.is_null() {
        // SAFETY: the handle is from dlopen just now. The library stays, by RTLD_NODELETE.
        unsafe { libc::dlclose(library) };
    }
}

/// Stops using NCCL's logger and returns when no thread is inside it: NCCL has ended its last communicator. Later
/// warnings go to standard error.
///
/// A thread that stays inside the logger for more than a second (a blocked output) is not waited for.
pub(crate) fn forget_logger() {
    LOGGER.store(ptr::null_mut(), Ordering::SeqCst);
    set_verbosity(LogLevel::Warn);
    let start = Instant::now();
    while INSIDE.load(Ordering::SeqCst) != 0 && start.elapsed() < Duration::from_secs(1) {
        std::thread::yield_now();
    }
}

/// Writes a line to standard error when NCCL's logger would not print it as a warning. It is for a host that is not
/// NCCL, in a process where NCCL's logger is in use. `NCCL_DEBUG` shows whether NCCL prints warnings.
pub(crate) fn also_to_stderr(text: &str) {
    let prints = std::env::var("NCCL_DEBUG")
        .is_ok_and(|asked| ["WARN", "INFO", "ABORT", "TRACE"].iter().any(|level| asked.eq_ignore_ascii_case(level)));
    if !prints && !LOGGER.load(Ordering::SeqCst).is_null() {
        subscriber::to_stderr(Level::WARN, text);
    }
}

/// The level of events that NCCL's logger wants, from NCCL's own variables.
fn nccl_level(lookup: impl Fn(&str) -> Option<String>) -> LogLevel {
    let asked = lookup("NCCL_DEBUG").unwrap_or_default();
    // ABORT is between INFO and TRACE in NCCL's numbering, so it includes INFO.
    if asked.eq_ignore_ascii_case("TRACE") {
        LogLevel::Trace
    } else if asked.eq_ignore_ascii_case("INFO") || asked.eq_ignore_ascii_case("ABORT") {
        LogLevel::Info
    } else if lookup("NCCL_WARN_ENABLE_DEBUG_INFO").is_some_and(|value| value.trim() == "1") {
        // The first warning switches NCCL to INFO without a notification.
        LogLevel::Info
    } else {
        LogLevel::Warn
    }
}

fn set_verbosity(level: LogLevel) {
    VERBOSITY.store(level as u8, Ordering::Release);
    // A shared library has its own `tracing` statics, so this fails only inside a program that links the crate and
    // already has a subscriber: then that subscriber gets the events.
    INSTALL.call_once(|| drop(tracing::subscriber::set_global_default(subscriber::ToNccl)));
    tracing::callsite::rebuild_interest_cache();
}

/// The position of `level` in [`LogLevel`]'s order.
fn rank(level: Level) -> u8 {
    let level = match level {
        Level::ERROR => LogLevel::Error,
        Level::WARN => LogLevel::Warn,
        Level::INFO => LogLevel::Info,
        Level::DEBUG => LogLevel::Debug,
        Level::TRACE => LogLevel::Trace,
    };
    level as u8
}

/// NCCL's level and subsystem flags for an event.
fn nccl_terms(level: Level, target: &str) -> (c_uint, c_ulong) {
    match level {
        Level::ERROR | Level::WARN => (level::WARN, subsystem::ALL),
        Level::INFO if target == NET => (level::INFO, subsystem::NET),
        Level::INFO if target == ENV => (level::INFO, subsystem::ENV),
        Level::INFO => (level::INFO, subsystem::INIT | subsystem::NET),
        Level::DEBUG | Level::TRACE => (level::TRACE, subsystem::NET),
    }
}

#[cfg(test)]
mod tests;
