//! Races between two threads that serve streams of one connection.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use super::*;
use crate::engine::schedule::constants::{ACK_BYTES, ACK_EVERY, ENOUGH_COPIED, FEW, HOT, HOT_BETWEEN, LATELY_NS};
use crate::os::config::Config;
use crate::os::error::Error;
use crate::session::frame::{POLLED, PROMPT, Type};
use crate::session::loopback;
use crate::session::owner::Joined;
use crate::session::silences::CLOSE_PATIENCE;
use crate::tcp::limits::{EAGER_WINDOW, MESSAGE_COST};

/// Long enough to be sure that a thread does nothing.
const WHILE: Duration = Duration::from_millis(50);

/// The receiver may have a chunk, and acknowledge it on another stream, before the thread that sent it has recorded
/// that it left. If the acknowledgement counted before that, the message would be over, and another message would have
/// its place when the thread records the chunk.
#[test]
fn a_chunk_that_ends_its_request_does_not_count_before_it_is_booked() {
    let net = loopback::net(Config::default());
    let deaf = loopback::deaf();
    let (ours, mut theirs) = loopback::sockets();
    let conn = SendConn::new(net, loopback::link(&deaf), loopback::peer(), ours, Seal::Plain).expect("it is watched");
    let bytes = [7; 5000];
    assert!((COPY_FIRST_MAX..INLINE_MAX).contains(&(bytes.len() as u64)), "it is copied when it has left");

    // As `isend` does, up to the system call.
    let mut held = conn.streams[0].hold().expect("nobody has it");
    let ticket = conn.requests.take(1).expect("a slot is free");
    {
        let mut state = conn.state();
        // SAFETY: the bytes outlive the connection.
        let posted = unsafe { conn.post(&mut state, ticket, bytes.as_ptr(), bytes.len(), 0, false) };
        assert_eq!(posted.expect("it is posted").1, Admit::Ready);
        let io = held.as_deref_mut().expect("it is connected");
        io.out = conn.next_outgoing(&mut state, 0, io);
    }
    drop(held);

    std::thread::scope(|scope| {
        // Another thread holds the core when the chunk leaves, and gets the acknowledgement.
        let mut state = conn.state();
        scope.spawn(|| conn.run(0, SEND));
        theirs.read_exact(&mut [0; HEADER + 5000]).expect("the chunk comes");
        let written = state.core.counts(0);
        let start = Instant::now();
        while start.elapsed() < WHILE && written.frames() == 0 {
            std::thread::yield_now();
        }
        let State { core, payloads, done, copies, .. } = &mut *state;
        core.acknowledge_all(&[1], done).expect("it was sent");
        assert!(done.is_empty(), "it is over before it is booked");
        conn.end_messages(payloads, copies, done);
    });
    // The control thread does it if it held the stream at that moment.
    loopback::wait_until("it is not done", || conn.requests.finish(ticket).is_some());
    loopback::wait_until("an acknowledgement that came before does not count", || conn.state().core.is_idle());
}

/// The kernel keeps the bytes that it has accepted, and the peer may resume one day.
#[test]
fn a_peer_that_is_waited_for_no_more_gets_what_was_sent_and_a_goodbye() {
    let deaf = loopback::deaf();
    let (ours, mut theirs) = loopback::sockets();
    let conn =
        SendConn::new(loopback::net(Config::default()), loopback::link(&deaf), loopback::peer(), ours, Seal::Plain);
    let conn = conn.expect("it is watched");
    for _ in 0..3 {
        // SAFETY: the bytes outlive the request, and no profiler is loaded.
        let ticket =
            unsafe { conn.isend([7; 8].as_ptr(), 8, 0, std::ptr::null_mut()) }.expect("it lives").expect("a slot");
        assert!(conn.test(ticket).expect("it lives").is_some(), "a copy is kept");
    }
    let start = Instant::now();
    conn.leave();
    assert!(start.elapsed() < CLOSE_PATIENCE / 2, "it waits");
    let mut came = Vec::new();
    theirs.read_to_end(&mut came).expect("it ends in order");
    let kinds: Vec<Type> = std::iter::from_fn(|| {
        let header = Header::decode(came.get(..HEADER)?.try_into().expect("a header's length")).expect("a frame");
        came.drain(..HEADER + header.length as usize);
        Some(header.kind)
    })
    .collect();
    assert_eq!(kinds, [Type::Data, Type::Data, Type::Data, Type::Bye]);
}

