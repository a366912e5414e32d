//! How a sender ends its connection: what it reported done reaches the peer first.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Io, SendConn};
use crate::os::error::Error;
use crate::session::frame::MAX_STREAMS;
use crate::session::frame::{Header, Type};
use crate::session::watch::{self, Sight};
use crate::session::wire;
use crate::tcp::stream::{READ, Stream, WRITE};
use crate::tcp::streams;

/// How long an orderly close waits for the peer's kernel to take what was sent.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// After this long without an answer it looks whether a path has died.
const CLOSE_DOUBT: Duration = Duration::from_millis(500);

/// How long it waits when a path has died at that moment: until that is noticed, and what was on it has travelled again.
/// That takes 3 s, and as long as all ways are down. What was reported done is worth the wait; a peer that is dead ends it.
/// All closes towards a peer process that does not answer share this time.
const CLOSE_MENDING: Duration = Duration::from_secs(20);

/// The same where the receiver has everything but the goodbye: the kernel goes on sending that after the close.
const CLOSE_IDLE: Duration = Duration::from_secs(3);

/// How a goodbye went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parting {
    /// The peer's kernel has it all.
    Answered,
    /// It took too long, and nothing says that anything is lost.
    Late,
    /// Nothing comes back, or something was lost with a stream.
    Silent,
    /// Closes towards this peer have used up their time.
    Spent,
}

impl SendConn {
    /// Ends the connection. With nothing outstanding, everything that was reported done reaches the peer; with
    /// requests in flight it is an abort. No thread touches NCCL's buffers after it returns.
    pub fn close(&self) {
        if self.requests.outstanding() == 0 && !self.health.is_failed() {
            self.say_goodbye();
        } else {
            self.closing.store(true, Ordering::Release);
            let error = Error::remote("the sending side closed the connection with transfers in flight");
            self.health.fail_telling(error.clone(), || self.tell_failure(&error));
        }
        self.quiesce();
        tracing::debug!(target: crate::os::log::NET, "closed the connection to {}: {}", self.peer, self.counters);
    }

    /// Lets everything that was reported done reach the peer, and says goodbye. All within bounds; they are wider when a path
    /// has died at this moment.
    fn say_goodbye(&self) {
        let start = Instant::now();
        // A peer that has answered on this connection since is not silent any more.
        let silent = self.net.silences().since(&self.peer.label, start);
        let since =
            silent.filter(|since| !streams::is_heard_since(*since, &self.streams, |io| &io.sock)).unwrap_or(start);
        self.write_all((start + CLOSE_PATIENCE).min(since + CLOSE_MENDING));
        self.closing.store(true, Ordering::Release);
        let parting = self.part(start, since);
        if parting == Parting::Answered {
            self.net.silences().answered(&self.peer.label);
            return;
        }
        let since = self.net.silences().unanswered(&self.peer.label, start);
        if parting == Parting::Silent && self.recovery && !self.health.is_failed() {
            // Nothing comes back on some stream. It is mended as at any other time, and what was on it travels again.
            self.closing.store(false, Ordering::Release);
            self.begin_watch();
            let away = self.away();
            for index in away {
                self.repair(index, &io::ErrorKind::TimedOut.into());
            }
            let deadline = since + self.most();
            let over = || self.health.is_failed() || self.health.is_peer_done();
            while Instant::now() < deadline && !over() && (self.is_in_doubt() || self.is_asking()) {
                std::thread::sleep(watch::SOON / 10);
            }
            self.write_all(deadline);
            self.closing.store(true, Ordering::Release);
            let is_back = self.health.live() > 0 && !self.is_asking();
            let since = if is_back { Instant::now() } else { since };
            if self.part(Instant::now(), since) == Parting::Answered {
                self.net.silences().answered(&self.peer.label);
            }
        }
    }

    /// How long closes towards this peer may wait in all.
    fn most(&self) -> Duration {
        let has_all = !self.recovery || self.state().core.is_idle();
        if has_all { CLOSE_IDLE } else { CLOSE_MENDING }
    }

    /// Waits until the kernel has taken everything.
    fn write_all(&self, deadline: Instant) {
        while Instant::now() < deadline && !self.health.is_failed() {
            self.run(self.voice(), READ | WRITE);
            let written = |stream: &Stream<Io>| stream.peek(|io| io.out.is_none()).unwrap_or(true);
            if !self.state().core.has_ready() && self.streams.iter().all(written) {
                return;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Says goodbye on each stream, behind everything else, since the receiver reads them in any order. Waits until the
    /// peer's kernel has it all, and the receiver too: what only its kernel has is lost with a path that it gives up just
    /// then. `since`: when closes towards this peer began to wait.
    fn part(&self, start: Instant, since: Instant) -> Parting {
        let total = self.state().core.next_number() + 1;
        for index in 0..MAX_STREAMS {
            self.queue_control(index, Header { total, ..Header::of(Type::Bye, 0) }, &[]);
        }
        let gone = |io: &mut Io| {
            let written = io.out.is_none() && io.control.is_empty();
            if written {
                // Wakes the receiver's keeper, which sees to it that the acknowledgement is not delayed.
                let _ = io.sock.shutdown(Shutdown::Write);
            }
            written && wire::unsent(io.sock.as_raw_fd()) == 0
        };
        let mut answered = false;
        while start.elapsed() < CLOSE_PATIENCE && !self.health.is_failed() {
            for index in 0..MAX_STREAMS {
                self.run(index, READ | WRITE);
            }
            // Streams that have ended meanwhile answer nothing.
            let there = self.health.live() > 0 || self.health.is_peer_done();
            let has_it = || !self.recovery || self.health.is_peer_done() || self.state().core.is_idle();
            if self.streams.iter().all(|stream| stream.peek(gone).unwrap_or(true)) && has_it() {
                answered = there;
                break;
            }
            if since.elapsed() > self.most() {
                return Parting::Spent;
            }
            if start.elapsed() > CLOSE_DOUBT && self.is_asking() {
                return Parting::Silent;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        // A stream that died meanwhile took with it what nobody has acknowledged, and those that are left are closed for
        // what must travel again.
        match self.health.is_peer_done() || !self.is_in_doubt() {
            false => Parting::Silent,
            true if answered => Parting::Answered,
            true => Parting::Late,
        }
    }

    /// Whether something was lost with a stream, or waits to travel again.
    fn is_in_doubt(&self) -> bool {
        let core = &self.state().core;
        core.has_ready() || core.unfenced().iter().any(|(index, _)| core.in_doubt(*index))
    }

    /// Streams that must come back so that what was lost can travel again: all of which the receiver has not said how far
    /// they came, or else any.
    fn away(&self) -> Vec<usize> {
        let core = &self.state().core;
        let adrift: Vec<usize> = core.unfenced().iter().map(|(index, _)| *index).collect();
        let any = (0..MAX_STREAMS).find(|index| core.is_down(*index) && (*index == 0 || core.epoch(*index) > 0));
        if adrift.is_empty() { any.into_iter().collect() } else { adrift }
    }

    pub(super) fn is_adrift(&self) -> bool {
        !self.state().core.unfenced().is_empty()
    }

    /// Whether a stream waits for the peer's kernel longer than usual.
    fn is_asking(&self) -> bool {
        self.streams
            .iter()
            .any(|stream| stream.peek(|io| Sight::of(&io.sock)).flatten().is_some_and(|sight| sight.asked > 0))
    }
}
