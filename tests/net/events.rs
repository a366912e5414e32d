//! What the transport tells NCCL's profiler of each transfer, and when: every rule whose breach crashes some NCCL.
//!
//! The RDMA test machine runs those that are not about sockets over RDMA as well; what is told there of queue pairs is
//! in `rdma::events`.

use std::ffi::CString;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::child::alone;
use crate::support::pair::Pair;
use crate::support::proxy::Trickle;
use crate::support::strict::{Told, Transfer, callback, inside};
use crate::support::told::{NEWEST, finish, listened, moved, pair, receive, send};
use crate::support::{PATIENCE, is_over_rdma, net, part, pattern, watchdog};
use towline::host::{ApiVersion, Init, Memory};
use towline::nccl::ffi::ncclProfilerCallback_t;
use towline::nccl::net_event::{PLUGIN_ID, PLUGIN_ID_SOCKET};

#[test]
fn a_transfer_has_an_event_for_each_part_and_they_add_up_to_the_byte() {
    // On a small host a connection would have one stream.
    let streams = [("TOWLINE_STREAMS", "4"), ("TOWLINE_WORKERS", "2")];
    alone("events::a_transfer_has_an_event_for_each_part_and_they_add_up_to_the_byte", &streams, || {
        let _watchdog = watchdog(60);
        let pair = pair();
        let mut sockets = std::collections::HashSet::new();
        for round in 0..5 {
            for size in [0, 1, 8, 4096, 16 << 10, 64 << 10, (64 << 10) + 1, 300_000, 1 << 20, 9 << 20] {
                let (sender, receiver) = moved(&pair, pattern(size + round, size));
                for (told, op) in [(&sender, 0), (&receiver, 1)] {
                    for piece in told {
                        assert_eq!((piece.id, piece.op, piece.updates), (PLUGIN_ID_SOCKET, op, 0));
                        let link = std::fs::read_link(format!("/proc/self/fd/{}", piece.fd)).expect("a descriptor");
                        assert!(link.to_string_lossy().starts_with("socket:"), "{link:?}");
                    }
                    if size <= 64 << 10 {
                        assert_eq!(told.len(), 1);
                    }
                }
                if size == 9 << 20 && round > 0 {
                    assert!(sender.len() == 8 && receiver.len() == 8, "the rest is put together in the eighth");
                }
                sockets.extend(sender.iter().map(|piece| piece.fd));
            }
        }
        assert!(sockets.len() > 1, "several streams share the long messages");
    });
}

