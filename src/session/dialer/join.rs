//! A further stream of a connection, or a stream that reconnects.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::purpose::{Proved, Purpose, Reached, Route};
use super::{Begin, Dial, MANY, NO_DEADLINE, SELDOM};
use crate::engine::poller::Registration;
use crate::os::error::{Error, Result};
use crate::os::log::NET;
use crate::session::handshake::{CLOSED, Intent, Secret};
use crate::session::lifeline::Answer;
use crate::session::link::Sock;
use crate::session::net::Net;
use crate::session::owner::{Joined, Streams};
use crate::session::seal::Seal;
use crate::session::tries::{self, TRY};

/// When a stream that was never connected over its own rails begins to try them. A stream that was tries them after
/// [`SELDOM`].
const RARELY: Duration = Duration::from_secs(30);

/// `repair`: until the stream is back, or the connection ends.
pub(super) struct Join {
    pub conn: Weak<dyn Streams>,
    pub index: usize,
    pub repair: bool,
}

/// Starts connecting a further stream of a connection, in its first epoch.
pub(crate) fn join(net: Arc<Net>, conn: &Arc<dyn Streams>, index: usize) {
    let now = Instant::now();
    let deadline = now + net.config.reconnect_timeout;
    let purpose = Join { conn: Arc::downgrade(conn), index, repair: false };
    if let Err(error) = Dial::start(net, purpose, deadline, Begin { at: now, epoch: 1, tries: 0, claims: false }) {
        conn.goes_without(index, &error);
    }
}

/// Further stream `index` was not connected in time. That never ends the connection: if all its streams are
/// disconnected at this moment, their repairs decide. The stream is requested again: soon after an outage of all
/// streams, rarely while only this one fails.
fn join_later(net: Arc<Net>, conn: &Arc<dyn Streams>, index: usize, epoch: u16, error: &Error) {
    conn.goes_without(index, error);
    if !conn.recovers() || conn.is_over() {
        return;
    }
    let at = Instant::now() + if conn.is_connected() { RARELY } else { SELDOM };
    let deadline = at + net.config.reconnect_timeout;
    let purpose = Join { conn: Arc::downgrade(conn), index, repair: false };
    if let Err(error) = Dial::start(net, purpose, deadline, Begin { at, epoch, tries: 0, claims: false }) {
        tracing::debug!(target: NET, "a stream is not asked for again: {error}");
    }
}

/// Reconnects stream `index`, over its own rails while other streams carry the load. The repair continues until the
/// stream is connected or the connection is over. Does nothing when a repair is already under way.
pub(crate) fn repair(net: Arc<Net>, conn: &Arc<dyn Streams>, index: usize) {
    if !conn.begin_repair(index) {
        return;
    }
    let now = Instant::now();
    let at = now + conn.pause(index);
    let purpose = Join { conn: Arc::downgrade(conn), index, repair: true };
    let begin = Begin { at, epoch: 0, tries: 0, claims: false };
    if let Err(error) = Dial::start(net, purpose, now + NO_DEADLINE, begin) {
        conn.end_repair(index);
        conn.gave_up(index, &error);
    }
}

/// Moves stream `index`, which is on another pair of rails, to its own pair after a while. If the stream breaks
/// first, it is repaired like any other, and this does nothing.
fn move_back(net: Arc<Net>, conn: &Arc<dyn Streams>, index: usize, after: Duration, tries: u32) {
    let at = Instant::now() + after;
    let purpose = Join { conn: Arc::downgrade(conn), index, repair: true };
    if let Err(error) = Dial::start(net, purpose, at + NO_DEADLINE, Begin { at, epoch: 0, tries, claims: true }) {
        tracing::debug!(target: NET, "a stream stays where it is: {error}");
    }
}

/// Stream `index` is connected; the arguments are those of [`Streams::settled`]. A stream on another pair moves to its
/// own when it can: a rail that was down at set-up may be up later.
pub(super) fn settle(
    net: Arc<Net>,
    conn: &Arc<dyn Streams>,
    index: usize,
    on_other_pair: bool,
    preferred: Option<usize>,
) {
    if conn.settled(index, on_other_pair, preferred) {
        move_back(net, conn, index, SELDOM, 0);
    }
}

impl Join {
    fn conn(&self) -> Option<Arc<dyn Streams>> {
        self.conn.upgrade()
    }
}

impl Purpose for Join {
    fn is_repair(&self) -> bool {
        self.repair
    }

    fn is_over(&self) -> bool {
        self.conn().is_none_or(|conn| conn.is_over())
    }

