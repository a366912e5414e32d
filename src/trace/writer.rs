//! The one thread behind the ring: it puts records in order and hands them to the trace and the summary.
//!
//! It wakes every few milliseconds while communicators are alive, at once when a request comes, and sleeps
//! otherwise. Whatever it does, NCCL's threads do not wait for it; when it falls behind they drop, and count.
//!
//! Order: records carry the times of their calls. Each round takes the records in the ring, sorts them, and applies
//! those that are not newer than a time before the round. [`Drain::drain`] explains why a parent then comes before its
//! children. A record is never earlier than the one before it in its shard. The processor's reordering may put the
//! times of a thread's own calls out of order ([`Ticks::now`](crate::os::ticks::Ticks::now)), but not its records.
//!
//! Times travel as ticks, and become nanoseconds here ([`Timeline`]).

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::chain::Chain;
use super::claim::{claim, is_older};
use super::clock::{self, Timeline};
use super::event::{Body, CommInfo, Record};
use super::live::network::Network;
use super::live::{self, GapState, State, place};
use super::metrics::{self, Labels};
use super::names::Name;
use super::perfetto::file::TraceFile;
use super::perfetto::{Emitter, ProcessInfo, mix};
use super::place::SHARDS;
use super::process::{Notice, Profiler, Request};
use super::ring::Drain;
use super::say::{Level, host, say};
use super::service::{self, Service};
use super::state_file;
use super::stuck::{Own, Watch};
use super::summary::{self, Summary};
use super::tracker::Tracker;
use super::verdict::Whereabouts;

/// Between two polls of the ring.
const ROUND: Duration = Duration::from_millis(4);

/// Traced events are in the file after this time, whatever happens to the process.
const FLUSH: Duration = Duration::from_millis(100);

/// Or after this many bytes.
const FLUSH_BYTES: usize = 64 << 10;

/// When a producer was interrupted in the middle of a record, this many records wait for it at most.
const PENDING: usize = 1 << 18;

/// The facts kept for the process's state.
struct Status {
    tracker: Tracker,
    network: Network,
    beat: u64,
    boot: u64,
    /// By kind: how many events were dropped, and when that number last grew.
    drops: [u64; 3],
    gaps: [Option<u64>; 3],
    /// As in the state.
    stamp: u64,
    /// When to check next for stuck calls.
    update_due: Instant,
    watch: Watch,
}

impl Status {
    fn new() -> Self {
        Self {
            tracker: Tracker::new(live::KEPT),
            network: Network::default(),
            beat: 0,
            boot: place::boot(),
            drops: [0; 3],
            gaps: [None; 3],
            stamp: random(),
            update_due: Instant::now(),
            watch: Watch::default(),
        }
    }
}

/// Between two checks for stuck calls.
const LOOK: Duration = Duration::from_secs(1);

/// The writer's state.
pub(super) struct Writer {
    profiler: &'static Profiler,
    inbox: Receiver<Request>,
    drain: Drain,
    /// Per shard, the time of its last record.
    last: [u64; SHARDS],
    /// Their times, and those of the ends, are still ticks.
    pending: Vec<Record>,
    ending: Vec<(u64, u64)>,
    timeline: Timeline,
    trace: Option<Emitter>,
    summary: Summary,
    status: Option<Status>,
    /// Communicators whose id came with their first collective.
    learned: HashSet<u64>,
    metrics_due: Instant,
    flush_due: Instant,
    drops_told: u64,
    mask_told: u32,
    labels: Labels,
    metrics_path: Option<PathBuf>,
    summary_path: Option<PathBuf>,
    /// The summary's file is this process's own.
    claimed: bool,
    complained: bool,
}

