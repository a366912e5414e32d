//! The RDMA backend: RoCE and InfiniBand through libibverbs.
//!
//! libibverbs is opened at run time ([`dl`]), so the same library serves machines without it. Above it stand verbs
//! objects that own what they stand for ([`verbs`]); above those, what does not depend on a connection:
//!
//! | module | holds |
//! |---|---|
//! | [`dl`] | libibverbs: its functions by name and symbol version |
//! | [`verbs`] | contexts, protection domains, memory regions, completion queues, queue pairs, work requests |
//! | [`hca`] | which devices and ports `NCCL_IB_HCA` means |
//! | [`devices`] | the usable ports of this host, and what NCCL is told of them |
//! | [`sysfs`] | what the kernel says of a device: PCI path, rate, GID types, peer memory |
//! | [`gid`] | which GID of a port stands for it on the network |
//! | [`mr_cache`] | registrations shared by page range |
//!
//! Guarantee: nothing here is a load-time need of the library. On a machine without libibverbs or without devices,
//! discovery says so in one sentence and finds none.
//!
//! This room must not know TCP's streams, nor NCCL's structs.

pub mod devices;
pub mod dl;
pub mod gid;
pub mod hca;
pub mod mr_cache;
pub mod sysfs;
pub mod verbs;
