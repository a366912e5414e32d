//! Messages for the user, and the name that this host has in them and in files.

use std::io::Write;

/// How serious a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// A warning: the user should check it.
    Warn,
    /// Where files are and what was counted.
    Info,
}

/// Logs a message for the user; warnings go to standard error when nothing else would show them.
pub(super) fn say(level: Level, text: &str) {
    match level {
        Level::Info => tracing::info!("{text}"),
        Level::Warn if tracing::enabled!(tracing::Level::WARN) => tracing::warn!("{text}"),
        // Not `eprintln!`, which panics when the disk that takes standard error is full.
        Level::Warn => drop(writeln!(std::io::stderr(), "towline: {text}")),
    }
}

/// The host's name, fit for a file name.
pub fn host() -> String {
    let text = crate::os::host::name().replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
    if text.is_empty() { "host".into() } else { text }
}
