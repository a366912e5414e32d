//! On an abort NCCL takes back its buffers and frees them with requests in flight, and only then closes the
//! connections. After `deregMr` has returned no thread of Towline touches that memory: here it cannot be touched, so
//! SIGSEGV kills the process of a thread that does.

use std::ptr::null_mut;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::pair::Pair;
use crate::support::{PATIENCE, child, context, eventually, is_over_rdma, key_file, outcome, part, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Memory, Mr, PTR_HOST, Part};

/// Fits a header's input buffer, needs none of the workers, needs all of them.
const SIZES: [usize; 3] = [8, 4 << 10, 1 << 20];

/// Memory that is given back to the system while its addresses stay taken.
struct Mapped {
    start: *mut libc::c_void,
    len: usize,
}

// SAFETY: addresses, which only the plugin follows, and what `of` writes before any other thread has them.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(len: usize) -> Self {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping anywhere.
        let start = unsafe { libc::mmap(null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "mapping {len} bytes");
        Self { start, len }
    }

    fn of(bytes: &[u8]) -> Self {
        let mapped = Self::new(bytes.len());
        // SAFETY: just mapped, and not shared yet.
        unsafe { slice::from_raw_parts_mut(mapped.start.cast(), bytes.len()) }.copy_from_slice(bytes);
        mapped
    }

    fn start(&self) -> *mut libc::c_void {
        self.start
    }

    fn part<'a>(&self, mr: Option<&'a Mr>) -> Part<'a> {
        Part::new(self.start, self.len, mr)
    }

    /// As `munmap`, and no other mapping gets the addresses.
    fn unmap(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: over our own mapping, which only the plugin could still touch: that is what this test looks for.
        let start = unsafe { libc::mmap(self.start, self.len, libc::PROT_NONE, flags, -1, 0) };
        assert_eq!(start, self.start);
    }
}

/// Bytes as in NCCL's protocol LL128, whose lines end with the number of the step: the receiver places them by itself.
fn lines(len: usize) -> Vec<u8> {
    let mut bytes = pattern(3, len).to_vec();
    bytes
        .chunks_mut(128)
        .filter(|line| line.len() == 128)
        .for_each(|line| line[120..].copy_from_slice(&7_u64.to_le_bytes()));
    bytes
}

fn connected() -> Pair {
    let pair = Pair::connect(&context(ApiVersion::V12), 0).expect("a connection");
    // So that further streams are there.
    let (from, to) = (pattern(1, 1 << 20), Memory::new(1 << 20));
    // SAFETY: both outlive their requests.
    let (sent, received) = unsafe { (pair.send.post(part(from, None)), pair.recv.post(&[Part::all(&to, None)])) };
    let (sent, received) = (sent.expect("isend"), received.expect("irecv"));
    pair.recv.wait(&received, PATIENCE).expect("it comes");
    pair.send.wait(&sent, PATIENCE).expect("it leaves");
    pair
}

/// The receiving side takes its memory back, and then the message comes.
fn receiver_withdraws(bytes: &[u8], group: usize) {
    let pair = connected();
    let targets: Vec<Mapped> = (0..group).map(|_| Mapped::new(bytes.len())).collect();
    let register = |to: &Mapped| pair.recv.reg_mr(to.start, to.len, PTR_HOST).expect("regMr");
    let mut mrs: Vec<Mr> = targets.iter().map(register).collect();
    let parts: Vec<Part<'_>> = targets.iter().zip(&mrs).map(|(to, mr)| to.part(Some(mr))).collect();
    // SAFETY: until its registration ends the memory is there, and no longer is what this test is about.
    let request = unsafe { pair.recv.post(&parts) }.expect("irecv");
    assert!(pair.recv.test(&request).expect("it lives").is_none());
    mrs.pop().expect("one at least").dereg().expect("deregMr");
    targets[group - 1].unmap();
    assert_eq!(pair.recv.test(&request).expect_err("its memory is gone"), Code::RemoteError);
    for mr in mrs {
        mr.dereg().expect("deregMr");
    }
    // The peer's next data finds no receiver: the peer is notified of the failure, or has left before.
    for _ in 0..group {
        // SAFETY: the bytes outlive the connection.
        let request = unsafe { pair.send.post(part(bytes, None)) }.expect("the call is accepted");
        // Its result does not matter: short ones may be done before the failure is heard.
        let _ = outcome(|it| pair.send.test(it), request, PATIENCE).expect("an end");
    }
    let fails = || {
        // SAFETY: as above.
        let request = unsafe { pair.send.post(part(bytes, None)) }.expect("the call is accepted");
        outcome(|it| pair.send.test(it), request, PATIENCE).expect("an end").err()
    };
    assert_eq!(eventually("the sender is told", PATIENCE, fails), Code::RemoteError);
    pair.recv.close().expect("close");
    pair.send.close().expect("close");
}

