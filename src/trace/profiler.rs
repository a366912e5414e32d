//! The profiler as NCCL's threads meet it: five calls, whatever the interface's version.
//!
//! [`start`], [`stop`] and [`record`] run on NCCL's threads, in the middle of its work. They take the time, build a
//! [`Record`] and push it into the ring; no lock, no allocation, no system call. [`init`] and [`finalize`] run once
//! per communicator, on user threads, and may do both.
//!
//! One `Profiler` serves the process, for all of its communicators and threads. The interface does not report which of
//! them are alive. So it is made at the first `init` that requests it and never freed: a late call can never meet freed
//! memory. In a forked child there is none until the child's own `init`.
//!
//! After the last communicator's `finalize` everything is on disk when that call returns. A process that exits
//! without `finalize`, as most training jobs do, is served by an exit handler.

use std::ffi::c_int;
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use super::chain::{Chain, Change, Second, Start};
use super::event::{Body, CommInfo, Kind, NetPart, NetTimes, Record, state};
use super::key::{self, Stamp};
use super::live::network::Connections;
use super::live::place;
use super::process::{Drops, Notice, PEER_WAITS, Profiler, Request};
use super::ring::{Ring, Room, shard_of};
use super::say::{Level, host, say};
use super::settings::Settings;
use super::writer::Writer;
use crate::nccl::net_event::{self, NetEvent, NetSum, Reader};
use crate::os::config::Config;
use crate::os::error::Result;
use crate::os::fork;
use crate::os::ticks::{self, Ticks};

/// How long the last `finalize` waits for a writer that does nothing.
const FINISH: Duration = Duration::from_secs(5);

/// How long the exit handler waits for a writer that does nothing.
const EXIT: Duration = Duration::from_secs(2);

/// How long either waits for a writer that is at work: a full ring needs a second or two, unless the machine has
/// no time for it.
const LONGEST: Duration = Duration::from_secs(30);

/// How long the exit handler waits for the file systems of the state file and the control socket.
const LEAVE: Duration = Duration::from_secs(1);

/// Opens a second profiler for the interface's version that NCCL speaks to us.
pub(crate) type LoadSecond = fn(&Path, u32) -> Result<Box<dyn Second>>;

/// The arguments of a communicator's `init`.
pub(crate) struct Init {
    /// The version of the interface that NCCL uses.
    pub version: u32,
    /// The data about the communicator; `context` is not yet set.
    pub comm: CommInfo,
    /// NCCL's event mask, one for the process.
    pub mask: *mut c_int,
    /// How to open a second profiler.
    pub load_second: LoadSecond,
    /// The transport's connections.
    pub connections: Connections,
}

static CURRENT: AtomicPtr<Profiler> = AtomicPtr::new(std::ptr::null_mut());

/// While a profiler is being made: the maker's [`fork::generation`] plus one. Not a mutex, which a child forked at that
/// moment would find locked for ever.
static MAKING: AtomicU64 = AtomicU64::new(0);

#[inline]
fn current() -> Option<&'static Profiler> {
    // SAFETY: the pointer is null or comes from a leaked box, so it is valid for ever.
    let profiler = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
    // A forked child has the parent's profiler without its thread: it has none.
    profiler.filter(|profiler| profiler.generation == fork::generation())
}

#[inline]
fn thread() -> u64 {
    // SAFETY: no preconditions; it returns the thread's own pointer, unique among living threads.
    unsafe { libc::pthread_self() }
}

/// The calling thread and the time.
struct Call {
    thread: u64,
    when: u64,
}

impl Call {
    /// This one, which follows upon the event `cause` (its parent's start, or its own); `now`, if a time after that is
    /// known.
    ///
    /// A shard's records keep their order whatever their times are ([`super::writer`]). So only a record that follows
    /// from one in another shard needs a time that is certainly later than that one's.
    #[inline]
    fn this(cause: u64, now: Option<u64>) -> Self {
        let thread = thread();
        let when = if shard_of(thread) == key::shard(cause) {
            now.unwrap_or_else(|| Ticks::now().number())
        } else {
            Ticks::now_in_order().number()
        };
        Self { thread, when }
    }
}

