//! A process's state while it runs: as JSON on its control socket and in its state file.
//!
//! It is made from the profiler's [`Tracker`] and read by `towline why` and `towline top`. Times are nanoseconds of the
//! process's own CLOCK_MONOTONIC, which all processes of one boot of a host share.

pub(crate) mod gather;
pub(crate) mod network;
pub(crate) mod place;

use std::io;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::network::{Connection, Interface};
use super::event::CommInfo;
use super::names::Name;
use super::tracker::{OpenStep, Tracker};
use super::verdict::{Arguments, Call, Gaps, Key, On, Told, Wait};

/// Calls of each communicator that a process remembers, and reports on its control socket.
pub(crate) const KEPT: usize = 1000;

/// Calls of each communicator in a state file, which is written each second.
pub(crate) const KEPT_IN_FILE: usize = 100;

/// The most waits of a communicator that are reported: the oldest.
const WAITS: usize = 64;

/// The most bytes of a state that is read.
pub(crate) const LONGEST: u64 = 64 << 20;

/// No clock of a host shows more, 146 years; sums and differences of two such times have room in 64 bits.
const LAST: u64 = 1 << 62;

/// More ranks than a communicator has.
const MOST_RANKS: i32 = 1 << 20;

/// Our release.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Distinguishes a process from all others by its stamp, or, of an older release, by the rest.
pub(crate) type ProcessKey = (u64, u64, String, i32);

/// A call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub(crate) struct CallState {
    pub func: String,
    pub seq: u64,
    /// The rank at the other end of a send or a receive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<i32>,
    pub count: u64,
    pub datatype: String,
    pub root: i32,
    /// When it was enqueued.
    pub entered: u64,
    /// Whether it has not ended.
    pub open: bool,
}

/// A wait of an open operation's step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitState {
    /// The rank at the other end.
    pub peer: i32,
    /// `network`, `data`, `buffer` or `gpu`.
    pub on: String,
    /// Since when.
    pub since: u64,
    /// The operation's channel; None in the state of an older release.
    #[serde(default)]
    pub channel: Option<u8>,
    /// The step's number in its operation; None as above.
    #[serde(default)]
    pub step: Option<i32>,
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
    /// Collectives since it began.
    pub made: u64,
    /// The last of them.
    pub calls: Vec<CallState>,
    /// The last sends and receives.
    #[serde(default)]
    pub transfers: Vec<CallState>,
    /// Of each peer, how many sends and receives there have been since it began.
    #[serde(default)]
    pub exchanged: Vec<(i32, u64, u64)>,
    /// Open steps.
    pub open_steps: usize,
    /// The waits of these steps, the oldest first.
    pub waits: Vec<WaitState>,
}

/// When events were last dropped, by kind: calls that were entered, ends, waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub(crate) struct GapState {
    pub calls: Option<u64>,
    pub ends: Option<u64>,
    pub waits: Option<u64>,
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
    /// Drawn at random when the process began: a process of another container may have the same host name and process
    /// id. 0 in the state of an older release.
    #[serde(default)]
    pub stamp: u64,
    /// The process's rank in the job, if its launcher provides it.
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
    /// When; None in the state of a release that does not report it.
    #[serde(default)]
    pub gaps: Option<GapState>,
    /// Its communicators.
    pub communicators: Vec<CommState>,
    /// What its host's interfaces have carried, those that its connections use.
    pub interfaces: Vec<Interface>,
    /// Its connections.
    pub connections: Vec<Connection>,
}

impl CommState {
    fn number(&self) -> Option<u64> {
        u64::from_str_radix(&self.id, 16).ok()
    }

    fn is_rank(&self, rank: i32) -> bool {
        (0..if self.ranks > 0 { self.ranks } else { MOST_RANKS }).contains(&rank)
    }

    /// The reason why it cannot be true, if there is one.
    fn fault(&self) -> Option<String> {
        if self.number().is_none() {
            Some(format!("{:?} is no communicator", self.id))
        } else if !(0..=MOST_RANKS).contains(&self.ranks) {
            Some(format!("a communicator of {} ranks", self.ranks))
        } else if !self.is_rank(self.rank) {
            Some(format!("rank {} of {}", self.rank, self.ranks))
        } else {
            None
        }
    }

