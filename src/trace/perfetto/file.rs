//! A trace file that is whole at every moment, also when the process is killed in the middle of a write.
//!
//! A trace is a sequence of packets, each with its length in front. The kernel copies a `write` into a file page by
//! page and a killed process can stop between two pages. So no packet crosses a page boundary of the file. Where the
//! next one does not fit, the rest of the page is filled with empty packets, which every reader skips.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use prost::Message;

use super::proto::TracePacket;
use crate::os::fd::Registered;
use crate::trace::claim::{MOST, first_free};

/// The unit in which the kernel copies, and a divisor of all larger ones.
const PAGE: usize = 4096;

/// How the names of trace files end, and before it those of older parts.
const ENDING: &str = "pftrace";
const EARLIER: &str = "earlier";

/// A part of a trace that would be shorter is not begun.
const LEAST: u64 = 256 << 10;

/// Bytes that stay free in the file's last page for the packet that marks its end: on a full disk there is no further
/// page for it.
const LAST_ROOM: usize = 256;

/// Field 1 (`Trace.packet`), length-delimited.
const PACKET_TAG: u8 = 0x0a;

/// A trace file being written.
#[derive(Debug)]
pub(crate) struct TraceFile {
    file: Registered<File>,
    path: PathBuf,
    /// Bytes that are in the file.
    written: u64,
    /// Bytes that are in the file before it.
    earlier: u64,
    /// The disk has too little room for a new file as long as this one.
    scarce: bool,
    /// Bytes that are not yet.
    buffer: Vec<u8>,
    /// Room for one packet.
    packet: Vec<u8>,
    /// The longest that it may get, and the length at which the trace goes on in a new file: half of what both may
    /// have.
    limit: u64,
    half: u64,
    /// Packets that were left out because the file is full or the disk is.
    lost: u64,
    full: bool,
    /// The trace may go on in a new file.
    may_turn: bool,
    /// How often it has done so.
    turns: u64,
    /// Older parts were removed for lack of room on the disk, and this file does not record that yet.
    made_room: bool,
    /// The remaining room of the file: one packet that marks its end.
    last_words: LastWords,
}

/// Whether the file's end has been marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastWords {
    NotYet,
    Next,
    Said,
}

