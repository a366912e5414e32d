//! Turns at numbers in a GPU's memory that are read and then written, in two steps. Several groups of a process may add
//! to one number: NCCL registers a window with each group of a communicator, and each group has a stream of its own.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All turns of a process.
#[derive(Default)]
pub(crate) struct Turns(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    next: u64,
    /// By address: the turns that were taken and have not ended, the oldest first, each with the stream that took it.
    waiting: HashMap<usize, VecDeque<(u64, usize)>>,
}

impl Turns {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next free turn at this address, for operations in this stream.
    pub(crate) fn take(self: &Arc<Self>, address: usize, stream: usize) -> Turn {
        let mut inner = self.inner();
        let number = inner.next;
        inner.next += 1;
        inner.waiting.entry(address).or_default().push_back((number, stream));
        Turn { turns: Arc::clone(self), address, number }
    }
}

/// A turn. It ends when it is dropped, which must not be before the number is written.
pub(crate) struct Turn {
    turns: Arc<Turns>,
    address: usize,
    number: u64,
}

impl Turn {
    /// Whether the turn has come, that is no turn of another stream is before it. Turns of one stream need not wait for
    /// each other, since the stream keeps their order.
    pub(crate) fn has_come(&self) -> bool {
        let inner = self.turns.inner();
        let Some(waiting) = inner.waiting.get(&self.address) else { return true };
        let own = waiting.iter().position(|(number, _)| *number == self.number).unwrap_or(0);
        waiting.iter().take(own).all(|(_, stream)| *stream == waiting[own].1)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut inner = self.turns.inner();
        if let Some(waiting) = inner.waiting.get_mut(&self.address) {
            waiting.retain(|(number, _)| *number != self.number);
            if waiting.is_empty() {
                inner.waiting.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_stream_waits_and_the_same_does_not() {
        let turns = Arc::new(Turns::default());
        let [first, again, other, behind] = [1, 1, 2, 1].map(|stream| turns.take(64, stream));
        let elsewhere = turns.take(72, 2);
        assert!(first.has_come() && again.has_come() && elsewhere.has_come());
        assert!(!other.has_come() && !behind.has_come(), "in the order in which they were taken");
        drop(first);
        assert!(!other.has_come());
        drop(again);
        assert!(other.has_come() && !behind.has_come());
        drop(other);
        assert!(behind.has_come());
        drop((behind, elsewhere));
        assert!(turns.inner().waiting.is_empty());
    }
}
