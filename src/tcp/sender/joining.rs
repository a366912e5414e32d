//! The session's requests to a sending connection: which streams must be reconnected, and over which rails.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::SendConn;
use crate::engine::counters::Counters;
use crate::engine::poller::Registration;
use crate::os::error::{Error, Result};
use crate::os::log::Limiter;
use crate::session::dialer;
use crate::session::frame::MAX_STREAMS;
use crate::session::lifeline::PeerInquiry;
use crate::session::link::Sock;
use crate::session::liveness;
use crate::session::owner::{ConnectingSide, Joined, Streams};
use crate::tcp::connection::lock;

static NOT_THERE: Limiter = Limiter::new();

impl SendConn {
    /// How many pairs of rails there are to try.
    pub(super) fn pairs(&self) -> usize {
        self.link.pairs()
    }

    /// The pair of rails that stream `index` prefers ([`Streams`]). Not yet reduced to the number of pairs: several
    /// streams of one pair may combine its rails differently.
    pub(super) fn preferred_pair(&self, index: usize) -> usize {
        index + usize::from(lock(&self.own.preferred_pairs)[index])
    }

    /// `offset`: counted from the stream's own pair.
    fn set_preferred_pair(&self, index: usize, offset: usize) {
        lock(&self.own.preferred_pairs)[index] = (offset % self.pairs()) as u8;
    }

    /// Whether stream `index` must reconnect over the pair that it prefers. This holds while it is connected over
    /// another pair, or while other streams carry the load. The first stream is needed more urgently: short messages
    /// are faster with it.
    ///
    /// If there are several paths, a single stream is not enough: only one side may notice its end, and could not
    /// notify the other.
    fn keeps_to_preferred_pair(&self, index: usize) -> bool {
        let enough = if self.pairs() > 1 { 2 } else { 1 };
        self.health.live() >= enough && (index > 0 || self.first_live.load(Ordering::SeqCst))
    }

    /// Whether stream `index` was connected, and is not now.
    fn was_lost(&self, index: usize) -> bool {
        let core = &self.state().core;
        core.is_down(index) && (index == 0 || core.epoch(index) > 0)
    }
}

impl ConnectingSide for SendConn {
    /// A stream of a connection that is being closed may still have to reconnect.
    fn goes_on(&self) -> bool {
        !self.health.is_failed()
    }

    fn called(&self, index: usize, epoch: u16) {
        if self.recovery && index < MAX_STREAMS {
            let error = io::Error::new(io::ErrorKind::ConnectionReset, "the receiver says that it has ended there");
            self.lose_epoch(index, epoch, error);
        }
    }

    fn is_over(&self) -> bool {
        self.closing.load(Ordering::Acquire) || self.health.is_failed() || self.health.is_peer_done()
    }

    fn next_epoch(&self, index: usize) -> u16 {
        let given = &mut lock(&self.own.epochs)[index];
        let last = self.state().core.epoch(index);
        if (last.wrapping_sub(*given) as i16) > 0 {
            *given = last;
        }
        *given = given.wrapping_add(1);
        *given
    }

    /// Data that the stream's last epoch lost is resent.
    fn rejoined(self: Arc<Self>, joined: Joined) -> Result<()> {
        let Joined { stream: index, epoch, received: frames, registration, sock, seal } = joined;
        let registration = registration.map_or_else(|| self.register_socket(index, &sock), Ok)?;
        let former = self.state().core.epoch(index);
        if (epoch.wrapping_sub(former) as i16) <= 0 {
            return Err(Error::remote("another epoch of the stream was faster"));
        }
        // A stream that moves back to its own rails is still connected over others; the receiver has fenced that epoch
        // by accepting this one. If its socket is missing, another thread has just noticed a break. In the core that
        // epoch ends in any case before the next begins.
        if let Some(io) = self.streams[index].take() {
            liveness::close_hard(&io.sock);
            self.health.stream_down();
        }
        self.end_epoch(index, former, None);
        self.fenced(index, former, frames)?;
        if epoch > 1 || index == 0 {
            Counters::bump(&self.counters.reconnects);
            tracing::info!(target: crate::os::log::NET, "stream {index} to {} is back", self.peer);
        }
        self.add_stream(index, epoch, registration, sock, seal);
        // Queries about other streams may have been lost with all streams, and those streams may stay disconnected for
        // long.
        self.send_fences(index, &self.fences());
        // Other streams that were given up may also reconnect now.
        (0..MAX_STREAMS).filter(|other| self.was_lost(*other)).for_each(|other| self.check_repair(other));
        Ok(())
    }