/// A request is open until NCCL has tested it done.
#[test]
fn workers_poll_longer_while_few_short_messages_are_open_and_not_for_many_on_a_full_network() {
    for (is_full, for_many) in [(false, HOT), (true, Duration::ZERO)] {
        let (net, deaf) = (loopback::net(Config::default()), loopback::deaf());
        let (ours, _theirs) = loopback::sockets();
        let conn = SendConn::new(net, loopback::link(&deaf), loopback::peer(), ours, Seal::Plain);
        let conn = conn.expect("it is watched");
        if is_full {
            conn.net.spread.fill();
        }
        let bytes = vec![7; 100_000];
        for number in 1..=FEW + 2 {
            // SAFETY: the bytes outlive the connection, and no profiler is loaded.
            let sent = unsafe { conn.isend(bytes.as_ptr(), bytes.len(), 0, std::ptr::null_mut()) };
            sent.expect("it lives").expect("a slot");
            assert_eq!(conn.hot(), if number <= FEW { HOT_BETWEEN } else { for_many }, "message {number}");
        }
        conn.close();
    }
}

/// Over a long path a send of NCCL's usual size is done when its bytes have left; what may be sent again is a copy.
#[test]
fn over_a_long_path_a_send_is_done_before_its_acknowledgement() {
    let net = loopback::net(Config::default());
    let deaf = loopback::deaf();
    let (conn, mut theirs) = connected_over(net, far(&deaf));
    let mut bytes = vec![7; 512 << 10];
    // SAFETY: the bytes outlive the request, and no profiler is loaded.
    let ticket = unsafe { conn.isend(bytes.as_ptr(), bytes.len(), 0, std::ptr::null_mut()) };
    let ticket = ticket.expect("it lives").expect("a slot is free");
    let mut came = vec![0; HEADER + bytes.len()];
    std::thread::scope(|scope| {
        scope.spawn(|| theirs.read_exact(&mut came).expect("all of it comes"));
        loopback::wait_until("it waits for an acknowledgement", || conn.test(ticket).expect("it lives").is_some());
    });
    assert!(came[HEADER..].iter().all(|byte| *byte == 7));
    // The stream breaks, and the original bytes are resent.
    bytes.fill(8);
    let mut state = conn.state();
    state.core.stream_down(0);
    let State { core, done, payloads, .. } = &mut *state;
    assert_eq!(core.fenced(0, 0, 0, done).expect("nothing of it was taken in"), 1);
    let copy = payloads.iter().flatten().next().and_then(|payload| payload.replay.as_ref()).expect("there is a copy");
    assert!(copy[HEADER..].iter().all(|byte| *byte == 7));
}

/// The kernel accepted megabytes on the first stream that it could not send yet, while the other streams had nothing to
/// do.
#[test]
fn over_a_long_path_the_kernel_takes_little_that_it_cannot_send() {
    /// `SIOCOUTQNSD` of `linux/sockios.h`.
    const UNSENT: libc::Ioctl = 0x894B;
    const LENGTH: usize = 64 << 10;
    let net = loopback::net(Config::default());
    let deaf = loopback::deaf();
    let (ours, _silent) = loopback::sockets();
    let fd = ours.as_raw_fd();
    let unsent = || {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel writes one int.
        assert_eq!(unsafe { libc::ioctl(fd, UNSENT, &raw mut bytes) }, 0);
        bytes as usize
    };
    let mut link = loopback::link(&deaf);
    (link.round_trip, link.features) = (Duration::from_millis(50), FEATURE_RECOVERY | FEATURE_FAR);
    let conn = SendConn::new(net, link, loopback::peer(), ours, Seal::Plain).expect("it is watched");
    let bytes = vec![7; LENGTH];
    // As many as the peer's kernel accepts, and more than this side's kernel would.
    for _ in 0..255 {
        // SAFETY: the bytes outlive the connection, and no profiler is loaded.
        let posted = unsafe { conn.isend(bytes.as_ptr(), LENGTH, 0, std::ptr::null_mut()) };
        assert!(posted.expect("it lives").is_some(), "a slot is free");
    }
    loopback::wait_until("the peer's kernel takes no more", || unsent() > 0);
    std::thread::sleep(Duration::from_millis(300));
    assert!(unsent() <= (128 << 10) + LENGTH, "{}", unsent());
    conn.fail(Error::remote("the test is over"));
    conn.close();
}

