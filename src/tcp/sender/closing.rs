//! How a sender ends its connection: first, all data that it reported done reaches the peer.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Io, SendConn};
use crate::session::frame::MAX_STREAMS;
use crate::session::frame::{Header, Type};
use crate::session::liveness::{self, PROBE_AFTER};
use crate::session::silences::{CLOSE_PATIENCE, CLOSE_RECOVERY};
use crate::session::wire;
use crate::tcp::connection::{CLOSE_POLL, rest};
use crate::tcp::stream::{READ, Stream, WRITE};

/// The result of a goodbye.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parting {
    /// The peer's kernel has all data.
    Answered,
    /// The receiver's process takes too long, and there is no sign that anything is lost.
    Late,
    /// Nothing comes back, or data was lost with a stream.
    Silent,
    /// Closes towards this peer have used up their time.
    Spent,
}

/// How much the peer has acknowledged, and when that last grew. A handshake is no progress: it only begins an epoch.
struct Advance {
    at: Instant,
    looked: Instant,
    /// By the receiver: frames of all streams.
    frames: u64,
    /// By its kernel: bytes of each stream, with the epoch.
    bytes: [Option<(u16, u64)>; MAX_STREAMS],
}

impl Advance {
    /// A record as if the last progress had been at `since`.
    fn since(since: Instant, conn: &SendConn) -> Self {
        let mut advance = Self { at: since, looked: Instant::now(), frames: 0, bytes: [None; MAX_STREAMS] };
        advance.compare(conn);
        advance
    }

    /// How long ago more was acknowledged.
    fn pause(&mut self, conn: &SendConn) -> Duration {
        if self.looked.elapsed() >= CLOSE_POLL {
            self.looked = Instant::now();
            if self.compare(conn) {
                self.at = self.looked;
            }
        }
        self.at.elapsed()
    }

    /// Whether more has been acknowledged than the last time.
    fn compare(&mut self, conn: &SendConn) -> bool {
        let frames = {
            let core = &conn.state().core;
            (0..MAX_STREAMS).map(|index| core.arrived(index).frames).sum()
        };
        let mut grown = frames > std::mem::replace(&mut self.frames, frames);
        for (stream, last) in conn.streams.iter().zip(&mut self.bytes) {
            let acknowledged = |io: &mut Io| Some((io.epoch, liveness::acknowledged(&io.sock)?));
            let Some((epoch, bytes)) = stream.with_io(acknowledged).flatten() else { continue };
            grown |= last.is_some_and(|last| last.0 == epoch && last.1 < bytes);
            *last = Some((epoch, bytes));
        }
        grown
    }
}

impl SendConn {
    /// Lets all data that was reported done reach the peer, and says goodbye. It waits as long as the peer acknowledges
    /// more, and for a limited time when the peer does not. The limit is longer when a path has just failed.
    pub(super) fn say_goodbye(&self) {
        let start = Instant::now();
        // A peer that has answered on this connection in the meantime is not silent any more.
        let silent = self.net.silences().since(&self.peer.label, start);
        let since = silent.filter(|since| !self.has_received_since(*since)).unwrap_or(start);
        let mut advance = Advance::since(since, self);
        loop {
            self.write_all(&mut advance);
            self.closing.store(true, Ordering::Release);
            let parting = self.part(&mut advance);
            if parting == Parting::Answered {
                self.net.silences().answered(&self.peer.label);
                return;
            }
            self.net.silences().unanswered(&self.peer.label, start, Instant::now());
            if parting != Parting::Silent || !self.recovery || self.health.is_failed() {
                return;
            }
            self.recover(&mut advance);
        }
    }

    /// Nothing comes back on some stream. It is recovered as at any other time, and its data is resent.
    fn recover(&self, advance: &mut Advance) {
        self.closing.store(false, Ordering::Release);
        self.begin_watch();
        for index in self.away() {
            self.repair(index, &io::ErrorKind::TimedOut.into());
        }
        let over = || self.health.is_failed() || self.health.is_peer_done();
        while !over() && (self.is_in_doubt() || self.awaits_answer()) && !self.is_spent(advance) {
            self.begin_watch();
            std::thread::sleep(CLOSE_POLL);
        }
    }

    /// Whether closes towards this peer have used up their time: nothing has been acknowledged for too long. With
    /// unacknowledged bytes the limit is `TOWLINE_PEER_TIMEOUT`, and not less than a recovery takes.
    fn is_spent(&self, advance: &mut Advance) -> bool {
        let pause = advance.pause(self);
        if pause < CLOSE_PATIENCE {
            return false;
        }
        let has_all = !self.recovery || self.state().core.is_idle();
        let least = if self.is_answered_within(pause * 3 / 4) { CLOSE_PATIENCE } else { CLOSE_RECOVERY };
        // If the receiver has everything but the goodbye, the kernel keeps sending that after the close.
        pause >= if has_all { CLOSE_PATIENCE * 3 / 2 } else { self.net.config.peer_timeout.max(least) }
    }

    /// Whether the peer's kernel has recently answered on every stream that waits for it, so that only the peer's
    /// process does not read. This host's kernel then sends probes at intervals that double.
    fn is_answered_within(&self, time: Duration) -> bool {
        !self.is_in_doubt() && !self.samples().any(|sample| sample.outstanding && sample.silent >= time)
    }

