//! The steps from a socket that TCP's handshake has handed over to an RDMA connection.
//!
//! The control thread drives both sides, from `listen` and `connect` on, whether or not NCCL polls: with NCCL 2.8 to
//! 2.11 all sides connect before any of them accepts. The messages are in [`record`](super::record).

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::adapter::Adapters;
use super::base::Parts;
use super::cts::Ring;
use super::eager::{self, Inbox};
use super::fabric::{Class, Fabric, ports};
use super::linking::{Linking, Polled};
use super::receiver::{self, Mirror, RdmaRecv, SizeTable, post_first_receives};
use super::record::{QpRecord, Record, Talk, VERSION};
use super::sender::{self, RdmaSend, RingMemory, Stores};
use super::stripe::MAX_QPS;
use crate::engine::poller::{Interest, Progress, Registration, Source};
use crate::os::error::{Error, Result};
use crate::os::interfaces::Rail;
use crate::os::log::NET;
use crate::session::accept_queue::AcceptQueue;
use crate::session::dialer::{Dial, Target};
use crate::session::handshake::Secret;
use crate::session::link::{Link, Sock};
use crate::session::net::Net;
use crate::session::opening::{Door, Handed, Opener, Opening};
use crate::session::owner::Streams;
use crate::session::peer::{Peer, failure};
use crate::session::ports;
use crate::session::seal::Seal;
use crate::session::wire::{self, Piece};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A listener whose connections are over RDMA.
pub(crate) struct Listener {
    me: Weak<Self>,
    net: Arc<Net>,
    adapters: Adapters,
    queue: AcceptQueue<Arc<RdmaRecv>>,
}

impl Listener {
    /// A listener of a device.
    pub(crate) fn new(net: Arc<Net>, adapters: Adapters) -> Arc<Self> {
        Arc::new_cyclic(|me| Self { me: me.clone(), net, adapters, queue: AcceptQueue::new() })
    }

    fn arrive(&self, conn: Result<Arc<RdmaRecv>>) {
        if let Some(conn) = self.queue.add(conn) {
            conn.close();
        }
    }
}

impl Door for Listener {
    fn is_bare(&self) -> bool {
        true
    }

    fn open(&self, link: Link, peer: Peer) -> Arc<dyn Opening> {
        Arc::new(Guest { link, peer, listener: self.me.clone() })
    }

    fn turn_away(&self, why: Error) {
        self.queue.turn_away(why);
    }

    fn close(&self) {
        for conn in self.queue.close() {
            conn.close();
        }
    }
}

/// A peer that is being welcomed.
struct Guest {
    link: Link,
    peer: Peer,
    listener: Weak<Listener>,
}

impl Opening for Guest {
    fn is_waiting(&self) -> bool {
        false
    }

    fn begin(self: Arc<Self>, sock: Sock, seal: Seal) -> Result<()> {
        let Some(listener) = self.listener.upgrade() else { return Ok(()) };
        let handed = Handed { link: self.link.clone(), peer: self.peer.clone(), sock, seal };
        let common = Common { net: Arc::clone(&listener.net), adapters: Arc::clone(&listener.adapters) };
        Greeting::start(common, handed, Role::Receiving { listener, stage: Receiving::AwaitsOffer });
        Ok(())
    }

    fn refuse(&self, why: Error) {
        if let Some(listener) = self.listener.upgrade() {
            listener.turn_away(why.with_peer(&self.peer));
        }
    }
}

/// A request to be connected over RDMA.
pub(crate) struct Attempt {
    net: Arc<Net>,
    adapters: Adapters,
    dial: Mutex<Option<Arc<Dial>>>,
    outcome: Mutex<Option<Result<Arc<RdmaSend>>>>,
    settled: Condvar,
    me: Weak<Self>,
}

