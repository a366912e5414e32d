//! Streams that end and reconnect: what is reported about them, and how long this side waits for the sender.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Fence, Io, RecvConn};
use crate::engine::poller::Progress;
use crate::os::log::NET;
use crate::session::dialer;
use crate::session::frame::MAX_STREAMS;
use crate::session::lifeline::{CUT_PATIENCE, CUT_SOMEWHERE, PeerInquiry, Terms, Verdict, is_cut};
use crate::session::liveness::{self, TcpSample};
use crate::session::owner::ListeningSide;
use crate::session::peer::{fenced, lost};
use crate::tcp::connection::lock;
use crate::tcp::stream::READ;
use crate::tcp::streams::Checked;

impl RecvConn {
    /// A stream was lost. The sender connects it again, but may not have noticed the loss yet.
    pub(super) fn await_return(&self, index: usize, epoch: u16, left: usize, error: &io::Error) {
        tracing::info!(target: NET, "a stream from {} broke ({error}); waiting for it to come back", self.peer);
        // If no stream is left to send this on, the next one that returns carries it.
        lock(&self.own.fences).push(Fence { index, epoch, requested: false });
        if left == 0 && self.is_missed() {
            return self.wait_for_peer(error);
        }
        if self.is_missed() && self.link.remote.len() > 1 && self.ended.is_recent(Instant::now()) {
            self.suspect_peer(error);
        }
        self.begin_watch();
        self.call_control_thread();
    }

    /// Whether the sender's absence matters. Once the sender has said goodbye on a stream, it matters only to requests
    /// that still wait for data that may arrive.
    fn is_missed(&self) -> bool {
        !self.health.is_peer_done() || self.requests.outstanding() > 0 && !self.has_everything()
    }

    /// Remembers whether the end of a stream, or what came before it, indicates trouble in the network. When a process
    /// dies all its streams end at once, without such signs.
    pub(super) fn note_trouble(&self, io: &Io, error: &io::Error) {
        if !is_cut(error) || TcpSample::of(&io.sock).is_some_and(|sample| sample.probes > 0) {
            *lock(&self.own.trouble) = Some(Instant::now());
        }
    }

    /// All streams are gone. The sender connects again if it is alive and has noticed. A lifeline call shows whether it
    /// is alive ([`crate::session::lifeline`]). How much the sender's silence, or a refusal, proves depends on how the
    /// streams ended. An end of file or a reset came over a working path, unless the network is in trouble.
    pub(super) fn wait_for_peer(&self, error: &io::Error) {
        let now = Instant::now();
        // A process that dies takes all its streams with it at once.
        let one_by_one = lock(&self.monitors).iter().any(|monitor| monitor.is_long_away(now));
        // For ten seconds a sign of trouble in the network explains why the peer is not connected.
        let recently = |at: Instant| now - at < Duration::from_secs(10);
        let in_trouble = one_by_one || lock(&self.own.trouble).is_some_and(recently);
        let refused_for = match self.ended.refused_for(now, error) {
            Some(CUT_PATIENCE) if in_trouble && !self.ended.is_end_of_file(now) => Some(CUT_SOMEWHERE),
            other => other,
        };
        let paths = self.link.remote.len();
        let quick = paths == 0 && is_cut(error) && !in_trouble;
        let patience = if quick { CUT_PATIENCE } else { self.net.patience(error) };
        let some_refused_for = self.ended.some_refused_for(now);
        let terms = Terms { patience, most: self.net.config.peer_timeout, refused_for, some_refused_for, paths };
        *lock(&self.inquiry) = Some(PeerInquiry::new(now, terms, lost(error).with_peer(&self.peer)));
        // Another thread may have reconnected a stream before the loss was reported.
        if self.health.live() > 0 {
            *lock(&self.inquiry) = None;
            return;
        }
        self.call_control_thread();
        self.call_peer(now);
    }

    /// A stream ended like those of a dying process, and others are still connected as far as is known. To be called
    /// before anything is sent on the others: an answer to that then arrives after the suspicion began, and refutes it.
    fn suspect_peer(&self, error: &io::Error) {
        let now = Instant::now();
        {
            let mut inquiry = lock(&self.inquiry);
            if inquiry.is_some() {
                return;
            }
            let lost = lost(error).with_peer(&self.peer);
            *inquiry = Some(PeerInquiry::suspected(now, &self.ended, self.link.remote.len(), &[], lost));
        }
        self.call_peer(now);
    }

