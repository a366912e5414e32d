//! Turns a trace file back into records, which `towline trace report` summarises and `towline trace merge` aligns.
//!
//! Reads Towline's own files, merged ones too: each process has a packet sequence of its own. A file that was cut off
//! is read up to the cut.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::super::event::{Body, CommInfo, Kind, NetTimes, Record, state};
use super::super::names::Name;
use super::super::rail::Links;
use super::category;
use super::emit::{BEGAN_BEFORE, DROPS, GOES_ON, ProcessInfo, TURNS};
use super::fields::{self, Fields, Value};
use super::file::Packets;
use super::proto::{COUNTER, DebugAnnotation, INSTANT, Interned, InternedData, SLICE_BEGIN, SLICE_END, TracePacket};

/// The data that one process wrote.
#[derive(Debug, Default)]
pub struct Process {
    /// Which process it was; None in a file that is not Towline's or has lost its beginning.
    pub info: Option<ProcessInfo>,
    /// The known facts about its connections.
    pub links: Links,
    /// Its communicators; `context` is the running number that the records carry.
    pub comms: Vec<CommInfo>,
    /// Its records, in order of time.
    pub records: Vec<Record>,
    /// Its ends of the arrows between processes.
    pub arrows: Vec<Arrow>,
    /// How many events the file reports as dropped.
    pub dropped: u64,
    /// When that number last grew.
    pub dropped_at: Option<u64>,
    /// Its last heartbeat; None in a file of a release that had none.
    pub heartbeat: Option<u64>,
    /// Communicators that it has left, by their running numbers, and when.
    pub ended: Vec<(u64, u64)>,
    /// Events that were open when their communicator was aborted.
    pub aborted: HashSet<u64>,
    /// The file is at its limit, or the disk was full: nothing after this time is in it.
    pub cut: Option<u64>,
    /// The file before is missing.
    pub begins_late: bool,
    /// Older files were removed because the disk was full.
    pub made_room: bool,
    /// Events that were open when it ended.
    pub halves: HashSet<u64>,
    /// How many files went before this one.
    pub turns: u64,
    /// The process's track, which no other process has.
    pub track: u64,
    /// Repeated records of the previous file: their events were open when this file began.
    pub again: Vec<Record>,
}

impl Process {
    /// Adds the next file of the same process; returns `next` if it is of another one.
    pub(crate) fn join(&mut self, next: Self) -> Option<Self> {
        if self.info.is_none() || self.track != next.track || self.turns + 1 != next.turns {
            return Some(next);
        }
        // How much a step moves is known at its end.
        let mut amounts: HashMap<(u64, u8), u64> = HashMap::new();
        for record in &next.again {
            if let Body::State { state, arg, .. } = record.body
                && arg > 0
            {
                amounts.insert((record.id, state), arg);
            }
        }
        for record in &mut self.records {
            if let Body::State { state, arg, .. } = &mut record.body
                && let Some(&amount) = amounts.get(&(record.id, *state))
            {
                *arg = amount;
            }
        }
        self.records.extend(next.records);
        self.records.sort_by_key(|record| record.when);
        self.arrows.extend(next.arrows);
        self.links.join(next.links);
        self.comms.retain(|known| next.comms.iter().all(|comm| comm.context != known.context));
        self.comms.extend(next.comms);
        self.ended.extend(next.ended);
        self.aborted.extend(next.aborted);
        if next.dropped != self.dropped {
            (self.dropped, self.dropped_at) = (next.dropped, next.dropped_at);
        }
        self.heartbeat = next.heartbeat.or(self.heartbeat);
        (self.cut, self.turns) = (next.cut, next.turns);
        self.made_room |= next.made_room;
        None
    }

    /// Of a file without the one before it: takes what this one repeats of that one.
    pub(crate) fn stand_alone(&mut self) {
        self.begins_late = self.turns > 0;
        let again = std::mem::take(&mut self.again);
        self.halves = again.iter().map(|record| record.id).collect();
        self.records.extend(again);
        self.records.sort_by_key(|record| record.when);
    }
}

