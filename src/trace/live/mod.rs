//! What a process says of itself while it runs: as JSON on its control socket and in its state file.
//!
//! It is made from the profiler's [`Tracker`] and read by `towline why` and `towline top`. Times are nanoseconds of the
//! process's own CLOCK_MONOTONIC, which all processes of one boot of a host share.

pub(crate) mod network;
pub(crate) mod place;

use std::io;

use serde::{Deserialize, Serialize};

use self::network::{Connection, Interface};
use super::event::CommInfo;
use super::names::Name;
use super::tracker::Tracker;
use super::verdict::{Arguments, Call, Key, On, Told, Wait};

/// Calls of each communicator that a process remembers, and tells on its control socket.
pub(crate) const KEPT: usize = 1000;

/// Calls of each communicator in a state file, which is written each second.
pub(crate) const KEPT_IN_FILE: usize = 100;

/// Waits of a communicator that are told: the oldest.
const WAITS: usize = 64;

/// The most bytes of a state that is read.
pub(crate) const LONGEST: u64 = 64 << 20;

/// A call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub(crate) struct CallState {
    pub func: String,
    pub seq: u64,
    pub count: u64,
    pub datatype: String,
    pub root: i32,
    /// When it was enqueued.
    pub entered: u64,
    /// Whether it has not ended.
    pub open: bool,
}

/// A wait of an open operation's step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitState {
    /// The rank at the other end.
    pub peer: i32,
    /// `network`, `data`, `buffer` or `gpu`.
    pub on: String,
    /// Since when.
    pub since: u64,
}

/// A rank of a communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CommState {
    /// NCCL's id of the communicator, in hexadecimal digits.
    pub id: String,
    /// The user's name of it.
    pub name: String,
    /// The rank.
    pub rank: i32,
    /// How many ranks there are; 0 when unknown.
    pub ranks: i32,
    /// The rank's GPU; empty when unknown.
    #[serde(default)]
    pub gpu: String,
    /// When it ended.
    pub ended: Option<u64>,
    /// Calls since it began.
    pub made: u64,
    /// The last of them.
    pub calls: Vec<CallState>,
    /// Open steps.
    pub open_steps: usize,
    /// What they wait for, the oldest first.
    pub waits: Vec<WaitState>,
}

/// A process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    /// Towline's version.
    pub version: String,
    /// The host's name.
    pub host: String,
    /// The host's boot: processes with the same one share a clock.
    pub boot: u64,
    /// The process id.
    pub pid: i32,
    /// The process's rank in the job, if its launcher says it.
    #[serde(default)]
    pub rank: Option<i32>,
    /// Grows with each state: a process whose number stands still has no heartbeat.
    pub beat: u64,
    /// When this was made.
    pub now: u64,
    /// The wall clock then, in nanoseconds.
    pub wall: u64,
    /// The process has ended in order.
    pub exited: bool,
    /// Its control socket.
    pub socket: Option<String>,
    /// Events that found no room.
    pub dropped: u64,
    /// Its communicators.
    pub communicators: Vec<CommState>,
    /// What its host's interfaces have carried, those that its connections use.
    pub interfaces: Vec<Interface>,
    /// Its connections.
    pub connections: Vec<Connection>,
}

impl CommState {
    /// The communicator as the verdict knows it.
    pub(crate) fn info(&self) -> CommInfo {
        let id = u64::from_str_radix(&self.id, 16).unwrap_or(0);
        CommInfo {
            id,
            name: self.name.clone(),
            ranks: self.ranks,
            rank: self.rank,
            gpu: self.gpu.clone(),
            ..CommInfo::default()
        }
    }

    /// What it tells, its times put onto the reader's clock by `clock`.
    pub(crate) fn told(&self, clock: impl Fn(u64) -> u64) -> Told {
        let calls = self.calls.iter().map(|call| Call {
            key: Key { func: call.func.as_str().into(), seq: call.seq },
            arguments: Arguments { count: call.count, datatype: name(&call.datatype), root: call.root },
            entered: clock(call.entered),
            open: call.open,
        });
        let waits = self
            .waits
            .iter()
            .filter_map(|wait| Some(Wait { peer: wait.peer, on: On::from_label(&wait.on)?, since: clock(wait.since) }));
        Told { calls: calls.collect(), waits: waits.collect(), ended: self.ended.map(&clock), ..Told::default() }
    }
}

