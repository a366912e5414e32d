//! The connecting side: new connections, further streams, and streams that come back after a break.
//!
//! A [`Dial`] is one wish to be connected. The keeper drives it: connect, handshake, and on failure another try,
//! over the next rail, until its deadline. The connecting side alone connects again after a break; a receiver that has
//! lost all streams calls it ([`super::lifeline`]).

mod explain;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::handshake::{
    CLOSED, FEATURE_BARE, FEATURE_RECOVERY, GREETING, Hello, PREAMBLE, Preamble, Refusal, Secret, Transcript,
    VERSION_MAX, VERSION_MIN, WELCOME, Welcome, Wish, nonce,
};
use super::lifeline::{self, Answer};
use super::link::{Link, Sock, new_socket, tune};
use super::net::Net;
use super::outlet::BOUND_TRY;
use super::peer::Peer;
use super::seal::agreement::{ANSWER, Offered};
use super::seal::{Seal, is_encrypted, other_key};
use super::shortage;
use super::takeover::{Caller, Handed, Kept, Takeover};
use super::tries::{self, ROUND_TRIP_MAX, TRY};
use super::watch;
use super::wire::{self, Piece, send_all};
use crate::engine::poller::{Interest, Progress, Registration, Source};
use crate::os::error::{Cause, Error, Result, advice};
use crate::os::interfaces::Rail;
use crate::os::log::{Limiter, NET};
use crate::os::route;
use crate::tcp::sender::SendConn;

/// How often a stream's own rails are tried after [`MANY`] tries.
const SELDOM: Duration = Duration::from_secs(1);
/// About half a minute.
const MANY: u32 = 100;

/// When a stream that had to go over other rails begins to try its own.
const HOMECOMING: Duration = Duration::from_secs(1);

/// The same for one that was never there.
const RARELY: Duration = Duration::from_secs(30);

/// A repair ends with its connection.
const NO_DEADLINE: Duration = Duration::from_secs(1 << 31);

/// A peer that refuses on every rail for this long has died: its listeners outlive every connection. Before there is a
/// connection nobody waits for that news, and what refuses may be a path that is being mended: there it is
/// `TOWLINE_RECONNECT_TIMEOUT`.
const REFUSED: Duration = Duration::from_secs(1);

/// This host's own word that it lets no packet out to there does not change by itself; a rule that is just being replaced
/// has this long.
const FORBIDDEN: Duration = Duration::from_secs(2);

/// After this long without a connection the log says what is in the way, once for each attempt.
const TELL_AFTER: Duration = Duration::from_secs(5);

static WAITING: Limiter = Limiter::new();

/// Where to go and what to say there.
pub struct Target {
    /// The addresses in the handle, at least one: where the listener's process can be reached over one rail or another.
    pub addresses: Vec<SocketAddr>,
    /// What the handle carries.
    pub secret: Secret,
    /// This side's rails.
    pub rails: Arc<[Rail]>,
    /// The packets' class of traffic.
    pub traffic_class: Option<u8>,
    /// Who takes the connection over, if it is not to be TCP's.
    pub takeover: Option<Arc<dyn Takeover>>,
}

impl Target {
    /// How many pairs of rails there are to try.
    fn pairs(&self) -> usize {
        self.rails.len().max(self.addresses.len()).max(1)
    }
}

enum Purpose {
    Connect(Target),
    /// A further stream, or one that shall be back. `repair`: until it is, or the connection ends.
    Join {
        conn: Weak<SendConn>,
        index: usize,
        repair: bool,
    },
    /// To tell the sending side that all streams have ended here, and to learn whether it lives: over one of its rails,
    /// again and again, until a stream is back or it is given up. `since`: the time when the last stream ended.
    Call {
        conn: Weak<dyn Caller>,
        way: usize,
        since: Instant,
    },
    /// To get another socket for a connection of another backend, whose own has fallen silent.
    Return {
        conn: Weak<dyn Kept>,
    },
}

enum Stage {
    Waiting(Instant),
    Connecting,
    Greeting { said: [u8; PREAMBLE] },
    Welcome(Box<Said>),
    Over,
}

/// How a dial begins.
struct Begin {
    at: Instant,
    epoch: u16,
    /// As if there had been so many.
    tries: u32,
    /// The repair is to be begun then, and not before: who comes home later does not keep others from one.
    claims: bool,
}

/// Where a try goes.
struct Route {
    /// This side's rail of that way.
    rail: Option<Rail>,
    /// Whether the socket is bound to the rail's address: where there is a choice.
    binds: bool,
    remote: SocketAddr,
    /// Which of the pairs of rails that is.
    way: usize,
}

/// What was said so far.
struct Said {
    transcript: Transcript,
    secret: Secret,
    features: u32,
    offered: Option<Offered>,
    /// Where a further stream will be watched. Taken before the peer is asked to let it in.
    place: Option<Registration>,
}

impl Said {
    /// Bytes that the listening side says next.
    fn awaited(&self) -> usize {
        WELCOME + if self.offered.is_some() { ANSWER } else { 0 }
    }

    /// Whether the other side said that its key is another one.
    fn is_refused(&self, input: &[u8]) -> bool {
        self.offered.is_some() && Refusal::verify(input, &self.secret, &self.transcript)
    }
}

