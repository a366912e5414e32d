//! Moves messages through the plugin: a connection each way, as NCCL has for send and receive.

use std::collections::VecDeque;
use std::time::Instant;

use crate::host::{Code, Context, Handle, Init, Listener, Mr, Part, RecvComm, Request, SendComm};
use crate::os::error::{Error, Result};

use super::super::buffer::{Buffer, Place};
use super::super::host_link::connect;
use super::super::plugin_options::{PluginChoice, PluginFacts};
use super::watch::Watch;
use super::{Job, Mover, Side};

/// Bytes of the acknowledgement at the end of a stream.
const ACKNOWLEDGEMENT: usize = 8;

/// The plugin, opened and listening.
pub(super) struct Opened {
    context: Context,
    device: i32,
    place: Place,
    listener: Listener,
    pub(super) handle: Handle,
    pub(super) facts: PluginFacts,
}

impl Opened {
    pub(super) fn open(choice: &PluginChoice) -> Result<Self> {
        let net = choice.open()?;
        let initialising = |code: Code| code.while_doing(format!("initialising {}", net.name()));
        let context = net.init_with(&Init { comm_id: 1, ..Init::default() }).map_err(initialising)?;
        let facts = PluginFacts::of(&context, choice)?;
        let place = Place::choose(choice.gpu, &context, choice.device)?;
        let (listener, handle) = context.listen(choice.device).map_err(|code| code.while_doing("listening"))?;
        Ok(Self { context, device: choice.device, place, listener, handle, facts })
    }

    /// How many requests this API version lets a connection have.
    pub(super) fn max_outstanding(&self) -> usize {
        self.context.net().version().max_requests()
    }

    /// Connects to the other side and is connected to; then registers `memory_bytes`.
    pub(super) fn connect(self, handle: &[u8], memory_bytes: usize, watch: &mut Watch<'_>) -> Result<NetMover> {
        let mut handle = Handle::from_bytes(handle);
        let (send, receive) = connect(&self.context, (self.device, &mut handle), &self.listener, || watch.idle())?;
        self.listener.close().map_err(|code| code.while_doing("closing the listener"))?;
        let memory = Buffer::new(memory_bytes.max(1) + ACKNOWLEDGEMENT, &self.place)?;
        Ok(NetMover { send_mr: memory.register(&send)?, receive_mr: memory.register(&receive)?, send, receive, memory })
    }
}

/// An open connection each way over one piece of memory.
pub(super) struct NetMover {
    // In the order in which they must end: registrations, connections, memory.
    send_mr: Mr,
    receive_mr: Mr,
    send: SendComm,
    receive: RecvComm,
    memory: Buffer,
}

/// A transfer that is not over.
struct Flight {
    request: Request,
    /// Where its bytes are.
    offset: usize,
    /// The receive is done, and this is its flush.
    is_flush: bool,
}

impl NetMover {
    /// Checks that nothing was written outside the memory, and ends everything in NCCL's order.
    pub(super) fn close(self) -> Result<()> {
        if !self.memory.guards_intact() {
            return Err(Error::internal("the plugin wrote outside the memory that was given to it"));
        }
        self.send_mr.dereg().map_err(|code| code.while_doing("deregistering memory"))?;
        self.receive_mr.dereg().map_err(|code| code.while_doing("deregistering memory"))?;
        self.send.close().map_err(|code| code.while_doing("closing the sending connection"))?;
        self.receive.close().map_err(|code| code.while_doing("closing the receiving connection"))
    }

    fn start_send(&self, offset: usize, size: usize) -> Result<Option<Flight>> {
        let part = Part::new(self.memory.at(offset), size, Some(&self.send_mr));
        // SAFETY: the memory lives as long as the connection, and is left alone while a transfer uses it.
        let request = unsafe { self.send.isend(part) }.map_err(|code| code.while_doing("starting a send"))?;
        Ok(request.map(|request| Flight { request, offset, is_flush: false }))
    }