fn name(text: &str) -> Name {
    if text.is_empty() { Name::NONE } else { text.into() }
}

/// The communicators of a process, each with its last `kept` calls.
pub(crate) fn communicators(tracker: &Tracker, kept: usize) -> Vec<CommState> {
    let mut waits = tracker.waits();
    let known = tracker.comms().iter().filter(|(_, comm)| comm.info.context != 0 && comm.info.rank >= 0);
    known
        .map(|(context, comm)| {
            let waits = waits.remove(context).unwrap_or_default();
            let all = comm.calls().count();
            // Open calls are told, however old.
            let told = comm.calls().enumerate().filter(|(number, call)| call.open || number + kept >= all);
            CommState {
                id: format!("{:x}", comm.info.id),
                name: comm.info.name.clone(),
                rank: comm.info.rank,
                ranks: comm.info.ranks,
                gpu: comm.info.gpu.clone(),
                ended: comm.ended,
                made: comm.made,
                calls: told.map(|(_, call)| CallState::of(call)).collect(),
                open_steps: waits.len(),
                waits: waits.iter().take(WAITS).map(WaitState::of).collect(),
            }
        })
        .collect()
}

impl CallState {
    fn of(call: &Call) -> Self {
        let Call { key, arguments, entered, open } = *call;
        Self {
            func: key.func.text().into(),
            seq: key.seq,
            count: arguments.count,
            datatype: arguments.datatype.text().into(),
            root: arguments.root,
            entered,
            open,
        }
    }
}

impl WaitState {
    fn of(wait: &Wait) -> Self {
        Self { peer: wait.peer, on: wait.on.label().into(), since: wait.since }
    }
}

impl State {
    /// As JSON.
    pub(crate) fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }

    /// From JSON.
    ///
    /// # Errors
    /// When it is none.
    pub(crate) fn read(bytes: &[u8]) -> io::Result<Self> {
        Ok(serde_json::from_slice(bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::{Body, Coll, ProxyOp, Record, state};
    use super::*;

    #[test]
    fn a_state_says_as_json_what_the_tracker_knows() {
        let mut tracker = Tracker::new(KEPT);
        let gpu = "3 at 0000:3b:00.0".to_owned();
        tracker.comm(&CommInfo { context: 1, id: 0x77, name: "dp".into(), nodes: 2, ranks: 2, rank: 1, gpu });
        let mut apply = |when, id, parent, body| {
            tracker.apply(&Record { when, id, parent, context: 1, rank: 1, thread: 0, body });
        };
        for seq in 0..200 {
            let coll = Coll { seq, count: 8, func: "AllReduce".into(), datatype: "ncclInt8".into(), ..Coll::default() };
            apply(seq, 1000 + seq, 0, Body::Coll(coll));
            if seq > 0 {
                apply(seq, 1000 + seq, 0, Body::Stop);
            }
        }
        apply(300, 2000, 1000, Body::ProxyOp(ProxyOp { peer: 0, ..ProxyOp::default() }));
        apply(301, 2001, 2000, Body::ProxyStep { step: 0 });
        apply(302, 2001, 0, Body::State { state: state::STEP_RECV_WAIT, steps: 0, arg: 0 });
        let communicators = communicators(&tracker, 10);
        let state = State { host: "node1".into(), communicators, ..State::default() };
        let read = State::read(state.text().as_bytes()).expect("JSON");
        assert_eq!(read, state);
        let comm = &read.communicators[0];
        assert_eq!((comm.info().id, comm.made, comm.calls.len()), (0x77, 200, 11), "the open one and the last ten");
        assert_eq!(comm.info().gpu, "3 at 0000:3b:00.0");
        let told = comm.told(|when| when + 1000);
        assert_eq!(told.waits, [Wait { peer: 0, on: On::Data, since: 1302 }]);
        assert_eq!((told.calls[0].open, told.calls[0].entered), (true, 1000));
        let last = told.calls.last().expect("calls");
        assert_eq!(last.key, Key { func: "AllReduce".into(), seq: 199 });
        assert_eq!(last.arguments, Arguments { count: 8, datatype: "ncclInt8".into(), root: 0 });
    }
}
