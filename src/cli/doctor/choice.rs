//! Which plugin NCCL opens in this environment, and which network it takes: `NCCL_NET_PLUGIN`, `NCCL_NET` and the
//! loader.
//!
//! How NCCL reads `NCCL_NET_PLUGIN`: up to 2.20 its value is the end of a name, `libnccl-net-VALUE.so`. From 2.21 on it
//! is first given to the loader unchanged, and then used as the end of a name. From 2.27 on it is a list separated by
//! commas, of which the first that starts is taken, and an empty value means no plugin at all.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::host::DEFAULT_FILE;
use crate::os::nccl_conf::Variables;
use serde::Serialize;

use super::cure::{export, quoted, unset};
use super::file;
use super::loader::{self, Opened};
use super::nccl::Library;
use super::plugin;
use super::{Cause, Finding};

/// The name by which `NCCL_NET` selects us.
const NAME: &str = "Towline";
/// The value of `NCCL_NET_PLUGIN` that means us, under each release.
const SUFFIX: &str = "towline";

#[derive(Serialize, Default)]
pub(super) struct Facts {
    /// `NCCL_NET_PLUGIN` and `NCCL_NET`.
    plugin: Option<String>,
    net: Option<String>,
    /// The loader's result for each name that NCCL might give to it.
    opened: BTreeMap<String, Opened>,
    /// Files of such a name on `LD_LIBRARY_PATH` that do not open, and the loader's errors.
    #[serde(skip)]
    broken: Vec<(file::Facts, String)>,
    /// The releases of NCCL on this host.
    releases: Vec<String>,
}

pub(super) fn gather(
    environment: &BTreeMap<String, String>,
    own: &BTreeMap<String, String>,
    nccl: &[Library],
) -> Facts {
    let get = |name: &str| environment.get(name).cloned();
    let (plugin, net) = (get("NCCL_NET_PLUGIN"), get("NCCL_NET"));
    let mut names = vec![DEFAULT_FILE.to_owned(), suffixed(SUFFIX)];
    names.extend(entries(plugin.as_deref()).into_iter().flatten());
    names.sort();
    names.dedup();
    let opened: BTreeMap<_, _> = names.into_iter().map(|name| (name.clone(), loader::ask(&name, own))).collect();
    let mut broken = Vec::new();
    for (name, answer) in opened.iter().filter(|(_, answer)| answer.error.is_some()) {
        let dirs = own.get("LD_LIBRARY_PATH").map(|path| path.split([':', ';'])).into_iter().flatten();
        let files: Vec<PathBuf> = if name.contains('/') {
            vec![PathBuf::from(name)]
        } else {
            dirs.filter(|dir| !dir.is_empty()).map(|dir| Path::new(dir).join(name)).collect()
        };
        for path in files.into_iter().filter(|path| path.symlink_metadata().is_ok() || is_closed(path)) {
            let said = answer.error.clone().unwrap_or_default();
            broken.push((file::gather(&path), said));
        }
    }
    let releases = nccl.iter().filter_map(|library| library.release.clone()).collect();
    Facts { plugin, net, opened, broken, releases }
}

