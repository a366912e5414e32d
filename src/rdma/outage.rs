//! A lane that has lost its queue pair: the states that it goes through, and what the two sides say of it
//! ([`mending`](super::mending)).

use std::time::{Duration, Instant};

use super::record::{EceRecord, LaneRecord};
use crate::os::error::{Error, Result};
use crate::session::frame::{Header, Type};

/// How a lane fares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// It carries messages.
    Up,
    /// Its queue pair is stopped, and what it has completed is being taken.
    Stopping {
        /// Since when.
        since: Instant,
    },
    /// Its queue pair has ended, and the other side's is not known to have.
    Ended {
        /// Since when it is lost.
        since: Instant,
    },
    /// Both have.
    Lost,
    /// It has a new queue pair, which is not known to lead anywhere yet.
    Returning,
}

/// What has gone wrong with a lane.
#[derive(Debug)]
pub struct Trouble {
    /// The failure, as the connection's would be.
    pub error: Error,
    /// It is only the consequence of another one.
    pub is_flush: bool,
}

/// How many immediates the other side has taken from a lane; none when it has everything that was sent.
pub type Taken = Option<u64>;

/// What has become of lanes.
#[derive(Debug)]
pub struct Tended {
    /// These are lost, here and there: what is in doubt of them may travel again.
    pub gone: Vec<(usize, Taken)>,
    /// These carry messages again.
    pub back: Vec<usize>,
    /// The new queue pairs of these are connected, or could not be.
    pub connected: Vec<(usize, Result<()>)>,
}

/// What the other side says of a lane.
#[derive(Debug, Clone, PartialEq)]
pub struct Word {
    /// Which lane.
    pub lane: u64,
    /// Which of its queue pairs.
    pub epoch: u16,
    /// What.
    pub said: Said,
}

/// What the other side says.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// It has ended its queue pair, having taken so many immediates.
    Ended(u64),
    /// Its new queue pair; none: not now.
    Offer(Option<LaneRecord>),
    /// The new queue pair leads from the sender to the receiver.
    Proven,
}

impl Word {
    /// What a frame is about.
    pub fn of(header: &Header) -> Self {
        Self { lane: header.order, epoch: header.epoch, said: Said::Offer(None) }
    }
}

/// What a frame about a new queue pair says.
pub fn said(header: &Header) -> Said {
    if header.total == PROVEN { Said::Proven } else { Said::Offer(offered(header)) }
}

/// What `total` says of such a frame.
const OFFER: u64 = 1;
pub(super) const PROVEN: u64 = 2;

fn offered(header: &Header) -> Option<LaneRecord> {
    let [number, first_packet, vendor, options] =
        [header.message, header.message >> 32, header.offset, header.offset >> 32].map(|word| word as u32);
    let ece = (header.offset != 0).then_some(EceRecord { vendor, options, mask: header.tag.cast_unsigned() });
    (header.total == OFFER).then_some(LaneRecord { number, first_packet, ece })
}

/// The frame that offers a queue pair for a lane.
pub(super) fn offer(lane: usize, epoch: u16, record: Option<&LaneRecord>) -> Header {
    let blank = Header { order: lane as u64, ..Header::of(Type::Lane, epoch) };
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

/// How long after the so-manyth try, which came to nothing, the next one is made: 0.25 to 2 s.
pub(super) fn pause(tries: u32) -> Duration {
    Duration::from_millis(125) * (1 << tries.min(4))
}

/// How long the first write over the queue pair of the so-manyth try may take: 0.5 to 4 s. The device's own patience is no
/// measure: it sends again only after `NCCL_IB_TIMEOUT`, four seconds if nothing is set, and where a link has just come up
/// the first packet is easily lost. A peer that is slow is waited for longer the next time.
pub(super) fn patience(tries: u32) -> Duration {
    Duration::from_millis(250) * (1 << tries.min(4))
}
