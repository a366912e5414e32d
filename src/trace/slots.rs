//! The memory of a [ring](super::ring)'s shard.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use super::event::Record;
use crate::os::memory;

/// Room for one record.
#[repr(C, align(128))]
pub(super) struct Slot {
    /// The lap of the slot, and whether it is filled: its owner follows from that (see [`super::ring`]).
    pub(super) lap: AtomicU64,
    record: UnsafeCell<MaybeUninit<Record>>,
}

const _: () = assert!(size_of::<Slot>() == Slots::BYTES, "a slot is two cache lines");

impl Slot {
    /// Fills the slot.
    ///
    /// # Safety
    /// No other thread writes or reads the record at the same time.
    #[inline]
    pub(super) unsafe fn write(&self, record: Record) {
        // SAFETY: the caller is alone with it.
        unsafe { (*self.record.get()).write(record) };
    }

    /// Reads the slot.
    ///
    /// # Safety
    /// It was filled, the caller has seen that, and no other thread writes it at the same time.
    #[inline]
    pub(super) unsafe fn read(&self) -> Record {
        // SAFETY: the caller promises it.
        unsafe { (*self.record.get()).assume_init() }
    }
}

/// A power of two of slots, at laps of 0. The memory is reserved at once and given by the kernel as it is touched:
/// zeroed bytes are a valid slot, and the kernel gives zero pages.
pub(super) struct Slots {
    first: NonNull<Slot>,
    capacity: usize,
}

// SAFETY: the slots are shared by design; a caller that reads or writes a record promises that it is allowed to.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// Bytes of a slot.
    pub(super) const BYTES: usize = 128;

    /// `capacity` slots.
    pub(super) fn new(capacity: usize) -> Self {
        assert!(capacity.is_power_of_two());
        let layout = Self::layout(capacity);
        // SAFETY: the layout is not empty.
        let first = unsafe { alloc_zeroed(layout) };
        let Some(first) = NonNull::new(first.cast::<Slot>()) else { handle_alloc_error(layout) };
        Self { first, capacity }
    }

    /// The slot for a position, which repeats after each lap.
    #[inline]
    pub(super) fn at(&self, position: u64) -> &Slot {
        let index = position as usize & (self.capacity - 1);
        // SAFETY: the index is below the capacity that was allocated, and zeroed bytes are a valid slot.
        unsafe { self.first.add(index).as_ref() }
    }

    /// Prefetches the memory of this slot for writing. Only a hint.
    #[inline]
    pub(super) fn fetch(&self, position: u64) {
        memory::fetch_to_write(self.at(position));
    }

    /// Makes the kernel give the memory of these slots now, so that no producer waits for it. Their contents stay.
    pub(super) fn back(&self, slots: Range<u64>) {
        // SAFETY: only its size is used.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let first = self.first.as_ptr().addr();
        // Whole pages of this allocation: the first and the last may partly belong to other allocations.
        let from = (first + slots.start as usize * Self::BYTES) / page * page;
        let from = from.max(first.next_multiple_of(page));
        let to = (first + slots.end as usize * Self::BYTES) / page * page;
        if from < to && slots.end as usize <= self.capacity {
            let start = self.first.as_ptr().cast::<u8>().with_addr(from);
            // SAFETY: inside the allocation. The call changes no byte. A kernel before 5.14 refuses it, and then pages
            // come as they are touched.
            unsafe { libc::madvise(start.cast(), to - from, libc::MADV_POPULATE_WRITE) };
        }
    }

    fn layout(capacity: usize) -> Layout {
        Layout::array::<Slot>(capacity).expect("the capacity is bounded by the ring")
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout; nothing else refers to the slots.
        unsafe { dealloc(self.first.as_ptr().cast(), Self::layout(self.capacity)) };
    }
}
