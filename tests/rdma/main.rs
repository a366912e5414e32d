//! The RDMA backend. Ignored tests need the machine of `tests/rdma_vm`.

#[path = "../support/mod.rs"]
mod support;

mod attributes;
mod events;
mod faults;
mod mend;
mod net;
mod personalities;
mod vanish;
mod without;
