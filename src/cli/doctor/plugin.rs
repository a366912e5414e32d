//! Whether the plugin opens, what devices it offers, and whether NCCL would find it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use towline::host::{Context, DEFAULT_FILE, Init};

use super::super::installation::WITHOUT_PLUGIN;
use super::super::plugin_options::PluginChoice;
use super::Finding;

/// The name by which `NCCL_NET` selects us.
const NAME: &str = "Towline";

#[derive(Serialize, Default)]
pub(super) struct Facts {
    pub(super) file: PathBuf,
    pub(super) name: String,
    pub(super) versions: Vec<String>,
    pub(super) devices: Vec<Device>,
    /// Why it cannot be used.
    pub(super) error: Option<String>,
    /// The file that NCCL would open in this environment, if there is one.
    pub(super) found_by_nccl: Option<PathBuf>,
}

#[derive(Serialize)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) speed_mbps: i32,
    pub(super) pci_path: Option<String>,
    pub(super) max_receives: i32,
}

pub(super) fn look(
    choice: &PluginChoice,
    environment: &BTreeMap<String, String>,
    findings: &mut Vec<Finding>,
) -> Facts {
    let file = choice.file().to_owned();
    let mut facts = Facts { file, found_by_nccl: found_by_nccl(environment), ..Facts::default() };
    if let Err(error) = open(choice, &mut facts) {
        facts.error = Some(error.to_string());
        let mend = if choice.is_missing(&error) {
            WITHOUT_PLUGIN
        } else {
            "cargo build --release, or name the library with --plugin"
        };
        findings.push(Finding::problem(format!("the plugin cannot be used: {}", error.what()), mend));
    } else {
        judge_path(&facts, findings);
    }
    judge_choice(environment, findings);
    facts
}

fn open(choice: &PluginChoice, facts: &mut Facts) -> towline::os::error::Result<()> {
    let net = choice.open()?;
    facts.name = net.name();
    facts.versions = net.plugin().versions().iter().map(ToString::to_string).collect();
    let context = net.init_with(&Init { comm_id: 1, ..Init::default() });
    let context = context.map_err(|code| code.while_doing("initialising it"))?;
    facts.devices = devices(&context).map_err(|code| code.while_doing("asking for its devices"))?;
    Ok(())
}

fn devices(context: &Context) -> towline::host::Result<Vec<Device>> {
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

/// The plugin that NCCL's `dlopen` finds: on `LD_LIBRARY_PATH`, by the name that `NCCL_NET_PLUGIN` makes.
fn found_by_nccl(environment: &BTreeMap<String, String>) -> Option<PathBuf> {
    let names = match environment.get("NCCL_NET_PLUGIN").map(String::as_str) {
        None | Some("") => vec![DEFAULT_FILE.to_owned()],
        Some(path) if path.contains('/') => return Path::new(path).exists().then(|| PathBuf::from(path)),
        Some(name) => vec![name.to_owned(), format!("libnccl-net-{name}.so")],
    };
    let path = environment.get("LD_LIBRARY_PATH")?;
    let candidates = path.split(':').filter(|dir| !dir.is_empty()).flat_map(|dir| {
        let dir = PathBuf::from(dir);
        names.iter().map(move |name| dir.join(name)).collect::<Vec<_>>()
    });
    candidates.into_iter().find(|file| file.exists())
}

fn judge_path(facts: &Facts, findings: &mut Vec<Finding>) {
    let same = |a: &Path, b: &Path| a.canonicalize().ok().is_some_and(|a| b.canonicalize().ok() == Some(a));
    let dir = facts.file.parent().filter(|dir| !dir.as_os_str().is_empty());
    let Some(dir) = dir else { return };
    let mend = format!("export LD_LIBRARY_PATH={}:$LD_LIBRARY_PATH", dir.display());
    match &facts.found_by_nccl {
        None => {
            let what = "NCCL would not find the plugin in this environment: it is not on LD_LIBRARY_PATH";
            findings.push(Finding::advice(what, mend));
        }
        Some(other) if !same(other, &facts.file) => {
            let what = format!("NCCL would open another plugin in this environment: {}", other.display());
            findings.push(Finding::advice(what, mend));
        }
        Some(_) => {}
    }
}

/// Variables that keep NCCL from choosing us.
fn judge_choice(environment: &BTreeMap<String, String>, findings: &mut Vec<Finding>) {
    let is_set = |name: &str| environment.get(name).filter(|value| !value.is_empty());
    if let Some(name) = is_set("NCCL_NET").filter(|name| !name.eq_ignore_ascii_case(NAME)) {
        let what = format!("NCCL_NET={name} makes NCCL use another network");
        findings.push(Finding::problem(what, format!("export NCCL_NET={NAME}")));
    } else if is_set("NCCL_NET").is_some_and(|name| name != NAME) {
        let what = "NCCL 2.10 to 2.12 compare NCCL_NET case by case";
        findings.push(Finding::advice(what, format!("export NCCL_NET={NAME}")));
    }
    if is_set("NCCL_NET_PLUGIN").is_some_and(|name| name.eq_ignore_ascii_case("none")) {
        let what = "NCCL_NET_PLUGIN=none keeps NCCL from opening any plugin";
        findings.push(Finding::problem(what, "unset NCCL_NET_PLUGIN"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn variables_that_choose_another_network_are_problems() {
        let judged = |pairs: &[(&str, &str)]| {
            let mut findings = Vec::new();
            judge_choice(&environment(pairs), &mut findings);
            findings.iter().map(|finding| finding.mend.clone()).collect::<Vec<_>>()
        };
        assert_eq!(judged(&[]), [""; 0]);
        assert_eq!(judged(&[("NCCL_NET", "Towline")]), [""; 0]);
        assert_eq!(judged(&[("NCCL_NET", "Socket")]), ["export NCCL_NET=Towline"]);
        assert_eq!(judged(&[("NCCL_NET_PLUGIN", "none")]), ["unset NCCL_NET_PLUGIN"]);
    }

    #[test]
    fn the_plugin_is_found_by_ncclss_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        std::fs::write(dir.path().join("libnccl-net-towline.so"), "").unwrap();
        let found = |pairs: &[(&str, &str)]| found_by_nccl(&environment(pairs)).is_some();
        assert!(!found(&[("LD_LIBRARY_PATH", path)]));
        assert!(found(&[("LD_LIBRARY_PATH", &format!("/nowhere::{path}")), ("NCCL_NET_PLUGIN", "towline")]));
        std::fs::write(dir.path().join(DEFAULT_FILE), "").unwrap();
        assert!(found(&[("LD_LIBRARY_PATH", path)]));
    }
}