/// A close gave up after two seconds the data that the kernel had not accepted yet, however fast the peer's kernel
/// received.
#[test]
fn a_close_lasts_as_long_as_the_peer_takes_what_was_reported_done() {
    // Fewer than are on the way without an acknowledgement, and more than the sockets hold.
    const SENDS: usize = 1500;
    let net = loopback::net(Config::default());
    let deaf = loopback::deaf();
    let (ours, mut theirs) = loopback::sockets();
    ours.set_send_buffer_size(64 << 10).expect("it can be set");
    socket2::SockRef::from(&theirs).set_recv_buffer_size(64 << 10).expect("it can be set");
    let mut link = loopback::link(&deaf);
    (link.round_trip, link.features) = (Duration::from_millis(50), FEATURE_RECOVERY | FEATURE_FAR);
    let conn = SendConn::new(net, link, loopback::peer(), ours, Seal::Plain).expect("it is watched");
    let bytes = [7; COPY_FIRST_MAX as usize];
    for _ in 0..SENDS {
        // SAFETY: the bytes outlive the request, and no profiler is loaded.
        let ticket = unsafe { conn.isend(bytes.as_ptr(), bytes.len(), 0, std::ptr::null_mut()) };
        let ticket = ticket.expect("it lives").expect("a slot is free");
        loopback::wait_until("it is done when it is copied", || conn.test(ticket).expect("it lives").is_some());
    }
    std::thread::scope(|scope| {
        let closes = scope.spawn(|| conn.close());
        // Longer than a close waits for a peer that reads nothing.
        let mut came = vec![0; SENDS * (HEADER + bytes.len()) / 50];
        for _ in 0..50 {
            std::thread::sleep(WHILE * 2);
            theirs.read_exact(&mut came).expect("all of it comes");
        }
        assert!(!closes.is_finished(), "nobody has acknowledged it");
        theirs.read_to_end(&mut Vec::new()).expect("it ends with a goodbye");
    });
}

/// A connection that ends because nothing is delivered waits for the threads that hold its streams. Another stream that
/// is just being connected needs the same lock: the control thread would wait for ever, and with it all connections.
#[test]
fn the_end_of_a_connection_that_delivers_nothing_keeps_no_books_locked() {
    let net = loopback::net(Config { peer_timeout: Duration::ZERO, ..Config::default() });
    let deaf = loopback::deaf();
    let (ours, _theirs) = loopback::sockets();
    let conn = SendConn::new(net, loopback::link(&deaf), loopback::peer(), ours, Seal::Plain).expect("it is watched");
    let bytes = [7; 8];
    // SAFETY: the bytes outlive the connection, and there is no profiler.
    let posted = unsafe { conn.isend(bytes.as_ptr(), bytes.len(), 0, std::ptr::null_mut()) };
    assert!(posted.expect("it lives").is_some());
    loopback::wait_until("it does not leave", || conn.state().core.in_doubt(0));
    let silent = io::Error::from(io::ErrorKind::TimedOut);
    assert!(conn.still_delivers(0, &silent), "the first may be an outage");
    std::thread::scope(|scope| {
        let held = conn.streams[1].lock();
        let ends = scope.spawn(|| conn.still_delivers(0, &silent));
        loopback::wait_until("it goes on", || conn.health.is_failed());
        let start = Instant::now();
        let mut is_free = false;
        while !is_free && start.elapsed() < 20 * WHILE {
            is_free = conn.own.deliveries.try_lock().is_ok();
            std::thread::yield_now();
        }
        drop(held);
        assert!(is_free && !ends.join().expect("it ends"));
    });
}

