//! The frames sent over the control channel, for the case that its socket must be replaced.
//!
//! A socket that falls silent loses the frames under way. Both sides count the frames that they have received, report
//! the count over the next socket ([`Type::Ack`](crate::session::frame::Type::Ack)), and resend the rest. Frames that
//! are repeated anyway ([`Type::Query`](crate::session::frame::Type::Query)) do not count.
//!
//! There are few such frames, a handful for each lost queue pair, so the last ones are kept whether they have arrived
//! or not.
//!
//! Pure: no socket.

use std::collections::VecDeque;

use crate::os::error::{Error, Result};

/// Frames that are kept. No more are under way unless a connection loses queue pairs a hundred times while its control
/// channel is silent.
const MOST: usize = 512;

/// The frames that this side has sent.
#[derive(Debug, Default)]
pub(crate) struct SentFrames {
    /// How many were sent before the first that is kept.
    before: u64,
    frames: VecDeque<Box<[u8]>>,
}

impl SentFrames {
    /// A frame is sent.
    pub(crate) fn add(&mut self, frame: &[u8]) {
        if self.frames.len() == MOST {
            self.frames.pop_front();
            self.before += 1;
        }
        self.frames.push_back(frame.into());
    }

    /// The other side has received this many: returns the frames to resend.
    ///
    /// # Errors
    /// When there were not that many, or the next one is not kept any more.
    pub(crate) fn after(&mut self, taken: u64) -> Result<Vec<u8>> {
        let skipped = taken.checked_sub(self.before).and_then(|count| usize::try_from(count).ok());
        let Some(skipped) = skipped.filter(|count| *count <= self.frames.len()) else {
            return Err(Error::remote(format!(
                "the peer says that it has received {taken} control frames, of which {} to {} are kept",
                self.before,
                self.before + self.frames.len() as u64
            )));
        };
        self.frames.drain(..skipped);
        self.before = taken;
        Ok(self.frames.iter().flatten().copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_count_that_cannot_be_is_an_error() {
        let mut sent = SentFrames::default();
        sent.add(b"one");
        sent.add(b"two");
        assert!(sent.after(3).is_err());
        assert_eq!(sent.after(1).expect("one was received"), b"two");
        assert!(sent.after(0).is_err(), "forgotten");
        (0..MOST).for_each(|_| sent.add(b"more"));
        assert!(sent.after(1).is_err(), "not kept any more");
        assert_eq!(sent.after(MOST as u64 + 2).expect("all were received"), b"");
    }

    proptest! {
        /// Sockets that accept any number of frames, of which any number arrive before they fall silent: each frame is
        /// received once, in order.
        #[test]
        fn what_a_socket_swallows_is_sent_again(sockets in prop::collection::vec((0..5_usize, 0..5_usize), 1..40)) {
            let mut sent = SentFrames::default();
            let (mut number, mut received) = (0_u8, Vec::new());
            for (new, arriving) in sockets {
                let mut under_way = sent.after(received.len() as u64).expect("a count that can be");
                for _ in 0..new {
                    sent.add(&[number]);
                    under_way.push(number);
                    number = number.wrapping_add(1);
                }
                received.extend(under_way.into_iter().take(arriving));
            }
            received.extend(sent.after(received.len() as u64).expect("a count that can be"));
            let all: Vec<u8> = (0..received.len()).map(|at| at as u8).collect();
            prop_assert_eq!(received.len(), usize::from(number));
            prop_assert_eq!(received, all);
        }
    }
}
