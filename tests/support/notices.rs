//! When a process of a test noticed something: the lines of its log, on a clock that all processes share.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use towline::host::log::{Subscription, subscribe};

use super::child;

/// Microseconds on the clock that all processes of this machine share.
pub fn clock() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call, which fills it.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) }, 0);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

/// Makes a process log more than warnings to its host, which does not print it.
pub const INFO: (&str, &str) = ("NCCL_WARN_ENABLE_DEBUG_INFO", "1");

/// Collects the times at which this process says that a stream is lost. Such lines are no warnings: the process must
/// run with [`INFO`].
pub struct Notices {
    times: Arc<Mutex<Vec<u64>>>,
    _subscription: Subscription,
}

impl Notices {
    /// Begins to.
    pub fn start() -> Self {
        let times = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&times);
        let subscription = subscribe(move |record| {
            if record.text.contains(" broke (") {
                to.lock().unwrap_or_else(PoisonError::into_inner).push(clock());
            }
        });
        Self { times, _subscription: subscription }
    }

    /// Leaves them for the test.
    pub fn tell(self, role: &str) {
        let mut text = String::new();
        for at in self.times.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            writeln!(text, "{at}").expect("a string grows");
        }
        child::send(&child::mailbox(), &format!("notices-{role}"), text.as_bytes());
    }

    /// Those that `role` left.
    pub fn of(mail: &Path, role: &str) -> Vec<u64> {
        let text = String::from_utf8(child::receive(mail, &format!("notices-{role}"))).expect("text");
        text.lines().map(|line| line.parse().expect("a time")).collect()
    }
}
