//! The built library moves verified data through every version of NCCL's net interface that it exports.

use std::collections::HashSet;
use std::ptr::null_mut;
use std::time::Duration;

use crate::support::pair::Pair;
use crate::support::{PATIENCE, context, net, pair, part, pattern, version_of, versions, watchdog};
use towline::host::{ApiVersion, Code, Memory, Part, SendComm};

/// Around every boundary that the transport has or that NCCL uses: a word, a line of LL128, a page, the LL slot, the
/// Simple step, a large message.
const SIZES: [usize; 19] = [
    0,
    1,
    7,
    8,
    127,
    128,
    129,
    4095,
    16 << 10,
    (16 << 10) + 1,
    32 << 10,
    (32 << 10) + 1,
    (64 << 10) - 1,
    64 << 10,
    (64 << 10) + 1,
    512 << 10,
    (1 << 20) + 3,
    (2 << 20) + 129,
    16 << 20,
];

#[test]
fn every_version_moves_every_size_intact() {
    let _watchdog = watchdog(100);
    for version in versions() {
        let pair = pair(version);
        for (seed, size) in SIZES.into_iter().enumerate() {
            let sent = pattern(seed + version as usize, size);
            assert!(pair.transfer(sent).expect("a transfer") == sent, "{version}, {size} bytes");
        }
        pair.close().expect("close");
    }
}

#[test]
fn every_version_moves_between_unaligned_addresses() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let pair = pair(version);
        for (from, to) in [(1, 0), (0, 1), (3, 5), (7, 7), (63, 1)] {
            for size in [1, 129, 70_001, 600_001] {
                let (mut source, target) = (Memory::new(size + 64), Memory::new(size + 64));
                source.bytes_mut()[from..from + size].copy_from_slice(pattern(from, size));
                // SAFETY: both memories outlive the transfer, which `finish` ends.
                let (receive, send) = unsafe {
                    let receive = pair.recv.post(&[Part::new(target.at(to), size, None)]).expect("irecv");
                    (receive, pair.send.post(Part::new(source.at(from), size, None)).expect("isend"))
                };
                let sizes = pair.finish(receive, &[send]).expect("a transfer");
                assert_eq!(*sizes, [size as i32]);
                assert!(&target.bytes()[to..to + size] == pattern(from, size), "{version} {from} {to} {size}");
                assert!(target.bytes()[..to].iter().chain(&target.bytes()[to + size..]).all(|byte| *byte == 0));
                assert!(target.guards_intact());
            }
        }
    }
}

#[test]
fn a_receive_may_be_larger_than_its_send() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let pair = pair(version);
        for (size, capacity) in [
            (0, 1),
            (0, 1 << 20),
            (1, 64 << 10),
            (100, 70_000),
            (65_536, 65_537),
            (70_000, 1 << 20),
            (1 << 20, 4 << 20),
        ] {
            let got = pair.transfer_into(pattern(3, size), capacity).expect("a transfer");
            assert!(got == pattern(3, size), "{version}: {size} bytes into {capacity}");
        }
    }
}

#[test]
fn every_version_with_groups_fills_slots_by_tag() {
    let _watchdog = watchdog(60);
    for version in versions().into_iter().filter(|version| version.has_grouped_receives()) {
        let pair = pair(version);
        for size in [0, 1, 127, 4095, 65_537, 600_000] {
            // Eight slots, three tags; the k-th send with a tag fills the k-th slot with it, whatever the others do.
            let tags = [5, -3, 5, 0, i32::MAX, 5, -3, 0];
            let order = [3, 0, 1, 4, 2, 6, 7, 5];
            let receives: Vec<_> = tags.map(|tag| (tag, size + 8)).to_vec();
            let sends: Vec<_> = order.map(|slot: usize| (tags[slot], pattern(slot, size + slot))).to_vec();
            let got = pair.exchange(&sends, &receives).expect("a grouped receive");
            for (slot, bytes) in got.iter().enumerate() {
                assert!(bytes == pattern(slot, size + slot), "{version}, slot {slot}, {size} bytes");
            }
        }
    }
}

