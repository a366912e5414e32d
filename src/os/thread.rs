//! Threads of our own inside somebody else's process.

use std::io;
use std::thread::JoinHandle;

/// Starts a named thread that takes no signals: the host program's handlers must run on the host's threads, as
/// they would without us.
///
/// # Errors
/// When the system has no thread to give.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // SAFETY: both sets are plain values filled by the calls; the old mask is restored on this thread below, so
    // only the new thread, which inherits the full mask, keeps all signals blocked.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    // SAFETY: `old` was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    started
}

/// How many processors this process may use: the affinity mask, not the machine.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
