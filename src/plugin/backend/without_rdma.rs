//! The RDMA backend of a library that was built without it: it never exists.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use super::{Attempt, Backend, Listening};
use crate::os::config::{self, Config};
use crate::os::error::{Error, Result};
use crate::plugin::devices::{Binding, Plan};
use crate::session::dialer::Target;
use crate::session::net::Net;

/// No value of this type exists.
pub(crate) struct Rdma(Infallible);

/// # Errors
/// When the configuration requires RDMA.
pub(crate) fn find(config: &Config) -> Result<Option<Rdma>> {
    if config.backend == config::Backend::Rdma {
        return Err(Error::usage("TOWLINE_BACKEND=rdma asks for the RDMA backend, which this build does not have")
            .with_hint("build with the feature `rdma`, or unset TOWLINE_BACKEND to run over TCP"));
    }
    Ok(None)
}

impl Rdma {
    /// The devices.
    pub(crate) fn plans(&self, _interfaces: &[Plan]) -> Vec<Plan> {
        match self.0 {}
    }
}

impl Backend for Rdma {
    fn listen(&self, _: &Arc<Net>, _: &Binding, _: Option<u8>) -> Result<(Box<dyn Listening>, Vec<SocketAddr>)> {
        match self.0 {}
    }

    fn connect(&self, _: &Arc<Net>, _: &Binding, _: Target) -> Result<Arc<dyn Attempt>> {
        match self.0 {}
    }
}
