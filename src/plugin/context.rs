//! A communicator's context: what one `init` started, and what NCCL may leave behind in it.
//!
//! When NCCL gives up during set-up it closes only what was fully connected. Listeners and half-made connections
//! stay with the context, which ends them at `finalize`; before v11 there is no finalize, and attempts that nobody
//! asked after for a while are dropped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::os::error::Result;
use crate::tcp::dialer::{Dial, Target};
use crate::tcp::net::Net;

/// An attempt that nobody asked after for this long is dropped. NCCL asks many times a second.
const FORGOTTEN: Duration = Duration::from_secs(120);

struct Attempt {
    dial: Arc<Dial>,
    asked: Instant,
}

#[derive(Default)]
struct Left {
    attempts: HashMap<u64, Attempt>,
    last_key: u64,
    listeners: Vec<usize>,
}

/// What one `init` started.
pub struct Context {
    /// NCCL's id of the communicator; 0 before v11.
    pub comm_id: u64,
    /// The communicator's traffic class, if it has one.
    pub traffic_class: Option<u8>,
    left: Mutex<Left>,
}

impl Context {
    /// A context in which nothing has happened yet.
    pub fn new(comm_id: u64, traffic_class: Option<u8>) -> Self {
        Self { comm_id, traffic_class, left: Mutex::new(Left::default()) }
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers a listener, in case NCCL never closes it.
    pub fn add_listener(&self, comm: usize) {
        self.left().listeners.push(comm);
    }

    /// The attempt with this key, or a new one.
    ///
    /// # Errors
    /// When a new one cannot be started.
    pub fn dial(&self, key: u64, net: &Arc<Net>, target: impl FnOnce() -> Target) -> Result<(u64, Arc<Dial>)> {
        let now = Instant::now();
        let mut left = self.left();
        if let Some(attempt) = left.attempts.get_mut(&key) {
            attempt.asked = now;
            return Ok((key, Arc::clone(&attempt.dial)));
        }
        let forgotten: Vec<Arc<Dial>> = left
            .attempts
            .extract_if(|_, attempt| now - attempt.asked > FORGOTTEN)
            .map(|(_, attempt)| attempt.dial)
            .collect();
        left.last_key += 1;
        let key = left.last_key;
        let dial = Dial::connect(Arc::clone(net), target())?;
        left.attempts.insert(key, Attempt { dial: Arc::clone(&dial), asked: now });
        drop(left);
        forgotten.iter().for_each(|dial| dial.cancel());
        Ok((key, dial))
    }

    /// The attempt has been answered.
    pub fn forget_dial(&self, key: u64) {
        self.left().attempts.remove(&key);
    }

    /// Ends everything; gives the listeners that may still be open.
    pub fn end(&self) -> Vec<usize> {
        let mut left = self.left();
        let attempts: Vec<Attempt> = left.attempts.drain().map(|(_, attempt)| attempt).collect();
        let listeners = std::mem::take(&mut left.listeners);
        drop(left);
        for attempt in attempts {
            attempt.dial.cancel();
        }
        listeners
    }
}
