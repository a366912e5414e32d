//! `towline trace draw`: one collective on all ranks as an SVG, for where no browser with Perfetto is at hand.
//!
//! A lane for the collective, lanes for the proxy's steps, lanes for what each rail carried, rank by rank, on one
//! clock.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use super::Draw;
use super::load::load;
use super::stragglers::Place;
use crate::cli::output::Output;
use crate::os::error::{Error, Result};
use crate::trace::event::{Body, Kind, Record};
use crate::trace::rail::Links;
use crate::trace::summary::{bytes, time};

const WIDTH: f64 = 1180.0;
const LEFT: f64 = 170.0;
const LANE: f64 = 13.0;
const COLOURS: [&str; 6] = ["#4477aa", "#cc6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"];

/// A slice on some lane.
struct Slice {
    from: u64,
    to: u64,
    label: String,
    colour: &'static str,
}

/// A row's group, its place there (the peer, or the length of the interface's name), and its name.
type Row = (u8, i32, String);

/// The rows of one rank, in the order in which they are drawn.
type Rows = BTreeMap<Row, Vec<Slice>>;

/// A rank that is drawn.
struct Rank {
    number: i32,
    place: Place,
    records: Vec<Record>,
    links: Links,
}

pub(super) fn run(args: &Draw, output: &mut Output) -> Result<String> {
    let mut ranks: Vec<Rank> = Vec::new();
    for (process, correction) in load(&args.files, output)?.processes {
        let shift = |mut record: Record| {
            record.when = correction.apply(record.when);
            record
        };
        let info = process.info.unwrap_or_default();
        let comm = process.comms.first().cloned().unwrap_or_default();
        ranks.push(Rank {
            number: comm.rank,
            place: Place { host: info.host, gpu: comm.gpu, global: info.rank },
            records: process.records.into_iter().map(shift).collect(),
            links: process.links,
        });
    }
    ranks.sort_by_key(|rank| rank.number);
    // Unless one is named: the middle one of the largest.
    let counts = |records: &[Record]| -> Vec<(u64, u64)> {
        let calls = records.iter().filter_map(|record| match record.body {
            Body::Coll(coll) => Some((record.id, coll.count)),
            _ => None,
        });
        calls.collect()
    };
    let first = ranks.first().map(|rank| counts(&rank.records)).unwrap_or_default();
    let most = first.iter().map(|(_, count)| *count).max().unwrap_or(0);
    let largest: Vec<usize> = (0..first.len()).filter(|&index| first[index].1 == most).collect();
    let wanted = args.collective.or_else(|| largest.get(largest.len() / 2).copied()).unwrap_or(0);
    let nth = |records: &[Record]| counts(records).get(wanted).map(|(id, _)| *id);
    let mut window = (u64::MAX, 0);
    let mut drawn = Vec::new();
    for rank in &ranks {
        output.progress(|| format!("drawing rank {}", rank.number));
        let Some(call) = nth(&rank.records) else { continue };
        let rows = rows_of(rank, call);
        for slice in rows.values().flatten() {
            window = (window.0.min(slice.from), window.1.max(slice.to));
        }
        drawn.push((rank.place.name(rank.number), rows));
    }
    if drawn.is_empty() {
        return Err(Error::argument(format!("there is no collective number {wanted} in these traces")));
    }
    let picture = svg(&drawn, window);
    std::fs::write(&args.output, picture)
        .map_err(|error| Error::system(format!("writing {}", args.output.display()), &error))?;
    Ok(format!("{}: {} ranks, {}\n", args.output.display(), drawn.len(), time(window.1 - window.0)))
}

/// What belongs to a collective: itself, the steps of its operations, their network events.
fn rows_of(rank: &Rank, call: u64) -> Rows {
    let records = &rank.records;
    let own: Row = (0, 0, "call".into());
    let mut rows = Rows::new();
    let stops: HashMap<u64, u64> =
        records.iter().filter(|record| record.body == Body::Stop).map(|record| (record.id, record.when)).collect();
    // Of the collective, its operations and their steps: the peer, and whether it is sent to.
    let mut family: HashMap<u64, Option<(i32, bool)>> = HashMap::from([(call, None)]);
    for record in records {
        let Some(kind) = record.body.kind() else { continue };
        let Some(&to) = stops.get(&record.id) else { continue };
        let of_call = record.id == call;
        let Some(parent) = family.get(&record.parent).copied().or(of_call.then_some(None)) else { continue };
        let (row, label, colour) = match (&record.body, kind) {
            (Body::Coll(coll), _) => (own.clone(), coll.func.text().to_owned(), "#bbbbbb"),
            (Body::ProxyOp(op), _) => {
                family.insert(record.id, Some((op.peer, op.send)));
                continue;
            }
            (_, Kind::ProxyStep) => {
                let Some((peer, send)) = parent else { continue };
                family.insert(record.id, parent);
                let (order, way) = if send { (1, "send to") } else { (3, "receive from") };
                ((order, peer, format!("{way} {peer}")), "step".to_owned(), "#dddddd")
            }
            (body, Kind::NetPlugin) => {
                let Some((rail, send, length)) = rank.links.rail(body) else { continue };
                let number = if let Body::NetTowline(part) = body { usize::from(part.rail) } else { 0 };
                let (order, way) = if send { (2, "out") } else { (4, "in") };
                let name = rail.name();
                // eth2 before eth10.
                ((order, name.len() as i32, format!("{name} {way}")), bytes(length), colour(number))
            }
            _ => continue,
        };
        rows.entry(row).or_default().push(Slice { from: record.when, to, label, colour });
    }
    // A collective's own slice reaches to its last child.
    let last = rows.values().flatten().map(|slice| slice.to).max().unwrap_or(0);
    if let Some(own) = rows.get_mut(&own).and_then(|slices| slices.first_mut()) {
        own.to = own.to.max(last);
    }
    rows
}

fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()]
}

fn svg(ranks: &[(String, Rows)], (from, to): (u64, u64)) -> String {
    let scale = (WIDTH - LEFT - 10.0) / (to - from).max(1) as f64;
    let mut body = String::new();
    let mut y = 24.0;
    for (title, rows) in ranks {
        let _ = writeln!(body, r#"<text x="8" y="{:.0}" font-weight="bold">{}</text>"#, y + 10.0, escape(title));
        y += LANE;
        for ((_, _, name), slices) in rows {
            let lanes = lanes(slices);
            let height = lanes.iter().max().map_or(1, |lane| lane + 1) as f64 * LANE;
            let _ = writeln!(body, r#"<text x="60" y="{:.0}">{}</text>"#, y + 10.0, escape(name));
            for (slice, lane) in slices.iter().zip(lanes) {
                let (x, width) = (LEFT + (slice.from - from) as f64 * scale, (slice.to - slice.from) as f64 * scale);
                let _ = writeln!(
                    body,
                    r#"<rect x="{x:.1}" y="{:.1}" width="{:.1}" height="{:.1}" fill="{}"><title>{}, {}</title></rect>"#,
                    y + lane as f64 * LANE,
                    width.max(0.5),
                    LANE - 2.0,
                    slice.colour,
                    escape(&slice.label),
                    time(slice.to - slice.from),
                );
            }
            y += height;
        }
        y += 10.0;
    }
    let mut axis = String::new();
    for tenth in 0..=10 {
        let x = LEFT + (WIDTH - LEFT - 10.0) * f64::from(tenth) / 10.0;
        let at = time((to - from) * tenth as u64 / 10);
        let _ = writeln!(axis, r##"<line x1="{x:.0}" x2="{x:.0}" y1="18" y2="{y:.0}" stroke="#eeeeee"/>"##);
        let _ = writeln!(axis, r#"<text x="{x:.0}" y="12" text-anchor="middle">{}</text>"#, at.trim());
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0}\" height=\"{y:.0}\" font-family=\"sans-serif\" \
         font-size=\"10\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{axis}{body}</svg>\n",
        WIDTH + 20.0
    )
}

/// Slices that overlap get separate lanes.
fn lanes(slices: &[Slice]) -> Vec<usize> {
    let mut busy_until: Vec<u64> = Vec::new();
    slices
        .iter()
        .map(|slice| {
            let free = busy_until.iter().position(|until| *until <= slice.from);
            let lane = free.unwrap_or_else(|| {
                busy_until.push(0);
                busy_until.len() - 1
            });
            busy_until[lane] = slice.to;
            lane
        })
        .collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_has_a_lane_of_its_own() {
        let slice = |from, to| Slice { from, to, label: String::new(), colour: "" };
        assert_eq!(lanes(&[slice(0, 10), slice(5, 8), slice(8, 20), slice(10, 12)]), [0, 1, 1, 0]);
    }

    #[test]
    fn only_what_belongs_to_the_collective_is_drawn_peer_by_peer() {
        use crate::trace::event::{Coll, NetPart, ProxyOp};
        let record = |when, id, parent, body| Record { when, id, parent, context: 0, rank: 0, thread: 0, body };
        let part = |link, length| Body::NetTowline(NetPart { link, length, send: true, rail: 1, ..NetPart::default() });
        let operation = |peer| Body::ProxyOp(ProxyOp { send: true, peer, ..ProxyOp::default() });
        let records = vec![
            record(1, 1, 0, Body::Coll(Coll::default())),
            record(2, 1, 0, Body::Stop),
            record(3, 2, 1, operation(10)),
            record(3, 12, 1, operation(5)),
            record(4, 3, 2, Body::ProxyStep { step: 0 }),
            record(4, 13, 12, Body::ProxyStep { step: 0 }),
            record(5, 4, 3, part(7, 77)),
            record(5, 14, 13, part(8, 66)),
            record(5, 15, 13, part(9, 55)),
            record(6, 9, 8, part(7, 88)),
            record(7, 4, 0, Body::Stop),
            record(7, 14, 0, Body::Stop),
            record(7, 15, 0, Body::Stop),
            record(8, 9, 0, Body::Stop),
            record(8, 13, 0, Body::Stop),
            record(9, 3, 0, Body::Stop),
            record(9, 2, 0, Body::Stop),
            record(9, 12, 0, Body::Stop),
        ];
        let mut links = Links::default();
        links.learn(7, true, vec!["eth0".into(), "eth10".into()], "node2");
        links.learn(9, true, vec!["eth0".into(), "eth2".into()], "node2");
        let rows = rows_of(&Rank { number: 0, place: Place::default(), records, links }, 1);
        let names: Vec<_> = rows.keys().map(|(_, _, name)| name.as_str()).collect();
        assert_eq!(names, ["call", "send to 5", "send to 10", "eth2 out", "eth10 out", "unknown interface 1 out"]);
        assert_eq!(rows[&(0, 0, "call".to_owned())][0].to, 9, "its slice reaches to its last child");
        let picture = svg(&[("rank <0>".to_owned(), rows)], (1, 9));
        assert!(picture.contains("rank &lt;0>") && picture.contains("77 B") && !picture.contains("88 B"), "{picture}");
    }
}
