//! What the process has once: devices, tables of everything that NCCL holds handles of, the backends.
//!
//! A forked child gets a fresh one. Its parent's threads do not exist there, its parent's descriptors are closed by
//! the fork handler, and its parent's handles name nothing.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::comm::Comm;
use super::context::Context;
use super::devices::{self, Table as Devices};
use super::facade::InitArgs;
use crate::engine::handle::{Handle, Kind};
use crate::engine::table::Table;
use crate::os::config::{Backend, Config};
use crate::os::error::{Error, Result};
use crate::os::{fork, log};
use crate::tcp::net::Net;

/// Everything that lives as long as the process.
pub struct Process {
    generation: u32,
    /// Physical and virtual devices.
    pub devices: Devices,
    /// Listening, sending and receiving communicators.
    pub comms: Table<Comm>,
    /// Contexts.
    pub contexts: Table<Context>,
    net: OnceLock<Arc<Net>>,
    default_context: AtomicUsize,
    registrations: AtomicU32,
    initialising: Mutex<()>,
}

/// A cache line of its own: it is read in every call, and its neighbours would be counters that every call writes.
#[repr(align(128))]
struct Lonely(AtomicPtr<Process>);

static PROCESS: Lonely = Lonely(AtomicPtr::new(std::ptr::null_mut()));

/// The process's state, made on first use and never freed.
pub fn process() -> &'static Process {
    let now = fork::generation();
    let current = PROCESS.0.load(Ordering::Acquire);
    // SAFETY: a non-null pointer comes from `Box::into_raw` below and is never freed.
    if let Some(process) = unsafe { current.as_ref() }
        && process.generation == now
    {
        return process;
    }
    let fresh = Box::into_raw(Box::new(Process::new(now)));
    match PROCESS.0.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: it was just made and now belongs to the static, which never frees it.
        Ok(_) => unsafe { &*fresh },
        Err(other) => {
            // SAFETY: nobody else has seen `fresh`.
            drop(unsafe { Box::from_raw(fresh) });
            // SAFETY: another thread put it there a moment ago, by the same means.
            unsafe { &*other }
        }
    }
}

impl Process {
    fn new(generation: u32) -> Self {
        Self {
            generation,
            devices: Devices::new(),
            comms: Table::new(Kind::Comm),
            contexts: Table::new(Kind::Context),
            net: OnceLock::new(),
            default_context: AtomicUsize::new(0),
            registrations: AtomicU32::new(1),
            initialising: Mutex::new(()),
        }
    }

    /// NCCL's `init`: reads the configuration, finds the devices, starts a context.
    ///
    /// # Errors
    /// When no interface can be used.
    pub fn init(args: &InitArgs) -> Result<usize> {
        let process = process();
        let _one_at_a_time = process.initialising.lock().unwrap_or_else(PoisonError::into_inner);
        let (config, complaints) = Config::from_env();
        log::set_logger(args.logger, config.log);
        if config.backend == Backend::Rdma {
            return Err(Error::usage(
                "TOWLINE_BACKEND=rdma asks for the RDMA backend, which this release does not have yet",
            )
            .with_hint("unset TOWLINE_BACKEND to run over TCP"));
        }
        let first = process.net.get().is_none();
        if first {
            for complaint in &complaints {
                tracing::warn!(target: log::ENV, "{complaint}");
            }
        }
        // From v11 on every communicator calls this, and the numbers of virtual devices must stay while one lives.
        if args.api < 11 || process.contexts.is_empty() {
            let found = devices::discover(&config)?;
            if first {
                tracing::info!(
                    "{} {}, interface v{}, TCP backend",
                    env!("CARGO_PKG_NAME"),
                    env!("CARGO_PKG_VERSION"),
                    args.api
                );
                tracing::info!(target: log::NET, "{found}");
                for warning in &found.warnings {
                    tracing::warn!(target: log::NET, "{warning}");
                }
            }
            process.devices.load(found.plans);
        }
        let net = process.net.get_or_init(|| Net::new(config));
        if first {
            tracing::info!(
                target: log::NET,
                "up to {} streams per connection, {} worker threads when needed, recovery {}",
                net.streams_per_connection(1),
                net.poller.limit(),
                if net.config.recovery { "on" } else { "off" },
            );
        }
        let context = Arc::new(Context::new(args.comm_id.unwrap_or(0), args.traffic_class));
        if args.api < 11 {
            return process.default_context_for(context);
        }
        Ok(process.contexts.insert(context)?.encode())
    }

    /// Before v11 there is one context for the process: `init` has no way to name another.
    fn default_context_for(&self, context: Arc<Context>) -> Result<usize> {
        let current = self.default_context.load(Ordering::Acquire);
        if current != 0 && self.contexts.get(current).is_ok() {
            return Ok(current);
        }
        let fresh = self.contexts.insert(context)?.encode();
        self.default_context.store(fresh, Ordering::Release);
        Ok(fresh)
    }

    /// The context that a call belongs to.
    ///
    /// # Errors
    /// When it has ended, or `init` was never called.
    pub fn context(&self, ctx: Option<usize>) -> Result<Arc<Context>> {
        match ctx.unwrap_or_else(|| self.default_context.load(Ordering::Acquire)) {
            0 => Err(Error::usage("the plugin was not initialised in this process")
                .with_hint("NCCL cannot be used in a child made by fork; start a new process")),
            ctx => self.contexts.get(ctx),
        }
    }

    /// A context was ended by NCCL.
    pub fn context_ended(&self, _ctx: usize) {
        if self.contexts.is_empty() {
            // NCCL may unload itself now, and its logger with it.
            log::forget_logger();
        }
    }

    /// The TCP backend.
    ///
    /// # Errors
    /// When `init` was never called in this process.
    pub fn net(&self) -> Result<&Arc<Net>> {
        self.net.get().ok_or_else(|| Error::usage("the plugin was not initialised in this process"))
    }

    /// A value for a memory registration, which sockets do not need.
    pub fn next_registration(&self) -> usize {
        let generation = self.registrations.fetch_add(1, Ordering::Relaxed);
        Handle { kind: Kind::Memory, index: 0, slot: 0, generation }.encode()
    }
}
