//! How one-sided operations end where something is in the way: a stalled network, an end of the context, an error that
//! NCCL does not read.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded};
use crate::support::flagcx::Object;
use crate::support::one_sided::{
    NOWHERE, ON, OTHER, PATIENCE, Rank, at, beside_a_process, connected, content, holds, listening,
    lives_until_it_is_killed,
};
use crate::support::proxy::Proxy;
use crate::support::rma::{PutSignal, RmaHandle};
use crate::support::window::Window;
use crate::support::{eventually, watchdog};
use towline::host::log::Capture;
use towline::host::{Code, Handle};

/// How long a stall lasts.
const HELD: Duration = Duration::from_secs(3);

/// Two ranks; what rank 0 sends to rank 1 can be held up.
struct Stall {
    ranks: [Rank; 2],
    holds: Arc<AtomicBool>,
    /// Something is held up.
    caught: Arc<AtomicBool>,
}

impl Stall {
    /// What is shorter than `least` bytes passes, unless it is behind something longer.
    fn of(least: usize) -> Self {
        let all = [0, 1].map(|_| listening(16));
        let direct = [all[0].handle, all[1].handle];
        let (holds, mut proxied) = (Arc::new(AtomicBool::new(false)), Handle::from_bytes(&direct[1]));
        let (held, caught) = (Arc::clone(&holds), Arc::new(AtomicBool::new(false)));
        let catches = Arc::clone(&caught);
        // It lives in a thread of its own.
        let _ = Proxy::before(&mut proxied, move |_, _, bytes| {
            while held.load(Ordering::Relaxed) && bytes.len() >= least {
                catches.store(true, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let proxied: RmaHandle = proxied.bytes().try_into().expect("128 bytes");
        let [first, second] = all;
        let other = std::thread::spawn(move || second.connect(&direct, 1).expect("connect"));
        let first = first.connect(&[direct[0], proxied], 0).expect("connect");
        Self { ranks: [first, other.join().expect("a rank")], holds, caught }
    }

    fn has_caught(&self) -> bool {
        self.caught.load(Ordering::Relaxed)
    }

    /// Holds up what is sent from now on for this long.
    fn hold(&self, time: Duration) {
        self.holds.store(true, Ordering::Relaxed);
        let holds = Arc::clone(&self.holds);
        std::thread::spawn(move || {
            std::thread::sleep(time);
            holds.store(false, Ordering::Relaxed);
        });
    }
}

#[test]
fn a_rank_that_closes_in_a_stall_fails_no_put_of_another() {
    child::alone(
        "rma_ends::a_rank_that_closes_in_a_stall_fails_no_put_of_another",
        &[ON, ("TOWLINE_STREAMS", "1")],
        || {
            let _watchdog = watchdog(60);
            let stall = Stall::of(1);
            let window = Window::host(4096);
            let [_, mr] = [0, 1].map(|rank: usize| stall.ranks[rank].register(&window));
            let what = (at(mr, 0), 64, at(mr, 64));
            stall.ranks[1].wait(stall.ranks[1].put(what, 0, None)).expect("nothing is in the way yet");
            let start = Instant::now();
            stall.hold(HELD);
            let put = stall.ranks[1].put(what, 0, None);
            let [closing, other] = stall.ranks;
            closing.close();
            assert_eq!(other.wait(put), Ok(()));
            assert!(start.elapsed() >= HELD, "its end came through at once");
            other.close();
        },
    );
}

#[test]
fn a_window_that_ends_in_a_stall_fails_no_get_of_another() {
    child::alone(
        "rma_ends::a_window_that_ends_in_a_stall_fails_no_get_of_another",
        &[ON, ("TOWLINE_STREAMS", "1")],
        || {
            let _watchdog = watchdog(60);
            let (stall, size) = (Stall::of(4096), 8 << 20);
            let (source, target) = (Window::host(size), Window::host(size));
            source.fill(&content(1, size));
            let [[from, _], [_, to]] =
                [0, 1].map(|rank: usize| [&source, &target].map(|it| stall.ranks[rank].register(it)));
            let [first, other] = &stall.ranks;
            let start = Instant::now();
            stall.hold(HELD);
            let get = other.rma.get(other.context, (at(from, 0), size, at(to, 0)), 0).expect("iget");
            eventually("an answer", PATIENCE, || stall.has_caught().then_some(()));
            first.rma.dereg_mr(first.group, from).expect("deregMrSym");
            let waited = start.elapsed();
            source.fill(&vec![0xEE; size]);
            assert_eq!(other.wait(get), Ok(()), "{waited:?}");
            assert!(start.elapsed() >= HELD, "the answer came through at once");
            assert!(holds(&target, 0, &content(1, size)), "{waited:?}");
            let [_, mr] = [0, 1].map(|rank: usize| stall.ranks[rank].register(&target));
            assert_eq!(first.wait(first.put((at(mr, 0), 8, at(mr, 8)), 1, None)), Ok(()), "the connection lives");
            stall.ranks.into_iter().for_each(Rank::close);
        },
    );
}

/// NCCL frees the memory of inline puts after `destroyContext` and before `deregMrSym`.
#[test]
fn after_the_end_of_a_context_its_puts_read_nothing() {
    child::alone("rma_ends::after_the_end_of_a_context_its_puts_read_nothing", &[ON], || {
        let _watchdog = watchdog(60);
        let (ranks, size) = (connected(14, 2), 64 << 20);
        let (source, target) = (Window::host(size), Window::host(size));
        source.fill(&content(1, size));
        let [[from, _], [_, to]] = [0, 1].map(|rank: usize| [&source, &target].map(|it| ranks[rank].register(it)));
        let what = (at(from, 0), size, at(to, 0));
        let puts: Vec<Object> = (0..4).map(|_| ranks[0].put(what, 1, None)).collect();
        ranks[0].rma.destroy_context(ranks[0].context).expect("destroyContext");
        source.fill(&vec![0xEE; size]);
        for put in puts {
            assert_eq!(ranks[0].wait(put), Ok(()));
        }
        assert!(holds(&target, 0, &content(1, size)), "a put read its source late");
        for rank in ranks {
            rank.rma.close_group(rank.group).expect("closeColl");
            rank.rma.finalize(rank.ctx).expect("finalize");
        }
    });
}

/// The wait for its goodbye has found it silent, so closing its connections waits no more.
#[test]
fn a_stopped_rank_is_waited_for_once() {
    const NAME: &str = "rma_ends::a_stopped_rank_is_waited_for_once";
    const LIMIT: Duration = Duration::from_secs(4);
    if child::role().as_deref() == Some(OTHER) {
        return lives_until_it_is_killed(4096);
    }
    let variables = [ON, ("TOWLINE_PEER_TIMEOUT", "4"), ("TOWLINE_RECONNECT_TIMEOUT", "4")];
    child::alone(NAME, &variables, || {
        let _watchdog = watchdog(60);
        let (rank, mr, _memory, other) = beside_a_process(NAME, 4096);
        // SAFETY: a process of this test's own.
        assert_eq!(unsafe { libc::kill(other.id(), libc::SIGSTOP) }, 0);
        // The connection has a copy of it, so its source is free at once, and the wait is for the goodbye.
        rank.put((at(mr, 0), 8, at(mr, 8)), 1, None);
        let start = Instant::now();
        rank.rma.dereg_mr(rank.group, mr).expect("deregMrSym");
        rank.close();
        let took = start.elapsed();
        // With a wait of the close's own it is 6 s at least.
        assert!((LIMIT..LIMIT + Duration::from_millis(1900)).contains(&took), "{took:?}");
    });
}

/// NCCL's progress thread keeps such results to itself.
fn meets_errors() {
    // As in NCCL without `NCCL_DEBUG`: its logger is in use and prints no warnings.
    let _log = Capture::start();
    let ranks = connected(16, 2);
    let (rank, memory) = (&ranks[0], Window::host(64));
    let [mr, ending] = [0, 1].map(|_| [0, 1].map(|rank: usize| ranks[rank].register(&memory))[0]);
    let good = (at(mr, 0), 8, at(mr, 8));
    assert_eq!(rank.wait(rank.put((at(mr, 0), 8, at(mr, 60)), 1, None)), Err(Code::RemoteError));
    assert_eq!(rank.rma.put(rank.context, good, 7, None).err(), Some(Code::InvalidArgument));
    let astray = PutSignal { at: at(mr, 64), value: None };
    assert!(rank.wait(rank.put((NOWHERE, 0, NOWHERE), 0, Some(astray))).is_err());
    for _ in 0..3 {
        assert_eq!(rank.rma.test(rank.group, mr), Err(Code::InvalidArgument));
    }
    rank.rma.dereg_mr(rank.group, ending).expect("deregMrSym");
    assert_eq!(rank.wait(rank.put((at(ending, 0), 8, at(mr, 8)), 1, None)), Ok(()));
    assert_eq!(rank.wait(rank.put(good, 1, None)), Ok(()));
    assert_eq!(ranks[1].wait(ranks[1].put(good, 0, None)), Ok(()));
    ranks.into_iter().for_each(Rank::close);
}

#[test]
fn each_error_that_nobody_reads_is_one_line_on_standard_error() {
    const NAME: &str = "rma_ends::each_error_that_nobody_reads_is_one_line_on_standard_error";
    if child::role().as_deref() == Some("meets errors") {
        return meets_errors();
    }
    let _watchdog = watchdog(60);
    let mut command = child::command(NAME, "meets errors");
    command.env(ON.0, ON.1).env_remove("NCCL_DEBUG").env_remove("TOWLINE_LOG").stderr(Stdio::piped());
    let said = Guarded::start(command).said_within(Duration::from_secs(50));
    for text in [
        "rank 1 refused a one-sided operation",
        "there is no rank 7 among 2",
        "a signal that is not inside its registration",
        "the one-sided request is not one of ours",
        "a put to rank 1 reads memory whose registration has ended",
    ] {
        let lines: Vec<&str> = said.lines().filter(|line| line.contains(text)).collect();
        assert_eq!(lines.len(), 1, "{text}: {said}");
        assert!(lines[0].starts_with("NET/Towline: WARN "), "{}", lines[0]);
        let is_failure = !text.contains("reads memory");
        assert_eq!(is_failure, lines[0].ends_with("NCCL may wait for ever: end the job"), "{}", lines[0]);
    }
    assert_eq!(said.lines().filter(|line| line.contains("NET/Towline")).count(), 5, "{said}");
}
