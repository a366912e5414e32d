use super::*;

/// A ring of so many ranks: in each slice every way takes `ns(slice, rank)` for each of its bytes; 0 where nothing
/// moves. Steps of 64 KiB.
fn ring(ranks: i32, ns: impl Fn(usize, i32) -> u64) -> Comm {
    ring_of(16, ranks, ns)
}

/// The same with so many steps in a MiB.
fn ring_of(in_a_mib: u64, ranks: i32, ns: impl Fn(usize, i32) -> u64) -> Comm {
    let mut figures = Sliced::default();
    for number in 0..SLICES {
        let mut slice = Sliced::default();
        for rank in 0..ranks {
            let bytes = if ns(number, rank) == 0 { 0 } else { 1 << 20 };
            let steps = if ns(number, rank) == 0 { 0 } else { in_a_mib };
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
    let mut lasting = ring(4, |_, rank| if rank == 2 { 4 } else { 2 });
    for (peer, name) in [(3, "eth2"), (3, "eth1"), (1, "eth0")] {
        lasting.figures.whole.wires.insert((2, peer, Rail::Interface(name.into()), true), (1, 1));
    }
    let told = lasting.slow_pairs().expect("twice as slow as its like").1;
    assert!(told.starts_with("the way from rank 2 (host) to rank 3 (host) over eth"), "{told}");
    assert!(told.contains("eth1") && told.contains("eth2") && !told.contains("eth0"), "{told}");
    let with_a_pause = ring(4, |slice, rank| if slice == 1 { 0 } else { 2 + 2 * u64::from(rank == 2) });
    assert!(with_a_pause.slow_pairs().is_some(), "nothing moved in one slice");
    // Another program ran on its host for a while: as slow in the whole.
    assert_eq!(ring(4, |slice, rank| if rank == 2 && slice == 1 { 12 } else { 2 }).slow_pairs(), None);
    assert_eq!(ring(4, |_, _| 2).slow_pairs(), None);
}

/// One of 40 healthy runs on a busy host named a way so: 5 ranks, all-reduces of 64 KiB.
#[test]
fn short_steps_that_take_twice_as_long_are_chance() {
    let twice = |_, rank| if rank == 2 { 4 } else { 2 };
    assert_eq!(ring_of(64, 5, twice).slow_pairs(), None);
    assert!(ring_of(16, 5, twice).slow_pairs().is_some());
}

/// A busy machine showed 1.97 between its two ranks.
#[test]
fn of_two_ways_one_must_be_far_slower() {
    assert_eq!(ring(2, |_, rank| if rank == 1 { 4 } else { 2 }).slow_pairs(), None);
    assert!(ring(2, |_, rank| if rank == 1 { 8 } else { 2 }).slow_pairs().is_some());
}

/// Collectives a millisecond apart; `late(number)` returns which rank comes last, and how much later than the other.
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
    assert!(by_design.late_ranks().expect("it is always the last").1.starts_with("rank 1 (host) comes late"));
    let mostly = arrivals(96, |number| if number % 4 == 0 { (0, 60_000) } else { (1, 300_000) });
    assert!(mostly.late_ranks().is_some());
    // As a busy machine was seen to do it.
    assert_eq!(arrivals(96, |number| if number % 4 == 0 { (1, 80_000) } else { (0, 113_000) }).late_ranks(), None);
    let for_a_while = arrivals(96, |number| if number < 20 { (0, 30_000) } else { (1, 300_000) });
    assert!(for_a_while.late_ranks().is_some(), "three of four slices");
    assert_eq!(arrivals(96, |number| if number < 40 { (0, 30_000) } else { (1, 300_000) }).late_ranks(), None);
}

/// 96 collectives of four ranks on two hosts, ten milliseconds apart; `last` returns which rank comes last, and how
/// much later.
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
    let told = four(|number| (2 + (number % 2) as i32, 3_000_000)).late_ranks().expect("ranks 2 and 3").1;
    let begin = "rank 2 (node1, GPU 2 at 0000:3b:00.0, global rank 10) and rank 3 (node1, GPU 3 at 0000:3b:00.0, global rank \
                 11) come late by turns and are the ranks of node1: one of them was the last of 4 at 96 of 96 collectives";
    assert!(told.starts_with(begin), "{told}");
    let apart = four(|number| (if number % 2 == 0 { 0 } else { 3 }, 3_000_000)).late_ranks().expect("ranks 0 and 3").1;
    assert!(apart.contains("come late by turns: one of them"), "{apart}");
    // One of them mostly: that one alone.
    let one =
        four(|number| if number % 6 == 0 { (3, 500_000) } else { (2, 3_000_000) }).late_ranks().expect("rank 2").1;
    assert!(one.starts_with("rank 2 (node1") && one.contains("comes late"), "{one}");
    assert_eq!(four(|number| ((number % 4) as i32, 3_000_000)).late_ranks(), None, "all of them by turns");
    assert_eq!(four(|number| (2 + (number % 2) as i32, 90_000)).late_ranks(), None, "chance");
}

/// A rank is late by 288 ms in all, and a way takes 840 ms more for its bytes than another one.
#[test]
fn what_costs_most_is_told_first() {
    let late = || four(|_| (3, 3_000_000));
    let way = || ring(4, |_, rank| if rank == 2 { 400 } else { 200 }).figures;
    let order = |comms: Vec<Comm>| -> Vec<&str> {
        let evidence = Evidence { run: 0, comms: (1..).zip(comms).collect() };
        let sentences = evidence.findings().into_iter().flat_map(|found| found.sentences);
        sentences.map(|told| if told.contains("comes late") { "late" } else { "way" }).collect()
    };
    const MS: u64 = 1_000_000;
    assert_eq!(order(vec![Comm { figures: way(), busy: 2000 * MS, ..late() }]), ["way", "late"]);
    // Its transfers took 1.7 s in calls of 0.4 s: several were under way at once.
    assert_eq!(order(vec![Comm { figures: way(), busy: 400 * MS, ..late() }]), ["late", "way"]);
    let of_one_each = vec![late(), Comm { figures: way(), busy: 2000 * MS, ..ring(4, |_, _| 2) }];
    assert_eq!(order(of_one_each), ["way", "late"]);
}

