//! Shares of messages that wait for room, and the last step before the device: which writes are held back, and which
//! writes one immediate covers.

use super::Message;
use crate::engine::request::MAX_PARTS;
use crate::os::error::Result;
use crate::rdma::cts::{CtsEntry, Immediate};
use crate::rdma::fabric::Qp;
use crate::rdma::ledger::Ledger;
use crate::rdma::stripe::Share;
use crate::rdma::verbs::{Remote, Work};

/// A share that waits for room in its queue pair.
pub(super) struct Job {
    pub(super) key: usize,
    pub(super) share: Share,
    /// Bytes of the share that were posted.
    pub(super) posted: u64,
    /// Where the receive's buffer starts, and its key for this queue pair.
    pub(super) to: Remote,
    /// Bytes of the receive.
    pub(super) size: u64,
    /// The number of its CTS entry.
    pub(super) cts: u32,
    /// Its slot.
    pub(super) slot: u8,
    /// It is not the last part of its group.
    pub(super) has_more: bool,
    pub(super) immediate: u32,
    /// Whether this share's queue pair carries the size.
    pub(super) tells: bool,
}

impl Job {
    /// A share of the message with this key, of which nothing is posted; `key_there` is the receiver's key for its
    /// queue pair.
    pub(super) fn new(key: usize, share: Share, cts: &CtsEntry, key_there: u32, immediate: u32, tells: bool) -> Self {
        let CtsEntry { address, size, number, slot, has_more, .. } = *cts;
        let to = Remote { address, key: key_there };
        Self { key, share, posted: 0, to, size, cts: number, slot, has_more, immediate, tells }
    }

    /// Whether it is a whole message, of `length` bytes, that fills its receive.
    pub(super) fn fills(&self, length: u64) -> bool {
        self.share.length == length && length == self.size
    }
}

/// The data of a single write beside those that the device needs.
pub(super) struct End {
    /// Its message.
    pub(super) key: usize,
    pub(super) qp: usize,
    pub(super) cts: u32,
    /// Whether it is kept back until the other parts of its group are posted.
    pub(super) is_held: bool,
    /// Whether it is a whole message that fills its receive: it can be part of a run.
    pub(super) fills: bool,
}

/// Posts a write, or holds it back.
#[inline]
pub(super) fn hand_over(
    qp: &mut Qp,
    messages: &mut slab::Slab<Message>,
    (holds, run, ledger): (&mut bool, &mut Run, &mut Option<Ledger>),
    end: &End,
    write: Work,
) -> Result<()> {
    // SAFETY: the transport may use the message's memory until its request ends, which needs this write's completion,
    // and `Registration` keeps it pinned until then.
    unsafe {
        if end.is_held {
            qp.hold(write)?;
            *holds = true;
            if end.fills {
                run.add(end.qp, end.cts, end.key);
            } else {
                run.count = 0;
            }
        } else if *holds && end.fills && qp.held() >= run.count && run.is_followed_by(end.qp, end.cts) {
            // From now on the earlier ones end with this one.
            let answer = Immediate::decode(write.immediate.unwrap_or(0));
            let immediate = Immediate { shares: run.count as u8 + 1, is_run: true, ..answer };
            qp.post_for(run.count, Work { immediate: Some(immediate.encode()), ..write })?;
            if let Some(ledger) = ledger {
                ledger.merge(end.qp, run.count);
            }
            let keys = &run.keys[..run.count];
            for (earlier, key) in keys.iter().zip(keys[1..].iter().map(|key| usize::from(*key)).chain([end.key])) {
                messages[key].earlier = Some(*earlier);
            }
            run.count = 0;
        } else {
            qp.post_one(|| write)?;
            run.count = 0;
        }
    }
    Ok(())
}

/// The last writes that a queue pair holds back, if one immediate can cover all of them. Each must be a whole message
/// that fills its receive, and their CTS entries must follow each other.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) qp: usize,
    /// The CTS entry of the last one.
    pub(super) cts: u32,
    /// Their messages.
    pub(super) keys: [u16; MAX_PARTS],
    pub(super) count: usize,
}

impl Run {
    /// A write is held back that could be part of a run.
    pub(super) fn add(&mut self, qp: usize, cts: u32, key: usize) {
        if !self.is_followed_by(qp, cts) {
            self.count = 0;
        }
        self.keys[self.count] = key as u16;
        (self.qp, self.cts) = (qp, cts);
        self.count += 1;
    }

    /// Whether that CTS entry is the next one, and there is room.
    fn is_followed_by(&self, qp: usize, cts: u32) -> bool {
        (1..MAX_PARTS).contains(&self.count) && self.qp == qp && self.cts.wrapping_add(1) == cts
    }
}