struct State {
    stage: Stage,
    sock: Option<Sock>,
    watch: Option<Registration>,
    clock: Option<Registration>,
    input: Vec<u8>,
    /// The repair is still to be begun.
    claims: bool,
    tries: u32,
    /// Tries over the same rails beyond the first, one after the other ([`Dial::stays`]).
    stays: u32,
    /// When the try under way began, or the last one.
    began: Instant,
    try_until: Instant,
    /// Since when each try was refused, and how many there had been by the first of them.
    refused_since: Option<(Instant, u32)>,
    forbidden_since: Option<Instant>,
    /// When the log says that there is no connection yet.
    tell_at: Option<Instant>,
    epoch: u16,
    /// Which pair of rails the try under way goes over.
    way: usize,
    /// Whether the try under way goes over other rails than the stream's own.
    abroad: bool,
    /// This side's rail of the try under way.
    rail: Option<Rail>,
    /// The socket of the try under way is bound to its rail's interface.
    bound: bool,
    /// The last try was bound and reached nobody, so the next one over the same rails is not.
    goes_unbound: bool,
    /// The kernel had no memory for a call, and is to be asked again.
    short: bool,
    /// The try under way has taken too long.
    unanswered: bool,
    /// Why the last try failed: more telling than that the deadline cut off the next one.
    last_failure: Option<Error>,
    result: Option<Result<Dialled>>,
}

/// What a dial leads to.
#[derive(Clone)]
pub enum Dialled {
    /// A connection over TCP streams.
    Streams(Arc<SendConn>),
    /// The target's [`Takeover`] has the socket.
    TakenOver,
}

/// How a handshake ended well.
enum Reached {
    Connected(Dialled),
    /// The sending side of a connection has heard the call.
    Called,
}

/// A wish to be connected.
pub struct Dial {
    me: Weak<Self>,
    net: Arc<Net>,
    purpose: Purpose,
    deadline: Instant,
    state: Mutex<State>,
    settled: Condvar,
}

impl Dial {
    /// Starts connecting to a listener.
    ///
    /// # Errors
    /// When the keeper cannot be started.
    pub fn connect(net: Arc<Net>, target: Target) -> Result<Arc<Self>> {
        let deadline = Instant::now() + net.config.connect_timeout;
        Self::start(net, Purpose::Connect(target), deadline, 0)
    }

    /// Starts connecting a further stream of a connection, in its first epoch.
    pub fn join(net: Arc<Net>, conn: &Arc<SendConn>, index: usize) {
        let deadline = Instant::now() + net.config.reconnect_timeout;
        let purpose = Purpose::Join { conn: Arc::downgrade(conn), index, repair: false };
        if let Err(error) = Self::start(net, purpose, deadline, 1) {
            conn.goes_without(index, &error);
        }
    }

    /// Further stream `index` did not come in time. That never ends the connection: where all of its streams are away at this
    /// moment, their repairs decide. The stream is asked for again, soon after an outage of all, and seldom while only this
    /// one fails.
    fn join_later(net: Arc<Net>, conn: &Arc<SendConn>, index: usize, epoch: u16, error: &Error) {
        conn.goes_without(index, error);
        if !conn.mends() || conn.is_over() {
            return;
        }
        let at = Instant::now() + if conn.is_connected() { RARELY } else { HOMECOMING };
        let deadline = at + net.config.reconnect_timeout;
        let purpose = Purpose::Join { conn: Arc::downgrade(conn), index, repair: false };
        if let Err(error) = Self::start_at(net, purpose, deadline, Begin { at, epoch, tries: 0, claims: false }) {
            tracing::debug!(target: NET, "a stream is not asked for again: {error}");
        }
    }

    /// Has stream `index` connected again, over its own rails while other streams carry the load. It goes on until the
    /// stream is back or the connection is over. Nothing when that is under way already.
    pub fn repair(net: Arc<Net>, conn: &Arc<SendConn>, index: usize) {
        if !conn.begin_repair(index) {
            return;
        }
        let now = Instant::now();
        let at = now + conn.pause(index);
        let purpose = Purpose::Join { conn: Arc::downgrade(conn), index, repair: true };
        if let Err(error) =
            Self::start_at(net, purpose, now + NO_DEADLINE, Begin { at, epoch: 0, tries: 0, claims: false })
        {
            conn.end_repair(index);
            conn.gave_up(index, &error);
        }
    }

    /// Has stream `index`, which lives over other rails, come back to its own, in a while. Should it break before, it is
    /// repaired as any other, and this is nothing.
    fn come_home(net: Arc<Net>, conn: &Arc<SendConn>, index: usize, after: Duration, tries: u32) {
        let at = Instant::now() + after;
        let purpose = Purpose::Join { conn: Arc::downgrade(conn), index, repair: true };
        if let Err(error) = Self::start_at(net, purpose, at + NO_DEADLINE, Begin { at, epoch: 0, tries, claims: true })
        {
            tracing::debug!(target: NET, "a stream stays where it is: {error}");
        }
    }

    /// Calls the sending side over one of its rails.
    pub fn call(net: Arc<Net>, conn: &Arc<dyn Caller>, way: usize, since: Instant) {
        let start = since + lifeline::CALL_AFTER;
        let purpose = Purpose::Call { conn: Arc::downgrade(conn), way, since };
        let begin = Begin { at: start, epoch: 0, tries: 0, claims: false };
        if let Err(error) = Self::start_at(net, purpose, start + NO_DEADLINE, begin) {
            // Nothing is known then, as if nobody had answered.
            tracing::debug!(target: NET, "the peer cannot be called: {error}");
        }
    }

