//! Calls from the listening side of a connection that has lost all streams: they notify the other side, and show
//! whether its process is alive ([`lifeline`]).

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::purpose::{Proved, Purpose, Reached, Route};
use super::{Begin, Dial, NO_DEADLINE};
use crate::os::error::{Error, Result};
use crate::os::log::NET;
use crate::session::handshake::{Intent, Secret};
use crate::session::lifeline::{self, Answer};
use crate::session::net::Net;
use crate::session::owner::ListeningSide;
use crate::session::tries::{self, TRY};

/// Calls over one of the peer's rails, repeatedly, until a stream is back or the peer is given up. `since`: the time
/// when the last stream ended.
struct Call {
    conn: Weak<dyn ListeningSide>,
    pair: usize,
    since: Instant,
}

/// Calls the connecting side over one of its rails.
pub(crate) fn call(net: Arc<Net>, conn: &Arc<dyn ListeningSide>, pair: usize, since: Instant) {
    let start = since + lifeline::CALL_AFTER;
    let purpose = Call { conn: Arc::downgrade(conn), pair, since };
    let begin = Begin { at: start, epoch: 0, tries: 0, claims: false };
    if let Err(error) = Dial::start(net, purpose, start + NO_DEADLINE, begin) {
        // The result is unknown then, as without an answer.
        tracing::debug!(target: NET, "the peer cannot be called: {error}");
    }
}

impl Purpose for Call {
    fn is_over(&self) -> bool {
        self.conn.upgrade().is_none_or(|conn| !conn.is_calling(self.since))
    }

    fn pairs(&self) -> usize {
        1
    }

    fn route(&self, _attempt: u32) -> Option<Route> {
        let conn = self.conn.upgrade()?;
        let route = Route::of(conn.link(), self.pair)?;
        Some(Route { pair: self.pair, ..route })
    }

    fn is_on_other_pair(&self, _attempt: u32, _pair: usize) -> bool {
        false
    }

    fn patience(&self, attempt: u32) -> Duration {
        self.conn.upgrade().map_or(TRY, |conn| tries::again(attempt, 1, true, conn.link().round_trip))
    }

    /// The other side closes the socket after the same time.
    fn hold(&self) -> Duration {
        tries::PATIENCE
    }

    fn traffic_class(&self) -> Option<u8> {
        self.conn.upgrade()?.link().traffic_class
    }

    fn intent(&self, _epoch: u16, tries: u32) -> Result<(Intent, Secret)> {
        let conn = self.conn.upgrade().ok_or_else(|| Error::usage("the connection is closed"))?;
        let link = conn.link();
        let (stream, epoch) = conn.lost_epoch(tries as usize);
        Ok((Intent::Call { connection: link.connection, stream, epoch }, link.key.clone()))
    }

    fn reached(&self, _net: &Arc<Net>, _proved: Proved) -> Result<Reached> {
        Ok(Reached::Called)
    }

    fn answered(&self, began: Instant, pair: usize, answer: Answer) {
        self.conn.upgrade().inspect(|conn| conn.answered(began, pair, answer));
    }

    fn goes_on_after(&self) -> Option<Duration> {
        Some(lifeline::CALL_AFTER)
    }
}
