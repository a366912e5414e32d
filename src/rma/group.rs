//! A group of ranks: the state that NCCL's threads and the placer share.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};

use super::gpu::Gpus;
use super::peer::Place;
use super::registry::{Region, Registry};
use super::requests::Requests;
use super::wire::{LONGEST, Signal};
use crate::nccl::ffi::{NCCL_PTR_CUDA, NCCL_PTR_HOST};
use crate::os::error::{Error, Result};

/// The commands of NCCL's threads for the placer.
#[allow(missing_docs, reason = "the sentences above them name all fields")]
pub(crate) enum Command {
    /// Put the own bytes at `from` into another rank's memory at `to`.
    Put { request: u64, rank: u32, from: Place, to: Place, signal: Signal },
    /// Get another rank's bytes at `from` into the own memory at `to`.
    Get { request: u64, rank: u32, from: Place, to: Place },
    /// End a registration, and report by `done` when nothing uses it.
    Withdraw { region: u32, done: SyncSender<()> },
    /// Report by `done` when no put that was begun reads its source any more.
    Detach { done: SyncSender<()> },
    /// Say goodbye and end.
    Close,
}

/// The data that both sides hold.
#[derive(Default)]
pub(crate) struct Shared {
    /// The own registrations.
    pub registry: Registry,
    /// The own requests.
    pub requests: Requests,
    /// The GPUs that have registered memory.
    pub gpus: Gpus,
    inbox: Mutex<Inbox>,
}

#[derive(Default)]
struct Inbox {
    commands: Vec<Command>,
    /// Why the placer accepts no more commands.
    ended: Option<Error>,
    /// The first failure of another rank.
    failure: Option<Error>,
    placer: Option<Thread>,
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The placer's thread, which is woken from now on.
    pub(crate) fn serve(&self, placer: Thread) {
        self.inbox().placer = Some(placer);
    }

    /// For the placer: the commands since the last call.
    pub(crate) fn take(&self) -> Vec<Command> {
        std::mem::take(&mut self.inbox().commands)
    }

    /// For the placer: another rank has failed.
    pub(crate) fn tell_failure(&self, error: &Error) {
        self.inbox().failure.get_or_insert(error.clone());
    }

    /// For the placer: it has ended, and so have all its commands.
    pub(crate) fn end(&self, why: &Error) {
        let mut inbox = self.inbox();
        inbox.ended.get_or_insert(why.clone());
        // The thread that waits for a withdrawal notices that its sender is gone.
        inbox.commands.clear();
        drop(inbox);
        self.requests.end_all(why);
    }

    pub(super) fn ask(&self, command: Command) -> Result<()> {
        let mut inbox = self.inbox();
        if let Some(why) = &inbox.ended {
            return Err(why.clone());
        }
        let wake = inbox.commands.is_empty();
        inbox.commands.push(command);
        if wake && let Some(placer) = &inbox.placer {
            placer.unpark();
        }
        Ok(())
    }
}

/// A group, as NCCL holds it.
pub(crate) struct Group {
    /// The state that its placer shares.
    pub shared: std::sync::Arc<Shared>,
    /// How many ranks it has.
    pub ranks: u32,
    /// The placer, until it is closed.
    pub placer: Mutex<Option<JoinHandle<()>>>,
}

impl Group {
    /// `own`: the place on this rank. Its registration may have ended: see [`super::placer`].
    fn check(&self, rank: u32, own: &Place) -> Result<()> {
        let size = own.size;
        if rank >= self.ranks {
            return Err(Error::argument(format!("there is no rank {rank} among {}", self.ranks)));
        }
        if size > LONGEST {
            return Err(Error::argument(format!("{size} bytes at a time; at most {LONGEST} are possible")));
        }
        match self.shared.registry.locate(own.region, own.offset, size) {
            Err(error) if !self.shared.registry.has_ended(own.region) => Err(error),
            _ => Ok(()),
        }
    }