#[test]
fn a_thread_that_has_copied_much_leaves_long_messages_to_workers() {
    let name = "events::a_thread_that_has_copied_much_leaves_long_messages_to_workers";
    alone(name, &[("TOWLINE_STREAMS", "2"), ("TOWLINE_WORKERS", "1")], || {
        let _watchdog = watchdog(60);
        let pair = pair();
        // The second stream comes with the first long message.
        let first = moved(&pair, pattern(0, 8)).0[0].fd;
        while moved(&pair, pattern(0, 2 << 20)).0.iter().all(|piece| piece.fd == first) {}
        // Eight messages in a row, when the worker is asleep: over which sockets?
        let burst = |size: usize, room: usize| {
            std::thread::sleep(Duration::from_millis(20));
            let outs: [&'static Transfer; 8] = std::array::from_fn(|_| Transfer::new());
            let backs: [&'static Transfer; 8] = std::array::from_fn(|_| Transfer::new());
            let targets: [Memory; 8] = std::array::from_fn(|_| Memory::new(room));
            let parts: Vec<_> = (0..8).map(|i| (&targets[i], i as i32, backs[i])).collect();
            let received = receive(&pair, &parts);
            // The receives with more room than an eager message needs are announced.
            std::thread::sleep(Duration::from_millis(if room > size { 20 } else { 0 }));
            let sends: Vec<_> = (0..8).map(|i| send(&pair, pattern(i, size), i as i32, outs[i])).collect();
            let mut used = std::collections::HashSet::new();
            finish(&pair, &received, &sends, |which| match which {
                Some(place) => used.extend(outs[place].whole(size).iter().map(|piece| piece.fd)),
                None => backs.iter().for_each(|back| drop(back.whole(size))),
            });
            assert!((0..8).all(|i| targets[i].bytes()[..size] == *pattern(i, size)));
            used
        };
        for room in [0, 1 << 20] {
            for _ in 0..5 {
                let burst = |size: usize| burst(size, size.max(room)).len();
                assert_eq!(burst(16 << 10), 1, "up to 16 KiB the thread sends itself");
                assert_eq!(burst(32 << 10), 2, "of longer ones all but the first wake the worker");
                assert_eq!(burst(64 << 10), 2, "the longest that the thread sends itself, too");
            }
        }
    });
}

#[test]
fn a_short_send_is_told_before_isend_returns() {
    let _watchdog = watchdog(60);
    let pair = pair();
    for size in [0, 8, 10_000] {
        let (target, out, back) = (Memory::new(size), Transfer::new(), Transfer::new());
        let received = receive(&pair, &[(&target, 0, back)]);
        let sent = send(&pair, pattern(1, size), 0, out);
        assert_eq!(out.whole(size).len(), 1, "started and stopped");
        assert_eq!(back.starts(), 0, "nothing has come yet that could be told");
        finish(&pair, &received, &[sent], |which| {
            if which.is_none() {
                back.whole(size);
            }
        });
    }
}

#[test]
fn many_transfers_at_once_in_any_order_and_in_groups() {
    let _watchdog = watchdog(60);
    let pair = pair();
    for round in 0..6 {
        let sizes: Vec<usize> = (0..8).map(|i| [0, 64, 5000, 80_000, 700_000][(i + round) % 5]).collect();
        let targets: Vec<Memory> = sizes.iter().map(|size| Memory::new(*size)).collect();
        let backs: Vec<&'static Transfer> = sizes.iter().map(|_| Transfer::new()).collect();
        let outs: Vec<&'static Transfer> = sizes.iter().map(|_| Transfer::new()).collect();
        let post = || {
            let parts: Vec<_> = (0..8).map(|i| (&targets[i], i as i32, backs[i])).collect();
            receive(&pair, &parts)
        };
        // Every other round the messages are early.
        let early = round % 2 == 0;
        let mut sends = Vec::new();
        let first = (!early).then(post);
        for i in (0..8).rev() {
            sends.push(send(&pair, pattern(i, sizes[i]), i as i32, outs[i]));
        }
        let received = first.unwrap_or_else(post);
        finish(&pair, &received, &sends, |which| match which {
            Some(place) => drop(outs[7 - place].whole(sizes[7 - place])),
            None => backs.iter().zip(&sizes).for_each(|(back, size)| drop(back.whole(*size))),
        });
    }
}

#[test]
fn a_transfer_whose_first_start_is_declined_is_left_alone() {
    let _watchdog = watchdog(60);
    let pair = pair();
    for size in [8, 64 << 10, 3 << 20, 3 << 20] {
        let (target, out, back) = (Memory::new(size), Transfer::declining(), Transfer::declining());
        let received = receive(&pair, &[(&target, 0, back)]);
        let sent = send(&pair, pattern(2, size), 0, out);
        finish(&pair, &received, &[sent], |_| {});
        assert_eq!((out.starts(), back.starts()), (1, 1), "{size}: one start tells that nobody listens");
        assert!(out.told().is_empty() && back.told().is_empty());
    }
    // A profiler starts to listen: from the second transfer on everything is reported in full.
    moved(&pair, pattern(3, 5 << 20));
    let (sender, _) = moved(&pair, pattern(3, 5 << 20));
    // Over sockets in chunks, over RDMA as one share of its one queue pair.
    assert_eq!(sender.len(), if is_over_rdma() { 1 } else { 8 }, "{sender:?}");
}

#[test]
fn a_later_start_that_is_declined_is_not_stopped_and_the_others_are() {
    let _watchdog = watchdog(60);
    let pair = pair();
    let size = 5 << 20;
    // From the second transfer on they are followed chunk by chunk.
    moved(&pair, pattern(1, size));
    // A null handle that came back would end this process: the callback reads it as NCCL does.
    for declined in [0b0000_0010_u64, 0b1010_1010, 0b0110_1100] {
        let (target, out, back) =
            (Memory::new(size), Transfer::declining_some(declined), Transfer::declining_some(declined));
        let received = receive(&pair, &[(&target, 0, back)]);
        let sent = send(&pair, pattern(2, size), 0, out);
        finish(&pair, &received, &[sent], |which| (if which.is_some() { out } else { back }).free());
        for transfer in [out, back] {
            let (told, starts) = (transfer.told(), transfer.starts());
            let taken = (0..starts).filter(|number| declined >> number & 1 == 0).count();
            // Over RDMA there is one share, whose start is the first and taken.
            assert!(starts <= 8 && (is_over_rdma() || starts > 2), "{starts} starts");
            assert_eq!(told.len(), taken);
            assert!(told.iter().all(|piece| piece.stops == 1), "{told:?}");
            assert!(is_over_rdma() || told.iter().map(|piece| piece.length).sum::<u64>() < size as u64);
        }
        assert!(target.bytes() == pattern(2, size));
        // A profiler that declined the last piece is called once in the next transfer, and after that for each piece
        // again.
        moved(&pair, pattern(3, size));
        let (sender, _) = moved(&pair, pattern(3, size));
        assert_eq!(sender.len(), if is_over_rdma() { 1 } else { 8 }, "{sender:?}");
    }
}

#[test]
fn a_send_whose_stream_is_busy_waits_for_credit() {
    let variables = [("TOWLINE_NET_EVENTS", "towline"), ("TOWLINE_STREAMS", "1"), ("TOWLINE_WORKERS", "1")];
    alone("events::a_send_whose_stream_is_busy_waits_for_credit", &variables, || {
        let _watchdog = watchdog(60);
        if is_over_rdma() {
            return;
        }
        let (pair, size) = (pair(), 8 << 20);
        moved(&pair, pattern(1, size));
        let mut credits = Vec::new();
        for round in 0..30 {
            let targets: Vec<Memory> = (0..4).map(|_| Memory::new(size)).collect();
            let backs: Vec<&'static Transfer> = (0..4).map(|_| Transfer::new()).collect();
            let outs: Vec<&'static Transfer> = (0..4).map(|_| Transfer::new()).collect();
            let began = Instant::now();
            let parts: Vec<_> = (0..4).map(|i| (&targets[i], i as i32, backs[i])).collect();
            let received = receive(&pair, &parts);
            let sends: Vec<_> = (0..4).map(|i| send(&pair, pattern(round + i, size), i as i32, outs[i])).collect();
            let mut told = vec![Vec::new(); 4];
            finish(&pair, &received, &sends, |which| match which {
                Some(place) => told[place] = outs[place].whole(size),
                None => backs.iter().for_each(|back| drop(back.whole(size))),
            });
            let most = began.elapsed().as_nanos() as u64;
            assert!(told.iter().flatten().all(|piece| piece.details.wait_credit_ns <= most), "{told:?} in {most} ns");
            // The last has to wait until the others have been handed to the one stream. That the first found the thread
            // asleep may have taken as long on a busy machine: another round.
            credits = told
                .iter()
                .map(|pieces| pieces.iter().map(|piece| piece.details.wait_credit_ns).sum::<u64>())
                .collect();
            if credits[3] > 10 * credits[0].max(1000) {
                return;
            }
        }
        panic!("the last of four sends waited no longer than the first in thirty rounds: {credits:?}");
    });
}

#[test]
fn a_send_whose_peer_does_not_read_waits_for_socket_space() {
    let variables = [("TOWLINE_NET_EVENTS", "towline"), ("TOWLINE_STREAMS", "1"), ("NCCL_SOCKET_IFNAME", "lo")];
    alone("events::a_send_whose_peer_does_not_read_waits_for_socket_space", &variables, || {
        let _watchdog = watchdog(100);
        if is_over_rdma() {
            return;
        }
        let init = Init { comm_id: 7, profiler: Some(callback), ..Init::default() };
        let context = net(NEWEST).init_with(&init).expect("init");
        let (listener, mut handle) = context.listen(0).expect("listen");
        let trickle = Trickle::before(&mut handle);
        let pair = Pair::through(&listener, (&context, 0), &mut handle).expect("a connection");
        let waits = |told: &[Told]| told.iter().map(|piece| piece.details.wait_socket_ns).collect::<Vec<_>>();

        // What finds room waits for none.
        let (sender, receiver) = moved(&pair, pattern(1, 5000));
        assert_eq!((waits(&sender), waits(&receiver)), (vec![0], vec![0]));

        // On loopback the kernel gives a socket more room than one stream has under way.
        let room: libc::c_int = 64 << 10;
        let length = size_of::<libc::c_int>() as libc::socklen_t;
        let (fd, value) = (sender[0].details.device, (&raw const room).cast());
        // SAFETY: a socket of this process that stays open; the kernel reads one int.
        let set = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, value, length) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());

        // More than the sockets on the path hold, and nothing is read for a while.
        let (size, held) = (1 << 20, Duration::from_millis(300));
        let mut waited = 0;
        for round in 0..10 {
            let (target, out, back) = (Memory::new(size), Transfer::new(), Transfer::new());
            let received = receive(&pair, &[(&target, 0, back)]);
            trickle.begin();
            let began = Instant::now();
            let sent = send(&pair, pattern(round, size), 0, out);
            while began.elapsed() < held {
                assert!(inside(|| pair.send.test(&sent)).expect("a send goes on").is_none(), "it cannot have arrived");
                towline::host::give_way(began);
            }
            trickle.end();
            finish(&pair, &received, &[sent], |which| match which {
                Some(_) => {
                    let (told, most) = (out.whole(size), began.elapsed().as_nanos() as u64);
                    assert!(waits(&told).iter().all(|&wait| wait <= most), "{told:?} in {most} ns");
                    waited = waits(&told).iter().sum();
                }
                None => assert!(back.whole(size).iter().all(|piece| piece.details.wait_socket_ns == 0)),
            });
            assert!(target.bytes() == pattern(round, size));
            // On a busy machine the sender may have come late to the socket: another round.
            if waited > held.as_nanos() as u64 / 2 {
                return;
            }
        }
        panic!("in ten rounds the last of which waited {waited} ns, of {held:?} in which nobody read");
    });
}

