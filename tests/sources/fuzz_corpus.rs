//! The fuzz targets without a fuzzer: what the kept corpus reaches, and inputs made from it by chance, for a moment
//! each. `TOWLINE_FUZZ_SECONDS` sets how long; `tests/fuzz/run.sh` runs the real thing.

#[path = "../fuzz/src/lib.rs"]
#[allow(unreachable_pub, dead_code, reason = "a package of its own, for which this is only a visit")]
mod fuzz;

use std::path::Path;
use std::time::{Duration, Instant};

/// Plays every input of the corpus, then changed ones.
fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
    let mut files: Vec<_> = std::fs::read_dir(&folder).expect("the corpus").map(|file| file.unwrap().path()).collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    assert!(corpus.len() > 3, "the corpus of {target} is there");
    let play = |name: &dyn std::fmt::Display, input: &[u8]| {
        if std::panic::catch_unwind(|| run(input)).is_err() {
            panic!("{target}, {name}: {input:?}");
        }
    };
    for (file, input) in files.iter().zip(&corpus) {
        play(&file.display(), input);
    }
    let seconds = std::env::var("TOWLINE_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2.0);
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut seed = 0_u64;
    while Instant::now() < end {
        seed += 1;
        play(&format!("seed {seed}"), &changed(seed, &corpus));
    }
}

/// Two inputs of the corpus joined, and a few bytes changed.
fn changed(seed: u64, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut roll = |below: usize| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % below.max(1)
    };
    let (first, second) = (&corpus[roll(corpus.len())], &corpus[roll(corpus.len())]);
    let mut input = first[..roll(first.len() + 1)].to_vec();
    input.extend_from_slice(&second[roll(second.len() + 1)..]);
    for _ in 0..roll(5) {
        let at = roll(input.len());
        if let Some(byte) = input.get_mut(at) {
            *byte = roll(256) as u8;
        }
    }
    input
}

#[test]
fn no_connection_handle_breaks_the_decoder() {
    replay("handle", fuzz::handle::run);
}

#[test]
fn no_handshake_is_believed_without_a_proof() {
    replay("handshake", fuzz::handshake::run);
}

#[test]
fn no_sequence_of_frames_makes_a_byte_land_in_the_wrong_place() {
    replay("frames", fuzz::frames::run);
}

#[test]
fn no_sequence_of_calls_crashes_hangs_or_touches_freed_memory() {
    // One after the other: a changed id of one could be right for the other.
    replay("setup", fuzz::setup::run);
    replay("calls", fuzz::calls::run);
}