    fn start_receive(&self, offset: usize, size: usize) -> Result<Option<Flight>> {
        let part = Part::new(self.memory.at(offset), size, Some(&self.receive_mr));
        // SAFETY: as for sends.
        let request = unsafe { self.receive.irecv(&[part]) }.map_err(|code| code.while_doing("posting a receive"))?;
        Ok(request.map(|request| Flight { request, offset, is_flush: false }))
    }

    fn is_sent(&self, send: &Flight) -> Result<bool> {
        self.send.test_unsized(&send.request).map_err(|code| code.while_doing("a send"))
    }

    /// Whether a receive is over. What came into GPU memory is flushed first, as NCCL does before its GPU reads it.
    fn is_received(&self, receive: &mut Flight, size: usize) -> Result<bool> {
        let doing = if receive.is_flush { "a flush" } else { "a receive" };
        let Some(sizes) = self.receive.test(&receive.request).map_err(|code| code.while_doing(doing))? else {
            return Ok(false);
        };
        if receive.is_flush {
            return Ok(true);
        }
        // −1: the plugin does not report it. Sizes of 2 GiB and more are cut.
        match sizes[0] {
            -1 | i32::MAX => {}
            arrived if arrived as usize == size => {}
            arrived => return Err(Error::remote(format!("{arrived} bytes arrived where {size} were sent"))),
        }
        if !self.memory.is_flushed() || size == 0 {
            return Ok(true);
        }
        let part = Part::new(self.memory.at(receive.offset), size, Some(&self.receive_mr));
        // SAFETY: as for sends.
        let flush = unsafe { self.receive.iflush(part) }.map_err(|code| code.while_doing("starting a flush"))?;
        // None: there is nothing to wait for.
        let Some(request) = flush else { return Ok(true) };
        (receive.request, receive.is_flush) = (request, true);
        Ok(false)
    }

    /// Keeps up to `job.outstanding` transfers in flight until `job.count` are over. The oldest is tested first, as
    /// NCCL's proxy does.
    fn keep_busy(
        &self,
        job: &Job,
        watch: &mut Watch<'_>,
        start: impl Fn(usize) -> Result<Option<Flight>>,
        is_over: impl Fn(&mut Flight) -> Result<bool>,
    ) -> Result<()> {
        let mut in_flight = VecDeque::with_capacity(job.outstanding);
        let mut begun = 0;
        while begun < job.count || !in_flight.is_empty() {
            let mut moved = false;
            while begun < job.count && in_flight.len() < job.outstanding {
                let Some(request) = start(begun % job.outstanding * job.size)? else { break };
                in_flight.push_back(request);
                begun += 1;
                moved = true;
            }
            while let Some(oldest) = in_flight.front_mut() {
                if !is_over(oldest)? {
                    break;
                }
                in_flight.pop_front();
                moved = true;
            }
            if moved { watch.moved() } else { watch.idle()? }
        }
        Ok(())
    }

    /// A ping-pong in which each receive is posted while the message before the last is on its way.
    fn ping_pong_ahead(&self, side: Side, job: &Job, samples: &mut Vec<f64>, watch: &mut Watch<'_>) -> Result<()> {
        let size = job.size;
        // The leader sends from the first part of the memory and has receives into the other three. The follower
        // returns what it got, and posts the next receive into that part when its answer has left.
        let place = |round: usize| match side {
            Side::Leader => (1 + round % 3) * size,
            Side::Follower => round % 2 * size,
        };
        let mut posted = VecDeque::with_capacity(3);
        for round in 0..job.count.min(2) {
            posted.push_back(Self::until(watch, || self.start_receive(place(round), size))?);
        }
        for round in 0..job.count {
            let start = Instant::now();
            let answer = |receive: Option<Flight>| receive.ok_or_else(|| Error::internal("no receive was posted"));
            let mut receive = answer(posted.pop_front())?;
            if side == Side::Follower {
                Self::until(watch, || Ok(self.is_received(&mut receive, size)?.then_some(())))?;
            }
            let from = if side == Side::Leader { 0 } else { place(round) };
            let send = Self::until(watch, || self.start_send(from, size))?;
            if side == Side::Follower {
                Self::until(watch, || Ok(self.is_sent(&send)?.then_some(())))?;
            }
            if round + 2 < job.count {
                posted.push_back(Self::until(watch, || self.start_receive(place(round + 2), size))?);
            }
            if side == Side::Leader {
                let mut is_sent = false;
                Self::until(watch, || {
                    if !self.is_received(&mut receive, size)? {
                        // A transport may need a test of the send to make progress at all.
                        is_sent = is_sent || self.is_sent(&send)?;
                        return Ok(None);
                    }
                    Ok(Some(()))
                })?;
                samples.push(start.elapsed().as_secs_f64() / 2.0);
                if !is_sent {
                    Self::until(watch, || Ok(self.is_sent(&send)?.then_some(())))?;
                }
            }
        }
        Ok(())
    }