#[test]
fn without_a_handle_or_a_callback_nothing_is_called() {
    let _watchdog = watchdog(60);
    unsafe extern "C" fn never(
        _: *mut *mut std::ffi::c_void,
        _: i32,
        _: *mut std::ffi::c_void,
        _: i64,
        _: *mut std::ffi::c_void,
    ) -> u32 {
        eprintln!("the callback was called with a null handle");
        std::process::abort();
    }
    for callback in [Some(never as _), None] {
        let pair = listened(NEWEST, callback);
        for size in [0, 8, 100_000, 3 << 20] {
            assert!(pair.transfer(pattern(5, size)).expect("a transfer") == pattern(5, size));
        }
    }
    let pair = listened(NEWEST, None);
    let (sender, receiver) = (Transfer::new(), Transfer::new());
    let target = Memory::new(100);
    let received = receive(&pair, &[(&target, 0, receiver)]);
    let sent = send(&pair, pattern(5, 100), 0, sender);
    finish(&pair, &received, &[sent], |_| {});
    assert_eq!(sender.starts() + receiver.starts(), 0);
}

/// NCCL frees what the handles lead to, then closes; workers may be in the middle of the messages.
#[test]
fn an_abort_calls_nobody_back() {
    let _watchdog = watchdog(60);
    for round in 0..12 {
        let pair = pair();
        // Known to listen, so that the long ones are followed chunk by chunk.
        moved(&pair, pattern(1, 200_000));
        let targets: Vec<Memory> = (0..6).map(|_| Memory::new(8 << 20)).collect();
        let mut transfers = Vec::new();
        let mut requests = Vec::new();
        for target in &targets {
            let (out, back) = (Transfer::new(), Transfer::new());
            requests.push((receive(&pair, &[(target, 0, back)]), send(&pair, pattern(4, 8 << 20), 0, out)));
            transfers.extend([out, back]);
        }
        // Some way into it.
        let mut over = Vec::new();
        for _ in 0..round * 5 {
            for (index, (received, sent)) in requests.iter().enumerate() {
                if !over.contains(&(index, 0)) && inside(|| pair.send.test(sent)).expect("a send").is_some() {
                    over.push((index, 0));
                    transfers[2 * index].free();
                }
                if !over.contains(&(index, 1)) && inside(|| pair.recv.test(received)).expect("a receive").is_some() {
                    over.push((index, 1));
                    transfers[2 * index + 1].free();
                }
            }
        }
        transfers.iter().for_each(|transfer| transfer.free());
        // Either side first.
        if round % 2 == 0 {
            pair.send.close().expect("a close");
            pair.recv.close().expect("a close");
        } else {
            pair.recv.close().expect("a close");
            pair.send.close().expect("a close");
        }
        transfers.iter().for_each(|transfer| transfer.close());
        std::thread::sleep(Duration::from_millis(5));
        for transfer in &transfers {
            transfer.told();
        }
    }
}

