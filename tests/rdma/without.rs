//! A host whose libibverbs cannot be loaded uses TCP and logs that once; if RDMA is required, the error names what is
//! missing.

#![cfg(feature = "rdma")]

use std::process::{Command, Output};

/// A verified all-reduce of two processes that find rubbish in the place of libibverbs.
fn all_reduce(backend: &str, rubbish: &[u8]) -> (Output, String) {
    let folder = tempfile::tempdir().expect("a directory for temporary files");
    std::fs::write(folder.path().join("libibverbs.so.1"), rubbish).expect("a file");
    let output = Command::new(env!("CARGO_BIN_EXE_towline"))
        .args(["all-reduce", "-b", "1K", "-e", "64K", "-f", "64", "-n", "2", "-w", "1", "--timeout", "20"])
        .env_remove("NCCL_IB_DISABLE")
        .env_remove("TOWLINE_KEY_FILE")
        .env("TOWLINE_BACKEND", backend)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("NCCL_CONF_FILE", "/nonexistent")
        .env("NCCL_DEBUG", "INFO")
        .output()
        .expect("towline starts");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, log)
}

/// A file that is no library, and one that ends too soon. (One for another kind of computer the linker would pass
/// over.)
fn rubbish() -> [Vec<u8>; 2] {
    let this = std::fs::read("/proc/self/exe").expect("this program");
    [b"no library\n".repeat(500), this[..100].to_vec()]
}

#[test]
fn a_host_whose_libibverbs_does_not_load_runs_over_tcp_and_says_so_once() {
    for rubbish in rubbish() {
        let (output, log) = all_reduce("auto", &rubbish);
        assert!(output.status.success(), "{log}");
        let table = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(table.contains("65536"), "{table}");
        let said = log.lines().filter(|line| line.contains("running over TCP: libibverbs does not load")).count();
        assert_eq!(said, 2, "once by each of the two ranks:\n{log}");
        assert!(!log.contains("WARN"), "nothing is wrong with such a host:\n{log}");
    }
}

#[test]
fn who_insists_on_rdma_is_told_that_libibverbs_does_not_load() {
    for rubbish in rubbish() {
        let (output, log) = all_reduce("rdma", &rubbish);
        assert!(!output.status.success(), "{log}");
        for words in ["libibverbs does not load", "libibverbs.so.1", "TOWLINE_BACKEND=rdma asks for RDMA"] {
            assert!(log.contains(words), "{words}:\n{log}");
        }
        assert!(!log.contains("running over TCP"), "{log}");
    }
}
