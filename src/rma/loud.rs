//! Errors that NCCL does not pass on. Its progress thread stores the failure of a put, and no call reads it (NCCL
//! 2.30.7, `rma/rma_proxy.cc`). So the log informs the user of it, even where NCCL's logger prints no warnings.

use crate::os::error::Error;
use crate::os::log;

/// Reports an error that ends an operation or a group, once for all its clones.
pub(crate) fn say_once(error: &Error) {
    if error.report_once() {
        say(&format!("{error}; NCCL may wait for ever: end the job"));
    }
}

/// As [`say_once`], for errors that each call makes again: the same text is reported once in a few seconds.
pub(crate) fn say_rarely(error: &Error) {
    if log::once_per((error.what(), error.peer())).is_some() {
        say_once(error);
    }
}

/// Reports lost bytes, where no request fails.
pub(crate) fn say(line: &str) {
    log::also_to_stderr(line);
    tracing::warn!("{line}");
}
