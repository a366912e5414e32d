//! A connection of which both ends are in this process, and what its messages must come to.

use std::ffi::c_int;

use super::Id;

/// Tags that inputs use.
pub const TAGS: usize = 4;

/// A tag and a size.
pub type Unmatched = (c_int, usize);

/// A message that was sent: its serial number and its size. For a receive: 0 and how much it holds.
#[derive(Clone, Copy)]
pub struct Message {
    /// Its serial number.
    pub serial: u64,
    /// Its size.
    pub size: usize,
}

/// One end of a connection, with what was posted on it, by tag.
pub struct End {
    /// Its id.
    pub id: Id,
    /// Whether it has not been closed.
    pub open: bool,
    posted: [Vec<Message>; TAGS],
}

impl End {
    fn new(id: Id) -> Self {
        Self { id, open: true, posted: Default::default() }
    }

    /// The messages with this tag, in order.
    pub fn posted(&self, tag: c_int) -> &[Message] {
        &self.posted[tag as usize]
    }

    /// Notes one more, and gives its place among those with its tag.
    pub fn post(&mut self, tag: c_int, message: Message) -> usize {
        self.posted[tag as usize].push(message);
        self.posted[tag as usize].len() - 1
    }
}

/// A connection.
pub struct Pair {
    /// The sending side.
    pub sender: End,
    /// The receiving side.
    pub receiver: End,
    /// A message was longer than its receive, or a call failed: from then on everything on it may fail.
    pub broken: bool,
}

impl Pair {
    /// One that has just been made.
    pub fn new(sender: Id, receiver: Id) -> Self {
        Self { sender: End::new(sender), receiver: End::new(receiver), broken: false }
    }

    /// Whether it serves the next input as if nothing had happened.
    pub fn is_whole(&self) -> bool {
        !self.broken && self.sender.open && self.receiver.open
    }

    /// Whether every receive that has its message ends well. What was sent before an orderly close arrives; but a
    /// receive that waits for more then fails, and with it the others.
    pub fn receives_end_well(&self) -> bool {
        !self.broken && self.receiver.open && (self.sender.open || self.unmatched().1.is_empty())
    }

    /// Forgets what has ended.
    pub fn clear(&mut self) {
        self.sender.posted.iter_mut().chain(&mut self.receiver.posted).for_each(Vec::clear);
    }

    /// Tags and sizes of the messages without a receive, and of the receives without a message.
    pub fn unmatched(&self) -> (Vec<Unmatched>, Vec<Unmatched>) {
        let (mut receives, mut sends) = (Vec::new(), Vec::new());
        for tag in 0..TAGS {
            let (sent, posted) = (&self.sender.posted[tag], &self.receiver.posted[tag]);
            receives.extend(sent.iter().skip(posted.len()).map(|message| (tag as c_int, message.size)));
            sends.extend(posted.iter().skip(sent.len()).map(|message| (tag as c_int, message.size)));
        }
        (receives, sends)
    }
}
