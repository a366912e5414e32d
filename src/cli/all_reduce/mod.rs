//! `towline all-reduce`: ring all-reduce over the plugin, verified and timed, in nccl-tests' form.
//!
//! [`coordinator`] is the program that the user started. It starts one process per rank ([`rank`]), hands their
//! connection handles around, starts each batch on all of them together and prints the table ([`report`]).

mod coordinator;
mod protocol;
mod rank;
mod report;

use std::path::PathBuf;

use clap::Args;

pub(super) use coordinator::run;
pub(super) use rank::run as run_rank;

use super::plugin_options::{GpuOption, PluginOptions};
use super::ring::pattern::MOST_RANKS;
use super::size::{Size, steps};

/// Run a ring all-reduce of float32 between processes of this host, through the plugin as NCCL would use it, and verify
/// every element of every result.
#[derive(Args, Debug, Clone)]
pub(crate) struct Options {
    /// Smallest size, in bytes or with K, M, G (powers of 1024), rounded down to whole elements of 4 bytes
    #[arg(short, long = "min-bytes", value_name = "SIZE", default_value = "8")]
    begin: Size,

    /// Largest size, in bytes or with K, M, G
    #[arg(short, long = "max-bytes", value_name = "SIZE", default_value = "8M")]
    end: Size,

    /// Each size is the one before times this
    #[arg(short, long = "step-factor", value_name = "FACTOR", default_value_t = 4)]
    factor: usize,

    /// Timed all-reduces per size, once out of place and once in place
    #[arg(short = 'n', long = "iters", value_name = "ITERS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,

    /// All-reduces before those, verified but not timed
    #[arg(short, long = "warmup-iters", value_name = "WARMUP", default_value_t = 5)]
    warmup: u32,

    /// Number of ranks; each is a process
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=MOST_RANKS as i64))]
    ranks: u16,

    #[command(flatten)]
    pub(super) plugin: PluginOptions,

    #[command(flatten)]
    gpu: GpuOption,

    /// How long nothing may move, in connecting or in a transfer, before the run is given up; in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,

    /// Start ranks behind this command, as in 'ip netns exec left' or 'taskset -c 0'; given several times, the ranks
    /// take turns
    #[arg(long, value_name = "COMMAND")]
    wrap: Vec<String>,

    /// Make one rank come late to every all-reduce, by so many milliseconds: to see in a profile (TOWLINE_PROFILE) what
    /// a straggler looks like
    #[arg(long, value_name = "RANK:MS", value_parser = parse_late)]
    late: Option<(u16, u32)>,

    /// Write the results to FILE as JSON too (with `-` to standard output, and the table to standard error); times in
    /// microseconds, bandwidths in GB/s (10⁹ bytes per second)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Options {
    /// The elements of each size; else what is wrong with the command line.
    pub(super) fn counts(&self) -> Result<Vec<usize>, String> {
        if let Some((rank, _)) = self.late.filter(|&(rank, _)| rank >= self.ranks) {
            return Err(format!("--late names rank {rank}, and there are ranks 0 to {}", self.ranks - 1));
        }
        let sizes = steps(self.begin, self.end, self.factor)?;
        let counts: Vec<usize> =
            sizes.iter().map(|size| size.0 / size_of::<f32>()).filter(|&count| count > 0).collect();
        if counts.is_empty() {
            return Err("there is no size to run: none has room for one element of 4 bytes".to_owned());
        }
        Ok(counts)
    }
}

fn parse_late(text: &str) -> Result<(u16, u32), String> {
    let parts = text.split_once(':').and_then(|(rank, ms)| Some((rank.parse().ok()?, ms.parse().ok()?)));
    parts.ok_or_else(|| "write a rank and milliseconds, as in 1:5".to_owned())
}