/// One end of an arrow between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrow {
    /// The same at both ends.
    pub id: u64,
    /// Sender: a time at which the data had surely not left. Receiver: a time at which it surely had arrived.
    pub when: u64,
    /// Whether this is the sender's end.
    pub leaves: bool,
}

/// The content of one file.
#[derive(Debug, Default)]
pub struct Contents {
    /// By packet sequence, in order of appearance.
    pub processes: Vec<Process>,
    /// Bytes at the end that were cut off.
    pub cut: usize,
}

/// Reads a whole file.
pub fn read(bytes: &[u8]) -> Contents {
    read_telling(bytes, |_| {})
}

/// The same, and reports after each packet how many bytes are done.
pub(crate) fn read_telling(bytes: &[u8], mut tell: impl FnMut(usize)) -> Contents {
    let mut sequences: Vec<(u32, Reader)> = Vec::new();
    let mut packets = Packets::new(bytes);
    while let Some(packet) = packets.next() {
        tell(bytes.len() - packets.left());
        let number = packet.trusted_packet_sequence_id.unwrap_or(0);
        let reader = match sequences.iter_mut().position(|(known, _)| *known == number) {
            Some(index) => &mut sequences[index].1,
            None => {
                sequences.push((number, Reader::default()));
                &mut sequences.last_mut().expect("just pushed").1
            }
        };
        reader.packet(&packet);
    }
    let processes = sequences.into_iter().map(|(_, reader)| reader.finish()).collect();
    Contents { processes, cut: packets.rest() }
}

#[derive(Default)]
struct Tables {
    names: HashMap<u64, String>,
    categories: HashMap<u64, String>,
    keys: HashMap<u64, Name>,
    words: HashMap<u64, String>,
}

impl Tables {
    fn learn(&mut self, data: &InternedData) {
        let strings = |table: &mut HashMap<u64, String>, list: &[Interned]| {
            table.extend(list.iter().map(|entry| (entry.iid.unwrap_or(0), entry.text.clone().unwrap_or_default())));
        };
        strings(&mut self.names, &data.event_names);
        strings(&mut self.categories, &data.event_categories);
        strings(&mut self.words, &data.debug_annotation_string_values);
        self.keys.extend(
            data.debug_annotation_names
                .iter()
                .map(|entry| (entry.iid.unwrap_or(0), Name::from(entry.text.as_deref().unwrap_or("")))),
        );
    }

    fn fields(&self, annotations: &[DebugAnnotation]) -> Fields {
        Fields(annotations.iter().filter_map(|annotation| self.field(annotation)).collect())
    }

    fn field(&self, a: &DebugAnnotation) -> Option<(Name, Value)> {
        let name = *self.keys.get(&a.name_iid?)?;
        let word = |text: &str| match text.parse::<IpAddr>() {
            Ok(IpAddr::V4(ip)) => Value::Address(ip.to_ipv6_mapped()),
            Ok(IpAddr::V6(ip)) => Value::Address(ip),
            Err(_) => Value::Text(text.into()),
        };
        let value = if let Some(number) = a.uint_value {
            Value::Uint(number)
        } else if let Some(number) = a.int_value {
            Value::Int(number)
        } else if let Some(truth) = a.bool_value {
            Value::Bool(truth)
        } else if let Some(address) = a.pointer_value {
            Value::Pointer(address)
        } else if let Some(iid) = a.string_value_iid {
            Value::Text(self.words.get(&iid)?.as_str().into())
        } else {
            word(a.string_value.as_deref()?)
        };
        Some((name, value))
    }
}

enum Slice {
    Event { id: u64, kind: Kind, begin: u64, amount_at: Option<usize> },
    Phase { begin: u64 },
    Other,
}

