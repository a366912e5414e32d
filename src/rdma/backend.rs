//! The RDMA backend of the process: its adapters, found once.
//!
//! Ports that appear later are not seen until the process is restarted; a port that goes down and comes back is.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use super::adapter::{Adapter, Adapters};
use super::devices::{Discovery, discover};
use super::events::Events;
use super::greeting::{Attempt, Listening};
use crate::os::config::{Backend, Config, TABLE};
use crate::os::error::{Error, Result};
use crate::os::interfaces::Rail;
use crate::os::log::NET;
use crate::session::dialer::Target;
use crate::session::net::Net;

/// The process's state for RDMA.
pub(crate) struct Rdma {
    /// The usable ports, in NCCL's order; at least one.
    pub adapters: Vec<Arc<Adapter>>,
    /// The line for the log.
    pub summary: String,
    groups: Mutex<HashMap<Vec<usize>, Adapters>>,
    returns_events: bool,
    /// None while the devices are not watched.
    events: Mutex<Option<Events>>,
}

/// Why a process with this configuration uses TCP whatever ports there are; None when it would use RDMA.
pub(crate) fn ruled_out(config: &Config) -> Option<&'static str> {
    match config.backend {
        Backend::Tcp => Some("TOWLINE_BACKEND=tcp"),
        Backend::Auto if config.ib_disable => Some("NCCL_IB_DISABLE=1"),
        // RDMA does not encrypt, so encryption takes precedence.
        Backend::Auto if config.key_file.is_some() => {
            Some("TOWLINE_KEY_FILE asks for encryption, which RDMA does not have")
        }
        Backend::Auto | Backend::Rdma => None,
    }
}

/// The variables of NCCL's IB transport among these that Towline does not support; None when there is none.
fn without_effect(names: impl Iterator<Item = String>) -> Option<String> {
    let is_known = |name: &String| TABLE.iter().any(|variable| variable.name == name);
    let mut names: Vec<String> = names.filter(|name| name.starts_with("NCCL_IB_") && !is_known(name)).collect();
    names.sort();
    (!names.is_empty()).then(|| names.join(", "))
}

impl Rdma {
    /// Finds the ports. Also returns warnings for the user.
    ///
    /// # Errors
    /// The reason why there is none.
    pub(crate) fn find(config: &Config) -> Result<(Self, Vec<String>)> {
        let found = discover(config)?;
        let Discovery { ports, peer_memory, warnings, foreign } = found.clone();
        let relaxed = config.ib_pci_relaxed_ordering.0 != 0;
        let adapters = ports
            .into_iter()
            .zip(0..)
            .map(|(port, number)| Adapter::new(number, port, peer_memory, relaxed).map(Arc::new))
            .collect::<Result<Vec<_>>>()?;
        if adapters.is_empty() {
            let named = config.ib_hca.as_deref().map(|hca| format!(" (NCCL_IB_HCA is {hca})")).unwrap_or_default();
            let why: String = foreign.iter().chain(&warnings).map(|why| format!("; {why}")).collect();
            return Err(Error::usage(format!("there is no usable RDMA port{named}{why}")));
        }
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        if let Some(names) = without_effect(names) {
            tracing::info!(target: NET, "set, and without effect in Towline: {names}");
        }
        foreign.iter().for_each(|port| tracing::info!(target: NET, "{port}"));
        let rdma = Self {
            adapters,
            summary: found.to_string(),
            groups: Mutex::default(),
            returns_events: config.ib_async_events,
            events: Mutex::default(),
        };
        Ok((rdma, warnings))
    }

    /// The adapters with these indices: the same list each time, so that a registration is recognised quickly.
    pub(crate) fn group(&self, indices: &[usize]) -> Adapters {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let made = || indices.iter().filter_map(|index| self.adapters.get(*index).cloned()).collect();
        Arc::clone(groups.entry(indices.to_vec()).or_insert_with(made))
    }

