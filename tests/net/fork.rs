//! Hosts fork (data loaders do) and are killed: children hold nothing of ours, and signals never reach the host.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, Mailbox, end_of, fork};
use crate::support::pair::Pair;
use crate::support::{PATIENCE, context, net, outcome, pair, part, pattern, raw, watchdog};
use towline::host::{ApiVersion, Code, Handle, Memory, Part};

/// The death of a process whose end the kernel tells by resets is promised to be noticed within a second. Over sockets
/// 0.8 s of refusals make it sure, so that a quarter of a second is left for a machine that runs other tests. RDMA asks
/// the dead process over its network first, in an emulated machine.
fn death_is_noticed_within(over_rdma: Duration) -> Duration {
    if crate::support::is_over_rdma() { over_rdma } else { Duration::from_millis(1000 + 250) }
}

#[test]
fn a_forked_child_holds_none_of_our_descriptors() {
    const NAME: &str = "fork::a_forked_child_holds_none_of_our_descriptors";
    child::alone(NAME, &[("TOWLINE_STREAMS", "3")], || {
        let _watchdog = watchdog(30);
        let before: Vec<i32> = crate::support::descriptors().into_iter().map(|(number, _)| number).collect();
        let pair = pair(ApiVersion::V12);
        assert_eq!(pair.transfer(pattern(1, 1 << 20)).expect("a transfer"), pattern(1, 1 << 20));
        let ours: Vec<(i32, String)> =
            crate::support::descriptors().into_iter().filter(|(number, _)| !before.contains(number)).collect();
        assert!(ours.iter().filter(|(_, target)| target.starts_with("socket:")).count() >= 2, "{ours:?}");
        let child = fork(|| {
            // SAFETY: reading the flags of any number, open or not, is harmless.
            ours.iter().all(|(number, _)| unsafe { libc::fcntl(*number, libc::F_GETFD) } < 0)
        });
        assert!(end_of(child).0, "the child kept one of {ours:?}");
        // The parent goes on.
        assert_eq!(pair.transfer(pattern(2, 1 << 20)).expect("a transfer"), pattern(2, 1 << 20));
        pair.close().expect("close");
    });
}

#[test]
fn calls_in_a_forked_child_give_an_error_and_do_not_crash() {
    const NAME: &str = "fork::calls_in_a_forked_child_give_an_error_and_do_not_crash";
    child::alone(NAME, &[], || {
        let _watchdog = watchdog(60);
        for version in crate::support::versions() {
            let context = context(version);
            let table = net(version).table();
            let (listener, handle) = context.listen(0).expect("listen");
            let Pair { send, recv } = Pair::connect(&context, 0).expect("a connection");
            let target = Memory::new(64);
            // SAFETY: the memory outlives the connection.
            let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
            let child = fork(|| {
                let (mut place, mut done): (_, c_int) = (null_mut(), 0);
                let mut bytes = handle;
                let with = raw::Arguments {
                    comm: send.raw(),
                    data: target.at(0),
                    size: 64,
                    request: &raw mut place,
                    ..Default::default()
                };
                let answers = [
                    raw::isend(table, with),
                    raw::irecv(table, raw::Arguments { comm: recv.raw(), ..with }),
                    raw::test(table, request.raw(), &raw mut done, null_mut()),
                    raw::accept(table, listener.raw(), &raw mut place),
                    raw::listen(table, context.raw(), 0, bytes.bytes_mut().as_mut_ptr().cast(), &raw mut place),
                    raw::closes(table, send.raw())[0],
                    raw::closes(table, recv.raw())[1],
                    raw::closes(table, listener.raw())[2],
                ];
                answers.iter().all(|answer| matches!(answer, Some(1..=6)))
            });
            let (passed, status) = end_of(child);
            assert!(passed, "{version}: the child ended with {status:#x}");
            // SAFETY: the pattern is static.
            let sent = unsafe { send.post(part(pattern(1, 64), None)) }.expect("isend");
            Pair { send, recv }.finish(request, &[sent]).expect("the parent goes on");
        }
    });
}

#[test]
fn a_forked_child_may_use_the_library_anew_after_init() {
    const NAME: &str = "fork::a_forked_child_may_use_the_library_anew_after_init";
    child::alone(NAME, &[], || {
        let _watchdog = watchdog(30);
        let pair = pair(ApiVersion::V12);
        let child = fork(|| {
            let fresh = crate::support::pair(ApiVersion::V12);
            fresh.transfer(pattern(3, 100_000)).is_ok_and(|got| got == pattern(3, 100_000))
        });
        assert!(end_of(child).0, "the child");
        assert_eq!(pair.transfer(b"parent").expect("a transfer"), b"parent");
    });
}

