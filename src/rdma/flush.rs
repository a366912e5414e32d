//! Making received bytes visible to the GPU.
//!
//! Bytes that a device wrote into GPU memory may still be on their way through the PCIe fabric when the completion of
//! the write is already in host memory. A read of the same memory by the same device completes only after them. So a
//! flush reads a byte through a queue pair that is connected to itself, one on each port of the connection, and is done
//! when all the reads are. Host memory needs none of this.
//!
//! The peer is not involved in a read. So a failed read is repeated on a fresh queue pair of the same port, whatever
//! happens to the connection's own queue pairs. After `TOWLINE_RECONNECT_TIMEOUT` of failed reads the connection ends.
//! One kind of port need not read: one that cannot, and on which the connection has no queue pair any more. Those were
//! ended, which a device does only when everything they wrote has been written.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::adapter::MAX_DEVICES;
use super::adapter::{Adapter, Adapters, Memory, Registration};
use super::dl::Verbs;
use super::fabric::{Class, Depth, Fabric, Qp, ports};
use super::pages::Pages;
use super::trouble::{Doing, explain, is_path_failure};
use super::verbs::{Local, MemoryRegion, Refused, Remote, Timeouts, Work};
use crate::engine::request::SLOTS;
use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::os::log::NET;

/// As many flushes as there are request slots may be outstanding.
const DEPTH: Depth = Depth { send: SLOTS as u32, receive: 1, inline_bytes: 0 };

/// How long after a failed read the next one is made; later a quarter of the time since the first failure.
const NEXT_TRY: Duration = Duration::from_millis(5);

/// Whether bytes that a device wrote into such memory must be flushed before the GPU reads them.
pub(crate) fn is_needed(memory: Memory) -> bool {
    memory != Memory::Host
}

/// How long reads of a port are repeated. If the port is down, its device would have retried for a while longer, as it
/// does with messages.
fn patience(config: &Config, is_out: bool) -> Duration {
    let resent = Timeouts::new(config.ib_timeout.0, config.ib_retry_cnt.0).patience().unwrap_or(Duration::MAX);
    config.reconnect_timeout.saturating_add(if is_out { resent } else { Duration::ZERO })
}

/// The data about the connection that flushes need.
pub(crate) struct Around<'a> {
    /// Its configuration.
    pub config: &'a Config,
    /// Its own queue pairs.
    pub qps: &'a [Qp],
}

impl Around<'_> {
    /// Whether no bytes that arrived over a port can still be under way, because none of the connection's queue pairs
    /// is left there.
    fn is_over(&self, port: usize) -> bool {
        !self.qps.iter().any(|qp| qp.adapter == port && qp.has_pair())
    }
}

/// A queue pair that reads, and the memory that receives the bytes.
struct Reader {
    /// Dropped first: afterwards no device writes into `sink`.
    fabric: Fabric,
    region: MemoryRegion,
    sink: Pages<u64>,
}

impl Reader {
    fn new(adapter: &Adapters, config: &Config) -> Result<Self> {
        let ports = ports(adapter);
        let mut fabric = Fabric::new(adapter, 1, DEPTH, config, &ports)?;
        let mut own = fabric.records(config);
        // It is connected to itself, so there is no peer to agree with; as in NCCL.
        own.iter_mut().for_each(|pair| pair.ece = None);
        fabric.connect(adapter, &own, Class::new(config, None), config).map_err(Refused::into_error)?;
        let sink = Pages::zeroed(1)?;
        let region = adapter[0].own_region(&sink)?;
        Ok(Self { fabric, region, sink })
    }
}

/// A read that could not be posted, or has failed.
struct Failure {
    error: Error,
    /// The read would fail again.
    is_mistake: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, is_mistake: false }
    }
}

/// The reads of one port.
struct Port {
    /// None before the first flush, and after a failure.
    reader: Option<Reader>,
    /// The port alone.
    adapter: Adapters,
    /// Slots of flushes for which it still has to read.
    waiting: VecDeque<u16>,
    /// Reads that its device has.
    posted: usize,
    /// Since when no read has succeeded, and when to make the next one.
    failing: Option<(Instant, Instant)>,
}

impl Port {
    fn new(adapter: &Arc<Adapter>) -> Self {
        let adapter = Arc::new([Arc::clone(adapter)]);
        Self { reader: None, adapter, waiting: VecDeque::with_capacity(SLOTS), posted: 0, failing: None }
    }

