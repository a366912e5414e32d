//! The sending half of a pair of ranks: messages in order, each a header and the pieces that follow it. Bytes in a
//! GPU's memory are copied to the host first.

use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use super::gpu::{Gpu, Mark};
use super::line::SendEnd;
use super::registry::Spot;
use super::staging::Lane;
use super::wire::{HEADER, Header, PIECE};
use crate::os::error::Result;

/// How many parts are begun before the connection has accepted the first of them.
const AHEAD: usize = 16;

/// A message, and the memory that is read for it.
pub(crate) struct Message {
    /// Boxed, because the connection may read it until its request is done.
    header: Box<[u8; HEADER]>,
    is_begun: bool,
    /// The start of the bytes that are not on their way yet, and their number.
    address: usize,
    left: usize,
    /// The GPU that holds the bytes.
    gpu: Option<Arc<Gpu>>,
    /// The own registration that is read; 0 for none.
    region: u32,
    /// The own request that waits until the memory has been read.
    request: Option<u64>,
}

impl Message {
    /// A header alone.
    pub(crate) fn bare(header: &Header) -> Self {
        Self::with_bytes(header, 0, Spot::default(), None)
    }

    /// A header and the `header.size` bytes at `from`, which belong to the own registration `region`.
    pub(crate) fn with_bytes(header: &Header, region: u32, from: Spot, request: Option<u64>) -> Self {
        let left = if region == 0 { 0 } else { header.size as usize };
        let Spot { address, gpu, .. } = from;
        Self { header: Box::new(header.encode()), is_begun: false, address, left, gpu, region, request }
    }
}

/// A header or a piece on its way.
struct Moving {
    address: usize,
    size: usize,
    /// The staging slot to which it is copied first, and the mark of that copy.
    copy: Option<(usize, Mark)>,
    /// The whole message; set in its last part.
    message: Option<Message>,
}

/// A connection to another rank, and the messages on it.
pub(crate) struct Outgoing {
    /// Closed before the messages are dropped, whose headers the connection may still read.
    end: Box<dyn SendEnd>,
    lane: Lane,
    waiting: VecDeque<Message>,
    /// The parts that the connection has not accepted yet.
    begun: VecDeque<Moving>,
    /// Requests of the connection, the oldest first.
    under_way: VecDeque<(usize, Moving)>,
    /// When the last request ended that the connection did not copy at once.
    sent: Option<Instant>,
}

impl Outgoing {
    /// Sends to this rank, over this connection, which is closed when this is dropped.
    pub(crate) fn over(end: Box<dyn SendEnd>, rank: u32) -> Self {
        let (waiting, begun, under_way) = Default::default();
        Self { end, lane: Lane::to(rank), waiting, begun, under_way, sent: None }
    }

    /// See [`SendEnd::abandon`].
    pub(crate) fn abandon(&mut self) {
        self.end.abandon();
    }

    /// When a part of a message was last sent. A part that the connection has only accepted proves nothing about the
    /// other rank. Over a long path or a full network a part may end when the kernel has taken it, up to 2 MiB of them,
    /// or 16 MiB over a long path, so a silent rank is found that much later.
    pub(crate) fn sent(&self) -> Option<Instant> {
        self.sent
    }

    /// Appends a message.
    pub(crate) fn push(&mut self, message: Message) {
        self.waiting.push_back(message);
    }

    /// Whether all messages have been sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.begun.is_empty() && self.under_way.is_empty()
    }

    /// Whether a message reads from this registration.
    pub(crate) fn uses(&self, region: u32) -> bool {
        let moving = self.under_way.iter().map(|(_, moving)| moving).chain(&self.begun);
        moving.filter_map(|moving| moving.message.as_ref()).chain(&self.waiting).any(|message| message.region == region)
    }

    /// Sends the parts that the connection accepts. Adds the requests whose memory has been read to `read`. Returns
    /// whether anything moved.
    ///
    /// # Errors
    /// When the connection or a GPU has failed.
    pub(crate) fn advance(&mut self, read: &mut Vec<u64>) -> Result<bool> {
        let mut moved = false;
        // Requests that the connection accepts in this call. A request that ends at once was copied, whatever happens
        // to the rank.
        let mut fresh = 0;
        loop {
            while self.begun.len() < AHEAD
                && let Some(moving) = self.begin()?
            {
                self.begun.push_back(moving);
            }
            let Some(moving) = self.begun.front() else { break };
            if let Some((_, mark)) = &moving.copy
                && !mark.is_reached()?
            {
                break;
            }
            let address = moving.copy.as_ref().map_or(moving.address, |(slot, _)| *slot);
            let data = ptr::with_exposed_provenance_mut(address);
            let Some(request) = self.end.send(data, moving.size)? else { break };
            moved = true;
            fresh += 1;
            self.under_way.extend(self.begun.pop_front().map(|moving| (request, moving)));
        }
        while let Some((request, _)) = self.under_way.front() {
            if !self.end.is_sent(*request)? {
                break;
            }
            moved = true;
            if self.under_way.len() > fresh {
                self.sent = Some(Instant::now());
            }
            fresh = fresh.min(self.under_way.len() - 1);
            let Some((_, moving)) = self.under_way.pop_front() else { break };
            if let Some((slot, _)) = moving.copy {
                self.lane.give_back(slot);
            }
            read.extend(moving.message.and_then(|message| message.request));
        }
        Ok(moved)
    }

    /// The next part of the first message that waits. None if no message waits, or there is no slot for the part.
    fn begin(&mut self) -> Result<Option<Moving>> {
        let Some(message) = self.waiting.front_mut() else { return Ok(None) };
        let mut moving = if message.is_begun {
            Moving { address: message.address, size: message.left.min(PIECE), copy: None, message: None }
        } else {
            Moving { address: message.header.as_ptr().expose_provenance(), size: HEADER, copy: None, message: None }
        };
        if message.is_begun {
            if let Some(gpu) = &message.gpu {
                let Some(slot) = self.lane.take(&gpu.staging) else { return Ok(None) };
                // SAFETY: the source lies inside registered memory, and a registration ends only when the placer has
                // seen all streams come this far. The slot is this part's until it is given back.
                moving.copy = Some((slot, unsafe { gpu.copy(slot, moving.address, moving.size) }?));
            }
            message.address += moving.size;
            message.left -= moving.size;
        }
        message.is_begun = true;
        if message.left == 0 {
            moving.message = self.waiting.pop_front();
        }
        Ok(Some(moving))
    }
}
