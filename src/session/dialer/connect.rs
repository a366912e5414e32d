//! A first connection to a listener.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::explain;
use super::purpose::{Proved, Purpose, Reached, Route, between};
use super::{Begin, Dial, Target};
use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::os::log::NET;
use crate::session::handshake::{FEATURE_BARE, Intent, Secret};
use crate::session::link::Link;
use crate::session::net::Net;
use crate::session::opening::{Handed, Opener};
use crate::session::peer::Peer;
use crate::session::seal::Seal;
use crate::session::{liveness, tries};

struct Connect {
    target: Target,
    opener: Arc<dyn Opener>,
}

impl Dial {
    /// Starts connecting to a listener. `opener` makes the connection.
    ///
    /// # Errors
    /// When the control thread cannot be started.
    pub(crate) fn connect(net: Arc<Net>, target: Target, opener: Arc<dyn Opener>) -> Result<Arc<Self>> {
        let now = Instant::now();
        let deadline = now + net.config.connect_timeout;
        Self::start(net, Connect { target, opener }, deadline, Begin { at: now, epoch: 0, tries: 0, claims: false })
    }
}

impl Purpose for Connect {
    fn is_first(&self) -> bool {
        true
    }

    fn is_over(&self) -> bool {
        false
    }

    fn pairs(&self) -> usize {
        self.target.pairs()
    }

    fn route(&self, attempt: u32) -> Option<Route> {
        between(&self.target.rails, &self.target.addresses, 0, attempt)
    }

    fn is_on_other_pair(&self, attempt: u32, _pair: usize) -> bool {
        !(attempt as usize).is_multiple_of(self.target.pairs() * self.target.rails.len().max(1))
    }

    fn patience(&self, attempt: u32) -> Duration {
        tries::first(attempt, self.target.pairs())
    }

    fn traffic_class(&self) -> Option<u8> {
        self.target.traffic_class
    }

    fn features(&self) -> u32 {
        if self.opener.is_bare() { FEATURE_BARE } else { 0 }
    }

    fn intent(&self, _epoch: u16, _tries: u32) -> Result<(Intent, Secret)> {
        let secret = &self.target.secret;
        Ok((Intent::Connect { listener: secret.listener_id() }, secret.clone()))
    }

    fn addresses(&self, net: &Net) -> Vec<SocketAddr> {
        net.addresses(&self.target.rails)
    }

    fn reached(&self, _net: &Arc<Net>, proved: Proved) -> Result<Reached> {
        let Proved { welcome, key, features, keys, sock, .. } = proved;
        let seal = Seal::of(features, keys)?;
        let link = Link {
            connection: welcome.connection,
            key,
            features,
            remote: welcome.rails,
            local: Arc::clone(&self.target.rails),
            traffic_class: self.target.traffic_class,
            round_trip: liveness::distance(&sock),
        };
        let address = sock.peer_addr().ok().and_then(|address| address.as_socket());
        let peer = Peer { label: welcome.label, address: address.unwrap_or(self.target.addresses[0]) };
        tracing::debug!(target: NET, "connected to {peer}");
        let conn = self.opener.open(Handed { link, peer, sock, seal })?;
        Ok(conn.map_or(Reached::TakenOver, |conn| Reached::Stream { conn, index: 0, settles: false }))
    }

    fn explain(&self, error: Error, config: &Config) -> Error {
        explain::explain(error, &self.target, config)
    }
}
