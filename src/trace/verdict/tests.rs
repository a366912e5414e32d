//! Every cause in small communicators, and none in healthy ones.

use proptest::prelude::*;

use super::*;
use crate::trace::event::CommInfo;

const S: u64 = 1_000_000_000;

fn key(func: &str, seq: u64) -> Key {
    Key::collective(Name::from(func), seq)
}

fn entered(func: &str, seq: u64, when: u64, open: bool) -> Call {
    let arguments = Arguments { count: 16384, datatype: Name::from("ncclFloat32"), root: 0 };
    Call { key: key(func, seq), arguments, entered: when, open }
}

fn transfer(send: bool, peer: i32, seq: u64, when: u64, open: bool) -> Call {
    let key = Key::transfer(if send { SEND } else { RECV }.into(), seq, peer);
    Call { key, ..entered("", 0, when, open) }
}

/// Ranks that have all completed AllReduce #0 to #2 and are in #3 since 10 s, at 51 s.
fn waiting_for_41_s(ranks: i32) -> Communicator {
    let mut comm = Communicator { title: "dp".into(), ranks, now: 51 * S, ..Communicator::default() };
    for rank in 0..ranks {
        let mut calls: Vec<Call> = (0..3).map(|seq| entered("AllReduce", seq, (seq + 1) * S, false)).collect();
        calls.push(entered("AllReduce", 3, 10 * S, true));
        let host = format!("node{rank}");
        let member = Member { host, pid: 100 + rank, heard: Some(51 * S), calls, ..Member::default() };
        comm.members.insert(rank, member);
    }
    comm
}

fn member(comm: &mut Communicator, rank: i32) -> &mut Member {
    comm.members.get_mut(&rank).expect("a member")
}

/// What is found where there is only this communicator.
fn judge(comm: &Communicator) -> Option<Verdict> {
    let found = graph::findings(&[(comm.id, comm.clone())].into());
    assert!(found.len() < 2, "{found:?}");
    found.into_iter().next().map(|found| found.verdict)
}

fn told(comm: &Communicator) -> String {
    comm.explain(&judge(comm).expect("a verdict"))
}

#[test]
fn a_rank_that_did_not_enter_is_named_with_its_last_call() {
    let mut comm = waiting_for_41_s(4);
    member(&mut comm, 2).calls.pop();
    assert_eq!(
        told(&comm),
        "ranks 0 (node0), 1 (node1) and 3 (node3) have been in AllReduce #3 for 41 s; rank 2 (node2, process 102) has not \
         entered it: its last \
         call was AllReduce #2, 48 s ago, completed"
    );
    member(&mut comm, 2).left = true;
    assert!(told(&comm).ends_with("rank 2 (node2, process 102) has left the communicator"));
    comm.members.remove(&2);
    assert!(told(&comm).ends_with("(nothing is known of rank 2)"), "{}", told(&comm));
}

