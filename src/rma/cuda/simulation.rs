//! A driver without a GPU: "its" memory is the host's, and a stream carries out its operations late. Each thread has
//! its own.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};

use super::*;

const GREATEST: c_int = -5;

enum Op {
    Copy { to: usize, from: usize, size: usize },
    Write { to: usize, value: u64 },
    Event(usize),
}

#[derive(Default)]
struct Gpu {
    /// How often the primary context was retained and not released, and how often it was retained.
    retained: (usize, usize),
    /// The streams that were made and not ended, each with its pending operations.
    streams: HashMap<usize, VecDeque<Op>>,
    /// The events that were made and not ended, each with the stream that has not reached it.
    events: HashMap<usize, Option<usize>>,
    blocks: HashMap<usize, Layout>,
    names: usize,
    /// How many more events can be made.
    events_left: usize,
    /// How many more events can be recorded.
    records_left: usize,
    /// How many of eight queries of an event that has not happened report that.
    late: u64,
    random: u64,
}

thread_local! {
    static GPU: RefCell<Gpu> = RefCell::default();
}

fn with<T>(inside: impl FnOnce(&mut Gpu) -> T) -> T {
    GPU.with(|gpu| inside(&mut gpu.borrow_mut()))
}

impl Gpu {
    fn name(&mut self) -> usize {
        self.names += 1;
        self.names
    }

    fn is_late(&mut self) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 32) % 8 < self.late
    }

    /// Carries out the operations of a stream up to this event, or all.
    fn come_to(&mut self, stream: usize, event: Option<usize>) {
        let ops = self.streams.get_mut(&stream).expect("a stream");
        while let Some(op) = ops.pop_front() {
            match op {
                // SAFETY: Towline's promise to the driver: both places are valid until the following event has
                // happened.
                Op::Copy { to, from, size } => unsafe {
                    std::ptr::copy::<u8>(
                        std::ptr::with_exposed_provenance(from),
                        std::ptr::with_exposed_provenance_mut(to),
                        size,
                    );
                },
                // SAFETY: as above, a multiple of 8.
                Op::Write { to, value } => unsafe { *std::ptr::with_exposed_provenance_mut::<u64>(to) = value },
                Op::Event(passed) => {
                    // An event that was recorded again since has another place.
                    if !ops.iter().any(|op| matches!(op, Op::Event(again) if *again == passed)) {
                        self.events.insert(passed, None);
                    }
                    if Some(passed) == event {
                        return;
                    }
                }
            }
        }
    }
}

/// Starts again on this thread: `late` of eight queries of an event report that it has not happened.
pub(crate) fn begin(seed: u64, late: u64) {
    with(|gpu| {
        *gpu = Gpu { random: seed | 1, late, events_left: usize::MAX, records_left: usize::MAX, ..Gpu::default() }
    });
}

/// From now on `left` events can be recorded.
pub(crate) fn records(left: usize) {
    with(|gpu| gpu.records_left = left);
}

/// How many operations of the streams are pending.
pub(crate) fn waiting() -> usize {
    with(|gpu| gpu.streams.values().map(VecDeque::len).sum())
}

/// The streams, events and blocks of page-locked memory that were made and not ended.
pub(crate) fn left() -> (usize, usize, usize) {
    with(|gpu| (gpu.streams.len(), gpu.events.len(), gpu.blocks.len()))
}

unsafe extern "C" fn init(_flags: c_uint) -> Code {
    0
}

unsafe extern "C" fn pointer_attribute(answer: *mut c_void, attribute: c_int, _address: u64) -> Code {
    if attribute == CONTEXT {
        // SAFETY: there is room for the answer, which is a pointer.
        unsafe { *answer.cast::<*mut c_void>() = null_mut() };
    } else {
        // SAFETY: there is room for the answer, which is a number.
        unsafe { *answer.cast::<c_int>() = 3 };
    }
    0
}

unsafe extern "C" fn device(device: *mut c_int, ordinal: c_int) -> Code {
    // SAFETY: there is room for the answer.
    unsafe { *device = ordinal };
    0
}

unsafe extern "C" fn retain(context: *mut *mut c_void, _device: c_int) -> Code {
    with(|gpu| gpu.retained = (gpu.retained.0 + 1, gpu.retained.1 + 1));
    // SAFETY: as above.
    unsafe { *context = std::ptr::without_provenance_mut(64) };
    0
}

unsafe extern "C" fn release(_device: c_int) -> Code {
    with(|gpu| gpu.retained.0 -= 1);
    0
}

unsafe extern "C" fn push(_context: *mut c_void) -> Code {
    0
}

unsafe extern "C" fn pop(_context: *mut *mut c_void) -> Code {
    0
}

unsafe extern "C" fn exchange_mode(_mode: *mut c_int) -> Code {
    0
}

unsafe extern "C" fn priorities(least: *mut c_int, greatest: *mut c_int) -> Code {
    // SAFETY: there is room for both answers.
    unsafe { (*least, *greatest) = (0, GREATEST) };
    0
}

