//! A problem of the configuration, in one line for the log.

use super::nearest::nearest;
use super::value::Bad;
use super::{TABLE, Variable};
use std::fmt;

/// One problem of the configuration. Never fatal: the default is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// The variable's name as in the environment.
    pub name: String,
    /// The problem, and how it is handled.
    pub problem: String,
    /// The nearest valid name, or the nearest valid value.
    pub nearest: Option<String>,
}

impl Complaint {
    pub(super) fn unknown_name(name: &str) -> Self {
        let own = TABLE.iter().filter(|variable| variable.is_own()).map(|variable| variable.name);
        Self {
            name: name.to_owned(),
            problem: "is not a variable of Towline and is ignored".to_owned(),
            nearest: nearest(name, own).map(str::to_owned),
        }
    }

    pub(super) fn bad_value(variable: &Variable, text: &str, bad: Bad) -> Self {
        let used = match variable.default {
            "" => "it counts as unset".to_owned(),
            default => format!("the default, {default}, is used"),
        };
        Self {
            name: variable.name.to_owned(),
            problem: format!("has the value \"{}\", but must be {}; {used}", text.escape_debug(), bad.expected),
            nearest: bad.nearest,
        }
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.problem)?;
        match &self.nearest {
            Some(nearest) => write!(f, " (did you mean {nearest}?)"),
            None => Ok(()),
        }
    }
}