impl Writer {
    /// The writer of `profiler`. Opens its outputs; reports those that cannot be opened, and continues without them.
    pub(super) fn new(profiler: &'static Profiler, inbox: Receiver<Request>, requests: Sender<Request>) -> Self {
        let settings = &profiler.settings;
        let stem = format!("towline-{}-{}", host(), std::process::id());
        let trace = settings.trace.then(|| TraceFile::create(&settings.dir, &stem, settings.limit));
        let trace = match trace {
            Some(Ok(file)) => {
                say(Level::Info, &format!("Towline writes a trace to {}", file.path().display()));
                let info = process_info(metrics::Labels::of_process("").rank);
                let seed = mix(random(), mix(info.boot, info.pid as u64));
                Some(Emitter::new(file, &info, seed, clock::now()))
            }
            Some(Err(error)) => {
                let dir = settings.dir.display();
                say(Level::Warn, &format!("no trace, a file in {dir} cannot be made: {error}"));
                None
            }
            None => None,
        };
        let metrics_file = settings.metrics.as_ref().map(|path| {
            if let Some(dir) = path.parent() {
                place::sweep(dir, &format!("towline-{}-", host()), "prom");
            }
            let age = (3 * settings.interval).max(Duration::from_secs(10));
            claim(path, |path| is_older(path, age) || metrics::has_ended(path))
        });
        // Where another process has the same name and number, this one's has the file's number behind it.
        let (mut pid, number) =
            (std::process::id().to_string(), metrics_file.as_ref().map_or(1, |&(_, number)| number));
        if number > 1 {
            pid += &format!(".{number}");
        }
        let labels = Labels::of_process(&pid);
        let listen = (settings.listen, settings.remote.as_ref(), labels.local_rank);
        let (service, complaints) = Service::open(settings.control.clone(), listen, requests.clone());
        // The user did not request sockets that serve the status alone, unless over TCP.
        let level = if settings.is_asked_for() || settings.remote.is_some() { Level::Warn } else { Level::Info };
        complaints.iter().for_each(|complaint| say(level, complaint));
        if let Some(service) = service
            && let Err(error) = crate::os::thread::spawn("towline-serve", move || service.run())
        {
            say(Level::Warn, &format!("no thread serves the control socket: {error}"));
        }
        if let Some(path) = settings.state.clone()
            && let Err(error) = crate::os::thread::spawn("towline-state", move || state_file::keep(&path, &requests))
        {
            say(level, &format!("no thread keeps the state file: {error}"));
        }
        let summary_path = settings.summary.then(|| settings.dir.join(format!("{stem}.summary.txt")));
        let now = Instant::now();
        let mut drain = Drain::default();
        drain.back(&profiler.ring);
        Self {
            profiler,
            inbox,
            drain,
            last: [0; SHARDS],
            pending: Vec::new(),
            ending: Vec::new(),
            timeline: Timeline::default(),
            trace,
            summary: Summary::default(),
            status: settings.status.then(Status::new),
            learned: HashSet::new(),
            metrics_due: now + settings.interval,
            flush_due: now,
            drops_told: 0,
            mask_told: settings.mask,
            labels,
            metrics_path: metrics_file.map(|(path, _)| path),
            summary_path,
            claimed: false,
            complained: false,
        }
    }