/// A communicator begins. Writes the mask and returns its context, 0 when there is nothing to do for it.
///
/// # Safety
/// `init.mask` is null or valid for as long as any communicator lives.
pub(crate) unsafe fn init(init: Init) -> u64 {
    let set_mask = |mask: u32| {
        if !init.mask.is_null() {
            // SAFETY: the caller promises a valid place; NCCL reads it as one int, hence the atomic.
            unsafe { AtomicI32::from_ptr(init.mask) }.store(mask as i32, Ordering::Relaxed);
        }
    };
    let Some(profiler) = current().or_else(|| make(&init)) else {
        set_mask(0);
        return 0;
    };
    let serial = profiler.serial.fetch_add(1, Ordering::Relaxed) + 1;
    let comm = CommInfo { context: profiler.stamp.context(serial), ..init.comm };
    let context = comm.context;
    profiler.live.fetch_add(1, Ordering::AcqRel);
    if Kind::NetPlugin.triggers() & profiler.settings.mask != 0 {
        net_event::announce(if profiler.chain.is_some() {
            // A second profiler takes the time of each call for that of its event.
            Reader::Hasty
        } else if profiler.settings.trace {
            Reader::Patient
        } else {
            Reader::Sums
        });
    }
    if let Some(chain) = &profiler.chain {
        chain.init(&comm);
    }
    profiler.notices().push(Notice::Begin { comm, when: Ticks::now_in_order() });
    // Wakes a writer that sleeps because no communicator was alive.
    let _ = profiler.requests.send(Request::Wake);
    profiler.mask.store(init.mask, Ordering::Release);
    set_mask(profiler.wanted());
    context
}

/// An event begins. Returns its handle, 0 when it is declined.
#[inline]
pub(crate) fn start(context: u64, start: &Start) -> u64 {
    let Some(profiler) = current() else { return 0 };
    let Some(kind) = start.body.kind() else { return 0 };
    let chain = profiler.chain.as_ref().filter(|chain| chain.wants(&start.body));
    let mut event = 0;
    if kind == Kind::ProxyStep && profiler.skips_steps && profiler.stamp.made(start.parent) {
        return key::stand_in(start.parent);
    }
    if kind.triggers() & profiler.settings.mask != 0 {
        event = profiler.push_start(context, kind, start);
    }
    if let Some(chain) = chain {
        let own = event;
        if event == 0 {
            event = profiler.stamp.chained(chain.number(), matches!(start.body, Body::NetTowline(_)));
        }
        if !chain.start(event, context, start) {
            event = own;
        }
    }
    event
}

/// Parts of a transfer that have ended, reported in one call: an event each. Returns a handle that stands for all, 0
/// when they are declined. Only a profiler without a second one behind it gets several in one call ([`Reader::Patient`]
/// and up).
pub(crate) fn start_all(context: u64, first: &Start, parts: &[NetEvent]) -> u64 {
    let Some(profiler) = current() else { return 0 };
    if Kind::NetPlugin.triggers() & profiler.settings.mask == 0 {
        return 0;
    }
    let call = Call::this(first.parent, None);
    if profiler.push_parts(context, first, &call, parts) {
        return profiler.stamp.chained(0, true);
    }
    // One after the other, as far as there is room.
    let events =
        parts.iter().map(|net| profiler.push_part(context, first, &call, NetPart::of(net), NetTimes::at_start(net)));
    events.fold(0, |first, event| if first == 0 { event } else { first })
}

