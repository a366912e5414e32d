//! The placer: the thread of a group that alone uses the group's connections and writes into registered memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::{Duration, Instant};

use super::gpu::Mark;
use super::group::{Command, Shared};
use super::landings::Landings;
use super::loud::{say, say_once, say_rarely};
use super::peer::{Own, Peer, Place, has_closed};
use super::signals::Signals;
use super::turns::Turns;
use super::wire::{Header, Kind, Signal};
use crate::os::error::{Cause, Error, Result};

/// How long the placer asks without a pause after something moved.
const EAGER: Duration = Duration::from_micros(200);
/// Its pauses after that.
const PAUSE: Duration = Duration::from_micros(50);
/// Its pauses when nothing has moved for a second.
const LONG_PAUSE: Duration = Duration::from_micros(500);

/// A rank, or why nothing more goes to it.
enum Other {
    Alive(Box<Peer>),
    /// `has_left`: it has closed its side in order.
    Ended {
        why: Error,
        has_left: bool,
    },
    /// The own rank.
    Own,
}

/// Memory of the application's that it wants back.
struct Withdrawal {
    memory: Memory,
    until: Instant,
    /// How far the GPUs must come, once no transfer uses it.
    copies: Option<Vec<Mark>>,
    done: SyncSender<()>,
}

enum Memory {
    /// A registration's.
    Region(u32),
    /// What these puts read.
    Sources(Vec<u64>),
}

impl Memory {
    fn is_used_by(&self, peer: &Peer) -> bool {
        match self {
            Self::Region(region) => peer.uses(*region),
            Self::Sources(puts) => puts.iter().any(|put| peer.reads(*put)),
        }
    }
}

/// A placer and its peers.
pub(crate) struct Placer {
    shared: Arc<Shared>,
    others: Vec<Other>,
    /// Ranks to which a put has been dropped here. Later ones are dropped, too: their signals would promise what was dropped.
    muted: Vec<u32>,
    /// Operations whose target is the own rank.
    own: Landings,
    signals: Signals,
    withdrawals: Vec<Withdrawal>,
    closes: Option<Instant>,
    /// How long a transfer may use memory that is withdrawn, and a goodbye may be under way. As long as the connections may take
    /// to recover: until then the other rank may wait for what this one has to say.
    patience: Duration,
}

impl Placer {
    /// For the group of these other ranks and this one; none at the own place.
    pub(crate) fn new(shared: Arc<Shared>, peers: Vec<Option<Peer>>, turns: Arc<Turns>, patience: Duration) -> Self {
        let others =
            peers.into_iter().map(|peer| peer.map_or(Other::Own, |peer| Other::Alive(Box::new(peer)))).collect();
        let (muted, own, withdrawals) = Default::default();
        let signals = Signals::of(turns);
        Self { shared, others, muted, own, signals, withdrawals, closes: None, patience }
    }

    /// Works until the group is closed.
    pub(crate) fn run(self) {
        let shared = Arc::clone(&self.shared);
        // A panic ends the group: the peers close their connections as they are dropped.
        let ended = catch_unwind(AssertUnwindSafe(|| self.work()));
        let why = match ended {
            Ok(()) => Error::usage("the group of one-sided operations is closed"),
            Err(_) => {
                let error = Error::internal("a defect of Towline ended the placer of one-sided operations");
                say_once(&error);
                error
            }
        };
        shared.end(&why);
    }

    fn work(mut self) {
        let mut moved_at = Instant::now();
        loop {
            let moved = self.turn();
            let now = Instant::now();
            if self.is_over(now) {
                return;
            }
            if moved {
                moved_at = now;
                continue;
            }
            match now - moved_at {
                idle if idle < EAGER => thread::yield_now(),
                idle if idle < Duration::from_secs(1) => thread::park_timeout(PAUSE),
                _ => thread::park_timeout(LONG_PAUSE),
            }
        }
    }

    /// Does all that can be done now. Gives whether anything moved.
    pub(super) fn turn(&mut self) -> bool {
        let commands = self.shared.take();
        let mut moved = !commands.is_empty();
        for command in commands {
            self.obey(command);
        }
        moved |= self.shared.gpus.ask();
        moved |= self.advance();
        self.land_own();
        self.end_withdrawals();
        moved
    }

