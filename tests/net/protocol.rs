//! After the handshake every header is checked before a byte is placed. Here the peer holds the secret, so it is let
//! in, and then says what no Towline would: each time the connection ends on both sides, with one line that names the
//! peer, nothing is placed that should not be, and everybody else goes on working.

use std::net::TcpListener;

use crate::support::hostile::{Hostile, NAME, secret_of};
use crate::support::pair::Pair;
use crate::support::proxy::address_of;
use crate::support::{PATIENCE, child, context, eventually, part, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Handle, Memory, Part, SendComm};
use towline::session::frame::{EAGER, HEADER, Header, Type};
use towline::session::handshake::{Intent, Secret};
use towline::tcp::ack::Ack;

/// What an untouched byte of a buffer looks like.
const UNTOUCHED: u8 = 0xA5;

fn data(order: u64, offset: u64, length: u32, total: u64) -> Header {
    Header { message: order, order, offset, length, total, ..Header::of(Type::Data, 0) }
}

fn eager(order: u64, length: u32) -> Header {
    Header { flags: EAGER, ..data(order, 0, length, u64::from(length)) }
}

/// A message of 200,000 bytes, in chunks.
fn chunk(offset: u64, length: u32) -> Header {
    data(0, offset, length, 200_000)
}

/// A header with something else in it than [`Header`] can say, and a right check.
fn forged(header: Header, change: impl FnOnce(&mut [u8; HEADER])) -> Vec<u8> {
    let mut bytes = header.encode();
    change(&mut bytes);
    let check = crc32c::crc32c(&bytes[..HEADER - 4]);
    bytes[HEADER - 4..].copy_from_slice(&check.to_le_bytes());
    bytes.to_vec()
}

struct Violation {
    what: &'static str,
    /// What the victim says, and NCCL's code for it.
    line: &'static str,
    code: Code,
    /// How many bytes of the first buffer may be filled, from its start: those that came rightly.
    rightly: usize,
    /// What the hostile side says.
    says: Vec<(Vec<u8>, usize)>,
}

fn violation(what: &'static str, line: &'static str, says: Vec<Header>) -> Violation {
    let says = says.into_iter().map(|header| (header.encode().to_vec(), header.length as usize)).collect();
    Violation { what, line, code: Code::RemoteError, rightly: 0, says }
}

fn bytes(what: &'static str, line: &'static str, says: Vec<u8>) -> Violation {
    Violation { what, line, code: Code::RemoteError, rightly: 0, says: vec![(says, 0)] }
}

