//! Several communicators of the same processes, and sends and receives.

use super::*;
use graph::Communicators;

/// A process, which is one rank of each communicator of which it is a member.
type Worker = i32;

/// A communicator of these workers, in the order of their ranks, that have all completed AllReduce #0 to #4.
fn communicator(comms: &mut Communicators, id: u64, title: &str, workers: &[Worker]) {
    let ranks = workers.len() as i32;
    let mut comm = Communicator { id, title: title.into(), ranks, now: 51 * S, ..Communicator::default() };
    for (rank, &worker) in (0..).zip(workers) {
        let calls = (0..5).map(|seq| entered("AllReduce", seq, (seq + 1) * S, false)).collect();
        let host = format!("node{worker}");
        let member = Member { host, pid: 100 + worker, heard: Some(51 * S), calls, ..Member::default() };
        comm.members.insert(rank, member);
    }
    comms.insert(id, comm);
}

fn of(comms: &mut Communicators, id: u64, worker: Worker) -> &mut Member {
    let members = comms.get_mut(&id).expect("a communicator").members.values_mut();
    members.into_iter().find(|member| member.pid == 100 + worker).expect("a member")
}

fn enter(comms: &mut Communicators, id: u64, worker: Worker, when: u64) {
    of(comms, id, worker).calls.push(entered("AllReduce", 5, when, true));
}

fn workers(found: &Finding) -> Vec<Worker> {
    found.named().iter().map(|named| named.member.as_ref().expect("a member").pid - 100).collect()
}

/// Data parallel and tensor parallel: worker `d * side + t` is rank `t` of tensor communicator `d`, and rank `d` of
/// data communicator `100 + t`.
fn grid(side: i32) -> Communicators {
    let mut comms = Communicators::new();
    for one in 0..side {
        let tensor: Vec<Worker> = (0..side).map(|t| one * side + t).collect();
        communicator(&mut comms, one as u64, &format!("tp{one}"), &tensor);
        let data: Vec<Worker> = (0..side).map(|d| d * side + one).collect();
        communicator(&mut comms, 100 + one as u64, &format!("dp{one}"), &data);
    }
    comms
}

#[test]
fn the_rank_that_holds_up_a_whole_grid_is_named_alone() {
    for side in [2, 4] {
        for odd in 0..side * side {
            let mut comms = grid(side);
            // All enter their tensor call and then their data call, but one, which enters neither.
            for worker in (0..side * side).filter(|&it| it != odd) {
                let (d, t) = ((worker / side) as u64, 100 + (worker % side) as u64);
                if worker / side == odd / side {
                    enter(&mut comms, d, worker, 10 * S);
                } else {
                    of(&mut comms, d, worker).calls.push(entered("AllReduce", 5, 10 * S, false));
                    enter(&mut comms, t, worker, 11 * S);
                }
            }
            let found = graph::findings(&comms);
            assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[odd]], "{side}, {odd}: {found:?}");
            let (victims, communicators) = ((side * side - 1) as usize, side as usize + 1);
            assert_eq!((found[0].victims, found[0].communicators.len()), (victims, communicators), "{side}, {odd}");
            let sentence = found[0].sentence();
            let end = format!("; in all, {victims} ranks in {communicators} communicators wait for this");
            assert!(found[0].comm.title == format!("tp{}", odd / side) && sentence.ends_with(&end), "{sentence}");
            // No rank stands out while it is only a moment late.
            comms.values_mut().for_each(|comm| comm.now = 14 * S);
            assert_eq!(graph::findings(&comms), []);
        }
    }
}

#[test]
fn ranks_that_enter_two_communicators_in_different_order_are_a_deadlock() {
    let mut comms = Communicators::new();
    communicator(&mut comms, 1, "dp", &[0, 1]);
    communicator(&mut comms, 2, "tp", &[1, 0]);
    enter(&mut comms, 1, 0, 10 * S);
    enter(&mut comms, 2, 1, 11 * S);
    let found = graph::findings(&comms);
    assert_eq!(found.len(), 1, "{found:?}");
    let expected = "rank 0 (node0, process 100) has been in AllReduce #5 for 41 s; rank 1 (node1, process 101) is in AllReduce #5 of tp and has not \
                    entered AllReduce #5 of dp; rank 1 (node0, process 100) is in AllReduce #5 of dp and has not entered \
                    AllReduce #5 of tp: a deadlock, the ranks wait for each other";
    assert_eq!(found[0].sentence(), expected);
    assert_eq!((found[0].verdict.kind(), workers(&found[0])), ("deadlock", vec![1, 0]));

    // Both enter both, in different order: NCCL's kernels wait for each other.
    enter(&mut comms, 2, 0, 12 * S);
    enter(&mut comms, 1, 1, 13 * S);
    let found = graph::findings(&comms);
    assert_eq!(found.len(), 1, "{found:?}");
    let expected = "rank 1 (node1, process 101) entered AllReduce #5 of tp before AllReduce #5 of dp";
    assert!(found[0].sentence().contains(expected), "{}", found[0].sentence());
    // In the same order something else holds them up.
    of(&mut comms, 1, 1).calls[5].entered = 11 * S;
    of(&mut comms, 2, 1).calls[5].entered = 13 * S;
    let found = graph::findings(&comms);
    assert!(found.iter().all(|found| found.verdict.kind() == "unknown"), "{found:?}");
    assert_eq!(found.iter().map(|it| &it.comm.title[..]).collect::<Vec<_>>(), ["dp"], "the other follows from it");
}

