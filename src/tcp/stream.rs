//! One stream: a socket that any thread may use, one at a time.
//!
//! NCCL's thread and a worker may want the same stream at the same moment. A thread that finds the stream taken adds
//! its work ([`READ`], [`WRITE`], [`SEND`]) to the stream's pending work, and the holder does that before it releases
//! the stream. So to move data no thread waits. Other operations ([`Stream::with_io`], [`Stream::take`],
//! [`Stream::end`]) wait until the holder has released the stream: recovery, closing, and a query about a message that
//! waits for its receive, which NCCL's thread queues in `isend` and `test`. The holder does not wait for the socket
//! (only the confirmation of a new connection may, for up to 20 ms), so such a wait is for another thread's work, not
//! for the network.
//!
//! A thread that only polls ([`Stream::poll_once`]) adds nothing: it will poll again, and the work of a thread that
//! polls in a loop would keep the holder for ever.

use std::sync::{PoisonError, TryLockError};

use crate::engine::poller::Registration;
use crate::os::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use crate::os::sync::{Mutex, MutexGuard, settle};

/// Work: read the bytes that have arrived.
pub(crate) const READ: u8 = 1;
/// Work: check for something to send.
pub(crate) const WRITE: u8 = 2;
/// Work: finish the piece in `out`, and do not query the core for more. Separate from [`WRITE`], which makes the holder
/// check the core again.
pub(crate) const SEND: u8 = 4;

/// A stream whose socket and buffers are an `Io`, or none while it is not connected.
pub(crate) struct Stream<Io> {
    /// Work of threads that found the stream taken.
    pending: AtomicU8,
    /// Before the socket: dropping it names the descriptor, which must still be open then.
    registration: Mutex<Option<Registration>>,
    io: Mutex<Option<Box<Io>>>,
    /// Whether no further epoch follows. Changed and read with `io` locked.
    ended: AtomicBool,
}

/// A stream in the hands of the thread that uses it; nothing inside while it is not connected.
pub(crate) type Held<'a, Io> = MutexGuard<'a, Option<Box<Io>>>;

/// How a step on a stream ended.
pub(crate) enum Step<Broken> {
    /// Everything that could move has moved; whether anything did.
    Settled(bool),
    /// The step stopped because it had its share; there is more.
    More,
    /// The stream is dead, and its socket is to be closed.
    Broken(Broken),
}

/// The result of running a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ran {
    /// Whether anything moved.
    Settled(bool),
    /// There is more to do; run it again when the others had their turn.
    More,
}

impl<Io> Default for Stream<Io> {
    fn default() -> Self {
        Self {
            pending: AtomicU8::new(0),
            registration: Mutex::new(None),
            io: Mutex::new(None),
            ended: AtomicBool::new(false),
        }
    }
}

impl<Io> Stream<Io> {
    /// Runs `step` that does this work, unless another thread holds the stream: then that thread will. `broken` is
    /// called without the stream's lock when the step ends the stream.
    #[allow(dead_code, reason = "for tests/models")]
    pub(crate) fn run<B>(
        &self,
        work: u8,
        step: impl FnMut(&mut Io, u8) -> Step<B>,
        broken: impl FnOnce(Box<Io>, B),
    ) -> Ran {
        self.run_held(self.hold(), work, step, broken)
    }

