//! The writes that a sender has posted on each queue pair and whose arrival is not confirmed.
//!
//! When a queue pair is lost, its last work requests are in doubt: a missing acknowledgement proves nothing. But a
//! reliable queue pair delivers in order, so one number from the receiver settles it. The receiver reports how many
//! immediates it received from that queue pair before it ended it for ever ([`recovery`](super::recovery)). That many
//! of the entries here, from the front, have arrived; the rest is resent over other queue pairs.
//!
//! Kept unless recovery is off. This module posts nothing.

use std::collections::VecDeque;

use super::cts::CtsEntry;
use super::eager::Parcel;
use super::stripe::Share;
use crate::engine::request::SLOTS;
use crate::os::error::{Error, Result};

/// The messages that one immediate covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// A share of the message with this key, or, as the last one of a run, a whole message and those before it that end
    /// with it.
    Share {
        /// The message.
        key: u16,
        /// Which part of it.
        share: Share,
    },
    /// A short message in a slot of the outbox.
    Short(Parcel),
}

/// How a message was sent: the data to resend a share of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer {
    /// The CTS entry that it answers.
    pub cts: CtsEntry,
    /// The content of each share's immediate.
    pub immediate: u32,
    /// The size is written to the receiver's table.
    pub is_reported: bool,
}

#[derive(Debug, Default)]
struct Qp {
    sent: VecDeque<Sent>,
    /// Entries that have completed, in all.
    done: u64,
}

/// The ledger of a connection, by queue pair.
#[derive(Debug)]
pub(crate) struct Ledger {
    qps: Vec<Qp>,
    answers: Vec<Option<Answer>>,
}

/// The result for a queue pair's entries.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Settled {
    /// These have arrived.
    pub arrived: Vec<Sent>,
    /// These have not, and never will.
    pub lost: Vec<Sent>,
}

impl Ledger {
    /// An empty ledger for this many queue pairs.
    pub(crate) fn new(qps: usize) -> Self {
        Self { qps: (0..qps).map(|_| Qp::default()).collect(), answers: vec![None; SLOTS] }
    }

    /// The message with this key has met its CTS entry.
    pub(crate) fn answer(&mut self, key: usize, answer: Answer) {
        self.answers[key] = Some(answer);
    }

    /// How the message with this key was sent.
    pub(crate) fn answer_of(&self, key: u16) -> Option<Answer> {
        self.answers[usize::from(key)]
    }

    /// An immediate was posted on that queue pair.
    #[inline(always)]
    pub(crate) fn sent(&mut self, qp: usize, sent: Sent) {
        self.qps[qp].sent.push_back(sent);
    }

    /// The immediate that is posted next on that queue pair also covers the last `count` ones, which were held back.
    pub(crate) fn merge(&mut self, qp: usize, count: usize) {
        let sent = &mut self.qps[qp].sent;
        sent.truncate(sent.len().saturating_sub(count));
    }

    /// The oldest immediate of that queue pair has completed.
    #[inline]
    pub(crate) fn completed(&mut self, qp: usize) {
        let qp = &mut self.qps[qp];
        qp.sent.pop_front();
        qp.done += 1;
    }

    /// The bytes of the oldest entry on that queue pair whose immediate has not completed; None when all have.
    pub(crate) fn oldest(&self, qp: usize) -> Option<u64> {
        self.qps[qp].sent.front().map(|sent| match sent {
            Sent::Share { share, .. } => share.length,
            Sent::Short(_) => 0,
        })
    }

