//! One-sided operations, driven as NCCL's progress thread drives them (`support::rma`), in host memory. NCCL itself is
//! not part of these tests.

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, Mailbox, end_of, fork};
use crate::support::faults::Dice;
use crate::support::flagcx::Object;
use crate::support::injector::{FAULTY_CALLS, faulty_calls};
use crate::support::netns::{available, two_hosts};
use crate::support::one_sided::{
    COMM, NOWHERE, ON, OTHER, PATIENCE, Rank, at, beside_a_process, connected, holds, listening,
    lives_until_it_is_killed, moves_all_sizes, pick, rma, signal_of, signals_follow_their_puts,
};
use crate::support::rma::PutSignal;
use crate::support::window::Window;
use crate::support::{context, cut, eventually, key_file, pattern, streams, watchdog};
use towline::host::log::{Capture, Record};
use towline::host::{ApiVersion, Code, Handle, Memory, PTR_CUDA, PTR_DMABUF, PTR_HOST, Part, Properties};
use towline::nccl::ffi::ncclRma_v16_t;

const VERSIONS: [u32; 3] = [14, 15, 16];

/// The table of v16, as NCCL 2.32.3 reads it. `abi::layout` has the others, which a compiler measured.
#[test]
fn the_newest_table_is_laid_out_as_nccl_reads_it() {
    macro_rules! offsets {
        ($($at:literal $field:ident)+) => {
            $( assert_eq!(offset_of!(ncclRma_v16_t, $field), $at, stringify!($field)); )+
        };
    }
    offsets! {
        0 name 8 init 16 devices 24 getRmaProperties 32 getProperties 40 listen 48 connect 56 createContext 64 regMrSym
        72 regMrSymDmaBuf 80 deregMrSym 88 destroyContext 96 closeColl 104 closeListen 112 iput 120 iputSignal 128 iget
        136 iflush 144 test 152 rmaProgress 160 queryLastError 168 finalize
    }
    assert_eq!(size_of::<ncclRma_v16_t>(), 176);
}

/// Why `init` declines, as the log has it.
fn declines(reason: &str) {
    for version in VERSIONS {
        let log = Capture::start();
        assert_eq!(rma(version).init(COMM).err(), Some(Code::InvalidUsage));
        assert!(!log.records().iter().any(|record| record.is_warning()), "{:?}", log.records());
        if !reason.is_empty() {
            assert!(log.contains(reason), "{reason}: {:?}", log.records());
        }
    }
}

#[test]
fn nothing_is_offered_unless_it_is_asked_for() {
    child::alone("rma::nothing_is_offered_unless_it_is_asked_for", &[("NCCL_DEBUG", "INFO")], || {
        let _net = context(ApiVersion::V12);
        declines("TOWLINE_RMA is not 1");
    });
}

#[test]
fn nothing_is_offered_where_a_gpu_has_too_few_queues() {
    for queues in ["1", "2", "3"] {
        let variables = [ON, ("NCCL_DEBUG", "INFO"), ("CUDA_DEVICE_MAX_CONNECTIONS", queues)];
        child::alone("rma::nothing_is_offered_where_a_gpu_has_too_few_queues", &variables, || {
            let _net = context(ApiVersion::V12);
            if std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|queues| queues == "3") {
                rma(16).init(COMM).expect("three are enough");
            } else {
                declines("with CUDA_DEVICE_MAX_CONNECTIONS at 1 or 2");
            }
        });
    }
}

#[test]
fn nothing_is_offered_to_a_communicator_of_another_network() {
    child::alone("rma::nothing_is_offered_to_a_communicator_of_another_network", &[ON, ("NCCL_DEBUG", "INFO")], || {
        // No network's `init` has been called: nobody has given a logger.
        declines("");
        let log = Capture::start();
        let net = context(ApiVersion::V12);
        assert!(log.contains("one-sided operations are off in this process"), "{:?}", log.records());
        let rma = rma(16);
        assert_eq!(rma.init(COMM + 1).err(), Some(Code::InvalidUsage));
        assert!(log.contains("this communicator does not use Towline"), "{:?}", log.records());
        let ctx = rma.init(COMM).expect("init");
        net.finalize().expect("finalize");
        // NCCL would disable them for the communicator that has them.
        let others = [0, 1].map(|_| rma.init(COMM + 1).expect("none is declined now"));
        let warned = log.records().iter().filter(|it| it.text.contains("although this communicator does not")).count();
        assert_eq!(warned, 2, "its first context is no network's: {:?}", log.records());
        rma.finalize(ctx).expect("finalize");
        others.into_iter().for_each(|other| rma.finalize(other).expect("finalize"));
        declines("");
    });
}

