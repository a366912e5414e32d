//! The library as its users load it: layouts, exported tables, one-sided operations, FlagCX.

#[path = "../support/mod.rs"]
mod support;

mod exports;
mod flagcx;
mod host;
mod layout;
mod rma;
mod rma_cuda;
mod rma_ends;