    fn is_out(&self) -> bool {
        self.adapter[0].is_out()
    }

    /// Posts the waiting reads, as many as the device has room for.
    fn post(&mut self, index: usize, left: &[Left], config: &Config) -> Result<()> {
        if self.waiting.is_empty() || self.failing.is_some_and(|(_, next)| Instant::now() < next) {
            return Ok(());
        }
        let Reader { fabric, region, sink } = match &mut self.reader {
            Some(reader) => reader,
            none => none.insert(Reader::new(&self.adapter, config)?),
        };
        let qp = fabric.qp(0);
        while let Some(slot) = self.waiting.front().copied()
            && qp.room() > 0
        {
            let Left { address, memory: Some(memory), .. } = &left[usize::from(slot)] else {
                return Err(Error::internal("a flush without its memory"));
            };
            let read = Work {
                id: u64::from(slot),
                local: Local { address: sink.address(), length: 1, key: region.local_key() },
                remote: Remote { address: *address, key: memory.remote_keys()[index] },
                immediate: None,
                is_read: true,
                is_inline: false,
                is_signaled: true,
            };
            // SAFETY: `sink` lives as long as the queue pair, and `left` keeps the memory pinned until the read is done
            // or the queue pair has ended.
            unsafe { qp.post_one(|| read) }?;
            self.waiting.pop_front();
            self.posted += 1;
        }
        Ok(())
    }

    /// Takes the reads that are done.
    fn take(&mut self, mut done: impl FnMut(u16)) -> std::result::Result<bool, Failure> {
        let Self { reader: Some(reader), adapter, posted, failing, .. } = self else { return Ok(false) };
        if *posted == 0 {
            return Ok(false);
        }
        let mut failure = None;
        let any = reader.fabric.poll(|qps, completion| {
            let qp = &mut qps[0];
            if failure.is_some() {
                return Ok(());
            }
            if !completion.is_ok() {
                let text = Verbs::load().map_or("", |verbs| verbs.status_text(completion.status()));
                let (name, is_down) = (adapter[0].name(), adapter[0].is_port_down());
                let error = explain(completion, text, &name, is_down, qp.ends(), Doing::Flushing);
                failure = Some(Failure { error, is_mistake: !is_path_failure(completion.status()) });
                return Ok(());
            }
            qp.finished(1);
            *posted -= 1;
            *failing = None;
            done(completion.id() as u16);
            Ok(())
        })?;
        failure.map_or(Ok(any), Err)
    }

    /// Afterwards its device has none of its reads.
    fn stop(&mut self) {
        (self.reader, self.posted) = (None, 0);
        self.waiting.clear();
    }
}

/// A flush.
#[derive(Clone, Default)]
struct Left {
    /// Ports that are still to have read: a bit for each.
    ports: u8,
    address: u64,
    /// The memory that is read.
    memory: Option<Arc<Registration>>,
}

impl Left {
    /// A port has read, or need not read any more. Returns whether it was the last one.
    fn end(&mut self, port: usize) -> bool {
        let before = self.ports;
        self.ports &= !(1 << port);
        let is_done = before != 0 && self.ports == 0;
        if is_done {
            self.memory = None;
        }
        is_done
    }
}

/// The flushes of a connection.
pub(crate) struct Flush {
    /// By their index in the device. Dropped first: afterwards nothing is read.
    ports: Vec<Port>,
    /// By request slot.
    left: Vec<Left>,
    pending: usize,
}

impl Flush {
    /// No flush yet, over the ports of a connection.
    pub(crate) fn new(adapters: &Adapters) -> Self {
        const { assert!(MAX_DEVICES <= u8::BITS as usize) };
        Self { ports: adapters.iter().map(Port::new).collect(), left: vec![Left::default(); SLOTS], pending: 0 }
    }

    /// The ports that a flush has to wait for, a bit for each.
    pub(crate) fn ports(&self, around: &Around<'_>) -> u8 {
        let is_needed = |(index, port): &(usize, &Port)| !(port.is_out() && around.is_over(*index));
        self.ports.iter().enumerate().filter(is_needed).fold(0, |ports, (index, _)| ports | 1 << index)
    }

