//! The options that select the plugin to open, shared by the subcommands that open one.

use std::path::{Path, PathBuf};

use crate::host::{ApiVersion, DEFAULT_FILE, Net, log};
use crate::os::error::{Error, Result};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::installation;

/// Which plugin, which version of its interface, which device.
#[derive(Args, Debug, Clone)]
pub(crate) struct PluginOptions {
    /// The network plugin to open, any library with ncclNetPlugin_v4 to _v12 [default: libnccl-net.so beside this
    /// program or in ../lib/towline, else on LD_LIBRARY_PATH]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,

    /// The version of the plugin interface to use, v4 to v12 [default: the newest that the plugin has]
    #[arg(long, value_name = "vN")]
    api: Option<ApiVersion>,

    /// The network device, by its number in the plugin's order
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: i32,

    /// Which network carries Towline's data, as TOWLINE_BACKEND says it; other plugins take no notice
    #[arg(long, value_name = "NAME", value_parser = ["auto", "tcp", "rdma"])]
    backend: Option<String>,
}

/// Where the buffers are, shared by the subcommands that move some.
#[derive(Args, Debug, Clone)]
pub(crate) struct GpuOption {
    /// Keep the buffers in the memory of GPU N; needs NVIDIA's driver and a network device that reaches it [default of
    /// N: 0]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0")]
    pub(crate) gpu: Option<i32>,
}

/// A choice of plugin, as one process sends it to another.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub(crate) struct PluginChoice {
    /// Any bytes, for which JSON has no string.
    #[serde(with = "path_bytes")]
    file: PathBuf,
    api: Option<u32>,
    pub(crate) device: i32,
    /// The GPU whose memory the buffers are in.
    pub(crate) gpu: Option<i32>,
}

mod path_bytes {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Vec::<u8>::deserialize(from).map(|bytes| OsString::from_vec(bytes).into())
    }
}

impl PluginOptions {
    /// The variable that the options stand for: a backend is chosen through the environment, which child processes
    /// inherit.
    pub(crate) fn variable(&self) -> Option<(&'static str, &str)> {
        self.backend.as_deref().map(|backend| ("TOWLINE_BACKEND", backend))
    }

    pub(crate) fn choice(&self) -> PluginChoice {
        let file = match &self.plugin {
            // A bare name would be searched for by the loader; what is named here is a file.
            Some(file) if file.exists() => file.canonicalize().unwrap_or_else(|_| file.clone()),
            Some(file) => file.clone(),
            None => installation::plugin_file(),
        };
        PluginChoice { file, api: self.api.map(ApiVersion::number), device: self.device, gpu: None }
    }
}

impl PluginChoice {
    /// The same, with buffers where the option puts them.
    #[must_use]
    pub(crate) fn with_gpu(self, option: &GpuOption) -> Self {
        Self { gpu: option.gpu, ..self }
    }

    /// The file that will be opened.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// Whether it failed to open because this installation has no plugin: no file was named, and the loader found none.
    pub(crate) fn is_missing(&self, error: &Error) -> bool {
        self.file == Path::new(DEFAULT_FILE) && error.what().contains("No such file")
    }

    /// Opens it in this process, and shows its log.
    pub(crate) fn open(&self) -> Result<Net> {
        log::print_to_stderr(&std::env::var("NCCL_DEBUG").unwrap_or_else(|_| "WARN".to_owned()));
        let version = self.api.map(|number| number.to_string().parse()).transpose()?;
        Net::open(&self.file, version).map_err(|error| {
            if self.is_missing(&error) { error.with_hint(installation::WITHOUT_PLUGIN) } else { error }
        })
    }
}

/// A process's report about the plugin it opened.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
pub(crate) struct PluginFacts {
    pub(crate) plugin: String,
    pub(crate) file: String,
    pub(crate) api: String,
    pub(crate) device: String,
    pub(crate) speed_mbps: i32,
}

impl PluginFacts {
    /// Queries the plugin, and checks that the device exists.
    pub(crate) fn of(context: &crate::host::Context, choice: &PluginChoice) -> Result<Self> {
        let count = context.devices().map_err(|code| code.while_doing("counting the plugin's devices"))?;
        if choice.device < 0 || choice.device >= count {
            let error = Error::argument(format!("there is no device {}", choice.device));
            return Err(match count {
                0 => {
                    error.with_hint("the plugin has none; `towline doctor` shows the interfaces and what excludes them")
                }
                1 => error.with_hint("the plugin has only device 0"),
                _ => error.with_hint(format!("the plugin has devices 0 to {}", count - 1)),
            });
        }
        let asking = |code: crate::host::Code| code.while_doing("asking for the device's properties");
        let properties = context.properties(choice.device).map_err(asking)?;
        Ok(Self {
            plugin: context.net().name(),
            file: choice.file.display().to_string(),
            api: context.net().version().to_string(),
            device: properties.name,
            speed_mbps: properties.speed_mbps,
        })
    }
}
