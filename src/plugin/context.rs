//! A communicator's context: what one `init` started, and what NCCL may leave behind in it.
//!
//! When NCCL gives up during set-up it closes only what was fully connected. Listeners and half-made connections
//! stay with the context, which ends them at `finalize`; before v11 there is no finalize, and attempts that nobody
//! asked after for a while are dropped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::comm::Comm;
use crate::engine::events::Listener;
use crate::nccl::ffi;
use crate::os::error::{Error, Result};
use crate::session::dialer::{Dial, Dialled};

/// What NCCL tells when it starts to use the library, per communicator from v11 on and once per process before.
#[derive(Debug)]
pub struct InitArgs {
    /// The version of the interface, 4 to 12.
    pub api: u8,
    /// The communicator's id (v11 and later).
    pub comm_id: Option<u64>,
    /// The communicator's traffic class, the whole byte (v11 and later; v10 gives it to `connect`).
    pub traffic_class: Option<u8>,
    /// NCCL's log.
    pub logger: ffi::ncclDebugLogger_t,
    /// The way into NCCL's profiler (v10 and later).
    pub profiler: ffi::ncclProfilerCallback_t,
}

/// An attempt that nobody asked after for this long is dropped. NCCL asks many times a second.
const FORGOTTEN: Duration = Duration::from_secs(120);

struct Attempt {
    dial: Way,
    asked: Instant,
}

/// A connection under way.
#[derive(Clone)]
pub enum Way {
    /// Over sockets.
    Tcp(Arc<Dial>),
    /// Over RDMA.
    #[cfg(feature = "rdma")]
    Rdma(Arc<crate::rdma::greeting::Attempt>),
}

impl Way {
    /// What came of it, if it is settled.
    pub fn result(&self) -> Option<Result<Comm>> {
        match self {
            Self::Tcp(dial) => dial.result().map(|result| result.and_then(over_streams)),
            #[cfg(feature = "rdma")]
            Self::Rdma(attempt) => attempt.result().map(|result| result.map(Comm::RdmaSend)),
        }
    }

    /// Waits until it is settled.
    ///
    /// # Errors
    /// As the attempt failed.
    pub fn wait(&self) -> Result<Comm> {
        match self {
            Self::Tcp(dial) => dial.wait().and_then(over_streams),
            #[cfg(feature = "rdma")]
            Self::Rdma(attempt) => attempt.wait().map(Comm::RdmaSend),
        }
    }

    fn cancel(&self) {
        match self {
            Self::Tcp(dial) => dial.cancel(),
            #[cfg(feature = "rdma")]
            Self::Rdma(attempt) => attempt.cancel(),
        }
    }
}

fn over_streams(dialled: Dialled) -> Result<Comm> {
    match dialled {
        Dialled::Streams(conn) => Ok(Comm::Send(conn)),
        Dialled::TakenOver => Err(Error::internal("a TCP connection was taken over by nobody")),
    }
}

#[derive(Default)]
struct Left {
    attempts: HashMap<u32, Attempt>,
    last_key: u32,
    listeners: Vec<usize>,
}

impl Left {
    /// A key that no attempt has, and not 0.
    fn next_key(&mut self) -> u32 {
        loop {
            self.last_key = self.last_key.wrapping_add(1);
            if self.last_key != 0 && !self.attempts.contains_key(&self.last_key) {
                return self.last_key;
            }
        }
    }
}

/// What one `init` started.
pub struct Context {
    /// NCCL's id of the communicator; 0 before v11.
    pub comm_id: u64,
    /// The communicator's traffic class, if it has one.
    pub traffic_class: Option<u8>,
    /// NCCL's profiler, when it shall be told of transfers.
    pub listener: Option<Arc<dyn Listener>>,
    /// Why this context makes no connection, when it makes none.
    refusal: Option<Error>,
    left: Mutex<Left>,
}

impl Context {
    /// A context in which nothing has happened yet.
    pub fn new(comm_id: u64, traffic_class: Option<u8>, listener: Option<Arc<dyn Listener>>) -> Self {
        Self { comm_id, traffic_class, listener, refusal: None, left: Mutex::new(Left::default()) }
    }

    /// A context that answers every `listen` and `connect` with this error.
    pub fn refusing(comm_id: u64, error: Error) -> Self {
        Self { refusal: Some(error), ..Self::new(comm_id, None, None) }
    }

    /// Why this context makes no connection, when it makes none.
    pub fn refusal(&self) -> Option<&Error> {
        self.refusal.as_ref()
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers a listener, in case NCCL never closes it.
    pub fn add_listener(&self, comm: usize) {
        self.left().listeners.push(comm);
    }

    /// The attempt with this key, or a new one. The clock is the caller's.
    ///
    /// # Errors
    /// When a new one cannot be started.
    pub fn dial(&self, now: Instant, key: u32, start: impl FnOnce() -> Result<Way>) -> Result<(u32, Way)> {
        let mut left = self.left();
        if let Some(attempt) = left.attempts.get_mut(&key) {
            attempt.asked = now;
            return Ok((key, attempt.dial.clone()));
        }
        let forgotten: Vec<Way> = left
            .attempts
            .extract_if(|_, attempt| now - attempt.asked > FORGOTTEN)
            .map(|(_, attempt)| attempt.dial)
            .collect();
        let key = left.next_key();
        let dial = start()?;
        left.attempts.insert(key, Attempt { dial: dial.clone(), asked: now });
        drop(left);
        forgotten.iter().for_each(Way::cancel);
        Ok((key, dial))
    }

    /// The attempt has been answered.
    pub fn forget_dial(&self, key: u32) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::config::Config;
    use crate::session::dialer::Target;
    use crate::session::handshake::Secret;
    use crate::session::loopback;

    /// What was abandoned before v11, where no `finalize` ends it.
    #[test]
    fn an_attempt_that_nobody_asks_after_ends_with_the_next_one() {
        let (net, deaf) = (loopback::net(Config::default()), loopback::deaf());
        let attempt = || {
            let target = Target {
                addresses: vec![deaf.local_addr().expect("it listens")],
                secret: Secret::from_bytes([7; 16]),
                rails: Arc::from([]),
                traffic_class: None,
                takeover: None,
            };
            Dial::connect(Arc::clone(&net), target).map(Way::Tcp)
        };
        let context = Context::new(0, None, None);
        let start = Instant::now();
        let dial = |after: Duration, key: u32| context.dial(start + after, key, attempt).expect("it is started");
        let second = Duration::from_secs(1);

        let (kept_key, kept) = dial(Duration::ZERO, 0);
        let (key, forgotten) = dial(Duration::ZERO, 0);
        assert_eq!(dial(second, kept_key).0, kept_key, "who asks gets the same");
        let (_, last) = dial(FORGOTTEN + second, 0);
        assert!(forgotten.result().expect("it has ended").is_err());
        assert!(kept.result().is_none() && last.result().is_none(), "the others go on");
        assert_ne!(dial(FORGOTTEN + second, key).0, key, "it is not known any more");
        context.end();
    }
}
