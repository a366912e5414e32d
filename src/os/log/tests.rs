//! The promises of the log, with a logger of the test in place of NCCL's.
//!
//! There is one logger per process, so the tests that set it run inside one test function each and take turns.

use super::*;
use std::ffi::CStr;
use std::sync::{Mutex, MutexGuard};

#[derive(Debug, Clone, PartialEq)]
struct Seen {
    level: c_uint,
    flags: c_ulong,
    file: String,
    text: String,
}

static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());
static TURN: Mutex<()> = Mutex::new(());

/// Replaces NCCL's logger. A variadic function cannot be defined in stable Rust; on this ABI (x86-64 and AArch64 Linux)
/// pointer arguments of a variadic call are passed like those of a plain one.
unsafe extern "C" fn record(
    level: c_uint,
    flags: c_ulong,
    file: *const c_char,
    _line: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: `emit` passes three C strings that live through the call.
    let (file, format, text) = unsafe { (CStr::from_ptr(file), CStr::from_ptr(format), CStr::from_ptr(text)) };
    assert_eq!(format, c"%s");
    let text = text.to_string_lossy().into_owned();
    let file = file.to_string_lossy().into_owned();
    SEEN.lock().expect("no panic").push(Seen { level, flags, file, text });
}

type Plain = unsafe extern "C" fn(c_uint, c_ulong, *const c_char, c_int, *const c_char, *const c_char);

fn recorder() -> Logger {
    // SAFETY: see `record`: the variadic call passes its one argument as a plain call would.
    unsafe { std::mem::transmute::<Plain, Logger>(record) }
}

fn my_turn() -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    SEEN.lock().expect("no panic").clear();
    turn
}

fn seen() -> Vec<Seen> {
    let mut seen = SEEN.lock().expect("no panic");
    // Other tests of this process may log at the same time.
    std::mem::take(&mut *seen).into_iter().filter(|seen| seen.text.contains("(log test)")).collect()
}

fn level_for(pairs: &[(&str, &str)]) -> LogLevel {
    nccl_level(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
}

#[test]
fn nccl_debug_decides_what_is_formatted_at_all() {
    assert_eq!(level_for(&[]), LogLevel::Warn);
    assert_eq!(level_for(&[("NCCL_DEBUG", "VERSION")]), LogLevel::Warn);
    assert_eq!(level_for(&[("NCCL_DEBUG", "info")]), LogLevel::Info);
    assert_eq!(level_for(&[("NCCL_DEBUG", "ABORT")]), LogLevel::Info);
    assert_eq!(level_for(&[("NCCL_DEBUG", "TRACE")]), LogLevel::Trace);
    assert_eq!(level_for(&[("NCCL_DEBUG", "WARN"), ("NCCL_WARN_ENABLE_DEBUG_INFO", "1")]), LogLevel::Info);
}

#[test]
fn events_reach_nccl_with_its_levels_and_subsystems() {
    let _turn = my_turn();
    set_logger(Some(recorder()), LogLevel::Off);
    set_verbosity(LogLevel::Trace);
    tracing::error!("(log test) error");
    tracing::warn!(code = 7, name = "eth0", "(log test) 100% {}", "warn");
    tracing::info!("(log test) info");
    tracing::info!(target: NET, "(log test) net");
    tracing::info!(target: ENV, "(log test) env");
    tracing::debug!("(log test) debug");
    tracing::trace!("(log test) nul \0 inside");
    forget_logger();
    let seen = seen();
    let brief: Vec<_> = seen.iter().map(|seen| (seen.level, seen.flags, seen.text.as_str())).collect();
    assert_eq!(
        brief,
        [
            (2, !0, "NET/Towline: (log test) error"),
            (2, !0, "NET/Towline: (log test) 100% warn code=7 name=eth0"),
            (3, 0x11, "NET/Towline: (log test) info"),
            (3, 0x10, "NET/Towline: (log test) net"),
            (3, 0x80, "NET/Towline: (log test) env"),
            (5, 0x10, "NET/Towline: (log test) debug"),
            (5, 0x10, "NET/Towline: (log test) nul \u{fffd} inside"),
        ]
    );
    assert!(seen[0].file.ends_with("src/os/log/tests.rs"), "{}", seen[0].file);
}

#[test]
fn what_nobody_would_see_is_not_even_formatted() {
    struct Bomb;
    impl std::fmt::Display for Bomb {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            panic!("formatted although nobody listens")
        }
    }
    let _turn = my_turn();
    set_logger(Some(recorder()), LogLevel::Off);
    set_verbosity(LogLevel::Warn);
    tracing::info!("(log test) {Bomb}");
    tracing::warn!("(log test) kept");
    assert!(tracing::enabled!(tracing::Level::WARN) && !tracing::enabled!(tracing::Level::INFO), "so it can be asked");
    set_verbosity(LogLevel::Info);
    tracing::info!("(log test) now seen");
    forget_logger();
    let texts: Vec<_> = seen().into_iter().map(|seen| seen.text).collect();
    assert_eq!(texts, ["NET/Towline: (log test) kept", "NET/Towline: (log test) now seen"]);
}

#[test]
fn a_forgotten_logger_is_not_called_again_even_under_fire() {
    let _turn = my_turn();
    for _ in 0..50 {
        set_logger(Some(recorder()), LogLevel::Off);
        set_verbosity(LogLevel::Info);
        std::thread::scope(|scope| {
            let fire = || (0..200).for_each(|_| tracing::info!("(log test) fire"));
            let threads = [scope.spawn(fire), scope.spawn(fire)];
            forget_logger();
            let after_return = SEEN.lock().expect("no panic").len();
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
            assert_eq!(SEEN.lock().expect("no panic").len(), after_return);
        });
    }
}
