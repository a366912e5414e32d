//! How a worker that may be asleep is notified that a source must be polled.
//!
//! Guarantee: a thread's writes before it rings are visible to the poll that follows, whether the worker was awake,
//! asleep or just falling asleep. Ringing twice before the worker responds is one ring. (`tests/models` checks both.)

use std::sync::PoisonError;

use crate::os::sync::atomic::{AtomicBool, Ordering};
use crate::os::sync::{Mutex, MutexGuard};

/// A worker's doorbell.
///
/// All writes to its marks are exchanges: each sees the previous exchange, and the earlier writes of that thread. A
/// plain store is no cheaper where it must not be reordered with the next load.
#[derive(Default)]
pub(crate) struct Doorbell {
    asleep: AtomicBool,
    rung: Mutex<Vec<usize>>,
}

/// A source's button: whether it was pressed and the worker has not responded yet.
#[derive(Default)]
pub(crate) struct Button(AtomicBool);

impl Doorbell {
    /// Requests a poll of the source with this token. Returns whether the worker sleeps, so that the caller must wake
    /// it.
    #[must_use = "a worker that sleeps hears nothing"]
    pub(crate) fn ring(&self, button: &Button, token: usize) -> bool {
        if button.0.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.rung().push(token);
        // Pairs with `may_sleep`: one of the two sees the other, because both take the lock in between.
        self.asleep.swap(false, Ordering::AcqRel)
    }

    /// The worker is about to sleep. Returns whether it may; if not, a thread has rung.
    pub(crate) fn may_sleep(&self) -> bool {
        self.asleep.swap(true, Ordering::AcqRel);
        self.rung().is_empty()
    }

    /// The worker is awake, and takes the tokens of all rings. Returns whether there are any.
    pub(crate) fn answer(&self, tokens: &mut Vec<usize>) -> bool {
        self.asleep.swap(false, Ordering::AcqRel);
        let mut rung = self.rung();
        let any = !rung.is_empty();
        tokens.append(&mut rung);
        any
    }

    /// The token that has waited longest, for a thread that polls instead of the worker. Like the worker, that thread
    /// releases the source's button before it polls.
    pub(crate) fn take_one(&self) -> Option<usize> {
        let mut rung = self.rung();
        if rung.is_empty() { None } else { Some(rung.remove(0)) }
    }

    /// Whether the worker sleeps, or is about to. Only a hint: the answer may be outdated at once.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    fn rung(&self) -> MutexGuard<'_, Vec<usize>> {
        self.rung.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Button {
    /// The worker responds: a thread that presses from now on rings again. An exchange, not a store: it must see the
    /// writes of threads that found the button already pressed.
    pub(crate) fn release(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}
