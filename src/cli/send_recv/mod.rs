//! `towline send-recv`: one-way bandwidth and ping-pong latency by size, between two processes or two hosts, and the
//! same over plain TCP as a yardstick.
//!
//! The side that the user reads the table from *leads* ([`leader`]): it sends the data and the orders. The other
//! *follows* ([`follower`]): a child process, or `--listen` on another host. Both move data through a [`Mover`]:
//! [`net`] is the plugin, [`raw_tcp`] plain sockets.

mod follower;
mod leader;
mod memory;
mod net;
mod protocol;
mod raw_tcp;
mod report;
mod watch;

use std::path::PathBuf;

use crate::os::error::Result;
use clap::Args;

pub(super) use follower::run_peer;

use super::Verdict;
use super::output::check_json;
use super::plugin_options::{GpuOption, PluginOptions};
use super::size::{Size, steps};
use watch::Watch;

/// Measure one-way bandwidth and ping-pong latency by size through the plugin, between two processes of this host or
/// between two hosts.
///
/// Between two hosts, start `towline send-recv --listen ADDR` on one and `towline send-recv --connect ADDR` on the
/// other, which prints the table. The connection behind ADDR carries orders and connection handles, unencrypted: use it
/// on a network that you trust.
#[derive(Args, Debug, Clone)]
pub(crate) struct Options {
    /// Smallest message, in bytes or with K, M, G (powers of 1024)
    #[arg(short, long = "min-bytes", value_name = "SIZE", default_value = "8")]
    begin: Size,

    /// Largest message, in bytes or with K, M, G
    #[arg(short, long = "max-bytes", value_name = "SIZE", default_value = "16M")]
    end: Size,

    /// Each size is the one before times this
    #[arg(short, long = "step-factor", value_name = "FACTOR", default_value_t = 8)]
    factor: usize,

    /// Messages in flight at a time when measuring bandwidth (at most 8 with API v4 to v6, 32 later; fewer when they
    /// would fill more than 1 GiB)
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=32))]
    outstanding: u16,

    /// Measurements per size; the table shows their median
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repetitions: u16,

    /// How long one measurement shall take, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    time: u32,

    /// Messages per measurement, instead of as many as --time allows
    #[arg(short = 'n', long = "iters", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    iterations: Option<u32>,

    /// Measure latency with receives posted well ahead of their messages, instead of just before
    #[arg(long, conflicts_with_all = ["raw_tcp", "compare"])]
    ahead: bool,

    /// Measure bandwidth alone
    #[arg(long, conflicts_with = "ahead")]
    bandwidth: bool,

    /// Measure plain TCP beside the plugin, in turn with it, and show the ratios
    #[arg(long, conflicts_with = "raw_tcp")]
    compare: bool,

    /// Measure plain TCP alone; no plugin is opened
    #[arg(long, conflicts_with = "gpu")]
    raw_tcp: bool,

    /// Sockets of the plain TCP measurement, with as many sending and as many receiving threads
    #[arg(long, value_name = "K", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    sockets: u16,

    /// Wait on HOST:PORT for the other side, and follow it; the port 0 takes a free one
    #[arg(long, value_name = "ADDR", conflicts_with = "connect", value_parser = parse_address)]
    listen: Option<String>,

    /// Lead the side that listens on HOST:PORT
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    connect: Option<String>,

    #[command(flatten)]
    pub(super) plugin: PluginOptions,

    #[command(flatten)]
    gpu: GpuOption,

    /// How long nothing may move, in connecting or in a transfer, before the run is given up; in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,

    /// Write the results to FILE as JSON too, with every single measurement (with `-` to standard output, and the table
    /// to standard error)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Options {
    /// The sizes; else what is wrong with the command line.
    pub(super) fn sizes(&self) -> std::result::Result<Vec<Size>, String> {
        steps(self.begin, self.end, self.factor)
    }
}

/// Whether a port follows the host's name; names are resolved when they are used.
fn parse_address(text: &str) -> std::result::Result<String, String> {
    let port = text.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    port.map(|_| text.to_owned()).ok_or_else(|| "write HOST:PORT, as in node1:7000 or [fd00::1]:7000".to_owned())
}

/// Runs the subcommand.
pub(super) fn run(options: &Options) -> Result<Verdict> {
    match &options.listen {
        Some(address) => follower::listen(address, &options.plugin.choice().with_gpu(&options.gpu)),
        None => {
            check_json(options.json.as_deref())?;
            leader::run(options)
        }
    }
}

/// Which end of a measurement this process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// Sends the messages, and is the first in ping-pong.
    Leader,
    /// Receives them and sends an acknowledgement of a few bytes when all are there; the second in ping-pong.
    Follower,
}

/// Messages to be moved.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
struct Job {
    /// Bytes of each.
    size: usize,
    /// How many.
    count: usize,
    /// How many may be in flight.
    outstanding: usize,
    /// In ping-pong: whether receives are posted well ahead.
    ahead: bool,
}

/// A way to move messages between the two sides. Both sides make the same calls.
trait Mover {
    /// Moves `job.count` messages from the leader to the follower, and an acknowledgement back.
    fn stream(&mut self, side: Side, job: &Job, watch: &mut Watch<'_>) -> Result<()>;

    /// Sends one message to and fro `job.count` times. The leader adds half of each round trip, in seconds, to
    /// `samples`.
    fn ping_pong(&mut self, side: Side, job: &Job, samples: &mut Vec<f64>, watch: &mut Watch<'_>) -> Result<()>;

    /// The memory that messages are sent from or arrive in, or its copy on this host: the k-th message uses part k
    /// modulo `job.outstanding`.
    fn memory(&mut self) -> &mut [u8];

    /// Brings the copy's first `bytes` into the memory, where they are two.
    fn upload(&mut self, _bytes: usize) -> Result<()> {
        Ok(())
    }

    /// Brings the memory's first `bytes` into the copy, where they are two.
    fn download(&mut self, _bytes: usize) -> Result<()> {
        Ok(())
    }
}
