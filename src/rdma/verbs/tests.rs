//! Real verbs between two devices. These need hardware or SoftRoCE, so they run in the virtual machine of
//! `tests/rdma_vm`.
//!
//! Each test takes the first two usable ports, or the first one twice.

use super::*;
use crate::os::config::Config;
use crate::rdma::devices::{OpenPort, discover};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

const NEEDS_VERBS: &str = "an RDMA device; run it with tests/rdma_vm/suite.sh";

/// One end of a connection, with a buffer that the peer may write.
struct End {
    port: OpenPort,
    // The order of these two is deliberately the wrong one: dropping must be correct in any order.
    domain: ProtectionDomain,
    queue: CompletionQueue,
    pair: QueuePair,
    region: MemoryRegion,
    buffer: Box<[u8]>,
}

impl End {
    fn new(port: &OpenPort, buffer: Vec<u8>) -> Self {
        let mut buffer = buffer.into_boxed_slice();
        let domain = ProtectionDomain::new(&port.context).expect("a domain");
        let queue = CompletionQueue::new(&port.context, 64).expect("a queue");
        let wanted = Capacity { send: 32, receive: 32, inline_bytes: 64 };
        let pair = QueuePair::new(&domain, &queue, &queue, wanted).expect("a pair");
        pair.prepare(QueuePairOptions { port: port.port.number, pkey_index: 0 }).expect("prepared");
        let access = Access { relaxed_ordering: false };
        let region =
            MemoryRegion::new(&domain, buffer.as_mut_ptr() as usize, buffer.len(), access, None).expect("pinned");
        Self { port: port.clone(), domain, queue, pair, region, buffer }
    }

    fn connect(&self, peer: &Self) {
        let route = Route {
            port: self.port.port.number,
            link_layer: self.port.port.link_layer,
            peer_number: peer.pair.number(),
            peer_first_packet: peer.pair.number() & 0xff,
            mtu: self.port.facts.active_mtu.min(peer.port.facts.active_mtu),
            gid_index: u8::try_from(self.port.gid_index).expect("a small table"),
            peer_gid: peer.port.gid,
            lid: peer.port.facts.lid,
            is_global: false,
            service_level: 0,
            traffic_class: 0,
        };
        self.pair.connect(&route).expect("connected");
        self.pair.start(Timeouts { exponent: 14, retries: 3 }, self.pair.number() & 0xff).expect("started");
    }

    fn local(&self, at: usize, length: usize) -> Local {
        let address = self.buffer.as_ptr() as u64 + at as u64;
        Local { address, length: u32::try_from(length).expect("small"), key: self.region.local_key() }
    }

    fn remote(&self, at: usize) -> Remote {
        Remote { address: self.buffer.as_ptr() as u64 + at as u64, key: self.region.remote_key() }
    }

    fn wait(&self) -> Completion {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let mut room = [const { MaybeUninit::uninit() }; 1];
            if !self.queue.poll(&mut room).expect("a queue that works").is_empty() {
                let [completion] = room;
                // SAFETY: `poll` has returned that it filled the one place.
                return unsafe { completion.assume_init() };
            }
            assert!(Instant::now() < deadline, "nothing completed");
            std::thread::yield_now();
        }
    }
}

fn ports() -> [OpenPort; 2] {
    let found = discover(&Config::default()).expect("libibverbs");
    let first = found.ports.first().unwrap_or_else(|| panic!("{NEEDS_VERBS}")).clone();
    let second = found.ports.get(1).unwrap_or(&first).clone();
    [first, second]
}

fn pair_of_ends(buffer_bytes: usize) -> [End; 2] {
    let [first, second] = ports();
    let ends = [End::new(&first, vec![1; buffer_bytes]), End::new(&second, vec![2; buffer_bytes])];
    ends[0].connect(&ends[1]);
    ends[1].connect(&ends[0]);
    ends
}

