//! The rules of Prometheus's text format, and those that `promtool check metrics` looks at, without promtool.

use std::collections::{BTreeMap, BTreeSet};

use super::check;
use super::gpu;

/// A metric.
#[derive(Default)]
struct Family<'a> {
    help: Option<&'a str>,
    kind: Option<&'a str>,
    /// By all labels but `le`.
    histograms: BTreeMap<String, Parts>,
}

/// What a histogram consists of.
#[derive(Default)]
struct Parts {
    /// Upper bounds and counts.
    buckets: Vec<(f64, f64)>,
    sum: Option<f64>,
    count: Option<f64>,
}

/// Labels by their names.
type Labels<'a> = BTreeMap<&'a str, String>;

/// What is wrong with a page of metrics.
fn faults(page: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut families: BTreeMap<&str, Family<'_>> = BTreeMap::new();
    let mut series = BTreeSet::new();
    let mut current = "";
    if !page.ends_with('\n') {
        faults.push("the last line does not end".to_owned());
    }
    for line in page.lines() {
        let mut fault = |what: &str| faults.push(format!("{what}: {line}"));
        if let Some(comment) = line.strip_prefix("# ") {
            let words: Vec<&str> = comment.splitn(3, ' ').collect();
            let [word @ ("HELP" | "TYPE"), name, text] = words[..] else {
                fault("neither HELP nor TYPE of a metric");
                continue;
            };
            if name != current && families.contains_key(name) {
                fault("a metric in two places");
            }
            current = name;
            let family = families.entry(name).or_default();
            let known = if word == "HELP" { &mut family.help } else { &mut family.kind };
            if known.replace(text).is_some() {
                fault("said twice");
            }
            continue;
        }
        let Some((name, labels, value)) = sample(line) else {
            fault("no sample");
            continue;
        };
        let family = families.entry(current).or_default();
        let kind = family.kind.unwrap_or_default();
        let ending = if kind == "histogram" { name.strip_prefix(current) } else { None };
        if family.help.is_none_or(str::is_empty) || !["counter", "gauge", "histogram"].contains(&kind) {
            fault("without HELP and TYPE before it");
        }
        if !series.insert((name, labels.clone())) {
            fault("a series twice");
        }
        let mut rest = labels;
        let bound = rest.remove("le");
        let parts = family.histograms.entry(format!("{rest:?}"));
        match (ending, bound.map(|bound| bound.parse::<f64>())) {
            (Some("_bucket"), Some(Ok(bound))) => parts.or_default().buckets.push((bound, value)),
            (Some("_sum"), None) => parts.or_default().sum = Some(value),
            (Some("_count"), None) => parts.or_default().count = Some(value),
            (None, None) if name == current => {}
            _ => fault("no sample of its metric"),
        }
    }
    for (name, family) in families {
        let kind = family.kind.unwrap_or_default();
        let mut fault = |what: &str| faults.push(format!("{what}: {name}"));
        if (kind == "counter") != name.ends_with("_total") {
            fault("counters, and only these, end in _total");
        }
        let words: Vec<&str> = name.split('_').collect();
        let reserved = ["counter", "gauge", "histogram", "summary", "bucket", "sum", "count"];
        let abbreviated = ["ms", "us", "ns", "milliseconds", "microseconds", "nanoseconds", "kb", "mb", "gb", "mib"];
        if words.iter().any(|word| reserved.contains(word) || abbreviated.contains(word)) {
            fault("a type or a unit that no name should have");
        }
        if !is_name(name) || name.chars().any(|c| c.is_ascii_uppercase() || c == ':') {
            fault("no name");
        }
        for (labels, parts) in family.histograms {
            let mut fault = |what: &str| faults.push(format!("{what}: {name} of {labels}"));
            if !parts.buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1) {
                fault("buckets that do not grow");
            }
            let last = parts.buckets.last().copied();
            if last.is_none_or(|(bound, count)| bound != f64::INFINITY || Some(count) != parts.count) {
                fault("the last bucket does not hold all");
            }
            if parts.sum.is_none() {
                fault("no sum");
            }
        }
    }
    faults
}