/// The sending side takes its memory back, and then the receive is posted.
fn sender_withdraws(bytes: &[u8]) {
    let pair = connected();
    let source = Mapped::of(bytes);
    let mr = pair.send.reg_mr(source.start, source.len, PTR_HOST).expect("regMr");
    // SAFETY: as above.
    let request = unsafe { pair.send.post(source.part(Some(&mr))) }.expect("isend");
    assert!(pair.send.test(&request).expect("it lives").is_none(), "its receive is late");
    mr.dereg().expect("deregMr");
    source.unmap();
    assert_eq!(pair.send.test(&request).expect_err("its memory is gone"), Code::RemoteError);
    let target = Memory::new(bytes.len());
    // SAFETY: the target outlives the connection.
    let request = unsafe { pair.recv.post(&[Part::all(&target, None)]) }.expect("the call is accepted");
    let end = outcome(|it| pair.recv.test(it), request, PATIENCE).expect("an end");
    assert_eq!(end.expect_err("the sender gave up"), Code::RemoteError);
    pair.send.close().expect("close");
    pair.recv.close().expect("close");
}

/// Both sides move, and one of them takes its memory back somewhere amid that.
fn amid_transfers(sender: bool, round: usize) {
    const MESSAGES: usize = 8;
    const SIZE: usize = 1 << 20;
    let pair = connected();
    let sources: Vec<Mapped> = (0..MESSAGES).map(|seed| Mapped::of(pattern(seed, SIZE))).collect();
    let targets: Vec<Mapped> = (0..MESSAGES).map(|_| Mapped::new(SIZE)).collect();
    let comm = |all: &[Mapped]| -> Vec<Mr> {
        let register = |at: &Mapped| {
            if sender {
                pair.send.reg_mr(at.start, at.len, PTR_HOST)
            } else {
                pair.recv.reg_mr(at.start, at.len, PTR_HOST)
            }
        };
        all.iter().map(|at| register(at).expect("regMr")).collect()
    };
    let withdrawn = if sender { &sources } else { &targets };
    let mrs = comm(withdrawn);
    for (from, to) in sources.iter().zip(&targets) {
        // SAFETY: as above.
        unsafe { (pair.recv.post(&[to.part(None)]).expect("irecv"), pair.send.post(from.part(None)).expect("isend")) };
    }
    std::thread::sleep(Duration::from_micros(137 * round as u64));
    for (mr, at) in mrs.into_iter().zip(withdrawn) {
        mr.dereg().expect("deregMr");
        at.unmap();
    }
    // As in NCCL's abort: what was in flight is not tested.
    let Pair { send, recv, .. } = pair;
    std::thread::scope(|scope| {
        scope.spawn(|| send.close().expect("close"));
        recv.close().expect("close");
    });
}