/// NCCL has its buffers back when the connection is closed. A stream that was on its way then must not send from them.
#[test]
fn a_stream_that_joins_when_the_connection_has_been_closed_is_not_used() {
    let (conn, _theirs) = connected();
    conn.requests.take(1).expect("a slot is free");
    conn.close();
    let (late, mut other_end) = loopback::sockets();
    // As a handshake that had ended by then.
    Arc::clone(&conn).rejoined(joined(1, 1, late)).expect("it is told of no failure");
    assert!(conn.streams[1].with_io(|_| ()).is_none() && conn.health.live() == 0);
    // The peer sees the end.
    other_end.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    assert_eq!(other_end.read(&mut [0; HEADER]).expect("the control thread closes it"), 0);
}

/// Drops all that comes in at this socket before TCP sees it, as a path does that has died.
fn deafen(sock: &TcpStream) {
    let mut drop_all = [libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 }];
    let program = libc::sock_fprog { len: 1, filter: drop_all.as_mut_ptr() };
    let size = size_of::<libc::sock_fprog>() as libc::socklen_t;
    let (level, option) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
    // SAFETY: the kernel copies the program, which outlives the call.
    let done = unsafe { libc::setsockopt(sock.as_raw_fd(), level, option, (&raw const program).cast(), size) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
}

/// A rail dies just after the last message has arrived, and its acknowledgement is lost. The receiver has everything
/// and closes, and its goodbye arrives over another rail. The send must not wait until the kernel gives the dead stream
/// up, which may take a quarter of an hour.
#[test]
fn a_stream_that_falls_silent_is_given_up_also_after_the_goodbye_on_another() {
    let (conn, mut theirs) = connected();
    let (second, silent) = loopback::sockets();
    deafen(&silent);
    Arc::clone(&conn).rejoined(joined(1, 1, second)).expect("it is watched");
    let bytes = vec![7; 1 << 20];
    // SAFETY: the bytes outlive the connection, and there is no profiler.
    let posted = unsafe { conn.isend(bytes.as_ptr(), bytes.len(), 0, std::ptr::null_mut()) };
    let ticket = posted.expect("it lives").expect("a slot is free");
    let clear = Header { total: 1 << 20, ..Header::of(Type::Clear, 0) };
    theirs.write_all(&clear.encode()).expect("it lives");
    loopback::wait_until("the message does not leave", || {
        assert!(conn.test(ticket).expect("it lives").is_none());
        let core = &conn.state().core;
        core.in_doubt(1) && !core.has_ready()
    });
    let goodbye = Header { total: 2, ..Header::of(Type::Bye, 0) };
    // As where this thread finds the goodbye before the control thread has begun to check the streams.
    conn.chores.end();
    theirs.write_all(&goodbye.encode()).expect("it lives");
    drop(theirs);
    loopback::wait_until("the send waits for the kernel", || conn.test(ticket).expect("all has come").is_some());
    conn.close();
}

/// The receiver has given up the first stream of a connection that fails at that moment, and a thread is still sending
/// on it. If another stream sent the same bytes before that thread has released the stream, they could be acknowledged
/// and their buffer given back.
#[test]
fn what_a_thread_is_sending_when_the_connection_fails_does_not_travel_again() {
    let (conn, _theirs) = connected();
    let (second, _other_end) = loopback::sockets();
    Arc::clone(&conn).rejoined(joined(1, 1, second)).expect("it is watched");
    // SAFETY: the bytes outlive the call, which copies them; there is no profiler.
    let posted = unsafe { conn.isend([7_u8; 8].as_ptr(), 8, 0, std::ptr::null_mut()) };
    posted.expect("it lives").expect("a slot is free");
    loopback::wait_until("the message does not leave", || conn.state().core.in_doubt(0));
    let held = conn.streams[0].lock();
    assert!(held.is_some(), "it is connected");
    conn.fail_silently(Error::remote("a failure"));
    conn.on_fenced(&crate::session::peer::fenced((0, 0, 0))).expect("it may be so");
    assert!(conn.state().core.in_doubt(0), "it travels again");
    drop(held);
    conn.close();
}