#[test]
fn a_circle_through_a_grid_is_found_beside_those_that_wait_for_it() {
    let mut comms = grid(2);
    // Each of the square's workers waits for the next, along a row and along a column by turns.
    for (id, worker) in [(0, 0), (101, 1), (1, 3), (100, 2)] {
        enter(&mut comms, id, worker, 10 * S);
    }
    communicator(&mut comms, 7, "other", &[0, 9]);
    enter(&mut comms, 7, 9, 12 * S);
    let found = graph::findings(&comms);
    assert_eq!((found.len(), found[0].verdict.kind()), (1, "deadlock"), "{found:?}");
    let mut named = workers(&found[0]);
    named.sort_unstable();
    assert_eq!((named, found[0].victims, found[0].communicators.len()), (vec![0, 1, 2, 3], 1, 5));
    let sentence = found[0].sentence();
    assert!(sentence.ends_with("; in all, 1 rank in 5 communicators waits for this"), "{sentence}");
}

#[test]
fn a_rank_whose_gpu_is_held_up_in_another_communicator_is_a_victim() {
    let mut comms = Communicators::new();
    communicator(&mut comms, 1, "dp", &[0, 1]);
    communicator(&mut comms, 2, "tp", &[1, 2]);
    for worker in [0, 1] {
        enter(&mut comms, 1, worker, 10 * S);
    }
    of(&mut comms, 1, 0).waits = vec![Wait { peer: 1, on: On::Data, since: 11 * S }];
    of(&mut comms, 1, 1).waits = vec![Wait { peer: 0, on: On::Gpu, since: 11 * S }];
    let found = graph::findings(&comms);
    assert_eq!((found[0].verdict.kind(), workers(&found[0])), ("waits", vec![1]), "its own GPU: {found:?}");
    // Inside a host a call is seen being enqueued only: it is not open.
    of(&mut comms, 2, 1).calls.push(entered("AllReduce", 5, 9 * S, false));
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[2]], "{found:?}");
    let expected = "rank 1 (node2, process 102) has not entered AllReduce #5: its last call was AllReduce #4, 46 s ago, \
                    completed; in all, 2 ranks in 2 communicators wait for this";
    assert_eq!((&found[0].comm.title[..], &found[0].sentence()[..]), ("tp", expected));
}

#[test]
fn a_rank_whose_bytes_have_not_arrived_is_a_victim_of_what_another_communicator_shows() {
    let mut comms = Communicators::new();
    communicator(&mut comms, 1, "dp", &[0, 1]);
    communicator(&mut comms, 2, "tp", &[1, 2]);
    for (worker, send, bytes) in [(0, true, 2000), (1, false, 1000)] {
        enter(&mut comms, 1, worker, 10 * S);
        let member = of(&mut comms, 1, worker);
        member.waits = vec![Wait { peer: 1 - worker, on: On::Data, since: 11 * S }];
        member.routes = vec![Route { send, number: 7, bytes, moved: 12 * S, polled: Some(11 * S), ..Route::default() }];
    }
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[0]], "{found:?}");
    of(&mut comms, 2, 1).calls.push(entered("AllReduce", 5, 9 * S, false));
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[2]], "{found:?}");
}

/// A pipeline of so many stages. All have passed three messages on.
fn pipeline(stages: i32) -> Communicators {
    let mut comms = Communicators::new();
    communicator(&mut comms, 3, "pp", &(0..stages).collect::<Vec<_>>());
    for stage in 0..stages {
        let member = of(&mut comms, 3, stage);
        member.calls.clear();
        for seq in 0..3 {
            for (peer, send) in [(stage - 1, false), (stage + 1, true)] {
                if (0..stages).contains(&peer) {
                    exchange(member, send, peer, (seq + 1) * S, false);
                }
            }
        }
    }
    comms
}

