//! A GPU that polls the receive buffer while it fills sees what NCCL's LL and LL128 protocols rely on: bytes arrive in
//! ascending order within each unit. A thread plays the GPU.

mod support;

use std::sync::atomic::{AtomicU64, Ordering, fence};

use support::{PATIENCE, eventually, pair, part, watchdog};
use towline::host::{ApiVersion, Memory, Part};

/// Bytes of an LL128 line: 15 words of data and one flag.
const LINE: usize = 128;
const WORDS: usize = LINE / 8;

/// The words of a message: each differs from every other and from those of other rounds, and none is 0. The low half
/// of each is its flag, as in LL, where four bytes of data come before four bytes of flag.
fn word(round: u64, index: usize) -> u64 {
    let data = (index as u64).wrapping_mul(0x9e37_79b9).wrapping_add(round) & 0xffff_ffff;
    (flag(round) << 32) | data
}

/// What stands in the upper, later four bytes of every word of a round.
fn flag(round: u64) -> u64 {
    0x8000_0001 + round
}

/// Watches the lines of a buffer from the first to the last, as the threads of a GPU do, and checks at the moment at
/// which a flag shows that everything it stands for is there.
fn watch(words: &[AtomicU64], round: u64) {
    for (line, content) in words.chunks(WORDS).enumerate() {
        let last = content.len() - 1;
        let shown = eventually("a flag", PATIENCE, || {
            let seen =
                (0..20_000).map(|_| content[last].load(Ordering::Acquire)).find(|seen| seen >> 32 == flag(round));
            seen.or_else(|| {
                std::thread::yield_now();
                None
            })
        });
        fence(Ordering::Acquire);
        assert_eq!(shown, word(round, line * WORDS + last), "line {line}: the flag came before its data");
        for (at, cell) in content.iter().enumerate() {
            let seen = cell.load(Ordering::Relaxed);
            assert_eq!(seen, word(round, line * WORDS + at), "line {line}: word {at} came after the line's flag");
        }
    }
}

/// Sends rounds of `size` bytes; `early` sends before the receive is posted, so that the bytes pass through staging.
fn rounds(size: usize, count: u64, early: bool) {
    let pair = pair(ApiVersion::V12);
    let mut source = Memory::new(size);
    let target = Memory::new(size);
    for round in 1..=count {
        for (index, bytes) in source.bytes_mut().chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word(round, index).to_le_bytes());
        }
        // SAFETY: the target is page-aligned, lives on, and is only read as atomics while the transfer runs.
        let words = unsafe { std::slice::from_raw_parts(target.at(0).cast::<AtomicU64>(), size / 8) };
        std::thread::scope(|scope| {
            let watcher = scope.spawn(move || watch(words, round));
            let source_part = part(source.bytes(), None);
            let mut send = None;
            if early {
                // SAFETY: the source lives until the request ended.
                send = Some(unsafe { pair.send.post(source_part) }.expect("isend"));
                std::thread::sleep(std::time::Duration::from_micros(300));
            }
            // SAFETY: the target lives until the request ended.
            let receive = unsafe { pair.recv.post(&[Part::all(&target, None)]) }.expect("irecv");
            // SAFETY: as above.
            let send = send.unwrap_or_else(|| unsafe { pair.send.post(source_part) }.expect("isend"));
            pair.finish(receive, &[send]).expect("a transfer");
            watcher.join().expect("the watcher saw everything in order");
        });
    }
}

#[test]
fn short_messages_fill_their_buffer_in_ascending_order() {
    let _watchdog = watchdog(60);
    for size in [8, LINE, 2 * LINE, 1920, 15 * LINE, 4096] {
        rounds(size, 60, false);
    }
}

#[test]
fn messages_of_the_ll_slot_size_fill_their_buffer_in_ascending_order() {
    let _watchdog = watchdog(60);
    rounds(16 << 10, 60, false);
    rounds(64 << 10, 60, false);
}

#[test]
fn early_messages_fill_their_buffer_in_ascending_order() {
    let _watchdog = watchdog(60);
    for size in [LINE, 4096, 64 << 10] {
        rounds(size, 60, true);
    }
}

#[test]
fn long_messages_fill_every_line_in_ascending_order() {
    let _watchdog = watchdog(100);
    // Several chunks, possibly over several streams: lines may come in any order, but each whole.
    rounds(512 << 10, 40, false);
    rounds((4 << 20) + 3 * LINE, 10, false);
}

#[test]
fn long_messages_over_several_streams_fill_every_line_in_ascending_order() {
    const NAME: &str = "long_messages_over_several_streams_fill_every_line_in_ascending_order";
    support::child::alone(NAME, &[("TOWLINE_STREAMS", "4"), ("TOWLINE_WORKERS", "2")], || {
        let _watchdog = watchdog(100);
        rounds(512 << 10, 40, false);
        rounds((4 << 20) + 3 * LINE, 10, false);
    });
}
