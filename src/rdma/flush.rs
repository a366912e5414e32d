//! Making received bytes visible to the GPU.
//!
//! Bytes that a device wrote into GPU memory may still be on their way through the PCIe fabric when the completion of
//! the write is already in host memory. A read of the same memory by the same device comes back only behind them. So a
//! flush reads a byte through a queue pair that is connected to itself, one on each port of the connection, and is done
//! when all the reads are. Host memory needs none of this.

use std::sync::Arc;

use super::adapter::{Adapters, Memory, Registration, own_regions};
use super::fabric::{Class, Depth, Fabric, Lane, ports};
use super::line::MAX_DEVICES;
use super::verbs::{Local, MemoryRegion, Remote, Work};
use crate::engine::request::SLOTS;
use crate::os::config::Config;
use crate::os::error::{Error, Result};

/// As many flushes as there are request slots may be outstanding.
const DEPTH: Depth = Depth { send: SLOTS as u32, receive: 1, inline_bytes: 0 };

/// Whether what a device wrote into such memory must be flushed before the GPU reads it.
pub fn is_needed(memory: Memory) -> bool {
    memory != Memory::Host
}

/// The queue pairs that read, and where to.
pub struct Flush {
    /// Goes first: afterwards no device writes into `sink`.
    fabric: Fabric,
    regions: Vec<MemoryRegion>,
    sink: Box<[u64]>,
    /// Reads outstanding, by request slot: a bit for each port, and the memory that is read.
    left: Vec<(u8, Option<Arc<Registration>>)>,
    pending: usize,
    /// Ports that are read from, a bit for each.
    used: u8,
}

impl Flush {
    /// Queue pairs for the ports of a connection.
    ///
    /// # Errors
    /// When a device has no more of them.
    pub fn new(adapters: &Adapters, config: &Config) -> Result<Self> {
        let ports = ports(adapters);
        let mut fabric = Fabric::new(adapters, ports.len(), DEPTH, config, &ports)?;
        let own = fabric.records(config);
        fabric.connect(adapters, &own, Class::new(config, None, false), config)?;
        let sink: Box<[u64]> = vec![0; adapters.len()].into();
        let regions = own_regions(adapters, sink.as_ptr() as u64, size_of_val(&*sink))?;
        const { assert!(MAX_DEVICES <= u8::BITS as usize) };
        let used = ((1_u16 << ports.len()) - 1) as u8;
        Ok(Self { fabric, regions, sink, left: (0..SLOTS).map(|_| (0, None)).collect(), pending: 0, used })
    }

    /// Whether any port brings anything that would have to be flushed.
    pub fn is_needed(&self) -> bool {
        self.used != 0
    }

    /// Reads the byte at `address` on every port, for the request in `slot`. At least one port must be in use.
    ///
    /// # Errors
    /// When a device refuses.
    pub fn start(&mut self, slot: u16, address: u64, memory: Arc<Registration>) -> Result<()> {
        let keys = memory.remote_keys();
        self.left[usize::from(slot)] = (self.used, Some(memory));
        self.pending += 1;
        for index in (0..self.fabric.lanes().len()).filter(|index| self.used & 1 << index != 0) {
            let lane = self.fabric.lane(index);
            if lane.room() == 0 {
                return Err(Error::internal("a flush found no room in its queue"));
            }
            let local = Local {
                address: &raw const self.sink[lane.adapter] as u64,
                length: 1,
                key: self.regions[lane.adapter].local_key(),
            };
            let read = Work {
                id: u64::from(slot) | (index as u64) << 16,
                local,
                remote: Remote { address, key: keys[lane.adapter] },
                immediate: None,
                is_read: true,
                is_inline: false,
                is_signaled: true,
            };
            // SAFETY: `sink` lives as long as the queue pairs, and `left` keeps the memory pinned until the read is done.
            unsafe { lane.post(&[read]) }?;
        }
        Ok(())
    }

    /// Takes the reads that are done, and hands the slots of finished flushes to `done`; `broken` gets failed ones.
    ///
    /// # Errors
    /// When a queue is broken, or as `broken` says.
    pub fn poll(
        &mut self,
        mut done: impl FnMut(u16),
        mut broken: impl FnMut(&mut Lane, &super::verbs::Completion) -> Result<()>,
    ) -> Result<bool> {
        if self.pending == 0 {
            return Ok(false);
        }
        let Self { fabric, left, pending, used, .. } = self;
        fabric.poll(|lanes, completion| {
            let index = (completion.id() >> 16) as u16 as usize;
            if *used & 1 << index == 0 {
                return Ok(());
            }
            if !completion.is_ok() {
                return broken(&mut lanes[index], completion);
            }
            lanes[index].finished(1);
            let slot = completion.id() as u16;
            if end(&mut left[usize::from(slot)], index) {
                *pending -= 1;
                done(slot);
            }
            Ok(())
        })
    }

    /// Whether a flush is outstanding.
    pub fn is_busy(&self) -> bool {
        self.pending > 0
    }

    /// No queue pair of the connection is left on this port. Nothing that it has brought is outstanding any more: its queue
    /// pairs were ended, which a device does only when all that they wrote is written. So no read of it is waited for.
    pub fn give_up(&mut self, port: usize, mut done: impl FnMut(u16)) {
        self.used &= !(1 << port);
        for (slot, left) in self.left.iter_mut().enumerate() {
            if end(left, port) {
                self.pending -= 1;
                done(slot as u16);
            }
        }
    }
}

/// A port has read. Whether it was the last one that was waited for.
fn end((reads, memory): &mut (u8, Option<Arc<Registration>>), port: usize) -> bool {
    let before = *reads;
    *reads &= !(1 << port);
    let is_done = before != 0 && *reads == 0;
    if is_done {
        *memory = None;
    }
    is_done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::backend::Rdma;
    use std::time::{Duration, Instant};

    #[test]
    fn only_gpu_memory_is_flushed() {
        assert!(!is_needed(Memory::Host));
        assert!(is_needed(Memory::Gpu) && is_needed(Memory::DmaBuf));
    }

    /// Host memory stands in for GPU memory: the reads are the same.
    #[test]
    #[ignore = "needs an RDMA device: tests/rdma_vm/suite.sh"]
    fn a_flush_is_done_when_every_port_has_read() {
        let config = Config::default();
        let (rdma, _) = Rdma::find(&config).expect("an RDMA device");
        let adapters = rdma.group(&(0..rdma.adapters.len()).collect::<Vec<_>>());
        let bytes = [7_u8; 100];
        let memory = Registration::new(&adapters, bytes.as_ptr() as u64, 100, Memory::Host, None).expect("registered");
        let memory = Arc::new(memory);
        let mut flush = Flush::new(&adapters, &config).expect("queue pairs");
        for slot in 0..200 {
            flush.start(slot, bytes.as_ptr() as u64 + 99, Arc::clone(&memory)).expect("started");
        }
        let mut finished = vec![0; 200];
        let deadline = Instant::now() + Duration::from_secs(20);
        while finished.contains(&0) {
            let broken = |_: &mut Lane, completion: &super::super::verbs::Completion| panic!("{completion:?}");
            flush.poll(|slot| finished[usize::from(slot)] += 1, broken).expect("a queue that works");
            assert!(Instant::now() < deadline, "not all flushes are done");
        }
        assert!(finished.iter().all(|times| *times == 1));
        assert!(flush.sink.iter().all(|word| word.to_le_bytes()[0] == 7), "every port has read");
        assert_eq!((flush.pending, Arc::strong_count(&memory)), (0, 1), "and the memory is let go");
    }
}
