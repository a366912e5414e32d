//! The receiver's part in recovering from a lost queue pair: it writes its CTS entries over another one, and makes a
//! new queue pair when the sender offers one.

use std::time::{Duration, Instant};

use super::{DEPTH, LOW, RECEIVE, RdmaRecv, State};
use crate::os::error::{Error, Result};
use crate::os::log::NET;
use crate::rdma::fabric::Fabric;
use crate::rdma::flush::Around;
use crate::rdma::outage::Tended;
use crate::rdma::record::QpRecord;

/// How long CTS entries may stay unread before this side checks whether they have arrived.
const UNSURE: Duration = Duration::from_millis(300);

impl RdmaRecv {
    /// See [`Direction::care`](crate::rdma::connection::Direction::care): a queue pair is in trouble.
    pub(super) fn care(&self) -> bool {
        let Some(mut state) = self.try_state() else {
            self.base.alarm.raise();
            return true;
        };
        self.check_paths(&mut state);
        if state.is_unsure() {
            self.base.alarm.raise();
        }
        self.settle_flushes(&mut state);
        state.fabric.as_ref().is_some_and(Fabric::is_alarmed)
    }

    /// Checks the ports, and the queue pair of the CTS entries, for silence.
    fn check_paths(&self, state: &mut State) {
        let State { fabric: Some(fabric), silence, silent, cts_qp, .. } = state else { return };
        self.base.check_paths(fabric);
        // Only the completion of the last ones is not requested.
        let owes = fabric.outstanding(*cts_qp) > *silent;
        self.base.listen(fabric, silence, |qp| (owes && qp == *cts_qp).then_some(0));
    }

    /// Handles queue pairs that are in trouble, and answers the sender's query.
    #[cold]
    pub(super) fn tend(&self, state: &mut State) -> Result<()> {
        let State { fabric: Some(fabric), .. } = state else { return Ok(()) };
        fabric.answer_alarm();
        if let Some(cts_entries) = self.base.take_query() {
            self.answer(state, cts_entries)?;
        }
        if self.base.recovers() {
            self.check_paths(state);
            self.make_sure(state)?;
        }
        let State { fabric: Some(fabric), used, .. } = state else { return Ok(()) };
        let Tended { gone, connected, .. } = self.base.tend(fabric, |fabric, qp, (epoch, record)| {
            if epoch.wrapping_sub(fabric.qp(qp).epoch()).cast_signed() <= 0 {
                return Ok(());
            }
            match self.take_qp(fabric, qp, epoch, record) {
                Ok(true) => {}
                Ok(false) => self.base.refuse_qp(qp, epoch),
                Err(error) => self.is_refused(fabric, qp, epoch, &error),
            }
            Ok(())
        })?;
        for (qp, outcome) in connected {
            let epoch = fabric.qp(qp).epoch();
            match outcome {
                _ if !fabric.qp(qp).is_returning() => {}
                Ok(()) => {
                    used[qp] = 0;
                    self.base.offer_qp(fabric, qp);
                }
                Err(error) => self.is_refused(fabric, qp, epoch, &error),
            }
        }
        for (qp, _) in gone {
            state.used[qp] = 0;
            state.cts_entries_are_lost |= state.cts_qp == qp;
        }
        self.settle_flushes(state);
        if state.cts_entries_are_lost { self.write_again(state) } else { Ok(()) }
    }

    /// The attempt with a new queue pair has failed.
    #[cold]
    fn is_refused(&self, fabric: &mut Fabric, qp: usize, epoch: u16, error: &Error) {
        tracing::debug!(target: NET, "no new queue pair from {} yet: {error}", self.base.peer);
        self.base.refuse_qp(qp, epoch);
        self.base.end_pair(fabric.qp(qp));
        fabric.abandon(qp, epoch);
    }

    /// The sender has a replacement for a queue pair that was lost. Makes one too, and starts to connect it. Returns
    /// whether that can be done now.
    #[cold]
    fn take_qp(&self, fabric: &mut Fabric, index: usize, epoch: u16, record: &QpRecord) -> Result<bool> {
        let qp = fabric.qp(index);
        if qp.is_returning() {
            // The sender has given up its previous offer.
            self.base.end_pair(qp);
            qp.give_up(Instant::now());
        } else if !qp.is_lost() {
            return Ok(false);
        }
        if self.base.adapters[qp.adapter].is_out() {
            return Ok(false);
        }
        fabric.renew(index, &self.base.adapters, self.base.config())?;
        // Refused offers have used up numbers.
        fabric.qp(index).set_epoch(epoch);
        fabric.qp(index).post_receives(RECEIVE | index as u64, DEPTH.receive as usize)?;
        fabric.reconnect(index, &self.base.adapters, record, self.base.config())?;
        Ok(true)
    }

    /// Checks with the device whether the last CTS entries have arrived: a sender that has lost them does not request
    /// them again.
    fn make_sure(&self, state: &mut State) -> Result<()> {
        if !state.is_unsure() {
            return Ok(());
        }
        let State { fabric: Some(fabric), mirror: Some(mirror), silent, cts_qp, unsure, .. } = state else {
            return Ok(());
        };
        *unsure = None;
        self.write_to_ring((fabric, *cts_qp), mirror, silent, 0, 0)
    }

    /// Flushes do not wait for ports over which nothing arrives any more.
    fn settle_flushes(&self, state: &mut State) {
        if let State { flush: Some(flush), fabric: Some(fabric), .. } = state {
            let around = Around { config: self.base.config(), qps: fabric.qps() };
            flush.settle(&around, |slot| self.base.requests.complete_part(slot, 0, 0));
        }
    }

    /// The CTS entries that may be lost are written over another queue pair, if there is one.
    #[cold]
    fn write_again(&self, state: &mut State) -> Result<()> {
        let State { fabric: Some(fabric), cts_qp, cts_entries_are_lost, silent, receives, .. } = &mut *state else {
            return Ok(());
        };
        let Some(living) = fabric.living().next() else { return Ok(()) };
        (*cts_qp, *silent, *cts_entries_are_lost) = (living, 0, false);
        let (first, count) = receives.unread();
        self.write_cts(state, first, count)?;
        self.write_credit_now(state)
    }
}

impl State {
    /// Whether CTS entries that the sender has not read were written a while ago, without a check whether they have
    /// arrived. With a single queue pair the result would be of no use.
    fn is_unsure(&mut self) -> bool {
        let State { fabric: Some(fabric), receives, silent, cts_qp, unsure, .. } = self else { return false };
        let is_checked = fabric.outstanding(*cts_qp) != *silent;
        let qp = fabric.qp(*cts_qp);
        let may_check = qp.is_up() && qp.room() > LOW && fabric.living().count() > 1;
        if *silent == 0 || is_checked || !may_check || receives.unread().1 == 0 {
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
