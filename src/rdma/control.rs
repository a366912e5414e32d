//! The control channel of a connection: the socket of its handshake, and its state.
//!
//! Each side says goodbye over it, or reports why the connection has failed, as over a TCP stream. Messages about lost
//! queue pairs ([`recovery`](super::recovery)) use it too, and its end shows a peer's death while nothing is being
//! sent. [`reconnect`](super::reconnect) handles a channel that falls silent or is cut.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sent_frames::SentFrames;
use crate::engine::poller::{Registration as Watched, Source};
use crate::os::error::Result;
use crate::session::lifeline::{PeerInquiry, Verdict};
use crate::session::link::Sock;
use crate::session::liveness::{self, Finding, LivenessMonitor, Probes, TcpSample};
use crate::session::peer::{Peer, lost};
use crate::session::wire::{self, Piece};

/// Writes as much as the socket accepts now. Data for a broken socket is dropped.
///
/// # Errors
/// The socket's error. The kernel reports it once: the next read finds an end of file.
fn write_out(sock: &impl AsRawFd, output: &mut Vec<u8>) -> io::Result<()> {
    while !output.is_empty() {
        // SAFETY: a plain slice.
        let sent = unsafe { wire::send(sock.as_raw_fd(), Piece::of(output)) };
        match sent.or_else(wire::as_would_block) {
            Ok(Some(bytes)) => drop(output.drain(..bytes)),
            Ok(None) => return Ok(()),
            Err(error) => {
                output.clear();
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Whether the end of a socket may have another cause than the peer: a reset, or this host's administrator.
pub(super) fn is_cut(end: &io::Error) -> bool {
    matches!(end.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted)
}

/// The control channel.
pub(super) struct Control {
    /// Before the socket: dropping it names the descriptor, which must still be open then.
    pub(super) registration: Option<Watched>,
    pub(super) sock: Option<Sock>,
    /// The source that the control thread polls.
    pub(super) source: Option<Arc<dyn Source>>,
    pub(super) input: Vec<u8>,
    /// Bytes that the socket has not accepted yet.
    pub(super) output: Vec<u8>,
    pub(super) ended: Option<Instant>,
    /// When the kernel's data about the socket was last read.
    pub(super) looked: Option<Instant>,
    pub(super) monitor: LivenessMonitor,
    /// The number of the last attempted replacement socket, counted from 0.
    pub(super) epoch: u16,
    /// The number of this socket.
    pub(super) current: u16,
    /// Frames sent.
    pub(super) sent_frames: SentFrames,
    /// Frames received.
    pub(super) taken: u64,
    /// The other side has not reported how many frames it has received, so nothing is sent over this socket yet.
    pub(super) is_resuming: bool,
    /// Since when the other side's kernel has not answered, or the interface is down.
    pub(super) silent: Option<Instant>,
    /// A write, or the other side, has shown how the socket ended.
    pub(super) cut: Option<io::Error>,
    /// A replacement socket is being connected, or awaited: since when nothing was received.
    pub(super) away: Option<Instant>,
    /// Since when the kernel probes the socket often, because nothing was received on it.
    probed: Option<Instant>,
    /// The inquiry whether the peer is alive, once the socket was cut.
    pub(super) inquiry: Option<PeerInquiry>,
    /// The attempt to reach the peer has not started yet.
    pub(super) must_seek: bool,
}

impl Control {
    /// The control channel of a new connection.
    pub(super) fn new(sock: Sock) -> Self {
        Self {
            registration: None,
            sock: Some(sock),
            source: None,
            input: Vec::new(),
            output: Vec::new(),
            ended: None,
            looked: None,
            monitor: LivenessMonitor::default(),
            epoch: 0,
            current: 0,
            sent_frames: SentFrames::default(),
            taken: 0,
            is_resuming: false,
            silent: None,
            cut: None,
            away: None,
            probed: None,
            inquiry: None,
            must_seek: false,
        }
    }

    /// How long the peer's kernel has not answered; `limit` is how long it may. The kernel's own timeout for an idle
    /// connection (keepalive) does not apply while sent data is unacknowledged: that is retransmitted for a quarter of
    /// an hour.
    pub(super) fn silence(&mut self, limit: Duration) -> Duration {
        let now = Instant::now();
        let Some(sock) = self.sock.as_ref().filter(|_| self.looked.is_none_or(|at| now - at >= liveness::TICK)) else {
            return Duration::ZERO;
        };
        self.looked = Some(now);
        let Some(sample) = TcpSample::of(sock) else { return Duration::ZERO };
        if let Finding::Lost(silence) = self.monitor.check(now, sample) {
            self.silent = now.checked_sub(silence);
        }
        self.is_seen(now, sample.silent, limit);
        self.monitor.silence(now, sample)
    }

    /// The peer's kernel last answered this long ago over the current socket. If that was after the socket had fallen
    /// silent, no replacement is needed any more.
    fn is_seen(&mut self, now: Instant, silent: Duration, limit: Duration) {
        if self.probed.is_some_and(|since| silent + liveness::SOON < now.saturating_duration_since(since)) {
            (self.away, self.silent, self.probed) = (None, None, None);
            self.sock.iter().for_each(|sock| Probes::within(limit, true).set(sock));
        }
    }

    /// A replacement is being connected, since this socket has been silent for so long. Makes the kernel probe whether
    /// the other side is still there.
    pub(super) fn is_silent(&mut self, since: Instant) {
        (self.away, self.probed) = (Some(since), Some(since));
        self.sock.iter().for_each(|sock| Probes::OFTEN.set(sock));
    }

    /// Whether to keep waiting for a replacement socket, when one is awaited; `patience`: the limit if the current one
    /// is silent.
    ///
    /// # Errors
    /// When the peer is given up.
    pub(super) fn judge(&mut self, patience: Duration, peer: &Peer) -> Result<()> {
        let now = Instant::now();
        if let Some(inquiry) = &mut self.inquiry {
            return if inquiry.verdict(now) == Verdict::Gone { Err(inquiry.error().clone()) } else { Ok(()) };
        }
        match self.away.map(|since| now - since) {
            Some(silence) if silence >= patience => Err(lost(&liveness::silent(silence)).with_peer(peer)),
            _ => Ok(()),
        }
    }

    /// Writes as much of the pending output as the socket accepts now.
    pub(super) fn write(&mut self) {
        let Self { sock: Some(sock), output, cut, .. } = self else { return };
        // A broken pipe adds nothing to the end of file that follows.
        if let Err(error) = write_out(sock, output)
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            *cut = Some(error);
        }
    }

    /// Reads the bytes that have arrived. None: there are none at the moment.
    ///
    /// # Errors
    /// How the socket ended.
    pub(super) fn read(&mut self, room: &mut [u8], patience: Duration) -> io::Result<Option<usize>> {
        let Some(sock) = &self.sock else { return Ok(None) };
        // SAFETY: the caller's buffer.
        let got = unsafe { wire::receive(sock.as_raw_fd(), Piece::of_mut(room)) };
        match got.or_else(wire::as_would_block)? {
            Some(count) if count > 0 => Ok(Some(count)),
            end => match (self.cut.take(), end) {
                (Some(how), _) => Err(how),
                (None, Some(_)) => Err(io::ErrorKind::UnexpectedEof.into()),
                (None, None) => match self.silence(patience) {
                    silence if silence >= patience => Err(liveness::silent(silence)),
                    _ => Ok(None),
                },
            },
        }
    }

    /// Queues a frame for the socket, if there is one and it is known what the other side has received.
    pub(super) fn queue_frame(&mut self, frame: &[u8]) {
        if self.sock.is_some() && !self.is_resuming {
            self.output.extend_from_slice(frame);
        }
        self.write();
    }

    /// The other side has received this many frames.
    ///
    /// # Errors
    /// When that is impossible.
    pub(super) fn resume(&mut self, taken: u64) -> Result<()> {
        let rest = self.sent_frames.after(taken)?;
        if std::mem::take(&mut self.is_resuming) {
            self.output.extend_from_slice(&rest);
        }
        Ok(())
    }

    /// Whether the other side may already use another socket, without this side having been notified, and have closed
    /// this one for it.
    pub(super) fn may_be_replaced(&self) -> bool {
        self.epoch != self.current
    }

    /// The socket has ended.
    pub(super) fn close(&mut self) {
        self.registration = None;
        (self.sock, self.cut, self.probed, self.looked) = (None, None, None, None);
        self.monitor = LivenessMonitor::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use crate::rdma::harness::sock;

    #[test]
    fn what_the_socket_does_not_take_at_once_follows_in_order() {
        let (here, mut there) = UnixStream::pair().expect("sockets");
        let sent_frames: Vec<u8> = (0..1_000_000_u32).map(|at| (at % 251) as u8).collect();
        let mut output = sent_frames.clone();
        write_out(&here, &mut output).expect("a socket");
        assert!(!output.is_empty() && output.len() < sent_frames.len(), "the socket takes a part of it");
        let mut heard = vec![0; sent_frames.len()];
        let mut at = 0;
        while at < sent_frames.len() {
            at += there.read(&mut heard[at..]).expect("bytes");
            write_out(&here, &mut output).expect("a socket");
        }
        assert!(heard == sent_frames && output.is_empty());
        // Not closed: a child that another test forks at this moment would keep it open.
        there.shutdown(Shutdown::Both).expect("a socket");
        output.push(1);
        assert!(write_out(&here, &mut output).is_err() && output.is_empty(), "nobody is there");
    }

    #[test]
    fn what_a_write_finds_is_not_taken_for_an_end_of_file() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let near = std::net::TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (far, _) = listener.accept().expect("a connection");
        near.set_nonblocking(true).expect("set");
        let mut control = Control::new(crate::session::link::Sock::open(|| Ok(near.into())).expect("a descriptor"));
        liveness::close_hard(&far);
        drop(far);
        let start = Instant::now();
        while control.cut.is_none() && start.elapsed() < Duration::from_secs(10) {
            control.queue_frame(b"a frame");
        }
        let end = control.read(&mut [0; 8], Duration::MAX).expect_err("it is over");
        assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
        control.close();
        assert_eq!(control.read(&mut [0; 8], Duration::MAX).expect("no socket, no end"), None);
        let (one, other) = UnixStream::pair().expect("sockets");
        control.sock = Some(sock(one));
        assert_eq!(control.read(&mut [0; 8], Duration::MAX).expect("the next one lives"), None);
        other.shutdown(Shutdown::Both).expect("a socket");
        let end = control.read(&mut [0; 8], Duration::MAX).expect_err("it is over");
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn another_socket_is_wanted_until_something_arrives_on_the_silent_one() {
        let (here, _there) = UnixStream::pair().expect("sockets");
        let mut control = Control::new(sock(here));
        let (now, limit) = (Instant::now(), Duration::from_secs(60));
        let since = now - Duration::from_secs(3);
        control.is_silent(since);
        for silent in [3000, 3004, 2950] {
            control.is_seen(now, Duration::from_millis(silent), limit);
            assert_eq!(control.away, Some(since), "that arrived before");
        }
        control.is_seen(now, Duration::from_secs(1), limit);
        assert_eq!((control.away, control.probed), (None, None));
        // Silence alone, with nothing outstanding, does not start a replacement.
        control.is_seen(now + limit, Duration::from_secs(1), limit);
        assert_eq!(control.away, None);
    }
}
