//! A test host plays NCCL's core for the profiler half of the library, loaded by `dlopen` as NCCL loads it.
//!
//! The profiler is one for a process and takes its orders from the environment, so each scenario runs in a process of
//! its own: the test starts its own executable again with [`scenario`] as the only test.

#[path = "../support/mod.rs"]
mod support;

mod chain;
mod chain_wire;
mod check;
mod dashboard;
mod disk;
mod exposition;
mod figures;
mod gpu;
mod host;
mod hung;
mod lifetimes;
mod merge;
mod picture;
mod play;
mod profile_run;
mod quiet;
mod setups;
mod tuner;
mod versions;
mod why;
mod wire;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// Which scenario the child plays.
const SCENARIO: &str = "PROFILER_TEST_SCENARIO";

/// Runs in the child.
#[test]
#[ignore = "runs in processes that the other tests start"]
fn scenario() {
    let name = std::env::var(SCENARIO).expect("started by another test");
    match name.split_once(':').unwrap_or((&name, "")) {
        ("version", number) => versions::play(number.parse().unwrap()),
        ("rank", args) => setups::play_rank(args),
        ("devices", number) => setups::play_devices(number.parse().unwrap()),
        ("threads", number) => setups::play_threads(number.parse().unwrap()),
        ("silent", _) => lifetimes::play_silent(),
        ("pressure", _) => lifetimes::play_pressure(),
        ("in-progress", _) => lifetimes::play_in_progress(),
        ("refused", _) => lifetimes::play_refused(),
        ("forever", _) => lifetimes::play_forever(),
        ("abort", _) => lifetimes::play_abort(),
        ("fork", _) => lifetimes::play_fork(),
        ("job", args) => merge::play(args),
        ("stuck", args) => why::play(args),
        ("several", args) => why::play_several(args),
        ("metrics", _) => dashboard::play(),
        ("disk", calls) => disk::play(calls),
        ("hung", _) => hung::play(),
        ("figures", _) => figures::play(),
        ("exit", _) => lifetimes::play_exit(),
        ("proxied", _) => lifetimes::play_proxied(),
        ("ask", _) => lifetimes::play_ask(),
        ("wire", setup) => wire::play(setup),
        ("change", _) => chain::play_change(),
        ("chain", number) => chain::play(number.parse().unwrap()),
        ("chain-full", _) => chain::play_full(),
        ("quiet", number) => quiet::play_callbacks(number.parse().unwrap()),
        ("quiet-wire", rounds) => quiet::play_wire(rounds.parse().unwrap()),
        _ => panic!("no scenario {name}"),
    }
}

/// A process that will play `scenario`, with its files in `dir`.
pub(crate) fn command(scenario: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "scenario", "--ignored", "--nocapture", "--test-threads=1"]);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TOWLINE_") || name.starts_with("NCCL_")) {
        command.env_remove(name);
    }
    command.env(SCENARIO, scenario).env("TOWLINE_PROFILE_DIR", dir).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Plays a scenario with the whole profile on, to its end.
pub(crate) fn run(scenario: &str, dir: &Path, more: &[(&str, &str)]) -> Output {
    let mut command = command(scenario, dir);
    command.env("TOWLINE_PROFILE", "all").envs(more.iter().copied());
    finish(command.spawn().unwrap())
}

/// Waits for a scenario that is expected to end well.
pub(crate) fn finish(child: Child) -> Output {
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}
