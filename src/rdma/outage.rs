//! The states of a queue pair that is lost, and the messages that the two sides exchange about it
//! ([`recovery`](super::recovery)).

use std::time::{Duration, Instant};

use super::record::{EceRecord, QpRecord};
use crate::os::error::{Error, Result};
use crate::session::frame::{Header, Type};

/// The state of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QpState {
    /// It carries messages.
    Up,
    /// Its queue pair is stopped, and its completions are being taken.
    Stopping {
        /// Since when.
        since: Instant,
    },
    /// This side's queue pair is reset; the other side has not yet reported that it reset its own.
    Ended {
        /// Since when it is lost.
        since: Instant,
    },
    /// Both queue pairs have ended.
    Lost,
    /// It has a new queue pair, which is not known to work yet.
    Returning,
}

/// A failure of a queue pair.
#[derive(Debug)]
pub(crate) struct Trouble {
    /// The failure, in the form of the connection's error.
    pub error: Error,
    /// It is only the consequence of another failure.
    pub is_flush: bool,
}

/// How many immediates the other side has received from a queue pair; None when it has everything that was sent.
pub(crate) type Taken = Option<u64>;

/// The results for queue pairs.
#[derive(Debug)]
pub(crate) struct Tended {
    /// These are lost on both sides: data in doubt may be resent.
    pub gone: Vec<(usize, Taken)>,
    /// These carry messages again.
    pub back: Vec<usize>,
    /// The new queue pairs of these are connected, or could not be.
    pub connected: Vec<(usize, Result<()>)>,
}

/// The other side's message about a queue pair.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct QpMessage {
    /// Which queue pair.
    pub qp: u64,
    /// Which of its queue pairs.
    pub epoch: u16,
    /// The content.
    pub notice: QpNotice,
}

/// The content of the message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum QpNotice {
    /// It has ended its queue pair, having received this many immediates.
    Ended(u64),
    /// Its new queue pair; none: not now.
    Offer(Option<QpRecord>),
    /// The new queue pair connects the sender to the receiver.
    Proven,
}

impl QpMessage {
    /// The queue pair and epoch that a frame names.
    pub(crate) fn of(header: &Header) -> Self {
        Self { qp: header.order, epoch: header.epoch, notice: QpNotice::Offer(None) }
    }
}

/// The content of a frame about a new queue pair.
pub(crate) fn notice(header: &Header) -> QpNotice {
    if header.total == PROVEN { QpNotice::Proven } else { QpNotice::Offer(offered(header)) }
}

/// The values of `total` in such a frame.
const OFFER: u64 = 1;
pub(super) const PROVEN: u64 = 2;

fn offered(header: &Header) -> Option<QpRecord> {
    let [number, first_packet, vendor, options] =
        [header.message, header.message >> 32, header.offset, header.offset >> 32].map(|word| word as u32);
    let ece = (header.offset != 0).then_some(EceRecord { vendor, options, mask: header.tag.cast_unsigned() });
    (header.total == OFFER).then_some(QpRecord { number, first_packet, ece })
}

/// The frame that offers a replacement for a queue pair.
pub(super) fn offer(qp: usize, epoch: u16, record: Option<&QpRecord>) -> Header {
    let blank = Header { order: qp as u64, ..Header::of(Type::QueuePair, epoch) };
    let Some(record) = record else { return blank };
    let both = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let ece = record.ece.as_ref();
    Header {
        message: both(record.number, record.first_packet),
        offset: ece.map_or(0, |ece| both(ece.vendor, ece.options)),
        tag: ece.map_or(0, |ece| ece.mask.cast_signed()),
        total: OFFER,
        ..blank
    }
}

/// The pause after this many failed attempts: 0.25 to 2 s.
pub(super) fn pause(tries: u32) -> Duration {
    Duration::from_millis(125) * (1 << tries.min(4))
}

/// How long the first write over the queue pair of this attempt may take: 0.5 to 4 s. The device's own timeout is not
/// suitable. It retransmits only after `NCCL_IB_TIMEOUT`, four seconds by default, and the first packet is easily lost
/// on a link that has just come up. A slow peer gets more time in the next attempt.
pub(super) fn patience(tries: u32) -> Duration {
    Duration::from_millis(250) * (1 << tries.min(4))
}
