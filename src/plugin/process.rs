//! The state that exists once per process: devices, tables of everything that NCCL holds handles of, the backends.
//!
//! A forked child gets a fresh one. Its parent's threads do not exist there, the fork handler has closed its parent's
//! descriptors, and its parent's handles are invalid.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::backend::Backends;
use super::comm::Comm;
use super::context::{Context, Host, InitArgs};
use super::devices::{self, MergePolicy, Plan, Table as Devices};
use super::listener;
use super::tuning::Scope;
use crate::engine::handle::Kind;
use crate::engine::poller::panic_text;
use crate::engine::table::Table;
use crate::os::config::{Complaint, Config, KeyFile};
use crate::os::error::{Error, Result};
use crate::os::key_file::{Purpose, SharedKey};
use crate::os::{fork, log};
use crate::session::acceptor;
use crate::session::net::Net;

/// Everything that exists as long as the process.
pub(crate) struct Process {
    generation: u32,
    /// Physical and virtual devices.
    pub devices: Devices,
    /// Listening, sending and receiving communicators.
    pub comms: Table<Comm>,
    /// Contexts.
    pub contexts: Table<Context>,
    /// The backend that carries the data.
    pub backends: Backends,
    net: OnceLock<Arc<Net>>,
    default_context: AtomicUsize,
    /// Towline declined a communicator's one-sided operations. After that NCCL does not request them for any
    /// communicator.
    pub(crate) one_sided_declined: AtomicBool,
    initialising: Mutex<()>,
}

/// A cache line of its own: it is read in every call, and would otherwise share the line with counters that every call
/// writes.
#[repr(align(128))]
struct Lonely(AtomicPtr<Process>);

static PROCESS: Lonely = Lonely(AtomicPtr::new(std::ptr::null_mut()));

/// The process's state, made on first use and never freed.
pub(crate) fn process() -> &'static Process {
    let now = fork::generation();
    let current = PROCESS.0.load(Ordering::Acquire);
    // SAFETY: a non-null pointer comes from `Box::into_raw` below and is never freed.
    if let Some(process) = unsafe { current.as_ref() }
        && process.generation == now
    {
        return process;
    }
    make(current, now)
}

/// Out of line: the tables are built on the stack first, and a frame of their size would be touched page by page in
/// every call of [`process`].
#[cold]
#[inline(never)]
fn make(current: *mut Process, now: u32) -> &'static Process {
    let fresh = Box::into_raw(Box::new(Process::new(now)));
    match PROCESS.0.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: it was just made and now belongs to the static, which never frees it.
        Ok(_) => unsafe { &*fresh },
        Err(other) => {
            // SAFETY: no other thread has seen `fresh`.
            drop(unsafe { Box::from_raw(fresh) });
            // SAFETY: another thread put it there a moment ago, in the same way.
            unsafe { &*other }
        }
    }
}

fn on_or_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

impl Process {
    fn new(generation: u32) -> Self {
        Self {
            generation,
            devices: Devices::new(),
            comms: Table::new(Kind::Comm),
            contexts: Table::new(Kind::Context),
            backends: Backends::default(),
            net: OnceLock::new(),
            default_context: AtomicUsize::new(0),
            one_sided_declined: AtomicBool::new(false),
            initialising: Mutex::new(()),
        }
    }

    /// NCCL's `init`: reads the configuration, finds the devices, starts a context.
    ///
    /// Where the user requires encryption this does not fail. NCCL disables a plugin whose `init` fails and uses its
    /// own InfiniBand or Socket transport, which do not encrypt (`plugin/net.cc`). So a failure is kept, and every
    /// `listen` and `connect` of the context fails with it: the job ends instead of running unencrypted.
    ///
    /// # Errors
    /// When no interface can be used.
    pub(crate) fn init(args: &InitArgs) -> Result<usize> {
        let process = process();
        let _one_at_a_time = process.initialising.lock().unwrap_or_else(PoisonError::into_inner);
        let (config, complaints) = Config::from_env();
        // FlagCX has no log. Beside NCCL's contexts NCCL's logger stays.
        if args.host == Host::Nccl || process.contexts.is_empty() {
            log::set_logger(args.logger, config.log);
        }
        process.start_or_refuse(args, &config, || process.start(args, &config, &complaints))
    }

    /// Keeps the promise of [`Process::init`] whatever goes wrong: a defect of Towline must not lead to an unencrypted
    /// job either.
    fn start_or_refuse(
        &self,
        args: &InitArgs,
        config: &Config,
        start: impl FnOnce() -> Result<usize>,
    ) -> Result<usize> {
        if config.key_file.is_none() {
            return start();
        }
        // After a panic only state that protects itself is used again: poisoned locks are taken anyway.
        let started = catch_unwind(AssertUnwindSafe(start))
            .unwrap_or_else(|payload| Err(Error::internal(format!("a defect of Towline: {}", panic_text(&*payload)))));
        started.or_else(|error| self.refuse(args, config, error))
    }

