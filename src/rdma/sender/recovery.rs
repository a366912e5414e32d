//! The sender's part in recovering from a lost queue pair: data in doubt is resent over other queue pairs.

use std::collections::VecDeque;
use std::time::Instant;

use super::job::Job;
use super::{PROBE, RdmaSend, State, work_id};
use crate::engine::counters::Counters;
use crate::os::error::Result;
use crate::rdma::cts::CtsEntry;
use crate::rdma::fabric::{Fabric, Qp};
use crate::rdma::ledger::{Answer, Ledger, Sent, Settled};
use crate::rdma::outage::{Taken, Tended, Trouble};
use crate::rdma::record::QpRecord;
use crate::rdma::silence::Silence;
use crate::rdma::stripe::Share;
use crate::rdma::trouble::Doing;
use crate::rdma::verbs::{Completion, Local, Remote, Work};

/// A share that was lost with its queue pair, or waited for room in it.
pub(super) struct Orphan {
    key: usize,
    share: Share,
}

impl RdmaSend {
    /// See [`Direction::care`](crate::rdma::connection::Direction::care): this side owes short messages that their
    /// queue pair may lose, or a queue pair is in trouble.
    pub(super) fn care(&self) -> (bool, Option<Instant>) {
        let Some(mut state) = self.try_state() else {
            self.base.alarm.raise();
            return (true, None);
        };
        let State { fabric: Some(fabric), outbox, ledger, silence, .. } = &mut *state else { return (false, None) };
        self.check_paths(fabric, ledger, silence);
        let next = self.base.offer_qps(fabric);
        (fabric.is_alarmed() || outbox.as_ref().is_some_and(|outbox| !outbox.is_delivered()), next)
    }

    /// Checks the ports, and the queue pairs for silence.
    fn check_paths(&self, fabric: &mut Fabric, ledger: &Option<Ledger>, silence: &mut Silence) {
        self.base.check_paths(fabric);
        if let Some(ledger) = ledger {
            self.base.listen(fabric, silence, |qp| ledger.oldest(qp));
        }
    }

    /// Handles queue pairs that are in trouble, and whatever else the control thread left to this thread.
    #[cold]
    pub(super) fn tend(&self, state: &mut State) -> Result<()> {
        self.query_receiver(state);
        let State { fabric: Some(fabric), run, ledger, silence, .. } = state else { return Ok(()) };
        run.count = 0;
        fabric.answer_alarm();
        if self.base.recovers() {
            self.check_paths(fabric, ledger, silence);
            self.base.offer_qps(fabric);
        }
        let Tended { gone, back, connected } = self.base.tend(fabric, |fabric, qp, (epoch, record)| {
            self.answered(fabric, qp, epoch, record);
            Ok(())
        })?;
        connected.into_iter().for_each(|(qp, outcome)| self.probe(fabric, qp, outcome));
        back.into_iter().for_each(|qp| self.base.prove_qp(fabric, qp));
        for (qp, taken) in gone {
            self.settle(state, qp, taken)?;
        }
        self.go_again(state)
    }

    /// The receiver has a replacement for a queue pair that was lost. This side's is connected to it.
    #[cold]
    fn answered(&self, fabric: &mut Fabric, index: usize, epoch: u16, record: &QpRecord) {
        let qp = fabric.qp(index);
        if !qp.is_returning() || qp.epoch() != epoch || qp.is_connecting() {
            return;
        }
        if let Err(error) = fabric.reconnect(index, &self.base.adapters, record, self.base.config()) {
            fabric.qp(index).suffers(Trouble { error, is_flush: false });
        }
    }

    /// A new queue pair is tested before anything is sent over it.
    #[cold]
    fn probe(&self, fabric: &mut Fabric, index: usize, connected: Result<()>) {
        let qp = fabric.qp(index);
        if !qp.is_returning() {
            return;
        }
        let nothing = Local { address: 0, length: 0, key: 0 };
        let key = self.target.size_keys.get(qp.peer_port).copied().unwrap_or(0);
        let probe = Work {
            id: work_id(0, index, 1, false) | PROBE,
            local: nothing,
            remote: Remote { address: self.target.sizes, key },
            immediate: None,
            is_read: false,
            is_inline: false,
            is_signaled: true,
        };
        // SAFETY: no memory is read or written for no bytes.
        if let Err(error) = connected.and_then(|()| unsafe { qp.probe(&probe) }) {
            qp.suffers(Trouble { error, is_flush: false });
        }
        qp.is_tried();
    }