    /// Whether the group is closed, and nothing is left to say or no time to say it.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        let any_alive = || self.others.iter().any(|other| matches!(other, Other::Alive(_)));
        self.closes.is_some_and(|until| now >= until || !any_alive())
    }

    fn advance(&mut self) -> bool {
        let mut moved = false;
        for other in &mut self.others {
            let Other::Alive(peer) = other else { continue };
            let Shared { registry, requests, .. } = &*self.shared;
            match peer.advance(&mut Own { registry, requests, signals: &mut self.signals }) {
                Ok(_) if peer.is_over() => end(other, &self.shared, &has_closed(), true),
                Ok(peer_moved) => moved |= peer_moved,
                Err(error) => end(other, &self.shared, &error, self.closes.is_some()),
            }
        }
        moved
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Put { request, rank, from, to, signal } => {
                let registry = &self.shared.registry;
                let spot = match registry.locate(from.region, from.offset, from.size) {
                    Ok(spot) => spot,
                    Err(_) if registry.has_ended(from.region) => return self.drop_put(request, rank),
                    Err(error) => return refuse(&self.shared, request, &error),
                };
                if self.muted.contains(&rank) {
                    return self.drop_put(request, rank);
                }
                match &mut self.others[rank as usize] {
                    Other::Alive(peer) => peer.put(request, (from.region, spot), &to, signal),
                    Other::Ended { has_left: true, .. } => self.shared.requests.end(request, Ok(())),
                    Other::Ended { why, .. } => refuse(&self.shared, request, why),
                    Other::Own => self.move_within(request, &from, &to, signal),
                }
            }
            Command::Get { request, rank, from, to } => match &mut self.others[rank as usize] {
                Other::Alive(peer) => peer.get(request, (from.region, from.offset), to),
                Other::Ended { why, .. } => refuse(&self.shared, request, why),
                Other::Own => self.move_within(request, &from, &to, Signal::default()),
            },
            Command::Withdraw { region, done } => {
                self.shared.registry.remove(region);
                self.signals.forget(region);
                for other in &mut self.others {
                    if let Other::Alive(peer) = other {
                        peer.forget(region);
                    }
                }
                self.withdraw(Memory::Region(region), done);
            }
            Command::Detach { done } => {
                let mut puts = Vec::new();
                for other in &self.others {
                    if let Other::Alive(peer) = other {
                        puts.extend(peer.reading());
                    }
                }
                self.withdraw(Memory::Sources(puts), done);
            }
            Command::Close => {
                self.closes = Some(Instant::now() + self.patience);
                for other in &mut self.others {
                    if let Other::Alive(peer) = other {
                        peer.leave();
                    }
                }
            }
        }
    }

    fn withdraw(&mut self, memory: Memory, done: SyncSender<()>) {
        self.withdrawals.push(Withdrawal { memory, until: Instant::now() + self.patience, copies: None, done });
    }

    /// A put reads from memory whose registration has ended, or follows one that did. It is done, for the sake of NCCL's abort,
    /// which ends one window after another: see [`end`].
    fn drop_put(&mut self, request: u64, rank: u32) {
        if !self.muted.contains(&rank) {
            say(&format!(
                "a put to rank {rank} reads memory whose registration has ended: neither it nor any later put or signal to that \
                 rank goes anywhere, and none fails, as an abort needs it; else end a window after the puts from it"
            ));
            self.muted.push(rank);
        }
        self.shared.requests.end(request, Ok(()));
    }

    /// Begins an operation whose target is the own rank.
    fn move_within(&mut self, request: u64, from: &Place, to: &Place, signal: Signal) {
        match self.copy_within(from, to) {
            Ok(mark) => {
                self.own.push(Header { request, signal, ..Header::new(Kind::Put) }, false, mark);
                self.land_own();
            }
            Err(error) => {
                if error.cause() == Cause::System {
                    say_once(&error);
                }
                self.shared.requests.end(request, Err(error));
            }
        }
    }

    fn copy_within(&self, from: &Place, to: &Place) -> Result<Option<Mark>> {
        let registry = &self.shared.registry;
        let source = registry.locate(from.region, from.offset, from.size)?;
        let target = registry.locate(to.region, to.offset, to.size)?;
        let size = from.size as usize;
        if size == 0 {
            return Ok(None);
        }
        if let Some(gpu) = target.gpu.as_ref().or(source.gpu.as_ref()) {
            // NCCL puts a number onto itself to learn that all before it is in place.
            if source.address == target.address {
                return Ok(Some(gpu.latest()));
            }
            let is_within = source.gpu.is_some() && target.gpu.is_some();
            // SAFETY: both are inside registered memory of at least that many bytes, and a registration ends only when the
            // placer, which this is, has seen all streams come this far.
            return unsafe {
                match is_within {
                    true => gpu.copy_within(target.address, source.address, size),
                    false => gpu.copy(target.address, source.address, size),
                }
            }
            .map(Some);
        }
        // SAFETY: both are inside registered host memory of at least that many bytes, which stays valid while it is
        // registered, and this thread alone ends registrations. They may overlap.
        unsafe {
            ptr::copy::<u8>(
                ptr::with_exposed_provenance(source.address),
                ptr::with_exposed_provenance_mut(target.address),
                size,
            );
        }
        Ok(None)
    }

    /// Ends operations on the own rank that are in place.
    fn land_own(&mut self) {
        let Self { shared, own, signals, .. } = self;
        let mut landed = Vec::new();
        let outcome = own.advance(&shared.registry, signals, &mut landed);
        for (header, refused) in landed {
            let outcome =
                if refused { Err(Error::argument("a signal that is not inside its registration")) } else { Ok(()) };
            shared.requests.end(header.request, outcome);
        }
        if let Err(error) = outcome {
            say_once(&error);
            shared.gpus.settle();
            own.take().for_each(|header| shared.requests.end(header.request, Err(error.clone())));
        }
    }

    /// Answers withdrawals whose memory nothing uses. Where something still does after the patience, that rank fails.
    fn end_withdrawals(&mut self) {
        let now = Instant::now();
        let Self { withdrawals, others, shared, closes, .. } = self;
        withdrawals.retain_mut(|withdrawal| {
            let mut is_used = false;
            for other in &mut *others {
                let Other::Alive(peer) = other else { continue };
                if withdrawal.memory.is_used_by(peer) {
                    if now < withdrawal.until {
                        is_used = true;
                    } else {
                        let why = "memory was taken back under a transfer that still used it";
                        let hint = "is that rank stopped? The larger of TOWLINE_PEER_TIMEOUT and TOWLINE_RECONNECT_TIMEOUT is \
                                    how long it is waited for";
                        end(other, shared, &Error::usage(why).with_hint(hint), closes.is_some());
                    }
                }
            }
            if is_used {
                return true;
            }
            let copies = withdrawal.copies.get_or_insert_with(|| shared.gpus.latest());
            let is_done = copies.iter().all(Mark::is_over);
            if is_done {
                let _ = withdrawal.done.send(());
            }
            !is_done
        });
    }
}