#[test]
fn a_process_that_does_not_answer_is_named_where_nothing_else_explains_the_wait() {
    let call = entered("AllReduce", 3, 10 * S, true);
    let place = |rank: i32| Whereabouts { host: format!("node{rank}"), pid: 100 + rank, ..Whereabouts::default() };
    let make = |unanswered, change: &dyn Fn(i32, &mut Told)| {
        let mut job = Job::default();
        // Rank 0 is not among them; the last of four waits for the network.
        for rank in 1..4 {
            let info = CommInfo { id: 7, name: "dp".into(), ranks: 4, rank, ..CommInfo::default() };
            let route = |peer: String| Route { peer, ..Route::default() };
            let routes = vec![route(format!("node{}:{}", rank - 1, 99 + rank))];
            let waits = vec![Wait { peer: rank - 1, on: On::Data, since: 11 * S }];
            let mut told = Told { calls: vec![call], waits, routes, until: 51 * S, ..Told::default() };
            change(rank, &mut told);
            job.add(&place(rank), &info, told);
        }
        job.add_unanswered(unanswered);
        job
    };
    let job = |unanswered, change: &dyn Fn(i32, &mut Told)| make(unanswered, change).findings().remove(0);
    let found = job(1, &|_, _| {});
    let text = found.sentence();
    assert!(
        text.ends_with("; rank 0 (node0, process 100) does not answer: it was stopped or killed, or gets no processor"),
        "{text}"
    );
    assert_eq!((found.verdict.kind(), found.named()[0].member.as_ref().map(|it| it.pid)), ("silent", Some(100)));
    // Its rank may be on a host that was not queried; or it is one of several, of which some are.
    assert!(job(0, &|_, _| {}).named().is_empty());
    // Two processes do not answer, so the connections do not show which one this is.
    let found = job(2, &|_, _| {});
    assert!(
        found.sentence().ends_with("; rank 0 does not answer: it was stopped or killed, or gets no processor"),
        "{}",
        found.sentence()
    );
    // Another communicator shows that more are unseen than were queried: rank 0 may be healthy.
    let mut larger = make(1, &|_, _| {});
    let info = CommInfo { id: 8, name: "world".into(), ranks: 8, rank: 1, ..CommInfo::default() };
    larger.add(&place(1), &info, Told { until: 51 * S, ..Told::default() });
    assert!(larger.findings().iter().all(|finding| finding.named().is_empty()));
    // What is known goes before what is not.
    let found = job(1, &|rank, told| {
        if rank == 3 {
            told.calls.clear();
        }
    });
    assert_eq!((found.verdict.kind(), found.verdict.named()), ("behind", vec![3]));
    let found = job(1, &|rank, told| {
        if rank == 1 {
            told.waits[0] = Wait { peer: 2, on: On::Network, since: 11 * S };
        }
    });
    assert_eq!((found.verdict.kind(), found.verdict.named()), ("waits", vec![1]));
    // Its receiver does not answer: that is why the send of a healthy rank stands still.
    for (rank, peer) in [(1, 0), (2, 0), (3, 0)] {
        let found = job(1, &|of, told| {
            if of == rank {
                told.waits[0] = Wait { peer, on: On::Network, since: 11 * S };
            }
        });
        assert_eq!((found.verdict.kind(), found.verdict.named()), ("silent", vec![0]), "rank {rank}");
    }
    // Without any wait that is known.
    assert_eq!(job(1, &|_, told| told.waits.clear()).verdict.named(), [0]);
}

#[test]
fn a_rank_in_another_function_is_a_mismatch() {
    let mut comm = waiting_for_41_s(3);
    *member(&mut comm, 1).calls.last_mut().expect("a call") = entered("AllGather", 0, 11 * S, true);
    let text = told(&comm);
    assert!(
        text.contains(
            "ranks 0 (node0) and 2 (node2) have been in AllReduce #3 for 41 s; rank 1 (node1, process 101) is in \
             AllGather #0"
        ),
        "{text}"
    );
}

#[test]
fn a_call_that_only_one_rank_made_and_completed_is_a_mismatch() {
    let mut comm = waiting_for_41_s(3);
    // Small enough to leave without the others.
    member(&mut comm, 1).calls.insert(3, entered("Broadcast", 0, 9 * S, false));
    let text = told(&comm);
    let expected = "rank 1 (node1, process 101) called Broadcast #0 before it, and the others did not";
    assert!(text.contains(expected), "{text}");
    assert_eq!(judge(&comm).expect("a verdict").named(), [1]);
    // Two of three made it: the third is the one that differs.
    member(&mut comm, 0).calls.insert(3, entered("Broadcast", 0, 9 * S, false));
    assert!(
        told(&comm).contains("rank 2 (node2, process 102) did not call Broadcast #0 before it, and the others did"),
        "{}",
        told(&comm)
    );
    // What a rank has forgotten, it may have made.
    member(&mut comm, 2).calls.drain(..3);
    assert!(matches!(judge(&comm).expect("a verdict").cause, Cause::Unknown));
    // All made it, each at its own place among what is remembered.
    member(&mut comm, 2).calls.insert(0, entered("Broadcast", 0, 9 * S, false));
    assert!(matches!(judge(&comm).expect("a verdict").cause, Cause::Unknown));
}