impl Attempt {
    /// Starts connecting to a listener.
    ///
    /// # Errors
    /// When the control thread cannot be started.
    pub(crate) fn start(net: Arc<Net>, adapters: Adapters, target: Target) -> Result<Arc<Self>> {
        let attempt = Arc::new_cyclic(|me| Self {
            net,
            adapters,
            dial: Mutex::new(None),
            outcome: Mutex::new(None),
            settled: Condvar::new(),
            me: me.clone(),
        });
        let claim = Arc::new(Claim(attempt.me.clone()));
        let dial = Dial::connect(Arc::clone(&attempt.net), target, claim)?;
        *lock(&attempt.dial) = Some(dial);
        Ok(attempt)
    }

    /// The connection, once it is ready; the failure, once the attempt has failed.
    pub(crate) fn result(&self) -> Option<Result<Arc<RdmaSend>>> {
        let outcome = lock(&self.outcome).clone();
        outcome.or_else(|| match lock(&self.dial).as_ref()?.result()? {
            Ok(()) => None,
            Err(error) => Some(Err(error)),
        })
    }

    /// Waits until the attempt has succeeded or failed; it has a deadline of its own.
    ///
    /// # Errors
    /// The error with which the attempt failed.
    pub(crate) fn wait(&self) -> Result<Arc<RdmaSend>> {
        loop {
            if let Some(result) = self.result() {
                return result;
            }
            let outcome = lock(&self.outcome);
            drop(self.settled.wait_timeout(outcome, Duration::from_millis(20)).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Gives up: the connection is no longer wanted.
    pub(crate) fn cancel(&self) {
        // Nothing is closed under a lock: a close may wait, and the control thread settles attempts.
        let dial = lock(&self.dial).take();
        if let Some(dial) = dial {
            dial.cancel();
        }
        let abandoned = Err(Error::usage("the connection attempt was abandoned"));
        let unused = lock(&self.outcome).replace(abandoned);
        if let Some(Ok(conn)) = unused {
            conn.close();
        }
    }

    fn settle(&self, result: Result<Arc<RdmaSend>>) {
        let unused = {
            let mut outcome = lock(&self.outcome);
            if outcome.is_some() { Some(result) } else { outcome.replace(result) }
        };
        self.settled.notify_all();
        if let Some(Ok(conn)) = unused {
            conn.close();
        }
    }
}

/// A dial's weak reference to its attempt: the attempt owns the dial.
struct Claim(Weak<Attempt>);

impl Opener for Claim {
    fn is_bare(&self) -> bool {
        true
    }

    fn open(&self, handed: Handed) -> Result<Option<Arc<dyn Streams>>> {
        let Some(attempt) = self.0.upgrade() else { return Ok(None) };
        let common = Common { net: Arc::clone(&attempt.net), adapters: Arc::clone(&attempt.adapters) };
        Greeting::start(common, handed, Role::Sending { attempt, stage: Sending::Begins });
        Ok(None)
    }
}

struct Common {
    net: Arc<Net>,
    adapters: Adapters,
}

enum Role {
    Sending { attempt: Arc<Attempt>, stage: Sending },
    Receiving { listener: Arc<Listener>, stage: Receiving },
}

enum Sending {
    Begins,
    AwaitsAnswer,
    /// Its queue pairs are being connected with those of the answer.
    Links {
        linking: Box<Linking>,
        answer: Box<Record>,
        class: Class,
    },
}

/// The receiving side's own memory.
type Own = (SizeTable, Option<Inbox>);

enum Receiving {
    AwaitsOffer,
    AwaitsAccept {
        fabric: Box<Fabric>,
        own: Box<Own>,
    },
    /// Its queue pairs are being connected with those that the sender accepted with.
    Links {
        linking: Box<Linking>,
        own: Box<Own>,
        accept: Box<Record>,
    },
}

/// The result of a stage.
enum Next<Stage, Conn> {
    /// Another stage follows.
    Stage(Stage),
    /// It waits for the peer or for its own queue pairs, until that moment at most.
    Waits(Stage, Option<Instant>),
    /// The connection.
    Done(Conn),
}

/// A connection that does not have its queue pairs yet.
struct Greeting {
    me: Weak<Self>,
    common: Common,
    peer: Peer,
    link: Link,
    deadline: Instant,
    state: Mutex<State>,
}

struct State {
    /// Before the socket: dropping it names the descriptor, which must still be open then.
    registration: Option<Registration>,
    sock: Option<Sock>,
    talk: Talk,
    /// None when it is over.
    role: Option<Role>,
}

impl Greeting {
    fn start(common: Common, handed: Handed, role: Role) {
        let Handed { link, peer, sock, .. } = handed;
        let fd = sock.as_raw_fd();
        let greeting = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            deadline: Instant::now() + common.net.config.connect_timeout,
            common,
            peer,
            state: Mutex::new(State {
                registration: None,
                sock: Some(sock),
                talk: Talk::new(link.key.clone()),
                role: Some(role),
            }),
            link,
        });
        // The lock is held during the registration: the control thread may poll at once.
        let mut state = lock(&greeting.state);
        let control_thread = greeting.common.net.poller.control_thread();
        let registered = control_thread
            .and_then(|control_thread| control_thread.register(greeting.clone(), Some((fd, Interest::Data))));
        match registered {
            Ok(registration) => state.registration.insert(registration).kick(),
            Err(error) => greeting.end(&mut state, error),
        }
    }

    /// Advances the exchange. Returns when to poll again, if not only when something arrives.
    fn advance(&self, state: &mut State) -> Result<Option<Instant>> {
        loop {
            match state.role.take() {
                Some(Role::Sending { attempt, stage }) => {
                    // Stored again until the step has succeeded, so that after a failure the peer can still be
                    // notified.
                    state.role = Some(Role::Sending { attempt: Arc::clone(&attempt), stage: Sending::AwaitsAnswer });
                    match self.send_side(state, stage)? {
                        Next::Stage(stage) => state.role = Some(Role::Sending { attempt, stage }),
                        Next::Waits(stage, again) => {
                            state.role = Some(Role::Sending { attempt, stage });
                            return Ok(again);
                        }
                        Next::Done(conn) => {
                            state.role = None;
                            attempt.settle(Ok(conn));
                        }
                    }
                }
                Some(Role::Receiving { listener, stage }) => {
                    let is_last = matches!(stage, Receiving::Links { .. });
                    let next = match self.receive_side(state, stage) {
                        Err(error) if is_last => {
                            listener.arrive(Err(self.report_late(state, error)));
                            return Ok(None);
                        }
                        next => next?,
                    };
                    match next {
                        Next::Stage(stage) => state.role = Some(Role::Receiving { listener, stage }),
                        Next::Waits(stage, again) => {
                            state.role = Some(Role::Receiving { listener, stage });
                            return Ok(again);
                        }
                        Next::Done(conn) => listener.arrive(Ok(conn)),
                    }
                }
                None => return Ok(None),
            }
        }
    }

    fn send_side(&self, state: &mut State, stage: Sending) -> Result<Next<Sending, Arc<RdmaSend>>> {
        let Some(sock) = &state.sock else { return Err(Error::internal("a greeting without its socket")) };
        match stage {
            Sending::Begins => {
                let pairs_per_port = u32::try_from(self.common.net.config.ib_qps_per_connection.0).unwrap_or(1);
                let ports = ports(&self.common.adapters);
                let offer = Record { version: VERSION, ports, pairs_per_port, ..Record::default() };
                state.talk.write(sock, &offer)?;
                Ok(Next::Stage(Sending::AwaitsAnswer))
            }
            Sending::AwaitsAnswer => {
                let Some(answer) = state.talk.read(sock)? else {
                    return Ok(Next::Waits(stage, state.talk.again()));
                };
                let Common { net, adapters } = &self.common;
                let class = Class::new(&net.config, self.link.traffic_class);
                let qps = answer.qps.len();
                let fabric = Fabric::new(adapters, qps, sender::DEPTH, &net.config, &answer.ports)?;
                let linking = Box::new(self.link_up(fabric, answer.qps.clone(), class));
                Ok(Next::Stage(Sending::Links { linking, answer: Box::new(answer), class }))
            }
            Sending::Links { mut linking, answer, class } => match linking.poll()? {
                Polled::Connected(fabric) => self.answered(state, fabric, &answer, class).map(Next::Done),
                Polled::Waits(again) => Ok(Next::Waits(Sending::Links { linking, answer, class }, again)),
            },
        }
    }

    fn receive_side(&self, state: &mut State, stage: Receiving) -> Result<Next<Receiving, Arc<RdmaRecv>>> {
        let Some(sock) = &state.sock else { return Err(Error::internal("a greeting without its socket")) };
        match stage {
            Receiving::AwaitsOffer => match state.talk.read(sock)? {
                Some(offer) => self.offered(state, &offer).map(Next::Stage),
                None => Ok(Next::Waits(stage, state.talk.again())),
            },
            Receiving::AwaitsAccept { fabric, own } => {
                let Some(accept) = state.talk.read(sock)? else {
                    return Ok(Next::Waits(Receiving::AwaitsAccept { fabric, own }, state.talk.again()));
                };
                // Checked when it was received: both fit a byte.
                let byte = |number| u8::try_from(number).unwrap_or(0);
                let class = Class { traffic: byte(accept.traffic_class), service_level: byte(accept.service_level) };
                let class = Class::of_receiver(&self.common.net.config, class);
                let linking = Box::new(self.link_up(*fabric, accept.qps.clone(), class));
                Ok(Next::Stage(Receiving::Links { linking, own, accept: Box::new(accept) }))
            }
            Receiving::Links { mut linking, own, accept } => match linking.poll()? {
                Polled::Connected(fabric) => self.accepted(state, fabric, *own, &accept).map(Next::Done),
                Polled::Waits(again) => Ok(Next::Waits(Receiving::Links { linking, own, accept }, again)),
            },
        }
    }

    /// Starts to connect queue pairs with the peer's.
    fn link_up(&self, fabric: Fabric, qps: Vec<QpRecord>, class: Class) -> Linking {
        let Common { net, adapters } = &self.common;
        let (net, adapters, me) = (Arc::clone(net), Arc::clone(adapters), self.me.clone());
        let connect = {
            let net = Arc::clone(&net);
            move |fabric: &mut Fabric| fabric.connect(&adapters, &qps, class, &net.config)
        };
        let wake = move || {
            let Some(greeting) = me.upgrade() else { return };
            let state = lock(&greeting.state);
            state.registration.iter().for_each(Registration::kick);
        };
        Linking::start(&net.config, fabric, Arc::new(connect), Arc::new(wake))
    }

    /// Sending side: its queue pairs are connected with the receiver's. Sends their data.
    fn answered(&self, state: &mut State, fabric: Fabric, answer: &Record, class: Class) -> Result<Arc<RdmaSend>> {
        let Common { net, adapters } = &self.common;
        let config = &net.config;
        let ring = Ring::new()?;
        let ring_memory = RingMemory::new(adapters, ring)?;
        let target = sender::Target {
            split: config.ib_split_data_on_qps,
            ports: adapters.len().max(answer.ports.len()),
            sizes: answer.address,
            size_keys: answer.keys.clone(),
            inbox: (answer.inbox != 0).then(|| eager::Address::new(answer.inbox, &answer.inbox_keys)),
        };
        let stores = Stores::new(adapters, &target)?;
        let (address, keys) = (ring_memory.ring.address(), ring_memory.keys());
        let accept = Record {
            address,
            keys,
            traffic_class: class.traffic.into(),
            service_level: class.service_level.into(),
            ..fabric.record(adapters, config)
        };
        let sock = state.sock.as_ref().ok_or_else(|| Error::internal("a greeting without its socket"))?;
        state.talk.write(sock, &accept)?;
        tracing::debug!(
            target: NET,
            "connected to {} over {} queue pairs of {:?}",
            self.peer,
            answer.qps.len(),
            adapters.iter().map(|adapter| adapter.name()).collect::<Vec<_>>()
        );
        RdmaSend::new(self.hand_on(state)?, fabric, ring_memory, stores, target)
    }

    /// Receiving side: the sender's ports are known. Makes queue pairs and sends their data.
    fn offered(&self, state: &mut State, offer: &Record) -> Result<Receiving> {
        let Common { net, adapters } = &self.common;
        if offer.ports.is_empty() {
            return Err(Error::remote("the peer offers an RDMA connection without a port"));
        }
        let ports = adapters.len().max(offer.ports.len());
        let pairs = (offer.pairs_per_port as usize).clamp(1, MAX_QPS / ports);
        let mut fabric = Fabric::new(adapters, ports * pairs, receiver::DEPTH, &net.config, &offer.ports)?;
        post_first_receives(&mut fabric)?;
        let table = SizeTable::new(adapters)?;
        // The processor delivers short messages, which it can do only in its own memory.
        let inbox =
            if adapters.iter().any(|adapter| adapter.reaches_gpus()) { None } else { Some(Inbox::new(adapters)?) };
        let address = inbox.as_ref().map(Inbox::address);
        let answer = Record {
            inbox: address.map_or(0, |inbox| inbox.start),
            inbox_keys: address.map_or(Vec::new(), |inbox| inbox.keys[..adapters.len()].to_vec()),
            address: table.sizes.as_ptr() as u64,
            keys: table.regions.iter().map(super::verbs::MemoryRegion::remote_key).collect(),
            ..fabric.record(adapters, &net.config)
        };
        let sock = state.sock.as_ref().ok_or_else(|| Error::internal("a greeting without its socket"))?;
        state.talk.write(sock, &answer)?;
        Ok(Receiving::AwaitsAccept { fabric: Box::new(fabric), own: Box::new((table, inbox)) })
    }

    /// Receiving side: its queue pairs are connected with the sender's.
    fn accepted(
        &self,
        state: &mut State,
        fabric: Fabric,
        (table, inbox): Own,
        accept: &Record,
    ) -> Result<Arc<RdmaRecv>> {
        let adapters = &self.common.adapters;
        tracing::debug!(target: NET, "connected from {} over {} queue pairs", self.peer, accept.qps.len());
        let mirror = Mirror::new(adapters)?;
        let target = receiver::Target { ring: accept.address, keys: accept.keys.clone() };
        RdmaRecv::new(self.hand_on(state)?, fabric, (table, mirror, inbox), target)
    }

    fn hand_on(&self, state: &mut State) -> Result<Parts> {
        state.registration = None;
        let sock = state.sock.take().ok_or_else(|| Error::internal("a greeting without its socket"))?;
        Ok(Parts {
            net: Arc::clone(&self.common.net),
            adapters: Arc::clone(&self.common.adapters),
            peer: self.peer.clone(),
            sock,
            link: self.link.clone(),
        })
    }

    /// Receiving side: the last step has failed, and the sender considers the connection established. So it is notified
    /// as for a connection that has failed, and `accept` fails too.
    fn report_late(&self, state: &mut State, error: Error) -> Error {
        state.registration = None;
        if let Some(sock) = state.sock.take() {
            // SAFETY: a plain slice. Bytes that the socket does not accept are lost, and the peer sees only the end.
            let _ = unsafe { wire::send(sock.as_raw_fd(), Piece::of(&failure(&error))) };
            self.common.net.linger(sock);
        }
        error.with_peer(&self.peer)
    }

    /// The reason why the connection was not established in time.
    fn late(&self, state: &State) -> Error {
        let linking = match &state.role {
            Some(Role::Sending { stage: Sending::Links { linking, .. }, .. })
            | Some(Role::Receiving { stage: Receiving::Links { linking, .. }, .. }) => Some(linking),
            _ => None,
        };
        let unlinked = linking.and_then(|linking| linking.last_failure()).cloned();
        unlinked.unwrap_or_else(|| {
            Error::remote("the peer did not finish the exchange of RDMA parameters")
                .with_hint("look at the peer's log; TOWLINE_CONNECT_TIMEOUT sets how long to wait")
        })
    }

    /// It has failed: notifies the peer and the waiting caller.
    fn end(&self, state: &mut State, error: Error) {
        if let Some(Role::Receiving { listener, stage: Receiving::Links { .. } }) = &state.role {
            let listener = Arc::clone(listener);
            state.role = None;
            return listener.arrive(Err(self.report_late(state, error)));
        }
        state.registration = None;
        let error = error.with_peer(&self.peer);
        if let Some(sock) = state.sock.take() {
            let _ = state.talk.write(&sock, &Record { failure: error.what().to_owned(), ..Record::default() });
            self.common.net.linger(sock);
        }
        match state.role.take() {
            Some(Role::Sending { attempt, .. }) => attempt.settle(Err(error)),
            _ => tracing::warn!(target: NET, "a connection over RDMA did not come about: {error}"),
        }
    }
}

impl Source for Greeting {
    fn poll(&self) -> Progress {
        let mut state = lock(&self.state);
        if state.role.is_none() {
            return Progress::default();
        }
        let again = match self.advance(&mut state) {
            Ok(again) => again,
            Err(error) => {
                self.end(&mut state, error);
                None
            }
        };
        if state.role.is_none() {
            state.registration = None;
        } else if Instant::now() >= self.deadline {
            let late = self.late(&state);
            self.end(&mut state, late);
        } else {
            let again = again.map_or(self.deadline, |again| again.min(self.deadline));
            return Progress { moved: false, again: Some(again) };
        }
        Progress { moved: true, again: None }
    }

