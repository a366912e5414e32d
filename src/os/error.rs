//! One error type for the whole library: what happened, with which peer, what to try.
//!
//! Every failure that NCCL or a user sees is an [`Error`]. It has a [`Cause`] (which decides the NCCL result code, in
//! `abi::result`), one clear sentence, the peer if there is one, and a hint.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The result of every fallible function above the system-call wrappers.
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of failure. It alone decides the NCCL result code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Cause {
    /// The operating system refused a call (out of descriptors, no such interface, …).
    System,
    /// The caller passed an impossible argument: null pointer, unknown device, foreign or stale handle.
    Argument,
    /// The call is legal by type but not by order or size: a message longer than its receive, a second `test`.
    Usage,
    /// The other side failed, vanished or violated the protocol.
    Remote,
    /// A defect of Towline itself (a caught panic, a broken invariant).
    Internal,
}

/// A failure: cause, sentence, peer, hint. Cheap to clone, because a connection keeps its first error and
/// every later request reports the same one.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    cause: Cause,
    what: String,
    peer: Option<String>,
    hint: Option<String>,
    told: AtomicBool,
    told_to_host: AtomicBool,
}

impl Error {
    /// A failure of kind `cause`, described in one sentence without a final full stop.
    pub(crate) fn new(cause: Cause, what: impl Into<String>) -> Self {
        Self::from_parts(cause, what.into(), None, None)
    }

    /// A failed system call: `doing` is what was attempted, as in "binding a listener to eth0".
    pub(crate) fn system(doing: impl fmt::Display, error: &std::io::Error) -> Self {
        let failure = Self::new(Cause::System, format!("{doing} failed: {error}"));
        match advice(error) {
            Some(hint) => failure.with_hint(hint),
            None => failure,
        }
    }

    /// A bad argument from the host program.
    pub(crate) fn argument(what: impl Into<String>) -> Self {
        Self::new(Cause::Argument, what)
    }

    /// A call that breaks the interface's rules.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self::new(Cause::Usage, what)
    }

    /// A failure on, or of, the other side.
    pub(crate) fn remote(what: impl Into<String>) -> Self {
        Self::new(Cause::Remote, what)
    }

    /// A defect of Towline.
    pub(crate) fn internal(what: impl Into<String>) -> Self {
        Self::new(Cause::Internal, what)
    }

    /// The same failure with the peer it concerns (an address, a host name, a rank).
    #[must_use]
    pub(crate) fn with_peer(self, peer: impl fmt::Display) -> Self {
        let (cause, what, _, hint) = self.parts();
        Self::from_parts(cause, what, Some(peer.to_string()), hint)
    }

    /// The same failure with a hint: what the user can try.
    #[must_use]
    pub(crate) fn with_hint(self, hint: impl Into<String>) -> Self {
        let (cause, what, peer, _) = self.parts();
        Self::from_parts(cause, what, peer, Some(hint.into()))
    }

    /// Whether it has a hint.
    pub(crate) fn has_hint(&self) -> bool {
        self.0.hint.is_some()
    }

    /// Which kind of failure this is.
    pub(crate) fn cause(&self) -> Cause {
        self.0.cause
    }

    /// The sentence alone, without peer and hint.
    pub(crate) fn what(&self) -> &str {
        &self.0.what
    }

    /// The hint, if there is one.
    pub(crate) fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The peer, if the failure has one.
    pub(crate) fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }

    /// True for the first caller only, over all clones. That caller writes the failure to the log, so that the error of
    /// a connection appears there once and not once per request.
    pub(crate) fn report_once(&self) -> bool {
        !self.0.told.swap(true, Ordering::Relaxed)
    }

    /// The same for the consequence of the failure, logged for a host that does not read result codes: the connection
    /// itself has logged its failure by then.
    pub(crate) fn tell_host_once(&self) -> bool {
        !self.0.told_to_host.swap(true, Ordering::Relaxed)
    }

    fn from_parts(cause: Cause, what: String, peer: Option<String>, hint: Option<String>) -> Self {
        let (told, told_to_host) = (AtomicBool::new(false), AtomicBool::new(false));
        Self(Arc::new(Inner { cause, what, peer, hint, told, told_to_host }))
    }

    fn parts(&self) -> (Cause, String, Option<String>, Option<String>) {
        (self.0.cause, self.0.what.clone(), self.0.peer.clone(), self.0.hint.clone())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.what)?;
        if let Some(peer) = &self.0.peer {
            write!(f, " (peer {peer})")?;
        }
        if let Some(hint) = &self.0.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.cause)
    }
}

impl std::error::Error for Error {}

/// The hint when the host has run out of something that a call needs. None for other errors.
pub(crate) fn advice(error: &std::io::Error) -> Option<&'static str> {
    match error.raw_os_error()? {
        libc::EMFILE => Some("this process is out of descriptors: raise its limit (ulimit -n)"),
        libc::ENFILE => Some("this host is out of descriptors: raise fs.file-max"),
        libc::ENOMEM | libc::ENOBUFS => {
            Some("this host is short of memory: look at what is free, and at net.ipv4.tcp_mem")
        }
        libc::ENOSPC => Some("this user has no epoll watches left: raise fs.epoll.max_user_watches"),
        _ => None,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_what_with_whom_and_what_to_try() {
        let error = Error::remote("the connection was reset").with_peer("10.0.0.2:4711").with_hint("look at its log");
        assert_eq!(error.to_string(), "the connection was reset (peer 10.0.0.2:4711); look at its log");
        assert_eq!(error.cause(), Cause::Remote);
    }

    #[test]
    fn a_failure_that_many_requests_report_is_told_once() {
        let kept = Error::remote("the peer closed the connection");
        let reported_again = kept.clone();
        assert!(kept.report_once());
        assert!(!reported_again.report_once());
        assert!(Error::remote("another").report_once());
    }
}
