//! The messages between leader and follower. The leader begins; every order has one answer.

use serde::{Deserialize, Serialize};

use super::super::plugin_options::{PluginChoice, PluginFacts};
use super::Job;

/// Which way the data goes.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[serde(rename_all = "snake_case")]
pub(super) enum Way {
    Plugin,
    RawTcp,
}

/// From the leader.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum Order {
    /// Identifies the sender, and how much memory will be needed.
    Hello { version: String, memory_bytes: usize, timeout_s: u32 },
    /// Open the plugin (the named one; a follower on another host has its own) and connect to this handle.
    OpenPlugin { choice: Option<PluginChoice>, handle: Vec<u8> },
    /// Listen for this many sockets.
    OpenRawTcp { sockets: usize },
    /// Take part in moving messages; answered `Ready` before, and `Checked` after when the data shall be verified.
    Stream { way: Way, job: Job, verify: bool },
    /// Take part in a ping-pong; answered `Ready` before.
    PingPong { way: Way, job: Job },
    /// The run is over.
    Quit,
}

/// From the follower.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum Answer {
    /// To `Hello`.
    Welcome { version: String },
    /// To `OpenPlugin`, once its listener is open: the way back.
    Opened { handle: Vec<u8>, facts: PluginFacts, max_outstanding: usize },
    /// To `OpenRawTcp`.
    Listening { port: u16 },
    /// In position: the transfer may begin.
    Ready,
    /// How many bytes arrived wrong.
    Checked { wrong: usize },
    /// To `Quit`, when everything is closed.
    Closed,
    /// To any order: the follower cannot go on.
    Failed { error: String },
}
