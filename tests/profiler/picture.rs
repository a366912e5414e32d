//! What Perfetto draws: the tree of tracks, the arrows from the call to its operations, and the rails' counters.

use std::collections::{HashMap, HashSet};

use towline::trace::perfetto::file::Packets;
use towline::trace::perfetto::proto::{COUNTER, SLICE_BEGIN};

use super::check;
use super::setups;

/// A collective without operations for so long is drawn without those that come later (a busy machine's progress
/// thread).
const LATE_NS: u64 = 20_000_000;

/// A slice as it is drawn.
#[derive(Debug, Clone)]
struct Slice {
    track: u64,
    category: String,
    begin: u64,
    flows: Vec<u64>,
}

/// A trace as Perfetto sees it, read without Towline's own reader.
#[derive(Default)]
struct Picture {
    /// Name and parent.
    tracks: HashMap<u64, (String, u64)>,
    slices: Vec<Slice>,
    /// Time and value, by track.
    counters: HashMap<u64, Vec<(u64, i64)>>,
}

impl Picture {
    fn of(version: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        super::run(&format!("devices:{version}"), dir.path(), &[]);
        let trace = &check::traces(dir.path())[0];
        assert_eq!(check::load(trace).processes[0].dropped, 0, "events were dropped");
        let bytes = std::fs::read(trace).unwrap();
        let (mut picture, mut categories) = (Self::default(), HashMap::new());
        for packet in Packets::new(&bytes) {
            for entry in packet.interned_data.iter().flat_map(|data| &data.event_categories) {
                categories.insert(entry.iid.unwrap(), entry.text.clone().unwrap());
            }
            if let Some(track) = packet.track_descriptor {
                let name = track.name.or(track.process.and_then(|process| process.process_name)).unwrap();
                picture.tracks.insert(track.uuid.unwrap(), (name, track.parent_uuid.unwrap_or(0)));
            }
            let (Some(event), Some(when)) = (packet.track_event, packet.timestamp) else { continue };
            let track = event.track_uuid.unwrap();
            assert!(picture.tracks.contains_key(&track), "an event on a track that nobody described");
            match event.kind.unwrap() {
                SLICE_BEGIN => {
                    let category = categories[&event.category_iids[0]].clone();
                    picture.slices.push(Slice { track, category, begin: when, flows: event.flow_ids });
                }
                COUNTER => {
                    picture.counters.entry(track).or_default().push((when, event.counter_value.unwrap()));
                }
                _ => {}
            }
        }
        picture
    }

    /// The names from the track up to below the process's.
    fn way(&self, mut track: u64) -> Vec<&str> {
        let mut names = Vec::new();
        while let Some((name, parent)) = self.tracks.get(&track).filter(|(_, parent)| *parent != 0) {
            names.push(name.as_str());
            track = *parent;
        }
        assert!(self.tracks[&track].0.contains(':'), "the uppermost is the process: {}", self.tracks[&track].0);
        names.reverse();
        names
    }

    fn of_category<'a>(&'a self, category: &'a str) -> impl Iterator<Item = &'a Slice> {
        self.slices.iter().filter(move |slice| slice.category == category)
    }
}

#[test]
fn every_event_lies_on_the_track_where_it_belongs() {
    let picture = Picture::of(7);
    let expected: [(&str, &[&str]); 9] = [
        ("GroupApi", &["rank", "calls"]),
        ("CollApi", &["rank", "calls"]),
        ("Group", &["rank", "plans"]),
        ("Coll", &["rank", "collectives"]),
        ("KernelCh", &["rank", "channel", "kernel"]),
        ("KernelPhase", &["rank", "channel", "kernel"]),
        ("ProxyOp", &["rank", "channel", "send to|receive from"]),
        ("ProxyStep", &["rank", "channel", "send to|receive from", "steps"]),
        ("NetPlugin", &["rank", "channel", "send to|receive from", "steps", "wire"]),
    ];
    for (category, path) in expected {
        let mut found = HashSet::new();
        for slice in picture.of_category(category) {
            let way = picture.way(slice.track);
            let fits = |(name, words): (&&str, &&str)| words.split('|').any(|word| name.starts_with(word));
            assert!(way.len() == path.len() && way.iter().zip(path).all(fits), "{category} lies on {way:?}");
            found.insert(way.join("/"));
        }
        // Four ranks; below a channel two of them, and what goes either way.
        let ways = if path.len() > 2 { if category.starts_with("Kernel") { 8 } else { 16 } } else { 4 };
        assert_eq!(found.len(), ways, "{category}: {found:?}");
    }
}

