//! Both directions against each other: sealed bytes can be opened, whatever pieces they arrive in, and no other bytes
//! can.

use proptest::prelude::*;

use super::agreement::StreamKey;
use super::codec::testing::encrypted_pair;
use super::codec::{Opener, Refused, Sealed, Sealer};
use super::intake::{Intake, Item};
use super::*;
use crate::session::frame::{HEADER, Header, Type};
use crate::session::handshake::{FEATURE_RECOVERY, agreed};
use crate::session::wire::Piece;

#[derive(Debug, Clone)]
enum Said {
    Chunk(Vec<u8>),
    Control,
    Fail(Vec<u8>),
}

fn said() -> impl Strategy<Value = Said> {
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..20_000).prop_map(Said::Chunk),
        proptest::collection::vec(any::<u8>(), 0..60).prop_map(Said::Chunk),
        Just(Said::Control),
        proptest::collection::vec(any::<u8>(), 0..100).prop_map(Said::Fail),
    ]
}

fn header(what: &Said, number: usize) -> Header {
    let order = number as u64;
    match what {
        Said::Chunk(bytes) => {
            let length = bytes.len() as u32;
            Header { length, total: u64::from(length), order, ..Header::of(Type::Data, 3) }
        }
        Said::Control => Header { order, ..Header::of(Type::Clear, 3) },
        Said::Fail(text) => Header { length: text.len() as u32, order, ..Header::of(Type::Fail, 3) },
    }
}

fn payload(what: &Said) -> &[u8] {
    match what {
        Said::Chunk(bytes) | Said::Fail(bytes) => bytes,
        Said::Control => &[],
    }
}

fn put(wire: &mut Vec<u8>, sealed: &Sealed) {
    let start = wire.len();
    for piece in sealed.rest(0) {
        // SAFETY: the payload lives in the caller's list.
        wire.extend_from_slice(unsafe { piece.bytes() });
    }
    assert_eq!(wire.len() - start, sealed.length());
    // The rest follows, however much was already sent.
    for sent in [1, HEADER - 1, HEADER, HEADER + 1, sealed.length() - 1] {
        let mut rest = Vec::new();
        for piece in sealed.rest(sent) {
            // SAFETY: as above.
            rest.extend_from_slice(unsafe { piece.bytes() });
        }
        if sent <= sealed.length() {
            assert_eq!(rest, wire[start + sent..], "after {sent} bytes");
        }
    }
}

fn seal(sealer: &mut Sealer, all: &[Said]) -> Vec<u8> {
    let mut wire = Vec::new();
    for (number, what) in all.iter().enumerate() {
        let header = header(what, number).encode();
        match what {
            Said::Chunk(bytes) => {
                // SAFETY: the bytes live in the list.
                let sealed = unsafe { sealer.chunk(header, Piece::of(bytes)) };
                put(&mut wire, &sealed);
                sealer.sent(sealed);
            }
            Said::Control | Said::Fail(_) => {
                let mut frame = [&header[..], payload(what)].concat();
                sealer.control(&mut frame);
                wire.extend(frame);
            }
        }
    }
    wire
}

/// Feeds the bytes in pieces of the given sizes, in turn. Returns what came out, and how it ended.
fn open(opener: Opener, wire: &[u8], pieces: &[usize]) -> (Vec<(Header, Vec<u8>)>, Option<Refused>) {
    let mut intake = Intake::new(opener);
    let mut out = Vec::new();
    let mut begun = None;
    let mut rest = wire;
    for size in pieces.iter().cycle() {
        loop {
            match intake.take() {
                Ok(None) => break,
                Ok(Some(Item::Began(header))) => assert!(begun.replace(header).is_none(), "one frame at a time"),
                Ok(Some(Item::Whole(header, bytes))) => {
                    assert_eq!(begun.take(), Some(header), "a frame begins before it ends");
                    out.push((header, bytes.to_vec()));
                }
                Err(refused) => return (out, Some(refused)),
            }
        }
        if rest.is_empty() {
            break;
        }
        let room = intake.room();
        let count = room.len().min(*size).min(rest.len());
        assert!(count > 0, "there is always room");
        room[..count].copy_from_slice(&rest[..count]);
        intake.filled(count);
        rest = &rest[count..];
    }
    (out, None)
}

fn key() -> StreamKey {
    StreamKey::from_bytes([7; 32])
}

fn pair(encrypted: bool) -> (Sealer, Opener) {
    // The key changes so often that every run uses several.
    if encrypted { encrypted_pair(&key(), 5) } else { (Sealer::checksum(), Opener::checksum()) }
}