/// Whether it lies in a directory that this user may not enter.
fn is_closed(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

fn suffixed(name: &str) -> String {
    format!("libnccl-net-{name}.so")
}

/// The names that NCCL 2.27 and later gives to the loader: for each entry of the list, one after the other until one
/// opens. No entry at all where plugins are switched off.
fn entries(value: Option<&str>) -> Vec<Vec<String>> {
    let Some(value) = value else { return vec![vec![DEFAULT_FILE.to_owned()]] };
    if value.eq_ignore_ascii_case("none") {
        return Vec::new();
    }
    let names = |entry: &str| {
        let is_library = entry.contains('/') || (entry.starts_with("lib") && entry.ends_with(".so"));
        let other = (!is_library).then(|| suffixed(entry));
        [entry.to_owned()].into_iter().chain(other).collect()
    };
    value.split(',').filter(|entry| !entry.is_empty()).map(names).collect()
}

/// The number behind "2." in a release.
fn minor(release: &str) -> Option<u32> {
    release.strip_prefix("2.")?.split('.').next()?.parse().ok()
}

/// What NCCL of this release ("2.MINOR") gives to the loader.
fn entries_of(minor: u32, value: Option<&str>) -> Vec<Vec<String>> {
    match value.filter(|value| minor >= 27 || !value.is_empty()) {
        None => entries(None),
        Some(value) if minor <= 20 => vec![vec![suffixed(value)]],
        Some(value) if minor <= 26 => vec![vec![value.to_owned(), suffixed(value)]],
        value => entries(value),
    }
}

/// The plugin that NCCL takes from a list of names.
#[derive(Debug, PartialEq)]
enum Pick<'a> {
    Ours(&'a Opened),
    Other(&'a Opened),
    Nothing,
}

fn pick<'a>(facts: &'a Facts, entries: &[Vec<String>], network: &str) -> Pick<'a> {
    let opened =
        |names: &Vec<String>| names.iter().find_map(|name| facts.opened.get(name).filter(|it| it.error.is_none()));
    let is_ours = |opened: &&Opened| opened.network.as_deref() == Some(network);
    let all: Vec<&Opened> = entries.iter().filter_map(opened).collect();
    // NCCL_NET picks from a list by the network's name.
    let is_named = facts.net.as_deref().is_some_and(|net| net.eq_ignore_ascii_case(network));
    let first = all.first().copied();
    match if is_named { all.iter().copied().find(is_ours).or(first) } else { first } {
        Some(found) if is_ours(&found) => Pick::Ours(found),
        Some(found) => Pick::Other(found),
        None => Pick::Nothing,
    }
}

pub(super) fn judge(facts: &Facts, plugin: &plugin::Facts, variables: &Variables, findings: &mut Vec<Finding>) {
    judge_network(facts, findings);
    let value = facts.plugin.as_deref();
    if value.is_some_and(|value| entries(Some(value)).is_empty()) {
        let what = format!("NCCL_NET_PLUGIN={} keeps NCCL from opening any plugin", value.unwrap_or_default());
        return findings.push(Finding::problem(Cause::PluginsOff, what, unset(variables, "NCCL_NET_PLUGIN")));
    }
    // No plugin opened, so there is nothing more to judge.
    if plugin.name.is_empty() {
        return;
    }
    let source = plugin.file.is_absolute().then_some(plugin.file.as_path());
    let fix = || cure(facts, plugin, variables);
    match pick(facts, &entries(value), &plugin.name) {
        Pick::Ours(opened) => {
            if let Some(other) = opened.file.as_deref().filter(|other| differ(other, &plugin.file)) {
                let what = format!("NCCL would open another copy of the plugin: {}", other.display());
                let (from, to) = (quoted(plugin.file.to_string_lossy()), quoted(other.to_string_lossy()));
                let fix = format!("cp --remove-destination {from} {to}");
                findings.push(Finding::advice(Cause::OtherCopyFirst, what, fix));
            }
            judge_releases(facts, plugin, variables, findings);
        }
        Pick::Other(opened) => {
            let file = opened.file.as_deref().map_or("a library without a network".into(), Path::to_string_lossy);
            findings.push(match value {
                None => {
                    let what = format!("NCCL would open another plugin in this environment: {file}");
                    Finding::advice(Cause::OtherPluginFirst, what, fix())
                }
                Some(value) => {
                    let what = format!("NCCL_NET_PLUGIN={value} makes NCCL open another plugin: {file}");
                    Finding::problem(Cause::ChoiceOpensOther, what, fix())
                }
            });
        }
        Pick::Nothing => {
            let names: Vec<String> = entries(value).concat();
            let is_asked = |found: &&(file::Facts, String)| names.iter().any(|name| found.0.file.ends_with(name));
            if let Some((file, said)) = facts.broken.iter().find(is_asked) {
                return findings.push(file::judge(file, said, source));
            }
            findings.push(match value {
                None => {
                    let what = "NCCL would not find the plugin in this environment: the loader knows no libnccl-net.so";
                    Finding::advice(Cause::NotOnLoaderPath, what, fix())
                }
                Some(value) => {
                    let what = format!("NCCL_NET_PLUGIN={value} leads nowhere: there is no {}", names.join(" and no "));
                    Finding::problem(Cause::ChoiceLeadsNowhere, what, fix())
                }
            });
        }
    }
}

