//! A table of shared objects whose memory is never freed, so that a stale handle is always safe to look up.
//!
//! A place holds at most one `Arc`. Removing it increments the place's generation. The `Arc` may live on in threads
//! that are using it. Each call from NCCL does one look-up: [`Table::with`] costs one uncontended read lock and two
//! atomic operations, and touches no memory that users of another place touch.

use std::sync::{Arc, OnceLock, PoisonError};

use slab::Slab;

use super::handle::{Handle, Kind, MAX_INDEX};
use crate::os::error::{Error, Result};
use crate::os::sync::atomic::{AtomicU32, Ordering};
use crate::os::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

const SEGMENT: usize = 1024;

/// A place has two cache lines of its own (processors fetch lines in pairs): the neighbours belong to other
/// connections, which other threads use.
#[repr(align(128))]
struct Place<T: ?Sized> {
    object: RwLock<Option<Arc<T>>>,
    /// Written under the lock.
    generation: AtomicU32,
}

impl<T: ?Sized> Place<T> {
    fn new() -> Self {
        Self { object: RwLock::new(None), generation: AtomicU32::new(1) }
    }

    #[inline]
    fn read(&self) -> RwLockReadGuard<'_, Option<Arc<T>>> {
        self.object.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Option<Arc<T>>> {
        self.object.write().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }
}

type Segment<T> = Box<[Place<T>; SEGMENT]>;

/// Objects of one kind, named by [`Handle`]s.
pub(crate) struct Table<T: ?Sized> {
    kind: Kind,
    segments: [OnceLock<Segment<T>>; MAX_INDEX / SEGMENT],
    free: Mutex<Option<Slab<()>>>,
}

