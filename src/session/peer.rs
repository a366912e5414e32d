//! The part that both directions of a connection have in common: the peer, and the first failure.

use std::io;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::frame::MAX_STREAMS;
use super::frame::{Header, MAX_CONTROL, Type};
use super::wire::is_shortage;
use crate::os::error::{Cause, Error};
use crate::os::log;

/// The other end, for messages.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// The peer's label: host name and process.
    pub label: String,
    /// The peer's address on the first stream.
    pub address: SocketAddr,
}

impl Peer {
    /// Warns the user that a connection with the peer failed. After a first warning about this peer, further ones go
    /// only to NCCL's INFO log: a process that aborts or dies ends all its connections, and one warning is enough.
    /// Faults of this side, or found by it, are logged each time.
    pub(crate) fn warn_of(&self, doing: &str, error: &Error) {
        if !is_its_end(error) || log::once_per(&self.label).is_some() {
            tracing::warn!(target: log::NET, "{doing} {self} failed: {error}");
        } else {
            tracing::info!(target: log::NET, "{doing} {self} failed: {error}");
        }
    }
}

/// The first words of the errors which mean that the peer has ended the connection, or that its process has ended.
const ITS_END: [&str; 3] = [
    "the peer gave up the connection: ",
    "the peer closed the connection before ",
    "the peer's process ended without ",
];

fn is_its_end(error: &Error) -> bool {
    error.cause() == Cause::Remote && ITS_END.iter().any(|begins| error.what().starts_with(begins))
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.label, self.address)
    }
}

/// Whether a connection still works; the first error is kept and returned to all later requests.
#[derive(Debug, Default)]
pub(crate) struct Health {
    failed: AtomicBool,
    error: OnceLock<Error>,
    live: AtomicUsize,
    peer_done: AtomicBool,
    /// Messages that the peer had received when it closed, plus one; 0 while that is not known.
    peer_received: AtomicU64,
}

impl Health {
    /// Records a failure. Returns whether it is the first.
    pub(crate) fn fail(&self, error: Error) -> bool {
        self.fail_telling(error, || ())
    }

    /// Records a failure, and notifies the peer before any thread of this process sees the failure, because such a
    /// thread may close the sockets. The cause is stored before that: the peer answers at once, and its answer must not
    /// replace the cause. Returns whether it is the first failure.
    pub(crate) fn fail_telling(&self, error: Error, tell: impl FnOnce()) -> bool {
        /// This must also hold if the notification panics: the cause is stored, and every request must get it.
        struct Failed<'a>(&'a AtomicBool);
        impl Drop for Failed<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let first = self.error.set(error).is_ok();
        let _failed = Failed(&self.failed);
        if !self.is_failed() {
            tell();
        }
        first
    }

    /// Whether the connection has failed.
    #[inline]
    pub(crate) fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The failure, if there is one. One load if there is none: this is on the hot path.
    ///
    /// # Errors
    /// The failure.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Error> {
        if !self.is_failed() {
            return Ok(());
        }
        Err(self.cause())
    }

    #[cold]
    fn cause(&self) -> Error {
        self.error.get().cloned().unwrap_or_else(|| Error::internal("the connection failed without a cause"))
    }

    /// A stream is connected.
    pub(crate) fn stream_up(&self) {
        self.live.fetch_add(1, Ordering::AcqRel);
    }

    /// A stream ended. Returns how many remain.
    pub(crate) fn stream_down(&self) -> usize {
        self.live.fetch_sub(1, Ordering::AcqRel) - 1
    }

    /// How many streams are connected.
    #[inline]
    pub(crate) fn live(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }

    /// The peer said goodbye: the end of its streams is not a fault.
    pub(crate) fn peer_is_done(&self) {
        self.peer_done.store(true, Ordering::Release);
    }

    /// The receiver has closed with nothing outstanding, having received this many messages.
    pub(crate) fn peer_received(&self, messages: u64) {
        self.peer_received.store(messages.saturating_add(1), Ordering::Release);
        self.peer_is_done();
    }

    /// How many messages the receiver had received when it closed, if it reported that.
    pub(crate) fn has_peer_received(&self, messages: u64) -> bool {
        self.peer_received.load(Ordering::Acquire) == messages.saturating_add(1)
    }

    /// Whether the peer said goodbye.
    #[inline]
    pub(crate) fn is_peer_done(&self) -> bool {
        self.peer_done.load(Ordering::Acquire)
    }

    /// The result of reading a stream's socket: bytes, or that there are none now. `starved` is called when the kernel
    /// has no memory; then there are none now either.
    ///
    /// # Errors
    /// The end of the stream: a goodbye if `is_goodbye` (no data can be missing), otherwise a loss.
    #[inline]
    pub(crate) fn read(
        &self,
        got: io::Result<Option<usize>>,
        is_goodbye: bool,
        starved: impl FnOnce(&io::Error),
    ) -> Result<Option<usize>, Broken> {
        let error = match got {
            Ok(Some(0)) => io::ErrorKind::UnexpectedEof.into(),
            Ok(bytes) => return Ok(bytes),
            Err(error) => error,
        };
        if is_shortage(&error) {
            starved(&error);
            return Ok(None);
        }
        Err(if is_goodbye { Broken::Goodbye } else { Broken::Lost(error) })
    }

    /// Whether the peer said goodbye and all streams have ended: nothing more can be sent or received.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.is_peer_done() && self.live() == 0
    }
}

