//! `towline doctor`: what Towline and NCCL would find on this host, what stands in the way, and the command that fixes
//! it.
//!
//! Each file examines one thing and returns plain facts. Functions without side effects judge the facts, so that tests
//! can give them sick hosts. Guarantees: nothing is changed, nothing needs root, a check that cannot be made reports
//! that instead of failing the rest.

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

use std::path::{Path, PathBuf};

use crate::os::config::Config;
use crate::os::error::Result;
use crate::os::nccl_conf::Variables;
use clap::Args;
use serde::Serialize;

use super::Verdict;
use super::output::{Output, STDOUT, check_json, write_json};
use super::plugin_options::PluginOptions;
use finding::{Cause, Finding, Severity};
pub(crate) use loader::{Opens, opens};

/// Show what this host offers to Towline and NCCL: interfaces, RDMA devices, limits, NCCL libraries, settings. Each
/// problem comes with the command that fixes it.
///
/// The exit status is 1 when there is a problem, 0 when there is only advice or nothing.
#[derive(Args, Debug, Clone)]
pub(crate) struct Options {
    /// Print JSON instead of text; with a FILE, write it there and print the text too
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = STDOUT)]
    json: Option<PathBuf>,

    #[command(flatten)]
    pub(super) plugin: PluginOptions,
}

/// Everything that was examined.
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

/// A path as JSON, which has no string for bytes that are no UTF-8.
fn lossy<S: serde::Serializer>(path: &Path, to: S) -> std::result::Result<S::Ok, S::Error> {
    path.to_string_lossy().serialize(to)
}

/// Paths as JSON.
fn lossy_list<S: serde::Serializer>(paths: &[PathBuf], to: S) -> std::result::Result<S::Ok, S::Error> {
    to.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

/// Runs the subcommand.
pub(super) fn run(options: &Options, variables: &Variables) -> Result<Verdict> {
    check_json(options.json.as_deref())?;
    let environment = variables.merged();
    let (config, complaints) = Config::from_pairs(&environment);
    let mut findings = Vec::new();
    let nccl = nccl::gather(&environment);
    // Before the plugin is opened: the loader returns an already open library for its name.
    let choice = choice::gather(&environment, variables.own(), &nccl);
    let plugin = plugin::gather(&options.plugin.choice());
    let diagnosis = Diagnosis {
        version: env!("CARGO_PKG_VERSION"),
        interfaces: interfaces::gather(&config, variables, &mut findings),
        rdma: rdma::gather(&config, &mut findings),
        limits: limits::gather(&config, &mut findings),
        settings: settings::gather(&environment, &complaints, variables, &mut findings),
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
    if options.json.as_deref() != Some(Path::new(STDOUT)) {
        report::print(&diagnosis, &mut Output::new());
    }
    write_json(options.json.as_deref(), &diagnosis)?;
    let has_problem = diagnosis.findings.iter().any(|finding| finding.severity == Severity::Problem);
    Ok(if has_problem { Verdict::Problems } else { Verdict::Good })
}