#[test]
fn a_transfer_that_fails_starts_nothing_more_and_stops_what_it_started() {
    let _watchdog = watchdog(60);
    // On a busy machine a long message may be there before its sender is given the processor to go. Then another one.
    assert!((0..10).any(|_| is_lost_with_its_sender(16 << 20)), "none was cut short");
    assert!(is_lost_with_its_sender(100), "nothing was sent");
}

/// The sender has one message under way if it is long, else none, and goes. Whether the receive failed.
fn is_lost_with_its_sender(size: usize) -> bool {
    let pair = pair();
    moved(&pair, pattern(1, 200_000));
    let (target, back) = (Memory::new(size), Transfer::new());
    let received = receive(&pair, &[(&target, 0, back)]);
    let out = Transfer::new();
    if size > 100 {
        send(&pair, pattern(1, size), 0, out);
        out.free();
    }
    pair.send.close().expect("a close");
    out.close();
    let start = Instant::now();
    let failed = loop {
        match inside(|| pair.recv.test(&received)) {
            Err(_) => break true,
            Ok(Some(_)) => break false,
            Ok(None) => assert!(start.elapsed() < PATIENCE, "the receive learns of it"),
        }
    };
    let told = back.told();
    back.free();
    assert!(told.iter().all(|piece| piece.stops == 1), "{told:?}");
    if !failed {
        assert!(target.bytes() == pattern(1, size), "a receive that is done has all of it");
    }
    pair.recv.close().expect("a close");
    back.close();
    out.told();
    back.told();
    failed
}

