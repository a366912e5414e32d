//! The NCCL libraries on this host, and the version of the plugin interface that each would use.
//!
//! They are not loaded: a library's release and the table names that it looks up stand in its read-only data.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

#[derive(Serialize, Debug, PartialEq)]
pub(super) struct Library {
    #[serde(serialize_with = "super::lossy")]
    pub(super) file: PathBuf,
    /// Like "2.28.9+cuda13.0"; `None` when the file does not contain it.
    pub(super) release: Option<String>,
    /// The newest version of the network plugin interface that it supports.
    pub(super) net_api: Option<u32>,
}

/// Every NCCL library that a program started here might load.
pub(super) fn gather(environment: &BTreeMap<String, String>) -> Vec<Library> {
    let mut files = BTreeSet::new();
    let get = |name: &str| environment.get(name).map(String::as_str).unwrap_or_default();
    for dir in get("LD_LIBRARY_PATH").split(':').filter(|dir| !dir.is_empty()) {
        files.extend(Path::new(dir).join("libnccl.so.2").canonicalize());
    }
    files.extend(in_loader_cache());
    let homes = [get("VIRTUAL_ENV"), get("CONDA_PREFIX"), "/usr", "/usr/local"].map(PathBuf::from);
    let user = Path::new(get("HOME")).join(".local");
    for prefix in homes.into_iter().chain([user]).filter(|prefix| prefix.is_absolute()) {
        files.extend(in_python(&prefix));
    }
    files.into_iter().map(|file| examine(&file)).collect()
}

fn in_loader_cache() -> Vec<PathBuf> {
    // The tool lies in a directory that is not always on PATH.
    let listed = ["ldconfig", "/sbin/ldconfig"].iter().find_map(|tool| Command::new(tool).arg("-p").output().ok());
    let text = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let lines = text.lines().filter(|line| line.trim_start().starts_with("libnccl.so"));
    lines.filter_map(|line| Path::new(line.split_once("=> ")?.1).canonicalize().ok()).collect()
}

/// What pip installs: `lib/python3.*/site-packages/nvidia/nccl/lib/libnccl.so.2`.
fn in_python(prefix: &Path) -> Vec<PathBuf> {
    let pythons = fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    let pythons = pythons.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
    let packages = pythons.flat_map(|entry| ["site-packages", "dist-packages"].map(|dir| entry.path().join(dir)));
    packages.filter_map(|dir| dir.join("nvidia/nccl/lib/libnccl.so.2").canonicalize().ok()).collect()
}

fn examine(file: &Path) -> Library {
    let texts = read_only_data(file).unwrap_or_default();
    let (release, net_api) = find(&texts);
    Library { file: file.to_owned(), release, net_api }
}

/// The release and the newest table name in a library's texts.
fn find(data: &[u8]) -> (Option<String>, Option<u32>) {
    let mut release = None;
    let mut newest = None;
    for text in data.split(|&byte| byte == 0).filter_map(|text| std::str::from_utf8(text).ok()) {
        if let Some(rest) = text.split_once("NCCL version ").map(|(_, rest)| rest) {
            let words = rest.split([' ', '\n']).next().unwrap_or_default();
            let is_release = words.starts_with(|c: char| c.is_ascii_digit()) && words.contains('.');
            // The one with the CUDA release is more precise.
            if is_release && (release.is_none() || words.contains('+')) {
                release = Some(words.to_owned());
            }
        }
        if let Some(version) = text.strip_prefix("ncclNetPlugin_v").and_then(|number| number.parse().ok()) {
            newest = newest.max(Some(version));
        }
    }
    (release, newest)
}

/// The `.rodata` section of a 64-bit little-endian ELF file: a hundredth of a library that is mostly GPU code.
fn read_only_data(file: &Path) -> Option<Vec<u8>> {
    let file = File::open(file).ok()?;
    let read = |offset: u64, length: usize| {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, offset).ok().map(|()| bytes)
    };
    let number = |bytes: &[u8], at: usize, length: usize| {
        bytes[at..at + length].iter().rev().fold(0_u64, |value, &byte| value << 8 | u64::from(byte))
    };
    let header = read(0, 64)?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, entry_size) = (number(&header, 40, 8), number(&header, 58, 2) as usize);
    let (count, names_index) = (number(&header, 60, 2) as usize, number(&header, 62, 2) as usize);
    if entry_size < 64 || names_index >= count {
        return None;
    }
    let sections = read(table, count * entry_size)?;
    let place = |index: usize| {
        let section = &sections[index * entry_size..];
        (number(section, 24, 8), usize::try_from(number(section, 32, 8)).ok())
    };
    // 256 MiB: far above any real section, far below what a broken file could request.
    let load = |index: usize| {
        let (offset, size) = place(index);
        read(offset, size.filter(|&size| size <= 256 << 20)?)
    };
    let names = load(names_index)?;
    let is_rodata = |index: &usize| {
        let name = number(&sections[index * entry_size..], 0, 4) as usize;
        names.get(name..).is_some_and(|name| name.starts_with(b".rodata\0"))
    };
    load((0..count).find(is_rodata)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_and_interface_are_read_from_texts() {
        let texts = b"x\0NCCL version 2.28.9 compiled with CUDA 13.0\0ncclNetPlugin_v8\0ncclNetPlugin_v11\0\
                      ncclNetPlugin_vx\0Cuda %d NCCL version 2.28.9+cuda13.0\0ncclNetPlugin_v9\0";
        assert_eq!(find(texts), (Some("2.28.9+cuda13.0".into()), Some(11)));
        assert_eq!(find(b"NCCL version %d\0nothing"), (None, None));
    }

    #[test]
    fn read_only_data_is_found_in_a_real_library_and_nowhere_else() {
        let own = std::env::current_exe().unwrap();
        let data = read_only_data(&own).unwrap();
        let needle = b"read_only_data_is_found_in_a_real_library";
        assert!(data.windows(needle.len()).any(|window| window == needle));
        assert_eq!(read_only_data(Path::new("/etc/passwd")), None);
        let library = examine(Path::new("/etc/passwd"));
        assert_eq!((library.release, library.net_api), (None, None));
    }
}