    /// Makes the control thread watch the devices from now on. For the first connection, so that a process that only
    /// reads properties starts no thread.
    fn watch_events(&self, net: &Net) {
        // Locked throughout: several threads may make the first connections at the same time.
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.is_some() {
            return;
        }
        match Events::watch(&net.poller, &self.adapters, self.returns_events) {
            Ok(watched) => *events = Some(watched),
            Err(error) => tracing::warn!(target: NET, "events of RDMA devices stay unseen: {error}"),
        }
    }

    /// Starts to listen on a device: handshakes arrive over the interfaces `rails`.
    ///
    /// # Errors
    /// When nothing can be bound to the first of them.
    pub(crate) fn listen(
        &self,
        net: &Arc<Net>,
        adapters: Adapters,
        rails: Arc<[Rail]>,
        traffic_class: Option<u8>,
    ) -> Result<(Listening, Vec<SocketAddr>)> {
        self.watch_events(net);
        Listening::open(net, adapters, rails, traffic_class)
    }

    /// Starts to connect.
    ///
    /// # Errors
    /// When the control thread cannot be started.
    pub(crate) fn connect(&self, net: &Arc<Net>, adapters: Adapters, target: Target) -> Result<Arc<Attempt>> {
        self.watch_events(net);
        Attempt::start(Arc::clone(net), adapters, target)
    }
}

impl fmt::Debug for Rdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rdma").field("adapters", &self.adapters).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of NCCL 2.32's IB transport: honoured, or named.
    #[test]
    fn every_variable_of_the_ib_transport_is_honoured_or_named() {
        let honoured = "ADAPTIVE_ROUTING ADDR_FAMILY ADDR_RANGE AR_THRESHOLD DEVICE_PCI_ORDER DISABLE ECE_ENABLE FIFO_TC \
            GID_INDEX HCA MERGE_NICS MERGE_VFS MQP_RETRY_ALL MQP_RETRY_CNT MQP_RETRY_SLEEP_MSEC PCI_RELAXED_ORDERING PKEY \
            QPS_PER_CONNECTION QUERY_PORT_SPEED RETRY_CNT RETURN_ASYNC_EVENTS ROCE_VERSION_NUM ROUTABLE_FLID_GID_INDEX SL \
            SPLIT_DATA_ON_QPS TC TIMEOUT";
        let named = "DATA_DIRECT OOO_RQ PREPOST_RECEIVE_WORK_REQUESTS RECEIVER_SIDE_MATCHING_SCHEME \
            RESILIENCY_PORT_FAILOVER RESILIENCY_PORT_RECOVERY SUBNET_AWARE_ROUTING SUBNET_PREFIX_LEN USE_INLINE \
            WARN_RAIL_LOCAL";
        let names = |list: &str| list.split_whitespace().map(|name| format!("NCCL_IB_{name}")).collect::<Vec<_>>();
        assert_eq!(without_effect(names(honoured).into_iter()), None);
        assert_eq!(without_effect(names(named).into_iter()), Some(names(named).join(", ")));
        assert_eq!(without_effect(["TOWLINE_RAILS", "NCCL_DEBUG"].map(str::to_owned).into_iter()), None);
    }

    #[test]
    fn who_asks_for_tcp_or_encryption_gets_no_rdma_unless_it_is_named() {
        let why = |pairs: &[(&'static str, &'static str)]| ruled_out(&Config::from_pairs(pairs.iter().copied()).0);
        let (disabled, key) = (("NCCL_IB_DISABLE", "1"), ("TOWLINE_KEY_FILE", "/key"));
        assert_eq!(why(&[]), None);
        assert_eq!(why(&[("TOWLINE_BACKEND", "tcp")]), Some("TOWLINE_BACKEND=tcp"));
        assert_eq!(why(&[disabled]), Some("NCCL_IB_DISABLE=1"));
        assert!(why(&[key]).is_some_and(|why| why.contains("TOWLINE_KEY_FILE")));
        assert_eq!(why(&[("TOWLINE_BACKEND", "rdma"), disabled]), None);
    }
}