    /// Calls the sender over all paths.
    fn call_peer(&self, since: Instant) {
        if let Some(me) = self.me.upgrade() {
            let me: Arc<dyn ListeningSide> = me;
            (0..self.link.remote.len()).for_each(|pair| dialer::call(Arc::clone(&self.net), &me, pair, since));
        }
    }

    /// Checks the streams when it is time. Returns when the next check is due.
    fn check(&self, now: Instant) -> Option<Instant> {
        if let Err(due) = self.chores.is_due(now) {
            return Some(due);
        }
        let Checked { mut silent, outstanding, next } = self.check_streams(now, |_, _, _, _| ())?;
        self.share_fate(&mut silent);
        if !silent.is_empty() {
            self.lose_silent(&silent);
        }
        if !outstanding {
            self.chores.end();
            return None;
        }
        self.chores.again(now, next).again
    }

    /// Gives up streams on which nothing comes back. The last ones stay until the peer counts as gone: the sender
    /// reconnects, and if the path recovers first, everything continues as before. The exception: other streams have
    /// just ended like those of a dying process. Then the sender is called over all rails, including these.
    fn lose_silent(&self, silent: &[(usize, Duration)]) {
        let now = Instant::now();
        *lock(&self.own.trouble) = Some(now);
        if self.recovery && (silent.len() < self.health.live() || self.ended.is_recent(now)) {
            for &(index, silence) in silent {
                self.lose(index, &liveness::silent(silence));
            }
            let longest = silent.iter().map(|(_, silence)| *silence).max().unwrap_or_default();
            if self.health.live() == 0 && self.is_missed() {
                self.wait_for_peer(&liveness::silent(longest));
            }
        } else if let Some((_, silence)) = silent.iter().find(|(_, silence)| *silence >= self.net.config.peer_timeout) {
            self.fail_silently(lost(&liveness::silent(*silence)).with_peer(&self.peer));
        }
    }

    /// Gives up a stream while others are connected, and notifies the sender, which may not know.
    pub(super) fn lose(&self, index: usize, error: &io::Error) {
        // First reads the bytes that have arrived already: their sender may have closed, since this host's kernel has
        // acknowledged them. This waits for the stream: the thread that holds it now may not poll again before the
        // stream is taken away. 64 shares are more than a socket holds.
        for _ in 0..64 {
            if !self.run_held(Some(self.streams[index].lock()), index, READ) {
                break;
            }
        }
        let epoch = self.state().core.epoch(index);
        self.streams[index].with_io(|io| liveness::close_hard(&io.sock));
        let Some(frames) = self.fence_stream(index, epoch) else { return };
        tracing::info!(target: NET, "a stream from {} broke ({error}); waiting for it to come back", self.peer);
        self.send_fenced(index, epoch, frames);
    }

    /// Reports how many frames of a fenced stream were received, and again what may have been lost on it. The report
    /// goes over every stream, since some of them may not work either.
    pub(super) fn send_fenced(&self, index: usize, epoch: u16, frames: u64) {
        let fenced = std::iter::once(fenced((index, epoch, frames)));
        let state = self.state();
        let frames: Vec<u8> = fenced.chain(state.core.announcements()).flat_map(|header| header.encode()).collect();
        drop(state);
        self.queue_everywhere(&frames);
    }

    /// Ends the given epoch of a stream for good: nothing more is received from it. Returns how many frames were, or
    /// None when that epoch is already over.
    pub(crate) fn fence_stream(&self, index: usize, epoch: u16) -> Option<u64> {
        if index >= MAX_STREAMS {
            return None;
        }
        // The stream may have reconnected in the meantime, or may be reconnecting at this moment.
        let wanted = || Some(self.state()).filter(|state| !state.core.has_outlived(index, epoch));
        if let Some(io) = self.streams[index].take_if(wanted)? {
            self.health.stream_down();
            self.end_stream_epoch(index, io.epoch, true, None);
        }
        let frames = self.state().core.fence(index, epoch);
        // Acknowledgements that this stream carried for other streams may be lost, so those streams send their own.
        for (index, stream) in self.streams.iter().enumerate() {
            if self.state().core.is_ack_due(index) {
                stream.kick();
            }
        }
        frames
    }

