//! Memory registrations shared by page range.
//!
//! Pinning memory is slow, and NCCL registers the same buffers for many connections. So a registration that is inside
//! an existing one of the same kind borrows its region. Each [`Lease`] counts; the last one ends the region.
//!
//! A region keeps the pages that it was made of. When one of several overlapping leases ends, its owner may unmap that
//! memory and map other pages at the same addresses, while a smaller lease keeps the region in use. So a region is
//! *trusted* only where leases have covered it without a break since it was made, and only there a new lease may borrow
//! it.
//!
//! Guarantees:
//! - A lease's region covers its range, with the pages that were mapped when the lease was taken.
//! - Regions are made and ended outside the lock. Two equal registrations at the same time make one region: the second
//!   waits for the first. If the first fails, the second makes its own attempt.
//!
//! This module must not depend on what a region is.

use std::fmt;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The granularity of mappings on the machines that Towline supports.
const PAGE_BYTES: usize = 4096;

/// Whole pages, by address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PageRange {
    start: usize,
    end: usize,
}

impl PageRange {
    /// The pages that hold `length` bytes at `address`; at least one page. None when that leaves the address space.
    pub(crate) fn covering(address: usize, length: usize) -> Option<Self> {
        let start = address & !(PAGE_BYTES - 1);
        let end = address.checked_add(length.max(1))?.checked_next_multiple_of(PAGE_BYTES)?;
        Some(Self { start, end })
    }

    /// Where it starts.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// How many bytes it has.
    pub(crate) fn bytes(&self) -> usize {
        self.end - self.start
    }

    /// Whether every page of `other` is in this.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    fn intersection(&self, other: &Self) -> Option<Self> {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        (start < end).then_some(Self { start, end })
    }
}

/// A set of pages: ranges in ascending order that neither overlap nor touch.
fn union(ranges: impl Iterator<Item = PageRange>) -> Vec<PageRange> {
    let mut sorted: Vec<PageRange> = ranges.collect();
    sorted.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<PageRange> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

fn intersection(a: &[PageRange], b: &[PageRange]) -> Vec<PageRange> {
    union(a.iter().flat_map(|a| b.iter().filter_map(|b| a.intersection(b))))
}

/// Regions of type `T` in use, identified by page range and kind `K`.
pub(crate) struct Cache<K, T>(Arc<Shared<K, T>>);

struct Shared<K, T> {
    state: Mutex<State<K, T>>,
    /// Notifies threads that wait for a region when it is made, or when its creation has failed.
    settled: Condvar,
}

struct State<K, T> {
    next_id: u64,
    slots: Vec<Slot<K, T>>,
}

struct Slot<K, T> {
    id: u64,
    kind: K,
    trusted: Vec<PageRange>,
    leases: Vec<PageRange>,
    /// None while it is being made.
    region: Option<Arc<T>>,
}

/// The right to use a region for a range of pages. Dereferences to the region.
pub(crate) struct Lease<K, T> {
    cache: Arc<Shared<K, T>>,
    slot: u64,
    range: PageRange,
    /// Present until the lease is dropped.
    region: Option<Arc<T>>,
}

impl<K: Copy + Eq, T> Cache<K, T> {
    /// A cache without regions.
    pub(crate) fn new() -> Self {
        let state = Mutex::new(State { next_id: 0, slots: Vec::new() });
        Self(Arc::new(Shared { state, settled: Condvar::new() }))
    }

    /// A region of this kind for these pages: an existing one, or the one that `make` makes of exactly this range.
    /// Waits while another thread makes a suitable one.
    ///
    /// # Errors
    /// The error of `make`.
    pub(crate) fn lease<E>(
        &self,
        range: PageRange,
        kind: K,
        make: impl FnOnce(PageRange) -> Result<T, E>,
    ) -> Result<Lease<K, T>, E> {
        let lease = |slot, region| Lease { cache: Arc::clone(&self.0), slot, range, region: Some(region) };
        let mut state = self.0.lock();
        let id = loop {
            let Some(slot) = state.slots.iter_mut().find(|slot| slot.serves(kind, &range)) else {
                let id = state.next_id;
                state.next_id += 1;
                state.slots.push(Slot { id, kind, trusted: vec![range], leases: vec![range], region: None });
                break id;
            };
            if let Some(region) = slot.region.clone() {
                slot.leases.push(range);
                return Ok(lease(slot.id, region));
            }
            state = self.0.settled.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        // A panic must not leave the others waiting.
        let made = catch_unwind(AssertUnwindSafe(|| make(range)));
        let mut state = self.0.lock();
        let index = state.slots.iter().position(|slot| slot.id == id).expect("only its maker removes an unmade slot");
        let answer = match made {
            Ok(Ok(region)) => {
                let region = Arc::new(region);
                state.slots[index].region = Some(Arc::clone(&region));
                Ok(Ok(lease(id, region)))
            }
            Ok(Err(error)) => {
                state.slots.swap_remove(index);
                Ok(Err(error))
            }
            Err(panic) => {
                state.slots.swap_remove(index);
                Err(panic)
            }
        };
        drop(state);
        self.0.settled.notify_all();
        answer.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// How many regions there are.
    #[cfg(test)]
    pub(crate) fn regions(&self) -> usize {
        self.0.lock().slots.len()
    }
}

impl<K: Copy + Eq, T> Default for Cache<K, T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K, T> Shared<K, T> {
    fn lock(&self) -> MutexGuard<'_, State<K, T>> {
        // Nothing that can panic runs under the lock in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq, T> Slot<K, T> {
    fn serves(&self, kind: K, range: &PageRange) -> bool {
        self.kind == kind && self.trusted.iter().any(|trusted| trusted.covers(range))
    }
}

impl<K, T> Drop for Lease<K, T> {
    fn drop(&mut self) {
        let mut state = self.cache.lock();
        let Some(index) = state.slots.iter().position(|slot| slot.id == self.slot) else { return };
        let slot = &mut state.slots[index];
        if let Some(position) = slot.leases.iter().position(|lease| *lease == self.range) {
            slot.leases.swap_remove(position);
        }
        let ended = if slot.leases.is_empty() {
            Some(state.slots.swap_remove(index))
        } else {
            slot.trusted = intersection(&slot.trusted, &union(slot.leases.iter().copied()));
            None
        };
        drop(state);
        // The kernel unpins the pages here, without the lock.
        drop(ended);
        drop(self.region.take());
    }
}

impl<K, T> Deref for Lease<K, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.region.as_ref().expect("taken only by drop")
    }
}

impl<K, T> fmt::Debug for Lease<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("range", &self.range).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