/// All stages have called the next message, and wait for one another's: but for the first, whose send is under way.
fn passing(stages: i32) -> Communicators {
    let mut comms = pipeline(stages);
    for stage in 0..stages {
        let member = of(&mut comms, 3, stage);
        for (peer, send) in [(stage - 1, false), (stage + 1, true)] {
            if (0..stages).contains(&peer) {
                exchange(member, send, peer, 10 * S, true);
            }
        }
        let (peer, on) = if stage == 0 { (1, On::Network) } else { (stage - 1, On::Data) };
        member.waits = vec![Wait { peer, on, since: 11 * S }];
    }
    comms
}

fn exchange(member: &mut Member, send: bool, peer: i32, when: u64, open: bool) {
    let (sends, receives) = member.exchanged.entry(peer).or_default();
    let count = if send { sends } else { receives };
    *count += 1;
    let call = transfer(send, peer, *count - 1, when, open);
    member.transfers.push(call);
}

#[test]
fn the_stage_of_a_pipeline_that_does_not_send_is_named() {
    let mut comms = pipeline(4);
    for stage in 1..4 {
        exchange(of(&mut comms, 3, stage), false, stage - 1, 10 * S, true);
    }
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[0]], "{found:?}");
    assert_eq!(
        found[0].sentence(),
        "rank 1 (node1, process 101) has been in Recv #3 from rank 0 for 41 s; rank 0 (node0, process 100) has not called the matching Send #3 to \
         rank 1: its last call was Send #2 to rank 1, 48 s ago, completed"
    );
    assert_eq!((found[0].victims, found[0].communicators.len()), (3, 1));
    // It waits for another communicator's rank, which is named instead.
    communicator(&mut comms, 4, "dp", &[0, 9]);
    enter(&mut comms, 4, 0, 9 * S);
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[9]], "{found:?}");
    assert_eq!((&found[0].comm.title[..], found[0].victims, found[0].communicators.len()), ("dp", 4, 2));
    // A pipeline's stage waits for its turn.
    let mut comms = pipeline(2);
    exchange(of(&mut comms, 3, 1), false, 0, 25 * S, true);
    assert_eq!(graph::findings(&comms), []);
}

#[test]
fn a_stopped_sender_or_receiver_is_named_alone() {
    for stages in [2, 4] {
        for stopped in [0, 1] {
            let mut comms = passing(stages);
            of(&mut comms, 3, stopped).heard = Some(16 * S);
            let named = |comms: &Communicators| {
                let found = graph::findings(comms);
                found.iter().map(|found| (found.verdict.kind(), workers(found))).collect::<Vec<_>>()
            };
            assert_eq!(named(&comms), [("silent", vec![stopped])], "of {stages}");
            // Calls that another process makes for these are not seen.
            (0..stages).for_each(|stage| of(&mut comms, 3, stage).transfers.clear());
            assert_eq!(named(&comms), [("silent", vec![stopped])], "of {stages}, without calls");
        }
    }
}

#[test]
fn a_stage_whose_gpu_is_held_up_in_another_communicator_is_a_victim() {
    let mut comms = passing(2);
    of(&mut comms, 3, 0).waits[0].on = On::Gpu;
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[0]], "its own GPU: {found:?}");
    communicator(&mut comms, 4, "tp", &[0, 9]);
    enter(&mut comms, 4, 0, 9 * S);
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[9]], "{found:?}");
    assert_eq!((found[0].victims, found[0].communicators.len()), (2, 2));
}

#[test]
fn a_half_that_is_a_moment_late_explains_no_older_transfer() {
    let mut comms = passing(3);
    // The last stage has got its message, and is at work.
    for stage in [1, 2] {
        of(&mut comms, 3, stage).transfers.last_mut().expect("a transfer").open = false;
    }
    of(&mut comms, 3, 2).waits.clear();
    exchange(of(&mut comms, 3, 1), true, 2, 49 * S, true);
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[0]], "{found:?}");
}

#[test]
fn an_old_mismatch_hides_no_transfer_that_is_stuck() {
    let mut comms = pipeline(4);
    for stage in 0..4 {
        let mut call = entered("AllReduce", 0, S, false);
        call.arguments.count += u64::from(stage == 3);
        of(&mut comms, 3, stage).calls.push(call);
    }
    assert_eq!(graph::findings(&comms)[0].verdict.kind(), "mismatch");
    exchange(of(&mut comms, 3, 1), false, 0, 10 * S, true);
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(|it| (it.verdict.kind(), workers(it))).collect::<Vec<_>>(), [("behind", vec![0])]);
}

#[test]
fn the_end_of_a_chain_is_not_named_if_its_waits_may_have_been_missed() {
    let mut comms = passing(3);
    // It has sent.
    let first = of(&mut comms, 3, 0);
    first.waits.clear();
    first.transfers.last_mut().expect("a send").open = false;
    assert_eq!(graph::findings(&comms).iter().map(workers).collect::<Vec<_>>(), [[0]]);
    of(&mut comms, 3, 0).gaps.waits = Some(12 * S);
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[0; 0]], "{found:?}");
    assert_eq!((&found[0].verdict.gaps[..], found[0].victims), (&[0][..], 2), "{found:?}");
}