    fn until<T>(watch: &mut Watch<'_>, mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        loop {
            if let Some(result) = attempt()? {
                watch.moved();
                return Ok(result);
            }
            watch.idle()?;
        }
    }
}

impl Mover for NetMover {
    fn stream(&mut self, side: Side, job: &Job, watch: &mut Watch<'_>) -> Result<()> {
        let at_end = self.memory.len() - ACKNOWLEDGEMENT;
        match side {
            Side::Leader => {
                let mut receipt = Self::until(watch, || self.start_receive(at_end, ACKNOWLEDGEMENT))?;
                self.keep_busy(job, watch, |offset| self.start_send(offset, job.size), |send| self.is_sent(send))?;
                Self::until(watch, || Ok(self.is_received(&mut receipt, ACKNOWLEDGEMENT)?.then_some(())))
            }
            Side::Follower => {
                let start = |offset| self.start_receive(offset, job.size);
                self.keep_busy(job, watch, start, |receive| self.is_received(receive, job.size))?;
                let receipt = Self::until(watch, || self.start_send(at_end, ACKNOWLEDGEMENT))?;
                Self::until(watch, || Ok(self.is_sent(&receipt)?.then_some(())))
            }
        }
    }

    fn ping_pong(&mut self, side: Side, job: &Job, samples: &mut Vec<f64>, watch: &mut Watch<'_>) -> Result<()> {
        if job.ahead {
            return self.ping_pong_ahead(side, job, samples, watch);
        }
        let size = job.size;
        // The leader sends from the first part of the memory and receives into the second. The follower returns what
        // it got, and has its next receive posted, into the other part, before it answers.
        let mut next = match side {
            Side::Leader => None,
            Side::Follower => Some(Self::until(watch, || self.start_receive(0, size))?),
        };
        for round in 0..job.count {
            let start = Instant::now();
            let send = match next.take() {
                None => {
                    let mut receive = Self::until(watch, || self.start_receive(size, size))?;
                    let send = Self::until(watch, || self.start_send(0, size))?;
                    let mut is_sent = false;
                    Self::until(watch, || {
                        if self.is_received(&mut receive, size)? {
                            return Ok(Some(()));
                        }
                        // A transport may need a test of the send to make progress at all.
                        is_sent = is_sent || self.is_sent(&send)?;
                        Ok(None)
                    })?;
                    samples.push(start.elapsed().as_secs_f64() / 2.0);
                    (!is_sent).then_some(send)
                }
                Some(mut receive) => {
                    Self::until(watch, || Ok(self.is_received(&mut receive, size)?.then_some(())))?;
                    if round + 1 < job.count {
                        next = Some(Self::until(watch, || self.start_receive((round + 1) % 2 * size, size))?);
                    }
                    Some(Self::until(watch, || self.start_send(round % 2 * size, size))?)
                }
            };
            if let Some(send) = send {
                Self::until(watch, || Ok(self.is_sent(&send)?.then_some(())))?;
            }
        }
        Ok(())
    }

    fn memory(&mut self) -> &mut [u8] {
        let messages = self.memory.len() - ACKNOWLEDGEMENT;
        &mut self.memory.host_mut()[..messages]
    }

    fn upload(&mut self, bytes: usize) -> Result<()> {
        self.memory.upload(0..bytes)
    }

    fn download(&mut self, bytes: usize) -> Result<()> {
        self.memory.download(0..bytes)
    }
}
