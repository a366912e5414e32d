use super::*;
use proptest::prelude::*;

fn at(number: u64) -> Ticks {
    Ticks::from_number(1_000_000 + number * 10_000).expect("not 0")
}

fn begun(send: bool) -> Transfer {
    let mut transfer = Transfer { is_followed: true, details: true, ..Transfer::default() };
    transfer.begin(NonNull::dangling(), send, send.then(|| at(0)));
    transfer
}

fn chunk(offset: u64, length: u64, total: u64) -> Chunk {
    Chunk { offset, length, total, ..Chunk::default() }
}

fn take(transfer: &mut Transfer, kind: Kind, chunk: Chunk, began: u64, now: u64) {
    transfer.take(&Note { slot: 0, part: 0, kind, chunk, began: at(began), now: at(now) });
}

fn begins(transfer: &mut Transfer, chunk: Chunk) {
    take(transfer, Kind::Begins, chunk, 1, 1);
}

fn ends(transfer: &mut Transfer, offset: u64, path: u16) {
    take(transfer, Kind::Ends, Chunk { offset, path, ..Chunk::default() }, 2, 2);
}

/// A chunk waited as many nanoseconds as that many steps of [`at`]; returns one step.
fn waits(transfer: &mut Transfer, offset: u64, path: u16, steps: u64) -> u64 {
    take(transfer, Kind::Waited, Chunk { offset, path, ..Chunk::default() }, 0, steps);
    at(1).nanoseconds_since(at(0))
}

fn lengths(transfer: &Transfer) -> Vec<u64> {
    transfer.pieces.iter().map(|piece| piece.chunk).filter(|chunk| !chunk.again).map(|chunk| chunk.length).collect()
}

