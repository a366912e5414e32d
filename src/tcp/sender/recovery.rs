//! Streams that end and reconnect: which thread decides, what the sender requests from the receiver, and what the
//! control thread polls.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{SendConn, State};
use crate::engine::poller::Progress;
use crate::os::error::{Error, Result};
use crate::session::dialer;
use crate::session::frame::{Header, MAX_STREAMS, Type};
use crate::session::lifeline::{PeerInquiry, Terms, Verdict};
use crate::session::liveness::{self, Probes};
use crate::session::owner::Streams;
use crate::session::peer::{Broken, lost};
use crate::tcp::connection::lock;
use crate::tcp::delivery::{Arrived, End, Lesson};
use crate::tcp::streams::Checked;

impl SendConn {
    /// A stream died under a connection that can continue. Queries the receiver, over every stream, how many of its
    /// frames were received, and starts to reconnect it.
    pub(super) fn repair(&self, index: usize, error: &io::Error) {
        tracing::info!(target: crate::os::log::NET, "stream {index} to {} broke ({error}); connecting it again", self.peer);
        if self.health.live() > 0 && self.pairs() > 1 && self.ended.is_recent(Instant::now()) {
            self.suspect_peer(error);
        }
        // The query also names streams that died before, and goes over every stream: frames on this one may be lost,
        // and others may not work either.
        let fences = self.fences();
        (0..MAX_STREAMS).for_each(|other| self.send_fences(other, &fences));
        if self.health.live() == 0 {
            self.wait_for_peer(error);
        }
        // The checks continue until all streams are back.
        self.begin_watch();
        if let Some(me) = self.me.upgrade() {
            let me: Arc<dyn Streams> = me;
            dialer::repair(Arc::clone(&self.net), &me, index);
        }
    }

    /// An epoch of a stream ended. Returns whether the connection continues. It does not when streams connect again and
    /// again, and nothing arrives over them for longer than the peer may stay away.
    pub(super) fn still_delivers(&self, index: usize, error: &io::Error) -> bool {
        let (in_doubt, arrived) = {
            let state = self.state();
            let arrived: [Arrived; MAX_STREAMS] = std::array::from_fn(|index| state.core.arrived(index));
            (state.core.in_doubt(index), arrived)
        };
        arrived.iter().enumerate().for_each(|(index, arrived)| self.note_arrived(index, *arrived, None));
        // An interface that is down loses small packets as well.
        if !in_doubt || error.kind() == io::ErrorKind::NetworkDown {
            return true;
        }
        let (how, patience) = match error.kind() {
            io::ErrorKind::TimedOut => {
                (End::Silent(liveness::silence_of(error).unwrap_or_default()), self.net.config.peer_timeout)
            }
            _ => (End::Cut, self.net.config.reconnect_timeout),
        };
        let over = self.over_rail(index);
        // The lock is released before anything else: a stream that is being connected takes it together with the state.
        let lesson = lock(&self.own.deliveries).ended(index, Instant::now(), how, patience);
        match lesson {
            Lesson::None => true,
            Lesson::LeftOut => {
                if self.pairs() > 1 {
                    tracing::warn!(target: crate::os::log::NET, "small packets pass to {}{over}, full ones do not: look at the MTU of the path, and at firewalls on it; this rail is left out", self.peer);
                }
                true
            }
            Lesson::Over(time) => {
                self.fail_silently(in_vain(time).with_peer(&self.peer));
                // Frames behind stuck data do not arrive, but the end of the stream does. The receiver then calls this
                // side ([`crate::session::lifeline`]).
                for io in self.streams.iter().filter_map(crate::tcp::stream::Stream::end) {
                    liveness::close_hard(&io.sock);
                    self.health.stream_down();
                }
                false
            }
        }
    }

    /// This much of stream `index` has arrived, by segments of that size if it is known.
    fn note_arrived(&self, index: usize, arrived: Arrived, using: Option<u32>) {
        let small = lock(&self.own.deliveries).reached(index, arrived, using);
        let Some((pair, segment)) = small else { return };
        let Some(address) = self.link.remote.get(pair % self.link.remote.len().max(1)) else { return };
        if self.net.remember_segment(address.ip(), segment) {
            let over = self.over_rail(index);
            tracing::warn!(target: crate::os::log::NET, "small packets pass to {}{over}, full ones do not: look at the MTU of the path; going on with segments of {segment} bytes", self.peer);
        }
    }

