//! Ring all-reduce of float32 over any transport that moves messages to one neighbour and from the other.
//!
//! As in NCCL, data passes through fixed staging slots. A connection has [`SLOTS`] of them on either side, and chunks
//! of at most [`CHUNK_BYTES`] travel through them in order. A rank does five things with a chunk (see
//! [`program::Action`]). So the transport sees NCCL-like traffic, user buffers may overlap as they like, and memory is
//! registered once.
//!
//! It knows transports only as a [`Link`].

mod executor;
pub(crate) mod pattern;
pub(crate) mod program;

pub(crate) use executor::{Buffers, Ring};

/// Messages in flight per connection and direction: NCCL's number of steps in its buffer.
pub(crate) const SLOTS: usize = 8;
/// The largest message, 512 KiB: NCCL's step with the default NCCL_BUFFSIZE.
pub(crate) const CHUNK_BYTES: usize = 512 << 10;
/// The same in elements.
pub(crate) const CHUNK_ELEMENTS: usize = CHUNK_BYTES / size_of::<f32>();

/// A connection to the right-hand neighbour and one from the left-hand neighbour, each with [`SLOTS`] staging slots of
/// [`CHUNK_ELEMENTS`]. Messages arrive in the order in which they were sent.
pub(crate) trait Link {
    /// Why a transfer failed.
    type Error;

    /// What arrived in a receiving slot, and a sending slot to be filled; neither is in flight. Empty where no slot is
    /// asked for.
    fn slots(&mut self, receive: Option<usize>, send: Option<usize>) -> (&[f32], &mut [f32]);

    /// Starts to send the first `elements` of a slot. False means "not now".
    fn start_send(&mut self, slot: usize, elements: usize) -> Result<bool, Self::Error>;

    /// Starts to receive up to `elements` into a slot. False means "not now".
    fn start_receive(&mut self, slot: usize, elements: usize) -> Result<bool, Self::Error>;

    /// Whether the send from a slot is over.
    fn is_sent(&mut self, slot: usize) -> Result<bool, Self::Error>;

    /// The number of bytes that arrived, when the receive into a slot is over.
    fn received_bytes(&mut self, slot: usize) -> Result<Option<usize>, Self::Error>;

    /// Called when nothing could be done: gives way to others, or gives up.
    fn idle(&mut self) -> Result<(), Self::Error>;

    /// The failure that `expected` bytes were due and `arrived` came.
    fn wrong_size(&self, expected: usize, arrived: usize) -> Self::Error;
}
