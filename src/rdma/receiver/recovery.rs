//! The receiver's part in recovering from a lost queue pair: its CTS entries go over another, and a new queue pair is
//! made when the sender offers one.

use std::time::{Duration, Instant};

use super::{DEPTH, LOW, RECEIVE, RdmaRecv, State};
use crate::os::error::{Error, Result};
use crate::os::log::NET;
use crate::rdma::fabric::Fabric;
use crate::rdma::flush::Around;
use crate::rdma::outage::Tended;
use crate::rdma::record::LaneRecord;

/// How long CTS entries may stay unread before this side checks whether they have arrived.
const UNSURE: Duration = Duration::from_millis(300);

impl RdmaRecv {
    /// See [`Direction::care`](crate::rdma::connection::Direction::care): a lane is in trouble.
    pub(super) fn care(&self) -> bool {
        let Some(mut state) = self.try_state() else {
            self.base.alarm.raise();
            return true;
        };
        self.look_around(&mut state);
        if state.is_unsure() {
            self.base.alarm.raise();
        }
        self.settle_flushes(&mut state);
        state.fabric.as_ref().is_some_and(Fabric::is_alarmed)
    }

    /// Checks the ports, and the lane of the CTS entries, for silence.
    fn look_around(&self, state: &mut State) {
        let State { fabric: Some(fabric), silence, silent, line_lane, .. } = state else { return };
        self.base.look_around(fabric);
        // Only the completion of the last ones is not requested.
        let owes = fabric.outstanding(*line_lane) > *silent;
        self.base.listen(fabric, silence, |lane| (owes && lane == *line_lane).then_some(0));
    }

    /// Handles lanes that are in trouble, and answers the sender's query.
    #[cold]
    pub(super) fn tend(&self, state: &mut State) -> Result<()> {
        let State { fabric: Some(fabric), .. } = state else { return Ok(()) };
        fabric.answer_alarm();
        if let Some(lines) = self.base.take_question() {
            self.answer(state, lines)?;
        }
        if self.base.recovers() {
            self.look_around(state);
            self.make_sure(state)?;
        }
        let State { fabric: Some(fabric), used, .. } = state else { return Ok(()) };
        let Tended { gone, connected, .. } = self.base.tend(fabric, |fabric, lane, (epoch, record)| {
            if epoch.wrapping_sub(fabric.lane(lane).epoch()).cast_signed() <= 0 {
                return Ok(());
            }
            match self.take_lane(fabric, lane, epoch, record) {
                Ok(true) => {}
                Ok(false) => self.base.refuse_lane(lane, epoch),
                Err(error) => self.is_refused(fabric, lane, epoch, &error),
            }
            Ok(())
        })?;
        for (lane, outcome) in connected {
            let epoch = fabric.lane(lane).epoch();
            match outcome {
                _ if !fabric.lane(lane).is_returning() => {}
                Ok(()) => {
                    used[lane] = 0;
                    self.base.offer_lane(fabric, lane);
                }
                Err(error) => self.is_refused(fabric, lane, epoch, &error),
            }
        }
        for (lane, _) in gone {
            state.used[lane] = 0;
            state.lines_are_lost |= state.line_lane == lane;
        }
        self.settle_flushes(state);
        if state.lines_are_lost { self.write_again(state) } else { Ok(()) }
    }

    /// The attempt with a new queue pair has failed.
    #[cold]
    fn is_refused(&self, fabric: &mut Fabric, lane: usize, epoch: u16, error: &Error) {
        tracing::debug!(target: NET, "no new queue pair from {} yet: {error}", self.base.peer);
        self.base.refuse_lane(lane, epoch);
        self.base.end_pair(fabric.lane(lane));
        fabric.abandon(lane, epoch);
    }

    /// The sender has a new queue pair for a lane that was lost: makes one too, and has it connected. Returns whether
    /// that can be done now.
    #[cold]
    fn take_lane(&self, fabric: &mut Fabric, index: usize, epoch: u16, record: &LaneRecord) -> Result<bool> {
        let lane = fabric.lane(index);
        if lane.is_returning() {
            // The sender has given up what it offered before.
            self.base.end_pair(lane);
            lane.give_up(Instant::now());
        } else if !lane.is_lost() {
            return Ok(false);
        }
        if self.base.adapters[lane.adapter].is_out() {
            return Ok(false);
        }
        fabric.renew(index, &self.base.adapters, self.base.config())?;
        // Refused offers have used up numbers.
        fabric.lane(index).set_epoch(epoch);
        fabric.lane(index).post_receives(RECEIVE | index as u64, DEPTH.receive as usize)?;
        fabric.reconnect(index, &self.base.adapters, record, self.base.config())?;
        Ok(true)
    }

    /// Checks with the device whether the last CTS entries have arrived: a sender that has lost them does not ask for
    /// them.
    fn make_sure(&self, state: &mut State) -> Result<()> {
        if !state.is_unsure() {
            return Ok(());
        }
        let State { fabric: Some(fabric), mirror: Some(mirror), silent, line_lane, unsure, .. } = state else {
            return Ok(());
        };
        *unsure = None;
        self.write_to_ring((fabric, *line_lane), mirror, silent, 0, 0)
    }

    /// Flushes do not wait for ports over which nothing arrives any more.
    fn settle_flushes(&self, state: &mut State) {
        if let State { flush: Some(flush), fabric: Some(fabric), .. } = state {
            let around = Around { config: self.base.config(), lanes: fabric.lanes() };
            flush.settle(&around, |slot| self.base.requests.complete_part(slot, 0, 0));
        }
    }

    /// The CTS entries that may be lost are written over another lane, if there is one.
    #[cold]
    fn write_again(&self, state: &mut State) -> Result<()> {
        let State { fabric: Some(fabric), line_lane, lines_are_lost, silent, receives, .. } = &mut *state else {
            return Ok(());
        };
        let Some(living) = fabric.living().next() else { return Ok(()) };
        (*line_lane, *silent, *lines_are_lost) = (living, 0, false);
        let (first, count) = receives.unread();
        self.write_lines(state, first, count)?;
        self.write_word_now(state)
    }
}

impl State {
    /// Whether CTS entries that the sender has not read were written a while ago, without a check whether they have
    /// arrived. With a single lane the result would be of no use.
    fn is_unsure(&mut self) -> bool {
        let State { fabric: Some(fabric), receives, silent, line_lane, unsure, .. } = self else { return false };
        let is_asked = fabric.outstanding(*line_lane) != *silent;
        let lane = fabric.lane(*line_lane);
        let may_ask = lane.is_up() && lane.room() > LOW && fabric.living().count() > 1;
        if *silent == 0 || is_asked || !may_ask || receives.unread().1 == 0 {
            *unsure = None;
            return false;
        }
        let (now, written) = (Instant::now(), receives.written());
        match *unsure {
            Some((since, before)) if before == written => now.saturating_duration_since(since) >= UNSURE,
            _ => {
                *unsure = Some((now, written));
                false
            }
        }
    }
}
