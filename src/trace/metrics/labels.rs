//! Which process the figures are of: labels that stand on every series, so that those of all processes of a host can
//! lie in one directory.

use std::fmt::Write;

use crate::trace::say::host;

/// Launchers' variables, the first that is set counts.
const JOB: [&str; 5] = ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID", "KUBEFLOW_JOB_NAME"];
const RANK: [&str; 4] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
const LOCAL_RANK: [&str; 4] = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];

/// A process of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Labels {
    /// Its number on its host, if the launcher passed it.
    pub local_rank: Option<u16>,
    /// Its rank in the job, if the launcher passed it.
    pub rank: Option<i32>,
    text: String,
}

impl Labels {
    /// Of this process, from what its launcher left in the environment.
    pub(crate) fn new(host: &str, pid: &str, environment: impl Fn(&str) -> Option<String>) -> Self {
        let first = |names: &[&str]| {
            names.iter().filter_map(|name| environment(name)).map(|it| it.trim().to_owned()).find(|it| !it.is_empty())
        };
        let (rank, local_rank) = (first(&RANK), first(&LOCAL_RANK));
        let mut text = format!("host=\"{}\",pid=\"{pid}\"", escape(host));
        // "job" is Prometheus's own name for what it scrapes.
        for (name, value) in [("job_id", first(&JOB)), ("rank", rank.clone()), ("local_rank", local_rank.clone())] {
            if let Some(value) = value {
                let _ = write!(text, ",{name}=\"{}\"", escape(&value));
            }
        }
        Self { local_rank: local_rank.and_then(|it| it.parse().ok()), rank: rank.and_then(|it| it.parse().ok()), text }
    }

    /// Of this process, whose number in the series is `pid`.
    pub(crate) fn of_process(pid: &str) -> Self {
        Self::new(&host(), pid, |name| std::env::var(name).ok())
    }

    /// As in a series, without the braces.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

/// A label's value.
pub(super) fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Labels {
        let found = |name: &str| pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned());
        Labels::new("node\"4\"", "7", found)
    }

    #[test]
    fn a_process_is_known_by_what_its_launcher_says() {
        assert_eq!(of(&[]).text(), r#"host="node\"4\"",pid="7""#);
        let torchrun =
            of(&[("LOCAL_RANK", "3"), ("RANK", "19"), ("TORCHELASTIC_RUN_ID", "a b"), ("SLURM_PROCID", "2")]);
        assert_eq!(torchrun.text(), r#"host="node\"4\"",pid="7",job_id="a b",rank="19",local_rank="3""#);
        assert_eq!((torchrun.local_rank, torchrun.rank), (Some(3), Some(19)));
        assert_eq!(of(&[("LOCAL_RANK", " "), ("SLURM_LOCALID", "1")]).local_rank, Some(1));
    }
}
