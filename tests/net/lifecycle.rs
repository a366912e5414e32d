//! From `init` to `finalize`: set-up in every order, tear-down at every moment, and nothing left behind.

use std::ffi::CString;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, Mailbox};
use crate::support::pair::Pair;
use crate::support::{
    PATIENCE, among, context, eventually, is_over_rdma, net, outcome, pair, part, pattern, version_of, versions,
    watchdog,
};
use towline::host::{ApiVersion, Code, Context, Handle, Memory, Net, Part, Plugin, RecvComm, SendComm, Table};
use towline::nccl::ffi;

fn connect(context: &Context, handle: &mut Handle) -> SendComm {
    context.connect_within(0, handle, PATIENCE).expect("connect")
}

fn moves(pair: &Pair, seed: usize, size: usize) {
    assert!(pair.transfer(pattern(seed, size)).expect("a transfer") == pattern(seed, size));
}

/// Waits until this process has no more sockets than those that listen: one for the device over TCP, over RDMA one for
/// each interface that a control channel may go over.
fn settles() {
    let is_settled = || {
        crate::support::sockets() <= crate::support::listening() && (crate::support::listening() <= 1 || is_over_rdma())
    };
    eventually("no sockets but those that listen", PATIENCE, || is_settled().then_some(()));
}

#[test]
fn connect_does_not_wait_for_accept() {
    let _watchdog = watchdog(60);
    for version in versions() {
        // As NCCL 2.8 to 2.11 do it: every side listens, every side connects, only then does any accept.
        let context = context(version);
        let mut listeners: Vec<_> = (0..3).map(|_| context.listen(0).expect("listen")).collect();
        let sends: Vec<SendComm> = listeners.iter_mut().map(|(_, handle)| connect(&context, handle)).collect();
        let recvs: Vec<RecvComm> =
            listeners.iter().map(|(it, _)| it.accept_within(PATIENCE).expect("accept")).collect();
        for (i, (send, recv)) in sends.into_iter().zip(recvs).enumerate() {
            moves(&Pair { send, recv }, i, 100_000);
        }
    }
}

#[test]
fn data_sent_before_accept_waits_for_the_receiver() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let context = context(version);
        for size in [0, 100, 60_000, 1 << 20] {
            let (listener, mut handle) = context.listen(0).expect("listen");
            let send = connect(&context, &mut handle);
            // SAFETY: the pattern is static.
            let sent = unsafe { send.post(part(pattern(1, size), None)) }.expect("isend");
            std::thread::sleep(Duration::from_millis(10));
            let early = send.test(&sent).expect("a test").is_some();
            let recv = listener.accept_within(PATIENCE).expect("accept");
            let target = Memory::new(size);
            // SAFETY: the memory lives until the request ended.
            let posted = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
            let sends = if early { vec![] } else { vec![sent] };
            Pair { send, recv }.finish(posted, &sends).expect("a transfer");
            assert!(target.bytes() == pattern(1, size), "{version}, {size}");
        }
    }
}

#[test]
fn connect_goes_on_when_the_handle_has_moved() {
    let _watchdog = watchdog(60);
    for version in versions().into_iter().filter(|version| !version.setup_blocks()) {
        let context = context(version);
        let (listener, handle) = context.listen(0).expect("listen");
        let mut boxed = Box::new(handle);
        let mut calls = 0;
        let send = eventually("a connection", PATIENCE, || {
            calls += 1;
            let connected = context.connect(0, &mut boxed).expect("connect");
            // Each call finds the bytes of the last one at another address; the old place is overwritten.
            let moved = Box::new(Handle::from_bytes(boxed.bytes()));
            boxed.bytes_mut().fill(0xEE);
            boxed = moved;
            connected
        });
        let recv = listener.accept_within(PATIENCE).expect("accept");
        moves(&Pair { send, recv }, calls, 5000);
        // However often it was called, it was one connection.
        assert!(listener.accept().expect("accept").is_none(), "{version}: a second connection after {calls} calls");
    }
}