proptest! {
    #[test]
    fn pieces_add_up_to_the_size_whatever_was_seen_of_them(
        chunks in prop::collection::vec((1u64..1_000, 0u8..5), 0..40),
        (shuffle, send, details) in any::<(u64, bool, bool)>(),
    ) {
        // Cuts a message, and reports its chunks in some order: not at all, begun only, begun and ended, begun twice,
        // over.
        let mut end = 0;
        let total: u64 = chunks.iter().map(|(length, _)| length).sum();
        let mut seen: Vec<_> = chunks
            .iter()
            .map(|&(length, how)| {
                end += length;
                (chunk(end - length, length, total), how)
            })
            .collect();
        seen.sort_by_key(|(chunk, _)| (chunk.offset ^ shuffle).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut transfer = begun(send);
        transfer.details = details;
        for (chunk, how) in seen {
            if how == 4 {
                take(&mut transfer, Kind::Over, chunk, 1, 2);
                continue;
            }
            for again in 0..how {
                begins(&mut transfer, Chunk { again: again == 2, ..chunk });
            }
            if how == 2 {
                ends(&mut transfer, chunk.offset, 0);
            }
        }
        transfer.end(total, at(9));
        let lengths = lengths(&transfer);
        prop_assert!((1..=MOST).contains(&lengths.len()), "{lengths:?}");
        prop_assert_eq!(lengths.iter().sum::<u64>(), total);
        prop_assert!(lengths.iter().all(|length| *length > 0 || total == 0));
        prop_assert!(transfer.pieces.iter().all(|piece| piece.ended.is_some()));
        let most = if details { 2 * MOST } else { MOST };
        prop_assert!(transfer.pieces.len() <= most);
    }
}

#[test]
fn the_eighth_piece_stands_for_the_rest_and_ends_with_the_transfer() {
    let mut transfer = begun(true);
    for offset in 0..20 {
        begins(&mut transfer, chunk(offset, 1, 20));
        ends(&mut transfer, offset, 0);
    }
    assert_eq!(lengths(&transfer), [1, 1, 1, 1, 1, 1, 1, 13]);
    assert_eq!(transfer.pieces.iter().filter(|piece| piece.ended.is_some()).count(), 7);
    transfer.end(20, at(3));
    assert!(transfer.pieces.iter().all(|piece| piece.ended.is_some()));
}

#[test]
fn without_an_offset_a_chunk_ends_by_its_path_and_leaves_the_others_and_the_rest() {
    let mut transfer = begun(true);
    for path in 0..10 {
        begins(&mut transfer, Chunk { path, ..chunk(path.into(), 1, 10) });
    }
    // The eighth took path 7, and stands for 8 and 9 as well.
    for path in [3, 7, 9] {
        ends(&mut transfer, SOMEWHERE, path);
    }
    let ended: Vec<_> =
        transfer.pieces.iter().filter(|piece| piece.ended.is_some()).map(|piece| piece.chunk.path).collect();
    assert_eq!(ended, [3]);
}

#[test]
fn the_last_of_many_shares_stands_for_those_that_are_not_noted() {
    // The notes of a receiver over sixteen queue pairs: seven shares, and the last one, with which the size is known.
    let share = |number: u64| Chunk {
        total: 10 * (number + 1),
        path: number as u16,
        wr_id: 50 + number,
        ..chunk(SOMEWHERE, 10, 0)
    };
    for turn in 0..8 {
        let mut transfer = begun(false);
        let mut noted = [0, 1, 2, 3, 4, 5, 6, 15];
        noted.rotate_left(turn);
        noted.iter().for_each(|number| take(&mut transfer, Kind::Over, share(*number), 1, 1));
        transfer.end(160, at(3));
        let reported: Vec<_> = transfer.pieces.iter().map(|piece| (piece.chunk.length, piece.chunk.wr_id)).collect();
        let expected: Vec<_> = (0..8).map(|k| (if k < 7 { 10 } else { 90 }, 50 + noted[k])).collect();
        assert_eq!(reported, expected);
    }
}

#[test]
fn what_is_noted_of_chunks_when_they_are_over_makes_the_same_pieces_as_their_beginnings_and_ends() {
    let part = |at: u64| Chunk { path: at as u16 % 4, ..chunk(at, 1, 20) };
    let (mut early, mut late) = (begun(true), begun(true));
    for number in 0..20 {
        take(&mut early, Kind::Begins, part(number), 5 + number, 5 + number);
    }
    for number in 0..20 {
        for transfer in [&mut early, &mut late] {
            waits(transfer, number, part(number).path, 100 + number);
        }
    }
    for number in 0..20 {
        take(&mut early, Kind::Ends, part(number), 100 + number, 100 + number);
    }
    // The first to leave is not the first that is acknowledged, and others that leave later are acknowledged after it.
    for number in [3, 0, 2, 1].into_iter().chain(4..20) {
        take(&mut late, Kind::Over, part(number), 5 + number, 100 + number);
    }
    let reported = [early, late].map(|mut transfer| {
        // Between lists there is no order.
        take(&mut transfer, Kind::Ready, Chunk::default(), 3, 3);
        transfer.end(20, at(200));
        let all = |wait: fn(&Piece) -> u64| transfer.pieces.iter().map(wait).sum::<u64>();
        let sums =
            [all(|piece| piece.waits.receiver), all(|piece| piece.waits.socket), all(|piece| piece.waits.credit)];
        let mut alone: Vec<_> = transfer.pieces.iter().filter(|piece| !piece.rest).collect();
        alone.sort_by_key(|piece| piece.chunk.offset);
        let alone: Vec<_> =
            alone.iter().map(|piece| (piece.chunk, piece.began, piece.ended, piece.waits.socket)).collect();
        (sums, lengths(&transfer).len(), alone)
    });
    assert_eq!(reported[0], reported[1]);
    let ns = |steps| at(steps).nanoseconds_since(at(0));
    let ([receiver, _, credit], count, alone) = &reported[0];
    assert_eq!((*receiver, *credit, *count, alone.len()), (ns(3), ns(2), MOST, MOST - 1));
}

#[test]
fn a_chunk_that_is_over_after_it_was_sent_again_ends_both() {
    let mut transfer = begun(true);
    let all = chunk(0, 10, 10);
    begins(&mut transfer, all);
    begins(&mut transfer, Chunk { again: true, path: 3, ..all });
    take(&mut transfer, Kind::Over, all, 1, 2);
    let pieces = |transfer: &Transfer| -> Vec<_> {
        transfer.pieces.iter().map(|p| (p.chunk.again, p.retransmissions, p.ended.is_some())).collect()
    };
    assert_eq!(pieces(&transfer), [(false, 1, true), (true, 0, true)]);
    transfer.end(10, at(3));
    assert_eq!(lengths(&transfer), [10]);
    // The reader may find the note of the resend first, or last.
    for order in [[0, 1], [1, 0]] {
        let mut transfer = begun(true);
        for which in order {
            match which {
                0 => take(&mut transfer, Kind::Over, all, 1, 2),
                _ => begins(&mut transfer, Chunk { again: true, path: 3, ..all }),
            }
        }
        transfer.end(10, at(3));
        assert_eq!(pieces(&transfer), [(false, 1, true), (true, 0, true)]);
    }
}

#[test]
fn shares_of_a_size_that_becomes_known_with_them_are_told_in_any_order() {
    // The notes of a receiver over queue pairs: each has the size so far, not the offset.
    let share = |number: u64| Chunk {
        total: 10 * (number + 1),
        path: number as u16,
        wr_id: 50 + number,
        ..chunk(SOMEWHERE, 10, 0)
    };
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
        let mut transfer = begun(false);
        order.iter().for_each(|number| take(&mut transfer, Kind::Over, share(*number), 1, 1));
        transfer.end(40, at(3));
        let reported: Vec<_> = transfer.pieces.iter().map(|piece| (piece.chunk.length, piece.chunk.wr_id)).collect();
        assert_eq!(reported, order.map(|number| (10, 50 + number)));
    }
}