#[test]
fn other_arguments_are_shown_beside_those_of_the_rest() {
    let mut comm = waiting_for_41_s(4);
    member(&mut comm, 2).calls[3].arguments = Arguments { count: 8192, datatype: Name::from("ncclBfloat16"), root: 0 };
    let text = told(&comm);
    assert!(
        text.contains("rank 2 (node2, process 102) called AllReduce #3 with 8192 ncclBfloat16, root 0, the others with 16384 ncclFloat32, root 0"),
        "{text}"
    );
    // Also of a call that went through.
    for rank in 0..4 {
        member(&mut comm, rank).calls[3].open = false;
    }
    let verdict = judge(&comm).expect("a verdict");
    assert_eq!((verdict.kind(), verdict.named()), ("mismatch", vec![2]));
}

#[test]
fn of_two_ranks_that_differ_both_are_named() {
    let mut comm = waiting_for_41_s(2);
    member(&mut comm, 0).calls[3].arguments = Arguments { count: 8192, datatype: Name::from("ncclBfloat16"), root: 0 };
    let text = told(&comm);
    let expected = "rank 0 (node0, process 100) called AllReduce #3 with 8192 ncclBfloat16, root 0; rank 1 (node1, process 101) \
                    called AllReduce #3 with 16384 ncclFloat32, root 0: they differ";
    assert!(text.contains(expected), "{text}");
    assert_eq!(judge(&comm).expect("a verdict").named(), [0, 1]);
    // As many on either side.
    let mut comm = waiting_for_41_s(4);
    (2..4).for_each(|rank| member(&mut comm, rank).calls[3].arguments.root = 1);
    assert_eq!(judge(&comm).expect("a verdict").named(), [0, 1, 2, 3]);

    let mut comm = waiting_for_41_s(2);
    *member(&mut comm, 1).calls.last_mut().expect("a call") = entered("AllGather", 0, 11 * S, true);
    let text = told(&comm);
    assert!(
        text.contains("rank 1 (node1, process 101) is in AllGather #0 instead, for 40 s; rank 0 (node0, process 100) in AllReduce #3"),
        "{text}"
    );
    assert_eq!(judge(&comm).expect("a verdict").named(), [1, 0]);

    let mut comm = waiting_for_41_s(2);
    member(&mut comm, 1).calls.insert(3, entered("Broadcast", 0, 9 * S, false));
    let text = told(&comm);
    let expected = "rank 1 (node1, process 101) called Broadcast #0 before it, and rank 0 (node0, process 100) did not";
    assert!(text.contains(expected), "{text}");
    assert_eq!(judge(&comm).expect("a verdict").named(), [1, 0]);
}

