//! The two cores against each other, without sockets: a seed decides everything that a network, and a peer, may do.
//!
//! | file | holds |
//! |---|---|
//! | this one | the games: which events may happen, and what must result |
//! | `world` | both cores, and what `sender` and `receiver` do around them, without sockets |
//! | `line` | one direction of a stream with checksums or encryption, with real bytes |
//! | `ledger` | the planned messages, the arrived bytes, and their checks |
//! | `link` | both cores as a connection, for the simulation of one-sided operations |
//!
//! A failure names its seed; `TOWLINE_SIM_FIRST=<seed> TOWLINE_SIM_SEEDS=1` replays it. `TOWLINE_SIM_SEEDS` sets how
//! many seeds each game plays.

mod ledger;
mod line;
pub(crate) mod link;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::os::error::Result;
use world::{Mischief, World};

/// xorshift64*: enough to wander, and the same everywhere.
struct Dice(u64);

impl Dice {
    fn of(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) % below
    }
}

/// Plays one seed. `Ok(true)`: everything arrived; `Ok(false)`: it did not within the steps; an error: one side refused
/// a frame.
fn play(seed: u64, mischief: Mischief) -> Result<(World, bool)> {
    let mut world = World::new(seed, mischief)?;
    for _ in 0..200_000_u64 {
        if world.ledger.is_over() {
            return Ok((world, true));
        }
        world.step()?;
    }
    Ok((world, false))
}

/// Streams deliver in order, but at any time relative to each other. Frames are written in parts. Streams stall, are
/// cut in the middle of a frame with anything on the way, notice the cut late, are fenced and reconnect, sometimes at
/// the second try. Each message ends once on both sides, with its size; each of its bytes is placed exactly once;
/// nothing hangs; nothing is refused.
fn an_honest_game(seed: u64) {
    let settled = play(seed, Mischief::None).and_then(|(mut world, over)| {
        assert!(over, "it hangs; {}", world.describe());
        world.check_settled()
    });
    settled.unwrap_or_else(|error| panic!("refused: {error}"));
}

/// Nothing arrives for a while. Meanwhile the sender tries to connect further streams again and again, and the first
/// one ends or still seems to work. Afterwards everything arrives.
fn a_game_with_an_outage(seed: u64) {
    let settled = play(seed, Mischief::Outage).and_then(|(mut world, over)| {
        assert!(over, "it hangs; {}", world.describe());
        world.check_settled()
    });
    settled.unwrap_or_else(|error| panic!("refused: {error}"));
}

/// Streams have checksums or are encrypted, and the network changes a bit now and then. That ends the stream before
/// anything of the frame counts, and everything arrives all the same.
fn a_game_with_damaged_frames(seed: u64) {
    let encrypted = seed.is_multiple_of(2);
    let settled = play(seed, Mischief::Damage { encrypted }).and_then(|(mut world, over)| {
        assert!(over, "it hangs; {}", world.describe());
        world.check_settled()
    });
    settled.unwrap_or_else(|error| panic!("refused: {error}"));
}

/// The network repeats data frames, on any stream. Neither side may take the same bytes twice (the ledger checks that).
/// Once all frames on the way have arrived, one side has refused the repeated frame, unless that frame was lost itself.
fn a_game_with_repeated_frames(seed: u64) {
    if let Ok((mut world, _)) = play(seed, Mischief::Repeat)
        && world.repeats_taken > 0
        && !world.was_cut
    {
        assert!(world.drain().is_err(), "a repeated frame went unnoticed");
    }
}

/// The peer is hostile: it changes any field of any frame, and invents frames. There is no promise that anything
/// arrives. But no byte is placed outside its receive, over another one or after the end (the ledger checks that). No
/// request ends twice, and nothing panics. Memory stays bounded (the world checks that at each step).
fn a_hostile_game(seed: u64) {
    let _ = play(seed, Mischief::Anything);
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// How many seeds are played of each game.
const SEEDS: u64 = 20_000;

/// Plays one in `one_in` of this many seeds on all cores, and names the first that fails.
pub(crate) fn play_all(one_in: u64, game: fn(u64)) {
    let first = setting("TOWLINE_SIM_FIRST", 1);
    let end = first + (setting("TOWLINE_SIM_SEEDS", SEEDS) / one_in).max(1);
    let next = AtomicU64::new(first);
    let players = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..players {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    if let Err(panic) = std::panic::catch_unwind(|| game(seed)) {
                        next.store(end, Ordering::Relaxed);
                        panic!("seed {seed}: {}", crate::engine::poller::panic_text(panic.as_ref()));
                    }
                }
            });
        }
    });
}

#[test]
fn every_message_arrives_once_whatever_the_network_does() {
    play_all(1, an_honest_game);
}

#[test]
fn every_message_arrives_once_after_an_outage_while_streams_join() {
    play_all(4, a_game_with_an_outage);
}

#[test]
fn a_repeated_frame_ends_in_an_error_never_in_wrong_bytes() {
    play_all(1, a_game_with_repeated_frames);
}

#[test]
fn a_hostile_peer_never_makes_a_byte_land_in_the_wrong_place() {
    play_all(1, a_hostile_game);
}

/// Fewer seeds than the others: here every byte is really made, sealed and opened.
#[test]
fn what_is_damaged_on_a_protected_stream_never_counts_and_travels_again() {
    play_all(300, a_game_with_damaged_frames);
}
