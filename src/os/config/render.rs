//! The table for users: the documentation page and the list that `towline doctor` prints.

use super::{TABLE, Variable};
use std::fmt::Write as _;

/// The documentation page, `docs/configuration.md`. A test compares it with the committed file.
pub fn render_markdown() -> String {
    let mut page = String::from(
        "# Configuration\n\n\
         <!-- Generated from the table in src/os/config.rs: change that, then run `TOWLINE_BLESS=1 cargo test config_docs`. -->\n\n\
         Towline needs no variable set beyond what selects it (`NCCL_NET=Towline`). The variables below exist for the \
         cases where it should choose differently.\n\n\
         They are read from the environment when NCCL initialises the plugin. NCCL puts the lines of `/etc/nccl.conf` \
         and `~/.nccl.conf` into the environment before that, so Towline's variables may stand there too. An unknown \
         `TOWLINE_*` name or a bad value never stops a job: it is named in a warning with the nearest valid one, and the \
         default is used. `towline doctor` prints every variable with its present value.\n",
    );
    section(&mut page, "Towline's variables", |variable| variable.is_own());
    section(&mut page, "NCCL's variables that Towline honours", |variable| !variable.is_own());
    page
}

fn section(page: &mut String, title: &str, belongs: impl Fn(&Variable) -> bool) {
    let _ = write!(page, "\n## {title}\n\n| variable | value | default | unit |\n|---|---|---|---|\n");
    let variables: Vec<&Variable> = TABLE.iter().filter(|variable| belongs(variable)).collect();
    for variable in &variables {
        let _ = writeln!(
            page,
            "| [`{}`](#{}) | {} | {} | {} |",
            variable.name,
            variable.name.to_lowercase(),
            (variable.kind)(),
            default(variable),
            variable.unit
        );
    }
    for variable in variables {
        let unit = if variable.unit.is_empty() { String::new() } else { format!(" Unit: {}.", variable.unit) };
        let _ = write!(
            page,
            "\n### {}\n\n{}\n\nValue: {}. Default: {}.{unit} Since {}. Read at {}.\n",
            variable.name,
            variable.help,
            (variable.kind)(),
            default(variable),
            variable.since,
            variable.read,
        );
    }
}

fn default(variable: &Variable) -> String {
    if variable.default.is_empty() { "unset".to_owned() } else { format!("`{}`", variable.default) }
}

/// Where a value in force comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// Nothing set it.
    Default,
    /// The environment set it.
    Environment,
    /// The environment holds a value that is not valid, so the default is in force.
    Rejected,
}

/// One variable with the value in force.
#[derive(Debug)]
pub(crate) struct Setting {
    /// Its entry in the table.
    pub variable: &'static Variable,
    /// The value in force as text; empty is unset.
    pub value: String,
    /// Where it comes from.
    pub source: Source,
}

/// Every variable of the table with the value that `lookup` gives it.
pub(crate) fn settings(lookup: impl Fn(&str) -> Option<String>) -> Vec<Setting> {
    TABLE
        .iter()
        .map(|variable| {
            let (value, source) = match lookup(variable.name) {
                None => (variable.default.to_owned(), Source::Default),
                Some(text) if (variable.check)(&text).is_ok() => (text, Source::Environment),
                Some(_) => (variable.default.to_owned(), Source::Rejected),
            };
            Setting { variable, value, source }
        })
        .collect()
}
