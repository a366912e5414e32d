//! Tests whether this host allows connections. A device may offer a port on which it makes no reliable connections, and
//! a limit on locked memory may prevent the registration of NCCL's buffers. When the first connection is made it is too
//! late to use TCP.

use std::io;

use super::pages::Pages;
use super::verbs::{Access, Capacity, CompletionQueue, Context, MemoryRegion, ProtectionDomain};
use super::verbs::{QueuePair, QueuePairOptions, patiently_while};
use crate::os::error::{Error, Result};

/// Less locked memory than this is too little: the buffers of one NCCL channel to one peer are about 10 MiB, and a
/// communicator has two channels or more.
const LEAST_LOCKED: u64 = 64 << 20;

/// Every error is retried: a device may lack some resource for a moment.
fn patiently<T>(attempt: impl Fn() -> Result<T>) -> Result<T> {
    patiently_while(|_| true, attempt)
}

/// Makes a reliable-connected queue pair and binds it to a port.
///
/// # Errors
/// When the device or its driver refuses.
pub(crate) fn connectable(context: &Context, port: u8) -> Result<()> {
    let attempt = || {
        let domain = ProtectionDomain::new(context)?;
        let queue = CompletionQueue::new(context, 2)?;
        let pair = QueuePair::new(&domain, &queue, &queue, Capacity { send: 1, receive: 1, inline_bytes: 0 })?;
        pair.prepare(QueuePairOptions { port, pkey_index: 0 })
    };
    patiently(attempt).map_err(|error| {
        let name = context.name();
        Error::new(error.cause(), format!("port {port} of {name} makes no reliable connections: {}", error.what()))
    })
}

/// Checks that the limit on locked memory is high enough, or does not apply to this process (`CAP_IPC_LOCK`).
///
/// # Errors
/// When it is too low.
pub(crate) fn lock_memory(context: &Context) -> Result<()> {
    let Some(limit) = limit().filter(|limit| *limit < LEAST_LOCKED) else { return Ok(()) };
    let domain = ProtectionDomain::new(context)?;
    let more = Pages::<u8>::zeroed(limit as usize + (1 << 16))?;
    let access = Access { relaxed_ordering: false };
    let locked = patiently(|| MemoryRegion::new(&domain, more.address() as usize, more.bytes(), access, None));
    locked.map(drop).map_err(|_| {
        Error::usage(format!("this process may lock {} KiB of memory, which is too little for RDMA", limit >> 10))
            .with_hint("ulimit -l unlimited; in a container --ulimit memlock=-1")
    })
}

/// How many bytes this process may lock; None without limit.
fn limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: room for the result.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0 {
        tracing::debug!("getrlimit: {}", io::Error::last_os_error());
        return None;
    }
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
