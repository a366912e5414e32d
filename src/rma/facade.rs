//! The interface between NCCL's one-sided calls (`abi::rma`) and this room: one typed function for each call.
//!
//! As in [`crate::plugin::facade`], ids are numbers that are never followed. The ids of registrations and requests
//! belong to their group, and are below 2^63, as NCCL requires for registrations.

use std::sync::Arc;
use std::time::Instant;

use super::group::Group;
pub(crate) use super::loud::say_rarely;
use super::peer::Place;
use super::setup;
use super::state::{Object, state};
use super::wire::Signal;
use crate::nccl::ffi::ncclDebugLogger_t;
use crate::os::error::{Error, Result};
use crate::plugin::context::{Host, InitArgs};
use crate::plugin::facade;

/// One side of an operation, as NCCL names it: a registration (0 for none) and a place in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct At {
    /// The id that `register` returned on this rank.
    pub mr: usize,
    /// The place in it.
    pub offset: u64,
}

/// Makes a context for a communicator's one-sided operations, or returns the reason why Towline declines. NCCL (2.30.7,
/// `plugin/rma.cc`) disables a library that declines for all communicators of the process, and does not even end those
/// that have begun. So once one has begun, none is declined.
///
/// # Errors
/// A sentence for the log where one-sided operations are not offered; the outer error where that fails.
pub(crate) fn init(comm: u64, logger: ncclDebugLogger_t) -> Result<std::result::Result<usize, &'static str>> {
    // Held until the count has changed: meanwhile another thread must not end the last communicator, nor decline
    // because the count is zero.
    let mut begun = state().begun();
    let traffic_class = match facade::offers_one_sided(comm) {
        Ok(class) => class,
        Err(why) if *begun == 0 => {
            facade::one_sided_declined();
            return Ok(Err(why));
        }
        Err(why) => {
            tracing::warn!(
                "one-sided operations of a communicator go over Towline although {why}: NCCL would disable them for all \
                 communicators of this process"
            );
            None
        }
    };
    // A context of its own: NCCL may end the network's before it closes its groups. The traffic class is the network's,
    // since NCCL names none before the connections are made.
    let (comm_id, one_sided) = (Some(comm), true);
    let ctx = facade::init(InitArgs { comm_id, one_sided, traffic_class, logger, ..InitArgs::new(Host::Nccl, 12) })?;
    *begun += 1;
    Ok(Ok(ctx))
}

/// Ends the context that `init` returned, and closes the objects that NCCL has left open: when the set-up of a group
/// fails, NCCL closes nothing (2.30.7, `rma_proxy.cc`, `ncclRmaProxyConnectOnce`).
///
/// # Errors
/// When there is no such context.
pub(crate) fn finalize(ctx: usize) -> Result<()> {
    for id in state().take_opened(ctx) {
        let _ = state().contexts.remove(id);
        if let Ok(Object::Group { group, .. }) = state().objects.remove(id).as_deref() {
            group.close();
        }
    }
    facade::finalize(ctx)?;
    *state().begun() -= 1;
    Ok(())
}

/// Begins to listen. Returns the handle that NCCL carries to all ranks, and the listener's id.
///
/// # Errors
/// The network's errors.
pub(crate) fn listen(ctx: usize, dev: i32) -> Result<([u8; 64], usize)> {
    let (handle, listener) = facade::listen(Some(ctx), dev)?;
    Ok((handle, insert(ctx, Object::Listener { ctx, dev, listener })?))
}

/// Connects all ranks, whose handles these are, and returns the group's id. Waits for the ranks.
///
/// # Errors
/// When the ranks are not all connected in time.
pub(crate) fn connect(listener: usize, handles: Vec<[u8; 64]>, rank: i32) -> Result<usize> {
    let object = state().objects.get(listener)?;
    let Object::Listener { ctx, dev, listener } = *object else {
        return Err(Error::argument("the listener is not one of ours"));
    };
    let rank = u32::try_from(rank).ok().filter(|rank| (*rank as usize) < handles.len());
    let rank = rank.ok_or_else(|| Error::argument("the rank is not one of the group's"))?;
    let deadline = Instant::now() + facade::connect_timeout()?;
    let group = setup::connect((ctx, dev, listener), handles, rank, deadline, state())?;
    insert(ctx, Object::Group { ctx, group: Arc::new(group) })
}

/// Keeps an object that NCCL must close before it ends `ctx`, and returns its id.
fn insert(ctx: usize, object: Object) -> Result<usize> {
    let id = state().objects.insert(Arc::new(object))?.encode();
    state().open(ctx, id);
    Ok(id)
}

