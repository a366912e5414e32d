use super::*;

/// A ring of so many ranks: in each slice every way takes `ns(slice, rank)` for each of its bytes; 0 where nothing moves.
fn ring(ranks: i32, ns: impl Fn(usize, i32) -> u64) -> Comm {
    let mut figures = Sliced::default();
    for number in 0..SLICES {
        let mut slice = Sliced::default();
        for rank in 0..ranks {
            let bytes = if ns(number, rank) == 0 { 0 } else { 1 << 20 };
            let steps = if ns(number, rank) == 0 { 0 } else { 16 };
            let stat = PeerStat { steps, bytes, network_ns: bytes * ns(number, rank), ..PeerStat::default() };
            slice.whole.peers.insert((rank, (rank + 1) % ranks, true), stat);
        }
        slice.slices[number] = slice.whole.clone();
        figures.add(&slice);
    }
    let place = |rank| (rank, Place { host: "host".into(), ..Place::default() });
    Comm { figures, places: (0..ranks).map(place).collect(), ..Comm::default() }
}

#[test]
fn a_way_that_is_slow_throughout_is_told_and_one_that_was_slow_once_is_not() {
    let lasting = ring(4, |_, rank| if rank == 2 { 4 } else { 2 });
    let told = lasting.slow_pairs().expect("twice as slow as its like");
    assert!(told.starts_with("the way from rank 2 (host) to rank 3 (host) is slow"), "{told}");
    let with_a_pause = ring(4, |slice, rank| if slice == 1 { 0 } else { 2 + 2 * u64::from(rank == 2) });
    assert!(with_a_pause.slow_pairs().is_some(), "nothing moved in one slice");
    // Another program ran on its host for a while: as slow in the whole.
    assert_eq!(ring(4, |slice, rank| if rank == 2 && slice == 1 { 12 } else { 2 }).slow_pairs(), None);
    assert_eq!(ring(4, |_, _| 2).slow_pairs(), None);
}

/// A busy machine showed 1.97 between its two ranks.
#[test]
fn of_two_ways_one_must_be_far_slower() {
    assert_eq!(ring(2, |_, rank| if rank == 1 { 4 } else { 2 }).slow_pairs(), None);
    assert!(ring(2, |_, rank| if rank == 1 { 8 } else { 2 }).slow_pairs().is_some());
}

/// Collectives a millisecond apart; `late(number)` says which rank comes last, and how much later than the other.
fn arrivals(count: u64, late: impl Fn(u64) -> (i32, u64)) -> Comm {
    let mut comm = ring(2, |_, _| 2);
    comm.bound = Some(0);
    for number in 0..count {
        let (rank, by) = late(number);
        let when = 1_000_000 * (number + 1);
        comm.arrivals.insert((Name::new(b"AllReduce"), number), vec![(1 - rank, when), (rank, when + by)]);
    }
    comm
}

#[test]
fn a_late_rank_is_later_than_chance_makes_the_others() {
    let by_design = arrivals(96, |_| (1, 300_000));
    assert!(by_design.late_ranks().expect("it is always the last").starts_with("rank 1 (host) comes late"));
    let mostly = arrivals(96, |number| if number % 4 == 0 { (0, 60_000) } else { (1, 300_000) });
    assert!(mostly.late_ranks().is_some());
    // As a busy machine was seen to do it.
    assert_eq!(arrivals(96, |number| if number % 4 == 0 { (1, 80_000) } else { (0, 113_000) }).late_ranks(), None);
    let for_a_while = arrivals(96, |number| if number < 30 { (0, 30_000) } else { (1, 300_000) });
    assert!(for_a_while.late_ranks().is_some(), "three of four slices");
    assert_eq!(arrivals(96, |number| if number < 40 { (0, 30_000) } else { (1, 300_000) }).late_ranks(), None);
}

/// 96 collectives of four ranks on two hosts, ten milliseconds apart; `last` says which rank comes last, and how much later.
fn four(last: impl Fn(u64) -> (i32, u64)) -> Comm {
    let mut comm = ring(4, |_, _| 2);
    comm.bound = Some(0);
    for (rank, place) in &mut comm.places {
        *place =
            Place { host: format!("node{}", rank / 2), gpu: format!("{rank} at 0000:3b:00.0"), global: Some(rank + 8) };
    }
    for number in 0..96 {
        let (late, by) = last(number);
        let arrivals = (0..4).map(|rank| (rank, 10_000_000 * (number + 1) + if rank == late { by } else { 0 }));
        comm.arrivals.insert((Name::new(b"AllReduce"), number), arrivals.collect());
    }
    comm
}

#[test]
fn two_ranks_that_are_late_by_turns_are_named_and_their_host() {
    let told = four(|number| (2 + (number % 2) as i32, 3_000_000)).late_ranks().expect("ranks 2 and 3");
    let begin = "rank 2 (node1, GPU 2 at 0000:3b:00.0, global rank 10) and rank 3 (node1, GPU 3 at 0000:3b:00.0, global rank \
                 11) come late by turns and are the ranks of node1: one of them was the last of 4 at 96 of 96 collectives";
    assert!(told.starts_with(begin), "{told}");
    let apart = four(|number| (if number % 2 == 0 { 0 } else { 3 }, 3_000_000)).late_ranks().expect("ranks 0 and 3");
    assert!(apart.contains("come late by turns: one of them"), "{apart}");
    // One of them mostly: that one alone.
    let one = four(|number| if number % 6 == 0 { (3, 500_000) } else { (2, 3_000_000) }).late_ranks().expect("rank 2");
    assert!(one.starts_with("rank 2 (node1") && one.contains("comes late"), "{one}");
    assert_eq!(four(|number| ((number % 4) as i32, 3_000_000)).late_ranks(), None, "all of them by turns");
    assert_eq!(four(|number| (2 + (number % 2) as i32, 90_000)).late_ranks(), None, "chance");
}

/// Which rank of four is the last is chance, and how late it is: none is named in 10,000 runs.
#[test]
fn of_ranks_that_are_late_by_chance_none_is_named() {
    let mut state = 1_u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    for run in 0..10_000 {
        let lasts: Vec<(i32, u64)> = (0..96).map(|_| ((random() % 4) as i32, 500_000 + random() % 4_000_000)).collect();
        assert_eq!(four(|number| lasts[number as usize]).late_ranks(), None, "run {run}");
    }
}