#[test]
fn ranks_that_all_wait_for_one_that_is_not_seen_are_one_finding() {
    let mut comms = Communicators::new();
    communicator(&mut comms, 5, "ep", &(0..8).collect::<Vec<_>>());
    comms.get_mut(&5).expect("it").members.remove(&7);
    for rank in 0..7 {
        let member = of(&mut comms, 5, rank);
        for send in [true, false] {
            exchange(member, send, 7, 10 * S, true);
        }
        member.waits = vec![Wait { peer: 7, on: On::Data, since: 11 * S }];
    }
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(|it| (it.verdict.kind(), it.victims)).collect::<Vec<_>>(), [("waits", 7)], "{found:?}");
    assert!(found[0].named().is_empty(), "{found:?}");
}

#[test]
fn a_transfer_of_which_events_were_dropped_is_not_told_by_its_number() {
    let mut comms = pipeline(2);
    exchange(of(&mut comms, 3, 1), false, 0, 10 * S, true);
    of(&mut comms, 3, 0).gaps.calls = Some(2 * S);
    let found = graph::findings(&comms);
    assert!(found[0].named().is_empty() && found[0].sentence().contains("(node0, process 100) has gaps"), "{found:?}");
}

#[test]
fn two_ranks_that_receive_from_each_other_are_a_deadlock() {
    let mut comms = pipeline(2);
    exchange(of(&mut comms, 3, 0), false, 1, 10 * S, true);
    exchange(of(&mut comms, 3, 1), false, 0, 10 * S, true);
    let found = graph::findings(&comms);
    assert_eq!(found.len(), 1, "{found:?}");
    let expected =
        "rank 1 (node1, process 101) is in Recv #3 from rank 0 of pp and has not entered Send #0 to rank 0 of pp";
    assert!(found[0].sentence().contains(expected), "{}", found[0].sentence());
    assert_eq!(found[0].verdict.kind(), "deadlock");
}

#[test]
fn two_halves_of_different_sizes_are_a_mismatch_of_both() {
    let mut comms = pipeline(2);
    exchange(of(&mut comms, 3, 0), true, 1, 10 * S, true);
    exchange(of(&mut comms, 3, 1), false, 0, 10 * S, true);
    // The same bytes as others' elements are well.
    of(&mut comms, 3, 1).transfers[3].arguments = Arguments { count: 65536, datatype: "ncclInt8".into(), root: 0 };
    assert!(graph::findings(&comms).iter().all(|found| found.verdict.kind() == "unknown"));
    of(&mut comms, 3, 1).transfers[3].arguments.count = 99;
    let found = graph::findings(&comms);
    assert_eq!((found.len(), found[0].verdict.kind(), workers(&found[0])), (1, "mismatch", vec![0, 1]), "{found:?}");
    let expected = "rank 0 (node0, process 100) called Send #3 to rank 1 with 16384 ncclFloat32; rank 1 (node1, process 101) \
                    called Recv #3 from rank 0 with 99 ncclInt8: they differ";
    assert!(found[0].sentence().ends_with(expected), "{}", found[0].sentence());
}

#[test]
fn the_ranks_that_miss_from_an_exchange_of_all_with_all_are_named() {
    let mut comms = Communicators::new();
    communicator(&mut comms, 5, "ep", &[0, 1, 2, 3]);
    for rank in [0, 2] {
        for peer in (0..4).filter(|&peer| peer != rank) {
            for send in [true, false] {
                // Those that are both there have done it.
                exchange(of(&mut comms, 5, rank), send, peer, 10 * S, peer % 2 == 1);
            }
        }
    }
    let found = graph::findings(&comms);
    assert_eq!(found.iter().map(workers).collect::<Vec<_>>(), [[1, 3]], "{found:?}");
    assert_eq!(found[0].victims, 2);
}

#[test]
fn a_process_alone_says_for_which_rank_it_waits_and_by_which_interface() {
    let mut comms = pipeline(2);
    exchange(of(&mut comms, 3, 1), false, 0, 10 * S, true);
    let comm = comms.get_mut(&3).expect("the pipeline");
    (comm.ranks, comm.now) = (0, 51 * S);
    comm.members.remove(&0);
    let member = of(&mut comms, 3, 1);
    member.waits = vec![Wait { peer: 0, on: On::Data, since: 11 * S }];
    member.routes = vec![Route { send: false, interfaces: vec!["eth1".into()], ..Route::default() }];
    let found = graph::findings(&comms);
    let expected = "rank 1 (node1, process 101) has been in Recv #3 from rank 0 for 41 s, waiting for data; rank 1 (node1) waits for rank 0 over eth1";
    assert_eq!(found[0].sentence(), expected);
}
