//! What a sender has posted on each queue pair and does not know to have arrived.
//!
//! When a queue pair is lost, its last work requests are in doubt: a missing acknowledgement proves nothing. But a
//! reliable queue pair delivers in order, so one number from the receiver settles it: how many immediates it received
//! from that queue pair before it ended it for ever ([`recovery`](super::recovery)). That many of the entries here, from
//! the front, have arrived; the rest is resent over other queue pairs.
//!
//! Kept unless recovery is off. This module posts nothing.

use std::collections::VecDeque;

use super::eager::Parcel;
use super::line::Line;
use super::stripe::Share;
use crate::engine::request::SLOTS;
use crate::os::error::{Error, Result};

/// What one immediate covers.
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
    /// A short message in a place of the outbox.
    Short(Parcel),
}

/// How a message was sent: what is needed to resend a share of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer {
    /// The CTS entry that it answers.
    pub line: Line,
    /// The content of each share's immediate.
    pub immediate: u32,
    /// The size is written to the receiver's table.
    pub is_told: bool,
}

#[derive(Debug, Default)]
struct Lane {
    sent: VecDeque<Sent>,
    /// Entries that have completed, in all.
    done: u64,
}

/// The ledger of a connection, by lane.
#[derive(Debug)]
pub(crate) struct Ledger {
    lanes: Vec<Lane>,
    answers: Vec<Option<Answer>>,
}

/// The result for a lane's entries.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Settled {
    /// These have arrived.
    pub arrived: Vec<Sent>,
    /// These have not, and never will.
    pub lost: Vec<Sent>,
}

impl Ledger {
    /// An empty ledger for this many lanes.
    pub(crate) fn new(lanes: usize) -> Self {
        Self { lanes: (0..lanes).map(|_| Lane::default()).collect(), answers: vec![None; SLOTS] }
    }

    /// The message with this key has met its CTS entry.
    pub(crate) fn answer(&mut self, key: usize, answer: Answer) {
        self.answers[key] = Some(answer);
    }

    /// How the message with this key was sent.
    pub(crate) fn answer_of(&self, key: u16) -> Option<Answer> {
        self.answers[usize::from(key)]
    }

    /// An immediate was posted on that lane.
    #[inline(always)]
    pub(crate) fn sent(&mut self, lane: usize, sent: Sent) {
        self.lanes[lane].sent.push_back(sent);
    }

    /// The immediate that is posted next on that lane also covers the last `count` ones, which were held back.
    pub(crate) fn merge(&mut self, lane: usize, count: usize) {
        let sent = &mut self.lanes[lane].sent;
        sent.truncate(sent.len().saturating_sub(count));
    }

    /// The oldest immediate of that lane has completed.
    #[inline]
    pub(crate) fn completed(&mut self, lane: usize) {
        let lane = &mut self.lanes[lane];
        lane.sent.pop_front();
        lane.done += 1;
    }

    /// The bytes of the oldest entry on that lane whose immediate has not completed; None when all have.
    pub(crate) fn oldest(&self, lane: usize) -> Option<u64> {
        self.lanes[lane].sent.front().map(|sent| match sent {
            Sent::Share { share, .. } => share.length,
            Sent::Short(_) => 0,
        })
    }

    /// That lane is lost, and the receiver has received `arrived` immediates from it in total; None when the receiver
    /// reports that it has everything.
    ///
    /// # Errors
    /// When it has received more than were sent, or lacks some that its device has acknowledged.
    pub(crate) fn settle(&mut self, lane: usize, arrived: Option<u64>) -> Result<Settled> {
        let lane = &mut self.lanes[lane];
        let Some(arrived) = arrived else {
            lane.done = 0;
            return Ok(Settled { arrived: lane.sent.drain(..).collect(), lost: Vec::new() });
        };
        let news = arrived.checked_sub(lane.done).and_then(|news| usize::try_from(news).ok());
        let Some(news) = news.filter(|news| *news <= lane.sent.len()) else {
            return Err(Error::remote(format!(
                "of a lost queue pair the receiver has taken {arrived} immediates, but {} were acknowledged and {} more \
                 sent",
                lane.done,
                lane.sent.len()
            )));
        };
        // A queue pair that replaces it counts from the beginning.
        lane.done = 0;
        Ok(Settled { arrived: lane.sent.drain(..news).collect(), lost: lane.sent.drain(..).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sent(key: u16) -> Sent {
        Sent::Share { key, share: Share { lane: 0, offset: 0, length: 1 } }
    }

    proptest! {
        /// Queue pairs that deliver in order, acknowledge late or never, and are lost at any moment, any number of
        /// times: each message is received exactly once, and is reported done to the sender exactly once.
        #[test]
        fn what_is_in_doubt_arrives_once(
            lanes in 2..4_usize,
            events in prop::collection::vec((0..10_u8, any::<prop::sample::Index>()), 1..400),
        ) {
            let mut ledger = Ledger::new(lanes);
            // Per lane: what is under way, what was received in this epoch, and how much of that is acknowledged.
            let mut way: Vec<VecDeque<u16>> = vec![VecDeque::new(); lanes];
            let (mut taken, mut acknowledged) = (vec![0_u64; lanes], vec![0_u64; lanes]);
            let mut order: Vec<VecDeque<u16>> = vec![VecDeque::new(); lanes];
            let (mut received, mut ended, mut next) = (Vec::new(), Vec::new(), 0_u16);
            let send = |ledger: &mut Ledger, way: &mut Vec<VecDeque<u16>>, order: &mut Vec<VecDeque<u16>>, lane: usize, key| {
                ledger.sent(lane, sent(key));
                way[lane].push_back(key);
                order[lane].push_back(key);
            };
            for (event, index) in events {
                let lane = index.index(lanes);
                match event {
                    0..=3 => {
                        send(&mut ledger, &mut way, &mut order, lane, next);
                        next += 1;
                    }
                    4..=6 => if let Some(key) = way[lane].pop_front() {
                        received.push(key);
                        taken[lane] += 1;
                    },
                    7..=8 => if acknowledged[lane] < taken[lane] {
                        acknowledged[lane] += 1;
                        ledger.completed(lane);
                        ended.push(order[lane].pop_front().expect("sent"));
                    },
                    _ => {
                        let settled = ledger.settle(lane, Some(taken[lane])).expect("possible");
                        let keys = |list: Vec<Sent>| list.into_iter().map(|sent| match sent {
                            Sent::Share { key, .. } => key,
                            Sent::Short(_) => unreachable!("none was sent"),
                        }).collect::<Vec<_>>();
                        ended.extend(keys(settled.arrived));
                        order[lane].clear();
                        way[lane].clear();
                        (taken[lane], acknowledged[lane]) = (0, 0);
                        for key in keys(settled.lost) {
                            send(&mut ledger, &mut way, &mut order, (lane + 1) % lanes, key);
                        }
                    }
                }
            }
            for lane in 0..lanes {
                received.extend(way[lane].drain(..));
                ended.extend(order[lane].drain(..));
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
