//! Every version of the interface tells what it has to tell.

use towline::trace::event::{Body, CollApi, Kind, P2p, state};

use super::check;
use super::host::{CommDescr, Event, Host};
use super::play::{Comm, Pace, Shape};

const SHAPE: Shape = Shape { channels: 2, steps: 5, bytes: 4096 };
const COLLECTIVES: u64 = 3;

pub(crate) fn play(version: u32) {
    let mut mask = 0;
    let comm = Comm::new(Host::load(version), CommDescr { id: 0xabc, ranks: 4, rank: 1 }, &mut mask);
    assert_ne!(mask, 0);
    for seq in 0..COLLECTIVES {
        let task = comm.enqueue(seq, 1000);
        comm.progress(task, SHAPE, 2, 0, Pace::NONE);
    }
    let (host, descr, none) = (comm.host, comm.descr, std::ptr::null_mut());
    let api = host.start(comm.context, descr, none, Event::P2pApi { func: c"Send", count: 100 });
    host.stop(api);
    let group = host.start(comm.context, descr, none, Event::Group);
    let send = Event::P2p { api, group, func: c"Send", count: 100, peer: 3 };
    let send = host.start(comm.context, descr, none, send);
    assert!(!send.is_null());
    host.stop(send);
    host.stop(group);
    let ctrl = host.start(comm.context, descr, none, Event::ProxyCtrl);
    assert!(ctrl.is_null(), "nobody asked for ProxyCtrl");
    if version >= 6 {
        let api =
            host.start(comm.context, descr, std::ptr::null_mut(), Event::CollApi { func: c"AllGather", count: 8 });
        let coll = host.start(comm.context, descr, api, Event::CeColl { func: c"AllGather", seq: 0, count: 8 });
        for event in [Event::CeSync, Event::CeBatch { bytes: 32 }] {
            let event = host.start(comm.context, descr, coll, event);
            assert!(!event.is_null());
            host.stop(event);
        }
        host.stop(coll);
        host.stop(api);
    }
    comm.finalize();
}

fn version(number: u32) {
    let dir = tempfile::tempdir().unwrap();
    super::run(&format!("version:{number}"), dir.path(), &[]);
    let files = check::traces(dir.path());
    assert_eq!(files.len(), 1);
    let contents = check::load(&files[0]);
    let process = &contents.processes[0];
    check::family(process);

    let comm = &process.comms[0];
    assert_eq!((comm.id, comm.rank), (0xabc, 1), "from v4 told by init, before by the first collective");
    assert_eq!(comm.ranks, if number >= 4 { 4 } else { 0 });

    let count = |kind| check::starts(process, kind).len() as u64;
    let ops = COLLECTIVES * 2 * 2;
    assert_eq!(count(Kind::Group), COLLECTIVES + 1);
    assert_eq!((count(Kind::P2p), count(Kind::P2pApi)), (1, u64::from(number >= 5)));
    assert_eq!(count(Kind::Coll), COLLECTIVES);
    assert_eq!((count(Kind::ProxyOp), count(Kind::ProxyStep)), (ops, ops * 5));
    assert_eq!(count(Kind::NetPlugin), if number >= 3 { ops * 5 * 2 } else { 0 });
    assert_eq!(count(Kind::KernelCh), if number >= 3 { COLLECTIVES * 2 } else { 0 });
    assert_eq!(count(Kind::KernelPhase), if number >= 7 { COLLECTIVES * 2 * 3 } else { 0 });
    assert_eq!(count(Kind::CollApi), if number >= 5 { COLLECTIVES + u64::from(number >= 6) } else { 0 });
    assert_eq!(count(Kind::CeColl) + count(Kind::CeSync) + count(Kind::CeBatch), if number >= 6 { 3 } else { 0 });
    if number >= 4 {
        assert_eq!(check::bytes_add_up(process), ops * 5 * 4096);
    }
    for call in check::starts(process, Kind::P2p).into_iter().chain(check::starts(process, Kind::CollApi)) {
        let (Body::P2p(P2p { tag, .. }) | Body::CollApi(CollApi { tag, .. })) = call.body else { unreachable!() };
        assert_eq!(tag, if number >= 7 { u64::MAX } else { 0 });
    }
    for phase in check::starts(process, Kind::KernelPhase) {
        let Body::KernelPhase { number, name, timer, .. } = phase.body else { unreachable!() };
        assert_eq!(name.text(), ["initial_sync", "compute", "final_sync"][usize::from(number)]);
        let ended = process.records.iter().find_map(|record| match record.body {
            Body::State { state: state::KERNEL_PHASE_STOP, arg, .. } if record.id == phase.id => Some(arg),
            _ => None,
        });
        assert!(timer > 0 && ended.is_some_and(|ended| ended >= timer), "{phase:?} ended at {ended:?}");
    }
    for coll in check::starts(process, Kind::Coll) {
        let Body::Coll(coll) = coll.body else { unreachable!() };
        let told = (coll.func.text(), coll.algorithm.text(), coll.protocol.text(), coll.datatype.text());
        assert_eq!(told, ("AllReduce", "RING", "SIMPLE", "ncclFloat32"));
        assert_eq!((coll.variant.text(), coll.symmetric), if number >= 7 { ("LD", true) } else { ("", false) });
    }

    let summary = std::fs::read_to_string(summary_file(dir.path())).unwrap();
    let line = summary.lines().find(|line| line.contains("AllReduce")).expect(&summary);
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[..4], ["AllReduce", "RING", "SIMPLE", "3"], "{summary}");
    assert_eq!(words[4..6], ["12", "kB"], "three times a thousand floats: {summary}");
    let sent = summary.lines().find(|line| line.trim_start().starts_with("Send ")).expect(&summary);
    assert!(sent.contains("400 B") && sent.contains("(1 without operations"), "{summary}");
    let phase = summary.lines().find(|line| line.trim_start().starts_with("initial_sync "));
    let times = phase.map(|line| line.split_whitespace().nth(1).map(str::to_owned).unwrap_or_default());
    assert_eq!(times, (number >= 7).then(|| (COLLECTIVES * 2).to_string()), "{summary}");
    let peer = summary.lines().find(|line| line.contains("send to 2")).expect(&summary);
    assert!(peer.contains("123 kB"), "30 steps of 4096 bytes, by steps or, up to v3, by operations: {summary}");
}

fn summary_file(dir: &std::path::Path) -> std::path::PathBuf {
    let mut files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| path.to_string_lossy().ends_with(".summary.txt")).expect("a summary")
}

#[test]
fn v1_tells_operations_and_steps() {
    version(1);
}

#[test]
fn v2_tells_names() {
    version(2);
}

#[test]
fn v3_tells_kernels_and_the_network() {
    version(3);
}

#[test]
fn v4_tells_the_communicator_and_sizes() {
    version(4);
}

#[test]
fn v5_tells_the_hosts_calls() {
    version(5);
}

#[test]
fn v6_tells_copy_engines() {
    version(6);
}

#[test]
fn v7_tells_tags_and_kernels() {
    version(7);
}
