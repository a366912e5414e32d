//! What the parts of a transfer cost by themselves: headers, the two protocol cores, request slots, the hand-over to a
//! worker. No socket and no byte of payload is involved.
//!
//! Run with `cargo bench --bench parts`.

use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, Throughput};
use towline::engine::poller::{Poller, Progress, Source};
use towline::engine::request::RequestSlots;
use towline::os::error::Error;
use towline::session::frame::{Header, Type};
use towline::session::seal::Seal;
use towline::session::seal::agreement::{Keys, StreamKey};
use towline::session::wire::Piece;
use towline::tcp::recv_core::{End, Part, Posted, RecvCore};
use towline::tcp::send_core::SendCore;

fn framing(c: &mut Criterion) {
    let header = Header {
        length: 512 << 10,
        message: 77,
        order: 76,
        offset: 1 << 20,
        total: 4 << 20,
        tag: 3,
        ..Header::of(Type::Data, 1)
    };
    let bytes = header.encode();
    let mut group = c.benchmark_group("framing");
    group.bench_function("encode a header", |b| b.iter(|| black_box(&header).encode()));
    group.bench_function("decode a header", |b| b.iter(|| Header::decode(black_box(&bytes)).unwrap()));
    group.finish();
}

/// What checksums and encryption add to a chunk: making it, and passing it through the bounce buffer on the other side.
fn protection(c: &mut Criterion) {
    let mut group = c.benchmark_group("protection");
    for length in [64_usize, 64 << 10, 512 << 10] {
        let payload = vec![0x5A; length];
        let total = length as u64;
        let header = Header { length: length as u32, total, ..Header::of(Type::Data, 1) }.encode();
        for mode in ["checksum", "encryption"] {
            let seal = || {
                let key = || StreamKey::from_bytes([7; 32]);
                let encrypted = Seal::Encrypted(Keys { send: key(), receive: key() });
                if mode == "checksum" { Seal::Checksum } else { encrypted }.sides().expect("protected")
            };
            group.throughput(Throughput::Bytes(total));
            let mut sides = seal();
            group.bench_function(format!("seal {length} bytes, {mode}"), |b| {
                b.iter(|| {
                    // SAFETY: the payload outlives the chunk.
                    let sealed = unsafe { sides.sealer.chunk(header, Piece::of(&payload)) };
                    let count = black_box(sealed.length());
                    sides.sealer.sent(sealed);
                    count
                });
            });
            let mut sides = seal();
            group.bench_function(format!("seal, copy and open {length} bytes, {mode}"), |b| {
                b.iter(|| {
                    // SAFETY: the payload outlives the chunk.
                    let sealed = unsafe { sides.sealer.chunk(header, Piece::of(&payload)) };
                    for piece in sealed.rest(0) {
                        // SAFETY: as above.
                        let mut rest = unsafe { piece.bytes() };
                        while !rest.is_empty() {
                            let room = sides.intake.room();
                            let count = room.len().min(rest.len());
                            room[..count].copy_from_slice(&rest[..count]);
                            rest = &rest[count..];
                            sides.intake.filled(count);
                            while let Some(item) = sides.intake.take().expect("undamaged") {
                                black_box(&item);
                            }
                        }
                    }
                    sides.sealer.sent(sealed);
                });
            });
        }
    }
    group.finish();
}

/// Both ends of a connection, joined without a network.
struct Cores {
    send: SendCore,
    recv: RecvCore,
    streams: usize,
    done: Vec<usize>,
}

impl Cores {
    fn new(streams: usize) -> Self {
        let (mut send, mut recv) = (SendCore::new(true), RecvCore::default());
        for stream in 0..streams {
            send.stream_up(stream, 0);
            recv.stream_up(stream, 0);
        }
        Self { send, recv, streams, done: Vec::with_capacity(8) }
    }

