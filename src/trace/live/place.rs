//! Where state files lie: in `TOWLINE_STATE_DIR`, or in a directory of the user's in the host's memory.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{LONGEST, State};
use crate::trace::claim::is_older;
use crate::trace::perfetto::digest;

/// How the names of state files end.
pub(crate) const ENDING: &str = "state";

/// A file of a process that is gone is removed by another process when it is so old.
const KEPT: Duration = Duration::from_secs(600);

/// A state that cannot be read is read again after this: where the disk is full it is written in place.
const HALF_WRITTEN: Duration = Duration::from_millis(100);

/// Longest name of a socket that the kernel takes (`sun_path`, with its terminating zero).
const LONGEST_NAME: usize = 107;

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

/// A name by which the kernel takes a socket's path, whatever its length: through the descriptor of its directory,
/// which must be kept open meanwhile.
///
/// # Errors
/// When there is no such directory.
pub(crate) fn short_name(path: &Path) -> io::Result<(Option<File>, PathBuf)> {
    if path.as_os_str().len() <= LONGEST_NAME {
        return Ok((None, path.to_owned()));
    }
    let dir = File::open(path.parent().unwrap_or(Path::new(".")))?;
    let name = Path::new(&format!("/proc/self/fd/{}", dir.as_raw_fd())).join(path.file_name().unwrap_or_default());
    Ok((Some(dir), name))
}

/// The states of all files in a directory, and why others cannot be read. A file that its process has just removed is
/// passed over.
///
/// # Errors
/// When the directory cannot be read.
pub(crate) fn read_all(dir: &Path) -> io::Result<Vec<(PathBuf, io::Result<State>)>> {
    let paths = std::fs::read_dir(dir)?.flatten().map(|entry| entry.path());
    let mut found: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|ending| ending == ENDING))
        .map(|path| {
            let state = read(&path);
            (path, state)
        })
        .collect();
    if found.iter().any(|(_, state)| state.is_err()) {
        std::thread::sleep(HALF_WRITTEN);
        found.iter_mut().filter(|(_, state)| state.is_err()).for_each(|(path, state)| *state = read(path));
    }
    found.retain(|(_, state)| !state.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// The state in a file.
///
/// # Errors
/// When there is none.
pub(crate) fn read(path: &Path) -> io::Result<State> {
    // Opening a FIFO would wait for its writer.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no regular file"));
    }
    if found.len() > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it is {} bytes long", found.len())));
    }
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes)?;
    State::read(&bytes)
}

/// Removes old files of this host's processes that are gone, which are named `PREFIX` and the process's number, and
/// their sockets.
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
    fn what_is_no_state_neither_blocks_nor_hides_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("a.state"), State { pid: 7, ..State::default() }.text()).unwrap();
        std::fs::write(at("b.state"), "{\"version\":").unwrap();
        std::fs::write(at("c.txt"), "").unwrap();
        std::fs::create_dir(at("d.state")).unwrap();
        let fifo = std::ffi::CString::new(at("e.state").into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: the path ends in a zero byte and is only read.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        // Sparse: it takes no room.
        File::create(at("f.state")).unwrap().set_len(LONGEST + 1).unwrap();
        let found = read_all(dir.path()).unwrap();
        let told: Vec<_> =
            found.into_iter().map(|(_, state)| state.map(|it| it.pid).map_err(|it| it.to_string())).collect();
        let of = |number: usize| told[number].as_ref().unwrap_err().as_str();
        assert_eq!((told.len(), &told[0]), (5, &Ok(7)));
        assert!(of(1).starts_with("it is not a whole state"), "{}", of(1));
        assert_eq!(
            [of(2), of(3), of(4)],
            ["it is no regular file", "it is no regular file", "it is 67108865 bytes long"]
        );
    }
}
