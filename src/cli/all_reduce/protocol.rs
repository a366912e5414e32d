//! The messages between the coordinator and the ranks.

use serde::{Deserialize, Serialize};

use super::super::plugin_options::{PluginChoice, PluginFacts};

/// From the coordinator to a rank.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum ToRank {
    /// Open the plugin and listen.
    SetUp { rank: usize, ranks: usize, plugin: PluginChoice, timeout_s: u32, late_ms: u32 },
    /// Connect to the right-hand neighbour's handle, and accept the left-hand one.
    Connect { handle: Vec<u8> },
    /// Fill the buffers.
    Prepare(Batch),
    /// All ranks are prepared: run the batch.
    Go,
    /// Close everything and end.
    Quit,
}

/// All-reduces in a row, each on buffers of its own so that every result can be verified afterwards.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Batch {
    /// Elements of one all-reduce.
    pub(super) count: usize,
    /// How many of them.
    pub(super) iterations: u32,
    /// The number of the first: it chooses the data.
    pub(super) first_iteration: u32,
    pub(super) in_place: bool,
}

/// From a rank to the coordinator.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum FromRank {
    /// The answer to `SetUp`.
    Listening { handle: Vec<u8>, facts: PluginFacts },
    /// The answer to `Connect`.
    Connected,
    /// The answer to `Prepare`.
    Prepared,
    /// The answer to `Go`.
    Measured(Measured),
    /// The answer to `Quit`.
    Closed,
    /// The rank gives up.
    Failed { error: String },
}

/// What one rank saw of a batch.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq)]
pub(super) struct Measured {
    /// From the first all-reduce's begin to the last one's end.
    pub(super) seconds: f64,
    /// Elements that were not the sum.
    pub(super) wrong: usize,
}
