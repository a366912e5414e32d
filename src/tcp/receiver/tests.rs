//! Tests of what a thread does with a stream that it holds.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::*;
use crate::engine::schedule::constants::{ACK_EVERY, CHUNK_MAX, FEW, HOT};
use crate::os::config::Config;
use crate::os::error::Error;
use crate::session::frame::{EAGER, HEADER, POLLED, PROMPT, Type};
use crate::session::loopback;
use crate::tcp::limits::EAGER_MAX;
use crate::tcp::stream::{READ, Step};

/// Connects stream `index`. Returns where its peer reads and writes.
fn join(conn: &Arc<RecvConn>, index: usize) -> TcpStream {
    let (ours, theirs) = loopback::sockets();
    let registration = conn.register(index, &ours).expect("it is watched");
    conn.add_stream(index, index as u16, registration, ours, Seal::Plain);
    theirs
}

/// NCCL has its buffers back when the connection is closed. A stream that was on its way then must not fill them.
#[test]
fn a_stream_that_joins_when_the_connection_has_been_closed_is_not_used() {
    let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
    let _first = join(&conn, 0);
    conn.requests.take(1).expect("a slot is free");
    conn.close();
    // As a handshake would that had ended by then.
    let _late = join(&conn, 1);
    assert!(conn.streams[1].with_io(|_| ()).is_none() && conn.health.live() == 0);
}

/// Workers poll longer only for what a GPU waits for: a few short messages.
#[test]
fn workers_poll_longer_for_few_short_messages() {
    let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
    let _first = join(&conn, 0);
    let mut theirs = join(&conn, 1);
    let mut target = vec![0_u8; CHUNK_MAX as usize];
    for _ in 0..=FEW + 1 {
        // SAFETY: the target lives longer than the connection, and there is no profiler.
        let posted = unsafe { conn.irecv(&[(target.as_mut_ptr(), target.len(), 0)], &[std::ptr::null_mut()]) };
        posted.expect("it lives").expect("a slot is free");
    }
    // The first messages stay incomplete.
    let short = CHUNK_MAX - 1;
    for (order, total, longer) in
        [(0, short, true), (FEW - 1, short, true), (FEW, short, false), (1, CHUNK_MAX, false), (2, short, true)]
    {
        let (order, before) = (order as u64, conn.counters().bytes.load(Ordering::Relaxed));
        let header = Header { length: 8, total, message: order, order, ..Header::of(Type::Data, 1) };
        theirs.write_all(&[&header.encode()[..], &[7; 8]].concat()).expect("it lives");
        loopback::wait_until("it does not come", || {
            conn.run(1, READ);
            conn.counters().bytes.load(Ordering::Relaxed) > before
        });
        assert_eq!(conn.hot() > HOT, longer, "message {order}, {total} bytes");
    }
    conn.close();
}

/// Receives are posted ahead of their messages, so those that NCCL has open show how long its operation is.
#[test]
fn workers_do_not_poll_for_many_receives_on_a_full_network() {
    let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
    let _first = join(&conn, 0);
    conn.net.spread.fill();
    let mut target = vec![0_u8; 8];
    for number in 1..=FEW + 1 {
        // SAFETY: the target lives longer than the connection, and there is no profiler.
        let posted = unsafe { conn.irecv(&[(target.as_mut_ptr(), target.len(), 0)], &[std::ptr::null_mut()]) };
        posted.expect("it lives").expect("a slot is free");
        assert_eq!(conn.hot(), if number <= FEW { HOT } else { Duration::ZERO }, "receive {number}");
    }
    conn.close();
}

/// Frames that no request waits for are acknowledged now and then; frames that a request waits for, at once.
#[test]
fn what_no_request_waits_for_is_acknowledged_together() {
    let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
    let theirs = join(&conn, 0);
    theirs.set_nonblocking(true).expect("it can be set");
    // This keeps the control thread from polling, which it may do at this moment.
    let mut held = (0..).find_map(|_| conn.streams[0].hold()).expect("nobody has it for ever");
    let io = held.as_deref_mut().expect("it is connected");
    let mut number = 0;
    let mut look_at_message = |io: &mut Io, mut theirs: &TcpStream, flags: u8| {
        let header = Header {
            flags: EAGER | flags,
            length: 8,
            total: 8,
            message: number,
            order: number,
            ..Header::of(Type::Data, 0)
        };
        theirs.write_all(&[&header.encode()[..], &[7; 8]].concat()).expect("it lives");
        number += 1;
        loopback::wait_until("it does not come", || matches!(conn.step(0, io, READ), Step::Settled(true)));
    };
    let acknowledged = |mut theirs: &TcpStream| theirs.read(&mut [0; HEADER]).is_ok();

    for _ in 1..ACK_EVERY {
        look_at_message(io, &theirs, 0);
        assert!(matches!(conn.step(0, io, READ), Step::Settled(false)));
    }
    assert!(!acknowledged(&theirs), "nobody misses it");
    look_at_message(io, &theirs, 0);
    loopback::wait_until("many are not acknowledged", || acknowledged(&theirs));
    look_at_message(io, &theirs, PROMPT);
    loopback::wait_until("it is put off though a request waits", || acknowledged(&theirs));
    drop(held);
    conn.close();
}

