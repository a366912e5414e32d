//! A GPU that polls the receive buffer while it fills sees what NCCL's LL and LL128 protocols rely on: bytes arrive in
//! ascending order within each unit. A thread plays the GPU.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::support::{PATIENCE, eventually, pair, part, watchdog};
use towline::host::{ApiVersion, Memory, Part};

/// The two layouts in which NCCL sends data with flags (`prims_ll.h` and `prims_ll128.h` in NCCL 2.30; the same since
/// 2.4). A flag is the number of the step, the same all over a message.
#[derive(Clone, Copy, Debug)]
enum Layout {
    /// Four bytes of data before four bytes of flag.
    Ll,
    /// 120 bytes of data before eight bytes of flag.
    Ll128,
}

impl Layout {
    /// Words of eight bytes up to and with a flag.
    fn line(self) -> usize {
        match self {
            Layout::Ll => 1,
            Layout::Ll128 => LINE / 8,
        }
    }

    /// The words of a message: no data is what another round has at its place, or 0.
    fn word(self, round: u64, index: usize) -> u64 {
        let data = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(round);
        match self {
            Layout::Ll => (round << 32) | (data >> 32),
            Layout::Ll128 if index % self.line() == self.line() - 1 => round,
            Layout::Ll128 => data | 1 << 63,
        }
    }

    /// Whether the last word of a line shows the round's flag.
    fn shows(self, seen: u64, round: u64) -> bool {
        match self {
            Layout::Ll => seen >> 32 == round,
            Layout::Ll128 => seen == round,
        }
    }

    /// Watches the lines of a buffer from the first to the last, as the threads of a GPU do, and checks at the moment
    /// at which a flag shows that everything it stands for is there.
    fn watch(self, words: &[AtomicU64], round: u64) {
        for (line, content) in words.chunks(self.line()).enumerate() {
            let (flag, data) = content.split_last().expect("a line has words");
            let shown = eventually("a flag", PATIENCE, || {
                let seen = (0..20_000).map(|_| flag.load(Ordering::Acquire)).find(|seen| self.shows(*seen, round));
                seen.or_else(|| {
                    std::thread::yield_now();
                    None
                })
            });
            fence(Ordering::Acquire);
            let first = line * self.line();
            assert_eq!(
                shown,
                self.word(round, first + data.len()),
                "{self:?} line {line}: the flag came before its data"
            );
            for (at, cell) in data.iter().enumerate() {
                let seen = cell.load(Ordering::Relaxed);
                assert_eq!(
                    seen,
                    self.word(round, first + at),
                    "{self:?} line {line}: word {at} came after the line's flag"
                );
            }
        }
    }
}

/// Bytes of an LL128 line: 15 words of data and one of flag.
const LINE: usize = 128;

/// Sends rounds of `size` bytes; `early` sends before the receive is posted, so that the bytes pass through staging.
fn rounds(layout: Layout, size: usize, count: u64, early: bool) {
    let pair = pair(ApiVersion::V12);
    let mut source = Memory::new(size);
    // Memory that was never touched: there the kernel's copies are out of order most often.
    let targets: Vec<_> = (0..count).map(|_| Memory::new(size)).collect();
    for (round, target) in (1..).zip(&targets) {
        for (index, bytes) in source.bytes_mut().chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&layout.word(round, index).to_le_bytes());
        }
        // SAFETY: the target is page-aligned, lives on, and is only read as atomics while the transfer runs.
        let words = unsafe { std::slice::from_raw_parts(target.at(0).cast::<AtomicU64>(), size / 8) };
        std::thread::scope(|scope| {
            let watcher = scope.spawn(move || layout.watch(words, round));
            let source_part = part(source.bytes(), None);
            let mut send = None;
            if early {
                // SAFETY: the source lives until the request ended.
                send = Some(unsafe { pair.send.post(source_part) }.expect("isend"));
                std::thread::sleep(std::time::Duration::from_micros(300));
            }
            // SAFETY: the target lives until the request ended.
            let receive = unsafe { pair.recv.post(&[Part::all(target, None)]) }.expect("irecv");
            // SAFETY: as above.
            let send = send.unwrap_or_else(|| unsafe { pair.send.post(source_part) }.expect("isend"));
            pair.finish(receive, &[send]).expect("a transfer");
            watcher.join().expect("the watcher saw everything in order");
        });
    }
}

/// What NCCL sends with LL128 are whole slices of 2 KiB, up to 600 KiB of them with default buffers; with LL up to 64
/// KiB.
#[test]
fn short_messages_fill_their_buffer_in_ascending_order() {
    let _watchdog = watchdog(60);
    for size in [8, LINE, 1920, 4096] {
        rounds(Layout::Ll, size, 60, false);
    }
    for size in [2 << 10, 4 << 10, 8 << 10] {
        rounds(Layout::Ll128, size, 60, false);
    }
}

#[test]
fn messages_of_the_ll_slot_size_fill_their_buffer_in_ascending_order() {
    let _watchdog = watchdog(60);
    for layout in [Layout::Ll, Layout::Ll128] {
        rounds(layout, 16 << 10, 60, false);
        rounds(layout, 64 << 10, 60, false);
    }
}

#[test]
fn early_messages_fill_their_buffer_in_ascending_order() {
    let _watchdog = watchdog(60);
    rounds(Layout::Ll, LINE, 60, true);
    for layout in [Layout::Ll, Layout::Ll128] {
        rounds(layout, 4096, 60, true);
        rounds(layout, 64 << 10, 60, true);
    }
}

/// Several chunks, possibly over several streams: lines may come in any order, but each whole.
fn long_messages() {
    let _watchdog = watchdog(100);
    rounds(Layout::Ll128, 512 << 10, 40, false);
    rounds(Layout::Ll128, 600 << 10, 40, false);
    rounds(Layout::Ll128, (4 << 20) + (2 << 10), 10, false);
    rounds(Layout::Ll, 512 << 10, 20, false);
}

#[test]
fn long_messages_fill_every_line_in_ascending_order() {
    long_messages();
}

#[test]
fn long_messages_over_several_streams_fill_every_line_in_ascending_order() {
    const NAME: &str = "placement::long_messages_over_several_streams_fill_every_line_in_ascending_order";
    crate::support::child::alone(NAME, &[("TOWLINE_STREAMS", "4"), ("TOWLINE_WORKERS", "2")], long_messages);
}
