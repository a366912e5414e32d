//! The limit for damaged chunks: a chunk that arrives damaged is resent, but not for ever.
//!
//! Bits that flip at random do not hit the same chunk twice. If a chunk arrives damaged again and again, there is
//! broken hardware on its path, or an attacker who modifies the traffic: further attempts would only hide it.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::counters::Counters;
use crate::os::error::Error;
use crate::os::log::{Limiter, NET};
use crate::session::peer::{Broken, Peer};

/// How often the same chunk may arrive damaged within [`MEMORY`].
pub(crate) const SAME: u32 = 8;
/// How long damage is remembered.
const MEMORY: Duration = Duration::from_secs(60);
/// How many chunks are remembered, at most; more than that within [`MEMORY`] also exceed the limit.
const CHUNKS: usize = 256;

/// Where damage was found: tag, order and offset of the chunk, or None for a header.
pub(crate) type Place = Option<(i32, u64, u64)>;

/// What has arrived damaged recently on one connection.
#[derive(Debug, Default)]
pub(crate) struct Damage(Mutex<Lately>);

static REPORTED: Limiter = Limiter::new();

impl Damage {
    /// Something arrived damaged: counts and logs it, and decides how to go on. With recovery the stream is reconnected
    /// and what was lost is resent; without recovery, or when it happens again and again, the connection ends.
    pub(crate) fn met(&self, place: Place, recovery: bool, peer: &Peer, counters: &Counters) -> Broken {
        Counters::bump(&counters.damaged);
        let borne = self.0.lock().unwrap_or_else(PoisonError::into_inner).bear(place, Instant::now());
        if recovery && borne {
            REPORTED.tell(|more| {
                tracing::warn!(target: NET, "data from {peer} arrived damaged or was changed on its way; it travels again{more}");
            });
            return Broken::Lost(io::Error::new(io::ErrorKind::InvalidData, "data arrived damaged"));
        }
        let hint = if recovery {
            "that happened again and again: look for a failing network card, cable, switch or memory, or a middlebox"
        } else {
            "with TOWLINE_RECOVERY=1 it would travel again; look for a failing network card, cable, switch or memory"
        };
        let what = "data arrived damaged or was changed on its way (its checksum or tag is wrong)";
        Broken::Fatal(Error::remote(what).with_hint(hint))
    }
}

#[derive(Debug, Default)]
struct Lately(HashMap<Place, (u32, Instant)>);

impl Lately {
    /// Something arrived damaged. Returns whether that is still within the limit.
    fn bear(&mut self, place: Place, now: Instant) -> bool {
        self.0.retain(|_, (_, last)| now.duration_since(*last) < MEMORY);
        let (count, last) = self.0.entry(place).or_insert((0, now));
        *count += 1;
        *last = now;
        *count < SAME && self.0.len() < CHUNKS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_chunk_again_and_again_is_too_much() {
        let mut damage = Lately::default();
        let start = Instant::now();
        for _ in 1..SAME {
            assert!(damage.bear(Some((0, 7, 128)), start));
            assert!(damage.bear(None, start));
        }
        assert!(damage.bear(Some((0, 7, 256)), start), "another chunk");
        assert!(!damage.bear(Some((0, 7, 128)), start));
    }

    #[test]
    fn old_damage_is_forgotten() {
        let mut damage = Lately::default();
        let start = Instant::now();
        for hour in 0..100 {
            assert!(damage.bear(None, start + Duration::from_secs(3600 * hour)));
        }
        assert_eq!(damage.0.len(), 1);
    }

    #[test]
    fn very_many_damaged_chunks_are_too_much_and_memory_is_bounded() {
        let mut damage = Lately::default();
        let start = Instant::now();
        let borne = (0..10_000).take_while(|order| damage.bear(Some((0, *order, 0)), start)).count();
        assert_eq!(borne, CHUNKS - 1);
    }
}