#[test]
fn groups_of_every_count_report_a_size_for_each_part() {
    let _watchdog = watchdog(60);
    for version in versions().into_iter().filter(|version| version.has_grouped_receives()) {
        let pair = pair(version);
        for count in 1..=8 {
            let sends: Vec<_> = (0..count).map(|i| (i as i32, pattern(i, 1000 * i))).collect();
            let receives: Vec<_> = (0..count).map(|i| (i as i32, 9000)).collect();
            let got = pair.exchange(&sends, &receives).expect("a grouped receive");
            assert!(got.iter().enumerate().all(|(i, bytes)| bytes == pattern(i, 1000 * i)), "{version}, {count}");
        }
    }
}

/// Anonymous memory that costs only what is written to it.
struct Sparse {
    start: *mut u8,
    len: usize,
}

impl Sparse {
    fn new(len: usize) -> Self {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping anywhere.
        let start = unsafe { libc::mmap(null_mut(), len, prot, flags | libc::MAP_NORESERVE, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "mapping {len} bytes");
        Self { start: start.cast(), len }
    }

    fn slice(&mut self, from: usize, len: usize) -> &mut [u8] {
        assert!(from + len <= self.len);
        // SAFETY: within the mapping, which `&mut self` lends exclusively; its bytes are zero at first.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; the test ended all transfers.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[test]
fn versions_with_int_sizes_refuse_negative_ones() {
    let _watchdog = watchdog(30);
    use crate::support::raw::{Arguments, irecv, isend};
    for version in versions().into_iter().filter(|version| *version <= ApiVersion::V8) {
        let pair = pair(version);
        let table = net(version).table();
        let memory = Memory::new(8);
        let mut request = null_mut();
        let with = Arguments { data: memory.at(0), size: usize::MAX, request: &raw mut request, ..Default::default() };
        assert_eq!(isend(table, Arguments { comm: pair.send.raw(), ..with }), Some(4), "{version}");
        assert_eq!(irecv(table, Arguments { comm: pair.recv.raw(), ..with }), Some(4), "{version}");
        assert!(request.is_null());
        assert_eq!(pair.transfer(b"still works").expect("a transfer"), b"still works");
    }
}

#[test]
fn the_hint_in_a_receives_request_is_always_overwritten() {
    let _watchdog = watchdog(30);
    for version in versions().into_iter().filter(|version| *version >= ApiVersion::V9) {
        let pair = pair(version);
        let target = Memory::new(64);
        let mut posted = Vec::new();
        // When nothing is free, the 1 gives way to NULL: NCCL would take it for a posted receive.
        // SAFETY: the memory outlives the connection.
        while let Some(request) = unsafe { pair.recv.irecv_hinted(&[Part::all(&target, None)], 1) }.expect("irecv") {
            assert!(request.raw().addr() > 2, "{version}: a request of {:?}", request.raw());
            posted.push(request);
            assert!(posted.len() <= 10_000, "{version}: requests never run out");
        }
        assert!(posted.len() >= 32, "{version}: {} requests", posted.len());
        for (i, request) in posted.iter().enumerate() {
            // SAFETY: the pattern is static.
            let send = unsafe { pair.send.post(part(pattern(i, 64), None)) }.expect("isend");
            pair.finish(*request, &[send]).expect("a transfer");
            assert_eq!(target.bytes(), pattern(i, 64));
        }
        pair.close().expect("close");
        drop(target);
    }
}

#[test]
fn requests_run_out_with_null_and_come_back() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let pair = pair(version);
        let target = Memory::new(128);
        let mut receives = Vec::new();
        // SAFETY: the memory outlives the requests.
        while let Some(request) = unsafe { pair.recv.irecv(&[Part::all(&target, None)]) }.expect("not now is no error")
        {
            receives.push(request);
        }
        let mut sends = Vec::new();
        // Longer than what is sent before its receive is known, so that nothing frees a request.
        let bytes = pattern(1, 100);
        // SAFETY: the pattern is static.
        while let Some(request) = unsafe { pair.send.isend(part(bytes, None)) }.expect("not now is no error") {
            sends.push(request);
            if sends.len() == receives.len() {
                break;
            }
        }
        assert!(receives.len() >= version.max_requests(), "{version}: {} receives", receives.len());
        assert_eq!(sends.len(), receives.len(), "{version}");
        let values: HashSet<usize> = receives.iter().chain(&sends).map(|request| request.raw().addr()).collect();
        assert_eq!(values.len(), receives.len() + sends.len(), "{version}: every request has its own value");
        assert!(values.iter().all(|value| *value > 2), "{version}");
        for request in receives {
            pair.recv.wait(&request, PATIENCE).expect("the receive ends");
        }
        for request in sends {
            pair.send.wait(&request, PATIENCE).expect("the send ends");
        }
        assert_eq!(pair.transfer(b"again").expect("a transfer"), b"again", "{version}");
    }
}

#[test]
fn sends_run_out_with_null_while_no_receive_is_posted() {
    let _watchdog = watchdog(60);
    let pair = pair(ApiVersion::V12);
    let bytes = pattern(2, 200_000);
    let mut sends = Vec::new();
    // SAFETY: the pattern is static.
    while let Some(request) = unsafe { pair.send.isend(part(bytes, None)) }.expect("not now is no error") {
        sends.push(request);
        assert!(sends.len() <= 10_000, "requests never run out");
    }
    assert!(sends.len() >= 32 * 8, "32 grouped receives of 8 need {} sends", 32 * 8);
    assert!(sends.iter().all(|send| pair.send.test(send).expect("a test").is_none()), "nobody received");
    for send in sends {
        let target = Memory::new(bytes.len());
        // SAFETY: the memory lives until the request ended.
        let receive = unsafe { pair.recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        pair.finish(receive, &[send]).expect("a transfer");
        assert!(target.bytes() == bytes);
    }
    assert_eq!(pair.transfer(b"again").expect("a transfer"), b"again");
}

#[test]
fn test_takes_null_for_the_sizes() {
    let _watchdog = watchdog(30);
    for version in versions() {
        let pair = pair(version);
        let target = Memory::new(300);
        // SAFETY: the memory outlives the requests; the pattern is static.
        let (receive, send) = unsafe {
            let receive = pair.recv.post(&[Part::all(&target, None)]).expect("irecv");
            (receive, pair.send.post(part(pattern(9, 300), None)).expect("isend"))
        };
        let step = |done: bool| done.then_some(());
        crate::support::eventually("the send", PATIENCE, || step(pair.send.test_unsized(&send).expect("a test")));
        crate::support::eventually("the receive", PATIENCE, || step(pair.recv.test_unsized(&receive).expect("a test")));
        assert_eq!(target.bytes(), pattern(9, 300), "{version}");
    }
}

#[test]
fn a_flush_needs_no_waiting() {
    let _watchdog = watchdog(30);
    for version in versions() {
        let pair = pair(version);
        let memory = Memory::new(64);
        let mr = pair.recv.register(&memory).expect("regMr");
        for size in [0, 64] {
            // SAFETY: the memory outlives the call, which leaves no request.
            let request = unsafe { pair.recv.iflush(Part::new(memory.at(0), size, Some(&mr))) }.expect("iflush");
            if let Some(request) = request {
                pair.recv.wait(&request, PATIENCE).expect("the flush ends");
            }
        }
        mr.dereg().expect("deregMr");
    }
}

#[test]
fn a_lost_peer_is_the_system_error_before_v6_and_the_remote_error_since() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let Pair { send, recv } = pair(version);
        let target = Memory::new(64);
        // SAFETY: the memory outlives the connection.
        let receive = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        SendComm::close(send).expect("close");
        let answer = crate::support::outcome(|request| recv.test(request), receive, PATIENCE).expect("a prompt answer");
        let expected = if version < ApiVersion::V6 { Code::SystemError } else { Code::RemoteError };
        assert_eq!(answer.expect_err("nobody will send"), expected, "{version}");
    }
}

