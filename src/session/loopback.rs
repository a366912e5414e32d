//! For tests of one end of a connection: real sockets without a peer behind them.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::acceptor;
use super::handshake::{FEATURE_RECOVERY, Secret};
use super::link::{Link, Sock};
use super::net::Net;
use super::peer::Peer;
use crate::engine::poller::{Half, Progress, Registration, Source};
use crate::os::config::Config;
use crate::os::error::Error;
use crate::os::fd::Registered;

/// A backend of its own.
pub fn net(config: Config) -> Arc<Net> {
    acceptor::net(config, None)
}

/// A connection with recovery, whose peer listens there.
pub fn link(remote: &TcpListener) -> Link {
    Link {
        connection: 7,
        key: Secret::from_bytes([7; 16]),
        features: FEATURE_RECOVERY,
        remote: vec![remote.local_addr().expect("it listens")],
        local: Arc::from([]),
        traffic_class: None,
        round_trip: std::time::Duration::ZERO,
    }
}

/// A listener that never answers.
pub fn deaf() -> TcpListener {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a port on the loopback interface")
}

/// Two connected sockets: a stream's, and one that stands for its peer.
pub fn sockets() -> (Sock, TcpStream) {
    let listener = deaf();
    let address = listener.local_addr().expect("it listens");
    let ours = Registered::open(|| TcpStream::connect(address).map(socket2::Socket::from)).expect("a connection");
    ours.set_nonblocking(true).expect("it can be set");
    ours.set_tcp_nodelay(true).expect("it can be set");
    (ours, listener.accept().expect("it is there").0)
}

/// The process behind it.
pub fn peer() -> Peer {
    Peer { label: "peer".to_string(), address: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)) }
}

/// A source that keeps its worker until the sender is dropped.
struct Busy(Mutex<Receiver<()>>, AtomicBool);

impl Source for Busy {
    fn poll(&self) -> Progress {
        self.1.store(true, Ordering::SeqCst);
        let _ = self.0.lock().expect("one worker polls").recv();
        Progress::default()
    }

    fn fail(&self, error: Error) {
        panic!("{error}");
    }
}

/// The only worker of a backend is blocked until the returned value is dropped.
pub fn keep_worker(net: &Net) -> impl Drop + use<> {
    struct Kept(Option<mpsc::Sender<()>>, Registration);
    impl Drop for Kept {
        fn drop(&mut self) {
            self.0.take();
        }
    }
    assert_eq!(net.poller.limit(), 1, "another would come");
    let (end, ended) = mpsc::channel();
    let busy = Arc::new(Busy(Mutex::new(ended), AtomicBool::new(false)));
    let worker = net.poller.worker(Half::First, 0).expect("a thread");
    let kept = Kept(Some(end), worker.register(busy.clone(), None).expect("a place"));
    kept.1.kick();
    wait_until("the worker does not come", || busy.1.load(Ordering::SeqCst));
    kept
}

/// Waits until something holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