    /// That queue pair is lost, and the receiver has received `arrived` immediates from it in total; None when the
    /// receiver reports that it has everything.
    ///
    /// # Errors
    /// When it has received more than were sent, or lacks some that its device has acknowledged.
    pub(crate) fn settle(&mut self, qp: usize, arrived: Option<u64>) -> Result<Settled> {
        let qp = &mut self.qps[qp];
        let Some(arrived) = arrived else {
            qp.done = 0;
            return Ok(Settled { arrived: qp.sent.drain(..).collect(), lost: Vec::new() });
        };
        let newly = arrived.checked_sub(qp.done).and_then(|newly| usize::try_from(newly).ok());
        let Some(newly) = newly.filter(|newly| *newly <= qp.sent.len()) else {
            return Err(Error::remote(format!(
                "of a lost queue pair the receiver has taken {arrived} immediates, but {} were acknowledged and {} more \
                 sent",
                qp.done,
                qp.sent.len()
            )));
        };
        // A queue pair that replaces it counts from the beginning.
        qp.done = 0;
        Ok(Settled { arrived: qp.sent.drain(..newly).collect(), lost: qp.sent.drain(..).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sent(key: u16) -> Sent {
        Sent::Share { key, share: Share { qp: 0, offset: 0, length: 1 } }
    }

    proptest! {
        /// Queue pairs that deliver in order, acknowledge late or never, and are lost at any moment, any number of
        /// times. Each message is received exactly once, and is reported done to the sender exactly once.
        #[test]
        fn what_is_in_doubt_arrives_once(
            qps in 2..4_usize,
            events in prop::collection::vec((0..10_u8, any::<prop::sample::Index>()), 1..400),
        ) {
            let mut ledger = Ledger::new(qps);
            // Per queue pair: the writes under way, those received in this epoch, and how many of them are
            // acknowledged.
            let mut way: Vec<VecDeque<u16>> = vec![VecDeque::new(); qps];
            let (mut taken, mut acknowledged) = (vec![0_u64; qps], vec![0_u64; qps]);
            let mut order: Vec<VecDeque<u16>> = vec![VecDeque::new(); qps];
            let (mut received, mut ended, mut next) = (Vec::new(), Vec::new(), 0_u16);
            let send = |ledger: &mut Ledger, way: &mut Vec<VecDeque<u16>>, order: &mut Vec<VecDeque<u16>>, qp: usize, key| {
                ledger.sent(qp, sent(key));
                way[qp].push_back(key);
                order[qp].push_back(key);
            };
            for (event, index) in events {
                let qp = index.index(qps);
                match event {
                    0..=3 => {
                        send(&mut ledger, &mut way, &mut order, qp, next);
                        next += 1;
                    }
                    4..=6 => if let Some(key) = way[qp].pop_front() {
                        received.push(key);
                        taken[qp] += 1;
                    },
                    7..=8 => if acknowledged[qp] < taken[qp] {
                        acknowledged[qp] += 1;
                        ledger.completed(qp);
                        ended.push(order[qp].pop_front().expect("sent"));
                    },
                    _ => {
                        let settled = ledger.settle(qp, Some(taken[qp])).expect("possible");
                        let keys = |list: Vec<Sent>| list.into_iter().map(|sent| match sent {
                            Sent::Share { key, .. } => key,
                            Sent::Short(_) => unreachable!("none was sent"),
                        }).collect::<Vec<_>>();
                        ended.extend(keys(settled.arrived));
                        order[qp].clear();
                        way[qp].clear();
                        (taken[qp], acknowledged[qp]) = (0, 0);
                        for key in keys(settled.lost) {
                            send(&mut ledger, &mut way, &mut order, (qp + 1) % qps, key);
                        }
                    }
                }
            }
            for qp in 0..qps {
                received.extend(way[qp].drain(..));
                ended.extend(order[qp].drain(..));
            }
            for mut list in [received, ended] {
                list.sort_unstable();
                prop_assert_eq!(list, (0..next).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let mut ledger = Ledger::new(1);
        (0..3).for_each(|key| ledger.sent(0, sent(key)));
        ledger.completed(0);
        assert!(ledger.settle(0, Some(0)).is_err(), "one was acknowledged");
        assert!(ledger.settle(0, Some(4)).is_err(), "three were sent");
        let settled = ledger.settle(0, Some(2)).expect("possible");
        assert_eq!(settled, Settled { arrived: vec![sent(1)], lost: vec![sent(2)] });
    }

    #[test]
    fn a_run_is_one_entry_and_a_receiver_that_has_everything_leaves_nothing_in_doubt() {
        let mut ledger = Ledger::new(1);
        (0..4).for_each(|key| ledger.sent(0, sent(key)));
        ledger.merge(0, 2);
        ledger.sent(0, sent(4));
        let all = Settled { arrived: vec![sent(0), sent(1), sent(4)], lost: Vec::new() };
        assert_eq!(ledger.settle(0, None).expect("possible"), all);
    }
}