    /// Both ends of a queue pair have ended. Writes that the receiver has received are done, and the rest goes over
    /// other queue pairs.
    #[cold]
    fn settle(&self, state: &mut State, qp: usize, taken: Taken) -> Result<()> {
        let State { ledger: Some(ledger), messages, outbox, orphans, .. } = state else { return Ok(()) };
        let Settled { arrived, lost } = ledger.settle(qp, taken)?;
        for sent in arrived {
            match (sent, &mut *outbox) {
                (Sent::Share { key, .. }, _) => {
                    let mut key = Some(key);
                    while let Some(ended) = key {
                        key = self.ended(messages, ended, qp as u16);
                    }
                }
                (Sent::Short(_), Some(outbox)) => outbox.completed(),
                (Sent::Short(_), None) => {}
            }
        }
        let before = orphans.len();
        let mut short = VecDeque::new();
        for sent in lost {
            match sent {
                Sent::Short(parcel) => short.push_back(parcel),
                Sent::Share { key, share } => {
                    // The messages of a run before the last one are whole ones.
                    let mut earlier = messages[usize::from(key)].earlier.take();
                    orphans.push(Orphan { key: key.into(), share });
                    while let Some(key) = earlier {
                        let message = &mut messages[usize::from(key)];
                        earlier = message.earlier.take();
                        let share = Share { qp, offset: 0, length: message.length };
                        orphans.push(Orphan { key: key.into(), share });
                    }
                }
            }
        }
        Counters::count(&self.base.counters.resends, (orphans.len() - before + short.len()) as u64);
        // Writes that were lost earlier have been resent later.
        short.append(&mut state.again);
        state.again = short;
        Ok(())
    }

    /// Resends lost writes over the remaining queue pairs, if there are any.
    #[cold]
    fn go_again(&self, state: &mut State) -> Result<()> {
        let State { fabric: Some(fabric), stripes, messages, jobs, orphans, short_qp, ledger: Some(ledger), .. } =
            state
        else {
            return Ok(());
        };
        // Includes shares that waited for room on a lost queue pair, and start again on another one.
        for (waiting, _) in jobs.iter_mut().zip(fabric.qps()).filter(|(_, qp)| qp.is_lost()) {
            orphans.extend(waiting.drain(..).map(|job| Orphan { key: job.key, share: job.share }));
        }
        let living: Vec<usize> = fabric.living().collect();
        let Some(first) = living.first() else { return Ok(()) };
        stripes.over(living.iter().copied());
        if fabric.qp(*short_qp).is_lost() {
            *short_qp = *first;
        }
        for (Orphan { key, share }, to) in orphans.drain(..).zip(living.iter().cycle()) {
            let (Some(message), Some(answer)) = (messages.get(key), ledger.answer_of(key as u16)) else { continue };
            let Answer { cts, immediate, is_reported } = answer;
            let share = Share { qp: *to, ..share };
            // Each is sent alone: nothing is held back for it. Each carries the size, so that the size arrives
            // whichever share is the last.
            let cts = CtsEntry { has_more: false, ..cts };
            let key_there = cts.keys[fabric.qp(*to).peer_port];
            let job = Job::new(key, share, &cts, key_there, immediate, is_reported);
            if self.base.events.has_sink() {
                self.report_share(message, &job, 1, true);
            }
            jobs[*to].push_back(job);
        }
        state.waiting_jobs = jobs.iter().map(VecDeque::len).sum();
        self.post_waiting(state)?;
        self.post_again(state)
    }

    /// Short messages are resent, in order, before any other.
    #[cold]
    fn post_again(&self, state: &mut State) -> Result<()> {
        loop {
            let State { fabric: Some(fabric), again, short_qp, .. } = &mut *state else { return Ok(()) };
            if fabric.qp(*short_qp).room() == 0 {
                return Ok(());
            }
            let Some(parcel) = again.pop_front() else { return Ok(()) };
            self.post_parcel(state, parcel)?;
        }
    }

    /// The first write over a new queue pair has arrived, or has not.
    #[cold]
    pub(super) fn probed(&self, qp: &mut Qp, completion: &Completion) -> Result<()> {
        if !qp.is_of_this_epoch(completion) {
            return Ok(());
        }
        if !completion.is_ok() {
            return self.base.broken(qp, completion, Doing::Sending);
        }
        qp.is_proven();
        Ok(())
    }
}