impl TraceFile {
    /// A new file; `stem` gets a number if there was a file of that name.
    pub(crate) fn create(dir: &Path, stem: &str, limit: u64) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        // The kernel's limit is one for each file.
        let longest = longest();
        // A quarter of it is left for what comes before the writer's thread has turned.
        let (limit, half) = (limit.min(longest), (limit / 2).min(longest / 4 * 3));
        let path = dir.join(format!("{stem}.{ENDING}"));
        let (file, path, _) = first_free(&path, MOST, io::ErrorKind::AlreadyExists, open_new)?;
        Ok(Self {
            file,
            path,
            written: 0,
            earlier: 0,
            scarce: false,
            buffer: Vec::new(),
            packet: Vec::new(),
            limit,
            half,
            lost: 0,
            full: false,
            may_turn: half >= LEAST,
            turns: 0,
            made_room: false,
            last_words: LastWords::NotYet,
        })
    }

    /// Whether it is time for [`TraceFile::turn`]: half the limit is nearly reached, or a file's longest, or half of
    /// what the disk has.
    pub(crate) fn is_due(&self) -> bool {
        self.may_turn && !self.full && (self.scarce || self.end() + LEAST / 4 > self.half)
    }

    /// Continues in a new file. The old one stays beside it as `….earlier.pftrace`, in place of the part before it: the
    /// newest part of a trace is kept, of at least half the limit. If that fails, the file grows to its limit.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn turn(&mut self) -> io::Result<()> {
        self.may_turn = false;
        self.flush()?;
        std::fs::rename(&self.path, self.path_of_earlier())?;
        self.made_room |= self.scarce && self.earlier > 0;
        (self.earlier, self.written, self.scarce) = (self.written, 0, false);
        self.file = open_new(&self.path)?;
        self.turns += 1;
        Ok(())
    }

    /// The repeated events are in the new file. If they fill most of it, there will be no further file.
    pub(crate) fn turned(&mut self) {
        self.may_turn = self.end() < self.half / 2;
    }

    /// How many files went before this one.
    pub(crate) fn turns(&self) -> u64 {
        self.turns
    }

    /// Its length when all is written.
    fn end(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn path_of_earlier(&self) -> PathBuf {
        self.path.with_extension(format!("{EARLIER}.{ENDING}"))
    }

    /// Packets that were left out.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// Bytes waiting to be written.
    pub(crate) fn pending(&self) -> usize {
        self.buffer.len()
    }

    /// Adds a packet. It is in the file after the next [`TraceFile::flush`].
    pub(crate) fn append(&mut self, packet: &TracePacket) {
        // Encoded first: computing its length walks through the whole packet, once for each message in it.
        self.packet.clear();
        packet.encode(&mut self.packet).expect("a vector grows as needed");
        let length = self.packet.len();
        let whole = 1 + prost::length_delimiter_len(length) + length;
        let end = self.end();
        let last = self.last_words == LastWords::Next;
        if last {
            self.last_words = LastWords::Said;
        } else if self.full || whole > PAGE || end + 2 * PAGE as u64 > self.limit {
            self.full |= whole <= PAGE;
            self.lost += 1;
            return;
        }
        let left = PAGE - (end % PAGE as u64) as usize;
        // One byte left could not be filled.
        if whole > left || whole + 1 == left {
            fill(&mut self.buffer, left);
        }
        self.buffer.push(PACKET_TAG);
        prost::encode_length_delimiter(length, &mut self.buffer).expect("a vector grows as needed");
        self.buffer.extend_from_slice(&self.packet);
    }

    /// Whether the next packet must mark the file's end: the file is full and not yet marked. That packet is taken all
    /// the same, since a page is kept free for it below the limit.
    pub(crate) fn reserve_last_words(&mut self) -> bool {
        let now = self.full && self.last_words == LastWords::NotYet;
        if now {
            self.last_words = LastWords::Next;
        }
        now
    }

    /// Whether older parts have made room on a full disk; true once for each time.
    pub(crate) fn take_made_room(&mut self) -> bool {
        !self.full && std::mem::take(&mut self.made_room)
    }

    /// Writes the added packets. On a full disk the file before this one makes room; where there is none, the file is
    /// cut back to its last whole packet and tracing ends.
    ///
    /// # Errors
    /// Those of the file system; tracing has ended.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let left = PAGE - (self.end() % PAGE as u64) as usize;
        if left < LAST_ROOM && !self.full {
            fill(&mut self.buffer, left);
            fill(&mut self.buffer, 2);
        }
        let mut result = self.write();
        if let Err(error) = &result
            && matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            && self.earlier > 0
            && std::fs::remove_file(self.path_of_earlier()).is_ok()
        {
            (self.earlier, self.made_room) = (0, true);
            result = self.write();
        }
        match &result {
            Ok(()) => {
                self.written += self.buffer.len() as u64;
                let room = room(&self.file).map(|room| room + self.earlier);
                self.scarce = self.written > LEAST && room.is_some_and(|room| room < self.written);
            }
            Err(_) => self.full = true,
        }
        self.buffer.clear();
        result
    }

    /// Writes all of the buffer, or nothing.
    fn write(&mut self) -> io::Result<()> {
        self.file.write_all(&self.buffer).inspect_err(|_| _ = self.file.set_len(self.written))
    }
}

/// How many bytes this user can still write to the file's disk.
fn room(file: &File) -> Option<u64> {
    // SAFETY: a plain value, which the call fills.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `found` is there for the call.
    let done = unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut found) };
    (done == 0).then(|| found.f_bavail.saturating_mul(found.f_frsize))
}

/// The most bytes that this process may write to a file (`ulimit -f`).
fn longest() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is there for the call, which fills it or leaves it alone.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    limit.rlim_cur
}

fn open_new(path: &Path) -> io::Result<Registered<File>> {
    Registered::open(|| OpenOptions::new().append(true).create_new(true).mode(0o644).open(path))
}