/// Compares the devices of one-sided operations with those of the network: NCCL reads the former into its topology
/// first. Gives their names.
fn compared_devices() -> Vec<String> {
    let net = context(ApiVersion::V12);
    let theirs = (0..net.devices().expect("devices")).map(|dev| net.properties(dev).expect("getProperties"));
    let theirs: Vec<_> = theirs.collect();
    for version in VERSIONS {
        let rma = rma(version);
        let ctx = rma.init(COMM).expect("init");
        assert_eq!(rma.devices(), net.devices());
        for (dev, theirs) in (0..).zip(&theirs) {
            let (ours, kind) = rma.properties(dev).expect("getProperties");
            assert_eq!(kind, 2, "NCCL's own proxy thread calls");
            assert_eq!(&Properties { device_type: theirs.device_type, ..ours }, theirs);
        }
        rma.finalize(ctx).expect("finalize");
    }
    theirs.into_iter().map(|it| it.name).collect()
}

#[test]
fn devices_are_those_of_the_network() {
    child::alone("rma::devices_are_those_of_the_network", &[ON], || assert!(!compared_devices().is_empty()));
}

#[test]
fn several_devices_are_those_of_the_network_in_its_order() {
    const NAME: &str = "rma::several_devices_are_those_of_the_network_in_its_order";
    if child::role().as_deref() == Some("inside") {
        return assert_eq!(compared_devices(), ["rail0", "rail1", "rail2"]);
    }
    if !available() {
        return;
    }
    let (host, _other) = two_hosts(3);
    let mut inside = host.command(NAME, "inside");
    inside.env(ON.0, ON.1);
    child::run(&mut inside, NAME);
}

/// What NCCL reads of the network's devices into its topology.
fn describes_devices() {
    let net = context(ApiVersion::V12);
    if std::env::var_os(ON.0).is_some() {
        rma(16).init(COMM).expect("init");
    }
    let devices = 0..net.devices().expect("devices");
    let described: Vec<_> = devices.map(|dev| net.properties(dev).expect("getProperties")).collect();
    child::send(&child::mailbox(), "devices", format!("{described:?}").as_bytes());
}

#[test]
fn the_topology_is_the_same_with_and_without_them() {
    const NAME: &str = "rma::the_topology_is_the_same_with_and_without_them";
    if child::role().as_deref() == Some("describes") {
        return describes_devices();
    }
    let _watchdog = watchdog(60);
    let described = [None, Some(ON.1)].map(|value| {
        let mail = Mailbox::new();
        let mut command = child::command(NAME, "describes");
        command.env(child::MAILBOX, mail.path()).env_remove(ON.0).envs(value.map(|value| (ON.0, value)));
        let mut describing = Guarded::start(command);
        let devices = child::receive(mail.path(), "devices");
        assert!(describing.passed_within(PATIENCE));
        String::from_utf8(devices).expect("text")
    });
    assert_eq!(described[0], described[1]);
    assert!(described[0].contains("pci_path"), "{}", described[0]);
}

/// 32 times the receives of a group, in four contexts, and 1 GiB at a time.
#[test]
fn as_much_is_outstanding_as_nccl_allows() {
    child::alone("rma::as_much_is_outstanding_as_nccl_allows", &[ON], || {
        let _watchdog = watchdog(200);
        const REQUESTS: usize = 256;
        const GIB: usize = 1 << 30;
        let ranks = connected(14, 2);
        assert_eq!(32 * ranks[0].net.properties(0).expect("getProperties").max_recvs, REQUESTS as i32);
        let contexts: Vec<Object> =
            (0..4).map(|_| ranks[0].rma.create_context(ranks[0].group).expect("createContext")).collect();
        let (source, target) = (Window::host(GIB), Window::host(GIB));
        for at in (0..GIB).step_by(4096) {
            // SAFETY: inside the memory and aligned to 8 bytes; no transfer uses it yet.
            unsafe { source.seen(at).cast::<usize>().write(at + 1) };
        }
        let [[from, _], [_, to]] = [0, 1].map(|rank: usize| [&source, &target].map(|it| ranks[rank].register(it)));
        let mut open = Vec::new();
        for number in 0..REQUESTS {
            for (index, &context) in contexts.iter().enumerate() {
                let offset = (number * contexts.len() + index) * 4096;
                open.push(ranks[0].rma.put(context, (at(from, offset), 8, at(to, offset)), 1, None).expect("iput"));
            }
        }
        open.into_iter().for_each(|put| ranks[0].wait(put).expect("it ends"));
        assert!(holds_numbers(&target, REQUESTS * contexts.len()));
        target.clear(0..GIB);
        ranks[0].wait(ranks[0].put((at(from, 0), GIB, at(to, 0)), 1, None)).expect("it ends");
        assert!(holds_numbers(&target, GIB / 4096));
        contexts.into_iter().for_each(|context| ranks[0].rma.destroy_context(context).expect("destroyContext"));
        ranks.into_iter().for_each(Rank::close);
    });
}

