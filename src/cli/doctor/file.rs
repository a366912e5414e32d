//! A library that the loader does not take: why, and the cure for that.

use std::ffi::CString;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::cure::quoted;
use super::{Cause, Finding};

/// What can be seen of a file without opening it as a library.
#[derive(Debug, Default, Clone)]
pub(super) struct Facts {
    pub(super) file: PathBuf,
    exists: bool,
    /// Where it leads, if it is a link that leads nowhere.
    dangles_to: Option<PathBuf>,
    /// The first directory, or the file, that this user may not enter or read.
    closed: Option<PathBuf>,
    /// ELF's number of its processor architecture; `None` when it is no 64-bit ELF file.
    machine: Option<u16>,
    /// The mount point, when programs may not be run from it.
    no_exec: Option<PathBuf>,
}

/// Examines a file.
pub(super) fn gather(file: &Path) -> Facts {
    Facts {
        exists: file.exists(),
        dangles_to: fs::read_link(file).ok().filter(|_| !file.exists()),
        closed: closed(file),
        machine: machine(file),
        no_exec: no_exec(file),
        file: file.to_owned(),
    }
}

fn closed(file: &Path) -> Option<PathBuf> {
    let may = |path: &Path, mode| {
        let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return true };
        // SAFETY: a C string that outlives the call.
        unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), mode, libc::AT_EACCESS) == 0 }
    };
    let mut parents: Vec<&Path> = file.ancestors().skip(1).filter(|dir| !dir.as_os_str().is_empty()).collect();
    parents.reverse();
    let dir = parents.into_iter().find(|dir| dir.exists() && !may(dir, libc::X_OK));
    dir.or_else(|| (file.exists() && !may(file, libc::R_OK)).then_some(file)).map(Path::to_owned)
}

fn machine(file: &Path) -> Option<u16> {
    let mut header = [0; 20];
    fs::File::open(file).ok()?.read_exact(&mut header).ok()?;
    header.starts_with(b"\x7fELF").then(|| u16::from_le_bytes([header[18], header[19]]))
}

/// The mount point of a file on a file system that is mounted `noexec`.
fn no_exec(file: &Path) -> Option<PathBuf> {
    let file = file.canonicalize().ok()?;
    let path = CString::new(file.as_os_str().as_bytes()).ok()?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: a C string, and a struct that the call fills.
    if unsafe { libc::statvfs(path.as_ptr(), answer.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: filled by the call, and zeroed before.
    if unsafe { answer.assume_init() }.f_flag & libc::ST_NOEXEC == 0 {
        return None;
    }
    let device = file.metadata().ok()?.dev();
    let on_it = file.ancestors().take_while(|dir| dir.metadata().is_ok_and(|data| data.dev() == device));
    on_it.last().map(Path::to_owned)
}

/// The architecture that ELF gives this number.
fn architecture(machine: u16) -> String {
    match machine {
        3 => "32-bit x86".to_owned(),
        21 => "ppc64".to_owned(),
        40 => "32-bit arm".to_owned(),
        62 => "x86-64".to_owned(),
        183 => "aarch64".to_owned(),
        243 => "riscv".to_owned(),
        other => format!("another architecture (ELF machine {other})"),
    }
}

/// Why the loader, whose error is `said`, rejects it. `source`: a file that it accepts, to replace it with.
pub(super) fn judge(facts: &Facts, said: &str, source: Option<&Path>) -> Finding {
    let own = machine(Path::new("/proc/self/exe"));
    judge_on(facts, said, source, own)
}

fn judge_on(facts: &Facts, said: &str, source: Option<&Path>, own: Option<u16>) -> Finding {
    let file = facts.file.display();
    let word = quoted(facts.file.to_string_lossy());
    let copied = |otherwise: &str| match source {
        Some(source) => format!("cp --remove-destination {} {word}", quoted(source.to_string_lossy())),
        None => otherwise.to_owned(),
    };
    if let Some(closed) = &facts.closed {
        let what = format!("{file} is closed to this user: {} may not be read", closed.display());
        return Finding::problem(
            Cause::PluginNotReadable,
            what,
            format!("chmod a+rx {}", quoted(closed.to_string_lossy())),
        );
    }
    if let Some(target) = &facts.dangles_to {
        let what = format!("{file} is a link to {}, which does not exist", target.display());
        return Finding::problem(
            Cause::PluginLinkDangles,
            what,
            copied("cp -L copies what a link leads to; copy again"),
        );
    }
    if !facts.exists {
        let fix = "cargo build --release, or name the library with --plugin";
        return Finding::problem(Cause::PluginMissing, format!("there is no plugin {file}"), fix);
    }
    if let Some((machine, own)) = facts.machine.zip(own).filter(|(machine, own)| machine != own) {
        let what = format!("{file} was built for {}, and this host is {}", architecture(machine), architecture(own));
        let fix = copied("take the package for this architecture, or cargo build --release on such a host");
        return Finding::problem(Cause::PluginArchitecture, what, fix);
    }
    if let Some(mount) = &facts.no_exec {
        let what = format!("{file} lies on {}, which is mounted noexec", mount.display());
        let fix = format!("mount -o remount,exec {}", quoted(mount.to_string_lossy()));
        return Finding::problem(Cause::PluginNoExec, what, fix);
    }
    if let Some(wanted) = between(said, "version `GLIBC_", "'") {
        let what = format!("{file} wants the C library of release {wanted}; this host has {}", libc_release());
        let fix = copied("cargo build --release on this system, or one with an older C library");
        return Finding::problem(Cause::PluginWantsNewerLibc, what, fix);
    }
    if let Some(library) = missing_library(said).filter(|library| !facts.file.ends_with(library)) {
        let what = format!("{file} wants {library}, which the loader does not find");
        let fix = format!("install the package that has {library}, or put its directory on LD_LIBRARY_PATH");
        return Finding::problem(Cause::PluginWantsLibrary, what, fix);
    }
    let fix = copied("cargo build --release, or name another library with --plugin");
    Finding::problem(Cause::PluginDoesNotLoad, format!("the loader does not take {file}: {said}"), fix)
}

fn between<'a>(text: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    Some(text.split_once(begin)?.1.split_once(end)?.0)
}

fn missing_library(said: &str) -> Option<&str> {
    let before = said.split_once(": cannot open shared object file: No such file")?.0;
    before.rsplit(": ").next()
}

fn libc_release() -> String {
    // SAFETY: a constant C string of the C library.
    let text = unsafe { std::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_another_one_wants_is_named() {
        let said = "the plugin /a/libnccl-net.so cannot be opened: libfoo.so.1: cannot open shared object file: \
                    No such file or directory";
        let facts = Facts { file: "/a/libnccl-net.so".into(), exists: true, ..Facts::default() };
        let finding = judge_on(&facts, said, None, None);
        assert_eq!(finding.cause, Cause::PluginWantsLibrary);
        assert!(finding.what.contains("wants libfoo.so.1"), "{finding:?}");
    }
}
