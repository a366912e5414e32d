//! The time limits of attempts to connect. All of them follow the path's round trip where it is known, and grow from
//! attempt to attempt where it is not.
//!
//! An attempt that is too short for the path never succeeds: its socket is closed before the answer arrives. An attempt
//! that is too long wastes time on a path that leads nowhere, while another path would work.

use std::time::Duration;

/// How long a stranger may take to prove itself, on a path of an ordinary length.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// The limit of one attempt on a path of ordinary length, when another will follow. Within this time Linux repeats its
/// first packet once.
pub(crate) const TRY: Duration = Duration::from_secs(2);

/// The longest try on a path of unknown length. It covers a round trip of [`ROUND_TRIP_MAX`], and a first packet that
/// is lost and repeated after 1 s, 2 s and 4 s.
const LONGEST: Duration = Duration::from_secs(8);

/// The longest round trip that is supported (`LONGEST`).
pub(crate) const ROUND_TRIP_MAX: Duration = Duration::from_secs(3);

/// The first attempt if there are several paths. Connecting takes well below a millisecond in a data centre, and a few
/// of these attempts fit into the time that the receiving side waits.
const QUICK: Duration = Duration::from_millis(150);

/// An attempt to connect over a path of unknown length, after this many others over `paths` paths in turn.
pub(crate) fn first(tries: u32, paths: usize) -> Duration {
    let (least, round) = if paths > 1 { (QUICK, tries / paths as u32) } else { (TRY, tries) };
    (least * (1 << round.min(6))).min(LONGEST)
}

/// An attempt to reconnect. `hurry`: no stream is connected, or possibly none; then each of several paths gets a
/// moment, and twice as long in the next round.
pub(crate) fn again(tries: u32, paths: usize, hurry: bool, round_trip: Duration) -> Duration {
    let round = tries / paths.max(1) as u32;
    // After eight attempts over each path, the path may have become longer.
    let most = TRY * (1 << (round / 8).min(2));
    let least = if hurry { (QUICK * (1 << round.min(6))).min(most) } else { most };
    // An answer takes one round trip; one lost packet is repeated after as long again.
    least.max(round_trip * 3)
}

/// The limit of the handshake on a connection whose round trip has been measured: two round trips, and a lost packet.
/// Linux repeats a lost packet after three round trips where it has measured only one.
pub(crate) fn handshake(least: Duration, round_trip: Duration) -> Duration {
    least.max(round_trip * 5)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tries_over_an_unknown_path_grow_until_the_longest_round_trip_fits() {
        let seconds = |paths| (0..5).map(|tries| first(tries * paths as u32, paths).as_millis()).collect::<Vec<_>>();
        assert_eq!(seconds(1), [2000, 4000, 8000, 8000, 8000]);
        assert_eq!(seconds(2), [150, 300, 600, 1200, 2400]);
        assert_eq!(first(1000, 2), LONGEST);
        assert!(LONGEST > ROUND_TRIP_MAX + Duration::from_secs(4));
    }

    #[test]
    fn over_a_short_path_a_try_to_connect_again_is_as_short_as_ever() {
        let near = Duration::from_micros(50);
        assert_eq!(again(0, 1, false, near), TRY);
        assert_eq!(again(0, 2, true, near), QUICK);
        assert_eq!(again(2, 2, true, near), QUICK * 2);
        // A path whose round trip has become longer.
        assert_eq!(again(1000, 1, false, near), LONGEST);
    }

    proptest! {
        #[test]
        fn every_try_over_a_known_path_can_be_answered(
            tries in 0..10_000_u32, paths in 1..16_usize, hurry: bool, ms in 0..3000_u64,
        ) {
            let round_trip = Duration::from_millis(ms);
            prop_assert!(again(tries, paths, hurry, round_trip) >= round_trip * 2);
            prop_assert!(handshake(TRY, round_trip) >= round_trip * 4);
        }
    }
}
