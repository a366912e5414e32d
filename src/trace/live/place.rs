//! Where state files lie: in `TOWLINE_STATE_DIR`, or in a directory of the user's in the host's memory.

use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{LONGEST, State};
use crate::trace::claim::is_older;
use crate::trace::perfetto::digest;

/// How the names of state files end.
pub(crate) const ENDING: &str = "state";

/// A file of a process that is gone is removed by another process when it is so old.
const KEPT: Duration = Duration::from_secs(600);

/// Where the user's directory may lie: a file system in memory, which no job fills and which is empty after a restart.
const PARENTS: [&str; 2] = ["/dev/shm", "/tmp"];

/// This user's directory on this host; None when there is none, and with `make` when none can be made.
pub(crate) fn default_dir(make: bool) -> Option<PathBuf> {
    // SAFETY: asks for a number.
    let user = unsafe { libc::geteuid() };
    PARENTS.iter().map(|parent| Path::new(parent).join(format!("towline-{user}"))).find(|dir| {
        if make {
            let _ = std::fs::DirBuilder::new().mode(0o700).create(dir);
        }
        // Another user may have made it first: what is in such a directory is not ours.
        let found = std::fs::symlink_metadata(dir);
        found.is_ok_and(|found| found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0)
    })
}

/// This boot of this host: processes with the same one share a clock.
pub(crate) fn boot() -> u64 {
    digest(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim())
}

/// The state file of a process.
pub(crate) fn file(dir: &Path, host: &str, pid: u32) -> PathBuf {
    dir.join(format!("{host}-{pid}.{ENDING}"))
}

/// The states of all files in a directory. What cannot be read is passed over: a process may just have removed it.
///
/// # Errors
/// When the directory cannot be read.
pub(crate) fn read_all(dir: &Path) -> io::Result<Vec<(PathBuf, State)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)?.flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|ending| ending == ENDING)
            && let Ok(state) = read(&path)
        {
            found.push((path, state));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// The state in a file.
///
/// # Errors
/// When there is none.
pub(crate) fn read(path: &Path) -> io::Result<State> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(LONGEST).read_to_end(&mut bytes)?;
    State::read(&bytes)
}

/// Removes old files of this host's processes that are gone, which are named `PREFIX` and the process's number, and their sockets.
pub(in crate::trace) fn sweep(dir: &Path, prefix: &str, ending: &str) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let stem = name.to_str().and_then(|name| name.strip_prefix(prefix)?.strip_suffix(&format!(".{ending}")));
        // A number may stand behind the process's: another container's process has the same one.
        let pid = stem.and_then(|stem| stem.split('.').next()?.parse::<i32>().ok());
        if let (Some(pid), Some(stem)) = (pid, stem)
            && is_older(&entry.path(), KEPT)
            && !is_there(pid)
        {
            let _ = std::fs::remove_file(entry.path());
            let _ = std::fs::remove_file(dir.join(format!("towline-{prefix}{stem}.sock")));
        }
    }
}

/// Whether a process of this number exists here.
fn is_there(pid: i32) -> bool {
    // SAFETY: signal 0 is not delivered to any process.
    let sent = unsafe { libc::kill(pid, 0) };
    sent == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_files_of_processes_that_are_gone_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let long_ago = std::time::SystemTime::now() - 2 * KEPT;
        let ours = std::process::id();
        let names = [
            (format!("host-{ours}.state"), long_ago, true),
            // Beyond the largest process number that Linux gives.
            ("host-4194305.state".to_owned(), long_ago, false),
            ("towline-host-4194305.sock".to_owned(), long_ago, false),
            ("host-4194306.state".to_owned(), std::time::SystemTime::now(), true),
            ("other-4194305.state".to_owned(), long_ago, true),
        ];
        for (name, when, _) in &names {
            std::fs::File::create(dir.path().join(name)).unwrap().set_modified(*when).unwrap();
        }
        sweep(dir.path(), "host-", ENDING);
        for (name, _, stays) in names {
            assert_eq!(dir.path().join(&name).exists(), stays, "{name}");
        }
    }

    #[test]
    fn half_a_file_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.state"), State { pid: 7, ..State::default() }.text()).unwrap();
        std::fs::write(dir.path().join("b.state"), "{\"version\":").unwrap();
        std::fs::write(dir.path().join("c.txt"), "").unwrap();
        let found = read_all(dir.path()).unwrap();
        assert_eq!(found.iter().map(|(_, state)| state.pid).collect::<Vec<_>>(), [7]);
    }
}