#[test]
fn a_send_that_isend_refuses_ends_what_it_started() {
    let _watchdog = watchdog(60);
    let pair = pair();
    let (target, back, out) = (Memory::new(100_000), Transfer::new(), Transfer::new());
    let _received = receive(&pair, &[(&target, 0, back)]);
    let bytes = pattern(1, 200_000);
    // The receive was announced; until the sender knows, its message waits and fails later.
    // SAFETY: the bytes are static, the transfer is never freed.
    let posted = inside(|| unsafe { pair.send.post(part(bytes, None).profiled(out.handle())) });
    let outcome = posted.and_then(|request| {
        let start = Instant::now();
        loop {
            if let Some(sizes) = inside(|| pair.send.test(&request))? {
                return Ok(sizes);
            }
            assert!(start.elapsed() < PATIENCE);
        }
    });
    assert!(outcome.is_err(), "it does not fit");
    assert!(out.told().iter().all(|piece| piece.stops == 1));
    out.free();
}

#[test]
fn under_towlines_identifier_both_sides_tell_the_same_story() {
    let variables = [("TOWLINE_NET_EVENTS", "towline"), ("TOWLINE_STREAMS", "3"), ("TOWLINE_WORKERS", "2")];
    alone("events::under_towlines_identifier_both_sides_tell_the_same_story", &variables, || {
        let _watchdog = watchdog(60);
        let pair = pair();
        let mut link = 0;
        for (number, size) in [8, 100_000, 2 << 20, 0, 4 << 20].into_iter().enumerate() {
            let (sender, receiver) = moved(&pair, pattern(number, size));
            for (told, is_send) in [(&sender, true), (&receiver, false)] {
                for piece in told {
                    assert_eq!((piece.id, piece.updates), (PLUGIN_ID, 1));
                    let details = &piece.details;
                    link = if link == 0 { details.link } else { link };
                    assert_eq!((details.link, details.is_send()), (link, is_send));
                    // A GID has no port.
                    assert_eq!(details.peer().map(|peer| peer.port() > 0), Some(!is_over_rdma()));
                    assert_eq!(details.message, number as u64);
                }
                let mut ranges: Vec<_> = told.iter().map(|piece| (piece.details.offset, piece.length)).collect();
                ranges.sort_unstable();
                if told.len() < 8 {
                    // Nothing was put together: the ranges tile the message.
                    let end = ranges.iter().fold(0, |at, &(offset, length)| {
                        assert_eq!(at, offset, "{ranges:?}");
                        offset + length
                    });
                    assert_eq!(end, size as u64);
                }
            }
            let long = size > 64 << 10;
            assert!(sender.iter().all(|piece| !long || piece.details.wire_ns > 0), "{sender:?}");
        }
        // A receive that is posted late is what its send waited for.
        let size = 1 << 20;
        let (target, out, back) = (Memory::new(size), Transfer::new(), Transfer::new());
        let sent = send(&pair, pattern(9, size), 0, out);
        std::thread::sleep(Duration::from_millis(30));
        let received = receive(&pair, &[(&target, 0, back)]);
        finish(&pair, &received, &[sent], |which| {
            if which.is_some() {
                let told = out.whole(size);
                let waited: u64 = told.iter().map(|piece| piece.details.wait_receiver_ns).sum();
                assert!((30_000_000..5_000_000_000).contains(&waited), "{waited} ns");
            }
        });
    });
}

