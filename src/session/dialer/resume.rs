//! Replaces the socket of a connection with one socket, after that socket has fallen silent or was cut.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::purpose::{Proved, Purpose, Reached, Route, between};
use super::{Begin, Dial, NO_DEADLINE};
use crate::os::error::{Error, Result};
use crate::session::handshake::{Intent, Secret};
use crate::session::lifeline::Answer;
use crate::session::net::Net;
use crate::session::owner::{ConnectingSide, Joined};
use crate::session::seal::Seal;
use crate::session::tries::{self, TRY};

struct Resume(Weak<dyn ConnectingSide>);

/// Tries one pair of rails after the other, until there is another socket, the connection is over, or every rail has
/// refused for a while ([`ConnectingSide::gave_up`]).
///
/// # Errors
/// When the control thread cannot be started.
pub(crate) fn resume(net: Arc<Net>, conn: &Arc<dyn ConnectingSide>) -> Result<()> {
    let now = Instant::now();
    let begin = Begin { at: now, epoch: 0, tries: 0, claims: false };
    Dial::start(net, Resume(Arc::downgrade(conn)), now + NO_DEADLINE, begin).map(|_| ())
}

impl Resume {
    fn conn(&self) -> Result<Arc<dyn ConnectingSide>> {
        self.0.upgrade().ok_or_else(|| Error::usage("the connection is closed"))
    }
}

impl Purpose for Resume {
    fn is_over(&self) -> bool {
        self.0.upgrade().is_none_or(|conn| conn.is_over())
    }

    fn pairs(&self) -> usize {
        self.conn().map_or(1, |conn| conn.link().pairs())
    }

    fn route(&self, attempt: u32) -> Option<Route> {
        let conn = self.conn().ok()?;
        // The first attempt avoids the silent pair.
        between(&conn.link().local, &conn.link().remote, 1, attempt)
    }

    fn is_on_other_pair(&self, _attempt: u32, _pair: usize) -> bool {
        false
    }

    fn epoch(&self, last: u16) -> u16 {
        self.conn().map_or(last, |conn| conn.next_epoch(0))
    }

    fn patience(&self, attempt: u32) -> Duration {
        self.conn().map_or(TRY, |conn| {
            let pairs = conn.link().pairs();
            tries::again(attempt, pairs, pairs > 1, conn.link().round_trip)
        })
    }

    fn traffic_class(&self) -> Option<u8> {
        self.conn().ok()?.link().traffic_class
    }

    fn intent(&self, epoch: u16, _tries: u32) -> Result<(Intent, Secret)> {
        let conn = self.conn()?;
        let link = conn.link();
        Ok((Intent::Join { connection: link.connection, stream: 0, epoch }, link.key.clone()))
    }

    fn reached(&self, _net: &Arc<Net>, proved: Proved) -> Result<Reached> {
        let conn = self.conn()?;
        let Proved { welcome, keys, epoch, registration, sock, .. } = proved;
        let seal = Seal::of(conn.link().features, keys)?;
        conn.rejoined(Joined { stream: 0, epoch, received: welcome.received, registration, sock, seal })?;
        Ok(Reached::TakenOver)
    }

    fn answered(&self, began: Instant, pair: usize, answer: Answer) {
        if let Ok(conn) = self.conn() {
            conn.answered(began, pair, answer);
        }
    }

    fn gave_up(&self, _net: &Arc<Net>, _epoch: u16, error: &Error) {
        if let Ok(conn) = self.conn() {
            conn.gave_up(0, error);
        }
    }
}