#[test]
fn arrows_lead_from_the_call_to_the_collective_and_on_to_each_operation() {
    // Before v5 NCCL tells no calls: the group of the launch takes their place.
    for (version, caller) in [(4, "Group"), (6, "CollApi")] {
        let picture = Picture::of(version);
        let callers: HashMap<u64, &Slice> =
            picture.of_category(caller).flat_map(|slice| slice.flows.iter().map(move |flow| (*flow, slice))).collect();
        let ops: HashMap<u64, &Slice> = picture.of_category("ProxyOp").map(|op| (op.flows[0], op)).collect();
        let collectives: Vec<&Slice> = picture.of_category("Coll").collect();
        assert_eq!(collectives.len() as u64, 4 * setups::COLLECTIVES, "v{version}");
        let (mut called, mut operated) = (HashSet::new(), HashSet::new());
        for collective in collectives {
            let rank = picture.way(collective.track)[0];
            let (first, rest) = collective.flows.split_first().expect("arrows");
            let call = callers.get(first).unwrap_or_else(|| panic!("v{version}: no {caller} has an arrow to it"));
            assert!(called.insert(first), "a call leads to one collective");
            assert!(rest.len() <= 4, "v{version}: two channels, both ways");
            assert!(call.begin <= collective.begin && picture.way(call.track)[0] == rank);
            for arrow in rest {
                let op = ops.get(arrow).expect("an arrow leads to an operation");
                assert!(operated.insert(arrow), "an operation belongs to one collective");
                assert!(op.begin >= collective.begin && picture.way(op.track)[0] == rank);
            }
        }
        // Each collective is over before its rank's next one begins.
        for (_, op) in ops.iter().filter(|(arrow, _)| !operated.contains(arrow)) {
            let rank = picture.way(op.track)[0];
            let own = |coll: &&Slice| coll.begin <= op.begin && picture.way(coll.track)[0] == rank;
            let called = picture.of_category("Coll").filter(own).map(|coll| coll.begin).max().expect("its collective");
            assert!(op.begin >= called + LATE_NS, "v{version}: an operation has no arrow from its collective");
        }
        assert!(!operated.is_empty());
        assert_eq!(ops.len(), picture.of_category("ProxyOp").count());
    }
}

#[test]
fn the_rails_counters_add_up_to_the_bytes_that_were_moved() {
    let picture = Picture::of(6);
    let half = (4 * setups::COLLECTIVES * 2 * setups::SHAPE.steps as u64) as i64 * setups::SHAPE.bytes as i64 / 2;
    for rail in 0..2 {
        for way in ["sent", "received"] {
            let of = |what: &str| -> &[(u64, i64)] {
                let name = format!("unknown interface {rail} {way}: {what}");
                let tracks: Vec<_> = picture.tracks.iter().filter(|(_, (track, _))| *track == name).collect();
                assert_eq!(tracks.len(), 1, "{name}");
                assert_eq!(picture.way(*tracks[0].0), [name.as_str()], "right under the process");
                &picture.counters[tracks[0].0]
            };
            let flight = of("bytes in flight");
            assert!(flight.iter().all(|(_, value)| *value >= 0));
            assert!(flight.iter().any(|(_, value)| *value > 0));
            assert_eq!(flight.last().unwrap().1, 0, "nothing is left in flight");
            // A value holds until the next one: the area under the curve is what was moved.
            let throughput = of("throughput");
            let held = throughput.windows(2).map(|pair| i128::from(pair[0].1) * i128::from(pair[1].0 - pair[0].0));
            assert_eq!(throughput.last().unwrap().1, 0);
            let moved = held.sum::<i128>() / 1_000_000_000;
            assert_eq!(moved, i128::from(half), "rail {rail} {way}");
        }
    }
}
