//! Streams for which the kernel had no memory.
//!
//! A socket that is full or empty returns `EAGAIN`, and epoll reports when that has changed. `ENOBUFS` and `ENOMEM` are
//! different: the kernel could not get the memory for this one call, no edge follows, and a stream that waited for one
//! would wait for ever. So a thread that gets one of them hands the stream to this module. The control thread runs the
//! stream again a little later, as often as needed. The shortage is the host's, and no reason to give up a connection.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::engine::poller::{Poller, Progress, Registration, Source};
use crate::os::error::Error;
use crate::os::log::{Limiter, NET};

/// How long the kernel has to find memory before the call is repeated.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

static REPORTED: Limiter = Limiter::new();

/// A connection whose streams can be run again.
pub(crate) trait Again: Send + Sync {
    /// Runs stream `index` in the calling thread, or makes the thread that holds it do so.
    fn again(&self, index: usize);
}

/// Which streams of a connection wait here, each at most once.
#[derive(Debug, Default)]
pub(crate) struct Starved(AtomicU32);

impl Starved {
    /// Stream `index` waits from now on. Returns whether it did not before.
    pub(crate) fn begins(&self, index: usize) -> bool {
        self.0.fetch_or(1 << index, Ordering::SeqCst) & 1 << index == 0
    }

    /// Stream `index` is about to be run.
    pub(crate) fn ends(&self, index: usize) {
        self.0.fetch_and(!(1 << index), Ordering::SeqCst);
    }
}

struct Waiting {
    due: Instant,
    conn: Weak<dyn Again>,
    index: usize,
}

#[derive(Default)]
struct Queue(Mutex<Vec<Waiting>>);

/// All streams of the process that wait.
#[derive(Default)]
pub(crate) struct Shortages {
    queue: Arc<Queue>,
    registration: Mutex<Option<Registration>>,
}

impl Shortages {
    /// Runs stream `index` again in a moment. The caller may hold the stream.
    pub(crate) fn wait(&self, poller: &Poller, conn: Weak<dyn Again>, index: usize, error: &io::Error) {
        REPORTED.tell(|more| {
            tracing::warn!(
                target: NET,
                "the kernel has no memory for a socket at this moment ({error}), and is asked again{more}; look at the host's free memory and at net.ipv4.tcp_mem"
            );
        });
        self.queue.lock().push(Waiting { due: Instant::now() + PAUSE, conn, index });
        let mut registration = self.registration.lock().unwrap_or_else(PoisonError::into_inner);
        if registration.is_none() {
            // If there is a stream, there is a control thread, and nothing here needs a descriptor.
            *registration = poller
                .control_thread()
                .and_then(|control_thread| control_thread.register(self.queue.clone(), None))
                .ok();
        }
        if let Some(registration) = &*registration {
            registration.kick();
        }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Source for Queue {
    fn poll(&self) -> Progress {
        let now = Instant::now();
        let (due, rest): (Vec<_>, Vec<_>) = self.lock().drain(..).partition(|waiting| waiting.due <= now);
        self.lock().extend(rest);
        for Waiting { conn, index, .. } in &due {
            if let Some(conn) = conn.upgrade() {
                conn.again(*index);
            }
        }
        // Some of them may already wait again.
        let next = self.lock().iter().map(|waiting| waiting.due).min();
        Progress { moved: false, again: next }
    }

    fn fail(&self, error: Error) {
        tracing::error!("{error}");
    }
}
