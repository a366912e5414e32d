//! What a side does while it waits for data: give way, and notice that the other side is gone.

use std::time::{Duration, Instant};

use crate::os::error::{Error, Result};

use super::super::channel::Channel;
use super::protocol::Answer;

/// Rounds of waiting before the first yield: a system call in each round would lengthen the measured latency by half
/// its own time. A message between two processors takes fewer rounds.
const SPIN: u32 = 64;

/// Polled when nothing can be done.
pub(super) struct Watch<'a> {
    channel: &'a mut Channel,
    patience: Duration,
    rounds: u32,
    since: Instant,
    /// The other side went on to what comes next: its own part of this transfer is over.
    is_ahead: bool,
}

impl<'a> Watch<'a> {
    /// `patience` is how long nothing may move.
    pub(super) fn new(channel: &'a mut Channel, patience: Duration) -> Self {
        Self { channel, patience, rounds: 0, since: Instant::now(), is_ahead: false }
    }

    /// Something moved.
    pub(super) fn moved(&mut self) {
        self.rounds = 0;
    }

    /// Nothing could be done: after a while this thread yields to other threads, as NCCL's proxy does, and now and then
    /// it asks whether waiting still makes sense.
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

    /// Fails when the other side has failed or gone away, or when patience is over. Any other message is left for
    /// later: the receiver may be done a little earlier, since only the sender waits for an acknowledgement.
    pub(super) fn check(&mut self) -> Result<()> {
        if !self.is_ahead && self.channel.has_news() {
            if let Some(Answer::Failed { error }) = self.channel.peek()? {
                return Err(Error::remote(error).with_peer(self.channel.peer()));
            }
            self.is_ahead = true;
        }
        if self.since.elapsed() > self.patience {
            return Err(Error::remote(format!("nothing moved for {} s", self.patience.as_secs()))
                .with_peer(self.channel.peer())
                .with_hint("the peer hangs or the network swallows packets; --timeout sets the limit"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Order;
    use super::*;
    use crate::cli::channel::tests::pair;

    #[test]
    fn who_is_ahead_is_waited_for_and_who_failed_is_not() {
        let (mut one, mut other) = pair();
        // The leader's next order, or the follower's next answer.
        one.send(&Order::Quit).unwrap();
        let mut watch = Watch::new(&mut other, Duration::from_secs(60));
        for _ in 0..3 {
            watch.check().expect("it waits on");
        }
        let order = other.receive::<Order>().expect("it is still there");
        assert!(matches!(order, Order::Quit));

        one.send(&Answer::Failed { error: "no room".into() }).unwrap();
        let error = Watch::new(&mut other, Duration::from_secs(60)).check().unwrap_err();
        assert!(error.to_string().contains("no room"), "{error}");
        let _ = other.receive::<Answer>();
        drop(one);
        assert!(Watch::new(&mut other, Duration::from_secs(60)).check().is_err(), "it went away");
    }
}
