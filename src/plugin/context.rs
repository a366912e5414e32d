//! A communicator's context: what one `init` started, and what NCCL may leave behind in it.
//!
//! When NCCL gives up during set-up it closes only connections that were fully made, and not even all of those.
//! Listeners and connections stay with the context, which ends them at `finalize`; before v11 there is no finalize, and
//! attempts that NCCL stopped polling are dropped after a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::backend;
use super::open::Open;
use crate::engine::events::Listener;
use crate::nccl::ffi;
use crate::os::error::{Error, Result};
use crate::session::handshake::Secret;

/// The program whose interface this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    /// NCCL's.
    Nccl,
    /// FlagCX's, which passes no log, never signals that it is done, and may be loaded beside NCCL in one process: it
    /// joins the existing state.
    FlagCx,
}

/// What NCCL passes when it starts to use the library, per communicator from v11 on and once per process before.
#[derive(Debug)]
pub(crate) struct InitArgs {
    /// The program behind the interface.
    pub host: Host,
    /// The version of NCCL's interface, 4 to 12. FlagCX's is like v8.
    pub api: u8,
    /// The communicator's id (v11 and later).
    pub comm_id: Option<u64>,
    /// Whether NCCL's one-sided interface made it: another network may carry the communicator's other traffic.
    pub one_sided: bool,
    /// The communicator's traffic class, the whole byte (v11 and later; v10 gives it to `connect`).
    pub traffic_class: Option<u8>,
    /// NCCL's log.
    pub logger: ffi::ncclDebugLogger_t,
    /// The way into NCCL's profiler (v10 and later).
    pub profiler: ffi::ncclProfilerCallback_t,
}

impl InitArgs {
    /// The arguments of the oldest interface, which passes nothing but its version.
    pub(crate) fn new(host: Host, api: u8) -> Self {
        Self { host, api, comm_id: None, one_sided: false, traffic_class: None, logger: None, profiler: None }
    }

    /// The arguments for a communicator of a test.
    #[cfg(test)]
    pub(crate) fn of_test(comm: u64) -> Self {
        Self { comm_id: Some(comm), ..Self::new(Host::Nccl, 12) }
    }

    /// The interface's name for messages.
    pub(crate) fn interface(&self) -> String {
        match self.host {
            Host::Nccl => format!("interface v{}", self.api),
            Host::FlagCx => "FlagCX's interface v1".to_owned(),
        }
    }
}

/// An attempt that was not polled for this long is dropped. NCCL polls many times a second.
const FORGOTTEN: Duration = Duration::from_secs(120);

struct Attempt {
    /// The secret of the listener that it leads to.
    secret: Secret,
    dial: Arc<dyn backend::Attempt>,
    asked: Instant,
}

#[derive(Default)]
struct Left {
    attempts: HashMap<u32, Attempt>,
    last_key: u32,
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

/// The state that one `init` started.
pub(crate) struct Context {
    /// NCCL's id of the communicator; 0 before v11.
    comm_id: u64,
    /// Whether it serves one-sided operations only.
    one_sided: bool,
    /// The communicator's traffic class, if it has one.
    pub traffic_class: Option<u8>,
    /// NCCL's profiler, if transfers are to be reported to it.
    pub listener: Option<Arc<dyn Listener>>,
    /// Communicators that were made in this context and are not closed.
    pub open: Arc<Open>,
    /// Why this context makes no connection, if it makes none.
    refusal: Option<Error>,
    left: Mutex<Left>,
}

impl Context {
    /// A context in which nothing has happened yet.
    pub(crate) fn new(args: &InitArgs, listener: Option<Arc<dyn Listener>>) -> Self {
        Self {
            comm_id: args.comm_id.unwrap_or(0),
            one_sided: args.one_sided,
            traffic_class: args.traffic_class,
            listener,
            open: Arc::default(),
            refusal: None,
            left: Mutex::new(Left::default()),
        }
    }

    /// A context that fails every `listen` and `connect` with this error.
    pub(crate) fn refusing(args: &InitArgs, error: Error) -> Self {
        Self { refusal: Some(error), ..Self::new(args, None) }
    }

    /// Whether Towline carries the collectives of the communicator with this id, or of any where the interface passes
    /// none.
    pub(crate) fn carries(&self, comm: Option<u64>) -> bool {
        !self.one_sided && self.refusal.is_none() && comm.is_none_or(|id| id == self.comm_id)
    }