    /// The communicator as the verdict knows it.
    pub(crate) fn info(&self) -> CommInfo {
        CommInfo {
            id: self.number().unwrap_or(0),
            name: self.name.clone(),
            ranks: self.ranks,
            rank: self.rank,
            gpu: self.gpu.clone(),
            ..CommInfo::default()
        }
    }

    /// The input of the verdict; `clock` converts times to the reader's clock.
    pub(crate) fn told(&self, clock: impl Fn(u64) -> u64) -> Told {
        let call = |call: &CallState| Call {
            key: Key { func: call.func.as_str().into(), seq: call.seq, peer: call.peer },
            arguments: Arguments { count: call.count, datatype: name(&call.datatype), root: call.root },
            entered: clock(call.entered),
            open: call.open,
        };
        // Only a state that is wrong has others.
        let is_peer = |rank| self.is_rank(rank);
        let waits =
            self.waits.iter().filter(|wait| is_peer(wait.peer)).filter_map(|wait| {
                Some(Wait { peer: wait.peer, on: On::from_label(&wait.on)?, since: clock(wait.since) })
            });
        Told {
            calls: self.calls.iter().map(call).collect(),
            transfers: self.transfers.iter().filter(|it| it.peer.is_some_and(is_peer)).map(call).collect(),
            exchanged: self
                .exchanged
                .iter()
                .filter(|it| is_peer(it.0))
                .map(|&(peer, sends, receives)| (peer, (sends, receives)))
                .collect(),
            waits: waits.collect(),
            ended: self.ended.map(&clock),
            ..Told::default()
        }
    }
}

/// The last `kept` of these calls, and the open ones, however old; of too many open ones the oldest.
fn told<'a>(calls: impl Iterator<Item = &'a Call>, kept: usize) -> Vec<CallState> {
    let all: Vec<&Call> = calls.collect();
    let (before, last) = all.split_at(all.len().saturating_sub(kept));
    before.iter().filter(|call| call.open).take(kept).chain(last).map(|call| CallState::of(call)).collect()
}

fn name(text: &str) -> Name {
    if text.is_empty() { Name::NONE } else { text.into() }
}

