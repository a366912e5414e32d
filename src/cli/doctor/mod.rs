//! `towline doctor`: what Towline and NCCL would find on this host, what stands in the way, and the command that mends
//! it.
//!
//! Each file looks at one thing and returns plain facts; judging facts is done by functions without side effects, so
//! that tests can show them sick hosts. Guarantees: nothing is changed, nothing needs root, a check that cannot be made
//! says so instead of failing the rest.

mod interfaces;
mod limits;
mod nccl;
mod plugin;
mod rdma;
mod report;
mod settings;

use clap::Args;
use serde::Serialize;
use towline::os::config::Config;
use towline::os::error::{Error, Result};
use towline::os::nccl_conf;

use super::Verdict;
use super::output::Output;
use super::plugin_options::PluginOptions;

/// Show what this host offers to Towline and NCCL: interfaces, RDMA devices, limits, NCCL libraries, settings. Each
/// problem comes with the command that mends it.
///
/// The exit status is 1 when there is a problem, 0 when there is only advice or nothing.
#[derive(Args, Debug, Clone)]
pub(crate) struct Options {
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    pub(super) plugin: PluginOptions,
}

/// Something to be mended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    severity: Severity,
    what: String,
    /// The command that mends it.
    mend: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    /// It will not work, or not as wanted.
    Problem,
    /// It works, and could do better or surprise.
    Advice,
}

impl Finding {
    fn problem(what: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { severity: Severity::Problem, what: what.into(), mend: mend.into() }
    }

    fn advice(what: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { severity: Severity::Advice, what: what.into(), mend: mend.into() }
    }
}

/// Everything that was looked at.
#[derive(Serialize)]
struct Diagnosis {
    version: &'static str,
    plugin: plugin::Facts,
    interfaces: interfaces::Facts,
    rdma: rdma::Facts,
    limits: limits::Facts,
    nccl: Vec<nccl::Library>,
    settings: settings::Facts,
    findings: Vec<Finding>,
}

/// Runs the subcommand.
pub(super) fn run(options: &Options) -> Result<Verdict> {
    let environment = nccl_conf::environment();
    let (config, complaints) = Config::from_pairs(&environment);
    let mut findings = Vec::new();
    let diagnosis = Diagnosis {
        version: env!("CARGO_PKG_VERSION"),
        plugin: plugin::look(&options.plugin.choice(), &environment, &mut findings),
        interfaces: interfaces::look(&config, &mut findings),
        rdma: rdma::look(&config, &mut findings),
        limits: limits::look(&config, &mut findings),
        nccl: nccl::look(&environment),
        settings: settings::look(&environment, &complaints, &mut findings),
        findings: Vec::new(),
    };
    findings.sort_by_key(|finding| finding.severity);
    let diagnosis = Diagnosis { findings, ..diagnosis };
    let mut output = Output::new();
    if options.json {
        let text = serde_json::to_string_pretty(&diagnosis).map_err(|error| Error::internal(error.to_string()))?;
        output.line(text);
    } else {
        report::print(&diagnosis, &mut output);
    }
    let has_problem = diagnosis.findings.iter().any(|finding| finding.severity == Severity::Problem);
    Ok(if has_problem { Verdict::Problems } else { Verdict::Good })
}