fn holds_numbers(window: &Window, count: usize) -> bool {
    (0..count).all(|page| holds(window, page * 4096, &(page * 4096 + 1).to_ne_bytes()))
}

#[test]
fn puts_and_gets_of_all_sizes_arrive() {
    child::alone("rma::puts_and_gets_of_all_sizes_arrive", &[ON], || {
        let _watchdog = watchdog(200);
        for (version, count) in VERSIONS.into_iter().zip([2, 3, 2]) {
            moves_all_sizes(version, count, |_, size| Window::host(size));
        }
    });
}

#[test]
fn a_visible_signal_means_that_all_earlier_puts_are() {
    let (_dir, key) = key_file();
    let key = key.to_str().expect("text");
    for more in [("TOWLINE_STREAMS", "4"), ("TOWLINE_KEY_FILE", key), ("TOWLINE_CHECKSUM", "1")] {
        child::alone("rma::a_visible_signal_means_that_all_earlier_puts_are", &[ON, more], || {
            let _watchdog = watchdog(200);
            signals_follow_their_puts((2, 150), |_, size| Window::host(size), 0, |_, _| ());
            signals_follow_their_puts((3, 100), |_, size| Window::host(size), 0, |_, _| ());
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// The library's system calls fail now and then, with errors that the kernel may give.
#[test]
fn signals_keep_their_promise_when_system_calls_fail() {
    let injector = faulty_calls().to_str().expect("text");
    let variables = [
        ON,
        ("LD_PRELOAD", injector),
        ("FAULTY_CALLS_LIBRARY", "libnccl-net"),
        ("FAULTY_CALLS_SEED", "1"),
        ("FAULTY_CALLS_RATE", "10"),
    ];
    child::alone("rma::signals_keep_their_promise_when_system_calls_fail", &variables, || {
        let _watchdog = watchdog(200);
        signals_follow_their_puts(
            (2, 150),
            |_, size| Window::host(size),
            0,
            |rank, begun| {
                if rank == 0 && begun == 20 {
                    FAULTY_CALLS.arm(true);
                }
            },
        );
        FAULTY_CALLS.arm(false);
        let faults: u32 = FAULTY_CALLS.injected().values().map(|(_, faults)| faults).sum();
        assert!(faults > 10, "{faults} faults");
    });
}

/// Ends TCP connections of this process, each second one, as a middle box does that forgets them. Gives how many.
fn cut_streams() -> usize {
    streams().into_iter().step_by(2).filter(|&stream| cut(stream)).count()
}

#[test]
fn signals_keep_their_promise_when_streams_are_cut() {
    child::alone("rma::signals_keep_their_promise_when_streams_are_cut", &[ON, ("TOWLINE_STREAMS", "4")], || {
        let _watchdog = watchdog(200);
        signals_follow_their_puts(
            (2, 150),
            |_, size| Window::host(size),
            0,
            |rank, begun| {
                if rank == 0 && begun.is_multiple_of(60) {
                    assert!(cut_streams() > 0, "there are streams to cut");
                }
            },
        );
    });
}

#[test]
fn registrations_end_while_puts_are_late() {
    child::alone("rma::registrations_end_while_puts_are_late", &[ON], || {
        let _watchdog = watchdog(100);
        let size = 64 << 20;
        for round in 0..4 {
            let ranks = connected(14, 2);
            let (source, window) = (Window::host(size), Window::host(size));
            let mrs = [ranks[0].register(&source), ranks[1].register(&window)];
            let what = (at(mrs[0], 0), size, at(mrs[0], 0));
            let requests: Vec<Object> = (0..4).map(|_| ranks[0].put(what, 1, None)).collect();
            std::thread::sleep(Duration::from_millis(round * 5));
            // The reader's or the target's registration ends; from then on the memory is the user's.
            let start = Instant::now();
            ranks[1].rma.dereg_mr(ranks[1].group, mrs[1]).expect("deregMrSym");
            assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
            window.fill(&vec![0xEE; size]);
            if round % 2 == 0 {
                ranks[0].rma.dereg_mr(ranks[0].group, mrs[0]).expect("deregMrSym");
            }
            let ends: Vec<_> = requests.into_iter().map(|request| ranks[0].wait(request)).collect();
            // NCCL's abort of rank 0 waits for them, and a failure would stop NCCL's progress thread.
            assert!(ends.iter().all(Result::is_ok), "{ends:?}");
            if round % 2 == 0 {
                assert_eq!(ranks[0].wait(ranks[0].put(what, 1, None)), Ok(()), "dropped, as its source is gone");
            }
            assert!(window.is_filled_with(0xEE), "no put lands late");
            ranks.into_iter().for_each(Rank::close);
        }
    });
}

/// NCCL makes windows and contexts in other threads than the one that puts.
#[test]
fn registrations_and_contexts_come_and_go_beside_puts() {
    child::alone("rma::registrations_and_contexts_come_and_go_beside_puts", &[ON], || {
        let _watchdog = watchdog(100);
        const PUTS: usize = 2000;
        let ranks = connected(16, 2);
        let (windows, signals) = ([0, 1].map(|_| Window::host(8 * PUTS)), Window::host(8));
        let [[from, number], [to, _]] =
            [0, 1].map(|rank: usize| [&windows[rank], &signals].map(|it| ranks[rank].register(it)));
        windows[0].fill(&(0..PUTS).flat_map(|put| (put + 1).to_ne_bytes()).collect::<Vec<_>>());
        let is_over = AtomicBool::new(false);
        let rounds = std::thread::scope(|scope| {
            let comes_and_goes = scope.spawn(|| {
                let mut rounds = 0;
                while rounds == 0 || !is_over.load(Ordering::Relaxed) {
                    let passing = Window::host(4096);
                    passing.fill(&[7; 64]);
                    let [mr, other] = [0, 1].map(|rank: usize| ranks[rank].register(&passing));
                    let Rank { rma, group, .. } = &ranks[0];
                    let context = rma.create_context(*group).expect("createContext");
                    let put = rma.put(context, (at(mr, 0), 64, at(other, 64)), 1, None).expect("iput");
                    ranks[0].wait(put).expect("it ends");
                    rma.destroy_context(context).expect("destroyContext");
                    ranks[1].rma.dereg_mr(ranks[1].group, other).expect("deregMrSym");
                    rma.dereg_mr(*group, mr).expect("deregMrSym");
                    assert!(holds(&passing, 64, &[7; 64]));
                    rounds += 1;
                }
                rounds
            });
            let signal = PutSignal { at: at(number, 0), value: None };
            let put = |put: usize| ranks[0].put((at(from, 8 * put), 8, at(to, 8 * put)), 1, Some(signal));
            let numbers: Vec<usize> = (0..PUTS).collect();
            for some in numbers.chunks(32) {
                let open: Vec<Object> = some.iter().map(|&number| put(number)).collect();
                open.into_iter().for_each(|request| ranks[0].wait(request).expect("it ends"));
            }
            is_over.store(true, Ordering::Relaxed);
            comes_and_goes.join().expect("windows and contexts")
        });
        assert!(rounds > 0);
        assert!(holds(&windows[1], 0, &(0..PUTS).flat_map(|put| (put + 1).to_ne_bytes()).collect::<Vec<_>>()));
        assert_eq!(signal_of(&signals, 0), PUTS as u64);
        ranks.into_iter().for_each(Rank::close);
    });
}

/// All ranks number registrations by their order.
#[test]
fn a_registration_that_fails_on_one_rank_leaves_the_next_ones_in_step() {
    child::alone("rma::a_registration_that_fails_on_one_rank_leaves_the_next_ones_in_step", &[ON], || {
        let _watchdog = watchdog(60);
        let ranks = connected(16, 2);
        let (failing, window) = (Window::host(64), Window::host(64));
        // SAFETY: the memory outlives the groups. It is no GPU's, whatever this says.
        let refused = unsafe { ranks[1].rma.reg_mr(ranks[1].group, failing.place(), PTR_CUDA, 0) };
        assert!(refused.is_err());
        let first = ranks[0].register(&failing);
        let [from, to] = [0, 1].map(|rank: usize| ranks[rank].register(&window));
        assert_eq!(from, to);
        window.fill(&[7; 8]);
        assert_eq!(ranks[0].wait(ranks[0].put((at(from, 0), 8, at(from, 32)), 1, None)), Ok(()));
        assert!(holds(&window, 32, &[7; 8]));
        let astray = ranks[0].put((at(from, 0), 8, at(first, 0)), 1, None);
        assert_eq!(ranks[0].wait(astray), Err(Code::RemoteError), "it is not there");
        ranks.into_iter().for_each(Rank::close);
    });
}

/// NCCL's abort of a rank must not wait for them, nor its progress thread end.
#[test]
fn a_get_whose_memory_is_taken_back_goes_nowhere() {
    child::alone("rma::a_get_whose_memory_is_taken_back_goes_nowhere", &[ON], || {
        let _watchdog = watchdog(60);
        let (ranks, size) = (connected(14, 2), 64 << 20);
        let (source, target) = (Window::host(size), Window::host(size));
        let [[from, to], _] = [0, 1].map(|rank: usize| [&source, &target].map(|it| ranks[rank].register(it)));
        let get = || ranks[0].rma.get(ranks[0].context, (at(from, 0), size, at(to, 0)), 1).expect("iget");
        let gets = [get(), get()];
        ranks[0].rma.dereg_mr(ranks[0].group, to).expect("deregMrSym");
        target.fill(&vec![0xEE; size]);
        assert!(gets.into_iter().chain([get()]).all(|get| ranks[0].wait(get) == Ok(())));
        assert!(target.is_filled_with(0xEE), "nothing is written late");
        assert_eq!(ranks[0].rma.has_error(ranks[0].context), Ok(false));
        ranks.into_iter().for_each(Rank::close);
    });
}

/// The process's threads and open files.
fn holds_now() -> (usize, usize) {
    let count = |folder: &str| std::fs::read_dir(folder).expect("proc").count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// NCCL closes no group whose set-up fails after `connect`, nor its listener: it ends the context.
#[test]
fn a_group_that_is_given_up_leaves_nothing_behind() {
    child::alone("rma::a_group_that_is_given_up_leaves_nothing_behind", &[ON], || {
        let _watchdog = watchdog(60);
        let mut before = None;
        for _ in 0..4 {
            let ranks = connected(16, 3);
            let memory = Window::host(64);
            for rank in &ranks {
                rank.register(&memory);
                rank.rma.finalize(rank.ctx).expect("finalize");
            }
            // What is closed is let go by the plugin's own threads.
            let held = *before.get_or_insert_with(|| {
                std::thread::sleep(Duration::from_secs(1));
                holds_now()
            });
            eventually("all is closed", PATIENCE, || {
                let now = holds_now();
                (now.0 <= held.0 && now.1 <= held.1).then_some(())
            });
            for Rank { rma, group, context, listener, .. } in &ranks {
                assert!(rma.destroy_context(*context).is_err() && rma.close_group(*group).is_err());
                assert!(rma.close_listener(*listener).is_err());
            }
        }
        let tasks = std::fs::read_dir("/proc/self/task").expect("proc").flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        assert!(!names.into_iter().any(|name| name.starts_with("towline-rma")), "a placer lives");
    });
}

/// As in an abort: each rank closes when its own puts are done, however far those of the others are.
#[test]
fn puts_to_a_rank_that_closes_end_without_an_error() {
    child::alone("rma::puts_to_a_rank_that_closes_end_without_an_error", &[ON], || {
        let _watchdog = watchdog(100);
        let size = 32 << 20;
        for round in 0..8 {
            let log = Capture::start();
            let mut ranks = connected(VERSIONS[round as usize % 3], 2);
            let (source, window, signals) = (Window::host(size), Window::host(size), Window::host(8));
            let [mrs, theirs] =
                [0, 1].map(|rank: usize| [&source, &window, &signals].map(|it| ranks[rank].register(it)));
            let put = |rank: &Rank| {
                let signal = PutSignal { at: at(mrs[2], 0), value: None };
                rank.put((at(mrs[0], 0), size, at(mrs[1], 0)), 1, Some(signal))
            };
            let requests: Vec<Object> = (0..4).map(|_| put(&ranks[0])).collect();
            let get = (at(mrs[1], 0), size, at(mrs[0], 0));
            let get = (round % 2 == 0).then(|| ranks[0].rma.get(ranks[0].context, get, 1).expect("iget"));
            std::thread::sleep(Duration::from_millis(3 * round));
            let other = ranks.pop().expect("two ranks");
            if round % 4 < 2 {
                for mr in theirs {
                    other.rma.dereg_mr(other.group, mr).expect("deregMrSym");
                }
            }
            other.close();
            window.fill(&vec![0xEE; size]);
            let rank = ranks.pop().expect("one more");
            for request in requests {
                assert_eq!(rank.wait(request), Ok(()), "round {round}");
            }
            // The bytes of a get are missing.
            if let Some(get) = get {
                let _ = rank.wait(get);
            }
            assert_eq!(rank.wait(put(&rank)), Ok(()), "round {round}");
            let get = rank.rma.get(rank.context, (at(mrs[1], 0), 8, at(mrs[0], 0)), 1).expect("iget");
            assert_eq!(rank.wait(get), Err(Code::RemoteError));
            assert!(window.is_filled_with(0xEE), "no put lands late");
            let told = log.records().iter().filter(|it| it.text.contains("has closed its side before a put")).count();
            assert_eq!(told, 1, "{:?}", log.records());
            rank.close();
        }
    });
}

#[test]
fn groups_close_in_any_order() {
    child::alone("rma::groups_close_in_any_order", &[ON], || {
        let _watchdog = watchdog(100);
        for round in 0..6 {
            let log = Capture::start();
            let mut ranks = connected(VERSIONS[round % 3], 3);
            let memory: Vec<Window> = ranks.iter().map(|_| Window::host(4 << 20)).collect();
            let mrs: Vec<Object> = ranks.iter().zip(&memory).map(|(rank, memory)| rank.register(memory)).collect();
            let what = (at(mrs[0], 0), 4 << 20, at(mrs[0], 0));
            let request = ranks[0].put(what, 1, None);
            if round % 2 == 0 {
                ranks[0].wait(request).expect("the put ends");
            }
            ranks.rotate_left(round % 3);
            let last = ranks.pop().expect("three ranks");
            let start = Instant::now();
            // In an odd round a request is live.
            for rank in ranks {
                match round {
                    0..3 => rank.close(),
                    _ => {
                        // What NCCL leaves behind ends with the context.
                        rank.rma.finalize(rank.ctx).expect("finalize");
                    }
                }
            }
            last.close();
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            // A request that is live is given up.
            let given_up =
                ["closed the connection with transfers in flight", "before this transfer was complete", "before a put"];
            let is_expected = |text: &str| round % 2 == 1 && given_up.iter().any(|it| text.contains(it));
            let is_fine = |record: &Record| !record.is_warning() || is_expected(&record.text);
            assert!(log.records().iter().all(is_fine), "round {round}: {:?}", log.records());
        }
    });
}

#[test]
fn wrong_arguments_are_refused() {
    child::alone("rma::wrong_arguments_are_refused", &[ON], || {
        let _watchdog = watchdog(60);
        let ranks = connected(15, 2);
        let rank = &ranks[0];
        let memory = Window::host(64);
        let mr = rank.register(&memory);
        let other = ranks[1].register(&memory);
        let refused = |what, to, signal| rank.rma.put(rank.context, what, to, signal).err();
        let good = (at(mr, 0), 8, at(mr, 0));
        assert_eq!(refused(good, 2, None), Some(Code::InvalidArgument), "no such rank");
        assert_eq!(refused((at(mr, 60), 8, at(mr, 0)), 1, None), Some(Code::InvalidArgument));
        assert_eq!(refused((at(mr, u64::MAX as usize), 8, at(mr, 0)), 1, None), Some(Code::InvalidArgument));
        assert_eq!(refused(good, 1, Some(PutSignal { at: NOWHERE, value: None })), Some(Code::InvalidArgument));
        let get = rank.rma.get(rank.context, (at(mr, 0), 8, at(mr, 57)), 1);
        assert_eq!(get.err(), Some(Code::InvalidArgument));
        // What only the other rank can know comes with `test`, and ends nothing else.
        let put = rank.put((at(mr, 0), 8, at(mr, 57)), 1, None);
        assert_eq!(rank.wait(put), Err(Code::RemoteError));
        let crooked = PutSignal { at: at(mr, 4), value: None };
        assert_eq!(rank.wait(rank.put(good, 1, Some(crooked))), Err(Code::RemoteError));
        let get = rank.rma.get(rank.context, (at(mr, 57), 8, at(mr, 0)), 1).expect("iget");
        assert_eq!(rank.wait(get), Err(Code::RemoteError));
        assert_eq!(rank.wait(rank.put(good, 1, None)), Ok(()));
        // Host memory that is said to be a GPU's, and what is said to be neither.
        // SAFETY: the memory outlives the group.
        let as_kind = |kind| unsafe { rank.rma.reg_mr(rank.group, memory.place(), kind, 0) }.err();
        assert!(matches!(as_kind(PTR_CUDA), Some(Code::InvalidUsage | Code::InvalidArgument)));
        assert_eq!(as_kind(PTR_DMABUF), Some(Code::InvalidArgument));
        assert_eq!(rank.rma.reg_mr_dmabuf(rank.group, memory.place()).err(), Some(Code::InvalidUsage));
        assert_eq!(rank.rma.create_context(rank.listener).err(), Some(Code::InvalidArgument));
        assert_eq!(rank.rma.close_listener(rank.group), Err(Code::InvalidArgument));
        assert_eq!(rank.rma.test(rank.group, mr), Err(Code::InvalidArgument));
        assert_eq!(ranks[1].rma.dereg_mr(ranks[1].group, other), Ok(()));
        ranks.into_iter().for_each(Rank::close);
    });
}

#[test]
fn a_dead_rank_is_one_clear_line_and_a_remote_error() {
    const NAME: &str = "rma::a_dead_rank_is_one_clear_line_and_a_remote_error";
    /// How long after a rank has ended, with nothing under way, the log warns.
    const WARNING_DELAY: Duration = Duration::from_secs(5);
    if child::role().as_deref() == Some(OTHER) {
        return lives_until_it_is_killed(1 << 20);
    }
    child::alone(NAME, &[ON, ("TOWLINE_RECONNECT_TIMEOUT", "1"), ("NCCL_DEBUG", "INFO")], || {
        let _watchdog = watchdog(60);
        let log = Capture::start();
        let (rank, mr, _memory, mut other) = beside_a_process(NAME, 1 << 20);
        let what = (at(mr, 0), 1 << 20, at(mr, 0));
        rank.wait(rank.put(what, 1, None)).expect("it lives");
        other.kill();
        // Nothing is under way: that is how processes end that do not destroy their communicators.
        eventually("it is missed", PATIENCE, || log.contains("with nothing under way: ").then_some(()));
        let missed = Instant::now();
        let warnings = || log.records().into_iter().filter(Record::is_warning).map(|it| it.text).collect::<Vec<_>>();
        let is_told = || warnings().iter().any(|text| text.contains("one-sided"));
        assert_eq!(rank.rma.has_error(rank.context), Ok(true), "GIN learns it so");
        std::thread::sleep(WARNING_DELAY / 2);
        assert!(!is_told() || missed.elapsed() >= WARNING_DELAY, "{:?}", warnings());
        // A stream that only waits for a signal.
        eventually("the log tells it, too", PATIENCE, || is_told().then_some(()));
        let start = Instant::now();
        assert_eq!(rank.wait(rank.put(what, 1, None)), Err(Code::RemoteError));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(rank.wait(rank.put(what, 1, None)), Err(Code::RemoteError), "from then on at once");
        let ends = |text: &&String| text.contains("one-sided operations with rank 1 end: ") && text.contains("peer ");
        let told = warnings();
        assert_eq!(told.iter().filter(ends).count(), 1, "{told:?}");
        rank.close();
    });
}

/// The child has the parent's ids, but not the thread and the connections of its group.
#[test]
fn a_forked_child_has_nothing_of_its_parents_groups_and_may_begin_anew() {
    child::alone("rma::a_forked_child_has_nothing_of_its_parents_groups_and_may_begin_anew", &[ON], || {
        let _watchdog = watchdog(60);
        let ranks = connected(16, 2);
        let memory = Window::host(1 << 20);
        let mrs: Vec<Object> = ranks.iter().map(|rank| rank.register(&memory)).collect();
        let what = (at(mrs[0], 0), 1 << 19, at(mrs[0], 1 << 19));
        let request = ranks[0].put(what, 1, None);
        let child = fork(|| {
            let Rank { rma, ctx, listener, group, context, .. } = &ranks[0];
            // SAFETY: the memory lives as long as the child.
            let registered = unsafe { rma.reg_mr(*group, memory.place(), PTR_HOST, 0) };
            let all_refused = registered.is_err()
                && rma.put(*context, what, 1, None).is_err()
                && rma.get(*context, what, 1).is_err()
                && rma.test(*group, request).is_err()
                && rma.has_error(*context).is_err()
                && rma.create_context(*group).is_err()
                && rma.dereg_mr(*group, mrs[0]).is_err()
                && rma.destroy_context(*context).is_err()
                && rma.close_group(*group).is_err()
                && rma.close_listener(*listener).is_err()
                && rma.finalize(*ctx).is_err();
            let fresh = connected(16, 2);
            let mrs: Vec<Object> = fresh.iter().map(|rank| rank.register(&memory)).collect();
            let put = fresh[0].put((at(mrs[0], 0), 4096, at(mrs[0], 8192)), 1, None);
            let moves = fresh[0].wait(put).is_ok();
            fresh.into_iter().for_each(Rank::close);
            all_refused && moves
        });
        let (passed, status) = end_of(child);
        assert!(passed, "the child ended with {status:#x}");
        ranks[0].wait(request).expect("the parent goes on");
        ranks[0].wait(ranks[0].put(what, 1, None)).expect("the parent goes on");
        ranks.into_iter().for_each(Rank::close);
    });
}

/// A rank that never comes.
#[test]
fn a_missing_rank_ends_the_set_up_in_time() {
    let variables = [ON, ("TOWLINE_CONNECT_TIMEOUT", "2")];
    child::alone("rma::a_missing_rank_ends_the_set_up_in_time", &variables, || {
        let _watchdog = watchdog(60);
        let (own, silent) = (listening(14), listening(14));
        let (rma, start) = (own.rma.clone(), Instant::now());
        let handles = [own.handle, silent.handle];
        assert_eq!(own.connect(&handles, 0).err(), Some(Code::RemoteError));
        assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
        rma.finalize(silent.ctx).expect("finalize");
    });
}

const HEADER: usize = 56;

/// A header as docs/dev/protocol.md has it.
fn header(kind: u8, region: u32, offset: u64, size: u64, signal: (u32, u64)) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(b"TWR1");
    bytes[4] = kind;
    bytes[16..20].copy_from_slice(&region.to_le_bytes());
    bytes[20..24].copy_from_slice(&signal.0.to_le_bytes());
    bytes[24..32].copy_from_slice(&offset.to_le_bytes());
    bytes[32..40].copy_from_slice(&size.to_le_bytes());
    bytes[40..48].copy_from_slice(&signal.1.to_le_bytes());
    bytes[48..56].copy_from_slice(&1_u64.to_le_bytes());
    bytes
}

/// A rank whose headers say anything: nothing outside of a registration is written, and each put gets its answer.
#[test]
fn no_header_writes_outside_of_a_registration() {
    child::alone("rma::no_header_writes_outside_of_a_registration", &[ON], || {
        let _watchdog = watchdog(100);
        let own = listening(16);
        let stranger = context(ApiVersion::V12);
        let (listener, handle) = stranger.listen(0).expect("listen");
        let handles = [own.handle, handle.bytes().try_into().expect("128 bytes")];
        let connecting = std::thread::spawn(move || own.connect(&handles, 0).expect("connect"));
        let mut first = Handle::from_bytes(&handles[0]);
        let send = stranger.connect_within(0, &mut first, PATIENCE).expect("connect");
        let recv = listener.accept_within(PATIENCE).expect("accept");
        let post = |bytes: &[u8]| {
            let memory = Memory::of(bytes);
            // SAFETY: the memory lives until the send has ended.
            let request = unsafe { send.post(Part::all(&memory, None)) }.expect("isend");
            send.wait(&request, PATIENCE).expect("the send ends");
        };
        let next = || {
            let memory = Memory::new(HEADER);
            // SAFETY: the memory lives until the receive has ended.
            let request = unsafe { recv.post(&[Part::all(&memory, None)]) }.expect("irecv");
            recv.wait(&request, PATIENCE).map(|_| memory.bytes().to_vec())
        };
        post(&header(1, 1, 0, 2, (0, 0)));
        assert_eq!(next().expect("a hello")[4], 1);
        let rank = connecting.join().expect("a rank");
        let size = 4096;
        // Before and behind the window there is memory that is not registered.
        let memory = Memory::new(3 * size);
        // SAFETY: it outlives the group.
        unsafe { rank.rma.reg_mr(rank.group, (memory.at(size) as usize, size), PTR_HOST, 0) }.expect("regMrSym");
        let mut dice = Dice::new(5);
        let mut placed = 0;
        for _ in 0..600 {
            let near = pick(&mut dice, 2 * size) as u64;
            let offset = [near, u64::MAX - near, size as u64 - near.min(8), near & !7][pick(&mut dice, 4)];
            let length = [0, 1, 8, pick(&mut dice, 2 * size), size][pick(&mut dice, 5)];
            let region = [1, 1, 1, 0, 2, u32::MAX][pick(&mut dice, 6)];
            let signal = ([0, 0, 1, 2][pick(&mut dice, 4)], offset ^ 8);
            post(&header(2, region, offset, length as u64, signal));
            if length > 0 {
                post(&pattern(1, length)[..length]);
            }
            let answer = next().expect("an answer");
            assert_eq!(answer[4], 5);
            let is_inside = |at: u64, length: u64| at.checked_add(length).is_some_and(|end| end <= size as u64);
            let data_fits = length == 0 || region == 1 && is_inside(offset, length as u64);
            let signal_fits = signal.0 == 0 || signal.0 == 1 && signal.1.is_multiple_of(8) && is_inside(signal.1, 8);
            assert_eq!(answer[5] == 0, data_fits && signal_fits, "{region} {offset} {length} {signal:?}");
            placed += usize::from(answer[5] == 0 && length > 0);
            let outside = [&memory.bytes()[..size], &memory.bytes()[2 * size..]].concat();
            assert!(outside.iter().all(|&byte| byte == outside[0]), "{region} {offset} {length} {signal:?}");
        }
        assert!(placed > 20, "{placed}");
        // An answer that nobody asked for ends the connection.
        post(&header(4, 1, 0, 8, (0, 0)));
        assert!(next().is_err());
        eventually("the group knows", PATIENCE, || rank.rma.has_error(rank.context).expect("an answer").then_some(()));
        rank.close();
    });
}