/// The peer of a killed process learns of it although a forked child of that process lives on.
#[test]
fn a_killed_parents_peer_sees_the_death_although_its_child_lives() {
    const NAME: &str = "fork::a_killed_parents_peer_sees_the_death_although_its_child_lives";
    if child::role().as_deref() == Some("victim") {
        let mail = child::mailbox();
        let context = context(ApiVersion::V12);
        let mut handle = Handle::from_bytes(&child::receive(&mail, "handle"));
        let send = context.connect_within(0, &mut handle, PATIENCE).expect("connect");
        // SAFETY: the pattern is static.
        let sent = unsafe { send.post(part(pattern(1, 100), None)) }.expect("isend");
        send.wait(&sent, PATIENCE).expect("the send ends");
        let lingering = fork(|| {
            std::thread::sleep(Duration::from_secs(40));
            true
        });
        child::send(&mail, "child", lingering.to_string().as_bytes());
        std::thread::sleep(Duration::from_secs(40));
        return;
    }
    let _watchdog = watchdog(60);
    let context = context(ApiVersion::V12);
    let (listener, handle) = context.listen(0).expect("listen");
    let mail = Mailbox::new();
    child::send(mail.path(), "handle", handle.bytes());
    let mut command = child::command(NAME, "victim");
    command.env(child::MAILBOX, mail.path());
    let mut victim = Guarded::start(command);
    let recv = listener.accept_within(PATIENCE).expect("accept");
    let target = Memory::new(100);
    // SAFETY: the memory outlives the connection.
    let first = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
    recv.wait(&first, PATIENCE).expect("the first message");
    let child: i32 = String::from_utf8(child::receive(mail.path(), "child")).expect("text").parse().expect("a number");
    // SAFETY: as above.
    let second = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
    let start = Instant::now();
    victim.kill();
    let end = outcome(|it| recv.test(it), second, PATIENCE).expect("the death shows");
    assert_eq!(end.expect_err("nobody sends any more"), Code::RemoteError);
    eprintln!("noticed after {:?}", start.elapsed());
    assert!(start.elapsed() < death_is_noticed_within(Duration::from_millis(1500)), "after {:?}", start.elapsed());
    // SAFETY: signal 0 asks whether the process exists; the child is the victim's, started for this test.
    assert_eq!(unsafe { libc::kill(child, 0) }, 0, "the forked child was to live");
    // SAFETY: as above.
    unsafe { libc::kill(child, libc::SIGKILL) };
    recv.close().expect("close");
}

#[test]
fn sending_to_a_closed_peer_raises_no_sigpipe() {
    const NAME: &str = "fork::sending_to_a_closed_peer_raises_no_sigpipe";
    child::alone(NAME, &[("TOWLINE_RECONNECT_TIMEOUT", "1")], || {
        let _watchdog = watchdog(60);
        // As in a program in C: Rust's own runtime ignores the signal, which would hide the mistake.
        // SAFETY: restoring the default disposition of a signal touches nothing else.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        for version in crate::support::versions() {
            for size in [10, 60_000, 3 << 20] {
                let Pair { send, recv } = pair(version);
                recv.close().expect("close");
                let mut failed = false;
                for i in 0..20 {
                    // SAFETY: the pattern is static.
                    match unsafe { send.isend(part(pattern(i, size), None)) } {
                        Ok(Some(request)) => {
                            let end = outcome(|it| send.test(it), request, PATIENCE).expect("an answer");
                            failed = failed || end.is_err();
                        }
                        Ok(None) => {}
                        Err(_) => failed = true,
                    }
                    if failed {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(2));
                }
                assert!(failed, "{version}: sends of {size} bytes to nobody succeed for ever");
                send.close().expect("close");
            }
        }
    });
}

#[test]
fn a_sender_whose_receiver_is_killed_gets_an_error_and_no_signal() {
    const NAME: &str = "fork::a_sender_whose_receiver_is_killed_gets_an_error_and_no_signal";
    match child::role().as_deref() {
        Some("victim") => {
            let mail = child::mailbox();
            let context = context(ApiVersion::V12);
            let (listener, handle) = context.listen(0).expect("listen");
            child::send(&mail, "handle", handle.bytes());
            let recv = listener.accept_within(PATIENCE).expect("accept");
            let target = Memory::new(64 << 20);
            // SAFETY: the memory lives as long as the process.
            let _receive = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
            child::send(&mail, "ready", b"");
            std::thread::sleep(Duration::from_secs(40));
        }
        Some("alone") => {
            let _watchdog = watchdog(60);
            // SAFETY: as in the test above.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
            let mail = Mailbox::new();
            let mut command = child::command(NAME, "victim");
            command.env(child::MAILBOX, mail.path());
            let mut victim = Guarded::start(command);
            let context = context(ApiVersion::V12);
            let mut handle = Handle::from_bytes(&child::receive(mail.path(), "handle"));
            let send = context.connect_within(0, &mut handle, PATIENCE).expect("connect");
            child::receive(mail.path(), "ready");
            // One in flight, which over RDMA a slow kernel may finish for the dead process, and one without a receive.
            // SAFETY: the pattern is static.
            let [_, sent] = [(); 2].map(|()| unsafe { send.post(part(pattern(1, 16 << 20), None)) }.expect("isend"));
            assert!(send.test(&sent).expect("a test").is_none());
            victim.kill();
            let start = Instant::now();
            let end = outcome(|it| send.test(it), sent, PATIENCE).expect("the death shows");
            assert_eq!(end.expect_err("nobody receives any more"), Code::RemoteError);
            eprintln!("noticed after {:?}", start.elapsed());
            assert!(start.elapsed() < death_is_noticed_within(Duration::from_secs(5)), "after {:?}", start.elapsed());
        }
        _ => child::alone(NAME, &[], || {}),
    }
}
