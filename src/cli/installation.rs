//! Where the plugin of this installation lies, and the variables that make NCCL find it: `towline env`.
//!
//! Three layouts: a build (the library beside the program), a package or wheel (`bin/towline` and
//! `lib/towline/libnccl-net.so`), and a program alone, as `cargo install` leaves it.

use std::env;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::host::{DEFAULT_FILE, Plugin};
use crate::os::error::{Error, Result};
use clap::Args;

use super::Verdict;
use super::output::print;

/// Where packages and wheels keep the library, seen from the program's directory.
const PACKAGED: &str = "../lib/towline";

/// What to do where the program has no plugin.
pub(crate) const WITHOUT_PLUGIN: &str = "`cargo install` installs this program without its plugin: install Towline's \
    package or wheel, or build a checkout with `cargo build --release` and name target/release/libnccl-net.so with --plugin";

/// Print the exports that make NCCL use this installation: eval "$(towline env)"
#[derive(Args)]
pub(crate) struct Options {}

/// The plugin to open where none is named: this installation's, else the one that the dynamic loader finds.
pub(crate) fn plugin_file() -> PathBuf {
    installed().unwrap_or_else(|| PathBuf::from(DEFAULT_FILE))
}

fn installed() -> Option<PathBuf> {
    let beside = Plugin::default_file();
    if beside.is_absolute() {
        return Some(beside);
    }
    packaged_with(&env::current_exe().ok()?)
}

/// The library that was installed together with `program`. Symbolic links to the program are followed.
fn packaged_with(program: &Path) -> Option<PathBuf> {
    let program = program.canonicalize().ok()?;
    program.parent()?.join(PACKAGED).canonicalize().ok().map(|dir| dir.join(DEFAULT_FILE)).filter(|file| file.exists())
}

/// The first directory of `LD_LIBRARY_PATH` that has the library.
fn on_library_path() -> Option<PathBuf> {
    let path = env::var_os("LD_LIBRARY_PATH")?;
    let dirs = env::split_paths(&path).filter(|dir| dir.is_absolute());
    dirs.map(|dir| dir.join(DEFAULT_FILE)).find(|file| file.exists())
}

/// Prints the exports.
pub(crate) fn run(_: &Options) -> Result<Verdict> {
    let file = installed().or_else(on_library_path);
    let file = file.ok_or_else(|| Error::argument("this installation has no plugin").with_hint(WITHOUT_PLUGIN))?;
    let dir = file.parent().unwrap_or(Path::new("/"));
    print(exports(dir));
    Ok(Verdict::Good)
}

/// The two lines, for any POSIX shell. An `LD_LIBRARY_PATH` that is empty gets no empty entry, which would stand for
/// the current directory.
fn exports(dir: &Path) -> Vec<u8> {
    let quoted = dir.as_os_str().as_bytes().split(|&byte| byte == b'\'').collect::<Vec<_>>().join(&br"'\''"[..]);
    let after = b"'${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\nexport NCCL_NET=Towline\n";
    [b"export LD_LIBRARY_PATH='", &quoted[..], after].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::fs;

    #[test]
    fn the_library_is_found_from_a_package_s_program_also_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("usr/bin")).unwrap();
        let program = root.join("usr/bin/towline");
        fs::write(&program, "").unwrap();
        assert_eq!(packaged_with(&program), None, "a program alone, as cargo install leaves it");

        fs::create_dir_all(root.join("usr/lib/towline")).unwrap();
        assert_eq!(packaged_with(&program), None, "the directory alone is no library");
        let library = root.join("usr/lib/towline/libnccl-net.so");
        fs::write(&library, "").unwrap();
        assert_eq!(packaged_with(&program), Some(library.clone()));

        let link = root.join("towline");
        std::os::unix::fs::symlink(&program, &link).unwrap();
        assert_eq!(packaged_with(&link), Some(library));
    }

    #[test]
    fn a_shell_reads_the_exports_back_whatever_the_directory_is_called() {
        for name in [&b"/opt/towline"[..], b"/opt/with blank", b"/opt/o'hara/$HOME", b"/opt/\xff"] {
            for (before, after) in [("", &b""[..]), ("/other", b":/other")] {
                let mut script = exports(Path::new(OsStr::from_bytes(name)));
                script.extend_from_slice(b"printf '%s %s' \"$NCCL_NET\" \"$LD_LIBRARY_PATH\"");
                let mut shell = std::process::Command::new("sh");
                shell.arg("-c").arg(OsStr::from_bytes(&script)).env("LD_LIBRARY_PATH", before);
                assert_eq!(shell.output().unwrap().stdout, [b"Towline ", name, after].concat());
            }
        }
    }
}