/// A transfer has ended at `ended` ([`Ticks::number`]), and this sum is all its data. Returns whether it is recorded.
/// Only a profiler without a second one behind it gets sums ([`Reader::Sums`]).
#[inline]
pub(crate) fn sum(context: u64, parent: u64, rank: i32, sum: &NetSum, ended: u64) -> bool {
    let Some(profiler) = current() else { return false };
    if Kind::NetPlugin.triggers() & profiler.settings.mask == 0 {
        return false;
    }
    let call = Call::this(parent, Some(ended));
    profiler.push_record(context, Kind::NetPlugin, (parent, rank), &call, Body::NetSum(*sum)) != 0
}

/// An event ends.
#[inline]
pub(crate) fn stop(event: u64) {
    let Some(profiler) = current().filter(|profiler| profiler.stamp.made(event)) else { return };
    if !key::is_silent(event) && profiler.push(event, Room::Stop, Body::Stop).is_none() {
        profiler.drops.stops.fetch_add(1, Ordering::Relaxed);
    }
    if let Some(chain) = &profiler.chain {
        chain.stop(event);
    }
}

/// An event changes its state.
///
/// # Safety
/// For a network plugin's update, `change.data` is null or the type that this plugin documents.
#[inline]
pub(crate) unsafe fn record(event: u64, change: &Change) {
    let Some(profiler) = current().filter(|profiler| profiler.stamp.made(event)) else { return };
    if !key::is_silent(event) {
        // SAFETY: passed on from the caller.
        if let Some(body) = unsafe { body_of(event, change) }
            && !profiler.is_of_no_use(event, change.state)
            && profiler.push(event, Room::State, body).is_none()
        {
            profiler.drops.states.fetch_add(1, Ordering::Relaxed);
        }
    }
    // A second profiler gets the event under NCCL's identifier, whose descriptors have no updates.
    if let Some(chain) = profiler.chain.as_ref().filter(|_| !key::is_own_net(event)) {
        chain.record(event, change);
    }
}

/// A communicator ends.
pub(crate) fn finalize(context: u64) {
    let Some(profiler) = current().filter(|profiler| profiler.stamp.made(context)) else { return };
    if let Some(chain) = &profiler.chain {
        chain.finalize(context);
    }
    profiler.notices().push(Notice::End { context, when: Ticks::now_in_order() });
    let last = profiler.live.fetch_update(Ordering::AcqRel, Ordering::Acquire, |live| live.checked_sub(1)) == Ok(1);
    if last {
        profiler.finish(FINISH);
        // The library that the mask belongs to may be unmapped from here on.
        profiler.mask.store(std::ptr::null_mut(), Ordering::Release);
    }
}

/// # Safety
/// As for [`record`].
#[inline]
unsafe fn body_of(event: u64, change: &Change) -> Option<Body> {
    let state = u8::try_from(change.state).ok()?;
    if state != state::NET_UPDATE {
        return Some(Body::State { state, steps: change.steps, arg: change.arg });
    }
    if !key::is_own_net(event) || change.data.is_null() {
        return None;
    }
    // SAFETY: only starts under Towline's own plugin id get such a handle, and their updates carry a NetEvent.
    let net = unsafe { &*change.data.cast_const().cast::<NetEvent>() };
    Some(Body::NetTimes(NetTimes::of(net)))
}

