//! The table of all-reduce, in nccl-tests' columns, and the same as JSON.

use crate::os::error::Result;
use serde::Serialize;

use super::super::Verdict;
use super::super::output::{Output, write_json};
use super::super::plugin_options::PluginFacts;
use super::super::stats::mean;
use super::super::table::{Table, number};
use super::Options;

/// One size in one mode.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Outcome {
    /// Of one all-reduce, the mean.
    pub(super) seconds: f64,
    pub(super) wrong: usize,
}

#[derive(Serialize)]
struct Numbers {
    time_us: f64,
    algbw_gbs: f64,
    busbw_gbs: f64,
    wrong: usize,
}

#[derive(Serialize)]
struct Row {
    size: usize,
    count: usize,
    #[serde(rename = "type")]
    kind: &'static str,
    redop: &'static str,
    root: i32,
    out_of_place: Numbers,
    in_place: Numbers,
}

/// Everything that is printed, kept for the JSON file.
#[derive(Serialize)]
pub(super) struct Report {
    version: &'static str,
    collective: &'static str,
    ranks: u16,
    iterations: u32,
    warmup: u32,
    plugins: Vec<PluginFacts>,
    results: Vec<Row>,
    out_of_bounds_values: usize,
    average_bus_bandwidth_gbs: f64,
    #[serde(skip)]
    table: Table,
    #[serde(skip)]
    json: Option<std::path::PathBuf>,
}

impl Report {
    pub(super) fn new(options: &Options, plugins: Vec<PluginFacts>) -> Self {
        let numbers = [("time", "(us)", 8), ("algbw", "(GB/s)", 6), ("busbw", "(GB/s)", 6), ("#wrong", "", 6)];
        let columns =
            [("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 8), ("redop", "", 6), ("root", "", 6)];
        Self {
            version: env!("CARGO_PKG_VERSION"),
            collective: "all_reduce",
            ranks: options.ranks,
            iterations: options.iterations,
            warmup: options.warmup,
            plugins,
            results: Vec::new(),
            out_of_bounds_values: 0,
            average_bus_bandwidth_gbs: 0.0,
            table: Table::new(columns.into_iter().chain(numbers).chain(numbers)),
            json: options.json.clone(),
        }
    }

    /// What runs where, and the headings.
    pub(super) fn begin(&self, output: &mut Output, process_ids: &[u32]) {
        output.line(format!(
            "# towline {}: all-reduce, {} ranks, {} warm-up and {} timed iterations, all verified",
            self.version, self.ranks, self.warmup, self.iterations
        ));
        for (rank, (facts, id)) in self.plugins.iter().zip(process_ids).enumerate() {
            let PluginFacts { plugin, file, api, device, speed_mbps } = facts;
            output.line(format!(
                "# rank {rank}, process {id}: {plugin} {api}, device {device} at {speed_mbps} Mb/s, {file}"
            ));
        }
        output.line("#");
        let (left, each) = (self.table.width_of(0..5), self.table.width_of(5..9));
        output.line(format!("#{:>left$}  {:^each$}  {:^each$}", "", "out-of-place", "in-place").trim_end());
        for line in self.table.headings() {
            output.line(line);
        }
    }

    pub(super) fn row(&mut self, output: &mut Output, count: usize, [out_of_place, in_place]: [Outcome; 2]) {
        let size = count * size_of::<f32>();
        let ranks = f64::from(self.ranks);
        let numbers = |outcome: Outcome| {
            let algbw_gbs = size as f64 / outcome.seconds / 1e9;
            // Each rank's link carries every element twice, less its own share.
            let busbw_gbs = algbw_gbs * 2.0 * (ranks - 1.0) / ranks;
            Numbers { time_us: outcome.seconds * 1e6, algbw_gbs, busbw_gbs, wrong: outcome.wrong }
        };
        let row = Row {
            size,
            count,
            kind: "float",
            redop: "sum",
            root: -1,
            out_of_place: numbers(out_of_place),
            in_place: numbers(in_place),
        };
        let mut cells =
            vec![size.to_string(), count.to_string(), row.kind.into(), row.redop.into(), row.root.to_string()];
        for shown in [&row.out_of_place, &row.in_place] {
            cells.extend([number(shown.time_us, 8), number(shown.algbw_gbs, 6), number(shown.busbw_gbs, 6)]);
            cells.push(shown.wrong.to_string());
        }
        output.line(self.table.row(&cells));
        self.out_of_bounds_values += row.out_of_place.wrong + row.in_place.wrong;
        self.results.push(row);
    }

    /// The last lines, the JSON file, the verdict.
    pub(super) fn finish(mut self, output: &mut Output) -> Result<Verdict> {
        let bandwidths: Vec<f64> =
            self.results.iter().flat_map(|row| [row.out_of_place.busbw_gbs, row.in_place.busbw_gbs]).collect();
        self.average_bus_bandwidth_gbs = mean(&bandwidths);
        let wrong = self.out_of_bounds_values;
        output.line(format!("# {:<20} : {wrong} {}", "Out of bounds values", if wrong == 0 { "OK" } else { "FAILED" }));
        output.line(format!("# {:<20} : {:.5}", "Avg bus bandwidth", self.average_bus_bandwidth_gbs));
        write_json(self.json.as_deref(), &self)?;
        Ok(if wrong == 0 { Verdict::Good } else { Verdict::WrongData })
    }
}