    /// A context that makes no connection, and at least one device, so that NCCL stays with this plugin.
    fn refuse(&self, args: &InitArgs, config: &Config, error: Error) -> Result<usize> {
        tracing::warn!("no connections will be made, because TOWLINE_KEY_FILE asks for encryption: {error}");
        if self.devices.properties(0).is_err() {
            let found = catch_unwind(AssertUnwindSafe(|| devices::discover(config)));
            let plans = found.ok().and_then(Result::ok).map(|found| found.plans);
            self.devices.load(plans.unwrap_or_else(|| vec![Plan::stand_in()]));
        }
        self.keep(args, Context::refusing(args, error))
    }

    fn start(&self, args: &InitArgs, config: &Config, complaints: &[Complaint]) -> Result<usize> {
        let process = self;
        let first = process.net.get().is_none();
        if first {
            for complaint in complaints {
                tracing::warn!(target: log::ENV, "{complaint}");
            }
        }
        let key = process.key(config)?;
        // From v11 on every communicator calls this, and the numbers of virtual devices must stay while one exists;
        // FlagCX calls it in addition. Before the first success no context makes connections.
        let is_alone = process.contexts.is_empty() || first;
        if is_alone || args.api < 11 && args.host == Host::Nccl {
            let found = devices::discover(config)?;
            let ports = process.backends.rdma_plans(config, &found.plans)?;
            if first {
                tracing::info!(
                    "{} {}, {}, {} backend",
                    env!("CARGO_PKG_NAME"),
                    env!("CARGO_PKG_VERSION"),
                    args.interface(),
                    if ports.is_some() { "RDMA" } else { "TCP" }
                );
                tracing::info!(target: log::NET, "{}{found}", if ports.is_some() { "connecting by sockets: " } else { "" });
                for warning in &found.warnings {
                    tracing::warn!(target: log::NET, "{warning}");
                }
            }
            process.devices.load(ports.unwrap_or(found.plans));
        }
        let net = process.net.get_or_init(|| acceptor::net(config.clone(), key));
        if first {
            tracing::info!(
                target: log::NET,
                "up to {} streams per connection, {} worker threads when needed, recovery {}, checksums {}, encryption {}",
                net.streams_per_connection(1),
                net.poller.limit(),
                on_or_off(net.config.recovery),
                on_or_off(net.config.checksum),
                on_or_off(net.key.is_some()),
            );
        }
        if args.host == Host::Nccl && net.config.rma && self.one_sided_declined.swap(false, Ordering::Relaxed) {
            tracing::warn!(
                "one-sided operations are off in this process: NCCL first asked for those of a communicator that does not use \
                 Towline, and asks no more; make one that does first"
            );
        }
        let listener = listener::new(args.profiler, args.api, net.config.net_events);
        process.keep(args, Context::new(args, listener))
    }

    fn keep(&self, args: &InitArgs, context: Context) -> Result<usize> {
        let context = Arc::new(context);
        if args.api < 11 {
            return self.default_context_for(context);
        }
        Ok(self.contexts.insert(context)?.encode())
    }

    /// The key that the configuration names. It is read at the first `init` and stays: a later `init` must not require
    /// something that the process's connections do not do.
    fn key(&self, config: &Config) -> Result<Option<SharedKey>> {
        let Some(KeyFile(path)) = &config.key_file else { return Ok(None) };
        let Some(net) = self.net.get() else { return SharedKey::load(Path::new(path), Purpose::Connections).map(Some) };
        let hint = "set TOWLINE_KEY_FILE before the first communicator is made, and leave it as it is";
        match &net.key {
            None => Err(Error::usage("TOWLINE_KEY_FILE was set after the process began to connect without a key")
                .with_hint(hint)),
            Some(_) if net.config.key_file == config.key_file => Ok(None),
            Some(key) if SharedKey::load(Path::new(path), Purpose::Connections)? == *key => Ok(None),
            Some(_) => {
                Err(Error::usage("TOWLINE_KEY_FILE was changed to another key after the process began to connect")
                    .with_hint(hint))
            }
        }
    }

    /// Before v11 there is one context for the process: `init` has no way to name another.
    fn default_context_for(&self, context: Arc<Context>) -> Result<usize> {
        let current = self.default_context.load(Ordering::Acquire);
        let refuses = context.refusal().is_some();
        if current != 0 && self.contexts.get(current).is_ok_and(|current| current.refusal().is_some() == refuses) {
            return Ok(current);
        }
        let fresh = self.contexts.insert(context)?.encode();
        self.default_context.store(fresh, Ordering::Release);
        Ok(fresh)
    }

    /// The context in which a connection is to be made.
    ///
    /// # Errors
    /// When it has ended or makes no connections, or `init` was never called.
    pub(crate) fn context(&self, ctx: Option<usize>) -> Result<Arc<Context>> {
        let context = match ctx.unwrap_or_else(|| self.default_context.load(Ordering::Acquire)) {
            0 => {
                return Err(Error::usage("the plugin was not initialised in this process")
                    .with_hint("NCCL cannot be used in a child made by fork; start a new process"));
            }
            ctx => self.contexts.get(ctx)?,
        };
        match context.refusal() {
            Some(error) => Err(error.clone()),
            None => Ok(context),
        }
    }

