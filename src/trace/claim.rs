//! File names that no other process uses. Containers that share a directory may share host names and process numbers
//! too, and so does a second run in one container with the first.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most files of one name that are tried.
pub(super) const MOST: u32 = 10_000;

/// Opens `path`, or the first numbered name beside it that no other process has: `a.prom`, `a.2.prom`, and so on.
/// `open` fails with `taken` when another process has the name. Returns the opened file, its path and the number.
///
/// # Errors
/// Any other failure of `open`, and `taken` when the first `most` names are.
pub(super) fn first_free<T>(
    path: &Path,
    most: u32,
    taken: ErrorKind,
    open: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(T, PathBuf, u32)> {
    let mut number = 1;
    loop {
        let candidate = numbered(path, number);
        match open(&candidate) {
            Ok(opened) => return Ok((opened, candidate, number)),
            Err(error) if error.kind() == taken && number < most => number += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Makes an empty file at the first free name. A file for which `is_over` holds is free too. Returns the path and the
/// number. If no file can be made, returns `path`, and writing to it will fail with the reason.
pub(super) fn claim(path: &Path, is_over: impl Fn(&Path) -> bool) -> (PathBuf, u32) {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        let _ = std::fs::create_dir_all(dir);
    }
    let open = |path: &Path| match OpenOptions::new().write(true).create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && is_over(path) => {
            std::fs::write(path, "").map_err(|_| error)
        }
        other => other.map(drop),
    };
    first_free(path, MOST, ErrorKind::AlreadyExists, open)
        .map_or_else(|_| (path.to_owned(), 1), |((), path, number)| (path, number))
}

/// The name with a number before its ending.
fn numbered(path: &Path, number: u32) -> PathBuf {
    if number == 1 {
        return path.to_owned();
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // The ending of `a.summary.txt` is `summary.txt`.
    let at = name.strip_suffix(".summary.txt").map(str::len).or_else(|| name.rfind('.')).unwrap_or(name.len());
    path.with_file_name(format!("{}.{number}{}", &name[..at], &name[at..]))
}

/// Whether a file that its process renews was not renewed for this long.
pub(super) fn is_older(path: &Path, age: Duration) -> bool {
    let modified = std::fs::metadata(path).and_then(|found| found.modified());
    modified.is_ok_and(|when| when.elapsed().is_ok_and(|passed| passed > age))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_gets_a_file_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let summary = dir.path().join("deeper/towline-h-7.summary.txt");
        let names: Vec<_> = (0..3).map(|_| claim(&summary, |_| false).0).collect();
        let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
        let expected = ["towline-h-7.summary.txt", "towline-h-7.2.summary.txt", "towline-h-7.3.summary.txt"];
        assert_eq!(names.iter().map(name).collect::<Vec<_>>(), expected);
        assert!(names.iter().all(|path| path.exists()));
    }

    #[test]
    fn what_a_process_that_is_gone_renewed_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h-7.state");
        let old = |path: &Path| is_older(path, Duration::from_secs(10));
        assert_eq!(claim(&path, old), (path.clone(), 1));
        // Its process still renews it.
        assert_eq!(claim(&path, old), (dir.path().join("h-7.2.state"), 2));
        let long_ago = std::time::SystemTime::now() - Duration::from_secs(60);
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
        assert_eq!(claim(&path, old), (path.clone(), 1));
    }

    #[test]
    fn a_name_without_an_ending_is_numbered_behind_it() {
        assert_eq!(numbered(Path::new("/d.x/ask"), 2), Path::new("/d.x/ask.2"));
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_left_to_the_one_that_writes() {
        let path = Path::new("/proc/none/h-7.state");
        assert_eq!(claim(path, |_| false), (path.to_owned(), 1));
    }
}
