//! What NCCL keeps to itself: its progress thread stores the failure of a put, and no call of NCCL's reads it (NCCL 2.30.7,
//! `rma/rma_proxy.cc`), so the log is where the user learns of it, also where NCCL's logger prints no warnings.

use crate::os::error::Error;
use crate::os::log;

/// Says once, over all clones, what ends an operation or a group.
pub(crate) fn say_once(error: &Error) {
    if error.report_once() {
        say(&format!("{error}; NCCL may wait for ever: end the job"));
    }
}

/// As [`say_once`], where each call may make an error of its own: the same text comes once in a few seconds.
pub(crate) fn say_rarely(error: &Error) {
    if log::once_per((error.what(), error.peer())).is_some() {
        say_once(error);
    }
}

/// Says that bytes are lost, where no request fails.
pub(crate) fn say(line: &str) {
    log::also_to_stderr(line);
    tracing::warn!("{line}");
}