    /// NCCL has ended a context.
    pub(crate) fn context_ended(&self, _ctx: usize) {
        if self.contexts.is_empty() {
            // NCCL may now unload itself, together with its logger.
            log::forget_logger();
        }
    }

    /// The session layer's shared state, which the TCP backend runs on.
    ///
    /// # Errors
    /// When `init` was never called in this process.
    pub(crate) fn net(&self) -> Result<&Arc<Net>> {
        self.net.get().ok_or_else(|| Error::usage("the plugin was not initialised in this process"))
    }

    /// Merges devices into a virtual one and returns its number.
    ///
    /// # Errors
    /// As [`Devices::make_vdevice`], and when the devices must stay separate.
    pub(crate) fn make_vdevice(&self, members: &[i32]) -> Result<i32> {
        let config = &self.net()?.config;
        let policy = MergePolicy {
            interfaces: config.net_force_merge.is_some() || config.net_merge_level.is_some(),
            ports: config.ib_merge_nics,
            any: config.merge_any,
        };
        self.devices.make_vdevice(members, policy)?.map_err(|why| {
            let refused = Error::usage(why);
            // NCCL uses the single devices: no reason for a warning.
            if refused.report_once() {
                tracing::info!(target: log::NET, "{refused}");
            }
            refused
        })
    }

    /// Whether a context carries the communicator with this id, or any if no id is passed.
    fn carries(&self, comm: Option<u64>) -> bool {
        self.contexts.any(|context| context.carries(comm))
    }

    /// The traffic class of the communicator with this id, whose one-sided operations can use Towline. NCCL calls the
    /// network's `init` before, with the same id.
    ///
    /// # Errors
    /// The reason why they cannot, a sentence for the log.
    pub(crate) fn offers_one_sided(&self, comm: u64) -> std::result::Result<Option<u8>, &'static str> {
        let Some(net) = self.net.get() else { return Err("no communicator of this process uses Towline") };
        if !net.config.rma {
            return Err("TOWLINE_RMA is not 1");
        }
        let class = |context: &Context| context.carries(Some(comm)).then_some(context.traffic_class);
        let Some(class) = self.contexts.find_map(class) else {
            return Err("this communicator does not use Towline");
        };
        if self.backends.rdma().is_some() {
            return Err("they go over TCP only, and the devices are RDMA's");
        }
        // Copies have a stream of the greatest priority, which has a queue of its own where the GPU has three or more.
        // Seen with NCCL 2.30.7 and 2.32.3 on H200: with 1 the first put never ends, with 2 one in a graph, with 3 and
        // more all do.
        if net.config.cuda_queues.as_ref().is_some_and(|queues| matches!(queues.trim().parse(), Ok(1 | 2))) {
            return Err(
                "with CUDA_DEVICE_MAX_CONNECTIONS at 1 or 2 a stream that waits for a signal holds up the copy that \
                        brings it: leave it unset, or set 3 or more",
            );
        }
        Ok(class)
    }

    /// Whether a communicator that is being made gets advice about its collectives: Towline carries its traffic over
    /// TCP, and the user has not switched advice off. `comm` is its id; None where the interface does not pass it.
    ///
    /// NCCL calls the network's `init` before the tuner's, with the same id (v11 and later).
    pub(crate) fn tunes(&self, comm: Option<u64>) -> Option<Scope> {
        let config = &self.net.get()?.config;
        (config.tune && self.carries(comm) && self.backends.rdma().is_none()).then(|| Scope {
            channels: config.nccl_min_nchannels.is_none() && config.nccl_min_ctas.is_none(),
            without_table: config.nccl_algo.is_none() && config.nccl_proto.is_none(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::error::Cause;

    /// NCCL would run unencrypted if `init` failed.
    #[test]
    fn a_panic_in_init_refuses_connections_where_encryption_is_asked_for() {
        let process = Process::new(0);
        let args = InitArgs::of_test(7);
        let config = Config::from_pairs([("TOWLINE_KEY_FILE", "/nowhere")]).0;
        let context = process.start_or_refuse(&args, &config, || panic!("slot {} is taken", 7)).expect("init succeeds");
        let error = process.context(Some(context)).err().expect("no connection is made");
        assert_eq!(error.cause(), Cause::Internal);
        assert!(error.to_string().contains("a defect of Towline: slot 7 is taken"), "{error}");
        assert!(process.devices.count() > 0, "NCCL stays with a plugin that has devices");
    }

    /// Another network may carry the communicator's collectives, and advice would be wrong there.
    #[test]
    fn a_context_for_one_sided_operations_alone_carries_no_communicator() {
        let process = Process::new(0);
        let keep = |args: &InitArgs| process.keep(args, Context::new(args, None)).expect("a context");
        keep(&InitArgs { one_sided: true, ..InitArgs::of_test(8) });
        assert!(!process.carries(Some(8)) && !process.carries(None));
        keep(&InitArgs::of_test(8));
        assert!(process.carries(Some(8)) && process.carries(None) && !process.carries(Some(7)));
    }
}