    fn pairs(&self) -> usize {
        self.conn().map_or(1, |conn| conn.link().pairs())
    }

    /// Each attempt takes the next pair of rails. A stream starts with its own pair, so that the streams of a
    /// connection spread over all pairs, and it moves back to its own while others are connected.
    fn route(&self, attempt: u32) -> Option<Route> {
        let conn = self.conn()?;
        Route::of(conn.link(), conn.pair_for(self.index, attempt as usize, self.repair))
    }

    fn is_on_other_pair(&self, _attempt: u32, pair: usize) -> bool {
        self.conn().is_some_and(|conn| pair != self.index % conn.link().pairs())
    }

    fn epoch(&self, last: u16) -> u16 {
        if self.repair { self.conn().map_or(last, |conn| conn.next_epoch(self.index)) } else { last }
    }

    /// The peer may have started to use the last epoch before its welcome was lost.
    fn epoch_after_failure(&self, last: u16) -> u16 {
        if self.repair { last } else { last.wrapping_add(1) }
    }

    fn patience(&self, attempt: u32) -> Duration {
        self.conn().map_or(TRY, |conn| {
            let (pairs, round_trip) = (conn.link().pairs(), conn.link().round_trip);
            // If no stream is connected, or possibly none, the peer is already waiting for this side.
            let hurry = pairs > 1 && (!self.repair || conn.is_in_a_hurry());
            tries::again(if self.repair { attempt + 1 } else { attempt }, pairs, hurry, round_trip)
        })
    }

    fn traffic_class(&self) -> Option<u8> {
        self.conn()?.link().traffic_class
    }

    fn segment(&self, pair: usize) -> Option<u32> {
        self.conn()?.segment(pair)
    }

    fn intent(&self, epoch: u16, _tries: u32) -> Result<(Intent, Secret)> {
        let conn = self.conn().ok_or_else(closed)?;
        let link = conn.link();
        Ok((Intent::Join { connection: link.connection, stream: self.index as u16, epoch }, link.key.clone()))
    }

    fn register_socket(&self, sock: &Sock) -> Result<Option<Registration>> {
        // The first stream is registered here at the control thread, which still watches its handshake.
        let conn = if self.index > 0 { self.conn() } else { None };
        conn.map(|conn| conn.register_socket(self.index, sock)).transpose()
    }

    fn reached(&self, _net: &Arc<Net>, proved: Proved) -> Result<Reached> {
        let conn = self.conn().ok_or_else(closed)?;
        let Proved { welcome, keys, epoch, registration, sock, .. } = proved;
        if welcome.received & CLOSED != 0 {
            conn.peer_has_closed(welcome.received & !CLOSED);
        } else {
            let seal = Seal::of(conn.link().features, keys)?;
            let (stream, received) = (self.index, welcome.received);
            Arc::clone(&conn).rejoined(Joined { stream, epoch, received, registration, sock, seal })?;
        }
        Ok(Reached::Stream { conn, index: self.index, settles: !self.repair })
    }

    fn answered(&self, began: Instant, pair: usize, answer: Answer) {
        if self.repair {
            self.conn().inspect(|conn| conn.answered(began, pair, answer));
        }
    }

    fn is_connected(&self) -> bool {
        self.repair && self.conn().is_some_and(|conn| conn.is_connected())
    }

    fn awaits_refusals(&self) -> bool {
        self.repair && self.conn().is_some_and(|conn| conn.awaits_refusals())
    }

    fn may_stay(&self) -> bool {
        self.repair && self.conn().is_some_and(|conn| conn.is_live(self.index) && !conn.was_on_own_pair(self.index))
    }

    fn claim(&self) -> bool {
        let Some(conn) = self.conn() else { return false };
        conn.is_live(self.index) && conn.is_on_other_pair(self.index) && conn.begin_repair(self.index)
    }

    fn put_off(&self, net: &Arc<Net>) {
        self.conn().inspect(|conn| move_back(Arc::clone(net), conn, self.index, RARELY, MANY));
    }

    fn gave_up(&self, net: &Arc<Net>, epoch: u16, error: &Error) {
        let Some(conn) = self.conn() else { return };
        if self.repair {
            conn.gave_up(self.index, error);
        } else {
            join_later(Arc::clone(net), &conn, self.index, epoch.wrapping_add(1), error);
        }
    }

    fn ended(&self, began: bool, is_connected: bool) {
        if self.repair
            && began
            && let Some(conn) = self.conn()
        {
            conn.end_repair(self.index);
            if is_connected {
                conn.check_repair(self.index);
            }
        }
    }
}

fn closed() -> Error {
    Error::usage("the connection is closed")
}