impl Profiler {
    /// Whether this change of state is of no use: that an operation is in progress is shown in a trace only. Or it was
    /// the event's last one too: NCCL reports at each attempt to send that the receiver is not ready, many times in a
    /// microsecond.
    #[inline]
    fn is_of_no_use(&self, event: u64, now: c_int) -> bool {
        if now == c_int::from(state::OP_IN_PROGRESS) {
            return !self.settings.trace;
        }
        if now != c_int::from(state::STEP_SEND_PEER_WAIT) {
            return false;
        }
        let last = &self.peer_waits[(event.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize];
        let is_repeated = last.load(Ordering::Relaxed) == event;
        if !is_repeated {
            last.store(event, Ordering::Relaxed);
        }
        is_repeated
    }

    /// The parent that is recorded.
    #[inline]
    fn parent(&self, parent: u64) -> u64 {
        if self.skips_steps { key::stood_for(parent) } else { parent }
    }

    #[inline]
    fn push_start(&self, context: u64, kind: Kind, start: &Start) -> u64 {
        let call = Call::this(start.parent, None);
        if let (Body::NetTowline(part), Some(times)) = (start.body, start.times) {
            return self.push_part(context, start, &call, part, times);
        }
        self.push_record(context, kind, (start.parent, start.rank), &call, start.body)
    }

    #[inline]
    fn push_record(&self, context: u64, kind: Kind, (parent, rank): (u64, i32), call: &Call, body: Body) -> u64 {
        let own_net = matches!(body, Body::NetTowline(_));
        let place = self.ring.push(call.thread, Room::Start, |place| Record {
            when: call.when,
            id: self.stamp.event(place, own_net),
            parent: self.parent(parent),
            context: if self.stamp.made(context) { context } else { 0 },
            rank,
            thread: (call.thread >> 12) as u32,
            body,
        });
        if let Some(place) = place {
            return self.stamp.event(place, own_net);
        }
        self.drops.starts[kind as usize].fetch_add(1, Ordering::Relaxed);
        0
    }

    /// A part that has ended, and its end, which as a rule fits into the same record.
    #[inline]
    fn push_part(&self, context: u64, start: &Start, call: &Call, mut part: NetPart, times: NetTimes) -> u64 {
        let is_all = part.take_in(&times);
        let of = (start.parent, start.rank);
        let event = self.push_record(context, Kind::NetPlugin, of, call, Body::NetTowline(part));
        if event == 0 {
            return 0;
        }
        if !is_all && self.push(event, Room::Stop, Body::NetTimes(times)).is_none() {
            self.drops.stops.fetch_add(1, Ordering::Relaxed);
        }
        // Later reports about it add nothing, as for an event that only a second profiler wants.
        self.stamp.chained(0, true)
    }

    /// Parts that have ended, and their ends, if there is room for all.
    fn push_parts(&self, context: u64, start: &Start, call: &Call, parts: &[NetEvent]) -> bool {
        let count = parts.len() + parts.iter().filter(|net| !NetPart::takes_in(net)).count();
        let (context, parent) = (if self.stamp.made(context) { context } else { 0 }, self.parent(start.parent));
        let (when, thread) = (call.when, (call.thread >> 12) as u32);
        let (mut parts, mut end) = (parts.iter(), None);
        self.ring.push_all(call.thread, Room::Start, count, |place| {
            if let Some((id, times)) = end.take() {
                return Record { when, id, parent: 0, context: 0, rank: -1, thread, body: Body::NetTimes(times) };
            }
            let id = self.stamp.event(place, true);
            let net = parts.next().expect("as many as were counted");
            end = (!NetPart::takes_in(net)).then(|| (id, NetTimes::at_start(net)));
            let body = Body::NetTowline(NetPart::ended(net));
            Record { when, id, parent, context, rank: start.rank, thread, body }
        })
    }

    #[inline]
    fn push(&self, event: u64, room: Room, body: Body) -> Option<()> {
        let Call { thread, when } = Call::this(event, None);
        let make = |_| Record { when, id: event, parent: 0, context: 0, rank: -1, thread: (thread >> 12) as u32, body };
        self.ring.push(thread, room, make).map(drop)
    }

    /// Writes all records in the ring to disk. Gives up when the writer makes no progress for `patience`.
    fn finish(&self, patience: Duration) {
        let began = Instant::now();
        let mut seen = self.progress.load(Ordering::Relaxed);
        let (done, wait) = mpsc::channel();
        if self.requests.send(Request::Finish(done)).is_err() {
            return;
        }
        while wait.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            let progress = self.progress.load(Ordering::Relaxed);
            if progress == seen || began.elapsed() > LONGEST {
                let waited = began.elapsed().as_secs();
                say(Level::Warn, &format!("the profile is not complete: its thread was not done after {waited} s"));
                return;
            }
            seen = progress;
        }
    }
}