#[test]
fn a_rank_that_is_always_late_is_named_beside_another_that_is_a_little_less_so() {
    for ranks in [4, 8] {
        let mut comm = ring(ranks, |_, _| 2);
        comm.bound = Some(0);
        for number in 0..96 {
            let by = |rank: i32| match rank {
                0 => 10_000_000,
                1 => 6_000_000,
                other => 10_000 * other as u64,
            };
            let arrivals = (0..ranks).map(|rank| (rank, 50_000_000 * (number + 1) + by(rank)));
            comm.arrivals.insert((Name::new(b"AllReduce"), number), arrivals.collect());
        }
        assert!(comm.late_ranks().expect("it is always the last").1.starts_with("rank 0 (host) comes late"), "{ranks}");
    }
}

/// Numbers below 2^31, the same ones in each run.
fn chance(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    }
}

/// `count` collectives of `ranks` ranks, some five milliseconds apart; `delay(rank)` returns how late a rank is to the
/// next one.
fn delayed(ranks: i32, count: u64, mut delay: impl FnMut(i32) -> u64) -> Comm {
    let mut comm = ring(ranks, |_, _| 2);
    comm.bound = Some(0);
    let mut now = 0;
    for number in 0..count {
        let arrivals: Vec<(i32, u64)> = (0..ranks).map(|rank| (rank, now + delay(rank))).collect();
        now = arrivals.iter().map(|&(_, when)| when).max().unwrap_or(now) + 5_000_000;
        comm.arrivals.insert((Name::new(b"AllReduce"), number), arrivals);
    }
    comm
}

/// Mostly short, sometimes many times as long: nanoseconds with this mean, spread as waits are.
fn spread(random: &mut impl FnMut() -> u64, mean: f64) -> u64 {
    (-((random() as f64 + 0.5) / f64::from(1_u32 << 31)).ln() * mean) as u64
}

/// A machine with too few processors: now and then a rank has none for several collectives, and is milliseconds late to
/// each. In so many runs of a hundred the report names a rank.
fn named_on_a_busy_machine(ranks: i32, count: u64) -> f64 {
    const RUNS: u64 = 400;
    let mut random = chance(u64::from(ranks as u32) + count);
    let mut run = || {
        let mut waits = vec![0_u64; ranks as usize];
        let comm = delayed(ranks, count, |rank| {
            let wait = &mut waits[rank as usize];
            *wait = match *wait {
                0 if random().is_multiple_of(20) => 1 + spread(&mut random, 6.0),
                left => left.saturating_sub(1),
            };
            spread(&mut random, 40e3) + if *wait > 0 { spread(&mut random, 3e6) } else { 0 }
        });
        u64::from(comm.late_ranks().is_some())
    };
    100.0 * (0..RUNS).map(|_| run()).sum::<u64>() as f64 / RUNS as f64
}

/// As a machine with five times the processes that it has processors for was seen to do it: 178 of 228, by 400 to 700
/// µs.
#[test]
fn of_two_ranks_one_that_is_mostly_later_than_the_other_is_at_times_is_not_named() {
    assert_eq!(arrivals(96, |number| if number % 9 < 2 { (1, 400_000) } else { (0, 700_000) }).late_ranks(), None);
    assert!(arrivals(96, |number| if number % 9 < 2 { (1, 300_000) } else { (0, 700_000) }).late_ranks().is_some());
}

#[test]
fn on_a_busy_machine_hardly_anybody_is_named() {
    for ranks in [2, 3, 4, 8] {
        for (count, most) in [(24, 2.0), (48, 1.0), (64, 2.0), (96, 1.0), (192, 0.0)] {
            let named = named_on_a_busy_machine(ranks, count);
            assert!(named <= most, "{ranks} ranks, {count} collectives: {named} in a hundred");
        }
    }
}

/// Each of the others is late by chance to one collective in twenty, and then often later than the rank that always is.
#[test]
fn a_rank_that_is_always_late_is_named_among_others_that_sometimes_are() {
    for (ranks, count, least) in [(2, 12, 95), (2, 96, 99), (3, 96, 99), (4, 64, 99), (4, 192, 99)] {
        let mut random = chance(7);
        let mut run = || {
            let comm = delayed(ranks, count, |rank| {
                let odd = match rank {
                    0 => 2_500_000 + spread(&mut random, 500e3),
                    _ if random().is_multiple_of(20) => spread(&mut random, 3e6),
                    _ => 0,
                };
                odd + spread(&mut random, 40e3)
            });
            usize::from(comm.late_ranks().is_some_and(|told| told.1.starts_with("rank 0 (host) comes late")))
        };
        let named = (0..100).map(|_| run()).sum::<usize>();
        assert!(named >= least, "{ranks} ranks, {count} collectives: {named} in a hundred");
    }
}

/// Which rank of four is the last is chance, and how late it is: none is named in 10,000 runs.
#[test]
fn of_ranks_that_are_late_by_chance_none_is_named() {
    let mut random = chance(1);
    for run in 0..10_000 {
        let lasts: Vec<(i32, u64)> = (0..96).map(|_| ((random() % 4) as i32, 500_000 + random() % 4_000_000)).collect();
        assert_eq!(four(|number| lasts[number as usize]).late_ranks(), None, "run {run}");
    }
}