/// The sender counts what leaves: the difference is what is under way (`towline why`).
#[test]
fn bytes_are_counted_when_all_of_their_frame_is_here() {
    const SIZE: usize = 8192;
    let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
    let mut theirs = join(&conn, 0);
    let mut target = vec![0_u8; SIZE];
    // SAFETY: the target lives until the request is done, and there is no profiler.
    let posted = unsafe { conn.irecv(&[(target.as_mut_ptr(), SIZE, 0)], &[std::ptr::null_mut()]) };
    let ticket = posted.expect("it lives").expect("a slot is free");
    let header = Header { flags: EAGER, length: SIZE as u32, total: SIZE as u64, ..Header::of(Type::Data, 0) };
    theirs.write_all(&[&header.encode()[..], &[7; SIZE / 2]].concat()).expect("it lives");
    let counted = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    loopback::wait_until("it does not begin", || {
        assert!(conn.test(ticket).expect("it lives").is_none());
        counted(&conn.counters().chunks) == 1
    });
    assert_eq!(counted(&conn.counters().bytes), 0);
    theirs.write_all(&[7; SIZE / 2]).expect("it lives");
    loopback::wait_until("it does not come", || conn.test(ticket).expect("it lives").is_some());
    assert_eq!((counted(&conn.counters().bytes), target), (SIZE as u64, vec![7; SIZE]));
    conn.close();
}

/// Marked chunks pass through a buffer that is smaller than they are, and something follows them.
#[test]
fn a_chunk_that_is_watched_arrives_whole_and_so_does_what_follows() {
    let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
    let mut theirs = join(&conn, 0);
    for (number, size) in [200_064, 128, 9_984, 65_536, 131_072].into_iter().enumerate() {
        let bytes: Vec<u8> = (0..size).map(|at| (at * 7 + at / 251) as u8).collect();
        let mut targets = [vec![0; size], vec![0; 8]];
        let [first, second] = targets.each_mut().map(|target| {
            // SAFETY: the targets live until their requests are done, and there is no profiler.
            let posted = unsafe { conn.irecv(&[(target.as_mut_ptr(), target.len(), 0)], &[std::ptr::null_mut()]) };
            posted.expect("it lives").expect("a slot is free")
        });
        let (number, total) = (2 * number as u64, size as u64);
        let header = |number: u64, flags: u8, total: u64| {
            let length = total as u32;
            Header { flags, length, total, message: number, order: number, ..Header::of(Type::Data, 0) }.encode()
        };
        let eager = if total <= EAGER_MAX { EAGER } else { 0 };
        let frames =
            [&header(number, POLLED | eager, total)[..], &bytes, &header(number + 1, EAGER, 8), &[9; 8]].concat();
        std::thread::scope(|scope| {
            // In pieces that do not match frames or lines.
            scope.spawn(|| frames.chunks(50_001).for_each(|piece| theirs.write_all(piece).expect("it lives")));
            for ticket in [first, second] {
                loopback::wait_until("it does not come", || conn.test(ticket).expect("it lives").is_some());
            }
        });
        assert!(targets[0] == bytes && targets[1] == [9; 8], "{size}");
    }
    conn.close();
}

/// The last message before a communicator is destroyed. The thread that polls finds its receive not done and loses the
/// processor; meanwhile a worker places the last byte and the sender closes in order. Then the poll goes on.
#[test]
fn a_receive_that_became_whole_while_its_poll_was_held_up_is_done() {
    for parts in [1, MAX_PARTS] {
        let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
        let mut theirs = join(&conn, 0);
        let mut targets = vec![[0_u8; 8]; parts];
        let posts: Vec<_> = targets.iter_mut().map(|to| (to.as_mut_ptr(), 8, 0)).collect();
        // SAFETY: the targets live until the request is done, and there is no profiler.
        let posted = unsafe { conn.irecv(&posts, &vec![std::ptr::null_mut(); parts]) };
        let ticket = posted.expect("it lives").expect("a slot is free");
        assert!(!conn.requests.is_done(ticket), "what the poll has seen");
        for number in 0..=parts as u64 {
            let data = Header {
                flags: EAGER,
                length: 8,
                total: 8,
                message: number,
                order: number,
                ..Header::of(Type::Data, 0)
            };
            theirs.write_all(&[&data.encode()[..], &[7; 8]].concat()).expect("it lives");
        }
        let goodbye = Header { total: parts as u64 + 2, ..Header::of(Type::Bye, 0) };
        theirs.write_all(&goodbye.encode()).expect("it lives");
        // A sender reads the acknowledgements before it closes. A reset would discard bytes that are not read yet.
        theirs.shutdown(std::net::Shutdown::Write).expect("it lives");
        loopback::wait_until("the end does not arrive", || conn.health.is_over());
        let outcome = conn.at_the_end(ticket).expect("all of it is here").expect("it is done");
        assert_eq!((outcome.parts, outcome.sizes[parts - 1]), (parts, 8));
        assert!(targets.iter().all(|target| *target == [7; 8]));
        // A receive that is posted after the end still gets a message that arrived early.
        let mut late = [0_u8; 8];
        // SAFETY: as above.
        let posted = unsafe { conn.irecv(&[(late.as_mut_ptr(), 8, 0)], &[std::ptr::null_mut()]) };
        let ticket = posted.expect("its message is here").expect("a slot is free");
        assert!(conn.test(ticket).expect("its message is here").is_some());
        conn.close();
    }
}

