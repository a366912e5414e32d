//! Races between two threads while a stream reconnects.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::os::config::Config;
use crate::session::link::Link;
use crate::session::loopback;
use crate::session::owner::{ConnectingSide, Joining, ListeningSide, Owner, Streams};
use crate::session::seal::Seal;
use crate::tcp::sender::SendConn;

/// A source that reports when the control thread has polled it.
#[derive(Default)]
struct Bell(AtomicBool);

impl Source for Bell {
    fn poll(&self) -> Progress {
        self.0.store(true, Ordering::SeqCst);
        Progress::default()
    }

    fn fail(&self, error: Error) {
        panic!("{error}");
    }
}

/// The thread that notices the break finds a repair still under way: the one that has just reconnected the stream. The
/// thread relies on that repair.
#[test]
fn a_stream_that_breaks_while_its_repair_ends_is_repaired_again() {
    let net = loopback::net(Config::default());
    let deaf = loopback::deaf();
    let (ours, theirs) = loopback::sockets();
    let conn = SendConn::new(Arc::clone(&net), loopback::link(&deaf), loopback::peer(), ours, Seal::Plain)
        .expect("it is watched");
    assert!(conn.begin_repair(0), "nobody else does");
    let later = Instant::now() + NO_DEADLINE;
    let streams: Arc<dyn Streams> = conn.clone();
    let purpose = join::Join { conn: Arc::downgrade(&streams), index: 0, repair: true };
    let begin = Begin { at: later, epoch: 0, tries: 0, claims: false };
    let repair = Dial::start(Arc::clone(&net), purpose, later, begin).expect("the control thread runs");

    drop(theirs);
    loopback::wait_until("the end of the stream is not seen", || !conn.is_connected());
    // The control thread has noticed the break, and reports it before it polls anything else.
    let bell = Arc::new(Bell::default());
    let registration = net.poller.control_thread().expect("it runs").register(bell.clone(), None).expect("it has room");
    registration.kick();
    loopback::wait_until("the control thread does not come back", || bell.0.load(Ordering::SeqCst));

    repair.finish(&mut repair.lock(), Ok(()));
    assert!(!conn.begin_repair(0), "nobody repairs the stream");
}

/// Which process calls the sending side, and the answer it receives.
struct Missing(Link, Mutex<Vec<Answer>>);

impl Missing {
    fn heard(&self) -> Vec<Answer> {
        self.1.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ListeningSide for Missing {
    fn join(self: Arc<Self>, joining: Joining<'_>) -> Result<()> {
        Err(joining.not_now())
    }

    fn is_calling(&self, _since: Instant) -> bool {
        true
    }

    fn lost_epoch(&self, _turn: usize) -> (u16, u16) {
        (0, 0)
    }
}

impl Owner for Missing {
    fn link(&self) -> &Link {
        &self.0
    }

    fn link_down(&self, _interface: u32) {}

    fn answered(&self, _began: Instant, _pair: usize, answer: Answer) {
        self.1.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
    }
}

/// The process is alive, but the connection does not reconnect: the caller must not wait as long as for a peer that is
/// only late.
#[test]
fn a_call_for_a_connection_that_has_failed_is_turned_away() {
    let net = loopback::net(Config::default());
    let address = (Ipv4Addr::LOCALHOST, 0).into();
    let name = "lo".to_string();
    let rail = Rail { name, index: 1, address, speed_mbps: 1000, speed_is_known: false, running: true };
    let addresses = net.addresses(&[rail]);
    let (ours, _theirs) = loopback::sockets();
    let link = loopback::link(&loopback::deaf());
    let conn = SendConn::new(Arc::clone(&net), link.clone(), loopback::peer(), ours, Seal::Plain).expect("watched");
    let known: Arc<dyn ConnectingSide> = conn.clone();
    net.remember_connecting(&known);
    let call = || {
        let missing = Arc::new(Missing(Link { remote: addresses.clone(), ..link.clone() }, Mutex::default()));
        let caller: Arc<dyn ListeningSide> = missing.clone();
        call::call(Arc::clone(&net), &caller, 0, Instant::now());
        missing
    };
    let missing = call();
    loopback::wait_until("it is not answered", || missing.heard().len() > 1);
    assert_eq!(missing.heard()[..2], [Answer::Accepted; 2], "by the kernel, then by the process");
    conn.fail(Error::remote("a failure"));
    let missing = call();
    loopback::wait_until("it is not answered", || missing.heard().len() > 1);
    assert_eq!(missing.heard()[..2], [Answer::Accepted, Answer::Refused]);
}
