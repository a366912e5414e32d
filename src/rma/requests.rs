//! The requests of a group: begun by NCCL's proxy thread, ended by the placer, tested until they have reported done
//! once.

use std::sync::{Mutex, MutexGuard, PoisonError};

use slab::Slab;

use crate::os::error::{Error, Result};

#[derive(Debug)]
struct Slot {
    generation: u32,
    /// None while it is under way.
    outcome: Option<Result<()>>,
}

#[derive(Debug, Default)]
struct Inner {
    slots: Slab<Slot>,
    generation: u32,
}

/// All requests of a group.
#[derive(Debug, Default)]
pub(crate) struct Requests(Mutex<Inner>);

impl Requests {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new request; never 0.
    pub(crate) fn begin(&self) -> u64 {
        let mut inner = self.inner();
        inner.generation = inner.generation % (u32::MAX >> 1) + 1;
        let generation = inner.generation;
        let slot = inner.slots.insert(Slot { generation, outcome: None });
        u64::from(generation) << 32 | slot as u64
    }

    /// Ends a request; has no effect when it has already ended.
    pub(crate) fn end(&self, request: u64, outcome: Result<()>) {
        let mut inner = self.inner();
        if let Some(slot) = find(&mut inner, request) {
            slot.outcome.get_or_insert(outcome);
        }
    }

    /// Whether a request has ended. After that it is forgotten.
    ///
    /// # Errors
    /// When it failed, or there is no such request.
    pub(crate) fn test(&self, request: u64) -> Result<bool> {
        let mut inner = self.inner();
        let slot = find(&mut inner, request)
            .ok_or_else(|| Error::argument("the one-sided request is not one of ours, or was reported done before"))?;
        let Some(outcome) = slot.outcome.take() else { return Ok(false) };
        inner.slots.remove((request & 0xffff_ffff) as usize);
        outcome.map(|()| true)
    }

    /// Ends all that are under way.
    pub(crate) fn end_all(&self, error: &Error) {
        for (_, slot) in &mut self.inner().slots {
            slot.outcome.get_or_insert(Err(error.clone()));
        }
    }
}

fn find(inner: &mut Inner, request: u64) -> Option<&mut Slot> {
    let slot = inner.slots.get_mut((request & 0xffff_ffff) as usize)?;
    (u64::from(slot.generation) == request >> 32).then_some(slot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_ends_once_and_is_forgotten_then() {
        let requests = Requests::default();
        let (one, other) = (requests.begin(), requests.begin());
        assert!(!requests.test(one).unwrap());
        requests.end(one, Ok(()));
        requests.end(one, Err(Error::remote("late")));
        assert!(requests.test(one).unwrap());
        assert!(requests.test(one).is_err(), "reported before");
        let third = requests.begin();
        assert_ne!(third, one, "the place is the same, the request is not");
        requests.end_all(&Error::remote("the peer has ended"));
        assert!(requests.test(other).is_err() && requests.test(third).is_err());
        assert!(requests.test(0).is_err());
    }
}
