//! Connecting the queue pairs of a connection with the peer's.
//!
//! On RoCE the kernel resolves the peer's link address in that call (`ibv_modify_qp` to ready-to-receive). If the
//! switch or the peer is not ready yet it waits for a second and returns `ETIMEDOUT`. So the call is made in a separate
//! thread, so that connections do not wait for each other in the control thread. It is repeated after a while, as NCCL
//! does (`NCCL_IB_MQP_RETRY_*`), and the wait is one of the control thread's deadlines.
//!
//! Guarantee: nothing here waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::aside::Aside;
use super::fabric::Fabric;
use super::verbs::Refused;
use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::os::log::NET;

/// Connects the queue pairs that are not connected yet.
pub(crate) type Connect = dyn Fn(&mut Fabric) -> std::result::Result<(), Refused> + Send + Sync;

/// Makes the caller call [`Linking::poll`] soon.
pub(crate) type Wake = dyn Fn() + Send + Sync;

/// How failures are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Retry {
    /// Whether all failures are retried.
    all: bool,
    most: u64,
    pause: Duration,
}

impl Retry {
    fn new(config: &Config) -> Self {
        let number = |number: i64| u64::try_from(number).unwrap_or(0);
        Self {
            all: config.ib_mqp_retry_all,
            most: number(config.ib_mqp_retry_cnt.0),
            pause: Duration::from_millis(number(config.ib_mqp_retry_sleep.0)),
        }
    }

    /// How long to wait after this many failures, the last one with this error number; None: it is final.
    fn after(self, failures: u64, code: i32) -> Option<Duration> {
        let is_worth = if self.all { code != 0 } else { code == libc::ETIMEDOUT };
        let times = u32::try_from(failures).unwrap_or(u32::MAX);
        (is_worth && failures <= self.most).then(|| self.pause.saturating_mul(times))
    }
}

type Outcome = (Fabric, std::result::Result<(), Refused>);

/// Queue pairs that are being connected.
pub(crate) struct Linking {
    retry: Retry,
    connect: Arc<Connect>,
    wake: Arc<Wake>,
    /// The result from the thread.
    outcome: Option<Aside<Outcome>>,
    /// The next attempt is due at that moment.
    waiting: Option<(Instant, Fabric)>,
    failures: u64,
    last: Option<Error>,
}

/// The state of the connecting.
pub(crate) enum Polled {
    /// All are connected.
    Connected(Fabric),
    /// Not yet; with the moment of the next attempt while none is under way.
    Waits(Option<Instant>),
}

impl Linking {
    /// Starts the first attempt.
    pub(crate) fn start(config: &Config, fabric: Fabric, connect: Arc<Connect>, wake: Arc<Wake>) -> Self {
        let retry = Retry::new(config);
        let mut linking = Self { retry, connect, wake, outcome: None, waiting: None, failures: 0, last: None };
        linking.attempt(fabric);
        linking
    }

    fn attempt(&mut self, mut fabric: Fabric) {
        let (connect, wake) = (Arc::clone(&self.connect), Arc::clone(&self.wake));
        let work = move || {
            let connected = connect(&mut fabric);
            (fabric, connected)
        };
        self.outcome = Some(Aside::start(work, move || wake()));
    }

    /// Takes the result of the attempt, and makes the next one when it is due.
    ///
    /// # Errors
    /// When the last attempt has failed.
    pub(crate) fn poll(&mut self) -> Result<Polled> {
        if let Some((at, fabric)) = self.waiting.take() {
            if Instant::now() < at {
                self.waiting = Some((at, fabric));
                return Ok(Polled::Waits(Some(at)));
            }
            self.attempt(fabric);
        }
        let outcome = self.outcome.as_ref().and_then(Aside::take);
        let Some((fabric, connected)) = outcome else { return Ok(Polled::Waits(None)) };
        let Err(Refused { code, error }) = connected else { return Ok(Polled::Connected(fabric)) };
        self.failures += 1;
        let Some(pause) = self.retry.after(self.failures, code) else { return Err(error) };
        let (failures, most) = (self.failures, self.retry.most);
        tracing::info!(target: NET, "{error}; try {failures} of {most} follows in {} ms", pause.as_millis());
        self.last = Some(error);
        let at = Instant::now() + pause;
        self.waiting = Some((at, fabric));
        Ok(Polled::Waits(Some(at)))
    }

    /// Why the last attempt failed; None if no attempt has failed.
    pub(crate) fn last_failure(&self) -> Option<&Error> {
        self.last.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retry(pairs: &[(&'static str, &'static str)]) -> Retry {
        Retry::new(&Config::from_pairs(pairs.iter().copied()).0)
    }

    #[test]
    fn only_an_address_that_was_not_found_in_time_is_tried_for_again() {
        let default = retry(&[]);
        assert_eq!(default.after(1, libc::ETIMEDOUT), Some(Duration::from_millis(100)));
        assert_eq!(default.after(34, libc::ETIMEDOUT), Some(Duration::from_millis(3400)));
        assert_eq!(default.after(35, libc::ETIMEDOUT), None);
        assert_eq!((default.after(1, libc::EINVAL), default.after(1, 0)), (None, None));
    }

    #[test]
    fn the_variables_say_what_is_tried_again_how_often_and_when() {
        let set = retry(&[
            ("NCCL_IB_MQP_RETRY_ALL", "1"),
            ("NCCL_IB_MQP_RETRY_CNT", "2"),
            ("NCCL_IB_MQP_RETRY_SLEEP_MSEC", "7"),
        ]);
        assert_eq!(set.after(2, libc::EINVAL), Some(Duration::from_millis(14)));
        assert_eq!(set.after(3, libc::EINVAL), None);
        assert_eq!(set.after(1, 0), None, "no call of the device's has failed");
        assert_eq!(retry(&[("NCCL_IB_MQP_RETRY_CNT", "0")]).after(1, libc::ETIMEDOUT), None);
    }
}
