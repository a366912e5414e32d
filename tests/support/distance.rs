//! Paths between two network namespaces that lose packets, or bring them late: a TUN device in each, and a thread that
//! carries packets from one to the other. Kernels without netem can do that, too.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::netns::{Namespace, two_hosts};

const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
const IFF_TUN_WITHOUT_HEADER: libc::c_short = 0x1001;

/// The carrier of a path, which ends when this is dropped.
pub struct Distance {
    over: Arc<AtomicBool>,
    carrier: Option<JoinHandle<()>>,
}

/// What a path does to packets.
#[derive(Clone, Copy)]
pub struct Path {
    /// What the hosts believe to pass, in bytes of a packet.
    pub mtu: usize,
    /// The largest packet that passes. Larger ones are lost without a notification.
    pub largest: usize,
    /// From one host to the other.
    pub delay: Duration,
    /// Of a million packets so many are lost, in each direction.
    pub lost_ppm: u32,
}

impl Default for Path {
    /// A short one that loses nothing.
    fn default() -> Self {
        Self { mtu: 1500, largest: 65_536, delay: Duration::ZERO, lost_ppm: 0 }
    }
}

/// Two hosts with such paths between `rail0`, `rail1`, … of each: 10.77.*rail*.1 and 10.77.*rail*.2.
pub fn far_hosts(paths: &[Path]) -> (Namespace, Namespace, Vec<Distance>) {
    let (left, right) = two_hosts(0);
    let carrier = |(rail, path): (usize, &Path)| {
        let ends = [&left, &right].map(|host| tun(host, rail));
        for (host, number, other) in [(&left, 1, 2), (&right, 2, 1)] {
            host.ip(&format!("link set rail{rail} mtu {} up", path.mtu));
            host.ip(&format!("address add 10.77.{rail}.{number} peer 10.77.{rail}.{other} dev rail{rail}"));
        }
        let over = Arc::new(AtomicBool::new(false));
        let (ended, path) = (Arc::clone(&over), *path);
        Distance { over, carrier: Some(std::thread::spawn(move || carry(ends, path, &ended))) }
    };
    let carriers = paths.iter().enumerate().map(carrier).collect();
    (left, right, carriers)
}

impl Drop for Distance {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(carrier) = self.carrier.take() {
            let _ = carrier.join();
        }
    }
}

/// A TUN device in a namespace. A thread of its own enters the namespace, so that this one stays where it is.
fn tun(host: &Namespace, rail: usize) -> File {
    let name = format!("rail{rail}");
    let path = format!("/run/netns/{}", host.name());
    let opened = std::thread::spawn(move || {
        let namespace = File::open(path).expect("the namespace is there");
        // SAFETY: only this thread changes its namespace, and it ends here.
        assert_eq!(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) }, 0, "setns");
        let flags = libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC;
        // SAFETY: the path ends in a zero.
        let fd = unsafe { libc::open(c"/dev/net/tun".as_ptr(), flags) };
        assert!(fd >= 0, "this test needs /dev/net/tun: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor was just opened.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: all zeroes is a valid value of this struct.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
            *to = *from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = IFF_TUN_WITHOUT_HEADER;
        // SAFETY: the kernel reads the struct, which outlives the call.
        assert_eq!(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &raw mut request) }, 0, "a TUN device");
        File::from(fd)
    });
    opened.join().expect("a TUN device")
}

/// When a packet arrives, its number, at which end, and its bytes.
type Packet = (Instant, u64, usize, Vec<u8>);

fn carry(mut ends: [File; 2], path: Path, over: &AtomicBool) {
    let mut way: BinaryHeap<Reverse<Packet>> = BinaryHeap::new();
    let (mut number, mut random) = (0, 0x9E37_79B9_7F4A_7C15_u64);
    let mut bytes = vec![0; 65_536];
    while !over.load(Ordering::SeqCst) {
        while way.peek().is_some_and(|Reverse((at, ..))| *at <= Instant::now()) {
            let Some(Reverse((_, _, to, packet))) = way.pop() else { break };
            // A full queue loses packets, as elsewhere.
            let _ = ends[to].write(&packet);
        }
        let next = way.peek().map_or(Duration::from_millis(100), |Reverse((at, ..))| at.duration_since(Instant::now()));
        let mut polled = [0, 1].map(|end| libc::pollfd { fd: ends[end].as_raw_fd(), events: libc::POLLIN, revents: 0 });
        let millis = next.as_millis().min(100) as libc::c_int;
        // SAFETY: the array outlives the call.
        unsafe { libc::poll(polled.as_mut_ptr(), 2, millis) };
        for (from, end) in ends.iter_mut().enumerate() {
            while let Ok(length) = end.read(&mut bytes) {
                // xorshift64: the same losses each time that the packets are the same.
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let is_lost = (random >> 16) % 1_000_000 < u64::from(path.lost_ppm);
                if !is_lost && length <= path.largest {
                    number += 1;
                    way.push(Reverse((Instant::now() + path.delay, number, 1 - from, bytes[..length].to_vec())));
                }
            }
        }
    }
}
