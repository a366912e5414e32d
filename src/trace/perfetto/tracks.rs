//! Where events are drawn: Perfetto's tracks as a tree, and lanes for events that overlap.
//!
//! ```text
//! host:pid                         the process
//! ├─ rank r of n · communicator    one per communicator and rank
//! │  ├─ calls                      GroupApi > CollApi / P2pApi, KernelLaunch
//! │  ├─ plans                      Group: one launch of the kernel
//! │  ├─ collectives                Coll, P2p, copy-engine collectives, until their last child is done
//! │  ├─ channel c
//! │  │  ├─ kernel                  KernelCh > KernelPhase, on the GPU's clock
//! │  │  ├─ send to p               ProxyOp
//! │  │  │  └─ steps                ProxyStep > its states
//! │  │  │     └─ wire              NetPlugin
//! │  │  └─ receive from p …
//! │  └─ proxy thread               ProxyCtrl
//! └─ counters per rail
//! ```
//!
//! Slices of one track must nest. Things that overlap, such as the steps of one operation, get one track each, of the
//! same name under the same parent. Perfetto draws these tracks as one. Such a set is a *group* and its members
//! *lanes*.

use super::super::hash::QuickMap;
use super::packets::Packets;

/// A set of lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Group {
    /// Host calls of a communicator (by its track).
    Calls(u64),
    /// Launch plans of a communicator.
    Plans(u64),
    /// Collectives of a communicator.
    Collectives(u64),
    /// Proxy thread of a communicator.
    Proxy(u64),
    /// Kernels of a channel (by its track).
    Kernel(u64),
    /// Operations of a channel with a peer.
    Ops(u64, i32, bool),
    /// Steps of an operation (by its lane).
    Steps(u64),
    /// Network events of a step (by its lane).
    Wire(u64),
}

impl Group {
    fn parent(self) -> u64 {
        match self {
            Group::Calls(track)
            | Group::Plans(track)
            | Group::Collectives(track)
            | Group::Proxy(track)
            | Group::Kernel(track)
            | Group::Ops(track, ..)
            | Group::Steps(track)
            | Group::Wire(track) => track,
        }
    }

    fn name(self) -> String {
        match self {
            Group::Calls(_) => "calls".into(),
            Group::Plans(_) => "plans".into(),
            Group::Collectives(_) => "collectives".into(),
            Group::Proxy(_) => "proxy thread".into(),
            Group::Kernel(_) => "kernel".into(),
            Group::Ops(_, peer, true) => format!("send to {peer}"),
            Group::Ops(_, peer, false) => format!("receive from {peer}"),
            Group::Steps(_) => "steps".into(),
            Group::Wire(_) => "wire".into(),
        }
    }

    /// Its place among its siblings.
    fn order(self) -> i32 {
        match self {
            Group::Calls(_) => 0,
            Group::Plans(_) => 1,
            Group::Collectives(_) => 2,
            Group::Kernel(_) => 3,
            Group::Ops(_, peer, send) => 10 + peer * 2 + i32::from(!send),
            Group::Steps(_) | Group::Wire(_) => 0,
            Group::Proxy(_) => 1_000_000,
        }
    }
}

/// Channels come after a communicator's own tracks.
const CHANNELS: i32 = 100;

#[derive(Debug, Clone, Copy)]
struct Lane {
    uuid: u64,
    busy: bool,
    free_from: u64,
}

/// A lane in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Its group.
    pub(super) group: Group,
    /// Its number in the group.
    pub(super) index: usize,
    /// Its track.
    pub(super) uuid: u64,
}

/// All tracks of a file.
pub(super) struct Tracks {
    seed: u64,
    next: u64,
    process: u64,
    channels: QuickMap<(u64, u8), u64>,
    lanes: QuickMap<Group, Vec<Lane>>,
}

impl Tracks {
    /// Tracks under a process's track; `seed` keeps the files of different processes apart.
    pub(super) fn new(seed: u64) -> Self {
        let mut tracks = Self { seed, next: 0, process: 0, channels: QuickMap::default(), lanes: QuickMap::default() };
        tracks.process = tracks.fresh();
        tracks
    }

    /// The process's track.
    pub(super) fn process(&self) -> u64 {
        self.process
    }

    /// A number for a track that no other file has.
    pub(super) fn fresh(&mut self) -> u64 {
        self.next += 1;
        super::mix(self.seed, self.next) | 1
    }

    /// The track of a channel of the communicator whose track is `comm`.
    pub(super) fn channel(&mut self, out: &mut Packets, comm: u64, channel: u8) -> u64 {
        if let Some(&uuid) = self.channels.get(&(comm, channel)) {
            return uuid;
        }
        let uuid = self.fresh();
        describe_channel(out, uuid, comm, channel);
        self.channels.insert((comm, channel), uuid);
        uuid
    }

    /// A lane of the group that is free at `when`.
    pub(super) fn take(&mut self, out: &mut Packets, group: Group, when: u64) -> Place {
        let lanes = self.lanes.entry(group).or_default();
        if let Some(index) = lanes.iter().position(|lane| !lane.busy && lane.free_from <= when) {
            lanes[index].busy = true;
            return Place { group, index, uuid: lanes[index].uuid };
        }
        let index = lanes.len();
        let uuid = self.fresh();
        out.track(uuid, group.parent(), &group.name(), group.order());
        self.lanes.entry(group).or_default().push(Lane { uuid, busy: true, free_from: 0 });
        Place { group, index, uuid }
    }

    /// Describes all tracks again, for a new file.
    pub(super) fn describe(&self, out: &mut Packets) {
        for (&(comm, channel), &uuid) in &self.channels {
            describe_channel(out, uuid, comm, channel);
        }
        for (group, lanes) in &self.lanes {
            lanes.iter().for_each(|lane| out.track(lane.uuid, group.parent(), &group.name(), group.order()));
        }
    }

    /// Releases a lane: nothing happens on it after `when` any more.
    pub(super) fn release(&mut self, place: Place, when: u64) {
        if let Some(lane) = self.lanes.get_mut(&place.group).and_then(|lanes| lanes.get_mut(place.index)) {
            lane.busy = false;
            lane.free_from = when;
        }
    }

    /// Forgets the tracks of a communicator that has ended.
    pub(super) fn forget(&mut self, comm: u64) {
        let channels: Vec<u64> =
            self.channels.iter().filter(|((owner, _), _)| *owner == comm).map(|(_, &uuid)| uuid).collect();
        self.channels.retain(|(owner, _), _| *owner != comm);
        // Downwards, level by level: the tracks below forgotten tracks.
        let mut gone = channels;
        gone.push(comm);
        while !gone.is_empty() {
            let mut below = Vec::new();
            self.lanes.retain(|group, lanes| {
                let keep = !gone.contains(&group.parent());
                if !keep {
                    below.extend(lanes.iter().map(|lane| lane.uuid));
                }
                keep
            });
            gone = below;
        }
    }
}

fn describe_channel(out: &mut Packets, uuid: u64, comm: u64, channel: u8) {
    out.track(uuid, comm, &format!("channel {channel}"), CHANNELS + i32::from(channel));
}
