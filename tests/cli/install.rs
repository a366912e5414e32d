//! What a user installs: the program finds its library in a package's layout, says what is missing where there is none,
//! and describes itself for the manual and the shells.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use crate::support::eventually;

const PROGRAM: &str = env!("CARGO_BIN_EXE_towline");

/// A copy of the program in `dir/bin`, as a package, a wheel or `cargo install` lays it.
fn install(dir: &Path, with_library: bool) -> PathBuf {
    fs::create_dir_all(dir.join("bin")).unwrap();
    let program = dir.join("bin/towline");
    fs::copy(PROGRAM, &program).unwrap();
    if with_library {
        fs::create_dir_all(dir.join("lib/towline")).unwrap();
        let library = Path::new(PROGRAM).with_file_name("libnccl-net.so");
        fs::copy(library, dir.join("lib/towline/libnccl-net.so")).unwrap();
    }
    program
}

fn run(program: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("NCCL_") || text.starts_with("TOWLINE_") || text == "LD_LIBRARY_PATH" {
            command.env_remove(&name);
        }
    }
    command.args(arguments).env("NCCL_CONF_FILE", "/nonexistent");
    eventually("towline starts", Duration::from_secs(10), || match command.output() {
        // A test beside this one has forked while the program was being copied, and has not called exec yet.
        Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => None,
        output => Some(output.expect("towline starts")),
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_packaged_program_opens_its_own_library_and_exports_where_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let program = install(&root, true);
    let lib = root.join("lib/towline");

    let exports = run(&program, &["env"]);
    assert!(exports.status.success(), "{}", text(&exports.stderr));
    let expected = format!(
        "export LD_LIBRARY_PATH='{}'${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\nexport NCCL_NET=Towline\n",
        lib.display()
    );
    assert_eq!(text(&exports.stdout), expected);

    let output = run(&program, &["all-reduce", "-b", "8", "-e", "8", "-n", "1", "-w", "0", "--timeout", "20"]);
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    let used = lib.join("libnccl-net.so").display().to_string();
    assert!(text(&output.stdout).contains(&used), "{used}:\n{}", text(&output.stdout));
}

/// `cargo install` installs programs only: the user is told that, and what to do, whatever is called first.
#[test]
fn a_program_without_its_library_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let program = install(dir.path(), false);
    let calls: [&[&str]; 4] =
        [&["env"], &["all-reduce", "-b", "8", "-e", "8"], &["send-recv", "-b", "8", "-e", "8"], &["doctor"]];
    for call in calls {
        let output = run(&program, call);
        assert_eq!(output.status.code(), Some(1), "{call:?}");
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(
            said.contains("cargo install") && said.contains("install Towline's package or wheel"),
            "{call:?}: {said}"
        );
    }
}

#[test]
fn manual_pages_and_completions_know_every_subcommand_a_user_may_call() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(Path::new(PROGRAM), &["generate", dir.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let completions = ["towline.bash", "_towline", "towline.fish"].map(|name| read(&format!("completions/{name}")));
    for subcommand in ["all-reduce", "send-recv", "doctor", "trace", "env"] {
        assert!(read("man1/towline.1").contains(&subcommand.replace('-', "\\-")), "towline.1: {subcommand}");
        assert!(read(&format!("man1/towline-{subcommand}.1")).starts_with(".ie"), "{subcommand}");
        assert!(completions.iter().all(|text| text.contains(subcommand)), "{subcommand}");
    }
    assert!(!dir.path().join("man1/towline-rank.1").exists(), "what towline starts itself is not for users");
}