/// The shortest command after which NCCL opens the plugin that was examined.
fn cure(facts: &Facts, plugin: &plugin::Facts, variables: &Variables) -> String {
    let value = facts.plugin.as_deref();
    let gives = |value| matches!(pick(facts, &entries(value), &plugin.name), Pick::Ours(_));
    let without = || unset(variables, "NCCL_NET_PLUGIN");
    if gives(None) {
        return without();
    }
    if gives(Some(SUFFIX)) {
        return export("NCCL_NET_PLUGIN", SUFFIX);
    }
    let (Some(dir), Some(name)) = (plugin.file.parent(), plugin.file.file_name()) else {
        return "put the directory of libnccl-net.so on LD_LIBRARY_PATH".to_owned();
    };
    let path =
        format!("export LD_LIBRARY_PATH={}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}", quoted(dir.to_string_lossy()));
    // Under another file name no search leads to it.
    if name != DEFAULT_FILE {
        return export("NCCL_NET_PLUGIN", plugin.file.to_string_lossy());
    }
    if value.is_none()
        || value.is_some_and(|value| entries(Some(value)).concat().iter().any(|name| name == DEFAULT_FILE))
    {
        return path;
    }
    format!("{}; {path}", without())
}

/// Whether two files hold something different.
fn differ(a: &Path, b: &Path) -> bool {
    let same_file = a.canonicalize().ok().is_some_and(|a| b.canonicalize().ok() == Some(a));
    !same_file && !matches!((std::fs::read(a), std::fs::read(b)), (Ok(a), Ok(b)) if a == b)
}

/// A value that the newest release understands and one on this host does not.
fn judge_releases(facts: &Facts, plugin: &plugin::Facts, variables: &Variables, findings: &mut Vec<Finding>) {
    let value = facts.plugin.as_deref();
    let fails = |release: &&String| {
        let names = minor(release).map(|minor| entries_of(minor, value));
        names.is_some_and(|names| !matches!(pick(facts, &names, &plugin.name), Pick::Ours(_)))
    };
    if let (Some(release), Some(value)) = (facts.releases.iter().find(fails), value) {
        let what = format!("NCCL {release} does not understand NCCL_NET_PLUGIN={value} as newer releases do");
        findings.push(Finding::problem(Cause::ChoiceNeedsNewerNccl, what, cure(facts, plugin, variables)));
    }
}

/// `NCCL_NET` names the network, whatever plugin was opened.
fn judge_network(facts: &Facts, findings: &mut Vec<Finding>) {
    let Some(net) = facts.net.as_deref().filter(|net| !net.is_empty()) else { return };
    let fix = export("NCCL_NET", NAME);
    if !net.eq_ignore_ascii_case(NAME) {
        let bare = net.trim_matches(|c: char| c.is_whitespace() || c == '"' || c == '\'');
        let what = if bare.eq_ignore_ascii_case(NAME) {
            format!("NCCL_NET has blanks or quotes in its value, and no network is called \"{}\"", net.escape_default())
        } else {
            format!("NCCL_NET={net} makes NCCL use another network")
        };
        findings.push(Finding::problem(Cause::NetIsOther, what, fix));
    } else if net != NAME {
        let what = "NCCL 2.10 to 2.12 compare NCCL_NET case by case";
        findings.push(Finding::advice(Cause::NetCase, what, fix));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_made_as_each_release_makes_them() {
        let of = |minor, value| entries_of(minor, value).into_iter().map(|names| names.join(" ")).collect::<Vec<_>>();
        for release in [18, 20, 21, 26, 27, 30] {
            assert_eq!(of(release, None), ["libnccl-net.so"]);
        }
        assert_eq!(of(19, Some("towline")), ["libnccl-net-towline.so"]);
        assert_eq!(of(19, Some("/a/b.so")), ["libnccl-net-/a/b.so.so"]);
        assert_eq!(of(23, Some("towline")), ["towline libnccl-net-towline.so"]);
        assert_eq!(of(23, Some("a,b")), ["a,b libnccl-net-a,b.so"]);
        assert_eq!(of(28, Some("a,/b")), ["a libnccl-net-a.so", "/b"]);
        assert_eq!(of(28, Some("libx.so")), ["libx.so"]);
        // An empty value counts as unset before 2.27, and as an empty list from then on.
        assert_eq!(of(26, Some("")), ["libnccl-net.so"]);
        assert_eq!(of(28, Some("")), [""; 0]);
        assert_eq!(of(28, Some("NONE")), [""; 0]);
    }
}
