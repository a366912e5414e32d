//! The dashboard asks only for metrics that there are.

use std::io::Write;
use std::process::{Command, Stdio};

use super::check;
use super::gpu::{self, Gpu};
use super::host::{CommDescr, Host};
use super::play::{Comm, Pace, Shape};

/// A process whose metrics have every family.
pub(crate) fn play() {
    let _gpu = Gpu::enter_if_asked();
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), CommDescr { id: 0x33, ranks: 2, rank: 0 }, &mut mask);
    let task = comm.enqueue(0, 64);
    comm.progress(task, Shape { channels: 1, steps: 1, bytes: 256 }, 1, 1, Pace::NONE);
    comm.finalize();
}

#[test]
fn every_metric_of_the_dashboard_and_the_documentation_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let peers = [("TOWLINE_METRICS_PEERS", "1")];
    super::run("metrics", dir.path(), &[&peers[..], &gpu::variables()].concat());
    let files: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let file = files.iter().find(|path| path.extension().is_some_and(|e| e == "prom")).expect("a metrics file");
    let text = std::fs::read_to_string(file).unwrap();
    let families: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for family in &families {
        let of = |line: &&str| ["", "_bucket"].iter().any(|end| line.starts_with(&format!("{family}{end}{{")));
        let samples = text.lines().filter(of).count();
        assert!(samples > 0, "{family} has samples: {text}");
    }
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let dashboard = std::fs::read_to_string(root.join("docs/grafana/towline.json")).unwrap();
    serde_json::from_str::<serde_json::Value>(&dashboard).unwrap();
    let rules = std::fs::read_to_string(root.join("docs/grafana/rules.yml")).unwrap();
    let docs = std::fs::read_to_string(root.join("docs/profiling.md")).unwrap();
    // What the rules record is no family of ours.
    let recorded: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- record: ")).collect();
    let words = |text: &str| -> Vec<String> {
        text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|word| word.starts_with("towline_"))
            .map(str::to_owned)
            .collect()
    };
    for word in [&dashboard, &rules, &docs].into_iter().flat_map(|text| words(text)) {
        let word =
            ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end)).unwrap_or(&word).to_owned();
        assert!(families.contains(&word.as_str()) || recorded.contains(&word.as_str()), "{word} is no metric");
    }
    for family in families {
        let short = family.trim_start_matches("towline_").trim_start_matches("wire_");
        assert!(docs.contains(short), "{family} is not in docs/profiling.md");
    }
    check::load(&check::traces(dir.path())[0]);
}

#[test]
fn promtool_finds_nothing_to_say_about_the_metrics_and_the_rules() {
    if Command::new("promtool").arg("--version").output().is_err() {
        eprintln!("skipped: promtool (package prometheus) is not installed");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let peers = [("TOWLINE_METRICS_PEERS", "1")];
    super::run("metrics", dir.path(), &[&peers[..], &gpu::variables()].concat());
    let finds = |words: &[&str], input: &str| {
        let mut command = Command::new("promtool");
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    };
    let (good, said) = finds(&["check", "metrics"], &check::metrics(dir.path()));
    assert!(good && said.is_empty(), "{said}");
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/grafana/rules.yml");
    let (good, said) = finds(&["check", "rules", rules], "");
    assert!(good && said.contains("SUCCESS"), "{said}");
    let values = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/profiler/rules_test.yml");
    let (good, said) = finds(&["test", "rules", values], "");
    assert!(good && said.contains("SUCCESS"), "{said}");
}