#[test]
fn a_rank_whose_events_were_dropped_is_not_named_for_the_lack_of_one() {
    let mut comm = waiting_for_41_s(3);
    member(&mut comm, 1).calls.pop();
    // Before its last call.
    member(&mut comm, 1).gaps.calls = Some(2 * S);
    assert_eq!(judge(&comm).expect("a verdict").named(), [1]);
    member(&mut comm, 1).gaps.calls = Some(10 * S);
    let text = told(&comm);
    assert!(text.contains("the record of rank 1 (node1, process 101) has gaps"), "{text}");
    assert!(judge(&comm).expect("a verdict").named().is_empty(), "{text}");
    // The rank behind it is still named.
    member(&mut comm, 2).calls.pop();
    assert_eq!(judge(&comm).expect("a verdict").named(), [2]);

    // Behind the last call of this function, though one of another was recorded since.
    let mut comm = waiting_for_41_s(3);
    *member(&mut comm, 1).calls.last_mut().expect("a call") = entered("AllGather", 0, 12 * S, false);
    assert_eq!(judge(&comm).expect("a verdict").named(), [1]);
    member(&mut comm, 1).gaps.calls = Some(11 * S);
    assert!(judge(&comm).expect("a verdict").named().is_empty(), "{}", told(&comm));

    // A call before, which it may have made.
    let mut comm = waiting_for_41_s(3);
    for rank in [0, 2] {
        member(&mut comm, rank).calls.insert(3, entered("Broadcast", 0, 9 * S, false));
    }
    assert_eq!(judge(&comm).expect("a verdict").named(), [1]);
    member(&mut comm, 1).gaps.calls = Some(9 * S);
    assert!(judge(&comm).expect("a verdict").named().is_empty());

    // That no wait of it is known.
    let mut comm = waiting_for_41_s(2);
    member(&mut comm, 0).waits = vec![Wait { peer: 1, on: On::Data, since: 11 * S }];
    assert_eq!(judge(&comm).expect("a verdict").named(), [1]);
    member(&mut comm, 1).gaps.waits = Some(12 * S);
    assert!(judge(&comm).expect("a verdict").named().is_empty(), "{}", told(&comm));
}

#[test]
fn a_call_whose_end_was_dropped_holds_nobody_up() {
    let mut comm = waiting_for_41_s(3);
    for rank in 0..3 {
        let calls = &mut member(&mut comm, rank).calls;
        calls[3].open = rank == 1;
        calls.push(entered("AllReduce", 4, 50 * S, false));
    }
    assert!(judge(&comm).is_some());
    member(&mut comm, 1).gaps.ends = Some(10 * S);
    assert_eq!(judge(&comm), None);
    // With nothing behind it, it cannot be determined.
    for rank in 0..3 {
        member(&mut comm, rank).calls.pop();
    }
    let verdict = judge(&comm).expect("a verdict");
    assert!(verdict.named().is_empty() && verdict.gaps == [1], "{verdict:?}");
}

#[test]
fn a_silent_process_explains_what_it_did_not_enter() {
    let mut comm = waiting_for_41_s(3);
    member(&mut comm, 1).calls.pop();
    member(&mut comm, 1).heard = Some(12 * S);
    assert!(told(&comm).contains("rank 1 (node1, process 101) has given no sign of life for 39 s"));
    assert_eq!(judge(&comm).expect("a verdict").named(), [1]);
    let route = |name: &str| Route { interfaces: vec![name.into()], ..Route::default() };
    member(&mut comm, 1).routes = vec![route("eth1"), route("eth0")];
    member(&mut comm, 1).exited = Some(20 * S);
    let expected = "the process of rank 1 (node1, process 101, interfaces eth0 and eth1) has ended, 31 s ago";
    assert!(told(&comm).contains(expected), "{}", told(&comm));
    member(&mut comm, 1).exited = None;
    // For a file without heartbeats, silence means nothing.
    member(&mut comm, 1).heard = None;
    assert!(told(&comm).contains("has not entered it"));
}

