//! The emulated machine of the RDMA tests, whose links and devices a test may change as it likes.

use std::process::Command;

/// Runs a shell's command in it; gives what it printed.
pub fn machine(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().expect("a shell");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