#[test]
fn connect_and_accept_return_at_once_from_v5_on() {
    let _watchdog = watchdog(60);
    for version in versions().into_iter().filter(|version| !version.setup_blocks()) {
        let context = context(version);
        let (listener, mut handle) = context.listen(0).expect("listen");
        let start = Instant::now();
        assert!(listener.accept().expect("accept").is_none(), "{version}: nobody has connected");
        let first = context.connect(0, &mut handle).expect("connect");
        assert!(start.elapsed() < Duration::from_millis(500), "{version}: {:?}", start.elapsed());
        let send = first.unwrap_or_else(|| connect(&context, &mut handle));
        let recv = listener.accept_within(PATIENCE).expect("accept");
        moves(&Pair { send, recv }, 1, 10);
    }
}

#[test]
fn v4_accept_gives_up_at_its_deadline() {
    const NAME: &str = "lifecycle::v4_accept_gives_up_at_its_deadline";
    child::alone(NAME, &[("TOWLINE_CONNECT_TIMEOUT", "0.5")], || {
        let _watchdog = watchdog(30);
        let context = context(ApiVersion::V4);
        let (listener, _) = context.listen(0).expect("listen");
        let start = Instant::now();
        assert_eq!(listener.accept().err(), Some(Code::SystemError));
        let waited = start.elapsed();
        assert!((Duration::from_millis(400)..Duration::from_secs(5)).contains(&waited), "{waited:?}");
    });
}

#[test]
fn a_listener_may_be_closed_without_having_accepted() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let context = context(version);
        context.listen(0).expect("listen").0.close().expect("close");
        // A peer has connected and was not accepted: it must not wait for ever.
        let (listener, mut handle) = context.listen(0).expect("listen");
        let send = connect(&context, &mut handle);
        listener.close().expect("close");
        let bytes = pattern(1, 100_000);
        let start = Instant::now();
        // SAFETY: the pattern is static.
        let end = match unsafe { send.isend(part(bytes, None)) } {
            Err(code) => Err(code),
            Ok(sent) => {
                outcome(|it| send.test(it), sent.expect("a free request"), PATIENCE).expect("an answer").map(drop)
            }
        };
        assert!(matches!(end, Err(Code::RemoteError | Code::SystemError)), "{version}: {end:?}");
        assert!(start.elapsed() < Duration::from_secs(5), "{version}: after {:?}", start.elapsed());
    }
}

