//! What a dial is for: all differences between a first connection, a stream that joins or reconnects, and a call.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::poller::Registration;
use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::os::interfaces::Rail;
use crate::session::handshake::{Intent, Secret, Welcome};
use crate::session::lifeline::Answer;
use crate::session::link::{Link, Sock};
use crate::session::net::Net;
use crate::session::owner::Streams;
use crate::session::seal::agreement::Keys;
use crate::session::tries::TRY;

/// The destination of one attempt.
pub(super) struct Route {
    /// This side's rail.
    pub rail: Option<Rail>,
    /// Whether the socket is bound to the rail's address, which is the case where there is a choice.
    pub binds: bool,
    /// The other side's address.
    pub remote: SocketAddr,
    /// The number of this pair of rails.
    pub pair: usize,
}

impl Route {
    /// The pair of this side's rail number `at` and the other side's.
    pub(super) fn of(link: &Link, at: usize) -> Option<Self> {
        let remote = *link.remote.get(at % link.remote.len().max(1))?;
        let local = link.local.get(at % link.local.len().max(1));
        let (rail, binds) = (local.cloned(), link.local.len() > 1);
        Some(Self { rail, binds, remote: localise(remote, local), pair: at % link.pairs() })
    }
}

/// A completed handshake: both sides have proved themselves.
pub(super) struct Proved {
    /// The other side's last message.
    pub welcome: Welcome,
    /// The key of a new connection.
    pub key: Secret,
    /// The features that both sides have.
    pub features: u32,
    /// The keys of an encrypted stream.
    pub keys: Option<Keys>,
    /// The requested epoch.
    pub epoch: u16,
    /// The result of [`Purpose::register_socket`].
    pub registration: Option<Registration>,
    /// The socket.
    pub sock: Sock,
}

/// The result of a completed handshake.
pub(super) enum Reached {
    /// A stream is connected.
    Stream {
        /// Its connection.
        conn: Arc<dyn Streams>,
        /// Which stream.
        index: usize,
        /// If it is connected over another pair of rails than its own, that pair is its own from now on.
        settles: bool,
    },
    /// The socket belongs to its owner now.
    TakenOver,
    /// The sending side of a connection has received the call.
    Called,
}

/// The purpose of a dial.
pub(super) trait Purpose: Send + Sync {
    /// Whether it is the first connection to a listener, for which NCCL waits.
    fn is_first(&self) -> bool {
        false
    }

    /// Whether a stream is to be connected again that was connected before.
    fn is_repair(&self) -> bool {
        false
    }

    /// Whether the result of the dial is no longer wanted.
    fn is_over(&self) -> bool;

    /// How many pairs of rails its tries go over in turn.
    fn pairs(&self) -> usize;

    /// Source and destination of the given try, counted from 0.
    fn route(&self, attempt: u32) -> Option<Route>;

    /// Whether this try goes over other rails than the stream's own.
    fn is_on_other_pair(&self, attempt: u32, pair: usize) -> bool;

    /// The epoch of the next try.
    fn epoch(&self, last: u16) -> u16 {
        last
    }

    /// The epoch after a try that failed.
    fn epoch_after_failure(&self, last: u16) -> u16 {
        last
    }

    /// How long the given try may take until the peer's kernel accepts it.
    fn patience(&self, attempt: u32) -> Duration;

    /// How long the peer's process may take then.
    fn hold(&self) -> Duration {
        TRY
    }

    /// The traffic class of the packets.
    fn traffic_class(&self) -> Option<u8>;

    /// `TCP_MAXSEG` that the connection has found for a pair of rails.
    fn segment(&self, _pair: usize) -> Option<u32> {
        None
    }

    /// Feature bits besides those of the process.
    fn features(&self) -> u32 {
        0
    }

    /// The request in the hello, and the secret that authorises it.
    ///
    /// # Errors
    /// When the connection is gone.
    fn intent(&self, epoch: u16, tries: u32) -> Result<(Intent, Secret)>;

    /// The addresses of this process that the hello names.
    fn addresses(&self, _net: &Net) -> Vec<SocketAddr> {
        Vec::new()
    }

    /// Registers the socket with a worker.
    ///
    /// # Errors
    /// When the kernel refuses to watch the socket.
    fn register_socket(&self, _sock: &Sock) -> Result<Option<Registration>> {
        Ok(None)
    }

    /// The handshake is complete.
    ///
    /// # Errors
    /// When the connection is gone, or cannot use the socket.
    fn reached(&self, net: &Arc<Net>, proved: Proved) -> Result<Reached>;

    /// The evidence that an attempt gives about a peer that may be dead.
    fn answered(&self, _began: Instant, _pair: usize, _answer: Answer) {}

    /// The pause after each failed try, for dials that no failure ends.
    fn goes_on_after(&self) -> Option<Duration> {
        None
    }

    /// Whether the connection has other streams. Then the peer is known to be alive even if an attempt is refused.
    fn is_connected(&self) -> bool {
        false
    }

    /// Whether refusals over some of the paths may be enough to give the peer up.
    fn awaits_refusals(&self) -> bool {
        false
    }

    /// Whether the stream is connected over other rails, and was never connected over its own.
    fn may_stay(&self) -> bool {
        false
    }

    /// Begins to move a stream back to its own rails. False when there is no longer a reason to.
    fn claim(&self) -> bool {
        false
    }

    /// The stream stays where it is for a while.
    fn put_off(&self, _net: &Arc<Net>) {}

    /// The error, extended by other known facts about its cause.
    fn explain(&self, error: Error, _config: &Config) -> Error {
        error
    }

    /// The dial ends with an error.
    fn gave_up(&self, _net: &Arc<Net>, _epoch: u16, _error: &Error) {}

    /// The dial ends. `began`: the repair of its stream had begun.
    fn ended(&self, _began: bool, _is_connected: bool) {}
}

/// Source and destination of a try, when tries begin with the pair of rails `first`. First each rail is tried with its
/// counterpart. Later rounds combine it with others, in case the two do not share a network.
pub(super) fn between(rails: &[Rail], addresses: &[SocketAddr], first: usize, attempt: u32) -> Option<Route> {
    let pairs = rails.len().max(addresses.len()).max(1);
    let (pair, round) = ((attempt as usize + first) % pairs, attempt as usize / pairs);
    let local = rails.get((pair + round) % rails.len().max(1));
    let remote = *addresses.get(pair % addresses.len().max(1))?;
    Some(Route { rail: local.cloned(), binds: rails.len() > 1, remote: localise(remote, local), pair })
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
