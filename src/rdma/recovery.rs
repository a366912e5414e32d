//! Recovery of a connection that loses a queue pair.
//!
//! A queue pair is lost when a completion reports that its peer does not answer or that it has failed, or an
//! asynchronous event of its device does. It is also lost when its port goes down while another port of the connection
//! is up, when nothing on it is acknowledged for two seconds while another queue pair works
//! ([`silence`](super::silence)), or when the other side reports its loss. Then it is unknown which of the last writes
//! have arrived. A packet that is still under way could later place old bytes over new ones. So both sides first
//! **end** their queue pair, after which their devices accept nothing from it any more:
//!
//! 1. The side that notices stops the queue pair (error state), takes its completions, and ends it (reset state; a
//!    separate thread destroys it, which may take long). A receiver waits until all its receives have come back, so
//!    that it has seen every immediate that its device has acknowledged.
//! 2. It reports that over the control channel ([`Type::Fenced`]), with the number of immediates that it has received.
//!    The other side does the same when it receives this, unless it already has.
//! 3. When both have, data in doubt is resent over the remaining queue pairs: the sender's messages
//!    ([`ledger`](super::ledger)), the receiver's CTS entries.
//!
//! A lost queue pair is replaced when its port is up again. The sender offers one over the control channel
//! ([`Type::QueuePair`]), and the receiver answers with its own, or that it cannot now. In that case the sender tries
//! again after a while. The new queue pair carries messages when a first write over it, of no bytes, has been
//! acknowledged, and the receiver is notified. When all queue pairs are lost at one time the connection waits for one
//! of them, for `TOWLINE_RECONNECT_TIMEOUT`; so does one that has a single queue pair. Until a queue pair is verified
//! it has no room for work requests.
//!
//! A queue pair passes through the states of [`QpState`]. With `TOWLINE_RECOVERY=0` none of this happens and the first
//! failure ends the connection.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use super::base::Base;
use super::fabric::{Fabric, Qp};
use super::outage::{PROVEN, QpMessage, QpNotice, QpState, Taken, Tended, Trouble, offer, pause};
use super::record::QpRecord;
use super::silence::{Seen, Silence};
use crate::engine::counters::Counters;
use crate::os::error::{Cause, Error, Result};
use crate::os::log::NET;
use crate::os::thread;
use crate::session::frame::{Header, Type};

/// How long a receiver waits for its receives to come back from a queue pair that was stopped. A device that does not
/// return them in that time never will.
const DRAIN: Duration = Duration::from_secs(1);

/// How long after its loss a queue pair is tried again.
const FIRST_TRY: Duration = Duration::from_millis(500);