#[test]
fn the_chain_of_waits_ends_at_the_transfer_or_the_gpu_that_stands_still() {
    let wait = |peer, on| Wait { peer, on, since: 13 * S };
    let mut comm = waiting_for_41_s(4);
    // A ring: each receives from the one before it, so its GPU has nothing to send.
    for rank in 0..4 {
        let peer = (rank + 3) % 4;
        member(&mut comm, rank).waits = vec![wait(peer, On::Data), wait((rank + 1) % 4, On::Gpu)];
    }
    assert!(told(&comm).contains("a circle"), "{}", told(&comm));
    assert!(told(&comm).contains(" for 41 s, waiting for data; "), "a GPU waits for them: {}", told(&comm));
    member(&mut comm, 2).waits.push(wait(3, On::Network));
    let text = told(&comm);
    assert!(
        text.contains(
            "a send of rank 2 (node2, process 102) to rank 3 (node3, process 103) has been under way for 38 s"
        ),
        "{text}"
    );
    assert!(text.contains("rank 3 (node3) waits for rank 2 (node2); "), "{text}");
    member(&mut comm, 2).routes = [("node3:103", "eth1"), ("node3:10", "eth2")]
        .map(|(peer, interface)| Route {
            peer: peer.into(),
            send: true,
            interfaces: vec![interface.into()],
            ..Route::default()
        })
        .into();
    member(&mut comm, 2).routes.iter_mut().for_each(|route| route.moved = 14 * S);
    let expected = "to rank 3 (node3, process 103) over eth1 has been under way for 38 s, nothing has moved over it for 37 s: look";
    assert!(told(&comm).contains(expected), "{}", told(&comm));
    member(&mut comm, 2).routes.iter_mut().for_each(|route| route.moved = 51 * S - 1);
    assert!(told(&comm).contains("has been under way for 38 s: look"), "{}", told(&comm));
    // A process alone knows nothing of its peers: by which interface it sends is known if there is but one.
    let mut alone = Communicator { ranks: 0, members: [(2, comm.members[&2].clone())].into(), ..comm.clone() };
    assert!(told(&alone).contains("to rank 3 has been under way"), "{}", told(&alone));
    member(&mut alone, 2).routes.pop();
    assert!(told(&alone).contains("to rank 3 over eth1 has been under way"), "{}", told(&alone));
    member(&mut comm, 2).waits = vec![wait(3, On::Gpu)];
    assert!(told(&comm).contains("rank 2 (node2, process 102) has waited for its own GPU for 38 s"));
}

#[test]
fn ranks_that_wait_are_listed_by_host_with_their_numbers_in_the_job() {
    let mut comm = waiting_for_41_s(12);
    member(&mut comm, 11).calls.pop();
    for rank in 0..11 {
        (member(&mut comm, rank).host, member(&mut comm, rank).global) =
            (format!("node{}", rank / 4), Some(rank + 100));
    }
    member(&mut comm, 4).global = Some(4);
    let expected = "ranks 0, 1, 2 and 3 (node0, global ranks 100, 101, 102 and 103), \
                    4, 5, 6 and 7 (node1, global ranks 4, 105, 106 and 107) and 3 more have been in AllReduce #3 for 41 s; ";
    assert!(told(&comm).starts_with(expected), "{}", told(&comm));
    for rank in [8, 9] {
        member(&mut comm, rank).gpu = format!("{rank} at 0000:3b:00.0");
    }
    let alone = comm.ranks(&[9]);
    assert_eq!(alone, "rank 9 (node2, GPU 9 at 0000:3b:00.0, global rank 109)");
    let expected =
        "ranks 8, 9 and 10 (node2, GPUs 8 at 0000:3b:00.0 and 9 at 0000:3b:00.0, global ranks 108, 109 and 110)";
    assert_eq!(comm.ranks(&[8, 9, 10]), expected);
}