/// Name, labels and value of `name{label="value",…} number`.
fn sample(line: &str) -> Option<(&str, Labels<'_>, f64)> {
    let name = &line[..line.find(['{', ' '])?];
    let mut rest = &line[name.len()..];
    let mut labels = Labels::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, quoted) = rest.split_once("=\"")?;
            let mut value = String::new();
            let mut chars = quoted.char_indices();
            let end = loop {
                match chars.next()? {
                    (at, '"') => break at,
                    (_, '\\') => value.push(match chars.next()?.1 {
                        'n' => '\n',
                        escaped @ ('\\' | '"') => escaped,
                        _ => return None,
                    }),
                    (_, c) => value.push(c),
                }
            };
            if !is_name(label) || label.contains(':') || labels.insert(label, value).is_some() {
                return None;
            }
            rest = &quoted[end + 1..];
            rest = rest.strip_prefix(',').or_else(|| rest.starts_with('}').then_some(rest))?;
        }
        rest = &rest[1..];
    }
    Some((name, labels, rest.strip_prefix(' ')?.parse().ok()?)).filter(|_| is_name(name))
}

fn is_name(text: &str) -> bool {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_' || c == ':';
    text.starts_with(is_first) && text.chars().all(|c| is_first(c) || c.is_ascii_digit())
}

#[test]
fn the_metrics_keep_the_rules_of_their_format() {
    let dir = tempfile::tempdir().unwrap();
    super::run("metrics", dir.path(), &[&[("TOWLINE_METRICS_PEERS", "1")][..], &gpu::variables()].concat());
    let page = check::metrics(dir.path());
    assert_eq!(faults(&page), [] as [String; 0], "{page}");
    assert!(page.contains("_bucket{") && page.contains("# TYPE towline_last_sequence gauge"), "{page}");
}

#[test]
fn each_rule_finds_its_fault() {
    let good = "# HELP a_seconds Time.\n# TYPE a_seconds histogram\na_seconds_bucket{x=\"\\\"\\n\",le=\"0.1\"} 1\n\
                a_seconds_bucket{x=\"\\\"\\n\",le=\"+Inf\"} 2\na_seconds_sum{x=\"\\\"\\n\"} 1.5\n\
                a_seconds_count{x=\"\\\"\\n\"} 2\n# HELP b_total Things.\n# TYPE b_total counter\nb_total{} 1\nb_total{y=\"1\"} 2\n";
    assert_eq!(faults(good), [] as [String; 0]);
    for (from, to, fault) in [
        ("# HELP b_total Things.\n", "", "without HELP"),
        ("# TYPE b_total counter\n", "", "without HELP"),
        ("# TYPE b_total counter", "# TYPE b_total counter\n# TYPE b_total counter", "said twice"),
        ("# TYPE b_total", "# NOTE b_total", "neither HELP nor TYPE"),
        ("b_total", "b", "counters, and only these"),
        ("b_total", "b_ms_total", "a type or a unit"),
        ("b_total", "b_Total_total", "no name"),
        ("b_total{y=\"1\"}", "b_total{}", "a series twice"),
        ("b_total{y=\"1\"}", "c_total{y=\"1\"}", "no sample of its metric"),
        ("b_total{y=\"1\"}", "b_total{y=\"1\",y=\"2\"}", "no sample"),
        ("b_total{y=\"1\"}", "b_total{y=\"\"\"}", "no sample"),
        ("b_total{y=\"1\"}", "b_total{y=\"\\t\"}", "no sample"),
        ("b_total{y=\"1\"} 2", "b_total{y=\"1\"} two", "no sample"),
        ("b_total{y=\"1\"} 2\n", "# HELP a_seconds Time.\n", "a metric in two places"),
        ("le=\"0.1\"} 1", "le=\"0.1\"} 3", "buckets that do not grow"),
        ("le=\"0.1\"", "le=\"+Inf\"", "a series twice"),
        ("le=\"+Inf\"", "le=\"0.3\"", "the last bucket"),
        ("le=\"+Inf\"} 2", "le=\"+Inf\"} 4", "the last bucket"),
        ("a_seconds_sum{x=\"\\\"\\n\"} 1.5\n", "", "no sum"),
        ("a_seconds_count{x=\"\\\"\\n\"} 2\n", "", "the last bucket"),
    ] {
        let page = good.replace(from, to);
        assert_ne!(page, good, "{from}");
        assert!(faults(&page).iter().any(|found| found.starts_with(fault)), "{from} → {to}: {:?}", faults(&page));
    }
    assert_eq!(faults(good.trim_end()).len(), 1);
}
