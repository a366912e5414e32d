//! A plugin's network under one API version, and communicator contexts on it.
//!
//! Guarantees: whatever is made from a [`Context`] keeps it and the library alive; `finalize` is called once, when
//! the last user is gone or earlier on request. It must not know how data moves.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::code::{Code, Result};
use super::library::{ApiVersion, Plugin};
use super::log;
use super::properties::Properties;
use super::table::{InitArguments, Table};
use crate::nccl::ffi;
use crate::os::error::{self, Error};

/// One API version of one opened plugin: what NCCL holds after it has chosen.
#[derive(Clone, Debug)]
pub struct Net {
    plugin: Plugin,
    version: ApiVersion,
    table: Table,
}

impl Net {
    /// Opens `file` and takes the newest version it exports, or the given one.
    pub fn open(file: impl AsRef<Path>, version: Option<ApiVersion>) -> error::Result<Self> {
        Self::of(&Plugin::open(file)?, version)
    }

    /// The newest version that `plugin` exports, or the given one.
    pub fn of(plugin: &Plugin, version: Option<ApiVersion>) -> error::Result<Self> {
        let offered = plugin.versions();
        let chosen = match version {
            Some(wanted) => offered.contains(&wanted).then_some(wanted),
            None => offered.first().copied(),
        };
        let found = chosen.and_then(|version| Some((version, Table::find(plugin, version)?)));
        let Some((version, table)) = found else {
            let file = plugin.file().display();
            let wanted = version.map_or("ncclNetPlugin_v4 to _v12".to_owned(), |v| format!("ncclNetPlugin_{v}"));
            let error = Error::argument(format!("{file} exports no {wanted}"));
            let offered: Vec<_> = offered.iter().map(ToString::to_string).collect();
            return Err(match offered.as_slice() {
                [] => error.with_hint("it is no network plugin for NCCL"),
                _ => error.with_hint(format!("it offers {}", offered.join(", "))),
            });
        };
        Ok(Self { plugin: plugin.clone(), version, table })
    }

    /// The library.
    pub(crate) fn plugin(&self) -> &Plugin {
        &self.plugin
    }

    /// The chosen version.
    pub fn version(&self) -> ApiVersion {
        self.version
    }

    /// The plugin's own name, or that it has none.
    pub fn name(&self) -> String {
        let name = self.table.name();
        if name.is_empty() { "(unnamed)".to_owned() } else { name }
    }

    /// The table of functions itself, for calls that no well-meaning host would make. It is valid as long as a clone
    /// of this `Net` lives.
    pub fn table(&self) -> Table {
        self.table
    }

    /// `init` with [`Init::default`].
    pub fn init(&self) -> Result<Context> {
        self.init_with(&Init::default())
    }

    /// Makes a communicator context. Before v11 the plugin has one state for all; each call still calls `init`, as
    /// NCCL does for every communicator.
    pub fn init_with(&self, with: &Init) -> Result<Context> {
        let arguments = InitArguments {
            comm_id: with.comm_id,
            traffic_class: with.traffic_class,
            log: if with.without_logger { None } else { log::logger() },
            profiler: with.profiler,
        };
        // SAFETY: the logger and the profiler callback are functions that live as long as the process.
        let raw = unsafe { self.table.init(&arguments) }?;
        let finalized = AtomicBool::new(!self.version.has_context());
        Ok(Context(Arc::new(Inner { net: self.clone(), raw, traffic_class: with.traffic_class, finalized })))
    }
}

/// What a communicator gives to `init`.
#[derive(Debug, Clone)]
pub struct Init {
    /// v11 and later: the communicator's id.
    pub comm_id: u64,
    /// v10 and later: the whole ToS / traffic-class byte, −1 when undefined.
    pub traffic_class: i32,
    /// v10 and later: the profiler callback. NCCL always gives one; the default is that of an NCCL without profiler.
    pub profiler: ffi::ncclProfilerCallback_t,
    /// Gives no logger, as some tools do.
    pub without_logger: bool,
}

impl Default for Init {
    fn default() -> Self {
        Self {
            comm_id: 0,
            traffic_class: ffi::NCCL_NET_TRAFFIC_CLASS_UNDEF,
            profiler: Some(ignore),
            without_logger: false,
        }
    }
}