    /// Why this context makes no connection, if it makes none.
    pub(crate) fn refusal(&self) -> Option<&Error> {
        self.refusal.as_ref()
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The attempt with this key, to the listener with this secret, or a new one: a host may have overwritten the bytes
    /// that hold the key with another handle. The clock is the caller's.
    ///
    /// # Errors
    /// When a new one cannot be started.
    pub(crate) fn dial(
        &self,
        now: Instant,
        key: u32,
        secret: &Secret,
        start: impl FnOnce() -> Result<Arc<dyn backend::Attempt>>,
    ) -> Result<(u32, Arc<dyn backend::Attempt>)> {
        let mut left = self.left();
        if let Some(attempt) = left.attempts.get_mut(&key).filter(|attempt| attempt.secret == *secret) {
            attempt.asked = now;
            return Ok((key, Arc::clone(&attempt.dial)));
        }
        let forgotten: Vec<Arc<dyn backend::Attempt>> = left
            .attempts
            .extract_if(|_, attempt| now - attempt.asked > FORGOTTEN)
            .map(|(_, attempt)| attempt.dial)
            .collect();
        let key = left.next_key();
        let dial = start()?;
        left.attempts.insert(key, Attempt { secret: secret.clone(), dial: Arc::clone(&dial), asked: now });
        drop(left);
        forgotten.iter().for_each(|dial| dial.cancel());
        Ok((key, dial))
    }

    /// The result of the attempt has been returned.
    pub(crate) fn forget_dial(&self, key: u32) {
        self.left().attempts.remove(&key);
    }

    /// Ends everything that is half-made.
    pub(crate) fn end(&self) {
        let mut left = self.left();
        let attempts: Vec<Attempt> = left.attempts.drain().map(|(_, attempt)| attempt).collect();
        drop(left);
        for attempt in attempts {
            attempt.dial.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::config::Config;
    use crate::session::dialer::Target;
    use crate::session::loopback;
    use crate::tcp::attempt::Attempt as TcpAttempt;

    /// An address where no process answers, and the secret to use.
    fn target(deaf: &std::net::TcpListener, secret: &Secret) -> Target {
        Target {
            addresses: vec![deaf.local_addr().expect("it listens")],
            secret: secret.clone(),
            rails: Arc::from([]),
            traffic_class: None,
        }
    }

    /// What was abandoned before v11, where no `finalize` ends it.
    #[test]
    fn an_attempt_that_nobody_asks_after_ends_with_the_next_one() {
        let (net, deaf) = (loopback::net(Config::default()), loopback::deaf());
        let secret = Secret::from_bytes([7; 16]);
        let attempt =
            || TcpAttempt::start(&net, target(&deaf, &secret)).map(|attempt| attempt as Arc<dyn backend::Attempt>);
        let context = Context::new(&InitArgs::of_test(0), None);
        let start = Instant::now();
        let dial =
            |after: Duration, key: u32| context.dial(start + after, key, &secret, attempt).expect("it is started");
        let second = Duration::from_secs(1);

        let (kept_key, kept) = dial(Duration::ZERO, 0);
        let (key, forgotten) = dial(Duration::ZERO, 0);
        assert_eq!(dial(second, kept_key).0, kept_key, "the same handle leads to the same dial");
        let (_, last) = dial(FORGOTTEN + second, 0);
        assert!(forgotten.result().expect("it has ended").is_err());
        assert!(kept.result().is_none() && last.result().is_none(), "the others go on");
        assert_ne!(dial(FORGOTTEN + second, key).0, key, "it is not known any more");
        context.end();
    }

    /// A host reuses the memory of a handle before its connection is made, and leaves the key bytes unchanged.
    #[test]
    fn an_attempt_is_not_taken_for_one_to_another_listener() {
        let (net, deaf) = (loopback::net(Config::default()), loopback::deaf());
        let (one, other) = (Secret::from_bytes([7; 16]), Secret::from_bytes([8; 16]));
        let context = Context::new(&InitArgs::of_test(0), None);
        let now = Instant::now();
        let dial = |key: u32, secret: &Secret| {
            let attempt =
                || TcpAttempt::start(&net, target(&deaf, secret)).map(|attempt| attempt as Arc<dyn backend::Attempt>);
            context.dial(now, key, secret, attempt).expect("it is started").0
        };
        let key = dial(0, &one);
        let another = dial(key, &other);
        assert_ne!(another, key, "the connection would lead to another listener");
        assert_eq!((dial(key, &one), dial(another, &other)), (key, another));
        context.end();
    }
}