    /// Whether a flush that has not ended was posted with this registration.
    pub(crate) fn reads(&self, memory: &Arc<Registration>) -> bool {
        self.left.iter().any(|left| left.memory.as_ref().is_some_and(|held| Arc::ptr_eq(held, memory)))
    }

    /// Reads the byte at `address` on these ports, at least one, for the request in `slot`; as [`Flush::poll`].
    ///
    /// # Errors
    /// As [`Flush::poll`].
    pub(crate) fn start(
        &mut self,
        (slot, ports): (u16, u8),
        (address, memory): (u64, Arc<Registration>),
        around: &Around<'_>,
        mut done: impl FnMut(u16),
    ) -> Result<()> {
        self.left[usize::from(slot)] = Left { ports, address, memory: Some(memory) };
        self.pending += 1;
        for index in (0..self.ports.len()).filter(|index| ports & 1 << index != 0) {
            self.ports[index].waiting.push_back(slot);
            if let Err(error) = self.ports[index].post(index, &self.left, around.config) {
                self.failed(index, error.into(), around, &mut done)?;
            }
        }
        Ok(())
    }

    /// Takes the completed reads, and passes the slots of finished flushes to `done`; repeats failed reads.
    ///
    /// # Errors
    /// When repeating is useless, or has failed for too long.
    pub(crate) fn poll(&mut self, around: &Around<'_>, mut done: impl FnMut(u16)) -> Result<bool> {
        let mut any = false;
        for index in 0..self.ports.len() {
            if self.pending == 0 {
                break;
            }
            let Self { ports, left, pending } = self;
            let taken = ports[index].take(|slot| {
                if left[usize::from(slot)].end(index) {
                    *pending -= 1;
                    done(slot);
                }
            });
            let posted = taken.and_then(|taken| {
                ports[index].post(index, left, around.config)?;
                Ok(taken)
            });
            match posted {
                Ok(taken) => any |= taken,
                Err(failure) => self.failed(index, failure, around, &mut done)?,
            }
        }
        Ok(any)
    }

    /// A port could not read.
    #[cold]
    fn failed(&mut self, index: usize, failure: Failure, around: &Around<'_>, done: impl FnMut(u16)) -> Result<()> {
        let Failure { error, is_mistake } = failure;
        let port = &mut self.ports[index];
        port.stop();
        if is_mistake {
            return Err(error);
        }
        if around.is_over(index) {
            self.give_up(index, done);
            return Ok(());
        }
        let now = Instant::now();
        let since = port.failing.map_or(now, |(since, _)| since);
        if !around.config.recovery || now - since >= patience(around.config, port.is_out()) {
            let what = format!("what was received into GPU memory cannot be flushed: {}", error.what());
            return Err(Error::new(error.cause(), what).with_hint(
                "look at this side's port, at the kernel's log, and at the limit on locked memory (ulimit -l)",
            ));
        }
        if port.failing.is_none() {
            tracing::info!(target: NET, "a flush is made again over another queue pair: {error}");
        }
        port.failing = Some((since, now + NEXT_TRY.max((now - since) / 4)));
        let is_left = |(_, left): &(usize, &Left)| left.ports & 1 << index != 0;
        port.waiting.extend(self.left.iter().enumerate().filter(is_left).map(|(slot, _)| slot as u16));
        Ok(())
    }

    /// No longer waits for ports that are down or cannot read, if nothing arrives over them any more.
    pub(crate) fn settle(&mut self, around: &Around<'_>, mut done: impl FnMut(u16)) {
        for index in 0..self.ports.len() {
            let port = &self.ports[index];
            if self.pending > 0 && (port.is_out() || port.failing.is_some()) && around.is_over(index) {
                self.give_up(index, &mut done);
            }
        }
    }

    fn give_up(&mut self, index: usize, mut done: impl FnMut(u16)) {
        self.ports[index].stop();
        self.ports[index].failing = None;
        for (slot, left) in self.left.iter_mut().enumerate() {
            if left.end(index) {
                self.pending -= 1;
                done(slot as u16);
            }
        }
    }

    /// Stops the queue pair of a port as a failure would.
    #[cfg(test)]
    fn break_port(&mut self, index: usize) {
        self.ports[index].reader.as_mut().expect("it has read").fabric.qp(0).break_pair();
    }
}