    fn fail(&self, error: Error) {
        self.end(&mut lock(&self.state), error);
    }
}

/// A listener with its registration among the process's handshakes.
pub(crate) struct Listening {
    net: Arc<Net>,
    session: Arc<ports::Listener>,
    listener: Arc<Listener>,
}

impl Listening {
    /// Starts to listen: handshakes arrive over the interfaces `rails`. Also returns the addresses of their sockets.
    ///
    /// # Errors
    /// When nothing can be bound to the first of them.
    pub(crate) fn open(
        net: &Arc<Net>,
        adapters: Adapters,
        rails: Arc<[Rail]>,
        traffic_class: Option<u8>,
    ) -> Result<(Self, Vec<SocketAddr>)> {
        let listener = Listener::new(Arc::clone(net), adapters);
        let (session, addresses) = net.listen(rails, traffic_class, Arc::clone(&listener) as _)?;
        Ok((Self { net: Arc::clone(net), session, listener }, addresses))
    }

    /// The secret that a peer must know.
    pub(crate) fn secret(&self) -> &Secret {
        &self.session.secret
    }

    /// The next connection, if one has arrived.
    ///
    /// # Errors
    /// As [`AcceptQueue::accept`].
    pub(crate) fn accept(&self) -> Result<Option<Arc<RdmaRecv>>> {
        self.listener.queue.accept()
    }

    /// Waits for the next connection until `deadline`.
    ///
    /// # Errors
    /// As [`AcceptQueue::accept`].
    pub(crate) fn accept_until(&self, deadline: Instant) -> Result<Option<Arc<RdmaRecv>>> {
        self.listener.queue.accept_until(deadline)
    }

    /// Stops accepting connections, and ends those that were not accepted.
    pub(crate) fn close(&self) {
        self.net.close(&self.session);
    }
}