/// A query over the last streams is lost with them, and the path of a stream may stay silent while others reconnect.
/// Its chunks would stay in doubt for as long.
#[test]
fn a_stream_that_comes_back_asks_about_those_that_are_still_away() {
    let net = loopback::net(Config::default());
    let deaf = loopback::deaf();
    let (ours, theirs) = loopback::sockets();
    let conn = SendConn::new(net, loopback::link(&deaf), loopback::peer(), ours, Seal::Plain).expect("it is watched");
    let join = |index: usize| {
        let (ours, theirs) = loopback::sockets();
        Arc::clone(&conn).rejoined(joined(index, conn.next_epoch(index), ours)).expect("it joins");
        theirs
    };
    let second = join(1);
    drop((theirs, second));
    loopback::wait_until("the end of both is not seen", || !conn.is_connected());

    let mut back = join(0);
    back.set_read_timeout(Some(Duration::from_secs(20))).expect("it can be set");
    let mut bytes = [0; HEADER];
    back.read_exact(&mut bytes).expect("a frame about the other");
    let header = Header::decode(&bytes).expect("a frame");
    assert_eq!((header.kind, header.order, header.offset), (Type::Fence, 1, 1), "the first epoch of the second stream");
}

/// A reconnected stream, of which nothing had arrived.
fn joined(stream: usize, epoch: u16, sock: Sock) -> Joined {
    Joined { stream, epoch, received: 0, registration: None, sock, seal: Seal::Plain }
}

/// A connection, and where its peer reads and writes.
fn connected() -> (Arc<SendConn>, TcpStream) {
    connected_in(loopback::net(Config::default()))
}

/// The same, of this backend.
fn connected_in(net: Arc<Net>) -> (Arc<SendConn>, TcpStream) {
    connected_over(net, loopback::link(&loopback::deaf()))
}

fn connected_over(net: Arc<Net>, link: Link) -> (Arc<SendConn>, TcpStream) {
    let (ours, theirs) = loopback::sockets();
    (SendConn::new(net, link, loopback::peer(), ours, Seal::Plain).expect("it is watched"), theirs)
}

/// A path with a round trip of 50 ms, to a peer that has room for it.
fn far(remote: &TcpListener) -> Link {
    let features = FEATURE_RECOVERY | FEATURE_FAR;
    Link { round_trip: Duration::from_millis(50), features, ..loopback::link(remote) }
}

/// Reads a frame of this size, and returns its header.
fn next_header(theirs: &mut TcpStream, frame: &mut [u8]) -> Header {
    theirs.read_exact(frame).expect("a frame");
    Header::decode(frame[..HEADER].try_into().expect("a header")).expect("it is one")
}

/// Requests of short messages are done at once, so NCCL does not test them again. The sender must read the receiver's
/// acknowledgements all the same. Otherwise it considers its credit used up and requests an acknowledgement of each
/// message, for which the receiver makes a system call while that message waits.
#[test]
fn a_row_of_short_messages_asks_for_no_acknowledgement() {
    const MESSAGES: u64 = 4000;
    // A longer message is done at once over a long path.
    let near: fn(&TcpListener) -> Link = loopback::link;
    for (size, link) in [(8, near), (500, near), (8 << 10, near), (INLINE_MAX as usize, near), (100_000, far)] {
        let net = loopback::net(Config { streams: Some(1), ..Config::default() });
        let (conn, mut theirs) = connected_over(net, link(&loopback::deaf()));
        let bytes = vec![7; size];
        let mut frame = vec![0; HEADER + size];
        let (mut returned, mut requested, mut most) = (0, 0, 0);
        for number in 1..=MESSAGES {
            // SAFETY: the bytes outlive the connection.
            let ticket = unsafe { conn.isend(bytes.as_ptr(), size, 0, std::ptr::null_mut()) }.expect("it is sent");
            let ticket = ticket.expect("a slot is free");
            // At once, unless the control thread holds the stream at that moment.
            loopback::wait_until("it is not done", || conn.test(ticket).expect("it lives").is_some());
            let header = next_header(&mut theirs, &mut frame);
            requested += u64::from(header.flags & PROMPT != 0);
            // A receiver acknowledges after this many frames, or when it owes this much credit.
            let owed = number * (size as u64 + MESSAGE_COST) - returned;
            if number % ACK_EVERY == 0 || owed >= EAGER_WINDOW / 4 {
                returned += owed;
                let ack = Header { offset: number, total: returned, ..Header::of(Type::Ack, 0) };
                theirs.write_all(&ack.encode()).expect("it lives");
            }
            most = most.max(conn.state().payloads.len());
        }
        // From time to time the sender requests an acknowledgement of the bytes that a stream has carried.
        let expected = MESSAGES * size as u64 / ACK_BYTES;
        assert!(requested <= expected, "{requested} of {expected} messages of {size} bytes requested one");
        assert!(most <= 3 * ACK_EVERY as usize, "{most} messages of {size} bytes were kept");
    }
}

