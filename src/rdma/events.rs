//! Asynchronous events of devices: they concern a port, a device or a queue, and no work request.
//!
//! The control thread reads them. A port that goes down is remembered, so that a request that fails later can mention
//! it. A failed device ends its connections, and a failed queue its own one, unless `NCCL_IB_RETURN_ASYNC_EVENTS=0`
//! requests only a log line. Events that may concern connections are logged as warnings: the port has lost the GID in
//! use, or its LID, its partitions or a path have changed. Events of a healthy fabric, such as another subnet manager
//! or the GID of an unused address, are logged at INFO.

use std::sync::Arc;

use super::adapter::Adapter;
use super::devices::gid_table;
use super::sysfs::RdmaSysfs;
use super::verbs::{AsyncEvent, Context};
use crate::engine::poller::{Interest, Poller, Progress, Registration, Source};
use crate::os::error::{Error, Result};
use crate::os::log::NET;

/// The meaning of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// The port with this number went down.
    PortDown(u64),
    /// The port with this number came back.
    PortUp(u64),
    /// The whole device has failed for good.
    DeviceDead,
    /// The queue pair or completion queue with this address has failed. Its work requests report it, if they can.
    QueueFailed(u64),
    /// The GIDs of the port with this number have changed: perhaps the one in use, perhaps that of an unused address.
    GidsChanged(u64),
    /// Parameters with which connections were set up may have changed.
    GroundShifted,
    /// Only logged.
    Noted,
}

/// `IBV_EVENT_*` by number, as `infiniband/verbs.h` has them.
fn meaning(event: &AsyncEvent) -> Meaning {
    match event.kind {
        // CQ_ERR, QP_FATAL, QP_REQ_ERR, QP_ACCESS_ERR
        0..=3 => Meaning::QueueFailed(event.element),
        // PATH_MIG, PATH_MIG_ERR, LID_CHANGE, PKEY_CHANGE
        6 | 7 | 11 | 12 => Meaning::GroundShifted,
        8 => Meaning::DeviceDead,
        9 => Meaning::PortUp(event.element),
        10 => Meaning::PortDown(event.element),
        18 => Meaning::GidsChanged(event.element),
        _ => Meaning::Noted,
    }
}

/// The control thread's monitor of the devices. Dropping it ends the watch.
pub(crate) struct Events(#[allow(dead_code, reason = "held until it is dropped")] Vec<Registration>);

impl Events {
    /// Watches the devices of these adapters.
    ///
    /// # Errors
    /// When there is no control thread, or a device's descriptor cannot be watched.
    pub(crate) fn watch(poller: &Poller, adapters: &[Arc<Adapter>], fails: bool) -> Result<Self> {
        let mut contexts: Vec<&Context> = Vec::new();
        for adapter in adapters {
            let context = &adapter.open.context;
            if !contexts.iter().any(|known| known.name() == context.name()) {
                contexts.push(context);
            }
        }
        let watch = |context: &Context| {
            context.set_events_nonblocking()?;
            let name = context.name();
            let of_device = adapters.iter().filter(|adapter| adapter.open.port.device == name).cloned();
            let source = Watch { context: context.clone(), adapters: of_device.collect(), fails };
            let registration =
                poller.control_thread()?.register(Arc::new(source), Some((context.async_fd(), Interest::Read)))?;
            registration.kick();
            Ok(registration)
        };
        contexts.into_iter().map(watch).collect::<Result<_>>().map(Self)
    }
}

/// The monitor of one device.
pub(super) struct Watch {
    pub(super) context: Context,
    /// Its ports.
    pub(super) adapters: Vec<Arc<Adapter>>,
    /// Whether fatal events fail connections, instead of being only logged.
    pub(super) fails: bool,
}

impl Watch {
    pub(super) fn take(&self, event: &AsyncEvent) {
        let device = self.context.name();
        let meaning = meaning(event);
        let of_port = |number: u64| self.adapters.iter().filter(move |a| u64::from(a.open.port.number) == number);
        match meaning {
            Meaning::PortDown(number) => {
                of_port(number).for_each(|adapter| adapter.set_port_down(true));
                tracing::warn!(
                    target: NET,
                    "port {number} of {device} went down; connections use their other ports or, where they have none, wait for it as long as NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT allow"
                );
            }
            Meaning::PortUp(number) => {
                of_port(number).for_each(|adapter| adapter.set_port_down(false));
                tracing::info!(target: NET, "port {number} of {device} is up");
            }
            Meaning::DeviceDead => {
                tracing::error!(target: NET, "the RDMA device {device} failed ({}); look at the kernel's log", event.text);
                if self.fails {
                    self.adapters.iter().for_each(|adapter| adapter.set_dead());
                }
            }
            Meaning::QueueFailed(queue) => {
                if self.fails {
                    for adapter in &self.adapters {
                        adapter.queue_failed(queue, event.text);
                    }
                }
                tracing::warn!(target: NET, "{device} reports {} of a queue; its transfers say which", event.text);
            }
            Meaning::GidsChanged(number) => {
                tracing::info!(target: NET, "{device} reports {} of port {number}", event.text);
                of_port(number).for_each(|adapter| self.look_for_gid(adapter));
            }
            Meaning::GroundShifted => tracing::warn!(
                target: NET,
                "{device} reports {}; connections were set up with what held before, and may fail",
                event.text
            ),
            Meaning::Noted => tracing::info!(target: NET, "{device} reports {}", event.text),
        }
    }

    /// Whether a port still has the GID with which its connections were set up.
    fn look_for_gid(&self, adapter: &Adapter) {
        let open = &adapter.open;
        let table = gid_table(&self.context, open.port.number, open.facts.gid_count, &RdmaSysfs::default());
        let index = open.chosen().index_in(&table);
        let before = adapter.set_gid_index(index);
        if before.is_some() == index.is_some() {
            return;
        }
        let (name, gid) = (adapter.name(), super::gid::display(&open.gid));
        if index.is_none() {
            tracing::warn!(
                target: NET,
                "{name} has lost GID {gid}, with which its connections were set up; they may fail until its address is back"
            );
        } else {
            tracing::info!(target: NET, "{name} has GID {gid} again");
        }
    }
}

impl Source for Watch {
    fn poll(&self) -> Progress {
        let mut moved = false;
        while self.context.next_event(|event| self.take(&event)).is_some() {
            moved = true;
        }
        Progress { moved, again: None }
    }

    fn fail(&self, error: Error) {
        tracing::error!(target: NET, "watching {} failed: {error}", self.context.name());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_mean_what_verbs_h_says() {
        let of = |kind| meaning(&AsyncEvent { kind, text: "", element: 2 });
        assert_eq!(of(8), Meaning::DeviceDead);
        assert_eq!((of(9), of(10)), (Meaning::PortUp(2), Meaning::PortDown(2)));
        assert!((0..=3).all(|kind| of(kind) == Meaning::QueueFailed(2)));
        // PATH_MIG, PATH_MIG_ERR, LID_CHANGE, PKEY_CHANGE; GID_CHANGE
        assert!([6, 7, 11, 12].into_iter().all(|kind| of(kind) == Meaning::GroundShifted));
        assert_eq!(of(18), Meaning::GidsChanged(2));
        // COMM_EST, SQ_DRAINED, SM_CHANGE, CLIENT_REREGISTER, and one that is not known yet
        assert!([4, 5, 13, 17, 99].into_iter().all(|kind| of(kind) == Meaning::Noted));
    }
}
