//! `rdma-sys` 0.3.0 with its bindings committed: see the README beside `Cargo.toml`.

#![allow(non_snake_case, non_camel_case_types, non_upper_case_globals)]
#![allow(missing_docs, unused_imports, clippy::all)]

use libc::*;

include!("bindings.rs");

mod layout;
mod opcode;
mod types;
mod verbs;

pub use self::opcode::*;
pub use self::types::*;
pub use self::verbs::*;
