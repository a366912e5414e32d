//! The `tracing` subscriber: formats an event into one line and hands it to NCCL's logger or standard error.
//!
//! Spans are accepted and ignored: NCCL's log has no place for them.

use super::{INSIDE, LOGGER, Logger, PREFIX, VERBOSITY, nccl_terms, rank};
use std::ffi::CString;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::atomic::Ordering;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

pub(super) struct ToNccl;

impl Subscriber for ToNccl {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        !metadata.is_span() && rank(*metadata.level()) <= VERBOSITY.load(Ordering::Acquire)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match VERBOSITY.load(Ordering::Acquire) {
            0 => LevelFilter::OFF,
            1 => LevelFilter::ERROR,
            2 => LevelFilter::WARN,
            3 => LevelFilter::INFO,
            4 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        })
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line { text: String::from(PREFIX), fields: String::new() };
        event.record(&mut line);
        line.text.push_str(&line.fields);
        emit(event.metadata(), line.text);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Collects the message and, behind it, the other fields as `name=value`.
struct Line {
    text: String,
    fields: String,
}

impl Line {
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // Writing into a String fails only when a value's own formatting does: then its part is missing.
        let _ = match field.name() {
            "message" => self.text.write_fmt(value),
            name => write!(self.fields, " {name}={value}"),
        };
    }
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format_args!("{value:?}"));
    }
}

fn emit(metadata: &Metadata<'_>, text: String) {
    INSIDE.fetch_add(1, Ordering::SeqCst);
    let address = LOGGER.load(Ordering::SeqCst);
    if address.is_null() {
        INSIDE.fetch_sub(1, Ordering::SeqCst);
        to_stderr(*metadata.level(), &text);
        return;
    }
    // SAFETY: the only other value stored in LOGGER is the address of a function of this type, whose library stays
    // mapped (`keep_mapped`).
    let logger = unsafe { std::mem::transmute::<*mut (), Logger>(address) };
    let (level, flags) = nccl_terms(*metadata.level(), metadata.target());
    let file = without_nul(metadata.file().unwrap_or("towline").to_owned());
    let line = metadata.line().and_then(|line| i32::try_from(line).ok()).unwrap_or(0);
    let text = without_nul(text);
    // SAFETY: all three pointers are NUL-terminated and live through the call, and "%s" takes the one string.
    unsafe { logger(level, flags, file.as_ptr(), line, c"%s".as_ptr(), text.as_ptr()) };
    INSIDE.fetch_sub(1, Ordering::SeqCst);
}

pub(super) fn to_stderr(level: Level, text: &str) {
    let text = text.strip_prefix(PREFIX).unwrap_or(text);
    // A standard error that accepts nothing must not stop the job, and there is no other output.
    let _ = writeln!(std::io::stderr().lock(), "{PREFIX}{level} {text}");
}

/// A C string of `text`; a NUL inside, which the peer may have sent, becomes a visible mark.
fn without_nul(text: String) -> CString {
    CString::new(text).unwrap_or_else(|error| {
        let text = String::from_utf8_lossy(&error.into_vec()).replace('\0', "\u{fffd}");
        CString::new(text).unwrap_or_default()
    })
}
