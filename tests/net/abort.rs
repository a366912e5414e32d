//! NCCL aborts when something is wrong: a close amid transfers, from another thread, while all streams are silent or
//! reset, or the peer is stopped. It must not wait for what may never come, must leave nothing behind, and what was
//! posted is the caller's again when it returns.

use std::time::{Duration, Instant};

use crate::support::ends::{Ends, PATIENCE, accept, connect, plays, signal, tell, wait_for};
use crate::support::faults::{Cut, Network};
use crate::support::netns::available;
use crate::support::{child, eventually, outcome, part, pattern, sockets};
use towline::host::{Code, Memory, Part, RecvComm, Request, SendComm, Sizes};

/// More than passes over the rails before the abort: where many tests run, a cut takes seconds to make.
const SIZE: usize = 8 << 20;
const MESSAGES: usize = 8;
const MBIT: u32 = 20;

/// No close takes longer, whatever the network does.
const CLOSED_WITHIN: Duration = Duration::from_secs(2);

enum End {
    Sends(SendComm),
    Receives(RecvComm),
}

impl End {
    fn test(&self, request: &Request) -> Result<Option<Sizes>, Code> {
        match self {
            Self::Sends(comm) => comm.test(request),
            Self::Receives(comm) => comm.test(request),
        }
    }

    fn close(self) -> Duration {
        let start = Instant::now();
        match self {
            Self::Sends(comm) => comm.close(),
            Self::Receives(comm) => comm.close(),
        }
        .expect("close");
        start.elapsed()
    }

    /// Aborts when told to, and looks that nothing is left.
    fn abort(self, last: &Request, targets: &[Memory], before: usize) {
        let told = child::mailbox().join("abort");
        while !told.exists() {
            // As NCCL's thread does. What fails meanwhile is a reason to abort.
            assert!(!matches!(self.test(last), Ok(Some(_))), "all is done before the abort: nothing was tested");
            std::thread::sleep(Duration::from_millis(1));
        }
        let took = std::thread::spawn(|| self.close()).join().expect("no panic");
        let seen: Vec<Vec<u8>> = targets.iter().map(|it| it.bytes().to_vec()).collect();
        let case = std::env::var("TEST_CASE").expect("a case");
        eprintln!("{case}: closed within {took:?}");
        tell("aborted");
        assert!(took < CLOSED_WITHIN, "the close took {took:?}");
        // The rails are back, the peer runs again, and what was on the way arrives.
        wait_for("over");
        let same = targets.iter().zip(&seen).all(|(now, then)| now.bytes() == then);
        assert!(same, "a buffer was written to after the close");
        let start = Instant::now();
        eventually("its sockets are closed", PATIENCE, || (sockets() <= before).then_some(()));
        eprintln!("{case}: its sockets were closed after {:?}", start.elapsed());
    }

    /// Its peer has aborted: it is told, and its close does not wait either.
    fn stay(self, last: Request) {
        wait_for("over");
        let start = Instant::now();
        let end = outcome(|it| self.test(it), last, PATIENCE).expect("an end");
        eprintln!("{}: told after {:?}", std::env::var("TEST_CASE").expect("a case"), start.elapsed());
        assert_eq!(end.expect_err("the peer has aborted"), Code::RemoteError);
        let took = self.close();
        assert!(took < CLOSED_WITHIN, "the close took {took:?}");
    }

    fn play(self, requests: &[Request], targets: &[Memory], before: usize) {
        let last = requests.last().expect("many");
        if child::role() == std::env::var("TEST_ABORTS").ok() {
            self.abort(last, targets, before);
        } else {
            self.stay(*last);
        }
    }
}

fn plays_an_abort() -> bool {
    /// Listening sockets, one per rail, as long as the process lives.
    const LASTING: usize = 2;
    let sender = || {
        let comm = connect();
        // SAFETY: the pattern is static.
        let post = |seed| unsafe { comm.post(part(pattern(seed, SIZE), None)) }.expect("isend");
        let requests: Vec<Request> = (0..MESSAGES).map(post).collect();
        End::Sends(comm).play(&requests, &[], LASTING);
    };
    let receiver = || {
        let comm = accept();
        let targets: Vec<Memory> = (0..MESSAGES).map(|_| Memory::new(SIZE)).collect();
        // SAFETY: the memory outlives the connection.
        let post = |to: &Memory| unsafe { comm.post(&[Part::all(to, None)]) }.expect("irecv");
        let requests: Vec<Request> = targets.iter().map(post).collect();
        let first = || comm.test(&requests[0]).expect("the first message comes");
        eventually("the first message", PATIENCE, || first().map(drop));
        tell("ready");
        End::Receives(comm).play(&requests, &targets, LASTING);
    };
    plays(sender, receiver)
}

/// What is wrong when NCCL aborts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trouble {
    Cut(Cut),
    /// The peer's process is stopped.
    Stopped,
}

#[test]
fn an_abort_amid_trouble_waits_for_nobody_and_leaves_nothing() {
    if plays_an_abort() || !available() {
        return;
    }
    let test = "abort::an_abort_amid_trouble_waits_for_nobody_and_leaves_nothing";
    let case = |trouble: Trouble, aborts: &str, ms: u64| {
        let network = Network::new(2, MBIT);
        let name = format!("{trouble:?}, the {aborts} aborts after {ms} ms");
        // An abort that could not be reported is found out by a probe, after a third of this time.
        let ends = Ends::start_with(test, &network.hosts, "15", &[("TEST_ABORTS", aborts), ("TEST_CASE", &name)]);
        ends.wait_for("ready");
        let peer = if aborts == "sender" { &ends.receiver } else { &ends.sender };
        match trouble {
            Trouble::Cut(how) => (0..2).for_each(|rail| network.cut(rail, how)),
            Trouble::Stopped => signal(peer, libc::SIGSTOP),
        }
        std::thread::sleep(Duration::from_millis(ms));
        ends.tell("abort");
        ends.wait_for("aborted");
        match trouble {
            Trouble::Cut(how) => (0..2).for_each(|rail| network.mend(rail, how)),
            Trouble::Stopped => signal(peer, libc::SIGCONT),
        }
        std::thread::sleep(Duration::from_secs(1));
        ends.tell("over");
        ends.pass();
    };
    std::thread::scope(|scope| {
        for trouble in [Trouble::Cut(Cut::Silent), Trouble::Cut(Cut::Reset), Trouble::Stopped] {
            // Silent streams are given up meanwhile, and connected again.
            let after = if trouble == Trouble::Cut(Cut::Silent) { &[0, 500, 3000][..] } else { &[0, 1000][..] };
            for aborts in ["sender", "receiver"] {
                for &ms in after {
                    scope.spawn(move || case(trouble, aborts, ms));
                }
            }
        }
    });
}
