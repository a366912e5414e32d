//! The part of NCCL's thread: which transfers it follows, and when it reports which of their events.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{MutexGuard, PoisonError};

use super::super::request::{LastWords, MAX_PARTS, Outcome, RequestSlots, Ticket};
use super::notes::Notes;
use super::piece::Reported;
use super::transfer::Transfer;
use super::{Events, Path, Sink, Source, last};
use crate::nccl::net_event::Reader;
use crate::os::ticks::Ticks;

/// For a patient listener, the notes of unfinished requests are read only in one of this many calls. A thread that
/// reads them in a loop takes their memory away from the writers. NCCL's thread tests all its requests in turn,
/// thousands of times per millisecond; within the time of this many calls no path fills its list.
pub(super) const CALLS: u32 = 1024;

/// The state that NCCL's threads use, one at a time: the transfers, and the data that is reported with their pieces.
#[derive(Default)]
pub(super) struct Desk {
    pub(super) paths: Vec<Path>,
    /// How many paths were reconnected since the last such report.
    pub(super) reconnects: u16,
    /// By the slot of the request, and by its parts.
    transfers: Vec<[Transfer; MAX_PARTS]>,
    /// The slots of notes that were just read.
    noted: Vec<u16>,
}

impl Events {
    /// NCCL's thread, in `isend` or `irecv`, before anything can move: part `part` of the request in `slot` has this
    /// handle (null when NCCL passed none). Returns the time, if this side sends and times are wanted.
    #[inline]
    pub fn follow(&self, slot: u16, part: usize, handle: *mut c_void) -> Option<Ticks> {
        let (handle, sink) = (NonNull::new(handle)?, self.sink.get()?);
        self.begin(sink, slot, part, handle)
    }

    #[cold]
    #[inline(never)]
    fn begin(&self, sink: &Sink, slot: u16, part: usize, handle: NonNull<c_void>) -> Option<Ticks> {
        let mut desk = self.desk();
        let Desk { paths, transfers, .. } = &mut *desk;
        self.notes.get_or_init(|| {
            // The first transfer is followed on trial.
            self.has_sink.store(true, Ordering::Relaxed);
            Notes::new(paths.len())
        });
        let slot = usize::from(slot);
        if transfers.len() <= slot {
            transfers.resize_with(slot + 1, Default::default);
        }
        let transfer = &mut transfers[slot][part];
        transfer.is_followed = self.has_sink();
        transfer.details = self.wants_details(sink);
        // Only the sender sees what a receive waits for.
        let posted = (transfer.is_followed && transfer.details && sink.send).then(Ticks::now);
        transfer.begin(handle, sink.send, posted);
        posted
    }

    fn wants_details(&self, sink: &Sink) -> bool {
        let reader = sink.listener.reader();
        // Written only when the value changes: many threads read it.
        if self.reader.load(Ordering::Relaxed) != reader as u8 {
            self.reader.store(reader as u8, Ordering::Relaxed);
        }
        reader != Reader::None
    }

    /// NCCL's thread, in `isend`, `irecv` or `test`: reports the notes made since the last call.
    ///
    /// # Safety
    /// As [`Listener::start`](super::Listener::start), for every request of the connection.
    #[inline]
    pub(crate) unsafe fn report(&self) {
        if let (Some(sink), Some(notes)) = (self.sink.get(), self.notes.get())
            && notes.are_there()
        {
            // SAFETY: the caller keeps this function's promise, which is the same.
            unsafe { self.read(sink, notes, &mut self.desk(), None) };
        }
    }

    /// NCCL's thread, in `test` of an unfinished request. As [`Events::report`], but for a patient listener only now
    /// and then, often enough that the lists do not overflow.
    ///
    /// # Safety
    /// As [`Events::report`].
    #[inline]
    pub(crate) unsafe fn wait(&self) {
        if !self.has_sink() {
            return;
        }
        if self.is_patient() {
            let calls = (self.own.calls.load(Ordering::Relaxed) + 1) % CALLS;
            self.own.calls.store(calls, Ordering::Relaxed);
            if calls != 0 {
                return;
            }
        }
        // SAFETY: the caller keeps this function's promise, which is the same.
        unsafe { self.report() };
    }

    /// NCCL's thread, in `test`: as [`RequestSlots::finish`], but the profiler gets the events before NCCL gets the
    /// outcome.
    ///
    /// # Safety
    /// As [`Events::report`].
    #[inline]
    pub unsafe fn finish(&self, requests: &RequestSlots, ticket: Ticket) -> Option<Outcome> {
        // Read first: a request that ends after this is handled by the next call.
        if !requests.is_done(ticket) {
            // SAFETY: the caller keeps this function's promise, which is the same.
            unsafe { self.wait() };
            return None;
        }
        // SAFETY: as above.
        unsafe { self.settle(requests, ticket) };
        requests.finish(ticket)
    }

    /// NCCL's thread, in `isend` or `test`: reports all events of the request if it is done, otherwise those noted so
    /// far.
    ///
    /// # Safety
    /// As [`Events::report`].
    #[inline]
    pub unsafe fn settle(&self, requests: &RequestSlots, ticket: Ticket) {
        if self.notes.get().is_none() {
            return;
        }
        match requests.outcome(ticket) {
            // SAFETY: the caller keeps this function's promise, which is the same.
            Some(outcome) => unsafe { self.conclude(ticket.slot, &outcome, requests.last_words(ticket)) },
            // SAFETY: as above.
            None => unsafe { self.report() },
        }
    }

