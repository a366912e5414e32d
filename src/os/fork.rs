//! What a forked child inherits from Towline: nothing.
//!
//! Data loaders fork, and a child inherits every descriptor. While the child exists, the death of its parent is hidden
//! from the peers, since no end of file is sent. So every descriptor that Towline owns is in a registry ([`super::fd`]
//! puts it there), and a `pthread_atfork` handler closes them all in the child. Other rooms detect that they run in a
//! child by [`generation`].
//!
//! Guarantees:
//! - The child's handler takes no lock and allocates nothing. It only calls `close`.
//! - A descriptor is opened and registered, or unregistered and closed, inside a [`Section`]. A fork waits until no
//!   thread is in a section, so the child's copy of the registry names exactly the descriptors that it inherited. The
//!   wait is bounded (`PATIENCE`). If it times out, the child may keep a descriptor, but never closes one of another
//!   owner, because a descriptor is unregistered before it is closed.
//! - Close-on-exec covers what the handler cannot: `vfork` and `posix_spawn` run no handlers and soon call `exec`.
//!
//! A raw `clone` system call or `_Fork` runs no handlers either; such a child keeps Towline's descriptors.
//!
//! Implementation notes: glibc runs the handlers on the forking thread. Several threads may fork at once, hence a
//! count and not a flag. In the child only the forking thread exists, so the handler resets the counts.

use std::os::fd::RawFd;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a fork waits for threads that are opening or closing a descriptor. They need microseconds, unless they get
/// no processor. On a host with ten busy threads per processor, one of 200 forks met a thread that had to wait for more
/// than a tenth of a second. Only a fork from a signal handler that interrupted such a thread waits in vain.
const PATIENCE: Duration = Duration::from_secs(1);

/// A cache line of its own: it is read in every call from NCCL, and must not share a line that is written often.
#[repr(align(128))]
struct Lonely(AtomicU32);

/// How many forks lie between the process that mapped the library and this one.
static GENERATION: Lonely = Lonely(AtomicU32::new(0));
/// How many threads are between the handlers before and after their fork.
static FORKING: AtomicU32 = AtomicU32::new(0);
/// How many threads are inside a [`Section`].
static BUSY: AtomicU32 = AtomicU32::new(0);

/// A number that differs between a process and its forked children. An object that stores the number of its creation
/// can detect that its descriptors and threads are gone.
///
/// It counts only forks since [`watch`] was first called, which registering a descriptor does.
pub(crate) fn generation() -> u32 {
    GENERATION.0.load(Ordering::Acquire)
}

/// Installs the fork handlers, once for the process.
pub(crate) fn watch() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // SAFETY: the handlers are functions of this library, which stays mapped; they may run on any thread.
        let status = unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
        if status != 0 {
            let error = std::io::Error::from_raw_os_error(status);
            tracing::warn!("forked children will keep our descriptors: installing a fork handler failed: {error}");
        }
    });
}

unsafe extern "C" fn before() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    let start = Instant::now();
    while BUSY.load(Ordering::SeqCst) != 0 && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
}

unsafe extern "C" fn after_in_parent() {
    FORKING.fetch_sub(1, Ordering::SeqCst);
}

unsafe extern "C" fn after_in_child() {
    GENERATION.0.fetch_add(1, Ordering::SeqCst);
    FORKING.store(0, Ordering::SeqCst);
    BUSY.store(0, Ordering::SeqCst);
    for slot in slots() {
        let fd = slot.swap(EMPTY, Ordering::SeqCst);
        if fd != EMPTY {
            // SAFETY: the number is in the registry, so it is the inherited copy of one of Towline's descriptors. The
            // parent's objects that own it check the generation and will not close it again.
            unsafe { libc::close(fd) };
        }
    }
}

/// A stretch of code during which no fork happens. Nothing in it may block or fork.
#[derive(Debug)]
pub(crate) struct Section(());

impl Section {
    /// Waits until no fork is under way, and holds back the next.
    pub(crate) fn enter() -> Self {
        loop {
            BUSY.fetch_add(1, Ordering::SeqCst);
            if FORKING.load(Ordering::SeqCst) == 0 {
                return Self(());
            }
            BUSY.fetch_sub(1, Ordering::SeqCst);
            std::thread::yield_now();
        }
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        // In a child of a fork whose wait timed out the count was reset meanwhile: it must not wrap around.
        let _ = BUSY.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
    }
}

const EMPTY: RawFd = -1;
/// Slots in a chunk: 4 KiB of numbers.
const CHUNK: usize = 1024;

/// A piece of the registry. Chunks are never freed, so the child can walk them whatever the parent was doing.
struct Chunk {
    slots: [AtomicI32; CHUNK],
    next: AtomicPtr<Chunk>,
}

impl Chunk {
    const fn new() -> Self {
        Self { slots: [const { AtomicI32::new(EMPTY) }; CHUNK], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Chunk> {
        // SAFETY: the pointer is null or comes from `Box::leak` in `grow`, and chunks are never freed.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    /// The next chunk, made if there is none.
    fn grow(&self) -> &'static Chunk {
        if let Some(next) = self.next() {
            return next;
        }
        let fresh = Box::into_raw(Box::new(Self::new()));
        match self.next.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {}
            // SAFETY: another thread was faster; `fresh` came from a box just above and no other thread has seen it.
            Err(_) => drop(unsafe { Box::from_raw(fresh) }),
        }
        self.next().expect("a chunk was just put there")
    }
}

static FIRST: Chunk = Chunk::new();

/// All slots there are now, without a lock or an allocation.
fn slots() -> impl Iterator<Item = &'static AtomicI32> {
    std::iter::successors(Some(&FIRST), |chunk| chunk.next()).flat_map(|chunk| &chunk.slots)
}

/// Puts `fd` into the registry. The slot must be emptied before the descriptor is closed.
pub(super) fn register(fd: RawFd) -> &'static AtomicI32 {
    let mut chunk = &FIRST;
    loop {
        let free = chunk.slots.iter().find(|slot| {
            // A load first, because most slots before the free one are taken.
            slot.load(Ordering::Relaxed) == EMPTY
                && slot.compare_exchange(EMPTY, fd, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        });
        match free {
            Some(slot) => return slot,
            None => chunk = chunk.grow(),
        }
    }
}

/// Takes the descriptor in `slot` out of the registry.
pub(super) fn unregister(slot: &'static AtomicI32) {
    slot.store(EMPTY, Ordering::SeqCst);
}

/// How many descriptors Towline has open: for the counters and for tests against leaks.
#[cfg(test)]
pub(crate) fn open_descriptors() -> usize {
    slots().filter(|slot| slot.load(Ordering::Relaxed) != EMPTY).count()
}

#[cfg(test)]
pub(super) fn tests_only_slots() -> impl Iterator<Item = RawFd> {
    slots().map(|slot| slot.load(Ordering::SeqCst))
}