#[test]
fn bytes_that_were_sent_and_have_not_arrived_break_the_circle() {
    let mut comm = waiting_for_41_s(3);
    for rank in 0..3 {
        let (from, to) = ((rank + 2) % 3, (rank + 1) % 3);
        let route = |number: i32, send, peer: i32, bytes| {
            let (peer, interfaces) = (format!("node{peer}:{}", 100 + peer), vec![format!("eth{number}")]);
            let polled = Some(12 * S);
            Route { peer, send, interfaces, number: number as u64, bytes, moved: 13 * S, polled, ..Route::default() }
        };
        // Over connections 20 to 22 nothing is under way, for longer, and over connection 8 nothing goes to another
        // rank.
        let earlier = |number, send, peer| Route { moved: 11 * S, ..route(number, send, peer, 7000) };
        member(&mut comm, rank).waits = vec![Wait { peer: from, on: On::Data, since: 12 * S }];
        member(&mut comm, rank).routes = vec![
            route(rank + 10, true, to, 5000),
            route(from + 10, false, from, 5000),
            route(8, true, to, 9000),
            earlier(rank + 20, true, to),
            earlier(from + 20, false, from),
        ];
    }
    let is_circle = |comm: &Communicator| told(comm).contains("a circle");
    assert!(is_circle(&comm), "{}", told(&comm));
    member(&mut comm, 2).routes[1].bytes = 4000;
    let found = graph::findings(&[(comm.id, comm.clone())].into());
    let expected = "rank 2 (node2) waits for rank 1 (node1); rank 1 (node1, process 101) sent bytes to rank 2 (node2, process 102) \
                    over eth11 that rank 2 has not taken for 38 s: look at the network between them, or at rank 2";
    assert!(found[0].sentence().ends_with(expected), "{}", found[0].sentence());
    let named: Vec<_> = found[0].named().into_iter().map(|named| (named.rank, named.interfaces)).collect();
    assert_eq!(named, [(1, vec!["eth11".to_owned()])]);
    let but = |change: &dyn Fn(&mut Member)| {
        let mut comm = comm.clone();
        change(member(&mut comm, 2));
        comm
    };
    assert!(is_circle(&but(&|it| it.routes[1].moved = 48 * S)), "it arrived a moment ago");
    assert!(is_circle(&but(&|it| it.routes[1].number = 0)), "which connection it is, is not known");
    assert!(is_circle(&but(&|it| it.waits[0].on = On::Buffer)), "it does not wait for data");
}

#[test]
fn a_message_that_came_before_its_receive_is_not_taken_for_lost() {
    // Rank 1's GPU hangs. Rank 0 has sent two broadcasts, and rank 1 has no receive for the second one yet. Then comes
    // a call in which both wait for data.
    let mut comm = waiting_for_41_s(2);
    let wait = |peer, on| Wait { peer, on, since: 12 * S };
    let route = |send, number, bytes, polled| Route {
        send,
        interfaces: vec!["eth1".into()],
        number,
        bytes,
        moved: 13 * S,
        polled,
        ..Route::default()
    };
    member(&mut comm, 0).waits = vec![wait(1, On::Data)];
    member(&mut comm, 1).waits = vec![wait(0, On::Data), wait(0, On::Gpu)];
    member(&mut comm, 0).routes = vec![route(true, 5, 2000, None), route(true, 6, 7000, None)];
    let judged = |polled, idle| {
        let mut comm = comm.clone();
        // Connection 6 belongs to another communicator of these processes.
        member(&mut comm, 1).routes = vec![route(false, 5, 1000, polled), route(false, 6, idle, None)];
        judge(&comm).expect("a verdict").named()
    };
    assert_eq!(judged(None, 7000), [0; 0], "nothing reads the message");
    assert_eq!(judged(Some(51 * S - 1), 7000), [0; 0], "its receive has just been posted");
    assert_eq!(judged(None, 3000), [0; 0], "nor that of the other communicator");
    assert_eq!(judged(Some(12 * S), 7000), [0], "a receive is outstanding, and finds nothing");
}

#[test]
fn ranks_that_differ_after_a_long_silence_are_behind_without_an_open_call() {
    let mut comm = waiting_for_41_s(3);
    for rank in 0..3 {
        member(&mut comm, rank).calls[3].open = false;
    }
    assert_eq!(judge(&comm), None);
    member(&mut comm, 0).calls.pop();
    assert!(matches!(judge(&comm).expect("a verdict").cause, Cause::Behind(ref ranks) if ranks[0].rank == 0));
    // The same two seconds after the last call is a job at work.
    comm.now = 12 * S;
    assert_eq!(judge(&comm), None);
}