    /// The rail of stream `index`, for a message, if there are several.
    fn over_rail(&self, index: usize) -> String {
        let (pair, rails) = (self.preferred_pair(index) % self.pairs(), &self.link.local);
        if rails.len() < 2 { String::new() } else { format!(" over {}", rails[pair % rails.len()].name) }
    }

    /// The FENCE frames for the receiver: how many frames of each lost stream has it received?
    pub(super) fn fences(&self) -> Vec<Header> {
        let fence =
            |(dead, epoch)| Header { order: dead as u64, offset: u64::from(epoch), ..Header::of(Type::Fence, 0) };
        self.state().core.unfenced().into_iter().map(fence).collect()
    }

    /// Sends FENCE frames to the receiver over stream `on`.
    pub(super) fn send_fences(&self, on: usize, fences: &[Header]) {
        fences.iter().for_each(|fence| self.queue_control(on, *fence));
        self.streams[on].kick();
    }

    /// The receiver has fenced a stream. It died on both sides, or only on the receiver's.
    pub(super) fn on_fenced(&self, header: &Header) -> Result<()> {
        let (index, epoch) = crate::session::peer::fenced_epoch(header)?;
        {
            let state = self.state();
            // A report about an epoch that is already over is outdated.
            if epoch != state.core.epoch(index) {
                return Ok(());
            }
            if state.core.is_live(index) {
                drop(state);
                // This thread or another one holds the stream. The control thread holds none, so it closes the stream.
                lock(&self.own.condemned).push((index, epoch, header.total));
                self.call_control_thread();
                return Ok(());
            }
        }
        self.fenced(index, epoch, header.total)
    }

    /// The receiver reports how many frames of a dead stream's epoch it received. The rest is resent, over any stream
    /// with room.
    ///
    /// # Errors
    /// When it names frames that were never sent.
    pub(super) fn fenced(&self, index: usize, epoch: u16, frames: u64) -> Result<()> {
        {
            let mut state = self.state();
            let State { core, payloads, done, copies, .. } = &mut *state;
            core.fenced(index, epoch, frames, done)?;
            self.chunks_end(core, payloads);
            self.end_messages(payloads, copies, done);
        }
        for stream in &self.streams {
            stream.kick();
        }
        Ok(())
    }

    /// All streams are gone. How long the peer may stay away depends on how the streams ended. Silence may be an
    /// outage, after which everything continues as before. A reset or an end of file came over a working path.
    fn wait_for_peer(&self, error: &io::Error) {
        let now = Instant::now();
        let terms = Terms {
            patience: self.net.patience(error),
            most: self.net.config.peer_timeout,
            refused_for: self.ended.refused_for(now, error),
            some_refused_for: self.ended.some_refused_for(now),
            paths: self.pairs(),
        };
        let lost = lost(error).with_peer(&self.peer);
        let mut inquiry = lock(&self.inquiry);
        if inquiry.as_ref().is_none_or(PeerInquiry::is_suspicion) {
            *inquiry = Some(PeerInquiry::new(now, terms, lost));
        }
    }

    /// A stream ended like those of a dying process, and others are still connected as far as is known. To be called
    /// before anything is sent on the others: an answer to that then arrives after the suspicion began, and refutes it.
    fn suspect_peer(&self, error: &io::Error) {
        let lost = lost(error).with_peer(&self.peer);
        // The rails of a stream on another pair are not stored.
        let left = (0..MAX_STREAMS).filter(|index| self.is_live(*index) && !self.is_on_other_pair(*index));
        let left: Vec<usize> = left.map(|index| self.preferred_pair(index) % self.pairs()).collect();
        let suspicion = || PeerInquiry::suspected(Instant::now(), &self.ended, self.pairs(), &left, lost);
        lock(&self.inquiry).get_or_insert_with(suspicion);
    }

    /// Gives up that epoch of a stream, if it has not ended by itself, and the next one has not begun.
    pub(super) fn lose_epoch(&self, index: usize, epoch: u16, error: io::Error) {
        let wanted =
            || Some(self.state()).filter(|state| state.core.epoch(index) == epoch && state.core.is_live(index));
        if let Some(Some(io)) = self.streams[index].take_if(wanted) {
            liveness::close_hard(&io.sock);
            self.broken(index, io, Broken::Lost(error));
        }
    }

    /// Gives up a stream that has not ended by itself.
    pub(super) fn lose(&self, index: usize, error: io::Error) {
        if let Some(io) = self.streams[index].take() {
            liveness::close_hard(&io.sock);
            self.broken(index, io, Broken::Lost(error));
        }
    }
}