/// To a receiver that has posted 200,000 bytes with tag 0.
fn of_a_sender() -> Vec<Violation> {
    let tagged = |header: Header, tag| Header { tag, ..header };
    let mut all = vec![
        violation(
            "another epoch",
            "a frame of epoch 1 came on stream 0, which is in epoch 0",
            vec![Header { epoch: 1, ..eager(0, 100) }],
        ),
        violation("far ahead", "is not expected (next is 0)", vec![eager(1 << 40, 100)]),
        violation("the very last", "is not expected (next is 0)", vec![eager(u64::MAX, 100)]),
        bytes(
            "an offset between units",
            "a chunk of 128 bytes at 64 does not fit its message of 200000 bytes",
            forged(chunk(128, 128), |bytes| bytes[24] = 64),
        ),
        bytes(
            "more than the message",
            "a chunk of 4294967295 bytes at 128 does not fit its message of 200000 bytes",
            forged(chunk(128, 128), |bytes| bytes[4..8].fill(0xFF)),
        ),
        bytes(
            "an offset at the end of numbers",
            "does not fit its message",
            forged(chunk(128, 128), |bytes| bytes[24..32].copy_from_slice(&(u64::MAX - 127).to_le_bytes())),
        ),
        Violation {
            rightly: 65_536,
            ..violation("the same bytes", "came twice", vec![chunk(0, 65_536), chunk(0, 65_536)])
        },
        Violation {
            rightly: 65_536,
            ..violation("overlapping bytes", "came twice", vec![chunk(0, 65_536), chunk(65_408, 65_536)])
        },
        Violation {
            rightly: 65_536,
            ..violation(
                "another size",
                "came twice, or its size changed",
                vec![chunk(0, 65_536), data(0, 65_536, 128, 199_999)],
            )
        },
        Violation {
            rightly: 65_536,
            ..violation(
                "another number",
                "came twice, or its size changed",
                vec![chunk(0, 65_536), Header { message: 9, ..chunk(65_536, 128) }],
            )
        },
        Violation {
            code: Code::InvalidUsage,
            ..violation(
                "a message longer than its receive",
                "a message of 200001 bytes with tag 0 met a receive of 200000 bytes",
                vec![data(0, 0, 128, 200_001)],
            )
        },
        violation(
            "a part of an eager message",
            "an eager message was split or is too long",
            vec![Header { flags: EAGER, ..data(0, 0, 128, 256) }],
        ),
        violation("a long eager message", "an eager message was split or is too long", vec![eager(0, 65_537)]),
        violation(
            "a message that nobody cleared",
            "message 0 with tag 5 came without clear-to-send",
            vec![tagged(data(0, 0, 70_000, 70_000), 5)],
        ),
        violation(
            "more early messages than the window holds",
            "the peer sent more early messages than it had credit for",
            (0..12).map(|order| tagged(eager(order, 65_536), 5)).collect(),
        ),
        violation(
            "empty early messages without end",
            "early messages than",
            (0..4000).map(|order| tagged(eager(order, 0), 5)).collect(),
        ),
        bytes("a flipped bit", "a frame header arrived damaged", {
            let mut bytes = chunk(0, 128).encode();
            bytes[9] ^= 4;
            bytes.to_vec()
        }),
        bytes("an unknown type", "a frame of unknown type 99 arrived", forged(chunk(0, 0), |bytes| bytes[0] = 99)),
        bytes(
            "a question with something behind it",
            "a Query frame carries 5 bytes",
            forged(Header::of(Type::Query, 0), |bytes| bytes[4] = 5),
        ),
        bytes(
            "a reason without end",
            "a Fail frame carries 4294967295 bytes",
            forged(Header::of(Type::Fail, 0), |bytes| bytes[4..8].fill(0xFF)),
        ),
        violation(
            "a question about the far future",
            "is not expected (next is 0)",
            vec![Header { order: 1 << 40, total: 1, ..Header::of(Type::Query, 0) }],
        ),
        Violation {
            code: Code::InvalidUsage,
            ..violation(
                "a question about too much",
                "met a receive of 200000 bytes",
                vec![Header { total: 200_001, ..Header::of(Type::Query, 0) }],
            )
        },
        violation(
            "a fence for a stream that cannot be",
            "a fence names stream 16 in epoch 0, which cannot be",
            vec![Header { order: 16, ..Header::of(Type::Fence, 0) }],
        ),
        violation(
            "a fence for an epoch that cannot be",
            "a fence names stream 0 in epoch 65536, which cannot be",
            vec![Header { offset: 65_536, ..Header::of(Type::Fence, 0) }],
        ),
    ];
    for kind in [Type::Ack, Type::Acks, Type::Clear, Type::Fenced] {
        let line = match kind {
            Type::Ack => "the sending side sent a Ack frame",
            Type::Acks => "the sending side sent a Acks frame",
            Type::Clear => "the sending side sent a Clear frame",
            _ => "the sending side sent a Fenced frame",
        };
        all.push(violation("what only receivers say", line, vec![Header::of(kind, 0)]));
    }
    all
}

/// One line about it that names the peer; the code that the request ended with is `code`.
fn is_told(log: &Capture, from: usize, what: &str, line: &str) {
    let mine = || log.records().into_iter().skip(from).filter(|it| it.is_warning() && it.text.contains(NAME));
    eventually(&format!("{what}: a warning that says \"{line}\""), PATIENCE, || {
        mine().any(|record| record.text.contains(line)).then_some(())
    });
}

