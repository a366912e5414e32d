//! Descriptors that a forked child does not keep.
//!
//! [`Registered`] owns anything with a descriptor (a socket, an epoll instance, a file). It keeps the descriptor in the
//! fork registry from the moment it is open until just before it closes. Every descriptor in Towline lives in one.

use super::fork::{self, Section};
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicI32;

/// A plain descriptor in the registry.
pub(crate) type Fd = Registered<OwnedFd>;

/// Owns `T` and its one descriptor. In a forked child the descriptor is already closed, so there dropping does nothing
/// at all: its number may belong to another file by then.
///
/// `T` must keep the same descriptor for life.
pub(crate) struct Registered<T: AsRawFd> {
    inner: ManuallyDrop<T>,
    slot: &'static AtomicI32,
    generation: u32,
}

impl<T: AsRawFd> Registered<T> {
    /// Opens a descriptor by calling `open`, and registers it before any fork can copy it. It is made
    /// close-on-exec if `open` did not do so.
    ///
    /// `open` must not block for long: a fork in another thread waits for it.
    ///
    /// # Errors
    /// The error of `open` or `fcntl`.
    pub(crate) fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
        fork::watch();
        let _section = Section::enter();
        let inner = open()?;
        close_on_exec(inner.as_raw_fd())?;
        let slot = fork::register(inner.as_raw_fd());
        Ok(Self { inner: ManuallyDrop::new(inner), slot, generation: fork::generation() })
    }

    /// Whether the descriptor is still there, that is, this is not a forked child of the process that opened it.
    pub(crate) fn is_ours(&self) -> bool {
        self.generation == fork::generation()
    }
}

impl<T: AsRawFd> Drop for Registered<T> {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        let _section = Section::enter();
        fork::unregister(self.slot);
        // SAFETY: this is the only place that drops it, and it runs once.
        unsafe { ManuallyDrop::drop(&mut self.inner) };
    }
}

impl<T: AsRawFd> Deref for Registered<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsRawFd> DerefMut for Registered<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: AsRawFd> AsRawFd for Registered<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.as_raw_fd()
    }
}

impl<T: AsRawFd + AsFd> AsFd for Registered<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<T: AsRawFd + fmt::Debug> fmt::Debug for Registered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (*self.inner).fmt(f)
    }
}

fn close_on_exec(fd: RawFd) -> io::Result<()> {
    // SAFETY: reading the flags of a descriptor touches no memory of ours.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: setting the flags of a descriptor touches no memory of ours.
    if flags & libc::FD_CLOEXEC == 0 && unsafe { libc::fcntl(fd, libc::F_SETFD, flags | libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::net::TcpListener;
    use std::os::fd::FromRawFd;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn is_open(fd: RawFd) -> bool {
        // SAFETY: reading the flags of any number, open or not, is harmless.
        unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
    }

    /// Runs `check` in a forked child and returns whether it returned true. `check` must not allocate or lock: other
    /// threads of the test program do not exist there.
    fn in_child(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child only runs `check`, whose callers keep to what is safe after a fork, and `_exit`.
        match unsafe { libc::fork() } {
            0 => {
                let status = i32::from(!check());
                // SAFETY: leaves at once, without the parent's exit handlers.
                unsafe { libc::_exit(status) }
            }
            child => {
                assert!(child > 0);
                let mut status = 0;
                // SAFETY: `status` outlives the call.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
            }
        }
    }

    fn null() -> io::Result<File> {
        File::open("/dev/null")
    }

    #[test]
    fn a_forked_child_holds_none_of_our_descriptors_and_closes_nobody_elses() {
        let listener = Registered::open(|| TcpListener::bind("127.0.0.1:0")).expect("a listener");
        let stranger = null().expect("a file");
        let before = fork::generation();
        let (ours, theirs) = (listener.as_raw_fd(), stranger.as_raw_fd());
        assert!(in_child(|| {
            let gone = !is_open(ours) && is_open(theirs) && fork::generation() == before + 1 && !listener.is_ours();
            // The child reuses the number: dropping the parent's object must leave it alone.
            // SAFETY: `theirs` is open; the copy lands on the free number `ours`.
            let reused = unsafe { libc::dup2(theirs, ours) } == ours;
            // SAFETY: a bitwise copy whose original is never dropped here, since the child leaves by `_exit`.
            drop(unsafe { ptr_read(&listener) });
            gone && reused && is_open(ours)
        }));
        assert!(is_open(ours) && listener.is_ours() && fork::generation() == before, "the parent is untouched");
    }

    /// SAFETY: the caller sees to it that only one of original and copy is dropped.
    unsafe fn ptr_read<T>(value: &T) -> T {
        // SAFETY: a reference is valid to read from.
        unsafe { std::ptr::read(value) }
    }

    #[test]
    fn a_descriptor_is_close_on_exec_and_closes_with_its_owner() {
        let fd = Registered::open(|| {
            // SAFETY: `dup` of standard error gives a descriptor of our own, without the flag.
            let raw = unsafe { libc::dup(2) };
            // SAFETY: it was just opened and it has no other owner.
            Ok(unsafe { OwnedFd::from_raw_fd(raw) })
        })
        .expect("open");
        let raw = fd.as_raw_fd();
        // SAFETY: reading the flags is harmless.
        assert_eq!(unsafe { libc::fcntl(raw, libc::F_GETFD) } & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        assert!(registered(raw));
        drop(fd);
        assert!(!registered(raw));
    }

    fn registered(fd: RawFd) -> bool {
        fork::tests_only_slots().any(|slot| slot == fd)
    }

    #[test]
    fn more_descriptors_than_a_chunk_holds_are_all_closed_in_the_child() {
        // The usual limit is 1024 descriptors, less than a chunk, so most numbers are entries for one open file: real
        // descriptors as long as the limit allows.
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` outlives both calls.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
            limit.rlim_cur = limit.rlim_max.min(4096).max(limit.rlim_cur);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        }
        let many: Vec<_> = (0..1500).map(|_| Registered::open(null).expect("a descriptor")).collect();
        assert!(fork::open_descriptors() >= 1500);
        assert!(in_child(|| many.iter().all(|fd| !is_open(fd.as_raw_fd()))));
        assert!(many.iter().all(|fd| is_open(fd.as_raw_fd())));
    }

    #[test]
    fn forks_amid_opening_and_closing_leave_nothing_behind() {
        // A device number distinguishes this test's descriptors from those of other tests: only this test opens
        // /dev/zero.
        let zero = || Registered::open(|| File::open("/dev/zero"));
        let is_zero = |fd: RawFd| {
            // SAFETY: all zeroes is a valid value of this plain struct.
            let mut stat: libc::stat = unsafe { std::mem::zeroed() };
            // SAFETY: `stat` outlives the call.
            unsafe { libc::fstat(fd, &raw mut stat) == 0 && stat.st_rdev == libc::makedev(1, 5) }
        };
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        drop(zero().expect("a descriptor"));
                    }
                });
            }
            let clean = (0..200).all(|_| in_child(|| !(0..2048).any(is_zero)));
            stop.store(true, Ordering::Relaxed);
            assert!(clean, "a child kept a descriptor");
        });
    }
}