    /// NCCL's thread, when a request has succeeded and NCCL has not received the outcome: reports the rest, including
    /// the record left with the request.
    ///
    /// # Safety
    /// As [`Events::report`].
    pub(super) unsafe fn conclude(&self, slot: u16, outcome: &Outcome, record: Option<LastWords>) {
        // SAFETY: the caller keeps this function's promise, which is the same.
        unsafe {
            self.close(slot, outcome.parts, |sink, part, transfer| {
                let size = outcome.sizes[part];
                if !transfer.is_followed {
                    // No thread noted anything about the transfer. Its end is the moment to query whether a profiler
                    // reads events now.
                    transfer.details = self.wants_details(sink);
                } else if let Some(note) = record.and_then(|words| last::note(slot, words, size)) {
                    transfer.take(&note);
                }
                transfer.end(size, Ticks::now());
            });
        }
    }

    /// NCCL's thread, when a request has failed and NCCL has not received the outcome: nothing new is reported, and
    /// started pieces end.
    ///
    /// # Safety
    /// As [`Events::report`].
    pub(crate) unsafe fn abandon(&self, slot: u16) {
        // SAFETY: the caller keeps this function's promise, which is the same.
        unsafe { self.close(slot, MAX_PARTS, |_, _, transfer| transfer.fail(Ticks::now())) };
    }

    /// Reports the rest of the transfers of a request, which `ends` has ended.
    unsafe fn close(&self, slot: u16, parts: usize, mut ends: impl FnMut(&Sink, usize, &mut Transfer)) {
        let (Some(sink), Some(notes)) = (self.sink.get(), self.notes.get()) else { return };
        let mut desk = self.desk();
        let Some(transfers) = desk.transfers.get(usize::from(slot)) else { return };
        if transfers[..parts].iter().any(|transfer| transfer.is_followed) && notes.are_there() {
            // The request ended after all notes about it were made. They are read even if nothing is to be reported: no
            // note may be left for the next request in this slot.
            // SAFETY: the caller keeps this function's promise.
            unsafe { self.read(sink, notes, &mut desk, Some(slot)) };
        }
        let Desk { paths, reconnects, transfers, .. } = &mut *desk;
        for (part, transfer) in transfers[usize::from(slot)][..parts].iter_mut().enumerate() {
            if transfer.handle.is_some() {
                ends(sink, part, transfer);
                // SAFETY: the caller keeps this function's promise, and the handle is there.
                unsafe { self.report_transfer(sink, paths, reconnects, transfer, true) };
            }
            (transfer.handle, transfer.is_followed) = (None, false);
        }
    }

    /// Reads the notes, and reports all due events, except those of the `ending` request, which the caller reports.
    #[cold]
    unsafe fn read(&self, sink: &Sink, notes: &Notes, desk: &mut Desk, ending: Option<u16>) {
        let Desk { paths, reconnects, transfers, noted } = desk;
        notes.take(|note| {
            let of_it = transfers.get_mut(usize::from(note.slot)).map(|parts| &mut parts[usize::from(note.part)]);
            if let Some(transfer) = of_it.filter(|transfer| transfer.is_followed && transfer.handle.is_some()) {
                transfer.take(&note);
                if noted.last() != Some(&note.slot) && ending != Some(note.slot) {
                    noted.push(note.slot);
                }
            }
        });
        // Not before all lists are read: between lists there is no order.
        for slot in noted.drain(..) {
            for transfer in &mut transfers[usize::from(slot)] {
                // SAFETY: the caller keeps this function's promise; where the handle is there, the end has not been
                // reported.
                unsafe { self.report_transfer(sink, paths, reconnects, transfer, false) };
            }
        }
    }

    /// Reports the due events: to a patient listener all of them when the transfer `is_over`, to others the starts and
    /// stops that have not been reported. Drops the transfer when its first start is declined.
    ///
    /// # Safety
    /// As [`Listener::start`](super::Listener::start), if the transfer has a handle.
    unsafe fn report_transfer(
        &self,
        sink: &Sink,
        paths: &[Path],
        reconnects: &mut u16,
        transfer: &mut Transfer,
        is_over: bool,
    ) {
        let Some(handle) = transfer.handle else { return };
        let details = transfer.details;
        let mut source = Source { link: sink.link, send: sink.send, details, paths, reconnects: 0 };
        if details && self.is_patient() && transfer.pieces.iter().all(|piece| piece.reported == Reported::Nothing) {
            if is_over && !transfer.pieces.is_empty() {
                source.reconnects = std::mem::take(reconnects);
                // SAFETY: the caller's promise.
                let taken = unsafe { sink.listener.summary(handle.as_ptr(), &source, &transfer.pieces) };
                set(&self.has_sink, taken);
            }
            return;
        }
        for index in 0..transfer.pieces.len() {
            let piece = &mut transfer.pieces[index];
            if piece.reported == Reported::Nothing {
                // SAFETY: the caller's promise.
                let answer = unsafe { sink.listener.start(handle.as_ptr(), &source, piece) };
                set(&self.has_sink, !answer.is_null());
                piece.reported = if answer.is_null() { Reported::All } else { Reported::Start(answer) };
                if answer.is_null() && index == 0 {
                    transfer.handle = None;
                    return;
                }
            }
            if let (Reported::Start(answer), true) = (piece.reported, piece.ended.is_some()) {
                piece.reported = Reported::All;
                transfer.add_waits(index);
                if details {
                    source.reconnects = std::mem::take(reconnects);
                }
                sink.listener.stop(answer, &source, &transfer.pieces[index]);
                source.reconnects = 0;
            }
        }
    }

    pub(super) fn desk(&self) -> MutexGuard<'_, Desk> {
        self.own.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes only a changed value: many threads read it.
fn set(flag: &AtomicBool, value: bool) {
    if flag.load(Ordering::Relaxed) != value {
        flag.store(value, Ordering::Relaxed);
    }
}
