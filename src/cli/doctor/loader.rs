//! What `dlopen` answers in a process that starts in this environment: on `LD_LIBRARY_PATH`, in the loader's cache, in
//! the system's directories, as the loader itself searches.
//!
//! A process of its own queries the loader: the search path is fixed when a process starts, and another plugin's
//! initialisers must not bring the doctor down. One thing stays unknown: the run path (`DT_RPATH`, `DT_RUNPATH`) of
//! NCCL or of the program.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::host::{Net, Plugin};
use crate::os::error::Result;
use clap::Args;
use serde::{Deserialize, Serialize};

use super::super::output::print;
use super::Verdict;

/// The hidden subcommand that opens one name with the loader.
#[derive(Args, Debug, Clone)]
pub(crate) struct Opens {
    /// The name, as NCCL gives it to the loader
    name: String,
}

/// The loader's result for a name.
#[derive(Serialize, Deserialize, Debug, Default, Clone, PartialEq)]
pub(super) struct Opened {
    /// The file behind it.
    pub(super) file: Option<PathBuf>,
    /// The name of the network in it: `None` when it has none.
    pub(super) network: Option<String>,
    /// The loader's error when it does not open.
    pub(super) error: Option<String>,
}

/// Runs the hidden subcommand: prints one line of JSON.
#[allow(clippy::unnecessary_wraps, reason = "subcommands return this")]
pub(crate) fn opens(options: &Opens) -> Result<Verdict> {
    let answer = match Plugin::open(&options.name) {
        Err(error) => Opened { error: Some(error.what().to_owned()), ..Opened::default() },
        Ok(plugin) => {
            let table =
                plugin.versions().first().and_then(|version| plugin.symbol(&format!("ncclNetPlugin_{version}")));
            let network = Net::of(&plugin, None).ok().map(|net| net.name());
            Opened { file: table.and_then(file_of), network, error: None }
        }
    };
    print(serde_json::to_string(&answer).unwrap_or_default() + "\n");
    Ok(Verdict::Good)
}

/// The file that an address was mapped from.
fn file_of(address: *const ()) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the call fills the struct for any address, or returns that it does not know it.
    if unsafe { libc::dladdr(address.cast(), info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: filled by the call, and zeroed before.
    let info = unsafe { info.assume_init() };
    // SAFETY: the name of a library that stays open, or null.
    let name = unsafe { (!info.dli_fname.is_null()).then(|| CStr::from_ptr(info.dli_fname)) }?;
    Some(PathBuf::from(name.to_str().ok()?))
}

/// Runs a process with this environment.
pub(super) fn ask(name: &str, environment: &BTreeMap<String, String>) -> Opened {
    let failed = |why: String| Opened { error: Some(why), ..Opened::default() };
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return failed(error.to_string()),
    };
    let mut command = Command::new(program);
    command.args(["opens", "--", name]).env_clear().envs(environment).stdin(Stdio::null()).stderr(Stdio::null());
    match command.output() {
        Err(error) => failed(error.to_string()),
        Ok(output) => serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| failed(format!("the process that opened it ended with {}", output.status))),
    }
}