/// A sender whose peer is a hostile receiver, where that takes further calls, and the handle that led there.
fn hostile_receiver(context: &Context) -> (Hostile, SendComm, TcpListener, Handle) {
    let (_listener, mut handle) = context.listen(0).expect("listen");
    let trap = Hostile::listen(&mut handle);
    let (hostile, send) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| Hostile::accept(&trap, &handle));
        let send = context.connect_within(0, &mut handle.clone(), PATIENCE).expect("it holds the secret");
        (accepting.join().expect("a handshake"), send)
    });
    (hostile, send, trap, handle)
}

fn bystander(context: &Context) -> Pair {
    Pair::connect(context, 0).expect("a connection")
}

fn still_works(pair: &Pair, what: &str) {
    assert!(pair.transfer(pattern(3, 100_000)).expect("a transfer") == pattern(3, 100_000), "{what}");
}

#[test]
fn a_sender_that_breaks_the_protocol_ends_its_connection_and_places_nothing() {
    child::alone("protocol::a_sender_that_breaks_the_protocol_ends_its_connection_and_places_nothing", &[], || {
        let _watchdog = watchdog(120);
        let log = Capture::start();
        let context = context(ApiVersion::V12);
        let bystander = bystander(&context);
        for violation in of_a_sender() {
            let Violation { what, line, code, rightly, says } = violation;
            let before = log.records().len();
            let (listener, handle) = context.listen(0).expect("listen");
            let mut hostile = Hostile::connect(&handle);
            let recv = listener.accept_within(PATIENCE).expect("it holds the secret");
            let mut target = Memory::new(200_000);
            target.bytes_mut().fill(UNTOUCHED);
            // SAFETY: the memory outlives the connection.
            let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
            assert_eq!(hostile.await_frame(Type::Clear).0.total, 200_000, "{what}");
            for (header, payload) in says {
                hostile.say_bytes(&header);
                hostile.say_bytes(&vec![0x11; payload]);
            }
            let ended = eventually(what, PATIENCE, || recv.test(&request).err());
            assert_eq!(ended, code, "{what}");
            is_told(&log, before, what, line);
            assert!(target.bytes()[rightly..].iter().all(|byte| *byte == UNTOUCHED), "{what}: a byte was placed");
            assert!(target.guards_intact(), "{what}");
            let (_, reason) = hostile.await_frame(Type::Fail);
            assert!(!reason.is_empty(), "{what}: the peer is told why");
            recv.close().expect("close");
            still_works(&bystander, what);
        }
    });
}

