//! Prometheus's text format.

use std::fmt::{Display, Write};

use super::labels::Labels;
use crate::trace::summary::Histogram;

/// Upper bounds of a duration's classes, in seconds.
const BOUNDS: [f64; 13] = [0.000_01, 0.000_03, 0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0];

/// A text that grows family by family.
pub(super) struct Page<'a> {
    pub(super) text: String,
    labels: &'a Labels,
}

impl<'a> Page<'a> {
    pub(super) fn new(labels: &'a Labels) -> Self {
        Self { text: String::new(), labels }
    }

    /// Begins a family.
    pub(super) fn family<'b>(&'b mut self, name: &'static str, kind: &str, help: &str) -> Family<'b> {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Family { text: &mut self.text, labels: self.labels.text(), name }
    }
}

/// A metric and its series.
pub(super) struct Family<'a> {
    text: &'a mut String,
    labels: &'a str,
    name: &'static str,
}

impl Family<'_> {
    /// A series, with its own labels behind the process's.
    pub(super) fn sample(&mut self, labels: &str, value: impl Display) {
        self.line("", labels, value);
    }

    /// The series of a histogram of nanoseconds.
    pub(super) fn histogram(&mut self, labels: &str, durations: &Histogram) {
        let comma = if labels.is_empty() { "" } else { "," };
        for bound in BOUNDS {
            let below = durations.below((bound * 1e9) as u64);
            self.line("_bucket", &format!("{labels}{comma}le=\"{bound}\""), below);
        }
        self.line("_bucket", &format!("{labels}{comma}le=\"+Inf\""), durations.count());
        self.line("_sum", labels, durations.sum() as f64 / 1e9);
        self.line("_count", labels, durations.count());
    }

    fn line(&mut self, ending: &str, labels: &str, value: impl Display) {
        let comma = if labels.is_empty() { "" } else { "," };
        let _ = writeln!(self.text, "{}{ending}{{{}{comma}{labels}}} {value}", self.name, self.labels);
    }
}