    /// One message from posting to its end on both sides; says how many chunks it took.
    fn message(&mut self, length: u64) -> usize {
        let part = Part { slot: 0, part: 0 };
        if let Posted::Announce(clear) = self.recv.post(0, length, part).unwrap() {
            self.send.clear_to_send(clear.tag, clear.order, clear.total).unwrap();
        }
        self.send.post(length, 0, false).unwrap();
        let (mut chunks, mut whole) = (0, false);
        while !whole {
            for stream in 0..self.streams {
                let Some(chunk) = self.send.next_chunk(stream) else { continue };
                chunks += 1;
                self.send.written(stream);
                self.recv.begin(stream, &chunk.header).unwrap();
                whole |= matches!(self.recv.end(stream), End::Complete(..));
                if let Some(ack) = self.recv.take_ack(stream, false) {
                    self.send.acknowledge_all(ack.counts(), &mut self.done).unwrap();
                    self.send.acknowledge(stream, ack.header.offset, ack.header.total, &mut self.done).unwrap();
                }
            }
        }
        self.done.clear();
        chunks
    }
}

fn scheduling(c: &mut Criterion) {
    let mut group = c.benchmark_group("scheduling, both cores");
    for (name, streams, length) in [
        ("a short message on the first stream", 1, 1 << 10),
        ("1 MiB over one stream", 1, 1 << 20),
        ("1 MiB over eight streams", 9, 1 << 20),
    ] {
        let mut cores = Cores::new(streams);
        let chunks = cores.message(length);
        group.bench_function(format!("{name}: {chunks} chunks"), |b| b.iter(|| cores.message(length)));
    }
    group.finish();
}

fn slots(c: &mut Criterion) {
    let slots = RequestSlots::new();
    let mut group = c.benchmark_group("request slots");
    group.bench_function("take, complete and finish", |b| {
        b.iter(|| {
            let ticket = slots.take(1).unwrap();
            slots.complete_part(ticket.slot, 0, 4096);
            slots.finish(ticket).unwrap()
        });
    });
    group.bench_function("the same with eight parts", |b| {
        b.iter(|| {
            let ticket = slots.take(8).unwrap();
            (0..8).for_each(|part| slots.complete_part(ticket.slot, part, 4096));
            slots.finish(ticket).unwrap()
        });
    });
    group.bench_function("slots of a new connection", |b| {
        b.iter_batched(|| (), |()| RequestSlots::new(), BatchSize::SmallInput);
    });
    group.finish();
}

/// Counts how often it was polled.
#[derive(Default)]
struct Counting(AtomicU64);

impl Source for Counting {
    fn poll(&self) -> Progress {
        self.0.fetch_add(1, Ordering::Release);
        Progress { moved: true, again: None }
    }

    fn fail(&self, error: Error) {
        panic!("{error}");
    }
}

/// From a kick to the poll in the worker, `pause` after the last one.
fn hand_over(c: &mut Criterion, name: &str, looks: bool, pause: Duration) {
    let poller = Poller::new(1, looks);
    let source = Arc::new(Counting::default());
    let registration = poller.worker(0).unwrap().register(source.clone(), None).unwrap();
    c.benchmark_group("hand-over to a worker").bench_function(name, |b| {
        b.iter_custom(|count| {
            let mut total = Duration::ZERO;
            for _ in 0..count {
                if !pause.is_zero() {
                    std::thread::sleep(pause);
                }
                let before = source.0.load(Ordering::Acquire);
                let start = Instant::now();
                registration.kick();
                while source.0.load(Ordering::Acquire) == before {
                    spin_loop();
                }
                total += start.elapsed();
            }
            total
        });
    });
}

fn main() {
    let mut c = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    framing(&mut c);
    protection(&mut c);
    scheduling(&mut c);
    slots(&mut c);
    // The cores of a process decide whether a worker stays awake for a while.
    hand_over(&mut c, "that sleeps", false, Duration::from_micros(300));
    hand_over(&mut c, "that is still awake", true, Duration::ZERO);
    c.final_summary();
}
