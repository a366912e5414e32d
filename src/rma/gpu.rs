//! A GPU whose memory is registered in a group. It has a stream of the group's own, in which copies happen one after
//! the other, and marks that show how far the stream has come.
//!
//! Only the placer appends to the stream and queries how far it is. The placer allocates nothing and never waits:
//! stream, events and page-locked memory are made with the first registration of the GPU's memory.

use std::collections::VecDeque;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::cuda::{Context, Driver, Object, driver};
use super::staging::Staging;
use super::wire::PIECE;
use crate::os::error::{Error, Result};

/// How many places of a stream can be distinguished. With more operations under way, the last event stands for several
/// of them.
const EVENTS: usize = 64;

/// Bytes of a cell, so that the memory behind it is aligned.
const CELL: usize = 128;

/// A GPU, as one group uses it.
pub(crate) struct Gpu {
    driver: &'static Driver,
    context: Context,
    stream: Object,
    /// The memory between the GPU and the connections.
    pub staging: Arc<Staging>,
    /// Page-locked memory for one number, and behind it for a piece of a copy within the GPU.
    cell: usize,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    free: Vec<Object>,
    /// Recorded events, the oldest first, each with the number of its mark.
    under_way: VecDeque<(u64, Object)>,
    /// The mark of what was appended last.
    latest: u64,
    /// All marks up to this one are reached.
    reached: u64,
    /// The first failure of the driver. A context does not recover from most of them.
    failure: Option<Error>,
}

/// A place in a GPU's stream. It is reached when all operations before it are done.
#[derive(Clone)]
pub(crate) struct Mark {
    /// The GPU of the stream.
    pub gpu: Arc<Gpu>,
    number: u64,
}

impl Mark {
    /// Whether the mark was reached when the GPU was last queried.
    ///
    /// # Errors
    /// When an operation in the stream has failed.
    pub(crate) fn is_reached(&self) -> Result<bool> {
        let progress = self.gpu.progress();
        if self.number <= progress.reached {
            return Ok(true);
        }
        progress.failure.clone().map_or(Ok(false), Err)
    }

    /// Whether no operation before it is under way any more: all are done or have failed.
    pub(crate) fn is_over(&self) -> bool {
        let progress = self.gpu.progress();
        self.number <= progress.reached || progress.under_way.is_empty()
    }
}