#[test]
fn properties_are_what_nccl_relies_on() {
    let _watchdog = watchdog(30);
    for version in versions() {
        let context = context(version);
        assert_eq!(context.net().name(), "Towline");
        let count = context.devices().expect("devices");
        assert!(count >= 1, "{version}");
        for dev in 0..count {
            let it = context.properties(dev).expect("properties");
            assert!(!it.name.is_empty(), "{version}");
            assert_eq!(it.ptr_support, 1, "{version}: host memory only");
            assert!(it.speed_mbps > 0 && it.max_comms > 0, "{version}: {it:?}");
            assert_eq!((it.device_type, it.device_version), (0, 0), "{version}: a host device");
            if version.has_grouped_receives() {
                assert_eq!(it.max_recvs, 8, "{version}");
            }
            if version >= ApiVersion::V9 {
                assert_eq!(it.members, [dev], "{version}: a physical device is its own member");
                assert!((1..=1 << 40).contains(&it.max_p2p_bytes), "{version}: {}", it.max_p2p_bytes);
                assert!((1..=1 << 40).contains(&it.max_coll_bytes), "{version}: {}", it.max_coll_bytes);
                assert!(!it.force_flush, "{version}");
            }
            assert_eq!(it.max_multi_request, 1, "{version}");
            assert_eq!((it.rail_id, it.plane_id), (-1, -1), "{version}");
        }
    }
}

