//! NCCL's configuration files, for programs that run without NCCL.
//!
//! NCCL copies the lines of its files into the environment before it initialises a plugin, so the plugin only needs
//! the environment. The command line has no NCCL to do that, and asks here for the same answer.
//!
//! The rules are NCCL's: the file that `NCCL_CONF_FILE` names, or else `~/.nccl.conf`; then `/etc/nccl.conf`. A line
//! is `NAME=value` up to its end, `#` in the first column makes a comment. What is set earlier stays: the environment
//! before the user's file before the system's.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The names and values that NCCL would see in this process's environment, files included.
pub fn environment() -> BTreeMap<String, String> {
    let own: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .collect();
    let files = files(&own, Path::new("/etc/nccl.conf"));
    merge(own, &files)
}

/// The files that NCCL reads in this environment, in order, whether or not they exist.
fn files(environment: &BTreeMap<String, String>, system: &Path) -> Vec<PathBuf> {
    let user = match environment.get("NCCL_CONF_FILE").filter(|path| !path.is_empty()) {
        Some(path) => Some(PathBuf::from(path)),
        None => environment.get("HOME").map(|home| Path::new(home).join(".nccl.conf")),
    };
    user.into_iter().chain([system.to_owned()]).collect()
}

fn merge(mut environment: BTreeMap<String, String>, files: &[PathBuf]) -> BTreeMap<String, String> {
    for file in files {
        let text = fs::read(file).unwrap_or_default();
        for line in String::from_utf8_lossy(&text).lines().filter(|line| !line.starts_with('#')) {
            if let Some((name, value)) = line.split_once('=').filter(|(name, _)| !name.is_empty()) {
                environment.entry(name.to_owned()).or_insert_with(|| value.to_owned());
            }
        }
    }
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_wins_over_the_users_file_and_that_over_the_systems() {
        let home = tempfile::tempdir().expect("a directory");
        let system = home.path().join("system.conf");
        fs::write(home.path().join(".nccl.conf"), "A=user\r\nB=user=1\n#C=user\nnonsense\n=x\n").expect("a file");
        fs::write(&system, "A=system\nB=system\nC=system\nD=system\n").expect("a file");
        let home_text = home.path().to_str().expect("text").to_owned();
        let own = BTreeMap::from([("HOME".to_owned(), home_text), ("A".to_owned(), "own".to_owned())]);
        let seen = merge(own.clone(), &files(&own, &system));
        let get = |name: &str| seen.get(name).map(String::as_str);
        assert_eq!(
            (get("A"), get("B"), get("C"), get("D")),
            (Some("own"), Some("user=1"), Some("system"), Some("system"))
        );
        assert_eq!(seen.len(), 5, "{seen:?}");
    }

    #[test]
    fn nccl_conf_file_replaces_the_users_file_even_when_it_is_missing() {
        let own = BTreeMap::from([
            ("HOME".to_owned(), "/home/someone".to_owned()),
            ("NCCL_CONF_FILE".to_owned(), "/missing".to_owned()),
        ]);
        assert_eq!(files(&own, Path::new("/s")), [PathBuf::from("/missing"), PathBuf::from("/s")]);
    }
}