    /// As [`Stream::run`], with the result of an earlier [`Stream::hold`].
    pub(crate) fn run_held<'a, B>(
        &'a self,
        held: Option<Held<'a, Io>>,
        work: u8,
        step: impl FnMut(&mut Io, u8) -> Step<B>,
        broken: impl FnOnce(Box<Io>, B),
    ) -> Ran {
        if held.is_none() {
            self.pending.fetch_or(work, Ordering::SeqCst);
            settle();
            return self.serve(None, 0, step, broken);
        }
        self.serve(held, work, step, broken)
    }

    /// Runs `step` that does this work if no other thread holds the stream.
    pub(crate) fn poll_once<B>(
        &self,
        work: u8,
        step: impl FnMut(&mut Io, u8) -> Step<B>,
        broken: impl FnOnce(Box<Io>, B),
    ) -> Ran {
        let Some(io) = self.hold() else { return Ran::Settled(false) };
        self.serve(Some(io), work, step, broken)
    }

    /// The stream, unless another thread has it. To be given to [`Stream::run_held`]: releasing it in another way may
    /// leave another thread's work undone.
    pub(crate) fn hold(&self) -> Option<Held<'_, Io>> {
        match self.io.try_lock() {
            Ok(io) => Some(io),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn serve<'a, B>(
        &'a self,
        mut held: Option<Held<'a, Io>>,
        mut work: u8,
        mut step: impl FnMut(&mut Io, u8) -> Step<B>,
        broken: impl FnOnce(Box<Io>, B),
    ) -> Ran {
        let mut moved = false;
        let mut rounds = 0;
        loop {
            let Some(mut io) = held.take().or_else(|| self.hold()) else { return Ran::Settled(moved) };
            loop {
                // A plain load first: where no thread left work, which is nearly always, it saves a locked instruction.
                let mut now = std::mem::take(&mut work);
                if self.pending.load(Ordering::SeqCst) != 0 {
                    now |= self.pending.swap(0, Ordering::SeqCst);
                }
                if now == 0 {
                    break;
                }
                rounds += 1;
                // The caller has served other threads long enough: the stream's worker continues.
                if rounds > 8 {
                    self.pending.fetch_or(now, Ordering::SeqCst);
                    return Ran::More;
                }
                let Some(live) = io.as_mut() else { break };
                match step(live, now) {
                    Step::Settled(more) => moved |= more,
                    Step::More => return Ran::More,
                    Step::Broken(why) => {
                        let dead = io.take().expect("it was live");
                        // Taken together with the socket, under its lock: a moment later the stream may be connected
                        // again, with a new registration.
                        let registration = self.registration().take();
                        drop(io);
                        drop(registration);
                        broken(dead, why);
                        return Ran::Settled(true);
                    }
                }
            }
            drop(io);
            settle();
            // Work that was left between the last check and the unlock found the stream taken: do it now.
            if self.pending.load(Ordering::SeqCst) == 0 {
                return Ran::Settled(moved);
            }
        }
    }

    /// Gives the stream a socket. The registration is added by [`Stream::watch`] before, since it needs the socket.
    ///
    /// # Errors
    /// Gives the socket back, and drops its registration, when the stream has [ended](Stream::end).
    #[allow(dead_code, reason = "for tests/models")]
    pub(crate) fn install(&self, io: Box<Io>) -> Result<(), Box<Io>> {
        self.install_as(io, |_| ())
    }

    /// As [`Stream::install`]. `begin` records, with the stream locked, that its next epoch begins: a thread that reads
    /// the stream and the record with that lock finds both or neither.
    ///
    /// # Errors
    /// As [`Stream::install`]; then nothing has begun.
    pub(crate) fn install_as(&self, mut io: Box<Io>, begin: impl FnOnce(&mut Io)) -> Result<(), Box<Io>> {
        let mut held = self.lock();
        if self.ended.load(Ordering::Relaxed) {
            let registration = self.registration().take();
            drop(held);
            drop(registration);
            return Err(io);
        }
        begin(&mut io);
        *held = Some(io);
        Ok(())
    }

    /// As [`Stream::take`], and no socket follows: one that arrives later for this stream is not used. When this
    /// returns no thread accesses the stream's buffers any more, nor will one later.
    pub(crate) fn end(&self) -> Option<Box<Io>> {
        self.take_if(|| {
            self.ended.store(true, Ordering::Relaxed);
            Some(())
        })
        .flatten()
    }

    /// Where readiness is reported from now on.
    pub(crate) fn watch(&self, registration: Registration) {
        *self.registration() = Some(registration);
    }

    /// Asks the stream's poller to run it: its worker, or the control thread for the first stream, which leaves it to
    /// NCCL's thread if that polls.
    pub(crate) fn kick(&self) {
        if let Some(registration) = &*self.registration() {
            registration.kick();
        }
    }

    /// Whether the stream's worker is polling at this moment, or about to: another thread may be waking it. Never
    /// waits. False without a socket.
    pub(crate) fn is_awake(&self) -> bool {
        match self.registration.try_lock() {
            Ok(registration) => registration.as_ref().is_some_and(Registration::is_awake),
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().as_ref().is_some_and(Registration::is_awake),
        }
    }

    /// Takes the socket away, waiting for the thread that uses it (which never waits itself). After this no thread
    /// touches a buffer through this stream.
    pub(crate) fn take(&self) -> Option<Box<Io>> {
        self.take_if(|| Some(())).flatten()
    }

    /// As [`Stream::take`], if that is still wanted when the thread that used the stream has released it. `wanted`
    /// returns the lock to hold meanwhile, which keeps another epoch of the stream from beginning in between. None when
    /// it is not.
    pub(crate) fn take_if<G>(&self, wanted: impl FnOnce() -> Option<G>) -> Option<Option<Box<Io>>> {
        let mut held = self.lock();
        let meanwhile = wanted()?;
        let io = held.take();
        let registration = self.registration().take();
        drop((meanwhile, held));
        drop(registration);
        Some(io)
    }

    /// Calls `act` with the socket and buffers, after waiting for the thread that uses them. For rare things.
    pub(crate) fn with_io<T>(&self, act: impl FnOnce(&mut Io) -> T) -> Option<T> {
        let done = self.lock().as_deref_mut().map(act);
        self.pass_pending();
        done
    }

    /// Does something if the stream is not connected, and keeps it from being connected meanwhile. For rare things.
    pub(crate) fn while_away<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let held = self.lock();
        let done = held.is_none().then(act);
        drop(held);
        self.pass_pending();
        done
    }

    /// After the stream was locked: leaves the work that other threads added meanwhile to its worker.
    fn pass_pending(&self) {
        settle();
        if self.pending.load(Ordering::SeqCst) != 0 {
            self.kick();
        }
    }

    /// The socket and buffers, waiting for the thread that uses them. For rare things.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<Box<Io>>> {
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn registration(&self) -> MutexGuard<'_, Option<Registration>> {
        self.registration.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