/// Makes the process's profiler if the environment enables one.
fn make(init: &Init) -> Option<&'static Profiler> {
    let mine = u64::from(fork::generation()) + 1;
    loop {
        let maker = MAKING.load(Ordering::Acquire);
        // A maker of another generation was a thread of the parent, and no thread of this child.
        if maker != mine && MAKING.compare_exchange(maker, mine, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    let made = current().or_else(|| new_profiler(init));
    if let Some(profiler) = made {
        CURRENT.store(std::ptr::from_ref(profiler).cast_mut(), Ordering::Release);
    }
    MAKING.store(0, Ordering::Release);
    made
}

fn new_profiler(init: &Init) -> Option<&'static Profiler> {
    let (config, _) = Config::from_env();
    let (settings, complaints) = Settings::new(&config, &host(), std::process::id(), || place::default_dir(true));
    complaints.iter().for_each(|complaint| say(Level::Warn, complaint));
    let settings = settings?;
    let chain = settings.chain.as_ref().and_then(|path| match (init.load_second)(path, init.version) {
        Ok(second) => Some(Chain::new(second)),
        Err(error) => {
            say(Level::Warn, &format!("TOWLINE_PROFILER_CHAIN is ignored: {error}"));
            None
        }
    });
    if settings.mask == 0 && chain.is_none() {
        return None;
    }
    fork::watch();
    ticks::set_up();
    let (requests, inbox) = mpsc::channel();
    let profiler: &'static Profiler = Box::leak(Box::new(Profiler {
        stamp: Stamp::random(),
        ring: Ring::new(if settings.mask == 0 { 0 } else { settings.buffer }),
        drops: Drops::default(),
        // A second profiler gets the steps' handles from us.
        skips_steps: settings.skips_steps() && chain.is_none(),
        chain,
        mask: AtomicPtr::new(std::ptr::null_mut()),
        live: AtomicU64::new(0),
        serial: AtomicU64::new(0),
        progress: AtomicU64::new(0),
        connections: init.connections,
        peer_waits: [const { AtomicU64::new(0) }; PEER_WAITS],
        notices: Mutex::new(Vec::new()),
        requests: requests.clone(),
        generation: fork::generation(),
        settings,
    }));
    let writer = Writer::new(profiler, inbox, requests);
    if let Err(error) = crate::os::thread::spawn("towline-trace", move || writer.run()) {
        say(Level::Warn, &format!("the profiler's thread cannot start, profiling is off: {error}"));
        return None;
    }
    static AT_EXIT: Once = Once::new();
    // SAFETY: the library stays mapped (it is linked with -z nodelete), so the handler exists at exit.
    AT_EXIT.call_once(|| _ = unsafe { libc::atexit(at_exit) });
    Some(profiler)
}

extern "C" fn at_exit() {
    if let Some(profiler) = current() {
        profiler.finish(EXIT);
        let (reply, wait) = mpsc::channel();
        let asked = profiler.requests.send(Request::Exit(reply)).is_ok();
        let last_words = asked.then(|| wait.recv_timeout(EXIT).ok()).flatten().flatten();
        let (done, wait) = mpsc::channel();
        // Not on this thread: the file system may not answer, and a file beyond RLIMIT_FSIZE makes the kernel send its
        // writer SIGXFSZ, which the library's own threads block.
        let leave = move || {
            super::state_file::leave(last_words);
            super::service::leave();
            let _ = done.send(());
        };
        if crate::os::thread::spawn("towline-exit", leave).is_ok() {
            let _ = wait.recv_timeout(LEAVE);
        }
    }
}
