//! The RDMA backend: RoCE and InfiniBand through libibverbs.
//!
//! libibverbs is opened at run time ([`dl`]), so the same library works on machines without it. Above it are verbs
//! objects that own their resources ([`verbs`]). Above those are the modules that do not depend on a connection:
//!
//! | module | holds |
//! |---|---|
//! | [`dl`] | libibverbs: its functions by name and symbol version |
//! | [`verbs`] | contexts, protection domains, memory regions, completion queues, queue pairs, work requests |
//! | [`hca`] | which devices and ports `NCCL_IB_HCA` selects |
//! | [`devices`] | the usable ports of this host, and their properties for NCCL |
//! | [`trial`] | whether a port, and the limit on locked memory, allow connections |
//! | [`sysfs`] | what the kernel reports about a device: PCI path, rate, GID types, peer memory |
//! | [`gid`] | which GID of a port is used on the network |
//! | [`mr_cache`] | registrations shared by page range |
//! | [`pages`] | registered memory of Towline's own |
//!
//! Then the modules that move data. The first three do no I/O:
//!
//! | module | holds |
//! |---|---|
//! | [`mod@cts`] | clear-to-send entries, and the content of an immediate |
//! | [`matching`] | which send answers which CTS entry |
//! | [`stripe`] | how a message is divided over queue pairs and devices |
//! | [`eager`] | short messages that do not wait for a CTS entry |
//! | [`receives`] | the parts of receives that have not ended |
//! | [`adapter`] | a port as the process uses it, and registrations of NCCL's memory |
//! | [`fabric`] | the queue pairs and completion queues of a connection |
//! | [`base`] | what both directions have in common, and the control channel |
//! | [`connection`] | a connection: the lock of its state, and which thread takes it |
//! | [`sender`], [`receiver`] | what each direction adds |
//! | [`flush`] | making received bytes visible to the GPU |
//! | [`recovery`], [`outage`], [`ledger`], [`silence`], [`relapse`] | recovery when a queue pair is lost or falls silent |
//! | [`trouble`] | the meaning of a failed work request |
//! | [`control`], [`sent_frames`], [`reconnect`] | the control channel, and another socket for it |
//! | [`record`], [`greeting`], [`linking`], `relink`, `aside` | getting connected |
//! | [`alarm`] | how a thread asks for care without the connection's lock |
//! | [`events`] | asynchronous events of devices |
//! | [`backend`] | all of it for the process |
//!
//! Connections are made by the handshake of [`session`](crate::session), whose socket becomes their control channel
//! ([`opening`](crate::session::opening)).
//!
//! Guarantee: the library needs none of this at load time. On a machine without libibverbs or without devices,
//! discovery reports that in one sentence and finds none.
//!
//! This room must not know TCP's streams, nor NCCL's structs.

pub(crate) mod adapter;
pub(crate) mod alarm;
mod aside;
pub(crate) mod backend;
pub(crate) mod base;
pub(crate) mod connection;
pub(crate) mod control;
pub(crate) mod cts;
pub(crate) mod devices;
pub(crate) mod dl;
pub(crate) mod eager;
pub(crate) mod events;
pub(crate) mod fabric;
pub(crate) mod flush;
pub(crate) mod gid;
pub(crate) mod greeting;
#[cfg(test)]
mod harness;
pub(crate) mod hca;
pub(crate) mod ledger;
pub(crate) mod linking;
pub(crate) mod matching;
pub(crate) mod mr_cache;
pub(crate) mod outage;
pub(crate) mod pages;
pub(crate) mod receiver;
pub(crate) mod receives;
pub(crate) mod reconnect;
pub(crate) mod record;
pub(crate) mod recovery;
pub(crate) mod relapse;
mod relink;
pub(crate) mod sender;
pub(crate) mod sent_frames;
pub(crate) mod silence;
pub(crate) mod stripe;
pub(crate) mod sysfs;
#[cfg(test)]
mod tests;
pub(crate) mod trial;
pub(crate) mod trouble;
pub(crate) mod verbs;