#[test]
fn a_rank_that_has_forgotten_the_call_since_has_entered_it() {
    let mut comm = waiting_for_41_s(3);
    member(&mut comm, 1).calls = vec![entered("AllReduce", 2000, 11 * S, false)];
    assert!(matches!(judge(&comm).expect("a verdict").cause, Cause::Unknown));
}

#[test]
fn a_send_that_hangs_is_found_without_a_call() {
    let mut comm = waiting_for_41_s(2);
    for rank in 0..2 {
        member(&mut comm, rank).calls.clear();
    }
    member(&mut comm, 0).waits = vec![Wait { peer: 1, on: On::Data, since: 25 * S }];
    assert_eq!(judge(&comm), None, "a stage of a pipeline waits for its turn");
    member(&mut comm, 0).waits[0].since = 20 * S;
    let verdict = judge(&comm).expect("a verdict");
    assert_eq!((verdict.named(), verdict.kind()), (vec![1], "waits"));
    member(&mut comm, 1).gaps.waits = Some(25 * S);
    let verdict = judge(&comm).expect("a verdict");
    assert_eq!((verdict.named(), verdict.gaps), (vec![], vec![1]), "its wait may have been missed");
    // For a rank that is not seen it is unknown whether it only passes the wait on.
    comm.members.remove(&1);
    assert!(judge(&comm).expect("a verdict").named().is_empty());
}

proptest! {
    /// A healthy job at any moment: ranks some calls apart, open calls younger than a few seconds, waits of all kinds.
    #[test]
    fn a_healthy_job_names_nobody(
        ranks in 2i32..16,
        behind in prop::collection::vec(0usize..4, 16),
        ages in prop::collection::vec(0u64..4 * S, 16),
        waits in prop::collection::vec((0i32..16, 0u8..4), 0..20),
        transfers in prop::collection::vec((0i32..16, any::<bool>(), 0..29 * S), 0..20),
    ) {
        let mut comm = Communicator { ranks, now: 100 * S, ..Communicator::default() };
        for rank in 0..ranks {
            let at = rank as usize;
            let count = 20 - behind[at];
            let calls = (0..count).map(|number| {
                let newest = number + 1 == count;
                let when = 100 * S - ages[at] - (count - number) as u64 * 1_000_000;
                entered(if number % 3 == 0 { "AllGather" } else { "AllReduce" }, number as u64, when, newest)
            });
            let member = Member {
                heard: Some(100 * S - ages[at] / 2),
                calls: calls.collect(),
                transfers: transfers.iter().map(|&(peer, send, age)| transfer(send, peer, 0, 100 * S - age, true)).collect(),
                waits: waits.iter().map(|&(peer, on)| Wait {
                    peer,
                    on: [On::Network, On::Data, On::Buffer, On::Gpu][usize::from(on)],
                    since: 100 * S - ages[at],
                }).collect(),
                ..Member::default()
            };
            comm.members.insert(rank, member);
        }
        prop_assert_eq!(judge(&comm), None);
    }
}

/// Seen behind a cut cable: the peer was stuck for a moment less than the rank that waited for it.
#[test]
fn a_peer_that_began_to_wait_a_little_later_is_followed_too() {
    let mut comm = waiting_for_41_s(2);
    comm.now = 15 * S;
    member(&mut comm, 1).waits = vec![Wait { peer: 0, on: On::Data, since: 10 * S }];
    member(&mut comm, 0).waits = vec![Wait { peer: 1, on: On::Network, since: 11 * S }];
    member(&mut comm, 0).calls.last_mut().expect("a call").entered = 11 * S;
    let text = told(&comm);
    assert!(
        text.contains("rank 1 (node1) waits for rank 0 (node0); a send of rank 0 (node0, process 100) to rank 1"),
        "{text}"
    );
}

mod across;
