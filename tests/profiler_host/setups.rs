//! The three ways in which processes, threads and devices go together. The interface does not say which it is.

use std::collections::HashSet;
use std::sync::Barrier;
use std::time::Duration;

use towline::trace::event::Kind;

use super::check;
use super::host::{CommDescr, Host};
use super::play::{Comm, Pace, Shape};

const SHAPE: Shape = Shape { channels: 2, steps: 8, bytes: 1 << 16 };
const COLLECTIVES: u64 = 20;
const PACE: Pace =
    Pace { gpu: Duration::ZERO, receiver: Duration::ZERO, wire: [Duration::from_micros(1), Duration::from_micros(2)] };

/// One process per device.
pub(crate) fn play_rank(args: &str) {
    let rank: i32 = args.parse().unwrap();
    let ranks = 3;
    let mut mask = 0;
    let comm = Comm::new(Host::load(6), CommDescr { id: 0x77, ranks, rank }, &mut mask);
    for seq in 0..COLLECTIVES {
        let task = comm.enqueue(seq, 1 << 14);
        // Enqueueing and progress are different threads.
        std::thread::scope(|scope| {
            scope.spawn(|| comm.progress(task, SHAPE, (rank + 1) % ranks, (rank + ranks - 1) % ranks, PACE));
        });
    }
    comm.finalize();
}

/// Several devices in one process, all enqueued by one thread inside one group.
pub(crate) fn play_devices() {
    let (host, ranks) = (Host::load(6), 4);
    let mut mask = 0;
    let comms: Vec<Comm> =
        (0..ranks).map(|rank| Comm::new(host, CommDescr { id: 0x88, ranks, rank }, &mut mask)).collect();
    for seq in 0..COLLECTIVES {
        let tasks: Vec<_> = comms.iter().map(|comm| comm.enqueue(seq, 1 << 14)).collect();
        std::thread::scope(|scope| {
            for (comm, task) in comms.iter().zip(tasks) {
                let rank = comm.descr.rank;
                scope.spawn(move || comm.progress(task, SHAPE, (rank + 1) % ranks, (rank + 3) % ranks, PACE));
            }
        });
    }
    comms.into_iter().for_each(Comm::finalize);
}

/// One thread per device; communicators come and go on all of them at once.
pub(crate) fn play_threads() {
    let (host, ranks) = (Host::load(6), 6);
    let barrier = Barrier::new(ranks as usize);
    std::thread::scope(|scope| {
        for rank in 0..ranks {
            let barrier = &barrier;
            scope.spawn(move || {
                for round in 0..12 {
                    // Half of them meet, half of them run apart, so that inits and finalizes cross everything else.
                    if rank % 2 == 0 {
                        std::thread::sleep(Duration::from_micros(300 * rank as u64));
                    }
                    let mut mask = 0;
                    let comm = Comm::new(host, CommDescr { id: 0x1000 + round, ranks, rank }, &mut mask);
                    assert_ne!(mask, 0);
                    for seq in 0..3 {
                        let task = comm.enqueue(seq, 1 << 10);
                        comm.progress(task, SHAPE, (rank + 1) % ranks, (rank + 5) % ranks, PACE);
                    }
                    comm.finalize();
                }
                barrier.wait();
            });
        }
    });
}

#[test]
fn one_process_per_device() {
    let dir = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..3)
        .map(|rank| {
            let mut command = super::command(&format!("rank:{rank}"), dir.path());
            command.env("TOWLINE_PROFILE", "all").spawn().unwrap()
        })
        .collect();
    children.into_iter().for_each(|child| drop(super::finish(child)));
    let files = check::traces(dir.path());
    assert_eq!(files.len(), 3);
    let (mut leaving, mut arriving) = (HashSet::new(), HashSet::new());
    for file in &files {
        let contents = check::load(file);
        let process = &contents.processes[0];
        assert_eq!((contents.processes.len(), process.comms.len(), process.dropped), (1, 1, 0));
        check::family(process);
        assert_eq!(check::bytes_add_up(process), COLLECTIVES * 2 * 2 * 8 * (1 << 16));
        for arrow in &process.arrows {
            let set = if arrow.leaves { &mut leaving } else { &mut arriving };
            assert!(set.insert(arrow.id), "an arrow has one end of each kind");
        }
    }
    assert_eq!(leaving, arriving, "what a rank sends arrives at its neighbour");
    // Per collective, channel and step: one arrow between the steps, and one per part.
    assert_eq!(leaving.len() as u64, 3 * COLLECTIVES * 2 * 8 * (1 + 2));
}

#[test]
fn several_devices_in_one_process() {
    let dir = tempfile::tempdir().unwrap();
    super::run("devices", dir.path(), &[]);
    let contents = check::load(&check::traces(dir.path())[0]);
    let process = &contents.processes[0];
    check::family(process);
    assert_eq!((process.comms.len(), process.dropped), (4, 0));
    for comm in &process.comms {
        let colls = check::starts(process, Kind::Coll);
        let own = colls.iter().filter(|coll| coll.context == comm.context).count() as u64;
        assert_eq!(own, COLLECTIVES, "rank {}", comm.rank);
    }
    check::bytes_add_up(process);
}

#[test]
fn one_thread_per_device_with_communicators_coming_and_going() {
    let dir = tempfile::tempdir().unwrap();
    super::run("threads", dir.path(), &[("TOWLINE_PROFILE_BUFFER", "256")]);
    // The last communicator may end more than once: whoever comes later finds the same file.
    let files = check::traces(dir.path());
    assert_eq!(files.len(), 1);
    let contents = check::load(&files[0]);
    let process = &contents.processes[0];
    check::family(process);
    assert_eq!((process.comms.len(), process.dropped), (72, 0));
    assert_eq!(check::starts(process, Kind::Coll).len(), 6 * 12 * 3);
    check::bytes_add_up(process);
}