#[test]
fn after_a_registration_has_ended_nobody_touches_its_memory() {
    let name = "deregister::after_a_registration_has_ended_nobody_touches_its_memory";
    let _watchdog = watchdog(160);
    let (_dir, key) = key_file();
    let plain = [("TOWLINE_STREAMS", "3")];
    let checked = [("TOWLINE_STREAMS", "3"), ("TOWLINE_CHECKSUM", "1")];
    let sealed = [("TOWLINE_STREAMS", "3"), ("TOWLINE_KEY_FILE", key.to_str().expect("UTF-8"))];
    let alone = [("TOWLINE_STREAMS", "1")];
    let once = [("TOWLINE_RECOVERY", "0"), ("TOWLINE_STREAMS", "1")];
    let over_sockets: &[&[(&str, &str)]] = &[&plain, &checked, &sealed, &alone, &once];
    // These settings are of sockets.
    let all: &[&[(&str, &str)]] = if is_over_rdma() { &[&[]] } else { over_sockets };
    for variables in all {
        child::alone(name, variables, || {
            for size in SIZES {
                receiver_withdraws(pattern(2, size), 1);
                receiver_withdraws(&lines(size), 1);
            }
            if !is_over_rdma() {
                receiver_withdraws(pattern(2, 4 << 10), 8);
            }
            sender_withdraws(pattern(2, 1 << 20));
            sender_withdraws(&lines(1 << 20));
            for round in 0..10 {
                amid_transfers(round % 2 == 0, round);
            }
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// Buffers come and go while others are in use, from other threads: that disturbs nothing, nor does the end of a
/// registration whose requests have ended.
#[test]
fn registrations_without_an_outstanding_request_end_without_disturbing_the_connection() {
    let _watchdog = watchdog(60);
    let pair = connected();
    let (used, other) = (Mapped::new(1 << 20), Mapped::new(1 << 20));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                for mr in [
                    pair.send.reg_mr(other.start(), other.len, PTR_HOST).expect("regMr"),
                    pair.recv.reg_mr(other.start(), other.len, PTR_HOST).expect("regMr"),
                ] {
                    mr.dereg().expect("deregMr");
                }
            }
        });
        for round in 0..200 {
            let size = SIZES[round % 3];
            let from = Mapped::of(pattern(round, size));
            let sends = pair.send.reg_mr(from.start, from.len, PTR_HOST).expect("regMr");
            let receives = pair.recv.reg_mr(used.start, used.len, PTR_HOST).expect("regMr");
            // SAFETY: both outlive their requests.
            let received = unsafe { pair.recv.post(&[used.part(Some(&receives))]) }.expect("irecv");
            // SAFETY: as above.
            let sent = unsafe { pair.send.post(from.part(Some(&sends))) }.expect("isend");
            assert_eq!(pair.recv.wait(&received, PATIENCE).expect("it comes")[0] as usize, size);
            pair.send.wait(&sent, PATIENCE).expect("it leaves");
            sends.dereg().expect("deregMr");
            receives.dereg().expect("deregMr");
            from.unmap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    pair.send.close().expect("close");
    pair.recv.close().expect("close");
}

/// NCCL's own transports accept `isend` and `irecv` after the peer has aborted, and let `test` say so; and one abort is
/// one warning for each peer, however many connections end with it.
#[test]
fn after_the_peers_abort_calls_are_accepted_and_the_peer_is_warned_of_once() {
    let name = "deregister::after_the_peers_abort_calls_are_accepted_and_the_peer_is_warned_of_once";
    let _watchdog = watchdog(60);
    child::alone(name, &[], || {
        let lines = Capture::start();
        let context = context(ApiVersion::V12);
        let pairs: Vec<Pair> = (0..6).map(|_| Pair::connect(&context, 0).expect("a connection")).collect();
        let target = Memory::new(1 << 20);
        let bytes = pattern(1, 1 << 20);
        let mut ends = Vec::new();
        for (number, Pair { send, recv, .. }) in pairs.into_iter().enumerate() {
            // One side aborts: something is in flight there.
            if number % 2 == 0 {
                // SAFETY: the target outlives the connection.
                unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
                recv.close().expect("close");
                ends.push((Some(send), None));
            } else {
                // SAFETY: the bytes are static.
                unsafe { send.post(part(bytes, None)) }.expect("isend");
                send.close().expect("close");
                ends.push((None, Some(recv)));
            }
        }
        for end in ends {
            let code = match end {
                (Some(send), _) => eventually("the abort is heard", PATIENCE, || {
                    // SAFETY: the bytes are static.
                    let request = unsafe { send.post(part(&bytes[..8], None)) }.expect("isend is accepted");
                    outcome(|it| send.test(it), request, PATIENCE).expect("an end").err()
                }),
                (_, Some(recv)) => eventually("the abort is heard", PATIENCE, || {
                    // SAFETY: the target outlives the connection.
                    let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv is accepted");
                    outcome(|it| recv.test(it), request, PATIENCE).expect("an end").err()
                }),
                _ => unreachable!("one of them"),
            };
            assert_eq!(code, Code::RemoteError);
        }
        // The environment of a test run may earn warnings of its own, about variables.
        let mut warnings: Vec<String> =
            lines.records().into_iter().filter(|line| line.is_warning()).map(|line| line.text).collect();
        warnings.retain(|text| !text.contains("is not a variable of Towline"));
        assert!(warnings.len() == 1 && warnings[0].contains("transfers in flight"), "{warnings:#?}");
    });
}