proptest! {
    #[test]
    fn what_was_sealed_is_opened_whatever_pieces_it_comes_in(
        all in proptest::collection::vec(said(), 1..12),
        pieces in proptest::collection::vec(1..9000_usize, 1..8),
        encrypted in any::<bool>(),
    ) {
        let (mut sealer, opener) = pair(encrypted);
        let wire = seal(&mut sealer, &all);
        let (out, refused) = open(opener, &wire, &pieces);
        prop_assert!(refused.is_none());
        prop_assert_eq!(out.len(), all.len());
        for (number, (what, (got, bytes))) in all.iter().zip(&out).enumerate() {
            prop_assert_eq!(*got, header(what, number));
            prop_assert_eq!(&bytes[..], payload(what));
        }
    }

    #[test]
    fn a_flipped_bit_is_noticed_before_its_frame_is_whole(
        all in proptest::collection::vec(said(), 1..6),
        place in any::<prop::sample::Index>(),
        bit in 0..8_u8,
        encrypted in any::<bool>(),
    ) {
        let (mut sealer, opener) = pair(encrypted);
        let mut wire = seal(&mut sealer, &all);
        let at = place.index(wire.len());
        wire[at] ^= 1 << bit;
        let (out, refused) = open(opener, &wire, &[4096]);
        // The text of a failure has no checksum of its own: it moves no data.
        let is_text = !encrypted && all.iter().any(|what| matches!(what, Said::Fail(text) if !text.is_empty()));
        if !is_text {
            prop_assert!(matches!(refused, Some(Refused::Damaged)), "{refused:?}");
        }
        for (got, bytes) in &out {
            let what = &all[got.order as usize];
            prop_assert!(matches!(what, Said::Fail(_)) && !encrypted || payload(what) == &bytes[..]);
        }
    }

    #[test]
    fn a_record_that_is_left_out_repeated_or_moved_is_noticed(
        sizes in proptest::collection::vec(0..300_usize, 2..8),
        first in any::<prop::sample::Index>(),
        second in any::<prop::sample::Index>(),
    ) {
        let all: Vec<Said> = sizes.iter().map(|size| Said::Chunk(vec![1; *size])).collect();
        let (mut sealer, _) = pair(true);
        let frames: Vec<Vec<u8>> = all.iter().map(|what| seal(&mut sealer, std::slice::from_ref(what))).collect();
        let (a, b) = (first.index(frames.len()), second.index(frames.len()));
        let refused = |order: &[usize]| {
            let wire: Vec<u8> = order.iter().flat_map(|at| frames[*at].clone()).collect();
            open(pair(true).1, &wire, &[1000]).1
        };
        let order: Vec<usize> = (0..frames.len()).collect();
        prop_assert!(refused(&order).is_none());
        let mut repeated = order.clone();
        repeated.insert(a + 1, a);
        prop_assert!(matches!(refused(&repeated), Some(Refused::Damaged)));
        if a + 1 < frames.len() {
            let left_out: Vec<usize> = order.iter().copied().filter(|at| *at != a).collect();
            prop_assert!(matches!(refused(&left_out), Some(Refused::Damaged)));
        }
        if a != b {
            let mut moved = order;
            moved.swap(a, b);
            prop_assert!(matches!(refused(&moved), Some(Refused::Damaged)));
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused_and_never_panic(
        wire in proptest::collection::vec(any::<u8>(), 64..400),
        encrypted in any::<bool>(),
    ) {
        let (out, refused) = open(pair(encrypted).1, &wire, &[100]);
        prop_assert!(out.is_empty() && refused.is_some());
    }
}

#[test]
fn nothing_of_an_encrypted_stream_is_readable_and_no_record_looks_like_another() {
    let text = b"the gradients of a secret model, the gradients of a secret model";
    let all = [Said::Chunk(text.to_vec()), Said::Chunk(text.to_vec()), Said::Control, Said::Control];
    let wire = seal(&mut Sealer::encrypted(&key()), &all);
    let all_windows: std::collections::HashSet<&[u8]> = wire.windows(16).collect();
    assert_eq!(all_windows.len(), wire.len() - 15, "no 16 bytes occur twice");
    for (number, what) in all.iter().enumerate() {
        for plain in [&header(what, number).encode()[..], payload(what)] {
            assert!(plain.windows(8).all(|part| !wire.windows(8).any(|seen| seen == part)));
        }
    }
}

#[test]
fn the_two_directions_and_two_keys_do_not_understand_each_other() {
    let wire = seal(&mut Sealer::encrypted(&key()), &[Said::Control]);
    let other = Opener::encrypted(&StreamKey::from_bytes([8; 32]));
    assert!(matches!(open(other, &wire, &[999]).1, Some(Refused::Damaged)));
}

#[test]
fn a_payload_counts_only_behind_its_own_header() {
    let all = [Said::Chunk(vec![1; 200]), Said::Chunk(vec![2; 200])];
    let wire = seal(&mut Sealer::checksum(), &all);
    let (first, second) = wire.split_at(wire.len() / 2);
    let mixed = [&first[..HEADER], &second[HEADER..]].concat();
    assert!(matches!(open(Opener::checksum(), &mixed, &[999]).1, Some(Refused::Damaged)));
}

#[test]
fn a_chunk_that_claims_to_be_huge_is_refused_before_memory_is_taken_for_it() {
    let length = intake::LARGEST + 1;
    let huge = Header { length, total: u64::from(length), ..Header::of(Type::Data, 0) };
    assert!(matches!(open(Opener::checksum(), &huge.encode(), &[999]).1, Some(Refused::Wrong(_))));
}

#[test]
fn the_checksum_is_on_when_either_side_asks_and_encryption_takes_its_place() {
    let (sum, enc) = (FEATURE_CHECKSUM, FEATURE_ENCRYPTION);
    assert_eq!(agreed(0, 0), 0);
    assert_eq!(agreed(sum, 0), sum);
    assert_eq!(agreed(0, sum), sum);
    assert_eq!(agreed(sum | enc, sum | enc), enc);
    // The answer to a mismatch shows whether this side has a key.
    assert_eq!(agreed(enc, 0), 0);
    assert_eq!(agreed(0, enc), enc);
    assert_eq!(agreed(FEATURE_RECOVERY, FEATURE_RECOVERY), 0, "not this module's");
}
