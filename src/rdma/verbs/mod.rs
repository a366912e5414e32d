//! Verbs objects as owned types.
//!
//! Each object holds what must outlive it: a memory region its protection domain, a queue pair its protection domain
//! and completion queues, all of them the context. So whatever order the owner drops them in, libibverbs sees queue
//! pairs end before completion queues, and those before the context. An object whose creation failed never existed.
//!
//! Guarantees:
//! - A forked child makes no call on its parent's objects: their descriptors are closed there, and dropping does
//!   nothing.
//! - An error of a call names the device and, if there is a usual cause, what to try.
//!
//! Posting work is `unsafe`: the memory of a work request must stay registered and in place until its completion was
//! polled or its queue pair is gone.
//!
//! This module must not depend on what is sent, nor on what a connection is.

mod completion;
mod context;
mod memory;
mod queue_pair;
mod work;

#[cfg(test)]
mod tests;

pub(crate) use completion::{Completion, CompletionQueue, Opcode};
pub(crate) use context::{AsyncEvent, Context, DeviceFacts, LinkLayer, PortFacts, Transport, open_devices};
pub(crate) use memory::{Access, DmaBuf, MemoryRegion, ProtectionDomain};
pub(crate) use queue_pair::{Capacity, Ece, QueuePair, QueuePairOptions, Refused, Route, Timeouts};
pub(crate) use work::{Local, Remote, Work};

use crate::os::error::Error;
use std::io;
use std::time::Duration;

/// How often a call of discovery that fails temporarily is repeated, and how long after the first time; then twice
/// that. In total it is too short to delay a job noticeably.
const TRIES: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(1);

/// Repeats a call that fails for lack of memory or descriptors, or by chance. Devices are found once per process: a
/// temporary failure at that moment must not last for ever.
fn patiently<T>(call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    patiently_while(is_momentary, call)
}

/// The same for calls where the caller decides which failures are temporary.
pub(super) fn patiently_while<T, E>(
    may_pass: impl Fn(&E) -> bool,
    mut call: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let mut pause = FIRST_PAUSE;
    for _ in 1..TRIES {
        match call() {
            Err(error) if may_pass(&error) => std::thread::sleep(pause),
            other => return other,
        }
        pause *= 2;
    }
    call()
}

fn is_momentary(error: &io::Error) -> bool {
    let momentary = [libc::EINTR, libc::EAGAIN, libc::ENOMEM, libc::ENOBUFS, libc::EMFILE, libc::ENFILE];
    error.raw_os_error().is_some_and(|code| momentary.contains(&code))
}

/// The error of a call that returns 0 or an error number of either sign.
fn checked(status: i32) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(status.saturating_abs())) }
}

/// A 128-bit GID in network byte order.
pub(crate) type Gid = [u8; 16];

/// An error of a call that returns null and sets `errno`.
fn last_error(device: &str, doing: &str) -> Error {
    failure(device, doing, &io::Error::last_os_error())
}

/// An error of a call that returns an error number (libibverbs gives it with either sign).
fn status_error(device: &str, doing: &str, status: i32) -> Error {
    failure(device, doing, &io::Error::from_raw_os_error(status.saturating_abs()))
}

fn failure(device: &str, doing: &str, error: &io::Error) -> Error {
    let what = Error::system(format!("{doing} on {device}"), error);
    match error.raw_os_error() {
        Some(libc::ENOMEM) => what.with_hint("raise the limit on locked memory: ulimit -l unlimited"),
        Some(libc::EACCES | libc::EPERM) => {
            what.with_hint("the process may not use the device: look at /dev/infiniband and at the container's rights")
        }
        _ => what,
    }
}
