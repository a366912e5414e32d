//! The placer: the only thread that uses a group's connections and writes into its registered memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::{Duration, Instant};

use super::gpu::Mark;
use super::group::{Command, Shared};
use super::landings::Landings;
use super::losses::Losses;
use super::loud::{say, say_once, say_rarely};
use super::patience::Patience;
use super::peer::{Own, Peer, Place, has_closed};
use super::signals::Signals;
use super::turns::Turns;
use super::wire::{Header, Kind, Signal};
use crate::os::error::{Cause, Error, Result};

/// How long the placer polls without a pause after something moved.
const EAGER: Duration = Duration::from_micros(200);
/// Its pauses after that.
const PAUSE: Duration = Duration::from_micros(50);
/// Its pauses when nothing has moved for a second.
const LONG_PAUSE: Duration = Duration::from_micros(500);

/// The delay of the warning about another rank that has gone without a goodbye, with nothing under way. Most jobs whose
/// processes end without destroying their communicators are over by then.
const WARNING_DELAY: Duration = Duration::from_secs(5);

/// A rank, or the reason why nothing more is sent to it.
enum Other {
    Alive(Box<Peer>),
    /// `has_left`: the rank has closed its side in order. `gone`: when it disappeared without a goodbye, until a
    /// warning reports it.
    Ended {
        why: Error,
        has_left: bool,
        gone: Option<Instant>,
    },
    /// The own rank.
    Own,
}

/// Memory that NCCL takes back, and the progress of that.
struct Withdrawal {
    memory: Memory,
    since: Instant,
    /// The marks that the GPUs' streams must reach; known once no transfer uses the memory.
    copies: Option<Vec<Mark>>,
    done: SyncSender<()>,
}

enum Memory {
    /// The memory of this registration.
    Region(u32),
    /// The sources of these puts.
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
    losses: Losses,
    /// Operations whose target is the own rank.
    own: Landings,
    signals: Signals,
    withdrawals: Vec<Withdrawal>,
    closes: Option<Instant>,
    patience: Patience,
}