#[test]
fn what_a_broken_stream_lost_is_told_apart_when_it_travels_again() {
    let variables = [("TOWLINE_NET_EVENTS", "towline"), ("TOWLINE_STREAMS", "2"), ("TOWLINE_WORKERS", "1")];
    alone("events::what_a_broken_stream_lost_is_told_apart_when_it_travels_again", &variables, || {
        let _watchdog = watchdog(60);
        let pair = pair();
        let size = 16 << 20;
        let (mut resent, mut reconnects) = (0, 0);
        for round in 0..30 {
            let (_, receiver) = moved(&pair, pattern(round, 1 << 20));
            reconnects += receiver.iter().map(|piece| u32::from(piece.details.reconnects)).sum::<u32>();
            let (target, out, back) = (Memory::new(size), Transfer::new(), Transfer::new());
            let received = receive(&pair, &[(&target, 0, back)]);
            let sent = send(&pair, pattern(round, size), 0, out);
            // Cut the socket of the first chunk, in its middle.
            let (mut left, mut came) = (false, false);
            while back.starts() == 0 && !left && !came {
                left = inside(|| pair.send.test(&sent)).expect("a send").is_some();
                came = inside(|| pair.recv.test(&received)).expect("a receive").is_some();
            }
            if left || came {
                // This thread was not given the processor until all of it was here. Another round.
                while !left {
                    left = inside(|| pair.send.test(&sent)).expect("a send").is_some();
                }
                while !came {
                    came = inside(|| pair.recv.test(&received)).expect("a receive").is_some();
                }
                continue;
            }
            // SAFETY: a socket of this process, still open as its chunk is being received.
            unsafe { libc::shutdown(back.told()[0].details.device, libc::SHUT_RDWR) };
            finish(&pair, &received, &[sent], |which| match which {
                Some(_) => {
                    let told = out.whole(size);
                    let again: Vec<&Told> = told.iter().filter(|piece| piece.details.is_resend()).collect();
                    resent += again.len();
                    assert!(again.iter().all(|piece| piece.length > 0 && piece.details.retransmissions == 0));
                    let counted: u32 = told.iter().map(|piece| piece.details.retransmissions).sum();
                    assert!(counted as usize >= again.len(), "{told:?}");
                    reconnects += told.iter().map(|piece| u32::from(piece.details.reconnects)).sum::<u32>();
                }
                None => drop(back.whole(size)),
            });
            assert!(target.bytes() == pattern(round, size));
            if resent > 0 && reconnects > 0 {
                return;
            }
        }
        panic!("nothing was sent again in thirty breaks: {resent} resends, {reconnects} reconnects");
    });
}