/// Appends exactly `left` bytes of empty packets, `left` being 0 or at least 2.
fn fill(buffer: &mut Vec<u8>, mut left: usize) {
    if left % 2 == 1 {
        // The length zero, written with a superfluous byte.
        buffer.extend([PACKET_TAG, 0x80, 0x00]);
        left -= 3;
    }
    for _ in 0..left / 2 {
        buffer.extend([PACKET_TAG, 0x00]);
    }
}

/// Reads the packets of a trace, written by any program. Ends at a packet that is cut off.
pub struct Packets<'a> {
    bytes: &'a [u8],
    /// Bytes at the end that are no whole packet.
    rest: usize,
}

impl<'a> Packets<'a> {
    /// The packets in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, rest: 0 }
    }

    /// Bytes of the packets that are still to come.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len()
    }

    /// After the last packet: bytes that are no whole packet.
    pub fn rest(&self) -> usize {
        self.rest
    }
}

impl Iterator for Packets<'_> {
    type Item = TracePacket;

    fn next(&mut self) -> Option<TracePacket> {
        loop {
            if self.bytes.is_empty() {
                return None;
            }
            let body = self
                .bytes
                .strip_prefix(&[PACKET_TAG])
                .and_then(|mut rest| Some((prost::decode_length_delimiter(&mut rest).ok()?, rest)))
                .and_then(|(length, rest)| rest.split_at_checked(length));
            let Some((packet, rest)) = body else {
                self.rest = self.bytes.len();
                self.bytes = &[];
                return None;
            };
            self.bytes = rest;
            if packet.is_empty() {
                continue;
            }
            match TracePacket::decode(packet) {
                Ok(packet) => return Some(packet),
                Err(_) => self.rest += packet.len(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::perfetto::proto::{Trace, TrackEvent};

    fn packet(number: u64, name: usize) -> TracePacket {
        let event = TrackEvent { name: Some("n".repeat(name)), ..TrackEvent::default() };
        TracePacket { timestamp: Some(number), track_event: Some(event), ..TracePacket::default() }
    }

    #[test]
    fn every_page_of_the_file_is_a_sequence_of_whole_packets() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = TraceFile::create(dir.path(), "t", u64::MAX).unwrap();
        // Lengths that run through all remainders of a page, with flushes at odd places.
        for number in 0..4000u64 {
            file.append(&packet(number + 1, (number as usize * 7) % 400));
            if number % 37 == 0 {
                file.flush().unwrap();
            }
        }
        file.flush().unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        let mut all = Vec::new();
        for page in bytes.chunks(PAGE) {
            let mut packets = Packets::new(page);
            all.extend(packets.by_ref());
            assert_eq!(packets.rest(), 0);
        }
        assert_eq!(all.iter().map(|p| p.timestamp.unwrap()).collect::<Vec<_>>(), (1..=4000).collect::<Vec<_>>());
        // And the whole is a valid message to any protobuf reader.
        let whole = Trace::decode(bytes.as_slice()).unwrap();
        assert_eq!(whole.packet.iter().filter(|p| **p != TracePacket::default()).count(), 4000);
    }

    #[test]
    fn a_file_ends_at_its_limit_and_counts_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = TraceFile::create(dir.path(), "t", 64 * 1024).unwrap();
        (0..2000).for_each(|number| file.append(&packet(number, 100)));
        file.flush().unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        let mut packets = Packets::new(&bytes);
        let kept = packets.by_ref().count() as u64;
        assert!(bytes.len() <= 64 * 1024 && packets.rest() == 0);
        assert_eq!(kept + file.lost(), 2000);
        assert!(file.lost() > 0);
    }

    #[test]
    fn an_older_file_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let first = TraceFile::create(dir.path(), "t", 1 << 20).unwrap();
        let second = TraceFile::create(dir.path(), "t", 1 << 20).unwrap();
        assert_ne!(first.path(), second.path());
    }

    #[test]
    fn a_cut_packet_at_the_end_is_left_out() {
        let mut bytes = Vec::new();
        for number in 1..4 {
            bytes.push(PACKET_TAG);
            packet(number, 10).encode_length_delimited(&mut bytes).unwrap();
        }
        let mut packets = Packets::new(&bytes[..bytes.len() - 3]);
        assert_eq!(packets.by_ref().count(), 2);
        assert!(packets.rest() > 0);
    }
}