#[derive(Default)]
struct Reader {
    tables: Tables,
    process: Process,
    stacks: HashMap<u64, Vec<Slice>>,
    drops_track: Option<u64>,
    /// A step's last phase began then, per track.
    phases: HashMap<u64, u64>,
    /// By open step: its data had not left before then, and is not known to have left later.
    held: HashMap<u64, u64>,
    /// Which records repeat those of the file before, by their places.
    again: HashSet<usize>,
}

impl Reader {
    fn packet(&mut self, packet: &TracePacket) {
        if let Some(data) = &packet.interned_data {
            self.tables.learn(data);
        }
        if let Some(track) = &packet.track_descriptor
            && track.counter.is_some()
            && track.name.as_deref() == Some(DROPS)
        {
            self.drops_track = track.uuid;
        }
        let (Some(event), Some(when)) = (&packet.track_event, packet.timestamp) else { return };
        let track = event.track_uuid.unwrap_or(0);
        let category = event.category_iids.first().and_then(|iid| self.tables.categories.get(iid)).cloned();
        let name = match (&event.name, event.name_iid.and_then(|iid| self.tables.names.get(&iid))) {
            (Some(name), _) => name.clone(),
            (None, Some(name)) => name.clone(),
            (None, None) => String::new(),
        };
        let fields = self.tables.fields(&event.debug_annotations);
        match event.kind.unwrap_or(0) {
            SLICE_BEGIN => self.begin(track, when, category.as_deref(), &name, &fields, &event.flow_ids),
            SLICE_END => self.end(track, when, &fields, &event.flow_ids),
            INSTANT => self.instant(track, when, category.as_deref(), &fields),
            COUNTER if self.drops_track == Some(track) => {
                let dropped = event.counter_value.unwrap_or(0) as u64;
                if std::mem::replace(&mut self.process.dropped, dropped) != dropped {
                    self.process.dropped_at = Some(when);
                }
            }
            _ => {}
        }
    }

    fn push(&mut self, when: u64, id: u64, body: Body) {
        self.process.records.push(Record { when, id, parent: 0, context: 0, rank: -1, thread: 0, body });
    }

    fn begin(&mut self, track: u64, when: u64, category: Option<&str>, name: &str, fields: &Fields, flows: &[u64]) {
        // An event of the previous file continues.
        let is_again = fields.has(BEGAN_BEFORE);
        let when = when.saturating_sub(fields.uint(BEGAN_BEFORE));
        if is_again {
            self.again.insert(self.process.records.len());
        }
        let stack = self.stacks.entry(track).or_default();
        if category == Some(category::PHASE) {
            let before = self.phases.insert(track, when);
            let (Some(Slice::Event { id, begin, amount_at, .. }), Some(state)) =
                (stack.last_mut(), state::from_label(name))
            else {
                self.again.remove(&self.process.records.len());
                return stack.push(Slice::Other);
            };
            let (id, begin) = (*id, *begin);
            if matches!(state, state::STEP_SEND_WAIT | state::STEP_RECV_FLUSH_WAIT) {
                *amount_at = Some(self.process.records.len());
            }
            stack.push(Slice::Phase { begin: when });
            self.push(when, id, Body::State { state, steps: 0, arg: 0 });
            let leaves = state == state::STEP_SEND_WAIT;
            // SendWait is recorded when isend has returned, so the data may have left before; not before the phase
            // that ended with it, though.
            let when = if leaves { before.filter(|&before| before >= begin).unwrap_or(begin) } else { when };
            self.held.insert(id, when);
            self.process.arrows.extend(flows.iter().map(|&id| Arrow { id, when, leaves }));
            return;
        }
        let Some(kind) = category.and_then(Kind::from_label) else {
            self.again.remove(&self.process.records.len());
            return stack.push(Slice::Other);
        };
        let id = fields.uint("id");
        stack.push(Slice::Event { id, kind, begin: when, amount_at: None });
        match kind {
            Kind::ProxyStep => {
                self.held.insert(id, when);
            }
            Kind::NetPlugin => {
                // A part's start is reported in NCCL's thread's next call, often after it has left. Its step is more
                // accurate.
                let held = self.held.get(&fields.uint("parent"));
                self.process.arrows.extend(
                    held.into_iter().flat_map(|&when| flows.iter().map(move |&id| Arrow { id, when, leaves: true })),
                );
            }
            _ => {}
        }
        self.process.records.push(Record {
            when,
            id,
            parent: fields.uint("parent"),
            context: fields.uint("comm"),
            rank: -1,
            thread: 0,
            body: fields::body(kind, fields),
        });
        let stop = match kind {
            Kind::KernelCh => state::KERNEL_STOP,
            Kind::KernelPhase => state::KERNEL_PHASE_STOP,
            _ => return,
        };
        self.push(when, id, Body::State { state: stop, steps: 0, arg: fields.uint("gpu stop") });
    }

