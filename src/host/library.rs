//! Opens a plugin the way NCCL does and finds the API versions that it exports.
//!
//! Guarantees: the library stays mapped as long as anything made from it is alive; a version is only reported when
//! its symbol is there. It must not know what the functions behind the symbols do.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::os::error::{Error, Result};

/// The file name that NCCL looks for when no plugin is named.
pub(crate) const DEFAULT_FILE: &str = "libnccl-net.so";

/// A version of NCCL's network plugin interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names say it all")]
pub enum ApiVersion {
    V4 = 4,
    V5 = 5,
    V6 = 6,
    V7 = 7,
    V8 = 8,
    V9 = 9,
    V10 = 10,
    V11 = 11,
    V12 = 12,
}

impl ApiVersion {
    /// Every version that the host can drive, newest first: the order in which NCCL tries them.
    pub const NEWEST_FIRST: [Self; 9] =
        [Self::V12, Self::V11, Self::V10, Self::V9, Self::V8, Self::V7, Self::V6, Self::V5, Self::V4];

    /// The number alone.
    pub(crate) fn number(self) -> u32 {
        self as u32
    }

    /// How many bytes of a connection handle this version gives to the plugin.
    pub fn handle_size(self) -> usize {
        if self == Self::V4 { 64 } else { 128 }
    }

    /// How many requests NCCL keeps outstanding per connection: 8 until NCCL 2.18 (v6), 32 from 2.19 (v7) on.
    pub fn max_requests(self) -> usize {
        if self <= Self::V6 { 8 } else { 32 }
    }

    /// Whether `connect` and `accept` wait for the peer (v4) or return at once and are called again (v5 and later).
    pub fn setup_blocks(self) -> bool {
        self == Self::V4
    }

    /// Whether one receive may hold several buffers, and messages carry tags (v5 and later).
    pub fn has_grouped_receives(self) -> bool {
        self >= Self::V5
    }

    /// Whether each communicator has a context of its own, and `finalize` (v11 and later).
    pub fn has_context(self) -> bool {
        self >= Self::V11
    }
}

impl fmt::Display for ApiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.number())
    }
}

impl FromStr for ApiVersion {
    type Err = Error;

    /// Takes "v8" and "8".
    fn from_str(text: &str) -> Result<Self> {
        let digits = text.strip_prefix(['v', 'V']).unwrap_or(text);
        Self::NEWEST_FIRST
            .into_iter()
            .find(|version| version.number().to_string() == digits)
            .ok_or_else(|| Error::argument(format!("\"{text}\" is no API version: v4 to v12 are known")))
    }
}

/// An opened plugin library. Cloning shares it; the last clone unmaps it.
#[derive(Clone)]
pub struct Plugin(Arc<Inner>);

struct Inner {
    library: libloading::Library,
    file: PathBuf,
}

impl Plugin {
    /// Opens `file` as NCCL does (all symbols at once, none of them visible to others). A name without a slash is
    /// searched for by the dynamic loader.
    pub fn open(file: impl AsRef<Path>) -> Result<Self> {
        let file = file.as_ref();
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
        // SAFETY: opening a library runs its initialisers. The user that named the file requested that; as with NCCL, a
        // file that is no sane plugin can do anything.
        let library = unsafe { libloading::os::unix::Library::open(Some(file), flags) }.map_err(|error| {
            Error::argument(format!("the plugin {} cannot be opened: {error}", file.display()))
                .with_hint("name a shared library with --plugin, or put one on LD_LIBRARY_PATH")
        })?;
        Ok(Self(Arc::new(Inner { library: library.into(), file: file.to_owned() })))
    }

    /// Opens the nearest plugin. That is `libnccl-net.so` beside the running program or (for a test program) in the
    /// directory above it. Otherwise it is the one that the dynamic loader finds, as NCCL would.
    pub fn open_default() -> Result<Self> {
        Self::open(Self::default_file())
    }

    /// The file that [`Plugin::open_default`] opens.
    pub(crate) fn default_file() -> PathBuf {
        let program = env::current_exe().unwrap_or_default();
        program
            .ancestors()
            .skip(1)
            .take(2)
            .map(|dir| dir.join(DEFAULT_FILE))
            .find(|file| file.exists())
            .unwrap_or_else(|| PathBuf::from(OsString::from(DEFAULT_FILE)))
    }

    /// The file as it was named when it was opened.
    pub(crate) fn file(&self) -> &Path {
        &self.0.file
    }

    /// The versions of the network API that the library exports, newest first.
    pub fn versions(&self) -> Vec<ApiVersion> {
        ApiVersion::NEWEST_FIRST.into_iter().filter(|&version| self.net_symbol(version).is_some()).collect()
    }

    /// Where `ncclNetPlugin_vN` lies, if it is exported.
    pub(super) fn net_symbol(&self, version: ApiVersion) -> Option<*const ()> {
        self.symbol(&format!("ncclNetPlugin_{version}"))
    }

    /// Where the exported object `name` lies, if it is exported: for tables of other interfaces, like the profiler's.
    /// The address holds as long as the plugin is mapped.
    pub fn symbol(&self, name: &str) -> Option<*const ()> {
        // SAFETY: the symbol is only taken as an address here, so its type cannot be wrong.
        let symbol = unsafe { self.0.library.get::<*const ()>(name.as_bytes()) }.ok()?;
        // SAFETY: the address is not dereferenced; `self` keeps the library mapped as the documentation asks.
        let address = unsafe { symbol.into_raw() }.as_raw_ptr();
        (!address.is_null()).then_some(address.cast_const().cast())
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plugin({})", self.file().display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_with_and_without_its_letter() {
        assert_eq!("v12".parse::<ApiVersion>().unwrap(), ApiVersion::V12);
        assert_eq!("4".parse::<ApiVersion>().unwrap(), ApiVersion::V4);
        for wrong in ["v3", "v13", "", "v", "12v", "v08"] {
            assert!(wrong.parse::<ApiVersion>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_refused_by_name() {
        let error = Plugin::open("/etc/passwd").unwrap_err();
        assert!(error.to_string().contains("/etc/passwd"), "{error}");
    }

    #[test]
    fn a_library_without_the_symbols_offers_no_version() {
        let plugin = Plugin::open("libc.so.6").unwrap();
        assert_eq!(plugin.versions(), []);
        assert!(plugin.symbol("malloc").is_some());
    }
}
