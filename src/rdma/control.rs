//! The control channel of a connection: the socket of its handshake, and what is known of it.
//!
//! Each side says goodbye over it, or why the connection has failed, as over a TCP stream; what becomes of lanes
//! ([`mending`](super::mending)) is said over it too; and its end is how a peer's death is noticed while nothing is being
//! sent. What follows when it falls silent or is cut is in [`redial`](super::redial).

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::said::Said;
use crate::engine::poller::{Registration as Watched, Source};
use crate::os::error::Result;
use crate::session::lifeline::{Alone, Verdict};
use crate::session::link::Sock;
use crate::session::peer::{Peer, lost};
use crate::session::watch::{self, Finding, Probes, Sight, Vigil};
use crate::session::wire::{self, Piece};

/// Writes as much as the socket takes now. What a broken one does not take is forgotten.
///
/// # Errors
/// How it is broken. The kernel says so once: the next read finds an end of file.
fn write_out(sock: &impl AsRawFd, output: &mut Vec<u8>) -> io::Result<()> {
    while !output.is_empty() {
        // SAFETY: a plain slice.
        let sent = unsafe { wire::send(sock.as_raw_fd(), Piece::of(output)) };
        match sent.or_else(wire::look_again) {
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

/// Whether the end of a socket may be somebody else's work than the peer's: a reset, or this host's administrator.
pub(super) fn is_cut(end: &io::Error) -> bool {
    matches!(end.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted)
}

/// The control channel.
pub(super) struct Control {
    /// Before the socket: dropping it names the descriptor, which must still be open then.
    pub(super) registration: Option<Watched>,
    pub(super) sock: Option<Sock>,
    /// Whom the keeper polls.
    pub(super) source: Option<Arc<dyn Source>>,
    pub(super) input: Vec<u8>,
    /// What the socket has not taken yet.
    pub(super) output: Vec<u8>,
    pub(super) ended: Option<Instant>,
    /// When the kernel was last asked what it has heard.
    pub(super) looked: Option<Instant>,
    pub(super) vigil: Vigil,
    /// Which socket was last tried for, counted from 0.
    pub(super) epoch: u16,
    /// Which one this is, or was.
    pub(super) current: u16,
    /// Frames said.
    pub(super) said: Said,
    /// Frames taken in.
    pub(super) taken: u64,
    /// The other side has not told how many frames it has taken in, so nothing is said over this socket yet.
    pub(super) is_resuming: bool,
    /// Since when nothing comes back from the other side's kernel, or the interface is down.
    pub(super) silent: Option<Instant>,
    /// A write, or the other side, has told how the socket ended.
    pub(super) cut: Option<io::Error>,
    /// Another socket is tried for, or awaited: since when nothing was heard.
    pub(super) away: Option<Instant>,
    /// Since when the kernel probes the socket often, because nothing was heard on it.
    probed: Option<Instant>,
    /// The socket was cut: whether the peer lives.
    pub(super) alone: Option<Alone>,
    /// And nobody has gone to find out yet.
    pub(super) is_to_seek: bool,
}

impl Control {
    /// Of a new connection.
    pub(super) fn new(sock: Sock) -> Self {
        Self {
            registration: None,
            sock: Some(sock),
            source: None,
            input: Vec::new(),
            output: Vec::new(),
            ended: None,
            looked: None,
            vigil: Vigil::default(),
            epoch: 0,
            current: 0,
            said: Said::default(),
            taken: 0,
            is_resuming: false,
            silent: None,
            cut: None,
            away: None,
            probed: None,
            alone: None,
            is_to_seek: false,
        }
    }

    /// For how long the peer's kernel has not answered; `limit` is how long it may. Its own end of an idle connection
    /// (keepalive) does not come while something that was said is on the way: that it repeats for a quarter of an hour.
    pub(super) fn unheard(&mut self, limit: Duration) -> Duration {
        let now = Instant::now();
        let Some(sock) = self.sock.as_ref().filter(|_| self.looked.is_none_or(|at| now - at >= watch::TICK)) else {
            return Duration::ZERO;
        };
        self.looked = Some(now);
        let Some(sight) = Sight::of(sock) else { return Duration::ZERO };
        if let Finding::Lost(silence) = self.vigil.look(now, sight) {
            self.silent = now.checked_sub(silence);
        }
        self.is_seen(now, sight.silent, limit);
        self.vigil.unheard(now, sight)
    }

    /// The peer's kernel last answered so long ago over the socket that there is. When that was after it had fallen silent, no
    /// other one is wanted any more.
    fn is_seen(&mut self, now: Instant, silent: Duration, limit: Duration) {
        if self.probed.is_some_and(|since| silent + watch::SOON < now.saturating_duration_since(since)) {
            (self.away, self.silent, self.probed) = (None, None, None);
            self.sock.iter().for_each(|sock| Probes::within(limit, true).set(sock));
        }
    }

    /// Another socket is tried for, since this one has been silent for as long: the kernel finds out whether the other side is
    /// still there.
    pub(super) fn is_silent(&mut self, since: Instant) {
        (self.away, self.probed) = (Some(since), Some(since));
        self.sock.iter().for_each(|sock| Probes::OFTEN.set(sock));
    }

    /// Whether to wait on for another socket, when one is awaited; `patience`: for one in place of one that is silent.
    ///
    /// # Errors
    /// When the peer is given up.
    pub(super) fn judge(&mut self, patience: Duration, peer: &Peer) -> Result<()> {
        let now = Instant::now();
        if let Some(alone) = &mut self.alone {
            return if alone.verdict(now) == Verdict::Gone { Err(alone.error().clone()) } else { Ok(()) };
        }
        match self.away.map(|since| now - since) {
            Some(silence) if silence >= patience => Err(lost(&watch::silent(silence)).with_peer(peer)),
            _ => Ok(()),
        }
    }

    /// Writes as much of what was said as the socket takes now.
    pub(super) fn write(&mut self) {
        let Self { sock: Some(sock), output, cut, .. } = self else { return };
        // A broken pipe says nothing that the end of file will not.
        if let Err(error) = write_out(sock, output)
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            *cut = Some(error);
        }
    }

    /// Reads what there is. None: nothing at the moment.
    ///
    /// # Errors
    /// How the socket ended.
    pub(super) fn read(&mut self, room: &mut [u8], patience: Duration) -> io::Result<Option<usize>> {
        let Some(sock) = &self.sock else { return Ok(None) };
        // SAFETY: the caller's buffer.
        let got = unsafe { wire::receive(sock.as_raw_fd(), Piece::of_mut(room)) };
        match got.or_else(wire::look_again)? {
            Some(count) if count > 0 => Ok(Some(count)),
            end => match (self.cut.take(), end) {
                (Some(how), _) => Err(how),
                (None, Some(_)) => Err(io::ErrorKind::UnexpectedEof.into()),
                (None, None) => match self.unheard(patience) {
                    silence if silence >= patience => Err(watch::silent(silence)),
                    _ => Ok(None),
                },
            },
        }
    }

    /// Puts a frame on the socket, if there is one and it is known what the other side has.
    pub(super) fn utter(&mut self, frame: &[u8]) {
        if self.sock.is_some() && !self.is_resuming {
            self.output.extend_from_slice(frame);
        }
        self.write();
    }

    /// The other side has taken in so many frames.
    ///
    /// # Errors
    /// When that cannot be.
    pub(super) fn resume(&mut self, taken: u64) -> Result<()> {
        let rest = self.said.after(taken)?;
        if std::mem::take(&mut self.is_resuming) {
            self.output.extend_from_slice(&rest);
        }
        Ok(())
    }

    /// Whether the other side may have put another socket to use, of which this side has not heard, and have closed this one
    /// for it.
    pub(super) fn may_be_replaced(&self) -> bool {
        self.epoch != self.current
    }

    /// The socket has ended.
    pub(super) fn close(&mut self) {
        self.registration = None;
        (self.sock, self.cut, self.probed, self.looked) = (None, None, None, None);
        self.vigil = Vigil::default();
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
        let said: Vec<u8> = (0..1_000_000_u32).map(|at| (at % 251) as u8).collect();
        let mut output = said.clone();
        write_out(&here, &mut output).expect("a socket");
        assert!(!output.is_empty() && output.len() < said.len(), "the socket takes a part of it");
        let mut heard = vec![0; said.len()];
        let mut at = 0;
        while at < said.len() {
            at += there.read(&mut heard[at..]).expect("bytes");
            write_out(&here, &mut output).expect("a socket");
        }
        assert!(heard == said && output.is_empty());
        // Not closed: a child that another test forks just now would keep it open.
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
        watch::close_hard(&far);
        drop(far);
        let start = Instant::now();
        while control.cut.is_none() && start.elapsed() < Duration::from_secs(10) {
            control.utter(b"a word");
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
    fn another_socket_is_wanted_until_something_is_heard_on_the_silent_one() {
        let (here, _there) = UnixStream::pair().expect("sockets");
        let mut control = Control::new(sock(here));
        let (now, limit) = (Instant::now(), Duration::from_secs(60));
        let since = now - Duration::from_secs(3);
        control.is_silent(since);
        for silent in [3000, 3004, 2950] {
            control.is_seen(now, Duration::from_millis(silent), limit);
            assert_eq!(control.away, Some(since), "that was heard before");
        }
        control.is_seen(now, Duration::from_secs(1), limit);
        assert_eq!((control.away, control.probed), (None, None));
        // Nobody goes for another one just because nothing is said.
        control.is_seen(now + limit, Duration::from_secs(1), limit);
        assert_eq!(control.away, None);
    }
}