#[test]
fn what_a_gpu_may_watch_is_marked() {
    let (conn, mut theirs) = connected();
    // Two kilobytes, as in LL128: the last of sixteen 8-byte units is the step. Messages of 512 bytes are sent from a
    // copy, longer ones from their place.
    for (size, watched) in [(2 << 10, true), (2 << 10, false), (512, true), (512, false)] {
        let word = |index: usize| if watched && index % 16 == 15 { 3 } else { 7 << 60 | index as u64 };
        let bytes: Vec<u8> = (0..size / 8).flat_map(|index| word(index).to_le_bytes()).collect();
        // SAFETY: the bytes live until their request is done.
        let ticket = unsafe { conn.isend(bytes.as_ptr(), size, 0, std::ptr::null_mut()) }.expect("it is sent");
        let ticket = ticket.expect("a slot is free");
        loopback::wait_until("it is not done", || conn.test(ticket).expect("it lives").is_some());
        let mut frame = vec![0; HEADER + size];
        let header = next_header(&mut theirs, &mut frame);
        assert_eq!(header.flags & POLLED != 0, watched, "{size}");
    }
}

/// The thread that polls finds its send not done and loses the processor; meanwhile a worker takes in the
/// acknowledgement, and the receiver, which wants no more, closes in order. Then the poll goes on.
#[test]
fn a_send_that_was_acknowledged_while_its_poll_was_held_up_is_done() {
    let (conn, mut theirs) = connected();
    let bytes = vec![7_u8; 1 << 20];
    let post = || {
        // SAFETY: the bytes outlive the connection, and there is no profiler.
        let posted = unsafe { conn.isend(bytes.as_ptr(), bytes.len(), 0, std::ptr::null_mut()) };
        posted.expect("it lives").expect("a slot is free")
    };
    let (first, second) = (post(), post());
    let clear = Header { total: 1 << 20, ..Header::of(Type::Clear, 0) };
    theirs.write_all(&clear.encode()).expect("it lives");
    // The whole of the first message, however it is cut.
    let (mut got, mut frames) = (0, 0);
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| loopback::wait_until("it does not leave", || !conn.state().core.has_ready()));
        let mut header = [0; HEADER];
        while got < 1 << 20 {
            theirs.read_exact(&mut header).expect("a frame");
            let header = Header::decode(&header).expect("a frame");
            theirs.read_exact(&mut vec![0; header.length as usize]).expect("its payload");
            if header.kind == Type::Data {
                (got, frames) = (got + header.length, frames + 1);
            }
            conn.run(0, READ | WRITE);
        }
        asks.join().expect("it leaves");
    });
    assert!(!conn.requests.is_done(first), "what the poll has seen");
    let acknowledged = Header { offset: frames, ..Header::of(Type::Ack, 0) };
    // It received one of the two.
    let goodbye = Header { total: 2, ..Header::of(Type::Bye, 0) };
    theirs.write_all(&[acknowledged.encode(), goodbye.encode()].concat()).expect("it lives");
    drop(theirs);
    loopback::wait_until("the end does not arrive", || conn.health.is_over());
    let outcome = conn.at_the_end(first).expect("the receiver has it").expect("it is done");
    assert_eq!(outcome.sizes[0], 1 << 20);
    conn.test(second).expect_err("the receiver does not have that");
    conn.close();
}

