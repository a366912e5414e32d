//! The three ways in which processes, threads and devices go together. The interface does not say which it is.

use std::collections::HashSet;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Barrier, OnceLock};
use std::time::Duration;

use towline::trace::event::Kind;
use towline::trace::perfetto::read::Process;

use super::check;
use super::host::{CommDescr, Host};
use super::play::{Comm, Pace, Shape};

pub(crate) const SHAPE: Shape = Shape { channels: 2, steps: 8, bytes: 1 << 16 };
pub(crate) const COLLECTIVES: u64 = 20;
const PACE: Pace = Pace { wire: [Duration::from_micros(1), Duration::from_micros(2)], ..Pace::NONE };

/// Versions of the interface, the newest last.
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=6;

/// NCCL's mask: one for the process, which every thread reads as long as it lives.
static MASK: AtomicI32 = AtomicI32::new(0);
/// What the first communicator wanted.
static WANTED: OnceLock<i32> = OnceLock::new();

/// A communicator with the process's mask.
fn join(host: Host, descr: CommDescr) -> Comm {
    let comm = Comm::new(host, descr, MASK.as_ptr());
    assert_ne!(*WANTED.get_or_init(|| MASK.load(Ordering::Relaxed)), 0);
    mask_stands();
    comm
}

fn mask_stands() {
    assert_eq!(Some(&MASK.load(Ordering::Relaxed)), WANTED.get(), "every init writes the same mask");
}

/// One process per device.
pub(crate) fn play_rank(args: &str) {
    let (version, rank) = args.split_once(',').unwrap();
    let rank: i32 = rank.parse().unwrap();
    let ranks = 3;
    let mut mask = 0;
    let comm = Comm::new(Host::load(version.parse().unwrap()), CommDescr { id: 0x77, ranks, rank }, &mut mask);
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
pub(crate) fn play_devices(version: u32) {
    let (host, ranks) = (Host::load(version), 4);
    let comms: Vec<Comm> = (0..ranks)
        .map(|rank| {
            // Something else in it: that an init leaves it alone would go unnoticed.
            MASK.store(0x5a5a_0000, Ordering::Relaxed);
            join(host, CommDescr { id: 0x88, ranks, rank })
        })
        .collect();
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
pub(crate) fn play_threads(version: u32) {
    let (host, ranks) = (Host::load(version), 6);
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
                    let comm = join(host, CommDescr { id: 0x1000 + round, ranks, rank });
                    for seq in 0..3 {
                        let task = comm.enqueue(seq, 1 << 10);
                        comm.progress(task, SHAPE, (rank + 1) % ranks, (rank + 5) % ranks, PACE);
                        // While others begin and end communicators.
                        mask_stands();
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
    VERSIONS.for_each(one_process_per_device_speaks);
}

fn one_process_per_device_speaks(version: u32) {
    let dir = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..3)
        .map(|rank| {
            let mut command = super::command(&format!("rank:{version},{rank}"), dir.path());
            command.env("TOWLINE_PROFILE", "all").spawn().unwrap()
        })
        .collect();
    children.into_iter().for_each(|child| drop(super::finish(child)));
    let files = check::traces(dir.path());
    assert_eq!(files.len(), 3, "v{version}");
    let (mut leaving, mut arriving) = (HashSet::new(), HashSet::new());
    for file in &files {
        let contents = check::load(file);
        let process = &contents.processes[0];
        assert_eq!((contents.processes.len(), process.comms.len(), process.dropped), (1, 1, 0), "v{version}");
        check::family(process);
        moved(process, version, COLLECTIVES);
        for arrow in &process.arrows {
            let set = if arrow.leaves { &mut leaving } else { &mut arriving };
            assert!(set.insert(arrow.id), "an arrow has one end of each kind");
        }
    }
    assert_eq!(leaving, arriving, "v{version}: what a rank sends arrives at its neighbour");
    // Per collective, channel and step: one arrow between the steps, and one per part; NCCL's descriptor tells too
    // little for the latter.
    let parts = if version >= 4 { 2 } else { 0 };
    assert_eq!(leaving.len() as u64, 3 * COLLECTIVES * 2 * 8 * (1 + parts), "v{version}");
}

/// Nothing is missing of so many collectives' transfers.
fn moved(process: &Process, version: u32, collectives: u64) {
    let steps = collectives * 2 * 2 * SHAPE.steps as u64;
    assert_eq!(check::starts(process, Kind::ProxyStep).len() as u64, steps, "v{version}");
    match version {
        // Sizes of steps are told from v4 on, network events from v3 on.
        4.. => assert_eq!(check::bytes_add_up(process), steps * SHAPE.bytes as u64, "v{version}"),
        _ => {
            let parts = if version == 3 { 2 } else { 0 };
            assert_eq!(check::starts(process, Kind::NetPlugin).len() as u64, steps * parts, "v{version}");
        }
    }
}

#[test]
fn several_devices_in_one_process() {
    for version in VERSIONS {
        let dir = tempfile::tempdir().unwrap();
        super::run(&format!("devices:{version}"), dir.path(), &[]);
        let contents = check::load(&check::traces(dir.path())[0]);
        let process = &contents.processes[0];
        check::family(process);
        assert_eq!((process.comms.len(), process.dropped), (4, 0), "v{version}");
        for comm in &process.comms {
            let colls = check::starts(process, Kind::Coll);
            let own = colls.iter().filter(|coll| coll.context == comm.context).count() as u64;
            assert_eq!(own, COLLECTIVES, "v{version}: rank {}", comm.rank);
        }
        moved(process, version, 4 * COLLECTIVES);
    }
}

#[test]
fn one_thread_per_device_with_communicators_coming_and_going() {
    threads_with([*VERSIONS.start(), *VERSIONS.end()]);
}

/// Run by `.ci/run`, and by `-- --ignored long::`.
mod long {
    #[test]
    #[ignore = "long: .ci/run runs it"]
    fn one_thread_per_device_with_the_other_versions() {
        super::threads_with(*super::VERSIONS.start() + 1..*super::VERSIONS.end());
    }
}

fn threads_with(versions: impl IntoIterator<Item = u32>) {
    for version in versions {
        let dir = tempfile::tempdir().unwrap();
        super::run(&format!("threads:{version}"), dir.path(), &[("TOWLINE_PROFILE_BUFFER", "256")]);
        // The last communicator may end more than once: a later writer finds the same file.
        let files = check::traces(dir.path());
        assert_eq!(files.len(), 1, "v{version}");
        let contents = check::load(&files[0]);
        let process = &contents.processes[0];
        check::family(process);
        assert_eq!((process.comms.len(), process.dropped), (72, 0), "v{version}");
        assert_eq!(check::starts(process, Kind::Coll).len(), 6 * 12 * 3, "v{version}");
        moved(process, version, 6 * 12 * 3);
    }
}
