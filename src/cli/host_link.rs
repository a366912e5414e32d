//! The ring's link through a plugin: a connection to the right, one from the left, registered staging memory.

use std::slice;
use std::time::{Duration, Instant};

use crate::host::{Context, Handle, Listener, Mr, Part, RecvComm, Request, SendComm, give_way};
use crate::os::error::{Error, Result};

use super::buffer::{Buffer, Place};
use super::proxy::{Proxy, Way};
use super::ring::program::{Action, Step};
use super::ring::{CHUNK_BYTES, CHUNK_ELEMENTS, Link, SLOTS};

/// Connects to the neighbour behind `handle` on device `dev` and accepts one peer, as NCCL does: alternating from v5
/// on; in v4, where both calls wait, connecting first. `idle` is called while neither is ready, and may give up.
pub(crate) fn connect(
    context: &Context,
    (dev, handle): (i32, &mut Handle),
    listener: &Listener,
    mut idle: impl FnMut() -> Result<()>,
) -> Result<(SendComm, RecvComm)> {
    let (mut send, mut recv) = (None, None);
    loop {
        if send.is_none() {
            send = context.connect(dev, handle).map_err(|code| code.while_doing("connecting"))?;
        }
        if recv.is_none() {
            recv = listener.accept().map_err(|code| code.while_doing("accepting"))?;
        }
        (send, recv) = match (send, recv) {
            (Some(send), Some(recv)) => return Ok((send, recv)),
            still => still,
        };
        let missing =
            if send.is_none() { "no connection to the neighbour" } else { "no connection from the neighbour" };
        idle().map_err(|error| {
            Error::new(error.cause(), format!("{missing}: {}", error.what())).with_hint(CONNECT_HINT)
        })?;
    }
}

const CONNECT_HINT: &str = "NCCL_DEBUG=INFO shows what the plugin tried; `towline doctor` shows the interfaces";

/// Gives way to other threads, and gives up after `patience`.
pub(crate) fn until_patience_ends(patience: Duration) -> impl FnMut() -> Result<()> {
    let start = Instant::now();
    move || {
        give_way(start);
        if start.elapsed() < patience {
            return Ok(());
        }
        Err(Error::remote(format!("nothing within {} s", patience.as_secs())))
    }
}

/// One rank's connections and staging slots.
pub(crate) struct HostLink {
    // In the order in which they must end: registrations, connections, memory.
    send_mr: Mr,
    receive_mr: Mr,
    send: SendComm,
    receive: RecvComm,
    send_memory: Buffer,
    receive_memory: Buffer,
    sends: [Option<Request>; SLOTS],
    receives: [Option<Receiving>; SLOTS],
    /// The profiler that the messages are reported to.
    pub(crate) proxy: Proxy,
    patience: Duration,
    idle_rounds: u32,
    idle_since: Instant,
}

/// A receive that is not over.
#[derive(Clone, Copy)]
struct Receiving {
    /// The receive, and then its flush.
    request: Request,
    /// Bytes that are expected.
    due: usize,
    /// Bytes that have arrived, when the request is the flush.
    arrived: Option<usize>,
}

impl HostLink {
    /// `patience` is how long nothing may move before the run is given up.
    pub(crate) fn new(
        (send, receive): (SendComm, RecvComm),
        place: &Place,
        proxy: Proxy,
        patience: Duration,
    ) -> Result<Self> {
        let send_memory = Buffer::new(SLOTS * CHUNK_BYTES, place)?;
        let receive_memory = Buffer::new(SLOTS * CHUNK_BYTES, place)?;
        Ok(Self {
            send_mr: send_memory.register(&send)?,
            receive_mr: receive_memory.register(&receive)?,
            send,
            receive,
            send_memory,
            receive_memory,
            sends: [None; SLOTS],
            receives: [None; SLOTS],
            proxy,
            patience,
            idle_rounds: 0,
            idle_since: Instant::now(),
        })
    }

    /// An all-reduce of `count` elements begins.
    pub(crate) fn begin(&mut self, program: &[Step], count: usize) {
        let steps = |counts: fn(Action) -> bool| program.iter().filter(|step| counts(step.action)).count();
        self.proxy.collective(count, steps(Action::sends), steps(Action::receives));
    }

    /// Checks that nothing was written outside the staging memory, and ends registrations and connections in NCCL's
    /// order.
    pub(crate) fn close(self) -> Result<()> {
        if !(self.send_memory.guards_intact() && self.receive_memory.guards_intact()) {
            return Err(Error::internal("the plugin wrote outside the memory that was given to it"));
        }
        self.send_mr.dereg().map_err(|code| code.while_doing("deregistering send memory"))?;
        self.receive_mr.dereg().map_err(|code| code.while_doing("deregistering receive memory"))?;
        self.send.close().map_err(|code| code.while_doing("closing the sending connection"))?;
        self.receive.close().map_err(|code| code.while_doing("closing the receiving connection"))
    }
}

impl Link for HostLink {
    type Error = Error;