fn write(id: u64, local: Local, remote: Remote) -> Work {
    Work { id, local, remote, immediate: None, is_read: false, is_inline: false, is_signaled: true }
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn discovery_finds_the_ports_with_their_gids() {
    let found = discover(&Config::default()).expect("libibverbs");
    assert!(!found.ports.is_empty(), "{NEEDS_VERBS}");
    for open in &found.ports {
        assert!(open.facts.is_active && open.port.speed_mbps > 0 && open.port.max_qp > 0, "{open:?}");
        assert_ne!(open.gid, [0; 16], "{open:?}");
        if open.port.link_layer == LinkLayer::Ethernet && open.port.device.starts_with("rxe") {
            assert_eq!(open.gid_why, crate::rdma::gid::Why::Version, "{open:?}");
            assert!(!open.takes_dmabuf, "this kernel's SoftRoCE cannot");
        }
    }
    let line = found.to_string();
    assert!(line.starts_with("RDMA ports [0]"), "{line}");
    println!("{line}");
    let nothing = discover(&Config::from_pairs([("NCCL_IB_HCA", "=nowhere_0")]).0).expect("libibverbs");
    assert!(nothing.ports.is_empty() && nothing.warnings[0].contains("nowhere_0"), "{:?}", nothing.warnings);
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn a_write_with_immediate_arrives_with_its_bytes() {
    let [left, right] = pair_of_ends(1 << 16);
    right.pair.post_receives(77, 1).expect("posted");
    let chain = [
        write(1, left.local(0, 30_000), right.remote(100)),
        Work { immediate: Some(0xfeed_0001), ..write(2, left.local(0, 0), right.remote(0)) },
    ];
    // SAFETY: both ends outlive the completions that are waited for below.
    unsafe { left.pair.post(&chain) }.map_err(|(_, error)| error).expect("posted");
    let arrived = right.wait();
    assert!(arrived.is_ok(), "{arrived:?}");
    assert_eq!((arrived.id(), arrived.opcode(), arrived.immediate()), (77, Opcode::ReceiveImmediate, 0xfeed_0001));
    assert_eq!((left.wait().id(), left.wait().id()), (1, 2));
    assert!(right.buffer[..100].iter().all(|byte| *byte == 2));
    assert!(right.buffer[100..30_100].iter().all(|byte| *byte == 1));
    assert!(right.buffer[30_100..].iter().all(|byte| *byte == 2));
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn inline_bytes_need_no_region_and_reads_fetch() {
    let [left, right] = pair_of_ends(4096);
    let small = [9_u8; 16];
    let local = Local { address: small.as_ptr() as u64, length: 16, key: 0 };
    let inline = Work { is_inline: true, ..write(5, local, right.remote(8)) };
    assert!(left.pair.capacity().inline_bytes >= 16);
    // SAFETY: inline bytes are copied in the call.
    unsafe { left.pair.post(&[inline]) }.map_err(|(_, error)| error).expect("posted");
    assert!(left.wait().is_ok());
    assert_eq!(right.buffer[8..24], [9; 16]);
    let read = Work { is_read: true, ..write(6, left.local(0, 32), right.remote(0)) };
    // SAFETY: both ends outlive the completion.
    unsafe { left.pair.post(&[read]) }.map_err(|(_, error)| error).expect("posted");
    let done = left.wait();
    assert_eq!((done.id(), done.opcode(), done.is_ok()), (6, Opcode::Read, true));
    assert_eq!(left.buffer[..32], right.buffer[..32]);
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn more_requests_than_a_chain_holds_go_out_in_order() {
    let [left, right] = pair_of_ends(4096);
    right.pair.post_receives(0, 20).expect("posted");
    let works: Vec<Work> = (0..20)
        .map(|n| Work {
            immediate: Some(n),
            is_signaled: n == 19,
            ..write(u64::from(n), left.local(0, 8), right.remote(0))
        })
        .collect();
    // SAFETY: both ends outlive the completions.
    unsafe { left.pair.post(&works) }.map_err(|(_, error)| error).expect("posted");
    let immediates: Vec<u32> = (0..20).map(|_| right.wait().immediate()).collect();
    assert_eq!(immediates, (0..20).collect::<Vec<_>>());
    assert_eq!(left.wait().id(), 19);
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn a_wrong_key_fails_the_write_and_flushes_what_follows() {
    let [left, right] = pair_of_ends(4096);
    let wrong = Remote { key: right.remote(0).key ^ 0x5a5a, ..right.remote(0) };
    let works = [write(1, left.local(0, 64), wrong), write(2, left.local(0, 64), right.remote(0))];
    // SAFETY: both ends outlive the completions.
    unsafe { left.pair.post(&works) }.map_err(|(_, error)| error).expect("posted");
    let (first, second) = (left.wait(), left.wait());
    assert_eq!((first.id(), first.status()), (1, rdma_sys::ibv_wc_status::IBV_WC_REM_ACCESS_ERR));
    assert!(second.is_flushed(), "{second:?}");
    assert!(right.buffer.iter().all(|byte| *byte == 2), "no byte of either got through");
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn a_stopped_pair_gives_its_receives_back() {
    let [left, right] = pair_of_ends(4096);
    left.pair.post_receives(3, 2).expect("posted");
    left.pair.stop().expect("stopped");
    assert!(left.wait().is_flushed() && left.wait().is_flushed());
    drop((left.domain, left.queue, left.pair, left.region, right));
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn memory_that_is_not_mapped_is_an_error_with_the_devices_name() {
    let [first, _] = ports();
    let domain = ProtectionDomain::new(&first.context).expect("a domain");
    let error =
        MemoryRegion::new(&domain, 0x1000, 4096, Access { relaxed_ordering: true }, None).expect_err("nothing there");
    assert!(error.to_string().contains(first.context.name()), "{error}");
}

/// The kernel's count of objects in use by this process: queue pairs, completion queues, regions, domains, contexts.
fn kernel_objects() -> String {
    let output = std::process::Command::new("rdma").args(["resource", "show"]).output().expect("iproute2's rdma");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn objects_dropped_in_any_order_leave_nothing_in_the_kernel() {
    let ports = ports();
    let before = kernel_objects();
    for round in 0..20 {
        let [left, right] = [&ports[0], &ports[1]].map(|port| End::new(port, vec![0; 4096]));
        left.connect(&right);
        right.connect(&left);
        let End { domain, queue, pair, region, .. } = left;
        match round % 3 {
            0 => drop((domain, queue, region, pair)),
            1 => drop((pair, region, queue, domain)),
            _ => drop((queue, pair, domain, region)),
        }
    }
    assert_eq!(kernel_objects(), before);
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn a_forked_child_makes_no_call_on_its_parents_objects() {
    let [left, right] = pair_of_ends(4096);
    // SAFETY: the child only drops objects, which is silent there, and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let fd = left.port.context.async_fd();
        drop((left, right));
        // SAFETY: reading the flags of any number is harmless.
        let is_closed = unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0;
        // SAFETY: leaves at once.
        unsafe { libc::_exit(i32::from(!is_closed)) }
    }
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status}");
    // The parent's objects still work.
    // SAFETY: both ends outlive the completion.
    unsafe { left.pair.post(&[write(1, left.local(0, 64), right.remote(0))]) }.map_err(|(_, e)| e).expect("posted");
    assert!(left.wait().is_ok());
}
