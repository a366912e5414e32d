//! How the ranks of a group find each other: each rank connects to all others, and its first message names it.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::group::{Group, Shared};
use super::line::{NetRecv, NetSend, RecvEnd};
use super::outgoing::{Message, Outgoing};
use super::patience::Patience;
use super::peer::Peer;
use super::placer::Placer;
use super::state::State;
use super::wire::{HEADER, Header, Kind, not_ours};
use crate::os::error::{Error, Result};
use crate::plugin::facade;

const PAUSE: Duration = Duration::from_micros(200);

/// A connection from another rank.
struct Incoming {
    /// Closed before the hello is dropped, into which the connection may still write.
    end: NetRecv,
    hello: Box<[u8; HEADER]>,
    request: Option<usize>,
    rank: Option<u32>,
}

impl Incoming {
    fn new(comm: usize) -> Self {
        Self { end: NetRecv(comm), hello: Box::new([0; HEADER]), request: None, rank: None }
    }

    /// Reads which rank the connection belongs to, if that has arrived.
    fn ask(&mut self, ranks: u32) -> Result<()> {
        if self.rank.is_some() {
            return Ok(());
        }
        let Some(request) = self.request else {
            self.request = self.end.receive(self.hello.as_mut_ptr(), HEADER)?;
            return Ok(());
        };
        if let Some(came) = self.end.received(request)? {
            let hello = Header::decode(&self.hello)?;
            let is_hello = came == HEADER as u64 && hello.kind == Kind::Hello;
            if !is_hello || hello.region >= ranks || hello.size != u64::from(ranks) {
                return Err(not_ours());
            }
            self.rank = Some(hello.region);
        }
        Ok(())
    }
}

/// Connects to all ranks, waits until they have connected to this one, and starts the placer. `handles` has one for
/// each rank.
///
/// # Errors
/// When the ranks are not all connected before `deadline`.
pub(crate) fn connect(
    (ctx, dev, listener): (usize, i32, usize),
    mut handles: Vec<[u8; 64]>,
    rank: u32,
    deadline: Instant,
    state: &State,
) -> Result<Group> {
    let ranks = u32::try_from(handles.len()).map_err(|_| Error::argument("too many ranks"))?;
    let others = ranks as usize - 1;
    let mut outgoing: Vec<Option<Outgoing>> = handles.iter().map(|_| None).collect();
    let mut incoming: Vec<Incoming> = Vec::new();
    let mut unread = Vec::new();
    loop {
        for (to, handle) in handles.iter_mut().enumerate().filter(|(to, _)| *to != rank as usize) {
            match &mut outgoing[to] {
                Some(connected) => drop(connected.advance(&mut unread)?),
                place => {
                    if let Some(comm) = facade::connect(Some(ctx), dev, None, handle)? {
                        let mut connected = Outgoing::over(Box::new(NetSend::new(comm)), to as u32);
                        let hello = Header { region: rank, size: u64::from(ranks), ..Header::new(Kind::Hello) };
                        connected.push(Message::bare(&hello));
                        *place = Some(connected);
                    }
                }
            }
        }
        if incoming.len() < others
            && let Some(comm) = facade::accept(listener)?
        {
            incoming.push(Incoming::new(comm));
        }
        for connection in &mut incoming {
            connection.ask(ranks)?;
        }
        let is_known = |connection: &Incoming| connection.rank.is_some();
        let connected = outgoing.iter().flatten().filter(|connected| connected.is_empty()).count();
        if connected == others && incoming.len() == others && incoming.iter().all(is_known) {
            break;
        }
        if Instant::now() >= deadline {
            let known = incoming.iter().filter(|connection| is_known(connection)).count();
            return Err(Error::remote(format!(
                "the ranks of a group of {ranks} did not all connect for one-sided operations: {connected} of {others} were \
                 reached, {known} of {others} have come"
            ))
            .with_hint("a rank may have failed to start; TOWLINE_CONNECT_TIMEOUT sets how long to wait"));
        }
        thread::sleep(PAUSE);
    }
    let mut peers: Vec<Option<Peer>> = handles.iter().map(|_| None).collect();
    for connection in incoming {
        let from = connection.rank.unwrap_or(rank) as usize;
        let to = outgoing.get_mut(from).and_then(Option::take).ok_or_else(not_ours)?;
        let process = facade::peer_process(connection.end.0)?;
        peers[from] = Some(Peer::new(from as u32, process, to, Box::new(connection.end)));
    }
    start(peers, ranks, state)
}

fn start(peers: Vec<Option<Peer>>, ranks: u32, state: &State) -> Result<Group> {
    let shared = Arc::new(Shared::default());
    let patience = Patience::new(facade::recovery_limit()?, Arc::clone(&state.silences));
    let placer = Placer::new(Arc::clone(&shared), peers, Arc::clone(&state.turns), patience);
    let thread = crate::os::thread::spawn("towline-rma", move || placer.run())
        .map_err(|error| Error::system("starting the thread of one-sided operations", &error))?;
    shared.serve(thread.thread().clone());
    Ok(Group { shared, ranks, placer: Mutex::new(Some(thread)) })
}