#[test]
fn memory_of_a_gpu_is_refused_and_so_is_dma_buf() {
    let _watchdog = watchdog(30);
    for version in versions() {
        let pair = pair(version);
        let memory = Memory::new(64);
        let refused = pair.send.reg_mr(memory.at(0), 64, towline::host::PTR_CUDA);
        assert!(matches!(refused, Err(Code::InvalidUsage | Code::InvalidArgument)), "{version}");
        let refused = pair.recv.reg_mr_dmabuf((memory.at(0), 64), towline::host::PTR_HOST, (0, -1));
        assert!(refused.is_err(), "{version}");
        assert_eq!(pair.transfer(b"and the rest works").expect("a transfer"), b"and the rest works");
    }
}

#[test]
fn a_version_talks_to_every_other_version() {
    let _watchdog = watchdog(60);
    for from in versions() {
        // One communicator of each version; the wire is the same.
        let to = version_of(from as usize * 5);
        let (sender, receiver) = (context(from), context(to));
        let pair = Pair::between((&sender, 0), (&receiver, 0)).expect("a connection");
        assert!(pair.transfer(pattern(4, 100_000)).expect("a transfer") == pattern(4, 100_000), "{from} to {to}");
    }
}

/// Run by `.ci/run`, and by `-- --ignored long::`.
mod long {
    use super::*;

    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn a_message_of_more_than_4_gib_arrives_whole_and_its_size_saturates() {
        let _watchdog = watchdog(170);
        const SIZE: usize = (4 << 30) + 12_345;
        let available = std::fs::read_to_string("/proc/meminfo").expect("/proc is there");
        let line = available.lines().find(|line| line.starts_with("MemAvailable:")).expect("the kernel tells it");
        let kib: usize = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number");
        assert!(kib > 6 << 20, "this test needs 6 GiB of free memory, there are {} MiB", kib >> 10);
        // One version with size_t messages moves it in full; the others of that kind share its code below the table.
        let pair = pair(ApiVersion::V9);
        let (mut source, mut target) = (Sparse::new(SIZE), Sparse::new(SIZE));
        // Marks at the start, at the end, and around every 512 MiB, which are also the powers of two where a cut-off
        // number would wrap. Unwritten pages of the source are the kernel's zero page and cost nothing.
        let marks: Vec<usize> = (0..=8_usize).map(|i| (i << 29).saturating_sub(70)).chain([SIZE - 140]).collect();
        for (seed, mark) in marks.iter().enumerate() {
            source.slice(*mark, 140).copy_from_slice(pattern(seed, 140));
        }
        // SAFETY: both mappings outlive the transfer.
        let (receive, send) = unsafe {
            let receive = pair.recv.post(&[Part::new(target.start.cast(), SIZE, None)]).expect("irecv");
            (receive, pair.send.post(Part::new(source.start.cast(), SIZE, None)).expect("isend"))
        };
        let patience = Duration::from_secs(150);
        let sizes = std::thread::scope(|scope| {
            let end = &pair.send;
            let sender = scope.spawn(move || end.wait(&send, patience).expect("the send ends"));
            let received = pair.recv.wait(&receive, patience).expect("the receive ends");
            (sender.join().expect("no panic")[0], received[0])
        });
        assert_eq!(sizes, (i32::MAX, i32::MAX), "sizes that an int cannot hold saturate");
        for (seed, mark) in marks.iter().enumerate() {
            assert!(target.slice(*mark, 140) == pattern(seed, 140), "at {mark}");
        }
        // Between the marks there are zeros.
        for gap in marks.windows(2).map(|pair| (pair[0] + 140, pair[1])).filter(|(from, to)| from < to) {
            for at in (gap.0..gap.1).step_by((16 << 20) - 1) {
                assert_eq!(target.slice(at, 1)[0], 0, "at {at}");
            }
        }
    }
}
