//! What a side does while it waits for data: give way, and notice that the other side is gone.

use std::time::{Duration, Instant};

use towline::os::error::{Error, Result};

use super::super::channel::Channel;
use super::protocol::Answer;

/// For so many rounds it waits without giving way: a system call in each would lengthen what is measured by half of its
/// own time. A message between two processors takes fewer rounds than that.
const SPIN: u32 = 64;

/// Looked at when nothing can be done.
pub(super) struct Watch<'a> {
    channel: &'a mut Channel,
    patience: Duration,
    rounds: u32,
    since: Instant,
}

impl<'a> Watch<'a> {
    /// `patience` is how long nothing may move.
    pub(super) fn new(channel: &'a mut Channel, patience: Duration) -> Self {
        Self { channel, patience, rounds: 0, since: Instant::now() }
    }

    /// Something moved.
    pub(super) fn moved(&mut self) {
        self.rounds = 0;
    }

    /// Nothing could be done: after a while it gives way to other threads, as NCCL's proxy does, and now and then it asks
    /// whether waiting still makes sense.
    pub(super) fn idle(&mut self) -> Result<()> {
        if self.rounds == 0 {
            self.since = Instant::now();
        }
        self.rounds = self.rounds.wrapping_add(1).max(1);
        if self.rounds.is_multiple_of(4096) {
            self.check()?;
        }
        if self.rounds > SPIN {
            std::thread::yield_now()
        } else {
            std::hint::spin_loop()
        }
        Ok(())
    }

    /// Fails when the other side said something, which during a transfer can only be its failure, or went away, or
    /// when patience is over.
    pub(super) fn check(&mut self) -> Result<()> {
        if self.channel.has_news() {
            return match self.channel.receive::<Answer>()? {
                Answer::Failed { error } => Err(Error::remote(error).with_peer(self.channel.peer())),
                _ => Err(Error::remote("it spoke out of turn").with_peer(self.channel.peer())),
            };
        }
        if self.since.elapsed() > self.patience {
            return Err(Error::remote(format!("nothing moved for {} s", self.patience.as_secs()))
                .with_peer(self.channel.peer())
                .with_hint("the peer hangs or the network swallows packets; --timeout sets the limit"));
        }
        Ok(())
    }
}