/// Streams connect, and deliver nothing.
fn in_vain(time: Duration) -> Error {
    Error::remote(format!("connections come up, and for {:.0} s nothing arrived over them", time.as_secs_f64()))
        .with_hint("small packets pass, full ones do not: look at the MTU of the path (ping -M do -s SIZE), and at firewalls and proxies on it")
}

impl SendConn {
    /// The control thread's part.
    pub(super) fn do_chores(&self) -> Progress {
        let condemned = std::mem::take(&mut *lock(&self.own.condemned));
        for (index, epoch, frames) in condemned {
            self.lose_epoch(index, epoch, io::Error::new(io::ErrorKind::TimedOut, "the receiver gave it up"));
            // Does nothing to an epoch that is over.
            if let Err(error) = self.fenced(index, epoch, frames) {
                self.fail(error.with_peer(&self.peer));
            }
        }
        // A receiver that has said goodbye on one stream may have lost data on another. Nothing is recovered any more,
        // but a stream on which nothing comes back is still given up, and when none is left NCCL's thread knows the
        // result of the requests.
        let is_left = self.health.is_peer_done();
        let is_idle = || self.requests.outstanding() == 0 || self.health.live() == 0;
        if self.closing.load(Ordering::Acquire) || self.health.is_failed() || is_left && is_idle() {
            self.chores.end();
            return Progress::default();
        }
        let now = Instant::now();
        self.drop_refuted();
        let judge = |inquiry: &mut PeerInquiry| (inquiry.verdict(now), inquiry.error().clone(), inquiry.is_suspicion());
        // The receiver's process may have ended since, which does not show what it had received.
        let judged = lock(&self.inquiry).as_mut().filter(|_| !is_left).map(judge);
        let decided_at = match judged {
            Some((Verdict::Gone, error, suspicion)) if suspicion || self.health.live() == 0 => {
                self.fail_silently(error);
                self.chores.end();
                return Progress::default();
            }
            Some((Verdict::Wait(at), ..)) => Some(at),
            _ => None,
        };
        let soonest =
            |check: Option<Instant>| Progress { moved: false, again: decided_at.into_iter().chain(check).min() };
        if !self.chores.is_ticking() {
            return soonest(None);
        }
        if let Err(due) = self.chores.is_due(now) {
            return soonest(Some(due));
        }
        let mut in_doubt = [false; MAX_STREAMS];
        let mut arrived = [Arrived::default(); MAX_STREAMS];
        for index in 0..MAX_STREAMS {
            let mut state = self.state();
            // A thread that sends a message whose request is already done does not call the core.
            self.settle_claims(&mut state, index);
            (in_doubt[index], arrived[index]) = (state.core.in_doubt(index), state.core.arrived(index));
        }
        // While a stream is disconnected the others may not work either, and the receiver may have noticed more than
        // this side.
        let unfenced = self.has_unfenced() || self.own.repairs.load(Ordering::SeqCst) != 0;
        let allowed = lock(&self.own.deliveries).silence(now);
        let seldom = Probes::within(self.net.config.peer_timeout, true);
        let mut segments = [None; MAX_STREAMS];
        let checked = self.check_streams(now, |index, sock, sample, monitor| {
            segments[index] = Some(sample.segment);
            let in_doubt = unfenced || in_doubt[index] && self.requests.outstanding() > 0;
            monitor.probe(sock, sample, in_doubt, &Probes::OFTEN, &seldom);
        });
        (0..MAX_STREAMS).for_each(|index| self.note_arrived(index, arrived[index], segments[index]));
        let Some(Checked { mut silent, outstanding, next }) = checked else { return Progress::default() };
        // Without recovery this ends the connection, so it must be certain.
        let limit = self.net.config.peer_timeout;
        silent.retain(|(_, silence)| self.recovery && *silence >= allowed || *silence >= limit);
        self.share_fate(&mut silent);
        for (index, silence) in silent {
            self.lose(index, liveness::silent(silence));
        }
        if !outstanding && !unfenced {
            // From now on only the kernel's own slow probes watch the streams, and the kernel decides.
            for (index, stream) in self.streams.iter().enumerate() {
                stream.with_io(|io| lock(&self.monitors)[index].stop_probing(&io.sock, &seldom));
            }
            self.chores.end();
            return Progress::default();
        }
        soonest(self.chores.again(now, next).again)
    }
}