#[test]
fn shares_of_which_the_place_is_not_known_are_never_the_same() {
    let share = |path: u16| Chunk { path, total: 10 + u64::from(path) * 10, ..chunk(SOMEWHERE, 10, 0) };
    let mut transfer = begun(false);
    begins(&mut transfer, share(0));
    begins(&mut transfer, share(1));
    ends(&mut transfer, SOMEWHERE, 0);
    ends(&mut transfer, SOMEWHERE, 1);
    transfer.end(20, at(3));
    let reported: Vec<_> = transfer.pieces.iter().map(|piece| (piece.chunk.path, piece.retransmissions)).collect();
    assert_eq!(reported, [(0, 0), (1, 0)]);
}

#[test]
fn eight_chunks_need_no_piece_for_a_rest() {
    let mut transfer = begun(true);
    for offset in 0..8 {
        begins(&mut transfer, chunk(offset, 1, 8));
        ends(&mut transfer, offset, 0);
    }
    assert!(transfer.pieces.iter().all(|piece| piece.ended.is_some() && !piece.rest));
}

#[test]
fn a_wait_is_told_of_the_chunks_own_piece_and_of_the_rest_only_without_one() {
    let mut transfer = begun(true);
    let part = |offset| chunk(offset, 1, 20);
    for offset in 0..20 {
        begins(&mut transfer, part(offset));
    }
    waits(&mut transfer, 2, 0, 100);
    waits(&mut transfer, 7, 0, 10);
    waits(&mut transfer, 15, 0, 1);
    begins(&mut transfer, Chunk { again: true, path: 3, ..part(3) });
    let step = waits(&mut transfer, 3, 3, 1000);
    transfer.end(20, at(2000));
    let reported: Vec<_> = transfer.pieces.iter().map(|piece| (piece.waits.socket + step / 2) / step).collect();
    assert_eq!(reported, [0, 0, 100, 0, 0, 0, 0, 11, 1000]);
}

#[test]
fn what_is_told_as_one_has_the_waits_of_all_its_chunks_also_beside_one_that_travelled_again() {
    let mut transfer = begun(true);
    let step = [(0, 1), (10, 10), (20, 100)].map(|(offset, steps)| waits(&mut transfer, offset, 0, steps))[0];
    let lost = chunk(20, 10, 30);
    begins(&mut transfer, lost);
    begins(&mut transfer, Chunk { again: true, path: 3, ..lost });
    take(&mut transfer, Kind::Over, Chunk { joined: true, path: 2, ..chunk(0, 20, 30) }, 1, 3);
    ends(&mut transfer, 20, 0);
    transfer.end(30, at(5));
    let reported: Vec<_> = transfer
        .pieces
        .iter()
        .map(|piece| (piece.chunk.again, piece.chunk.length, (piece.waits.socket + step / 2) / step))
        .collect();
    assert_eq!(reported, [(false, 10, 100), (true, 10, 0), (false, 20, 11)]);
}

#[test]
fn a_resend_is_a_piece_of_its_own_and_counts_in_the_one_it_repeats() {
    let mut transfer = begun(true);
    let all = chunk(0, 10, 10);
    begins(&mut transfer, all);
    begins(&mut transfer, Chunk { again: true, path: 3, ..all });
    ends(&mut transfer, 0, 0);
    let pieces: Vec<_> = transfer
        .pieces
        .iter()
        .map(|piece| (piece.chunk.again, piece.chunk.path, piece.retransmissions, piece.ended.is_some()))
        .collect();
    assert_eq!(pieces, [(false, 0, 1, true), (true, 3, 0, true)]);
    assert_eq!(lengths(&transfer), [10]);
}

#[test]
fn a_receiver_counts_a_chunk_that_begins_a_second_time() {
    let mut transfer = begun(false);
    for path in [0, 3] {
        begins(&mut transfer, Chunk { path, ..chunk(0, 10, 30) });
    }
    let pieces: Vec<_> = transfer.pieces.iter().map(|piece| (piece.chunk.path, piece.retransmissions)).collect();
    assert_eq!(pieces, [(3, 1)]);
}
