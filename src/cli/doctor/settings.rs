//! The variables in force, where each comes from, and what is wrong with them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::os::config::{self, Complaint, Source};
use crate::os::key_file;
use crate::os::nccl_conf::Variables;
use serde::Serialize;

use super::cure::{export, unset};
use super::{Cause, Finding};

#[derive(Serialize)]
pub(super) struct Facts {
    /// NCCL's configuration files that exist.
    #[serde(serialize_with = "super::lossy_list")]
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

pub(super) fn gather(
    environment: &BTreeMap<String, String>,
    complaints: &[Complaint],
    variables: &Variables,
    findings: &mut Vec<Finding>,
) -> Facts {
    let files = variables.files().map(Path::to_owned).collect();
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
    let others = others.map(|(name, value)| match meant(name) {
        Some(meant) => format!("{name}={value}, for {meant}?"),
        None => format!("{name}={value}"),
    });
    let others = others.collect();
    // A name with blanks comes from a file, and is a finding about that.
    let complaints = complaints.iter().filter(|complaint| complaint.name.trim() == complaint.name);
    findings.extend(complaints.map(|complaint| judge(complaint, variables)));
    // With such a key no connection is made.
    let key = environment.get("TOWLINE_KEY_FILE").map(|path| key_file::read(Path::new(path.trim())));
    if let Some(Err(error)) = key {
        findings.push(Finding::problem(Cause::KeyUnusable, error.what(), error.hint().unwrap_or_default()));
    }
    Facts { files, set, others }
}

/// The variable that was probably meant, where a name is one typing error away from it. NCCL ignores such a name
/// silently.
fn meant(name: &str) -> Option<&'static str> {
    let names = config::TABLE.iter().map(|variable| variable.name).chain(["NCCL_DEBUG", "NCCL_NET", "NCCL_NET_PLUGIN"]);
    names.filter(|other| other.starts_with("NCCL_") && *other != name).find(|other| config::is_slip(name, other))
}

fn judge(complaint: &Complaint, variables: &Variables) -> Finding {
    let name = &complaint.name;
    let is_unknown = config::TABLE.iter().all(|variable| variable.name != *name);
    let without = unset(variables, name);
    match &complaint.nearest {
        Some(nearest) if is_unknown => {
            let fix = format!("{without}  # did you mean {nearest}?");
            Finding::problem(Cause::SettingUnknown, complaint.to_string(), fix)
        }
        None if is_unknown => Finding::problem(Cause::SettingUnknown, complaint.to_string(), without),
        Some(nearest) => Finding::problem(Cause::SettingInvalid, complaint.to_string(), export(name, nearest)),
        None => Finding::problem(Cause::SettingInvalid, complaint.to_string(), without),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::config::Config;

    #[test]
    fn a_name_of_nccl_s_that_is_a_letter_off_is_told_with_the_right_one() {
        for (name, meant_name) in [
            ("NCCL_SOCKET_IFNAM", Some("NCCL_SOCKET_IFNAME")),
            ("NCCL_SOKCET_IFNAME", Some("NCCL_SOCKET_IFNAME")),
            ("NCCL_IB_DISABLED", Some("NCCL_IB_DISABLE")),
            ("NCCL_NETT", Some("NCCL_NET")),
            ("NCCL_NET_PLUGIN", None),
            ("NCCL_MAX_CTAS", None),
            ("NCCL_MAX_NCHANNELS", None),
            ("NCCL_IB_CUDA_SUPPORT", None),
            ("NCCL_BUFFSIZE", None),
        ] {
            assert_eq!(meant(name), meant_name, "{name}");
        }
    }

    #[test]
    fn a_misspelt_name_and_a_bad_value_have_their_cures() {
        let pairs = [("TOWLINE_STREAM", "2"), ("TOWLINE_RECOVERY", "maybe"), ("NCCL_DEBUG", "INFO")];
        let environment: BTreeMap<String, String> = pairs.map(|(a, b)| (a.to_owned(), b.to_owned())).into();
        let (_, complaints) = Config::from_pairs(&environment);
        let mut findings = Vec::new();
        let facts = gather(&environment, &complaints, &Variables::default(), &mut findings);
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings.iter().any(|finding| finding.fix.contains("did you mean TOWLINE_STREAMS")), "{findings:?}");
        assert!(facts.set.iter().any(|setting| setting.name == "TOWLINE_RECOVERY" && !setting.is_valid));
        assert_eq!(facts.others, ["NCCL_DEBUG=INFO"]);
    }
}
