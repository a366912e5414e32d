//! Threads of the library inside the host program's process.

use std::io;
use std::thread::JoinHandle;

/// Signals that a thread raises itself. If such a signal is blocked the kernel ends the process at once, and the host
/// program's crash handler, which might report where it happened, is never called (signal(7), sigprocmask(2)).
const FAULTS: [libc::c_int; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS, libc::SIGABRT];

/// Starts a named thread that accepts no signals but those of its own faults: the host program's handlers must run on
/// the host's threads, as they would without Towline.
///
/// # Errors
/// When the system cannot create a thread.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // SAFETY: both sets are plain values filled by the calls. The old mask is restored on this thread below, so only
    // the new thread, which inherits the mask, keeps the signals blocked.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        for fault in FAULTS {
            libc::sigdelset(&raw mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    // SAFETY: `old` was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_takes_the_signals_of_its_own_faults_only() {
        let (tell, told) = std::sync::mpsc::channel();
        let thread = spawn("towline-test", move || {
            // SAFETY: a plain value that the call fills; no mask is given, so none is changed.
            let blocked = unsafe {
                let mut blocked: libc::sigset_t = std::mem::zeroed();
                libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut blocked);
                blocked
            };
            // SAFETY: the set was filled above.
            let is_blocked = |signal: libc::c_int| unsafe { libc::sigismember(&raw const blocked, signal) } == 1;
            let others = [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPROF];
            tell.send((FAULTS.map(is_blocked), others.map(is_blocked))).unwrap();
        });
        let (faults, others) = told.recv().unwrap();
        thread.unwrap().join().unwrap();
        assert_eq!((faults, others), ([false; FAULTS.len()], [true; 5]));
    }
}