/// The receiver has everything and closes in order. Its last acknowledgement is unread, or lost with its stream. A send
/// that is posted at that moment is one too many: it fails, and the one before it does not.
#[test]
fn a_send_after_the_goodbye_leaves_an_earlier_one_its_end() {
    let (conn, mut theirs) = connected();
    let bytes = vec![7_u8; 1 << 20];
    let post = |length| {
        // SAFETY: the bytes outlive the connection, and there is no profiler.
        let posted = unsafe { conn.isend(bytes.as_ptr(), length, 0, std::ptr::null_mut()) };
        posted.expect("the call is accepted").expect("a slot is free")
    };
    let first = post(bytes.len());
    // It received the one message there is.
    let goodbye = Header { total: 2, ..Header::of(Type::Bye, 0) };
    theirs.write_all(&goodbye.encode()).expect("it lives");
    loopback::wait_until("the goodbye does not arrive", || {
        conn.run(0, READ);
        conn.health.is_peer_done()
    });
    let late = post(8);
    assert!(conn.test(late).expect("its streams may say more").is_none());
    drop(theirs);
    loopback::wait_until("the end does not arrive", || {
        conn.run(0, READ);
        conn.health.is_over()
    });
    assert_eq!(conn.test(first).expect("the receiver has it").expect("it is done").sizes[0], 1 << 20);
    conn.test(late).expect_err("the receiver takes nothing any more");
    conn.close();
}

/// The beginning of a chunk, of which more is to come than the input buffer of a sender holds. That is no end of the
/// stream.
#[test]
fn a_chunk_that_comes_to_a_sender_ends_the_connection_with_the_cause() {
    for features in [0, FEATURE_RECOVERY] {
        let link = Link { features, ..loopback::link(&loopback::deaf()) };
        let (conn, mut theirs) = connected_over(loopback::net(Config::default()), link);
        let header = Header { length: 1 << 20, total: 1 << 20, ..Header::of(Type::Data, 0) };
        theirs.write_all(&[&header.encode()[..], &[7; 64 * HEADER]].concat()).expect("it lives");
        loopback::wait_until("it is not noticed", || {
            conn.run(0, READ);
            conn.health.is_failed()
        });
        let error = conn.health.check().expect_err("it has failed").to_string();
        assert!(error.contains("the receiving side sent a Data frame"), "{error}");
        conn.close();
    }
}

/// Several channels send at once: NCCL's thread moves the first message and workers the rest.
#[test]
fn a_thread_that_has_copied_much_leaves_all_but_short_messages_to_workers() {
    let (conn, _theirs) = connected();
    // The load is the thread's own: another test may have run in this one.
    let alone = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            load::copied(1 << 30);
            assert!(!conn.is_for_workers(OWN_MAX + 1), "there is no further stream");
            std::thread::sleep(Duration::from_nanos(2 * LATELY_NS));
            let (second, _other_end) = loopback::sockets();
            Arc::clone(&conn).rejoined(joined(1, 1, second)).expect("it is watched");
            let before = conn.is_for_workers(INLINE_MAX);
            // If this thread is delayed in between, it tries again.
            let began = Instant::now();
            while !conn.is_for_workers(OWN_MAX + 1) {
                load::copied(ENOUGH_COPIED as usize + 1);
                assert!(began.elapsed() < Duration::from_secs(5), "it keeps everything");
            }
            load::copied(1 << 30);
            let short = conn.is_for_workers(OWN_MAX);
            std::thread::sleep(Duration::from_nanos(2 * LATELY_NS));
            [before, short, conn.is_for_workers(INLINE_MAX)]
        });
        thread.join().expect("it does not panic")
    });
    assert_eq!(alone, [false; 3]);
    conn.close();
}