    /// Waits until the kernel has taken everything.
    fn write_all(&self, advance: &mut Advance) {
        let start = Instant::now();
        while !self.is_spent(advance) && !self.health.is_failed() && !self.health.is_peer_done() {
            self.run(self.control_stream(), READ | WRITE);
            let written = |stream: &Stream<Io>| stream.with_io(|io| io.out.is_none()).unwrap_or(true);
            if !self.state().core.has_ready() && self.streams.iter().all(written) {
                return;
            }
            if start.elapsed() > PROBE_AFTER {
                self.begin_watch();
            }
            rest(start);
        }
    }

    /// Says goodbye on each stream, behind everything else, since the receiver reads them in any order. Waits until the
    /// peer's kernel and the receiver have all data. Data that only the peer's kernel has is lost if the receiver gives
    /// up the path at that moment.
    fn part(&self, advance: &mut Advance) -> Parting {
        let start = Instant::now();
        self.queue_goodbyes();
        let gone = |io: &mut Io| end_if_written(io) && wire::unsent(io.sock.as_raw_fd()) == 0;
        let mut answered = false;
        while !self.health.is_failed() {
            for index in 0..MAX_STREAMS {
                self.run(index, READ | WRITE);
            }
            // Streams that have ended in the meantime answer nothing.
            let there = self.health.live() > 0 || self.health.is_peer_done();
            let has_it = || !self.recovery || self.health.is_peer_done() || self.state().core.is_idle();
            let is_sent = self.streams.iter().all(|stream| stream.with_io(gone).unwrap_or(true));
            if is_sent && has_it() {
                answered = there;
                break;
            }
            if self.is_spent(advance) {
                return Parting::Spent;
            }
            if start.elapsed() > PROBE_AFTER {
                if self.awaits_answer() || self.is_in_doubt() {
                    return Parting::Silent;
                }
                if is_sent && advance.pause(self).min(start.elapsed()) > CLOSE_PATIENCE + self.answering() {
                    break;
                }
            }
            rest(start);
        }
        // A stream that died in the meantime lost its unacknowledged data, and the remaining streams no longer accept
        // data for a resend.
        match self.health.is_peer_done() || !self.is_in_doubt() {
            false => Parting::Silent,
            true if answered => Parting::Answered,
            true => Parting::Late,
        }
    }

    /// Queues a goodbye behind everything else, once for each stream: nothing may follow it.
    fn queue_goodbyes(&self) {
        let total = self.state().core.next_number() + 1;
        let goodbye = Header { total, ..Header::of(Type::Bye, 0) }.encode();
        for stream in &self.streams {
            stream.with_io(|io| {
                if !std::mem::replace(&mut io.parted, true) {
                    io.control.extend_from_slice(&goodbye);
                }
            });
        }
    }

    /// Ends the connection to a peer that has not answered for too long. This side says goodbye and waits for nothing.
    /// The kernel continues to send the data that it has accepted, and a peer that resumes one day gets all of that.
    /// With requests in flight it is an abort.
    pub(crate) fn leave(&self) {
        if self.requests.outstanding() > 0 || self.health.is_failed() {
            return self.abandon();
        }
        self.closing.store(true, Ordering::Release);
        self.queue_goodbyes();
        for (index, stream) in self.streams.iter().enumerate() {
            self.run(index, READ | WRITE);
            stream.with_io(end_if_written);
        }
        self.finish();
    }

    /// What the distance adds to the time that an answer takes.
    fn answering(&self) -> Duration {
        self.samples().map(|sample| sample.answering()).max().unwrap_or_default()
    }

    /// Whether something was lost with a stream, or waits to be resent.
    fn is_in_doubt(&self) -> bool {
        let core = &self.state().core;
        core.has_ready() || core.unfenced().iter().any(|(index, _)| core.in_doubt(*index))
    }

    /// Streams that must reconnect so that lost data can be resent: all for which the receiver has not reported its
    /// count, or else any.
    fn away(&self) -> Vec<usize> {
        let core = &self.state().core;
        let unfenced: Vec<usize> = core.unfenced().iter().map(|(index, _)| *index).collect();
        let any = (0..MAX_STREAMS).find(|index| core.is_down(*index) && (*index == 0 || core.epoch(*index) > 0));
        if unfenced.is_empty() { any.into_iter().collect() } else { unfenced }
    }

    pub(super) fn has_unfenced(&self) -> bool {
        !self.state().core.unfenced().is_empty()
    }

    /// Whether a stream waits for the peer's kernel longer than usual.
    fn awaits_answer(&self) -> bool {
        self.samples().any(|sample| sample.probes > 0)
    }
}

/// Whether the kernel has taken everything, the goodbye too. The end of the stream then wakes the receiver's control
/// thread, so that the acknowledgement is not delayed.
fn end_if_written(io: &mut Io) -> bool {
    let is_written = io.out.is_none() && io.control.is_empty();
    if is_written {
        let _ = io.sock.shutdown(Shutdown::Write);
    }
    is_written
}