/// The communicators of a process, each with its last `kept` calls.
pub(crate) fn communicators(tracker: &Tracker, kept: usize) -> Vec<CommState> {
    let mut waits = tracker.open_steps();
    let known = tracker.comms().iter().filter(|(_, comm)| comm.info.context != 0 && comm.info.rank >= 0);
    known
        .map(|(context, comm)| {
            let waits = waits.remove(context).unwrap_or_default();
            CommState {
                id: format!("{:x}", comm.info.id),
                name: comm.info.name.clone(),
                rank: comm.info.rank,
                ranks: comm.info.ranks,
                gpu: comm.info.gpu.clone(),
                ended: comm.ended,
                made: comm.made(),
                calls: told(comm.calls(), kept),
                transfers: told(comm.transfers(), kept),
                exchanged: comm.exchanged.iter().map(|(&peer, &(sends, receives))| (peer, sends, receives)).collect(),
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
            peer: key.peer,
            count: arguments.count,
            datatype: arguments.datatype.text().into(),
            root: arguments.root,
            entered,
            open,
        }
    }
}

impl WaitState {
    fn of(step: &OpenStep) -> Self {
        let OpenStep { wait, channel, number } = *step;
        let (peer, on, since) = (wait.peer, wait.on.label().into(), wait.since);
        Self { peer, on, since, channel: Some(channel), step: Some(number) }
    }
}

impl GapState {
    /// As the verdict knows it, its times put onto the reader's clock by `clock`.
    fn told(self, clock: impl Fn(u64) -> u64) -> Gaps {
        let [calls, ends, waits] = [self.calls, self.ends, self.waits].map(|when| when.map(&clock));
        Gaps { calls, ends, waits }
    }
}

impl State {
    /// When events were dropped, on the reader's clock by `clock`; where that is not known, `now`.
    pub(crate) fn gaps(&self, clock: impl Fn(u64) -> u64, now: u64) -> Gaps {
        match self.gaps {
            Some(gaps) => gaps.told(clock),
            None if self.dropped > 0 => Gaps::all(now),
            // That release does not count sends and receives.
            None => Gaps { calls: Some(0), ..Gaps::default() },
        }
    }

    /// As JSON.
    pub(crate) fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }

    /// From JSON.
    ///
    /// # Errors
    /// When it is none, or contains impossible values.
    pub(crate) fn read(bytes: &[u8]) -> io::Result<Self> {
        let invalid = |text| io::Error::new(io::ErrorKind::InvalidData, text);
        let state: Self = serde_json::from_slice(bytes).map_err(|error| {
            // Of another release perhaps.
            let said: Option<Value> = serde_json::from_slice(bytes).ok();
            let release = said.as_ref().and_then(|said| said["version"].as_str());
            invalid(match release {
                Some(release) if release != VERSION => {
                    format!("Towline {release} wrote it and this is {VERSION}: use the job's own towline ({error})")
                }
                _ => format!("it is not a whole state ({error})"),
            })
        })?;
        match state.fault() {
            Some(fault) => Err(invalid(format!("it cannot be true: {fault}"))),
            None => Ok(state),
        }
    }

    /// The reason why it cannot be true, if there is one.
    fn fault(&self) -> Option<String> {
        let calls = self.communicators.iter().flat_map(|comm| comm.calls.iter().chain(&comm.transfers));
        let waits = self.communicators.iter().flat_map(|comm| &comm.waits).map(|wait| wait.since);
        let ends = self.communicators.iter().filter_map(|comm| comm.ended);
        let moved = self.connections.iter().flat_map(|it| [Some(it.moved), it.polled]).flatten();
        let gaps = self.gaps.iter().flat_map(|gaps| [gaps.calls, gaps.ends, gaps.waits]).flatten();
        let own = [self.now, self.wall].into_iter().chain(calls.map(|call| call.entered));
        let mut times = own.chain(waits).chain(ends).chain(moved).chain(gaps);
        let late = times.find(|&time| time > LAST).map(|time| format!("a time of {time} ns"));
        late.or_else(|| self.communicators.iter().find_map(CommState::fault))
    }

    /// Distinguishes its process from all others.
    pub(crate) fn process(&self) -> ProcessKey {
        (self.stamp, self.boot, self.host.clone(), self.pid)
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::{Body, Coll, P2p, ProxyOp, Record, state};
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
        apply(300, 2000, 1000, Body::ProxyOp(ProxyOp { peer: 0, channel: 3, ..ProxyOp::default() }));
        apply(301, 2001, 2000, Body::ProxyStep { step: 17 });
        apply(302, 2001, 0, Body::State { state: state::STEP_RECV_WAIT, steps: 0, arg: 0 });
        for number in 0..300 {
            let p2p = P2p { count: number, func: "Send".into(), peer: 0, ..P2p::default() };
            apply(400 + number, 3000 + number, 0, Body::P2p(p2p));
            if number > 2 {
                apply(400 + number, 3000 + number, 0, Body::Stop);
            }
        }
        let communicators = communicators(&tracker, 10);
        let state = State { host: "node1".into(), communicators, ..State::default() };
        let read = State::read(state.text().as_bytes()).expect("JSON");
        assert_eq!(read, state);
        let comm = &read.communicators[0];
        assert_eq!((comm.info().id, comm.made, comm.calls.len()), (0x77, 200, 11), "the open one and the last ten");
        assert_eq!(comm.info().gpu, "3 at 0000:3b:00.0");
        assert_eq!((comm.waits[0].channel, comm.waits[0].step), (Some(3), Some(17)));
        let told = comm.told(|when| when + 1000);
        assert_eq!(told.waits, [Wait { peer: 0, on: On::Data, since: 1302 }]);
        assert_eq!((told.calls[0].open, told.calls[0].entered), (true, 1000));
        assert_eq!((comm.transfers.len(), told.exchanged[&0]), (13, (300, 0)));
        let first = told.transfers[1];
        assert_eq!((first.key, first.open), (Key::transfer("Send".into(), 1, 0), true));
        let last = told.calls.last().expect("calls");
        assert_eq!(last.key, Key::collective("AllReduce".into(), 199));
        assert_eq!(last.arguments, Arguments { count: 8, datatype: "ncclInt8".into(), root: 0 });
    }

    /// A state in which nothing is wrong, as JSON.
    fn sound() -> Value {
        let call = |peer| CallState {
            func: "AllReduce".into(),
            seq: 7,
            peer,
            count: 8,
            datatype: "ncclInt8".into(),
            root: 0,
            entered: 5,
            open: true,
        };
        let wait = |peer| WaitState { peer, on: "data".into(), since: 5, ..WaitState::default() };
        let comm = CommState {
            id: "77".into(),
            rank: 1,
            ranks: 4,
            ended: Some(6),
            calls: vec![call(None)],
            transfers: vec![call(Some(0)), call(Some(4)), call(None)],
            exchanged: vec![(0, 1, 1), (9, 1, 1)],
            waits: vec![wait(0), wait(4), wait(-1)],
            ..CommState::default()
        };
        let connections = vec![Connection { moved: 5, polled: Some(5), ..Connection::default() }];
        let gaps = Some(GapState { ends: Some(5), ..GapState::default() });
        let communicators = vec![comm];
        let state = State { version: "0.0.1".into(), communicators, connections, gaps, ..State::default() };
        serde_json::to_value(state).unwrap()
    }

    fn read(value: &Value) -> io::Result<State> {
        State::read(value.to_string().as_bytes())
    }

    #[test]
    fn what_cannot_be_true_is_no_state() {
        assert!(read(&sound()).is_ok());
        for (place, value, said) in [
            ("/now", u64::MAX.into(), "a time of 18446744073709551615 ns"),
            ("/wall", (1u64 << 63).into(), "a time"),
            ("/connections/0/moved", u64::MAX.into(), "a time"),
            ("/connections/0/polled", u64::MAX.into(), "a time"),
            ("/communicators/0/ended", u64::MAX.into(), "a time"),
            ("/communicators/0/calls/0/entered", u64::MAX.into(), "a time"),
            ("/communicators/0/transfers/0/entered", u64::MAX.into(), "a time"),
            ("/communicators/0/waits/0/since", u64::MAX.into(), "a time"),
            ("/gaps/ends", u64::MAX.into(), "a time"),
            ("/communicators/0/ranks", i32::MAX.into(), "a communicator of 2147483647 ranks"),
            ("/communicators/0/ranks", (-1).into(), "a communicator of -1 ranks"),
            ("/communicators/0/rank", 4.into(), "rank 4 of 4"),
            ("/communicators/0/rank", (-1).into(), "rank -1 of 4"),
            ("/communicators/0/id", "xyz".into(), "\"xyz\" is no communicator"),
            ("/communicators/0/ranks", (1u64 << 31).into(), "Towline 0.0.1 wrote it"),
            ("/pid", "seven".into(), "use the job's own towline"),
        ] as [(&str, Value, &str); 16]
        {
            let mut state = sound();
            *state.pointer_mut(place).unwrap_or_else(|| panic!("{place}")) = value;
            let error = read(&state).unwrap_err().to_string();
            assert!(error.contains(said), "{place}: {error}");
        }
    }

    #[test]
    fn a_wait_for_a_rank_that_there_is_not_leads_to_none() {
        let told = read(&sound()).unwrap().communicators[0].told(|when| when);
        assert_eq!(told.waits.iter().map(|wait| wait.peer).collect::<Vec<_>>(), [0]);
        assert_eq!(told.transfers.iter().map(|call| call.key.peer).collect::<Vec<_>>(), [Some(0)]);
        assert_eq!(told.exchanged.into_keys().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn a_state_of_an_older_release_is_read() {
        let mut state = sound();
        for name in ["stamp", "rank"] {
            state.as_object_mut().unwrap().remove(name).expect("it is there now");
        }
        let wait = &mut state["communicators"][0]["waits"][0];
        for name in ["channel", "step"] {
            wait.as_object_mut().unwrap().remove(name).expect("it is there now");
        }
        assert_eq!((read(&state).unwrap().stamp, read(&state).unwrap().rank), (0, None));
    }

    #[test]
    fn a_state_that_is_cut_off_is_none() {
        let whole = sound().to_string();
        for length in 0..whole.len() {
            assert!(State::read(&whole.as_bytes()[..length]).is_err(), "{length} of {whole}");
        }
    }
}
