//! What must hold of any trace: packets whole, slices nested, every event ended, every parent of the right kind.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use towline::trace::event::{Body, Kind, Record};
use towline::trace::perfetto::file::Packets;
use towline::trace::perfetto::proto::{SLICE_BEGIN, SLICE_END};
use towline::trace::perfetto::read::{Contents, Process, read};

/// What the one process of a scenario has left in its file of metrics.
pub(crate) fn metrics(dir: &Path) -> String {
    let mut files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(|path| path.extension().is_some_and(|extension| extension == "prom")).expect("metrics");
    std::fs::read_to_string(file).unwrap()
}

/// The trace files in a directory.
pub(crate) fn traces(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "pftrace"))
        .collect();
    files.sort();
    files
}

/// Reads a file and checks what any tool may take for granted.
pub(crate) fn load(path: &Path) -> Contents {
    let bytes = std::fs::read(path).unwrap();
    nesting(&bytes);
    let contents = read(&bytes);
    assert_eq!(contents.cut, 0, "{} is cut", path.display());
    contents
}

/// On every track slices nest: each end has a begin before it, and inner ones end before outer ones.
pub(crate) fn nesting(bytes: &[u8]) {
    let mut tracks: HashMap<u64, Vec<(u64, i32)>> = HashMap::new();
    for packet in Packets::new(bytes) {
        let (Some(event), Some(when)) = (packet.track_event, packet.timestamp) else { continue };
        let kind = event.kind.unwrap();
        if kind == SLICE_BEGIN || kind == SLICE_END {
            tracks.entry(event.track_uuid.unwrap()).or_default().push((when, kind));
        }
    }
    for (track, events) in tracks {
        let mut depth = 0i32;
        assert!(events.is_sorted_by_key(|(when, _)| *when), "track {track:x} goes back in time");
        for (_, kind) in events {
            depth += if kind == SLICE_BEGIN { 1 } else { -1 };
            assert!(depth >= 0, "an end without a begin on track {track:x}");
        }
    }
}

/// The starts of one kind.
pub(crate) fn starts(process: &Process, kind: Kind) -> Vec<Record> {
    process.records.iter().filter(|record| record.body.kind() == Some(kind)).copied().collect()
}

/// Every parent that is named exists, is of the right kind and began before; every event has exactly one stop.
pub(crate) fn family(process: &Process) {
    let starts: HashMap<u64, &Record> = process
        .records
        .iter()
        .filter(|record| record.body.kind().is_some())
        .map(|record| (record.id, record))
        .collect();
    let mut stops: HashMap<u64, u32> = HashMap::new();
    for record in &process.records {
        if record.body == Body::Stop {
            *stops.entry(record.id).or_default() += 1;
            let start = starts.get(&record.id).expect("a stop of something that was started");
            assert!(start.when <= record.when);
        }
    }
    for record in starts.values() {
        let kind = record.body.kind().unwrap();
        assert_eq!(stops.get(&record.id), Some(&1), "{kind:?} {} is stopped once", record.id);
        if record.parent == 0 {
            assert!(
                !matches!(kind, Kind::ProxyStep | Kind::NetPlugin | Kind::KernelCh | Kind::KernelPhase),
                "{kind:?} without a parent"
            );
            continue;
        }
        let parent = starts.get(&record.parent).unwrap_or_else(|| panic!("{kind:?}: no parent {}", record.parent));
        assert!(parent.when <= record.when, "{kind:?} began before its parent");
        let right = match kind {
            Kind::CollApi | Kind::P2pApi | Kind::KernelLaunch => &[Kind::GroupApi][..],
            Kind::Coll | Kind::P2p => &[Kind::CollApi, Kind::P2pApi, Kind::Group],
            Kind::CeColl => &[Kind::CollApi],
            Kind::CeSync | Kind::CeBatch => &[Kind::CeColl],
            Kind::ProxyOp | Kind::KernelCh => &[Kind::Coll, Kind::P2p],
            Kind::KernelPhase => &[Kind::KernelCh],
            Kind::ProxyStep => &[Kind::ProxyOp],
            Kind::NetPlugin => &[Kind::ProxyStep],
            Kind::Group | Kind::GroupApi | Kind::ProxyCtrl => &[],
        };
        assert!(right.contains(&parent.body.kind().unwrap()), "{kind:?} under {:?}", parent.body.kind());
    }
}

/// Every step that moved bytes has network events for exactly its bytes.
pub(crate) fn bytes_add_up(process: &Process) -> u64 {
    let mut below: HashMap<u64, u64> = HashMap::new();
    for record in starts(process, Kind::NetPlugin) {
        let length = match record.body {
            Body::NetTowline(part) => part.length,
            Body::NetSocket { length, .. } => length,
            _ => 0,
        };
        *below.entry(record.parent).or_default() += length;
    }
    let mut sizes: HashMap<u64, u64> = HashMap::new();
    for record in &process.records {
        if let Body::State { arg, .. } = record.body {
            let size = sizes.entry(record.id).or_default();
            *size = (*size).max(arg);
        }
    }
    let mut all = 0;
    for step in starts(process, Kind::ProxyStep) {
        let size = sizes[&step.id];
        assert_eq!(below.get(&step.id), Some(&size), "step {}", step.id);
        all += size;
    }
    all
}

/// The labels of the one process in a text of metrics.
pub(crate) fn process(text: &str) -> String {
    let (_, labels) = text.split_once("towline_process_up{").expect("metrics");
    labels.split_once(",version=").expect("its version").0.to_owned()
}
