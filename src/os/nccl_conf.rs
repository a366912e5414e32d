//! NCCL's configuration files, for programs that run without NCCL.
//!
//! NCCL copies the lines of its files into the environment before it initialises a plugin, so the plugin only needs the
//! environment. The command line runs without NCCL, and gets the same result here.
//!
//! The rules are NCCL's: the file that `NCCL_CONF_FILE` names, or else `.nccl.conf` in the home directory of the user
//! database (not `$HOME`); then `/etc/nccl.conf`. A line is `NAME=value` up to its end, `#` in the first column makes a
//! comment, and nothing is trimmed. An earlier source wins: the environment, then the user's file, then the system's.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs;
use std::path::{Path, PathBuf};

/// The environment of this process beside the lines of NCCL's files.
#[derive(Debug, Default, Clone)]
pub(crate) struct Variables {
    own: BTreeMap<String, String>,
    files: Vec<(PathBuf, Vec<(String, String)>)>,
}

impl Variables {
    /// Reads both. Call it before another thread can change the environment.
    pub(crate) fn read() -> Self {
        let own: BTreeMap<String, String> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
            .collect();
        let paths = paths(&own, home(), Path::new("/etc/nccl.conf"));
        Self::of(own, &paths)
    }

    /// From this environment and these files, some of which may be missing.
    pub(crate) fn of(own: BTreeMap<String, String>, paths: &[PathBuf]) -> Self {
        let files = paths.iter().filter_map(|path| Some((path.clone(), lines(&fs::read(path).ok()?)))).collect();
        Self { own, files }
    }

    /// The environment that the process was started with: the one that the dynamic loader uses.
    pub(crate) fn own(&self) -> &BTreeMap<String, String> {
        &self.own
    }

    /// Sets a variable as if the process had been started with it.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.own.insert(name.to_owned(), value.to_owned());
    }

    /// What NCCL and its plugins see: the environment, files included.
    pub(crate) fn merged(&self) -> BTreeMap<String, String> {
        let mut merged = self.own.clone();
        for (_, name, value) in self.lines() {
            merged.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
        merged
    }

    /// The files that can be read, in NCCL's order.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// Every line of the files: file, name, value.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (&Path, &str, &str)> {
        self.files
            .iter()
            .flat_map(|(path, lines)| lines.iter().map(|(name, value)| (path.as_path(), name.as_str(), value.as_str())))
    }

    /// The file that sets this variable; `None` when the environment does, or nothing.
    pub(crate) fn file_of(&self, name: &str) -> Option<&Path> {
        let of_file = || self.lines().find(|(_, of_line, _)| *of_line == name).map(|(path, _, _)| path);
        if self.own.contains_key(name) { None } else { of_file() }
    }
}

/// The home directory of this process's user, as NCCL looks it up.
fn home() -> Option<PathBuf> {
    // SAFETY: the result is read before this process could make another such call.
    let user = unsafe { libc::getpwuid(libc::getuid()).as_ref() }?;
    // SAFETY: a C string, or null.
    let dir = unsafe { (!user.pw_dir.is_null()).then(|| CStr::from_ptr(user.pw_dir)) }?;
    Some(PathBuf::from(dir.to_str().ok()?))
}

/// The files that NCCL reads in this environment, in order, whether or not they exist.
fn paths(environment: &BTreeMap<String, String>, home: Option<PathBuf>, system: &Path) -> Vec<PathBuf> {
    let user = match environment.get("NCCL_CONF_FILE").filter(|path| !path.is_empty()) {
        Some(path) => Some(PathBuf::from(path)),
        None => home.map(|home| home.join(".nccl.conf")),
    };
    user.into_iter().chain([system.to_owned()]).collect()
}

fn lines(text: &[u8]) -> Vec<(String, String)> {
    let text = String::from_utf8_lossy(text);
    // Only the line feed ends a line: NCCL keeps a carriage return as a part of the value.
    let lines = text.split('\n').filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('='));
    lines.filter(|(name, _)| !name.is_empty()).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_wins_over_the_users_file_and_that_over_the_systems() {
        let home = tempfile::tempdir().expect("a directory");
        let system = home.path().join("system.conf");
        fs::write(home.path().join(".nccl.conf"), "A=user\nB=user=1\r\n#C=user\nnonsense\n=x\nE = e\n")
            .expect("a file");
        fs::write(&system, "A=system\nB=system\nC=system\nD=system\n").expect("a file");
        let own = BTreeMap::from([("A".to_owned(), "own".to_owned())]);
        let seen = Variables::of(own.clone(), &paths(&own, Some(home.path().to_owned()), &system));
        let merged = seen.merged();
        let get = |name: &str| merged.get(name).map(String::as_str);
        assert_eq!(
            (get("A"), get("B"), get("C"), get("D")),
            (Some("own"), Some("user=1\r"), Some("system"), Some("system"))
        );
        // Nothing is trimmed.
        assert_eq!((get("E"), get("E ")), (None, Some(" e")));
        assert_eq!(merged.len(), 5, "{merged:?}");
        assert_eq!(seen.file_of("A"), None);
        assert_eq!(seen.file_of("C"), Some(system.as_path()));
    }

    #[test]
    fn nccl_conf_file_replaces_the_users_file_even_when_it_is_missing() {
        let own = BTreeMap::from([("NCCL_CONF_FILE".to_owned(), "/missing".to_owned())]);
        let found = paths(&own, Some("/home/someone".into()), Path::new("/s"));
        assert_eq!(found, [PathBuf::from("/missing"), PathBuf::from("/s")]);
    }
}
