//! Sockets of the control channel that end while others are being connected, on real verbs.

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::*;
use crate::rdma::harness::{Ends, Plan, end_of, sock, until};

/// A connection whose ends expect the other's process to listen at this address.
fn connect(listener: &TcpListener) -> Ends {
    Ends::connect(&Plan { addresses: vec![listener.local_addr().expect("it listens")], ..Plan::default() })
}

fn listener() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port")
}

/// A firewall may refuse the new connection while the old socket recovers. Or the listening side may have started to
/// use a new socket and ended the old one, without the connecting side having been notified.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn for_want_of_another_socket_no_connection_ends_that_has_one() {
    // Its kernel accepts every connection.
    let listening = listener();
    let ends = connect(&listening);
    ends.send.base().is_to_dial();
    let epoch = ends.send.next_epoch(0);
    ends.send.gave_up(0, &Error::remote("the peer refused the connection"));
    assert!(!ends.send.base().is_away());
    ends.carries();

    // An attempt that only the listening side has seen.
    let (near, far) = UnixStream::pair().expect("sockets");
    ends.recv.base().resume(epoch, sock(far)).expect("watched");
    until("the end of the old socket", || ends.send.base().is_away().then_some(()));
    drop(near);
    until("the end of the new one", || ends.recv.base().is_away().then_some(()));
    ends.carries();
    let epoch = ends.send.next_epoch(0);
    let (near, far) = UnixStream::pair().expect("sockets");
    ends.send.base().resume(epoch, sock(near)).expect("watched");
    ends.recv.base().resume(epoch, sock(far)).expect("watched");
    assert!(!ends.send.base().is_away() && !ends.recv.base().is_away());
    ends.carries();
    ends.send.close();
    ends.recv.close();
}

/// Not only after `TOWLINE_PEER_TIMEOUT`: nothing listens where its process did.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn a_sender_that_dies_before_its_first_word_over_the_next_socket_is_missed_at_once() {
    let listening = listener();
    let ends = connect(&listening);
    drop(listening);
    let target = [0; 100];
    // SAFETY: the target outlives the connection.
    let received = unsafe { ends.post_receive(&target) };
    // Otherwise it would accept the end of the old socket as proof, and its queue pairs would report it.
    ends.send.base().is_to_dial();
    let (near, far) = UnixStream::pair().expect("sockets");
    ends.recv.base().resume(1, sock(far)).expect("watched");
    let start = Instant::now();
    drop(near);
    let error = end_of(|ticket| ends.recv.test(ticket), received).expect_err("the sender is dead");
    println!("missed after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(5), "{error}");
    assert!(error.to_string().contains("the sender"), "{error}");
    ends.close();
}
