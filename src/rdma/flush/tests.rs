//! Flushes on real verbs, with host memory in place of GPU memory: the reads are the same.

use super::*;
use crate::rdma::backend::Rdma;

#[test]
fn only_gpu_memory_is_flushed() {
    assert!(!is_needed(Memory::Host));
    assert!(is_needed(Memory::Gpu) && is_needed(Memory::DmaBuf));
}

#[test]
fn a_port_that_is_away_is_waited_for_as_messages_are() {
    let pairs = [("TOWLINE_RECONNECT_TIMEOUT", "2"), ("NCCL_IB_TIMEOUT", "18"), ("NCCL_IB_RETRY_CNT", "3")];
    let config = Config::from_pairs(pairs).0;
    assert_eq!(patience(&config, false), Duration::from_secs(2));
    assert_eq!(patience(&config, true).as_millis(), 2000 + 4 * 4096 * (1 << 18) / 1_000_000);
    let config = Config::from_pairs([("TOWLINE_RECONNECT_TIMEOUT", "2"), ("NCCL_IB_TIMEOUT", "0")]).0;
    assert_eq!((patience(&config, false), patience(&config, true)), (Duration::from_secs(2), Duration::MAX));
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn a_flush_is_done_when_every_port_has_read() {
    let config = Config::default();
    let (rdma, _) = Rdma::find(&config).expect("an RDMA device");
    let adapters = rdma.group(&(0..rdma.adapters.len()).collect::<Vec<_>>());
    let bytes = [7_u8; 100];
    let memory = Registration::new(&adapters, bytes.as_ptr() as u64, 100, Memory::Host, None).expect("registered");
    let memory = Arc::new(memory);
    let mut flush = Flush::new(&adapters);
    let around = Around { config: &config, qps: &[] };
    let mut finished = vec![0; 200];
    for slot in 0..200 {
        let last = (bytes.as_ptr() as u64 + 99, Arc::clone(&memory));
        let ports = flush.ports(&around);
        flush.start((slot, ports), last, &around, |_| panic!("done before it is asked after")).expect("started");
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while finished.contains(&0) {
        flush.poll(&around, |slot| finished[usize::from(slot)] += 1).expect("a queue that works");
        assert!(Instant::now() < deadline, "not all flushes are done");
    }
    assert!(finished.iter().all(|times| *times == 1));
    let read = |port: &Port| port.reader.as_ref().expect("a queue pair").sink[0].to_le_bytes()[0];
    assert!(flush.ports.iter().all(|port| read(port) == 7 && port.failing.is_none()), "every port has read");
    assert_eq!((flush.pending, Arc::strong_count(&memory)), (0, 1), "and the memory is let go");
}

/// Flushes a byte of this memory until it is done.
fn flush_byte(flush: &mut Flush, around: &Around<'_>, (slot, memory): (u16, &Arc<Registration>), address: u64) {
    let (mut is_done, start) = (false, Instant::now());
    let ports = flush.ports(around);
    flush.start((slot, ports), (address, Arc::clone(memory)), around, |_| is_done = true).expect("started");
    while !is_done {
        flush.poll(around, |done| is_done = done == slot).expect("a port that can read");
        assert!(start.elapsed() < Duration::from_secs(20), "a flush hangs");
    }
}

/// The queue pairs of a connection that is not connected.
fn qps(adapters: &Adapters, config: &Config) -> Fabric {
    Fabric::new(adapters, adapters.len(), DEPTH, config, &ports(adapters)).expect("queue pairs")
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn a_read_that_fails_is_made_again() {
    let config = Config::default();
    let (rdma, _) = Rdma::find(&config).expect("an RDMA device");
    let adapters = rdma.group(&(0..rdma.adapters.len()).collect::<Vec<_>>());
    let bytes: Box<[u8; 2]> = Box::new([7, 9]);
    let address = bytes.as_ptr() as u64;
    let memory = Registration::new(&adapters, address, 2, Memory::Host, None).expect("registered");
    let memory = Arc::new(memory);
    let fabric = qps(&adapters, &config);
    let around = Around { config: &config, qps: fabric.qps() };
    let mut flush = Flush::new(&adapters);
    flush_byte(&mut flush, &around, (3, &memory), address);
    for broken in 0..adapters.len() {
        flush.break_port(broken);
        flush_byte(&mut flush, &around, (3, &memory), address + 1);
        let read = |port: &Port| port.reader.as_ref().expect("a queue pair").sink[0].to_le_bytes()[0];
        assert!(flush.ports.iter().all(|port| read(port) == 9 && port.failing.is_none()), "every port has read");
    }
    assert_eq!((flush.pending, Arc::strong_count(&memory)), (0, 1), "and the memory is let go");

    let config = Config::from_pairs([("TOWLINE_RECOVERY", "0")]).0;
    flush.break_port(0);
    let around = Around { config: &config, ..around };
    let ports = flush.ports(&around);
    flush.start((4, ports), (address, Arc::clone(&memory)), &around, |_| panic!("done")).expect("started");
    let start = Instant::now();
    let error = loop {
        if let Err(error) = flush.poll(&around, |_| panic!("it is done without a read")) {
            break error;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "a flush hangs");
    };
    assert!(error.what().starts_with("what was received into GPU memory cannot be flushed: the flush"), "{error}");
}

/// The connection's queue pairs of a port have ended: it reads if it can, and flushes do not wait for it when it
/// cannot.
#[test]
#[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
fn a_port_that_is_lost_is_not_waited_for() {
    let config = Config::default();
    let (rdma, _) = Rdma::find(&config).expect("an RDMA device");
    let adapters = rdma.group(&(0..rdma.adapters.len()).collect::<Vec<_>>());
    let bytes: Box<[u8; 2]> = Box::new([7, 9]);
    let address = bytes.as_ptr() as u64;
    let memory = Registration::new(&adapters, address, 2, Memory::Host, None).expect("registered");
    let memory = Arc::new(memory);
    let mut fabric = qps(&adapters, &config);
    let mut flush = Flush::new(&adapters);
    flush_byte(&mut flush, &Around { config: &config, qps: fabric.qps() }, (0, &memory), address);
    drop(fabric.qp(0).end());
    let around = Around { config: &config, qps: fabric.qps() };
    flush_byte(&mut flush, &around, (1, &memory), address + 1);
    let read = |flush: &Flush| flush.ports[0].reader.as_ref().map(|reader| reader.sink[0].to_le_bytes()[0]);
    assert_eq!(read(&flush), Some(9), "it can");
    flush.break_port(0);
    flush_byte(&mut flush, &around, (2, &memory), address);
    assert_eq!(read(&flush), None, "it cannot");
    // The next flush has a fresh queue pair.
    flush_byte(&mut flush, &around, (3, &memory), address);
    assert_eq!(read(&flush), Some(7));
    // The port goes down while a flush waits for it. The flush may or may not have finished by then.
    let mut done = 0;
    flush.start((4, 1), (address, Arc::clone(&memory)), &around, |_| done += 1).expect("started");
    adapters[0].set_port_down(true);
    flush.settle(&around, |_| done += 1);
    assert_eq!((done, read(&flush), flush.pending), (1, None, 0));
    assert_eq!(flush.ports(&around) & 1, 0, "later ones do without it");
    adapters[0].set_port_down(false);
    assert_eq!(flush.ports(&around) & 1, 1);
    // A port that has queue pairs is needed, down or not.
    adapters[1].set_port_down(true);
    assert_eq!(flush.ports(&around), 3);
    flush_byte(&mut flush, &around, (5, &memory), address);
}