    /// Whether no request waits for this connection's recovery.
    pub(crate) fn is_over(&self) -> bool {
        self.closing.load(Ordering::Acquire) || self.health.is_failed()
    }
}

impl RecvConn {
    /// The control thread's part: fences, a deadline for the peer's return, a check of the streams.
    pub(super) fn do_chores(&self) -> Progress {
        let fences = std::mem::take(&mut *lock(&self.own.fences));
        for Fence { index, epoch, requested } in fences {
            if let Some(frames) = self.fence_stream(index, epoch) {
                // A stream that ended on this side was judged by its end. A stream that the sender gives up although it
                // works on this side did not deliver.
                if requested {
                    *lock(&self.own.trouble) = Some(Instant::now());
                }
                self.send_fenced(index, epoch, frames);
            }
        }
        if self.is_over() {
            self.chores.end();
            return Progress::default();
        }
        let now = Instant::now();
        self.drop_refuted();
        if !self.is_missed() {
            lock(&self.inquiry).take_if(|inquiry| inquiry.is_suspicion());
        }
        let judged = lock(&self.inquiry).as_mut().map(|inquiry| (inquiry.verdict(now), inquiry.error().clone()));
        let deadline = match judged {
            Some((Verdict::Gone, error)) => {
                self.fail_silently(error);
                self.chores.end();
                return Progress::default();
            }
            Some((Verdict::Wait(deadline), _)) => Some(deadline),
            None => None,
        };
        let check = if self.chores.is_ticking() { self.check(now) } else { None };
        Progress { moved: false, again: deadline.into_iter().chain(check).min() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::Shutdown;

    use crate::os::config::Config;
    use crate::session::frame::{HEADER, Header, Type};
    use crate::session::link::Link;
    use crate::session::loopback;
    use crate::session::seal::Seal;

    /// The thread that notices a break and the thread that admits the stream again both end the previous epoch, in
    /// either order. The next epoch may then fail to begin, for example when the kernel refuses to watch its socket.
    #[test]
    fn a_sender_whose_return_fails_half_way_is_waited_for_only_so_long() {
        let net = loopback::net(Config { reconnect_timeout: Duration::from_millis(100), ..Config::default() });
        // There is no listening process to call: this side would wait for a peer that accepts a call, since it is
        // alive.
        let link = Link { remote: Vec::new(), ..loopback::link(&loopback::deaf()) };
        let conn = RecvConn::new(net, link, loopback::peer());
        let (ours, _theirs) = loopback::sockets();
        let registration = conn.register(0, &ours).unwrap();
        conn.add_stream(0, 0, registration, ours, Seal::Plain);
        let mut buffer = [0_u8; 8];
        // SAFETY: the buffer outlives the request, and there is no profiler.
        let posted = unsafe { conn.irecv(&[(buffer.as_mut_ptr(), 8, 0)], &[std::ptr::null_mut()]) };
        let ticket = posted.unwrap().expect("a slot is free");
        {
            let _open = conn.hold_open();
            assert_eq!(conn.prepare_join(0, 1), Some(0), "the stream may come back");
            assert!(conn.test(ticket).unwrap().is_none(), "it may still");
        }
        loopback::wait_until("the receive waits for ever", || conn.test(ticket).is_err());
    }

    /// A stream may have ended on this side without the sender noticing, and the frame that reported the end may be
    /// lost with the stream that carried it. Data that the sender believes to be under way would then never arrive.
    #[test]
    fn a_stream_that_comes_back_brings_word_of_those_that_ended() {
        let net = loopback::net(Config::default());
        let deaf = loopback::deaf();
        let conn = RecvConn::new(net, loopback::link(&deaf), loopback::peer());
        let join = |index: usize, epoch: u16| {
            let (ours, theirs) = loopback::sockets();
            let registration = conn.register(index, &ours).expect("it is watched");
            conn.add_stream(index, epoch, registration, ours, Seal::Plain);
            theirs
        };
        let (first, second) = (join(0, 0), join(1, 1));
        let mut buffer = [0_u8; 8];
        // SAFETY: the buffer outlives the request, and there is no profiler.
        let posted = unsafe { conn.irecv(&[(buffer.as_mut_ptr(), 8, 0)], &[std::ptr::null_mut()]) };
        posted.unwrap().expect("a slot is free");
        drop((first, second));
        loopback::wait_until("the end of both is not seen", || conn.health.live() == 0);

        let _open = conn.hold_open();
        assert_eq!(conn.prepare_join(0, 1), Some(0), "the stream may come back");
        let mut back = join(0, 1);
        back.set_read_timeout(Some(Duration::from_secs(20))).expect("it can be set");
        let mut bytes = [0; HEADER];
        back.read_exact(&mut bytes).expect("a frame about the other");
        let header = Header::decode(&bytes).expect("a frame");
        assert_eq!(
            (header.kind, header.order, header.offset, header.total),
            (Type::Fenced, 1, 1, 0),
            "its first epoch"
        );
        conn.close();
    }

    /// The poll of the first stream begins the checks of all, and does not come while that stream is away.
    #[test]
    fn streams_are_checked_also_while_the_first_is_away() {
        let net = loopback::net(Config::default());
        let deaf = loopback::deaf();
        let conn = RecvConn::new(net, loopback::link(&deaf), loopback::peer());
        let join = |index: usize| {
            let (ours, theirs) = loopback::sockets();
            let registration = conn.register(index, &ours).expect("it is watched");
            conn.add_stream(index, 0, registration, ours, Seal::Plain);
            theirs
        };
        let (first, _second) = (join(0), join(1));
        drop(first);
        loopback::wait_until("the end is not seen", || conn.health.live() == 1);
        loopback::wait_until("the checks do not end", || !conn.chores.is_ticking());
        let mut buffer = [0_u8; 8];
        // SAFETY: the buffer outlives the request, and there is no profiler.
        let posted = unsafe { conn.irecv(&[(buffer.as_mut_ptr(), 8, 0)], &[std::ptr::null_mut()]) };
        posted.expect("it lives").expect("a slot is free");
        loopback::wait_until("nothing is checked", || conn.chores.is_ticking());
        conn.close();
    }

    /// The sender sends a goodbye on each stream. The goodbye on one stream does not excuse the end of another. The
    /// sender resends the data of that other stream, and the receive waits for it. If all messages have arrived, that
    /// stream was just being connected, and it does not reconnect.
    #[test]
    fn a_goodbye_on_one_stream_excuses_the_end_of_another_only_when_all_messages_have_come() {
        for (said, excused) in [(0, false), (2, false), (1, true)] {
            let net = loopback::net(Config::default());
            let deaf = loopback::deaf();
            let conn = RecvConn::new(net, loopback::link(&deaf), loopback::peer());
            let mut theirs = Vec::new();
            for index in 0..2 {
                let (ours, there) = loopback::sockets();
                let registration = conn.register(index, &ours).unwrap();
                conn.add_stream(index, 0, registration, ours, Seal::Plain);
                theirs.push(there);
            }
            let mut buffer = [0_u8; 8];
            // SAFETY: the buffer outlives the request, and there is no profiler.
            let posted = unsafe { conn.irecv(&[(buffer.as_mut_ptr(), 8, 0)], &[std::ptr::null_mut()]) };
            let ticket = posted.unwrap().expect("a slot is free");
            let cut = theirs.pop().expect("two");
            let goodbye = Header { total: said, ..Header::of(Type::Bye, 0) };
            theirs[0].write_all(&goodbye.encode()).expect("it listens");
            theirs[0].shutdown(Shutdown::Write).expect("it listens");
            loopback::wait_until("the goodbye does not arrive", || {
                assert!(conn.test(ticket).unwrap().is_none());
                conn.health.is_peer_done() && conn.health.live() == 1
            });
            crate::session::liveness::close_hard(&cut);
            drop(cut);
            loopback::wait_until("the end of the other does not arrive", || {
                assert!(excused || conn.test(ticket).expect("the message may still come").is_none());
                conn.health.live() == 0
            });
            if excused {
                let error = conn.test(ticket).expect_err("nothing more comes");
                assert!(error.to_string().contains("peer"), "{error}");
            } else {
                for _ in 0..100 {
                    assert!(conn.test(ticket).expect("the message may still come").is_none(), "{said}");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            conn.close();
        }
    }
}
