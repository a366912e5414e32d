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
    Comm { figures, hosts: (0..ranks).map(|rank| (rank, "host".to_owned())).collect(), ..Comm::default() }
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
    assert!(by_design.late_rank().expect("it is always the last").starts_with("rank 1 (host) comes late"));
    let mostly = arrivals(96, |number| if number % 4 == 0 { (0, 60_000) } else { (1, 300_000) });
    assert!(mostly.late_rank().is_some());
    // As a busy machine was seen to do it.
    assert_eq!(arrivals(96, |number| if number % 4 == 0 { (1, 80_000) } else { (0, 113_000) }).late_rank(), None);
    let for_a_while = arrivals(96, |number| if number < 30 { (0, 30_000) } else { (1, 300_000) });
    assert!(for_a_while.late_rank().is_some(), "three of four slices");
    assert_eq!(arrivals(96, |number| if number < 40 { (0, 30_000) } else { (1, 300_000) }).late_rank(), None);
}
