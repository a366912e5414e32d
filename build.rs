//! Two things that Cargo does not do by itself: the file names under which NCCL looks for a network plugin, and the
//! linker flag that keeps the library mapped.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The names under which NCCL finds us: on `LD_LIBRARY_PATH`, and with `NCCL_NET_PLUGIN=towline`.
const PLUGIN_NAMES: [&str; 2] = ["libnccl-net.so", "libnccl-net-towline.so"];

/// The file that Cargo builds, seen from the profile directory. A library's name cannot have a hyphen, hence the links.
/// They do not lead to the copy that `cargo build` lays beside them: `cargo run` and `cargo test` neither make that
/// copy nor refresh an old one, but every command refreshes this one.
const ARTEFACT: &str = "deps/libtowline.so";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");

    // Worker threads and a fork handler live in the library: it must stay mapped after NCCL's dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR"));
    // OUT_DIR is <profile directory>/build/<package>-<hash>/out.
    let profile_dir = out.ancestors().nth(3).expect("OUT_DIR lies three levels below the profile directory");
    for name in PLUGIN_NAMES {
        lay_link(profile_dir, name)
            .unwrap_or_else(|error| panic!("linking {name} in {} failed: {error}", profile_dir.display()));
    }
}

/// Makes `dir/name` a relative link to the artefact. Renaming a finished link into place leaves no moment without
/// it for a program that is being started, and lets two builds run at once.
fn lay_link(dir: &Path, name: &str) -> io::Result<()> {
    let link = dir.join(name);
    if fs::read_link(&link).is_ok_and(|target| target == Path::new(ARTEFACT)) {
        return Ok(());
    }
    let temporary = dir.join(format!(".{name}.{}", std::process::id()));
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    symlink(ARTEFACT, &temporary)?;
    fs::rename(&temporary, &link)
}