    fn gave_up(&self, index: usize, error: &Error) {
        if self.closing.load(Ordering::Acquire) || self.health.is_failed() {
            return;
        }
        if self.health.live() == 0 {
            self.fail_silently(error.clone().with_peer(&self.peer));
        } else {
            tracing::warn!(target: crate::os::log::NET, "stream {index} to {} stays down ({error}); going on with the others", self.peer);
        }
    }
}

impl Streams for SendConn {
    fn pair_for(&self, index: usize, attempt: usize, repair: bool) -> usize {
        let at = match (repair, self.keeps_to_preferred_pair(index)) {
            // The stream is connected over other rails, and must move back to its own.
            (true, _) if self.is_live(index) => index,
            (true, true) => self.preferred_pair(index),
            _ => self.preferred_pair(index) + attempt,
        };
        // A pair that connects and delivers nothing is left out.
        let left_out = |at: &usize| lock(&self.own.deliveries).is_left_out(at % self.pairs());
        (at..at + self.pairs()).find(|at| !left_out(at)).unwrap_or(at)
    }

    fn segment(&self, pair: usize) -> Option<u32> {
        lock(&self.own.deliveries).segment(pair)
    }

    fn register_socket(&self, index: usize, sock: &Sock) -> Result<Registration> {
        if self.own.far {
            // Without a limit to the bytes that the kernel accepts before it can send them, the first stream takes all
            // data. The others stay slow for seconds, since their congestion windows grow only with the data that they
            // carry.
            liveness::hold_back_from(sock, 128 << 10);
        }
        self.register(index, sock)
    }

    fn is_connected(&self) -> bool {
        self.health.live() > 0
    }

    fn is_live(&self, index: usize) -> bool {
        self.state().core.is_live(index)
    }

    fn recovers(&self) -> bool {
        self.recovery
    }

    fn is_in_a_hurry(&self) -> bool {
        !self.is_connected() || lock(&self.inquiry).is_some()
    }

    fn awaits_refusals(&self) -> bool {
        lock(&self.inquiry).as_ref().is_some_and(PeerInquiry::awaits_refusals)
    }

    fn pause(&self, index: usize) -> Duration {
        lock(&self.own.deliveries).pause(index)
    }

    fn begin_repair(&self, index: usize) -> bool {
        self.own.repairs.fetch_or(1 << index, Ordering::SeqCst) & 1 << index == 0
    }

    fn end_repair(&self, index: usize) {
        self.own.repairs.fetch_and(!(1 << index), Ordering::SeqCst);
    }

    /// The thread that noticed the break found a repair under way, and left the stream to that repair.
    fn check_repair(&self, index: usize) {
        if !self.is_over()
            && self.state().core.is_down(index)
            && let Some(me) = self.me.upgrade()
        {
            let me: Arc<dyn Streams> = me;
            dialer::repair(Arc::clone(&self.net), &me, index);
        }
    }

    fn settled(&self, index: usize, on_other_pair: bool, preferred: Option<usize>) -> bool {
        if let Some(preferred) = preferred {
            self.set_preferred_pair(index, preferred);
        }
        if on_other_pair {
            self.own.on_other_pair.fetch_or(1 << index, Ordering::SeqCst);
            let pair = self.preferred_pair(index) % self.pairs();
            return self.recovery && !lock(&self.own.deliveries).is_left_out(pair);
        }
        self.own.on_other_pair.fetch_and(!(1 << index), Ordering::SeqCst);
        self.own.was_on_own_pair.fetch_or(1 << index, Ordering::SeqCst);
        self.set_preferred_pair(index, 0);
        false
    }

    fn is_on_other_pair(&self, index: usize) -> bool {
        self.own.on_other_pair.load(Ordering::SeqCst) & 1 << index != 0
    }

    fn was_on_own_pair(&self, index: usize) -> bool {
        self.own.was_on_own_pair.load(Ordering::SeqCst) & 1 << index != 0
    }

    fn goes_without(&self, index: usize, error: &Error) {
        // If all other streams are disconnected too, this was already logged.
        if !self.is_over() && self.is_connected() {
            NOT_THERE.tell(|more| {
                tracing::warn!(target: crate::os::log::NET, "stream {index} to {} could not be connected ({error}); going on with the others{more}", self.peer);
            });
        }
    }

    fn peer_has_closed(&self, received: u64) {
        self.health.peer_received(received);
    }
}
