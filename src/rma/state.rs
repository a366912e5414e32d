//! The one-sided state of a process: every object of which NCCL holds an id.
//!
//! A forked child gets a fresh state: the threads and connections of its parent's groups do not exist there, so its
//! parent's ids are invalid.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::group::Group;
use super::turns::Turns;
use crate::engine::handle::Kind;
use crate::engine::table::Table;
use crate::os::fork;
use crate::plugin::facade::Silences;

/// An object of which NCCL holds an id.
pub(crate) enum Object {
    /// A listener, with its context and device.
    Listener {
        /// The network's context.
        ctx: usize,
        /// The network's device.
        dev: i32,
        /// The network's listener.
        listener: usize,
    },
    /// A group of ranks.
    Group {
        /// The network's context.
        ctx: usize,
        /// The state that its contexts share.
        group: Arc<Group>,
    },
}

/// All objects of a process.
pub(crate) struct State {
    generation: u32,
    /// Listeners and groups.
    pub objects: Table<Object>,
    /// The objects that `createContext` makes: further names for a group, since all contexts of a pair of ranks share
    /// its connections.
    pub contexts: Table<Group>,
    /// The turns of all groups at signals in a GPU's memory.
    pub turns: Arc<Turns>,
    /// The processes for which a group has waited in vain.
    pub silences: Arc<Mutex<Silences>>,
    /// How many communicators have begun and not ended.
    begun: Mutex<usize>,
    /// The ids that NCCL has not closed, each behind the context that it belongs to.
    opened: Mutex<Vec<(usize, usize)>>,
}

impl State {
    fn opened(&self) -> MutexGuard<'_, Vec<(usize, usize)>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that NCCL has got this id, which belongs to the context `ctx`.
    pub(crate) fn open(&self, ctx: usize, id: usize) {
        self.opened().push((ctx, id));
    }

    /// Notes that NCCL has closed this id.
    pub(crate) fn close(&self, id: usize) {
        self.opened().retain(|(_, open)| *open != id);
    }

    /// Takes the ids of a context that NCCL has not closed.
    pub(crate) fn take_opened(&self, ctx: usize) -> Vec<usize> {
        self.opened().extract_if(.., |(of, _)| *of == ctx).map(|(_, id)| id).collect()
    }

    /// How many communicators have begun and not ended. While the guard is held, none begins or ends.
    pub(crate) fn begun(&self) -> MutexGuard<'_, usize> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());

/// The process's state, made on first use and never freed.
pub(crate) fn state() -> &'static State {
    let generation = fork::generation();
    let current = STATE.load(Ordering::Acquire);
    // SAFETY: null, or from `Box::into_raw` below and never freed.
    match unsafe { current.as_ref() } {
        Some(state) if state.generation == generation => state,
        _ => make(current, generation),
    }
}

/// Out of line: the tables are built on the stack first.
#[cold]
#[inline(never)]
fn make(current: *mut State, generation: u32) -> &'static State {
    let (objects, contexts) = (Table::new(Kind::Comm), Table::new(Kind::Context));
    let (turns, silences, begun, opened) = Default::default();
    let fresh = Box::into_raw(Box::new(State { generation, objects, contexts, turns, silences, begun, opened }));
    match STATE.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: it belongs to the static now, which never frees it.
        Ok(_) => unsafe { &*fresh },
        Err(other) => {
            // SAFETY: no other thread has seen `fresh`.
            drop(unsafe { Box::from_raw(fresh) });
            // SAFETY: another thread put it there a moment ago, by the same means.
            unsafe { &*other }
        }
    }
}
