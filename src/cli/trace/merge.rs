//! `towline trace merge`: packet by packet from the files into one, with times moved onto one clock.
//!
//! Track ids, flow ids and ids of events are unique across processes by their making. What could collide is
//! renumbered: packet sequences (one per process) and process ids (two hosts may have the same).

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};

use prost::Message;

use super::Merge;
use super::load::{Loaded, bytes_of, load};
use towline::os::error::{Error, Result};
use towline::trace::align::Correction;
use towline::trace::perfetto::file::Packets;
use towline::trace::perfetto::proto::TracePacket;

/// `Trace.packet`.
const PACKET_TAG: u32 = 1;

pub(super) fn run(args: &Merge) -> Result<String> {
    let Loaded { processes, remarks } = load(&args.files)?;
    let corrections: Vec<Correction> = processes.into_iter().map(|(_, correction)| correction).collect();
    let failed = |error: std::io::Error| Error::system(format!("writing {}", args.output.display()), &error);
    let mut out = BufWriter::new(File::create(&args.output).map_err(failed)?);
    let (mut count, mut process) = (0u64, 0usize);
    for path in &args.files {
        let bytes = bytes_of(path)?;
        // Sequences in order of appearance are processes in order of reading.
        let mut sequences: HashMap<u32, usize> = HashMap::new();
        for mut packet in Packets::new(&bytes) {
            let sequence = packet.trusted_packet_sequence_id.unwrap_or(0);
            let known = sequences.len();
            let index = process + *sequences.entry(sequence).or_insert(known);
            let Some(correction) = corrections.get(index) else { continue };
            move_packet(&mut packet, index, correction);
            let mut buffer = Vec::with_capacity(packet.encoded_len() + 8);
            prost::encoding::message::encode(PACKET_TAG, &packet, &mut buffer);
            out.write_all(&buffer).map_err(failed)?;
            count += 1;
        }
        process += sequences.len();
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

fn move_packet(packet: &mut TracePacket, process: usize, correction: &Correction) {
    packet.trusted_packet_sequence_id = Some(process as u32 + 1);
    packet.timestamp = packet.timestamp.map(|when| correction.apply(when));
    if let Some(descriptor) = packet.track_descriptor.as_mut().and_then(|track| track.process.as_mut()) {
        // The name still says host and process.
        descriptor.pid = Some(process as i32 + 1);
    }
}
