//! Values that NCCL does not read as they were meant. It trims neither its configuration files nor the environment, and
//! it reads the files long after the dynamic loader has read its own variables.

use crate::os::nccl_conf::Variables;

use super::cure::{export, quoted};
use super::{Cause, Finding};

pub(super) fn judge(variables: &Variables, findings: &mut Vec<Finding>) {
    for (file, name, value) in variables.lines() {
        let file_word = quoted(file.to_string_lossy());
        if name.trim() != name || value.trim() != value {
            let what = format!(
                "{} has blanks around a name or value (\"{name}={value}\"), which NCCL keeps as a part of it",
                file.display(),
                name = name.escape_default(),
                value = value.escape_default()
            );
            let fix = format!(r"sed -i 's/^[ \t]*\([^#= \t]*\)[ \t]*=[ \t]*/\1=/; s/[ \t\r]*$//' {file_word}");
            findings.push(Finding::problem(Cause::ConfBlanks, what, fix));
        } else if name.starts_with("LD_") {
            let what = format!("{} sets {name}, but the dynamic loader has read that before NCCL does", file.display());
            let old = if name == "LD_LIBRARY_PATH" { "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" } else { "" };
            let fix = format!("sed -i '/^{name}=/d' {file_word}; export {name}={}{old}", quoted(value));
            findings.push(Finding::problem(Cause::ConfLoaderVariable, what, fix));
        }
    }
    for (name, value) in variables.own().iter().filter(|(name, _)| name.starts_with("NCCL_")) {
        // Other checks report these where they do harm.
        let is_told = name == "NCCL_NET" || findings.iter().any(|finding| finding.fix.contains(&format!("{name}=")));
        let clean = cleaned(name, value);
        if clean != *value && !is_told {
            let what = format!(
                "{name}=\"{}\" has blanks or quotes, which NCCL takes for a part of it",
                value.escape_default()
            );
            findings.push(Finding::problem(Cause::ValueBlanks, what, export(name, clean)));
        }
    }
    // One command corrects all lines of a file.
    findings.dedup_by(|next, earlier| next.fix == earlier.fix);
}

/// The value as it was probably meant: without quotes and blanks around it, and around the entries of a list.
fn cleaned(name: &str, value: &str) -> String {
    let bare = |text: &str| text.trim_matches(|c: char| c.is_whitespace() || c == '"' || c == '\'').to_owned();
    match name {
        "NCCL_SOCKET_IFNAME" | "NCCL_IB_HCA" | "NCCL_NET_PLUGIN" => {
            bare(value).split(',').map(bare).collect::<Vec<_>>().join(",")
        }
        _ => bare(value),
    }
}