impl Placer {
    /// A placer for the group of these other ranks and this one; None at the own rank's place.
    pub(crate) fn new(shared: Arc<Shared>, peers: Vec<Option<Peer>>, turns: Arc<Turns>, patience: Patience) -> Self {
        let others =
            peers.into_iter().map(|peer| peer.map_or(Other::Own, |peer| Other::Alive(Box::new(peer)))).collect();
        let (losses, own, withdrawals) = Default::default();
        let signals = Signals::of(turns);
        Self { shared, others, losses, own, signals, withdrawals, closes: None, patience }
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
            if self.is_over() {
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

    /// Does all work that can be done now. Returns whether anything moved.
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
        self.end_goodbyes();
        self.tell_of_the_gone();
        moved
    }

    /// Whether the group is closed, and nothing is left to send.
    pub(super) fn is_over(&self) -> bool {
        self.closes.is_some() && !self.others.iter().any(|other| matches!(other, Other::Alive(_)))
    }

    fn advance(&mut self) -> bool {
        let mut moved = false;
        for other in &mut self.others {
            let Other::Alive(peer) = other else { continue };
            let Shared { registry, requests, .. } = &*self.shared;
            let error = match peer.advance(&mut Own { registry, requests, signals: &mut self.signals }) {
                Ok(_) if peer.is_over() => {
                    self.patience.answered(peer.process());
                    has_closed()
                }
                Ok(peer_moved) => {
                    moved |= peer_moved;
                    continue;
                }
                Err(error) => error,
            };
            end(other, &self.shared, &mut self.losses, &error, self.closes.is_some());
        }
        moved
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Put { request, rank, from, to, signal } => {
                let registry = &self.shared.registry;
                let spot = match registry.locate(from.region, from.offset, from.size) {
                    Ok(spot) => spot,
                    Err(_) if registry.has_ended(from.region) => {
                        self.losses.source_has_ended(rank);
                        return self.shared.requests.end(request, Ok(()));
                    }
                    Err(error) => return refuse(&self.shared, request, &error),
                };
                if self.losses.has(rank) {
                    return self.shared.requests.end(request, Ok(()));
                }
                match &mut self.others[rank as usize] {
                    Other::Alive(peer) => peer.put(request, (from.region, spot), &to, signal),
                    Other::Ended { has_left: true, .. } => {
                        self.losses.target_has_left(rank);
                        self.shared.requests.end(request, Ok(()));
                    }
                    Other::Ended { why, .. } => fail(&self.shared, request, why),
                    Other::Own => self.move_within(request, &from, &to, signal),
                }
            }
            Command::Get { request, rank, from, to } => {
                if self.shared.registry.locate(to.region, to.offset, to.size).is_err() {
                    // Its registration has ended, so NCCL does not read it any more. An error would hang its abort, as
                    // with a put.
                    return self.shared.requests.end(request, Ok(()));
                }
                match &mut self.others[rank as usize] {
                    Other::Alive(peer) => peer.get(request, (from.region, from.offset), to),
                    Other::Ended { why, .. } => fail(&self.shared, request, why),
                    Other::Own => self.move_within(request, &from, &to, Signal::default()),
                }
            }
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
                self.closes = Some(Instant::now());
                for other in &mut self.others {
                    if let Other::Alive(peer) = other {
                        peer.leave();
                    }
                }
            }
        }
    }

    fn withdraw(&mut self, memory: Memory, done: SyncSender<()>) {
        self.withdrawals.push(Withdrawal { memory, since: Instant::now(), copies: None, done });
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
            // NCCL puts a number onto itself to detect that all earlier operations are in place.
            if source.address == target.address {
                return Ok(Some(gpu.latest()));
            }
            let is_within = source.gpu.is_some() && target.gpu.is_some();
            // SAFETY: both are inside registered memory of at least that many bytes, and a registration ends only when
            // the placer, which this is, has seen all streams come this far.
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

    /// Answers withdrawals whose memory nothing uses. If a rank's transfer still uses it after the patience, that rank
    /// fails.
    fn end_withdrawals(&mut self) {
        let Self { withdrawals, others, shared, closes, losses, patience, .. } = self;
        withdrawals.retain_mut(|withdrawal| {
            let mut is_used = false;
            for other in &mut *others {
                let Other::Alive(peer) = other else { continue };
                if withdrawal.memory.is_used_by(peer) {
                    if patience.lasts(peer.process(), withdrawal.since, peer.moved()) {
                        is_used = true;
                    } else {
                        let why = "memory was taken back under a transfer that still used it";
                        let hint = "is that rank stopped? The larger of TOWLINE_PEER_TIMEOUT and TOWLINE_RECONNECT_TIMEOUT is \
                                    how long it is waited for";
                        let error = Error::usage(why).with_hint(hint);
                        peer.abandon();
                        end(other, shared, losses, &error, closes.is_some());
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

    /// Gives up the ranks that have not said goodbye in time.
    fn end_goodbyes(&mut self) {
        let Some(since) = self.closes else { return };
        for other in &mut self.others {
            if let Other::Alive(peer) = other
                && !self.patience.lasts(peer.process(), since, peer.moved())
            {
                peer.abandon();
                end(other, &self.shared, &mut self.losses, &Error::remote("it said no goodbye"), true);
            }
        }
    }

    /// Warns of ranks that this one outlives: if it waits for a signal of theirs, no request of its own ends with an
    /// error.
    fn tell_of_the_gone(&mut self) {
        if self.closes.is_some() {
            return;
        }
        let mut due = Vec::new();
        for (rank, other) in self.others.iter_mut().enumerate() {
            if let Other::Ended { why, gone, .. } = other
                && gone.is_some_and(|since| since.elapsed() >= WARNING_DELAY)
            {
                *gone = None;
                if why.report_once() {
                    due.push((rank, &*why));
                }
            }
        }
        // One line for all of them.
        if let [(_, why), more @ ..] = &due[..] {
            let more: String = more.iter().map(|(rank, _)| format!("; rank {rank} has ended, too")).collect();
            say(&format!(
                "{why}{more}; a stream that waits for a signal of theirs waits for ever: if one does, end the job"
            ));
        }
    }
}

impl Drop for Placer {
    /// Nothing is copied after this; the turns at signals end later.
    fn drop(&mut self) {
        self.shared.gpus.settle();
    }
}

/// The error with which operations on this rank fail.
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

/// Ends a request for a rank that has failed.
fn fail(shared: &Shared, request: u64, why: &Error) {
    shared.tell_failure(why);
    refuse(shared, request, why);
}

/// Gives a rank up: closes its connections and ends its requests. `quietly`: without a warning.
///
/// Puts to a rank that has closed its side in order are done, and the log reports them. A failure would stop NCCL's
/// progress thread. Then an abort of this rank, which waits for its puts, would never end.
fn end(other: &mut Other, shared: &Shared, losses: &mut Losses, error: &Error, quietly: bool) {
    let Other::Alive(peer) = other else { return };
    let told = ended(peer, error);
    let has_left = peer.has_left() && error.cause() == Cause::Remote;
    // An error of the connection names the peer; one about a message that the placer does not understand names none.
    let has_gone = !has_left && peer.is_quiet() && error.cause() == Cause::Remote && error.peer().is_some();
    let rank = peer.rank();
    let (failed, lost): (Vec<_>, Vec<_>) = peer.unanswered().partition(|(_, is_get)| *is_get || !has_left);
    let answered: Vec<_> = peer.answered().collect();
    // This comes before the peer gives up its turns at signals.
    shared.gpus.settle();
    // This closes the connections: after it nothing touches a request's memory.
    *other = Other::Ended { why: told.clone(), has_left, gone: has_gone.then(Instant::now) };
    answered.into_iter().for_each(|(request, outcome)| shared.requests.end(request, outcome));
    if !lost.is_empty() && !quietly {
        losses.target_has_left(rank);
    }
    lost.into_iter().for_each(|(request, _)| shared.requests.end(request, Ok(())));
    if has_left && failed.is_empty() {
        return;
    }
    shared.tell_failure(&told);
    if has_gone {
        // No warning yet: a process that exits without destroying its communicator looks like this.
        return tracing::info!("rank {rank} has gone without a goodbye, with nothing under way: {error}");
    }
    if !quietly {
        say_once(&told);
    }
    failed.into_iter().for_each(|(request, _)| shared.requests.end(request, Err(told.clone())));
}

#[cfg(test)]
mod tests;
