//! The variables in force, where each comes from, and what is wrong with them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use towline::os::config::{self, Complaint, Source};
use towline::tcp::seal::key::SharedKey;

use super::Finding;

#[derive(Serialize)]
pub(super) struct Facts {
    /// NCCL's configuration files that exist.
    pub(super) files: Vec<PathBuf>,
    /// Variables of Towline's table that are set.
    pub(super) set: Vec<Setting>,
    /// NCCL's variables that are set and that Towline does not read.
    pub(super) others: Vec<String>,
}

#[derive(Serialize)]
pub(super) struct Setting {
    pub(super) name: &'static str,
    pub(super) value: String,
    /// False when the value is not valid, so that the default is in force.
    pub(super) is_valid: bool,
}

pub(super) fn look(
    environment: &BTreeMap<String, String>,
    complaints: &[Complaint],
    findings: &mut Vec<Finding>,
) -> Facts {
    let user = match environment.get("NCCL_CONF_FILE").filter(|file| !file.is_empty()) {
        Some(file) => Some(PathBuf::from(file)),
        None => environment.get("HOME").map(|home| PathBuf::from(home).join(".nccl.conf")),
    };
    let files = user.into_iter().chain([PathBuf::from("/etc/nccl.conf")]).filter(|file| file.is_file()).collect();
    let settings = config::settings(|name| environment.get(name).cloned());
    let set: Vec<Setting> = (settings.into_iter())
        .filter(|setting| setting.source != Source::Default)
        .map(|setting| Setting {
            name: setting.variable.name,
            value: setting.value,
            is_valid: setting.source == Source::Environment,
        })
        .collect();
    let is_known = |name: &str| config::TABLE.iter().any(|variable| variable.name == name);
    let others = environment.iter().filter(|(name, _)| name.starts_with("NCCL_") && !is_known(name));
    let others = others.map(|(name, value)| format!("{name}={value}")).collect();
    findings.extend(complaints.iter().map(judge));
    // With such a key no connection is made.
    let key = environment.get("TOWLINE_KEY_FILE").map(|path| SharedKey::load(Path::new(path.trim())));
    if let Some(Err(error)) = key {
        findings.push(Finding::problem(error.what(), error.hint().unwrap_or_default()));
    }
    Facts { files, set, others }
}

fn judge(complaint: &Complaint) -> Finding {
    let name = &complaint.name;
    let is_name = config::TABLE.iter().all(|variable| variable.name != *name);
    let mend = match &complaint.nearest {
        Some(nearest) if is_name => format!("unset {name}; did you mean {nearest}?"),
        Some(nearest) => format!("export {name}={nearest}"),
        None => format!("unset {name}"),
    };
    Finding::problem(complaint.to_string(), mend)
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline::os::config::Config;

    #[test]
    fn a_misspelt_name_and_a_bad_value_have_their_cures() {
        let pairs = [("TOWLINE_STREAM", "2"), ("TOWLINE_RECOVERY", "maybe"), ("NCCL_DEBUG", "INFO")];
        let environment: BTreeMap<String, String> = pairs.map(|(a, b)| (a.to_owned(), b.to_owned())).into();
        let (_, complaints) = Config::from_pairs(&environment);
        let mut findings = Vec::new();
        let facts = look(&environment, &complaints, &mut findings);
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings.iter().any(|finding| finding.mend.contains("did you mean TOWLINE_STREAMS")), "{findings:?}");
        assert!(facts.set.iter().any(|setting| setting.name == "TOWLINE_RECOVERY" && !setting.is_valid));
        assert_eq!(facts.others, ["NCCL_DEBUG=INFO"]);
    }
}