impl Gpu {
    fn new(driver: &'static Driver, context: Context, staging: Arc<Staging>) -> Result<Self> {
        let cell = driver.host_memory(context, CELL + PIECE)?;
        let made = driver.stream(context, EVENTS);
        let (stream, free) = made.inspect_err(|_| driver.free_host_memory(context, cell))?;
        let progress = Mutex::new(Progress { free, ..Progress::default() });
        Ok(Self { driver, context, stream, staging, cell, progress })
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends the operation of `call`, with the given event behind it.
    fn append(self: &Arc<Self>, call: impl FnOnce((Context, &Object, &Object)) -> Result<()>) -> Result<Mark> {
        let mut progress = self.progress();
        if let Some(failure) = &progress.failure {
            return Err(failure.clone());
        }
        // If all events are in use, the last one is recorded again: the mark before this one is then reached late.
        let event = progress.free.pop().or_else(|| progress.under_way.pop_back().map(|(_, event)| event));
        let Some(event) = event else { return Err(Error::internal("a GPU's stream has no events")) };
        let outcome = call((self.context, &self.stream, &event));
        // Also when the call fails: part of it may have been appended.
        progress.latest += 1;
        let number = progress.latest;
        progress.under_way.push_back((number, event));
        match outcome {
            Ok(()) => Ok(Mark { gpu: Arc::clone(self), number }),
            Err(error) => {
                progress.failure = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Appends a copy. Either place may be the host's.
    ///
    /// # Errors
    /// When the driver does not take it.
    ///
    /// # Safety
    /// Both places are that long, and valid until the mark is reached or the stream has failed.
    pub(crate) unsafe fn copy(self: &Arc<Self>, to: usize, from: usize, size: usize) -> Result<Mark> {
        // SAFETY: this function's contract.
        self.append(|place| unsafe { self.driver.copy(place, to, from, size) })
    }

    /// Appends copies from one place of this GPU's memory to another, through host memory. A copy that does not leave
    /// the GPU may need one of its processors, and a kernel that waits for this very copy may hold them all.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// As [`Gpu::copy`].
    pub(crate) unsafe fn copy_within(self: &Arc<Self>, to: usize, from: usize, size: usize) -> Result<Mark> {
        let (bounce, mut mark) = (self.cell + CELL, self.latest());
        for at in (0..size).step_by(PIECE) {
            let size = PIECE.min(size - at);
            // SAFETY: this function's contract. The stream does one copy after the other, so the previous piece has
            // left the memory.
            mark = unsafe {
                self.copy(bounce, from + at, size)?;
                self.copy(to + at, bounce, size)?
            };
        }
        Ok(mark)
    }

    /// Appends the write of a signal's number, which becomes visible after all earlier operations of the stream.
    ///
    /// # Errors
    /// When the driver does not take it.
    ///
    /// # Safety
    /// The place is this GPU's, a multiple of 8, and valid until the mark is reached or the stream has failed.
    pub(crate) unsafe fn write(self: &Arc<Self>, to: usize, value: u64) -> Result<Mark> {
        // SAFETY: this function's contract.
        self.append(|place| unsafe { self.driver.write(place, to, value) })
    }

    /// Appends the read of a signal's number, for [`Gpu::number_read`].
    ///
    /// # Errors
    /// When the driver does not take it.
    ///
    /// # Safety
    /// As [`Gpu::write`].
    pub(crate) unsafe fn read(self: &Arc<Self>, from: usize) -> Result<Mark> {
        // SAFETY: this function's contract; the cell lives as long as the stream.
        unsafe { self.copy(self.cell, from, 8) }
    }

    /// The number that was read. Valid once its mark is reached and before another number is read.
    pub(crate) fn number_read(&self) -> u64 {
        // SAFETY: 8 bytes, aligned as all page-locked memory, which nothing writes between two reads.
        unsafe { ptr::with_exposed_provenance::<u64>(self.cell).read_volatile() }
    }

    /// The mark of what was appended last.
    pub(crate) fn latest(self: &Arc<Self>) -> Mark {
        Mark { gpu: Arc::clone(self), number: self.progress().latest }
    }

    /// Queries how far the stream is. Returns whether it has advanced.
    fn ask(&self) -> bool {
        let mut progress = self.progress();
        let mut moved = false;
        while progress.failure.is_none()
            && let Some((number, event)) = progress.under_way.pop_front()
        {
            match self.driver.has_happened(self.context, &event) {
                Ok(true) => {
                    progress.reached = number;
                    progress.free.push(event);
                    moved = true;
                }
                Ok(false) => {
                    progress.under_way.push_front((number, event));
                    break;
                }
                Err(error) => {
                    progress.under_way.push_front((number, event));
                    progress.failure = Some(error);
                }
            }
        }
        // After a failure the events prove nothing: an event may not be behind the copy for which it was meant.
        if progress.failure.is_some()
            && !progress.under_way.is_empty()
            && self.driver.is_idle(self.context, &self.stream)
        {
            let Progress { free, under_way, .. } = &mut *progress;
            free.extend(under_way.drain(..).map(|(_, event)| event));
            moved = true;
        }
        moved
    }

    /// Waits until nothing is under way.
    fn settle(&self) {
        while !self.progress().under_way.is_empty() {
            self.ask();
            std::thread::yield_now();
        }
    }
}

impl Drop for Gpu {
    /// Copies use the cell and the staging memory, which are freed after this.
    fn drop(&mut self) {
        self.settle();
        let free = std::mem::take(&mut self.progress().free);
        self.driver.end_stream(self.context, &self.stream, &free);
        self.driver.free_host_memory(self.context, self.cell);
    }
}

/// The GPUs of a group.
#[derive(Default)]
pub(crate) struct Gpus {
    known: Mutex<Vec<Arc<Gpu>>>,
    /// Held while a GPU's objects are made, which may take milliseconds.
    making: Mutex<()>,
}

impl Gpus {
    fn known(&self) -> MutexGuard<'_, Vec<Arc<Gpu>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The GPU whose memory is at this address, in a group of `ranks` ranks.
    ///
    /// # Errors
    /// When there is no driver, or it has no such memory.
    pub(crate) fn of(&self, address: usize, ranks: u32) -> Result<Arc<Gpu>> {
        self.found_by(driver()?, address, ranks)
    }

    /// As [`Gpus::of`], by this driver.
    pub(super) fn found_by(&self, driver: &'static Driver, address: usize, ranks: u32) -> Result<Arc<Gpu>> {
        let _one_at_a_time = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let context = driver.context_of(address)?;
        let (found, first) = {
            let known = self.known();
            (known.iter().find(|gpu| gpu.context == context).cloned(), known.first().cloned())
        };
        if let Some(gpu) = found {
            return Ok(gpu);
        }
        let staging = match first {
            Some(other) => Arc::clone(&other.staging),
            None => Arc::new(Staging::new(driver, context, ranks)?),
        };
        let gpu = Arc::new(Gpu::new(driver, context, staging)?);
        self.known().push(Arc::clone(&gpu));
        Ok(gpu)
    }

    /// Queries how far all streams are. Returns whether one has advanced.
    pub(crate) fn ask(&self) -> bool {
        self.known().iter().fold(false, |moved, gpu| gpu.ask() | moved)
    }

    /// The marks of the last appended operations, one for each GPU.
    pub(crate) fn latest(&self) -> Vec<Mark> {
        self.known().iter().map(Gpu::latest).collect()
    }

    /// Waits until nothing is under way.
    pub(crate) fn settle(&self) {
        self.known().iter().for_each(|gpu| gpu.settle());
    }

    /// Forgets the GPUs.
    pub(crate) fn clear(&self) {
        self.known().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::super::cuda::simulation as gpu;
    use super::*;

    /// The event behind the copy was last recorded before it, or never.
    #[test]
    fn a_copy_whose_event_fails_is_waited_for() {
        for events_before in [0, 3] {
            gpu::begin(1, 7);
            let (gpus, source, target) = (Gpus::default(), [7_u8; 64], [0_u8; 64]);
            let of = gpus.found_by(gpu::driver(), source.as_ptr().expose_provenance(), 2).expect("a simulated GPU");
            let [to, from] = [&target, &source].map(|it| it.as_ptr().expose_provenance());
            gpu::records(events_before);
            // SAFETY: both places outlive the copies, which `settle` waits for.
            while unsafe { of.copy(to, from, 64) }.is_ok() {}
            gpus.settle();
            assert_eq!(gpu::waiting(), 0, "its memory may be freed now");
            drop(of);
            gpus.clear();
            assert_eq!(gpu::left(), (0, 0, 0));
        }
    }
}