    /// Gets another socket for a connection of another backend, over one pair of rails after the other, until there is one,
    /// the connection is over, or every rail has refused for a while ([`Kept::gave_up`]).
    ///
    /// # Errors
    /// When the keeper cannot be started.
    pub fn bring_back(net: Arc<Net>, conn: &Arc<dyn Kept>) -> Result<()> {
        let purpose = Purpose::Return { conn: Arc::downgrade(conn) };
        Self::start(net, purpose, Instant::now() + NO_DEADLINE, 0).map(|_| ())
    }

    fn start(net: Arc<Net>, purpose: Purpose, deadline: Instant, epoch: u16) -> Result<Arc<Self>> {
        Self::start_at(net, purpose, deadline, Begin { at: Instant::now(), epoch, tries: 0, claims: false })
    }

    fn start_at(net: Arc<Net>, purpose: Purpose, deadline: Instant, begin: Begin) -> Result<Arc<Self>> {
        let Begin { at: now, epoch, tries, claims } = begin;
        let tell_at = matches!(purpose, Purpose::Connect(_)).then(|| now + TELL_AFTER);
        let dial = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            net,
            purpose,
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
                way: 0,
                abroad: false,
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
        let clock = dial.net.poller.keeper()?.register(dial.clone(), None)?;
        // Kept before the first kick: a dial that is over drops its registrations, all of them.
        dial.lock().clock.insert(clock).kick();
        Ok(dial)
    }

    /// The connection, when it is there; the failure, when it will not be.
    pub fn result(&self) -> Option<Result<Dialled>> {
        self.lock().result.clone()
    }

