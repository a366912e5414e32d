//! The process's profiler, which NCCL's threads, the writer and the service share, and their requests to each other.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::chain::Chain;
use super::event::{CommInfo, Kind};
use super::key::Stamp;
use super::live::network::Connections;
use super::ring::Ring;
use super::settings::Settings;
use crate::os::ticks::Ticks;

/// More than the sends of a proxy thread that wait for their peers.
pub(super) const PEER_WAITS: usize = 256;

/// How many events were dropped for lack of room, by kind of start, then states and stops.
#[derive(Debug, Default)]
pub(super) struct Drops {
    /// Starts declined, by the kind's place in the mask.
    pub starts: [AtomicU64; Kind::ALL.len()],
    /// Changes of state not recorded.
    pub states: AtomicU64,
    /// Stops not recorded.
    pub stops: AtomicU64,
}

impl Drops {
    /// All of them together.
    pub(super) fn total(&self) -> u64 {
        let starts: u64 = self.starts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
        starts + self.states.load(Ordering::Relaxed) + self.stops.load(Ordering::Relaxed)
    }

    /// By kind: calls that were entered, ends, waits.
    pub(super) fn by_meaning(&self) -> [u64; 3] {
        let of = |kinds: &[Kind]| kinds.iter().map(|&kind| self.starts[kind as usize].load(Ordering::Relaxed)).sum();
        let calls: u64 = of(&[Kind::Coll, Kind::P2p, Kind::CeColl]);
        let transfers: u64 = of(&[Kind::ProxyOp, Kind::ProxyStep]);
        [calls, self.stops.load(Ordering::Relaxed), transfers + self.states.load(Ordering::Relaxed)]
    }
}

/// The process's profiler.
pub(super) struct Profiler {
    pub(super) stamp: Stamp,
    pub(super) settings: Settings,
    /// NCCL reports proxy steps only because we request the events below them. Those are counted by the operations
    /// above, so steps are not recorded.
    pub(super) skips_steps: bool,
    pub(super) ring: Ring,
    pub(super) drops: Drops,
    pub(super) chain: Option<Chain>,
    /// NCCL's mask, to follow a second profiler that changes its mind.
    pub(super) mask: AtomicPtr<c_int>,
    /// Communicators initialised and not finalized.
    pub(super) live: AtomicU64,
    pub(super) serial: AtomicU64,
    /// Counts what the writer has done.
    pub(super) progress: AtomicU64,
    pub(super) connections: Connections,
    /// By the event's hash, the last event that began to wait for its peer: NCCL reports it at each attempt to send.
    pub(super) peer_waits: [AtomicU64; PEER_WAITS],
    pub(super) notices: Mutex<Vec<Notice>>,
    pub(super) requests: Sender<Request>,
    /// Which process of a line of forks it belongs to.
    pub(super) generation: u32,
}

impl Profiler {
    /// The mask that NCCL should have now.
    pub(super) fn wanted(&self) -> u32 {
        self.settings.mask | self.chain.as_ref().map_or(0, Chain::mask)
    }

    /// Renews NCCL's mask after the second profiler has changed its own.
    pub(super) fn renew_mask(&self) {
        let mask = self.mask.load(Ordering::Acquire);
        if !mask.is_null() && self.live.load(Ordering::Acquire) > 0 {
            // SAFETY: valid while a communicator exists; NCCL reads it as one int.
            unsafe { AtomicI32::from_ptr(mask) }.store(self.wanted() as i32, Ordering::Relaxed);
        }
    }

    /// Begins and ends of communicators that the writer has not yet taken.
    pub(super) fn notices(&self) -> MutexGuard<'_, Vec<Notice>> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A communicator's begin or end, reported by a user thread.
#[derive(Debug)]
pub(super) enum Notice {
    /// One begins.
    Begin {
        /// Which.
        comm: CommInfo,
        /// When.
        when: Ticks,
    },
    /// One ends.
    End {
        /// Which.
        context: u64,
        /// When.
        when: Ticks,
    },
}

/// A request to the writer.
#[derive(Debug)]
pub(super) enum Request {
    /// A communicator was made: poll the ring.
    Wake,
    /// The tables, now.
    Summary(Sender<String>),
    /// The metrics, now.
    Metrics(Sender<String>),
    /// Everything to disk; answers with the trace's path.
    Flush(Sender<String>),
    /// The process's state as JSON, with this many calls of each communicator; none while no communicator lives.
    Status(usize, Sender<Option<String>>),
    /// The same as the last words of a process that ends.
    Exit(Sender<Option<String>>),
    /// Everything to disk with summary and metrics: the last communicator has ended, or the process does.
    Finish(Sender<()>),
}
