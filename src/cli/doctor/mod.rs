//! `towline doctor`: what Towline and NCCL would find on this host, what stands in the way, and the command that mends
//! it.
//!
//! Each file looks at one thing and returns plain facts; judging facts is done by functions without side effects, so
//! that tests can show them sick hosts. Guarantees: nothing is changed, nothing needs root, a check that cannot be made
//! says so instead of failing the rest.

mod choice;
mod conf;
mod cure;
mod file;
mod finding;
mod interfaces;
mod limits;
mod loader;
mod nccl;
mod plugin;
mod rdma;
mod report;
mod settings;

use clap::Args;
use serde::Serialize;
use towline::os::config::Config;
use towline::os::error::{Error, Result};
use towline::os::nccl_conf::Variables;

use super::Verdict;
use super::output::Output;
use super::plugin_options::PluginOptions;
use finding::{Cause, Finding, Severity};
pub(crate) use loader::{Opens, opens};

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

/// Everything that was looked at.
#[derive(Serialize)]
struct Diagnosis {
    version: &'static str,
    plugin: plugin::Facts,
    choice: choice::Facts,
    interfaces: interfaces::Facts,
    rdma: rdma::Facts,
    limits: limits::Facts,
    nccl: Vec<nccl::Library>,
    settings: settings::Facts,
    findings: Vec<Finding>,
}

/// Runs the subcommand.
pub(super) fn run(options: &Options, variables: &Variables) -> Result<Verdict> {
    let environment = variables.merged();
    let (config, complaints) = Config::from_pairs(&environment);
    let mut findings = Vec::new();
    let nccl = nccl::look(&environment);
    // Before the plugin is opened: the loader gives a library that is open already to everyone who asks for its name.
    let choice = choice::look(&environment, variables.own(), &nccl);
    let plugin = plugin::look(&options.plugin.choice());
    let diagnosis = Diagnosis {
        version: env!("CARGO_PKG_VERSION"),
        interfaces: interfaces::look(&config, variables, &mut findings),
        rdma: rdma::look(&config, &mut findings),
        limits: limits::look(&config, &mut findings),
        settings: settings::look(&environment, &complaints, variables, &mut findings),
        plugin,
        choice,
        nccl,
        findings: Vec::new(),
    };
    conf::judge(variables, &mut findings);
    plugin::judge(&diagnosis.plugin, &mut findings);
    choice::judge(&diagnosis.choice, &diagnosis.plugin, variables, &mut findings);
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
