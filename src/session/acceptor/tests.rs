//! Handshakes that end half-way, from the listening side.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::time::Duration;

use super::{
    Arc, FEATURE_RECOVERY, GREETING, Hello, Instant, Intent, Preamble, Secret, SocketAddr, Transcript, Welcome, nonce,
};
use crate::os::config::Config;
use crate::os::interfaces::Rail;
use crate::session::handshake::{VERSION_MAX, VERSION_MIN, WELCOME};
use crate::session::loopback;
use crate::tcp::listener::Listener;

/// A handshake as the connecting side does it. Returns the socket, the welcome, and the key of a new connection.
fn shake(at: SocketAddr, intent: Intent, secret: &Secret) -> (TcpStream, Welcome, Secret) {
    let mut stream = TcpStream::connect(at).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("it can be set");
    let said = Preamble { low: VERSION_MIN, high: VERSION_MAX, features: FEATURE_RECOVERY }.encode();
    stream.write_all(&said).expect("it listens");
    let mut greeting = [0; GREETING];
    stream.read_exact(&mut greeting).expect("a greeting");
    let mut transcript = Transcript::new();
    transcript.add(&said);
    transcript.add(&greeting);
    let hello = Hello { intent, nonce: nonce().expect("random"), label: "peer".to_string(), rails: Vec::new() };
    stream.write_all(&hello.seal(secret, &mut transcript)).expect("it listens");
    let key = secret.connection_key(transcript.bytes());
    let mut welcome = [0; WELCOME];
    stream.read_exact(&mut welcome).expect("a welcome");
    let welcome = Welcome::open(&welcome, secret, &mut transcript).expect("its proof holds");
    (stream, welcome, key)
}

/// The path of a first stream fails between the welcome and the peer's confirmation, and the peer reconnects over
/// another socket. The entry that waited for its return must be removed, and must not keep the connection in memory.
#[test]
fn a_handshake_that_broke_after_the_welcome_keeps_nothing_when_the_peer_is_back() {
    let net = loopback::net(Config { peer_timeout: Duration::from_millis(500), ..Config::default() });
    let (name, address) = ("lo".to_string(), (Ipv4Addr::LOCALHOST, 0).into());
    let rail = Rail { name, index: 1, address, speed_mbps: 1000, speed_is_known: false, running: true };
    let (listener, addresses) = Listener::open(&net, Arc::from([rail]), None).expect("it can listen");
    let intent = Intent::Connect { listener: listener.secret().listener_id() };
    let (first, welcome, key) = shake(addresses[0], intent, listener.secret());
    first.shutdown(Shutdown::Both).expect("it is connected");
    drop(first);

    let connection = welcome.connection;
    let (_second, ..) = shake(addresses[0], Intent::Join { connection, stream: 0, epoch: 1 }, &key);
    let conn = listener.accept_until(Instant::now() + Duration::from_secs(20)).expect("the keys fit");
    let conn = conn.expect("the peer has come back");
    let left = Arc::downgrade(&conn);
    conn.close();
    drop(conn);
    loopback::wait_until("something keeps the connection", || left.strong_count() == 0);
}