    /// Begins a put and returns its request. Signal region 0: none.
    ///
    /// # Errors
    /// When the rank or the own memory does not exist.
    pub(crate) fn put(&self, rank: u32, from: Place, to: Place, signal: Signal) -> Result<u64> {
        self.check(rank, &from)?;
        let request = self.shared.requests.begin();
        self.begin(request, Command::Put { request, rank, from, to, signal })
    }

    /// Begins a get and returns its request.
    ///
    /// # Errors
    /// When the rank or the own memory does not exist.
    pub(crate) fn get(&self, rank: u32, from: Place, to: Place) -> Result<u64> {
        self.check(rank, &to)?;
        let request = self.shared.requests.begin();
        self.begin(request, Command::Get { request, rank, from, to })
    }

    fn begin(&self, request: u64, command: Command) -> Result<u64> {
        if let Err(error) = self.shared.ask(command) {
            // `test` returns the reason, as with the network's connections.
            self.shared.requests.end(request, Err(error));
        }
        Ok(request)
    }

    /// Registers memory of kind `NCCL_PTR_*`. `only_ours`: see [`Region`].
    ///
    /// # Errors
    /// When it does not fit into the address space, or `kind` names a GPU and no GPU has it. Its number is used up
    /// then.
    pub(crate) fn register(&self, memory: (usize, usize), kind: i32, only_ours: bool) -> Result<u32> {
        let found = self.find(memory, kind, only_ours);
        let number = self.shared.registry.add(found.clone().unwrap_or_default())?;
        found.map(|_| number)
    }

    fn find(&self, (address, size): (usize, usize), kind: i32, only_ours: bool) -> Result<Region> {
        if address == 0 && size > 0 {
            return Err(Error::argument("the memory to register is null"));
        }
        if address.checked_add(size).is_none() {
            return Err(Error::argument("the memory to register reaches beyond the address space"));
        }
        let gpu = match kind {
            NCCL_PTR_CUDA if size > 0 => Some(self.shared.gpus.of(address, self.ranks)?),
            NCCL_PTR_HOST | NCCL_PTR_CUDA => None,
            _ => return Err(Error::argument(format!("there is no memory of kind {kind} for one-sided operations"))),
        };
        Ok(Region { address, size, gpu, only_ours })
    }

    /// Ends a registration. After that this library does not touch its memory.
    ///
    /// # Errors
    /// When there is no such registration.
    pub(crate) fn withdraw(&self, region: u32) -> Result<()> {
        if !self.shared.registry.has(region) {
            return Err(Error::argument(format!("there is no registration number {region}")));
        }
        if !self.wait_for(|done| Command::Withdraw { region, done }) {
            self.shared.registry.remove(region);
        }
        Ok(())
    }

    /// Waits until no put that was begun reads its source any more.
    pub(crate) fn detach(&self) {
        self.wait_for(|done| Command::Detach { done });
    }

    /// Waits until the placer has done this, or has ended. Returns false if the placer had ended before.
    fn wait_for(&self, command: impl FnOnce(SyncSender<()>) -> Command) -> bool {
        let (done, is_done) = sync_channel(1);
        if self.shared.ask(command(done)).is_err() {
            return false;
        }
        // An error here means that the placer ends. It closes all connections and waits for copies before it reports
        // its end.
        if is_done.recv().is_err() {
            while self.shared.inbox().ended.is_none() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        true
    }

    /// Whether another rank has failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        let inbox = self.shared.inbox();
        inbox.failure.clone().or_else(|| inbox.ended.clone())
    }

    /// Ends the group: notifies the other ranks, and closes all connections.
    pub(crate) fn close(&self) {
        let placer = self.placer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(placer) = placer {
            let _ = self.shared.ask(Command::Close);
            let _ = placer.join();
            // Streams and page-locked memory are freed here, not with the last handle of the group.
            self.shared.registry.clear();
            self.shared.gpus.clear();
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.close();
    }
}
