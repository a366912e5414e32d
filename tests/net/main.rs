//! The network plugin through its exported C tables, as NCCL drives it.

#[path = "../support/mod.rs"]
mod support;

mod abort;
mod clock;
mod deregister;
mod descriptors;
mod devices;
mod dropped;
mod events;
mod fabric;
mod faults;
mod fork;
mod hostile;
mod interfaces;
mod lifecycle;
mod netns;
mod ordering;
mod paths;
mod placement;
mod pressure;
mod protocol;
mod routes;
mod scale;
mod seal;
mod selection;
mod situations;
mod slow;
mod spread;
mod traffic_class;
mod vanish;
mod verdict;
mod versions;
mod wire_compat;
