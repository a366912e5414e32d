//! The connecting side: new connections, further streams, and streams that reconnect after a break.
//!
//! A [`Dial`] is one request to be connected. The control thread drives it: connect, handshake, and after a failure
//! another attempt over the next rail, until its deadline. Only the connecting side connects again after a break; a
//! receiver that has lost streams calls the connecting side ([`super::lifeline`]). The differences between the
//! purposes of a dial are in `purpose`.

mod call;
mod connect;
mod explain;
mod failure;
mod greeting;
mod join;
mod purpose;
mod resume;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub(crate) use call::call;
use failure::{FORBIDDEN_TEXT, REFUSED_TEXT, TURNED_AWAY_TEXT, UNANSWERED_TEXT, forbidden, refused, unanswered};
use greeting::Exchange;
pub(crate) use join::{join, repair};
use purpose::{Purpose, Reached, Route};
#[cfg(feature = "rdma")]
pub(crate) use resume::resume;

use super::handshake::{PREAMBLE, Secret};
use super::lifeline::{self, Answer};
use super::link::{Sock, new_socket, tune};
use super::net::Net;
use super::shortage;
use super::tries::TRY;
use crate::engine::poller::{Interest, Progress, Registration, Source};
use crate::os::error::{Cause, Error, Result};
use crate::os::interfaces::Rail;
use crate::os::log::{Limiter, NET};
use crate::os::route;

/// How often a stream's own rails are tried after [`MANY`] tries, and the time until it first tries them again.
const SELDOM: Duration = Duration::from_secs(1);
/// About half a minute.
const MANY: u32 = 100;

/// A repair ends with its connection.
const NO_DEADLINE: Duration = Duration::from_secs(1 << 31);

/// After this long without a connection the log names the obstacle, once for each attempt.
const TELL_AFTER: Duration = Duration::from_secs(5);

static WAITING: Limiter = Limiter::new();

/// The destination, and the request to send there.
pub(crate) struct Target {
    /// The addresses in the handle, at least one: where the listener's process can be reached over one rail or another.
    pub addresses: Vec<SocketAddr>,
    /// The secret in the handle.
    pub secret: Secret,
    /// This side's rails.
    pub rails: Arc<[Rail]>,
    /// The traffic class of the packets.
    pub traffic_class: Option<u8>,
}

impl Target {
    /// How many pairs of rails there are to try.
    fn pairs(&self) -> usize {
        self.rails.len().max(self.addresses.len()).max(1)
    }
}

enum Stage {
    Waiting(Instant),
    Connecting,
    Greeting { said: [u8; PREAMBLE] },
    Welcome(Box<Exchange>),
    Over,
}

/// How a dial begins.
struct Begin {
    at: Instant,
    epoch: u16,
    /// How many earlier attempts to assume in the count.
    tries: u32,
    /// When the repair begins, and not earlier: while a stream waits to move back to its own rails, a repair by another
    /// thread is possible.
    claims: bool,
}

struct State {
    stage: Stage,
    sock: Option<Sock>,
    watch: Option<Registration>,
    clock: Option<Registration>,
    input: Vec<u8>,
    /// The repair has not begun yet.
    claims: bool,
    tries: u32,
    /// Tries over the same rails beyond the first, one after the other ([`Dial::stays`]).
    stays: u32,
    /// When the try under way began, or the last one.
    began: Instant,
    try_until: Instant,
    /// Since when every try was refused, and how many tries there had been by the first refusal.
    refused_since: Option<(Instant, u32)>,
    forbidden_since: Option<Instant>,
    /// When to log that there is no connection yet.
    tell_at: Option<Instant>,
    epoch: u16,
    /// Which pair of rails the try under way goes over.
    pair: usize,
    /// Whether the try under way goes over other rails than the stream's own.
    on_other_pair: bool,
    /// This side's rail of the try under way.
    rail: Option<Rail>,
    /// The socket of the try under way is bound to its rail's interface.
    bound: bool,
    /// The last try was bound and got no answer, so the next one over the same rails is not bound.
    goes_unbound: bool,
    /// The kernel had no memory for a call, which must be repeated.
    short: bool,
    /// The try under way has taken too long.
    unanswered: bool,
    /// Why the last attempt failed: more informative than the deadline that ends the next one.
    last_failure: Option<Error>,
    result: Option<Result<()>>,
}

/// A request to be connected.
pub(crate) struct Dial {
    me: Weak<Self>,
    net: Arc<Net>,
    purpose: Box<dyn Purpose>,
    deadline: Instant,
    state: Mutex<State>,
    settled: Condvar,
}