#[test]
fn a_receiver_that_breaks_the_protocol_ends_its_connection() {
    let ack = |frames, credit| Header { offset: frames, total: credit, ..Header::of(Type::Ack, 0) };
    let acks = |counts: &[u64]| {
        let mut bytes = Vec::new();
        Ack::of_one(0, counts[0], 0).of_all(counts.iter().copied()).encode_to(&mut bytes);
        bytes
    };
    let clear = |order, total| Header { order, total, ..Header::of(Type::Clear, 0) };
    let fenced =
        |stream, epoch, frames| Header { order: stream, offset: epoch, total: frames, ..Header::of(Type::Fenced, 0) };
    // To a sender whose first message, a short one, has been heard, and whose second waits for its clear-to-send.
    let cases: Vec<(&str, &str, Code, Vec<Vec<u8>>)> = vec![
        ("too many frames", "the peer acknowledged 2 frames of stream 0, of which 1 were sent", Code::RemoteError, {
            vec![ack(2, 0).encode().into()]
        }),
        ("ever fewer frames", "the peer acknowledged 0 frames of stream 0, of which 1 were sent", Code::RemoteError, {
            vec![ack(1, 0).encode().into(), ack(0, 0).encode().into()]
        }),
        ("frames of a stream that is not there", "an unknown stream was acknowledged", Code::RemoteError, {
            vec![acks(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])]
        }),
        ("counts without end", "a Acks frame carries 136 bytes", Code::RemoteError, {
            vec![Header { length: 17 * 8, ..Header::of(Type::Acks, 0) }.encode().into()]
        }),
        ("another epoch", "an acknowledgement came for an earlier epoch of its stream", Code::RemoteError, {
            vec![Header { epoch: 7, ..ack(1, 0) }.encode().into()]
        }),
        ("credit out of nothing", "the peer returned more credit than it was owed", Code::RemoteError, {
            vec![ack(1, 1 << 40).encode().into()]
        }),
        ("receives without end", "the peer posted more receives than a connection can hold", Code::RemoteError, {
            vec![clear(1 << 40, 8).encode().into()]
        }),
        ("a receive that is too small", "met a receive of 99999 bytes", Code::InvalidUsage, {
            vec![clear(1, 99_999).encode().into()]
        }),
        ("the fence of no stream", "a fence names stream 16 in epoch 0, which cannot be", Code::RemoteError, {
            vec![fenced(16, 0, 0).encode().into()]
        }),
        ("chunks in the wrong direction", "the receiving side sent a Data frame", Code::RemoteError, {
            vec![eager(0, 0).encode().into()]
        }),
        ("fences in the wrong direction", "the receiving side sent a Fence frame", Code::RemoteError, {
            vec![Header::of(Type::Fence, 0).encode().into()]
        }),
        ("an unknown type", "a frame of unknown type 0 arrived", Code::RemoteError, {
            vec![forged(ack(1, 0), |bytes| bytes[0] = 0)]
        }),
        ("a flipped bit", "a frame header arrived damaged", Code::RemoteError, {
            let mut bytes = ack(1, 0).encode();
            bytes[30] ^= 1;
            vec![bytes.to_vec()]
        }),
    ];
    child::alone("protocol::a_receiver_that_breaks_the_protocol_ends_its_connection", &[], || {
        let _watchdog = watchdog(120);
        let log = Capture::start();
        let context = context(ApiVersion::V12);
        let bystander = bystander(&context);
        for (what, line, code, says) in cases {
            let before = log.records().len();
            let (mut hostile, send, _trap, _) = hostile_receiver(&context);
            // SAFETY: the pattern is static.
            let requests =
                [100, 100_000].map(|size| unsafe { send.post(part(pattern(1, size), None)) }.expect("isend"));
            let (first, payload) = hostile.await_frame(Type::Data);
            assert!(first.order == 0 && payload == pattern(1, 100), "{what}");
            for bytes in &says {
                hostile.say_bytes(bytes);
            }
            let ended = eventually(what, PATIENCE, || send.test(&requests[1]).err());
            assert_eq!(ended, code, "{what}");
            is_told(&log, before, what, line);
            let (_, reason) = hostile.await_frame(Type::Fail);
            assert!(!reason.is_empty(), "{what}: the peer is told why");
            send.close().expect("close");
            still_works(&bystander, what);
        }
    });
}

#[test]
fn a_right_proof_with_a_wrong_stream_is_refused_and_disturbs_nobody() {
    child::alone("protocol::a_right_proof_with_a_wrong_stream_is_refused_and_disturbs_nobody", &[], || {
        let _watchdog = watchdog(60);
        let log = Capture::start();
        let context = context(ApiVersion::V12);
        let bystander = bystander(&context);
        let (listener, handle) = context.listen(0).expect("listen");
        let mut hostile = Hostile::connect(&handle);
        let recv = listener.accept_within(PATIENCE).expect("it holds the secret");
        for (stream, epoch) in [(16, 1), (99, 1), (u16::MAX, 1), (0, 0), (0, u16::MAX), (3, 0)] {
            assert!(hostile.join(stream, epoch).is_none(), "stream {stream} in epoch {epoch}");
        }
        let further = hostile.join(3, 1).expect("a stream that may join");
        assert!(hostile.join(3, 1).is_none(), "each epoch joins once");
        // The secret is not the connection's key, and the key of one is not that of another.
        let intent = Intent::Join { connection: hostile.connection, stream: 4, epoch: 1 };
        for wrong in [secret_of(&handle), Secret::random().expect("random bytes")] {
            assert!(Hostile::dial(address_of(&handle), &wrong, intent).is_none());
        }
        let other = Intent::Join { connection: hostile.connection ^ 1, stream: 4, epoch: 1 };
        assert!(Hostile::dial(address_of(&handle), &hostile.key, other).is_none());
        let nobody = Intent::Connect { listener: 1 };
        assert!(Hostile::dial(address_of(&handle), &secret_of(&handle), nobody).is_none());
        assert!(log.contains("is not one that may join now"), "{:?}", log.records());
        // The connection never noticed.
        let target = Memory::new(100);
        // SAFETY: the memory outlives the request.
        let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        hostile.say(eager(0, 100), pattern(1, 100));
        recv.wait(&request, PATIENCE).expect("it arrives");
        assert!(target.bytes() == pattern(1, 100));
        drop(further);
        still_works(&bystander, "strangers at the join");
    });
}

