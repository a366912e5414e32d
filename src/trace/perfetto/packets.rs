//! Track events, one call each: names and annotation names are written once per file and then by number.

use std::net::Ipv6Addr;

use super::super::hash::QuickMap;
use super::fields::Value;
use super::file::TraceFile;
use super::proto::{
    COUNTER, CounterDescriptor, DebugAnnotation, INCREMENTAL_STATE_CLEARED, INSTANT, Interned, InternedData,
    NEEDS_INCREMENTAL_STATE, ORDER_EXPLICIT, ProcessDescriptor, SLICE_BEGIN, SLICE_END, TracePacket, TrackDescriptor,
    TrackEvent,
};

/// The only packet sequence of a file; `towline trace merge` renumbers.
const SEQUENCE: u32 = 1;

/// More names than this are written in full; NCCL's vocabulary is far smaller.
const NAMES: usize = 4096;

/// Annotations of one event.
pub(super) type Annotations = Vec<(&'static str, Value)>;

#[derive(Default)]
struct Table(QuickMap<String, u64>);

impl Table {
    /// The string's number, and whether it is new. None when the table is full.
    fn number(&mut self, text: &str) -> Option<(u64, bool)> {
        if let Some(&number) = self.0.get(text) {
            return Some((number, false));
        }
        let number = self.0.len() as u64 + 1;
        (self.0.len() < NAMES).then(|| {
            self.0.insert(text.to_owned(), number);
            (number, true)
        })
    }
}

/// Writes track events into a file.
pub(super) struct Packets {
    file: TraceFile,
    names: Table,
    categories: Table,
    keys: Table,
    words: Table,
    begun: bool,
}

impl Packets {
    /// Events go to `file`.
    pub(super) fn new(file: TraceFile) -> Self {
        Self {
            file,
            names: Table::default(),
            categories: Table::default(),
            keys: Table::default(),
            words: Table::default(),
            begun: false,
        }
    }

    /// The file.
    pub(super) fn file(&mut self) -> &mut TraceFile {
        &mut self.file
    }

    /// Goes on in a new file, in which nothing is known yet.
    ///
    /// # Errors
    /// As [`TraceFile::turn`].
    pub(super) fn turn(&mut self) -> std::io::Result<()> {
        self.file.turn()?;
        (self.names, self.categories) = (Table::default(), Table::default());
        (self.keys, self.words) = (Table::default(), Table::default());
        self.begun = false;
        Ok(())
    }

    fn descriptor(&mut self, descriptor: TrackDescriptor) {
        self.append(TracePacket { track_descriptor: Some(descriptor), ..TracePacket::default() });
    }

    /// Describes a process's track.
    pub(super) fn process(&mut self, uuid: u64, pid: i32, name: &str) {
        let process = Some(ProcessDescriptor { pid: Some(pid), process_name: Some(cut(name)) });
        let child_ordering = Some(ORDER_EXPLICIT);
        self.descriptor(TrackDescriptor { uuid: Some(uuid), process, child_ordering, ..TrackDescriptor::default() });
    }

    /// Describes a track for slices.
    pub(super) fn track(&mut self, uuid: u64, parent: u64, name: &str, rank: i32) {
        self.descriptor(TrackDescriptor {
            uuid: Some(uuid),
            parent_uuid: Some(parent),
            name: Some(cut(name)),
            sibling_order_rank: Some(rank),
            child_ordering: Some(ORDER_EXPLICIT),
            ..TrackDescriptor::default()
        });
    }

    /// Describes a track for a counter.
    pub(super) fn counter_track(&mut self, uuid: u64, parent: u64, name: &str, unit: i32, unit_name: Option<&str>) {
        let counter = Some(CounterDescriptor { unit: Some(unit), unit_name: unit_name.map(str::to_owned) });
        self.descriptor(TrackDescriptor {
            uuid: Some(uuid),
            parent_uuid: Some(parent),
            name: Some(cut(name)),
            counter,
            ..TrackDescriptor::default()
        });
    }

    /// A slice begins.
    pub(super) fn begin(
        &mut self,
        track: u64,
        when: u64,
        category: &str,
        name: &str,
        annotations: &Annotations,
        flows: &[u64],
    ) {
        self.event(SLICE_BEGIN, track, when, Some((category, name)), annotations, flows);
    }

    /// The innermost slice of the track ends; `annotations` are added to it.
    pub(super) fn end(&mut self, track: u64, when: u64, annotations: &Annotations, flows: &[u64]) {
        self.event(SLICE_END, track, when, None, annotations, flows);
    }

    /// Something happens that takes no time.
    pub(super) fn instant(&mut self, track: u64, when: u64, category: &str, name: &str, annotations: &Annotations) {
        self.event(INSTANT, track, when, Some((category, name)), annotations, &[]);
    }

    /// A counter's value changes.
    pub(super) fn counter(&mut self, track: u64, when: u64, value: i64) {
        let event = TrackEvent {
            kind: Some(COUNTER),
            track_uuid: Some(track),
            counter_value: Some(value),
            ..TrackEvent::default()
        };
        self.append(TracePacket { timestamp: Some(when), track_event: Some(event), ..TracePacket::default() });
    }

    fn event(
        &mut self,
        kind: i32,
        track: u64,
        when: u64,
        what: Option<(&str, &str)>,
        annotations: &Annotations,
        flows: &[u64],
    ) {
        let mut new = InternedData::default();
        let mut event = TrackEvent {
            kind: Some(kind),
            track_uuid: Some(track),
            flow_ids: flows.to_vec(),
            debug_annotations: Vec::with_capacity(annotations.len()),
            ..TrackEvent::default()
        };
        if let Some((category, name)) = what {
            event.category_iids.extend(intern(&mut self.categories, category, &mut new.event_categories));
            match intern(&mut self.names, name, &mut new.event_names) {
                Some(iid) => event.name_iid = Some(iid),
                None => event.name = Some(cut(name)),
            }
        }
        for (key, value) in annotations {
            let name_iid = intern(&mut self.keys, key, &mut new.debug_annotation_names);
            let mut annotation = DebugAnnotation { name_iid, ..DebugAnnotation::default() };
            match *value {
                Value::Uint(number) => annotation.uint_value = Some(number),
                Value::Int(number) => annotation.int_value = Some(number),
                Value::Bool(truth) => annotation.bool_value = Some(truth),
                Value::Pointer(address) => annotation.pointer_value = Some(address),
                Value::Text(word) => {
                    match intern(&mut self.words, word.text(), &mut new.debug_annotation_string_values) {
                        Some(iid) => annotation.string_value_iid = Some(iid),
                        None => annotation.string_value = Some(cut(word.text())),
                    }
                }
                Value::Address(ip) => annotation.string_value = Some(address_text(ip)),
            }
            event.debug_annotations.push(annotation);
        }
        let interned = (new != InternedData::default()).then_some(new);
        self.append(TracePacket {
            timestamp: Some(when),
            track_event: Some(event),
            interned_data: interned,
            ..TracePacket::default()
        });
    }

    fn append(&mut self, mut packet: TracePacket) {
        packet.trusted_packet_sequence_id = Some(SEQUENCE);
        let first = if self.begun { 0 } else { INCREMENTAL_STATE_CLEARED };
        self.begun = true;
        packet.sequence_flags = Some(NEEDS_INCREMENTAL_STATE | first);
        self.file.append(&packet);
    }
}

fn intern(table: &mut Table, text: &str, new: &mut Vec<Interned>) -> Option<u64> {
    let (number, is_new) = table.number(text)?;
    if is_new {
        new.push(Interned { iid: Some(number), text: Some(cut(text)) });
    }
    Some(number)
}

fn address_text(ip: Ipv6Addr) -> String {
    ip.to_canonical().to_string()
}

/// No packet may outgrow a page, so no text may.
fn cut(text: &str) -> String {
    let end = (0..=text.len().min(200)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text[..end].to_owned()
}
