//! The time that a collective takes over TCP: a model of steps, messages and bytes.
//!
//! A collective is a number of steps one after the other. In each step every node sends one part of the data to the
//! next, cut into messages: at least one for each channel. A step costs
//!
//! - a latency, which depends on the protocol: Simple synchronises, LL does not;
//! - time of NCCL's proxy thread for each further message, since one thread handles the messages of all channels;
//! - the move of a channel's bytes through its connection, and of all bytes through the host. LL moves twice as many.
//!
//! The constants are fitted to the measurements in `tests/collectives.csv`, which cover six networks from 10 Gb/s to
//! the loopback; `tests/profiler/tuner.rs` checks the choices against each of them. No constant describes one network:
//! the ranks of a communicator must choose alike, and NCCL passes a tuner nothing about the network.

use super::{Algorithm, Collective, Protocol, Question, Way};

/// Costs that occur once: starting the kernel, and the first poll of each thread.
const START_US: f32 = 10.2;
/// The additional cost of a ring's kernel over a tree's in an all-reduce.
const RING_US: f32 = 2.0;
/// A step's latency over the network, by protocol.
const STEP_LL_US: f32 = 5.0;
const STEP_SIMPLE_US: f32 = 15.1;
/// A step's latency over NVLink (NCCL 2.28.9, `graph/tuning.cc`).
const NVLINK_LL_US: f32 = 0.6;
const NVLINK_SIMPLE_US: f32 = 3.4;
/// NCCL's proxy thread, for each message of a step after the first.
const MESSAGE_US: f32 = 17.9;
/// A message of at least this many bytes costs all of [`MESSAGE_US`]; shorter ones cost in proportion.
const FULL_MESSAGE: f32 = 2048.0;
/// A message that must wait for the one before it: with LL and PAT few buffers are under way.
const NEXT_US: f32 = 33.3;
/// Bytes per microsecond of one channel's connection.
const CONNECTION: f32 = 6557.0;
/// Bytes per microsecond of a host, by protocol.
const HOST_LL: f32 = 10085.0;
const HOST_SIMPLE: f32 = 12760.0;
/// A tree's node receives, adds and forwards in turn, where a ring's node does all at once.
const TREE_MOVE: f32 = 1.5;

/// Bytes of data in a message at most, given by NCCL's buffers and the way it cuts parts.
const LL_MESSAGE: f32 = 16384.0;
const PAT_MESSAGE: f32 = 32768.0;
const TREE_MESSAGE: f32 = 524_288.0;
/// A ring with Simple sends a larger part as two messages.
const RING_ONE_MESSAGE: f32 = 16384.0;

/// The predicted time in microseconds.
pub(super) fn microseconds(question: &Question, way: Way) -> f32 {
    let Way { algorithm, protocol, channels } = way;
    let channels = channels as f32;
    let bytes = question.bytes as f32;
    let nodes = question.shape.nodes.max(2) as f32;
    let per_node = question.shape.ranks as f32 / nodes;
    let doubled = nodes.log2().ceil();
    let both_ways = question.collective == Collective::AllReduce;

    // How many steps, and what each node sends in one of them.
    let (steps, part) = match (algorithm, question.collective) {
        (Algorithm::Tree, _) => (2.0 * doubled, bytes),
        (Algorithm::Pat, _) => (doubled, bytes * (nodes - 1.0) / nodes / doubled),
        (Algorithm::Ring, Collective::AllReduce) => (2.0 * (nodes - 1.0), bytes / nodes),
        (Algorithm::Ring, Collective::AllGather | Collective::ReduceScatter) => (nodes - 1.0, bytes / nodes),
        // A pipeline: all bytes pass through every step, but each step waits only for the first ones.
        (Algorithm::Ring, Collective::Broadcast | Collective::Reduce) => (nodes - 1.0, bytes / (nodes - 1.0)),
    };
    let of_channel = part / channels;
    let messages = match (algorithm, protocol) {
        (_, Protocol::LL) => (of_channel / LL_MESSAGE).ceil(),
        (Algorithm::Pat, _) => (of_channel / PAT_MESSAGE).ceil(),
        (Algorithm::Tree, _) => (of_channel / TREE_MESSAGE).ceil(),
        (Algorithm::Ring, _) => {
            if of_channel > RING_ONE_MESSAGE {
                2.0
            } else {
                1.0
            }
        }
    }
    .max(1.0);

    let (flags, latency, nvlink, host) = match protocol {
        Protocol::LL => (2.0, STEP_LL_US, NVLINK_LL_US, HOST_LL),
        Protocol::Simple => (1.0, STEP_SIMPLE_US, NVLINK_SIMPLE_US, HOST_SIMPLE),
    };
    // Two trees share the channels, and each node sends up in one of them while it sends down in the other.
    let shared = if algorithm == Algorithm::Tree && channels > 1.0 { 2.0 } else { 1.0 };

    // A ring's two halves of a part are sent one by one; other messages follow each other.
    let at_once = if algorithm == Algorithm::Ring && protocol == Protocol::Simple { messages } else { 1.0 };
    let size = (of_channel / messages * flags / FULL_MESSAGE).min(1.0);
    let handling = MESSAGE_US * (channels / shared * at_once - 1.0) * size;
    let waits = protocol == Protocol::LL || algorithm == Algorithm::Pat;
    let waiting = if waits { NEXT_US * (messages - 1.0) } else { 0.0 };
    let moving = steps * flags * (of_channel / CONNECTION + part / shared / host);
    let moving = if algorithm == Algorithm::Tree {
        // The first message of each channel takes all steps, and the rest follows it.
        let rest = 2.0 * (nodes - 1.0) / nodes * flags * (of_channel / CONNECTION + part / host);
        TREE_MOVE * (moving / messages + rest * (1.0 - 1.0 / messages))
    } else {
        moving
    };

    let once = START_US + if algorithm == Algorithm::Ring && both_ways { RING_US } else { 0.0 };
    let inside = nvlink * (per_node - 1.0).max(0.0) * if algorithm == Algorithm::Ring { steps } else { 2.0 };
    once + inside + steps * (latency + handling + waiting) + moving
}
