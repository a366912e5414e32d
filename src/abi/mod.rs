//! The C boundary: what NCCL sees of us, and all that we see of NCCL's raw pointers.
//!
//! One file per version of NCCL's net interface ([`v4`] to [`v12`]). Each file describes what its version changed,
//! holds the functions that came with it, and exports its table `ncclNetPlugin_vN`. A function that a version has in
//! common with an older one stays in the older one's file, so a table reads as a history. All of them do the same three
//! things and nothing else: check and translate arguments (`pointer`), make one call of [`crate::plugin::facade`],
//! translate the answer (`guard`, `result`).
//!
//! # What NCCL promises, and what it does not
//!
//! The `// SAFETY:` comments of this room rest on *NCCL's promise*: a pointer argument is null or points to memory of
//! the documented type and length. The memory stays valid, and no other thread uses it, until the call returns. Nothing
//! else is taken on trust. Some arguments are answered with an error: null where a value is needed, negative sizes, too
//! many parts, and connections, registrations and requests that are not (or no longer) ours. The handles that we give
//! to NCCL are numbers dressed as pointers and are never dereferenced.
//!
//! No panic crosses into C, and every failure is logged once, here.

pub(crate) mod flagcx;
mod guard;
mod pointer;
pub mod profiler;
mod properties;
mod result;
pub(crate) mod rma;
mod table;
#[cfg(test)]
mod tests;
mod transfer;
pub(crate) mod tuner;
pub(crate) mod v10;
pub(crate) mod v11;
pub mod v12;
pub(crate) mod v4;
pub(crate) mod v5;
pub(crate) mod v6;
pub(crate) mod v7;
pub(crate) mod v8;
pub(crate) mod v9;