    fn end(&mut self, track: u64, when: u64, fields: &Fields, flows: &[u64]) {
        let Some(slice) = self.stacks.get_mut(&track).and_then(Vec::pop) else { return };
        if fields.bool(GOES_ON) {
            return;
        }
        let Slice::Event { id, kind, begin, amount_at } = slice else {
            if let Slice::Phase { begin } = slice {
                self.phases.insert(track, begin);
            }
            return;
        };
        let mut stop = Some(when);
        if fields.bool("aborted") || fields.bool("never stopped") || fields.uint("children left open") > 0 {
            self.process.aborted.insert(id);
        }
        match kind {
            Kind::ProxyStep => {
                let bytes = fields.uint("bytes");
                if let Some(Body::State { arg, .. }) =
                    amount_at.and_then(|at| self.process.records.get_mut(at)).map(|record| &mut record.body)
                {
                    *arg = bytes;
                }
                self.phases.remove(&track);
                self.held.remove(&id);
            }
            Kind::ProxyOp if fields.uint("bytes") > 0 => {
                let arg = fields.uint("bytes");
                self.push(when, id, Body::State { state: state::OP_SEND_DONE, steps: 0, arg });
            }
            Kind::NetPlugin => {
                self.process.arrows.extend(flows.iter().map(|&id| Arrow { id, when, leaves: false }));
                let times = NetTimes {
                    retransmissions: fields.uint("retransmissions") as u32,
                    reconnects: fields.uint("reconnects") as u16,
                    wait_receiver_ns: fields.uint("waited for receiver ns"),
                    wait_socket_ns: fields.uint("waited for socket ns"),
                    wait_credit_ns: fields.uint("waited for credit ns"),
                    wire_ns: fields.uint("on the wire ns"),
                    ..NetTimes::default()
                };
                if times != NetTimes::default() {
                    self.push(when, id, Body::NetTimes(times));
                }
            }
            Kind::Coll | Kind::P2p | Kind::CeColl => {
                stop = (!fields.bool("never stopped")).then(|| begin + fields.uint("enqueued ns"));
            }
            _ => {}
        }
        if let Some(stop) = stop {
            self.push(stop, id, Body::Stop);
        }
    }

    fn instant(&mut self, track: u64, when: u64, category: Option<&str>, fields: &Fields) {
        match category {
            Some(category::HEARTBEAT) => self.process.heartbeat = Some(when),
            Some(category::CUT) => self.process.cut = Some(when),
            Some(category::MADE_ROOM) => self.process.made_room = true,
            Some(category::INTERFACE) => {
                let (link, send) = (fields.uint("link"), fields.bool("send"));
                self.process.links.add(link, send, fields.text("interface"));
            }
            Some(category::COMM) if fields.bool("ended") => {
                self.process.ended.push((fields.uint("comm"), when));
            }
            Some(category::PROCESS) => {
                (self.process.track, self.process.turns) = (track, fields.uint(TURNS));
                self.process.info = Some(ProcessInfo {
                    host: fields.text("host").text().to_owned(),
                    boot: fields.uint("boot"),
                    pid: fields.int("pid"),
                    rank: fields.has("rank").then(|| fields.int("rank")),
                    wall_offset: fields.uint(super::WALL_OFFSET) as i64,
                });
            }
            Some(category::COMM) => {
                let comm = CommInfo {
                    context: fields.uint("comm"),
                    id: fields.uint("comm id"),
                    name: fields.text("name").text().to_owned(),
                    rank: fields.int("rank"),
                    ranks: fields.int("ranks"),
                    nodes: fields.int("nodes"),
                    gpu: fields.text("gpu").text().to_owned(),
                };
                self.process.comms.retain(|known| known.context != comm.context);
                self.process.comms.push(comm);
            }
            _ => {}
        }
    }

