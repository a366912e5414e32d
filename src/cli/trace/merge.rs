//! `towline trace merge`: packet by packet from the files into one, with times moved onto one clock.
//!
//! Track ids, flow ids and ids of events are unique across processes by their making. What could collide is
//! renumbered: packet sequences (one per process) and process ids (two hosts may have the same).

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};

use prost::Message;

use super::Merge;
use super::load::{Loaded, Share, bytes_of, load_parts};
use crate::cli::output::Output;
use crate::os::error::{Error, Result};
use crate::trace::align::Correction;
use crate::trace::perfetto::WALL_OFFSET;
use crate::trace::perfetto::file::Packets;
use crate::trace::perfetto::proto::TracePacket;

/// `Trace.packet`.
const PACKET_TAG: u32 = 1;

pub(super) fn run(args: &Merge, output: &mut Output) -> Result<String> {
    let Loaded { processes, remarks } = load_parts(&args.files, output)?;
    // All times are on the first process's clock afterwards, so its distance from the wall clock holds for all.
    let wall_offset =
        processes.first().and_then(|(process, _)| process.info.as_ref()).map_or(0, |info| info.wall_offset);
    let corrections: Vec<Correction> = processes.into_iter().map(|(_, correction)| correction).collect();
    let failed = |error: std::io::Error| Error::system(format!("writing {}", args.output.display()), &error);
    let mut out = BufWriter::new(File::create(&args.output).map_err(failed)?);
    let (mut count, mut process) = (0u64, 0usize);
    let mut share = Share::new(output, "writing", &args.files);
    for path in &args.files {
        let bytes = bytes_of(path)?;
        // Sequences in order of appearance are processes in order of reading.
        let mut sequences: HashMap<u32, usize> = HashMap::new();
        // By sequence, the number under which the annotation is named.
        let mut wall_names: HashMap<u32, u64> = HashMap::new();
        let mut packets = Packets::new(&bytes);
        while let Some(mut packet) = packets.next() {
            share.at(bytes.len() - packets.left());
            let sequence = packet.trusted_packet_sequence_id.unwrap_or(0);
            let known = sequences.len();
            let index = process + *sequences.entry(sequence).or_insert(known);
            let Some(correction) = corrections.get(index) else { continue };
            if let Some(name) = wall_name(&packet) {
                wall_names.insert(sequence, name);
            }
            if let Some(&name) = wall_names.get(&sequence) {
                set_wall_offset(&mut packet, name, wall_offset);
            }
            move_packet(&mut packet, index, correction);
            let mut buffer = Vec::with_capacity(packet.encoded_len() + 8);
            prost::encoding::message::encode(PACKET_TAG, &packet, &mut buffer);
            out.write_all(&buffer).map_err(failed)?;
            count += 1;
        }
        process += sequences.len();
        share.file_done(bytes.len());
    }
    out.flush().map_err(failed)?;
    let mut text = format!(
        "{}: {count} packets of {process} process{}\n",
        args.output.display(),
        if process == 1 { "" } else { "es" }
    );
    for remark in remarks {
        text.push_str(&remark);
        text.push('\n');
    }
    Ok(text)
}

/// The number that this packet gives to the name of the process's distance from the wall clock.
fn wall_name(packet: &TracePacket) -> Option<u64> {
    let names = &packet.interned_data.as_ref()?.debug_annotation_names;
    names.iter().find(|name| name.text.as_deref() == Some(WALL_OFFSET))?.iid
}

/// A merged file is read on one clock: without this its processes would be moved apart again.
fn set_wall_offset(packet: &mut TracePacket, name: u64, offset: i64) {
    let annotations = packet.track_event.iter_mut().flat_map(|event| &mut event.debug_annotations);
    for annotation in annotations.filter(|annotation| annotation.name_iid == Some(name)) {
        annotation.uint_value = None;
        annotation.int_value = Some(offset);
    }
}

fn move_packet(packet: &mut TracePacket, process: usize, correction: &Correction) {
    packet.trusted_packet_sequence_id = Some(process as u32 + 1);
    packet.timestamp = packet.timestamp.map(|when| correction.apply(when));
    if let Some(descriptor) = packet.track_descriptor.as_mut().and_then(|track| track.process.as_mut()) {
        // The name still contains host and process.
        descriptor.pid = Some(process as i32 + 1);
    }
}

#[cfg(test)]
mod tests {
    use crate::trace::event::{Body, CommInfo, Record};
    use crate::trace::perfetto::file::TraceFile;
    use crate::trace::perfetto::{Emitter, ProcessInfo};

    use super::*;

    const S: u64 = 1_000_000_000;

    /// A file of one host, whose only event begins 10 s after the moment at which the first host's clock was 0.
    fn file(dir: &std::path::Path, host: &str, boot: u64, ahead: u64) -> std::path::PathBuf {
        let file = TraceFile::create(dir, host, 1 << 20).unwrap();
        let path = file.path().to_owned();
        let wall_offset = (5000 * S - ahead) as i64;
        let process = ProcessInfo { host: host.into(), boot, pid: 7, rank: None, wall_offset };
        let mut emitter = Emitter::new(file, &process, boot, ahead);
        let context = 1;
        emitter.comm(&CommInfo { context, ranks: 2, ..CommInfo::default() }, ahead);
        let record = |when, body| Record { when, id: 2, parent: 0, context, rank: 0, thread: 0, body };
        emitter.apply(&record(ahead + 10 * S, Body::Group));
        emitter.apply(&record(ahead + 11 * S, Body::Stop));
        emitter.file().flush().unwrap();
        path
    }

    #[test]
    fn a_merged_file_of_two_hosts_is_read_on_one_clock() {
        let dir = tempfile::tempdir().unwrap();
        let files = vec![file(dir.path(), "a", 1, 0), file(dir.path(), "b", 2, 1000 * S)];
        let output = dir.path().join("all.pftrace");
        run(&Merge { files, output: output.clone() }, &mut Output::new()).unwrap();
        let begins: Vec<u64> = load_parts(&[output], &mut Output::new())
            .unwrap()
            .processes
            .iter()
            .map(|(process, correction)| correction.apply(process.records[0].when))
            .collect();
        assert_eq!(begins, [10 * S, 10 * S]);
    }
}
