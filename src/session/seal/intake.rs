//! The bounce buffer: where the arriving frames of a protected stream wait until they are complete and checked.
//!
//! No byte leaves the buffer unchecked. It holds a few KiB while a stream carries short frames and grows to the size of
//! the chunks that arrive, to [`LARGEST`] at most. A frame that claims to be longer is refused when its header is read.

use super::codec::{Opener, Refused};
use crate::os::error::Error;
use crate::session::frame::Header;

/// The longest chunk that is accepted, in bytes: eight times what this release sends, so that another release may send
/// more.
pub(crate) const LARGEST: u32 = 4 << 20;

/// How much to read from the socket when no frame is open, in bytes: many short frames in one call.
const INPUT: usize = 8 << 10;

/// How much to read beyond the end of the current frame: room for the next headers.
pub(crate) const BEHIND: usize = 2 << 10;

/// The next item in the buffer.
#[derive(Debug)]
pub enum Item<'a> {
    /// A frame begins; the rest of it has not arrived or is not checked.
    Began(Header),
    /// A frame is complete, with its payload.
    Whole(Header, &'a [u8]),
}

/// The buffer of one stream.
pub struct Intake {
    opener: Opener,
    buffer: Vec<u8>,
    from: usize,
    to: usize,
    open: Option<Header>,
}

impl Intake {
    /// An empty buffer.
    pub(crate) fn new(opener: Opener) -> Self {
        Self { opener, buffer: vec![0; INPUT], from: 0, to: 0, open: None }
    }

    /// The half that checks the bytes.
    #[cfg(test)]
    pub(crate) fn opener(&self) -> &Opener {
        &self.opener
    }

    /// Where the next bytes go. The length depends on how much of the current frame is missing, so that little must be
    /// moved afterwards.
    pub fn room(&mut self) -> &mut [u8] {
        if self.from > 0 {
            self.buffer.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let wanted = match &self.open {
            Some(header) => (self.opener.body_length(header) + BEHIND).max(INPUT),
            None => INPUT,
        };
        if self.buffer.len() < wanted {
            self.buffer.resize(wanted, 0);
        }
        &mut self.buffer[self.to..wanted]
    }

    /// This many bytes were put into the room.
    pub fn filled(&mut self, bytes: usize) {
        self.to += bytes;
    }

    /// The header of a frame that is not complete yet.
    pub(crate) fn open(&self) -> Option<&Header> {
        self.open.as_ref()
    }

    /// The next event; None until more bytes have arrived.
    ///
    /// # Errors
    /// When something was modified on the way, or a header violates the protocol. This must not be called again after
    /// that.
    pub fn take(&mut self) -> Result<Option<Item<'_>>, Refused> {
        let here = self.to - self.from;
        if let Some(header) = self.open {
            let length = self.opener.body_length(&header);
            if here < length {
                return Ok(None);
            }
            let bytes = &mut self.buffer[self.from..self.from + length];
            if !self.opener.body(&header, bytes) {
                return Err(Refused::Damaged);
            }
            self.open = None;
            self.from += length;
            return Ok(Some(Item::Whole(header, &bytes[..header.length as usize])));
        }
        let length = self.opener.header_length();
        if here < length {
            return Ok(None);
        }
        let header = self.opener.header(&mut self.buffer[self.from..self.from + length])?;
        if header.length > LARGEST {
            return Err(Refused::Wrong(Error::remote(format!(
                "a chunk of {} bytes is longer than any",
                header.length
            ))));
        }
        self.from += length;
        self.open = Some(header);
        Ok(Some(Item::Began(header)))
    }
}