/// A library with the callback and a release, as NCCL's would have: how the transport tells one from another.
fn nccl_of_release(dir: &std::path::Path, release: u32) -> ncclProfilerCallback_t {
    let (source, library) = (dir.join(format!("{release}.c")), dir.join(format!("lib{release}.so")));
    let text = format!(
        "#include <stdint.h>\n\
         int (*real)(void **, int, void *, int64_t, void *);\n\
         int ncclGetVersion(int *version) {{ *version = {release}; return 0; }}\n\
         int tell(void **e, int kind, void *t, int64_t id, void *d) {{ return real(e, kind, t, id, d); }}\n"
    );
    std::fs::write(&source, text).expect("a file");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(built.expect("cc runs").success());
    let name = CString::new(library.to_str().expect("a plain path")).expect("no zero in it");
    // SAFETY: a library that was just built, which does nothing when it is opened.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null());
    // SAFETY: the names and types are those of the source above.
    unsafe {
        let real = libc::dlsym(library, c"real".as_ptr()).cast::<ncclProfilerCallback_t>();
        *real = Some(callback);
        std::mem::transmute(libc::dlsym(library, c"tell".as_ptr()))
    }
}

/// (starts, updates) of one transfer under a release.
fn told_by(version: ApiVersion, release: u32) -> (usize, u32) {
    let dir = tempfile::tempdir().expect("a directory");
    let pair = listened(version, nccl_of_release(dir.path(), release));
    let (target, out, back) = (Memory::new(100), Transfer::new(), Transfer::new());
    let received = receive(&pair, &[(&target, 0, back)]);
    let sent = send(&pair, pattern(1, 100), 0, out);
    finish(&pair, &received, &[sent], |_| {});
    let told = out.told();
    assert!(told.iter().all(|piece| piece.stops == 1));
    (out.starts(), told.iter().map(|piece| piece.updates).sum())
}

#[test]
fn nccl_2_26_and_2_27_are_told_nothing_unless_a_variable_asks_for_it() {
    alone("events::nccl_2_26_and_2_27_are_told_nothing_unless_a_variable_asks_for_it", &[], || {
        let _watchdog = watchdog(60);
        assert_eq!(told_by(ApiVersion::V10, 22_602).0, 0);
        assert_eq!(told_by(ApiVersion::V10, 22_707).0, 0);
        assert_eq!(told_by(ApiVersion::V12, 23_007).0, 1);
        assert_eq!(told_by(ApiVersion::V11, 22_809).0, 1);
        // The interface says it too, when the library does not.
        let pair = listened(ApiVersion::V10, Some(callback));
        let out = Transfer::new();
        let target = Memory::new(8);
        let received = receive(&pair, &[(&target, 0, Transfer::new())]);
        let sent = send(&pair, pattern(1, 8), 0, out);
        finish(&pair, &received, &[sent], |_| {});
        assert_eq!(out.starts(), 0);
    });
}

#[test]
fn nccl_2_26_gets_no_update_since_it_would_take_it_for_a_stop() {
    for release in [22_602, 22_707] {
        let name = "events::nccl_2_26_gets_no_update_since_it_would_take_it_for_a_stop";
        // A process each: before v11 a process has one context.
        let release_text = release.to_string();
        let variables = [("TOWLINE_NET_EVENTS", "towline"), ("RELEASE", release_text.as_str())];
        alone(name, &variables, || {
            let release = std::env::var("RELEASE").expect("set above").parse().expect("a number");
            let updates = u32::from(release > 22_699);
            assert_eq!(told_by(ApiVersion::V10, release), (1, updates));
        });
    }
}

#[test]
fn events_can_be_turned_off() {
    alone("events::events_can_be_turned_off", &[("TOWLINE_NET_EVENTS", "off")], || {
        assert_eq!(told_by(NEWEST, 23_007).0, 0);
    });
}