/// A sender opens further streams as soon as it has the welcome. Its confirmation is under way on the first one then,
/// and may be lost there and come later: the first stream is one nevertheless.
#[test]
fn a_further_stream_that_comes_before_the_confirmation_on_the_first_one_does_not_take_its_place() {
    let name = "protocol::a_further_stream_that_comes_before_the_confirmation_on_the_first_one_does_not_take_its_place";
    child::alone(name, &[], || {
        let _watchdog = watchdog(60);
        let context = context(ApiVersion::V12);
        let (listener, handle) = context.listen(0).expect("listen");
        let mut first = Hostile::welcomed(&handle);
        let further = first.join(1, 1).expect("a stream that may join");
        let recv = listener.accept_within(PATIENCE).expect("that shows that the sender was welcomed");
        first.confirm();
        let target = Memory::new(100);
        for round in 0..3 {
            // SAFETY: the memory outlives the request.
            let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
            first.say(eager(round, 100), pattern(round as usize, 100));
            recv.wait(&request, PATIENCE).expect("it arrives");
            assert!(target.bytes() == pattern(round as usize, 100));
        }
        drop(further);
        // But one whose first stream has come back over another socket has that.
        let mut first = Hostile::welcomed(&handle);
        let mut again = first.join(0, 1).expect("the first stream in its next epoch");
        let recv = listener.accept_within(PATIENCE).expect("that shows it as well");
        first.confirm();
        assert!(first.receive().is_none(), "the first epoch is over");
        // SAFETY: the memory outlives the request.
        let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
        again.say(Header { epoch: 1, ..eager(0, 100) }, pattern(7, 100));
        recv.wait(&request, PATIENCE).expect("it arrives");
        assert!(target.bytes() == pattern(7, 100));
    });
}

/// A call says that a stream has ended at the receiver. It is believed from the holder of the connection's key, about
/// the present epoch of a stream, and costs no more than a connection again.
#[test]
fn a_call_is_believed_from_the_holder_of_the_key_only() {
    child::alone("protocol::a_call_is_believed_from_the_holder_of_the_key_only", &[], || {
        let _watchdog = watchdog(60);
        let context = context(ApiVersion::V12);
        let (mut hostile, send, trap, handle) = hostile_receiver(&context);
        let [lifeline] = hostile.rails[..] else { panic!("one rail: {:?}", hostile.rails) };
        let (connection, key) = (hostile.connection, hostile.key.clone());
        let call = |stream, epoch| Intent::Call { connection, stream, epoch };
        for wrong in [secret_of(&handle), Secret::random().expect("random bytes")] {
            assert!(Hostile::dial(lifeline, &wrong, call(0, 0)).is_none());
        }
        let other = Intent::Call { connection: connection ^ 1, stream: 0, epoch: 0 };
        assert!(Hostile::dial(lifeline, &key, other).is_none());
        for (stream, epoch) in [(0, 1), (1, 0), (3, 7), (16, 0), (u16::MAX, 0), (0, u16::MAX)] {
            Hostile::dial(lifeline, &key, call(stream, epoch)).expect("it is answered");
        }
        // Nothing has come of these.
        // SAFETY: the pattern is static.
        let sent = unsafe { send.post(part(pattern(1, 100), None)) }.expect("isend");
        assert_eq!(hostile.await_frame(Type::Data).1, pattern(1, 100));
        send.wait(&sent, PATIENCE).expect("it was copied");
        Hostile::dial(lifeline, &key, call(0, 0)).expect("it is answered");
        assert!(hostile.receive().is_none(), "the stream that was called for is given up");
        trap.accept().expect("and connected again");
        // Or the close would wait for it.
        drop(trap);
    });
}
