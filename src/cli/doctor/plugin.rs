//! Whether the plugin opens and starts, and what devices it offers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::host::{Context, Init, Plugin, log};
use crate::os::error::Error;
use serde::Serialize;

use super::super::installation::WITHOUT_PLUGIN;
use super::super::plugin_options::PluginChoice;
use super::file;
use super::{Cause, Finding, Severity};

#[derive(Serialize, Default)]
pub(super) struct Facts {
    #[serde(serialize_with = "super::lossy")]
    pub(super) file: PathBuf,
    pub(super) name: String,
    pub(super) versions: Vec<String>,
    pub(super) devices: Vec<Device>,
    /// Why it cannot be used.
    pub(super) error: Option<String>,
    #[serde(skip)]
    failure: Option<Failure>,
}

/// The step at which the plugin failed.
enum Failure {
    Opening {
        file: file::Facts,
        error: Error,
        is_missing: bool,
    },
    Table(Error),
    /// The plugin's own error, and its hint.
    Starting(String, String),
}

#[derive(Serialize)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) speed_mbps: i32,
    pub(super) pci_path: Option<String>,
    pub(super) max_receives: i32,
}

pub(super) fn gather(choice: &PluginChoice) -> Facts {
    let mut facts = Facts { file: choice.file().to_owned(), ..Facts::default() };
    facts.failure = open(choice, &mut facts).err();
    facts.error = facts.failure.as_ref().map(|failure| match failure {
        Failure::Opening { error, .. } | Failure::Table(error) => error.to_string(),
        Failure::Starting(what, _) => what.clone(),
    });
    facts
}

fn open(choice: &PluginChoice, facts: &mut Facts) -> Result<(), Failure> {
    Plugin::open(choice.file()).map_err(|error| {
        let (file, is_missing) = (file::gather(&taken(choice.file(), &error)), choice.is_missing(&error));
        Failure::Opening { file, error, is_missing }
    })?;
    let net = choice.open().map_err(Failure::Table)?;
    facts.name = net.name();
    facts.versions = net.plugin().versions().iter().map(ToString::to_string).collect();
    // A result code is not enough; the plugin's last warning has the reason.
    let warning = Arc::new(Mutex::new(None));
    let last = Arc::clone(&warning);
    let _subscription = log::subscribe(move |record| {
        if record.is_warning() {
            *last.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(record.text.clone());
        }
    });
    let failed = |code: crate::host::Code, doing: &str| {
        let said = warning.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        match said {
            Some(said) => starting(&said),
            None => Failure::Starting(code.while_doing(doing).to_string(), "NCCL_DEBUG=INFO towline doctor".to_owned()),
        }
    };
    let context = net.init_with(&Init { comm_id: 1, ..Init::default() });
    let context = context.map_err(|code| failed(code, "initialising it"))?;
    facts.devices = devices(&context).map_err(|code| failed(code, "asking for its devices"))?;
    Ok(())
}

/// The file that the loader took for a name: its error begins with it.
fn taken(name: &Path, error: &Error) -> PathBuf {
    let said = error.what().split_once("cannot be opened: ").map_or("", |(_, said)| said);
    let path = said.split(": ").next().unwrap_or_default();
    if path.starts_with('/') && !name.is_absolute() { PathBuf::from(path) } else { name.to_owned() }
}

/// Splits one of our warnings into what happened and what to try.
fn starting(said: &str) -> Failure {
    let said = said.trim_start_matches("NET/Towline: ").trim_start_matches("init: ");
    let (what, hint) = said.rsplit_once("; ").unwrap_or((said, "NCCL_DEBUG=INFO towline doctor"));
    Failure::Starting(what.to_owned(), hint.to_owned())
}

fn devices(context: &Context) -> crate::host::Result<Vec<Device>> {
    let device = |number| {
        let properties = context.properties(number)?;
        Ok(Device {
            name: properties.name,
            speed_mbps: properties.speed_mbps,
            pci_path: properties.pci_path,
            max_receives: properties.max_recvs,
        })
    };
    (0..context.devices()?).map(device).collect()
}

/// Call it after the checks of interfaces, limits and settings: what one of these found is why the plugin does not
/// start.
pub(super) fn judge(facts: &Facts, findings: &mut Vec<Finding>) {
    let finding = match &facts.failure {
        None => return,
        Some(Failure::Opening { file, is_missing: true, .. }) => {
            let what = format!("there is no plugin {}", file.file.display());
            Finding::problem(Cause::PluginMissing, what, WITHOUT_PLUGIN)
        }
        Some(Failure::Opening { file, error, .. }) => file::judge(file, error.what(), None),
        Some(Failure::Table(error)) => {
            let what = format!("the plugin cannot be used: {}", error.what());
            let fix = format!("name another library with --plugin: {}", error.hint().unwrap_or("this is no plugin"));
            Finding::problem(Cause::PluginHasNoTable, what, fix)
        }
        Some(Failure::Starting(..)) if findings.iter().any(|finding| finding.severity == Severity::Problem) => return,
        Some(Failure::Starting(what, hint)) => {
            Finding::problem(Cause::PluginDoesNotStart, format!("the plugin does not start: {what}"), hint)
        }
    };
    findings.push(finding);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error of `init` is shown, and not only its result code.
    #[test]
    fn a_plugin_that_does_not_start_is_told_in_its_own_words() {
        let failure = Some(starting("NET/Towline: init: this happened; try that"));
        let facts = Facts { failure, ..Facts::default() };
        let mut findings = Vec::new();
        judge(&facts, &mut findings);
        assert_eq!(findings[0].cause, Cause::PluginDoesNotStart);
        assert_eq!(findings[0].what, "the plugin does not start: this happened");
        assert_eq!(findings[0].fix, "try that");
        // Where another check has found the reason, its finding is enough.
        findings = vec![Finding::problem(Cause::NoInterface, "no interface", "one")];
        judge(&facts, &mut findings);
        assert_eq!(findings.len(), 1);
    }
}