fn group(id: usize) -> Result<Arc<Group>> {
    Ok(group_in(id)?.1)
}

/// A group, with the `init` that it belongs to.
fn group_in(id: usize) -> Result<(usize, Arc<Group>)> {
    match &*state().objects.get(id)? {
        Object::Group { ctx, group } => Ok((*ctx, Arc::clone(group))),
        Object::Listener { .. } => Err(Error::argument("a listener, where a group of ranks is needed")),
    }
}

/// Makes a context of a group.
///
/// # Errors
/// When there is no such group.
pub(crate) fn create_context(id: usize) -> Result<usize> {
    let (ctx, group) = group_in(id)?;
    let context = state().contexts.insert(group)?.encode();
    state().open(ctx, context);
    Ok(context)
}

/// Ends a context, and waits until its puts have read their sources: NCCL frees the memory of inline puts after this
/// and before it ends their registration (`gin/gin_host_proxy.cc`, NCCL 2.30.7). Its requests end with the group.
///
/// # Errors
/// When there is no such context.
pub(crate) fn destroy_context(context: usize) -> Result<()> {
    let group = state().contexts.remove(context)?;
    state().close(context);
    group.detach();
    Ok(())
}

/// Registers memory of kind `NCCL_PTR_*`. `only_ours`: only Towline writes its signals, which are 0 at first.
///
/// # Errors
/// When there is no such group, or it cannot reach such memory.
pub(crate) fn register(id: usize, memory: (usize, usize), kind: i32, only_ours: bool) -> Result<usize> {
    Ok(group(id)?.register(memory, kind, only_ours)? as usize)
}

/// Ends a registration.
///
/// # Errors
/// When there is no such group or registration.
pub(crate) fn withdraw(id: usize, mr: usize) -> Result<()> {
    group(id)?.withdraw(number(mr)?)
}

fn number(mr: usize) -> Result<u32> {
    u32::try_from(mr).map_err(|_| Error::argument("the registration is not one of ours"))
}

/// A place; it is empty where there is no registration.
fn place(at: At, size: usize) -> Result<Place> {
    Ok(Place { region: number(at.mr)?, offset: at.offset, size: size as u64 })
}

/// Begins a put, with a signal behind it where there is one (its place and its value), and returns its request.
///
/// # Errors
/// When there is no such context, rank or own memory.
pub(crate) fn put(
    context: usize,
    from: At,
    to: At,
    size: usize,
    rank: u32,
    signal: Option<(At, u64)>,
) -> Result<usize> {
    let signal = match signal {
        None => Signal::default(),
        Some((at, _)) if at.mr == 0 => return Err(Error::argument("a signal without a registration")),
        Some((at, value)) => Signal { region: number(at.mr)?, offset: at.offset, value },
    };
    let (from, to) = (place(from, size)?, place(to, size)?);
    state().contexts.with(context, |group| group.put(rank, from, to, signal)).map(|request| request as usize)
}

/// Begins a get and returns its request.
///
/// # Errors
/// As [`put`].
pub(crate) fn get(context: usize, from: At, to: At, size: usize, rank: u32) -> Result<usize> {
    let (from, to) = (place(from, size)?, place(to, size)?);
    state().contexts.with(context, |group| group.get(rank, from, to)).map(|request| request as usize)
}

/// Whether a request has ended.
///
/// # Errors
/// When it failed, or there is no such request.
pub(crate) fn test(id: usize, request: usize) -> Result<bool> {
    group(id)?.shared.requests.test(request as u64)
}

/// Whether another rank of a context's group has failed.
///
/// # Errors
/// When there is no such context.
pub(crate) fn has_failed(context: usize) -> Result<bool> {
    state().contexts.with(context, |group| Ok(group.failure().is_some()))
}

/// Closes a group. Requests under way end, and this library does not touch their memory afterwards.
///
/// # Errors
/// When there is no such group.
pub(crate) fn close_group(id: usize) -> Result<()> {
    let group = group(id)?;
    state().objects.remove(id)?;
    state().close(id);
    group.close();
    Ok(())
}

/// Closes a listener.
///
/// # Errors
/// When there is no such listener.
pub(crate) fn close_listener(id: usize) -> Result<()> {
    match *state().objects.get(id)? {
        Object::Listener { listener, .. } => {
            state().objects.remove(id)?;
            state().close(id);
            facade::close_listen(listener)
        }
        Object::Group { .. } => Err(Error::argument("a group of ranks, where a listener is needed")),
    }
}