#[test]
fn one_thread_per_device_and_several_communicators_in_one_process_work_side_by_side() {
    let _watchdog = watchdog(60);
    for version in among([ApiVersion::V4, ApiVersion::V8, ApiVersion::V12]) {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    let (first, second) = (context(version), context(version));
                    for round in 0..5 {
                        let one_way = Pair::between((&first, 0), (&second, 0)).expect("a connection");
                        let other = Pair::between((&second, 0), (&first, 0)).expect("a connection");
                        for size in [64, 300_000] {
                            moves(&one_way, thread * 10 + round, size);
                            moves(&other, thread * 11 + round, size);
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn communicators_made_by_split_share_a_context() {
    let _watchdog = watchdog(60);
    for version in versions() {
        let parent = context(version);
        let child = parent.clone();
        let (of_parent, of_child) =
            (Pair::connect(&parent, 0).expect("a connection"), Pair::connect(&child, 0).expect("a connection"));
        moves(&of_parent, 1, 70_000);
        moves(&of_child, 2, 70_000);
        of_parent.close().expect("close");
        drop(parent);
        moves(&of_child, 3, 70_000);
        moves(&Pair::connect(&child, 0).expect("a connection"), 4, 70_000);
    }
}

#[test]
fn a_communicator_may_be_destroyed_and_made_again_200_times() {
    const NAME: &str = "lifecycle::a_communicator_may_be_destroyed_and_made_again_200_times";
    child::alone(NAME, &[], || {
        // The long form: `TOWLINE_CYCLES=10000 cargo test --test net made_again`.
        let cycles = std::env::var("TOWLINE_CYCLES").ok().and_then(|it| it.parse().ok()).unwrap_or(220);
        let _watchdog = watchdog(90 + cycles as u64 / 10);
        let mut start = None;
        for round in 0..cycles {
            let version = version_of(round);
            let context = context(version);
            let pair = Pair::connect(&context, 0).expect("a connection");
            moves(&pair, round, [100, 100_000][round % 2]);
            pair.close().expect("close");
            if version.has_context() {
                context.finalize().expect("finalize");
            }
            if round == 20 {
                settles();
                start = Some((
                    crate::support::descriptors().len(),
                    crate::support::threads(),
                    crate::support::resident_kib(),
                ));
            }
        }
        let (descriptors, threads, resident) = start.expect("round 20 came");
        let back = || (crate::support::descriptors().len() <= descriptors).then_some(());
        eventually("as many descriptors as before", PATIENCE, back);
        assert!(crate::support::threads() <= threads);
        let grown = crate::support::resident_kib().saturating_sub(resident);
        assert!(grown < 8 << 10, "grown by {grown} KiB");
    });
}

#[test]
fn thousands_of_inits_finalizes_and_connections_do_not_grow_the_process() {
    const NAME: &str = "lifecycle::thousands_of_inits_finalizes_and_connections_do_not_grow_the_process";
    child::alone(NAME, &[], || {
        // Fewer on a slow machine.
        let cycles = std::env::var("TOWLINE_CYCLES").ok().and_then(|it| it.parse().ok()).unwrap_or(3000);
        let _watchdog = watchdog(120);
        let (newest, oldest) = (net(ApiVersion::V12), net(ApiVersion::V8));
        let cycle = |count: usize| {
            for _ in 0..count {
                newest.init().expect("init").finalize().expect("finalize");
                oldest.init().expect("init");
            }
        };
        let connections = |count: usize| {
            let context = newest.init().expect("init");
            for round in 0..count {
                let pair = Pair::connect(&context, 0).expect("a connection");
                if round % 8 == 0 {
                    moves(&pair, round, 500);
                }
                pair.close().expect("close");
            }
            context.finalize().expect("finalize");
        };
        cycle(cycles / 10);
        connections(cycles / 15);
        settles();
        let (descriptors, resident) = (crate::support::descriptors().len(), crate::support::resident_kib());
        cycle(cycles);
        connections(cycles / 3);
        let back = || (crate::support::descriptors().len() <= descriptors).then_some(());
        eventually("as many descriptors as before", PATIENCE, back);
        let grown = crate::support::resident_kib().saturating_sub(resident);
        assert!(grown < 8 << 10, "grown by {grown} KiB over {cycles} communicators and a third as many connections");
    });
}

/// NCCL loads one version per process, so each has a process here.
fn reload(version: ApiVersion) {
    let _watchdog = watchdog(60);
    let mut physical = None;
    for round in 0..6 {
        let plugin = Plugin::open(crate::support::library()).expect("dlopen");
        let context = Net::of(&plugin, Some(version)).expect("a table").init().expect("init");
        // After a reload: physical devices only, and virtual ones are numbered right after them.
        let count = context.devices().expect("devices");
        assert_eq!(count, *physical.get_or_insert(count), "round {round}");
        moves(&Pair::connect(&context, 0).expect("a connection"), round, 100_000);
        if version == ApiVersion::V9 {
            // NCCL 2.24 and 2.25 end the job when a merge is refused, so they are offered none.
            assert_eq!(context.make_vdevice(&[0]), Err(Code::NotOffered("makeVDevice")));
        } else {
            assert_eq!(context.make_vdevice(&[0]).expect("a virtual device"), count, "round {round}");
            assert_eq!(context.devices().expect("devices"), count + 1, "round {round}");
            assert_eq!(context.properties(count).expect("properties").members, [0]);
            moves(&Pair::connect(&context, count).expect("a connection"), round, 100_000);
        }
        drop(context);
        drop(plugin);
    }
}

#[test]
fn the_library_may_be_closed_and_opened_again_v9() {
    child::alone("lifecycle::the_library_may_be_closed_and_opened_again_v9", &[], || reload(ApiVersion::V9));
}

#[test]
fn the_library_may_be_closed_and_opened_again_v10() {
    child::alone("lifecycle::the_library_may_be_closed_and_opened_again_v10", &[], || reload(ApiVersion::V10));
}

#[test]
fn the_library_may_be_closed_and_opened_again_v11() {
    child::alone("lifecycle::the_library_may_be_closed_and_opened_again_v11", &[], || reload(ApiVersion::V11));
}

#[test]
fn the_library_may_be_closed_and_opened_again_v12() {
    child::alone("lifecycle::the_library_may_be_closed_and_opened_again_v12", &[], || reload(ApiVersion::V12));
}

#[test]
fn a_close_ends_requests_in_flight_in_any_order_and_the_peer_learns_of_it() {
    let _watchdog = watchdog(90);
    for version in versions() {
        for sender_closes in [true, false] {
            let Pair { send, recv } = pair(version);
            // The side that is left waits for one message more than the other has posted.
            let (posted, sent) = if sender_closes { (4, 3) } else { (3, 4) };
            let targets: Vec<Memory> = (0..posted).map(|_| Memory::new(1 << 20)).collect();
            // SAFETY: the memory outlives the connection; the pattern is static.
            let (receives, sends): (Vec<_>, Vec<_>) = unsafe {
                (
                    targets.iter().map(|it| recv.post(&[Part::all(it, None)]).expect("irecv")).collect(),
                    (0..sent).map(|i| send.post(part(pattern(i, 1 << 20), None)).expect("isend")).collect(),
                )
            };
            let start = Instant::now();
            if sender_closes {
                send.close().expect("close");
                let last = outcome(|it| recv.test(it), receives[3], PATIENCE).expect("an answer");
                assert!(matches!(last, Err(Code::RemoteError | Code::SystemError)), "{version}: {last:?}");
                recv.close().expect("close");
            } else {
                recv.close().expect("close");
                let last = outcome(|it| send.test(it), sends[3], PATIENCE).expect("an answer");
                assert!(matches!(last, Err(Code::RemoteError | Code::SystemError)), "{version}: {last:?}");
                send.close().expect("close");
            }
            assert!(start.elapsed() < Duration::from_secs(3), "{version}: {:?}", start.elapsed());
            // Nothing writes to a buffer after its connection was closed.
            let seen: Vec<Vec<u8>> = targets.iter().map(|it| it.bytes().to_vec()).collect();
            std::thread::sleep(Duration::from_millis(5));
            assert!(targets.iter().zip(&seen).all(|(now, before)| now.bytes() == before), "{version}");
        }
    }
}

#[test]
fn a_close_may_come_from_another_thread_while_transfers_run() {
    let _watchdog = watchdog(90);
    for round in 0..30 {
        let Pair { send, recv } = pair(version_of(round));
        let (sender_raw, receiver_raw) = (send.raw().addr(), recv.raw().addr());
        assert!(sender_raw != receiver_raw);
        let target = Memory::new(2 << 20);
        // SAFETY: the memory outlives the connection; the pattern is static.
        let (receive, sent) = unsafe {
            (
                recv.post(&[Part::all(&target, None)]).expect("irecv"),
                send.post(part(pattern(round, 2 << 20), None)).expect("isend"),
            )
        };
        std::thread::scope(|scope| {
            // The service thread closes one end while the progress thread still asks after the other.
            let closer = scope.spawn(move || {
                std::thread::sleep(Duration::from_micros(100 * round as u64));
                send.close()
            });
            let end = outcome(|it| recv.test(it), receive, PATIENCE).expect("an answer");
            // It may have been in time.
            if end.is_ok() {
                assert!(target.bytes() == pattern(round, 2 << 20));
            }
            closer.join().expect("no panic").expect("close");
        });
        let _ = sent;
    }
}

#[test]
fn an_abandoned_set_up_is_ended_by_finalize() {
    const NAME: &str = "lifecycle::an_abandoned_set_up_is_ended_by_finalize";
    child::alone(NAME, &[], || {
        let _watchdog = watchdog(90);
        // The process's listening sockets exist from the first connection on.
        let warm = context(ApiVersion::V12);
        moves(&Pair::connect(&warm, 0).expect("a connection"), 1, 10);
        settles();
        for round in 0..50 {
            let version = [ApiVersion::V11, ApiVersion::V12][round % 2];
            let (here, there) = (context(version), context(version));
            let (listener, handle) = there.listen(0).expect("listen");
            // Asked once, then never again: it may be anywhere between its first packet and done.
            for _ in 0..3 {
                if let Some(done) = here.connect(0, &mut handle.clone()).expect("connect") {
                    done.close().expect("close");
                }
            }
            std::thread::sleep(Duration::from_micros(200 * (round as u64 % 10)));
            listener.abandon();
            here.finalize().expect("finalize");
            there.finalize().expect("finalize");
        }
        settles();
        moves(&Pair::connect(&warm, 0).expect("a connection"), 2, 100_000);
    });
}

/// NCCL does not close a connection whose buffers it could not allocate. Its peer must not wait for it until the
/// process ends.
#[test]
fn a_connection_that_nobody_closes_is_ended_by_finalize() {
    const NAME: &str = "lifecycle::a_connection_that_nobody_closes_is_ended_by_finalize";
    child::alone(NAME, &[], || {
        let _watchdog = watchdog(60);
        for version in [ApiVersion::V11, ApiVersion::V12] {
            for abandons_sender in [true, false] {
                let (here, there) = (context(version), context(version));
                let (listener, mut handle) = there.listen(0).expect("listen");
                let send = here.connect_within(0, &mut handle, PATIENCE).expect("connect");
                let recv = listener.accept_within(PATIENCE).expect("accept");
                let memory = Memory::new(200_000);
                // SAFETY: the memory outlives the connection; the pattern is static.
                let end = unsafe {
                    if abandons_sender {
                        send.abandon();
                        here.finalize().expect("finalize");
                        let begun = recv.post(&[Part::all(&memory, None)]).expect("irecv");
                        outcome(|it| recv.test(it), begun, PATIENCE)
                    } else {
                        recv.abandon();
                        there.finalize().expect("finalize");
                        let begun = send.post(part(pattern(1, 200_000), None)).expect("isend");
                        outcome(|it| send.test(it), begun, PATIENCE)
                    }
                };
                assert_eq!(end.expect("an answer").err(), Some(Code::RemoteError), "{version}");
            }
        }
        settles();
    });
}

#[test]
fn everything_that_was_done_reaches_the_peer_although_the_sender_exits_at_once() {
    const NAME: &str = "lifecycle::everything_that_was_done_reaches_the_peer_although_the_sender_exits_at_once";
    const SIZES: [usize; 6] = [100, 16_000, 60_000, 70_000, 1 << 20, 5];
    if child::role().as_deref() == Some("sender") {
        let mail = child::mailbox();
        let context = context(ApiVersion::V12);
        let send = connect(&context, &mut Handle::from_bytes(&child::receive(&mail, "handle")));
        let requests: Vec<_> = (SIZES.iter().enumerate())
            // SAFETY: the pattern is static.
            .map(|(i, size)| unsafe { send.post(part(pattern(i, *size), None)) }.expect("isend"))
            .collect();
        for request in requests {
            send.wait(&request, PATIENCE).expect("the send ends");
        }
        send.close().expect("close");
        // SAFETY: leaves at once; nothing is left to be done.
        unsafe { libc::_exit(0) };
    }
    let _watchdog = watchdog(90);
    for late in [false, true] {
        let context = context(ApiVersion::V12);
        let (listener, handle) = context.listen(0).expect("listen");
        let mail = Mailbox::new();
        child::send(mail.path(), "handle", handle.bytes());
        let mut command = child::command(NAME, "sender");
        command.env(child::MAILBOX, mail.path());
        let mut sender = Guarded::start(command);
        let recv = listener.accept_within(PATIENCE).expect("accept");
        // Early messages are done without their receive; the long ones wait for it, so those receives come first.
        let targets: Vec<Memory> = SIZES.iter().map(|size| Memory::new(*size)).collect();
        let requests: Vec<_> = targets
            .iter()
            // SAFETY: the memory lives until the requests ended.
            .map(|it| unsafe { recv.post(&[Part::all(it, None)]) }.expect("irecv"))
            .collect();
        if late {
            // Long messages need this side's tests to be acknowledged.
            recv.wait(&requests[4], PATIENCE).expect("the long one ends");
            assert!(sender.passed_within(PATIENCE), "the sender");
        }
        for (i, request) in requests.iter().enumerate().filter(|(i, _)| !late || *i != 4) {
            recv.wait(request, PATIENCE).unwrap_or_else(|code| panic!("message {i}: {code}"));
        }
        for (i, (target, size)) in targets.iter().zip(SIZES).enumerate() {
            assert!(target.bytes() == pattern(i, size), "message {i}");
        }
        assert!(sender.passed_within(PATIENCE), "the sender");
    }
}

#[test]
fn one_process_per_device_reduces_and_verifies() {
    let _watchdog = watchdog(90);
    for version in among([ApiVersion::V4, ApiVersion::V8, ApiVersion::V12]) {
        let version = version.to_string();
        let output = Command::new(env!("CARGO_BIN_EXE_towline"))
            .args(["all-reduce", "--ranks", "3", "-b", "8", "-e", "64K", "-f", "8", "-n", "2", "-w", "1"])
            .args(["--api", &version, "--plugin"])
            .arg(crate::support::library())
            .output()
            .expect("towline runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{version}: {text}\n{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("Avg bus bandwidth"), "{version}: {text}");
    }
}

/// Compiles `tests/unloaded_logger.c`.
fn unloaded_logger() -> CString {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/unloaded_logger.c");
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libunloaded_logger.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source);
    assert!(compiler.status().expect("cc starts").success());
    CString::new(library.to_str().expect("a path in UTF-8")).expect("no zero")
}

/// Before v11 NCCL does not say when it is done, so its logger was called where nothing was mapped any more.
#[test]
fn a_host_may_unload_its_logger() {
    child::alone("lifecycle::a_host_may_unload_its_logger", &[], || {
        let _watchdog = watchdog(60);
        let net = net(ApiVersion::V10);
        let context = net.init().expect("init");
        let (_listener, handle) = context.listen(0).expect("listen");
        let name = unloaded_logger();
        // SAFETY: a library without constructors.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null());
        // SAFETY: the library is open.
        let function = unsafe { libc::dlsym(library, c"log_line".as_ptr()) };
        // SAFETY: the function has this type; null would be none.
        let logger = unsafe { std::mem::transmute::<*mut libc::c_void, ffi::ncclDebugLogger_t>(function) };
        let Table::V10(table) = net.table() else { panic!("another version's table") };
        // SAFETY: a logger of the right type, and no profiler.
        assert_eq!(unsafe { table.init.expect("init")(logger, None) }, ffi::ncclSuccess);
        // SAFETY: opened above, and nothing of it is used after this but through a new handle.
        assert_eq!(unsafe { libc::dlclose(library) }, 0);
        // Towline's control thread has something to say.
        let mut stranger =
            TcpStream::connect(crate::support::proxy::address_of(&handle)).expect("the listener can be reached");
        stranger.write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n").expect("it is taken");
        let _ = stranger.read(&mut [0; 64]);
        // SAFETY: as above.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        assert!(!library.is_null(), "the logger is still mapped");
        // SAFETY: the library is mapped, and has an int of that name.
        let lines = unsafe { libc::dlsym(library, c"lines_logged".as_ptr()) }.cast::<i32>();
        // SAFETY: as above; another thread may write it, which is why it is read as volatile.
        eventually("a line", PATIENCE, || (unsafe { lines.read_volatile() } > 0).then_some(()));
    });
}