impl<T: ?Sized> Table<T> {
    /// An empty table; takes no memory beyond its own size until the first insertion.
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind, segments: [const { OnceLock::new() }; MAX_INDEX / SEGMENT], free: Mutex::new(None) }
    }

    #[inline]
    fn place(&self, index: usize) -> Option<&Place<T>> {
        self.segments[index / SEGMENT].get().map(|segment| &segment[index % SEGMENT])
    }

    /// Inserts an object. `make` gets the index, because request handles contain it.
    ///
    /// # Errors
    /// When all [`MAX_INDEX`] places are taken, or `make` fails.
    fn insert_with(&self, make: impl FnOnce(u32) -> Result<Arc<T>>) -> Result<Handle> {
        let index = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let free = free.get_or_insert_with(Slab::new);
            if free.len() >= MAX_INDEX {
                return Err(Error::new(
                    crate::os::error::Cause::System,
                    format!("this process already holds {MAX_INDEX} communicators"),
                ));
            }
            free.insert(())
        };
        self.segments[index / SEGMENT].get_or_init(|| {
            let places: Box<[Place<T>]> = (0..SEGMENT).map(|_| Place::new()).collect();
            places.try_into().ok().expect("as many as there are")
        });
        match make(index as u32) {
            Ok(object) => {
                let place = self.place(index).expect("the segment was just made");
                let mut empty = place.write();
                *empty = Some(object);
                Ok(Handle { kind: self.kind, index: index as u32, slot: 0, generation: place.generation() })
            }
            Err(error) => {
                self.release(index);
                Err(error)
            }
        }
    }

    /// Inserts an object.
    ///
    /// # Errors
    /// When the table is full.
    pub(crate) fn insert(&self, object: Arc<T>) -> Result<Handle> {
        self.insert_with(|_| Ok(object))
    }

    /// The object that a value from NCCL names, for the caller to keep.
    ///
    /// # Errors
    /// [`Cause::Argument`](crate::os::error::Cause::Argument) when it names nothing of this table, or something
    /// that was closed.
    pub(crate) fn get(&self, value: usize) -> Result<Arc<T>> {
        self.with_shared(value, |object| Ok(Arc::clone(object)))
    }

    /// Uses the object that a value from NCCL names, during a call that never waits: removing the object waits for the
    /// call.
    ///
    /// # Errors
    /// As [`Table::get`], and whatever `call` returns.
    #[inline]
    pub(crate) fn with<R>(&self, value: usize, call: impl FnOnce(&T) -> Result<R>) -> Result<R> {
        self.with_shared(value, |object| call(object))
    }

    /// As [`Table::with`], for a call that may need to keep the object.
    ///
    /// # Errors
    /// As [`Table::with`].
    #[inline]
    pub(crate) fn with_shared<R>(&self, value: usize, call: impl FnOnce(&Arc<T>) -> Result<R>) -> Result<R> {
        let handle = self.decode(value)?;
        let place = self.place(handle.index as usize).ok_or_else(|| Self::stale(value))?;
        match &*place.read() {
            Some(object) if place.generation() == handle.generation => call(object),
            _ => Err(Self::stale(value)),
        }
    }

    /// Whether a value still names an object that has not been removed. This takes no lock, so the object may be
    /// removed at any moment. It is for callers that only need to know that the owner has not removed it.
    #[inline]
    pub(crate) fn is_current(&self, value: usize) -> bool {
        let Ok(handle) = self.decode(value) else { return false };
        self.place(handle.index as usize).is_some_and(|place| place.generation() == handle.generation)
    }

    /// Uses the present occupant of a place, whatever its generation, as [`Table::with`] does: for request handles,
    /// whose generation is the slot's own. None when the place is empty.
    #[inline]
    pub(crate) fn with_occupant<R>(&self, index: u32, call: impl FnOnce(Option<&T>) -> R) -> R {
        match self.place(index as usize) {
            Some(place) => call(place.read().as_deref()),
            None => call(None),
        }
    }

    /// Removes an object from the table; its handle is stale from now on.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub(crate) fn remove(&self, value: usize) -> Result<Arc<T>> {
        let handle = self.decode(value)?;
        let place = self.place(handle.index as usize).ok_or_else(|| Self::stale(value))?;
        let object = {
            let mut occupant = place.write();
            let object = occupant.take_if(|_| place.generation() == handle.generation);
            let object = object.ok_or_else(|| Self::stale(value))?;
            place.generation.store(handle.generation.wrapping_add(1).max(1), Ordering::Release);
            object
        };
        self.release(handle.index as usize);
        Ok(object)
    }

    /// How many objects are in the table.
    pub(crate) fn len(&self) -> usize {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, Slab::len)
    }

    /// Whether some object satisfies `is_wanted`. As [`Table::find_map`].
    pub(crate) fn any(&self, is_wanted: impl Fn(&T) -> bool) -> bool {
        self.find_map(|object| is_wanted(object).then_some(())).is_some()
    }

    /// The first result of `find`, which is called with one object after the other: not for the data path.
    pub(crate) fn find_map<R>(&self, find: impl Fn(&T) -> Option<R>) -> Option<R> {
        let mut places = self.segments.iter().filter_map(OnceLock::get).flat_map(|segment| segment.iter());
        places.find_map(|place| place.read().as_deref().and_then(&find))
    }

    /// Whether the table is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads a value that names a place of this table. Only requests have slots: a value with one was never returned by
    /// this table.
    #[inline]
    fn decode(&self, value: usize) -> Result<Handle> {
        let handle = Handle::decode(value, self.kind)?;
        if handle.slot == 0 { Ok(handle) } else { Err(Self::stale(value)) }
    }

    fn release(&self, index: usize) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(free) = free.as_mut() {
            free.remove(index);
        }
    }

    #[cold]
    fn stale(value: usize) -> Error {
        Error::argument(format!("{value:#x} was closed before or never existed"))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_closed_handle_is_refused_even_when_its_place_is_taken_again() {
        let table: Table<String> = Table::new(Kind::Comm);
        let first = table.insert(Arc::new("first".into())).unwrap().encode();
        assert_eq!(*table.get(first).unwrap(), "first");
        table.remove(first).unwrap();
        let second = table.insert(Arc::new("second".into())).unwrap().encode();
        assert_ne!(first, second);
        assert!(table.get(first).is_err() && !table.is_current(first) && table.is_current(second));
        assert!(table.remove(first).is_err());
        assert_eq!(*table.get(second).unwrap(), "second");
        assert_eq!(table.len(), 1);
    }

    /// Found by fuzzing the calls: an id with a changed bit closed another context.
    #[test]
    fn a_handle_that_was_never_given_out_is_refused_whichever_bit_differs() {
        let table: Table<String> = Table::new(Kind::Comm);
        let value = table.insert(Arc::new(String::new())).unwrap().encode();
        for bit in 0..usize::BITS {
            assert!(table.get(value ^ (1 << bit)).is_err(), "bit {bit}");
            assert!(table.remove(value ^ (1 << bit)).is_err(), "bit {bit}");
        }
        assert!(table.remove(value).is_ok());
    }

    #[test]
    fn a_handle_of_another_kind_is_refused() {
        let table: Table<String> = Table::new(Kind::Comm);
        let handle = table.insert(Arc::new(String::new())).unwrap();
        assert!(table.get(Handle { kind: Kind::Context, ..handle }.encode()).is_err());
    }
}
