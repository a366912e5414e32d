//! A connection with both ends in this process: what most tests start from.
//!
//! Guarantees: both ends are ready to transfer; the convenience calls wait at most [`PATIENCE`] and, when that is
//! over, leak the buffers that the plugin may still be using.

use std::time::{Duration, Instant};

use towline::host::{Code, Context, Handle, Listener, Memory, Part, RecvComm, Request, Result, SendComm, Sizes};

/// How long the convenience calls wait before they give up.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connected sender and receiver in one process.
pub struct Pair {
    /// The sending end.
    pub send: SendComm,
    /// The receiving end.
    pub recv: RecvComm,
}

impl Pair {
    /// Listens on `dev`, connects to that from the same device and accepts.
    pub fn connect(context: &Context, dev: i32) -> Result<Self> {
        Self::between((context, dev), (context, dev))
    }

    /// A connection from one context and device to another.
    pub fn between(from: (&Context, i32), to: (&Context, i32)) -> Result<Self> {
        let (listener, mut handle) = to.0.listen(to.1)?;
        Self::through(&listener, from, &mut handle)
    }

    /// A connection through a listener that exists already, for several from one listener.
    pub fn through(listener: &Listener, from: (&Context, i32), handle: &mut Handle) -> Result<Self> {
        let start = Instant::now();
        let (mut send, mut recv) = (None, None);
        loop {
            // In v4 both wait; all sides connect before any accepts.
            if send.is_none() {
                send = from.0.connect(from.1, handle)?;
            }
            if recv.is_none() {
                recv = listener.accept()?;
            }
            match (send, recv) {
                (Some(send), Some(recv)) => return Ok(Self { send, recv }),
                still => (send, recv) = still,
            }
            if start.elapsed() > PATIENCE {
                return Err(Code::Deadline("connection"));
            }
            towline::host::give_way(start);
        }
    }

    /// Sends `data` with `tag` 0 into a receive of the same size and returns what arrived.
    pub fn transfer(&self, data: &[u8]) -> Result<Vec<u8>> {
        self.transfer_into(data, data.len())
    }

    /// Sends `data` into a receive of `capacity` bytes and returns what arrived, cut to the size that the receive
    /// reported.
    pub fn transfer_into(&self, data: &[u8], capacity: usize) -> Result<Vec<u8>> {
        let mut group = self.exchange(&[(0, data)], &[(0, capacity)])?;
        Ok(group.pop().expect("one receive gives one buffer"))
    }

    /// Posts one receive of several buffers, `(tag, capacity)` each, and one send for each `(tag, data)`; returns the
    /// buffers as the receive reported them.
    pub fn exchange(&self, sends: &[(i32, &[u8])], receives: &[(i32, usize)]) -> Result<Vec<Vec<u8>>> {
        let sources: Vec<Memory> = sends.iter().map(|(_, data)| Memory::of(data)).collect();
        let targets: Vec<Memory> = receives.iter().map(|&(_, capacity)| Memory::new(capacity)).collect();
        let outcome = self.exchange_in(sends, &sources, receives, &targets);
        match outcome {
            Ok(sizes) => {
                if !targets.iter().chain(&sources).all(Memory::guards_intact) {
                    return Err(Code::Overrun("a receive"));
                }
                let cut = |(memory, &size): (&Memory, &i32)| {
                    // A plugin that reports no sizes fills the whole buffer.
                    let size = usize::try_from(size).unwrap_or(memory.len());
                    memory.bytes().get(..size).map(<[u8]>::to_vec).ok_or(Code::Overrun("a receive"))
                };
                targets.iter().zip(sizes.iter()).map(cut).collect()
            }
            Err(code) => {
                // The plugin may still be reading or writing.
                std::mem::forget((sources, targets));
                Err(code)
            }
        }
    }

    fn exchange_in(
        &self,
        sends: &[(i32, &[u8])],
        sources: &[Memory],
        receives: &[(i32, usize)],
        targets: &[Memory],
    ) -> Result<Sizes> {
        let send_mrs = sources.iter().map(|memory| self.send.register(memory)).collect::<Result<Vec<_>>>()?;
        let recv_mrs = targets.iter().map(|memory| self.recv.register(memory)).collect::<Result<Vec<_>>>()?;
        let parts: Vec<Part<'_>> = (targets.iter().zip(&recv_mrs).zip(receives))
            .map(|((memory, mr), &(tag, _))| Part::all(memory, Some(mr)).tagged(tag))
            .collect();
        // SAFETY: the caller keeps the memory until the requests are over, or leaks it.
        let receive = unsafe { self.recv.post(&parts) }?;
        let mut requests = Vec::new();
        for ((memory, mr), &(tag, _)) in sources.iter().zip(&send_mrs).zip(sends) {
            // SAFETY: as above.
            requests.push(unsafe { self.send.post(Part::all(memory, Some(mr)).tagged(tag)) }?);
        }
        self.finish(receive, &requests)
    }

    /// Tests a receive and its sends in turn until all are over; returns the receive's sizes.
    pub fn finish(&self, receive: Request, sends: &[Request]) -> Result<Sizes> {
        let start = Instant::now();
        let mut sends = sends.to_vec();
        let mut received = None;
        while received.is_none() || !sends.is_empty() {
            let mut failure = None;
            sends.retain(|request| match self.send.test(request) {
                Ok(done) => done.is_none(),
                Err(code) => {
                    failure = Some(code);
                    false
                }
            });
            if let Some(code) = failure {
                return Err(code);
            }
            if received.is_none() {
                received = self.recv.test(&receive)?;
            }
            if start.elapsed() > PATIENCE {
                return Err(Code::Deadline("end of the transfer"));
            }
            towline::host::give_way(start);
        }
        received.ok_or(Code::Deadline("end of the transfer"))
    }

    /// Closes both ends, the sender first.
    pub fn close(self) -> Result<()> {
        self.send.close()?;
        self.recv.close()
    }
}