impl Drop for Placer {
    /// Nothing is copied after this, and the turns at signals go behind it.
    fn drop(&mut self) {
        self.shared.gpus.settle();
    }
}

/// How an operation with a rank fails.
fn ended(peer: &Peer, error: &Error) -> Error {
    let mut told =
        Error::new(error.cause(), format!("one-sided operations with rank {} end: {}", peer.rank(), error.what()));
    if let Some(address) = error.peer() {
        told = told.with_peer(address);
    }
    if let Some(hint) = error.hint() {
        told = told.with_hint(hint);
    }
    told
}

/// Ends a request that cannot begin.
fn refuse(shared: &Shared, request: u64, error: &Error) {
    say_rarely(error);
    shared.requests.end(request, Err(error.clone()));
}

/// Gives a rank up: closes its connections and ends its requests. `quietly`: without a warning.
///
/// Puts to a rank that has closed its side in order are done: no rank can tell that their bytes went nowhere. To fail them
/// would stop NCCL's progress thread, and then an abort of this rank, which waits for its puts, would never end.
fn end(other: &mut Other, shared: &Shared, error: &Error, quietly: bool) {
    let Other::Alive(peer) = other else { return };
    let told = ended(peer, error);
    let has_left = peer.has_left() && error.cause() == Cause::Remote;
    let rank = peer.rank();
    let (gets, puts): (Vec<_>, Vec<_>) = peer.pending().partition(|(_, is_get)| *is_get || !has_left);
    // Before the peer gives up its turns at signals.
    shared.gpus.settle();
    // This closes the connections: after it nothing touches a request's memory.
    *other = Other::Ended { why: told.clone(), has_left };
    if !puts.is_empty() {
        tracing::info!("rank {rank} has closed its side: {} puts to it went nowhere", puts.len());
    }
    puts.into_iter().for_each(|(request, _)| shared.requests.end(request, Ok(())));
    if has_left && gets.is_empty() {
        return;
    }
    if !quietly {
        say_once(&told);
    }
    shared.tell_failure(&told);
    gets.into_iter().for_each(|(request, _)| shared.requests.end(request, Err(told.clone())));
}

#[cfg(test)]
mod tests;