    /// Waits until the dial has succeeded or failed; it has a deadline of its own.
    ///
    /// # Errors
    /// As the dial failed.
    pub fn wait(&self) -> Result<Dialled> {
        let mut state = self.lock();
        loop {
            if let Some(result) = &state.result {
                return result.clone();
            }
            state =
                self.settled.wait_timeout(state, Duration::from_millis(500)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives up: whoever wanted the connection has gone.
    pub fn cancel(&self) {
        let mut state = self.lock();
        let unused = state.result.take();
        self.finish(&mut state, Err(Error::usage("the connection attempt was abandoned")));
        drop(state);
        if let Some(Ok(Dialled::Streams(conn))) = unused {
            conn.close();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, state: &mut State, result: Result<Dialled>) {
        state.stage = Stage::Over;
        state.watch = None;
        state.sock = None;
        state.clock = None;
        if let Purpose::Join { conn, index, repair: true } = &self.purpose
            && !state.claims
            && let Some(conn) = conn.upgrade()
        {
            conn.end_repair(*index);
            if result.is_ok() {
                conn.check_repair(*index);
            }
        }
        state.result = Some(result);
        self.settled.notify_all();
    }

    /// Source and destination of the given try. Each try takes the next pair of rails; a stream starts with its
    /// own, so that the streams of a connection spread over all of them, and comes back to its own while others live.
    fn route(&self, attempt: u32) -> Option<Route> {
        match &self.purpose {
            Purpose::Connect(target) => between(&target.rails, &target.addresses, 0, attempt),
            Purpose::Join { conn, index, repair } => {
                let conn = conn.upgrade()?;
                let link = conn.link();
                let at = match (*repair, conn.awaits_home(*index)) {
                    // It lives elsewhere, and shall come back to its own rails.
                    (true, _) if conn.lives(*index) => *index,
                    (true, true) => index + conn.home(*index),
                    _ => index + conn.home(*index) + attempt as usize,
                };
                // A pair that connects and delivers nothing is left out.
                let at = (at..at + conn.pairs()).find(|at| !conn.is_left_out(at % conn.pairs())).unwrap_or(at);
                let remote = *link.remote.get(at % link.remote.len().max(1))?;
                let local = link.local.get(at % link.local.len().max(1));
                let (rail, binds) = (local.cloned(), link.local.len() > 1);
                Some(Route { rail, binds, remote: localise(remote, local), way: at % conn.pairs() })
            }
            Purpose::Return { conn } => {
                let conn = conn.upgrade()?;
                // Not over the pair that is silent, as far as it is the first.
                between(&conn.link().local, &conn.link().remote, 1, attempt)
            }
            Purpose::Call { conn, way, .. } => {
                let conn = conn.upgrade()?;
                let link = conn.link();
                let local = link.local.get(way % link.local.len().max(1));
                let (rail, binds) = (local.cloned(), link.local.len() > 1);
                Some(Route { rail, binds, remote: localise(*link.remote.get(*way)?, local), way: *way })
            }
        }
    }

    /// How many pairs of rails its tries go over in turn.
    fn pairs(&self) -> usize {
        match &self.purpose {
            Purpose::Connect(target) => target.pairs(),
            Purpose::Join { conn, .. } => conn.upgrade().map_or(1, |conn| conn.pairs()),
            Purpose::Return { conn } => conn.upgrade().map_or(1, |conn| conn.link().pairs()),
            Purpose::Call { .. } => 1,
        }
    }

    fn begin(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        state.began = Instant::now();
        let Route { rail, binds, remote, way } = self.route(state.tries).ok_or(io::ErrorKind::NotConnected)?;
        state.way = way;
        state.abroad = match &self.purpose {
            Purpose::Join { conn, index, .. } => conn.upgrade().is_some_and(|conn| way != index % conn.pairs()),
            Purpose::Connect(target) => {
                !(state.tries as usize).is_multiple_of(target.pairs() * target.rails.len().max(1))
            }
            Purpose::Return { .. } | Purpose::Call { .. } => false,
        };
        // A new life for every try: the peer may have taken the last one for good before its welcome was lost.
        match &self.purpose {
            Purpose::Join { conn, index, repair: true } => {
                state.epoch = conn.upgrade().map_or(state.epoch, |conn| conn.next_epoch(*index));
            }
            Purpose::Return { conn } => state.epoch = conn.upgrade().map_or(state.epoch, |conn| conn.next_epoch()),
            _ => {}
        }
        state.tries += 1;
        state.unanswered = false;
        state.bound = false;
        let patience = match &self.purpose {
            Purpose::Connect(target) => tries::first(state.tries - 1, target.pairs()),
            Purpose::Join { conn, repair, .. } => conn.upgrade().map_or(TRY, |conn| {
                // With nothing connected, or when that may be so, the peer is missing us already.
                let hurry = conn.pairs() > 1 && (!repair || conn.is_in_a_hurry());
                let before = if *repair { state.tries } else { state.tries - 1 };
                tries::again(before, conn.pairs(), hurry, conn.link().round_trip)
            }),
            Purpose::Return { conn } => conn.upgrade().map_or(TRY, |conn| {
                tries::again(state.tries - 1, conn.link().pairs(), conn.link().pairs() > 1, conn.link().round_trip)
            }),
            Purpose::Call { conn, .. } => {
                conn.upgrade().map_or(TRY, |conn| tries::again(state.tries - 1, 1, true, conn.link().round_trip))
            }
        };
        state.try_until = (state.began + patience).min(self.deadline);
        let sock = new_socket(remote)?;
        if let Some(rail) = &rail
            && rail.address.is_ipv4() == remote.is_ipv4()
        {
            state.bound = !state.goes_unbound && self.net.outlets.bind(&sock, rail, remote);
            if binds || state.bound {
                route::take_port_at_connect(&sock);
                sock.bind(&rail.address.into())?;
            }
        }
        if state.bound {
            state.try_until = state.try_until.min(state.began + BOUND_TRY);
        }
        state.rail = rail;
        let class = match &self.purpose {
            Purpose::Connect(target) => target.traffic_class,
            Purpose::Join { conn, .. } => conn.upgrade().and_then(|conn| conn.link().traffic_class),
            Purpose::Return { conn } => conn.upgrade().and_then(|conn| conn.link().traffic_class),
            Purpose::Call { conn, .. } => conn.upgrade().and_then(|conn| conn.link().traffic_class),
        };
        tune(&sock, &self.net.config, class, true);
        let learnt = match &self.purpose {
            Purpose::Join { conn, .. } => conn.upgrade().and_then(|conn| conn.segment(way)),
            Purpose::Connect(_) | Purpose::Return { .. } | Purpose::Call { .. } => None,
        };
        if let Some(segment) = learnt.or_else(|| self.net.segment(remote.ip())) {
            // Before the connection is made: then the peer sends no larger ones either.
            let _ = sock.set_tcp_mss(segment);
        }
        match sock.connect(&remote.into()) {
            Ok(()) => {}
            // Also an interrupted connect goes on.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => {}
            Err(error) => return Err(error),
        }
        let fd = sock.as_raw_fd();
        let keeper = self.net.poller.keeper().map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let watch = keeper.register(self.clone(), Some((fd, Interest::Data)));
        state.watch = Some(watch.map_err(|error| io::Error::other(error.to_string()))?);
        state.sock = Some(sock);
        state.stage = Stage::Connecting;
        Ok(())
    }

    /// Moves the handshake on. `Ok(None)`: it waits for the network.
    fn advance(&self, state: &mut State) -> Result<Option<Reached>> {
        loop {
            let Some(sock) = &state.sock else { return Ok(None) };
            match &state.stage {
                Stage::Waiting(_) | Stage::Over => return Ok(None),
                Stage::Connecting => {
                    if let Some(error) = sock.take_error().unwrap_or(None) {
                        return Err(refused(&error));
                    }
                    if let Err(error) = sock.peer_addr() {
                        state.short = wire::is_shortage(&error);
                        return Ok(None);
                    }
                    self.learn(state, Answer::Accepted);
                    // The way is good: what it waits for now is the peer's process, which may be busy.
                    let hold = if let Purpose::Call { .. } = &self.purpose { lifeline::HOLD } else { TRY };
                    let elapsed = state.began.elapsed();
                    let round_trip = Some(watch::round_trip(sock)).filter(|it| !it.is_zero()).unwrap_or(elapsed);
                    state.try_until = (Instant::now() + tries::handshake(hold, round_trip)).min(self.deadline);
                    let bare = if self.takeover().is_some() { FEATURE_BARE } else { 0 };
                    let features = self.net.features() | bare;
                    let said = Preamble { low: VERSION_MIN, high: VERSION_MAX, features }.encode();
                    send_all(sock, &said)?;
                    state.stage = Stage::Greeting { said };
                }
                Stage::Greeting { said } => {
                    let filled = fill(sock, &mut state.input, GREETING, &mut state.short);
                    if filled.is_err() && state.input.is_empty() {
                        return Err(explain::not_towline(TURNED_AWAY_TEXT));
                    }
                    if !filled? {
                        return Ok(None);
                    }
                    let theirs = Preamble::decode(&state.input)?;
                    if theirs.low == 0 {
                        return Err(Error::usage(format!(
                            "the peer speaks protocol versions up to {}, this library {VERSION_MIN} to {VERSION_MAX}",
                            theirs.high
                        ))
                        .with_hint("use the same Towline release on all hosts"));
                    }
                    let mut transcript = Transcript::new();
                    transcript.add(said);
                    transcript.add(&state.input);
                    state.input.clear();
                    let (wish, secret) = self.wish(state.epoch, state.tries)?;
                    let rails = match &self.purpose {
                        Purpose::Connect(target) if theirs.features & FEATURE_RECOVERY != 0 => {
                            self.net.acceptor.addresses(&target.rails)
                        }
                        _ => Vec::new(),
                    };
                    let hello = Hello { wish, nonce: nonce()?, label: self.net.label.clone(), rails };
                    let mut bytes = hello.seal(&secret, &mut transcript).to_vec();
                    let encrypted = is_encrypted(theirs.features, self.net.features());
                    let mut offered = None;
                    if let (Ok(true), Some(key)) = (&encrypted, &self.net.key) {
                        let (started, offer) = Offered::new(key, transcript.bytes())?;
                        bytes.extend_from_slice(&offer);
                        transcript.add(&offer);
                        offered = Some(started);
                    }
                    let place = match &self.purpose {
                        // The first one's is here at the keeper, which watches the handshake still.
                        Purpose::Join { conn, index, .. } if *index > 0 => {
                            conn.upgrade().map(|conn| conn.place(*index, sock)).transpose()?
                        }
                        _ => None,
                    };
                    // Also when only one side has a key: the other shall know who could not be let in.
                    send_all(sock, &bytes)?;
                    encrypted?;
                    state.stage = Stage::Welcome(Box::new(Said {
                        transcript,
                        secret,
                        features: theirs.features,
                        offered,
                        place,
                    }));
                }
                Stage::Welcome(said) => {
                    let filled = fill(sock, &mut state.input, said.awaited(), &mut state.short);
                    if filled.is_err() && said.is_refused(&state.input) {
                        return Err(other_key());
                    }
                    if !filled? {
                        return Ok(None);
                    }
                    let Stage::Welcome(said) = std::mem::replace(&mut state.stage, Stage::Over) else {
                        unreachable!("matched above")
                    };
                    state.watch = None;
                    let sock = state.sock.take().expect("the handshake has its socket");
                    let peer = sock.peer_addr().ok().and_then(|address| address.as_socket());
                    // Over other rails than the stream's own it is a makeshift.
                    if let (Some(rail), Some(peer), false) = (&state.rail, peer, state.abroad) {
                        self.net.outlets.connected(&sock, rail, peer, state.goes_unbound);
                    }
                    return self.connected(sock, &state.input, *said, state.epoch).map(Some);
                }
            }
        }
    }

    fn takeover(&self) -> Option<&Arc<dyn Takeover>> {
        match &self.purpose {
            Purpose::Connect(target) => target.takeover.as_ref(),
            Purpose::Join { .. } | Purpose::Return { .. } | Purpose::Call { .. } => None,
        }
    }

    /// Passes on what this try says about a peer that is missed.
    fn learn(&self, state: &State, answer: Answer) {
        match &self.purpose {
            Purpose::Join { conn, repair: true, .. } => {
                conn.upgrade().inspect(|conn| conn.answered(state.began, state.way, answer));
            }
            Purpose::Call { conn, .. } => {
                conn.upgrade().inspect(|conn| conn.answered(state.began, state.way, answer));
            }
            Purpose::Return { conn } => {
                conn.upgrade().inspect(|conn| conn.answered(state.began, state.way, answer));
            }
            Purpose::Connect(_) | Purpose::Join { .. } => {}
        }
    }

    fn wish(&self, epoch: u16, tries: u32) -> Result<(Wish, Secret)> {
        match &self.purpose {
            Purpose::Connect(target) => {
                Ok((Wish::Connect { listener: target.secret.listener_id() }, target.secret.clone()))
            }
            Purpose::Join { conn, index, .. } => {
                let conn = conn.upgrade().ok_or_else(|| Error::usage("the connection is closed"))?;
                let link = conn.link();
                let wish = Wish::Join { connection: link.connection, stream: *index as u16, epoch };
                Ok((wish, link.key.clone()))
            }
            Purpose::Return { conn } => {
                let conn = conn.upgrade().ok_or_else(|| Error::usage("the connection is closed"))?;
                let link = conn.link();
                Ok((Wish::Join { connection: link.connection, stream: 0, epoch }, link.key.clone()))
            }
            Purpose::Call { conn, .. } => {
                let conn = conn.upgrade().ok_or_else(|| Error::usage("the connection is closed"))?;
                let link = conn.link();
                let (stream, epoch) = conn.lost_life(tries as usize);
                Ok((Wish::Call { connection: link.connection, stream, epoch }, link.key.clone()))
            }
        }
    }

    fn connected(&self, sock: Sock, bytes: &[u8], said: Said, epoch: u16) -> Result<Reached> {
        let Said { mut transcript, secret, features, offered, place } = said;
        let mut welcome = [0; WELCOME];
        let keys = match offered {
            None => {
                welcome.copy_from_slice(bytes);
                None
            }
            Some(offered) => Some(offered.take_answer(bytes, &mut welcome).ok_or_else(|| {
                Error::remote("the listening side could not prove that it has the key (TOWLINE_KEY_FILE)")
                    .with_hint("another program may have taken over the address of the peer")
            })?),
        };
        match &self.purpose {
            Purpose::Connect(target) => {
                let key = secret.connection_key(transcript.bytes());
                let welcome = Welcome::open(&welcome, &secret, &mut transcript)?;
                let seal = Seal::of(features, keys)?;
                let link = Link {
                    connection: welcome.connection,
                    key,
                    features,
                    remote: welcome.rails,
                    local: Arc::clone(&target.rails),
                    traffic_class: target.traffic_class,
                    round_trip: watch::round_trip(&sock),
                };
                let address = sock.peer_addr().ok().and_then(|address| address.as_socket());
                let peer = Peer { label: welcome.label, address: address.unwrap_or(target.addresses[0]) };
                tracing::debug!(target: NET, "connected to {peer}");
                if let Some(takeover) = &target.takeover {
                    takeover.take_over(Handed { link, peer, sock });
                    return Ok(Reached::Connected(Dialled::TakenOver));
                }
                let conn = SendConn::new(Arc::clone(&self.net), link, peer, sock, seal)?;
                conn.begin()?;
                Ok(Reached::Connected(Dialled::Streams(conn)))
            }
            Purpose::Join { conn, index, .. } => {
                let conn = conn.upgrade().ok_or_else(|| Error::usage("the connection is closed"))?;
                let welcome = Welcome::open(&welcome, &secret, &mut transcript)?;
                if welcome.received & CLOSED != 0 {
                    conn.peer_has_closed(welcome.received & !CLOSED);
                    return Ok(Reached::Connected(Dialled::Streams(conn)));
                }
                let seal = Seal::of(conn.link().features, keys)?;
                conn.rejoined(*index, epoch, welcome.received, place, sock, seal)?;
                Ok(Reached::Connected(Dialled::Streams(conn)))
            }
            Purpose::Return { conn } => {
                let conn = conn.upgrade().ok_or_else(|| Error::usage("the connection is closed"))?;
                Welcome::open(&welcome, &secret, &mut transcript)?;
                conn.returned(epoch, sock)?;
                Ok(Reached::Connected(Dialled::TakenOver))
            }
            Purpose::Call { .. } => {
                Welcome::open(&welcome, &secret, &mut transcript)?;
                Ok(Reached::Called)
            }
        }
    }

    /// A try failed: another one later, or the end.
    fn failed(&self, state: &mut State, error: Error) -> Progress {
        let now = Instant::now();
        let answer = answer_of(state, &error);
        let is_refused = error.what().starts_with(REFUSED_TEXT);
        let is_connecting = matches!(state.stage, Stage::Connecting | Stage::Waiting(_));
        if std::mem::take(&mut state.bound) && is_connecting && !is_refused && now < self.deadline {
            // The same way again, with the kernel's own choice of interface.
            state.goes_unbound = true;
            state.tries -= 1;
            return self.pause(state, now);
        }
        state.goes_unbound = false;
        self.learn(state, answer);
        if let Purpose::Call { .. } = &self.purpose {
            return self.pause(state, now + lifeline::CALL_AGAIN);
        }
        state.watch = None;
        state.sock = None;
        state.input.clear();
        let turned_away =
            matches!(self.purpose, Purpose::Join { repair: true, .. }) && error.what().starts_with(TURNED_AWAY_TEXT);
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
        if let Purpose::Join { conn, repair: true, .. } = &self.purpose
            && conn.upgrade().is_some_and(|conn| conn.is_connected())
        {
            // The peer lives: what refuses is on the way.
            state.refused_since = None;
            hopeless = false;
        }
        let patience = match &self.purpose {
            Purpose::Connect(_) => self.net.config.reconnect_timeout.max(REFUSED),
            Purpose::Join { .. } | Purpose::Return { .. } | Purpose::Call { .. } => REFUSED,
        };
        let everywhere = |tries: u32| state.tries.saturating_sub(tries) as usize + 1 >= self.pairs();
        let dead = state.refused_since.is_some_and(|(since, tries)| now - since > patience && everywhere(tries));
        // Later on it may be an outage that somebody made, and the connection knows how long to wait.
        let may_end = matches!(self.purpose, Purpose::Connect(_));
        hopeless |= may_end && state.forbidden_since.is_some_and(|since| now - since > FORBIDDEN);
        if now >= self.deadline || dead || hopeless {
            let error = match &self.purpose {
                Purpose::Connect(target) => explain::explain(error, target, &self.net.config),
                Purpose::Join { .. } | Purpose::Return { .. } | Purpose::Call { .. } => error,
            };
            if let Purpose::Return { conn } = &self.purpose
                && let Some(conn) = conn.upgrade()
            {
                conn.gave_up(error.clone());
            }
            if let Purpose::Join { conn, index, repair } = &self.purpose
                && let Some(conn) = conn.upgrade()
            {
                if *repair {
                    conn.gave_up(*index, &error);
                } else {
                    Self::join_later(Arc::clone(&self.net), &conn, *index, state.epoch.wrapping_add(1), &error);
                }
            }
            self.finish(state, Err(error));
            return Progress { moved: true, again: None };
        }
        self.tell_of_waiting(state, now, &error);
        if let Purpose::Connect(target) = &self.purpose
            && !(state.tries as usize).is_multiple_of(target.pairs())
        {
            // Over another rail at once.
            state.last_failure = Some(error);
            return self.pause(state, now);
        }
        if state.tries > MANY
            && let Purpose::Join { conn, index, repair: true } = &self.purpose
            && let Some(conn) = conn.upgrade().filter(|conn| conn.lives(*index) && !conn.was_home(*index))
        {
            // These rails may have no network in common. It has others.
            self.finish(state, Err(error));
            Self::come_home(Arc::clone(&self.net), &conn, *index, RARELY, MANY);
            return Progress::default();
        }
        state.last_failure = Some(error);
        if matches!(self.purpose, Purpose::Join { repair: false, .. }) {
            // A new life for every try: the peer may have taken the last one for good before its welcome was lost.
            state.epoch = state.epoch.wrapping_add(1);
        }
        let pause = if state.tries < MANY { Duration::from_millis(10 << state.tries.min(5)) } else { SELDOM };
        // Who refuses answers at once, and whether it goes on is to be known soon.
        let missed = matches!(self.purpose, Purpose::Join { repair: true, .. }) && state.refused_since.is_some();
        let pause = if missed { pause.min(lifeline::CALL_AGAIN) } else { pause };
        let pause = if self.stays(state, answer) { lifeline::CALL_AGAIN } else { pause };
        self.pause(state, now + pause)
    }

    /// Whether the next try goes over the same rails: where refusals may be enough to give the peer up, they are not to wait
    /// for rails that say nothing.
    fn stays(&self, state: &mut State, answer: Answer) -> bool {
        let Purpose::Join { conn, repair: true, .. } = &self.purpose else { return false };
        let more = answer == Answer::Refused && state.stays + 1 < lifeline::REFUSALS;
        let stays = more && conn.upgrade().is_some_and(|conn| conn.awaits_refusals());
        // As if it had not been.
        (state.stays, state.tries) = if stays { (state.stays + 1, state.tries - 1) } else { (0, state.tries) };
        stays
    }

    /// The next try comes then.
    fn pause(&self, state: &mut State, until: Instant) -> Progress {
        state.watch = None;
        state.sock = None;
        state.input.clear();
        state.stage = Stage::Waiting(until);
        // The socket's registration has gone, and with it what this poll asks for if it came by it: the clock's counts.
        if let Some(clock) = &state.clock {
            clock.kick();
        }
        Progress { moved: false, again: Some(until) }
    }

    /// Says what is in the way while somebody waits for a first connection: otherwise all would be silent until the end.
    fn tell_of_waiting(&self, state: &mut State, now: Instant, error: &Error) {
        let Purpose::Connect(target) = &self.purpose else { return };
        if state.tell_at.is_none_or(|at| now < at) {
            return;
        }
        state.tell_at = None;
        let (so_far, all) = (TELL_AFTER.as_secs(), self.net.config.connect_timeout.as_secs());
        let error = explain::explain(error.clone(), target, &self.net.config);
        WAITING.tell(|more| {
            tracing::warn!(target: NET, "not connected after {so_far} s: {error}; it is tried until {all} s are over (TOWLINE_CONNECT_TIMEOUT){more}");
        });
    }

    /// A stream is connected, `offset` pairs of rails from its own. It comes home when it can: at set-up a rail may have been
    /// down that is there later.
    fn settle(&self, conn: &Arc<SendConn>, abroad: bool, offset: usize) {
        let index = match self.purpose {
            Purpose::Connect(_) => 0,
            Purpose::Join { index, repair, .. } => {
                if !repair && abroad {
                    conn.set_home(index, offset);
                }
                index
            }
            Purpose::Return { .. } | Purpose::Call { .. } => return,
        };
        conn.set_abroad(index, abroad);
        if abroad && conn.mends() && !conn.is_left_out((index + conn.home(index)) % conn.pairs()) {
            Self::come_home(Arc::clone(&self.net), conn, index, HOMECOMING, 0);
        }
    }

    /// Begins to bring a stream home that still lives elsewhere. False when that is no more to be done.
    fn claim(&self, state: &mut State) -> bool {
        let Purpose::Join { conn, index, .. } = &self.purpose else { return false };
        let Some(conn) = conn.upgrade() else { return false };
        state.claims = !(conn.lives(*index) && conn.is_abroad(*index) && conn.begin_repair(*index));
        !state.claims
    }

    fn drive(self: &Arc<Self>) -> Progress {
        let mut state = self.lock();
        let now = Instant::now();
        if let Purpose::Join { conn, .. } = &self.purpose
            && conn.upgrade().is_none_or(|conn| conn.is_over())
        {
            self.finish(&mut state, Err(Error::usage("the connection is closed")));
            return Progress::default();
        }
        if let Purpose::Return { conn } = &self.purpose
            && conn.upgrade().is_none_or(|conn| conn.is_over())
        {
            self.finish(&mut state, Err(Error::usage("the connection is closed")));
            return Progress::default();
        }
        if let Purpose::Call { conn, since, .. } = &self.purpose
            && conn.upgrade().is_none_or(|conn| !conn.is_calling(*since))
        {
            self.finish(&mut state, Err(Error::usage("the connection is closed")));
            return Progress::default();
        }
        if let Stage::Waiting(until) = state.stage {
            if now < until {
                return Progress { moved: false, again: Some(until) };
            }
            if state.claims && !self.claim(&mut state) {
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
                self.learn(&state, Answer::Accepted);
                self.pause(&mut state, now + lifeline::HEARD_PAUSE)
            }
            Ok(Some(Reached::Connected(dialled))) => {
                self.finish(&mut state, Ok(dialled.clone()));
                if let Dialled::Streams(conn) = dialled {
                    let (abroad, offset) = (state.abroad, state.tries as usize - 1);
                    drop(state);
                    self.settle(&conn, abroad, offset);
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

/// The dial as the keeper sees it.
impl Source for Dial {
    fn poll(&self) -> Progress {
        // The source needs itself to register the next socket; whoever polls it holds it.
        self.me.upgrade().map_or_else(Progress::default, |me| me.drive())
    }

    fn fail(&self, error: Error) {
        let mut state = self.lock();
        self.finish(&mut state, Err(error));
    }
}

/// What a process says that has forgotten the connection, too.
const TURNED_AWAY_TEXT: &str = "the peer closed the connection during the handshake";

const UNANSWERED_TEXT: &str = "the peer did not answer";

const REFUSED_TEXT: &str = "the peer refused the connection";

fn refused(error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::ConnectionRefused {
        return Error::remote(REFUSED_TEXT).with_hint("its process may have ended; look at its log");
    }
    if advice(error).is_some() {
        return Error::system("connecting", error);
    }
    let hint = match error.raw_os_error() {
        Some(libc::EHOSTUNREACH | libc::ENETUNREACH) => {
            "is the peer's host up, and is there a route to it over the chosen interface (ip route get, NCCL_SOCKET_IFNAME)? firewalls answer so, too"
        }
        Some(libc::EADDRNOTAVAIL | libc::EADDRINUSE) => {
            "no local port is free (widen net.ipv4.ip_local_port_range), or the interface has lost its address (ip address)"
        }
        _ => "check that the hosts can reach each other on the chosen interfaces (NCCL_SOCKET_IFNAME)",
    };
    Error::remote(format!("connecting failed: {error}")).with_hint(hint)
}

/// Nobody answered for so long.
fn unanswered(waited: Duration) -> Error {
    let hint =
        "check that the hosts can reach each other on the chosen interfaces (NCCL_SOCKET_IFNAME), and their firewalls";
    // Only a long wait tells a round trip that is too long from other causes.
    if waited < ROUND_TRIP_MAX {
        return Error::remote(UNANSWERED_TEXT).with_hint(hint);
    }
    let (waited, most) = (waited.as_secs_f64(), ROUND_TRIP_MAX.as_secs());
    Error::remote(format!("the peer did not answer within {waited:.0} s"))
        .with_hint(format!("{hint}; paths with a round trip above {most} s are not supported"))
}

/// What a try that has failed says about the peer's process.
fn answer_of(state: &State, error: &Error) -> Answer {
    match state.stage {
        Stage::Greeting { .. } | Stage::Welcome(_) if state.unanswered => Answer::Accepted,
        Stage::Greeting { .. } | Stage::Welcome(_) | Stage::Over => Answer::Refused,
        // Of an address of this host, connect(2) itself says so.
        Stage::Connecting | Stage::Waiting(_) if error.what().starts_with(REFUSED_TEXT) => Answer::Refused,
        Stage::Connecting | Stage::Waiting(_) => Answer::Silent,
    }
}

const FORBIDDEN_TEXT: &str = "this host does not let the connection out";

/// The failure when connect(2) itself, before any packet, says that it may not be: `EACCES` (a route of type prohibit),
/// `EPERM` (a firewall or security module), `EINVAL` (a route of type blackhole). The same codes in an answer from
/// the network are another matter: there they are somebody else's, and may pass.
fn forbidden(error: &io::Error) -> Option<Error> {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EINVAL)).then(|| {
        Error::new(Cause::System, format!("{FORBIDDEN_TEXT} ({error})")).with_hint(
            "a route of type prohibit or blackhole (ip route get), a firewall or a security module of this host is in the way",
        )
    })
}

/// Source and destination of a try, when tries begin with the pair of rails `first`: first each rail with its counterpart; in
/// the next rounds, should these not share a network, with others.
fn between(rails: &[Rail], addresses: &[SocketAddr], first: usize, attempt: u32) -> Option<Route> {
    let pairs = rails.len().max(addresses.len()).max(1);
    let (way, round) = ((attempt as usize + first) % pairs, attempt as usize / pairs);
    let local = rails.get((way + round) % rails.len().max(1));
    let remote = *addresses.get(way % addresses.len().max(1))?;
    Some(Route { rail: local.cloned(), binds: rails.len() > 1, remote: localise(remote, local), way })
}

/// A link-local address is reached through this side's interface, whatever the number of the other side's is.
fn localise(remote: SocketAddr, rail: Option<&Rail>) -> SocketAddr {
    match (remote, rail) {
        (SocketAddr::V6(mut v6), Some(rail)) if v6.ip().is_unicast_link_local() => {
            v6.set_scope_id(rail.index);
            SocketAddr::V6(v6)
        }
        _ => remote,
    }
}

/// Reads until `wanted` bytes are there. `false`: not yet; `short`: for want of memory, and to be tried again soon.
fn fill(sock: &Sock, input: &mut Vec<u8>, wanted: usize, short: &mut bool) -> Result<bool> {
    while input.len() < wanted {
        let mut bytes = [0_u8; WELCOME + ANSWER];
        let room = &mut bytes[..wanted - input.len()];
        // SAFETY: the buffer is ours.
        match unsafe { wire::receive(sock.as_raw_fd(), Piece::of_mut(room)) } {
            Ok(None) => return Ok(false),
            Err(error) if wire::is_shortage(&error) => {
                *short = true;
                return Ok(false);
            }
            Ok(Some(0)) => {
                return Err(Error::remote(TURNED_AWAY_TEXT)
                    .with_hint("its log says why: a listener that is closed, another protocol, or a wrong secret"));
            }
            Ok(Some(got)) => input.extend_from_slice(&bytes[..got]),
            Err(error) => return Err(Error::remote(format!("the handshake broke off: {error}"))),
        }
    }
    Ok(true)
}