    /// Works for as long as the process lives.
    pub(super) fn run(mut self) {
        loop {
            let request = if self.profiler.live.load(Ordering::Acquire) == 0 && self.pending.is_empty() {
                self.inbox.recv().ok()
            } else {
                match self.inbox.recv_timeout(ROUND) {
                    Ok(request) => Some(request),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            };
            // A panic here would end the profiling of a job that is otherwise healthy. The state behind it is lost, but
            // the process continues and NCCL's threads only see a ring that fills.
            self.round();
            match request {
                None | Some(Request::Wake) => {}
                Some(Request::Summary(reply)) => {
                    let _ = reply.send(self.tables());
                }
                Some(Request::Metrics(reply)) => {
                    let _ = reply.send(self.metrics(true));
                }
                Some(Request::Flush(reply)) => {
                    self.flush();
                    let path = self.trace.as_mut().map(|trace| trace.file().path().display().to_string());
                    let _ = reply.send(path.unwrap_or_else(|| "no trace is written".into()) + "\n");
                }
                Some(Request::Status(kept, reply)) => {
                    let _ = reply.send(self.state(kept, false));
                }
                Some(Request::Exit(reply)) => {
                    self.write_metrics(false);
                    let _ = reply.send(self.state(live::KEPT_IN_FILE, true));
                }
                Some(Request::Finish(reply)) => {
                    self.finish();
                    let _ = reply.send(());
                }
            }
        }
    }

    /// Polls the ring once, and does everything that is due.
    fn round(&mut self) {
        self.drain.back(&self.profiler.ring);
        let now = self.timeline.update();
        // Notices are taken after the time was: a record up to `now` has its communicator known.
        let notices = std::mem::take(&mut *self.profiler.notices());
        let (last, pending) = (&mut self.last, &mut self.pending);
        let mut cut = self.drain.drain(&self.profiler.ring, now, &mut |shard, mut record| {
            last[shard] = last[shard].max(record.when);
            record.when = last[shard];
            pending.push(record);
        });
        if self.pending.len() > PENDING {
            cut = now;
        }
        for notice in notices {
            match notice {
                Notice::Begin { comm, when } => self.comm_begins(&comm, self.timeline.nanoseconds(when.number())),
                Notice::End { context, when } => self.ending.push((context, when.number())),
            }
        }
        self.pending.sort_by_key(|record| record.when);
        let ready = self.pending.partition_point(|record| record.when <= cut);
        let later = self.pending.split_off(ready);
        self.profiler.progress.fetch_add(1, Ordering::Relaxed);
        for (number, mut record) in std::mem::replace(&mut self.pending, later).into_iter().enumerate() {
            let ticks = record.when;
            record.when = self.timeline.nanoseconds(ticks);
            let end = record.body.ended_part();
            self.apply(&record);
            if let Some(times) = end {
                self.apply(&Record { parent: 0, context: 0, rank: -1, body: Body::NetTimes(times), ..record });
            }
            // A long round must not keep what is complete waiting, nor let the trace outgrow half of a small disk.
            if number % 1024 == 1023 {
                self.profiler.progress.fetch_add(1, Ordering::Relaxed);
                self.advance(ticks);
            }
        }
        self.advance(cut);
        self.timeline.forget(cut);
        self.follow_chain();
        let due = Instant::now();
        if due >= self.flush_due {
            self.flush();
            self.flush_due = due + FLUSH;
        }
        if due >= self.metrics_due {
            self.write_metrics(true);
            self.metrics_due = due + self.profiler.settings.interval;
        }
        if let Some(status) = self.status.as_mut().filter(|status| due >= status.update_due) {
            status.update_due = due + LOOK;
            status.tracker.forget(clock::now());
            let settings = &self.profiler.settings;
            let (pid, rank) = (std::process::id() as i32, self.labels.rank);
            let own = Own {
                place: &Whereabouts { host: host(), pid, stamp: status.stamp, rank },
                connections: self.profiler.connections,
                states: settings.state.as_deref().and_then(Path::parent),
                after: settings.stuck_after,
            };
            status.watch.look(&status.tracker, &own);
        }
    }

    /// The process's state as JSON.
    fn state(&mut self, kept: usize, exited: bool) -> Option<String> {
        let status = self.status.as_mut()?;
        if status.tracker.comms().values().all(|comm| comm.ended.is_some()) {
            return None;
        }
        status.beat += 1;
        let now = clock::now();
        let (interfaces, connections) = status.network.update((self.profiler.connections)(), now);
        let state = State {
            version: env!("CARGO_PKG_VERSION").into(),
            host: host(),
            boot: status.boot,
            pid: std::process::id() as i32,
            stamp: status.stamp,
            rank: self.labels.rank,
            beat: status.beat,
            now,
            wall: now.saturating_add_signed(clock::wall_offset()),
            exited,
            socket: service::control().map(|path| path.display().to_string()),
            dropped: self.profiler.drops.total(),
            gaps: Some(status.gaps()),
            communicators: live::communicators(&status.tracker, kept),
            interfaces,
            connections,
        };
        Some(state.text())
    }

    fn comm_begins(&mut self, comm: &CommInfo, when: u64) {
        self.summary.comm(comm);
        if let Some(status) = &mut self.status {
            status.tracker.comm(comm);
        }
        if let Some(trace) = &mut self.trace {
            trace.comm(comm, when);
        }
    }

    fn apply(&mut self, record: &Record) {
        if let Some(comm) = self.learn(record) {
            self.comm_begins(&comm, record.when);
        }
        if let Body::NetTowline(part) = record.body
            && !self.summary.links.knows(part.link, part.send)
        {
            self.learn_links(part.link, part.send, record.when);
        }
        self.summary.apply(record);
        if let Some(status) = &mut self.status {
            status.tracker.apply(record);
        }
        if let Some(trace) = &mut self.trace {
            trace.apply(record);
            if trace.file().pending() > FLUSH_BYTES {
                self.flush();
            }
        }
    }

    /// Up to v3 only the descriptors of collectives name the communicator.
    fn learn(&mut self, record: &Record) -> Option<CommInfo> {
        let (id, name) = match record.body {
            Body::Coll(coll) => (coll.comm_id, coll.comm_name),
            Body::P2p(p2p) => (p2p.comm_id, p2p.comm_name),
            _ => return None,
        };
        if id == 0 || record.context == 0 || !self.learned.insert(record.context) {
            return None;
        }
        let known = &self.summary.comms.get(&record.context)?.info;
        Some(CommInfo { id, name: name.text().to_owned(), rank: record.rank, ..known.clone() })
    }

    /// At the first event of a connection, learns its interfaces and the host at its other end, unless it is gone by
    /// now. All connections are learned at once, since a job's first events come from many.
    fn learn_links(&mut self, link: u64, send: bool, when: u64) {
        for connection in (self.profiler.connections)() {
            let (link, send) = (connection.number, connection.send);
            if self.summary.links.knows(link, send) {
                continue;
            }
            let names: Vec<Name> = connection.interfaces.iter().map(|name| name.as_str().into()).collect();
            if let Some(trace) = &mut self.trace {
                trace.interfaces(link, send, &names, when);
            }
            let host = connection.peer.rsplit_once(':').map_or("unknown", |(host, _)| host);
            self.summary.links.learn(link, send, names, host);
        }
        if !self.summary.links.knows(link, send) {
            self.summary.links.learn(link, send, Vec::new(), "unknown");
        }
    }

    /// Nothing comes any more that is older than `cut`, in ticks.
    fn advance(&mut self, cut: u64) {
        // Ended communicators whose last records have been applied.
        let (over, ending) = self.ending.iter().partition(|(_, when)| *when <= cut);
        self.ending = ending;
        let over: Vec<(u64, u64)> = over;
        let cut = self.timeline.nanoseconds(cut);
        let dropped = self.profiler.drops.total();
        self.summary.dropped = dropped;
        self.summary.advance(cut);
        if let Some(trace) = &mut self.trace {
            trace.advance(cut);
            if dropped != self.drops_told {
                // Events that found no room are younger than what was waiting in the ring.
                trace.drops(clock::now(), dropped);
            }
        }
        self.drops_told = dropped;
        if let Some(status) = &mut self.status {
            status.note_drops(self.profiler.drops.by_meaning());
        }
        for (context, when) in over {
            let when = self.timeline.nanoseconds(when);
            self.summary.comm_ends(context, when);
            if let Some(status) = &mut self.status {
                status.tracker.comm_ends(context, when);
            }
            self.learned.remove(&context);
            if let Some(trace) = &mut self.trace {
                trace.comm_ends(context, when);
            }
        }
    }

    fn follow_chain(&mut self) {
        let mask = self.profiler.wanted();
        if mask != self.mask_told {
            self.mask_told = mask;
            self.profiler.renew_mask();
        }
    }

    fn tables(&self) -> String {
        summary::render(&self.summary, &format!("{} process {}", host(), std::process::id()))
    }

    fn flush(&mut self) {
        let Some(trace) = &mut self.trace else { return };
        if let Err(error) = trace.file().flush()
            && !std::mem::replace(&mut self.complained, true)
        {
            say(Level::Warn, &format!("the trace ends here: {error}"));
        }
    }

    /// The figures for Prometheus.
    fn metrics(&self, up: bool) -> String {
        let now = clock::now();
        let oldest_open = self.status.as_ref().map(|status| {
            let mut groups: BTreeMap<String, f64> = BTreeMap::new();
            for (context, comm) in status.tracker.comms().iter().filter(|(_, comm)| comm.ended.is_none()) {
                let Some(known) = self.summary.comms.get(context) else { continue };
                let oldest = comm.oldest_open().map_or(0, |entered| now.saturating_sub(entered));
                let group = groups.entry(known.group.clone()).or_default();
                *group = group.max(oldest as f64 / 1e9);
            }
            groups
        });
        metrics::render(&metrics::Figures {
            labels: &self.labels,
            summary: &self.summary,
            oldest_open: oldest_open.as_ref(),
            peers: self.profiler.settings.peers,
            up,
        })
    }

    fn write_metrics(&mut self, up: bool) {
        let Some(path) = &self.metrics_path else { return };
        if let Err(error) = metrics::replace(path, &self.metrics(up))
            && !std::mem::replace(&mut self.complained, true)
        {
            let path = path.display();
            say(Level::Warn, &format!("metrics cannot be written to {path}: {error}"));
        }
    }

    /// Writes out all events that NCCL has reported.
    fn finish(&mut self) {
        // The records of calls that returned before this one are in the ring already. A second round takes what a
        // producer was writing during the first.
        self.round();
        self.round();
        if let Some(trace) = &mut self.trace {
            trace.settle(clock::now());
        }
        self.flush();
        self.write_metrics(true);
        if let Some(path) = &mut self.summary_path
            && !std::mem::replace(&mut self.claimed, true)
        {
            *path = claim(path, |_| false).0;
        }
        if let Some(path) = &self.summary_path {
            if let Err(error) = std::fs::write(path, self.tables()) {
                let path = path.display();
                say(Level::Warn, &format!("the summary cannot be written to {path}: {error}"));
            } else {
                say(Level::Info, &format!("Towline's summary is in {}", path.display()));
            }
        }
        let drops = &self.profiler.drops;
        // If the user did not request figures, `towline why` reports it.
        if drops.total() > 0 && self.profiler.settings.is_asked_for() {
            say(
                Level::Warn,
                &format!(
                    "{} profiler events were dropped for want of room ({} states, {} stops among them); \
                     TOWLINE_PROFILE_BUFFER makes more",
                    drops.total(),
                    drops.states.load(Ordering::Relaxed),
                    drops.stops.load(Ordering::Relaxed)
                ),
            );
        }
        let declined = self.profiler.chain.as_ref().map_or(0, Chain::declined);
        if declined > 0 {
            say(
                Level::Warn,
                &format!(
                    "{declined} events were kept from the chained profiler: too many of its events were open at once"
                ),
            );
        }
        if let Some(trace) = &mut self.trace {
            let lost = trace.file().lost();
            // A failure to write was already reported.
            if lost > 0 && !self.complained {
                let what = format!(
                    "the trace is at its limit, {lost} packets are not in it (TOWLINE_PROFILE_LIMIT, ulimit -f)"
                );
                say(Level::Warn, &what);
            }
        }
    }
}

impl Status {
    /// The number of events that have found no room by now.
    fn note_drops(&mut self, drops: [u64; 3]) {
        for ((now, before), gap) in drops.into_iter().zip(&mut self.drops).zip(&mut self.gaps) {
            if std::mem::replace(before, now) != now {
                *gap = Some(clock::now());
            }
        }
    }

    fn gaps(&self) -> GapState {
        let [calls, ends, waits] = self.gaps;
        GapState { calls, ends, waits }
    }
}

/// A number that no other process draws; 0 where there is no randomness.
fn random() -> u64 {
    let mut bytes = [0; 8];
    let _ = getrandom::fill(&mut bytes);
    u64::from_ne_bytes(bytes)
}

/// This process, for the trace.
fn process_info(rank: Option<i32>) -> ProcessInfo {
    let (boot, pid) = (place::boot(), std::process::id() as i32);
    ProcessInfo { host: host(), boot, pid, rank, wall_offset: clock::wall_offset() }
}