/// The code of a cause in a fail frame.
fn cause_code(cause: Cause) -> u64 {
    match cause {
        Cause::System => 1,
        Cause::Argument => 2,
        Cause::Usage => 3,
        Cause::Remote => 4,
        Cause::Internal => 5,
    }
}

/// The frame that notifies the peer of a failure.
pub(crate) fn failure(error: &Error) -> Vec<u8> {
    let text = error.what().as_bytes();
    let text = &text[..text.len().min(MAX_CONTROL as usize)];
    let header = Header { order: cause_code(error.cause()), length: text.len() as u32, ..Header::of(Type::Fail, 0) };
    let mut frame = header.encode().to_vec();
    frame.extend_from_slice(text);
    frame
}

/// The error on this side for a failure that the peer reported: a wrong size concerns both sides, everything else is
/// the peer's failure.
pub(crate) fn reported_by_peer(code: u64, text: &[u8]) -> Error {
    let text: String = String::from_utf8_lossy(text).chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    let cause = if code == cause_code(Cause::Usage) { Cause::Usage } else { Cause::Remote };
    Error::new(cause, format!("the peer gave up the connection: {text}"))
}

/// The frame that reports to the sender that a stream has ended in this epoch, and how many of its frames were
/// received.
pub(crate) fn fenced((index, epoch, frames): (usize, u16, u64)) -> Header {
    Header { order: index as u64, offset: u64::from(epoch), total: frames, ..Header::of(Type::Fenced, 0) }
}

/// The stream and the epoch that a fence or its answer names.
///
/// # Errors
/// When there can be no such stream or epoch.
pub(crate) fn fenced_epoch(header: &Header) -> Result<(usize, u16), Error> {
    let stream = usize::try_from(header.order).ok().filter(|stream| *stream < MAX_STREAMS);
    stream.zip(u16::try_from(header.offset).ok()).ok_or_else(|| {
        Error::remote(format!("a fence names stream {} in epoch {}, which cannot be", header.order, header.offset))
    })
}

/// The error for a stream that was lost and cannot be recovered.
pub(crate) fn lost(error: &io::Error) -> Error {
    let what = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the peer's process ended without saying goodbye".to_owned(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => format!("the connection was cut ({error})"),
        _ => format!("the connection was lost ({error})"),
    };
    Error::remote(what).with_hint("look at the peer's log: it may have crashed, been killed, or lost its network")
}

/// The error for requests that were still outstanding when the peer said goodbye.
pub(crate) fn left_early(peer: &Peer) -> Error {
    Error::remote("the peer closed the connection before this transfer was complete")
        .with_peer(peer)
        .with_hint("the other rank finished or aborted; its log says which")
}

/// Why a stream ended.
#[derive(Debug)]
pub(crate) enum Broken {
    /// End of file or an error of the socket.
    Lost(io::Error),
    /// The peer had said goodbye before.
    Goodbye,
    /// The protocol was violated, or the peer reported a failure: the whole connection ends.
    Fatal(Error),
}

impl Broken {
    /// The socket's error, if that is the reason.
    pub(crate) fn cause(&self) -> Option<&io::Error> {
        if let Self::Lost(error) = self { Some(error) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_peer_answers_does_not_stand_for_the_cause() {
        let health = Health::default();
        let reported = |text: &str| reported_by_peer(cause_code(Cause::Remote), text.as_bytes());
        let first = health.fail_telling(Error::remote("the cable is out"), || {
            assert!(!health.is_failed(), "nobody here takes the socket away before the peer is told");
            // The control thread reads this while this thread is still notifying the peer.
            assert!(!health.fail(reported("the peer gave up the connection: the cable is out")));
        });
        assert!(first);
        let cause = health.check().expect_err("it has failed").to_string();
        assert_eq!(cause, Error::remote("the cable is out").to_string());
        health.fail_telling(Error::remote("later"), || panic!("the peer was told before"));
    }

    /// A connection that the peer gave up just before must not hide this side's failure and its hint.
    #[test]
    fn only_an_end_by_the_peer_is_no_news_the_second_time() {
        let peer = Peer { label: "host:1".to_owned(), address: ([127, 0, 0, 1], 1).into() };
        let reported = |cause| reported_by_peer(cause_code(cause), b"transfers in flight");
        let ends = [reported(Cause::Remote), left_early(&peer), lost(&io::ErrorKind::UnexpectedEof.into())];
        assert!(ends.iter().all(is_its_end));
        let own = [
            reported(Cause::Usage),
            Error::remote("data arrived damaged"),
            lost(&io::ErrorKind::ConnectionReset.into()),
        ];
        assert!(!own.iter().any(is_its_end));
    }

    /// Otherwise requests would stay unfinished for ever.
    #[test]
    fn a_panic_while_the_peer_is_told_leaves_the_connection_failed() {
        let health = Health::default();
        let telling = std::panic::AssertUnwindSafe(|| {
            health.fail_telling(Error::remote("the cable is out"), || panic!("a defect"));
        });
        assert!(std::panic::catch_unwind(telling).is_err());
        assert!(health.check().expect_err("it has failed").to_string().contains("the cable is out"));
    }
}
