//! The sending half of a pair of ranks: messages in order, each a header and the pieces that follow it.

use std::collections::VecDeque;
use std::ptr;

use super::wire::{HEADER, Header, PIECE};
use crate::os::error::Result;
use crate::plugin::facade::{self, Part};

/// A message, and the memory that is read for it.
pub struct Message {
    /// Boxed, because the connection may read it until its request is done.
    header: Box<[u8; HEADER]>,
    is_begun: bool,
    /// What has not been handed to the connection yet.
    address: usize,
    left: usize,
    /// Own registration that is read; 0 for none.
    region: u32,
    /// Own request that waits until the memory has been read.
    request: Option<u64>,
}

impl Message {
    /// A header alone.
    pub fn bare(header: &Header) -> Self {
        Self::with_bytes(header, 0, 0, None)
    }

    /// A header and the `header.size` bytes at `address`, which belong to the own registration `region`.
    pub fn with_bytes(header: &Header, region: u32, address: usize, request: Option<u64>) -> Self {
        let left = if region == 0 { 0 } else { header.size as usize };
        Self { header: Box::new(header.encode()), is_begun: false, address, left, region, request }
    }
}

/// A connection to another rank and what goes over it.
pub struct Outgoing {
    comm: usize,
    waiting: VecDeque<Message>,
    /// Requests of the connection, the oldest first; the last of a message keeps the message.
    under_way: VecDeque<(usize, Option<Message>)>,
}

impl Outgoing {
    /// Over this connection, which it closes when it goes.
    pub fn over(comm: usize) -> Self {
        Self { comm, waiting: VecDeque::new(), under_way: VecDeque::new() }
    }

    /// Appends a message.
    pub fn push(&mut self, message: Message) {
        self.waiting.push_back(message);
    }

    /// Whether all messages have been sent.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.under_way.is_empty()
    }

    /// Whether a message reads from this registration.
    pub fn uses(&self, region: u32) -> bool {
        let under_way = self.under_way.iter().filter_map(|(_, message)| message.as_ref());
        under_way.chain(&self.waiting).any(|message| message.region == region)
    }

    /// Sends what the connection takes; the requests whose memory has been read go to `read`. Gives whether anything moved.
    ///
    /// # Errors
    /// When the connection has failed.
    pub fn advance(&mut self, read: &mut Vec<u64>) -> Result<bool> {
        let mut moved = false;
        while let Some(message) = self.waiting.front_mut() {
            let (address, size) = if message.is_begun {
                (message.address, message.left.min(PIECE))
            } else {
                (message.header.as_ptr().addr(), HEADER)
            };
            let data = ptr::with_exposed_provenance_mut(address);
            let part = Part { data, size, tag: 0, mr: 0, profiler: ptr::null_mut() };
            let Some(request) = facade::isend(self.comm, part)? else { break };
            moved = true;
            if message.is_begun {
                message.address += size;
                message.left -= size;
            }
            message.is_begun = true;
            let whole = if message.left == 0 { self.waiting.pop_front() } else { None };
            self.under_way.push_back((request, whole));
        }
        while let Some((request, _)) = self.under_way.front() {
            if facade::test(*request)?.is_none() {
                break;
            }
            moved = true;
            if let Some((_, Some(message))) = self.under_way.pop_front() {
                read.extend(message.request);
            }
        }
        Ok(moved)
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        // Before the messages go, whose headers the connection may still read. It may have ended with its context.
        let _ = facade::close_send(self.comm);
    }
}