    fn finish(mut self) -> Process {
        let again = self.again;
        let records = std::mem::take(&mut self.process.records).into_iter().enumerate();
        let (repeated, records) = records.partition::<Vec<_>, _>(|(place, _)| again.contains(place));
        self.process.again = repeated.into_iter().map(|(_, record)| record).collect();
        self.process.records = records.into_iter().map(|(_, record)| record).collect();
        // Calls are written when they are complete, after their children.
        self.process.records.sort_by_key(|record| record.when);
        self.process
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::event::{NetPart, ProxyOp};
    use super::super::super::key;
    use super::super::Emitter;
    use super::super::file::TraceFile;
    use super::*;

    const COMM: u64 = 1;
    const OP: u64 = 2;
    const STEP: u64 = 3;
    const NET: u64 = 4;

    /// What is read of these records of one communicator's proxy operation that sends.
    fn read_back(records: &[(u64, u64, u64, Body)]) -> Process {
        let dir = tempfile::tempdir().unwrap();
        let file = TraceFile::create(dir.path(), "t", u64::MAX).unwrap();
        let path = file.path().to_owned();
        let mut emitter = Emitter::new(file, &ProcessInfo::default(), 7, 0);
        emitter.comm(&CommInfo { context: COMM, ranks: 2, ..CommInfo::default() }, 0);
        let operation = Body::ProxyOp(ProxyOp { peer: 1, send: true, ..ProxyOp::default() });
        for &(when, id, parent, body) in [(10, OP, 0, operation)].iter().chain(records) {
            emitter.apply(&Record { when, id, parent, context: COMM, rank: 0, thread: 0, body });
        }
        emitter.comm_ends(COMM, 10_000);
        emitter.file().flush().unwrap();
        read(&std::fs::read(path).unwrap()).processes.remove(0)
    }

    fn phase(state: u8) -> Body {
        Body::State { state, steps: 0, arg: 5 }
    }

    fn part() -> Body {
        Body::NetTowline(NetPart { link: 9, message: 1, length: 5, send: true, ..NetPart::default() })
    }

    #[test]
    fn a_start_that_is_told_late_does_not_say_when_its_bytes_left() {
        // NCCL calls isend after 200; a worker sends at once; the start is reported in the `test` at 900.
        let told_in = |test: bool| {
            let mut records = vec![
                (100, STEP, OP, Body::ProxyStep { step: 0 }),
                (110, STEP, 0, phase(state::STEP_SEND_GPU_WAIT)),
                (200, STEP, 0, phase(state::STEP_SEND_PEER_WAIT)),
                (300, STEP, 0, phase(state::STEP_SEND_WAIT)),
                (1000, NET, 0, Body::Stop),
                (1010, STEP, 0, Body::Stop),
            ];
            let (at, when) = if test { (4, 900) } else { (3, 250) };
            records.insert(at, (when, NET, STEP, part()));
            let leaves = |arrow: &Arrow| (arrow.leaves, arrow.when);
            read_back(&records).arrows.iter().map(leaves).collect::<Vec<_>>()
        };
        // The step's arrow and the part's: not before the phase in which isend was called, and not surely later.
        assert_eq!(told_in(true), [(true, 200), (true, 200)]);
        assert_eq!(told_in(false), [(true, 200), (true, 200)]);
    }

    #[test]
    fn a_part_that_is_told_when_it_is_over_lies_where_it_was() {
        // It began at 300 and ended at 700; NCCL's thread comes by at 900.
        let times = NetTimes { wire_ns: 400, ago_ns: 200, ends: true, ..NetTimes::default() };
        let Body::NetTowline(part) = part() else { unreachable!("made so") };
        let records = [
            (100, STEP, OP, Body::ProxyStep { step: 0 }),
            (900, NET, STEP, Body::NetTowline(NetPart { ago_ns: 600, ..part })),
            (900, NET, 0, Body::NetTimes(times)),
            (1010, STEP, 0, Body::Stop),
        ];
        let process = read_back(&records);
        let starts: Vec<_> =
            process.records.iter().filter(|record| matches!(record.body, Body::NetTowline(_))).collect();
        let ends = |record: &&Record| record.id == starts[0].id && matches!(record.body, Body::Stop);
        let stops: Vec<_> = process.records.iter().filter(ends).map(|record| record.when).collect();
        assert_eq!((starts.len(), starts[0].when, stops), (1, 300, vec![700]));
        let wire = process.records.iter().find_map(|record| match record.body {
            Body::NetTimes(times) => Some(times.wire_ns),
            _ => None,
        });
        assert_eq!(wire, Some(400));
    }

    /// Read in order of time, such a part belonged to no step.
    #[test]
    fn a_part_that_began_before_its_step_by_the_transports_clock_begins_with_it() {
        let Body::NetTowline(part) = part() else { unreachable!("made so") };
        let records = [
            (300, STEP, OP, Body::ProxyStep { step: 0 }),
            (900, NET, STEP, Body::NetTowline(NetPart { ago_ns: 601, ..part })),
            (1000, NET, 0, Body::Stop),
            (1010, STEP, 0, Body::Stop),
        ];
        let process = read_back(&records);
        let when =
            |is: fn(&Body) -> bool| process.records.iter().position(|record| is(&record.body)).expect("it is there");
        let (step, part) =
            (when(|it| matches!(it, Body::ProxyStep { .. })), when(|it| matches!(it, Body::NetTowline(_))));
        assert!(step < part);
        assert_eq!([step, part].map(|at| process.records[at].when), [300, 300]);
    }

    #[test]
    fn a_part_of_a_step_without_phases_left_after_the_steps_begin() {
        let records = [
            (100, STEP, OP, Body::ProxyStep { step: 0 }),
            (900, NET, STEP, part()),
            (1000, NET, 0, Body::Stop),
            (1010, STEP, 0, Body::Stop),
        ];
        assert_eq!(read_back(&records).arrows.iter().map(|arrow| arrow.when).collect::<Vec<_>>(), [100]);
    }

    /// A trace of at most 1 MiB, in which a step is open all the time while so many operations come and go: its newest
    /// part, and the one before.
    fn long_trace(operations: u64) -> (Process, Option<Process>) {
        let dir = tempfile::tempdir().unwrap();
        let file = TraceFile::create(dir.path(), "t", 1 << 20).unwrap();
        let path = file.path().to_owned();
        let process = ProcessInfo { host: "node4".into(), pid: 7, ..ProcessInfo::default() };
        let mut emitter = Emitter::new(file, &process, 7, 0);
        emitter.comm(&CommInfo { context: COMM, id: 0x77, ranks: 2, ..CommInfo::default() }, 0);
        emitter.interfaces(9, true, &["eth1".into()], 0);
        emitter.drops(1, 3);
        let operation = Body::ProxyOp(ProxyOp { peer: 1, send: true, ..ProxyOp::default() });
        let mut apply = |when, id, parent, body| {
            emitter.apply(&Record { when, id, parent, context: COMM, rank: 0, thread: 0, body });
            if id % 100 == 0 {
                emitter.advance(when);
                emitter.file().flush().unwrap();
            }
        };
        apply(10, OP, 0, operation);
        apply(20, STEP, OP, Body::ProxyStep { step: 0 });
        apply(30, STEP, 0, phase(state::STEP_SEND_WAIT));
        apply(35, NET, STEP, part());
        for number in 1..=operations {
            apply(1000 * number, 1000 + number, 0, operation);
            apply(1000 * number + 500, 1000 + number, 0, Body::Stop);
        }
        apply(1000 * operations + 600, NET, 0, Body::Stop);
        apply(1000 * operations + 700, STEP, 0, Body::Stop);
        emitter.file().flush().unwrap();
        let files: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        let length: u64 = files.iter().map(|file| file.metadata().unwrap().len()).sum();
        assert!(length <= 1 << 20 && files.len() <= 2, "{length} in {files:?}");
        let read = |path: &std::path::Path| read(&std::fs::read(path).unwrap()).processes.remove(0);
        let earlier = path.with_extension("earlier.pftrace");
        (read(&path), earlier.exists().then(|| read(&earlier)))
    }

    fn starts(process: &Process) -> Vec<(u64, u64)> {
        let starts = process.records.iter().filter(|record| record.body.kind().is_some());
        starts.map(|record| (record.when, record.id)).collect()
    }

    #[test]
    fn the_files_of_a_trace_are_read_as_one() {
        const COUNT: u64 = 5000;
        let (newest, earlier) = long_trace(COUNT);
        let mut process = earlier.expect("a second file");
        assert!(process.cut.is_some() && process.turns == 0);
        let stranger = Process { track: 1, turns: 1, info: newest.info.clone(), ..Process::default() };
        assert!(process.join(stranger).is_some(), "another process's");
        process.stand_alone();
        assert!(process.join(newest).is_none());
        let all = [(10, OP), (20, STEP), (35, NET)].into_iter().chain((1..=COUNT).map(|it| (1000 * it, 1000 + it)));
        let all: Vec<_> = all.map(|(when, id)| (when, key::compact(id))).collect();
        assert!(starts(&process) == all, "each event once, and all of them");
        let states: Vec<_> = process.records.iter().filter(|it| matches!(it.body, Body::State { .. })).collect();
        assert_eq!(
            states.iter().map(|it| (it.when, it.body)).collect::<Vec<_>>(),
            [(30, phase(state::STEP_SEND_WAIT))]
        );
        let stops = process.records.iter().filter(|record| record.body == Body::Stop).count() as u64;
        assert_eq!((stops, process.cut, process.dropped, process.begins_late), (COUNT + 2, None, 3, false));
        assert_eq!(process.dropped_at, Some(1), "the files behind the first only repeat the number");
    }

    #[test]
    fn the_newest_part_of_a_trace_is_kept_and_says_what_was_open() {
        const COUNT: u64 = 30_000;
        let (mut newest, earlier) = long_trace(COUNT);
        newest.stand_alone();
        assert_eq!(newest.turns, earlier.expect("a second file").turns + 1);
        assert!(newest.turns > 3 && newest.begins_late && newest.cut.is_none());
        assert!([OP, STEP, NET].iter().all(|&id| newest.halves.contains(&key::compact(id))), "{:?}", newest.halves);
        let starts = starts(&newest);
        assert_eq!(starts[..3], [(10, OP), (20, STEP), (35, NET)].map(|(when, id)| (when, key::compact(id))));
        let kept = starts.len() as u64 - 3;
        assert!(kept > 1000, "{kept}");
        let all: Vec<_> = (COUNT - kept + 1..=COUNT).map(|it| (1000 * it, key::compact(1000 + it))).collect();
        assert!(starts[3..] == all, "the newest ones");
        assert_eq!((newest.comms[0].id, newest.dropped), (0x77, 3));
        let Body::NetTowline(part) = part() else { unreachable!("made so") };
        let rail = newest.links.rail(&Body::NetTowline(part)).expect("a rail").0;
        assert_eq!(rail.name(), "eth1");
    }
}
