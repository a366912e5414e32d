//! Half-open connections: how many there may be, and which one is evicted for a new one.
//!
//! Connections that have sent nothing valid yet and those whose greeting has arrived are counted separately, [`EACH`]
//! of either, and the newest replaces the oldest of its kind. So a flood of port scans, which send nothing, never
//! evicts a legitimate peer in the middle of its handshake: the peer is silent only until its first message arrives. To
//! evict it, an attacker must send greetings as fast as this side answers them.

use std::collections::VecDeque;
use std::sync::Arc;

/// How many silent connections there may be at one time, and how many greeted ones.
const EACH: usize = 256;

/// The half-open connections of the process, oldest first.
pub(crate) struct HalfOpen<T> {
    silent: VecDeque<Arc<T>>,
    greeted: VecDeque<Arc<T>>,
}

impl<T> Default for HalfOpen<T> {
    fn default() -> Self {
        Self { silent: VecDeque::new(), greeted: VecDeque::new() }
    }
}

/// Adds a connection, and returns the one to evict for it.
fn push<T>(queue: &mut VecDeque<Arc<T>>, one: Arc<T>) -> Option<Arc<T>> {
    queue.push_back(one);
    if queue.len() > EACH { queue.pop_front() } else { None }
}

fn take<T>(queue: &mut VecDeque<Arc<T>>, one: &T) -> Option<Arc<T>> {
    let at = queue.iter().position(|other| std::ptr::eq(&raw const **other, one))?;
    queue.remove(at)
}

impl<T> HalfOpen<T> {
    /// A connection has arrived. Returns the one to evict for it.
    #[must_use = "the connection that must go is still open"]
    pub(crate) fn come(&mut self, one: Arc<T>) -> Option<Arc<T>> {
        push(&mut self.silent, one)
    }

    /// A connection has sent its greeting. Returns the one to evict for it.
    #[must_use = "the connection that must go is still open"]
    pub(crate) fn greet(&mut self, one: &T) -> Option<Arc<T>> {
        let one = take(&mut self.silent, one)?;
        push(&mut self.greeted, one)
    }

    /// A connection has ended, or has proved itself.
    pub(crate) fn leave(&mut self, one: &T) {
        let _ = take(&mut self.greeted, one).or_else(|| take(&mut self.silent, one));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_silent_ones_pushes_out_silent_ones_only() {
        let mut table = HalfOpen::default();
        let rightful = Arc::new(0);
        assert!(table.come(Arc::clone(&rightful)).is_none());
        assert!(table.greet(&rightful).is_none());
        let gone: Vec<usize> = (1..=10_000).filter_map(|name| table.come(Arc::new(name)).map(|gone| *gone)).collect();
        assert!(gone.iter().copied().eq(1..=10_000 - EACH), "the oldest first, never the rightful peer");
        table.leave(&rightful);
        assert_eq!((table.silent.len(), table.greeted.len()), (EACH, 0));
    }

    #[test]
    fn the_greeted_are_bounded_too() {
        let mut table = HalfOpen::default();
        let mut gone = 0;
        for name in 0..1000 {
            let one = Arc::new(name);
            assert!(table.come(Arc::clone(&one)).is_none());
            gone += usize::from(table.greet(&one).is_some());
        }
        assert_eq!((table.silent.len(), table.greeted.len(), gone), (0, EACH, 1000 - EACH));
    }

    #[test]
    fn one_that_was_pushed_out_is_not_greeted_any_more() {
        let mut table = HalfOpen::default();
        let slow = Arc::new(0);
        let _ = table.come(Arc::clone(&slow));
        for name in 1..=EACH {
            let _ = table.come(Arc::new(name));
        }
        assert!(table.greet(&slow).is_none() && table.greeted.is_empty());
        table.leave(&slow);
        assert_eq!(table.silent.len(), EACH);
    }
}