/// A worker is called once for bytes that have arrived and for the end behind them: the kernel reports both together.
/// If the worker left the end for the next poll, a receive would wait for ever for a peer that has gone.
#[test]
fn one_poll_of_a_worker_takes_in_the_end_behind_the_last_frame() {
    let message = Header { flags: EAGER, length: 8, total: 8, epoch: 1, ..Header::of(Type::Data, 0) };
    let goodbye = Header { total: 1, ..Header::of(Type::Bye, 0) }.encode().to_vec();
    for (seal, last, in_order) in [
        (Seal::Plain, goodbye.clone(), true),
        (Seal::Plain, [&message.encode()[..], &[7; 8]].concat(), false),
        (Seal::Checksum, goodbye, true),
    ] {
        let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
        let _first = join(&conn, 0);
        let (ours, mut theirs) = loopback::sockets();
        let registration = conn.register(1, &ours).expect("it is watched");
        conn.add_stream(1, 1, registration, ours, seal);
        // The worker may hold the stream now; from then on it finds the stream taken.
        let mut held = (0..).find_map(|_| conn.streams[1].hold()).expect("nobody has it for ever");
        let io = held.as_deref_mut().expect("it is connected");
        theirs.write_all(&last).expect("it lives");
        theirs.shutdown(std::net::Shutdown::Write).expect("it lives");
        let mut end = libc::pollfd { fd: io.sock.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one entry, which outlives the call.
        assert_eq!(unsafe { libc::poll(&raw mut end, 1, 20_000) }, 1, "the end does not arrive");
        let Step::Broken(why) = conn.step(1, io, READ) else { panic!("the end is left for a poll that nobody makes") };
        let is_as_it_ended = if in_order { matches!(why, Broken::Goodbye) } else { matches!(why, Broken::Lost(_)) };
        assert!(is_as_it_ended, "{why:?}");
        drop(held);
        conn.close();
    }
}

/// The first stream is not connected when the connection fails. The sender must receive the cause over another stream,
/// and not wait for a stream that does not reconnect.
#[test]
fn a_failure_is_told_on_every_stream() {
    let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
    let first = join(&conn, 0);
    let mut second = join(&conn, 1);
    drop(first);
    loopback::wait_until("the end of the first is not seen", || conn.health.live() == 1);
    conn.fail(Error::usage("two sizes differ"));
    second.set_read_timeout(Some(std::time::Duration::from_secs(20))).expect("it can be set");
    let mut header = [0; HEADER];
    let header = loop {
        second.read_exact(&mut header).expect("the failure is told");
        let header = Header::decode(&header).expect("a frame");
        if header.kind == Type::Fail {
            break header;
        }
    };
    let mut text = vec![0; header.length as usize];
    second.read_exact(&mut text).expect("all of it");
    assert_eq!(text, b"two sizes differ");
    conn.close();
}

/// The receiver closes while a stream is just reconnecting. If the receiver fenced that epoch, everything that arrives
/// on it would violate the protocol.
#[test]
fn a_close_does_not_fence_a_stream_that_is_just_coming_back() {
    let conn = RecvConn::new(loopback::net(Config::default()), loopback::link(&loopback::deaf()), loopback::peer());
    let _first = join(&conn, 0);
    let (ours, _theirs) = loopback::sockets();
    let registration = conn.register(1, &ours).expect("it is watched");
    std::thread::scope(|scope| {
        // Between the beginning of its epoch and its socket.
        let halfway = lock(&conn.inquiry);
        scope.spawn(|| conn.add_stream(1, 1, registration, ours, Seal::Plain));
        loopback::wait_until("its epoch does not begin", || conn.state().core.epoch(1) == 1);
        let closes = scope.spawn(|| conn.send_final_state());
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(halfway);
        closes.join().expect("it ends");
    });
    assert!(!conn.state().core.has_ended(1, 1), "the epoch was fenced that had just begun");
    conn.close();
}
