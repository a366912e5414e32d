//! Somebody on the way: a TCP proxy between the two sides of a connection that records what passes and may change it or
//! hold it back, or hardly reads. Only the first stream goes through it, in its first epoch: further ones use the
//! addresses that the handshake tells, which are proved.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use towline::host::Handle;
use towline::plugin::handle::ConnectionHandle;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the connecting to the listening side.
    Forth,
    /// The other way.
    Back,
}

/// What the proxy does with bytes that begin at an offset of their way.
pub type Meddle = dyn FnMut(Way, usize, &mut [u8]) + Send;

/// A proxy in front of one listener.
pub struct Proxy {
    seen: Arc<Mutex<[Vec<u8>; 2]>>,
}

fn decoded(handle: &Handle) -> ConnectionHandle {
    ConnectionHandle::decode(handle.bytes()[..64].try_into().expect("64 bytes")).expect("a handle")
}

/// Where the listener behind a handle can be reached: the tests know as much as an observer of the packets.
pub fn address_of(handle: &Handle) -> SocketAddr {
    decoded(handle).addresses[0]
}

/// Has the handle lead somewhere else.
pub fn lead_to(handle: &mut Handle, address: SocketAddr) {
    let elsewhere = ConnectionHandle { addresses: vec![address], ..decoded(handle) };
    handle.bytes_mut()[..64].copy_from_slice(&elsewhere.encode());
}

impl Proxy {
    /// Puts a proxy in front of the listener behind `handle`, which leads to the proxy from then on. Every connection
    /// is meddled with alike.
    pub fn before(handle: &mut Handle, meddle: impl FnMut(Way, usize, &mut [u8]) + Send + 'static) -> Self {
        let target = address_of(handle);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        lead_to(handle, listener.local_addr().expect("an address"));
        let seen = Arc::new(Mutex::new([Vec::new(), Vec::new()]));
        let (meddle, all) = (Arc::new(Mutex::new(meddle)), Arc::clone(&seen));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(target) else { continue };
                *all.lock().unwrap_or_else(PoisonError::into_inner) = [Vec::new(), Vec::new()];
                for way in [Way::Forth, Way::Back] {
                    let (client, server) = (client.try_clone().expect("a copy"), server.try_clone().expect("a copy"));
                    let (from, to) = if way == Way::Forth { (client, server) } else { (server, client) };
                    let (meddle, seen) = (Arc::clone(&meddle), Arc::clone(&all));
                    std::thread::spawn(move || pass(way, from, to, &seen, &*meddle as &Mutex<Meddle>));
                }
            }
        });
        Self { seen }
    }

    /// What has gone that way so far, through the newest connection, as it was sent.
    pub fn seen(&self, way: Way) -> Vec<u8> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)[way as usize].clone()
    }
}

fn pass(way: Way, mut from: TcpStream, mut to: TcpStream, seen: &Mutex<[Vec<u8>; 2]>, meddle: &Mutex<Meddle>) {
    let _ = to.set_nodelay(true);
    let mut bytes = vec![0; 64 << 10];
    let mut at = 0;
    loop {
        match from.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(count) => {
                seen.lock().unwrap_or_else(PoisonError::into_inner)[way as usize].extend_from_slice(&bytes[..count]);
                (meddle.lock().unwrap_or_else(PoisonError::into_inner))(way, at, &mut bytes[..count]);
                at += count;
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}

/// How often a trickling proxy reads a byte.
const DRIP: Duration = Duration::from_secs(1);

/// A proxy that passes everything until it is told to trickle: from then on it reads one byte a second from either
/// side, until it is told to pass everything again. Dropping it closes what goes through it.
pub struct Trickle {
    trickling: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Trickle {
    /// Puts one in front of the listener behind `handle`.
    pub fn before(handle: &mut Handle) -> Self {
        let target = address_of(handle);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        lead_to(handle, listener.local_addr().expect("an address"));
        // The kernel reads ahead for a program that does not: as little as it can.
        let least: libc::c_int = 4096;
        let length = size_of::<libc::c_int>() as libc::socklen_t;
        let value = (&raw const least).cast();
        // SAFETY: the kernel reads one int. What is accepted inherits the size.
        let set = unsafe { libc::setsockopt(listener.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, value, length) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
        let (trickling, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (slow, ended) = (Arc::clone(&trickling), Arc::clone(&over));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(target) else { continue };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().expect("a copy"), to.try_clone().expect("a copy"));
                    let (slow, ended) = (Arc::clone(&slow), Arc::clone(&ended));
                    std::thread::spawn(move || trickle(from, to, &slow, &ended));
                }
            }
        });
        Self { trickling, over }
    }

    /// Reads one byte a second from now on.
    pub fn begin(&self) {
        self.trickling.store(true, Ordering::SeqCst);
    }

    /// Passes everything again.
    pub fn end(&self) {
        self.trickling.store(false, Ordering::SeqCst);
    }
}

impl Drop for Trickle {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
    }
}

fn trickle(mut from: TcpStream, mut to: TcpStream, slow: &AtomicBool, over: &AtomicBool) {
    let _ = to.set_nodelay(true);
    // So that it looks again when nothing comes.
    let _ = from.set_read_timeout(Some(Duration::from_millis(20)));
    let mut bytes = [0; 4096];
    let mut next = Instant::now();
    while !over.load(Ordering::SeqCst) {
        let mut room = bytes.len();
        if slow.load(Ordering::SeqCst) {
            if Instant::now() < next {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            next = Instant::now() + DRIP;
            room = 1;
        }
        match from.read(&mut bytes[..room]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => next = Instant::now(),
            Ok(0) | Err(_) => break,
            Ok(count) => {
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