    fn slots(&mut self, receive: Option<usize>, send: Option<usize>) -> (&[f32], &mut [f32]) {
        let received = receive.map_or(&[][..], |slot| {
            // SAFETY: the slot lies within the page-aligned receiving memory, any bytes are floats, and the ring asks
            // for a slot only while no transfer uses it.
            unsafe { slice::from_raw_parts(self.receive_memory.host().at(slot * CHUNK_BYTES).cast(), CHUNK_ELEMENTS) }
        });
        let to_send = send.map_or(&mut [][..], |slot| {
            // SAFETY: as above, in the sending memory; `&mut self` makes it the only reference.
            unsafe { slice::from_raw_parts_mut(self.send_memory.host().at(slot * CHUNK_BYTES).cast(), CHUNK_ELEMENTS) }
        });
        (received, to_send)
    }

    fn start_send(&mut self, slot: usize, elements: usize) -> Result<bool> {
        let at = slot * CHUNK_BYTES;
        let bytes = elements * size_of::<f32>();
        self.send_memory.upload(at..at + bytes)?;
        let data = self.send_memory.at(at);
        let part = Part::new(data, bytes, Some(&self.send_mr)).profiled(self.proxy.posting(Way::Out, slot));
        // SAFETY: the memory lives as long as the connection, and the ring leaves the slot alone until the send is
        // over; so does the proxy with the profiler's handle.
        let request = unsafe { self.send.isend(part) }.map_err(|code| code.while_doing("starting a send"))?;
        self.sends[slot] = request;
        if request.is_some() {
            self.proxy.sending(slot, bytes);
        }
        Ok(request.is_some())
    }

    fn start_receive(&mut self, slot: usize, elements: usize) -> Result<bool> {
        // As in NCCL, receives have room for a whole slot, however little is coming.
        let part = Part::new(self.receive_memory.at(slot * CHUNK_BYTES), CHUNK_BYTES, Some(&self.receive_mr))
            .profiled(self.proxy.posting(Way::In, slot));
        // SAFETY: as for sends.
        let request = unsafe { self.receive.irecv(&[part]) }.map_err(|code| code.while_doing("posting a receive"))?;
        self.receives[slot] =
            request.map(|request| Receiving { request, due: elements * size_of::<f32>(), arrived: None });
        Ok(request.is_some())
    }

    fn is_sent(&mut self, slot: usize) -> Result<bool> {
        let Some(request) = self.sends[slot] else { return Ok(true) };
        let done = self.send.test(&request).map_err(|code| code.while_doing("a send"))?.is_some();
        if done {
            self.proxy.over(Way::Out, slot, 0);
            self.sends[slot] = None;
            self.idle_rounds = 0;
        }
        Ok(done)
    }

    fn received_bytes(&mut self, slot: usize) -> Result<Option<usize>> {
        let Some(Receiving { request, due, arrived }) = self.receives[slot] else { return Ok(None) };
        let doing = if arrived.is_some() { "a flush" } else { "a receive" };
        let Some(sizes) = self.receive.test(&request).map_err(|code| code.while_doing(doing))? else {
            return Ok(None);
        };
        self.idle_rounds = 0;
        // Some plugins never report sizes (NCCL hardly reads them); then the verification of the data must suffice.
        let bytes = arrived.unwrap_or_else(|| usize::try_from(sizes[0]).unwrap_or(due));
        // As in NCCL, data in GPU memory is flushed before it is read.
        if self.receive_memory.is_flushed() && arrived.is_none() && bytes > 0 {
            let part = Part::new(self.receive_memory.at(slot * CHUNK_BYTES), bytes, Some(&self.receive_mr));
            // SAFETY: as for sends.
            let flush = unsafe { self.receive.iflush(part) }.map_err(|code| code.while_doing("starting a flush"))?;
            if let Some(request) = flush {
                self.receives[slot] = Some(Receiving { request, due, arrived: Some(bytes) });
                return Ok(None);
            }
        }
        self.receives[slot] = None;
        let at = slot * CHUNK_BYTES;
        self.receive_memory.download(at..at + bytes.min(CHUNK_BYTES))?;
        self.proxy.over(Way::In, slot, bytes);
        Ok(Some(bytes))
    }

    fn idle(&mut self) -> Result<()> {
        if self.idle_rounds == 0 {
            self.idle_since = Instant::now();
        }
        self.idle_rounds = self.idle_rounds.wrapping_add(1).max(1);
        // Reading the clock costs more than the rest, so only now and then.
        if self.idle_rounds.is_multiple_of(1024) && self.idle_since.elapsed() > self.patience {
            return Err(Error::remote(format!("nothing moved for {} s", self.patience.as_secs()))
                .with_hint("a peer hangs or the network swallows packets; --timeout sets the limit"));
        }
        // NCCL's proxy gives way likewise when it finds nothing to do.
        std::thread::yield_now();
        Ok(())
    }

    fn wrong_size(&self, expected: usize, arrived: usize) -> Error {
        Error::remote(format!("{arrived} bytes arrived where {expected} were sent"))
    }
}