/// How often the control thread checks whether a port is up, and how the attempts went.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl Base {
    /// Handles queue pairs in trouble, and the other side's messages about queue pairs; `answer` handles its offers.
    ///
    /// # Errors
    /// When all queue pairs are lost and none is replaced in time, or the other side does not answer, or the error of
    /// `answer`.
    #[cold]
    pub(crate) fn tend(
        &self,
        fabric: &mut Fabric,
        mut answer: impl FnMut(&mut Fabric, usize, (u16, &QpRecord)) -> Result<()>,
    ) -> Result<Tended> {
        let mut gone = Vec::new();
        let messages = std::mem::take(&mut *self.qp_messages());
        for QpMessage { qp, epoch, notice } in messages {
            let index = usize::try_from(qp).unwrap_or(usize::MAX);
            if !fabric.qps.get(index).is_some_and(|qp| qp.recovers) {
                return Err(Error::remote(format!("the peer gave up queue pair {qp} of this connection"))
                    .with_hint("its log says why; it must run with the same TOWLINE_RECOVERY as this side"));
            }
            match notice {
                QpNotice::Proven => {
                    let qp = &mut fabric.qps[index];
                    qp.proven |= qp.epoch == epoch;
                }
                QpNotice::Ended(taken) => peer_ended(&mut fabric.qps[index], epoch, taken),
                QpNotice::Offer(record) => {
                    let qp = &mut fabric.qps[index];
                    let is_refused = record.is_none() && qp.epoch == epoch;
                    if is_refused && qp.state == QpState::Returning {
                        self.end_pair(qp);
                        qp.try_again(Instant::now());
                    } else if is_refused {
                        // It has received nothing from this queue pair, which is in trouble here.
                        qp.peer = Some(0);
                    } else if let Some(record) = &record {
                        answer(fabric, index, (epoch, record))?;
                    }
                }
            }
            // In order: the next message may refer to the result of this one.
            self.step(fabric, &mut gone)?;
        }
        self.step(fabric, &mut gone)?;
        let mut back = Vec::new();
        for index in 0..fabric.qps.len() {
            if fabric.qps[index].state == QpState::Returning && fabric.qps[index].proven {
                self.has_returned(fabric, index);
                back.push(index);
            }
        }
        self.destroy_ended();
        let qps = fabric.qps.iter_mut().enumerate();
        let connected = qps.filter_map(|(index, qp)| Some((index, qp.take_connected()?))).collect();
        Ok(Tended { gone, back, connected })
    }

    fn step(&self, fabric: &mut Fabric, gone: &mut Vec<(usize, Taken)>) -> Result<()> {
        let now = Instant::now();
        self.lose(fabric, now)?;
        self.wait_for_one(fabric, now)?;
        let mut is_calm = fabric.without.is_none();
        for (index, qp) in fabric.qps.iter_mut().enumerate() {
            qp.stop_again();
            if let QpState::Stopping { since } = qp.state
                && (qp.receives == 0 || now - since >= DRAIN)
            {
                self.end_pair(qp);
                qp.state = QpState::Ended { since };
                let fenced = Header { order: index as u64, total: qp.arrived, ..Header::of(Type::Fenced, qp.epoch) };
                self.send_control(&fenced.encode());
            }
            if let QpState::Ended { since } = qp.state {
                // A receiver that has closed had received everything it wanted.
                let taken = if self.health.is_peer_done() { Some(None) } else { qp.peer.take().map(Some) };
                if let Some(taken) = taken {
                    let wait = FIRST_TRY.max(pause(qp.tries));
                    (qp.state, qp.next_try) = (QpState::Lost, Some(now + wait));
                    gone.push((index, taken));
                } else if now - since >= self.config().peer_timeout {
                    // The peer's process may be stopped for a while; if it is gone, its socket shows that.
                    let what = "a queue pair was lost, and the peer does not say what it got from it";
                    return Err(Error::remote(what).with_hint("look at the peer's log, and at the way to its TCP port"));
                }
            }
            if qp.state == QpState::Returning && qp.next_try.is_some_and(|at| at <= now) {
                // There is no answer, or no path yet. The receiver treats a later offer as the end of this attempt.
                self.end_pair(qp);
                qp.try_again(now);
            }
            let is_in_trouble = matches!(qp.state, QpState::Stopping { .. } | QpState::Ended { .. });
            is_calm &= !is_in_trouble && qp.trouble.is_none() && !qp.is_connecting();
        }
        if !is_calm {
            fabric.raise_alarm();
        }
        Ok(())
    }

    pub(super) fn end_pair(&self, qp: &mut Qp) {
        if let Some(element) = qp.element() {
            self.adapters[qp.adapter].forget(element);
        }
        let Some(pair) = qp.end() else { return };
        // If the reset fails, only its destruction ends it.
        if pair.reset().is_ok() {
            self.ended().push(pair);
        }
    }

    /// Destroys the queue pairs that have ended, in a separate thread. In that call the kernel may wait for a packet
    /// that it cannot send, and NCCL's thread would wait with it. SoftRoCE's driver waits for three seconds when
    /// nothing answers at the peer's address. That is rare, so there is no permanent thread for it.
    fn destroy_ended(&self) {
        let ended = std::mem::take(&mut *self.ended());
        if ended.is_empty() {
            return;
        }
        // If no thread can be created they are destroyed here: the closure is dropped with the queue pairs that it
        // holds.
        if let Err(error) = thread::spawn("towline-undo", move || drop(ended)) {
            tracing::debug!(target: NET, "no thread for ending queue pairs: {error}");
        }
    }

    /// Gives up the queue pairs that are in trouble.
    fn lose(&self, fabric: &mut Fabric, now: Instant) -> Result<()> {
        let mut left = fabric.living().count();
        let (mut lost, mut first) = (0, None);
        for qp in &mut fabric.qps {
            let Some(trouble) = qp.trouble.take() else { continue };
            if qp.is_up() {
                (left, lost) = (left - 1, lost + 1);
                first.get_or_insert(trouble.error);
                qp.relapses.is_lost(now);
            } else if qp.state != QpState::Returning {
                continue;
            }
            qp.stop();
            qp.state = QpState::Stopping { since: now };
        }
        let Some(error) = first else { return Ok(()) };
        Counters::count(&self.counters.lost_queue_pairs, lost);
        if !self.is_closing() {
            let (doing, peer, all) = (self.doing, &self.peer, fabric.qps.len());
            if left > 0 {
                tracing::warn!(target: NET, "{doing} {peer} goes on over {left} of {all} queue pairs: {error}");
            } else {
                tracing::warn!(target: NET, "{doing} {peer} waits for a queue pair, of which {all} are lost: {error}");
            }
        }
        if left == 0 {
            fabric.without = Some((now, error));
        }
        Ok(())
    }

    /// With no queue pair left, the connection waits for one.
    fn wait_for_one(&self, fabric: &mut Fabric, now: Instant) -> Result<()> {
        if fabric.without.is_some() && fabric.living().next().is_some() {
            fabric.without = None;
        }
        match &fabric.without {
            Some((since, error)) if now - *since >= self.config().reconnect_timeout => {
                let what =
                    format!("all queue pairs were lost and none came back in time; the last one: {}", error.what());
                Err(Error::new(error.cause(), what).with_hint(
                    "look at the ports of both sides and the switches between; TOWLINE_RECONNECT_TIMEOUT says how long to wait",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Called by the control thread, or by the thread that it alarms. Gives up queue pairs that an event names, and
    /// those whose port or device is down, as long as another one's is not.
    pub(crate) fn check_paths(&self, fabric: &mut Fabric) {
        for (element, text) in self.mishap.take() {
            let what = format!("a device reports {text} of it");
            for qp in fabric.qps_of(element) {
                qp.suffers(Trouble { error: Error::new(Cause::System, &what), is_flush: false });
            }
        }
        let is_out = |qp: &Qp| self.adapters[qp.adapter].is_out();
        if !fabric.qps.iter().any(|qp| qp.is_up() && !is_out(qp)) {
            return;
        }
        let used = |qp: &Qp| qp.is_up() || qp.state == QpState::Returning;
        for qp in fabric.qps.iter_mut().filter(|qp| used(qp) && is_out(qp)) {
            let adapter = &self.adapters[qp.adapter];
            let what = if adapter.is_dead() { "the device failed" } else { "the port went down" };
            let error = Error::new(Cause::System, format!("{what} ({})", adapter.name()));
            qp.suffers(Trouble { error, is_flush: false });
        }
    }

    /// Gives up queue pairs that have fallen silent while others work. `owes`: the bytes of the oldest entry on a queue
    /// pair that will complete.
    pub(crate) fn listen(&self, fabric: &mut Fabric, silence: &mut Silence, owes: impl Fn(usize) -> Option<u64>) {
        let seen = |(index, qp): (usize, &Qp)| Seen { is_up: qp.is_up(), done: qp.done(), owes: owes(index) };
        for index in silence.check(Instant::now(), fabric.qps.iter().enumerate().map(seen)) {
            let qp = &mut fabric.qps[index];
            let port = self.adapters[qp.adapter].name();
            let what =
                format!("nothing on a queue pair of {port} was acknowledged for two seconds, while another fares well");
            let error = Error::new(Cause::System, what).with_hint("look at the switches on its way");
            qp.suffers(Trouble { error, is_flush: false });
        }
    }

    /// The sender's: offers replacements for queue pairs that are lost and whose ports are up. Returns when to check
    /// again.
    pub(crate) fn offer_qps(&self, fabric: &mut Fabric) -> Option<Instant> {
        let now = Instant::now();
        let is_alone = fabric.living().next().is_none();
        for index in 0..fabric.qps.len() {
            let qp = &mut fabric.qps[index];
            if qp.state != QpState::Lost || qp.next_try.is_some_and(|at| at > now) {
                continue;
            }
            if let Some(until) = qp.relapses.until().filter(|until| *until > now && !is_alone) {
                if let Some((times, pause)) = qp.relapses.take_unreported() {
                    let (doing, peer, port) = (self.doing, &self.peer, self.adapters[qp.adapter].name());
                    tracing::warn!(
                        target: NET,
                        "{doing} {peer} leaves a queue pair of {port} out for {} s: it was lost soon after its return, \
                         {times} times in a row; look at that port, its cable and the switches on its way",
                        pause.as_secs()
                    );
                }
                // Checked often in the meantime: it may become the only one.
                qp.next_try = Some(until.min(now + CHECK_INTERVAL));
                continue;
            }
            qp.next_try = Some(now + CHECK_INTERVAL);
            if self.adapters[qp.adapter].is_out() || self.health.is_peer_done() {
                continue;
            }
            qp.tries += 1;
            qp.next_try = Some(now + pause(qp.tries));
            match fabric.renew(index, &self.adapters, self.config()) {
                Ok(()) => {
                    fabric.qps[index].next_try = Some(now + self.config().reconnect_timeout);
                    self.offer_qp(fabric, index);
                }
                Err(error) => tracing::debug!(target: NET, "no new queue pair to {} yet: {error}", self.peer),
            }
        }
        // An answer to an offer comes at any time, and shortens the wait.
        let at = |qp: &Qp| match qp.state {
            QpState::Lost => qp.next_try,
            QpState::Returning => qp.next_try.map(|at| at.min(now + CHECK_INTERVAL)),
            _ => None,
        };
        let next = fabric.qps.iter().filter_map(at).min();
        if next.is_some_and(|at| at <= now) {
            fabric.raise_alarm();
        }
        next.map(|at| at.max(now))
    }

    /// Reports the replacement of a queue pair to the other side.
    pub(crate) fn offer_qp(&self, fabric: &Fabric, index: usize) {
        self.name_qp(fabric, index);
        let qp = &fabric.qps[index];
        self.send_control(&offer(index, qp.epoch, qp.record(self.config()).as_ref()).encode());
    }

    /// The receiver: reports to the sender that a queue pair cannot be replaced now.
    pub(crate) fn refuse_qp(&self, index: usize, epoch: u16) {
        self.send_control(&offer(index, epoch, None).encode());
    }

    /// The sender: reports to the receiver that a new queue pair reaches it.
    pub(crate) fn prove_qp(&self, fabric: &Fabric, index: usize) {
        let epoch = fabric.qps[index].epoch;
        self.send_control(
            &Header { order: index as u64, total: PROVEN, ..Header::of(Type::QueuePair, epoch) }.encode(),
        );
    }

    /// A queue pair carries messages again.
    fn has_returned(&self, fabric: &mut Fabric, index: usize) {
        fabric.is_back(index);
        Counters::bump(&self.counters.reconnects);
        let (up, all) = (fabric.living().count(), fabric.qps.len());
        tracing::info!(target: NET, "{} {} has {up} of {all} queue pairs again", self.doing, self.peer);
    }
}

/// The other side has ended its end of a queue pair.
fn peer_ended(qp: &mut Qp, epoch: u16, taken: u64) {
    // The report concerns a queue pair that both sides have already discarded.
    if qp.epoch != epoch || qp.state == QpState::Lost {
        return;
    }
    qp.peer = Some(taken);
    if qp.is_up() || qp.state == QpState::Returning {
        qp.suffers(Trouble { error: Error::remote("the peer has lost its end of a queue pair"), is_flush: false });
    }
}