/// The callback of an NCCL without profiler: it returns success and no event handle.
unsafe extern "C" fn ignore(
    _event: *mut *mut c_void,
    _kind: c_int,
    _transfer: *mut c_void,
    _plugin_id: i64,
    _description: *mut c_void,
) -> ffi::ncclResult_t {
    ffi::ncclSuccess
}

/// A communicator's use of the plugin. Clones share it, as communicators made by split do.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    net: Net,
    raw: *mut c_void,
    traffic_class: i32,
    finalized: AtomicBool,
}

// SAFETY: the raw context is only passed to the plugin, which must take calls from several threads: NCCL makes them
// from its service, progress and user threads.
unsafe impl Send for Inner {}
// SAFETY: see above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.finalize();
    }
}

impl Inner {
    fn finalize(&self) -> Result<()> {
        if self.finalized.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // SAFETY: the context came from `init` and has not been finalized.
        unsafe { self.net.table.finalize(self.raw) }
    }
}

impl Context {
    /// The plugin and version that this context belongs to.
    pub fn net(&self) -> &Net {
        &self.0.net
    }

    /// The context pointer itself (NULL before v11), for calls past this interface.
    pub fn raw(&self) -> *mut c_void {
        self.0.raw
    }

    /// How many devices there are.
    pub fn devices(&self) -> Result<i32> {
        // SAFETY: the plugin is initialised.
        unsafe { self.0.net.table.devices() }
    }

    /// The plugin's properties of device `dev`.
    pub fn properties(&self, dev: i32) -> Result<Properties> {
        // SAFETY: the plugin is initialised; a wrong number is the plugin's to refuse.
        unsafe { self.0.net.table.properties(dev) }
    }

    /// Joins physical devices into a virtual one (v9 and later) and returns its number.
    pub fn make_vdevice(&self, members: &[i32]) -> Result<i32> {
        // SAFETY: the plugin is initialised; wrong members are the plugin's to refuse.
        unsafe { self.0.net.table.make_vdevice(members) }
    }

    /// Ends the context now, with connections still open: what NCCL does after an abort. Later calls and the last
    /// drop do nothing more. What is still open must be [abandoned](super::SendComm::abandon), not closed.
    pub fn finalize(&self) -> Result<()> {
        self.0.finalize()
    }

    pub(super) fn table(&self) -> Table {
        self.0.net.table
    }

    pub(super) fn traffic_class(&self) -> i32 {
        self.0.traffic_class
    }
}

/// A connection handle: the bytes that a listener gives to its peer.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Handle {
    bytes: [u8; Self::MOST],
    guard: [u8; Self::MOST],
    size: usize,
}

impl Handle {
    const MOST: usize = ffi::NCCL_NET_HANDLE_MAXSIZE as usize;
    const GUARD: u8 = 0xA5;

    /// `size` zero bytes, as NCCL prepares them.
    pub(super) fn blank(size: usize) -> Self {
        let mut handle = Self { bytes: [0; Self::MOST], guard: [Self::GUARD; Self::MOST], size };
        handle.bytes[size..].fill(Self::GUARD);
        handle
    }

    /// A handle from bytes that came from elsewhere, at most 128 of them.
    ///
    /// # Panics
    /// When there are more.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut handle = Self::blank(bytes.len());
        handle.bytes[..bytes.len()].copy_from_slice(bytes);
        handle
    }

    /// The bytes to send to the peer.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.size]
    }

    /// The same bytes, to be spoiled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.size]
    }

    pub(super) fn raw(&mut self) -> *mut c_void {
        (&raw mut *self).cast()
    }

    /// Whether the plugin kept to its bytes.
    pub(super) fn check(&self) -> Result<()> {
        let intact = self.bytes[self.size..].iter().chain(&self.guard).all(|&byte| byte == Self::GUARD);
        if intact { Ok(()) } else { Err(Code::Overrun("the connection handle")) }
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The bytes hold the connection's secret: only their number is shown.
        write!(f, "Handle({} bytes)", self.size)
    }
}

/// The kinds of memory that `reg_mr` knows: host memory.
pub const PTR_HOST: c_int = ffi::NCCL_PTR_HOST as c_int;
/// GPU memory.
pub const PTR_CUDA: c_int = ffi::NCCL_PTR_CUDA as c_int;
/// `NCCL_PTR_DMABUF`: GPU memory through a DMA-BUF descriptor.
pub const PTR_DMABUF: c_int = ffi::NCCL_PTR_DMABUF as c_int;
