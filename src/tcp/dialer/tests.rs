//! What goes wrong between two threads while a stream comes back.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::os::config::Config;
use crate::tcp::loopback;

/// A source that says when the keeper has come to it.
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

/// Who sees it break finds the repair under way that has just brought it back, and leaves it to that one.
#[test]
fn a_stream_that_breaks_while_its_repair_ends_is_repaired_again() {
    let net = loopback::net(Config::default());
    let deaf = loopback::deaf();
    let (ours, theirs) = loopback::sockets();
    let conn = SendConn::new(Arc::clone(&net), loopback::link(&deaf), loopback::peer(), ours, Seal::Plain)
        .expect("it is watched");
    assert!(conn.begin_repair(0), "nobody else does");
    let later = Instant::now() + NO_DEADLINE;
    let purpose = Purpose::Join { conn: Arc::downgrade(&conn), index: 0, repair: true };
    let begin = Begin { at: later, epoch: 0, tries: 0, claims: false };
    let repair = Dial::start_at(Arc::clone(&net), purpose, later, begin).expect("the keeper runs");

    drop(theirs);
    loopback::wait_until("the end of the stream is not seen", || !conn.is_connected());
    // The keeper has seen it, and says so before it looks at anything else.
    let bell = Arc::new(Bell::default());
    let place = net.poller.keeper().expect("it runs").register(bell.clone(), None).expect("it has room");
    place.kick();
    loopback::wait_until("the keeper does not come back", || bell.0.load(Ordering::SeqCst));

    repair.finish(&mut repair.lock(), Ok(Dialled::Streams(Arc::clone(&conn))));
    assert!(!conn.begin_repair(0), "nobody repairs the stream");
}