unsafe extern "C" fn stream_create(stream: *mut *mut c_void, _flags: c_uint, priority: c_int) -> Code {
    assert_eq!(priority, GREATEST);
    let name = with(|gpu| {
        let name = gpu.name();
        gpu.streams.insert(name, VecDeque::new());
        name
    });
    // SAFETY: as above.
    unsafe { *stream = std::ptr::without_provenance_mut(name) };
    0
}

unsafe extern "C" fn stream_destroy(stream: *mut c_void) -> Code {
    with(|gpu| c_int::from(gpu.streams.remove(&stream.addr()).is_none()))
}

unsafe extern "C" fn stream_query(stream: *mut c_void) -> Code {
    with(|gpu| {
        if !gpu.streams[&stream.addr()].is_empty() && gpu.is_late() {
            return NOT_READY;
        }
        gpu.come_to(stream.addr(), None);
        0
    })
}

unsafe extern "C" fn event_create(event: *mut *mut c_void, _flags: c_uint) -> Code {
    let name = with(|gpu| {
        gpu.events_left = gpu.events_left.checked_sub(1)?;
        let name = gpu.name();
        gpu.events.insert(name, None);
        Some(name)
    });
    let Some(name) = name else { return 2 };
    // SAFETY: as above.
    unsafe { *event = std::ptr::without_provenance_mut(name) };
    0
}

unsafe extern "C" fn event_destroy(event: *mut c_void) -> Code {
    with(|gpu| c_int::from(gpu.events.remove(&event.addr()).is_none()))
}

fn append(stream: *mut c_void, op: Op) -> Code {
    with(|gpu| {
        if let Op::Event(event) = op {
            gpu.events.insert(event, Some(stream.addr()));
        }
        gpu.streams.get_mut(&stream.addr()).map_or(1, |ops| {
            ops.push_back(op);
            0
        })
    })
}

unsafe extern "C" fn event_record(event: *mut c_void, stream: *mut c_void) -> Code {
    let left = with(|gpu| gpu.records_left.checked_sub(1).inspect(|left| gpu.records_left = *left));
    if left.is_none() {
        return 2;
    }
    append(stream, Op::Event(event.addr()))
}

unsafe extern "C" fn event_query(event: *mut c_void) -> Code {
    with(|gpu| match gpu.events.get(&event.addr()).copied() {
        None => 1,
        Some(None) => 0,
        Some(Some(_)) if gpu.is_late() => NOT_READY,
        Some(Some(stream)) => {
            gpu.come_to(stream, Some(event.addr()));
            0
        }
    })
}

unsafe extern "C" fn host_alloc(memory: *mut *mut c_void, size: usize, _flags: c_uint) -> Code {
    let layout = Layout::from_size_align(size, 4096).expect("a size");
    // SAFETY: no empty layout is asked for.
    let block = unsafe { alloc(layout) };
    with(|gpu| gpu.blocks.insert(block.addr(), layout));
    // SAFETY: there is room for the answer.
    unsafe { *memory = block.cast() };
    0
}

unsafe extern "C" fn host_free(memory: *mut c_void) -> Code {
    let Some(layout) = with(|gpu| gpu.blocks.remove(&memory.addr())) else { return 1 };
    // SAFETY: from `host_alloc`.
    unsafe { dealloc(memory.cast(), layout) };
    0
}

unsafe extern "C" fn copy(to: u64, from: u64, size: usize, stream: *mut c_void) -> Code {
    append(stream, Op::Copy { to: to as usize, from: from as usize, size })
}

unsafe extern "C" fn write_value(stream: *mut c_void, to: u64, value: u64, _flags: c_uint) -> Code {
    append(stream, Op::Write { to: to as usize, value })
}

/// A driver of this thread's own.
pub(crate) fn driver() -> &'static Driver {
    thread_local! {
        static DRIVER: &'static Driver = Box::leak(Box::new(Driver {
            init,
            pointer_attribute,
            device,
            retain,
            release,
            push,
            pop,
            exchange_mode,
            priorities,
            stream_create,
            stream_destroy,
            stream_query,
            event_create,
            event_destroy,
            event_record,
            event_query,
            host_alloc,
            host_free,
            copy,
            write_value,
            error_name: None,
            _library: ManuallyDrop::new(Library::this()),
        }));
    }
    DRIVER.with(|driver| *driver)
}

/// This finds a context that is made again after `cudaDeviceReset`.
#[test]
fn a_gpu_is_left_to_its_owner() {
    begin(1, 0);
    let contexts = [0; 3].map(|_| driver().context_of(4096).expect("a context"));
    assert!(contexts.iter().all(|context| *context == contexts[0]));
    assert_eq!(with(|gpu| gpu.retained), (0, 3));
}

#[test]
fn a_stream_without_all_its_events_leaves_nothing_behind() {
    begin(1, 0);
    let context = driver().context_of(4096).expect("a context");
    with(|gpu| gpu.events_left = 3);
    assert!(driver().stream(context, 4).is_err());
    assert_eq!(left(), (0, 0, 0));
    with(|gpu| gpu.events_left = 4);
    let (stream, events) = driver().stream(context, 4).expect("a stream");
    driver().end_stream(context, &stream, &events);
    assert_eq!(left(), (0, 0, 0));
}