impl Dial {
    fn start(net: Arc<Net>, purpose: impl Purpose + 'static, deadline: Instant, begin: Begin) -> Result<Arc<Self>> {
        let Begin { at: now, epoch, tries, claims } = begin;
        let tell_at = purpose.is_first().then(|| now + TELL_AFTER);
        let dial = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            net,
            purpose: Box::new(purpose),
            deadline,
            state: Mutex::new(State {
                stage: Stage::Waiting(now),
                sock: None,
                watch: None,
                clock: None,
                input: Vec::new(),
                claims,
                tries,
                stays: 0,
                began: now,
                try_until: now,
                refused_since: None,
                forbidden_since: None,
                tell_at,
                epoch,
                pair: 0,
                on_other_pair: false,
                rail: None,
                bound: false,
                goes_unbound: false,
                short: false,
                unanswered: false,
                last_failure: None,
                result: None,
            }),
            settled: Condvar::new(),
        });
        let clock = dial.net.poller.control_thread()?.register(dial.clone(), None)?;
        // Stored before the first kick: a dial that is over drops all its registrations.
        dial.lock().clock.insert(clock).kick();
        Ok(dial)
    }

    /// None while the dial goes on. Afterwards its owner has the connection, or this is the error.
    pub(crate) fn result(&self) -> Option<Result<()>> {
        self.lock().result.clone()
    }

    /// Waits until the dial has succeeded or failed; it has a deadline of its own.
    ///
    /// # Errors
    /// The error with which the dial failed.
    pub(crate) fn wait(&self) -> Result<()> {
        let mut state = self.lock();
        loop {
            if let Some(result) = &state.result {
                return result.clone();
            }
            state = self.settled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives up: the connection is no longer wanted. After this call its owner gets no connection.
    pub(crate) fn cancel(&self) {
        self.finish(&mut self.lock(), Err(Error::usage("the connection attempt was abandoned")));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, state: &mut State, result: Result<()>) {
        state.stage = Stage::Over;
        state.watch = None;
        state.sock = None;
        state.clock = None;
        self.purpose.ended(!state.claims, result.is_ok());
        state.result = Some(result);
        self.settled.notify_all();
    }

    fn begin(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        state.began = Instant::now();
        let Route { rail, binds, remote, pair } = self.purpose.route(state.tries).ok_or(io::ErrorKind::NotConnected)?;
        state.pair = pair;
        state.on_other_pair = self.purpose.is_on_other_pair(state.tries, pair);
        state.epoch = self.purpose.epoch(state.epoch);
        let patience = self.purpose.patience(state.tries);
        state.tries += 1;
        state.unanswered = false;
        state.bound = false;
        state.try_until = (state.began + patience).min(self.deadline);
        let sock = new_socket(remote)?;
        if let Some(rail) = &rail
            && rail.address.is_ipv4() == remote.is_ipv4()
        {
            state.bound = !state.goes_unbound && self.net.outlets.bind(&sock, rail, remote);
            if binds || state.bound {
                route::take_port_at_connect(&sock);
                // connect(2) chooses the port, so only the address can be missing.
                sock.bind(&rail.address.into()).map_err(|error| match error.kind() {
                    io::ErrorKind::AddrNotAvailable => {
                        io::Error::new(error.kind(), format!("{} has lost its address", rail.name))
                    }
                    _ => error,
                })?;
            }
        }
        if state.bound {
            // Many round trips in a data centre, and short compared with NCCL's timeouts.
            state.try_until = state.try_until.min(state.began + TRY / 4);
        }
        state.rail = rail;
        tune(&sock, &self.net.config, self.purpose.traffic_class(), true);
        let learnt = self.purpose.segment(pair);
        if let Some(segment) = learnt.or_else(|| self.net.segment(remote.ip())) {
            // Set before connecting: then the peer sends no larger segments either.
            let _ = sock.set_tcp_mss(segment);
        }
        match sock.connect(&remote.into()) {
            Ok(()) => {}
            // An interrupted connect also goes on.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => {}
            Err(error) => return Err(error),
        }
        let fd = sock.as_raw_fd();
        let control_thread =
            self.net.poller.control_thread().map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let watch = control_thread.register(self.clone(), Some((fd, Interest::Data)));
        state.watch = Some(watch.map_err(|error| io::Error::other(error.to_string()))?);
        state.sock = Some(sock);
        state.stage = Stage::Connecting;
        Ok(())
    }

    /// An attempt failed: schedules another one, or ends the dial.
    fn failed(&self, state: &mut State, error: Error) -> Progress {
        let now = Instant::now();
        let answer = answer_of(state, &error);
        let is_refused = error.what().starts_with(REFUSED_TEXT);
        let is_connecting = matches!(state.stage, Stage::Connecting | Stage::Waiting(_));
        if std::mem::take(&mut state.bound) && is_connecting && !is_refused && now < self.deadline {
            // The same rails again, with the kernel's own choice of interface.
            state.goes_unbound = true;
            state.tries -= 1;
            return self.pause(state, now);
        }
        state.goes_unbound = false;
        self.purpose.answered(state.began, state.pair, answer);
        if let Some(pause) = self.purpose.goes_on_after() {
            return self.pause(state, now + pause);
        }
        state.watch = None;
        state.sock = None;
        state.input.clear();
        let turned_away = self.purpose.is_repair() && error.what().starts_with(TURNED_AWAY_TEXT);
        if turned_away || error.what().starts_with(REFUSED_TEXT) {
            state.refused_since.get_or_insert((now, state.tries));
        } else {
            state.refused_since = None;
        }
        if error.what().starts_with(FORBIDDEN_TEXT) {
            state.forbidden_since.get_or_insert(now);
        } else {
            state.forbidden_since = None;
        }
        let mut hopeless = error.cause() == Cause::Usage;
        if self.purpose.is_connected() {
            // The peer is alive: the refusals come from the path.
            state.refused_since = None;
            hopeless = false;
        }
        let is_first = self.purpose.is_first();
        // A peer that refuses on every rail for a second has died: its listening sockets outlive every connection.
        // Before the first connection nothing waits for this result, and the refusals may come from a path that is
        // being repaired.
        let second = Duration::from_secs(1);
        let patience = if is_first { self.net.config.reconnect_timeout.max(second) } else { second };
        let everywhere = |tries: u32| state.tries.saturating_sub(tries) as usize + 1 >= self.purpose.pairs();
        let dead = state.refused_since.is_some_and(|(since, tries)| now - since > patience && everywhere(tries));
        // A local rule that lets no packet out to the peer does not change by itself, but a rule that is being replaced
        // gets two seconds. Later it may be a deliberate outage, and the connection knows how long to wait.
        let too_long = |since: Instant| now - since > Duration::from_secs(2);
        hopeless |= is_first && state.forbidden_since.is_some_and(too_long);
        if now >= self.deadline || dead || hopeless {
            let error = self.purpose.explain(error, &self.net.config);
            self.purpose.gave_up(&self.net, state.epoch, &error);
            self.finish(state, Err(error));
            return Progress { moved: true, again: None };
        }
        self.tell_of_waiting(state, now, &error);
        if is_first && !(state.tries as usize).is_multiple_of(self.purpose.pairs()) {
            // The next attempt uses another rail at once.
            state.last_failure = Some(error);
            return self.pause(state, now);
        }
        if state.tries > MANY && self.purpose.may_stay() {
            // These two rails may have no network in common, but the connection has others.
            self.finish(state, Err(error));
            self.purpose.put_off(&self.net);
            return Progress::default();
        }
        state.last_failure = Some(error);
        state.epoch = self.purpose.epoch_after_failure(state.epoch);
        let pause = if state.tries < MANY { Duration::from_millis(10 << state.tries.min(5)) } else { SELDOM };
        // A refusal arrives at once, and it must be known soon whether the peer keeps refusing.
        let missed = self.purpose.is_repair() && state.refused_since.is_some();
        let pause = if missed { pause.min(lifeline::CALL_AFTER) } else { pause };
        let pause = if self.stays(state, answer) { lifeline::CALL_AFTER } else { pause };
        self.pause(state, now + pause)
    }

    /// Whether the next attempt uses the same rails: where refusals may be enough to give the peer up, they must not
    /// wait for rails on which nothing answers.
    fn stays(&self, state: &mut State, answer: Answer) -> bool {
        if !self.purpose.is_repair() {
            return false;
        }
        let more = answer == Answer::Refused && state.stays + 1 < lifeline::REFUSALS;
        let stays = more && self.purpose.awaits_refusals();
        // The failed attempt does not count.
        (state.stays, state.tries) = if stays { (state.stays + 1, state.tries - 1) } else { (0, state.tries) };
        stays
    }

    /// The next try begins at `until`.
    fn pause(&self, state: &mut State, until: Instant) -> Progress {
        state.watch = None;
        state.sock = None;
        state.input.clear();
        state.stage = Stage::Waiting(until);
        // The socket's registration is gone, and with it any wake-up that this poll requests through it; the deadline's
        // still works.
        if let Some(clock) = &state.clock {
            clock.kick();
        }
        Progress { moved: false, again: Some(until) }
    }

    /// Logs the obstacle while NCCL waits for a first connection: otherwise the log would show nothing until the dial
    /// ends.
    fn tell_of_waiting(&self, state: &mut State, now: Instant, error: &Error) {
        if state.tell_at.is_none_or(|at| now < at) {
            return;
        }
        state.tell_at = None;
        let (so_far, all) = (TELL_AFTER.as_secs(), self.net.config.connect_timeout.as_secs());
        let error = self.purpose.explain(error.clone(), &self.net.config);
        WAITING.tell(|more| {
            tracing::warn!(target: NET, "not connected after {so_far} s: {error}; it is tried until {all} s are over (TOWLINE_CONNECT_TIMEOUT){more}");
        });
    }

    fn drive(self: &Arc<Self>) -> Progress {
        let mut state = self.lock();
        let now = Instant::now();
        if self.purpose.is_over() {
            self.finish(&mut state, Err(Error::usage("the connection is closed")));
            return Progress::default();
        }
        if let Stage::Waiting(until) = state.stage {
            if now < until {
                return Progress { moved: false, again: Some(until) };
            }
            state.claims = state.claims && !self.purpose.claim();
            if state.claims {
                self.finish(&mut state, Err(Error::usage("the connection is closed")));
                return Progress::default();
            }
            if let Err(error) = self.begin(&mut state) {
                let error = forbidden(&error).unwrap_or_else(|| refused(&error));
                return self.failed(&mut state, error);
            }
        }
        match self.advance(&mut state) {
            Ok(Some(Reached::Called)) => {
                self.purpose.answered(state.began, state.pair, Answer::Accepted);
                // After a call that was received the sender connects at once. If it does not, it is called again.
                self.pause(&mut state, now + 5 * lifeline::CALL_AFTER)
            }
            Ok(Some(reached)) => {
                self.finish(&mut state, Ok(()));
                if let Reached::Stream { conn, index, settles } = reached {
                    let (on_other_pair, offset) = (state.on_other_pair, state.tries as usize - 1);
                    drop(state);
                    join::settle(
                        Arc::clone(&self.net),
                        &conn,
                        index,
                        on_other_pair,
                        (settles && on_other_pair).then_some(offset),
                    );
                }
                Progress { moved: true, again: None }
            }
            Ok(None) if matches!(state.stage, Stage::Over) => Progress::default(),
            Ok(None) if now >= state.try_until => {
                state.unanswered = true;
                let cut_off = state.last_failure.take().filter(|_| now >= self.deadline);
                let is_mute = matches!(state.stage, Stage::Greeting { .. });
                let mute = is_mute.then(|| explain::not_towline(UNANSWERED_TEXT));
                let error = cut_off.or(mute).unwrap_or_else(|| unanswered(now - state.began));
                self.failed(&mut state, error)
            }
            Ok(None) => {
                let short = std::mem::take(&mut state.short);
                let soon = short.then(|| now + shortage::PAUSE);
                Progress { moved: false, again: Some(soon.unwrap_or(state.try_until)) }
            }
            Err(error) => self.failed(&mut state, error),
        }
    }
}

/// The dial as the control thread polls it.
impl Source for Dial {
    fn poll(&self) -> Progress {
        // The source needs a reference to itself to register the next socket; the thread that polls it holds one.
        self.me.upgrade().map_or_else(Progress::default, |me| me.drive())
    }

    fn fail(&self, error: Error) {
        let mut state = self.lock();
        self.finish(&mut state, Err(error));
    }
}

/// The evidence that a failed attempt gives about the peer's process.
fn answer_of(state: &State, error: &Error) -> Answer {
    match state.stage {
        Stage::Greeting { .. } | Stage::Welcome(_) if state.unanswered => Answer::Accepted,
        Stage::Greeting { .. } | Stage::Welcome(_) | Stage::Over => Answer::Refused,
        // For an address of this host, connect(2) itself returns the error.
        Stage::Connecting | Stage::Waiting(_) if error.what().starts_with(REFUSED_TEXT) => Answer::Refused,
        Stage::Connecting | Stage::Waiting(_) => Answer::Silent,
    }
}
