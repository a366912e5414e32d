//! The table of send-recv, and the same as JSON.

use crate::os::error::Result;
use serde::Serialize;

use super::super::Verdict;
use super::super::output::{Output, write_json};
use super::super::plugin_options::PluginFacts;
use super::super::stats::{median, quantile};
use super::super::table::{Table, number};
use super::Options;
use super::protocol::Way;

/// All measurements of one size over one way.
#[derive(Serialize, Debug, Default)]
pub(super) struct Samples {
    /// Bytes that the verification found wrong.
    pub(super) wrong: usize,
    /// Messages in one measurement of bandwidth.
    pub(super) messages: usize,
    /// Round trips in one measurement of latency.
    pub(super) turns: usize,
    /// Per measurement, 10⁹ bytes per second.
    bandwidth_gbs: Vec<f64>,
    /// Per measurement, messages per second.
    messages_per_s: Vec<f64>,
    /// Per measurement, the median of half round trips in microseconds.
    latency_us: Vec<f64>,
    /// Per measurement, the 99th percentile of the same.
    latency_p99_us: Vec<f64>,
}

impl Samples {
    pub(super) fn new(wrong: usize, messages: usize, turns: usize) -> Self {
        Self { wrong, messages, turns, ..Self::default() }
    }

    pub(super) fn add_stream(&mut self, size: usize, count: usize, seconds: f64) {
        self.bandwidth_gbs.push((size * count) as f64 / seconds / 1e9);
        self.messages_per_s.push(count as f64 / seconds);
    }

    pub(super) fn add_ping_pong(&mut self, one_way_seconds: &[f64]) {
        self.latency_us.push(median(one_way_seconds) * 1e6);
        self.latency_p99_us.push(quantile(one_way_seconds, 0.99) * 1e6);
    }
}

/// One size.
#[derive(Serialize, Debug)]
pub(super) struct Row {
    pub(super) size: usize,
    pub(super) outstanding: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) plugin: Option<Samples>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) raw_tcp: Option<Samples>,
}

impl Row {
    pub(super) fn of(&mut self, way: Way) -> &mut Option<Samples> {
        match way {
            Way::Plugin => &mut self.plugin,
            Way::RawTcp => &mut self.raw_tcp,
        }
    }
}

/// Everything that is printed, kept for the JSON file.
#[derive(Serialize)]
pub(super) struct Report {
    version: &'static str,
    outstanding: usize,
    sockets: Option<u16>,
    plugins: Vec<PluginFacts>,
    results: Vec<Row>,
    #[serde(skip)]
    bandwidth: bool,
    #[serde(skip)]
    table: Table,
    #[serde(skip)]
    json: Option<std::path::PathBuf>,
}

impl Report {
    pub(super) fn new(options: &Options, outstanding: usize, plugins: Vec<PluginFacts>) -> Self {
        let mut columns = vec![("size", "(B)", 12), ("bandwidth", "(GB/s)", 9), ("messages", "(1000/s)", 9)];
        if !options.bandwidth {
            columns.extend([("latency", "(us)", 9), ("p99", "(us)", 9)]);
        }
        columns.push(("#wrong", "(B)", 6));
        if options.compare {
            columns.extend([("raw bw", "(GB/s)", 9), ("ratio", "", 6)]);
        }
        if options.compare && !options.bandwidth {
            columns.extend([("raw lat", "(us)", 9), ("ratio", "", 6)]);
        }
        Self {
            version: env!("CARGO_PKG_VERSION"),
            outstanding,
            sockets: (options.raw_tcp || options.compare).then_some(options.sockets),
            plugins,
            results: Vec::new(),
            bandwidth: options.bandwidth,
            table: Table::new(columns),
            json: options.json.clone(),
        }
    }

    /// What runs where, and the headings.
    pub(super) fn begin(&self, output: &mut Output) {
        output.line(format!(
            "# towline {}: one-way bandwidth with {} messages outstanding{}",
            self.version,
            self.outstanding,
            if self.bandwidth { "" } else { "; latency is half a round trip" }
        ));
        for (side, facts) in ["sender", "receiver"].iter().zip(&self.plugins) {
            let PluginFacts { plugin, file, api, device, speed_mbps } = facts;
            output.line(format!("# {side}: {plugin} {api}, device {device} at {speed_mbps} Mb/s, {file}"));
        }
        if let Some(sockets) = self.sockets {
            output.line(format!("# raw: plain TCP over {sockets} sockets with as many threads on each side"));
        }
        output.line("#");
        for line in self.table.headings() {
            output.line(line);
        }
    }

    pub(super) fn row(&mut self, output: &mut Output, row: Row) {
        let mut cells = vec![row.size.to_string()];
        if let Some(shown) = row.plugin.as_ref().or(row.raw_tcp.as_ref()) {
            cells.push(number(median(&shown.bandwidth_gbs), 9));
            cells.push(number(median(&shown.messages_per_s) / 1e3, 9));
            if !shown.latency_us.is_empty() {
                cells.push(number(median(&shown.latency_us), 9));
                cells.push(number(median(&shown.latency_p99_us), 9));
            }
            cells.push((row.plugin.iter().chain(&row.raw_tcp).map(|samples| samples.wrong).sum::<usize>()).to_string());
        }
        if let (Some(plugin), Some(raw)) = (&row.plugin, &row.raw_tcp) {
            for (ours, yardstick) in
                [(&plugin.bandwidth_gbs, &raw.bandwidth_gbs), (&plugin.latency_us, &raw.latency_us)]
            {
                if yardstick.is_empty() {
                    continue;
                }
                let yardstick = median(yardstick);
                cells.extend([number(yardstick, 9), number(median(ours) / yardstick, 6)]);
            }
        }
        output.line(self.table.row(&cells));
        self.results.push(row);
    }

    /// The last line, the JSON file, the verdict.
    pub(super) fn finish(self, output: &mut Output) -> Result<Verdict> {
        let samples = self.results.iter().flat_map(|row| row.plugin.iter().chain(&row.raw_tcp));
        let wrong: usize = samples.map(|samples| samples.wrong).sum();
        output.line(format!("# Wrong bytes : {wrong} {}", if wrong == 0 { "OK" } else { "FAILED" }));
        write_json(self.json.as_deref(), &self)?;
        Ok(if wrong == 0 { Verdict::Good } else { Verdict::WrongData })
    }
}
