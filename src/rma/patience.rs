//! How long the placer waits for a rank that may be stopped: until its transfers have left memory that NCCL takes back,
//! and until its goodbye. NCCL ends windows, contexts and groups one after the other, in one thread, so all waits for
//! one process share their time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::plugin::facade::Silences;

/// The least time to wait for a process that has used up the common time: it may run again by now.
const LEAST: Duration = Duration::from_secs(2);

/// The patience of one group.
pub(crate) struct Patience {
    limit: Duration,
    silences: Arc<Mutex<Silences>>,
}

impl Patience {
    /// Waits share `silences`. `limit`: as long as connections may take to recover, since until then the other rank may
    /// wait for a message of this one.
    pub(crate) fn new(limit: Duration, silences: Arc<Mutex<Silences>>) -> Self {
        Self { limit, silences }
    }

    fn silences(&self) -> MutexGuard<'_, Silences> {
        self.silences.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a wait for a process that began at `since` continues. When it does not, the next wait remembers that.
    /// `moved`: when data last arrived over the connection in question. The process was not silent then, whatever
    /// another wait found.
    pub(crate) fn lasts(&self, process: &str, since: Instant, moved: Option<Instant>) -> bool {
        let (mut silences, now) = (self.silences(), Instant::now());
        let since = moved.map_or(since, |moved| moved.max(since));
        let silent = silences.since(process, now).filter(|silent| moved.is_none_or(|moved| moved < *silent));
        let silent = silent.map_or(since, |silent| silent.min(since));
        if now < (silent + self.limit).max(since + self.limit.min(LEAST)) {
            return true;
        }
        silences.unanswered(process, since, now);
        false
    }

    /// A process has done what this rank waited for.
    pub(crate) fn answered(&self, process: &str) {
        self.silences().answered(process);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_one_process_share_their_time() {
        const LIMIT: Duration = Duration::from_secs(60);
        let silences = Arc::default();
        let [first, second] = [0, 1].map(|_| Patience::new(LIMIT, Arc::clone(&silences)));
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).expect("the clock is older");
        assert!(first.lasts("a:1", ago(59), None) && !first.lasts("a:1", ago(61), None));
        assert!(
            second.lasts("a:1", ago(1), None) && !second.lasts("a:1", ago(3), None),
            "another group, the same process"
        );
        assert!(second.lasts("a:2", ago(3), None), "another process");
        assert!(second.lasts("a:1", ago(3), Some(ago(2))), "it goes on, or another process has the same label");
        assert!(second.lasts("a:1", ago(90), Some(ago(59))), "a long transfer");
        assert!(!second.lasts("a:1", ago(90), Some(ago(61))), "which has stopped");
        first.answered("a:1");
        assert!(second.lasts("a:1", ago(3), None));
    }
}
